"""Levels made from states: queries and keys, whose map is computed in blocks and never held whole.

A row over the nodes above a level goes down by one pass over blocks of queries. A block's weights are
averaged over heads before they multiply the rows, so that any number of rows costs one product of queries and
keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overt.mechanisms.backend import KERNELS, switched_off, unfit
from overt.tracing.asked import HIDDEN, Asked, Sight
from overt.tracing.options import Heads

MOST_WIDTH = 256  # of a head, for kernels
MOST_ROWS = 128  # of a block: under a causal mask, larger ones compute more cells that are hidden
BLOCK_CELLS = {"cpu": 2**21, "cuda": 2**26}  # of the scores held at once


@dataclass(frozen=True, eq=False)
class Place:
    """Where an attention's map lies in a level, and what is added to it.

    Attributes:
        nodes: number of the level's nodes, above and below.
        query: the node that is query 0.
        count: number of queries.
        key: the node that is key 0.
        residual: weight of the residual connection.
        passing: weight of the edges of nodes that are no queries.
    """

    nodes: int
    query: int
    count: int
    key: int
    residual: float
    passing: float = 1.0

    def share(self, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of a query's weights and of its residual, by the sum of its weights: rows sum to one."""
        total = (1.0 - self.residual) * mass + self.residual
        if self.residual == 0.0:
            total = torch.where(total == 0.0, 1.0, total)
        return (1.0 - self.residual) / total, self.residual / total

    def rows(self, places: Sequence[int], weights: Tensor) -> Tensor:
        """Rows of the nodes at these places, from the weights of those that are queries, in order."""
        device, count = weights.device, weights.shape[-2]
        own, kept = self.share(weights.sum(dim=-1, keepdim=True))
        if self.is_whole(weights.shape[-1]) and count == len(places) and _is_run(places):
            out = own * weights
            out.diagonal(places[0], dim1=-2, dim2=-1).add_(kept.squeeze(-1))
            return out
        at = torch.tensor(list(places), dtype=torch.int64, device=device)
        numbers = torch.arange(len(at), device=device)
        mine = torch.tensor([number for number, place in enumerate(places) if self.is_query(place)])
        assert len(mine) == count
        mine = mine.to(device, torch.int64)
        out = weights.new_zeros(*weights.shape[:-2], len(at), self.nodes)
        out[..., mine, self.key : self.key + weights.shape[-1]] = own * weights
        itself = weights.new_full((*weights.shape[:-2], len(at)), self.passing)
        itself[..., mine] = kept.squeeze(-1)
        out[..., numbers, at] += itself
        return out

    def is_whole(self, keys: int) -> bool:
        """Whether every node is a query, and a key."""
        return self.query == self.key == 0 and self.count == self.nodes == keys

    def is_query(self, place: int) -> bool:
        """Whether a node is a query."""
        return 0 <= place - self.query < self.count

    def queries(self, places: Sequence[int]) -> list[int]:
        """Numbers of those places that are queries."""
        return [place - self.query for place in places if self.is_query(place)]

    def passed(self, rows: Tensor) -> Tensor:
        """Rows below the level before any attention: what nodes that are no queries pass on."""
        out = rows.double() * self.passing if self.passing != 1.0 else rows.double().clone()
        out[..., self.query : self.query + self.count] = 0.0
        return out


class Room:
    """Memory for one tile after another; asking the system for it each time would take longer."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def of(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of this shape, whose values are arbitrary, in the memory of this name."""
        count = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < count:
            held = self._held[name] = like.new_empty(count)
        return held[:count].view(shape)


