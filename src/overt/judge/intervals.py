"""Means with 95 % intervals: over texts, over seeds and texts, and of paired differences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A mean and its 95 % interval by Student's t.

    Attributes:
        mean: NaN if there are no values.
        low: NaN if there are fewer than two.
        high: the same.
        texts: how many there are.
        seeds: how many models' values there are.
    """

    mean: float
    low: float
    high: float
    texts: int
    seeds: int = 1


def interval_over(values: ArrayLike) -> Interval:
    """Mean over seeds and texts, with an interval for other texts and other models alike.

    Seeds and texts are crossed: the same texts are given to each of several trained models. The half-width is
    √(a² + b²), where a is that of Student's interval of the seeds' means and b that of the texts' means. What
    differs between single answers is in both, so that the interval is rather too wide than too narrow. With
    three seeds a is 4.3 standard errors. With one seed, the interval is for other texts and the same model.

    Args:
        values: (texts,), or (seeds, texts); NaN where a model has no value for a text.
    """
    from scipy.stats import t  # type: ignore[import-untyped, unused-ignore]

    table = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if table.ndim != 2:
        raise ValueError(f"values must be (texts,) or (seeds, texts), got shape {table.shape}")
    known = ~np.isnan(table)
    table, known = table[known.any(axis=1)], known[known.any(axis=1)]
    table, known = table[:, known.any(axis=0)], known[:, known.any(axis=0)]
    seeds, texts = table.shape
    if texts == 0:
        return Interval(math.nan, math.nan, math.nan, 0, 0)
    filled = np.where(known, table, 0.0)
    of_seeds = filled.sum(axis=1) / known.sum(axis=1)
    mean = float(of_seeds.mean())
    # A text that some models have no value for is compared with what these models make of other texts.
    residual = np.where(known, table - of_seeds[:, None], 0.0)
    of_texts = residual.sum(axis=0) / known.sum(axis=0)
    squares = [
        float(t.ppf(0.5 + CONFIDENCE / 2, len(means) - 1)) ** 2 * float(means.var(ddof=1)) / len(means)
        for means in (of_seeds, of_texts)
        if len(means) > 1
    ]
    half = math.sqrt(sum(squares)) if texts > 1 else math.nan
    return Interval(mean, mean - half, mean + half, texts, seeds)
