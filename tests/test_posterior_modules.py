"""Predictive samples of modules that take a chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overt
from overt.attaching import sampling
from overt.mechanisms.bayesian.layer import BayesianLayer


class Classifier(nn.Module):
    def __init__(self, *mechanisms: overt.Mechanism, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = overt.Encoder(8, 2, 2, mechanisms, dropout=dropout)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: float = 1.0, chain: overt.Chain | None = None) -> Any:
        return self.head(self.encoder(x, chain=chain).mean(dim=1)) * scale


@pytest.fixture(scope="module")
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier(overt.Bayesian(k=0.5, prior=None)).train()


@pytest.fixture(scope="module")
def x() -> Tensor:
    return torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))


def test_samples_are_forward_passes_with_that_sample(model: Classifier, x: Tensor) -> None:
    drawn = overt.posterior(model, x, samples=3, seed=2, first=7)
    assert model.training, "the mode is restored"
    assert isinstance(drawn, overt.Posterior)
    assert float(drawn.spread.min()) > 0.0
    model.eval()
    for number in range(3):
        chain = overt.Chain(step=0, sample=number, examples=torch.arange(4) + 7, seed=2)
        with torch.no_grad():
            want = model(x, chain=chain).softmax(dim=-1)
        torch.testing.assert_close(drawn.samples[number], want)
    model.train()


def test_draws_depend_neither_on_rows_at_once_nor_on_the_batch(model: Classifier, x: Tensor) -> None:
    want = overt.posterior(model, x, samples=4).samples
    torch.testing.assert_close(overt.posterior(model, x, samples=4, rows=3).samples, want)
    torch.testing.assert_close(overt.posterior(model, x[2:], samples=4, first=2).samples, want[:, 2:])


@pytest.mark.parametrize("link", ["softmax", "sigmoid", "identity"])
def test_the_problem_type_turns_outputs_into_predictions(model: Classifier, x: Tensor, link: Any) -> None:
    raw = overt.posterior(model, {"x": x, "scale": 2.0}, samples=2, problem_type="identity").samples
    want = {"softmax": raw.softmax(dim=-1), "sigmoid": raw.sigmoid(), "identity": raw}[link]
    drawn = overt.posterior(model, {"x": x, "scale": 2.0}, samples=2, problem_type=link)
    torch.testing.assert_close(drawn.samples, want)
    assert (drawn.entropy is not None) is (link != "identity")
    if link == "sigmoid":  # each class is a yes or a no
        pairs = torch.stack([want, 1.0 - want], dim=-1)
        each = torch.distributions.Categorical(pairs.mean(dim=0)).entropy()
        torch.testing.assert_close(drawn.entropy, each.sum(dim=-1))
        rest = torch.distributions.Categorical(pairs).entropy().sum(dim=-1).mean(dim=0)
        torch.testing.assert_close(drawn.mutual_information, each.sum(dim=-1) - rest)


def test_no_kl_is_computed_and_the_draws_are_those_that_one_would_be_computed_beside(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Classifier(overt.Bayesian(k=0.5), dropout=0.3)
    computed: list[bool] = []
    kl_of = BayesianLayer._kl

    def noted(self: BayesianLayer, *arguments: Any) -> Tensor:
        computed.append(self.training)
        return kl_of(self, *arguments)

    def with_kl(**settings: Any) -> overt.Chain:
        return overt.Chain(**{**settings, "kl": None})

    monkeypatch.setattr(BayesianLayer, "_kl", noted)
    without = [overt.posterior(model, x, samples=3, dropout=dropout).samples for dropout in (False, True)]
    assert computed == []
    monkeypatch.setattr(sampling, "Chain", with_kl)
    beside = [overt.posterior(model, x, samples=3, dropout=dropout).samples for dropout in (False, True)]
    assert computed == [True, True], "in both layers, with dropout: else the test would tell nothing"
    assert all(torch.equal(one, other) for one, other in zip(without, beside, strict=True))


def test_dropout_alone_can_be_sampled_and_batch_norms_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = overt.vision.resnet("aa-resnet-34", 3, stem="cifar", width=8, blocks=[1, 1, 1, 1], size=8).train()
    model.fc = nn.Sequential(nn.Dropout(0.5), model.fc)
    before = [buffer.clone() for buffer in model.buffers()]
    drawn = overt.posterior(model, torch.randn(2, 3, 8, 8), samples=4, dropout=True)
    assert float(drawn.spread.max()) > 0.0
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))


def test_labels_are_ignored_and_compiled_modules_are_sampled(model: Classifier, x: Tensor) -> None:
    want = overt.posterior(model, x, samples=2).samples
    with_labels = {"x": x, "labels": torch.zeros(4)}
    torch.testing.assert_close(overt.posterior(model, with_labels, samples=2).samples, want)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(overt.posterior(compiled, x, samples=2).samples, want)
    with pytest.raises(TypeError, match="batch must be a tensor, or inputs by name, got a list"):
        overt.posterior(model, [x, x])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch must hold at least one example, got none"):
        overt.posterior(model, x[:0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": Classifier()}, "posterior needs random weights"),
        ({"problem_type": "logits"}, "problem_type must be .*got 'logits'"),
        ({"generate": 3}, "generate is for language models, got a Classifier"),
        (
            {"batch": {"x": torch.zeros(2, 5, 8), "scale": torch.zeros(3)}},
            r"of one batch size, got sizes \[2, 3\]",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    model: Classifier, x: Tensor, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        overt.posterior(**({"model": model, "batch": x} | change))
