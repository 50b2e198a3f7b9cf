"""From scores to outputs in one pass: noise, softmax, dropout, values, and the row sums that the KL needs.

Scores are products of queries and keys, formed tile by tile and never stored, or an evolved map, read tile by
tile. Noise is `bayesian.noise`'s, word for word: a counter yields the words of four neighbouring columns, so
a tile's noise is four tiles of a quarter of its columns. Where scores are products, keys are taken in an
order that puts each thread's four words where the tensor cores put its scores, and nothing has to move
between threads. The backward pass draws the noise again.

Exponents are in units of log 2. The KL needs of a row's scores, with φ_ij = Φ_ij − lse_i and the prior's
parameter a_j, only Σ_j a_j·Φ_ij for WEIBULL, Σ_j (Φ_ij − a_j)² and Σ_j (Φ_ij − a_j) for LOGNORMAL, over
visible keys; the rest are sums over keys alone (`bayesian._prior_triton` makes them). So it comes out of the
same pass, whatever made the scores.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from overt.mechanisms._launch import INTERPRETED, MOST, Ready, blocks, power_of_two, signed
from overt.mechanisms.noise._philox_triton import words
from overt.mechanisms.seen import Seen

WEIBULL, LOGNORMAL = 1, 2
_LOOSE = ["low", "high", "step_number", "sample_number", "layer", "kind", "first_example"]
_LOG2E, _LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2.0))
_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_HIDDEN = tl.constexpr(float("-inf"))
_NOWHERE = tl.constexpr(float("inf"))


@triton.jit
def _interleaved(w0, w1, w2, w3, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Column 4c + w is column c of tile w."""
    pairs = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (ROWS, COLUMNS))


