"""The noise on an edge list; the package `overt.mechanisms.noise` has the definition."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms.flat import signed
from overt.mechanisms.kernels.launch import MOST, Ready, blocks
from overt.mechanisms.kernels.philox import words

_BLOCK = 1024  # cells of a program


@triton.jit(do_not_specialize=["example"])
def edge_units(noise_key, rows, columns, out, cells, heads, example, BLOCK: tl.constexpr):
    """Uniform draws of BLOCK cells, counted over edges × heads.

    Args:
        noise_key: two words, from `noise.stream`.
        rows: int64 (edges,).
        columns: int64 (edges,).
        out: float32 (edges, heads).
        cells: edges · heads.
        heads: of each edge.
        example: its global number.
        BLOCK: cells of a program.
    """
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (block,), like everything below
    inside = cell < cells
    edge, head = cell // heads, cell % heads
    row = tl.load(rows + edge, mask=inside, other=0)
    column = tl.load(columns + edge, mask=inside, other=0)
    k0 = tl.load(noise_key).to(tl.uint32)
    k1 = tl.load(noise_key + 1).to(tl.uint32)
    c0 = (column >> 2).to(tl.uint32)
    c1 = row.to(tl.uint32)
    c2 = head.to(tl.uint32)
    c3 = tl.full((BLOCK,), 0, tl.uint32) + example.to(tl.uint32)
    w0, w1, w2, w3 = words(k0, k1, c0, c1, c2, c3)
    which = column & 3
    word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    unit = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2⁻²³
    tl.store(out + cell, unit, mask=inside)


@lru_cache(MOST)
def _ready(cells: int, heads: int) -> Ready:
    return Ready(edge_units, (blocks(cells, _BLOCK), 1, 1), (cells, heads), {"BLOCK": _BLOCK})


def uniform_edges(keys: Tensor, heads: int, rows: Tensor, columns: Tensor, example: int) -> Tensor:
    """`noise.uniform_edges` in one kernel, bit for bit."""
    out = torch.empty(rows.shape[0], heads, device=rows.device, dtype=torch.float32)
    if out.numel():
        ready = _ready(out.numel(), heads)
        ready.run((keys, rows.contiguous(), columns.contiguous(), out), (), (signed(example),))
    return out
