"""Queries, keys and values of pixels with their relative positions; `scores` has the definition.

One pass over the channels of all pixels writes them as the attention's kernels take them: queries and keys
widened by positions, values as wide as they are wanted. Backwards, one pass computes the gradient of the
channels, and sums for that of the vectors of positions, which a second, small one adds up.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from overt.mechanisms.kernels.attend import Shape, heads_last, precision_of, rows_whole
from overt.mechanisms.kernels.launch import MOST, Ready, blocks, helper, power_of_two

_ROWS = 64  # heads of examples that a program takes at a time
_PROGRAMS = 1024  # of the backward pass, about
_PIXELS = 64  # that a program adds up at a time


@helper
def _vectors(
    vertical, horizontal, down, across, column, dim, height, width,
    most_height, most_width, WIDTH: tl.constexpr,
):  # fmt: skip
    """The vectors that belong to columns of widened queries: (columns, dim), zeros elsewhere.

    Args:
        vertical: (2·most_height − 1, dim).
        horizontal: (2·most_width − 1, dim).
        down: row of the pixel.
        across: its column in the image.
        column: of the widened queries, (columns,).
        dim: (dim,).
        height: of the image.
        width: of the image.
        most_height: of the largest image.
        most_width: of the largest image.
        WIDTH: of a head's queries.
    """
    row = column - WIDTH
    side = row - height
    inside = (dim < WIDTH)[None, :]
    of_rows = tl.load(
        vertical + (row - down + most_height - 1)[:, None] * WIDTH + dim[None, :],
        mask=((row >= 0) & (row < height))[:, None] & inside, other=0.0,
    )  # fmt: skip
    of_columns = tl.load(
        horizontal + (side - across + most_width - 1)[:, None] * WIDTH + dim[None, :],
        mask=((side >= 0) & (side < width))[:, None] & inside, other=0.0,
    )  # fmt: skip
    return of_rows + of_columns


@triton.jit
def widen_pixels(
    pixels, vertical, horizontal, query, key, value,
    scale,
    height, width, rows, heads, most_height, most_width, channels,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, OUT: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_OUT: tl.constexpr, VALUE_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values of one pixel in BLOCK_ROWS heads of examples. Programs: (pixels, blocks).

    Args other than tensors:
        scale: of queries.
        rows: heads of all examples.
        channels: of a pixel: queries of all heads, keys of all heads, values of all heads.
        WIDTH: of a head's queries and keys.
        VALUES: width of a head's values.
        OUT: width of the queries and keys that are written.
        VALUE_OUT: width of the values that are written, at most OUT.
    """
    pixel = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # (rows,)
    dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
    column = tl.arange(0, BLOCK_OUT)  # (out,)
    here = (row < rows)[:, None]
    place = (row // heads).to(tl.int64) * (height * width) + pixel
    start = pixels + (place * channels)[:, None]  # of the pixel's channels
    head = (row % heads)[:, None]
    q_at = start + head * WIDTH
    q = tl.load(q_at + dim[None, :], mask=here & (dim < WIDTH)[None, :], other=0.0)  # (rows, width)
    down, across = pixel // width, pixel % width
    vectors = _vectors(
        vertical, horizontal, down, across, column, dim, height, width, most_height, most_width, WIDTH
    ).to(q.dtype)  # (out, width)
    products = tl.dot(q, tl.trans(vectors), input_precision=PRECISION)  # (rows, out)
    own = here & (column < WIDTH)[None, :]
    scaled = tl.load(q_at + column[None, :], mask=own, other=0.0).to(tl.float32) * scale
    k = tl.load(q_at + heads * WIDTH + column[None, :], mask=own, other=0.0)
    shown = (column - WIDTH == down) | (column - WIDTH - height == across)
    k = tl.where((column < WIDTH)[None, :], k.to(tl.float32), shown.to(tl.float32)[None, :])
    v = tl.load(
        start + 2 * heads * WIDTH + head * VALUES + column[None, :],
        mask=here & (column < VALUES)[None, :], other=0.0,
    )  # fmt: skip
    vector = (place * heads)[:, None] + head
    out = vector * OUT + column[None, :]
    written = here & (column < OUT)[None, :]
    tl.store(query + out, (scaled + products).to(q.dtype), mask=written)
    tl.store(key + out, k.to(q.dtype), mask=written)
    tl.store(value + vector * VALUE_OUT + column[None, :], v, mask=here & (column < VALUE_OUT)[None, :])


@triton.jit
def widen_to_pixels(
    pixels, vertical, horizontal, to_query, to_key, to_value, to_pixels, sums,
    scale,
    height, width, rows, heads, most_height, most_width, channels, each,
    query_batch_stride, query_head_stride, query_row_stride,
    key_batch_stride, key_head_stride, key_row_stride,
    value_batch_stride, value_head_stride, value_row_stride,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, OUT: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_VALUES: tl.constexpr, BLOCK_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of one pixel's channels in `each` heads of examples. Programs: (pixels, parts).

    Args other than tensors and strides:
        sums: float32 (parts, pixels, height + width, WIDTH), the gradient of the vectors that belong to each
            row and column of the image, of these heads.
        scale: of queries.
        each: heads of examples of a program, a multiple of BLOCK_ROWS.
    """
    pixel = tl.program_id(0)
    first = tl.program_id(1) * each
    dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
    column = tl.arange(0, BLOCK_OUT)  # (out,)
    depth = tl.arange(0, BLOCK_VALUES)  # (values,)
    down, across = pixel // width, pixel % width
    vectors = _vectors(
        vertical, horizontal, down, across, column, dim, height, width, most_height, most_width, WIDTH
    ).to(pixels.dtype.element_ty)  # (out, width)
    total = tl.zeros((BLOCK_OUT, BLOCK_WIDTH), tl.float32)
    for begin in range(0, each, BLOCK_ROWS):
        row = first + begin + tl.arange(0, BLOCK_ROWS)  # (rows,)
        here = (row < rows)[:, None]
        example = (row // heads).to(tl.int64)
        place = example * (height * width) + pixel
        head = (row % heads)[:, None]
        start = (place * channels)[:, None] + head * WIDTH
        own = here & (dim < WIDTH)[None, :]
        q = tl.load(pixels + start + dim[None, :], mask=own, other=0.0)  # (rows, width)
        from_query = (
            to_query + (example * query_batch_stride)[:, None] + head * query_head_stride
            + pixel * query_row_stride
        )  # fmt: skip
        g = tl.load(from_query + column[None, :], mask=here & (column < OUT)[None, :], other=0.0)
        total += tl.dot(tl.trans(g), q, input_precision=PRECISION)
        to_q = tl.dot(g, vectors, input_precision=PRECISION)  # (rows, width)
        to_q += scale * tl.load(from_query + dim[None, :], mask=own, other=0.0).to(tl.float32)
        tl.store(to_pixels + start + dim[None, :], to_q.to(q.dtype), mask=own)
        from_key = (
            to_key + (example * key_batch_stride)[:, None] + head * key_head_stride + pixel * key_row_stride
        )
        to_k = tl.load(from_key + dim[None, :], mask=own, other=0.0)
        tl.store(to_pixels + start + heads * WIDTH + dim[None, :], to_k, mask=own)
        from_value = (
            to_value + (example * value_batch_stride)[:, None] + head * value_head_stride
            + pixel * value_row_stride
        )  # fmt: skip
        inside = here & (depth < VALUES)[None, :]
        to_v = tl.load(from_value + depth[None, :], mask=inside, other=0.0)
        start = (place * channels)[:, None] + 2 * heads * WIDTH + head * VALUES
        tl.store(to_pixels + start + depth[None, :], to_v, mask=inside)
    wide = height + width
    sum_at = (tl.program_id(1).to(tl.int64) * height * width + pixel) * wide
    at = (sum_at + column - WIDTH)[:, None] * WIDTH + dim[None, :]
    kept = (column >= WIDTH) & (column < WIDTH + wide)
    tl.store(sums + at, total, mask=kept[:, None] & (dim < WIDTH)[None, :])


@triton.jit
def add_up_vectors(
    sums, to_vertical, to_horizontal,
    height, width, most_height, most_width, parts,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_PIXELS: tl.constexpr,
):  # fmt: skip
    """The gradient of one vector of positions. Programs: (vertical vectors and horizontal ones)."""
    number = tl.program_id(0)
    dim = tl.arange(0, BLOCK_WIDTH)  # (width,)
    total = tl.zeros((BLOCK_WIDTH,), tl.float32)
    upright = number < 2 * most_height - 1
    distance = tl.where(upright, number - most_height + 1, number - 2 * most_height - most_width + 2)
    count = height * width
    for start in range(0, count, BLOCK_PIXELS):
        pixel = start + tl.arange(0, BLOCK_PIXELS)  # (pixels,)
        down, across = pixel // width, pixel % width
        other = tl.where(upright, down, across) + distance  # the row or column at this distance
        inside = (pixel < count) & (other >= 0) & (other < tl.where(upright, height, width))
        column = tl.where(upright, other, height + other)
        at = (pixel.to(tl.int64) * (height + width) + column)[:, None] * WIDTH + dim[None, :]
        for part in range(0, parts):
            part_at = at + part * count * (height + width) * WIDTH
            loaded = tl.load(sums + part_at, mask=inside[:, None] & (dim < WIDTH)[None, :], other=0.0)
            total += tl.sum(loaded, 0)
    if upright:
        tl.store(to_vertical + number * WIDTH + dim, total, mask=dim < WIDTH)
    else:
        tl.store(
            to_horizontal + (number - 2 * most_height + 1) * WIDTH + dim, total, mask=dim < WIDTH
        )  # fmt: skip


def room_for(width: int, out: int) -> int:
    """Numbers that a program keeps in shared memory, at most: tiles of gradients, queries and vectors."""
    block_width, block_out = power_of_two(width), power_of_two(out)
    return 3 * _ROWS * block_out + 2 * block_out * block_width + _ROWS * block_width


def _constants(width: int, values: int, out: int) -> dict[str, int]:
    return {
        "WIDTH": width,
        "VALUES": values,
        "OUT": out,
        "BLOCK_WIDTH": power_of_two(width),
        "BLOCK_OUT": power_of_two(out),
    }


@lru_cache(MOST)
def _forward_ready(
    shape: Shape, size: Shape, most: Shape, heads: int, values: int, out: int, value_out: int, precision: str
) -> Ready:
    batch, pixels, channels = shape
    width = (channels // heads - values) // 2
    constants = {
        **_constants(width, values, out), "VALUE_OUT": value_out, "BLOCK_ROWS": _ROWS, "PRECISION": precision
    }  # fmt: skip
    grid = pixels, blocks(batch * heads, _ROWS), 1
    return Ready(widen_pixels, grid, (*size, batch * heads, heads, *most, channels), constants)


@lru_cache(MOST)
def _backward_ready(
    shape: Shape, size: Shape, most: Shape, heads: int, values: int, out: int, precision: str,
    strides: tuple[Shape, Shape, Shape],
) -> tuple[Ready, Ready, int]:  # fmt: skip
    batch, pixels, channels = shape
    width, rows = (channels // heads - values) // 2, batch * heads
    parts = min(blocks(_PROGRAMS, pixels), blocks(rows, _ROWS))
    each = _ROWS * blocks(blocks(rows, _ROWS), parts)
    constants = {
        **_constants(width, values, out), "BLOCK_VALUES": power_of_two(values), "BLOCK_ROWS": _ROWS,
        "PRECISION": precision,
    }  # fmt: skip
    steps = [stride for three in strides for stride in three[:3]]
    whole = Ready(
        widen_to_pixels, (pixels, parts, 1), (*size, rows, heads, *most, channels, each, *steps), constants
    )
    small = {"WIDTH": width, "BLOCK_WIDTH": power_of_two(width), "BLOCK_PIXELS": _PIXELS}
    count = 2 * (most[0] + most[1]) - 2
    return whole, Ready(add_up_vectors, (count, 1, 1), (*size, *most, parts), small), parts


def _most(vertical: Tensor, horizontal: Tensor) -> Shape:
    """Height and width of the largest image."""
    return (vertical.shape[0] + 1) // 2, (horizontal.shape[0] + 1) // 2


def forward(
    pixels: Tensor, vertical: Tensor, horizontal: Tensor, size: Shape, heads: int, values: int, out: int,
    value_out: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries and keys, (batch, heads, pixels, out), and values, (batch, heads, pixels, value_out).

    Args:
        pixels: (batch, pixels, channels), contiguous.
        vertical: vectors of vertical distances.
        horizontal: vectors of horizontal distances.
        size: height and width of the image.
        heads: number of heads.
        values: width of a head's values.
        out: width of queries and keys, at least that of widened ones.
        value_out: width of values, at least `values` and at most `out`.
        scale: of queries.
    """
    batch, count, _ = pixels.shape
    wide = [heads_last(pixels, batch, heads, count, each) for each in (out, out, value_out)]
    most, precision = _most(vertical, horizontal), precision_of(pixels.dtype)
    ready = _forward_ready(tuple(pixels.shape), size, most, heads, values, out, value_out, precision)
    ready.run((pixels, vertical.contiguous(), horizontal.contiguous(), *wide), (scale,))
    return wide[0], wide[1], wide[2]


def backward(
    pixels: Tensor, vertical: Tensor, horizontal: Tensor, size: Shape, heads: int, values: int, scale: float,
    to_wide: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `pixels`, `vertical` and `horizontal` from those of the results."""
    to_wide = rows_whole(to_wide[0]), rows_whole(to_wide[1]), rows_whole(to_wide[2])
    strides = tuple(to_wide[0].stride()), tuple(to_wide[1].stride()), tuple(to_wide[2].stride())
    most, out = _most(vertical, horizontal), to_wide[0].shape[-1]
    whole, small, parts = _backward_ready(
        tuple(pixels.shape), size, most, heads, values, out, precision_of(pixels.dtype), strides
    )
    to_pixels = torch.empty_like(pixels)
    width = vertical.shape[1]
    sums = pixels.new_empty((parts, pixels.shape[1], sum(size), width), dtype=torch.float32)
    whole.run((pixels, vertical.contiguous(), horizontal.contiguous(), *to_wide, to_pixels, sums), (scale,))
    to_vectors = [torch.empty_like(vectors, dtype=torch.float32) for vectors in (vertical, horizontal)]
    small.run((sums, *to_vectors))
    return to_pixels, to_vectors[0].to(vertical.dtype), to_vectors[1].to(horizontal.dtype)
