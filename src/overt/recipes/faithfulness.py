"""Which explanation to believe: every method of the package, by every protocol, on several models.

No paper's table. Classifiers are trained with plain, evolving and random attention, or loaded. Each method
says how much each word of a text matters, and protocols say how far that is so: what deleting words does, how
the words rank by blank-out, whether anything is left when the weights are shuffled, whether people marked the
words, and whether the word that is known to decide comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import overt
from overt._extras import need
from overt._workers import Tell, cores, side_by_side
from overt.data import eraser, glue, planted, sst2
from overt.data.agreement import Sentence, flipped, split
from overt.data.files import data_folder
from overt.judge.correlation import spearman
from overt.judge.intervals import Interval, interval_over
from overt.judge.rationales.evaluation import DELETING, evaluate
from overt.judge.rationales.methods import (
    CONTROLS,
    EXTRA,
    ORACLE,
    RANDOM,
    SAMPLES,
    every_method,
    title_of,
)
from overt.judge.rationales.randomising import correlations_after_shuffling
from overt.judge.rationales.words import WordClassifier
from overt.mechanisms.mechanism import Mechanism
from overt.recipes import ea_rationales, faithfulness_models, forms, rationale_training, text_training
from overt.recipes._figures import save_figure
from overt.recipes._recipe import WORKERS, Grid, Option, Outcome, Recipe, Report, Request, cell
from overt.recipes._rows import Task, folder_name, look_up, settings_of
from overt.recipes._runs import finish_run, finished, run_record
from overt.recipes._training import be_quiet, hardware, one_thread, progress_bar, torch_device, versions
from overt.recipes.rationale_training import RationaleTraining, Reviews
from overt.recipes.text_training import Texts, TextTraining
from overt.recipes.understanding_runs import leave_out, listed, model_name, pretrained

if TYPE_CHECKING:
    from numpy.typing import NDArray

PLAIN = "plain"
AGREEMENT, SENTIMENT, REVIEWS, LANGUAGE = "agreement", "SST-2", "movie reviews", "language model"
FORMS: dict[str, dict[str, tuple[Mechanism, ...]]] = {
    AGREEMENT: {name: forms.FORMS[name] for name in (PLAIN, "evolving", "Bayesian")},
    SENTIMENT: ea_rationales.FORMS,
    REVIEWS: ea_rationales.FORMS,
    LANGUAGE: {PLAIN: ()},
}
TEXTS = {AGREEMENT: 300, SENTIMENT: 300, REVIEWS: 100, LANGUAGE: 300}
QUICK_TEXTS = {AGREEMENT: 8, REVIEWS: 6}
QUICK_FORMS = {AGREEMENT: (PLAIN, "evolving"), REVIEWS: (PLAIN,)}
QUICK_NAMES = {REVIEWS: "planted reviews"}  # of what stands in for data
QUICK_WORDS = 9  # of the longest sentence
QUICK_SAMPLES = 100  # of LIME
TRAIN, TEST = 16_000, 2_000  # sentences of the grammar, as in the demo
STEPS, QUICK_STEPS = 280, 150
SENTIMENT_UPDATES = 2_100  # about an epoch
POINTS = 6  # of curves
DIGITS = 4  # of stored numbers
GROUND, SHUFFLED, PLAUSIBLE = "ground_truth", "randomised", "average_precision"
# Key → heading, and whether more (1) or less (−1) is better; 0 for what should be near 0.
PROTOCOLS: dict[str, tuple[str, int]] = {
    "comprehensiveness": ("comprehensiveness ↑", 1),
    "sufficiency": ("sufficiency ↓", -1),
    "between": ("LeRF − MoRF ↑", 1),
    "normalised_comprehensiveness": ("normalised AOPC ↑", 1),
    "correlation": ("ρ with blank-out ↑", 1),
    SHUFFLED: ("ρ with shuffled weights → 0", 0),
    PLAUSIBLE: ("plausibility (AP) ↑", 1),
    GROUND: ("subject first ↑", 1),
}
# Is a gain that of the method or of the maps that it reads?
PAIRS = (
    ("rollout", "raw"),
    ("flow", "rollout"),
    ("rollout/gradient", "rollout"),
    ("flow/gradient", "flow"),
    ("flow/gradient", "rollout/gradient"),
    ("rollout/relevance", "rollout/gradient"),
    ("rollout/alti", "rollout"),
    ("rollout/alti", "rollout/norm"),
    ("rollout/alti", "value-zeroing"),
    ("integrated", "gradient-input"),
    ("rollout", RANDOM),
)


@dataclass(frozen=True)
class JudgedRow:
    """A model whose explanations are judged.

    Attributes:
        data: what it reads: a key of `FORMS`.
        form: of its attention.
        mechanisms: of its attention.
        methods: that are judged.
        texts: how many.
    """

    data: str
    form: str
    mechanisms: tuple[Mechanism, ...]
    methods: tuple[str, ...]
    texts: int

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
    """

    words: list[tuple[str, ...]]
    labels: list[int]
    queries: list[str] | None = None
    rationales: list[Any] | None = None
    sentences: list[Sentence] | None = None


