"""The mixed map, from products of queries and keys and the previous map, and its gradients.

Products are never stored. The gradient of the previous map overwrites that of the mixed map.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms.evolving.kernels.maps import (
    mask_bytes,
    mask_constants,
    padded,
    which_masks,
)
from overt.mechanisms.flat import Visibility
from overt.mechanisms.kernels.attend import Shape, heads_last, heads_last_strides, precision_of, row_length
from overt.mechanisms.kernels.launch import MOST, Ready, blocks, helper, power_of_two


@helper
def _visible(
    key_visible, query_real, example, row, column, queries, keys,
    KEY_MASK: tl.constexpr, QUERY_MASK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Which cells of a tile are visible, (block_q, block_k)."""
    seen = (row < queries)[:, None] & (column < keys)[None, :]
    if KEY_MASK:
        seen &= (tl.load(key_visible + example * keys + column, mask=column < keys, other=0) != 0)[None, :]
    if QUERY_MASK:
        seen &= (tl.load(query_real + example * queries + row, mask=row < queries, other=0) != 0)[:, None]
    if CAUSAL:
        seen &= column[None, :] <= row[:, None] + (keys - queries)
    return seen


@triton.jit
def mix_forward(
    query, key, previous, mixed, key_visible, query_real, numbers, scale, hidden,
    query_batch_stride, query_head_stride, query_row_stride,
    key_batch_stride, key_head_stride, key_row_stride,
    heads, group, queries, keys, row_length, width, tiles_q, tiles_k,
    HAS_PREVIOUS: tl.constexpr, ADD: tl.constexpr,
    KEY_MASK: tl.constexpr, QUERY_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the mixed map of one head of one example.

    Programs: examples × heads × tiles of rows × tiles of columns, the last varying fastest.

    Args other than tensors and strides:
        previous: the previous layer's padded map, −inf in cells that were hidden, where HAS_PREVIOUS.
        mixed: the padded map to fill.
        numbers: float32 (α, β).
        scale: of the products.
        hidden: what hidden cells hold.
        group: heads that share a key head.
        row_length: columns of a padded map's rows.
        tiles_q: tiles of rows.
        tiles_k: tiles of columns.
        ADD: whether the previous map is added rather than averaged with the products.
    """
    program = tl.program_id(0)
    first_row = program // tiles_k % tiles_q * BLOCK_Q
    first_column = program % tiles_k * BLOCK_K
    place = (program // (tiles_k * tiles_q)).to(tl.int64)  # example × head
    example, head = place // heads, place % heads
    row = first_row + tl.arange(0, BLOCK_Q)  # (block_q,)
    column = first_column + tl.arange(0, BLOCK_K)  # (block_k,)
    dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
    row_inside, column_inside = row < queries, column < keys
    if CAUSAL:  # nothing is read for an entirely hidden tile
        live = first_column <= first_row + BLOCK_Q - 1 + keys - queries
        row_inside, column_inside = row_inside & live, column_inside & live
    q = tl.load(
        query + example * query_batch_stride + head * query_head_stride
        + row[:, None] * query_row_stride + dim[None, :],
        mask=row_inside[:, None] & (dim < width)[None, :], other=0.0,
    )  # (block_q, width)  # fmt: skip
    k = tl.load(
        key + example * key_batch_stride + head // group * key_head_stride
        + column[:, None] * key_row_stride + dim[None, :],
        mask=column_inside[:, None] & (dim < width)[None, :], other=0.0,
    )  # (block_k, width)  # fmt: skip
    value = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale  # (block_q, block_k)
    cell = place * queries * row_length + row[:, None] * row_length + column[None, :]  # (block_q, block_k)
    if HAS_PREVIOUS:
        alpha = tl.load(numbers)
        past = tl.load(
            previous + cell, mask=row_inside[:, None] & (column < row_length)[None, :], other=0.0
        ).to(tl.float32)  # (block_q, block_k)
        carried = past != -float("inf")
        past = tl.where(carried, past, 0.0)
        if ADD:
            value += alpha * past
        else:
            value = tl.where(carried, alpha * past + (1.0 - alpha) * value, value)
    seen = _visible(
        key_visible, query_real, example, row, column, queries, keys, KEY_MASK, QUERY_MASK, CAUSAL
    )
    value = tl.where(seen, value, hidden).to(mixed.dtype.element_ty)
    tl.store(mixed + cell, value, mask=(row < queries)[:, None] & (column < row_length)[None, :])


@lru_cache(MOST)
def _mix_ready(
    queried: Shape, keyed: Shape, query: Shape, key: Shape,
    has_previous: bool, add: bool, masks: tuple[bool, bool, bool], precision: str,
) -> Ready:  # fmt: skip
    """The launch for shapes and strides of query and key."""
    (batch, heads, queries, width), (_, key_heads, keys, _) = queried, keyed
    block_q, block_k = 64, 64
    tiles = blocks(queries, block_q), blocks(keys, block_k)
    return Ready(
        mix_forward,
        (tiles[0] * tiles[1] * batch * heads, 1, 1),
        (
            *query[:3], *key[:3], heads, heads // key_heads, queries, keys, row_length(keys), width, *tiles,
        ),
        {
            "HAS_PREVIOUS": has_previous,
            "ADD": add,
            **mask_constants(masks),
            "BLOCK_Q": block_q,
            "BLOCK_K": block_k,
            "BLOCK_WIDTH": power_of_two(width),
            "PRECISION": precision,
        },
    )  # fmt: skip


def mix(
    query: Tensor,
    key: Tensor,
    scale: float,
    previous: Tensor | None,
    seen: Visibility,
    numbers: Tensor,
    add: bool,
    hidden: float,
) -> Tensor:
    """`naive.mix` of the logits scale · query · keyᵀ, which are never stored.

    Args:
        query: (batch, heads, query, width), last stride 1.
        key: (batch, key heads, key, width), last stride 1; heads / key heads query heads share each key head.
        scale: factor of the logits.
        previous: the previous layer's padded map; None starts a chain.
        seen: which cells are visible.
        numbers: float32 (α, β) on the device.
        add: RealFormer's sum.
        hidden: what hidden cells hold.

    Returns:
        A padded map.
    """
    (batch, heads, queries, _), keyed = query.shape, key.shape
    mixed = padded(batch, heads, queries, keyed[2], query.dtype, query.device)
    if not mixed.numel():
        return mixed
    ready = _mix_ready(
        query.shape, keyed, query.stride(), key.stride(),
        previous is not None, add, which_masks(seen), precision_of(query.dtype),
    )  # fmt: skip
    before = mixed if previous is None else previous
    ready.run((query, key, before, mixed, *mask_bytes(seen, mixed), numbers), (scale, hidden))
    return mixed


@helper
def _to_current(gradient, previous, cell, inside, seen, alpha, HAS_PREVIOUS: tl.constexpr, ADD: tl.constexpr):
    """Gradients of one tile's products and of its part of the previous map, (block_q, block_k)."""
    to_mixed = tl.load(gradient + cell, mask=inside, other=0.0).to(tl.float32)
    to_mixed = tl.where(seen, to_mixed, 0.0)
    to_products, to_previous = to_mixed, to_mixed
    if HAS_PREVIOUS:
        carried = tl.load(previous + cell, mask=inside, other=0.0).to(tl.float32) != -float("inf")
        to_previous = tl.where(carried, alpha * to_mixed, 0.0)
        if not ADD:
            to_products = tl.where(carried, (1.0 - alpha) * to_mixed, to_mixed)
    return to_products, to_previous


@triton.jit
def mix_to_key(
    gradient, previous, query, to_key, key_visible, query_real, numbers, scale,
    query_batch_stride, query_head_stride, query_row_stride,
    to_key_batch_stride, to_key_head_stride, to_key_row_stride,
    key_heads, group, queries, keys, row_length, width, tiles_q, tiles_k,
    HAS_PREVIOUS: tl.constexpr, ADD: tl.constexpr,
    KEY_MASK: tl.constexpr, QUERY_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of keys of one key head, over the rows of all heads of its group.

    Programs: examples × key heads × tiles of columns, the last varying fastest. `gradient` is that of the
    mixed map; parameters shared with `mix_forward` have the same meaning.
    """
    program = tl.program_id(0)
    first_column = program % tiles_k * BLOCK_K
    place = (program // tiles_k).to(tl.int64)  # example × key head
    example, key_head = place // key_heads, place % key_heads
    column, dim = first_column + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_WIDTH)  # (block_k,), (width,)
    alpha = tl.load(numbers)
    first_tile = 0
    if CAUSAL:
        first_tile = tl.maximum(first_column - (keys - queries), 0) // BLOCK_Q
    tiles = tl.maximum(tiles_q - first_tile, 0)
    total = tl.full((BLOCK_K, BLOCK_WIDTH), 0, tl.float32)  # (block_k, width)
    for step in range(tiles * group):
        head = key_head * group + step // tiles
        row = (first_tile + step % tiles) * BLOCK_Q + tl.arange(0, BLOCK_Q)  # (block_q,)
        cell = (
            (example * key_heads * group + head) * queries * row_length
            + row[:, None] * row_length + column[None, :]
        )  # (block_q, block_k)  # fmt: skip
        inside = (row < queries)[:, None] & (column < row_length)[None, :]  # (block_q, block_k)
        seen = _visible(
            key_visible, query_real, example, row, column, queries, keys, KEY_MASK, QUERY_MASK, CAUSAL
        )  # (block_q, block_k)
        to_products, _ = _to_current(gradient, previous, cell, inside, seen, alpha, HAS_PREVIOUS, ADD)
        q = tl.load(
            query + example * query_batch_stride + head * query_head_stride
            + row[:, None] * query_row_stride + dim[None, :],
            mask=(row < queries)[:, None] & (dim < width)[None, :], other=0.0,
        )  # (block_q, width)  # fmt: skip
        total = tl.dot(tl.trans(to_products.to(q.dtype)), q, total, input_precision=PRECISION)
    to_key_at = (
        to_key + example * to_key_batch_stride + key_head * to_key_head_stride
        + column[:, None] * to_key_row_stride + dim[None, :]
    )  # (block_k, width)  # fmt: skip
    inside = (column < keys)[:, None] & (dim < width)[None, :]  # (block_k, width)
    tl.store(to_key_at, (total * scale).to(to_key.dtype.element_ty), mask=inside)


@triton.jit
def mix_to_query(
    gradient, previous, key, to_query, key_visible, query_real, numbers, scale,
    key_batch_stride, key_head_stride, key_row_stride,
    to_query_batch_stride, to_query_head_stride, to_query_row_stride,
    heads, group, queries, keys, row_length, width, tiles_q, tiles_k,
    HAS_PREVIOUS: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr,
    KEY_MASK: tl.constexpr, QUERY_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries of one head, and with WRITE of the previous map's rows.

    Programs: examples × heads × tiles of rows, the last varying fastest. `gradient` is that of the mixed map,
    and with WRITE becomes that of the previous map; parameters shared with `mix_forward` have the same
    meaning.
    """
    program = tl.program_id(0)
    first_row = program % tiles_q * BLOCK_Q
    place = (program // tiles_q).to(tl.int64)  # example × head
    example, head = place // heads, place % heads
    row, dim = first_row + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_WIDTH)  # (block_q,), (width,)
    alpha = tl.load(numbers)
    tiles = tiles_k
    if CAUSAL:
        tiles = tl.minimum(
            tiles, (tl.maximum(first_row + BLOCK_Q + keys - queries, 0) + BLOCK_K - 1) // BLOCK_K
        )
    total = tl.full((BLOCK_Q, BLOCK_WIDTH), 0, tl.float32)  # (block_q, width)
    for tile in range(tiles):
        column = tile * BLOCK_K + tl.arange(0, BLOCK_K)  # (block_k,)
        cell = place * queries * row_length + row[:, None] * row_length + column[None, :]
        inside = (row < queries)[:, None] & (column < row_length)[None, :]  # (block_q, block_k)
        seen = _visible(
            key_visible, query_real, example, row, column, queries, keys, KEY_MASK, QUERY_MASK, CAUSAL
        )  # (block_q, block_k)
        to_products, to_previous = _to_current(
            gradient, previous, cell, inside, seen, alpha, HAS_PREVIOUS, ADD
        )  # (block_q, block_k) each
        k = tl.load(
            key + example * key_batch_stride + head // group * key_head_stride
            + column[:, None] * key_row_stride + dim[None, :],
            mask=(column < keys)[:, None] & (dim < width)[None, :], other=0.0,
        )  # (block_k, width)  # fmt: skip
        total = tl.dot(to_products.to(k.dtype), k, total, input_precision=PRECISION)
        if WRITE:  # overwrites the gradient just read, which no other program reads
            tl.store(gradient + cell, to_previous.to(gradient.dtype.element_ty), mask=inside)
    if WRITE and CAUSAL:
        for tile in range(tiles, tiles_k):
            column = tile * BLOCK_K + tl.arange(0, BLOCK_K)  # (block_k,)
            cell = place * queries * row_length + row[:, None] * row_length + column[None, :]
            nothing = tl.full((BLOCK_Q, BLOCK_K), 0, gradient.dtype.element_ty)
            tl.store(gradient + cell, nothing, mask=(row < queries)[:, None] & (column < row_length)[None, :])
    to_query_at = (
        to_query + example * to_query_batch_stride + head * to_query_head_stride
        + row[:, None] * to_query_row_stride + dim[None, :]
    )  # (block_q, width)  # fmt: skip
    inside = (row < queries)[:, None] & (dim < width)[None, :]  # (block_q, width)
    tl.store(to_query_at, (total * scale).to(to_query.dtype.element_ty), mask=inside)


@lru_cache(MOST)
def _mix_backward_ready(
    queried: Shape, keyed: Shape, query: Shape, key: Shape, dtype: torch.dtype,
    has_previous: bool, add: bool, write: bool, masks: tuple[bool, bool, bool], precision: str,
) -> tuple[Ready, Ready]:  # fmt: skip
    """Launches for shapes and strides of query and key."""
    (batch, heads, queries, width), (_, key_heads, keys, _) = queried, keyed
    to_query, to_key = heads_last_strides(queried), heads_last_strides(keyed)
    block_q, block_k, block_width = (32 if dtype == torch.float32 else 64), 64, power_of_two(width)
    tiles = blocks(queries, block_q), blocks(keys, block_k)
    past = {"HAS_PREVIOUS": has_previous, "ADD": add}
    rest = {
        **mask_constants(masks),
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "BLOCK_WIDTH": block_width,
        "PRECISION": precision,
    }
    shape = heads // key_heads, queries, keys, row_length(keys), width, *tiles
    warps = 8 if block_width > 64 else 4
    to_keys = Ready(
        mix_to_key,
        (tiles[1] * batch * key_heads, 1, 1),
        (*query[:3], *to_key[:3], key_heads, *shape),
        {**past, **rest},
        warps,
    )
    to_queries = Ready(
        mix_to_query,
        (tiles[0] * batch * heads, 1, 1),
        (*key[:3], *to_query[:3], heads, *shape),
        {**past, "WRITE": write, **rest},
        warps,
    )
    return to_keys, to_queries


def mix_backward(
    gradient: Tensor,
    previous: Tensor | None,
    query: Tensor,
    key: Tensor,
    scale: float,
    numbers: Tensor,
    seen: Visibility,
    add: bool,
    needs_previous: bool,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of `mix`.

    Args:
        gradient: of `mix`'s result, a padded map. Overwritten with the previous map's gradient.
        previous: as passed to `mix`.
        query: as passed to `mix`.
        key: as passed to `mix`.
        scale: as passed to `mix`.
        numbers: as passed to `mix`.
        seen: as passed to `mix`.
        add: as passed to `mix`.
        needs_previous: whether the previous map's gradient is needed.

    Returns:
        Gradients of the previous map (None unless it is needed and there was one), query and key.
    """
    queried, keyed = query.shape, key.shape
    to_query, to_key = heads_last(query, *queried), heads_last(key, *keyed)
    write = needs_previous and previous is not None
    if not gradient.numel():
        return (gradient if write else None), to_query.zero_(), to_key.zero_()
    to_keys, to_queries = _mix_backward_ready(
        queried, keyed, query.stride(), key.stride(), query.dtype,
        previous is not None, add, write, which_masks(seen), precision_of(query.dtype),
    )  # fmt: skip
    maps = gradient, gradient if previous is None else previous
    rest = *mask_bytes(seen, gradient), numbers
    to_keys.run((*maps, query, to_key, *rest), (scale,))
    to_queries.run((*maps, key, to_query, *rest), (scale,))
    return (gradient if write else None), to_query, to_key
