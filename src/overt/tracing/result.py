"""A trace: the maps of one forward pass with the tokens they belong to, and the methods that read them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from overt import _check
from overt._modes import device_of
from overt._predictions import Link, linked
from overt.tracing import files
from overt.tracing.levels import HeldMaps, Levels, held_of
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
    why_over_budget,
)
from overt.tracing.mixing.mixing import Mixing, mixings
from overt.tracing.options import Arguments, Numbers, numbers
from overt.tracing.showing import ShownTrace
from overt.tracing.subject import Subject

if TYPE_CHECKING:
    from overt.tracing.chat import Turn
    from overt.tracing.images import ImageTokens
    from overt.tracing.kept_rows import KeptRows
    from overt.tracing.spans import SpanValues

TraceKind = Literal["encoder", "causal", "encoder–decoder", "pixels"]
NO_SAMPLES = "no posterior samples were traced: trace with samples=20"


class Spread(NamedTuple):
    """Mean and standard deviation (divisor n) over posterior samples."""

    mean: Tensor
    spread: Tensor


class Predictions(NamedTuple):
    """The likeliest classes of one example, likeliest first.

    Attributes:
        labels: their names.
        mean: (class,), their probabilities, averaged over any posterior samples.
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
    """One batch's attention, layer by layer. Made by `overt.trace`.

    Results of the methods have shape (batch, layer, query, token) in float64, with zeros at padding. For an
    encoder–decoder, tokens are those of the source, then those of the target; queries are the target's tokens
    and layers the decoder's (`encoder` is the trace of the encoder alone).

    Attributes:
        kind: "encoder", "causal", "encoder–decoder"; or "pixels", for attention beside convolutions, over the
            pixels of an image that has shrunk: only its maps can be read, not paths through them.
        maps: one per layer, (batch, query, key) averaged over heads, or (batch, head, query, key); for an
            encoder–decoder, the decoder's self-attention. Float32, on the CPU. Empty for a recurrent decoder,
            whose only maps are `cross`. Those of a trace of states are made when they are asked for.
        mask: boolean (batch, token), False at padding.
        tokens: per example, the names of the tokens.
        special: boolean (batch, token), which tokens are special ([CLS], [SEP], …).
        offsets: (batch, token, 2), where in the text each token begins and ends; None if unknown.
        grid: rows and columns of an image's patches, which are the last tokens (of the source); else None.
        image: height and width of the image in pixels; else None.
        picture: uint8 (batch, height, width, 3), the image as the model sees it: PIL images in their own
            colours, pixel values scaled so that each image's minimum is black and its maximum white; None
            without an image, or if it has other than 1 or 3 channels.
        encoder_maps: the encoder's maps, for an encoder–decoder.
        cross: cross-attention, (batch, [head,] target, source), one per decoder layer.
        mixing: what the maps hold: "attention", "effective", "norm", "gradient", "relevance",
            "value-zeroing", "alti", or the name of another registered mixing.
        parts: for a model traced with `parts=True`, the parts that its mechanisms expose, and "fused", the
            map in use. Evolving has "attention", the layer's own map, and "convolution", what the convolution
            makes of it and the previous map. Each has one map per layer, or None where there is none: where a
            chain starts there is no convolution. For an encoder–decoder these are the parts of the decoder's
            self-attention; "encoder attention", "cross attention" and so on are the others.
        draws: for a Bayesian model traced with `samples`, the maps of each posterior sample. `maps` are those
            at the mean of the weights, with or without samples; the draws' mean is `spread().mean`.
        visible: which cells each map may fill, boolean (batch or 1, query, key) or None for all.
        paths: names of the attentions, one per map.
        outputs: (batch, class), the model's logits, in float32; for a model with one output per position,
            those at `main_queries()`. With `samples`, those at the mean of the weights; each draw has its
            own. None if the model returns no logits (a tensor with a row for each token counts as hidden
            states: give `output`).
        labels: names of the classes, in order; empty if unknown.
        words: for a language model whose tokenizer is known, class → token, for the 50 likeliest classes of
            each example (by the outputs, each draw, and the draws' mean).
        link: how outputs become probabilities: "softmax"; "sigmoid" for several labels at once; "identity"
            for a single output or a regression, whose outputs are not probabilities.
        temperature: what `predictions` divides the outputs by before a softmax, if `overt.calibrate` found
            one for the model without dropout. Methods that run the model explain its own probabilities.
        sums_to_one: whether rows of the weights sum to one. If a mechanism's rows do not, rollout and flow
            normalise them before adding the residual.
        signed: whether a mechanism makes weights that may be negative, which have no flow.
        averaged: whether `maps` are the means of the draws, as in traces with samples that earlier versions
            saved.
        memory: most bytes of a result of a trace of states: one that keeps queries and keys in place of maps.
            None for a trace of maps.
        rows: of a trace of states that was saved and loaded, the rows that were saved; it has no maps.
        generated: boolean (batch, token), which tokens the model generated, with `generate`; else None. A
            token was written at the query before it: query q wrote the token of query q + 1.
        texts: the text of each example, in which `offsets` are places; empty if unknown. Of an
            encoder–decoder, the source; what it generated follows in a line of its own.
        turns: per example, the messages of a chat, or prompt and output of generated text, as tokens; empty
            for other inputs.
    """

    kind: TraceKind
    maps: Sequence[Tensor]
    mask: Tensor
    tokens: list[list[str]]
    special: Tensor
    offsets: Tensor | None = None
    grid: tuple[int, int] | None = None
    image: tuple[int, int] | None = None
    encoder_maps: Sequence[Tensor] = field(default_factory=list)
    cross: Sequence[Tensor] = field(default_factory=list)
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
    temperature: float = 1.0
    sums_to_one: bool = True
    signed: bool = False
    averaged: bool = False
    memory: int | None = None
    rows: KeptRows | None = None
    generated: Tensor | None = None
    texts: list[str] = field(default_factory=list)
    turns: list[list[Turn]] = field(default_factory=list)
    subject: Subject | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        batch, tokens = self.mask.shape
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''}"
        heads = ", as rows" if self.rows is not None else ""
        if self.rows is None:
            top = held_of(self.maps or self.cross)[0]
            heads = f", {top.shape[1]} heads" if len(top.shape) == 4 else ""
            heads += ", as queries and keys" if self.of_states else ""
        mixing = "" if self.mixing == "attention" else f", {self.mixing} mixing"
        samples = f", {self.samples} posterior samples" if self.draws else ""
        samples += ", whose mean the maps are" if self.averaged else ""
        return f"Trace({self.kind}, {batch} × {tokens} tokens, {layers}{heads}{mixing}{samples})"

    def __len__(self) -> int:
        return self.mask.shape[0]

    def __getitem__(self, index: int | slice) -> Trace:
        """Some of the examples: `t[0]` and `t[2:4]` are traces with a batch axis."""
        if isinstance(index, slice):
            rows = list(range(len(self)))[index]
        else:
            try:
                index = operator.index(index)
            except TypeError:
                raise TypeError(f"examples are selected by number or slice, got {index!r}") from None
            if not -len(self) <= index < len(self):
                raise IndexError(f"trace holds {len(self)} examples, got {index}")
            rows = [index % len(self)]
        if not rows:
            raise IndexError(f"trace holds {len(self)} examples, {index} selects none of them")

        def cut(value: Tensor) -> Tensor:
            return value[rows] if value.shape[0] == len(self) else value

        def cut_all(maps: Sequence[Tensor]) -> Any:
            return maps.examples(rows) if isinstance(maps, HeldMaps) else [cut(cells) for cells in maps]

        def cut_any(value: Tensor | None) -> Tensor | None:
            return None if value is None else cut(value)

        return replace(
            self,
            maps=cut_all(self.maps),
            mask=cut(self.mask),
            tokens=[self.tokens[row] for row in rows],
            special=cut(self.special),
            offsets=cut_any(self.offsets),
            encoder_maps=cut_all(self.encoder_maps),
            cross=cut_all(self.cross),
            parts={name: [cut_any(cells) for cells in maps] for name, maps in self.parts.items()},
            draws=[
                PosteriorDraw(cut_all(d.maps), cut_all(d.encoder_maps), cut_all(d.cross), cut_any(d.outputs))
                for d in self.draws
            ],
            visible=[cut_any(seen) for seen in self.visible],
            picture=cut_any(self.picture),
            outputs=cut_any(self.outputs),
            rows=None if self.rows is None else self.rows.examples(rows),
            generated=cut_any(self.generated),
            texts=[self.texts[row] for row in rows] if self.texts else [],
            turns=[self.turns[row] for row in rows] if self.turns else [],
            subject=None if self.subject is None else self.subject.some(rows),
        )

    @property
    def samples(self) -> int:
        """Number of posterior samples."""
        return len(self.draws)

    @property
    def of_states(self) -> bool:
        """Whether queries and keys are kept in place of maps."""
        return any(isinstance(maps, HeldMaps) for maps in (self.maps, self.encoder_maps, self.cross))

    @property
    def layers(self) -> int:
        """Length of the layer axis."""
        return len(self.maps or self.cross) if self.rows is None else self.rows.layers

    @property
    def queries(self) -> int:
        """Length of the query axis: all tokens, or those of the target."""
        return held_of(self.maps or self.cross)[0].shape[-2] if self.rows is None else self.rows.count

    @property
    def first(self) -> int:
        """The token that is query 0."""
        return self.mask.shape[1] - self.queries

    @property
    def encoder(self) -> Trace:
        """The trace of an encoder–decoder's encoder alone, which has no outputs."""
        if not self.encoder_maps:
            raise ValueError(f"this trace is of kind {self.kind!r} and has no separate encoder")
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
            memory=self.memory,
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

        Rollout and flow are nonlinear: their mean over samples is not their value at the mean map.

        Args:
            method: one that reads maps, such as "raw", "rollout" or "flow".
            queries: as for the method.
            options: the method's other arguments.
        """
        method_of(method, methods("maps"))
        if not self.draws:
            raise ValueError(NO_SAMPLES)
        drawn = (self.draw(number) for number in range(self.samples))
        values = torch.stack([draw.read(method, queries, **options) for draw in drawn])
        return Spread(values.mean(dim=0), values.std(dim=0, correction=0))

    def predictions(self, top: int = 5) -> list[Predictions]:
        """The model's predictions for each example: its likeliest classes and probabilities, in float64.

        With posterior samples, classes are ranked by their probability averaged over the samples. Names come
        from `labels` or, for a language model, are its tokens; a class without a name has its number. For a
        single output or a regression, values are the outputs themselves.

        Args:
            top: number of classes; all if there are fewer.
        """
        _check.whole("top", top, 1)
        if self.outputs is None:
            raise ValueError(
                "this trace has no outputs: the model returned no logits (give trace(…, output=…)), or it is "
                "the encoder of another trace"
            )
        predictions = []
        for example in range(len(self)):
            mean, samples = self._probabilities(example)
            best = mean.argsort(descending=True, stable=True)[:top]
            names = [self._name(number) for number in best.tolist()]
            predictions.append(Predictions(names, mean[best], None if samples is None else samples[:, best]))
        return predictions

    def _name(self, number: int) -> str:
        return self.labels[number] if self.labels else self.words.get(number, str(number))

    def _probabilities(self, example: int) -> tuple[Tensor, Tensor | None]:
        """Of all classes, (class,), and in each posterior sample, (sample, class)."""
        assert self.outputs is not None
        drawn = [draw.outputs[example] for draw in self.draws if draw.outputs is not None]
        divisor = self.temperature if self.link == "softmax" else 1.0
        if not drawn:
            return linked(self.outputs[example].double() / divisor, self.link), None
        samples = linked(torch.stack(drawn).double() / divisor, self.link)
        return samples.mean(dim=0), samples

    def main_queries(self) -> list[int]:
        """Each example's main row: CLS, the last real token of a causal model or decoder, a middle pixel."""
        return main_queries(self.kind, self.mask, self.queries, self.grid)

    def generating_queries(self) -> list[int]:
        """The queries at which the model wrote what it generated, in any of the examples.

        Query q wrote the token of query q + 1, so that these are all steps of the generation. Examples of a
        batch have their outputs at different places: `generated` says which.
        """
        if self.generated is None:
            raise ValueError("nothing was generated in this trace: trace with generate=64, for example")
        written = self.generated[:, self.first + 1 :].any(dim=0)
        return [int(query) for query in written.nonzero().flatten()]

    def _usual_queries(self) -> list[int]:
        """The rows that a trace of states has by default: those of generated words, or the main ones."""
        return sorted(set(self.main_queries())) if self.generated is None else self.generating_queries()

    @property
    def mixing_kind(self) -> type[Mixing]:
        """The class of the mixing."""
        kind = mixings().get(self.mixing)
        if kind is None:
            raise ValueError(
                f"this trace has the mixing {self.mixing!r}, which is not registered: import the module "
                "that registers it"
            )
        return kind

    def levels(self) -> Levels:
        """The maps as the layered graph that methods read."""
        if self.rows is not None:
            raise ValueError("this trace was saved as rows: it has no maps, and no levels")
        kind = self.mixing_kind
        return Levels(
            held_of(self.maps),
            self.mask,
            held_of(self.encoder_maps),
            held_of(self.cross),
            self.visible,
            unit=not self.sums_to_one if kind.unit is None else kind.unit,
            signed=self.signed if kind.signed is None else kind.signed,
            cuts=not self.signed,
            joint=kind.joint,
            residual=kind.residual,
            convolved=self.kind == "pixels",
            device=self._device() if self.of_states else None,
            budget=self.memory if self.of_states else None,
        )

    def _device(self) -> torch.device | None:
        """The model's device, where states that had no room on it are computed."""
        model = None if self.subject is None else self.subject.model
        return None if model is None else device_of(model)

    def check_maps(self, what: str) -> None:
        """Refuse a trace without maps, for what shows them."""
        if self.of_states or self.rows is not None:
            kept = "rows" if self.rows is not None else "queries and keys"
            raise ValueError(
                f"{what} shows maps, and this trace has {kept}: trace with a larger memory=…, or show its "
                "rows on a page, t.html(…)"
            )

    def why_not(self, method: str | Method, layers: Numbers = None) -> str | None:
        """Why a method cannot read this trace; None if it can.

        Args:
            method: any registered method.
            layers: which layers it is to read, all by default: a trace of states may have room for fewer.
        """
        reader = method_of(method) if isinstance(method, str) else method
        if reader.runs_model:
            no_model = "this trace has no model (it was loaded from a file, for example)"
            if self.subject is None:
                return f"no {reader.title}: {no_model}"
            return self.subject.why_not(reader.title)
        if self.rows is not None:
            return self.rows.why_not(reader.name)
        levels = self.levels()
        return why_not_levels(reader, levels) or why_over_budget(reader, levels, layers)

    def read(self, method: str, queries: Numbers = None, **options: Any) -> Tensor:
        """Apply a method by name: `t.read("rollout", layers=-1)` is `t.rollout(layers=-1)`.

        All methods take the same arguments, `Options`, and some have additional ones; arguments that have no
        meaning for a method are refused.

        Args:
            method: any registered method: "raw", "rollout", "flow", "blankout", "gradients", or your own.
            queries: which rows; all by default. Of a trace of states, by default `generating_queries()` if
                the model generated, otherwise `main_queries()`.
            options: the other arguments.

        Returns:
            (batch, layer, query, token) in float64, zeros at padding; (batch, layer, head, query, token) for
            `heads="each"`. The layer axis of a method that runs the model has length one.
        """
        reader = method_of(method)
        if queries is None and self.of_states:
            queries = self._usual_queries()
        if reader.runs_model:
            return read_subject(reader, self._subject(reader.title), queries, options)
        if self.rows is not None:
            return self.rows.read(method, queries, options)
        return read_levels(reader, self.levels(), queries, options)

    def raw(self, queries: Numbers = None, **options: Unpack[Arguments]) -> Tensor:
        """The maps as they are. Arguments as in `Options`, without `residual`."""
        return self.read("raw", queries, **options)

    def rollout(self, queries: Numbers = None, **options: Unpack[Arguments]) -> Tensor:
        """Attention rollout. Arguments as in `Options`; effective attention keeps its signs."""
        return self.read("rollout", queries, **options)

    def flow(self, queries: Numbers = None, **options: Unpack[FlowArguments]) -> Tensor:
        """Attention flow. Arguments as in `FlowOptions`; effective attention is clipped at zero."""
        return self.read("flow", queries, **options)

    def blankout(self, queries: Numbers = None, **options: Unpack[BlankoutArguments]) -> Tensor:
        """p(target) − p(target | token blanked out): (batch, 1, query, token), signed.

        The layer axis has length one, and so has the query axis where the model has one output for all
        tokens. Arguments as in `BlankoutOptions`; with `against`, effects are on logit(target) −
        logit(against): why this word rather than that one.
        """
        return self.read("blankout", queries, **options)

    def gradients(self, queries: Numbers = None, **options: Unpack[GradientsArguments]) -> Tensor:
        """Gradient of p(target) at the input embeddings: (batch, 1, query, token).

        Axes are those of `blankout`, arguments as in `GradientsOptions`; with `against`, the gradient is that
        of logit(target) − logit(against): why this word rather than that one.
        """
        return self.read("gradients", queries, **options)

    def _subject(self, what: str) -> Subject:
        if self.subject is None:
            raise ValueError(
                f"{what} needs the model: this trace has no model (it was loaded from a file, or is an "
                "encoder's)"
            )
        return self.subject

    def spans(
        self,
        method: str = "raw",
        *,
        queries: str | Mapping[str, Any] | None = None,
        tokens: str | Mapping[str, Any] = "words",
        written: bool = False,
        **options: Any,
    ) -> list[SpanValues]:
        """What words, sentences or turns draw on, example by example.

        Values are summed over the tokens of a column's span, and averaged over the queries of a row's span,
        so that rows which sum to one still do where spans hold all tokens. Pieces are joined to words, and
        tokens to sentences, by their offsets in the text. A sentence ends at . ! ? or … before white space,
        or with its line. Special tokens stay alone.

        Args:
            method: any registered method.
            queries: "words", "sentences", "turns" or "tokens"; the same after "generated", as in "generated
                words": what the model wrote, at the queries that wrote it; or name → range. By default
                "generated words" if the model generated, otherwise "words".
            tokens: "words", "sentences", "turns", "images", "tokens", or name → range: a pair (start, stop)
                of tokens, `overt.tracing.spans.Characters(start, stop)` of the text, or a passage that is in
                it once.
            written: whether a row is that of the queries which wrote its tokens, each the one before its
                token, rather than the tokens' own. Rows of "generated …" always are.
            options: the method's other arguments.
        """
        from overt.tracing.spans import spans_of

        return spans_of(self, method, queries, tokens, written, options)

    def images(self) -> list[list[ImageTokens]]:
        """The pictures in the prompt of a language model, example by example: their tokens and grids.

        Each has `patches(values)`: (…, token) → (…, row, column). Needs the model, as blank-out does.
        """
        from overt.tracing.images import image_tokens

        subject = self._subject("the place of pictures")
        found = image_tokens(subject.model, subject.inputs.arguments)
        if self.kind != "causal" or subject.inputs.arguments["input_ids"].shape != self.mask.shape:
            raise ValueError(
                "pictures have a place among the tokens of a language model: choose it with stack=…"
            )
        return found

    def patches(self, values: Tensor) -> Tensor:
        """(…, token) → (…, row, column), the patches of an image."""
        if self.grid is None:
            raise ValueError("this trace is not of an image: it has no grid of patches")
        count = self.grid[0] * self.grid[1]
        end = values.shape[-1] - (self.queries if self.cross else 0)
        return values[..., end - count : end].reshape(*values.shape[:-1], *self.grid)

    def pixels(self, values: Tensor, mode: Literal["nearest", "bilinear"] = "nearest") -> Tensor:
        """(…, token) → (…, height, width), each patch's value at its pixels, or interpolated."""
        _check.one_of("mode", mode, ("nearest", "bilinear"))
        patches = self.patches(values)
        assert self.image is not None
        flat = patches.reshape(-1, 1, *patches.shape[-2:])
        grown = nn.functional.interpolate(flat, size=self.image, mode=mode)
        return grown.view(*patches.shape[:-2], *self.image)

    def save(self, path: str | Path, queries: Numbers = None) -> None:
        """Write the trace, without its model, as one safetensors file.

        Of a trace of states, rows are written, those of raw and rollout, in place of maps.

        Args:
            path: of the file.
            queries: which rows of a trace of states; by default those that `read` has by default.
        """
        if not self.of_states and self.rows is None:
            if queries is not None:
                raise ValueError(f"a trace of maps is saved whole, got queries={queries!r}: leave it out")
            files.write(path, *files.pack(self), files.TRACE)
            return
        from overt.tracing.kept_rows import METHODS, KeptRows

        every = self._usual_queries() if self.rows is None else self.rows.queries
        listed = sorted(set(every if queries is None else numbers("queries", queries, self.queries)))
        values = {method: self.read(method, listed) for method in METHODS}
        rows = KeptRows(listed, self.queries, values)
        files.write(
            path, *files.pack_rows(replace(self, maps=[], encoder_maps=[], cross=[], rows=rows)), files.ROWS
        )

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file written by `save`; blank-out and gradients need the model, and so a new trace."""

        def make(tensors: dict[str, Tensor], about: dict[str, Any], form: str) -> Trace:
            if form == files.ROWS:
                from overt.tracing.kept_rows import KeptRows

                rows, fields = files.unpack_rows(tensors, about)
                return cls(**fields, rows=KeptRows(**rows))
            fields = files.unpack(tensors, about, form)
            return cls(**{**fields, "draws": [PosteriorDraw(**draw) for draw in fields["draws"]]})

        return files.read(path, (*files.TRACES, files.ROWS), "trace", make)


def main_queries(kind: str, mask: Tensor, queries: int, grid: tuple[int, int] | None = None) -> list[int]:
    """For each example, an encoder's first real token (CLS), or the last real query of other models.

    Of pixels, the one in the middle of their grid.
    """
    if kind == "pixels" and grid is not None:
        return [grid[0] // 2 * grid[1] + grid[1] // 2] * len(mask)
    if kind == "encoder":
        first: list[int] = mask.int().argmax(dim=1).tolist()
        return first
    real = mask[:, mask.shape[1] - queries :]
    places = torch.arange(real.shape[1]).expand_as(real).masked_fill(~real, 0)
    return [int(place) for place in places.max(dim=1).values]
