"""Show what a model draws on over a corpus: printed, as a figure, and as a page with examples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overt import _check, corpus
from overt._extras import need
from overt._files import check_folder
from overt.cli.corpus_app import corpus_app
from overt.corpus.opened import LABEL
from overt.corpus.page import EXAMPLES, corpus_page
from overt.corpus.summary import COVERS, EVEN, LEAST, SORTS, Estimate, Row, Summary, main_method
from overt.tracing.progress import counting
from overt.view.terminal import bar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TOP = 20
SUFFIXES = (".html", ".htm")


def show_corpus(
    folder: Path,
    by: str = "token",
    *,
    method: str | None = None,
    layer: int = -1,
    label: str | None = None,
    sort: str | None = None,
    least: int = LEAST,
    top: int = TOP,
    plot: Path | None = None,
    out: Path | None = None,
    examples: int = EXAMPLES,
) -> Summary:
    """Print a summary of a corpus; optionally draw it, and write a page.

    Args:
        folder: what `overt corpus run` wrote.
        by: "token", "position", "label", "error" or the name of a column.
        method: whose table to print; by default rollout, or the first that there is.
        layer: which of the layers that the run kept.
        label: name of the column with labels.
        sort: "mean", "ratio", "sentences" or "contrast"; by default the mean, and the contrast of groups.
        least: sentences that a row must have.
        top: rows to print.
        plot: path of a figure: .png, .pdf or .svg.
        out: path of a page: .html.
        examples: sentences of the page that are drawn at random.
    """
    from rich.console import Console

    # All arguments are checked before anything is read.
    if out is not None and out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--out must end in .html (a page), got {out}")
    if out is not None:
        check_folder("--out", out)
    if plot is not None:
        need("matplotlib", "view")
        from overt.view.plots import check_path

        check_path("--plot", plot)
    if sort is not None:
        _check.one_of("--sort", sort, SORTS)
    opened = corpus.open(folder)
    if label is not None and label not in opened.columns:
        raise ValueError(f"--label {label}: there is no such column; columns: {', '.join(opened.carried)}")
    label = LABEL if label is None else label
    if method is None:
        method = main_method(opened.methods)
    _check.one_of("--method", method, opened.methods)
    opened.grouping(by, label)  # refuses a column that there is none of
    console = Console()
    if opened.missing is not None:
        console.print(f"[bold yellow]{folder} is {opened.missing}[/bold yellow]", highlight=False)
    if not len(opened):
        raise ValueError(f"{folder} has no rows: {opened.bad_rows():,} bad ones are in its errors")
    with _reporting("summing") as report:
        summary = opened.summary(by, layer=layer, label=label, report=report)
    if sort == "contrast" and not summary.grouped:
        raise ValueError(f"--sort contrast compares groups, and --by {by} has none")
    _print(console, opened, summary, method, sort, least, top)
    if plot is not None:
        from overt.corpus.figure import plot_summary
        from overt.view.plots import save

        save(plot_summary(summary, top=top, least=least), plot)
        console.print(f"[dim]figure in {plot}[/dim]", highlight=False)
    if out is not None:
        further = () if by in ("token", "position") else (by,)
        with _reporting("page") as report:
            page = corpus_page(
                opened,
                by=further,
                label=label,
                layer=layer,
                least=least,
                examples=examples,
                report=lambda _, done, total: report(done, total),
            )
        page.save(out)
        about, size = page.index["about"], out.stat().st_size / 1e6
        console.print(f"[dim]page in {out} ({size:.1f} MB), with {about['sample']}[/dim]", highlight=False)
    return summary


@contextmanager
def _reporting(words: str) -> Iterator[Any]:
    with counting(words) as report:
        yield report


def _print(
    console: Console,
    opened: corpus.Corpus,
    summary: Summary,
    method: str,
    sort: str | None,
    least: int,
    top: int,
) -> None:
    from rich.markup import escape

    model, bad = opened.manifest["model"]["name"], opened.bad_rows()
    facts = f"{escape(str(model))}: {summary.sentences:,} sentences, {summary.tokens:,} tokens"
    facts += f"; {bad:,} bad {'row is' if bad == 1 else 'rows are'} in its errors" if bad else ""
    if summary.left_out:
        facts += f"; {summary.left_out:,} sentences have attributions that are no numbers, and are left out"
    console.print(facts, highlight=False)
    console.print(_groups(summary))
    if not summary.rows(method, least=least):
        console.print(f"no row is in {least} or more sentences: --least 1 shows all", highlight=False)
        return
    for group in [one.name for one in summary.groups()] if summary.grouped else [...]:
        console.print(_table(summary, method, sort, least, top, group))
    console.print(f"[dim]{EVEN}[/dim]", highlight=False)
    if summary.grouped:
        others = "Contrast: × even in this group less × even in all other sentences."
        console.print(f"[dim]{others}[/dim]", highlight=False)
    console.print(f"[dim]{COVERS}[/dim]", highlight=False)


def _empty(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))


def _groups(summary: Summary) -> Table:
    """How much falls on special tokens, by group and method."""
    from rich.markup import escape

    table = _empty("share on special tokens, in %")
    table.add_column(escape(summary.by) if summary.grouped else "", no_wrap=True)
    for heading in ("sentences", "tokens each", *summary.methods):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in summary.groups():
        name = escape(_shown(group.name)) if summary.grouped else "all"
        shares = [_percent(group.on_special[method]) for method in summary.methods]
        table.add_row(name, f"{group.sentences:,}", f"{group.tokens:.1f}", *shares)
    return table


def _table(summary: Summary, method: str, sort: Any, least: int, top: int, group: Any) -> Table:
    """Special tokens, and the first of the others."""
    from rich.markup import escape

    sort = ("contrast" if summary.grouped else None) if sort is None else sort
    measure = sort if sort in ("mean", "ratio", "contrast") else "ratio"
    measure = "mean" if sort is None and summary.by == "token" else measure
    words = summary.rows(method, sort=sort, least=least, special=False, group=group)
    special = summary.rows(method, sort=sort, least=least, special=True, group=group)
    what = "positions" if summary.by == "position" else "tokens"
    title = f"{method}: {min(top, len(words)):,} of {len(words):,} {what} in {least} or more sentences"
    if group is not ...:
        title = f"{escape(summary.by)} {escape(_shown(group))}, {title}"
    table = _empty(title)
    table.add_column(what.removesuffix("s"), no_wrap=True)
    names = ["× even", "contrast"] if summary.grouped else ["mean", "even", "× even"]
    for heading in ("sentences", *names):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for rows, style in ((special, "dim"), (words[:top], "")):
        sizes = [abs(getattr(row, measure).value) for row in rows]
        largest = max((size for size in sizes if size == size), default=0.0)
        for row in rows:
            table.add_row(*_cells(row, measure, largest), style=style)
        if rows and style:
            table.add_section()
    return table


def _cells(row: Row, measure: str, largest: float) -> list[str]:
    from rich.markup import escape

    value = getattr(row, measure).value
    colour = "red" if value < 0 else "green"
    drawn = "" if value != value else f"[{colour}]{bar(abs(value), largest, 8)}[/{colour}]"
    means = [_estimate(row.mean), _number(row.even), _estimate(row.ratio)]
    if row.contrast is not None:  # which needs the room
        means = [_estimate(row.ratio), _estimate(row.contrast)]
    return [escape(_shown(row.name)), f"{row.sentences:,}", *means, drawn]


def _shown(name: Any) -> str:
    """A name without characters that would move the cursor."""
    text = "(none)" if name is None else str(name)
    text = "".join(letter if letter.isprintable() else "�" for letter in text) or "·"
    return text if len(text) <= 24 else f"{text[:23]}…"


def _number(value: float) -> str:
    return "–" if value != value else f"{value:.3f}" if abs(value) >= 0.1 else f"{value:.4f}"


def _estimate(found: Estimate) -> str:
    wide = found.high - found.value
    return _number(found.value) + (f" ± {_number(wide)}" if wide == wide else "")


def _percent(found: Estimate) -> str:
    wide = 100.0 * (found.high - found.value)
    return f"{100.0 * found.value:.1f}" + (f" ± {wide:.1f}" if wide == wide else "")


@corpus_app.command()
def show(
    folder: Annotated[Path, typer.Argument(help="Folder that overt corpus run wrote.", metavar="DIR")],
    by: Annotated[
        str, typer.Option(help="token, position, label, error, or the name of a column.")
    ] = "token",
    method: Annotated[
        str | None, typer.Option(help="Method whose table is printed. Default: rollout, or the first.")
    ] = None,
    layer: Annotated[int, typer.Option(help="Of several layers that the run kept; −1 is the last.")] = -1,
    label: Annotated[
        str | None, typer.Option(help="Column of labels, for --by label and error. Default: label.")
    ] = None,
    sort: Annotated[
        str | None, typer.Option(help="mean, ratio (× even), sentences, or contrast between groups.")
    ] = None,
    least: Annotated[int, typer.Option(help="Sentences that a row must have.", min=1)] = LEAST,
    top: Annotated[int, typer.Option(help="Rows to print and draw.", min=1)] = TOP,
    plot: Annotated[Path | None, typer.Option(help="Path of a figure: .png, .pdf or .svg.")] = None,
    out: Annotated[Path | None, typer.Option(help="Path of a page with examples: .html.")] = None,
    examples: Annotated[
        int, typer.Option(help="Sentences of the page that are drawn at random.", min=0)
    ] = EXAMPLES,
) -> None:
    """Show which tokens a model draws on over a corpus, with intervals over sentences."""
    show_corpus(
        folder,
        by,
        method=method,
        layer=layer,
        label=label,
        sort=sort,
        least=least,
        top=top,
        plot=plot,
        out=out,
        examples=examples,
    )
