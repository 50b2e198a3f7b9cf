"""Raw attention: the maps themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.tracing.edges import Walk
from overt.tracing.levels import Levels
from overt.tracing.methods.method import Cost, Method, MethodRequest, register_method


def raw_of(levels: Levels, asked: MethodRequest) -> Tensor:
    """The maps; of an encoder–decoder, cross-attention beside decoder self-attention."""
    rows = [levels.weights(layer, asked.heads).row(asked.queries) for layer in asked.layers]
    return torch.stack(rows, dim=1)


def raw_over_edges(walk: Walk, asked: MethodRequest) -> Tensor:
    """Weights of the edges into a node, (sample, head, place)."""
    del asked
    return walk.into_node(walk.top)


register_method(
    Method(
        name="raw",
        title="raw",
        reads="maps",
        run=raw_of,
        cost=Cost("nothing: the maps are there"),
        needless=("residual",),
        value="weight",
        paths=True,
        edges=raw_over_edges,
    )
)
