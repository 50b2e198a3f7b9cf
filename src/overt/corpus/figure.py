"""A summary of a corpus as a figure: points with intervals for tokens, curves for positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from overt import _check
from overt._extras import need
from overt.corpus.summary import LEAST, Estimate, Row, Summary
from overt.tracing.methods.method import methods as known_methods
from overt.view.plots.sheet import Sheet, draw_figure
from overt.view.plots.style import HIGHLIGHT, INK, MORE, SIZE, SMALL, SOFT, TICKS, WIDTHS, number, title
from overt.view.plots.words import plainly, word

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LINE = 0.125  # inches of a row
CURVE = 1.6  # inches of a curve
MOST_GROUPS = 4  # those with the most sentences
NAMES = {"mean": "mean attribution", "ratio": "× even", "contrast": "contrast of × even"}


def plot_summary(
    summary: Summary,
    *,
    methods: Sequence[str] | None = None,
    top: int = 20,
    least: int = LEAST,
    columns: int = 2,
    heading: str | None = None,
) -> Figure:
    """Draw a summary, methods side by side; `overt.view.plots.save` writes the figure.

    Tokens have the mean with its 95 % interval over sentences, and a red mark where an even spread would be;
    special tokens are above, on a scale of their own. Positions have × even. Groups have the tokens with the
    largest contrasts.

    Args:
        summary: from `Corpus.summary`.
        methods: names; by default all.
        top: tokens at most, of all groups together.
        least: sentences that a row must have.
        columns: width of the figure, 1 or 2.
        heading: above the figure.
    """
    need("matplotlib", "view")
    _check.one_of("columns", columns, WIDTHS)
    _check.whole("top", top, 1)
    chosen = summary.methods if methods is None else tuple(methods)
    for method in chosen:
        _check.one_of("methods", method, summary.methods)
    if not summary.rows(chosen[0], least=least):
        raise ValueError(f"no row is in {least} or more sentences: a smaller --least (least=…) shows some")
    if summary.by == "position":
        return draw_figure(lambda sheet: _curves(sheet, summary, chosen, least), columns, heading, None)
    if summary.grouped:
        return draw_figure(lambda sheet: _groups(sheet, summary, chosen, top, least), columns, heading, None)
    return draw_figure(lambda sheet: _tokens(sheet, summary, chosen, top, least), columns, heading, None)


def _titled(method: str) -> str:
    known = known_methods().get(method)
    return method if known is None else known.title


def _tokens(sheet: Sheet, summary: Summary, methods: Sequence[str], top: int, least: int) -> None:
    parts = [
        {method: summary.rows(method, least=least, special=special)[:top] for method in methods}
        for special in (True, False)
    ]
    parts = [part for part in parts if any(part.values())]
    heights = [LINE * max(map(len, part.values())) for part in parts]
    grid = sheet.grid(heights, [1.0] * len(methods))
    for at, part in enumerate(parts):
        for column, (method, rows) in enumerate(part.items()):
            axes = sheet.figure.add_subplot(grid[at, column])
            _points(axes, rows, "mean", max(map(len, part.values())))
            if at == 0:
                title(axes, _titled(method))
            if at == len(parts) - 1:
                axes.set_xlabel(NAMES["mean"], fontsize=SMALL, color=INK, labelpad=2)
            if column == 0:
                sheet.row(axes, heights[at])


def _groups(sheet: Sheet, summary: Summary, methods: Sequence[str], top: int, least: int) -> None:
    names = [group.name for group in summary.groups()][:MOST_GROUPS]
    each = max(3, top // len(names))
    rows = {
        (name, method): [
            row
            for row in summary.rows(method, sort="contrast", least=least, special=False, group=name)
            if row.contrast is not None and row.contrast.value == row.contrast.value
        ][:each]
        for name in names
        for method in methods
    }
    if not any(rows.values()):
        raise ValueError(
            f"no token is in {least} or more sentences both of a group and of others, so that there is no "
            "contrast to draw: a smaller --least (least=…) may have some"
        )
    names = [name for name in names if any(rows[name, method] for method in methods)]
    heights = [LINE * max(len(rows[name, method]) for method in methods) for name in names]
    grid = sheet.grid(heights, [1.0] * len(methods))
    for at, name in enumerate(names):
        for column, method in enumerate(methods):
            axes = sheet.figure.add_subplot(grid[at, column])
            _points(axes, rows[name, method], "contrast", max(len(rows[name, one]) for one in methods))
            shown = word("(none)" if name is None else str(name))
            title(axes, f"{summary.by} {shown}, {_titled(method)}")
            if at == len(names) - 1:
                axes.set_xlabel(NAMES["contrast"], fontsize=SMALL, color=INK, labelpad=2)
            if column == 0:
                sheet.row(axes, heights[at])


def _points(axes: Any, rows: Sequence[Row], measure: str, count: int) -> None:
    """A point with its interval for each row, the first at the top, and a mark to compare it with."""
    for place, row in enumerate(rows):
        value, low, high = _estimate(row, measure)
        axes.hlines(place, low, high, color=MORE, linewidth=1.1)
        axes.plot([value], [place], "o", color=MORE, markersize=2.6)
        if measure == "mean":
            axes.plot([row.even], [place], "|", color=HIGHLIGHT, markersize=5, markeredgewidth=0.9)
    if measure == "contrast":
        axes.axvline(0.0, color=HIGHLIGHT, linewidth=0.7)
    labels = [word(str(row.name)) for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    for label, text in zip(axes.get_yticklabels(), labels, strict=True):
        label.set(**plainly(text), fontsize=SMALL, color=INK)
    axes.set_ylim(count - 0.4, -0.6)
    if measure == "mean":
        axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))
    _frame(axes)


def _estimate(row: Row, measure: str) -> Estimate:
    found = getattr(row, measure)
    assert isinstance(found, Estimate)
    return found


def _frame(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.tick_params(axis="x", **TICKS, color=SOFT)
    axes.tick_params(axis="y", length=0, pad=2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(linewidth=0.5, color=SOFT)
    axes.grid(axis="x", color=SOFT, linewidth=0.3, alpha=0.6)
    axes.set_axisbelow(True)


def _curves(sheet: Sheet, summary: Summary, methods: Sequence[str], least: int) -> None:
    grid = sheet.grid([CURVE], [1.0] * len(methods))
    for column, method in enumerate(methods):
        axes = sheet.figure.add_subplot(grid[0, column])
        rows = summary.rows(method, least=least)
        places = [row.name for row in rows]
        values, lows, highs = zip(*(row.ratio for row in rows), strict=True)
        axes.fill_between(places, lows, highs, color=MORE, alpha=0.25, linewidth=0)
        axes.plot(places, values, color=MORE, linewidth=1.0)
        axes.axhline(1.0, color=HIGHLIGHT, linewidth=0.7, linestyle=(0, (4, 3)))
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        _frame(axes)
        axes.tick_params(axis="y", **TICKS)
        axes.yaxis.set_major_formatter(lambda value, _: number(value))
        axes.spines["left"].set(visible=True, linewidth=0.5, color=SOFT)
        axes.set_xlabel("position", fontsize=SMALL, color=INK, labelpad=2)
        if column == 0:
            axes.set_ylabel(NAMES["ratio"], fontsize=SIZE, color=INK, labelpad=3)
            sheet.row(axes, CURVE)
        title(axes, _titled(method))
