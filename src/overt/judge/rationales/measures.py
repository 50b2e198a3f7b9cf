"""Agreement of scores and passages with human rationales, on plain arrays, as ERASER defines it.

DeYoung et al. 2020, section 4.1. Documents are given as a mapping from their ids, or as a sequence, in which
their numbers are the ids; errors name the document.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from overt import _check

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Span: TypeAlias = tuple[int, int]
Documents: TypeAlias = "Mapping[str, Any] | Sequence[Any]"
Area = Literal["trapezoid", "average precision"]


class Agreement(NamedTuple):
    """Precision, recall and F1 over documents (macro), and over all words or passages together (micro)."""

    precision: float
    recall: float
    f1: float
    micro_precision: float
    micro_recall: float
    micro_f1: float


def by_id(documents: Documents) -> dict[str, Any]:
    """Documents by id; those of a sequence have their numbers."""
    if isinstance(documents, Mapping):
        return {str(name): value for name, value in documents.items()}
    return {str(number): value for number, value in enumerate(documents)}


def paired(truth: Documents, other: Documents, name: str) -> dict[str, tuple[Any, Any]]:
    """Both by id; each must have the other's documents."""
    ours, theirs = by_id(truth), by_id(other)
    for missing in ours.keys() - theirs.keys():
        raise ValueError(f"{name} has no document {missing!r}, which truth has")
    for unknown in theirs.keys() - ours.keys():
        raise ValueError(f"{name} has a document {unknown!r}, which truth has not")
    if not ours:
        raise ValueError("truth must have at least one document, got none")
    return {key: (value, theirs[key]) for key, value in ours.items()}


def checked_truth(truth: ArrayLike, document: str) -> NDArray[np.bool_]:
    """Which words are in the rationale; anything but 0 and 1 is refused."""
    values = np.asarray(truth)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"document {document}: truth must be a list of 0 and 1, got shape {values.shape}")
    if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        wrong = next((value for value in values.tolist() if value not in (0, 1)), None)
        raise ValueError(f"document {document}: truth must hold 0 and 1 alone, got {wrong!r}")
    return values.astype(bool)


def checked_scores(scores: ArrayLike, words: int, document: str) -> NDArray[np.float64]:
    """One finite number for each word."""
    try:
        values = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(
            f"document {document}: scores must be numbers, one for each of its {words} words, got {scores!r}"[
                :160
            ]
        ) from None
    if values.shape != (words,):
        raise ValueError(
            f"document {document}: scores must have one number for each of its {words} words, "
            f"got shape {values.shape}"
        )
    if not np.isfinite(values).all():
        place = int(np.flatnonzero(~np.isfinite(values))[0])
        raise ValueError(f"document {document}: scores must be finite, got {values[place]} at word {place}")
    return values


def checked_spans(spans: Any, words: int | None, document: str) -> list[Span]:
    """Passages as (first word, word after the last), within the document if its length is known."""
    found = []
    for span in spans:
        try:
            start, end = (operator.index(value) for value in span)
        except (TypeError, ValueError):
            raise ValueError(f"document {document}: a span must be two whole numbers, got {span!r}") from None
        if not 0 <= start <= end or (words is not None and end > words):
            length = "" if words is None else f" of {words} words"
            raise ValueError(f"document {document}{length}: a span must lie within it, got {start} to {end}")
        found.append((start, end))
    return found


def auprc(truth: Documents, scores: Documents, area: Area = "trapezoid") -> NDArray[np.float64]:
    """Area under the precision–recall curve of each document, (documents,).

    The trapezoidal area is the published measure. It joins the curve's points by straight lines, from
    precision 1 at recall 0, and so flatters scores with ties: a constant scorer gets (1 + p) / 2 where a
    share p of the words is right. Average precision is the sum of precisions weighted by the steps of recall,
    which gives it p. NaN for a document without a rationale.

    Args:
        truth: for each document, 1 for words of the rationale and 0 for the others.
        scores: for each document, a number for each word.
        area: which of the two.
    """
    _check.one_of("area", area, ("trapezoid", "average precision"))
    areas = []
    for document, (right, given) in paired(truth, scores, "scores").items():
        marked = checked_truth(right, document)
        values = checked_scores(given, len(marked), document)
        areas.append(_area(marked, values, area))
    return np.array(areas)


