"""Evolving Attention at one site of a model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving._evolve_cpu import evolve as evolve_cpu
from overt.mechanisms.evolving.config import Evolving
from overt.mechanisms.evolving.naive import continued, join, mix, reach, refine
from overt.mechanisms.maps import HIDDEN
from overt.mechanisms.site import Site


def ramp(config: Evolving, chain: Chain, training: bool, device: torch.device) -> Tensor | None:
    """How far `ramp_steps` have raised alpha and beta, in [0, 1]; None for all the way."""
    if config.ramp_steps == 0:
        return None
    if chain.step is None:
        if training:
            raise ValueError("ramp_steps needs the training step: pass chain=Chain(step=t)")
        return None  # a model in use is past its ramp
    return torch.clamp(chain.step.to(device) / config.ramp_steps, max=1.0)


class EvolvingLayer(nn.Module):
    """One K→K convolution with bias, and the step from current to evolved logits.

    Layer 0 of a chain has no convolution, hence no parameters.
    """

    def __init__(self, config: Evolving, site: Site) -> None:
        super().__init__()
        self.config, self.site = config, site
        self.alpha = config.alpha_at(site)
        self.weight: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        if site.layer > 0 and config.skip == "mix":
            size = config.kernel_size
            self.weight = nn.Parameter(torch.empty(site.heads, site.heads, size, size))
            self.bias = nn.Parameter(torch.empty(site.heads))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the convolution as `config.init` says."""
        if self.weight is None or self.bias is None:
            return
        nn.init.zeros_(self.bias)
        if self.config.init == "kaiming":
            nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
            return
        # The identity is the tap that reads the cell itself, which shifted kernels have at an edge.
        left, _, above, _ = reach(self.site.kind, self.config.kernel_size)
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, :, above, left] = torch.eye(self.site.heads)

    def forward(self, logits: Tensor, visible: Tensor, chain: Chain, site: Site | None = None) -> Tensor:
        """Evolved logits, (batch, heads, query, key), −inf in hidden cells; leaves them in the chain."""
        site = self.site if site is None else site
        below = None if site.layer == 0 else chain.previous(site)
        previous = None if below is None else continued(logits, below.to(logits.device))
        grown = ramp(self.config, chain, self.training, logits.device)
        evolved = self._compiled(logits, previous, visible, grown, site, chain)
        if evolved is None:
            evolved = self._evolved(logits, previous, visible, grown, site, chain)
        chain.carry(site, evolved)
        return evolved

    def _compiled(
        self,
        logits: Tensor,
        previous: Tensor | None,
        visible: Tensor,
        grown: Tensor | None,
        site: Site,
        chain: Chain,
    ) -> Tensor | None:
        """Evolved logits by compiled loops, where those apply."""
        if previous is None or self.weight is None or self.bias is None or chain.keep:
            return None
        factors = self.alpha, self.config.beta, grown
        convolution, off = (self.weight, self.bias), chain.switched_off
        return evolve_cpu(logits, previous, convolution, visible, site.kind, *factors, off)

    def _evolved(
        self,
        logits: Tensor,
        previous: Tensor | None,
        visible: Tensor,
        grown: Tensor | None,
        site: Site,
        chain: Chain,
    ) -> Tensor:
        config = self.config
        if previous is None:  # a chain starts: nothing to mix and nothing to convolve
            return logits.masked_fill(~visible, HIDDEN)
        alpha = self.alpha if grown is None else self.alpha * grown
        beta = config.beta if grown is None else config.beta * grown
        mixed = mix(logits, previous, visible, alpha, add=config.skip == "add")
        convolution = None
        if previous is not None and self.weight is not None and self.bias is not None:
            convolution = (self.weight, self.bias)
        kept = self._keep(mixed, chain, site) if chain.keep and convolution is not None else None
        return refine(mixed, convolution, visible, site.kind, beta, kept)

    def _keep(self, mixed: Tensor, chain: Chain, site: Site) -> Tensor | None:
        """Rows kept from the call before; leaves in the chain those that the next call will need."""
        if site.kind == "encoder":
            raise ValueError('rows cannot be fed in pieces to kind="encoder": its windows reach rows below')
        kept = chain.rows.get(site.place)
        known = join(kept, mixed)
        first_needed = max(known.shape[-2] - (self.config.kernel_size - 1), 0)
        chain.rows[site.place] = known[..., first_needed:, :].clone()  # a view would hold the whole map
        return kept

    def extra_repr(self) -> str:
        """Effective settings, for `print(model)`."""
        site, config = self.site, self.config
        settings = f"alpha={self.alpha}, beta={config.beta}, kernel_size={config.kernel_size}"
        return f"{site.kind} {site.layer}, {settings}"