class Shared(NamedTuple):
    """What all rows need."""

    request: Any
    model: str | None
    reviews: Reviews | None
    samples: int

    @property
    def quick(self) -> bool:
        """Whether it is a trial."""
        return bool(self.request.options["quick"])


def rows_of(quick: bool) -> dict[str, JudgedRow]:
    """All rows by name; those of a trial are a few of them, with few texts."""
    texts, names = (QUICK_TEXTS, QUICK_NAMES) if quick else (TEXTS, {})
    return {
        f"{names.get(data, data)} {form}": JudgedRow(data, form, mechanisms, every_method(), texts[data])
        for data in texts
        for form, mechanisms in FORMS[data].items()
        if not quick or form in QUICK_FORMS[data]
    }


def run(request: Request) -> Outcome:
    """Train and judge what is not there, and compare."""
    for module in ("accelerate", "lime.lime_text", "captum.attr"):
        need(module, EXTRA)
    be_quiet()
    request = replace(request, stored={}, elsewhere=())  # texts' own numbers are in the run's folder alone
    quick = bool(request.options["quick"])
    rows = rows_of(quick)
    absent = {} if quick else missing(request)
    for data, reason in absent.items():
        leave_out(request, data, reason)
    there = [name for name, row in rows.items() if row.data not in absent]
    chosen = listed("--rows", request.options["rows"], list(rows), there)
    for name in chosen:
        if rows[name].data in absent:
            raise ValueError(f"--rows {name} cannot be measured: {absent[rows[name].data]}")
    shared = shared_by(request, {rows[name].data for name in chosen})
    device = torch_device(request.device).type
    place = request.out / ("quick" if quick else "full")
    seeds = 1 if quick else request.seeds
    counts = {name: 1 if row.data == LANGUAGE else seeds for name, row in rows.items()}
    common = common_settings(shared)
    plan = training_of(shared)
    known = look_up(request, rows, chosen, place, common, lambda row: plan[row.data], device, counts)
    numbers = dict(known.numbers)
    for name, row in rows.items():  # finished by earlier commands
        for seed in range(counts[name]):
            folder = place / folder_name(name) / f"seed-{seed}"
            settings = {**common, "row": row.settings(), "seed": seed}
            if name not in chosen and (found := finished(folder, settings)) is not None:
                numbers[name, seed] = found
    numbers |= judge_all(known.tasks, shared, request)
    by_row = {
        name: {seed: numbers[name, seed] for seed in range(counts[name]) if (name, seed) in numbers}
        for name in rows
    }
    by_row = {name: found for name, found in by_row.items() if found}
    config = {
        "rows": {name: rows[name].settings() for name in by_row},
        "protocols": list(PROTOCOLS),
        "lime_samples": shared.samples,
        "models": common["models"],
        "steps": {data: plan[data].updates for data in plan},
        "quick": quick,
        "cells": {name: cells_of(found) for name, found in by_row.items()},
        "pairs": {name: pairs_of(found) for name, found in by_row.items()},
        "refused": {name: next(iter(found.values()))["refused"] for name, found in by_row.items()},
        "seconds": {name: seconds_of(found) for name, found in by_row.items()},
    }
    per_seed: dict[int, dict[str, Any]] = {}
    for name, by_seed in by_row.items():
        for seed, found in by_seed.items():
            few = {key: found[key] for key in ("accuracy", "texts", "run")}
            per_seed.setdefault(seed, {})[name] = {**few, "means": means_of(found)}
    return Outcome(config, per_seed, stand_in=quick or len(by_row) < len(rows))


