"""Tables 2 and 7 of Fan et al. 2020: visual question answering with random attention weights (MCAN).

The paper trains on VQA-v2, as does this recipe if it is given it, with features of its images. By default
the whole table is measured on generated scenes, where the picture alone decides every answer; fewer rows on
DAQUAR, whose questions often tell what is asked for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch

from overt import _check
from overt._extras import need
from overt._workers import Tell, Throttled
from overt.data import daquar, scenes, vqa
from overt.data.batching import Epochs
from overt.data.questions import OUTSIDE, QuestionData
from overt.mechanisms.bayesian.config import KL_WEIGHT, Bayesian
from overt.models import mcan
from overt.models.mcan import NOISE_WAYS, NoiseWay
from overt.recipes import question_training, regions
from overt.recipes._recipe import (
    DISCARD_MODELS,
    Grid,
    Option,
    Outcome,
    Recipe,
    Report,
    Request,
    cell,
    counted,
    rate_of,
)
from overt.recipes._row_reports import (
    FEWEST,
    gains_grid,
    mean_cell,
    notes_on_encoders,
    notes_on_runs,
    report_of,
    values,
)
from overt.recipes._rows import Task, look_up, rows_of, stored_result
from overt.recipes._runs import finish_run, run_record
from overt.recipes._training import (
    hardware,
    is_main_process,
    one_thread,
    precision_of_products,
    torch_device,
    versions,
)
from overt.recipes.paired import mean_interval
from overt.recipes.question_training import (
    COVERAGE,
    PUBLISHED_BATCH,
    SAMPLES,
    THRESHOLDS,
    Condition,
    QuestionRow,
    QuestionTraining,
    deviation_of,
    key_of,
)
from overt.recipes.regions import Pictures, RegionSource

SOFT, NO_KL, WC = "Soft", "NO KL", "WC"
QUESTION_ONLY, SHUFFLED = "question only", "shuffled images"
# Appendix B.2.2, whose σ₁ is the prior's and σ₂ the posterior's. λ goes by epochs.
_WC = Bayesian.paper("WC", k=1000.0, prior_beta=1e-6, rho=0.1, d_mid=20)
_LOGNORMAL: dict[str, float] = {"prior_sigma": 1e9, "sigma": 1e-9, "rho": 0.2}
ROWS = {
    SOFT: QuestionRow(),
    NO_KL: QuestionRow(Bayesian.paper("NO KL", k=1000.0)),
    "LF": QuestionRow(Bayesian.paper("LF", **_LOGNORMAL)),
    "LC": QuestionRow(Bayesian.paper("LC", d_mid=20, **_LOGNORMAL)),
    "WF": QuestionRow(Bayesian.paper("WF", k=1000.0, prior_beta=1e-2, prior_alpha=1e-3, rho=0.2)),
    WC: QuestionRow(_WC),
    "WC k=100": QuestionRow(replace(_WC, k=100.0)),
    "WC k=10": QuestionRow(replace(_WC, k=10.0)),
    f"WC weight {KL_WEIGHT:g}": QuestionRow(replace(_WC, kl_weight=KL_WEIGHT), beside="mean"),
    QUESTION_ONLY: QuestionRow(sees="nothing"),
    SHUFFLED: QuestionRow(sees="another"),
}
# VQA-v2, validation: all, yes-no, number, other. Accuracy, PAvPU, both in %, on images as they are and noisy.
PUBLISHED = {
    SOFT: {
        "accuracy": (66.95, 84.55, 48.92, 58.33),
        "accuracy, noisy": (61.25, 80.58, 40.80, 51.97),
        "PAvPU": (70.04, 83.02, 56.81, 63.66),
        "PAvPU, noisy": (65.34, 78.84, 49.80, 59.18),
    },
    "LF": {
        "accuracy": (66.89, 84.46, 49.11, 58.24),
        "accuracy, noisy": (61.43, 80.95, 41.51, 51.85),
        "PAvPU": (69.92, 82.79, 56.87, 63.58),
        "PAvPU, noisy": (65.48, 79.13, 50.19, 59.16),
    },
    "LC": {
        "accuracy": (66.93, 84.58, 49.05, 58.24),
        "accuracy, noisy": (61.58, 80.70, 41.31, 52.40),
        "PAvPU": (70.14, 83.02, 57.40, 63.71),
        "PAvPU, noisy": (65.60, 78.85, 49.87, 59.70),
    },
    "WF": {
        "accuracy": (66.93, 84.55, 48.84, 58.32),
        "accuracy, noisy": (61.60, 81.02, 41.84, 52.05),
        "PAvPU": (70.09, 83.00, 56.85, 63.78),
        "PAvPU, noisy": (65.62, 79.16, 50.22, 59.40),
    },
    WC: {
        "accuracy": (67.02, 84.66, 48.88, 58.42),
        "accuracy, noisy": (62.89, 81.94, 41.90, 53.96),
        "PAvPU": (71.21, 83.95, 58.12, 63.82),
        "PAvPU, noisy": (66.75, 80.21, 51.38, 60.58),
    },
}
PUBLISHED_KINDS = ("all", "yes-no", "number", "other")
MEASURES = ("accuracy", "PAvPU")
# Kind of question here → the paper's kind whose gains stand beside it.
KINDS = {"count": "number", "number": "number", "other": "other", "yes/no": "yes-no"}

CLEAN = "clean"
STRENGTHS = (0.5, 1.0, 2.0, 4.0)  # of noise, in standard deviations of the features
VARIANCE = 5.0  # of the published noise, which may also be its standard deviation
DATASETS = (scenes.NAME, daquar.NAME, vqa.NAME)
SEEDS = {scenes.NAME: 10, daquar.NAME: 5, vqa.NAME: 5}
IN_VQA = (SOFT, "LF", "LC", "WF", WC, QUESTION_ONLY, SHUFFLED)
IN_DAQUAR = {"image": (SOFT, NO_KL, WC, QUESTION_ONLY, SHUFFLED), "published": (SOFT, QUESTION_ONLY)}
DROPS = (10 / 13, 12 / 13)  # shares of the updates; the published are epochs 10 and 12 of 13
# "warmup" is a share, too. The published rate rises from 2.5e-5 in the first epoch to 1e-4 in the fourth.
PLANS: dict[str, dict[str, Any]] = {
    scenes.NAME: {"epochs": 24, "batch": 256, "learning_rate": 3e-4, "warmup": 0.05},
    daquar.NAME: {"epochs": 13, "batch": 64, "learning_rate": 5e-4, "warmup": 0.05},
    vqa.NAME: {"epochs": 13, "batch": 64, "learning_rate": 1e-4, "warmup": 3 / 13},
}
PAPER: dict[str, Any] = {
    "layers": 6,
    "flat": 512,
    "embedding": 300,
    "dropout": 0.1,
}  # of MCAN, small or large
OWN = "own"
NETWORK_SIZES = {OWN: {}, **{name: {**size, **PAPER} for name, size in mcan.SIZES.items()}}
NETWORKS: dict[str, dict[str, Any]] = {
    scenes.NAME: {"width": 256, "heads": 8, "layers": 3, "flat": 256, "embedding": 128, "dropout": 0.05},
    daquar.NAME: {"width": 256, "heads": 8, "layers": 3, "flat": 256, "embedding": 300, "dropout": 0.1},
    vqa.NAME: NETWORK_SIZES["small"],
}
SHARE = 0.2  # of the training images, to choose settings by, as the paper does; where there is no part for it
SIZES = scenes.SIZES  # images of the scenes, in three parts
# What the encoder of the scenes learns to tell: the things of a picture, of which captions name but a few.
THINGS = (
    *(f"{colour} {shape}" for colour in scenes.COLOURS for shape in scenes.SHAPES),
    *scenes.COLOURS,
    *scenes.SHAPES,
)
ENCODER_EPOCHS = {scenes.NAME: 100, daquar.NAME: regions.EPOCHS, vqa.NAME: regions.EPOCHS}
# What pictures must decide on the scenes, in %.
LEAST_SOFT, MOST_QUESTION_ONLY, MOST_APART = 85.0, 40.0, 3.0
CONDITIONS = 3
OPTIONS = {
    "dataset": Option(
        "scenes, which are generated; or daquar, or vqa-v2 with --features, which --data holds",
        scenes.NAME,
        names=True,
    ),
    "split": Option("of DAQUAR: image, or published, which has test images in training", "image", names=True),
    "noise": Option(
        "image: for each image, in units of the features' standard deviation; published: shared by a batch, "
        "in training too",
        "image",
        names=True,
    ),
    "rows": Option("rows to train, separated by commas; by default those of the data set", moves=False),
    "size": Option("of the network: own, which fits the data, or the published small or large", OWN),
    "epochs": Option("epochs of a training; by default 24 of the scenes, else 13", least=1),
    "batch": Option("questions of a batch; by default 256 of the scenes, else 64, as in the paper", least=1),
    "learning-rate": Option("at its peak; by default 3e-4 of the scenes, 5e-4 of DAQUAR, 1e-4 of VQA-v2"),
    "validation": Option("test on the validation part, to choose settings by", False),
    **regions.OPTIONS,
    "encoder-epochs": Option(
        "epochs of the encoder's training; by default 100 of the scenes and 40 of DAQUAR", least=1
    ),
    "workers": Option(
        "trainings side by side; by default 8 on a GPU and 1 on a CPU or of VQA-v2", least=1, moves=False
    ),
    "discard-models": DISCARD_MODELS,
}


class Shared(NamedTuple):
    """What all trainings need.

    Attributes:
        data: questions; their images only where the encoder is trained on.
        size: height and width of the images; None where there are none.
        source: of the regions.
        conditions: name → what is done to the features of test images.
        keep_models: whether to store trained models.
    """

    data: QuestionData
    size: tuple[int, int] | None
    source: RegionSource
    conditions: dict[str, Condition]
    keep_models: bool


# --- Data ---


def data_of(request: Request) -> tuple[QuestionData, Pictures]:
    """The questions that a request names, and the images and words that the encoder learns from."""
    dataset, split, given = (request.options[name] for name in ("dataset", "split", "features"))
    _check.one_of("--dataset", dataset, DATASETS)
    _check.one_of("--split", split, get_args(daquar.Split))
    if split != "image" and dataset != daquar.NAME:
        raise ValueError(f"--split is for --dataset {daquar.NAME}, got --dataset {dataset}")
    held: dict[str, list[str]] = {}
    if dataset == scenes.NAME:
        made = scenes.make(SIZES)
        whole, words = made.questions, THINGS
        for image, things in made.things.items():
            held[image] = [name for thing in things for name in (str(thing), thing.colour, thing.shape)]
    elif dataset == vqa.NAME:
        if given is None:
            raise ValueError(
                f"--dataset {vqa.NAME} needs --features DIR: features of the regions of its images"
            )
        whole = vqa.load(request.data)
        words = whole.answers
    else:
        whole = daquar.load(request.data, split, pictures=given is None)
        words = whole.answers
    data = whole.for_validation(SHARE) if request.options["validation"] else whole
    if not held:
        for row in data.train:
            held.setdefault(row.image, []).extend(row.answers)
    # Where training is the same, so is the encoder.
    same = data.train is whole.train
    return data, _pictures(data, held, words, whole.sha256 if same else data.sha256)


def _pictures(
    data: QuestionData, held: Mapping[str, Sequence[str]], words: tuple[str, ...], sha256: str
) -> Pictures:
    train = torch.unique(data.image_numbers(data.train))
    if data.images is None:  # there is nothing that an encoder could learn from
        return Pictures(data.image_names, None, train, torch.zeros(len(train), 0), (), sha256)
    texts = [held[data.image_names[number]] for number in train.tolist()]
    return Pictures(data.image_names, data.images, train, regions.words_held(texts, words), words, sha256)


def conditions_of(way: NoiseWay) -> dict[str, Condition]:
    """Images as they are, and under noise of several strengths."""
    if way == "published":
        strengths = {f"noise of variance {VARIANCE:g}": VARIANCE**0.5, f"noise of sd {VARIANCE:g}": VARIANCE}
    else:
        strengths = {f"noise {strength:g} sd": strength for strength in STRENGTHS}
    return {CLEAN: Condition()} | {name: Condition(strength, way) for name, strength in strengths.items()}


def plan(data: QuestionData, count: int, options: Mapping[str, Any], way: NoiseWay) -> QuestionTraining:
    """The settings of a training.

    Args:
        data: questions.
        count: regions of an image; those of an encoder are the cells of a square grid.
        options: of the request.
        way: of noise.
    """
    settings = PLANS[data.name]
    _check.one_of("--size", options["size"], tuple(NETWORK_SIZES))
    batch = min(options["batch"] or settings["batch"], len(data.train))
    updates = (options["epochs"] or settings["epochs"]) * Epochs(len(data.train), batch, 1, 0).per_epoch
    network = dict(NETWORK_SIZES[options["size"]] or NETWORKS[data.name])
    if options["features"] is None:
        network["grid"] = [math.isqrt(count)] * 2
    return QuestionTraining(
        updates,
        max(1, round(settings["warmup"] * updates)),
        batch,
        rate_of(options["learning-rate"]) or settings["learning_rate"],
        tuple(round(share * updates) for share in DROPS),
        network,
        noise=VARIANCE**0.5 if way == "published" else 0.0,
    )


# --- Runs ---


def run(request: Request) -> Outcome:
    """Train the rows and seeds that are missing."""
    need("accelerate", "vision")
    options = request.options
    way = options["noise"]
    _check.one_of("--noise", way, NOISE_WAYS)
    # These are read once the data are made, which takes a while.
    _check.one_of("--size", options["size"], tuple(NETWORK_SIZES))
    rate_of(options["learning-rate"])
    rows_of(options["rows"], ROWS, list(ROWS))
    data, pictures = data_of(request)
    if data.name == vqa.NAME:  # one such training keeps a GPU busy
        options = {**options, "workers": options["workers"] or 1}
        request = replace(request, options=options)
    defaults = {scenes.NAME: ROWS, daquar.NAME: IN_DAQUAR[options["split"]], vqa.NAME: IN_VQA}
    chosen = rows_of(options["rows"], ROWS, list(defaults[data.name]))
    seeds = min(request.seeds, SEEDS[data.name])
    if seeds < request.seeds and request.seeds_given:
        request.console.print(f"{data.name} has {seeds} seeds, of the {request.seeds} that were asked for")
    validation = options["validation"]
    parts = [data.name, *([] if options["split"] == "image" else ["published-split"])]
    parts += ["validation"] * (validation and pictures.sha256 == data.sha256)  # which has encoders of its own
    place = request.out / "-".join(parts)
    request.console.print(
        f"{data.name}: {len(data.train):,} training questions, {len(data.test):,} for "
        f"{'validation' if validation else 'testing'}, {len(data.answers)} answers"
    )
    given = options["encoder"] is not None or options["features"] is not None
    epochs = options["encoder-epochs"] or (regions.EPOCHS if given else ENCODER_EPOCHS[data.name])
    of_regions = replace(request, out=place, seeds=seeds, options={**options, "encoder-epochs": epochs})
    source = regions.source_of(of_regions, pictures, "bam-table-2")
    training = plan(data, source.per_image, options, way)
    conditions = conditions_of(way)
    device = torch_device(request.device).type
    common = {
        "data": data.sha256,
        "regions": {**source.settings, "finetune": source.finetune},
        "training": training.settings(),
        "conditions": {name: list(condition) for name, condition in conditions.items()},
        "samples": SAMPLES,
        "precision": precision_of_products(device),
    }
    names = ["rows", *["validation"] * validation, *["noise-published"] * (way == "published")]
    rows_place = place / "-".join(names)
    count = dict.fromkeys(ROWS, seeds)
    known = look_up(request, ROWS, chosen, rows_place, common, training, device, count)
    regions.train_encoders(of_regions, pictures, source, {task.seed for task in known.tasks})
    size = None if data.images is None else (data.images.shape[-2], data.images.shape[-1])
    needed = data if source.finetune else replace(data, images=None)
    shared = Shared(needed, size, source, conditions, not options["discard-models"])
    known.fill(
        request,
        shared,
        perform,
        milliseconds=lambda task: min(
            question_training.step_times(data, source, task.row, task.training, task.seed, task.device, 3)
        ),
        line=lambda numbers: f"accuracy {numbers[key_of(CLEAN, 'accuracy')]:.2f} %",
        prepare=one_thread,
        together=False,
        # A GPU compiles kernels for each family and prior first, which the trainings do side by side.
        alike=lambda task: task.row.mechanism is not None,
        rest=lambda task: len(conditions) * (SAMPLES + 1) * len(data.test) / 3 / task.training.batch,
        partly=True,
    )
    config = {
        "data": data.describe(),
        "split": options["split"],
        "validation": validation,
        "size": options["size"],
        "noise": way,
        "conditions": list(conditions),
        "regions": common["regions"],
        "training": training.settings(),
        "epochs": training.updates // Epochs(len(data.train), training.batch, 1, 0).per_epoch,
        "samples": SAMPLES,
        "kinds": sorted({row.kind for row in data.test}),
        "rows": {name: row.settings() for name, row in ROWS.items()},
    }
    return known.outcome(config, ROWS, stand_in=False)


def perform(task: Task, shared: Shared, tell: Tell) -> dict[str, Any]:
    """Train, test, and store network and numbers in the task's folder."""
    told = Throttled(tell)
    data, source = shared.data, shared.source
    model, numbers = question_training.train(
        task.folder, data, source, task.row, task.training, task.seed, task.device, told
    )
    told.rest(task.training.updates)
    if is_main_process():
        deviation = deviation_of(data, model)
        numbers["deviation"] = deviation
        if task.row.sees != "nothing":
            numbers["encoder"] = source.encoder_hash(task.seed)
        numbers |= question_training.measure(model, data, task.row, shared.conditions, deviation)
        if shared.keep_models:
            question_training.save(model, task.folder / "model", source.network(task.seed), shared.size)
        numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
        finish_run(task.folder, numbers)
    return stored_result(task.folder)


