"""Table 1 of Fan et al. 2020: graph attention with random weights on Cora, Citeseer and Pubmed.

Six rows, trained with as many seeds as asked for (`graph_training`), compared with plain GAT seed by seed
(`paired`).
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
from overt.data import planetoid
from overt.mechanisms.bayesian.config import Bayesian
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell, kept
from overt.recipes._training import torch_device
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
    cores,
    network,
    perform_all,
)
from overt.recipes.paired import corrected_by_holm, paired, paired_p, published_error, published_p

if TYPE_CHECKING:
    from overt.models.gat import GAT

# Settings of appendix B.1.2, whose σ₁ is the prior's (`prior_sigma`) and σ₂ the posterior's (`sigma`).


def _rows(
    no_kl: Bayesian, lf: Bayesian, lc: Bayesian, wf: Bayesian, wc: Bayesian
) -> dict[str, Bayesian | None]:
    return {"GAT": None, "NO KL": no_kl, "LF": lf, "LC": lc, "WF": wf, "WC": wc}


_paper = Bayesian.paper
SETTINGS = {
    "cora": Setting(
        learning_rate=0.005,
        l2=5e-4,
        out_heads=1,
        rows=_rows(
            no_kl=_paper("NO KL", k=1.0),
            lf=_paper("LF", prior_sigma=1e15, sigma=1e-6, rho=0.2),
            lc=_paper("LC", prior_sigma=1e15, sigma=1e-15, rho=0.1, d_mid=1),
            wf=_paper("WF", k=1.0, prior_beta=1e-10, prior_alpha=1e-15, rho=0.2),
            wc=_paper("WC", k=1.0, prior_beta=1e-10, rho=0.1, d_mid=1),
        ),
    ),
    "citeseer": Setting(
        learning_rate=0.005,
        l2=5e-4,
        out_heads=1,
        rows=_rows(
            no_kl=_paper("NO KL", k=100.0),
            lf=_paper("LF", prior_sigma=1e15, sigma=1e-6, rho=0.1),
            lc=_paper("LC", prior_sigma=1e15, sigma=1e-5, rho=0.1, d_mid=1),
            wf=_paper("WF", k=100.0, prior_beta=1e-15, prior_alpha=1e-7, rho=0.1),
            wc=_paper("WC", k=100.0, prior_beta=1e-15, rho=0.1, d_mid=1),
        ),
    ),
    "pubmed": Setting(
        learning_rate=0.01,
        l2=1e-3,
        out_heads=8,
        rows=_rows(
            no_kl=_paper("NO KL", k=10.0),
            lf=_paper("LF", prior_sigma=1e6, sigma=1e-2, rho=0.2),
            lc=_paper("LC", prior_sigma=1e5, sigma=1e-2, rho=0.2, d_mid=5),
            wf=_paper("WF", k=10.0, prior_beta=1e-8, prior_alpha=1e-4, rho=0.2),
            wc=_paper("WC", k=10.0, prior_beta=1e-4, rho=0.2, d_mid=5),
        ),
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
LEVEL = 0.05  # p below it counts
RUNS = 5  # behind each published number
UNSEEN = 1e-9  # a spread of logits that float32 cannot show: they are of the order of one


def check_trained(folder: Path) -> None:
    """Refuse a folder in which no run left a model."""
    if folder.parent.name not in SETTINGS["cora"].rows or not (folder / "model.safetensors").exists():
        raise FileNotFoundError(
            f"no model in {folder}: run `overt reproduce bam-table-1` first (--seeds 1 does for a look)"
        )


def trained(folder: Path, graph: planetoid.Citations) -> GAT:
    """The model that a run left in `dataset`/`row`/seed-n, in evaluation mode."""
    from safetensors.torch import load_file

    check_trained(folder)
    row, setting = folder.parent.name, SETTINGS[graph.name]
    learnt_from = json.loads((folder / "settings.json").read_text()).get("data")
    if learnt_from != graph.sha256:
        raise ValueError(f"the model in {folder} was trained on other raw files of {graph.name} than these")
    model = network(graph, Task(row, 0, setting.rows[row], setting, 0, folder, "cpu"))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.eval()


def run(request: Request) -> Outcome:
    """Train what is not trained, and put the rows side by side."""
    need("torch_geometric", "graphs")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    name, epochs, workers, preset = (
        request.options[option] for option in ("dataset", "epochs", "workers", "preset")
    )
    _check.one_of("--dataset", name, tuple(SETTINGS))
    _check.one_of("--preset", preset, ("paper", "official"))
    graph = planetoid.load(name, request.data, request.out / "data")
    described, setting = graph.describe(), SETTINGS[name]
    device = torch_device(request.device).type
    workers = cores() if workers is None else workers
    request.console.print(
        f"{name}: {described['nodes']:,} nodes, {described['edges']:,} edges, {described['train']} to learn "
        f"from, {described['test']} to test on; {workers} training{'s' if workers > 1 else ''} at once"
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
                "data": described["sha256"],
                "mechanism": repr(bayesian),
                "training": repr(replace(setting, rows={})),
                "epochs": epochs,
                "seed": seed,
                "device": device,
            }
            found = kept(folder, settings, request.fresh)
            if found is None:
                tasks.append(Task(row, seed, bayesian, setting, epochs, folder, device))
            else:
                numbers[row, seed] = found
    if numbers:
        request.console.print(f"[dim]{len(numbers)} trainings are kept from before[/dim]")
    tasks.sort(key=lambda task: task.seed)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=request.console) as progress:
        bar = progress.add_task(name, total=len(tasks))
        for task, row_numbers in perform_all(tasks, graph, workers):
            numbers[task.row, task.seed] = row_numbers
            last = f"{task.row} {task.seed}: {100 * row_numbers['test']:.1f} %"
            progress.update(bar, advance=1, description=f"{name}, {last}")
            if not request.console.is_terminal:  # a log has no bar
                request.console.print(f"{name}, {last}")
    per_seed = {seed: {row: numbers[row, seed] for row in setting.rows} for seed in range(request.seeds)}
    config = {
        "data": described,
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
    """A row's numbers of every seed, in points of a hundred, by the path to them."""

    def value(numbers: Any) -> float:
        for name in path:
            numbers = numbers[name]
        return 100 * float(numbers)

    return [value(rows[row]) for rows in per_seed.values()]


