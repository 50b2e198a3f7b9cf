"""Evolving Attention (Wang et al. 2021): maps that start from the previous layer's map."""

from overt.mechanisms.evolving.config import Evolving
from overt.mechanisms.evolving.edges import EvolvingEdgeLayer
from overt.mechanisms.evolving.fused import FORMS
from overt.mechanisms.evolving.layer import EvolvingLayer
from overt.mechanisms.evolving.naive import evolve
from overt.mechanisms.evolving.shares import Zeros, zeros
from overt.mechanisms.fused import register_fused
from overt.mechanisms.mechanism import register_mechanism

__all__ = ["Evolving", "EvolvingEdgeLayer", "EvolvingLayer", "Zeros", "evolve", "zeros"]

register_mechanism(Evolving, EvolvingLayer, EvolvingEdgeLayer)
for form in FORMS:
    register_fused(form)
