"""Posterior samples of language models: what they say of each token, without one vocabulary per sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import transformers as hf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import overt
from attached import attached
from families import BOS, FAMILIES, PAIR, TEXT, WORDS, Family, build, inputs_of, tokens

pytestmark = pytest.mark.slow
BY_NAME = {family.name: family for family in FAMILIES}
MASKED = Family("masked", build(hf.BertForMaskedLM, lambda: hf.BertConfig(**TEXT)), {})
HALF = Family("half", build(hf.BartForCausalLM, lambda: hf.BartConfig(**PAIR)), {})
FIELDS = ("log_probability", "spread", "entropy", "expected_entropy", "mutual_information")


def family_of(name: str) -> Family:
    return {"masked": MASKED, "half": HALF}.get(name) or BY_NAME[name]


def labelled(family: Family, **settings: Any) -> dict[str, Tensor]:
    """A batch with labels at some of its tokens."""
    inputs = inputs_of(family, **settings)
    ids, mask = (
        (inputs["decoder_input_ids"], inputs["decoder_attention_mask"])
        if family.inputs == "pair"
        else (inputs["input_ids"], inputs["attention_mask"])
    )
    return {**inputs, "labels": ids.masked_fill((mask == 0) | (torch.arange(ids.shape[1]) % 4 == 2), -100)}


def naive(model: Any, inputs: dict[str, Tensor], labels: Tensor, samples: int, shift: int) -> dict[str, Any]:
    """The same by scipy, from distributions of all samples at once; label t is predicted at t + shift."""
    logits = []
    for number in range(samples):
        with torch.no_grad(), model.overt_state.drawing(torch.tensor(number), torch.tensor(0), seed=0):
            logits.append(model(**inputs).logits.double().numpy())
    logs = scipy.special.log_softmax(np.stack(logits), axis=-1)
    batch, length = labels.shape
    told: dict[str, Any] = {name: np.full((batch, length), np.nan) for name in FIELDS}
    for example in range(batch):
        for t in range(length):
            if labels[example, t] == -100 or t + shift < 0:
                continue
            here = logs[:, example, t + shift]
            scores, distributions = here[:, int(labels[example, t])], np.exp(here)
            total = scipy.stats.entropy(distributions.mean(axis=0))
            expected = scipy.stats.entropy(distributions, axis=-1).mean()
            values = (scores.mean(), scores.std(), total, expected, total - expected)
            for name, value in zip(FIELDS, values, strict=True):
                told[name][example, t] = value
    return told


def assert_told(drawn: Any, expected: dict[str, Any], atol: float = 2e-5) -> None:
    assert isinstance(drawn, overt.TokenPosterior)
    for name in FIELDS:
        np.testing.assert_allclose(getattr(drawn, name).numpy(), expected[name], atol=atol, err_msg=name)
        assert np.array_equal(drawn.mask.numpy(), ~np.isnan(expected[name]))


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "OPT", "masked", "T5", "BART", "half"])
def test_tokens_are_told_of_as_by_all_distributions_at_once(name: str) -> None:
    family = family_of(name)
    model = attached(family, overt.Bayesian(k=0.5))
    batch = labelled(family, padded=True)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    drawn = overt.posterior(model, batch, samples=4)
    shift = -1 if name in ("GPT-2", "Llama", "OPT") else 0
    assert_told(drawn, naive(model, inputs, batch["labels"], 4, shift))
    assert drawn.samples.shape == (4, *batch["labels"].shape)
    assert float(drawn.spread[drawn.mask].max()) > 0.01


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "masked", "T5", "BART", "half"])
def test_labels_are_counted_as_the_models_own_loss_does(name: str) -> None:
    family = family_of(name)
    model = attached(family, overt.Bayesian(k=1e6, prior=None))
    batch = labelled(family, padded=True)
    drawn = overt.posterior(model, batch, samples=2)
    with torch.no_grad():
        loss = model(**batch).loss
    torch.testing.assert_close(-drawn.log_probability[drawn.mask].mean(), loss, atol=1e-4, rtol=1e-4)


def test_both_mechanisms_are_sampled() -> None:
    family = BY_NAME["Llama"]
    model = attached(family, overt.Evolving(alpha=0.2, beta=0.2), overt.Bayesian(k=0.5))
    batch = labelled(family, padded=True)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    assert_told(overt.posterior(model, batch, samples=3), naive(model, inputs, batch["labels"], 3, -1))


@pytest.mark.parametrize("left", [False, True])
def test_a_causal_model_without_labels_is_asked_about_its_input(left: bool) -> None:
    family = BY_NAME["Llama"]
    model = attached(family, overt.Bayesian(k=0.5))
    inputs = inputs_of(family, padded=True, left=left)
    drawn = overt.posterior(model, inputs, samples=3)
    mask = inputs["attention_mask"].bool()
    expected = mask & torch.cat([torch.zeros(3, 1, dtype=torch.bool), mask[:, :-1]], dim=1)
    assert torch.equal(drawn.mask, expected)  # neither padding nor what follows on it
    labels = inputs["input_ids"].masked_fill(~expected, -100)
    assert_told(drawn, naive(model, inputs, labels, 3, -1))
    again = overt.posterior(model, {**inputs, "labels": inputs["input_ids"]}, samples=3)
    assert torch.equal(again.samples.nan_to_num(1.0), drawn.samples.nan_to_num(1.0))


def test_without_labels_entropies_are_told_of_all_but_padding() -> None:
    model, inputs = attached(MASKED, overt.Bayesian(k=0.5)), inputs_of(MASKED, padded=True)
    drawn = overt.posterior(model, inputs, samples=3)
    assert torch.equal(drawn.mask, inputs["attention_mask"].bool())
    assert drawn.log_probability.isnan().all()
    assert float(drawn.mutual_information[drawn.mask].min()) > 0.0
    labels = inputs["input_ids"].masked_fill(~drawn.mask, -100)
    expected = naive(model, inputs, labels, 3, 0)
    np.testing.assert_allclose(drawn.entropy, expected["entropy"], atol=2e-5)


def test_frames_of_speech_have_entropies_and_no_labels() -> None:
    torch.manual_seed(0)
    small = {"conv_dim": (16, 16), "conv_kernel": (8, 4), "conv_stride": (4, 4), "num_feat_extract_layers": 2}
    config = hf.Wav2Vec2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **small
    )
    model = overt.attach(hf.Wav2Vec2ForCTC(config).eval(), overt.Bayesian(k=0.5))
    batch = {"input_values": torch.randn(2, 400), "labels": torch.randint(5, 30, (2, 4))}
    drawn = overt.posterior(model, batch, samples=2)
    assert drawn.entropy.shape == drawn.mask.shape
    assert drawn.mask.all()
    assert drawn.log_probability.isnan().all()


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_tokens_do_not_depend_on_what_runs_at_once(name: str) -> None:
    family = BY_NAME[name]
    model, batch = attached(family, overt.Bayesian(k=0.5)), labelled(family, padded=True)
    together = overt.posterior(model, batch, samples=3)
    for rows in (1, 2):
        again = overt.posterior(model, batch, samples=3, rows=rows)
        for field in (*FIELDS, "samples"):
            found, expected = getattr(again, field), getattr(together, field)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4, equal_nan=True)
    one = {key: value[1:2] for key, value in batch.items()}
    alone = overt.posterior(model, one, samples=3, first=1)
    torch.testing.assert_close(alone.samples, together.samples[:, 1:2], atol=2e-5, rtol=1e-4, equal_nan=True)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor with an axis of this size holds."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.found = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for one in output if isinstance(output, tuple | list) else [output]:
            if isinstance(one, Tensor) and self.size in one.shape:
                self.found = max(self.found, one.numel())
        return output


@pytest.mark.parametrize("generate", [None, 4])
def test_no_tensor_has_both_a_sample_and_a_vocabulary_axis(generate: int | None) -> None:
    family = BY_NAME["Llama"]
    model = attached(family, overt.Bayesian(k=0.5))
    inputs = {"input_ids": tokens(batch=6, length=9)}
    assert WORDS not in (6, 9, 7)
    with Largest(WORDS) as seen:
        overt.posterior(model, inputs, samples=7, generate=generate)
    assert seen.found == 6 * (9 if generate is None else 9 + 4 - 1) * WORDS  # the logits of one sample


def test_labels_that_do_not_fit_are_refused() -> None:
    family = BY_NAME["T5"]
    model, inputs = attached(family, overt.Bayesian(k=0.5)), inputs_of(family)
    with pytest.raises(ValueError, match=r"the logits' \(3, 6\) tokens, got shape \(3, 4\)"):
        overt.posterior(model, {**inputs, "labels": inputs["decoder_input_ids"][:, :4]}, samples=2)


# A text of the model's own.


def prompts(family: Family) -> dict[str, Tensor]:
    inputs = inputs_of(family, padded=True, left=family.inputs != "pair")
    return {key: value for key, value in inputs.items() if not key.startswith("decoder")}


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "OPT", "Mistral", "T5", "BART"])
def test_what_is_generated_is_scored_at_the_places_it_was_written(name: str) -> None:
    family = BY_NAME[name]
    model = attached(family, overt.Bayesian(k=1e6, prior=None))
    given, limits = prompts(family), {"max_new_tokens": 5, "do_sample": False}
    written = model.generate(**given, **limits, output_logits=True, return_dict_in_generate=True)
    drawn = overt.posterior(model, given, samples=2, generate=5)
    assert torch.equal(drawn.sequences, written.sequences)
    logs = torch.stack(written.logits, dim=1).log_softmax(dim=-1)
    new = written.sequences[:, -logs.shape[1] :]
    expected = logs.gather(2, new.unsqueeze(2)).squeeze(2)
    assert drawn.log_probability.shape == expected.shape
    torch.testing.assert_close(drawn.log_probability[drawn.mask], expected[drawn.mask], atol=1e-3, rtol=1e-3)
    entropy = torch.special.entr(logs.exp()).sum(dim=-1)
    torch.testing.assert_close(drawn.entropy[drawn.mask], entropy[drawn.mask], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("evolving", [False, True])
@pytest.mark.parametrize("name", ["GPT-2", "BART"])
def test_each_sample_scores_the_same_text(name: str, evolving: bool) -> None:
    family = BY_NAME[name]
    mechanisms = [overt.Evolving(alpha=0.2, beta=0.2)] if evolving else []
    model = attached(family, *mechanisms, overt.Bayesian(k=0.5))
    given = prompts(family)
    drawn = overt.posterior(model, given, samples=3, generate=4)
    assert torch.equal(drawn.sequences, model.generate(**given, max_new_tokens=4, do_sample=False))
    new = drawn.mask.shape[1]
    if family.inputs == "pair":
        inputs = {**given, "decoder_input_ids": drawn.sequences}
    else:
        mask = torch.cat([given["attention_mask"], torch.ones(3, new, dtype=torch.long)], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        inputs = {"input_ids": drawn.sequences, "attention_mask": mask, "position_ids": positions}
    labels = drawn.sequences.clone()
    labels[:, :-new] = -100
    labels[:, -new:].masked_fill_(~drawn.mask, -100)
    told = naive(model, inputs, labels, 3, -1)
    assert_told(drawn, {field: values[:, -new:] for field, values in told.items()})


def test_what_follows_the_end_of_a_text_is_left_out() -> None:
    family = BY_NAME["Llama"]
    model = attached(family, overt.Bayesian(k=0.5))
    given = prompts(family)
    new = model.generate(**given, max_new_tokens=6, do_sample=False)[:, 9:]
    model.generation_config.eos_token_id = [int(new[0, 2]), WORDS - 1]
    drawn = overt.posterior(model, given, samples=2, generate=6)
    written = drawn.sequences[:, 9:].tolist()
    for row, mask in zip(written, drawn.mask.tolist(), strict=True):
        ends = [t for t, token in enumerate(row) if token in model.generation_config.eos_token_id]
        last = ends[0] if ends else len(row) - 1
        assert mask == [t <= last for t in range(len(row))]
    assert not drawn.mask.all()
    assert torch.equal(drawn.log_probability.isnan(), ~drawn.mask)


def test_a_decoder_goes_on_from_the_tokens_it_is_given() -> None:
    family = BY_NAME["BART"]
    model = attached(family, overt.Bayesian(k=1e6, prior=None))
    given = {**prompts(family), "decoder_input_ids": torch.tensor([[BOS, 7, 8]] * 3)}
    drawn = overt.posterior(model, given, samples=2, generate=4)
    assert torch.equal(drawn.sequences[:, :3], given["decoder_input_ids"])
    assert drawn.mask.shape[1] == drawn.sequences.shape[1] - 3
    assert torch.equal(drawn.sequences, model.generate(**given, max_new_tokens=4, do_sample=False))


def test_generation_is_in_evaluation_whatever_the_mode() -> None:
    family = BY_NAME["GPT-2"]
    model = attached(family, overt.Bayesian(k=0.5))
    expected = overt.posterior(model, prompts(family), samples=2, generate=3)
    model.train()
    drawn = overt.posterior(model, prompts(family), samples=2, generate=3)
    assert model.training
    assert torch.equal(drawn.samples, expected.samples)
    dropped = overt.posterior(model, prompts(family), samples=2, generate=3, dropout=True)
    assert torch.equal(dropped.sequences, expected.sequences)
    assert not torch.equal(dropped.samples, expected.samples)


def test_what_cannot_be_generated_is_refused() -> None:
    llama, bert = (attached(BY_NAME[name], overt.Bayesian()) for name in ("Llama", "BERT"))
    with pytest.raises(ValueError, match="pad on the left"):
        overt.posterior(llama, inputs_of(BY_NAME["Llama"], padded=True), generate=2)
    with pytest.raises(ValueError, match="generate needs input_ids"):
        overt.posterior(llama, {"inputs_embeds": torch.randn(1, 4, 32)}, generate=2)
    with pytest.raises(ValueError, match="generate must be a whole number of at least 1, got 0"):
        overt.posterior(llama, prompts(BY_NAME["Llama"]), generate=0)
    with pytest.raises(ValueError, match="generates text, got BertForSequenceClassification"):
        overt.posterior(bert, inputs_of(BY_NAME["BERT"]), generate=2)
    whisper = attached(BY_NAME["Whisper"], overt.Bayesian())
    with pytest.raises(ValueError, match="WhisperForConditionalGeneration has its own generate"):
        overt.posterior(whisper, {"input_features": torch.randn(1, 8, 40)}, generate=2)
