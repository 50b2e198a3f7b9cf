"""Mechanisms, inputs and gradients of the library's own stacks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import overt
from overt.mechanisms.evolving.layer import EvolvingLayer

EVOLVING = overt.Evolving(alpha=0.3, beta=0.6, decoder_alpha=0.3)
BAYESIAN = overt.Bayesian(k=5.0)
MECHANISMS = {
    "plain": [],
    "evolving": [EVOLVING],
    "bayesian": [BAYESIAN],
    "both": [EVOLVING, BAYESIAN],
    "lognormal": [overt.Bayesian(family="lognormal", sigma=0.3)],
    "synthesizer": [overt.Synthesizer(max_length=16), EVOLVING],
}


def enliven(module: nn.Module) -> None:
    """Random convolutions with bias, so that windows matter."""
    generator = torch.Generator().manual_seed(3)
    for part in module.modules():
        if isinstance(part, EvolvingLayer) and part.weight is not None and part.bias is not None:
            with torch.no_grad():
                part.weight.copy_(torch.randn(part.weight.shape, generator=generator) * 0.5)
                part.bias.copy_(torch.rand(part.bias.shape, generator=generator) + 0.5)


def inputs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(model: nn.Module, run: object, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    chain = overt.Chain(step=2)
    loss = run(x, chain).square().sum() + chain.penalty()  # type: ignore[operator]
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
