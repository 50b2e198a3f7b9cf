"""Collecting maps: one forward pass of a model, keeping only what was requested of each attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.chain import Chain
from overt.tracing.asked import Asked, version_of
from overt.tracing.capture import FUSED, CapturedAttention, watching
from overt.tracing.inputs import Inputs
from overt.tracing.levels import HeldMaps
from overt.tracing.mixing.mixing import Mixing
from overt.tracing.subject import differentiable, with_history

if TYPE_CHECKING:
    from overt.tracing.budget import Budget
    from overt.tracing.places import Change
    from overt.tracing.recognised import Mixer
Stack = str | Mapping[str, Sequence[str]]  # a path, or chain → paths


def is_at(path: str, place: str) -> bool:
    """Whether a call is the one at a place, or below it."""
    return path == place or path.startswith(place + ".")


def is_traced(stack: Stack | None, path: str, chain: str) -> bool:
    """Whether the call at a path, in a chain, belongs to the traced stack; None for all."""
    if not isinstance(stack, Mapping):
        return stack in (None, chain) or (path + ".").startswith(f"{stack}.")
    return any(is_at(path, place) for places in stack.values() for place in places)


class Collector:
    """Receives each attention's map as it is computed.

    Attributes:
        mixing: makes the maps.
        parts: the parts that the mechanisms of each call expose, if requested.
        stack: path of the traced stack, or chain → paths of its calls; None for all.
        calls: the calls, without their tensors.
        shapes: shapes of their weights, (batch, head, query, key).
        maps: one per call, float32 on the CPU, or the states that it is made from; None until computed.
        budget: decides between maps and states.
        stacks: all stacks that ran, in order.
        seen: paths of all calls that ran, in order.
        tokenwise: layers that do not attend, nor mix tokens otherwise.
        mixers: modules that mix tokens without attention.
        missed: path → class of attentions that ran and cannot be captured.
        repeated: paths of attentions that ran more than once in one call of their module.
        borrowed: path → path of an earlier attention that it has the values of.
        changes: what changes of single tokens change, where attention is recognised.
    """

    def __init__(
        self, mixing: Mixing, parts: bool = False, stack: Stack | None = None, budget: Budget | None = None
    ) -> None:
        self.mixing, self.with_parts, self.stack, self.budget = mixing, parts, stack, budget
        self.calls: list[CapturedAttention] = []
        self.shapes: list[torch.Size] = []
        self.maps: list[Tensor | Asked | None] = []
        self.parts: list[dict[str, Tensor]] = []
        self.stacks: dict[str, None] = {}
        self.seen: dict[str, None] = {}
        self.tokenwise: set[str] = set()
        self.mixers: list[Mixer] = []
        self.missed: dict[str, str] = {}
        self.repeated: set[str] = set()
        self.borrowed: dict[str, str] = {}
        self.changes: list[Change] = []
        self.versions: list[tuple[str, Tensor, int]] = []  # path, queries or keys, and when they were kept
        if budget is not None:
            budget.inside = partial(is_traced, stack)  # a method of this would keep all states in a cycle

    def __call__(self, call: CapturedAttention) -> None:
        """Receive one attention."""
        self.stacks[call.chain] = None
        self.seen[call.path] = None
        if not self.inside(call.path, call.chain):
            return
        if call.refused:
            raise ValueError(f"{call.path} cannot be traced: {call.refused}")
        if call.asked is not None and call.of_states:
            assert self.budget is not None
            call.number = len(self.calls)
            if not self.budget.states:
                self._made(call, call.asked)
                return
            call.asked = self.budget.kept_states(call.asked, call.path)
            self.versions += [(call.path, x, version_of(x)) for x in (call.asked.query, call.asked.key)]
            self.calls.append(call)
            self.shapes.append(torch.Size(call.asked.shape))
            self.maps.append(call.asked)
            self.parts.append({})
            return
        if self.budget is not None:
            why, shape = call.why_maps or f"{call.path} is traced by its weights", call.weights.shape
            self.budget.check_map(shape, call.weights.element_size(), why, call.path)
            self.budget.kept_map(shape, call.path)
        if call.recurrent or call.grid is not None:
            self._check_weights_only(call)
        nothing = torch.empty(0)  # even a small view would keep all of the weights in memory
        call.number = len(self.calls)
        self.calls.append(replace(call, weights=nothing, value=None, output=None, parts={}, asked=None))
        self.shapes.append(call.weights.shape)
        cells = self.mixing.map(call)
        self.maps.append(None if cells is None else self._check_map(call.number, cells))
        self.parts.append({name: self._part(cells) for name, cells in call.parts.items()})

    def _made(self, call: CapturedAttention, asked: Asked) -> None:
        """Make a call's map from its queries and keys, in blocks."""
        from overt.tracing.states import StateLevel

        assert self.budget is not None
        self.budget.kept_map(asked.shape, call.path)
        self.calls.append(replace(call, asked=None))
        self.shapes.append(torch.Size(asked.shape))
        cells = StateLevel(asked, "each" if self.mixing.keep else "mean").cells()
        self.maps.append(self._check_map(call.number, cells))
        self.parts.append({})

    def check_unchanged(self) -> None:
        """Refuse queries and keys that the model has changed since, and that were kept; after the pass."""
        kept, self.versions = self.versions, []
        for path, states, version in kept:
            if version_of(states) != version:
                raise ValueError(
                    f"{path} changes its queries or keys in place after it attends, so they cannot be kept "
                    "instead of maps: give more memory=…, enough for maps"
                )

    def inside(self, path: str, chain: str) -> bool:
        """Whether a call belongs to what is traced."""
        return is_traced(self.stack, path, chain)

    def _check_weights_only(self, call: CapturedAttention) -> None:
        """Refuse what needs more of an attention than its weights."""
        if self.mixing.values or self.mixing.gradients or self.mixing.edits:
            whose = (
                "a recurrent decoder's attention" if call.recurrent else "an attention beside a convolution"
            )
            raise ValueError(
                f"mixing={self.mixing.name!r} needs more than weights, and {whose} "
                f'({call.path}) has only these: use mixing="attention"'
            )
        if call.recurrent and self.with_parts and call.part_names:
            raise ValueError(f"parts=True: {call.path} is made row by row, and has no parts: leave it out")

    def _part(self, cells: Tensor) -> Tensor:
        return _cpu_copy(cells if self.mixing.keep else cells.mean(dim=1, dtype=torch.float32))

    def finish(self, score: Callable[[], Tensor]) -> None:
        """Receive the maps that are computed after the pass."""
        for number, cells in self.mixing.maps_after(score).items():
            self.maps[number] = self._check_map(number, cells)

    def _check_map(self, number: int, cells: Tensor) -> Tensor:
        """A copy of a map, after checking its shape and sign."""
        batch, heads, queries, keys = self.shapes[number]
        shape = (batch, heads, queries, keys) if self.mixing.keep else (batch, queries, keys)
        if not isinstance(cells, Tensor) or cells.shape != shape:
            got = tuple(cells.shape) if isinstance(cells, Tensor) else f"a {type(cells).__name__}"
            raise ValueError(f"the mixing {self.mixing.name!r} must make maps of shape {shape}, got {got}")
        if self.mixing.signed is False and bool((cells < 0).any()):
            raise ValueError(
                f"the mixing {self.mixing.name!r} is not signed, but its map of "
                f"{self.calls[number].path} has {float(cells.min()):g}"
            )
        return _cpu_copy(cells)

    def map(self, number: int) -> Tensor | Asked:
        """A call's map, or its states; an error if there is none."""
        cells = self.maps[number]
        if cells is None:
            call = self.calls[number]
            raise ValueError(f"{self.mixing.title} has no map of {call.path}: {self.mixing.why_no_map(call)}")
        return cells

    def part(self, number: int, name: str) -> Tensor | None:
        """A part of a call's map; None where there is none, for example without an attached mechanism."""
        parts = self.parts[number]
        if name != FUSED or not parts:
            return parts.get(name)
        cells = self.map(number)
        assert isinstance(cells, Tensor)
        return cells

    def group(self, numbers: Sequence[int]) -> Sequence[Tensor]:
        """The maps of some calls; those of states are made when they are asked for."""
        held = [self.map(number) for number in numbers]
        if self.budget is None or all(isinstance(cells, Tensor) for cells in held):
            return [cells for cells in held if isinstance(cells, Tensor)]
        return HeldMaps(held, self.mixing.keep, self.budget.most)


