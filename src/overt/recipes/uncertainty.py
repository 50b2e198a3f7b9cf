"""Does a model know when it does not know? Random attention beside the simpler ways to be uncertain.

Models are fine-tuned as for `ea-table-3`. Each is measured on the development rows, for CoLA also in and out
of the training rows' domain; on MRPC's test rows; on development rows with typos and with words missing; and,
if fine-tuned on SST-2's sentences, on movie reviews cut to 128 tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import overt
from overt.data.eraser import load_movies
from overt.data.glue import Row, Splits, cola_out_of_domain
from overt.data.shifts import drop_words, typos
from overt.judge import laplace
from overt.judge.uncertainty import aurc, brier, ece, error_auroc, nll, pavpu
from overt.mechanisms.bayesian import Bayesian
from overt.recipes._recipe import Grid, Outcome, Recipe, Report, Request, cell
from overt.recipes._row_reports import FEWEST, mean_cell, report_of, values
from overt.recipes._rows import Numbers, folder_name
from overt.recipes._runs import load_tokenizer, read_settings
from overt.recipes._training import be_quiet
from overt.recipes.ea_understanding import notes_of
from overt.recipes.paired import correct_by_holm, mean_interval, paired_p
from overt.recipes.text_training import (
    TEST_BATCH,
    Encoded,
    Texts,
    collator_of,
    load_model,
    predict,
    rows_at_once,
    sample,
)
from overt.recipes.understanding_forms import PLAIN, TextRow, row_name
from overt.recipes.understanding_runs import (
    HELD_OUT,
    OPTIONS,
    PREDICTIONS,
    Measured,
    Parts,
    Shared,
    leave_out,
    pretrained,
    run_forms,
)

TASKS = ("CoLA", "SST-2", "MRPC")
FORMS = (PLAIN, "Bayesian k=2", "Bayesian k=10")
SAMPLES = 20
RATES = (0.1, 0.3)  # of words that are misspelt or dropped
DEVELOPMENT, REVIEWS = "development rows", "movie reviews"
IN_DOMAIN, OUT_OF_DOMAIN = "in domain", "out of domain"
ONE, TEMPERATURE, DROPOUT = "one pass", "one pass + temperature", "dropout left on"
LAPLACE, NOISE, ENSEMBLE = "last-layer Laplace", "noise at test + temperature", "ensemble of two"
# Method → forward passes for a prediction; those of random attention are added below.
COSTS = {ONE: 1, TEMPERATURE: 1, DROPOUT: SAMPLES, LAPLACE: 1, NOISE: SAMPLES, ENSEMBLE: 2}
WAYS = ("", " + temperature", " + dropout", " + dropout + temperature")
COSTS |= {f"{form}{way}": SAMPLES for form in FORMS[1:] for way in WAYS}
BASELINES = (TEMPERATURE, DROPOUT)
# Measure that can be won → 1 if higher is better, −1 if lower is.
MEASURES = {"NLL": -1, "Brier": -1, "ECE": -1, "AUROC": 1, "AURC": -1, "PAvPU": 1}
SHOWN = ("accuracy", *MEASURES)


class Key(NamedTuple):
    """Names a number: of a part of the data, a method and a measure."""

    part: str
    method: str
    measure: str

    def __str__(self) -> str:
        return " | ".join(self)


def run(request: Request) -> Outcome:
    """Fine-tune plain and random attention, and measure every method."""
    check_last_layer(pretrained(request))
    return run_forms(
        request,
        TASKS,
        FORMS,
        measure=uncertainties,
        more=shifted,
        passes=passes,
        seeds=seeds_of,
        finish=add_ensembles,
    )


def check_last_layer(path: str) -> None:
    """Refuse a model whose logits Laplace's approximation cannot be of, before it is trained."""
    be_quiet()
    model, _ = load_model(path, ("no", "yes"), 0)
    codes = load_tokenizer(path)("a", return_tensors="pt")
    laplace.last_layer(model, [{**codes, "labels": torch.tensor([0])}])


def seeds_of(form: str, task: str, seeds: int) -> int:
    """Twice as many plain models, for as many ensembles of two; but not of SST-2, which takes longest."""
    return 2 * seeds if form == PLAIN and task != "SST-2" else seeds


