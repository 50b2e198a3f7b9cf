"""Evolving Attention's convolution over maps of 2-byte columns, with nothing moved between a warp's lanes.

A *pair* is two columns of a row, 4 bytes; a *run* is a few pairs side by side, and a lane has whole runs.
Which column stands where in a product of tensor cores is free: columns are counted across runs, so that what
a lane loads is what its part of the product takes. A shift by a column is then another choice among a lane's
pairs, or a pair made of two halves, and of the neighbouring runs a lane loads the edges only. A program is
one warp. It walks down rows, and loads the next row before it multiplies this one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from overt.mechanisms._launch import helper


@helper
def taps_of(
    weight, heads, line, KS: tl.constexpr, BACKWARD: tl.constexpr, DTYPE: tl.constexpr, HP: tl.constexpr
):
    """One line of taps: KS matrices HP × HP, zero beyond the heads; turned round for the way back."""
    o, i = tl.arange(0, HP)[:, None], tl.arange(0, HP)[None, :]
    there = (o < heads) & (i < heads)
    taps = ()
    for dx in tl.static_range(KS):
        if BACKWARD:
            at = ((i * heads + o) * KS + (KS - 1 - line)) * KS + (KS - 1 - dx)
        else:
            at = ((o * heads + i) * KS + line) * KS + dx
        taps = taps + (tl.load(weight + at, mask=there, other=0.0).to(DTYPE),)  # type: ignore[assignment]
    return taps


# gradient of the weight -----------------------------------------------------------------------------------
#
# A product (heads × columns)(columns × heads). Of either operand a lane has two heads of one run, of 8 pairs.


@helper
def _pairs(source, y, NP):
    """Eight tiles of pairs, row y."""
    at = source + y * (NP // 2)
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
    """Four tiles of pairs as an operand (heads × columns)."""
    return tl.reshape(tl.permute(_columns(a, b, c, d, DTYPE), (1, 2, 0, 3, 4)), (16, 32))


@helper
def _right(a, b, c, d, DTYPE: tl.constexpr):
    """The same turned round: columns × heads."""
    return tl.reshape(tl.permute(_columns(a, b, c, d, DTYPE), (2, 0, 3, 4, 1)), (32, 16))


@helper
def _between(a, b):
    """The second column of one pair and the first of the next."""
    low = (a.to(tl.uint32, bitcast=True) >> 16) | (b.to(tl.uint32, bitcast=True) << 16)
    return low.to(tl.int32, bitcast=True)


@helper
def _let(pairs, codes):
    """Pairs where bits let them through. A word of bits has the four of a word of columns in each byte."""
    out = ()
    for i in tl.static_range(8):
        two = (codes >> (8 * (i // 2) + 2 * (i % 2))) & 3
        out = out + (pairs[i] & (((two * 0x8001) & 0x10001) * 0xFFFF),)  # type: ignore[assignment]
    return out


@helper
def _within(pairs, column, N, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Pairs with zeros for columns from N on."""
    out = ()
    for i in tl.static_range(COUNT):
        at = column + 2 * (FIRST + i)
        out = out + (pairs[i] & tl.where(at + 1 < N, -1, tl.where(at < N, 0xFFFF, 0)),)  # type: ignore[assignment]
    return out