def missing(request: Request) -> dict[str, str]:
    """Data that cannot be judged → why."""
    found: dict[str, str] = {}
    if request.model is None:
        found |= dict.fromkeys((SENTIMENT, REVIEWS), "it needs --model, a pretrained encoder")
    if data_folder(request.data) is None:
        found |= dict.fromkeys((SENTIMENT, REVIEWS), "it needs --data, a folder with its files")
    if request.options["language-model"] is None:
        found[LANGUAGE] = "it needs --language-model, a causal language model"
    return found


def shared_by(request: Request, data: set[str]) -> Shared:
    """Read what the chosen rows need."""
    quick = bool(request.options["quick"])
    reviews, model = None, request.model
    if quick and REVIEWS in data:
        reviews = Reviews("planted reviews", planted.planted_reviews(), eraser.CLASSES, True)
        model = rationale_training.small_encoder(request.out / "encoder", planted.vocabulary())
    elif REVIEWS in data:
        reviews = Reviews(REVIEWS, eraser.load_movies(request.data), eraser.CLASSES, False)
    if not quick and data & {SENTIMENT, REVIEWS}:
        model = pretrained(request)
    alone = replace(request, console=None)  # type: ignore[arg-type]  # other processes have their own
    return Shared(alone, model, reviews, QUICK_SAMPLES if quick else SAMPLES)


def training_of(shared: Shared) -> dict[str, Any]:
    """Settings of the trainings, by data."""
    steps = QUICK_STEPS if shared.quick else STEPS
    plan: dict[str, Any] = {
        AGREEMENT: TextTraining(steps, faithfulness_models.BATCH, faithfulness_models.LEARNING_RATE),
        SENTIMENT: TextTraining(SENTIMENT_UPDATES, learning_rate=5e-5, warmup=30, longest=64),
        LANGUAGE: TextTraining(0),
    }
    if shared.reviews is not None:
        plan[REVIEWS] = ea_rationales.plan(shared.reviews, shared.quick, None)
    else:
        plan[REVIEWS] = RationaleTraining(0)
    return plan


def common_settings(shared: Shared) -> dict[str, Any]:
    """What all numbers depend on, beside their row and seed."""
    language = shared.request.options["language-model"]
    return {
        "version": overt.__version__,
        "models": {
            "encoder": "small" if shared.quick or shared.model is None else model_name(shared.model),
            "language model": None if language is None else model_name(language),
        },
        "training": {data: plan.settings() for data, plan in training_of(shared).items()},
        "data": None if shared.reviews is None else shared.reviews.sha256,
        "lime_samples": shared.samples,
        "points": POINTS,
    }


# --- Measure ---


def judge_all(tasks: Sequence[Task], shared: Shared, request: Request) -> dict[tuple[str, int], Any]:
    """Train and judge, several models at a time; an interrupted run goes on with the models that are left."""
    if not tasks:
        return {}
    console, numbers = request.console, {}
    most = 8 if torch_device(request.device).type == "cuda" else 2 if shared.quick else 1
    workers = min(request.options["workers"] or min(most, cores()), len(tasks))
    texts = sum(task.row.texts for task in tasks)
    console.print(
        f"{len(tasks)} models, {workers} at a time; {texts:,} texts by {len(every_method())} methods, and "
        "again with shuffled weights. The bar tells how long it takes; the same command resumes"
    )
    with progress_bar(console) as progress:
        bar = progress.add_task("training and judging", total=sum(steps_of(task) for task in tasks))

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


def prepare_process() -> None:
    """Prepare a process that trains and judges beside others."""
    one_thread()
    be_quiet()


