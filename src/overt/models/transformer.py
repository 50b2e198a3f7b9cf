"""Encoder and decoder stacks that pass a chain through their layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt import _check
from overt.mechanisms.attention import MultiheadAttention
from overt.mechanisms.chain import Chain
from overt.mechanisms.mechanism import Mechanism
from overt.mechanisms.site import Kind

Activation = Literal["gelu", "relu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


class Block(nn.Module):
    """A pre-norm block as in GPT-2: x + attention(norm x), [x + cross(norm x),] x + mlp(norm x)."""

    def __init__(
        self,
        width: int,
        heads: int,
        mechanisms: Sequence[Mechanism],
        kind: Kind,
        layer: int,
        cross: bool,
        hidden: int,
        dropout: float,
        attention_dropout: float,
        activation: Activation,
    ) -> None:
        super().__init__()
        self.activation = activation

        def attention(kind: Kind) -> MultiheadAttention:
            return MultiheadAttention(
                width,
                heads,
                attention_dropout,
                batch_first=True,
                mechanisms=mechanisms,
                kind=kind,
                layer=layer,
                encoder_decoder=cross,
            )

        self.norm = nn.LayerNorm(width)
        self.attention = attention(kind)
        self.cross_norm = nn.LayerNorm(width) if cross else None
        self.cross_attention = attention("cross") if cross else None
        self.mlp_norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None,
        chain: Chain,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> Tensor:
        """(batch, sequence, width) → the same; `padding` is boolean (batch, sequence), True at padding."""
        for name, mask in (("padding", padding), ("memory_padding", memory_padding)):
            if mask is not None and mask.dtype != torch.bool:
                raise TypeError(f"{name} must be boolean, True at padding, got {mask.dtype}")
        normed = self.norm(x)
        mixed, _ = self.attention(normed, normed, normed, padding, need_weights=False, chain=chain)
        x = x + self.dropout(mixed)
        if self.cross_attention is not None and self.cross_norm is not None:
            if memory is None:
                raise ValueError("memory, the encoder's output, is needed by a decoder with cross=True")
            mixed, _ = self.cross_attention(
                self.cross_norm(x),
                memory,
                memory,
                memory_padding,
                need_weights=False,
                query_padding_mask=padding,
                chain=chain,
            )
            x = x + self.dropout(mixed)
        hidden = self.inner(self.mlp_norm(x))
        hidden = F.relu(hidden) if self.activation == "relu" else F.gelu(hidden, approximate="tanh")
        return x + self.dropout(self.outer(hidden))  # type: ignore[no-any-return]


class _Stack(nn.Module):
    """Blocks and a final norm."""

    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        mechanisms: Sequence[Mechanism],
        hidden: int | None,
        dropout: float,
        kind: Kind,
        cross: bool,
        activation: Activation,
        attention_dropout: float | None = None,
    ) -> None:
        super().__init__()
        _check.whole("layers", layers, 1)
        _check.one_of("activation", activation, ACTIVATIONS)
        hidden = 4 * width if hidden is None else hidden
        on_weights = dropout if attention_dropout is None else attention_dropout
        self.blocks = nn.ModuleList(
            Block(width, heads, mechanisms, kind, layer, cross, hidden, dropout, on_weights, activation)
            for layer in range(layers)
        )
        self.norm = nn.LayerNorm(width)


class Encoder(_Stack):
    """A stack of self-attention blocks.

    Args:
        width: of the hidden states.
        heads: attention heads per layer.
        layers: number of blocks.
        mechanisms: added to every attention.
        hidden: width of the feed-forward layers, 4·width by default.
        dropout: on weights and on each block's two outputs.
        activation: of the feed-forward layers: "gelu" (its tanh form, as in GPT-2), or "relu", as in
            equation 6 of Evolving Attention.
        attention_dropout: on weights, if it differs from `dropout`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        mechanisms: Sequence[Mechanism] = (),
        hidden: int | None = None,
        dropout: float = 0.1,
        activation: Activation = "gelu",
        attention_dropout: float | None = None,
    ) -> None:
        super().__init__(
            width, heads, layers, mechanisms, hidden, dropout, "encoder", False, activation, attention_dropout
        )

    def forward(self, x: Tensor, padding: Tensor | None = None, chain: Chain | None = None) -> Tensor:
        """(batch, sequence, width) → the same. `padding` (batch, sequence) is True at padding."""
        chain = Chain() if chain is None else chain
        for block in self.blocks:
            x = block(x, padding, chain)
        return self.norm(x)  # type: ignore[no-any-return]


class Decoder(_Stack):
    """A stack of causal blocks; with `cross=True` each also attends to an encoder's output.

    It has no cache of keys and values, so it takes whole sequences, not rows fed in pieces.

    Args:
        width: of the hidden states.
        heads: attention heads per layer.
        layers: number of blocks.
        mechanisms: added to every attention, self and cross.
        hidden: width of the feed-forward layers, 4·width by default.
        dropout: on weights and on each block's outputs.
        cross: whether each block also attends to an encoder's output.
        activation: of the feed-forward layers, as in `Encoder`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        layers: int,
        mechanisms: Sequence[Mechanism] = (),
        hidden: int | None = None,
        dropout: float = 0.1,
        cross: bool = False,
        activation: Activation = "gelu",
    ) -> None:
        super().__init__(width, heads, layers, mechanisms, hidden, dropout, "decoder", cross, activation)

    def forward(
        self,
        x: Tensor,
        padding: Tensor | None = None,
        chain: Chain | None = None,
        memory: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> Tensor:
        """(batch, sequence, width) → the same; `memory` is the encoder's output, (batch, source, width)."""
        chain = Chain() if chain is None else chain
        for block in self.blocks:
            x = block(x, padding, chain, memory, memory_padding)
        return self.norm(x)  # type: ignore[no-any-return]
