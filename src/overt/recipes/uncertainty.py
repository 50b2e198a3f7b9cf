"""Does a model know when it does not know? Random attention beside the simpler ways to be uncertain.

Models are fine-tuned as for `ea-table-3`. Each is measured on the development rows, on MRPC's test rows, and
on development rows with typos and with words missing.
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
from overt.data.glue import Row, Splits
from overt.data.shifts import drop_words, typos
from overt.judge import laplace
from overt.judge.uncertainty import aurc, brier, ece, error_auroc, nll, pavpu
from overt.mechanisms.bayesian import Bayesian
from overt.recipes._recipe import Grid, Outcome, Recipe, Report, Request, cell
from overt.recipes._row_reports import FEWEST, mean_cell, report_of
from overt.recipes._rows import Numbers, folder_name
from overt.recipes.ea_understanding import notes_of
from overt.recipes.paired import correct_by_holm, mean_interval, paired_p
from overt.recipes.text_training import TEST_BATCH, Encoded, Texts, collator_of, predict, sample
from overt.recipes.understanding_forms import PLAIN, TextRow, row_name
from overt.recipes.understanding_runs import (
    HELD_OUT,
    OPTIONS,
    PREDICTIONS,
    Measured,
    Shared,
    run_forms,
)

TASKS = ("CoLA", "SST-2", "MRPC")
FORMS = (PLAIN, "Bayesian k=2", "Bayesian k=10")
SAMPLES = 20
RATES = (0.1, 0.3)  # of words that are misspelt or dropped
ONE, TEMPERATURE, DROPOUT = "one pass", "one pass + temperature", "dropout left on"
LAPLACE, NOISE, ENSEMBLE = "last-layer Laplace", "noise at test + temperature", "ensemble of two"
# Method → forward passes for a prediction; those of random attention are added below.
COSTS = {ONE: 1, TEMPERATURE: 1, DROPOUT: SAMPLES, LAPLACE: 1, NOISE: SAMPLES, ENSEMBLE: 2}
WAYS = ("", " + temperature", " + dropout", " + dropout + temperature")
COSTS |= {f"{form}{way}": SAMPLES for form in FORMS[1:] for way in WAYS}
BASELINES = (TEMPERATURE, DROPOUT)
# Measure → 1 if higher is better, −1 if lower is.
MEASURES = {"accuracy": 1, "NLL": -1, "Brier": -1, "ECE": -1, "AUROC": 1, "AURC": -1, "PAvPU": 1}


class Key(NamedTuple):
    """Names a number: of a part of the data, a method and a measure."""

    part: str
    method: str
    measure: str

    def __str__(self) -> str:
        return " | ".join(self)


def run(request: Request) -> Outcome:
    """Fine-tune plain and random attention, and measure every method."""
    return run_forms(request, TASKS, FORMS, measure=uncertainties, more=shifted, finish=add_ensembles)


def shifted(task: str, splits: Splits) -> dict[str, list[Row]]:
    """Development rows with typos, and with words missing."""
    rows = splits.dev[task]
    parts = {}
    for rate in RATES:
        for what, change in (("typos", typos), ("words dropped", drop_words)):
            texts = [change(list(column), rate) for column in zip(*(row.texts for row in rows), strict=True)]
            changed = [
                Row(tuple(both), row.label) for both, row in zip(zip(*texts, strict=True), rows, strict=True)
            ]
            parts[f"{rate:.0%} {what}"] = changed
    return parts


def measures(samples: Tensor, labels: Tensor) -> dict[str, float | None]:
    """All measures of predictive samples, (samples, rows, classes)."""
    mean = samples.double().mean(dim=0)
    mean = mean / mean.sum(dim=1, keepdim=True)  # of float32
    auroc = error_auroc(mean, labels)
    return {
        "accuracy": 100 * float((mean.argmax(dim=1) == labels).double().mean()),
        "NLL": nll(mean.clamp(min=1e-12), labels) if bool((mean == 0).any()) else nll(mean, labels),
        "Brier": brier(mean, labels),
        "ECE": 100 * ece(mean, labels),
        "AUROC": None if math.isnan(auroc) else auroc,
        "AURC": aurc(mean, labels),
        "PAvPU": 100 * pavpu(samples, labels)[0.05] if len(samples) > 1 else None,
    }


def batches(rows: Sequence[Encoded], tokenizer: Any) -> Iterator[dict[str, Tensor]]:
    """Padded batches with labels."""
    collate = collator_of(tokenizer)
    for start in range(0, len(rows), TEST_BATCH):
        yield collate(list(rows[start : start + TEST_BATCH]))


def uncertainties(model: Any, texts: Texts, tokenizer: Any, row: TextRow, seed: int) -> Measured:
    """Measures of every method that one model allows, on every part but the held-out rows."""
    parts = {name: rows for name, rows in texts.parts.items() if name != HELD_OUT}
    predicted = predictions_of(model, texts, parts, tokenizer, row, seed)
    numbers: dict[str, Any] = {}
    for (part, method), samples in predicted.items():
        labels = torch.tensor([each["labels"] for each in parts[part]])
        found = measures(samples, labels)
        numbers |= {str(Key(part, method, measure)): value for measure, value in found.items()}
    kept = {f"{part} | {ONE}": predicted[part, ONE][0].float() for part in parts} if row.form == PLAIN else {}
    return numbers, kept


def predictions_of(
    model: Any, texts: Texts, parts: Mapping[str, list[Encoded]], tokenizer: Any, row: TextRow, seed: int
) -> dict[tuple[str, str], Tensor]:
    """Part and method → predictive samples (samples, rows, classes)."""
    held = texts.parts[HELD_OUT]
    found: dict[tuple[str, str], Tensor] = {}

    def draw(method: str, net: Any, **options: Any) -> None:
        for part, rows in parts.items():
            found[part, method] = sample(net, rows, tokenizer, SAMPLES, seed=seed, **options)

    if row.form != PLAIN:
        for dropout, way in ((False, ""), (True, " + dropout")):
            draw(f"{row.form}{way}", model, dropout=dropout, calibrated=False)
            overt.calibrate(model, batches(held, tokenizer), samples=SAMPLES, dropout=dropout, seed=seed)
            draw(f"{row.form}{way} + temperature", model, dropout=dropout)
        return found
    temperature = overt.calibrate(model, batches(held, tokenizer)).temperature
    for part, rows in parts.items():
        logits = predict(model, rows, tokenizer).double()
        found[part, ONE] = logits.softmax(dim=-1).unsqueeze(0)
        found[part, TEMPERATURE] = (logits / temperature).softmax(dim=-1).unsqueeze(0)
    draw(DROPOUT, model, dropout=True, calibrated=False)
    seen = laplace.last_layer(model, batches(texts.train, tokenizer))
    apart = laplace.last_layer(model, batches(held, tokenizer))
    posterior = laplace.fit(seen.weight, seen.bias, seen.features, seen.labels)
    posterior = posterior.tuned(apart.features, apart.labels)
    for part, rows in parts.items():
        features = laplace.last_layer(model, batches(rows, tokenizer)).features
        found[part, LAPLACE] = posterior.probabilities(features, seed=seed)
    noisy = copy.deepcopy(model)
    del noisy.config.overt_temperature  # of the plain model
    overt.attach(noisy, Bayesian(prior=None), seed=seed)
    overt.calibrate(noisy, batches(held, tokenizer), noise=True, samples=SAMPLES, seed=seed)
    draw(NOISE, noisy)
    return found


def add_ensembles(numbers: Numbers, shared: Shared, place: Path) -> None:
    """Add the measures of two plain models' mean to the first of them, where both have predictions."""
    for (name, seed), entry in numbers.items():
        task = name.partition(", ")[2]
        other = numbers.get((name, seed + 1))
        if not name.startswith(f"{PLAIN}, ") or seed % 2 or other is None or task not in shared.texts:
            continue
        files = [place / folder_name(name) / f"seed-{each}" / PREDICTIONS for each in (seed, seed + 1)]
        if not all(file.is_file() for file in files):
            continue
        for part, rows in shared.texts[task].parts.items():
            if part == HELD_OUT:
                continue
            shape = torch.Size((len(rows), len(shared.texts[task].classes)))
            both = [stored(file, f"{part} | {ONE}", shape) for file in files]
            labels = torch.tensor([each["labels"] for each in rows])
            found = measures(torch.stack(both).mean(dim=0, keepdim=True), labels)
            entry |= {str(Key(part, ENSEMBLE, measure)): value for measure, value in found.items()}


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


