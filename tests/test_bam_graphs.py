"""Table 1 of Fan et al. 2020: the published settings, one seed for all rows, and runs that are kept."""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from scipy.stats import norm, ttest_1samp, ttest_rel
from torch import Tensor, nn
from torch_geometric.datasets import Planetoid
from typer.testing import CliRunner

from graphs import without_network, write_planetoid
from overt import _workers
from overt.cli import app, neighbours
from overt.data import planetoid
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.chain import Chain
from overt.models.gat import GAT
from overt.recipes import bam_graphs, graph_training, reproduce
from overt.recipes import paired as statistics
from overt.recipes.bam_graphs import PUBLISHED, SETTINGS
from overt.recipes.graph_training import EarlyStopping, Task

ROWS = ["GAT", "NO KL", "LF", "LC", "WF", "WC"]
CORA = SETTINGS["cora"]
EPOCHS = 8
FEW = 3  # samples of a prediction


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data of the user's, no network, and few samples."""
    without_network(monkeypatch)
    monkeypatch.setattr(bam_graphs, "SAMPLES", FEW)
    monkeypatch.setattr(graph_training, "SAMPLES", FEW)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw files of a small graph that is called Cora."""
    place = tmp_path_factory.mktemp("data")
    write_planetoid(place, "cora")
    return place


@pytest.fixture(scope="module")
def graph(data: Path, tmp_path_factory: pytest.TempPathFactory) -> planetoid.Citations:
    return planetoid.load("cora", data, tmp_path_factory.mktemp("graph"))


def task(row: str, seed: int = 0, epochs: int = EPOCHS, **changes: Any) -> Task:
    return replace(Task(row, seed, CORA.rows[row], CORA, epochs, Path("nowhere"), "cpu"), **changes)


@dataclass(eq=False)
class Trained:
    """What a training left."""

    model: GAT
    numbers: dict[str, Any]
    state: Tensor  # of the global generator, after it

    @property
    def weights(self) -> dict[str, Tensor]:
        """All but those of the prior's network."""
        return {name: value for name, value in self.model.state_dict().items() if ".prior." not in name}


def learn(graph: planetoid.Citations, what: Task) -> Trained:
    model, numbers = graph_training.train(graph, what)
    numbers.pop("epoch_ms")
    return Trained(model, numbers, torch.get_rng_state())


@pytest.fixture(scope="module")
def learnt(graph: planetoid.Citations) -> Callable[[str, int], Trained]:
    """A row of Cora's settings with a seed, trained for a few epochs, once."""
    return cache(lambda row, seed: learn(graph, task(row, seed)))


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# What the paper says.


def lf(prior: float, posterior: float, rho: float) -> dict[str, Any]:
    return {
        "family": "lognormal",
        "prior": "fixed",
        "prior_sigma": prior,
        "sigma": posterior,
        "rho": rho,
        "prior_mu": 0,
    }


def lc(prior: float, posterior: float, rho: float, d_mid: int) -> dict[str, Any]:
    return {
        "family": "lognormal",
        "prior": "contextual",
        "prior_sigma": prior,
        "sigma": posterior,
        "rho": rho,
        "d_mid": d_mid,
    }


def wf(k: float, beta: float, alpha: float, rho: float) -> dict[str, Any]:
    return {
        "family": "weibull",
        "prior": "fixed",
        "k": k,
        "prior_beta": beta,
        "prior_alpha": alpha,
        "rho": rho,
    }


def wc(k: float, beta: float, rho: float, d_mid: int) -> dict[str, Any]:
    return {
        "family": "weibull",
        "prior": "contextual",
        "k": k,
        "prior_beta": beta,
        "rho": rho,
        "d_mid": d_mid,
    }


@pytest.mark.parametrize(
    ("name", "optimizer", "out_heads", "rows"),
    [
        (
            "pubmed",
            (0.01, 0.001),
            8,
            [lf(1e6, 1e-2, 0.2), lc(1e5, 1e-2, 0.2, 5), wf(10, 1e-8, 1e-4, 0.2), wc(10, 1e-4, 0.2, 5)],
        ),
        (
            "cora",
            (0.005, 0.0005),
            1,
            [lf(1e15, 1e-6, 0.2), lc(1e15, 1e-15, 0.1, 1), wf(1, 1e-10, 1e-15, 0.2), wc(1, 1e-10, 0.1, 1)],
        ),
        (
            "citeseer",
            (0.005, 0.0005),
            1,
            [lf(1e15, 1e-6, 0.1), lc(1e15, 1e-5, 0.1, 1), wf(100, 1e-15, 1e-7, 0.1), wc(100, 1e-15, 0.1, 1)],
        ),
    ],
)
def test_settings_are_those_of_the_appendix(
    name: str, optimizer: tuple[float, float], out_heads: int, rows: list[dict[str, Any]]
) -> None:
    setting = SETTINGS[name]
    assert (setting.learning_rate, setting.l2) == optimizer
    assert setting.out_heads == out_heads
    assert list(setting.rows) == ROWS
    assert setting.rows["GAT"] is None
    default = Bayesian()
    for row, expected in zip(ROWS[2:], rows, strict=True):
        config = setting.rows[row]
        assert config is not None
        assert {key: getattr(config, key) for key in expected} == expected
        for field in ("posterior", "kl_reduction", "preset"):
            assert getattr(config, field) == getattr(default, field), "what the appendix does not set"
    no_kl, contextual = setting.rows["NO KL"], setting.rows["WC"]
    assert no_kl is not None
    assert contextual is not None
    assert no_kl.prior is None
    assert (no_kl.family, no_kl.k) == (contextual.family, contextual.k)


def test_no_other_data_set_and_the_network_of_the_appendix() -> None:
    assert SETTINGS.keys() == PUBLISHED.keys() == {"cora", "citeseer", "pubmed"}
    assert (graph_training.HEADS, graph_training.WIDTH, graph_training.DROPOUT) == (8, 8, 0.6)
    assert graph_training.PATIENCE == EarlyStopping().patience == 100


