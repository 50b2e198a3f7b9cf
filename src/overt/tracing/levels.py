"""Attention maps, or the states that they are made from, as a layered graph that methods run over.

A level holds the edges from the nodes of one level to those of the level below; the inputs are level 0. An
encoder's or a decoder's layer is one level. An encoder–decoder has its encoder's levels first and then two
per decoder layer, self-attention and cross-attention; nodes that a level does not touch pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from overt.tracing.asked import Asked
from overt.tracing.options import CELL, Heads, check_bytes

if TYPE_CHECKING:
    from overt.tracing.states import Uniform

Held: TypeAlias = "Tensor | Asked | Uniform"  # a layer's map, or what it is made from


class Level(Protocol):
    """One level's edges as an operator: methods use rows and products, not the whole map."""

    def row(self, places: Sequence[int]) -> Tensor:
        """What the nodes at these places draw on below, (batch, [head,] place, token)."""
        ...

    def apply(self, rows: Tensor) -> Tensor:
        """Rows over this level's nodes carried down to the level below, (batch, …, token)."""
        ...


@dataclass(frozen=True, eq=False)
class MapLevel:
    """A level whose edges are a map in memory, (batch, [head,] node, token)."""

    cells: Tensor

    def row(self, places: Sequence[int]) -> Tensor:
        """Rows of the map, which is not copied where all are asked for."""
        whole = places == range(self.cells.shape[-2])
        return self.cells if whole else self.cells[..., list(places), :]

    def apply(self, rows: Tensor) -> Tensor:
        """A product with the map, where it is; rows of levels of states are on the model's device."""
        return rows.to(self.cells.device) @ self.cells


@dataclass(frozen=True, eq=False)
class JoinedLevel:
    """Levels of the same nodes above, whose nodes below stand side by side; rows only."""

    parts: Sequence[Level]

    def row(self, places: Sequence[int]) -> Tensor:
        """Rows of all parts."""
        return torch.cat([part.row(places).cpu() for part in self.parts], dim=-1)

    def apply(self, rows: Tensor) -> Tensor:
        """Refused: weights side by side, without a residual, are only read."""
        del rows
        raise ValueError("weights without a residual have rows only")


