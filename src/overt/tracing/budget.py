"""How many bytes a trace may take, and what follows from it: maps, or the states that they are made from.

Shapes alone decide, so that the same input is traced the same way on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from overt.tracing.asked import Asked
from overt.tracing.options import CELL
from overt.tracing.states import moved

Shape = tuple[int, ...]  # of a map: batch, head, query, key
RESERVE = 0.15  # share of a GPU's memory that states leave to the model


@dataclass(eq=False)
class Group:
    """The attentions of one kind in one list of layers, whose maps have one shape.

    Attributes:
        kind: "encoder", "decoder" or "cross".
        count: how many there are.
        calls: how many of them have run.
        shape: of their maps; None until one runs.
    """

    kind: str
    count: int = 0
    calls: int = 0
    shape: Shape | None = None

    @property
    def left(self) -> int:
        """How many are to run."""
        return max(0, self.count - self.calls)


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
        target: length of a decoder's sequence, where the inputs tell; None if they do not.
        inside: whether the attention at a path, in a list of layers, is traced.
        groups: those that are traced, by the list of layers and the kind, in the order of the model.
        places: path → its group.
        others: paths of attentions that are not traced.
        configs: by a config's id, whether attentions of its model are traced: all, none or some.
    """

    most: int
    heads: bool = False
    why_maps: str | None = None
    attentions: int = 0
    calls: int = 0
    kept: int = 0
    states: bool = False
    target: int | None = None
    inside: Callable[[str, str], bool] = lambda path, chain: True  # noqa: ARG005
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    places: dict[str, Group] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    configs: dict[int, set[bool]] = field(default_factory=dict)

    def expect(self, path: str, chain: str, kind: str, times: int = 1, config: object = None) -> None:
        """Count an attention that is to run, before the pass; `config` is its model's, if it has one."""
        inside = self.inside(path, chain)
        self.configs.setdefault(id(config), set()).add(inside)
        if not inside:
            self.others.add(path)
            return
        group = self.groups.setdefault((chain, kind), Group(kind))
        group.count += times
        self.places[path] = group
        self.attentions += times

    def map_bytes(self, shape: Shape) -> int:
        """What a call's map takes."""
        batch, heads, queries, keys = shape
        return batch * queries * keys * CELL * (heads if self.heads else 1)

    def needed_next(self, shape: Shape, cell: int, config: object) -> int:
        """What maps take, by the shape of the next call, when a mask is made for it.

        0 where that may be an attention that is not traced.

        Args:
            shape: of the call's map.
            cell: bytes of one of its weights.
            config: of the model that makes the mask.
        """
        if self.others and self.configs.get(id(config)) != {True}:
            return 0
        left = [group for group in self.groups.values() if group.left]
        fitting = [group for group in left if (group.kind == "cross") == (shape[-2] != shape[-1])]
        return self._needed(shape, cell, next(iter(fitting or left), None))

    def needed(
        self, shape: Shape, cell: int, path: str, *, all_alike: bool = False, alone: bool = False
    ) -> int:
        """What the maps of all attentions take, and the weights of the one call with the most.

        Args:
            shape: of a call's map.
            cell: bytes of one of its weights.
            path: of the call.
            all_alike: whether maps of unknown shape are taken to have this one; otherwise they take nothing.
            alone: count no other attention to come; they leave states.
        """
        if alone:
            return self.kept + self.map_bytes(shape) + math.prod(shape) * cell
        return self._needed(shape, cell, self.places.get(path), all_alike)

    def _needed(self, shape: Shape, cell: int, group: Group | None, all_alike: bool = False) -> int:
        if group is None:
            left = max(1, self.attentions - self.calls)
            return self.kept + left * self.map_bytes(shape) + math.prod(shape) * cell
        total, largest = self.kept, math.prod(shape) * cell
        for other in self.groups.values():
            known = shape if other is group else other.shape or self._expected(other, group, shape)
            known = shape if known is None and all_alike else known
            left = max(1, other.left) if other is group else other.left
            if known is not None and left:
                total += left * self.map_bytes(known)
                largest = max(largest, math.prod(known) * cell)
        return total + largest

    def _expected(self, group: Group, now: Group, shape: Shape) -> Shape | None:
        """The shape of an encoder–decoder's maps before they are made; None if unknown."""
        if self.target is None or group.kind == "encoder":
            return None
        batch, heads, _, keys = shape
        if group.kind == "decoder":
            return batch, heads, self.target, self.target
        if now.kind != "encoder":
            encoders = [other.shape for other in self.groups.values() if other.kind == "encoder"]
            keys = next((known[-1] for known in encoders if known is not None), 0)
        return (batch, heads, self.target, keys) if keys else None

    def wants_states(
        self, shape: Shape, cell: int, why_maps: str | None = None, path: str | None = None
    ) -> bool:
        """Whether a call is to leave states; an error where it should and cannot.

        Args:
            shape: of its map.
            cell: bytes of one of its weights.
            why_maps: why this call cannot, as a clause; None if it can.
            path: of the call.
        """
        if path in self.others:
            return why_maps is None and math.prod(shape) * cell > self.most
        if not self.is_over(shape, cell, path or ""):
            return False
        self.states = True
        if reason := self.why_maps or why_maps:
            raise self._refusal(self.needed(shape, cell, path or "", all_alike=True), reason)
        return True

    def is_over(self, shape: Shape, cell: int, path: str) -> bool:
        """Whether there is no room for a call's map, or earlier calls left states already."""
        if path in self.places:
            self.places[path].shape = shape
        return self.states or self.needed(shape, cell, path) > self.most

    def check_map(self, shape: Shape, cell: int, why_maps: str, path: str) -> None:
        """Refuse a call that leaves its map, and can leave nothing else, where maps would not fit.

        Args:
            shape: of its map.
            cell: bytes of one of its weights.
            why_maps: why it leaves no states, as a clause.
            path: of the call.
        """
        if path in self.places:
            self.places[path].shape = shape
        if self.needed(shape, cell, path, alone=self.states) > self.most:
            needed = self.needed(shape, cell, path, all_alike=True, alone=self.states)
            raise self._refusal(needed, self.why_maps or why_maps)

    def _refusal(self, needed: int, reason: str) -> ValueError:
        return ValueError(
            f"maps would take {needed:,} bytes, over memory={self.most:,}, and queries and keys cannot "
            f"take their place: {reason}; give memory={needed}"
        )

    def _count(self, path: str | None) -> None:
        self.calls += 1
        if path in self.places:
            self.places[path].calls += 1

    def kept_map(self, shape: Shape, path: str | None = None) -> None:
        """Count a call that left a map."""
        self._count(path)
        self.kept += self.map_bytes(shape)

    def kept_states(self, asked: Asked, path: str | None = None) -> Asked:
        """Count a call that left states; they are moved to the CPU where the GPU has no room for the rest."""
        self._count(path)
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
    """Without the rest of the storage that a view would keep; a copy where changes would not be noticed."""
    x = x.detach()
    partial = x.untyped_storage().nbytes() > x.numel() * x.element_size()
    return x.clone() if partial or x.is_inference() else x
