"""Data sets of small labelled images, as uint8 tensors; images in files are decoded here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overt.data.pictures import opened

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images in two parts.

    Attributes:
        name: of the data set.
        train: uint8 (images, 3, height, width).
        train_labels: int64 (images,).
        test: like `train`.
        test_labels: like `train_labels`.
        classes: names of the labels.
        sha256: of what was read. Decoders differ in the last bit of a pixel, so it is not of the pixels.
        remark: what a reader of the results needs to know about the data.
        stand_in: whether they are the package's own.
        mirrored: whether a mirrored image has the same label.
    """

    name: str
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: list[str]
    sha256: str
    remark: str | None = None
    stand_in: bool = False
    mirrored: bool = True

    def describe(self) -> dict[str, Any]:
        """For a result file."""
        return description(self, list(self.train.shape[1:]))

    def colours(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of the training images, (3,) each."""
        sample = self.train.float()
        return sample.mean(dim=(0, 2, 3)), sample.std(dim=(0, 2, 3))

    def for_validation(self, share: float, seed: int = 0) -> Images:
        """Without the test set: part of the training set, the same share of each class, takes its place."""
        part: Images = validation_part(self, lambda chosen: self.train[chosen], share, seed)
        return part


def decode(content: bytes, name: str) -> Pixels:
    """An image file's content as uint8 (height, width, 3); `name` is for errors."""
    return np.asarray(opened(content, name))


def decoded(contents: Iterable[bytes], count: int, path: object) -> Tensor:
    """The contents of image files as uint8 (count, 3, height, width); `path` is for errors."""
    pixels: Pixels | None = None
    for number, content in enumerate(contents):
        image = decode(content, f"image {number} of {path}")  # (height, width, 3)
        if pixels is None:
            pixels = np.empty((count, *image.shape), np.uint8)
        if image.shape != pixels.shape[1:]:
            sizes = f"{pixels.shape[1:3]} and {image.shape[:2]}"
            raise ValueError(f"{path} must have images of one size, got {sizes}")
        pixels[number] = image
    assert pixels is not None
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def packed(path: Path, key: str, digest: Any) -> tuple[list[bytes], NDArray[Any]]:
    """The image files in an npz file, and their `labels` or `names`; updates the digest with the files.

    They are JPEG images one after the other (`jpeg`), and numbers of where each begins (`offsets`).
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            blob, offsets, told = (file[name] for name in ("jpeg", "offsets", key))
    except (KeyError, ValueError, OSError, BadZipFile) as error:
        raise ValueError(f"{path} must be an npz file with jpeg, offsets and {key}: {error}") from None
    if len(offsets) != len(told) + 1 or not len(told):
        raise ValueError(f"{path} has {len(told)} {key}, but offsets of {len(offsets) - 1} images")
    if offsets[-1] > len(blob):
        raise ValueError(f"{path} has {len(blob)} bytes of images, but offsets up to {offsets[-1]}")
    content = blob.tobytes()
    digest.update(content)
    digest.update(offsets.astype(np.int64).tobytes())
    return [content[start:end] for start, end in pairwise(offsets.tolist())], told


def set_apart(labels: Tensor, classes: int, share: float, seed: int) -> Tensor:
    """Boolean (images,): the same share of each class, at random."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(classes):
        places = (labels == label).nonzero().squeeze(1)
        order = places[torch.randperm(len(places), generator=generator)]
        count = round(share * len(places))
        if not 0 < count < len(places):
            raise ValueError(
                f"class {label} has {len(places)} training images, of which {share:.0%} cannot be set apart"
            )
        chosen[order[:count]] = True
    return chosen


def description(data: Any, size: list[int]) -> dict[str, Any]:
    """What a result file says of labelled images, in memory or in files."""
    return {
        "name": data.name,
        "train": len(data.train),
        "test": len(data.test),
        "classes": len(data.classes),
        "size": size,
        "mirrored": data.mirrored,
        "remark": data.remark,
        "sha256": data.sha256,
    }


def validation_part(data: Any, part: Callable[[Tensor], Any], share: float, seed: int) -> Any:
    """Labelled images with a part of the training set in place of the test set.

    Args:
        data: in memory or in files.
        part: boolean (images,) → those of the training set.
        share: of each class.
        seed: of the choice.
    """
    chosen = set_apart(data.train_labels, len(data.classes), share, seed)
    remark = f"{data.remark}; " * bool(data.remark) + f"{share:.0%} of the training set for testing"
    return replace(
        data,
        train=part(~chosen),
        train_labels=data.train_labels[~chosen],
        test=part(chosen),
        test_labels=data.train_labels[chosen],
        sha256=hashlib.sha256(f"{data.sha256} {share} {seed}".encode()).hexdigest(),
        remark=remark,
    )
