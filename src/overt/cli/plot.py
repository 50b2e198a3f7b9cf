"""Draw a figure for a paper, from a saved trace or from a sentence or picture and a pretrained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import overt
from overt import _check
from overt._extras import need
from overt.cli.inputs import (
    DecoderOption,
    MixingOption,
    QueryOption,
    StackOption,
    names_picture,
    open_model,
    read_input,
)
from overt.cli.shared import app, join_or
from overt.tracing.methods.method import methods
from overt.tracing.mixing.mixing import mixing_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRACES = ".safetensors"
SAMPLES = 20


def run(
    source: str | Sequence[str],
    out: Path,
    view: str = "strip",
    *,
    model: str | None = None,
    decoder: str | None = None,
    samples: int = SAMPLES,
    mixing: Any = "attention",
    stack: str | None = None,
    columns: int = 1,
    dpi: float = 300.0,
    **arguments: Any,
) -> Figure:
    """Draw a view of a trace, write it to a file and return the figure.

    Args:
        source: a saved trace (.safetensors); or, with `model`, a sentence or the path of an image. View
            "compare" takes several.
        out: path of the figure: .pdf, .svg or .png.
        view: one of `overt.view.plots.VIEWS`, or "compare".
        model: a folder with weights and tokenizer, or a name on the hub.
        decoder: text for the decoder of an encoder–decoder model; like the next three, not for a saved trace.
        samples: number of posterior samples, for view "uncertainty".
        mixing: weights of the attention graph's edges.
        stack: which to trace, of a model that has several.
        columns: width of the figure, 1 or 2.
        dpi: resolution of .png.
        arguments: further arguments of `overt.view.plots.plot`: example, query, layer, head, method, methods,
            …; None stands for the default.
    """
    from rich.console import Console

    need("matplotlib", "view")
    from overt.view.plots import VIEWS, WIDTHS, check_path, plot, plot_compare, save

    # All arguments are checked before a model is opened.
    _check.one_of("--view", view, (*VIEWS, "compare"))
    _check.one_of("--columns", columns, WIDTHS)
    mixing_of(mixing, "--mixing")
    out = check_path("--out", out)
    sources = [source] if isinstance(source, str) else list(source)
    if not sources or (view != "compare" and len(sources) > 1):
        raise ValueError(f"--view {view} draws one source, got {len(sources)}; --view compare draws several")
    tracing_options = {
        "--decoder": decoder,
        "--mixing": None if mixing == "attention" else mixing,
        "--samples": None if samples == SAMPLES else samples,
        "--stack": stack,
    }
    for each in sources:
        _check_source(each, model, tracing_options)
    plot_arguments = {name: value for name, value in arguments.items() if value is not None}
    trace_arguments: dict[str, Any] = {"decoder": decoder, "mixing": mixing, "stack": stack}
    # Some mixings have no maps of single heads; the view then shows one map per layer.
    single = plot_arguments.get("head") is not None or (view == "heads" and mixing_of(mixing).heads)
    trace_arguments |= {"heads": True} if single else {}
    trace_arguments |= {"parts": True} if view == "evolution" else {}
    trace_arguments |= {"samples": samples} if view == "uncertainty" else {}
    network = None if model is None else open_model(model)
    traces = [_load_or_trace(each, network, trace_arguments) for each in sources]
    if view == "compare":
        figure = plot_compare(_name_traces(sources, traces), columns=columns, **plot_arguments)
    else:
        figure = plot(traces[0], view, columns=columns, **plot_arguments)
    save(figure, out, dpi)
    Console().print(f"[dim]figure in {out}[/dim]")
    return figure


def _check_source(source: str, model: str | None, tracing_options: Mapping[str, Any]) -> None:
    """Refuse a source that is neither a saved trace nor an input for the model.

    Args:
        source: the argument.
        model: the option --model.
        tracing_options: options that apply to tracing only; None if they were not given.
    """
    if source.endswith(TRACES):
        if model is not None:
            raise ValueError(f"{source} is a saved trace, which takes no --model, got {model}")
        for name, value in tracing_options.items():
            if value is not None:
                raise ValueError(
                    f"{source} is a saved trace: {name} applies only to tracing with --model, got {value}"
                )
        if not Path(source).is_file():
            raise FileNotFoundError(f"trace {source} does not exist")
    elif model is None:
        raise ValueError(
            f"source must be a saved trace ({TRACES}), or a sentence or picture with --model; got {source!r}"
        )
    else:
        read_input(source)


def _load_or_trace(source: str, model: Any, arguments: dict[str, Any]) -> overt.Trace:
    if model is None:
        return overt.Trace.load(source)
    return overt.trace(model, read_input(source, model), **arguments)


def _name_traces(sources: Sequence[str], traces: Sequence[overt.Trace]) -> dict[str, overt.Trace]:
    """Name traces after their files; number all of them if names repeat or a source is a sentence."""
    names = [
        Path(source).stem if source.endswith(TRACES) or names_picture(source) else "" for source in sources
    ]
    if len(set(names)) < len(names) or "" in names:
        names = [f"{name or 'text'} {number}" for number, name in enumerate(names, start=1)]
    return dict(zip(names, traces, strict=True))


@app.command(rich_help_panel="View attention")
def plot(
    source: Annotated[
        list[str], typer.Argument(help="A saved trace; or, with --model, a sentence or the path of an image.")
    ],
    out: Annotated[Path, typer.Option(help="Path of the figure: .pdf, .svg or .png.")],
    view: Annotated[
        str,
        typer.Option(
            help="View to draw: strip, graph, heads, evolution, uncertainty, image or cross; or compare, "
            "which takes several sources."
        ),
    ] = "strip",
    model: Annotated[
        str | None, typer.Option(help="Folder with weights and tokenizer, or a name on the hub.")
    ] = None,
    query: QueryOption = None,
    layer: Annotated[int | None, typer.Option(help="Layer, counted from 0; −1 is the last.")] = None,
    head: Annotated[int | None, typer.Option(help="Head, counted from 0.")] = None,
    method: Annotated[str | None, typer.Option(help=f"Method: {join_or(methods('maps'))}.")] = None,
    importances: Annotated[
        bool, typer.Option(help="Add blank-out and gradients, which run the model, below a strip.")
    ] = False,
    special: Annotated[bool, typer.Option(help="Show special tokens, too.")] = False,
    columns: Annotated[
        int, typer.Option(help="Width in columns of a paper: 1 (3.3 inches) or 2 (6.9 inches).")
    ] = 1,
    title: Annotated[str | None, typer.Option(help="Title above the figure.")] = None,
    decoder: DecoderOption = None,
    samples: Annotated[
        int, typer.Option(help="Number of posterior samples, for view uncertainty.", min=1)
    ] = SAMPLES,
    mixing: MixingOption = "attention",
    stack: StackOption = None,
    dpi: Annotated[float, typer.Option(help="Resolution of .png.")] = 300.0,
) -> None:
    """Draw a view of a trace as a figure for a paper."""
    run(
        source,
        out,
        view,
        model=model,
        decoder=decoder,
        samples=samples,
        mixing=mixing,
        stack=stack,
        columns=columns,
        dpi=dpi,
        query=query,
        layer=layer,
        head=head,
        method=method,
        importances=importances or None,
        special=special or None,
        title=title,
    )
