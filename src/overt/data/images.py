"""Data sets of small labelled images, as uint8 tensors: CIFAR-100."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overt._extras import need
from overt.data.files import data_folder

CIFAR100 = "cifar100"
Pixels = NDArray[np.uint8]
_SPLITS = ("train", "test")


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
        return {
            "name": self.name,
            "train": len(self.train),
            "test": len(self.test),
            "classes": len(self.classes),
            "size": list(self.train.shape[1:]),
            "mirrored": self.mirrored,
            "remark": self.remark,
            "sha256": self.sha256,
        }

    def for_validation(self, share: float, seed: int = 0) -> Images:
        """Without the test set: part of the training set, the same share of each class, takes its place."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.zeros(len(self.train), dtype=torch.bool)
        for label in range(len(self.classes)):
            places = (self.train_labels == label).nonzero().squeeze(1)
            order = places[torch.randperm(len(places), generator=generator)]
            chosen[order[: round(share * len(places))]] = True
        return replace(
            self,
            train=self.train[~chosen],
            train_labels=self.train_labels[~chosen],
            test=self.train[chosen],
            test_labels=self.train_labels[chosen],
            sha256=hashlib.sha256(f"{self.sha256} {share} {seed}".encode()).hexdigest(),
            remark=f"{self.remark}; " * bool(self.remark) + f"{share:.0%} of the training set for testing",
        )


def load_cifar100(data: Path | None) -> Images:
    """CIFAR-100 from a folder with train*.npz and test*.npz, or one that has such a folder `cifar100`.

    Each file holds JPEG images one after the other (`jpeg`, uint8), where each begins (`offsets`) and
    `labels`; classes.json beside them names the labels.
    """
    folder = data_folder(data)
    files = None if folder is None else _npz(folder)
    if files is None:
        raise FileNotFoundError(f"no {CIFAR100}/train*.npz and test*.npz under {folder}: give --data DIR")
    digest = hashlib.sha256()
    parts = {split: _read_npz(path, digest) for split, path in files.items()}
    names = files["train"].parent / "classes.json"
    count = 1 + int(max(labels.max() for _, labels in parts.values()))
    classes = json.loads(names.read_text()) if names.is_file() else [str(number) for number in range(count)]
    if len(classes) < count:
        raise ValueError(f"{names} names {len(classes)} classes, and labels go up to {count - 1}")
    quality = [path.stem.partition("jpeg")[2] for path in files.values()]
    remark = f"JPEG q{quality[0]}" if all(part.isdecimal() for part in quality) else "JPEG"
    return Images(CIFAR100, *parts["train"], *parts["test"], classes, digest.hexdigest(), remark)


def _npz(folder: Path) -> dict[str, Path] | None:
    for place in (folder / CIFAR100, folder):
        files = {split: next(iter(sorted(place.glob(f"{split}*.npz"))), None) for split in _SPLITS}
        if all(files.values()):
            return {split: path for split, path in files.items() if path is not None}
    return None


def _read_npz(path: Path, digest: Any) -> tuple[Tensor, Tensor]:
    """Images (count, 3, height, width) and labels of a file; updates the digest."""
    try:
        with np.load(path, allow_pickle=False) as file:
            blob, offsets, labels = (file[name] for name in ("jpeg", "offsets", "labels"))
    except (KeyError, ValueError, OSError, BadZipFile) as error:
        raise ValueError(f"{path} must be an npz file with jpeg, offsets and labels: {error}") from None
    if len(offsets) != len(labels) + 1 or not len(labels):
        raise ValueError(f"{path} has {len(labels)} labels, but offsets of {len(offsets) - 1} images")
    if offsets[-1] > len(blob):
        raise ValueError(f"{path} has {len(blob)} bytes of images, but offsets up to {offsets[-1]}")
    if labels.min() < 0:
        raise ValueError(f"{path} must have labels from 0 on, got {labels.min()}")
    content = blob.tobytes()
    for part in (content, offsets.astype(np.int64).tobytes(), labels.astype(np.int64).tobytes()):
        digest.update(part)
    pixels = None
    for number, (start, end) in enumerate(pairwise(offsets.tolist())):
        image = decode(content[start:end], f"image {number} of {path}")  # (height, width, 3)
        if pixels is None:
            pixels = np.empty((len(labels), *image.shape), np.uint8)
        if image.shape != pixels.shape[1:]:
            sizes = f"{pixels.shape[1:3]} and {image.shape[:2]}"
            raise ValueError(f"{path} must have images of one size, got {sizes}")
        pixels[number] = image
    assert pixels is not None
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return images, torch.from_numpy(labels.astype(np.int64))


def decode(content: bytes, name: str) -> Pixels:
    """An image file's content as uint8 (height, width, 3); `name` is for errors."""
    need("PIL", "vision")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            return np.asarray(image.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as an image: {error}") from None
