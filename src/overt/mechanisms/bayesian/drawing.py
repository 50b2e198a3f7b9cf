"""When weights are drawn, when the KL is computed, and how noise is addressed; on maps and on edges."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overt.mechanisms import noise
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.chain import Chain
from overt.mechanisms.site import KINDS, Site


def wants_kl(layer: nn.Module, config: Bayesian, chain: Chain) -> bool:
    """Whether to compute the KL.

    By default not for rows fed in pieces: the prior covers the keys known so far, so it differs at each step.
    """
    wants = layer.training and not chain.keep if chain.wants_kl is None else chain.wants_kl
    return wants and config.prior is not None


def draws_sample(layer: nn.Module, chain: Chain) -> bool:
    """Whether weights are drawn (in training, or for `Chain(sample=…)`) rather than the mean."""
    return layer.training or chain.sample is not None


def noise_keys(site: Site, chain: Chain) -> Tensor:
    """The noise's keys at a site: (2,), or (batch, 2) where each example has its own sample number."""
    if chain.step is None:
        raise ValueError("random weights need an address for their noise: pass chain=Chain(step=t)")
    sample = chain.step.new_zeros(()) if chain.sample is None else chain.sample
    step = chain.step.to(sample.device)
    seed, kind = chain.seed, KINDS.index(site.kind)
    if seed.device != sample.device:
        # A copy from the CPU would wait for all that the GPU has to do; compilers must not see the number.
        copied = torch.compiler.is_compiling()
        seed = seed.to(sample.device) if copied else sample.new_full((), chain.seed_number)
    return noise.stream(seed, step, site.layer, sample, kind, chain.switched_off)


def examples_of(logits: Tensor, chain: Chain) -> Tensor:
    """Global number of each example, (batch,)."""
    examples = chain.examples.to(logits.device)
    if examples.dim() == 0:
        return examples + torch.arange(logits.shape[0], device=logits.device)
    if examples.shape != logits.shape[:1]:
        raise ValueError(
            f"examples must number the batch's {logits.shape[0]} examples, got shape {tuple(examples.shape)}"
        )
    return examples
