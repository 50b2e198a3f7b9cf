"""What the recipes of language understanding share: data, settings, forms × tasks, and the runs side by side.

For a model and task that Wang et al. 2021 or Fan et al. 2020 name, settings are theirs, and all training rows
are trained on. For any other, a tenth of the training rows is held out, the same for all; it chooses the
learning rate, for plain attention alone, and all forms use that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import overt
from overt import _check
from overt._extras import need
from overt._files import write_tensors, write_whole
from overt._workers import Tell, Throttled
from overt.data import glue, squad
from overt.data.batching import Epochs
from overt.data.files import data_folder
from overt.data.glue import Splits
from overt.data.squad import Questions
from overt.judge.understanding import EXTRA, Score, score
from overt.recipes import squad_runs, text_training
from overt.recipes._recipe import DISCARD_MODELS, WORKERS, Option, Outcome, Request, cell
from overt.recipes._rows import Known, Numbers, Task, folder_name, look_up, stored_result
from overt.recipes._runs import (
    RESULT,
    check_plain,
    check_weights,
    finish_run,
    load_tokenizer,
    processes_of,
    run_record,
)
from overt.recipes._training import (
    be_quiet,
    hardware,
    is_main_process,
    one_thread,
    precision_of_products,
    processes,
    torch_device,
    versions,
)
from overt.recipes.text_training import Texts, TextTraining, encode, load_model
from overt.recipes.understanding_forms import PLAIN, TextRow, check_kept, forms, knobs, row_name
from overt.recipes.understanding_submission import check as check_submission
from overt.recipes.understanding_submission import write_all
from overt.recipes.understanding_tables import ALBERT, BAM_TUNED, TUNED, known_model, published_as

HELD_OUT = "held out"
HELD_OUT_SHARE = 0.1
RATES = (2e-5, 5e-5, 1e-4, 2e-4)
RATE_SEEDS = 2
BATCH, LONGEST, WARMUP = 32, 128, 0.06
# Epochs of models that have no published settings; 5 of the other tasks. SQuAD's are about those of Table 9.
EPOCHS = {"SST-2": 1, "SQuAD 1.1": 2, "SQuAD 2.0": 3}
SQUAD = "SQuAD"  # stands for both versions in --tasks
PREDICTIONS = "predictions.safetensors"
ANSWERS = "answers.json"  # question → answer, as SQuAD's own scripts take them
BAM_SCORE = "bam_score"  # in the metrics that Fan et al. 2020 are taken to have used
BAM_METRICS = {"MRPC": "accuracy", "QQP": "accuracy"}  # GLUE's first metric is F1
OPTIONS = {
    "tasks": Option("tasks, separated by commas; by default those of the table", moves=False),
    "forms": Option("forms of attention, separated by commas; by default those of the table", moves=False),
    "epochs": Option(
        "epochs of each training; by default those of the paper, or 5 (SST-2 1, SQuAD 1.1 2, SQuAD 2.0 3)",
        least=1,
    ),
    "workers": WORKERS,
    "discard-models": DISCARD_MODELS,
}


class Measure(Protocol):
    """Measures a trained model; a function of a module, since other processes import it."""

    __name__: str

    def __call__(self, model: Any, texts: Texts, tokenizer: Any, row: TextRow, seed: int) -> Measured:
        """Numbers of a model, and predictions to keep, by name."""


Measured = tuple[dict[str, Any], dict[str, Tensor]]


class Parts(NamedTuple):
    """What a task is measured on beside its own parts.

    Attributes:
        rows: name → rows.
        subsets: name → one of the task's own parts, and the places of some of its rows.
        missing: name → why it is not there.
    """

    rows: Mapping[str, list[glue.Row]] = {}
    subsets: Mapping[str, tuple[str, list[int]]] = {}
    missing: Mapping[str, str] = {}

    def digest(self, sha256: str) -> str:
        """The hash of a task's data together with these."""
        if not self.rows and not self.subsets:
            return sha256
        return hashlib.sha256(json.dumps([sha256, self.rows, self.subsets]).encode()).hexdigest()


