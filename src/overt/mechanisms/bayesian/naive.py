"""Bayesian Attention in plain operations, from scores to weights and KL: the complete definition.

Everything is in log space. With E[S] = exp(Φ), normalised Weibull draws are softmax(Φ + log(−log(1−ε))/k) and
normalised Lognormal draws softmax(Φ + σ·ε); the constants Γ(1 + 1/k) and σ²/2 cancel in the normalisation.
Maps are (batch, heads, query, key); `visible` is boolean and broadcasts to them. `attention` combines the
pieces, and every faster form is tested against them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.maps import log_normalizer, softmax
from overt.mechanisms.special import EULER

# --- The prior (section 3.3) ---


class ContextualPrior(nn.Module):
    """The key-dependent prior: Linear → ReLU → Linear → softmax over keys.

    One network serves all heads of a layer. The last Linear has no bias, which a softmax would cancel.
    """

    def __init__(self, head_dim: int, d_mid: int) -> None:
        super().__init__()
        self.inner = nn.Linear(head_dim, d_mid)
        self.outer = nn.Linear(d_mid, 1, bias=False)

    def forward(self, key: Tensor) -> Tensor:
        """Scores of keys before the softmax: (…, dim) → (…)."""
        return self.outer(F.relu(self.inner(key))).squeeze(-1)  # type: ignore[no-any-return]


def prior_of(network: ContextualPrior | None, key: Tensor, visible: Tensor, config: Bayesian) -> Tensor:
    """The prior's parameter, log α or the Lognormal mean: (batch, key heads, key), or (1, 1, 1) if fixed.

    A key is padding if no query sees it; a causal mask hides no key from every query.

    Args:
        network: of the contextual prior; None for the fixed one.
        key: (batch, key heads, key, dim), in the dtype of the result.
        visible: boolean, broadcasts to the map.
        config: family and prior.
    """
    if network is None:
        return key.new_full((1, 1, 1), fixed_parameter(config))
    known = visible.expand(key.shape[0], -1, -1, -1).any(dim=2).any(dim=1).unsqueeze(1)  # (batch, 1, key)
    scores = network(key.to(network.inner.weight.dtype)).to(key.dtype)  # (batch, key heads, key)
    log_psi = F.log_softmax(scores.masked_fill(~known, torch.finfo(scores.dtype).min), dim=-1)
    return prior_parameter(log_psi.masked_fill(~known, 0.0), config)


def prior_parameter(log_psi: Tensor, config: Bayesian) -> Tensor:
    """The prior's parameter, log α or the Lognormal mean, from log Ψ, the contextual prior's log-softmax."""
    official = config.preset == "official"
    if config.family == "weibull":
        return log_psi + math.log(config.prior_beta) if official else log_psi
    return log_psi if official else log_psi.exp()


def fixed_parameter(config: Bayesian) -> float:
    """The fixed prior's parameter: log α or the Lognormal mean."""
    return math.log(config.prior_alpha) if config.family == "weibull" else config.prior_mu


# --- The draw and the weights (section 3.1) ---


def log_noise(unit: Tensor, config: Bayesian) -> Tensor:
    """What sampling adds to the logits, up to a constant, from uniform draws on the open unit interval."""
    if config.family == "weibull":
        return torch.log(-torch.log1p(-unit)) / config.k
    return torch.erfinv(2.0 * unit - 1.0) * (math.sqrt(2.0) * config.sigma)


def draw(logits: Tensor, visible: Tensor, unit: Tensor | None, config: Bayesian) -> Tensor:
    """Normalised weights: drawn with uniform numbers on the open unit interval, or the mean without any."""
    return softmax(logits if unit is None else logits + log_noise(unit, config), visible)


# --- The KL (section 3.2) ---