def steps_of(task: Task) -> int:
    """Steps that a task tells: its updates, and scores of texts, once more with shuffled weights."""
    return int(task.training.updates) + 2 * len(task.row.methods) * int(task.row.texts)


def perform(task: Task, shared: Shared, tell: Tell) -> dict[str, Any]:
    """Train or load one model, judge all methods, and store the numbers of each text."""
    told = Steps(tell)
    model, tokenizer = PREPARE[task.row.data](task, shared, told)
    told.up_to(task.training.updates)
    model.to(torch_device(task.device)).eval()
    texts = judged_texts(task.row, shared)
    found = evaluate(
        model,
        tokenizer,
        texts.words,
        texts.rationales,
        list(task.row.methods),
        queries=texts.queries,
        labels=texts.labels,
        points=POINTS,
        samples=shared.samples,
        seed=task.seed,
        correlation=True,
        progress=told.scores,
    )
    told.up_to(steps_of(task) - len(task.row.methods) * task.row.texts)
    by_text = {name: dict(each.by_text) for name, each in found.methods.items()}
    left = correlations_after_shuffling(
        found,
        model,
        tokenizer,
        texts.words,
        queries=texts.queries,
        samples=shared.samples,
        seed=task.seed,
        progress=lambda _what, _done, _of: told.up_to(told.told + 1),
    )
    for name, values in left.items():
        by_text[name][SHUFFLED] = values
    if texts.sentences is not None:
        truth = subjects_of(model, tokenizer, texts.sentences)
        for name, each in found.methods.items():
            by_text[name][GROUND] = subject_first(each.texts, each.scores, truth)
    told.up_to(steps_of(task))
    numbers = {
        "accuracy": found.performance["accuracy"],
        "texts": found.texts,
        "refused": found.refused,
        "methods": {
            name: {
                "seconds": each.seconds,
                "texts": each.texts,
                "by_text": {
                    key: [None if math.isnan(value) else round(float(value), DIGITS) for value in values]
                    for key, values in by_text[name].items()
                    if key in PROTOCOLS
                },
            }
            for name, each in found.methods.items()
        },
        "run": run_record(task.settings, task.command, hardware(task.device), versions()),
    }
    finish_run(task.folder, numbers)
    return numbers


class Steps:
    """Tells the steps of a task, each once, whatever order they come in."""

    def __init__(self, tell: Tell) -> None:
        self.tell, self.told, self.scored = tell, 0, 0

    def __call__(self, step: int) -> None:
        """Take note that so many steps of all are done."""
        self.up_to(step)

    def up_to(self, step: int) -> None:
        """Tell what is not yet told."""
        if step > self.told:
            self.tell(step - self.told)
            self.told = step

    def scores(self, words: str, done: int, total: int) -> None:
        """As `evaluate` tells the texts of a method; what follows its scores is quick or is not counted."""
        del done, total
        if DELETING not in words and "," not in words:
            self.up_to(self.told + 1)


def prepare_agreement(task: Task, shared: Shared, told: Steps) -> tuple[Any, Any]:
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