def shifted(request: Request, task: str, splits: Splits) -> Parts:
    """Development rows with typos and with words missing, and what else a task has."""
    rows = splits.dev[task]
    parts, subsets, missing = {}, {}, {}
    for rate in RATES:
        for what, change in (("typos", typos), ("words dropped", drop_words)):
            texts = [change(list(column), rate) for column in zip(*(row.texts for row in rows), strict=True)]
            changed = [
                Row(tuple(both), row.label) for both, row in zip(zip(*texts, strict=True), rows, strict=True)
            ]
            parts[f"{rate:.0%} {what}"] = changed
    try:
        if task == "CoLA":
            outside = cola_out_of_domain(request.data)
            inside = sorted(set(range(len(rows))) - set(outside))
            if inside and outside:
                subsets = {IN_DOMAIN: (task, inside), OUT_OF_DOMAIN: (task, outside)}
        elif task == "SST-2":
            reviews = [review for part in load_movies(request.data).values() for review in part]
            parts[REVIEWS] = [Row((review.text,), review.label) for review in reviews]
    except FileNotFoundError as error:
        missing = {REVIEWS if task == "SST-2" else OUT_OF_DOMAIN: str(error)}
    for part, reason in missing.items():
        leave_out(request, f"{task}, {part}", reason)
    return Parts(parts, subsets, missing)


def passes(row: TextRow, texts: Texts) -> int:
    """How many rows `uncertainties` takes through a model."""
    held = len(texts.parts[HELD_OUT])
    tested = sum(map(len, texts.parts.values())) - held
    if row.form != PLAIN:
        return 2 * SAMPLES * (tested + held)
    noises = len(Bayesian().noise_setting().values)
    return (2 + 2 * SAMPLES) * tested + (2 + noises * SAMPLES) * held + len(texts.train)


def measures(samples: Tensor, labels: Tensor) -> dict[str, float | None]:
    """All measures of predictive samples, (samples, rows, classes).

    A single sample has no spread, so that it is certain of every row, and its PAvPU is its accuracy.
    """
    mean = samples.double().mean(dim=0)
    mean = mean / mean.sum(dim=1, keepdim=True)  # of float32
    auroc = error_auroc(mean, labels)
    accuracy = float((mean.argmax(dim=1) == labels).double().mean())
    return {
        "accuracy": 100 * accuracy,
        "NLL": nll(mean.clamp(min=1e-12), labels) if bool((mean == 0).any()) else nll(mean, labels),
        "Brier": brier(mean, labels),
        "ECE": 100 * ece(mean, labels),
        "AUROC": None if math.isnan(auroc) else auroc,
        "AURC": aurc(mean, labels),
        "PAvPU": 100 * (pavpu(samples, labels)[0.05] if len(samples) > 1 else accuracy),
    }


def measures_of(texts: Texts, part: str, method: str, samples: Tensor) -> dict[str, float | None]:
    """Key → measure, of a part and of its subsets."""
    labels = torch.tensor([each["labels"] for each in texts.parts[part]])
    places = {part: torch.arange(len(labels))}
    places |= {name: torch.tensor(some) for name, (whole, some) in texts.subsets.items() if whole == part}
    return {
        str(Key(name, method, measure)): value
        for name, some in places.items()
        for measure, value in measures(samples[:, some], labels[some]).items()
    }


def batches(rows: Sequence[Encoded], tokenizer: Any) -> Iterator[dict[str, Tensor]]:
    """Padded batches with labels."""
    collate = collator_of(tokenizer)
    for start in range(0, len(rows), TEST_BATCH):
        yield collate(list(rows[start : start + TEST_BATCH]))


def uncertainties(model: Any, texts: Texts, tokenizer: Any, row: TextRow, seed: int) -> Measured:
    """Measures of every method that one model allows, on every part but the held-out rows."""
    parts = {name: rows for name, rows in texts.parts.items() if name != HELD_OUT}
    predicted, fitted = predictions_of(model, texts, parts, tokenizer, row, seed)
    numbers: dict[str, Any] = {"fitted": fitted}
    for (part, method), samples in predicted.items():
        numbers |= measures_of(texts, part, method, samples)
    kept = {f"{part} | {ONE}": predicted[part, ONE][0].float() for part in parts} if row.form == PLAIN else {}
    return numbers, kept


