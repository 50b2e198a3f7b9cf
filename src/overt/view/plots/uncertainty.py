"""Mean and spread over posterior samples, of a layer's map and of what the query draws on."""

from __future__ import annotations

from typing import Any

from overt.view.plots.matrix import colour_bar, mesh, scaled
from overt.view.plots.request import PlotRequest
from overt.view.plots.sheet import Panel, Sheet
from overt.view.plots.style import INK, SIZE, SPREADS, TICKS, VALUES, side, title
from overt.view.plots.words import wrapped


def draw(sheet: Sheet, request: PlotRequest) -> None:
    """Two maps, and bars with whiskers: next to them in two columns, below them in one."""
    trace = request.trace
    method = request.method_or_rollout
    if not trace.draws:
        raise ValueError("uncertainty needs posterior samples: overt.trace(…, samples=20)")
    layer, queries, down = request.one_layer("uncertainty"), request.queries, request.query_words
    maps = request.spread("raw", layers=layer)
    row = request.spread(method, queries=request.query, layers=layer)
    wide = request.columns == 2
    grid = sheet.grid([1.0], [1.4, 1.4, 1.9]) if wide else sheet.grid([1.1, 1.0], [1.0, 1.0])
    panels = ((f"mean {request.weights}", maps.mean, VALUES), ("its spread", maps.spread, SPREADS))
    for place, (words, values, colours) in enumerate(panels):
        cells = values[0, 0][queries][:, request.shown]
        axes = sheet.figure.add_subplot(grid[0, place])
        cells_drawn = mesh(axes, cells, scaled([cells], colours), lined=False)
        title(axes, wrapped(words, sheet.width * (0.22 if wide else 0.33) * 72.0 / SIZE))
        colour_bar(sheet, cells_drawn, axes.inset_axes((1.04, 0.0, 0.05, 1.0)))
        if place == 0:
            side(axes, f"layer {layer + 1}")
            sheet.row(axes, cells.shape[0] / cells.shape[1], relative=True)
        sheet.panels.append(Panel(axes, request.words, down if place == 0 else None))
    axes = sheet.figure.add_subplot(grid[0, 2] if wide else grid[1, :])
    _whiskers(axes, *(values[0, 0, 0, request.shown].tolist() for values in (row.mean, row.spread)))
    title(axes, f"mean ± one spread of {len(trace.draws)} samples")
    side(axes, f"{method} of {request.name}")
    if not wide:
        sheet.row(axes, 0.95)
    sheet.panels.append(Panel(axes, request.words, None, (request.strong, None)))


def _whiskers(axes: Any, values: list[float], spreads: list[float]) -> None:
    """A bar per token, with a whisker of one spread to either side of its end."""
    at = [place + 0.5 for place in range(len(values))]
    axes.bar(at, values, width=0.72, color="#6BAED6", zorder=1)
    drawn: dict[str, Any] = {"ecolor": INK, "elinewidth": 0.8, "capsize": 1.6, "capthick": 0.8}
    axes.errorbar(at, values, yerr=spreads, fmt="none", zorder=2, **drawn)
    axes.set_xlim(0, len(values))
    if min(values) >= 0.0:
        axes.set_ylim(bottom=0.0)
    else:
        axes.axhline(0.0, color=INK, linewidth=0.5)
    axes.locator_params(axis="y", nbins=4)
    axes.tick_params(axis="y", **TICKS, labelcolor=INK)
    for where in ("top", "right"):
        axes.spines[where].set_visible(False)
    for where in ("left", "bottom"):
        axes.spines[where].set(linewidth=0.5)
