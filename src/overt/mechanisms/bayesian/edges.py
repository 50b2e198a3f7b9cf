"""Bayesian Attention on an edge list: softmax and KL over each target's neighbourhood, in linear memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overt.mechanisms import backend, noise
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.drawing import draws_sample, noise_keys, wants_kl
from overt.mechanisms.bayesian.naive import (
    ContextualPrior,
    cell_kl,
    fixed_parameter,
    log_noise,
    prior_parameter,
    reduce_kl,
)
from overt.mechanisms.bayesian.numbers import kl_numbers
from overt.mechanisms.call import EdgeCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.edges import check_ends, edge_log_softmax, edge_softmax, loops_for
from overt.mechanisms.loops import run_threaded
from overt.mechanisms.mechanism import MechanismLayer
from overt.mechanisms.operators import plain_gradients
from overt.mechanisms.site import Site

Total = Callable[[Tensor, Tensor, Bayesian], tuple[Tensor, Tensor, Tensor]]


def total_kl(log_mean: Tensor, prior: Tensor, config: Bayesian, off: str | None = None) -> Tensor:
    """Σ of `cell_kl` over all cells; `off` is the reason to use plain operations, if any."""
    total = _total_cpu if loops_for(log_mean, "bayesian._kl_numba", off) is not None else None
    if total is None and backend.unfit(backend.EDGE_KERNELS, log_mean, off=off) is None:
        from overt.mechanisms.bayesian.kernels.edges import total_kl as total
    if total is None or _largest_alpha(config) > 1.0 or log_mean.numel() == 0:
        return cell_kl(log_mean, prior, config).sum()
    return _TotalKL.apply(log_mean, prior.expand(log_mean.shape), config, total)  # type: ignore[no-any-return, no-untyped-call]


def _total_cpu(log_mean: Tensor, prior: Tensor, config: Bayesian) -> tuple[Tensor, Tensor, Tensor]:
    """Σ of `cell_kl`, and its gradients, by compiled loops; α ≤ 1."""
    from overt.mechanisms.bayesian import _kl_numba as kernels

    to_mean, to_prior = torch.empty_like(log_mean), torch.empty_like(prior)
    numbers = log_mean.new_tensor(kl_numbers(config))
    if config.family == "weibull":
        parts, run = [log_mean, prior, log_mean.exp(), prior.exp()], kernels.weibull_total
    else:
        parts, run = [log_mean, prior], kernels.lognormal_total
    sums = torch.empty(-(-log_mean.numel() // kernels.BLOCK), dtype=torch.float64)
    flat = [part.view(-1) for part in (*parts, numbers, to_mean, to_prior, sums)]
    run_threaded(sums.numel(), log_mean.numel(), run, *flat)
    return sums.sum().to(log_mean.dtype), to_mean, to_prior


def edge_noise(unit: Tensor, config: Bayesian, off: str | None = None) -> Tensor:
    """`log_noise`, with a compiled inverse error function on a CPU, where torch's is slow."""
    kernels = loops_for(unit, "bayesian._kl_numba", off)
    if kernels is None or config.family == "weibull":
        return log_noise(unit, config)
    x = 2.0 * unit - 1.0
    w = torch.log1p(-x.square()).neg_()
    run_threaded(x.numel(), x.numel(), kernels.inverse_erf, x.view(-1), w.view(-1), w.view(-1))
    return w.mul_(math.sqrt(2.0) * config.sigma)


def _largest_alpha(config: Bayesian) -> float:
    """How large the Gamma prior's α may be: the compiled sum has log Γ(1 + α) only on [0, 1]."""
    if config.family == "lognormal":
        return 0.0
    if config.prior == "fixed":
        return config.prior_alpha
    return config.prior_beta if config.preset == "official" else 1.0


