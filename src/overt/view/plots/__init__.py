"""Figures of a trace for papers: one column or two wide, in vectors, with the numbers of the methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from overt import _check
from overt.tracing.result import Trace
from overt.view.plots import cross, evolution, graph, heads, image, strip, uncertainty
from overt.view.plots.request import Number, PlotRequest, ask
from overt.view.plots.saving import check_path, save
from overt.view.plots.sheet import Sheet, drawn
from overt.view.plots.style import WIDTHS

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

__all__ = ["VIEWS", "WIDTHS", "check_path", "plot", "plot_compare", "save"]

VIEWS: dict[str, Callable[[Sheet, PlotRequest], None]] = {
    "strip": strip.draw,
    "graph": graph.draw,
    "heads": heads.draw,
    "evolution": evolution.draw,
    "uncertainty": uncertainty.draw,
    "image": image.draw,
    "cross": cross.draw,
}


def plot(
    trace: Trace,
    view: str = "strip",
    *,
    example: int = 0,
    query: int | None = None,
    layer: Number = None,
    head: Number = None,
    method: str | None = None,
    methods: Sequence[str] | None = None,
    importances: bool = False,
    tokens: Number = None,
    special: bool = False,
    columns: int = 1,
    title: str | None = None,
    residual: float | None = None,
    normalize: bool = False,
    receptive_field: bool = False,
    target: Any = None,
    unk: int | None = None,
    figure: Figure | SubFigure | None = None,
) -> Figure:
    """Draw a trace; returns the figure, which `save` writes as .pdf, .svg or .png.

    Padding and special tokens are left out, and colours scaled to what is shown. Layers and heads are counted
    from 0 in arguments, as everywhere, and from 1 in pictures, as in papers.

    Views:
        "strip": what the query draws on, tokens across, layers up, methods side by side (Abnar & Zuidema,
            figures 2 and 3); where tokens are many, one under the other.
        "graph": layers as columns from the input on, tokens as rows; a line between columns l − 1 and l is
            as dark as the method's value at layer l (figure 1), up to `layer`. With `query`, that node's
            paths down from `layer`: a line carries what comes to its upper end times its weight, so that the
            input's column has the rollout (of raw attention: the product without residuals). Flow has no
            such paths, its values are lines to the input.
        "heads": a map per layer and head, of a trace with heads=True; else a map per layer. One `layer` and
            one `head` give that map, with its tokens.
        "evolution": an evolving layer's own map, its convolution's and the fused one, layer by layer, of a
            trace with parts=True.
        "uncertainty": mean and spread of a layer's map over posterior samples, and the mean of what the query
            draws on with whiskers of one spread, of a trace with samples=….
        "image": the patches that the query draws on over the picture, layer by layer.
        "cross": what each target token draws from each source token at a layer.

    Args:
        trace: what `overt.trace` made.
        view: one of the above.
        example: of the batch.
        query: whose attention; CLS by default, or the last token of a causal model or decoder.
        layer: one or several, where a view shows several; all by default, or the last where it shows one. Of
            "graph", one number: the uppermost layer, and with `query` the layer of its node.
        head: the mean of all by default.
        method: one that reads maps; by default "raw" for "cross", "rollout" for others. Of "strip",
            the only one. "heads" and "evolution" show the maps themselves and take none.
        methods: of "strip", side by side; by default all that read maps.
        importances: of "strip": also what runs the model, blank-out and gradients, as bars beneath.
        tokens: which tokens to show, as positions; by default all but padding and special ones.
        special: show special tokens too.
        columns: width of the figure, of one column (3.3 in) or two (6.9 in).
        title: above all.
        residual: of rollout and flow; by default what the trace's mixing implies.
        normalize: make each row of a method's values sum to one (before tokens are left out).
        receptive_field: divide by what uniform attention gives.
        target: of importances.
        unk: of importances.
        figure: draw in this figure or subfigure, as it is, rather than in a new one; it should have a
            constrained layout.
    """
    _check.one_of("view", view, VIEWS)
    asked = ask(trace, locals())
    return drawn(lambda sheet: VIEWS[view](sheet, asked), columns, title, figure)


def plot_compare(
    traces: Mapping[str, Trace],
    *,
    columns: int = 1,
    title: str | None = None,
    figure: Figure | SubFigure | None = None,
    **arguments: Any,
) -> Figure:
    """Strips of several traces one under the other, each method on one scale, so that colours compare.

    Args:
        traces: names and traces.
        columns: width of the figure.
        title: above all.
        figure: draw there.
        arguments: others of `plot` for "strip": example, query, layer, head, method, methods, importances, ….
    """
    if not isinstance(traces, Mapping) or not traces:
        got = "an empty mapping" if isinstance(traces, Mapping) else type(traces).__name__
        raise ValueError(f"traces must be a mapping of names to traces, got {got}")
    known = {**(plot.__kwdefaults__ or {}), "columns": columns}
    if unknown := sorted(arguments.keys() - known.keys()):
        raise ValueError(f"plot_compare takes the arguments of a strip, got {', '.join(unknown)}")
    known["view"] = "compare"
    rows = {str(name): ask(one, {**known, **arguments}) for name, one in traces.items()}
    return drawn(lambda sheet: strip.draw_several(sheet, rows), columns, title, figure)
