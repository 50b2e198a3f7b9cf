"""Attention maps as a layered graph, over which the methods that read maps run.

A level holds the edges from the nodes of one level to those of the level below; the inputs are level 0. An
encoder's or a decoder's layer is one level. An encoder–decoder has its encoder's levels first and then two
per decoder layer, self-attention and cross-attention; nodes that a level does not touch pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from overt.tracing.options import Heads


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
        """Rows of the map."""
        return self.cells[..., list(places), :]

    def apply(self, rows: Tensor) -> Tensor:
        """A product with the map."""
        return rows @ self.cells


@dataclass(frozen=True, eq=False)
class Levels:
    """The maps of a batch, and their properties.

    Attributes:
        maps: one per layer, (batch, query, key) or (batch, head, query, key); of an encoder–decoder, the
            decoder's self-attention; none of a recurrent decoder, whose layers are those of `cross`.
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
    """

    maps: Sequence[Tensor]
    mask: Tensor
    encoder: Sequence[Tensor] = ()
    cross: Sequence[Tensor] = ()
    visible: Sequence[Tensor | None] = field(default=())
    unit: bool = False
    signed: bool = False
    cuts: bool = True
    joint: bool = False
    residual: float = 0.5
    convolved: bool = False

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
        return top.shape[1] if top.dim() == 4 else 0

    def level_of(self, layer: int) -> int:
        """Number of levels up to the top of a layer."""
        return len(self.encoder) + 2 * (layer + 1) if self.cross else layer + 1

    def weights(self, layer: int, heads: Heads) -> Level:
        """A layer's maps as they are, without the residual: rows are queries, columns tokens."""
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
        return MapLevel(self._cells(number, heads, residual, clip, passing))

    def _cells(self, number: int, heads: Heads, residual: float, clip: bool, passing: float) -> Tensor:
        source = self.first
        if not self.cross:
            return self._level(self.maps[number - 1], heads, residual, clip)
        whole: Tensor
        if number <= len(self.encoder):
            block = self._level(self.encoder[number - 1], heads, residual, clip)
            whole = block.new_zeros(*block.shape[:-2], self.tokens, self.tokens)
            whole[..., :source, :source] = block
            diagonal = whole.diagonal(dim1=-2, dim2=-1)
            diagonal[..., source:] = passing
            return whole
        layer, is_cross = divmod(number - len(self.encoder) - 1, 2)
        if not is_cross:
            block = self._level(self.maps[layer], heads, residual, clip)
            whole = block.new_zeros(*block.shape[:-2], self.tokens, self.tokens)
            whole[..., source:, source:] = block
        else:
            cells = torch.nn.functional.pad(self.cross[layer], (0, self.queries))
            if self.joint:
                rest = self.maps[layer].sum(dim=-1)
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

    def examples(self, start: int, stop: int) -> Levels:
        """Examples `start` to `stop` of the batch."""
        whole = self.mask.shape[0]
        return replace(
            self,
            maps=[cells[start:stop] for cells in self.maps],
            mask=self.mask[start:stop],
            encoder=[cells[start:stop] for cells in self.encoder],
            cross=[cells[start:stop] for cells in self.cross],
            visible=[
                seen if seen is None or seen.shape[0] != whole else seen[start:stop] for seen in self.visible
            ],
        )

    def without_padding(self) -> Levels:
        """The same levels with zeros in the rows and columns of padding."""
        source = self.first
        real = self.mask
        if bool(real.all()):
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

        def flat(group: Sequence[Tensor], start: int, queries: Tensor, keys: Tensor) -> list[Tensor]:
            maps = []
            for visible in seen[start : start + len(group)]:
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


def averaged(cells: Tensor, heads: Heads) -> Tensor:
    """A map averaged over all or some heads, or with each head: (batch, [head,] query, key)."""
    if cells.dim() == 3:
        if isinstance(heads, str) and heads == "mean":
            return cells
        raise ValueError(
            f"heads={heads!r} needs the maps of single heads, which were not kept: trace with heads=True"
        )
    if isinstance(heads, str):
        return cells if heads == "each" else cells.mean(dim=1, dtype=torch.float64)
    return cells[:, list(heads)].mean(dim=1, dtype=torch.float64)


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


def _real(cells: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    both = queries.unsqueeze(-1) & keys.unsqueeze(-2)
    return cells.masked_fill(~(both if cells.dim() == 3 else both.unsqueeze(1)), 0.0)
