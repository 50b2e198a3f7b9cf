"""Do a method's scores depend on what the classifier has learnt? A check of Adebayo et al. 2018, on words."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from overt import _check
from overt.judge.correlation import shuffle, spearman
from overt.judge.intervals import Interval, interval_over
from overt.judge.rationales.evaluation import WITHOUT, Evaluation
from overt.judge.rationales.methods import ORACLE, Scorer, title_of
from overt.judge.rationales.words import WordClassifier

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
    classifier = WordClassifier(shuffled(model, seed), tokenizer)
    names = [name for name, own in found.methods.items() if name != ORACLE and own.seconds is not None]
    scorer = Scorer(classifier, WITHOUT, seed, methods=names)
    numbers = sorted({number for name in names for number in found.methods[name].texts[:most]})
    read = {
        number: classifier.read(texts[number], "" if queries is None else queries[number], str(number))
        for number in numbers
    }
    intervals = {}
    for name in names:
        own, left = found.methods[name], list[float]()
        some = own.texts[:most]
        try:
            for place, number in enumerate(some):
                left.append(_left(own.scores[place], scorer.scores(name, read[number])))
                progress(f"{title_of(name)}, {SHUFFLED}", place + 1, len(some))
        except ValueError:
            continue
        if not all(map(math.isnan, left)):
            intervals[name] = interval_over(np.array(left))
    return intervals


def shuffled(model: nn.Module, seed: int) -> nn.Module:
    """A copy of a model with the entries of each parameter in another order."""
    changed = copy.deepcopy(model)
    shuffle(changed, torch.Generator().manual_seed(seed), "", set())
    return changed


def _left(before: Any, after: Any) -> float:
    """Spearman's correlation; NaN where one of the two is constant."""
    return float(spearman(np.asarray(after)[None], np.asarray(before))[0])
