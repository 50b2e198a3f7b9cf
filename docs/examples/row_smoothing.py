"""Each row of the map is smoothed with the row above it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import overt
from overt.mechanisms.maps import stacked


@dataclass(frozen=True)
class RowSmoothing(overt.Mechanism):
    """Row i becomes (1 − share)·(row i) + share·(row i − 1).

    Args:
        share: weight of the row above.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"share must lie in [0, 1], got {self.share}")


class RowSmoothingLayer(overt.MechanismLayer):
    """Reads one row above, which cached decoding must keep."""

    reads_rows = True
    earlier_rows = 1
    sums_to_one = False  # cells hidden from a row are set to zero

    def mixed(self, weights: Tensor, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
        """(batch, heads, query, key) → the same."""
        kept = chain.keep_rows(call.site, self.name, weights, self.earlier_rows)
        rows = F.pad(stacked(kept, weights), (0, 0, 1, 0))  # a row of zeros above the very first row
        above = rows[..., -1 - weights.shape[-2] : -1, :]
        some = above.any(dim=-1, keepdim=True)  # False above the first row and at padding
        above = torch.where(some, above, weights)
        smoothed = (1.0 - self.config.share) * weights + self.config.share * above
        return smoothed.masked_fill(~call.visible(), 0.0)


overt.register_mechanism(RowSmoothing, RowSmoothingLayer)
