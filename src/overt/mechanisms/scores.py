"""Terms of the current logits: relative positions, additive scores."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overt import _check


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
    """Bahdanau's score, v·tanh(q_i + k_j + b) per head, for q and k already projected."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(heads, head_dim) * head_dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """(batch, heads, query, dim), (batch, heads, key, dim) → (batch, heads, query, key)."""
        hidden = query.unsqueeze(-2) + (key + self.bias.unsqueeze(1)).unsqueeze(-3)
        return torch.einsum("bhijd,hd->bhij", torch.tanh(hidden), self.vector)
