"""Synthesizer at one site of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.mechanism import MechanismLayer
from overt.mechanisms.site import Site
from overt.mechanisms.synthesizer.config import Synthesizer


class SynthesizerLayer(MechanismLayer):
    """`Synthesizer` at one site."""

    def __init__(self, config: Synthesizer, site: Site) -> None:
        super().__init__(config, site)
        heads, width, length = site.heads, site.head_dim, config.max_length
        self.balance = nn.Parameter(torch.zeros(2))
        if config.form == "random":
            self.map = nn.Parameter(torch.randn(heads, length, length) * 0.02)
        else:
            self.inner = nn.Parameter(torch.randn(heads, width, width) * width**-0.5)
            self.inner_bias = nn.Parameter(torch.zeros(heads, 1, width))
            self.outer = nn.Parameter(torch.randn(heads, width, length) * width**-0.5)

    def logits(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Mixed logits, (batch, heads, query, key)."""
        del chain
        (queries, keys), query, first_row = logits.shape[-2:], call.query, call.first_row
        if max(first_row + queries, keys) > self.config.max_length:
            raise ValueError(
                f"max_length of the Synthesizer is {self.config.max_length}, "
                f"got {first_row + queries} queries and {keys} keys"
            )
        if self.config.form == "random":
            synthetic = self.map[:, first_row : first_row + queries, :keys]
        else:
            synthetic = torch.relu(query @ self.inner + self.inner_bias) @ self.outer[..., :keys]
        share = torch.softmax(self.balance, dim=0)
        return share[0] * logits + share[1] * synthetic.to(logits.dtype)