# --- Reports ---

SHOWN = (
    ("accuracy", 2),
    (f"accuracy of {SAMPLES} passes", 2),
    *((f"PAvPU {threshold:g}", 2) for threshold in THRESHOLDS),
    ("ECE", 2),
    ("Brier", 4),
    *((f"accuracy of the surest {100 * share:.0f} %", 2) for share in COVERAGE),
    ("mutual information", 4),
)
AT = f"PAvPU {THRESHOLDS[1]:g}"  # the threshold of comparisons; the paper does not give its own


def measured_grid(outcome: Outcome, condition: str) -> Grid:
    """All measures under one condition."""
    lines = []
    for row in ROWS:
        found = [values(outcome, row, key_of(condition, measure)) for measure, _ in SHOWN]
        if any(found):
            cells = [mean_cell(each, digits) for each, (_, digits) in zip(found, SHOWN, strict=True)]
            lines.append((row, [str(len(found[0])), *cells]))
    columns = ["n", *(measure for measure, _ in SHOWN)]
    return Grid(f"{outcome.config['data']['name']}, {condition}", columns, lines)


def published_gains(measure: str, condition: str, kind: str = "all") -> dict[str, dict[str, float]]:
    """Heading → row → published number that is beside a measured one; nothing if there is none."""
    name = measure if condition == CLEAN else f"{measure}, noisy"
    place = PUBLISHED_KINDS.index(kind)
    return {"published, VQA-v2": {row: numbers[name][place] for row, numbers in PUBLISHED.items()}}


