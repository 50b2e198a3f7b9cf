"""A level of states on a GPU: rows carried down through attention that is computed tile by tile.

The first kernel makes each row's log-sum-exp, unless the model's own attention left it. The second computes
the scores: a program has one tile of keys and a few heads, which may share these keys, goes over the queries
that see them, sums a tile's probabilities over its heads, and multiplies that sum with all rows once.
Exponents are in units of log 2.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms.kernels.launch import INTERPRETED, MOST, Ready, blocks, helper, power_of_two
from overt.mechanisms.kernels.tiles import HIDDEN, NOWHERE, rows_at
from overt.tracing.asked import Asked

Tile = tuple[int, int, int, int]
LOG2E = 1.4426950408889634
# Queries and keys of a tile, the warps of its program and its stages: the first that a GPU's shared memory
# has room for, with as many heads as possible; small ones with one head.
TILES: tuple[Tile, ...] = ((32, 128, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1))
SMALL_TILES: tuple[Tile, ...] = ((32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1))
if INTERPRETED:
    TILES = SMALL_TILES[1:]
UNITS = 4, 2, 1  # heads whose probabilities a program sums
ROWS_AT_ONCE = 128  # that one pass over the scores carries down: accumulators of more do not fit
SHARED = 65_536  # bytes of shared memory, in the interpreter
PROGRAMS = 1024  # at least so many, where there is work for them
MOST_QUERIES = 8192  # that one program sums over in float32; programs are summed in float64
NO_WINDOW, A_WINDOW, CHUNKS = 0, 1, 2  # what WINDOW says; `window` is then a number of keys


@helper
def _scores(
    query, key, keys_real, example, head, key_head, row, column, queries, keys, width, scale, offset, window,
    query_batch, query_head, query_row, key_batch, key_head_stride, key_row, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Scores of a tile in units of log 2, float32 (row, column), −inf where a key is hidden."""
    dims = tl.arange(0, WIDTH)
    row_inside, column_inside = row < queries, column < keys
    dim_inside = dims < width
    at = rows_at(query, example, head, row, dims, query_batch, query_head, query_row)
    q = tl.load(at, mask=row_inside[:, None] & dim_inside[None, :], other=0.0)
    at = rows_at(key, example, key_head, column, dims, key_batch, key_head_stride, key_row)
    k = tl.load(at, mask=column_inside[:, None] & dim_inside[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = row_inside[:, None] & column_inside[None, :]
    ahead = column[None, :] - row[:, None] - offset
    if CAUSAL:
        seen = seen & (ahead <= 0)
    if WINDOW == 1:
        seen = seen & (ahead > -window)
    if WINDOW == 2:
        seen = seen & (column[None, :] // window == (row[:, None] + offset) // window)
    if PADDED:
        real = tl.load(keys_real + example * keys + column, mask=column_inside, other=0)
        seen = seen & (real[None, :] != 0)
    return tl.where(seen, scores, HIDDEN)


@triton.jit
def row_sums(
    query, key, keys_real, heads, out, scale, queries, keys, width, chosen, group, offset, window,
    query_batch, query_head, query_row, key_batch, key_head_stride, key_row,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of rows, in units of log 2; ∞ for a row that sees no key.

    Args:
        query: (batch, head, query, dim), as are its strides.
        key: (batch, key head, key, dim).
        keys_real: uint8 (batch, key), if PADDED.
        heads: int64 (chosen,), the heads.
        out: float32 (batch, chosen, query).
        scale: of the products, in units of log 2.
        queries: their number.
        keys: their number.
        width: of a head.
        chosen: number of heads.
        group: heads of a key head.
        offset: as in `Sight`.
        window: or chunk, as in `Sight`.
        query_batch: stride of an example's queries; the others likewise.
    """
    example = (tl.program_id(1) // chosen).to(tl.int64)
    number = tl.program_id(1) % chosen
    head = tl.load(heads + number)
    row = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    first, last = tl.program_id(0) * BLOCK_Q, tl.minimum(tl.program_id(0) * BLOCK_Q + BLOCK_Q, queries) - 1
    low, high = 0, keys
    if CAUSAL:
        high = tl.minimum(keys, tl.maximum(0, last + offset + 1))
    if WINDOW == 1:
        low = tl.maximum(0, first + offset - window + 1) // BLOCK_K * BLOCK_K
    if WINDOW == 2:
        low = tl.maximum(0, first + offset) // window * window // BLOCK_K * BLOCK_K
    largest = tl.full((BLOCK_Q,), HIDDEN, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    for start in range(low, high, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        scores = _scores(
            query, key, keys_real, example, head, head // group, row, column, queries, keys, width, scale,
            offset, window, query_batch, query_head, query_row, key_batch, key_head_stride, key_row, WIDTH,
            CAUSAL, WINDOW, PADDED,
        )  # fmt: skip
        now = tl.maximum(largest, tl.max(scores, 1))
        safe = tl.where(now == HIDDEN, 0.0, now)
        total = total * tl.exp2(largest - safe) + tl.sum(tl.exp2(scores - safe[:, None]), 1)
        largest = now
    found = tl.where(total > 0.0, largest + tl.log2(tl.where(total > 0.0, total, 1.0)), NOWHERE)
    place = (example * chosen + number) * queries + row
    tl.store(out + place, found, mask=row < queries)


@helper
def _carried(
    held, start, first_head, k, key, query, lse, rows, example, number, column, scale, queries, keys,
    width, chosen, group, offset, window, query_batch, query_head, query_row, key_batch, key_head_stride,
    key_row, count, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, GROUPED: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`held` and what one block of queries adds to it, float32 (column, row)."""
    dims = tl.arange(0, WIDTH)
    row = start + tl.arange(0, BLOCK_Q)
    row_inside = row < queries
    summed = tl.zeros((BLOCK_K, BLOCK_Q), tl.float32)
    for each in tl.static_range(HEADS):
        head = first_head + each
        at = rows_at(query, example, head, row, dims, query_batch, query_head, query_row)
        q = tl.load(at, mask=row_inside[:, None] & (dims < width)[None, :], other=0.0)
        if not GROUPED:
            at = rows_at(key, example, head // group, column, dims, key_batch, key_head_stride, key_row)
            k = tl.load(at, mask=(column < keys)[:, None] & (dims < width)[None, :], other=0.0)
        # Of a query that is not there, or sees nothing, all probabilities are 0.
        place = (example * chosen + number + each) * queries + row
        below = tl.load(lse + place, mask=row_inside, other=NOWHERE)
        exponents = tl.dot(k, tl.trans(q), input_precision="ieee") * scale - below[None, :]
        if MASKED:
            ahead = column[:, None] - row[None, :] - offset
            if CAUSAL:
                exponents = tl.where(ahead <= 0, exponents, HIDDEN)
            if WINDOW == 1:
                exponents = tl.where(ahead > -window, exponents, HIDDEN)
            if WINDOW == 2:
                same = column[:, None] // window == (row[None, :] + offset) // window
                exponents = tl.where(same, exponents, HIDDEN)
        summed += tl.exp2(exponents)
    which = tl.arange(0, ROWS)
    at = rows + (example * count + which[None, :]) * queries + row[:, None]
    part = tl.load(at, mask=(which[None, :] < count) & row_inside[:, None], other=0.0)
    return held + tl.dot(summed, part, input_precision=PRECISION)


@triton.jit(do_not_specialize=["count"])
def carry_down(
    query, key, keys_real, firsts, lse, rows, out, scale, queries, keys, width, chosen, group, offset, window,
    query_batch, query_head, query_row, key_batch, key_head_stride, key_row, span, pieces, units, count,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
    GROUPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows times the sum of some heads' maps.

    Args:
        query: this and the following as in `row_sums`.
        key: keys.
        keys_real: uint8 (batch, key).
        firsts: int64 (units,), the first of each unit's heads, which follow one another.
        lse: float32 (batch, chosen, query), from `row_sums`, in the order of the units' heads.
        rows: float32 (batch, count, query).
        out: float32 (batch, units × pieces, count, key).
        scale: of the products.
        span: queries of a piece, a multiple of BLOCK_Q.
        pieces: number of pieces.
        units: number of units.
        count: number of rows.
        ROWS: power of two, at least `count`.
        HEADS: of a unit.
        GROUPED: whether a unit's heads share their keys.
        PRECISION: of the products with rows.
    """
    part = tl.program_id(1) % (units * pieces)
    example = (tl.program_id(1) // (units * pieces)).to(tl.int64)
    unit, piece = part // pieces, part % pieces
    first_head = tl.load(firsts + unit)
    key_head = first_head // group
    first = tl.program_id(0) * BLOCK_K
    column = first + tl.arange(0, BLOCK_K)
    low, high = piece * span, tl.minimum(piece * span + span, queries)
    whole = low  # from here on, all queries see all of these keys
    if CAUSAL:  # queries that come before these keys do not see them
        low = tl.maximum(low, tl.maximum(0, first - offset) // BLOCK_Q * BLOCK_Q)
        after = tl.maximum(0, first + BLOCK_K - 1 - offset)
        whole = tl.maximum(low, (after + BLOCK_Q - 1) // BLOCK_Q * BLOCK_Q)
    if WINDOW == 1:
        high = tl.minimum(high, tl.maximum(0, first + BLOCK_K - 1 + window - offset))
    if WINDOW == 2:  # up to the end of the last key's chunk
        high = tl.minimum(high, tl.maximum(0, (first + BLOCK_K - 1) // window * window + window - offset))
    if WINDOW != 0:
        whole = high
    whole = tl.minimum(whole, high)
    dims = tl.arange(0, WIDTH)
    at = rows_at(key, example, key_head, column, dims, key_batch, key_head_stride, key_row)
    k = tl.load(at, mask=(column < keys)[:, None] & (dims < width)[None, :], other=0.0)
    held = tl.zeros((BLOCK_K, ROWS), tl.float32)
    if CAUSAL or WINDOW != 0:
        for start in range(low, whole, BLOCK_Q):
            held = _carried(
                held, start, first_head, k, key, query, lse, rows, example, unit * HEADS, column, scale,
                queries, keys, width, chosen, group, offset, window, query_batch, query_head, query_row,
                key_batch, key_head_stride, key_row, count, WIDTH, CAUSAL, WINDOW, BLOCK_Q, BLOCK_K, ROWS,
                HEADS, GROUPED, PRECISION, True,
            )  # fmt: skip
    for start in range(whole, high, BLOCK_Q):
        held = _carried(
            held, start, first_head, k, key, query, lse, rows, example, unit * HEADS, column, scale,
            queries, keys, width, chosen, group, offset, window, query_batch, query_head, query_row,
            key_batch, key_head_stride, key_row, count, WIDTH, CAUSAL, WINDOW, BLOCK_Q, BLOCK_K, ROWS, HEADS,
            GROUPED, PRECISION, False,
        )  # fmt: skip
    column_inside = column < keys
    if PADDED:  # a hidden key's column is its own: nothing else is taken from it
        real = tl.load(keys_real + example * keys + column, mask=column_inside, other=0)
        held = tl.where((real != 0)[:, None], held, 0.0)
    which = tl.arange(0, ROWS)
    at = out + ((example * units * pieces + part) * count + which[None, :]) * keys + column[:, None]
    tl.store(at, held, mask=(which[None, :] < count) & column_inside[:, None])


@lru_cache(MOST)
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take on a device."""
    if device.type != "cuda":
        return SHARED
    number = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(number)["max_shared_mem"])


@lru_cache(MOST)
def has_tf32(device: torch.device) -> bool:
    """Whether a GPU multiplies in TF32."""
    return torch.cuda.get_device_capability(device)[0] >= 8


def bytes_of(tile: Tile, heads: int, grouped: bool, width: int, size: int) -> int:
    """Bytes of shared memory that `carry_down` takes at most: queries, keys, rows and probabilities.

    Args:
        tile: one of `TILES`.
        heads: of a unit.
        grouped: whether they share their keys.
        width: of a head, a power of two.
        size: bytes of a number of queries and keys.
    """
    queries, keys, _, stages = tile
    loaded = (keys if grouped else heads * keys) * width + stages * heads * queries * width
    rows = ROWS_AT_ONCE * queries
    summed = 3 * rows if size < 4 else rows + queries * keys
    return size * loaded + 4 * summed + 4 * stages * heads * queries


@lru_cache(MOST)
def tile_of(heads: int, group: int, width: int, size: int, shared: int) -> tuple[Tile, int] | None:
    """The tile that fits this many bytes, and the heads of a unit; None if none does.

    Args:
        heads: most heads of a unit.
        group: heads that share their keys.
        width: of a head, a power of two.
        size: bytes of a number of queries and keys.
        shared: bytes of shared memory.
    """
    # Products of float32 are written out number by number: larger programs take minutes to compile.
    large = size < 4 or INTERPRETED
    units = [unit for unit in UNITS if unit <= (heads if large else 1)]
    choices = [(tile, unit) for unit in units for tile in TILES if large or tile[1] < 128]
    for tile, unit in (*choices, *((tile, 1) for tile in SMALL_TILES)):
        if bytes_of(tile, unit, group % unit == 0, width, size) <= shared:
            return tile, unit
    return None


@lru_cache(MOST)
def _ready_sums(
    integers: tuple[int, ...], batch: int, tile: Tile, constants: tuple[tuple[str, int], ...]
) -> Ready:
    queries, chosen = integers[0], integers[3]
    grid = blocks(queries, tile[0]), batch * chosen, 1
    return Ready(row_sums, grid, integers, dict(constants), warps=tile[2])


@lru_cache(MOST)
def _ready_rows(
    integers: tuple[int, ...],
    batch: int,
    units: int,
    tile: Tile,
    constants: tuple[tuple[str, int | str], ...],
) -> Ready:
    queries, keys = integers[:2]
    tiles = blocks(keys, tile[1])
    pieces = max(blocks(PROGRAMS, tiles * batch * units), blocks(queries, MOST_QUERIES))
    span = blocks(blocks(queries, pieces), tile[0]) * tile[0]
    pieces = blocks(queries, span)
    grid = tiles, batch * units * pieces, 1
    integers = *integers, span, pieces, units
    return Ready(carry_down, grid, integers, dict(constants), warps=tile[2], stages=tile[3])


@lru_cache(MOST)
def _on(device: torch.device, numbers: tuple[int, ...]) -> Tensor:
    """Numbers on a device, copied there once."""
    return torch.tensor(numbers, device=device)


@lru_cache(MOST)
def most_of_unit(heads: tuple[int, ...]) -> int:
    """How many heads a unit may have, which follow one another and begin at a multiple of their number."""
    for size in UNITS:
        runs = [heads[start : start + size] for start in range(0, len(heads), size)]
        if all(run[0] % size == 0 and run == tuple(range(run[0], run[0] + size)) for run in runs):
            return size
    raise AssertionError("each head is a unit")


def _tile_for(asked: Asked, heads: tuple[int, ...]) -> tuple[Tile, int] | None:
    """The tile for some heads of an attention, and the heads of a unit; None if none fits its device."""
    query = asked.query
    group = asked.shape[1] // asked.key.shape[1]
    shared = shared_memory(query.device)
    return tile_of(most_of_unit(heads), group, power_of_two(query.shape[-1]), query.element_size(), shared)


class Tiles:
    """The kernels for one attention and some of its heads.

    Args:
        asked: queries, keys and mask, without a bias, on one device.
        heads: the heads.
    """

    def __init__(self, asked: Asked, heads: tuple[int, ...]) -> None:
        sight = asked.sight
        query, key = _rows_whole(asked.query), _rows_whole(asked.key)
        padded = sight.keys is not None
        real = torch.empty(1, dtype=torch.uint8, device=query.device)
        if sight.keys is not None:
            real = sight.keys.to(query.device, torch.uint8).expand(len(query), -1).contiguous()
        chosen = _on(query.device, heads)
        group = asked.shape[1] // key.shape[1]
        found = _tile_for(asked, heads)
        assert found is not None  # `has_room` is asked first
        self.tile, unit = found
        self.firsts = _on(query.device, heads[::unit])
        split = query.dtype != torch.float32 and not INTERPRETED and has_tf32(query.device)
        self.of_units = (
            ("HEADS", unit),
            ("GROUPED", int(group % unit == 0)),
            ("PRECISION", "tf32x3" if split else "ieee"),
        )
        self.known = None
        if asked.sums is not None:
            every = heads == tuple(range(asked.shape[1]))
            self.known = (asked.sums if every else asked.sums[:, chosen]) * LOG2E
        self.tensors = query, key, real, chosen
        self.shape, self.chosen = asked.shape, len(heads)
        self.scale = asked.scale * LOG2E
        near = NO_WINDOW if sight.window is None else A_WINDOW
        near = near if sight.chunk is None else CHUNKS
        queries, keys = asked.shape[2:]
        self.integers = (
            queries, keys, query.shape[-1], len(heads), group, sight.offset,
            sight.window or sight.chunk or 0, *query.stride()[:3], *key.stride()[:3],
        )  # fmt: skip
        self.constants = (
            ("WIDTH", power_of_two(query.shape[-1])),
            ("CAUSAL", int(sight.causal)),
            ("WINDOW", near),
            ("PADDED", int(padded)),
            ("BLOCK_Q", self.tile[0]),
            ("BLOCK_K", self.tile[1]),
        )

    def sums(self) -> Tensor:
        """Log-sum-exp in units of log 2, float32 (batch, head, query); ∞ where a query sees no key."""
        if self.known is not None:
            return self.known
        batch, _, queries, _ = self.shape
        out = torch.empty(batch, self.chosen, queries, device=self.tensors[0].device)
        ready = _ready_sums(self.integers, batch, self.tile, self.constants)
        ready.run((*self.tensors, out), (self.scale,))
        return out

    def apply(self, rows: Tensor, sums: Tensor, factor: float = 1.0) -> Tensor:
        """Rows (batch, row, query) times the mean of the heads' maps, float64 (batch, row, key).

        Args:
            rows: any type; they are multiplied in float32.
            sums: from `sums`.
            factor: of the result.
        """
        batch, _, _, keys = self.shape
        parts = []
        for start in range(0, rows.shape[1], ROWS_AT_ONCE):
            part = rows[:, start : start + ROWS_AT_ONCE].float().contiguous()
            count = part.shape[1]
            constants = *self.constants, ("ROWS", power_of_two(count)), *self.of_units
            ready = _ready_rows(self.integers, batch, len(self.firsts), self.tile, constants)
            pieces = ready.integers[-2]
            out = torch.empty(batch, len(self.firsts) * pieces, count, keys, device=part.device)
            ready.run((*self.tensors[:3], self.firsts, sums, part, out), (self.scale,), (count,))
            parts.append(out.sum(dim=1, dtype=torch.float64).mul_(factor / self.chosen))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def has_room(asked: Asked) -> bool:
    """Whether the device's shared memory has room for the kernels, whichever the heads."""
    return _tile_for(asked, (0,)) is not None


def _rows_whole(x: Tensor) -> Tensor:
    """With the cells of a row next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()
