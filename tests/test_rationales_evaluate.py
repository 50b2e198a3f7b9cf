"""Rationales of classifiers: planted words are found, what does not apply says so, bad input is named."""

from __future__ import annotations

import json
import math
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers.processors import TemplateProcessing
from torch import nn

import overt
from overt.data.eraser import Example
from overt.judge.rationales import METHODS, evaluate
from overt.judge.rationales.methods import Scorer
from overt.judge.rationales.words import WordClassifier
from overt.tracing.methods import gradients
from small_rationales import Planted, small_rationale
from small_text import WORDS, small_bert
from writing import byte_tokenizer

pytest.importorskip("lime", reason="needs the extra rationales")
pytest.importorskip("captum", reason="needs the extra rationales")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    small_bert(path, max_position_embeddings=48)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def planted(tokenizer: Any) -> Planted:
    return Planted(tokenizer, {"good": 2.0, "nice": 1.5, "dull": -0.3}).eval()


TEXT = "plot good film dull scene nice actor plot"
MARKED = [[0, 1, 0, 0, 0, 1, 0, 0]]


def test_methods_that_ask_the_classifier_find_the_planted_words(planted: Any, tokenizer: Any) -> None:
    found = evaluate(
        planted,
        tokenizer,
        [TEXT],
        MARKED,
        ["blankout", "gradient-input", "integrated", "lime", "random", "raw", "value-zeroing", "pooling"],
        labels=[1],
        scores={"the other way round": [[-1.0, -9.0, -1.0, 0.0, -1.0, -8.0, -1.0, -1.0]]},
    )
    for method in ("blankout", "gradient-input", "integrated", "lime"):
        measures, (scores,) = found.methods[method].measures, found.methods[method].scores
        assert np.argsort(-scores)[:2].tolist() == [1, 5], method
        assert measures["auprc"] == measures["average_precision"] == measures["token_f1"] == 1, method
        slack = 0.1 if method == "lime" else 1e-6  # its negative weights are cut to 0
        assert measures["normalised_comprehensiveness"] == pytest.approx(1, abs=slack), method
        assert measures["normalised_sufficiency"] == pytest.approx(0, abs=slack), method
    worst = found.methods["the other way round"].measures
    assert worst["normalised_comprehensiveness"] == pytest.approx(0)
    assert worst["comprehensiveness"] < found.methods["random"].measures["comprehensiveness"]  # type: ignore[operator]
    assert set(found.refused) == {"raw", "value-zeroing", "pooling"}
    assert "Planted has no attention that pools" in found.refused["pooling"]
    assert found.performance == {"accuracy": 1, "macro F1": 1}
    assert found.share == 0.25
    table = str(found)
    assert "pooling attention" in table
    assert "–" in table
    assert json.loads(json.dumps(found.to_dict()))["methods"]["lime"]["texts"] == 1


