"""Tables 3 and 4 of Wang et al. 2021, and Table 5 of Fan et al. 2020: attention on language understanding.

All fine-tune the same pretrained model, by `understanding_runs`, and share their runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from overt.data.glue import TASKS
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request
from overt.recipes._row_reports import gains_grid, mean_cell, notes_on_runs, report_of, values
from overt.recipes.understanding_forms import PLAIN, row_name
from overt.recipes.understanding_runs import BAM_SCORE, OPTIONS, run_forms
from overt.recipes.understanding_tables import (
    ABLATIONS,
    AVERAGES,
    BAM,
    BAM_TUNED,
    DEV,
    GLUE,
    SIZES,
    TEST,
    TUNED,
)

IN_TABLE_3 = (PLAIN, "Evolving", "RealFormer", "Synthesizer random", "Synthesizer dense")
IN_TABLE_4 = (PLAIN, "Evolving", "w/o convolution", "w/o skip", "1×1", "5×5")
IN_BAM = (PLAIN, "BAM-WC", "BAM-WC weight 1", "no KL", "both")
# Form → the published row that shows its gain, and the one that it is compared with: development sets.
GAINS_3 = {
    "Evolving": ("EA-BERT-Base", "BERT-Base"),
    "RealFormer": ("RealFormer", "BERT-Large"),
    "Synthesizer random": ("Synthesizer", "T5-Base"),
    "Synthesizer dense": ("Synthesizer", "T5-Base"),
}


def run_table_3(request: Request) -> Outcome:
    """Fine-tune on all tasks of GLUE."""
    return run_forms(request, GLUE, IN_TABLE_3)


def run_table_4(request: Request) -> Outcome:
    """Fine-tune with each part of Evolving left out."""
    return run_forms(request, tuple(ABLATIONS[PLAIN]), IN_TABLE_4)


def run_bam_table_5(request: Request) -> Outcome:
    """Fine-tune with random attention weights."""
    return run_forms(request, GLUE, IN_BAM)


# --- Reports ---


def measured_forms(outcome: Outcome) -> dict[str, list[str]]:
    """Form → the tasks that it was measured on, in the order of the tables."""
    forms: dict[str, list[str]] = {}
    for form in outcome.config["forms"]:
        tasks = [task for task in outcome.config["data"] if values(outcome, row_name(form, task), "score")]
        if tasks:
            forms[form] = tasks
    return forms


def keys_of(task: str) -> list[str]:
    """Keys of all numbers that GLUE reports of a task."""
    return [f"{part} {metric}" for part in TASKS[task].server_rows for metric in TASKS[task].metrics]


def measured_grid(outcome: Outcome) -> Grid:
    """All metrics of all forms, and the average over tasks that all have."""
    forms = measured_forms(outcome)
    tasks = list(outcome.config["data"])
    columns = ["added parameters", "average", "n"]
    columns += [key for task in tasks for key in keys_of(task)]
    lines = []
    for form, known in forms.items():
        added = values(outcome, row_name(form, known[0]), "added")
        averages = averages_of(outcome, form, tasks)
        counts = [len(values(outcome, row_name(form, task), "score")) for task in known]
        cells = [f"{int(next(iter(added.values()))):,}", mean_cell(averages), ", ".join(map(str, counts))]
        for task in tasks:
            cells += [mean_cell(values(outcome, row_name(form, task), key)) for key in keys_of(task)]
        lines.append((form, cells))
    return Grid(f"Measured, {outcome.config['model']}, development rows, %", columns, lines)


def averages_of(outcome: Outcome, form: str, tasks: Sequence[str]) -> dict[int, float]:
    """Seed → mean of the first metrics over the tasks, of the seeds that have all of them."""
    found = [values(outcome, row_name(form, task), "score") for task in tasks]
    seeds = set.intersection(*(set(numbers) for numbers in found)) if found else set()
    return {seed: statistics.fmean(numbers[seed] for numbers in found) for seed in sorted(seeds)}


def differences(outcome: Outcome, published: Mapping[str, Mapping[str, float]], key: str = "score") -> Grid:
    """Each form on each task against plain attention with the same seed."""
    forms = measured_forms(outcome)
    pairs = {
        row_name(form, task): row_name(PLAIN, task)
        for form, tasks in forms.items()
        if form != PLAIN
        for task in tasks
    }
    return gains_grid(outcome, pairs, published, key, "points")


def published_scores(outcome: Outcome, rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Row → published score, of forms (and plain) by task."""
    return {
        row_name(form, task): score
        for form, scores in rows.items()
        for task, score in scores.items()
        if task in outcome.config["data"]
    }


def rates_grid(outcome: Outcome) -> Grid:
    """What the learning rates were chosen by."""
    lines: dict[str, list[str]] = {}
    columns: list[str] = []
    for task in outcome.config["data"]:
        trial = f"{row_name(PLAIN, task)}, rate "
        found = {name for rows in outcome.per_seed.values() for name in rows if name.startswith(trial)}
        names = sorted(found, key=lambda name: float(name.removeprefix(trial)))
        columns = columns or [name.rsplit(" ", 1)[1] for name in names]
        if names:
            lines[task] = [mean_cell(values(outcome, name, "score")) for name in names]
    rows = [(task, [*cells, f"{outcome.config['rates'][task]:g}"]) for task, cells in lines.items()]
    return Grid("Learning rates, chosen on held-out rows with plain attention", [*columns, "chosen"], rows)


