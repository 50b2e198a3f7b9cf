"""Claims about Laplace's approximation of a last layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

import overt
from families import TEXT, build, llama_like, tokens
from overt.judge import laplace, uncertainty

CLASSES, WIDTH, EXAMPLES = 3, 4, 40


def problem(seed: int = 0, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer, features, and labels drawn from what it predicts."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(WIDTH, CLASSES, bias=bias).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(EXAMPLES, WIDTH, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        labels = torch.multinomial(layer(x).softmax(dim=-1), 1, generator=generator)[:, 0]
    return layer, x, labels


def flat(layer: nn.Linear) -> Tensor:
    """Parameters class by class, the bias after each class's weights."""
    columns = [layer.weight] + ([] if layer.bias is None else [layer.bias.unsqueeze(1)])
    return torch.cat(columns, dim=1).detach().flatten()


def apply(parameters: Tensor, x: Tensor, bias: bool) -> Tensor:
    """The layer as a function of its flat parameters."""
    table = parameters.view(CLASSES, -1)
    return F.linear(x, table[:, :WIDTH], table[:, WIDTH] if bias else None)


@pytest.mark.parametrize("bias", [True, False])
def test_the_precision_is_the_hessian_of_the_negative_log_posterior(bias: bool) -> None:
    layer, x, labels = problem(bias=bias)
    tau = 0.7

    def loss(parameters: Tensor) -> Tensor:
        likelihood = F.cross_entropy(apply(parameters, x, bias), labels, reduction="sum")
        return likelihood + tau / 2 * parameters.square().sum()

    hessian = torch.autograd.functional.hessian(loss, flat(layer))
    found = laplace.fit(layer.weight, layer.bias, x, labels, tau)
    torch.testing.assert_close(found.covariance, torch.linalg.inv(hessian))
    torch.testing.assert_close(found.mean.flatten(), flat(layer))


@pytest.mark.parametrize("bias", [True, False])
def test_logits_are_distributed_as_the_jacobian_says(bias: bool) -> None:
    layer, x, labels = problem(bias=bias)
    found = laplace.fit(layer.weight, layer.bias, x, labels)
    mean, covariance = found.logits(x[:5])
    jacobian = torch.autograd.functional.jacobian(lambda theta: apply(theta, x[:5], bias), flat(layer))
    expected = torch.einsum("ncp,pq,ndq->ncd", jacobian, found.covariance, jacobian)
    torch.testing.assert_close(mean, layer(x[:5]).detach())
    torch.testing.assert_close(covariance, expected)


def test_samples_agree_with_the_distribution_of_the_logits() -> None:
    layer, x, labels = problem()
    found = laplace.fit(layer.weight, layer.bias, x, labels, 2.0)
    p = found.probabilities(x[:4], samples=20_000, seed=3)
    assert p.shape == (20_000, 4, CLASSES)
    # Logits up to a constant, so compare their differences.
    differences = (p[..., 1:].log() - p[..., :1].log()).transpose(0, 1)  # (examples, samples, 2)
    mean, covariance = found.logits(x[:4])
    contrast = torch.tensor([[-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0]], dtype=torch.float64)
    spread = (contrast @ covariance @ contrast.mT).diagonal(dim1=1, dim2=2).sqrt()
    torch.testing.assert_close(differences.mean(dim=1), mean @ contrast.mT, atol=0.05, rtol=0.0)
    torch.testing.assert_close(differences.std(dim=1), spread, atol=0.0, rtol=0.03)


def test_the_same_seed_draws_the_same_parameters_for_any_features() -> None:
    layer, x, labels = problem()
    found = laplace.fit(layer.weight, layer.bias, x, labels)
    together = found.probabilities(x, samples=5)
    apart = [found.probabilities(part, samples=5) for part in x.split(7)]
    torch.testing.assert_close(torch.cat(apart, dim=1), together)
    assert not torch.allclose(found.probabilities(x, samples=5, seed=1), together)


def test_a_strong_prior_gives_the_layers_own_predictions_and_a_weak_one_less_certain_ones() -> None:
    layer, x, labels = problem()
    plain = layer(x).detach().softmax(dim=-1)
    sure = laplace.fit(layer.weight, layer.bias, x, labels, 1e12)
    torch.testing.assert_close(sure.probit(x), plain, atol=1e-5, rtol=0.0)
    torch.testing.assert_close(sure.probabilities(x, 3).mean(dim=0), plain, atol=1e-5, rtol=0.0)
    weak = laplace.fit(layer.weight, layer.bias, x[:8], labels[:8], 1e-2)
    far = 5.0 * x
    sharp = layer(far).detach().softmax(dim=-1)
    for found in (weak.probit(far), weak.probabilities(far).mean(dim=0)):
        assert float(found.max(dim=1).values.mean()) < float(sharp.max(dim=1).values.mean())


def test_laplace_torch_agrees() -> None:
    theirs = pytest.importorskip(
        "laplace", reason="laplace-torch is not installed: `make test-peers` installs it"
    )
    layer, x, labels = problem()
    net = nn.Sequential(nn.Tanh(), layer)
    data = torch.utils.data.TensorDataset(x, labels)
    options = {"subset_of_weights": "last_layer", "hessian_structure": "full", "prior_precision": 0.5}
    other = theirs.Laplace(net, "classification", **options)
    other.fit(torch.utils.data.DataLoader(data, batch_size=10))
    found = laplace.fit(layer.weight, layer.bias, x.tanh(), labels, 0.5)
    # Theirs has all weights before all biases.
    places = torch.arange(CLASSES * (WIDTH + 1)).view(CLASSES, WIDTH + 1)
    order = torch.cat([places[:, :WIDTH].flatten(), places[:, WIDTH]])
    torch.testing.assert_close(found.covariance[order][:, order], other.posterior_covariance)
    torch.testing.assert_close(found.probit(x.tanh()), other(x, link_approx="probit"))


