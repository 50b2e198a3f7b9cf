"""The size of what attention adds, ‖α f(x)‖ (Kobayashi et al. 2020)."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.tracing.capture import CapturedAttention
from overt.tracing.mixing.mixing import Mixing, register_mixing
from overt.tracing.mixing.projected import projected


@register_mixing
class Norm(Mixing):
    """Norms of what each key adds to each query's output."""

    name = "norm"
    title = "norm of what is added"
    values = True
    unit = True
    signed = False
    averages = False  # the norm of a sum is not the mean of the norms

    @classmethod
    def titled(cls, method: str) -> str:
        """As for other mixings, but worded for norms."""
        return cls.title if method == "raw" else f"{method} of norms"

    def map(self, call: CapturedAttention) -> Tensor:
        """Of each head, or of what all heads add together."""
        return norm_map(call, self.keep)


def norm_map(call: CapturedAttention, each: bool) -> Tensor:
    """‖α_ij f(x_j)‖ (Kobayashi et al. 2020): of each head, or of what all heads add together."""
    weights, vectors = call.weights.double(), projected(call)  # weights may be negative, norms are not
    if each:
        sizes: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
        return weights.abs() * sizes.unsqueeze(-2)
    # ‖Σ_h α_h f_h‖² by the heads' inner products at each key: no (query, key, width) tensor is needed.
    gram = torch.einsum("bhkd,bgkd->bkhg", vectors, vectors)
    square = torch.einsum("bkhg,bhqk,bgqk->bqk", gram, weights, weights)
    return square.clamp(min=0.0).sqrt()
