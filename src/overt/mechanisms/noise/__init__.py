"""Noise that is a pure function of its address.

A draw depends on (seed, step, layer, sample, example, head, row, column) and on nothing else. The same noise
is therefore drawn under checkpointing, chunking, another batch size, a resumed run, `torch.compile` and
another process, and no draw advances any other random generator.

The generator is Philox 4×32 (Salmon et al. 2011) with seven rounds, the fewest that they found to pass
BigCrush. It is used twice: once per attention call, to turn (seed; step, layer, sample, kind) into a key,
and then per cell, under that key, with the counter (column div 4, row, head, example); word column mod 4
of the result belongs to the cell. `philox.py` has the definition; on a CPU a compiled loop
(`_philox_numba.py`) produces the same integers, bit for bit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from overt.mechanisms.backend import EDGE_KERNELS, unfit
from overt.mechanisms.loops import loops, run_threaded
from overt.mechanisms.noise.philox import MASK, ROUNDS, open_unit, words

__all__ = ["MASK", "ROUNDS", "open_unit", "stream", "uniform", "uniform_edges", "words"]


def stream(
    seed: Tensor, step: Tensor, layer: int, sample: Tensor, kind: int, off: str | None = None
) -> Tensor:
    """The key of one attention call: two 32-bit words per sample, shape (*sample.shape, 2).

    `seed` and `step` are int64 scalars, `sample` an int64 scalar or one number per example; `off` is the
    reason to use the definition, if any.
    """
    if sample.device.type == "cpu":
        form: Any = _stream_cpu if off is None else _stream_definition
    else:
        kernels = _dense_kernels(sample, off)
        form = _stream_definition if kernels is None else kernels.stream
    keys: Tensor = form(seed, step, layer, sample, kind)
    return keys


def _stream_definition(seed: Tensor, step: Tensor, layer: int, sample: Tensor, kind: int) -> Tensor:
    place = (step & MASK, torch.full_like(step, layer), sample & MASK, torch.full_like(step, kind))
    k0, k1, _, _ = words((seed & MASK, (seed >> 32) & MASK), place)
    return torch.stack([k0, k1], dim=-1)


@torch.library.custom_op("overt::stream", mutates_args=())
def _stream_cpu(seed: Tensor, step: Tensor, layer: int, sample: Tensor, kind: int) -> Tensor:
    # A custom operator, here and below, so that a compiled loop is one opaque call to torch.compile.
    kernels = compiled_kernels()
    if kernels is None:
        return _stream_definition(seed, step, layer, sample, kind)
    out = torch.empty(*sample.shape, 2, dtype=torch.int64)
    kernels.fill_keys(int(seed), int(step), layer, sample.reshape(-1).numpy(), kind, out.view(-1, 2).numpy())
    return out


@_stream_cpu.register_fake
def _(seed: Tensor, step: Tensor, layer: int, sample: Tensor, kind: int) -> Tensor:
    del seed, step, layer, kind
    return sample.new_empty(*sample.shape, 2)


def _stream_vmap(
    info: object,
    in_dims: tuple[int | None, ...],
    seed: Tensor,
    step: Tensor,
    layer: int,
    sample: Tensor,
    kind: int,
) -> tuple[Tensor, int]:
    del info
    if in_dims[0] is not None or in_dims[1] is not None or in_dims[3] is None:
        raise ValueError("vmap may run over sample and examples only: seed and step must be shared")
    return torch.ops.overt.stream(seed, step, layer, sample.movedim(in_dims[3], 0), kind), 0


torch.library.register_vmap(_stream_cpu, _stream_vmap)


def _uniform_definition(
    keys: Tensor, examples: Tensor, heads: int, rows: int, columns: int, first_row: int
) -> Tensor:
    def arange(start: int, count: int) -> Tensor:
        return torch.arange(start, start + count, device=examples.device)

    blocks = (columns + 3) // 4
    four = words(
        (keys[:, 0].view(-1, 1, 1, 1), keys[:, 1].view(-1, 1, 1, 1)),
        (
            arange(0, blocks).view(1, 1, 1, -1),
            arange(first_row, rows).view(1, 1, -1, 1),
            arange(0, heads).view(1, -1, 1, 1),
            (examples & MASK).view(-1, 1, 1, 1),
        ),
    )
    shape = (examples.shape[0], heads, rows, blocks)
    return open_unit(torch.stack([word.expand(shape) for word in four], dim=-1)).flatten(-2)[..., :columns]


@torch.library.custom_op("overt::uniform", mutates_args=())
def _uniform_cpu(
    keys: Tensor, examples: Tensor, heads: int, rows: int, columns: int, first_row: int
) -> Tensor:
    kernels = compiled_kernels()
    if kernels is None:
        return _uniform_definition(keys, examples, heads, rows, columns, first_row).contiguous()
    out = torch.empty(examples.shape[0], heads, rows, columns, dtype=torch.float32)
    kernels.fill_dense(keys.numpy(), (examples & MASK).numpy(), first_row, out.numpy())
    return out


@_uniform_cpu.register_fake
def _(keys: Tensor, examples: Tensor, heads: int, rows: int, columns: int, first_row: int) -> Tensor:
    del first_row
    return keys.new_empty(examples.shape[0], heads, rows, columns, dtype=torch.float32)


def _uniform_vmap(
    info: object,
    in_dims: tuple[int | None, ...],
    keys: Tensor,
    examples: Tensor,
    heads: int,
    rows: int,
    columns: int,
    first_row: int,
) -> tuple[Tensor, int]:
    # vmap's axis is folded into the example axis: a draw depends on its example only through its number.
    size: int = info.batch_size  # type: ignore[attr-defined]
    folded = []
    for tensor, dim in zip((keys, examples), in_dims[:2], strict=True):
        moved = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        folded.append(moved.flatten(0, 1))
    out = torch.ops.overt.uniform(*folded, heads, rows, columns, first_row)
    return out.unflatten(0, (size, -1)), 0


torch.library.register_vmap(_uniform_cpu, _uniform_vmap)


def compiled_kernels() -> ModuleType | None:
    """The compiled loops, or None where numba cannot be imported."""
    return loops("noise._philox_numba")


def uniform(
    keys: Tensor,
    examples: Tensor,
    heads: int,
    rows: int,
    columns: int,
    first_row: int = 0,
    off: str | None = None,
) -> Tensor:
    """Uniform draws on the open unit interval, (batch, heads, rows, columns), float32.

    Args:
        keys: from `stream`, shape (batch, 2) or (2,).
        examples: global number of each example, int64 of shape (batch,).
        heads: number of heads; draws exist for heads 0 … heads − 1.
        rows: number of query rows, counted from `first_row`.
        columns: number of key columns, counted from 0.
        first_row: absolute position of the first query row.
        off: the reason to use the definition, if any.
    """
    keys = keys.expand(examples.shape[0], 2)
    if examples.device.type == "cpu":
        form: Any = _uniform_cpu if off is None else _uniform_definition
    else:
        kernels = _dense_kernels(examples, off)
        form = _uniform_definition if kernels is None else kernels.uniform
    units: Tensor = form(keys, examples, heads, rows, columns, first_row)
    return units


def uniform_edges(
    keys: Tensor, heads: int, rows: Tensor, columns: Tensor, example: int = 0, off: str | None = None
) -> Tensor:
    """The same draws on an edge list: (edges, heads), edge e holding cell (rows[e], columns[e]).

    An edge's draw depends on its two ends, not on its position in the list. `off` is the reason to use the
    definition, if any.
    """
    if rows.device.type == "cpu":
        form: Any = _edges_cpu if off is None else _edges_definition
    else:
        kernels = gpu_kernels(keys.new_empty(0, dtype=torch.float32), off)
        form = _edges_definition if kernels is None else kernels.uniform_edges
    draws: Tensor = form(keys, heads, rows, columns, example)
    return draws


def gpu_kernels(values: Tensor, off: str | None = None) -> ModuleType | None:
    """The kernels for noise on edges where they apply (`backend.unfit`), else None."""
    if unfit(EDGE_KERNELS, values, off=off) is not None:
        return None
    from overt.mechanisms.kernels import edges

    return edges


def _dense_kernels(numbers: Tensor, off: str | None) -> ModuleType | None:
    """The kernels for noise on maps where they apply, else None."""
    if gpu_kernels(numbers.new_empty(0, dtype=torch.float32), off) is None:
        return None
    from overt.mechanisms.kernels import dense

    return dense


def _edges_definition(keys: Tensor, heads: int, rows: Tensor, columns: Tensor, example: int) -> Tensor:
    arange = torch.arange(heads, device=rows.device)
    four = words(
        (keys[0], keys[1]),
        (
            (columns >> 2).view(-1, 1),
            rows.view(-1, 1),
            arange.view(1, -1),
            torch.full((), example & MASK, dtype=torch.int64, device=rows.device),
        ),
    )
    pick = (columns & 3).view(-1, 1).expand(-1, heads)
    return open_unit(torch.stack(four, dim=-1).gather(-1, pick.unsqueeze(-1)).squeeze(-1))


@torch.library.custom_op("overt::uniform_edges", mutates_args=())
def _edges_cpu(keys: Tensor, heads: int, rows: Tensor, columns: Tensor, example: int) -> Tensor:
    kernels = compiled_kernels()
    if kernels is None:
        return _edges_definition(keys, heads, rows, columns, example)
    out = torch.empty(rows.shape[0], heads, dtype=torch.float32)
    key = keys.numpy()

    def fill(start: int, stop: int, rows: Any, columns: Any, out: Any) -> None:
        kernels.fill_edges(start, stop, key, example, rows, columns, out)

    run_threaded(rows.shape[0], out.numel(), fill, rows.contiguous(), columns.contiguous(), out)
    return out


@_edges_cpu.register_fake
def _(keys: Tensor, heads: int, rows: Tensor, columns: Tensor, example: int) -> Tensor:
    del columns, example
    return keys.new_empty(rows.shape[0], heads, dtype=torch.float32)
