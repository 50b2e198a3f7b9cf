"""What is asked of a figure: one example of a trace, its query, layers, heads and tokens, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overt import _check
from overt.tracing.methods.method import method_of, methods
from overt.tracing.options import numbers
from overt.tracing.result import Spread, Trace
from overt.view.plots.style import WIDTHS
from overt.view.plots.words import word

VIEWS_OF_METHODS = ("strip", "compare")  # which show several methods
VIEWS_OF_MAPS = ("heads", "evolution")  # which show no method

Number = int | Sequence[int] | None


@dataclass(frozen=True)
class PlotRequest:
    """One example, and what of it is to be seen; the numbers are checked and not negative."""

    trace: Trace
    query: int
    named: bool  # whether the caller named the query
    layer: Number
    head: Number
    method: str | None
    methods: Sequence[str]
    shown: list[int]  # along the token axis
    importances: bool
    target: Any
    unk: int | None
    columns: int
    arguments: dict[str, Any]  # of methods that read maps

    @property
    def first(self) -> int:
        """The token that is query 0."""
        return int(self.trace.mask.shape[1] - self.trace.maps[0].shape[-2])

    @property
    def place(self) -> int:
        """The query among the tokens."""
        return self.first + self.query

    @property
    def strong(self) -> int | None:
        """The query among the shown tokens, if it is one of them."""
        return self.shown.index(self.place) if self.place in self.shown else None

    @property
    def queries(self) -> list[int]:
        """The shown tokens that are queries, as queries."""
        found = [token - self.first for token in self.shown if token >= self.first]
        if not found:
            raise ValueError(f"tokens must hold some of the queries, which begin at {self.first}")
        return found

    def words_of(self, tokens: Sequence[int]) -> list[str]:
        """Tokens in words."""
        return [word(self.trace.tokens[0][token]) for token in tokens]

    @property
    def words(self) -> list[str]:
        """The tokens that are shown."""
        return self.words_of(self.shown)

    @property
    def query_words(self) -> list[str]:
        """The shown tokens that are queries."""
        return self.words_of([self.first + query for query in self.queries])

    @property
    def name(self) -> str:
        """The query's token."""
        return self.words_of([self.place])[0]

    @property
    def weights(self) -> str:
        """What the maps hold, in words."""
        return self.trace.mixing_kind.title

    def title(self, method: str) -> str:
        """What a method's values are, in words."""
        return self.trace.mixing_kind.titled(method_of(method).title)

    @property
    def layers(self) -> list[int]:
        """The layers that are asked for; all by default."""
        return numbers("layer", self.layer, len(self.trace.maps))

    def one_layer(self, view: str) -> int:
        """The one layer of a view that has no more; the last by default."""
        found = [len(self.trace.maps) - 1] if self.layer is None else self.layers
        if len(found) != 1:
            raise ValueError(f"layer must be one number for view={view!r}, got {self.layer!r}")
        return found[0]

    def heads(self, maps: Sequence[Tensor | None]) -> list[int]:
        """The heads that are asked for; all by default."""
        kept = next(cells for cells in maps if cells is not None)
        if kept.dim() != 4:
            raise ValueError(
                f"head={self.head!r} needs the maps of single heads, which were not kept: "
                "overt.trace(…, heads=True)"
            )
        return numbers("head", self.head, kept.shape[1])

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of a method, with its heads."""
        if self.head is None:
            return self.arguments
        return {**self.arguments, "heads": self.heads(self.trace.cross or self.trace.maps)}

    def values(self, method: str, **more: Any) -> Tensor:
        """A method's result for this example, (layer, query, token)."""
        given = method_of(method).fitting({**self.given, **more})
        return self.trace.read(method, **given)[0]

    def spread(self, method: str, **more: Any) -> Spread:
        """Mean and spread of a method's result over posterior samples."""
        return self.trace.spread(method, **method_of(method).fitting({**self.given, **more}))


def ask(trace: Trace, given: Mapping[str, Any]) -> PlotRequest:
    """Check the arguments that the views share."""
    if not isinstance(trace, Trace):
        raise TypeError(f"trace must be a Trace, as overt.trace makes them, got {type(trace).__name__}")
    _check.one_of("columns", given["columns"], WIDTHS)
    one = trace[_one("example", given["example"], len(trace))]
    methods = _methods(one, given)
    queries, total = one.maps[0].shape[-2], one.mask.shape[1]
    query = one.main_queries()[0] if given["query"] is None else _one("query", given["query"], queries)
    if given["query"] is not None:
        _check_real(one, query, given["example"])
    if given["tokens"] is not None:
        shown = sorted(set(numbers("tokens", given["tokens"], total)))
    else:
        real = one.mask[0]
        plain = real if given["special"] else real & ~one.special[0]
        # Where all is special there is nothing else to show.
        shown = (plain if bool(plain.any()) else real).nonzero().flatten().tolist()
    layer: Any = given["layer"]
    numbers("layer", layer, len(one.maps))
    same = ("head", "method", "importances", "target", "unk", "columns")
    return PlotRequest(
        trace=one,
        query=query,
        named=given["query"] is not None,
        layer=layer.tolist() if hasattr(layer, "tolist") else layer,
        methods=methods,
        shown=shown,
        arguments={name: given[name] for name in ("residual", "normalize", "receptive_field")},
        **{name: given[name] for name in same},
    )


def _methods(trace: Trace, given: Mapping[str, Any]) -> list[str]:
    """The methods to show side by side; one that is named alone is all of them."""
    method, view, known = given["method"], given["view"], methods("maps")
    asked = given["methods"]
    if asked is None:
        several = [name for name, one in known.items() if trace.why_not(one) is None]
    else:
        several = [asked] if isinstance(asked, str) else list(asked)
    if not several:
        raise ValueError(f"methods must name at least one of {', '.join(known)}, got none")
    for one in several:
        method_of(one, known, "methods")
    if method is None:
        return several
    method_of(method, known)
    if view in VIEWS_OF_MAPS:
        raise ValueError(f"view={view!r} shows the maps themselves, of no method; got method={method!r}")
    if view not in VIEWS_OF_METHODS:
        return several
    if asked is not None and several != [method]:
        raise ValueError(f"method or methods, not both: got method={method!r} and methods={several}")
    return [method]


def _check_real(one: Trace, query: int, example: int) -> None:
    """Refuse padding as a query: all its values are zeros."""
    real = one.mask[0, -one.maps[0].shape[-2] :]
    if not bool(real[query]):
        kept = real.nonzero().flatten().tolist()
        raise ValueError(
            f"query {query} is padding in example {example}; "
            + (f"its tokens are {kept[0]} to {kept[-1]}" if kept else "it has no tokens")
        )


def _one(name: str, asked: Any, count: int) -> int:
    """One position along an axis."""
    found = numbers(name, asked, count)
    if len(found) != 1:
        raise ValueError(f"{name} must be one number, got {asked!r}")
    return found[0]
