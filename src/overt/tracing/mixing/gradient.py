"""Weights times the gradient of the score, max(0, A ⊙ ∂y/∂A)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from overt.tracing.capture import CapturedAttention
from overt.tracing.mixing.mixing import Mixing, register_mixing


@register_mixing
class Gradient(Mixing):
    """Weights times their gradients, y being the target's logit."""

    name = "gradient"
    title = "attention × gradient"
    cost = "one forward and one backward pass of the model"
    gradients = True
    unit = True
    signed = False
    samples = False

    def __init__(self, keep: bool = False) -> None:
        super().__init__(keep)
        self.live: dict[int, Tensor] = {}  # weights whose gradients will be computed

    def map(self, call: CapturedAttention) -> None:
        """Keep the weights for later."""
        self.live[call.number] = call.weights

    def maps_after(self, score: Callable[[], Tensor]) -> Mapping[int, Tensor]:
        """Gradients of the score with respect to all weights."""
        gradients = torch.autograd.grad(score(), list(self.live.values()), allow_unused=True)
        maps = {}
        for (number, weights), gradient in zip(self.live.items(), gradients, strict=True):
            slope = torch.zeros_like(weights) if gradient is None else gradient
            maps[number] = gradient_map(weights, slope, self.keep)
        self.live = {}
        return maps


def gradient_map(weights: Tensor, gradient: Tensor, each: bool) -> Tensor:
    """max(0, A ⊙ ∂y/∂A), of each head or averaged over heads."""
    cells = (weights.detach() * gradient).double().clamp(min=0.0)
    return cells if each else cells.mean(dim=1)
