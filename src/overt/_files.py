"""Write files atomically: completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


def check_folder(name: str, path: str | Path) -> Path:
    """The path, if a file can be written there: its folder exists, and it is not a folder itself."""
    path = Path(path)
    if path.is_dir() or not path.name:
        raise IsADirectoryError(f"{name} {path} is a folder: give the name of a file in it")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"{name} {path}: there is no folder {path.parent}")
    return path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """A temporary path to write to, with the same suffix; its file replaces `path` if all goes well."""
    path = Path(path)
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise type(error)(f"{path} cannot be written: {reason}") from None
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file completely or not at all."""
    with written_whole(path) as part:
        part.write_text(text, encoding="utf-8")
