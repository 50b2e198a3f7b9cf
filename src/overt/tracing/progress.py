"""A progress bar and an estimate for long flows, and no output for short ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 3.0  # seconds; shorter runs show nothing
WORTH_ESTIMATING = 10**7  # cells × sources; less work finishes before an estimate would


@contextmanager
def watching(progress: bool | None, jobs: int) -> Iterator[Callable[..., Any]]:
    """A function that runs the solver on graphs, with a bar on standard error if it takes long.

    Args:
        progress: True or False; None shows a bar on a terminal where more than a few seconds are left.
        jobs: how many graphs will be solved.
    """
    shown = sys.stderr.isatty() if progress is None else progress
    if not shown:
        yield _solve
        return
    bar = _bar()
    task: Any = None
    solved, began = 0, False

    def run(levels: Any, sources: Any, real: Any, threads: int | None) -> Any:
        from overt.tracing.maxflow import compiled, estimate

        nonlocal task, solved, began
        if not began:
            began = True
            if not compiled():
                bar.console.print("attention flow: compiling, once (about 20 s)", style="dim")
            seconds = 0.0
            if levels[0].size * len(sources) * jobs > WORTH_ESTIMATING:
                seconds = jobs * estimate(levels[0], sources, threads)
            if seconds > PATIENCE:
                bar.console.print(f"attention flow: about {seconds:.0f} s (Ctrl-C stops it)", style="dim")
                bar.start()
                task = bar.add_task("attention flow", total=float(jobs))

        def report(done: int, total: int, left: float | None) -> None:
            del left
            if task is not None:
                bar.update(task, completed=solved + len(levels) * done / max(total, 1))

        flows = _solve(levels, sources, real, threads, report)
        solved += len(levels)
        return flows

    try:
        yield run
    finally:
        if task is not None:
            bar.stop()


def _solve(levels: Any, sources: Any, real: Any, threads: int | None, report: Any = None) -> Any:
    from overt.tracing.maxflow import solve_batch

    return solve_batch(levels, sources, real, threads=threads, report=report)


@contextmanager
def counting(words: str) -> Iterator[Callable[[int, int], None]]:
    """A function to report how much of a step is done; shows a bar on a terminal if the work is long.

    The number of steps is not known in advance, so each step has its own bar.

    Args:
        words: label of the bar.
    """
    if not sys.stderr.isatty():
        yield _silent
        return
    bar = _bar()
    task: Any = None
    steps, began = 0, time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal task, steps
        if task is None and time.monotonic() - began > PATIENCE:
            bar.start()
            task = bar.add_task(words, total=1.0)
        if task is not None:
            bar.update(task, completed=done / total, description=f"{words} ({steps + 1})")
        steps += done == total

    try:
        yield report
    finally:
        if task is not None:
            bar.stop()


def _silent(done: int, total: int) -> None:
    del done, total


def _bar() -> Any:
    """A progress bar on standard error that disappears when done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
