"""The prior of Bayesian Attention as GPU kernels, forwards and backwards, with the sums that the KL takes.

`layer.ContextualPrior`, `layer.prior_parameter` and `naive.weibull_gamma_kl` have the definitions. For each
key j: Weibull has α_j, and per key c_j = α_j·slope + log Γ(1 + α_j) − log α_j + base; Lognormal has
u_j = μ_j + σ²/2 and the constant base.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms._attend_triton import LOGNORMAL, WEIBULL, Prior, bytes_of, given_or
from overt.mechanisms._launch import MOST, Ready, blocks, power_of_two
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.naive import EULER, LOG_GAMMA
from overt.mechanisms.seen import Seen

_KEYS = 128
_AT_ONCE = 1024
_LOG2E, _LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2.0))
_HIDDEN = tl.constexpr(float("-inf"))
_GAMMA, _TERMS = tl.constexpr(LOG_GAMMA), tl.constexpr(len(LOG_GAMMA))


@triton.jit
def _log_gamma(alpha):
    """log Γ(1 + α) and its derivative for α in [0, 1], from the highest power down."""
    x = alpha - 0.5
    value = x * 0.0
    slope = x * 0.0
    for place in tl.static_range(_TERMS):
        slope = slope * x + value
        value = value * x + _GAMMA[_TERMS - 1 - place]
    return value, slope


@triton.jit
def _parameters(
    keyed, key, inner, bias, outer, known, shown, fixed, slope, base, shift,
    skb, skh, skn, keys, key_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MIDDLE: tl.constexpr, KEYS: tl.constexpr,
    FAMILY: tl.constexpr, CONTEXTUAL: tl.constexpr, OFFICIAL: tl.constexpr, KNOWN: tl.constexpr,
    SHOWN: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    j = tl.arange(0, BLOCK)
    at = (example * key_heads + head) * keys
    maps = tl.num_programs(1).to(tl.int64) * key_heads
    scores = keyed + maps * keys
    sums = keyed + 2 * maps * keys + maps
    top = -1e30
    mass = 0.0
    if CONTEXTUAL:
        i = tl.arange(0, KEYS)
        d = tl.arange(0, BLOCK_D)
        k_at = key + example * skb + head.to(tl.int64) * skh + i[:, None] * skn + d[None, :]
        for start in range(0, keys, KEYS):
            inside = start + i < keys
            k = tl.load(k_at + start * skn, mask=inside[:, None] & (d < D)[None, :], other=0.0)
            k = k.to(tl.float32)
            s = tl.zeros((KEYS,), tl.float32)
            for m in tl.static_range(MIDDLE):
                w = tl.load(inner + m * D + d, mask=d < D, other=0.0).to(tl.float32)
                hidden = tl.sum(k * w[None, :], 1) + tl.load(bias + m).to(tl.float32)
                s += tl.maximum(hidden, 0.0) * tl.load(outer + m).to(tl.float32)
            tl.store(scores + at + start + i, s, mask=inside)
            if KNOWN:
                inside &= tl.load(known + example * keys + start + i, mask=inside, other=0) != 0
            s = tl.where(inside, s, _HIDDEN)
            higher = tl.maximum(top, tl.max(s))
            mass = mass * tl.exp2((top - higher) * _LOG2E) + tl.sum(tl.exp2((s - higher) * _LOG2E))
            top = higher
        mass = tl.where(mass == 0.0, 1.0, mass)
        lse = top + tl.log2(mass) * _LN2
        tl.store(keyed + 2 * maps * keys + example * key_heads + head, lse)
        tl.debug_barrier()  # what other threads stored is read below
    first = 0.0
    second = 0.0
    width = maps
    if CAUSAL:
        width = maps * keys
    for start in range(0, keys, BLOCK):
        inside = start + j < keys
        seen = inside
        if SHOWN:
            seen &= tl.load(shown + example * keys + start + j, mask=inside, other=0) != 0
        sure = seen
        if KNOWN:
            sure = inside & (tl.load(known + example * keys + start + j, mask=inside, other=0) != 0)
        if CONTEXTUAL:
            parameter = tl.where(sure, tl.load(scores + at + start + j, mask=sure, other=0.0) - lse, 0.0)
        else:
            parameter = tl.zeros((BLOCK,), tl.float32) + fixed
        if FAMILY == 1:
            log_alpha = parameter + shift
            a = tl.exp2(log_alpha * _LOG2E)
            if CONTEXTUAL:
                gamma, _ = _log_gamma(a)
                c = a * slope + gamma - log_alpha + base
            else:
                c = tl.zeros((BLOCK,), tl.float32) + base
            weight = a
        else:
            if CONTEXTUAL and not OFFICIAL:
                parameter = tl.exp2(parameter * _LOG2E)
            a = parameter + shift
            c = tl.zeros((BLOCK,), tl.float32) + base
            weight = tl.zeros((BLOCK,), tl.float32) + 1.0
        live = sure & seen
        a = tl.where(live, a, 0.0)
        c = tl.where(live, c, 0.0)
        weight = tl.where(live, weight, 0.0)
        tl.store(keyed + at + start + j, a, mask=inside)
        if CAUSAL:
            tl.store(sums + at + start + j, first + tl.cumsum(c, 0), mask=inside)
            tl.store(sums + width + at + start + j, second + tl.cumsum(weight, 0), mask=inside)
        first += tl.sum(c)
        second += tl.sum(weight)
    if not CAUSAL:
        tl.store(sums + example * key_heads + head, first)
        tl.store(sums + width + example * key_heads + head, second)


@triton.jit
def _to_score(
    keyed, known, seers, to_a, example, at, j, maps, lse, g, slope, shift, queries, keys, group,
    FAMILY: tl.constexpr, OFFICIAL: tl.constexpr, KNOWN: tl.constexpr, SEERS: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradient of log ψ_j, and ψ_j itself."""
    sure = j < keys
    if KNOWN:
        sure &= tl.load(known + example * keys + j, mask=sure, other=0) != 0
    log_psi = tl.where(sure, tl.load(keyed + maps * keys + at + j, mask=sure, other=0.0) - lse, 0.0)
    psi = tl.where(sure, tl.exp2(log_psi * _LOG2E), 0.0)
    to = tl.load(to_a + at + j, mask=sure, other=0.0)
    if FAMILY == 1:
        if SEERS:
            rows = tl.load(seers + example * keys + j, mask=sure, other=0.0)
        elif CAUSAL:
            rows = (queries - tl.maximum(j - (keys - queries), 0)).to(tl.float32)
        else:
            rows = queries + 0.0 * psi
        rows = rows * group
        alpha = tl.exp2((log_psi + shift) * _LOG2E)
        _, digamma = _log_gamma(alpha)
        to = alpha * (to + g * rows * (slope + digamma)) - g * rows
    elif not OFFICIAL:
        to = to * psi
    return tl.where(sure, to, 0.0), psi


