"""A trace's maps, where some or all of them are made from states when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from overt.tracing.asked import Asked
from overt.tracing.budget import CELL, check_bytes
from overt.tracing.levels import examples
from overt.tracing.states import StateLevel


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
