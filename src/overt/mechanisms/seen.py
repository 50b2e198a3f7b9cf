"""Which cells of a map are visible, described in parts instead of by one (batch, 1, query, key) mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from overt.mechanisms.maps import causal


@dataclass(eq=False)
class Seen:
    """A cell is visible where all of these hold. All layers with the same masks share one object.

    Attributes:
        key_visible: boolean (batch, key); None where every key may be seen.
        query_real: boolean (batch, query), False at padding; None where every query is real.
        causal: query i sees key j only for j ≤ i + keys − queries.
    """

    key_visible: Tensor | None = None
    query_real: Tensor | None = None
    causal: bool = False
    _cache: dict[tuple[str, int, int], Tensor | None] = field(default_factory=dict, repr=False)
    _bytes: tuple[Tensor | None, Tensor | None] | None = field(default=None, repr=False)

    def _cached(self, name: str, queries: int, keys: int, make: Callable[[], Tensor | None]) -> Tensor | None:
        if torch.compiler.is_compiling():  # else one compiled graph for every length
            return make()
        key = name, queries, keys
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def as_bytes(self) -> tuple[Tensor | None, Tensor | None]:
        """`key_visible` and `query_real` as kernels read them: uint8, in one piece."""
        if torch.compiler.is_compiling():
            return self.key_visible, self.query_real
        if self._bytes is None:
            masks = self.key_visible, self.query_real
            keys, rows = (None if mask is None else mask.contiguous().view(torch.uint8) for mask in masks)
            self._bytes = keys, rows
        return self._bytes

    def dense(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """Boolean (batch or 1, 1, query or 1, key), True where a cell is visible; None where all are."""
        if self.key_visible is None and self.query_real is None and not self.causal:
            return None
        shown, real = self.key_visible, self.query_real

        def make() -> Tensor:
            mask = None if shown is None else shown.view(shown.shape[0], 1, 1, keys)
            if real is not None:
                rows = real.view(real.shape[0], 1, queries, 1)
                mask = rows.expand(-1, -1, -1, keys) if mask is None else mask & rows
            if self.causal:
                triangle = causal(queries, keys, device)
                mask = triangle if mask is None else mask & triangle
            assert mask is not None
            return mask

        return self._cached(f"dense on {device}", queries, keys, make)

    def hidden(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """The opposite of `dense`, True where a cell is hidden; None where none is."""
        shown = self.dense(queries, keys, device)
        if shown is None:
            return None
        return self._cached(f"hidden on {device}", queries, keys, lambda: ~shown)

    def for_sdpa(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """The mask that torch's attention needs, shaped as in `dense`; None where `is_causal` is enough.

        Padded queries see what real ones do, and a query that would see no key sees all keys, to avoid NaN.
        """
        if self.key_visible is None and not (self.causal and queries != keys):
            return None

        def make() -> Tensor | None:
            shown = Seen(self.key_visible, None, self.causal).dense(queries, keys, device)
            return None if shown is None else shown | ~shown.any(dim=-1, keepdim=True)

        return self._cached(f"for sdpa on {device}", queries, keys, make)

    def _device(self) -> torch.device:
        """The masks' device; at least one mask is not None."""
        mask = self.key_visible if self.key_visible is not None else self.query_real
        assert mask is not None
        return mask.device

    def known(self, queries: int, keys: int) -> Tensor | None:
        """Keys that at least one query sees, boolean (batch, key); None for all."""
        if self.query_real is None:
            return self.key_visible
        real = self.query_real

        def make() -> Tensor:
            if self.causal:
                place = torch.arange(1, queries + 1, device=real.device) + (keys - queries)
                last = (place * real).amax(dim=1, keepdim=True)
                reached = torch.arange(keys, device=last.device) < last
            else:
                reached = real.any(dim=1, keepdim=True).expand(-1, keys)
            return reached if self.key_visible is None else reached & self.key_visible

        return self._cached("known", queries, keys, make)

    def blind(self, queries: int, keys: int) -> Tensor | None:
        """Queries that see no key, boolean (batch, query); None where every query sees one."""
        if self.query_real is None and self.key_visible is None:
            return None
        return self._cached("blind", queries, keys, lambda: self.counts(queries, keys, self._device()) == 0)

    def unseeing(self, queries: int, keys: int) -> Tensor | None:
        """Queries to which no key is shown, whether padding or not; boolean (batch, query), or None."""
        if self.key_visible is None:
            return None
        shown = Seen(self.key_visible, None, self.causal)
        return self._cached("unseeing", queries, keys, lambda: shown.blind(queries, keys))

    def seers(self, queries: int, keys: int) -> Tensor | None:
        """How many real queries see each visible key, float32 (batch, key); None where all are real."""
        if self.query_real is None:
            return None
        query_real = self.query_real

        def make() -> Tensor:
            real = query_real.to(torch.float32)
            total = real.sum(dim=1, keepdim=True)
            if not self.causal:
                return total.expand(-1, keys).contiguous()
            before = real.cumsum(dim=1) - real
            return torch.cat([total.expand(-1, keys - queries), total - before], dim=1)

        return self._cached("seers", queries, keys, make)

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
                # The number of keys up to each query's own position.
                last = torch.arange(keys - queries + 1, keys + 1, device=device)
                counts = (last if self.causal else torch.full_like(last, keys)).to(torch.float32).view(1, -1)
            return counts if self.query_real is None else counts * self.query_real

        counts = self._cached(f"counts on {device}", queries, keys, make)
        assert counts is not None
        return counts

    def pairs(self, queries: int, keys: int) -> Tensor | float:
        """How many cells of one head are visible: float32 (batch,), or one number for all."""
        if self.query_real is None and self.key_visible is None:
            return float(queries * keys - (queries * (queries - 1) // 2 if self.causal else 0))
        pairs = self._cached(
            "pairs", queries, keys, lambda: self.counts(queries, keys, self._device()).sum(dim=1)
        )
        assert pairs is not None
        return pairs
