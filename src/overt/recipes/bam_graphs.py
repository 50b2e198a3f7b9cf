"""Table 1 of Fan et al. 2020: graph attention with random weights on Cora, Citeseer and Pubmed.

Six rows are trained with several seeds (`graph_training`) and compared with plain GAT by seed (`paired`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import overt
from overt import _check
from overt._extras import need
from overt._workers import cores
from overt.data import planetoid
from overt.mechanisms.bayesian.config import Bayesian
from overt.models.folders import WEIGHTS, load_weights
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell, counted
from overt.recipes._runs import earlier_result
from overt.recipes._training import progress_bar, torch_device
from overt.recipes.graph_training import (
    COVERAGE,
    DROPOUT,
    EPOCHS,
    HEADS,
    NOISES,
    PATIENCE,
    SAMPLES,
    THRESHOLDS,
    WIDTH,
    Setting,
    Task,
    network,
    perform_all,
)
from overt.recipes.paired import correct_by_holm, mean_interval, paired_p, published_error, published_p

if TYPE_CHECKING:
    from overt.models.gat import GAT

# Settings of appendix B.1.2, whose σ₁ is the prior's (`prior_sigma`) and σ₂ the posterior's (`sigma`).


def _setting(
    learning_rate: float,
    l2: float,
    out_heads: int,
    k: float,
    d_mid: int,
    lf: dict[str, Any],
    lc: dict[str, Any],
    wf: dict[str, Any],
    wc: dict[str, Any],
) -> Setting:
    """The settings of one data set; `k` is for NO KL, WF and WC, `d_mid` for LC and WC."""
    rows = {
        "GAT": None,
        "NO KL": Bayesian.paper("NO KL", k=k),
        "LF": Bayesian.paper("LF", **lf),
        "LC": Bayesian.paper("LC", d_mid=d_mid, **lc),
        "WF": Bayesian.paper("WF", k=k, **wf),
        "WC": Bayesian.paper("WC", k=k, d_mid=d_mid, **wc),
    }
    return Setting(learning_rate, l2, out_heads, rows)


SETTINGS = {
    "cora": _setting(
        learning_rate=0.005,
        l2=5e-4,
        out_heads=1,
        k=1.0,
        d_mid=1,
        lf={"prior_sigma": 1e15, "sigma": 1e-6, "rho": 0.2},
        lc={"prior_sigma": 1e15, "sigma": 1e-15, "rho": 0.1},
        wf={"prior_beta": 1e-10, "prior_alpha": 1e-15, "rho": 0.2},
        wc={"prior_beta": 1e-10, "rho": 0.1},
    ),
    "citeseer": _setting(
        learning_rate=0.005,
        l2=5e-4,
        out_heads=1,
        k=100.0,
        d_mid=1,
        lf={"prior_sigma": 1e15, "sigma": 1e-6, "rho": 0.1},
        lc={"prior_sigma": 1e15, "sigma": 1e-5, "rho": 0.1},
        wf={"prior_beta": 1e-15, "prior_alpha": 1e-7, "rho": 0.1},
        wc={"prior_beta": 1e-15, "rho": 0.1},
    ),
    "pubmed": _setting(
        learning_rate=0.01,
        l2=1e-3,
        out_heads=8,
        k=10.0,
        d_mid=5,
        lf={"prior_sigma": 1e6, "sigma": 1e-2, "rho": 0.2},
        lc={"prior_sigma": 1e5, "sigma": 1e-2, "rho": 0.2},
        wf={"prior_beta": 1e-8, "prior_alpha": 1e-4, "rho": 0.2},
        wc={"prior_beta": 1e-4, "rho": 0.2},
    ),
}
PUBLISHED = {  # accuracy in %; ± over 5 runs, where the paper gives it
    "cora": {"GAT": 83.00, "NO KL": 83.39, "LF": 83.24, "LC": 83.34, "WF": (83.48, 0.2), "WC": (83.81, 0.3)},
    "citeseer": {
        "GAT": 72.50,
        "NO KL": 72.91,
        "LF": 72.86,
        "LC": 73.04,
        "WF": (73.18, 0.3),
        "WC": (73.52, 0.4),
    },
    "pubmed": {
        "GAT": 77.26,
        "NO KL": 78.50,
        "LF": 78.30,
        "LC": 78.76,
        "WF": (78.50, 0.3),
        "WC": (78.82, 0.3),
    },
}
LEVEL = 0.05  # of significance
RUNS = 5  # behind each published number
UNSEEN = 1e-9  # a spread that float32 logits, which are of the order of one, cannot represent


def check_trained(folder: Path) -> None:
    """Refuse a folder without a trained model."""
    if folder.parent.name not in SETTINGS["cora"].rows or not (folder / WEIGHTS).exists():
        raise FileNotFoundError(
            f"no model in {folder}: run `overt reproduce bam-table-1` first (--seeds 1 is enough for a look)"
        )


def load_trained(folder: Path, graph: planetoid.Citations) -> GAT:
    """Load the model that a run wrote to `dataset`/`row`/seed-n, in evaluation mode."""
    check_trained(folder)
    row, setting = folder.parent.name, SETTINGS[graph.name]
    trained_on = json.loads((folder / "settings.json").read_text()).get("data")
    if trained_on != graph.sha256:
        raise ValueError(f"the model in {folder} was trained on other raw files of {graph.name} than these")
    return load_weights(network(graph, Task(row, 0, setting.rows[row], setting, 0, folder, "cpu")), folder)


def run(request: Request) -> Outcome:
    """Train the rows and seeds that are missing."""
    need("torch_geometric", "graphs")
    name, epochs, workers, preset = (
        request.options[option] for option in ("dataset", "epochs", "workers", "preset")
    )
    _check.one_of("--dataset", name, tuple(SETTINGS))
    _check.one_of("--preset", preset, ("paper", "official"))
    graph = planetoid.load(name, request.data, request.out / "data")
    description, setting = graph.describe(), SETTINGS[name]
    device = torch_device(request.device).type
    workers = cores() if workers is None else workers
    request.console.print(
        f"{name}: {description['nodes']:,} nodes, {description['edges']:,} edges, {description['train']} "
        f"nodes for training, {description['test']} for testing; "
        f"{workers} training{'s' if workers > 1 else ''} at once"
    )
    rows = setting.rows
    if preset == "official":
        rows = {
            row: None if config is None else replace(config, preset="official")
            for row, config in rows.items()
        }
    tasks, numbers = [], {}
    for row, bayesian in rows.items():
        for seed in range(request.seeds):
            folder = (
                request.out / f"{name}{'-official' if preset == 'official' else ''}" / row / f"seed-{seed}"
            )
            settings = {
                "version": overt.__version__,
                "data": description["sha256"],
                "mechanism": repr(bayesian),
                "training": repr(replace(setting, rows={})),
                "epochs": epochs,
                "seed": seed,
                "device": device,
            }
            result = earlier_result(folder, settings, request.fresh)
            if result is None:
                tasks.append(Task(row, seed, bayesian, setting, epochs, folder, device))
            else:
                numbers[row, seed] = result
    if numbers:
        request.console.print(f"[dim]already finished: {counted(len(numbers), 'training')}[/dim]")
    tasks.sort(key=lambda task: task.seed)
    with progress_bar(request.console) as progress:
        bar = progress.add_task(name, total=len(tasks))
        for task, row_numbers in perform_all(tasks, graph, workers):
            numbers[task.row, task.seed] = row_numbers
            last = f"{task.row} {task.seed}: {100 * row_numbers['test']:.1f} %"
            progress.update(bar, advance=1, description=f"{name}, {last}")
            if not request.console.is_terminal:  # a log has no bar
                request.console.print(f"{name}, {last}")
    per_seed = {seed: {row: numbers[row, seed] for row in setting.rows} for seed in range(request.seeds)}
    config = {
        "data": description,
        "network": {"width": WIDTH, "heads": HEADS, "out_heads": setting.out_heads, "dropout": DROPOUT},
        "learning_rate": setting.learning_rate,
        "l2": setting.l2,
        "patience": PATIENCE,
        "most_epochs": epochs,
        "rows": {row: repr(bayesian) for row, bayesian in rows.items()},
        "preset": preset,
        "samples": SAMPLES,
        "noises": list(NOISES),
        "trained_on": sorted({row["hardware"] for rows in per_seed.values() for row in rows.values()}),
    }
    return Outcome(config, per_seed)


def _values(per_seed: dict[int, dict[str, Any]], row: str, *path: str) -> list[float]:
    """A row's numbers for every seed, in percent, by the path to them."""

    def value(numbers: Any) -> float:
        for name in path:
            numbers = numbers[name]
        return 100 * float(numbers)

    return [value(rows[row]) for rows in per_seed.values()]