def gains(outcome: Outcome, measure: str, condition: str, kind: str | None = None) -> Grid:
    """Paired differences to soft attention in accuracy or PAvPU, beside the published ones."""
    key = key_of(condition, "accuracy" if measure == "accuracy" else AT, kind)
    beside = "all" if kind is None else KINDS.get(kind)
    published = {} if beside is None else published_gains(measure, condition, beside)
    rows = [row for row in ROWS if row != SOFT]
    what = measure if measure == "accuracy" else AT
    about = f"{what}, {condition}{'' if kind is None else f', {kind}'}"
    title = f"Differences with the same seed: {about}"
    return gains_grid(outcome, dict.fromkeys(rows, SOFT), published, key, f"{what}, points", title)


def published_grid() -> Grid:
    """The paper's numbers: all (yes-no / number / other)."""
    names = list(PUBLISHED[SOFT])
    lines = []
    for row, numbers in PUBLISHED.items():
        cells = []
        for name in names:
            whole, *parts = (cell(value) for value in numbers[name])
            cells.append(f"{whole} ({' / '.join(parts)})")
        lines.append((f"{row}, published", cells))
    return Grid("Published, VQA-v2, in %: all (yes-no / number / other)", names, lines)


def report_table_2(outcome: Outcome) -> Report:
    """Table 2: all questions."""
    conditions = outcome.config["conditions"]
    grids = [measured_grid(outcome, condition) for condition in conditions]
    grids += [gains(outcome, measure, condition) for measure in MEASURES for condition in conditions]
    return report_of([*grids, published_grid()], notes_of(outcome))