TABLE = """
GAT	83.00	72.50	77.26
BAM (NO KL)	83.39	72.91	78.50
BAM-LF	83.24	72.86	78.30
BAM-LC	83.34	73.04	78.76
BAM-WF	83.48±0.2	73.18±0.3	78.50±0.3
BAM-WC	83.81±0.3	73.52±0.4	78.82±0.3
"""


def test_published_accuracies_are_those_of_table_1() -> None:
    lines = [line.split("\t") for line in TABLE.strip().splitlines()]
    for column, name in enumerate(("cora", "citeseer", "pubmed"), 1):
        expected = {}
        for row, words in zip(ROWS, lines, strict=True):
            value, _, spread = words[column].partition("±")
            expected[row] = (float(value), float(spread)) if spread else float(value)
        assert PUBLISHED[name] == expected
        assert list(PUBLISHED[name]) == ROWS


# The network and its training.


@pytest.mark.parametrize(
    ("name", "features", "classes", "count"),
    [
        # first: 64·F weights, 2·64 for the scores, 64 biases; second: heads·(64·C + 2·C), C biases
        ("cora", 1433, 7, 64 * 1433 + 128 + 64 + 64 * 7 + 14 + 7),
        ("citeseer", 3703, 6, 64 * 3703 + 128 + 64 + 64 * 6 + 12 + 6),
        ("pubmed", 500, 3, 64 * 500 + 128 + 64 + 8 * (64 * 3 + 6) + 3),
    ],
)
def test_the_network_has_the_published_sizes(
    name: str, features: int, classes: int, count: int, graph: planetoid.Citations
) -> None:
    sized = replace(graph, name=name, x=torch.zeros(4, features), classes=classes)
    model = graph_training.network(sized, task("GAT", setting=SETTINGS[name]))
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    # the prior's network is two layers without the last bias, one for all heads
    config = SETTINGS[name].rows["WC"]
    assert config is not None
    with_prior = graph_training.network(sized, task("WC", setting=SETTINGS[name], bayesian=config))
    more = sum(parameter.numel() for parameter in with_prior.parameters()) - count
    assert more == config.d_mid * (8 + 1 + 1) + config.d_mid * (classes + 1 + 1)


def test_pubmeds_output_heads_are_averaged(graph: planetoid.Citations) -> None:
    model = graph_training.network(graph, task("GAT", setting=SETTINGS["pubmed"])).eval()
    hidden = torch.randn(len(graph.y), 64)
    out = model.second(hidden, graph.edge_index)
    assert out.shape == (len(graph.y), 3)
    heads = []
    for head in range(8):
        alone = GAT(24, 3, out_heads=1).second.eval()
        rows = slice(3 * head, 3 * head + 3)
        state = model.second.state_dict()
        alone.load_state_dict(
            {
                "lin.weight": state["lin.weight"][rows],
                "att_src": state["att_src"][:, head : head + 1],
                "att_dst": state["att_dst"][:, head : head + 1],
                "bias": state["bias"],
            }
        )
        heads.append(alone(hidden, graph.edge_index))
    torch.testing.assert_close(out, torch.stack(heads).mean(dim=0))


def test_rows_start_from_equal_weights_with_equal_seeds(graph: planetoid.Citations) -> None:
    starts = []
    for row in ROWS:
        torch.manual_seed(3)
        state = graph_training.network(graph, task(row)).state_dict()
        starts.append({name: value for name, value in state.items() if ".prior." not in name})
    assert all(equal(start, starts[0]) for start in starts)


def looked(sequence: list[tuple[float, float]], patience: int) -> tuple[list[bool], list[bool]]:
    stopping = EarlyStopping(patience)
    kept, over = [], []
    for loss, accuracy in sequence:
        kept.append(stopping.look(loss, accuracy))
        over.append(stopping.over)
    return kept, over


def test_an_epoch_is_kept_where_loss_and_accuracy_are_both_the_best_so_far() -> None:
    epochs = [
        (1.0, 0.0, True),  # the first, however bad
        (0.9, 0.6, True),
        (0.9, 0.6, True),  # equals count as best
        (0.9, 0.7, True),
        (0.8, 0.7, True),
        (0.7, 0.6, False),  # the loss alone; it is what the next must reach
        (0.75, 0.9, False),  # accuracy alone
        (0.7, 0.8, False),
        (0.7, 0.9, True),
    ]
    kept, over = looked([(loss, accuracy) for loss, accuracy, _ in epochs], patience=2)
    assert kept == [expected for *_, expected in epochs]
    assert not any(over)


def test_training_stops_after_exactly_patience_epochs_with_neither_at_its_best() -> None:
    worse = (1.0, 0.4)
    assert looked([(0.5, 0.5), worse, worse, worse], 3)[1] == [False, False, False, True]
    # either alone starts the waiting anew, though the epoch is not kept
    for better in ((0.5, 0.1), (0.4, 0.1), (2.0, 0.5), (2.0, 0.6)):
        kept, over = looked([(0.5, 0.5), worse, worse, better, worse, worse, worse], 3)
        assert kept == [True] + [False] * 6
        assert over == [False] * 6 + [True]


class Scripted:
    """Early stopping that keeps and ends as it is told."""

    def __init__(self, keeps: list[bool]) -> None:
        self.keeps, self.loss = list(keeps), math.nan

    def look(self, loss: float, accuracy: float) -> bool:
        del loss, accuracy
        return self.keeps.pop(0)

    @property
    def over(self) -> bool:
        return not self.keeps


@pytest.mark.slow
def test_the_model_comes_back_as_it_was_at_the_epoch_kept(
    graph: planetoid.Citations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*keeps: bool) -> Trained:
        monkeypatch.setattr(graph_training, "EarlyStopping", lambda: Scripted(list(keeps)))
        return learn(graph, task("WC", epochs=50))

    found, expected, last = told(True, True, False, False), told(True, True), told(True, True, False, True)
    assert (found.numbers["epoch"], found.numbers["epochs"]) == (1, 4)
    assert equal(found.model.state_dict(), expected.model.state_dict())
    assert found.numbers["test"] == expected.numbers["test"]
    assert not equal(found.weights, last.weights), "it had moved on"