More = Callable[[Request, str, Splits], Parts]
Passes = Callable[[TextRow, Texts], int]
Data = Splits | Questions


class Case(NamedTuple):
    """A task's data, and what its settings depend on.

    Attributes:
        data: rows or questions.
        published: the model whose published settings are used; None if the learning rate is chosen here.
        share: of the training rows that is held out.
        more: what it is measured on beside its own parts.
    """

    data: Data
    published: str | None
    share: float
    more: Parts


class Loaded(NamedTuple):
    """The tasks of a request.

    Attributes:
        data: task → its rows or questions, in the order of the table.
        asked: the tasks that are asked for; the others are in the earlier result file.
        stored: all tasks that are in that file alone, also those that are not there any more.
        most: tokens that the model takes with a head for questions; 0 if there are no questions.
        new: weights that the model lacks for questions.
    """

    data: Mapping[str, Data]
    asked: Sequence[str]
    stored: Sequence[str]
    most: int
    new: list[str]


class Shared(NamedTuple):
    """What all tasks need.

    Attributes:
        path: of the pretrained model.
        tokenizer: of the model.
        texts: task → its rows as the model takes them.
        keep_models: whether to store fine-tuned models.
        measure: what to measure of each of them beside its scores.
        most: tokens that the model takes with a head for questions.
    """

    path: str
    tokenizer: Any
    texts: Mapping[str, Texts]
    keep_models: bool
    measure: Measure | None = None
    most: int = 0


class Plans(NamedTuple):
    """The runs of a request before they are trained.

    Attributes:
        rows: by name.
        splits: of GLUE's tasks.
        asked: the tasks that are asked for; the others are in the earlier result file.
        tokenizer: of the model.
        place: folder of the runs.
    """

    rows: Mapping[str, TextRow]
    splits: Mapping[str, Splits]
    asked: Sequence[str]
    tokenizer: Any
    place: Path

    def folder(self, row: str, seed: int) -> Path:
        """Of one run."""
        return self.place / folder_name(row) / f"seed-{seed}"


def listed(option: str, text: str | None, known: Sequence[str], default: Sequence[str]) -> list[str]:
    """The names that an option lists."""
    if text is None:
        return list(default)
    chosen = [part.strip() for part in text.split(",") if part.strip()]
    for name in chosen:
        _check.one_of(option, name, tuple(known))
    if not chosen:
        raise ValueError(f"{option} must name at least one of {', '.join(known)}, got {text!r}")
    return list(dict.fromkeys(chosen))