def predictions_of(
    model: Any, texts: Texts, parts: Mapping[str, list[Encoded]], tokenizer: Any, row: TextRow, seed: int
) -> tuple[dict[tuple[str, str], Tensor], dict[str, float]]:
    """Part and method → predictive samples (samples, rows, classes), and what was fitted on held-out rows."""
    # Where the order does not matter, rows of similar length come together.
    held, train = (
        sorted(rows, key=lambda each: len(each["input_ids"])) for rows in (texts.parts[HELD_OUT], texts.train)
    )
    found: dict[tuple[str, str], Tensor] = {}
    fitted: dict[str, float] = {}

    def draw(method: str, net: Any, dropout: bool = False) -> None:
        for part, rows in parts.items():
            drawn = sample(net, rows, tokenizer, SAMPLES, seed=seed, dropout=dropout, calibrated=False)
            found[part, method] = drawn

    def warm(method: str, temperature: float, of: str) -> None:
        fitted[f"{method} | temperature"] = temperature
        for part in parts:
            found[part, method] = (found[part, of].double().log() / temperature).softmax(dim=-1)

    def calibrate(net: Any, **options: Any) -> overt.Calibration:
        data, rows = batches(held, tokenizer), rows_at_once(held)
        return overt.calibrate(net, data, samples=SAMPLES, seed=seed, rows=rows, **options)

    if row.form != PLAIN:
        for dropout, way in ((True, " + dropout"), (False, "")):  # the model keeps the last temperature
            method = f"{row.form}{way}"
            draw(method, model, dropout=dropout)
            warm(f"{method} + temperature", calibrate(model, dropout=dropout).temperature, of=method)
        return found, fitted
    for part, rows in parts.items():
        logits = predict(model, rows, tokenizer).double()
        found[part, ONE] = logits.softmax(dim=-1).unsqueeze(0)
    warm(TEMPERATURE, calibrate(model).temperature, of=ONE)
    draw(DROPOUT, model, dropout=True)
    seen = laplace.last_layer(model, batches(train, tokenizer))
    apart = laplace.last_layer(model, batches(held, tokenizer))
    posterior = laplace.fit(seen.weight, seen.bias, seen.features, seen.labels)
    posterior = posterior.tuned(apart.features, apart.labels, samples=SAMPLES)
    fitted[f"{LAPLACE} | prior precision"] = posterior.prior_precision
    for part, rows in parts.items():
        features = laplace.last_layer(model, batches(rows, tokenizer)).features
        found[part, LAPLACE] = posterior.probabilities(features, SAMPLES, seed=seed)
    noisy = copy.deepcopy(model)
    del noisy.config.overt_temperature  # of the plain model
    overt.attach(noisy, Bayesian(prior=None), seed=seed)
    chosen = calibrate(noisy, noise=True)
    assert chosen.noise is not None
    fitted[f"{NOISE} | k"] = chosen.noise
    draw(NOISE, noisy)
    warm(NOISE, chosen.temperature, of=NOISE)
    return found, fitted


def add_ensembles(numbers: Numbers, shared: Shared, place: Path) -> None:
    """Add the measures of two plain models' mean to the first of them, where both have predictions.

    Numbers may come from a result file while the folder has a run with other settings, such as a short trial:
    its predictions are not theirs.
    """
    for (name, seed), entry in numbers.items():
        task = name.partition(", ")[2]
        other = numbers.get((name, seed + 1))
        if not name.startswith(f"{PLAIN}, ") or seed % 2 or other is None or task not in shared.texts:
            continue
        folders = [place / folder_name(name) / f"seed-{each}" for each in (seed, seed + 1)]
        files = [folder / PREDICTIONS for folder in folders]
        theirs = [each["run"]["settings"] for each in (entry, other)]
        if list(map(read_settings, folders)) != theirs or not all(file.is_file() for file in files):
            continue
        texts = shared.texts[task]
        for part, rows in texts.parts.items():
            if part != HELD_OUT:
                shape = torch.Size((len(rows), len(texts.classes)))
                both = [stored(file, f"{part} | {ONE}", shape) for file in files]
                entry |= measures_of(texts, part, ENSEMBLE, torch.stack(both))


