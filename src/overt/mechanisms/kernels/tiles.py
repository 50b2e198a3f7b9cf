"""What the attention passes share: addresses of tiles, visibility, and the gradient of scores."""

from __future__ import annotations

import triton.language as tl

from overt.mechanisms import flat
from overt.mechanisms.kernels.launch import helper
from overt.mechanisms.kernels.noise import LOG2E, NO_KL, NO_NOISE, WEIBULL

HIDDEN = tl.constexpr(float("-inf"))  # score of a hidden cell
NOWHERE = tl.constexpr(float("inf"))  # log-sum-exp of a row that sees no key
_AT_ONCE = tl.constexpr(256)  # rows that `padded_span` reads at once
# What is done for padded queries.
ZEROS, PLAINLY = tl.constexpr(flat.ZEROS), tl.constexpr(flat.PLAINLY)
NOTHING_ELSE = tl.constexpr(flat.NOTHING_ELSE)


@helper
def rows_at(base, example, head, rows, dims, batch_stride, head_stride, row_stride):
    """Addresses of rows of one head: (rows, width), from `rows` (rows,) and `dims` (width,).

    Only offsets within a head are computed in 32 bits.
    """
    return (
        base + example * batch_stride + head.to(tl.int64) * head_stride
        + rows[:, None] * row_stride + dims[None, :]
    )  # fmt: skip


@helper
def padded_rows(query_real, example, row, queries):
    """Which of the rows are padding; shaped like `row`."""
    return tl.load(query_real + example * queries + row, mask=row < queries, other=1) == 0


@helper
def padded_span(query_real, example, queries):
    """The first padded row, and the one after the last; `queries` and 0 if there is none."""
    first, end = queries, 0
    for start in range(0, queries, _AT_ONCE):
        row = start + tl.arange(0, _AT_ONCE)  # (at once,)
        padding = padded_rows(query_real, example, row, queries)  # (at once,)
        first = tl.minimum(first, tl.min(tl.where(padding, row, queries), 0))
        end = tl.maximum(end, tl.max(tl.where(padding, row + 1, 0), 0))
    return first, end


@helper
def row_numbers(rows, head_start, row, row_inside, each, kl_gradient, KL: tl.constexpr):
    """For each row: log-sum-exp of the draw, log-sum-exp of the mean, and the latter's gradient; (block_q,).

    Args:
        rows: `Attended.rows`.
        head_start: index of this head's first row in each of them.
        row: (block_q,).
        row_inside: which rows exist, (block_q,).
        each: number of entries in each of `rows`.
        kl_gradient: gradient of the KL of one cell.
        KL: family of the KL.
    """
    drawn_lse = tl.load(rows + head_start + row, mask=row_inside, other=NOWHERE)
    mean_lse, to_mean_lse = drawn_lse, drawn_lse
    if KL != NO_KL:
        mean_lse = tl.load(rows + each + head_start + row, mask=row_inside, other=0.0)
        steep = tl.load(rows + 2 * each + head_start + row, mask=row_inside, other=0.0)
        to_mean_lse = steep * kl_gradient
    return drawn_lse, mean_lse, to_mean_lse


@helper
def score_gradient(
    raw, scale, weights, to_weights, delta, mean_lse, to_mean_lse, parameter, kl_gradient, precision, visible,
    NOISE: tl.constexpr, KL: tl.constexpr, SCORES: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Gradient of Φ = scale · raw, and the gradient of the prior's parameter up to a factor.

    Both are (block_q, block_k), and so are tiles; "per row" or "per column" means broadcasting to that.

    Args:
        raw: scores before their scale, finite in hidden cells.
        scale: of the scores.
        weights: as drawn, before dropout.
        to_weights: their gradients.
        delta: per row, Σ of weights · to_weights.
        mean_lse: per row, log-sum-exp of the mean.
        to_mean_lse: per row, gradient of `mean_lse`.
        parameter: per column, the prior's.
        kl_gradient: gradient of the KL of one cell.
        precision: 1/σ₁², of the Lognormal prior.
        visible: which cells are visible, for the KL.
        NOISE: family of the draw.
        KL: family of the KL.
        SCORES: whether the posterior's mean is taken from raw scores, without the log-sum-exp.
        MASKED: whether any cell may be hidden.
    """
    to_scores = weights * (to_weights - delta)
    to_parameter = raw
    if KL != NO_KL:
        if NOISE != NO_NOISE:
            mean = tl.exp2(raw * (scale * LOG2E) - mean_lse * LOG2E)
        else:
            mean = weights
        to_parameter = raw * scale
        if not SCORES:
            to_parameter = to_parameter - mean_lse
        if KL == WEIBULL:
            from_kl = to_mean_lse * mean - kl_gradient * parameter
        else:
            to_parameter = to_parameter - parameter
            from_kl = to_mean_lse * mean + (kl_gradient * precision) * to_parameter
        if MASKED:
            from_kl = tl.where(visible, from_kl, 0.0)
            to_parameter = tl.where(visible, to_parameter, 0.0)
        to_scores += from_kl
    return to_scores, to_parameter
