"""What the maps of a trace may hold, and the registry of mixings.

A mixing is one file: a class that makes a map of each attention that runs, and `register_mixing`. An instance
watches one forward pass. Tables, pages, figures, the judge and the command line find mixings only through the
registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from overt import _check
from overt.tracing.capture import CapturedAttention, Watch


class Mixing:
    """Makes a map per attention, and declares the properties of these maps. Override `map` or `maps_after`.

    Attributes:
        name: identifies the mixing, as in `trace(…, mixing=name)`.
        title: readable name of its weights; a method's name follows it.
        cost: cost of a trace, in one line.
        values: whether it reads values and output projections, which are then captured.
        gradients: whether it reads gradients of a score; the pass is then differentiable.
        edits: whether it runs attentions again with other values.
        passes: passes of the model for each token, in addition to the traced one.
        unit: whether rows must be made to sum to one before a residual is added; None if that depends on
            what the mechanisms declare for their weights.
        signed: whether weights may be negative; None if that depends on the mechanisms.
        joint: whether self-attention and cross-attention of a layer share one row that sums to one.
        residual: default weight of the residual connection for methods.
        heads: whether single heads have maps.
        averages: whether the map without single heads is the mean of theirs.
        parts: whether the parts that mechanisms expose are parts of its maps.
        samples: whether posterior samples have maps.
        keep: whether to keep single heads, as requested.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    cost: ClassVar[str] = "one pass of the model"
    values: ClassVar[bool] = False
    gradients: ClassVar[bool] = False
    edits: ClassVar[bool] = False
    passes: ClassVar[int] = 0
    unit: ClassVar[bool | None] = None
    signed: ClassVar[bool | None] = None
    joint: ClassVar[bool] = False
    residual: ClassVar[float] = 0.5
    heads: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    parts: ClassVar[bool] = False
    samples: ClassVar[bool] = True

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep

    @classmethod
    def titled(cls, method: str) -> str:
        """Readable name of a method's values over this mixing."""
        return cls.title if method == "raw" else f"{cls.title} {method}"

    def map(self, call: CapturedAttention) -> Tensor | None:
        """An attention's map, (batch, [head,] query, key); None if `maps_after` returns it."""
        del call
        return None

    @contextmanager
    def around(self, model: nn.Module, watch: Watch) -> Iterator[None]:
        """A context manager for whatever else must be in place while the model runs."""
        del model, watch
        yield

    def maps_after(self, score: Callable[[], Tensor]) -> Mapping[int, Tensor]:
        """Maps computed after the pass, by `call.number`; everything is in place as while the model ran.

        Args:
            score: returns the logit to explain, summed over examples.
        """
        del score
        return {}

    def why_no_map(self, call: CapturedAttention) -> str:
        """Why an attention has no map, for the error."""
        del call
        return "map returned None for it, and maps_after has none"

    def reduced(self, cells: Tensor) -> Tensor:
        """(batch, head, query, key), or its mean over heads where single heads are not kept."""
        return cells if self.keep else cells.mean(dim=1)


K = TypeVar("K", bound=type[Mixing])
_registered: dict[str, type[Mixing]] = {}


def register_mixing(kind: K) -> K:
    """Register a mixing for `overt.trace`, tables, pages, figures, the judge and the command line.

    A class replaces an earlier one of the same qualified name, as when a notebook cell runs again.
    """
    if not (isinstance(kind, type) and issubclass(kind, Mixing)):
        raise TypeError(f"a mixing must be a subclass of overt.tracing.Mixing, got {kind!r}")
    for name in ("name", "title"):
        if not isinstance(getattr(kind, name, None), str):
            raise TypeError(f"{kind.__name__} needs a {name} of type str")
    if not re.fullmatch(r"[\w-]+", kind.name):
        raise ValueError(f"name must consist of letters, digits, _ and -, got {kind.name!r}")
    known = _registered.get(kind.name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"there is a mixing {kind.name!r} already: choose another name")
    _registered[kind.name] = kind
    return kind


def mixing_of(name: str, argument: str = "mixing") -> type[Mixing]:
    """The mixing of this name; the error for an unknown name lists the known ones."""
    _check.one_of(argument, name, tuple(_registered))
    return _registered[name]


def mixings() -> dict[str, type[Mixing]]:
    """The registered mixings, by name."""
    return dict(_registered)
