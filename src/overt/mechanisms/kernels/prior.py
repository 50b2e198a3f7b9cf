"""The prior of random weights, forwards and backwards, with the sums over keys that the KL needs.

The prior has one parameter for each key: fixed, or log ψ_j, the log-softmax over keys of a network
Linear → ReLU → Linear. For each key j WEIBULL has α_j, and per key c_j = α_j·slope + log Γ(1 + α_j) − log α_j
+ base; LOGNORMAL has u_j = μ_j + σ²/2 and the constant base. `flat.Divergence` has these numbers.

From the keys, `forward` computes one float32 tensor, `keyed`, which contains one after the other:

- the parameter a, (batch, key heads, key): α or u, zero at hidden keys;
- the network's scores, (batch, key heads, key);
- their log-sum-exp, (batch, key heads);
- sums over keys of the KL's terms per key, (batch, key heads, key or 1): up to each key where causal;
- sums over keys of α, or 1, of the same shape.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms.flat import Divergence, Inputs, Masks, keyed_size
from overt.mechanisms.kernels.attend import Shape, bytes_of, given_or, heads_last, rows_whole
from overt.mechanisms.kernels.launch import MOST, Ready, blocks, helper, power_of_two
from overt.mechanisms.kernels.noise import LN2, LOG2E, WEIBULL
from overt.mechanisms.kernels.tiles import HIDDEN, rows_at
from overt.mechanisms.special import LOG_GAMMA

_BLOCK_K = 128  # keys of a tile for which the network is computed
_AT_ONCE = 1024  # keys of a tile of numbers, at most
_GAMMA, _TERMS = tl.constexpr(LOG_GAMMA), tl.constexpr(len(LOG_GAMMA))


@helper
def _log_gamma(alpha):
    """log Γ(1 + α) and its derivative for α in [0, 1], highest power first."""
    x = alpha - 0.5
    value = x * 0.0
    slope = x * 0.0
    for place in tl.static_range(_TERMS):
        slope = slope * x + value
        value = value * x + _GAMMA[_TERMS - 1 - place]
    return value, slope


@triton.jit
def prior_parameters(
    keyed, key, inner, bias, outer, known, key_visible,
    fixed, slope, base, shift,
    key_batch_stride, key_head_stride, key_row_stride, keys, key_heads,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, MIDDLE: tl.constexpr, BLOCK_K: tl.constexpr,
    KL: tl.constexpr, CONTEXTUAL: tl.constexpr, OFFICIAL: tl.constexpr, KNOWN: tl.constexpr,
    KEY_MASK: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All of `keyed` for one key head of one example. Programs: (key heads, examples).

    Args other than tensors and strides:
        inner: (middle, width), weights of the network's first layer.
        bias: (middle,), its bias.
        outer: (1, middle), weights of the second.
        known: keys that some query sees, (batch, key), where KNOWN.
        key_visible: keys that may be seen, (batch, key), where KEY_MASK.
        fixed: parameter of a fixed prior, log α or the Lognormal mean.
        slope, base, shift: `flat.Divergence`'s.
        MIDDLE: width between the network's layers.
        BLOCK_K: keys of a tile for which the network is computed.
        KL: WEIBULL or LOGNORMAL.
        CONTEXTUAL: whether there is a network.
        OFFICIAL: whether the Lognormal mean is log ψ, as in the released code, rather than ψ.
        BLOCK: keys of a tile of numbers.
    """
    head = tl.program_id(0)
    example = tl.program_id(1).to(tl.int64)
    across = tl.arange(0, BLOCK)  # (block,)
    first_key = (example * key_heads + head) * keys  # of this head, in `keyed`
    maps = tl.num_programs(1).to(tl.int64) * key_heads
    scores = keyed + maps * keys
    sums = keyed + 2 * maps * keys + maps
    top = -1e30
    mass = 0.0
    if CONTEXTUAL:
        down = tl.arange(0, BLOCK_K)  # (block_k,)
        dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
        key_at = rows_at(
            key, example, head, down, dim, key_batch_stride, key_head_stride, key_row_stride
        )  # (block_k, width)
        for start in range(0, keys, BLOCK_K):
            inside = start + down < keys  # (block_k,)
            k = tl.load(
                key_at + start * key_row_stride, mask=inside[:, None] & (dim < WIDTH)[None, :], other=0.0
            )  # (block_k, width)
            k = k.to(tl.float32)
            score = tl.zeros((BLOCK_K,), tl.float32)  # (block_k,)
            for unit in tl.static_range(MIDDLE):
                weight = tl.load(inner + unit * WIDTH + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)
                middle = tl.sum(k * weight[None, :], 1) + tl.load(bias + unit).to(tl.float32)  # (block_k,)
                score += tl.maximum(middle, 0.0) * tl.load(outer + unit).to(tl.float32)
            tl.store(scores + first_key + start + down, score, mask=inside)
            if KNOWN:
                inside &= tl.load(known + example * keys + start + down, mask=inside, other=0) != 0
            score = tl.where(inside, score, HIDDEN)
            higher = tl.maximum(top, tl.max(score))
            mass = mass * tl.exp2((top - higher) * LOG2E) + tl.sum(tl.exp2((score - higher) * LOG2E))
            top = higher
        mass = tl.where(mass == 0.0, 1.0, mass)
        lse = top + tl.log2(mass) * LN2
        tl.store(keyed + 2 * maps * keys + example * key_heads + head, lse)
        tl.debug_barrier()  # what other threads stored is read below
    first_total = 0.0
    second_total = 0.0
    second_sums = maps
    if CAUSAL:
        second_sums = maps * keys
    for start in range(0, keys, BLOCK):
        inside = start + across < keys  # (block,), like everything below
        seen = inside
        if KEY_MASK:
            seen &= tl.load(key_visible + example * keys + start + across, mask=inside, other=0) != 0
        sure = seen
        if KNOWN:
            sure = inside & (tl.load(known + example * keys + start + across, mask=inside, other=0) != 0)
        if CONTEXTUAL:
            score = tl.load(scores + first_key + start + across, mask=sure, other=0.0)
            parameter = tl.where(sure, score - lse, 0.0)
        else:
            parameter = tl.zeros((BLOCK,), tl.float32) + fixed
        if KL == WEIBULL:
            log_alpha = parameter + shift
            a = tl.exp2(log_alpha * LOG2E)
            if CONTEXTUAL:
                gamma, _ = _log_gamma(a)
                per_key = a * slope + gamma - log_alpha + base
            else:
                per_key = tl.zeros((BLOCK,), tl.float32) + base
            weight = a
        else:
            if CONTEXTUAL and not OFFICIAL:
                parameter = tl.exp2(parameter * LOG2E)
            a = parameter + shift
            per_key = tl.zeros((BLOCK,), tl.float32) + base
            weight = tl.zeros((BLOCK,), tl.float32) + 1.0
        live = sure & seen
        a = tl.where(live, a, 0.0)
        per_key = tl.where(live, per_key, 0.0)
        weight = tl.where(live, weight, 0.0)
        tl.store(keyed + first_key + start + across, a, mask=inside)
        if CAUSAL:
            first_at = sums + first_key + start + across
            tl.store(first_at, first_total + tl.cumsum(per_key, 0), mask=inside)
            second_at = sums + second_sums + first_key + start + across
            tl.store(second_at, second_total + tl.cumsum(weight, 0), mask=inside)
        first_total += tl.sum(per_key)
        second_total += tl.sum(weight)
    if not CAUSAL:
        tl.store(sums + example * key_heads + head, first_total)
        tl.store(sums + second_sums + example * key_heads + head, second_total)


