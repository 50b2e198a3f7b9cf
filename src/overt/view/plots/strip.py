"""What a query draws on, tokens across and layers up: one strip per method, of one trace or of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overt.tracing.methods.method import methods
from overt.view.plots.matrix import Scale, colour_bar, mesh, scaled
from overt.view.plots.request import PlotRequest
from overt.view.plots.sheet import Panel, Sheet
from overt.view.plots.style import INK, LEADING, LESS, MORE, SIZE, SMALL, SOFT, TICKS, number, side, title
from overt.view.plots.words import width, wrapped

TALL_ROW, LOW_ROW = 0.135, 0.075  # inches of a layer, if there are few and if there are many
BARS, SCALE = 0.45, 0.055  # inches of a row of bars, and of a colour bar's thin side
NARROWEST = 0.092  # inches of a token that still has room for its label


@dataclass(frozen=True)
class _Strips:
    """What to draw for each trace; the name of a single trace is empty."""

    rows: Mapping[str, PlotRequest]
    values: dict[tuple[str, str], Tensor]  # name and method → (layer, token)
    scales: dict[str, Scale]  # by method
    importances: dict[str, dict[str, Tensor]]  # name → title → (token,)

    def title(self, method: str) -> str:
        """Title of a method's values; only the method's name if traces hold different weights."""
        titles = {request.title(method) for request in self.rows.values()}
        return titles.pop() if len(titles) == 1 else method

    def labelled(self, name: str) -> bool:
        """Whether to write tokens below this trace: if it is the last, or others have other tokens."""
        return (
            name == list(self.rows)[-1] or len({tuple(request.words) for request in self.rows.values()}) > 1
        )


def draw(sheet: Sheet, request: PlotRequest) -> None:
    """Strips of one trace."""
    draw_several(sheet, {"": request})


def draw_several(sheet: Sheet, rows: Mapping[str, PlotRequest]) -> None:
    """Strips of one trace or several, with methods side by side if the tokens' labels fit."""
    values = {
        (name, method): request.values(method, queries=request.query, layers=request.layers)[
            :, 0, request.shown
        ]
        for name, request in rows.items()
        for method in request.methods
    }
    shown = next(iter(rows.values())).methods
    scales = {method: scaled([values[name, method] for name in rows]) for method in shown}
    importances = {
        name: _importances(request) if request.importances else {} for name, request in rows.items()
    }
    strips = _Strips(rows, values, scales, importances)
    longest = max(len(request.shown) for request in rows.values())
    if (sheet.width - _margin(rows)) / len(shown) - 0.06 >= longest * NARROWEST:
        _draw_beside(sheet, strips)
    else:
        _draw_below(sheet, strips)


def _margin(rows: Mapping[str, PlotRequest]) -> float:
    """Inches at the left for layers and names."""
    return 0.42 + (0.14 if any(rows) else 0.0)


def _importances(request: PlotRequest) -> dict[str, Tensor]:
    """Values of the shown tokens by the methods that run the model."""
    importances = {}
    for name, method in methods("model").items():
        options = method.fitting({"target": request.target, "unk": request.unk})
        importances[method.title] = request.trace.read(name, request.query, **options)[0, 0, 0, request.shown]
    return importances


def _draw_beside(sheet: Sheet, strips: _Strips) -> None:
    """A column per method, its colour bar on top."""
    heights = [SCALE]
    for name, request in strips.rows.items():
        heights += [_height(request), *([BARS] * len(strips.importances[name]))]
    grid = sheet.grid(heights, [1.0] * len(strips.scales))
    room = (sheet.width - _margin(strips.rows)) / len(strips.scales) * 72.0 / SIZE
    tops = [sheet.figure.add_subplot(grid[0, column]) for column in range(len(strips.scales))]
    sheet.row(tops[0], heights[0])
    at = 1
    for name, request in strips.rows.items():
        for column, (method, scale) in enumerate(strips.scales.items()):
            axes = sheet.figure.add_subplot(grid[at, column])
            cells_drawn = mesh(axes, strips.values[name, method], scale, lined=True, down=False)
            _part_source(axes, request)
            if column == 0:
                sheet.row(axes, heights[at])
                _layer_ticks(axes, request.layers, heights[at])
                side(axes, f"{name}\nlayer" if name else _of_layer(request, heights[at]))
            if at == 1:
                colour_bar(
                    sheet, cells_drawn, tops[column], wrapped(strips.title(method), room), upright=False
                )
            for step, (what, values) in enumerate(strips.importances[name].items(), start=1):
                axes = sheet.figure.add_subplot(grid[at + step, column])
                _bars(axes, values, what if column == 0 else None)
                if column == 0:
                    sheet.row(axes, BARS)
            if strips.labelled(name):
                sheet.panels.append(Panel(axes, request.words, None, (request.strong, None)))
        at += 1 + len(strips.importances[name])


