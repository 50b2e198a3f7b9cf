"""Terms of the current logits: relative positions, additive scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
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

    Tokens are the pixels of an image, row by row.

    Args:
        head_dim: width of a head's queries.
        height: of the largest image.
        width: of the largest image.
    """

    def __init__(self, head_dim: int, height: int, width: int) -> None:
        super().__init__()
        _check.whole("height", height, 1)
        _check.whole("width", width, 1)
        self.height, self.width = height, width
        self.vertical = nn.Parameter(torch.empty(2 * height - 1, head_dim))
        self.horizontal = nn.Parameter(torch.empty(2 * width - 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the vectors anew, with standard deviation head_dim^(−1/2)."""
        for vectors in (self.vertical, self.horizontal):
            nn.init.normal_(vectors, std=vectors.shape[1] ** -0.5)

    def forward(
        self, query: Tensor, keys: int, first_row: int = 0, size: tuple[int, int] | None = None
    ) -> Tensor:
        """(batch, heads, pixels, dim) → (batch, heads, pixels, pixels).

        Args:
            query: the queries of all pixels.
            keys: number of keys, which is that of pixels.
            first_row: 0, as all rows come at once.
            size: height and width of the image; None for the largest. A smaller one uses the inner vectors.
        """
        height, width = self._size(query, keys, first_row, size)
        down, across = _distances(height, width, query.device)
        vertical, horizontal = self._vectors(height, width)
        return _pick(query @ vertical.mT, down) + _pick(query @ horizontal.mT, across)

    def widen(
        self,
        query: Tensor,
        key: Tensor,
        scale: float,
        size: tuple[int, int] | None = None,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys whose plain products are scale·q_i·k_j + r_ij.

        A query is followed by its products with the vectors of every row and every column of the image, a key
        by 1 in the places of its own row and column and 0 elsewhere. In memory, the heads of a pixel are side
        by side.

        Args:
            query: (batch, heads, pixels, dim).
            key: (batch, key heads, pixels, dim).
            scale: of the products.
            size: as in `forward`.
            places: those of `places_in` for this size, which several layers can share; made here if None.

        Returns:
            (batch, heads, pixels, dim + height + width) and (batch, key heads, pixels, dim + height + width);
            wider where `places` are.
        """
        height, width = self._size(query, key.shape[-2], 0, size)
        if places is None:
            places = places_in(height, width, key.device, key.dtype)
        picks, shown = places
        query, key = query.transpose(1, 2), key.transpose(1, 2)  # (batch, pixels, heads, dim)
        products = query @ torch.cat(self._vectors(height, width)).mT
        picked = products.gather(-1, picks.expand(*products.shape[:-1], -1))
        scaled = query if scale == 1.0 else query * scale
        wide_query = torch.cat([scaled, picked.to(scaled.dtype)], dim=-1)
        wide_key = torch.cat([key, shown.to(key.dtype).expand(*key.shape[:-1], -1)], dim=-1)
        return wide_query.transpose(1, 2), wide_key.transpose(1, 2)

    def _size(
        self, query: Tensor, keys: int, first_row: int, size: tuple[int, int] | None
    ) -> tuple[int, int]:
        height, width = (self.height, self.width) if size is None else size
        if not (1 <= height <= self.height and 1 <= width <= self.width):
            raise ValueError(
                f"relative positions are for images of up to {self.height} × {self.width}, "
                f"got {height} × {width}"
            )
        pixels = height * width
        if first_row != 0 or query.shape[-2] != pixels or keys != pixels:
            raise ValueError(
                f"a {height} × {width} image has {pixels} tokens, "
                f"got {query.shape[-2]} queries and {keys} keys"
            )
        return height, width

    def _vectors(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Those of the distances within an image, (2·height − 1, dim) and (2·width − 1, dim)."""
        vertical = self.vertical[self.height - height : self.height + height - 1]
        return vertical, self.horizontal[self.width - width : self.width + width - 1]


class Places(NamedTuple):
    """What widened queries and keys of all pixels share.

    Attributes:
        picks: (pixels, 1, height + width), which of a query's products with all vectors belong to each row
            and each column of the image.
        shown: (pixels, 1, height + width), 1 for a pixel's own row and column.
    """

    picks: Tensor
    shown: Tensor


def places_in(height: int, width: int, device: torch.device, dtype: torch.dtype, fill: int = 0) -> Places:
    """The places of an image's pixels.

    Args:
        height: of the image.
        width: of the image.
        device: of the tensors.
        dtype: of `shown`.
        fill: number of further columns, in which keys are 0, so that they change no product.
    """
    pixel = torch.arange(height * width, device=device).view(-1, 1)
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    row, column = pixel // width, pixel % width
    down, across = rows - row + height - 1, columns - column + width - 1 + 2 * height - 1
    picks = F.pad(torch.cat([down, across], dim=1), (0, fill))
    shown = F.pad(torch.cat([rows == row, columns == column], dim=1).to(dtype), (0, fill))
    return Places(picks.unsqueeze(1), shown.unsqueeze(1))


def _distances(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns from each pixel to each other one, (pixels, pixels), counted from 0."""
    pixel = torch.arange(height * width, device=device)
    row, column = pixel // width, pixel % width
    down = row.view(1, -1) - row.view(-1, 1) + height - 1
    return down, column.view(1, -1) - column.view(-1, 1) + width - 1


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
