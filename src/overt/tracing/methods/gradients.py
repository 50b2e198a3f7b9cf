"""Gradients of the target's probability at the input: norm, times the input, integrated, or their sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from overt import _check
from overt._extras import need
from overt._modes import in_this_thread, switched
from overt.tracing.inputs import patch_of
from overt.tracing.methods.method import Cost, Method, register_method
from overt.tracing.options import Arguments, Options
from overt.tracing.subject import Subject, checkpointed, with_history

Gradient = Literal["norm", "input", "integrated", "sum"]
# Rows, and about how many of their tokens, in a pass of integrated gradients, which keeps what all of them
# need for the backward pass.
TOGETHER, TOKENS = 64, 2**13


class GradientsArguments(Arguments, total=False):
    """Keyword arguments for `GradientsOptions`."""

    target: Any
    against: Any
    kind: Gradient
    unk: int | None
    steps: int


@dataclass(frozen=True, kw_only=True)
class GradientsOptions(Options):
    """The arguments of gradients; `layers`, `heads`, `residual` and `receptive_field` mean nothing here.

    Attributes:
        queries: positions of the output, as for blank-out.
        target: what to explain, as for blank-out.
        against: why the target rather than this one, as for blank-out: gradients of the difference of logits.
        kind: "norm": L2 norm over the embedding. "input": gradient × input, signed. "integrated": integrated
            gradients from a sentence of unknown tokens, signed (extra `interpret`). "sum": sum over the
            embedding, signed, whose size the code behind Abnar & Zuidema's Table 2 ranks. It is rounding
            error, and no importance, where a LayerNorm, which subtracts the mean, reads the embeddings.
        unk: id of the unknown token, for "integrated".
        steps: steps of the integral.
    """

    target: Any = None
    against: Any = None
    kind: Gradient = "norm"
    unk: int | None = None
    steps: int = 50


def gradients_of(subject: Subject, options: Options) -> Tensor:
    """Gradient of p(target) at the embeddings, or at an image's pixels, (batch, 1, query, token).

    With `against`, that of the difference of two logits.
    """
    assert isinstance(options, GradientsOptions)
    _check.one_of("kind", options.kind, ("norm", "input", "integrated", "sum"))
    _check.whole("steps", options.steps, 1)
    kind = options.kind
    for name in subject.texts:
        subject.first_token(name, "a gradient for each token")
    rows = []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _backward(subject.model),
        checkpointed(subject.model, subject.layers),
        _Leaves(subject) as leaves,
    ):
        last = subject.last_positions(options.queries)
        logits = subject.logits(leaves.arguments, last)
        leaves.check()
        places = subject.places(logits, options.queries, last)
        target = subject.target(logits.detach(), options.target, places)
        against = subject.against(logits.detach(), options.against, target, places)
        score = subject.score(logits, target, places, against)
        for number, place in enumerate(places):
            if kind == "integrated":
                other = None if against is None else against[:, number]
                products = _integrated(subject, leaves, target[:, number], other, place, options)
                rows.append(leaves.tokens([product.double() for product in products]))
                continue
            again = number + 1 < len(places)
            gradients = torch.autograd.grad(score[:, number].sum(), leaves.values, retain_graph=again)
            if kind == "norm":
                rows.append(leaves.tokens([gradient.double().square() for gradient in gradients]).sqrt())
            elif kind == "sum":
                rows.append(leaves.tokens([gradient.double() for gradient in gradients]))
            else:
                pairs = zip(gradients, leaves.values, strict=True)
                rows.append(leaves.tokens([(gradient * x.detach()).double() for gradient, x in pairs]))
    values = torch.stack(rows, dim=1)
    return values.masked_fill(~subject.mask.unsqueeze(1), 0.0).unsqueeze(1)


def _backward(model: nn.Module) -> AbstractContextManager[None]:
    """Let a recurrent network have a backward pass in evaluation mode, where cuDNN refuses one.

    Without dropout between its layers, both modes are the same, so that training mode does; with it, cuDNN is
    switched off, which is far slower.
    """
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    if any(module.dropout and module.num_layers > 1 for module in recurrent):
        return torch.backends.cudnn.flags(enabled=False)
    return switched([module for module in recurrent if not module.training])


def _integrated(
    subject: Subject,
    leaves: _Leaves,
    target: Tensor,
    against: Tensor | None,
    place: int,
    options: GradientsOptions,
) -> tuple[Tensor, ...]:
    """Integrated gradients at each leaf, by captum."""
    method = need("captum.attr", "interpret").IntegratedGradients
    unknown = subject.inputs.unknown if options.unk is None else options.unk
    if unknown is None and leaves.modules:
        raise ValueError("integrated gradients start from unknown tokens: give unk=…")
    batch, rows = subject.mask.shape[0], len(leaves.values[0])  # a long text may have several rows

    def score(*values: Tensor) -> Tensor:
        times = values[0].shape[0] // rows
        arguments = subject.rows(leaves.arguments, torch.arange(batch).repeat(times))
        with leaves.replaced(values, arguments):
            logits = subject.logits(arguments, subject.last_positions(options.queries))
        places = [0] if logits.shape[1] == 1 else [place]
        other = None if against is None else against.repeat(times).unsqueeze(1)
        return subject.score(logits, target.repeat(times).unsqueeze(1), places, other).squeeze(1)

    attributions: tuple[Tensor, ...] = method(score).attribute(
        tuple(leaves.values),
        tuple(leaves.blank(unknown)),
        n_steps=options.steps,
        internal_batch_size=max(rows, min(TOGETHER, TOKENS * rows // subject.mask.numel())),
    )
    return attributions


class _Leaves:
    """The inputs at which gradients are taken: token embeddings, or the pixels of an image.

    While it is entered, embeddings that read the input ids return leaves of autograd's graph.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.arguments = with_history(subject.inputs.arguments)
        self.names: list[str] = []
        self.values: list[Tensor] = []
        self.modules: list[tuple[nn.Module, int]] = []  # and the number of its call in a forward pass
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
                self.handles.append(module.register_forward_hook(in_this_thread(self._look)))
        return self

    def __exit__(self, *details: object) -> None:
        for handle in self.handles:
            handle.remove()

    @contextmanager
    def replaced(self, values: tuple[Tensor, ...], arguments: dict[str, Any]) -> Iterator[None]:
        """Use other values in place of the leaves."""
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
            input_ids, ids = self.arguments[name], args[0] if args else None
            if name in self.names or not isinstance(ids, Tensor):
                continue
            if ids.numel() == input_ids.numel() and torch.equal(ids.reshape(input_ids.shape), input_ids):
                leaf = output.detach().requires_grad_()
                self.names.append(name)
                self.values.append(leaf)
                self.modules.append((module, call))
                return leaf
        return None

    def check(self) -> None:
        """Refuse inputs that have no leaf, once the model has run."""
        if not self.values:
            names = ", ".join(self.arguments)
            raise ValueError(
                "gradients need token ids that an nn.Embedding reads, or pixel_values; the model was given "
                f"{names}"
            )

    def blank(self, unknown: int | None) -> list[Tensor]:
        """Where the integral starts: unknown tokens, or images of 0."""
        starts = [torch.zeros_like(value) for value in self.values[: len(self.values) - len(self.modules)]]
        self.replacing = ()
        for (module, _), value in zip(self.modules, self.values[len(starts) :], strict=True):
            token = module(torch.tensor([unknown], device=value.device)).detach()
            starts.append(token.view(1, 1, -1).expand_as(value).contiguous())
        self.replacing = None
        return starts

    def tokens(self, parts: list[Tensor]) -> Tensor:
        """Values at each leaf, summed for each token: (batch, token)."""
        subject = self.subject
        out = torch.zeros(subject.mask.shape, dtype=torch.float64)
        for name, part in zip(self.names, parts, strict=True):
            if name == "pixel_values":
                summed = _patches(subject, part)
                end = subject.first if subject.kind == "encoder–decoder" else out.shape[1]
                start = end - summed.shape[1]
            else:
                start = subject.first_token(name, "a gradient for each token")
                summed = part.sum(dim=-1).reshape(len(out), -1)
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


register_method(
    Method(
        name="gradients",
        title="gradients",
        reads="model",
        run=gradients_of,
        cost=Cost("a forward pass of the model, and a backward pass per query", every=64),
        options=GradientsOptions,
        value="effect",
        variants={"gradient-input": {"kind": "input"}, "integrated": {"kind": "integrated"}},
    )
)
