"""One query row of every head of an example, from products to outputs, in one launch: cached decoding.

A program has all heads of an example, since the convolution mixes them. It first writes the mixed row to
memory, where the windows of neighbouring columns read it, and moves the kept rows up; then it convolves,
takes the softmax as it goes along the keys, and averages values.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms import flat
from overt.mechanisms.flat import Visibility
from overt.mechanisms.kernels.attend import Shape, bytes_of, given_or, heads_last
from overt.mechanisms.kernels.launch import MOST, Ready, helper, power_of_two
from overt.mechanisms.kernels.noise import LOG2E
from overt.mechanisms.kernels.tiles import HIDDEN, ZEROS

_TILE = 4096  # cells (heads, columns, width) that a program multiplies at once, if heads and width allow
_UNIT = 16  # strides are multiples of this, or of the largest power of two that divides all of them
LOOSE = [
    "keys", "key_batch_stride", "key_head_stride", "key_row_stride",
    "value_batch_stride", "value_head_stride", "value_row_stride",
    "bias_batch_stride", "bias_head_stride", "bias_column_stride",
    "above", "above_columns", "above_batch_stride", "above_head_stride", "above_row_stride", "rows",
]  # fmt: skip


@helper
def _read(
    source, example, head, column, dim, batch_stride, head_stride, row_stride, heads, group, keys, width,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Keys or values of all heads for some columns, float32 (heads, block_k, width); strides are in units."""
    at = (
        source + example * batch_stride * UNIT + (head // group)[:, None, None] * (head_stride * UNIT)
        + column[None, :, None] * (row_stride * UNIT) + dim[None, None, :]
    )  # fmt: skip
    inside = (head < heads)[:, None, None] & (column < keys)[None, :, None] & (dim < width)[None, None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@helper
def _scores(
    q, key, bias, example, head, column, dim, batch_stride, head_stride, row_stride,
    bias_batch_stride, bias_head_stride, bias_column_stride, heads, group, keys, width,
    UNIT: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Current logits of all heads for some columns, (heads, block_k)."""
    k = _read(
        key, example, head, column, dim, batch_stride, head_stride, row_stride,
        heads, group, keys, width, UNIT,
    )  # (heads, block_k, width)  # fmt: skip
    products = tl.sum(q[:, None, :] * k, 2)  # (heads, block_k)
    if BIASED:
        products += tl.load(
            bias + example * bias_batch_stride + head[:, None] * bias_head_stride
            + column[None, :] * bias_column_stride,
            mask=(head < heads)[:, None] & (column < keys)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
    return products


@helper
def _mix(
    products, previous, numbers, example, head, column, heads, keys,
    HAS_PREVIOUS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """`naive.mix` without a mask, (heads, block_k)."""
    if HAS_PREVIOUS:
        alpha = tl.load(numbers)
        inside = (head < heads)[:, None] & (column < keys)[None, :]
        past = tl.load(
            previous + (example * heads + head)[:, None] * keys + column[None, :], mask=inside, other=0.0
        ).to(tl.float32)  # (heads, block_k)
        carried = past != HIDDEN
        past = tl.where(carried, past, 0.0)
        if ADD:
            products = products + alpha * past
        else:
            products = tl.where(carried, alpha * past + (1.0 - alpha) * products, products)
    return products


@triton.jit(do_not_specialize=LOOSE)
def evolve_row(
    query, key, value, bias, previous, kept, order, weight, shift, key_visible, query_real, numbers,
    evolved, keep, out, scale,
    query_batch_stride, query_head_stride, heads, group, width,
    keys, key_batch_stride, key_head_stride, key_row_stride,
    value_batch_stride, value_head_stride, value_row_stride,
    bias_batch_stride, bias_head_stride, bias_column_stride,
    above, above_columns, above_batch_stride, above_head_stride, above_row_stride, rows,
    HEADS: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_WIDTH: tl.constexpr, UNIT: tl.constexpr,
    SIZE: tl.constexpr, LEFT: tl.constexpr, HAS_PREVIOUS: tl.constexpr, ADD: tl.constexpr,
    ORDERED: tl.constexpr, KEY_MASK: tl.constexpr, QUERY_MASK: tl.constexpr,
    PADDING: tl.constexpr, UNIFORM: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """The output, the evolved row and the kept rows of one example, all heads.

    Programs: examples.

    Args other than tensors and strides:
        bias: added to the products, where BIASED; broadcasts by strides of 0.
        previous: the previous layer's evolved row, (batch, heads, 1, key), where HAS_PREVIOUS.
        kept: the rows above this one, (batch, heads, above, above columns); missing columns count as zero.
        order: whose kept rows are each example's, (batch,), where ORDERED.
        weight: of the convolution, (heads, heads, SIZE, SIZE).
        shift: its bias, (heads,).
        numbers: float32 (α, β).
        evolved: to fill, (batch, heads, 1, key), −inf in hidden cells.
        keep: rows to keep, to fill, (batch, heads, rows, key); its last row is the mixed one.
        out: to fill, (batch, heads, 1, width), heads next to width in memory.
        scale: of the products.
        group: heads that share a key head.
        above: number of kept rows.
        rows: number of rows to keep.
        HEADS: `heads`, rounded up to a power of two.
        UNIT: what strides of keys and values are counted in.
        SIZE: of the convolution's windows; 0 without a convolution.
        LEFT: columns of a window to the left of its own.
        ADD: whether the previous row is added rather than averaged with the products.
        PADDING: whether a padded query gets zeros or attends plainly.
        UNIFORM: whether a query to which no key is shown averages all values.
    """
    example = tl.program_id(0).to(tl.int64)
    head, dim = tl.arange(0, HEADS), tl.arange(0, BLOCK_WIDTH)  # (heads,), (width,)
    there = head < heads  # (heads,)
    query_at = query + example * query_batch_stride + head[:, None] * query_head_stride + dim[None, :]
    width_inside = there[:, None] & (dim < width)[None, :]  # (heads, width)
    q = tl.load(query_at, mask=width_inside, other=0.0).to(tl.float32) * scale  # (heads, width)
    real = 1
    if QUERY_MASK:
        real = tl.load(query_real + example).to(tl.int32)
    source = example
    if ORDERED:
        source = tl.load(order + example).to(tl.int64)
    kept_at = kept + source * above_batch_stride  # the example's
    keep_at = keep + example * heads * rows * keys  # the example's
    mixed_at = keep_at + (rows - 1) * keys  # of the first head
    if SIZE > 0:
        for start in range(0, keys, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)  # (block_k,)
            seen = (column < keys) & (real != 0)  # (block_k,)
            if KEY_MASK:
                seen &= tl.load(key_visible + example * keys + column, mask=column < keys, other=0) != 0
            scores = _scores(
                q, key, bias, example, head, column, dim, key_batch_stride, key_head_stride, key_row_stride,
                bias_batch_stride, bias_head_stride, bias_column_stride, heads, group, keys, width,
                UNIT, BIASED,
            )  # (heads, block_k)  # fmt: skip
            mixed = _mix(
                scores, previous, numbers, example, head, column, heads, keys, HAS_PREVIOUS, ADD
            )  # (heads, block_k)
            mixed = tl.where(seen[None, :], mixed, 0.0).to(keep.dtype.element_ty)
            inside = there[:, None] & (column < keys)[None, :]  # (heads, block_k)
            tl.store(mixed_at + head[:, None] * (rows * keys) + column[None, :], mixed, mask=inside)
            for row in range(rows - 1):  # those of the kept rows that are still needed
                cells = tl.load(
                    kept_at + head[:, None] * above_head_stride
                    + (above - rows + 1 + row) * above_row_stride + column[None, :],
                    mask=inside & (column < above_columns)[None, :], other=0.0,
                )  # (heads, block_k)  # fmt: skip
                tl.store(
                    keep_at + head[:, None] * (rows * keys) + row * keys + column[None, :],
                    cells.to(keep.dtype.element_ty), mask=inside,
                )  # fmt: skip
        tl.debug_barrier()  # what other threads stored is read below
    shown_keys = 1
    if UNIFORM and KEY_MASK:
        shown_keys = 0
        for start in range(0, keys, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)  # (block_k,)
            shown_keys += tl.sum(
                (tl.load(key_visible + example * keys + column, mask=column < keys, other=0) != 0).to(
                    tl.int32
                )
            )
    most = tl.full((HEADS,), HIDDEN, tl.float32)  # (heads,)
    total = tl.full((HEADS,), 0.0, tl.float32)  # (heads,)
    mean = tl.full((HEADS, BLOCK_WIDTH), 0.0, tl.float32)  # (heads, width)
    for start in range(0, keys, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)  # (block_k,)
        inside = there[:, None] & (column < keys)[None, :]  # (heads, block_k)
        shown = column < keys  # (block_k,)
        if KEY_MASK:
            shown &= tl.load(key_visible + example * keys + column, mask=column < keys, other=0) != 0
        if SIZE > 0:
            beta = tl.load(numbers + 1)
            cells = tl.load(
                mixed_at + head[:, None] * (rows * keys) + column[None, :], mask=inside, other=0.0
            ).to(tl.float32)  # (heads, block_k)
            base = tl.load(shift + head, mask=there, other=0.0).to(keep.dtype.element_ty)  # (heads,)
            image = tl.full((HEADS, BLOCK_K), 0.0, tl.float32) + base.to(tl.float32)[:, None]
            for other in range(heads):
                taps_at = weight + (head * heads + other) * (SIZE * SIZE)  # (heads,)
                for across in tl.static_range(SIZE):
                    there_column = column + (across - LEFT)  # (block_k,)
                    for up in tl.static_range(SIZE):
                        if up == 0:
                            line = tl.load(
                                mixed_at + other * (rows * keys) + there_column,
                                mask=(there_column >= 0) & (there_column < keys), other=0.0,
                            )  # (block_k,)  # fmt: skip
                        else:
                            line = tl.load(
                                kept_at + other * above_head_stride + (above - up) * above_row_stride
                                + there_column,
                                mask=(there_column >= 0) & (there_column < above_columns) & (up <= above),
                                other=0.0,
                            )  # (block_k,)  # fmt: skip
                        tap = tl.load(taps_at + (SIZE - 1 - up) * SIZE + across, mask=there, other=0.0)
                        tap = tap.to(keep.dtype.element_ty).to(tl.float32)  # (heads,)
                        image += tap[:, None] * line.to(tl.float32)[None, :]
            logits = beta * tl.where(image < 0.0, 0.0, image) + (1.0 - beta) * cells
        else:
            scores = _scores(
                q, key, bias, example, head, column, dim, key_batch_stride, key_head_stride, key_row_stride,
                bias_batch_stride, bias_head_stride, bias_column_stride, heads, group, keys, width,
                UNIT, BIASED,
            )  # (heads, block_k)  # fmt: skip
            logits = _mix(
                scores, previous, numbers, example, head, column, heads, keys, HAS_PREVIOUS, ADD
            )  # (heads, block_k)
        left = tl.where((shown & (real != 0))[None, :], logits, HIDDEN)  # (heads, block_k)
        tl.store(
            evolved + (example * heads + head)[:, None] * keys + column[None, :],
            left.to(evolved.dtype.element_ty), mask=inside,
        )  # fmt: skip
        if QUERY_MASK:
            if PADDING == ZEROS:
                shown &= real != 0
            elif real == 0:
                logits = _scores(
                    q, key, bias, example, head, column, dim,
                    key_batch_stride, key_head_stride, key_row_stride,
                    bias_batch_stride, bias_head_stride, bias_column_stride, heads, group, keys, width,
                    UNIT, BIASED,
                )  # (heads, block_k)  # fmt: skip
        logits = tl.where(shown[None, :], logits, HIDDEN)
        if UNIFORM and KEY_MASK:
            if shown_keys == 0:
                logits = tl.where(inside, 0.0, HIDDEN)
        highest = tl.maximum(most, tl.max(logits, 1))  # (heads,)
        level = tl.where(highest == HIDDEN, 0.0, highest)  # (heads,)
        weights = tl.exp2((logits - level[:, None]) * LOG2E)  # (heads, block_k)
        fade = tl.exp2((most - level) * LOG2E)  # (heads,)
        most = highest
        total = total * fade + tl.sum(weights, 1)
        v = _read(
            value, example, head, column, dim, value_batch_stride, value_head_stride, value_row_stride,
            heads, group, keys, width, UNIT,
        )  # (heads, block_k, width)  # fmt: skip
        mean = mean * fade[:, None] + tl.sum(weights[:, :, None] * v, 1)
    mean = mean / tl.where(total == 0.0, 1.0, total)[:, None]  # zeros where no key is shown
    out_at = out + (example * heads + head)[:, None] * width + dim[None, :]
    tl.store(out_at, mean.to(out.dtype.element_ty), mask=width_inside)


@lru_cache(MOST)
def _ready(
    queried: Shape, query: Shape, key_heads: int, unit: int, size: int, left: int,
    has_previous: bool, add: bool, ordered: bool, key_mask: bool, query_mask: bool,
    padding: int, uniform: bool, biased: bool,
) -> Ready:  # fmt: skip
    """The launch for the shape and the strides of the query; keys and kept rows grow from call to call."""
    batch, heads, _, width = queried
    all_heads, block_width = max(2, 1 << (heads - 1).bit_length()), power_of_two(width)
    block_k = max(16, min(64, _TILE // (all_heads * block_width)))
    return Ready(
        evolve_row,
        (batch, 1, 1),
        (query[0], query[1], heads, heads // key_heads, width),
        {
            "HEADS": all_heads,
            "BLOCK_K": block_k,
            "BLOCK_WIDTH": block_width,
            "UNIT": unit,
            "SIZE": size,
            "LEFT": left,
            "HAS_PREVIOUS": has_previous,
            "ADD": add,
            "ORDERED": ordered,
            "KEY_MASK": key_mask,
            "QUERY_MASK": query_mask,
            "PADDING": padding,
            "UNIFORM": uniform,
            "BIASED": biased,
        },
        4 if all_heads * block_k * block_width <= _TILE else 8,
    )


def evolve_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    bias: Tensor | None,
    previous: Tensor | None,
    kept: Tensor | None,
    order: Tensor | None,
    convolution: tuple[Tensor, Tensor] | None,
    left: int,
    seen: Visibility,
    numbers: Tensor,
    add: bool,
    plainly: bool,
    uniform: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """One row of `naive.evolve` and of the attention with it, for every example.

    Args:
        query: (batch, heads, 1, width), last stride 1.
        key: (batch, key heads, key, width), last stride 1.
        value: like `key`.
        scale: factor of the products.
        bias: added to them, (batch or 1, heads or 1, 1, key); None without one.
        previous: the previous layer's evolved row, (batch, heads, 1, key), contiguous; None starts a chain.
        kept: rows of the mixed map above this one, (examples, heads, ≤ k − 1, ≤ key), last stride 1; None
            where there are none.
        order: (batch,), whose kept rows are each example's; None where each has its own.
        convolution: weight (heads, heads, k, k) and bias (heads,), contiguous; None without one.
        left: columns of the convolution's window to the left of its own.
        seen: which keys are visible and which queries are real; a row sees all keys so far.
        numbers: float32 (α, β) on the device.
        add: RealFormer's sum.
        plainly: whether padded queries attend plainly; otherwise they get zeros.
        uniform: whether a query to which no key is shown averages all values; otherwise it gets zeros.

    Returns:
        Output (batch, heads, 1, width), heads next to width in memory; evolved row (batch, heads, 1, key);
        and the mixed row below the kept rows that the next call needs, (batch, heads, ≤ k − 1, key), without
        a convolution empty. With k = 1 nothing needs the mixed row, which is returned all the same.
    """
    batch, heads, _, width = query.shape
    _, key_heads, keys, _ = key.shape
    size = 0 if convolution is None else convolution[0].shape[-1]
    above = 0 if kept is None else kept.shape[2]
    rows = 0 if convolution is None else max(1, min(above + 1, size - 1))
    evolved = torch.empty((batch, heads, 1, keys), dtype=query.dtype, device=query.device)
    keep = torch.empty((batch, heads, rows, keys), dtype=query.dtype, device=query.device)
    out = heads_last(query, batch, heads, 1, width)
    strides = *key.stride()[:3], *value.stride()[:3]
    together = _UNIT
    for stride in strides:
        together |= stride
    unit = together & -together
    key_visible, query_real = seen.key_visible, seen.query_real
    ready = _ready(
        query.shape, query.stride(), key_heads, unit, size, left, previous is not None, add,
        order is not None and kept is not None, key_visible is not None, query_real is not None,
        flat.PLAINLY if plainly else flat.ZEROS, uniform, bias is not None,
    )  # fmt: skip
    weight, shift = (numbers, numbers) if convolution is None else convolution
    biases = (0, 0, 0)
    if bias is not None:
        biases = (
            bias.stride(0) if bias.shape[0] > 1 else 0, bias.stride(1) if bias.shape[1] > 1 else 0,
            bias.stride(3),
        )  # fmt: skip
    above_strides = (0, 0, 0) if kept is None else kept.stride()[:3]
    ready.run(
        (
            query, key, value, given_or(bias, query), given_or(previous, query), given_or(kept, query),
            given_or(order, query), weight, shift, bytes_of(key_visible, query),
            bytes_of(query_real, query), numbers, evolved, keep, out,
        ),
        (scale,),
        (keys, *[stride // unit for stride in strides], *biases,
         above, 0 if kept is None else kept.shape[3], *above_strides, rows),
    )  # fmt: skip
    return out, evolved, keep