def kinds_grid(outcome: Outcome, condition: str) -> Grid:
    """Accuracy and PAvPU of each kind of question."""
    kinds, lines = outcome.config["kinds"], []
    for row in ROWS:
        keys = [key_of(condition, measure, kind) for measure in ("accuracy", AT) for kind in kinds]
        found = [values(outcome, row, key) for key in keys]
        if any(found):
            lines.append((row, [str(len(found[0])), *(mean_cell(each) for each in found)]))
    columns = ["n", *(f"{measure}, {kind}, %" for measure in ("accuracy", AT) for kind in kinds)]
    return Grid(f"{outcome.config['data']['name']}, {condition}", columns, lines)


def report_table_7(outcome: Outcome) -> Report:
    """Table 7: by kind of question."""
    config = outcome.config
    grids = [kinds_grid(outcome, condition) for condition in config["conditions"]]
    grids += [
        gains(outcome, measure, condition, kind)
        for measure in MEASURES
        for condition in config["conditions"]
        for kind in config["kinds"]
    ]
    return report_of([*grids, published_grid()], notes_of(outcome))


class Verdict(NamedTuple):
    """Whether something holds that a reader of the table relies on.

    Attributes:
        claim: what should hold, and the numbers.
        holds: whether it does.
    """

    claim: str
    holds: bool


