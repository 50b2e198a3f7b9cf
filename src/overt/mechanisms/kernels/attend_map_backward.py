"""Gradients of the attention pass where scores are an evolved map.

One kernel computes each row's product of output and gradient, the other iterates over rows for each block of
keys. It recomputes weights and noise from the map and from what the forward pass saved of each row. Exponents
are in units of log 2.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms.flat import Divergence, Noise
from overt.mechanisms.kernels.attend import (
    Form,
    Shape,
    address_of,
    given_or,
    heads_last,
    heads_last_strides,
    row_length,
    rows_whole,
)
from overt.mechanisms.kernels.launch import MOST, Ready, blocks, power_of_two
from overt.mechanisms.kernels.noise import (
    LOG2E,
    LOGNORMAL,
    LOOSE,
    NO_KL,
    NO_NOISE,
    example_number,
    log_noise,
    stream_key,
    word_tile,
)
from overt.mechanisms.kernels.tiles import HIDDEN, row_numbers, rows_at, score_gradient

_ROWS = 64  # of a program of `row_products`


@triton.jit
def row_products(
    out, to_out, delta,
    out_batch_stride, out_head_stride, out_row_stride,
    to_out_batch_stride, to_out_head_stride, to_out_row_stride,
    heads, queries,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """`delta`, float32 (batch, heads, query): Σ over dims of out · to_out.

    Programs: (blocks of rows, heads, examples).
    """
    head = tl.program_id(1).to(tl.int64)
    example = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)  # (block_q,)
    dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
    inside = (row < queries)[:, None] & (dim < WIDTH)[None, :]  # (block_q, width)
    o = tl.load(
        rows_at(out, example, head, row, dim, out_batch_stride, out_head_stride, out_row_stride),
        mask=inside, other=0.0,
    )  # (block_q, width)  # fmt: skip
    g = tl.load(
        rows_at(to_out, example, head, row, dim, to_out_batch_stride, to_out_head_stride, to_out_row_stride),
        mask=inside, other=0.0,
    )  # (block_q, width)  # fmt: skip
    products = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)  # (block_q,)
    tl.store(delta + (example * heads + head) * queries + row, products, mask=row < queries)


@triton.jit(do_not_specialize=LOOSE)
def attend_to_map(
    maps, to_next, to_maps, value, to_out, to_value, to_parameter, delta,
    rows, to_kl,
    step, sample, examples, keyed, drop_keys,
    noise_factor, kept_gain, precision, per_cell,
    drop_below, first_row,
    map_batch_stride, map_head_stride, map_row_stride,
    to_next_batch_stride, to_next_head_stride, to_next_row_stride,
    to_map_batch_stride, to_map_head_stride, to_map_row_stride,
    value_batch_stride, value_head_stride, value_row_stride,
    to_out_batch_stride, to_out_head_stride, to_out_row_stride,
    to_value_batch_stride, to_value_head_stride, to_value_row_stride,
    heads, group, queries, keys, row_length,
    seed_low, seed_high, step_number, sample_number, layer, kind, first_example,
    STEP: tl.constexpr, SAMPLE: tl.constexpr, EXAMPLES: tl.constexpr, NEXT: tl.constexpr,
    NOISE: tl.constexpr, KL: tl.constexpr, SCORES: tl.constexpr, DROPOUT: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of columns of the maps, and of their values and the prior's parameters.

    Programs: (blocks of keys, key heads, examples); each iterates over all rows of all heads of its group.
    Parameters shared with `attend_backward.attend_to_keys` have the same meaning.

    Args other than tensors and strides:
        maps: −inf in hidden cells.
        to_next: gradient of the map from the layer above, where NEXT; added in visible cells.
        to_maps: where the map's gradient is written, zero in hidden cells.
        delta: from `row_products`.
        row_length: columns of a map's rows in memory, those of padding included; gradients of padding are 0.
        NEXT: whether there is `to_next`.
    """
    block = tl.program_id(0)
    key_head = tl.program_id(1)
    example = tl.program_id(2).to(tl.int64)
    BLOCK_WORDS: tl.constexpr = BLOCK_K // 4
    DRAWS: tl.constexpr = NOISE != NO_NOISE or DROPOUT
    dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
    down = tl.arange(0, BLOCK_Q)  # (block_q,)
    column = block * BLOCK_K + tl.arange(0, BLOCK_K)  # (block_k,)
    seen = column < keys  # (block_k,)
    v = tl.load(
        rows_at(
            value, example, key_head, column, dim, value_batch_stride, value_head_stride, value_row_stride
        ),
        mask=seen[:, None] & (dim < WIDTH)[None, :], other=0.0,
    )  # (block_k, width)  # fmt: skip
    first_key = (example * (heads // group) + key_head) * keys  # of this key head, in `keyed`
    parameter = seen.to(tl.float32)  # (block_k,)
    kl_gradient = 0.0
    if KL != NO_KL:
        parameter = tl.load(keyed + first_key + column, mask=seen, other=0.0)
        kl_gradient = tl.load(to_kl + example) * per_cell
    if DRAWS:
        c0 = (block * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)).to(tl.uint32)[None, :]  # (1, block_k / 4)
        c3 = example_number(examples, first_example, example, EXAMPLES)
    if NOISE != NO_NOISE:
        k0, k1 = stream_key(
            step, sample, seed_low, seed_high, step_number, sample_number, layer, kind, example, example,
            STEP, SAMPLE, 1,
        )  # fmt: skip
    if DROPOUT:
        drop_k0 = tl.load(drop_keys).to(tl.uint32)
        drop_k1 = tl.load(drop_keys + 1).to(tl.uint32)
        drop_place = example.to(tl.uint32) << 12  # beside the number, which samples of an example share

    to_value_sum = tl.zeros((BLOCK_K, BLOCK_WIDTH), tl.float32)  # (block_k, width)
    to_parameter_sum = tl.zeros((BLOCK_K,), tl.float32)  # (block_k,)
    each = tl.num_programs(2).to(tl.int64) * heads * queries
    for member in range(group):
        head = key_head * group + member
        head_start = (example * heads + head) * queries
        to_out_at = rows_at(
            to_out, example, head, down, dim, to_out_batch_stride, to_out_head_stride, to_out_row_stride
        )  # (block_q, width)
        map_at = maps + example * map_batch_stride + head.to(tl.int64) * map_head_stride
        to_next_at = to_next + example * to_next_batch_stride + head.to(tl.int64) * to_next_head_stride
        to_map_at = to_maps + example * to_map_batch_stride + head.to(tl.int64) * to_map_head_stride
        for start in range(0, queries, BLOCK_Q):
            row = start + down  # (block_q,)
            row_inside = row < queries  # (block_q,)
            # Padding is loaded and stored, too: only then are several columns at once.
            inside = row_inside[:, None] & (column < row_length)[None, :]  # (block_q, block_k)
            far_row = row[:, None].to(tl.int64)  # (block_q, 1)
            cells = tl.load(map_at + far_row * map_row_stride + column[None, :], mask=inside, other=HIDDEN)
            g = tl.load(
                to_out_at + start * to_out_row_stride,
                mask=row_inside[:, None] & (dim < WIDTH)[None, :], other=0.0,
            )  # (block_q, width)  # fmt: skip
            to_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)  # (block_q, block_k)
            drawn_lse, mean_lse, to_mean_lse = row_numbers(
                rows, head_start, row, row_inside, each, kl_gradient, KL
            )  # (block_q,) each
            row_delta = tl.load(delta + head_start + row, mask=row_inside, other=0.0)  # (block_q,)
            scores = tl.where(seen[None, :], cells.to(tl.float32), HIDDEN)  # (block_q, block_k)
            visible = scores != HIDDEN  # (block_q, block_k)
            raw = tl.where(visible, scores, 0.0)  # (block_q, block_k)
            if DRAWS:
                c1 = (first_row + row).to(tl.uint32)[:, None]  # (block_q, 1)
                c2 = head.to(tl.uint32)
            if NOISE != NO_NOISE:
                word = word_tile(k0, k1, c0, c1, c2, c3, BLOCK_Q, BLOCK_K, True)  # (block_q, block_k)
                noise = log_noise(word, noise_factor, NOISE, FAST)  # (block_q, block_k)
                weights = tl.exp2(scores * LOG2E - drawn_lse[:, None] + noise)  # (block_q, block_k)
            else:
                weights = tl.exp2(scores * LOG2E - drawn_lse[:, None])  # (block_q, block_k)
            used = weights  # (block_q, block_k), after dropout
            if DROPOUT:
                word = word_tile(drop_k0, drop_k1, c0, c1, c2 + drop_place, c3, BLOCK_Q, BLOCK_K, True)
                kept = word >= drop_below.to(tl.uint32)
                used = tl.where(kept, weights * kept_gain, 0.0)
                to_weights = tl.where(kept, to_weights * kept_gain, 0.0)
            to_value_sum = tl.dot(tl.trans(used.to(g.dtype)), g, to_value_sum, input_precision=PRECISION)
            to_scores, to_parameters = score_gradient(
                raw, 1.0, weights, to_weights, row_delta[:, None], mean_lse[:, None], to_mean_lse[:, None],
                parameter[None, :], kl_gradient, precision, visible, NOISE, KL, SCORES, True,
            )  # (block_q, block_k) each  # fmt: skip
            if KL != NO_KL:
                to_parameter_sum += tl.sum(to_parameters, 0)
            if NEXT:
                later = tl.load(
                    to_next_at + far_row * to_next_row_stride + column[None, :], mask=inside, other=0.0
                )  # (block_q, block_k)
                to_scores += tl.where(visible, later.to(tl.float32), 0.0)
            tl.store(
                to_map_at + far_row * to_map_row_stride + column[None, :],
                to_scores.to(to_maps.dtype.element_ty), mask=inside,
            )  # fmt: skip
    to = (
        example * to_value_batch_stride + key_head.to(tl.int64) * to_value_head_stride
        + column[:, None] * to_value_row_stride + dim[None, :]
    )  # (block_k, width)  # fmt: skip
    tl.store(
        to_value + to, to_value_sum.to(to_value.dtype.element_ty),
        mask=seen[:, None] & (dim < WIDTH)[None, :],
    )  # fmt: skip
    if KL != NO_KL:
        factor = -kl_gradient
        if KL == LOGNORMAL:
            factor = factor * precision
        tl.store(to_parameter + first_key + column, to_parameter_sum * factor, mask=seen)


