"""Which axes of a tensor are those of a model's arguments, followed as layouts change.

Every axis is a list of factors, the outer one first: an axis of batch × head has two. A factor has a label:
the axis of an argument that it is, or that it is nothing of the kind (heads, widths), or a part of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from overt.tracing.origins import RESHAPES, TURNS, tensors

PLAIN, PART = -1, -2  # of no argument; a piece of an argument's axis, such as a window
STEP = 16  # label = number of the argument · STEP + axis
Axis = tuple[tuple[int, int], ...]  # (label, size), without those of size 1
Axes = tuple[Axis, ...]

ORDERED = RESHAPES | {"unsqueeze", "squeeze", "view_as", "reshape_as", "contiguous", "clone"}
TURNED = TURNS | {"swapdims", "moveaxis", "adjoint"}
MATRICES = {"matmul": (0, 1), "__matmul__": (0, 1), "__rmatmul__": (1, 0), "bmm": (0, 1), "mm": (0, 1)}
MATRICES |= {"baddbmm": (1, 2), "addmm": (1, 2)}


def labels_of(axis: Axis) -> set[int]:
    """Axes of arguments that a tensor's axis is made of, or parts of them."""
    return {label for label, _ in axis if label != PLAIN}


def is_first(label: int) -> bool:
    """Whether it is the first axis of an argument."""
    return label >= 0 and label % STEP == 0


def given(arguments: Any) -> Iterator[tuple[Tensor, Axes]]:
    """Tensors that a model is called with, and their axes; first axes of one size are the same."""
    found = [tensor for tensor in tensors(arguments) if tensor.dim()]
    firsts: dict[int, int] = {}
    for number, tensor in enumerate(found):
        labels = [number * STEP + axis for axis in range(tensor.dim())]
        labels[0] = firsts.setdefault(tensor.shape[0], labels[0])
        if tensor.is_floating_point() and tensor.dim() > 1:
            colours = [axis for axis in range(1, tensor.dim() - 2) if tensor.shape[axis] in (1, 3, 4)]
            labels[colours[0] if colours else -1] = PLAIN  # the width of states
        yield tensor, tuple(_axis(label, size) for label, size in zip(labels, tensor.shape, strict=True))


def follow_axes(
    func: Any, name: str, args: Any, kwargs: Any, known: dict[int, Axes], outs: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Axes]]:
    """The axes of a call's results, by those of its arguments, which are known by their id."""
    inputs = list(tensors((args, kwargs)))
    if not any(id(tensor) in known for tensor in inputs):
        return
    for out in outs:
        axes = _after(func, name, args, kwargs, inputs, known, out)
        if axes is not None and len(axes) == out.dim():
            yield out, axes


def _after(
    func: Any, name: str, args: Any, kwargs: Any, inputs: list[Tensor], known: dict[int, Axes], out: Tensor
) -> Axes | None:
    shape = tuple(out.shape)
    first = known.get(id(inputs[0]))
    if name in TURNED:
        return None if first is None else _turned(func, args, kwargs, first)
    if name in ORDERED:
        return None if first is None else _reshaped(first, shape)
    if name == "__getitem__":
        return None if first is None else _indexed(first, args[1], shape)
    if name in ("unbind", "select"):
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        return None if first is None else _without(first, dim)
    if name == "linear":
        return None if first is None else (*first[:-1], _axis(PLAIN, shape[-1]))
    if name == "embedding":
        ids = next((tensor for tensor in inputs if not tensor.is_floating_point()), inputs[0])
        return (*_of(ids, known), _axis(PLAIN, shape[-1]))
    if name in MATRICES and min(inputs[place].dim() for place in MATRICES[name]) > 1:
        left, right = (_of(inputs[place], known) for place in MATRICES[name])
        lead = combined([left[:-2], right[:-2]], shape[:-2])
        return None if lead is None else (*lead, left[-2], right[-1])
    if name in MATRICES:
        return None
    if name.startswith("conv") and first is not None and len(first) == inputs[1].dim():
        spatial = [_resized(axis, size) for axis, size in zip(first[2:], shape[2:], strict=True)]
        return (first[0], _axis(PLAIN, shape[1]), *spatial)
    if name == "einsum":
        equation = next((arg for arg in args if isinstance(arg, str)), None)
        return None if equation is None else _summed(equation, inputs, known)
    if name == "stack":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % len(shape)
        each = combined([_of(tensor, known) for tensor in inputs], (*shape[:dim], *shape[dim + 1 :]))
        return None if each is None else (*each[:dim], _axis(PLAIN, shape[dim]), *each[dim:])
    if name == "view_as_complex":
        return None if first is None else first[:-1]
    if name == "view_as_real":
        return None if first is None else (*first, _axis(PLAIN, 2))
    if name == "scaled_dot_product_attention":
        return None if first is None else (*first[:-1], _axis(PLAIN, shape[-1]))
    if name == "multi_head_attention_forward":
        return first if shape == tuple(inputs[0].shape) else None
    if not name and first is not None and len(first) == len(shape) == 4:
        batch, heads, tokens, _ = (_size(axis) for axis in first)
        if shape[:3] == (batch, tokens, heads):  # attention, which returns heads after tokens
            back = first[0], first[2], first[1], _axis(PLAIN, shape[3])
            return None if heads == tokens else back
    inside = [known[id(tensor)] for tensor in inputs if id(tensor) in known]
    if not name and first is not None and len(first) == len(shape) - 1:  # a module that embeds tokens
        inside.append((*first, _axis(PLAIN, shape[-1])))
    return combined(inside, shape)


