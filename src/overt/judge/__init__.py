"""Measures of maps and of predictions."""

from overt.judge import uncertainty
from overt.judge.correlation import Correlations, Sanity, correlate, randomised, spearman

__all__ = ["Correlations", "Sanity", "correlate", "randomised", "spearman", "uncertainty"]
