"""Evolving Attention on an edge list: the residual half, without a convolution."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.mechanisms.call import EdgeCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving.config import Evolving
from overt.mechanisms.evolving.naive import mix
from overt.mechanisms.evolving.ramp import ramp
from overt.mechanisms.mechanism import MechanismLayer
from overt.mechanisms.site import Site


class EvolvingEdgeLayer(MechanismLayer):
    """A layer's edge scores start from those of the layer below: the first line of equation 4, per edge.

    There is no convolution. Its window covers the cells around a cell, and on a graph neither the rows nor
    the columns of the map have an order: which nodes were adjacent in the image would be an accident of their
    numbering.
    """

    config: Evolving
    reads_below = True

    def __init__(self, config: Evolving, site: Site) -> None:
        super().__init__(config, site)
        if config.beta != 0.0:
            raise ValueError(
                "beta must be 0 on graphs, where nodes have no order and a map no neighbouring cells to "
                f"convolve: use Evolving(beta=0) or Evolving.realformer(), got beta={config.beta}"
            )

    def refine(self, scores: Tensor, call: EdgeCall, chain: Chain) -> Tensor:  # type: ignore[override]
        """Evolved scores (edges, heads), left in the chain too; the layer below must have the same edges."""
        site, edge_index = call.site, call.edge_index
        previous = None if site.starts else chain.previous(site, self.name)
        if previous is not None:
            self._check(previous, scores, edge_index, chain, site)
        ramp_factor = ramp(self.config, chain, self.training, scores.device)
        alpha = self.config.alpha if ramp_factor is None else self.config.alpha * ramp_factor
        visible = torch.ones((), dtype=torch.bool, device=scores.device)
        evolved = mix(scores, previous, visible, alpha, add=self.config.skip == "add")
        chain.carry(site, self.name, evolved)
        chain.edges[site.place] = edge_index
        return evolved

    def _check(self, previous: Tensor, scores: Tensor, edge_index: Tensor, chain: Chain, site: Site) -> None:
        if previous.shape[1] != scores.shape[1]:
            raise ValueError(
                f"Evolving needs as many heads as the layer below has, {previous.shape[1]}, "
                f"got {scores.shape[1]}"
            )
        below = chain.edges.get((site.kind, site.layer - 1))
        if below is not None and not torch.equal(below, edge_index):
            raise ValueError(
                f"Evolving needs the {below.shape[1]} edges of the layer below in the same order, "
                f"got {edge_index.shape[1]} different ones"
            )

    def extra_repr(self) -> str:
        """Effective settings, for `print(model)`."""
        return f"alpha={self.config.alpha}, skip={self.config.skip}"
