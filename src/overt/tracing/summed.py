"""Torch's attention together with the log-sum-exp of each query's scores, which its kernels make anyway.

`scaled_dot_product_attention` drops it, and making it again takes all products of queries and keys. The
functions behind it, which return it, are not part of torch's interface: where one is missing, or torch would
choose another way, there is no log-sum-exp, and nothing else changes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

NARROW = 8  # torch pads heads whose width is no multiple of it


def attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor] | None:
    """Output (batch, head, query, dim) and log-sum-exp, float32 (batch, head, query); None if there is none.

    Args:
        query: (batch, head, query, dim).
        key: (batch, key head, key, dim).
        value: (batch, key head, key, dim).
        causal: whether query i sees the keys up to i alone, as in torch.
        scale: of the products.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return None
    on_cpu = query.device.type == "cpu"
    if query.dtype == torch.float64 or (on_cpu and query.dtype != torch.float32):
        return None  # in half precision, exponentials on a CPU are approximate: 6e-5 off
    if query.shape[-1] % NARROW or value.shape[-1] != query.shape[-1]:
        return None
    grouped = query.shape[1] != key.shape[1]
    choose: Any = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return None
    chosen = choose(query, key, value, None, 0.0, causal, scale=scale, enable_gqa=grouped)
    if chosen == SDPBackend.FLASH_ATTENTION.value:
        found = _called(
            f"_scaled_dot_product_flash_attention{'_for_cpu' if on_cpu else ''}",
            *(query, key, value, 0.0, causal),
            scale=scale,
        )
    elif chosen == SDPBackend.CUDNN_ATTENTION.value:
        found = _called(
            "_scaled_dot_product_cudnn_attention",
            *(query, key, value, None, True, 0.0, causal),
            scale=scale,
        )
    else:
        return None
    if found is None:
        return None
    output, sums = found
    shape = query.shape[:3]
    if sums.numel() != shape.numel() or sums.dtype != torch.float32:
        return None
    return output, sums.reshape(shape)


def _called(name: str, *arguments: Any, scale: float) -> tuple[Tensor, Tensor] | None:
    """The first two results of one of torch's functions; None if there is no such function."""
    function = getattr(torch.ops.aten, name, None)
    if function is None:
        return None
    output, sums, *_ = function(*arguments, scale=scale)
    return output, sums
