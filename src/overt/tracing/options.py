"""What every tracing method may be asked: the shared arguments, as one frozen object and as a signature.

`Options` has the values and their defaults; `Arguments` has the same names for `**options: Unpack[…]`, which
editors and type checkers read. A method with arguments of its own extends both, side by side in its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, Union

import numpy as np
import torch

Heads: TypeAlias = Literal["mean", "each"] | Sequence[int]
Numbers: TypeAlias = Union[int, Sequence[int], torch.Tensor, "np.ndarray[Any, Any]", None]


class Arguments(TypedDict, total=False):
    """Shared by all methods; `queries` comes before them. What they mean is told by `Options`."""

    layers: Numbers
    heads: Heads
    residual: float | None
    normalize: bool
    receptive_field: bool


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a call asks of a method.

    Attributes:
        queries: which rows; all by default.
        layers: which layers; all by default. Negative numbers count from the end.
        heads: "mean" averages all heads; a list averages those, in every layer; "each" gives each head's own
            map on top of the layers below averaged (Abnar & Zuidema 2020, appendix A.1), and one more axis
            after the layer.
        residual: weight r of the residual connection, (1 − r)·A + r·I. None takes what the mixing implies:
            0.5, and 0 where a residual is in the maps already or a layer has none.
        normalize: make each row sum to one; of signed values, their sizes.
        receptive_field: divide by what the method gives for uniform attention under the same mask and
            residual, then make rows sum to one; for causal models, whose first tokens are seen by all.
    """

    queries: Numbers = None
    layers: Numbers = None
    heads: Heads = "mean"
    residual: float | None = None
    normalize: bool = False
    receptive_field: bool = False


def numbers(name: str, asked: object, count: int) -> list[int]:
    """Positions along an axis of `count`: None is all; one number or several; negative ones from the end."""
    if asked is None:
        return list(range(count))
    listed: Any = asked.tolist() if hasattr(asked, "tolist") else asked
    several = listed if isinstance(listed, Sequence) and not isinstance(listed, str) else [listed]
    out = []
    for one in several:
        try:
            value = int(one.__index__())
        except (AttributeError, TypeError):
            raise ValueError(f"{name} must be whole numbers, got {asked!r}") from None
        if isinstance(one, bool) or not -count <= value < count:
            raise ValueError(f"{name} must lie in 0 to {count - 1} (or −{count} to −1), got {one}")
        out.append(value % count)
    if not out:
        raise ValueError(f"{name} must name at least one of {count}, got {asked!r}")
    return out


def check_heads(heads: object, count: int) -> None:
    """Refuse anything but "mean", "each" or a list of head numbers."""
    if isinstance(heads, str) and heads in ("mean", "each"):
        return
    if isinstance(heads, str) or not isinstance(heads, Sequence) or not heads:
        raise ValueError(f'heads must be "mean", "each" or a list of head numbers, got {heads!r}')
    for head in heads:
        if isinstance(head, bool) or not isinstance(head, int) or (count and not -count <= head < count):
            raise ValueError(f"heads must be numbers from 0 to {count - 1}, got {head!r}")
