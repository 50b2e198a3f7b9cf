"""Which explanation to believe: every method of the package, by every protocol, on several models.

No paper's table. Classifiers are trained with plain, evolving and random attention, or loaded. Each method
says how much each word of a text matters, and protocols say how far that is so: what deleting words does, how
the words rank by blank-out, whether anything is left when the weights are shuffled, whether people marked the
words, and whether the word that is known to decide comes first.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

import overt
from overt._extras import need
from overt._files import write_whole
from overt._workers import Tell, cores, side_by_side
from overt.data import eraser, glue, planted, sst2
from overt.data.agreement import Sentence, flipped, split
from overt.data.files import data_folder
from overt.judge.rationales.evaluation import DELETING, WITHOUT, Rationales, evaluate
from overt.judge.rationales.methods import (
    EXTRA,
    SAMPLES,
    every_method,
)
from overt.judge.rationales.randomising import AfterShuffling
from overt.judge.rationales.words import WordClassifier
from overt.mechanisms.mechanism import Mechanism
from overt.models.folders import WEIGHTS
from overt.recipes import (
    ea_rationales,
    faithfulness_models,
    forms,
    grammar_training,
    rationale_training,
    text_training,
)
from overt.recipes._recipe import WORKERS, Option, Outcome, Recipe, Request, counted
from overt.recipes._rows import Task, duration, folder_name, look_up, settings_of
from overt.recipes._runs import (
    PARTS,
    check_began_with,
    check_weights,
    finish_run,
    finished,
    measure_once,
    run_record,
)
from overt.recipes._training import (
    be_quiet,
    hardware,
    leave_memory,
    one_thread,
    precision_of_products,
    progress_bar,
    short_products,
    torch_device,
    versions,
)
from overt.recipes.ea_rationales import threads
from overt.recipes.faithfulness_report import (
    GROUND,
    POINTS,
    PROTOCOLS,
    SHUFFLED,
    cells_of,
    draw,
    means_of,
    pairs_of,
    report,
    seconds_of,
)
from overt.recipes.faithfulness_time import Expected, expected_seconds
from overt.recipes.rationale_training import RationaleTraining, Reviews
from overt.recipes.text_training import Texts, TextTraining
from overt.recipes.understanding_runs import leave_out, listed, model_name, pretrained

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

PLAIN = "plain"
AGREEMENT, SENTIMENT, REVIEWS, LANGUAGE = "agreement", "SST-2", "movie reviews", "language model"
# The file that says that a model is trained, by data.
TRAINED = {AGREEMENT: WEIGHTS, SENTIMENT: rationale_training.TRAINED, REVIEWS: rationale_training.TRAINED}
FORMS: dict[str, dict[str, tuple[Mechanism, ...]]] = {
    AGREEMENT: {name: forms.FORMS[name] for name in (PLAIN, "evolving", "Bayesian")},
    SENTIMENT: ea_rationales.FORMS,
    REVIEWS: ea_rationales.FORMS,
    LANGUAGE: {PLAIN: ()},
}
# So that every cell has 300 (of reviews 100): a network does not decide 7 % of the grammar's sentences by
# their subject, and 12 % of SST-2's have more than the 30 words of normalised AOPC.
TEXTS = {AGREEMENT: 360, SENTIMENT: 360, REVIEWS: 100, LANGUAGE: 300}
QUICK_TEXTS = {AGREEMENT: 8, REVIEWS: 6}
QUICK_FORMS = {AGREEMENT: (PLAIN, "evolving"), REVIEWS: (PLAIN,)}
QUICK_NAMES = {REVIEWS: "planted reviews"}  # of what stands in for data
QUICK_WORDS = 9  # of the longest sentence
QUICK_SAMPLES = 100  # of LIME
TRAIN, TEST = 16_000, 2_000  # sentences of the grammar, as in the demo
STEPS, QUICK_STEPS = 280, 150
SENTIMENT_UPDATES = 2_100  # about an epoch
DIGITS = 4  # of stored numbers
TIMED = 2  # updates that are timed before a run
TRIED = 100  # sentences that a language model is asked at once
CHOSEN = "chosen.json"  # those that it is judged on


@dataclass(frozen=True)
class JudgedRow:
    """A model whose explanations are judged.

    Attributes:
        data: what it reads: a key of `FORMS`.
        form: of its attention.
        mechanisms: of its attention.
        methods: that are judged.
        texts: how many.
        source: what else its numbers depend on: the pretrained model, the data, the training.
    """

    data: str
    form: str
    mechanisms: tuple[Mechanism, ...]
    methods: tuple[str, ...]
    texts: int
    source: Mapping[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "mechanisms": settings_of(self.mechanisms), "methods": list(self.methods)}


class Judged(NamedTuple):
    """The texts of a row.

    Attributes:
        words: of each text.
        labels: the right classes.
        queries: what is asked of each text.
        rationales: passages that people marked; None if there are none.
        sentences: of the grammar, whose subject is known; None for other texts.
        share: of the words that a rationale has.
    """

    words: list[tuple[str, ...]]
    labels: list[int]
    queries: list[str] | None = None
    rationales: list[Any] | None = None
    sentences: list[Sentence] | None = None
    share: float = WITHOUT


class Shared(NamedTuple):
    """What all rows need.

    Attributes:
        request: of the run, without its console.
        model: the pretrained encoder.
        reviews: movie reviews, or those that stand in.
        sentences: SST-2's rows to train on, and those to judge.
        samples: of LIME.
        training: settings of the trainings, by data.
        expected: row → how long it is expected to take.
    """

    request: Any
    model: str | None
    reviews: Reviews | None
    sentences: tuple[sst2.Rows, sst2.Rows] | None
    samples: int
    training: Mapping[str, Any]
    expected: Mapping[str, Expected] = {}

    @property
    def quick(self) -> bool:
        """Whether it is a trial."""
        return bool(self.request.options["quick"])


# Readers of data from the folder --data.
READ: dict[str, Callable[[Path | None], Any]] = {
    SENTIMENT: lambda folder: sst2.load_rows(folder, seed=0)[:2],
    REVIEWS: lambda folder: Reviews(REVIEWS, eraser.load_movies(folder), eraser.CLASSES, False),
}
NOTHING: Mapping[str, Any] = {}


def rows_of(quick: bool, most: int | None = None) -> dict[str, JudgedRow]:
    """All rows by name; those of a trial are a few of them, with few texts.

    Args:
        quick: whether it is a trial.
        most: of texts, instead of the usual numbers.
    """
    texts, names = (QUICK_TEXTS, QUICK_NAMES) if quick else (TEXTS, {})
    return {
        f"{names.get(data, data)} {form}": JudgedRow(
            data, form, mechanisms, every_method(), most or texts[data]
        )
        for data in texts
        for form, mechanisms in FORMS[data].items()
        if not quick or form in QUICK_FORMS[data]
    }


def run(request: Request) -> Outcome:
    """Train and judge what is not there, and compare."""
    for module in ("accelerate", "lime.lime_text", "captum.attr"):
        need(module, EXTRA)
    be_quiet()
    quick = bool(request.options["quick"])
    if quick and request.options["trained"] is not None:
        raise ValueError("--trained is for movie reviews, which --quick does not read: leave out one of them")
    rows = rows_of(quick, request.options["examples"])
    # Texts' own numbers are too many for the result file: they are beside it, a file for each model.
    request = replace(request, stored=stored_by_text(request.kept, rows), elsewhere=())
    read, absent = ({}, {}) if quick else read_data(request)
    there = [name for name, row in rows.items() if row.data not in absent]
    chosen = listed("--rows", request.options["rows"], list(rows), there)
    for name in chosen:
        if rows[name].data in absent:
            raise ValueError(f"--rows {name} cannot be measured: {absent[rows[name].data]}")
    for data, reason in absent.items():
        leave_out(request, data, reason)
    needed = {rows[name].data for name in there}
    shared = shared_by(request, needed, read)
    known_rows = {name: replace(rows[name], source=source_of(rows[name], shared)) for name in there}
    device = torch_device(request.device).type
    place = request.out / ("quick" if quick else "full")
    seeds = 1 if quick else request.seeds
    counts = {name: 1 if row.data == LANGUAGE else seeds for name, row in rows.items()}
    common = {
        "version": overt.__version__,
        "lime_samples": shared.samples,
        "points": POINTS,
        "correlation": "of sizes",
    }
    training = shared.training
    trained: dict[tuple[str, int], Path] = {}
    if request.fresh:  # what is refused is so before anything is discarded
        trained = of_table_8(
            [(name, seed) for name in chosen for seed in range(counts[name])], known_rows, shared
        )
    check_all_weights(request, needed)
    known = look_up(
        request, known_rows, chosen, place, common, lambda row: training[row.data], device, counts
    )
    untrained = [task for task in known.tasks if not is_trained(task)]
    if not request.fresh:
        trained = of_table_8([(task.name, task.seed) for task in untrained], known_rows, shared)
    adopt_all(untrained, trained, request)
    numbers = dict(known.numbers)
    for name, row in known_rows.items():  # finished by earlier commands
        for seed in range(counts[name]):
            folder = place / folder_name(name) / f"seed-{seed}"
            settings = {**common, "row": row.settings(), "seed": seed}
            if name not in chosen and (found := finished(folder, settings)) is not None:
                numbers.setdefault((name, seed), found)
    dropped = known.dropped
    for seed, by_name in request.stored.items():  # those that cannot be measured now, as without --model
        for name in by_name.keys() - known_rows.keys():
            settings = by_name[name]["run"]["settings"]
            if {**settings, **common} == settings:
                numbers[name, seed] = by_name[name]
            else:
                dropped += 1
    if from_files := len(numbers.keys() & {(name, seed) for seed in request.stored for name in rows}):
        request.console.print(f"[dim]{from_files} models have been judged; --fresh judges them again[/dim]")
    numbers |= judge_all(known.tasks, shared, request)
    by_row = {
        name: {seed: found for (row, seed), found in sorted(numbers.items()) if row == name} for name in rows
    }
    by_row = {name: found for name, found in by_row.items() if found}
    config = {
        "rows": {
            name: next(iter(found.values()))["run"]["settings"]["row"] for name, found in by_row.items()
        },
        "protocols": list(PROTOCOLS),
        "lime_samples": shared.samples,
        "quick": quick,
        "cells": {name: cells_of(found) for name, found in by_row.items()},
        "pairs": {name: pairs_of(found) for name, found in by_row.items()},
        "refused": {name: next(iter(found.values()))["refused"] for name, found in by_row.items()},
        "seconds": {name: seconds_of(found) for name, found in by_row.items()},
        "half_difference": half_differences(by_row),
        "tried": {name: found[0]["tried"] for name, found in by_row.items() if rows[name].data == LANGUAGE},
        "missing": {name: left for name in rows if (left := counts[name] - len(by_row.get(name, ()))) > 0},
        "hardware": {
            name: sorted({each["run"]["hardware"] for each in found.values()})
            for name, found in by_row.items()
        },
    }
    per_seed: dict[int, dict[str, Any]] = {}
    for name, by_seed in by_row.items():
        for seed, found in by_seed.items():
            few = {key: found[key] for key in ("accuracy", "texts", "run")}
            per_seed.setdefault(seed, {})[name] = {**few, "means": means_of(found)}
    return Outcome(
        config,
        per_seed,
        stand_in=quick,
        continued=known.stored > 0,
        drops=dropped > 0,
        measured=any(
            found is not request.stored.get(seed, {}).get(name) for (name, seed), found in numbers.items()
        ),
        kept={kept_name(name, seed): found for (name, seed), found in numbers.items()},
    )


def kept_name(row: str, seed: int) -> str:
    """The name of a model's numbers beside the result file."""
    return f"{folder_name(row)}-{seed}"


