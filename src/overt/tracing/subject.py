"""A model with the batch that was traced, for the methods that run the model.

The score that they explain is the probability of the target: a class, or a token at a position. For a model
with a single output, the score is that output.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from overt._modes import device_of
from overt._predictions import Link, link_of, linked
from overt.tracing.inputs import Inputs
from overt.tracing.options import numbers

Output = Callable[[Any], Tensor]
IDS = ("input_ids", "decoder_input_ids")
TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")


class Subject:
    """A model with the batch that was traced.

    Attributes:
        model: the model, in evaluation mode while a method runs it.
        inputs: the batch; `inputs.arguments` are the arguments of the model's forward and hold the caller's
            own tensors, which `rows` copies.
        mask: boolean (batch, token).
        first: the token that is query 0.
        kind: the kind of the trace: "encoder", "causal", "encoder–decoder" or "pixels".
        output: extracts logits, (batch, classes) or (batch, position, classes), from what the model returns.
        layers: names of the layers to run again in a backward pass rather than keep what they computed; none
            where it all fits.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, mask: Tensor, first: int, kind: str, output: Output | None
    ) -> None:
        self.model, self.inputs, self.mask, self.first, self.kind = model, inputs, mask, first, kind
        self.output = output
        self.layers: list[str] = []
        self.contrasts = False

    def why_not(self, what: str) -> str | None:
        """Why a method that runs the model cannot be used; None if it can."""
        if self.kind == "pixels":
            return (
                f"no {what} of a map's pixels: convolutions mix what the network sees before and beside "
                "attention, so they are not its inputs; raw shows the maps"
            )
        if not getattr(self.model, "random_outputs", False):
            return None
        random = f"the outputs of {type(self.model).__name__} are random, in evaluation mode as well"
        return f"no {what}: {random}, so runs cannot be compared; methods that read maps can be used"

    def logits(self, arguments: dict[str, Any], last: int | None = None) -> Tensor:
        """(batch, position, classes); a single position where the model has one output for all tokens.

        Args:
            arguments: those of the model's forward.
            last: of so many of the last positions alone, as `last_positions` says.
        """
        # The model may have moved since the trace.
        device = device_of(self.model)
        moved = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in arguments.items()}
        if last is None:
            return self.logits_in(self.model(**moved))
        logits: Tensor = self.model(**moved, logits_to_keep=last).logits
        assert logits.shape[1] == last
        return logits

    def last_positions(self, queries: Any) -> int | None:
        """How many of the last positions hold all queries, if the model can be asked for their logits alone.

        None if it cannot, or if the queries reach back to the first position.
        """
        if self.kind != "causal" or self.output is not None or queries is None:
            return None
        takes = "logits_to_keep" in inspect.signature(self.model.forward).parameters
        positions = self.mask.shape[1] - self.first
        if not takes or "logits_to_keep" in self.inputs.arguments:
            return None
        last = positions - min(numbers("queries", queries, positions))
        return last if last < positions else None

    def some(self, rows: list[int]) -> Subject:
        """The same model with some of the examples."""
        batch, index = self.mask.shape[0], torch.tensor(rows)
        from overt.tracing.images import of_examples  # on first use

        given = self.inputs.arguments
        arguments = {name: take(value, index, batch) for name, value in given.items()}
        inputs = replace(self.inputs, arguments=arguments | of_examples(self.model, given, rows))
        if inputs.labels is not None:
            inputs.labels = take(inputs.labels, index, batch)
        part = Subject(self.model, inputs, self.mask[rows], self.first, self.kind, self.output)
        part.layers = self.layers
        return part

    def logits_in(self, given: Any) -> Tensor:
        """The logits in what the model returned, in the shape that `logits` returns."""
        logits: Tensor | None = self._logits_or_none(given)
        if logits is None:
            raise ValueError(
                f"{type(self.model).__name__} returns no logits to explain: use a model with a head, or "
                "give trace(…, output=…), a function that extracts the logits from what it returns"
            )
        self.contrasts = self.contrasts or self._contrasts(given)
        if logits.dim() == 2:
            return logits.unsqueeze(1)
        if logits.dim() != 3 or logits.shape[1] != self.mask.shape[1] - self.first:
            raise ValueError(
                "logits must have shape (batch, classes), or one row for each of the "
                f"{self.mask.shape[1] - self.first} queries, got {tuple(logits.shape)}"
            )
        return logits

    def _logits_or_none(self, result: Any) -> Any:
        """The logits in what the model returned; None where there are none."""
        if self.output is not None:
            return self.output(result)
        if isinstance(result, Tensor):
            return result
        name = "logits"
        if self._contrasts(result):
            name = "logits_per_image" if self.inputs.grid is not None else "logits_per_text"
        return result.get(name) if isinstance(result, dict) else getattr(result, name, None)

    def outputs_in(self, given: Any, queries: list[int]) -> Tensor | None:
        """Each example's logits at its query (or its only ones), (batch, classes), in float32 on the CPU.

        None where there is no `output` function, and nothing in the result is known to be the logits of this
        trace's examples and queries.
        """
        if self.output is None and not self._has_logits(given):
            return None
        logits = self.logits_in(given).detach()
        if logits.shape[0] != len(queries):
            return None
        places = [0] * len(queries) if logits.shape[1] == 1 else queries
        return logits[list(range(len(queries))), places].to("cpu", torch.float32, copy=True)

    def _has_logits(self, result: Any) -> bool:
        """Whether the result has logits; if per position, the positions must be the traced stack's."""
        if self.kind == "pixels" and getattr(self.model, "num_classes", None) == 0:
            return False  # features
        logits, positions = self._logits_or_none(result), self.mask.shape[1] - self.first
        if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
            return False
        if logits.dim() == 2:
            labels = getattr(getattr(self.model, "config", None), "num_labels", logits.shape[1])
            # One logit per token (ELECTRA's discriminator) is not a row of classes.
            return self._contrasts(result) or logits.shape[1] != positions or labels == positions
        if isinstance(result, Tensor) or logits.shape[1] != positions:
            return False  # a tensor with a row for each token may just as well be hidden states
        # The traced stack may lie below the one that outputs the logits, and have the same length by chance.
        inputs = self.inputs.arguments
        return self.kind != "encoder" or not (
            "decoder_input_ids" in inputs or (self.inputs.grid is not None and "input_ids" in inputs)
        )

    @property
    def texts(self) -> list[str]:
        """Names of the arguments that hold the token ids of the traced stack; an image has none."""
        of_image = self.inputs.grid is not None
        encoder_decoder = self.kind == "encoder–decoder"
        names = [name for name in IDS if (name == "decoder_input_ids" and encoder_decoder) or not of_image]
        names = [self._named(name) for name in names]
        return [name for name in names if isinstance(self.inputs.arguments.get(name), Tensor)]

    def _named(self, name: str) -> str:
        """The model's own name of `input_ids`."""
        return str(self.inputs.extra.get("ids", name)) if name == "input_ids" else name

    def first_token(self, name: str, what: str) -> int:
        """The token that an argument's first id is; an error where its ids are not the tokens of the maps."""
        pair = self.kind == "encoder–decoder"
        start = self.first if name == "decoder_input_ids" else 0
        tokens = (self.first if pair and not start else self.mask.shape[1]) - start
        ids = self.inputs.arguments[name]
        if ids.shape != (len(self.mask), tokens):
            raise ValueError(
                f"{what} needs an id for each token: {name} has shape {tuple(ids.shape)}, and attention runs "
                f"over {tokens} tokens, so the model adds or pools some; methods that read maps can be used"
            )
        return start

    @staticmethod
    def _contrasts(result: Any) -> bool:
        """Whether the output compares every text with every image, as CLIP's does."""
        return isinstance(result, dict) and "logits_per_text" in result

    def rows(self, arguments: dict[str, Any], example: Tensor) -> dict[str, Any]:
        """Arguments of a batch of copies of these examples.

        The other side of a contrastive model stays as it is: its inputs are the classes.
        """
        batch = self.mask.shape[0]
        from overt.tracing.images import of_examples  # on first use

        traced_side = ("pixel_values",) if self.inputs.grid is not None else TEXT
        taken = {
            name: value if self.contrasts and name not in traced_side else take(value, example, batch)
            for name, value in arguments.items()
        }
        return taken | of_examples(self.model, arguments, example.tolist())

    def score(
        self, logits: Tensor, target: Tensor, queries: list[int], against: Tensor | None = None
    ) -> Tensor:
        """What is explained, (batch, query).

        The probability of the target; for a regression, the output itself; with `against`, by how much the
        target's logit exceeds that of the other class.

        Args:
            logits: (batch, position, classes).
            target: (batch, query).
            queries: positions.
            against: (batch, query), or None.
        """
        logits = logits[:, queries].double()
        if against is not None:
            both = torch.stack([target, against], dim=-1)
            found = logits.gather(-1, both)
            return found[..., 0] - found[..., 1]
        if logits.shape[-1] == 1:
            return logits[:, :, 0]
        p = linked(logits, self.link(logits.shape[-1]))
        return p.gather(-1, target.unsqueeze(-1)).squeeze(-1)

    def link(self, classes: int) -> Link:
        """How logits over this many classes become probabilities."""
        return link_of(getattr(self.model, "config", None), classes)

    def labels(self, classes: int) -> list[str]:
        """Names of the classes that the model has; empty where the number of classes differs."""
        if self.kind == "pixels":
            known = getattr(self.model, "labels", None)
            return list(known) if isinstance(known, list) and len(known) == classes else []
        names = getattr(getattr(self.model, "config", None), "id2label", None)
        if self.contrasts or not isinstance(names, dict) or set(names) != set(range(classes)):
            return []  # a contrastive model chooses from the other side's batch
        return [str(names[number]) for number in range(classes)]

    def speaks(self, classes: int) -> bool:
        """Whether the classes are the tokens of a known tokenizer."""
        config: Any = getattr(self.model, "config", None)
        tokenizer = self.inputs.tokenizer
        if tokenizer is None or self.contrasts:
            return False
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        return classes in (getattr(text, "vocab_size", None), len(tokenizer))

    def places(self, logits: Tensor, queries: Any, last: int | None = None) -> list[int]:
        """Positions of the output to explain; position 0 where the model has one output for all tokens.

        Args:
            logits: (batch, position, classes).
            queries: positions, as the caller gave them.
            last: how many of the last positions the logits are of; None for all.
        """
        if last is None:
            return [0] if logits.shape[1] == 1 else numbers("queries", queries, logits.shape[1])
        positions = self.mask.shape[1] - self.first
        return [place - positions + last for place in numbers("queries", queries, positions)]

    def target(self, logits: Tensor, target: Any, queries: list[int]) -> Tensor:
        """(batch, query): the given target, the label, the next token of the input, or the prediction."""
        _, positions, classes = logits.shape
        likely = logits[:, queries].argmax(dim=-1)
        labels = self.inputs.labels
        if labels is not None and (labels.is_floating_point() or classes == 1):
            labels = None  # several labels at once, or a number: no class to explain
        if target is None and labels is not None and labels.dim() == 1 and positions == 1:
            target = labels
        aligned = labels is not None and labels.dim() == 2 and labels.shape[1] == positions
        if target is None and labels is not None and aligned and self.kind != "causal":
            chosen = labels.to(logits.device)[:, queries]
            return torch.where(chosen < 0, likely, chosen)
        if target is None and positions > 1 and self.kind != "encoder":
            name = "decoder_input_ids" if self.kind == "encoder–decoder" else "input_ids"
            ids = self.inputs.arguments.get(self._named(name))
            if isinstance(ids, Tensor):
                # The logits may be those of the last positions alone.
                start = self.mask.shape[1] - self.first - positions
                at = [start + query for query in queries]
                ids = ids.to(logits.device)
                real = self.mask[:, self.first :].to(ids.device)
                following = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)[:, at]
                known = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)[:, at]
                return torch.where(known, following, likely)
        if target is None:
            return likely
        return self._classes("target", target, logits, len(queries))

    def against(self, logits: Tensor, against: Any, target: Tensor, queries: list[int]) -> Tensor | None:
        """(batch, query): the class that the target is compared with; None for none."""
        if against is None:
            return None
        if logits.shape[-1] == 1:
            raise ValueError("against needs a model with several classes, and this one has a single output")
        found = self._classes("against", against, logits, len(queries))
        equal = (found == target.to(found.device)).nonzero()
        if len(equal):
            where = f", which is the target of query {queries[int(equal[0, 1])]}" if len(queries) > 1 else ""
            raise ValueError(f"against must be another class than the target, got {against!r}{where}")
        return found

    def _classes(self, name: str, given: Any, logits: Tensor, queries: int) -> Tensor:
        """Classes as the caller gave them, by number or name, (batch, query)."""
        batch, _, classes = logits.shape
        given = self._numbered(name, given, classes)
        try:
            chosen = torch.as_tensor(given, device=logits.device)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"{name} must be the number of a class, or one per example, got {given!r}"
            ) from None
        if chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise ValueError(f"{name} must hold numbers of classes, which are whole, got {given!r}")
        if chosen.dim() == 0:
            chosen = chosen.expand(batch)
        if chosen.dim() == 1:
            chosen = chosen.unsqueeze(1).expand(-1, queries)
        if chosen.shape != (batch, queries):
            raise ValueError(
                f"{name} must be one class, one per example ({batch}) or one per example and query, "
                f"got shape {tuple(chosen.shape)}"
            )
        if classes > 1 and (int(chosen.min()) < 0 or int(chosen.max()) >= classes):
            raise ValueError(f"{name} must lie in 0 to {classes - 1}, got {chosen.flatten().tolist()}"[:120])
        return chosen if classes > 1 else torch.zeros_like(chosen)

    def _numbered(self, name: str, given: Any, classes: int) -> Any:
        """Classes with numbers in place of names: tokens of the tokenizer, or labels."""
        if isinstance(given, list | tuple):
            return [self._numbered(name, each, classes) for each in given]
        if not isinstance(given, str):
            return given
        if self.speaks(classes):
            tokenizer = self.inputs.tokenizer
            pieces = tokenizer(given, add_special_tokens=False)["input_ids"]
            if len(pieces) != 1:
                shown = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(pieces))) or "none"
                raise ValueError(
                    f"{name} must be one token, and {given!r} has {len(pieces)} pieces: {shown}; give one "
                    "token, or its id"
                )
            if pieces[0] == tokenizer.unk_token_id and given.strip() != tokenizer.unk_token:
                raise ValueError(
                    f"{name} must be a token that the tokenizer has, and {given!r} is unknown to it"
                )
            return int(pieces[0])
        labels = self.labels(classes)
        if not labels and self.kind != "encoder":
            raise ValueError(f"{name} needs a tokenizer to name tokens by, or an id; got {given!r}")
        if given not in labels:
            known = ", ".join(map(repr, labels[:12])) or "none"
            raise ValueError(
                f"{name} must be the number of a class, or its name, got {given!r}; names: {known}"
            )
        return labels.index(given)


