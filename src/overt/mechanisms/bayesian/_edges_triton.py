"""Noise and sums of KL on edges as GPU kernels; `edges.py` and `noise.py` have the definitions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms._launch import MOST, Ready, blocks, signed
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.naive import LOG_GAMMA, kl_numbers
from overt.mechanisms.noise._philox_triton import words

_BLOCK = 1024


@triton.jit(do_not_specialize=["example"])
def _units(keys, rows, columns, out, cells, heads, example, BLOCK: tl.constexpr):
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < cells
    edge, head = cell // heads, cell % heads
    row = tl.load(rows + edge, mask=inside, other=0)
    column = tl.load(columns + edge, mask=inside, other=0)
    k0 = tl.load(keys).to(tl.uint32)
    k1 = tl.load(keys + 1).to(tl.uint32)
    c0 = (column >> 2).to(tl.uint32)
    c1 = row.to(tl.uint32)
    c2 = head.to(tl.uint32)
    c3 = tl.full((BLOCK,), 0, tl.uint32) + example.to(tl.uint32)
    w0, w1, w2, w3 = words(k0, k1, c0, c1, c2, c3)
    word = column & 3
    picked = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    unit = ((picked >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2⁻²³
    tl.store(out + cell, unit, mask=inside)


def uniform_edges(keys: Tensor, heads: int, rows: Tensor, columns: Tensor, example: int) -> Tensor:
    """`noise.uniform_edges` in one kernel, bit for bit."""
    out = torch.empty(rows.shape[0], heads, device=rows.device, dtype=torch.float32)
    if out.numel():
        ready = _units_ready(out.numel(), heads)
        ready.run((keys, rows.contiguous(), columns.contiguous(), out), (), (signed(example),))
    return out


@lru_cache(MOST)
def _units_ready(cells: int, heads: int) -> Ready:
    return Ready(_units, (blocks(cells, _BLOCK), 1, 1), (cells, heads), {"BLOCK": _BLOCK})


@triton.jit
def _weibull(
    log_mean, log_alpha, to_mean, to_alpha, sums, gamma, slope, base, beta, cells,
    TERMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = cell < cells
    mean = tl.load(log_mean + cell, mask=inside, other=0.0)
    prior = tl.load(log_alpha + cell, mask=inside, other=0.0)
    alpha = tl.exp(prior)
    x = alpha - 0.5
    # log Γ(1 + α) and its derivative together, from the highest power down
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
def _lognormal(
    log_mean, prior_mu, to_mean, to_mu, sums, half, precision, base, cells,
    BLOCK: tl.constexpr,
):  # fmt: skip
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
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
def _kl_ready(cells: int, weibull: bool) -> Ready:
    terms: dict[str, Any] = {"TERMS": len(LOG_GAMMA)} if weibull else {}
    kernel = _weibull if weibull else _lognormal
    return Ready(kernel, (blocks(cells, _BLOCK), 1, 1), (cells,), {**terms, "BLOCK": _BLOCK})


def total_kl(log_mean: Tensor, prior: Tensor, config: Bayesian) -> tuple[Tensor, Tensor, Tensor]:
    """Σ of `naive.cell_kl`, and its gradients, in one kernel; α ≤ 1."""
    to_mean, to_prior = torch.empty_like(log_mean), torch.empty_like(prior)
    weibull = config.family == "weibull"
    ready = _kl_ready(log_mean.numel(), weibull)
    sums = log_mean.new_empty(ready.grid[0])
    gamma = (_log_gamma(log_mean.device),) if weibull else ()
    ready.run((log_mean, prior, to_mean, to_prior, sums, *gamma), kl_numbers(config))
    return sums.sum(dtype=torch.float64).to(log_mean.dtype), to_mean, to_prior
