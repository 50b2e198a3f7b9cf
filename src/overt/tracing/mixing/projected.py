"""What attention adds to the output, used by several mixings."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.tracing.capture import CapturedAttention


def projected(call: CapturedAttention) -> Tensor:
    """What each head adds to the output for each key, W_O W_V x: (batch, head, key, width), float64."""
    assert call.value is not None
    assert call.output is not None
    value = call.value.double()
    output = call.output.double().to(value.device)
    heads, dim = value.shape[1], value.shape[-1]
    if output.shape[1] != heads * dim:
        raise ValueError(
            f"the projection after {call.path} reads {output.shape[1]} numbers, but {heads} heads of {dim} "
            "write another number: not supported"
        )
    by_head: Tensor = output.T.reshape(heads, dim, -1)
    vectors: Tensor = torch.einsum("bhkd,hdw->bhkw", value, by_head)
    return vectors
