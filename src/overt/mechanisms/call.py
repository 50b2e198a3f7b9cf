"""One call of one attention, in one immutable object."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from overt.mechanisms.maps import softmax
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Site


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The inputs of one attention.

    Logits are `scale`·query·key, or are passed ready-made in `logits`; `bias` is added to either. A cell of
    the map is visible where both `seen` and `mask`, if there is one, show it.

    Attributes:
        site: where the map is.
        query: (batch, heads, query, dim).
        key: (batch, key heads, key, dim).
        value: (batch, key heads, key, value dim).
        scale: of the products.
        logits: (batch, heads, query, key), where they are not scaled products: additive scores, softcaps.
        prior_key: (batch, key heads, key, prior dim), the keys that a prior reads; None for `key`.
        seen: padding and causality.
        mask: boolean, broadcasts to the map, hides further cells beyond `seen`; None where none are.
        bias: broadcasts to the map, added to the logits; shape (batch or 1, 1, 1, key) is a bias per key, for
            which the KL has a closed form.
        first_row: absolute position of the first query row (`Chain.first_row`).
        dropout: probability of dropping a weight; 0 in evaluation.
        scale_products: scale the products rather than the queries before them; in half precision the two
            round differently, and models differ in which they use.
        dtype: lowest precision of the logits; None leaves theirs.
        filled: whether hidden cells of `logits` are known to hold −inf.
        left_alone: what the rows hold that mechanisms leave alone, those of padded queries and of queries
            that see no key. None means zeros; otherwise they get the result of plain attention. There a query
            that sees no key gets zeros with "sdpa", and the mean of all values with "eager" and "biased";
            "biased" is sdpa under a mask that contains the bias, and hides it from gradients there.
    """

    site: Site
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float = 1.0
    logits: Tensor | None = None
    prior_key: Tensor | None = None
    seen: Seen = field(default_factory=Seen)
    mask: Tensor | None = None
    bias: Tensor | None = None
    first_row: int = 0
    dropout: float = 0.0
    scale_products: bool = False
    dtype: torch.dtype | None = None
    filled: bool = False
    left_alone: Literal["sdpa", "eager", "biased"] | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the map, (batch, heads, query, key)."""
        if self.logits is not None:
            batch, heads, queries, keys = self.logits.shape
            return batch, heads, queries, keys
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.key.shape[2]

    @property
    def keys_of_prior(self) -> Tensor:
        """(batch, key heads, key, prior dim), the keys that a prior reads."""
        return self.key if self.prior_key is None else self.prior_key

    def scores(self) -> Tensor:
        """The logits, (batch, heads, query, key); hidden cells hold arbitrary values."""
        logits = self.logits
        if logits is None:
            key = repeat_heads(self.key, self.query.shape[1]).mT
            scaled = self.scale_products
            logits = (self.query @ key).mul_(self.scale) if scaled else (self.query * self.scale) @ key
        if self.dtype is not None:
            logits = logits.to(torch.promote_types(logits.dtype, self.dtype))
        return logits if self.bias is None else logits + self.bias

    def visible(self) -> Tensor:
        """Boolean, broadcasts to the map: the key may be seen, and the query is not padding."""
        _, _, queries, keys = self.shape
        shown = self.seen.dense(queries, keys, self.query.device)
        if shown is not None:
            return shown if self.mask is None else shown & self.mask
        if self.mask is not None:
            return self.mask
        return everything(self.query.device)

    def hidden(self) -> Tensor | None:
        """The opposite of `visible`; None where no cell is hidden, as far as `shows_all` can tell."""
        if self.mask is not None:
            return ~self.visible()
        _, _, queries, keys = self.shape
        return self.seen.hidden(queries, keys, self.query.device)

    def blind(self) -> Tensor | None:
        """Queries that are padding or see no key, boolean (batch or 1, query or 1); None where none can be.

        With a `mask`, those that no head shows any key.
        """
        if self.mask is not None:
            return ~self.visible().any(dim=-1).any(dim=1)
        _, _, queries, keys = self.shape
        return self.seen.blind(queries, keys)

    def softmax(self, logits: Tensor) -> Tensor:
        """Weights of plain attention from these logits, (batch, heads, query, key); see `maps.softmax`."""
        hidden = self.hidden()
        return softmax(logits, None if hidden is None else self.visible(), self.filled, hidden)

    def shown(self) -> Tensor:
        """`visible`, as if no query were padding."""
        return replace(self, seen=Seen(self.seen.key_visible, None, self.seen.causal)).visible()

    def shows_all(self) -> bool:
        """Whether no cell is hidden, as far as can be told without reading values."""
        seen = self.seen
        return self.mask is None and seen.key_visible is None and seen.query_real is None and not seen.causal

    def why_not_products(self) -> str | None:
        """What logits or masks contain beyond products, padding and causality; None if nothing."""
        if self.logits is not None:
            return "logits are more than plain products"
        if self.bias is not None or self.mask is not None:
            return "masks are more than padding and causality"
        return None

    def is_dot(self) -> bool:
        """Whether Φ_ij = scale·q_i·k_j + b_j under padding and causality: then the KL has a closed form."""
        if self.logits is not None or self.mask is not None:
            return False
        return self.bias is None or (self.bias.dim() == 4 and self.bias.shape[1:3] == (1, 1))

    def with_logits(self, logits: Tensor, filled: bool = False) -> AttentionCall:
        """The call with these logits in place of its own and of its bias."""
        return replace(self, logits=logits, bias=None, filled=filled)


_everything: dict[torch.device, Tensor] = {}


def everything(device: torch.device) -> Tensor:
    """The mask (1, 1, 1, 1) that hides nothing; made once for a device."""
    if torch.compiler.is_compiling():
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    if device not in _everything:
        with torch.inference_mode(False):  # else later training could not save it for backward
            _everything[device] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    return _everything[device]


@dataclass(frozen=True, eq=False)
class EdgeCall:
    """The inputs of one graph attention, on an edge list.

    Attributes:
        site: where the map is.
        edge_index: (2, edges), source (the key) and target (the query) of each edge.
        nodes: number of target nodes.
        key: (source nodes, heads, dim), what a prior reads.
    """

    site: Site
    edge_index: Tensor
    nodes: int
    key: Tensor


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, key heads, key, dim) → (batch, heads, key, dim): each key head is used by a group of heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
