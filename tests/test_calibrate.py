"""Temperatures and amounts of noise that are fitted to held-out data, kept and used."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

import overt
from families import IMAGE, TEXT, build, llama_like, tokens
from overt.judge import uncertainty

NOISY = overt.Bayesian(k=2.0, prior=None)
LEAST, MOST = 0.05, 20.0


def classifier(**settings: Any) -> Any:
    """A small BERT whose logits differ from text to text."""
    model = build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**{**TEXT, **settings}))()
    with torch.no_grad():
        model.classifier.weight.mul_(20.0)
    return model


@functools.cache
def texts(number: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Token ids, and labels drawn from what `classifier` predicts at temperature 2."""
    ids, generator = tokens(size, 7, seed=number), torch.Generator().manual_seed(number)
    with torch.no_grad():
        logits = classifier(num_labels=classes)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return ids, torch.multinomial((logits / 2.0).softmax(dim=-1), 1, generator=generator)[:, 0]


def batches(count: int = 3, size: int = 20, classes: int = 2) -> list[dict[str, Tensor]]:
    made = (texts(number, size, classes) for number in range(count))
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": y} for ids, y in made]


@torch.no_grad()
def logits_and_labels(model: Any, data: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """By the model itself, in evaluation mode: the oracle's inputs."""
    inputs = [{key: value for key, value in batch.items() if key != "labels"} for batch in data]
    logits = torch.cat([model(**batch).logits for batch in inputs]).double()
    return logits, torch.cat([batch["labels"] for batch in data])


def raw_samples(model: Any, data: list[dict[str, Tensor]], **options: Any) -> Tensor:
    """Predictive samples without a temperature, (samples, examples, classes)."""
    drawn, first = [], 0
    for batch in data:
        told = overt.posterior(model, batch, first=first, calibrated=False, **options)
        drawn.append(told.samples.double())
        first += len(batch["labels"])
    return torch.cat(drawn, dim=1)


# The fit


def test_a_temperature_that_made_the_labels_is_found_again() -> None:
    result = overt.calibrate(classifier(num_labels=3), batches(6, 500, 3))
    assert result.temperature == pytest.approx(2.0, rel=0.08)
    assert result.examples == 3000
    assert result.noise is None
    assert result.tried == {}


def test_an_optimiser_of_torch_finds_the_same_temperature() -> None:
    model, data = classifier(), batches()
    result = overt.calibrate(model, data)
    logits, labels = logits_and_labels(model, data)
    cold = torch.ones((), dtype=torch.float64, requires_grad=True)  # 1 / temperature
    optimiser = torch.optim.LBFGS([cold], max_iter=200, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(logits * cold, labels)
        loss.backward()
        return loss

    optimiser.step(closure)
    assert LEAST < 1 / cold.item() < MOST
    assert result.temperature == pytest.approx(1 / cold.item(), rel=1e-4)
    assert result.nll_after == pytest.approx(closure().item(), abs=1e-9)
    assert result.nll_before == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-9)


@pytest.mark.parametrize("dropout", [False, True])
def test_a_random_model_is_fitted_by_the_mean_of_its_samples(dropout: bool) -> None:
    model, data = classifier(), batches()
    if not dropout:
        overt.attach(model, NOISY)
    drawn = raw_samples(model, data, samples=6, dropout=dropout)
    _, labels = logits_and_labels(model, data)
    result = overt.calibrate(model, data, samples=6, dropout=dropout)

    def nll(temperature: float) -> float:
        return uncertainty.nll((drawn.log() / temperature).softmax(dim=-1).mean(dim=0), labels)

    assert result.nll_before == pytest.approx(nll(1.0), abs=1e-5)
    assert result.nll_after == pytest.approx(nll(result.temperature), abs=1e-5)
    around = [nll(math.exp(0.05 * step)) for step in range(-59, 60)]
    assert result.nll_after <= min(around) + 1e-5


def answers() -> tuple[Any, list[dict[str, Tensor]]]:
    model = build(hf.BertForQuestionAnswering, lambda: hf.BertConfig(**TEXT))()
    data = batches(2, 8)
    for batch in data:
        del batch["labels"]
        batch["start_positions"] = torch.arange(8) % 7
        batch["end_positions"] = torch.tensor([6, 6, 6, 5, 4, 5, 6, 7])  # the last was cut off
    return model, data


def choices() -> tuple[Any, list[dict[str, Tensor]]]:
    model = build(hf.BertForMultipleChoice, lambda: hf.BertConfig(**TEXT))()
    data = [{**b, "input_ids": tokens(18, 7).view(6, 3, 7)} for b in batches(1, 6, 3)]
    data[0]["attention_mask"] = torch.ones(6, 3, 7, dtype=torch.int64)
    return model, data


def tagged() -> tuple[Any, list[dict[str, Tensor]]]:
    model = build(hf.BertForTokenClassification, lambda: hf.BertConfig(**TEXT, num_labels=4))()
    data = batches(2, 8)
    for batch in data:
        labels = torch.randint(4, (8, 7), generator=torch.Generator().manual_seed(3))
        batch["labels"] = labels.masked_fill(torch.arange(7) == 0, -100)
    return model, data


def pictures() -> tuple[Any, list[dict[str, Tensor]]]:
    model = build(hf.ViTForImageClassification, lambda: hf.ViTConfig(**IMAGE, num_labels=3))()
    images = torch.randn(9, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    return model, [{"pixel_values": images, "labels": torch.arange(9) % 3}]


@pytest.mark.filterwarnings("ignore:the temperature")  # these labels have nothing to do with the inputs
@pytest.mark.parametrize("make", [answers, choices, tagged, pictures])
def test_the_nll_of_temperature_one_is_the_models_own_loss(make: Any) -> None:
    model, data = make()
    with torch.no_grad():
        # Every label weighs the same; batches here have equal numbers, but for the answer that was cut off.
        losses = [float(model(**batch).loss) for batch in data]
    result = overt.calibrate(model, data)
    if make is answers:
        with torch.no_grad():
            outputs = [model(**batch) for batch in data]
        starts = sum(
            F.cross_entropy(o.start_logits, b["start_positions"], reduction="sum")
            for o, b in zip(outputs, data, strict=True)
        )
        ends = sum(
            F.cross_entropy(o.end_logits[:7], b["end_positions"][:7], reduction="sum")
            for o, b in zip(outputs, data, strict=True)
        )
        assert result.examples == 30
        assert result.nll_before == pytest.approx(float(starts + ends) / 30, abs=1e-6)
    else:
        assert result.nll_before == pytest.approx(sum(losses) / len(losses), abs=1e-6)
    assert result.nll_after <= result.nll_before
    assert overt.posterior(model, data[0], samples=2, dropout=True, calibrated=False) is not None


def test_a_loader_and_an_iterator_are_data_too() -> None:
    model, data = classifier(), batches(2, 10)
    rows = [{key: value[row] for key, value in batch.items()} for batch in data for row in range(10)]
    loader = torch.utils.data.DataLoader(rows, batch_size=6, collate_fn=hf.default_data_collator)

    def once() -> Iterator[dict[str, Tensor]]:
        yield from data

    temperatures = [overt.calibrate(model, given).temperature for given in (data, loader, once())]
    assert temperatures == pytest.approx([temperatures[0]] * 3, rel=1e-5)


def test_labels_that_any_temperature_suits_give_an_end_of_the_range_and_a_warning() -> None:
    model, data = classifier(), batches(1)
    data[0]["labels"] = logits_and_labels(model, data)[0].argmax(dim=-1)
    with pytest.warns(UserWarning, match=r"^the temperature, 0.05, is at an end of its range, 0.05 to 20: "):
        assert overt.calibrate(model, data).temperature == pytest.approx(LEAST)
    data[0]["labels"] = 1 - data[0]["labels"]
    with pytest.warns(UserWarning, match=r"^the temperature, 20, is at an end"):
        assert overt.calibrate(model, data).temperature == pytest.approx(MOST)


# Noise


@pytest.mark.parametrize(
    ("mechanism", "name", "values"),
    [(NOISY, "k", (0.5, 20.0)), (overt.Bayesian(family="lognormal", prior=None), "sigma", (2.0, 0.5))],
)
def test_noise_is_chosen_by_its_likelihood(
    mechanism: overt.Bayesian, name: str, values: tuple[float, ...]
) -> None:
    model, data = overt.attach(classifier(), overt.Evolving(), mechanism), batches(2)
    result = overt.calibrate(model, data, noise=values, samples=4)
    apart = {}
    for value in (getattr(mechanism, name), *values):
        settings = {"family": mechanism.family, "prior": None, name: value}
        other = overt.attach(classifier(), overt.Evolving(), overt.Bayesian(**settings))
        alone = overt.calibrate(other, data, samples=4)
        apart[value] = alone.nll_after
        if value == result.noise:
            expected = overt.posterior(other, data[0], samples=3).samples
            torch.testing.assert_close(overt.posterior(model, data[0], samples=3).samples, expected)
            assert model.overt_state.mechanisms == other.overt_state.mechanisms
            assert result.temperature == pytest.approx(alone.temperature, rel=1e-6)
    assert result.tried == pytest.approx(apart, abs=1e-7)
    assert result.noise == min(apart, key=lambda value: apart[value])
    assert result.nll_after == min(result.tried.values()) <= result.nll_before


def test_noise_is_tried_over_a_list_and_kept_in_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = overt.attach(classifier(), overt.Bayesian(k=7.0)), batches(1, 60)
    result = overt.calibrate(model, data, noise=True, samples=2)
    assert set(result.tried) == {7.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 1000.0}
    model.save_pretrained(tmp_path)
    again = overt.load(tmp_path)
    assert again.overt_state.mechanisms == (overt.Bayesian(k=result.noise),)
    overt.describe(again)
    told = capsys.readouterr().out
    assert f"temperature {result.temperature:.4g}, fitted with dropout off" in told
    assert f"weibull k={result.noise:g}" in told
    expected = overt.posterior(model, data[0], samples=2).samples
    torch.testing.assert_close(overt.posterior(again, data[0], samples=2).samples, expected)


def test_a_failure_leaves_noise_and_mode_as_they_were() -> None:
    model = overt.attach(classifier(), NOISY).train()
    modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="labels of batch 1 of data must lie in 0 to 1"):
        overt.calibrate(model, [*batches(1), {**batches(1)[0], "labels": torch.full((20,), 2)}], noise=(0.5,))
    assert model.overt_state.mechanisms == (NOISY,)
    assert {m.config.k for m in model.modules() if hasattr(m, "site") and hasattr(m, "config")} == {2.0}
    assert [module.training for module in model.modules()] == modes
    assert model.overt_state.temperature is None
    overt.calibrate(model, batches(1))
    assert [module.training for module in model.modules()] == modes


# Use


@pytest.mark.parametrize("dropout", [False, True])
def test_posterior_divides_the_logits_of_each_sample(dropout: bool) -> None:
    model, data = overt.attach(classifier(), NOISY), batches(1)
    before = overt.posterior(model, data[0], samples=3, dropout=dropout).samples
    temperature = overt.calibrate(model, data, samples=3, dropout=dropout).temperature
    after = overt.posterior(model, data[0], samples=3, dropout=dropout).samples
    torch.testing.assert_close(after, (before.log() / temperature).softmax(dim=-1))
    without = overt.posterior(model, data[0], samples=3, dropout=dropout, calibrated=False).samples
    assert torch.equal(without, before)


@pytest.mark.filterwarnings("ignore:the temperature")
def test_answers_have_the_temperature_too() -> None:
    model, data = answers()
    overt.attach(model, NOISY)
    before = overt.posterior(model, data[0], samples=3)
    temperature = overt.calibrate(model, data, samples=3).temperature
    after = overt.posterior(model, data[0], samples=3)
    for old, new in ((before.start, after.start), (before.end, after.end)):
        torch.testing.assert_close(new.samples, (old.samples.log() / temperature).softmax(dim=-1))


def test_a_temperature_of_other_samples_is_refused() -> None:
    model, data = overt.attach(classifier(), NOISY), batches(1)
    overt.calibrate(model, data, samples=2)
    with pytest.raises(ValueError, match=r"was fitted without dropout: call overt.calibrate\(.*dropout=True"):
        overt.posterior(model, data[0], dropout=True)
    overt.calibrate(model, data, samples=2, dropout=True)
    with pytest.raises(
        ValueError, match=r"was fitted with dropout on: call overt.calibrate\(.*dropout=False"
    ):
        overt.posterior(model, data[0])
    assert overt.posterior(model, data[0], samples=2, calibrated=False) is not None


@pytest.mark.parametrize("mechanism", [None, NOISY])
def test_traces_show_calibrated_predictions_and_keep_them_in_files(
    mechanism: overt.Bayesian | None, tmp_path: Path
) -> None:
    model, data = classifier(), batches(1)
    samples = 0
    if mechanism is not None:
        overt.attach(model, mechanism)
        samples = 3
    temperature = overt.calibrate(model, data).temperature
    inputs = {key: value[:2] for key, value in data[0].items()}
    traced = overt.trace(model, inputs, samples=samples)
    outputs = [traced.outputs] if not samples else [draw.outputs for draw in traced.draws]
    expected = torch.stack([(o.double() / temperature).softmax(dim=-1) for o in outputs]).mean(dim=0)
    traced.save(tmp_path / "trace.safetensors")
    for one in (traced, overt.Trace.load(tmp_path / "trace.safetensors")):
        for row, told in enumerate(one.predictions()):
            torch.testing.assert_close(told.mean, expected[row].sort(descending=True).values)
    overt.calibrate(model, data, dropout=True)
    assert overt.trace(model, inputs).temperature == 1.0, "traces are without dropout"


def test_what_was_attached_trained_or_detached_since_has_no_old_temperature() -> None:
    model, data = classifier(), batches(1)
    plain = overt.calibrate(model, data).temperature
    assert model.config.overt_temperature["value"] == plain
    overt.attach(model, NOISY)
    assert overt.trace(model, data[0]).temperature == 1.0
    noisy = overt.calibrate(model, data).temperature
    assert noisy != plain
    assert overt.trace(model, data[0]).temperature == noisy
    copied = copy.deepcopy(model)
    model.train()(**data[0]).loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    model.eval()
    assert overt.trace(model, data[0]).temperature == 1.0
    assert overt.trace(copied, data[0]).temperature == noisy
    overt.detach(copied)
    assert overt.trace(copied, data[0]).temperature == plain


# Files


def test_a_plain_models_config_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, data = classifier(), batches(1)
    temperature = overt.calibrate(model, data, samples=2, dropout=True).temperature
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    overt.describe(again)
    told = capsys.readouterr().out
    assert told.startswith("BertForSequenceClassification")
    assert f"nothing attached\n  temperature {temperature:.4g}, fitted with dropout on\n" in told
    expected = overt.posterior(model, data[0], samples=2, dropout=True).samples
    found = overt.posterior(again, data[0], samples=2, dropout=True).samples
    torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="nothing is attached"):
        overt.describe(classifier())


