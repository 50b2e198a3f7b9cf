"""What each target token draws from each source token at a layer."""

from __future__ import annotations

from overt.view.plots.matrix import draw_map
from overt.view.plots.request import PlotRequest
from overt.view.plots.sheet import Sheet
from overt.view.plots.style import INK, SIZE, side


def draw(sheet: Sheet, request: PlotRequest) -> None:
    """Target tokens as rows, source tokens as columns."""
    trace, method = request.trace, request.method or "raw"
    if not trace.cross:
        raise ValueError(f"cross needs a trace of an encoder–decoder, got one of kind {trace.kind!r}")
    layer = request.one_layer("cross")
    source = [token for token in request.shown if token < request.first]
    target = [token for token in request.shown if token >= request.first]
    if not source or not target:
        raise ValueError(f"tokens must include source tokens, below {request.first}, and target tokens")
    cells = request.values(method, queries=request.queries, layers=layer)[0][:, source]
    words = request.title(method)
    if method == "raw":
        words = request.weights.replace("attention", "cross-attention")
    title = f"layer {layer + 1}"
    if request.head is not None:
        heads = [str(head + 1) for head in request.heads(trace.cross)]
        title += f", head{'s' if len(heads) > 1 else ''} {', '.join(heads)}"
    axes = draw_map(sheet, cells, request.words_of(target), request.words_of(source), words, title)
    side(axes, "target")
    axes.set_xlabel("source", fontsize=SIZE, color=INK, labelpad=3)
