"""Drawing weights as compiled loops on the CPU: noise, softmax and log-sum-exp of a map, row by row.

`naive.log_noise` and `maps.softmax` are the definitions. The words are those of `noise.words`, bit for bit.
Logarithms and exponentials are polynomials with a relative error of at most 3e-7, since the C library
computes them one by one, which would be most of the work. Where threads divide a loop among them, `start` and
`stop` count rows of maps, with (example, head, query) as one number, and each row belongs to one thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from overt.mechanisms._compiled import compiled, compiled_loosely
from overt.mechanisms.bayesian._kl_numba import _CENTRAL, _TAIL
from overt.mechanisms.noise._philox_numba import _philox

# A product and the sum that takes it are one instruction, in the order written.
in_order = partial(compiled, fastmath={"contract"})
_ZERO, _ONE, _HALF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
_LOWEST = np.finfo(np.float32).min
_UNIT = np.float32(2.0**-23)
_DROPPED, _BITS = np.uint64(9), np.int32(23)
_SHUT = np.uint8(0)
_SIGN, _REST = np.int32(31), np.int32(0x7FFFFFFF)
# log(1 + f)/f on [√½ − 1, √2 − 1] and exp on [−½ log 2, ½ log 2]: least squares at Chebyshev nodes, lowest
# power first.
_LOG = tuple(
    map(
        np.float32,
        (
            0.9999999743,
            -0.4999998703,
            0.3333418334,
            -0.2500215346,
            0.1995697748,
            -0.1656069599,
            0.1494909548,
            -0.1437733057,
            0.08743945353,
        ),
    )
)
_EXP = tuple(
    map(
        np.float32,
        (1.0, 1.000000038, 0.5000000108, 0.1666641548, 0.04166621827, 0.00837512889, 0.001394858082),
    )
)
_ROOT_HALF = np.float32(np.sqrt(0.5)).view(np.int32)
_LOG_2 = np.float32(np.log(2.0))
# log 2 in two parts, the first short enough that its product with a whole number is exact.
_LOG_2_HIGH = np.float32(0.693359375)
_LOG_2_LOW = np.float32(np.log(2.0) - 0.693359375)
_PER_LOG_2 = np.float32(1.0 / np.log(2.0))
_BIAS = np.int32(127)
_SMALLEST = np.float32(-87.0)  # below it, exponentials are taken as zero


@in_order
def _polynomial(coefficients: Any, x: Any) -> Any:
    value = coefficients[-1]
    for place in range(len(coefficients) - 1):
        value = value * x + coefficients[len(coefficients) - 2 - place]
    return value


@in_order
def _log(x: Any) -> Any:
    """The logarithm of a positive, normal float32."""
    bits = np.float32(x).view(np.int32)
    power = np.int32(bits - _ROOT_HALF) >> _BITS
    f = np.int32(bits - (power << _BITS)).view(np.float32) - _ONE
    return np.float32(power) * _LOG_2 + f * _polynomial(_LOG, f)


@in_order
def _exp(x: Any) -> Any:
    """The exponential of a float32 that is not positive, or NaN."""
    clamped = _SMALLEST if x < _SMALLEST else x
    power = np.floor(clamped * _PER_LOG_2 + _HALF)
    rest = (clamped - power * _LOG_2_HIGH) - power * _LOG_2_LOW
    scale = np.int32((np.int32(power) + _BIAS) << _BITS).view(np.float32)
    value = _polynomial(_EXP, rest) * scale
    return _ZERO if x < _SMALLEST else value


@in_order
def _order_key(x: Any) -> Any:
    """A float32 as an integer of the same order: the maximum of integers is computed four at a time."""
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ ((bits >> _SIGN) & _REST))


@in_order
def _largest(row: Any) -> Any:
    top = _order_key(row[0])
    for j in range(row.shape[0]):
        value = _order_key(row[j])
        top = value if value > top else top
    return np.int32(top ^ ((top >> _SIGN) & _REST)).view(np.float32)


@compiled_loosely
def _sum(row: Any) -> Any:
    total = _ZERO
    for j in range(row.shape[0]):
        total += row[j]
    return total


@compiled_loosely
def _dot(x: Any, y: Any) -> Any:
    total = _ZERO
    for j in range(x.shape[0]):
        total += x[j] * y[j]
    return total


@in_order
def _noise_row(
    k0: Any, k1: Any, row: Any, head: Any, example: Any, weibull: bool, size: Any, out: Any
) -> None:
    """Fill out (4, columns / 4) with `naive.log_noise`; `size` is 1/k or √2·σ."""
    blocks = out.shape[1]
    for n in range(blocks):
        w0, w1, w2, w3 = _philox(k0, k1, np.uint64(n), row, head, example)
        out[0, n] = (np.float32(w0 >> _DROPPED) + _HALF) * _UNIT
        out[1, n] = (np.float32(w1 >> _DROPPED) + _HALF) * _UNIT
        out[2, n] = (np.float32(w2 >> _DROPPED) + _HALF) * _UNIT
        out[3, n] = (np.float32(w3 >> _DROPPED) + _HALF) * _UNIT
    flat = out.reshape(-1)
    if weibull:
        for n in range(flat.shape[0]):
            # 1 − ε is exact: ε is (m + ½)·2⁻²³.
            flat[n] = _log(-_log(_ONE - flat[n])) * size
    else:
        for n in range(flat.shape[0]):
            x = (flat[n] - _HALF) + (flat[n] - _HALF)
            w = -_log(np.float32(4.0) * flat[n] * (_ONE - flat[n]))
            central = _polynomial(_CENTRAL, w - np.float32(2.5))
            tail = _polynomial(_TAIL, np.sqrt(w) - np.float32(3.0))
            flat[n] = x * (central if w < np.float32(5.0) else tail) * size


@in_order
def draw(
    start: int,
    stop: int,
    logits: Any,
    visible: Any,
    keys: Any,
    examples: Any,
    first_row: int,
    weibull: bool,
    size: Any,
    weights: Any,
    lse: Any,
) -> None:
    """Fill `weights` with a draw and, unless it is empty, `lse` with `maps.log_normalizer` of the logits.

    Args:
        start: first row.
        stop: last row + 1.
        logits: (batch, heads, query, key).
        visible: (batch, heads or 1, query, key), bytes.
        keys: (batch, 2), of `noise.stream`.
        examples: (batch,), 32-bit words.
        first_row: absolute position of the first query row.
        weibull: the family; otherwise Lognormal.
        size: 1/k, or √2·σ.
        weights: like `logits`.
        lse: (batch · heads · query,), or empty.
    """
    _, heads, queries, columns = logits.shape
    groups = visible.shape[1]
    blocks = (columns + 3) // 4
    noise = np.empty((4, blocks), dtype=np.float32)
    spread = np.empty(4 * blocks, dtype=np.float32)
    held = np.empty(columns, dtype=np.float32)
    for n in range(start, stop):
        b, h, i = n // (heads * queries), n // queries % heads, n % queries
        k0, k1, example = np.uint64(keys[b, 0]), np.uint64(keys[b, 1]), np.uint64(examples[b])
        _noise_row(k0, k1, np.uint64(first_row + i), np.uint64(h), example, weibull, size, noise)
        n0, n1, n2, n3 = noise[0], noise[1], noise[2], noise[3]
        for block in range(blocks):
            spread[4 * block] = n0[block]
            spread[4 * block + 1] = n1[block]
            spread[4 * block + 2] = n2[block]
            spread[4 * block + 3] = n3[block]
        row, seen, out = logits[b, h, i], visible[b, h % groups, i], weights[b, h, i]
        if lse.shape[0] > 0:
            shown = _SHUT
            for j in range(columns):
                held[j] = row[j] if seen[j] != 0 else _LOWEST
                shown = shown | seen[j]
            top = _largest(held)
            for j in range(columns):
                held[j] = _exp(held[j] - top)
            value = top if np.isinf(top) else top + np.log(_sum(held))
            lse[n] = value if shown > 0 else _ZERO
        for j in range(columns):
            value = row[j] + spread[j]
            held[j] = value if seen[j] != 0 else _LOWEST
        top = _largest(held)
        for j in range(columns):
            held[j] = _exp(held[j] - top)
        share = _ONE / _sum(held)
        for j in range(columns):
            value = held[j] * share
            out[j] = value if seen[j] != 0 else _ZERO


@in_order
def draw_backward(
    start: int,
    stop: int,
    logits: Any,
    visible: Any,
    weights: Any,
    lse: Any,
    to_weights: Any,
    to_lse: Any,
    out: Any,
) -> None:
    """Fill `out` with the gradient to the logits, from that to weights and, unless it is empty, to lse."""
    _, heads, queries, columns = logits.shape
    groups = visible.shape[1]
    for n in range(start, stop):
        b, h, i = n // (heads * queries), n // queries % heads, n % queries
        drawn, to_drawn, to_row = weights[b, h, i], to_weights[b, h, i], out[b, h, i]
        mean = _dot(drawn, to_drawn)
        if lse.shape[0] == 0:
            for j in range(columns):
                to_row[j] = drawn[j] * (to_drawn[j] - mean)
            continue
        row, seen, base, factor = logits[b, h, i], visible[b, h % groups, i], lse[n], to_lse[n]
        for j in range(columns):
            value = drawn[j] * (to_drawn[j] - mean) + factor * _exp(row[j] - base)
            to_row[j] = value if seen[j] != 0 else _ZERO


@compiled_loosely
def _weighted_sum(row: Any, seen: Any, alpha: Any, base: Any) -> Any:
    total = _ZERO
    for j in range(row.shape[0]):
        value = alpha[j] * (row[j] - base)
        total += value if seen[j] != 0 else _ZERO
    return total


@compiled_loosely
def _visible_sum(seen: Any, alpha: Any) -> Any:
    total = _ZERO
    for j in range(seen.shape[0]):
        total += alpha[j] if seen[j] != 0 else _ZERO
    return total


@in_order
def weigh(start: int, stop: int, logits: Any, visible: Any, alpha: Any, lse: Any, out: Any) -> None:
    """Fill out with Σ_j α_j (Φ_ij − lse_i) over visible keys, for maps `start` to `stop`.

    Args:
        start: first map, with (example, head) as one number.
        stop: last map + 1.
        logits: (batch, heads, query, key).
        visible: (batch, heads or 1, query, key), bytes.
        alpha: (batch, heads, key).
        lse: (batch, heads, query).
        out: like `lse`.
    """
    heads, queries = logits.shape[1:3]
    groups = visible.shape[1]
    for n in range(start, stop):
        b, h = n // heads, n % heads
        for i in range(queries):
            seen = visible[b, h % groups, i]
            out[b, h, i] = _weighted_sum(logits[b, h, i], seen, alpha[b, h], lse[b, h, i])


@in_order
def weigh_backward(
    start: int,
    stop: int,
    logits: Any,
    visible: Any,
    alpha: Any,
    lse: Any,
    gradient: Any,
    to_logits: Any,
    to_alpha: Any,
    to_lse: Any,
) -> None:
    """Fill the gradients of `weigh`'s sums; `gradient` is shaped like `lse`."""
    heads, queries, columns = logits.shape[1:]
    groups = visible.shape[1]
    for n in range(start, stop):
        b, h = n // heads, n % heads
        share, to_share = alpha[b, h], to_alpha[b, h]
        to_share[:] = _ZERO
        for i in range(queries):
            row, seen, to_row = logits[b, h, i], visible[b, h % groups, i], to_logits[b, h, i]
            base, to_sum = lse[b, h, i], gradient[b, h, i]
            for j in range(columns):
                value = to_sum * (row[j] - base)
                to_share[j] += value if seen[j] != 0 else _ZERO
                value = to_sum * share[j]
                to_row[j] = value if seen[j] != 0 else _ZERO
            to_lse[b, h, i] = -to_sum * _visible_sum(seen, share)


@in_order
def log_and_exp(x: Any, logs: Any, exps: Any) -> None:
    """Fill logs with log x and exps with exp −x: the functions that draws use, for a test."""
    for n in range(x.shape[0]):
        logs[n] = _log(x[n])
        exps[n] = _exp(-x[n])
