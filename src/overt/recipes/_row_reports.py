"""Tables and notes about rows of trained networks, over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from overt.recipes._recipe import Grid, Outcome, Report, cell
from overt.recipes.paired import correct_by_holm, mean_interval, paired_p

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
    key: str,
    heading: str,
    title: str = "Differences with the same seed",
) -> Grid:
    """Differences in a number to a baseline with the same seed, beside the published ones.

    A column counts the seeds whose paired bootstrap separates the two, if there are such tests.

    Args:
        outcome: of the recipe.
        baselines: row → the row that it is compared with.
        published: heading of a column → row → published number.
        key: of the number.
        heading: what the number is called.
        title: of the table.
    """
    lines: list[tuple[str, list[str]]] = []
    tests = []
    for row, baseline in baselines.items():
        ours, theirs = values(outcome, row, key), values(outcome, baseline, key)
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
            cells[3] = f"{p_cell(p)} ({p_cell(next(corrected))})"
    columns = ["n", heading, "95 % interval", "p (Holm)", "bootstrap p < .05", *published]
    if not any("bootstrap" in row for rows in outcome.per_seed.values() for row in rows.values()):
        columns.pop(4)
        for _, cells in lines:
            cells.pop(4)
    return Grid(title, columns, lines)


def p_cell(p: float) -> str:
    """A p-value with three digits, of which a small one has none left."""
    return f"{p:.3f}" if p >= 0.0005 else "< 0.001"


def report_of(grids: Sequence[Grid], notes: list[str]) -> Report:
    """A report without the tables that would be empty, such as differences where there is one row."""
    return Report([grid for grid in grids if grid.rows], notes)


def notes_on_runs(outcome: Outcome) -> list[str]:
    """What intervals and p-values mean, and when the runs were made."""
    entries = [numbers for rows in outcome.per_seed.values() for numbers in rows.values()]
    dates = sorted({entry["run"]["date"] for entry in entries})
    return [
        "± is the standard deviation over n seeds, from 3 seeds on. Intervals are Student's t for the mean "
        "difference between models with the same seed, which have the same batches in the same order. p is "
        "that of the paired t-test, in brackets corrected for all rows of its table (Holm).",
        f"{len(entries)} run{'s' if len(entries) > 1 else ''}, "
        f"{dates[0]}{f' to {dates[-1]}' if len(dates) > 1 else ''}; each has its own hardware, versions and "
        "date in the result file.",
    ]


def notes_on_encoders(outcome: Outcome) -> list[str]:
    """A warning, if rows of one seed read regions of several encoders: they were trained in several places.

    An encoder that is trained again with the same settings is not quite the same, so that such rows are no
    pairs.
    """
    apart = []
    for seed, rows in outcome.per_seed.items():
        hashes = {numbers["encoder"] for numbers in rows.values() if numbers.get("encoder") is not None}
        if len(hashes) > 1:
            apart.append(str(seed))
    if not apart:
        return []
    return [
        f"NOT PAIRED: rows of seed{'s' if len(apart) > 1 else ''} {', '.join(apart)} read the regions of "
        "encoders that were trained separately; --fresh trains all rows of a seed on one."
    ]
