"""What a mechanism is: frozen settings that make a layer for each attention, and a registry of them.

A layer acts on an attention's map at any of four points, in this order:

1. `logits`: makes or changes the current logits (Synthesizer, position terms, talking heads).
2. `refine`: turns them into the logits that the softmax sees (Evolving).
3. `weights`: turns logits into weights in place of the softmax (Bayesian, sigmoid attention); one mechanism.
4. `mixed`: changes the weights, after the softmax and before dropout (talking heads).

`docs/extend.md` writes two from scratch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
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
    """Settings of a mechanism: subclass it as a frozen dataclass, and register that with its layer.

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
        """What acts at one attention."""
        return entry_of(self).layer(self, site)

    def edge_layer(self, site: Site) -> MechanismLayer:
        """What acts at one graph attention, on an edge list; an error where nothing can."""
        edges = entry_of(self).edges
        if isinstance(edges, str):
            raise ValueError(f"a graph has no {type(self).__name__}, {edges}")
        return edges(self, site)

    @classmethod
    def from_file(cls, settings: Mapping[str, Any]) -> Self:
        """From settings as a file has them. Override it where a file without one of them means something.

        A setting that came later must stand for what was done before there was one, which may not be its
        default.
        """
        return cls(**settings)

    def loss_weight(self, step: Tensor | None) -> Tensor | float:
        """λ(t), what the terms that its layers add to the loss are multiplied by at training step t."""
        del step
        return 1.0


class MechanismLayer(nn.Module):
    """A mechanism at one attention. Override the points it acts at, and say what holds of it.

    Attributes:
        config: the settings.
        site: where it is.
        name: of the mechanism.
        points: where it acts.
        random: whether weights are drawn, so that `Chain(sample=…)` gives others.
        sums_to_one: whether each row of visible weights sums to one after it acted.
        signed: whether weights may be negative after it acted.
        reads_below: whether it starts from what the layer below left in the chain. Layers then have to be
            joined by one chain, and attentions over windows, whose maps change places, are refused.
        reads_rows: whether a row of the map depends on other rows. A causal model is safe only where these
            are rows above, which the layer must see to for `site.kind == "decoder"`; elsewhere
            `is_causal=True` is refused.
        earlier_rows: how many rows above a row it reads, which decoding keeps beside its cache
            (`Chain.keep_rows`).
        fills_hidden: whether hidden cells hold −inf in the logits that it refined.
        adds: name of the term that it adds to the loss (`Chain.add_loss`); None for none.
        part_names: names of the parts of its work that a trace can look at.
    """

    random: bool = False
    sums_to_one: bool = True
    signed: bool = False
    reads_below: bool = False
    reads_rows: bool = False
    earlier_rows: int = 0
    fills_hidden: bool = False
    adds: str | None = None
    part_names: tuple[str, ...] = ()

    def __init__(self, config: Any, site: Site) -> None:
        super().__init__()
        self.config, self.site = config, site
        self.name = type(config).__name__
        self.points = points_of(type(self))

    def forward(self, point: Point, x: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Act at one of the points; hooks on the layer see every one."""
        found: Tensor = getattr(self, point)(x, call, chain)
        if not isinstance(found, Tensor) or found.shape != x.shape:
            came = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"{self.name}.{point} must return a tensor of shape {tuple(x.shape)}, got {came}"
            )
        return found

    def logits(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Current logits → current logits, (batch, heads, query, key); hidden cells hold anything."""
        del call, chain
        return logits

    def refine(self, logits: Tensor, call: AttentionCall, chain: Chain) -> Tensor:
        """Current logits → those that become weights, (batch, heads, query, key)."""
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
        """Whether it does anything at a point."""
        return point in self.points

    def idle(self, chain: Chain) -> bool:
        """Whether in this pass it does what a softmax does and leaves nothing in the chain."""
        del chain
        return False

    def unfit(self, call: AttentionCall) -> str | None:
        """Why a fused form that covers it does not do for a call; None if it does."""
        del call
        return None

    def parts(self, point: Point, x: Tensor, call: AttentionCall, chain: Chain) -> dict[str, Tensor]:
        """Some of `part_names` → (batch, heads, query, key), of what it is about to do at a point."""
        del point, x, call, chain
        return {}

    def describe(self) -> dict[str, str]:
        """What `overt.describe` shows of it: column → text."""
        return {self.name: self.extra_repr() or "yes"}

    def reset_parameters(self) -> None:
        """Initialise its parameters anew."""

    def extra_repr(self) -> str:
        """Its settings, for `print(model)` and `describe`."""
        values = ((field.name, getattr(self.config, field.name)) for field in dataclasses.fields(self.config))
        return ", ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values
        )