@helper
def _to_log_psi(
    keyed, known, seers, to_parameter, example, first_key, column, maps, lse, kl_gradient, slope, shift,
    queries, keys, group,
    KL: tl.constexpr, OFFICIAL: tl.constexpr, KNOWN: tl.constexpr, SEERS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Gradient of log ψ_j, and ψ_j, for keys `column`; both shaped like it."""
    sure = column < keys
    if KNOWN:
        sure &= tl.load(known + example * keys + column, mask=sure, other=0) != 0
    score = tl.load(keyed + maps * keys + first_key + column, mask=sure, other=0.0)
    log_psi = tl.where(sure, score - lse, 0.0)
    psi = tl.where(sure, tl.exp2(log_psi * LOG2E), 0.0)
    to = tl.load(to_parameter + first_key + column, mask=sure, other=0.0)
    if KL == WEIBULL:
        if SEERS:
            rows = tl.load(seers + example * keys + column, mask=sure, other=0.0)
        elif CAUSAL:
            rows = (queries - tl.maximum(column - (keys - queries), 0)).to(tl.float32)
        else:
            rows = queries + 0.0 * psi
        rows = rows * group
        alpha = tl.exp2((log_psi + shift) * LOG2E)
        _, digamma = _log_gamma(alpha)
        to = alpha * (to + kl_gradient * rows * (slope + digamma)) - kl_gradient * rows
    elif not OFFICIAL:
        to = to * psi
    return tl.where(sure, to, 0.0), psi


@triton.jit
def prior_to_network(
    keyed, key, inner, bias, outer, known, seers, to_parameter, to_kl, to_key, partial,
    slope, shift, per_cell,
    key_batch_stride, key_head_stride, key_row_stride,
    to_key_batch_stride, to_key_head_stride, to_key_row_stride,
    queries, keys, key_heads, group,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, MIDDLE: tl.constexpr, BLOCK_K: tl.constexpr,
    KL: tl.constexpr, OFFICIAL: tl.constexpr, KNOWN: tl.constexpr, SEERS: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of keys' part of the network's gradients, and what the network adds to the keys' gradient.

    Programs: (blocks of keys, key heads, examples). Parameters shared with `prior_parameters` have the same
    meaning.

    Args other than tensors and strides:
        seers: how many real queries see each key, float32 (batch, key), where SEERS.
        to_parameter: gradient of the parameter a, float32 (batch, key heads, key).
        to_kl: float32 (batch,), gradient of the KL.
        to_key: gradient of keys; the result is added to it.
        partial: float32 (programs, middle · (width + 2)): gradients of inner, bias and outer.
        per_cell: factor of the KL.
        group: heads that share a key head.
    """
    head = tl.program_id(1)
    example = tl.program_id(2).to(tl.int64)
    first_key = (example * key_heads + head) * keys  # of this head, in `keyed`
    maps = tl.num_programs(2).to(tl.int64) * key_heads
    lse = tl.load(keyed + 2 * maps * keys + example * key_heads + head)
    kl_gradient = tl.load(to_kl + example) * per_cell
    total = 0.0  # the softmax's backward pass needs a sum first
    for start in range(0, keys, BLOCK):
        to_log_psi, _ = _to_log_psi(
            keyed, known, seers, to_parameter, example, first_key, start + tl.arange(0, BLOCK), maps, lse,
            kl_gradient, slope, shift, queries, keys, group, KL, OFFICIAL, KNOWN, SEERS, CAUSAL,
        )  # (block,)  # fmt: skip
        total += tl.sum(to_log_psi)
    column = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)  # (block_k,)
    to_log_psi, psi = _to_log_psi(
        keyed, known, seers, to_parameter, example, first_key, column, maps, lse,
        kl_gradient, slope, shift, queries, keys, group, KL, OFFICIAL, KNOWN, SEERS, CAUSAL,
    )  # (block_k,)  # fmt: skip
    to_score = to_log_psi - psi * total  # (block_k,)
    dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
    inside = (column < keys)[:, None] & (dim < WIDTH)[None, :]  # (block_k, width)
    k = tl.load(
        rows_at(key, example, head, column, dim, key_batch_stride, key_head_stride, key_row_stride),
        mask=inside, other=0.0,
    )  # (block_k, width)  # fmt: skip
    k = k.to(tl.float32)
    to_key_at = rows_at(
        to_key, example, head, column, dim, to_key_batch_stride, to_key_head_stride, to_key_row_stride
    )  # (block_k, width)
    to_k = tl.load(to_key_at, mask=inside, other=0.0).to(tl.float32)  # (block_k, width)
    program = (example * key_heads + head) * tl.num_programs(0) + tl.program_id(0)
    sums = partial + program * MIDDLE * (WIDTH + 2)
    for unit in tl.static_range(MIDDLE):
        weight = tl.load(inner + unit * WIDTH + dim, mask=dim < WIDTH, other=0.0).to(tl.float32)  # (width,)
        middle = tl.sum(k * weight[None, :], 1) + tl.load(bias + unit).to(tl.float32)  # (block_k,)
        to_middle = tl.where(middle > 0.0, to_score * tl.load(outer + unit).to(tl.float32), 0.0)
        to_k += to_middle[:, None] * weight[None, :]
        tl.store(sums + unit * WIDTH + dim, tl.sum(to_middle[:, None] * k, 0), mask=dim < WIDTH)
        tl.store(sums + MIDDLE * WIDTH + unit, tl.sum(to_middle))
        tl.store(sums + MIDDLE * (WIDTH + 1) + unit, tl.sum(to_score * tl.maximum(middle, 0.0)))
    tl.store(to_key_at, to_k.to(to_key.dtype.element_ty), mask=inside)


