"""A trace: the maps of one forward pass with the tokens they belong to, and the methods that read them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from overt import _check
from overt._shown import ShownTrace
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.chain import Chain
from overt.tracing import importance, methods
from overt.tracing.capture import Call, watching
from overt.tracing.files import read as read_file
from overt.tracing.files import write
from overt.tracing.graph import Graph, Heads, numbers
from overt.tracing.importance import Gradient, Link, Output, Subject, differentiable, with_history
from overt.tracing.inputs import Inputs, names_of, picture_of, prepare
from overt.tracing.methods import Numbers, flow_of, raw_of, read, rollout_of
from overt.tracing.weighted import GRAPHS, GraphKind, effective_map, gradient_map, norm_map

TraceKind = Literal["encoder", "causal", "encoder–decoder"]
METHODS = (*methods.METHODS, "blankout", "gradients")
FORMAT = "1"
FUSED = "fused"  # the part that is the map in use
NAMED = 50  # likeliest tokens of each example whose names a trace of a language model keeps


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
class Draw:
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
        graph: what the maps hold: "attention", "effective", "gradient" or "norm".
        parts: of a model traced with `parts=True`, what its mechanisms show of their work, and "fused", the
            map in use. Evolving has "attention", the layer's own map, and "convolution", what the convolution
            makes of it and the previous map. Each has one map per layer, None where there is none, as where a
            chain starts and there is no convolution. Of an encoder–decoder these are the decoder's
            self-attention; "encoder attention", "cross attention" and so on are the others.
        draws: of a Bayesian model traced with `samples`, the maps of each posterior sample; `maps` are their
            means then.
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
    graph: GraphKind = "attention"
    parts: dict[str, list[Tensor | None]] = field(default_factory=dict)
    draws: list[Draw] = field(default_factory=list)
    visible: list[Tensor | None] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    picture: Tensor | None = None
    outputs: Tensor | None = None
    labels: list[str] = field(default_factory=list)
    words: dict[int, str] = field(default_factory=dict)
    link: Link = "softmax"
    sums_to_one: bool = True
    signed: bool = False
    subject: Subject | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        batch, tokens = self.mask.shape
        heads = f", {self.maps[0].shape[1]} heads" if self.maps[0].dim() == 4 else ""
        graph = "" if self.graph == "attention" else f", {self.graph} graph"
        return f"Trace({self.kind}, {batch} × {tokens} tokens, {len(self.maps)} layers{heads}{graph})"

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
                Draw(some(d.maps), some(d.encoder_maps), some(d.cross), cut_any(d.outputs))
                for d in self.draws
            ],
            visible=[cut_any(seen) for seen in self.visible],
            picture=cut_any(self.picture),
            outputs=cut_any(self.outputs),
            subject=None if self.subject is None else self.subject.some(rows),
        )

    @property
    def encoder(self) -> Trace:
        """The trace of an encoder–decoder's encoder alone, which has no outputs."""
        if not self.encoder_maps:
            raise ValueError(f"this trace is of kind {self.kind!r} and has no encoder of its own")
        source = self._graph().first
        return Trace(
            kind="encoder",
            maps=self.encoder_maps,
            mask=self.mask[:, :source],
            tokens=[words[:source] for words in self.tokens],
            special=self.special[:, :source],
            offsets=None if self.offsets is None else self.offsets[:, :source],
            grid=self.grid,
            image=self.image,
            graph=self.graph,
            parts={
                name.removeprefix("encoder "): maps
                for name, maps in self.parts.items()
                if name.startswith("encoder ")
            },
            draws=[Draw(draw.encoder_maps) for draw in self.draws],
            visible=self.visible[len(self.maps) : len(self.maps) + len(self.encoder_maps)],
            picture=self.picture,
            sums_to_one=self.sums_to_one,
            signed=self.signed,
        )

    def draw(self, number: int) -> Trace:
        """The trace of one posterior sample."""
        if not self.draws:
            raise ValueError("no posterior samples were traced: overt.trace(…, samples=20)")
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
        )

    def spread(self, method: str = "raw", **arguments: Any) -> Spread:
        """Mean and spread of a method's result over the posterior samples.

        The mean of a method over samples is not the method of the mean map: rollout and flow bend.

        Args:
            method: "raw", "rollout" or "flow".
            arguments: of the method.
        """
        _check.one_of("method", method, ("raw", "rollout", "flow"))
        if not self.draws:
            raise ValueError("no posterior samples were traced: overt.trace(…, samples=20)")
        found = torch.stack(
            [getattr(self.draw(number), method)(**arguments) for number in range(len(self.draws))]
        )
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

        def linked(logits: Tensor) -> Tensor:
            logits = logits.double()
            if self.link == "identity":
                return logits
            return logits.sigmoid() if self.link == "sigmoid" else logits.softmax(dim=-1)

        assert self.outputs is not None
        drawn = [draw.outputs[example] for draw in self.draws if draw.outputs is not None]
        if not drawn:
            return linked(self.outputs[example]), None
        samples = linked(torch.stack(drawn))
        return samples.mean(dim=0), samples

    def main_queries(self) -> list[int]:
        """The row of each example that says most: CLS, or the last real token where later ones see more."""
        if self.kind == "encoder":
            first: list[int] = self.mask.int().argmax(dim=1).tolist()
            return first
        real = self.mask[:, self.mask.shape[1] - self.maps[0].shape[-2] :]
        places = torch.arange(real.shape[1]).expand_as(real).masked_fill(~real, 0)
        return [int(place) for place in places.max(dim=1).values]

    def _graph(self) -> Graph:
        return Graph(
            self.maps,
            self.mask,
            self.encoder_maps,
            self.cross,
            self.visible,
            unit=self.graph in ("gradient", "norm") or (self.graph == "attention" and not self.sums_to_one),
            signed=self.graph == "effective" or (self.graph == "attention" and self.signed),
        )

    def raw(
        self,
        queries: Numbers = None,
        layers: Numbers = None,
        heads: Heads = "mean",
        residual: float = 0.5,
        normalize: bool = False,
        receptive_field: bool = False,
    ) -> Tensor:
        """The maps as they are; `residual` is ignored. Arguments as for `overt.rollout`."""
        graph = self._graph()
        return read(graph, raw_of, queries, layers, heads, residual, normalize, receptive_field)

    def rollout(
        self,
        queries: Numbers = None,
        layers: Numbers = None,
        heads: Heads = "mean",
        residual: float = 0.5,
        normalize: bool = False,
        receptive_field: bool = False,
    ) -> Tensor:
        """Attention rollout. Arguments as for `overt.rollout`; effective attention keeps its signs."""
        graph = self._graph()
        return read(graph, rollout_of, queries, layers, heads, residual, normalize, receptive_field)

    def flow(
        self,
        queries: Numbers = None,
        layers: Numbers = None,
        heads: Heads = "mean",
        residual: float = 0.5,
        normalize: bool = False,
        receptive_field: bool = False,
        threads: int | None = None,
        progress: bool | None = None,
    ) -> Tensor:
        """Attention flow. Arguments as for `overt.flow`; effective attention is cut at zero, renormalised."""
        if self.signed and self.graph in ("attention", "effective"):
            raise ValueError(
                "there is no flow over weights that may be negative, which a mechanism of this model makes: "
                'raw and rollout keep their signs, and overt.trace(…, graph="norm") has a flow'
            )
        graph, method = self._graph(), partial(flow_of, threads=threads, progress=progress)
        return read(graph, method, queries, layers, heads, residual, normalize, receptive_field)

    def blankout(
        self,
        queries: Numbers = None,
        layers: Numbers = None,
        heads: Heads = "mean",
        residual: float = 0.5,
        normalize: bool = False,
        *,
        target: Any = None,
        unk: int | None = None,
        absolute: bool = False,
        rows: int = 128,
    ) -> Tensor:
        """p(target) − p(target | token blanked out): (batch, 1, query, token), signed.

        The layer axis has length one, and so has the query axis where the model has one output for all
        tokens, whatever `queries` says; `layers`, `heads` and `residual` mean nothing here.

        Args:
            queries: positions of the output, for models with one output per position; all by default.
            layers: ignored.
            heads: ignored.
            residual: ignored.
            normalize: make the absolute values of each row sum to one.
            target: class, or one per example, or one per example and query. By default the labels among the
                inputs; the next token of the input, for causal models and decoders; else the prediction.
            unk: id of the token that blanks out; the tokenizer's unknown token by default.
            absolute: drop the sign.
            rows: how many ablations run at once.
        """
        del layers, heads, residual
        found = importance.blankout(self._subject("blank-out"), queries, target, unk, absolute, rows)
        return _unit_sizes(found) if normalize else found

    def gradients(
        self,
        queries: Numbers = None,
        layers: Numbers = None,
        heads: Heads = "mean",
        residual: float = 0.5,
        normalize: bool = False,
        *,
        target: Any = None,
        kind: Gradient = "norm",
        unk: int | None = None,
        steps: int = 50,
    ) -> Tensor:
        """Gradient of p(target) at the input embeddings: (batch, 1, query, token).

        Axes and the other arguments are as for `blankout`.

        Args:
            queries: positions of the output.
            layers: ignored.
            heads: ignored.
            residual: ignored.
            normalize: make the absolute values of each row sum to one.
            target: what is explained.
            kind: "norm", L2 norm over the embedding; "input", gradient × input, signed; "integrated",
                integrated gradients from a sentence of unknown tokens, signed (extra `interpret`).
            unk: id of the unknown token, for "integrated".
            steps: of the integral.
        """
        del layers, heads, residual
        found = importance.gradients(self._subject("gradients"), queries, target, kind, unk, steps)
        return _unit_sizes(found) if normalize else found

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
        tensors: dict[str, Tensor] = {"mask": self.mask, "special": self.special}
        single = {"offsets": self.offsets, "picture": self.picture, "outputs": self.outputs}
        single |= {f"draws.{number}.outputs": drawn.outputs for number, drawn in enumerate(self.draws)}
        tensors |= {name: value for name, value in single.items() if value is not None}
        groups: dict[str, Sequence[Tensor | None]] = {
            "maps": self.maps,
            "encoder_maps": self.encoder_maps,
            "cross": self.cross,
        }
        # The fused parts are the maps themselves.
        groups |= {f"parts.{name}": maps for name, maps in self.parts.items() if name.split(" ")[-1] != FUSED}
        for number, drawn in enumerate(self.draws):
            groups[f"draws.{number}.maps"] = drawn.maps
            groups[f"draws.{number}.encoder_maps"] = drawn.encoder_maps
            groups[f"draws.{number}.cross"] = drawn.cross
        for name, group in groups.items():
            tensors |= {f"{name}.{i}": cells for i, cells in enumerate(group) if cells is not None}
        kept: list[Tensor] = []  # layers share masks, which are written once
        seen: list[int | None] = []
        for mask in self.visible:
            if mask is not None and not any(mask is other for other in kept):
                kept.append(mask)
            seen.append(None if mask is None else next(i for i, m in enumerate(kept) if m is mask))
        tensors |= {f"visible.{i}": mask for i, mask in enumerate(kept)}
        about = {
            "kind": self.kind,
            "graph": self.graph,
            "tokens": self.tokens,
            "grid": self.grid,
            "image": self.image,
            "paths": self.paths,
            "visible": seen,
            "draws": len(self.draws),
            "parts": {name: len(maps) for name, maps in self.parts.items()},
            "labels": self.labels,
            "words": self.words,
            "link": self.link,
            "sums_to_one": self.sums_to_one,
            "signed": self.signed,
        }
        write(path, tensors, about, FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote; blank-out and gradients need the model, and so a new trace."""
        return read_file(path, FORMAT, "trace", cls._made)

    @classmethod
    def _made(cls, tensors: dict[str, Tensor], about: dict[str, Any]) -> Trace:
        """A trace from what a file holds."""

        def group(name: str) -> list[Tensor]:
            found: list[Tensor] = []
            while f"{name}.{len(found)}" in tensors:
                found.append(tensors[f"{name}.{len(found)}"])
            return found

        parts: dict[str, list[Tensor | None]] = {
            name: [tensors.get(f"parts.{name}.{i}") for i in range(int(count))]
            for name, count in about["parts"].items()
        }
        for name, maps in (("", "maps"), ("encoder ", "encoder_maps"), ("cross ", "cross")):
            if f"{name}{FUSED}" in parts:
                parts[f"{name}{FUSED}"] = [*group(maps)]
        draws = [
            Draw(
                group(f"draws.{i}.maps"),
                group(f"draws.{i}.encoder_maps"),
                group(f"draws.{i}.cross"),
                tensors.get(f"draws.{i}.outputs"),
            )
            for i in range(int(about["draws"]))
        ]
        visible, read = group("visible"), group("maps")
        if not read or [len(words) for words in about["tokens"]] != [tensors["mask"].shape[1]] * len(
            tensors["mask"]
        ):
            raise ValueError("maps, mask and tokens do not fit")
        said = [tensors.get(name) for name in ("picture", "outputs")] + [draw.outputs for draw in draws]
        if any(value is not None and len(value) != len(tensors["mask"]) for value in said):
            raise ValueError("picture, outputs and mask do not fit")
        return cls(
            kind=about["kind"],
            maps=read,
            mask=tensors["mask"],
            tokens=about["tokens"],
            special=tensors["special"],
            offsets=tensors.get("offsets"),
            grid=None if about["grid"] is None else (about["grid"][0], about["grid"][1]),
            image=None if about["image"] is None else (about["image"][0], about["image"][1]),
            encoder_maps=group("encoder_maps"),
            cross=group("cross"),
            graph=about["graph"],
            parts=parts,
            draws=draws,
            visible=[None if i is None else visible[i] for i in about["visible"]],
            paths=about["paths"],
            # Older files have none of these.
            picture=tensors.get("picture"),
            outputs=tensors.get("outputs"),
            labels=about.get("labels", []),
            words={int(number): word for number, word in about.get("words", {}).items()},
            link=about.get("link", "softmax"),
            sums_to_one=about.get("sums_to_one", True),
            signed=about.get("signed", False),
        )


def _unit_sizes(values: Tensor) -> Tensor:
    """Rows whose absolute values sum to one, signs kept."""
    total = values.abs().sum(dim=-1, keepdim=True)
    return values / torch.where(total == 0.0, 1.0, total)


class _Collector:
    """Takes each attention's map as it comes, and keeps no more of it than was asked for."""

    def __init__(self, graph: GraphKind, heads: bool, parts: bool, stack: str | None) -> None:
        self.graph, self.heads, self.with_parts, self.stack = graph, heads, parts, stack
        self.calls: list[Call] = []  # without their tensors
        self.maps: list[Tensor] = []
        self.live: list[Tensor] = []  # weights that gradients will be asked for
        self.parts: list[dict[str, Tensor]] = []
        self.stacks: dict[str, None] = {}  # all that ran, in order

    def __call__(self, call: Call) -> None:
        self.stacks[call.chain] = None
        if self.stack is not None and not (call.path + ".").startswith(self.stack + "."):
            return
        nothing = torch.empty(0)  # a view of the weights, however small, would keep all of them
        kept = replace(call, weights=nothing, value=None, output=None, parts={})
        self.calls.append(kept)
        if self.graph == "gradient":
            self.live.append(call.weights)
            self.maps.append(nothing)
        elif self.graph == "norm":
            self.maps.append(_kept(norm_map(call, self.heads)))
        elif self.graph == "effective":
            cells = effective_map(call)
            self.maps.append(_kept(cells if self.heads else cells.mean(dim=1)))
        else:
            self.maps.append(self._reduced(call.weights))
        if self.with_parts:
            found = {name: self._reduced(cells) for name, cells in call.parts.items()}
            self.parts.append({**found, FUSED: self.maps[-1]} if found else {})

    def _reduced(self, weights: Tensor) -> Tensor:
        return _kept(weights if self.heads else weights.mean(dim=1, dtype=torch.float32))

    def take_gradients(self, score: Tensor) -> None:
        """Replace the live weights by max(0, A ⊙ ∂y/∂A)."""
        found = torch.autograd.grad(score, self.live, allow_unused=True)
        for number, (weights, gradient) in enumerate(zip(self.live, found, strict=True)):
            slope = torch.zeros_like(weights) if gradient is None else gradient
            self.maps[number] = _kept(gradient_map(weights, slope, self.heads))
        self.live = []


def _kept(cells: Tensor) -> Tensor:
    # Not a view of something larger, and not the tensor that the model goes on with.
    return cells.detach().to("cpu", torch.float32, copy=True)


def trace(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    decoder: Any = None,
    tokens: Sequence[Sequence[str]] | None = None,
    heads: bool = False,
    graph: GraphKind = "attention",
    target: Any = None,
    query: int | None = None,
    parts: bool = False,
    samples: int = 0,
    seed: int = 0,
    stack: str | None = None,
    output: Output | None = None,
) -> Trace:
    """Run a model once, in evaluation mode, and keep its attention maps.

    Any Hugging Face model that dispatches its attention will do, plain or attached to, whatever its attention
    implementation; models built on `torch.nn.MultiheadAttention`; and Overt's own. The model is left as it
    was, also when something fails.

    Args:
        model: the model.
        inputs: text or a list of texts; token ids; images (PIL, or a float tensor of pixel values); or a
            mapping of the model's arguments, as tokenizers and collators give it.
        tokenizer: for text; by default the one that lies beside the model's weights.
        processor: for PIL images; by default the one that lies beside the weights.
        decoder: text or token ids that an encoder–decoder's decoder is fed. By default the model writes
            them itself, greedily.
        tokens: names of the tokens, per example, where the inputs have none.
        heads: keep each head's maps, for `heads="each"` and lists of heads; by default only their mean.
        graph: what the maps are. "attention": the weights. "effective": without the part that changes no
            output (Brunner et al. 2020); signed in rollout, cut at zero and renormalised in flow.
            "norm": ‖α f(x)‖, the size of what is added (Kobayashi et al. 2020). "gradient": max(0, A ⊙ ∂y/∂A)
            with y the target's logit. Rows of these two are made to sum to one before the residual joins.
        target: of "gradient": class or token, or one per example; by default as for `Trace.blankout`.
        query: of "gradient", for models with one output per position: which one; by default the first of an
            encoder's, the last real one of others'.
        parts: keep the parts of maps that the model's mechanisms show, as Evolving does.
        samples: number of posterior samples of a model with random weights; 0 traces the mean of its weights.
        seed: of the samples' noise.
        stack: path of the stack to trace, where a model has several, such as "vision_model".
        output: takes the logits from what the model returns, where it has no `logits`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    _check.one_of("graph", graph, GRAPHS)
    _check.whole("samples", samples, 0)
    if samples and graph == "gradient":
        raise ValueError('samples with graph="gradient" is not supported: trace one or the other')
    model = _unwrapped(model)
    given = prepare(model, inputs, tokenizer=tokenizer, processor=processor, decoder=decoder, tokens=tokens)
    collector = _Collector(graph, heads, parts, stack)
    values, slopes = graph in ("effective", "norm"), graph == "gradient"
    with ExitStack() as contexts:
        contexts.enter_context(watching(model, collector, values=values, parts=parts))
        contexts.enter_context(differentiable(model) if slopes else torch.no_grad())
        result = model(**(with_history(given.arguments) if slopes else given.arguments))
        if slopes:
            made = _assembled(model, given, collector, output)
            _by_gradient(made, collector, result, target, query)
    if not slopes:
        made = _assembled(model, given, collector, output)
    made.outputs = _outputs(made, result)
    del result  # its logits of all positions may be large
    if samples:
        _add_draws(model, given, made, collector, samples, seed)
    _name_classes(made)
    return made


def _outputs(made: Trace, result: Any) -> Tensor | None:
    assert made.subject is not None
    return made.subject.outputs_in(result, made.main_queries())


def _name_classes(made: Trace) -> None:
    """What the classes of the outputs are called, and how outputs become probabilities."""
    subject = made.subject
    if made.outputs is None or subject is None:
        return
    classes = made.outputs.shape[1]
    made.link, made.labels = subject.link(classes), subject.labels(classes)
    if made.labels or not subject.speaks(classes):
        return
    rows = [made.outputs, *(draw.outputs for draw in made.draws if draw.outputs is not None)]
    if made.draws:
        rows.append(torch.stack([made._probabilities(example)[0] for example in range(len(made))]))
    likely = {number for row in rows for number in row.topk(min(NAMED, classes)).indices.flatten().tolist()}
    made.words = names_of(subject.inputs.tokenizer, sorted(likely))


def everything(model: nn.Module, graph: GraphKind = "attention", samples: int = 20) -> dict[str, Any]:
    """Arguments of `trace` that keep all there is: heads, parts, posterior samples, as a model has them.

    Args:
        model: the model.
        graph: what the maps are. "norm" keeps no heads: the norm of a sum is not the mean of the norms.
        samples: of a Bayesian model's posterior.
    """
    maps = [module for module in model.modules() if isinstance(module, AttentionMap)]
    parted = any(layer.part_names for one in maps for layer in one.layers)
    random = any(one.random for one in maps)
    return {
        "heads": graph != "norm",
        "parts": parted and graph == "attention",
        "samples": samples if random and graph != "gradient" else 0,
    }


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside what torch.compile or data parallelism put around it."""
    for name in ("_orig_mod", "module"):
        inner = model._modules.get(name)
        if inner is not None and type(model).__module__.startswith("torch."):
            return _unwrapped(inner)
    return model


class _Sorted(NamedTuple):
    """Numbers of the calls that make up a trace."""

    kind: TraceKind
    maps: list[int]
    encoder: list[int]
    cross: list[int]


def _sorted(collector: _Collector, sizes: Sequence[Tensor]) -> _Sorted:
    """Which calls are the encoder's, the decoder's and cross-attention."""
    calls = collector.calls
    names = ", ".join(repr(chain) for chain in collector.stacks)
    several = f"the model attends in several stacks, choose one by stack=…: {names}"
    if not calls:
        if collector.stack is None:
            raise ValueError("no attention ran: nothing to trace")
        raise ValueError(f"no attention ran in {collector.stack!r}; stacks that did: {names}")
    kept = [number for number, call in enumerate(calls) if call.chain != call.path]
    kept = kept or list(range(len(calls)))  # an attention outside of all lists of layers pools what they made
    cross = [number for number in kept if calls[number].kind == "cross"]
    by_chain: dict[str, list[int]] = {}
    for number in kept:
        if calls[number].kind != "cross":
            by_chain.setdefault(calls[number].chain, []).append(number)
    chains = list(by_chain)
    if not cross:
        if len(chains) > 1:
            raise ValueError(several)
        own = by_chain[chains[0]]
        kind: TraceKind = "causal" if all(_causal(calls[number]) for number in own) else "encoder"
        found = _Sorted(kind, own, [], [])
    else:
        across = {calls[number].chain for number in cross}
        decoder = [n for chain in chains if chain in across for n in by_chain[chain]]
        others = [chain for chain in chains if chain not in across]
        if len(across) > 1 or len(others) > 1:
            raise ValueError(several)
        if len(decoder) != len(cross):
            raise ValueError(
                f"the decoder has {len(decoder)} self-attentions and {len(cross)} cross-attentions; "
                "only one of each per layer is supported"
            )
        found = _Sorted("encoder–decoder", decoder, by_chain[others[0]] if others else [], cross)
    for group in (found.maps, found.encoder, found.cross):
        shapes = {(sizes[n].shape[0], *sizes[n].shape[-2:]) for n in group}
        if len(shapes) > 1:
            shown = ", ".join(str(shape) for shape in sorted(shapes))
            raise ValueError(
                f"maps must have one size in all layers, got (batch, query, key) {shown}: models that attend "
                "in windows or shrink their sequence are not supported"
            )
    for group in (found.maps, found.encoder):
        if group and sizes[group[0]].shape[-1] != sizes[group[0]].shape[-2]:
            rows, columns = sizes[group[0]].shape[-2:]
            raise ValueError(
                f"{calls[group[0]].path} has {rows} queries and {columns} keys: trace without a cache"
            )
    return found


def _check_whole(model: nn.Module, calls: Sequence[Call], found: _Sorted) -> None:
    """Refuse a stack some of whose layers mix tokens without attention, which no map would show."""
    for group in (found.maps, found.encoder):
        paths = [calls[number].path for number in group]
        chain = calls[group[0]].chain if group else ""
        try:
            layers = model.get_submodule(chain)
        except AttributeError:
            continue
        if not group or chain == paths[0] or not isinstance(layers, nn.ModuleList):
            continue
        seen = {int(path.removeprefix(chain + ".").split(".")[0]) for path in paths}
        if missing := sorted(set(range(len(layers))) - seen):
            shown = ", ".join(map(str, missing[:4])) + (", …" if len(missing) > 4 else "")
            raise ValueError(
                f"layers {shown} of {chain} do not attend (a convolution or a state space instead?), so maps "
                "alone do not tell how tokens mix: not supported"
            )


def _causal(call: Call) -> bool:
    """Whether a map is causal: by its mask where there is one to see, else as its module says."""
    seen = call.visible
    if seen is None or seen.shape[-1] != seen.shape[-2] or seen.shape[-1] < 2:
        return call.kind == "decoder"
    return not bool(seen.triu(1).any())


def _assembled(model: nn.Module, given: Inputs, collector: _Collector, output: Output | None) -> Trace:
    """What was collected, sorted into a trace."""
    calls, maps = collector.calls, collector.maps
    found = _sorted(collector, collector.live or maps)
    _check_whole(model, calls, found)
    sizes = collector.live or maps
    batch = sizes[found.maps[0]].shape[0]
    queries = sizes[found.maps[0]].shape[-2]
    source = sizes[found.cross[0]].shape[-1] if found.cross else 0
    lowest = calls[(found.encoder or found.cross or found.maps)[0]]
    pictured = given.grid is not None and _sees_pixels(model, lowest.chain)
    if not pictured:
        given.grid = None
    mask, special, words = _token_axis(given, calls, found, batch, queries, source)
    total = source + queries
    offsets = None
    if given.offsets is not None and given.offsets.shape[1] in (source or total, total):
        offsets = torch.zeros(batch, total, 2, dtype=torch.int64)
        offsets[:, : given.offsets.shape[1]] = given.offsets
    order = [*found.maps, *found.encoder, *found.cross]
    parts: dict[str, list[Tensor | None]] = {}
    if collector.with_parts:
        if not any(call.part_names for call in calls):
            raise ValueError(
                "parts=True needs a mechanism whose work has parts, such as Evolving: this model has none"
            )
        for kind, numbers in (("", found.maps), ("encoder ", found.encoder), ("cross ", found.cross)):
            names = dict.fromkeys(name for n in numbers for name in calls[n].part_names)
            for name in (*names, FUSED) if names else ():
                parts[f"{kind}{name}"] = [collector.parts[n].get(name) for n in numbers]
    return Trace(
        kind=found.kind,
        maps=[sizes[n] for n in found.maps],
        mask=mask,
        tokens=words,
        special=special,
        offsets=offsets,
        grid=given.grid,
        image=given.image if pictured else None,
        picture=picture_of(given) if pictured else None,
        encoder_maps=[sizes[n] for n in found.encoder],
        cross=[sizes[n] for n in found.cross],
        graph=collector.graph,
        parts=parts,
        visible=[calls[n].visible for n in order],
        paths=[calls[n].path for n in order],
        sums_to_one=all(calls[n].sums_to_one for n in order),
        signed=any(calls[n].signed for n in order),
        subject=Subject(model, given, mask, source, found.kind, output),
    )


def _sees_pixels(model: nn.Module, chain: str) -> bool:
    """Whether a list of layers reads an image, as the nearest model around it says."""
    names, module = [getattr(model, "main_input_name", None)], model
    for part in chain.split("."):
        module = module._modules.get(part) or module
        names.append(getattr(module, "main_input_name", None))
    return next((name for name in reversed(names) if isinstance(name, str)), None) in (None, "pixel_values")


def _token_axis(
    given: Inputs, calls: Sequence[Call], found: _Sorted, batch: int, queries: int, source: int
) -> tuple[Tensor, Tensor, list[list[str]]]:
    """Mask, special tokens and names along the token axis."""

    def of(length: int, mask: Tensor | None, words: Any, special: Any, call: Call | None) -> Any:
        pictured = given.grid is not None and call is not None
        if mask is None or mask.shape != (batch, length) or pictured:
            mask = torch.ones(batch, length, dtype=torch.bool)
            if call is not None and call.visible is not None:
                # A key that no query sees is padding.
                mask = mask & call.visible.any(dim=-2)
        if pictured and given.grid is not None:
            words, special = _patch_names(batch, length, given.grid)
        if words is None or len(words) != batch or any(len(one) != length for one in words):
            if given.extra.get("named") and call is not None:
                sizes = [len(one) for one in words or ()]
                raise ValueError(f"tokens must be {batch} lists of {length} words, got lists of {sizes}")
            words = [[str(number) for number in range(length)] for _ in range(batch)]
        if special is None or special.shape != (batch, length):
            special = torch.zeros(batch, length, dtype=torch.bool)
        return mask, special & mask, words

    if not source:
        first = calls[found.maps[0]]
        mask, special, words = of(queries, given.mask, given.tokens, given.special, first)
        return mask, special, words
    lowest = calls[found.encoder[0] if found.encoder else found.cross[0]]
    extra = given.extra
    before = of(source, given.mask, given.tokens, given.special, lowest)
    after = of(
        queries, extra.get("target mask"), extra.get("target tokens"), extra.get("target special"), None
    )
    words = [one + other for one, other in zip(before[2], after[2], strict=True)]
    return torch.cat([before[0], after[0]], dim=1), torch.cat([before[1], after[1]], dim=1), words


def _patch_names(batch: int, length: int, grid: tuple[int, int]) -> tuple[Any, Any]:
    """Patches by row and column; what comes before them is special."""
    before = length - grid[0] * grid[1]
    if before < 0:
        return None, None
    names = [["[CLS]", *(f"[{n}]" for n in range(1, before))][n] for n in range(before)]
    names += [f"{row},{column}" for row in range(grid[0]) for column in range(grid[1])]
    special = torch.zeros(batch, length, dtype=torch.bool)
    special[:, :before] = True
    return [names] * batch, special


def _by_gradient(made: Trace, collector: _Collector, result: Any, target: Any, query: int | None) -> None:
    subject = made.subject
    assert subject is not None
    logits = subject.logits_in(result)
    examples = list(range(len(made)))
    queries = made.main_queries() if query is None else [query] * len(made)
    queries = [0] * len(made) if logits.shape[1] == 1 else numbers("query", queries, logits.shape[1])
    asked = sorted(set(queries))
    goal = subject.target(logits.detach(), target, asked)
    chosen = goal[examples, [asked.index(one) for one in queries]]
    collector.take_gradients(logits[examples, queries, chosen].sum())
    found = _sorted(collector, collector.maps)
    made.maps = [collector.maps[n] for n in found.maps]
    made.encoder_maps = [collector.maps[n] for n in found.encoder]
    made.cross = [collector.maps[n] for n in found.cross]


def _add_draws(
    model: nn.Module, given: Inputs, made: Trace, first: _Collector, samples: int, seed: int
) -> None:
    """Trace posterior samples; the trace's own maps become their mean."""
    values = first.graph in ("effective", "norm")
    for number in range(samples):
        collector = _Collector(first.graph, first.heads, False, first.stack)
        drawing = _sampling(model, given, number, seed)
        with drawing as arguments, watching(model, collector, values=values), torch.no_grad():
            result = model(**arguments)
        found = _sorted(collector, collector.maps)
        maps, below, across = (
            [collector.maps[n] for n in group] for group in (found.maps, found.encoder, found.cross)
        )
        made.draws.append(Draw(maps, below, across, _outputs(made, result)))
    for name in ("maps", "encoder_maps", "cross"):
        stacks = zip(*(getattr(draw, name) for draw in made.draws), strict=True)
        setattr(made, name, [torch.stack(maps).mean(dim=0) for maps in stacks])


class _sampling:  # noqa: N801, used like a function
    """Arguments of a forward that draws posterior sample `number`."""

    def __init__(self, model: nn.Module, given: Inputs, number: int, seed: int) -> None:
        from overt.attaching.state import AttachedState

        self.arguments, self.number, self.seed = dict(given.arguments), number, seed
        self.state = next((m for m in model.modules() if isinstance(m, AttachedState)), None)
        if self.state is None and not _takes_chain(model):
            raise ValueError(
                "samples needs random weights: overt.attach a Bayesian(…), or use a model of overt's that "
                "takes a chain"
            )
        if self.state is None:
            step = getattr(model, "step", 0)
            self.arguments["chain"] = Chain(step=step, sample=number, seed=seed, kl=False)

    def __enter__(self) -> dict[str, Any]:
        if self.state is not None:
            self.kept, self.state.seed = self.state.seed, self.seed
            self.state.override = {"sample": torch.tensor(self.number), "examples": 0}
        return self.arguments

    def __exit__(self, *details: object) -> None:
        if self.state is not None:
            self.state.override, self.state.seed = None, self.kept


def _takes_chain(model: nn.Module) -> bool:
    import inspect

    return "chain" in inspect.signature(model.forward).parameters
