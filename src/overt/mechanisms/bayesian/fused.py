"""Bayesian Attention without a query × key tensor, on a GPU; `naive` and `closed` have the definitions.

One pass over scores computes outputs and the KL. From a row's scores, the KL needs the log-sum-exp and one or
two sums with the prior's parameter. That holds for any scores under padding and causal masks, evolved ones
included.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import cast

import torch
from torch import Tensor

from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.flat import (
    Divergence,
    Drawer,
    Flat,
    Inputs,
    Masks,
    Noise,
    empty_gradients,
    empty_heads_last,
    empty_rows,
    flat_of,
)
from overt.mechanisms.fused import FusedForm
from overt.mechanisms.mechanism import MechanismLayer
from overt.mechanisms.operators import Gradients, Maybe, Operator, Tensors


def _forward(inputs: Inputs, masks: Masks, noise: Noise, divergence: Divergence) -> Tensors:
    """Output, KL (batch,), and what the backward pass needs: `Attended.rows`, and `keyed` of the prior."""
    from overt.mechanisms.kernels import attend_forward, prior

    keyed = prior.forward(inputs.keys_of_prior, masks, divergence)
    attended = attend_forward.forward(inputs, masks, noise, divergence, keyed)
    keyed = attended.kl.new_empty(0) if keyed is None else keyed
    return attended.out, divergence.total(attended.kl), attended.rows, keyed


def _backward(groups: Flat, results: Tensors, gradients: Maybe, needed: Mapping[str, bool]) -> Gradients:
    from overt.mechanisms.kernels import attend_backward, prior

    del needed
    inputs, masks, noise, divergence = groups
    (out, _, rows, keyed), (to_out, to_kl) = results, gradients
    to_out = torch.zeros_like(out) if to_out is None else to_out
    to_kl = divergence.to_total(to_kl, rows)
    to = attend_backward.backward(inputs, masks, noise, divergence, keyed, out, rows, to_out, to_kl)
    of_prior = prior.backward(inputs, masks, divergence, keyed, to.parameter, to_kl, to.key)
    return {"query": to.query, "key": to.key, "value": to.value, **of_prior}


def _shapes(inputs: Inputs, masks: Masks, noise: Noise, divergence: Divergence) -> Tensors:
    del noise
    return empty_heads_last(inputs.query), *empty_rows(inputs, masks, divergence)


def _to_shapes(groups: Flat, needed: Mapping[str, bool]) -> Gradients:
    del needed
    inputs, _, _, divergence = groups
    return empty_gradients(inputs, divergence)


bayesian = Operator(
    "bayesian",
    (Inputs, Masks, Noise, Divergence),
    ("query", "key", "value", "prior_key", "inner", "bias", "outer"),
    _forward,
    _backward,
    _shapes,
    _to_shapes,
    results=4,
    differentiable=2,
)


def attend(layers: Mapping[str, MechanismLayer], call: AttentionCall, chain: Chain) -> Tensor:
    """Output (batch, heads, query, dim) of Bayesian Attention on plain products; leaves its KL in `chain`."""
    layer = cast(Drawer, layers["Bayesian"])
    flat = flat_of(call, layer.drawing(chain), chain)
    out, kl = bayesian(*flat)
    if flat[-1].wanted:
        layer.leave_kl(chain, call.site, kl)
    return out


@torch.no_grad()
def draw(layers: Mapping[str, MechanismLayer], call: AttentionCall, chain: Chain, samples: int) -> Tensor:
    """Outputs of samples 0 … samples − 1, (samples, batch, heads, query, dim), without gradients.

    Each tile of keys and values is read once for all samples.
    """
    from overt.mechanisms.kernels import attend_forward

    sample_chain = copy(chain)
    sample_chain.sample = torch.zeros((), dtype=torch.int64)  # the first sample; None would give the mean
    sample_chain.wants_kl = False
    drawing = cast(Drawer, layers["Bayesian"]).drawing(sample_chain)
    inputs, masks, noise, _ = flat_of(call, drawing, sample_chain)
    out = attend_forward.forward(inputs, masks, noise, samples=samples).out
    return out if samples > 1 else out.unsqueeze(0)


FORM = FusedForm(frozenset({"Bayesian"}), attend, draw, attends_padding=True)
