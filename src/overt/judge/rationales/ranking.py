"""Methods in the order of a measure, and which of them the texts do not tell apart from the best."""

from __future__ import annotations

import math

from overt.judge.rationales.evaluation import FAITHFUL, HUMAN, LESS_IS_BETTER, REFERENCES, Evaluation
from overt.judge.rationales.methods import CONTROLS

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
    """Methods, the best by a measure first; those without it last."""
    sign = 1.0 if measure in LESS_IS_BETTER else -1.0

    def place(name: str) -> float:
        value = found.methods[name].measures.get(measure)
        return math.inf if value is None else sign * value

    return sorted(found.methods, key=place)


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
