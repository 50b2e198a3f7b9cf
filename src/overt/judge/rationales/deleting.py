"""Do the words that a method names matter to the classifier? Measures of what deleting words does.

Comprehensiveness and sufficiency (DeYoung et al. 2020, section 4.2) compare the probability of the class that
is predicted from the whole text with that from a part of it. The functions below that ask a classifier take a
function of sets of kept words, boolean (sets, words), which returns that probability of each set, (sets,).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from overt import _check
from overt.judge.rationales.measures import checked_scores

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Kept: TypeAlias = NDArray[np.bool_]

Predict: TypeAlias = "Callable[[Kept], Floats]"
# Kept words, in bytes → sum of the probabilities on the way to them, these words, and the order of deletion.
Beam: TypeAlias = "dict[bytes, tuple[float, Kept, tuple[int, ...]]]"
Ties = Literal["random", "last"]
SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)  # of the words, as ERASER has them
EXACT, SEARCHED = 12, 30  # words up to which the best order is found exactly, and by a beam
BEAM = 5
SIGNS = (1.0, -1.0)  # of the beams that search for the lowest and for the highest sum
LEAST = 1e-12  # probability in a logarithm
ROUNDED = 1e-6  # difference of probabilities that rounding may make, of products of float32


def count_of(share: float, words: int) -> int:
    """⌈share · words⌉ words; a product that rounding has pushed above a whole number is that number."""
    return min(words, math.ceil(share * words - 1e-9))


def ranked(scores: ArrayLike, ties: Ties = "random", seed: int = 0, document: str = "0") -> NDArray[np.int64]:
    """Words in the order of their scores, the highest first.

    Args:
        scores: a number for each word.
        ties: order of equal scores: "random", or "last", the last word first, as ERASER's own code has it.
            LIME leaves most words of a long text at 0, so this matters.
        seed: of random ties.
        document: for errors.
    """
    _check.one_of("ties", ties, ("random", "last"))
    values = checked_scores(scores, np.size(scores), document)
    before = np.arange(len(values))[::-1]
    if ties == "random":
        before = np.random.default_rng(seed).permutation(len(values))
    return before[np.argsort(-values[before], kind="stable")]


def chosen(scores: ArrayLike, share: float, ties: Ties = "random", seed: int = 0) -> Kept:
    """Which words are among the share of them that scores highest."""
    _check.fraction("share", share)
    order = ranked(scores, ties, seed)
    marked = np.zeros(len(order), dtype=bool)
    marked[order[: count_of(share, len(order))]] = True
    return marked


def without_and_only(
    scores: ArrayLike, shares: Sequence[float] = SHARES, ties: Ties = "random", seed: int = 0
) -> tuple[Kept, Kept]:
    """Sets of kept words, (shares, words): all but the highest scores, and these alone."""
    top = np.stack([chosen(scores, share, ties, seed) for share in shares])
    return ~top, top


# --- From probabilities ---


def aopc(full: ArrayLike, changed: ArrayLike, plus_one: bool = False) -> Floats:
    """Mean fall of a probability over shares of the words, (documents,).

    Of texts without their highest words it is comprehensiveness (more is better); of these words alone,
    sufficiency (less is better).

    Args:
        full: probability from the whole text, (documents,).
        changed: probability from parts of it, (documents, shares).
        plus_one: divide by the number of shares plus one, as equation 3 of the ERASER paper does. Its code
            divides by their number.
    """
    whole, parts = _probabilities("full", full, 1), _probabilities("changed", changed, 2)
    if len(whole) != len(parts):
        raise ValueError(f"changed must have {len(whole)} documents, as full has, got {len(parts)}")
    fall: Floats = (whole[:, None] - parts).sum(axis=1) / (parts.shape[1] + plus_one)
    return fall


def log_odds(full: ArrayLike, changed: ArrayLike) -> Floats:
    """log p(changed) − log p(full), mean over shares, (documents,); p below 1e-12 counts as that.

    Without the highest words, less is better.
    """
    whole, parts = _probabilities("full", full, 1), _probabilities("changed", changed, 2)
    if len(whole) != len(parts):
        raise ValueError(f"changed must have {len(whole)} documents, as full has, got {len(parts)}")
    logs: Floats = np.log(np.maximum(parts, LEAST)) - np.log(np.maximum(whole, LEAST))[:, None]
    return np.asarray(logs.mean(axis=1))


def _probabilities(name: str, values: ArrayLike, dims: int) -> Floats:
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != dims or given.size == 0:
        raise ValueError(f"{name} must have {dims} axes and at least one number, got shape {given.shape}")
    outside = ~((given >= 0.0) & (given <= 1.0))  # also NaN
    if outside.any():
        place = int(np.argwhere(outside)[0][0])
        raise ValueError(f"{name} must hold probabilities, got {given[outside][0]} for document {place}")
    return given


# --- From a classifier ---


class Curves(NamedTuple):
    """Probabilities as words are deleted.

    Attributes:
        shares: of the words that are deleted, (points,).
        morf: most relevant words first (points,); a steep fall is good.
        lerf: least relevant words first (points,); a late fall is good.
    """

    shares: Floats
    morf: Floats
    lerf: Floats

    @property
    def between(self) -> float:
        """Mean distance of the two curves: 0 for random scores, on average."""
        return float((self.lerf - self.morf).mean())


def curves(
    scores: ArrayLike, predict: Predict, points: int = 11, ties: Ties = "random", seed: int = 0
) -> Curves:
    """Probabilities as the most, and as the least relevant words are deleted, from none to all.

    Args:
        scores: a number for each word.
        predict: sets of kept words → probabilities.
        points: of each curve.
        ties: as for `ranked`.
        seed: of random ties.
    """
    kept = curve_sets(scores, points, ties, seed)
    return curves_from(asked(predict, kept))


def curve_sets(scores: ArrayLike, points: int = 11, ties: Ties = "random", seed: int = 0) -> Kept:
    """Sets of kept words of both curves, (2 · points, words); the arguments are those of `curves`."""
    _check.whole("points", points, 2)
    order = ranked(scores, ties, seed)
    counts = [count_of(share, len(order)) for share in np.linspace(0.0, 1.0, points)]
    return np.concatenate([_deleted(each, counts) for each in (order, order[::-1])])


def curves_from(probabilities: Floats) -> Curves:
    """Both curves from the probabilities of their sets."""
    morf, lerf = np.split(probabilities, 2)
    return Curves(np.linspace(0.0, 1.0, len(morf)), morf, lerf)


def _deleted(order: NDArray[np.int64], counts: Sequence[int]) -> Kept:
    kept = np.ones((len(counts), len(order)), dtype=bool)
    for row, count in enumerate(counts):
        kept[row, order[:count]] = False
    return kept


def asked(predict: Predict, kept: Kept) -> Floats:
    """What the classifier says, checked."""
    found = np.asarray(predict(kept), dtype=np.float64)
    if found.shape != (len(kept),) or not np.isfinite(found).all():
        raise ValueError(
            f"predict must return a finite probability for each of {len(kept)} sets, got shape {found.shape}"
        )
    return found


class Attainable(NamedTuple):
    """The least and the greatest mean fall that any order of deleting words one by one gives.

    Attributes:
        least: of all orders, or of those that a beam found.
        greatest: of the same.
        exact: whether it is of all orders.
        order: the words in the order of deletion that has the greatest fall.
    """

    least: float
    greatest: float
    exact: bool
    order: tuple[int, ...] = ()


def attainable(words: int, predict: Predict) -> Attainable | None:
    """The range of AOPC over all orders of deletion (Edin et al. 2024); None for more than 30 words.

    Up to 12 words by dynamic programming over the 2ⁿ sets of deleted words, which is exact; up to 30 by a
    beam of 5, whose range may be too narrow.
    """
    _check.whole("words", words, 1)
    if words > SEARCHED:
        return None
    return ranges([words], lambda sets: [asked(predict, kept) for _, kept in sets])[0]


def ranges(
    words: Sequence[int],
    ask: Callable[[list[tuple[int, Kept]]], Sequence[Floats]],
    told: Callable[[int, int], object] = lambda _done, _of: None,
) -> list[Attainable]:
    """As `attainable`, of several texts of up to 30 words, whose searches go on together.

    Args:
        words: of each text.
        ask: numbers of texts, each with sets of kept words → probabilities of the sets of each.
        told: called after each step with how many were taken, and how many there are.
    """
    short = [number for number, count in enumerate(words) if count <= EXACT]
    long = [number for number, count in enumerate(words) if count > EXACT]
    wholes = [(number, np.ones((1, words[number]), dtype=bool)) for number in long]
    answers = ask([*((number, ~_all_deleted(words[number])) for number in short), *wholes])
    found = {number: _exactly(p) for number, p in zip(short, answers, strict=False)}
    full = {number: float(p[0]) for number, p in zip(long, answers[len(short) :], strict=True)}
    beams = {number: [_start(words[number]) for _ in SIGNS] for number in long}
    steps = max((words[number] for number in long), default=0)
    for step in range(steps):
        nexts = {number: _nexts(beams[number]) for number in long if step < words[number]}
        sets = {
            number: [kept for each in own for _, kept, _ in each.values()] for number, own in nexts.items()
        }
        answers = ask([(number, np.stack(each)) for number, each in sets.items()])
        for (number, own), p in zip(nexts.items(), answers, strict=True):
            beams[number] = _best(own, p)
        told(step + 1, steps)
    for number in long:
        (lowest, _, order), (highest, _, _) = (next(iter(beam.values())) for beam in beams[number])
        least, greatest = (full[number] - float(total / words[number]) for total in (highest, lowest))
        found[number] = Attainable(least, greatest, False, order)
    return [found[number] for number in range(len(words))]


def _all_deleted(words: int) -> Kept:
    """All sets of deleted words, (2^words, words); a set's number has the bits of the words deleted."""
    found: Kept = (np.arange(2**words)[:, None] >> np.arange(words)) & 1 == 1
    return found


