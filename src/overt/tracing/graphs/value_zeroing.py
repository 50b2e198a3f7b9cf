"""Value zeroing (Mohebbi et al. 2023): how far a layer's outputs turn when a token's values are zeroed.

The values of token j are zeroed in all heads of a layer, and the layer is run again on what it was given; the
cosine distance of token i's output from what it was is how much i draws on j there. Queries, keys and so the
weights stay as they are. Feed-forward network and residual connection are part of the layer, hence methods
that read the maps add no residual by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overt.mechanisms.attention import MultiheadAttention
from overt.mechanisms.chain import running_again
from overt.mechanisms.mechanism import MechanismLayer
from overt.tracing.capture import Call, Watch
from overt.tracing.graphs.graph import GraphKind, register_graph
from overt.tracing.levels import unit_rows
from overt.tracing.progress import counting

MOST_ROWS = 128  # copies × examples that run at once
MOST_CELLS = 2**26  # of their weights


@register_graph
class ValueZeroing(GraphKind):
    """Cosine distances of a layer's outputs, each row made to sum to one."""

    name = "value-zeroing"
    title = "value zeroing"
    cost = "one pass of the model, and each layer again for every token"
    passes = 1
    unit = False
    signed = False
    joint = True
    residual = 0.0
    heads = False

    def __init__(self, keep: bool = False) -> None:
        super().__init__(keep)
        self.count = 0
        self.waiting: list[tuple[int, Call]] = []  # attentions whose layer is still running
        self.made: dict[int, Tensor] = {}

    def map(self, call: Call) -> None:
        """Wait for the layer to end."""
        self.waiting.append((self.count, call))
        self.count += 1

    def maps_after(self, score: Callable[[], Tensor]) -> Mapping[int, Tensor]:
        """What the layers' ends brought; an attention outside of all lists of layers has no map."""
        del score
        return self.made

    @contextmanager
    def around(self, model: nn.Module, watch: Watch) -> Iterator[None]:
        """Look at every module that may be a layer: one that a list of layers numbers."""
        for module in model.modules():
            if isinstance(module, MechanismLayer) and module.reads_below:
                raise ValueError(
                    f"{self.title} runs each layer alone, and {module.name} reads the layer below it: not "
                    "supported"
                )
        handles = [
            module.register_forward_hook(self._ended(path, watch), with_kwargs=True)
            for path, module in model.named_modules()
            if path.rpartition(".")[2].isdigit()
        ]
        try:
            with counting(f"{self.title}: layers run again") as self.tell:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _ended(self, path: str, watch: Watch) -> Callable[..., None]:
        def ended(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            own = [(number, call) for number, call in self.waiting if _layer(call) == path]
            if watch.edit is not None or not own:
                return
            self.waiting = [pair for pair in self.waiting if _layer(pair[1]) != path]
            again = _Again(path, module, args, kwargs, output, own[0][1], watch)
            turns = [again.turned(call, self.tell) for _, call in own]
            if len({call.kind == "cross" for _, call in own}) < len(own):
                raise ValueError(
                    f"{path} has {len(own)} attentions of one kind, whose tokens cannot be told apart"
                )
            # What a layer draws on by self-attention and by cross-attention is one row.
            whole = unit_rows(torch.cat(turns, dim=-1))
            parts = torch.split(whole, [cells.shape[-1] for cells in turns], dim=-1)
            self.made |= {number: cells for (number, _), cells in zip(own, parts, strict=True)}

        return ended


def _layer(call: Call) -> str:
    """Path of the layer that an attention is in; its own where it is in none."""
    if call.chain == call.path:
        return call.path
    number = call.path.removeprefix(f"{call.chain}.").partition(".")[0]
    return f"{call.chain}.{number}"


class _Again:
    """A layer that is run again, on what it was given."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        first: Call,
        watch: Watch,
    ) -> None:
        self.path, self.module, self.args, self.kwargs, self.watch = path, module, args, kwargs, watch
        self.batch, self.queries = first.weights.shape[0], first.weights.shape[2]
        attentions = [
            m for m in module.modules() if isinstance(m, nn.MultiheadAttention | MultiheadAttention)
        ]
        self.second = any(not one.batch_first for one in attentions)  # whether the batch is the second axis
        self.cells = first.weights.shape[1] * first.weights.shape[2] * first.weights.shape[3]
        # Noise is drawn for the rows of a batch, so a layer with mechanisms gets the batch that it had.
        mechanical = any(isinstance(one, MechanismLayer) for one in module.modules())
        self.copies = 1 if mechanical or self.second else self._most()
        self.whole = self._tokens(output, 1)
        again = self._unchanged(self.copies)
        if again is None and self.copies > 1:
            self.copies = 1
            again = self._unchanged(1)
        if again is None:
            raise ValueError(
                f"{path} gives something else when it is run again on what it was given: value zeroing needs "
                "layers that can run alone"
            )
        self.whole = again  # rounded as the other runs are, so that what does not change has no distance

    def _most(self) -> int:
        rows = min(MOST_ROWS, max(1, MOST_CELLS // self.cells))
        return max(1, rows // self.batch)

    def _unchanged(self, copies: int) -> Tensor | None:
        """What the layer gives when it is run on copies of its batch; None if that is not what it gave."""

        def same(path: str, value: Tensor) -> Tensor:
            del path
            return value

        try:
            found = self._run(copies, same)
        except (RuntimeError, ValueError, TypeError, IndexError):
            if copies == 1:
                raise
            return None
        exact = self.whole.dtype in (torch.float32, torch.float64)
        far = (1e-4 if exact else 0.05) * (float(self.whole.abs().amax()) or 1.0)
        if bool(((found - self.whole.repeat(copies, 1, 1)).abs() > far).any()):
            return None
        return found[: self.batch]

    def turned(self, call: Call, tell: Callable[[int, int], None]) -> Tensor:
        """Cosine distance of each output when each key's values are zeroed, float64 (batch, query, key)."""
        keys = call.weights.shape[-1]
        found = torch.zeros(self.batch, self.queries, keys, dtype=torch.float64)
        before = self.whole.double()
        for start in range(0, keys, self.copies):
            tokens = list(range(start, min(start + self.copies, keys)))
            place = torch.tensor(tokens).repeat_interleave(self.batch)

            def zeroed(path: str, value: Tensor, place: Tensor = place) -> Tensor:
                if path != call.path:
                    return value
                value = value.clone()
                value[torch.arange(len(place)), :, place] = 0.0
                return value

            after = self._run(len(tokens), zeroed).double().view(len(tokens), *before.shape)
            near = torch.nn.functional.cosine_similarity(after, before.unsqueeze(0), dim=-1)
            found[:, :, tokens] = (1.0 - near).clamp(min=0.0).permute(1, 2, 0).cpu()
            tell(tokens[-1] + 1, keys)
        return found if call.visible is None else found.masked_fill(~call.visible, 0.0)

    def _run(self, copies: int, edit: Callable[[str, Tensor], Tensor]) -> Tensor:
        """The layer's output, (copies · batch, query, width), with other values in its attention."""
        self.watch.edit = edit
        try:
            args, kwargs = self._copied(self.args, copies), self._copied(self.kwargs, copies)
            with running_again():
                return self._tokens(self.module(*args, **kwargs), copies)
        finally:
            self.watch.edit = None

    def _copied(self, value: Any, copies: int) -> Any:
        """Arguments with the batch repeated, where they have one."""
        if copies == 1:
            return value
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == self.batch:
            if self.batch == 1:
                return value.expand(copies, *value.shape[1:])
            return value.repeat(copies, *[1] * (value.dim() - 1))
        if isinstance(value, dict):
            return {name: self._copied(one, copies) for name, one in value.items()}
        if type(value) in (tuple, list):
            return type(value)(self._copied(one, copies) for one in value)
        return value

    def _tokens(self, output: Any, copies: int) -> Tensor:
        """The hidden states among what a layer returns, (copies · batch, query, width)."""
        found = output[0] if isinstance(output, tuple | list) else output
        if isinstance(found, Tensor) and found.dim() == 2 and self.batch == 1:
            found = found.unsqueeze(1 if self.second else 0)  # without a batch axis
        if isinstance(found, Tensor) and found.dim() == 3:
            found = found.transpose(0, 1) if self.second else found
            if found.shape[:2] == (copies * self.batch, self.queries):
                return found
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"{self.path} must give hidden states of shape ({self.batch}, {self.queries}, width) for value "
            f"zeroing, got {shape}"
        )