def stored_by_text(kept: Mapping[str, Any], rows: Iterable[str]) -> dict[int, dict[str, Any]]:
    """Seed → row → numbers of each text, as they are beside an earlier result file."""
    stored: dict[int, dict[str, Any]] = {}
    for name, numbers in kept.items():
        seed = numbers["run"]["settings"]["seed"]
        for row in rows:
            if name == kept_name(row, seed):
                stored.setdefault(seed, {})[row] = numbers
    return stored


def read_data(request: Request) -> tuple[dict[str, Any], dict[str, str]]:
    """What classifiers are trained on, as far as it is there, and why other rows cannot be judged."""
    found: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for data, read in READ.items():
        if data_folder(request.data) is None:
            absent[data] = "it needs --data, a folder with its files"
        elif request.model is None:
            absent[data] = "it needs --model, a pretrained encoder"
        else:
            try:
                found[data] = read(request.data)
            except FileNotFoundError as error:
                absent[data] = str(error)
    if request.options["language-model"] is None:
        absent[LANGUAGE] = "it needs --language-model, a causal language model"
    return found, absent


def shared_by(request: Request, data: set[str], read: Mapping[str, Any] = NOTHING) -> Shared:
    """What the rows of these data need.

    Args:
        request: of the run.
        data: of the rows.
        read: as `read_data` found them.
    """
    quick = bool(request.options["quick"])
    reviews, sentences, model = read.get(REVIEWS), read.get(SENTIMENT), request.model
    if quick and REVIEWS in data:
        reviews = Reviews("planted reviews", planted.planted_reviews(), eraser.CLASSES, True)
        model = rationale_training.small_encoder(request.out / "encoder", planted.vocabulary())
    if not quick and data & {SENTIMENT, REVIEWS}:
        model = pretrained(request)
    alone = replace(request, console=None)  # type: ignore[arg-type]  # other processes have their own
    samples = request.options["lime-samples"] or (QUICK_SAMPLES if quick else SAMPLES)
    training = training_of(quick, reviews, request.options["steps"])
    return Shared(alone, model, reviews, sentences, samples, training)


