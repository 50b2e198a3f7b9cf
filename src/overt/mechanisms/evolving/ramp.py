"""The ramp of alpha and beta."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving.config import Evolving


def ramp(config: Evolving, chain: Chain, training: bool, device: torch.device) -> Tensor | None:
    """The factor of alpha and beta on their ramp (`ramp_steps`), in [0, 1]; None where it is complete."""
    if config.ramp_steps == 0:
        return None
    if chain.step is None:
        if training:
            raise ValueError("ramp_steps needs the training step: pass chain=Chain(step=t)")
        return None  # outside training a model is past its ramp
    return torch.clamp(chain.step.to(device) / config.ramp_steps, max=1.0)
