"""Recognising attention in any PyTorch model, while it runs.

Every torch function that a model calls is seen. Three of them are attention: scaled_dot_product_attention,
flex_attention and multi_head_attention_forward. So is a softmax whose result is next multiplied with values,
over the keys. What a call is asked, and by which module, is read from its arguments; the weights that follow
from it are compared with what the call returns, and a call whose mask means something else is refused. Where
maps would not fit the budget, queries and keys are reported without weights, and some rows are compared.

For each tensor, what it was made from is followed as well: which arguments of its layer, and which earlier
attentions. Queries and keys that are projections of different arguments are those of cross-attention, and
calls of one chain must each read what the one before has written. Its axes are followed, too, so that
examples are not taken for heads, nor widths for tokens.
"""

from __future__ import annotations

import inspect
import math
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from overt._modes import in_this_thread
from overt.mechanisms.call import repeat_heads
from overt.mechanisms.site import Kind
from overt.tracing.asked import HIDDEN, Asked, Sight, version_of
from overt.tracing.asking import (
    attended,
    check_same,
    hides_later,
    mixed_rows,
    sight_of_torch_in_parts,
    some_rows,
    sum_to_one,
    tolerance,
    unrepeated,
    without_blind,
)
from overt.tracing.axes import (
    PART,
    PLAIN,
    Axes,
    Axis,
    combined,
    follow_axes,
    given,
    is_first,
    labels_of,
    plain,
)
from overt.tracing.flex import changes_scores, mask_in_blocks, mask_of, modified
from overt.tracing.masks import shown_cells, sight_of
from overt.tracing.options import check_bytes
from overt.tracing.origins import (
    DROPOUTS,
    LAYOUTS,
    MIXES,
    NOTHING,
    UNKNOWN,
    Origin,
    Origins,
    Softmax,
    dropped_by,
    earlier,
    follow,
    keep,
    side_of,
    tensors,
)
from overt.tracing.products import Letters, letters_of, shown_in, values_back, values_of
from overt.tracing.running import (
    ALONE,
    STATISTICS,
    Probe,
    Samples,
    functions_uncompiled,
    is_mixing,
    is_tokenwise,
    probe_of,
    samples_of,
)
from overt.tracing.sights import Refusal, asked_of, causal_offset, sight_of_torch, visible_of

if TYPE_CHECKING:
    from overt.tracing.budget import Budget

KNOWN = "scaled_dot_product_attention, flex_attention, multi_head_attention_forward, or a softmax over keys"
ATTENDS = re.compile(r"attention|flash_attn|attn_func")
UNORDERED = "it has batch and heads in an order that is not known: trace one example at a time"
MAPPED = "it runs inside torch.vmap, or another transform of torch.func, where nothing can be read"
SOFTMAX = re.compile(r"_?(special_|safe_)?softmax([._]|$)")
NUMBERED = re.compile(r"(?:^|\.)\d+(?=\.|$)")


@dataclass(eq=False)
class Recognised:
    """One call of an attention.

    Attributes:
        path: of the module that made it.
        kind: "encoder", "decoder" or "cross".
        weights: (batch, head, query, key); empty where queries and keys are kept instead.
        visible: boolean (batch or 1, query, key), or None for all.
        asked: queries, keys and the mask, where they are known.
        value: (batch, head, key, dim).
        output: what the call returned.
        projection: weight of the projection of its output, where the call projects.
        sums_to_one: whether rows of visible weights sum to one.
        signed: whether weights are negative somewhere.
        token: a number of its own.
        after: tokens of the calls that its queries were made from; None if unknown.
        reads: tokens of the calls that its values were made from; None if unknown.
        why_maps: why queries and keys cannot take the place of its weights, as a clause; empty if they can.
        refused: why there are no weights; empty if there are.
    """

    path: str
    kind: Kind = "encoder"
    weights: Tensor = field(default_factory=lambda: torch.empty(0))
    visible: Tensor | None = None
    asked: Asked | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    projection: Tensor | None = None
    sums_to_one: bool = True
    signed: bool = False
    token: int = 0
    after: frozenset[int] | None = None
    reads: frozenset[int] | None = None
    why_maps: str = ""
    refused: str = ""


Edit = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Reading:
    """What an attention that is captured in another way was given.

    Attributes:
        token: a number of its own.
        after: tokens of the calls that its queries were made from; None if unknown.
        reads: tokens of the calls that its values were made from; None if unknown.
        same: whether queries and keys were made from the same states.
    """

    token: int = 0
    after: frozenset[int] | None = None
    reads: frozenset[int] | None = None
    same: bool = False


@dataclass(frozen=True, eq=False)
class Mixer:
    """A module that mixes tokens without attention.

    Attributes:
        token: a number of its own among attentions.
        path: of the module.
        reads: tokens of the attentions that its arguments were made from.
    """

    token: int
    path: str
    reads: frozenset[int]


@dataclass(eq=False)
class _Frame:
    """A module that is running.

    Attributes:
        module: the module.
        path: its name in the model.
        ignored: whether its attention is captured in another way.
        origins: of tensors, by id; shared with the frame below unless the module is a layer.
        main: the first argument of the layer, among `Origin.states`.
        attended: whether attention ran in it.
        made: tokens of the attentions that ran in it.
        samples: two tokens of its arguments, if it is to be run for them alone.
        reading: of a module whose attention is captured in another way.
        probe: what it was given, to see whether it mixes tokens without attention.
        beside: the modules that ran in it and do not attend, with their probe, the axes of their output, and
            what they are if they mix tokens.
    """

    module: nn.Module
    path: str
    ignored: bool
    origins: Origins
    main: int = 0
    attended: bool = False
    made: set[int] = field(default_factory=set)
    samples: Samples | None = None
    reading: Reading | None = None
    probe: Probe | None = None
    beside: list[tuple[nn.Module, Probe, Axes, Mixer]] = field(default_factory=list)


def list_entries(path: str) -> set[str]:
    """The entries of lists of layers on a path, such as "blocks.3"."""
    return {path[: found.end()] for found in NUMBERED.finditer(path)}