def verdicts(outcome: Outcome) -> list[Verdict]:
    """Whether pictures decide: on scenes three conditions, elsewhere whether pictures add anything.

    Rows are compared with the same seeds; what was not trained has no verdict.
    """
    rows = SOFT, QUESTION_ONLY, SHUFFLED
    by_row = {row: values(outcome, row, key_of(CLEAN, "accuracy")) for row in rows}
    found: list[Verdict] = []
    if outcome.config["data"]["name"] != scenes.NAME:
        for row in (QUESTION_ONLY, SHUFFLED):
            ours, theirs = by_row[SOFT], by_row[row]
            pairs = [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]
            if len(pairs) >= FEWEST:
                mean, low, high = mean_interval(pairs)
                claim = f"{SOFT} − {row}: {cell(mean)} points ({cell(low)} … {cell(high)})"
                found.append(Verdict(claim, low > 0.0))
        return found
    soft, blind, other = (by_row[row] for row in rows)
    if soft:
        mean = statistics.fmean(soft.values())
        claim = f"{SOFT} at least {LEAST_SOFT:g} %: {cell(mean)} ({counted(len(soft), 'seed')})"
        found.append(Verdict(claim, mean >= LEAST_SOFT))
    if blind:
        mean = statistics.fmean(blind.values())
        seeds = counted(len(blind), "seed")
        claim = f"{QUESTION_ONLY} at most {MOST_QUESTION_ONLY:g} %: {cell(mean)} ({seeds})"
        found.append(Verdict(claim, mean <= MOST_QUESTION_ONLY))
    if pairs := [other[seed] - blind[seed] for seed in sorted(set(blind) & set(other))]:
        mean = statistics.fmean(pairs)
        seeds = counted(len(pairs), "seed")
        claim = f"{SHUFFLED} within {MOST_APART:g} points of {QUESTION_ONLY}: {cell(mean)} ({seeds})"
        found.append(Verdict(claim, abs(mean) <= MOST_APART))
    return found


