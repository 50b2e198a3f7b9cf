"""Result files: what `overt reproduce` has measured, as JSON, with nothing in them twice.

Means and deviations follow from the numbers of the seeds. How, where and when the runs were made is the same
for many of them, and is listed once, under "runs"; what each has instead is its number in these lists.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from overt._files import write_whole, written_whole
from overt.data.files import read_text
from overt.recipes._runs import finite

FORMAT = "overt reproduce 2"
FORMATS = ("overt reproduce 1", FORMAT)  # that can be read
DERIVED = ("mean", "spread")
KEPT = ".json.gz"  # of numbers beside a result file
MOST = 600 * 1024  # bytes of a result file; of a longer one, the numbers of the seeds are beside it
NUMBERS = ".numbers.json.gz"  # where they are, after the result's name
RUN, SETTINGS, SEED = "run", "settings", "seed"


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result completely or not at all.

    If it is long, the numbers of the seeds are in a compressed file beside it, whose name stands for them.
    """
    kept = {name: value for name, value in result.items() if name not in ("format", *DERIVED)}
    whole = {"format": FORMAT, **packed(finite(kept))}
    numbers, text = path.with_suffix(NUMBERS), _text_of(whole)
    if len(text.encode()) > MOST:
        _write_compressed(numbers, whole["per_seed"])
        write_whole(path, _text_of({**whole, "per_seed": numbers.name}))
    else:
        write_whole(path, text)
        numbers.unlink(missing_ok=True)


def _text_of(result: dict[str, Any]) -> str:
    text = json.dumps(result, indent=1, ensure_ascii=False)
    return (
        re.sub(r"\[[^][{}]*\]", lambda match: re.sub(r"\n *", " ", match[0]), text) + "\n"
    )  # a line per list


def read_result(path: Path) -> dict[str, Any] | None:
    """The result in a file, with the runs in their places; None if it is something else."""
    try:
        stored = json.loads(path.read_text())
    except json.JSONDecodeError:
        return None
    if not isinstance(stored, dict) or stored.get("format") not in FORMATS:
        return None
    if "commands" not in stored:  # of older files, which have one
        stored["commands"] = [stored.pop("command")]
    if isinstance(stored.get("per_seed"), str):
        numbers = path.with_suffix(NUMBERS)
        if stored["per_seed"] != numbers.name:
            raise ValueError(
                f"{path} must have its numbers in {numbers.name}, got {stored['per_seed'][:60]!r}"
            )
        stored["per_seed"] = _read_compressed(numbers, f"the numbers of {path}")
    return unpacked(stored)


def packed(result: dict[str, Any]) -> dict[str, Any]:
    """A result whose runs are listed once."""
    lists: dict[str, list[Any]] = {SETTINGS: [], "made": []}
    places: dict[str, int] = {}

    def place(name: str, value: Any) -> int:
        key = f"{name} {json.dumps(value)}"
        if key not in places:
            places[key] = len(lists[name])
            lists[name].append(value)
        return places[key]

    def short(run: dict[str, Any]) -> dict[str, Any]:
        made = {name: value for name, value in run.items() if name != SETTINGS}
        settings = run.get(SETTINGS)
        if not isinstance(settings, dict):
            return run
        shared = {name: value for name, value in settings.items() if name != SEED}
        seed = {SEED: settings[SEED]} if SEED in settings else {}
        return {SETTINGS: place(SETTINGS, shared), **seed, "made": place("made", made)}

    per_seed = _each_run(result["per_seed"], short)
    return {**result, "runs": lists, "per_seed": per_seed} if places else result


def unpacked(result: dict[str, Any]) -> dict[str, Any]:
    """The opposite of `packed`."""
    if "runs" not in result:
        return result
    lists = result["runs"]

    def whole(run: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(run.get(SETTINGS), int):
            return run
        seed = {SEED: run[SEED]} if SEED in run else {}
        return {SETTINGS: {**lists[SETTINGS][run[SETTINGS]], **seed}, **lists["made"][run["made"]]}

    others = {name: value for name, value in result.items() if name != "runs"}
    return {**others, "per_seed": _each_run(result["per_seed"], whole)}


def _each_run(
    per_seed: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The numbers of all seeds, with the run of each row changed."""

    def row(numbers: Any) -> Any:
        if not isinstance(numbers, dict) or not isinstance(numbers.get(RUN), dict):
            return numbers
        return {**numbers, RUN: change(numbers[RUN])}

    return {
        seed: {name: row(numbers) for name, numbers in rows.items()} if isinstance(rows, dict) else rows
        for seed, rows in per_seed.items()
    }


# --- Numbers that are too many for a result file ---


def write_kept(folder: Path, kept: Mapping[str, Any]) -> None:
    """Write numbers that are too many for a result file, each into a compressed file of its own."""
    for name, numbers in kept.items():
        folder.mkdir(parents=True, exist_ok=True)
        _write_compressed(folder / f"{name}{KEPT}", finite(numbers))


def read_kept(folder: Path) -> dict[str, Any]:
    """What `write_kept` has written, by name."""
    found = sorted(folder.glob(f"*{KEPT}"))
    return {path.name.removesuffix(KEPT): _read_compressed(path, path.name) for path in found}


def _write_compressed(path: Path, numbers: Any) -> None:
    """Write numbers to a file, unless it has them: then it stays as it is."""
    content = gzip.compress(json.dumps(numbers, separators=(",", ":")).encode(), mtime=0)
    if not path.is_file() or path.read_bytes() != content:
        with written_whole(path) as part:
            part.write_bytes(content)


def _read_compressed(path: Path, what: str) -> Any:
    """What `_write_compressed` has written."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{what} must be in {path}, which does not exist: restore it from where it is kept"
        )
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, gzipped: {error}") from None
