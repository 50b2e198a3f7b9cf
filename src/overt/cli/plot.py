"""Draw a saved trace, or a sentence or picture through a pretrained model, for a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import overt
from overt import _check
from overt._extras import need
from overt.cli.app import app, listed
from overt.cli.inputs import is_picture, open_model, read_input
from overt.tracing.methods.method import methods
from overt.tracing.mixing.mixing import mixing_of, mixings

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
    columns: int = 1,
    dpi: float = 300.0,
    **arguments: Any,
) -> Figure:
    """Draw a view of a trace and write it; returns the figure.

    Args:
        source: a saved trace (.safetensors); or, with `model`, a sentence or the path of an image. Of view
            "compare", several of them.
        out: .pdf, .svg or .png.
        view: one of `overt.view.plots.VIEWS`, or "compare".
        model: a folder with weights and tokenizer, or a name on the hub.
        decoder: what an encoder–decoder's decoder is fed; like the next two, not of a saved trace.
        samples: of the posterior, for view "uncertainty".
        mixing: what the edges weigh.
        columns: width of the figure, 1 or 2.
        dpi: of .png.
        arguments: others of `overt.view.plots.plot`: example, query, layer, head, method, methods, …; those
            that are None are left to their defaults.
    """
    from rich.console import Console

    need("matplotlib", "view")
    from overt.view.plots import VIEWS, WIDTHS, check_path, plot, plot_compare, save

    # What can be refused is, before a model is opened.
    _check.one_of("--view", view, (*VIEWS, "compare"))
    _check.one_of("--columns", columns, WIDTHS)
    mixing_of(mixing, "--mixing")
    out = check_path("--out", out)
    sources = [source] if isinstance(source, str) else list(source)
    if not sources or (view != "compare" and len(sources) > 1):
        raise ValueError(f"--view {view} draws one source, got {len(sources)}; --view compare draws several")
    traced = {
        "--decoder": decoder,
        "--mixing": None if mixing == "attention" else mixing,
        "--samples": None if samples == SAMPLES else samples,
    }
    for one in sources:
        _check_source(one, model, traced)
    given = {name: value for name, value in arguments.items() if value is not None}
    kept: dict[str, Any] = {"decoder": decoder, "mixing": mixing}
    # Some mixings have no maps of single heads; of those the view shows one map per layer.
    single = given.get("head") is not None or (view == "heads" and mixing_of(mixing).heads)
    kept |= {"heads": True} if single else {}
    kept |= {"parts": True} if view == "evolution" else {}
    kept |= {"samples": samples} if view == "uncertainty" else {}
    opened = None if model is None else open_model(model)
    traces = [_traced(one, opened, kept) for one in sources]
    if view == "compare":
        figure = plot_compare(_named(sources, traces), columns=columns, **given)
    else:
        figure = plot(traces[0], view, columns=columns, **given)
    save(figure, out, dpi)
    Console().print(f"[dim]figure in {out}[/dim]")
    return figure


def _check_source(source: str, model: str | None, traced: Mapping[str, Any]) -> None:
    """Refuse a source that is neither a saved trace nor something for a model to read.

    Args:
        source: as given.
        model: as given.
        traced: options that say how to trace, None where they were not given.
    """
    if source.endswith(TRACES):
        if model is not None:
            raise ValueError(f"{source} is a saved trace, which needs no --model, got {model}")
        for name, value in traced.items():
            if value is not None:
                raise ValueError(f"{source} is a saved trace, {name} is of tracing with --model; got {value}")
        if not Path(source).is_file():
            raise FileNotFoundError(f"there is no trace {source}")
    elif model is None:
        raise ValueError(
            f"source must be a saved trace ({TRACES}), or a sentence or picture with --model; got {source!r}"
        )
    else:
        read_input(source)


def _traced(source: str, model: Any, kept: dict[str, Any]) -> overt.Trace:
    if model is None:
        return overt.Trace.load(source)
    return overt.trace(model, read_input(source), **kept)


def _named(sources: Sequence[str], traces: Sequence[overt.Trace]) -> dict[str, overt.Trace]:
    """Files by their names, sentences by number; numbers tell apart those that would have one name."""
    names = [Path(one).stem if one.endswith(TRACES) or is_picture(one) else "" for one in sources]
    if len(set(names)) < len(names) or "" in names:
        names = [f"{name or 'text'} {number}" for number, name in enumerate(names, start=1)]
    return dict(zip(names, traces, strict=True))


@app.command(rich_help_panel="Look at attention")
def plot(
    source: Annotated[
        list[str], typer.Argument(help="A saved trace; or, with --model, a sentence or the path of an image.")
    ],
    out: Annotated[Path, typer.Option(help="The figure: .pdf, .svg or .png.")],
    view: Annotated[
        str,
        typer.Option(
            help="strip, graph, heads, evolution, uncertainty, image, cross; compare takes several."
        ),
    ] = "strip",
    model: Annotated[str | None, typer.Option(help="A folder with weights, or a name on the hub.")] = None,
    query: Annotated[int | None, typer.Option(help="Whose row: a position.")] = None,
    layer: Annotated[int | None, typer.Option(help="Which layer, from 0; −1 is the last.")] = None,
    head: Annotated[int | None, typer.Option(help="Which head, from 0.")] = None,
    method: Annotated[str | None, typer.Option(help=f"{listed(methods('maps'))}.")] = None,
    importances: Annotated[
        bool, typer.Option(help="What runs the model, blank-out and gradients, under a strip.")
    ] = False,
    special: Annotated[bool, typer.Option(help="Show special tokens too.")] = False,
    columns: Annotated[int, typer.Option(help="Width: one column of a paper (3.3 in) or two (6.9 in).")] = 1,
    title: Annotated[str | None, typer.Option(help="Above the figure.")] = None,
    decoder: Annotated[str | None, typer.Option(help="What an encoder–decoder's decoder is fed.")] = None,
    samples: Annotated[int, typer.Option(help="Posterior samples, for uncertainty.", min=1)] = 20,
    mixing: Annotated[str, typer.Option(help=f"{listed(mixings())}.")] = "attention",
    dpi: Annotated[float, typer.Option(help="Of .png.")] = 300.0,
) -> None:
    """Draw one view of a trace for a paper."""
    run(
        source,
        out,
        view,
        model=model,
        decoder=decoder,
        samples=samples,
        mixing=mixing,
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
