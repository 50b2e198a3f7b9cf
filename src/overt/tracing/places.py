"""Whether tokens stay at their places, and apart, but for attention: a model is run again on a few of them.

In these runs all values are zero, so that attention passes nothing on. A model whose input changes at one
token then has other values at that token alone, at every attention. Where other tokens change too, something
else mixes them, or they have moved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overt.tracing.running import FEW, kept_as_it_is

if TYPE_CHECKING:
    from overt.tracing.capture import Watch

NO_TOKENS = re.compile(r"mask|pos|type|seg|len|label|target|time")  # names of arguments that are no tokens
SHARE = 1e-2  # of the largest change, below which a change is rounding, or a scale that all tokens have
# Their statistics are those of all tokens, and are not counted as mixing them.
OF_ALL_TOKENS = (nn.GroupNorm, nn.modules.instancenorm._InstanceNorm)
Places = frozenset[tuple[int, int]]  # (row of the batch, token)


@dataclass(frozen=True, eq=False)
class Change:
    """What a change of the input at one token changes.

    Attributes:
        name: the argument.
        shape: of the argument.
        token: which one of the first example's was changed; of states, it is a vector.
        exact: whether the argument holds ids, and the second axis is that of tokens.
        paths: of all attentions that ran, in order.
        seen: for each of them, which values were changed; all in row 0 where their batches differ in size.
    """

    name: str
    shape: torch.Size
    token: int
    exact: bool
    paths: list[str]
    seen: list[Places]


def changes(model: nn.Module, arguments: dict[str, Any], watch: Watch) -> list[Change]:
    """What changes of single tokens change; none where a model cannot be run on a few tokens.

    Args:
        model: the model, whose attention is watched.
        arguments: those of its forward.
        watch: edits values.
    """
    if any(isinstance(m, OF_ALL_TOKENS) or type(m).__module__.startswith("overt.") for m in model.modules()):
        return []
    found = []
    try:
        few = _few(arguments)
        with torch.no_grad(), kept_as_it_is(model):
            plain = _values(model, few, watch)
            for name, token, changed in _changed(few):
                values = _values(model, {**few, name: changed}, watch)
                if [path for path, _ in values] != [path for path, _ in plain]:
                    return []
                given: Tensor = arguments[name]
                seen = [_differing(a, b) for (_, a), (_, b) in zip(plain, values, strict=True)]
                if len({len(value) for _, value in plain}) > 1:
                    seen = [frozenset((0, token) for _, token in places) for places in seen]
                exact = not given.is_floating_point() and given.shape[0] != given.shape[1]
                found.append(Change(name, given.shape, token, exact, [path for path, _ in plain], seen))
    except Exception:  # whatever a model raises that takes no fewer tokens
        return []
    return found


def _few(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with few tokens."""

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        axes = [1] if value.is_floating_point() and value.dim() < 4 else range(1, value.dim())
        for axis in axes:
            if value.shape[axis] in lengths:
                value = value.narrow(axis, 0, FEW)
        return value.clone()

    tokens = [value for name, value in arguments.items() if _holds_tokens(name, value)]
    lengths = {value.shape[1] for value in tokens if value.shape[1] > FEW}
    return {name: cut(value) for name, value in arguments.items()}


def _holds_tokens(name: str, value: Any) -> bool:
    if not isinstance(value, Tensor) or NO_TOKENS.search(name.lower()) or value.dtype == torch.bool:
        return False
    return value.dim() == (3 if value.is_floating_point() else 2) and min(value.shape) > 0


def _changed(arguments: dict[str, Any]) -> Iterator[tuple[str, int, Tensor]]:
    """Arguments that hold tokens, with one token of the first example changed."""
    for name, value in arguments.items():
        if not _holds_tokens(name, value) or value.shape[1] < 2:
            continue
        for token in {1, max(1, value.shape[1] - 2)}:
            other = value.clone()
            if value.is_floating_point():
                other[0, token] = 1 - other[0, token]
            else:
                # An id from elsewhere in the example; both are other than what may be padding.
                own, padding = int(value[0, token]), (0, int(value[0, -1]))
                ids = [int(each) for each in value[0] if int(each) != own and int(each) not in padding]
                if own in padding or not ids:
                    continue
                other[0, token] = ids[0]
            yield name, token, other


def _values(model: nn.Module, arguments: dict[str, Any], watch: Watch) -> list[tuple[str, Tensor]]:
    """Values of each attention that runs, in order, where all of them pass nothing on."""
    found: list[tuple[str, Tensor]] = []
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}

    def note(path: str, value: Tensor) -> Tensor:
        found.append((path, value.detach().clone()))
        return torch.zeros_like(value)

    before, watch.edit = watch.edit, note
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            model(**arguments)
    finally:
        watch.edit = before
    return found


def _differing(left: Tensor, right: Tensor) -> Places:
    """Rows and tokens at which values, (batch, head, token, dim), differ."""
    apart = (left.double() - right.double()).nan_to_num().abs().amax(dim=(1, 3))
    largest = float(apart.max()) if apart.numel() else 0.0
    if largest <= 1e-5 * float(left.double().nan_to_num().abs().max()):
        return frozenset()
    return frozenset((int(row), int(token)) for row, token in (apart > SHARE * largest).nonzero())