def _axis(label: int, size: int) -> Axis:
    return () if size == 1 else ((label, size),)


def _of(tensor: Tensor, known: dict[int, Axes]) -> Axes:
    return known.get(id(tensor)) or plain(tensor)


def plain(tensor: Tensor) -> Axes:
    """Axes of a tensor about which nothing is known."""
    return tuple(_axis(PLAIN, size) for size in tensor.shape)


def _size(axis: Axis) -> int:
    return math.prod(size for _, size in axis)


def _resized(axis: Axis, size: int) -> Axis:
    """An axis that became longer or shorter."""
    if _size(axis) == size:
        return axis
    return _axis(next((label for label, _ in axis if label != PLAIN), PLAIN), size)


def _reshaped(axes: Axes, shape: Sequence[int]) -> Axes | None:
    """Axes after a change of shape; None where they cannot be told."""
    factors: list[tuple[int, int]] = []
    for label, size in (factor for axis in axes for factor in axis):
        if factors and label == factors[-1][0] == PLAIN:
            factors[-1] = PLAIN, factors[-1][1] * size
        else:
            factors.append((label, size))
    factors.reverse()
    found: list[Axis] = []
    for size in shape:
        axis: list[tuple[int, int]] = []
        while size > 1:
            if not factors:
                return None
            label, has = factors.pop()
            if max(size, has) % min(size, has):
                return None
            if has > size:
                label = PLAIN if label == PLAIN else PART
                factors.append((label, has // size))
                has = size
            axis.append((label, has))
            size //= has
        found.append(tuple(axis))
    return tuple(found)


def _turned(func: Any, args: Any, kwargs: Any, axes: Axes) -> Axes | None:
    """Axes in another order, which is that of a tensor whose axes all have different sizes."""
    shape = range(2, 2 + len(axes))
    like = torch.empty(*shape, device="meta")
    try:
        turned = func(like, *args[1:], **kwargs)
    except (TypeError, RuntimeError, IndexError):  # some other attribute
        return None
    if not isinstance(turned, Tensor) or sorted(turned.shape) != [*shape]:
        return None
    return tuple(axes[size - 2] for size in turned.shape)


def _indexed(axes: Axes, index: Any, shape: Sequence[int]) -> Axes | None:
    """Axes of a part of a tensor; None where it is chosen by more than numbers and slices."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(
        isinstance(entry, bool) or not isinstance(entry, int | slice | None | type(...)) for entry in entries
    ):
        return None
    used = sum(entry is not None and entry is not ... for entry in entries)
    if ... in entries:
        place = entries.index(...)
        entries[place : place + 1] = [slice(None)] * (len(axes) - used)
    entries += [slice(None)] * (len(axes) - sum(entry is not None for entry in entries))
    left, found = list(axes), list[Axis]()
    for entry in entries:
        axis = () if entry is None else left.pop(0)
        if not isinstance(entry, int):
            found.append(_resized(axis, shape[len(found)]) if len(found) < len(shape) else axis)
    return tuple(found)


def _without(axes: Axes, dim: Any) -> Axes | None:
    if not isinstance(dim, int):
        return None
    dim %= len(axes)
    return (*axes[:dim], *axes[dim + 1 :])


def combined(inputs: Sequence[Axes], shape: Sequence[int]) -> Axes | None:
    """Axes of what is made from several tensors cell by cell, or of a longer or shorter one."""
    if shape and max((len(axes) for axes in inputs), default=0) != len(shape):
        return None
    found: list[Axis] = []
    for place, size in enumerate(reversed(shape), start=1):
        axes = [each[-place] for each in inputs if len(each) >= place]
        labelled = [axis for axis in axes if labels_of(axis)]
        fitting = [axis for axis in (*labelled, *axes) if _size(axis) == size]
        found.append(fitting[0] if fitting else _resized((labelled or axes)[0], size))
    return tuple(reversed(found))


def _summed(equation: str, inputs: list[Tensor], known: dict[int, Axes]) -> Axes | None:
    """Axes of the result of an einsum."""
    compact = equation.replace(" ", "")
    if "->" not in compact:
        return None
    terms, out = compact.split("->")
    letters: dict[str, Axis] = {}
    most = 0
    for term, tensor in zip(terms.split(","), inputs, strict=True):
        count = tensor.dim() - len(term.replace("...", ""))
        most = max(most, count)
        for letter, axis in zip(
            term.replace("...", "STUVWXYZ"[8 - count :]), _of(tensor, known), strict=True
        ):
            if not labels_of(letters.get(letter, ())):
                letters[letter] = axis
    return tuple(letters[letter] for letter in out.replace("...", "STUVWXYZ"[8 - most :]))
