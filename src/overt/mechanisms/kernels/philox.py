"""Philox 4×32 in kernels: the same words as `noise.words`, bit for bit."""

from __future__ import annotations

import triton.language as tl

from overt.mechanisms.kernels.launch import helper
from overt.mechanisms.noise.philox import MULTIPLIERS, ROUNDS, WEYL

_M0, _M1 = tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])
_W0, _W1 = tl.constexpr(WEYL[0]), tl.constexpr(WEYL[1])
_ROUNDS = tl.constexpr(ROUNDS)


@helper
def words(k0, k1, c0, c1, c2, c3):
    """The four words of a counter (c0, c1, c2, c3) under a key (k0, k1), all uint32."""
    # Counters broadcast: what depends only on rows, or only on columns, stays that small for two rounds.
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
