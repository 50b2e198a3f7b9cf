"""Talking heads (Shazeer et al. 2020): heads exchange logits before the softmax and weights after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import overt


@dataclass(frozen=True)
class TalkingHeads(overt.Mechanism):
    """Learned mixing of the heads' maps, starting from the identity.

    Args:
        before: mix logits, before the softmax.
        after: mix weights, after the softmax.
    """

    before: bool = True
    after: bool = True

    def __post_init__(self) -> None:
        if not (self.before or self.after):
            raise ValueError("before or after must be True, or there is nothing to mix")


class TalkingHeadsLayer(overt.MechanismLayer):
    """One heads × heads matrix on each side of the softmax."""

    def __init__(self, config: TalkingHeads, site: overt.mechanisms.Site) -> None:
        super().__init__(config, site)
        # The rows of `after` can have any sum, and negative entries.
        self.sums_to_one, self.signed = not config.after, config.after
        self.before = nn.Parameter(torch.eye(site.heads)) if config.before else None
        self.after = nn.Parameter(torch.eye(site.heads)) if config.after else None

    def logits(self, logits: Tensor, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
        """(batch, heads, query, key) → the same."""
        if self.before is None:
            return logits
        # Hidden cells may hold any value, and 0 · inf is NaN.
        shown = logits.masked_fill(~call.visible(), 0.0)
        return torch.einsum("gh,bhij->bgij", self.before.to(logits.dtype), shown)

    def mixed(self, weights: Tensor, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
        """(batch, heads, query, key) → the same."""
        if self.after is None:
            return weights
        mixed = torch.einsum("gh,bhij->bgij", self.after.to(weights.dtype), weights)
        return mixed.masked_fill(~call.visible(), 0.0)  # masks may differ between heads


overt.register_mechanism(TalkingHeads, TalkingHeadsLayer)