def prepare_sentiment(task: Task, shared: Shared, told: Steps) -> tuple[Any, Any]:
    """A pretrained encoder, fine-tuned on SST-2; or loaded, where it has been."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    assert shared.model is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(shared.model)
    folder, kind = task.folder / "model", AutoModelForSequenceClassification
    if (task.folder / "trained").is_file():
        model = overt.load(folder) if task.row.mechanisms else kind.from_pretrained(folder)
        return model, tokenizer
    rows, _, _ = sst2.load_rows(shared.request.data, seed=0)
    coded = text_training.encode(
        [glue.Row((text,), label) for text, label in rows], tokenizer, task.training.longest
    )
    texts = Texts(coded, {}, glue.TASKS[sst2.SST2].classes)
    model, _ = text_training.train(
        task.folder,
        texts,
        tokenizer,
        shared.model,
        task.row.mechanisms,
        task.training,
        task.seed,
        task.device,
        told,
    )
    model.save_pretrained(folder)
    (task.folder / "trained").touch()
    return model, tokenizer


def prepare_reviews(task: Task, shared: Shared, told: Steps) -> tuple[Any, Any]:
    """A classifier of reviews over windows, as in Table 8 of Wang et al. 2021."""
    from transformers import AutoTokenizer

    assert shared.model is not None
    assert shared.reviews is not None
    tokenizer: Any = AutoTokenizer.from_pretrained(shared.model)
    model, _ = rationale_training.train(
        task.folder,
        shared.reviews,
        tokenizer,
        shared.model,
        task.row.mechanisms,
        task.training,
        task.seed,
        task.device,
        told,
    )
    return model, tokenizer


def prepare_language(task: Task, shared: Shared, told: Steps) -> tuple[Any, Any]:
    """A causal language model that chooses the number of a verb."""
    del task, told
    return faithfulness_models.load_verb_number(shared.request.options["language-model"])


PREPARE: dict[str, Callable[[Task, Shared, Steps], tuple[Any, Any]]] = {
    AGREEMENT: prepare_agreement,
    SENTIMENT: prepare_sentiment,
    REVIEWS: prepare_reviews,
    LANGUAGE: prepare_language,
}


def judged_texts(row: JudgedRow, shared: Shared) -> Judged:
    """The texts of a row, the same for all its forms and seeds."""
    if row.data in (AGREEMENT, LANGUAGE):
        _, test = split(TRAIN, TEST, seed=0)
        known = [sentence for sentence in test if len(sentence.subject) == 1]  # whose number can be flipped
        if shared.quick:
            known = [sentence for sentence in known if 5 <= len(sentence.tokens) <= QUICK_WORDS]
        known = known[: row.texts]
        labels = [int(sentence.plural) for sentence in known]
        return Judged([sentence.tokens for sentence in known], labels, sentences=known)
    if row.data == SENTIMENT:
        _, rows, _ = sst2.load_rows(shared.request.data, seed=0)
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


# --- Compare ---


def table_of(
    found: Mapping[int, dict[str, Any]], protocol: str, methods: Sequence[str]
) -> dict[str, NDArray[np.float64]]:
    """Method → (seeds, texts) of the texts for which all of these methods have a value, NaN elsewhere."""
    tables = {}
    for method in methods:
        table = np.full((len(found), max(numbers["texts"] for numbers in found.values())), np.nan)
        for row, numbers in enumerate(found.values()):
            of_method = numbers["methods"].get(method)
            if of_method is not None and protocol in of_method["by_text"]:
                values = [math.nan if value is None else value for value in of_method["by_text"][protocol]]
                table[row, of_method["texts"]] = values
        tables[method] = table
    known = np.logical_and.reduce([~np.isnan(table) for table in tables.values()])
    return {method: np.where(known, table, np.nan) for method, table in tables.items()}


def compared(found: Mapping[int, dict[str, Any]], protocol: str) -> list[str]:
    """Methods that a protocol compares: those that have a value for at least half as many texts as any."""
    counts: dict[str, int] = {}
    for numbers in found.values():
        for method, each in numbers["methods"].items():
            values = each["by_text"].get(protocol, ())
            counts[method] = counts.get(method, 0) + sum(value is not None for value in values)
    most = max(counts.values(), default=0)
    return [method for method, count in counts.items() if count and count >= most / 2 and method != ORACLE]


def cells_of(found: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Protocol → method → mean, low, high, texts, skipped texts and seeds.

    All methods are compared on the same texts; the best order on those of them that it has.
    """
    total = max(numbers["texts"] for numbers in found.values())
    cells: dict[str, dict[str, list[float]]] = {}
    for protocol in PROTOCOLS:
        methods = compared(found, protocol)
        if not methods:
            continue
        tables = table_of(found, protocol, methods)
        if any(ORACLE in numbers["methods"] for numbers in found.values()) and protocol != SHUFFLED:
            tables[ORACLE] = table_of(found, protocol, [*methods, ORACLE])[ORACLE]
        intervals = {method: interval_over(table) for method, table in tables.items()}
        cells[protocol] = {
            method: [*each[:4], total - each.texts, each.seeds]
            for method, each in intervals.items()
            if each.texts
        }
    return cells