@torch.no_grad()
def judged(model: GAT, graph: planetoid.Citations, part: Tensor) -> tuple[float, float]:
    """Accuracy and cross-entropy on a part, from dense features."""
    chances = model.eval()(graph.x, graph.edge_index).double().softmax(dim=1)[part]
    truth = graph.y[part]
    hit = (chances.argmax(dim=1) == truth).double().mean()
    return float(hit), float(-chances[torch.arange(len(truth)), truth].log().mean())


@pytest.mark.parametrize("row", ["GAT", "WC"])
def test_numbers_are_those_of_the_model_that_comes_back(
    row: str, graph: planetoid.Citations, learnt: Callable[[str, int], Trained]
) -> None:
    found = learnt(row, 0)
    accuracy, loss = judged(found.model, graph, graph.validation)
    assert found.numbers["validation"] == pytest.approx(accuracy)
    assert found.numbers["validation_loss"] == pytest.approx(loss, rel=1e-5)
    assert found.numbers["test"] == pytest.approx(judged(found.model, graph, graph.test)[0])
    assert found.numbers["test"] > 0.5, "it learns, of three classes"


def test_adam_has_the_data_sets_rate_and_l2(
    graph: planetoid.Citations, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Noted(torch.optim.Adam):
        def __init__(self, parameters: Any, **options: Any) -> None:
            made.append(options)
            super().__init__(parameters, **options)

    monkeypatch.setattr(torch.optim, "Adam", Noted)
    learn(graph, task("GAT", epochs=1, setting=SETTINGS["pubmed"]))
    assert made == [{"lr": 0.01, "weight_decay": 0.001}]


def test_noise_has_the_tasks_seed_and_the_epochs_step(
    graph: planetoid.Citations, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def note(**options: Any) -> Chain:
        given.append(options)
        return Chain(**options)

    monkeypatch.setattr(graph_training, "Chain", note)
    found = learn(graph, task("WC", seed=5, epochs=3))
    assert given == [{"step": step, "seed": 5} for step in range(3)], "rho anneals by the epoch"
    given.clear()
    graph_training.uncertainty(found.model, graph, 5)
    assert [(options["seed"], options["sample"]) for options in given] == [(5, 0), (5, 1), (5, 2)] * 3


# Same seeds, same numbers.


@pytest.mark.slow
def test_at_a_spread_of_1e_15_lc_is_gat_exactly(
    graph: planetoid.Citations, learnt: Callable[[str, int], Trained]
) -> None:
    for seed in (0, 1):
        gat, lc = learnt("GAT", seed), learnt("LC", seed)
        assert equal(gat.weights, lc.weights)
        assert gat.numbers == lc.numbers
        measured = [graph_training.uncertainty(model, graph, seed) for model in (gat.model, lc.model)]
        assert measured[0] == measured[1]
    assert any(".prior." in name for name in learnt("LC", 0).model.state_dict())


@pytest.mark.slow
def test_without_the_kl_lc_is_gat_on_any_graph(graph: planetoid.Citations) -> None:
    # With it, a gradient of 1e-35 can break a tie in rounding; no logit and no weight changes otherwise.
    torch.manual_seed(0)
    lively = replace(graph, x=torch.rand(graph.x.shape))
    lc = CORA.rows["LC"]
    assert lc is not None
    found = []
    for bayesian in (None, replace(lc, prior=None)):
        what = Task("LC", 0, bayesian, CORA, 8, Path(), "cpu")
        found.append(graph_training.train(lively, what)[0].state_dict())
    assert equal(*found)


@pytest.mark.slow
def test_wf_is_no_kl_exactly(graph: planetoid.Citations, learnt: Callable[[str, int], Trained]) -> None:
    wf, no_kl = learnt("WF", 0), learnt("NO KL", 0)
    assert equal(wf.weights, no_kl.weights)
    assert wf.numbers == no_kl.numbers
    assert graph_training.uncertainty(wf.model, graph, 0) == graph_training.uncertainty(no_kl.model, graph, 0)


def test_other_rows_and_other_seeds_are_others(learnt: Callable[[str, int], Trained]) -> None:
    gat = learnt("GAT", 0)
    for row, seed in (("NO KL", 0), ("LF", 0), ("WC", 0), ("GAT", 1)):
        assert not equal(gat.weights, learnt(row, seed).weights)
    assert not equal(learnt("NO KL", 0).weights, learnt("WC", 0).weights), "there the KL is felt"
    assert learnt("GAT", 1).numbers["validation_loss"] != gat.numbers["validation_loss"]


def test_the_same_task_gives_the_same_numbers_whatever_came_before(
    graph: planetoid.Citations, learnt: Callable[[str, int], Trained]
) -> None:
    before = learnt("WC", 0)
    torch.manual_seed(99)
    again = learn(graph, task("WC"))
    assert equal(before.model.state_dict(), again.model.state_dict())
    assert before.numbers == again.numbers


def test_every_row_takes_as_many_dropout_draws(learnt: Callable[[str, int], Trained]) -> None:
    for row in ROWS:
        assert torch.equal(learnt(row, 0).state, learnt("GAT", 0).state), "so that seeds pair the masks"


def shuffled(graph: planetoid.Citations, part: Tensor) -> planetoid.Citations:
    y = graph.y.clone()
    y[part] = (y[part] + 1) % graph.classes
    return replace(graph, y=y)


def test_labels_of_test_nodes_touch_nothing_but_the_test_accuracy(
    graph: planetoid.Citations, learnt: Callable[[str, int], Trained]
) -> None:
    found, expected = learn(shuffled(graph, graph.test), task("WC")), learnt("WC", 0)
    assert equal(found.model.state_dict(), expected.model.state_dict())
    assert found.numbers.pop("test") < expected.numbers["test"]
    assert found.numbers.items() < expected.numbers.items()


def test_labels_of_validation_nodes_choose_the_epoch_and_no_more(
    graph: planetoid.Citations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_training, "EarlyStopping", lambda: Scripted([True] * 4))
    plain = learn(graph, task("WC"))
    outside = learn(shuffled(graph, ~graph.train), task("WC"))
    assert equal(plain.model.state_dict(), outside.model.state_dict())
    inside = learn(shuffled(graph, graph.train), task("WC"))
    assert not equal(plain.weights, inside.weights)


# Samples of the prediction.


def sampled(
    model: nn.Module, graph: planetoid.Citations, seed: int, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """Probabilities (sample, node, class) at each noise level."""
    seen: list[Tensor] = []
    real = graph_training.predictive

    def note(probabilities: Tensor) -> Any:
        seen.append(probabilities.clone())
        return real(probabilities)

    with monkeypatch.context() as patch:
        patch.setattr(graph_training, "predictive", note)
        graph_training.uncertainty(model, graph, seed)  # type: ignore[arg-type]
    return seen


def still(samples: Tensor) -> bool:
    return torch.equal(samples, samples[:1].expand_as(samples))


def test_samples_of_gat_differ_by_dropout_and_are_the_same_every_time(
    graph: planetoid.Citations, learnt: Callable[[str, int], Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = learnt("GAT", 0).model
    first = sampled(model, graph, 0, monkeypatch)
    torch.manual_seed(99)
    again, other = (sampled(model, graph, seed, monkeypatch) for seed in (0, 1))
    assert [tuple(level.shape) for level in first] == [(FEW, int(graph.test.sum()), 3)] * 3
    for one, two, three in zip(first, again, other, strict=True):
        torch.testing.assert_close(one.sum(dim=2), torch.ones_like(one[..., 0]))
        assert not still(one)
        assert torch.equal(one, two)
        assert not torch.equal(one, three)
    assert not model.training


def test_without_dropout_nothing_but_attention_is_drawn(
    graph: planetoid.Citations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_training, "DROPOUT", 0.0)
    for row, fixed in (("GAT", True), ("WC", False)):
        clean, *noisy = sampled(graph_training.network(graph, task(row)), graph, 0, monkeypatch)
        assert still(clean) == fixed
        for level in noisy:
            assert still(level) == fixed, "the noise on the features is the same for every sample"
            assert not torch.equal(level, clean)


class Noting(nn.Module):
    """Guesses class 0, and notes what features it was given, and in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[Tensor, bool]] = []

    def forward(self, x: Tensor, edge_index: Tensor, chain: Any = None) -> Tensor:
        del edge_index, chain
        self.seen.append((x, self.training))
        return torch.tensor([2.0, 1.0, 0.0]).expand(len(x), 3)


def test_noise_is_gaussian_with_the_spread_of_the_features(graph: planetoid.Citations) -> None:
    model = Noting()
    found = graph_training.uncertainty(model, graph, 0)  # type: ignore[arg-type]
    assert [training for _, training in model.seen] == ([False] + [True] * FEW) * 3
    levels = [model.seen[place * (1 + FEW)][0] for place in range(3)]
    for place, (x, _) in enumerate(model.seen):
        assert torch.equal(x, levels[place // (1 + FEW)])
    clean, one, two = levels
    assert torch.equal(clean, graph.x)
    noise = (one - clean) / graph.x.std()
    torch.testing.assert_close((two - clean) / graph.x.std(), 2 * noise, rtol=0, atol=1e-4)
    assert float(noise.std()) == pytest.approx(1, abs=0.03)  # of 16 800 numbers
    assert float(noise.mean()) == pytest.approx(0, abs=0.04)
    assert float((noise.abs() < 1).double().mean()) == pytest.approx(0.683, abs=0.02)
    other = Noting()
    graph_training.uncertainty(other, graph, 1)  # type: ignore[arg-type]
    assert not torch.equal(other.seen[-1][0], two)
    # and what is said of a model that is sure of class 0, wrongly or not
    share = float((graph.y[graph.test] == 0).double().mean())
    sure = float(torch.tensor([2.0, 1.0, 0.0]).double().softmax(dim=0)[0])
    assert list(found) == ["noise 0", "noise 1", "noise 2"]
    for level in found.values():
        assert level["accuracy"] == level["sampled_accuracy"] == pytest.approx(share)
        assert level["ece"] == pytest.approx(abs(sure - share))
        assert level["pavpu"] == pytest.approx({"0.01": share, "0.05": share, "0.1": share})


# Differences to GAT.


def test_paired_differences_have_students_interval() -> None:
    source = random.Random(0)
    for count in (2, 5, 20):
        values = [source.gauss(0.3, 1.0) for _ in range(count)]
        expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
        mean, low, high = statistics.mean_interval(values)
        assert mean == pytest.approx(sum(values) / count)
        assert (low, high) == pytest.approx((expected.low, expected.high))


def test_no_difference_has_no_interval_and_one_seed_none_that_is_known() -> None:
    assert statistics.mean_interval([0.0] * 5) == (0.0, 0.0, 0.0)
    mean, low, high = statistics.mean_interval([0.7])
    assert mean == 0.7
    assert math.isnan(low)
    assert math.isnan(high)


def test_p_is_that_of_the_paired_t_test() -> None:
    source = random.Random(1)
    for count in (2, 5, 20):
        one, two = ([source.gauss(shift, 1.0) for _ in range(count)] for shift in (0.5, 0.0))
        found = statistics.paired_p([a - b for a, b in zip(one, two, strict=True)])
        assert found == pytest.approx(ttest_rel(one, two).pvalue)
    assert statistics.paired_p([0.0] * 4) == 1.0, "what never differs has not been shown to"
    assert statistics.paired_p([0.5] * 4) == 0.0
    assert math.isnan(statistics.paired_p([0.5]))


@pytest.mark.slow
def test_a_published_gain_has_the_error_of_five_runs_a_row() -> None:
    row, plain = [1.0, 2.0, 3.0], [4.0, 4.0, 10.0]  # variances 1 and 12
    assert bam_graphs.RUNS == 5
    assert statistics.published_error(row, plain, bam_graphs.RUNS) == pytest.approx(math.sqrt(13 / 5))
    # against paired differences with mean 1 and standard error 2: (6 − 1) / √(4² + 2²)
    differences = [1 - 2 * math.sqrt(3), 1.0, 1 + 2 * math.sqrt(3)]
    assert stdev(differences) / math.sqrt(3) == pytest.approx(2)
    expected = 2 * norm.sf(5 / math.sqrt(20))
    assert statistics.published_p(6.0, 4.0, differences) == pytest.approx(expected)
    # simulated: two rows of five runs each, and a measured mean, of which neither gains anything
    source = random.Random(2)
    below = 0
    for _ in range(2000):
        five = [mean([source.gauss(0, spread) for _ in range(5)]) for spread in (1.0, 2.0)]
        rows = [[source.gauss(0, spread) for _ in range(20)] for spread in (1.0, 2.0)]
        error = statistics.published_error(*rows, bam_graphs.RUNS)
        ours = [a - b for a, b in zip(*rows, strict=True)]
        below += statistics.published_p(five[0] - five[1], error, ours) < 0.05
    assert 0.03 < below / 2000 < 0.08, "it is no rarer than it says"


def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parents[1] / "results" / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("name", "error", "apart"),
    [("bam-table-1", "0.49", "0.16"), ("bam-table-1-citeseer", "0.57", "0.14")],
)
def test_the_stored_gain_is_compared_with_its_own_uncertainty(name: str, error: str, apart: str) -> None:
    result = stored(name)
    table = result["tables"][0]
    row = dict(zip(table["columns"], dict(table["rows"])["BAM WC"], strict=True))
    assert (row["its standard error, estimated"], row["p, published against measured"]) == (error, apart)
    assert "published" in " ".join(result["notes"])
    assert "5 comparisons, not corrected" in " ".join(result["notes"])


def stepped_down(p_values: dict[Any, float]) -> dict[Any, float]:
    """Holm's correction, written another way: each step asks whether the least of what is left may fall."""
    left, found, highest = dict(p_values), {}, 0.0
    while left:
        least = min(left, key=lambda name: left[name])
        highest = max(highest, min(1.0, left[least] * len(left)))
        found[least] = highest
        del left[least]
    return found


def test_the_stored_differences_are_corrected_for_all_45() -> None:
    result = stored("bam-table-1")
    p: dict[tuple[str, str], float] = {}
    for row in ROWS[1:]:
        for measure, path in (
            ("accuracy", ["accuracy"]),
            ("PAvPU 0.05", ["pavpu", "0.05"]),
            ("ECE", ["ece"]),
        ):
            for level in "012":
                values: dict[str, list[float]] = {row: [], "GAT": []}
                for rows in result["per_seed"].values():
                    for name in values:
                        value = rows[name]["uncertainty"][f"noise {level}"]
                        for step in path:
                            value = value[step]
                        values[name].append(value)
                same = values[row] == values["GAT"]
                p[row, f"{measure}, noise {level}"] = (
                    1.0 if same else float(ttest_rel(values[row], values["GAT"]).pvalue)
                )
    assert len(p) == 45
    corrected = stepped_down(p)
    clean, noisy = ("WC", "PAvPU 0.05, noise 0"), ("WC", "PAvPU 0.05, noise 2")
    assert p[clean] == pytest.approx(0.0127, abs=1e-4)
    assert stepped_down({place: one for place, one in p.items() if place[0] == "WC"})[clean] > 0.05
    assert p[noisy] == pytest.approx(0.0002, abs=1e-5)
    assert corrected[noisy] < 0.01
    table = result["tables"][-1]
    assert "by Holm for all 45" in table["title"]
    for name, cells in table["rows"]:
        for column, text in zip(table["columns"], cells, strict=True):
            place = name.removeprefix("BAM "), column
            assert text == f"{bam_graphs._p(p[place])} → {bam_graphs._p(corrected[place])}"
    left = sorted(place for place, one in corrected.items() if one < 0.05)
    assert [row for row, _ in left] == ["NO KL", "NO KL", "WC", "WC", "WF", "WF"]
    text = " ".join(result["notes"])
    assert "form families of 5 (first table) and 45 (last two tables), each corrected by Holm" in text
    assert "Of the 45, 9 have p < 0.05 uncorrected, and 6 by Holm" in text
    assert all(f"{row}, {column} (" in text for row, column in left)
    assert "Of the 45, none has p < 0.05, even uncorrected." in " ".join(
        stored("bam-table-1-citeseer")["notes"]
    )


def test_p_values_are_told_with_the_digits_that_count() -> None:
    told = {1.0: "1.00", 0.494: "0.49", 0.0127: "0.013", 0.000194: "0.0002", 3e-6: "<0.0001", math.nan: "–"}
    assert [bam_graphs._p(value) for value in told] == list(told.values())


def test_a_difference_that_rounds_to_nothing_has_no_sign() -> None:
    assert [bam_graphs._signed(value) for value in (0.5, -0.5, 0.0)] == ["+0.50", "−0.50", "0.00"]
    assert [bam_graphs._signed(value) for value in (-0.001, 0.001)] == ["0.00", "0.00"]


# Whole runs.


def run(data: Path | None, out: Path, *extra: str, seeds: int = 2, fresh: bool = False) -> dict[str, Any]:
    return reproduce.run(
        "bam-table-1", data=data, seeds=seeds, device="cpu", out=out, fresh=fresh, extra=extra
    )


SHORT = ("--epochs", "4", "--workers", "1")


@dataclass(eq=False)
class Finished:
    """A run of all six rows with two seeds, from an empty folder."""

    out: Path
    cwd: Path
    result: dict[str, Any]
    threads: tuple[int, int]


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    out, cwd = tmp_path_factory.mktemp("made") / "run", tmp_path_factory.mktemp("cwd")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(bam_graphs, "SAMPLES", FEW)
        patch.setattr(graph_training, "SAMPLES", FEW)
        before = torch.get_num_threads()
        result = run(data, out, *SHORT)
    return Finished(out, cwd, result, (before, torch.get_num_threads()))


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("trained again")


def timeless(per_seed: dict[Any, Any]) -> dict[str, Any]:
    """Numbers of each seed and row but the clock's."""
    return {
        f"{seed} {row}": {name: value for name, value in numbers.items() if name != "epoch_ms"}
        for seed, rows in per_seed.items()
        for row, numbers in rows.items()
    }


@pytest.mark.slow
def test_a_run_writes_down_every_row_seed_and_noise_level(made: Finished, graph: planetoid.Citations) -> None:
    result = json.loads((made.out / "results" / "bam-table-1.json").read_text())
    assert result["commands"] == [
        "overt reproduce bam-table-1 --data DIR --seeds 2 --device cpu --epochs 4 --workers 1"
    ]
    assert result["seeds"] == [0, 1]
    assert result["config"]["data"] == graph.describe()
    assert result["config"]["most_epochs"] == 4
    assert (result["config"]["learning_rate"], result["config"]["l2"]) == (0.005, 0.0005)
    assert list(result["config"]["rows"]) == ROWS
    assert "prior_sigma=1000000000000000.0" in result["config"]["rows"]["LC"]
    assert result["published"]["cora"]["WC"] == [83.81, 0.3]
    for seed in "01":
        assert list(result["per_seed"][seed]) == ROWS
        for row, numbers in result["per_seed"][seed].items():
            kept = made.out / "cora" / row / f"seed-{seed}"
            assert json.loads((kept / "result.json").read_text()) == numbers
            assert list(numbers["uncertainty"]) == ["noise 0", "noise 1", "noise 2"]
            assert numbers["uncertainty"]["noise 0"]["accuracy"] == numbers["test"]
            for level in numbers["uncertainty"].values():
                assert level["pavpu"].keys() == {"0.01", "0.05", "0.1"}
                assert level["selective"].keys() == {"0.5", "0.8"}
            model = bam_graphs.load_trained(kept, graph)
            assert not model.training
            assert judged(model, graph, graph.test)[0] == pytest.approx(numbers["test"])
    assert made.threads[0] == made.threads[1], "the run's one thread is its own affair"


def signed(value: float) -> str:
    return unsigned_zeros(f"{value:+.2f}".replace("-", "−"))


def unsigned_zeros(text: str) -> str:
    return re.sub(r"[+−]0\.00\b", "0.00", text)


@pytest.mark.slow
def test_a_try_writes_published_beside_measured_into_its_own_folder(made: Finished) -> None:
    assert list(made.cwd.iterdir()) == []
    tables: dict[str, dict[str, list[str]]] = {}
    for block in re.split(r"\n(?=Cora, )", (made.out / "RESULTS.md").read_text())[1:]:
        title, *lines = block.splitlines()
        rows = (line.strip("| ").split(" | ") for line in lines if re.match(r"\| (GAT|BAM) ", line))
        tables[title] = {name.removeprefix("BAM "): list(map(unsigned_zeros, cells)) for name, *cells in rows}
    first, *noise, against, chance = tables
    assert first == "Cora, test accuracy, mean±sd over seeds:"
    assert noise == [
        "Cora, unchanged features:",
        "Cora, noise of 1 sd of the features:",
        "Cora, noise of 2 sd of the features:",
    ]
    published = ["83.00", "83.39", "83.24", "83.34", "83.48±0.20", "83.81±0.30"]
    assert [cells[0] for cells in tables[first].values()] == published
    assert [cells[2] for cells in tables[first].values()] == [
        "–",
        "+0.39",
        "+0.24",
        "+0.34",
        "+0.48",
        "+0.81",
    ]
    assert list(tables[against]) == ROWS[1:]
    assert tables[first]["GAT"][2:9] == ["–"] * 7
    assert list(tables[chance]) == ROWS[1:]
    assert "by Holm for all 45" in chance
    numbers = made.result["per_seed"]
    for row in ROWS:
        one, two = (100 * numbers[seed][row]["test"] for seed in "01")
        assert tables[first][row][1] == f"{(one + two) / 2:.2f}±{abs(one - two) / 2**0.5:.2f}"
        assert tables[first][row][9] == "4"
        for level, title in enumerate(noise):
            one, two = (numbers[seed][row]["uncertainty"][f"noise {level}"]["ece"] for seed in "01")
            assert tables[title][row][-1] == f"{(one + two) / 2:.3f}±{abs(one - two) / 2**0.5:.3f}"
        if row == "GAT":
            continue
        more = [100 * (numbers[seed][row]["test"] - numbers[seed]["GAT"]["test"]) for seed in "01"]
        mean, low, high = map(signed, statistics.mean_interval(more))
        assert tables[first][row][4:6] == [mean, f"{low} … {high}"]
        assert tables[first][row][6] == bam_graphs._p(statistics.paired_p(more))
        assert tables[against][row][0] == f"{mean} ({low} … {high})", "the same accuracy, at noise 0"
        eces = [numbers[seed][row]["uncertainty"]["noise 2"]["ece"] for seed in "01"]
        eces = [
            100 * (ours - numbers[seed]["GAT"]["uncertainty"]["noise 2"]["ece"])
            for ours, seed in zip(eces, "01", strict=True)
        ]
        mean, low, high = map(signed, statistics.mean_interval(eces))
        assert tables[against][row][-1] == f"{mean} ({low} … {high})"


@pytest.mark.slow
def test_rows_that_are_the_same_are_named_beside_the_table(made: Finished) -> None:
    per_seed = made.result["per_seed"]
    for row, other in (("LC", "GAT"), ("WF", "NO KL")):
        for seed in "01":
            assert timeless({0: {0: per_seed[seed][row]}}) == timeless({0: {0: per_seed[seed][other]}})
    page = (made.out / "RESULTS.md").read_text()
    same = {
        note.split()[0]: note for note in made.result["notes"] if " has the same test accuracy as " in note
    }
    every = "in every seed, and the same validation loss to the last digit in 2 of 2"
    assert f"LC has the same test accuracy as GAT {every}" in same["LC"]
    assert f"WF has the same test accuracy as NO KL {every}" in same["WF"]
    assert "σ₂ = 1e-15" in same["LC"]
    assert "σ₂" not in same["WF"]
    assert all(f"- {note}" in page for note in made.result["notes"])


def test_seeds_in_which_rows_agree_to_the_last_digit_are_counted() -> None:
    numbers = {"epochs": 4, "validation_loss": 0.5, "test": 0.8, "uncertainty": {"ece": 0.1}}
    rows = {row: dict(numbers) for row in ("GAT", "LF", "LC")}
    assert bam_graphs._equal_rows({0: rows, 1: rows}) == [("LF", "GAT", 2), ("LC", "GAT", 2)]
    other = rows | {"LF": numbers | {"validation_loss": 0.5 + 1e-9}}
    assert bam_graphs._equal_rows({0: rows, 1: other}) == [("LF", "GAT", 1), ("LC", "GAT", 2)]
    other = rows | {"LF": numbers | {"test": 0.801}}
    assert bam_graphs._equal_rows({0: rows, 1: other}) == [("LC", "GAT", 2)]


@pytest.mark.slow
def test_a_second_call_trains_nothing(made: Finished, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_training, "train", refuse)
    again = run(data, made.out, *SHORT)
    assert again["per_seed"] == made.result["per_seed"]
    assert again["tables"] == made.result["tables"]
    assert run(data, made.out, "--epochs=4", "--workers=2")["tables"] == again["tables"]
    message = (
        r"GAT/seed-0 has a run with epochs 4, but 5 was requested: delete it with --fresh, or choose another"
    )
    with pytest.raises(ValueError, match=message):
        run(data, made.out, "--epochs=5", "--workers=1")
    assert run(data, made.out, *SHORT, seeds=1)["seeds"] == [0], "fewer seeds are there too"
    with pytest.raises(AssertionError, match="trained again"):
        run(data, made.out, *SHORT, seeds=3)


@pytest.mark.slow
def test_fresh_trains_again(
    made: Finished, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made.out, tmp_path / "run")
    monkeypatch.setattr(graph_training, "train", refuse)
    with pytest.raises(AssertionError, match="trained again"):
        run(data, tmp_path / "run", *SHORT, fresh=True)
    assert not list((tmp_path / "run" / "cora").rglob("result.json")), "what there was is forgotten"


@pytest.fixture
def two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row: CORA.rows[row] for row in ("GAT", "WC")}
    monkeypatch.setitem(SETTINGS, "cora", replace(CORA, rows=rows))


@pytest.mark.slow
@pytest.mark.usefixtures("two_rows")
def test_an_interrupted_run_goes_on(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, int]] = []
    real = graph_training.train

    def failing(graph: planetoid.Citations, what: Task) -> Any:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append((what.row, what.seed))
        return real(graph, what)

    monkeypatch.setattr(graph_training, "train", failing)
    words = ("--epochs=2", "--workers=1")
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path, *words)
    assert done == [("GAT", 0), ("WC", 0), ("GAT", 1)], "one seed of all rows after the other"
    done.clear()
    run(data, tmp_path, *words)
    assert done == [("WC", 1)]


def test_a_process_that_dies_ends_the_run_in_one_line(
    graph: planetoid.Citations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying:
        def __init__(self, *_: Any) -> None:
            pass

        def submit(self, *_: Any) -> Future[Any]:
            dead: Future[Any] = Future()
            dead.set_exception(BrokenProcessPool("a child is gone"))
            return dead

        def shutdown(self, **_: Any) -> None:
            pass

    monkeypatch.setattr(_workers, "ProcessPoolExecutor", Dying)
    tasks = [Task("GAT", seed, None, CORA, 1, tmp_path, "cpu") for seed in (0, 1)]
    with pytest.raises(OSError, match=r"a worker process was killed.*try fewer --workers"):
        list(graph_training.perform_all(tasks, graph, 2))


def test_a_recipe_ends_its_own_processes_and_no_others(
    graph: planetoid.Citations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned = multiprocessing.get_context("spawn")
    host = spawned.Process(target=time.sleep, args=(60,), daemon=True)
    host.start()
    ours: list[Any] = []

    class Interrupted:
        """Starts a worker as a pool does, and is interrupted."""

        def __init__(self, _: int, context: Any, *__: Any) -> None:
            ours.append(context.Process(target=time.sleep, args=(60,)))
            ours[0].start()

        def submit(self, *_: Any) -> Future[Any]:
            raise KeyboardInterrupt

        def shutdown(self, **_: Any) -> None:
            ours[0].join(30)

    monkeypatch.setattr(_workers, "ProcessPoolExecutor", Interrupted)
    tasks = [Task("GAT", seed, None, CORA, 1, tmp_path, "cpu") for seed in (0, 1)]
    try:
        with pytest.raises(KeyboardInterrupt):
            list(graph_training.perform_all(tasks, graph, 2))
        assert not ours[0].is_alive()
        assert host.is_alive()
    finally:
        host.terminate()
        host.join()


@pytest.mark.slow
@pytest.mark.usefixtures("two_rows")
def test_several_processes_find_the_same_numbers_as_one(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # few samples: other processes would not know of them
    monkeypatch.setitem(SETTINGS, "cora", replace(CORA, rows={row: CORA.rows[row] for row in ("GAT", "WC")}))
    one, two = (
        run(data, tmp_path / workers, "--epochs=3", "--workers", workers, seeds=1) for workers in "12"
    )
    assert timeless(one["per_seed"]) == timeless(two["per_seed"])
    for row in ("GAT", "WC"):
        first, second = (
            (tmp_path / workers / "cora" / row / "seed-0" / "model.safetensors").read_bytes()
            for workers in "12"
        )
        assert first == second
    # of one seed there is no spread to speak of
    _, bayesian = one["tables"][0]["rows"][1]
    assert re.fullmatch(r"\d\d\.\d\d", bayesian[1])
    assert bayesian[5:9] == ["– … –", "–", "–", "–"], "a single seed has neither interval nor p"
    assert bayesian[3] == "–"
    assert one["spread"]["WC"]["test"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("two_rows")
def test_the_official_preset_is_another_run_and_says_what_it_ran(data: Path, tmp_path: Path) -> None:
    result = run(data, tmp_path, "--epochs=2", "--workers=1", "--preset=official", seeds=1)
    assert (tmp_path / "results" / "bam-table-1-official.json").exists()
    settings = json.loads((tmp_path / "cora-official" / "WC" / "seed-0" / "settings.json").read_text())
    assert "preset='official'" in settings["mechanism"]
    assert not (tmp_path / "cora").exists()
    assert result["config"]["rows"]["WC"] == settings["mechanism"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dataset", "karate"], "--dataset must be one of 'cora', 'citeseer', 'pubmed'; got 'karate'"),
        (["--preset", "mine"], "--preset must be one of 'paper', 'official'; got 'mine'"),
        (["--epochs", "0"], "--epochs must be a whole number of at least 1, got 0"),
        (["--workers", "none"], "--workers must be a whole number of at least 1, got 'none'"),
        (["--data", "nowhere"], "--data (or OVERT_DATA) must be a folder, got nowhere"),
        ([], "raw files of cora: "),
        (["--dataset", "pubmed"], "raw files of pubmed: "),
    ],
)
def test_the_recipe_names_what_is_wrong_in_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["reproduce", "bam-table-1", *words])
    assert isinstance(result.exception, ValueError | OSError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing was written"


# One node of a run, traced.


def shown(made: Finished, data: Path, *words: str) -> Any:
    common = ["--data", str(data), "--run", str(made.out)]
    return CliRunner().invoke(app, ["neighbours", *common, *words])


@pytest.mark.slow
def test_neighbours_prints_a_nodes_table_and_writes_picture_and_data(
    made: Finished, data: Path, graph: planetoid.Citations, tmp_path: Path
) -> None:
    picture, page = tmp_path / "node.png", tmp_path / "node.json"
    node = int(graph.edge_index[0].bincount().argmax())
    words = ["--row", "WC", "--seed", "1", "--samples", "4", "--method", "flow"]
    result = shown(made, data, str(node), *words, "--out", str(picture), "--page", str(page))
    assert result.exit_code == 0, result.output
    model = bam_graphs.load_trained(made.out / "cora" / "WC" / "seed-1", graph)
    with torch.no_grad():
        predicted = int(model(graph.x, graph.edge_index)[node].argmax())
    assert f"cora, WC, seed 1: class {int(graph.y[node])}, predicted {predicted}\n" in result.output
    assert f"what node {node} draws on, by flow" in result.output
    assert "±" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert {path.name for path in tmp_path.iterdir()} == {"node.png", "node.json"}, "no halves are left"
    rows = json.loads(page.read_text())["nodes"]
    linked = set(graph.edge_index[0][graph.edge_index[1] == node].tolist())
    assert {row["id"] for row in rows if row["hop"] == 1} == linked
    assert all(row["label"] == int(graph.y[row["id"]]) for row in rows)
    assert sum(row["rollout"] for row in rows) == pytest.approx(1, abs=1e-5)
    assert max(row["rollout_spread"] for row in rows) > 0
    flows = [row["flow"] for row in rows]
    assert flows == sorted(flows, reverse=True)


@pytest.mark.slow
def test_of_plain_gat_no_samples_are_drawn(made: Finished, data: Path, tmp_path: Path) -> None:
    result = shown(made, data, "0", "--row", "GAT", "--page", str(tmp_path / "node.json"))
    assert result.exit_code == 0, result.output
    assert "by rollout" in result.output
    assert "±" not in result.output
    rows = json.loads((tmp_path / "node.json").read_text())["nodes"]
    assert all(row["rollout_spread"] is None for row in rows)
    assert neighbours.show(0, row="GAT", data=data, folder=made.out).samples == 0
    assert neighbours.show(0, row="WC", data=data, folder=made.out, samples=2).samples == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["700"], "node must lie in 0 to 699, got 700"),
        (["--", "-1"], "node must lie in 0 to 699, got -1"),
        (["0", "--page", "node.txt"], "--page must end in .html (a page) or .json (its data), got node.txt"),
        (["0", "--out", "node.txt"], "--out must end in .png, .svg, .pdf, got node.txt"),
        (["0", "--dataset", "karate"], "--dataset must be one of 'cora', 'citeseer', 'pubmed'; got 'karate'"),
        (["0", "--row", "XX"], "--row must be one of 'GAT', 'NO KL', 'LF', 'LC', 'WF', 'WC'; got 'XX'"),
        (["0", "--method", "guess"], "--method must be one of 'raw', 'rollout', 'flow'; got 'guess'"),
        (["0", "--seed", "2"], "WC/seed-2: run `overt reproduce bam-table-1` first"),
        (["0", "--run", "nowhere"], "no model in nowhere/cora/WC/seed-0: run `overt reproduce"),
    ],
)
def test_neighbours_names_what_is_wrong_in_one_line(
    words: list[str],
    message: str,
    made: Finished,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = shown(made, data, *words)
    assert isinstance(result.exception, ValueError | OSError), result.output
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not list(tmp_path.iterdir()), "nothing was written"


@pytest.mark.slow
@pytest.mark.usefixtures("two_rows")
def test_neighbours_reads_the_graph_that_the_run_downloaded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(source: Planetoid) -> None:
        for file in source.raw_file_names:
            shutil.copy(data / file, source.raw_dir)

    with monkeypatch.context() as patch:
        patch.setattr(Planetoid, "download", download)
        run(None, tmp_path, "--epochs=1", "--workers=1", seeds=1)
    result = CliRunner().invoke(app, ["neighbours", "0", "--run", str(tmp_path), "--samples", "2"])
    assert result.exit_code == 0, result.exception