def _differences(per_seed: dict[int, dict[str, Any]], row: str, *path: str) -> list[float]:
    """What a row has more than GAT with the same seed, in points of a hundred, by the path to a number."""
    pairs = zip(_values(per_seed, row, *path), _values(per_seed, "GAT", *path), strict=True)
    return [one - other for one, other in pairs]


def _published(dataset: str, row: str) -> tuple[float, float | None]:
    value: Any = PUBLISHED[dataset][row]
    return value if isinstance(value, tuple) else (value, None)


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{'+' if round(value, 2) > 0 else ''}{cell(value)}"


def _p(value: float) -> str:
    """A p-value with two digits that count, at most four after the point."""
    if math.isnan(value):
        return "–"
    if value < 1e-4:
        return "<0.0001"
    return f"{value:.4f}" if value < 1e-3 else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def tell(outcome: Outcome) -> Report:
    """Accuracies with their differences to GAT; then what the samples say, clean and under noise."""
    dataset: str = outcome.config["data"]["name"]
    gains = _gains(outcome.per_seed, dataset)
    samples = _Family.of(outcome.per_seed, outcome.config["noises"])
    title = dataset.capitalize()
    grids = [_accuracies(outcome, gains, dataset)]
    grids += [_sampled(outcome, level, title) for level in outcome.config["noises"]]
    grids += samples.grids(title, len(outcome.per_seed))
    return Report(grids, _notes(dataset, outcome.per_seed, gains, samples))


@dataclass(frozen=True)
class Gain:
    """A row's test accuracy less GAT's, as published and as measured.

    Attributes:
        published: in points of 100.
        error: its standard error, from our seeds' spread; NaN of a single seed, and so are all that follow.
        differences: ours, seed by seed.
        p: of the paired t-test.
        corrected: that by Holm, for all rows.
        apart: p of published and measured gain being the same.
    """

    published: float
    error: float
    differences: list[float]
    p: float
    corrected: float
    apart: float


