"""Questions about images and their answers, in three parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overt.data.captions import PARTS
from overt.data.vocabulary import Vocabulary


class Asked(NamedTuple):
    """A question about an image.

    Attributes:
        image: its name.
        question: at least one word.
        answers: all that are right, without repetition; at least one.
        kind: of question, such as "number".
    """

    image: str
    question: str
    answers: tuple[str, ...]
    kind: str


@dataclass(frozen=True, eq=False)
class QuestionData:
    """Questions about images in three parts.

    Attributes:
        name: of the data set, and of the split.
        train: questions.
        validation: like `train`; may be empty.
        test: like `train`.
        vocabulary: words of the training questions.
        answers: that can be given; the classes of a network.
        images: uint8 (images, 3, side, side); None where they were not read.
        image_names: of `images`.
        sha256: of what was read.
        counts: what is to be known of the rows, such as answers that are not among `answers`.
        remarks: what a reader of the results needs to know.
        stand_in: whether they are the package's own.
    """

    name: str
    train: list[Asked]
    validation: list[Asked]
    test: list[Asked]
    vocabulary: Vocabulary
    answers: tuple[str, ...]
    images: Tensor | None
    image_names: tuple[str, ...]
    sha256: str
    counts: dict[str, int]
    remarks: tuple[str, ...] = ()
    stand_in: bool = False

    def image_numbers(self, rows: Sequence[Asked]) -> Tensor:
        """Which of `images` each question is about, int64 (rows,)."""
        numbers = {name: number for number, name in enumerate(self.image_names)}
        return torch.tensor([numbers[row.image] for row in rows], dtype=torch.int64)

    def targets(self, rows: Sequence[Asked]) -> Tensor:
        """1 for each right answer that can be given, else 0: float32 (rows, answers)."""
        targets = torch.zeros(len(rows), len(self.answers))
        numbers = {answer: number for number, answer in enumerate(self.answers)}
        for number, row in enumerate(rows):
            for answer in row.answers:
                if answer in numbers:
                    targets[number, numbers[answer]] = 1.0
        return targets

    def credits(self, rows: Sequence[Asked]) -> Tensor:
        """The accuracy of each answer, float32 (rows, answers): 1 of n for one of n right answers, else 0.

        An answer that cannot be given counts among the n, so that no question is left out of an accuracy.
        """
        counts = torch.tensor([len(row.answers) for row in rows]).unsqueeze(1)
        return self.targets(rows) / counts

    def describe(self) -> dict[str, Any]:
        """For a result file."""
        return {
            "name": self.name,
            **{part: len(getattr(self, part)) for part in PARTS},
            "images": {part: len({row.image for row in getattr(self, part)}) for part in PARTS},
            "words": len(self.vocabulary.words),
            "answers": len(self.answers),
            "size": None if self.images is None else list(self.images.shape[1:]),
            **self.counts,
            "remarks": list(self.remarks),
            "sha256": self.sha256,
        }


def outside(rows: Sequence[Asked], answers: Sequence[str]) -> int:
    """How many answers of the rows are none of those that can be given."""
    known = set(answers)
    return sum(answer not in known for row in rows for answer in row.answers)


def kinds(rows: Sequence[Asked]) -> dict[str, Tensor]:
    """Kind of question → boolean (rows,)."""
    found = sorted({row.kind for row in rows})
    return {kind: torch.tensor([row.kind == kind for row in rows]) for kind in found}
