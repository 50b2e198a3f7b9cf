"""Tables 3 and 4 of Wang et al. 2021, and Table 5 of Fan et al. 2020: attention on language understanding.

All fine-tune the same pretrained model, by `understanding_runs`, and share their runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

from overt.data import squad
from overt.data.glue import TASKS
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request
from overt.recipes._row_reports import gains_grid, mean_cell, notes_on_runs, report_of, values
from overt.recipes.squad_runs import EXACT, F1, METRICS
from overt.recipes.understanding_forms import PLAIN, row_name
from overt.recipes.understanding_runs import BAM_SCORE, OPTIONS, SQUAD, run_forms
from overt.recipes.understanding_tables import (
    ABLATIONS,
    ALBERT,
    AVERAGES,
    BAM,
    BAM_TUNED,
    DEV,
    GLUE,
    SIZES,
    TEST,
    TUNED,
    published_as,
)

AVERAGE = "average"  # in place of a task
IN_TABLE_3 = (PLAIN, "Evolving", "RealFormer", "Synthesizer random")
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
    """Fine-tune on all tasks of GLUE, and on SQuAD where it is asked for."""
    return run_forms(request, GLUE, IN_TABLE_3, also=(SQUAD, *squad.NAMES))


def run_table_4(request: Request) -> Outcome:
    """Fine-tune with each part of Evolving left out."""
    return run_forms(request, tuple(ABLATIONS[PLAIN]), IN_TABLE_4)


def run_bam_table_5(request: Request) -> Outcome:
    """Fine-tune with random attention weights."""
    return run_forms(request, tuple(BAM), IN_BAM, also=(SQUAD, squad.SUBSET_NAME))


# --- Reports ---


def measured_forms(outcome: Outcome) -> dict[str, list[str]]:
    """Form → the tasks that it was measured on, in the order of the tables."""
    forms: dict[str, list[str]] = {}
    for form in outcome.config["forms"]:
        tasks = [task for task in outcome.config["data"] if values(outcome, row_name(form, task), "score")]
        if tasks:
            forms[form] = tasks
    return forms


def glue_tasks(outcome: Outcome) -> list[str]:
    """The tasks of GLUE that are there, which averages are over: SQuAD is none of them."""
    return [task for task in outcome.config["data"] if task in TASKS]


def keys_of(task: str) -> list[str]:
    """Keys of all numbers that GLUE or SQuAD reports of a task."""
    if task in squad.NAMES:
        return [f"{task} {metric}" for metric in METRICS]
    return [f"{part} {metric}" for part in TASKS[task].server_rows for metric in TASKS[task].metrics]


def measured_grid(outcome: Outcome, key: str = "score") -> Grid:
    """All metrics of all forms, and the average over GLUE's tasks, of the metrics that differences are in."""
    forms = measured_forms(outcome)
    tasks = list(outcome.config["data"])
    columns = ["parameters", "added", "average", "n"]
    columns += [key for task in tasks for key in keys_of(task)]
    lines = []
    for form, known in forms.items():
        sizes = [values(outcome, row_name(form, known[0]), key) for key in ("parameters", "added")]
        averages = averages_of(outcome, form, glue_tasks(outcome), key)
        counts = {task: len(values(outcome, row_name(form, task), "score")) for task in known}
        cells = [f"{int(next(iter(size.values()))):,}" for size in sizes]
        cells += [mean_cell(averages), seeds_cell(counts, tasks)]
        for task in tasks:
            cells += [mean_cell(values(outcome, row_name(form, task), key)) for key in keys_of(task)]
        lines.append((form, cells))
    return Grid(f"Measured, {outcome.config['model']}, development rows, %", columns, lines)


