"""Paired differences between rows of a table over seeds, and their comparison with published ones."""

from __future__ import annotations

import math

import torch

from overt.judge.families import holm

CONFIDENCE = 0.95


def mean_interval(differences: list[float]) -> tuple[float, float, float]:
    """Mean of paired differences, and its 95 % interval (low, high) by Student's t."""
    from scipy.stats import t  # type: ignore[import-untyped, unused-ignore]

    values = torch.tensor(differences, dtype=torch.float64)
    mean, count = float(values.mean()), len(differences)
    if count < 2:
        return mean, math.nan, math.nan
    half = float(t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * float(values.std()) / math.sqrt(count)
    return mean, mean - half, mean + half


def paired_p(differences: list[float]) -> float:
    """Two-sided p of the paired t-test; 1 if no pair differs, NaN for a single pair."""
    from scipy.stats import t  # type: ignore[import-untyped, unused-ignore]

    values = torch.tensor(differences, dtype=torch.float64)
    count = len(differences)
    if count < 2:
        return math.nan
    mean, error = float(values.mean()), float(values.std()) / math.sqrt(count)
    if error == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return float(2 * t.sf(abs(mean) / error, count - 1))


def published_error(row: list[float], plain: list[float], runs: int) -> float:
    """Standard error of a published difference of two rows, each a mean of `runs` runs.

    The paper gives none. It is estimated from the spread of our seeds, with the rows assumed independent: the
    square root of (variance of the one + variance of the other) / runs.
    """
    row_variance, plain_variance = (
        torch.tensor(values, dtype=torch.float64).var() for values in (row, plain)
    )
    return math.sqrt(float(row_variance + plain_variance) / runs)


def published_p(published: float, error: float, differences: list[float]) -> float:
    """Two-sided p, by the normal distribution, of the test that a published difference equals our mean.

    The published difference has standard error `error`, and our mean that of the paired mean.
    """
    values = torch.tensor(differences, dtype=torch.float64)
    both = math.hypot(error, float(values.std()) / math.sqrt(len(differences)))
    return math.erfc(abs(published - float(values.mean())) / both / math.sqrt(2)) if both else math.nan


def correct_by_holm(p_values: list[float]) -> list[float]:
    """p-values with Holm's correction for all of them; all NaN if any is, as with a single seed."""
    if any(math.isnan(p) for p in p_values):
        return [math.nan] * len(p_values)
    return [float(p) for p in holm(p_values)]