def pairs_of(found: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Protocol → "one − other" → mean difference, low, high, texts and seeds, over the texts of both."""
    pairs: dict[str, dict[str, list[float]]] = {}
    for protocol in PROTOCOLS:
        for one, other in PAIRS:
            tables = table_of(found, protocol, [one, other])
            each: Interval = interval_over(tables[one] - tables[other])
            if each.texts:
                pairs.setdefault(protocol, {})[f"{title_of(one)} − {title_of(other)}"] = list(each)
    return pairs


def means_of(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Protocol → method → mean over the same texts, of one model."""
    return {
        protocol: {method: values[0] for method, values in methods.items()}
        for protocol, methods in cells_of({0: found}).items()
    }


def seconds_of(found: Mapping[int, dict[str, Any]]) -> dict[str, float]:
    """Method → seconds of a text, the median over models."""
    methods = dict.fromkeys(method for numbers in found.values() for method in numbers["methods"])
    return {
        method: float(np.median([numbers["methods"][method]["seconds"] for numbers in found.values()]))
        for method in methods
        if all(method in numbers["methods"] for numbers in found.values())
    }


def ranks_of(cells: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Protocol → method → rank from 1, the best, on; equal means share a rank. Controls have none."""
    from scipy.stats import rankdata  # type: ignore[import-untyped, unused-ignore]

    found = {}
    for protocol, methods in cells.items():
        sign = PROTOCOLS[protocol][1]
        names = [method for method in methods if method not in CONTROLS]
        means = np.array([methods[name][0] for name in names])
        keys = np.abs(means) if sign == 0 else -sign * means
        found[protocol] = dict(zip(names, rankdata(keys).tolist(), strict=True))
    return found


# --- Report ---


def order_of(config: Mapping[str, Any]) -> dict[str, tuple[float, dict[str, float]]]:
    """Method → its mean rank over protocols, and by protocol over models; the best first.

    Shuffled weights do not count: a method must not be deaf to them, but is no better for it.
    """
    ranks: dict[str, dict[str, list[float]]] = {}
    for cells in config["cells"].values():
        for protocol, methods in ranks_of(cells).items():
            for method, rank in methods.items():
                ranks.setdefault(method, {}).setdefault(protocol, []).append(rank)
    found = {}
    for method, by_protocol in ranks.items():
        means = {protocol: float(np.mean(values)) for protocol, values in by_protocol.items()}
        counted = [mean for protocol, mean in means.items() if PROTOCOLS[protocol][1] != 0]
        found[method] = (float(np.mean(counted)) if counted else math.nan, means)
    return dict(sorted(found.items(), key=lambda item: (math.isnan(item[1][0]), item[1][0])))


def overview(config: Mapping[str, Any]) -> Grid:
    """Mean ranks by protocol, and what a method costs."""
    order = order_of(config)
    shown = [key for key in PROTOCOLS if any(key in cells for cells in config["cells"].values())]
    lines = []
    for method, (rank, means) in order.items():
        seconds = [each[method] for each in config["seconds"].values() if method in each]
        models = sum(any(method in found for found in cells.values()) for cells in config["cells"].values())
        cells = [cell(means.get(key), digits=1) for key in shown]
        time = f"{1000 * float(np.median(seconds)):,.0f}" if seconds else "–"
        lines.append((title_of(method), [cell(rank, digits=1), *cells, time, str(models)]))
    headings = [PROTOCOLS[key][0].removesuffix(" ↑").removesuffix(" ↓") for key in shown]
    title = "Rank of each method (1 is the best), mean over models, and its cost"
    return Grid(title, ["all", *headings, "ms a text", "models"], lines)


def row_grid(config: Mapping[str, Any], name: str) -> Grid:
    """All methods and protocols of a model, with intervals."""
    cells = config["cells"][name]
    methods = [*order_of(config), *CONTROLS]
    shown = [key for key in PROTOCOLS if key in cells]
    counts = []
    for key in shown:
        first = cells[key].get(RANDOM) or next(iter(cells[key].values()))
        counts.append(f"{first[3]:.0f} ({first[4]:.0f})")
    lines = [("texts (skipped)", [*counts, ""])]
    refused = config["refused"][name]
    for method in methods:
        if method in refused:
            lines.append((title_of(method), ["–"] * (len(shown) + 1)))
            continue
        seconds = config["seconds"][name].get(method)
        time = "–" if seconds is None else f"{1000 * seconds:,.0f}"
        values = [_with_interval(cells[key].get(method)) for key in shown]
        lines.append((title_of(method), [*values, time]))
    row = config["rows"][name]
    seeds = max(int(values[5]) for found in cells.values() for values in found.values())
    title = f"{name}: {row['texts']} texts, {seeds} model{'s' if seeds > 1 else ''}"
    return Grid(title, [*(PROTOCOLS[key][0] for key in shown), "ms a text"], lines)


def _with_interval(values: Sequence[float | None] | None) -> str:
    if values is None or values[0] is None:
        return "–"
    mean, low, high = values[:3]
    if low is None or high is None or math.isnan(low):
        return cell(mean)
    return f"{cell(mean)} [{cell(low)}, {cell(high)}]"


def pairs_grid(config: Mapping[str, Any], name: str) -> Grid:
    """Paired differences of a model."""
    pairs = config["pairs"][name]
    shown = [key for key in PROTOCOLS if key in pairs and key != SHUFFLED]
    names = dict.fromkeys(pair for key in shown for pair in pairs[key])
    lines = [(pair, [_with_interval(pairs[key].get(pair)) for key in shown]) for pair in names]
    return Grid(f"{name}: differences on the same texts", [PROTOCOLS[key][0] for key in shown], lines)


def report(outcome: Outcome) -> Report:
    """The overview, and every model's methods and differences."""
    config = outcome.config
    grids = [overview(config)]
    for name in config["cells"]:
        grids += [row_grid(config, name), pairs_grid(config, name)]
    return Report([grid for grid in grids if grid.rows], notes_of(outcome))


def disagreements(config: Mapping[str, Any]) -> list[str]:
    """How far protocols order methods alike: the rank correlation of each two, over methods and models."""
    pairs: dict[tuple[str, str], list[float]] = {}
    for cells in config["cells"].values():
        ranks = ranks_of(cells)
        keys = [key for key in PROTOCOLS if key in ranks and PROTOCOLS[key][1] != 0]
        for place, one in enumerate(keys):
            for other in keys[place + 1 :]:
                both = [method for method in ranks[one] if method in ranks[other]]
                values = [np.array([ranks[key][method] for method in both]) for key in (one, other)]
                pairs.setdefault((one, other), []).append(float(spearman(values[0][None], values[1])[0]))
    means = {pair: float(np.nanmean(values)) for pair, values in pairs.items() if not np.isnan(values).all()}
    if not means:
        return []
    low, high = min(means, key=lambda pair: means[pair]), max(means, key=lambda pair: means[pair])

    def told(pair: tuple[str, str]) -> str:
        one, other = (PROTOCOLS[key][0].rstrip(" ↑↓") for key in pair)
        return f"{one} and {other} ({cell(means[pair])})"

    return [
        f"Protocols do not agree alike on the order of methods. Rank correlation over methods, mean over "
        f"models: most for {told(high)}, least for {told(low)}."
    ]


def notes_of(outcome: Outcome) -> list[str]:
    """What a reader needs to know."""
    config = outcome.config
    notes = [
        "Words are deleted and the text is tokenized again; always the class that is predicted from the "
        "whole text. Comprehensiveness and sufficiency are means over 1, 5, 10, 20 and 50 % of the words. "
        f"LeRF − MoRF is the mean distance of both curves at {POINTS} points. Normalised AOPC is 0 for the "
        "worst and 1 for the best order, of texts up to 30 words. ρ is Spearman's: with absolute blank-out, "
        "which is 1 for absolute blank-out itself; and with the same method's scores on a copy of the model "
        "whose weights are shuffled, which should be near 0. Plausibility is average precision against "
        "people's rationales: agreement with people, not with the model.",
        "Subject first: the share of sentences in which the subject's noun has the highest score, of those "
        "that the model gets right and whose answer flips when the subject's number alone is flipped, so "
        "that this word is known to decide.",
        "[ ] are 95 % intervals for other texts and, with several models, other seeds: the half-width is "
        "√(a² + b²), a of Student's interval of the models' means and b of the texts' means. All methods of "
        "a column are compared on the same texts, those for which each has a value; “skipped” are the "
        "others. A method that has a value for fewer than half of the texts is in no comparison of its "
        "column. The best order is on those of these texts that have up to 30 words, and is the best for "
        "the normalised AOPC alone.",
        "Ranks are of means, without intervals: neighbours often do not differ. A method has ranks of the "
        "models that it applies to, “models” of them, so that methods with other numbers of models had other "
        "rivals. “all” is the mean over protocols without that of shuffled weights. Controls have no rank.",
        "ms a text is the median time of one text's scores, alone, on the hardware of the run; for methods "
        "that read maps it includes the trace.",
        *disagreements(config),
    ]
    if config["quick"]:
        notes.append(
            "A trial on a few short texts of generated data, with one model of each form: it shows that "
            "everything runs, and its intervals show how little it says."
        )
    reasons: dict[str, dict[str, list[str]]] = {}
    for name, refused in config["refused"].items():
        for method, reason in refused.items():
            reasons.setdefault(reason, {}).setdefault(name, []).append(title_of(method))
    for reason, by_row in reasons.items():
        told = "; ".join(f"{name}: {', '.join(methods)}" for name, methods in by_row.items())
        notes.append(f"–, not applicable, and in no comparison: {told} ({reason}).")
    return notes


def draw(outcome: Outcome, path: Path) -> None:
    """Methods by mean rank against protocols, a row of panels for each data set, a colour for each form."""
    need("matplotlib", "view")
    from matplotlib.figure import Figure

    config = outcome.config
    methods = [*order_of(config), *CONTROLS]
    by_data: dict[str, list[str]] = {}
    for name in config["cells"]:
        by_data.setdefault(name.removesuffix(f" {config['rows'][name]['form']}"), []).append(name)
    shown = [key for key in PROTOCOLS if any(key in cells for cells in config["cells"].values())]
    size = (3.0 + 1.9 * len(shown), 0.8 + 0.2 * len(methods) * len(by_data))
    figure: Any = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(by_data), len(shown), squeeze=False, sharey=True)
    for panels, (data, names) in zip(axes, by_data.items(), strict=True):
        for axis, key in zip(panels, shown, strict=True):
            for place, name in enumerate(names):
                found = config["cells"][name].get(key, {})
                for height, method in enumerate(methods):
                    if method not in found:
                        continue
                    mean, low, high = (math.nan if value is None else value for value in found[method][:3])
                    y = height + 0.25 * (place - (len(names) - 1) / 2)
                    axis.plot([low, high], [y, y], color=f"C{place}", linewidth=1)
                    axis.plot([mean], [y], "o", color=f"C{place}", markersize=2.5)
            if any(key in config["cells"][name] for name in names):
                if panels is axes[0] or not axis.get_title():
                    axis.set_title(PROTOCOLS[key][0], fontsize=8)
                axis.grid(axis="y", linewidth=0.3)
                axis.tick_params(labelsize=7)
            else:
                axis.set_axis_off()
        panels[0].set_ylabel(data, fontsize=9)
        for place, name in enumerate(names):
            panels[0].plot([], [], color=f"C{place}", label=config["rows"][name]["form"])
        panels[0].legend(fontsize=6, loc="best")
    first = axes[0][0]
    first.set_yticks(range(len(methods)), [title_of(method) for method in methods], fontsize=7)
    first.set_ylim(len(methods) - 0.5, -0.5)
    save_figure(figure, path)


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
        "language-model": Option("a causal language model, a folder or a name on the hub", moves=False),
        "workers": WORKERS,
    },
    draw=draw,
)
