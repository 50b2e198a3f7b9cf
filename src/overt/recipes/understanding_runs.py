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

from overt import _check
from overt._extras import need
from overt._files import write_tensors, write_whole
from overt.data import glue, squad
from overt.data.batching import Epochs
from overt.data.glue import Splits
from overt.data.squad import Questions
from overt.judge.understanding import EXTRA, Score, score
from overt.recipes import squad_runs, text_training
from overt.recipes._recipe import Option, Outcome, Request, cell
from overt.recipes._rows import Known, Numbers, Task, folder_name, look_up, stored_result
from overt.recipes._runs import RESULT, check_model, finish_run, processes_of, run_record
from overt.recipes._training import (
    be_quiet,
    hardware,
    is_main_process,
    one_thread,
    processes,
    torch_device,
    versions,
)
from overt.recipes._workers import Tell, Throttled
from overt.recipes.text_training import Texts, TextTraining, encode, load_model
from overt.recipes.understanding_forms import PLAIN, TextRow, check_kept, forms, knobs, row_name
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
    "workers": Option("trainings side by side; by default 8 on a GPU and 1 on a CPU", least=1, moves=False),
    "discard-models": Option(
        "keep the numbers of finished trainings, and not their models", False, moves=False
    ),
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
Found = Mapping[str, Splits | Questions]


class Loaded(NamedTuple):
    """Tasks; if questions are among them, how many tokens the model takes, and the weights that it lacks."""

    splits: Found
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


def splits_of(request: Request, tasks: Sequence[str], tokenizer: Any, named: bool) -> Loaded:
    """The tasks that are there; the others are listed.

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
    return Loaded({**labelled, **asked}, most, new)


def in_stored(request: Request, key: str) -> list[str]:
    """The tasks or forms of the earlier result file, which are kept where they are not asked for."""
    entries = [numbers for rows in request.stored.values() for numbers in rows.values()]
    rows = [entry.get("run", {}).get("settings", {}).get("row", {}) for entry in entries]
    return list(dict.fromkeys(row[key] for row in rows if key in row))


class Plans(NamedTuple):
    """The runs of a request before they are trained: their rows by name, the data, and the runs' folder."""

    rows: Mapping[str, TextRow]
    splits: Mapping[str, Splits]
    tokenizer: Any
    place: Path

    def folder(self, row: str, seed: int) -> Path:
        """Of one run."""
        return self.place / folder_name(row) / f"seed-{seed}"


def pretrained(request: Request) -> str:
    """The pretrained model that a request names."""
    if request.model is None:
        raise ValueError(
            "this recipe fine-tunes a pretrained model: give --model, a folder or a name on the hub"
        )
    check_model(request.model)
    return request.model


def leave_out(request: Request, what: str, reason: str) -> None:
    """Say that something is not measured."""
    request.console.print(f"{what} is left out: {reason}", style="yellow", markup=False, highlight=False)


