"""A trace: the maps of one forward pass with the tokens they belong to, and the methods that read them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from overt import _check
from overt._predictions import Link, linked
from overt.tracing import files
from overt.tracing.levels import Levels
from overt.tracing.methods.blankout import BlankoutArguments
from overt.tracing.methods.flow import FlowArguments
from overt.tracing.methods.gradients import GradientsArguments
from overt.tracing.methods.method import (
    Method,
    method_of,
    methods,
    read_levels,
    read_subject,
    why_not_levels,
)
from overt.tracing.mixing.mixing import Mixing, mixings
from overt.tracing.options import Arguments, Numbers
from overt.tracing.showing import ShownTrace
from overt.tracing.subject import Subject

TraceKind = Literal["encoder", "causal", "encoder–decoder"]
NO_SAMPLES = "no posterior samples were traced: trace with samples=20"


class Spread(NamedTuple):
    """Mean and standard deviation over posterior samples (divided by their number)."""

    mean: Tensor
    spread: Tensor


class Predictions(NamedTuple):
    """The likeliest classes of one example, likeliest first.

    Attributes:
        labels: their names.
        mean: (class,), their probabilities, averaged over posterior samples where there are some.
        draws: (sample, class), their probabilities in each posterior sample, or None.
    """

    labels: list[str]
    mean: Tensor
    draws: Tensor | None


@dataclass(eq=False)
class PosteriorDraw:
    """The maps and outputs of one posterior sample, as in `Trace`."""

    maps: list[Tensor]
    encoder_maps: list[Tensor] = field(default_factory=list)
    cross: list[Tensor] = field(default_factory=list)
    outputs: Tensor | None = None


@dataclass(eq=False)
class Trace(ShownTrace):
    """What one batch's attention was, layer by layer. `overt.trace` makes it.

    Results of the methods have shape (batch, layer, query, token) in float64, with zeros at padding. Tokens
    of an encoder–decoder are those of the source, then those of the target; its queries are the target's, and
    its layers the decoder's (`encoder` is the trace of its encoder alone).

    Attributes:
        kind: "encoder", "causal" or "encoder–decoder".
        maps: one per layer, (batch, query, key) averaged over heads, or (batch, head, query, key); of an
            encoder–decoder, the decoder's self-attention. Float32, on the CPU.
        mask: boolean (batch, token), False at padding.
        tokens: per example, the token axis in words.
        special: boolean (batch, token), which tokens are special ([CLS], [SEP], …).
        offsets: (batch, token, 2), where in the text each token begins and ends; None where unknown.
        grid: rows and columns of an image's patches, which are the last tokens (of the source); else None.
        image: height and width of the image in pixels; else None.
        picture: uint8 (batch, height, width, 3), the image as the model sees it: of PIL images in their own
            colours, of pixel values with each image's least value black and its greatest white; None where
            there is no image, or it has other than 1 or 3 channels.
        encoder_maps: the encoder's maps, of an encoder–decoder.
        cross: cross-attention, (batch, [head,] target, source), one per decoder layer.
        mixing: what the maps hold: "attention", "effective", "norm", "gradient", "value-zeroing", or the name
            of another registered mixing.
        parts: of a model traced with `parts=True`, what its mechanisms show of their work, and "fused", the
            map in use. Evolving has "attention", the layer's own map, and "convolution", what the convolution
            makes of it and the previous map. Each has one map per layer, None where there is none, as where a
            chain starts and there is no convolution. Of an encoder–decoder these are the decoder's
            self-attention; "encoder attention", "cross attention" and so on are the others.
        draws: of a Bayesian model traced with `samples`, the maps of each posterior sample. `maps` are those
            of the mean of the weights, with or without samples; the draws' mean is `spread().mean`.
        visible: which cells each map may fill, boolean (batch or 1, query, key) or None for all.
        paths: names of the attentions, one per map.
        outputs: (batch, class), the model's logits, in float32: of a model with one output per position,
            those at `main_queries()`. With `samples`, those of the mean of the weights; each draw has its
            own. None where the model returns none (a tensor with a row for each token counts as hidden
            states: give `output`).
        labels: names of the classes, in order; empty where there are none.
        words: of a language model whose tokenizer is known, class → token, for the 50 likeliest classes of
            each example (by the outputs, each draw, and the draws' mean).
        link: how outputs become probabilities: "softmax"; "sigmoid", of several labels at once; "identity",
            of a single output or a regression, which are none.
        sums_to_one: whether rows of the weights sum to one. Where a mechanism makes others, rollout and flow
            make them sum to one before the residual joins.
        signed: whether a mechanism makes weights that may be negative, of which there is no flow.
        averaged: whether `maps` are the means of the draws after all, as in files that earlier versions wrote
            of a trace with samples.
    """

    kind: TraceKind
    maps: list[Tensor]
    mask: Tensor
    tokens: list[list[str]]
    special: Tensor
    offsets: Tensor | None = None
    grid: tuple[int, int] | None = None
    image: tuple[int, int] | None = None
    encoder_maps: list[Tensor] = field(default_factory=list)
    cross: list[Tensor] = field(default_factory=list)
    mixing: str = "attention"
    parts: dict[str, list[Tensor | None]] = field(default_factory=dict)
    draws: list[PosteriorDraw] = field(default_factory=list)
    visible: list[Tensor | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    picture: Tensor | None = None
    outputs: Tensor | None = None
    labels: list[str] = field(default_factory=list)
    words: dict[int, str] = field(default_factory=dict)
    link: Link = "softmax"
    sums_to_one: bool = True
    signed: bool = False
    averaged: bool = False
    subject: Subject | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        batch, tokens = self.mask.shape
        heads = f", {self.maps[0].shape[1]} heads" if self.maps[0].dim() == 4 else ""
        mixing = "" if self.mixing == "attention" else f", {self.mixing} mixing"
        samples = f", {self.samples} posterior samples" if self.draws else ""
        samples += ", whose mean the maps are" if self.averaged else ""
        return (
            f"Trace({self.kind}, {batch} × {tokens} tokens, {len(self.maps)} layers{heads}{mixing}{samples})"
        )

    def __len__(self) -> int:
        return self.mask.shape[0]

    def __getitem__(self, index: int | slice) -> Trace:
        """Some of the examples: `t[0]` and `t[2:4]` are traces too; the batch axis stays."""
        if isinstance(index, slice):
            rows = list(range(len(self)))[index]
        else:
            try:
                index = operator.index(index)
            except TypeError:
                raise TypeError(f"examples are taken by number or slice, got {index!r}") from None
            if not -len(self) <= index < len(self):
                raise IndexError(f"trace holds {len(self)} examples, got {index}")
            rows = [index % len(self)]
        if not rows:
            raise IndexError(f"trace holds {len(self)} examples, {index} takes none of them")

        def cut(value: Tensor) -> Tensor:
            return value[rows] if value.shape[0] == len(self) else value

        def some(maps: Sequence[Tensor]) -> list[Tensor]:
            return [cut(cells) for cells in maps]

        def cut_any(value: Tensor | None) -> Tensor | None:
            return None if value is None else cut(value)

        return replace(
            self,
            maps=some(self.maps),
            mask=cut(self.mask),
            tokens=[self.tokens[row] for row in rows],
            special=cut(self.special),
            offsets=cut_any(self.offsets),
            encoder_maps=some(self.encoder_maps),
            cross=some(self.cross),
            parts={name: [cut_any(cells) for cells in maps] for name, maps in self.parts.items()},
            draws=[
                PosteriorDraw(some(d.maps), some(d.encoder_maps), some(d.cross), cut_any(d.outputs))
                for d in self.draws
            ],
            visible=[cut_any(seen) for seen in self.visible],
            picture=cut_any(self.picture),
            outputs=cut_any(self.outputs),
            subject=None if self.subject is None else self.subject.some(rows),
        )

    @property
    def samples(self) -> int:
        """How many posterior samples were drawn."""
        return len(self.draws)

    @property
    def queries(self) -> int:
        """Length of the query axis: all tokens, or those of the target."""
        return self.maps[0].shape[-2]

    @property
    def first(self) -> int:
        """The token that is query 0."""
        return self.mask.shape[1] - self.queries

    @property
    def encoder(self) -> Trace:
        """The trace of an encoder–decoder's encoder alone, which has no outputs."""
        if not self.encoder_maps:
            raise ValueError(f"this trace is of kind {self.kind!r} and has no encoder of its own")
        source = self.first
        return Trace(
            kind="encoder",
            maps=self.encoder_maps,
            mask=self.mask[:, :source],
            tokens=[words[:source] for words in self.tokens],
            special=self.special[:, :source],
            offsets=None if self.offsets is None else self.offsets[:, :source],
            grid=self.grid,
            image=self.image,
            mixing=self.mixing,
            parts={
                name.removeprefix("encoder "): maps
                for name, maps in self.parts.items()
                if name.startswith("encoder ")
            },
            draws=[PosteriorDraw(draw.encoder_maps) for draw in self.draws],
            visible=self.visible[len(self.maps) : len(self.maps) + len(self.encoder_maps)],
            picture=self.picture,
            sums_to_one=self.sums_to_one,
            signed=self.signed,
            averaged=self.averaged,
        )

    def draw(self, number: int) -> Trace:
        """The trace of one posterior sample."""
        if not self.draws:
            raise ValueError(NO_SAMPLES)
        if not -len(self.draws) <= number < len(self.draws):
            raise IndexError(f"trace holds {len(self.draws)} posterior samples, got {number}")
        drawn = self.draws[number]
        return replace(
            self,
            maps=drawn.maps,
            encoder_maps=drawn.encoder_maps,
            cross=drawn.cross,
            outputs=drawn.outputs,
            draws=[],
            parts={},
            averaged=False,
        )

    def spread(self, method: str = "raw", queries: Numbers = None, **options: Any) -> Spread:
        """Mean and spread of a method's result over the posterior samples.

        The mean of a method over samples is not the method of the mean map: rollout and flow bend.

        Args:
            method: one that reads maps, such as "raw", "rollout" or "flow".
            queries: as for the method.
            options: others of the method.
        """
        method_of(method, methods("maps"))
        if not self.draws:
            raise ValueError(NO_SAMPLES)
        drawn = (self.draw(number) for number in range(self.samples))
        found = torch.stack([one.read(method, queries, **options) for one in drawn])
        return Spread(found.mean(dim=0), found.std(dim=0, correction=0))

    def predictions(self, top: int = 5) -> list[Predictions]:
        """What the model says of each example: its likeliest classes with their probabilities, in float64.

        With posterior samples, classes are ranked by their probability averaged over the samples. Names are
        those of `labels`, or the tokens of a language model; where there is none, the class's number. Of a
        single output or a regression, values are the outputs themselves.

        Args:
            top: how many classes; all where there are fewer.
        """
        _check.whole("top", top, 1)
        if self.outputs is None:
            raise ValueError(
                "this trace has no outputs: the model returned no logits (give trace(…, output=…)), or it is "
                "a part"
            )
        found = []
        for example in range(len(self)):
            mean, samples = self._probabilities(example)
            best = mean.argsort(descending=True, stable=True)[:top]
            names = [self._name(number) for number in best.tolist()]
            found.append(Predictions(names, mean[best], None if samples is None else samples[:, best]))
        return found

    def _name(self, number: int) -> str:
        return self.labels[number] if self.labels else self.words.get(number, str(number))

    def _probabilities(self, example: int) -> tuple[Tensor, Tensor | None]:
        """Of all classes, (class,), and in each posterior sample, (sample, class)."""
        assert self.outputs is not None
        drawn = [draw.outputs[example] for draw in self.draws if draw.outputs is not None]
        if not drawn:
            return linked(self.outputs[example].double(), self.link), None
        samples = linked(torch.stack(drawn).double(), self.link)
        return samples.mean(dim=0), samples

    def main_queries(self) -> list[int]:
        """The row of each example that says most: CLS, or the last real token where later ones see more."""
        return main_queries(self.kind, self.mask, self.queries)

    @property
    def mixing_kind(self) -> type[Mixing]:
        """What is known of the mixing."""
        found = mixings().get(self.mixing)
        if found is None:
            raise ValueError(
                f"this trace is of the mixing {self.mixing!r}, which is not registered here: import what "
                "registers it"
            )
        return found

    def levels(self) -> Levels:
        """The maps as the layered graph that methods read."""
        kind = self.mixing_kind
        return Levels(
            self.maps,
            self.mask,
            self.encoder_maps,
            self.cross,
            self.visible,
            unit=not self.sums_to_one if kind.unit is None else kind.unit,
            signed=self.signed if kind.signed is None else kind.signed,
            cuts=not self.signed,
            joint=kind.joint,
            residual=kind.residual,
        )

    def why_not(self, method: str | Method) -> str | None:
        """Why a method cannot read this trace; None if it can."""
        one = method_of(method) if isinstance(method, str) else method
        if one.runs_model:
            gone = "this trace has no model with it (it was loaded from a file, say)"
            return f"no {one.title}: {gone}" if self.subject is None else None
        return why_not_levels(one, self.levels())

    def read(self, method: str, queries: Numbers = None, **options: Any) -> Tensor:
        """A method by its name: `t.read("rollout", layers=-1)` is `t.rollout(layers=-1)`.

        All methods take the same arguments, `Options`, and some have their own; what means nothing to a
        method is refused.

        Args:
            method: any that is registered: "raw", "rollout", "flow", "blankout", "gradients", or your own.
            queries: which rows; all by default.
            options: the others.

        Returns:
            (batch, layer, query, token) in float64, zeros at padding; (batch, layer, head, query, token) for
            `heads="each"`. The layer axis of a method that runs the model has length one.
        """
        found = method_of(method)
        if found.runs_model:
            return read_subject(found, self._subject(found.title), queries, options)
        return read_levels(found, self.levels(), queries, options)

    def raw(self, queries: Numbers = None, **options: Unpack[Arguments]) -> Tensor:
        """The maps as they are. Arguments as in `Options`, without `residual`."""
        return self.read("raw", queries, **options)

    def rollout(self, queries: Numbers = None, **options: Unpack[Arguments]) -> Tensor:
        """Attention rollout. Arguments as in `Options`; effective attention keeps its signs."""
        return self.read("rollout", queries, **options)

    def flow(self, queries: Numbers = None, **options: Unpack[FlowArguments]) -> Tensor:
        """Attention flow. Arguments as in `FlowOptions`; effective attention is cut at zero, renormalised."""
        return self.read("flow", queries, **options)

    def blankout(self, queries: Numbers = None, **options: Unpack[BlankoutArguments]) -> Tensor:
        """p(target) − p(target | token blanked out): (batch, 1, query, token), signed.

        The layer axis has length one, and so has the query axis where the model has one output for all
        tokens. Arguments as in `BlankoutOptions`.
        """
        return self.read("blankout", queries, **options)

    def gradients(self, queries: Numbers = None, **options: Unpack[GradientsArguments]) -> Tensor:
        """Gradient of p(target) at the input embeddings: (batch, 1, query, token).

        Axes are as of `blankout`, arguments as in `GradientsOptions`.
        """
        return self.read("gradients", queries, **options)

    def _subject(self, what: str) -> Subject:
        if self.subject is None:
            raise ValueError(
                f"{what} needs the model, which this trace has not (it was loaded, or is a part)"
            )
        return self.subject

    def patches(self, values: Tensor) -> Tensor:
        """(…, token) → (…, row, column), the patches of an image."""
        if self.grid is None:
            raise ValueError("this trace is of no image: it has no grid of patches")
        count = self.grid[0] * self.grid[1]
        end = values.shape[-1] - (self.maps[0].shape[-1] if self.cross else 0)
        return values[..., end - count : end].reshape(*values.shape[:-1], *self.grid)

    def pixels(self, values: Tensor, mode: Literal["nearest", "bilinear"] = "nearest") -> Tensor:
        """(…, token) → (…, height, width), each patch's value at its pixels, or smoothly between them."""
        _check.one_of("mode", mode, ("nearest", "bilinear"))
        patches = self.patches(values)
        assert self.image is not None
        flat = patches.reshape(-1, 1, *patches.shape[-2:])
        grown = nn.functional.interpolate(flat, size=self.image, mode=mode)
        return grown.view(*patches.shape[:-2], *self.image)

    def save(self, path: str | Path) -> None:
        """Write the trace, without its model, as one safetensors file."""
        files.write(path, *files.packed(self), files.TRACE)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote; blank-out and gradients need the model, and so a new trace."""

        def made(tensors: dict[str, Tensor], about: dict[str, Any], form: str) -> Trace:
            fields = files.unpacked(tensors, about, form)
            return cls(**{**fields, "draws": [PosteriorDraw(**draw) for draw in fields["draws"]]})

        return files.read(path, files.TRACES, "trace", made)


def main_queries(kind: str, mask: Tensor, queries: int) -> list[int]:
    """Of each example CLS, the first real token of an encoder; or the last real query of others."""
    if kind == "encoder":
        first: list[int] = mask.int().argmax(dim=1).tolist()
        return first
    real = mask[:, mask.shape[1] - queries :]
    places = torch.arange(real.shape[1]).expand_as(real).masked_fill(~real, 0)
    return [int(place) for place in places.max(dim=1).values]
