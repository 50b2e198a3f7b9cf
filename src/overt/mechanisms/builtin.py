"""The mechanisms that come with Overt, registered by being imported: a line for each."""

from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.evolving import Evolving
from overt.mechanisms.synthesizer import Synthesizer

__all__ = ["Bayesian", "Evolving", "Synthesizer"]
