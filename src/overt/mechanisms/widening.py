"""Queries, keys and values of pixels, widened by relative positions, in one pass on a GPU.

`scores.RelativePosition2d.widen` is the definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from overt.mechanisms.backend import KERNELS, room, unfit
from overt.mechanisms.chain import Chain
from overt.mechanisms.flat import empty_heads_last
from overt.mechanisms.operators import Gradients, Maybe, Operator, Tensors

ALIGNED = 8  # torch's kernels take heads of multiples of this width


class Pixels(NamedTuple):
    """What is widened.

    Attributes:
        pixels: (batch, pixels, channels), contiguous: queries of all heads, keys, and values.
        vertical: vectors of vertical distances, (2·height − 1, dim), of the largest image.
        horizontal: vectors of horizontal distances.
    """

    pixels: Tensor
    vertical: Tensor
    horizontal: Tensor


class Layout(NamedTuple):
    """How it is laid out.

    Attributes:
        height: of the image.
        width: of the image.
        heads: number of heads.
        values: width of a head's values.
        out: width of widened queries and keys.
        value_out: width of the values of the results.
        scale: of queries.
    """

    height: int
    width: int
    heads: int
    values: int
    out: int
    value_out: int
    scale: float


def fits(pixels: Tensor, heads: int, values: int, size: tuple[int, int], chain: Chain) -> bool:
    """Whether the kernels can take these pixels; compilers have the plain operations.

    Args:
        pixels: (batch, pixels, channels).
        heads: number of heads.
        values: width of a head's values.
        size: height and width of the image.
        chain: of this forward pass.
    """
    if torch.compiler.is_compiling() or pixels.numel() == 0:
        return False
    if unfit(KERNELS, pixels, off=chain.switched_off) is not None:
        return False
    from overt.mechanisms.kernels.positions import room_for

    width = (pixels.shape[-1] // heads - values) // 2
    needed = room_for(width, out_width(width, values, size)) * pixels.element_size()
    return needed <= room(pixels.device)


def out_width(width: int, values: int, size: tuple[int, int]) -> int:
    """Width of widened queries, keys and values: a multiple of 8."""
    wide = max(width + sum(size), values)
    return wide + -wide % ALIGNED


def _forward(given: Pixels, layout: Layout) -> Tensors:
    from overt.mechanisms.kernels import positions

    height, width, heads, values, out, value_out, scale = layout
    return positions.forward(*given, (height, width), heads, values, out, value_out, scale)


def _backward(
    groups: tuple[Pixels, Layout], results: Tensors, gradients: Maybe, needed: Mapping[str, bool]
) -> Gradients:
    from overt.mechanisms.kernels import positions

    del needed
    given, (height, width, heads, values, _, _, scale) = groups
    to_query, to_key, to_value = (
        torch.zeros_like(result) if gradient is None else gradient
        for result, gradient in zip(results, gradients, strict=True)
    )
    to_wide = to_query, to_key, to_value
    to = positions.backward(*given, (height, width), heads, values, scale, to_wide)
    return dict(zip(Pixels._fields, to, strict=True))


def _shapes(given: Pixels, layout: Layout) -> Tensors:
    batch, count, _ = given.pixels.shape
    widths = layout.out, layout.out, layout.value_out
    return tuple(
        empty_heads_last(given.pixels.new_empty(batch, layout.heads, count, width)) for width in widths
    )


def _to_shapes(groups: tuple[Pixels, Layout], needed: Mapping[str, bool]) -> Gradients:
    del needed
    return {name: torch.empty_like(x) for name, x in groups[0]._asdict().items()}


widen = Operator(
    "widen",
    (Pixels, Layout),
    Pixels._fields,
    _forward,
    _backward,
    _shapes,
    _to_shapes,
    results=3,
    differentiable=3,
)


def widened(
    given: Pixels, size: tuple[int, int], heads: int, values: int, scale: float, equal: bool = True
) -> Tensors:
    """Queries, keys and values, all (batch, heads, pixels, width); widths are multiples of 8.

    Where `fits` says that kernels can take the pixels. Further columns of queries and keys change no product,
    and values end in zeros.

    Args:
        given: what is widened; pixels need not be contiguous.
        size: height and width of the image.
        heads: number of heads.
        values: width of a head's values.
        scale: of queries.
        equal: whether values are as wide as queries and keys, which torch's kernels need.
    """
    out = out_width(given.vertical.shape[1], values, size)
    value_out = out if equal else values + -values % ALIGNED
    layout = Layout(*size, heads, values, out, value_out, scale)
    return widen(given._replace(pixels=given.pixels.contiguous()), layout)
