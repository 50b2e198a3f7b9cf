"""An evolving layer's own map, its convolution's and the fused one, layer by layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from overt.view.plots.matrix import colour_bar, label_rim, mesh, scaled
from overt.view.plots.request import PlotRequest
from overt.view.plots.sheet import Sheet
from overt.view.plots.style import SIZE, SMALL, bare, side, title


def draw(sheet: Sheet, request: PlotRequest) -> None:
    """Parts as rows, layers as columns; for one layer, parts side by side."""
    # Parts of an encoder and of cross-attention have prefixes; the map in use comes last.
    parts = [name for name in request.trace.parts if " " not in name]
    if not parts:
        raise ValueError("evolution needs the parts of an evolving model's maps: overt.trace(…, parts=True)")
    layers, words = request.layers, request.query_words
    cells = {(part, layer): _cells(request, part, layer) for part in parts for layer in layers}
    present = [one for one in cells.values() if one is not None]
    scale = scaled(present)
    single = len(layers) == 1
    rows: list[Any] = layers if single else list(parts)
    across: list[Any] = list(parts) if single else layers
    grid = sheet.equal_grid(len(rows), len(across))
    cells_drawn: Any = None
    for y, row in enumerate(rows):
        for x, column in enumerate(across):
            axes = sheet.figure.add_subplot(grid[y, x])
            if x == 0:
                sheet.row(axes, 1.0, relative=True)
                side(axes, f"layer {row + 1}" if single else row)
                axes.yaxis.label.set_fontsize(SIZE if sheet.width / len(across) > 0.8 else SMALL)
            if y == 0:
                title(axes, column if single else f"layer {column + 1}")
            part_cells = cells[(column, row) if single else (row, column)]
            if part_cells is None:
                # A chain starts here: there is no earlier map to convolve.
                bare(axes, len(words), len(words))
                axes.text(0.5, 0.5, "–", transform=axes.transAxes, ha="center", va="center", fontsize=SIZE)
            else:
                cells_drawn = mesh(axes, part_cells, scale, lined=False, among=len(present))
            label_rim(sheet, axes, words, left=x == 0, lowest=y == len(rows) - 1)
    colour_bar(sheet, cells_drawn, sheet.figure.add_subplot(grid[:, -1]), "weight")


def _cells(request: PlotRequest, part: str, layer: int) -> Tensor | None:
    """A part's map, (query, key), averaged over the requested heads."""
    whole = request.trace.parts[part][layer]
    if whole is None:
        return None
    cells = whole[0] if request.head is None else whole[0][request.heads(request.trace.parts[part])]
    cells = cells.mean(dim=0) if cells.dim() == 3 else cells
    return cells[request.queries][:, request.queries]