def _differences(per_seed: dict[int, dict[str, Any]], row: str, *path: str) -> list[float]:
    """A row's numbers less those of GAT with the same seed, in percentage points, by the path to them."""
    pairs = zip(_values(per_seed, row, *path), _values(per_seed, "GAT", *path), strict=True)
    return [ours - plain for ours, plain in pairs]


def _published(dataset: str, row: str) -> tuple[float, float | None]:
    value: Any = PUBLISHED[dataset][row]
    return value if isinstance(value, tuple) else (value, None)


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{'+' if round(value, 2) > 0 else ''}{cell(value)}"


def _p(value: float) -> str:
    """A p-value with two significant digits, and at most four decimals."""
    if math.isnan(value):
        return "–"
    if value < 1e-4:
        return "<0.0001"
    return f"{value:.4f}" if value < 1e-3 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def report(outcome: Outcome) -> Report:
    """Accuracies with their differences from GAT, and measures of the samples, clean and under noise."""
    dataset: str = outcome.config["data"]["name"]
    gains = _gains(outcome.per_seed, dataset)
    samples = _Family.of(outcome.per_seed, outcome.config["noises"])
    title = dataset.capitalize()
    grids = [_accuracy_grid(outcome, gains, dataset)]
    grids += [_samples_grid(outcome, level, title) for level in outcome.config["noises"]]
    grids += samples.grids(title, len(outcome.per_seed))
    return Report(grids, _notes(dataset, outcome.per_seed, gains, samples))


