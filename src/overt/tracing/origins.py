"""What tensors were made from, as a model makes them: arguments of a layer, projections, a softmax."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "einsum", "baddbmm", "linear", "addmm", "conv1d"}
PRODUCTS |= {"conv2d", "conv3d", "mm"}
MIXES = {"matmul", "__matmul__", "__rmatmul__", "bmm", "einsum"}
DROPOUTS = {"dropout", "dropout_", "feature_dropout", "alpha_dropout"}
RESHAPES = {"view", "reshape", "flatten", "unflatten", "_unsafe_view"}
TURNS = {"transpose", "permute", "swapaxes", "movedim", "t", "__get__"}
LAYOUTS = RESHAPES | TURNS | {"unsqueeze", "squeeze", "expand", "contiguous", "__getitem__"}
# What leaves the weights of a softmax weights: a change of layout or of precision, …
MOVES = LAYOUTS | {
    "clone", "detach", "to", "type", "type_as", "float", "double", "half", "bfloat16", "dropout", "dropout_",
}  # fmt: skip
# … and what makes other weights of them.
CHANGES = {
    "nan_to_num", "masked_fill", "masked_fill_", "mul", "mul_", "__mul__", "__rmul__", "__imul__", "div",
    "__truediv__", "add", "__add__", "__radd__", "sub", "__sub__", "__getitem__", "where",
}  # fmt: skip
NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True, eq=False)
class Softmax:
    """A softmax that may become the weights of an attention.

    Attributes:
        shown: boolean, in the shape of the scores; None for all.
        sides: what queries and keys are projections of, as in `Origin`.
        last: whether it is still over the last axis.
        changed: whether its result was changed, by more than a change of layout.
        dropped: how much of its result was dropped out.
    """

    shown: Tensor | None
    sides: tuple[frozenset[int], frozenset[int]] | None
    last: bool
    changed: bool = False
    dropped: float = 0.0


@dataclass(frozen=True, eq=False)
class Origin:
    """What a tensor was made from.

    Attributes:
        states: arguments of the layer (positive) and earlier attentions (their tokens, negative).
        projected: those arguments that it is a linear projection of.
        sides: of products of two projections: what each is a projection of.
        reshaped: its shape before and after it was last reshaped.
        softmax: the softmax that it is the result of.
    """

    states: frozenset[int] = NOTHING
    projected: frozenset[int] = NOTHING
    sides: tuple[frozenset[int], frozenset[int]] | None = None
    reshaped: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    softmax: Softmax | None = None


UNKNOWN = Origin()
Origins = dict[int, tuple["weakref.ref[Tensor]", Origin]]


def tensors(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, tuple | list):
        for entry in value:
            yield from tensors(entry, depth - 1)
    elif depth and isinstance(value, dict):
        for entry in value.values():
            yield from tensors(entry, depth - 1)


def keep(origins: Origins, tensor: Tensor, origin: Origin) -> None:
    """Note a tensor's origin, for as long as the tensor lives."""
    key = id(tensor)
    origins[key] = weakref.ref(tensor, lambda _: origins.pop(key, None)), origin


def earlier(states: frozenset[int]) -> frozenset[int]:
    """Tokens of attentions among what a tensor was made from."""
    return frozenset(state for state in states if state < 0)


def side_of(origin: Origin) -> frozenset[int]:
    """The arguments that queries or keys are projections of, or that they are made from."""
    return origin.projected or frozenset(state for state in origin.states if state > 0)


def dropped_by(args: Any, kwargs: Any) -> float:
    """How much a call of dropout drops."""
    p, train = (*args[1:3], *(0.5, True)[len(args) - 1 :])[:2]
    p, train = kwargs.get("p", p), kwargs.get("training", kwargs.get("train", train))
    return float(p) if train else 0.0


def follow(name: str, args: Any, inputs: list[Origin], outs: list[Tensor]) -> Iterator[tuple[Tensor, Origin]]:
    """What the results of a call were made from, by what its arguments were."""
    known = [origin for origin in inputs if origin is not UNKNOWN]
    if not known:
        return
    states = frozenset().union(*(origin.states for origin in known))
    projected = frozenset().union(*(origin.projected for origin in known))
    sides = next((origin.sides for origin in known if origin.sides is not None), None)
    if name in PRODUCTS:
        sources = [origin for origin in known if origin.states]
        if len(sources) == 1:  # by a parameter
            projected = frozenset(state for state in states if state > 0)
        elif len(sources) > 1 and sides is None:
            sides = side_of(sources[-2]), side_of(sources[-1])
    reshaped = next((origin.reshaped for origin in known if origin.reshaped is not None), None)
    softmax = next((origin.softmax for origin in known if origin.softmax is not None), None)
    if softmax is not None:
        last, changed = softmax.last and name not in TURNS, softmax.changed or name in CHANGES
        softmax = replace(softmax, last=last, changed=changed) if name in MOVES | CHANGES else None
    for out in outs:
        if name in RESHAPES and args and isinstance(args[0], Tensor):
            reshaped = tuple(args[0].shape), tuple(out.shape)
        yield out, Origin(states, projected, sides, reshaped, softmax)
