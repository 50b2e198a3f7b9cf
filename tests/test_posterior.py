"""Predictive samples of attached models."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import transformers as hf

import overt
from attached import attached
from families import FAMILIES, PAIR, TEXT, inputs_of, lengths_mask, tokens
from overt.judge import uncertainty
from overt.mechanisms.bayesian.layer import BayesianLayer

pytestmark = pytest.mark.slow
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
        with torch.no_grad(), model.overt_state.drawing(torch.tensor(number), torch.tensor(0), seed=0):
            expected = torch.softmax(model(**inputs).logits, dim=-1)
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
    assert model.overt_state.here.drawn is None
    assert model.overt_state.seed == 0
    model.eval()


def test_a_model_in_evaluation_mode_is_not_written_to(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    plain = torch.nn.Module.__setattr__

    def noted(self: Any, name: str, value: Any) -> None:
        written.append(name)
        plain(self, name, value)

    model.eval()
    monkeypatch.setattr(torch.nn.Module, "__setattr__", noted)
    overt.posterior(model, inputs_of(BERT), samples=2)
    assert written == []
    overt.posterior(model, inputs_of(BERT), samples=2, dropout=True)
    assert set(written) == {"training"}


def test_dropout_adds_spread_and_comes_back_with_its_seed() -> None:
    model = attached(BERT, overt.Bayesian(k=1e6, prior=None))
    inputs = inputs_of(BERT)
    still = overt.posterior(model, inputs, samples=4)
    assert float(still.spread.max()) < 1e-3
    moved = overt.posterior(model, inputs, samples=4, dropout=True)
    assert float(moved.spread.mean()) > 1e-3
    assert torch.equal(moved.samples, overt.posterior(model, inputs, samples=4, dropout=True).samples)


def test_no_kl_is_computed_with_dropout_either(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = attached(BERT, overt.Bayesian(k=0.5)), inputs_of(BERT)

    def refused(*_: Any) -> Any:
        raise AssertionError("a KL is computed")

    monkeypatch.setattr(BayesianLayer, "_kl", refused)
    overt.posterior(model, inputs, samples=2, dropout=True)
    with pytest.raises(AssertionError, match="a KL is computed"):
        model.train()(**inputs)


def test_a_plain_model_is_sampled_by_its_dropout() -> None:
    plain, inputs = BERT.make(), inputs_of(BERT, padded=True)
    plain.train()
    plain.classifier.eval()
    modes = [module.training for module in plain.modules()]
    generator = torch.random.get_rng_state()
    drawn = overt.posterior(plain, inputs, samples=4, dropout=True)
    assert torch.equal(drawn.samples, overt.posterior(plain, inputs, samples=4, dropout=True).samples)
    assert not torch.equal(drawn.samples, overt.posterior(plain, inputs, 4, dropout=True, seed=1).samples)
    assert [module.training for module in plain.modules()] == modes
    assert torch.equal(generator, torch.random.get_rng_state())
    assert float(drawn.spread.mean()) > 1e-3
    # All samples run at once here, so that the masks are those of one pass of copies in training mode.
    torch.manual_seed(0)
    copies = {key: value.repeat(3, 1) for key, value in inputs.items()}
    first = torch.softmax(plain.train()(**inputs).logits, dim=-1)
    rest = torch.softmax(plain(**copies).logits, dim=-1).view(3, 3, 2)
    torch.testing.assert_close(drawn.samples, torch.cat([first.unsqueeze(0), rest]))


def test_a_plain_model_needs_dropout_and_no_vocabulary() -> None:
    with pytest.raises(ValueError, match=r"^nothing is attached to this BertForSequenceClassification"):
        overt.posterior(BERT.make(), inputs_of(BERT))
    llama = BY_NAME["Llama"]
    with pytest.raises(ValueError, match=r"needs one with mechanisms attached, got a plain LlamaForCausalLM"):
        overt.posterior(llama.make(), inputs_of(llama), dropout=True)


def test_labels_of_a_classifier_are_left_out(model: Any) -> None:
    inputs = inputs_of(BERT)
    drawn = overt.posterior(model, {**inputs, "labels": torch.tensor([0, 1, 1])}, samples=3)
    assert torch.equal(drawn.samples, overt.posterior(model, inputs, samples=3).samples)


def test_an_image_model_is_sampled_too() -> None:
    family = BY_NAME["ViT"]
    drawn = overt.posterior(attached(family, overt.Bayesian(k=1.0)), inputs_of(family), samples=3)
    assert float(drawn.spread.max()) > 0.0


def test_a_model_without_a_head_gives_its_states() -> None:
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**TEXT))
    overt.attach(model, overt.Bayesian(k=1.0))
    drawn = overt.posterior(model, inputs_of(BERT), samples=3)
    assert drawn.samples.shape == (3, 3, 9, 32)
    assert drawn.entropy is None


def test_logits_that_are_no_classes_are_no_probabilities() -> None:
    torch.manual_seed(0)
    model = hf.ElectraForPreTraining(hf.ElectraConfig(**TEXT, embedding_size=16))
    overt.attach(model, overt.Bayesian(k=1.0))
    drawn = overt.posterior(model, inputs_of(BERT), samples=3)  # one logit per token
    assert drawn.entropy is None
    with torch.no_grad():
        plain = model.eval()(**inputs_of(BERT)).logits
    assert drawn.mean.shape == plain.shape


# Question answering.


def answering() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = overt.attach(hf.BertForQuestionAnswering(hf.BertConfig(**TEXT)).eval(), overt.Bayesian(k=0.5))
    return model, inputs_of(BERT, padded=True)


def test_answers_have_a_start_and_an_end_among_the_real_tokens() -> None:
    model, inputs = answering()
    drawn = overt.posterior(model, {**inputs, "start_positions": torch.zeros(3)}, samples=4)
    assert isinstance(drawn, overt.SpanPosterior)
    for name, told in (("start_logits", drawn.start), ("end_logits", drawn.end)):
        assert told.samples.shape == (4, 3, 9)
        for number in range(4):
            with torch.no_grad(), model.overt_state.drawing(torch.tensor(number), torch.tensor(0), seed=0):
                logits = model(**inputs)[name].numpy()
            for example, length in enumerate((9, 6, 4)):
                found = told.samples[number, example].numpy()
                real = scipy.special.softmax(logits[example, :length])
                np.testing.assert_allclose(found[:length], real, atol=1e-6)
                assert not found[length:].any()
        judged = told.samples.double().numpy()
        total = scipy.stats.entropy(judged.mean(axis=0), axis=-1)
        expected = scipy.stats.entropy(judged, axis=-1).mean(axis=0)
        np.testing.assert_allclose(told.entropy, total, atol=1e-5)
        np.testing.assert_allclose(told.mutual_information, total - expected, atol=1e-5)
        assert float(told.spread[:, 0].min()) > 0.0


def test_answers_do_not_depend_on_what_runs_at_once() -> None:
    model, inputs = answering()
    together = overt.posterior(model, inputs, samples=5)
    apart = overt.posterior(model, inputs, samples=5, rows=2)
    torch.testing.assert_close(apart.start.samples, together.start.samples, atol=1e-6, rtol=1e-5)
    one = {key: value[1:2, :6] for key, value in inputs.items()}
    alone = overt.posterior(model, one, samples=5, first=1)
    torch.testing.assert_close(alone.end.samples, together.end.samples[:, 1:2, :6], atol=1e-6, rtol=1e-5)


def test_answers_of_an_encoder_decoder() -> None:
    torch.manual_seed(0)
    model = overt.attach(
        hf.BartForQuestionAnswering(hf.BartConfig(**PAIR)).eval(), overt.Bayesian(k=1e6, prior=None)
    )
    inputs = inputs_of(BERT)
    drawn = overt.posterior(model, inputs, samples=2)
    with torch.no_grad():
        expected = torch.softmax(model(**inputs).end_logits, dim=-1)
    torch.testing.assert_close(drawn.end.mean, expected, atol=1e-4, rtol=1e-3)


# Multiple choice.


def choosing() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = overt.attach(hf.BertForMultipleChoice(hf.BertConfig(**TEXT)).eval(), overt.Bayesian(k=0.5))
    mask = lengths_mask([9, 6, 4, 9, 5, 7, 8, 8, 3], 9).view(3, 3, 9)
    return model, {"input_ids": tokens(batch=9).view(3, 3, 9), "attention_mask": mask}


def test_choices_are_the_classes_and_each_has_draws_of_its_own() -> None:
    model, inputs = choosing()
    drawn = overt.posterior(model, inputs, samples=4)
    assert drawn.samples.shape == (4, 3, 3)
    assert drawn.entropy is not None
    for number in range(4):
        # rows of all choices, numbered from 0
        with torch.no_grad(), model.overt_state.drawing(torch.tensor(number), torch.tensor(0), seed=0):
            logits = model(**inputs).logits.numpy()
        np.testing.assert_allclose(drawn.samples[number], scipy.special.softmax(logits, axis=1), atol=1e-6)
    alike = {key: value[:1, :1].expand(1, 3, -1) for key, value in inputs.items()}
    assert float(overt.posterior(model, alike, samples=4).spread.min()) > 1e-4


def test_questions_keep_their_draws_in_another_batch() -> None:
    model, inputs = choosing()
    together = overt.posterior(model, inputs, samples=4).samples
    for rows in (1, 2, 5):
        again = overt.posterior(model, inputs, samples=4, rows=rows).samples
        torch.testing.assert_close(again, together, atol=1e-6, rtol=1e-5)
    one = {key: value[1:2] for key, value in inputs.items()}
    alone = overt.posterior(model, one, samples=4, first=1).samples
    torch.testing.assert_close(alone, together[:, 1:2], atol=1e-6, rtol=1e-5)


# Wrapped and copied models.


def test_a_wrapper_that_runs_replicas_is_taken_off(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.DataParallel, "forward", None)  # it would draw in other threads
    inputs = inputs_of(BERT)
    drawn = overt.posterior(torch.nn.DataParallel(model), inputs, samples=2)
    assert torch.equal(drawn.samples, overt.posterior(model, inputs, samples=2).samples)


def test_a_model_around_which_there_are_adapters_is_sampled() -> None:
    peft = pytest.importorskip("peft")
    model = attached(BERT, overt.Bayesian(k=0.5, prior=None))
    inputs = inputs_of(BERT)
    expected = overt.posterior(model, inputs, samples=3)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], modules_to_save=["overt"]))
    drawn = overt.posterior(wrapped, inputs, samples=3)
    torch.testing.assert_close(drawn.samples, expected.samples, atol=1e-6, rtol=1e-5)


def test_checkpointed_layers_draw_the_same_with_dropout() -> None:
    model = attached(BERT, overt.Bayesian(k=0.5, prior=None))
    plain = overt.posterior(model, inputs_of(BERT), samples=3, dropout=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = overt.posterior(model, inputs_of(BERT), samples=3, dropout=True)
    torch.testing.assert_close(again.samples, plain.samples, atol=1e-6, rtol=1e-5)


def test_copies_have_a_lock_of_their_own(model: Any) -> None:
    inputs = inputs_of(BERT)
    expected = overt.posterior(model, inputs, samples=3, dropout=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with model.overt_state.turns.alone():
        for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert copied.overt_state.turns is not model.overt_state.turns
            drawn = overt.posterior(copied, inputs, samples=3, dropout=True)
            assert torch.equal(drawn.samples, expected.samples)


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
