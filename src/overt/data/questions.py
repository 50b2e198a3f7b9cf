"""Questions about images and their answers, in three parts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overt.data.captions import PARTS
from overt.data.vocabulary import Vocabulary, vocabulary_of

OUTSIDE = "answers_outside_in_test"  # a key of `QuestionData.counts`


class Asked(NamedTuple):
    """A question about an image.

    Attributes:
        image: its name.
        question: at least one word.
        answers: all that are right, without repetition; at least one.
        kind: of question, such as "number".
        scores: how right each answer is, from 0 to 1; empty where all are, and one of n counts 1/n.
    """

    image: str
    question: str
    answers: tuple[str, ...]
    kind: str
    scores: tuple[float, ...] = ()


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
        """How right each answer that can be given is, from 0 to 1: float32 (rows, answers)."""
        return self._marked(rows, lambda row: row.scores or (1.0,) * len(row.answers))

    def credits(self, rows: Sequence[Asked]) -> Tensor:
        """The accuracy of each answer, float32 (rows, answers): its score, or 1/n for one of n right answers.

        An answer that cannot be given counts among the n, so that no question is left out of an accuracy.
        """
        return self._marked(rows, lambda row: row.scores or (1.0 / len(row.answers),) * len(row.answers))

    def _marked(self, rows: Sequence[Asked], marks: Callable[[Asked], Sequence[float]]) -> Tensor:
        """The marks of each row's answers at their places, float32 (rows, answers), and 0 elsewhere."""
        numbers = {answer: number for number, answer in enumerate(self.answers)}
        found = [
            (place, numbers[answer], mark)
            for place, row in enumerate(rows)
            for answer, mark in zip(row.answers, marks(row), strict=True)
            if answer in numbers
        ]
        marked = torch.zeros(len(rows), len(self.answers))
        if found:
            places, columns, values = zip(*found, strict=True)
            marked[torch.tensor(places), torch.tensor(columns)] = torch.tensor(values)
        return marked

    def for_validation(self, share: float) -> QuestionData:
        """Without the test set: the validation part takes its place.

        Where there is none, that is done by all questions about a share of the training images, which leave
        the training.
        """
        train, test, remark = self.train, self.validation, "tested on the validation part"
        if not test:
            names = sorted(
                {row.image for row in train}, key=lambda name: hashlib.sha256(name.encode()).digest()
            )
            held = set(names[: math.ceil(share * len(names))])
            if len(held) == len(names):
                raise ValueError(f"{self.name} has too few training images to set some apart: {len(names)}")
            train = [row for row in self.train if row.image not in held]
            test = [row for row in self.train if row.image in held]
            remark = f"tested on questions about {share:.0%} of the training images, set apart"
        digest = hashlib.sha256(f"{self.sha256} {remark}".encode())
        counts = {**self.counts, OUTSIDE: outside(test, self.answers)}
        return replace(
            self,
            train=train,
            validation=[],
            test=test,
            vocabulary=vocabulary_of(row.question for row in train),
            sha256=digest.hexdigest(),
            counts={name: value for name, value in counts.items() if name in self.counts},
            remarks=(*self.remarks, remark),
        )

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