def unmet(outcome: Outcome) -> list[str]:
    """What must hold on the scenes, where pictures decide, and does not."""
    if outcome.config["data"]["name"] != scenes.NAME:
        return []
    return [verdict.claim for verdict in verdicts(outcome) if not verdict.holds]


def verdict_notes(outcome: Outcome) -> list[str]:
    """What the verdicts mean for the table."""
    found = verdicts(outcome)
    if outcome.config["data"]["name"] == scenes.NAME:
        told = [
            f"{'Holds' if verdict.holds else 'FAILS, so that the table is not to be relied on'}: "
            f"{verdict.claim}."
            for verdict in found
        ]
        if len(told) < CONDITIONS:
            told.append(
                f"Whether pictures decide is not known: it takes {SOFT}, {QUESTION_ONLY} and {SHUFFLED}, the "
                "last two with the same seeds."
            )
        return told
    if not found:
        return [f"Whether pictures add anything needs {FEWEST} seeds of {SOFT} and {QUESTION_ONLY}."]
    claims = "; ".join(verdict.claim for verdict in found)
    if all(verdict.holds for verdict in found):
        return [f"Pictures add to what questions tell: {claims}."]
    return [f"Pictures add nothing beyond the interval, so that the columns of noise mean nothing: {claims}."]


