"""Traces of states, made small by a small budget."""

from __future__ import annotations

from typing import Any

from torch import nn

import overt

BYTES = 1000  # enough for a row, not for maps


def states_of(model: nn.Module, inputs: Any, memory: int = BYTES, **options: Any) -> overt.Trace:
    """A trace of states, whose results may then be of any size."""
    found = overt.trace(model, inputs, memory=memory, **options)
    assert found.of_states
    found.memory = 2**20
    for group in (found.maps, found.encoder_maps, found.cross):
        if group:
            group.most = 2**20  # type: ignore[union-attr]
    return found
