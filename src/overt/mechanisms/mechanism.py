"""What a mechanism is: frozen settings that make a layer for each attention; and the mechanism registry.

A layer acts on an attention's map at any of four points, in this order:

1. `logits`: makes or changes the current logits (Synthesizer, position terms, talking heads).
2. `refine`: turns them into the logits that the softmax sees (Evolving).
3. `weights`: turns logits into weights in place of the softmax (Bayesian, sigmoid attention). Only one may.
4. `mixed`: changes the weights, after the softmax and before dropout (talking heads).

`docs/extend.md` builds two mechanisms from scratch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from torch import Tensor, nn

from overt.mechanisms.maps import softmax

if TYPE_CHECKING:
    from overt.mechanisms.call import AttentionCall
    from overt.mechanisms.chain import Chain
    from overt.mechanisms.site import Site

Point = Literal["logits", "refine", "weights", "mixed"]
POINTS: tuple[Point, ...] = ("logits", "refine", "weights", "mixed")


class Mechanism:
    """Settings of a mechanism. Subclass it as a frozen dataclass, and register the subclass with its layer.

    ```python
    @dataclass(frozen=True)
    class Temperature(overt.Mechanism):
        value: float = 1.0

    class TemperatureLayer(overt.MechanismLayer):
        def refine(self, logits, call, chain):
            return logits / self.config.value

    overt.register_mechanism(Temperature, TemperatureLayer)
    ```

    Settings are numbers, strings, booleans, None and tuples of those: they are written to `config.json`.
    """

    def layer(self, site: Site) -> MechanismLayer:
        """The layer that acts at one attention."""
        return entry_of(self).layer(self, site)

    def edge_layer(self, site: Site) -> MechanismLayer:
        """The layer that acts at one graph attention, on an edge list; an error if there is no such layer."""
        edges = entry_of(self).edges
        if isinstance(edges, str):
            raise ValueError(f"graph attention cannot have {type(self).__name__}, {edges}")
        return edges(self, site)

    @classmethod
    def from_file(cls, settings: Mapping[str, Any]) -> Self:
        """Make it from the settings in a file. Override it to interpret files that lack a setting.

        Where a setting was added later, its absence must mean what was done before, which may not be its
        default.
        """
        return cls(**settings)

    def noise_setting(self) -> NoiseSetting | None:
        """Which setting says how much noise there is; None if nothing is random, or no setting says so.

        `overt.calibrate(noise=True)` tries its values on a trained model: layers must be able to
        `reconfigure`.
        """
        return None

    def loss_weight(self, step: Tensor | None) -> Tensor | float:
        """λ(t), the factor at training step t of the terms that its layers add to the loss."""
        del step
        return 1.0


class MechanismLayer(nn.Module):
    """A mechanism at one attention. Override the points it acts at, and declare its properties.

    Attributes:
        config: the settings.
        site: where it is.
        name: of the mechanism.
        points: where it acts.
        random: whether weights are drawn, so that `Chain(sample=…)` selects the sample.
        sums_to_one: whether each row of visible weights sums to one after it has acted.
        signed: whether weights may be negative after it has acted.
        reads_below: whether it reads what the layer below left in the chain. All layers then need the same
            chain, and attentions over windows, whose maps change places, are refused.
        reads_rows: whether a row of the map depends on other rows. In a causal model it may depend only on
            rows above, which the layer must ensure for `site.kind == "decoder"`; for other kinds
            `is_causal=True` is refused.
        earlier_rows: how many rows above each row it reads; decoding keeps them alongside its cache
            (`Chain.keep_rows`).
        reads_logits_only: whether it reads neither queries nor keys of a call, apart from a prior's keys.
            Position terms may then be part of both (`RelativePosition2d.widen`).
        fills_hidden: whether hidden cells hold −inf in the logits that it refined.
        mean_is_softmax: whether weights are the softmax of the logits wherever none are drawn, as if it were
            not there.
        adds: name of the term that it adds to the loss (`Chain.add_loss`); None if it adds none.
        part_names: names of the intermediate results that a trace can record.
    """

    random: bool = False
    sums_to_one: bool = True
    signed: bool = False
    reads_below: bool = False
    reads_rows: bool = False
    earlier_rows: int = 0
    reads_logits_only: bool = False
    fills_hidden: bool = False
    mean_is_softmax: bool = False
    adds: str | None = None
    part_names: tuple[str, ...] = ()

    def __init__(self, config: Any, site: Site) -> None:
        super().__init__()
        self.config, self.site = config, site
        self.name = type(config).__name__
        self.points = points_of(type(self))

    def forward(self, point: Point, x: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Act at one of the points; hooks on the layer see every call."""
        output: Tensor = getattr(self, point)(x, call, chain)
        if not isinstance(output, Tensor) or output.shape != x.shape:
            got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"{self.name}.{point} must return a tensor of shape {tuple(x.shape)}, got {got}")
        return output

    def logits(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Current logits → current logits, (batch, heads, query, key); hidden cells hold arbitrary values."""
        del call, chain
        return logits

    def refine(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Current logits → the logits that become weights, (batch, heads, query, key)."""
        del call, chain
        return logits

    def weights(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Logits → weights, (batch, heads, query, key), at least float32, zeros in hidden cells."""
        del chain
        return softmax(logits, call.visible())

    def mixed(self, weights: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Weights → weights, (batch, heads, query, key), zeros in hidden cells."""
        del call, chain
        return weights

    def acts_at(self, point: Point) -> bool:
        """Whether it acts at a point."""
        return point in self.points

    def ahead(self, call: AttentionCall, chain: Chain) -> Ahead | None:
        """Its part in a map whose rows will be made one by one (`AttentionMap.rows`), prepared beforehand.

        None if it must see each row in turn. The layer's points are not called for rows prepared this way.

        Args:
            call: of the whole map; its query has no width, since no row of it is known yet.
            chain: of this forward pass.
        """
        del call, chain
        return None

    def idle(self, chain: Chain) -> bool:
        """Whether in this pass it only computes a softmax and leaves nothing in the chain."""
        del chain
        return False

    def unfit(self, call: AttentionCall) -> str | None:
        """Why a fused form that covers it cannot take a call; None if it can."""
        del call
        return None

    def parts(self, point: Point, x: Tensor, call: AttentionCall, chain: Chain) -> dict[str, Tensor]:
        """Some of `part_names` → (batch, heads, query, key), for what it is about to do at a point."""
        del point, x, call, chain
        return {}

    def describe(self) -> dict[str, str]:
        """What `overt.describe` shows about it: column → text."""
        return {self.name: self.extra_repr() or "yes"}

    def reconfigure(self, config: Any) -> None:
        """Take settings that differ in the amount of noise alone (`Mechanism.noise_setting`)."""
        self.config = config

    def reset_parameters(self) -> None:
        """Reinitialise its parameters."""

    def extra_repr(self) -> str:
        """Its settings, for `print(model)` and `describe`."""
        values = ((field.name, getattr(self.config, field.name)) for field in dataclasses.fields(self.config))
        return ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values
        )


class Ahead(NamedTuple):
    """What a layer does to a map whose rows are made one by one, if it can be said before the first row.

    Attributes:
        added: (batch, heads, query, key), added to the logits before the softmax; None for nothing.
        finish: called with all logits, (batch, heads, query, key), after the last row; None for nothing.
    """

    added: Tensor | None
    finish: Callable[[Tensor], None] | None


class NoiseSetting(NamedTuple):
    """The setting that says how much noise a mechanism has.

    Attributes:
        name: of the setting.
        values: from much noise to little, for `overt.calibrate(noise=True)` to try.
    """

    name: str
    values: tuple[float, ...]


class Entry(NamedTuple):
    """A registered mechanism.

    Attributes:
        kind: class of its settings.
        layer: class of its layers.
        edges: class of its layers on edge lists, or the reason why there is none, as a relative clause.
    """

    kind: type[Mechanism]
    layer: type[MechanismLayer]
    edges: type[MechanismLayer] | str


_registered: dict[str, Entry] = {}


def register_mechanism(
    kind: type[Mechanism],
    layer: type[MechanismLayer],
    edges: type[MechanismLayer] | str = "which has no form on edge lists",
) -> None:
    """Register a mechanism under its class's name, which saved models refer to.

    A class that is defined again under the same qualified name, as in a notebook, replaces the earlier one.

    Args:
        kind: class of the settings, a `dataclass(frozen=True)`.
        layer: class of its layers, constructed as `layer(settings, site)`.
        edges: class of its layers on edge lists, whose methods take (edges, heads) tensors and an `EdgeCall`;
            or the reason why there is none, to follow "graph attention cannot have NAME, …".
    """
    if not (isinstance(kind, type) and issubclass(kind, Mechanism)):
        raise TypeError(f"a mechanism must be a subclass of overt.Mechanism, got {kind!r}")
    name = kind.__name__
    parameters = vars(kind).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise TypeError(f"{name} must be a dataclass(frozen=True)")
    layer_classes = (layer, *([] if isinstance(edges, str) else [edges]))
    for layer_class in layer_classes:
        if not (isinstance(layer_class, type) and issubclass(layer_class, MechanismLayer)):
            raise TypeError(
                f"the layer of {name} must be a subclass of overt.MechanismLayer, got {layer_class!r}"
            )
    if "name" in {field.name for field in dataclasses.fields(kind)}:  # type: ignore[arg-type]
        raise TypeError(f"{name} must not have a setting called name: files use it for the mechanism's name")
    for layer_class in layer_classes:
        if not points_of(layer_class):
            raise TypeError(
                f"{layer_class.__name__} defines none of {', '.join(POINTS)}: it would do nothing"
            )
    earlier = _registered.get(name)
    if earlier is not None and _qualified_name(earlier.kind) != _qualified_name(kind):
        raise ValueError(f"{name} is already registered by {earlier.kind.__module__}: choose another name")
    clashes = [other for other in _registered if other != name and _key(other) == _key(name)]
    if clashes:
        raise ValueError(
            f"{name} and {clashes[0]} would both be called {_key(name)} in a model: choose another name"
        )
    _registered[name] = Entry(kind, layer, edges)


def _qualified_name(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def entry_of(mechanism: Mechanism) -> Entry:
    """The entry of a registered mechanism; an error if it is not registered."""
    kind = type(mechanism)
    entry = _registered.get(kind.__name__)
    if entry is None or entry.kind is not kind:
        raise TypeError(f"{kind.__name__} is not registered: call overt.register_mechanism first")
    return entry


def registered() -> tuple[str, ...]:
    """Names of the registered mechanisms, in alphabetical order."""
    return tuple(sorted(_registered))


def as_dict(mechanism: Mechanism) -> dict[str, Any]:
    """A mechanism's name and settings, as written to JSON."""
    fields = (field.name for field in dataclasses.fields(mechanism) if field.init)  # type: ignore[arg-type]
    values = {name: _number(getattr(mechanism, name)) for name in fields}
    return {"name": type(mechanism).__name__, **values}


def _number(value: Any) -> Any:
    """A number of numpy or torch as a Python number."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def from_dict(settings: object) -> Mechanism:
    """A mechanism from its name and settings. It must be registered already; nothing is imported."""
    if not isinstance(settings, Mapping) or settings.get("name") not in _registered:
        raise ValueError(
            f"a mechanism must name one of {', '.join(registered())}, got {settings!r} "
            "(import the module that registers it first)"
        )
    kind = _registered[settings["name"]].kind
    known = {field.name for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    values = {key: _tuples(value) for key, value in settings.items() if key != "name"}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{settings['name']} has no setting {', '.join(unknown)} in this version of overt")
    return kind.from_file(values)


def _tuples(value: Any) -> Any:
    """Lists from JSON as the tuples that frozen settings hold."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def check_mechanisms(mechanisms: Sequence[Mechanism]) -> None:
    """Refuse anything but a list of registered mechanisms, at most one of each kind."""
    if not isinstance(mechanisms, list | tuple):
        raise TypeError(f"mechanisms must be a list, such as [Evolving()], got {mechanisms!r}")
    for mechanism in mechanisms:
        kind = type(mechanism)
        if not isinstance(mechanism, Mechanism):
            names = [f"{name}(…)" for name in registered()]
            raise TypeError(f"mechanisms must be {', '.join(names[:-1])} or {names[-1]}, got {mechanism!r}")
        entry_of(mechanism)
        _check_settings(mechanism)
        if (count := sum(type(other) is kind for other in mechanisms)) > 1:
            raise ValueError(f"mechanisms may hold one {kind.__name__}, got {count}")


def _check_settings(mechanism: Mechanism) -> None:
    """Refuse settings that could not be written to a file and read back."""
    for name, value in as_dict(mechanism).items():
        if not _is_plain(value):
            raise TypeError(
                f"{type(mechanism).__name__}.{name} must be a number, a string, a boolean, None or a tuple "
                f"of those, got {value!r}"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def check_layers(layers: Sequence[MechanismLayer]) -> None:
    """Refuse uninitialised layers, a second layer that makes weights, and two parts of the same name."""
    for layer in layers:
        if "points" not in vars(layer):
            raise TypeError(f"{type(layer).__name__}.__init__ must call super().__init__(config, site)")
    owners: dict[str, str] = {}
    for layer in layers:
        for part in layer.part_names:
            if part == "fused" or not part.isidentifier():
                rule = 'must be a plain word other than "fused", the name of the map in use'
                raise ValueError(f"a part of {layer.name} {rule}; got {part!r}")
            if owners.setdefault(part, layer.name) != layer.name:
                raise ValueError(f"{owners[part]} and {layer.name} both have a part called {part!r}")
    makers = [layer.name for layer in layers if layer.acts_at("weights")]
    if len(makers) > 1:
        raise ValueError(f"{' and '.join(makers)} both make the weights of an attention: use one of them")


def points_of(layer: type[MechanismLayer]) -> tuple[Point, ...]:
    """The points that a class of layers acts at: those whose methods it defines."""
    return tuple(p for p in POINTS if getattr(layer, p) is not getattr(MechanismLayer, p))


def first_point(mechanism: Mechanism) -> int:
    """Index of the first point that a mechanism's layers act at."""
    points = points_of(entry_of(mechanism).layer)
    return POINTS.index(points[0]) if points else len(POINTS)


def key_of(mechanism: Mechanism) -> str:
    """The module name of a mechanism's layer in a map: `evolving` for `Evolving`."""
    return _key(type(mechanism).__name__)


def _key(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