def _sizes(width: int, middle: int) -> dict[str, int]:
    return {"WIDTH": width, "BLOCK_WIDTH": power_of_two(width), "MIDDLE": middle, "BLOCK_K": _BLOCK_K}


@lru_cache(MOST)
def _forward_ready(
    keyed: Shape, key: Shape, middle: int, family: int, official: bool,
    known: bool, key_mask: bool, causal: bool,
) -> Ready:  # fmt: skip
    """The launch for the shape and the strides of keys; `middle` is 0 for a fixed prior."""
    batch, key_heads, keys, width = keyed
    return Ready(
        prior_parameters,
        (key_heads, batch, 1),
        (*key[:3], keys, key_heads),
        {
            **_sizes(width, max(1, middle)),
            "KL": family,
            "CONTEXTUAL": middle > 0,
            "OFFICIAL": official,
            "KNOWN": known,
            "KEY_MASK": key_mask,
            "CAUSAL": causal,
            "BLOCK": min(_AT_ONCE, power_of_two(keys)),
        },
    )


def forward(key: Tensor, masks: Masks, divergence: Divergence) -> Tensor | None:
    """What the KL needs from keys (`keyed`, see above); None without a KL.

    Args:
        key: (batch, key heads, key, dim).
        masks: which cells are visible.
        divergence: the KL's numbers, and the prior's network if it has one.
    """
    if not divergence.wanted:
        return None
    key = rows_whole(key)
    batch, key_heads, keys, _ = key.shape
    keyed = key.new_empty(keyed_size(batch, key_heads, keys, masks.causal), dtype=torch.float32)
    middle = 0 if divergence.inner is None else divergence.inner.shape[0]
    ready = _forward_ready(
        key.shape, key.stride(), middle, divergence.family, divergence.official,
        masks.known is not None, masks.key_visible is not None, masks.causal,
    )  # fmt: skip
    network = (given_or(x, keyed) for x in (divergence.inner, divergence.bias, divergence.outer))
    ready.run(
        (keyed, key, *network, bytes_of(masks.known, keyed), bytes_of(masks.key_visible, keyed)),
        (divergence.fixed, divergence.slope, divergence.base, divergence.shift),
    )
    return keyed


