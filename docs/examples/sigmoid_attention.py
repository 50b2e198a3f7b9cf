"""Sigmoid attention (Ramapuram et al. 2024): each weight is the sigmoid of its own logit, unnormalised."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import overt


@dataclass(frozen=True)
class SigmoidAttention(overt.Mechanism):
    """Weights sigmoid(logit + b − log n), where n is the number of keys visible to the query.

    Args:
        bias: initial value of b, which each head learns separately.
    """

    bias: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.bias):
            raise ValueError(f"bias must be finite, got {self.bias}")


class SigmoidAttentionLayer(overt.MechanismLayer):
    """A bias for each head, and sigmoids in place of the softmax."""

    sums_to_one = False

    def __init__(self, config: SigmoidAttention, site: overt.mechanisms.Site) -> None:
        super().__init__(config, site)
        self.bias = nn.Parameter(torch.full((site.heads, 1, 1), config.bias))

    def weights(self, logits: Tensor, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
        """Logits → weights, (batch, heads, query, key), at least float32, zeros in hidden cells."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        visible = call.visible().expand(logits.shape)
        # Counted per row, so that padding, causal masks and caches make no difference.
        count = visible.sum(dim=-1, keepdim=True).clamp(min=1)
        weights = torch.sigmoid(logits + self.bias.to(logits.dtype) - count.log())
        return weights.masked_fill(~visible, 0.0)


overt.register_mechanism(SigmoidAttention, SigmoidAttentionLayer)
