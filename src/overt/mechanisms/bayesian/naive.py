"""Bayesian Attention in plain operations: sampled weights and the KL, cell by cell.

Everything is in log space. With E[S] = exp(Φ), normalised Weibull draws are softmax(Φ + log(−log(1−ε))/k) and
normalised Lognormal ones softmax(Φ + σ·ε); the constants Γ(1 + 1/k) and σ²/2 cancel in the normalisation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.maps import log_normalizer

EULER = 0.5772156649015329
# log Γ(1 + x) on [0, 1] as a polynomial in x − ½, the lowest power first: the Chebyshev interpolant of degree
# 11, good to 1e-7 with its derivative.
LOG_GAMMA = (
    -1.207822377e-01,
    3.648997404e-02,
    4.674011300e-01,
    -1.381327924e-01,
    5.871074939e-02,
    -2.895123240e-02,
    1.545865239e-02,
    -8.636894232e-03,
    4.791802372e-03,
    -2.813723488e-03,
    2.328442472e-03,
    -1.414425131e-03,
)
# Cells of a map whose KL is formed at once: bounds the forward pass's temporaries, not the result.
CELLS_AT_ONCE = 2**24


def log_noise(unit: Tensor, config: Bayesian) -> Tensor:
    """What sampling adds to the logits, up to a constant, from uniform draws on the open unit interval."""
    if config.family == "weibull":
        return torch.log(-torch.log1p(-unit)) / config.k
    return torch.erfinv(2.0 * unit - 1.0) * (math.sqrt(2.0) * config.sigma)


def weibull_gamma_kl(log_mean: Tensor, k: float, log_alpha: Tensor, beta: float) -> Tensor:
    """KL(Weibull(k, λ) ‖ Gamma(α, β)) with λ = exp(log_mean)/Γ(1 + 1/k) (section 3.2).

    log Γ(α) is taken as lgamma(1 + α) − log α: a prior weight that underflows to zero keeps its logarithm.
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


def kl_numbers(config: Bayesian) -> tuple[float, float, float]:
    """What the family's KL of a cell is made of beside the cell's own values, for compiled sums.

    Weibull: what α is multiplied by beside −log_mean, what every cell has, and the prior's rate. Lognormal:
    σ²/2, 1 over the prior's spread, and what every cell has.
    """
    if config.family == "weibull":
        k, beta = config.k, config.prior_beta
        slope = EULER / k - math.log(beta) + math.lgamma(1.0 + 1.0 / k)
        return slope, math.log(k) - EULER - 1.0, beta
    sigma, prior_sigma = config.sigma, config.prior_sigma
    base = math.log(prior_sigma / sigma) + 0.5 * (sigma / prior_sigma) ** 2 - 0.5
    return sigma**2 / 2.0, 1.0 / prior_sigma, base


def reduce_kl(total: Tensor, cells: Tensor, config: Bayesian) -> Tensor:
    """Per example: the sum over cells, or their mean (zero where nothing is visible)."""
    return total if config.kl_reduction == "sum" else total / cells.clamp(min=1)


def dense_kl(
    logits: Tensor, visible: Tensor, prior: Tensor, config: Bayesian, cells_at_once: int = CELLS_AT_ONCE
) -> Tensor:
    """KL of a whole map per example, (batch,), over visible (query, key) pairs and all heads.

    Args:
        logits: Φ, (batch, heads, query, key).
        visible: boolean, broadcasts to `logits`.
        prior: (batch, heads, key) or broadcasting to it; see `cell_kl`.
        config: family, posterior and reduction.
        cells_at_once: rows are taken in chunks of about this many cells.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    visible = visible.expand(logits.shape)
    batch, heads, queries, keys = logits.shape

    def total_of(part: Tensor, seen: Tensor) -> Tensor:
        # Hidden logits may be −inf, whose square has no gradient.
        log_mean = part.masked_fill(~seen, 0.0)
        if config.posterior == "probabilities":
            log_mean = log_mean - log_normalizer(log_mean, seen).unsqueeze(-1)
        cells = cell_kl(log_mean, prior.unsqueeze(-2), config)
        return cells.masked_fill(~seen, 0.0).sum(dim=(1, 2, 3))

    # A compiler fuses the temporaries away by itself, and would unroll the loop anew for each length.
    if torch.compiler.is_compiling() or logits.numel() <= cells_at_once:
        total = total_of(logits, visible)
    else:
        rows = max(1, cells_at_once // max(1, batch * heads * keys))
        total = logits.new_zeros(batch)
        for start in range(0, queries, rows):
            total = total + total_of(logits[:, :, start : start + rows], visible[:, :, start : start + rows])
    return reduce_kl(total, visible.sum(dim=(1, 2, 3)), config)
