"""Images and their captions, in three parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from overt import _check
from overt.data.vocabulary import Vocabulary

PARTS = ("train", "validation", "test")


class Captioned(NamedTuple):
    """The captions of an image.

    Attributes:
        image: its name.
        captions: as they were written; at least one.
    """

    image: str
    captions: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class CaptionData:
    """Captioned images in three parts, none of which has an image of another.

    Attributes:
        name: of the data set.
        train: captioned images.
        validation: like `train`.
        test: like `train`.
        vocabulary: words of the training captions.
        images: uint8 (images, 3, side, side), in the order of the parts; None where they were not read.
        sha256: of what was read.
        counts: what was left out or cut, and how often.
        stand_in: whether they are the package's own.
    """

    name: str
    train: list[Captioned]
    validation: list[Captioned]
    test: list[Captioned]
    vocabulary: Vocabulary
    images: Tensor | None
    sha256: str
    counts: dict[str, int]
    stand_in: bool = False

    def part(self, name: str) -> tuple[list[Captioned], Tensor | None]:
        """The captioned images of a part, and their pixels, (images, 3, side, side)."""
        _check.one_of("part", name, PARTS)
        rows = getattr(self, name)
        before = sum(len(getattr(self, part)) for part in PARTS[: PARTS.index(name)])
        return rows, None if self.images is None else self.images[before : before + len(rows)]

    def describe(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "name": self.name,
            **{part: len(getattr(self, part)) for part in PARTS},
            "captions": sum(len(row.captions) for part in PARTS for row in getattr(self, part)),
            "words": len(self.vocabulary.words),
            "size": None if self.images is None else list(self.images.shape[1:]),
            **self.counts,
            "sha256": self.sha256,
        }