def _draw_below(sheet: Sheet, strips: _Strips) -> None:
    """A row per method, its colour bar at the right."""
    heights: list[float] = []
    for name, request in strips.rows.items():
        heights += [_height(request)] * len(strips.scales) + [BARS] * len(strips.importances[name])
    grid = sheet.grid(heights, [sheet.width - 0.6, SCALE])
    at = 0
    for name, request in strips.rows.items():
        axes: Any = None
        for method, scale in strips.scales.items():
            axes = sheet.figure.add_subplot(grid[at, 0])
            lined = len(request.shown) <= 60
            cells_drawn = mesh(axes, strips.values[name, method], scale, lined=lined, down=False)
            _part_source(axes, request)
            title(axes, f"{name}: {request.title(method)}" if name else request.title(method))
            _layer_ticks(axes, request.layers, heights[at])
            side(axes, "layer" if name else _of_layer(request, heights[at]))
            colour_bar(sheet, cells_drawn, sheet.figure.add_subplot(grid[at, 1]))
            sheet.row(axes, heights[at])
            at += 1
        for what, values in strips.importances[name].items():
            axes = sheet.figure.add_subplot(grid[at, 0])
            _bars(axes, values, what)
            sheet.row(axes, BARS)
            at += 1
        if strips.labelled(name):
            sheet.panels.append(Panel(axes, request.words, None, (request.strong, None)))


def _height(request: PlotRequest) -> float:
    count = len(request.layers)
    return count * TALL_ROW if count <= 12 else max(12 * TALL_ROW, count * LOW_ROW)


def _part_source(axes: Any, request: PlotRequest) -> None:
    """A line between an encoder–decoder's source and target."""
    before = sum(token < request.first for token in request.shown)
    if 0 < before < len(request.shown):
        axes.axvline(before, color=INK, linewidth=0.8)


def _layer_ticks(axes: Any, layers: Sequence[int], tall: float) -> None:
    """Numbers of layers at the left of a strip, as many as fit."""
    every = max(1, math.ceil(len(layers) * SMALL * LEADING / 72.0 / tall))
    places = list(range(every - 1, len(layers), every))
    axes.set_yticks([place + 0.5 for place in places], [str(layers[place] + 1) for place in places])
    axes.tick_params(axis="y", length=0, pad=2, labelsize=SMALL, labelcolor=INK)


def _of_layer(request: PlotRequest, tall: float) -> str:
    """The label of the y-axis, with the query's name if there is room."""
    words = f"{request.name} at layer"
    return words if width(words) * SIZE * 0.95 <= tall * 72.0 else "layer"


def _bars(axes: Any, values: Tensor, words: str | None) -> None:
    """A bar per token, upwards or downwards from zero."""
    listed = values.tolist()
    colours = [LESS if value < 0.0 else MORE for value in listed]
    axes.bar([place + 0.5 for place in range(len(listed))], listed, width=0.72, color=colours)
    axes.axhline(0.0, color=INK, linewidth=0.5)
    low, high = min(0.0, *listed), max(0.0, *listed)
    room = 0.06 * ((high - low) or 1.0)
    axes.set_ylim(low - (room if low < 0.0 else 0.0), high + room)
    axes.set(xlim=(0, len(listed)), xticks=[])
    largest = high if high >= -low else low
    ticks = [0.0, largest] if largest else [0.0]
    axes.set_yticks(ticks, [number(tick) for tick in ticks])
    axes.get_yticklabels()[-1].set_va("top" if largest >= 0.0 else "bottom")
    axes.tick_params(axis="y", **TICKS, color=SOFT)
    for where in ("top", "right", "bottom"):
        axes.spines[where].set_visible(False)
    axes.spines["left"].set(linewidth=0.5, color=SOFT)
    if words is None:
        axes.tick_params(axis="y", labelleft=False)
    else:
        axes.set_ylabel(words, fontsize=SMALL, color=INK, labelpad=3)
