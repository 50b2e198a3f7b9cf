"""The map of a recurrent decoder, made row by row, since each query depends on what the last one saw."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.mechanism import Ahead, MechanismLayer
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Site

# Added to any score it stays the lowest number, whose exponential is zero.
LOWEST = torch.finfo(torch.float32).min


class Map(Protocol):
    """An `AttentionMap`, as far as its rows are concerned."""

    site: Site
    training: bool

    @property
    def layers(self) -> Sequence[MechanismLayer]:
        """The mechanisms' layers."""

    def __call__(self, call: AttentionCall, chain: Chain) -> Tensor:
        """Weights, (batch, heads, query, key)."""


class Rows:
    """One row of weights at a time; together they are the map that all rows at once would give.

    ```python
    rows = map.rows(key, queries, chain, Seen(key_visible, query_real))
    for t in range(queries):
        weights = rows.weights(logits_of_row_t)  # (batch, heads, 1, key)
        …
    rows.finish()  # the KL, if any, is now in the chain
    ```

    Where the mechanisms allow it (`MechanismLayer.ahead`; none at all, or Bayesian alone), the noise of all
    rows is drawn before the first one, a row takes one addition and one softmax, and the KL is computed once,
    from all logits. Other mechanisms are called for each row.

    Rows of padded queries hold plain attention, without noise, and count nowhere. Every example needs a
    visible key.

    Attributes:
        seen: padding of keys and queries.
        prepared: whether all is prepared, so that mechanisms are not called row by row.
    """

    def __init__(self, map_: Map, key: Tensor, queries: int, chain: Chain, seen: Seen, prepare: bool) -> None:
        site = map_.site
        if site.kind != "cross":
            raise ValueError(f'a map is made row by row with kind="cross", got kind={site.kind!r}')
        if seen.causal:
            raise ValueError("the rows of a map that is made row by row see the same keys: no causal mask")
        self._map, self._key, self.seen = map_, key, seen
        self._queries, self._made = queries, 0
        off = chain.switched_off  # decided here, so that the copy of a chain below agrees with it
        self._first = chain.first_row(site, queries, key.shape[-2])
        no_query = key.new_empty(key.shape[0], site.heads, queries, 0)
        call = AttentionCall(site, no_query, key, key, seen=seen, first_row=self._first)
        self._logits: list[Tensor] = []
        self._ahead = self._prepare(call, chain) if prepare and off is None else None
        self.prepared = self._ahead is not None
        if self._ahead is not None:
            if map_.layers:
                chain.claim(site, map_)
            self._added = self._added_to_rows(self._ahead.added)
        elif not chain.keep:
            # Rows in pieces, for the mechanisms; what they leave is the given chain's.
            chain, wants_kl = copy(chain), chain.wants_kl
            chain.keep, chain.wants_kl = True, map_.training if wants_kl is None else wants_kl
        self._chain = chain

    def _prepare(self, call: AttentionCall, chain: Chain) -> Ahead | None:
        layers = self._map.layers
        if not layers:
            return Ahead(None, None)
        return layers[0].ahead(call, chain) if len(layers) == 1 else None

    def _added_to_rows(self, noise: Tensor | None) -> list[Tensor | None]:
        """What is added to each row's logits, (batch, heads or 1, 1, key): noise, and what hides keys."""
        shown, real = self.seen.key_visible, self.seen.query_real
        hidden = None if shown is None else ~shown.view(shown.shape[0], 1, 1, shown.shape[1])
        if noise is None:
            mask = None if hidden is None else hidden * LOWEST
            return [mask] * self._queries
        if real is not None:
            noise = noise.masked_fill(~real.view(real.shape[0], 1, real.shape[1], 1), 0.0)
        if hidden is not None:
            noise = noise.masked_fill(hidden, LOWEST)
        return list(noise.unsqueeze(2).unbind(dim=3))

    def weights(self, logits: Tensor, query: Tensor | None = None) -> Tensor:
        """The next row's weights, (batch, heads, 1, key), at least float32; zeros for hidden keys.

        Args:
            logits: (batch, heads, 1, key), scores of this row; those of hidden keys may be any finite number.
            query: (batch, heads, 1, dim), for mechanisms that read it, as Synthesizer(form="dense") does.
        """
        row = self._made
        if row == self._queries:
            raise ValueError(f"all {self._queries} rows of this map have been made")
        self._made += 1
        if self._ahead is None:
            return self._map(self._call(row, logits, query), self._chain)
        if self._ahead.finish is not None:
            self._logits.append(logits)
        added = self._added[row]
        if added is None:
            return torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        return torch.softmax(logits + added, dim=-1)

    def _call(self, row: int, logits: Tensor, query: Tensor | None) -> AttentionCall:
        """One row as a call of its own."""
        real = self.seen.query_real
        seen = Seen(self.seen.key_visible, None if real is None else real[:, row : row + 1])
        query = logits.new_empty(*logits.shape[:3], 0) if query is None else query
        first = self._first + row
        call = AttentionCall(self._map.site, query, self._key, self._key, seen=seen, first_row=first)
        return replace(call, logits=logits, left_alone="sdpa")

    def finish(self) -> None:
        """Leave in the chain what the rows together add to the loss."""
        if self._made != self._queries:
            raise ValueError(f"{self._queries} rows were announced, and {self._made} made")
        if self._ahead is not None and self._ahead.finish is not None:
            self._ahead.finish(torch.cat(self._logits, dim=2))