def _exactly(p: Floats) -> Attainable:
    """The range by dynamic programming, from the probability of each set of `_all_deleted`."""
    words = len(p).bit_length() - 1
    low, high = np.full(2**words, np.inf), np.full(2**words, -np.inf)
    low[0] = high[0] = 0.0
    last = np.zeros(2**words, dtype=np.int64)  # the word deleted last on the way to the lowest sum
    for state in range(1, 2**words):  # sums of probabilities along the best way to it
        gone = [word for word in range(words) if state >> word & 1]
        before = [state ^ (1 << word) for word in gone]
        last[state] = gone[int(low[before].argmin())]
        low[state] = p[state] + low[before].min()
        high[state] = p[state] + high[before].max()
    state, backwards = 2**words - 1, list[int]()
    while state:
        backwards.append(int(last[state]))
        state ^= 1 << backwards[-1]
    order, full = tuple(reversed(backwards)), float(p[0])
    return Attainable(full - float(high[-1]) / words, full - float(low[-1]) / words, True, order)


def _start(words: int) -> Beam:
    return {b"": (0.0, np.ones(words, dtype=bool), ())}


def _nexts(beams: Sequence[Beam]) -> list[Beam]:
    """What each beam of `SIGNS` may go on to: without one more word. Sums are those before it."""
    found = list[Beam]()
    for sign, beam in zip(SIGNS, beams, strict=True):
        nexts: Beam = {}
        for total, kept, gone in beam.values():
            for word in np.flatnonzero(kept):
                after = kept.copy()
                after[word] = False
                key = after.tobytes()
                if key not in nexts or sign * total < sign * nexts[key][0]:
                    nexts[key] = total, after, (*gone, int(word))
        found.append(nexts)
    return found


