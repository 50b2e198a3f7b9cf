"""Attention of any PyTorch model: layers that are run again, layouts, masks, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import other_models as other
import overt
from other_models import Block, NanoAttention, Text

IDS = torch.randint(0, other.WORDS, (2, 6), generator=torch.Generator().manual_seed(3))


def close_to(found: Any, want: Any) -> None:
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


class InPlace(nn.Module):
    """A layer that changes its own argument, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(other.WIDTH, other.WIDTH), 0
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        x += self.linear(x).tanh()
        return x


def activated(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(other.WIDTH, 24), activation, nn.Linear(24, other.WIDTH))


ACTIVATIONS = {"hardswish": nn.Hardswish(inplace=True), "leaky": nn.LeakyReLU(0.3, inplace=True)}


@pytest.mark.parametrize("name", [*ACTIVATIONS, "entry"])
def test_layers_that_are_run_again_leave_the_model_alone(name: str) -> None:
    model = Text(lambda: NanoAttention(causal=False))
    if name == "entry":
        model.h.insert(1, InPlace())
    else:
        for block in model.h:
            block.mlp = activated(ACTIVATIONS[name])
        model.h.insert(1, nn.Sequential(nn.Linear(other.WIDTH, other.WIDTH), ACTIVATIONS[name]))
    other.spread(model)
    results: list[Tensor] = []
    with torch.no_grad():
        want, x, maps = model(IDS), model.embedded(IDS), []
        for layer in model.h:
            if isinstance(layer, Block):
                maps.append(other.weights_by_hand(layer.attn, layer.ln_1(x)))
            x = layer(x)
    if name == "entry":
        model.h[1].calls, model.h[1].seen[:] = 0, 0
    traced = overt.trace(model, IDS, heads=True, output=lambda result: results.append(result) or result)
    torch.testing.assert_close(results[0], want)
    close_to(traced.maps, maps)
    if name == "entry":
        assert (model.h[1].calls, model.h[1].seen.tolist()) == (1, [1, 1]), "as if it had run once"
