"""Traces in files: tensors and what belongs to them in one safetensors file, whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from overt._files import check_folder, written_whole

T = TypeVar("T")


def write(path: str | Path, tensors: Mapping[str, Tensor], about: dict[str, Any], form: str) -> None:
    """Write tensors and JSON-able facts, under the name of a format."""
    from safetensors.torch import save_file

    with written_whole(check_folder("path", path)) as part:
        save_file(
            {name: value.contiguous() for name, value in tensors.items()},
            part,
            {"format": form, "overt": json.dumps(about)},
        )


def read(path: str | Path, form: str, what: str, make: Callable[[dict[str, Tensor], dict[str, Any]], T]) -> T:
    """What `make` makes of a file that `write` wrote; anything else is refused in a line.

    Args:
        path: of the file.
        form: name of the format.
        what: the format in words.
        make: takes tensors and facts; what it raises means that the file is broken.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise FileNotFoundError(f"no trace at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from None
    if metadata.get("format") != form or "overt" not in metadata:
        raise ValueError(f"{path} holds no {what} of this version of overt")
    try:
        return make(tensors, json.loads(metadata["overt"]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} holds a broken trace ({type(error).__name__}: {error})") from None
