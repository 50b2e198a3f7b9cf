"""Tables 5 and 6 and Figure 5 of Wang et al. 2021: Transformers whose attention evolves, on translation.

All three measure the same models, trained by `translation_training`, and share their runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from overt.mechanisms.evolving.config import Evolving
from overt.recipes._recipe import Grid, Outcome, Recipe, Report, Request, cell
from overt.recipes.paired import correct_by_holm, mean_interval, paired_p
from overt.recipes.translation_runs import OPTIONS, Runs, run_rows
from overt.recipes.translation_training import GREEDY, Row

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
BASELINES = {"EA-Base": "Base"}  # of the other rows: Lite
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
FEWEST = 3  # seeds for an interval


def _outcome(runs: Runs) -> Outcome:
    return Outcome(runs.config, runs.per_seed, runs.stand_in, runs.continued)


def run_table_5(request: Request) -> Outcome:
    """Train Lite and Base, plain and evolving."""
    rows = {name: ROWS[name] for name in IN_TABLE_5}
    return _outcome(run_rows(request, rows, [name for name in rows if name in PUBLISHED_5]))


def run_table_6(request: Request) -> Outcome:
    """Train Lite and its ablations."""
    rows = {name: ROWS[name] for name in IN_TABLE_6}
    return _outcome(run_rows(request, rows, list(rows)))


# --- Reports ---


def values(outcome: Outcome, row: str, key: str) -> dict[int, float]:
    """A number of a row by seed, of the seeds that have it."""
    entries = {seed: rows[row] for seed, rows in outcome.per_seed.items() if row in rows}
    return {seed: float(entry[key]) for seed, entry in entries.items() if entry.get(key) is not None}


def mean_cell(numbers: Mapping[int, float], digits: int = 2) -> str:
    """Mean and standard deviation over seeds; the latter from three seeds on."""
    if not numbers:
        return "–"
    deviation = statistics.stdev(numbers.values()) if len(numbers) >= FEWEST else None
    return cell(statistics.fmean(numbers.values()), deviation, digits)


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


def gains_grid(outcome: Outcome, rows: Sequence[str], published: Scores) -> Grid:
    """Differences to the baseline with the same seed, beside the published ones."""
    lines: list[tuple[str, list[str]]] = []
    tests = []
    for row in rows:
        baseline = BASELINES.get(row, "Lite")
        ours, theirs = values(outcome, row, "bleu"), values(outcome, baseline, "bleu")
        seeds = sorted(set(ours) & set(theirs))
        if row in ("Lite", "Base") or not seeds:
            continue
        differences = [ours[seed] - theirs[seed] for seed in seeds]
        mean, low, high = mean_interval(differences)
        interval = f"{cell(low)} … {cell(high)}" if len(seeds) >= FEWEST else "–"
        below = sum(outcome.per_seed[seed][row].get("bootstrap", {}).get("p", 1.0) < 0.05 for seed in seeds)
        known = [seed for seed in seeds if "bootstrap" in outcome.per_seed[seed][row]]
        gains = [_gain(published, row, baseline, place) for place in range(len(DIRECTIONS))]
        tests.append(paired_p(differences) if len(seeds) >= FEWEST else float("nan"))
        lines.append(
            (
                f"{row} − {baseline}",
                [str(len(seeds)), cell(mean), interval, "", f"{below} of {len(known)}", *gains],
            )
        )
    complete = [p for p in tests if p == p]
    corrected = iter(correct_by_holm(complete) if complete else [])
    for (_, cells), p in zip(lines, tests, strict=True):
        cells[3] = f"{p:.3f} ({next(corrected):.3f})" if p == p else "–"
    published_columns = [f"published, {direction}" for direction in DIRECTIONS]
    columns = ["n", "BLEU", "95 % interval", "p (Holm)", "bootstrap p < .05", *published_columns]
    return Grid("Differences with the same seed", columns, lines)


def _gain(published: Scores, row: str, baseline: str, place: int) -> str:
    if row not in published:
        return "–"
    return cell(published[row][place] - published[baseline][place])


def published_grid(published: Scores) -> Grid:
    """BLEU as published."""
    columns = ["IWSLT'14 De-En", "WMT'14 En-De", "WMT'14 En-Fr"]
    return Grid(
        "Published BLEU", columns, [(row, [cell(x) for x in bleu]) for row, bleu in published.items()]
    )


def notes_of(outcome: Outcome) -> list[str]:
    """What a reader needs to know about data, training and scores."""
    config = outcome.config
    data, training, vocabulary = config["data"], config["training"], config["vocabulary"]
    entry = next(iter(next(iter(outcome.per_seed.values())).values()))
    runs = [numbers["run"] for rows in outcome.per_seed.values() for numbers in rows.values()]
    dates = sorted({run["date"] for run in runs})
    greedy = [numbers["bleu_of_training"] for rows in outcome.per_seed.values() for numbers in rows.values()]
    remark = f" ({data['remark']})" if data["remark"] else ""
    return [
        f"Data: {data['name']} {data['direction']}{remark}: {data['train']:,} training pairs, of which "
        f"{config['left_out']} too long or empty were left out, {data['valid']:,} for validation, "
        f"{data['test']:,} for testing. {vocabulary['pieces']:,} BPE pieces ({vocabulary['origin']}, "
        f"{vocabulary['sha256'][:12]}).",
        f"Training: {training['updates']:,} updates at most of up to {training['tokens']:,} target tokens, "
        f"Adam {tuple(training['betas'])}, learning rate {training['learning_rate']:g} after "
        f"{training['warmup']:,} steps of warm-up, inverse square root, label smoothing "
        f"{training['smoothing']:g}, dropout {training['dropout']:g}, weight decay "
        f"{training['weight_decay']:g}, patience of {training['patience']} epochs, average of the last "
        f"{training['average']} epochs, beam {config['beam']}, "
        f"{entry['run']['settings']['precision']}.",
        f"BLEU: tokenised text with hyphenated words split, as in the paper ({entry['bleu_signature']}); "
        f"BLEU 13a: detokenised text ({entry['bleu_13a_signature']}). Parameters are counted without "
        "embeddings.",
        "± is the standard deviation over n seeds, from 3 seeds on. Intervals are Student's t for the mean "
        "difference between models with the same seed, which have the same initial weights and batches. p is "
        "that of the paired t-test, in brackets corrected for all rows of the table (Holm). The bootstrap is "
        "sacrebleu's (1,000 samples of the test sentences), one per seed.",
        f"Greedy translations of {GREEDY} training sentences: BLEU {min(greedy):.1f} to {max(greedy):.1f}.",
        f"{len(runs)} runs, {dates[0]}{f' to {dates[-1]}' if len(dates) > 1 else ''}; each has its own "
        "hardware, versions and date in the result file.",
    ]


def report_table_5(outcome: Outcome) -> Report:
    """Table 5."""
    sizes = Grid(
        "Published sizes",
        ["million parameters", "million FLOPs"],
        [(row, [cell(number) for number in numbers]) for row, numbers in PUBLISHED_SIZES.items()],
    )
    grids = [
        measured_grid(outcome, IN_TABLE_5),
        gains_grid(outcome, IN_TABLE_5, PUBLISHED_5),
        published_grid(PUBLISHED_5),
        sizes,
    ]
    return Report(grids, notes_of(outcome))


def report_table_6(outcome: Outcome) -> Report:
    """Table 6."""
    grids = [
        measured_grid(outcome, IN_TABLE_6),
        gains_grid(outcome, IN_TABLE_6, PUBLISHED_6),
        published_grid(PUBLISHED_6),
    ]
    return Report(grids, notes_of(outcome))


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