@dataclass(frozen=True)
class Gain:
    """A row's test accuracy less GAT's, as published and as measured.

    Attributes:
        published: published difference, in percentage points.
        error: its standard error, from the spread of our seeds; NaN for a single seed, like the p-values.
        differences: our differences, by seed.
        p: p of the paired t-test.
        corrected: that p corrected by Holm for all rows.
        apart: p of the test that published and measured gain are equal.
    """

    published: float
    error: float
    differences: list[float]
    p: float
    corrected: float
    apart: float


def _gains(per_seed: dict[int, dict[str, Any]], dataset: str) -> dict[str, Gain]:
    """The gains of all rows but GAT."""
    rows = [row for row in next(iter(per_seed.values())) if row != "GAT"]
    plain, single = _values(per_seed, "GAT", "test"), len(per_seed) < 2
    differences = {row: _differences(per_seed, row, "test") for row in rows}
    p_values = [paired_p(differences[row]) for row in rows]
    gains = {}
    for row, p, corrected in zip(rows, p_values, correct_by_holm(p_values), strict=True):
        published = _published(dataset, row)[0] - _published(dataset, "GAT")[0]
        error = math.nan if single else published_error(_values(per_seed, row, "test"), plain, RUNS)
        apart = math.nan if single else published_p(published, error, differences[row])
        gains[row] = Gain(published, error, differences[row], p, corrected, apart)
    return gains


def _accuracy_grid(outcome: Outcome, gains: dict[str, Gain], dataset: str) -> Grid:
    """Published and measured accuracy."""
    rows = []
    for row, numbers in outcome.mean.items():
        cells = [
            cell(*_published(dataset, row)),
            cell(_percent(numbers["test"]), _percent(outcome.spread[row]["test"])),
        ]
        if row == "GAT":
            cells += ["–"] * 7
        else:
            gain = gains[row]
            mean, low, high = mean_interval(gain.differences)
            cells += [_signed(gain.published), cell(None if math.isnan(gain.error) else gain.error)]
            cells += [_signed(mean), f"{_signed(low)} … {_signed(high)}"]
            cells += [_p(gain.p), _p(gain.corrected), _p(gain.apart)]
        rows.append((row if row == "GAT" else f"BAM {row}", [*cells, cell(numbers["epochs"], digits=0)]))
    heads = ["published, %", "measured, %", "published − GAT", "its standard error, estimated"]
    heads += ["measured − GAT", "95 % interval", "p", f"p, Holm of {len(gains)}"]
    heads += ["p, published against measured", "epochs"]
    return Grid(f"{dataset.capitalize()}, test accuracy, mean±sd over seeds", heads, rows)