def _best(nexts: Sequence[Beam], probabilities: Floats) -> list[Beam]:
    """The best of what each beam may go on to, from the probabilities of all of it; the best one first."""
    found, own = list[Beam](), iter(probabilities)
    for sign, beam in zip(SIGNS, nexts, strict=True):
        rows = [(key, (total + next(own), kept, gone)) for key, (total, kept, gone) in beam.items()]
        found.append(dict(sorted(rows, key=lambda item: sign * item[1][0])[:BEAM]))
    return found


class Normalised(NamedTuple):
    """Comprehensiveness and sufficiency on a scale from the worst (0) to the best order (1).

    Words are deleted one by one until none is left. A good method has a high comprehensiveness and a low
    sufficiency.

    Attributes:
        comprehensiveness: with the highest scores deleted first; NaN where all orders are equal, to rounding.
        sufficiency: with the highest scores kept longest.
        exact: whether the scale is exact.
    """

    comprehensiveness: float
    sufficiency: float
    exact: bool


def normalised_aopc(
    scores: ArrayLike, predict: Predict, scale: Attainable | None = None, ties: Ties = "random", seed: int = 0
) -> Normalised | None:
    """AOPC on the scale of what any order attains for this model and text; None for more than 30 words.

    Each model has its own range, so that plain AOPC does not compare models (Edin et al. 2024).

    Args:
        scores: a number for each word.
        predict: sets of kept words → probabilities.
        scale: what `attainable` returned for this text, if it is known already.
        ties: as for `ranked`.
        seed: of random ties.
    """
    sets = one_by_one(scores, ties, seed)
    scale = attainable(sets.shape[1], predict) if scale is None else scale
    return None if scale is None else normalised_from(asked(predict, sets), scale)


def one_by_one(scores: ArrayLike, ties: Ties = "random", seed: int = 0) -> Kept:
    """Sets of kept words, (2 · words + 1, words), from all to none as words are deleted one by one.

    First all; then without the highest scores, one more at a time; then the same from the lowest on.
    """
    order = ranked(scores, ties, seed)
    counts = list(range(1, len(order) + 1))
    return np.concatenate([_deleted(order, [0, *counts]), _deleted(order[::-1], counts)])


def normalised_from(probabilities: Floats, scale: Attainable) -> Normalised:
    """The normalised measures from the probabilities of the sets of `one_by_one`."""
    words = len(probabilities) // 2
    full, highest, lowest = np.split(probabilities, (1, words + 1))
    falls = float(full[0] - highest.mean()), float(full[0] - lowest.mean())
    low, high = min(scale.least, *falls), max(scale.greatest, *falls)  # beyond what a beam found
    if high - low < ROUNDED:
        return Normalised(math.nan, math.nan, scale.exact)
    return Normalised((falls[0] - low) / (high - low), (falls[1] - low) / (high - low), scale.exact)
