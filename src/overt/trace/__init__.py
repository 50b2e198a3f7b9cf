"""Attention read back to the input: capture, rollout, flow, and the importances to judge them by."""

from overt.trace.methods import flow, raw, rollout
from overt.trace.trace import Spread, Trace, trace

__all__ = ["Spread", "Trace", "flow", "raw", "rollout", "trace"]
