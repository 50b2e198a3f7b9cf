"""Trace one sentence or picture through a pretrained model and print what its attention draws on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import overt
from overt._files import check_folder
from overt.cli.app import app, listed
from overt.cli.inputs import open_model, read_input
from overt.tracing.methods.method import method_of
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.mixing.mixing import mixing_of, mixings
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
    """Trace each text through each model, print a table of each, and write a page or the trace to `out`."""
    from rich.console import Console

    for method in methods or ():
        method_of(method, argument="--method")
    mixing_of(mixing, "--mixing")
    page = out is not None and out.suffix.lower() in (".html", ".htm")
    if out is not None:
        if not page and out.suffix != ".safetensors":
            raise ValueError(f"--out must end in .html (a page) or .safetensors (the trace), got {out}")
        check_folder("--out", out)
        if not page and len(texts) * len(models) > 1:
            raise ValueError(
                f"{out} holds one trace: give one text and one model, or a page, --out page.html"
            )
    console = Console()
    found: dict[str, overt.Trace] = {}
    for name in models:
        model = open_model(name)
        wanted = everything(model, mixing) if page else {}
        for text in texts:
            traced = overt.trace(model, read_input(text), decoder=decoder, mixing=mixing, **wanted)
            label = " · ".join(
                part for part, many in ((Path(name).name, models), (text, texts)) if len(many) > 1
            )
            found[label if label not in found else f"{label} ({len(found) + 1})"] = traced
            heading = f"{label}: " if label else ""
            arguments = {"residual": residual, "receptive_field": receptive_field}
            able = [name for name, one in known_methods("maps").items() if traced.why_not(one) is None]
            shown = able if methods is None else methods
            _print(console, traced, shown, layer, query, heading, arguments)
    if page and out is not None:
        # The page has all that read maps, and of what runs the model that which was named.
        running = {name for name in methods or () if method_of(name).runs_model}
        one = found if len(found) > 1 else next(iter(found.values()))
        maps = known_methods("maps").items()
        able = [name for name, method in maps if not any(t.why_not(method) for t in found.values())]
        asked = None if not running else [*able, *sorted(running)]
        made = overt.page(one, residual=residual, methods=asked)
        made.save(out)
        console.print(f"page in {out}: open it in any browser", style="dim", markup=False, soft_wrap=True)
    elif out is not None:
        next(iter(found.values())).save(out)
        line = f"saved in {out}; overt.Trace.load reads it"
        console.print(line, style="dim", markup=False, soft_wrap=True)
    return found


def _print(
    console: Console,
    traced: overt.Trace,
    methods: Sequence[str],
    layer: int,
    query: int | None,
    heading: str,
    arguments: dict[str, Any],
) -> None:
    layers, queries = len(traced.maps), traced.maps[0].shape[-2]
    row = traced.main_queries()[0] if query is None else numbers("queries", query, queries)[0]
    word = traced.tokens[0][traced.mask.shape[1] - queries + row]
    title = f"{heading}{traced.kind}, layer {layer % layers + 1} of {layers}, what {word!r} draws on"
    if traced.mixing != "attention" and any(not method_of(name).runs_model for name in methods):
        title += f", by {traced.mixing_kind.title}"
    console.print(table(traced, methods, query, layer, title, **arguments))


@app.command(rich_help_panel="Read attention")
def trace(
    text: Annotated[
        list[str], typer.Argument(help="A sentence, or the path of an image; several are compared.")
    ],
    model: Annotated[
        list[str],
        typer.Option(help="A folder with weights and tokenizer, or a name on the hub; several are compared."),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{listed(known_methods())}; may be given several times. By default all that read maps."
        ),
    ] = None,
    layer: Annotated[int, typer.Option(help="Which layer; −1 is the last.")] = -1,
    query: Annotated[
        int | None, typer.Option(help="Whose row: a position. CLS, or the last token of a causal model.")
    ] = None,
    decoder: Annotated[
        str | None, typer.Option(help="What the decoder is fed; by default the model writes it.")
    ] = None,
    residual: Annotated[
        float | None, typer.Option(help="Weight of the residual connection; by default that of the mixing.")
    ] = None,
    receptive_field: Annotated[
        bool, typer.Option(help="Divide by what uniform attention gives, for causal models.")
    ] = False,
    mixing: Annotated[str, typer.Option(help=f"{listed(mixings())}.")] = "attention",
    out: Annotated[
        Path | None,
        typer.Option(help="Also write a page of all methods (.html) or the trace (.safetensors)."),
    ] = None,
) -> None:
    """Show which tokens a model's attention draws on: raw attention, rollout and flow, side by side."""
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
