"""Judge the rationales of a classifier, method by method."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import nn

from overt import _check
from overt._extras import need
from overt.data.eraser import Example, Prediction, write_predictions
from overt.judge.correlation import spearman
from overt.judge.intervals import Interval, interval_over
from overt.judge.rationales.deleting import (
    SEARCHED,
    SHARES,
    Ties,
    aopc,
    chosen,
    curve_sets,
    curves_from,
    log_odds,
    normalised_from,
    one_by_one,
    without_and_only,
)
from overt.judge.rationales.measures import (
    Span,
    auprc,
    by_id,
    checked_scores,
    checked_truth,
    iou_f1,
    spans_of,
    token_f1,
    words_in,
)
from overt.judge.rationales.methods import (
    ABSOLUTE,
    BLANKOUT,
    EXTRA,
    LIME,
    METHODS,
    ORACLE,
    SAMPLES,
    NotFiniteError,
    Scorer,
    known_methods,
    title_of,
)
from overt.judge.rationales.words import Text, WordClassifier

if TYPE_CHECKING:
    from numpy.typing import NDArray

WITHOUT = 0.2  # share of words that are chosen where there are no rationales to go by
POINTS = 11
SETS = 4096  # of kept words that are coded at once
DELETING = "deleting words"  # what is told while words are deleted, after the method's name
Tell: TypeAlias = "Callable[[str, int, int], None]"
# Key of a measure → its heading; more is better, or less.
HUMAN = {"auprc": "AUPRC ↑", "average_precision": "AP ↑", "token_f1": "token F1 ↑", "iou_f1": "IOU F1 ↑"}
FAITHFUL = {
    "comprehensiveness": "comp. ↑",
    "sufficiency": "suff. ↓",
    "log_odds": "log-odds ↓",
    "between": "LeRF − MoRF ↑",
    "normalised_comprehensiveness": "norm. comp. ↑",
    "normalised_sufficiency": "norm. suff. ↓",
    "correlation": "ρ blank-out ↑",
}
LESS_IS_BETTER = ("sufficiency", "log_odds", "normalised_sufficiency")
REFERENCE = ABSOLUTE  # what "correlation" is with
REFERENCES = (BLANKOUT, ABSOLUTE)  # which correlate with it because they are the same


@dataclass(frozen=True, eq=False)
class Rationales:
    """What a method says of texts, and how well that agrees and how much it matters.

    Attributes:
        method: its name.
        texts: numbers of the texts that it was judged on.
        scores: of the words of each of these texts.
        measures: name → mean over the texts that have it; None where none has. IOU F1 is that of mean
            precision and mean recall instead.
        by_text: name → each text's own, (texts,), NaN where it is not defined.
        seconds: how long the scores of a text took, the median (LIME's of its first 20 texts, as it may know
            the classifier's answers for others); None for scores that were given.
        predictions: what ERASER's files hold of each of these texts.
        morf: mean probability as the most relevant words are deleted, (points,).
        lerf: the same with the least relevant words first.
    """

    method: str
    texts: list[int]
    scores: list[NDArray[np.float64]]
    measures: dict[str, float | None]
    predictions: list[Prediction]
    morf: NDArray[np.float64]
    lerf: NDArray[np.float64]
    by_text: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Means over texts and both curves, for JSON."""
        return {
            "texts": len(self.texts),
            "seconds": self.seconds,
            **self.measures,
            "morf": self.morf.tolist(),
            "lerf": self.lerf.tolist(),
        }


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What `evaluate` returns; prints as a table.

    Attributes:
        methods: name → what was measured.
        refused: name of a method that does not apply to the model → why.
        performance: accuracy and macro F1, where labels are given.
        cut: how many texts were longer than the model takes; words beyond are neither scored nor judged.
        unmarked: how many texts have no human rationale, and count for faithfulness alone.
        share: of the words that are chosen for F1.
        texts: how many there are.
        points: shares of deleted words at which curves are given.
    """

    methods: dict[str, Rationales]
    refused: dict[str, str]
    performance: dict[str, float]
    cut: int
    unmarked: int
    share: float
    texts: int
    points: NDArray[np.float64] = field(default_factory=lambda: np.linspace(0, 1, POINTS))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the scores of words and the predictions, for JSON."""
        return {
            "performance": self.performance,
            "cut": self.cut,
            "unmarked": self.unmarked,
            "share": self.share,
            "texts": self.texts,
            "refused": self.refused,
            "methods": {name: found.to_dict() for name, found in self.methods.items()},
        }

    def table(
        self, measure: str, methods: Sequence[str] | None = None
    ) -> tuple[list[int], dict[str, NDArray[np.float64]]]:
        """The texts for which all of several methods have a measure, and their values, by method.

        Args:
            measure: one of `HUMAN` or `FAITHFUL`.
            methods: of `methods`; all of them by default.
        """
        names = list(self.methods) if methods is None else list(methods)
        known = {**HUMAN, **FAITHFUL}
        _check.one_of("measure", measure, tuple(known))
        rows: dict[str, dict[int, float]] = {}
        for name in names:
            _check.one_of("methods", name, tuple(self.methods))
            found = self.methods[name]
            values = found.by_text.get(measure, np.full(len(found.texts), np.nan))
            pairs = zip(found.texts, values.tolist(), strict=True)
            rows[name] = {text: value for text, value in pairs if not math.isnan(value)}
        shared = sorted(set.intersection(*map(set, rows.values()))) if rows else []
        return shared, {name: np.array([row[text] for text in shared]) for name, row in rows.items()}

    def interval(self, method: str, measure: str) -> Interval:
        """A measure's mean over a method's texts, with its 95 % interval over texts."""
        return interval_over(self.table(measure, [method])[1][method])

    def paired(self, first: str, second: str, measure: str) -> Interval:
        """Mean difference of two methods, first − second, over the texts that both have, with its interval.

        Args:
            first: one of `methods`.
            second: another.
            measure: one of `HUMAN` or `FAITHFUL`.
        """
        _, values = self.table(measure, [first, second])
        return interval_over(values[first] - values[second])

    def write(self, path: str | Path, method: str, name: str, examples: Sequence[Example]) -> None:
        """Write a method's rationales as ERASER's own script reads them.

        Args:
            path: of the file.
            method: one of `methods`.
            name: of the data set, such as "movies".
            examples: the texts that were judged, in the same order. The script wants all of a split.
        """
        _check.one_of("method", method, tuple(self.methods))
        found = self.methods[method]
        if len(examples) != self.texts:
            raise ValueError(f"examples must be the {self.texts} texts that were judged, got {len(examples)}")
        for each in examples:
            if not isinstance(each, Example):
                raise ValueError(f"examples must be overt.data.eraser.Example, got {_shown(each)}")
        write_predictions(path, name, [examples[number] for number in found.texts], found.predictions)

    def __str__(self) -> str:
        shown = {
            key: heading
            for key, heading in {**HUMAN, **FAITHFUL}.items()
            if any(found.measures.get(key) is not None for found in self.methods.values())
        }
        width = max(22, *(len(title_of(name)) + 1 for name in (*self.methods, *self.refused)), 0)
        lines = ["".ljust(width) + "texts".rjust(7) + "".join(head.rjust(15) for head in shown.values())]
        for name, found in self.methods.items():
            cells = "".join(_cell(found.measures.get(key)).rjust(15) for key in shown)
            lines.append(title_of(name).ljust(width) + str(len(found.texts)).rjust(7) + cells)
        for name, reason in self.refused.items():
            lines.append(title_of(name).ljust(width) + "–".rjust(7) + f"  {reason}")
        if self.performance:
            told = ", ".join(f"{name} {value:.3f}" for name, value in self.performance.items())
            lines.append(f"performance: {told}")
        if self.unmarked:
            lines.append(
                f"{self.unmarked} of {self.texts} texts have no rationale, and count for faithfulness alone"
            )
        if self.cut:
            lines.append(f"{self.cut} of {self.texts} texts are longer than the model takes, and are cut")
        return "\n".join(lines)


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}".replace("-", "−").replace("−0.000", "0.000")


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    texts: Sequence[str | Sequence[str]],
    rationales: Sequence[Any] | Mapping[str, Any] | None = None,
    methods: Sequence[str] | None = None,
    *,
    queries: Sequence[str] | None = None,
    labels: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    scores: Mapping[str, Any] | None = None,
    share: float | None = None,
    at_most: Mapping[str, int] | None = None,
    shares: Sequence[float] = SHARES,
    points: int = POINTS,
    samples: int = SAMPLES,
    ties: Ties = "random",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    correlation: bool = False,
    progress: bool | Tell | None = None,
    done: Callable[[str, Rationales | str], object] = lambda _method, _found: None,
    known: Mapping[str, Rationales | str] | None = None,
) -> Evaluation:
    """Which words does a classifier go by, according to each method, and is that so?

    Faithfulness: words are deleted, the text is tokenized again, and the probability of the class that is
    predicted from the whole text is compared (DeYoung et al. 2020). With human rationales also agreement.

    Args:
        model: a Hugging Face classifier of sequences, plain or attached, or a `RationaleClassifier`.
        tokenizer: its tokenizer, a fast one.
        texts: as text, which is split at white space, or as words.
        rationales: for each text, 1 for the words that people marked and 0 for the others, or passages as
            (first word, word after the last). None for faithfulness alone. Marked words that touch are one
            passage; passages that are given as such are taken as they are.
        methods: of `METHODS`, which is the default, or of `every_method()`. LIME needs the package `lime` and
            integrated gradients captum, both of the extra `rationales`. A method that does not apply to the
            model is listed with its reason; texts for which its scores are not finite are left out of its
            `texts`. "oracle", the best order of deletion, is judged on texts of up to 30 words.
        queries: what is asked of each text, which is its second part and never deleted.
        labels: the right classes, for performance.
        names: of the texts, for errors; by default their numbers.
        scores: name → further scores to judge, for each text a number per word.
        share: of the words that are chosen for F1 (and, twice, that LIME is asked for); by default the mean
            share of the rationales, or 0.2 without them.
        at_most: method → number of texts, spread evenly, for those that take long.
        shares: of the words that are deleted or kept.
        points: of the curves.
        samples: of LIME.
        ties: order of words with equal scores, as for `ranked`.
        seed: of ties, LIME and random scores.
        dtype: of the products (autocast) wherever words are deleted or blanked out, such as torch.float16 on
            a GPU; None for the model's own. Gradients and maps are always read in the model's own.
        correlation: measure also Spearman's correlation of the sizes of scores with absolute blank-out, which
            runs the model once for each token of all texts.
        progress: tell on standard error how far it is; by default on a terminal. A function is called with
            what is done, how many texts of it are, and how many there are.
        done: called with each method's name and its `Rationales`, or why it does not apply, once they are
            there, so that what an interrupted run has measured can be kept.
        known: method → what `done` was given in an earlier call with otherwise the same arguments; these
            methods are not measured again.
    """
    classifier = WordClassifier(model, tokenizer, dtype)
    for name, given_list in (
        ("texts", texts),
        ("queries", queries),
        ("labels", labels),
        ("names", names),
        ("methods", methods),
        ("shares", shares),
    ):
        if not (_is_list(given_list) or (given_list is None and name not in ("texts", "shares"))):
            raise ValueError(f"{name} must be a list, got {_shown(given_list)}")
    for name, given_mapping in (("scores", scores), ("at_most", at_most), ("known", known)):
        if not (given_mapping is None or isinstance(given_mapping, Mapping)):
            raise ValueError(f"{name} must be a mapping from names, got {_shown(given_mapping)}")
    if not (rationales is None or _is_list(rationales) or isinstance(rationales, Mapping)):
        raise ValueError(
            f"rationales must be a list, or a mapping from names of texts, got {_shown(rationales)}"
        )
    if not len(texts):
        raise ValueError("texts must have at least one text, got none")
    _check.whole("seed", seed, 0)
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise ValueError(f"dtype must be a type of floats such as torch.float16, or None, got {dtype!r}")
    for name, column in (("queries", queries), ("labels", labels), ("names", names)):
        if column is not None and len(column) != len(texts):
            raise ValueError(f"{name} must be {len(texts)}, one for each text, got {len(column)}")
    titles = [str(name) for name in names] if names is not None else [str(n) for n in range(len(texts))]
    if len(set(titles)) < len(titles):
        twice = next(name for name in titles if titles.count(name) > 1)
        raise ValueError(f"names must differ, and {twice!r} is the name of {titles.count(twice)} texts")
    for name in scores or {}:
        if not isinstance(name, str):
            raise ValueError(f"scores must be a mapping from names, which are text, got {name!r}")
    if methods is not None and not len(methods) and not scores:
        raise ValueError(f"methods must name at least one of {', '.join(METHODS)}, got none")
    asked = [""] * len(texts) if queries is None else queries
    read = [
        classifier.read(text, query, name) for text, query, name in zip(texts, asked, titles, strict=True)
    ]
    truth, passages = (None, None) if rationales is None else marked_words(rationales, read)
    if share is None:
        marked = [each.mean() for each in truth or [] if each.any()]
        share = float(np.mean(marked)) if marked else WITHOUT
    _check.fraction("share", share)
    _check.positive("share", share)
    chosen_methods = list(dict.fromkeys(METHODS if methods is None else methods))
    for method in chosen_methods:
        _check.one_of("methods", method, known_methods())
        if method in (scores or {}):
            raise ValueError(f"scores must have names that are no method's of this run, got {method!r}")
    for method, most in (at_most or {}).items():
        _check.one_of("at_most", method, (*known_methods(), *(scores or {})))
        _check.whole(f"at_most[{method!r}]", most, 1)
    if not len(shares):
        raise ValueError("shares must have at least one share, got none")
    for each in shares:
        _check.fraction("shares", each)
    _check.whole("points", points, 2)
    _check.whole("samples", samples, 2)
    if LIME in chosen_methods:
        need("lime.lime_text", EXTRA)
    if "integrated" in chosen_methods:
        need("captum.attr", EXTRA)
    given = {name: _given(each, read, name) for name, each in (scores or {}).items()}
    earlier = known or {}
    for name, judged_before in earlier.items():
        _check.one_of("known", name, (*chosen_methods, *given))
        _check_known(name, judged_before, read)
    of_all_texts = [each for each in chosen_methods if each not in earlier and each not in (at_most or {})]
    scorer = Scorer(classifier, share, seed, samples, of_all_texts)
    judge = _Judge(scorer, read, truth, passages, tuple(shares), points, ties, correlation)
    performance = {} if labels is None else _performance(judge.full, labels)
    found, refused = dict[str, Rationales](), dict[str, str]()
    with _Telling(progress) as tell:
        for method in [*chosen_methods, *given]:
            if method in earlier:
                judged_before = earlier[method]
                if isinstance(judged_before, str):
                    refused[method] = judged_before
                else:
                    found[method] = judged_before
                continue
            numbers = _spread_evenly(len(read), (at_most or {}).get(method))
            if method == ORACLE and any(len(read[number].words) <= SEARCHED for number in numbers):
                numbers = [number for number in numbers if len(read[number].words) <= SEARCHED]
            own, reason = given.get(method), ""
            values: dict[int, NDArray[np.float64]] = {}
            try:
                if method == ORACLE:
                    judge.search(method, numbers, tell)
                for place, number in enumerate(numbers):
                    try:
                        values[number] = scorer.scores(method, read[number]) if own is None else own[number]
                    except NotFiniteError as error:  # the method has no scores for this text alone
                        reason = reason or str(error)
                    tell(title_of(method), place + 1, len(numbers))
            except ValueError as error:
                if values:
                    raise
                reason = str(error).split("\n", 1)[0]
            if not values:
                refused[method] = reason
                done(method, reason)
                continue
            seconds = None if method in given else float(np.median(scorer.seconds[method]))
            judged = judge.judged(method, list(values), list(values.values()), tell)
            found[method] = replace(judged, seconds=seconds)
            done(method, found[method])
    cut = sum(text.cut > 0 for text in read)
    unmarked = 0 if truth is None else sum(not each.any() for each in truth)
    return Evaluation(found, refused, performance, cut, unmarked, share, len(read), np.linspace(0, 1, points))


