"""Paired differences between rows of a table over seeds, and how they compare with published ones."""

from __future__ import annotations

import math

import torch

from overt.judge.families import holm

CONFIDENCE = 0.95


def paired(differences: list[float]) -> tuple[float, float, float]:
    """Mean of paired differences, and its 95 % interval by Student's t."""
    from scipy.stats import t  # type: ignore[import-untyped, unused-ignore]

    values = torch.tensor(differences, dtype=torch.float64)
    mean, count = float(values.mean()), len(differences)
    if count < 2:
        return mean, math.nan, math.nan
    half = float(t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * float(values.std()) / math.sqrt(count)
    return mean, mean - half, mean + half


def paired_p(differences: list[float]) -> float:
    """Two-sided p of the paired t-test; 1 where no pair differs, NaN of a single one."""
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

    The paper gives none. Taken are the spreads of our seeds, and rows that do not depend on each other: the
    square root of (variance of the one + variance of the other) / runs.
    """
    one, other = (torch.tensor(values, dtype=torch.float64).var() for values in (row, plain))
    return math.sqrt(float(one + other) / runs)


def published_p(published: float, error: float, differences: list[float]) -> float:
    """Two-sided p, by the normal distribution, of a published difference and our mean being one and the same.

    Each has its own standard error: the published one `error`, ours that of the paired mean.
    """
    values = torch.tensor(differences, dtype=torch.float64)
    both = math.hypot(error, float(values.std()) / math.sqrt(len(differences)))
    return math.erfc(abs(published - float(values.mean())) / both / math.sqrt(2)) if both else math.nan


def corrected_by_holm(p_values: list[float]) -> list[float]:
    """By Holm, for all of them together; nothing is known of a single seed."""
    if any(math.isnan(p) for p in p_values):
        return [math.nan] * len(p_values)
    return [float(p) for p in holm(p_values)]
