"""What FlexAttention's mask_mod and score_mod say of each query and key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overt.tracing.asked import Asked

MOST_CELLS = 2**24  # of a mask that are evaluated together


def mask_of(mask_mod: Any, asked: Asked) -> Tensor:
    """Which cells a mask_mod shows, boolean (batch, head, query, key)."""
    from torch.nn.attention.flex_attention import create_mask

    batch, heads, queries, keys = asked.shape
    shown: Tensor = create_mask(mask_mod, batch, heads, queries, keys, device=str(asked.query.device))
    return shown


def mask_in_blocks(mask_mod: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The same, boolean in a shape that may have 1 for the batch and the head, by blocks of queries."""
    batch, heads, queries, keys = shape
    mask = torch.empty(shape, dtype=torch.bool, device=device)
    size = max(1, MOST_CELLS // (batch * heads * keys))
    for start in range(0, queries, size):
        rows = torch.arange(start, min(start + size, queries), device=device)
        places = [torch.arange(count, device=device) for count in (batch, heads)]
        seen = _over_places(mask_mod, [*places, rows, torch.arange(keys, device=device)])
        mask[:, :, start : start + size] = seen
    return mask


def modified(score_mod: Any, scores: Tensor) -> Tensor:
    """Scores as a score_mod changes them."""
    return _over_places(
        score_mod, [torch.arange(size, device=scores.device) for size in scores.shape], scores
    )


def changes_scores(score_mod: Any) -> bool:
    """Whether a score_mod is other than the one that stands for none."""
    from torch.nn.attention import flex_attention

    return score_mod is not getattr(flex_attention, "_identity", None)


def _over_places(function: Any, places: list[Tensor], *scores: Tensor) -> Tensor:
    """A mask_mod or score_mod at all places: batch, head, query and key."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for axis in (3, 2, 1, 0):
        in_dims = (*(0 for _ in scores), *(0 if place == axis else None for place in range(4)))
        function = torch.vmap(function, in_dims=in_dims)
    with TransformGetItemToIndex():
        found: Tensor = function(*scores, *places)
    return found
