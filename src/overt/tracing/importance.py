"""What the model itself says of its inputs: blank-out and gradients, to judge maps against.

The score that they explain is the probability of the target: a class, or a token at a position. A model with
a single output is explained by that output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from overt import _check
from overt._extras import need
from overt.tracing.capture import evaluating
from overt.tracing.graph import numbers
from overt.tracing.inputs import Inputs, check_ids, patch_of

Output = Callable[[Any], Tensor]
Gradient = Literal["norm", "input", "integrated"]
Link = Literal["softmax", "sigmoid", "identity"]
IDS = ("input_ids", "decoder_input_ids")
TEXT = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
MOST_LOGITS = 2**27  # of the ablations that run at once


class Subject:
    """A model with the batch that was traced.

    Attributes:
        model: in any mode; it runs in evaluation mode.
        inputs: the batch.
        mask: boolean (batch, token).
        first: the token that is query 0.
        kind: of the trace.
        output: takes logits, (batch, classes) or (batch, position, classes), from what the model returns.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, mask: Tensor, first: int, kind: str, output: Output | None
    ) -> None:
        self.model, self.inputs, self.mask, self.first, self.kind = model, inputs, mask, first, kind
        self.output = output
        self.contrasts = False

    def logits(self, arguments: dict[str, Any]) -> Tensor:
        """(batch, position, classes); one position where the output is one for all."""
        device = next((p.device for p in self.model.parameters()), None)  # it may have moved since the trace
        moved = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in arguments.items()}
        return self.logits_in(self.model(**moved))

    def some(self, rows: list[int]) -> Subject:
        """The same model with some of the examples."""
        batch, index = self.mask.shape[0], torch.tensor(rows)
        inputs = replace(
            self.inputs, arguments={n: take(v, index, batch) for n, v in self.inputs.arguments.items()}
        )
        if inputs.labels is not None:
            inputs.labels = take(inputs.labels, index, batch)
        return Subject(self.model, inputs, self.mask[rows], self.first, self.kind, self.output)

    def logits_in(self, given: Any) -> Tensor:
        """The logits in what the model returned, as `logits` gives them."""
        found = self._found(given)
        if found is None:
            raise ValueError(
                f"{type(self.model).__name__} returns no logits to explain: use a model with a head, or "
                "give trace(…, output=…), a function from what it returns to logits"
            )
        logits: Tensor = found
        self.contrasts = self.contrasts or self._contrasts(given)
        if logits.dim() == 2:
            return logits.unsqueeze(1)
        if logits.dim() != 3 or logits.shape[1] != self.mask.shape[1] - self.first:
            raise ValueError(
                "logits must have shape (batch, classes), or one row for each of the "
                f"{self.mask.shape[1] - self.first} queries, got {tuple(logits.shape)}"
            )
        return logits

    def _found(self, given: Any) -> Any:
        """What stands for logits in what the model returned; None where nothing does."""
        if self.output is not None:
            return self.output(given)
        if isinstance(given, Tensor):
            return given
        name = "logits"
        if self._contrasts(given):
            name = "logits_per_image" if self.inputs.grid is not None else "logits_per_text"
        return given.get(name) if isinstance(given, dict) else getattr(given, name, None)

    def outputs_in(self, given: Any, queries: list[int]) -> Tensor | None:
        """(batch, classes) in float32 on the CPU: one query's logits of each example, or its only ones.

        None where there is no `output` to take them and nothing that is known to be logits of this
        trace's examples and queries.
        """
        if self.output is None and not self._answers(given):
            return None
        logits = self.logits_in(given).detach()
        if logits.shape[0] != len(queries):
            return None
        places = [0] * len(queries) if logits.shape[1] == 1 else queries
        return logits[list(range(len(queries))), places].to("cpu", torch.float32, copy=True)

    def _answers(self, given: Any) -> bool:
        """Whether there are logits, of the traced stack's positions where they are of positions."""
        logits, positions = self._found(given), self.mask.shape[1] - self.first
        if not isinstance(logits, Tensor) or logits.dim() not in (2, 3):
            return False
        if logits.dim() == 2:
            labels = getattr(getattr(self.model, "config", None), "num_labels", logits.shape[1])
            # One logit per token (ELECTRA's discriminator) is no row of classes.
            return self._contrasts(given) or logits.shape[1] != positions or labels == positions
        if isinstance(given, Tensor) or logits.shape[1] != positions:
            return False  # a tensor with a row for each token may as well be hidden states
        # The stack that was traced may be below the one that answers, and as long by chance.
        inputs = self.inputs.arguments
        return self.kind != "encoder" or not (
            "decoder_input_ids" in inputs or (self.inputs.grid is not None and "input_ids" in inputs)
        )

    @property
    def texts(self) -> list[str]:
        """Arguments that hold the token ids of the traced stack; an image's has none."""
        pictured = self.inputs.grid is not None
        pair = self.kind == "encoder–decoder"
        wanted = [name for name in IDS if (name == "decoder_input_ids" and pair) or not pictured]
        return [name for name in wanted if isinstance(self.inputs.arguments.get(name), Tensor)]

    @staticmethod
    def _contrasts(given: Any) -> bool:
        """Whether the output compares every text with every image, as CLIP's does."""
        return isinstance(given, dict) and "logits_per_text" in given

    def rows(self, arguments: dict[str, Any], example: Tensor) -> dict[str, Any]:
        """Arguments of a batch of copies of these examples.

        A contrasting model's other side stays as it is: its inputs are the classes.
        """
        batch = self.mask.shape[0]
        own = ("pixel_values",) if self.inputs.grid is not None else TEXT
        return {
            name: value if self.contrasts and name not in own else take(value, example, batch)
            for name, value in arguments.items()
        }

    def score(self, logits: Tensor, target: Tensor, queries: list[int]) -> Tensor:
        """Probability of the target, (batch, query); a single output itself."""
        logits = logits[:, queries].double()
        if logits.shape[-1] == 1:
            return logits[:, :, 0]
        config = getattr(self.model, "config", None)
        several = getattr(config, "problem_type", None) == "multi_label_classification"
        p = logits.sigmoid() if several else logits.softmax(dim=-1)
        return p.gather(-1, target.unsqueeze(-1)).squeeze(-1)

    def link(self, classes: int) -> Link:
        """How logits of so many classes become probabilities."""
        problem = getattr(getattr(self.model, "config", None), "problem_type", None)
        if classes == 1 or problem == "regression":
            return "identity"
        return "sigmoid" if problem == "multi_label_classification" else "softmax"

    def labels(self, classes: int) -> list[str]:
        """Names of the classes, as the model's config has them; none where it has another number."""
        named = getattr(getattr(self.model, "config", None), "id2label", None)
        if self.contrasts or not isinstance(named, dict) or set(named) != set(range(classes)):
            return []  # what a contrasting model chooses from is the other side's batch
        return [str(named[number]) for number in range(classes)]

    def speaks(self, classes: int) -> bool:
        """Whether the classes are the tokens of a tokenizer that is known."""
        config: Any = getattr(self.model, "config", None)
        tokenizer = self.inputs.tokenizer
        if tokenizer is None or self.contrasts:
            return False
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        return classes in (getattr(text, "vocab_size", None), len(tokenizer))

    def places(self, logits: Tensor, queries: Any) -> list[int]:
        """Positions of the output to explain; the only one, whatever is asked, where there is one."""
        return [0] if logits.shape[1] == 1 else numbers("queries", queries, logits.shape[1])

    def target(self, logits: Tensor, target: Any, queries: list[int]) -> Tensor:
        """(batch, query): as given, as labelled, the next token of the input, or what the model predicts."""
        batch, positions, classes = logits.shape
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
            ids = self.inputs.arguments.get(name)
            if isinstance(ids, Tensor):
                ids = ids.to(logits.device)
                real = self.mask[:, self.first :].to(ids.device)
                following = torch.cat([ids[:, 1:], ids[:, -1:]], dim=1)[:, queries]
                known = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)[:, queries]
                return torch.where(known, following, likely)
        if target is None:
            return likely
        try:
            given = torch.as_tensor(target, device=logits.device)
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"target must be the number of a class, or one per example, got {target!r}"
            ) from None
        if given.is_floating_point():
            raise ValueError(f"target must hold classes, got {given.dtype}")
        if given.dim() == 0:
            given = given.expand(batch)
        if given.dim() == 1:
            given = given.unsqueeze(1).expand(-1, len(queries))
        if given.shape != (batch, len(queries)):
            raise ValueError(
                f"target must be one class, one per example ({batch}) or one per example and query, "
                f"got shape {tuple(given.shape)}"
            )
        if classes > 1 and (int(given.min()) < 0 or int(given.max()) >= classes):
            raise ValueError(f"target must lie in 0 to {classes - 1}, got {given.flatten().tolist()}"[:120])
        return given if classes > 1 else torch.zeros_like(given)


