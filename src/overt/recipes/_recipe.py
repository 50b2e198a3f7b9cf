"""The parts of a recipe: its options, the request for a run, and the outcome."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import _check

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Option:
    """An option of a single recipe: `--name value`, or `--name` alone for one whose default is False.

    Attributes:
        help: description in one line.
        default: default value; None leaves the choice to the recipe.
        least: least value, for options that are whole numbers; None for text.
        names: whether a value other than the default gives a separate result, with its own file.
        moves: whether it can affect any number.
    """

    help: str
    default: int | str | bool | None = None
    least: int | None = None
    names: bool = False
    moves: bool = True

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.default is False

    def read(self, name: str, text: str) -> int | str:
        """Parse a value from the command line."""
        if self.least is None:
            return text
        value: int | str = int(text) if text.removeprefix("-").isdecimal() else text
        _check.whole(f"--{name}", value, self.least)
        return value


WORKERS = Option("trainings side by side; by default 8 on a GPU and 1 on a CPU", least=1, moves=False)
DISCARD_MODELS = Option("keep the numbers of finished trainings, and not their models", False, moves=False)


@dataclass(frozen=True)
class Request:
    """The request for one run.

    Attributes:
        out: folder of the run: checkpoints, models, the numbers of each seed.
        data: folder with data sets, if given.
        model: pretrained model, if given: a folder, or a name on the hub.
        seeds: number of seeds; they are 0, 1, ….
        device: "cpu", "cuda" or "auto".
        fresh: whether to discard what is in `out`.
        options: options of the recipe, by name.
        console: console for progress.
        command: the command line, for the records of runs.
        stored: seed → numbers of an earlier result file, which a recipe may go on from.
        elsewhere: the same for the result files of recipes that measure the same models.
        kept: what earlier runs have kept beside the result file (`Outcome.kept`).
        lost: trainings that diverged in earlier commands, as the result file has them.
        seeds_given: whether the user gave the number of seeds; else it is the recipe's.
    """

    out: Path
    data: Path | None
    model: str | None
    seeds: int
    device: str
    fresh: bool
    options: Mapping[str, Any]
    console: Console
    command: str = ""
    stored: Mapping[int, dict[str, Any]] = field(default_factory=dict)
    elsewhere: Sequence[Mapping[int, dict[str, Any]]] = ()
    kept: Mapping[str, Any] = field(default_factory=dict)
    lost: Sequence[Mapping[str, Any]] = ()
    seeds_given: bool = False


@dataclass(frozen=True)
class Grid:
    """A table of a result, as text.

    Attributes:
        title: title of the table.
        columns: headings, without that of the row names.
        rows: name and cells of each row.
    """

    title: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Outcome:
    """The measurements of a recipe.

    Attributes:
        config: all settings, and a description of the data.
        per_seed: seed → numbers, in dicts and lists of the same structure for every seed.
        stand_in: whether the data were the package's own instead of the paper's.
        continued: whether some numbers come from an earlier result file, which this run goes on from.
        drops: whether that file has numbers with other settings, which are not among these.
        measured: whether anything was measured now, or read from a run's folder.
        kept: name → numbers that are too many for the result file, as plain JSON. Each has a compressed file
            beside it, so that other runs can go on from them.
        diverged: trainings of this command that came to a loss that is not finite, and have no numbers.
    """

    config: dict[str, Any]
    per_seed: dict[int, dict[str, Any]]
    stand_in: bool = False
    continued: bool = False
    drops: bool = False
    measured: bool = True
    kept: Mapping[str, Any] = field(default_factory=dict)
    diverged: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def mean(self) -> dict[str, Any]:
        """Mean over the seeds, in the structure of each."""
        return self._combine(mean)

    @cached_property
    def spread(self) -> dict[str, Any]:
        """Standard deviation over the seeds, in the structure of each."""
        return self._combine(spread)

    def _combine(self, combine: Callable[[list[float]], float | None]) -> dict[str, Any]:
        combined: dict[str, Any] = over_seeds(list(self.per_seed.values()), combine)
        return combined


@dataclass(frozen=True)
class Report:
    """An outcome as tables and notes.

    Attributes:
        grids: tables with published and measured numbers.
        notes: sentences that a reader of the tables needs to know.
    """

    grids: list[Grid]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Recipe:
    """An entry of the registry.

    Attributes:
        name: name on the command line and of the result file.
        title: title of its section in RESULTS.md.
        paper: the paper, and its table or figure.
        published: the paper's numbers.
        run: makes the measurements.
        report: turns measurements into tables and notes. It reads only the outcome, so that those of a stored
            result can be rewritten.
        seeds: default number of seeds.
        folder: default folder under runs/; recipes that measure the same models share one.
        options: options of this recipe, by name.
        draw: writes a figure of an outcome as SVG; None for tables.
        unmet: what must hold for an outcome to be relied on, and does not; the command then fails at its end.
    """

    name: str
    title: str
    paper: str
    published: dict[str, Any]
    run: Callable[[Request], Outcome]
    report: Callable[[Outcome], Report]
    seeds: int
    folder: str
    options: dict[str, Option] = field(default_factory=dict)
    draw: Callable[[Outcome, Path], None] | None = None
    unmet: Callable[[Outcome], list[str]] = lambda _: []


def over_seeds(results: list[Any], combine: Callable[[list[float]], float | None]) -> Any:
    """Combine the numbers at the same place in every result that has it; None where they are not numbers."""
    first = results[0]
    if isinstance(first, dict):
        if not all(isinstance(result, dict) for result in results):
            return {}
        keys = dict.fromkeys(key for result in results for key in result)
        return {
            key: over_seeds([result[key] for result in results if key in result], combine) for key in keys
        }
    if isinstance(first, list):
        if not all(isinstance(result, list) and len(result) == len(first) for result in results):
            return None
        return [over_seeds([result[place] for result in results], combine) for place in range(len(first))]
    if all(isinstance(result, int | float) and not isinstance(result, bool) for result in results):
        return combine([float(result) for result in results])
    return None


def mean(values: list[float]) -> float | None:
    """Mean of the values of all seeds."""
    return statistics.fmean(values)


def spread(values: list[float]) -> float | None:
    """Sample standard deviation of the values of all seeds; None for a single seed."""
    return statistics.stdev(values) if len(values) > 1 else None


def cell(value: float | None, deviation: float | None = None, digits: int = 2) -> str:
    """A number in a table, with its deviation if given."""
    if value is None:
        return "–"
    text = f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # + 0.0 turns −0.0 into 0.0
    return text if deviation is None else f"{text}±{deviation:.{digits}f}"


def rate_of(text: str | None) -> float | None:
    """The value of `--learning-rate`."""
    if text is None:
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise ValueError(f"--learning-rate must be a positive number, such as 0.8, got {text}")
    return rate


def counted(number: int, word: str) -> str:
    """A number with its noun, such as "1 epoch" and "2 epochs"."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"
