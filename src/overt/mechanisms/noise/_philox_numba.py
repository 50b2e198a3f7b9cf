"""Philox 4×32 as a compiled loop on the CPU; the same integers as `noise.words`, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from overt.mechanisms._compiled import compiled
from overt.mechanisms.noise.philox import MULTIPLIERS, ROUNDS, WEYL

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_W0, _W1 = np.uint64(WEYL[0]), np.uint64(WEYL[1])
_MASK = np.uint64(0xFFFFFFFF)
_HALF_WORD = np.uint64(32)
_DROPPED = np.uint64(9)


@compiled
def _philox(k0: Any, k1: Any, c0: Any, c1: Any, c2: Any, c3: Any) -> Any:
    for _ in range(ROUNDS):
        p0 = c0 * _M0
        p1 = c2 * _M1
        c0, c1, c2, c3 = (p1 >> _HALF_WORD) ^ c1 ^ k0, p1 & _MASK, (p0 >> _HALF_WORD) ^ c3 ^ k1, p0 & _MASK
        k0 = (k0 + _W0) & _MASK
        k1 = (k1 + _W1) & _MASK
    return c0, c1, c2, c3


@compiled
def _unit(word: Any) -> Any:
    return (np.float32(word >> _DROPPED) + np.float32(0.5)) * np.float32(2.0**-23)


@compiled
def fill_dense(keys: Any, examples: Any, first_row: int, out: Any) -> None:
    """Fill out (batch, heads, rows, columns) in place; one Philox block serves four columns."""
    batch, heads, rows, columns = out.shape
    blocks = (columns + 3) // 4
    buffer = np.empty((4, blocks), dtype=np.uint64)
    for b in range(batch):
        k0, k1, example = np.uint64(keys[b, 0]), np.uint64(keys[b, 1]), np.uint64(examples[b])
        for h in range(heads):
            for i in range(rows):
                # Generate, then scatter: the first loop has no stores that cross lanes, so it vectorises.
                for block in range(blocks):
                    four = _philox(k0, k1, np.uint64(block), np.uint64(first_row + i), np.uint64(h), example)
                    buffer[0, block], buffer[1, block], buffer[2, block], buffer[3, block] = four
                for j in range(columns):
                    out[b, h, i, j] = _unit(buffer[j & 3, j >> 2])


@compiled
def fill_keys(seed: int, step: int, layer: int, samples: Any, kind: int, out: Any) -> None:
    """Fill out (samples, 2) in place with the keys of `noise.stream`."""
    k0, k1 = np.uint64(seed) & _MASK, (np.uint64(seed) >> _HALF_WORD) & _MASK
    c0, c1, c3 = np.uint64(step) & _MASK, np.uint64(layer), np.uint64(kind)
    for i in range(samples.shape[0]):
        w0, w1, _, _ = _philox(k0, k1, c0, c1, np.uint64(samples[i]) & _MASK, c3)
        out[i, 0], out[i, 1] = np.int64(w0), np.int64(w1)


@compiled
def fill_edges(start: int, stop: int, key: Any, example: int, rows: Any, columns: Any, out: Any) -> None:
    """Fill out (edges, heads) in place, from `start` to `stop`; edge e holds cell (rows[e], columns[e])."""
    k0, k1, last = np.uint64(key[0]), np.uint64(key[1]), np.uint64(example) & _MASK
    heads = out.shape[1]
    for e in range(start, stop):
        row, block, word = np.uint64(rows[e]), np.uint64(columns[e] >> 2), columns[e] & 3
        for h in range(heads):
            w0, w1, w2, w3 = _philox(k0, k1, block, row, np.uint64(h), last)
            picked = (w0 if word == 0 else w1) if word < 2 else (w2 if word == 2 else w3)
            out[e, h] = _unit(picked)
