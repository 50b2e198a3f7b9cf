"""Images by name, in one npz file or in a folder, brought to one size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from overt.data.image_folders import SUFFIXES
from overt.data.images import packed
from overt.data.pictures import opened

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, eq=False)
class NamedImages:
    """Image files, decoded when they are asked for.

    Attributes:
        source: the npz file or the folder.
        files: name without suffix → the file, or its content.
        sha256: of the images in the npz file; of a folder, of the files' names and sizes.
    """

    source: Path
    files: dict[str, bytes | Path]
    sha256: str

    def __contains__(self, name: str) -> bool:
        return stem(name) in self.files

    def pixels(self, names: Sequence[str], side: int) -> Tensor:
        """Uint8 (names, 3, side, side): the whole of each image, scaled to a square."""
        pixels = torch.empty(len(names), 3, side, side, dtype=torch.uint8)
        for row, name in enumerate(names):
            if name not in self:
                raise ValueError(f"{self.source} has no image {name}")
            pixels[row] = square(self.files[stem(name)], f"image {name} of {self.source}", side)
        return pixels


def square(source: Image | str | Path | bytes, name: str, side: int) -> Tensor:
    """The whole of an image, scaled to a square, uint8 (3, side, side).

    Args:
        source: an image of PIL's, its path, or the content of its file.
        name: of the image, for errors.
        side: height and width.
    """
    image = opened(source, name)
    from PIL.Image import Resampling

    if image.size != (side, side):
        image = image.resize((side, side), Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def stem(name: str) -> str:
    """The name of an image without the suffix of its file."""
    suffix = next((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(suffix)]


def find(folder: Path, places: Sequence[str]) -> NamedImages:
    """The images of a folder: in its images*.npz, or else files in one of these places in it.

    The npz file has JPEG images one after the other (`jpeg`), where each begins (`offsets`), and `names`.
    """
    found = sorted(folder.glob("images*.npz"))
    if len(found) > 1:
        shown = ", ".join(path.name for path in found)
        raise ValueError(f"{folder} has several files of images, of which one must be left: {shown}")
    digest = hashlib.sha256()
    if found:
        contents, names = packed(found[0], "names", digest)
        digest.update("\n".join(map(str, names)).encode())
        return _named(found[0], [str(name) for name in names], contents, digest.hexdigest())
    for place in (folder / name for name in places):
        paths = _files(place) if place.is_dir() else []
        if paths:
            for path in paths:
                digest.update(f"{path.name} {path.stat().st_size}\n".encode("utf-8", "surrogateescape"))
            return _named(place, [path.name for path in paths], paths, digest.hexdigest())
    raise FileNotFoundError(
        f"{folder} has no images: put image files into {' or '.join(f'{name}/' for name in places)} there, "
        "or an images*.npz (jpeg, offsets, names)"
    )


def _files(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.suffix.lower() in SUFFIXES and path.name[0] != ".")


def _named(source: Path, names: list[str], files: Sequence[bytes | Path], sha256: str) -> NamedImages:
    by_name: dict[str, bytes | Path] = {}
    for name, file in zip(names, files, strict=True):
        if stem(name) in by_name:
            raise ValueError(f"{source} must have one image of each name, got {stem(name)} twice")
        by_name[stem(name)] = file
    return NamedImages(source, by_name, sha256)
