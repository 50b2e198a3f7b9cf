"""What a tracing method is, and the registry of methods.

A method is one file: its options, the function that computes it, and `register_method`. Tables, pages,
figures, the judge and the command line find methods only through the registry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from overt import _check
from overt._modes import evaluating
from overt.tracing.edges import Walk
from overt.tracing.levels import Levels, averaged, unit_rows, unit_sizes
from overt.tracing.options import Heads, Numbers, Options, check_bytes, check_heads, numbers, over_bytes
from overt.tracing.subject import Subject

Reads = Literal["maps", "model"]
RESERVED = ("average", "heads", "hop", "id", "label", "layers", "mean", "name", "spread")  # in a page's index
SHARED = tuple(option.name for option in dataclasses.fields(Options))
OF_MAPS = ("layers", "heads", "residual", "receptive_field")  # arguments that say how maps are read
VALUES = ("weight", "share", "amount", "effect")


@dataclass(frozen=True)
class Cost:
    """What a method costs, to decide what to compute by default.

    Attributes:
        words: the cost in one line.
        every: the number of tokens up to which it is quick for every query; None for no limit.
        most: the number of tokens beyond which even one query is slow; None for no limit.
        passes: passes of the model for each token; 0 for a method that reads maps.
    """

    words: str
    every: int | None = None
    most: int | None = None
    passes: int = 0


@dataclass(frozen=True)
class Method:
    """A way to compute what a query draws on.

    Attributes:
        name: identifies the method; one word.
        title: readable name.
        reads: "maps", or "model" if it runs the model.
        run: for a method that reads maps, (levels, request) → (batch, layer, [head,] query, token). Levels
            have zeros at padding; `request` is checked: queries and layers are lists, the residual is a
            number. For one that runs the model, (subject, options) → (batch, 1, query, token).
        cost: what it costs.
        options: its arguments and their defaults.
        needless: the shared arguments that have no meaning for it; anything but their default is refused. For
            a method that runs the model, layers, heads, residual and receptive_field never have a meaning.
        value: what its values are: "weight", "share" of a whole, "amount" without a fixed sum, "effect".
        paths: whether a query's row is the sum over paths down the levels, so that a view may draw them.
        signed: whether it takes negative weights as they are; if not, effective attention is clipped at zero,
            and the signed weights of a mechanism are refused.
        edges: its form on the edge lists of a graph network, (walk, request) → (sample, head, place), or
            None.
        variants: further names for use by the judge, with their options.
        holds: (levels, highest layer) → bytes of the levels that it holds at once, which must fit the budget
            of a trace of states; None for a method that reads rows.
    """

    name: str
    title: str
    reads: Reads
    run: Callable[..., Tensor]
    cost: Cost
    options: type[Options] = Options
    needless: tuple[str, ...] = ()
    value: Literal["weight", "share", "amount", "effect"] = "share"
    paths: bool = False
    signed: bool = True
    edges: Callable[..., Tensor] | None = None
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    holds: Callable[[Levels, int], int] | None = None

    @property
    def runs_model(self) -> bool:
        """Whether it runs the model, which a loaded trace lacks."""
        return self.reads == "model"

    @property
    def idle(self) -> tuple[str, ...]:
        """Names of the shared arguments that have no meaning for it."""
        return (*self.needless, *OF_MAPS) if self.runs_model else self.needless

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the arguments that it takes."""
        return tuple(
            option.name for option in dataclasses.fields(self.options) if option.name not in self.idle
        )

    def options_of(self, given: Mapping[str, Any]) -> Options:
        """Arguments as one frozen object; those without meaning for the method are refused."""
        known = {option.name: option.default for option in dataclasses.fields(self.options)}
        for name, value in given.items():
            if name not in known:
                raise TypeError(f"{self.name} takes no {name}; it takes {', '.join(self.takes)}")
            if name in self.idle and not _same(value, known[name]):
                raise ValueError(
                    f"{name} has no meaning for {self.title}, got {name}={value!r}: leave it out"
                )
        return self.options(**given)

    def fitting(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Of arguments for several methods, those that this one takes."""
        return {name: value for name, value in given.items() if name in self.takes}


def _same(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, bool | float | str) and value == default)


_registered: dict[str, Method] = {}


def register_method(method: Method) -> Method:
    """Register a method for `Trace.read`, tables, pages, figures, the judge and the command line.

    A method replaces an earlier one of its name with the same function, as when a notebook cell runs again.
    """
    if not isinstance(method, Method):
        raise TypeError(f"method must be an overt.tracing.Method, got {type(method).__name__}")
    if not method.name.isidentifier():
        raise ValueError(f"name must be a word of letters, digits and _, got {method.name!r}")
    if method.name in RESERVED or method.name.endswith("_spread"):
        raise ValueError(f"name must not be one that pages use for something else, got {method.name!r}")
    _check.one_of("reads", method.reads, ("maps", "model"))
    _check.one_of("value", method.value, VALUES)
    if not callable(method.run):
        raise TypeError(f"run must be a function, got {method.run!r}")
    if not isinstance(method.cost, Cost):
        raise TypeError(f"cost must be an overt.tracing.Cost, got {method.cost!r}")
    _check_options(method.options)
    if set(method.needless) - set(SHARED):
        shared = ", ".join(SHARED)
        raise ValueError(f"needless must list shared arguments ({shared}), got {method.needless!r}")
    known_options = {option.name for option in dataclasses.fields(method.options)}
    for name, options in method.variants.items():
        if name == method.name or set(options) - known_options:
            raise ValueError(f"variants must have names and options of the method, got {name!r}: {options!r}")
    for name in (method.name, *method.variants):
        known = next((other for other in _registered.values() if name in (other.name, *other.variants)), None)
        if known is not None and _origin(known) != _origin(method):
            raise ValueError(f"there is a method {name!r} already: choose another name")
    _registered[method.name] = method
    return method


def _check_options(options: Any) -> None:
    """Refuse anything but a frozen dataclass derived from `Options`."""
    if not (isinstance(options, type) and issubclass(options, Options)):
        raise TypeError(f"options must be a subclass of overt.tracing.Options, got {options!r}")
    parameters = vars(options).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise TypeError(f"{options.__name__} must be a dataclass(frozen=True, kw_only=True)")


def _origin(method: Method) -> tuple[str, str, str]:
    """Name and function, which distinguish a method registered again from another of its name."""
    run: Any = method.run
    return method.name, getattr(run, "__module__", ""), getattr(run, "__qualname__", repr(type(run)))


def check_known(candidates: Iterable[Method], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that none of several methods takes."""
    known = {field.name for method in candidates for field in dataclasses.fields(method.options)}
    for name in arguments:
        if name not in known:
            raise TypeError(f"no method here takes {name}; they take {', '.join(sorted(known))}")


def method_of(name: str, among: Mapping[str, Method] | None = None, argument: str = "method") -> Method:
    """The method of this name; the error for an unknown name lists the known ones."""
    known = _registered if among is None else among
    _check.one_of(argument, name, tuple(known))
    return known[name]


def methods(reads: Reads | None = None) -> dict[str, Method]:
    """The registered methods by name, in the order of registration; all, or those of one kind."""
    return {name: method for name, method in _registered.items() if reads is None or method.reads == reads}


@dataclass(frozen=True)
class MethodRequest:
    """A checked request to a method that reads levels.

    Attributes:
        queries: which rows.
        layers: which layers.
        heads: as in `Options`.
        residual: a number.
        options: all options, including the method's own.
    """

    queries: list[int]
    layers: list[int]
    heads: Heads
    residual: float
    options: Options

    @property
    def each(self) -> bool:
        """Whether each head has its own row."""
        return isinstance(self.heads, str) and self.heads == "each"

    @property
    def below(self) -> Heads:
        """Heads of the layers below the starting one."""
        return "mean" if self.each else self.heads


def request_of(levels: Levels, options: Options) -> MethodRequest:
    """Check the shared arguments against the maps that they apply to."""
    heads = head_list(options.heads)
    check_heads(heads, levels.heads)
    residual = levels.residual if options.residual is None else options.residual
    _check.fraction("residual", residual)
    if levels.heads == 0:
        averaged((levels.cross or levels.maps)[0], heads)  # raises: single heads were not kept
    return MethodRequest(
        numbers("queries", options.queries, levels.queries),
        numbers("layers", options.layers, levels.layers),
        heads,
        residual,
        options,
    )


def head_list(heads: Any) -> Heads:
    """Heads as "mean", "each" or a list."""
    heads = heads.tolist() if hasattr(heads, "tolist") else heads
    return list(heads) if isinstance(heads, tuple | range) else heads


def read_levels(method: Method, levels: Levels, queries: Numbers, arguments: Mapping[str, Any]) -> Tensor:
    """A method over levels, (batch, layer, [head,] query, token), with the requested normalisations."""
    options = method.options_of({**arguments, "queries": queries})
    if (reason := why_not_levels(method, levels)) is not None:
        raise ValueError(reason)
    request, levels = request_of(levels, options), levels.without_padding()
    if levels.budget is not None:
        copies = levels.heads if request.each else 1
        rows = len(levels.mask) * len(request.layers) * copies * len(request.queries)
        asked_for = f"{method.title} of {len(request.queries)} queries in {len(request.layers)} layers"
        check_bytes(asked_for, rows * levels.tokens * 8, levels.budget, "ask for fewer, or trace with more")
    if (reason := why_over_budget(method, levels, request.layers)) is not None:
        raise ValueError(reason)
    values = _run(method, levels, request)
    if options.receptive_field:
        uniform = _run(method, levels.uniform(), replace(request, heads="mean"))
        uniform = uniform if uniform.dim() == values.dim() else uniform.unsqueeze(2)
        values = values / torch.where(uniform == 0.0, 1.0, uniform)
        values = values.masked_fill((uniform == 0.0).expand_as(values), 0.0)
    return unit_rows(values) if options.normalize or options.receptive_field else values


def _run(method: Method, levels: Levels, request: MethodRequest) -> Tensor:
    """A method's values before normalisation, checked, with zeros at padding."""
    real, places = levels.mask, [levels.first + query for query in request.queries]
    heads = [levels.heads] if request.each else []
    shape = (len(real), len(request.layers), *heads, len(places), levels.tokens)
    values = check_values(method, method.run(levels, request), shape)
    if not levels.padded:
        return values
    both = real[:, places].unsqueeze(-1) & real.unsqueeze(1)
    while both.dim() < values.dim():
        both = both.unsqueeze(1)
    return values.masked_fill(~both, 0.0)


def check_values(method: Method, values: Any, shape: tuple[int | None, ...]) -> Tensor:
    """Values in float64, after checking their shape; None stands for any length."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = f"a tensor of {values.dtype}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise TypeError(f"the method {method.name!r} must return a tensor of floats, got {kind}")
    fits = len(values.shape) == len(shape)
    if not fits or any(length not in (None, got) for length, got in zip(shape, values.shape, strict=True)):
        expected = str(tuple("any" if length is None else length for length in shape)).replace("'", "")
        raise ValueError(
            f"the method {method.name!r} must return shape {expected}, got {tuple(values.shape)}"
        )
    return values.detach().double().cpu()


def why_over_budget(method: Method, levels: Levels, layers: Numbers = None) -> str | None:
    """Why the budget of a trace of states has no room for a method over some layers; None if it has."""
    if method.holds is None or levels.budget is None or levels.recurrent:
        return None
    highest = max(numbers("layers", layers, levels.layers))
    through = f"{method.title} through {levels.level_of(highest)} levels of {levels.tokens:,} tokens"
    return over_bytes(
        through, method.holds(levels, highest), levels.budget, "rollout needs no maps; or trace with more"
    )


def why_not_levels(method: Method, levels: Levels) -> str | None:
    """Why a method cannot read levels; None if it can."""
    if levels.recurrent and "residual" not in method.needless:  # it follows paths through the layers
        return (
            f"there is no {method.title} through a recurrent decoder, which passes on what it saw outside "
            "attention: raw shows the map"
        )
    if levels.convolved and "residual" not in method.needless:
        return (
            f"there is no {method.title} to pixels: convolutions and shortcuts pass information on outside "
            "attention; raw shows the maps"
        )
    if method.signed or not levels.signed or levels.cuts:
        return None
    return (
        f"there is no {method.title} over weights that may be negative, which a mechanism of this model "
        f'makes: raw and rollout keep their signs, and overt.trace(…, mixing="norm") has a {method.title}'
    )


def read_subject(method: Method, subject: Subject, queries: Numbers, arguments: Mapping[str, Any]) -> Tensor:
    """A method that runs the model, in evaluation mode, (batch, 1, query, token)."""
    options = method.options_of({**arguments, "queries": queries})
    if (reason := subject.why_not(method.title)) is not None:
        raise ValueError(reason)
    with evaluating(subject.model):
        values = method.run(subject, options)
    values = check_values(method, values, (subject.mask.shape[0], 1, None, subject.mask.shape[1]))
    return unit_sizes(values) if options.normalize else values


def edge_methods() -> dict[str, Method]:
    """The methods that have a form on the edge lists of a graph network."""
    return {name: method for name, method in methods("maps").items() if method.edges is not None}


def method_over_edges(method: Method, walk: Walk, options: Options, residual: float) -> Tensor:
    """A method over a node's neighbourhood, (sample, head, place)."""
    assert method.edges is not None
    return method.edges(walk, MethodRequest([walk.place], [walk.top], walk.heads, residual, options))
