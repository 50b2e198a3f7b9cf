"""Predictive samples of attached models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import overt
from families import FAMILIES, inputs_of
from overt.judge import uncertainty
from test_attach import attached

BY_NAME = {family.name: family for family in FAMILIES}
BERT = BY_NAME["BERT"]


@pytest.fixture(scope="module")
def model() -> Any:
    return attached(BERT, overt.Bayesian(k=0.5, prior=None))


def test_the_numbers_are_those_of_the_judge(model: Any) -> None:
    drawn = overt.posterior(model, inputs_of(BERT, padded=True), samples=7)
    assert drawn.samples.shape == (7, 3, 2)
    judged = uncertainty.predictive(drawn.samples)
    for name in ("mean", "spread", "entropy", "expected_entropy", "mutual_information"):
        np.testing.assert_allclose(getattr(drawn, name).numpy(), getattr(judged, name), atol=1e-5)
    assert float(drawn.spread.min()) > 0.0


def test_samples_are_forward_passes_with_that_sample(model: Any) -> None:
    inputs = inputs_of(BERT, padded=True)
    drawn = overt.posterior(model, inputs, samples=4)
    for number in range(4):
        model.overt_state.override = {"sample": number, "examples": torch.arange(3)}
        with torch.no_grad():
            expected = torch.softmax(model(**inputs).logits, dim=-1)
        model.overt_state.override = None
        torch.testing.assert_close(drawn.samples[number], expected, atol=1e-6, rtol=1e-5)


def test_the_same_seed_gives_the_same_samples_whatever_runs_at_once(model: Any) -> None:
    inputs = inputs_of(BERT, padded=True)
    all_at_once = overt.posterior(model, inputs, samples=6)
    for rows in (1, 4, 7):
        again = overt.posterior(model, inputs, samples=6, rows=rows)
        torch.testing.assert_close(again.samples, all_at_once.samples, atol=1e-6, rtol=1e-5)
    other = overt.posterior(model, inputs, samples=6, seed=1)
    assert not torch.allclose(other.samples, all_at_once.samples)


def test_examples_keep_their_draws_in_another_batch(model: Any) -> None:
    inputs = inputs_of(BERT, padded=True)
    together = overt.posterior(model, inputs, samples=5).samples
    for row in range(3):
        length = int(inputs["attention_mask"][row].sum())
        alone = {key: value[row : row + 1, :length] for key, value in inputs.items()}
        apart = overt.posterior(model, alone, samples=5, first=row).samples
        torch.testing.assert_close(apart[:, 0], together[:, row], atol=1e-6, rtol=1e-5)


def test_more_samples_go_on_where_fewer_stopped(model: Any) -> None:
    inputs = inputs_of(BERT)
    few, many = (overt.posterior(model, inputs, samples=n).samples for n in (3, 6))
    torch.testing.assert_close(many[:3], few, atol=1e-6, rtol=1e-5)


def test_nothing_of_the_model_changes(model: Any) -> None:
    inputs = inputs_of(BERT)
    model.train()
    model.bert.eval()
    modes = [module.training for module in model.modules()]
    generator = torch.random.get_rng_state()
    overt.posterior(model, inputs, samples=2)
    overt.posterior(model, inputs, samples=2, dropout=True)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(generator, torch.random.get_rng_state())
    assert int(model.overt_state.seen) == 0
    assert model.overt_state.override is None
    assert model.overt_state.seed == 0
    model.eval()


def test_dropout_adds_spread_and_comes_back_with_its_seed() -> None:
    model = attached(BERT, overt.Bayesian(k=1e6, prior=None))
    inputs = inputs_of(BERT)
    still = overt.posterior(model, inputs, samples=4)
    assert float(still.spread.max()) < 1e-3
    moved = overt.posterior(model, inputs, samples=4, dropout=True)
    assert float(moved.spread.mean()) > 1e-3
    assert torch.equal(moved.samples, overt.posterior(model, inputs, samples=4, dropout=True).samples)


def test_labels_are_left_out_and_language_models_have_a_distribution_per_token() -> None:
    family = BY_NAME["Llama"]
    model = attached(family, overt.Bayesian(k=1.0))
    inputs = inputs_of(family)
    drawn = overt.posterior(model, {**inputs, "labels": inputs["input_ids"]}, samples=3)
    assert drawn.samples.shape == (3, 3, 9, 60)
    assert drawn.entropy is not None
    assert drawn.entropy.shape == (3, 9)
    torch.testing.assert_close(drawn.mean.sum(-1), torch.ones(3, 9))


def test_an_encoder_decoder_and_an_image_model_are_sampled_too() -> None:
    for name in ("T5", "ViT"):
        family = BY_NAME[name]
        drawn = overt.posterior(attached(family, overt.Bayesian(k=1.0)), inputs_of(family), samples=3)
        assert float(drawn.spread.max()) > 0.0


def test_a_model_without_a_head_gives_its_states() -> None:
    import transformers

    from families import TEXT

    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**TEXT))
    overt.attach(model, overt.Bayesian(k=1.0))
    drawn = overt.posterior(model, inputs_of(BERT), samples=3)
    assert drawn.samples.shape == (3, 3, 9, 32)
    assert drawn.entropy is None


def test_logits_that_are_no_classes_are_no_probabilities() -> None:
    import transformers

    from families import TEXT

    torch.manual_seed(0)
    model = transformers.ElectraForPreTraining(transformers.ElectraConfig(**TEXT, embedding_size=16))
    overt.attach(model, overt.Bayesian(k=1.0))
    drawn = overt.posterior(model, inputs_of(BERT), samples=3)  # one logit per token
    assert drawn.entropy is None
    with torch.no_grad():
        plain = model.eval()(**inputs_of(BERT)).logits
    assert drawn.mean.shape == plain.shape


def test_labels_of_an_encoder_decoder_become_its_decoders_inputs() -> None:
    family = BY_NAME["BART"]
    model = attached(family, overt.Bayesian(k=1e6))
    inputs = inputs_of(family)
    batch = {"input_ids": inputs["input_ids"], "labels": inputs["decoder_input_ids"]}
    drawn = overt.posterior(model, batch, samples=2)
    with torch.no_grad():
        expected = torch.softmax(model(**batch).logits, dim=-1)
    torch.testing.assert_close(drawn.mean, expected, atol=1e-4, rtol=1e-3)


def test_wrong_calls_are_named(model: Any) -> None:
    inputs = inputs_of(BERT)
    with pytest.raises(ValueError, match="posterior needs random weights: attach Bayesian"):
        overt.posterior(attached(BERT, overt.Evolving()), inputs)
    with pytest.raises(ValueError, match="samples must be a whole number of at least 1, got 0"):
        overt.posterior(model, inputs, samples=0)
    with pytest.raises(ValueError, match=r"one batch size, got sizes \[2, 3\]"):
        overt.posterior(model, {**inputs, "attention_mask": torch.ones(2, 9)})
    with pytest.raises(TypeError, match=r"batch\['input_ids'\] must be a tensor, got list"):
        overt.posterior(model, {"input_ids": [[1, 2]]})
    with pytest.raises(ValueError, match="nothing is attached"):
        overt.posterior(BERT.make(), inputs)
