"""Settings of Bayesian Attention Modules (Fan et al. 2020, section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from overt import _check
from overt.mechanisms.mechanism import Mechanism, NoiseSetting

Variant = Literal["WC", "WF", "LC", "LF", "NO KL"]
# As chosen by `benchmarks/kl_weight.py` (docs/bayesian.md).
KL_WEIGHT = 0.003
# What calibrate tries. The logarithm of a Weibull draw has the spread π / (√6 · k), that of a Lognormal draw
# sigma: both lists cover about the same range.
_NOISE = {
    "weibull": NoiseSetting("k", (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0)),
    "lognormal": NoiseSetting("sigma", (2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001)),
}
_VARIANTS: dict[str, tuple[str, str | None]] = {
    "WC": ("weibull", "contextual"),
    "WF": ("weibull", "fixed"),
    "LC": ("lognormal", "contextual"),
    "LF": ("lognormal", "fixed"),
    "NO KL": ("weibull", None),
}


@dataclass(frozen=True)
class Bayesian(Mechanism):
    """Attention weights are random: normalised Weibull or Lognormal draws, with a prior that depends on keys.

    The defaults are the paper's BAM-WC, except for the weight of the KL: the paper's weight ruins a
    pretrained model (docs/bayesian.md). `Bayesian.paper` makes the paper's variants, at full weight.

    Args:
        family: distribution of the unnormalised weights S, with mean exp(Φ).
        k: Weibull shape; the larger, the less noise.
        sigma: Lognormal spread of the posterior (σ₂ in appendix B).
        prior: "contextual" learns a prior from the keys, "fixed" uses one for all keys, None omits the KL.
        prior_alpha: shape of the fixed Gamma prior.
        prior_beta: rate of the Gamma prior.
        prior_sigma: spread of the Lognormal prior (σ₁ in appendix B).
        prior_mu: mean of the fixed Lognormal prior.
        d_mid: hidden width of the contextual prior's network.
        rho: anneal the KL by λ(t) = sigmoid(rho·t); None means λ = 1.
        kl_weight: multiplies λ(t). The paper's value is 1; the default is the only one of five values above 0
            that kept a pretrained model within a point of plain attention on held-out rows
            (docs/bayesian.md). 0 reports the KL without minimising it.
        posterior: what exp(Φ) is in the KL. "probabilities" uses the softmax probabilities, as the published
            results did; "scores" uses the exponentials of the raw scores, as the paper's text says. The
            weights are the same.
        kl_reduction: "mean" averages over a map's visible entries and heads; "sum" is the literal ELBO.
        preset: "official" follows the released code where it differs: the contextual Gamma prior is
            softmax·prior_beta, the contextual Lognormal mean is the log-softmax, and on edge lists the
            prior's softmax runs over all nodes.
    """

    family: Literal["weibull", "lognormal"] = "weibull"
    k: float = 10.0
    sigma: float = 0.1
    prior: Literal["contextual", "fixed"] | None = "contextual"
    prior_alpha: float = 1e-3
    prior_beta: float = 1e-2
    prior_sigma: float = 1e3
    prior_mu: float = 0.0
    d_mid: int = 5
    rho: float | None = None
    posterior: Literal["probabilities", "scores"] = "probabilities"
    kl_reduction: Literal["mean", "sum"] = "mean"
    preset: Literal["official"] | None = None
    kl_weight: float = KL_WEIGHT

    def __post_init__(self) -> None:
        _check.one_of("family", self.family, ("weibull", "lognormal"))
        _check.one_of("prior", self.prior, ("contextual", "fixed", None))
        _check.one_of("posterior", self.posterior, ("probabilities", "scores"))
        _check.one_of("kl_reduction", self.kl_reduction, ("mean", "sum"))
        _check.one_of("preset", self.preset, (None, "official"))
        for name in ("k", "sigma", "prior_alpha", "prior_beta", "prior_sigma"):
            _check.positive(name, getattr(self, name))
        if self.rho is not None:
            _check.positive("rho", self.rho)
        _check.finite("prior_mu", self.prior_mu)
        _check.finite("kl_weight", self.kl_weight)
        if self.kl_weight < 0.0:
            raise ValueError(f"kl_weight must be at least 0, got {self.kl_weight}")
        _check.whole("d_mid", self.d_mid, 1)

    @classmethod
    def paper(cls, variant: Variant = "WC", **settings: Any) -> Bayesian:
        """A variant of the paper, with its KL at full weight (`kl_weight=1`).

        Args:
            variant: "WC", "WF", "LC" or "LF": Weibull or Lognormal, contextual or fixed prior; or "NO KL".
            settings: further settings, such as the k, rho and prior_alpha that appendix B gives for a task.
        """
        _check.one_of("variant", variant, _VARIANTS)
        family, prior = _VARIANTS[variant]
        for name, fixed in (("family", family), ("prior", prior), ("kl_weight", 1.0)):
            if name in settings:
                raise TypeError(f"Bayesian.paper({variant!r}) sets {name}={fixed!r} and takes no other value")
        return cls(family=family, prior=prior, kl_weight=1.0, **settings)  # type: ignore[arg-type]

    @classmethod
    def from_file(cls, settings: Mapping[str, Any]) -> Bayesian:
        """Make it from the settings in a file. Before `kl_weight` existed, the KL had full weight."""
        return cls(**{"kl_weight": 1.0, **settings})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({"kl_weight": 1.0, **state})  # for pickles older than `kl_weight`, too

    def noise_setting(self) -> NoiseSetting:
        """The Weibull's k or the Lognormal's sigma."""
        return _NOISE[self.family]

    def loss_weight(self, step: Tensor | None) -> Tensor | float:
        """kl_weight·λ(t), the factor of the KL at training step t."""
        return self.kl_weight * self.annealing(step)

    def annealing(self, step: Tensor | None) -> Tensor | float:
        """λ(t) at training step t (appendix A)."""
        if self.rho is None:
            return 1.0
        if step is None:
            raise ValueError("rho needs the training step: pass chain=Chain(step=t)")
        return torch.sigmoid(self.rho * step.to(torch.float64)).to(torch.float32)
