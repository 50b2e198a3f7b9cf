"""Blank-out: how much the target's probability falls when a token is replaced by the unknown token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overt import _check
from overt.tracing.inputs import check_ids, patch_of
from overt.tracing.methods.method import Cost, Method, register_method
from overt.tracing.options import Arguments, Options
from overt.tracing.subject import Subject


class BlankoutArguments(Arguments, total=False):
    """Keyword arguments for `BlankoutOptions`."""

    target: Any
    against: Any
    unk: int | None
    absolute: bool
    rows: int


@dataclass(frozen=True, kw_only=True)
class BlankoutOptions(Options):
    """The arguments of blank-out; `layers`, `heads`, `residual` and `receptive_field` mean nothing here.

    Attributes:
        queries: positions of the output, for models with one output per position; all by default. A model
            with one output for all tokens always has one row.
        target: a class, one per example, or one per example and query. By default the labels among the
            inputs; for causal models and decoders, the next token of the input; otherwise the prediction.
            A class is a number, a label, or for a language model a string that is one token.
        against: another class, in the same forms: why the target rather than this one. Effects are then on
            the difference of their logits, logit(target) − logit(against), and not on a probability.
        unk: id of the replacement token; by default the tokenizer's unknown token.
        absolute: return absolute values.
        rows: how many ablations run at once.
    """

    target: Any = None
    against: Any = None
    unk: int | None = None
    absolute: bool = False
    rows: int = 128


@torch.no_grad()
def blankout_of(subject: Subject, options: Options) -> Tensor:
    """p(target) − p(target | the token blanked out), (batch, 1, query, token); with `against`, of logits.

    All ablations run as rows of a few batches. A token is replaced by `unk`, by default the tokenizer's
    unknown token; a patch of an image by 0, which is the mean colour after the usual normalisation.
    """
    assert isinstance(options, BlankoutOptions)
    rows = options.rows
    _check.whole("rows", rows, 1)
    inputs, mask = subject.inputs, subject.mask
    cells = _blanks(subject, options.unk)
    logits = subject.logits(inputs.arguments)
    places = subject.places(logits, options.queries)
    target = subject.target(logits, options.target, places)
    against = subject.against(logits, options.against, target, places)
    whole = subject.score(logits, target, places, against)
    batch, tokens = mask.shape
    effects = torch.zeros(batch, len(places), tokens, dtype=torch.float64)
    pairs = [(b, t) for t, b in torch.nonzero(mask.T).tolist() if _blanked(subject, cells, b, t)]
    classes = logits.shape[-1]
    del logits
    for start in range(0, len(pairs), rows):
        part = pairs[start : start + rows]
        example = torch.tensor([b for b, _ in part])
        arguments = subject.rows(inputs.arguments, example)
        for row, (_, token) in enumerate(part):
            name, index, filler = cells[token]
            arguments[name][(row, *index)] = filler
        device = target.device
        other = None if against is None else against[example.to(device)]
        changed = subject.logits(arguments)
        if changed.shape[-1] != classes:
            raise ValueError(
                f"the output has {classes} classes, but {changed.shape[-1]} when {len(part)} rows run "
                "at once: classes that depend on the batch cannot be explained"
            )
        score = subject.score(changed, target[example.to(device)], places, other)
        change = (whole[example.to(device)] - score).cpu()
        effects[example, :, [t for _, t in part]] = change
    return (effects.abs() if options.absolute else effects).unsqueeze(1)


def _blanked(subject: Subject, cells: dict[int, Any], example: int, token: int) -> bool:
    """Whether a token can be blanked out; an image's positions within a text cannot."""
    if token not in cells:
        return False
    name, index, _ = cells[token]
    config = getattr(subject.model, "config", None)
    images = {getattr(config, key, None) for key in ("image_token_id", "image_token_index")} - {None}
    if name == "pixel_values" or not images:
        return True
    return int(subject.inputs.arguments[name][(example, *index)]) not in images


def _blanks(subject: Subject, unk: int | None) -> dict[int, tuple[str, tuple[Any, ...], float]]:
    """Token → the argument, the cells in a row of it, and the value that blanks the token out."""
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
        start = subject.first_token(name, "blank-out")
        cells |= {start + token: (name, (token,), int(filler)) for token in range(ids.shape[1])}
    if not cells:
        raise ValueError(
            "blank-out needs input_ids or pixel_values to change; "
            f"the model was given {', '.join(inputs.arguments)}"
        )
    return cells


register_method(
    Method(
        name="blankout",
        title="blank-out",
        reads="model",
        run=blankout_of,
        cost=Cost("a forward pass of the model per token", every=64, passes=1),
        options=BlankoutOptions,
        value="effect",
        variants={"blankout-absolute": {"absolute": True}},
    )
)
