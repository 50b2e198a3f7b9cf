"""How traces are looked at. The methods stand with the traces; what they call lives in the room to the right,
which is imported when one is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from overt.tracing.nodes import NodeTrace
    from overt.tracing.tracer import Trace
    from overt.view.pages import Page


class ShownTrace:
    """`html` and `plot` of a trace."""

    def html(self: Trace, path: str | Path | None = None, **arguments: Any) -> Page:  # type: ignore[misc]
        """The trace as a page that needs nothing else; written to `path`, and displayed by a notebook.

        Args:
            path: a file to write, such as "page.html".
            arguments: of `overt.page`: title, names, methods, queries, residual, importances, target, mass.
        """
        from overt.view.pages import page

        made = page(self, **arguments)
        return made if path is None else made.save(path)

    def plot(self: Trace, view: str = "strip", path: str | Path | None = None, **arguments: Any) -> Figure:  # type: ignore[misc]
        """A matplotlib figure of one view, for papers (extra `view`); written to `path` if given.

        Args:
            view: "graph", "strip", "heads", "evolution", "uncertainty", "image" or "cross".
            path: a file to write: .pdf, .svg or .png.
            arguments: of `overt.view.plots.plot`: example, query, layer, head, method, columns and others.
        """
        from overt.view.plots import plot, save

        figure = plot(self, view, **arguments)
        if path is not None:
            save(figure, path)
        return figure


class ShownNodes:
    """`html` and `plot` of a trace of nodes."""

    def html(self: NodeTrace, nodes: Any, path: str | Path | None = None, **arguments: Any) -> Page:  # type: ignore[misc]
        """Neighbourhoods of some nodes as a page that needs nothing else.

        Args:
            nodes: a node's number, or several.
            path: a file to write, such as "page.html".
            arguments: of `overt.view.pages.node_page`: title, labels, names, by, layer, heads, residual, top.
        """
        from overt.view.pages import node_page

        made = node_page(self, nodes, **arguments)
        return made if path is None else made.save(path)

    def plot(self: NodeTrace, node: int, **arguments: Any) -> Figure:  # type: ignore[misc]
        """A matplotlib figure of a node's neighbourhood: `overt.graphs.plot_neighbours`."""
        from overt.view.nodes import plot_neighbours

        return plot_neighbours(self, node, **arguments)
