"""Figures of results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overt._files import written_whole

PNG_DPI = 150  # of what is also there as SVG


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure, completely or not at all; the same figure gives the same file."""
    from matplotlib import rc_context

    with written_whole(path) as part, rc_context({"svg.hashsalt": "overt"}):  # else ids are random
        figure.savefig(part, metadata={"Date": None}, format=path.suffix.removeprefix("."))
