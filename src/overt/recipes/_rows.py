"""Tables whose rows are trained networks: which rows and seeds are known, and the trainings of the others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from overt import _check
from overt._workers import Perform, Tell, cores, side_by_side
from overt.mechanisms.mechanism import Mechanism, as_dict
from overt.recipes._recipe import Outcome, Request, counted
from overt.recipes._runs import RESULT, earlier_result, finished, stored_numbers
from overt.recipes._training import DivergedError, is_main_process, progress_bar, wait_for_everyone

Numbers = dict[tuple[str, int], dict[str, Any]]
DIVERGED = "diverged"  # an error message, in place of a training's numbers


@dataclass(frozen=True)
class Task:
    """One training: a row with one seed.

    Attributes:
        name: of the row.
        seed: of initial weights, batches and dropout; of the noise where the training says so.
        row: network and mechanisms.
        training: settings of the training.
        folder: for model and numbers.
        device: "cpu" or "cuda".
        settings: everything that the numbers depend on.
        command: of the run.
    """

    name: str
    seed: int
    row: Any
    training: Any
    folder: Path
    device: str
    settings: dict[str, Any]
    command: str = ""


class Lost(NamedTuple):
    """A training that diverged.

    Attributes:
        row: its row.
        seed: its seed.
        updates: after how many its loss was not finite.
        settings: a hash of everything that it depended on.
    """

    row: str
    seed: int
    updates: int
    settings: str


def hash_of(settings: Mapping[str, Any]) -> str:
    """A short hash of a task's settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def or_diverged(perform: Perform[Task, Any], task: Task, shared: Any, tell: Tell) -> dict[str, Any]:
    """What `perform` returns; or, if the training diverged, how far it came and the message."""
    try:
        return perform(task, shared, tell)
    except DivergedError as error:
        return {DIVERGED: str(error), "updates": error.updates}


@dataclass
class Known:
    """What is known of the rows and seeds of a request, and what is not.

    Attributes:
        numbers: row and seed → numbers.
        tasks: the trainings that are missing.
        stored: how many numbers are from the earlier result file.
        shared: how many are from other recipes' result files.
        dropped: how many runs of the earlier result file have other settings, and are left out.
        diverged: trainings that came to a loss that is not finite; they have no numbers.
        lost: the same of earlier commands, which are not tried again by this one.
    """

    numbers: Numbers = field(default_factory=dict)
    tasks: list[Task] = field(default_factory=list)
    stored: int = 0
    shared: int = 0
    dropped: int = 0
    diverged: list[Lost] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether some numbers are, or will be, from no result file."""
        return len(self.numbers) + len(self.tasks) > self.stored + self.shared

    def fill(
        self, request: Request, shared: Any, perform: Perform[Task, Any], *, partly: bool = False, **how: Any
    ) -> None:
        """Say what is known, and train what is not.

        Args:
            request: of the run.
            shared: what all trainings need.
            perform: trains, measures and stores the numbers; a function of a module.
            partly: whether the other trainings are of use without one that diverges. By default, or if there
                are no others, that is an error, which ends them all.
            how: further arguments of `train_all`.
        """
        self._say(request)
        if not self.tasks:
            return
        by = partial(or_diverged, perform) if partly else perform
        found = train_all(self.tasks, shared, request, by, **how)
        messages = [numbers[DIVERGED] for numbers in found.values() if DIVERGED in numbers]
        self.numbers |= {key: numbers for key, numbers in found.items() if DIVERGED not in numbers}
        settings = {(task.name, task.seed): task.settings for task in self.tasks}
        self.diverged += [
            Lost(*key, numbers["updates"], hash_of(settings[key]))
            for key, numbers in found.items()
            if DIVERGED in numbers
        ]
        if messages and not self.numbers:
            raise ValueError(messages[0])

    def _say(self, request: Request) -> None:
        console, from_files = request.console, self.stored + self.shared
        if len(self.numbers) > from_files:
            finished = counted(len(self.numbers) - from_files, "training")
            console.print(f"[dim]already finished: {finished}[/dim]")
        if from_files:
            console.print(
                f"[dim]in result files, with their numbers alone: {counted(from_files, 'training')}; --fresh "
                "trains the rows that are asked for again, and makes their models[/dim]"
            )
        if self.dropped:
            console.print(
                f"[yellow]{self.dropped} runs of the stored result have other settings, and are left "
                "out[/yellow]"
            )

    def outcome(self, config: dict[str, Any], rows: Iterable[str], stand_in: bool) -> Outcome:
        """All numbers, for the result file."""
        numbers = self.numbers
        per_seed = {
            seed: {name: numbers[name, seed] for name in rows if (name, seed) in numbers}
            for seed in sorted({seed for _, seed in numbers})
        }
        config = {**config, "trained_on": sorted({entry["run"]["hardware"] for entry in numbers.values()})}
        now = [lost._asdict() for lost in self.diverged]
        if every := [*(lost._asdict() for lost in self.lost), *now]:
            config[DIVERGED] = every
        outcome = Outcome(config, per_seed, stand_in, self.stored > 0, self.dropped > 0, self.measured)
        return replace(outcome, diverged=now)


def rows_of(text: str | None, rows: Mapping[str, object], default: Sequence[str]) -> list[str]:
    """The rows that `--rows` names."""
    if text is None:
        return list(default)
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    for name in chosen:
        _check.one_of("--rows", name, tuple(rows))
    if not chosen:
        raise ValueError(f"--rows must name at least one of {', '.join(rows)}, got {text!r}")
    return chosen


def folder_name(row: str) -> str:
    """A row's name as that of a folder."""
    return row.replace("/", "").replace(",", "").replace(" ", "-").replace("×", "x")


