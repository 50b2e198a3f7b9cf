"""Mechanisms in Hugging Face models: attach, detach, describe, save, load, and draw posterior samples."""

from overt.attaching.api import attach, describe, detach, kl, losses, penalty, with_kl
from overt.attaching.loading import load
from overt.attaching.sampling import Posterior, SpanPosterior, posterior
from overt.attaching.tokens import TokenPosterior

__all__ = [
    "Posterior",
    "SpanPosterior",
    "TokenPosterior",
    "attach",
    "describe",
    "detach",
    "kl",
    "load",
    "losses",
    "penalty",
    "posterior",
    "with_kl",
]