@dataclass(frozen=True, eq=False)
class Levels:
    """The maps of a batch, and their properties.

    Attributes:
        maps: one per layer, (batch, query, key) or (batch, head, query, key), or the `Asked` that it is made
            from; of an encoder–decoder, the decoder's self-attention; none of a recurrent decoder, whose
            layers are those of `cross`.
        mask: boolean (batch, token), False at padding; tokens of an encoder–decoder are source, then target.
        encoder: the encoder's maps, of an encoder–decoder.
        cross: its cross-attention, one map per decoder layer.
        visible: which cells each map may fill, boolean (batch or 1, query, key), or None for all; maps,
            encoder and cross in this order. Used only for uniform attention.
        unit: make rows sum to one before the residual is added, for maps whose rows are not distributions.
        signed: maps may be negative.
        cuts: methods that take no negative weights may clip them at zero.
        joint: a decoder layer's self-attention and cross-attention share one row that sums to one; what the
            row has for the target passes through the cross-attention.
        residual: the default weight of the residual connection.
        convolved: attention is beside convolutions, which pass on what they see: only its maps can be read,
            not paths through it.
        device: where levels of states that lie on the CPU are computed; None for there.
        budget: most bytes of a result or of levels held at once, where there are states; None for any.
    """

    maps: Sequence[Held]
    mask: Tensor
    encoder: Sequence[Held] = ()
    cross: Sequence[Held] = ()
    visible: Sequence[Tensor | None] = field(default=())
    unit: bool = False
    signed: bool = False
    cuts: bool = True
    joint: bool = False
    residual: float = 0.5
    convolved: bool = False
    device: torch.device | None = None
    budget: int | None = None

    @property
    def of_states(self) -> bool:
        """Whether any layer has no map, only what it is made from."""
        return any(not isinstance(held, Tensor) for held in (*self.maps, *self.encoder, *self.cross))

    @cached_property
    def padded(self) -> bool:
        """Whether there is padding."""
        return not bool(self.mask.all())

    @property
    def layers(self) -> int:
        """Length of the layer axis of results."""
        return len(self.maps or self.cross)

    @property
    def recurrent(self) -> bool:
        """Whether the decoder has no self-attention: only its maps can be read, not paths through it."""
        return not self.maps

    @property
    def tokens(self) -> int:
        """Length of the token axis."""
        return self.mask.shape[1]

    @property
    def queries(self) -> int:
        """Length of the query axis: all tokens, or those of the target."""
        return (self.maps or self.cross)[0].shape[-2]

    @property
    def first(self) -> int:
        """The token that is query 0."""
        return self.tokens - self.queries

    @property
    def heads(self) -> int:
        """Number of heads at the level where a layer's results start; 0 where maps are head averages."""
        top = self.cross[0] if self.cross else self.maps[0]
        return top.shape[1] if len(top.shape) == 4 else 0

    def level_of(self, layer: int) -> int:
        """Number of levels up to the top of a layer."""
        return len(self.encoder) + 2 * (layer + 1) if self.cross else layer + 1

    def weights(self, layer: int, heads: Heads) -> Level:
        """A layer's maps as they are, without the residual: rows are queries, columns tokens."""
        own = [*self.cross[layer : layer + 1], *self.maps[layer : layer + 1]]
        if not all(isinstance(held, Tensor) for held in own):
            parts = [
                MapLevel(averaged(held, heads).double())
                if isinstance(held, Tensor)
                else self._of_states(held, heads, group)
                for held, group in zip(own, ("cross", "maps") if self.cross else ("maps",), strict=True)
            ]
            return JoinedLevel(parts)
        if self.recurrent:  # whose target's tokens are not attended to
            cells = averaged(self.cross[layer], heads).double()
            return MapLevel(torch.nn.functional.pad(cells, (0, self.queries)))
        cells = averaged(self.maps[layer], heads).double()
        if self.cross:
            cells = torch.cat([averaged(self.cross[layer], heads).double(), cells], dim=-1)
        return MapLevel(cells)

    def level(
        self, number: int, heads: Heads, residual: float, *, clip: bool = False, passing: float = 1.0
    ) -> Level:
        """Level `number` ≥ 1 with its residual, in float64; with a head axis for "each".

        Args:
            number: of the level, counted from the inputs.
            heads: which heads to average, or "each".
            residual: weight of the residual connection.
            clip: clip negative weights at zero and make rows sum to one.
            passing: weight of the edges of nodes that pass through.
        """
        if self.recurrent or self.convolved:
            whose = "a recurrent decoder has" if self.recurrent else "attention beside convolutions has"
            raise ValueError(
                f"{whose} no levels: information passes outside attention; `Levels.weights` has its maps"
            )
        group, layer = self._held(number)
        held: Held = getattr(self, group)[layer]
        if isinstance(held, Tensor):
            return MapLevel(self._cells(number, heads, residual, clip, passing))
        return self._of_states(held, heads, group, residual, passing)

    def _held(self, number: int) -> tuple[str, int]:
        """Whose map a level has, and the number of its layer."""
        if not self.cross:
            return "maps", number - 1
        if number <= len(self.encoder):
            return "encoder", number - 1
        layer, is_cross = divmod(number - len(self.encoder) - 1, 2)
        return ("cross" if is_cross else "maps"), layer

    def _of_states(
        self,
        held: Asked | Uniform,
        heads: Heads,
        group: str,
        residual: float | None = None,
        passing: float = 1.0,
    ) -> Level:
        """A level without a map; `residual` None for the weights alone."""
        from overt.tracing.states import Place, StateLevel, Uniform, UniformLevel, moved

        source = self.first
        first, key = (0 if group == "encoder" else source), (source if group == "maps" else 0)
        count, keys = held.shape[-2:]
        real = self.mask[:, first : first + count], self.mask[:, key : key + keys]
        place = None if residual is None else Place(self.tokens, first, count, key, residual, passing)
        if isinstance(held, Uniform):
            return UniformLevel(held.sight, (count, keys), real, place)
        if self.device is not None and held.query.device.type == "cpu":
            held = moved(held, self.device)
        return StateLevel(held, heads, place, real if self.padded else None)

    def _cells(self, number: int, heads: Heads, residual: float, clip: bool, passing: float) -> Tensor:
        source = self.first
        group, layer = self._held(number)
        cells: Tensor = getattr(self, group)[layer]
        if not self.cross:
            return self._level(cells, heads, residual, clip)
        whole: Tensor
        if group == "encoder":
            block = self._level(cells, heads, residual, clip)
            whole = block.new_zeros(*block.shape[:-2], self.tokens, self.tokens)
            whole[..., :source, :source] = block
            diagonal = whole.diagonal(dim1=-2, dim2=-1)
            diagonal[..., source:] = passing
            return whole
        if group == "maps":
            block = self._level(cells, heads, residual, clip)
            whole = block.new_zeros(*block.shape[:-2], self.tokens, self.tokens)
            whole[..., source:, source:] = block
        else:
            cells = torch.nn.functional.pad(cells, (0, self.queries))
            if self.joint:
                own = self.maps[layer]
                assert isinstance(own, Tensor)  # of states, there is attention only
                rest = own.sum(dim=-1)
                cells.diagonal(source, dim1=-2, dim2=-1).add_(rest)
            block = self._level(cells, heads, residual, clip, first=source)
            whole = block.new_zeros(*block.shape[:-2], self.tokens, self.tokens)
            whole[..., source:, :] = block
        diagonal = whole.diagonal(dim1=-2, dim2=-1)
        diagonal[..., :source] = passing
        return whole

    def _level(self, cells: Tensor, heads: Heads, residual: float, clip: bool, first: int = 0) -> Tensor:
        """(1 − r)·A + r·I with rows that sum to one; query i is column `first` + i."""
        level = averaged(cells, heads).double()
        if clip and self.signed:
            level = level.clamp(min=0.0)
        if self.unit and self.signed and not clip:
            level = unit_signed_rows(level)
        elif self.unit or (clip and self.signed):
            level = unit_rows(level)
        level = (1.0 - residual) * level
        level.diagonal(first, dim1=-2, dim2=-1).add_(residual)
        return level if self.signed and not clip else unit_rows(level)

    def stack(
        self, highest: int, heads: Heads, residual: float, *, clip: bool = False, passing: float = 1.0
    ) -> np.ndarray[Any, Any]:
        """Levels 1 … highest as one array, float64 (batch, level, node, token).

        Args:
            highest: number of levels.
            heads: which heads to average.
            residual: as in `level`.
            clip: as in `level`.
            passing: as in `level`.
        """
        n = self.tokens
        plain = not (self.cross or self.recurrent or self.convolved or self.unit or self.signed)
        if plain and not self.of_states:
            return _mixed(self.maps[:highest], heads, residual)
        out = np.empty((self.mask.shape[0], highest, n, n))
        for number in range(highest):  # in place: two copies of all levels may not fit
            level = self.level(number + 1, heads, residual, clip=clip, passing=passing)
            out[:, number] = level.row(range(n)).cpu().numpy()
        return out

    def examples(self, start: int, stop: int) -> Levels:
        """Examples `start` to `stop` of the batch."""
        whole = self.mask.shape[0]
        return replace(
            self,
            maps=[examples(held, slice(start, stop)) for held in self.maps],
            mask=self.mask[start:stop],
            encoder=[examples(held, slice(start, stop)) for held in self.encoder],
            cross=[examples(held, slice(start, stop)) for held in self.cross],
            visible=[
                seen if seen is None or seen.shape[0] != whole else seen[start:stop] for seen in self.visible
            ],
        )

    def without_padding(self) -> Levels:
        """The same levels with zeros in the rows and columns of padding; those of states always have them."""
        source = self.first
        real = self.mask
        if not self.padded:
            return self
        if not self.cross:
            return replace(self, maps=[_real(cells, real, real) for cells in self.maps])
        before, after = real[:, :source], real[:, source:]
        return replace(
            self,
            maps=[_real(cells, after, after) for cells in self.maps],
            encoder=[_real(cells, before, before) for cells in self.encoder],
            cross=[_real(cells, after, before) for cells in self.cross],
        )

    def uniform(self) -> Levels:
        """The same graph with every query attending equally to all that it may see."""
        after, before = self.mask[:, self.first :], self.mask[:, : self.first]
        seen = list(self.visible) or [None] * (len(self.maps) + len(self.encoder) + len(self.cross))
        map_of: dict[tuple[int, int], Tensor] = {}  # layers that share a mask share their map

        def flat(group: Sequence[Held], start: int, queries: Tensor, keys: Tensor) -> list[Any]:
            maps: list[Held] = []
            for held, visible in zip(group, seen[start : start + len(group)], strict=True):
                if not isinstance(held, Tensor):
                    from overt.tracing.states import uniform_of

                    maps.append(uniform_of(held))
                    continue
                key = (id(visible), start)
                if key not in map_of:
                    both = queries.unsqueeze(-1) & keys.unsqueeze(-2)
                    map_of[key] = unit_rows((both if visible is None else both & visible).double())
                maps.append(map_of[key])
            return maps

        maps = flat(self.maps, 0, after, after)
        cross = flat(self.cross, len(self.maps) + len(self.encoder), after, before)
        if self.joint and self.cross:  # all cells of the shared row are equally likely
            counts = [
                ((own > 0).sum(-1), (other > 0).sum(-1)) for own, other in zip(maps, cross, strict=True)
            ]
            share = [(own / (own + other).clamp(min=1)).unsqueeze(-1) for own, other in counts]
            maps = [cells * part for cells, part in zip(maps, share, strict=True)]
            cross = [cells * (1.0 - part) for cells, part in zip(cross, share, strict=True)]
        return replace(
            self,
            maps=maps,
            encoder=flat(self.encoder, len(self.maps), before, before),
            cross=cross,
            unit=False,
            signed=False,
        )


