"""Tables 5 and 6 and Figure 5 of Wang et al. 2021: Transformers whose attention evolves, on translation.

All three measure the same models, trained by `translation_training`, and share their runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from overt._extras import need
from overt.data.pairs import Corpus
from overt.mechanisms.evolving.config import Evolving
from overt.recipes import translation_runs
from overt.recipes._figures import save_figure
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell
from overt.recipes._row_reports import FEWEST, gains_grid, mean_cell, report_of, values
from overt.recipes._training import hardware, torch_device
from overt.recipes.paired import mean_interval
from overt.recipes.translation_reports import text_notes
from overt.recipes.translation_runs import Runs, run_rows
from overt.recipes.translation_training import LOGS, Row, Training, in_turns, network, step_times

Scores = Mapping[str, tuple[float, float, float]]
# Section 4.3: skips in the encoder alone (`decoder_alpha`'s default); α = 0.1 for Lite and 0.5 for Base.
LITE, BASE = Evolving(alpha=0.1, beta=0.1), Evolving(alpha=0.5, beta=0.1)
ROWS = {
    "Lite": Row("lite"),
    "EA-Lite": Row("lite", (LITE,)),
    "Base": Row("base"),
    "EA-Base": Row("base", (BASE,)),
    # Not in the paper: a convolution in each chain's first layer, which its count of parameters suggests.
    "EA-Lite first": Row("lite", (Evolving(alpha=0.1, beta=0.1, first=True),)),
    "w/o encoder convolution": Row("lite", (Evolving(alpha=0.1, beta=0.1, convolve=("decoder", "cross")),)),
    "w/o decoder convolution": Row("lite", (LITE,), ("encoder", "cross")),
    "w/o encoder-decoder convolution": Row("lite", (LITE,), ("encoder", "decoder")),
    "w/o skip": Row("lite", (Evolving(alpha=0.0, beta=0.1),)),
    "1×1": Row("lite", (Evolving(alpha=0.1, beta=0.1, kernel_size=1),)),
    "5×5": Row("lite", (Evolving(alpha=0.1, beta=0.1, kernel_size=5),)),
}
IN_TABLE_5 = ("Lite", "EA-Lite", "EA-Lite first", "Base", "EA-Base")
IN_TABLE_6 = ("Lite", "EA-Lite", *list(ROWS)[5:])
DIRECTIONS = ("de-en", "en-de", "en-fr")  # IWSLT'14 De-En, WMT'14 En-De, WMT'14 En-Fr
PUBLISHED_5: Scores = {
    "Lite": (33.32, 21.11, 33.22),
    "EA-Lite": (33.80, 21.63, 34.12),
    "Base": (34.55, 27.47, 40.79),
    "EA-Base": (35.30, 27.56, 41.54),
}
# Millions of parameters without embeddings, and of FLOPs for 30 source and 30 target tokens.
PUBLISHED_SIZES = {
    "Lite": (2.48, 158.31),
    "EA-Lite": (2.49, 163.46),
    "Base": (44.14, 2680.0),
    "EA-Base": (44.15, 2700.0),
}
PUBLISHED_6: Scores = {
    "Lite": (33.21, 21.11, 33.22),  # Table 5 has 33.32 for the first
    "EA-Lite": (33.80, 21.63, 34.12),
    "w/o encoder convolution": (32.84, 21.07, 33.51),
    "w/o decoder convolution": (33.56, 21.45, 33.72),
    "w/o encoder-decoder convolution": (33.59, 21.41, 33.73),
    "w/o skip": (33.70, 21.43, 34.06),
    "1×1": (33.15, 21.20, 33.52),
    "5×5": (33.54, 21.40, 34.08),
}
# Appendix, Table 2: learning rate, dropout, GPUs and accumulated batches of each task.
PUBLISHED_TRAINING = {
    "de-en": {"learning_rate": 1e-3, "dropout": 0.2, "gpus": 1, "accumulation": 1},
    "en-de": {"learning_rate": 1e-3, "dropout": 0.3, "gpus": 8, "accumulation": 16},
    "en-fr": {"learning_rate": 1e-3, "dropout": 0.1, "gpus": 8, "accumulation": 16},
}
# Dropout by direction, as published; other directions have De-En's.
DROPOUT = {"de-en": 0.2, "en-de": 0.3, "en-fr": 0.1}
OPTIONS = {
    **translation_runs.OPTIONS,
    "tokens": Option("most target tokens of a batch", 4096, least=32),
    "beam": Option("beams of the beam search", 5, least=1),
}


def plan(corpus: Corpus, options: Mapping[str, Any]) -> Training:
    """The settings of a training on a corpus: the paper's, with fewer updates where there are fewer pairs."""
    steps, tokens = options["steps"], options["tokens"]
    if corpus.stand_in:
        updates, warmup, dropout = 1000, 250, 0.0
    elif len(corpus.train) < 100_000:
        updates, warmup, dropout = 3000, 1000, DROPOUT.get(corpus.direction, 0.2)
    else:
        updates, warmup, dropout = 50_000, 4000, DROPOUT.get(corpus.direction, 0.2)
    if steps is not None:
        warmup, updates = max(1, min(warmup, steps // 3)), steps
    training = Training(updates, tokens=tokens, warmup=warmup, dropout=dropout)
    return replace(training, learning_rate=4e-3, tokens=min(tokens, 256)) if corpus.stand_in else training


def small(row: Row) -> Row:
    """A row's network for the stand-in."""
    return replace(row, size={"lite": "tiny", "base": "small"}[row.size])


def train_rows(request: Request, rows: Sequence[str], default: Sequence[str], partly: bool = True) -> Runs:
    """Train rows of a table; `partly` as for `Known.fill`."""
    chosen = {name: ROWS[name] for name in rows}
    return run_rows(request, chosen, default, compared(rows), plan, small, partly)


def compared(rows: Sequence[str]) -> dict[str, str]:
    """Row → the plain network that it is compared with."""
    return {row: "Base" if row == "EA-Base" else "Lite" for row in rows if row not in ("Lite", "Base")}


def run_table_5(request: Request) -> Outcome:
    """Train Lite and Base, plain and evolving."""
    return train_rows(request, IN_TABLE_5, list(PUBLISHED_5)).outcome


def run_table_6(request: Request) -> Outcome:
    """Train Lite and its ablations."""
    return train_rows(request, IN_TABLE_6, IN_TABLE_6).outcome


# --- Reports ---


def measured_grid(outcome: Outcome, rows: Sequence[str]) -> Grid:
    """Sizes, BLEU in both ways and losses of each row."""
    columns = ["n", "parameters", "BLEU", "BLEU 13a", "test loss", "validation loss", "updates"]
    lines = []
    for row in rows:
        if not (bleu := values(outcome, row, "bleu")):
            continue
        size = next(iter(values(outcome, row, "without_embeddings").values()))
        cells = [
            str(len(bleu)),
            f"{int(size):,}",
            mean_cell(bleu),
            mean_cell(values(outcome, row, "bleu_13a")),
        ]
        cells += [mean_cell(values(outcome, row, key), 3) for key in ("test_loss", "valid_loss")]
        updates = statistics.fmean(values(outcome, row, "updates").values())
        lines.append((row, [*cells, f"{updates:,.0f}"]))
    data = outcome.config["data"]
    return Grid(f"Measured, {data['name']} {data['direction']}", columns, lines)


def published_grid(published: Scores) -> Grid:
    """BLEU as published."""
    columns = ["IWSLT'14 De-En", "WMT'14 En-De", "WMT'14 En-Fr"]
    return Grid(
        "Published BLEU", columns, [(row, [cell(x) for x in bleu]) for row, bleu in published.items()]
    )


def notes_of(outcome: Outcome) -> list[str]:
    """What a reader needs to know about data, training and scores."""
    training = outcome.config["training"]
    entry = next(iter(next(iter(outcome.per_seed.values())).values()))
    return [
        f"Training: {training['updates']:,} updates at most of up to {training['tokens']:,} target tokens, "
        f"Adam {tuple(training['betas'])}, learning rate {training['learning_rate']:g} after "
        f"{training['warmup']:,} steps of warm-up, inverse square root, label smoothing "
        f"{training['smoothing']:g}, dropout {training['dropout']:g}, weight decay "
        f"{training['weight_decay']:g}, patience of {training['patience']} epochs, average of the last "
        f"{training['average']} epochs, beam {outcome.config['beam']}, "
        f"{entry['run']['settings']['precision']}. Parameters are counted without embeddings.",
        *text_notes(outcome),
    ]


def by_direction(published: Scores) -> dict[str, dict[str, float]]:
    """Published scores by direction, as headings of columns."""
    return {
        f"published, {direction}": {row: scores[place] for row, scores in published.items()}
        for place, direction in enumerate(DIRECTIONS)
    }


def report_table_5(outcome: Outcome) -> Report:
    """Table 5."""
    sizes = Grid(
        "Published sizes",
        ["million parameters", "million FLOPs"],
        [(row, [cell(number) for number in numbers]) for row, numbers in PUBLISHED_SIZES.items()],
    )
    grids = [
        measured_grid(outcome, IN_TABLE_5),
        gains_grid(outcome, compared(IN_TABLE_5), by_direction(PUBLISHED_5), "bleu", "BLEU"),
        published_grid(PUBLISHED_5),
        sizes,
    ]
    return report_of(grids, notes_of(outcome))


def report_table_6(outcome: Outcome) -> Report:
    """Table 6."""
    grids = [
        measured_grid(outcome, IN_TABLE_6),
        gains_grid(outcome, compared(IN_TABLE_6), by_direction(PUBLISHED_6), "bleu", "BLEU"),
        gains_grid(
            outcome,
            dict.fromkeys(IN_TABLE_6[2:], "EA-Lite"),
            by_direction(PUBLISHED_6),
            "bleu",
            "BLEU",
            "What each part contributes",
        ),
        published_grid(PUBLISHED_6),
    ]
    return report_of(grids, notes_of(outcome))


# --- Figure 5 ---

IN_FIGURE_5 = ("Lite", "EA-Lite")
ROUNDS, TIMED = 5, 20  # rounds behind a median step time, and updates of each


def run_figure_5(request: Request) -> Outcome:
    """Train Lite and EA-Lite, and time an update of each with nothing else running."""
    need("matplotlib", "view")
    outcome, data = train_rows(request, IN_FIGURE_5, IN_FIGURE_5, partly=False)
    device, training = torch_device(request.device).type, Training(**outcome.config["training"])
    forms = {}
    for name in IN_FIGURE_5:
        row = small(ROWS[name]) if outcome.stand_in else ROWS[name]
        model = network(row, data.tokenizer.get_vocab_size(), training.dropout, 0)
        forms[name] = partial(step_times, data, row, training, device, TIMED, model)
    times = in_turns(forms, ROUNDS)
    timed = {
        "step_ms": {name: statistics.median(chain(*rounds)) for name, rounds in times.items()},
        "timed_on": hardware(request.device),
        "timed_by": request.command,
    }
    return replace(outcome, config=outcome.config | timed, measured=True)


Curve = list[tuple[float, float]]


def curves(outcome: Outcome, row: str, timed: bool = True) -> dict[int, Curve]:
    """Seed → (seconds or updates, training loss); seconds are updates times the row's median step time."""
    unit = outcome.config["step_ms"][row] / 1000 if timed else 1.0
    entries = {seed: rows[row] for seed, rows in outcome.per_seed.items() if row in rows}
    return {seed: [(step * unit, loss) for step, loss in entry["curve"]] for seed, entry in entries.items()}


def loss_at(curve: Sequence[tuple[float, float]], time: float) -> float:
    """The loss at a time or update, between the two nearest points of a curve."""
    for (before, loss), (after, later) in pairwise(curve):
        if time <= after:
            return float(loss + (later - loss) * (time - before) / (after - before))
    return float(curve[-1][1])


def losses_grid(title: str, unit: str, lines: Mapping[str, dict[int, Curve]]) -> Grid:
    """Mean losses of rows at five places of their curves, and the differences with the same seed."""
    everyone = [curve for by_seed in lines.values() for curve in by_seed.values()]
    first, last = max(curve[0][0] for curve in everyone), min(curve[-1][0] for curve in everyone)
    places = [first + (last - first) * part / 5 for part in range(1, 6)]
    losses = {
        row: {seed: [loss_at(curve, place) for place in places] for seed, curve in by_seed.items()}
        for row, by_seed in lines.items()
    }
    rows: list[tuple[str, list[str]]] = []
    for row, by_seed in losses.items():
        means = [
            mean_cell({seed: found[number] for seed, found in by_seed.items()}, 3) for number in range(5)
        ]
        rows.append((row, [str(len(by_seed)), *means]))
    seeds = sorted(set(losses["Lite"]) & set(losses["EA-Lite"]))
    cells = []
    for number in range(5):
        differences = [losses["EA-Lite"][seed][number] - losses["Lite"][seed][number] for seed in seeds]
        if not differences:
            cells.append("–")
            continue
        mean, low, high = mean_interval(differences)
        interval = f" ({cell(low, digits=3)} … {cell(high, digits=3)})" if len(seeds) >= FEWEST else ""
        cells.append(f"{cell(mean, digits=3)}{interval}")
    rows.append(("EA-Lite − Lite", [str(len(seeds)), *cells]))
    return Grid(title, ["n", *(f"{place:,.0f} {unit}" for place in places)], rows)


def report_figure_5(outcome: Outcome) -> Report:
    """Training losses after the same time, and after the same updates."""
    data, times = outcome.config["data"], outcome.config["step_ms"]
    title = f"Training loss, {data['name']} {data['direction']}"
    grids = [
        losses_grid(f"{title}, after the same time", "s", {row: curves(outcome, row) for row in IN_FIGURE_5}),
        losses_grid(
            f"{title}, after the same updates",
            "updates",
            {row: curves(outcome, row, timed=False) for row in IN_FIGURE_5},
        ),
    ]
    notes = [
        "Published: EA-Lite's training loss is always lower after the same time, on IWSLT'14; there are no "
        "numbers.",
        f"Training loss, with smoothed labels, averaged over {LOGS} parts of the training. Times are updates "
        f"times the median of {ROUNDS * TIMED} updates, measured in turns with nothing else running "
        f"({outcome.config['timed_on']}): {times['Lite']:.1f} ms for Lite, {times['EA-Lite']:.1f} ms for "
        "EA-Lite. The time that trainings took side by side means nothing. In brackets, the 95 % interval "
        "of the mean difference with the same seed.",
        *notes_of(outcome),
    ]
    return Report(grids, notes)


def draw_figure_5(outcome: Outcome, path: Path) -> None:
    """Learning curves of all seeds."""
    need("matplotlib", "view")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for row, colour in zip(IN_FIGURE_5, ("#666666", "#00796b"), strict=True):
        for number, curve in enumerate(curves(outcome, row).values()):
            times, losses = zip(*curve, strict=True)
            axes.plot(times, losses, color=colour, alpha=0.7, linewidth=1.0, label=None if number else row)
    axes.set_xlabel("seconds of training (updates × median time of one)")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False)
    save_figure(figure, path)


TABLE_5 = Recipe(
    name="ea-table-5",
    title="Translation with evolving attention",
    paper="Wang et al. 2021, Evolving Attention with Residual Convolutions, Table 5",
    published={
        "BLEU": PUBLISHED_5,
        "sizes": PUBLISHED_SIZES,
        "directions": DIRECTIONS,
        "training": PUBLISHED_TRAINING,
    },
    run=run_table_5,
    report=report_table_5,
    seeds=5,
    folder="translation",
    options=OPTIONS,
)
TABLE_6 = Recipe(
    name="ea-table-6",
    title="Translation with evolving attention: ablations",
    paper="Wang et al. 2021, Evolving Attention with Residual Convolutions, Table 6",
    published={"BLEU": PUBLISHED_6, "directions": DIRECTIONS},
    run=run_table_6,
    report=report_table_6,
    seeds=5,
    folder="translation",
    options=OPTIONS,
)
FIGURE_5 = Recipe(
    name="ea-figure-5",
    title="Learning curves of translation with evolving attention",
    paper="Wang et al. 2021, Evolving Attention with Residual Convolutions, Figure 5",
    published={},
    run=run_figure_5,
    report=report_figure_5,
    seeds=5,
    folder="translation",
    options=OPTIONS,
    draw=draw_figure_5,
)
