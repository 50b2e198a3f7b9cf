"""The loss of outputs of which several may be right at once."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from overt import _check

Reduction = Literal["sum", "mean"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


def multi_label_loss(logits: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Binary cross-entropy, summed over classes, and summed or averaged over the batch; at least float32.

    Args:
        logits: (batch, classes).
        targets: (batch, classes), from 0 to 1.
        reduction: over the batch.
    """
    _check.one_of("reduction", reduction, REDUCTIONS)
    if targets.shape != logits.shape:
        raise ValueError(f"targets must have shape {tuple(logits.shape)}, got {tuple(targets.shape)}")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype), reduction="sum")
    return total if reduction == "sum" else total / logits.shape[0]
