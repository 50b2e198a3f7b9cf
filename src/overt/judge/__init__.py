"""Measures of maps and of predictions."""

from typing import Any

from overt.judge import uncertainty
from overt.judge.correlation import Correlations, Sanity, correlate, randomised, spearman
from overt.judge.families import holm

__all__ = ["Correlations", "Sanity", "correlate", "holm", "randomised", "spearman", "uncertainty"]


def __getattr__(name: str) -> Any:
    """Import `rationales` on first use."""
    import importlib

    if name == "rationales":
        return importlib.import_module("overt.judge.rationales")
    raise AttributeError(f"module 'overt.judge' has no attribute {name!r}")
