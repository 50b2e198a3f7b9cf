"""The convolution of a mixed map over all heads, and the gradient of that map.

Both are the same loop: the gradient is a convolution of the evolved map's gradient with the flipped window. A
program walks down rows: each row is loaded once and multiplied into the sums of all the output rows whose
windows contain it. `words` defines how rows are divided; in half precision `runs` is faster, for up to 16
heads and windows of up to 3.
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
    mask_bytes,
    mask_constants,
    padded,
    strips_of,
    which_masks,
)
from overt.mechanisms.evolving.kernels.runs import RUNS, convolve_runs
from overt.mechanisms.evolving.kernels.taps import taps_of
from overt.mechanisms.evolving.kernels.words import (
    PHASES,
    as_words,
    codes_of,
    columns_of,
    store_words,
    windows_of,
)
from overt.mechanisms.flat import Visibility
from overt.mechanisms.kernels.attend import ALIGNED, Shape, precision_of, row_length
from overt.mechanisms.kernels.launch import MOST, Ready, blocks, helper, power_of_two

_PAIRS = 4  # of a run
_ENOUGH = 400  # programs of several warps that keep a GPU busy


def convolvable(heads: int, kernel_size: int, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot compute a convolution; None if they can."""
    if kernel_size not in (1, 3, 5):
        return f"the kernels convolve with kernel_size 1, 3 or 5, got {kernel_size}"
    if dtype not in TYPES:
        return f"the kernels convolve maps of float32, float16 or bfloat16, got {dtype}"
    # float32 takes three products where others take one; with more heads its sums do not fit in registers
    most = 32 if dtype != torch.float32 or kernel_size == 1 else 16
    if heads > most:
        return (
            f"the kernels convolve up to {most} heads in {dtype} with kernel_size {kernel_size}, got {heads}"
        )
    return None


