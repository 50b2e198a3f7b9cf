"""Equation 4 on the CPU: one operator around compiled loops, with its own backward pass.

It saves no image of a convolution and computes only what the map needs; torch's gradient of a convolution
over few channels takes ten times as long on some processors. `naive.evolve` is the definition.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from overt.mechanisms import backend
from overt.mechanisms.evolving import naive
from overt.mechanisms.loops import bytes_of, loops, run_threaded
from overt.mechanisms.operators import plain_gradients
from overt.mechanisms.site import Kind

LOOPS = "evolving._evolve_numba"
PARTS = 64  # partial sums of the weight's gradient, whatever the number of threads


def evolve(
    logits: Tensor,
    previous: Tensor,
    convolution: tuple[Tensor, Tensor],
    visible: Tensor,
    kind: Kind,
    alpha: float,
    beta: float,
    ramp_factor: Tensor | None = None,
    off: str | None = None,
) -> Tensor | None:
    """`naive.evolve` with a previous map and a convolution; None where this form does not apply.

    Args:
        logits: Φ, (batch, heads, query, key).
        previous: of the same shape, −inf in hidden cells.
        convolution: weight (heads, heads, k, k) and bias (heads,).
        visible: boolean, broadcasts to `logits`.
        kind: which windows.
        alpha: of equation 4.
        beta: of equation 4.
        ramp_factor: factor of alpha and beta, one number.
        off: the reason to use the definition, if any.
    """
    if backend.unfit(backend.LOOPS, logits, previous, *convolution, off=off) is not None:
        return None
    naive.check_weight(convolution[0], logits)
    evolved: Tensor = torch.ops.overt.evolve(
        logits, previous, visible, *convolution, kind, alpha, beta, ramp_factor
    )[0]
    return evolved


@torch.library.custom_op("overt::evolve", mutates_args=())
def _evolve(
    logits: Tensor,
    previous: Tensor,
    visible: Tensor,
    weight: Tensor,
    bias: Tensor,
    kind: str,
    alpha: float,
    beta: float,
    ramp_factor: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Evolved logits, and as bytes the visible cells that the ReLU passed."""
    kernels = _loops()
    alphas, betas = _factor(alpha, ramp_factor), _factor(beta, ramp_factor)
    logits, previous, seen = logits.contiguous(), previous.contiguous(), bytes_of(visible, logits)
    left, _, above, _ = naive.reach(cast(Kind, kind), weight.shape[-1])
    image = _image(logits, previous, seen, alphas, kind, weight.shape[-1])
    evolved, passed = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.uint8)

    def run(start: int, stop: int, image: Any, weight: Any, bias: Any, seen: Any, out: Any, ok: Any) -> None:
        kernels.convolve(start, stop, image, weight, bias, seen, betas, above, left, out, ok)

    # Small enough to copy: once numpy has seen a storage it cannot be resized, which FSDP does with weights.
    weight, bias = (x.clone(memory_format=torch.contiguous_format) for x in (weight, bias))
    _share(logits, run, image, weight, bias, seen, evolved, passed)
    return evolved, passed


