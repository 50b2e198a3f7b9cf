"""Verdicts as a table of `docs/support.md`, and what changed between two runs."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from support import FAMILIES_TITLE

VERDICTS = ("works", "refused", "could not be built", "WRONG")
Record = dict[str, Any]


def short(reason: str) -> str:
    """A reason without the names of one family's modules, so that families share it."""
    reason = re.sub(r"^.*?cannot be attached to: ", "", reason)
    reason = re.sub(r"\b[\w.]+\.\d+(\.\w+)*", "an attention", reason)
    reason = re.sub(r" \([A-Z]\w+\)", "", reason)
    reason = re.sub(r"\b[A-Z]\w*(Attention|Model|PreTrainedModel|Encoder|Decoder)\b", "its attention", reason)
    reason = re.sub(r"\b\d+\b", "n", reason)
    return reason.replace("|", "\\|").replace("<", "&lt;").strip()


def page(results: dict[str, Record], of: dict[str, str]) -> str:
    """The table of `docs/support.md`."""
    by: dict[str, list[str]] = defaultdict(list)
    for kind in sorted(results, key=str.lower):
        by[results[kind]["verdict"]].append(kind)
    text = f"{FAMILIES_TITLE}\n\n{INTRODUCTION.format(**of)}\n| verdict | types |\n|---|---|\n"
    text += "".join(f"| {verdict} | {len(by[verdict])} |\n" for verdict in VERDICTS)
    padded = [record["padded rows"] for record in results.values() if record.get("padded rows")]
    same = sum("neither" not in rows.values() for rows in padded)
    text += (
        f"\n{same} of {len(padded)} types that take padding leave padded positions as in the plain model.\n"
    )
    text += "\n### Works\n\n| inputs | types |\n|---|---|\n"
    text += _rows(by["works"], lambda kind: results[kind].get("inputs", ""))
    text += REFUSED
    text += _rows(by["refused"], lambda kind: _why(results[kind]))
    text += "\n### WRONG\n\n"
    if by["WRONG"]:
        text += "| type | what |\n|---|---|\n"
        text += "".join(f"| {kind} | {_cell(results[kind]['reason'])} |\n" for kind in by["WRONG"])
    else:
        text += "None.\n"
    text += UNBUILT
    text += _rows(by["could not be built"], lambda kind: short(results[kind]["reason"])[:160])
    return text


def _why(record: Record) -> str:
    """Why a type is refused, and what would do."""
    why = short(record["reason"])
    if record.get("stage") not in (None, "attach"):
        why += f" (said at {record['stage']})"
    if record.get("where"):
        why += f"; `where={' or '.join(json.dumps(one) for one in record['where'])}` will do"
    return why + ("; Bayesian alone will do" if record.get("bayesian alone") else "")


def _rows(kinds: list[str], group: Any) -> str:
    """Rows of a table: what types have in common, and the types; the largest group first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for kind in kinds:
        groups[group(kind)].append(kind)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return "".join(f"| {_cell(name)} | {', '.join(names)} |\n" for name, names in ordered)


def _cell(text: str) -> str:
    return " ".join(text.replace("\\|", "|").replace("|", "\\|").split())


INTRODUCTION = """\
Written by `make families` (`tests/sweep.py`), and by nothing else. Every type that an Auto class of
transformers {transformers} builds is tried with torch {torch} on a CPU, as a small random model. A type
*works* if all of this holds:

- outputs are the plain model's with Evolving at α = β = 0 and with Bayesian in evaluation, without padding
  and with padding on either side;
- at α = β = 0.3 a later input moves no output that it does not move in the plain model, and a padded token
  moves no real one;
- cached generation is uncached generation, greedy and with two beams, with both mechanisms and with Bayesian
  alone, whose text is the plain model's;
- a training step has a finite gradient in every parameter of the mechanisms;
- what was saved comes back with the same outputs.

What the plain model does not do itself is not asked. `results/families.json` has more of each type.
"""
REFUSED = """
### Refused

| reason | types |
|---|---|
"""
UNBUILT = """
### Could not be built

By a small generic config with inputs made for it, or not without another package: not tested.

| reason | types |
|---|---|
"""


def differences(old: dict[str, Record], new: dict[str, Record]) -> list[str]:
    """Types whose verdict changed, one line each."""
    lines = []
    for kind in sorted({*old, *new}, key=str.lower):
        before, after = (of.get(kind, {"verdict": "absent", "reason": ""}) for of in (old, new))
        if before["verdict"] != after["verdict"]:
            why = after["reason"] or before["reason"]
            lines.append(f"{kind}: {before['verdict']} → {after['verdict']}  {why}".rstrip())
    return lines


def write_page(path: Path, table: str) -> None:
    """Put the table behind what else the page has."""
    text = path.read_text() if path.exists() else ""
    path.write_text(f"{text.split(FAMILIES_TITLE)[0].rstrip()}\n\n{table}")