def model_name(path: str) -> str:
    """A pretrained model's name in results; of a folder, its last part and the hash of its config."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return path
    digest = hashlib.sha256(config.read_bytes()).hexdigest()
    return f"{Path(path).resolve().name} ({digest[:12]})"


def tasks_of(text: str | None, tasks: Sequence[str], also: Sequence[str]) -> list[str]:
    """The tasks that `--tasks` names; SQuAD is both of its versions."""
    chosen = listed("--tasks", text, [*dict.fromkeys([*tasks, *also])], tasks)
    versions = [f"{SQUAD} {version}" for version in squad.HUB]
    each = [versions if name == SQUAD else [name] for name in chosen]
    return list(dict.fromkeys(name for names in each for name in names))


def load_tasks(request: Request, chosen: Sequence[str], order: Sequence[str], tokenizer: Any) -> Loaded:
    """The chosen tasks, and those that the earlier result file keeps, in the order of the table."""
    named = request.options["tasks"] is not None
    asked, most, new = load_available(request, chosen, tokenizer, named)
    if not asked:
        raise FileNotFoundError(
            f"none of the tasks {', '.join(chosen)} is there: give a folder with their files as --data"
        )
    stored = [task for task in in_stored(request, "task") if task in order and task not in asked]
    kept, kept_most, kept_new = load_available(request, stored, tokenizer, named=False)
    both = {**asked, **kept}
    data = {task: both[task] for task in order if task in both}
    return Loaded(data, list(asked), stored, most or kept_most, new or kept_new)


def load_available(
    request: Request, tasks: Sequence[str], tokenizer: Any, named: bool
) -> tuple[dict[str, Data], int, list[str]]:
    """The tasks that are there, and `most` and `new` of `Loaded`; the other tasks are listed.

    SQuAD is also listed where the model cannot answer questions, which is an error if `--tasks` has named it.
    """
    labelled, missing = glue.load_available(request.data, [task for task in tasks if task in glue.TASKS])
    asked, absent = squad.load_available(request.data, [task for task in tasks if task in squad.NAMES])
    missing |= absent
    most, new = 0, list[str]()
    if asked:
        assert request.model is not None
        try:
            most, new = squad_runs.most_tokens(request.model, tokenizer)
        except ValueError as error:
            if named:
                raise
            missing |= dict.fromkeys(asked, str(error))
            asked = {}
    for task, reason in missing.items():
        leave_out(request, task, reason)
    return {**labelled, **asked}, most, new


def in_stored(request: Request, key: str) -> list[str]:
    """The tasks or forms of the earlier result file, which are kept where they are not asked for.

    Also those of which it has nothing but that their trainings diverged.
    """
    entries = [numbers for rows in request.stored.values() for numbers in rows.values()]
    rows = [entry.get("run", {}).get("settings", {}).get("row", {}) for entry in entries]
    lost = {each["row"] for each in request.lost}
    every = [(form, task) for form in forms() for task in (*glue.TASKS, *squad.NAMES)]
    rows += [{"form": form, "task": task} for form, task in every if row_name(form, task) in lost]
    return list(dict.fromkeys(row[key] for row in rows if key in row))


def pretrained(request: Request) -> str:
    """The pretrained model that a request names."""
    if request.model is None:
        raise ValueError(
            "this recipe fine-tunes a pretrained model: give --model, a folder or a name on the hub"
        )
    check_plain(request.model)
    return request.model


def leave_out(request: Request, what: str, reason: str) -> None:
    """Say that something is not measured."""
    reason = reason.removeprefix(f"{what}: ")
    request.console.print(f"{what} is left out: {reason}", style="yellow", markup=False, highlight=False)


def run_forms(
    request: Request,
    tasks: Sequence[str],
    default: Sequence[str],
    *,
    also: Sequence[str] = (),
    measure: Measure | None = None,
    more: More = lambda _request, _task, _splits: Parts(),
    passes: Passes = lambda _row, _texts: 0,
    seeds: Callable[[str, str, int], int] = lambda _form, _task, seeds: seeds,
    finish: Callable[[Numbers, Shared, Path], None] = lambda _numbers, _shared, _place: None,
    needed: Callable[[Plans], Sequence[str]] | None = None,
) -> Outcome:
    """Train the forms, tasks and seeds that neither a folder of a run nor a result file holds.

    A result file keeps the tasks and forms that are not asked for this time.

    Args:
        request: of the run.
        tasks: of the table.
        default: forms of the table.
        also: further tasks that can be asked for.
        measure: what to measure of each trained model beside its scores; a function of a module. It takes
            the forms of the table alone.
        more: request, task and its rows → further parts that it is measured on.
        passes: how many rows a model's measures take through it, for the estimate of the time.
        seeds: form, task and the number of seeds that is asked for → its number of seeds.
        finish: called with all numbers and the folder of the runs, to add what several runs give together.
        needed: called once learning rates are known, for the names of the rows whose models are needed:
            these alone are trained, and numbers in result files do not do. Models that several processes
            trained will do.
    """
    need("accelerate", EXTRA)
    need("sklearn", EXTRA)
    path = pretrained(request)
    be_quiet()
    options = request.options
    chosen = listed("--forms", options["forms"], list(forms() if measure is None else default), default)
    chosen_tasks = tasks_of(options["tasks"], tasks, also)
    tokenizer = load_tokenizer(path)
    loaded = load_tasks(request, chosen_tasks, [*tasks, *also], tokenizer)
    if options.get("submission"):
        asked = {task: loaded.data[task] for task in loaded.asked}
        check_submission(request, {task: each for task, each in asked.items() if isinstance(each, Splits)})
    cases = {
        task: case_of(request, task, data, more, measured=measure is not None)
        for task, data in loaded.data.items()
    }
    shared = shared_of(request, cases, tokenizer, loaded.most, measure)
    check_attachable(shared, chosen)
    check_weights(request.out, path, request.fresh)
    kept = [form for form in in_stored(request, "form") if form in forms()]
    every = list(dict.fromkeys([*default, *chosen, *kept]))
    place = request.out / Path(path).resolve().name
    count = processes(request.device)
    if needed is not None:
        runs = [place / folder_name(row_name(form, task)) for form in every for task in cases]
        count = processes_of(run / f"seed-{seed}" for run in runs for seed in range(request.seeds))
    precision = precision_of_products(request.device)
    common: dict[str, Any] = {"precision": precision, **({"processes": count} if count > 1 else {})}
    fill = partial(fill_rows, shared=shared, passes=passes)
    rates, chosen_by = choose_rates(
        request, cases, loaded.asked, shared, partial(fill, place=place, common=common)
    )
    rows = {
        row_name(form, task): plan_row(request, cases[task], shared, form, task, rate)
        for form in every
        for task, rate in rates.items()
    }
    counts = {
        row_name(form, task): seeds(form, task, request.seeds) for form in chosen for task in loaded.asked
    }
    if measure is not None:
        place, common = place / measure.__name__, {**common, "measured": measure.__name__}
    labelled = {
        task: data for task, data in loaded.data.items() if task in rates and isinstance(data, Splits)
    }
    if needed is not None:
        plans = Plans(rows, labelled, loaded.asked, tokenizer, place)
        counts = dict.fromkeys(needed(plans), request.seeds)
        check_all_kept(plans, counts)
        request = replace(request, stored={}, elsewhere=())
    # Models that are needed later must all be there.
    partly = needed is None and not options.get("submission")
    known = fill(request, rows, counts, place=place, common=common, partly=partly)
    finish(known.numbers, shared, place)
    if options.get("submission") and is_main_process():
        written = [rows[name] for name in counts if rows[name].task in labelled]
        write_all(request, written, labelled, tokenizer, known.numbers, place)
    # A task of the earlier result file may have no numbers with these settings.
    shown = set(rates) if needed is not None else {rows[name].task for name, _ in known.numbers}
    cases = {task: case for task, case in cases.items() if task in shown}
    known.numbers |= chosen_by.numbers
    known.stored, known.shared = known.stored + chosen_by.stored, known.shared + chosen_by.shared
    known.dropped += chosen_by.dropped + sum(task not in shown for task in loaded.stored)
    config = describe(path, cases, rates, data_folder(request.data)) | {
        "forms": every,
        "rows": {name: row.settings() for name, row in rows.items() if row.task in cases},
        "head": new_weights(path, cases, loaded.new),
    }
    names = [*rows, *dict.fromkeys(name for name, _ in chosen_by.numbers)]
    return known.outcome(config, names, stand_in=False)


def fill_rows(
    request: Request,
    rows: Mapping[str, TextRow],
    counts: Mapping[str, int],
    *,
    place: Path,
    common: Mapping[str, Any],
    shared: Shared,
    passes: Passes,
    partly: bool = False,
) -> Known:
    """Look rows up, and train those that are asked for and nowhere to be found.

    Args:
        request: of the run.
        rows: by name.
        counts: row that is asked for → number of seeds.
        place: folder of the runs.
        common: settings that all runs share.
        shared: what all tasks need.
        passes: as for `run_forms`.
        partly: as for `Known.fill`.
    """
    device = torch_device(request.device).type

    def rest(task: Task) -> float:
        """A pass is a third of an update; a GPU takes many rows in the time of a batch."""
        tested = 0 if task.row.choosing else passes(task.row, shared.texts[task.row.task])
        return tested / (3 * (text_training.ROWS if device == "cuda" else task.training.batch))

    known = look_up(request, rows, list(counts), place, common, lambda row: row.training, device, counts)
    known.fill(
        request,
        shared,
        perform,
        milliseconds=lambda task: step_ms(task, shared),
        line=lambda numbers: cell(numbers["score"]),
        prepare=one_thread,
        together=processes(request.device) > 1,
        alike=lambda task: (task.row.task, bool(task.row.mechanisms)),
        rest=rest,
        partly=partly,
    )
    return known


def choose_rates(
    request: Request,
    cases: Mapping[str, Case],
    asked: Sequence[str],
    shared: Shared,
    fill: Callable[[Request, Mapping[str, TextRow], Mapping[str, int]], Known],
) -> tuple[dict[str, float], Known]:
    """The learning rate of each task, as published or the best on held-out rows, and what chose the latter.

    A task that is not asked for is left out if the trials in the earlier result file have other settings.
    """
    trials = {
        task: {rate: plan_row(request, case, shared, PLAIN, task, rate, choosing=True) for rate in RATES}
        for task, case in cases.items()
        if case.published is None
    }
    rows = {row.name: row for each in trials.values() for row in each.values()}
    known = fill(request, rows, {name: RATE_SEEDS for name, row in rows.items() if row.task in asked})
    trained = {name for name, _ in known.numbers}
    rates = {}
    for task, case in cases.items():
        if case.published is not None:
            rates[task] = published_training(case.published, task, 1).learning_rate
        elif not {row.name for row in trials[task].values()} <= trained:
            leave_out(request, task, "its stored learning rates have other settings")
        else:
            scores = {rate: mean_score(known, row.name) for rate, row in trials[task].items()}
            rates[task] = max(scores, key=lambda rate: scores[rate])
            told = ", ".join(f"{rate:g}: {value:.2f}" for rate, value in scores.items())
            request.console.print(f"{task}: learning rate {rates[task]:g} (held-out rows, plain: {told})")
    return rates, known


def describe(
    path: str, cases: Mapping[str, Case], rates: Mapping[str, float], folder: Path | None
) -> dict[str, Any]:
    """Model, data and what was chosen, for the result file; it names the folder of data as DIR."""
    data = {task: case.data.describe() for task, case in cases.items()}
    for each in data.values():
        if folder is not None and Path(each["source"]).is_relative_to(folder):
            each["source"] = str("DIR" / Path(each["source"]).relative_to(folder))
    return {
        "model": model_name(path),
        "published_settings": next((case.published for case in cases.values() if case.published), None),
        "chosen_rates": [task for task, case in cases.items() if case.published is None],
        "held_out": max(case.share for case in cases.values()),
        "data": data,
        "missing": {
            f"{task}, {part}": why for task, case in cases.items() for part, why in case.more.missing.items()
        },
        "rates": {task: rates[task] for task in cases},
    }


def check_all_kept(plans: Plans, counts: Mapping[str, int]) -> None:
    """Refuse finished runs without their models before others are trained."""
    for name, seeds in counts.items():
        for seed in range(seeds):
            folder = plans.folder(name, seed)
            if (folder / RESULT).is_file():
                check_kept(plans.rows[name], folder, "reading maps")


def check_attachable(shared: Shared, chosen: Sequence[str]) -> None:
    """Refuse a model that a form cannot be attached to before learning rates are chosen with plain attention.

    Args:
        shared: with the model.
        chosen: forms.
    """
    model, _ = load_model(shared.path, next(iter(shared.texts.values())).head, 0)
    for form in chosen:
        if mechanisms := forms()[form]:
            overt.attach(model, *mechanisms)
            overt.detach(model)


def published_training(model: str, task: str, rows: int) -> TextTraining:
    """The settings that a paper names for a model and a task, with a number of training rows."""
    if model in TUNED:
        tuned = TUNED[model][task]
        updates = tuned.epochs * max(1, rows // tuned.batch)
        return TextTraining(updates, tuned.batch, tuned.learning_rate, round(WARMUP * updates), LONGEST)
    bam = BAM_TUNED[task]
    return TextTraining(bam.steps, bam.batch, bam.learning_rate, bam.warmup, bam.longest, bam.dropout)


def published_for(model: str, task: str) -> str | None:
    """The published model whose settings on a task are known; None if there are none."""
    name = known_model(model)
    return name if task in (BAM_TUNED if name == ALBERT else TUNED.get(name or "", {})) else None


def longest_of(published: str | None, task: str) -> int:
    """Tokens of the longest text, or of a window of a longer one."""
    if published is not None:
        return published_training(published, task, 1).longest
    return BAM_TUNED[published_as(task)].longest if task in squad.NAMES else LONGEST


def case_of(request: Request, task: str, data: Data, more: More, measured: bool) -> Case:
    """A task with its settings; where models are measured further, rows are held out for that."""
    assert request.model is not None
    published = published_for(request.model, task)
    share = HELD_OUT_SHARE if measured or published is None else 0.0
    return Case(data, published, share, more(request, task, data) if isinstance(data, Splits) else Parts())


def shared_of(
    request: Request, cases: Mapping[str, Case], tokenizer: Any, most: int, measure: Measure | None
) -> Shared:
    """The rows of all tasks as the model takes them."""
    assert request.model is not None
    texts = {task: texts_of(task, case, tokenizer, most) for task, case in cases.items()}
    return Shared(request.model, tokenizer, texts, not request.options["discard-models"], measure, most)


def texts_of(task: str, case: Case, tokenizer: Any, most: int) -> Texts:
    """The rows of a task as the model takes them."""
    data, _, share, more = case
    longest = longest_of(case.published, task)
    if isinstance(data, Questions):
        windows = squad_runs.with_windows(TextTraining(0, longest=longest), most)
        return squad_runs.texts_of(data, tokenizer, windows, share, HELD_OUT)
    train, held = glue.set_apart(data.train, share) if share else (data.train, [])
    parts = {HELD_OUT: held, **data.dev}
    if any(row.label is not None for rows in data.test.values() for row in rows):
        parts |= {f"{part} test": rows for part, rows in data.test.items()}
    coded = {part: encode(rows, tokenizer, longest) for part, rows in parts.items() if rows}
    shorter = min(longest, LONGEST)
    coded |= {part: encode(rows, tokenizer, shorter) for part, rows in more.rows.items() if rows}
    return Texts(encode(train, tokenizer, longest), coded, data.task.classes, more.subsets)


def new_weights(path: str, cases: Mapping[str, Case], asked: list[str]) -> list[str]:
    """Weights that the pretrained model lacks, which are drawn at random; `asked` are those for questions."""
    labelled = [case.data for case in cases.values() if isinstance(case.data, Splits)]
    return [*load_model(path, labelled[0].task.classes, 0)[1], *asked] if labelled else asked


def plan_row(
    request: Request, case: Case, shared: Shared, form: str, task: str, rate: float, choosing: bool = False
) -> TextRow:
    """A form on a task, with the settings of its training."""
    assert request.model is not None
    count, by = len(shared.texts[task].train), case.published
    if by is None:
        training = TextTraining(0, BATCH, rate, longest=longest_of(by, task))
    else:
        training = published_training(by, task, count)
    if task in squad.NAMES:
        training = squad_runs.with_windows(training, shared.most)
    epochs = request.options["epochs"] or (EPOCHS.get(task, 5) if by is None else None)
    if epochs is not None:
        updates = epochs * Epochs(count, training.batch, 1, 0).per_epoch
        training = replace(training, updates=updates, warmup=round(WARMUP * updates))
    mechanisms = forms(knobs(task, by, training.longest))[form]
    data = case.data.sha256 if choosing else case.more.digest(case.data.sha256)
    return TextRow(form, task, mechanisms, training, model_name(request.model), data, case.share, choosing)


def mean_score(known: Known, row: str) -> float:
    """Mean of a row's scores over seeds; a score that is not defined counts as the worst."""
    scores = [numbers["score"] for (name, _), numbers in known.numbers.items() if name == row]
    return sum(-100.0 if value is None else value for value in scores) / len(scores)


