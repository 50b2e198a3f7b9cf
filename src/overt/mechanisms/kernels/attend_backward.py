"""Gradients of the attention pass where scores are products of queries and keys.

Two kernels: one iterates over keys for each block of queries, the other over queries for each block of keys.
Both recompute scores and noise, tile by tile, from what the forward pass saved of each row. Exponents are in
units of log 2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms import flat
from overt.mechanisms.flat import Divergence, Inputs, Masks, Noise
from overt.mechanisms.kernels.attend import (
    NO_DIVERGENCE,
    Form,
    Shape,
    given_or,
    heads_last,
    heads_last_strides,
    read_by_both,
    rows_whole,
)
from overt.mechanisms.kernels.launch import MOST, Ready, blocks
from overt.mechanisms.kernels.noise import (
    LOG2E,
    LOGNORMAL,
    LOOSE,
    NO_KL,
    NO_NOISE,
    column_order,
    example_number,
    log_noise,
    stream_key,
    word_tile,
)
from overt.mechanisms.kernels.tiles import (
    HIDDEN,
    NOTHING_ELSE,
    NOWHERE,
    PLAINLY,
    ZEROS,
    padded_rows,
    padded_span,
    row_numbers,
    rows_at,
    score_gradient,
)


@triton.jit(do_not_specialize=LOOSE)
def attend_to_queries(
    query, key, value, out, to_out, to_query, delta,
    rows, to_kl,
    key_visible, query_real, step, sample, examples, keyed, drop_keys,
    scale, noise_factor, kept_gain, precision, per_cell,
    drop_below, first_row,
    query_batch_stride, query_head_stride, query_row_stride,
    key_batch_stride, key_head_stride, key_row_stride,
    value_batch_stride, value_head_stride, value_row_stride,
    out_batch_stride, out_head_stride, out_row_stride,
    to_out_batch_stride, to_out_head_stride, to_out_row_stride,
    to_query_batch_stride, to_query_head_stride, to_query_row_stride,
    heads, group, queries, keys,
    seed_low, seed_high, step_number, sample_number, layer, kind, first_example,
    STEP: tl.constexpr, SAMPLE: tl.constexpr, EXAMPLES: tl.constexpr,
    NOISE: tl.constexpr, KL: tl.constexpr, SCORES: tl.constexpr, DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr, KEY_MASK: tl.constexpr, QUERY_MASK: tl.constexpr, PADDING: tl.constexpr,
    WHOLE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries of one head of one example, over all the keys that they see.

    Programs: (blocks of rows, heads, examples). It also stores each row's `delta` for `attend_to_keys`.
    Parameters shared with `attend_forward` have the same meaning.

    Args other than tensors and strides:
        delta: float32 (batch, heads, query), Σ over dims of out · to_out.
        rows: `Attended.rows`.
        to_kl: float32 (batch,), gradient of the KL.
        PADDING: as in the forward pass; with NOTHING_ELSE `to_query` is unchanged for other queries.
        WHOLE: whether tiles cover keys exactly.
    """
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block  # the longest first
    head = tl.program_id(1)
    example = tl.program_id(2).to(tl.int64)
    BLOCK_WORDS: tl.constexpr = BLOCK_K // 4
    DRAWS: tl.constexpr = NOISE != NO_NOISE or DROPOUT
    MASKED: tl.constexpr = not WHOLE or KEY_MASK or QUERY_MASK or CAUSAL
    row = block * BLOCK_Q + tl.arange(0, BLOCK_Q)  # (block_q,)
    row_inside = row < queries  # (block_q,)
    dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
    across = tl.arange(0, BLOCK_K)  # (block_k,)
    word_across = tl.arange(0, BLOCK_WORDS)  # (block_k / 4,)
    key_head = head // group
    order = column_order(across, BLOCK_K, DRAWS)  # (block_k,)
    inside = row_inside[:, None] & (dim < WIDTH)[None, :]  # (block_q, width)
    q = tl.load(
        rows_at(query, example, head, row, dim, query_batch_stride, query_head_stride, query_row_stride),
        mask=inside, other=0.0,
    )  # (block_q, width)  # fmt: skip
    g = tl.load(
        rows_at(to_out, example, head, row, dim, to_out_batch_stride, to_out_head_stride, to_out_row_stride),
        mask=inside, other=0.0,
    )  # (block_q, width)  # fmt: skip
    o = tl.load(
        rows_at(out, example, head, row, dim, out_batch_stride, out_head_stride, out_row_stride),
        mask=inside, other=0.0,
    )  # (block_q, width)  # fmt: skip
    head_start = (example * heads + head) * queries
    each = tl.num_programs(2).to(tl.int64) * heads * queries
    own_delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)  # (block_q,)
    tl.store(delta + head_start + row, own_delta, mask=row_inside)
    kl_gradient = 0.0
    if KL != NO_KL:
        kl_gradient = tl.load(to_kl + example) * per_cell
    drawn_lse, mean_lse, to_mean_lse = row_numbers(rows, head_start, row, row_inside, each, kl_gradient, KL)
    key_at = rows_at(
        key, example, key_head, order, dim, key_batch_stride, key_head_stride, key_row_stride
    )  # (block_k, width)
    value_at = rows_at(
        value, example, key_head, order, dim, value_batch_stride, value_head_stride, value_row_stride
    )  # (block_k, width)
    first_key = (example * (heads // group) + key_head) * keys  # of this key head, in `keyed`
    if DRAWS:
        c1 = (first_row + row).to(tl.uint32)[:, None]  # (block_q, 1)
        c2 = head.to(tl.uint32)
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

    to_query_sum = tl.zeros((BLOCK_Q, BLOCK_WIDTH), tl.float32)  # (block_q, width)
    stop = keys
    if CAUSAL:
        stop = tl.minimum(keys, block * BLOCK_Q + BLOCK_Q + keys - queries)
    if PADDING != ZEROS:
        padding = padded_rows(query_real, example, row, queries)  # (block_q,)
    if PADDING == NOTHING_ELSE:
        stop = tl.where(tl.max(padding.to(tl.int32), 0) > 0, stop, 0)
    for start in range(0, stop, BLOCK_K):
        column = start + order  # (block_k,)
        seen = column < keys  # (block_k,)
        if WHOLE:
            k = tl.load(key_at + start * key_row_stride, mask=(dim < WIDTH)[None, :], other=0.0)
            v = tl.load(value_at + start * value_row_stride, mask=(dim < WIDTH)[None, :], other=0.0)
        else:
            k = tl.load(
                key_at + start * key_row_stride, mask=seen[:, None] & (dim < WIDTH)[None, :], other=0.0
            )  # (block_k, width)
            v = tl.load(
                value_at + start * value_row_stride, mask=seen[:, None] & (dim < WIDTH)[None, :], other=0.0
            )  # (block_k, width)
        raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (block_q, block_k)
        to_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)  # (block_q, block_k)
        scores = raw
        if KEY_MASK:
            seen &= tl.load(key_visible + example * keys + column, mask=seen, other=0) != 0
        visible = seen[None, :]  # (1, block_k), or (block_q, block_k) where rows differ
        if CAUSAL:
            visible = visible & (column[None, :] <= row[:, None] + (keys - queries))
        if QUERY_MASK:
            visible = visible & (drawn_lse != NOWHERE)[:, None]
        if PADDING == NOTHING_ELSE:
            visible = visible & padding[:, None]
        if MASKED:
            scores = tl.where(visible, raw, HIDDEN)
        c0 = (start // 4 + word_across).to(tl.uint32)[None, :]  # (1, block_k / 4)
        if NOISE != NO_NOISE:
            word = word_tile(k0, k1, c0, c1, c2, c3, BLOCK_Q, BLOCK_K, False)  # (block_q, block_k)
            noise = log_noise(word, noise_factor, NOISE, FAST)  # (block_q, block_k)
            if PADDING == PLAINLY:
                noise = tl.where(padding[:, None], 0.0, noise)
            weights = tl.exp2(scores * (scale * LOG2E) - drawn_lse[:, None] + noise)  # (block_q, block_k)
        else:
            weights = tl.exp2(scores * (scale * LOG2E) - drawn_lse[:, None])  # (block_q, block_k)
        if DROPOUT:
            word = word_tile(drop_k0, drop_k1, c0, c1, c2 + drop_place, c3, BLOCK_Q, BLOCK_K, False)
            to_weights = tl.where(word >= drop_below.to(tl.uint32), to_weights * kept_gain, 0.0)
        parameter = seen.to(tl.float32)  # (block_k,)
        if KL != NO_KL:
            parameter = tl.load(keyed + first_key + column, mask=seen, other=0.0)
        if PADDING == PLAINLY:
            visible = visible & (padding == 0)[:, None]  # to the KL
        to_scores, _ = score_gradient(
            raw, scale, weights, to_weights, own_delta[:, None], mean_lse[:, None], to_mean_lse[:, None],
            parameter[None, :], kl_gradient, precision, visible, NOISE, KL, SCORES, MASKED,
        )  # (block_q, block_k)  # fmt: skip
        to_query_sum = tl.dot(to_scores.to(k.dtype), k, to_query_sum, input_precision=PRECISION)
    to_query_sum *= scale
    to_query_at = rows_at(
        to_query, example, head, row, dim, to_query_batch_stride, to_query_head_stride, to_query_row_stride
    )  # (block_q, width)
    if PADDING == NOTHING_ELSE:
        inside = inside & padding[:, None]
    tl.store(to_query_at, to_query_sum.to(to_query.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=LOOSE)
def attend_to_keys(
    query, key, value, to_out, to_key, to_value, to_parameter, delta,
    rows, to_kl,
    key_visible, query_real, step, sample, examples, keyed, drop_keys,
    scale, noise_factor, kept_gain, precision, per_cell,
    drop_below, first_row,
    query_batch_stride, query_head_stride, query_row_stride,
    key_batch_stride, key_head_stride, key_row_stride,
    value_batch_stride, value_head_stride, value_row_stride,
    to_out_batch_stride, to_out_head_stride, to_out_row_stride,
    to_key_batch_stride, to_key_head_stride, to_key_row_stride,
    heads, group, queries, keys,
    seed_low, seed_high, step_number, sample_number, layer, kind, first_example,
    STEP: tl.constexpr, SAMPLE: tl.constexpr, EXAMPLES: tl.constexpr,
    NOISE: tl.constexpr, KL: tl.constexpr, SCORES: tl.constexpr, DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr, KEY_MASK: tl.constexpr, QUERY_MASK: tl.constexpr, PADDING: tl.constexpr,
    WHOLE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys of one key head, of their values and of the prior's parameters.

    Programs: (blocks of keys, key heads, examples); each iterates over the queries of all heads of its group
    that see the keys. Parameters shared with `attend_to_queries` have the same meaning.

    Args other than tensors and strides:
        to_value: shaped like `to_key`, with the same strides.
        to_parameter: float32 (batch, key heads, key), gradient of the prior's parameter.
        delta: from `attend_to_queries`.
        PADDING: as in the forward pass; with NOTHING_ELSE `to_key` and `to_value` are added to.
        WHOLE: whether tiles cover rows and keys exactly.
    """
    block = tl.program_id(0)
    key_head = tl.program_id(1)
    example = tl.program_id(2).to(tl.int64)
    BLOCK_WORDS: tl.constexpr = BLOCK_K // 4
    DRAWS: tl.constexpr = NOISE != NO_NOISE or DROPOUT
    MASKED: tl.constexpr = not WHOLE or KEY_MASK or QUERY_MASK or CAUSAL
    dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
    across = tl.arange(0, BLOCK_K)  # (block_k,)
    down = tl.arange(0, BLOCK_Q)  # (block_q,)
    order = column_order(across, BLOCK_K, DRAWS)  # (block_k,)
    column = block * BLOCK_K + order  # (block_k,)
    seen = column < keys  # (block_k,)
    inside = seen[:, None] & (dim < WIDTH)[None, :]  # (block_k, width)
    k = tl.load(
        rows_at(key, example, key_head, column, dim, key_batch_stride, key_head_stride, key_row_stride),
        mask=inside, other=0.0,
    )  # (block_k, width)  # fmt: skip
    v = tl.load(
        rows_at(
            value, example, key_head, column, dim, value_batch_stride, value_head_stride, value_row_stride
        ),
        mask=inside, other=0.0,
    )  # (block_k, width)  # fmt: skip
    first_key = (example * (heads // group) + key_head) * keys  # of this key head, in `keyed`
    parameter = seen.to(tl.float32)  # (block_k,)
    kl_gradient = 0.0
    if KL != NO_KL:
        parameter = tl.load(keyed + first_key + column, mask=seen, other=0.0)
        kl_gradient = tl.load(to_kl + example) * per_cell
    if KEY_MASK:
        seen &= tl.load(key_visible + example * keys + column, mask=seen, other=0) != 0
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

    # Transposed, so that weights and gradients enter the products as they are.
    to_key_sum = tl.zeros((BLOCK_WIDTH, BLOCK_K), tl.float32)  # (width, block_k)
    to_value_sum = tl.zeros((BLOCK_WIDTH, BLOCK_K), tl.float32)  # (width, block_k)
    # Summed over rows at the end, so that each thread keeps its own part.
    to_parameter_sum = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)  # (block_q, block_k)
    begin, end = 0, queries
    if CAUSAL:
        begin = tl.maximum(0, block * BLOCK_K - (keys - queries)) // BLOCK_Q * BLOCK_Q
    if PADDING == NOTHING_ELSE:  # from the first padded row to the last
        first, end = padded_span(query_real, example, queries)
        begin = tl.maximum(begin, first // BLOCK_Q * BLOCK_Q)
    each = tl.num_programs(2).to(tl.int64) * heads * queries
    for member in range(group):
        head = key_head * group + member
        head_start = (example * heads + head) * queries
        query_at = rows_at(
            query, example, head, down, dim, query_batch_stride, query_head_stride, query_row_stride
        )  # (block_q, width)
        to_out_at = rows_at(
            to_out, example, head, down, dim, to_out_batch_stride, to_out_head_stride, to_out_row_stride
        )  # (block_q, width)
        for start in range(begin, end, BLOCK_Q):
            row = start + down  # (block_q,)
            row_inside = row < queries  # (block_q,)
            if WHOLE:
                q = tl.load(query_at + start * query_row_stride, mask=(dim < WIDTH)[None, :], other=0.0)
                g = tl.load(to_out_at + start * to_out_row_stride, mask=(dim < WIDTH)[None, :], other=0.0)
            else:
                q = tl.load(
                    query_at + start * query_row_stride,
                    mask=row_inside[:, None] & (dim < WIDTH)[None, :], other=0.0,
                )  # (block_q, width)  # fmt: skip
                g = tl.load(
                    to_out_at + start * to_out_row_stride,
                    mask=row_inside[:, None] & (dim < WIDTH)[None, :], other=0.0,
                )  # (block_q, width)  # fmt: skip
            raw = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (block_q, block_k)
            to_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)  # (block_q, block_k)
            drawn_lse, mean_lse, to_mean_lse = row_numbers(
                rows, head_start, row, row_inside, each, kl_gradient, KL
            )  # (block_q,) each
            row_delta = tl.load(delta + head_start + row, mask=row_inside, other=0.0)  # (block_q,)
            scores = raw
            visible = seen[None, :]  # (1, block_k), or (block_q, block_k) where rows differ
            if CAUSAL:
                visible = visible & (column[None, :] <= row[:, None] + (keys - queries))
            if QUERY_MASK or not WHOLE:
                visible = visible & (drawn_lse != NOWHERE)[:, None]
            if PADDING != ZEROS:
                row_padding = padded_rows(query_real, example, row, queries)  # (block_q,)
            if PADDING == NOTHING_ELSE:
                visible = visible & row_padding[:, None]
            if MASKED:
                scores = tl.where(visible, raw, HIDDEN)
            if DRAWS:
                c1 = (first_row + row).to(tl.uint32)[:, None]  # (block_q, 1)
                c2 = head.to(tl.uint32)
            if NOISE != NO_NOISE:
                word = word_tile(k0, k1, c0, c1, c2, c3, BLOCK_Q, BLOCK_K, False)  # (block_q, block_k)
                noise = log_noise(word, noise_factor, NOISE, FAST)  # (block_q, block_k)
                if PADDING == PLAINLY:
                    noise = tl.where(row_padding[:, None], 0.0, noise)
                weights = tl.exp2(scores * (scale * LOG2E) - drawn_lse[:, None] + noise)
            else:
                weights = tl.exp2(scores * (scale * LOG2E) - drawn_lse[:, None])  # (block_q, block_k)
            used = weights  # (block_q, block_k), after dropout
            if DROPOUT:
                word = word_tile(drop_k0, drop_k1, c0, c1, c2 + drop_place, c3, BLOCK_Q, BLOCK_K, False)
                kept = word >= drop_below.to(tl.uint32)
                used = tl.where(kept, weights * kept_gain, 0.0)
                to_weights = tl.where(kept, to_weights * kept_gain, 0.0)
            to_value_sum = tl.dot(tl.trans(g), used.to(g.dtype), to_value_sum, input_precision=PRECISION)
            if PADDING == PLAINLY:
                visible = visible & (row_padding == 0)[:, None]  # to the KL
            to_scores, to_parameters = score_gradient(
                raw, scale, weights, to_weights, row_delta[:, None], mean_lse[:, None], to_mean_lse[:, None],
                parameter[None, :], kl_gradient, precision, visible, NOISE, KL, SCORES, MASKED,
            )  # (block_q, block_k) each  # fmt: skip
            if KL != NO_KL:
                to_parameter_sum += to_parameters
            to_key_sum = tl.dot(tl.trans(q), to_scores.to(q.dtype), to_key_sum, input_precision=PRECISION)
    to_key_sum *= scale
    to = (
        example * to_key_batch_stride + key_head.to(tl.int64) * to_key_head_stride
        + column[None, :] * to_key_row_stride + dim[:, None]
    )  # (width, block_k)  # fmt: skip
    inside = (column < keys)[None, :] & (dim < WIDTH)[:, None]  # (width, block_k)
    if PADDING == NOTHING_ELSE:
        inside = inside & (begin < end)
        to_key_sum += tl.load(to_key + to, mask=inside, other=0.0).to(tl.float32)
        to_value_sum += tl.load(to_value + to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to_key + to, to_key_sum.to(to_key.dtype.element_ty), mask=inside)
    tl.store(to_value + to, to_value_sum.to(to_value.dtype.element_ty), mask=inside)
    if KL != NO_KL:
        factor = -kl_gradient
        if KL == LOGNORMAL:
            factor = factor * precision
        tl.store(
            to_parameter + first_key + column, tl.sum(to_parameter_sum, 0) * factor, mask=column < keys
        )  # (block_k,)


@lru_cache(MOST)
def _ready(
    form: Form, queried: Shape, valued: Shape,
    query: Shape, key: Shape, value: Shape, out: Shape, to_out: Shape,
) -> tuple[Ready, Ready]:  # fmt: skip
    """The launches for shapes of query and value, and strides of query, key, value, out and its gradient."""
    (batch, heads, queries, width), (_, key_heads, keys, _) = queried, valued
    inputs = *form.integers(), *query[:3], *key[:3], *value[:3]
    to_query, to_key = heads_last_strides(queried), heads_last_strides(valued)
    counts = heads, heads // key_heads, queries, keys
    flags = {**form.address(), **form.law(), **form.masks()}
    tiles = form.tiles("queries", width, queries, keys)
    to_queries = Ready(
        attend_to_queries,
        (blocks(queries, tiles.rows), heads, batch),
        (*inputs, *out[:3], *to_out[:3], *to_query[:3], *counts),
        {**flags, "WHOLE": keys % tiles.columns == 0, **form.sizes(width, tiles)},
        tiles.warps,
        tiles.stages,
    )
    tiles = form.tiles("keys", width, queries, keys)
    whole = keys % tiles.columns == 0 and queries % tiles.rows == 0
    to_keys = Ready(
        attend_to_keys,
        (blocks(keys, tiles.columns), key_heads, batch),
        (*inputs, *to_out[:3], *to_key[:3], *counts),
        {**flags, "WHOLE": whole, **form.sizes(width, tiles)},
        tiles.warps,
        tiles.stages,
    )
    return to_queries, to_keys


class Gradients(NamedTuple):
    """The results of the backward pass.

    Attributes:
        query: gradient of the query, of its shape.
        key: of the key.
        value: of the value.
        parameter: of the prior's parameter, float32 (batch, key heads, key), empty without a KL.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    parameter: Tensor


def backward(
    inputs: Inputs,
    masks: Masks,
    noise: Noise,
    divergence: Divergence,
    keyed: Tensor | None,
    out: Tensor,
    rows: Tensor,
    to_out: Tensor,
    to_kl: Tensor | None,
) -> Gradients:
    """Gradients of `attend_forward.forward` without a map.

    Args:
        inputs: as passed to `forward`.
        masks: as passed to `forward`.
        noise: as passed to `forward`.
        divergence: as passed to `forward`.
        keyed: as passed to `forward`.
        out: from `forward`.
        rows: from `forward`.
        to_out: gradient of `out`.
        to_kl: gradient of the KL, float32 (batch,).
    """
    query, key, value = rows_whole(inputs.query), rows_whole(inputs.key), rows_whole(inputs.value)
    to_out, shape, valued = rows_whole(to_out), query.shape, value.shape
    padding = flat.PLAINLY if masks.left else flat.ZEROS
    to_queries, to_keys = _ready(
        Form.of(query.dtype, noise, divergence, masks, padding), shape, valued,
        query.stride(), key.stride(), value.stride(), out.stride(), to_out.stride(),
    )  # fmt: skip
    to_query = heads_last(query, *shape)
    to_key, to_value = heads_last(query, *valued), heads_last(query, *valued)
    batch, key_heads, keys, _ = valued
    to_parameter = query.new_empty((batch, key_heads, keys if divergence.wanted else 0), dtype=torch.float32)
    delta = query.new_empty(shape[:3], dtype=torch.float32)
    shared = rows, given_or(to_kl, query), *read_by_both(query, masks, noise, keyed)
    floats = inputs.scale, *noise.factors(), divergence.precision, divergence.per_cell
    loose = noise.loose()
    to_queries.run((query, key, value, out, to_out, to_query, delta, *shared), floats, loose)
    to_keys.run((query, key, value, to_out, to_key, to_value, to_parameter, delta, *shared), floats, loose)
    return Gradients(to_query, to_key, to_value, to_parameter)


def padding_backward(
    inputs: Inputs,
    masks: Masks,
    noise: Noise,
    out: Tensor,
    rows: Tensor,
    to_out: Tensor,
    to_query: Tensor,
    to_key: Tensor,
    to_value: Tensor,
) -> None:
    """Gradients of `attend_forward.attend_padding`, in addition to those of the pass over a map before it.

    Args:
        inputs: as passed to `attend_padding`.
        masks: as passed to `attend_padding`.
        noise: as passed to `attend_padding`.
        out: from `attend_padding`.
        rows: from `attend_padding`.
        to_out: gradient of `out`.
        to_query: gradient of the query, with heads last in memory; its rows of padded queries are written.
        to_key: gradient of the key, in the same layout; the result is added to it.
        to_value: gradient of the value, in the same layout; the result is added to it.
    """
    query, key, value = rows_whole(inputs.query), rows_whole(inputs.key), rows_whole(inputs.value)
    to_out, plain = rows_whole(to_out), noise._replace(family=flat.NO_NOISE)
    to_queries, to_keys = _ready(
        Form.of(query.dtype, plain, NO_DIVERGENCE, masks, flat.NOTHING_ELSE), query.shape, value.shape,
        query.stride(), key.stride(), value.stride(), out.stride(), to_out.stride(),
    )  # fmt: skip
    delta = query.new_empty(query.shape[:3], dtype=torch.float32)
    shared = rows, query, *read_by_both(query, masks, plain, None)
    floats, loose = (inputs.scale, *plain.factors(), 0.0, 0.0), plain.loose()
    to_queries.run((query, key, value, out, to_out, to_query, delta, *shared), floats, loose)
    to_keys.run((query, key, value, to_out, to_key, to_value, query, delta, *shared), floats, loose)
