"""How traces are shown: methods of the traces, and a registry of the viewers that they call."""

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
        """Write the page, atomically."""
        ...

    def widget(self, height: int = ...) -> Any:
        """An anywidget for a notebook."""
        ...

    def _repr_html_(self) -> str: ...


_viewers: dict[str, Callable[..., Any]] = {}


def register_viewer(**viewers: Callable[..., Any]) -> None:
    """Register viewers: `page` and `plot` for traces, `node_page` and `node_plot` for traces of nodes."""
    _viewers.update(viewers)


def _viewer(name: str) -> Callable[..., Any]:
    if name not in _viewers:
        raise RuntimeError(f"no viewer is registered for traces ({name}): import overt registers them")
    return _viewers[name]


class ShownTrace:
    """`html` and `plot` of a trace."""

    def html(self, path: str | Path | None = None, **arguments: Any) -> ShownPage:
        """The trace as a self-contained page; written to `path` if given, and displayed by a notebook.

        Args:
            path: a file to write, such as "page.html".
            arguments: of `overt.page`: title, names, methods, queries, residual, importances, target, mass,
                images.
        """
        page: ShownPage = _viewer("page")(self, **arguments)
        return page if path is None else page.save(path)

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
        """The neighbourhoods of some nodes as a self-contained page.

        Args:
            nodes: a node's number, or several.
            path: a file to write, such as "page.html".
            arguments: of `overt.view.pages.node_page`: title, labels, names, by, layer, heads, residual, top.
        """
        page: ShownPage = _viewer("node_page")(self, nodes, **arguments)
        return page if path is None else page.save(path)

    def plot(self, node: int, **arguments: Any) -> Figure:
        """A matplotlib figure of a node's neighbourhood: `overt.graphs.plot_neighbours`."""
        figure: Figure = _viewer("node_plot")(self, node, **arguments)
        return figure
