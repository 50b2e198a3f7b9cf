"""A figure whose height follows from what is in it, and whose labels from the room there is."""

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
    """Axes with words along their sides; the first token is at the left, or on top."""

    axes: Any
    across: list[str] | None = None
    down: list[str] | None = None
    strong: tuple[int | None, int | None] = (None, None)  # places of the query, across and down
    most: int = 10_000  # every so many-th label at most is worth having


@dataclass
class Sheet:
    """A figure in the making.

    Attributes:
        figure: where to draw.
        own: whether its height is ours to choose.
        panels: whose labels wait for their sizes.
        rows: for each row of the grid an axes and the height wanted: in inches, or in widths of the axes but
            at most so many inches.
        bars: upright colour bars whose words wait for their sizes.
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
        """Places for axes; heights and widths are inches, at least in proportion."""
        self.spec = self.figure.add_gridspec(
            len(heights), len(widths), height_ratios=heights, width_ratios=widths
        )
        return self.spec

    def equal_grid(self, down: int, across: int) -> Any:
        """Places for equal panels, and a last column for a colour bar."""
        if self.own:
            # Titles alone would fill what is lower, and nothing be laid out.
            self.figure.set_figheight(max(self.figure.get_figheight(), 0.5 * down))
            pad = min(PAD, 0.1 * self.width / across)
            self.figure.get_layout_engine().set(w_pad=pad, h_pad=pad)
        thin = 0.055 * across / max(self.width - 0.9, 0.5)
        return self.grid([1.0] * down, [1.0] * across + [thin])

    def row(self, axes: Any, height: float, relative: bool = False, most: float = TALLEST) -> None:
        """Want a height for the row of these axes."""
        self.rows.append((axes, height, relative, most))

    def settle(self) -> None:
        """Choose the height, then write what has room."""
        written = [_label(panel, *self._rooms(panel.axes)) for panel in self.panels]
        tall = [self._rooms(axes)[1] for axes in self.bars]
        for _ in range(2 if self.own else 0):
            wanted = self._resize()
            before = written
            written = [
                _label(panel, _inches(panel.axes)[0], _within(panel.axes, wanted)) for panel in self.panels
            ]
            tall = [_within(axes, wanted) for axes in self.bars]
            if written == before:  # else labels that turned want another height
                break
        for axes, height in zip(self.bars, tall, strict=True):
            words = axes.get_ylabel()
            room = height * 72.0 / SIZE
            options = (words, words.removeprefix("attention "), wrapped(words, room), "")
            fitting = (one for one in options if max(map(width, one.split("\n"))) * PLAIN <= room)
            axes.set_ylabel(next(fitting))

    def _resize(self) -> list[float]:
        """Give the figure the height that its rows want; returns theirs, in inches."""
        root = self.figure
        with missing_letters_pass():
            root.get_layout_engine().execute(root)
        # What is not axes is as high as it is, whatever the figure's height.
        between = root.get_figheight() - sum(_inches(axes)[1] for axes, *_ in self.rows)
        wanted = [
            min(height * _inches(axes)[0], most) if relative else height
            for axes, height, relative, most in self.rows
        ]
        part = min(1.0, (TALLEST - between) / sum(wanted))
        wanted = [part * height for height in wanted]
        root.set_figheight(between + sum(wanted))
        self.spec.set_height_ratios(wanted)
        return wanted

    def _rooms(self, axes: Any) -> tuple[float, float]:
        """About how wide and high axes will be, before any layout."""
        spec = axes.get_subplotspec()
        across, down = spec.get_gridspec().get_width_ratios(), spec.get_gridspec().get_height_ratios()
        own = (sum(across[spec.colspan.start : spec.colspan.stop]) / sum(across)) * self.width * 0.8
        tall = sum(down[spec.rowspan.start : spec.rowspan.stop]) / sum(down)
        return own, tall * float(self.figure.bbox.height / self.figure.dpi) * 0.8


def _within(axes: Any, heights: Sequence[float]) -> float:
    """How high axes are, where rows of the grid have these heights."""
    rows = axes.get_subplotspec().rowspan
    return sum(heights[rows.start : rows.stop])


def _inches(axes: Any) -> tuple[float, float]:
    box = axes.get_window_extent().transformed(axes.figure.dpi_scale_trans.inverted())
    return float(box.width), float(box.height)


def _label(panel: Panel, wide: float, tall: float) -> list[tuple[float, bool]]:
    """Write tokens along the sides: every one, or every n-th where they would run into each other.

    Returns:
        For each side that has tokens, font size and whether they are level.
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


def drawn(
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
    found = place.figure
    assert isinstance(found, Figure)
    return found
