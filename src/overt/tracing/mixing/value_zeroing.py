"""Value zeroing (Mohebbi et al. 2023): how far a layer's outputs turn when a token's values are zeroed.

The values of token j are zeroed in all heads of a layer, and the layer is run again on the same inputs; the
cosine distance between token i's new and original outputs is how much i draws on j there. Queries and keys,
and so the weights, stay as they are. The feed-forward network and the residual connection are part of the
layer, so methods that read the maps add no residual by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overt._modes import in_this_thread
from overt.mechanisms.attention import MultiheadAttention
from overt.mechanisms.chain import running_again
from overt.mechanisms.mechanism import MechanismLayer
from overt.tracing.capture import CapturedAttention, Watch
from overt.tracing.copies import Copies, Edit
from overt.tracing.levels import unit_rows
from overt.tracing.mixing.layers import is_layer, layer_of, states_in
from overt.tracing.mixing.mixing import Mixing, register_mixing
from overt.tracing.progress import counting

MOST_ROWS = 128  # copies × examples that run at once
MOST_CELLS = 2**26  # of their attention weights
MOST_TOKENS = 2**13  # of them, where the copies share their attention weights
MOST_ON_GPU = 2**15


@register_mixing
class ValueZeroing(Mixing):
    """Cosine distances of a layer's outputs, with rows normalised to sum to one."""

    name = "value-zeroing"
    title = "value zeroing"
    cost = "one pass of the model, and each layer again for every token"
    edits = True
    passes = 1
    unit = False
    signed = False
    joint = True
    residual = 0.0
    heads = False

    def __init__(self, keep: bool = False) -> None:
        super().__init__(keep)
        self.calls: dict[str, list[CapturedAttention]] = {}  # by layer, until the layer ends
        self.runs: list[_Run] = []

    def map(self, call: CapturedAttention) -> None:
        """Wait for the layer to end."""
        layer = layer_of(call)
        if layer is not None:
            shape = torch.empty(call.weights.shape, device="meta")  # the weights themselves are not needed
            self.calls.setdefault(layer, []).append(replace(call, weights=shape))

    def why_no_map(self, call: CapturedAttention) -> str:
        """It is in no layer."""
        del call
        return "it is in no layer that runs alone"

    @contextmanager
    def around(self, model: nn.Module, watch: Watch) -> Iterator[None]:
        """Record the inputs of every layer, that is, of every numbered member of a list of layers."""
        for module in model.modules():
            if isinstance(module, MechanismLayer) and module.reads_below:
                raise ValueError(
                    f"{self.title} runs each layer alone, and {module.name} reads the layer below it: not "
                    "supported"
                )
        self.watch = watch
        handles = [
            module.register_forward_hook(in_this_thread(self._end_hook(path)), with_kwargs=True)
            for path, module in model.named_modules()
            if is_layer(path)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _end_hook(self, path: str) -> Callable[..., None]:
        def ended(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls = self.calls.pop(path, None) if self.watch.edit is None else None
            if calls is None:
                return
            if len({call.kind == "cross" for call in calls}) < len(calls):
                raise ValueError(
                    f"{path} has {len(calls)} attentions of one kind, whose tokens cannot be distinguished"
                )
            self.runs.append(_Run(path, module, args, kwargs, output, calls))

        return ended

    def maps_after(self, score: Callable[[], Tensor]) -> Mapping[int, Tensor]:
        """Run each layer again, now that the model has ended and its hooks record nothing more."""
        del score
        maps: dict[int, Tensor] = {}
        with counting(f"{self.title}: layers run again") as report:
            while self.runs:
                run = self.runs.pop(0)
                again = _Rerun(run, self.watch)
                turns = [again.distances_of(call, report) for call in run.calls]
                # What a layer draws on by self-attention and cross-attention forms one row.
                whole = unit_rows(torch.cat(turns, dim=-1))
                parts = torch.split(whole, [cells.shape[-1] for cells in turns], dim=-1)
                maps |= {call.number: cells for call, cells in zip(run.calls, parts, strict=True)}
        return maps


class _Run(NamedTuple):
    """A layer's run in the pass."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    calls: list[CapturedAttention]


class _Rerun:
    """Runs a layer again on its recorded inputs, on as many copies of them at once as it takes."""

    def __init__(self, run: _Run, watch: Watch) -> None:
        self.path, self.module, self.watch = run.path, run.module, watch
        self.shared = ""  # path of the attention whose weights the copies share
        self.args, self.kwargs = _without_cache(run.args), _without_cache(run.kwargs)
        shapes = [call.weights.shape for call in run.calls]
        self.batch, self.queries = shapes[0][0], shapes[0][2]
        self.second = self._batch_is_second(run.output)
        # Where a mechanism draws noise, it is for the rows of a batch, and copies differ.
        self.mechanical = any(isinstance(module, MechanismLayer) for module in run.module.modules())
        self.whole = self._tokens(run.output, 1)
        again = None
        for shared, copies in self._ways([call.path for call in run.calls], shapes):
            self.shared, self.copies = shared, copies
            again = self._unchanged(copies)
            if again is not None:
                break
        if again is None:
            raise ValueError(
                f"{self.path} gives another output when it is run again on the same inputs: value zeroing "
                "needs layers that can run alone"
            )
        self.whole = again  # rounded like the other runs, so that unchanged outputs have distance 0

    def _ways(self, paths: Sequence[str], shapes: Sequence[torch.Size]) -> Iterator[tuple[str, int]]:
        """Ways to run it, fastest first: path of the attention whose copies share weights, or "", and copies.

        The last one runs on the original batch.
        """
        keys = max(keys for *_, keys in shapes)
        if not self.second and len(paths) == 1 and paths[0] in self.watch.takes_copies:
            tokens = MOST_ON_GPU if self.whole.device.type == "cuda" else MOST_TOKENS
            copies = min(MOST_ROWS, tokens // max(self.queries, keys)) // self.batch
            if copies > 1:  # every run has as many, so that what holds for the first holds for the last
                runs = -(-keys // copies)
                yield paths[0], -(-keys // runs)
        rows = min(MOST_ROWS, MOST_CELLS // max(heads * queries * keys for _, heads, queries, keys in shapes))
        copies = 1 if self.second else min(rows // self.batch, keys)
        if copies > 1:
            yield "", copies
        yield "", 1

    def _batch_is_second(self, output: Any) -> bool:
        """Whether the layer takes (token, batch, width), as torch's attention does by default."""
        kinds = nn.MultiheadAttention | MultiheadAttention
        attentions = [module for module in self.module.modules() if isinstance(module, kinds)]
        if all(attention.batch_first for attention in attentions):
            return False
        if self.batch != self.queries:
            shape = tuple(states_in(output, "value zeroing").shape[:2])
            return shape == (self.queries, self.batch)
        # As many examples as tokens: the axis that doubles with the batch is the batch axis.
        batches: set[int] = set()

        def look(path: str, value: Tensor) -> Tensor:
            del path
            batches.add(value.shape[0])
            return value

        try:
            self._call_layer(2, look)
        except (RuntimeError, ValueError, TypeError, IndexError):
            batches = set()
        if batches not in ({self.batch}, {2 * self.batch}):
            raise ValueError(
                f"{self.path} was given {self.batch} examples of {self.queries} tokens, and its axes "
                "cannot be distinguished: trace one example at a time"
            )
        return batches == {self.batch}

    def _unchanged(self, copies: int) -> Tensor | None:
        """The layer's output on copies of its batch; None if it differs from the original output.

        Copies that share weights must not change each other's outputs: all but the first and the last are
        given other values, and are not looked at.
        """
        kept = {*range(copies)}
        if self.shared:
            kept = {0, copies - 1} if copies > 2 else {0}

        def others_changed(path: str, value: Tensor) -> Tensor:
            if path != self.shared:
                return value
            own = value.reshape(copies, -1, *value.shape[1:]).clone()
            for copy in {*range(copies)} - kept:
                own[copy] = 2 * own[copy].roll(1 + copy, dims=2)
            return own.flatten(0, 1)

        try:
            states = self._run(copies, others_changed)
        except Exception as error:
            if copies > 1:  # also that of a hook which reads weights, as copies that share them have none
                return None
            if not isinstance(error, RuntimeError | ValueError | TypeError | IndexError):
                raise
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"{self.path} cannot be run again on the same inputs ({line}): value zeroing needs layers "
                "that can run alone"
            ) from error
        whole = self.whole.double()
        size = torch.linalg.vector_norm(whole, dim=-1)
        exact = self.whole.dtype in (torch.float32, torch.float64)
        near = 1e-4 if self.mechanical and copies > 1 and not self.shared else 1e-3
        by_copy = states.reshape(copies, *whole.shape)
        for copy in kept:
            far = torch.linalg.vector_norm(by_copy[copy].double() - whole, dim=-1)
            if bool((far > (near if exact else 0.1) * size).any()):
                return None
        return by_copy[0]

    def distances_of(self, call: CapturedAttention, report: Callable[[int, int], None]) -> Tensor:
        """Cosine distance of each output when each key's values are zeroed, float64 (batch, query, key)."""
        keys = call.weights.shape[-1]
        distances = torch.zeros(self.batch, self.queries, keys, dtype=torch.float64)
        before = torch.nn.functional.normalize(self.whole.double(), dim=-1)
        for start in range(0, keys, self.copies):
            tokens = list(range(start, min(start + self.copies, keys)))
            count = self.copies if self.shared else len(tokens)
            place = torch.tensor(tokens + tokens[-1:] * (count - len(tokens))).repeat_interleave(self.batch)

            def zeroed(path: str, value: Tensor, place: Tensor = place) -> Tensor:
                if path != call.path:
                    return value
                value = value.clone()
                value[torch.arange(len(place)), :, place] = 0.0
                return value

            after = self._run(count, zeroed).double().view(count, *before.shape)[: len(tokens)]
            # 1 − cos(a, b) = ‖a/|a| − b/|b|‖² / 2, which is zero where nothing changed.
            apart = torch.nn.functional.normalize(after, dim=-1) - before
            distances[:, :, tokens] = (0.5 * apart.square().sum(dim=-1)).permute(1, 2, 0).cpu()
            report(tokens[-1] + 1, keys)
        return distances if call.visible is None else distances.masked_fill(~call.visible, 0.0)

    def _run(self, copies: int, edit: Edit) -> Tensor:
        """The layer's output, (copies · batch, query, width), with edited values in its attention."""
        return self._tokens(self._call_layer(copies, edit), copies)

    def _call_layer(self, copies: int, edit: Edit) -> Any:
        self.watch.edit = edit
        shared = Copies(self.shared, copies) if self.shared and copies > 1 else None
        self.watch.copies = shared
        try:
            args, kwargs = (self._repeat_batch(each, copies, shared) for each in (self.args, self.kwargs))
            with running_again(), torch.compiler.set_stance("force_eager"):
                return self.module(*args, **kwargs)
        finally:
            self.watch.edit = self.watch.copies = None

    def _repeat_batch(self, value: Any, copies: int, shared: Copies | None) -> Any:
        """Arguments with the batch repeated, if they have one."""
        if copies == 1:
            return value
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == self.batch:
            if self.batch == 1:
                repeated = value.expand(copies, *value.shape[1:])
            else:
                repeated = value.repeat(copies, *[1] * (value.dim() - 1))
            if shared is not None:
                shared.note(repeated, value)
            return repeated
        return _map_entries(value, lambda entry: self._repeat_batch(entry, copies, shared))

    def _tokens(self, output: Any, copies: int) -> Tensor:
        """The hidden states among what a layer returns, (copies · batch, query, width)."""
        states = states_in(output, "value zeroing")
        if states.dim() == 2 and self.batch == 1:
            states = states.unsqueeze(1 if self.second else 0)  # without a batch axis
        ordered = states.transpose(0, 1) if self.second and states.dim() == 3 else states
        if ordered.dim() == 3 and ordered.shape[:2] == (copies * self.batch, self.queries):
            return ordered
        raise ValueError(
            f"{self.path} must return hidden states of shape ({self.batch}, {self.queries}, width) for value "
            f"zeroing, got {tuple(states.shape)}"
        )


def _without_cache(value: Any) -> Any:
    """Arguments without a cache of keys and values, which a second run would extend."""
    if hasattr(value, "get_seq_length") and hasattr(value, "update"):
        return None
    return _map_entries(value, _without_cache)


def _map_entries(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to each entry of a plain tuple, list or dict; anything else stays unchanged."""
    if type(value) is dict:
        return {name: change(entry) for name, entry in value.items()}
    if type(value) in (tuple, list):
        return type(value)(change(entry) for entry in value)
    return value
