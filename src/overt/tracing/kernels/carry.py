"""A level of states on a GPU: rows carried down through attention that is computed tile by tile.

The first kernel makes each row's log-sum-exp, unless the model's own attention left it. The second computes
the scores: a program has one tile of keys, goes over the queries that see them, sums a tile's probabilities
over heads, and multiplies that sum with all rows once. Exponents are in units of log 2.
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

LOG2E = 1.4426950408889634
# Queries and keys of a tile, and the warps of its program; the first that a GPU's shared memory has room for.
TILES = ((32, 16, 4),) if INTERPRETED else ((128, 64, 8), (64, 64, 8), (64, 32, 4), (32, 32, 4), (32, 16, 4))
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


@triton.jit
def carry_down(
    query, key, keys_real, heads, lse, rows, out, scale, queries, keys, width, chosen, group, offset, window,
    query_batch, query_head, query_row, key_batch, key_head_stride, key_row, count, span, pieces,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows times the sum of some heads' maps.

    Args:
        query: this and the following as in `row_sums`.
        key: keys.
        keys_real: uint8 (batch, key).
        heads: int64 (chosen,).
        lse: float32 (batch, chosen, query), from `row_sums`.
        rows: float32 (batch, count, query).
        out: float32 (batch, pieces, count, key).
        scale: of the products.
        count: number of rows.
        span: queries of a piece, a multiple of BLOCK_Q.
        pieces: number of pieces.
        ROWS: power of two, at least `count`.
    """
    example = (tl.program_id(1) // pieces).to(tl.int64)
    piece = tl.program_id(1) % pieces
    first = tl.program_id(0) * BLOCK_K
    column = first + tl.arange(0, BLOCK_K)
    low, high = piece * span, tl.minimum(piece * span + span, queries)
    if CAUSAL:  # queries that come before these keys do not see them
        low = tl.maximum(low, tl.maximum(0, first - offset) // BLOCK_Q * BLOCK_Q)
    if WINDOW == 1:
        high = tl.minimum(high, tl.maximum(0, first + BLOCK_K - 1 + window - offset))
    if WINDOW == 2:  # up to the end of the last key's chunk
        high = tl.minimum(high, tl.maximum(0, (first + BLOCK_K - 1) // window * window + window - offset))
    which = tl.arange(0, ROWS)
    held = tl.zeros((ROWS, BLOCK_K), tl.float32)
    for start in range(low, high, BLOCK_Q):
        row = start + tl.arange(0, BLOCK_Q)
        summed = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
        for number in range(0, chosen):
            head = tl.load(heads + number)
            scores = _scores(
                query, key, keys_real, example, head, head // group, row, column, queries, keys, width, scale,
                offset, window, query_batch, query_head, query_row, key_batch, key_head_stride, key_row,
                WIDTH, CAUSAL, WINDOW, PADDED,
            )  # fmt: skip
            place = (example * chosen + number) * queries + row
            below = tl.load(lse + place, mask=row < queries, other=NOWHERE)
            summed += tl.exp2(scores - below[:, None])
        at = rows + (example * count + which[:, None]) * queries + row[None, :]
        part = tl.load(at, mask=(which[:, None] < count) & (row[None, :] < queries), other=0.0)
        held += tl.dot(part, summed, input_precision="ieee")
    at = out + ((example * pieces + piece) * count + which[:, None]) * keys + column[None, :]
    tl.store(at, held, mask=(which[:, None] < count) & (column[None, :] < keys))


@lru_cache(MOST)
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take on a device."""
    if device.type != "cuda":
        return SHARED
    number = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(number)["max_shared_mem"])


@lru_cache(MOST)
def tile_of(width: int, shared: int) -> tuple[int, int, int] | None:
    """Queries, keys and warps of the largest tile that fits this many bytes; None if none does.

    Args:
        width: of a head, a power of two.
        shared: bytes of shared memory.
    """
    for queries, keys, warps in TILES:
        # Queries and keys, then rows, lie there beside the summed probabilities.
        if 4 * (max((queries + keys) * width, ROWS_AT_ONCE * queries) + queries * keys) <= shared:
            return queries, keys, warps
    return None


@lru_cache(MOST)
def _ready_sums(
    integers: tuple[int, ...], batch: int, tile: tuple[int, int, int], constants: tuple[tuple[str, int], ...]
) -> Ready:
    queries, chosen = integers[0], integers[3]
    grid = blocks(queries, tile[0]), batch * chosen, 1
    return Ready(row_sums, grid, integers, dict(constants), warps=tile[2])


@lru_cache(MOST)
def _ready_rows(
    integers: tuple[int, ...],
    batch: int,
    count: int,
    tile: tuple[int, int, int],
    constants: tuple[tuple[str, int], ...],
) -> Ready:
    queries, keys = integers[:2]
    tiles = blocks(keys, tile[1])
    pieces = max(blocks(PROGRAMS, tiles * batch), blocks(queries, MOST_QUERIES))
    span = blocks(blocks(queries, pieces), tile[0]) * tile[0]
    pieces = blocks(queries, span)
    constants = *constants, ("ROWS", power_of_two(count))
    grid = tiles, batch * pieces, 1
    return Ready(carry_down, grid, (*integers, count, span, pieces), dict(constants), warps=tile[2])


class Tiles:
    """The kernels for one attention and some of its heads.

    Args:
        asked: queries, keys and mask, without a bias, on one device.
        heads: the heads.
    """

    def __init__(self, asked: Asked, heads: list[int]) -> None:
        sight = asked.sight
        query, key = _rows_whole(asked.query), _rows_whole(asked.key)
        padded = sight.keys is not None
        real = torch.empty(1, dtype=torch.uint8, device=query.device)
        if sight.keys is not None:
            real = sight.keys.to(query.device, torch.uint8).expand(len(query), -1).contiguous()
        chosen = torch.tensor(heads, device=query.device)
        self.known = None if asked.sums is None else asked.sums[:, chosen] * LOG2E
        self.tensors = query, key, real, chosen
        self.shape, self.chosen = asked.shape, len(heads)
        self.scale = asked.scale * LOG2E
        near = NO_WINDOW if sight.window is None else A_WINDOW
        near = near if sight.chunk is None else CHUNKS
        _, all_heads, queries, keys = asked.shape
        self.integers = (
            queries, keys, query.shape[-1], len(heads), all_heads // key.shape[1], sight.offset,
            sight.window or sight.chunk or 0, *query.stride()[:3], *key.stride()[:3],
        )  # fmt: skip
        width = power_of_two(query.shape[-1])
        tile = tile_of(width, shared_memory(query.device))
        assert tile is not None  # `has_room` is asked first
        self.tile = tile
        self.constants = (
            ("WIDTH", width),
            ("CAUSAL", int(sight.causal)),
            ("WINDOW", near),
            ("PADDED", int(padded)),
            ("BLOCK_Q", tile[0]),
            ("BLOCK_K", tile[1]),
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

    def apply(self, rows: Tensor, sums: Tensor) -> Tensor:
        """Rows (batch, row, query) times the mean of the heads' maps, float64 (batch, row, key).

        Args:
            rows: any type; they are multiplied in float32.
            sums: from `sums`.
        """
        batch, _, _, keys = self.shape
        parts = []
        for start in range(0, rows.shape[1], ROWS_AT_ONCE):
            part = rows[:, start : start + ROWS_AT_ONCE].float().contiguous()
            count = part.shape[1]
            ready = _ready_rows(self.integers, batch, count, self.tile, self.constants)
            out = torch.empty(batch, ready.integers[-1], count, keys, device=part.device)
            ready.run((*self.tensors, sums, part, out), (self.scale,))
            parts.append(out.sum(dim=1, dtype=torch.float64).div_(self.chosen))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def has_room(asked: Asked) -> bool:
    """Whether the device's shared memory has room for the kernels."""
    width = power_of_two(asked.query.shape[-1])
    return tile_of(width, shared_memory(asked.query.device)) is not None


def _rows_whole(x: Tensor) -> Tensor:
    """With the cells of a row next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()