def examples(held: Held, rows: slice | list[int]) -> Held:
    """Some of the examples of a layer."""
    from overt.tracing.states import Uniform, examples_of

    if isinstance(held, Tensor):
        return held[rows]
    if isinstance(held, Asked):
        return examples_of(held, rows)
    keys = held.sight.keys
    shared = keys is None or keys.shape[0] != held.shape[0]  # by all examples
    sight = held.sight if keys is None or shared else replace(held.sight, keys=keys[rows])
    count = len(torch.arange(held.shape[0])[rows])
    return Uniform(sight, (count, *held.shape[1:]))


def averaged(cells: Held, heads: Heads) -> Tensor:
    """A map averaged over all or some heads, or with each head: (batch, [head,] query, key)."""
    assert isinstance(cells, Tensor)
    if cells.dim() == 3:
        if isinstance(heads, str) and heads == "mean":
            return cells
        raise ValueError(
            f"heads={heads!r} needs the maps of single heads, which were not kept: trace with heads=True"
        )
    if isinstance(heads, str) and heads == "each":
        return cells
    picked = cells if isinstance(heads, str) else cells[:, list(heads)]
    if picked.device.type == "cpu" and picked.dtype in (torch.float32, torch.float64):
        # On one core, numpy's sum is several times faster than torch's mean.
        total = np.add.reduce(picked.detach().numpy(), axis=1, dtype=np.float64)
        total /= picked.shape[1]
        return torch.from_numpy(total)
    return picked.mean(dim=1, dtype=torch.float64)