@helper
def _codes_at(bits, y, M, inside, NP):
    return tl.load(bits + y * (NP // 16), mask=inside & (y >= 0) & (y < M), other=0)


@helper
def _row_in(y, M):
    return tl.minimum(tl.maximum(y, 0), M - 1)


@helper
def _sides(source, y, run, column, N, NP, BEFORE: tl.constexpr, AFTER: tl.constexpr):
    before = ()
    after = ()
    at = source + y * (NP // 2)
    for i in tl.static_range(BEFORE):
        before = before + (tl.load(at + (i - BEFORE), mask=run > 0, other=0),)  # type: ignore[assignment]
    for i in tl.static_range(AFTER):
        after = after + (tl.load(at + (8 + i), mask=column + 16 < N, other=0),)  # type: ignore[assignment]
    return before + after


@helper
def _lefts(g, DTYPE: tl.constexpr):
    """A row as two operands."""
    return (_left(g[0], g[1], g[2], g[3], DTYPE), _left(g[4], g[5], g[6], g[7], DTYPE))


@helper
def _rights(m, FIRST: tl.constexpr, DTYPE: tl.constexpr):
    """Columns FIRST … FIRST + 15 of runs, counted from the first in `m`, as two operands."""
    p: tl.constexpr = FIRST // 2
    a, b, c, d = m[p], m[p + 1], m[p + 2], m[p + 3]
    e, f, g, h = m[p + 4], m[p + 5], m[p + 6], m[p + 7]
    if FIRST % 2 == 1:
        a, b, c, d = _between(a, b), _between(b, c), _between(c, d), _between(d, e)
        e, f, g, h = _between(e, f), _between(f, g), _between(g, h), _between(h, m[p + 8])
    return (_right(a, b, c, d, DTYPE), _right(e, f, g, h, DTYPE))


@helper
def _windows(m, KS: tl.constexpr, START: tl.constexpr, DTYPE: tl.constexpr):
    out = ()
    for dx in tl.static_range(KS):
        out = out + _rights(m, dx + START, DTYPE)
    return out


@helper
def _products(g, windows, sums, KS: tl.constexpr):
    """One line of taps' gradients with one row's part added."""
    for half in tl.static_range(2):
        new = ()
        for dx in tl.static_range(KS):
            new = new + (tl.dot(g[half], windows[2 * dx + half], sums[dx]),)  # type: ignore[assignment]
        sums = new
    return sums


@triton.jit
def to_weight(
    center, gradient, bits, partial,
    heads, M, N, NP, rows, strips, blocks,
    KS: tl.constexpr, L: tl.constexpr, R: tl.constexpr, ABOVE: tl.constexpr, LINES: tl.constexpr,
    CAUSAL: tl.constexpr, DTYPE: tl.constexpr, EXACT: tl.constexpr,
    HP: tl.constexpr,
):  # fmt: skip
    """One strip's part of LINES lines of taps' gradients, and of the bias's, without the factor β.

    A program has 16 heads × 16 heads of the HP × HP.
    """
    BEFORE: tl.constexpr = (L + 1) // 2
    AFTER: tl.constexpr = (R + 1) // 2
    pid = tl.program_id(0)
    line = tl.program_id(1) * LINES
    ob, ib = tl.program_id(2) // (HP // 16), tl.program_id(2) % (HP // 16)
    r0 = pid % blocks * 4
    y0 = pid // blocks % strips * rows
    batch = (pid // (blocks * strips)).to(tl.int64)
    h = tl.arange(0, 16)[None, :]
    o = tl.minimum(16 * ob + h, heads - 1).to(tl.int64)
    i = tl.minimum(16 * ib + h, heads - 1).to(tl.int64)
    lane = r0 + tl.arange(0, 4)[:, None]
    run = tl.minimum(lane, NP // 16 - 1)
    column = 16 * run
    inside = (16 * ob + h < heads) & (lane < NP // 16)
    source = center.to(tl.pointer_type(tl.int32)) + ((batch * heads + i) * M * (NP // 2) + run * 8)
    back = gradient.to(tl.pointer_type(tl.int32)) + ((batch * heads + o) * M * (NP // 2) + run * 8)
    bits = bits.to(tl.pointer_type(tl.int32)) + (batch * heads + o) * M * (NP // 16) + run
    real = tl.full((4, 16), 0x0F0F0F0F, tl.int32)
    if not EXACT:
        real = real * 0
        for c in tl.static_range(16):
            real |= tl.where(column + c < N, 1 << (8 * (c // 4) + c % 4), 0)
    end = tl.minimum(y0 + rows, M)
    if CAUSAL:  # rows above are hidden in these columns
        y0 = tl.maximum(y0, 16 * r0 - L - (N - M))
    zero = tl.full((16, 16), 0, tl.float32)
    s0, s1, s2 = (zero,) * KS, (zero,) * KS, (zero,) * KS
    constant = tl.full((16, 8), 0, tl.float32)
    ones = tl.full((32, 8), 1.0, DTYPE)
    if LINES > 1:
        y = y0 + ABOVE - 1
        g1 = _let(_pairs(back, _row_in(y, M), NP), _codes_at(bits, y, M, inside, NP) & real)
        y = y0 + ABOVE - 2
        g2 = _let(_pairs(back, _row_in(y, M), NP), _codes_at(bits, y, M, inside, NP) & real)
    y = y0 + ABOVE - line
    code = _codes_at(bits, y, M, inside, NP)
    raw = _pairs(back, _row_in(y, M), NP)
    row = tl.minimum(y0, M - 1)
    here = _pairs(source, row, NP)
    sides = _sides(source, row, run, column, N, NP, BEFORE, AFTER)
    for y in range(y0, end):
        g0 = _let(raw, code & real)
        if EXACT:
            m = sides[:BEFORE] + here + sides[BEFORE:]
        else:
            m = sides[:BEFORE] + _within(here, column, N, 0, 8) + _within(sides[BEFORE:], column, N, 8, AFTER)
        # the next row's, ahead of time
        z = y + 1 + ABOVE - line
        code = _codes_at(bits, z, M, inside, NP)
        raw = _pairs(back, _row_in(z, M), NP)
        row = tl.minimum(y + 1, M - 1)
        here = _pairs(source, row, NP)
        sides = _sides(source, row, run, column, N, NP, BEFORE, AFTER)
        windows = _windows(m, KS, 2 * BEFORE - L, DTYPE)
        s0 = _products(_lefts(g0, DTYPE), windows, s0, KS)
        if LINES > 1:
            s1 = _products(_lefts(g1, DTYPE), windows, s1, KS)
            s2 = _products(_lefts(g2, DTYPE), windows, s2, KS)
        own = g0
        if LINES > 1:
            if ABOVE == 1:
                own = g1
            elif ABOVE == 2:
                own = g2
        own = _lefts(own, DTYPE)
        for j in tl.static_range(2):
            constant = tl.dot(own[j], ones, constant)
        if LINES > 1:
            g2, g1 = g1, g0
    a, b = 16 * ob + tl.arange(0, 16)[:, None], 16 * ib + tl.arange(0, 16)[None, :]
    place = (pid * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * (LINES * KS + 1)
    to = partial + (place * HP + a) * HP + b
    for dx in tl.static_range(KS):
        tl.store(to + dx * HP * HP, s0[dx])
        if LINES > 1:
            tl.store(to + (KS + dx) * HP * HP, s1[dx])
            tl.store(to + (2 * KS + dx) * HP * HP, s2[dx])
    b = tl.arange(0, 8)[None, :]  # of the bias's only the first column is read
    tl.store(partial + ((place + LINES * KS) * HP + a) * HP + b, constant, mask=(ib == 0) & (b == 0))


# convolution ----------------------------------------------------------------------------------------------
#
# A product (heads × heads)(heads × runs) for each column of a run. Of its second operand a lane has four
# heads of one run, of its result two heads of two runs, and rows are loaded and stored like that.


@helper
def _run_of(at, inside, P: tl.constexpr):
    """P tiles of pairs side by side, from a tile of addresses."""
    e = tl.arange(0, P)
    if len(at.shape) == 3:
        at_each = at[:, :, :, None] + e[None, None, None, :]
        all = tl.load(at_each, mask=inside[:, :, :, None], other=0)
    else:
        at_each = at[:, :, :, :, None] + e[None, None, None, None, :]
        all = tl.load(at_each, mask=inside[:, :, :, :, None], other=0)
    if P == 2:
        a, b = tl.split(all)
        out = (a, b)
    else:
        if len(at.shape) == 3:
            all = tl.reshape(all, (at.shape[0], at.shape[1], at.shape[2], 2, 2))
        else:
            all = tl.reshape(all, (at.shape[0], at.shape[1], at.shape[2], at.shape[3], 2, 2))
        even, odd = tl.split(all)
        a, c = tl.split(even)
        b, d = tl.split(odd)
        out = (a, b, c, d)  # type: ignore[assignment]
    return out


@helper
def _low(pair, DTYPE: tl.constexpr):
    return pair.to(tl.int16).to(DTYPE, bitcast=True)


@helper
def _high(pair, DTYPE: tl.constexpr):
    return (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True)


@helper
def _second(pair, HIGH: tl.constexpr, DTYPE: tl.constexpr, RUNS: tl.constexpr):
    """One column of a tile of pairs (4, runs, 4) as the second operand (16 heads × runs)."""
    if HIGH:
        column = _high(pair, DTYPE)
    else:
        column = _low(pair, DTYPE)
    column = tl.reshape(column, (4, RUNS, 2, 2))
    return tl.reshape(tl.permute(column, (2, 0, 3, 1)), (16, RUNS))


@helper
def _passing(pair, two):
    """A pair where its two bits let it through."""
    return pair & ((((two & 3) * 0x8001) & 0x10001) * 0xFFFF)


@helper
def _fetch(
    source, bits, y, M, run, runs, NP,
    P: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Row y as it lies in memory: pairs before, of and after runs.

    And backwards, in a byte each, the bits of the words before, at and after.
    """
    there = (y >= 0) & (y < M)
    at = source + y * (NP // 2)
    inside = there & (run < runs)
    before = run * 0
    after = run * 0
    if L > 0:
        before = tl.load(at - 1, mask=inside & (run > 0), other=0)
    if R > 0:
        after = tl.load(at + P, mask=there & (run + 1 < runs), other=0)
    codes = (run * 0).to(tl.uint32)
    if BACKWARD:
        first = run * (P // 2) + 3  # the byte before, in words from the one before the row on
        at_codes = bits + y * (NP // 16) + (first // 4 - 1)
        low = tl.load(at_codes, mask=inside & (first >= 4), other=0)
        high = tl.load(at_codes + 1, mask=there & (first // 4 < NP // 16), other=0)
        low, high = low.to(tl.uint32, bitcast=True), high.to(tl.uint32, bitcast=True)
        shift = (first % 4 * 8).to(tl.uint32)
        codes = (low >> shift) | ((high << 1) << (31 - shift))
    return before, _run_of(at, inside, P), after, codes.to(tl.int32, bitcast=True)


@helper
def _seconds(
    before, here, after, codes, column, N,
    P: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BACKWARD: tl.constexpr, EXACT: tl.constexpr,
    DTYPE: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Columns −L … 2 P + R − 1 of runs, each an operand."""
    out = ()
    if L > 0:
        pair = before
        if BACKWARD:
            pair = _passing(pair, codes >> 2)
        if L > 1:
            out = out + (_second(pair, False, DTYPE, RUNS),)  # type: ignore[assignment]
        out = out + (_second(pair, True, DTYPE, RUNS),)  # type: ignore[assignment]
    for p in tl.static_range(P):
        pair = here[p]
        if BACKWARD:
            pair = _passing(pair, codes >> (8 + 8 * (p // 2) + 2 * (p % 2)))
        if not EXACT:
            at = column + 2 * p
            pair &= tl.where(at + 1 < N, -1, tl.where(at < N, 0xFFFF, 0))
        out = out + (_second(pair, False, DTYPE, RUNS), _second(pair, True, DTYPE, RUNS))  # type: ignore[assignment]
    if R > 0:
        pair = after
        if BACKWARD:
            pair = _passing(pair, codes >> (8 + 4 * P))
        if not EXACT:
            at = column + 2 * P
            pair &= tl.where(at + 1 < N, -1, tl.where(at < N, 0xFFFF, 0))
        out = out + (_second(pair, False, DTYPE, RUNS),)  # type: ignore[assignment]
        if R > 1:
            out = out + (_second(pair, True, DTYPE, RUNS),)  # type: ignore[assignment]
    return out


@helper
def _add_taps(taps, columns, sums, KS: tl.constexpr, COUNT: tl.constexpr):
    """Sums of a run's columns with one line of taps' products added."""
    for dx in tl.static_range(KS):
        new = ()
        for c in tl.static_range(COUNT):  # one after the other, these do not wait for each other
            new = new + (tl.dot(taps[dx], columns[c + dx], sums[c]),)  # type: ignore[assignment]
        sums = new
    return sums


@helper
def _lay(tile, RUNS: tl.constexpr):
    """A tile (16 heads × runs) as (run pairs, heads, two halves of heads, two runs): how lanes have it."""
    return tl.permute(tl.reshape(tile, (2, 8, RUNS // 2, 2)), (2, 1, 0, 3))


@helper
def _store_run(at, c, inside, P: tl.constexpr):
    """Tiles of columns side by side."""
    if P == 2:
        all = tl.join(tl.join(c[0], c[2]), tl.join(c[1], c[3]))
    else:
        even = tl.join(tl.join(c[0], c[4]), tl.join(c[2], c[6]))
        all = tl.join(even, tl.join(tl.join(c[1], c[5]), tl.join(c[3], c[7])))
    all = tl.reshape(all, (at.shape[0], at.shape[1], at.shape[2], at.shape[3], 2 * P))
    e = tl.arange(0, 2 * P)[None, None, None, None, :]
    tl.store(at[:, :, :, :, None] + e, all, mask=inside[:, :, :, :, None])


@triton.jit
def convolution(
    center, weight, bias, numbers, keys, queries, out, bits,
    heads, M, N, NP, rows, strips, blocks,
    KS: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BELOW: tl.constexpr, BACKWARD: tl.constexpr,
    HAS_KEYS: tl.constexpr, HAS_QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
    DTYPE: tl.constexpr, EXACT: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """A strip of rows and 8 runs of P pairs, all heads: `convolve`, or the same backwards.

    Backwards `center` is the gradient, `bits` is read, and the window is turned round.
    """
    RUNS: tl.constexpr = 8
    COUNT: tl.constexpr = 2 * P
    ABOVE: tl.constexpr = KS - 1 - BELOW
    PLAIN: tl.constexpr = EXACT and not HAS_KEYS and not HAS_QUERIES and not CAUSAL
    pid = tl.program_id(0)
    r0 = pid % blocks * RUNS
    y0 = pid // blocks % strips * rows
    batch = (pid // (blocks * strips)).to(tl.int64)
    runs = NP // COUNT
    beta = tl.load(numbers + 1)
    rest = 1.0 - beta
    center = center.to(tl.pointer_type(tl.int32)) + batch * heads * M * (NP // 2)
    out += batch * heads * M * NP
    codes_in = bits.to(tl.pointer_type(tl.int32)) + batch * heads * M * (NP // 16)
    if P == 4:
        bits = bits.to(tl.pointer_type(tl.int16))
    bits += batch * heads * M * runs
    # how rows are loaded: (lanes along heads, lanes along runs, four heads of each lane)
    q, s = tl.arange(0, 4)[:, None, None], tl.arange(0, 4)[None, None, :]
    i = tl.minimum(s // 2 * 8 + q * 2 + s % 2, heads - 1)  # weights of those beyond are zero
    run = r0 + tl.arange(0, RUNS)[None, :, None] + 0 * i
    column = COUNT * run
    source = center + (i.to(tl.int64) * M * (NP // 2) + run * P)
    codes_in += i.to(tl.int64) * M * (NP // 16)
    # how they are stored: (lanes along runs, lanes along heads, two heads, two runs)
    o = tl.arange(0, 8)[None, :, None, None] + 8 * tl.arange(0, 2)[None, None, :, None]
    own = r0 + 2 * tl.arange(0, RUNS // 2)[:, None, None, None] + tl.arange(0, 2)[None, None, None, :]
    o = o + 0 * own
    own = own + 0 * o
    put = (o < heads) & (own < runs)
    to = o.to(tl.int64) * M * (NP // 2) + own * P
    bits_to = bits + (o.to(tl.int64) * M * runs + own)
    n = COUNT * own
    visible = n * 0
    if not PLAIN:
        for c in tl.static_range(COUNT):
            see = n + c < N
            if HAS_KEYS:
                see = tl.load(keys + batch * N + n + c, mask=see, other=0) != 0
            visible |= see.to(tl.int32) << c
    if BACKWARD:
        hidden = 0.0
        offset = tl.full((RUNS // 2, 8, 2, 2), 0, tl.float32)
    else:
        hidden = -float("inf")
        offset = tl.load(bias + o, mask=o < heads, other=0.0).to(tl.float32)
    rows = tl.minimum(rows, M - y0)
    steps, blank = rows + KS - 1, 0
    if CAUSAL:  # a strip that is hidden as a whole is only filled
        gone = COUNT * r0 > y0 + rows - 1 + N - M
        steps, blank = tl.where(gone, 0, steps), tl.where(gone, rows, 0)
    w0 = taps_of(weight, heads, 0, KS, BACKWARD, DTYPE, 16)
    if KS > 1:
        w1 = taps_of(weight, heads, 1, KS, BACKWARD, DTYPE, 16)
        w2 = taps_of(weight, heads, 2, KS, BACKWARD, DTYPE, 16)
    nothing = (tl.full((16, RUNS), 0, tl.float32),) * COUNT
    s1, s2 = nothing, nothing
    before, here, after, codes = _fetch(source, codes_in, y0 - ABOVE, M, run, runs, NP, P, L, R, BACKWARD)
    for step in range(steps):
        y = y0 - ABOVE + step
        columns = _seconds(before, here, after, codes, column, N, P, L, R, BACKWARD, EXACT, DTYPE, RUNS)
        # the next row's, ahead of time
        before, here, after, codes = _fetch(source, codes_in, y + 1, M, run, runs, NP, P, L, R, BACKWARD)
        ready = put & (step >= KS - 1)
        y -= BELOW
        # loaded again as it is stored: it is still in the cache
        x = _run_of(center + to + y * (NP // 2), ready, P)
        if KS == 1:
            done = _add_taps(w0, columns, nothing, KS, COUNT)
        else:
            done = _add_taps(w2, columns, s2, KS, COUNT)
            s2 = _add_taps(w1, columns, s1, KS, COUNT)
            s1 = _add_taps(w0, columns, nothing, KS, COUNT)
        shown = visible
        if HAS_QUERIES:
            here_too = tl.load(queries + batch * M + y, mask=step >= KS - 1, other=0) != 0
            shown = tl.where(here_too, shown, 0)
        codes_out = visible * 0
        made = ()
        for p in tl.static_range(P):
            for half in tl.static_range(2):
                a = _lay(done[2 * p + half], RUNS)
                if half == 0:
                    kept = _low(x[p], DTYPE).to(tl.float32)
                else:
                    kept = _high(x[p], DTYPE).to(tl.float32)
                if BACKWARD:
                    a = beta * a
                else:
                    a = a + offset
                    codes_out |= (a > 0).to(tl.int32) << (8 * (p // 2) + 2 * (p % 2) + half)
                    a = beta * tl.maximum(a, 0.0)
                a += rest * kept
                if not PLAIN:
                    see = ((shown >> (2 * p + half)) & 1) != 0
                    if CAUSAL:
                        see &= n + (2 * p + half) <= y + N - M
                    a = tl.where(see, a, hidden)
                made = made + (a.to(DTYPE),)  # type: ignore[assignment]
        _store_run(out + to * 2 + y * NP, made, ready, P)
        if not BACKWARD:
            tl.store(bits_to + y * runs, codes_out.to(bits.dtype.element_ty), mask=ready)
    if CAUSAL:
        void = (tl.full((RUNS // 2, 8, 2, 2), hidden, DTYPE),) * COUNT
        for step in range(blank):
            _store_run(out + to * 2 + (y0 + step) * NP, void, put, P)
            if not BACKWARD:
                tl.store(bits_to + (y0 + step) * runs, (visible * 0).to(bits.dtype.element_ty), mask=put)
