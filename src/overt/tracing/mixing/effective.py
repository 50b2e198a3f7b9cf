"""Effective attention (Brunner et al. 2020): weights without the part that changes no output."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.tracing.capture import CapturedAttention
from overt.tracing.mixing.mixing import Mixing, register_mixing
from overt.tracing.mixing.projected import narrow


@register_mixing
class Effective(Mixing):
    """Effective attention; signed in rollout, clipped at zero and renormalised in flow."""

    name = "effective"
    title = "effective attention"
    values = True
    unit = False
    signed = True

    def map(self, call: CapturedAttention) -> Tensor:
        """Of each head, or the mean over heads."""
        return self.reduced(effective_map(call))


def effective_map(call: CapturedAttention) -> Tensor:
    """The part of each head's weights that affects its output, (batch, head, query, key).

    Effective attention (Brunner et al. 2020): weights without their part in the left null space of W_O W_V x,
    which changes no output. A query's null space is that of the keys it may see. Entries may be negative.
    """
    # Decompositions are on the CPU: each is small, and there may be one for each query.
    weights, vectors = call.weights.double(), narrow(call).cpu()
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
            space = _column_space(vectors[example][:, columns.cpu()])  # (head, key, rank or more)
            space = space.to(weights.device)
            part = weights[example][:, rows][:, :, columns]
            part = (part @ space) @ space.mT
            out[example, :, rows.unsqueeze(1), columns] = part
    return out


def _column_space(vectors: Tensor) -> Tensor:
    """An orthonormal basis of each head's column space, zeros beyond its rank: (head, key, ≤ key)."""
    left, sizes, _ = torch.linalg.svd(vectors, full_matrices=False)
    floor = sizes[:, :1] * max(vectors.shape[-2:]) * torch.finfo(vectors.dtype).eps
    # Values come from float32 arithmetic, whose rounding adds no dimension.
    floor = torch.maximum(floor, sizes[:, :1] * 1e-6)
    space: Tensor = left * (sizes > floor).unsqueeze(1)
    return space
