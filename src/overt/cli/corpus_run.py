"""Trace each text of a corpus, and write what its main token draws on as Parquet files."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from overt.cli.corpus_app import corpus_app
from overt.cli.shared import join_or, resumable
from overt.corpus import plan, running
from overt.tracing.methods.method import methods as known_methods

EVERY = 30.0  # seconds between two lines of progress, where there is no terminal


class Shown:
    """Progress over the whole corpus, on standard error: a bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.task: Any = None
        self.total = self.first = self.done = 0
        self.moving = False
        self.began = self.said = time.monotonic()

    def begin(self, total: int, done: int) -> None:
        """Start counting."""
        self.total, self.first, self.done = total, done, done
        self.began = self.said = time.monotonic()
        if done:
            typer.secho(f"{done:,} of {total:,} rows are complete already", err=True)
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("rows, {task.fields[rate]}"))
            self.bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task("", total=total, completed=done, rate="")
            self.bar.start()

    def advance(self, rows: int) -> None:
        """Count rows."""
        if not rows:
            return
        now = time.monotonic()
        self.done += rows
        if not self.moving:  # until now, processes started and loaded the model
            self.moving, self.began, self.first = True, now, self.done
        rate = (self.done - self.first) / max(now - self.began, 1e-9)
        if self.bar is not None:
            self.bar.update(self.task, completed=self.done, rate=f"{rate:.0f} a second")
        elif now - self.said > EVERY and rate:
            self.said = now
            left = (self.total - self.done) / max(rate, 1e-9)
            minutes = f"{left / 60:.0f} minutes" if left > 90 else f"{left:.0f} s"
            typer.echo(f"{self.done:,} of {self.total:,} rows, {rate:.0f} a second, {minutes} left", err=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.stop()


def names(given: str) -> list[str]:
    """Names between commas."""
    return [name.strip() for name in given.split(",") if name.strip()]


def queries_of(given: str | None) -> Any:
    """ "cls", "last", a number or None."""
    try:
        return given if given is None else int(given)
    except ValueError:
        return given


def layers_of(given: str) -> int | list[int] | None:
    """A layer, several between commas, or "all"."""
    if given == "all":
        return None
    try:
        listed = [int(name) for name in names(given)]
    except ValueError:
        raise ValueError(f'--layers must be numbers between commas, or "all", got {given}') from None
    return listed[0] if len(listed) == 1 else listed


@corpus_app.command()
def run(
    input: Annotated[
        str,
        typer.Argument(
            help="File (.txt, a row is a line; .jsonl, .csv, .tsv, .parquet), folder of such files, folder "
            "that datasets saved, or data set on the hub, as NAME:SPLIT or NAME:CONFIG:SPLIT."
        ),
    ],
    model: Annotated[str, typer.Option(help="Folder of a model, or a name on the hub.")],
    out: Annotated[Path, typer.Option(help="Folder to write. With an interrupted run in it, that goes on.")],
    methods: Annotated[
        str, typer.Option(help=f"Methods between commas: {join_or(known_methods('maps'))}.")
    ] = "raw,rollout,flow",
    queries: Annotated[
        str | None,
        typer.Option(
            help="Whose row: cls, last or a number. Default: CLS, the last token of language models."
        ),
    ] = None,
    layers: Annotated[
        str, typer.Option(help="Layers between commas, from 0 or, negative, from the top; or all.")
    ] = "-1",
    text: Annotated[str, typer.Option(help="Column of the texts.")] = "text",
    columns: Annotated[
        str | None, typer.Option(help="Columns to carry along, between commas. Default: all.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Texts that the model reads at once.", min=1)] = plan.BATCH,
    shard: Annotated[int, typer.Option(help="Rows of a file.", min=1)] = plan.SHARD,
    length: Annotated[
        int | None, typer.Option(help="Most tokens of a text. Default: as the model takes.", min=1)
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of the weights. Default: as saved.")] = None,
    engine: Annotated[
        str, typer.Option(help="local: processes; ray: the cluster of RAY_ADDRESS, or a local Ray.")
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(help="Processes, with one thread each. Default: one per core.", min=1)
    ] = None,
) -> None:
    """Trace each text of a corpus, and write what its main token draws on as Parquet files."""
    shown = Shown()
    with resumable():
        try:
            finished = running.run(
                input,
                model,
                out,
                methods=names(methods),
                queries=queries_of(queries),
                layers=layers_of(layers),
                text=text,
                columns=None if columns is None else names(columns),
                batch=batch,
                shard=shard,
                length=length,
                device=device,
                dtype=dtype,
                engine=engine,
                workers=workers,
                progress=shown,
            )
        finally:
            shown.stop()
    rate = finished.traced / max(finished.seconds, 1e-9)
    line = f"{finished.rows:,} rows in {out}"
    if finished.traced:
        line += f"; {finished.traced:,} traced in {finished.seconds:.0f} s, {rate:.1f} a second"
    if finished.errors:
        line += f"; {finished.errors:,} could not be traced, see {out / 'errors'}"
    typer.echo(line)
