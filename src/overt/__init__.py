"""Overt: attention, out in the open."""

from typing import TYPE_CHECKING, Any

from overt import judge
from overt._version import __version__
from overt.attaching import (
    Posterior,
    SpanPosterior,
    TokenPosterior,
    attach,
    describe,
    detach,
    kl,
    load,
    losses,
    penalty,
    posterior,
    with_kl,
)
from overt.mechanisms.attention import MultiheadAttention
from overt.mechanisms.backend import naive
from overt.mechanisms.builtin import Bayesian, Evolving, Synthesizer
from overt.mechanisms.call import AttentionCall, EdgeCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving import evolve
from overt.mechanisms.mechanism import Mechanism, MechanismLayer, register_mechanism
from overt.mechanisms.scores import RelativePosition, RelativePosition2d
from overt.models.transformer import Decoder, Encoder
from overt.tracing import Trace, flow, raw, rollout, trace
from overt.view import page

if TYPE_CHECKING:
    from overt import corpus, vision
    from overt.attaching.calibrating import Calibration, calibrate
    from overt.attaching.loss_log import LossLog
    from overt.corpus.tracer import Tracer

__all__ = [
    "AttentionCall",
    "Bayesian",
    "Calibration",
    "Chain",
    "Decoder",
    "EdgeCall",
    "Encoder",
    "Evolving",
    "LossLog",
    "Mechanism",
    "MechanismLayer",
    "MultiheadAttention",
    "Posterior",
    "RelativePosition",
    "RelativePosition2d",
    "SpanPosterior",
    "Synthesizer",
    "TokenPosterior",
    "Trace",
    "Tracer",
    "__version__",
    "attach",
    "calibrate",
    "corpus",
    "describe",
    "detach",
    "evolve",
    "flow",
    "judge",
    "kl",
    "load",
    "losses",
    "naive",
    "page",
    "penalty",
    "posterior",
    "raw",
    "register_mechanism",
    "rollout",
    "trace",
    "vision",
    "with_kl",
]

# Imported on first use: `import overt` stays light.
_LATER = {
    "Calibration": "overt.attaching.calibrating",
    "LossLog": "overt.attaching.loss_log",
    "Tracer": "overt.corpus.tracer",
    "calibrate": "overt.attaching.calibrating",
}
_MOVED = {
    "AttentionMap": "overt.mechanisms",
    "Page": "overt.view",
    "Site": "overt.mechanisms",
    "Spread": "overt.tracing",
}


def __getattr__(name: str) -> Any:
    """Import `corpus`, `vision` and what is needed less often on first use; moved names give a warning."""
    import importlib
    import warnings

    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name in ("corpus", "vision"):
        return importlib.import_module(f"overt.{name}")
    if name not in _MOVED:
        raise AttributeError(f"module 'overt' has no attribute {name!r}")

    module = _MOVED[name]
    warnings.warn(f"overt.{name} has moved: {module}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(module), name)
