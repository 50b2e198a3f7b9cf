"""The `overt` command, one file per command."""

from overt.cli.shared import app, main

# In the order of `overt --help`.
# isort: off
from overt.cli import (
    demo,
    info,
    trace,
    translate,
    ask,
    caption,
    neighbours,
    plot,
    serve,
    corpus_run,
    corpus_show,
    judge,
    sentiment,
    drift,
    reproduce,
)
# isort: on

__all__ = [
    "app",
    "ask",
    "caption",
    "corpus_run",
    "corpus_show",
    "demo",
    "drift",
    "info",
    "judge",
    "main",
    "neighbours",
    "plot",
    "reproduce",
    "sentiment",
    "serve",
    "trace",
    "translate",
]
