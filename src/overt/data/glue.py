"""Read GLUE's tables CoLA, MRPC and SST-2 in their original layout.

Quotation marks have no special meaning in these files: a reader that interprets them merges and loses rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from overt.data.files import find_file, read_text


class Row(NamedTuple):
    """An example: one or two texts, and the index of its class."""

    texts: tuple[str, ...]
    label: int


class Task(NamedTuple):
    """A data set of GLUE.

    Attributes:
        name: its name in GLUE, which is also the name of its folder.
        classes: names of the classes, by index.
        metric: "accuracy", or "MCC" for Matthews' correlation.
        files: possible files of the training rows and of the development rows; the first that exists is used.
        columns: column indices of the label and the texts.
        header: whether the files start with a line of column names.
    """

    name: str
    classes: tuple[str, ...]
    metric: str
    files: tuple[tuple[str, ...], tuple[str, ...]]
    columns: tuple[int, ...]
    header: bool


TASKS = {
    task.name: task
    for task in (
        Task("CoLA", ("unacceptable", "acceptable"), "MCC", (("train.tsv",), ("dev.tsv",)), (1, 3), False),
        Task(
            "MRPC",
            ("different", "equivalent"),
            "accuracy",
            # train.tsv lacks a row in some copies; Microsoft's original file also has the development rows.
            (("msr_paraphrase_train.txt", "train.tsv"), ("dev.tsv",)),
            (0, 3, 4),
            True,
        ),
        Task("SST-2", ("negative", "positive"), "accuracy", (("train.tsv",), ("dev.tsv",)), (1, 0), True),
    )
}


def load(data: Path, name: str) -> tuple[list[Row], list[Row]]:
    """Training and development rows of a task, from a folder that contains GLUE's folders."""
    if name not in TASKS:
        raise ValueError(f"the task must be one of {', '.join(TASKS)}, got {name!r}")
    task = TASKS[name]
    for folder in (data / name, data / "glue" / name, data):
        candidates = [[path for name in names if (path := find_file(folder, name))] for names in task.files]
        if not all(candidates):
            continue
        train, dev = (paths[0] for paths in candidates)
        rows = read(task, train)
        if train.name.startswith("msr_"):
            rows = _without_dev(rows, train, folder)
        return [row for _, row in rows], [row for _, row in read(task, dev)]
    expected = " and ".join(" or ".join(names) for names in task.files)
    raise FileNotFoundError(f"{data} has no {name} data: put {expected} there or in {name}/ or glue/{name}/")


def read(task: Task, path: Path) -> list[tuple[list[str], Row]]:
    """Rows of a file, each with its cells; errors name the file and the line."""
    lines = read_text(path).removeprefix("\ufeff").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line or (task.header and number == 1):
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) <= max(task.columns):
            raise ValueError(
                f"{path}, line {number}: {task.name} needs at least {max(task.columns) + 1} columns, "
                f"got {len(cells)}"
            )
        label, *texts = (cells[place].strip() for place in task.columns)
        if label not in map(str, range(len(task.classes))):
            allowed = " or ".join(map(str, range(len(task.classes))))
            raise ValueError(f"{path}, line {number}: the label must be {allowed}, got {label[:40]!r}")
        rows.append((cells, Row(tuple(texts), int(label))))
    return rows


def _without_dev(rows: list[tuple[list[str], Row]], path: Path, folder: Path) -> list[tuple[list[str], Row]]:
    ids = find_file(folder, "dev_ids.tsv")
    if ids is None:
        raise FileNotFoundError(
            f"{path} also contains development rows: dev_ids.tsv, which lists them, is missing"
        )
    dev_ids = {tuple(line.split("\t")) for line in read_text(ids).split("\n") if line}
    return [(cells, row) for cells, row in rows if (cells[1], cells[2]) not in dev_ids]
