"""Methods in the order of a measure, and which of them the texts do not tell apart from the best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from overt.judge.rationales.deleting import SEARCHED
from overt.judge.rationales.evaluation import FAITHFUL, HUMAN, LESS_IS_BETTER, REFERENCES, Evaluation
from overt.judge.rationales.methods import CONTROLS, RANDOM
from overt.judge.rationales.randomising import MOST

if TYPE_CHECKING:
    from overt.judge.intervals import Interval

# Columns of `overt judge`. Log-odds and IOU F1 are left to `Evaluation`: the first says what
# comprehensiveness does, and the second is no mean over texts.
COLUMNS = tuple(name for name in (*FAITHFUL, *HUMAN) if name not in ("log_odds", "iou_f1"))

SHOWN = 0.0005  # half of the last digit of a table


def heading_of(measure: str) -> str:
    """A measure's name in tables, without its arrow."""
    return {**HUMAN, **FAITHFUL}[measure].rstrip(" ↑↓")


def columns_of(found: Evaluation) -> list[str]:
    """The measures of `COLUMNS` that at least one method has."""
    return [
        name for name in COLUMNS if any(own.measures.get(name) is not None for own in found.methods.values())
    ]


def ordered(found: Evaluation, measure: str) -> list[str]:
    """Methods, the best by a measure first; then those that are `apart`, and those without it last."""
    sign = 1.0 if measure in LESS_IS_BETTER else -1.0
    others = apart(found, measure)

    def place(name: str) -> tuple[bool, bool, float]:
        value = found.methods[name].measures.get(measure)
        return value is None, name in others, 0.0 if value is None else sign * value

    return sorted(found.methods, key=place)


def counted(found: Evaluation, measure: str) -> dict[str, int]:
    """Method → how many texts its mean of a measure is over; none without it."""
    return {
        name: len(found.table(measure, [name])[0])
        for name, own in found.methods.items()
        if own.measures.get(measure) is not None
    }


def apart(found: Evaluation, measure: str) -> set[str]:
    """Methods that were judged on some of the texts, and whose mean is over fewer than the others' therefore.

    Other texts have other values, so that these methods have no place among the others. The best order is one
    where some texts are too long for it; by the normalised measures, it has the same texts as all.
    """
    counts = counted(found, measure)
    return {
        name
        for name, count in counts.items()
        if len(found.methods[name].texts) < found.texts and count < max(counts.values())
    }


def coverage(found: Evaluation, measure: str) -> tuple[str, str] | None:
    """How many texts a measure is of, such as "31 of 40", and why not of all; None where it is.

    Methods that were judged on some of the texts only do not count, unless there are no others.
    """
    names = list(counted(found, measure))
    whole = [name for name in names if len(found.methods[name].texts) == found.texts] or names
    have = {name: set(found.table(measure, [name])[0]) for name in whole}
    judged = max((len(found.methods[name].texts) for name in whole), default=0)
    if all(len(texts) == len(found.methods[name].texts) for name, texts in have.items()):
        return None
    return _span([len(texts) for texts in have.values()], judged), _why(found, measure, have)


def coverage_after_shuffling(found: Evaluation, left: Mapping[str, Interval]) -> tuple[str, str] | None:
    """The same of the correlations after the weights are shuffled.

    Args:
        found: from `evaluate`.
        left: from `after_shuffling`.
    """
    counts = [own.texts for name, own in left.items() if len(found.methods[name].texts) == found.texts] or [
        own.texts for own in left.values()
    ]
    if not counts or min(counts) == found.texts:
        return None
    first = [f"only the first {MOST} are compared"] if found.texts > MOST else []
    equal = ["in the others, all words score the same"] if min(counts) < min(found.texts, MOST) else []
    return _span(counts, found.texts), ", and ".join([*first, *equal])


def _span(counts: list[int], texts: int) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,} of {texts:,}" if least == most else f"{least:,} to {most:,} of {texts:,}"


def _why(found: Evaluation, measure: str, have: Mapping[str, set[int]]) -> str:
    """Why some texts of some methods have no value."""
    if measure in HUMAN:
        return "in the others, no word is marked"
    if not measure.startswith("normalised"):
        return "in the others, all words score the same"
    lacking: list[int] = []  # words of each
    for name, texts in have.items():
        own = found.methods[name]
        lacking += [len(s) for text, s in zip(own.texts, own.scores, strict=True) if text not in texts]
    long, same = f"the others have more than {SEARCHED} words", "no deletion changes the answer"
    if min(lacking) > SEARCHED:
        return long
    return f"in the others, {same}" if max(lacking) <= SEARCHED else f"{long}, or {same}"


def leading(found: Evaluation, measure: str) -> set[str]:
    """The best method by a measure, and all others that the texts do not tell apart from it.

    A difference to the best is told where its paired 95 % interval, over the texts that both methods have,
    does not hold zero, and the difference is not smaller than a table shows. Controls neither lead nor are
    among the others, nor does blank-out by its correlation with itself. Each comparison is made by itself;
    the best of many methods is in part the best by chance.

    Args:
        found: from `evaluate`.
        measure: one of `COLUMNS`.
    """
    apart = (*CONTROLS, *(REFERENCES if measure == "correlation" else ()))
    names = [
        name
        for name in ordered(found, measure)
        if name not in apart and found.methods[name].measures.get(measure) is not None
    ]
    together = set(names[:1])
    for name in names[1:]:
        difference = found.paired(names[0], name, measure)
        told = difference.low > 0.0 or difference.high < 0.0  # not where a single text gives no interval
        if not told or abs(difference.mean) < SHOWN:
            together.add(name)
    return together


def beating_chance(found: Evaluation, measure: str) -> dict[str, bool]:
    """Method → whether the texts tell it to be better than random scores; empty where these were not judged.

    As for `leading`, by the paired 95 % interval of each method by itself. Controls are left out, and
    blank-out by its correlation with itself.

    Args:
        found: from `evaluate`.
        measure: one of `COLUMNS`.
    """
    known = {name for name, own in found.methods.items() if own.measures.get(measure) is not None}
    if RANDOM not in known:
        return {}
    sign = -1.0 if measure in LESS_IS_BETTER else 1.0
    names = known - {*CONTROLS, *(REFERENCES if measure == "correlation" else ())}
    gains = {name: found.paired(name, RANDOM, measure) for name in names}
    return {
        name: min(sign * gain.low, sign * gain.high) > 0.0 and abs(gain.mean) >= SHOWN
        for name, gain in gains.items()
    }
