"""Writing figures to files."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import _check
from overt._extras import need
from overt._files import check_folder, written_whole
from overt.view.plots.matrix import SEAMLESS
from overt.view.plots.words import missing_letters_pass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

FORMATS = (".pdf", ".svg", ".png")


def save(figure: Figure, path: str | Path, dpi: float = 300.0) -> None:
    """Write a figure atomically; text stays text in .pdf and .svg, and equal figures give equal files.

    Letters that no installed font has become boxes in .png and .pdf; in .svg, the reader's fonts are used.

    Args:
        figure: from `plot`, or any other.
        path: must end in .pdf, .svg or .png.
        dpi: of .png, and of raster images inside the others.
    """
    need("matplotlib", "view")
    from matplotlib import rc_context

    path = check_path("path", path)
    _check.positive("dpi", dpi)
    undated: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    kind = path.suffix.lower()
    settings: dict[Any, Any] = {"svg.fonttype": "none", "pdf.fonttype": 42, "svg.hashsalt": "overt"}
    with written_whole(path) as part, rc_context(settings), missing_letters_pass(), _seamless(figure, kind):
        figure.savefig(part, format=kind[1:], dpi=dpi, metadata=undated.get(kind, {}))


def check_path(name: str, path: str | Path) -> Path:
    """Refuse a path to which no figure can be written."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{name} must end in {', '.join(FORMATS)}, got {path}")
    return check_folder(name, path)


@contextmanager
def _seamless(figure: Figure, kind: str) -> Iterator[None]:
    """Let cells overlap slightly in vector formats, whose viewers smooth edges and would show seams."""
    from matplotlib.collections import QuadMesh

    meshes = [mesh for mesh in figure.findobj(QuadMesh) if mesh.get_label() == SEAMLESS and kind != ".png"]
    try:
        for mesh in meshes:
            mesh.set(edgecolor="face", linewidth=0.1)
        yield
    finally:
        for mesh in meshes:
            mesh.set(edgecolor="none", linewidth=0.0)