def _samples_grid(outcome: Outcome, level: float, title: str) -> Grid:
    """Measures of the samples at one noise level."""
    rows = []
    for row, numbers in outcome.mean.items():
        ours = numbers["uncertainty"][f"noise {level:g}"]
        spreads = outcome.spread[row]["uncertainty"][f"noise {level:g}"]
        pairs = [(ours[part], spreads[part]) for part in ("accuracy", "sampled_accuracy")]
        pairs += [(ours["pavpu"][str(at)], spreads["pavpu"][str(at)]) for at in THRESHOLDS]
        pairs += [(ours["selective"][str(at)], spreads["selective"][str(at)]) for at in COVERAGE]
        percent = [cell(_percent(value), _percent(spread)) for value, spread in pairs]
        name = row if row == "GAT" else f"BAM {row}"
        rows.append((name, [*percent, cell(ours["ece"], spreads["ece"], digits=3)]))
    features = "unchanged features" if level == 0.0 else f"noise of {level:g} sd of the features"
    heads = ["accuracy, mean weights", f"accuracy, {outcome.config['samples']} samples"]
    heads += [f"PAvPU {at:g}" for at in THRESHOLDS]
    heads += [f"accuracy of the surest {100 * at:.0f} %" for at in COVERAGE]
    return Grid(f"{title}, {features}", [*heads, "ECE"], rows)


@dataclass(frozen=True)
class _Family:
    """Paired differences from GAT in the measures of the samples, as one family of comparisons.

    Attributes:
        rows: all rows but GAT.
        columns: measures at each noise level.
        differences: (row, column) → differences by seed, in percentage points.
        p: (row, column) → p of the paired t-test.
        corrected: (row, column) → p corrected by Holm for the whole family.
    """

    rows: list[str]
    columns: list[str]
    differences: dict[tuple[str, str], list[float]]
    p: dict[tuple[str, str], float]
    corrected: dict[tuple[str, str], float]

    @classmethod
    def of(cls, per_seed: dict[int, dict[str, Any]], noises: list[float]) -> _Family:
        """The family of a run."""
        measures = {"accuracy": ("accuracy",), "PAvPU 0.05": ("pavpu", "0.05"), "ECE": ("ece",)}
        columns = {
            f"{name}, noise {level:g}": ("uncertainty", f"noise {level:g}", *path)
            for name, path in measures.items()
            for level in noises
        }
        rows = [row for row in next(iter(per_seed.values())) if row != "GAT"]
        differences = {
            (row, column): _differences(per_seed, row, *path)
            for row in rows
            for column, path in columns.items()
        }
        p = {place: paired_p(values) for place, values in differences.items()}
        corrected = dict(zip(p, correct_by_holm(list(p.values())), strict=True))
        return cls(rows, list(columns), differences, p, corrected)

    def grids(self, title: str, seeds: int) -> list[Grid]:
        """Tables of the differences and of their p-values."""
        count = len(self.p)

        def grid(name: str, text: Callable[[tuple[str, str]], str]) -> Grid:
            rows = [(f"BAM {row}", [text((row, column)) for column in self.columns]) for row in self.rows]
            return Grid(f"{title}, {name}", self.columns, rows)

        def difference(place: tuple[str, str]) -> str:
            mean, low, high = mean_interval(self.differences[place])
            return f"{_signed(mean)} ({_signed(low)} … {_signed(high)})"

        name = (
            f"the {count} differences from GAT in percentage points, each with its 95 % interval over seeds"
        )
        grids = [grid(name, difference)]
        if seeds > 1:
            name = f"p of these {count} differences: uncorrected → corrected by Holm for all {count}"
            grids.append(grid(name, lambda place: f"{_p(self.p[place])} → {_p(self.corrected[place])}"))
        return grids


