"""Raw attention: the maps themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.tracing.edges import Walk
from overt.tracing.levels import Levels
from overt.tracing.methods.method import Cost, Method, MethodRequest, register_method


def raw_of(levels: Levels, request: MethodRequest) -> Tensor:
    """The maps; for an encoder–decoder, cross-attention next to the decoder's self-attention."""
    rows = [levels.weights(layer, request.heads).row(request.queries) for layer in request.layers]
    return torch.stack([row.to(rows[0].device) for row in rows], dim=1)  # layers may be on several devices


def raw_over_edges(walk: Walk, request: MethodRequest) -> Tensor:
    """Weights of the edges into a node, (sample, head, place)."""
    del request
    return walk.into_node(walk.top)


register_method(
    Method(
        name="raw",
        title="raw",
        reads="maps",
        run=raw_of,
        cost=Cost("nothing: the trace holds the maps"),
        needless=("residual",),
        value="weight",
        paths=True,
        edges=raw_over_edges,
    )
)
