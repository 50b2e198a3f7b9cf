"""The convolution's weights as used by kernels: one matrix (heads × heads) for each tap."""

from __future__ import annotations

import triton.language as tl

from overt.mechanisms.kernels.launch import helper


@helper
def taps_of(
    weight, heads, line,
    SIZE: tl.constexpr, BACKWARD: tl.constexpr, DTYPE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One line of taps: SIZE matrices (HEADS, HEADS), zero beyond the heads.

    Args:
        weight: (heads, heads, SIZE, SIZE), the first axis for the output head.
        heads: number of heads.
        line: which row of the window.
        SIZE: of the window.
        BACKWARD: whether the window is flipped and matrices transposed, for the backward pass.
        DTYPE: of the matrices.
        HEADS: `heads`, rounded up to a power of two.
    """
    to_head, from_head = tl.arange(0, HEADS)[:, None], tl.arange(0, HEADS)[None, :]
    there = (to_head < heads) & (from_head < heads)
    taps = ()
    for across in tl.static_range(SIZE):
        if BACKWARD:
            at = ((from_head * heads + to_head) * SIZE + (SIZE - 1 - line)) * SIZE + (SIZE - 1 - across)
        else:
            at = ((to_head * heads + from_head) * SIZE + line) * SIZE + across
        taps = taps + (tl.load(weight + at, mask=there, other=0.0).to(DTYPE),)  # type: ignore[assignment]
    return taps