def _notes(
    dataset: str, per_seed: dict[int, dict[str, Any]], gains: dict[str, Gain], samples: _Family
) -> list[str]:
    """What a reader needs to know, partly derived from the numbers."""
    seeds = len(per_seed)
    notes = [
        "Differences are paired: with equal seeds the rows have equal initial weights and dropout masks, "
        "because neither the noise nor the priors' initial weights use the random stream that produces these."
    ]
    if seeds > 1:
        notes[0] += (
            f" Intervals are Student's t, over the {seeds} seeds, each taken individually. p is that of the "
            "paired t-test, and 1 for a difference that is 0 in every seed."
        )
        notes.append(
            f"The comparisons with GAT form families of {len(gains)} (first table) and {len(samples.p)} "
            f"(last two tables), each corrected by Holm. {_surviving_gains(gains)} "
            f"{_surviving_samples(samples)}"
        )
        smallest = _p(min(gain.apart for gain in gains.values()))
        notes.append(
            f"A published gain is the difference between two means of {RUNS} runs. The paper gives no "
            "standard error for it; we estimate it from the spread of our seeds, assuming that the two rows "
            f"are independent: √((s² of GAT + s² of the row) / {RUNS}). Added in quadrature to the standard "
            "error of our paired mean, it gives the p of published against measured gain (normal, "
            f"two-sided; {len(gains)} comparisons, not corrected; the smallest p is {smallest})."
        )
    notes.append("The paper has no settings for NO KL; they are those of WC, without the KL.")
    for row, other, equal in _equal_rows(per_seed):
        note = f"{row} has the same test accuracy as {other} in every seed"
        note += f", and the same validation loss to the last digit in {equal} of {seeds}."
        config = SETTINGS[dataset].rows[row]
        if config is not None and config.family == "lognormal" and config.sigma < UNSEEN:
            note += (
                f" A spread of σ₂ = {config.sigma:g} changes no float32 logit: without the KL the two "
                "networks are identical bit for bit. With a prior's spread of "
                f"{config.prior_sigma:g}, what remains of the KL's gradient only breaks ties in rounding."
            )
        notes.append(note)
    return notes


def _surviving_gains(gains: dict[str, Gain]) -> str:
    """Which gains in accuracy are significant after the correction, as a sentence."""
    significant = [f"{row} ({_p(gain.corrected)})" for row, gain in gains.items() if gain.corrected < LEVEL]
    smallest = _p(min(gain.corrected for gain in gains.values()))
    if significant:
        return f"Rows whose accuracy differs significantly from GAT's (p by Holm): {', '.join(significant)}."
    return f"No row's accuracy differs significantly from GAT's: the smallest p by Holm is {smallest}."


def _surviving_samples(samples: _Family) -> str:
    """Which of the many differences are significant after the correction, as a sentence."""
    count = len(samples.p)
    uncorrected = sum(p < LEVEL for p in samples.p.values())
    if not uncorrected:
        return f"Of the {count}, none has p < {LEVEL:g}, even uncorrected."
    start = f"Of the {count}, {uncorrected} {'have' if uncorrected > 1 else 'has'} p < {LEVEL:g} uncorrected"
    significant = {place: p for place, p in samples.corrected.items() if p < LEVEL}
    if not significant:
        return f"{start}, and none by Holm."
    names = "; ".join(f"{row}, {column} ({_p(p)})" for (row, column), p in significant.items())
    return f"{start}, and {len(significant)} by Holm: {names}."


def _equal_rows(per_seed: dict[int, dict[str, Any]]) -> list[tuple[str, str, int]]:
    """Rows with the test accuracy of an earlier row in every seed; in how many the losses are equal, too."""
    measured = ("epochs", "validation_loss", "test")
    names = list(next(iter(per_seed.values())))

    def equal(row: str, other: str, *parts: str) -> int:
        return sum(all(rows[row][part] == rows[other][part] for part in parts) for rows in per_seed.values())

    equal_rows = []
    for place, row in enumerate(names):
        alike = [other for other in names[:place] if equal(row, other, "test") == len(per_seed)]
        if alike:
            nearest = max(alike, key=lambda other: equal(row, other, *measured))
            equal_rows.append((row, nearest, equal(row, nearest, *measured)))
    return equal_rows


TABLE_1 = Recipe(
    name="bam-table-1",
    title="Graph attention with random weights, node classification",
    paper="Fan et al. 2020, Bayesian Attention Modules, Table 1",
    published=dict(PUBLISHED),
    run=run,
    report=report,
    seeds=20,
    folder="bam-graphs",
    options={
        "dataset": Option(f"one of {', '.join(SETTINGS)}", "cora", names=True),
        "preset": Option("paper, or official: the prior of the released code", "paper", names=True),
        "epochs": Option("maximum number of epochs of one training", EPOCHS, least=1),
        "workers": Option("number of trainings in parallel; all cores by default", least=1, moves=False),
    },
)