def _cpu_copy(cells: Tensor) -> Tensor:
    # Neither a view of a larger tensor nor the tensor that the model goes on to use.
    return cells.detach().to("cpu", torch.float32, copy=True)


def collect(
    model: nn.Module,
    arguments: dict[str, Any],
    collector: Collector,
    score: Callable[[Any], Tensor] | None = None,
    check: Callable[[Collector], object] | None = None,
) -> Any:
    """Run the model once, in evaluation mode, under a collector; returns the model's result.

    Args:
        model: the model.
        arguments: those of its forward.
        collector: receives the maps.
        score: takes the model's result and returns the score to differentiate; None where none is needed.
        check: raises an error if the captured calls cannot be traced, before further work is done.
    """

    def scored() -> Tensor:
        if score is None:
            raise ValueError(f"{collector.mixing.title} needs a score to differentiate, and none was given")
        return score(result)

    mixing = collector.mixing
    with ExitStack() as contexts:
        watch = contexts.enter_context(
            watching(
                model,
                collector,
                values=mixing.values,
                parts=collector.with_parts,
                edits=mixing.edits,
                budget=collector.budget,
                inside=collector.inside,
            )
        )
        collector.tokenwise, collector.mixers = watch.tokenwise, watch.mixers
        collector.missed, collector.repeated = watch.missed, watch.repeated
        collector.borrowed = watch.borrowed
        contexts.enter_context(differentiable(model) if mixing.gradients else torch.no_grad())
        contexts.enter_context(mixing.around(model, watch))
        result = model(**(with_history(arguments) if mixing.gradients else arguments))
        watch.check_projected()
        collector.check_unchanged()
        if check is not None:
            check(collector)
            if watch.recognises:
                from overt.tracing.places import changes

                collector.changes = changes(model, arguments, watch)
        collector.finish(scored)
    return result


