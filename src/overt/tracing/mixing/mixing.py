"""What the maps of a trace may hold, and the registry of such graphs.

A mixing is one file: a class that makes a map of each attention that runs, and `register_mixing`. An instance
watches one forward pass. Tables, pages, figures, the judge and the command line know mixings by the registry
alone.
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
    """A map per attention, and what holds of such maps. Subclasses override `map`, or `maps_after`.

    Attributes:
        name: by which it is asked for.
        title: of its weights, for a reader; a method's name follows it.
        cost: of a trace, in a line.
        values: whether it reads values and output projections, which are watched then.
        gradients: whether it reads gradients of a score; the pass is differentiable then.
        edits: whether it runs attentions again with other values.
        passes: passes of the model for each token, beside the one that is traced.
        unit: whether rows have to be made to sum to one before a residual joins; None leaves it to what the
            mechanisms say of their weights.
        signed: whether weights may be negative; None leaves it to the mechanisms.
        joint: whether self-attention and cross-attention of a layer share one row that sums to one.
        residual: weight of the residual connection that methods take by default.
        heads: whether single heads have maps.
        averages: whether the map without single heads is the mean of theirs.
        parts: whether the parts that mechanisms show are parts of its maps.
        samples: whether posterior samples have maps.
        keep: whether single heads are to be kept: as asked for.
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
        """A method's values over this mixing, for a reader."""
        return cls.title if method == "raw" else f"{cls.title} {method}"

    def map(self, call: CapturedAttention) -> Tensor | None:
        """An attention's map, (batch, [head,] query, key); None if it comes later."""
        del call
        return None

    @contextmanager
    def around(self, model: nn.Module, watch: Watch) -> Iterator[None]:
        """Whatever else has to be in place while the model runs; a context manager."""
        del model, watch
        yield

    def maps_after(self, score: Callable[[], Tensor]) -> Mapping[int, Tensor]:
        """Maps that come after the pass, by `call.number`; all is still in place as while the model ran.

        Args:
            score: gives the logit that is explained, summed over examples.
        """
        del score
        return {}

    def why_no_map(self, call: CapturedAttention) -> str:
        """Why an attention has no map, after all."""
        del call
        return "map returned None for it, and maps_after has none"

    def reduced(self, cells: Tensor) -> Tensor:
        """(batch, head, query, key), or its mean over heads where single heads are not kept."""
        return cells if self.keep else cells.mean(dim=1)


K = TypeVar("K", bound=type[Mixing])
_registered: dict[str, type[Mixing]] = {}


def register_mixing(kind: K) -> K:
    """Make a mixing known: to `overt.trace`, tables, pages, figures, the judge and the command line.

    A class of the same qualified name as one before, as when a notebook's cell runs again, takes its place.
    """
    if not (isinstance(kind, type) and issubclass(kind, Mixing)):
        raise TypeError(f"a mixing must be a subclass of overt.tracing.Mixing, got {kind!r}")
    for name in ("name", "title"):
        if not isinstance(getattr(kind, name, None), str):
            raise TypeError(f"{kind.__name__} needs a {name}, a text")
    if not re.fullmatch(r"[\w-]+", kind.name):
        raise ValueError(f"name must be of letters, digits, _ and -, got {kind.name!r}")
    known = _registered.get(kind.name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(f"there is a mixing {kind.name!r} already: choose another name")
    _registered[kind.name] = kind
    return kind


def mixing_of(name: str, argument: str = "mixing") -> type[Mixing]:
    """The mixing of a name; an error that lists those there are."""
    _check.one_of(argument, name, tuple(_registered))
    return _registered[name]


def mixings() -> dict[str, type[Mixing]]:
    """The mixings that are known, by name."""
    return dict(_registered)