@triton.jit
def _side_by_side(w0, w1, w2, w3, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Column w·(COLUMNS/4) + c is column c of tile w."""
    pairs = tl.join(tl.join(w0, w1), tl.join(w2, w3))
    return tl.reshape(tl.permute(pairs, (0, 3, 2, 1)), (ROWS, COLUMNS))


@triton.jit
def _log2(x, FAST: tl.constexpr):
    if FAST:
        return libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


@triton.jit
def _log_noise(word, number, FAMILY: tl.constexpr, FAST: tl.constexpr):
    """What sampling adds to scores in units of log 2, up to a constant that the softmax does not feel."""
    # 1 − u for `noise.open_unit`'s u, exactly: what the complement's bits are in [1, 2), less 1 − 2⁻²⁴.
    rest = ((word >> 9) ^ 0x3FFFFFFF).to(tl.float32, bitcast=True) - _BELOW_ONE
    if FAMILY == 1:
        if FAST:
            # The fast logarithm's absolute error is as large as the smallest units; −log(1 − u) is above u.
            bound = _LOG2E - rest * _LOG2E
            return libdevice.fast_log2f(tl.maximum(-libdevice.fast_log2f(rest), bound)) * number
        else:
            return tl.log2(-tl.log2(rest)) * number
    else:
        unit = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - _BELOW_ONE
        # erfinv(2u − 1) by Giles' two polynomials (2012) in w = −log(4u(1 − u)); `number` has the rest.
        w = -_log2(4.0 * unit * rest, FAST) * _LN2
        near_zero = w - 2.5
        p = 2.81022636e-08 * near_zero + 3.43273939e-07
        p = p * near_zero - 3.5233877e-06
        p = p * near_zero - 4.39150654e-06
        p = p * near_zero + 0.00021858087
        p = p * near_zero - 0.00125372503
        p = p * near_zero - 0.00417768164
        p = p * near_zero + 0.246640727
        p = p * near_zero + 1.50140941
        far = tl.sqrt(tl.maximum(w, 5.0)) - 3.0
        t = -0.000200214257 * far + 0.000100950558
        t = t * far + 0.00134934322
        t = t * far - 0.00367342844
        t = t * far + 0.00573950773
        t = t * far - 0.0076224613
        t = t * far + 0.00943887047
        t = t * far + 1.00167406
        t = t * far + 2.83297682
        return tl.where(w < 5.0, p, t) * (unit - rest) * number


@triton.jit
def _key(step, sample, low, high, step_number, sample_number, layer, kind, example, place,
         STEP: tl.constexpr, SAMPLE: tl.constexpr, SAMPLES: tl.constexpr):  # fmt: skip
    """`noise.stream`: the key of this call's noise."""
    c0 = step_number.to(tl.uint32)
    if STEP:
        c0 = tl.load(step).to(tl.uint32)
    if SAMPLES > 1:
        c2 = (place % SAMPLES).to(tl.uint32)[:, None]
    elif SAMPLE == 2:
        c2 = tl.load(sample + example).to(tl.uint32)
    elif SAMPLE == 1:
        c2 = tl.load(sample).to(tl.uint32)
    else:
        c2 = sample_number.to(tl.uint32)
    k0, k1, _, _ = words(
        low.to(tl.uint32), high.to(tl.uint32), c0, layer.to(tl.uint32), c2, kind.to(tl.uint32)
    )
    return k0, k1


@triton.jit
def _example_number(examples, first, example, EXAMPLES: tl.constexpr):
    if EXAMPLES == 2:
        return tl.load(examples + example).to(tl.uint32)
    elif EXAMPLES == 1:
        return (tl.load(examples) + example).to(tl.uint32)
    else:
        return (first + example).to(tl.uint32)


@triton.jit(do_not_specialize=_LOOSE)
def _forward(
    query, key, value, maps, out, rows, partial,
    key_seen, row_seen, step, sample, examples, keyed, drop_keys,
    scale, number, rescale, seeing, precision, per_cell,
    threshold, first_row, sqb, sqh, sqm, skb, skh, skn, svb, svh, svn, smb, smh, smm, sob, soh, som, sos,
    heads, group, queries, keys,
    low, high, step_number, sample_number, layer, kind, first_example,
    STEP: tl.constexpr, SAMPLE: tl.constexpr, EXAMPLES: tl.constexpr,
    SAMPLES: tl.constexpr, NOISE: tl.constexpr, STATISTICS: tl.constexpr, SCORES: tl.constexpr,
    DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr, KEY_MASK: tl.constexpr, ROW_MASK: tl.constexpr, WHOLE: tl.constexpr,
    MAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block  # the longest first
    head = tl.program_id(1)
    example = tl.program_id(2).to(tl.int64)
    BLOCK_C: tl.constexpr = BLOCK_N // 4
    DRAWS: tl.constexpr = NOISE > 0 or DROPOUT
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = place // SAMPLES
    inside = row < queries
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    key_head = head // group
    if DRAWS and not MAP:
        order = 4 * (n % BLOCK_C) + n // BLOCK_C
    else:
        order = n

    q_at = query + example * sqb + head.to(tl.int64) * sqh + row[:, None] * sqm + d[None, :]
    if not MAP:
        q = tl.load(q_at, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    k_at = key + example * skb + key_head.to(tl.int64) * skh + order[:, None] * skn + d[None, :]
    v_at = value + example * svb + key_head.to(tl.int64) * svh + order[:, None] * svn + d[None, :]
    m_at = maps + example * smb + head.to(tl.int64) * smh + row[:, None].to(tl.int64) * smm + n[None, :]
    of_keys = (example * (heads // group) + key_head) * keys
    if DRAWS:
        c1 = (first_row + row).to(tl.uint32)[:, None]
        c2 = head.to(tl.uint32)
        c3 = _example_number(examples, first_example, example, EXAMPLES)
    if NOISE > 0:
        k0, k1 = _key(step, sample, low, high, step_number, sample_number, layer, kind, example, place,
                      STEP, SAMPLE, SAMPLES)  # fmt: skip
    if DROPOUT:
        d0 = tl.load(drop_keys).to(tl.uint32)
        d1 = tl.load(drop_keys + 1).to(tl.uint32)

    unit = scale * _LOG2E  # of products, or of the map's cells, with scale 1
    top = tl.full((BLOCK_M,), _HIDDEN, tl.float32)
    mass = tl.zeros((BLOCK_M,), tl.float32)
    drawn_mass = tl.zeros((BLOCK_M,), tl.float32)
    t = tl.zeros((BLOCK_M,), tl.float32)
    t1 = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    stop = keys
    if CAUSAL:
        stop = tl.minimum(keys, (block * BLOCK_M + BLOCK_M - 1) // SAMPLES + 1 + keys - queries)
    for start in range(0, stop, BLOCK_N):
        column = start + order
        seen = column < keys
        if MAP:
            raw = tl.load(m_at + start, mask=inside[:, None] & seen[None, :], other=_HIDDEN)
            scores = raw.to(tl.float32)
            visible = scores != _HIDDEN
            plain = tl.where(visible, scores, 0.0)
        else:
            if WHOLE:
                k = tl.load(k_at + start * skn, mask=(d < D)[None, :], other=0.0)
            else:
                k = tl.load(k_at + start * skn, mask=seen[:, None] & (d < D)[None, :], other=0.0)
            plain = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = plain
            if KEY_MASK:
                seen &= tl.load(key_seen + example * keys + column, mask=seen, other=0) != 0
            if not (WHOLE and not KEY_MASK and not CAUSAL):
                visible = seen[None, :]
                if CAUSAL:
                    visible = visible & (column[None, :] <= row[:, None] + (keys - queries))
                scores = tl.where(visible, plain, _HIDDEN)
        if STATISTICS > 0:
            a = tl.load(keyed + of_keys + column, mask=seen, other=0.0)
            if STATISTICS == 1:
                part = a[None, :] * plain
                if CAUSAL and not MAP:
                    part = tl.where(visible, part, 0.0)
                t += tl.sum(part, 1)
            else:
                part = plain * scale - a[None, :]
                if not (WHOLE and not KEY_MASK and not CAUSAL and not MAP):
                    part = tl.where(visible, part, 0.0)
                t += tl.sum(part * part, 1)
                t1 += tl.sum(part, 1)

        higher = tl.maximum(top, tl.max(scores, 1) * unit)
        level = tl.where(higher == _HIDDEN, 0.0, higher)
        shrink = tl.exp2(top - level)
        top = higher
        scores = scores * unit - level[:, None]
        c0 = (start // 4 + c).to(tl.uint32)[None, :]
        if NOISE > 0:
            w0, w1, w2, w3 = words(k0, k1, c0, c1, c2, c3)
            if MAP:
                word = _interleaved(w0, w1, w2, w3, BLOCK_M, BLOCK_N)
            else:
                word = _side_by_side(w0, w1, w2, w3, BLOCK_M, BLOCK_N)
            p = tl.exp2(scores + _log_noise(word, number, NOISE, FAST))
            if STATISTICS > 0:
                mass = mass * shrink + tl.sum(tl.exp2(scores), 1)
        else:
            p = tl.exp2(scores)
        drawn_mass = drawn_mass * shrink + tl.sum(p, 1)
        if DROPOUT:
            w0, w1, w2, w3 = words(d0, d1, c0, c1, c2, c3)
            if MAP:
                word = _interleaved(w0, w1, w2, w3, BLOCK_M, BLOCK_N)
            else:
                word = _side_by_side(w0, w1, w2, w3, BLOCK_M, BLOCK_N)
            p = tl.where(word >= threshold.to(tl.uint32), p, 0.0)
        if WHOLE:
            v = tl.load(v_at + start * svn, mask=(d < D)[None, :], other=0.0)
        else:
            v = tl.load(
                v_at + start * svn, mask=(start + order < keys)[:, None] & (d < D)[None, :], other=0.0
            )
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)

    blind = drawn_mass == 0.0
    drawn_mass = tl.where(blind, 1.0, drawn_mass)
    if ROW_MASK:
        blind = blind | (tl.load(row_seen + example * queries + row, mask=inside, other=0) == 0)
    level = tl.where(top == _HIDDEN, 0.0, top)
    acc = tl.where(blind[:, None], 0.0, acc * (rescale / drawn_mass)[:, None])
    o_at = out + example * sob + head.to(tl.int64) * soh + row[:, None] * som + d[None, :]
    o_at += (place % SAMPLES).to(tl.int64)[:, None] * sos
    tl.store(o_at, acc.to(out.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    at = (example * heads + head) * queries + row
    first = inside & (place % SAMPLES == 0)
    each = tl.num_programs(2).to(tl.int64) * heads * queries
    tl.store(rows + at, tl.where(blind, _NOWHERE, level + tl.log2(drawn_mass)), mask=first)
    if STATISTICS > 0:
        if NOISE == 0:
            mass = drawn_mass
        own = (level + tl.log2(tl.where(mass == 0.0, 1.0, mass))) * _LN2
        # Sums over the keys that a row sees: of what the KL has per key, and of α (or 1).
        maps_of_keys = tl.num_programs(2).to(tl.int64) * (heads // group)
        sums = keyed + 2 * maps_of_keys * keys + maps_of_keys
        if CAUSAL:
            at_sums = of_keys + row + (keys - queries)
            width = maps_of_keys * keys
        else:
            at_sums = example * (heads // group) + key_head + 0 * row
            width = maps_of_keys
        base = tl.load(sums + at_sums, mask=inside, other=0.0)
        count = tl.load(sums + width + at_sums, mask=inside, other=0.0)
        if STATISTICS == 1:
            if SCORES:
                steep = seeing * tl.exp2(own * _LOG2E)
                kl = base - t * scale + steep
            else:
                steep = count
                kl = base - t * scale + count * own + seeing
        else:
            if SCORES:
                steep = 0.0 * own
                kl = base + 0.5 * precision * t
            else:
                steep = precision * (count * own - t1)
                kl = base + 0.5 * precision * (t - 2.0 * own * t1 + count * own * own)
        tl.store(rows + each + at, tl.where(blind, 0.0, own), mask=first)
        tl.store(rows + 2 * each + at, tl.where(blind, 0.0, steep), mask=first)
        kl = tl.where(blind | (inside == 0), 0.0, kl)
        tl.store(partial + (example * heads + head) * tl.num_programs(0) + block, tl.sum(kl) * per_cell)


@triton.jit
def _score_gradient(
    plain, scale, weights, to_weights, delta, lse, steep, a, g, precision, visible,
    NOISE: tl.constexpr, STATISTICS: tl.constexpr, SCORES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Gradient of Φ = scale·plain, and what the gradient of the prior's parameter is a multiple of."""
    to_scores = weights * (to_weights - delta)
    shared = plain
    if STATISTICS > 0:
        if NOISE > 0:
            mean = tl.exp2(plain * (scale * _LOG2E) - lse * _LOG2E)
        else:
            mean = weights
        shared = plain * scale
        if not SCORES:
            shared = shared - lse
        if STATISTICS == 1:
            more = steep * mean - g * a
        else:
            shared = shared - a
            more = steep * mean + (g * precision) * shared
        if MASKED:
            more = tl.where(visible, more, 0.0)
            shared = tl.where(visible, shared, 0.0)
        to_scores += more
    return to_scores, shared


@triton.jit
def _row_numbers(row, inside, at, each, rows, g, STATISTICS: tl.constexpr):
    """Log-sum-exp of the draw and of the mean, and the gradient of the latter."""
    drawn = tl.load(rows + at + row, mask=inside, other=_NOWHERE)
    mean, steep = drawn, drawn
    if STATISTICS > 0:
        mean = tl.load(rows + each + at + row, mask=inside, other=0.0)
        steep = tl.load(rows + 2 * each + at + row, mask=inside, other=0.0) * g
    return drawn, mean, steep


@triton.jit(do_not_specialize=_LOOSE)
def _to_queries(
    query, key, value, out, to_out, to_query, delta,
    rows, to_kl,
    key_seen, step, sample, examples, keyed, drop_keys,
    scale, number, rescale, precision, per_cell,
    threshold, first_row, sqb, sqh, sqm, skb, skh, skn, svb, svh, svn,
    sob, soh, som, sgb, sgh, sgm, sdb, sdh, sdm,
    heads, group, queries, keys,
    low, high, step_number, sample_number, layer, kind, first_example,
    STEP: tl.constexpr, SAMPLE: tl.constexpr, EXAMPLES: tl.constexpr,
    NOISE: tl.constexpr, STATISTICS: tl.constexpr, SCORES: tl.constexpr, DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr, KEY_MASK: tl.constexpr, ROW_MASK: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if CAUSAL:
        block = tl.num_programs(0) - 1 - block
    head = tl.program_id(1)
    example = tl.program_id(2).to(tl.int64)
    BLOCK_C: tl.constexpr = BLOCK_N // 4
    DRAWS: tl.constexpr = NOISE > 0 or DROPOUT
    MASKED: tl.constexpr = not WHOLE or KEY_MASK or ROW_MASK or CAUSAL
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < queries
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK_C)
    key_head = head // group
    if DRAWS:
        order = 4 * (n % BLOCK_C) + n // BLOCK_C
    else:
        order = n
    whole_row = inside[:, None] & (d < D)[None, :]
    q = tl.load(query + example * sqb + head.to(tl.int64) * sqh + row[:, None] * sqm + d[None, :],
                mask=whole_row, other=0.0)  # fmt: skip
    g = tl.load(to_out + example * sgb + head.to(tl.int64) * sgh + row[:, None] * sgm + d[None, :],
                mask=whole_row, other=0.0)  # fmt: skip
    o = tl.load(out + example * sob + head.to(tl.int64) * soh + row[:, None] * som + d[None, :],
                mask=whole_row, other=0.0)  # fmt: skip
    at = (example * heads + head) * queries
    each = tl.num_programs(2).to(tl.int64) * heads * queries
    own = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + at + row, own, mask=inside)
    g_kl = 0.0
    if STATISTICS > 0:
        g_kl = tl.load(to_kl + example) * per_cell
    drawn, mean, steep = _row_numbers(row, inside, at, each, rows, g_kl, STATISTICS)
    k_at = key + example * skb + key_head.to(tl.int64) * skh + order[:, None] * skn + d[None, :]
    v_at = value + example * svb + key_head.to(tl.int64) * svh + order[:, None] * svn + d[None, :]
    of_keys = (example * (heads // group) + key_head) * keys
    if DRAWS:
        c1 = (first_row + row).to(tl.uint32)[:, None]
        c2 = head.to(tl.uint32)
        c3 = _example_number(examples, first_example, example, EXAMPLES)
    if NOISE > 0:
        k0, k1 = _key(step, sample, low, high, step_number, sample_number, layer, kind, example, example,
                      STEP, SAMPLE, 1)  # fmt: skip
    if DROPOUT:
        d0 = tl.load(drop_keys).to(tl.uint32)
        d1 = tl.load(drop_keys + 1).to(tl.uint32)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    stop = keys
    if CAUSAL:
        stop = tl.minimum(keys, block * BLOCK_M + BLOCK_M + keys - queries)
    for start in range(0, stop, BLOCK_N):
        column = start + order
        seen = column < keys
        if WHOLE:
            k = tl.load(k_at + start * skn, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_at + start * svn, mask=(d < D)[None, :], other=0.0)
        else:
            k = tl.load(k_at + start * skn, mask=seen[:, None] & (d < D)[None, :], other=0.0)
            v = tl.load(v_at + start * svn, mask=seen[:, None] & (d < D)[None, :], other=0.0)
        plain = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        to_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        scores = plain
        if KEY_MASK:
            seen &= tl.load(key_seen + example * keys + column, mask=seen, other=0) != 0
        visible = seen[None, :]
        if CAUSAL:
            visible = visible & (column[None, :] <= row[:, None] + (keys - queries))
        if ROW_MASK:
            visible = visible & (drawn != _NOWHERE)[:, None]
        if MASKED:
            scores = tl.where(visible, plain, _HIDDEN)
        c0 = (start // 4 + c).to(tl.uint32)[None, :]
        if NOISE > 0:
            w0, w1, w2, w3 = words(k0, k1, c0, c1, c2, c3)
            noise = _log_noise(_side_by_side(w0, w1, w2, w3, BLOCK_M, BLOCK_N), number, NOISE, FAST)
            p = tl.exp2(scores * (scale * _LOG2E) - drawn[:, None] + noise)
        else:
            p = tl.exp2(scores * (scale * _LOG2E) - drawn[:, None])
        if DROPOUT:
            w0, w1, w2, w3 = words(d0, d1, c0, c1, c2, c3)
            word = _side_by_side(w0, w1, w2, w3, BLOCK_M, BLOCK_N)
            to_weights = tl.where(word >= threshold.to(tl.uint32), to_weights * rescale, 0.0)
        a = seen.to(tl.float32)
        if STATISTICS > 0:
            a = tl.load(keyed + of_keys + column, mask=seen, other=0.0)
        to_scores, _ = _score_gradient(
            plain, scale, p, to_weights, own[:, None], mean[:, None], steep[:, None], a[None, :],
            g_kl, precision, visible, NOISE, STATISTICS, SCORES, MASKED,
        )  # fmt: skip
        acc = tl.dot(to_scores.to(k.dtype), k, acc, input_precision=PRECISION)
    acc *= scale
    tl.store(to_query + example * sdb + head.to(tl.int64) * sdh + row[:, None] * sdm + d[None, :],
             acc.to(to_query.dtype.element_ty), mask=whole_row)  # fmt: skip


@triton.jit(do_not_specialize=_LOOSE)
def _to_keys(
    query, key, value, to_out, to_key, to_value, to_prior, delta,
    rows, to_kl,
    key_seen, step, sample, examples, keyed, drop_keys,
    scale, number, rescale, precision, per_cell,
    threshold, first_row, sqb, sqh, sqm, skb, skh, skn, svb, svh, svn, sgb, sgh, sgm, sdb, sdh, sdn,
    heads, group, queries, keys,
    low, high, step_number, sample_number, layer, kind, first_example,
    STEP: tl.constexpr, SAMPLE: tl.constexpr, EXAMPLES: tl.constexpr,
    NOISE: tl.constexpr, STATISTICS: tl.constexpr, SCORES: tl.constexpr, DROPOUT: tl.constexpr,
    CAUSAL: tl.constexpr, KEY_MASK: tl.constexpr, ROW_MASK: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    key_head = tl.program_id(1)
    example = tl.program_id(2).to(tl.int64)
    BLOCK_C: tl.constexpr = BLOCK_N // 4
    DRAWS: tl.constexpr = NOISE > 0 or DROPOUT
    MASKED: tl.constexpr = not WHOLE or KEY_MASK or ROW_MASK or CAUSAL
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_M)
    if DRAWS:
        order = 4 * (n % BLOCK_C) + n // BLOCK_C
    else:
        order = n
    column = block * BLOCK_N + order
    seen = column < keys
    whole_row = seen[:, None] & (d < D)[None, :]
    k = tl.load(key + example * skb + key_head.to(tl.int64) * skh + column[:, None] * skn + d[None, :],
                mask=whole_row, other=0.0)  # fmt: skip
    v = tl.load(value + example * svb + key_head.to(tl.int64) * svh + column[:, None] * svn + d[None, :],
                mask=whole_row, other=0.0)  # fmt: skip
    of_keys = (example * (heads // group) + key_head) * keys
    a = seen.to(tl.float32)
    g_kl = 0.0
    if STATISTICS > 0:
        a = tl.load(keyed + of_keys + column, mask=seen, other=0.0)
        g_kl = tl.load(to_kl + example) * per_cell
    if KEY_MASK:
        seen &= tl.load(key_seen + example * keys + column, mask=seen, other=0) != 0
    if DRAWS:
        c0 = (block * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.uint32)[None, :]
        c3 = _example_number(examples, first_example, example, EXAMPLES)
    if NOISE > 0:
        k0, k1 = _key(step, sample, low, high, step_number, sample_number, layer, kind, example, example,
                      STEP, SAMPLE, 1)  # fmt: skip
    if DROPOUT:
        d0 = tl.load(drop_keys).to(tl.uint32)
        d1 = tl.load(drop_keys + 1).to(tl.uint32)

    # Transposed, so that weights and gradients go into the products as they are.
    k_acc = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    v_acc = tl.zeros((BLOCK_D, BLOCK_N), tl.float32)
    a_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # summed over rows at the end: threads keep their own
    begin = 0
    if CAUSAL:
        begin = tl.maximum(0, block * BLOCK_N - (keys - queries)) // BLOCK_M * BLOCK_M
    each = tl.num_programs(2).to(tl.int64) * heads * queries
    for member in range(group):
        head = key_head * group + member
        at = (example * heads + head) * queries
        q_at = query + example * sqb + head.to(tl.int64) * sqh + i[:, None] * sqm + d[None, :]
        g_at = to_out + example * sgb + head.to(tl.int64) * sgh + i[:, None] * sgm + d[None, :]
        for start in range(begin, queries, BLOCK_M):
            row = start + i
            inside = row < queries
            if WHOLE:
                q = tl.load(q_at + start * sqm, mask=(d < D)[None, :], other=0.0)
                g = tl.load(g_at + start * sgm, mask=(d < D)[None, :], other=0.0)
            else:
                q = tl.load(q_at + start * sqm, mask=inside[:, None] & (d < D)[None, :], other=0.0)
                g = tl.load(g_at + start * sgm, mask=inside[:, None] & (d < D)[None, :], other=0.0)
            plain = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            to_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            drawn, mean, steep = _row_numbers(row, inside, at, each, rows, g_kl, STATISTICS)
            own = tl.load(delta + at + row, mask=inside, other=0.0)
            scores = plain
            visible = seen[None, :]
            if CAUSAL:
                visible = visible & (column[None, :] <= row[:, None] + (keys - queries))
            if ROW_MASK or not WHOLE:
                visible = visible & (drawn != _NOWHERE)[:, None]
            if MASKED:
                scores = tl.where(visible, plain, _HIDDEN)
            if DRAWS:
                c1 = (first_row + row).to(tl.uint32)[:, None]
                c2 = head.to(tl.uint32)
            if NOISE > 0:
                w0, w1, w2, w3 = words(k0, k1, c0, c1, c2, c3)
                noise = _log_noise(_side_by_side(w0, w1, w2, w3, BLOCK_M, BLOCK_N), number, NOISE, FAST)
                p = tl.exp2(scores * (scale * _LOG2E) - drawn[:, None] + noise)
            else:
                p = tl.exp2(scores * (scale * _LOG2E) - drawn[:, None])
            used = p
            if DROPOUT:
                w0, w1, w2, w3 = words(d0, d1, c0, c1, c2, c3)
                kept = _side_by_side(w0, w1, w2, w3, BLOCK_M, BLOCK_N) >= threshold.to(tl.uint32)
                used = tl.where(kept, p * rescale, 0.0)
                to_weights = tl.where(kept, to_weights * rescale, 0.0)
            v_acc = tl.dot(tl.trans(g), used.to(g.dtype), v_acc, input_precision=PRECISION)
            to_scores, shared = _score_gradient(
                plain, scale, p, to_weights, own[:, None], mean[:, None], steep[:, None], a[None, :],
                g_kl, precision, visible, NOISE, STATISTICS, SCORES, MASKED,
            )  # fmt: skip
            if STATISTICS > 0:
                a_acc += shared
            k_acc = tl.dot(tl.trans(q), to_scores.to(q.dtype), k_acc, input_precision=PRECISION)
    k_acc *= scale
    to = example * sdb + key_head.to(tl.int64) * sdh + column[None, :] * sdn + d[:, None]
    whole_row = (column < keys)[None, :] & (d < D)[:, None]
    tl.store(to_key + to, k_acc.to(to_key.dtype.element_ty), mask=whole_row)
    tl.store(to_value + to, v_acc.to(to_value.dtype.element_ty), mask=whole_row)
    if STATISTICS > 0:
        factor = -g_kl
        if STATISTICS == 2:
            factor = factor * precision
        tl.store(to_prior + of_keys + column, tl.sum(a_acc, 0) * factor, mask=column < keys)


@triton.jit
def _row_products(out, to_out, delta, sob, soh, som, sgb, sgh, sgm, heads, queries,
                  D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    example = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    mask = (row < queries)[:, None] & (d < D)[None, :]
    o = tl.load(out + example * sob + head * soh + row[:, None] * som + d[None, :], mask=mask, other=0.0)
    g = tl.load(to_out + example * sgb + head * sgh + row[:, None] * sgm + d[None, :], mask=mask, other=0.0)
    products = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    tl.store(delta + (example * heads + head) * queries + row, products, mask=row < queries)


@triton.jit(do_not_specialize=_LOOSE)
def _to_map(
    maps, to_next, to_maps, value, to_out, to_value, to_prior, delta,
    rows, to_kl,
    step, sample, examples, keyed, drop_keys,
    number, rescale, precision, per_cell,
    threshold, first_row, smb, smh, smm, snb, snh, snm, swb, swh, swm,
    svb, svh, svn, sgb, sgh, sgm, sdb, sdh, sdn,
    heads, group, queries, keys,
    low, high, step_number, sample_number, layer, kind, first_example,
    STEP: tl.constexpr, SAMPLE: tl.constexpr, EXAMPLES: tl.constexpr,
    NEXT: tl.constexpr, NOISE: tl.constexpr, STATISTICS: tl.constexpr, SCORES: tl.constexpr,
    DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    key_head = tl.program_id(1)
    example = tl.program_id(2).to(tl.int64)
    BLOCK_C: tl.constexpr = BLOCK_N // 4
    DRAWS: tl.constexpr = NOISE > 0 or DROPOUT
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, BLOCK_M)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    seen = column < keys
    v = tl.load(value + example * svb + key_head.to(tl.int64) * svh + column[:, None] * svn + d[None, :],
                mask=seen[:, None] & (d < D)[None, :], other=0.0)  # fmt: skip
    of_keys = (example * (heads // group) + key_head) * keys
    a = seen.to(tl.float32)
    g_kl = 0.0
    if STATISTICS > 0:
        a = tl.load(keyed + of_keys + column, mask=seen, other=0.0)
        g_kl = tl.load(to_kl + example) * per_cell
    if DRAWS:
        c0 = (block * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.uint32)[None, :]
        c3 = _example_number(examples, first_example, example, EXAMPLES)
    if NOISE > 0:
        k0, k1 = _key(step, sample, low, high, step_number, sample_number, layer, kind, example, example,
                      STEP, SAMPLE, 1)  # fmt: skip
    if DROPOUT:
        d0 = tl.load(drop_keys).to(tl.uint32)
        d1 = tl.load(drop_keys + 1).to(tl.uint32)

    v_acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    a_acc = tl.zeros((BLOCK_N,), tl.float32)
    each = tl.num_programs(2).to(tl.int64) * heads * queries
    for member in range(group):
        head = key_head * group + member
        at = (example * heads + head) * queries
        g_at = to_out + example * sgb + head.to(tl.int64) * sgh + i[:, None] * sgm + d[None, :]
        m_at = maps + example * smb + head.to(tl.int64) * smh
        n_at = to_next + example * snb + head.to(tl.int64) * snh
        w_at = to_maps + example * swb + head.to(tl.int64) * swh
        for start in range(0, queries, BLOCK_M):
            row = start + i
            inside = row < queries
            cell = inside[:, None] & seen[None, :]
            far = row[:, None].to(tl.int64)
            raw = tl.load(m_at + far * smm + column[None, :], mask=cell, other=_HIDDEN)
            g = tl.load(g_at + start * sgm, mask=inside[:, None] & (d < D)[None, :], other=0.0)
            to_weights = tl.dot(g, tl.trans(v), input_precision=PRECISION)
            drawn, mean, steep = _row_numbers(row, inside, at, each, rows, g_kl, STATISTICS)
            own = tl.load(delta + at + row, mask=inside, other=0.0)
            scores = raw.to(tl.float32)
            visible = scores != _HIDDEN
            plain = tl.where(visible, scores, 0.0)
            if DRAWS:
                c1 = (first_row + row).to(tl.uint32)[:, None]
                c2 = head.to(tl.uint32)
            if NOISE > 0:
                w0, w1, w2, w3 = words(k0, k1, c0, c1, c2, c3)
                noise = _log_noise(_interleaved(w0, w1, w2, w3, BLOCK_M, BLOCK_N), number, NOISE, FAST)
                p = tl.exp2(scores * _LOG2E - drawn[:, None] + noise)
            else:
                p = tl.exp2(scores * _LOG2E - drawn[:, None])
            used = p
            if DROPOUT:
                w0, w1, w2, w3 = words(d0, d1, c0, c1, c2, c3)
                kept = _interleaved(w0, w1, w2, w3, BLOCK_M, BLOCK_N) >= threshold.to(tl.uint32)
                used = tl.where(kept, p * rescale, 0.0)
                to_weights = tl.where(kept, to_weights * rescale, 0.0)
            v_acc = tl.dot(tl.trans(used.to(g.dtype)), g, v_acc, input_precision=PRECISION)
            to_scores, shared = _score_gradient(
                plain, 1.0, p, to_weights, own[:, None], mean[:, None], steep[:, None], a[None, :],
                g_kl, precision, visible, NOISE, STATISTICS, SCORES, True,
            )  # fmt: skip
            if STATISTICS > 0:
                a_acc += tl.sum(shared, 0)
            if NEXT:
                later = tl.load(n_at + far * snm + column[None, :], mask=cell, other=0.0)
                to_scores += tl.where(visible, later.to(tl.float32), 0.0)
            tl.store(w_at + far * swm + column[None, :], to_scores.to(to_maps.dtype.element_ty), mask=cell)
    to = example * sdb + key_head.to(tl.int64) * sdh + column[:, None] * sdn + d[None, :]
    tl.store(to_value + to, v_acc.to(to_value.dtype.element_ty), mask=seen[:, None] & (d < D)[None, :])
    if STATISTICS > 0:
        factor = -g_kl
        if STATISTICS == 2:
            factor = factor * precision
        tl.store(to_prior + of_keys + column, a_acc * factor, mask=seen)


class Draw(NamedTuple):
    """What is drawn, and at which address.

    Attributes:
        family: 0 for the mean of the weights, WEIBULL or LOGNORMAL for a draw.
        number: 1/k, or σ.
        seed: the noise's.
        step: int64 scalar on the device, or a number.
        layer: of the chain.
        kind: of the chain, by its number.
        sample: int64 scalar or (batch,) on the device, or a number.
        examples: int64, global numbers (batch,) or the first of them on the device, or a number.
        first_row: absolute position of the first query row.
        dropout: probability.
        drop_keys: int64 (2,), the key of dropout's words; None without.
    """

    family: int = 0
    number: float = 1.0
    seed: int = 0
    step: Tensor | int = 0
    layer: int = 0
    kind: int = 0
    sample: Tensor | int = 0
    examples: Tensor | int = 0
    first_row: int = 0
    dropout: float = 0.0
    drop_keys: Tensor | None = None

    def factors(self) -> tuple[float, float]:
        """Factor of the noise in units of log 2, and what kept weights gain."""
        lognormal = self.number * math.sqrt(2.0) * math.log2(math.e)
        return self.number if self.family == WEIBULL else lognormal, 1.0 / (1.0 - self.dropout)

    def tensors(self, spare: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step, sample and examples, or something in their place."""
        step, sample, examples = self.step, self.sample, self.examples
        return (
            step if isinstance(step, Tensor) else spare,
            sample if isinstance(sample, Tensor) else spare,
            examples if isinstance(examples, Tensor) else spare,
        )

    def loose(self) -> tuple[int, ...]:
        """What of the address are numbers that change from call to call."""
        step, sample, first = self.step, self.sample, self.examples
        return (
            signed(self.seed),
            signed(self.seed >> 32),
            0 if isinstance(step, Tensor) else signed(step),
            0 if isinstance(sample, Tensor) else signed(sample),
            self.layer,
            self.kind,
            0 if isinstance(first, Tensor) else signed(first),
        )


class Prior(NamedTuple):
    """What the KL takes beside scores.

    Attributes:
        statistics: WEIBULL or LOGNORMAL; 0 for no KL.
        scores: whether the posterior's mean is of raw scores, without the log-sum-exp.
        keyed: float32, one after the other: a, (batch, key heads, key), which is α, or the Lognormal mean +
            σ²/2, zero at hidden keys; as much of the prior's own; (batch, key heads) of its own; and twice
            (batch, key heads, key or 1), sums over keys, up to each where causal, of what the KL has per key,
            and of α or 1.
        seeing: what each row that sees a key has: the Gamma prior's rate.
        precision: 1/σ₁², of the Lognormal prior.
        per_cell: what the KL is multiplied by.
    """

    statistics: int
    scores: bool
    keyed: Tensor | None
    seeing: float
    precision: float
    per_cell: float


NO_PRIOR = Prior(0, False, None, 0.0, 0.0, 1.0)


class Attended(NamedTuple):
    """What a forward pass leaves.

    Attributes:
        out: (batch, heads, query, dim), or (samples, batch, heads, query, dim).
        rows: float32 (1 or 3, batch, heads, query): the drawn weights' log-sum-exp in units of log 2, up to a
            constant, +inf for queries that see no key; and for the KL log Σ exp Φ over visible keys, and the
            derivative of the row's KL by it.
        kl: float32 (batch, heads, blocks of rows), sums over each block's rows.
    """

    out: Tensor
    rows: Tensor
    kl: Tensor


def precision_of(dtype: torch.dtype) -> str:
    """How tensor cores multiply float32: as exactly as torch is asked to."""
    if dtype != torch.float32:
        return "tf32"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def heads_last(like: Tensor, *shape: int) -> Tensor:
    """An empty (batch, heads, sequence, dim) tensor whose memory has heads beside dim, as models want it."""
    return torch.empty_strided(shape, heads_last_strides(shape), dtype=like.dtype, device=like.device)


def heads_last_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of `heads_last`."""
    heads, length, width = shape[-3:]
    one = heads * length * width
    strides = one, width, heads * width, 1
    return strides if len(shape) == 4 else (shape[1] * one, *strides)


def given_or(tensor: Tensor | None, spare: Tensor) -> Tensor:
    """A pointer has to be given where none is used."""
    return spare if tensor is None else tensor


def bytes_of(mask: Tensor | None, spare: Tensor) -> Tensor:
    """A boolean mask as kernels read it."""
    return spare if mask is None else mask.contiguous().view(torch.uint8)


def rows_whole(tensor: Tensor) -> Tensor:
    """The tensor with its last axis contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Tiles(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int


_SMALL = {
    "forward": _Tiles(64, 128, 4, 3),
    "forward, map": _Tiles(64, 64, 4, 3),
    "queries": _Tiles(64, 128, 4, 2),
    "keys": _Tiles(64, 64, 4, 1),
    "map": _Tiles(128, 128, 8, 2),
    "map, drawn": _Tiles(64, 64, 4, 2),
}
_LARGE = {
    "forward": _Tiles(64, 64, 4, 2),
    "forward, map": _Tiles(64, 64, 4, 2),
    "queries": _Tiles(64, 64, 8, 1),
    "keys": _Tiles(64, 64, 8, 1),
    "map": _Tiles(32, 128, 4, 2),
    "map, drawn": _Tiles(32, 64, 4, 2),
}


class _Form(NamedTuple):
    """What of a call, beside shapes, decides which kernel runs, and with which integers."""

    dtype: torch.dtype
    precision: str
    family: int
    step: int
    sample: int
    examples: int
    dropout: float
    first_row: int
    statistics: int
    scores: bool
    causal: bool
    key_mask: bool
    row_mask: bool

    @classmethod
    def of(cls, dtype: torch.dtype, draw: Draw, prior: Prior, seen: Seen | None = None) -> _Form:
        step, sample, examples = draw.step, draw.sample, draw.examples
        return cls(
            dtype,
            precision_of(dtype),
            draw.family,
            1 if isinstance(step, Tensor) else 0,
            1 + (sample.dim() > 0) if isinstance(sample, Tensor) else 0,
            1 + (examples.dim() > 0) if isinstance(examples, Tensor) else 0,
            draw.dropout,
            draw.first_row,
            prior.statistics,
            prior.scores,
            seen is not None and seen.causal,
            seen is not None and seen.key_visible is not None,
            seen is not None and seen.query_real is not None,
        )

    def integers(self) -> tuple[int, int]:
        """What dropped words lie below, and the first row."""
        return signed(max(2, min(round(self.dropout * 2**32), 2**32 - 1))), self.first_row

    def address(self) -> dict[str, int]:
        """Where of the noise's address tensors are."""
        return {"STEP": self.step, "SAMPLE": self.sample, "EXAMPLES": self.examples}

    def law(self) -> dict[str, Any]:
        """What is drawn, and what the KL takes."""
        return {
            "NOISE": self.family,
            "STATISTICS": self.statistics,
            "SCORES": self.scores,
            "DROPOUT": self.dropout > 0.0,
        }

    def masks(self) -> dict[str, bool]:
        """Which there are."""
        return {"CAUSAL": self.causal, "KEY_MASK": self.key_mask, "ROW_MASK": self.row_mask}

    def sizes(self, width: int, tiles: _Tiles) -> dict[str, Any]:
        """Of tiles, and how exact numbers are."""
        fast = self.dtype != torch.float32 and not INTERPRETED
        return {
            "D": width,
            "BLOCK_D": power_of_two(width),
            "BLOCK_M": tiles.rows,
            "BLOCK_N": tiles.columns,
            "PRECISION": self.precision,
            "FAST": fast,
        }

    def tiles(self, kind: str, width: int) -> _Tiles:
        """Sizes that were the fastest on an H200."""
        return (_LARGE if width > 64 or self.dtype == torch.float32 else _SMALL)[kind]


Shape = tuple[int, ...]


@lru_cache(MOST)
def _forward_ready(
    form: _Form, samples: int, mapped: bool, queried: Shape, valued: Shape, *strides: Shape
) -> Ready:
    (batch, heads, queries, width), (_, key_heads, keys, _) = queried, valued
    tiles = form.tiles("forward, map" if mapped else "forward", width)
    out = heads_last_strides(queried if samples == 1 else (samples, *queried))
    return Ready(
        _forward,
        (blocks(queries * samples, tiles.rows), heads, batch),
        (
            *form.integers(), *(step for each in strides for step in each[:3]),
            *out[-4:-1], out[0], heads, heads // key_heads, queries, keys,
        ),
        {
            **form.address(),
            "SAMPLES": samples,
            **form.law(),
            **form.masks(),
            "WHOLE": keys % tiles.columns == 0 and (queries * samples) % tiles.rows == 0,
            "MAP": mapped,
            **form.sizes(width, tiles),
        },
        tiles.warps,
        tiles.stages,
    )  # fmt: skip


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    maps: Tensor | None,
    seen: Seen,
    draw: Draw,
    prior: Prior = NO_PRIOR,
    scale: float = 1.0,
    samples: int = 1,
) -> Attended:
    """Attend. `maps`, an evolved map with −inf in hidden cells, takes the place of scores if given.

    Args:
        query: (batch, heads, query, dim); with `maps` only its shape and dtype count.
        key: (batch, key heads, key, dim); with `maps` unused.
        value: (batch, key heads, key, dim).
        maps: (batch, heads, query, key) or None.
        seen: which cells are visible; with `maps` only `query_real` and `causal` count.
        draw: what is drawn.
        prior: what the KL takes.
        scale: of the products, positive; 1 with `maps`.
        samples: how many draws of each row, from 0 on; more than one reads each tile of keys and values once
            for all.
    """
    query, key, value = rows_whole(query), rows_whole(key), rows_whole(value)
    source, shape = given_or(maps, query), query.shape
    ready = _forward_ready(
        _Form.of(query.dtype, draw, prior, seen), samples, maps is not None, shape, value.shape,
        query.stride(), key.stride(), value.stride(), source.stride(),
    )  # fmt: skip
    batch, heads, queries, _ = shape
    out = heads_last(query, *((samples,) if samples > 1 else ()), *shape)
    rows = query.new_empty((3 if prior.statistics else 1, batch, heads, queries), dtype=torch.float32)
    kl = query.new_empty((batch, heads, ready.grid[0] if prior.statistics else 0), dtype=torch.float32)
    ready.run(
        (
            query, key, value, source, out, rows, kl, bytes_of(seen.key_visible, query),
            bytes_of(seen.query_real, query), *draw.tensors(query), given_or(prior.keyed, query),
            given_or(draw.drop_keys, query),
        ),
        (scale, *draw.factors(), prior.seeing, prior.precision, prior.per_cell),
        draw.loose(),
    )  # fmt: skip
    return Attended(out, rows, kl)


@lru_cache(MOST)
def _backward_ready(
    form: _Form,
    queried: Shape,
    valued: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    out: Shape,
    to_out: Shape,
) -> tuple[Ready, Ready]:
    (batch, heads, queries, width), (_, key_heads, keys, _) = queried, valued
    inputs = *form.integers(), *query[:3], *key[:3], *value[:3]
    to_query, to_key = heads_last_strides(queried), heads_last_strides(valued)
    counts = heads, heads // key_heads, queries, keys
    flags = {**form.address(), **form.law(), **form.masks()}
    tiles = form.tiles("queries", width)
    to_queries = Ready(
        _to_queries,
        (blocks(queries, tiles.rows), heads, batch),
        (*inputs, *out[:3], *to_out[:3], *to_query[:3], *counts),
        {**flags, "WHOLE": keys % tiles.columns == 0, **form.sizes(width, tiles)},
        tiles.warps,
        tiles.stages,
    )
    tiles = form.tiles("keys", width)
    whole = keys % tiles.columns == 0 and queries % tiles.rows == 0
    to_keys = Ready(
        _to_keys,
        (blocks(keys, tiles.columns), key_heads, batch),
        (*inputs, *to_out[:3], *to_key[:3], *counts),
        {**flags, "WHOLE": whole, **form.sizes(width, tiles)},
        tiles.warps,
        tiles.stages,
    )
    return to_queries, to_keys


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Seen,
    draw: Draw,
    prior: Prior,
    scale: float,
    out: Tensor,
    rows: Tensor,
    to_out: Tensor,
    to_kl: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and the prior's a, where scores are products.

    `out` and `rows` are what `forward` left; `to_kl`, float32 (batch,), is the gradient of the KL.
    """
    query, key, value, to_out = rows_whole(query), rows_whole(key), rows_whole(value), rows_whole(to_out)
    shape, valued = query.shape, value.shape
    to_queries, to_keys = _backward_ready(
        _Form.of(query.dtype, draw, prior, seen), shape, valued,
        query.stride(), key.stride(), value.stride(), out.stride(), to_out.stride(),
    )  # fmt: skip
    to_query = heads_last(query, *shape)
    to_key, to_value = heads_last(query, *valued), heads_last(query, *valued)
    batch, key_heads, keys, _ = valued
    to_prior = query.new_empty((batch, key_heads, keys if prior.statistics else 0), dtype=torch.float32)
    delta = query.new_empty(shape[:3], dtype=torch.float32)
    address = (
        rows, given_or(to_kl, query), bytes_of(seen.key_visible, query), *draw.tensors(query),
        given_or(prior.keyed, query), given_or(draw.drop_keys, query),
    )  # fmt: skip
    floats, loose = (scale, *draw.factors(), prior.precision, prior.per_cell), draw.loose()
    to_queries.run((query, key, value, out, to_out, to_query, delta, *address), floats, loose)
    to_keys.run((query, key, value, to_out, to_key, to_value, to_prior, delta, *address), floats, loose)
    return to_query, to_key, to_value, to_prior


@lru_cache(MOST)
def _map_backward_ready(
    form: _Form, next_too: bool, mapped: Shape, valued: Shape,
    maps: Shape, later: Shape, to_maps: Shape, value: Shape, out: Shape, to_out: Shape,
) -> tuple[Ready, Ready]:  # fmt: skip
    (batch, heads, queries, keys), (_, key_heads, _, width) = mapped, valued
    products = Ready(
        _row_products,
        (blocks(queries, 64), heads, batch),
        (*out[:3], *to_out[:3], heads, queries),
        {"D": width, "BLOCK_D": power_of_two(width), "BLOCK_M": 64},
    )
    tiles = form.tiles("map, drawn" if form.family or form.dropout else "map", width)
    to_map = Ready(
        _to_map,
        (blocks(keys, tiles.columns), key_heads, batch),
        (
            *form.integers(), *maps[:3], *later[:3], *to_maps[:3], *value[:3],
            *to_out[:3], *heads_last_strides(valued)[:3], heads, heads // key_heads, queries, keys,
        ),
        {**form.address(), "NEXT": next_too, **form.law(), **form.sizes(width, tiles)},
        tiles.warps,
        tiles.stages,
    )  # fmt: skip
    return products, to_map


def map_backward(
    maps: Tensor,
    value: Tensor,
    draw: Draw,
    prior: Prior,
    out: Tensor,
    rows: Tensor,
    to_out: Tensor,
    to_kl: Tensor | None,
    to_next: Tensor | None,
    to_maps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of value and the prior's a where scores are an evolved map; `to_maps` takes the map's own.

    `to_next` is the map's gradient from the layer above, which is added to it in visible cells.
    """
    value, to_out = rows_whole(value), rows_whole(to_out)
    later = maps if to_next is None else rows_whole(to_next)
    products, to_map = _map_backward_ready(
        _Form.of(value.dtype, draw, prior), to_next is not None, maps.shape, value.shape,
        maps.stride(), later.stride(), to_maps.stride(), value.stride(), out.stride(), to_out.stride(),
    )  # fmt: skip
    batch, key_heads, keys, _ = value.shape
    to_value = heads_last(value, *value.shape)
    to_prior = value.new_empty((batch, key_heads, keys if prior.statistics else 0), dtype=torch.float32)
    delta = value.new_empty(maps.shape[:3], dtype=torch.float32)
    products.run((out, to_out, delta))
    to_map.run(
        (
            maps, later, to_maps, value, to_out, to_value, to_prior, delta, rows, given_or(to_kl, value),
            *draw.tensors(value), given_or(prior.keyed, value), given_or(draw.drop_keys, value),
        ),
        (*draw.factors(), prior.precision, prior.per_cell),
        draw.loose(),
    )  # fmt: skip
    return to_value, to_prior
