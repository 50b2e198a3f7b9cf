"""Trace sentences or pictures through pretrained models and print what their attention draws on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import overt
from overt._files import check_folder
from overt.cli import caption
from overt.cli.inputs import (
    DecoderOption,
    MixingOption,
    QueryOption,
    StackOption,
    kind_of_folder,
    names_picture,
    open_model,
    own_command,
    prompt_with_picture,
    read_input,
)
from overt.cli.shared import app, join_or
from overt.data.pictures import opened
from overt.models import mcan
from overt.recipes.asking import Answerer, inputs_of, open_answerer, token_names
from overt.recipes.caption_reading import SAMPLES
from overt.tracing.images import language_stack
from overt.tracing.kept_rows import METHODS
from overt.tracing.methods.method import method_of
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.mixing.mixing import mixing_of
from overt.tracing.options import numbers
from overt.tracing.pixels import attends_to_pixels, sizes_of_maps
from overt.tracing.tracer import everything
from overt.view.terminal import pixel_map, table, written_table

if TYPE_CHECKING:
    from rich.console import Console


def run(
    texts: Sequence[str],
    models: Sequence[str],
    methods: Sequence[str] | None = None,
    layer: int | None = None,
    query: int | None = None,
    decoder: str | None = None,
    residual: float | None = None,
    receptive_field: bool = False,
    mixing: Any = "attention",
    samples: int | None = None,
    stack: str | None = None,
    out: Path | None = None,
    image: Path | None = None,
    memory: int | None = None,
    generate: int | None = None,
) -> dict[str, overt.Trace]:
    """Trace each text through each model, print a table for each, and write a page or the trace to `out`.

    `layer` is the last by default. With `generate`, the table is of the words that the model writes after a
    text, by default with the mean of layers of raw attention.

    A network over pixels is traced once for each size of its maps, unless `stack` names one; its likeliest
    classes and its maps are printed. A network that answers questions reads `image`, and the texts are
    questions about it; so does a language model that sees pictures, which writes after picture and text.
    """
    from rich.console import Console

    if any(_captions(name) for name in models):
        given = {
            "--method": methods,
            "--layer": layer,
            "--query": query,
            "--decoder": decoder,
            "--residual": residual,
            "--receptive-field": receptive_field or None,
            "--mixing": None if mixing == "attention" else mixing,
            "--stack": stack,
            "--image": image,
            "--memory": memory,
            "--generate": generate,
        }
        _caption(texts, models, given, samples, out)
        return {}
    for method in methods or ():
        method_of(method, argument="--method")
    mixing_of(mixing, "--mixing")
    if generate is not None and query is not None:
        raise ValueError(f"--query is for texts that are given, and --generate shows all words, got {query}")
    to_page = out is not None and out.suffix.lower() in (".html", ".htm")
    if out is not None:
        if not to_page and out.suffix != ".safetensors":
            raise ValueError(f"--out must end in .html (a page) or .safetensors (the trace), got {out}")
        check_folder("--out", out)
        if not to_page and len(texts) * len(models) > 1:
            raise ValueError(
                f"--out {out} stores one trace: give one text and one model, or write a page: --out page.html"
            )
    last = -1 if layer is None else layer
    console = Console()
    traces: dict[str, overt.Trace] = {}
    for name in models:
        answerer = _answerer(name, image, generate)
        model = open_model(name) if answerer is None else answerer.net
        sees = answerer is None and image is not None
        if sees and language_stack(model) is None:
            raise ValueError(f"--image is for models that see pictures beside a text, and {name} does not")
        stacks = _stacks(model, stack)
        if len(stacks) > 1 and out is not None and not to_page:
            sizes = join_or(map(str, stacks))
            raise ValueError(f"--out {out} stores one trace: choose a size of maps with --stack: {sizes}")
        extras = _extras(model, mixing, samples, to_page)
        extras |= {} if memory is None else {"memory": memory}
        extras |= {} if generate is None else {"generate": generate}
        for text, part in product(texts, stacks):
            tokens = tokenizer = None
            source: Any
            if image is None:
                source = read_input(text, model)
            elif answerer is None:
                source, tokenizer = prompt_with_picture(name, model, read_input(text), image)
            else:
                source = inputs_of(answerer, opened(image, str(image)), text)
                tokens = [token_names(answerer, text)]
            reading: dict[str, Any] = {"decoder": decoder, "tokens": tokens, "tokenizer": tokenizer}
            traced = overt.trace(model, source, **reading, mixing=mixing, stack=part, **extras)
            named = (Path(name).name, models), (text, texts), (f"{part} pixels", stacks)
            label = " · ".join(each for each, many in named if len(many) > 1)
            traces[label if label not in traces else f"{label} ({len(traces) + 1})"] = traced
            heading = f"{label}: " if label else ""
            arguments = {"residual": residual, "receptive_field": receptive_field}
            applicable = [
                name
                for name, method in known_methods("maps").items()
                if traced.why_not(method, _layers(traced, layer)) is None
            ]
            if traced.of_states:
                # Flow would need maps, which do not fit; a page has all of rollout's layers in one go.
                quick = METHODS[:1] if to_page else METHODS
                applicable = [name for name in applicable if name in quick]
            shown = applicable if methods is None else methods
            for method in shown:
                if (reason := traced.why_not(method, _layers(traced, layer))) is not None:
                    raise ValueError(f"--method {method}: {reason}")
            if traced.generated is not None:
                _print_written(console, traced, methods or METHODS[:1], layer, heading, arguments)
                continue
            if traced.kind != "pixels":
                _print(console, traced, shown, last, query, heading, arguments)
                continue
            if part == stacks[0]:
                _print_classes(console, traced, text)
            _print_pixels(console, traced, shown, last, query, arguments)
    if to_page and out is not None:
        # The page has all methods that read maps; of those that run the model, the ones given.
        running = {name for name in methods or () if method_of(name).runs_model}
        content = traces if len(traces) > 1 else next(iter(traces.values()))
        maps = known_methods("maps").items()
        applicable = [
            name
            for name, method in maps
            if not any(t.why_not(method) or (t.of_states and name not in METHODS) for t in traces.values())
        ]
        page_methods = None if not running else [*applicable, *sorted(running)]
        title = Path(texts[0]).name if names_picture(texts[0]) and len(texts) == 1 else None
        # Each trace has the picture once, if its model reads it among words.
        read = [image for each in traces.values() if each.generated is not None]
        images = None if image is None or not read else read
        overt.page(content, title=title, residual=residual, methods=page_methods, images=images).save(out)
        console.print(f"page in {out}: open it in any browser", style="dim", markup=False, soft_wrap=True)
    elif out is not None:
        next(iter(traces.values())).save(out)
        line = f"trace in {out}: load it with overt.Trace.load"
        console.print(line, style="dim", markup=False, soft_wrap=True)
    return traces


def _captions(name: str) -> bool:
    """Whether a model is a captioning network."""
    own = own_command(name)
    return own is not None and own[1].startswith("overt caption")


def _caption(
    texts: Sequence[str],
    models: Sequence[str],
    given: Mapping[str, Any],
    samples: int | None,
    out: Path | None,
) -> None:
    """Show what the words of captions draw on, as `overt caption` does: the only map of such a network."""
    for name in models:
        if not _captions(name):
            own = own_command(name)
            command = "overt caption photo.jpg --model FOLDER" if own is None else own[1]
            raise ValueError(f"--model {name} cannot be traced beside a captioning network: see {command}")
    for option, value in given.items():
        if value is not None:
            raise ValueError(f"{option} is not for captioning networks, which have one map, got {value}")
    if len(texts) > 1 and out is not None:
        raise ValueError(f"--out {out} is a page of one picture, got {len(texts)}")
    for text in texts:
        caption.run(text, models, samples=samples or SAMPLES, out=out)


def _answerer(name: str, image: Path | None, generate: int | None) -> Answerer | None:
    """The model of a folder, if it is one that answers questions about an image."""
    if kind_of_folder(name) != mcan.MODEL_TYPE:
        if image is not None and generate is None:
            raise ValueError(
                f"--image is for models that answer questions (overt ask), and {name} is none: a language "
                "model that sees pictures needs --generate as well"
            )
        return None
    if image is None:
        raise ValueError(f"--model {name} answers questions about an image: give it with --image photo.jpg")
    return open_answerer(Path(name), Path(name).name)


def _layers(traced: overt.Trace, layer: int | None) -> int | None:
    """The layer to read; None for one that the model lacks, which is refused later."""
    layer = -1 if layer is None else layer
    return layer if -traced.layers <= layer < traced.layers else None


def _stacks(model: Any, stack: str | None) -> list[str | None]:
    """The stacks to trace: the given one, all of a network over pixels, or the only one of other models."""
    sizes = sizes_of_maps(model) if stack is None and attends_to_pixels(model) else []
    return [*sizes] or [stack]


def _extras(model: Any, mixing: Any, samples: int | None, to_page: bool) -> dict[str, Any]:
    """What a trace keeps besides its maps: for a page everything; of pixels, always the samples."""
    kept = everything(model, mixing)
    kept = kept if to_page else {"samples": kept["samples"]} if attends_to_pixels(model) else {}
    return kept if samples is None else {**kept, "samples": samples}


def _print_classes(console: Console, traced: overt.Trace, picture: str) -> None:
    """What the network sees of a picture, and its likeliest classes."""
    assert traced.subject is not None
    fittings = traced.subject.inputs.extra["fittings"]
    console.print(f"{picture}: {fittings[0]}", style="dim", markup=False, highlight=False, soft_wrap=True)
    if traced.outputs is None:
        return
    likely = traced.predictions()[0]
    for label, probability in zip(likely.labels, likely.mean.tolist(), strict=True):
        line = f"{100 * probability:6.1f} %  {label}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if traced.draws:
        console.print(f"mean of {traced.samples} posterior samples", style="dim", highlight=False)


def _print_pixels(
    console: Console,
    traced: overt.Trace,
    methods: Sequence[str],
    layer: int,
    query: int | None,
    arguments: dict[str, Any],
) -> None:
    """What one pixel of the maps draws on."""
    assert traced.grid is not None
    size, layers = f"{traced.grid[0]}x{traced.grid[1]}", traced.layers
    for name, number, count in (("--layer", layer, layers), ("--query", query or 0, traced.queries)):
        if not -count <= number < count:
            raise ValueError(
                f"{name} must lie in 0 to {count - 1} for {size} pixels, got {number}: --stack chooses a size"
            )
    row = traced.main_queries()[0] if query is None else query % traced.queries
    place = f"{size} pixels, layer {layer % layers + 1} of {layers} ({traced.paths[layer]})"
    for name in methods:
        what = f"{place}, {method_of(name).title}: what {traced.tokens[0][row]} draws on"
        console.print(what, markup=False, highlight=False, soft_wrap=True)
        console.print(pixel_map(traced, name, row, layer, **arguments), markup=False, highlight=False)


def _print_written(
    console: Console,
    traced: overt.Trace,
    methods: Sequence[str],
    layer: int | None,
    heading: str,
    arguments: dict[str, Any],
) -> None:
    """What the model wrote, and what each word of it draws on."""
    assert traced.generated is not None
    written = traced.generated[0].nonzero().flatten().tolist()
    text = " ".join(traced.tokens[0][place] for place in written)
    if traced.texts and traced.offsets is not None:
        text = traced.texts[0][int(traced.offsets[0, written[0], 0]) :]
    console.print(f"{heading}{text.strip()}", style="bold", markup=False, highlight=False, soft_wrap=True)
    title = "what each word that was generated draws on"
    console.print(written_table(traced, methods, layer, title, **arguments))


def _print(
    console: Console,
    traced: overt.Trace,
    methods: Sequence[str],
    layer: int,
    query: int | None,
    heading: str,
    arguments: dict[str, Any],
) -> None:
    layers = traced.layers
    row = traced.main_queries()[0] if query is None else numbers("queries", query, traced.queries)[0]
    word = traced.tokens[0][traced.first + row]
    title = f"{heading}{traced.kind}, layer {layer % layers + 1} of {layers}, what {word!r} draws on"
    if traced.mixing != "attention" and any(not method_of(name).runs_model for name in methods):
        title += f", by {traced.mixing_kind.title}"
    console.print(table(traced, methods, query, layer, title, **arguments))


@app.command(rich_help_panel="Read attention")
def trace(
    text: Annotated[
        list[str],
        typer.Argument(help="Sentence, or path of a text (.txt) or of an image. Several are compared."),
    ],
    model: Annotated[
        list[str],
        typer.Option(help="Folder of a model, or a name on the hub. Repeatable: several are compared."),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Method: {join_or(known_methods())}. Repeatable. Default: all methods that read maps."
        ),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Layer, counted from 0; −1 is the last. Default: the last; of generated words, the mean of "
            "layers of raw attention."
        ),
    ] = None,
    query: QueryOption = None,
    decoder: DecoderOption = None,
    residual: Annotated[
        float | None, typer.Option(help="Weight of the residual connection. Default: that of the mixing.")
    ] = None,
    receptive_field: Annotated[
        bool, typer.Option(help="Divide by the result of uniform attention, for causal models.")
    ] = False,
    mixing: MixingOption = "attention",
    samples: Annotated[
        int | None,
        typer.Option(
            help="Posterior samples of a model with random weights. Default: 20 for a page and for pictures.",
            min=1,
        ),
    ] = None,
    stack: StackOption = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write a page of all methods (.html) or the trace (.safetensors)."),
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(
            help="Image, for models that answer questions about it (overt ask): the texts; or, with "
            "--generate, for language models that see pictures."
        ),
    ] = None,
    memory: Annotated[
        int | None,
        typer.Option(
            help="Bytes that maps may take; above, queries and keys are kept. Default: 2**30.", min=1
        ),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(help="Let the model write so many tokens, and show what its words draw on.", min=1),
    ] = None,
) -> None:
    """Show which tokens or pixels a model's attention draws on, by raw attention, rollout and flow."""
    run(
        text,
        model,
        methods=method or None,
        layer=layer,
        query=query,
        decoder=decoder,
        residual=residual,
        receptive_field=receptive_field,
        mixing=mixing,
        samples=samples,
        stack=stack,
        out=out,
        image=image,
        memory=memory,
        generate=generate,
    )
