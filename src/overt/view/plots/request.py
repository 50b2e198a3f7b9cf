"""A request for a figure: one example of a trace, its query, layers, heads and tokens, checked."""

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

VIEWS_OF_METHODS = ("strip", "compare")  # show several methods
VIEWS_OF_MAPS = ("heads", "evolution")  # show no method

Number = int | Sequence[int] | None


@dataclass(frozen=True)
class PlotRequest:
    """One example, and what to show of it; all numbers are checked and not negative."""

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
        return self.trace.first

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
        queries = [token - self.first for token in self.shown if token >= self.first]
        if not queries:
            raise ValueError(f"tokens must include queries, which begin at {self.first}")
        return queries

    def words_of(self, tokens: Sequence[int]) -> list[str]:
        """Names of some tokens."""
        return [word(self.trace.tokens[0][token]) for token in tokens]

    @property
    def words(self) -> list[str]:
        """Names of the shown tokens."""
        return self.words_of(self.shown)

    @property
    def query_words(self) -> list[str]:
        """Names of the shown tokens that are queries."""
        return self.words_of([self.first + query for query in self.queries])

    @property
    def name(self) -> str:
        """The query's token."""
        return self.words_of([self.place])[0]

    @property
    def weights(self) -> str:
        """Title of what the maps hold."""
        return self.trace.mixing_kind.title

    def title(self, method: str) -> str:
        """Title of a method's values."""
        return self.trace.mixing_kind.titled(method_of(method).title)

    @property
    def layers(self) -> list[int]:
        """The requested layers; all by default."""
        return numbers("layer", self.layer, self.trace.layers)

    def one_layer(self, view: str) -> int:
        """The layer of a view that shows only one; the last by default."""
        layers = [self.trace.layers - 1] if self.layer is None else self.layers
        if len(layers) != 1:
            raise ValueError(f"layer must be one number for view={view!r}, got {self.layer!r}")
        return layers[0]

    def heads(self, maps: Sequence[Tensor | None]) -> list[int]:
        """The requested heads; all by default."""
        cells = next(cells for cells in maps if cells is not None)
        if cells.dim() != 4:
            raise ValueError(
                f"head={self.head!r} needs the maps of single heads, which were not kept: "
                "overt.trace(…, heads=True)"
            )
        return numbers("head", self.head, cells.shape[1])

    @property
    def method_or_rollout(self) -> str:
        """The method of a view that shows one; by default rollout, or raw where there is none."""
        return self.method or ("rollout" if self.trace.why_not("rollout") is None else "raw")

    @property
    def method_arguments(self) -> dict[str, Any]:
        """The arguments of a method, with its heads."""
        if self.head is None:
            return self.arguments
        return {**self.arguments, "heads": self.heads(self.trace.cross or self.trace.maps)}

    def values(self, method: str, **more: Any) -> Tensor:
        """A method's result for this example, (layer, query, token)."""
        options = method_of(method).fitting({**self.method_arguments, **more})
        return self.trace.read(method, **options)[0]

    def spread(self, method: str, **more: Any) -> Spread:
        """Mean and spread of a method's result over posterior samples."""
        return self.trace.spread(method, **method_of(method).fitting({**self.method_arguments, **more}))


def request_of(trace: Trace, arguments: Mapping[str, Any]) -> PlotRequest:
    """Check the arguments that the views share."""
    if not isinstance(trace, Trace):
        raise TypeError(f"trace must be a Trace from overt.trace, got {type(trace).__name__}")
    trace.check_maps("a figure")
    _check.one_of("columns", arguments["columns"], WIDTHS)
    example = trace[_single("example", arguments["example"], len(trace))]
    methods = _methods(example, arguments)
    queries, total = example.queries, example.mask.shape[1]
    query = (
        example.main_queries()[0]
        if arguments["query"] is None
        else _single("query", arguments["query"], queries)
    )
    if arguments["query"] is not None:
        _check_real(example, query, arguments["example"])
    if arguments["tokens"] is not None:
        shown = sorted(set(numbers("tokens", arguments["tokens"], total)))
    else:
        real = example.mask[0]
        plain = real if arguments["special"] else real & ~example.special[0]
        # If all tokens are special, show them.
        shown = (plain if bool(plain.any()) else real).nonzero().flatten().tolist()
    layer: Any = arguments["layer"]
    numbers("layer", layer, example.layers)
    same = ("head", "method", "importances", "target", "unk", "columns")
    return PlotRequest(
        trace=example,
        query=query,
        named=arguments["query"] is not None,
        layer=layer.tolist() if hasattr(layer, "tolist") else layer,
        methods=methods,
        shown=shown,
        arguments={name: arguments[name] for name in ("residual", "normalize", "receptive_field")},
        **{name: arguments[name] for name in same},
    )


def _methods(trace: Trace, arguments: Mapping[str, Any]) -> list[str]:
    """The methods to show side by side; only `method` if it is given."""
    method, view, known = arguments["method"], arguments["view"], methods("maps")
    requested = arguments["methods"]
    if requested is None:
        several = [name for name, reader in known.items() if trace.why_not(reader) is None]
    else:
        several = [requested] if isinstance(requested, str) else list(requested)
    if not several:
        raise ValueError(f"methods must name at least one of {', '.join(known)}, got none")
    for name in several:
        method_of(name, known, "methods")
    if method is None:
        return several
    method_of(method, known)
    if view in VIEWS_OF_MAPS:
        raise ValueError(
            f"view={view!r} shows the maps themselves and takes no method, got method={method!r}"
        )
    if view not in VIEWS_OF_METHODS:
        return several
    if requested is not None and several != [method]:
        raise ValueError(f"give method or methods, not both: got method={method!r} and methods={several}")
    return [method]


def _check_real(trace: Trace, query: int, example: int) -> None:
    """Refuse padding as a query: all its values are zero."""
    real = trace.mask[0, trace.first :]
    if not bool(real[query]):
        positions = real.nonzero().flatten().tolist()
        raise ValueError(
            f"query {query} is padding in example {example}; "
            + (f"its tokens are {positions[0]} to {positions[-1]}" if positions else "it has no tokens")
        )


def _single(name: str, selection: Any, count: int) -> int:
    """One position along an axis."""
    positions = numbers(name, selection, count)
    if len(positions) != 1:
        raise ValueError(f"{name} must be one number, got {selection!r}")
    return positions[0]
