"""Attach beyond the battery: what it selects and refuses, its KL in training, steps, noise, copies, PEFT."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import families
import overt
from attached import LIVE, attached, enliven, loss_inputs, shallow, tokens_of, without_dropout
from battery import OURS, all_equal, gradients
from families import FAMILIES, Family, inputs_of, tokens
from overt.mechanisms.bayesian.naive import weibull_gamma_kl
from selection import covering

BY_NAME = {family.name: family for family in FAMILIES}
BERT, LLAMA, T5, GPT2 = (BY_NAME[name] for name in ("BERT", "Llama", "T5", "GPT-2"))


def parts(model: Any) -> dict[str, Any]:
    return {path: m.overt for path, m in model.named_modules() if "overt" in m._modules}


# What is selected.


def test_where_selects_kinds() -> None:
    model = attached(T5, overt.Evolving(), where="cross")
    chosen = {path for path, part in parts(model).items() if part.map is not None}
    assert chosen == set(T5.paths("cross"))
    model = attached(T5, overt.Evolving(), where=["encoder", "decoder"])
    chosen = {path for path, part in parts(model).items() if part.map is not None}
    assert chosen == {*T5.paths("encoder"), *T5.paths("decoder")}


@pytest.mark.slow
def test_where_selects_layers_and_the_chain_starts_at_the_first() -> None:
    model = attached(BERT, overt.Evolving(), where={"encoder": [1, 2]})
    layers = [None if part.map is None else part.site.layer for part in parts(model).values()]
    assert layers == [None, 0, 1]
    assert attached(BERT, overt.Evolving(), where={"encoder": [-2, -1]}).overt_state.where == {
        "encoder": [-2, -1]
    }
    with torch.no_grad():
        plain = BERT.make()(**inputs_of(BERT)).logits
        changed = model(**inputs_of(BERT)).logits
    assert not torch.allclose(plain, changed)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("middle", "where must be one of 'encoder', 'decoder', 'cross'; got 'middle'"),
        ("cross", "where names 'cross', but this model has only encoder attention"),
        ({"encoder": [3]}, "where names layer 3 of encoder, which has layers 0 to 2"),
        ({"encoder": [0, 2]}, "where must choose consecutive layers (a chain has no gaps), got [0, 2]"),
        ({"encoder": []}, "where selects nothing"),
        ([], "where selects nothing; this model has encoder"),
    ],
)
def test_a_wrong_where_is_named(where: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        overt.attach(BERT.make(), overt.Evolving(), where=where)


def test_wrong_calls_are_named() -> None:
    with pytest.raises(ValueError, match="nothing to attach"):
        overt.attach(BERT.make())
    with pytest.raises(TypeError, match=r"must be a Hugging Face PreTrainedModel, or one .*, got Linear"):
        overt.attach(torch.nn.Linear(2, 2), overt.Evolving())
    with pytest.raises(ValueError, match="already has mechanisms attached"):
        overt.attach(attached(BERT, overt.Evolving()), overt.Bayesian())
    with pytest.raises(ValueError, match="may hold one Evolving, got 2"):
        overt.attach(BERT.make(), overt.Evolving(), overt.Evolving())
    with pytest.raises(TypeError, match="must be Bayesian"):
        overt.attach(BERT.make(), "evolving")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nothing is attached to this BertFor.*: call overt.attach"):
        overt.detach(BERT.make())
    with pytest.raises(ValueError, match="no KL available"):
        overt.kl(attached(BERT, overt.Bayesian()))


def test_where_may_be_a_generator(tmp_path: Path) -> None:
    model = attached(BERT, overt.Evolving(), where={"encoder": (layer for layer in (1, 2))})
    model.save_pretrained(tmp_path)
    assert overt.load(tmp_path).overt_state.where == {"encoder": [1, 2]}


def test_a_pruned_model_is_not_taken_for_a_shared_one() -> None:
    model = BERT.make()
    model.bert.encoder.layer = model.bert.encoder.layer[:2]
    overt.attach(model, LIVE)
    assert [(part.shared, part.site.layer) for part in parts(model).values()] == [(False, 0), (False, 1)]


def test_a_refused_attach_leaves_the_model_alone() -> None:
    model = BERT.make()
    before = str(model)
    with pytest.raises(ValueError, match="where"):
        overt.attach(model, overt.Evolving(), where="cross")
    assert str(model) == before
    assert model.config._attn_implementation == BERT.make().config._attn_implementation


def test_a_family_nobody_named_works_if_it_follows_the_interface() -> None:
    # Not in the battery, nor anywhere in the source.
    config = transformers.CamembertConfig(**families.TEXT, max_position_embeddings=64)
    model = transformers.CamembertForSequenceClassification(config).eval()
    inputs = inputs_of(BERT, padded=True)
    plain = model(**inputs).logits
    overt.attach(model, overt.Evolving(alpha=0.0, beta=0.0), overt.Bayesian())
    torch.testing.assert_close(model(**inputs).logits, plain, atol=1e-5, rtol=1e-5)


def test_sinks_are_refused_by_what_they_compute_not_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bert import modeling_bert

    from overt.attaching import find

    def with_a_sink(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
    ) -> Any:
        del module
        logits = query @ key.mT * scaling + attention_mask
        weights = torch.softmax(torch.nn.functional.pad(logits, (0, 1)), dim=-1)[..., :-1]
        return (weights @ value).transpose(1, 2), weights

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", with_a_sink)
    monkeypatch.setattr(find, "_probed", set())
    with pytest.raises(ValueError, match=r"BertFor.* cannot .* BertSelfAttention is not a softmax of scaled"):
        overt.attach(BERT.make(), overt.Evolving())


def test_an_unknown_argument_of_a_familys_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.bert import modeling_bert

    def with_a_gate(query: Any, key: Any, value: Any, gate: Any = None) -> Any:
        raise AssertionError((query, key, value, gate))

    monkeypatch.setattr(modeling_bert, "eager_attention_forward", with_a_gate)
    with pytest.raises(
        ValueError, match="the attention of BertSelfAttention takes gate, which is not honoured"
    ):
        overt.attach(BERT.make(), overt.Evolving())


def test_describe_tells_what_is_where(capsys: pytest.CaptureFixture[str]) -> None:
    model = attached(T5, overt.Evolving(alpha=0.2, beta=0.1), overt.Bayesian(k=10.0))
    overt.describe(model)
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "block" in line}
    assert rows["encoder.block.0.layer.0.SelfAttention"][:5] == ["encoder", "0", "4", "start", "start"]
    assert rows["encoder.block.1.layer.0.SelfAttention"][:5] == ["encoder", "1", "4", "0.2", "0.1"]
    assert rows["decoder.block.2.layer.0.SelfAttention"][:5] == ["decoder", "2", "4", "0", "0.1"]
    assert rows["decoder.block.1.layer.1.EncDecAttention"][:5] == ["cross", "1", "4", "0", "0.1"]
    prior, convolution = 8 * 5 + 5 + 5, 4 * 4 * 9 + 4
    assert rows["encoder.block.1.layer.0.SelfAttention"][-1] == str(prior + convolution)
    assert f"{9 * prior + 6 * convolution:,} parameters of mechanisms" in printed


# The KL.


def test_kl_is_the_mean_over_visible_cells_summed_over_layers() -> None:
    config = overt.Bayesian(k=3.0, prior="fixed", prior_alpha=0.5, prior_beta=0.7)
    model = attached(BERT, config)
    inputs = inputs_of(BERT, padded=True)
    with torch.no_grad(), overt.with_kl(model):
        maps = model(**inputs, output_attentions=True).attentions
    expected = torch.zeros(3)
    log_alpha = torch.tensor(0.5).log()
    for weights in maps:
        for row in range(3):
            length = int(inputs["attention_mask"][row].sum())
            log_p = weights[row, :, :length, :length].log()
            expected[row] += weibull_gamma_kl(log_p, 3.0, log_alpha, 0.7).mean()
    torch.testing.assert_close(overt.kl(model), expected.mean(), atol=1e-4, rtol=1e-4)


def test_an_unmasked_batch_has_the_kl_of_the_same_batch_masked_with_ones() -> None:
    # Without padding the mask is left out and the KL takes its closed form.
    model = attached(BERT, overt.Bayesian())
    ids = tokens()
    with torch.no_grad(), overt.with_kl(model):
        model(input_ids=ids)
        closed = overt.kl(model)
        square = torch.ones(3, 1, 9, 9, dtype=torch.bool)
        model(input_ids=ids, attention_mask=square)
    torch.testing.assert_close(closed, overt.kl(model), atol=1e-4, rtol=1e-5)


WITH_KL = ["BERT", "RoBERTa", "Llama", "GPT-2", "BART", "OPT", "ViT", "DistilBERT"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "law"),
    covering(
        [(name, law) for law in ("weibull", "lognormal") for name in WITH_KL],
        # each family, half of them with each law, and BERT with both
        [("BERT", "weibull"), *zip(WITH_KL, ("lognormal", "weibull") * 4, strict=True)],
    ),
)
def test_the_kl_of_padded_batches_takes_its_closed_form_and_is_the_dense_one(
    name: str, law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = BY_NAME[name]
    model = attached(family, overt.Bayesian(family=law))
    for padded, left in ((False, False), (True, False), (True, True)):
        inputs = inputs_of(family, padded, left)
        dense: list[str] = []
        log = type("Log", (), {"debug": lambda _, *words, dense=dense: dense.append(str(words))})()
        with torch.no_grad(), overt.with_kl(model), monkeypatch.context() as patch:
            patch.setattr("overt.mechanisms.bayesian.layer.log", log)
            model(**inputs)
            closed = overt.kl(model)
            assert dense == []
            patch.setattr(overt.AttentionCall, "is_dot", lambda _: False)
            model(**inputs)
        assert dense
        torch.testing.assert_close(closed, overt.kl(model), atol=1e-4, rtol=1e-5)


def test_what_joins_the_loss_is_lambda_times_kl_in_training_only() -> None:
    model = without_dropout(attached(BERT, overt.Bayesian(k=1e4, rho=0.5, kl_weight=1.0)))
    inputs = loss_inputs(BERT, model)
    task = model(**inputs).loss
    model.train()
    for step, weight in ((0, 0.5), (2, 0.7310585786)):
        model.overt_state.step.fill_(step)
        loss = model(**inputs).loss
        torch.testing.assert_close(loss - task, weight * overt.kl(model), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(overt.penalty(model), weight * overt.kl(model))
    as_tuple = model(**inputs, return_dict=False)
    torch.testing.assert_close(as_tuple[0], task + overt.penalty(model), atol=1e-3, rtol=1e-3)
    model.eval()
    torch.testing.assert_close(model(**inputs).loss, task)
    with pytest.raises(ValueError, match="no penalty available"):
        overt.penalty(model)


def test_the_kl_is_not_annealed_by_default_but_weighed() -> None:
    for mechanism, weight in ((overt.Bayesian(), 0.003), (overt.Bayesian.paper(), 1.0)):
        model = attached(BERT, mechanism).train()
        model(**loss_inputs(BERT, model))
        torch.testing.assert_close(overt.penalty(model), weight * overt.kl(model), rtol=1e-6, atol=0.0)


def test_a_loss_of_ones_own_is_warned_of_unless_the_penalty_was_asked_for() -> None:
    model = attached(BERT, overt.Bayesian()).train()
    inputs = inputs_of(BERT)
    model(**inputs)
    with pytest.warns(UserWarning, match=r"was not added to a loss.*overt\.penalty"):
        model(**inputs)
    overt.penalty(model)
    model(**inputs)  # it was asked for: no warning, which would be an error here


def test_an_evaluation_between_training_steps_does_not_hide_the_warning() -> None:
    model = attached(BERT, overt.Bayesian())
    inputs = inputs_of(BERT)
    model.train()(**inputs)
    model.eval()(**inputs)
    with pytest.warns(UserWarning, match="was not added to a loss"):
        model.train()(**inputs)


def test_an_empty_cache_in_training_does_not_lose_the_kl() -> None:
    model = without_dropout(attached(LLAMA, overt.Bayesian())).train()
    inputs = loss_inputs(LLAMA, model)
    plain = model(**inputs).loss
    model.overt_state.seen.zero_()
    cached = model(**inputs, past_key_values=transformers.DynamicCache()).loss
    torch.testing.assert_close(cached, plain)


def test_rows_that_are_one_example_weigh_as_one() -> None:
    config = transformers.BertConfig(**families.TEXT)
    model = without_dropout(
        overt.attach(transformers.BertForMultipleChoice(config), overt.Bayesian())
    ).train()
    ids = tokens(batch=8).view(4, 2, 9)
    labels = torch.tensor([0, 1, 1, 0])
    count = torch.tensor(4)
    model(input_ids=ids, labels=labels, num_items_in_batch=count)
    whole = overt.penalty(model).item()
    model.overt_state.seen.zero_()
    parts = 0.0
    for row in range(4):
        model(input_ids=ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=count)
        parts += overt.penalty(model).item()
    assert parts == pytest.approx(whole, rel=1e-4)


def test_any_loss_in_a_tuple_takes_the_penalty() -> None:
    config = transformers.BertConfig(**families.TEXT)
    torch.manual_seed(0)
    model = without_dropout(
        overt.attach(transformers.BertForQuestionAnswering(config), overt.Bayesian())
    ).train()
    spans = {"start_positions": torch.tensor([1, 2, 3]), "end_positions": torch.tensor([2, 3, 4])}
    inputs = {**inputs_of(BERT), **spans}
    named = model(**inputs).loss
    model.overt_state.seen.zero_()
    torch.testing.assert_close(model(**inputs, return_dict=False)[0], named)


def test_a_step_is_an_optimizer_step() -> None:
    model = attached(BERT, overt.Bayesian()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    inputs = loss_inputs(BERT, model)
    for expected in range(3):
        assert int(model.overt_state.step) == expected
        for _ in range(2):
            model(**inputs).loss.backward()
        assert int(model.overt_state.seen) == 6
        other.step()
        optimizer.step()
        assert int(model.overt_state.seen) == 0
    assert "overt_state.step" in model.state_dict()
    assert "overt_state.seen" not in model.state_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_steps_of_a_compiled_copy_are_counted() -> None:
    model = copy.deepcopy(overt.attach(shallow(BERT.make(), 1), overt.Bayesian())).train()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(**loss_inputs(BERT, model)).loss.backward()
    optimizer.step()
    assert int(model.overt_state.step) == 1


def test_a_second_optimizer_goes_on_counting_while_the_first_lives() -> None:
    model = attached(BERT, overt.Bayesian()).train()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for optimizer in (first, first, second, second):
        model(**loss_inputs(BERT, model)).loss.backward()
        optimizer.step()
    assert int(model.overt_state.step) == 4


def test_steps_of_a_part_of_the_model_count() -> None:
    model = attached(BERT, overt.Bayesian()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.bert(**inputs_of(BERT)).last_hidden_state.sum().backward()
    overt.penalty(model)
    optimizer.step()
    assert int(model.overt_state.step) == 1


def test_two_optimizers_of_one_model_count_once() -> None:
    model = attached(BERT, overt.Bayesian()).train()
    weights = list(model.parameters())
    pair = [torch.optim.SGD(weights[:5], lr=0.1), torch.optim.SGD(weights[5:], lr=0.1)]
    for _ in range(4):
        model(**loss_inputs(BERT, model)).loss.backward()
        for optimizer in pair:
            optimizer.step()
    assert int(model.overt_state.step) == 4


@pytest.mark.slow
def test_an_optimizer_that_is_gone_does_not_stop_the_count() -> None:
    model = attached(BERT, overt.Bayesian()).train()
    for expected in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(**loss_inputs(BERT, model)).loss.backward()
        optimizer.step()
        assert int(model.overt_state.step) == expected
        del optimizer
        gc.collect()


def maps_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs, output_attentions=True).attentions[0]


def test_noise_changes_with_step_and_batch_and_comes_back() -> None:
    model = without_dropout(attached(BERT, overt.Bayesian(k=1.0, prior=None))).train()
    inputs = inputs_of(BERT)
    first, second = maps_of(model, inputs), maps_of(model, inputs)
    assert not torch.allclose(first, second), "another batch of the same step draws other noise"
    model.overt_state.seen.zero_()
    assert torch.equal(maps_of(model, inputs), first)
    model.overt_state.seen.zero_()
    model.overt_state.step += 1
    assert not torch.allclose(maps_of(model, inputs), first)


def test_chains_of_one_model_do_not_share_noise() -> None:
    clip = BY_NAME["CLIP"]
    model = attached(clip, overt.Bayesian(k=1.0, prior=None)).train()
    numbers = {part.chain_name: part.chain_number for part in parts(model).values()}
    assert sorted(numbers.values()) == [0, 1]


def test_evaluation_does_not_move_anything() -> None:
    model = attached(BERT, overt.Bayesian())
    generator = torch.random.get_rng_state()
    model(**inputs_of(BERT))
    assert torch.equal(generator, torch.random.get_rng_state())
    assert int(model.overt_state.seen) == int(model.overt_state.step) == 0


# Around the forward pass.


def test_two_forwards_before_one_backward_keep_their_own_maps_under_checkpointing() -> None:
    model = attached(BERT, LIVE, overt.Bayesian())
    one, two = inputs_of(BERT), {"input_ids": tokens(seed=9), "attention_mask": torch.ones(3, 9).long()}
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        model.zero_grad()
        model.overt_state.seen.zero_()
        torch.manual_seed(0)
        total = torch.zeros(())
        for inputs in (one, two):
            total = total + model(**inputs).logits.square().sum() + overt.penalty(model)
        total.backward()
        results.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, grad in results[0].items():
        torch.testing.assert_close(results[1][name], grad, atol=1e-6, rtol=1e-5, msg=name)


def test_a_failed_forward_leaves_no_trace() -> None:
    model = attached(BERT, LIVE)
    inputs = inputs_of(BERT)
    expected = model(**inputs).logits
    with pytest.raises(IndexError):
        model(input_ids=torch.tensor([[10**6]]))
    assert torch.equal(model(**inputs).logits, expected)
    from overt.attaching import passes

    assert not passes._running.passes


def test_two_models_in_two_threads_both_join_their_kl() -> None:
    one, two = (without_dropout(attached(BERT, overt.Bayesian())).train() for _ in range(2))
    inputs = loss_inputs(BERT, one)
    expected = one(**inputs).loss.item()
    one.overt_state.seen.zero_()
    inside, leave = threading.Event(), threading.Event()
    losses: dict[str, float] = {}

    def slow(_module: Any, _args: Any) -> None:
        inside.set()
        leave.wait(20)

    two.classifier.register_forward_pre_hook(slow)
    thread = threading.Thread(target=lambda: losses.update(two=two(**inputs).loss.item()))
    thread.start()
    inside.wait(20)
    losses["one"] = one(**inputs).loss.item()
    leave.set()
    thread.join()
    assert losses["one"] == pytest.approx(expected, rel=1e-5)
    assert losses["two"] == pytest.approx(expected, rel=1e-5)


def test_another_attention_implementation_after_attach_is_noticed() -> None:
    model = attached(BERT, LIVE)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match="was its attention implementation set after attach"):
        model(**inputs_of(BERT))


def test_models_that_share_a_config_do_not_disturb_each_other() -> None:
    config = transformers.BertConfig(**families.TEXT)
    torch.manual_seed(0)
    a, b, c = (transformers.BertModel(config).eval() for _ in range(3))
    inputs = inputs_of(BERT)
    plain = [model(**inputs).last_hidden_state for model in (a, b, c)]
    implementation = config._attn_implementation
    for model in (a, b):
        enliven(overt.attach(model, LIVE))
    attached_b = b(**inputs).last_hidden_state
    torch.testing.assert_close(c(**inputs).last_hidden_state, plain[2], atol=1e-5, rtol=1e-5)
    overt.detach(a)
    assert torch.equal(b(**inputs).last_hidden_state, attached_b)
    torch.testing.assert_close(a(**inputs).last_hidden_state, plain[0], atol=1e-5, rtol=1e-5)
    overt.detach(b)
    assert config._attn_implementation == implementation
    assert torch.equal(b(**inputs).last_hidden_state, plain[1])


def test_detach_finds_what_was_attached_to_a_part() -> None:
    model = BERT.make()
    overt.attach(model.bert, LIVE)
    overt.detach(model)
    assert str(model) == str(BERT.make())
    assert "save_pretrained" not in model.bert.__dict__
    overt.attach(model, LIVE)


def test_an_argument_that_a_family_adds_to_its_attention_is_refused() -> None:
    model = attached(BERT, LIVE)
    attention = model.bert.encoder.layer[1].attention.self
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs, block_indices=torch.zeros(1))
    with pytest.raises(ValueError, match=r"hands its attention block_indices, which is not honoured"):
        model(**inputs_of(BERT))


def test_windows_are_refused_for_evolving_and_fine_for_bayesian(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4, num_labels=2
    )
    model = transformers.SwinForImageClassification(config).eval()
    pictures = torch.randn(2, 3, 16, 16)
    plain = model(pictures).logits
    overt.attach(model, overt.Bayesian())
    torch.testing.assert_close(model(pictures).logits, plain, atol=1e-5, rtol=1e-5)
    overt.detach(model)
    with pytest.raises(ValueError, match="groups of each input; mechanisms that keep to their row"):
        overt.attach(model, LIVE)
    monkeypatch.setattr("overt.attaching.refusals.refusals", dict)  # as if the type were not known
    overt.attach(model, LIVE)
    with pytest.raises(ValueError, match="windows or groups of its 2 inputs"):
        model(pictures)


def test_a_decoder_without_a_causal_mask_runs_in_training_and_evaluation() -> None:
    config = transformers.Blip2QFormerConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        encoder_hidden_size=32,
    )
    model = overt.attach(transformers.Blip2QFormerModel(config), LIVE)
    inputs = {"query_embeds": torch.randn(2, 5, 32), "encoder_hidden_states": torch.randn(2, 7, 32)}
    for mode in (True, False):
        model.train(mode)(**inputs)


@pytest.mark.slow
def test_threads_do_not_mix_their_passes() -> None:
    model = attached(LLAMA, LIVE)
    batches = [{"input_ids": tokens(seed=seed, length=5 + seed)} for seed in range(4)]
    with torch.no_grad():
        expected = [model(**batch).logits for batch in batches]
    wrong: list[int] = []

    def run(number: int) -> None:
        with torch.no_grad():
            again = [model(**batches[number]).logits for _ in range(10)]
        if not all(torch.allclose(one, expected[number], atol=1e-5) for one in again):
            wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_a_layer_that_is_dropped_in_training_leaves_a_gap(dropped: int) -> None:
    family = BY_NAME["BART"]
    model = without_dropout(attached(family, LIVE, overt.Bayesian())).train()
    inputs = loss_inputs(family, model)
    model(**inputs).loss.backward()
    whole = overt.kl(model).item()
    for stack in (model.model.encoder, model.model.decoder):
        del stack.layers[dropped]
    model.overt_state.seen.zero_()
    model(**inputs).loss.backward()
    assert overt.kl(model).item() < whole
    # In evaluation no layer is missing by chance.
    model.eval()
    if dropped < 2:
        with pytest.raises(ValueError, match="found no map of layer"):
            model(**inputs)


@pytest.mark.slow
def test_layer_drop_trains() -> None:
    family = BY_NAME["BART"]
    model = attached(family, LIVE, overt.Bayesian()).train()
    model.model.encoder.layerdrop = model.model.decoder.layerdrop = 0.5
    for seed in range(8):
        torch.manual_seed(seed)
        model(**loss_inputs(family, model)).loss.backward()


def test_a_layer_called_by_itself_is_told_so() -> None:
    model = attached(BERT, LIVE)
    with pytest.raises(RuntimeError, match="call the model, not its layers"):
        model.bert.encoder.layer[0](torch.randn(1, 4, families.WIDTH))


def test_packed_sequences_are_refused() -> None:
    model = attached(LLAMA, LIVE)
    ids = tokens(batch=1, length=8)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match="packed sequences are not supported"):
        model(input_ids=ids, position_ids=positions, use_cache=False)
    blocks = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).tril().bool().view(1, 1, 8, 8)
    with pytest.raises(ValueError, match="packed sequences"):
        model(input_ids=ids, attention_mask=blocks)
    model(input_ids=ids, position_ids=torch.arange(8).view(1, -1))  # one sequence


def test_a_decoder_that_sees_ahead_is_refused_whatever_ran_before() -> None:
    model = attached(LLAMA, LIVE)
    model(input_ids=tokens(length=1))
    model(input_ids=tokens())
    with pytest.raises(ValueError, match="taken for causal, but its mask lets queries see later keys"):
        model(input_ids=tokens(), attention_mask=torch.ones(3, 1, 9, 9, dtype=torch.bool))


def test_a_mask_function_nobody_knows_is_looked_at_each_time() -> None:
    # What image tokens do in some decoders: the mask is causal or sees a block ahead.
    from transformers import masking_utils

    from overt.attaching import masks

    def ahead(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
        del batch_idx, head_idx
        return kv_idx <= q_idx + 1

    either = masking_utils.or_masks(masking_utils.causal_mask_function, ahead)
    sliding = masking_utils.sliding_window_causal_mask_function(3)
    origins = {}
    for name, function in {"either": either, "sliding": sliding, "plain": None}.items():
        mask = masks.mask(2, 5, 5, mask_function=function)
        assert mask is not None
        origins[name] = masks.origin_of(mask)
    assert origins["either"] == (None, False, None)
    assert origins["sliding"] == ("causal", False, None)
    assert origins["plain"] == ("causal", True, None)


def test_an_encoder_with_a_causal_mask_is_refused() -> None:
    model = attached(BERT, LIVE)
    with pytest.raises(ValueError, match="taken for bidirectional, but its mask is causal"):
        model(input_ids=tokens(), attention_mask=torch.ones(1, 1, 9, 9).tril().bool().expand(3, -1, -1, -1))


# Caches.


@pytest.mark.parametrize(
    "family", [LLAMA, GPT2, BY_NAME["Mistral"], T5, BY_NAME["BART"]], ids=lambda f: f.name
)
def test_any_cut_of_a_sequence_gives_the_same_outputs(family: Family) -> None:
    model = attached(family, LIVE)
    inputs = inputs_of(family)
    name = "decoder_input_ids" if family.inputs == "pair" else "input_ids"
    fixed = {key: value for key, value in inputs.items() if family.inputs == "pair" and "decoder" not in key}
    ids = inputs[name]
    with torch.no_grad():
        whole = model(**fixed, **{name: ids}).logits
        cache, pieces = None, []
        for piece in ids.split([1, 3, *[1] * (ids.shape[1] - 4)], dim=1):
            output = model(**fixed, **{name: piece}, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            pieces.append(output.logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_a_copied_cache_goes_its_own_way() -> None:
    model = attached(LLAMA, LIVE)
    prompt, a, b = tokens(batch=1), tokens(batch=1, length=3, seed=4), tokens(batch=1, length=3, seed=5)
    with torch.no_grad():
        cache = model(input_ids=prompt, use_cache=True).past_key_values
        for ending in (a, b):
            mine = copy.deepcopy(cache)
            for token in ending.split(1, dim=1):
                last = model(input_ids=token, past_key_values=mine).logits[:, -1]
            whole = model(input_ids=torch.cat([prompt, ending], dim=1)).logits[:, -1]
            torch.testing.assert_close(last, whole, atol=1e-5, rtol=1e-5)


def test_a_cache_without_rows_is_refused() -> None:
    model = LLAMA.make()
    with torch.no_grad():
        cache = model(input_ids=tokens(), use_cache=True).past_key_values
        enliven(overt.attach(model, LIVE))
        with pytest.raises(ValueError, match="holds tokens but no rows of their maps"):
            model(input_ids=tokens(length=1), past_key_values=cache)
        overt.detach(model)
        overt.attach(model, overt.Bayesian())
        model(input_ids=tokens(length=1), past_key_values=cache)  # no convolution, no rows needed


def test_batches_of_a_cache_are_selected_and_repeated_with_its_rows() -> None:
    model = attached(LLAMA, LIVE)
    prompt, after = tokens(), tokens(length=1, seed=6)
    with torch.no_grad():
        whole = model(input_ids=torch.cat([prompt, after], dim=1)).logits[:, -1]
        cache = model(input_ids=prompt, use_cache=True).past_key_values
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        index = torch.tensor([2, 2, 0, 0])
        last = model(input_ids=after[index], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(last, whole[index], atol=1e-5, rtol=1e-5)
        cache.reset()


def test_a_refused_crop_leaves_the_cache_whole() -> None:
    model = attached(LLAMA, LIVE)
    with torch.no_grad():
        cache = model(input_ids=tokens(), use_cache=True).past_key_values
        with pytest.raises(RuntimeError, match="cannot be cropped"):
            cache.crop(-4)
        assert cache.get_seq_length() == 9
        model(input_ids=tokens(length=1), past_key_values=pickle.loads(pickle.dumps(cache)))


def test_a_cache_of_another_attached_model_is_refused() -> None:
    one, two = attached(LLAMA, LIVE), attached(LLAMA, LIVE)
    with torch.no_grad():
        cache = one(input_ids=tokens(), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="holds tokens but no rows of their maps"):
            two(input_ids=tokens(length=1), past_key_values=cache)


def test_without_convolutions_assisted_decoding_works() -> None:
    model = overt.attach(GPT2.make(), overt.Bayesian())
    plain = GPT2.make()
    prompt = {"input_ids": tokens(batch=1), "attention_mask": torch.ones(1, 9).long()}
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    assisted = model.generate(**prompt, **settings, assistant_model=GPT2.make())
    assert torch.equal(assisted, plain.generate(**prompt, **settings))


# Copies, files of whole models, wrappers.


def test_a_pickled_model_stays_attached(tmp_path: Path) -> None:
    model = attached(BERT, LIVE, overt.Bayesian())
    inputs = inputs_of(BERT)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(**inputs).logits, model(**inputs).logits)
    twin.save_pretrained(tmp_path)
    assert torch.equal(overt.load(tmp_path)(**inputs).logits, model(**inputs).logits)


def test_a_copy_counts_its_own_steps() -> None:
    model = attached(BERT, overt.Bayesian()).train()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(**loss_inputs(BERT, twin)).loss.backward()
    optimizer.step()
    assert (int(twin.overt_state.step), int(model.overt_state.step)) == (1, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch hides it by other means
@pytest.mark.parametrize(
    ("form", "name"),
    covering(
        [(form, name) for form in ("evolving", "bayesian", "both") for name in ("BERT", "Llama")],
        # Elsewhere: T5 with both in place, and Llama's generation with both (test_attach_compile.py);
        # Bayesian alone (test_losses.py), over Llama too (test_fused_models.py).
        [("both", "BERT")],
    ),
)
def test_compiles_without_a_graph_break(
    form: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    family = BY_NAME[name]
    bayesian = overt.Bayesian()
    mechanisms = {"evolving": (LIVE,), "bayesian": (bayesian,), "both": (LIVE, bayesian)}[form]
    model = without_dropout(enliven(overt.attach(shallow(family.make()), *mechanisms)))
    inputs = loss_inputs(family, model)
    expected = model(**inputs).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).logits, expected)
    model.train()
    model(**inputs).loss.backward()
    eager = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.overt_state.seen.zero_()
    compiled(**inputs).loss.backward()
    for key, grad in eager.items():
        torch.testing.assert_close(dict(model.named_parameters())[key].grad, grad, atol=1e-6, rtol=1e-5)
    if len(mechanisms) == 2:
        record_property("support", (8000, name, "`torch.compile(fullgraph=True)`, aot_eager", "works"))


@pytest.mark.slow
@pytest.mark.parametrize("order", ["attach first", "LoRA first"])
def test_lora_on_top_leaves_the_mechanisms_trainable(
    order: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["query", "value"], modules_to_save=["overt"], r=2)
    model = BERT.make()
    if order == "attach first":
        enliven(overt.attach(model, LIVE, overt.Bayesian()))
        model = peft.get_peft_model(model, config)
    else:
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query", "value"], r=2))
        enliven(overt.attach(model, LIVE, overt.Bayesian()))
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    model(**loss_inputs(BERT, overt.attach.__globals__["base_of"](model))).loss.backward()
    optimizer.step()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    ours = {name: grad for name, grad in grads.items() if ".overt." in name}
    assert any("prior" in name for name in ours)
    assert any("evolving" in name for name in ours)
    assert all(grad is not None and bool(grad.abs().sum() > 0) for grad in ours.values())
    assert any("lora_A" in name for name in grads)
    assert not any("word_embeddings" in name for name in grads)
    assert int(overt.attach.__globals__["the_state"](model).step) == 1
    model.eval()
    if order == "attach first":
        inputs = inputs_of(BERT)
        model.save_pretrained(tmp_path)
        fresh = enliven(overt.attach(BERT.make(), LIVE, overt.Bayesian()), seed=77)
        loaded = peft.PeftModel.from_pretrained(fresh, tmp_path).eval()
        torch.testing.assert_close(loaded(**inputs).logits, model(**inputs).logits)
        record_property("support", (8100, "BERT", "PEFT LoRA, mechanisms trained and saved with it", "works"))


def test_a_model_with_offloaded_weights_is_attached_to() -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = attached(BERT, LIVE, overt.Bayesian())(**inputs_of(BERT)).logits
    model = BERT.make()
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    enliven(overt.attach(model, LIVE, overt.Bayesian()))
    torch.testing.assert_close(model(**inputs_of(BERT)).logits, expected)


def test_dropout_falls_on_the_weights_after_they_are_returned() -> None:
    model = attached(BERT, LIVE).train()
    output = model(**inputs_of(BERT), output_attentions=True)
    torch.testing.assert_close(output.attentions[1].sum(-1), torch.ones(3, 4, 9))
    torch.manual_seed(0)
    first = model(**inputs_of(BERT)).logits
    torch.manual_seed(1)
    assert not torch.allclose(model(**inputs_of(BERT)).logits, first)


def test_gradients_under_autocast_reach_every_mechanism() -> None:
    model = attached(LLAMA, LIVE, overt.Bayesian()).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**loss_inputs(LLAMA, model)).loss
    loss.backward()
    found = [p.grad for name, p in model.named_parameters() if ".overt." in name]
    assert all(grad is not None and grad.isfinite().all() for grad in found)


def test_a_model_in_bfloat16_gets_mechanisms_in_bfloat16() -> None:
    model = overt.attach(LLAMA.make().to(torch.bfloat16), LIVE, overt.Bayesian())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(**inputs_of(LLAMA)).logits.dtype == torch.bfloat16


def test_detached_gradients_are_those_of_a_plain_model() -> None:
    model, twin = attached(BERT, LIVE), BERT.make()
    overt.detach(model)
    inputs = loss_inputs(BERT, model)
    for one in (model, twin):
        torch.manual_seed(0)
        one.train()
        one(**inputs).loss.backward()
    for (name, a), (_, b) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad), name


def test_helpers_of_the_battery_can_tell_models_apart() -> None:
    inputs = inputs_of(BERT)
    assert not all_equal(tokens_of(BERT, attached(BERT, LIVE), inputs), tokens_of(BERT, BERT.make(), inputs))
    assert gradients(BERT, OURS, attached(BERT, LIVE, overt.Bayesian()), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_mean_of_bayesian_weights_is_eager_attention_bit_for_bit(dtype: torch.dtype) -> None:
    model = BERT.make().to(dtype)  # heads are 8 wide: the order of product and scale shows
    model.set_attn_implementation("eager")
    for padded in (False, True):
        inputs = inputs_of(BERT, padded)
        want = model(**inputs).logits
        for where in (None, {"encoder": [2]}):
            overt.attach(model, overt.Bayesian(), where=where)
            assert torch.equal(model(**inputs).logits, want)
            overt.detach(model)


def test_a_chain_is_float32_under_autocast_where_the_mask_is() -> None:
    model = attached(BERT, LIVE)
    seen: list[torch.dtype] = []
    for module in model.modules():
        if isinstance(module, overt.MechanismLayer):
            module.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(**inputs_of(BERT, padded=True))
    assert set(seen) == {torch.float32}
