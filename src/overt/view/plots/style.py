"""Sizes and colours of all figures, and a few functions that all axes share."""

from __future__ import annotations

from typing import Any

from overt.view.plots.words import plainly

WIDTHS = {1: 3.3, 2: 6.9}  # inches of one and two columns of a page
TALLEST = 8.6  # inches for a figure, with room for its caption on a page
SIZE, SMALL = 7.0, 6.0  # points
LEADING = 1.04  # distance of lines of text, in font sizes

# Light to dark in one hue, so that grey prints work; two hues that nearly everyone can distinguish for signs.
VALUES, SPREADS, SIGNED, HIGHLIGHT = "Blues", "Oranges", "RdBu", "#B30000"
MORE, LESS, INK, SOFT = "#08519C", "#B2182B", "#222222", "#BBBBBB"
TICKS: dict[str, Any] = {"labelsize": SMALL, "length": 1.5, "width": 0.5, "pad": 1.5}


def title(axes: Any, words: str) -> None:
    """A title above axes."""
    axes.set_title(words, fontsize=SIZE, color=INK, pad=3, **plainly(words))


def side(axes: Any, words: str) -> None:
    """A label to the left of axes."""
    axes.set_ylabel(words, fontsize=SIZE, color=INK, labelpad=3, **plainly(words))


def bare(axes: Any, columns: int, rows: int, down: bool = True) -> None:
    """Prepare axes for a matrix: a thin frame and no ticks; the first row is at the top, or at the bottom."""
    axes.set(xlim=(0, columns), ylim=(rows, 0) if down else (0, rows), xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(linewidth=0.5, color=SOFT)


def number(value: float) -> str:
    """A value as a tick label."""
    if value == 0.0:
        return "0"
    shown = f"{value:.2f}" if abs(value) >= 0.1 else f"{value:#.2g}"
    return shown.replace("-", "−")
