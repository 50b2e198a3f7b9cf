"""A trace as a table in the terminal: tokens down, methods across."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from overt.tracing.methods.method import check_known, method_of
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.result import Trace

if TYPE_CHECKING:
    from rich.table import Table

BAR, LEAST_BAR = 12, 3  # characters
ROOM = 65  # characters of all columns of values, so that a table fits a terminal of 80
BLOCKS = " ▏▎▍▌▋▊▉█"


def bar(value: float, largest: float, width: int = BAR) -> str:
    """A bar of eighths of characters, as long as the value is large."""
    eighths = 0 if largest <= 0 else round(8 * width * min(max(value, 0.0) / largest, 1.0))
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + BLOCKS[rest]).ljust(width)[:width]


def table(
    trace: Trace,
    methods: Sequence[str] | None = None,
    query: int | None = None,
    layer: int = -1,
    title: str | None = None,
    mark: Sequence[int] = (),
    **arguments: Any,
) -> Table:
    """One example's tokens with what a query draws from each, by several methods.

    Args:
        trace: its first example is shown.
        methods: by name; by default all that read maps. Those that run the model need a trace that has it.
        query: whose row; CLS by default, or the last token of a causal model or decoder.
        layer: of which layer.
        title: above the table.
        mark: tokens to point at.
        arguments: further ones; each method gets those that mean something to it.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    query = trace.main_queries()[0] if query is None else query
    asked = [method_of(name) for name in (known_methods("maps") if methods is None else methods)]
    check_known(asked, arguments)
    columns = {
        one.title: trace.read(one.name, query, **one.fitting({"layers": layer, **arguments}))[0, 0, 0]
        for one in asked
    }
    made = Table(
        title=None if title is None else escape(title),
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    made.add_column("", justify="right", style="dim")
    made.add_column("token", no_wrap=True)
    for title_of in columns:
        made.add_column(title_of, no_wrap=True)
    wide = max(LEAST_BAR, min(BAR, ROOM // max(len(columns), 1) - 8))
    source = trace.first
    place = source + query % trace.queries
    for token in torch.nonzero(trace.mask[0]).flatten().tolist():
        if token == source > 0:
            made.add_section()
        word = escape(_shown(trace.tokens[0][token]))
        word = f"[bold]{word}[/bold]" if token in mark else word
        word += " [cyan]◂[/cyan]" if token == place else ""
        cells = [_cell(values, token, wide) for values in columns.values()]
        made.add_row(str(token), word, *cells, style="dim" if bool(trace.special[0, token]) else "")
    return made


def _cell(values: torch.Tensor, token: int, wide: int) -> str:
    value, largest = float(values[token]), float(values.abs().max())
    colour = "red" if value < 0 else "green"
    return f"{value:6.3f} [{colour}]{bar(abs(value), largest, wide)}[/{colour}]"


def _shown(word: str) -> str:
    """A token without characters that would move the cursor."""
    return "".join(letter if letter.isprintable() else "�" for letter in word) or "·"