def notes_of(outcome: Outcome) -> list[str]:
    """What a reader needs to know about model, data and training."""
    config = outcome.config
    row = next(iter(config["rows"].values()))
    training = row["training"]
    sizes = f"batches of {training['batch']}, {training['longest']} tokens at most"
    if config["published_settings"]:
        sizes = "batches and lengths of each task as published"
    data = []
    for task, each in config["data"].items():
        dev = ", ".join(f"{count:,}" for count in each["dev"].values())
        data.append(f"{task} {each['train']:,} training and {dev} development rows")
    if config["published_settings"]:
        how = f"Settings are the published ones of {config['published_settings']}, on all training rows."
    else:
        how = (
            f"A fixed, stratified {config['held_out']:.0%} of the training rows is held out, and chooses the "
            "learning rate for plain attention alone; all forms use it. Development rows are read once. The "
            "model is a stand-in for the papers'."
        )
    head = f" New weights, drawn at random: {', '.join(config['head'])}." if config["head"] else ""
    return [
        f"Model: {config['model']}.{head} {how}",
        f"Training: AdamW with ε 1e-8, {sizes}, "
        "linear warm-up and decay, the last step's weights, float32. Models with the same seed start from "
        "the same weights and see the same batches.",
        f"Data: {'; '.join(data)}.",
        *notes_on_runs(outcome),
    ]


def first_of(scores: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """Task → its first published number."""
    return {task: numbers[0] for task, numbers in scores.items()}


def report_table_3(outcome: Outcome) -> Report:
    """Table 3, with all published rows."""
    gains: dict[str, dict[str, float]] = {}
    for form, (row, baseline) in GAINS_3.items():
        gains[f"published, {row}"] = {
            **published_scores(outcome, {form: first_of(DEV[row])}),
            **published_scores(outcome, {PLAIN: first_of(DEV[baseline])}),
        }
    columns = ["million parameters", "billion FLOPs", "average", *GLUE]
    lines = []
    for part, table in (("dev", DEV), ("test", TEST)):
        for name, scores in table.items():
            cells = ["/".join(f"{number:.1f}" for number in scores[task]) for task in GLUE]
            size, flops = SIZES[name]
            lines.append(
                (f"{name}, {part}", [f"{size:.1f}", f"{flops:.1f}", f"{AVERAGES[part][name]:.1f}", *cells])
            )
    grids = [measured_grid(outcome), differences(outcome, gains), rates_grid(outcome)]
    notes = [
        "The published averages of RoBERTa-Large do not follow from the first metric of each task (87.9 and "
        "89.1 on dev, 84.7 and 86.1 on test would), and QQP's two numbers change places between rows. "
        "Evolving adds 14,388 parameters to BERT-Base and 53,360 to BERT-Large, so that the published 0.9 "
        "and 1.7 million more cannot be its own.",
        *notes_of(outcome),
    ]
    return report_of([*grids, Grid("Published", columns, lines)], notes)


def report_table_4(outcome: Outcome) -> Report:
    """Table 4."""
    rows = {form: first_of(scores) for form, scores in ABLATIONS.items()}
    published = {"published, BERT-Base": published_scores(outcome, rows)}
    tasks = list(ABLATIONS[PLAIN])
    lines = [
        (form, ["/".join(f"{number:.1f}" for number in scores[task]) for task in tasks])
        for form, scores in ABLATIONS.items()
    ]
    grids = [measured_grid(outcome), differences(outcome, published), rates_grid(outcome)]
    return report_of([*grids, Grid("Published, BERT-Base", tasks, lines)], notes_of(outcome))


def report_bam_table_5(outcome: Outcome) -> Report:
    """Table 5 of Fan et al. 2020."""
    rows = {
        PLAIN: {task: plain[0] for task, (plain, _) in BAM.items()},
        **{form: {task: bam[0] for task, (_, bam) in BAM.items()} for form in ("BAM-WC", "BAM-WC weight 1")},
    }
    published = {"published, ALBERT-base": published_scores(outcome, rows)}
    lines = [
        (task, [" / ".join(f"{number:.2f}" for number in numbers) for numbers in both])
        for task, both in BAM.items()
    ]
    grids = [measured_grid(outcome), differences(outcome, published, BAM_SCORE), rates_grid(outcome)]
    grids.append(Grid("Published, ALBERT-base", ["plain", "BAM-WC"], lines))
    notes = [
        "The paper does not name its metrics: accuracy for MRPC and QQP and Pearson's r for STS-B are taken "
        "to be meant, and differences are in these.",
        *notes_of(outcome),
    ]
    return report_of(grids, notes)


def _settings(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {task: each._asdict() for task, each in rows.items()} for name, rows in table.items()}


SUBMISSION = {
    "submission": Option("write the zip files of GLUE's server, one for each form", False, moves=False)
}
TABLE_3 = Recipe(
    name="ea-table-3",
    title="Language understanding with evolving attention",
    paper="Wang et al. 2021, Evolving Attention with Residual Convolutions, Table 3",
    published={"dev": DEV, "test": TEST, "averages": AVERAGES, "sizes": SIZES, "settings": _settings(TUNED)},
    run=run_table_3,
    report=report_table_3,
    seeds=5,
    folder="understanding",
    options={**OPTIONS, **SUBMISSION},
)
TABLE_4 = Recipe(
    name="ea-table-4",
    title="Language understanding with evolving attention: ablations",
    paper="Wang et al. 2021, Evolving Attention with Residual Convolutions, Table 4",
    published={"rows": ABLATIONS},
    run=run_table_4,
    report=report_table_4,
    seeds=5,
    folder="understanding",
    options=OPTIONS,
)
BAM_TABLE_5 = Recipe(
    name="bam-table-5",
    title="Language understanding with Bayesian attention",
    paper="Fan et al. 2020, Bayesian Attention Modules, Table 5",
    published={"rows": BAM, "settings": {task: each._asdict() for task, each in BAM_TUNED.items()}},
    run=run_bam_table_5,
    report=report_bam_table_5,
    seeds=5,
    folder="understanding",
    options=OPTIONS,
)