def deviations(config: Mapping[str, Any]) -> list[str]:
    """The settings that are not the paper's, each with its reason."""
    data, training = config["data"]["name"], config["training"]
    network, paper = training["network"], {**mcan.SIZES["small"], **PAPER}
    found = []
    if any(network[name] != paper[name] for name in ("layers", "width", "flat")):
        shape = "{layers} + {layers} layers of width {width}"
        why = "--size asks for it" if config.get("size", OWN) != OWN else "since there are fewer questions"
        found.append(f"{shape.format_map(network)} rather than {shape.format_map(paper)}, {why}")
    words = f"word vectors of width {network['embedding']} are learned, rather than started from GloVe's"
    found.append(f"{words}, which would have to be downloaded")
    fitted = []
    if network["dropout"] != paper["dropout"]:
        fitted.append(f"dropout {network['dropout']:g} rather than {paper['dropout']:g}")
    if training["learning_rate"] != PLANS[vqa.NAME]["learning_rate"]:
        fitted.append(f"learning rate {training['learning_rate']:g} rather than 1e-4")
    if config["epochs"] != PLANS[vqa.NAME]["epochs"]:
        fitted.append(f"{counted(config['epochs'], 'epoch')} rather than 13")
    if training["batch"] != PUBLISHED_BATCH:
        fitted.append(f"batches of {training['batch']} rather than {PUBLISHED_BATCH}")
    if fitted:
        found.append(f"{', '.join(fitted)}, to suit these data")
    found.append(
        "the warm-up is a line over updates, not a stair over epochs, which are of another length here"
    )
    if "features" not in config["regions"]:
        found.append(
            "regions are of an encoder trained here, not of a detector trained on other images, which "
            "--features would take; each has a learned vector of its row and column in place of a box"
        )
    if data != vqa.NAME:
        found.append("every right answer has the target 1, as no data but VQA-v2 have ten people's answers")
    found.append(
        "the KL leaves out padding, which the authors' later code counts; λ goes by parts of an epoch"
    )
    if config["noise"] != "published":
        found.append(
            "noise is each image's own, in testing alone and on regions alone, so that all rows of a seed "
            "see the same (--noise published is theirs)"
        )
    return found


