"""Gradients of the convolution's weights over maps of 2-byte columns, with no data moved between lanes.

Columns are grouped into pairs and runs, as in `runs`; here a run has 8 pairs. For each tap there is a product
(heads × columns)(columns × heads), and a lane has two heads of one run of either operand. Tiles of pairs are
(runs, heads), that is (4, 16).
"""

from __future__ import annotations

import triton
import triton.language as tl

from overt.mechanisms.kernels.launch import helper


@helper
def _pairs(source, row, row_length):
    """The eight pairs of each run in a row, a tile (runs, heads) each."""
    at = source + row * (row_length // 2)
    out = ()
    for half in tl.static_range(2):
        four = tl.load(at[:, :, None] + (4 * half + tl.arange(0, 4))[None, None, :])
        even, odd = tl.split(tl.reshape(four, (four.shape[0], four.shape[1], 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        out = out + (a, b, c, d)  # type: ignore[assignment]
    return out


@helper
def _columns(a, b, c, d, DTYPE: tl.constexpr):
    """Four tiles of pairs as columns (runs, heads, word, pair, column)."""
    four = tl.join(tl.join(a, c), tl.join(b, d))
    low, high = four.to(tl.int16), (four >> 16).to(tl.int16)
    return tl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))


@helper
def _left(a, b, c, d, DTYPE: tl.constexpr):
    """Four tiles of pairs as a first operand (heads, columns)."""
    return tl.reshape(tl.permute(_columns(a, b, c, d, DTYPE), (1, 2, 0, 3, 4)), (16, 32))


@helper
def _right(a, b, c, d, DTYPE: tl.constexpr):
    """Four tiles of pairs as a second operand (columns, heads)."""
    return tl.reshape(tl.permute(_columns(a, b, c, d, DTYPE), (2, 0, 3, 4, 1)), (32, 16))


@helper
def _between(a, b):
    """The second column of one pair and the first of the next."""
    low = (a.to(tl.uint32, bitcast=True) >> 16) | (b.to(tl.uint32, bitcast=True) << 16)
    return low.to(tl.int32, bitcast=True)


@helper
def _passing(pairs, codes):
    """Eight pairs, with zeros where bits are off; each byte of `codes` has those of a word of 4 columns."""
    out = ()
    for p in tl.static_range(8):
        two = (codes >> (8 * (p // 2) + 2 * (p % 2))) & 3
        out = out + (pairs[p] & (((two * 0x8001) & 0x10001) * 0xFFFF),)  # type: ignore[assignment]
    return out


@helper
def _within(pairs, column, keys, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT pairs, starting at the run's pair FIRST, with zeros for columns from `keys` on."""
    out = ()
    for p in tl.static_range(COUNT):
        at = column + 2 * (FIRST + p)
        out = out + (pairs[p] & tl.where(at + 1 < keys, -1, tl.where(at < keys, 0xFFFF, 0)),)  # type: ignore[assignment]
    return out


@helper
def _codes_at(bits, row, queries, inside, row_length):
    """Bits of a row's runs, zero outside the map."""
    return tl.load(bits + row * (row_length // 16), mask=inside & (row >= 0) & (row < queries), other=0)


@helper
def _row_in(row, queries):
    """The row itself if the map has it, otherwise the nearest row."""
    return tl.minimum(tl.maximum(row, 0), queries - 1)


@helper
def _sides(source, row, run, column, keys, row_length, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    """BEFORE pairs before and AFTER pairs after each run of a row, a tile (runs, heads) each."""
    before = ()
    after = ()
    at = source + row * (row_length // 2)
    for p in tl.static_range(BEFORE):
        before = before + (tl.load(at + (p - BEFORE), mask=run > 0, other=0),)  # type: ignore[assignment]
    for p in tl.static_range(AFTER):
        after = after + (tl.load(at + (8 + p), mask=column + 16 < keys, other=0),)  # type: ignore[assignment]
    return before + after


@helper
def _lefts(pairs, DTYPE: tl.constexpr):
    """A row as two first operands."""
    return (
        _left(pairs[0], pairs[1], pairs[2], pairs[3], DTYPE),
        _left(pairs[4], pairs[5], pairs[6], pairs[7], DTYPE),
    )


@helper
def _rights(pairs, FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """Columns FIRST … FIRST + 15 of runs, counted from the first in `pairs`, as two second operands."""
    p: tl.constexpr = FIRST // 2
    a, b, c, d = pairs[p], pairs[p + 1], pairs[p + 2], pairs[p + 3]
    e, f, g, h = pairs[p + 4], pairs[p + 5], pairs[p + 6], pairs[p + 7]
    if FIRST % 2 == 1:
        a, b, c, d = _between(a, b), _between(b, c), _between(c, d), _between(d, e)
        e, f, g, h = _between(e, f), _between(f, g), _between(g, h), _between(h, pairs[p + 8])
    return (_right(a, b, c, d, DTYPE), _right(e, f, g, h, DTYPE))


@helper
def _windows(pairs, SIZE: tl.constexpr, START: tl.constexpr, DTYPE: tl.constexpr):
    """The second operands of a line's taps, two for each, starting at column START of `pairs`."""
    out = ()
    for across in tl.static_range(SIZE):
        out = out + _rights(pairs, across + START, DTYPE)
    return out


@helper
def _products(lefts, windows, sums, SIZE: tl.constexpr):
    """One line of taps' gradients, SIZE matrices (16, 16), with one row's part added."""
    for half in tl.static_range(2):
        new = ()
        for across in tl.static_range(SIZE):
            new = new + (tl.dot(lefts[half], windows[2 * across + half], sums[across]),)  # type: ignore[assignment]
        sums = new
    return sums


@triton.jit
def weights_by_runs(
    mixed, gradient, bits, partial,
    heads, queries, keys, row_length, rows, strips, blocks,
    SIZE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, ABOVE: tl.constexpr, LINES: tl.constexpr,
    CAUSAL: tl.constexpr, DTYPE: tl.constexpr, EXACT: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """One strip's part of LINES lines of taps' gradients, and of the bias's, without the factor β.

    Programs: (examples × strips × blocks of 4 runs, groups of lines, pieces of the matrices): a program has
    16 heads × 16 heads of the HEADS × HEADS.

    Args other than tensors:
        gradient: of the evolved map.
        bits: where the ReLU passed values, a byte for 4 columns.
        partial: float32 (strips of all examples, groups, LINES · SIZE + 1, HEADS, HEADS), the bias's last.
        row_length: columns of a map's rows in memory.
        rows: of a strip.
        strips: of rows.
        blocks: of runs.
        SIZE: of the window, which reaches LEFT, RIGHT and ABOVE.
        LINES: 1, or SIZE if it is at most 3.
        EXACT: whether rows have no padding.
        HEADS: `heads`, rounded up to a power of two.
    """
    BEFORE: tl.constexpr = (LEFT + 1) // 2
    AFTER: tl.constexpr = (RIGHT + 1) // 2
    program = tl.program_id(0)
    line = tl.program_id(1) * LINES
    to_piece, from_piece = tl.program_id(2) // (HEADS // 16), tl.program_id(2) % (HEADS // 16)
    first_run = program % blocks * 4
    first_row = program // blocks % strips * rows
    example = (program // (blocks * strips)).to(tl.int64)
    head = tl.arange(0, 16)[None, :]  # (1, heads)
    to_head = tl.minimum(16 * to_piece + head, heads - 1).to(tl.int64)  # (1, heads)
    from_head = tl.minimum(16 * from_piece + head, heads - 1).to(tl.int64)  # (1, heads)
    wanted_run = first_run + tl.arange(0, 4)[:, None]  # (runs, 1)
    run = tl.minimum(wanted_run, row_length // 16 - 1)  # (runs, 1), runs that exist
    column = 16 * run  # (runs, 1), the first of each
    inside = (16 * to_piece + head < heads) & (wanted_run < row_length // 16)  # (runs, heads)
    source = mixed.to(tl.pointer_type(tl.int32)) + (
        (example * heads + from_head) * queries * (row_length // 2) + run * 8
    )  # (runs, heads)
    back = gradient.to(tl.pointer_type(tl.int32)) + (
        (example * heads + to_head) * queries * (row_length // 2) + run * 8
    )  # (runs, heads)
    bits = (
        bits.to(tl.pointer_type(tl.int32)) + (example * heads + to_head) * queries * (row_length // 16) + run
    )  # (runs, heads)
    real = tl.full((4, 16), 0x0F0F0F0F, tl.int32)  # (runs, heads), the bits of columns that exist
    if not EXACT:
        real = real * 0
        for place in tl.static_range(16):
            real |= tl.where(column + place < keys, 1 << (8 * (place // 4) + place % 4), 0)
    end = tl.minimum(first_row + rows, queries)
    if CAUSAL:  # rows above are hidden in these columns
        first_row = tl.maximum(first_row, 16 * first_run - LEFT - (keys - queries))
    zero = tl.full((16, 16), 0, tl.float32)
    sums0, sums1, sums2 = (zero,) * SIZE, (zero,) * SIZE, (zero,) * SIZE
    bias_sum = tl.full((16, 8), 0, tl.float32)  # all columns the same
    ones = tl.full((32, 8), 1.0, DTYPE)
    if LINES > 1:
        # gradients of the previous two rows, which are multiplied with the next row in the lines below
        row = first_row + ABOVE - 1
        gradient1 = _passing(
            _pairs(back, _row_in(row, queries), row_length),
            _codes_at(bits, row, queries, inside, row_length) & real,
        )
        row = first_row + ABOVE - 2
        gradient2 = _passing(
            _pairs(back, _row_in(row, queries), row_length),
            _codes_at(bits, row, queries, inside, row_length) & real,
        )
    row = first_row + ABOVE - line
    codes = _codes_at(bits, row, queries, inside, row_length)
    raw_gradient = _pairs(back, _row_in(row, queries), row_length)
    row = tl.minimum(first_row, queries - 1)
    here = _pairs(source, row, row_length)
    sides = _sides(source, row, run, column, keys, row_length, BEFORE, AFTER)
    for y in range(first_row, end):
        gradient0 = _passing(raw_gradient, codes & real)
        if EXACT:
            pairs = sides[:BEFORE] + here + sides[BEFORE:]
        else:
            pairs = (
                sides[:BEFORE] + _within(here, column, keys, 0, 8)
                + _within(sides[BEFORE:], column, keys, 8, AFTER)
            )  # fmt: skip
        # prefetch the next row's
        row = y + 1 + ABOVE - line
        codes = _codes_at(bits, row, queries, inside, row_length)
        raw_gradient = _pairs(back, _row_in(row, queries), row_length)
        row = tl.minimum(y + 1, queries - 1)
        here = _pairs(source, row, row_length)
        sides = _sides(source, row, run, column, keys, row_length, BEFORE, AFTER)
        windows = _windows(pairs, SIZE, 2 * BEFORE - LEFT, DTYPE)
        sums0 = _products(_lefts(gradient0, DTYPE), windows, sums0, SIZE)
        if LINES > 1:
            sums1 = _products(_lefts(gradient1, DTYPE), windows, sums1, SIZE)
            sums2 = _products(_lefts(gradient2, DTYPE), windows, sums2, SIZE)
        own = gradient0  # of the row itself
        if LINES > 1:
            if ABOVE == 1:
                own = gradient1
            elif ABOVE == 2:
                own = gradient2
        own = _lefts(own, DTYPE)
        for half in tl.static_range(2):
            bias_sum = tl.dot(own[half], ones, bias_sum)
        if LINES > 1:
            gradient2, gradient1 = gradient1, gradient0
    to_row, to_column = 16 * to_piece + tl.arange(0, 16)[:, None], 16 * from_piece + tl.arange(0, 16)[None, :]
    place = (program * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * (LINES * SIZE + 1)
    to = partial + (place * HEADS + to_row) * HEADS + to_column  # (16, 16)
    for across in tl.static_range(SIZE):
        tl.store(to + across * HEADS * HEADS, sums0[across])
        if LINES > 1:
            tl.store(to + (SIZE + across) * HEADS * HEADS, sums1[across])
            tl.store(to + (2 * SIZE + across) * HEADS * HEADS, sums2[across])
    to_column = tl.arange(0, 8)[None, :]  # only the first column of the bias's matrix is read
    tl.store(
        partial + ((place + LINES * SIZE) * HEADS + to_row) * HEADS + to_column,
        bias_sum, mask=(from_piece == 0) & (to_column == 0),
    )  # fmt: skip
