"""Trace sentences or pictures through pretrained models and print what their attention draws on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import overt
from overt._files import check_folder
from overt.cli.inputs import DecoderOption, MixingOption, QueryOption, open_model, read_input
from overt.cli.shared import app, join_or
from overt.tracing.methods.method import method_of
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.mixing.mixing import mixing_of
from overt.tracing.options import numbers
from overt.tracing.tracer import everything
from overt.view.terminal import table

if TYPE_CHECKING:
    from rich.console import Console


def run(
    texts: Sequence[str],
    models: Sequence[str],
    methods: Sequence[str] | None = None,
    layer: int = -1,
    query: int | None = None,
    decoder: str | None = None,
    residual: float | None = None,
    receptive_field: bool = False,
    mixing: Any = "attention",
    out: Path | None = None,
) -> dict[str, overt.Trace]:
    """Trace each text through each model, print a table for each, and write a page or the trace to `out`."""
    from rich.console import Console

    for method in methods or ():
        method_of(method, argument="--method")
    mixing_of(mixing, "--mixing")
    to_page = out is not None and out.suffix.lower() in (".html", ".htm")
    if out is not None:
        if not to_page and out.suffix != ".safetensors":
            raise ValueError(f"--out must end in .html (a page) or .safetensors (the trace), got {out}")
        check_folder("--out", out)
        if not to_page and len(texts) * len(models) > 1:
            raise ValueError(
                f"--out {out} stores one trace: give one text and one model, or write a page: --out page.html"
            )
    console = Console()
    traces: dict[str, overt.Trace] = {}
    for name in models:
        model = open_model(name)
        extras = everything(model, mixing) if to_page else {}
        for text in texts:
            traced = overt.trace(model, read_input(text), decoder=decoder, mixing=mixing, **extras)
            label = " · ".join(
                part for part, many in ((Path(name).name, models), (text, texts)) if len(many) > 1
            )
            traces[label if label not in traces else f"{label} ({len(traces) + 1})"] = traced
            heading = f"{label}: " if label else ""
            arguments = {"residual": residual, "receptive_field": receptive_field}
            applicable = [
                name for name, method in known_methods("maps").items() if traced.why_not(method) is None
            ]
            shown = applicable if methods is None else methods
            _print(console, traced, shown, layer, query, heading, arguments)
    if to_page and out is not None:
        # The page has all methods that read maps; of those that run the model, the ones given.
        running = {name for name in methods or () if method_of(name).runs_model}
        content = traces if len(traces) > 1 else next(iter(traces.values()))
        maps = known_methods("maps").items()
        applicable = [name for name, method in maps if not any(t.why_not(method) for t in traces.values())]
        page_methods = None if not running else [*applicable, *sorted(running)]
        overt.page(content, residual=residual, methods=page_methods).save(out)
        console.print(f"page in {out}: open it in any browser", style="dim", markup=False, soft_wrap=True)
    elif out is not None:
        next(iter(traces.values())).save(out)
        line = f"trace in {out}: load it with overt.Trace.load"
        console.print(line, style="dim", markup=False, soft_wrap=True)
    return traces


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
    text: Annotated[list[str], typer.Argument(help="Sentence, or path of an image. Several are compared.")],
    model: Annotated[
        list[str],
        typer.Option(
            help="Folder with weights and tokenizer, or a name on the hub. Repeatable: several are compared."
        ),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Method: {join_or(known_methods())}. Repeatable. Default: all methods that read maps."
        ),
    ] = None,
    layer: Annotated[int, typer.Option(help="Layer, counted from 0; −1 is the last.")] = -1,
    query: QueryOption = None,
    decoder: DecoderOption = None,
    residual: Annotated[
        float | None, typer.Option(help="Weight of the residual connection. Default: that of the mixing.")
    ] = None,
    receptive_field: Annotated[
        bool, typer.Option(help="Divide by the result of uniform attention, for causal models.")
    ] = False,
    mixing: MixingOption = "attention",
    out: Annotated[
        Path | None,
        typer.Option(help="Also write a page of all methods (.html) or the trace (.safetensors)."),
    ] = None,
) -> None:
    """Show which tokens a model's attention draws on, by raw attention, rollout and flow."""
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
        out=out,
    )
