"""Bayesian Attention at one site of a model: the prior network, sampling, and the KL."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from overt.mechanisms import noise
from overt.mechanisms.bayesian._draw_cpu import draw as draw_cpu
from overt.mechanisms.bayesian._draw_cpu import weibull_kl
from overt.mechanisms.bayesian.chunked import chunked_kl
from overt.mechanisms.bayesian.closed import closed_kl
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.bayesian.drawing import draws_sample, examples_of, noise_keys, wants_kl
from overt.mechanisms.bayesian.naive import ContextualPrior, draw, log_noise, map_kl, prior_of
from overt.mechanisms.bayesian.numbers import law_of
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.flat import NO_NOISE, Divergence, Drawing
from overt.mechanisms.maps import log_normalizer
from overt.mechanisms.mechanism import Ahead, MechanismLayer
from overt.mechanisms.site import Site

log = logging.getLogger("overt")
# Limits of the fused form. It computes weights relative to the row's largest score before noise; stronger
# noise would exceed the range of float16.
LEAST_K, MOST_SIGMA = 1.0, 1.5
MOST_MIDDLE = 32


class BayesianLayer(MechanismLayer):
    """From logits Φ to weights: a draw or their mean; leaves the KL in the chain."""

    config: Bayesian
    random = True
    reads_logits_only = True
    mean_is_softmax = True

    def __init__(self, config: Bayesian, site: Site) -> None:
        super().__init__(config, site)
        self._law = law_of(config)
        self.adds = None if config.prior is None else "KL"
        contextual = config.prior == "contextual"
        self.prior = ContextualPrior(site.head_dim, config.d_mid) if contextual else None

    def reconfigure(self, config: Bayesian) -> None:
        """Take another amount of noise."""
        super().reconfigure(config)
        self._law = law_of(config)

    def weights(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Weights, (batch, heads, query, key), at least float32, from logits Φ."""
        visible, off = call.visible(), chain.switched_off
        with_kl, lse, weights = wants_kl(self, self.config, chain), None, None
        if draws_sample(self, chain):
            keys, examples, row = self._keys(logits, call, chain), examples_of(logits, chain), call.first_row
            drawn = draw_cpu(logits, visible, keys, examples, row, self.config, with_kl, off)
            if drawn is None:
                _, heads, rows, columns = logits.shape
                unit = noise.uniform(keys, examples, heads, rows, columns, row, off)
                weights = draw(logits, visible, unit, self.config)
            else:
                weights, lse = drawn
        if with_kl:
            kl = self._kl(logits, visible, call, lse, off)
            self.leave_kl(chain, call.site, kl, self._cells(visible, call) if chain.keep else None)
        return call.softmax(logits) if weights is None else weights

    def ahead(self, call: AttentionCall, chain: Chain) -> Ahead:
        """The noise of all rows, and the KL of them all once their logits are known."""
        added, off = None, chain.switched_off
        if draws_sample(self, chain):
            _, heads, rows, columns = call.shape
            keys, examples = self._keys(call.query, call, chain), examples_of(call.query, chain)
            unit = noise.uniform(keys, examples, heads, rows, columns, call.first_row, off)
            added = log_noise(unit, self.config)

        def leave_kl(logits: Tensor) -> None:
            visible = call.visible()
            kl = self._kl(logits, visible, call.with_logits(logits), None, off)
            self.leave_kl(chain, call.site, kl, self._cells(visible, call))

        return Ahead(added, leave_kl if wants_kl(self, self.config, chain) else None)

    def _keys(self, like: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """The noise's keys on the device of a tensor whose first axis is the batch; see `noise_keys`."""
        keys = noise_keys(call.site, chain).to(like.device)
        if keys.dim() == 2 and keys.shape[0] != like.shape[0]:
            raise ValueError(
                "sample must be one number or one for each of the batch's "
                f"{like.shape[0]} examples, got {keys.shape[0]}"
            )
        return keys

    def _cells(self, visible: Tensor, call: AttentionCall) -> Tensor | None:
        """How many cells the KL is the mean of, (batch,); None where it is a sum."""
        if self.config.kl_reduction == "sum":
            return None
        return visible.expand(call.shape).sum(dim=(1, 2, 3))

    def idle(self, chain: Chain) -> bool:
        """True in evaluation, where neither a sample nor the KL is requested."""
        return not draws_sample(self, chain) and not wants_kl(self, self.config, chain)

    def drawing(self, chain: Chain) -> Drawing:
        """What kernels should draw in a pass, and the KL that they should compute."""
        law, divergence = self._law, Divergence()
        if wants_kl(self, self.config, chain):
            divergence = law.divergence
            if self.prior is not None:
                network = self.prior.inner.weight, self.prior.inner.bias, self.prior.outer.weight
                inner, bias, outer = (x if x.is_contiguous() else x.contiguous() for x in network)
                divergence = divergence._replace(inner=inner, bias=bias, outer=outer)
        family = law.family if draws_sample(self, chain) else NO_NOISE
        return Drawing(family, law.number, divergence, law.averaged)

    def leave_kl(self, chain: Chain, site: Site, kl: Tensor, cells: Tensor | None = None) -> None:
        """Add the KL of a pass per example, (batch,), to its chain; `cells` as in `Chain.add_loss`."""
        chain.add_loss(site, kl, self.config, cells)

    def _kl(
        self, logits: Tensor, visible: Tensor, call: AttentionCall, lse: Tensor | None, off: str | None
    ) -> Tensor:
        # The KL is a difference of large terms: computed in at least float32, even under autocast.
        with torch.autocast(logits.device.type, enabled=False):
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            prior = prior_of(self.prior, call.keys_of_prior.to(logits.dtype), visible, self.config)
            heads = prior.repeat_interleave(logits.shape[1] // prior.shape[1], dim=1)
            if off is not None:
                return map_kl(logits, visible, heads, self.config)
            if call.is_dot():
                lse = log_normalizer(logits, visible) if lse is None else lse
                return closed_kl(call, lse, prior, self.config)
            if not torch.compiler.is_compiling():
                log.debug("%s %d: dense KL, the map is not a plain dot product", *self.site.place)
            if lse is not None and self.config.family == "weibull":
                return weibull_kl(logits, visible, lse, heads, self.config)
            return chunked_kl(logits, visible, heads, self.config)

    def unfit(self, call: AttentionCall) -> str | None:
        """Why the kernels cannot take it; None if they can."""
        config, prior, device = self.config, self.prior, call.query.device
        if prior is not None:
            if not type(prior.inner) is type(prior.outer) is nn.Linear or prior.inner.bias is None:
                return "the prior's network has been wrapped or replaced"
            if prior.inner.weight.device != device or prior.outer.weight.device != device:
                return f"the prior's weights are on {prior.inner.weight.device}, queries on {device}"
            if call.prior_key is not None and call.prior_key.dtype != call.query.dtype:
                return f"the prior's keys are {call.prior_key.dtype}, queries {call.query.dtype}"
        if config.family == "weibull" and config.k < LEAST_K:
            return f"kernels take k from {LEAST_K}, got {config.k}"
        if config.family == "lognormal" and config.sigma > MOST_SIGMA:
            return f"kernels take sigma up to {MOST_SIGMA}, got {config.sigma}"
        if config.prior == "contextual" and config.d_mid > MOST_MIDDLE:
            return f"kernels take d_mid up to {MOST_MIDDLE}, got {config.d_mid}"
        if config.prior == "contextual" and config.preset == "official" and config.prior_beta > 1.0:
            return f'kernels take prior_beta up to 1 with preset="official", got {config.prior_beta}'
        return None

    def describe(self) -> dict[str, str]:
        """Family, spread, prior and the KL's weight."""
        config = self.config
        shape = f"k={config.k:g}" if config.family == "weibull" else f"sigma={config.sigma:g}"
        prior = "no prior" if config.prior is None else f"{config.prior} prior, KL × {config.kl_weight:g}"
        return {"Bayesian": f"{config.family} {shape}, {prior}"}

    def extra_repr(self) -> str:
        """Effective settings, for `print(model)`."""
        config = self.config
        shape = f"k={config.k}" if config.family == "weibull" else f"sigma={config.sigma}"
        weight = f"kl_weight={config.kl_weight:g}"
        return f"{self.site.kind} {self.site.layer}, {config.family}, {shape}, prior={config.prior}, {weight}"