def _check_known(name: str, own: Any, read: Sequence[Text]) -> None:
    """What an earlier call is said to have measured is of this method and these texts."""
    if isinstance(own, str):
        return
    if not isinstance(own, Rationales) or own.method != name:
        shown = f"those of {own.method}" if isinstance(own, Rationales) else _shown(own)
        raise ValueError(f"known[{name!r}] must be its Rationales, or why it does not apply, got {shown}")
    sizes = {number: len(text.words) for number, text in enumerate(read)}
    if any(sizes.get(text) != len(each) for text, each in zip(own.texts, own.scores, strict=True)):
        raise ValueError(f"known[{name!r}] must have a number for each word of these texts, and is of others")


def marked_words(rationales: Any, read: Sequence[Text]) -> tuple[list[NDArray[np.bool_]], list[list[Span]]]:
    """Which of the words that a model sees are marked, and the passages; ValueError names a text that is off.

    Args:
        rationales: as for `evaluate`.
        read: the texts.
    """
    given = by_id(rationales)
    if isinstance(rationales, Mapping):
        names = [text.name for text in read]
        for unknown in given.keys() - set(names):
            raise ValueError(f"rationales has a document {unknown!r}, which is none of the texts")
    else:
        names = [str(number) for number in range(len(read))]
        if len(given) != len(read):
            raise ValueError(f"rationales must be {len(read)}, one for each text, got {len(given)}")
    found, passages = [], []
    for text, name in zip(read, names, strict=True):
        if name not in given:
            raise ValueError(f"rationales has no document {name!r}")
        words, value = len(text.words) + text.cut, given[name]
        if not _is_list(value):
            raise ValueError(
                f"document {text.name}: its rationale must have 0 or 1 for each word, or be a list of "
                f"passages, got {_shown(value)}"
            )
        if len(value) == 0 or any(_is_list(each) for each in value):
            marked = words_in(value, words, text.name)
            seen = [(start, min(end, len(text.words))) for start, end in value]
            passages.append([(int(start), int(end)) for start, end in seen if start < end])
        else:
            marked = checked_truth(value, text.name)
            if len(marked) != words:
                raise ValueError(
                    f"document {text.name}: its rationale must have {words} words, got {len(marked)}"
                )
            passages.append(spans_of(marked[: len(text.words)]))
        found.append(marked[: len(text.words)])
    return found, passages


