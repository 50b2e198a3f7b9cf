"""From edge scores to edge weights, through whichever mechanisms a graph attention has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from overt.mechanisms.attention_map import Layers
from overt.mechanisms.call import EdgeCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.edges import edge_softmax
from overt.mechanisms.mechanism import Mechanism
from overt.mechanisms.site import Site


class EdgeMap(Layers):
    """`AttentionMap` on an edge list: memory is linear in the number of edges.

    Mechanisms act at the same points in the same order, on (edges, heads) tensors.
    """

    def __init__(self, mechanisms: Sequence[Mechanism], site: Site) -> None:
        super().__init__(mechanisms, site, lambda mechanism: mechanism.edge_layer(site))

    def forward(self, scores: Tensor, call: EdgeCall, chain: Chain) -> Tensor:
        """Weights (edges, heads), at least float32; they sum to one over the edges into each node.

        Args:
            scores: of this layer, (edges, heads).
            call: the edges, and what mechanisms read.
            chain: what the layers below left, and where this layer leaves its part.
        """
        layers = self.layers
        if layers:
            chain.claim(call.site, self)
        for point in ("logits", "refine"):
            for layer in layers:
                if layer.acts_at(point):
                    scores = layer(point, scores, call, chain)
        makers = [layer for layer in layers if layer.acts_at("weights")]
        if makers:
            weights: Tensor = makers[0]("weights", scores, call, chain)
        else:
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
            weights = edge_softmax(scores, call.edge_index[1], call.nodes, chain.switched_off)
        for layer in layers:
            if layer.acts_at("mixed"):
                weights = layer("mixed", weights, call, chain)
        return weights
