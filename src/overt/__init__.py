"""Overt: attention, out in the open."""

from overt.attach import Posterior, attach, describe, detach, kl, load, penalty, posterior
from overt.mechanisms.attention import MultiheadAttention
from overt.mechanisms.attention_map import AttentionMap, Mechanism
from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving import Evolving, evolve
from overt.mechanisms.scores import RelativePosition, RelativePosition2d, Synthesizer
from overt.mechanisms.site import Site
from overt.models.transformer import Decoder, Encoder

__version__ = "0.1.0"

__all__ = [
    "AttentionMap",
    "Bayesian",
    "Chain",
    "Decoder",
    "Encoder",
    "Evolving",
    "Mechanism",
    "MultiheadAttention",
    "Posterior",
    "RelativePosition",
    "RelativePosition2d",
    "Site",
    "Synthesizer",
    "attach",
    "describe",
    "detach",
    "evolve",
    "kl",
    "load",
    "penalty",
    "posterior",
]
