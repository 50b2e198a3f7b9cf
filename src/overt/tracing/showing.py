"""How traces are looked at. The methods stand with the traces; what they call is told by whoever can show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ShownPage(Protocol):
    """A page of traces, as `overt.page` makes it; a notebook displays it."""

    def html(self) -> str:
        """The whole page as text."""
        ...

    def save(self, path: str | Path) -> ShownPage:
        """Write the page, whole or not at all."""
        ...

    def widget(self, height: int = ...) -> Any:
        """An anywidget, for a notebook."""
        ...

    def _repr_html_(self) -> str: ...


_viewers: dict[str, Callable[..., Any]] = {}


def register_viewer(**viewers: Callable[..., Any]) -> None:
    """Say who shows: `page` and `plot` of traces, `node_page` and `node_plot` of traces of nodes."""
    _viewers.update(viewers)


def _viewer(name: str) -> Callable[..., Any]:
    if name not in _viewers:
        raise RuntimeError(f"nothing is registered that shows traces ({name}): import overt does that")
    return _viewers[name]


class ShownTrace:
    """`html` and `plot` of a trace."""

    def html(self, path: str | Path | None = None, **arguments: Any) -> ShownPage:
        """The trace as a page that needs nothing else; written to `path`, and displayed by a notebook.

        Args:
            path: a file to write, such as "page.html".
            arguments: of `overt.page`: title, names, methods, queries, residual, importances, target, mass.
        """
        made: ShownPage = _viewer("page")(self, **arguments)
        return made if path is None else made.save(path)

    def plot(self, view: str = "strip", path: str | Path | None = None, **arguments: Any) -> Figure:
        """A matplotlib figure of one view, for papers (extra `view`); written to `path` if given.

        Args:
            view: "graph", "strip", "heads", "evolution", "uncertainty", "image" or "cross".
            path: a file to write: .pdf, .svg or .png.
            arguments: of `overt.view.plots.plot`: example, query, layer, head, method, columns and others.
        """
        figure: Figure = _viewer("plot")(self, view, path, **arguments)
        return figure


class ShownNodes:
    """`html` and `plot` of a trace of nodes."""

    def html(self, nodes: Any, path: str | Path | None = None, **arguments: Any) -> ShownPage:
        """Neighbourhoods of some nodes as a page that needs nothing else.

        Args:
            nodes: a node's number, or several.
            path: a file to write, such as "page.html".
            arguments: of `overt.view.pages.node_page`: title, labels, names, by, layer, heads, residual, top.
        """
        made: ShownPage = _viewer("node_page")(self, nodes, **arguments)
        return made if path is None else made.save(path)

    def plot(self, node: int, **arguments: Any) -> Figure:
        """A matplotlib figure of a node's neighbourhood: `overt.graphs.plot_neighbours`."""
        figure: Figure = _viewer("node_plot")(self, node, **arguments)
        return figure