def _gains(per_seed: dict[int, dict[str, Any]], dataset: str) -> dict[str, Gain]:
    """Those of every row but GAT."""
    rows = [row for row in next(iter(per_seed.values())) if row != "GAT"]
    plain, alone = _values(per_seed, "GAT", "test"), len(per_seed) < 2
    differences = {row: _differences(per_seed, row, "test") for row in rows}
    p_values = [paired_p(differences[row]) for row in rows]
    found = {}
    for row, p, corrected in zip(rows, p_values, corrected_by_holm(p_values), strict=True):
        published = _published(dataset, row)[0] - _published(dataset, "GAT")[0]
        error = math.nan if alone else published_error(_values(per_seed, row, "test"), plain, RUNS)
        apart = math.nan if alone else published_p(published, error, differences[row])
        found[row] = Gain(published, error, differences[row], p, corrected, apart)
    return found


def _accuracies(outcome: Outcome, gains: dict[str, Gain], dataset: str) -> Grid:
    """Published beside measured accuracy."""
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
            mean, low, high = paired(gain.differences)
            cells += [_signed(gain.published), cell(None if math.isnan(gain.error) else gain.error)]
            cells += [_signed(mean), f"{_signed(low)} … {_signed(high)}"]
            cells += [_p(gain.p), _p(gain.corrected), _p(gain.apart)]
        rows.append((row if row == "GAT" else f"BAM {row}", [*cells, cell(numbers["epochs"], digits=0)]))
    heads = ["published, %", "measured, %", "published − GAT", "its standard error, estimated"]
    heads += ["measured − GAT", "95 % interval", "p", f"p, Holm of {len(gains)}"]
    heads += ["p, published against measured", "epochs"]
    return Grid(f"{dataset.capitalize()}, test accuracy, mean±sd of the seeds", heads, rows)


def _sampled(outcome: Outcome, level: float, title: str) -> Grid:
    """What the samples say at one level of noise."""
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
    what = "features as they are" if level == 0.0 else f"noise of {level:g} sd of the features"
    heads = ["accuracy, mean weights", f"accuracy, {outcome.config['samples']} samples"]
    heads += [f"PAvPU {at:g}" for at in THRESHOLDS]
    heads += [f"accuracy of the surest {100 * at:.0f} %" for at in COVERAGE]
    return Grid(f"{title}, {what}", [*heads, "ECE"], rows)


