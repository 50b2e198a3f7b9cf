"""Products of weights with values: which axis is which."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from overt.tracing.sights import Refusal


@dataclass(frozen=True)
class Letters:
    """The axes of a product of weights with values, a letter for each.

    Attributes:
        weights: axes of the weights, as given.
        values: axes of the values, as given.
        rows: axes of the weights, in order: those that values share or lack, then query, then key.
        columns: axes of the values in the same order, then key, then dim.
    """

    weights: str
    values: str
    rows: str
    columns: str


def letters_of(equation: str | None, factors: list[Tensor], place: int) -> Letters | None:
    """Which axis is which; None if there is no sum over keys for each query."""
    if min(factor.dim() for factor in factors) < 2:
        return None
    if equation is None:
        lead = "abcefghi"
        batches = [lead[8 - (factor.dim() - 2) : 8] for factor in factors]
        ends = ("qk", "kd") if place == 0 else ("dk", "kq")
        first, second = (batch + end for batch, end in zip(batches, ends, strict=True))
        out = max(batches, key=len) + ("qd" if place == 0 else "dq")
    else:
        compact = equation.replace(" ", "")
        if "->" not in compact or compact.count(",") != 1:
            return None
        inputs, out = compact.split("->")
        first, second = inputs.split(",")
        counts = [
            factor.dim() - len(each.replace("...", ""))
            for factor, each in zip(factors, (first, second), strict=True)
        ]
        first, second, out = (
            each.replace("...", "STUVWXYZ"[8 - count :])
            for each, count in zip((first, second, out), (*counts, max(counts)), strict=True)
        )
    weights, values = (first, second) if place == 0 else (second, first)
    keys = [letter for letter in weights if letter in values and letter not in out]
    dims = [letter for letter in values if letter not in weights]
    free = [letter for letter in weights if letter not in values and letter in out]
    if not keys or not free:
        return None
    if len(keys) != 1 or len(dims) != 1 or len({*weights}) != len(weights):
        shapes = " and ".join(str(tuple(factor.shape)) for factor in factors)
        raise Refusal(f"its softmax is multiplied with values in a way that is not known ({shapes})")
    query = free[-1]
    others = "".join(letter for letter in weights if letter not in (query, keys[0]))
    columns = "".join(letter for letter in others if letter in values)
    return Letters(weights, values, others + query + keys[0], columns + keys[0] + dims[0])


def values_of(values: Tensor, letters: Letters, whole: Tensor) -> Tensor:
    """Values as (batch, head or 1, key, dim)."""
    ordered = values.permute([letters.values.index(letter) for letter in letters.columns])
    lead, keys = ordered.shape[:-2], ordered.shape[-2:]
    batch, heads = whole.shape[:2]
    if len(lead) == 1 and lead[0] == batch * heads:
        return ordered.reshape(batch, heads, *keys)
    if len(lead) == 1:
        return ordered.unsqueeze(1)
    return ordered if lead else ordered[None, None]


def values_back(value: Tensor, like: Tensor, letters: Letters) -> Tensor:
    """(batch, head or 1, key, dim) in the layout of the values that they came from."""
    order = [letters.values.index(letter) for letter in letters.columns]
    shape = [like.shape[axis] for axis in order]
    return value.reshape(shape).permute([order.index(axis) for axis in range(len(order))])


def shown_in(shown: Tensor | None, order: list[int], whole: Tensor, changed: bool) -> Tensor | None:
    """Which cells of a map are seen, (batch, query, key); None for all.

    Args:
        shown: which cells the softmax saw, in the layout of the weights; None for all.
        order: of the axes of the weights in the map.
        whole: the map.
        changed: whether weights may have been set to zero after the softmax.
    """
    if shown is not None and (shown.dim() != len(order) or shown.numel() != whole.numel()):
        shown, changed = None, True
    seen = None if shown is None else shown.permute(order).reshape(whole.shape)
    if changed:
        left = whole.detach() != 0
        seen = left if seen is None else seen & left
    if seen is None or bool(seen.all()):
        return None
    return seen.any(dim=1).cpu()
