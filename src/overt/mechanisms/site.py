"""Where an attention map is: its shape, its kind, and its place in a chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from overt import _check

Kind = Literal["encoder", "decoder", "cross"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Site:
    """One attention of a model.

    Attributes:
        heads: number of query heads, which is the number of maps.
        head_dim: width of one head's queries and keys.
        kind: "encoder" (every query may see every key), "decoder" (causal self-attention) or "cross"
            (decoder queries, encoder keys).
        layer: place among the maps of its kind, from 0. Layer 0 starts a chain.
        key_heads: number of key heads; fewer than `heads` in grouped-query attention.
        encoder_decoder: True in a model that has both an encoder and a decoder.
        start: whether a chain starts here, whatever the layer: the map takes nothing from the layer below.
            The stacks of a network share one numbering, so that their noise differs.
    """

    heads: int
    head_dim: int
    kind: Kind = "encoder"
    layer: int = 0
    key_heads: int | None = None
    encoder_decoder: bool = False
    start: bool = False

    def __post_init__(self) -> None:
        _check.whole("heads", self.heads, 1)
        _check.whole("head_dim", self.head_dim, 1)
        _check.whole("layer", self.layer, 0)
        _check.one_of("kind", self.kind, KINDS)
        if self.key_heads is not None:
            _check.whole("key_heads", self.key_heads, 1)
            if self.heads % self.key_heads:
                raise ValueError(f"key_heads must divide heads ({self.heads}), got {self.key_heads}")

    @property
    def starts(self) -> bool:
        """Whether the map is the first of its chain."""
        return self.start or self.layer == 0

    @property
    def place(self) -> tuple[Kind, int]:
        """The chain that the map belongs to, and its layer there."""
        return self.kind, self.layer
