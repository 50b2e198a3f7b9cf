"""Overt: attention, out in the open."""

from overt import judge
from overt.attaching import Posterior, attach, describe, detach, kl, load, penalty, posterior
from overt.mechanisms.attention import MultiheadAttention
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.backend import naive
from overt.mechanisms.builtin import Bayesian, Evolving, Synthesizer
from overt.mechanisms.call import AttentionCall, EdgeCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving import evolve
from overt.mechanisms.mechanism import Mechanism, MechanismLayer, register_mechanism
from overt.mechanisms.scores import RelativePosition, RelativePosition2d
from overt.mechanisms.site import Site
from overt.models.transformer import Decoder, Encoder
from overt.tracing import Spread, Trace, flow, raw, rollout, trace
from overt.view.pages import Page, page

__version__ = "0.1.0"

__all__ = [
    "AttentionCall",
    "AttentionMap",
    "Bayesian",
    "Chain",
    "Decoder",
    "EdgeCall",
    "Encoder",
    "Evolving",
    "Mechanism",
    "MechanismLayer",
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
    "register_mechanism",
    "rollout",
    "trace",
]
