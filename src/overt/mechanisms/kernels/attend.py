"""The host's side of the attention passes: their results, the sizes of tiles, and the forms of launches.

`attend_forward` computes outputs from scores; `attend_backward` computes gradients where scores are products
of queries and keys, and `attend_map_backward` where they are an evolved map.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from overt.mechanisms.flat import NO_NOISE, ZEROS, Divergence, Masks, Noise, signed
from overt.mechanisms.kernels.launch import INTERPRETED, blocks, power_of_two

ALIGNED = 16  # a map's rows start at multiples of this many cells
Shape = tuple[int, ...]
NO_MASKS, NO_DIVERGENCE = Masks(), Divergence()


class Attended(NamedTuple):
    """The results of a forward pass.

    Attributes:
        out: (batch, heads, query, dim), or (samples, batch, heads, query, dim).
        rows: float32 (1 or 3, batch, heads, query): the drawn weights' log-sum-exp in units of log 2, up to a
            constant, +inf for queries that see no key; and for the KL log Σ exp Φ over visible keys, and the
            derivative of the row's KL by it. Padded queries that attend plainly have their log-sum-exp.
        kl: float32 (batch, heads, blocks of rows), sums over each block's rows.
    """

    out: Tensor
    rows: Tensor
    kl: Tensor


def precision_of(dtype: torch.dtype) -> str:
    """How tensor cores multiply float32: with the precision set in torch."""
    if dtype != torch.float32:
        return "tf32"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def heads_last(like: Tensor, *shape: int) -> Tensor:
    """An empty (batch, heads, sequence, dim) tensor with heads next to dim in memory, as models need it."""
    return torch.empty_strided(shape, heads_last_strides(shape), dtype=like.dtype, device=like.device)


def heads_last_strides(shape: Shape) -> Shape:
    """Strides of `heads_last`."""
    heads, length, width = shape[-3:]
    one = heads * length * width
    strides = one, width, heads * width, 1
    return strides if len(shape) == 4 else (shape[1] * one, *strides)


def row_length(keys: int) -> int:
    """Columns of a map's rows in memory, those of padding included."""
    return blocks(keys, ALIGNED) * ALIGNED


def given_or(tensor: Tensor | None, spare: Tensor) -> Tensor:
    """The tensor, or a spare one: a kernel needs a pointer even where it uses none."""
    return spare if tensor is None else tensor


def bytes_of(mask: Tensor | None, spare: Tensor) -> Tensor:
    """A mask as kernels read it."""
    if mask is None:
        return spare
    return mask if mask.dtype == torch.uint8 else mask.contiguous().view(torch.uint8)


def rows_whole(tensor: Tensor) -> Tensor:
    """The tensor with its last axis contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def address_of(noise: Noise, spare: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Step, sample and examples, or a spare tensor in their place."""
    return given_or(noise.step, spare), given_or(noise.sample, spare), given_or(noise.examples, spare)


def read_by_both(query: Tensor, masks: Masks, noise: Noise, keyed: Tensor | None) -> tuple[Tensor, ...]:
    """What both the forward and the backward pass over products read: `key_visible` and what follows it."""
    return (
        bytes_of(masks.key_visible, query),
        bytes_of(masks.query_real, query),
        *address_of(noise, query),
        given_or(keyed, query),
        given_or(noise.drop_keys, query),
    )


class Tiles(NamedTuple):
    """The sizes of a program.

    Attributes:
        rows: queries of a tile.
        columns: keys of a tile.
        warps: of a program.
        stages: of its pipelines.
    """

    rows: int
    columns: int
    warps: int
    stages: int