def test_integrated_gradients_of_windows_do_not_depend_on_how_many_are_in_a_pass(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_rationale(tmp_path, window=8)
    windows: list[int] = []

    def count(_module: nn.Module, _args: Any, output: Any) -> None:
        if torch.is_grad_enabled():  # not where words are deleted
            windows.append(len(output[0]))

    model.encoder.register_forward_hook(count)

    def found() -> tuple[Any, int]:
        windows.clear()
        scores = evaluate(model, tokenizer, [TEXT], methods=["integrated"], shares=(0.5,)).methods
        return scores["integrated"].scores[0], max(windows)

    scores, most = found()
    assert most > 12
    monkeypatch.setattr(gradients, "TOKENS", 6 * 8)
    again, most = found()
    assert most <= 6
    np.testing.assert_allclose(again, scores, rtol=1e-4, atol=1e-6)


def test_deleted_words_are_deleted_and_not_masked(planted: Any, tokenizer: Any) -> None:
    found = evaluate(
        planted, tokenizer, [TEXT], methods=[], scores={"true": [[0, 9, 0, -1, 0, 8, 0, 0]]}, shares=(0.25,)
    )
    logit = 2.0 + 1.5 - 0.3

    def p(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    measures = found.methods["true"].measures
    assert measures["comprehensiveness"] == pytest.approx(p(logit) - p(-0.3))
    assert measures["sufficiency"] == pytest.approx(p(logit) - p(3.5))
    assert measures["log_odds"] == pytest.approx(math.log(p(-0.3) / p(logit)))
    assert measures["auprc"] is None, "without rationales the faithful half"
    assert found.share == 0.2


@pytest.mark.parametrize("query", ["", "film good"])
def test_a_text_without_some_words_is_tokenized_as_if_written_so(
    tokenizer: Any, folder: Path, query: str
) -> None:
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    classifier = WordClassifier(model, tokenizer)
    text = classifier.read(TEXT, query)
    kept = np.array([1, 0, 1, 1, 0, 0, 1, 0], dtype=bool)
    written = " ".join(word for word, keep in zip(TEXT.split(), kept, strict=True) if keep)
    expected = tokenizer(written, query) if query else tokenizer(written)
    coded = classifier.code(text, kept)
    assert coded.arguments == dict(expected)
    assert [place for place in coded.places if place >= 0] == np.flatnonzero(kept).tolist()
    with torch.no_grad():
        logits = model.eval()(**expected.convert_to_tensors("pt", prepend_batch_axis=True)).logits
    both = np.stack([np.ones(8, dtype=bool), kept])
    np.testing.assert_allclose(classifier.probabilities(text, both)[1], logits.softmax(-1)[0], atol=1e-6)


@pytest.mark.parametrize("query", ["", "the code"])
@pytest.mark.parametrize("first", ["[none]", "<|system|>"])
def test_words_keep_the_space_before_them_where_the_tokenizer_does(query: str, first: str) -> None:
    tokenizer = byte_tokenizer(pad_token="<|end|>")
    if first != "[none]":  # a pair is text, query
        number = tokenizer.convert_tokens_to_ids(first)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, number)]
        )
    model: Any = nn.Module()
    model.config = SimpleNamespace(num_labels=2, max_position_embeddings=128)
    classifier = WordClassifier(model, tokenizer)
    words = ["The", "code", "of", "the", "vault", "is", "safe!"]
    text = classifier.read(words, query)
    for kept in product([False, True], repeat=len(words)):
        written = " ".join(word for word, keep in zip(words, kept, strict=True) if keep)
        expected = tokenizer(written, query) if query else tokenizer(written)
        coded = classifier.code(text, np.array(kept))
        nothing = [tokenizer.eos_token_id]  # a text of no tokens is none
        assert coded.arguments["input_ids"] == (expected["input_ids"] or nothing), written
        assert set(coded.places) - {-1} == set(np.flatnonzero(kept).tolist())


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_a_text_of_which_nothing_is_left_reads_alike_alone_and_beside_others(kind: str) -> None:
    tokenizer = byte_tokenizer(pad_token="<|end|>")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 290}
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(**sizes, pad_token_id=0, num_labels=2)
    model = getattr(hf, f"{kind}ForSequenceClassification")(config).eval()
    classifier = WordClassifier(model, tokenizer)
    text = classifier.read("the code of the vault")
    kept = np.array([[False] * 5, [True] * 5])
    alone = classifier.probabilities(text, kept[:1])
    np.testing.assert_allclose(classifier.probabilities(text, kept)[:1], alone, atol=1e-6)


def test_no_part_of_a_text_is_longer_than_the_model_takes() -> None:
    tokenizer = byte_tokenizer(pad_token="<|end|>")
    lengths = [len(tokenizer(word)["input_ids"]) for word in ("code", " code")]
    assert lengths[0] > lengths[1], "the test is of words that are longer without the space before them"
    for limit in range(lengths[0], 12):
        model: Any = nn.Module()
        model.config = SimpleNamespace(num_labels=2, max_position_embeddings=limit)
        classifier = WordClassifier(model, tokenizer)
        text = classifier.read("is code code code code code")
        parts = [
            classifier.code(text, np.array(kept)) for kept in product([False, True], repeat=len(text.words))
        ]
        assert max(len(part.places) for part in parts) <= limit


def few(mechanisms: list[Any], folder: Path) -> Any:
    model = small_rationale(folder, window=16)
    return overt.attach(model, *mechanisms) if mechanisms else model


LONG = " ".join(WORDS[number % 7] for number in range(33))


@pytest.mark.parametrize("mechanisms", [[], [overt.Evolving()]], ids=["plain", "Evolving"])
def test_every_method_scores_every_word_of_texts_longer_than_the_encoder(
    tmp_path: Path, tokenizer: Any, mechanisms: list[Any]
) -> None:
    model = few(mechanisms, tmp_path)
    found = evaluate(model, tokenizer, [LONG], [[(0, 3)]], samples=20, queries=["film"], points=3)
    refused = {"value-zeroing"} if mechanisms else set()
    assert set(found.refused) == refused
    assert list(found.methods) == [method for method in METHODS if method not in refused]
    for method, rationales in found.methods.items():
        (scores,) = rationales.scores
        assert scores.shape == (33,)
        assert method == "lime" or (scores != 0).all(), f"{method} reaches all windows"
    assert found.cut == 0
    if mechanisms:
        assert "Evolving reads the layer below it" in found.refused["value-zeroing"]


def test_weights_that_the_class_does_not_depend_on_have_no_gradient_to_show(
    tmp_path: Path, tokenizer: Any
) -> None:
    model = few([], tmp_path)
    names = ["raw/gradient", "rollout/gradient", "rollout/relevance"]
    found = evaluate(model, tokenizer, [LONG], methods=[*names, "rollout"], points=2)
    assert list(found.methods) == ["rollout"]
    assert {found.refused[name] for name in names} == {
        "RationaleClassifier classifies by its words' states, not by the first token's, whose weights have "
        "no gradient in the last layer"
    }
    # It is so: what the last layer makes of a window's first token can be anything.
    classifier = WordClassifier(model, tokenizer)
    coded = classifier.batch([classifier.code(classifier.read(LONG)).arguments])
    with torch.no_grad():
        before = model(**coded).logits
        last = model.encoder.encoder.layer[-1]
        hook = last.register_forward_hook(
            lambda _layer, _given, out: out.index_fill(1, torch.tensor([0]), 9.0)
        )
        after = model(**coded).logits
        hook.remove()
    torch.testing.assert_close(after, before, atol=0.0, rtol=0.0)


