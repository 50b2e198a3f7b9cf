"""Other graphs than the weights themselves: effective attention, norms of what is mixed, gradients."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from overt.tracing.capture import Call

GraphKind = Literal["attention", "effective", "gradient", "norm"]
GRAPHS: tuple[GraphKind, ...] = ("attention", "effective", "gradient", "norm")


def projected(call: Call) -> Tensor:
    """What each head adds to the output for each key, W_O W_V x: (batch, head, key, width), float64."""
    assert call.value is not None
    assert call.output is not None
    value = call.value.double()
    output = call.output.double().to(value.device)
    heads, dim = value.shape[1], value.shape[-1]
    if output.shape[1] != heads * dim:
        raise ValueError(
            f"the projection after {call.path} reads {output.shape[1]} numbers, its {heads} heads of {dim} "
            "make another number: not supported"
        )
    by_head: Tensor = output.T.reshape(heads, dim, -1)
    found: Tensor = torch.einsum("bhkd,hdw->bhkw", value, by_head)
    return found


def norm_map(call: Call, each: bool) -> Tensor:
    """‖α_ij f(x_j)‖ (Kobayashi et al. 2020): of each head, or of what all heads add together."""
    weights, vectors = call.weights.double(), projected(call)  # weights may be negative, norms are not
    if each:
        sizes: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
        return weights.abs() * sizes.unsqueeze(-2)
    # ‖Σ_h α_h f_h‖² by the heads' inner products at each key: no (query, key, width) tensor is made.
    gram = torch.einsum("bhkd,bgkd->bkhg", vectors, vectors)
    square = torch.einsum("bkhg,bhqk,bgqk->bqk", gram, weights, weights)
    return square.clamp(min=0.0).sqrt()


def effective_map(call: Call) -> Tensor:
    """The part of each head's weights that its values can tell apart, (batch, head, query, key).

    Effective attention (Brunner et al. 2020): weights without their part in the left null space of W_O W_V x,
    which changes no output. A query's null space is that of the keys it may see. Entries may be negative.
    """
    weights, vectors = call.weights.double(), projected(call)
    batch, _, queries, keys = weights.shape
    visible = call.visible
    if visible is None:
        visible = torch.ones(1, queries, keys, dtype=torch.bool)
    visible = visible.expand(batch, queries, keys).to(weights.device)
    out = torch.zeros_like(weights)
    for example in range(batch):
        patterns, which = torch.unique(visible[example], dim=0, return_inverse=True)
        for number, seen in enumerate(patterns):
            rows = (which == number).nonzero().flatten()
            columns = seen.nonzero().flatten()
            if len(columns) == 0:
                continue
            space = _column_space(vectors[example][:, columns])  # (head, key, rank or more)
            part = weights[example][:, rows][:, :, columns]
            part = (part @ space) @ space.mT
            out[example, :, rows.unsqueeze(1), columns] = part
    return out


def _column_space(vectors: Tensor) -> Tensor:
    """An orthonormal basis of each head's column space, zeros beyond its rank: (head, key, ≤ key)."""
    left, sizes, _ = torch.linalg.svd(vectors, full_matrices=False)
    floor = sizes[:, :1] * max(vectors.shape[-2:]) * torch.finfo(vectors.dtype).eps
    # Values come from float32 arithmetic, whose rounding is no dimension.
    floor = torch.maximum(floor, sizes[:, :1] * 1e-6)
    space: Tensor = left * (sizes > floor).unsqueeze(1)
    return space


def gradient_map(weights: Tensor, gradient: Tensor, each: bool) -> Tensor:
    """max(0, A ⊙ ∂y/∂A), of each head or averaged over heads."""
    cells = (weights.detach() * gradient).double().clamp(min=0.0)
    return cells if each else cells.mean(dim=1)
