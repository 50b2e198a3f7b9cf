"""Two ways to make attention weights random that Fan et al. 2020, section 4.3, could not train.

Gaussian weights are as in Bahuleyan et al. 2018, carried over from the attention vector to the weights; the
paper says no more. A KL that is sampled throughout is the textbook's: log q(S) − log p(S) of the draw S.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from overt import _check
from overt.mechanisms import noise
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.drawing import draws_sample, examples_of, noise_keys
from overt.mechanisms.bayesian.layer import BayesianLayer
from overt.mechanisms.bayesian.naive import ContextualPrior, prior_of, reduce_kl
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.maps import softmax
from overt.mechanisms.mechanism import Ahead, Mechanism, MechanismLayer, register_mechanism
from overt.mechanisms.site import Site


@dataclass(frozen=True)
class SampledKL(Bayesian):
    """Bayesian attention whose KL is log q(S) − log p(S) of the weights drawn, without any analytic part.

    With Weibull weights and a contextual prior, for maps that are made row by row.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.family, self.prior, self.posterior) != ("weibull", "contextual", "probabilities"):
            raise ValueError(f"SampledKL is for Weibull weights with a contextual prior, got {self}")


class SampledKLLayer(BayesianLayer):
    """Draws as Bayesian attention does, and scores the draw by both densities."""

    def ahead(self, call: AttentionCall, chain: Chain) -> Ahead:
        """The noise of all rows, and the sampled KL once their logits are known."""
        made = super().ahead(call, chain)
        added = made.added
        if made.finish is None or added is None:
            return made

        def leave_kl(logits: Tensor) -> None:
            visible = call.visible()
            kl = sampled_kl(
                logits, visible, added, self._alpha(logits, call.with_logits(logits), visible), self.config
            )
            self.leave_kl(chain, call.site, kl, self._cells(visible, call))

        return Ahead(added, leave_kl)

    def _alpha(self, logits: Tensor, call: AttentionCall, visible: Tensor) -> Tensor:
        """The prior's α, (batch, heads, 1, key)."""
        key = call.keys_of_prior.to(torch.promote_types(logits.dtype, torch.float32))
        prior = prior_of(self.prior, key, visible, self.config)
        return prior.exp().unsqueeze(-2)


def sampled_kl(logits: Tensor, visible: Tensor, log_noise: Tensor, alpha: Tensor, config: Bayesian) -> Tensor:
    """log q(S) − log p(S) of weights that were drawn, per example, (batch,).

    Args:
        logits: Φ, (batch, heads, query, key).
        visible: boolean, broadcasts to it.
        log_noise: log S − log λ, of the same shape.
        alpha: of the Gamma prior, broadcasts to it.
        config: k and the prior's rate.
    """
    from torch.distributions import Gamma, Weibull

    visible = visible.expand(logits.shape)
    scale = softmax(logits.float(), visible) / math.gamma(1.0 + 1.0 / config.k)
    scale = scale.masked_fill(~visible, 1.0)
    drawn = scale * log_noise.exp()
    shape, rate = torch.full_like(scale, config.k), torch.full_like(scale, config.prior_beta)
    alpha = alpha.expand(scale.shape).masked_fill(~visible, 1.0)
    posterior = Weibull(scale, shape, validate_args=False)
    prior = Gamma(alpha, rate, validate_args=False)
    cells = posterior.log_prob(drawn) - prior.log_prob(drawn)  # type: ignore[no-untyped-call]
    total = cells.masked_fill(~visible, 0.0).sum(dim=(1, 2, 3))
    return reduce_kl(total, visible.sum(dim=(1, 2, 3)), config)


@dataclass(frozen=True)
class GaussianWeights(Mechanism):
    """Weights W ~ N(μ, sigma²), which may be negative and do not sum to one.

    Args:
        mean: what μ is: "scores", Φ itself, or "softmax", softmax(Φ).
        sigma: spread of the posterior.
        prior_sigma: spread of the prior, whose means are softmax weights of the keys.
        d_mid: hidden width of the prior's network.
        rho: anneal the KL by λ(t) = sigmoid(rho·t); None means λ = 1.
        kl_weight: multiplies λ(t).
    """

    mean: Literal["scores", "softmax"] = "scores"
    sigma: float = 0.1
    prior_sigma: float = 1.0
    d_mid: int = 10
    rho: float | None = None
    kl_weight: float = 1.0

    def __post_init__(self) -> None:
        _check.one_of("mean", self.mean, ("scores", "softmax"))
        for name in ("sigma", "prior_sigma"):
            _check.positive(name, getattr(self, name))
        _check.whole("d_mid", self.d_mid, 1)
        if self.rho is not None:
            _check.positive("rho", self.rho)

    def loss_weight(self, step: Tensor | None) -> Tensor | float:
        """kl_weight·λ(t)."""
        return Bayesian(rho=self.rho, kl_weight=self.kl_weight).loss_weight(step)


class GaussianWeightsLayer(MechanismLayer):
    """From logits to Gaussian weights; leaves the KL, which is analytic, in the chain."""

    config: GaussianWeights
    random = True
    sums_to_one = False
    signed = True
    adds = "KL"

    def __init__(self, config: GaussianWeights, site: Site) -> None:
        super().__init__(config, site)
        self.prior = ContextualPrior(site.head_dim, config.d_mid)

    def weights(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Draws in training, means in evaluation; zeros in hidden cells."""
        config, visible = self.config, call.visible().expand(logits.shape)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        mean = logits if config.mean == "scores" else softmax(logits, visible)
        weights = mean
        if draws_sample(self, chain):
            _, heads, rows, columns = logits.shape
            keys = noise_keys(call.site, chain).to(logits.device)
            examples = examples_of(logits, chain)
            unit = noise.uniform(keys, examples, heads, rows, columns, call.first_row, chain.switched_off)
            weights = mean + config.sigma * math.sqrt(2.0) * torch.erfinv(2.0 * unit - 1.0)
        if self.training if chain.wants_kl is None else chain.wants_kl:
            like = Bayesian(d_mid=config.d_mid)  # its prior is the softmax of the network's output
            log_psi = prior_of(self.prior, call.keys_of_prior.to(logits.dtype), visible, like)
            cells = gaussian_kl(mean, config.sigma, log_psi.exp().unsqueeze(-2), config.prior_sigma)
            count = visible.sum(dim=(1, 2, 3))
            total = cells.masked_fill(~visible, 0.0).sum(dim=(1, 2, 3))
            chain.add_loss(call.site, total / count.clamp(min=1), config, count)
        return weights.masked_fill(~visible, 0.0)


def gaussian_kl(mean: Tensor, sigma: float, prior_mean: Tensor, prior_sigma: float) -> Tensor:
    """KL(N(mean, sigma²) ‖ N(prior_mean, prior_sigma²)) of every cell."""
    ratio = sigma / prior_sigma
    return 0.5 * ((mean - prior_mean) / prior_sigma).square() + 0.5 * ratio**2 - math.log(ratio) - 0.5


def register() -> None:
    """Make both known, for this process; they are no part of Overt's own mechanisms."""
    register_mechanism(SampledKL, SampledKLLayer)
    register_mechanism(GaussianWeights, GaussianWeightsLayer)
