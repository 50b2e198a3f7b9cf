"""Bayesian Attention Modules (Fan et al. 2020): random weights with a key-dependent prior."""

from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.edges import BayesianEdgeLayer
from overt.mechanisms.bayesian.layer import BayesianLayer

__all__ = ["Bayesian", "BayesianEdgeLayer", "BayesianLayer"]