@torch.no_grad()
def blankout(
    subject: Subject,
    queries: Any = None,
    target: Any = None,
    unk: int | None = None,
    absolute: bool = False,
    rows: int | None = None,
) -> Tensor:
    """p(target) − p(target | the token blanked out), (batch, 1, query, token); `absolute` drops the sign.

    All ablations run as rows of a few batches. A token becomes `unk`, the tokenizer's unknown token by
    default; a patch of an image becomes 0, which is the mean colour after the usual normalisation.
    """
    if rows is not None:
        _check.whole("rows", rows, 1)
    inputs, mask, model = subject.inputs, subject.mask, subject.model
    with evaluating(model):
        logits = subject.logits(inputs.arguments)
        places = subject.places(logits, queries)
        goal = subject.target(logits, target, places)
        whole = subject.score(logits, goal, places)
        cells = _blanks(subject, unk)
        batch, tokens = mask.shape
        found = torch.zeros(batch, len(places), tokens, dtype=torch.float64)
        pairs = [(b, t) for t, b in torch.nonzero(mask.T).tolist() if _blanked(subject, cells, b, t)]
        if rows is None:
            rows = min(max(MOST_LOGITS // (logits.shape[1] * logits.shape[2]), 1), 128)
        classes = logits.shape[-1]
        del logits
        for start in range(0, len(pairs), rows):
            part = pairs[start : start + rows]
            example = torch.tensor([b for b, _ in part])
            arguments = subject.rows(inputs.arguments, example)
            for row, (_, token) in enumerate(part):
                name, index, filler = cells[token]
                arguments[name][(row, *index)] = filler
            device = goal.device
            changed = subject.logits(arguments)
            if changed.shape[-1] != classes:
                raise ValueError(
                    f"the output has {classes} classes, and {changed.shape[-1]} where {len(part)} rows run "
                    "at once: classes that depend on the batch cannot be explained"
                )
            score = subject.score(changed, goal[example.to(device)], places)
            change = (whole[example.to(device)] - score).cpu()
            found[example, :, [t for _, t in part]] = change
    return (found.abs() if absolute else found).unsqueeze(1)


def _blanked(subject: Subject, cells: dict[int, Any], example: int, token: int) -> bool:
    """Whether a token can be blanked out; the places of an image within a text cannot."""
    if token not in cells:
        return False
    name, index, _ = cells[token]
    config = getattr(subject.model, "config", None)
    images = {getattr(config, key, None) for key in ("image_token_id", "image_token_index")} - {None}
    return name == "pixel_values" or int(subject.inputs.arguments[name][(example, *index)]) not in images


def take(value: Any, index: Tensor, batch: int) -> Any:
    """Rows of an argument that has one per example, as a copy; anything else as it is."""
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == batch:
        return value.index_select(0, index.to(value.device))
    return value


def _blanks(subject: Subject, unk: int | None) -> dict[int, tuple[str, tuple[Any, ...], float]]:
    """Token → the argument, the cells of a row of it, and what goes there to blank it out."""
    inputs, source = subject.inputs, subject.first
    cells: dict[int, tuple[str, tuple[Any, ...], float]] = {}
    if inputs.grid is not None and inputs.image is not None:
        patch = patch_of(subject.model)
        assert patch is not None
        count = inputs.grid[0] * inputs.grid[1]
        length = source if subject.kind == "encoder–decoder" else subject.mask.shape[1]
        for number in range(count):
            row, column = divmod(number, inputs.grid[1])
            down = slice(row * patch[0], (row + 1) * patch[0])
            across = slice(column * patch[1], (column + 1) * patch[1])
            cells[length - count + number] = ("pixel_values", (slice(None), down, across), 0.0)
    for name in subject.texts:
        ids = inputs.arguments[name]
        filler = inputs.unknown if unk is None else unk
        if filler is None:
            raise ValueError("blank-out needs the id of an unknown token: give unk=…")
        _check.whole("unk", filler, 0)
        check_ids(subject.model, torch.tensor([filler]), "unk")
        start = source if name == "decoder_input_ids" else 0
        if start == 0 and subject.kind == "encoder–decoder" and ids.shape[1] != source:
            continue
        cells |= {start + token: (name, (token,), int(filler)) for token in range(ids.shape[1])}
    if not cells:
        raise ValueError(
            "blank-out needs input_ids or pixel_values to change, "
            f"the model was given {', '.join(inputs.arguments)}"
        )
    return cells


def gradients(
    subject: Subject,
    queries: Any = None,
    target: Any = None,
    kind: Gradient = "norm",
    unk: int | None = None,
    steps: int = 50,
) -> Tensor:
    """Gradient of p(target) at the embeddings, or at an image's pixels, (batch, 1, query, token).

    Args:
        subject: model and batch.
        queries: positions of the output, for models with one output per position.
        target: what is explained.
        kind: "norm", the L2 norm over the embedding; "input", gradient × input, signed; "integrated",
            integrated gradients from a sentence of unknown tokens (captum), signed.
        unk: id of the unknown token, for "integrated".
        steps: of the integral.
    """
    _check.one_of("kind", kind, ("norm", "input", "integrated"))
    _check.whole("steps", steps, 1)
    rows = []
    with (
        evaluating(subject.model),
        torch.inference_mode(False),
        torch.enable_grad(),
        _Leaves(subject) as leaves,
    ):
        logits = subject.logits(leaves.arguments)
        places = subject.places(logits, queries)
        goal = subject.target(logits.detach(), target, places)
        score = subject.score(logits, goal, places)
        for number, place in enumerate(places):
            if kind == "integrated":
                products = _integrated(subject, leaves, goal[:, number], place, unk, steps)
                rows.append(leaves.tokens([product.double() for product in products]))
                continue
            again = number + 1 < len(places)
            found = torch.autograd.grad(score[:, number].sum(), leaves.values, retain_graph=again)
            if kind == "norm":
                rows.append(leaves.tokens([gradient.double().square() for gradient in found]).sqrt())
            else:
                pairs = zip(found, leaves.values, strict=True)
                rows.append(leaves.tokens([(gradient * x.detach()).double() for gradient, x in pairs]))
    found_rows = torch.stack(rows, dim=1)
    return found_rows.masked_fill(~subject.mask.unsqueeze(1), 0.0).unsqueeze(1)


def with_history(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments that gradients can be taken with: tensors made in inference mode are copied."""
    return {
        name: value.clone() if isinstance(value, Tensor) and value.is_inference() else value
        for name, value in arguments.items()
    }


@contextmanager
def differentiable(model: nn.Module) -> Iterator[None]:
    """Gradients on, also through a frozen model and inside of inference mode; flags come back."""
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


def _integrated(
    subject: Subject, leaves: _Leaves, goal: Tensor, place: int, unk: int | None, steps: int
) -> tuple[Tensor, ...]:
    """Integrated gradients at each leaf, by captum."""
    method = need("captum.attr", "interpret").IntegratedGradients
    unknown = subject.inputs.unknown if unk is None else unk
    if unknown is None and leaves.modules:
        raise ValueError("integrated gradients start from unknown tokens: give unk=…")
    batch = subject.mask.shape[0]

    def score(*values: Tensor) -> Tensor:
        times = values[0].shape[0] // batch
        arguments = subject.rows(leaves.arguments, torch.arange(batch).repeat(times))
        with leaves.replaced(values, arguments):
            logits = subject.logits(arguments)
        places = [0] if logits.shape[1] == 1 else [place]
        return subject.score(logits, goal.repeat(times).unsqueeze(1), places).squeeze(1)

    found: tuple[Tensor, ...] = method(score).attribute(
        tuple(leaves.values), tuple(leaves.blank(unknown)), n_steps=steps, internal_batch_size=max(batch, 64)
    )
    return found


class _Leaves:
    """The inputs that gradients are taken at: token embeddings, or the pixels of an image.

    While it is entered, embeddings that read the input ids give leaves of the graph instead of parts of it.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.arguments = with_history(subject.inputs.arguments)
        self.names: list[str] = []
        self.values: list[Tensor] = []
        self.modules: list[tuple[nn.Module, int]] = []  # and which of its calls in a forward
        self.replacing: tuple[Tensor, ...] | None = None
        self.calls: dict[nn.Module, int] = {}
        self.handles: list[Any] = []
        if subject.inputs.grid is not None:
            pixels = self.arguments["pixel_values"].detach().clone().requires_grad_()
            self.arguments["pixel_values"] = pixels
            self.names.append("pixel_values")
            self.values.append(pixels)

    def __enter__(self) -> _Leaves:
        for module in self.subject.model.modules():
            if isinstance(module, nn.Embedding):
                self.handles.append(module.register_forward_hook(self._look))
        return self

    def __exit__(self, *details: object) -> None:
        for handle in self.handles:
            handle.remove()

    @contextmanager
    def replaced(self, values: tuple[Tensor, ...], arguments: dict[str, Any]) -> Iterator[None]:
        """Let other values stand where the leaves stood."""
        pictures = len(self.values) - len(self.modules)
        if pictures:
            arguments["pixel_values"] = values[0]
        self.replacing, self.calls = values[pictures:], {}
        try:
            yield
        finally:
            self.replacing = None

    def _look(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        call = self.calls.get(module, 0)
        self.calls[module] = call + 1
        if self.replacing is not None:
            key = (module, call)
            return self.replacing[self.modules.index(key)] if key in self.modules else None
        for name in self.subject.texts:
            own, ids = self.arguments[name], args[0] if args else None
            if name in self.names or not isinstance(ids, Tensor):
                continue
            if ids.numel() == own.numel() and torch.equal(ids.reshape(own.shape), own):
                leaf = output.detach().requires_grad_()
                self.names.append(name)
                self.values.append(leaf)
                self.modules.append((module, call))
                return leaf
        return None

    def blank(self, unknown: int | None) -> list[Tensor]:
        """Where an integral starts: unknown tokens, and images of 0."""
        starts = [torch.zeros_like(value) for value in self.values[: len(self.values) - len(self.modules)]]
        self.replacing = ()
        for (module, _), value in zip(self.modules, self.values[len(starts) :], strict=True):
            token = module(torch.tensor([unknown], device=value.device)).detach()
            starts.append(token.view(1, 1, -1).expand_as(value).contiguous())
        self.replacing = None
        return starts

    def tokens(self, parts: list[Tensor]) -> Tensor:
        """Values at each leaf, summed for each token: (batch, token)."""
        if not self.values:
            given = ", ".join(self.arguments)
            raise ValueError(f"gradients need input_ids or pixel_values; the model was given {given}")
        subject = self.subject
        out = torch.zeros(subject.mask.shape, dtype=torch.float64)
        for name, part in zip(self.names, parts, strict=True):
            start = subject.first if name == "decoder_input_ids" else 0
            if name == "pixel_values":
                summed = _patches(subject, part)
                end = subject.first if subject.kind == "encoder–decoder" else out.shape[1]
                start = end - summed.shape[1]
            else:
                summed = part.sum(dim=-1)
            out[:, start : start + summed.shape[1]] = summed.detach().cpu()
        return out


def _patches(subject: Subject, pixels: Tensor) -> Tensor:
    """(batch, channel, height, width) summed over each patch: (batch, patch)."""
    grid, patch = subject.inputs.grid, patch_of(subject.model)
    assert grid is not None
    assert patch is not None
    cut = pixels[..., : grid[0] * patch[0], : grid[1] * patch[1]]
    cells = cut.reshape(*pixels.shape[:2], grid[0], patch[0], grid[1], patch[1])
    return cells.sum(dim=(1, 3, 5)).flatten(1)