@pytest.mark.parametrize("noisy", [False, True])
def test_another_head_has_no_temperature(noisy: bool, tmp_path: Path) -> None:
    model, data = classifier(), batches(1)
    if noisy:
        overt.attach(model, NOISY)
    overt.calibrate(model, data)
    model.save_pretrained(tmp_path)
    read: Any = overt.load if noisy else hf.AutoModelForSequenceClassification.from_pretrained
    options = {} if noisy else {"ignore_mismatched_sizes": True}
    assert overt.trace(read(tmp_path), data[0]).temperature != 1.0
    other = read(tmp_path, num_labels=5, **options)
    assert overt.trace(other, data[0]).temperature == 1.0


def test_an_adapter_keeps_it(tmp_path: Path) -> None:
    config = peft.LoraConfig(target_modules=["query"], r=2, task_type="SEQ_CLS")
    model = peft.get_peft_model(classifier(), config)
    with pytest.raises(
        ValueError, match="without an adapter, or one with mechanisms attached: PEFT saves no"
    ):
        overt.calibrate(model, batches(1))
    overt.attach(model, NOISY)
    result = overt.calibrate(model, batches(1))
    model.save_pretrained(tmp_path)
    again = overt.load(tmp_path, base=classifier())
    expected = overt.posterior(model, batches(1)[0], samples=2).samples
    torch.testing.assert_close(overt.posterior(again, batches(1)[0], samples=2).samples, expected)
    assert overt.trace(again, batches(1)[0]).temperature == result.temperature


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (2.0, "the temperature in .*config.json must have value, dropout, architecture, labels, got 2.0"),
        ({"value": 0.0}, "the temperature's value in .*config.json must be positive and finite, got 0.0"),
        ({"value": "hot"}, "the temperature's value in .*config.json must be a number, got 'hot'"),
        ({"dropout": "no"}, "the temperature's dropout in .*config.json must be a boolean, got 'no'"),
    ],
)
def test_a_broken_entry_is_named(entry: Any, message: str, tmp_path: Path) -> None:
    model = overt.attach(classifier(), NOISY)
    overt.calibrate(model, batches(1), samples=2)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    kept = config["overt"]["temperature"]
    config["overt"]["temperature"] = {**kept, **entry} if isinstance(entry, dict) else entry
    path.write_text(json.dumps(config))
    with pytest.raises((TypeError, ValueError), match=f"^{message}$"):
        overt.load(tmp_path)


