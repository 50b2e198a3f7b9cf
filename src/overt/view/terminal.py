"""A trace as a table in the terminal: tokens down, methods across."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from overt.tracing.kept_rows import METHODS
from overt.tracing.methods.method import Method, check_known, method_of
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.result import Trace

if TYPE_CHECKING:
    from rich.table import Table

    from overt.tracing.spans import SpanValues

BAR, LEAST_BAR = 12, 3  # characters
ROOM = 65  # characters of all columns of values, so that a table fits a terminal of 80
BLOCKS = " ▏▎▍▌▋▊▉█"
MOST_ROWS = 40  # of the table of a trace without maps
SHADES = "·░▒▓█"
SOURCES = 4  # of each generated word
BLANK = re.compile(r"[\u0120\u010a\u010d\u0109\u2581\s]+")  # how tokenizers name white space: Ġ, Ċ, č, ĉ, ▁
BLANK_SIGNS = {"\u010a": "↵", "\n": "↵", "\u010d": "", "\r": "", "\u0109": "⇥", "\t": "⇥"}


def bar(value: float, largest: float, width: int = BAR) -> str:
    """A bar in eighths of a character, whose length shows the value."""
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
    """A table of one example's tokens, with what a query draws from each by several methods.

    Of a trace without maps, whose text is long, it has the tokens with the largest values.

    Args:
        trace: its first example is shown.
        methods: by name; by default all that read maps, and raw and rollout where there are no maps. Those
            that run the model need a trace with its model.
        query: whose row to show; by default CLS, or the last token of a causal model or decoder.
        layer: which layer to show.
        title: above the table.
        mark: tokens to print in bold.
        arguments: further arguments of the methods; each method gets those that it takes.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    query = trace.main_queries()[0] if query is None else query
    of_rows = trace.of_states or trace.rows is not None
    every = METHODS if of_rows else known_methods("maps")
    readers = [method_of(name) for name in (every if methods is None else methods)]
    check_known(readers, arguments)
    columns = {}
    for reader in readers:
        options = reader.fitting({"layers": layer, **arguments})
        columns[reader.title] = trace.read(reader.name, query, **options)[0, 0, 0]
    grid = Table(
        title=None if title is None else escape(title),
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    grid.add_column("", justify="right", style="dim")
    grid.add_column("token", no_wrap=True)
    for title_of in columns:
        grid.add_column(title_of, no_wrap=True)
    wide = max(LEAST_BAR, min(BAR, ROOM // max(len(columns), 1) - 8))
    source = trace.first
    place = source + query % trace.queries
    listed = torch.nonzero(trace.mask[0]).flatten().tolist()
    if of_rows and len(listed) > MOST_ROWS:
        listed, count = _largest(list(columns.values())), len(listed)
        grid.caption = f"the tokens with the largest values, of {count:,}"
    for token in listed:
        if token == source > 0:
            grid.add_section()
        word = escape(_shown(trace.tokens[0][token]))
        word = f"[bold]{word}[/bold]" if token in mark else word
        word += " [cyan]◂[/cyan]" if token == place else ""
        cells = [_cell(values, token, wide) for values in columns.values()]
        grid.add_row(str(token), word, *cells, style="dim" if bool(trace.special[0, token]) else "")
    return grid


def written_table(
    trace: Trace,
    methods: Sequence[str],
    layer: int | None = None,
    title: str | None = None,
    **arguments: Any,
) -> Table:
    """A table of the words that a model generated, with the words that each draws on most.

    Of each source the table has its place in the text and its value. The first token of a causal model often
    holds most of a row, whatever it says: its share has a column of its own, and special tokens are left out.

    Args:
        trace: of generated text; its first example is shown.
        methods: names of the methods, a column each.
        layer: which layer to show; by default the mean of all layers of raw attention, and the last one of
            methods that go through all of them.
        title: of the table.
        arguments: further arguments of the methods; each method gets those that it takes.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    readers = [method_of(name) for name in methods]
    check_known(readers, arguments)
    unit = "words" if trace.texts and trace.offsets is not None else "tokens"
    grid = Table(title=None if title is None else escape(title), title_justify="left", box=box.SIMPLE)
    grid.add_column("", justify="right", style="dim")
    grid.add_column("word" if unit == "words" else "token", no_wrap=True, style="bold")
    found = []
    one = trace[0] if len(trace) > 1 else trace
    for reader in readers:
        found.append(_written_rows(one, reader, unit, layer, arguments))
        if not one.first and not reader.runs_model:
            grid.add_column("first", justify="right", style="dim")
        of = "" if reader.runs_model else f", {_written_layers(one, reader.name, layer)}"
        grid.add_column(f"{reader.title}{of}: most from", ratio=1)
    special = one.special[0].tolist()
    for number, span in enumerate(found[0].queries):
        cells = []
        for reader, (values, _, sources) in zip(readers, found, strict=True):
            row = values[0, number]
            alone = not one.first and not reader.runs_model
            if alone:
                cells.append(f"{float(row[0]):.2f}")
            order = row.abs().argsort(descending=True, stable=True).tolist()
            kept = [at for at in order if not special[sources[at].start] and not (alone and at == 0)]
            kept = [at for at in kept[:SOURCES] if row[at]]
            shown = [f"{_shown(sources[at].name)} ({sources[at].start}) {float(row[at]):.2g}" for at in kept]
            cells.append(escape(", ".join(shown) or "–"))
        grid.add_row(str(span.start), escape(_shown(span.name)), *cells)
    return grid


def _written_layers(trace: Trace, method: str, layer: int | None) -> str:
    """Which layers the rows of generated words are of, in words."""
    if layer is None and method == "raw":
        return f"mean of {trace.layers} layers"
    return f"layer {(-1 if layer is None else layer) % trace.layers + 1} of {trace.layers}"


def _written_rows(
    trace: Trace, reader: Method, unit: str, layer: int | None, arguments: dict[str, Any]
) -> SpanValues:
    """Rows of the generated words, (1, word, source), of a layer or as the mean of all."""
    averaged = layer is None and reader.name == "raw"
    # One after the other, as a long text may have no room for the rows of all layers.
    layers = range(trace.layers) if averaged else [-1 if layer is None else layer]
    parts = []
    for each in layers:
        options = reader.fitting({"layers": each, **arguments})
        parts.append(trace.spans(reader.name, queries=f"generated {unit}", tokens=unit, **options)[0])
    values = sum((part.values for part in parts[1:]), start=parts[0].values) / len(parts)
    return parts[0]._replace(values=values)


def pixel_map(
    trace: Trace, method: str = "raw", query: int | None = None, layer: int = -1, **arguments: Any
) -> str:
    """What a pixel draws on, as lines of shades: the darker, the more. The pixel itself is in brackets.

    Args:
        trace: of a network over pixels; its first example is shown.
        method: by name.
        query: the pixel, counted row by row; by default the one in the middle.
        layer: which layer to show.
        arguments: further arguments of methods, of which the method gets those that it takes.
    """
    query = trace.main_queries()[0] if query is None else query
    options = method_of(method).fitting({"layers": layer, **arguments})
    sizes = trace.read(method, query, **options)[0, 0, 0].abs()
    others = sizes.clone()
    others[query] = 0.0  # by itself it may be more than all the others
    largest = float(others.max()) or 1.0
    steps = (sizes / largest * (len(SHADES) - 1)).round().clamp(max=len(SHADES) - 1)
    cells = [2 * SHADES[int(step)] for step in steps.tolist()]
    cells[query] = "[]"
    assert trace.grid is not None
    rows, columns = trace.grid
    lines = ["  " + "".join(cells[row * columns : (row + 1) * columns]) for row in range(rows)]
    place = trace.tokens[0][int(others.argmax())]
    most = f"  most elsewhere on {place}: {float(others.max()):.3f}; on itself: {float(sizes[query]):.3f}"
    return "\n".join([*lines, most])


def _largest(columns: list[torch.Tensor]) -> list[int]:
    """Tokens with the largest values, as many of each column, in the order of the text."""
    orders = [values.abs().argsort(descending=True, stable=True).tolist() for values in columns]
    chosen: dict[int, None] = {}
    for tokens in zip(*orders, strict=True):
        chosen.update(dict.fromkeys(tokens))
        if len(chosen) >= MOST_ROWS:
            break
    return sorted(list(chosen)[:MOST_ROWS])


def _cell(values: torch.Tensor, token: int, wide: int) -> str:
    value, largest = float(values[token]), float(values.abs().max())
    colour = "red" if value < 0 else "green"
    return f"{value:6.3f} [{colour}]{bar(abs(value), largest, wide)}[/{colour}]"


def _shown(word: str) -> str:
    """A token without characters that would move the cursor; white space as signs."""
    if BLANK.fullmatch(word):  # the whole token
        return "".join(BLANK_SIGNS.get(sign, "␣") for sign in word) or "↵"
    return "".join(letter if letter.isprintable() else "�" for letter in word) or "·"
