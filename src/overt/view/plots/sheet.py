"""A figure whose height depends on its contents, and whose labels depend on the available room."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overt._extras import need
from overt.view.plots.style import INK, LEADING, SIZE, SMALL, TALLEST, WIDTHS
from overt.view.plots.words import PLAIN, missing_letters_pass, plainly, width, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

PAD = 0.02  # inches around axes


@dataclass
class Panel:
    """Axes with tokens along their sides; the first token is at the left, or at the top."""

    axes: Any
    across: list[str] | None = None
    down: list[str] | None = None
    strong: tuple[int | None, int | None] = (None, None)  # places of the query, across and down
    most: int = 10_000  # no labels if only every n-th fits, for n above this


@dataclass
class Sheet:
    """A figure under construction.

    Attributes:
        figure: where to draw.
        own: whether this module may choose its height.
        panels: panels to be labelled once their sizes are known.
        rows: for each row of the grid, its axes and requested height: in inches, or relative to the width of
            the axes up to a maximum in inches.
        bars: upright colour bars to be labelled once their sizes are known.
        spec: the grid.
    """

    figure: Any
    own: bool
    panels: list[Panel] = field(default_factory=list)
    rows: list[tuple[Any, float, bool, float]] = field(default_factory=list)
    bars: list[Any] = field(default_factory=list)
    spec: Any = None

    @property
    def width(self) -> float:
        """Inches."""
        return float(self.figure.bbox.width / self.figure.dpi)

    def grid(self, heights: Sequence[float], widths: Sequence[float]) -> Any:
        """A grid for axes; heights and widths are in inches, or proportional to inches."""
        self.spec = self.figure.add_gridspec(
            len(heights), len(widths), height_ratios=heights, width_ratios=widths
        )
        return self.spec

    def equal_grid(self, down: int, across: int) -> Any:
        """A grid for equal panels, with a last column for a colour bar."""
        if self.own:
            # Titles alone would fill a lower figure, and the layout would fail.
            self.figure.set_figheight(max(self.figure.get_figheight(), 0.5 * down))
            pad = min(PAD, 0.1 * self.width / across)
            self.figure.get_layout_engine().set(w_pad=pad, h_pad=pad)
        thin = 0.055 * across / max(self.width - 0.9, 0.5)
        return self.grid([1.0] * down, [1.0] * across + [thin])

    def row(self, axes: Any, height: float, relative: bool = False, most: float = TALLEST) -> None:
        """Request a height for the row of these axes."""
        self.rows.append((axes, height, relative, most))

    def settle(self) -> None:
        """Choose the height, then write the labels that have room."""
        written = [_label(panel, *self._rooms(panel.axes)) for panel in self.panels]
        tall = [self._rooms(axes)[1] for axes in self.bars]
        for _ in range(2 if self.own else 0):
            heights = self._resize()
            before = written
            written = [
                _label(panel, _inches(panel.axes)[0], _within(panel.axes, heights)) for panel in self.panels
            ]
            tall = [_within(axes, heights) for axes in self.bars]
            if written == before:  # otherwise rotated labels need another height
                break
        for axes, height in zip(self.bars, tall, strict=True):
            words = axes.get_ylabel()
            room = height * 72.0 / SIZE
            options = (words, words.removeprefix("attention "), wrapped(words, room), "")
            fitting = (text for text in options if max(map(width, text.split("\n"))) * PLAIN <= room)
            axes.set_ylabel(next(fitting))

    def _resize(self) -> list[float]:
        """Give the figure the height that its rows request; returns the rows' heights in inches."""
        root = self.figure
        with missing_letters_pass():
            root.get_layout_engine().execute(root)
        # Everything but the axes keeps its height, whatever the figure's height.
        between = root.get_figheight() - sum(_inches(axes)[1] for axes, *_ in self.rows)
        heights = [
            min(height * _inches(axes)[0], most) if relative else height
            for axes, height, relative, most in self.rows
        ]
        part = min(1.0, (TALLEST - between) / sum(heights))
        heights = [part * height for height in heights]
        root.set_figheight(between + sum(heights))
        self.spec.set_height_ratios(heights)
        return heights

    def _rooms(self, axes: Any) -> tuple[float, float]:
        """Approximate width and height of axes before layout."""
        spec = axes.get_subplotspec()
        across, down = spec.get_gridspec().get_width_ratios(), spec.get_gridspec().get_height_ratios()
        wide = (sum(across[spec.colspan.start : spec.colspan.stop]) / sum(across)) * self.width * 0.8
        tall = sum(down[spec.rowspan.start : spec.rowspan.stop]) / sum(down)
        return wide, tall * float(self.figure.bbox.height / self.figure.dpi) * 0.8


def _within(axes: Any, heights: Sequence[float]) -> float:
    """Height of axes, given the heights of the grid's rows."""
    rows = axes.get_subplotspec().rowspan
    return sum(heights[rows.start : rows.stop])


def _inches(axes: Any) -> tuple[float, float]:
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    return float(box.width), float(box.height)


def _label(panel: Panel, wide: float, tall: float) -> list[tuple[float, bool]]:
    """Write tokens along the sides: every token, or every n-th if they would overlap.

    Returns:
        For each side that has tokens, the font size and whether they are horizontal.
    """
    chosen = []
    for name, words, room, strong in (
        ("x", panel.across, wide, panel.strong[0]),
        ("y", panel.down, tall, panel.strong[1]),
    ):
        if words is None:
            continue
        gap = room / max(len(words), 1) * 72.0  # points
        size = SIZE if gap >= SIZE * LEADING else SMALL
        level = name == "y" or gap > 1.25 * max(map(width, words)) * size
        every = 1 if level and name == "x" else max(1, math.ceil(size * LEADING / max(gap, 1e-6)))
        places = list(range(0, len(words), every)) if every <= panel.most else []
        axis = panel.axes.xaxis if name == "x" else panel.axes.yaxis
        axis.set_ticks([place + 0.5 for place in places], [words[place] for place in places])
        panel.axes.tick_params(axis=name, length=0, pad=2, labelsize=size, labelcolor=INK)
        for label, place in zip(axis.get_ticklabels(), places, strict=True):
            label.set(**plainly(words[place]), fontweight="bold" if place == strong else "normal")
            label.set_rotation(0 if level else 90)
        chosen.append((size if places else 0.0, level))
    return chosen


def draw_figure(
    draw: Callable[[Sheet], None], columns: int, title: str | None, figure: Figure | SubFigure | None
) -> Figure:
    """Draw on a new sheet, or in the caller's figure."""
    need("matplotlib", "view")
    from matplotlib.figure import Figure, FigureBase

    if figure is not None and not isinstance(figure, FigureBase):
        raise TypeError(f"figure must be a matplotlib Figure or SubFigure, got {type(figure).__name__}")
    place: Any = figure
    if place is None:
        place = Figure(figsize=(WIDTHS[columns], 5.0), layout="constrained", facecolor="white")
        place.get_layout_engine().set(w_pad=PAD, h_pad=PAD, wspace=0.02, hspace=0.02)
    sheet = Sheet(place, own=figure is None)
    draw(sheet)
    if title is not None:
        place.suptitle(title, fontsize=SIZE + 1.0, color=INK, **plainly(title))
    sheet.settle()
    root = place.figure
    assert isinstance(root, Figure)
    return root
