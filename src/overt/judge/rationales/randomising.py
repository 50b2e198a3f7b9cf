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
from overt.judge.rationales.evaluation import Evaluation
from overt.judge.rationales.methods import ORACLE, SAMPLES, Scorer, title_of
from overt.judge.rationales.words import WordClassifier

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
    left = correlations_after_shuffling(
        found, model, tokenizer, texts, queries=queries, most=most, seed=seed, progress=progress
    )
    return {name: interval_over(values) for name, values in left.items() if not np.isnan(values).all()}


def correlations_after_shuffling(
    found: Evaluation,
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str | Sequence[str]],
    *,
    queries: Sequence[str] | None = None,
    most: int | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    progress: Callable[[str, int, int], object] = lambda _what, _done, _of: None,
) -> dict[str, NDArray[np.float64]]:
    """What `after_shuffling` averages: method → (its texts,), NaN where either model ranks nothing.

    Args:
        found: this and the others as for `after_shuffling`.
        model: the classifier.
        tokenizer: its tokenizer.
        texts: those that were judged.
        queries: as for `evaluate`.
        most: None for all.
        samples: of LIME.
        seed: of the shuffling, LIME and random scores.
        progress: called for each text.
    """
    if len(texts) != found.texts:
        raise ValueError(f"texts must be the {found.texts} that were judged, got {len(texts)}")
    classifier = WordClassifier(shuffled(model, seed), tokenizer)
    names = [name for name, own in found.methods.items() if name != ORACLE and own.seconds is not None]
    scorer = Scorer(classifier, found.share, seed, samples, names)
    numbers = sorted({number for name in names for number in found.methods[name].texts[:most]})
    read = {
        number: classifier.read(texts[number], "" if queries is None else queries[number], str(number))
        for number in numbers
    }
    left = {}
    for name in names:
        own = found.methods[name]
        some = own.texts[:most]
        left[name] = np.full(len(some), np.nan)
        for place, number in enumerate(some):
            with suppress(ValueError):  # such as maps that are no longer finite
                scores = scorer.scores(name, read[number])
                left[name][place] = spearman(scores[None], own.scores[place])[0]
            progress(f"{title_of(name)}, {SHUFFLED}", place + 1, len(some))
    return left


def shuffled(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a model with the entries of each parameter in another order."""
    changed = copy.deepcopy(model)
    shuffle(changed, torch.Generator().manual_seed(seed), "", set())
    return changed