@lru_cache(MOST)
def _backward_ready(
    keyed: Shape, key: Shape, to_key: Shape, middle: int, queries: int, heads: int,
    family: int, official: bool, known: bool, seers: bool, causal: bool,
) -> Ready:  # fmt: skip
    """The launch for the shape and the strides of keys, and the strides of their gradient."""
    batch, key_heads, keys, width = keyed
    return Ready(
        prior_to_network,
        (blocks(keys, _BLOCK_K), key_heads, batch),
        (*key[:3], *to_key[:3], queries, keys, key_heads, heads // key_heads),
        {
            **_sizes(width, middle),
            "KL": family,
            "OFFICIAL": official,
            "KNOWN": known,
            "SEERS": seers,
            "CAUSAL": causal,
            "BLOCK": min(_AT_ONCE, power_of_two(keys)),
        },
    )


def backward(
    inputs: Inputs,
    masks: Masks,
    divergence: Divergence,
    keyed: Tensor,
    to_parameter: Tensor,
    to_kl: Tensor | None,
    to_key: Tensor,
) -> dict[str, Tensor]:
    """Gradients of the network, by name, and of keys that only the prior reads.

    The part that passes through keys that scores read too is added to `to_key`.

    Args:
        inputs: of the attention.
        masks: as passed to `forward`.
        divergence: as passed to `forward`.
        keyed: from `forward`.
        to_parameter: gradient of the prior's parameter, float32 (batch, key heads, key).
        to_kl: gradient of the KL, float32 (batch,).
        to_key: gradient of the attention's keys.
    """
    inner, bias, outer = divergence.inner, divergence.bias, divergence.outer
    if inner is None or bias is None or outer is None or to_kl is None:
        return {}
    key, apart = rows_whole(inputs.keys_of_prior), inputs.prior_key is not None
    batch, key_heads, _, width = key.shape
    _, heads, queries, _ = inputs.query.shape
    middle = inner.shape[0]
    if apart:
        to_key = heads_last(key, *key.shape).zero_()
    ready = _backward_ready(
        key.shape, key.stride(), to_key.stride(), middle, queries, heads,
        divergence.family, divergence.official,
        masks.known is not None, masks.seers is not None, masks.causal,
    )  # fmt: skip
    partial = key.new_empty((batch * key_heads * ready.grid[0], middle * (width + 2)), dtype=torch.float32)
    ready.run(
        (
            keyed, key, inner, bias, outer, bytes_of(masks.known, keyed), given_or(masks.seers, keyed),
            to_parameter, to_kl, to_key, partial,
        ),
        (divergence.slope, divergence.shift, divergence.per_cell),
    )  # fmt: skip
    total = partial.sum(dim=0)
    if inner.dtype != torch.float32:
        total = total.to(inner.dtype)
    split = middle * width
    return {
        "inner": total.as_strided((middle, width), (width, 1)),
        "bias": total[split : split + middle],
        "outer": total.as_strided((1, middle), (middle, 1), split + middle),
        **({"prior_key": to_key} if apart else {}),
    }
