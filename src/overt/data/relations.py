"""Generated images whose class is a relation between two distant marks, for recipes without data.

Each image has one of four marks somewhere in its upper left quarter and one in its lower right. The class is
the difference of the two marks' numbers: no part of an image tells it, and neither do the marks one by one.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from overt.data.images import Images

NAME = "relations"
CLASSES = 4
# 3×3 pixels, of which each mark has five.
MARKS = torch.tensor(
    [
        [[0, 1, 0], [1, 1, 1], [0, 1, 0]],
        [[1, 0, 1], [0, 1, 0], [1, 0, 1]],
        [[1, 1, 1], [0, 1, 0], [0, 1, 0]],
        [[1, 0, 0], [1, 0, 0], [1, 1, 1]],
    ],
    dtype=torch.float32,
)


def images(train: int = 4096, test: int = 1024, side: int = 16, seed: int = 0) -> Images:
    """The data set; images and labels are random, so that training and test share none.

    Args:
        train: number of training images.
        test: number of test images.
        side: height and width, at least 12.
        seed: of the images.
    """
    if side < 12:
        raise ValueError(f"side must be at least 12, got {side}")
    pictures, labels = _draw(train + test, side, torch.Generator().manual_seed(seed))
    names = [f"difference {number}" for number in range(CLASSES)]
    parts = pictures[:train], labels[:train], pictures[train:], labels[train:]
    digest = hashlib.sha256(f"{NAME} {train} {test} {side} {seed}".encode()).hexdigest()
    return Images(NAME, *parts, names, digest, stand_in=True, mirrored=False)


def _draw(count: int, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    marks = torch.randint(CLASSES, (2, count), generator=generator)
    picture = 60 * torch.rand(count, 3, side, side, generator=generator)
    reach = side // 2 - 3  # places of a mark within a quarter
    for corner, which in enumerate(marks):
        row, column = (
            torch.randint(reach, (count,), generator=generator) + corner * (side // 2) for _ in "hw"
        )
        for down in range(3):
            for across in range(3):
                lit = MARKS[which, down, across]
                picture[torch.arange(count), :, row + down, column + across] += 190 * lit.unsqueeze(1)
    return picture.round().to(torch.uint8), (marks[0] - marks[1]) % CLASSES
