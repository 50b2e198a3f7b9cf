"""The arguments that all tracing methods share, as a frozen object and as a signature.

`Options` has the values and their defaults; `Arguments` has the same names for `**options: Unpack[…]`, which
editors and type checkers read. A method with additional arguments extends both in its own file.
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
    """Keyword arguments shared by all methods (`queries` is positional); `Options` documents them."""

    layers: Numbers
    heads: Heads
    residual: float | None
    normalize: bool
    receptive_field: bool


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a method.

    Attributes:
        queries: which rows; all by default.
        layers: which layers; all by default. Negative numbers count from the end.
        heads: "mean" averages all heads; a list averages those heads, in every layer; "each" puts each head's
            own map on top of the head averages of the layers below (Abnar & Zuidema 2020, appendix A.1), and
            adds an axis after the layer.
        residual: weight r of the residual connection, (1 − r)·A + r·I. None takes the mixing's default: 0.5,
            or 0 where the maps include the residual already or a layer has none.
        normalize: make each row sum to one; for signed values, the sum of absolute values.
        receptive_field: divide by the method's values for uniform attention under the same mask and residual,
            then make rows sum to one; meant for causal models, where all queries see the first tokens.
    """

    queries: Numbers = None
    layers: Numbers = None
    heads: Heads = "mean"
    residual: float | None = None
    normalize: bool = False
    receptive_field: bool = False


def numbers(name: str, selection: object, count: int) -> list[int]:
    """Positions along an axis of `count`: None for all, one number or several; negative ones count back."""
    if selection is None:
        return list(range(count))
    listed: Any = selection.tolist() if hasattr(selection, "tolist") else selection
    entries = listed if isinstance(listed, Sequence) and not isinstance(listed, str) else [listed]
    out = []
    for entry in entries:
        try:
            index = int(entry.__index__())
        except (AttributeError, TypeError):
            raise ValueError(f"{name} must be whole numbers, got {selection!r}") from None
        if isinstance(entry, bool) or not -count <= index < count:
            raise ValueError(f"{name} must lie in 0 to {count - 1} (or −{count} to −1), got {entry}")
        out.append(index % count)
    if not out:
        raise ValueError(f"{name} must name at least one of {count}, got {selection!r}")
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


CELL = 4  # bytes of a cell of a map, which is float32


def over_bytes(what: str, count: int, most: int | None, remedy: str) -> str | None:
    """Why there is no room for this many bytes; None if there is. `most` None allows any."""
    if most is None or count <= most:
        return None
    return f"{what} would take {count:,} bytes, over memory={most:,}: {remedy}"


def check_bytes(what: str, count: int, most: int | None, remedy: str) -> None:
    """Refuse what takes more bytes than there may be; `most` None allows any."""
    if (reason := over_bytes(what, count, most, remedy)) is not None:
        raise ValueError(reason)
