"""Attention maps as a layered graph, which rollout and flow read.

A level is a matrix of edges from the nodes of one level to those of the level below; the inputs are level 0.
An encoder's or a decoder's layer is one level. An encoder–decoder has its encoder's levels first and then two
per decoder layer, self-attention and cross-attention; nodes that a level does not touch pass through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from overt import _check

Heads = Literal["mean", "each"] | Sequence[int]


@dataclass(frozen=True, eq=False)
class Graph:
    """The maps of a batch, and what is known of them.

    Attributes:
        maps: one per layer, (batch, query, key) or (batch, head, query, key); of an encoder–decoder, the
            decoder's self-attention.
        mask: boolean (batch, token), False at padding; tokens of an encoder–decoder are source, then target.
        encoder: the encoder's maps, of an encoder–decoder.
        cross: its cross-attention, one map per decoder layer.
        visible: which cells each map may fill, boolean (batch or 1, query, key), or None for all; maps,
            encoder and cross in this order. Only uniform attention asks for it.
        unit: make rows sum to one before the residual joins, for maps that are no distributions.
        signed: maps may be negative.
    """

    maps: Sequence[Tensor]
    mask: Tensor
    encoder: Sequence[Tensor] = ()
    cross: Sequence[Tensor] = ()
    visible: Sequence[Tensor | None] = field(default=())
    unit: bool = False
    signed: bool = False

    @property
    def layers(self) -> int:
        """Length of the layer axis of results."""
        return len(self.maps)

    @property
    def tokens(self) -> int:
        """Length of the token axis."""
        return self.mask.shape[1]

    @property
    def queries(self) -> int:
        """Length of the query axis: all tokens, or those of the target."""
        return self.maps[0].shape[-2]

    @property
    def first(self) -> int:
        """The token that is query 0."""
        return self.tokens - self.queries

    @property
    def heads(self) -> int:
        """Heads of the level that results of a layer start from; 0 where maps are head averages."""
        top = self.cross[0] if self.cross else self.maps[0]
        return top.shape[1] if top.dim() == 4 else 0

    def level_of(self, layer: int) -> int:
        """How many levels lie at and below the top of a layer."""
        return len(self.encoder) + 2 * (layer + 1) if self.cross else layer + 1

    def level(
        self, number: int, heads: Heads, residual: float, *, clip: bool = False, passing: float = 1.0
    ) -> Tensor:
        """Level `number` ≥ 1 with its residual, float64 (batch, token, token); (…, head, …) for "each".

        Args:
            number: of the level, from the inputs.
            heads: which heads to average, or "each".
            residual: weight of the residual connection.
            clip: cut negative weights and make rows sum to one.
            passing: weight of the edges of nodes that pass through.
        """
        source = self.first
        if not self.cross:
            return self._level(self.maps[number - 1], heads, residual, clip)
        whole: Tensor
        if number <= len(self.encoder):
            block = self._level(self.encoder[number - 1], heads, residual, clip)
            whole = block.new_zeros(*block.shape[:-2], self.tokens, self.tokens)
            whole[..., :source, :source] = block
            own = whole.diagonal(dim1=-2, dim2=-1)
            own[..., source:] = passing
            return whole
        layer, is_cross = divmod(number - len(self.encoder) - 1, 2)
        if not is_cross:
            block = self._level(self.maps[layer], heads, residual, clip)
            whole = block.new_zeros(*block.shape[:-2], self.tokens, self.tokens)
            whole[..., source:, source:] = block
        else:
            cells = torch.nn.functional.pad(self.cross[layer], (0, self.queries))
            block = self._level(cells, heads, residual, clip, first=source)
            whole = block.new_zeros(*block.shape[:-2], self.tokens, self.tokens)
            whole[..., source:, :] = block
        own = whole.diagonal(dim1=-2, dim2=-1)
        own[..., :source] = passing
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

    def examples(self, start: int, stop: int) -> Graph:
        """Some of the batch."""
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

    def without_padding(self) -> Graph:
        """Zeros in the rows and columns of padding."""
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

    def uniform(self) -> Graph:
        """The same graph with every query attending equally to all that it may see."""
        after, before = self.mask[:, self.first :], self.mask[:, : self.first]
        seen = list(self.visible) or [None] * (len(self.maps) + len(self.encoder) + len(self.cross))
        made: dict[tuple[int, int], Tensor] = {}  # layers that share a mask share their map

        def flat(group: Sequence[Tensor], start: int, queries: Tensor, keys: Tensor) -> list[Tensor]:
            maps = []
            for visible in seen[start : start + len(group)]:
                key = (id(visible), start)
                if key not in made:
                    both = queries.unsqueeze(-1) & keys.unsqueeze(-2)
                    made[key] = unit_rows((both if visible is None else both & visible).double())
                maps.append(made[key])
            return maps

        return replace(
            self,
            maps=flat(self.maps, 0, after, after),
            encoder=flat(self.encoder, len(self.maps), before, before),
            cross=flat(self.cross, len(self.maps) + len(self.encoder), after, before),
            unit=False,
            signed=False,
        )


def averaged(cells: Tensor, heads: Heads) -> Tensor:
    """A map's mean over heads, over some of them, or each: (batch, [head,] query, key)."""
    if cells.dim() == 3:
        if heads == "mean":
            return cells
        raise ValueError(
            f"heads={heads!r} needs the maps of single heads, which were not kept: trace with heads=True"
        )
    if heads == "each":
        return cells
    if heads == "mean":
        return cells.mean(dim=1, dtype=torch.float64)
    return cells[:, list(heads)].mean(dim=1, dtype=torch.float64)