class _TotalKL(torch.autograd.Function):
    """A sum of the KL whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, log_mean: Tensor, prior: Tensor, config: Bayesian, form: Total) -> Tensor:
        ctx.config = config
        total, *gradients = form(log_mean.detach().contiguous(), prior.detach().contiguous(), config)
        ctx.save_for_backward(log_mean, prior, *gradients)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        log_mean, prior, to_mean, to_prior = ctx.saved_tensors
        if torch.is_grad_enabled():  # second-order gradients need plain operations
            total = cell_kl(log_mean, prior, ctx.config).sum()
            gradients = plain_gradients(total, (log_mean, prior))
            to_mean = to_mean if gradients[0] is None else gradients[0]
            to_prior = to_prior if gradients[1] is None else gradients[1]
        return gradient * to_mean, gradient * to_prior if ctx.needs_input_grad[1] else None, None, None


class BayesianEdgeLayer(MechanismLayer):
    """From edge scores to edge weights: a draw or their mean; leaves the graph's KL in the chain.

    A graph is one example. An edge's noise is addressed by its two ends, so the order of edges does not
    matter.
    """

    config: Bayesian
    random = True

    def __init__(self, config: Bayesian, site: Site) -> None:
        super().__init__(config, site)
        self.adds = None if config.prior is None else "KL"
        contextual = config.prior == "contextual"
        self.prior = ContextualPrior(site.head_dim, config.d_mid) if contextual else None

    def reset_parameters(self) -> None:
        """Initialise the prior's network by Glorot's rule."""
        if self.prior is None:
            return
        with torch.no_grad():
            for linear in (self.prior.inner, self.prior.outer):
                bound = math.sqrt(6.0 / sum(linear.weight.shape))
                linear.weight.uniform_(-bound, bound)
                if linear.bias is not None:
                    linear.bias.zero_()

    def weights(self, scores: Tensor, call: EdgeCall, chain: Chain) -> Tensor:  # type: ignore[override]
        """Weights (edges, heads) from scores Φ, at least float32; those of edges into a node sum to one."""
        site, edge_index, nodes, key = call.site, call.edge_index, call.nodes, call.key
        self._check(scores, edge_index, key, nodes)
        source, target = edge_index
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if wants_kl(self, self.config, chain):
            # The KL is a difference of large terms: computed in at least float32, even under autocast.
            with torch.autocast(scores.device.type, enabled=False):
                kl = self._kl(scores, source, target, nodes, key, chain.switched_off)
            chain.add_loss(site, kl.unsqueeze(0), self.config)
        if draws_sample(self, chain):
            if chain.examples.dim() or (chain.sample is not None and chain.sample.dim()):
                raise ValueError("examples and sample must each be one number: a graph is one example")
            keys = noise_keys(site, chain).to(scores.device)
            unit = noise.uniform_edges(
                keys, scores.shape[1], target, source, int(chain.examples), chain.switched_off
            )
            scores = scores + edge_noise(unit, self.config, chain.switched_off)
        return edge_softmax(scores, target, nodes, chain.switched_off)

    def _kl(
        self, scores: Tensor, source: Tensor, target: Tensor, nodes: int, key: Tensor, off: str | None
    ) -> Tensor:
        log_mean = scores
        if self.config.posterior == "probabilities":
            log_mean = edge_log_softmax(scores, target, nodes, off)
        if self.prior is None:
            prior = scores.new_full((), fixed_parameter(self.config))
        else:
            importance = self.prior(key.to(self.prior.inner.weight.dtype)).to(scores.dtype)  # (nodes, heads)
            if self.config.preset == "official":
                log_psi = torch.log_softmax(importance, dim=0).index_select(0, source)
            else:
                log_psi = edge_log_softmax(importance.index_select(0, source), target, nodes, off)
            prior = prior_parameter(log_psi, self.config)
        total = total_kl(log_mean, prior, self.config, off)
        return reduce_kl(total, torch.tensor(scores.numel(), device=scores.device), self.config)

    def _check(self, scores: Tensor, edge_index: Tensor, key: Tensor, nodes: int) -> None:
        if scores.dim() != 2 or scores.shape[1] != self.site.heads:
            raise ValueError(f"scores must have shape (edges, {self.site.heads}), got {tuple(scores.shape)}")
        if edge_index.shape != (2, scores.shape[0]):
            expected = (2, scores.shape[0])
            raise ValueError(f"edge_index must have shape {expected}, got {tuple(edge_index.shape)}")
        if key.dim() != 3 or key.shape[1:] != (self.site.heads, self.site.head_dim):
            expected_key = f"(nodes, {self.site.heads}, {self.site.head_dim})"
            raise ValueError(f"key must have shape {expected_key}, got {tuple(key.shape)}")
        check_ends(edge_index[0], key.shape[0], scores.shape[0])
        check_ends(edge_index[1], nodes, scores.shape[0])
