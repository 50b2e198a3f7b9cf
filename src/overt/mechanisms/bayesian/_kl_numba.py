"""Sums of the KL, and normal draws, as compiled loops on the CPU.

A sum of the KL is computed with its gradients, which a backward pass need only scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from overt.mechanisms._compiled import compiled, compiled_loosely
from overt.mechanisms.special import LOG_GAMMA

BLOCK = 2**14  # cells per partial sum, so that sums do not depend on the number of threads
_LOG_GAMMA = tuple(map(np.float32, LOG_GAMMA))
_DIGAMMA = tuple(np.float32(place * value) for place, value in enumerate(LOG_GAMMA))[1:]


@compiled
def _polynomial(coefficients: Any, x: Any) -> Any:
    value = coefficients[-1]
    for place in range(len(coefficients) - 1):
        value = value * x + coefficients[len(coefficients) - 2 - place]
    return value


@compiled_loosely
def weibull_total(
    start: int,
    stop: int,
    log_mean: Any,
    log_alpha: Any,
    mean: Any,
    alpha: Any,
    numbers: Any,
    to_mean: Any,
    to_alpha: Any,
    sums: Any,
) -> None:
    """Σ of `naive.weibull_gamma_kl` over flat arrays, α ≤ 1, block by block, and its gradients.

    Args:
        start: first block.
        stop: last block + 1.
        log_mean: logarithm of the posterior's mean.
        log_alpha: logarithm of the prior's shape.
        mean: exp(log_mean).
        alpha: exp(log_alpha).
        numbers: of `numbers.kl_numbers`.
        to_mean: filled with the gradient to log_mean.
        to_alpha: filled with the gradient to log_alpha.
        sums: one per block, filled.
    """
    slope, base, beta = numbers[0], numbers[1], numbers[2]
    for block in range(start, stop):
        sum_of_block = 0.0
        for n in range(block * BLOCK, min((block + 1) * BLOCK, log_mean.shape[0])):
            x = alpha[n] - np.float32(0.5)
            linear = alpha[n] * (slope - log_mean[n])
            rest = base + beta * mean[n] + _polynomial(_LOG_GAMMA, x) - log_alpha[n]
            sum_of_block += np.float64(linear + rest)
            to_mean[n] = beta * mean[n] - alpha[n]
            to_alpha[n] = linear + alpha[n] * _polynomial(_DIGAMMA, x) - np.float32(1.0)
        sums[block] = sum_of_block


@compiled_loosely
def lognormal_total(
    start: int,
    stop: int,
    log_mean: Any,
    prior_mu: Any,
    numbers: Any,
    to_mean: Any,
    to_mu: Any,
    sums: Any,
) -> None:
    """Σ of `naive.lognormal_kl` over flat arrays, block by block, and its gradients.

    Args:
        start: first block.
        stop: last block + 1.
        log_mean: logarithm of the posterior's mean.
        prior_mu: the prior's mean.
        numbers: of `numbers.kl_numbers`.
        to_mean: filled with the gradient to log_mean.
        to_mu: filled with the gradient to prior_mu.
        sums: one per block, filled.
    """
    half, precision, base = numbers[0], numbers[1], numbers[2]
    for block in range(start, stop):
        sum_of_block = 0.0
        for n in range(block * BLOCK, min((block + 1) * BLOCK, log_mean.shape[0])):
            shift = (log_mean[n] - half - prior_mu[n]) * precision
            sum_of_block += np.float64(base + np.float32(0.5) * shift * shift)
            to_mean[n] = shift * precision
            to_mu[n] = -shift * precision
        sums[block] = sum_of_block


# The inverse error function in single precision, x·p(w) with w = −log(1 − x²) (Giles 2010): powers of w − 2.5
# for w below 5, of √w − 3 above, highest power first.
_CENTRAL = tuple(
    map(
        np.float32,
        (
            2.81022636e-08,
            3.43273939e-07,
            -3.5233877e-06,
            -4.39150654e-06,
            2.1858087e-04,
            -1.25372503e-03,
            -4.17768164e-03,
            2.46640727e-01,
            1.50140941,
        ),
    )
)[::-1]
_TAIL = tuple(
    map(
        np.float32,
        (
            -2.00214257e-04,
            1.00950558e-04,
            1.34934322e-03,
            -3.67342844e-03,
            5.73950773e-03,
            -7.6224613e-03,
            9.43887047e-03,
            1.00167406,
            2.83297682,
        ),
    )
)[::-1]


@compiled_loosely
def inverse_erf(start: int, stop: int, x: Any, w: Any, out: Any) -> None:
    """Fill out with erfinv(x) from `start` to `stop`, given w = −log(1 − x²)."""
    for n in range(start, stop):
        central = _polynomial(_CENTRAL, w[n] - np.float32(2.5))
        tail = _polynomial(_TAIL, np.sqrt(w[n]) - np.float32(3.0))
        out[n] = x[n] * (central if w[n] < np.float32(5.0) else tail)