def notes_of(outcome: Outcome) -> list[str]:
    """What a reader needs to know about data, training and measures."""
    config = outcome.config
    data, training = config["data"], config["training"]
    network = training["network"]
    outside = data.get(OUTSIDE, 0)
    remarks = "; ".join(data["remarks"])
    published = config["noise"] == "published"
    noise = (
        "Noise as in the authors' later code: one tensor for all images of a batch, in units of the "
        f"features themselves, also in training (variance {VARIANCE:g}), where padding is seen."
        if published
        else "Noise: Gaussian, for each image, in units of the standard deviation of the training images' "
        "features, on real regions alone; the same for all rows of a seed."
    )
    return [
        *verdict_notes(outcome),
        *notes_on_encoders(outcome),
        *(
            [
                "LF and LC are the paper's settings, and soft attention: with σ = 1e-9 their draws are its "
                "weights to within rounding, and their KL, with σ = 1e9 of the prior, has no gradient to "
                "speak of. Their differences to Soft are those of trainings that round differently and, on "
                "GPUs, drop other weights."
            ]
            if any(row in rows for rows in outcome.per_seed.values() for row in ("LF", "LC"))
            else []
        ),
        f"Data: {data['name']}{f' ({remarks})' if remarks else ''}: {data['train']:,} training questions, "
        f"{data['test']:,} for {'validation' if config.get('validation') else 'testing'}, {data['answers']} "
        "answers. The paper's is VQA-v2, validation; plain MCAN-small has 67.17 % there in the code it is "
        "from (openvqa).",
        *(
            [f"{outside:,} answers of test questions are outside the {data['answers']}, and count as missed."]
            if outside
            else []
        ),
        *(
            ["DAQUAR's own measure, WUPS, needs WordNet, and is left out."]
            if data["name"] == daquar.NAME
            else []
        ),
        f"Training: {counted(config['epochs'], 'epoch')}, {training['updates']:,} updates of "
        f"{training['batch']} questions, Adam, learning rate {training['learning_rate']:g} after "
        f"{counted(training['warmup'], 'update')} of warm-up, a fifth from updates "
        f"{' and '.join(f'{drop:,}' for drop in training['drops'])} on. MCAN of {network['layers']} + "
        f"{network['layers']} layers, width {network['width']}, dropout {network['dropout']:g}.",
        "Regions: the same for all rows of a seed; "
        + (
            "published features."
            if "features" in config["regions"]
            else "of a given encoder."
            if "encoder" in config["regions"]
            else "of an encoder trained without attention, then frozen, "
            + (
                "to tell which things a picture holds."
                if data["name"] == scenes.NAME
                else "to tell which answers the questions about a picture have."
            )
        )
        + (" The encoder goes on learning in each row." if config["regions"]["finetune"] else ""),
        f"The KL is weighted as published, beside a loss that is summed over {PUBLISHED_BATCH} questions, "
        f"with λ by epochs, but for the row of weight {KL_WEIGHT:g}, our default, which stands beside the "
        "mean.",
        f"{QUESTION_ONLY}: all regions are zero, and stay so, since there is nothing for noise to disturb: "
        f"its numbers under noise are those without. {SHUFFLED}: every image is another one of its part, in "
        "training and in testing.",
        noise,
        "Accuracy: of one pass with the mean of the weights and without dropout; 1 of n for one of n right "
        f"answers. PAvPU: that accuracy with Welch's test over {config['samples']} passes with dropout on, "
        "as published. ECE (15 bins, highest probability), Brier (mean over answers), accuracy of the surest "
        "and mutual information (sum over answers, in nats): of these passes and their mean. Accuracies, "
        "PAvPU and ECE in %.",
        f"Other than in the paper: {'; '.join(deviations(config))}.",
        *notes_on_runs(outcome),
    ]


TABLE_2 = Recipe(
    name="bam-table-2",
    title="Visual question answering with random attention weights",
    paper="Fan et al. 2020, Bayesian Attention Modules, Table 2",
    published={"rows": PUBLISHED},
    run=run,
    report=report_table_2,
    seeds=SEEDS[scenes.NAME],
    folder="questions",
    options=OPTIONS,
    unmet=unmet,
)
TABLE_7 = Recipe(
    name="bam-table-7",
    title="Visual question answering by kind of question",
    paper="Fan et al. 2020, Bayesian Attention Modules, Table 7",
    published={"rows": PUBLISHED},
    run=run,
    report=report_table_7,
    seeds=SEEDS[scenes.NAME],
    folder="questions",
    options=OPTIONS,
    unmet=unmet,
)
