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
SHOWN = {  # words of the results → words of the page
    "WRONG": "wrong results",
    "text alone, of more that it takes": "text only, of models that take other inputs too",
}


def short(reason: str) -> str:
    """A reason without the names of one family's modules, so that families share it."""
    reason = re.sub(r"^.*?cannot be attached to: ", "", reason)
    reason = re.sub(r"\b[\w.]+\.\d+(\.\w+)*", "an attention", reason)
    reason = re.sub(r" \([A-Z]\w+\)", "", reason)
    reason = re.sub(r"\b[A-Z]\w*(Attention|Model|PreTrainedModel|Encoder|Decoder)\b", "its attention", reason)
    reason = re.sub(r"\b\d+\b", "n", reason)
    reason = reason.replace("the attention of its attention", "its attention")
    return reason.replace("|", "\\|").replace("<", "&lt;").strip()


def page(results: dict[str, Record], of: dict[str, str]) -> str:
    """The table of `docs/support.md`."""
    by: dict[str, list[str]] = defaultdict(list)
    for kind in sorted(results, key=str.lower):
        by[results[kind]["verdict"]].append(kind)
    text = f"{FAMILIES_TITLE}\n\n{INTRODUCTION.format(**of)}\n| verdict | types |\n|---|---|\n"
    text += "".join(f"| {_shown(verdict)} | {len(by[verdict])} |\n" for verdict in VERDICTS)
    padded = [record["padded rows"] for record in results.values() if record.get("padded rows")]
    same = sum("neither" not in rows.values() for rows in padded)
    text += (
        f"\n{same} of {len(padded)} types that take padding give the plain model's values at padded "
        "positions.\n"
    )
    text += "\n### Works\n\n| inputs | types |\n|---|---|\n"
    text += _rows(by["works"], lambda kind: _shown(results[kind].get("inputs", "")))
    text += REFUSED
    text += _rows(by["refused"], lambda kind: _why(results[kind]))
    text += "\n### Wrong results\n\n"
    if by["WRONG"]:
        text += "| type | what |\n|---|---|\n"
        text += "".join(f"| {kind} | {_cell(results[kind]['reason'])} |\n" for kind in by["WRONG"])
    else:
        text += "None.\n"
    text += UNBUILT
    text += _rows(by["could not be built"], lambda kind: short(results[kind]["reason"])[:160])
    return text


def _shown(word: str) -> str:
    """A word of the results, as the page has it."""
    return SHOWN.get(word, word)


def _why(record: Record) -> str:
    """Why a type is refused, and what would work."""
    why = short(record["reason"])
    if record.get("stage") not in (None, "attach"):
        why += f" (raised at the {record['stage']} pass)"
    if record.get("where"):
        why += f"; `where={' or '.join(json.dumps(one) for one in record['where'])}` works"
    return why + ("; Bayesian alone works" if record.get("bayesian alone") else "")


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
`make families` (`tests/sweep.py`) generates this part of the page; do not edit it by hand. Every model type
that an Auto class of transformers {transformers} can build is tried as a small random model, with torch
{torch} on a CPU. A type *works* if all of the following hold:

- With Evolving at α = β = 0, and with Bayesian in evaluation, outputs equal the plain model's, without
  padding and with padding on either side.
- At α = β = 0.3, a later input changes no output that it does not change in the plain model, and a padded
  token changes no real one.
- Cached generation equals uncached generation, greedy and with two beams, with both mechanisms and with
  Bayesian alone; with the latter, the text equals the plain model's.
- A training step has a finite gradient in every parameter of the mechanisms.
- A saved and reloaded model gives the same outputs.

What the plain model itself cannot do is not required. `results/families.json` has more details.
"""
REFUSED = """
### Refused

| reason | types |
|---|---|
"""
UNBUILT = """
### Could not be built

These types are not tested: a small generic config and generic inputs did not suffice to build and run
them, or they need another package. The reasons are error messages, with numbers replaced by n.

| reason | types |
|---|---|
"""


def refusals_of(results: dict[str, Record], before: dict[str, Any], version: str) -> dict[str, Any]:
    """The library's table of types that are refused by name: verdicts decide, reasons told by hand stay.

    Types that it refuses are refused at attach then, which is written into their records. A type that would
    do something wrong, and is in the table already, stays refused.
    """
    types = {}
    for kind, record in results.items():
        known = before.get(kind)
        late = record["verdict"] == "refused" and record.get("stage") != "attach"
        late = late and record.get("type", kind) == kind  # a class of another type is refused as that
        if late and (known or (reason := told(record))):
            types[kind] = {
                "reason": known["reason"] if known else reason,
                "where": record.get("where", []),
                "rows": bool(record.get("bayesian alone")),
                "attentions": [record["attention"]] if record.get("where") else [],
            }
        elif known and record["verdict"] == "WRONG":
            types[kind] = {**known, "where": record.get("where", [])}
        elif known and record["verdict"] == "could not be built":
            types[kind] = known
        else:
            continue
        if record["verdict"] != "could not be built":
            keep = {name: types[kind][name] for name in ("reason", "where")}
            record.update(verdict="refused", stage="attach", **keep)
    return {"transformers": version, "types": types}


def told(record: Record) -> str:
    """A type's oddity in general terms; nothing where it depends on the inputs."""
    reason = record["reason"]
    pictures = re.search(r"vision|visual|image|blocks|tower", reason.split(" ")[0]) is not None
    if found := re.search(r"attends over (\d+) windows or groups of its (\d+) inputs", reason):
        if int(found[1]) > int(found[2]):
            return "its attentions attend over windows or groups of each input"
        if pictures or record.get("inputs", "").endswith("image"):
            return "its vision tower attends over several pictures at once"
        return "its attentions attend over several inputs at once"
    if "ran twice in one forward pass" in reason:
        return "its attentions run more than once in one forward pass"
    if found := re.search(r"hands its attention (\w+), which is not honoured", reason):
        choice = "its attentions choose the keys that each query sees"
        return (
            choice
            if found[1] == "indices"
            else f"its attentions are handed {found[1]}, which is not honoured"
        )
    if "was taken for self-attention" in reason or "they do not add up" in reason:
        return f"its {record.get('attention') or 'attention'} has other keys than its queries' own"
    if found := re.search(r"its mask (is neither full nor causal|hides tokens from themselves)", reason):
        return f"a mask of its own {found[1]}"
    return ""


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