def test_the_prior_is_chosen_by_held_out_likelihood() -> None:
    layer, x, labels = problem()
    _, other, _ = problem(1)
    generator = torch.Generator().manual_seed(2)
    held = torch.multinomial(layer(other).detach().softmax(dim=-1), 1, generator=generator)[:, 0]
    found = laplace.fit(layer.weight, layer.bias, x[:6], labels[:6])
    precisions = (0.01, 1.0, 100.0)
    tuned = found.tuned(other, held, precisions, samples=50)

    def loss(precision: float) -> float:
        one = laplace.fit(layer.weight, layer.bias, x[:6], labels[:6], precision)
        return uncertainty.nll(one.probabilities(other, 50).mean(dim=0), held)

    assert tuned.prior_precision == min(precisions, key=loss)
    expected = laplace.fit(layer.weight, layer.bias, x[:6], labels[:6], tuned.prior_precision)
    torch.testing.assert_close(tuned.covariance, expected.covariance)


# A model's last layer


def batches(count: int = 2) -> list[dict[str, Tensor]]:
    return [{"input_ids": tokens(6, seed=n), "labels": torch.arange(6) % 2} for n in range(count)]


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert"])
@pytest.mark.parametrize("noisy", [False, True])
def test_the_inputs_of_a_models_last_layer_make_its_logits(kind: str, noisy: bool) -> None:
    config = getattr(hf, f"{kind}Config")
    small = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "vocab_size": 60}
    settings = small if kind == "DistilBert" else {**TEXT, "max_position_embeddings": 64}
    model = build(getattr(hf, f"{kind}ForSequenceClassification"), lambda: config(**settings))().train()
    if noisy:
        overt.attach(model, overt.Bayesian())
    data = batches()
    seen = laplace.last_layer(model, data)
    assert model.training
    assert not any(module._forward_hooks for module in model.modules() if isinstance(module, nn.Linear))
    with torch.no_grad():
        logits = torch.cat([model.eval()(input_ids=batch["input_ids"]).logits for batch in data])
    assert seen.bias is not None
    torch.testing.assert_close(F.linear(seen.features, seen.weight, seen.bias), logits)
    assert torch.equal(seen.labels, torch.cat([batch["labels"] for batch in data]))
    found = laplace.fit(seen.weight, seen.bias, seen.features, seen.labels)
    drawn = uncertainty.predictive(found.probabilities(seen.features))
    assert (drawn.mutual_information > 0.0).all()


class Doubled(hf.BertForSequenceClassification):
    """Changes its logits after its last layer."""

    def forward(self, **inputs: Any) -> Any:
        output = super().forward(**inputs)
        output.logits = 2.0 * output.logits
        return output


@pytest.mark.parametrize(
    ("make", "data", "message"),
    [
        (
            build(Doubled, lambda: hf.BertConfig(**TEXT)),
            batches(),
            "the logits of Doubled are not the output",
        ),
        (llama_like("Llama"), batches(), "last_layer needs logits of shape .* from LlamaForCausalLM, got"),
        (build(hf.BertModel, lambda: hf.BertConfig(**TEXT)), batches(), "last_layer needs .* got none"),
        (None, [], "data must hold at least one batch, got none"),
        (None, [{"input_ids": tokens(6)}], "batch 0 of data must have labels"),
        (None, ["text"], "batch 0 of data must be a mapping, got a str"),
    ],
)
def test_a_last_layer_that_is_not_found_is_named(make: Any, data: Any, message: str) -> None:
    make = make or build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT))
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        laplace.last_layer(make(), data)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"weight": torch.ones(3)}, r"weight must have shape \(classes, dim\), got \(3,\)"),
        ({"weight": torch.full((3, 4), torch.nan)}, "weight and bias must be finite, got NaN or infinity"),
        ({"weight": torch.ones(3, 9000)}, "the layer must have at most 20,000 parameters, .* got 27,003"),
        ({"bias": torch.ones(2)}, r"bias must have shape \(3,\), got \(2,\)"),
        ({"features": torch.ones(40, 5)}, r"features must have shape \(examples, 4\), got \(40, 5\)"),
        ({"features": torch.ones(0, 4)}, r"features must have shape \(examples, 4\), got \(0, 4\)"),
        ({"features": torch.full((40, 4), torch.inf)}, "features must be finite, got NaN or infinity"),
        ({"labels": torch.zeros(39).long()}, "labels must be 40 integer classes, .* of shape .39,."),
        (
            {"labels": torch.zeros(40)},
            "labels must be 40 integer classes, one per example, got torch.float32",
        ),
        ({"labels": torch.full((40,), 3)}, "labels must lie in 0 to 2, got 3"),
        ({"prior_precision": 0.0}, "prior_precision must be positive and finite, got 0.0"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, Any], message: str) -> None:
    layer, x, labels = problem()
    given = {"weight": layer.weight, "bias": layer.bias, "features": x, "labels": labels, **changed}
    with pytest.raises(ValueError, match=f"^{message}"):
        laplace.fit(**given)
    found = laplace.fit(layer.weight, layer.bias, x, labels)
    with pytest.raises(
        ValueError, match=r"^precisions must be a list of numbers such as \(0.1, 1.0\), got 3"
    ):
        found.tuned(x, labels, 3)  # type: ignore[arg-type]