def unit_rows(rows: Tensor) -> Tensor:
    """Rows divided by their sum; a row of zeros stays."""
    total = rows.sum(dim=-1, keepdim=True)
    return rows / torch.where(total == 0.0, 1.0, total)


def unit_signed_rows(rows: Tensor) -> Tensor:
    """Rows divided by their sum; a row of zeros stays. One whose parts cancel out has no such form."""
    total, size = rows.sum(dim=-1, keepdim=True), rows.abs().sum(dim=-1, keepdim=True)
    if bool((total < 1e-3 * size).any()):
        raise ValueError(
            "rows of signed weights whose sum is not positive cannot be made to sum to one: raw shows them"
        )
    return rows / torch.where(size == 0.0, 1.0, total)


def _real(cells: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    both = queries.unsqueeze(-1) & keys.unsqueeze(-2)
    return cells.masked_fill(~(both if cells.dim() == 3 else both.unsqueeze(1)), 0.0)


def check_heads(heads: object, count: int) -> None:
    """Refuse anything but "mean", "each" or a list of head numbers."""
    if heads in ("mean", "each"):
        return
    if isinstance(heads, str) or not isinstance(heads, Sequence) or not heads:
        raise ValueError(f'heads must be "mean", "each" or a list of head numbers, got {heads!r}')
    for head in heads:
        if isinstance(head, bool) or not isinstance(head, int) or (count and not -count <= head < count):
            raise ValueError(f"heads must be numbers from 0 to {count - 1}, got {head!r}")


def check_residual(residual: float) -> None:
    """Refuse a residual outside [0, 1]."""
    _check.fraction("residual", residual)


def numbers(name: str, asked: object, count: int) -> list[int]:
    """Positions along an axis of `count`: None is all; one number or several; negative ones from the end."""
    if asked is None:
        return list(range(count))
    listed: Any = asked.tolist() if hasattr(asked, "tolist") else asked
    several = listed if isinstance(listed, Sequence) and not isinstance(listed, str) else [listed]
    out = []
    for one in several:
        try:
            value = int(one.__index__())
        except (AttributeError, TypeError):
            raise ValueError(f"{name} must be whole numbers, got {asked!r}") from None
        if isinstance(one, bool) or not -count <= value < count:
            raise ValueError(f"{name} must lie in 0 to {count - 1} (or −{count} to −1), got {one}")
        out.append(value % count)
    if not out:
        raise ValueError(f"{name} must name at least one of {count}, got {asked!r}")
    return out
