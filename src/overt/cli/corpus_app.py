"""The group of commands `overt corpus`."""

import typer

from overt.cli.shared import app

corpus_app = typer.Typer(
    help="Trace whole corpora, and read what the traces say.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(corpus_app, name="corpus", rich_help_panel="Read attention")
