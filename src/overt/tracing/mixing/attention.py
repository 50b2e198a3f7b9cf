"""The attention weights themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from overt.tracing.capture import CapturedAttention
from overt.tracing.mixing.mixing import Mixing, register_mixing


@register_mixing
class Attention(Mixing):
    """Attention weights as they were used."""

    name = "attention"
    title = "attention"
    parts = True

    @classmethod
    def titled(cls, method: str) -> str:
        """The plain weights are called raw."""
        return f"raw {cls.title}" if method == "raw" else f"{cls.title} {method}"

    def map(self, call: CapturedAttention) -> Tensor:
        """The weights, or their mean over heads."""
        return call.weights if self.keep else call.weights.mean(dim=1, dtype=torch.float32)
