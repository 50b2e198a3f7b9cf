"""Do a method's scores depend on what the classifier has learnt? A check of Adebayo et al. 2018, on words."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from overt import _check
from overt.judge.correlation import shuffle, spearman
from overt.judge.intervals import Interval, interval_over
from overt.judge.rationales.evaluation import Evaluation, Rationales
from overt.judge.rationales.methods import ORACLE, SAMPLES, Scorer, title_of
from overt.judge.rationales.words import Text, WordClassifier

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST = 50  # texts
SHUFFLED = "shuffled weights"  # what is told, after the method's name


def after_shuffling(
    found: Evaluation,
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str | Sequence[str]],
    *,
    queries: Sequence[str] | None = None,
    most: int = MOST,
    seed: int = 0,
    progress: Callable[[str, int, int], object] = lambda _what, _done, _of: None,
) -> dict[str, Interval]:
    """How much of each method's order of words is left when the entries of each parameter are shuffled.

    Method → mean Spearman correlation, over texts, of its scores of the model with its scores of a copy in
    which nothing learnt is left. If it is near one, a method does not show what the model has learnt, however
    well it does otherwise. Scores at random do not depend on the model, and have one. Scores that were given,
    the best order of deletion, and methods that cannot read the shuffled copy are left out.

    Args:
        found: from `evaluate`, with the seed that is given here.
        model: the classifier, which is not changed.
        tokenizer: its tokenizer.
        texts: those that were judged.
        queries: as for `evaluate`.
        most: of each method's texts, from the first on.
        seed: of the shuffling, LIME and random scores.
        progress: called with what is done, how many texts of it are, and how many there are.
    """
    _check.whole("most", most, 1)
    if len(texts) != found.texts:
        raise ValueError(f"texts must be the {found.texts} that were judged, got {len(texts)}")
    copied = AfterShuffling(
        model, tokenizer, texts, list(found.methods), found.share, queries=queries, seed=seed
    )
    left = {name: copied.correlations(own, most, progress) for name, own in found.methods.items()}
    return {
        name: interval_over(values)
        for name, values in left.items()
        if values is not None and not np.isnan(values).all()
    }


class AfterShuffling:
    """A copy of a classifier with shuffled weights, and what methods say of it.

    Args:
        model: the classifier, which is not changed.
        tokenizer: its tokenizer.
        texts: those that were judged.
        methods: all that will be asked about. Those that read the same maps of a text share a trace.
        share: as `Evaluation` has it.
        queries: as for `evaluate`.
        samples: of LIME.
        seed: of the shuffling, LIME and random scores.
        dtype: as for `evaluate`.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        texts: Sequence[str | Sequence[str]],
        methods: Sequence[str],
        share: float,
        *,
        queries: Sequence[str] | None = None,
        samples: int = SAMPLES,
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.texts, self.queries = texts, queries
        self.classifier = WordClassifier(shuffled(model, seed), tokenizer, dtype)
        self.scorer = Scorer(self.classifier, share, seed, samples, methods)
        self.read: dict[int, Text] = {}

    def correlations(
        self,
        own: Rationales,
        most: int | None = None,
        progress: Callable[[str, int, int], object] = lambda _what, _done, _of: None,
    ) -> NDArray[np.float64] | None:
        """Of a method's scores with those of the copy, (its texts,); NaN where either ranks nothing.

        None for scores that were given and the best order of deletion, which cannot be had of the copy.

        Args:
            own: from `evaluate`, with the seed that is given here.
            most: of its texts, from the first on; None for all.
            progress: called for each text with what is done, how many texts of it are, and how many there
                are.
        """
        if own.method == ORACLE or own.seconds is None:
            return None
        some = own.texts[:most]
        left = np.full(len(some), np.nan)
        for place, number in enumerate(some):
            if number not in self.read:
                query = "" if self.queries is None else self.queries[number]
                self.read[number] = self.classifier.read(self.texts[number], query, str(number))
            with suppress(ValueError):  # such as maps that are no longer finite
                scores = self.scorer.scores(own.method, self.read[number])
                left[place] = spearman(scores[None], own.scores[place])[0]
            progress(f"{title_of(own.method)}, {SHUFFLED}", place + 1, len(some))
        return left


def shuffled(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a model with the entries of each parameter in another order."""
    changed = copy.deepcopy(model)
    shuffle(changed, torch.Generator().manual_seed(seed), "", set())
    return changed
