"""SST-2's sentences from GLUE's files, or the 400 labelled sentences included in the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from random import Random

from overt.data import glue
from overt.data.files import data_folder

HELD_OUT = 100  # test sentences out of those included in the package
SST2 = "SST-2"

Rows = list[tuple[str, int]]


def packaged_rows() -> Rows:
    """The sentences included in the package."""
    text = (files("overt.data") / "sentiment.tsv").read_text("utf-8")
    return _sentences(glue.read_rows(glue.TASKS[SST2], text, "sentiment.tsv"))


def load_rows(data: Path | None, seed: int) -> tuple[Rows, Rows, str]:
    """Training rows, test rows, and a description of the data.

    SST-2's files may be in `data` itself, in SST-2/ or in glue/SST-2/.
    """
    data = data_folder(data)
    if data is not None:
        task = glue.TASKS[SST2]
        splits = glue.read_folder(task, glue.find_folder(task, data) or data)
        return _sentences(splits.train), _sentences(splits.dev[SST2]), SST2
    rows = packaged_rows()
    Random(seed).shuffle(rows)
    test: Rows = []
    for label in (0, 1):
        test += [row for row in rows if row[1] == label][: HELD_OUT // 2]
    return [row for row in rows if row not in test], test, "the package's 400 sentences"


def _sentences(rows: list[glue.Row]) -> Rows:
    """Sentences and labels; labels of SST-2 are known except in its test file."""
    return [(row.texts[0], int(row.label)) for row in rows if row.label is not None]
