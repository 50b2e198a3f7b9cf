"""Finding and reading the files of data sets, plain or gzipped."""

from __future__ import annotations

import gzip
import os
from pathlib import Path


def data_folder(data: Path | None) -> Path | None:
    """The folder with data: what was asked for, else OVERT_DATA, else none."""
    if data is None and os.environ.get("OVERT_DATA"):
        data = Path(os.environ["OVERT_DATA"])
    if data is not None and not data.is_dir():
        raise FileNotFoundError(f"--data {data} must be a folder (so must OVERT_DATA)")
    return data


def find_file(folder: Path, name: str) -> Path | None:
    """A file of that name, or gzipped with ".gz" after it."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_text(path: Path) -> str:
    """The text of a file, gzipped or not."""
    content = path.read_bytes()
    return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
