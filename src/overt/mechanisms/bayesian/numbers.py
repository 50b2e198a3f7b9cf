"""The constants that faster forms of the KL need, computed from the settings."""

from __future__ import annotations

import math

from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.naive import fixed_parameter
from overt.mechanisms.flat import LOGNORMAL, WEIBULL, Divergence, Drawing
from overt.mechanisms.special import EULER


def kl_numbers(config: Bayesian) -> tuple[float, float, float]:
    """The constants in the KL of a cell, for compiled sums.

    Weibull: the factor of α in addition to −log_mean, the constant term of every cell, and the prior's rate.
    Lognormal: σ²/2, 1 over the prior's spread, and the constant term of every cell.
    """
    if config.family == "weibull":
        k, beta = config.k, config.prior_beta
        slope = EULER / k - math.log(beta) + math.lgamma(1.0 + 1.0 / k)
        return slope, math.log(k) - EULER - 1.0, beta
    sigma, prior_sigma = config.sigma, config.prior_sigma
    base = math.log(prior_sigma / sigma) + 0.5 * (sigma / prior_sigma) ** 2 - 0.5
    return sigma**2 / 2.0, 1.0 / prior_sigma, base


def law_of(config: Bayesian) -> Drawing:
    """The settings as the numbers that kernels take, for a pass that draws weights and computes the KL.

    A key's part of the KL to a Gamma prior is α·slope + log Γ(1 + α) − log α + base.
    """
    weibull, official = config.family == "weibull", config.preset == "official"
    fixed, slope, shift, seeing = float(fixed_parameter(config)), 0.0, 0.0, 0.0
    if weibull:
        slope, base, seeing = (float(number) for number in kl_numbers(config))
        number, alpha = 1.0 / float(config.k), float(config.prior_alpha)
        if config.prior == "fixed":
            base += alpha * slope + math.lgamma(1.0 + alpha) - fixed
        elif official:
            shift = math.log(seeing)
    else:
        shift, _, base = (float(number) for number in kl_numbers(config))
        number = float(config.sigma)
    divergence = Divergence(
        family=WEIBULL if weibull else LOGNORMAL,
        scores=config.posterior == "scores",
        official=official,
        fixed=fixed,
        slope=slope,
        base=base,
        shift=shift,
        seeing=seeing,
        precision=(1.0 / float(config.prior_sigma)) / float(config.prior_sigma),
    )
    return Drawing(divergence.family, number, divergence, config.kl_reduction == "mean")
