"""Data sets of small labelled images, as uint8 tensors; images in files are decoded here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overt.data.pictures import opened

if TYPE_CHECKING:
    pass

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

    def colours(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel of the training images, (3,) each."""
        sample = self.train.float()
        return sample.mean(dim=(0, 2, 3)), sample.std(dim=(0, 2, 3))

    def for_validation(self, share: float, seed: int = 0) -> Images:
        """Without the test set: part of the training set, the same share of each class, takes its place."""
        chosen = set_apart(self.train_labels, len(self.classes), share, seed)
        return replace(
            self,
            train=self.train[~chosen],
            train_labels=self.train_labels[~chosen],
            test=self.train[chosen],
            test_labels=self.train_labels[chosen],
            sha256=hashlib.sha256(f"{self.sha256} {share} {seed}".encode()).hexdigest(),
            remark=in_place_of_test(self.remark, share),
        )


def decode(content: bytes, name: str) -> Pixels:
    """An image file's content as uint8 (height, width, 3); `name` is for errors."""
    return np.asarray(opened(content, name))


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


def in_place_of_test(remark: str | None, share: float) -> str:
    """The remark on data with a part of the training set in place of the test set."""
    return f"{remark}; " * bool(remark) + f"{share:.0%} of the training set for testing"
