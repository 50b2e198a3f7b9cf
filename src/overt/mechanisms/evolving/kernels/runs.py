"""The convolution over maps of 2-byte columns, with no data moved between a warp's lanes.

A *pair* is two columns of a row, 4 bytes; a *run* is a few adjacent pairs, and a lane has whole runs. The
order of columns in a product of tensor cores is free: columns are numbered across runs, so that a lane loads
exactly what its part of the product needs. A shift by one column is then a different choice among a lane's
pairs, or a pair made of two halves, and a lane loads only the edges of neighbouring runs. A program is one
warp. It walks down rows, and loads the next row before it multiplies this one.

There is a product (heads × heads)(heads × runs) for each column of a run. A lane has four heads of one run of
its second operand, and two heads of two runs of its result; rows are loaded and stored accordingly: loaded
tiles are (4, runs, 4), lanes along heads × runs × heads of a lane; stored tiles (runs / 2, 8, 2, 2), lanes
along runs × lanes along heads × two heads × two runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overt.mechanisms.evolving.kernels.taps import taps_of
from overt.mechanisms.kernels.launch import helper

RUNS = 8  # adjacent runs in a program
_RUNS = tl.constexpr(RUNS)


@helper
def _run_of(at, inside, PAIRS: tl.constexpr):
    """PAIRS adjacent tiles of pairs, each of the shape of `at`, a tile of addresses of 3 or 4 axes."""
    pair = tl.arange(0, PAIRS)
    if len(at.shape) == 3:
        at_each = at[:, :, :, None] + pair[None, None, None, :]
        every = tl.load(at_each, mask=inside[:, :, :, None], other=0)
    else:
        at_each = at[:, :, :, :, None] + pair[None, None, None, None, :]
        every = tl.load(at_each, mask=inside[:, :, :, :, None], other=0)
    if PAIRS == 2:
        a, b = tl.split(every)
        out = (a, b)
    else:
        if len(at.shape) == 3:
            every = tl.reshape(every, (at.shape[0], at.shape[1], at.shape[2], 2, 2))
        else:
            every = tl.reshape(every, (at.shape[0], at.shape[1], at.shape[2], at.shape[3], 2, 2))
        even, odd = tl.split(every)
        a, c = tl.split(even)
        b, d = tl.split(odd)
        out = (a, b, c, d)  # type: ignore[assignment]
    return out


@helper
def _low(pair, DTYPE: tl.constexpr):
    """The first column of a pair."""
    return pair.to(tl.int16).to(DTYPE, bitcast=True)


@helper
def _high(pair, DTYPE: tl.constexpr):
    """The second column of a pair."""
    return (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@helper
def _operand(pair, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """One column of a tile of pairs (4, runs, 4) as the second operand (16 heads, runs)."""
    if HIGH:
        column = _high(pair, DTYPE)
    else:
        column = _low(pair, DTYPE)
    column = tl.reshape(column, (4, _RUNS, 2, 2))
    return tl.reshape(tl.permute(column, (2, 0, 3, 1)), (16, _RUNS))


@helper
def _passing(pair, bits):
    """A pair, with zeros for columns whose bit, among the lowest two, is off."""
    return pair & ((((bits & 3) * 0x8001) & 0x10001) * 0xFFFF)


@helper
def _fetch(
    source, bits, row, queries, run, runs, row_length,
    PAIRS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """A row as stored in memory: the pair before runs, their pairs, the pair after; (4, runs, 4) each.

    Backwards also the bits of the words (4 columns) before, at and after, in a byte each.

    Args:
        source: addresses of runs in row 0, in pairs.
        bits: addresses of the first bits of each head, in groups of four bytes.
        row: which row; nothing is read outside the map.
        queries: rows of the map.
        run: index of each run in its row.
        runs: number of runs in a row.
        row_length: columns of a row in memory.
        PAIRS: of a run.
        LEFT: number of columns needed before.
        RIGHT: number of columns needed after.
        BACKWARD: whether bits are needed.
    """
    there = (row >= 0) & (row < queries)
    at = source + row * (row_length // 2)
    inside = there & (run < runs)
    before = run * 0
    after = run * 0
    if LEFT > 0:
        before = tl.load(at - 1, mask=inside & (run > 0), other=0)
    if RIGHT > 0:
        after = tl.load(at + PAIRS, mask=there & (run + 1 < runs), other=0)
    codes = (run * 0).to(tl.uint32)
    if BACKWARD:
        first = run * (PAIRS // 2) + 3  # the byte before, counted from four bytes before the row
        at_codes = bits + row * (row_length // 16) + (first // 4 - 1)
        low = tl.load(at_codes, mask=inside & (first >= 4), other=0)
        high = tl.load(at_codes + 1, mask=there & (first // 4 < row_length // 16), other=0)
        low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
        shift = (first % 4 * 8).to(tl.uint32)
        codes = (low >> shift) | ((high << 1) << (31 - shift))
    return before, _run_of(at, inside, PAIRS), after, codes.to(tl.int32, bitcast=True)


@helper
def _operands(
    before, here, after, codes, column, keys,
    PAIRS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BACKWARD: tl.constexpr,
    EXACT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Columns −LEFT … 2 PAIRS + RIGHT − 1 of runs, each an operand (16 heads, runs).

    The first four arguments are the results of `_fetch`; `column` is the first of each run, (4, runs, 4).
    """
    out = ()
    if LEFT > 0:
        pair = before
        if BACKWARD:
            pair = _passing(pair, codes >> 2)
        if LEFT > 1:
            out = out + (_operand(pair, False, DTYPE),)  # type: ignore[assignment]
        out = out + (_operand(pair, True, DTYPE),)  # type: ignore[assignment]
    for p in tl.static_range(PAIRS):
        pair = here[p]
        if BACKWARD:
            pair = _passing(pair, codes >> (8 + 8 * (p // 2) + 2 * (p % 2)))
        if not EXACT:
            at = column + 2 * p
            pair &= tl.where(at + 1 < keys, -1, tl.where(at < keys, 0xFFFF, 0))
        out = out + (_operand(pair, False, DTYPE), _operand(pair, True, DTYPE))  # type: ignore[assignment]
    if RIGHT > 0:
        pair = after
        if BACKWARD:
            pair = _passing(pair, codes >> (8 + 4 * PAIRS))
        if not EXACT:
            at = column + 2 * PAIRS
            pair &= tl.where(at + 1 < keys, -1, tl.where(at < keys, 0xFFFF, 0))
        out = out + (_operand(pair, False, DTYPE),)  # type: ignore[assignment]
        if RIGHT > 1:
            out = out + (_operand(pair, True, DTYPE),)  # type: ignore[assignment]
    return out


@helper
def _add_taps(taps, columns, sums, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of a run's columns, (16 heads, runs) each, with one line of taps' products added."""
    for across in tl.static_range(SIZE):
        new = ()
        for column in tl.static_range(COLUMNS):  # these are independent, so none waits for the one before
            new = new + (tl.dot(taps[across], columns[column + across], sums[column]),)  # type: ignore[assignment]
        sums = new
    return sums


@helper
def _as_stored(tile):
    """A tile (16 heads, runs) as lanes hold it, (runs / 2, 8, 2, 2)."""
    return tl.permute(tl.reshape(tile, (2, 8, _RUNS // 2, 2)), (2, 1, 0, 3))


@helper
def _store_run(at, columns, inside, PAIRS: tl.constexpr):
    """Store adjacent tiles of columns (runs / 2, 8, 2, 2), starting at a tile of addresses of that shape."""
    if PAIRS == 2:
        every = tl.join(tl.join(columns[0], columns[2]), tl.join(columns[1], columns[3]))
    else:
        even = tl.join(tl.join(columns[0], columns[4]), tl.join(columns[2], columns[6]))
        odd = tl.join(tl.join(columns[1], columns[5]), tl.join(columns[3], columns[7]))
        every = tl.join(even, odd)
    every = tl.reshape(every, (at.shape[0], at.shape[1], at.shape[2], at.shape[3], 2 * PAIRS))
    column = tl.arange(0, 2 * PAIRS)[None, None, None, None, :]
    tl.store(at[:, :, :, :, None] + column, every, mask=inside[:, :, :, :, None])


@triton.jit
def convolve_runs(
    source_map, weight, bias, numbers, key_visible, query_real, out, bits,
    heads, queries, keys, row_length, rows, strips, blocks,
    SIZE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, BELOW: tl.constexpr, BACKWARD: tl.constexpr,
    KEY_MASK: tl.constexpr, QUERY_MASK: tl.constexpr, CAUSAL: tl.constexpr,
    DTYPE: tl.constexpr, EXACT: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A strip of rows and 8 runs, up to 16 heads: `convolve`, or the same backwards.

    Programs: examples × strips × blocks of runs, the last varying fastest.

    Args other than tensors:
        source_map: the mixed map; backwards, the evolved map's gradient.
        weight: (heads, heads, SIZE, SIZE).
        bias: (heads,); backwards unused.
        numbers: float32 (α, β).
        bits: where the ReLU passed values, a byte for 4 columns; backwards read.
        row_length: columns of a map's rows in memory.
        rows: of a strip.
        strips: of rows.
        blocks: of runs.
        SIZE: of the window, 1 or 3.
        LEFT, RIGHT, BELOW: how far it reaches; backwards, flipped.
        EXACT: whether rows have no padding.
        PAIRS: of a run, 2 or 4.
    """
    COLUMNS: tl.constexpr = 2 * PAIRS  # of a run
    ABOVE: tl.constexpr = SIZE - 1 - BELOW
    PLAIN: tl.constexpr = EXACT and not KEY_MASK and not QUERY_MASK and not CAUSAL
    program = tl.program_id(0)
    first_run = program % blocks * _RUNS
    first_row = program // blocks % strips * rows
    example = (program // (blocks * strips)).to(tl.int64)
    runs = row_length // COLUMNS
    beta = tl.load(numbers + 1)
    rest = 1.0 - beta
    source_map = source_map.to(tl.pointer_type(tl.int32)) + example * heads * queries * (row_length // 2)
    out += example * heads * queries * row_length
    codes_at = bits.to(tl.pointer_type(tl.int32)) + example * heads * queries * (row_length // 16)
    if PAIRS == 4:
        bits = bits.to(tl.pointer_type(tl.int16))
    bits += example * heads * queries * runs
    # how rows are loaded: (lanes along heads, lanes along runs, four heads of each lane)
    lane, own_head = tl.arange(0, 4)[:, None, None], tl.arange(0, 4)[None, None, :]
    # weights of heads beyond the last are zero
    from_head = tl.minimum(own_head // 2 * 8 + lane * 2 + own_head % 2, heads - 1)  # (4, 1, 4)
    run = first_run + tl.arange(0, _RUNS)[None, :, None] + 0 * from_head  # (4, runs, 4)
    column = COLUMNS * run  # (4, runs, 4)
    source = source_map + (from_head.to(tl.int64) * queries * (row_length // 2) + run * PAIRS)
    codes_at += from_head.to(tl.int64) * queries * (row_length // 16)
    # how they are stored: (lanes along runs, lanes along heads, two heads, two runs)
    to_head = tl.arange(0, 8)[None, :, None, None] + 8 * tl.arange(0, 2)[None, None, :, None]
    to_run = (
        first_run + 2 * tl.arange(0, _RUNS // 2)[:, None, None, None] + tl.arange(0, 2)[None, None, None, :]
    )
    to_head = to_head + 0 * to_run  # (runs / 2, 8, 2, 2)
    to_run = to_run + 0 * to_head  # (runs / 2, 8, 2, 2), like everything below that is stored
    inside = (to_head < heads) & (to_run < runs)
    to = to_head.to(tl.int64) * queries * (row_length // 2) + to_run * PAIRS
    bits_to = bits + (to_head.to(tl.int64) * queries * runs + to_run)
    to_column = COLUMNS * to_run
    visible = to_column * 0  # a bit for each column of a run
    if not PLAIN:
        for place in tl.static_range(COLUMNS):
            see = to_column + place < keys
            if KEY_MASK:
                see = tl.load(key_visible + example * keys + to_column + place, mask=see, other=0) != 0
            visible |= see.to(tl.int32) << place
    if BACKWARD:
        hidden = 0.0
        offset = tl.full((_RUNS // 2, 8, 2, 2), 0, tl.float32)
    else:
        hidden = -float("inf")
        offset = tl.load(bias + to_head, mask=to_head < heads, other=0.0).to(tl.float32)
    rows = tl.minimum(rows, queries - first_row)
    steps, blank = rows + SIZE - 1, 0
    if CAUSAL:  # an entirely hidden strip is only filled
        gone = COLUMNS * first_run > first_row + rows - 1 + keys - queries
        steps, blank = tl.where(gone, 0, steps), tl.where(gone, rows, 0)
    line0 = taps_of(weight, heads, 0, SIZE, BACKWARD, DTYPE, 16)
    if SIZE > 1:
        line1 = taps_of(weight, heads, 1, SIZE, BACKWARD, DTYPE, 16)
        line2 = taps_of(weight, heads, 2, SIZE, BACKWARD, DTYPE, 16)
    nothing = (tl.full((16, _RUNS), 0, tl.float32),) * COLUMNS
    # what the rows so far add to the unfinished output rows, the next to finish last
    sums1, sums2 = nothing, nothing
    before, here, after, codes = _fetch(
        source, codes_at, first_row - ABOVE, queries, run, runs, row_length, PAIRS, LEFT, RIGHT, BACKWARD
    )
    for step in range(steps):
        row = first_row - ABOVE + step
        columns = _operands(
            before, here, after, codes, column, keys, PAIRS, LEFT, RIGHT, BACKWARD, EXACT, DTYPE
        )  # (16 heads, runs) each
        # prefetch the next row's
        before, here, after, codes = _fetch(
            source, codes_at, row + 1, queries, run, runs, row_length, PAIRS, LEFT, RIGHT, BACKWARD
        )
        ready = inside & (step >= SIZE - 1)
        row -= BELOW  # the output row that is complete now
        # loaded again as it is stored: it is still in the cache
        kept = _run_of(source_map + to + row * (row_length // 2), ready, PAIRS)
        if SIZE == 1:
            done = _add_taps(line0, columns, nothing, SIZE, COLUMNS)
        else:
            done = _add_taps(line2, columns, sums2, SIZE, COLUMNS)
            sums2 = _add_taps(line1, columns, sums1, SIZE, COLUMNS)
            sums1 = _add_taps(line0, columns, nothing, SIZE, COLUMNS)
        shown = visible
        if QUERY_MASK:
            real = tl.load(query_real + example * queries + row, mask=step >= SIZE - 1, other=0) != 0
            shown = tl.where(real, shown, 0)
        codes_out = visible * 0
        made = ()
        for p in tl.static_range(PAIRS):
            for half in tl.static_range(2):
                cell = _as_stored(done[2 * p + half])
                if half == 0:
                    own = _low(kept[p], DTYPE).to(tl.float32)
                else:
                    own = _high(kept[p], DTYPE).to(tl.float32)
                if BACKWARD:
                    cell = beta * cell
                else:
                    cell = cell + offset
                    codes_out |= (cell > 0).to(tl.int32) << (8 * (p // 2) + 2 * (p % 2) + half)
                    cell = beta * tl.maximum(cell, 0.0)
                cell += rest * own
                if not PLAIN:
                    see = ((shown >> (2 * p + half)) & 1) != 0
                    if CAUSAL:
                        see &= to_column + (2 * p + half) <= row + keys - queries
                    cell = tl.where(see, cell, hidden)
                made = made + (cell.to(DTYPE),)  # type: ignore[assignment]
        _store_run(out + to * 2 + row * row_length, made, ready, PAIRS)
        if not BACKWARD:
            tl.store(bits_to + row * runs, codes_out.to(bits.dtype.element_ty), mask=ready)
    if CAUSAL:
        void = (tl.full((_RUNS // 2, 8, 2, 2), hidden, DTYPE),) * COLUMNS
        for step in range(blank):
            _store_run(out + to * 2 + (first_row + step) * row_length, void, inside, PAIRS)
            if not BACKWARD:
                off = (visible * 0).to(bits.dtype.element_ty)
                tl.store(bits_to + (first_row + step) * runs, off, mask=inside)
