"""What each target token draws from each source token at a layer."""

from __future__ import annotations

from overt.view.plots.matrix import draw_map
from overt.view.plots.request import PlotRequest
from overt.view.plots.sheet import Sheet
from overt.view.plots.style import INK, SIZE, side


def draw(sheet: Sheet, asked: PlotRequest) -> None:
    """Target rows, source columns."""
    trace, method = asked.trace, asked.method or "raw"
    if not trace.cross:
        raise ValueError(f"cross needs a trace of an encoder–decoder, got one of kind {trace.kind!r}")
    layer = asked.one_layer("cross")
    source = [token for token in asked.shown if token < asked.first]
    target = [token for token in asked.shown if token >= asked.first]
    if not source or not target:
        raise ValueError(f"tokens must hold some of the source, below {asked.first}, and some of the target")
    cells = asked.values(method, queries=asked.queries, layers=layer)[0][:, source]
    words = asked.title(method)
    if method == "raw":
        words = asked.weights.replace("attention", "cross-attention")
    title = f"layer {layer + 1}"
    if asked.head is not None:
        heads = [str(head + 1) for head in asked.heads(trace.cross)]
        title += f", head{'s' if len(heads) > 1 else ''} {', '.join(heads)}"
    axes = draw_map(sheet, cells, asked.words_of(target), asked.words_of(source), words, title)
    side(axes, "target")
    axes.set_xlabel("source", fontsize=SIZE, color=INK, labelpad=3)
