"""Evolving Attention (Wang et al. 2021): maps that start from the previous layer's."""

from overt.mechanisms.evolving.config import Evolving
from overt.mechanisms.evolving.layer import EvolvingLayer
from overt.mechanisms.evolving.naive import evolve

__all__ = ["Evolving", "EvolvingLayer", "evolve"]
