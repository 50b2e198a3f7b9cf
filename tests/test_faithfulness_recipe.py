"""The faithfulness recipe: nothing is missing, ground truth is what decides, methods share their texts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from overt.data.agreement import VOCABULARY, WORD_CLASSES, flipped, generate
from overt.judge.rationales import every_method
from overt.recipes import faithfulness, reproduce
from overt.recipes.faithfulness_models import VERBS, VerbNumber, grammar_tokenizer
from overt.tracing.methods.method import methods as registered
from overt.tracing.mixing.mixing import mixings

pytest.importorskip("lime", reason="needs the extra rationales")
pytest.importorskip("captum", reason="needs the extra rationales")


def test_no_method_and_no_mixing_of_the_package_is_missing() -> None:
    for quick in (False, True):
        for name, row in faithfulness.rows_of(quick).items():
            assert row.methods == every_method(), name
            parts = {part for method in row.methods for part in method.split("/")}
            assert set(registered()) <= parts
            assert set(mixings()) - {"attention"} <= parts
    full = faithfulness.rows_of(False).values()
    assert {row.data for row in full} == {"agreement", "SST-2", "movie reviews", "language model"}
    assert all(row.texts >= (100 if row.data == "movie reviews" else 300) for row in full)


# --- Ground truth ---


def test_a_flipped_sentence_differs_in_its_subjects_number_alone() -> None:
    for sentence in generate(300, seed=0):
        if len(sentence.subject) > 1:
            with pytest.raises(ValueError, match="a subject with one head"):
                flipped(sentence)
            continue
        other = flipped(sentence)
        [head] = sentence.subject
        differ = [
            n for n, pair in enumerate(zip(sentence.tokens, other.tokens, strict=True)) if len({*pair}) > 1
        ]
        assert differ == [head]
        assert other.plural != sentence.plural
        assert other.tokens[head] in WORD_CLASSES["noun"]
        assert flipped(other) == sentence, "the count of attractors, too, is the grammar's again"


class LastNoun(nn.Module):
    """Says the number of the last noun, as a rule without grammar does."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=2)
        self.numbers = nn.Embedding(len(VOCABULARY), 1)
        plural = {
            word for s in generate(2000, 1) for place, many in s.nouns if many for word in [s.tokens[place]]
        }
        nouns = WORD_CLASSES["noun"]
        values = [[(1.0 if word in plural else -1.0) if word in nouns else 0.0] for word in VOCABULARY]
        self.numbers.weight = nn.Parameter(torch.tensor(values))

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        numbers = self.numbers(input_ids).squeeze(-1) * attention_mask
        places = torch.arange(input_ids.shape[1]) * (numbers != 0)
        last = numbers.gather(1, places.argmax(dim=1, keepdim=True))
        return {"logits": torch.cat([-3 * last, 3 * last], dim=1)}


def test_a_word_is_ground_truth_where_the_model_goes_by_it() -> None:
    sentences = [sentence for sentence in generate(200, seed=2) if len(sentence.subject) == 1]
    truth = faithfulness.subjects_of(LastNoun(), grammar_tokenizer(), sentences)
    expected = [
        sentence.subject[0] if sentence.nouns[-1][0] == sentence.subject[0] else None
        for sentence in sentences
    ]
    assert truth == expected
    assert None in truth
    assert any(place is not None for place in truth)


def test_the_subject_is_first_where_no_word_scores_higher() -> None:
    scores = [np.array(row) for row in ([0.1, 0.9, 0.3], [0.9, 0.1, 0.3], [0.5, 0.5, 0.2], [1.0, 2.0, 3.0])]
    found = faithfulness.subject_first([0, 1, 2, 3], scores, [1, 1, 1, None])
    np.testing.assert_array_equal(found, [1.0, 0.0, 0.5, math.nan])


