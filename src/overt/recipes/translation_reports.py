"""Tables and notes that the recipes of translation share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from overt.recipes._recipe import Grid, Outcome, Report, cell
from overt.recipes.paired import correct_by_holm, mean_interval, paired_p
from overt.recipes.translation_training import GREEDY

FEWEST = 3  # seeds for an interval


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


def gains_grid(
    outcome: Outcome,
    baselines: Mapping[str, str],
    published: Mapping[str, Mapping[str, float]],
    title: str = "Differences with the same seed",
) -> Grid:
    """Differences in BLEU to a baseline with the same seed, beside the published ones.

    Args:
        outcome: of the recipe.
        baselines: row → the row that it is compared with.
        published: heading of a column → row → published BLEU.
        title: of the table.
    """
    lines: list[tuple[str, list[str]]] = []
    tests = []
    for row, baseline in baselines.items():
        ours, theirs = values(outcome, row, "bleu"), values(outcome, baseline, "bleu")
        seeds = sorted(set(ours) & set(theirs))
        if not seeds:
            continue
        differences = [ours[seed] - theirs[seed] for seed in seeds]
        mean, low, high = mean_interval(differences)
        interval = f"{cell(low)} … {cell(high)}" if len(seeds) >= FEWEST else "–"
        entries = [outcome.per_seed[seed][row] for seed in seeds]
        samples = [entry["bootstrap"] for entry in entries if "bootstrap" in entry]
        bootstrap = [sample["p"] for sample in samples if sample["baseline"] == baseline]
        below = f"{sum(p < 0.05 for p in bootstrap)} of {len(bootstrap)}" if bootstrap else "–"
        gains = [
            cell(scores[row] - scores[baseline]) if row in scores else "–" for scores in published.values()
        ]
        tests.append(paired_p(differences) if len(seeds) >= FEWEST else math.nan)
        lines.append((f"{row} − {baseline}", [str(len(seeds)), cell(mean), interval, "–", below, *gains]))
    complete = [p for p in tests if not math.isnan(p)]
    corrected = iter(correct_by_holm(complete) if complete else [])
    for (_, cells), p in zip(lines, tests, strict=True):
        if not math.isnan(p):
            cells[3] = f"{p:.3f} ({next(corrected):.3f})"
    columns = ["n", "BLEU", "95 % interval", "p (Holm)", "bootstrap p < .05", *published]
    return Grid(title, columns, lines)


def report_of(grids: Sequence[Grid], notes: list[str]) -> Report:
    """A report without the tables that would be empty, such as differences where there is one row."""
    return Report([grid for grid in grids if grid.rows], notes)


def text_notes(outcome: Outcome) -> list[str]:
    """What a reader needs to know about data, scores and intervals."""
    config = outcome.config
    data, vocabulary = config["data"], config["vocabulary"]
    entries = [numbers for rows in outcome.per_seed.values() for numbers in rows.values()]
    dates = sorted({entry["run"]["date"] for entry in entries})
    greedy = [entry["bleu_of_training"] for entry in entries]
    remark = f" ({data['remark']})" if data["remark"] else ""
    return [
        f"Data: {data['name']} {data['direction']}{remark}: {data['train']:,} training pairs, of which "
        f"{config['left_out']} too long or empty were left out, {data['valid']:,} for validation, "
        f"{data['test']:,} for testing. {vocabulary['pieces']:,} BPE pieces ({vocabulary['origin']}, "
        f"{vocabulary['sha256'][:12]}).",
        "BLEU: tokenised text with hyphenated words split, as in Evolving Attention "
        f"({entries[0]['bleu_signature']}); BLEU 13a: detokenised text ({entries[0]['bleu_13a_signature']}).",
        "± is the standard deviation over n seeds, from 3 seeds on. Intervals are Student's t for the mean "
        "difference between models with the same seed, which have the same batches in the same order. p is "
        "that of the paired t-test, in brackets corrected for all rows of its table (Holm). The bootstrap is "
        "sacrebleu's (1,000 samples of the test sentences), one per seed.",
        f"Greedy translations of {GREEDY} training sentences: BLEU {min(greedy):.1f} to {max(greedy):.1f}.",
        f"{len(entries)} run{'s' if len(entries) > 1 else ''}, "
        f"{dates[0]}{f' to {dates[-1]}' if len(dates) > 1 else ''}; each has its own hardware, versions and "
        "date in the result file.",
    ]