def test_gradients_through_windows_are_those_of_small_steps(tmp_path: Path, tokenizer: Any) -> None:
    from overt.judge.rationales.methods import Scorer

    model = few([], tmp_path).double()
    classifier = WordClassifier(model, tokenizer)
    text = classifier.read(LONG)
    scores = Scorer(classifier, 0.2).scores("gradient-input", text)
    coded = classifier.batch([classifier.code(text).arguments])
    places = np.array(classifier.code(text).places)
    embeddings = model.encoder.embeddings.word_embeddings
    with torch.no_grad():
        label = int(model(**coded).logits.argmax())
        for word in (0, 20):
            change: list[float] = []
            for step in (1e-4, -1e-4):
                place = int(np.flatnonzero(places == word)[0])

                def nudged(_: Any, args: Any, output: Any, step: float = step, place: int = place) -> Any:
                    moved = output.clone().view(-1, output.shape[-1])
                    moved[place] *= 1 + step
                    return moved.view_as(output) if args[0].numel() == len(places) else None

                handle = embeddings.register_forward_hook(nudged)
                change.append(float(model(**coded).logits.softmax(-1)[0, label]))
                handle.remove()
            assert scores[word] == pytest.approx((change[0] - change[1]) / 2e-4, rel=1e-3, abs=1e-9)


