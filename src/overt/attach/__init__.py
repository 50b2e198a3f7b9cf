"""Mechanisms in Hugging Face models: attach, detach, describe, save, load, and posterior samples."""

from overt.attach.api import attach, describe, detach, kl, penalty
from overt.attach.loading import load
from overt.attach.posterior import Posterior, posterior

__all__ = ["Posterior", "attach", "describe", "detach", "kl", "load", "penalty", "posterior"]
