"""Values as colours: scales, matrices of cells and the bars that explain them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from overt.view.plots.sheet import Panel, Sheet
from overt.view.plots.style import INK, SIGNED, SIZE, SOFT, TICKS, VALUES, bare, number, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize

MOST_CELLS = 10_000  # drawn one by one; more are rasterised, or files would get too large to open
SEAMLESS = "_seamless"  # label of meshes whose cells touch
TALLEST_CELL = 0.34  # inches

Scale = tuple["Colormap", "Normalize"]


def scaled(values: Sequence[Tensor], colours: str = VALUES) -> Scale:
    """A scale from zero to the largest value; symmetric about zero if there are negative values."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    low = min((float(cells.min()) for cells in values), default=0.0)
    high = max((float(cells.max()) for cells in values), default=0.0)
    if low < -1e-9:
        most = max(high, -low)
        return colormaps[SIGNED], Normalize(-most, most)
    return colormaps[colours], Normalize(0.0, high if high > 0.0 else 1.0)


def fading(above: str, below: str | None, opacity: float = 1.0) -> Colormap:
    """From transparent at zero to a colour, and to another colour for negative values, if given."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    shades = [(*to_rgb(above), 0.0), (*to_rgb(above), opacity)]
    if below is not None:
        shades = [(*to_rgb(below), opacity), (*to_rgb(below), 0.0), *shades]
    return LinearSegmentedColormap.from_list("fading", shades)


def mesh(axes: Axes, values: Tensor, scale: Scale, *, lined: bool, down: bool = True, among: int = 1) -> Any:
    """A matrix as cells that vector graphics programs can edit.

    Args:
        axes: to draw in.
        values: (row, column).
        scale: of colours.
        lined: draw white lines between cells.
        down: whether the first row is at the top.
        among: how many such matrices the figure has.
    """
    rows, columns = values.shape
    many = rows * columns * among > MOST_CELLS
    edges: dict[str, Any] = {"edgecolors": "white", "linewidth": 0.4}
    edges = edges if lined else {"snap": True, "label": "_cells" if many else SEAMLESS}
    cells = axes.pcolormesh(values.numpy(), cmap=scale[0], norm=scale[1], **edges)
    cells.set_rasterized(many)
    bare(axes, columns, rows, down)
    return cells


def colour_bar(
    sheet: Sheet, mappable: Any, axes: Any, words: str | None = None, upright: bool = True
) -> None:
    """A colour bar in its own axes, with the ends of the scale."""
    from matplotlib.colors import PowerNorm

    bar = sheet.figure.colorbar(mappable, cax=axes, orientation="vertical" if upright else "horizontal")
    axes.set_label("<colorbar>")  # matplotlib's own label for colour bars
    low, high = mappable.norm.vmin, mappable.norm.vmax
    ticks = [low, 0.0, high] if low < 0.0 else [low, high]
    if isinstance(mappable.norm, PowerNorm):
        ticks = [low, high / 16.0, high / 4.0, high]
    bar.set_ticks(ticks, labels=[number(tick) for tick in ticks])
    bar.outline.set(linewidth=0.5, edgecolor=SOFT)
    axes.tick_params(**TICKS, color=SOFT, labelcolor=INK)
    if upright:
        labels = axes.get_yticklabels()
        labels[0].set_va("bottom")
        labels[-1].set_va("top")
        if words:
            bar.set_label(words, fontsize=SIZE, color=INK, labelpad=2)
            sheet.bars.append(axes)
    else:
        axes.xaxis.set_ticks_position("top")
        labels = axes.get_xticklabels()
        labels[0].set_ha("left")
        labels[-1].set_ha("right")
        if words:
            axes.set_title(words, fontsize=SIZE, color=INK, pad=2)


def draw_map(
    sheet: Sheet, cells: Tensor, down: list[str], across: list[str], bar_words: str, title_words: str
) -> Any:
    """One matrix with tokens on both sides; returns its axes."""
    grid = sheet.equal_grid(1, 1)
    axes = sheet.figure.add_subplot(grid[0, 0])
    cells_drawn = mesh(axes, cells, scaled([cells]), lined=max(cells.shape) <= 40)
    title(axes, title_words)
    colour_bar(sheet, cells_drawn, sheet.figure.add_subplot(grid[0, 1]), bar_words)
    rows, columns = cells.shape
    sheet.row(axes, rows / columns, relative=True, most=TALLEST_CELL * rows)
    sheet.panels.append(Panel(axes, across, down))
    return axes


def label_rim(sheet: Sheet, axes: Any, words: list[str], left: bool, lowest: bool) -> None:
    """Label a grid of maps at the left and at the bottom, on the axes there."""
    if left or lowest:
        sheet.panels.append(Panel(axes, words if lowest else None, words if left else None, most=2))
