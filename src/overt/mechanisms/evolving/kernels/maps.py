"""How a map is laid out in memory, how it is divided into strips, and how masks are passed to kernels.

A map here is a view [..., :keys] of storage (batch, heads, query, row length), where the row length is a
multiple of 16, so that every row starts aligned. The contents of padding columns are unspecified, and no
kernel relies on them.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from overt.mechanisms.flat import Visibility
from overt.mechanisms.kernels.attend import bytes_of, row_length
from overt.mechanisms.kernels.launch import blocks

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
WARPS_AT_ONCE = 8 * 132  # programs of one warp that a large GPU runs at once
Reach = tuple[int, int, int, int]  # of windows: columns to the left and right, rows above and below


def padded(
    batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """An uninitialised map (batch, heads, queries, keys) whose rows start aligned."""
    length = row_length(keys)
    storage = torch.empty(batch, heads, queries, length, dtype=dtype, device=device)
    return storage if length == keys else storage[..., :keys]


def is_padded(map: Tensor) -> bool:
    """Whether a map has the memory layout of `padded` and starts at an aligned address."""
    batch, heads, queries, keys = map.shape
    length = row_length(keys)
    strides = heads * queries * length, queries * length, length, 1
    # the stride of an axis of length 1 has no meaning
    if map.stride() != strides and not all(
        n == 1 or a == b for n, a, b in zip(map.shape, map.stride(), strides, strict=True)
    ):
        return False
    end = map.storage_offset() + batch * strides[0]
    return map.data_ptr() % 16 == 0 and end * map.element_size() <= map.untyped_storage().nbytes()


def as_padded(map: Tensor) -> Tensor:
    """The map itself if it is padded, otherwise a padded copy."""
    if is_padded(map):
        return map
    batch, heads, queries, keys = map.shape
    copy = padded(batch, heads, queries, keys, map.dtype, map.device)
    whole(copy)[..., keys:] = 0  # for the interpreter, which warns when it converts uninitialised bits
    return copy.copy_(map)


def whole(map: Tensor) -> Tensor:
    """A padded map including its padding columns."""
    batch, heads, queries, keys = map.shape
    length = row_length(keys)
    return map.as_strided(
        (batch, heads, queries, length), (heads * queries * length, queries * length, length, 1)
    )


def strips_of(rows: int, strips: int) -> tuple[int, int]:
    """Rows per strip, and the number of strips, close to the number requested."""
    strips = max(1, min(strips, blocks(rows, 8)))
    each = blocks(rows, strips)
    return each, blocks(rows, each)


def mask_bytes(seen: Visibility, spare: Tensor) -> tuple[Tensor, Tensor]:
    """The two masks as bytes; a kernel needs a pointer for each."""
    return bytes_of(seen.key_visible, spare), bytes_of(seen.query_real, spare)


def which_masks(seen: Visibility) -> tuple[bool, bool, bool]:
    """Whether there is a mask of keys, a mask of queries, and a causal mask."""
    return seen.key_visible is not None, seen.query_real is not None, seen.causal


def mask_constants(which: tuple[bool, bool, bool]) -> dict[str, bool]:
    """The result of `which_masks` as constants of kernels."""
    return dict(zip(("KEY_MASK", "QUERY_MASK", "CAUSAL"), which, strict=True))
