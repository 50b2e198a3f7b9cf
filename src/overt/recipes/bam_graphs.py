"""Table 1 of Fan et al. 2020: graph attention with random weights on Cora, Citeseer and Pubmed.

The whole graph is one example and one step, so training is a plain loop, and there is nothing that several
processes could share in it. What runs side by side are whole trainings: six rows times as many seeds.

Test accuracy is taken at the epoch that early stopping keeps, with weights at their posterior mean
(section 3.4). Then 20 samples of the prediction are drawn, GAT's by dropout, the others' by dropout and
attention (section 4.2), on the features as they are and under Gaussian noise.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import overt
from overt import _check
from overt._extras import need
from overt._files import write_whole
from overt.judge.families import holm
from overt.judge.uncertainty import ece, pavpu, predictive, selective_accuracy
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.chain import Chain
from overt.recipes import planetoid
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell, kept
from overt.recipes._training import hardware, save_weights, torch_device

if TYPE_CHECKING:
    from overt.models.gat import GAT

# Appendix B.1.2. σ₁ there is the prior's (`prior_sigma`), σ₂ the posterior's (`sigma`).
WIDTH, HEADS, DROPOUT = 8, 8, 0.6
PATIENCE = 100  # epochs
EPOCHS = 100_000  # the appendix names none; early stopping comes long before


@dataclass(frozen=True)
class Setting:
    """What the appendix sets for one data set.

    Attributes:
        learning_rate: Adam's.
        l2: weight of the L2 regularisation.
        out_heads: of the second layer.
        rows: the table's rows; None is plain GAT. The appendix has no settings for NO KL: they are WC's.
    """

    learning_rate: float
    l2: float
    out_heads: int
    rows: dict[str, Bayesian | None]


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
SAMPLES = 20
NOISES = (0.0, 1.0, 2.0)  # standard deviations of the noise, in those of all features
THRESHOLDS = (0.01, 0.05, 0.1)
COVERAGE = (0.5, 0.8)
CONFIDENCE = 0.95
LEVEL = 0.05  # p below it counts
RUNS = 5  # behind each published number
UNSEEN = 1e-9  # a spread of logits that float32 cannot show: they are of the order of one


@dataclass(frozen=True)
class Task:
    """One training: a row of the table with one seed.

    Attributes:
        row: its name.
        seed: of first weights, dropout and noise.
        bayesian: the row's settings; None is plain GAT.
        setting: the data set's.
        epochs: no more than these.
        folder: where its numbers and weights go.
        device: "cpu" or "cuda".
    """

    row: str
    seed: int
    bayesian: Bayesian | None
    setting: Setting
    epochs: int
    folder: Path
    device: str


class EarlyStopping:
    """As in GAT: an epoch is kept where validation loss and accuracy are both the best so far.

    Equals count as best. Training ends when neither has been so for `patience` epochs.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self.patience, self.waited = patience, 0
        self.loss, self.accuracy = math.inf, 0.0

    def look(self, loss: float, accuracy: float) -> bool:
        """Whether to keep this epoch."""
        lower, higher = loss <= self.loss, accuracy >= self.accuracy
        self.waited = 0 if lower or higher else self.waited + 1
        self.loss, self.accuracy = min(loss, self.loss), max(accuracy, self.accuracy)
        return lower and higher

    @property
    def over(self) -> bool:
        """Whether to stop."""
        return self.waited >= self.patience


def network(graph: planetoid.Citations, task: Task) -> GAT:
    """The paper's network for a task, untrained."""
    from overt.models.gat import GAT

    mechanisms = [] if task.bayesian is None else [task.bayesian]
    return GAT(
        graph.x.shape[1], graph.classes, mechanisms, WIDTH, HEADS, task.setting.out_heads, dropout=DROPOUT
    )