@helper
def _add_taps(taps, tiles, sums, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Sums of four phases, (heads, words) each, with one line of taps' products added."""
    a, b, c, d = sums
    for across in tl.static_range(SIZE):
        a = tl.dot(taps[across], tiles[across], a, input_precision=PRECISION)
        b = tl.dot(taps[across], tiles[across + 1], b, input_precision=PRECISION)
        c = tl.dot(taps[across], tiles[across + 2], c, input_precision=PRECISION)
        d = tl.dot(taps[across], tiles[across + 3], d, input_precision=PRECISION)
    return (a, b, c, d)


@helper
def _zeros(HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """Four tiles (HEIGHT, WIDTH) of zeros."""
    a, b = tl.full((HEIGHT, WIDTH), 0, DTYPE), tl.full((HEIGHT, WIDTH), 0, DTYPE)
    c, d = tl.full((HEIGHT, WIDTH), 0, DTYPE), tl.full((HEIGHT, WIDTH), 0, DTYPE)
    return (a, b, c, d)


@triton.jit
def convolve_words(
    source_map, weight, bias, numbers, key_visible, query_real, out, bits,
    heads, queries, keys, row_length, strips, blocks,
    SIZE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BELOW: tl.constexpr, BACKWARD: tl.constexpr,
    KEY_MASK: tl.constexpr, QUERY_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    DTYPE: tl.constexpr, WIDE: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr, BLOCK_WORDS: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A strip of ROWS rows and BLOCK_WORDS words, all heads: `convolve`, or the same backwards.

    Programs: examples × strips × blocks of words, the last varying fastest. In comments, heads and words are
    HEADS and BLOCK_WORDS.

    Args other than tensors:
        source_map: the mixed map; backwards, the evolved map's gradient.
        weight: (heads, heads, SIZE, SIZE).
        bias: (heads,); backwards unused.
        numbers: float32 (α, β).
        bits: where the ReLU passed values, (batch, heads, query, words); backwards read.
        row_length: columns of a map's rows in memory.
        strips: of rows.
        blocks: of words.
        SIZE: of the window.
        LEFT, RIGHT, BELOW: how far it reaches; backwards, flipped.
        WIDE: whether cells have 4 bytes.
        EXACT: whether rows have no padding.
        HEADS: `heads`, rounded up to a power of two.
        PRECISION: of float32 products.
    """
    ABOVE: tl.constexpr = SIZE - 1 - BELOW
    program = tl.program_id(0)
    first_word = program % blocks * BLOCK_WORDS
    first_row = program // blocks % strips * ROWS
    example = (program // (blocks * strips)).to(tl.int64)
    row_words = row_length // 4
    words = (keys + 3) // 4
    head = tl.arange(0, HEADS)[:, None]  # (heads, 1)
    word = first_word + tl.arange(0, BLOCK_WORDS)[None, :]  # (1, words)
    to_head, from_head = tl.arange(0, HEADS)[:, None], tl.arange(0, HEADS)[None, :]
    real = head < heads  # (heads, 1)
    beta = tl.load(numbers + 1)
    rest = 1.0 - beta
    # Words are numbered consecutively, or threads would be distributed along heads, far apart.
    step_down = row_length if WIDE else row_words  # from row to row, in units of one load
    head_rows = head.to(tl.int64) * queries  # (heads, 1)
    source = as_words(source_map, WIDE) + example * heads * queries * step_down + head_rows * step_down
    out = as_words(out, WIDE)
    out += example * heads * queries * step_down
    out += head_rows * step_down + (word * 4 if WIDE else word)  # (heads, words)
    bits += example * heads * queries * row_words + head_rows * row_words
    inside = real & (word < row_words)  # (heads, words)
    column = 4 * word  # (1, words), the first of each word
    see0, see1, see2, see3 = column < keys, column + 1 < keys, column + 2 < keys, column + 3 < keys
    if KEY_MASK:
        visible_at = key_visible + example * keys + column
        see0 = tl.load(visible_at, mask=see0, other=0) != 0
        see1 = tl.load(visible_at + 1, mask=see1, other=0) != 0
        see2 = tl.load(visible_at + 2, mask=see2, other=0) != 0
        see3 = tl.load(visible_at + 3, mask=see3, other=0) != 0
    if BACKWARD:
        offset = tl.full((HEADS, 1), 0, tl.float32)
        hidden = 0.0
    else:
        offset = tl.load(bias + head, mask=real, other=0.0).to(tl.float32)  # (heads, 1)
        hidden = -float("inf")
    rows = tl.minimum(ROWS, queries - first_row)
    steps, blank = rows + SIZE - 1, 0
    if CAUSAL:  # an entirely hidden strip is only filled
        gone = 4 * first_word > first_row + rows - 1 + keys - queries
        steps, blank = tl.where(gone, 0, steps), tl.where(gone, rows, 0)
    line0 = taps_of(weight, heads, 0, SIZE, BACKWARD, DTYPE, HEADS)
    if SIZE > 1:
        line1 = taps_of(weight, heads, 1, SIZE, BACKWARD, DTYPE, HEADS)
        line2 = taps_of(weight, heads, 2, SIZE, BACKWARD, DTYPE, HEADS)
    if SIZE > 3:
        line3 = taps_of(weight, heads, 3, SIZE, BACKWARD, DTYPE, HEADS)
        line4 = taps_of(weight, heads, 4, SIZE, BACKWARD, DTYPE, HEADS)
    nothing = _zeros(HEADS, BLOCK_WORDS, tl.float32)
    # what the rows so far add to the unfinished output rows, the next to finish last
    sums1, sums2, sums3, sums4 = nothing, nothing, nothing, nothing
    identity = (to_head == from_head).to(DTYPE)  # (heads, heads)
    codes = word
    if BACKWARD:
        codes = codes_of(bits, first_row - ABOVE, inside & (first_row >= ABOVE), word, words, row_words)
    for step in range(steps):
        row = first_row - ABOVE + step
        now, tiles = windows_of(
            source, row, inside & (row >= 0) & (row < queries), word, words, codes, keys, row_length,
            LEFT, RIGHT, DTYPE, WIDE, BACKWARD, EXACT,
        )  # (heads, words) each  # fmt: skip
        if BACKWARD:  # prefetch the next row's
            codes = codes_of(
                bits, row + 1, inside & (row >= -1) & (row + 1 < queries), word, words, row_words
            )
        if SIZE == 1:
            done = _add_taps(line0, tiles, nothing, SIZE, PRECISION)
        elif SIZE == 3:
            done = _add_taps(line2, tiles, sums2, SIZE, PRECISION)
            sums2 = _add_taps(line1, tiles, sums1, SIZE, PRECISION)
            sums1 = _add_taps(line0, tiles, nothing, SIZE, PRECISION)
        else:
            done = _add_taps(line4, tiles, sums4, SIZE, PRECISION)
            sums4 = _add_taps(line3, tiles, sums3, SIZE, PRECISION)
            sums3 = _add_taps(line2, tiles, sums2, SIZE, PRECISION)
            sums2 = _add_taps(line1, tiles, sums1, SIZE, PRECISION)
            sums1 = _add_taps(line0, tiles, nothing, SIZE, PRECISION)
        row -= BELOW  # the output row that is complete now
        ready = inside & (step >= SIZE - 1)
        if BELOW == 0:
            kept = now
        else:  # loaded again: it is still in the cache, and keeping it would cost registers
            kept, _ = columns_of(
                source, row, inside & (step >= SIZE - 1), word, codes, keys, row_length,
                0, 0, 4, DTYPE, WIDE, False, True,
            )  # fmt: skip
        x0, x1, x2, x3 = kept  # the source's own cells, (heads, words) each
        if not WIDE:  # a product with the identity moves the tiles to where the sums are, exactly
            x0, x1 = tl.dot(identity, x0), tl.dot(identity, x1)
            x2, x3 = tl.dot(identity, x2), tl.dot(identity, x3)
        show0, show1, show2, show3 = see0, see1, see2, see3
        if QUERY_MASK:
            here = tl.load(query_real + example * queries + row, mask=step >= SIZE - 1, other=0) != 0
            show0, show1, show2, show3 = show0 & here, show1 & here, show2 & here, show3 & here
        if CAUSAL:
            last = row + keys - queries
            show0, show1 = show0 & (column <= last), show1 & (column + 1 <= last)
            show2, show3 = show2 & (column + 2 <= last), show3 & (column + 3 <= last)
        a, b, c, d = done
        if BACKWARD:
            a, b, c, d = beta * a, beta * b, beta * c, beta * d
        else:
            a, b, c, d = a + offset, b + offset, c + offset, d + offset
            on = (a > 0).to(tl.int32) | ((b > 0).to(tl.int32) << 1)
            on |= ((c > 0).to(tl.int32) << 2) | ((d > 0).to(tl.int32) << 3)
            tl.store(bits + row * row_words + word, on.to(tl.uint8), mask=ready)
            a, b = beta * tl.maximum(a, 0.0), beta * tl.maximum(b, 0.0)
            c, d = beta * tl.maximum(c, 0.0), beta * tl.maximum(d, 0.0)
        a = tl.where(show0, a + rest * x0, hidden).to(DTYPE)
        b = tl.where(show1, b + rest * x1, hidden).to(DTYPE)
        c = tl.where(show2, c + rest * x2, hidden).to(DTYPE)
        d = tl.where(show3, d + rest * x3, hidden).to(DTYPE)
        store_words(out + row * step_down, ready, a, b, c, d, WIDE)
    if CAUSAL:
        void = tl.full((HEADS, BLOCK_WORDS), hidden, DTYPE)
        for step in range(blank):
            store_words(out + (first_row + step) * step_down, inside, void, void, void, void, WIDE)
            if not BACKWARD:
                off = tl.full((HEADS, BLOCK_WORDS), 0, tl.uint8)
                tl.store(bits + (first_row + step) * row_words + word, off, mask=inside)


@lru_cache(MOST)
def _ready(
    shape: Shape, dtype: torch.dtype, size: int, reach: Reach,
    masks: tuple[bool, bool, bool], backward: bool, precision: str,
) -> Ready:  # fmt: skip
    """The launch for the shape of a map."""
    batch, heads, queries, keys = shape
    padded_heads, length = power_of_two(heads), row_length(keys)
    left, right, above, below = reach
    if backward:
        left, right, above, below = right, left, below, above
    wide, exact = dtype == torch.float32, keys % ALIGNED == 0
    window = {"SIZE": size, "LEFT": left, "RIGHT": right, "BELOW": below, "BACKWARD": backward}
    window |= mask_constants(masks)
    if not wide and padded_heads == 16 and size <= 3:
        count = blocks(length, RUNS * 2 * _PAIRS)
        rows, strips = strips_of(queries, WARPS_AT_ONCE // (batch * count))
        return Ready(
            convolve_runs,
            (batch * count * strips, 1, 1),
            (heads, queries, keys, length, rows, strips, count),
            {**window, "DTYPE": TYPES[dtype], "EXACT": exact, "PAIRS": _PAIRS},
            1,
            1,
        )
    block_words = {16: 32, 32: 16 if wide else 64}[padded_heads]
    block_words = min(block_words, power_of_two(blocks(keys, PHASES)))
    count = blocks(length // PHASES, block_words)
    rows = 64
    while rows > 8 and batch * count * blocks(queries, rows) < _ENOUGH:
        rows //= 2
    strips = blocks(queries, rows)
    return Ready(
        convolve_words,
        (batch * count * strips, 1, 1),
        (heads, queries, keys, length, strips, count),
        {
            **window,
            "DTYPE": TYPES[dtype],
            "WIDE": wide,
            "EXACT": exact,
            "HEADS": padded_heads,
            "BLOCK_WORDS": block_words,
            "ROWS": rows,
            "PRECISION": precision,
        },
        4 if padded_heads == 16 else 8,
        1 if wide and padded_heads > 16 else 2,
    )


def _walk(
    source: Tensor, out: Tensor, bits: Tensor, weight: Tensor, bias: Tensor,
    reach: Reach, numbers: Tensor, seen: Visibility, backward: bool,
) -> None:  # fmt: skip
    ready = _ready(
        source.shape, source.dtype, weight.shape[-1], reach,
        which_masks(seen), backward, precision_of(source.dtype),
    )  # fmt: skip
    ready.run((source, weight.contiguous(), bias, numbers, *mask_bytes(seen, bits), out, bits))


def convolve(
    mixed: Tensor,
    weight: Tensor,
    bias: Tensor,
    reach: Reach,
    numbers: Tensor,
    seen: Visibility,
) -> tuple[Tensor, Tensor]:
    """`naive.refine` with a convolution.

    Args:
        mixed: a padded map, zeros in hidden cells.
        weight: (heads, heads, k, k), the first axis for the output head.
        bias: (heads,).
        reach: as returned by `naive.reach`.
        numbers: float32 (α, β) on the device.
        seen: which cells are visible.

    Returns:
        The evolved map, padded, −inf in hidden cells; and for the backward pass where the ReLU passed values:
        (batch, heads, query, row length / 4) bytes, bit p for column 4 j + p, unspecified in hidden cells.
    """
    batch, heads, queries, keys = mixed.shape
    evolved = padded(batch, heads, queries, keys, mixed.dtype, mixed.device)
    words = row_length(keys) // PHASES
    bits = torch.empty(batch, heads, queries, words, dtype=torch.uint8, device=mixed.device)
    if evolved.numel():
        _walk(mixed, evolved, bits, weight, bias.contiguous(), reach, numbers, seen, backward=False)
    return evolved, bits


def convolve_to_mixed(
    gradient: Tensor,
    bits: Tensor,
    weight: Tensor,
    reach: Reach,
    numbers: Tensor,
    seen: Visibility,
    to_mixed: Tensor,
) -> None:
    """Write the gradient of `convolve`'s mixed map, zeros in hidden cells, to the padded map `to_mixed`.

    Args:
        gradient: of the evolved map, a padded map, zeros in hidden cells.
        bits: from `convolve`.
        weight: as passed to `convolve`.
        reach: as passed to `convolve`.
        numbers: as passed to `convolve`.
        seen: as passed to `convolve`.
        to_mixed: where the gradient is written.
    """
    _walk(gradient, to_mixed, bits, weight, weight, reach, numbers, seen, backward=True)
