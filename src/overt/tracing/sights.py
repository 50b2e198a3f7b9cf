"""Masks in parts: what a mask of torch's means for each query and key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from overt.tracing.asked import HIDDEN, Asked, Sight
from overt.tracing.masks import shown_cells, sight_of


class Refusal(Exception):  # noqa: N818, turned into a call that is refused
    """Why a call cannot be read."""


def asked_of(query: Tensor, key: Tensor, scale: float, sight: Sight) -> Asked:
    """Queries and keys, with the batch and the heads that they are expanded to."""
    batch = max(query.shape[0], key.shape[0])
    heads = query.shape[1] if query.shape[1] >= key.shape[1] else key.shape[1]
    if heads % key.shape[1]:
        raise Refusal(f"its {heads} heads of queries cannot share {key.shape[1]} heads of keys")
    query = query.expand(batch, heads, -1, -1)
    if sight.keys is not None:
        sight = replace(sight, keys=sight.keys.expand(batch, -1))
    return Asked(query, key.expand(batch, -1, -1, -1), float(scale), sight)


def causal_offset(mask: Any) -> int | None:
    """The offset of torch's own causal masks; None for other masks."""
    if not type(mask).__module__.startswith("torch.nn.attention.bias"):
        return None
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(mask, CausalBias):
        return None
    lower = mask.variant == CausalVariant.LOWER_RIGHT
    return int(mask.seq_len_kv - mask.seq_len_q) if lower else 0


def visible_of(asked: Asked) -> Tensor | None:
    """Which cells of a map are visible, boolean (batch or 1, query, key) on the CPU; None for all."""
    _, _, queries, keys = asked.shape
    device = asked.query.device
    seen = asked.sight.shown(torch.arange(queries, device=device), torch.arange(keys, device=device))
    if asked.sight.bias is not None:
        shown = shown_cells(asked.sight.bias).any(dim=1, keepdim=True)
        seen = shown if seen is None else seen & shown
    if seen is None:
        return None
    return seen[:, 0].expand(-1, queries, -1).cpu()


def sight_of_torch(given: dict[str, Any], weights: Tensor) -> Sight:
    """The masks of torch's functional attention, where True hides."""
    batch, heads, queries, keys = weights.shape
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    whole = torch.zeros(1, 1, 1, keys, dtype=weights.dtype, device=weights.device)
    if mask is not None:
        mask = mask.view(batch, heads, queries, keys) if mask.dim() == 3 and len(mask) > 1 else mask
        mask = mask.view(-1, *mask.shape[-2:]).unsqueeze(0) if mask.dim() < 4 else mask
        whole = whole + _added(mask, weights.dtype)
    if padding is not None:
        whole = whole + _added(padding.view(-1, 1, 1, keys), weights.dtype)
    return sight_of(whole, queries, keys, exact=True)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, HIDDEN)