def step_ms(task: Task, shared: Shared) -> float:
    """Milliseconds of an update, the fastest of four."""
    row: TextRow = task.row
    return min(
        text_training.step_times(
            shared.texts[row.task],
            shared.tokenizer,
            shared.path,
            row.mechanisms,
            task.training,
            task.device,
            4,
        )
    )


def perform(task: Task, shared: Shared, tell: Tell) -> dict[str, Any]:
    """Train, predict, and store model, predictions and numbers in the task's folder."""
    row: TextRow = task.row
    texts, told = shared.texts[row.task], Throttled(tell)
    model, numbers = text_training.train(
        task.folder,
        texts,
        shared.tokenizer,
        shared.path,
        row.mechanisms,
        task.training,
        task.seed,
        task.device,
        told,
    )
    told.rest(numbers["updates"])
    if is_main_process():
        parts = [name for name in texts.parts if name == HELD_OUT or not row.choosing]
        predictions: dict[str, Tensor] = {}
        if texts.asked is None:
            scores, predictions = measure_labels(model, texts, parts, shared.tokenizer, row)
        else:
            scores, answers = measure_answers(model, texts, parts, shared.tokenizer, row)
            if not row.choosing:
                write_whole(task.folder / ANSWERS, json.dumps(answers[row.task], ensure_ascii=False))
        numbers |= scores
        if shared.measure is not None and not row.choosing:
            more, kept = shared.measure(model, texts, shared.tokenizer, row, task.seed)
            numbers, predictions = numbers | more, predictions | kept
        if predictions:
            write_tensors(task.folder / PREDICTIONS, predictions)
        if shared.keep_models and not row.choosing:
            model.save_pretrained(task.folder / "model")
            shared.tokenizer.save_pretrained(task.folder / "model")
        numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
        finish_run(task.folder, numbers)
    return stored_result(task.folder)


