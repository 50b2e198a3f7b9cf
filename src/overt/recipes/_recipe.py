"""What a recipe is made of: what it asks for, what it is given, what it hands back."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import _check
from overt._files import write_whole
from overt.recipes._runs import finished

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Option:
    """An option of one recipe's own: `--name value`.

    Attributes:
        help: what it sets, in a line.
        default: its value where it is not given; None leaves it to the recipe.
        least: whole numbers alone, of at least this; None for text.
        names: whether another value than the default is another result, with a file of its own.
        moves: whether it can move a number at all.
    """

    help: str
    default: int | str | None = None
    least: int | None = None
    names: bool = False
    moves: bool = True

    def read(self, name: str, text: str) -> int | str:
        """The value that a text on the command line means."""
        if self.least is None:
            return text
        value: int | str = int(text) if text.removeprefix("-").isdecimal() else text
        _check.whole(f"--{name}", value, self.least)
        return value


@dataclass(frozen=True)
class Request:
    """One run as it was asked for.

    Attributes:
        out: folder of the run: checkpoints, models, the numbers of each seed.
        data: folder with data sets, if one was named.
        model: pretrained model, if one was named: a folder, or a name on the hub.
        seeds: how many; they are 0, 1, ….
        device: "cpu", "cuda" or "auto".
        fresh: forget what is in `out`.
        options: the recipe's own options, by name.
        console: to show progress on.
    """

    out: Path
    data: Path | None
    model: str | None
    seeds: int
    device: str
    fresh: bool
    options: Mapping[str, Any]
    console: Console


@dataclass(frozen=True)
class Grid:
    """A table of a result, in words.

    Attributes:
        title: over it.
        columns: their headings, that of the rows' names left out.
        rows: name and cells of each.
    """

    title: str
    columns: list[str]
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class Outcome:
    """What a recipe measured.

    Attributes:
        config: everything that was set, and what the data are.
        per_seed: seed → numbers, in dicts and lists that have the same form for every seed.
        stand_in: whether the data were not the paper's, but what the package has to show that it runs.
    """

    config: dict[str, Any]
    per_seed: dict[int, dict[str, Any]]
    stand_in: bool = False

    @cached_property
    def mean(self) -> dict[str, Any]:
        """The mean of the seeds, in the form of each."""
        found: dict[str, Any] = over_seeds(list(self.per_seed.values()), mean)
        return found

    @cached_property
    def spread(self) -> dict[str, Any]:
        """Their standard deviation."""
        found: dict[str, Any] = over_seeds(list(self.per_seed.values()), spread)
        return found


@dataclass(frozen=True)
class Report:
    """An outcome in words.

    Attributes:
        grids: tables, published beside measured.
        notes: sentences that a reader of the tables must know.
    """

    grids: list[Grid]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Recipe:
    """An entry of the registry.

    Attributes:
        name: on the command line, and of the result file.
        title: of its part of RESULTS.md.
        paper: whose table or figure it is.
        published: the paper's numbers.
        run: measures.
        tell: puts what was measured into tables and notes. It reads nothing but the outcome, so that a
            stored result can be told anew.
        seeds: how many, where none are asked for.
        folder: under runs/; recipes that measure the same models share one.
        options: its own, by name.
    """

    name: str
    title: str
    paper: str
    published: dict[str, Any]
    run: Callable[[Request], Outcome]
    tell: Callable[[Outcome], Report]
    seeds: int
    folder: str
    options: dict[str, Option] = field(default_factory=dict)


def kept(folder: Path, settings: dict[str, Any], fresh: bool) -> dict[str, Any] | None:
    """The result of an earlier run, as `finished` finds it; one with other settings is not cleared away.

    A run may have taken hours, and a slip in an option is no reason to lose it: `fresh` says so.
    """
    try:
        before = json.loads((folder / "settings.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        before = None
    if isinstance(before, dict) and not fresh:
        for name, value in settings.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{folder} holds a run with {name} {str(before.get(name))[:60]}, asked for is "
                    f"{str(value)[:60]}: --fresh clears it away, another --out keeps it"
                )
    return finished(folder, settings, fresh)


def once(file: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Numbers that a file keeps; measured and written where there is no such file."""
    if not file.exists():
        write_whole(file, json.dumps(finite(measure()), indent=1))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def over_seeds(results: list[Any], combine: Callable[[list[float]], float | None]) -> Any:
    """Combine the numbers that stand at the same place in every result; None where not all are numbers."""
    first = results[0]
    if isinstance(first, dict):
        return {
            key: over_seeds([result.get(key) for result in results], combine)
            for key in first
            if all(isinstance(result, dict) for result in results)
        }
    if isinstance(first, list):
        if not all(isinstance(result, list) and len(result) == len(first) for result in results):
            return None
        return [over_seeds([result[place] for result in results], combine) for place in range(len(first))]
    if all(isinstance(result, int | float) and not isinstance(result, bool) for result in results):
        return combine([float(result) for result in results])
    return None


def mean(values: list[float]) -> float | None:
    """The mean of the values of all seeds."""
    return statistics.fmean(values)


def spread(values: list[float]) -> float | None:
    """Their standard deviation, of a sample; None of a single seed."""
    return statistics.stdev(values) if len(values) > 1 else None


def finite(value: Any) -> Any:
    """Numbers for JSON, which knows no NaN: None stands for it."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def cell(value: float | None, deviation: float | None = None, digits: int = 2) -> str:
    """A number in a table, with its deviation where there is one."""
    if value is None:
        return "–"
    text = f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # + 0.0 turns −0.0 into 0.0
    return text if deviation is None else f"{text}±{deviation:.{digits}f}"
