"""Attention read back to the input: traces, the graphs they hold, the methods that read them.

`trace` makes a `Trace`. A graph (`register_graph`) says what its maps are, a method (`register_method`) what
a query draws on by them.
"""

from overt.tracing.arrays import flow, raw, read, rollout
from overt.tracing.capture import Call
from overt.tracing.graphs.graph import GraphKind, register_graph
from overt.tracing.levels import Level, Levels
from overt.tracing.methods.blankout import BlankoutOptions
from overt.tracing.methods.flow import FlowOptions
from overt.tracing.methods.gradients import GradientsOptions
from overt.tracing.methods.method import Asked, Cost, Method, register_method
from overt.tracing.options import Arguments, Options
from overt.tracing.result import Draw, Predictions, Spread, Trace
from overt.tracing.subject import Subject
from overt.tracing.tracer import trace

__all__ = [
    "Arguments",
    "Asked",
    "BlankoutOptions",
    "Call",
    "Cost",
    "Draw",
    "FlowOptions",
    "GradientsOptions",
    "GraphKind",
    "Level",
    "Levels",
    "Method",
    "Options",
    "Predictions",
    "Spread",
    "Subject",
    "Trace",
    "flow",
    "raw",
    "read",
    "register_graph",
    "register_method",
    "rollout",
    "trace",
]