def train(graph: planetoid.Citations, task: Task) -> tuple[GAT, dict[str, Any]]:
    """Train one network; it comes back as it was at the epoch kept, with that epoch's numbers."""
    device = torch.device(task.device)
    torch.manual_seed(task.seed)
    model = network(graph, task).to(device)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=task.setting.learning_rate, weight_decay=task.setting.l2
    )
    # Nearly all features are zero: on a CPU their products are not worth forming.
    x = graph.x.to_sparse().coalesce() if device.type == "cpu" else graph.x.to(device)
    edge_index, y = graph.edge_index.to(device), graph.y.to(device)
    train, validation, test = (
        mask.nonzero().squeeze(1).to(device) for mask in (graph.train, graph.validation, graph.test)
    )
    stopping = EarlyStopping()
    best: dict[str, Any] = {}
    weights: dict[str, Tensor] = {}
    began, epoch = time.perf_counter(), 0
    for epoch in range(task.epochs):
        model.train()
        optimizer.zero_grad(set_to_none=True)
        chain = Chain(step=epoch, seed=task.seed)
        logits = model(x, edge_index, chain=chain)
        loss = F.cross_entropy(logits[train], y[train]) + chain.penalty().to(device)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model(x, edge_index)
        seen, correct = logits[validation], logits.argmax(dim=1) == y
        accuracy = float(correct[validation].double().mean())
        if stopping.look(float(F.cross_entropy(seen, y[validation])), accuracy):
            best = {
                "epoch": epoch,
                "validation": accuracy,
                "validation_loss": stopping.loss,
                "test": float(correct[test].double().mean()),
            }
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        if stopping.over:
            break
    if not weights:
        raise ValueError(
            f"{task.row}, seed {task.seed}: no epoch had a finite validation loss, nothing to keep"
        )
    model.load_state_dict(weights)
    best["epochs"] = epoch + 1
    best["epoch_ms"] = 1000 * (time.perf_counter() - began) / (epoch + 1)
    return model, best


@torch.no_grad()
def uncertainty(model: GAT, graph: planetoid.Citations, seed: int) -> dict[str, Any]:
    """Measures of the prediction's samples on test nodes, for each noise level."""
    device = next(model.parameters()).device
    edge_index, test = graph.edge_index.to(device), graph.test.to(device)
    targets = graph.y[graph.test]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(graph.x.shape, generator=generator) * graph.x.std()
    found: dict[str, Any] = {}
    for level in NOISES:
        x = (graph.x + level * noise).to(device)
        model.eval()
        plain = model(x, edge_index)[test].argmax(dim=1).cpu()
        model.train()  # dropout stays on; attention is drawn where it is random
        samples = []
        for sample in range(SAMPLES):
            torch.manual_seed(SAMPLES * seed + sample)
            chain = Chain(step=EPOCHS, seed=seed, sample=sample, kl=False)
            samples.append(model(x, edge_index, chain=chain)[test].double().softmax(dim=1).cpu())
        probabilities = torch.stack(samples)
        mean = predictive(probabilities).mean
        found[f"noise {level:g}"] = {
            "accuracy": float((plain == targets).double().mean()),
            "sampled_accuracy": float((mean.argmax(axis=1) == targets.numpy()).mean()),
            "pavpu": {str(at): value for at, value in pavpu(probabilities, targets, THRESHOLDS).items()},
            "ece": ece(mean, targets),
            "selective": {
                str(at): value for at, value in selective_accuracy(mean, targets, COVERAGE).items()
            },
        }
    model.eval()
    return found


def perform(task: Task, graph: planetoid.Citations) -> dict[str, Any]:
    """Train, measure, and leave weights and numbers in the task's folder."""
    model, numbers = train(graph, task)
    numbers["uncertainty"] = uncertainty(model, graph, task.seed)
    numbers["hardware"] = hardware(task.device)
    save_weights(model.cpu(), task.folder)
    write_whole(task.folder / "result.json", json.dumps(numbers, indent=1))
    return numbers


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


_graph: planetoid.Citations | None = None  # of a worker process


def _prepare(graph: planetoid.Citations) -> None:
    global _graph
    _graph = graph
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    _repeatable()


def _work(task: Task) -> tuple[Task, dict[str, Any]]:
    assert _graph is not None
    return task, perform(task, _graph)


