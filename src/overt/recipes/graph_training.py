"""Train graph attention networks with early stopping, one or several at once, and evaluate their samples.

The whole graph is one example and one step, so a training is a plain loop that several processes cannot
share. Instead, whole trainings run in parallel.

Test accuracy is measured at the epoch chosen by early stopping, with weights at their posterior mean
(Fan et al. 2020, section 3.4). Then 20 samples of the prediction are drawn, GAT's by dropout, the others' by
dropout and attention (section 4.2), on the unchanged features and on features with Gaussian noise.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from overt._workers import Tell, side_by_side
from overt.data import planetoid
from overt.judge.uncertainty import ece, pavpu, predictive, selective_accuracy
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.chain import Chain
from overt.models.folders import save_weights
from overt.recipes._runs import finish_run
from overt.recipes._training import hardware

if TYPE_CHECKING:
    from overt.models.gat import GAT

# Fan et al. 2020, appendix B.1.2.
WIDTH, HEADS, DROPOUT = 8, 8, 0.6
PATIENCE = 100  # epochs
EPOCHS = 100_000  # the appendix gives no limit; early stopping ends training long before
SAMPLES = 20
NOISES = (0.0, 1.0, 2.0)  # standard deviation of the noise, in units of that of all features
THRESHOLDS = (0.01, 0.05, 0.1)
COVERAGE = (0.5, 0.8)


@dataclass(frozen=True)
class Setting:
    """The appendix's settings for one data set.

    Attributes:
        learning_rate: learning rate of Adam.
        l2: weight of the L2 regularisation.
        out_heads: number of heads of the second layer.
        rows: the table's rows; None is plain GAT. The appendix has no settings for NO KL: those of WC.
    """

    learning_rate: float
    l2: float
    out_heads: int
    rows: dict[str, Bayesian | None]


@dataclass(frozen=True)
class Task:
    """One training: a row of the table with one seed.

    Attributes:
        row: name of the row.
        seed: random seed of initial weights, dropout and noise.
        bayesian: settings of the row; None is plain GAT.
        setting: settings of the data set.
        epochs: maximum number of epochs.
        folder: folder for its numbers and weights.
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
    """As in GAT: an epoch is kept if its validation loss and accuracy are both the best so far.

    Ties count as best. Training ends when neither has been the best for `patience` epochs.
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
    """The untrained network of the paper for a task."""
    from overt.models.gat import GAT

    mechanisms = [] if task.bayesian is None else [task.bayesian]
    return GAT(
        graph.x.shape[1], graph.classes, mechanisms, WIDTH, HEADS, task.setting.out_heads, dropout=DROPOUT
    )


def train(graph: planetoid.Citations, task: Task) -> tuple[GAT, dict[str, Any]]:
    """Train one network; return it as it was at the kept epoch, with that epoch's numbers."""
    device = torch.device(task.device)
    torch.manual_seed(task.seed)
    model = network(graph, task).to(device)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=task.setting.learning_rate, weight_decay=task.setting.l2
    )
    # Nearly all features are zero, so sparse products are faster on a CPU.
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
        raise ValueError(f"{task.row}, seed {task.seed}: no epoch had a finite validation loss")
    model.load_state_dict(weights)
    best["epochs"] = epoch + 1
    best["epoch_ms"] = 1000 * (time.perf_counter() - began) / (epoch + 1)
    return model, best


@torch.no_grad()
def uncertainty(model: GAT, graph: planetoid.Citations, seed: int) -> dict[str, Any]:
    """Evaluate samples of the prediction on test nodes at each noise level."""
    device = next(model.parameters()).device
    edge_index, test = graph.edge_index.to(device), graph.test.to(device)
    targets = graph.y[graph.test]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(graph.x.shape, generator=generator) * graph.x.std()
    by_noise: dict[str, Any] = {}
    for level in NOISES:
        x = (graph.x + level * noise).to(device)
        model.eval()
        plain = model(x, edge_index)[test].argmax(dim=1).cpu()
        model.train()  # keeps dropout on; random attention is sampled
        samples = []
        for sample in range(SAMPLES):
            torch.manual_seed(SAMPLES * seed + sample)
            chain = Chain(step=EPOCHS, seed=seed, sample=sample, kl=False)
            samples.append(model(x, edge_index, chain=chain)[test].double().softmax(dim=1).cpu())
        probabilities = torch.stack(samples)
        mean = predictive(probabilities).mean
        by_noise[f"noise {level:g}"] = {
            "accuracy": float((plain == targets).double().mean()),
            "sampled_accuracy": float((mean.argmax(axis=1) == targets.numpy()).mean()),
            "pavpu": {str(at): value for at, value in pavpu(probabilities, targets, THRESHOLDS).items()},
            "ece": ece(mean, targets),
            "selective": {
                str(at): value for at, value in selective_accuracy(mean, targets, COVERAGE).items()
            },
        }
    model.eval()
    return by_noise


def perform(task: Task, shared: planetoid.Citations, tell: Tell = lambda _: None) -> dict[str, Any]:
    """Train, measure, and store weights and numbers in the task's folder; all tasks share the graph."""
    del tell
    model, numbers = train(shared, task)
    numbers["uncertainty"] = uncertainty(model, shared, task.seed)
    numbers["hardware"] = hardware(task.device)
    save_weights(model.cpu(), task.folder)
    finish_run(task.folder, numbers)
    return numbers


def _repeatable() -> None:
    """Use one thread and deterministic sums, so that a training gives the same numbers in any process."""
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True)


def perform_all(
    tasks: list[Task], graph: planetoid.Citations, workers: int
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Perform tasks in this process or in several; yield each as it finishes."""
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # needed before cuBLAS starts, for deterministic sums
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
    yield from side_by_side(tasks, perform, graph, workers, _repeatable)
