"""Calls whose maps are not made: their masks in parts, read in blocks, and their output at some rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overt.tracing import masks
from overt.tracing.asked import HIDDEN, Asked, Sight
from overt.tracing.sights import Refusal
from overt.tracing.states import StateLevel

MOST_ROWS, MOST_CELLS = 16, 2**22  # at which a call's output is compared


def tolerance(dtype: torch.dtype) -> float:
    """How far apart, relative to their size, two ways to compute the same may be."""
    return 1e-3 if dtype in (torch.float32, torch.float64) else 5e-2


def sum_to_one(weights: Tensor) -> bool:
    """Whether rows do, but for those of queries that see no key; with attention sinks they do not.

    Args:
        weights: (…, query, key).
    """
    sums = weights.detach().sum(dim=-1, dtype=torch.float64)
    return bool(((sums - 1).abs() < tolerance(weights.dtype)).logical_or(~(sums > 0)).all())


def check_same(mixed: Tensor, output: Tensor, weights: Tensor) -> None:
    """Refuse weights that do not give what the call returned, but for queries that see no key."""
    seeing = (weights.sum(dim=-1) > 0).reshape(output.shape[:-1])
    apart = (mixed - output.to(mixed.dtype))[seeing].abs()
    size = output[seeing].abs().max() if apart.numel() else torch.zeros(())
    if apart.numel() and not float(apart.max()) <= tolerance(output.dtype) * max(float(size), 1e-3):
        raise Refusal("its mask cannot be read: the weights that follow from it give another output")


def without_blind(weights: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Weights that torch returns, with zeros in place of NaN for queries that see no key.

    Where nobody requests its weights, torch's attention gives such queries zeros, which later layers read.

    Args:
        weights: (…, query, key).
        query: what queries are made of.
        key: what keys are made of; NaN in either of them stays NaN.
    """
    blind = weights.isnan().all(dim=-1, keepdim=True)
    if not bool(blind.any()) or bool(query.isnan().any()) or bool(key.isnan().any()):
        return weights
    return weights.masked_fill(blind, 0.0)


def some_rows(asked: Asked) -> list[int]:
    """Queries at which a call is checked: the first, the last, and some between."""
    batch, heads, queries, keys = asked.shape
    count = min(queries, max(2, min(MOST_ROWS, MOST_CELLS // (batch * heads * keys))))
    return sorted({round(place) for place in torch.linspace(0, queries - 1, count).tolist()})


def mixed_rows(asked: Asked, value: Tensor, rows: list[int]) -> tuple[Tensor, Tensor]:
    """What some queries draw from values, (batch, head, row, dim), and their weights."""
    weights = StateLevel(asked, "each").row(rows)
    group = asked.shape[1] // value.shape[1]
    dtype = torch.promote_types(value.dtype, torch.float32)
    parts = []
    for number in range(value.shape[1]):  # one head's values at a time are turned into a wider type
        mine = weights[:, number * group : (number + 1) * group].to(dtype)
        parts.append(mine @ value[:, number : number + 1].to(dtype))
    return torch.cat(parts, dim=1), weights


def unrepeated(key: Tensor) -> Tensor:
    """Keys (batch, head, key, dim) without the copies that adjacent heads of a group have."""
    heads = key.shape[1]
    for group in range(heads, 1, -1):
        if heads % group:
            continue
        first = key[:, ::group]
        grouped = torch.unflatten(key, 1, (heads // group, group))
        if torch.equal(grouped[:, :, 1, 0], first[:, :, 0]) and all(
            torch.equal(grouped[:, :, number], first) for number in range(1, group)
        ):
            return first
    return key


def sight_of_torch_in_parts(
    given: dict[str, Any], shape: tuple[int, ...], room: Callable[[int], None] | None = None
) -> Sight:
    """The masks of torch's functional attention in parts; see `sights.sight_of_torch`."""
    batch, heads, queries, keys = shape
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    sight = Sight()
    if mask is not None:
        mask = mask.view(batch, heads, queries, keys) if mask.dim() == 3 and len(mask) > 1 else mask
        mask = mask.view(1, 1, *mask.shape[-2:]) if mask.dim() < 4 else mask
        shown = ~mask if mask.dtype == torch.bool else mask
        sight = masks.sight_of(shown, queries, keys, room=room)
    if padding is None:
        return sight
    padding = padding.view(-1, 1, 1, keys)
    shown = ~padding if padding.dtype == torch.bool else padding
    more = masks.sight_of(shown, queries, keys, room=room)
    if more.bias is not None:
        return replace(sight, bias=_sum(sight.bias, more.bias, room))
    if sight.keys is None or more.keys is None:
        return replace(sight, keys=more.keys if sight.keys is None else sight.keys)
    return replace(sight, keys=sight.keys & more.keys)


def _sum(bias: Tensor | None, more: Tensor, room: Callable[[int], None] | None) -> Tensor:
    if bias is None:
        return more
    if room is not None:
        room(masks.cells_of(bias, more) * torch.promote_types(bias.dtype, more.dtype).itemsize)
    return bias + more


def hides_later(asked: Asked) -> bool:
    """Whether no query of self-attention sees a later key."""
    _, _, queries, keys = asked.shape
    sight = asked.sight
    if queries != keys or keys < 2:
        return False
    if sight.causal and sight.offset <= 0:
        return True
    if sight.bias is None:
        return False
    places = torch.arange(keys, device=sight.bias.device)
    for start, _, shown in masks.blocks(sight.bias):
        at = torch.arange(start, start + shown.shape[-2], device=places.device)
        if bool((shown & (places > at.unsqueeze(1))).any()):
            return False
    return True


def keys_seen(sight: Sight) -> Tensor | None:
    """Keys that some query sees, boolean (batch or 1, key) on the CPU; None for all."""
    if sight.bias is None:
        return None if sight.keys is None else sight.keys.cpu()
    seen = torch.zeros(sight.bias.shape[0], sight.bias.shape[-1], dtype=torch.bool, device=sight.bias.device)
    for *_, shown in masks.blocks(sight.bias):
        seen |= shown.any(dim=-2).any(dim=1)
    return (seen if sight.keys is None else seen & sight.keys).cpu()


def attended(asked: Asked, value: Tensor) -> Tensor:
    """What torch's attention makes of values, (batch, head, query, dim), masks being made for few rows."""
    sight, (_, heads, queries, keys) = asked.sight, asked.shape
    grouped = heads != asked.key.shape[1]
    if not sight.needs_mask:
        return F.scaled_dot_product_attention(
            asked.query, asked.key, value, is_causal=sight.causal, scale=asked.scale, enable_gqa=grouped
        )
    places = torch.arange(keys, device=asked.query.device)
    parts = []
    for start in range(0, queries, masks.ROWS):
        at = torch.arange(start, min(start + masks.ROWS, queries), device=places.device)
        mask = sight.shown(at, places)
        if sight.bias is not None:
            bias = sight.bias if sight.bias.shape[2] == 1 else sight.bias[:, :, at]
            mask = bias if mask is None else bias.masked_fill(~mask, HIDDEN)
            mask = mask.to(asked.query.dtype)
        blind = None if mask is None or sight.bias is not None else ~mask.any(dim=-1, keepdim=True)
        part = F.scaled_dot_product_attention(
            asked.query[:, :, at],
            asked.key,
            value,
            mask if blind is None or mask is None else mask | blind,
            scale=asked.scale,
            enable_gqa=grouped,
        )
        parts.append(part if blind is None else part.masked_fill(blind, 0.0))
    return torch.cat(parts, dim=2)
