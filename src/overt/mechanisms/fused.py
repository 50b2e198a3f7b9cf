"""Fused GPU kernels: which calls they take, and why not others."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.mechanisms import backend

WIDEST = 128
MOST_EXAMPLES = 65_535
ROOM_FOR_WIDE = 180_224  # bytes of shared memory


def unfit(
    query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float, off: str | None
) -> str | None:
    """Why this call is not for the kernels; None if it is."""
    if reason := backend.unfit(backend.KERNELS, query, key, value, off=off):
        return reason
    if value.shape != key.shape:
        return f"values {tuple(value.shape)} and keys {tuple(key.shape)} differ in shape"
    if query.shape[-1] > WIDEST:
        return f"heads are {query.shape[-1]} wide, kernels take up to {WIDEST}"
    if query.dtype == torch.float32 and query.shape[-1] > 64 and backend.room(query.device) < ROOM_FOR_WIDE:
        return "float32 heads of more than 64 need more shared memory than this GPU has"
    if not scale > 0.0:
        return f"the scale must be positive, got {scale}"
    if dropout >= 1.0:
        return "every weight is dropped"
    if query.shape[0] > MOST_EXAMPLES:
        return f"kernels take up to {MOST_EXAMPLES} examples, got {query.shape[0]}"
    if min(query.shape) == 0 or min(key.shape) == 0:
        return "there is nothing to attend"
    return None
