"""Plain attention as in transformers' eager functions, in steps that mechanisms can come between."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.mechanisms.attention import FINITE_HIDDEN
from overt.mechanisms.call import repeat_heads


def logits_of(
    query: Tensor, key: Tensor, scaling: float, softcap: float | None, position_bias: Tensor | None
) -> Tensor:
    """Current logits without the mask, (batch, heads, query, key)."""
    logits = query @ repeat_heads(key, query.shape[1]).mT * scaling
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if position_bias is not None:
        logits = logits + position_bias
    return logits


def split_mask(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A transformers mask, boolean (True is visible) or additive, as visibility and finite bias."""
    if mask.dtype == torch.bool:
        return mask, None
    shown = (mask > FINITE_HIDDEN) | mask.isnan()
    return shown, mask.masked_fill(~shown, 0.0)


def mix_values(weights: Tensor, value: Tensor) -> Tensor:
    """Values averaged by weights, in transformers' layout: (batch, query, heads, dim)."""
    mixed = weights.to(value.dtype) @ repeat_heads(value, weights.shape[1])
    return mixed.transpose(1, 2).contiguous()
