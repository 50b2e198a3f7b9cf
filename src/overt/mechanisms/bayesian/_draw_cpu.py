"""Bayesian Attention on the CPU: drawing weights, and the KL of any map, as operators around compiled loops.

The definitions are `naive.log_noise` with `maps.softmax`, `maps.log_normalizer`, and `naive.map_kl`. Noise
uses the same words as `noise.uniform`, and is accurate to 1e-6 where the definition takes logarithms.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt.mechanisms import backend
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.naive import reduce_kl
from overt.mechanisms.bayesian.numbers import kl_numbers
from overt.mechanisms.loops import bytes_of, loops, run_threaded
from overt.mechanisms.maps import HIDDEN

LOOPS = "bayesian._draw_numba"
_WORD = 0xFFFFFFFF


def draw(
    logits: Tensor,
    visible: Tensor,
    keys: Tensor,
    examples: Tensor,
    first_row: int,
    config: Bayesian,
    wants_lse: bool,
    off: str | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """A draw of weights, and the logits' log-sum-exp if `wants_lse`; None where this form does not apply.

    Args:
        logits: Φ, (batch, heads, query, key).
        visible: boolean, broadcasts to `logits`.
        keys: from `noise.stream`, (batch, 2) or (2,).
        examples: global number of each example, (batch,).
        first_row: absolute position of the first query row.
        config: family and spread.
        wants_lse: whether to return `maps.log_normalizer` of the logits, (batch, heads, query).
        off: the reason to use the definition, if any.
    """
    if backend.unfit(backend.LOOPS, logits, off=off) is not None:
        return None
    weibull = config.family == "weibull"
    size = 1.0 / config.k if weibull else math.sqrt(2.0) * config.sigma
    keys = keys.expand(examples.shape[0], 2)
    weights, lse = torch.ops.overt.draw(logits, visible, keys, examples, first_row, weibull, size, wants_lse)
    return weights, lse if wants_lse else None


@torch.library.custom_op("overt::draw", mutates_args=())
def _draw(
    logits: Tensor,
    visible: Tensor,
    keys: Tensor,
    examples: Tensor,
    first_row: int,
    weibull: bool,
    size: float,
    wants_lse: bool,
) -> tuple[Tensor, Tensor]:
    kernels: Any = loops(LOOPS)
    logits, seen = logits.contiguous(), bytes_of(visible, logits)
    weights, lse = torch.empty_like(logits), _rows(logits, wants_lse)
    spread = np.float32(size)

    def run(
        start: int, stop: int, logits: Any, seen: Any, keys: Any, numbers: Any, out: Any, lse: Any
    ) -> None:
        kernels.draw(start, stop, logits, seen, keys, numbers, first_row, weibull, spread, out, lse)

    parts = logits, seen, keys.contiguous(), examples & _WORD, weights, lse.view(-1)
    run_threaded(_count(logits), logits.numel(), run, *parts)
    return weights, lse


@_draw.register_fake
def _(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, wants_lse = rest
    return logits.new_empty(logits.shape), _rows(logits, wants_lse)


@torch.library.custom_op("overt::draw_backward", mutates_args=())
def _draw_backward(
    logits: Tensor | None, visible: Tensor, weights: Tensor, lse: Tensor, to_weights: Tensor, to_lse: Tensor
) -> Tensor:
    kernels: Any = loops(LOOPS)
    out = torch.empty_like(weights)
    logits = weights if logits is None else logits.contiguous()
    parts = logits, bytes_of(visible, weights), weights, lse.view(-1)
    gradients = to_weights.contiguous(), to_lse.contiguous().view(-1)
    run_threaded(_count(weights), weights.numel(), kernels.draw_backward, *parts, *gradients, out)
    return out


@_draw_backward.register_fake
def _(
    logits: Tensor | None, visible: Tensor, weights: Tensor, lse: Tensor, to_weights: Tensor, to_lse: Tensor
) -> Tensor:
    del logits, visible, lse, to_weights, to_lse
    return weights.new_empty(weights.shape)


def _draw_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, visible, *_, wants_lse = inputs
    ctx.save_for_backward(logits if wants_lse else None, visible, *output)


def _draw_gradients(ctx: Any, to_weights: Tensor, to_lse: Tensor) -> tuple[Tensor | None, ...]:
    logits, visible, weights, lse = ctx.saved_tensors
    nothing = (None,) * 7
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # Second-order gradients need plain operations, which are differentiable.
        out = weights * (to_weights - (weights * to_weights).sum(dim=-1, keepdim=True))
        if logits is not None:
            means = (logits.masked_fill(~visible, HIDDEN) - lse.unsqueeze(-1)).exp()
            out = out + to_lse.unsqueeze(-1) * means
        return out, *nothing
    return torch.ops.overt.draw_backward(logits, visible, weights, lse, to_weights, to_lse), *nothing


_draw.register_autograd(_draw_gradients, setup_context=_draw_setup)


def weibull_kl(logits: Tensor, visible: Tensor, lse: Tensor, prior: Tensor, config: Bayesian) -> Tensor:
    """`naive.map_kl` of the Weibull family for any map in float32, given its log-sum-exp.

    Terms of a key are computed once per key, so that each cell takes one product.

    Args:
        logits: Φ, (batch, heads, query, key).
        visible: boolean, broadcasts to `logits`.
        lse: (batch, heads, query), of `draw`.
        prior: log α, (batch, heads, key) or broadcasting to it.
        config: posterior and reduction.
    """
    slope, base, beta = kl_numbers(config)
    batch, heads, queries, keys = logits.shape
    alpha = prior.exp()
    per_key = alpha * slope + torch.lgamma(1.0 + alpha) - prior + base
    shown = visible.expand(batch, -1, queries, keys)
    seers = shown.sum(dim=2)  # (batch, heads or 1, key): how many queries see each key
    sees_key = shown.any(dim=-1)
    probabilities = config.posterior == "probabilities"
    offset = lse if probabilities else torch.zeros_like(lse)
    weighted_sums = torch.ops.overt.weigh(logits, visible, alpha.expand(batch, heads, keys), offset)
    mass = torch.ones_like(lse) if probabilities else lse.exp()
    rows = beta * mass.masked_fill(~sees_key, 0.0) - weighted_sums
    total = rows.sum(dim=(1, 2)) + (per_key * seers).expand(batch, heads, keys).sum(dim=(1, 2))
    return reduce_kl(total, seers.expand(batch, heads, keys).sum(dim=(1, 2)), config)


@torch.library.custom_op("overt::weigh", mutates_args=())
def _weigh(logits: Tensor, visible: Tensor, alpha: Tensor, offset: Tensor) -> Tensor:
    """Σ_j α_j (Φ_ij − offset_i) over visible keys, (batch, heads, query)."""
    kernels: Any = loops(LOOPS)
    logits, out = logits.contiguous(), _rows(logits, True)
    parts = logits, bytes_of(visible, logits), alpha.contiguous(), offset.contiguous(), out
    run_threaded(logits.shape[0] * logits.shape[1], logits.numel(), kernels.weigh, *parts)
    return out


@_weigh.register_fake
def _(logits: Tensor, visible: Tensor, alpha: Tensor, offset: Tensor) -> Tensor:
    del visible, alpha, offset
    return _rows(logits, True)


@torch.library.custom_op("overt::weigh_backward", mutates_args=())
def _weigh_backward(
    gradient: Tensor, logits: Tensor, visible: Tensor, alpha: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kernels: Any = loops(LOOPS)
    logits, alpha = logits.contiguous(), alpha.contiguous()
    gradients = torch.empty_like(logits), torch.empty_like(alpha), _rows(logits, True)
    parts = logits, bytes_of(visible, logits), alpha, offset.contiguous(), gradient.contiguous(), *gradients
    run_threaded(logits.shape[0] * logits.shape[1], logits.numel(), kernels.weigh_backward, *parts)
    return gradients


@_weigh_backward.register_fake
def _(
    gradient: Tensor, logits: Tensor, visible: Tensor, alpha: Tensor, offset: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    del gradient, visible, offset
    return logits.new_empty(logits.shape), alpha.new_empty(alpha.shape), _rows(logits, True)


def _weigh_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _weigh_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    logits, visible, alpha, offset = ctx.saved_tensors
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        per_cell = gradient.unsqueeze(-1)
        share = alpha.unsqueeze(-2).masked_fill(~visible, 0.0)
        shifted = (logits.masked_fill(~visible, 0.0) - offset.unsqueeze(-1)).masked_fill(~visible, 0.0)
        return per_cell * share, None, (per_cell * shifted).sum(dim=-2), -gradient * share.sum(dim=-1)
    to_logits, to_alpha, to_offset = torch.ops.overt.weigh_backward(gradient, logits, visible, alpha, offset)
    return to_logits, None, to_alpha, to_offset


_weigh.register_autograd(_weigh_gradients, setup_context=_weigh_setup)


def _count(logits: Tensor) -> int:
    batch, heads, queries, _ = logits.shape
    return batch * heads * queries


def _rows(logits: Tensor, filled: bool) -> Tensor:
    """An empty tensor for one number per row, (batch, heads, query); without rows unless `filled`."""
    batch, heads, queries, _ = logits.shape
    return logits.new_empty(batch, heads, queries if filled else 0)
