"""Attention read back to the input: capture, rollout, flow, and the importances to judge them by."""

from overt.tracing.methods import flow, raw, rollout
from overt.tracing.tracer import Spread, Trace, trace

__all__ = ["Spread", "Trace", "flow", "raw", "rollout", "trace"]