def _mixed(maps: Sequence[Held], heads: Heads, residual: float) -> np.ndarray[Any, Any]:
    """Maps of all layers averaged over heads, with their residual, float64 (batch, layer, query, key).

    Whole float32 maps take one pass of compiled code; others, numpy.
    """
    batch, *_, n, _ = maps[0].shape
    out = np.empty((batch, len(maps), n, n))
    parts = _in_parts(maps) if isinstance(heads, str) else None
    if parts is not None:
        from overt.tracing.maxflow.kernels import mix_heads

        for first, part in parts:
            mix_heads(part, residual, first, out)
        return out
    for number, cells in enumerate(maps):
        out[:, number] = averaged(cells, heads).detach().cpu().double().numpy()
    out *= 1.0 - residual
    out.reshape(batch, len(maps), n * n)[:, :, :: n + 1] += residual
    total = out.sum(axis=-1, keepdims=True)
    total[total == 0.0] = 1.0
    out /= total
    return out


def _in_parts(maps: Sequence[Held]) -> list[tuple[int, np.ndarray[Any, Any]]] | None:
    """Whole float32 maps as arrays (batch, layer, head, query, key), each with the number of its first layer.

    None for other maps.
    """
    for cells in maps:
        if not isinstance(cells, Tensor) or cells.dim() != 4 or cells.dtype != torch.float32:
            return None
        if cells.device.type != "cpu":
            return None
    together = _together(maps)
    if together is not None and together.flags.c_contiguous:
        return [(0, together)]
    arrays = [cells.detach().numpy()[:, None] for cells in maps if isinstance(cells, Tensor)]
    return [(number, np.ascontiguousarray(array)) for number, array in enumerate(arrays)]


