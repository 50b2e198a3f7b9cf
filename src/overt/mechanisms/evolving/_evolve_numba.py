"""Equation 4 as compiled loops on the CPU, forward and backward; `naive.py` is the definition.

Convolutions run row by row over images that include a border of zeros: an image is (batch, heads, rows,
columns), and a window starts at the row and column of its output cell. Where threads divide a loop among
them, `start` and `stop` count rows of maps, with (example, row) as one number; every cell is computed by one
thread, and sums are kept per (example, row), so that nothing depends on the number of threads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from overt.mechanisms._compiled import compiled, compiled_loosely

# A product and the sum that takes it are one instruction, in the order written.
in_order = partial(compiled, fastmath={"contract"})
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_HIDDEN = np.float32(-np.inf)
_SHUT = np.uint8(0)


@compiled
def mix(
    start: int,
    stop: int,
    logits: Any,
    previous: Any,
    visible: Any,
    alpha: Any,
    top: int,
    left: int,
    image: Any,
) -> None:
    """Fill the inside of `image` with the first line of equation 4: `naive.mix`."""
    _, heads, queries, keys = logits.shape
    groups = visible.shape[1]
    for row in range(start, stop):
        b, i = row // queries, row % queries
        for h in range(heads):
            now, past, seen = logits[b, h, i], previous[b, h, i], visible[b, h % groups, i]
            out = image[b, h, top + i, left : left + keys]
            for j in range(keys):
                both = alpha * past[j] + (_ONE - alpha) * now[j]
                value = now[j] if past[j] == _HIDDEN else both
                out[j] = value if seen[j] != 0 else _ZERO


@in_order
def _four_outputs(image: Any, weight: Any, b: int, i: int, first: int, out: Any) -> None:
    """Add the window sums of four heads to out (heads, columns), at row i of example b."""
    inputs, high, wide = weight.shape[1:]
    columns = out.shape[1]
    out0, out1, out2, out3 = out[first], out[first + 1], out[first + 2], out[first + 3]
    for c in range(inputs):
        for dy in range(high):
            row = image[b, c, i + dy]
            w0, w1 = weight[first, c, dy], weight[first + 1, c, dy]
            w2, w3 = weight[first + 2, c, dy], weight[first + 3, c, dy]
            if wide == 3:
                a0, a1, a2 = w0[0], w0[1], w0[2]
                b0, b1, b2 = w1[0], w1[1], w1[2]
                c0, c1, c2 = w2[0], w2[1], w2[2]
                d0, d1, d2 = w3[0], w3[1], w3[2]
                for j in range(columns):
                    x0, x1, x2 = row[j], row[j + 1], row[j + 2]
                    out0[j] = out0[j] + a0 * x0 + a1 * x1 + a2 * x2
                    out1[j] = out1[j] + b0 * x0 + b1 * x1 + b2 * x2
                    out2[j] = out2[j] + c0 * x0 + c1 * x1 + c2 * x2
                    out3[j] = out3[j] + d0 * x0 + d1 * x1 + d2 * x2
            else:
                for dx in range(wide):
                    a0, b0, c0, d0 = w0[dx], w1[dx], w2[dx], w3[dx]
                    for j in range(columns):
                        x0 = row[j + dx]
                        out0[j] += a0 * x0
                        out1[j] += b0 * x0
                        out2[j] += c0 * x0
                        out3[j] += d0 * x0


@in_order
def _one_output(image: Any, weight: Any, b: int, i: int, head: int, out: Any) -> None:
    inputs, high, wide = weight.shape[1:]
    columns = out.shape[1]
    line = out[head]
    for c in range(inputs):
        for dy in range(high):
            row = image[b, c, i + dy]
            for dx in range(wide):
                w = weight[head, c, dy, dx]
                for j in range(columns):
                    line[j] += w * row[j + dx]


@compiled
def _windows(image: Any, weight: Any, b: int, i: int, out: Any) -> None:
    heads = out.shape[0]
    for first in range(0, heads - 3, 4):
        _four_outputs(image, weight, b, i, first, out)
    for head in range(heads // 4 * 4, heads):
        _one_output(image, weight, b, i, head, out)


@compiled
def convolve(
    start: int,
    stop: int,
    image: Any,
    weight: Any,
    bias: Any,
    visible: Any,
    beta: Any,
    top: int,
    left: int,
    out: Any,
    passed: Any,
) -> None:
    """Fill `out` with the second line of equation 4, `naive.refine`, and `passed` with what the ReLU passed.

    Args:
        start: first row.
        stop: last row + 1.
        image: `mix`'s result in its border.
        weight: (heads, heads, k, k).
        bias: (heads,).
        visible: (batch, heads or 1, query, key), bytes.
        beta: of equation 4.
        top: rows of the border above.
        left: columns of the border to the left.
        out: (batch, heads, query, key).
        passed: like `out`, bytes.
    """
    _, heads, queries, keys = out.shape
    groups = visible.shape[1]
    lines = np.empty((heads, keys), dtype=np.float32)
    for row in range(start, stop):
        b, i = row // queries, row % queries
        for h in range(heads):
            lines[h, :] = bias[h]
        _windows(image, weight, b, i, lines)
        for h in range(heads):
            line, seen, inside = lines[h], visible[b, h % groups, i], image[b, h, top + i, left : left + keys]
            out_row, passed_row = out[b, h, i], passed[b, h, i]
            for j in range(keys):
                closed = line[j] <= _ZERO  # a NaN passes, as in torch
                value = beta * (_ZERO if closed else line[j]) + (_ONE - beta) * inside[j]
                out_row[j] = value if seen[j] != 0 else _HIDDEN
                passed_row[j] = _SHUT if closed else seen[j]


@compiled
def through_relu(
    start: int, stop: int, gradient: Any, passed: Any, beta: Any, top: int, left: int, image: Any
) -> None:
    """Fill the inside of `image` with the gradient at the convolution's result."""
    _, heads, queries, keys = gradient.shape
    for row in range(start, stop):
        b, i = row // queries, row % queries
        for h in range(heads):
            to_row, passed_row = gradient[b, h, i], passed[b, h, i]
            out = image[b, h, top + i, left : left + keys]
            for j in range(keys):
                value = beta * to_row[j]
                out[j] = value if passed_row[j] != 0 else _ZERO


