"""Synthesizer (Tay et al. 2020): logits that are learnt, or predicted from the query alone."""

from overt.mechanisms.mechanism import register_mechanism
from overt.mechanisms.synthesizer.config import Synthesizer
from overt.mechanisms.synthesizer.layer import SynthesizerLayer

__all__ = ["Synthesizer", "SynthesizerLayer"]

register_mechanism(Synthesizer, SynthesizerLayer, edges="whose map has a place for every pair of positions")