def measure_labels(
    model: Any, texts: Texts, parts: Sequence[str], tokenizer: Any, row: TextRow
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The scores of each part of a task of GLUE, and the predictions."""
    predictions = {name: text_training.predict(model, texts.parts[name], tokenizer) for name in parts}
    numbers: dict[str, Any] = {}
    for name, predicted in predictions.items():
        labels = torch.tensor([each["labels"] for each in texts.parts[name]])
        scores = scores_of(glue.TASKS[row.task], predicted, labels)
        numbers |= {f"{name} {metric}": value for metric, value in scores.items()}
    part = HELD_OUT if row.choosing else None
    numbers["score"] = main_score(row.task, numbers, part)
    numbers[BAM_SCORE] = main_score(row.task, numbers, part, BAM_METRICS.get(row.task))
    return numbers, predictions


def measure_answers(
    model: Any, texts: Texts, parts: Sequence[str], tokenizer: Any, row: TextRow
) -> tuple[dict[str, Any], dict[str, dict[str, str]]]:
    """The scores of each part of a version of SQuAD, and the answers by part and question."""
    numbers, answers = squad_runs.measure(model, texts, parts, tokenizer, HELD_OUT)
    main = HELD_OUT if row.choosing else row.task
    numbers |= {metric: numbers[f"{main} {metric}"] for metric in squad_runs.METRICS}
    numbers |= {"score": numbers[squad_runs.F1], BAM_SCORE: numbers[squad_runs.F1]}
    return numbers, answers


def scores_of(task: glue.Task, logits: Tensor, labels: Tensor) -> dict[str, float | None]:
    """The task's metrics in %, and the mean negative log-likelihood of classes; None where not defined."""
    if not task.classes:
        found = logits.squeeze(-1).double()
        return {metric: _percent(score(metric, labels.tolist(), found.tolist())) for metric in task.metrics}
    best = logits.argmax(dim=-1).tolist()
    scores = {metric: _percent(score(metric, labels.tolist(), best)) for metric in task.metrics}
    nll = torch.nn.functional.cross_entropy(logits.double(), labels)
    return {**scores, "NLL": float(nll)}


def _percent(found: Score) -> float | None:
    return None if found.value is None else 100 * found.value


def main_score(
    task: str, numbers: Mapping[str, Any], part: str | None = None, metric: str | None = None
) -> float | None:
    """The first metric of the first development part, what GLUE averages, or another part or metric; in %."""
    known = glue.TASKS[task]
    value: float | None = numbers[f"{part or next(iter(known.server_rows))} {metric or known.metrics[0]}"]
    return value