def check_all_weights(request: Request, data: set[str]) -> None:
    """As `check_weights`, of the pretrained models that the rows of these data need."""
    if data & {SENTIMENT, REVIEWS} and not request.options["quick"]:
        check_weights(request.out, pretrained(request), request.fresh)
    if LANGUAGE in data:
        check_weights(request.out, request.options["language-model"], request.fresh)


def training_of(quick: bool, reviews: Reviews | None, steps: int | None) -> dict[str, Any]:
    """Settings of the trainings, by data.

    Args:
        quick: whether it is a trial.
        reviews: to train on, if there are any.
        steps: updates of each training, instead of the usual numbers.
    """
    of_reviews = RationaleTraining(0) if reviews is None else ea_rationales.plan(reviews, quick, None)
    if steps is not None:
        of_reviews = replace(of_reviews, updates=steps)
    return {
        AGREEMENT: TextTraining(
            steps or (QUICK_STEPS if quick else STEPS),
            grammar_training.BATCH,
            grammar_training.LEARNING_RATE,
        ),
        SENTIMENT: TextTraining(
            steps or SENTIMENT_UPDATES, learning_rate=5e-5, warmup=min(30, (steps or 60) // 2), longest=64
        ),
        REVIEWS: of_reviews,
        LANGUAGE: TextTraining(0),
    }


def source_of(row: JudgedRow, shared: Shared) -> dict[str, Any]:
    """What a row's numbers depend on beside its own settings, as plain JSON."""
    found: dict[str, Any] = {"training": shared.training[row.data].settings()}
    if row.data == LANGUAGE:
        found["texts"] = "decided by the subject, as written"
        found["model"] = model_name(shared.request.options["language-model"])
    elif row.data != AGREEMENT:
        assert shared.model is not None
        found["model"] = "small encoder" if shared.quick else model_name(shared.model)
    if row.data == REVIEWS:
        assert shared.reviews is not None
        found["data"] = shared.reviews.sha256
    elif row.data == SENTIMENT:
        found["data"] = hashlib.sha256(json.dumps(shared.sentences).encode()).hexdigest()
    return found


def half_differences(by_row: Mapping[str, Mapping[int, dict[str, Any]]]) -> dict[str, float]:
    """Row → how far float16 products move a probability, where deleted words are judged with them."""
    found = {
        name: [numbers["half_difference"] for numbers in by_seed.values() if numbers.get("half")]
        for name, by_seed in by_row.items()
    }
    return {name: max(values) for name, values in found.items() if values}


def of_table_8(
    wanted: Iterable[tuple[str, int]], rows: Mapping[str, JudgedRow], shared: Shared
) -> dict[tuple[str, int], Path]:
    """Row and seed → the run of ea-table-8 in --trained that has its classifier of movie reviews.

    Where there is none, it is to be trained. Runs of classifiers that were trained otherwise are refused.

    Args:
        wanted: rows and seeds that are to be trained.
        rows: all rows.
        shared: what they need.
    """
    request, found = shared.request, {}
    wanted = [(name, seed) for name, seed in wanted if rows[name].data == REVIEWS]
    if request.options["trained"] is None or not wanted:
        return {}
    assert shared.model is not None
    runs = Path(request.options["trained"])
    for name, seed in wanted:
        row = rows[name]
        settings = {key: row.source[key] for key in ("data", "model", "training")}
        settings["mechanisms"] = settings_of(row.mechanisms)
        settings |= {"precision": precision_of_products(request.device), "seed": seed}
        run = faithfulness_models.run_of_table_8(runs, row.form, seed, settings)
        if run is not None:
            found[name, seed] = run
    if found:
        check_began_with("--trained", runs, shared.model)
    return found


def adopt_all(tasks: Sequence[Task], runs: Mapping[tuple[str, int], Path], request: Request) -> None:
    """Take the classifiers of movie reviews that ea-table-8 has trained, rather than train the same again.

    Args:
        tasks: whose models are not trained.
        runs: row and seed → the run that has the model.
        request: of the run.
    """
    wanting = [task for task in tasks if task.row.data == REVIEWS]
    if request.options["trained"] is None or not wanting:
        return
    there = [task for task in wanting if (task.name, task.seed) in runs]
    for task in there:
        shutil.rmtree(task.folder / PARTS, ignore_errors=True)  # of an earlier training
        faithfulness_models.adopt(runs[task.name, task.seed], task.folder)
    request.console.print(
        f"{len(there)} of {counted(len(wanting), 'classifier')} of movie reviews that are to be trained come "
        f"from {request.options['trained']}",
        markup=False,
        highlight=False,
    )


# --- Measure ---


def judge_all(tasks: Sequence[Task], shared: Shared, request: Request) -> dict[tuple[str, int], Any]:
    """Train and judge, several models at a time; an interrupted run goes on with what is left."""
    if not tasks:
        return {}
    console, numbers = request.console, {}
    device = tasks[0].device
    workers = request.options["workers"] or min(8 if device == "cuda" else 2 if shared.quick else 1, cores())
    workers = min(workers, len(tasks))
    with threads(None if workers == 1 else 1):
        shared = shared._replace(expected=expected_of(tasks, shared))
    tasks = sorted(tasks, key=lambda task: -expected_left(task, shared))  # so that none is late to begin
    left = [expected_left(task, shared) for task in tasks]
    tell_expected(console, tasks, left, workers)
    with progress_bar(console) as progress:
        bar = progress.add_task("training and judging", total=round(1000 * sum(left)))

        def tell(steps: int) -> None:
            progress.update(bar, advance=steps)

        done: Iterable[tuple[Task, dict[str, Any]]]
        if workers == 1:
            done = ((task, perform(task, shared, tell)) for task in tasks)
        else:
            done = side_by_side(tasks, perform, shared, workers, prepare_process, tell)
        for task, found in done:
            numbers[task.name, task.seed] = found
            text = f"{task.name}, seed {task.seed}: accuracy {found['accuracy']:.3f}"
            progress.update(bar, description=text)
            if not console.is_terminal:  # a log has no bar
                console.print(f"{text}, {len(numbers)} of {len(tasks)}")
    return numbers


def expected_of(tasks: Sequence[Task], shared: Shared) -> dict[str, Expected]:
    """Row → how long a model of it is expected to take; measured with a model that is not trained."""
    from transformers import set_seed

    found = {}
    for task in {task.name: task for task in tasks}.values():
        row, device = task.row, torch_device(task.device)
        set_seed(0)
        model, tokenizer, update = UNTRAINED[row.data](task, shared)
        classifier = WordClassifier(model.to(device).eval(), tokenizer)
        texts = judged_texts(row, shared)
        queries = texts.queries or [""] * len(texts.words)
        read = [classifier.read(*each) for each in zip(texts.words, queries, strict=True)]
        found[task.name] = Expected(
            update(), expected_seconds(classifier, read, row.methods, shared.samples, POINTS)
        )
    return found


def expected_left(task: Task, shared: Shared) -> float:
    """Seconds that what is left of a task is expected to take."""
    expected = shared.expected[task.name]
    left = [method for method in task.row.methods if not part_of(task, method).is_file()]
    updates = 0 if is_trained(task) else task.training.updates
    return float(updates * expected.update + sum(expected.methods[method] for method in left))


def tell_expected(console: Console, tasks: Sequence[Task], seconds: Sequence[float], workers: int) -> None:
    """Say how long it will take: in all, and on average for a model of each row."""
    # On a GPU, which small networks leave idle most of the time, models hardly slow each other down.
    slower = 1.3 if tasks[0].device == "cuda" and workers > 1 else 1.0
    minutes = slower * max(sum(seconds) / workers, *seconds) / 60
    by_row: dict[str, list[float]] = {}
    for task, each in zip(tasks, seconds, strict=True):
        by_row.setdefault(task.name, []).append(each / 60)
    told = ", ".join(f"{name} {sum(each) / len(each):.1f}" for name, each in by_row.items())
    texts = sum(task.row.texts for task in tasks)
    console.print(
        f"{counted(len(tasks), 'model')}, {workers} at a time; {texts:,} texts by "
        f"{len(tasks[0].row.methods)} methods, and again with shuffled weights: {duration(minutes)} (minutes "
        f"of a model alone: {told}). The same command resumes",
        markup=False,
        highlight=False,
    )


def prepare_process() -> None:
    """Prepare a process that trains and judges beside others."""
    one_thread()
    be_quiet()


def part_of(task: Task, method: str) -> Path:
    """The file of a method's numbers."""
    return task.folder / PARTS / f"{method.replace('/', '+')}.json"


def is_trained(task: Task) -> bool:
    """Whether a model is trained, or is loaded as it is."""
    return task.row.data == LANGUAGE or (task.folder / TRAINED[task.row.data]).is_file()


def perform(task: Task, shared: Shared, tell: Tell) -> dict[str, Any]:
    """Train or load one model, and judge all methods.

    Each method's numbers are stored as soon as they are there, so that an interrupted run goes on.
    """
    row: JudgedRow = task.row
    told = Told(tell, task, shared)
    if not is_trained(task):
        shutil.rmtree(task.folder / PARTS, ignore_errors=True)  # of an earlier training
    model, tokenizer = PREPARE[row.data](task, shared, told.update)
    told.trained()
    model.to(torch_device(task.device)).eval()
    (task.folder / PARTS).mkdir(exist_ok=True)
    texts, tried = judged_texts(row, shared), None
    if row.data == LANGUAGE:
        sentences = held_out_sentences(shared.quick)
        found_by = partial(deciding, model, tokenizer, sentences, row.texts)
        found_once = measure_once(
            task.folder / PARTS / CHOSEN, found_by
        )  # other hardware might choose others
        texts = judged_sentences([sentences[place] for place in found_once["chosen"]])
        tried = found_once["tried"]
    left = [method for method in row.methods if not part_of(task, method).is_file()]
    half, difference = products_of(model, tokenizer, row, shared)
    common: dict[str, Any] = {
        "queries": texts.queries,
        "samples": shared.samples,
        "seed": task.seed,
        "dtype": torch.float16 if half else None,
    }
    truth = None if texts.sentences is None else subjects_of(model, tokenizer, texts.sentences)
    with short_products(task.device) if row.data == REVIEWS else nullcontext():
        copied = AfterShuffling(model, tokenizer, texts.words, left, texts.share, **common)

        def keep(method: str, found: Rationales | str) -> None:
            if isinstance(found, str):
                write_whole(part_of(task, method), json.dumps({"refused": found}))
            else:
                by_text = dict(found.by_text)
                after = copied.correlations(found, progress=told.again)
                if after is not None:
                    by_text[SHUFFLED] = after
                if truth is not None:
                    by_text[GROUND] = subject_first(found.texts, found.scores, truth)
                write_whole(part_of(task, method), json.dumps(plain(found, by_text)))
            told.judged(method)
            leave_memory(task.device)

        if left:  # an earlier run may have been interrupted after the last method
            evaluate(
                model,
                tokenizer,
                texts.words,
                texts.rationales,
                left,
                share=texts.share,
                points=POINTS,
                correlation=True,
                progress=told.scored,
                done=keep,
                **common,
            )
        accuracy = accuracy_of(model, tokenizer, texts)
    parts = {method: json.loads(part_of(task, method).read_text()) for method in row.methods}
    numbers = {
        "accuracy": accuracy,
        "texts": len(texts.words),
        "tried": tried,
        "half": half,
        "half_difference": difference,
        "refused": {method: part["refused"] for method, part in parts.items() if "refused" in part},
        "methods": {method: part for method, part in parts.items() if "refused" not in part},
        "run": run_record(task.settings, task.command, hardware(task.device), versions()),
    }
    finish_run(task.folder, numbers)
    return numbers


def accuracy_of(model: Any, tokenizer: Any, texts: Judged) -> float:
    """The share of whole texts that a classifier gets right."""
    classifier = WordClassifier(model, tokenizer)
    queries = texts.queries or [""] * len(texts.words)
    read = [classifier.read(*each) for each in zip(texts.words, queries, strict=True)]
    answers = classifier.ask([(text, np.ones((1, len(text.words)), dtype=bool)) for text in read])
    return float(np.mean([each[0].argmax() for each in answers] == np.array(texts.labels)))


def plain(found: Rationales, by_text: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
    """A method's numbers as plain JSON."""
    return {
        "seconds": found.seconds,
        "texts": found.texts,
        "by_text": {
            key: [None if math.isnan(value) else round(float(value), DIGITS) for value in values]
            for key, values in by_text.items()
            if key in PROTOCOLS
        },
    }


def products_of(model: Any, tokenizer: Any, row: JudgedRow, shared: Shared) -> tuple[bool, float | None]:
    """Whether long texts are read with float16 products, and how far these move a probability.

    As in Table 8 of Wang et al. 2021: on a GPU, where this moves no probability by more than 0.01.
    """
    if row.data != REVIEWS:
        return False, None
    assert shared.reviews is not None
    assert shared.model is not None
    of_table_8 = ea_rationales.Shared(shared.reviews, tokenizer, shared.model, shared.samples, True)
    dtype, difference = ea_rationales.products_of(model, of_table_8)
    return dtype is not None, difference


class Told:
    """Tells the expected milliseconds of what a task has done."""

    def __init__(self, tell: Tell, task: Task, shared: Shared) -> None:
        self.tell, self.expected, self.told = tell, shared.expected[task.name], 0
        self.updates = 0 if is_trained(task) else int(task.training.updates)
        self.left = [method for method in task.row.methods if not part_of(task, method).is_file()]
        self.begun = self.updates * self.expected.update

    def up_to(self, seconds: float) -> None:
        """Tell what is not yet told."""
        if (more := round(1000 * seconds) - self.told) > 0:
            self.tell(more)
            self.told += more

    def update(self, step: int) -> None:
        """So many updates are done."""
        self.up_to(min(step, self.updates) * self.expected.update)

    def trained(self) -> None:
        """All updates are done, or were saved by early stopping."""
        self.up_to(self.begun)

    def scored(self, words: str, done: int, total: int) -> None:
        """As `evaluate` tells the texts of a method; scores of the model are half of it."""
        if DELETING not in words and self.left:
            self.up_to(self.begun + self.expected.methods[self.left[0]] * done / total / 2)

    def again(self, _words: str, done: int, total: int) -> None:
        """Scores of the copy with shuffled weights are the other half."""
        self.up_to(self.begun + self.expected.methods[self.left[0]] * (1 + done / total) / 2)

    def judged(self, method: str) -> None:
        """A method is done."""
        self.left.remove(method)
        self.begun += self.expected.methods[method]
        self.up_to(self.begun)


def prepare_agreement(task: Task, shared: Shared, told: Callable[[int], object]) -> tuple[Any, Any]:
    """The demo's network."""
    from rich.console import Console

    del told
    train, _ = split(TRAIN, TEST, seed=0)
    model = faithfulness_models.train_grammar(
        task.folder,
        task.row.mechanisms,
        train,
        task.training.updates,
        task.seed,
        shared.request.device,
        Console(quiet=True),
    )
    return model, faithfulness_models.grammar_tokenizer()


def prepare_sentiment(task: Task, shared: Shared, told: Callable[[int], object]) -> tuple[Any, Any]:
    """A pretrained encoder, fine-tuned on SST-2; or loaded, where it has been."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert shared.model is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(shared.model)
    folder, kind = task.folder / rationale_training.MODEL, AutoModelForSequenceClassification
    if is_trained(task):
        model = overt.load(folder) if task.row.mechanisms else kind.from_pretrained(folder)
        return model, tokenizer
    assert shared.sentences is not None
    texts = coded_sentences(shared.sentences[0], tokenizer, task.training)
    model, numbers = trained_by(text_training.train, task, texts, tokenizer, shared.model, told)
    model.save_pretrained(folder)
    write_whole(task.folder / TRAINED[SENTIMENT], json.dumps(numbers))
    return model, tokenizer


def coded_sentences(rows: sst2.Rows, tokenizer: Any, training: TextTraining) -> Texts:
    """SST-2's rows as a training takes them."""
    coded = text_training.encode(
        [glue.Row((text,), label) for text, label in rows], tokenizer, training.longest
    )
    return Texts(coded, {}, glue.TASKS[sst2.SST2].classes)


def prepare_reviews(task: Task, shared: Shared, told: Callable[[int], object]) -> tuple[Any, Any]:
    """A classifier of reviews over windows, as in Table 8 of Wang et al. 2021."""
    from transformers import AutoTokenizer

    assert shared.model is not None
    assert shared.reviews is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(shared.model)
    model, _ = trained_by(rationale_training.train, task, shared.reviews, tokenizer, shared.model, told)
    return model, tokenizer


def trained_by(
    train: Callable[..., tuple[Any, dict[str, Any]]],
    task: Task,
    data: Any,
    tokenizer: Any,
    path: str,
    told: Callable[[int], object],
) -> tuple[Any, dict[str, Any]]:
    """The model of a task, trained by one of the recipes' functions, and the numbers of its training."""
    row, training = task.row, task.training
    return train(task.folder, data, tokenizer, path, row.mechanisms, training, task.seed, task.device, told)


def prepare_language(task: Task, shared: Shared, told: Callable[[int], object]) -> tuple[Any, Any]:
    """A causal language model that chooses the number of a verb."""
    del task, told
    return faithfulness_models.load_verb_number(shared.request.options["language-model"])


Untrained = tuple[Any, Any, Callable[[], float]]


def untrained_agreement(task: Task, shared: Shared) -> Untrained:
    """The demo's network, its tokenizer, and a function that gives the seconds of an update."""
    del shared
    model = faithfulness_models.grammar_classifier(task.row.mechanisms)
    train, _ = split(grammar_training.BATCH * (TIMED + 1), 1, seed=0)
    return (
        model,
        faithfulness_models.grammar_tokenizer(),
        lambda: faithfulness_models.update_seconds(model, train, torch_device(task.device)),
    )


def untrained_sentiment(task: Task, shared: Shared) -> Untrained:
    """As `untrained_agreement`, of SST-2."""
    from transformers import AutoTokenizer

    assert shared.model is not None
    assert shared.sentences is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(shared.model)
    some = shared.sentences[0][: task.training.batch * (TIMED + 1)]
    texts = coded_sentences(some, tokenizer, task.training)
    path, mechanisms, training = shared.model, task.row.mechanisms, task.training
    model = text_training.attached(path, texts, mechanisms, training, 0)

    def update() -> float:
        times = text_training.step_times(texts, tokenizer, path, mechanisms, training, task.device, TIMED)
        return min(times) / 1000

    return model, tokenizer, update


def untrained_reviews(task: Task, shared: Shared) -> Untrained:
    """As `untrained_agreement`, of reviews."""
    from transformers import AutoTokenizer

    assert shared.model is not None
    assert shared.reviews is not None
    reviews, path, mechanisms, training = shared.reviews, shared.model, task.row.mechanisms, task.training
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model = rationale_training.network(path, len(reviews.classes), mechanisms, training, 0)

    def update() -> float:
        times = rationale_training.step_times(
            reviews, tokenizer, path, mechanisms, training, task.device, TIMED
        )
        return min(times) / 1000

    return model, tokenizer, update


def untrained_language(task: Task, shared: Shared) -> Untrained:
    """As `untrained_agreement`, of the language model, which is not trained."""
    return *prepare_language(task, shared, lambda _: None), lambda: 0.0


UNTRAINED: dict[str, Callable[[Task, Shared], Untrained]] = {
    AGREEMENT: untrained_agreement,
    SENTIMENT: untrained_sentiment,
    REVIEWS: untrained_reviews,
    LANGUAGE: untrained_language,
}
PREPARE: dict[str, Callable[[Task, Shared, Callable[[int], object]], tuple[Any, Any]]] = {
    AGREEMENT: prepare_agreement,
    SENTIMENT: prepare_sentiment,
    REVIEWS: prepare_reviews,
    LANGUAGE: prepare_language,
}


def held_out_sentences(quick: bool) -> list[Sentence]:
    """Sentences of the grammar that no network is trained on, whose subject has a number to flip."""
    _, test = split(TRAIN, TEST, seed=0)
    known = [sentence for sentence in test if len(sentence.subject) == 1]
    if quick:
        known = [sentence for sentence in known if 5 <= len(sentence.tokens) <= QUICK_WORDS]
    return known


def judged_sentences(sentences: list[Sentence]) -> Judged:
    """Sentences of the grammar as texts."""
    labels = [int(sentence.plural) for sentence in sentences]
    return Judged([sentence.tokens for sentence in sentences], labels, sentences=sentences)


def deciding(model: Any, tokenizer: Any, sentences: Sequence[Sentence], most: int) -> dict[str, Any]:
    """The first sentences that a model answers rightly because of the subject, as `subjects_of` shows.

    A language model was not trained on the grammar, and knows the number of few of its verbs.

    Returns the places of those sentences, and how many were tried to find them.
    """
    chosen: list[int] = []
    tried = 0
    while tried < len(sentences) and len(chosen) < most:
        some = sentences[tried : tried + TRIED]
        truth = subjects_of(model, tokenizer, some)
        places = [tried + place for place, subject in enumerate(truth) if subject is not None]
        missing = most - len(chosen)
        tried = places[missing - 1] + 1 if len(places) >= missing else tried + len(some)
        chosen += places[:missing]
    if len(chosen) < 2:
        raise ValueError(
            f"the language model must decide at least 2 sentences by their subject, got {len(chosen)} of "
            f"{tried}: give a better one as --language-model"
        )
    return {"chosen": chosen, "tried": tried}


def judged_texts(row: JudgedRow, shared: Shared) -> Judged:
    """The texts of a row, the same for all its forms and seeds; of the language model, before it chooses."""
    if row.data in (AGREEMENT, LANGUAGE):
        return judged_sentences(held_out_sentences(shared.quick)[: row.texts])
    if row.data == SENTIMENT:
        assert shared.sentences is not None
        rows = list(shared.sentences[1])
        Random(0).shuffle(rows)
        some = rows[: row.texts]
        return Judged([tuple(text.split()) for text, _ in some], [label for _, label in some])
    assert shared.reviews is not None
    tests = shared.reviews.splits["test"]
    places = np.linspace(0, len(tests) - 1, min(row.texts, len(tests))).round().astype(int)
    reviews = [tests[place] for place in places]
    return Judged(
        [review.words for review in reviews],
        [review.label for review in reviews],
        [review.query for review in reviews],
        [review.evidence for review in reviews],
        share=shared.reviews.share("train"),
    )


def subjects_of(model: Any, tokenizer: Any, sentences: Sequence[Sentence]) -> list[int | None]:
    """The place of the word that decides, where the model shows that it does; None elsewhere.

    It does where the answer is right, and becomes the other when the subject's number alone is flipped.
    """
    classifier = WordClassifier(model, tokenizer)
    answers = []
    for version in (list(sentences), [flipped(sentence) for sentence in sentences]):
        read = [classifier.read(sentence.tokens) for sentence in version]
        asked = [(text, np.ones((1, len(text.words)), dtype=bool)) for text in read]
        answers.append([int(found[0].argmax()) for found in classifier.ask(asked)])
    return [
        sentence.subject[0] if before == sentence.plural and after != before else None
        for sentence, before, after in zip(sentences, *answers, strict=True)
    ]


def subject_first(
    numbers: Sequence[int], scores: Sequence[NDArray[np.float64]], truth: Sequence[int | None]
) -> NDArray[np.float64]:
    """1 where the deciding word has the highest score, a share of it where several have, (texts,)."""
    found = np.full(len(numbers), np.nan)
    for place, (number, values) in enumerate(zip(numbers, scores, strict=True)):
        subject = truth[number]
        if subject is not None:
            best = values == values.max()
            found[place] = best[subject] / best.sum()
    return found


FAITHFULNESS = Recipe(
    name="faithfulness",
    title="Which explanation to believe",
    paper="no paper's table",
    published={},
    run=run,
    report=report,
    seeds=3,
    folder="faithfulness",
    options={
        "quick": Option("a trial of a few minutes on a CPU: the demo's networks, a few short texts", False),
        "rows": Option("models to judge, separated by commas; by default all that can be", moves=False),
        "examples": Option("texts of each model, instead of 300 to 360 (100 movie reviews)", least=2),
        "steps": Option("updates of each training, instead of the usual numbers", least=1),
        "lime-samples": Option(f"texts that LIME asks about, for each text; {SAMPLES} by default", least=10),
        "trained": Option(
            "folder of ea-table-8's runs, whose classifiers of movie reviews are judged rather than trained "
            "again",
            moves=False,
        ),
        "language-model": Option("a causal language model, a folder or a name on the hub", moves=False),
        "workers": WORKERS,
    },
    draw=draw,
)
