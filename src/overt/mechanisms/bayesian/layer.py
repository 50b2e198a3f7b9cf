"""Bayesian Attention at one site of a model: the prior network, sampling, and the KL."""

from __future__ import annotations

import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.mechanisms import noise
from overt.mechanisms.bayesian._draw_cpu import draw as draw_cpu
from overt.mechanisms.bayesian._draw_cpu import weibull_kl
from overt.mechanisms.bayesian.closed import Dot, closed_kl
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.naive import dense_kl, log_noise
from overt.mechanisms.chain import Chain
from overt.mechanisms.maps import log_normalizer, softmax
from overt.mechanisms.site import KINDS, Site

log = logging.getLogger("overt")


class ContextualPrior(nn.Module):
    """The key-dependent prior (section 3.3): Linear → ReLU → Linear → softmax over keys.

    One network for all heads of a layer. The last Linear has no bias, which a softmax would not feel.
    """

    def __init__(self, head_dim: int, d_mid: int) -> None:
        super().__init__()
        self.inner = nn.Linear(head_dim, d_mid)
        self.outer = nn.Linear(d_mid, 1, bias=False)

    def forward(self, key: Tensor) -> Tensor:
        """Scores of keys before the softmax: (…, dim) → (…)."""
        return self.outer(F.relu(self.inner(key))).squeeze(-1)  # type: ignore[no-any-return]


def prior_parameter(log_psi: Tensor, config: Bayesian) -> Tensor:
    """log Ψ, the contextual prior's log-softmax, as the prior's parameter: log α or the Lognormal mean."""
    official = config.preset == "official"
    if config.family == "weibull":
        return log_psi + math.log(config.prior_beta) if official else log_psi
    return log_psi if official else log_psi.exp()


def fixed_parameter(config: Bayesian) -> float:
    """The fixed prior's parameter: log α or the Lognormal mean."""
    return math.log(config.prior_alpha) if config.family == "weibull" else config.prior_mu


class BayesianLayer(nn.Module):
    """From logits Φ to weights: a draw or their mean; leaves the KL in the chain."""

    def __init__(self, config: Bayesian, site: Site) -> None:
        super().__init__()
        self.config, self.site = config, site
        contextual = config.prior == "contextual"
        self.prior = ContextualPrior(site.head_dim, config.d_mid) if contextual else None

    def forward(
        self,
        logits: Tensor,
        visible: Tensor,
        chain: Chain,
        key: Tensor,
        dot: Dot | None = None,
        first_row: int = 0,
        site: Site | None = None,
    ) -> Tensor:
        """Weights, (batch, heads, query, key), at least float32.

        Args:
            logits: Φ, (batch, heads, query, key).
            visible: boolean, broadcasts to `logits`.
            chain: addresses the noise and takes the KL.
            key: (batch, key heads, key, dim), what the contextual prior looks at.
            dot: given when Φ is a plain dot product; allows the KL's closed form.
            first_row: absolute position of the first query row.
            site: where the map is this time; the layer's own by default.
        """
        site = self.site if site is None else site
        wanted, lse, weights = wants_kl(self, self.config, chain), None, None
        if draws_sample(self, chain):
            keys = noise_keys(site, chain).to(logits.device)
            if keys.dim() == 2 and keys.shape[0] != logits.shape[0]:
                raise ValueError(
                    "sample must be one number or one for each of the batch's "
                    f"{logits.shape[0]} examples, got {keys.shape[0]}"
                )
            examples = _examples(logits, chain)
            off = chain.switched_off
            drawn = draw_cpu(logits, visible, keys, examples, first_row, self.config, wanted, off)
            if drawn is None:
                _, heads, rows, columns = logits.shape
                unit = noise.uniform(keys, examples, heads, rows, columns, first_row, off)
                weights = softmax(logits + log_noise(unit, self.config), visible)
            else:
                weights, lse = drawn
        if wanted:
            chain.record_kl(site, self._kl(logits, visible, key, dot, lse), self.config)
        return softmax(logits, visible) if weights is None else weights

    def _kl(
        self, logits: Tensor, visible: Tensor, key: Tensor, dot: Dot | None, lse: Tensor | None
    ) -> Tensor:
        # The KL is a difference of large terms: always at least in float32, whatever autocast would do.
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            prior = self._prior_parameter(logits, visible, key)
            if dot is not None:
                lse = log_normalizer(logits, visible) if lse is None else lse
                return closed_kl(dot, lse, prior, self.config)
            if not torch.compiler.is_compiling():
                log.debug("%s %d: dense KL, the map is not a plain dot product", *self.site.place)
            heads = prior.repeat_interleave(logits.shape[1] // prior.shape[1], dim=1)
            if lse is not None and self.config.family == "weibull":
                return weibull_kl(logits, visible, lse, heads, self.config)
            return dense_kl(logits, visible, heads, self.config)

    def _prior_parameter(self, logits: Tensor, visible: Tensor, key: Tensor) -> Tensor:
        """(batch, key heads, key), or one number as (1, 1, 1) where the prior is fixed."""
        if self.prior is None:
            return logits.new_full((1, 1, 1), fixed_parameter(self.config))
        # A key is padding if no query sees it; a causal mask hides none from all.
        known = visible.expand(logits.shape[0], -1, -1, -1).any(dim=2).any(dim=1).unsqueeze(1)
        scores = self.prior(key.to(self.prior.inner.weight.dtype)).to(logits.dtype)
        log_psi = F.log_softmax(scores.masked_fill(~known, torch.finfo(scores.dtype).min), dim=-1)
        return prior_parameter(log_psi.masked_fill(~known, 0.0), self.config)

    def extra_repr(self) -> str:
        """Effective settings, for `print(model)`."""
        config = self.config
        shape = f"k={config.k}" if config.family == "weibull" else f"sigma={config.sigma}"
        return f"{self.site.kind} {self.site.layer}, {config.family}, {shape}, prior={config.prior}"


def wants_kl(layer: nn.Module, config: Bayesian, chain: Chain) -> bool:
    """Whether the KL is to be computed.

    Not for rows in pieces, unless asked: the prior is over the keys known so far, another one at each step.
    """
    asked = layer.training and not chain.keep if chain.wants_kl is None else chain.wants_kl
    return asked and config.prior is not None


def draws_sample(layer: nn.Module, chain: Chain) -> bool:
    """Whether weights are drawn (training, or a sample asked for) or are the mean."""
    return layer.training or chain.sample is not None


def noise_keys(site: Site, chain: Chain) -> Tensor:
    """The noise's keys at a site: (2,), or (batch, 2) where each example has a sample number of its own."""
    if chain.step is None:
        raise ValueError("random weights need an address for their noise: pass chain=Chain(step=t)")
    sample = chain.step.new_zeros(()) if chain.sample is None else chain.sample
    step = chain.step.to(sample.device)
    seed, kind = chain.seed.to(sample.device), KINDS.index(site.kind)
    return noise.stream(seed, step, site.layer, sample, kind, chain.switched_off)


def _examples(logits: Tensor, chain: Chain) -> Tensor:
    examples = chain.examples.to(logits.device)
    if examples.dim() == 0:
        return examples + torch.arange(logits.shape[0], device=logits.device)
    if examples.shape != logits.shape[:1]:
        raise ValueError(
            f"examples must number the batch's {logits.shape[0]} examples, got shape {tuple(examples.shape)}"
        )
    return examples
