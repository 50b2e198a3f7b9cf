"""Evolving Attention in plain operations: the definition that every faster form is tested against.

Maps are (batch, heads, query, key); hidden cells of an evolved map are −inf, so that a map carries its
visibility to the next layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overt import _check
from overt.mechanisms.maps import HIDDEN, check_map, check_visible, stacked
from overt.mechanisms.site import KINDS, Kind


def reach(kind: Kind, kernel_size: int) -> tuple[int, int, int, int]:
    """How far a cell's window reaches: columns to the left and right, rows above and below.

    A decoder's windows contain only rows above, so that no query reads a later query's map (section 3.5); in
    decoder self-attention they are shifted right as well, which leaves the paper's 6 visible cells of 9 on
    the diagonal.
    """
    _check.one_of("kind", kind, KINDS)
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size must be odd, got {kernel_size}")
    half, whole = kernel_size // 2, kernel_size - 1
    if kind == "encoder":
        return half, half, half, half
    if kind == "decoder":
        return whole, 0, whole, 0
    return half, half, whole, 0


def matching_previous(logits: Tensor, previous: Tensor | None) -> Tensor | None:
    """The previous map if these logits continue its chain; None where another shape starts a new chain."""
    if previous is None or previous.shape == logits.shape:
        return previous
    check_map("previous", previous)
    if previous.shape[0] != logits.shape[0]:
        raise ValueError(
            f"the previous map has {previous.shape[0]} examples, these logits {logits.shape[0]}: "
            "make a new Chain for each forward pass"
        )
    return None


def mix(
    logits: Tensor, previous: Tensor | None, visible: Tensor, alpha: float | Tensor, add: bool = False
) -> Tensor:
    """The first line of equation 4, with zeros in hidden cells.

    A cell that was hidden in the previous map but is visible now takes the current logit unmixed, as does
    every cell when there is no previous map. `add` is RealFormer's sum.
    """
    current = logits.masked_fill(~visible, 0.0)
    if previous is None:
        return current
    carried = previous != HIDDEN
    past = previous.to(logits.dtype).masked_fill(~carried, 0.0)
    mixed = current + alpha * past if add else alpha * past + (1.0 - alpha) * current
    return torch.where(carried & visible, mixed, current)


def check_weight(weight: Tensor, mixed: Tensor) -> None:
    """Refuse a convolution that does not fit the heads of a map."""
    if weight.dim() != 4 or weight.shape[:2] != (mixed.shape[1], mixed.shape[1]):
        raise ValueError(
            f"the convolution of {mixed.shape[1]} heads' maps needs a weight of shape "
            f"({mixed.shape[1]}, {mixed.shape[1]}, k, k), got {tuple(weight.shape)}"
        )


def convolve(mixed: Tensor, weight: Tensor, bias: Tensor, kind: Kind, kept: Tensor | None = None) -> Tensor:
    """ReLU of one convolution over all heads jointly (section 3.3), with the windows of `reach`.

    Args:
        mixed: (batch, heads, query, key), zeros in hidden cells.
        weight: (heads, heads, k, k), the first axis for the output head.
        bias: (heads,).
        kind: which windows.
        kept: (batch, heads, ≤ k − 1, ≤ key), the rows of `mix`'s result just above these, where rows are fed
            in pieces.
    """
    check_weight(weight, mixed)
    left, right, above, below = reach(kind, weight.shape[-1])
    above -= 0 if kept is None else kept.shape[-2]
    image = F.pad(stacked(kept, mixed), (left, right, above, below))
    return F.relu(F.conv2d(image, weight.to(image.dtype), bias.to(image.dtype)))


def refine(
    mixed: Tensor,
    convolution: tuple[Tensor, Tensor] | None,
    visible: Tensor,
    kind: Kind,
    beta: float | Tensor,
    kept: Tensor | None = None,
) -> Tensor:
    """The second line of equation 4, with −inf in hidden cells."""
    if convolution is not None:
        mixed = beta * convolve(mixed, *convolution, kind, kept) + (1.0 - beta) * mixed
    return mixed.masked_fill(~visible, HIDDEN)


def evolve(
    logits: Tensor,
    previous: Tensor | None,
    convolution: tuple[Tensor, Tensor] | None,
    visible: Tensor,
    kind: Kind,
    alpha: float | Tensor,
    beta: float | Tensor,
    kept: Tensor | None = None,
    add: bool = False,
    first: bool = False,
) -> Tensor:
    """Equation 4 up to the softmax: current logits and previous evolved logits → evolved logits.

    Without a previous map, or when its shape differs, a new chain starts: the current logits are used as they
    are, without a convolution, or with one if `first`.
    """
    check_map("logits", logits)
    check_visible(visible, logits)
    previous = matching_previous(logits, previous)
    mixed = mix(logits, previous, visible, alpha, add)
    convolution = convolution if previous is not None or first else None
    return refine(mixed, convolution, visible, kind, beta, kept)