class Recogniser(TorchFunctionMode):
    """Sees the torch functions that a model calls, and reports those that attend.

    Attributes:
        report: called with each attention.
        edit: returns what edits values, if they are edited.
        values: whether values and outputs are captured.
        sole: whether a model that attends nowhere is refused.
        budget: decides between maps and states; None for maps.
        inside: whether the call at a path is traced; of others, nothing but the path is reported.
        tokenwise: entries of lists of layers that do not attend, and leave each token to itself.
        mixers: modules beside attention, or between, that mix tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        ignored: set[nn.Module],
        report: Callable[[Recognised], None],
        edit: Callable[[], Edit | None],
        values: bool,
        sole: str,
        budget: Budget | None = None,
        inside: Callable[[str], bool] = lambda _: True,
    ) -> None:
        super().__init__()
        self.model, self.ignored, self.report, self.edit = model, ignored, report, edit
        self.values, self.sole, self.budget, self.inside = values, sole, budget, inside
        self.expected: set[tuple[type[nn.Module], str]] = set()  # kinds of attentions that were counted
        self.sights: dict[tuple[int, ...], tuple[Tensor, Sight]] = {}  # by masks, which layers may share
        self.paths = {module: path for path, module in model.named_modules()}
        self.frames: list[_Frame] = []
        self.batches: set[int] = set()
        self.axes: dict[int, tuple[weakref.ref[Tensor], Axes]] = {}
        self.seconds: set[int] = set()  # labels of axes that may be the batch's, after the tokens'
        self.orders: set[bool] = set()  # whether examples were on the first axis of the arguments
        self.calls: dict[str, None] = {}  # attention-like calls that were seen, in words
        self.tokenwise: set[str] = set()
        self.mixing: set[str] = set()
        self.mixers: list[Mixer] = []
        self.parameters: set[int] = set()  # where they are stored
        self.constants: dict[int, weakref.ref[Tensor]] = {}  # made from parameters alone
        self.count = 0
        self.busy = False

    # modules

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module starts to run."""
        if self.busy:
            return
        above = self.frames[-1] if self.frames else None
        path = self.paths.get(module, "")
        ignored = module in self.ignored or (above is not None and above.ignored)
        if above is None and module is self.model:
            self.batches = _batches(args, kwargs)
            for tensor, axes in given((args, kwargs)):
                self._keep_axes(tensor, axes)
                if tensor.dim() == 3 and tensor.is_floating_point():
                    self.seconds |= labels_of(axes[1])
        layer = above is None or path.rpartition(".")[2].isdigit()
        origins: Origins = {} if above is None or layer else above.origins
        frame = _Frame(module, path, ignored, origins, 0 if above is None or layer else above.main)
        if layer and not ignored:
            for tensor in tensors((args, kwargs)):
                if tensor.is_floating_point() or above is None:
                    self.count += 1
                    below = NOTHING if above is None else earlier(self._origin(tensor, above).states)
                    keep(origins, tensor, Origin(states=below | {self.count}))
                    frame.main = frame.main or self.count
        if ignored and above is not None and not above.ignored:
            frame.reading = self._reading(args, kwargs)
        looked = not ignored and self.edit() is None
        if looked and (list_entries(path) or isinstance(module, torch.jit.ScriptModule)):
            with self._unseen():
                frame.samples = samples_of(args, kwargs)
        if looked and above is not None and self._may_mix(module, args):
            with self._unseen():
                frame.probe = probe_of(args, kwargs, self._axes)
        self.frames.append(frame)

    def _reading(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
        """What a module that starts to run, and is not looked into, was given."""
        named: list[Any] = [
            kwargs.get(name, args[place] if place < len(args) else None)
            for place, name in enumerate(("query", "key", "value"))
        ]
        if not all(isinstance(each, Tensor) for each in named) or "query" not in kwargs:
            return Reading(after=self._after(*tensors((args, kwargs))))
        query, key, value = named
        asked, answering = self._origin(query).states, self._origin(key).states
        same = bool(asked) and asked == answering and query.shape == key.shape
        return Reading(0, self._after(query), self._after(value), same)

    def reading(self, path: str) -> Reading:
        """What an attention was given that was captured in another way; those of one model are a chain."""
        frame = next((frame for frame in self.frames if frame.ignored), None)
        if frame is None or frame.reading is None:
            return Reading()
        self.count += 1
        found = replace(frame.reading, token=-self.count)
        if frame.path != path and found.after is not None:
            found = replace(found, after=found.after | frame.made)
        frame.made.add(found.token)
        return found

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A module has run."""
        if self.busy or not self.frames:
            return
        frame = self.frames.pop()
        above = self.frames[-1] if self.frames else None
        if above is not None:
            above.attended |= frame.attended or frame.ignored
            above.made |= frame.made
        if output is None:  # it failed, perhaps
            return
        if above is not None:
            states = frozenset().union(*(self._origin(t, above).states for t in tensors((args, kwargs))))
            for tensor in tensors(output):
                if frame.origins is not above.origins or self._origin(tensor, above) is UNKNOWN:
                    known = self._origin(tensor, frame)
                    made = states | frame.made | earlier(known.states)
                    keep(above.origins, tensor, replace(known, states=made, sides=None, softmax=None))
            if not above.ignored:
                unknown = [tensor for tensor in tensors(output) if self._axes(tensor) is None]
                self._follow_axes(None, "", args, kwargs, unknown if frame.ignored else _alike(unknown, args))
        if not frame.ignored and not frame.attended and self.edit() is None:
            self._check_tokens(frame, above, output)
            self._put_beside(frame, above, args, kwargs, output)
        if frame.attended and self.edit() is None:
            with self._unseen():
                mixing = [each for each in frame.beside if is_mixing(each[0], each[1], each[2])]
                self.mixers += [mixer for *_, mixer in mixing]
        if above is None and module is self.model and self.sole and not frame.attended:
            shown = [*self.calls][:8] + (["…"] if len(self.calls) > 8 else [])
            seen = f"; calls seen: {', '.join(shown)}" if shown else "; it calls nothing of the kind"
            raise ValueError(
                f"{self.sole} cannot be traced: no attention was recognised ({KNOWN} that is next multiplied "
                f"with values){seen} (overt.rollout and overt.flow take weights from any source)"
            )

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """What runs inside is not looked at."""
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def _may_mix(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether a module may mix tokens: its type does not tell that it does not."""
        if isinstance(module, STATISTICS):
            return False
        axes = self._axes(args[0]) if args and isinstance(args[0], Tensor) else None
        return not isinstance(module, ALONE) or (axes is not None and bool(labels_of(axes[-1])))

    def _put_beside(self, frame: _Frame, above: _Frame | None, args: Any, kwargs: Any, output: Any) -> None:
        """Note a module that does not attend, and what it made, should it mix tokens."""
        out = next(tensors(output), None)
        axes = None if out is None else self._axes(out)
        if above is None or frame.probe is None or axes is None:
            return
        self.count += 1
        reads = earlier(frozenset().union(*(self._origin(t, above).states for t in tensors((args, kwargs)))))
        mixer = Mixer(-self.count, frame.path, reads)
        above.beside.append((frame.module, frame.probe, axes, mixer))
        above.made.add(mixer.token)
        for tensor in tensors(output):
            origin = self._origin(tensor, above)
            keep(above.origins, tensor, replace(origin, states=origin.states | {mixer.token}))

    def _check_tokens(self, frame: _Frame, above: _Frame | None, output: Any) -> None:
        """Whether a layer that does not attend leaves each token to itself."""
        scripted = isinstance(frame.module, torch.jit.ScriptModule)
        if scripted and above is not None and isinstance(above.module, torch.jit.ScriptModule):
            return
        # Those of which this module is all that runs, as far as is known.
        entries = list_entries(frame.path) - (set() if above is None else list_entries(above.path))
        if not (entries or scripted):
            return
        with self._unseen():
            alone = is_tokenwise(frame.module, frame.samples, output)
        (self.tokenwise if alone else self.mixing).update(entries)
        self.tokenwise -= self.mixing
        if scripted and not alone:
            name = getattr(frame.module, "original_name", type(frame.module).__name__)
            reason = f"{name} is scripted, so whether it attends cannot be seen: use the module behind it"
            self.report(Recognised(frame.path, refused=reason))

    # functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See one call, and make it."""
        kwargs = kwargs or {}
        if self.busy or not self.frames or self.frames[-1].ignored or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        result = self._made(func, name, args, kwargs)
        self._follow_axes(func, name, args, kwargs, result)
        return result

    def _made(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns."""
        reader = READERS.get(func) if name != "flex_attention" else Recogniser.read_flex
        if reader is not None:
            return self._read(reader, func, name, args, kwargs)
        if name in MIXES:
            return self._maybe_mix(func, name, args, kwargs)
        result = func(*args, **kwargs)
        if name == "__setitem__":
            self._written(args[0], args[2])
        elif SOFTMAX.match(name):
            self._start(args, kwargs, result)
        else:
            if ATTENDS.search(name) and isinstance(result, Tensor | tuple):
                self._refuse(name, f"it calls {name}, which is not understood")
            self._follow(func, name, args, kwargs, result)
        return result

    def _origin(self, tensor: Tensor, frame: _Frame | None = None) -> Origin:
        ref, origin = (frame or self.frames[-1]).origins.get(id(tensor), (None, UNKNOWN))
        return origin if ref is not None and ref() is tensor else UNKNOWN

    def _note(self, tensor: Tensor, origin: Origin) -> None:
        keep(self.frames[-1].origins, tensor, origin)

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note what the results were made from."""
        outs = list(tensors(result))
        if outs:
            given_tensors = list(tensors((args, kwargs)))
            inputs = [self._origin(tensor) for tensor in given_tensors]
            if all(origin is UNKNOWN for origin in inputs) and all(map(self._is_constant, given_tensors)):
                for out in outs:
                    self._keep_constant(out)
            for out, origin in follow(name, args, inputs, outs):
                softmax = origin.softmax
                if softmax is not None and softmax.shown is not None and name in LAYOUTS:
                    try:  # the same with what it saw
                        moved = replace(softmax, shown=func(softmax.shown, *args[1:], **kwargs))
                    except (TypeError, RuntimeError):
                        moved = replace(softmax, shown=None, changed=True)
                    origin = replace(origin, softmax=moved)
                softmax = origin.softmax
                if softmax is not None and name in DROPOUTS and (dropped := dropped_by(args, kwargs)):
                    origin = replace(origin, softmax=replace(softmax, dropped=dropped))
                self._note(out, origin)

    def _written(self, into: Tensor, value: Any) -> None:
        """Note what a tensor is made from once it was written into, as a cache of keys is."""
        own = self._origin(into)
        given = self._origin(value) if isinstance(value, Tensor) else UNKNOWN
        if own is UNKNOWN and given is UNKNOWN:
            return
        softmax = None if own.softmax is None else replace(own.softmax, changed=True)
        states, projected = own.states | given.states, own.projected | given.projected
        self._note(into, replace(own, states=states, projected=projected, softmax=softmax))

    def _keep_constant(self, tensor: Tensor) -> None:
        key = id(tensor)
        self.constants[key] = weakref.ref(tensor, lambda _: self.constants.pop(key, None))

    def _keep_axes(self, tensor: Tensor, axes: Axes) -> None:
        key = id(tensor)
        self.axes[key] = weakref.ref(tensor, lambda _: self.axes.pop(key, None)), axes

    def _axes(self, tensor: Tensor) -> Axes | None:
        ref, axes = self.axes.get(id(tensor), (None, None))
        return axes if ref is not None and ref() is tensor else None

    def _follow_axes(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note which axes the results have."""
        outs = list(tensors(result))
        if outs:
            known = {id(t): axes for t in tensors((args, kwargs)) if (axes := self._axes(t)) is not None}
            for out, axes in follow_axes(func, name, args, kwargs, known, outs):
                self._keep_axes(out, axes)

    def _start(self, args: Any, kwargs: Any, result: Any) -> None:
        """A softmax has run."""
        scores = next(tensors((args, kwargs)), None)
        if not isinstance(result, Tensor) or scores is None or result.dim() < 2:
            return
        self._call("softmax")
        if torch._C._functorch.is_functorch_wrapped_tensor(scores):
            return self._refuse("softmax", MAPPED)
        origin = self._origin(scores)
        seen = shown_cells(scores.detach())
        shown = None if bool(seen.all()) else seen
        axis = kwargs.get("dim", next((arg for arg in args if isinstance(arg, int)), -1))
        last = axis in (-1, result.dim() - 1)
        self._note(result, replace(origin, softmax=Softmax(shown, origin.sides, last), sides=None))

    def _call(self, name: str) -> None:
        self.calls[f"{name} in {self._path()}"] = None

    def _path(self) -> str:
        return self.frames[-1].path or type(self.model).__name__

    def _refuse(self, name: str, reason: str) -> None:
        self._call(name)
        self._attended()
        if self.edit() is None:
            self.report(Recognised(self._path(), refused=reason))

    def _attended(self) -> int:
        self.count += 1
        self.frames[-1].attended = True
        self.frames[-1].made.add(-self.count)
        return -self.count

    def _read(self, reader: Any, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """One of torch's attentions."""
        self._call(name)
        try:
            if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors((args, kwargs)))):
                raise Refusal(MAPPED)
            call = reader(self, func, args, kwargs)
        except Refusal as refusal:
            self._refuse(name, str(refusal))
            result = func(*args, **kwargs)
            self._follow(func, name, args, kwargs, result)
            return result
        return call

    def _finish(self, call: Recognised, made_from: frozenset[int]) -> Tensor:
        """Report a call, and return its output."""
        assert call.output is not None
        call.token = self._attended()
        call.path = self._path()
        output = call.output
        if self.values and output.dim() > 2:  # so that heads are joined without a copy, which is recognised
            output = call.output = output.transpose(-3, -2).contiguous().transpose(-3, -2)
        self._note(output, Origin(states=made_from | {call.token}))
        if self.edit() is None:
            self.report(call)
        return output

    def _kind(
        self,
        weights: Tensor,
        visible: Tensor | None,
        sides: tuple[frozenset[int], frozenset[int]] | None,
    ) -> Kind:
        """Self- or cross-attention, and if the first, whether it is causal."""
        queries, keys = weights.shape[-2:]
        if _across(sides, queries == keys):
            return "cross"
        if visible is None or keys < 2 or queries != keys:
            return "encoder"
        return "encoder" if bool(visible.triu(1).any()) else "decoder"

    # states

    def _wants_states(self, shape: tuple[int, ...], cell: int, why_maps: str | None = None) -> bool:
        """Whether a call is to leave queries and keys; an error where it should and cannot."""
        if self.budget is None or self.edit() is not None:
            return False
        self._expect()
        return self.budget.wants_states(shape, cell, why_maps, self._path())

    def _expect(self) -> None:
        """Count the calls to come: modules like this one, at paths that differ in the number of a layer."""
        frame = self.frames[-1]
        kind = type(frame.module), NUMBERED.sub(".#", frame.path)
        if self.budget is None or kind in self.expected:
            return
        self.expected.add(kind)
        alike = [
            path
            for path, module in self.model.named_modules(remove_duplicate=False)
            if (type(module), NUMBERED.sub(".#", path)) == kind and self.inside(path)
        ]
        self.budget.attentions += max(1, len(alike))

    def _states(
        self,
        asked: Asked,
        value: Tensor,
        output: Tensor,
        sides: tuple[frozenset[int], frozenset[int]],
        query: Tensor,
    ) -> Recognised:
        """A call without its weights, after comparing what some of them give with what it returned."""
        self._check_batch(asked.shape[0])
        rows = some_rows(asked)
        mixed, weights = mixed_rows(asked, value.expand(asked.shape[0], *value.shape[1:]), rows)
        check_same(mixed, output.reshape(*asked.shape[:3], -1)[:, :, rows], weights)
        call = Recognised("", self._kind_of(asked, sides), asked=asked, output=output)
        call.after = self._after(query)
        return call

    def _kind_of(self, asked: Asked, sides: tuple[frozenset[int], frozenset[int]]) -> Kind:
        """`_kind` of a call without its weights."""
        if _across(sides, asked.shape[2] == asked.shape[3]):
            return "cross"
        return "decoder" if hides_later(asked) else "encoder"

    def _in_parts(self, mask: Tensor, whole: Tensor, queries: int, keys: int) -> Sight:
        """A mask in parts, computed once for the layers that share it; it may be kept whole if it fits."""
        place = id(mask), version_of(mask), queries, keys
        if place not in self.sights:
            self.sights[place] = mask, sight_of(whole, queries, keys, room=self._room)
        return self.sights[place][1]

    def _room(self, count: int) -> None:
        """Refuse a mask that is kept whole, if its bytes exceed the budget."""
        what = f"the mask of {self._path()}, which is more than padding, causality, a window or chunks,"
        check_bytes(what, count, None if self.budget is None else self.budget.most, "give more memory=…")

    # torch's attentions

    def _heads(self, tensor: Tensor, name: str) -> Tensor:
        """(batch, head, token, dim) of what has no axis of heads, or joins it with the batch."""
        if tensor.is_nested or type(tensor) not in (Tensor, nn.Parameter):
            raise Refusal(f"its {name} is a {type(tensor).__name__}, which cannot be read")
        if tensor.dim() == 4:
            return tensor
        if tensor.dim() == 2:
            return tensor[None, None]
        if tensor.dim() != 3:
            raise Refusal(f"its {name} has shape {tuple(tensor.shape)}: (batch, head, token, dim) is known")
        batch = self._batch_in(tensor.shape[0], tensor)
        return tensor.reshape(batch, -1, *tensor.shape[1:])

    def _batch_in(self, size: int, values: Tensor) -> int:
        """How many examples are in an axis of batch × head."""
        if not self.batches:
            return size
        axes = self._axes(values)
        if axes is not None and (labels_of(axes[0]) or 1 in self.batches):
            leading = axes[0][0] if axes[0] else (PLAIN, 1)
            if leading[0] != PLAIN:
                return leading[1]
            if not labels_of(axes[0]):
                return 1
            raise Refusal(UNORDERED)
        batches = {batch for batch in self.batches if size % batch == 0}
        if not batches:
            raise Refusal(self._regrouped(size))
        reshaped = self._origin(values).reshaped
        if reshaped is not None and size in reshaped[1]:
            before, axis = reshaped[0], reshaped[1].index(size)
            same = len(before) == len(reshaped[1])  # (batch, head · dim) became (batch · head, dim)
            if axis < len(before) and before[axis] in batches and before[axis] != size:
                if same or before[axis + 1] != before[axis] or before[axis] == 1:
                    return before[axis]
                batches.clear()
        if batches in ({size}, {1}):
            return batches.pop()
        raise Refusal(UNORDERED)

    def _regrouped(self, size: int) -> str:
        module = type(self.frames[-1].module).__name__
        known = " or ".join(str(batch) for batch in sorted(self.batches))
        where = "of other axes of the input" if size in self.batches else f"where the input has {known}"
        return (
            f"{module} attends in windows, or regroups its batch in another way (a batch of {size} {where}): "
            "not supported"
        )

    def _check_batch(self, size: int) -> None:
        if self.batches and size not in self.batches and self.edit() is None:
            raise Refusal(self._regrouped(size))

    def _check_axes(self, lead: Axes, queries: Axis, keys: Axis, width: Axis) -> None:
        """Refuse a map whose axes are not examples, heads and tokens, as far as they are known.

        Args:
            lead: axes before the queries, (batch, head) or (batch · head).
            queries: axis of the queries.
            keys: axis of the keys.
            width: axis of the values' numbers.
        """
        if self.edit() is not None or len(lead) > 2:
            return
        if labels_of(width):
            raise Refusal(
                "it attends between channels, not tokens: keys that are not tokens are not supported"
            )
        if len(lead) == 2:
            batch, heads = lead
        else:
            (joined,) = lead or ((),)
            outer = bool(joined) and joined[0][0] != PLAIN
            batch, heads = (joined[:1], joined[1:]) if outer else ((), joined)
        size = math.prod(size for _, size in batch)
        if not labels_of(batch) and (labels_of(heads) or (batch and batch == heads and size in self.batches)):
            raise Refusal(UNORDERED)
        label = batch[0][0] if batch else PLAIN
        if labels_of(heads) or (labels_of(batch) and (len(batch) > 1 or label == PART)):
            raise Refusal(self._regrouped(size))
        if label < 0:
            return
        along = labels_of(queries) | labels_of(keys)
        if not is_first(label) and (label not in self.seconds or not all(map(is_first, along))):
            raise Refusal(self._regrouped(size))
        self.orders.add(is_first(label))
        if len(self.orders) > 1:
            raise Refusal(
                "other attentions have its examples for tokens, and its tokens for examples: not supported"
            )

    def _check_states(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """`_check_axes` of queries, keys and values, each (…, token, dim)."""
        q, k, v = (self._axes(tensor) or plain(tensor) for tensor in (query, key, value))
        lead = combined([each[:-2] for each in (q, k, v)], query.shape[:-2])
        if lead is not None:
            self._check_axes(lead, q[-2], k[-2], q[-1] + k[-1] + v[-1])

    def read_sdpa(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """torch's scaled dot-product attention."""

        def named(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            *,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            if dropout_p:
                raise Refusal(f"it drops out in evaluation, too (dropout_p={dropout_p:g})")
            made = self._made_from(query, key, value)
            sides = self._origin(query).projected, self._origin(key).projected
            names = ((query, "query"), (key, "key"), (value, "value"))
            edit = self.edit()
            if edit is not None:
                shape = value.shape
                value = edit(self._path(), value.view(-1, *shape[-3:]) if len(shape) > 3 else value[:, None])
                value = value.reshape(shape)
                options = {"scale": scale, "enable_gqa": enable_gqa}
                output = func(query, key, value, attn_mask, dropout_p, is_causal, **options)
                return self._finish(Recognised("", output=output), made)
            if not self.inside(self._path()):
                return self._finish(Recognised("", output=func(*args, **kwargs)), made)
            q, k, v = (_as_computed(self._heads(tensor, name)) for tensor, name in names)
            self._check_states(query, key, value)
            scaling = q.shape[-1] ** -0.5 if scale is None else scale
            cells = asked_of(q, k, scaling, Sight()).shape
            states = self._wants_states(cells, torch.promote_types(q.dtype, torch.float32).itemsize)
            output = func(*args, **kwargs)  # its own error for a mask that it does not take
            sight = Sight(causal=True) if is_causal else Sight()
            if attn_mask is not None:
                offset = causal_offset(attn_mask)
                sight = Sight(causal=True, offset=offset or 0)
                if offset is None:
                    mask = self._mask(attn_mask, q, k)
                    if states:
                        sight = self._in_parts(attn_mask, mask, *cells[2:])
                    else:
                        sight = sight_of(mask, *cells[2:], exact=True)
            asked = asked_of(q, unrepeated(k) if states else k, scaling, sight)
            answer = self._states if states else self._answer
            with _full_precision(query):
                call = answer(asked, v, output, sides, query)
            call.reads = self._after(value)
            return self._finish(call, made)

        return named(*args, **kwargs)

    def _answer(
        self,
        asked: Asked,
        value: Tensor,
        output: Tensor,
        sides: tuple[frozenset[int], frozenset[int]],
        query: Tensor,
        weights: Tensor | None = None,
        visible: Tensor | None = None,
        known: bool = True,
    ) -> Recognised:
        """A call with its weights, after comparing what they give with what it returned."""
        self._check_batch(asked.shape[0])
        dtype = torch.promote_types(asked.query.dtype, torch.float32)
        if weights is None:
            weights, visible = asked.weights(dtype), visible_of(asked)
        mixed = weights @ repeat_heads(value.expand(weights.shape[0], *value.shape[1:]), weights.shape[1]).to(
            dtype
        )
        mixed = mixed.reshape(output.shape)
        check_same(mixed.detach(), output.detach(), weights.detach())
        if torch.is_grad_enabled() and weights.requires_grad:
            output = mixed.to(output.dtype)  # through the weights, so that they have gradients
        call = Recognised("", "encoder", weights, visible, asked if known else None, value, output)
        call.kind = self._kind(weights, visible, sides)
        call.after = self._after(query)
        return call

    def _after(self, *tensors: Tensor) -> frozenset[int] | None:
        origins = [self._origin(tensor) for tensor in tensors]
        if all(origin is UNKNOWN for origin in origins):
            return None
        return frozenset().union(*(earlier(origin.states) for origin in origins))

    def _made_from(self, *tensors: Tensor) -> frozenset[int]:
        return frozenset().union(*(self._origin(tensor).states for tensor in tensors))

    def _mask(self, mask: Any, query: Tensor, key: Tensor) -> Tensor:
        """A mask as (batch or 1, head or 1, query or 1, key)."""
        if not isinstance(mask, Tensor) or type(mask) not in (Tensor, nn.Parameter) or mask.is_nested:
            raise Refusal(f"its mask is a {type(mask).__name__}, which cannot be read")
        if mask.dim() == 3 and query.shape[1] * query.shape[0] == mask.shape[0]:
            mask = mask.view(query.shape[0], query.shape[1], *mask.shape[1:])
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        if mask.dim() != 4:
            raise Refusal(f"its mask has shape {tuple(mask.shape)}, which cannot be read")
        whole: Tensor = mask.expand(-1, -1, -1, key.shape[-2])
        return whole

    def read_flex(self, func: Any, args: Any, kwargs: Any) -> Any:
        """FlexAttention, as it is called by torch.nn.attention.flex_attention.flex_attention."""

        def named(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            score_mod: Any,
            block_mask: tuple[Any, ...],
            scale: float,
            kernel_options: dict[str, Any],
            *others: Any,
            **more: Any,
        ) -> Any:
            del others, more
            return query, key, value, score_mod, block_mask, scale, kernel_options

        query, key, value, score_mod, block_mask, scale, options = named(*args, **kwargs)
        made = self._made_from(query, key, value)
        sides = self._origin(query).projected, self._origin(key).projected
        edit = self.edit()
        if edit is not None:
            edited = edit(self._path(), value)
            result = func(query, key, edited, *args[3:], **kwargs)
            return (self._finish(Recognised("", output=result[0]), made), *result[1:])
        if not self.inside(self._path()):
            result = func(*args, **kwargs)
            return (self._finish(Recognised("", output=result[0]), made), *result[1:])
        self._check_states(query, key, value)
        unmasked = asked_of(query, key, scale, Sight())
        why = f"the score_mod of {self._path()} changes scores" if changes_scores(score_mod) else None
        if options.get("OUTPUT_LOGSUMEXP") or options.get("OUTPUT_MAX"):
            why = f"{self._path()} asks flex_attention for sums or maxima of scores, which need all of them"
        if self._wants_states(unmasked.shape, torch.promote_types(query.dtype, torch.float32).itemsize, why):
            asked = self._flex_in_parts(unmasked, block_mask)
            nothing = query.new_empty(0)
            call = Recognised("", self._kind_of(asked, sides), asked=asked, output=attended(asked, value))
            call.after, call.reads = self._after(query), self._after(value)
            return self._finish(call, made), nothing, nothing
        with _full_precision(query):
            asked, weights, visible, additive = _flexible(unmasked, score_mod, block_mask[-1])
        result = func(*args, **kwargs)
        with _full_precision(query):
            call = self._answer(asked, value, result[0], sides, query, weights, visible, additive)
        call.reads, call.why_maps = self._after(value), why or ""
        return (self._finish(call, made), *result[1:])

    def _flex_in_parts(self, asked: Asked, block_mask: tuple[Any, ...]) -> Asked:
        """A call of FlexAttention with its mask in parts; as a whole, the mask must fit the budget, too."""
        assert self.budget is not None
        lead = block_mask[2].shape[:2]  # 1 where the mask is the same for all examples or heads
        shape = (*lead, *asked.shape[2:])
        remedy = "give more memory=…"
        check_bytes(f"the mask of {self._path()}", math.prod(shape), self.budget.most, remedy)
        try:
            mask = mask_in_blocks(block_mask[-1], shape, asked.query.device)
        except Exception as error:
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise Refusal(f"its mask_mod cannot be read ({line})") from error
        sight = sight_of(mask, *asked.shape[2:], room=self._room)
        self._check_batch(asked.shape[0])
        return asked_of(asked.query, asked.key, asked.scale, sight)

    def read_multi_head(self, func: Any, args: Any, kwargs: Any) -> Any:
        """torch's functional multi-head attention: its weights are requested of it."""
        named = inspect.signature(func).bind(*args, **kwargs)
        named.apply_defaults()
        given: dict[str, Any] = dict(named.arguments)
        if given["add_zero_attn"] or given["bias_k"] is not None or given["static_k"] is not None:
            raise Refusal("bias_k, static_k and add_zero_attn give it keys that are not tokens")
        if given["training"] and given["dropout_p"]:
            raise Refusal(f"it drops out in evaluation, too (dropout_p={given['dropout_p']:g})")
        query, key = given["query"], given["key"]
        made = self._made_from(query, key, given["value"])
        need, average = given["need_weights"], given["average_attn_weights"]
        if not self.inside(self._path()) and self.edit() is None:
            output, weights = func(*args, **kwargs)
            return self._finish(Recognised("", output=output), made), weights
        shape = shape_of_torch(given)
        if self._wants_states(shape, query.element_size()):
            output, weights = func(*args, **kwargs)  # weights only where the model itself requests them
            return self._finish(self._states_of_torch(given, shape, output), made), weights
        output, weights = func(**{**given, "need_weights": True, "average_attn_weights": False})
        seeing = weights if need else without_blind(weights, query, key)
        unbatched = weights.dim() == 3
        whole = seeing.unsqueeze(0) if unbatched else seeing
        q, k, v = _projected(given, unbatched)
        edit = self.edit()
        if edit is not None:
            v = edit(self._path(), v)
        if edit is not None or torch.is_grad_enabled() or self.values or seeing is not weights:
            joined = (whole @ v).transpose(1, 2).flatten(2)
            again = F.linear(joined, given["out_proj_weight"], given["out_proj_bias"])
            output = again[0] if unbatched else again.transpose(0, 1)
        if edit is None:
            self._check_batch(whole.shape[0])
            asked = asked_of(q, k, q.shape[-1] ** -0.5, sight_of_torch(given, whole))
            dtype = torch.promote_types(q.dtype, torch.float32)
            with _full_precision(q):
                apart = (asked.weights(dtype).detach() - whole.detach()).nan_to_num().abs().max()
            if float(apart) > tolerance(q.dtype):
                raise Refusal(f"its weights are not those of its mask (they differ by {float(apart):.1g})")
            call = Recognised("", "encoder", whole, visible_of(asked), asked, v)
            call.projection = given["out_proj_weight"]
            same = key is query or (key.shape == query.shape and torch.equal(key, query))
            call.kind = self._kind(whole, call.visible, None) if same else "cross"
            call.after, call.reads = self._after(query), self._after(given["value"])
            call.path, call.token = self._path(), self._attended()
            self.report(call)
            self._note(output, Origin(states=made | {call.token}))
        if not need:
            return output, None
        return output, weights.mean(dim=-3) if average else weights

    def _states_of_torch(self, given: dict[str, Any], shape: tuple[int, ...], output: Tensor) -> Recognised:
        """A call of torch's functional attention, without its weights."""
        self._check_batch(shape[0])
        sight = sight_of_torch_in_parts(given, shape, self._room)
        asked = asked_of_torch(given, sight, output)
        call = Recognised("", asked=asked, output=output)
        query, key = given["query"], given["key"]
        if key is not query and not (key.shape == query.shape and torch.equal(key, query)):
            call.kind = "cross"
        elif hides_later(asked):
            call.kind = "decoder"
        call.after, call.reads = self._after(query), self._after(given["value"])
        return call

    # a softmax, times values

    def _maybe_mix(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A product: it may be of weights with values."""
        factors = list(tensors((args, kwargs)))
        if name == "__rmatmul__":
            func, name, args = torch.matmul, "matmul", (args[1], args[0])
            factors.reverse()
        origins = [self._origin(tensor) for tensor in factors]
        place = next((n for n, origin in enumerate(origins) if origin.softmax is not None), None)
        if len(factors) == 2 and place is not None and self._is_made(factors[1 - place]):
            softmax = origins[place].softmax
            assert softmax is not None
            equation = next((arg for arg in args if isinstance(arg, str)), None)
            try:
                letters = letters_of(equation, factors, place)
                if letters is not None and self._over_tokens(factors, place, softmax, letters):
                    return self._mix(func, equation, factors, place, softmax, letters)
            except Refusal as refusal:
                self._refuse("softmax", str(refusal))
        result = func(*args, **kwargs)
        self._follow(func, name, args, kwargs, result)
        return result

    def _is_made(self, values: Tensor) -> bool:
        """Whether values are states of the model, not one of its parameters, nor made from them alone."""
        return self._origin(values) is not UNKNOWN or not self._is_constant(values)

    def _is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer of the model, or made from them alone."""
        ref = self.constants.get(id(tensor))
        if ref is not None and ref() is tensor:
            return True
        if not self.parameters:
            known = (*self.model.parameters(), *self.model.buffers())
            self.parameters = {parameter.untyped_storage().data_ptr() for parameter in known}
        try:
            return tensor.untyped_storage().data_ptr() in self.parameters
        except (RuntimeError, NotImplementedError):  # it has none
            return False

    def _over_tokens(self, factors: list[Tensor], place: int, softmax: Softmax, letters: Letters) -> bool:
        """Whether a softmax that is not of products of queries and keys may be weights of tokens.

        A gate, or a router, is none: what it sums over is a width, or the experts of one token.
        """
        if softmax.sides is not None:
            return True
        columns = self._axes(factors[1 - place])
        if columns is not None:
            summed = letters.values.index(letters.columns[-2])
            if factors[1 - place].shape[summed] > 1 and not labels_of(columns[summed]):
                return False
        sums = factors[place].detach().double().sum(dim=letters.weights.index(letters.rows[-1]))
        return bool(((sums - 1).abs() < tolerance(factors[place].dtype)).logical_or(~(sums > 0)).all())

    def _mix(
        self,
        func: Any,
        equation: str | None,
        factors: list[Tensor],
        place: int,
        softmax: Softmax,
        letters: Letters,
    ) -> Tensor:
        """Weights times values."""
        weights, values = factors[place], factors[1 - place]
        made = self._made_from(weights, values)
        order = [letters.weights.index(letter) for letter in letters.rows]
        rows = weights.permute(order)
        axes, columns = self._axes(weights) or plain(weights), self._axes(values) or plain(values)
        width = columns[letters.values.index(letters.columns[-1])]
        ordered = tuple(axes[place] for place in order)
        self._check_axes(ordered[:-2], ordered[-2], ordered[-1], width)
        whole, back = self._as_map(rows, values)
        value = values_of(values, letters, whole)
        edit = self.edit()
        if edit is not None:
            value = edit(self._path(), value)
            factors[1 - place] = values_back(value, values, letters)
        elif torch.is_grad_enabled() and weights.requires_grad:
            inverse = [order.index(axis) for axis in range(len(order))]
            factors[place] = whole.reshape(back).permute(inverse)
        output = func(*([] if equation is None else [equation]), *factors)
        call = Recognised("", "encoder", whole, None, None, value, output)
        call.why_maps = f"{self._path()} makes its weights itself, by a softmax"
        if edit is None and self.inside(self._path()):
            self._expect()
            self._check_batch(whole.shape[0])
            if softmax.dropped:
                raise Refusal(f"it drops out in evaluation, too (p={softmax.dropped:g})")
            call.sums_to_one = sum_to_one(whole)
            if not call.sums_to_one and not (softmax.changed and softmax.last):
                raise Refusal("its softmax is not over the keys whose values it is multiplied with")
            call.signed = bool((whole.detach() < 0).any())
            call.visible = shown_in(softmax.shown, order, whole, softmax.changed)
            sides = softmax.sides
            if sides is None:  # queries passed through something that is not seen
                sides = frozenset({self.frames[-1].main}), side_of(self._origin(values))
            call.kind = self._kind(whole, call.visible, sides)
            if (
                softmax.sides is None
                and any(map(labels_of, axes))
                and ordered[-2]
                and not labels_of(ordered[-2])
            ):
                call.kind = "cross"  # its queries are no tokens
            call.after = None if softmax.sides is None else self._after(weights)
            call.reads = self._after(values)
            if not torch.is_grad_enabled():
                call.weights = whole.nan_to_num(nan=0.0)  # of queries that see no key
        return self._finish(call, made)

    def _as_map(self, rows: Tensor, values: Tensor) -> tuple[Tensor, torch.Size]:
        """Weights as (batch, head, query, key), and the shape that they had."""
        shape = rows.shape
        if rows.dim() == 2:
            return rows[None, None], shape
        if rows.dim() == 3:
            batch = self._batch_in(shape[0], values)
            return rows.reshape(batch, shape[0] // batch, *shape[1:]), shape
        if rows.dim() == 4:
            return rows.reshape(shape), shape
        raise Refusal(f"its weights have shape {tuple(shape)}: (batch, head, query, key) is known")


READERS: dict[Any, Any] = {
    F.scaled_dot_product_attention: Recogniser.read_sdpa,
    torch.ops.aten.scaled_dot_product_attention.default: Recogniser.read_sdpa,
    F.multi_head_attention_forward: Recogniser.read_multi_head,
}


def _batches(args: Any, kwargs: Any) -> set[int]:
    """How many examples the model's arguments may hold."""
    found: set[int] = set()
    for tensor in tensors((args, kwargs)):
        if tensor.dim():
            found.add(tensor.shape[0])
        if tensor.dim() == 3 and tensor.is_floating_point():
            found.add(tensor.shape[1])  # (token, batch, width)
        if tensor.dim() == (2 if tensor.is_floating_point() else 1):
            found.add(1)  # without a batch
    return found


def _across(sides: tuple[frozenset[int], frozenset[int]] | None, square: bool) -> bool:
    """Whether queries and keys are of different sequences, by what each is a projection of."""
    if sides is None or not (sides[0] or sides[1]):
        return not square
    return not sides[0] & sides[1]  # one of them may come from elsewhere than the layer's arguments


def _alike(outs: list[Tensor], args: tuple[Any, ...]) -> list[Tensor]:
    """Results of a module that have the shape of its first argument, and so, it is assumed, its axes."""
    shape = args[0].shape if args and isinstance(args[0], Tensor) else None
    return [out for out in outs if out.shape == shape]


def _flexible(unmasked: Asked, score_mod: Any, mask_mod: Any) -> tuple[Asked, Tensor, Tensor | None, bool]:
    """What FlexAttention was asked, its weights, what is visible, and whether scores are only added to."""
    try:
        shown = mask_of(mask_mod, unmasked)
        scores = unmasked.scores(torch.promote_types(unmasked.query.dtype, torch.float32))
        changed = modified(score_mod, scores)
        bias = modified(score_mod, torch.zeros_like(scores))
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise Refusal(f"its mask_mod or score_mod cannot be read ({line})") from error
    additive = torch.allclose(changed, scores + bias, atol=1e-5, rtol=1e-5)
    sight = sight_of(shown, *shown.shape[-2:], exact=True)
    if bool(bias.any()):
        hidden = torch.where(shown, bias, HIDDEN)
        sight = Sight(bias=hidden)
    whole = changed.masked_fill(~shown, HIDDEN)
    blind = (whole == HIDDEN).all(dim=-1, keepdim=True)
    weights = whole.masked_fill(blind, 0.0).softmax(dim=-1).masked_fill(blind, 0.0)
    visible = None if bool(shown.all()) else shown.any(dim=1).cpu()
    return replace(unmasked, sight=sight), weights, visible, additive


def _full_precision(tensor: Tensor) -> Any:
    """Leave autocast, which would round weights as they are computed."""
    return torch.autocast(tensor.device.type, enabled=False)


def _as_computed(tensor: Tensor) -> Tensor:
    """A tensor as torch's attention takes it under autocast."""
    device = tensor.device.type
    if tensor.dtype != torch.float32 or not torch.is_autocast_enabled(device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))


def _projected(given: dict[str, Any], unbatched: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (batch, head, token, dim), of torch's functional attention."""
    width, heads = given["embed_dim_to_check"], given["num_heads"]
    bias = given["in_proj_bias"]
    if given["use_separate_proj_weight"]:
        matrices = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        matrices = list(given["in_proj_weight"].split(width))
    biases = [None] * 3 if bias is None else list(bias.split(width))
    found = []
    for name, matrix, shift in zip(("query", "key", "value"), matrices, biases, strict=True):
        x = F.linear(given[name], matrix, shift)
        x = x.unsqueeze(1) if unbatched else x
        found.append(x.reshape(*x.shape[:2], heads, -1).permute(1, 2, 0, 3))
    return found[0], found[1], found[2]


def shape_of_torch(given: dict[str, Any]) -> tuple[int, int, int, int]:
    """Of the map of torch's functional attention."""
    query = given["query"]
    batch = query.shape[1] if query.dim() == 3 else 1
    return batch, given["num_heads"], query.shape[0], given["key"].shape[0]


def asked_of_torch(given: dict[str, Any], sight: Sight, output: Tensor) -> Asked:
    """Queries and keys of torch's functional attention; an error if some rows are not what it returned.

    Args:
        given: its arguments.
        sight: its masks.
        output: what it returned, (query, batch, width), or without a batch.
    """
    unbatched = given["query"].dim() == 2
    q, k, v = _projected(given, unbatched)
    asked = asked_of(q, k, q.shape[-1] ** -0.5, sight)
    rows = some_rows(asked)
    mixed, weights = mixed_rows(asked, v, rows)
    joined = mixed.transpose(1, 2).flatten(2).to(q.dtype)
    again = F.linear(joined, given["out_proj_weight"], given["out_proj_bias"])
    found = output[rows].unsqueeze(1) if unbatched else output[rows]
    check_same(again, found.transpose(0, 1), weights.sum(dim=1))
    return asked


@contextmanager
def recognising(recogniser: Recogniser) -> Iterator[None]:
    """Recognise what a model calls inside."""
    with ExitStack() as stack:
        for module in recogniser.paths:
            for handle in (
                module.register_forward_pre_hook(in_this_thread(recogniser.enter), with_kwargs=True),
                module.register_forward_hook(
                    in_this_thread(recogniser.leave), with_kwargs=True, always_call=True
                ),
            ):
                stack.callback(handle.remove)
        stack.enter_context(functions_uncompiled())
        stack.enter_context(recogniser)
        yield
