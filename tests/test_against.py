"""Why this word rather than that one: gradients and blank-out of a difference of logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import overt
from writing import SIZES, TEXT, byte_tokenizer, tiny


def difference(model: Any, embedded: Tensor, query: int, target: int, against: int) -> float:
    with torch.no_grad():
        logits = model(inputs_embeds=embedded).logits[0, query]
    return float(logits[target] - logits[against])


def test_gradients_against_another_token_are_finite_differences() -> None:
    model, known = tiny("GPT-2").double(), byte_tokenizer()  # RMSNorm would compute in float32
    trace = overt.trace(model, TEXT, tokenizer=known, generate=4)
    assert trace.subject is not None
    ids = trace.subject.inputs.arguments["input_ids"]
    query, other = trace.generating_queries()[1], 77
    target = int(ids[0, query + 1])
    embedded = model.get_input_embeddings()(ids).detach()
    found = trace.gradients(query, against=other, kind="input")[0, 0, 0]
    for token in (0, 3, query, query + 1):
        step = 1e-5 * torch.zeros_like(embedded).index_fill(1, torch.tensor([token]), 1.0) * embedded
        up = difference(model, embedded + step, query, target, other)
        down = difference(model, embedded - step, query, target, other)
        assert float(found[token]) == pytest.approx((up - down) / 2e-5, rel=1e-4, abs=1e-7)
    assert float(found[query + 1]) == 0.0, "what comes later has no say"
    back = trace.gradients(query, target=other, against=target, kind="input")[0, 0, 0]
    torch.testing.assert_close(back, -found)
    without = trace.gradients(query, kind="input")[0, 0, 0]
    assert not torch.allclose(without, found), "a probability has other gradients"


def test_blankout_against_another_token_is_a_change_of_the_difference() -> None:
    model, known = tiny("Llama"), byte_tokenizer()
    trace = overt.trace(model, "The code is", tokenizer=known)
    ids = known("The code is", return_tensors="pt")["input_ids"]
    found = trace.blankout(-1, target="of", against="the", unk=5)[0, 0, 0]
    of, the = (known(word)["input_ids"][0] for word in ("of", "the"))

    def now(changed: Tensor) -> float:
        with torch.no_grad():
            logits = model(changed).logits[0, -1].double()
        return float(logits[of] - logits[the])

    for token in range(ids.shape[1]):
        changed = ids.clone()
        changed[0, token] = 5
        assert float(found[token]) == pytest.approx(now(ids) - now(changed), abs=1e-4)


def test_integrated_gradients_add_up_to_the_difference() -> None:
    pytest.importorskip("captum")
    model, known = tiny("GPT-2"), byte_tokenizer()
    trace = overt.trace(model, "The code is", tokenizer=known)
    found = trace.gradients(-1, target=7, against=8, kind="integrated", unk=5, steps=200)
    ids = known("The code is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        here, there = model(ids).logits[0, -1], model(torch.full_like(ids, 5)).logits[0, -1]
    want = float((here[7] - here[8]) - (there[7] - there[8]))
    assert float(found.sum()) == pytest.approx(want, rel=0.02)


def test_classes_have_names_too() -> None:
    config = hf.BertConfig(
        **SIZES, intermediate_size=48, vocab_size=290, id2label={0: "bad", 1: "good", 2: "so"}
    )
    model = hf.BertForSequenceClassification(config).eval()
    trace = overt.trace(model, [[5, 6, 7], [8, 9, 10]])
    by_name = trace.gradients(target="good", against=["bad", "so"])
    torch.testing.assert_close(by_name, trace.gradients(target=1, against=[0, 2]))
    with pytest.raises(
        ValueError, match=r"^target must be the number of a class, or its name, got 'nice'; names"
    ):
        trace.gradients(target="nice")


def test_words_of_several_pieces_and_the_target_itself_are_refused() -> None:
    trace = overt.trace(tiny("Llama"), "The code is", tokenizer=byte_tokenizer())
    with pytest.raises(
        ValueError, match=r"^against must be one token, and ' elephant' has \d pieces: 'Ġ.*', "
    ):
        trace.gradients(-1, target=7, against=" elephant")
    with pytest.raises(ValueError, match=r"^target must be one token, and '' has 0 pieces: none"):
        trace.gradients(-1, target="")
    with pytest.raises(ValueError, match=r"^against must be another class than the target, got 7"):
        trace.gradients(-1, target=7, against=7)
    queries = torch.arange(3)
    with pytest.raises(ValueError, match=r"than the target, got 7, which is the target of query 1"):
        trace.gradients(queries, target=[[3, 7, 8]], against=7)
    alone = overt.trace(tiny("Llama"), [[5, 6, 7]])
    with pytest.raises(ValueError, match=r"^against needs a tokenizer to name tokens by, or an id; got 'x'"):
        alone.gradients(-1, against="x")
    with pytest.raises(ValueError, match=r"^against must lie in 0 to 289, got \[999\]"):
        trace.blankout(-1, target=7, against=999, unk=5)
    for wrong in (True, 2.0):
        with pytest.raises(ValueError, match=r"^against must hold numbers of classes, which are whole, got"):
            trace.gradients(-1, target=7, against=wrong)
    config = hf.BertConfig(**SIZES, intermediate_size=48, vocab_size=290, num_labels=1)
    one = overt.trace(hf.BertForSequenceClassification(config), [[5, 6, 7]])
    with pytest.raises(ValueError, match=r"^against needs a model with several classes"):
        one.gradients(against=0)


def test_logits_of_the_last_positions_alone_explain_the_same() -> None:
    model = tiny("Llama")
    trace = overt.trace(model, [[5, 6, 7, 8, 9], [10, 11]], generate=4)
    assert trace.subject is not None
    kept: list[Any] = []
    handle = model.lm_head.register_forward_hook(lambda *given: kept.append(given[2].shape[1]))
    found = trace.gradients([6, 4], against=3)
    every = trace.gradients(against=3)
    handle.remove()
    assert kept == [5, 9]
    torch.testing.assert_close(found, every[:, :, [6, 4]])


def test_a_word_that_the_tokenizer_lacks_is_not_taken_for_its_unknown_token() -> None:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "code": 2, "is": 3}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    known = hf.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")
    trace = overt.trace(tiny("Llama", vocab_size=4), "the code", tokenizer=known)
    with pytest.raises(
        ValueError, match=r"^against must be a token that the tokenizer has, and 'elephant' is"
    ):
        trace.gradients(-1, target="is", against="elephant")
    by_id = trace.gradients(-1, target="is", against=0)
    torch.testing.assert_close(trace.gradients(-1, target="is", against="[UNK]"), by_id)
