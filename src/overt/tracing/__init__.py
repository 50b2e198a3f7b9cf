"""Attention traced back to the input: traces, the mixings that fill their maps, the methods that read them.

`trace` makes a `Trace`. A mixing (`register_mixing`) defines what its maps hold; a method (`register_method`)
computes from them what each query draws on.
"""

from overt.tracing.arrays import flow, raw, read, rollout
from overt.tracing.capture import CapturedAttention
from overt.tracing.levels import Level, Levels
from overt.tracing.methods.blankout import BlankoutOptions
from overt.tracing.methods.flow import FlowOptions
from overt.tracing.methods.gradients import GradientsOptions
from overt.tracing.methods.method import Cost, Method, MethodRequest, register_method
from overt.tracing.mixing.mixing import Mixing, register_mixing
from overt.tracing.options import Arguments, Options
from overt.tracing.result import PosteriorDraw, Predictions, Spread, Trace
from overt.tracing.subject import Subject
from overt.tracing.tracer import trace

__all__ = [
    "Arguments",
    "BlankoutOptions",
    "CapturedAttention",
    "Cost",
    "FlowOptions",
    "GradientsOptions",
    "Level",
    "Levels",
    "Method",
    "MethodRequest",
    "Mixing",
    "Options",
    "PosteriorDraw",
    "Predictions",
    "Spread",
    "Subject",
    "Trace",
    "flow",
    "raw",
    "read",
    "register_method",
    "register_mixing",
    "rollout",
    "trace",
]
