"""Which layer an attention is in, for the mixings that read whole layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from overt.tracing.capture import CapturedAttention


def is_layer(path: str) -> bool:
    """Whether a module may be a layer: a numbered member of a list."""
    return path.rpartition(".")[2].isdigit()


def layer_of(call: CapturedAttention) -> str | None:
    """Path of the layer that contains an attention; None if there is none, or the attention is the layer."""
    if call.chain == call.path:
        return None
    number = call.path.removeprefix(f"{call.chain}.").partition(".")[0]
    layer = f"{call.chain}.{number}"
    return None if layer == call.path else layer


def states_in(value: Any, what: str) -> Tensor:
    """The hidden states among what a layer takes or returns.

    Args:
        value: a tensor, or a tuple or list whose first entry is one.
        what: reads them, for the error.
    """
    states = value[0] if isinstance(value, tuple | list) and value else value
    if not isinstance(states, Tensor):
        raise ValueError(f"a layer must have hidden states for {what}, got {type(states).__name__}")
    return states