def _area(marked: NDArray[np.bool_], values: NDArray[np.float64], area: Area) -> float:
    if not marked.any():
        return float("nan")
    order = np.argsort(-values, kind="stable")
    hits = np.cumsum(marked[order])
    last = np.flatnonzero(np.append(np.diff(values[order]) != 0, True))  # of each group of equal scores
    precision, recall = hits[last] / (last + 1), hits[last] / hits[-1]
    steps = np.diff(np.concatenate([[0.0], recall]))
    if area == "average precision":
        return float((steps * precision).sum())
    before = np.concatenate([[1.0], precision[:-1]])
    return float((steps * (precision + before) / 2).sum())


def token_f1(truth: Documents, predicted: Documents) -> Agreement:
    """Agreement word by word. The macro F1 is the mean of documents' F1s.

    Args:
        truth: for each document, 1 for words of the rationale and 0 for the others.
        predicted: the same for the words that were chosen.
    """
    each, counts = [], np.zeros(3)
    for document, (right, given) in paired(truth, predicted, "predicted").items():
        marked = checked_truth(right, document)
        chosen = checked_truth(given, document)
        if len(chosen) != len(marked):
            raise ValueError(
                f"document {document}: predicted must have {len(marked)} words, got {len(chosen)}"
            )
        both, ours, theirs = (marked & chosen).sum(), chosen.sum(), marked.sum()
        counts += (both, ours, theirs)
        if ours or theirs:  # a document without any words of either kind is none of ERASER's
            precision, recall = _ratio(both, ours), _ratio(both, theirs)
            each.append((precision, recall, _f1(precision, recall)))
    means = np.mean(each, axis=0) if each else np.zeros(3)
    micro = _ratio(counts[0], counts[1]), _ratio(counts[0], counts[2])
    precision, recall, f1 = (float(mean) for mean in means)
    return Agreement(precision, recall, f1, *micro, _f1(*micro))


def iou_f1(truth: Documents, predicted: Documents, threshold: float = 0.5) -> Agreement:
    """Agreement passage by passage: one is right if it shares enough with a true one.

    Enough is intersection over union of at least `threshold`. As in ERASER, several predicted passages may
    match the same true one, and each counts, so that recall may exceed 1; and the macro F1 is that of mean
    precision and mean recall, over the documents that have any passage to divide by.

    Args:
        truth: for each document, its passages as (first word, word after the last).
        predicted: the same for those that were chosen.
        threshold: above 0.
    """
    _check.fraction("threshold", threshold)
    _check.positive("threshold", threshold)
    matched, ours, theirs = [], [], []
    for document, (right, given) in paired(truth, predicted, "predicted").items():
        true = checked_spans(right, None, document)
        chosen = set(checked_spans(given, None, document))
        best = [max((_iou(span, other) for other in true), default=0.0) for span in chosen]
        matched.append(sum(value >= threshold for value in best))
        ours.append(len(chosen))
        theirs.append(len(set(true)))
    parts = []
    for sizes in (ours, theirs):
        ratios = [_ratio(hits, size) for hits, size in zip(matched, sizes, strict=True) if size]
        parts.append(float(np.mean(ratios)) if ratios else 0.0)
    micro = _ratio(sum(matched), sum(ours)), _ratio(sum(matched), sum(theirs))
    return Agreement(parts[0], parts[1], _f1(*parts), *micro, _f1(*micro))


def spans_of(chosen: ArrayLike) -> list[Span]:
    """The runs of chosen words, as (first word, word after the last)."""
    marked = np.concatenate([[False], np.asarray(chosen, dtype=bool), [False]])
    edges = np.flatnonzero(marked[1:] != marked[:-1])
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def words_in(spans: Sequence[Span], words: int, document: str = "0") -> NDArray[np.bool_]:
    """Which of so many words are in one of the passages."""
    marked = np.zeros(words, dtype=bool)
    for start, end in checked_spans(spans, words, document):
        marked[start:end] = True
    return marked


def _iou(one: Span, other: Span) -> float:
    shared = max(0, min(one[1], other[1]) - max(one[0], other[0]))
    return _ratio(shared, one[1] - one[0] + other[1] - other[0] - shared)


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0


def _f1(precision: float, recall: float) -> float:
    return _ratio(2 * precision * recall, precision + recall)
