"""Evolving Attention in close to the least possible memory, on a GPU; optionally with random weights.

`naive` has the definition. A layer keeps only its evolved map, which the layer above needs anyway, and one
byte per four cells for the ReLU. The backward pass recomputes the mixed map from the previous map, queries
and keys, and overwrites it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving.layer import EvolvingLayer
from overt.mechanisms.evolving.naive import reach
from overt.mechanisms.evolving.ramp import ramp
from overt.mechanisms.flat import (
    Divergence,
    Drawer,
    Drawing,
    Inputs,
    Masks,
    Noise,
    empty_gradients,
    empty_rows,
    flat_of,
)
from overt.mechanisms.fused import FusedForm, Layers
from overt.mechanisms.operators import Gradients, Maybe, Operator, Tensors
from overt.mechanisms.site import KINDS

HIDDEN, MIXED = float("-inf"), 0.0
# Limits of the form for single rows, which has one program for all heads and keys of an example.
MOST_HEADS, MOST_TAPS = 16, 5
MOST_NUMBERS = 2**22  # in an example's keys


class Evolution(NamedTuple):
    """The inputs of the evolved map, beyond queries and keys.

    Attributes:
        previous: the previous layer's evolved map; None starts a chain.
        weight: of the convolution, (heads, heads, k, k); None without one.
        shift: its bias, (heads,).
        numbers: float32 (2,) on the device, α and β.
        add: RealFormer's sum.
    """

    previous: Tensor | None
    weight: Tensor | None
    shift: Tensor | None
    numbers: Tensor
    add: bool


Groups = tuple[Inputs, Masks, Noise, Divergence, Evolution]


def _rows_whole(inputs: Inputs) -> Inputs:
    from overt.mechanisms.kernels.attend import rows_whole

    query, key = rows_whole(inputs.query), rows_whole(inputs.key)
    unchanged = query is inputs.query and key is inputs.key
    return inputs if unchanged else inputs._replace(query=query, key=key)


def _window(evolution: Evolution, noise: Noise) -> tuple[int, int, int, int]:
    """How far the convolution's windows reach."""
    assert evolution.weight is not None
    return reach(KINDS[noise.kind], evolution.weight.shape[-1])


def _mix(inputs: Inputs, masks: Masks, evolution: Evolution, previous: Tensor | None) -> Tensor:
    from overt.mechanisms.evolving import kernels

    hidden = HIDDEN if evolution.weight is None else MIXED
    numbers, add = evolution.numbers, evolution.add
    return kernels.mix(inputs.query, inputs.key, inputs.scale, previous, masks, numbers, add, hidden)


def _forward(
    inputs: Inputs, masks: Masks, noise: Noise, divergence: Divergence, evolution: Evolution
) -> Tensors:
    """Output, evolved map, KL (batch,); and the ReLU's bits, `Attended.rows`, and `keyed` of the prior."""
    from overt.mechanisms.evolving import kernels
    from overt.mechanisms.kernels import attend_forward, prior

    inputs, (_, weight, shift, numbers, _) = _rows_whole(inputs), evolution
    keyed = prior.forward(inputs.keys_of_prior, masks, divergence)
    previous = None if evolution.previous is None else kernels.as_padded(evolution.previous)
    evolved = _mix(inputs, masks, evolution, previous)
    if weight is not None and shift is not None:
        evolved, bits = kernels.convolve(evolved, weight, shift, _window(evolution, noise), numbers, masks)
    else:
        bits = inputs.query.new_empty(0, dtype=torch.uint8)
    attended = attend_forward.forward(inputs, masks, noise, divergence, keyed, evolved)
    if masks.left:
        attend_forward.attend_padding(inputs, masks, noise, attended)
    keyed = attended.kl.new_empty(0) if keyed is None else keyed
    return attended.out, evolved, divergence.total(attended.kl), bits, attended.rows, keyed


