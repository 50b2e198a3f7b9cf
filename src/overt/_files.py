"""Write files atomically: completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Size, Tensor


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
    from safetensors import SafetensorError

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


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file completely or not at all."""
    from safetensors.torch import save_file

    # Copies: a file cannot hold tensors that share memory.
    whole = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    with written_whole(path) as part:
        save_file(whole, part, metadata={"format": "pt"})


def read_tensors(
    path: str | Path, shapes: Mapping[str, Size], source: str | None = None
) -> dict[str, Tensor]:
    """The tensors of a safetensors file, which must have these names and shapes; errors name the file.

    Args:
        path: of the file.
        shapes: name → shape.
        source: what to call the file in errors; None for its path.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    source = str(path) if source is None else source
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {source}")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{source} is damaged or truncated: {error}") from error
    wrong = sorted(shapes.keys() ^ tensors.keys())
    wrong += [name for name in shapes.keys() & tensors if shapes[name] != tensors[name].shape]
    if wrong:
        raise ValueError(f"{len(wrong)} tensors are missing from {source} or do not fit, such as {wrong[0]}")
    return tensors
