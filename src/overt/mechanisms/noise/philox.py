"""Philox 4×32 (Salmon et al. 2011), seven rounds: 32-bit words, a pure function of a key and a counter.

This is the definition. Compiled loops (`_philox_numba`) and GPU kernels produce the same integers exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def _product(x: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32-bit halves of x·multiplier, where x holds 32-bit words as int64.

    Computed in halves of 16 bits, since the full product would overflow int64.
    """
    upper = x * (multiplier >> 16)
    lower = x * (multiplier & 0xFFFF)
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & MASK
    return high, low


def words(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4×32: four 32-bit words for each counter under each key, as int64 tensors that broadcast."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def open_unit(word: Tensor) -> Tensor:
    """A 32-bit word as a float32 strictly between 0 and 1: (n + ½)·2⁻²³ for its upper 23 bits n."""
    return ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23