def _backward(groups: Groups, results: Tensors, gradients: Maybe, needed: Mapping[str, bool]) -> Gradients:
    from overt.mechanisms.evolving import kernels
    from overt.mechanisms.kernels import attend_backward, attend_map_backward, prior

    inputs, masks, noise, divergence, evolution = groups
    (out, evolved, _, bits, rows, keyed), (to_out, to_evolved, to_kl) = results, gradients
    inputs, (_, weight, shift, numbers, add) = _rows_whole(inputs), evolution
    to_kl = divergence.to_total(to_kl, rows)
    to_out = torch.zeros_like(out) if to_out is None else to_out
    evolved = kernels.as_padded(evolved)
    to_evolved = None if to_evolved is None else kernels.as_padded(to_evolved)
    batch, heads, queries, keys = evolved.shape
    gradient = kernels.padded(batch, heads, queries, keys, evolved.dtype, evolved.device)
    to_value, to_parameter = attend_map_backward.map_backward(
        evolved, inputs.value, noise, divergence, keyed, out, rows, to_out, to_kl, to_evolved, gradient
    )
    to_fields: dict[str, Tensor | None] = {"value": to_value}
    previous = None if evolution.previous is None else kernels.as_padded(evolution.previous)
    if weight is not None and shift is not None:
        mixed, window = _mix(inputs, masks, evolution, previous), _window(evolution, noise)
        to_fields["weight"], to_fields["shift"] = kernels.convolve_to_weight(
            gradient, mixed, bits, weight, shift, window, numbers, masks
        )
        # The mixed map is no longer needed: its memory takes the gradient.
        kernels.convolve_to_mixed(gradient, bits, weight, window, numbers, masks, mixed)
        gradient = mixed
    query, key, scale = inputs.query, inputs.key, inputs.scale
    to_fields["previous"], to_query, to_key = kernels.mix_backward(
        gradient, previous, query, key, scale, numbers, masks, add, needed["previous"]
    )
    if masks.left:
        attend_backward.padding_backward(inputs, masks, noise, out, rows, to_out, to_query, to_key, to_value)
    to_fields["query"], to_fields["key"] = to_query, to_key
    return to_fields | prior.backward(inputs, masks, divergence, keyed, to_parameter, to_kl, to_key)


def _map_like(inputs: Inputs) -> Tensor:
    from overt.mechanisms.evolving.kernels import row_length

    (batch, heads, queries, _), keys = inputs.query.shape, inputs.key.shape[2]
    return inputs.query.new_empty(batch, heads, queries, row_length(keys))[..., :keys]


def _shapes(
    inputs: Inputs, masks: Masks, noise: Noise, divergence: Divergence, evolution: Evolution
) -> Tensors:
    del noise
    evolved = _map_like(inputs)
    shape = (*evolved.shape[:3], evolved.stride(2) // 4) if evolution.weight is not None else (0,)
    kl, rows, keyed = empty_rows(inputs, masks, divergence)
    bits = inputs.query.new_empty(shape, dtype=torch.uint8)
    batch, heads, queries, _ = evolved.shape
    out = inputs.query.new_empty(batch, queries, heads, inputs.value.shape[-1]).transpose(1, 2)
    return out, evolved, kl, bits, rows, keyed


def _to_shapes(groups: Groups, needed: Mapping[str, bool]) -> Gradients:
    inputs, _, _, divergence, evolution = groups
    to_fields = empty_gradients(inputs, divergence)
    if evolution.previous is not None and needed["previous"]:
        to_fields["previous"] = _map_like(inputs)
    convolution = {"weight": evolution.weight, "shift": evolution.shift}
    return to_fields | {name: x.new_empty(x.shape) for name, x in convolution.items() if x is not None}


evolving = Operator(
    "evolving",
    (Inputs, Masks, Noise, Divergence, Evolution),
    ("query", "key", "value", "prior_key", "inner", "bias", "outer", "previous", "weight", "shift"),
    _forward,
    _backward,
    _shapes,
    _to_shapes,
    results=6,
    differentiable=3,
)


_constants: dict[tuple[float, float, torch.device], Tensor] = {}


def _constant(alpha: float, beta: float, device: torch.device) -> Tensor:
    """α and β on a device, copied there only once: a copy waits for the device."""
    if torch.compiler.is_compiling():
        return torch.tensor([alpha, beta], dtype=torch.float32, device=device)
    key = alpha, beta, device
    if key not in _constants:
        with torch.inference_mode(False):  # else later training could not save it for backward
            _constants[key] = torch.tensor([alpha, beta], dtype=torch.float32, device=device)
    return _constants[key]


def _previous(layer: EvolvingLayer, call: AttentionCall, chain: Chain) -> Tensor | None:
    """The previous layer's evolved map on this device; None where a chain starts."""
    below = None if call.site.starts else chain.previous(call.site, layer.name)
    if below is None:
        return None
    if below.shape[0] != call.shape[0]:
        raise ValueError(
            f"the previous map has {below.shape[0]} examples, these queries {call.shape[0]}: "
            "make a new Chain for each forward pass"
        )
    return below.to(call.query.device) if below.shape == call.shape else None


def _numbers(layer: EvolvingLayer, chain: Chain, device: torch.device) -> tuple[Tensor, bool]:
    """α and β on the device, and whether α is known to be 0."""
    ramp_factor = ramp(layer.config, chain, layer.training, device)
    numbers = _constant(layer.alpha, layer.config.beta, device)
    return numbers if ramp_factor is None else numbers * ramp_factor, layer.alpha == 0.0


def attend(layers: Layers, call: AttentionCall, chain: Chain) -> Tensor:
    """Output (batch, heads, query, dim) of Evolving, with or without random weights on top.

    Leaves map and KL in the chain.
    """
    layer = cast(EvolvingLayer, layers["Evolving"])
    drawer = cast("Drawer | None", layers.get("Bayesian"))
    config, site, previous = layer.config, call.site, _previous(layer, call, chain)
    previous = None if previous is None else previous.to(call.query.dtype)
    numbers, _ = _numbers(layer, chain, call.query.device)
    starts = previous is None and not config.first
    weight, shift = (None, None) if starts else (layer.weight, layer.bias)
    flat = flat_of(call, Drawing() if drawer is None else drawer.drawing(chain), chain)
    out, evolved, kl = evolving(*flat, Evolution(previous, weight, shift, numbers, config.skip == "add"))
    chain.carry(site, layer.name, evolved)
    if drawer is not None and flat[-1].wanted:
        drawer.leave_kl(chain, site, kl)
    return out


def row_limits(layers: Layers, call: AttentionCall, chain: Chain) -> str | None:
    """Why the kernel for single rows does not take a call; None if it does."""
    layer = cast(EvolvingLayer, layers["Evolving"])
    batch, heads, _, keys = call.shape
    if call.bias is not None and not _fits(call.bias, (batch, heads, 1, keys)):
        return f"a bias of shape {tuple(call.bias.shape)} is not one for each key"
    if any(not other.idle(chain) for other in layers.values() if other is not layer):
        return "the kernel for single rows draws no weights and computes no KL"
    if heads > MOST_HEADS:
        return f"the kernel for single rows takes up to {MOST_HEADS} heads, got {heads}"
    if heads * keys * call.query.shape[-1] > MOST_NUMBERS:
        return f"the kernel for single rows would be slow with {keys} keys"
    weight, bias = layer.weight, layer.bias
    if weight is None or bias is None:
        return None
    if weight.shape[-1] > MOST_TAPS:
        return f"the kernel for single rows takes a kernel_size of up to {MOST_TAPS}, got {weight.shape[-1]}"
    if weight.device != call.query.device:
        return f"the convolution's weights are on {weight.device}, queries on {call.query.device}"
    if torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad):
        return "the kernel for single rows has no gradients"
    return None


