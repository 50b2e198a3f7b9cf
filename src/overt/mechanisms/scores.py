"""Terms of the current logits: relative positions, additive scores, synthesised maps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from overt import _check
from overt.mechanisms.site import Site


class RelativePosition(nn.Module):
    """1-D relative position logits, r_ij = q_i·e_(i−j) (Evolving Attention, equation 2).

    Distances beyond `max_distance` share the outermost vectors.
    """

    def __init__(self, head_dim: int, max_distance: int) -> None:
        super().__init__()
        _check.whole("max_distance", max_distance, 1)
        self.max_distance = max_distance
        self.vectors = nn.Parameter(torch.randn(2 * max_distance + 1, head_dim) * head_dim**-0.5)

    def forward(self, query: Tensor, keys: int, first_row: int = 0) -> Tensor:
        """(batch, heads, query, dim) → (batch, heads, query, keys)."""
        rows = torch.arange(first_row, first_row + query.shape[-2], device=query.device).view(-1, 1)
        distance = rows - torch.arange(keys, device=query.device)
        index = distance.clamp(-self.max_distance, self.max_distance) + self.max_distance
        return _pick(query @ self.vectors.mT, index)


class RelativePosition2d(nn.Module):
    """2-D relative logits, r_ij = q_i·eᴴ[h(j)−h(i)] + q_i·eᵂ[w(j)−w(i)] (Evolving Attention, equation 3).

    Tokens are the pixels of a height × width image, row by row.
    """

    def __init__(self, head_dim: int, height: int, width: int) -> None:
        super().__init__()
        _check.whole("height", height, 1)
        _check.whole("width", width, 1)
        self.height, self.width = height, width
        self.vertical = nn.Parameter(torch.randn(2 * height - 1, head_dim) * head_dim**-0.5)
        self.horizontal = nn.Parameter(torch.randn(2 * width - 1, head_dim) * head_dim**-0.5)

    def forward(self, query: Tensor, keys: int, first_row: int = 0) -> Tensor:
        """(batch, heads, height·width, dim) → (batch, heads, height·width, height·width)."""
        pixels = self.height * self.width
        if first_row != 0 or query.shape[-2] != pixels or keys != pixels:
            raise ValueError(
                f"a {self.height} × {self.width} image has {pixels} tokens, "
                f"got {query.shape[-2]} queries and {keys} keys"
            )
        pixel = torch.arange(pixels, device=query.device)
        row, column = pixel // self.width, pixel % self.width
        down = row.view(1, -1) - row.view(-1, 1) + self.height - 1
        across = column.view(1, -1) - column.view(-1, 1) + self.width - 1
        return _pick(query @ self.vertical.mT, down) + _pick(query @ self.horizontal.mT, across)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """values[…, i, index[i, j]] as (…, i, j)."""
    return values.gather(-1, index.expand(*values.shape[:-1], -1))


class AdditiveScore(nn.Module):
    """Bahdanau's score, v·tanh(q_i + k_j + b) per head, q and k being already projected."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(heads, head_dim) * head_dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """(batch, heads, query, dim), (batch, heads, key, dim) → (batch, heads, query, key)."""
        hidden = query.unsqueeze(-2) + (key + self.bias.unsqueeze(1)).unsqueeze(-3)
        return torch.einsum("bhijd,hd->bhij", torch.tanh(hidden), self.vector)


@dataclass(frozen=True)
class Synthesizer:
    """Synthesised logits mixed with the dot product (Tay et al. 2020), a baseline of EA's Table 3.

    The two maps are mixed with learned weights that sum to one, starting equal.

    Args:
        form: "random" learns one map per head that ignores the input; "dense" predicts a query's row of the
            map from the query alone.
        max_length: longest sequence; the number of parameters grows with it.
    """

    form: Literal["random", "dense"] = "dense"
    max_length: int = 512

    def __post_init__(self) -> None:
        _check.one_of("form", self.form, ("random", "dense"))
        _check.whole("max_length", self.max_length, 1)


class SynthesizerLayer(nn.Module):
    """`Synthesizer` at one site."""

    def __init__(self, config: Synthesizer, site: Site) -> None:
        super().__init__()
        self.config = config
        heads, width, length = site.heads, site.head_dim, config.max_length
        self.balance = nn.Parameter(torch.zeros(2))
        if config.form == "random":
            self.map = nn.Parameter(torch.randn(heads, length, length) * 0.02)
        else:
            self.inner = nn.Parameter(torch.randn(heads, width, width) * width**-0.5)
            self.inner_bias = nn.Parameter(torch.zeros(heads, 1, width))
            self.outer = nn.Parameter(torch.randn(heads, width, length) * width**-0.5)

    def forward(self, logits: Tensor, query: Tensor, first_row: int = 0) -> Tensor:
        """Mixed logits, (batch, heads, query, key); query is (batch, heads, query, dim)."""
        queries, keys = logits.shape[-2:]
        if max(first_row + queries, keys) > self.config.max_length:
            raise ValueError(
                f"max_length of the Synthesizer is {self.config.max_length}, "
                f"got {first_row + queries} queries and {keys} keys"
            )
        if self.config.form == "random":
            made = self.map[:, first_row : first_row + queries, :keys]
        else:
            made = torch.relu(query @ self.inner + self.inner_bias) @ self.outer[..., :keys]
        share = torch.softmax(self.balance, dim=0)
        return share[0] * logits + share[1] * made.to(logits.dtype)