@dataclass(frozen=True)
class _Family:
    """Paired differences to GAT of what the samples say, all of which are looked at together.

    Attributes:
        rows: all but GAT.
        columns: measures at each level of noise.
        differences: (row, column) → seed by seed, in points of 100.
        p: (row, column) → of the paired t-test.
        corrected: those by Holm, for all of them.
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
        corrected = dict(zip(p, corrected_by_holm(list(p.values())), strict=True))
        return cls(rows, list(columns), differences, p, corrected)

    def grids(self, title: str, seeds: int) -> list[Grid]:
        """The differences, then their p-values."""
        count = len(self.p)

        def grid(name: str, told: Callable[[tuple[str, str]], str]) -> Grid:
            rows = [(f"BAM {row}", [told((row, column)) for column in self.columns]) for row in self.rows]
            return Grid(f"{title}, {name}", self.columns, rows)

        def difference(place: tuple[str, str]) -> str:
            mean, low, high = paired(self.differences[place])
            return f"{_signed(mean)} ({_signed(low)} … {_signed(high)})"

        what = (
            f"the {count} differences to GAT in points of 100, each with its own 95 % interval over the seeds"
        )
        found = [grid(what, difference)]
        if seeds > 1:
            what = f"p of these {count} differences: taken singly → by Holm for all {count}"
            found.append(grid(what, lambda place: f"{_p(self.p[place])} → {_p(self.corrected[place])}"))
        return found


def _notes(
    dataset: str, per_seed: dict[int, dict[str, Any]], gains: dict[str, Gain], samples: _Family
) -> list[str]:
    """What a reader must know, some of it found in the numbers."""
    seeds = len(per_seed)
    notes = [
        "Differences are paired: with equal seeds the rows have equal first weights and dropout masks, since "
        "neither noise nor the priors' first weights take anything from the stream that these come from."
    ]
    if seeds > 1:
        notes[0] += (
            f" Intervals are Student's, over the {seeds} seeds, each by itself. p is the paired "
            "t-test's, and 1 for a difference that is 0 in every seed."
        )
        notes.append(
            f"Rows against GAT are families of {len(gains)} (first table) and {len(samples.p)} (last two) "
            f"comparisons, each corrected by Holm. {_surviving(gains)} {_surviving_samples(samples)}"
        )
        least = min(gain.apart for gain in gains.values())
        notes.append(
            f"A published gain is the difference of two means of {RUNS} runs. The paper gives no standard "
            "error for it: it is estimated from the spread of our seeds, the two rows taken as independent, "
            f"√((s² of GAT + s² of the row) / {RUNS}). Added in squares to that of our own paired mean, it "
            f"gives the p of published against measured gain (normal, two-sided; {len(gains)} comparisons, "
            f"not corrected, the least p being {_p(least)})."
        )
    notes.append("NO KL has no settings in the paper: those of WC, without the KL.")
    for row, other, equal in _equal_rows(per_seed):
        note = f"{row} has the test accuracy of {other} in every seed"
        note += f", and its validation loss to the last digit in {equal} of {seeds}."
        config = SETTINGS[dataset].rows[row]
        if config is not None and config.family == "lognormal" and config.sigma < UNSEEN:
            note += (
                f" No float32 logit shows a spread of σ₂ = {config.sigma:g}: without the KL the two are one "
                "network bit for bit. What is left of the KL's gradient beside a prior's spread of "
                f"{config.prior_sigma:g} breaks ties in rounding, and no more."
            )
        notes.append(note)
    return notes


def _surviving(gains: dict[str, Gain]) -> str:
    """Which gains in accuracy are left after the correction, in a sentence."""
    left = [f"{row} ({_p(gain.corrected)})" for row, gain in gains.items() if gain.corrected < LEVEL]
    least = _p(min(gain.corrected for gain in gains.values()))
    if left:
        return f"These rows' accuracy differs significantly from GAT's, with p by Holm: {', '.join(left)}."
    return f"No row's accuracy differs significantly from GAT's: the least p by Holm is {least}."


def _surviving_samples(samples: _Family) -> str:
    """Which of the many differences are left after the correction, in a sentence."""
    count = len(samples.p)
    alone = sum(p < LEVEL for p in samples.p.values())
    if not alone:
        return f"Of the {count}, none has p < {LEVEL:g}, even taken singly."
    left = {place: p for place, p in samples.corrected.items() if p < LEVEL}
    if not left:
        return f"Of the {count}, {alone} have p < {LEVEL:g} taken singly, and none by Holm."
    named = "; ".join(f"{row}, {column} ({_p(p)})" for (row, column), p in left.items())
    return f"Of the {count}, {alone} have p < {LEVEL:g} taken singly, and {len(left)} by Holm: {named}."


def _equal_rows(per_seed: dict[int, dict[str, Any]]) -> list[tuple[str, str, int]]:
    """Rows with the test accuracy of an earlier one in every seed; in how many the losses are equal too."""
    measured = ("epochs", "validation_loss", "test")
    names = list(next(iter(per_seed.values())))

    def equal(row: str, other: str, *parts: str) -> int:
        return sum(all(rows[row][part] == rows[other][part] for part in parts) for rows in per_seed.values())

    found = []
    for place, row in enumerate(names):
        alike = [other for other in names[:place] if equal(row, other, "test") == len(per_seed)]
        if alike:
            nearest = max(alike, key=lambda other: equal(row, other, *measured))
            found.append((row, nearest, equal(row, nearest, *measured)))
    return found


TABLE_1 = Recipe(
    name="bam-table-1",
    title="Graph attention with random weights, node classification",
    paper="Fan et al. 2020, Bayesian Attention Modules, Table 1",
    published=dict(PUBLISHED),
    run=run,
    tell=tell,
    seeds=20,
    folder="bam-graphs",
    options={
        "dataset": Option(f"one of {', '.join(SETTINGS)}", "cora", names=True),
        "preset": Option("paper, or official: the prior as the released code has it", "paper", names=True),
        "epochs": Option("most epochs of one training", EPOCHS, least=1),
        "workers": Option("trainings at once, by default as many as there are cores", least=1, moves=False),
    },
)