def stored(file: Path, name: str, shape: torch.Size) -> Tensor:
    """One tensor of a run's predictions."""
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        found: Tensor = tensors.get_tensor(name)
    if found.shape != shape:
        raise ValueError(f"{file}: {name} must be {tuple(shape)}, got {tuple(found.shape)}: delete the run")
    return found


# --- Report ---

Values = dict[int, float]


def numbers_of(outcome: Outcome, task: str, key: Key) -> Values:
    """Seed → number."""
    return values(outcome, row_name(form_of(key.method), task), str(key))


def form_of(method: str) -> str:
    """The form of the models that a method is for."""
    return next((form for form in FORMS[1:] if method.startswith(form)), PLAIN)


def shared_seeds(outcome: Outcome, task: str) -> set[int]:
    """The seeds that all forms of a task have: plain attention has more, for ensembles."""
    names = [row_name(form, task) for form in FORMS]
    found = [{seed for seed, rows in outcome.per_seed.items() if name in rows} for name in names]
    return set.intersection(*filter(None, found)) if any(found) else set()


def shown_values(outcome: Outcome, task: str, key: Key) -> Values:
    """Seed → number, of the seeds that all forms have; ensembles have their own."""
    found = numbers_of(outcome, task, key)
    if key.method == ENSEMBLE:
        return found
    seeds = shared_seeds(outcome, task)
    return {seed: value for seed, value in found.items() if seed in seeds}


def parts_of(outcome: Outcome, task: str) -> list[str]:
    """The parts that a task was measured on, in order."""
    name = row_name(PLAIN, task)
    keys = [
        key for rows in outcome.per_seed.values() for key in rows.get(name, {}) if f" | {ONE} | NLL" in key
    ]
    return list(dict.fromkeys(key.split(" | ")[0] for key in keys))


def kind_of(task: str, part: str) -> str:
    """What a part is called that several tasks may have."""
    if part == task:
        return DEVELOPMENT
    return f"{part.removeprefix(task).strip()} rows" if part.startswith(task) else part


class Verdict(NamedTuple):
    """Whether a method is better than both baselines.

    Attributes:
        rows: what it was measured on; the same of all tasks.
        task: of GLUE.
        method: its name.
        measure: its name.
        differences: to each baseline: their mean over seeds, and its interval.
        corrected: p of each, corrected over tasks × measures.
    """

    rows: str
    task: str
    method: str
    measure: str
    differences: tuple[tuple[float, float, float], ...]
    corrected: tuple[float, ...]

    @property
    def wins(self) -> bool:
        """Whether both corrected p-values are below .05, in the right direction."""
        better = MEASURES[self.measure]
        return all(
            p < 0.05 and better * mean > 0
            for (mean, _, _), p in zip(self.differences, self.corrected, strict=True)
        )


def verdicts(outcome: Outcome) -> list[Verdict]:
    """Each method against both baselines on each kind of rows, corrected over tasks × measures.

    What has fewer than three pairs, such as two ensembles, is not judged.
    """
    kinds: dict[str, list[tuple[str, str]]] = {}
    for task in outcome.config["data"]:
        for part in parts_of(outcome, task):
            kinds.setdefault(kind_of(task, part), []).append((task, part))
    methods = [method for method in COSTS if method not in (*BASELINES, ONE)]
    return [
        verdict
        for rows, parts in kinds.items()
        for method in methods
        for verdict in verdicts_of(outcome, rows, parts, method)
    ]


def verdicts_of(outcome: Outcome, rows: str, parts: Sequence[tuple[str, str]], method: str) -> list[Verdict]:
    """One method on one kind of rows, of all tasks that have it: a family of tests."""
    cases = []
    for task, part in parts:
        for measure in MEASURES:
            ours = shown_values(outcome, task, Key(part, method, measure))
            pairs = []
            for baseline in BASELINES:
                theirs = numbers_of(outcome, task, Key(part, baseline, measure))
                pairs.append([ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))])
            if all(len(pair) >= FEWEST for pair in pairs):
                cases.append((task, measure, pairs))
    if not cases:
        return []
    corrected = [
        correct_by_holm([paired_p(pairs[place]) for _, _, pairs in cases]) for place in range(len(BASELINES))
    ]
    return [
        Verdict(rows, task, method, measure, tuple(map(mean_interval, pairs)), p)
        for (task, measure, pairs), *p_values in zip(cases, *corrected, strict=True)
        for p in [tuple(p_values)]
    ]


