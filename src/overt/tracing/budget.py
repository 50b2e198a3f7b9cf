"""How many bytes a trace may take, and what follows from it: maps, or the states that they are made from.

Shapes alone decide, so that the same input is traced the same way on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overt.tracing.asked import Asked
from overt.tracing.options import CELL
from overt.tracing.states import moved

Shape = tuple[int, ...]  # of a map: batch, head, query, key
RESERVE = 0.15  # share of a GPU's memory that states leave to the model


@dataclass(eq=False)
class Budget:
    """Decides, call by call, whether an attention's map is kept, or its queries and keys.

    Attributes:
        most: bytes of all maps, together with the weights of the one call that makes the next.
        heads: whether each head's map is kept, or their mean.
        why_maps: why there can be no states, as a clause; None if there can.
        attentions: how many attentions the pass has, as far as is known.
        calls: how many of them have run.
        kept: bytes of the maps that they left.
        states: whether states are kept; once they are, so are those of all later calls.
    """

    most: int
    heads: bool = False
    why_maps: str | None = None
    attentions: int = 0
    calls: int = 0
    kept: int = 0
    states: bool = False

    def map_bytes(self, shape: Shape) -> int:
        """What a call's map takes."""
        batch, heads, queries, keys = shape
        return batch * queries * keys * CELL * (heads if self.heads else 1)

    def needed(self, shape: Shape, cell: int, alone: bool = False) -> int:
        """What maps take if all attentions to come have this shape, with weights of `cell` bytes each.

        Args:
            shape: of a map.
            cell: bytes of a weight.
            alone: count no other attention to come; they leave states.
        """
        batch, heads, queries, keys = shape
        left = 1 if alone else max(1, self.attentions - self.calls)
        return self.kept + left * self.map_bytes(shape) + batch * heads * queries * keys * cell

    def wants_states(self, shape: Shape, cell: int, why_maps: str | None = None) -> bool:
        """Whether a call is to leave states; an error where it should and cannot.

        Args:
            shape: of its map.
            cell: bytes of one of its weights.
            why_maps: why this call cannot, as a clause; None if it can.
        """
        if not self.is_over(shape, cell):
            return False
        self.states = True
        if reason := self.why_maps or why_maps:
            raise self._refusal(self.needed(shape, cell), reason)
        return True

    def is_over(self, shape: Shape, cell: int) -> bool:
        """Whether there is no room for a call's map, or earlier calls left states already."""
        return self.states or self.needed(shape, cell) > self.most

    def check_map(self, shape: Shape, cell: int, why_maps: str) -> None:
        """Refuse a call that leaves its map, and can leave nothing else, where maps would not fit.

        Args:
            shape: of its map.
            cell: bytes of one of its weights.
            why_maps: why it leaves no states, as a clause.
        """
        needed = self.needed(shape, cell, alone=self.states)
        if needed > self.most:
            raise self._refusal(needed, self.why_maps or why_maps)

    def _refusal(self, needed: int, reason: str) -> ValueError:
        return ValueError(
            f"maps would take {needed:,} bytes, over memory={self.most:,}, and queries and keys cannot "
            f"take their place: {reason}; give memory={needed}"
        )

    def kept_map(self, shape: Shape) -> None:
        """Count a call that left a map."""
        self.calls += 1
        self.kept += self.map_bytes(shape)

    def kept_states(self, asked: Asked) -> Asked:
        """Count a call that left states; they are moved to the CPU where the GPU has no room for the rest."""
        self.calls += 1
        held = Asked(_alone(asked.query), _alone(asked.key), asked.scale, asked.sight, asked.sums)
        device = held.query.device
        if device.type != "cuda":
            return held
        each = sum(x.numel() * x.element_size() for x in (held.query, held.key))
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        needed = each * max(0, self.attentions - self.calls)
        return held if needed + RESERVE * total <= free else moved(held, "cpu")


def _alone(x: Tensor) -> Tensor:
    """Without the rest of the storage that a view would keep."""
    x = x.detach()
    return x.clone() if x.untyped_storage().nbytes() > x.numel() * x.element_size() else x