class sampling:  # noqa: N801, used like a function
    """Arguments of a forward that draws posterior sample `number`."""

    def __init__(self, model: nn.Module, inputs: Inputs, number: int, seed: int) -> None:
        from overt.attaching.state import AttachedState
        from overt.models.augmenting import augmentation_of

        self.arguments, self.number, self.seed = dict(inputs.arguments), number, seed
        self.state = next((m for m in model.modules() if isinstance(m, AttachedState)), None)
        self.drawing: Any = None
        chained, augmented = _takes_chain(model), augmentation_of(model) is not None
        if self.state is None and not ((chained or augmented) and _draws(model)):
            raise ValueError(
                "samples needs random weights: overt.attach a Bayesian(…), or give one to a model of overt's "
                "that takes a chain"
            )
        if self.state is None:
            chain = Chain(step=getattr(model, "step", 0), sample=number, seed=seed, kl=False)
            if chained:
                self.arguments["chain"] = chain
            else:
                self.drawing = chain

    def __enter__(self) -> dict[str, Any]:
        if self.state is not None:
            self.drawing = self.state.drawing(torch.tensor(self.number), torch.tensor(0), self.seed)
        if self.drawing is not None:
            self.drawing.__enter__()
        return self.arguments

    def __exit__(self, *details: object) -> None:
        if self.drawing is not None:
            self.drawing.__exit__(None, None, None)


def _draws(model: nn.Module) -> bool:
    return any(map.random for map in model.modules() if isinstance(map, AttentionMap))


def _takes_chain(model: nn.Module) -> bool:
    return "chain" in inspect.signature(model.forward).parameters
