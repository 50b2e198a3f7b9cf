"""What a classifier says as a method's highest words are deleted, step by step, for a reader to follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overt.judge.rationales.deleting import Ties, count_of, ranked
from overt.judge.rationales.words import Text, WordClassifier

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

STEPS = tuple(step / 20 for step in range(11))  # shares of the words that are deleted, from none to half


class Steps(NamedTuple):
    """A text as a method's highest words are deleted.

    Attributes:
        order: the words, the highest score first, (words,).
        counts: how many of them are deleted at each step, (steps,).
        probabilities: of the classes from the words that are left, (steps, classes).
    """

    order: NDArray[np.int64]
    counts: NDArray[np.int64]
    probabilities: NDArray[np.float64]


def steps(
    classifier: WordClassifier,
    text: Text,
    scores: Sequence[ArrayLike],
    shares: Sequence[float] = STEPS,
    ties: Ties = "random",
    seed: int = 0,
) -> list[Steps]:
    """What a classifier says of a text as words are deleted, for each of several methods' scores.

    Args:
        classifier: the classifier.
        text: that it has read.
        scores: for each method, a number for each word.
        shares: of the words that are deleted; their number is rounded up.
        ties: order of words with equal scores, as for `ranked`.
        seed: of random ties.
    """
    words = len(text.words)
    counts = np.array([count_of(share, words) for share in shares])
    orders = [ranked(each, ties, seed, text.name) for each in scores]
    kept = np.ones((len(orders), len(counts), words), dtype=bool)
    for sets, order in zip(kept, orders, strict=True):
        for own, count in zip(sets, counts, strict=True):
            own[order[:count]] = False
    # Methods agree on many sets, which are read once.
    found = classifier.probabilities(text, kept.reshape(-1, words))
    each = found.reshape(len(orders), len(counts), -1)
    return [Steps(order, counts, own) for order, own in zip(orders, each, strict=True)]