def test_what_an_earlier_call_has_measured_is_taken_as_it_is_and_checked(
    planted: Any, tokenizer: Any
) -> None:
    texts, methods = [TEXT, "plot good"], ["gradients", "pooling", "random"]
    before: dict[str, Any] = {}
    whole = evaluate(planted, tokenizer, texts, methods=methods, done=before.__setitem__)
    assert list(before) == methods
    told: list[str] = []
    known = {name: before[name] for name in ("gradients", "pooling")}
    again = evaluate(
        planted, tokenizer, texts, methods=methods, known=known, done=lambda name, _: told.append(name)
    )
    assert told == ["random"]
    assert again.methods["gradients"] is before["gradients"]
    assert again.refused == whole.refused
    assert list(again.methods) == list(whole.methods)
    assert again.methods["random"].measures == whole.methods["random"].measures
    for wrong, message in (
        ({"gradient": before["gradients"]}, "known must be one of .*; got 'gradient'"),
        (
            {"random": before["gradients"]},
            r"known\['random'\] must be .*, got those of gradients",
        ),
        ({"gradients": {"texts": 2}}, r"known\['gradients'\] must be its Rationales, or why"),
        (["gradients"], r"known must be a mapping from names, got \['gradients'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(planted, tokenizer, texts, methods=methods, known=wrong)
    with pytest.raises(ValueError, match=r"known\['gradients'\] must have a number for each word"):
        evaluate(planted, tokenizer, texts[:1], methods=methods, known=known)


def test_texts_that_are_too_long_are_cut_and_counted(tokenizer: Any, folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    texts = [f"{LONG} {LONG}", "plot good"]
    marked = [[0] * 65 + [1], [0, 1]]
    found = evaluate(model, tokenizer, texts, marked, ["gradients"], points=2, at_most={"gradients": 5})
    assert found.cut == 1
    assert found.unmarked == 1, "its only marked word is beyond the cut"
    assert [len(scores) for scores in found.methods["gradients"].scores] == [46, 2]
    examples = [Example(str(n), tuple(text.split()), 0, ()) for n, text in enumerate(texts)]
    found.write(tmp_path / "out.jsonl", "gradients", "movies", examples)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(row["rationales"][0]["soft_rationale_predictions"]) for row in rows] == [66, 2]
    with pytest.raises(ValueError, match="examples must be the 2 texts that were judged, got 1"):
        found.write(tmp_path / "out.jsonl", "gradients", "movies", examples[:1])
    with pytest.raises(ValueError, match=r"examples must be overt\.data\.eraser\.Example, got 'good'"):
        found.write(tmp_path / "out.jsonl", "gradients", "movies", ["good", "bad"])


def test_texts_are_cut_to_the_positions_that_are_left_beside_padding(folder: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)  # which knows of no limit
    tokenizer.model_max_length = int(1e30)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = hf.RobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=20, pad_token_id=tokenizer.pad_token_id, **sizes
    )
    classifier = WordClassifier(hf.RobertaForSequenceClassification(config).eval(), tokenizer)
    text = classifier.read(LONG)
    assert len(classifier.code(text).places) == 20 - 1 - tokenizer.pad_token_id
    assert classifier.probabilities(text, np.ones((1, len(text.words)), dtype=bool)).shape == (1, 2)


def test_slow_methods_may_see_some_of_the_texts_and_progress_is_told(
    planted: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["good plot", "nice film", "dull scene", "good actor", "bad plot"]
    found = evaluate(planted, tokenizer, texts, methods=["blankout"], at_most={"blankout": 3}, progress=True)
    assert found.methods["blankout"].texts == [0, 2, 4]
    assert "rationales: blank-out, 3 of 3 texts" in capsys.readouterr().err
    evaluate(planted, tokenizer, texts, methods=["random"])
    assert capsys.readouterr().err == "", "not on a terminal"


def test_random_scores_do_not_depend_on_the_other_texts(planted: Any, tokenizer: Any) -> None:
    both = evaluate(
        planted, tokenizer, ["good plot film", TEXT], methods=["random", "lime"], samples=30, seed=3
    )
    alone = evaluate(planted, tokenizer, [TEXT], methods=["random", "lime"], samples=30, seed=3)
    for method in ("random", "lime"):
        np.testing.assert_array_equal(both.methods[method].scores[1], alone.methods[method].scores[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"texts": []}, "texts must have at least one text"),
        ({"texts": [""]}, "text 0: must have words, got ''"),
        ({"texts": ["good", " "], "names": ["a", "b"]}, "text b: must have words"),
        ({"rationales": [[0, 1]]}, "document 0: its rationale must have 8 words, got 2"),
        ({"rationales": [[0, 1, 0, 2, 0, 0, 0, 0]]}, "document 0: truth must hold 0 and 1 alone, got 2"),
        ({"rationales": [[(3, 9)]]}, "document 0 of 8 words: a span must lie within it, got 3 to 9"),
        ({"rationales": {"x": [(3, 4)]}}, "rationales has a document 'x', which is none of the texts"),
        ({"rationales": [[(0, 1)], [(0, 1)]]}, "rationales must be 1, one for each text, got 2"),
        ({"methods": ["shap"]}, "methods must be one of 'pooling', "),
        ({"scores": {"own": [[0.0, math.nan] + [0.0] * 6]}}, "document 0: scores must be finite, got nan"),
        ({"scores": {"own": [[0.0]]}}, "document 0: scores must have one number for each of its 8 words"),
        ({"scores": {"own": []}}, r"scores\['own'\] must be 1, one list for each text, got 0"),
        ({"labels": [3]}, "labels must be at most 1, got 3"),
        ({"labels": [0, 1]}, "labels must be 1, one for each text, got 2"),
        ({"share": 2.0}, r"share must lie in \[0, 1\], got 2"),
        ({"texts": TEXT}, "texts must be a list, got 'plot good"),
        ({"texts": [5]}, "text 0: must be text or a list of words, got 5"),
        ({"queries": "ab"}, "queries must be a list, got 'ab'"),
        ({"queries": [None]}, "text 0: its query must be text, empty for none, got None"),
        ({"methods": "lime"}, "methods must be a list, got 'lime'"),
        ({"rationales": [None]}, "document 0: its rationale must have 0 or 1 for each word, or .*got None"),
        (
            {"dtype": "float16"},
            "dtype must be a type of floats such as torch.float16, or None, got 'float16'",
        ),
        (
            {"scores": {"random": [[0.0] * 8]}},
            "scores must have names that are no method's of this run, got 'random'",
        ),
        ({"scores": {3: [[0.0] * 8]}}, "scores must be a mapping from names, which are text, got 3"),
        ({"texts": [TEXT, TEXT], "names": ["a", "a"]}, "names must differ, and 'a' is the name of 2 texts"),
        ({"methods": []}, "methods must name at least one of .*random.*, got none"),
        ({"at_most": {"blankut": 3}}, "at_most must be one of .*; got 'blankut'"),
        ({"shares": ()}, "shares must have at least one share, got none"),
        ({"shares": (0.1, 2.0)}, r"shares must lie in \[0, 1\], got 2"),
        ({"texts": {"a": TEXT}}, "texts must be a list, got {'a': 'plot good"),
        ({"texts": {TEXT}}, "texts must be a list, got {'plot good"),
        ({"texts": iter([TEXT])}, "texts must be a list, got <list_iterator"),
        ({"texts": None}, "texts must be a list, got None"),
        ({"labels": {"0": 1}}, "labels must be a list, got {'0': 1}"),
        ({"rationales": iter(MARKED)}, "rationales must be a list, or a mapping from names .*<list_iterator"),
        ({"rationales": [{1, 2}]}, "document 0: its rationale must have 0 or 1 .*got {1, 2}"),
        ({"rationales": [{"start": 1}]}, "document 0: its rationale must have 0 or 1 .*got {'start': 1}"),
        ({"rationales": [[(1, 2), 5]]}, "document 0: a span must be two whole numbers, got 5"),
        ({"rationales": [[(1.5, 2.7)]]}, r"document 0: a span must be two whole numbers, got \(1.5, 2.7\)"),
        ({"scores": [[0.0] * 8]}, r"scores must be a mapping from names, got \[\[0.0"),
        (
            {"scores": {"own": 3}},
            r"scores\['own'\] must be a list with a list of numbers for each text, got 3",
        ),
        (
            {"scores": {"own": [["a"] * 8]}},
            "document 0: scores must be numbers, one for each of its 8 words, got",
        ),
        ({"at_most": 3}, "at_most must be a mapping from names, got 3"),
        ({"seed": 0.5}, "seed must be a whole number of at least 0, got 0.5"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"share": 0.0, "methods": ["lime"]}, "share must be positive"),
        ({"samples": 1}, "samples must be .*at least 2, got 1"),
        ({"at_most": {"random": 0}}, r"at_most\['random'\] must be .*at least 1, got 0"),
    ],
)
def test_bad_input_is_named(planted: Any, tokenizer: Any, arguments: dict[str, Any], message: str) -> None:
    given = {"texts": [TEXT], "methods": ["random"], **arguments}
    with pytest.raises(ValueError, match=message):
        evaluate(planted, tokenizer, **given)