class Entry(NamedTuple):
    """A registered mechanism.

    Attributes:
        kind: class of its settings.
        layer: class of its layers.
        edges: class of its layers on edge lists, or the reason why there are none, as a clause.
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
    """Make a mechanism known by its class's name, under which models with it are saved.

    A class that is defined again under the same qualified name, as in a notebook, takes the place of the one
    before.

    Args:
        kind: class of the settings, a `dataclass(frozen=True)`.
        layer: class of its layers, made as `layer(settings, site)`.
        edges: class of its layers on edge lists, whose methods take (edges, heads) tensors and an `EdgeCall`;
            or the reason why there is none, to follow "a graph has no NAME, …".
    """
    if not (isinstance(kind, type) and issubclass(kind, Mechanism)):
        raise TypeError(f"a mechanism must be a subclass of overt.Mechanism, got {kind!r}")
    name = kind.__name__
    parameters = vars(kind).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise TypeError(f"{name} must be a dataclass(frozen=True)")
    for one in (layer, *([] if isinstance(edges, str) else [edges])):
        if not (isinstance(one, type) and issubclass(one, MechanismLayer)):
            raise TypeError(f"the layer of {name} must be a subclass of overt.MechanismLayer, got {one!r}")
    if "name" in {field.name for field in dataclasses.fields(kind)}:  # type: ignore[arg-type]
        raise TypeError(f"{name} has a setting called name, which files use for the mechanism's own")
    for one in (layer, *([] if isinstance(edges, str) else [edges])):
        if not points_of(one):
            raise TypeError(f"{one.__name__} defines none of {', '.join(POINTS)}: it would do nothing")
    known = _registered.get(name)
    places = {(one.__module__, one.__qualname__) for one in (kind, *([known.kind] if known else []))}
    if len(places) > 1:
        assert known is not None
        raise ValueError(f"{name} is already registered by {known.kind.__module__}: choose another name")
    same = [other for other in _registered if other != name and _key(other) == _key(name)]
    if same:
        raise ValueError(
            f"{name} and {same[0]} would both be called {_key(name)} in a model: choose another name"
        )
    _registered[name] = Entry(kind, layer, edges)


def entry_of(mechanism: Mechanism) -> Entry:
    """What a mechanism was registered with; an error if it was not."""
    kind = type(mechanism)
    found = _registered.get(kind.__name__)
    if found is None or found.kind is not kind:
        raise TypeError(f"{kind.__name__} is not registered: overt.register_mechanism does that")
    return found


def registered() -> tuple[str, ...]:
    """Names of the mechanisms that are known, in alphabetical order."""
    return tuple(sorted(_registered))


def as_dict(mechanism: Mechanism) -> dict[str, Any]:
    """A mechanism's name and settings, as JSON has them."""
    fields = (field.name for field in dataclasses.fields(mechanism) if field.init)  # type: ignore[arg-type]
    values = {name: _number(getattr(mechanism, name)) for name in fields}
    return {"name": type(mechanism).__name__, **values}


def _number(value: Any) -> Any:
    """A number of numpy's or torch's as Python's own."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


def from_dict(settings: object) -> Mechanism:
    """A mechanism from its name and settings. Only registered ones are made; nothing is imported for it."""
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
    """JSON's lists as the tuples that frozen settings have."""
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def check_mechanisms(mechanisms: Sequence[Mechanism]) -> None:
    """Refuse anything but a list of registered mechanisms, one of a kind."""
    if not isinstance(mechanisms, list | tuple):
        raise TypeError(f"mechanisms must be a list, such as [Evolving()], got {mechanisms!r}")
    for mechanism in mechanisms:
        kind = type(mechanism)
        if not isinstance(mechanism, Mechanism):
            listed = [f"{name}(…)" for name in registered()]
            raise TypeError(f"mechanisms must be {', '.join(listed[:-1])} or {listed[-1]}, got {mechanism!r}")
        entry_of(mechanism)
        _check_settings(mechanism)
        if (count := sum(type(other) is kind for other in mechanisms)) > 1:
            raise ValueError(f"mechanisms may hold one {kind.__name__}, got {count}")


def _check_settings(mechanism: Mechanism) -> None:
    """Refuse settings that could not be written to a file and come back."""
    for name, value in as_dict(mechanism).items():
        if not _is_plain(value):
            raise TypeError(
                f"{type(mechanism).__name__}.{name} must be a number, a string, a boolean, None or a tuple "
                f"of those, got {value!r}"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def check_layers(layers: Sequence[MechanismLayer]) -> None:
    """Refuse layers that are not set up, a second one that makes weights, and parts of one name."""
    for layer in layers:
        if "points" not in vars(layer):
            raise TypeError(f"{type(layer).__name__}.__init__ must call super().__init__(config, site)")
    owners: dict[str, str] = {}
    for layer in layers:
        for part in layer.part_names:
            if part == "fused" or not part.isidentifier():
                must = 'must be a plain word, and not "fused", the map in use'
                raise ValueError(f"a part of {layer.name} {must}; got {part!r}")
            if owners.setdefault(part, layer.name) != layer.name:
                raise ValueError(f"{owners[part]} and {layer.name} both have a part called {part!r}")
    making = [layer.name for layer in layers if layer.acts_at("weights")]
    if len(making) > 1:
        raise ValueError(f"{' and '.join(making)} both make the weights of an attention: give one of them")


def points_of(layer: type[MechanismLayer]) -> tuple[Point, ...]:
    """The points that a class of layers acts at: those that it defines."""
    return tuple(p for p in POINTS if getattr(layer, p) is not getattr(MechanismLayer, p))


def first_point(mechanism: Mechanism) -> int:
    """Number of the first point that a mechanism's layers act at."""
    points = points_of(entry_of(mechanism).layer)
    return POINTS.index(points[0]) if points else len(POINTS)


def key_of(mechanism: Mechanism) -> str:
    """What a mechanism's layer is called among the modules of a map: `Evolving` is `evolving`."""
    return _key(type(mechanism).__name__)


def _key(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