# By pass, the sizes that were the fastest on an H200: for narrow heads in half precision, and for others.
_SMALL = {
    "forward": Tiles(64, 128, 4, 3),
    "forward, map": Tiles(64, 64, 4, 3),
    "queries": Tiles(64, 128, 4, 2),
    "keys": Tiles(64, 64, 4, 1),
    "map": Tiles(128, 128, 8, 2),
    "map, drawn": Tiles(64, 64, 4, 2),
}
_NARROW = {**_SMALL, "map": Tiles(64, 64, 4, 3)}  # up to 16 columns, as values of pixels have
_LARGE = {
    "forward": Tiles(64, 64, 4, 2),
    "forward, map": Tiles(64, 64, 4, 2),
    "queries": Tiles(64, 64, 8, 1),
    "keys": Tiles(64, 64, 8, 1),
    "map": Tiles(32, 128, 4, 2),
    "map, drawn": Tiles(32, 64, 4, 2),
}
# Of sequences that fit one tile of 32 × 32. Sums of fewer than 32 products are compiled wrongly where masks
# are read (Triton 3.6 and 3.7, `check_products` of tests/compile_kernels.py): the forward pass and that to
# queries sum over columns, the one to keys over rows. `benchmarks/tiles.py` tries other sizes.
_SHORT = dict.fromkeys(("forward", "queries", "keys"), Tiles(32, 32, 4, 2))


class Form(NamedTuple):
    """What in a call, apart from shapes, decides which kernel runs, and with which integers.

    Attributes:
        dtype: of queries, keys and values.
        precision: of float32 products.
        noise: family of the draw.
        sources: where step, sample and the examples' numbers come from.
        dropout: probability of dropping a weight.
        first_row: absolute position of the first query row.
        kl: family of the KL.
        scores: whether the posterior's mean is taken from raw scores.
        causal: whether the mask is causal.
        key_mask: whether there is a mask of keys.
        query_mask: whether there is a mask of queries.
        padding: what is done for padded queries, ZEROS, PLAINLY or NOTHING_ELSE.
    """

    dtype: torch.dtype
    precision: str
    noise: int
    sources: tuple[int, int, int]
    dropout: float
    first_row: int
    kl: int
    scores: bool
    causal: bool
    key_mask: bool
    query_mask: bool
    padding: int

    @classmethod
    def of(
        cls,
        dtype: torch.dtype,
        noise: Noise,
        divergence: Divergence,
        masks: Masks = NO_MASKS,
        padding: int = ZEROS,
    ) -> Form:
        """The form of a call."""
        return cls(
            dtype,
            precision_of(dtype),
            noise.family,
            noise.sources(),
            noise.dropout,
            noise.first_row,
            divergence.family,
            divergence.scores,
            masks.causal,
            masks.key_visible is not None,
            masks.query_real is not None,
            padding,
        )

    @property
    def draws(self) -> bool:
        """Whether a kernel needs random words."""
        return self.noise != NO_NOISE or self.dropout > 0.0

    def integers(self) -> tuple[int, int]:
        """Kernels' `drop_below` and `first_row`."""
        return signed(max(2, min(round(self.dropout * 2**32), 2**32 - 1))), self.first_row

    def address(self) -> dict[str, int]:
        """Kernels' constants for where the numbers of the noise's address come from."""
        return dict(zip(("STEP", "SAMPLE", "EXAMPLES"), self.sources, strict=True))

    def law(self) -> dict[str, Any]:
        """Kernels' constants for what is drawn, and for the KL."""
        return {
            "NOISE": self.noise,
            "KL": self.kl,
            "SCORES": self.scores,
            "DROPOUT": self.dropout > 0.0,
        }

    def masks(self) -> dict[str, int]:
        """Kernels' constants for which masks there are, and for what padded queries get."""
        return {
            "CAUSAL": self.causal,
            "KEY_MASK": self.key_mask,
            "QUERY_MASK": self.query_mask,
            "PADDING": self.padding,
        }

    def sizes(self, width: int, tiles: Tiles) -> dict[str, Any]:
        """Kernels' constants for the sizes of tiles, and for the precision of numbers."""
        return {
            "WIDTH": width,
            "BLOCK_WIDTH": power_of_two(width),
            "BLOCK_Q": tiles.rows,
            "BLOCK_K": tiles.columns,
            "PRECISION": self.precision,
            "FAST": self.dtype != torch.float32 and not INTERPRETED,
        }

    def tiles(self, name: str, width: int, rows: int, columns: int) -> Tiles:
        """The tiles of a pass over a map of so many rows and columns."""
        short = _SHORT.get(name)
        if short is not None and rows <= short.rows and columns <= short.columns:
            return short
        if width > 64 or self.dtype == torch.float32:
            return _LARGE[name]
        return (_SMALL if width > 16 else _NARROW)[name]
