"""What an attention was asked: queries, keys, and what each query may see.

A map has a cell for each pair of tokens. Queries and keys, with the mask in parts, have what a map is made
of, and their size grows with the number of tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overt.mechanisms.call import repeat_heads

HIDDEN = float("-inf")


def version_of(tensor: Tensor) -> int:
    """A number that is another once a tensor was changed in place; always −1 in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, eq=False)
class Sight:
    """Which keys each query sees, in parts.

    Attributes:
        causal: query i sees keys up to i + offset, and none after.
        offset: of causal attention and of windows, for queries that continue earlier keys. With a window, it
            may be how far queries see ahead: a window to both sides is causal with an offset.
        window: query i sees no more than this many keys up to i + offset; None for all.
        chunk: query i sees keys of its own chunk of this many only, counted from key 0; None for all. There
            is a window or there are chunks, not both.
        keys: boolean (batch, key), False at padding; None where all are tokens.
        bias: added to the scores, (batch or 1, head or 1, query or 1, key), −inf in hidden cells; None for
            nothing. Of all parts, only this one may be as large as a map.
    """

    causal: bool = False
    offset: int = 0
    window: int | None = None
    keys: Tensor | None = None
    bias: Tensor | None = None
    chunk: int | None = None

    @property
    def needs_mask(self) -> bool:
        """Whether torch's attention needs a mask for it, beside its own `is_causal`."""
        parts = (self.window, self.chunk, self.keys, self.bias)
        return any(part is not None for part in parts) or (self.causal and self.offset != 0)

    def shown(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Which keys the queries at these places see, boolean (batch or 1, 1, query, key); None for all.

        `bias` is left out.
        """
        seen: Tensor | None = None
        ahead = keys.unsqueeze(0) - queries.unsqueeze(1) - self.offset  # (query, key)
        if self.causal:
            seen = ahead <= 0
        if self.window is not None:
            near = ahead > -self.window
            seen = near if seen is None else seen & near
        if self.chunk is not None:
            own = keys.unsqueeze(0) // self.chunk == (queries.unsqueeze(1) + self.offset) // self.chunk
            seen = own if seen is None else seen & own
        seen = None if seen is None else seen[None, None]
        if self.keys is not None:
            real = self.keys[:, keys][:, None, None, :]
            seen = real if seen is None else seen & real
        return seen


@dataclass(frozen=True, eq=False)
class Asked:
    """Queries and keys of one attention.

    Attributes:
        query: (batch, head, query, dim), after positions were applied.
        key: (batch, key head, key, dim); each key head serves head / key head adjacent heads.
        scale: of the products.
        sight: what each query sees.
        sums: log-sum-exp of each query's scores, float32 (batch, head, query), if the attention that ran has
            made it.
    """

    query: Tensor
    key: Tensor
    scale: float
    sight: Sight = Sight()
    sums: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the map: (batch, head, query, key)."""
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.key.shape[2]

    def scores(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Scaled products under the mask, (batch, head, query, key), −inf in hidden cells."""
        _, heads, queries, keys = self.shape
        products = self.query.to(dtype) @ repeat_heads(self.key.to(dtype), heads).mT * self.scale
        if self.sight.bias is not None:
            products = products + self.sight.bias.to(dtype)
        places = [torch.arange(count, device=products.device) for count in (queries, keys)]
        seen = self.sight.shown(*places)
        return products if seen is None else products.masked_fill(~seen, HIDDEN)

    def weights(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """The map by its definition, (batch, head, query, key); rows that see no key are zero."""
        scores = self.scores(dtype)
        blind = (scores == HIDDEN).all(dim=-1, keepdim=True)
        return scores.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)
