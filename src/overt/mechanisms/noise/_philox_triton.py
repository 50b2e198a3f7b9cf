"""The noise's words in GPU kernels, bit for bit `noise`'s."""

from __future__ import annotations

import triton
import triton.language as tl

from overt.mechanisms.noise.words import MULTIPLIERS, ROUNDS, WEYL

_M0, _M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_W0, _W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
_ROUNDS = tl.constexpr(ROUNDS)


@triton.jit
def words(k0, k1, c0, c1, c2, c3):
    """Four words of a counter's four, under a key of two, all uint32."""
    # Counters broadcast: what depends on rows alone, or on columns alone, stays that small for two rounds.
    for _ in tl.static_range(_ROUNDS):
        p0 = c0.to(tl.uint64) * _M0
        p1 = c2.to(tl.uint64) * _M1
        c0, c1, c2, c3 = (
            (p1 >> 32).to(tl.uint32) ^ c1 ^ k0,
            p1.to(tl.uint32),
            (p0 >> 32).to(tl.uint32) ^ c3 ^ k1,
            p0.to(tl.uint32),
        )
        k0 += _W0
        k1 += _W1
    return c0, c1, c2, c3
