"""How far alpha and beta have been raised."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving.config import Evolving


def ramp(config: Evolving, chain: Chain, training: bool, device: torch.device) -> Tensor | None:
    """How far `ramp_steps` have raised alpha and beta, in [0, 1]; None for all the way."""
    if config.ramp_steps == 0:
        return None
    if chain.step is None:
        if training:
            raise ValueError("ramp_steps needs the training step: pass chain=Chain(step=t)")
        return None  # a model in use is past its ramp
    return torch.clamp(chain.step.to(device) / config.ramp_steps, max=1.0)
