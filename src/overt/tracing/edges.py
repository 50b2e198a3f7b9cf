"""The edges over which a node of a graph draws on others, layer by layer: what methods on graphs run over.

Nothing here is quadratic in the size of the graph: a node's neighbourhood is walked back from the top layer,
edge list by edge list, and only that part of the graph is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from overt.tracing.options import Heads

MOST_FLOW_NODES = (
    2048  # limit of flow over three or more layers, which holds a square matrix of them per layer
)


class Part(NamedTuple):
    """One layer's edges in a neighbourhood: their rows in the layer's list, and the places of both ends."""

    rows: Tensor
    source: Tensor
    target: Tensor


@dataclass(frozen=True, eq=False)
class Hood:
    """Nodes that may reach a node through the layers up to `top`, and the edges that lead there.

    Nodes are numbered by their places in `ids`.
    """

    place: int  # of the node itself
    ids: Tensor
    hops: Tensor
    parts: list[Part]  # layers 0 … top

    @property
    def top(self) -> int:
        """The layer to start from."""
        return len(self.parts) - 1

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.ids)


def hood_of(node: int, top: int, edges: Sequence[Tensor], nodes: int) -> Hood:
    """Walk back from a node at the top of a layer to the inputs."""
    far = len(edges) + 1
    hops = torch.full((nodes,), far)
    hops[node] = 0
    into: list[Tensor] = []
    for layer in range(top, -1, -1):
        source, target = edges[layer]
        rows = (hops[target] < far).nonzero().flatten()
        into.append(rows)
        # A step is one hop and staying is none, so these are distances, with or without self-loops.
        hops = hops.scatter_reduce(0, source[rows], hops[target[rows]] + 1, "amin")
    ids = (hops < far).nonzero().flatten()
    place = torch.empty(nodes, dtype=torch.int64)
    place[ids] = torch.arange(len(ids))
    parts = [
        Part(rows, place[edges[layer][0][rows]], place[edges[layer][1][rows]])
        for layer, rows in enumerate(reversed(into))
    ]
    return Hood(int(place[node]), ids, hops[ids], parts)


@dataclass(frozen=True, eq=False)
class Walk:
    """A neighbourhood with the weights of its edges.

    Attributes:
        hood: the neighbourhood.
        weights: one tensor per layer, (sample, edge, head), for all edges of the layer.
        heads: which heads to average; "each" keeps the heads of the top layer and averages those below.
    """

    hood: Hood
    weights: Sequence[Tensor]
    heads: Heads

    @property
    def top(self) -> int:
        """The layer to start from."""
        return self.hood.top

    @property
    def place(self) -> int:
        """Place of the node itself."""
        return self.hood.place

    @property
    def size(self) -> int:
        """Number of nodes."""
        return self.hood.size

    def cells(self, layer: int, rows: Tensor) -> Tensor:
        """Weights of some edges, float64 (sample, head, edge); one head if they are averaged."""
        cells = self.weights[layer][:, rows].double().transpose(1, 2)
        if isinstance(self.heads, str):
            single = self.heads == "each" and layer == self.top
            return cells if single else cells.mean(dim=1, keepdim=True)
        return cells[:, list(self.heads)].mean(dim=1, keepdim=True)

    def summed(self, cells: Tensor, places: Tensor, size: int | None = None) -> Tensor:
        """(…, edge) → (…, place): the sum at each place."""
        count = self.size if size is None else size
        return cells.new_zeros(*cells.shape[:-1], count).index_add_(-1, places, cells)

    def start(self) -> Tensor:
        """The starting row: 1 at the node itself, (1, 1, place)."""
        carried = torch.zeros(1, 1, self.size, dtype=torch.float64)
        carried[..., self.place] = 1.0
        return carried

    def into_node(self, layer: int) -> Tensor:
        """Weights of a layer's edges into the node, (sample, head, place)."""
        part = self.hood.parts[layer]
        into = (part.target == self.place).nonzero().flatten()
        return self.summed(self.cells(layer, part.rows[into]), part.source[into])

    def carried(self, layer: int, rows: Tensor, residual: float) -> Tensor:
        """A row over the nodes above a layer, carried down over its edges and its residual."""
        part = self.hood.parts[layer]
        handed = self.summed(self.cells(layer, part.rows) * rows[..., part.target], part.source)
        return (1.0 - residual) * handed + residual * rows

    def capacities(self, layer: int, residual: float) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's edges with the residual's, parallel edges merged: sources, targets, capacities."""
        part, size = self.hood.parts[layer], self.size
        cells = self.cells(layer, part.rows)
        source, target = part.source, part.target
        if residual:
            itself = torch.arange(size)
            source, target = torch.cat([source, itself]), torch.cat([target, itself])
            residuals = cells.new_full((*cells.shape[:2], size), residual)
            cells = torch.cat([(1.0 - residual) * cells, residuals], dim=-1)
        pairs, pair_of = torch.unique(target * size + source, return_inverse=True)
        return pairs % size, pairs // size, self.summed(cells, pair_of, len(pairs))

    def check_flow(self) -> None:
        """Refuse neighbourhoods that are too large to solve."""
        if self.top > 1 and self.size > MOST_FLOW_NODES:
            raise ValueError(
                f"flow over {self.top + 1} layers takes neighbourhoods of up to {MOST_FLOW_NODES} nodes, "
                f"got {self.size}: leave it out (flow=False), or ask for layers 0 and 1, "
                "whose flow has no limit"
            )