def settings_of(mechanisms: Sequence[Mechanism]) -> list[dict[str, Any]]:
    """Mechanisms as plain JSON."""
    plain: list[dict[str, Any]] = json.loads(json.dumps([as_dict(mechanism) for mechanism in mechanisms]))
    return plain


def look_up(
    request: Request,
    rows: Mapping[str, Any],
    chosen: Sequence[str],
    place: Path,
    common: Mapping[str, Any],
    training: Any,
    device: str,
    seeds: Mapping[str, int] | None = None,
) -> Known:
    """Find the numbers of rows and seeds in result files and folders; the others are to be trained.

    Args:
        request: of the run.
        rows: all rows of the table; each has `settings()`.
        chosen: those that are asked for.
        place: folder of the runs.
        common: settings that all rows share.
        training: settings of the training, or a function of the row that gives them.
        device: "cpu" or "cuda".
        seeds: rows whose number of seeds is not the request's.
    """
    known = Known()
    for name, row in rows.items():
        count = (seeds or {}).get(name, request.seeds)
        for seed in sorted({*request.stored, *range(count)}):
            settings = {**common, "row": row.settings(), "seed": seed}
            wanted = name in chosen and seed < count
            folder = place / folder_name(name) / f"seed-{seed}"
            numbers = None
            if not (request.fresh and wanted):
                numbers = stored_numbers(request.stored, name, seed, settings)
            known.stored += numbers is not None
            if numbers is None and wanted and not request.fresh and finished(folder, settings) is None:
                found = (stored_numbers(each, name, seed, settings) for each in request.elsewhere)
                numbers = next(filter(None, found), None)
                known.shared += numbers is not None
            if numbers is not None:
                known.numbers[name, seed] = numbers
                continue
            known.dropped += name in request.stored.get(seed, {}) and not wanted
            if wanted:
                result = _prepared(folder, settings, request.fresh)
                if result is None:
                    plan = training(row) if callable(training) else training
                    task = Task(name, seed, row, plan, folder, device, settings, request.command)
                    known.tasks.append(task)
                else:
                    known.numbers[name, seed] = result
    tried = {(task.name, task.seed) for task in known.tasks}
    for lost in losses_of(request):
        if lost.row in rows and (lost.row, lost.seed) not in {*known.numbers, *tried}:
            settings = {**common, "row": rows[lost.row].settings(), "seed": lost.seed}
            known.lost += [lost] if hash_of(settings) == lost.settings else []
    return known


def losses_of(request: Request) -> list[Lost]:
    """The trainings that diverged in earlier commands, with whatever settings."""
    return [Lost(**each) for each in request.lost if each.keys() == set(Lost._fields)]


def _prepared(folder: Path, settings: dict[str, Any], fresh: bool) -> dict[str, Any] | None:
    """As `earlier_result`, with the first of several processes ahead of the others."""
    if is_main_process():
        result = earlier_result(folder, settings, fresh)
        wait_for_everyone()
        return result
    wait_for_everyone()
    return earlier_result(folder, settings, fresh=False)