def seeds_cell(counts: Mapping[str, int], tasks: Sequence[str]) -> str:
    """Number of seeds, with the tasks that have it unless all do."""
    if len(counts) == len(tasks) and len(set(counts.values())) == 1:
        return str(next(iter(counts.values())))
    groups = {count: [task for task in counts if counts[task] == count] for count in counts.values()}
    return "; ".join(f"{count} ({', '.join(group)})" for count, group in groups.items())


def averages_of(outcome: Outcome, form: str, tasks: Sequence[str], key: str = "score") -> dict[int, float]:
    """Seed → mean of the first metrics over the tasks, of the seeds that have all of them."""
    found = [values(outcome, row_name(form, task), key) for task in tasks]
    seeds = set.intersection(*(set(numbers) for numbers in found)) if found else set()
    return {seed: statistics.fmean(numbers[seed] for numbers in found) for seed in sorted(seeds)}


def averages(outcome: Outcome, published: Mapping[str, Mapping[str, float]], key: str = "score") -> Grid:
    """Differences of averages over the tasks of GLUE that are there, beside the published ones."""
    tasks, forms = glue_tasks(outcome), list(measured_forms(outcome))
    per_seed: dict[int, dict[str, Any]] = {}
    for form in forms if len(tasks) > 1 else []:
        for seed, average in averages_of(outcome, form, tasks, key).items():
            per_seed.setdefault(seed, {})[row_name(form, AVERAGE)] = {key: average}
    theirs = {heading: published_averages(scores, forms, tasks) for heading, scores in published.items()}
    pairs = {row_name(form, AVERAGE): row_name(PLAIN, AVERAGE) for form in forms if form != PLAIN}
    title = f"Differences of the average over {', '.join(tasks)}"
    return gains_grid(Outcome({}, per_seed), pairs, theirs, key, "points", title)


def published_averages(
    scores: Mapping[str, float], forms: Sequence[str], tasks: Sequence[str]
) -> dict[str, float]:
    """Row → mean of published scores over the tasks, of the forms that have all of them."""
    rows = {form: [scores.get(row_name(form, task)) for task in tasks] for form in forms}
    return {
        row_name(form, AVERAGE): statistics.fmean(found)
        for form, numbers in rows.items()
        if (found := [number for number in numbers if number is not None]) and len(found) == len(tasks)
    }