@_evolve.register_fake
def _(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return logits.new_empty(logits.shape), logits.new_empty(logits.shape, dtype=torch.uint8)


@torch.library.custom_op("overt::evolve_backward", mutates_args=())
def _evolve_backward(
    gradient: Tensor,
    passed: Tensor,
    logits: Tensor,
    previous: Tensor,
    visible: Tensor,
    weight: Tensor,
    kind: str,
    alpha: float,
    beta: float,
    ramp_factor: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients to logits, previous, weight and bias."""
    kernels = _loops()
    alphas, betas = _factor(alpha, ramp_factor), _factor(beta, ramp_factor)
    logits, previous, seen = logits.contiguous(), previous.contiguous(), bytes_of(visible, logits)
    gradient, size = gradient.contiguous(), weight.shape[-1]
    left, right, above, below = naive.reach(cast(Kind, kind), size)
    # Windows of the gradient extend in the opposite direction.
    back = _empty_image(logits, (right, left, below, above))

    def relu(start: int, stop: int, gradient: Any, passed: Any, out: Any) -> None:
        kernels.through_relu(start, stop, gradient, passed, betas, below, right, out)

    _share(logits, relu, gradient, passed, back)
    to_logits, to_previous = torch.empty_like(logits), torch.empty_like(logits)

    def maps(start: int, stop: int, *arrays: Any) -> None:
        kernels.to_maps(start, stop, *arrays[:5], alphas, betas, *arrays[5:])

    flipped = weight.transpose(0, 1).flip(2, 3).contiguous()
    _share(logits, maps, back, flipped, gradient, previous, seen, to_logits, to_previous)

    image = _image(logits, previous, seen, alphas, kind, size)
    batch, heads, queries, keys = logits.shape
    rows = max(8, -(-batch * queries // PARTS))
    parts = logits.new_empty(-(-batch * queries // rows), *weight.shape)

    def sums(start: int, stop: int, image: Any, back: Any, parts: Any) -> None:
        kernels.to_weight(start, stop, image, back, below, right, rows, (batch, heads, queries, keys), parts)

    run_threaded(parts.shape[0], logits.numel(), sums, image, back, parts)
    return to_logits, to_previous, parts.sum(dim=0), back.sum(dim=(0, 2, 3))


@_evolve_backward.register_fake
def _(
    gradient: Tensor,
    passed: Tensor,
    logits: Tensor,
    previous: Tensor,
    visible: Tensor,
    weight: Tensor,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del gradient, passed, previous, visible
    maps = logits.new_empty(logits.shape), logits.new_empty(logits.shape)
    return *maps, weight.new_empty(weight.shape), weight.new_empty(weight.shape[:1])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, previous, visible, weight, bias, kind, alpha, beta, ramp_factor = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, previous, visible, weight, bias, output[1], ramp_factor)
    ctx.numbers = kind, alpha, beta


def _gradients(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    logits, previous, visible, weight, bias, passed, ramp_factor = ctx.saved_tensors
    kind, alpha, beta = ctx.numbers
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        # Second-order gradients need plain operations, which are differentiable.
        factors = [number if ramp_factor is None else number * ramp_factor for number in (alpha, beta)]
        evolved = naive.evolve(logits, previous, (weight, bias), visible, kind, *factors)
        gradients: Any = plain_gradients(evolved, (logits, previous, weight, bias), gradient)
    else:
        gradients = torch.ops.overt.evolve_backward(
            gradient, passed, logits, previous, visible, weight, kind, alpha, beta, ramp_factor
        )
    to_logits, to_previous, to_weight, to_bias = gradients
    return to_logits, to_previous, None, to_weight, to_bias, None, None, None, None


_evolve.register_autograd(_gradients, setup_context=_setup)


def _loops() -> Any:
    return loops(LOOPS)


def _factor(number: float, ramp_factor: Tensor | None) -> np.float32:
    return np.float32(number if ramp_factor is None else number * float(ramp_factor))


def _empty_image(logits: Tensor, border: tuple[int, int, int, int]) -> Tensor:
    """An uninitialised map in a border of zeros."""
    left, right, above, below = border
    batch, heads, queries, keys = logits.shape
    image = logits.new_empty(batch, heads, above + queries + below, left + keys + right)
    for edge in (image[:, :, :above], image[:, :, above + queries :], image[..., :left]):
        edge.zero_()
    image[..., left + keys :].zero_()
    return image


def _image(
    logits: Tensor, previous: Tensor, seen: Tensor, alpha: np.float32, kind: str, kernel_size: int
) -> Tensor:
    """`naive.mix`'s result in a border of zeros as wide as its windows reach."""
    border = naive.reach(cast(Kind, kind), kernel_size)
    image, kernels = _empty_image(logits, border), _loops()

    def run(start: int, stop: int, now: Any, past: Any, seen: Any, out: Any) -> None:
        kernels.mix(start, stop, now, past, seen, alpha, border[2], border[0], out)

    _share(logits, run, logits, previous, seen, image)
    return image


def _share(logits: Tensor, run: Any, *tensors: Tensor) -> None:
    """Run a loop over rows of maps, with (example, row) as one number."""
    run_threaded(logits.shape[0] * logits.shape[2], logits.numel(), run, *tensors)