def _together(maps: Sequence[Held]) -> np.ndarray[Any, Any] | None:
    """Layers that lie evenly in one array, as that array (batch, layer, head, query, key)."""
    first, second = maps[0], maps[min(1, len(maps) - 1)]
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    start, step = first.data_ptr(), second.data_ptr() - first.data_ptr()
    memory, shape, strides = first.untyped_storage().data_ptr(), first.shape, first.stride()
    for number, cells in enumerate(maps):
        assert isinstance(cells, Tensor)
        if (
            cells.data_ptr() != start + number * step
            or cells.untyped_storage().data_ptr() != memory
            or cells.shape != shape
            or cells.stride() != strides
        ):
            return None
    size = first.element_size()
    batch, *rest = shape
    return np.lib.stride_tricks.as_strided(
        first.detach().numpy(),
        (batch, len(maps), *rest),
        (strides[0] * size, step, *(stride * size for stride in strides[1:])),
    )


def unit_rows(rows: Tensor) -> Tensor:
    """Rows divided by their sum; a row of zeros stays."""
    total = rows.sum(dim=-1, keepdim=True)
    return rows / torch.where(total == 0.0, 1.0, total)


def unit_sizes(rows: Tensor) -> Tensor:
    """Rows whose absolute values sum to one, signs kept; a row of zeros stays."""
    total = rows.abs().sum(dim=-1, keepdim=True)
    return rows / torch.where(total == 0.0, 1.0, total)


def unit_signed_rows(rows: Tensor) -> Tensor:
    """Rows divided by their sum; a row of zeros stays. Raises if a row's sum is not positive."""
    total, size = rows.sum(dim=-1, keepdim=True), rows.abs().sum(dim=-1, keepdim=True)
    if bool((total < 1e-3 * size).any()):
        raise ValueError(
            "rows of signed weights whose sum is not positive cannot be made to sum to one: raw shows them"
        )
    return rows / torch.where(size == 0.0, 1.0, total)


def _real(cells: Held, queries: Tensor, keys: Tensor) -> Held:
    if not isinstance(cells, Tensor):
        return cells
    both = queries.unsqueeze(-1) & keys.unsqueeze(-2)
    return cells.masked_fill(~(both if cells.dim() == 3 else both.unsqueeze(1)), 0.0)


class HeldMaps(Sequence[Tensor]):
    """Maps, or what they are made from; a map is made anew each time, if it fits the budget.

    Attributes:
        held: per layer, a map or its states.
        heads: whether maps have each head, or their mean.
        most: most bytes of a map.
    """

    def __init__(self, held: Sequence[Tensor | Asked], heads: bool, most: int) -> None:
        self.held, self.heads, self.most = list(held), heads, most

    def __len__(self) -> int:
        return len(self.held)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> HeldMaps: ...

    def __getitem__(self, index: int | slice) -> Tensor | HeldMaps:
        """The map of a layer, float32 on the CPU, or those of some layers."""
        if isinstance(index, slice):
            return HeldMaps(self.held[index], self.heads, self.most)
        held = self.held[index]
        if isinstance(held, Tensor):
            return held
        batch, heads, queries, keys = held.shape
        check_bytes(
            f"the map of layer {index}",
            batch * queries * keys * CELL * (heads if self.heads else 1),
            self.most,
            "read rows (raw, rollout), or trace with more memory=…",
        )
        from overt.tracing.states import StateLevel

        out = torch.empty(batch, *([heads] if self.heads else []), queries, keys)
        level = StateLevel(held, "each" if self.heads else "mean")
        for start in range(0, queries, 64):  # rows are float64
            places = range(start, min(start + 64, queries))
            out[..., start : start + 64, :] = level.row(places).float().cpu()
        return out

    def __repr__(self) -> str:
        return f"{len(self)} maps, made from queries and keys when asked for"

    def examples(self, rows: list[int]) -> HeldMaps:
        """Maps of some of the examples."""
        cut = [examples(held, rows) for held in self.held]
        return HeldMaps([held for held in cut if isinstance(held, Tensor | Asked)], self.heads, self.most)


def held_of(maps: Sequence[Tensor]) -> Sequence[Tensor | Asked]:
    """What methods read: maps, or what they are made from."""
    return maps.held if isinstance(maps, HeldMaps) else maps
