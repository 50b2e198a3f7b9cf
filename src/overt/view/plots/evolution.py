"""An evolving layer's own map, its convolution's and the fused one, layer by layer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from overt.view.plots.matrix import colour_bar, label_rim, mesh, scaled
from overt.view.plots.request import PlotRequest
from overt.view.plots.sheet import Sheet
from overt.view.plots.style import SIZE, SMALL, bare, side, title


def draw(sheet: Sheet, asked: PlotRequest) -> None:
    """Parts as rows, layers as columns; of one layer, parts side by side."""
    # Those of a decoder's encoder and cross-attention have prefixes; the map in use comes last.
    parts = [name for name in asked.trace.parts if " " not in name]
    if not parts:
        raise ValueError("evolution needs the parts of an evolving model's maps: overt.trace(…, parts=True)")
    layers, words = asked.layers, asked.query_words
    cells = {(part, layer): _cells(asked, part, layer) for part in parts for layer in layers}
    kept = [one for one in cells.values() if one is not None]
    scale = scaled(kept)
    single = len(layers) == 1
    rows: list[Any] = layers if single else list(parts)
    across: list[Any] = list(parts) if single else layers
    grid = sheet.equal_grid(len(rows), len(across))
    made: Any = None
    for y, row in enumerate(rows):
        for x, column in enumerate(across):
            axes = sheet.figure.add_subplot(grid[y, x])
            if x == 0:
                sheet.row(axes, 1.0, relative=True)
                side(axes, f"layer {row + 1}" if single else row)
                axes.yaxis.label.set_fontsize(SIZE if sheet.width / len(across) > 0.8 else SMALL)
            if y == 0:
                title(axes, column if single else f"layer {column + 1}")
            found = cells[(column, row) if single else (row, column)]
            if found is None:
                # A chain starts here: there is no earlier map to convolve.
                bare(axes, len(words), len(words))
                axes.text(0.5, 0.5, "–", transform=axes.transAxes, ha="center", va="center", fontsize=SIZE)
            else:
                made = mesh(axes, found, scale, lined=False, among=len(kept))
            label_rim(sheet, axes, words, left=x == 0, lowest=y == len(rows) - 1)
    colour_bar(sheet, made, sheet.figure.add_subplot(grid[:, -1]), "weight")


def _cells(asked: PlotRequest, part: str, layer: int) -> Tensor | None:
    """A part's map, (query, key), the mean of the heads that are asked for."""
    whole = asked.trace.parts[part][layer]
    if whole is None:
        return None
    one = whole[0] if asked.head is None else whole[0][asked.heads(asked.trace.parts[part])]
    one = one.mean(dim=0) if one.dim() == 3 else one
    return one[asked.queries][:, asked.queries]