@dataclass(frozen=True, eq=False)
class StateLevel:
    """A level whose map is computed from queries and keys as it is used, in float32 or their wider type.

    Attributes:
        asked: queries, keys and mask.
        heads: which heads to average, or "each", which has rows only.
        place: where the map lies in a level; None for the weights alone, whose nodes are queries and keys.
        real: boolean (batch, query) and (batch, key), False at padding; None where all are tokens.
        block: most cells of the scores that are held at once; None for the device's default.
    """

    asked: Asked
    heads: Heads = "mean"
    place: Place | None = None
    real: tuple[Tensor, Tensor] | None = None
    block: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic."""
        return torch.promote_types(self.asked.query.dtype, torch.float32)

    def row(self, places: Sequence[int]) -> Tensor:
        """Rows of the map, float64 (batch, [head,] place, token)."""
        place = self.place
        queries = list(places) if place is None else place.queries(places)
        size = self._size(0, self.asked.shape[3])
        batch, heads, _, keys = self.asked.shape
        parts = []
        for start in range(0, len(queries), size):
            some = queries[start : start + size]
            at = torch.tensor(some)
            low, high = key_range(self.asked.sight, min(some), max(some) + 1, keys)
            if batch * heads * len(some) * (high - low) <= self._most_cells:
                weights = self._chosen(self._at_once(at, low, high))
            else:
                tiles = self._tiles(at, low, high)
                weights = torch.cat(list(tiles), dim=1) if self._each else self._mean(tiles)
            weights = self._without_padding(weights, at, low, high).double()
            if high - low < keys:
                weights = torch.nn.functional.pad(weights, (low, keys - high))
            parts.append(weights)
        if not parts:
            shape = (batch, heads, 0, keys) if self._each else (batch, 0, keys)
            parts = [torch.empty(shape, dtype=torch.float64, device=self.asked.query.device)]
        weights = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        return weights if place is None else place.rows(places, weights)

    def cells(self) -> Tensor:
        """The whole map, (batch, [head,] query, key) in the type of the arithmetic, without a place."""
        batch, heads, queries, keys = self.asked.shape
        device = self.asked.query.device
        if batch * heads * queries * keys <= self._most_cells:
            return self._chosen(self._at_once(torch.arange(queries), 0, keys))
        shape = (batch, heads, queries, keys) if self._each else (batch, queries, keys)
        out = torch.zeros(shape, dtype=self.dtype, device=device)
        room = Room()
        for start, stop, low, high in self.blocks():
            tiles = self._tiles(torch.arange(start, stop), low, high, room)
            if not self._each:
                out[:, start:stop, low:high] = self._mean(tiles)
                continue
            for (_, members), tile in zip(self.members(), tiles, strict=True):
                out[:, members[0] : members[-1] + 1, start:stop, low:high] = tile
        return out

    def _at_once(self, at: Tensor, low: int, high: int) -> Tensor:
        """Weights of some queries and of all heads, (batch, head, query, key), in one product.

        Args:
            at: places of the queries.
            low: first key that any of them sees.
            high: one after the last.
        """
        asked, sight = self.asked, self.asked.sight
        batch, heads, _, _ = asked.shape
        device = asked.query.device
        key = asked.key[:, :, low:high].to(self.dtype)
        where = _where(at.tolist(), device)
        query = asked.query[:, :, where]
        query = (query.to(self.dtype) * asked.scale).reshape(batch, key.shape[1], -1, key.shape[-1])
        scores = (query @ key.mT).view(batch, heads, len(at), high - low)
        if sight.bias is not None:
            scores += _bias(sight.bias, None, where, low, high).to(self.dtype)
        hidden = _hidden(sight, at, low, high, device)
        if hidden is not None:
            start, cells = hidden
            scores[..., start:].masked_fill_(cells, HIDDEN)
        weights = scores.softmax(dim=-1)
        if _may_be_blind(asked) and high > low:
            weights.masked_fill_(scores.amax(dim=-1, keepdim=True) == HIDDEN, 0.0)
        return weights

    def _chosen(self, weights: Tensor) -> Tensor:
        """Weights of all heads averaged over the chosen ones, (batch, query, key), or as they are."""
        if self._each:
            return weights
        return (
            weights.mean(dim=1) if isinstance(self.heads, str) else weights[:, list(self.heads)].mean(dim=1)
        )

    def apply(self, rows: Tensor) -> Tensor:
        """Rows over this level's nodes carried down, float64 (batch, row, token)."""
        if self._each:
            raise ValueError('heads="each" has rows only: go down through the averaged heads')
        place = self.place
        device = self.asked.query.device
        first, base = (0, 0) if place is None else (place.query, place.key)
        rows = rows.to(device)
        if self._unfit() is None:
            return self._by_kernels(rows)
        out = self._passed(rows)
        room = Room()
        for start, stop, low, high in self.blocks():
            part = rows[..., first + start : first + stop].double()
            if device.type == "cpu" and not bool(part.any()):
                continue  # nothing comes down to these queries
            at = torch.arange(start, stop)
            tile = self._without_padding(self._mean(self._tiles(at, low, high, room)), at, low, high)
            if place is not None:
                own, kept = place.share(tile.sum(dim=-1, dtype=torch.float64).unsqueeze(1))
                out[..., first + start : first + stop] += kept * part
                part = own * part
            out[..., base + low : base + high] += part @ tile.double()
        return out

    def _passed(self, rows: Tensor) -> Tensor:
        """Rows below before any attention, float64 (batch, row, token)."""
        if self.place is not None:
            return self.place.passed(rows)
        return rows.new_zeros(*rows.shape[:-1], self.asked.shape[3], dtype=torch.float64)

    def _unfit(self) -> str | None:
        """Why kernels do not run; None if they do."""
        asked, sight = self.asked, self.asked.sight
        if sight.bias is not None:
            return "a bias"
        if self.real is not None:
            hidden = torch.zeros_like(self.real[1]) if sight.keys is None else ~sight.keys.cpu()
            if not bool((self.real[1] | hidden).all()):
                return "padding that is seen"
        if asked.query.shape[-1] > MOST_WIDTH or asked.query.dtype != asked.key.dtype:
            return "wide heads, or queries and keys of different types"
        if any(x.stride(2) * x.shape[2] >= 2**31 for x in (asked.query, asked.key)):
            return "more than 32 bits can address"
        if (reason := unfit(KERNELS, asked.query, asked.key, off=switched_off())) is not None:
            return reason
        from overt.tracing.kernels.carry import has_room

        return None if has_room(asked) else "more shared memory than the GPU has"

    def _all_see(self) -> bool:
        """Whether every query is a token, and sees a key."""
        return self.real is None and not _may_be_blind(self.asked)

    def _by_kernels(self, rows: Tensor) -> Tensor:
        """`apply` on a GPU: rows sum to one but for rounding, so sums of weights are not needed."""
        from overt.tracing.kernels.carry import Tiles

        asked, place = self.asked, self.place
        tiles = Tiles(asked, tuple(head for _, heads in self.members() for head in heads))
        sums = tiles.sums()
        if place is not None and place.is_whole(asked.shape[3]) and self._all_see():
            return tiles.apply(rows, sums, 1.0 - place.residual).add_(rows, alpha=place.residual)
        out = self._passed(rows)
        mass = (sums[:, :1] != float("inf")).double()  # (batch, 1, query): whether any key is seen
        if self.real is not None:
            mass = mass * self.real[0].to(mass.device).unsqueeze(1)
        count, keys = asked.shape[2:]
        first, base = (0, 0) if place is None else (place.query, place.key)
        part = rows[..., first : first + count].double()
        if place is None:
            part = part * mass
        else:
            own, kept = place.share(mass)
            out[..., first : first + count] += kept * part
            part = own * mass * part
        out[..., base : base + keys] += tiles.apply(part, sums)
        return out

    @property
    def _each(self) -> bool:
        return isinstance(self.heads, str) and self.heads == "each"

    def members(self) -> list[tuple[int, list[int]]]:
        """Each key head with the chosen heads that it serves."""
        heads = self.asked.shape[1]
        group = heads // self.asked.key.shape[1]
        chosen = range(heads) if isinstance(self.heads, str) else [head % heads for head in self.heads]
        served: dict[int, list[int]] = {}
        for head in chosen:
            served.setdefault(head // group, []).append(head)
        return list(served.items())

    def blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Blocks of queries with the range of keys that any of them sees: start, stop, low, high."""
        _, _, queries, keys = self.asked.shape
        start = 0
        while start < queries:
            stop = start + 1
            for _ in range(2):  # more queries may see more keys
                stop = min(start + self._size(*key_range(self.asked.sight, start, stop, keys)), queries)
            low, high = key_range(self.asked.sight, start, stop, keys)
            yield start, stop, low, high
            start = stop

    @property
    def _most_cells(self) -> int:
        """Of the scores that are held at once."""
        return self.block or BLOCK_CELLS.get(self.asked.query.device.type, BLOCK_CELLS["cuda"])

    def _size(self, low: int, high: int) -> int:
        """How many queries a block has, by the keys that they see."""
        cells = self._most_cells
        most = max(len(heads) for _, heads in self.members())
        size = max(1, cells // (self.asked.shape[0] * most * max(1, high - low)))
        return size if size < 16 else min(size // 16 * 16, MOST_ROWS)

    def _mean(self, tiles: Iterator[Tensor]) -> Tensor:
        total: Tensor | None = None
        for tile in tiles:
            for head in tile.unbind(dim=1):
                total = head.clone() if total is None else total.add_(head)
        assert total is not None
        return total.div_(sum(len(heads) for _, heads in self.members()))

    def _without_padding(self, weights: Tensor, queries: Tensor, low: int, high: int) -> Tensor:
        """Weights (batch, [head,] query, key) with zeros at padding."""
        if self.real is None:
            return weights
        rows, columns = (real.to(weights.device) for real in self.real)
        both = rows[:, queries.to(weights.device), None] & columns[:, None, low:high]
        return weights.mul_(both if weights.dim() == 3 else both.unsqueeze(1))

    def _tiles(self, queries: Tensor, low: int, high: int, lasting: Room | None = None) -> Iterator[Tensor]:
        """The heads of each key head, one after another: weights of some queries, (batch, head, query, key).

        Args:
            queries: their places, at least one.
            low: first key that any of them sees.
            high: one after the last.
            lasting: room for the tiles, each of which is then gone with the next.
        """
        asked, sight = self.asked, self.asked.sight
        device = asked.query.device
        hidden = _hidden(sight, queries, low, high, device)
        where = _where(queries.tolist(), device)
        for key_head, heads in self.members():
            adjacent = heads == list(range(heads[0], heads[-1] + 1))
            which = slice(heads[0], heads[-1] + 1) if adjacent else heads
            query = asked.query[:, :, where][:, which].to(self.dtype) * asked.scale
            key = asked.key[:, key_head, low:high].to(self.dtype)
            shape = *query.shape[:3], high - low
            room = lasting or Room()
            scores = room.of("scores", shape, query)
            torch.bmm(query.flatten(1, 2), key.mT, out=scores.flatten(1, 2))
            if sight.bias is not None:
                scores += _bias(sight.bias, heads, where, low, high).to(self.dtype)
            if hidden is not None:
                start, cells = hidden
                scores[..., start:].masked_fill_(cells, HIDDEN)
            weights = torch.softmax(scores, dim=-1, out=room.of("weights", shape, query))
            if _may_be_blind(asked):
                blind = scores.amax(dim=-1, keepdim=True) == HIDDEN if high > low else None
                weights = weights if blind is None else weights.masked_fill_(blind, 0.0)
            yield weights


def _may_be_blind(asked: Asked) -> bool:
    """Whether there may be queries that see no key."""
    sight, (_, _, queries, keys) = asked.sight, asked.shape
    near = sight.window is not None or sight.chunk is not None
    return (
        sight.keys is not None
        or sight.bias is not None
        or sight.offset < 0
        or (near and queries + sight.offset > keys)
    )


def _is_run(places: Sequence[int]) -> bool:
    """Whether places follow one another."""
    return list(places) == list(range(places[0], places[0] + len(places)))


def _where(places: list[int], device: torch.device) -> slice | Tensor:
    """An index of places, at least one; a slice, which needs no copy to a GPU, where that will do."""
    if _is_run(places):
        return slice(places[0], places[0] + len(places))
    return torch.tensor(places, device=device)


def key_range(sight: Sight, start: int, stop: int, keys: int) -> tuple[int, int]:
    """The keys that any of some consecutive queries may see: first, and one after the last."""
    high = min(keys, max(0, stop + sight.offset)) if sight.causal else keys
    low = 0 if sight.window is None else start + sight.offset - sight.window + 1
    if sight.chunk is not None:
        low = (start + sight.offset) // sight.chunk * sight.chunk
    return min(high, max(0, low)), high


def _hidden(
    sight: Sight, queries: Tensor, low: int, high: int, device: torch.device
) -> tuple[int, Tensor] | None:
    """Cells that are hidden, boolean (batch or 1, 1, query, key from a start on), and that start."""
    start = low
    if sight.causal and sight.window is None and sight.chunk is None and sight.keys is None:
        # Only keys that come after the first query are hidden from any of them.
        start = max(low, min(high, int(queries.min()) + sight.offset + 1))
        if start == high:
            return None
    seen = sight.shown(queries.to(device), torch.arange(start, high, device=device))
    return None if seen is None else (start - low, ~seen)


def _bias(bias: Tensor, heads: list[int] | None, queries: slice | Tensor, low: int, high: int) -> Tensor:
    part = bias[:, heads] if heads is not None and bias.shape[1] > 1 else bias
    part = part[:, :, queries] if bias.shape[2] > 1 else part
    return part[..., low:high]


@dataclass(frozen=True, eq=False)
class Uniform:
    """What stands for a map in which all that a query may see has equal weights.

    Attributes:
        sight: what each query sees, without a bias.
        shape: of the map, (batch, query, key).
    """

    sight: Sight
    shape: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class UniformLevel:
    """A level of queries that attend equally to all that they may see; sums take the place of maps.

    Attributes:
        sight: what each query sees, without a bias.
        shape: (query, key).
        real: boolean (batch, query) and (batch, key).
        place: as in `StateLevel`.
    """

    sight: Sight
    shape: tuple[int, int]
    real: tuple[Tensor, Tensor]
    place: Place | None = None

    def row(self, places: Sequence[int]) -> Tensor:
        """Rows of the map, float64 (batch, place, token)."""
        keys = self.shape[1]
        queries = list(places) if self.place is None else self.place.queries(places)
        rows = self.real[0]
        at = torch.tensor(queries, dtype=torch.int64)
        seen = replace(self.sight, keys=self._keys()).shown(at, torch.arange(keys))
        assert seen is not None
        cells = (seen[:, 0] & rows[:, at, None]).double().expand(len(rows), -1, -1)
        weights = cells / cells.sum(dim=-1, keepdim=True).clamp(min=1.0)
        return weights if self.place is None else self.place.rows(places, weights)

    def apply(self, rows: Tensor) -> Tensor:
        """Rows carried down by sums over the queries that see each key, float64 (batch, row, token)."""
        place, (count, keys) = self.place, self.shape
        assert place is not None
        rows = rows.cpu()
        real, columns = self.real[0], self._keys()
        counts = self._counts(columns)
        mass = ((counts > 0) & real).double()
        own, kept = place.share(mass)
        inside = rows[..., place.query : place.query + count].double()
        out = place.passed(rows)
        out[..., place.query : place.query + count] += kept.unsqueeze(1) * inside
        each = (own * mass / counts.clamp(min=1)).unsqueeze(1) * inside
        below = self._received(each) * columns.unsqueeze(1)
        out[..., place.key : place.key + keys] += below
        return out

    def _keys(self) -> Tensor:
        columns = self.real[1]
        return columns if self.sight.keys is None else columns & self.sight.keys.cpu()

    def _counts(self, columns: Tensor) -> Tensor:
        """How many keys each query sees, (batch, query)."""
        count, keys = self.shape
        before = torch.nn.functional.pad(columns.long().cumsum(dim=-1), (1, 0))
        last = torch.arange(count) + self.sight.offset + 1
        high = last.clamp(0, keys) if self.sight.causal else torch.full((count,), keys)
        low = torch.zeros_like(high)
        if self.sight.window is not None:
            low = torch.minimum((last - self.sight.window).clamp(min=0), high)
        elif self.sight.chunk is not None:
            start = (last - 1) // self.sight.chunk * self.sight.chunk
            low = torch.minimum(start.clamp(min=0), high)
        return before[:, high] - before[:, low]

    def _received(self, each: Tensor) -> Tensor:
        """What each key receives if every query gives this to each key that it sees, (batch, row, key).

        Only additions, so that the small values of far tokens keep their digits.
        """
        count, keys = self.shape
        sight = self.sight
        if not sight.causal:
            return each.sum(dim=-1, keepdim=True).expand(*each.shape[:-1], keys)
        length = max(keys, count + sight.offset)
        at = torch.arange(count) + sight.offset  # the last key that each query sees
        given = each.new_zeros(*each.shape[:-1], length)
        given[..., at[at >= 0]] = each[..., at >= 0]
        if sight.chunk is not None:
            padded = torch.nn.functional.pad(given, (0, -length % sight.chunk))
            cut = padded.view(*given.shape[:-1], -1, sight.chunk)
            return cut.flip(-1).cumsum(dim=-1).flip(-1).flatten(-2)[..., :keys]
        if sight.window is None or sight.window >= length:
            return given.flip(-1).cumsum(dim=-1).flip(-1)[..., :keys]
        window = sight.window
        pieces = -(-length // window) + 1
        filled = torch.nn.functional.pad(given, (0, pieces * window - length))
        cut = filled.view(*given.shape[:-1], pieces, window)
        after = cut.flip(-1).cumsum(dim=-1).flip(-1).flatten(-2)[..., :keys]
        before = torch.nn.functional.pad(cut.cumsum(dim=-1), (1, 0))[..., :window].flatten(-2)
        # Of the window that starts at a key: the rest of its piece, then the beginning of the next one.
        return after + before[..., window : window + keys]


def uniform_of(held: Asked | Uniform) -> Uniform:
    """Uniform attention under the same mask; refused where the mask is not in parts."""
    sight = held.sight
    if sight.bias is not None or not (sight.causal or (sight.window is None and sight.chunk is None)):
        raise ValueError(
            "receptive_field needs masks of padding, causality, windows and chunks in a trace of states: "
            "this one has others; trace with a larger memory=… to keep maps"
        )
    return Uniform(sight, (held.shape[0], held.shape[-2], held.shape[-1]))


def moved(asked: Asked, device: torch.device | str) -> Asked:
    """The same queries, keys and mask on a device."""
    sight = replace(
        asked.sight,
        keys=None if asked.sight.keys is None else asked.sight.keys.to(device),
        bias=None if asked.sight.bias is None else asked.sight.bias.to(device),
    )
    sums = None if asked.sums is None else asked.sums.to(device)
    return replace(asked, query=asked.query.to(device), key=asked.key.to(device), sight=sight, sums=sums)


def examples_of(asked: Asked, rows: slice | list[int]) -> Asked:
    """Some of the examples."""
    batch, sight = asked.shape[0], asked.sight

    def cut(value: Tensor | None) -> Tensor | None:
        return value if value is None or value.shape[0] != batch else value[rows]

    sight = replace(sight, keys=cut(sight.keys), bias=cut(sight.bias))
    return replace(asked, query=asked.query[rows], key=asked.key[rows], sight=sight, sums=cut(asked.sums))
