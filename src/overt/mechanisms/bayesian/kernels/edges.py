"""Sums of the KL on an edge list, and their gradients; `bayesian.naive.cell_kl` has the definition."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.numbers import kl_numbers
from overt.mechanisms.kernels.launch import MOST, Ready, blocks
from overt.mechanisms.special import LOG_GAMMA

_BLOCK = 1024  # cells of a program


@triton.jit
def weibull_kl(
    log_mean, log_alpha, to_mean, to_alpha, sums, gamma, slope, base, beta, cells,
    TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of BLOCK cells' KL(Weibull ‖ Gamma), and the gradients of log mean and log α.

    Args other than tensors:
        sums: one for each program.
        gamma: TERMS coefficients of log Γ(1 + x), lowest power first.
        slope, base, beta: `numbers.kl_numbers`.
        cells: number of cells.
    """
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (block,), like everything below
    inside = cell < cells
    mean = tl.load(log_mean + cell, mask=inside, other=0.0)
    prior = tl.load(log_alpha + cell, mask=inside, other=0.0)
    alpha = tl.exp(prior)
    x = alpha - 0.5
    # log Γ(1 + α) and its derivative together, highest power first
    value = tl.zeros((BLOCK,), tl.float32)
    derivative = tl.zeros((BLOCK,), tl.float32)
    for place in tl.static_range(TERMS):
        derivative = derivative * x + value
        value = value * x + tl.load(gamma + TERMS - 1 - place)
    linear = alpha * (slope - mean)
    rate = beta * tl.exp(mean)
    kl = linear + base + rate + value - prior
    tl.store(to_mean + cell, rate - alpha, mask=inside)
    tl.store(to_alpha + cell, linear + alpha * derivative - 1.0, mask=inside)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(inside, kl, 0.0)))


@triton.jit
def lognormal_kl(
    log_mean, prior_mu, to_mean, to_mu, sums, half, precision, base, cells,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum of BLOCK cells' KL of two Lognormals, and the gradients of log mean and the prior's mean.

    Args other than tensors:
        sums: one for each program.
        half, precision, base: `numbers.kl_numbers`.
        cells: number of cells.
    """
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (block,), like everything below
    inside = cell < cells
    mean = tl.load(log_mean + cell, mask=inside, other=0.0)
    prior = tl.load(prior_mu + cell, mask=inside, other=0.0)
    shift = (mean - half - prior) * precision
    tl.store(to_mean + cell, shift * precision, mask=inside)
    tl.store(to_mu + cell, -shift * precision, mask=inside)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(inside, base + 0.5 * shift * shift, 0.0)))


@lru_cache
def _log_gamma(device: torch.device) -> Tensor:
    """Coefficients of log Γ(1 + x) on [0, 1] as a polynomial in x − ½."""
    return torch.tensor(LOG_GAMMA, dtype=torch.float32, device=device)


@lru_cache(MOST)
def _ready(cells: int, weibull: bool) -> Ready:
    terms: dict[str, Any] = {"TERMS": len(LOG_GAMMA)} if weibull else {}
    kernel = weibull_kl if weibull else lognormal_kl
    return Ready(kernel, (blocks(cells, _BLOCK), 1, 1), (cells,), {**terms, "BLOCK": _BLOCK})


def total_kl(log_mean: Tensor, prior: Tensor, config: Bayesian) -> tuple[Tensor, Tensor, Tensor]:
    """Σ of `naive.cell_kl`, and its gradients, in one kernel; α ≤ 1."""
    to_mean, to_prior = torch.empty_like(log_mean), torch.empty_like(prior)
    weibull = config.family == "weibull"
    ready = _ready(log_mean.numel(), weibull)
    sums = log_mean.new_empty(ready.grid[0])
    gamma = (_log_gamma(log_mean.device),) if weibull else ()
    ready.run((log_mean, prior, to_mean, to_prior, sums, *gamma), kl_numbers(config))
    return sums.sum(dtype=torch.float64).to(log_mean.dtype), to_mean, to_prior
