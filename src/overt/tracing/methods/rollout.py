"""Attention rollout (Abnar & Zuidema 2020, equation 1): products of the layers' maps."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.tracing.edges import Walk
from overt.tracing.levels import Level, Levels
from overt.tracing.methods.method import Cost, Method, MethodRequest, register_method


def rollout_of(levels: Levels, request: MethodRequest) -> Tensor:
    """Products of levels. One row costs one vector–matrix product per level, never a product of matrices.

    Rows of all requested layers go down together, or whole matrices up, whichever is fewer multiplications;
    each level is made once.
    """
    places = [levels.first + query for query in request.queries]
    everything = range(levels.tokens)
    layer_at = {levels.level_of(layer): layer for layer in request.layers}
    highest = max(layer_at)
    copies = levels.heads if request.each else 1

    def start(number: int, level: Level) -> Tensor:
        """The rows that begin at a level, (batch, rows, token)."""
        top = levels.level(number, "each", request.residual) if request.each else level
        return top.row(places).flatten(1, -2)

    down = sum(number * copies * len(places) for number in layer_at)
    up = highest * levels.tokens + len(layer_at) * copies * len(places)
    parts: dict[int, Tensor] = {}
    if down <= up or levels.of_states:
        carried: Tensor | None = None  # rows of all layers that began above, one after another
        for number in range(highest, 0, -1):
            level = levels.level(number, request.below, request.residual)
            carried = None if carried is None else level.apply(carried)
            if number in layer_at:
                rows = start(number, level)
                carried = rows if carried is None else torch.cat([carried.to(rows.device), rows], dim=1)
        assert carried is not None
        began = sorted(layer_at, reverse=True)
        parts = dict(zip((layer_at[number] for number in began), carried.chunk(len(began), 1), strict=True))
    else:
        product: Tensor | None = None
        for number in range(1, highest + 1):
            level = levels.level(number, request.below, request.residual)
            if number in layer_at:
                rows = start(number, level)
                parts[layer_at[number]] = rows if product is None else rows @ product
            product = level.row(everything) if product is None else level.row(everything) @ product
    values = torch.stack([parts[layer] for layer in request.layers], dim=1)
    if request.each:
        values = values.view(*values.shape[:2], copies, len(places), levels.tokens)
    return values


def rollout_over_edges(walk: Walk, request: MethodRequest) -> Tensor:
    """A row through the layers: one product and one sum per edge, (sample, head, place)."""
    carried = walk.start()
    for layer in range(walk.top, -1, -1):
        carried = walk.carried(layer, carried, request.residual)
    return carried


register_method(
    Method(
        name="rollout",
        title="rollout",
        reads="maps",
        run=rollout_of,
        cost=Cost("a product of a row with a map per layer", every=1024),
        paths=True,
        edges=rollout_over_edges,
    )
)