@compiled
def to_maps(
    start: int,
    stop: int,
    image: Any,
    flipped: Any,
    gradient: Any,
    previous: Any,
    visible: Any,
    alpha: Any,
    beta: Any,
    to_logits: Any,
    to_previous: Any,
) -> None:
    """Fill the gradients to current and previous logits.

    Args:
        start: first row.
        stop: last row + 1.
        image: `through_relu`'s result in its border.
        flipped: (heads, heads, k, k), the weight with the axes of heads swapped and windows flipped.
        gradient: to the evolved logits.
        previous: evolved logits of the layer below.
        visible: as in `convolve`.
        alpha: of equation 4.
        beta: of equation 4.
        to_logits: like `gradient`.
        to_previous: like `gradient`.
    """
    _, heads, queries, keys = gradient.shape
    groups = visible.shape[1]
    lines = np.empty((heads, keys), dtype=np.float32)
    for row in range(start, stop):
        b, i = row // queries, row % queries
        lines[:] = _ZERO
        _windows(image, flipped, b, i, lines)
        for h in range(heads):
            line, to_row, seen = lines[h], gradient[b, h, i], visible[b, h % groups, i]
            past, to_now, to_past = previous[b, h, i], to_logits[b, h, i], to_previous[b, h, i]
            for j in range(keys):
                value = line[j] + (_ONE - beta) * to_row[j]
                value = value if seen[j] != 0 else _ZERO
                fresh = past[j] == _HIDDEN
                to_now[j] = value if fresh else (_ONE - alpha) * value
                to_past[j] = _ZERO if fresh else alpha * value


@compiled_loosely
def _three_taps_of_four(g0: Any, g1: Any, g2: Any, g3: Any, row: Any, sums: Any) -> None:
    """Add the products of four rows with one row, at three shifts, to sums (4, 3)."""
    a0 = a1 = a2 = b0 = b1 = b2 = c0 = c1 = c2 = d0 = d1 = d2 = _ZERO
    for j in range(g0.shape[0]):
        x0, x1, x2 = row[j], row[j + 1], row[j + 2]
        a0 += g0[j] * x0
        a1 += g0[j] * x1
        a2 += g0[j] * x2
        b0 += g1[j] * x0
        b1 += g1[j] * x1
        b2 += g1[j] * x2
        c0 += g2[j] * x0
        c1 += g2[j] * x1
        c2 += g2[j] * x2
        d0 += g3[j] * x0
        d1 += g3[j] * x1
        d2 += g3[j] * x2
    sums[0, 0] += a0
    sums[0, 1] += a1
    sums[0, 2] += a2
    sums[1, 0] += b0
    sums[1, 1] += b1
    sums[1, 2] += b2
    sums[2, 0] += c0
    sums[2, 1] += c1
    sums[2, 2] += c2
    sums[3, 0] += d0
    sums[3, 1] += d1
    sums[3, 2] += d2


@compiled_loosely
def _dot(x: Any, y: Any, shift: int) -> Any:
    total = _ZERO
    for j in range(x.shape[0]):
        total += x[j] * y[j + shift]
    return total


@compiled
def to_weight(
    start: int,
    stop: int,
    image: Any,
    back: Any,
    top: int,
    left: int,
    rows_of_part: int,
    shape: Any,
    parts: Any,
) -> None:
    """Fill parts (parts, heads, heads, k, k) with sums over rows of the gradient to the weight.

    Args:
        start: first part.
        stop: last part + 1.
        image: `mix`'s result in its border.
        back: `through_relu`'s result in its border.
        top: rows of `back`'s border above.
        left: columns of `back`'s border to the left.
        rows_of_part: number of (example, row) pairs per part.
        shape: of the map.
        parts: filled.
    """
    batch, heads, queries, keys = shape[0], shape[1], shape[2], shape[3]
    high, wide = parts.shape[3:]
    for part in range(start, stop):
        sums = parts[part]
        sums[:] = _ZERO
        for row in range(part * rows_of_part, min((part + 1) * rows_of_part, batch * queries)):
            b, i = row // queries, row % queries
            last = left + keys
            grouped = heads // 4 * 4 if wide == 3 else 0
            for c in range(heads):
                for dy in range(high):
                    line = image[b, c, i + dy]
                    for h in range(0, grouped, 4):
                        g0, g1 = back[b, h, top + i, left:last], back[b, h + 1, top + i, left:last]
                        g2, g3 = back[b, h + 2, top + i, left:last], back[b, h + 3, top + i, left:last]
                        _three_taps_of_four(g0, g1, g2, g3, line, sums[h : h + 4, c, dy])
                    for h in range(grouped, heads):
                        for dx in range(wide):
                            sums[h, c, dy, dx] += _dot(back[b, h, top + i, left:last], line, dx)
