"""GLUE's metrics by name, and SQuAD's exact match and F1. All are fractions: 1 is a perfect score.

MCC and F1 are scikit-learn's and the correlations are scipy's. SQuAD's follow the definitions of its official
evaluation scripts (Rajpurkar et al. 2016, section 6.1, and 2018).
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from overt import _check
from overt._extras import need

EXTRA = "understanding"


class Score(NamedTuple):
    """A score, or None and the reason why it is not defined."""

    value: float | None
    reason: str | None = None


def score(metric: str, labels: Sequence[float], predicted: Sequence[float]) -> Score:
    """A metric of GLUE.

    A correlation of constant values is not defined, and neither is one of predictions that are not finite:
    its value is None, never NaN. MCC of constant values is 0, its usual convention.

    Args:
        metric: "accuracy", "MCC" (Matthews' correlation), "F1" (of class 1), "Pearson" or "Spearman".
        labels: classes, or scores for the correlations.
        predicted: as many.
    """
    _check.one_of("metric", metric, METRICS)
    if len(labels) != len(predicted):
        raise ValueError(f"predicted must be as many as labels, got {len(predicted)} and {len(labels)}")
    if not len(labels):
        raise ValueError(f"{metric} needs at least one label, got none")
    right, guess = np.asarray(labels), np.asarray(predicted)
    for name, values in (("labels", right), ("predicted", guess)):
        if values.ndim != 1 or values.dtype.kind not in "iuf":
            raise ValueError(f"{name} must be a list of numbers, got {values.dtype} of shape {values.shape}")
        if METRICS[metric] is not _correlation and values.dtype.kind == "f":
            raise ValueError(f"{metric} needs classes: {name} must be whole numbers, got {values[0]}")
    return METRICS[metric](metric, right, guess)


def _accuracy(_: str, labels: Any, predicted: Any) -> Score:
    return Score(float((labels == predicted).mean()))


def _mcc(_: str, labels: Any, predicted: Any) -> Score:
    if _constant(labels) or _constant(predicted):
        return Score(0.0)
    return Score(float(need("sklearn.metrics", EXTRA).matthews_corrcoef(labels, predicted)))


def _f1(_: str, labels: Any, predicted: Any) -> Score:
    for name, values in (("labels", labels), ("predicted", predicted)):
        if not np.isin(values, (0, 1)).all():
            raise ValueError(
                f"F1 is of class 1 against class 0: {name} must be 0 or 1, got {set(values.tolist())}"
            )
    return Score(float(need("sklearn.metrics", EXTRA).f1_score(labels, predicted, zero_division=0.0)))


def _correlation(metric: str, labels: Any, predicted: Any) -> Score:
    from scipy import stats

    for name, values in (("labels", labels), ("predictions", predicted)):
        if not np.isfinite(values).all():
            return Score(None, f"{name} are not all finite")
        if _constant(values):
            return Score(None, f"all {name} are {values[0]:g}")
    correlate: Any = stats.pearsonr if metric == "Pearson" else stats.spearmanr
    return Score(float(correlate(labels.astype(np.float64), predicted.astype(np.float64)).statistic))


def _constant(values: Any) -> bool:
    return bool((values == values[0]).all())


METRICS: dict[str, Callable[[str, Any, Any], Score]] = {
    "accuracy": _accuracy,
    "MCC": _mcc,
    "F1": _f1,
    "Pearson": _correlation,
    "Spearman": _correlation,
}


# --- SQuAD ---

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(answer: str) -> str:
    """An answer in lower case, without punctuation, articles and superfluous spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, reference: str) -> float:
    """1 if two answers are equal once they are normalised, else 0."""
    return float(normalise(answer) == normalise(reference))


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words of two normalised answers; if either has none, 1 if neither has, else 0."""
    words, wanted = normalise(answer).split(), normalise(reference).split()
    if not words or not wanted:
        return float(words == wanted)
    shared = sum((Counter(words) & Counter(wanted)).values())
    return 2 * shared / (len(words) + len(wanted))


class SquadScores(NamedTuple):
    """Mean exact match and F1 over questions; None if there are no questions."""

    exact: float | None
    f1: float | None
    questions: int


def squad(answers: Mapping[str, str], references: Mapping[str, Sequence[str]]) -> dict[str, SquadScores]:
    """Scores of "all" questions, of the "answerable" and of the "impossible" ones.

    Each question counts with the reference that fits best. A question without references, or whose references
    are empty once normalised, is impossible: only an empty answer is right.

    Args:
        answers: by question; "" for no answer.
        references: right answers by question.
    """
    if not references:
        raise ValueError("references must have at least one question, got none")
    kinds: dict[str, list[tuple[float, float]]] = {"all": [], "answerable": [], "impossible": []}
    for name, values in _each(answers, references).items():
        kinds["all"].append(values)
        kinds["answerable" if _possible(references[name]) else "impossible"].append(values)
    return {kind: _mean(values) for kind, values in kinds.items()}


def _mean(values: list[tuple[float, float]]) -> SquadScores:
    if not values:
        return SquadScores(None, None, 0)
    exact, f1 = np.mean(values, axis=0).tolist()
    return SquadScores(exact, f1, len(values))


class Threshold(NamedTuple):
    """A threshold of `margins`, and the mean score with it."""

    threshold: float
    score: float


def best_threshold(
    answers: Mapping[str, str],
    margins: Mapping[str, float],
    references: Mapping[str, Sequence[str]],
    by: Literal["exact", "f1"] = "f1",
) -> Threshold:
    """The threshold above which no answer is the better answer, and its score.

    It is chosen on the questions it is scored on, as in SQuAD 2.0's script; so the score is too good.

    Args:
        answers: by question, the best answer that is not empty.
        margins: by question, how much better than that answer none is; above the threshold, none is given.
        references: right answers by question.
        by: what to maximise.
    """
    _check.one_of("by", by, ("exact", "f1"))
    if not references:
        raise ValueError("references must have at least one question, got none")
    if absent := references.keys() - margins.keys():
        raise ValueError(f"margins must have every question, and {min(absent)} is missing")
    if any(math.isnan(margins[name]) for name in references):
        raise ValueError("margins must be numbers, got NaN")
    place = ("exact", "f1").index(by)
    given = {name: values[place] for name, values in _each(answers, references).items()}
    order = sorted(references, key=lambda name: margins[name])
    total = best = float(sum(not _possible(references[name]) for name in order))  # no answer anywhere
    threshold = min(margins[order[0]], 0.0) - 1.0
    for number, name in enumerate(order):
        total += given[name] - (not _possible(references[name]))
        last = number + 1 == len(order) or margins[order[number + 1]] > margins[name]
        if last and total > best + 1e-9 and math.isfinite(margins[name]):  # equal margins answer together
            best, threshold = total, margins[name]
    return Threshold(threshold, best / len(order))


def _possible(references: Sequence[str]) -> bool:
    return any(map(normalise, references))


def _each(
    answers: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, tuple[float, float]]:
    """Exact match and F1 of each question."""
    if absent := references.keys() - answers.keys():
        raise ValueError(f"answers must have every question, and {min(absent)} is missing")
    scores = {}
    for name, texts in references.items():
        wanted = [text for text in texts if normalise(text)] or [""]
        scores[name] = (
            max(exact_match(answers[name], text) for text in wanted),
            max(token_f1(answers[name], text) for text in wanted),
        )
    return scores