@triton.jit
def _to_network(
    keyed, key, inner, bias, outer, known, seers, to_a, to_kl, to_key, partial, slope, shift, per_cell,
    skb, skh, skn, sdb, sdh, sdn, queries, keys, key_heads, group,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MIDDLE: tl.constexpr, KEYS: tl.constexpr,
    FAMILY: tl.constexpr, OFFICIAL: tl.constexpr, KNOWN: tl.constexpr, SEERS: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    example = tl.program_id(2).to(tl.int64)
    at = (example * key_heads + head) * keys
    maps = tl.num_programs(2).to(tl.int64) * key_heads
    lse = tl.load(keyed + 2 * maps * keys + example * key_heads + head)
    g = tl.load(to_kl + example) * per_cell
    total = 0.0  # the softmax's backward pass needs a sum first
    for start in range(0, keys, BLOCK):
        to, _ = _to_score(
            keyed, known, seers, to_a, example, at, start + tl.arange(0, BLOCK), maps, lse, g, slope, shift,
            queries, keys, group, FAMILY, OFFICIAL, KNOWN, SEERS, CAUSAL,
        )  # fmt: skip
        total += tl.sum(to)
    j = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    to, psi = _to_score(
        keyed, known, seers, to_a, example, at, j, maps, lse, g, slope, shift,
        queries, keys, group, FAMILY, OFFICIAL, KNOWN, SEERS, CAUSAL,
    )  # fmt: skip
    to_scores = to - psi * total
    d = tl.arange(0, BLOCK_D)
    mask = (j < keys)[:, None] & (d < D)[None, :]
    far = head.to(tl.int64)
    k = tl.load(key + example * skb + far * skh + j[:, None] * skn + d[None, :], mask=mask, other=0.0)
    k = k.to(tl.float32)
    place = to_key + example * sdb + far * sdh + j[:, None] * sdn + d[None, :]
    to_k = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    program = (example * key_heads + head) * tl.num_programs(0) + tl.program_id(0)
    sums = partial + program * MIDDLE * (D + 2)
    for m in tl.static_range(MIDDLE):
        w = tl.load(inner + m * D + d, mask=d < D, other=0.0).to(tl.float32)
        hidden = tl.sum(k * w[None, :], 1) + tl.load(bias + m).to(tl.float32)
        to_hidden = tl.where(hidden > 0.0, to_scores * tl.load(outer + m).to(tl.float32), 0.0)
        to_k += to_hidden[:, None] * w[None, :]
        tl.store(sums + m * D + d, tl.sum(to_hidden[:, None] * k, 0), mask=d < D)
        tl.store(sums + MIDDLE * D + m, tl.sum(to_hidden))
        tl.store(sums + MIDDLE * (D + 1) + m, tl.sum(to_scores * tl.maximum(hidden, 0.0)))
    tl.store(place, to_k.to(to_key.dtype.element_ty), mask=mask)


class Network(NamedTuple):
    """Weights of the contextual prior: (middle, dim), (middle,) and (1, middle)."""

    inner: Tensor
    bias: Tensor
    outer: Tensor


@lru_cache(maxsize=64)
def _numbers(config: Bayesian) -> tuple[float, float, float, float]:
    """Fixed parameter, slope and base of what the KL has per key, and the parameter's shift."""
    from overt.mechanisms.bayesian.layer import fixed_parameter

    fixed = fixed_parameter(config)
    if config.family == "weibull":
        k, beta = config.k, config.prior_beta
        slope = EULER / k - math.log(beta) + math.lgamma(1.0 + 1.0 / k)
        base = math.log(k) - EULER - 1.0
        if config.prior == "fixed":
            base += config.prior_alpha * slope + math.lgamma(1.0 + config.prior_alpha) - fixed
            return fixed, slope, base, 0.0
        return fixed, slope, base, math.log(beta) if config.preset == "official" else 0.0
    base = math.log(config.prior_sigma / config.sigma) - 0.5 + 0.5 * (config.sigma / config.prior_sigma) ** 2
    return fixed, 0.0, base, config.sigma**2 / 2.0


def _law(config: Bayesian) -> tuple[int, bool]:
    return WEIBULL if config.family == "weibull" else LOGNORMAL, config.preset == "official"


def _sizes(width: int, middle: int) -> dict[str, int]:
    return {"D": width, "BLOCK_D": power_of_two(width), "MIDDLE": middle, "KEYS": _KEYS}


def prior_of(config: Bayesian, keyed: Tensor, per_cell: float) -> Prior:
    """What kernels take, from what `forward` filled."""
    family, _ = _law(config)
    seeing = config.prior_beta if family == WEIBULL else 0.0
    precision = (1.0 / config.prior_sigma) / config.prior_sigma
    return Prior(family, config.posterior == "scores", keyed, seeing, precision, per_cell)


def keyed_size(batch: int, key_heads: int, keys: int, causal: bool) -> int:
    """Numbers in `Prior.keyed`."""
    maps = batch * key_heads
    return 2 * maps * keys + maps + 2 * maps * (keys if causal else 1)


@lru_cache(MOST)
def _forward_ready(
    keyed: tuple[int, ...], strides: tuple[int, ...], middle: int, law: tuple[int, bool],
    known: bool, shown: bool, causal: bool,
) -> Ready:  # fmt: skip
    batch, key_heads, keys, width = keyed
    return Ready(
        _parameters,
        (key_heads, batch, 1),
        (*strides[:3], keys, key_heads),
        {
            **_sizes(width, max(1, middle)),
            "FAMILY": law[0],
            "CONTEXTUAL": middle > 0,
            "OFFICIAL": law[1],
            "KNOWN": known,
            "SHOWN": shown,
            "CAUSAL": causal,
            "BLOCK": min(_AT_ONCE, power_of_two(keys)),
        },
    )


def forward(
    key: Tensor,
    network: Network | None,
    seen: Seen,
    known: Tensor | None,
    config: Bayesian,
    per_cell: float,
) -> Prior:
    """What the KL takes of a prior.

    Args:
        key: (batch, key heads, key, dim), its last axis contiguous.
        network: of the contextual prior; None for a fixed one.
        seen: which cells are visible.
        known: keys that some query sees, boolean (batch, key); None for all.
        config: family and prior.
        per_cell: what the KL will be multiplied by.
    """
    batch, key_heads, keys, _ = key.shape
    keyed = key.new_empty(keyed_size(batch, key_heads, keys, seen.causal), dtype=torch.float32)
    middle, weights = (0, (keyed, keyed, keyed)) if network is None else (network.inner.shape[0], network)
    ready = _forward_ready(
        key.shape, key.stride(), middle, _law(config),
        known is not None, seen.key_visible is not None, seen.causal,
    )  # fmt: skip
    masks = bytes_of(known, keyed), bytes_of(seen.key_visible, keyed)
    ready.run((keyed, key, *weights, *masks), _numbers(config))
    return prior_of(config, keyed, per_cell)


@lru_cache(MOST)
def _backward_ready(
    keyed: tuple[int, ...], strides: tuple[int, ...], to_key: tuple[int, ...], middle: int, queries: int,
    heads: int, law: tuple[int, bool], known: bool, seers: bool, causal: bool,
) -> Ready:  # fmt: skip
    batch, key_heads, keys, width = keyed
    return Ready(
        _to_network,
        (blocks(keys, _KEYS), key_heads, batch),
        (*strides[:3], *to_key[:3], queries, keys, key_heads, heads // key_heads),
        {
            **_sizes(width, middle),
            "FAMILY": law[0],
            "OFFICIAL": law[1],
            "KNOWN": known,
            "SEERS": seers,
            "CAUSAL": causal,
            "BLOCK": min(_AT_ONCE, power_of_two(keys)),
        },
    )


def backward(
    key: Tensor,
    network: Network,
    seen: Seen,
    known: Tensor | None,
    config: Bayesian,
    queries: int,
    heads: int,
    prior: Prior,
    to_a: Tensor,
    to_kl: Tensor,
    to_key: Tensor,
) -> Network:
    """Gradients of the network, from those of a and of the KL; adds the key's to `to_key`."""
    batch, key_heads, keys, width = key.shape
    keyed, middle = prior.keyed, network.inner.shape[0]
    assert keyed is not None
    seers = seen.seers(queries, keys)
    ready = _backward_ready(
        key.shape, key.stride(), to_key.stride(), middle, queries, heads, _law(config),
        known is not None, seers is not None, seen.causal,
    )  # fmt: skip
    partial = key.new_empty((batch * key_heads * ready.grid[0], middle * (width + 2)), dtype=torch.float32)
    _, slope, _, shift = _numbers(config)
    ready.run(
        (keyed, key, *network, bytes_of(known, keyed), given_or(seers, keyed), to_a, to_kl, to_key, partial),
        (slope, shift, prior.per_cell),
    )
    total = partial.sum(dim=0)
    if network.inner.dtype != torch.float32:
        total = total.to(network.inner.dtype)
    split = middle * width
    inner = total.as_strided((middle, width), (width, 1))
    return Network(
        inner, total[split : split + middle], total.as_strided((1, middle), (middle, 1), split + middle)
    )