def train_all(
    tasks: list[Task],
    shared: Any,
    request: Request,
    perform: Perform[Task, Any],
    *,
    milliseconds: Callable[[Task], float],
    line: Callable[[dict[str, Any]], str],
    prepare: Callable[[], None],
    together: bool,
    alike: Callable[[Task], Hashable] = lambda task: task.name,
    rest: Callable[[Task], float] = lambda _task: 0.0,
    tells_rest: bool = False,
) -> Numbers:
    """Perform tasks, several at a time (`--workers`); says how long it will take.

    Args:
        tasks: what to train, at least one.
        shared: what all trainings need.
        request: of the run.
        perform: trains, measures and stores the numbers; a function of a module.
        milliseconds: of a task's update, for the estimate.
        line: what to say of the numbers of a finished training.
        prepare: called once in each process, a function of a module.
        together: whether several processes train one model, which then are the only ones.
        alike: a task → what decides about the time of its updates, which is measured once for each.
        rest: a task → how many updates take as long as all that follows its own, for the estimate.
        tells_rest: whether `perform` also tells that many steps, rounded, as it gets on with what follows,
            and those updates that early stopping saved.
    """
    console, device = request.console, tasks[0].device
    workers = request.options["workers"] or (min(8, cores()) if device == "cuda" else 1)
    workers = min(workers, len(tasks))
    times = {key: milliseconds(task) for key, task in {alike(task): task for task in tasks}.items()}
    updates = [task.training.updates for task in tasks]
    each = [(task.training.updates + rest(task)) * times[alike(task)] for task in tasks]
    # Small networks leave a GPU idle most of the time, so that several trainings hardly slow each other down.
    minutes = (1.3 * max(sum(each) / workers, *each) if device == "cuda" else sum(each)) / 60_000
    # One training alone was timed: several at once may fill the GPU.
    unsure = ", and longer if that fills the GPU" if device == "cuda" and workers > 1 else ""
    console.print(
        f"{len(tasks)} training{'s' if len(tasks) > 1 else ''} of up to {max(updates):,} updates, "
        f"{workers} at a time: {duration(minutes)} at up to {max(times.values()):.0f} ms an update{unsure}"
    )
    tasks = sorted(tasks, key=lambda task: task.seed)
    numbers: Numbers = {}
    steps = sum(updates) + (sum(round(rest(task)) for task in tasks) if tells_rest else 0)
    with progress_bar(console) as progress:
        bar = progress.add_task("training and measuring" if tells_rest else "training", total=steps)

        def tell(steps: int) -> None:
            progress.update(bar, advance=steps)

        for task, result in _perform_all(tasks, shared, perform, workers, prepare, tell, together):
            numbers[task.name, task.seed] = result
            lost = DIVERGED in result
            told = f"diverged after {result['updates']:,} updates" if lost else line(result)
            text = f"{task.name}, seed {task.seed}: {told}"
            # By early stopping, or as it diverged.
            saved = 0 if tells_rest else task.training.updates - result["updates"]
            progress.update(bar, description=text, advance=saved)
            if not console.is_terminal:  # a log has no bar
                console.print(f"{text}, {len(numbers)} of {len(tasks)}")
    return numbers


def _perform_all(
    tasks: list[Task],
    shared: Any,
    perform: Perform[Task, Any],
    workers: int,
    prepare: Callable[[], None],
    tell: Tell,
    together: bool,
) -> Iterable[tuple[Task, dict[str, Any]]]:
    """Perform tasks in this process or in several; yield each as it finishes."""
    if workers == 1 or together:
        for task in tasks:
            yield task, perform(task, shared, tell)
    else:
        yield from side_by_side(tasks, perform, shared, workers, prepare, tell)


def duration(minutes: float) -> str:
    """An estimate in words: in hours from two on, and in days from three on."""
    whole, hours = round(minutes), round(minutes / 60)
    if whole < 2:
        return "a minute or less"
    if whole < 120:
        return f"about {whole} minutes"
    return f"about {hours} hours" if hours < 72 else f"about {round(minutes / 1440)} days"


def stored_result(folder: Path) -> dict[str, Any]:
    """The numbers of a finished run, once all its processes are there."""
    wait_for_everyone()
    stored: dict[str, Any] = json.loads((folder / RESULT).read_text())
    return stored
