"""Gradients of the convolution's weights and bias: sums over strips of rows, which are then added up.

Float32 uses words of columns (`words`), half precision runs (`runs_weights`).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms.evolving.kernels.maps import (
    TYPES,
    WARPS_AT_ONCE,
    Reach,
    strips_of,
)
from overt.mechanisms.evolving.kernels.runs_weights import weights_by_runs
from overt.mechanisms.evolving.kernels.words import windows_of
from overt.mechanisms.flat import Visibility
from overt.mechanisms.kernels.attend import ALIGNED, Shape, precision_of, row_length
from overt.mechanisms.kernels.launch import MOST, Ready, blocks, helper, power_of_two

_COLUMNS = 64  # of a strip
_WORDS = 16  # of a strip, the same number of columns
_CELLS = 32  # cells of a matrix that a program sums


@helper
def _correlate(gradients, tiles, sums, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """One line of taps' gradients, SIZE matrices (heads, heads), with one row's part added."""
    new = ()
    for across in tl.static_range(SIZE):
        total = sums[across]
        for phase in tl.static_range(4):
            total = tl.dot(
                gradients[phase], tl.trans(tiles[phase + across]), total, input_precision=PRECISION
            )
        new = new + (total,)  # type: ignore[assignment]
    return new


@triton.jit
def weights_by_words(
    mixed, gradient, bits, partial,
    heads, queries, keys, row_length, rows, strips, blocks,
    SIZE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ABOVE: tl.constexpr,
    CAUSAL: tl.constexpr, DTYPE: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_WORDS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One strip's part of a line of taps' gradients, and of the bias's, without the factor β, in float32.

    Programs: (examples × strips × blocks of words, lines of taps), the last of a product varying fastest. In
    comments, heads and words are HEADS and BLOCK_WORDS.

    Args other than tensors:
        gradient: of the evolved map.
        bits: where the ReLU passed values, (batch, heads, query, words).
        partial: float32 (strips of all examples, lines, SIZE + 1, HEADS, HEADS), the bias's after the taps'.
        row_length: columns of a map's rows in memory.
        rows: of a strip.
        strips: of rows.
        blocks: of words.
        SIZE: of the window, which reaches LEFT, RIGHT and ABOVE.
        EXACT: whether rows have no padding.
        HEADS: `heads`, rounded up to a power of two.
    """
    program = tl.program_id(0)
    line = tl.program_id(1)
    first_word = program % blocks * BLOCK_WORDS
    first_row = program // blocks % strips * rows
    example = (program // (blocks * strips)).to(tl.int64)
    words = (keys + 3) // 4
    head = tl.arange(0, HEADS)[:, None]  # (heads, 1)
    word = first_word + tl.arange(0, BLOCK_WORDS)[None, :]  # (1, words)
    live = (head < heads) & (word < words)  # (heads, words)
    head_rows = head.to(tl.int64) * queries  # (heads, 1)
    source = mixed + example * heads * queries * row_length + head_rows * row_length
    back = gradient + example * heads * queries * row_length + head_rows * row_length
    bits += example * heads * queries * (row_length // 4) + head_rows * (row_length // 4)
    end = tl.minimum(first_row + rows, queries)
    if CAUSAL:  # rows above are hidden in these columns
        first_row = tl.maximum(first_row, 4 * first_word - LEFT - (keys - queries))
    zero = tl.full((HEADS, HEADS), 0, tl.float32)
    sums = (zero,) * SIZE
    ones = tl.full((BLOCK_WORDS, HEADS), 1.0, DTYPE)
    bias_sum = zero  # (heads, heads), all columns the same
    for row in range(first_row, end):
        _, tiles = windows_of(
            source, row, live & (row < queries), word, words, word, keys, row_length,
            LEFT, RIGHT, DTYPE, True, False, EXACT,
        )  # (heads, words) each  # fmt: skip
        to_row = row + ABOVE - line  # the row whose gradient is multiplied with this row in the line
        counts = live & (to_row >= 0) & (to_row < queries)
        codes = tl.load(bits + to_row * (row_length // 4) + word, mask=counts, other=0).to(tl.int32) << 8
        _, gradients = windows_of(
            back, to_row, counts, word, words, codes, keys, row_length, 0, 0, DTYPE, True, True, EXACT
        )  # (heads, words) each
        sums = _correlate(gradients, tiles, sums, SIZE, PRECISION)
        for phase in tl.static_range(4):
            bias_sum = tl.dot(gradients[phase], ones, bias_sum, input_precision=PRECISION)
    to_head, from_head = tl.arange(0, HEADS)[:, None], tl.arange(0, HEADS)[None, :]
    place = (program * tl.num_programs(1) + line).to(tl.int64) * (SIZE + 1)
    to = partial + (place * HEADS + to_head) * HEADS + from_head  # (heads, heads)
    for across in tl.static_range(SIZE):
        tl.store(to + across * HEADS * HEADS, sums[across])
    tl.store(to + SIZE * HEADS * HEADS, bias_sum)


@triton.jit
def add_up(
    partial, numbers, to_weight, to_bias,
    heads, parts, groups, above,
    SIZE: tl.constexpr, LINES: tl.constexpr, HEADS: tl.constexpr, CELLS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """CELLS cells of one tap's matrix of gradients, or of the bias's, over all strips, times β.

    Programs: (taps and the bias, blocks of cells).

    Args other than tensors:
        partial: float32 (parts, groups, LINES · SIZE + 1, HEADS, HEADS).
        numbers: float32 (α, β).
        parts: strips of all examples.
        groups: of lines of taps.
        above: rows that the window reaches up.
        SIZE: of the window.
        LINES: of taps in a group.
        PARTS: number of parts read at once.
    """
    tap = tl.program_id(0)
    cell = tl.program_id(1) * CELLS + tl.arange(0, CELLS)  # (cells,)
    line, across = tap // SIZE, tap % SIZE
    is_bias = tap == SIZE * SIZE
    group = tl.where(is_bias, above if LINES == 1 else 0, line // LINES)
    within = tl.where(is_bias, LINES * SIZE, line % LINES * SIZE + across)
    part = tl.arange(0, PARTS)  # (parts,)
    total = tl.full((CELLS,), 0, tl.float32)
    for start in range(0, parts, PARTS):
        matrix = ((start + part).to(tl.int64) * groups + group) * (LINES * SIZE + 1) + within
        at = partial + matrix[:, None] * (HEADS * HEADS) + cell[None, :]  # (parts, cells)
        total += tl.sum(tl.load(at, mask=(start + part < parts)[:, None], other=0.0), 0)
    total *= tl.load(numbers + 1)
    to_head, from_head = cell // HEADS, cell % HEADS
    real = (to_head < heads) & (from_head < heads)
    to = to_weight + ((to_head * heads + from_head) * SIZE + line) * SIZE + across
    tl.store(to, total.to(to_weight.dtype.element_ty), mask=real & (is_bias == 0))
    tl.store(to_bias + to_head, total.to(to_bias.dtype.element_ty), mask=real & (from_head == 0) & is_bias)


@lru_cache(MOST)
def _ready(
    shape: Shape, dtype: torch.dtype, size: int, reach: Reach, causal: bool, precision: str
) -> tuple[Shape, Ready, Ready]:
    """For the shape of a map, the shape of partial sums and the launches that compute and add them up."""
    batch, heads, queries, keys = shape
    padded_heads, length = power_of_two(heads), row_length(keys)
    left, right, above, _ = reach
    wide = dtype == torch.float32
    lines = size if size <= 3 and not wide else 1  # whose gradients one program computes
    count = blocks(length, _COLUMNS)
    pieces = (padded_heads // 16) ** 2
    rows, strips = strips_of(queries, WARPS_AT_ONCE // (batch * count * pieces))
    parts, groups = batch * count * strips, size // lines
    window = {"SIZE": size, "LEFT": left, "RIGHT": right, "ABOVE": above}
    kind = {"CAUSAL": causal, "DTYPE": TYPES[dtype], "EXACT": keys % ALIGNED == 0, "HEADS": padded_heads}
    integers = heads, queries, keys, length, rows, strips, count
    if wide:
        kind |= {"BLOCK_WORDS": _WORDS, "PRECISION": precision}
        make = Ready(weights_by_words, (parts, groups, 1), integers, {**window, **kind}, pieces)
    else:
        window |= {"LINES": lines}
        make = Ready(weights_by_runs, (parts, groups, pieces), integers, {**window, **kind}, 1, 1)
    add = Ready(
        add_up,
        (size * size + 1, padded_heads * padded_heads // _CELLS, 1),
        (heads, parts, groups, above),
        {
            "SIZE": size,
            "LINES": lines,
            "HEADS": padded_heads,
            "CELLS": _CELLS,
            "PARTS": min(64, power_of_two(parts)),
        },
    )
    return (parts, groups, lines * size + 1, padded_heads, padded_heads), make, add


def convolve_to_weight(
    gradient: Tensor,
    mixed: Tensor,
    bits: Tensor,
    weight: Tensor,
    bias: Tensor,
    reach: Reach,
    numbers: Tensor,
    seen: Visibility,
) -> tuple[Tensor, Tensor]:
    """Gradients of `convolve`'s weight and bias.

    Args:
        gradient: of the evolved map, a padded map, zeros in hidden cells.
        mixed: as passed to `convolve`.
        bits: from `convolve`.
        weight: as passed to `convolve`.
        bias: as passed to `convolve`.
        reach: as passed to `convolve`.
        numbers: as passed to `convolve`.
        seen: as passed to `convolve`.
    """
    shape, make, add = _ready(
        mixed.shape, mixed.dtype, weight.shape[-1], reach, seen.causal, precision_of(mixed.dtype)
    )
    partial = torch.empty(shape, dtype=torch.float32, device=mixed.device)
    make.run((mixed, gradient, bits, partial))
    to_weight, to_bias = weight.new_empty(weight.shape), bias.new_empty(bias.shape)
    add.run((partial, numbers, to_weight, to_bias))
    return to_weight, to_bias