def run_forms(
    request: Request,
    tasks: Sequence[str],
    default: Sequence[str],
    *,
    also: Sequence[str] = (),
    measure: Measure | None = None,
    more: More = lambda _request, _task, _splits: Parts(),
    passes: Callable[[TextRow, Texts], int] = lambda _row, _texts: 0,
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
    from transformers import AutoTokenizer

    path = pretrained(request)
    be_quiet()
    count = processes(request.device)
    options = request.options
    chosen_forms = listed("--forms", options["forms"], list(forms() if measure is None else default), default)
    chosen_tasks = tasks_of(options["tasks"], tasks, also)
    if options.get("submission") and not any(task in glue.TASKS for task in chosen_tasks):
        raise ValueError(f"--submission needs a task of GLUE, got --tasks {options['tasks']}")
    tokenizer = AutoTokenizer.from_pretrained(path)
    asked = splits_of(request, chosen_tasks, tokenizer, named=options["tasks"] is not None)
    if not asked.splits:
        raise FileNotFoundError(f"none of the tasks {', '.join(chosen_tasks)} is there: give --data DIR")
    order = list(dict.fromkeys([*tasks, *also]))
    others = [task for task in in_stored(request, "task") if task in order and task not in asked.splits]
    kept = splits_of(request, others, tokenizer, named=False)
    splits = dict(sorted({**asked.splits, **kept.splits}.items(), key=lambda item: order.index(item[0])))
    most = asked.most or kept.most
    published = {task: published_for(path, task) for task in splits}
    shares = {task: 0.0 if published[task] and measure is None else HELD_OUT_SHARE for task in splits}
    parts = {
        task: more(request, task, each) if isinstance(each, Splits) else Parts()
        for task, each in splits.items()
    }
    shared = shared_of(request, splits, parts, tokenizer, most, published, shares)._replace(measure=measure)
    plan = partial(plan_row, request, splits, parts, shared, published, shares)
    device = torch_device(request.device).type
    place = request.out / Path(path).resolve().name
    every = dict.fromkeys([*default, *chosen_forms])
    trained_by = count
    if needed is not None:
        runs = [place / folder_name(row_name(form, task)) for form in every for task in splits]
        trained_by = processes_of(run / f"seed-{seed}" for run in runs for seed in range(request.seeds))
    common: dict[str, Any] = {"precision": "float32"}
    if trained_by > 1:
        common["processes"] = trained_by

    def rest(task: Task) -> float:
        """A pass is a third of an update; a GPU takes many rows in the time of a batch."""
        rows = 0 if task.row.choosing else passes(task.row, shared.texts[task.row.task])
        return rows / (3 * (text_training.ROWS if device == "cuda" else task.training.batch))

    def fill(
        request: Request, rows: Mapping[str, TextRow], counts: Mapping[str, int], place: Path, common: Any
    ) -> Known:
        wanted = list(counts)
        known = look_up(request, rows, wanted, place, common, lambda row: row.training, device, counts)
        known.fill(
            request,
            shared,
            perform,
            milliseconds=lambda task: step_ms(task, shared),
            line=lambda numbers: cell(numbers["score"]),
            prepare=one_thread,
            together=count > 1,
            alike=lambda task: (task.row.task, bool(task.row.mechanisms)),
            rest=rest,
        )
        return known

    rates = {task: published_training(by, task, 1).learning_rate for task, by in published.items() if by}
    untuned = [task for task in splits if not published[task]]
    chosen_by = Known()
    if untuned:
        trials = {task: {rate: plan(PLAIN, task, rate, choosing=True) for rate in RATES} for task in untuned}
        rows = {row.name: row for each in trials.values() for row in each.values()}
        counts = {name: RATE_SEEDS for name, row in rows.items() if row.task in asked.splits}
        chosen_by = fill(request, rows, counts, place, common)
        for task, each in trials.items():
            if not {row.name for row in each.values()} <= {name for name, _ in chosen_by.numbers}:
                del splits[task]  # it is in the stored result alone
                leave_out(request, task, "its stored learning rates have other settings")
                continue
            scores = {rate: mean_score(chosen_by, row.name) for rate, row in each.items()}
            rates[task] = max(scores, key=lambda rate: scores[rate])
            told = ", ".join(f"{rate:g}: {value:.2f}" for rate, value in scores.items())
            request.console.print(f"{task}: learning rate {rates[task]:g} (held-out rows, plain: {told})")
    stored_forms = [form for form in in_stored(request, "form") if form in forms()]
    every |= dict.fromkeys(stored_forms)
    rows = {row_name(form, task): plan(form, task, rates[task]) for form in every for task in splits}
    counts = {
        row_name(form, task): seeds(form, task, request.seeds)
        for form in chosen_forms
        for task in asked.splits
    }
    if measure is not None:
        common = {**common, "measured": measure.__name__}
        place = place / measure.__name__
    labelled = {task: each for task, each in splits.items() if isinstance(each, Splits)}
    if needed is not None:
        plans = Plans(rows, labelled, shared.tokenizer, place)
        counts = dict.fromkeys(needed(plans), request.seeds)
        check_all_kept(plans, counts)
        request = replace(request, stored={}, elsewhere=())
    known = fill(request, rows, counts, place, common)
    finish(known.numbers, shared, place)
    if options.get("submission") and is_main_process():
        written = [rows[name] for name in counts if rows[name].task in labelled]
        write_all(request, written, labelled, shared.tokenizer, known.numbers, place)
    known.numbers |= chosen_by.numbers
    known.stored, known.shared = known.stored + chosen_by.stored, known.shared + chosen_by.shared
    known.dropped += chosen_by.dropped + sum(task not in splits for task in others)
    config = {
        "model": model_name(path),
        "published_settings": next(filter(None, published.values()), None),
        "chosen_rates": [task for task in untuned if task in splits],
        "held_out": max(shares.values()),
        "data": {task: each.describe() for task, each in splits.items()},
        "missing": {f"{task}, {part}": why for task in splits for part, why in parts[task].missing.items()},
        "rates": rates,
        "forms": list(every),
        "rows": {name: row.settings() for name, row in rows.items()},
        "head": new_weights(path, splits, asked.new or kept.new),
    }
    names = [*rows, *dict.fromkeys(name for name, _ in chosen_by.numbers)]
    return known.outcome(config, names, stand_in=False)


def check_all_kept(plans: Plans, counts: Mapping[str, int]) -> None:
    """Refuse finished runs without their models before others are trained."""
    for name, seeds in counts.items():
        for seed in range(seeds):
            folder = plans.folder(name, seed)
            if (folder / RESULT).is_file():
                check_kept(plans.rows[name], folder, "reading maps")


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


def shared_of(
    request: Request,
    splits: Found,
    more: Mapping[str, Parts],
    tokenizer: Any,
    most: int,
    published: Mapping[str, str | None],
    shares: Mapping[str, float],
) -> Shared:
    """The rows of all tasks as the model takes them."""
    assert request.model is not None
    texts = {}
    for task, each in splits.items():
        longest = longest_of(published[task], task)
        if isinstance(each, Questions):
            windows = squad_runs.with_windows(TextTraining(0, longest=longest), most)
            texts[task] = squad_runs.texts_of(each, tokenizer, windows, shares[task], HELD_OUT)
            continue
        train, held = glue.set_apart(each.train, shares[task]) if shares[task] else (each.train, [])
        parts = {HELD_OUT: held, **each.dev}
        if any(row.label is not None for rows in each.test.values() for row in rows):
            parts |= {f"{part} test": rows for part, rows in each.test.items()}
        coded = {part: encode(rows, tokenizer, longest) for part, rows in parts.items() if rows}
        coded |= {
            part: encode(rows, tokenizer, min(longest, LONGEST))
            for part, rows in more[task].rows.items()
            if rows
        }
        train_coded = encode(train, tokenizer, longest)
        texts[task] = Texts(train_coded, coded, each.task.classes, more[task].subsets)
    return Shared(request.model, tokenizer, texts, not request.options["discard-models"], most=most)


def new_weights(path: str, splits: Found, asked: list[str]) -> list[str]:
    """Weights that the pretrained model lacks, which are drawn at random; `asked` are those for questions."""
    classes = next((each.task.classes for each in splits.values() if isinstance(each, Splits)), None)
    return asked if classes is None else [*load_model(path, classes, 0)[1], *asked]


def plan_row(
    request: Request,
    splits: Found,
    parts: Mapping[str, Parts],
    shared: Shared,
    published: Mapping[str, str | None],
    shares: Mapping[str, float],
    form: str,
    task: str,
    rate: float,
    choosing: bool = False,
) -> TextRow:
    """A form on a task, with the settings of its training."""
    assert request.model is not None
    count, by = len(shared.texts[task].train), published[task]
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
    sha256 = splits[task].sha256
    data = sha256 if choosing else parts[task].digest(sha256)
    return TextRow(form, task, mechanisms, training, model_name(request.model), data, shares[task], choosing)


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
            scores, answers = squad_runs.measure(model, texts, parts, shared.tokenizer, HELD_OUT)
            main = HELD_OUT if row.choosing else row.task
            scores |= {metric: scores[f"{main} {metric}"] for metric in squad_runs.METRICS}
            scores |= {"score": scores[squad_runs.F1], BAM_SCORE: scores[squad_runs.F1]}
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