@pytest.mark.parametrize("labels", [["good"], [3], [None]])
def test_bad_labels_are_named_before_anything_takes_long(planted: Any, tokenizer: Any, labels: Any) -> None:
    done = []
    with pytest.raises(ValueError, match="labels must be"):
        evaluate(
            planted, tokenizer, [TEXT], methods=["random"], labels=labels, done=lambda *own: done.append(own)
        )
    assert done == []


def test_rationales_may_be_tensors_arrays_or_belong_to_names_that_are_numbers(
    planted: Any, tokenizer: Any
) -> None:
    given: list[Any] = [MARKED, torch.tensor(MARKED), np.array(MARKED), [[(1, 2), (5, 6)]], {7: MARKED[0]}]
    given.append([torch.tensor([[1, 2], [5, 6]])])
    found = [
        evaluate(planted, tokenizer, [TEXT], each, ["random"], names=[7]).methods["random"].measures
        for each in given
    ]
    assert all(measures == found[0] for measures in found)


def test_texts_without_a_rationale_are_counted_below_the_table(planted: Any, tokenizer: Any) -> None:
    found = evaluate(planted, tokenizer, [TEXT, "good plot"], [*MARKED, []], ["random"])
    assert found.unmarked == 1
    assert "1 of 2 texts have no rationale, and count for faithfulness alone" in str(found)


def test_searching_for_the_best_order_of_words_tells_how_far_it_is(planted: Any, tokenizer: Any) -> None:
    texts = [LONG.rsplit(maxsplit=19)[0], TEXT, LONG]  # a beam, all orders, and none
    told: list[tuple[str, int, int]] = []
    evaluate(planted, tokenizer, texts, methods=["random"], points=2, progress=lambda *own: told.append(own))
    slow = [own for own in told if "one by one" in own[0]]
    assert list(dict.fromkeys(slow)) == [("random, deleting words one by one", place, 3) for place in (1, 2)]


def test_models_that_cannot_be_judged_are_named(planted: Any, tokenizer: Any) -> None:
    one = Planted(tokenizer, {})
    one.config.num_labels = 1
    with pytest.raises(ValueError, match="at least two classes, got Planted with 1"):
        evaluate(one, tokenizer, [TEXT])
    numbers = Planted(tokenizer, {})
    numbers.config.problem_type = "regression"
    with pytest.raises(ValueError, match="must be a classifier, got Planted for regression"):
        evaluate(numbers, tokenizer, [TEXT])
    pair = Planted(tokenizer, {})
    pair.config.is_encoder_decoder = True
    with pytest.raises(ValueError, match="Planted is an encoder–decoder"):
        evaluate(pair, tokenizer, [TEXT])
    encoder = SimpleNamespace(last_hidden_state=None)
    pair.config.is_encoder_decoder = False
    pair.forward = lambda **_: encoder  # type: ignore[assignment]
    with pytest.raises(ValueError, match="model must return logits, as a classifier does; Planted returns"):
        evaluate(pair, tokenizer, [TEXT], methods=["random"])
    labels = Planted(tokenizer, {})
    labels.config.problem_type = "multi_label_classification"
    with pytest.raises(ValueError, match="must give each text one class, got Planted for several labels"):
        evaluate(labels, tokenizer, [TEXT])
    with pytest.raises(ValueError, match="tokenizer must be a fast one"):
        evaluate(planted, SimpleNamespace(is_fast=False), [TEXT])


class ReadsPadding(Planted):
    """A classifier that takes padding for words."""

    def forward(self, input_ids: Any, attention_mask: Any, token_type_ids: Any = None) -> Any:
        return super().forward(input_ids, torch.ones_like(attention_mask), token_type_ids)


def test_a_model_that_reads_padding_is_refused(tokenizer: Any) -> None:
    """Texts with fewer words have more of it in a batch, so that every measure would be of the padding."""
    with pytest.raises(
        ValueError, match=r"model must not read padding, but probabilities .* differ by 0\.48"
    ):
        evaluate(ReadsPadding(tokenizer, {"good": 1.0, "[PAD]": 0.5}), tokenizer, [TEXT], methods=["random"])
    evaluate(Planted(tokenizer, {"good": 1.0, "[PAD]": 0.5}), tokenizer, [TEXT], methods=["random"])