def _is_list(value: Any) -> bool:
    """Whether it has elements in an order, and is no text."""
    if isinstance(value, str | bytes | Mapping | Set) or getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(value, "__len__") and hasattr(value, "__iter__")


def _shown(value: Any) -> str:
    """A value, as an error quotes it."""
    return repr(value)[:60]


def _given(values: Any, read: Sequence[Text], name: str) -> list[NDArray[np.float64]]:
    """Scores that a caller brings, of the words that a model sees; tensors may be on a GPU, or in a graph."""
    if not _is_list(values):
        raise ValueError(
            f"scores[{name!r}] must be a list with a list of numbers for each text, got {_shown(values)}"
        )
    if len(values) != len(read):
        raise ValueError(f"scores[{name!r}] must be {len(read)}, one list for each text, got {len(values)}")
    found = []
    for each, text in zip(values, read, strict=True):
        plain = each.detach().double().cpu().numpy() if isinstance(each, torch.Tensor) else each
        found.append(checked_scores(plain, len(text.words) + text.cut, text.name)[: len(text.words)])
    return found


def _spread_evenly(count: int, most: int | None) -> list[int]:
    if most is None or most >= count:
        return list(range(count))
    return [int(place) for place in np.linspace(0, count - 1, most).round()]


def _performance(full: NDArray[np.float64], labels: Sequence[int]) -> dict[str, float]:
    """Accuracy, and the mean of the classes' F1, over the classes that are there or are predicted."""
    right, guess = np.asarray(labels), full.argmax(axis=1)
    if right.shape != guess.shape or right.dtype.kind not in "iu" or right.min() < 0:
        raise ValueError(f"labels must be whole numbers from 0 to {full.shape[1] - 1}, got {labels!r}"[:120])
    if right.max() >= full.shape[1]:
        raise ValueError(f"labels must be at most {full.shape[1] - 1}, got {right.max()}")
    each = []
    for label in np.union1d(right, guess):
        hits, total = (
            ((right == label) & (guess == label)).sum(),
            (right == label).sum() + (guess == label).sum(),
        )
        each.append(2 * hits / total)
    return {"accuracy": float((right == guess).mean()), "macro F1": float(np.mean(each))}


