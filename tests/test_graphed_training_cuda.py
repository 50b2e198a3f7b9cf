"""CUDA graphs of updates: the numbers of the same updates without them, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overt.data import scenes
from overt.data.region_features import Regions
from overt.recipes import (
    _training,
    bam_captions,
    bam_nan,
    bam_questions,
    caption_training,
    question_training,
    translation_training,
    vision_training,
)
from overt.recipes._cuda_graphs import GraphedLoss
from overt.recipes.caption_training import CaptionTraining, Shared
from overt.recipes.question_training import QuestionTraining
from overt.recipes.regions import RegionSource
from overt.recipes.unstable_attention import register

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
register()

UPDATES = 24
NETWORK: dict[str, Any] = {"width": 32, "heads": 2, "layers": 1, "flat": 16, "embedding": 16, "grid": [4, 4]}
TRAINING = QuestionTraining(UPDATES, 2, 16, 1e-3, (20, 22), {**NETWORK, "dropout": 0.1})


@pytest.fixture(scope="module")
def made() -> scenes.Scenes:
    return scenes.make((40, 4, 4), side=32)


class Source(RegionSource):
    """Regions that are drawn, the same for all seeds."""

    def regions(self, seed: int) -> Regions:
        del seed
        drawn = torch.randn(48, 16, 24, generator=torch.Generator().manual_seed(1))
        return Regions(drawn.half(), torch.ones(48, 16, dtype=torch.bool))


SOURCE = Source(Path(), False, None, {}, 16)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """And the buffers that are stored."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are trained on a CPU."""
    run = _training.Run

    def plain(*arguments: Any, graphs: bool, **further: Any) -> Any:
        assert graphs
        return run(*arguments, **further)

    for module in (vision_training, translation_training):
        monkeypatch.setattr(module, "Run", plain)


def check_both_ways(
    trained: Callable[[str], tuple[dict[str, Tensor], list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, buffers and losses of a training in a folder are the same with graphs and without."""
    graphed, losses = trained("graphs")
    without_graphs(monkeypatch)
    plain, wanted = trained("plain")
    assert losses == wanted
    for name, value in plain.items():
        assert torch.equal(graphed[name], value), name


@pytest.mark.parametrize("name", ["Soft", "LC", "WC", "WC k=10", "shuffled images"])
def test_questions_are_learned_as_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: scenes.Scenes, name: str
) -> None:
    data = made.questions

    def trained(place: str) -> tuple[dict[str, Tensor], list[list[float]]]:
        row = bam_questions.ROWS[name]
        model, numbers = question_training.train(tmp_path / place, data, SOURCE, row, TRAINING, 3, "cuda")
        return weights(model), numbers["curve"]

    check_both_ways(trained, monkeypatch)


@pytest.mark.parametrize("name", ["soft", "hard", "BAM-WC", *list(bam_nan.ROWS)[1:]])
def test_captions_of_several_lengths_are_learned_as_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: scenes.Scenes, name: str
) -> None:
    data, rows = made.captions, {**bam_nan.ROWS, **bam_captions.ROWS}
    training = CaptionTraining(UPDATES, batch=3, length=9)
    lengths = {int((row != -100).sum()) for row in caption_training.texts_of(data, "train", 9).labels}
    assert len(lengths) > 1

    def trained(place: str) -> tuple[dict[str, Tensor], list[float]]:
        row = bam_captions.fitted(rows[name], data)
        shared = Shared(data, SOURCE, None)
        made = [caption_training.model_of(row, shared, training, 3, bam_nan.Watched)]
        model, numbers = caption_training.train(
            tmp_path / place, shared, row, training, 3, "cuda", make=lambda *_: made.pop()
        )
        return weights(model), numbers["valid_losses"]

    check_both_ways(trained, monkeypatch)


def test_a_graph_draws_other_dropout_at_each_replay_and_adds_no_gradients_up() -> None:
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": self.layer(nn.functional.dropout(x)).mean()}

    net, x = Net().cuda(), torch.ones(8, 64, device="cuda")
    run = GraphedLoss(net)
    found = [(float(run({"x": x})), net.layer.bias.grad.clone()) for _ in range(4)]  # type: ignore[union-attr]
    assert len({loss for loss, _ in found}) > 1
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for _, gradient in found)


def test_a_graph_leaves_stored_buffers_as_updates_alone_would() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            self.seen.add_(1.0)
            return {"loss": self.layer(x).mean()}

    net = Counting().cuda()
    run = GraphedLoss(net)
    for length in (2, 2, 3, 2):
        run({"x": torch.ones(length, 4, device="cuda")})
    assert float(net.seen) == 4.0
    run.clear()
    assert net.layer.weight.grad is None
    assert not run.recorded
