"""A map per layer and head, or per layer; a single map with its tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overt.view.plots.matrix import colour_bar, draw_map, label_rim, mesh, scaled
from overt.view.plots.request import PlotRequest
from overt.view.plots.sheet import Sheet
from overt.view.plots.style import INK, LEADING, SIZE, TALLEST, side, title
from overt.view.plots.words import PLAIN, width

WORDY = 4  # heads across with room for more than their numbers
SIDES, ENDS = 0.75, 0.5  # inches beside a grid, for numbers and colour bar, and above and below it
NUMBERS = 0.2  # inches of a column of layers' numbers
TITLE = 0.14  # inches of a title

Cells = dict[tuple[int, int], Tensor]  # by layer and head


def draw(sheet: Sheet, request: PlotRequest) -> None:
    """A grid of maps, or one map with its tokens."""
    if not request.trace.maps:
        raise ValueError(
            'heads draws self-attention, and a recurrent decoder has none: view="cross" draws its map'
        )
    maps, layers, queries, words = request.trace.maps, request.layers, request.queries, request.query_words
    each = maps[0].dim() == 4
    # Requesting a head where there are none is refused.
    heads = request.heads(maps) if each or request.head is not None else [0]
    cells = {
        (layer, head): (maps[layer][0, head] if each else maps[layer][0])[queries][:, queries]
        for layer in layers
        for head in heads
    }
    if len(cells) == 1:
        named = f"layer {layers[0] + 1}" + (f", head {heads[0] + 1}" if each else ", mean of heads")
        draw_map(sheet, next(iter(cells.values())), words, words, request.weights, named)
    elif each:
        _draw_heads(sheet, request, cells)
    else:
        _draw_means(sheet, request, cells)


@dataclass(frozen=True)
class _Fold:
    """Layers in rows, from top to bottom; in several columns of rows if they are too many for one."""

    columns: int
    down: int
    wide: float  # inches of a map
    tall: float


def _room(sheet: Sheet) -> tuple[float, float]:
    """Inches across and down available for maps."""
    tall = TALLEST if sheet.own else float(sheet.figure.bbox.height / sheet.figure.dpi)
    return max(sheet.width - SIDES, 0.5), max(tall - ENDS, 0.5)


def _fold(sheet: Sheet, layers: int, heads: int) -> _Fold:
    """As few columns of rows as allow square maps."""
    across, tall = _room(sheet)
    for columns in range(1, layers + 1):
        down = math.ceil(layers / columns)
        wide = max(across - NUMBERS * (columns - 1), 0.1) / (columns * heads)
        if wide * down <= tall:
            break
    return _Fold(math.ceil(layers / down), down, wide, min(wide, tall / down))


def _draw_heads(sheet: Sheet, request: PlotRequest, cells: Cells) -> None:
    """Layers as rows, heads as columns, on one scale."""
    layers, heads = request.layers, request.heads(request.trace.maps)
    fold = _fold(sheet, len(layers), len(heads))
    grid = sheet.equal_grid(fold.down, fold.columns * len(heads))
    scale = scaled(list(cells.values()))
    cells_drawn: Any = None
    for place, layer in enumerate(layers):
        column, y = divmod(place, fold.down)
        for x, head in enumerate(heads):
            axes = sheet.figure.add_subplot(grid[y, column * len(heads) + x])
            cells_drawn = mesh(axes, cells[layer, head], scale, lined=False, among=len(cells))
            if x == 0:
                _number_layer(axes, layer, y, fold, wordy=_wordy(fold, len(heads)))
                if column == 0:
                    sheet.row(axes, 1.0, relative=True)
            if _few(fold, len(heads)):
                title(axes, f"head {head + 1}" if y == 0 else "")
            elif y == fold.down - 1 and x % _every(fold.wide, width(str(max(heads) + 1))) == 0:
                axes.set_xlabel(str(head + 1), fontsize=SIZE, color=INK, labelpad=2)
    if not _few(fold, len(heads)):
        sheet.figure.supxlabel("head", fontsize=SIZE, color=INK)
    if not _wordy(fold, len(heads)):
        sheet.figure.supylabel("layer", fontsize=SIZE, color=INK)
    colour_bar(sheet, cells_drawn, sheet.figure.add_subplot(grid[:, -1]), request.weights)


def _few(fold: _Fold, heads: int) -> bool:
    """Whether a head has room for more than its number."""
    return fold.columns * heads <= WORDY


def _wordy(fold: _Fold, heads: int) -> bool:
    """Whether a layer has room for more than its number."""
    roomy = width("layer 10") * PLAIN * SIZE <= fold.tall * 72.0
    return fold.down == 1 or (_few(fold, heads) and roomy)


def _every(room: float, label: float) -> int:
    """The step between numbers that fit; a label's size is in font sizes."""
    return math.ceil(label * LEADING * SIZE / 72.0 / room)


def _number_layer(axes: Any, layer: int, y: int, fold: _Fold, wordy: bool) -> None:
    """Label a layer at the left of its row: in words, by its number, or every n-th number."""
    if wordy:
        side(axes, f"layer {layer + 1}")
    elif y % _every(fold.tall, 1.0) == 0:
        side(axes, str(layer + 1))
        axes.yaxis.label.set(rotation=0, ha="right", va="center")


def _draw_means(sheet: Sheet, request: PlotRequest, cells: Cells) -> None:
    """Layers in reading order, as many across as allow square maps."""
    words = request.query_words
    wide, tall = _room(sheet)
    across = min(len(cells), 3 * request.columns)
    while across < len(cells) and math.ceil(len(cells) / across) * (wide / across + TITLE) > tall:
        across += 1
    down = math.ceil(len(cells) / across)
    grid = sheet.equal_grid(down, across)
    scale = scaled(list(cells.values()))
    wordy = (width(f"layer {len(request.trace.maps)}") + 1.0) * PLAIN * SIZE <= wide / across * 72.0
    cells_drawn: Any = None
    for place, ((layer, _), values) in enumerate(cells.items()):
        y, x = divmod(place, across)
        axes = sheet.figure.add_subplot(grid[y, x])
        cells_drawn = mesh(axes, values, scale, lined=False, among=len(cells))
        if x == 0:
            sheet.row(axes, 1.0, relative=True)
        title(axes, f"layer {layer + 1}" if wordy else str(layer + 1))
        # Labels below a row that is not the last would push all rows apart.
        label_rim(sheet, axes, words, left=x == 0, lowest=y == down - 1)
    if not wordy:
        sheet.figure.supxlabel("layer", fontsize=SIZE, color=INK)
    colour_bar(sheet, cells_drawn, sheet.figure.add_subplot(grid[:, -1]), request.weights)
