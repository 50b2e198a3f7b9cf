"""The noise of whole maps, and its keys; the package `overt.mechanisms.noise` has the definitions.

In plain operations each takes some 190 launches, more than many a step of a recurrent network.
"""

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


@triton.jit(do_not_specialize=["layer", "kind"])
def stream_keys(seed, step, sample, out, count, layer, kind, BLOCK: tl.constexpr):
    """The keys of BLOCK samples.

    Args:
        seed: int64, one number.
        step: int64, one number.
        sample: int64 (samples,).
        out: int64 (samples, 2).
        count: number of samples.
        layer: place in the chain.
        kind: of the chain, by its number.
        BLOCK: samples of a program.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (block,), like everything below
    inside = place < count
    zero = tl.full((BLOCK,), 0, tl.uint32)
    both = tl.load(seed)
    k0 = both.to(tl.uint32)
    k1 = (both >> 32).to(tl.uint32)
    c0 = zero + tl.load(step).to(tl.uint32)
    c1 = zero + layer.to(tl.uint32)
    c2 = tl.load(sample + place, mask=inside, other=0).to(tl.uint32)
    c3 = zero + kind.to(tl.uint32)
    w0, w1, _, _ = words(k0, k1, c0, c1, c2, c3)
    tl.store(out + 2 * place, w0.to(tl.int64), mask=inside)
    tl.store(out + 2 * place + 1, w1.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["first_row"])
def dense_units(keys, examples, out, cells, heads, rows, columns, first_row, BLOCK: tl.constexpr):
    """Uniform draws of BLOCK cells, counted over examples × heads × rows × columns.

    Args:
        keys: int64 (examples, 2), from `noise.stream`.
        examples: int64 (examples,), their global numbers.
        out: float32 (examples, heads, rows, columns).
        cells: number of cells.
        heads: of the map.
        rows: of the map.
        columns: of the map.
        first_row: absolute position of the first row.
        BLOCK: cells of a program.
    """
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # (block,), like everything below
    inside = cell < cells
    column = cell % columns
    row = (cell // columns) % rows + first_row
    head = (cell // columns // rows) % heads
    example = cell // columns // rows // heads
    k0 = tl.load(keys + 2 * example, mask=inside, other=0).to(tl.uint32)
    k1 = tl.load(keys + 2 * example + 1, mask=inside, other=0).to(tl.uint32)
    c0 = (column >> 2).to(tl.uint32)
    c1 = row.to(tl.uint32)
    c2 = head.to(tl.uint32)
    c3 = tl.load(examples + example, mask=inside, other=0).to(tl.uint32)
    w0, w1, w2, w3 = words(k0, k1, c0, c1, c2, c3)
    which = column & 3
    word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
    unit = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2⁻²³
    tl.store(out + cell, unit, mask=inside)


@lru_cache(MOST)
def _stream_ready(count: int) -> Ready:
    return Ready(stream_keys, (blocks(count, 128), 1, 1), (count,), {"BLOCK": 128})


@lru_cache(MOST)
def _dense_ready(shape: tuple[int, int, int, int]) -> Ready:
    examples, heads, rows, columns = shape
    cells = examples * heads * rows * columns
    integers = cells, heads, rows, columns
    return Ready(dense_units, (blocks(cells, _BLOCK), 1, 1), integers, {"BLOCK": _BLOCK})


def stream(seed: Tensor, step: Tensor, layer: int, sample: Tensor, kind: int) -> Tensor:
    """`noise.stream` in one kernel, bit for bit."""
    out = torch.empty(*sample.shape, 2, device=sample.device, dtype=torch.int64)
    if out.numel():
        ready = _stream_ready(sample.numel())
        ready.run((seed, step, sample.contiguous(), out), (), (signed(layer), signed(kind)))
    return out


def uniform(keys: Tensor, examples: Tensor, heads: int, rows: int, columns: int, first_row: int) -> Tensor:
    """`noise.uniform` in one kernel, bit for bit; keys are (examples, 2)."""
    shape = examples.shape[0], heads, rows, columns
    out = torch.empty(shape, device=examples.device, dtype=torch.float32)
    if out.numel():
        ready = _dense_ready(shape)
        ready.run((keys.contiguous(), examples.contiguous(), out), (), (signed(first_row),))
    return out