def note_on_averages(outcome: Outcome, rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The published averages over the tasks of GLUE that are there, of models by name."""
    tasks = glue_tasks(outcome)
    found = {
        name: statistics.fmean(scores[task] for task in tasks)
        for name, scores in rows.items()
        if len(tasks) > 1 and all(task in scores for task in tasks)
    }
    if not found:
        return []
    told = ", ".join(f"{name} {average:.1f}" for name, average in found.items())
    return [f"Published averages over {', '.join(tasks)}: {told}."]


def differences(outcome: Outcome, published: Mapping[str, Mapping[str, float]], key: str = "score") -> Grid:
    """Each form on each task of GLUE against plain attention with the same seed."""
    return gains_grid(outcome, pairs_of(outcome, TASKS), published, key, "points")


def pairs_of(outcome: Outcome, tasks: Container[str]) -> dict[str, str]:
    """Row of a form on one of these tasks → that of plain attention."""
    return {
        row_name(form, task): row_name(PLAIN, task)
        for form, known in measured_forms(outcome).items()
        if form != PLAIN
        for task in known
        if task in tasks
    }


def squad_differences(outcome: Outcome, published: Mapping[str, Sequence[str]] | None = None) -> list[Grid]:
    """The same for SQuAD's exact match and F1.

    Args:
        outcome: of the recipe.
        published: heading of a column → the forms that Fan et al. 2020 are taken to have measured.
    """
    grids = []
    for place, (key, metric) in enumerate(((EXACT, "exact match"), (F1, "F1"))):
        gains = {
            heading: {
                row_name(form, task): BAM[published_as(task)][form != PLAIN][place]
                for form in (PLAIN, *forms)
                for task in outcome.config["data"]
                if task in squad.NAMES
            }
            for heading, forms in (published or {}).items()
        }
        title = f"SQuAD, {metric}: differences with the same seed"
        grids.append(gains_grid(outcome, pairs_of(outcome, squad.NAMES), gains, key, "points", title))
    return grids


def published_scores(outcome: Outcome, rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Row → published score, of forms (and plain) by task."""
    return {
        row_name(form, task): score
        for form, scores in rows.items()
        for task, score in scores.items()
        if task in outcome.config["data"]
    }


def tables_of(
    outcome: Outcome,
    published: Mapping[str, Mapping[str, float]],
    key: str = "score",
    on_squad: Mapping[str, Sequence[str]] | None = None,
) -> list[Grid]:
    """What was measured, the differences to plain attention, and what chose the learning rates.

    `on_squad` is as `published` of `squad_differences`.
    """
    return [
        measured_grid(outcome, key),
        differences(outcome, published, key),
        averages(outcome, published, key),
        *squad_differences(outcome, on_squad),
        rates_grid(outcome),
    ]


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


def notes_of(outcome: Outcome, others: Collection[str] = ()) -> list[str]:
    """What a reader needs to know about model, data and training.

    Args:
        outcome: all runs.
        others: names of rows that are not fine-tuned models.
    """
    config = outcome.config
    published, tasks = config["published_settings"], list(config["data"])
    chosen = config.get("chosen_rates", [] if published else tasks)
    labelled = [row for row in config["rows"].values() if row["task"] in TASKS]
    sizes = ""
    if published:
        sizes = "batches and lengths of each task as published, "
    elif labelled:
        training = labelled[0]["training"]
        sizes = f"batches of {training['batch']}, {training['longest']} tokens at most, "
    data = []
    for task, each in config["data"].items():
        dev = ", ".join(f"{count:,}" for count in each["dev"].values())
        what = "questions" if task in squad.NAMES else "rows"
        data.append(f"{task} {each['train']:,} training and {dev} development {what}")
    how = []
    if published:
        others = [task for task in tasks if task not in chosen]
        those = f" of {', '.join(others)}" if chosen else ""
        held = any(row.get("held_out") for row in config["rows"].values() if row["task"] in others)
        but = f" but a fixed, stratified {config['held_out']:.0%}, which is held out" if held else ""
        how.append(f"Settings{those} are the published ones of {published}, on all training rows{but}.")
    if chosen:
        those = f" of {', '.join(chosen)}" if published else ""
        stratified = ", stratified" if any(task in TASKS for task in chosen) else ""
        how.append(
            f"A fixed{stratified} {config['held_out']:.0%} of the training rows{those} is held out, and "
            "chooses the learning rate for plain attention alone; all forms use it. Development rows are "
            "read once."
        )
    if not published:
        how.append("The model is a stand-in for the papers'.")
    runs = [
        numbers.get("run", {})
        for rows in outcome.per_seed.values()
        for name, numbers in rows.items()
        if name not in others
    ]
    precisions = {run.get("settings", {}).get("precision", "float32") for run in runs}
    shown = {"float32": "float32", "tf32": "float32 with products in TF32"}
    precision = " or ".join(shown[each] for each in sorted(precisions))
    head = f" New weights, drawn at random: {', '.join(config['head'])}." if config["head"] else ""
    return [
        f"Model: {config['model']}.{head} {' '.join(how)}",
        f"Training: AdamW with ε 1e-8, {sizes}"
        f"linear warm-up and decay, the last step's weights, {precision}. "
        "Models with the same seed start from the same weights and see the same batches.",
        *notes_on_squad(outcome),
        f"Data: {'; '.join(data)}.",
        *notes_on_runs(outcome),
    ]


def notes_on_squad(outcome: Outcome) -> list[str]:
    """How SQuAD is trained on and scored, and that its public subsets are not SQuAD."""
    config, notes = outcome.config, []
    for task in config["data"]:
        rows = [row for row in config["rows"].values() if row["task"] == task]
        if task not in squad.NAMES:
            continue
        training, chosen = rows[0]["training"], task in config["chosen_rates"]
        parts = [
            f"{task}: batches of {training['batch']} windows of at most {training['longest']} tokens; "
            f"neighbouring windows share {training['stride']} tokens of the context."
        ]
        if chosen:
            parts.append(
                "Held-out questions are about articles, or contexts where none is named, that no model is "
                "trained on; the learning rate is the one with the best F1 on them."
            )
        if any(config["data"][task]["impossible"].values()):
            parts.append(
                "No answer is given where it scores higher than the best answer by more than a threshold: "
                + ("each model's best on held-out questions." if chosen else "0.")
            )
        if task == squad.SUBSET_NAME:
            parts.append(
                "These are public subsets of SQuAD 1.1, with XQuAD's English questions for development: "
                "scores are not comparable with published ones. A published gain beside them is SQuAD 1.1's."
            )
        notes.append(" ".join(parts))
    return notes


def first_of(scores: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
    """Task → the published number of its first metric: QQP's is F1, the lower one, wherever it stands."""
    return {task: min(numbers) if task == "QQP" else numbers[0] for task, numbers in scores.items()}


def report_table_3(outcome: Outcome) -> Report:
    """Table 3, with all published rows."""
    gains: dict[str, dict[str, float]] = {}
    for form, (row, baseline) in GAINS_3.items():
        rows = {form: first_of(DEV[row]), PLAIN: first_of(DEV[baseline])}
        gains.setdefault(f"published, {row}", {}).update(published_scores(outcome, rows))
    columns = ["million parameters", "billion FLOPs", "average", *GLUE]
    lines = []
    for part, table in (("dev", DEV), ("test", TEST)):
        for name, scores in table.items():
            cells = ["/".join(f"{number:.1f}" for number in scores[task]) for task in GLUE]
            size, flops = SIZES[name]
            lines.append(
                (f"{name}, {part}", [f"{size:.1f}", f"{flops:.1f}", f"{AVERAGES[part][name]:.1f}", *cells])
            )
    grids = tables_of(outcome, gains)
    notes = [
        *note_on_averages(outcome, {name: first_of(scores) for name, scores in DEV.items()}),
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
    notes = [
        *note_on_averages(outcome, rows),
        "Without convolution, the kernels are still counted, and multiplied by β = 0. Evolving adds 14,388 "
        "parameters to BERT-Base.",
        *notes_of(outcome),
    ]
    return report_of([*tables_of(outcome, published), Grid("Published, BERT-Base", tasks, lines)], notes)


def report_bam_table_5(outcome: Outcome) -> Report:
    """Table 5 of Fan et al. 2020."""
    forms = ("BAM-WC", "BAM-WC weight 1")
    rows = {
        PLAIN: {task: plain[0] for task, (plain, _) in BAM.items()},
        **{form: {task: bam[0] for task, (_, bam) in BAM.items()} for form in forms},
    }
    heading = f"published, {ALBERT}"
    published = {heading: published_scores(outcome, rows)}
    lines = [
        (task, [" / ".join(f"{number:.2f}" for number in numbers) for numbers in both])
        for task, both in BAM.items()
    ]
    grids = tables_of(outcome, published, BAM_SCORE, {heading: forms})
    grids.append(Grid(f"Published, {ALBERT}", ["plain", "BAM-WC"], lines))
    notes = [
        *note_on_averages(outcome, {form: rows[form] for form in (PLAIN, "BAM-WC")}),
        "The contextual prior adds 330 parameters to ALBERT-base, whose layers share their weights, and as "
        "many to each layer of other models with heads of 64.",
        "The paper does not name its metrics: accuracy for MRPC and QQP and Pearson's r for STS-B are taken "
        "to be meant, and differences are in these. SQuAD's numbers are exact match and F1.",
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