def test_a_language_model_chooses_a_verb_by_its_probability() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = {verb: [number] for number, verb in enumerate((*VERBS[0], *VERBS[1]), start=3)}
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).eval()
    verbs = VerbNumber(model, lambda verb, **_: {"input_ids": ids[verb]}).eval()
    inputs = torch.randint(0, 40, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with torch.no_grad():
        p = verbs(inputs, mask).logits.softmax(dim=-1)
        for row, length in enumerate((5, 3)):
            every = model(inputs[row : row + 1, :length]).logits[0, -1].softmax(dim=-1)
            both = torch.stack([every[3:6].sum(), every[6:9].sum()])
            torch.testing.assert_close(p[row], both / both.sum())
    with pytest.raises(ValueError, match="must have a token for ' is', got 2 pieces"):
        VerbNumber(model, lambda _verb, **_: {"input_ids": [1, 2]})


# --- Comparison ---


def numbers_of(
    methods: dict[str, list[float | None]], texts: int = 4, key: str = "correlation"
) -> dict[str, Any]:
    return {
        "texts": texts,
        "methods": {
            name: {"seconds": 1.0, "texts": list(range(len(values))), "by_text": {key: values}}
            for name, values in methods.items()
        },
        "refused": {},
    }


def test_methods_are_compared_on_the_texts_that_all_of_them_have() -> None:
    found = {
        0: numbers_of({"raw": [1.0, 2.0, None, 4.0], "rollout": [0.0, 0.0, 9.0, 1.0], "random": [0.0] * 4}),
        1: numbers_of({"raw": [3.0, None, 5.0, 6.0], "rollout": [1.0, 9.0, 2.0, 3.0], "random": [0.0] * 4}),
    }
    cells = faithfulness.cells_of(found)["correlation"]
    assert cells["raw"][0] == pytest.approx(np.mean([7 / 3, 14 / 3]))
    assert cells["rollout"][0] == pytest.approx(np.mean([1 / 3, 6 / 3]))
    assert cells["raw"][3:] == [4, 0, 2]
    pairs = faithfulness.pairs_of(found)["correlation"]
    assert pairs["rollout − raw"][0] == pytest.approx(cells["rollout"][0] - cells["raw"][0])
    assert "flow − rollout" not in pairs, "one was not measured"


def test_a_method_that_ranks_few_texts_does_not_take_them_from_others() -> None:
    found = {0: numbers_of({"raw": [1.0] * 4, "lime": [1.0, None, None, None], "random": [0.5] * 4})}
    cells = faithfulness.cells_of(found)["correlation"]
    assert "lime" not in cells
    assert cells["raw"][3] == 4


def test_ranks_know_whether_more_is_better() -> None:
    values = {"raw": [0.5], "flow": [-0.9], "rollout": [0.1], "random": [9.0]}
    found = faithfulness.ranks_of({"between": values, "sufficiency": values, "randomised": values})
    assert found["between"] == {"raw": 1, "rollout": 2, "flow": 3}
    assert found["sufficiency"] == {"flow": 1, "rollout": 2, "raw": 3}
    assert found["randomised"] == {"rollout": 1, "raw": 2, "flow": 3}, "near 0 is good"


# --- The whole recipe, small ---

FEW = ("pooling", "raw", "rollout", "value-zeroing", "gradients", "random", "oracle")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faithfulness, "every_method", lambda: FEW)
    for name, value in {
        "QUICK_STEPS": 2,
        "TRAIN": 64,
        "TEST": 200,
        "QUICK_TEXTS": {"agreement": 3},
        "QUICK_FORMS": {"agreement": ("plain", "evolving")},
        "QUICK_WORDS": 6,
    }.items():
        monkeypatch.setattr(faithfulness, name, value)


def test_a_trial_runs_and_resumes(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del small
    monkeypatch.delenv("OVERT_DATA", raising=False)
    begin = {"out": tmp_path / "run", "results": tmp_path / "results", "device": "cpu"}
    result = reproduce.run("faithfulness", extra=["--quick", "--workers", "1"], **begin)
    cells = result["config"]["cells"]
    assert list(cells) == ["agreement plain", "agreement evolving"]
    for name, by_protocol in cells.items():
        judged = {"raw", "rollout", "gradients", "random"} | ({"value-zeroing"} if "plain" in name else set())
        assert set(by_protocol["comprehensiveness"]) == judged | {"oracle"}
        assert set(by_protocol["randomised"]) <= judged, "the best order is not compared"
        assert by_protocol["normalised_comprehensiveness"]["oracle"][0] == pytest.approx(1.0)
    tables = {table["title"]: dict(table["rows"]) for table in result["tables"]}
    evolving = next(rows for title, rows in tables.items() if title.startswith("agreement evolving: 3 texts"))
    assert set(evolving["value zeroing"]) == {"–"}
    assert "Evolving reads the layer below it" in " ".join(result["notes"])
    assert "value zeroing" not in " ".join(result["config"]["pairs"]["agreement evolving"]["correlation"])
    assert (tmp_path / "results" / "faithfulness.svg").read_text().count("<svg") == 1

    def never(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(faithfulness, "perform", never)
    again = reproduce.run("faithfulness", extra=["--quick", "--rows", "agreement plain"], **begin)
    assert json.dumps(again["config"]["cells"]) == json.dumps(cells)


def test_what_a_full_run_needs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    with pytest.raises(ValueError, match=r"--rows .* cannot be measured: it needs --language-model"):
        reproduce.run("faithfulness", extra=["--rows", "language model plain"], out=tmp_path)
