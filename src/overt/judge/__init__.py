"""Measures of maps and of predictions."""

from overt.judge import uncertainty
from overt.judge.correlation import Correlations, Sanity, correlate, randomised, spearman
from overt.judge.families import holm

__all__ = ["Correlations", "Sanity", "correlate", "holm", "randomised", "spearman", "uncertainty"]