def weibull_gamma_kl(log_mean: Tensor, k: float, log_alpha: Tensor, beta: float) -> Tensor:
    """KL(Weibull(k, λ) ‖ Gamma(α, β)) with λ = exp(log_mean)/Γ(1 + 1/k) (section 3.2).

    log Γ(α) is computed as lgamma(1 + α) − log α: a prior weight that underflows to zero keeps its logarithm.
    """
    log_lambda = log_mean - math.lgamma(1.0 + 1.0 / k)
    alpha = log_alpha.exp()
    log_gamma = torch.lgamma(1.0 + alpha) - log_alpha
    linear = alpha * (EULER / k - math.log(beta) - log_lambda)
    return linear + math.log(k) + beta * log_mean.exp() - EULER - 1.0 + log_gamma


def lognormal_kl(log_mean: Tensor, sigma: float, prior_mu: Tensor, prior_sigma: float) -> Tensor:
    """KL(Lognormal(μ, σ²) ‖ Lognormal(prior_mu, prior_sigma²)) with μ = log_mean − σ²/2 (section 3.2)."""
    shift = (log_mean - sigma**2 / 2.0 - prior_mu) / prior_sigma
    return math.log(prior_sigma / sigma) + 0.5 * (sigma / prior_sigma) ** 2 + 0.5 * shift.square() - 0.5


def cell_kl(log_mean: Tensor, prior: Tensor, config: Bayesian) -> Tensor:
    """KL of every cell. `prior` broadcasts to the map: log α of the Gamma, or the Lognormal's mean."""
    if config.family == "weibull":
        return weibull_gamma_kl(log_mean, config.k, prior, config.prior_beta)
    return lognormal_kl(log_mean, config.sigma, prior, config.prior_sigma)


def total_kl(logits: Tensor, visible: Tensor, prior: Tensor, config: Bayesian) -> Tensor:
    """Σ of the KL over visible (query, key) pairs and all heads, per example, (batch,).

    Args:
        logits: Φ, (batch, heads, query, key).
        visible: boolean, of the same shape.
        prior: (batch, heads, key) or broadcasting to it; see `cell_kl`.
        config: family and posterior.
    """
    log_mean = logits.masked_fill(~visible, 0.0)  # hidden logits may be −inf, whose square has no gradient
    if config.posterior == "probabilities":
        log_mean = log_mean - log_normalizer(log_mean, visible).unsqueeze(-1)
    cells = cell_kl(log_mean, prior.unsqueeze(-2), config)
    return cells.masked_fill(~visible, 0.0).sum(dim=(1, 2, 3))


def reduce_kl(total: Tensor, cells: Tensor, config: Bayesian) -> Tensor:
    """Per example, the sum over cells or their mean (zero where nothing is visible)."""
    return total if config.kl_reduction == "sum" else total / cells.clamp(min=1)


def map_kl(logits: Tensor, visible: Tensor, prior: Tensor, config: Bayesian) -> Tensor:
    """KL of a whole map per example, (batch,), at least float32; arguments as for `total_kl`."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    visible = visible.expand(logits.shape)
    return reduce_kl(total_kl(logits, visible, prior, config), visible.sum(dim=(1, 2, 3)), config)


def attention(
    logits: Tensor,
    visible: Tensor,
    key: Tensor,
    network: ContextualPrior | None,
    unit: Tensor | None,
    config: Bayesian,
) -> tuple[Tensor, Tensor]:
    """The whole definition: scores → weights (batch, heads, query, key), and the KL per example, (batch,).

    Args:
        logits: Φ, (batch, heads, query, key).
        visible: boolean, broadcasts to `logits`.
        key: (batch, key heads, key, dim), read by the contextual prior.
        network: of the contextual prior; None for the fixed one.
        unit: uniform draws on the open unit interval, of the map's shape; None for the mean of the weights.
        config: the settings.
    """
    prior = prior_of(network, key, visible, config)
    prior = prior.repeat_interleave(logits.shape[1] // prior.shape[1], dim=1)  # (batch, heads, key)
    return draw(logits, visible, unit, config), map_kl(logits, visible, prior, config)
