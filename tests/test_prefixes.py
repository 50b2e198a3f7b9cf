"""A causal model reads what several texts begin with once, and says of each what it says of it alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from overt.judge.rationales import words
from overt.judge.rationales.words import WordClassifier
from overt.recipes.faithfulness_models import VERBS, VerbNumber
from writing import byte_tokenizer

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
GROUPED = {"num_key_value_heads": 2}


def verb_number(name: str) -> Any:
    """A small random causal model as a classifier, of which six pieces are verbs."""
    torch.manual_seed(0)
    common = {"vocab_size": 290, "pad_token_id": 0}
    made: Any = {
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**common, **SIZES, **GROUPED)),
        "GPT-2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_head=4, n_layer=2, **common)),
        "Mistral": lambda: hf.MistralForCausalLM(
            hf.MistralConfig(**common, **SIZES, **GROUPED, sliding_window=3)
        ),
        "Mamba": lambda: hf.MambaForCausalLM(
            hf.MambaConfig(**common, hidden_size=16, num_hidden_layers=1, state_size=4)
        ),
    }[name]()
    made.config.max_position_embeddings = 64
    ids = {verb: [number] for number, verb in enumerate((*VERBS[0], *VERBS[1]), start=40)}
    return VerbNumber(made, lambda verb, **_: {"input_ids": ids[verb]}).eval()


def tokens_read(model: Any) -> list[int]:
    """Tokens of each pass of a model from now on."""
    read: list[int] = []
    model.model.base_model.register_forward_pre_hook(
        lambda _model, _given, named: read.append(named["input_ids"].numel()), with_kwargs=True
    )
    return read


LLAMA = verb_number("Llama")


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(4, 6), min_size=1, max_size=6), min_size=1, max_size=12))
def test_rows_that_are_read_by_prefix_are_those_that_are_read_alone(rows: list[list[int]]) -> None:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    with torch.no_grad():
        found = LLAMA.by_prefix(ids, mask)
        for row, own in zip(rows, found, strict=True):
            one = torch.tensor([row])
            torch.testing.assert_close(own, LLAMA(one, torch.ones_like(one)).logits[0], atol=1e-5, rtol=1e-5)


def test_a_beginning_is_read_once() -> None:
    model = verb_number("GPT-2")
    read = tokens_read(model)
    rows = [[5, 6, 7], [5, 6, 8], [5, 6, 7], [9, 6, 7], [5, 0, 0]]
    mask = torch.ones(5, 3, dtype=torch.long)
    mask[4, 1:] = 0
    with torch.no_grad():
        found = model.by_prefix(torch.tensor(rows), mask)
        assert read == [2, 2, 3]  # 5 and 9; 5 6 and 9 6; 5 6 7, 5 6 8 and 9 6 7
        torch.testing.assert_close(found, model(torch.tensor(rows), mask).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "can"), [("Llama", True), ("GPT-2", True), ("Mistral", False), ("Mamba", False)]
)
def test_models_whose_cache_holds_more_than_keys_and_values_read_all(name: str, can: bool) -> None:
    model = verb_number(name)
    assert model.prefixes is can
    read = tokens_read(model)
    classifier = WordClassifier(model, spoken())
    text = classifier.read("the code of the vault")
    kept = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 0, 1, 0, 1]], dtype=bool)
    together = classifier.probabilities(text, kept)
    assert (len(read) > 4) is can
    for row, own in zip(kept, together, strict=True):
        coded = classifier.batch([classifier.code(text, row).arguments])
        with torch.no_grad():
            np.testing.assert_allclose(own, model(**coded).logits.softmax(-1)[0], atol=1e-5)


def spoken() -> Any:
    """A byte-level tokenizer whose texts begin with a sign, so that there is always something to read."""
    tokenizer = byte_tokenizer(pad_token="<|end|>")
    number = tokenizer.convert_tokens_to_ids("<|user|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|user|> $A", special_tokens=[("<|user|>", number)]
    )
    return tokenizer


@pytest.mark.parametrize("most", [8, 40, 2**12], ids=["many passes", "some", "one"])
def test_all_parts_of_texts_are_read_as_alone_in_few_tokens(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "FEW", most)
    model = verb_number("Llama")
    classifier = WordClassifier(model, spoken())
    texts = [classifier.read(each) for each in ("the code of it is", "code of is the", "it")]
    every = [(np.arange(2**n)[:, None] >> np.arange(n)) & 1 == 1 for n in (5, 4, 1)]
    read, told = tokens_read(model), list[tuple[int, int]]()
    together = classifier.ask(list(zip(texts, every, strict=True)), lambda *own: told.append(own))
    assert told[-1] == (50, 50)
    assert (len(told) > 1) is (most < 2**12)
    coded = [
        classifier.code(text, row).arguments["input_ids"]
        for text, kept in zip(texts, every, strict=True)
        for row in kept
    ]
    beginnings = {tuple(ids[:end]) for ids in coded for end in range(1, len(ids) + 1)}
    check = max(map(len, coded))  # a text is read alone, to compare
    if most == 2**12:
        assert sum(read) == len(beginnings) + check
    else:
        assert len(beginnings) + check < sum(read) < sum(map(len, coded))
    for text, kept, found in zip(texts, every, together, strict=True):
        for row, own in zip(kept, found, strict=True):
            alone = classifier.batch([classifier.code(text, row).arguments])
            with torch.no_grad():
                np.testing.assert_allclose(own, model(**alone).logits.softmax(-1)[0], atol=1e-5)


@pytest.mark.parametrize("cached", [1, 4])
def test_a_pass_keeps_few_tokens_for_those_that_follow(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "FEW", 40)
    monkeypatch.setattr(words, "CACHED", cached)
    model = verb_number("Llama")
    classifier = WordClassifier(model, spoken())
    text = classifier.read("the code of the vault is it")
    kept = (np.arange(2**7)[:, None] >> np.arange(7)) & 1 == 1
    longest, passes = len(classifier.code(text).places), list[int]()
    by_prefix = model.by_prefix
    monkeypatch.setattr(
        model, "by_prefix", lambda ids, mask: passes.append(int(mask.sum())) or by_prefix(ids, mask)
    )
    classifier.probabilities(text, kept)
    assert len(passes) > 1
    # A row that begins a pass is read from its first token on.
    assert max(passes) <= cached * (40 + longest) + longest
    if cached == 4:
        assert max(passes) > 2 * 40, "what rows share does not count"


def test_a_model_that_reads_a_beginning_differently_for_several_texts_is_refused() -> None:
    class Wrong(torch.nn.Module):
        prefixes = True

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(num_labels=2)
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            length = attention_mask.sum(dim=1, keepdim=True)
            return {"logits": torch.cat([length, 0 * input_ids[:, :1] - length], dim=1).float()}

        def by_prefix(self, input_ids: Any, attention_mask: Any) -> Any:
            return -self.forward(input_ids, attention_mask)["logits"]

    classifier = WordClassifier(Wrong(), spoken())
    text = classifier.read("the code")
    with pytest.raises(ValueError, match="must read the beginning of a text alike whatever follows"):
        classifier.probabilities(text, np.array([[True, True], [True, False]]))
