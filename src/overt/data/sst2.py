"""SST-2 in GLUE's layout, and the 400 labelled sentences included in the package."""

from __future__ import annotations

import csv
import io
from importlib.resources import files
from pathlib import Path
from random import Random

from overt.data.files import data_folder, find_file, read_text

HELD_OUT = 100  # test sentences out of those included in the package
SST2 = "SST-2"

Rows = list[tuple[str, int]]


def read_rows(text: str, name: str) -> Rows:
    """Sentences and labels of a table in GLUE's format."""
    rows = list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))
    try:
        return [(row["sentence"].strip(), int(row["label"])) for row in rows]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name} must be tab-separated, with columns sentence and label (0 or 1)") from None


def find_sst2(folder: Path) -> dict[str, Path]:
    """The train and dev files of SST-2 under a folder, plain or gzipped."""
    for place in (folder, folder / "SST-2", folder / "glue" / "SST-2"):
        candidates = {part: find_file(place, f"{part}.tsv") for part in ("train", "dev")}
        paths = {part: path for part, path in candidates.items() if path is not None}
        if len(paths) == 2:
            return paths
    raise FileNotFoundError(
        f"{folder} has no SST-2 data: put train.tsv and dev.tsv there or in SST-2/ or glue/SST-2/"
    )


def packaged_rows() -> Rows:
    """The sentences included in the package."""
    return read_rows((files("overt.data") / "sentiment.tsv").read_text("utf-8"), "sentiment.tsv")


def load_rows(data: Path | None, seed: int) -> tuple[Rows, Rows, str]:
    """Training rows, test rows, and a description of the data."""
    data = data_folder(data)
    if data is not None:
        parts = {part: read_rows(read_text(path), str(path)) for part, path in find_sst2(data).items()}
        return parts["train"], parts["dev"], SST2
    rows = packaged_rows()
    Random(seed).shuffle(rows)
    test: Rows = []
    for label in (0, 1):
        test += [row for row in rows if row[1] == label][: HELD_OUT // 2]
    return [row for row in rows if row not in test], test, "the package's 400 sentences"
