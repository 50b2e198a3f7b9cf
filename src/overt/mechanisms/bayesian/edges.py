"""Bayesian Attention on an edge list: softmax and KL over each target's neighbourhood, in linear memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overt.mechanisms.bayesian import noise
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.layer import (
    ContextualPrior,
    draws_sample,
    fixed_parameter,
    noise_keys,
    prior_parameter,
    wants_kl,
)
from overt.mechanisms.bayesian.naive import cell_kl, log_noise, reduce_kl
from overt.mechanisms.chain import Chain
from overt.mechanisms.site import Site


def edge_log_softmax(scores: Tensor, target: Tensor, nodes: int) -> Tensor:
    """Log-softmax of scores (edges, heads) over the edges that share a target node."""
    index = target.view(-1, 1).expand_as(scores)
    top = scores.new_full((nodes, scores.shape[1]), float("-inf"))
    top = top.scatter_reduce(0, index, scores.detach(), "amax")
    shifted = scores - top.gather(0, index)
    total = scores.new_zeros(nodes, scores.shape[1]).scatter_add(0, index, shifted.exp())
    return shifted - total.gather(0, index).log()


class BayesianEdgeLayer(nn.Module):
    """From edge scores to edge weights: a draw or their mean; leaves the graph's KL in the chain.

    A graph is one example. Noise follows an edge by its two ends, so the order of edges does not matter.
    """

    def __init__(self, config: Bayesian, site: Site) -> None:
        super().__init__()
        self.config, self.site = config, site
        contextual = config.prior == "contextual"
        self.prior = ContextualPrior(site.head_dim, config.d_mid) if contextual else None

    def forward(self, scores: Tensor, edge_index: Tensor, nodes: int, chain: Chain, key: Tensor) -> Tensor:
        """Weights (edges, heads) that sum to one over the edges into each node, at least float32.

        Args:
            scores: Φ, (edges, heads).
            edge_index: (2, edges), source (the key) and target (the query) of each edge.
            nodes: number of nodes.
            chain: addresses the noise and takes the KL.
            key: (nodes, heads, dim), what the contextual prior looks at.
        """
        self._check(scores, edge_index, key, nodes)
        source, target = edge_index
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        chain.claim(self.site, self)
        if wants_kl(self, self.config, chain):
            kl = self._kl(scores, source, target, nodes, key)
            chain.record_kl(self.site, kl.unsqueeze(0), self.config)
        if draws_sample(self, chain):
            if chain.examples.dim() or (chain.sample is not None and chain.sample.dim()):
                raise ValueError("a graph is one example: examples and sample must each be one number")
            keys = noise_keys(self.site, chain).to(scores.device)
            unit = noise.uniform_edges(keys, scores.shape[1], target, source, int(chain.examples))
            scores = scores + log_noise(unit, self.config)
        return edge_log_softmax(scores, target, nodes).exp()

    def _kl(self, scores: Tensor, source: Tensor, target: Tensor, nodes: int, key: Tensor) -> Tensor:
        log_mean = scores
        if self.config.posterior == "probabilities":
            log_mean = edge_log_softmax(scores, target, nodes)
        if self.prior is None:
            prior = scores.new_full((), fixed_parameter(self.config))
        else:
            importance = self.prior(key).to(scores.dtype)  # (nodes, heads)
            if self.config.preset == "official":
                log_psi = torch.log_softmax(importance, dim=0)[source]
            else:
                log_psi = edge_log_softmax(importance[source], target, nodes)
            prior = prior_parameter(log_psi, self.config)
        cells = cell_kl(log_mean, prior, self.config)
        return reduce_kl(cells.sum(), torch.tensor(cells.numel(), device=cells.device), self.config)

    def _check(self, scores: Tensor, edge_index: Tensor, key: Tensor, nodes: int) -> None:
        if scores.dim() != 2 or scores.shape[1] != self.site.heads:
            raise ValueError(f"scores must have shape (edges, {self.site.heads}), got {tuple(scores.shape)}")
        if edge_index.shape != (2, scores.shape[0]):
            expected = (2, scores.shape[0])
            raise ValueError(f"edge_index must have shape {expected}, got {tuple(edge_index.shape)}")
        expected_key = (nodes, self.site.heads, self.site.head_dim)
        if key.shape != expected_key:
            raise ValueError(f"key must have shape {expected_key}, got {tuple(key.shape)}")
        if edge_index.numel() and not 0 <= int(edge_index.min()) <= int(edge_index.max()) < nodes:
            span = f"{int(edge_index.min())} … {int(edge_index.max())}"
            raise ValueError(f"edge_index must number nodes from 0 to {nodes - 1}, got {span}")
