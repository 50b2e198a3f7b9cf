"""Overt: attention, out in the open."""

from overt import judge
from overt.attach import Posterior, attach, describe, detach, kl, load, penalty, posterior
from overt.mechanisms.attention import MultiheadAttention
from overt.mechanisms.attention_map import AttentionMap, Mechanism
from overt.mechanisms.backend import naive
from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving import Evolving, evolve
from overt.mechanisms.scores import RelativePosition, RelativePosition2d, Synthesizer
from overt.mechanisms.site import Site
from overt.models.transformer import Decoder, Encoder
from overt.trace import Spread, Trace, flow, raw, rollout, trace
from overt.view.page import Page, page

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
    "Page",
    "Posterior",
    "RelativePosition",
    "RelativePosition2d",
    "Site",
    "Spread",
    "Synthesizer",
    "Trace",
    "attach",
    "describe",
    "detach",
    "evolve",
    "flow",
    "judge",
    "kl",
    "load",
    "naive",
    "page",
    "penalty",
    "posterior",
    "raw",
    "rollout",
    "trace",
]
