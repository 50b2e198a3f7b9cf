"""What attention adds to the output, used by several mixings."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.tracing.capture import CapturedAttention


def projected(call: CapturedAttention) -> Tensor:
    """What each head adds to the output for each key, W_O W_V x: (batch, head, key, width), float64."""
    value, by_head = _value_and_output(call)
    vectors: Tensor = torch.einsum("bhkd,hdw->bhkw", value, by_head)
    return vectors


def narrow(call: CapturedAttention) -> Tensor:
    """W_O W_V x in a basis of each head's own outputs: (batch, head, key, ≤ head's width), float64.

    A rotation of `projected`, without the directions that a head cannot write to: lengths, angles, singular
    values and the space that its columns span are the same, and a decomposition is many times faster.
    """
    value, by_head = _value_and_output(call)
    _, triangle = torch.linalg.qr(by_head.mT)  # by_head is triangle.mT times orthonormal rows
    vectors: Tensor = torch.einsum("bhkd,hwd->bhkw", value, triangle)
    return vectors


def _value_and_output(call: CapturedAttention) -> tuple[Tensor, Tensor]:
    """Values, (batch, head, key, dim), and each head's part of the projection, (head, dim, width)."""
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
    return value, by_head