def values_of(outcome: Outcome, task: str, key: Key) -> Values:
    """Seed → number."""
    form = next((form for form in FORMS[1:] if key.method.startswith(form)), PLAIN)
    name = row_name(form, task)
    entries = {seed: rows[name] for seed, rows in outcome.per_seed.items() if name in rows}
    return {
        seed: float(entry[str(key)]) for seed, entry in entries.items() if entry.get(str(key)) is not None
    }


def parts_of(outcome: Outcome, task: str) -> list[str]:
    """The parts that a task was measured on, in order."""
    name = row_name(PLAIN, task)
    keys = [
        key for rows in outcome.per_seed.values() for key in rows.get(name, {}) if f" | {ONE} | NLL" in key
    ]
    return list(dict.fromkeys(key.split(" | ")[0] for key in keys))


class Verdict(NamedTuple):
    """Whether a method is better than both baselines."""

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
    """Each method against both baselines on development rows, corrected over tasks × measures."""
    found = []
    for method in COSTS:
        if method in (*BASELINES, ONE):
            continue
        cases = []
        for task in outcome.config["data"]:
            for measure in MEASURES:
                ours = values_of(outcome, task, Key(task, method, measure))
                pairs = []
                for baseline in BASELINES:
                    theirs = values_of(outcome, task, Key(task, baseline, measure))
                    seeds = sorted(set(ours) & set(theirs))
                    pairs.append([ours[seed] - theirs[seed] for seed in seeds])
                if all(len(pair) >= FEWEST for pair in pairs):
                    cases.append((task, measure, pairs))
        corrected = [
            correct_by_holm([paired_p(pairs[place]) for _, _, pairs in cases]) if cases else []
            for place in range(len(BASELINES))
        ]
        for number, (task, measure, pairs) in enumerate(cases):
            differences = tuple(mean_interval(pair) for pair in pairs)
            p = tuple(column[number] for column in corrected)
            found.append(Verdict(task, method, measure, differences, p))
    return found


