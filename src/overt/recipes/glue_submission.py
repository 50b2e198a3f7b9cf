"""The files that GLUE's server takes, as one zip file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from overt import _check
from overt._files import check_folder, written_whole
from overt.data.glue import SUBMITTED_ONLY, TASKS, Task

WNLI_MAJORITY = 0  # not_entailment
MODIFIED = (1980, 1, 1, 0, 0, 0)  # the same predictions make the same file

# Name of a file, without its ending → its task and its number of rows on the server.
FILES: dict[str, tuple[Task, int]] = {
    name: (task, rows)
    for task in (TASKS | SUBMITTED_ONLY).values()
    for name, rows in task.server_rows.items()
}


def write(
    path: str | Path,
    predictions: Mapping[str, Sequence[float]],
    rows: Mapping[str, int] | None = None,
) -> list[str]:
    """Write a submission, and return what is to be known about it.

    WNLI is always its majority class: no model is trained on it. The server refuses a submission that lacks
    a file; the remarks list those.

    Args:
        path: of the zip file.
        predictions: file without its ending, such as "MNLI-mm" → the index of the class predicted for each
            test row, or its score. "AX" are the diagnostic rows, predicted by the model trained on MNLI.
        rows: test rows by file, for data other than GLUE's; by default what its server expects.
    """
    path = check_folder("submission", path)
    if path.suffix != ".zip":
        raise ValueError(f"submission must be a file that ends in .zip, got {path}")
    counts = dict(rows or {})
    for name in predictions:
        _check.one_of("predictions", name, [known for known in FILES if known != "WNLI"])
        check_count(name, len(predictions[name]), counts.get(name))
    ready = {name: _lines(name, predictions[name]) for name in FILES if name in predictions}
    ready["WNLI"] = _lines("WNLI", [WNLI_MAJORITY] * counts.get("WNLI", FILES["WNLI"][1]))
    with written_whole(path) as part, zipfile.ZipFile(part, "w") as file:
        for name, lines in ready.items():
            entry = zipfile.ZipInfo(f"{name}.tsv", MODIFIED)
            entry.external_attr = 0o644 << 16  # permissions once it is unpacked
            file.writestr(entry, "\n".join(lines) + "\n", zipfile.ZIP_DEFLATED)
    remarks = [f"WNLI is the majority class, {SUBMITTED_ONLY['WNLI'].classes[WNLI_MAJORITY]}, for every row"]
    if "AX" in ready:
        remarks.append("AX is predicted by the model trained on MNLI")
    if missing := [name for name in FILES if name not in ready]:
        remarks.append(f"the server needs all files, and these are missing: {', '.join(missing)}")
    return remarks


def check_count(name: str, count: int, expected: int | None = None) -> None:
    """Refuse a number of test rows that is not the server's.

    Args:
        name: of the file, without its ending.
        count: rows.
        expected: for data other than GLUE's.
    """
    expected = FILES[name][1] if expected is None else expected
    if count != expected:
        raise ValueError(f"{name} must have {expected:,} test rows in a submission, got {count:,}")


def _lines(name: str, predictions: Sequence[float]) -> list[str]:
    """The lines of a file. Scores are clipped to the task's scale."""
    task, _ = FILES[name]
    if task.classes:
        allowed = range(len(task.classes))
        if wrong := [value for value in predictions if value not in allowed]:
            raise ValueError(f"{name} must have classes from 0 to {allowed[-1]}, got {wrong[0]}")
        values = [task.written(value) for value in predictions]
    else:
        low, high = task.scale
        for value in predictions:
            _check.finite(name, value)
        values = [task.written(min(max(value, low), high)) for value in predictions]
    return ["index\tprediction", *(f"{index}\t{value}" for index, value in enumerate(values))]
