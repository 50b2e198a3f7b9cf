"""Bayesian Attention Modules (Fan et al. 2020): random weights with a key-dependent prior."""

from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.edges import BayesianEdgeLayer
from overt.mechanisms.bayesian.fused import FORM
from overt.mechanisms.bayesian.layer import BayesianLayer
from overt.mechanisms.fused import register_fused
from overt.mechanisms.mechanism import register_mechanism

__all__ = ["Bayesian", "BayesianEdgeLayer", "BayesianLayer"]

register_mechanism(Bayesian, BayesianLayer, BayesianEdgeLayer)
register_fused(FORM)
