"""Traces shown to a reader: as a page, as figures, in a terminal, behind a local server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt.tracing.showing import register_viewer
from overt.view.pages import Page, node_page, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from overt.tracing.nodes import NodeTrace
    from overt.tracing.result import Trace

__all__ = ["Page", "node_page", "page"]


def _plot(trace: Trace, view: str, path: str | Path | None, **arguments: Any) -> Figure:
    from overt.view.plots import plot, save

    figure = plot(trace, view, **arguments)
    if path is not None:
        save(figure, path)
    return figure


def _plot_nodes(trace: NodeTrace, node: int, **arguments: Any) -> Figure:
    from overt.view.nodes import plot_neighbours

    return plot_neighbours(trace, node, **arguments)


register_viewer(page=page, plot=_plot, node_page=node_page, node_plot=_plot_nodes)