@lru_cache(MOST)
def _ready(
    form: Form, has_next: bool, mapped: Shape, valued: Shape,
    maps: Shape, to_next: Shape, to_maps: Shape, value: Shape, out: Shape, to_out: Shape,
) -> tuple[Ready, Ready]:  # fmt: skip
    """The launches for shapes of map and value, and strides of the rest."""
    (batch, heads, queries, keys), (_, key_heads, _, width) = mapped, valued
    products = Ready(
        row_products,
        (blocks(queries, _ROWS), heads, batch),
        (*out[:3], *to_out[:3], heads, queries),
        {"WIDTH": width, "BLOCK_WIDTH": power_of_two(width), "BLOCK_Q": _ROWS},
    )
    tiles = form.tiles("map, drawn" if form.draws else "map", width, queries, keys)
    to_map = Ready(
        attend_to_map,
        (blocks(keys, tiles.columns), key_heads, batch),
        (
            *form.integers(), *maps[:3], *to_next[:3], *to_maps[:3], *value[:3],
            *to_out[:3], *heads_last_strides(valued)[:3], heads, heads // key_heads, queries, keys,
            row_length(keys),
        ),
        {**form.address(), "NEXT": has_next, **form.law(), **form.sizes(width, tiles)},
        tiles.warps,
        tiles.stages,
    )  # fmt: skip
    return products, to_map


