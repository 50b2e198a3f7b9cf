"""A map per layer and head, or per layer; a single one with its tokens."""

from __future__ import annotations

import math
from typing import Any

from overt.view.plots.asked import Asked
from overt.view.plots.matrix import colour_bar, draw_map, label_rim, mesh, scaled
from overt.view.plots.sheet import Sheet
from overt.view.plots.style import INK, SIZE, side, title

WORDY = 4  # heads across that have room for more than their numbers


def draw(sheet: Sheet, asked: Asked) -> None:
    """A grid of maps, or one map with its tokens."""
    maps, layers, queries, words = asked.trace.maps, asked.layers, asked.queries, asked.query_words
    each = maps[0].dim() == 4
    # Asking for a head where there are none is refused.
    heads = asked.heads(maps) if each or asked.head is not None else [0]
    cells = {
        (layer, head): (maps[layer][0, head] if each else maps[layer][0])[queries][:, queries]
        for layer in layers
        for head in heads
    }
    if len(cells) == 1:
        named = f"layer {layers[0] + 1}" + (f", head {heads[0] + 1}" if each else ", mean of heads")
        draw_map(sheet, next(iter(cells.values())), words, words, "attention", named)
        return
    across = len(heads) if each else min(len(layers), 3 * asked.columns)
    down = math.ceil(len(cells) / across)
    grid = sheet.equal_grid(down, across)
    scale = scaled(list(cells.values()))
    made: Any = None
    for place, ((layer, head), values) in enumerate(cells.items()):
        y, x = divmod(place, across)
        axes = sheet.figure.add_subplot(grid[y, x])
        made = mesh(axes, values, scale, lined=False, among=len(cells))
        if x == 0:
            sheet.row(axes, 1.0, relative=True)
        if each:
            _number(axes, layer, head, (y, x), (down, across))
        else:
            title(axes, f"layer {layer + 1}")
            label_rim(sheet, axes, words, left=x == 0, lowest=place + across >= len(cells))
    if each and across > WORDY:
        sheet.figure.supxlabel("head", fontsize=SIZE, color=INK)
        if down > 1:
            sheet.figure.supylabel("layer", fontsize=SIZE, color=INK)
    colour_bar(sheet, made, sheet.figure.add_subplot(grid[:, -1]), "attention")


def _number(axes: Any, layer: int, head: int, at: tuple[int, int], size: tuple[int, int]) -> None:
    """Layer and head at the rim of the grid: in words, or by number alone where heads are many."""
    (y, x), (down, across) = at, size
    if across <= WORDY and y == 0:
        title(axes, f"head {head + 1}")
    if across > WORDY and y == down - 1:
        axes.set_xlabel(str(head + 1), fontsize=SIZE, color=INK, labelpad=2)
    if x == 0:
        crowded = down > 1 and across > WORDY
        side(axes, str(layer + 1) if crowded else f"layer {layer + 1}")
        if crowded:
            axes.yaxis.label.set(rotation=0, ha="right", va="center")
