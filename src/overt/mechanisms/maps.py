"""Operations on maps that every mechanism needs: hiding cells, and turning logits into weights.

A map has shape (batch, heads, query, key). `visible` is boolean, broadcasts to it, and is True where the key
may be seen *and* the query is not padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

HIDDEN = float("-inf")


def check_map(name: str, logits: Tensor) -> None:
    """Refuse anything but a floating-point (batch, heads, query, key) tensor."""
    if logits.dim() != 4:
        raise ValueError(f"{name} must have shape (batch, heads, query, key), got {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {logits.dtype}")


def check_visible(visible: Tensor, logits: Tensor) -> None:
    """Refuse a mask that is not boolean or does not broadcast to the map."""
    if visible.dtype != torch.bool:
        raise TypeError(
            f"visible must be a boolean tensor, True where a cell takes part, got {visible.dtype}"
        )
    shapes = zip(visible.shape, logits.shape, strict=False)
    if visible.dim() != 4 or any(mask not in (1, size) for mask, size in shapes):
        raise ValueError(
            f"visible must broadcast to the map's shape {tuple(logits.shape)}, got {tuple(visible.shape)}"
        )


def causal(queries: int, keys: int, device: torch.device | None = None) -> Tensor:
    """Causal visibility (1, 1, queries, keys): the last query sees all keys, the one before all but one, ….

    With fewer queries than keys these are the last rows of the square causal mask, as in cached decoding.
    """
    row = torch.arange(keys - queries, keys, device=device).view(-1, 1)
    return (torch.arange(keys, device=device) <= row).view(1, 1, queries, keys)


def transformed() -> bool:
    """Whether torch.func or forward-mode derivatives are active, which need plain operations."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def softmax(
    logits: Tensor, visible: Tensor | None, filled: bool = False, hidden: Tensor | None = None
) -> Tensor:
    """Softmax over the visible keys, at least in float32; a query that sees no key gets zeros, not NaN.

    A NaN in a visible cell stays a NaN.

    Args:
        logits: (batch, heads, query, key).
        visible: boolean, broadcasts to `logits`; None where every key may be seen.
        filled: whether hidden cells hold −inf already, which saves passes over the map where no gradient is
            needed.
        hidden: ~visible, if the caller has it, as several maps may have the same mask.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if visible is None:
        return torch.softmax(logits, dim=-1)
    wants_gradient = torch.is_grad_enabled() and logits.requires_grad
    if filled and not wants_gradient and not transformed() and logits.numel() > 0:
        weights, blind = torch.softmax(logits, dim=-1), ~visible.any(dim=-1, keepdim=True)
        if logits.device.type != "cpu" or torch.compiler.is_compiling() or type(weights) is not Tensor:
            return weights.masked_fill_(blind, 0.0)
        rows = blind.expand(*weights.shape[:-1], 1).flatten().nonzero().flatten()  # usually few
        weights.view(-1, weights.shape[-1]).index_fill_(0, rows, 0.0)
        return weights
    # A finite fill keeps an all-hidden row's gradient finite; exp(lowest − max) is exactly zero elsewhere.
    lowest, hidden = torch.finfo(logits.dtype).min, ~visible if hidden is None else hidden
    return torch.softmax(logits.masked_fill(hidden, lowest), dim=-1).masked_fill(hidden, 0.0)


def log_normalizer(logits: Tensor, visible: Tensor) -> Tensor:
    """log Σ exp over each query's visible keys, (batch, heads, query); 0 for a query that sees no key."""
    lowest = torch.finfo(logits.dtype).min
    sees_key = visible.any(dim=-1)
    return torch.logsumexp(logits.masked_fill(~visible, lowest), dim=-1).masked_fill(~sees_key, 0.0)


def as_wide(kept: Tensor, rows: Tensor) -> Tensor:
    """Rows kept from an earlier piece with the columns of these; those that did not exist then are zero."""
    if kept.shape[:2] != rows.shape[:2] or kept.shape[-1] > rows.shape[-1]:
        raise ValueError(
            f"kept rows of shape {tuple(kept.shape)} do not fit on top of {tuple(rows.shape)}: "
            "make a new Chain for each sequence"
        )
    missing = rows.shape[-1] - kept.shape[-1]
    return F.pad(kept, (0, missing)) if missing else kept


def stacked(kept: Tensor | None, rows: Tensor) -> Tensor:
    """Rows kept from an earlier piece on top of these; columns that did not exist then are zero, hidden."""
    return rows if kept is None else torch.cat([as_wide(kept, rows), rows], dim=-2)