def take(value: Any, index: Tensor, batch: int) -> Any:
    """A copy of some rows of an argument that has one row per example; anything else unchanged."""
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch:
        return value.index_select(0, index.to(value.device))
    return value


def with_history(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments through which gradients can flow: tensors made in inference mode are copied."""
    return {
        name: value.clone() if isinstance(value, Tensor) and value.is_inference() else value
        for name, value in arguments.items()
    }


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Turn gradients on, also for a frozen model and inside inference mode; flags are restored."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            for parameter, _ in flags:
                if parameter.is_floating_point():
                    parameter.requires_grad_()
            yield
    finally:
        for parameter, flag in flags:
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)


@contextmanager
def checkpointed(model: nn.Module, layers: list[str]) -> Iterator[None]:
    """Gradients at the inputs alone, for which each layer runs again in the backward pass.

    Parameters are frozen, so that nothing is kept for their gradients; everything is restored.

    Args:
        model: the model, in evaluation mode.
        layers: names of its layers; none leaves the model as it is.
    """
    from torch.utils.checkpoint import checkpoint

    def again(run: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return forward

    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()] if layers else []
    modules = [model.get_submodule(name) for name in layers]
    # Hooks of other libraries, such as those that load a layer's weights, are instances' own forward.
    earlier = [vars(module).get("forward") for module in modules]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        for module in modules:
            object.__setattr__(module, "forward", again(module.forward))
        yield
    finally:
        for module, forward in zip(modules, earlier, strict=True):
            if forward is None:
                vars(module).pop("forward", None)
            else:
                object.__setattr__(module, "forward", forward)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
