"""Which cells of a map are visible, said in parts instead of one (batch, 1, query, key) mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(eq=False)
class Seen:
    """A cell is visible where all of these hold. One object serves all layers that have the same masks.

    Attributes:
        key_visible: boolean (batch, key); None where every key may be seen.
        query_real: boolean (batch, query), False at padding; None where every query is real.
        causal: query i sees key j only for j ≤ i + keys − queries.
    """

    key_visible: Tensor | None = None
    query_real: Tensor | None = None
    causal: bool = False
    _kept: dict[str, Tensor | None] = field(default_factory=dict, repr=False)

    def _once(self, name: str, make: Callable[[], Tensor | None]) -> Tensor | None:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def keep(self, name: str, tensor: Tensor | None) -> None:
        """Know the result of a method beforehand."""
        self._kept[name] = tensor

    def known(self, queries: int, keys: int) -> Tensor | None:
        """Keys that at least one query sees, boolean (batch, key); None for all."""
        if self.query_real is None:
            return self.key_visible
        real = self.query_real

        def make() -> Tensor:
            if self.causal:
                place = torch.arange(1, queries + 1, device=real.device) + (keys - queries)
                last = (place * real).amax(dim=1, keepdim=True)
                found = torch.arange(keys, device=last.device) < last
            else:
                found = real.any(dim=1, keepdim=True).expand(-1, keys)
            return found if self.key_visible is None else found & self.key_visible

        return self._once("known", make)

    def blind(self, queries: int, keys: int) -> Tensor | None:
        """Queries that see no key, boolean (batch, query); None where every query sees one."""
        if self.query_real is None and self.key_visible is None:
            return None
        return self._once("blind", lambda: self.counts(queries, keys, torch.device("cpu")) == 0)

    def seers(self, queries: int, keys: int) -> Tensor | None:
        """How many real queries see each key that is shown, float32 (batch, key); None where all are real."""
        if self.query_real is None:
            return None
        padded = self.query_real

        def make() -> Tensor:
            real = padded.to(torch.float32)
            total = real.sum(dim=1, keepdim=True)
            if not self.causal:
                return total.expand(-1, keys).contiguous()
            before = real.cumsum(dim=1) - real
            return torch.cat([total.expand(-1, keys - queries), total - before], dim=1)

        return self._once("seers", make)

    def counts(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """How many keys each query sees, float32 (batch or 1, query)."""

        def make() -> Tensor:
            if self.key_visible is not None:
                per_key = self.key_visible.to(torch.float32)
                if self.causal:
                    counts = per_key.cumsum(dim=1)[:, keys - queries :]
                else:
                    counts = per_key.sum(dim=1, keepdim=True).expand(-1, queries)
            else:
                at = device if self.query_real is None else self.query_real.device
                last = torch.arange(keys - queries + 1, keys + 1, device=at)  # keys up to each query's own
                counts = (last if self.causal else torch.full_like(last, keys)).to(torch.float32).view(1, -1)
            return counts if self.query_real is None else counts * self.query_real

        counts = self._once("counts", make)
        assert counts is not None
        return counts

    def pairs(self, queries: int, keys: int) -> Tensor | float:
        """How many cells of one head are visible: float32 (batch,), or one number for all."""
        if self.query_real is None and self.key_visible is None:
            return float(queries * keys - (queries * (queries - 1) // 2 if self.causal else 0))
        pairs = self._once("pairs", lambda: self.counts(queries, keys, torch.device("cpu")).sum(dim=1))
        assert pairs is not None
        return pairs