def report(outcome: Outcome) -> Report:
    """All measures of all methods, and which of them win."""
    grids = []
    for task in outcome.config["data"]:
        for part in parts_of(outcome, task):
            lines = []
            for method, cost in COSTS.items():
                cells = [values_of(outcome, task, Key(part, method, measure)) for measure in MEASURES]
                if any(cells):
                    count = max(len(each) for each in cells)
                    shown = [mean_cell(each, 2 if max(each.values(), default=0) > 2 else 3) for each in cells]
                    lines.append((method, [str(count), str(cost), *shown]))
            title = task if part == task else f"{task}, {part}"
            grids.append(Grid(title, ["n", "forward passes", *MEASURES], lines))
    judged = verdicts(outcome)
    won = [
        (
            f"{each.task}: {each.method}",
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
    grids.append(Grid("Wins on development rows", ["measure", *(f"− {each}" for each in BASELINES)], won))
    notes = [
        f"{len(won)} of {len(judged)} comparisons are wins: better than one pass + temperature and than "
        "dropout left on with both p-values below .05, corrected (Holm) over tasks × measures of the method.",
        f"Accuracy, ECE and PAvPU (at .05) in %. AUROC: of confidence for finding errors; AURC: area under "
        f"the risk–coverage curve. Samples: {SAMPLES}. Temperature, the noise at test and Laplace's prior "
        "are chosen on held-out training rows. Ensembles are means of two plain models with seeds 0 and 1, "
        "2 and 3, …; they are compared with the first of the two, and fewer than three win nothing.",
        *notes_of(outcome),
    ]
    return report_of(grids, notes)


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
