"""The built-in mechanisms, one line each; importing them registers them."""

from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.evolving import Evolving
from overt.mechanisms.synthesizer import Synthesizer

__all__ = ["Bayesian", "Evolving", "Synthesizer"]
