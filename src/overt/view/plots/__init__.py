"""Figures of a trace for papers: vector graphics, one column or two wide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from overt import _check
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.result import Trace
from overt.view.plots import cross, evolution, graph, heads, image, strip, uncertainty
from overt.view.plots.request import Number, PlotRequest, request_of
from overt.view.plots.saving import check_path, save
from overt.view.plots.sheet import Sheet, draw_figure
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

    Padding and special tokens are left out, and colours are scaled to what is shown. Layers and heads are
    numbered from 0 in arguments, as everywhere, and from 1 in figures, as in papers.

    Views:
        "strip": what the query draws on, tokens across, layers up, methods side by side (Abnar & Zuidema,
            figures 2 and 3), or one under the other if there are many tokens.
        "graph": layers as columns starting from the input, tokens as rows; the darkness of a line between
            columns l − 1 and l is the method's value at layer l (figure 1), up to `layer`. With `query`, that
            node's paths down from `layer`: a line carries what reaches its upper end times its weight, so
            that the input's column has the rollout (for raw attention, the product without residuals). Flow
            has no such paths; its values are lines to the input.
        "heads": a map per layer and head, for a trace with heads=True; otherwise a map per layer. One `layer`
            and one `head` give that map, with its tokens.
        "evolution": an evolving layer's own map, its convolution's and the fused one, layer by layer, for a
            trace with parts=True.
        "uncertainty": mean and spread of a layer's map over posterior samples, and the mean of what the query
            draws on with whiskers of one spread, for a trace with samples=….
        "image": the patches that the query draws on over the picture, layer by layer.
        "cross": what each target token draws from each source token at a layer.

    Args:
        trace: from `overt.trace`.
        view: one of the above.
        example: which example of the batch.
        query: whose attention to show; by default CLS, or the last token of a causal model or decoder.
        layer: one layer, or several in views that show several; by default all, or the last in views that
            show one. For "graph", one number: the uppermost layer, and with `query` the layer of its node.
        head: one head or several; by default the mean of all.
        method: one that reads maps; by default "raw" for "cross", "rollout" for others. For "strip", the only
            method shown. "heads" and "evolution" show the maps themselves and take none.
        methods: for "strip", side by side; by default all that read maps.
        importances: for "strip": also the methods that run the model, blank-out and gradients, as bars below.
        tokens: positions of the tokens to show; by default all but padding and special tokens.
        special: show special tokens too.
        columns: width of the figure, of one column (3.3 in) or two (6.9 in).
        title: above the figure.
        residual: of rollout and flow; by default that of the trace's mixing.
        normalize: make each row of a method's values sum to one (before tokens are left out).
        receptive_field: divide by the values of uniform attention.
        target: of importances.
        unk: of importances.
        figure: draw in this existing figure or subfigure instead of a new one; it should have a constrained
            layout.
    """
    _check.one_of("view", view, VIEWS)
    request = request_of(trace, locals())
    return draw_figure(lambda sheet: VIEWS[view](sheet, request), columns, title, figure)


def plot_compare(
    traces: Mapping[str, Trace],
    *,
    columns: int = 1,
    title: str | None = None,
    figure: Figure | SubFigure | None = None,
    **arguments: Any,
) -> Figure:
    """Strips of several traces, one under the other, with one colour scale per method for all traces.

    Args:
        traces: names and traces.
        columns: width of the figure.
        title: above the figure.
        figure: an existing figure to draw in.
        arguments: other arguments of `plot` for "strip": example, query, layer, head, method, methods,
            importances, ….
    """
    if not isinstance(traces, Mapping) or not traces:
        got = "an empty mapping" if isinstance(traces, Mapping) else type(traces).__name__
        raise ValueError(f"traces must be a mapping of names to traces, got {got}")
    known = {**(plot.__kwdefaults__ or {}), "columns": columns}
    if unknown := sorted(arguments.keys() - known.keys()):
        raise ValueError(f"plot_compare takes the arguments of a strip, got {', '.join(unknown)}")
    known["view"] = "compare"
    if arguments.get("method") is None and arguments.get("methods") is None:
        readers = known_methods("maps").items()
        shared = [name for name, reader in readers if not any(t.why_not(reader) for t in traces.values())]
        arguments["methods"] = shared or None
    rows = {str(name): request_of(trace, {**known, **arguments}) for name, trace in traces.items()}
    return draw_figure(lambda sheet: strip.draw_several(sheet, rows), columns, title, figure)
