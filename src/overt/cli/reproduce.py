"""`overt reproduce`: measure a paper's table or figure again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overt.cli.app import app, resumable


@app.command(
    rich_help_panel="Measure again what a paper reports",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},  # a recipe's own options
)
def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="The recipe; without one, all are listed.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with data sets; else OVERT_DATA.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, from 0.", min=1)] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    model: Annotated[str | None, typer.Option(help="A pretrained model: a folder, or a hub name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run, runs/… by default.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of result files: results/, or the run's own for settings of your own."),
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Forget an earlier run in the folder and start over.")] = False,
    retell: Annotated[
        bool, typer.Option(help="Measure nothing: write the tables and notes of a stored result anew.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List recipes and their own options.")] = False,
) -> None:
    """Measure a table or figure of a paper again, and write it down beside the published numbers."""
    from overt.recipes import reproduce as recipes

    if name is None or listed:
        recipes.show_list()
        return
    if retell:
        recipes.retell(name, results, context.args)
        return
    with resumable(fresh):
        recipes.run(name, data, seeds, device, model, out, results, fresh, context.args)
