"""Training graph attention networks with early stopping, one or several at once, and measuring their samples.

The whole graph is one example and one step, so training is a plain loop that several processes cannot share.
Whole trainings run side by side instead.

Test accuracy is taken at the epoch that early stopping keeps, with weights at their posterior mean
(Fan et al. 2020, section 3.4). Then 20 samples of the prediction are drawn, GAT's by dropout, the others' by
dropout and attention (section 4.2), on the features as they are and under Gaussian noise.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overt._files import write_whole
from overt.data import planetoid
from overt.judge.uncertainty import ece, pavpu, predictive, selective_accuracy
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.chain import Chain
from overt.recipes._training import hardware, save_weights

if TYPE_CHECKING:
    from overt.models.gat import GAT

# Fan et al. 2020, appendix B.1.2.
WIDTH, HEADS, DROPOUT = 8, 8, 0.6
PATIENCE = 100  # epochs
EPOCHS = 100_000  # the appendix gives no limit; early stopping comes long before
SAMPLES = 20
NOISES = (0.0, 1.0, 2.0)  # standard deviations of the noise, in those of all features
THRESHOLDS = (0.01, 0.05, 0.1)
COVERAGE = (0.5, 0.8)


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


def perform_all(
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


def cores() -> int:
    """How many processes can run at once."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