class _Context(SpawnContext):
    """Knows the processes that were started through it: whoever runs a recipe may have others."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # noqa: N802
        """Start one, and remember it."""
        process = SpawnContext.Process(*args, **kwargs)
        self.started.append(process)
        return process


def _repeatable() -> None:
    """One thread and no sum in an order of chance: a training has the same numbers wherever it is run."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)


def _performed(
    tasks: list[Task], graph: planetoid.Citations, workers: int
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Perform tasks as they come, in this process or in several."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts, or sums have no order
    if workers == 1 or len(tasks) < 2:
        threads = torch.get_num_threads()
        deterministic = torch.are_deterministic_algorithms_enabled()
        _repeatable()
        try:
            for task in tasks:
                yield task, perform(task, graph)
        finally:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic)
        return
    context = _Context()
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _prepare, (graph,))
    try:
        for done in as_completed([pool.submit(_work, task) for task in tasks]):
            yield done.result()
    except BrokenProcessPool:
        raise OSError(
            "a training's process was killed, by want of memory perhaps: fewer --workers would do; "
            "the same command goes on from what is done"
        ) from None
    finally:
        for process in context.started:  # there are some alive where this was interrupted
            if process.is_alive():
                process.terminate()
        pool.shutdown(cancel_futures=True)


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
    workers = _cores() if workers is None else workers
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
        for task, row_numbers in _performed(tasks, graph, workers):
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


def _cores() -> int:
    """How many processes can run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def paired(differences: list[float]) -> tuple[float, float, float]:
    """Mean of paired differences, and its 95 % interval by Student's t."""
    from scipy.stats import t  # type: ignore[import-untyped, unused-ignore]

    values = torch.tensor(differences, dtype=torch.float64)
    mean, count = float(values.mean()), len(differences)
    if count < 2:
        return mean, math.nan, math.nan
    half = float(t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * float(values.std()) / math.sqrt(count)
    return mean, mean - half, mean + half


def paired_p(differences: list[float]) -> float:
    """Two-sided p of the paired t-test; 1 where no pair differs, NaN of a single one."""
    from scipy.stats import t  # type: ignore[import-untyped, unused-ignore]

    values = torch.tensor(differences, dtype=torch.float64)
    count = len(differences)
    if count < 2:
        return math.nan
    mean, error = float(values.mean()), float(values.std()) / math.sqrt(count)
    if error == 0.0:
        return 1.0 if mean == 0.0 else 0.0
    return float(2 * t.sf(abs(mean) / error, count - 1))


def published_error(row: list[float], plain: list[float], runs: int = RUNS) -> float:
    """Standard error of a published difference of two rows, each a mean of `runs` runs.

    The paper gives none. Taken are the spreads of our seeds, and rows that do not depend on each other: the
    square root of (variance of the one + variance of the other) / runs.
    """
    one, other = (torch.tensor(values, dtype=torch.float64).var() for values in (row, plain))
    return math.sqrt(float(one + other) / runs)


def published_p(published: float, error: float, differences: list[float]) -> float:
    """Two-sided p, by the normal distribution, of a published difference and our mean being one and the same.

    Each has its own standard error: the published one `error`, ours that of the paired mean.
    """
    values = torch.tensor(differences, dtype=torch.float64)
    both = math.hypot(error, float(values.std()) / math.sqrt(len(differences)))
    return math.erfc(abs(published - float(values.mean())) / both / math.sqrt(2)) if both else math.nan


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


def _corrected(p_values: list[float]) -> list[float]:
    """By Holm, for all of them together; nothing is known of a single seed."""
    if any(math.isnan(p) for p in p_values):
        return [math.nan] * len(p_values)
    return [float(p) for p in holm(p_values)]


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
    for row, p, corrected in zip(rows, p_values, _corrected(p_values), strict=True):
        published = _published(dataset, row)[0] - _published(dataset, "GAT")[0]
        error = math.nan if alone else published_error(_values(per_seed, row, "test"), plain)
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
        corrected = dict(zip(p, _corrected(list(p.values())), strict=True))
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