# Refusals

WITHOUT = {"input_ids": tokens(4), "attention_mask": torch.ones(4, 9)}


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ([], ValueError, "data must hold at least one label, got no batch"),
        ([WITHOUT], ValueError, "batch 0 of data has no labels, or they are no tensor; it has input_ids, a"),
        ({**WITHOUT, "labels": torch.ones(4)}, TypeError, r"data must give batches.*got a dict \(put one "),
        ([["text"]], TypeError, "batch 0 of data must be a mapping, got a list"),
        (3, TypeError, "data must give batches, mappings with labels; got a int"),
        (
            [{**WITHOUT, "labels": torch.tensor([0, 1, 2, 0])}],
            ValueError,
            "labels of .* in 0 to 1, or be -100, g",
        ),
        ([{**WITHOUT, "labels": torch.tensor([0, 1, -1, 0])}], ValueError, "labels of batch 0 .*, got -1"),
        ([{**WITHOUT, "labels": torch.zeros(4)}], ValueError, "labels of batch 0 .* integer .*torch.float32"),
        ([{**WITHOUT, "labels": torch.zeros(3).long()}], ValueError, r"labels .* shape \(4,\), got \(3,\)"),
        ([{**WITHOUT, "labels": torch.full((4,), -100)}], ValueError, "data must hold .* label, got none"),
    ],
)
def test_bad_data_is_named(data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        overt.calibrate(classifier(), data)


def test_logits_that_are_no_numbers_are_named() -> None:
    model = classifier()
    with torch.no_grad():
        model.classifier.bias[0] = math.nan
    with pytest.raises(ValueError, match=r"^the logits of batch 0 of data hold NaN or infinity$"):
        overt.calibrate(model, batches(1))


def test_an_answer_under_the_mask_is_named() -> None:
    model, data = answers()
    data[1]["attention_mask"][:, 5:] = 0
    with pytest.raises(ValueError, match=r"^start_positions and end_positions of batch 1 .* the mask hides$"):
        overt.calibrate(model, data)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (llama_like("Llama"), "calibrate needs a classifier, got LlamaForCausalLM, a language model"),
        (lambda: classifier(num_labels=1), "calibrate needs a classifier with one .* a regression"),
        (
            lambda: classifier(problem_type="multi_label_classification"),
            "calibrate needs a classifier with one .* several labels at once",
        ),
        (
            build(hf.BertModel, lambda: hf.BertConfig(**TEXT)),
            "calibrate needs a classifier with one .*, got BertModel with a regression, or no classes",
        ),
        (lambda: overt.vision.resnet("aa-resnet-34"), "calibrate needs a Hugging Face model, got a ResNet"),
        (lambda: "bert-base-uncased", "calibrate needs a Hugging Face model, got a str"),
        (
            lambda: torch.nn.Linear(2, 2),
            "model must be a Hugging Face PreTrainedModel, or one",
        ),
    ],
)
def test_models_that_have_no_temperature_are_named(make: Any, message: str) -> None:
    data = [{**WITHOUT, "labels": torch.zeros(4).long()}]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        overt.calibrate(make(), data)


@pytest.mark.parametrize(
    ("mechanisms", "noise", "message"),
    [
        (
            (),
            True,
            r"noise needs one mechanism .* and nothing is attached: call overt.attach\(model, overt.Bay",
        ),
        ((overt.Evolving(),), True, "noise needs one mechanism .* and Evolving is attached"),
        ((NOISY,), (), r"noise must be True, False or values of k such as \(1.0, 10.0\), got \(\)"),
        ((NOISY,), 3.0, "noise must be True, False or values of k .*, got 3.0"),
        ((NOISY,), (1.0, -1.0), r"noise \(k\) must be positive and finite, got -1.0"),
    ],
)
def test_bad_noise_is_named(mechanisms: tuple[Any, ...], noise: Any, message: str) -> None:
    model = classifier()
    if mechanisms:
        overt.attach(model, *mechanisms)
    with pytest.raises(ValueError, match=f"^{message}"):
        overt.calibrate(model, batches(1), noise)