def _fits(bias: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a bias has a column for each key and broadcasts to the rest of a map's shape."""
    if bias.dim() != 4 or bias.shape[3] != shape[3]:
        return False
    return all(size in (1, full) for size, full in zip(bias.shape, shape, strict=True))


def attend_row(layers: Layers, call: AttentionCall, chain: Chain) -> Tensor:
    """Output (batch, heads, 1, dim) of Evolving for one row, in one launch.

    Leaves the evolved row in the chain, and the mixed row where rows are kept.
    """
    from overt.mechanisms.evolving.kernels import evolve_one
    from overt.mechanisms.kernels.attend import rows_whole

    layer = cast(EvolvingLayer, layers["Evolving"])
    config, site, query = layer.config, call.site, call.query
    previous = _previous(layer, call, chain)
    numbers, alone = _numbers(layer, chain, query.device)
    convolution, kept, left = None, None, 0
    if layer.weight is not None and layer.bias is not None and (previous is not None or config.first):
        convolution = layer.weight.contiguous(), layer.bias.contiguous()
        kept = chain.kept_rows(site, layer.name, call.shape)
        left = reach(site.kind, config.kernel_size)[0]
    out, evolved, rows = evolve_one(
        rows_whole(query),
        rows_whole(call.key),
        rows_whole(call.value),
        call.scale,
        call.bias,
        None if previous is None or alone else previous.contiguous(),
        None if kept is None or kept.rows.shape[2] == 0 else rows_whole(kept.rows),
        None if kept is None else kept.order,
        convolution,
        left,
        call.seen,
        numbers,
        config.skip == "add",
        plainly=call.left_alone is not None,
        uniform=call.left_alone in ("eager", "biased"),
    )
    chain.carry(site, layer.name, evolved)
    if convolution is not None and layer.earlier_rows > 0:
        chain.put_rows(site, layer.name, rows)
    return out


FORMS = tuple(
    FusedForm(
        frozenset(covers),
        attend,
        attends_padding=True,
        any_width=True,
        attend_row=attend_row,
        row_limits=row_limits,
    )
    for covers in ({"Evolving"}, {"Evolving", "Bayesian"})
)