class _Judge:
    """Measures scores against rationales, and against what the classifier makes of parts of texts."""

    def __init__(
        self,
        scorer: Scorer,
        read: Sequence[Text],
        truth: list[NDArray[np.bool_]] | None,
        passages: list[list[Span]] | None,
        shares: tuple[float, ...],
        points: int,
        ties: Ties,
        correlation: bool,
    ) -> None:
        self.scorer, self.read, self.truth = scorer, read, truth
        self.passages, self.share, self.seed = passages, scorer.share, scorer.seed
        self.shares, self.points, self.ties, self.correlation = shares, points, ties, correlation
        whole = [(text, np.ones((1, len(text.words)), dtype=bool)) for text in read]
        self.full = np.concatenate(scorer.classifier.ask(whole))
        self.blanked: dict[int, NDArray[np.float64] | None] = {}

    def judged(
        self, method: str, numbers: list[int], values: list[NDArray[np.float64]], tell: Tell
    ) -> Rationales:
        """All measures of a method's scores."""
        labels = self.full[numbers].argmax(axis=1)
        rows = np.arange(len(numbers))
        full = self.full[numbers][rows, labels]
        picked = [
            chosen(scores, self.share, self.ties, self.seed + number)
            for number, scores in zip(numbers, values, strict=True)
        ]
        answers = self._asked(method, numbers, values, picked, tell)
        shares = len(self.shares)
        count = 2 * (shares + 1 + self.points)
        found = np.stack([each[:count] for each in answers])
        without, only, spans, points = np.split(found, (shares, 2 * shares, 2 * shares + 2), axis=1)
        curved = [curves_from(each[:, label]) for each, label in zip(points, labels, strict=True)]
        by_text = self._agreement(numbers, values, picked)
        by_text |= {
            "comprehensiveness": aopc(full, without[rows, :, labels]),
            "sufficiency": aopc(full, only[rows, :, labels]),
            "log_odds": log_odds(full, without[rows, :, labels]),
            "between": np.array([each.between for each in curved]),
            **self._scaled(method, numbers, [each[count:] for each in answers], tell),
            **self._correlation(method, numbers, values, tell),
        }
        measures = {name: _mean(by_text[name]) if name in by_text else None for name in (*HUMAN, *FAITHFUL)}
        if "iou_f1" in by_text:
            measures["iou_f1"] = self._iou(numbers, picked)
        predictions = [
            Prediction(
                np.concatenate([scores, np.full(self.read[number].cut, min(0.0, float(scores.min())))]),
                spans_of(picked[place]),
                self.full[number],
                self.shares,
                without[place],
                only[place],
                *spans[place],
            )
            for place, (number, scores) in enumerate(zip(numbers, values, strict=True))
        ]
        morf, lerf = (np.mean([getattr(each, name) for each in curved], axis=0) for name in ("morf", "lerf"))
        return Rationales(method, numbers, values, measures, predictions, morf, lerf, by_text)

    def _asked(
        self,
        method: str,
        numbers: Sequence[int],
        values: Sequence[NDArray[np.float64]],
        picked: Sequence[NDArray[np.bool_]],
        tell: Tell,
    ) -> list[NDArray[np.float64]]:
        """Probabilities of the classes from parts of each text, (sets, classes) for each.

        The sets are those without the highest shares, these alone, the same for the words that are picked,
        those of both curves and, unless a text is long, those of `one_by_one`. The last have most of the
        others among them, and equal sets of a text are read once.
        """
        found: list[NDArray[np.float64]] = []
        words, total = f"{title_of(method)}, {DELETING}", len(numbers)
        several = max(1, SETS // (2 * (len(self.shares) + 1 + self.points + SEARCHED) + 1))
        for start in range(0, total, several):
            group = range(start, min(start + several, total))
            sets = []
            for place in group:
                scores, seed = values[place], self.seed + numbers[place]
                without, only = without_and_only(scores, self.shares, self.ties, seed)
                own = np.stack([~picked[place], picked[place]])
                parts = [without, only, own, curve_sets(scores, self.points, self.ties, seed)]
                if len(scores) <= SEARCHED:
                    parts.append(one_by_one(scores, self.ties, seed))
                sets.append((self.read[numbers[place]], np.concatenate(parts)))

            def told(done: int, of: int, group: range = group) -> None:
                tell(words, group.start + len(group) * done // of, total)

            found += self.scorer.ask(sets, told)
        return found

    def search(self, method: str, numbers: Sequence[int], tell: Tell) -> None:
        """Find the best and the worst order of texts' words, where they are not known; this may take long."""
        texts = [self.read[number] for number in numbers]
        new = {
            text: place
            for place, text in enumerate(texts, start=1)
            if len(text.words) <= SEARCHED and text not in self.scorer.scales
        }

        def told(done: int, _of: int) -> None:
            if done:
                tell(f"{title_of(method)}, {DELETING} one by one", list(new.values())[done - 1], len(texts))

        self.scorer.search(list(new), told)

    def _scaled(
        self, method: str, numbers: Sequence[int], answers: Sequence[NDArray[np.float64]], tell: Tell
    ) -> dict[str, NDArray[np.float64]]:
        """Normalised measures; NaN for texts that are too long for them.

        Args:
            method: whose scores.
            numbers: of the texts.
            answers: probabilities of the classes from the sets of `one_by_one`, (sets, classes) for each.
            tell: how far it is.
        """
        found = np.full((2, len(numbers)), np.nan)
        self.search(method, numbers, tell)
        for place, (number, answer) in enumerate(zip(numbers, answers, strict=True)):
            scale = self.scorer.attainable(self.read[number])
            if scale is not None:
                label = int(self.full[number].argmax())
                found[:, place] = normalised_from(answer[:, label], scale)[:2]
        return {"normalised_comprehensiveness": found[0], "normalised_sufficiency": found[1]}

    def _correlation(
        self, method: str, numbers: Sequence[int], values: Sequence[NDArray[np.float64]], tell: Tell
    ) -> dict[str, NDArray[np.float64]]:
        """Rank correlation of sizes with absolute blank-out, if it is asked for and blank-out applies.

        Of signed scores the sizes count, as of blank-out: a word that speaks against the class matters too.
        """
        if not self.correlation:
            return {}
        found = np.full(len(numbers), np.nan)
        for place, (number, scores) in enumerate(zip(numbers, values, strict=True)):
            if number not in self.blanked:
                try:
                    self.blanked[number] = self.scorer.scores(REFERENCE, self.read[number])
                except ValueError:  # there is no token to replace words with
                    self.blanked[number] = None
                tell(f"{title_of(method)}, {title_of(REFERENCE)}", place + 1, len(numbers))
            reference = self.blanked[number]
            if reference is not None:
                found[place] = spearman(np.abs(scores)[None], reference)[0]
        return {"correlation": found}

    def _agreement(
        self,
        numbers: Sequence[int],
        values: Sequence[NDArray[np.float64]],
        picked: Sequence[NDArray[np.bool_]],
    ) -> dict[str, NDArray[np.float64]]:
        """Agreement with rationales; NaN for texts without any."""
        places = self._marked(numbers)
        if self.truth is None or self.passages is None or not places:
            return {}
        found = {name: np.full(len(numbers), np.nan) for name in HUMAN}
        for place in places:
            truth, scores = [self.truth[numbers[place]]], [values[place]]
            spans = [self.passages[numbers[place]]], [spans_of(picked[place])]
            found["auprc"][place] = auprc(truth, scores)[0]
            found["average_precision"][place] = auprc(truth, scores, area="average precision")[0]
            found["token_f1"][place] = token_f1(truth, [picked[place]]).f1
            found["iou_f1"][place] = iou_f1(*spans).f1
        return found

    def _marked(self, numbers: Sequence[int]) -> list[int]:
        """Places of the texts that have a rationale."""
        if self.truth is None:
            return []
        return [place for place, number in enumerate(numbers) if self.truth[number].any()]

    def _iou(self, numbers: Sequence[int], picked: Sequence[NDArray[np.bool_]]) -> float:
        """IOU F1 of mean precision and mean recall, which is no mean of texts' F1s."""
        assert self.passages is not None
        places = self._marked(numbers)
        truth = [self.passages[numbers[place]] for place in places]
        return iou_f1(truth, [spans_of(picked[place]) for place in places]).f1


def _mean(values: Any) -> float | None:
    """The mean of those that are defined; None if none is."""
    defined = [float(value) for value in values if not math.isnan(value)]
    return float(np.mean(defined)) if defined else None


class _Telling:
    """A line on standard error that says how far it is."""

    def __init__(self, progress: bool | Tell | None) -> None:
        self.own = progress if callable(progress) else None
        self.shown = sys.stderr.isatty() if progress is None else bool(progress)
        self.begun, self.words, self.told, self.width = 0.0, "", 0.0, 0

    def __enter__(self) -> Tell:
        return self.own or self._tell

    def __exit__(self, *details: object) -> None:
        if self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")

    def _tell(self, words: str, done: int, total: int) -> None:
        if not (self.shown and done):  # how long the rest takes is not known before any is done
            return
        now = time.monotonic()
        if words != self.words:
            self.words, self.begun = words, now
        if done < total and now - self.told < 0.5:
            return
        left = (now - self.begun) / done * (total - done)
        line = f"rationales: {words}, {done} of {total} texts, {left:.0f} s left"
        sys.stderr.write("\r" + line.ljust(self.width))
        sys.stderr.flush()
        self.told, self.width = now, max(self.width, len(line))
