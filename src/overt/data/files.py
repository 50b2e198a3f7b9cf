"""Find and read the files of data sets, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any


def data_folder(data: str | Path | None) -> Path | None:
    """The data folder: `data`, or else OVERT_DATA, or else None."""
    given = data or os.environ.get("OVERT_DATA") or None
    if given is None:
        return None
    folder = Path(given)
    if not folder.is_dir():
        raise FileNotFoundError(f"--data (or OVERT_DATA) must be a folder, got {folder}")
    return folder


def find_file(folder: Path, name: str) -> Path | None:
    """The file of that name, or its gzipped version ending in ".gz"."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def read_text(path: Path) -> str:
    """The text of a file, gzipped or not."""
    content = path.read_bytes()
    try:
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} must be text in UTF-8, gzipped if it ends in .gz: {error}") from None


def entries_of(text: str, key: str, path: Path) -> list[dict[str, Any]]:
    """The objects that a JSON file lists under a key; at least one.

    Args:
        text: of the file.
        key: of the list.
        path: of the file, for errors.
    """
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON: {error}") from None
    entries = read.get(key) if isinstance(read, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(each, dict) for each in entries):
        raise ValueError(f'{path} must hold {{"{key}": [{{…}}, …]}}, with one entry or more')
    return entries
