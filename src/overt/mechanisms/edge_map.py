"""From edge scores to edge weights, through whichever mechanisms a graph attention has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from overt.mechanisms.attention_map import Mechanism, check_mechanisms, find
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.edges import BayesianEdgeLayer
from overt.mechanisms.chain import Chain
from overt.mechanisms.edges import edge_softmax
from overt.mechanisms.evolving.config import Evolving
from overt.mechanisms.evolving.edges import EvolvingEdgeLayer
from overt.mechanisms.scores import Synthesizer
from overt.mechanisms.site import Site


class EdgeMap(nn.Module):
    """`AttentionMap` on an edge list: memory is linear in the number of edges.

    Evolving joins the scores of the layer below and carries the result on, noise-free; Bayesian draws weights
    around it.
    """

    def __init__(self, mechanisms: Sequence[Mechanism], site: Site) -> None:
        super().__init__()
        check_mechanisms(mechanisms)
        if find(mechanisms, Synthesizer) is not None:
            raise ValueError("a graph has no Synthesizer, whose map has a place for every pair of positions")
        evolving, bayesian = find(mechanisms, Evolving), find(mechanisms, Bayesian)
        self.site = site
        self.evolving = EvolvingEdgeLayer(evolving, site) if evolving else None
        self.bayesian = BayesianEdgeLayer(bayesian, site) if bayesian else None

    @property
    def has_mechanism(self) -> bool:
        """Whether anything but a softmax happens here."""
        return self.evolving is not None or self.bayesian is not None

    def forward(
        self,
        scores: Tensor,
        edge_index: Tensor,
        nodes: int,
        chain: Chain,
        key: Tensor,
        site: Site | None = None,
    ) -> Tensor:
        """Weights (edges, heads) that sum to one over the edges into each node, at least float32.

        Args:
            scores: the layer's own, (edges, heads).
            edge_index: (2, edges), source (the key) and target (the query) of each edge.
            nodes: number of target nodes.
            chain: what the layers below left, and where this one leaves its part.
            key: (source nodes, heads, dim), what the contextual prior looks at.
            site: where the map is this time; its own by default.
        """
        site = self.site if site is None else site
        if self.has_mechanism:
            chain.claim(site, self)
        if self.evolving is not None:
            scores = self.evolving(scores, edge_index, chain, site)
        if self.bayesian is not None:
            drawn: Tensor = self.bayesian(scores, edge_index, nodes, chain, key, site)
            return drawn
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return edge_softmax(scores, edge_index[1], nodes, chain.switched_off)