def bare_tokenizer(tokenizer: Any) -> Any:
    """One that puts no special tokens around texts, as those of causal models."""
    from tokenizers.processors import Sequence
    from transformers import PreTrainedTokenizerFast

    inner = tokenizer.backend_tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    inner.post_processor = Sequence([])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize("pad", [0, 5])
def test_a_causal_classifier_reads_padded_texts_as_it_reads_them_alone(tokenizer: Any, pad: int) -> None:
    """It finds a text's last token by the config's padding, which need not be the tokenizer's."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20, "initializer_range": 0.5}
    config = GPT2Config(vocab_size=len(tokenizer), num_labels=2, pad_token_id=pad, **sizes)  # type: ignore[arg-type]
    model = GPT2ForSequenceClassification(config).eval()
    bare = bare_tokenizer(tokenizer)
    classifier = WordClassifier(model, bare)
    text = classifier.read("plot good film nice scene")
    kept = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=bool)
    together = classifier.probabilities(text, kept)
    for row, own in zip(kept[:3], together, strict=False):
        ids = torch.tensor(
            [bare.convert_tokens_to_ids([w for w, k in zip(text.words, row, strict=True) if k])]
        )
        with torch.no_grad():
            np.testing.assert_allclose(own, model(input_ids=ids).logits.softmax(-1)[0], atol=1e-6)
    alone = classifier.probabilities(text, kept[3:])[0]
    np.testing.assert_allclose(together[3], alone, atol=1e-6, err_msg="a text without words")


def test_a_causal_classifiers_map_is_read_at_its_last_token(tokenizer: Any) -> None:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20, "initializer_range": 0.5}
    config = GPT2Config(vocab_size=len(tokenizer), num_labels=2, pad_token_id=0, **sizes)  # type: ignore[arg-type]
    model = GPT2ForSequenceClassification(config).eval()
    bare = bare_tokenizer(tokenizer)
    found = evaluate(model, bare, ["plot good film"], methods=["raw"], points=2)
    model.set_attn_implementation("eager")
    ids = torch.tensor([bare.convert_tokens_to_ids(["plot", "good", "film"])])
    with torch.no_grad():
        weights = model(input_ids=ids, output_attentions=True).attentions[-1][0].mean(dim=0)
    np.testing.assert_allclose(found.methods["raw"].scores[0], weights[-1], atol=1e-6)


def test_a_words_score_is_the_sum_over_its_pieces_and_a_word_is_deleted_whole() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##for", "##gett", "##able", "film", "so"]
    inner = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), pieces, strict=False))
    own = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = BertConfig(vocab_size=10, initializer_range=0.5, **sizes)  # type: ignore[arg-type]
    model = BertForSequenceClassification(config).eval()

    def p(ids: list[int]) -> Any:
        with torch.no_grad():
            return model(input_ids=torch.tensor([[2, *ids, 3]])).logits.double().softmax(-1)[0].numpy()

    text, ids = "so unforgettable film", [9, 4, 5, 6, 7, 8]
    found = evaluate(model, own, [text], methods=["blankout"], scores={"own": [[1, 9, 0]]}, shares=(0.3,))
    full = p(ids)
    label = full.argmax()
    effects = [(full - p([*ids[:place], 1, *ids[place + 1 :]]))[label] for place in range(6)]
    expected = [effects[0], sum(effects[1:5]), effects[5]]
    np.testing.assert_allclose(found.methods["blankout"].scores[0], expected, atol=1e-6)
    measures = found.methods["own"].measures
    assert measures["comprehensiveness"] == pytest.approx((full - p([9, 8]))[label], abs=1e-6)
    assert measures["sufficiency"] == pytest.approx((full - p(ids[1:5]))[label], abs=1e-6)


def test_maps_and_gradients_are_read_in_the_models_own_type(tokenizer: Any, folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    names = ["rollout", "flow", "gradients", "gradient-input", "integrated"]
    one, other = (
        evaluate(model, tokenizer, [TEXT], methods=names, points=2, dtype=dtype)
        for dtype in (None, torch.bfloat16)
    )
    for name in names:
        pair = (each.methods[name].scores[0] for each in (one, other))
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=0, err_msg=name)  # bfloat16 has 3 digits


def test_robertas_first_positions_are_not_for_words(tokenizer: Any) -> None:
    from transformers import RobertaConfig, RobertaForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=22, pad_token_id=1, **sizes)  # type: ignore[arg-type]
    model = RobertaForSequenceClassification(config)
    found = evaluate(model, tokenizer, [LONG], methods=["rollout"], points=2)
    assert [len(scores) for scores in found.methods["rollout"].scores] == [18], "22 − 2 − CLS and SEP"
    assert found.cut == 1
    with pytest.raises(ValueError, match="the input has 21 tokens, but the model has positions for 20"):
        overt.trace(model, {"input_ids": torch.full((1, 21), 5)})


def test_a_tokenizer_with_more_words_than_the_model_is_named(tokenizer: Any) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=9, **sizes))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="text 0: ids of the tokenizer must lie in 0 to 8, got 13"):
        evaluate(model, tokenizer, [TEXT], methods=["random"])


@pytest.mark.parametrize(("method", "module"), [("lime", "lime.lime_text"), ("integrated", "captum.attr")])
def test_a_missing_package_is_named_with_its_extra(
    planted: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, method: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=rf"{module} is required .*overt\[rationales\]"):
        evaluate(planted, tokenizer, [TEXT], methods=[method])


def test_faithfulness_is_that_of_ferret(folder: Path, tokenizer: Any) -> None:
    """ferret deletes tokens, which are whole words here; it rounds shares down and we round up."""
    reason = "needs ferret-xai, which asks for transformers below 5"
    measures = pytest.importorskip("ferret.evaluators.faithfulness_measures", reason=reason)
    explanation = pytest.importorskip("ferret.explainers.explanation", reason=reason)
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores, shares = [0.3, 0.9, 0.1, 0.2, 0.5, 0.8, 0.4, 0.6], (0.25, 0.5)
    with torch.no_grad():
        target = int(model(**tokenizer(TEXT, return_tensors="pt")).logits.argmax())
    theirs = explanation.Explanation(TEXT, TEXT.split(), np.array(scores), "own", target)
    options = {"removal_args": {"based_on": "perc", "thresholds": shares}}
    ours = evaluate(model, tokenizer, [TEXT], methods=[], scores={"own": [scores]}, shares=shares)
    for name, kind in (
        ("comprehensiveness", measures.AOPC_Comprehensiveness_Evaluation),
        ("sufficiency", measures.AOPC_Sufficiency_Evaluation),
    ):
        expected = kind(model, tokenizer).compute_evaluation(theirs, target=target, **options).score
        assert ours.methods["own"].measures[name] == pytest.approx(expected, abs=1e-6), name


def test_passages_that_touch_are_one_if_marked_and_several_if_given_so(planted: Any, tokenizer: Any) -> None:
    own = {"own": [[0, 9, 8, 0, 0, 0, 0, 0]]}
    marked, given = (
        evaluate(planted, tokenizer, [TEXT], [truth], [], scores=own, share=0.25).methods["own"].measures
        for truth in ([0, 1, 1, 0, 0, 0, 0, 0], [(1, 2), (2, 3)])
    )
    assert marked["token_f1"] == given["token_f1"] == marked["iou_f1"] == 1
    assert given["iou_f1"] == pytest.approx(2 / 3), "one passage of two words matches one of the two"


@pytest.mark.parametrize("words", [1, 3, 14, 40])
def test_lime_is_that_of_its_package_over_positions(planted: Any, tokenizer: Any, words: int) -> None:
    from lime.lime_text import LimeTextExplainer

    from overt.judge.rationales.deleting import count_of
    from overt.judge.rationales.methods import Scorer, seed_of

    classifier = WordClassifier(planted, tokenizer)
    text = classifier.read((f"{TEXT} " * 5).split()[:words])

    def predict(texts: list[str]) -> Any:
        kept = np.zeros((len(texts), words), dtype=bool)
        for row, each in enumerate(texts):
            kept[row, [int(word) for word in each.split() if word.isdecimal()]] = True
        return classifier.probabilities(text, kept)

    drawn = np.random.RandomState(seed_of(3, text))
    explainer = LimeTextExplainer(split_expression=" ", bow=False, random_state=drawn)
    label = int(predict([" ".join(map(str, range(words)))])[0].argmax())
    explained = explainer.explain_instance(
        " ".join(map(str, range(words))),
        predict,
        labels=(label,),
        num_features=2 * count_of(0.2, words),
        num_samples=60,
    )
    expected = np.zeros(words)
    for place, weight in explained.as_map()[label]:
        expected[place] = max(0.0, weight)
    scores = Scorer(classifier, 0.2, seed=3, samples=60).scores("lime", text)
    np.testing.assert_allclose(scores, expected, atol=1e-9)
    assert words == 1 or scores.any()


@pytest.mark.parametrize("mechanisms", [[], [overt.Evolving()]], ids=["plain", "Evolving"])
def test_texts_that_are_read_together_are_those_that_are_read_alone(
    tmp_path: Path, tokenizer: Any, mechanisms: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from overt.judge.rationales import words

    model = few(mechanisms, tmp_path)
    classifier = WordClassifier(model, tokenizer)
    random = np.random.default_rng(0)
    asked = []
    for name, count in enumerate((3, 33, 20)):
        text = classifier.read(LONG.split()[:count], "film", str(name))
        kept = random.random((6, count)) < random.random((6, 1))
        kept[0], kept[1], kept[5] = True, False, kept[2]
        asked.append((text, kept))
    runs = []
    monkeypatch.setattr(words, "READ_FEW", 100)  # several passes
    monkeypatch.setattr(words, "FEW", 40)
    together = classifier.ask(asked, lambda *told: runs.append(told))
    distinct = sum(len({row.tobytes() for row in kept}) for _, kept in asked)
    assert distinct < 18
    assert runs[-1] == (distinct, distinct), "equal sets of a text run once"
    assert len(runs) > 2
    for (text, kept), found in zip(asked, together, strict=True):
        for row, own in zip(kept, found, strict=True):
            with torch.no_grad():
                alone = model(**classifier.batch([classifier.code(text, row).arguments])).logits
            np.testing.assert_allclose(own, alone.softmax(-1)[0], atol=1e-6)


def test_windows_that_are_alike_are_encoded_once_and_without_padding(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overt.models import rationale

    monkeypatch.setattr(rationale, "MULTIPLE", 1)
    model = few([], tmp_path)
    classifier = WordClassifier(model, tokenizer)
    text = classifier.read(LONG)  # three windows of 16: the first two are alike, the last has 8 tokens
    coded = classifier.batch([classifier.code(text).arguments] * 4)
    coded["input_ids"][1:, 3] = tokenizer.unk_token_id  # in the first window
    shapes = []
    model.encoder.register_forward_hook(
        lambda _module, _args, kwargs, _output: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    with torch.no_grad():
        expected = model(**coded)
    found = rationale.InParts(model, 32)(**coded)
    assert shapes == [(12, 16), (2, 16), (1, 8)]
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.pooling, expected.pooling, atol=1e-6, rtol=0)


def test_products_may_be_of_a_shorter_type_and_probabilities_stay_close(
    tmp_path: Path, tokenizer: Any
) -> None:
    from transformers import AutoModelForSequenceClassification

    small_bert(tmp_path / "plain", max_position_embeddings=48)
    own: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    for model in (few([], tmp_path), own.eval()):
        found = [
            evaluate(model, tokenizer, [TEXT], methods=["blankout"], points=2, dtype=dtype)
            for dtype in (None, torch.bfloat16)
        ]
        one, other = (each.methods["blankout"].predictions[0].without for each in found)
        assert not np.array_equal(one, other)
        np.testing.assert_allclose(one, other, atol=0.02)


def test_progress_may_be_told_to_a_function(planted: Any, tokenizer: Any) -> None:
    told = []
    evaluate(
        planted,
        tokenizer,
        ["good plot", "nice film"],
        methods=["random"],
        progress=lambda *told_of: told.append(told_of),
    )
    assert told[:2] == [("random", 1, 2), ("random", 2, 2)]
    assert ("random, deleting words", 2, 2) in told
    assert told[-1] == ("random, deleting words one by one", 2, 2)


def test_the_line_on_a_terminal_begins_with_the_first_text_that_is_done(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from overt.judge.rationales.evaluation import _Telling

    with _Telling(True) as tell:
        tell("random, deleting words", 0, 2)
        assert capsys.readouterr().err == ""
        tell("random, deleting words", 1, 2)
        assert "1 of 2 texts" in capsys.readouterr().err


def test_an_exported_file_has_what_the_chosen_words_do(planted: Any, tokenizer: Any, tmp_path: Path) -> None:
    own = {"own": [[0, 9, 0, -1, 0, 8, 0, 0]]}
    found = evaluate(planted, tokenizer, [TEXT], methods=[], scores=own, share=0.25)
    found.write(tmp_path / "out.jsonl", "own", "movies", [Example("0", tuple(TEXT.split()), 1, ())])
    row = json.loads((tmp_path / "out.jsonl").read_text())
    without, only = (
        row[f"{name}_classification_scores"]["POS"] for name in ("comprehensiveness", "sufficiency")
    )
    assert without == pytest.approx(1 / (1 + math.exp(0.3)))
    assert only == pytest.approx(1 / (1 + math.exp(-3.5)))


def test_gradients_of_a_recurrent_network_need_no_other_kernels(tmp_path: Path) -> None:
    """cuDNN refuses a backward pass in evaluation mode, and is slow to do without."""
    from overt.tracing.methods.gradients import _backward

    model = few([], tmp_path)
    with _backward(model):
        assert torch.backends.cudnn.enabled
        assert [type(module).__name__ for module in model.modules() if module.training] == ["LSTM", "LSTM"]
    assert not any(module.training for module in model.modules())
    with _backward(nn.LSTM(2, 2, num_layers=2, dropout=0.5).eval()):
        assert not torch.backends.cudnn.enabled, "its training mode would draw dropout"
    assert torch.backends.cudnn.enabled


def test_a_text_without_finite_scores_is_left_out_of_its_method_alone(
    planted: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["good film", "dull film plot", "nice actor"]
    own = Scorer._random

    def sometimes(self: Any, text: Any) -> Any:
        return np.full(len(text.words), np.nan) if text.name in broken else own(self, text)

    monkeypatch.setattr(Scorer, "_random", sometimes)
    broken = {"0"}
    found = evaluate(planted, tokenizer, texts, methods=["random", "blankout"])
    assert found.methods["random"].texts == [1, 2]
    assert found.methods["blankout"].texts == [0, 1, 2]
    assert found.table("comprehensiveness")[0] == [1, 2]
    broken = {"0", "1", "2"}
    found = evaluate(planted, tokenizer, texts, methods=["random", "blankout"])
    assert found.refused == {"random": "random gives scores that are not finite, for text 0"}