def map_backward(
    maps: Tensor,
    value: Tensor,
    noise: Noise,
    divergence: Divergence,
    keyed: Tensor | None,
    out: Tensor,
    rows: Tensor,
    to_out: Tensor,
    to_kl: Tensor | None,
    to_next: Tensor | None,
    to_maps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of `attend_forward.forward` with a map: of values, and of the prior's parameter.

    Args:
        maps: as passed to `forward`.
        value: as passed to `forward`.
        noise: as passed to `forward`.
        divergence: as passed to `forward`.
        keyed: as passed to `forward`.
        out: from `forward`.
        rows: from `forward`.
        to_out: gradient of `out`.
        to_kl: gradient of the KL, float32 (batch,).
        to_next: the map's gradient from the layer above, added in visible cells.
        to_maps: where the map's gradient is written, in memory like `maps`, as is `to_next`.
    """
    value, to_out = rows_whole(value), rows_whole(to_out)
    later = maps if to_next is None else to_next
    products, to_map = _ready(
        Form.of(value.dtype, noise, divergence), to_next is not None, maps.shape, value.shape,
        maps.stride(), later.stride(), to_maps.stride(), value.stride(), out.stride(), to_out.stride(),
    )  # fmt: skip
    batch, key_heads, keys, _ = value.shape
    to_value = heads_last(value, *value.shape)
    to_parameter = value.new_empty((batch, key_heads, keys if divergence.wanted else 0), dtype=torch.float32)
    delta = value.new_empty(maps.shape[:3], dtype=torch.float32)
    products.run((out, to_out, delta))
    to_map.run(
        (
            maps, later, to_maps, value, to_out, to_value, to_parameter, delta,
            rows, given_or(to_kl, value),
            *address_of(noise, value), given_or(keyed, value), given_or(noise.drop_keys, value),
        ),
        (*noise.factors(), divergence.precision, divergence.per_cell),
        noise.loose(),
    )  # fmt: skip
    return to_value, to_parameter