def report(outcome: Outcome) -> Report:
    """All measures of all methods, and which of them win."""
    grids = []
    for task in outcome.config["data"]:
        for part in parts_of(outcome, task):
            lines = []
            for method, cost in COSTS.items():
                cells = [shown_values(outcome, task, Key(part, method, measure)) for measure in SHOWN]
                if any(cells):
                    count = max(len(each) for each in cells)
                    shown = [mean_cell(each, 2 if max(each.values(), default=0) > 2 else 3) for each in cells]
                    lines.append((method, [str(count), str(cost), *shown]))
            title = task if part == task else f"{task}, {kind_of(task, part)}"
            grids.append(Grid(title, ["n", "forward passes", *SHOWN], lines))
    grids.append(fitted_grid(outcome))
    judged = verdicts(outcome)
    won = [
        (
            f"{each.task}, {each.rows}: {each.method}",
            [
                each.measure,
                *(
                    f"{cell(mean, digits=3)} ({cell(low, digits=3)} … {cell(high, digits=3)}), p {p:.3f}"
                    for (mean, low, high), p in zip(each.differences, each.corrected, strict=True)
                ),
            ],
        )
        for each in judged
        if each.wins
    ]
    grids.append(Grid("Wins", ["measure", *(f"− {each}" for each in BASELINES)], won))
    counts = [
        f"{rows} {sum(each.wins for each in judged if each.rows == rows)} of "
        f"{sum(each.rows == rows for each in judged)}"
        for rows in dict.fromkeys(each.rows for each in judged)
    ]
    missing = [f"{part} ({reason})" for part, reason in outcome.config.get("missing", {}).items()]
    notes = [
        f"Comparisons that are wins: {', '.join(counts) or 'none, as nothing has three seeds'}. A win is "
        "better than one pass + temperature and than dropout left on, paired over seeds, with both p-values "
        "below .05 after correction (Holm) over tasks × measures of a method on one kind of rows.",
        f"Accuracy, ECE and PAvPU (at .05) in %; accuracy cannot be won. AUROC: of confidence for finding "
        f"errors; AURC: area under the risk–coverage curve. Samples: {SAMPLES}. PAvPU of a single pass is "
        "its accuracy: nothing varies, so that it is certain of every row. Temperature, the noise at test "
        "and Laplace's prior are chosen on held-out training rows.",
        "Ensembles are means of two plain models with seeds 0 and 1, 2 and 3, …, each in one ensemble; they "
        "are compared with the first of the two. Fewer than three have no interval and win nothing. All "
        "other methods are shown and compared with the seeds that all forms have.",
        *([f"Not measured, as not there: {'; '.join(missing)}."] if missing else []),
        *notes_of(outcome),
    ]
    return report_of(grids, notes)


def fitted_grid(outcome: Outcome) -> Grid:
    """What held-out rows have chosen, mean over seeds; older results do not have it."""
    found: dict[str, dict[str, Values]] = {}
    for seed, rows in outcome.per_seed.items():
        for name, entry in rows.items():
            for what, value in entry.get("fitted", {}).items():
                task = name.partition(", ")[2]
                found.setdefault(what, {}).setdefault(task, {})[seed] = value
    tasks = list(outcome.config["data"])
    lines = [
        (what, [mean_cell(by_task[task], 3) if task in by_task else "–" for task in tasks])
        for what, by_task in found.items()
    ]
    return Grid("Chosen on held-out rows", tasks, lines)


UNCERTAINTY = Recipe(
    name="uncertainty",
    title="Does the model know when it does not know?",
    paper="no paper's table: Bayesian attention beside simpler methods",
    published={},
    run=run,
    report=report,
    seeds=5,
    folder="understanding",
    options=OPTIONS,
)
