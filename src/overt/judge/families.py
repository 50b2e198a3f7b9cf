"""Multiple comparisons: p-values corrected for a whole family of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """P-values of a family of comparisons after Holm's correction, in the order of the input.

    Holm 1979: of m p-values in ascending order, the i-th (from 0) is multiplied by m − i; none falls below an
    earlier one, and none exceeds 1. If those below 0.05 are called significant, the chance that any of the
    family is called so wrongly is at most 5 %, however the comparisons depend on each other.

    Args:
        p_values: of all comparisons that were made, (comparisons,).
    """
    p = np.asarray(p_values, dtype=np.float64)
    if p.ndim != 1 or p.size == 0:
        raise ValueError(f"p_values must be a sequence of one number or more, got shape {p.shape}")
    if not ((p >= 0.0) & (p <= 1.0)).all():  # also catches NaN
        raise ValueError(f"p_values must lie in [0, 1], got {p[~((p >= 0.0) & (p <= 1.0))][0]}")
    order = np.argsort(p, kind="stable")
    raised = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    corrected = np.empty_like(p)
    corrected[order] = raised
    return corrected
