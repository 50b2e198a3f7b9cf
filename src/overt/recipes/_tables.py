"""Tables of results on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overt.recipes._recipe import Grid

if TYPE_CHECKING:
    from rich.console import Console


def show(console: Console, grid: Grid) -> None:
    """Print a table at its full width: numbers truncated to fit the terminal would be useless."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.measure import Measurement
    from rich.table import Table

    table = Table(title=escape(grid.title), title_justify="left", box=box.SIMPLE, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for heading in grid.columns:
        table.add_column(escape(heading), justify="right", no_wrap=True)
    for name, cells in grid.rows:
        table.add_row(name, *cells, style="dim" if "published" in name else "")
    width = Measurement.get(console, console.options.update(width=1000), table).maximum
    Console(file=console.file, width=max(width, console.width)).print(table)
