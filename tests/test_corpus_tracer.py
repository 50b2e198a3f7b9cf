"""Tracer: columns of a batch of texts, the same in every process."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import networkx
import numpy as np
import pytest
import torch

import overt
from fresh import fresh
from overt.corpus import tracer as tracer_module
from small_corpora import TEXTS, small_causal_classifier, small_classifier, small_language_model
from small_text import small_bert


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_language_model(tmp_path_factory.mktemp("language model"))


def maps_of(path: str, text: str) -> list[np.ndarray[Any, Any]]:
    """Head averages of transformers' own eager attention, one (token, token) per layer."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    inputs = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    return [cells[0].double().mean(dim=0).numpy() for cells in attentions]


def with_residual(cells: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return 0.5 * cells + 0.5 * np.eye(len(cells))


def test_rows_are_those_of_the_definitions(classifier: str) -> None:
    columns = overt.Tracer(classifier, methods=("raw", "rollout", "flow"))({"text": TEXTS})
    for place, text in enumerate(TEXTS):
        below, top = maps_of(classifier, text)
        np.testing.assert_allclose(columns["raw"][place], top[0], atol=1e-6)
        rolled = with_residual(top) @ with_residual(below)
        np.testing.assert_allclose(columns["rollout"][place], rolled[0], atol=1e-6)
        graph = networkx.DiGraph()
        for level, cells in ((2, with_residual(top)), (1, with_residual(below))):
            for above, row in enumerate(cells):
                for token, weight in enumerate(row):
                    graph.add_edge((level, above), (level - 1, token), capacity=weight)
        flows = [networkx.maximum_flow_value(graph, (2, 0), (0, token)) for token in range(len(top))]
        np.testing.assert_allclose(columns["flow"][place], flows, atol=1e-6)
        assert columns["tokens"][place] == ["[CLS]", *text.split(), "[SEP]"]
        assert columns["special"][place].tolist() == [True, *[False] * len(text.split()), True]
        spans = list(zip(columns["starts"][place], columns["ends"][place], strict=True))[1:-1]
        assert [text[start:end] for start, end in spans] == text.split()
    assert {columns[name][0].dtype.name for name in ("raw", "rollout", "flow")} == {"float32"}


def test_rows_agree_for_every_batch_size_and_order(classifier: str) -> None:
    whole = overt.Tracer(classifier, methods=("raw", "rollout", "flow"), batch=32)({"text": TEXTS})
    for batch in (1, 3):
        others = overt.Tracer(classifier, methods=("raw", "rollout", "flow"), batch=batch)(
            {"text": TEXTS[::-1]}
        )
        for name in ("raw", "rollout", "flow"):
            for left, right in zip(whole[name], others[name][::-1], strict=True):
                np.testing.assert_allclose(left, right, atol=1e-6)


def test_predictions_are_those_of_the_trace(classifier: str, language_model: str) -> None:
    for path in (classifier, language_model):
        tracer = overt.Tracer(path, methods=("raw",))
        columns = tracer({"text": TEXTS})
        for place, text in enumerate(TEXTS):
            expected = overt.trace(tracer.open().model, text).predictions(1)[0]
            assert columns["prediction"][place] == expected.labels[0]
            assert columns["probability"][place] == pytest.approx(float(expected.mean[0]), abs=1e-6)
    assert set(overt.Tracer(classifier)({"text": TEXTS})["prediction"]) <= {"bad", "good"}


@pytest.mark.parametrize("pad", [0, 1])  # the tokenizer's is 0
def test_a_causal_classifier_reads_the_last_token_though_its_tokenizer_pads_with_another(
    tmp_path: Path, pad: int
) -> None:
    tracer = overt.Tracer(small_causal_classifier(tmp_path / "gpt2", pad), methods=("raw",))
    together = tracer({"text": TEXTS})
    alone = [tracer({"text": [text]}) for text in TEXTS]
    expected = [one["probability"][0] for one in alone]
    assert len({f"{value:.3f}" for value in expected}) > 4
    np.testing.assert_allclose(together["probability"], expected, atol=1e-6)
    traced = overt.trace(tracer.open().model, TEXTS, tokenizer=tracer.open().tokenizer)
    np.testing.assert_allclose(traced.outputs.softmax(-1).max(-1).values, expected, atol=1e-6)


def test_models_without_an_output_for_the_text_predict_nothing(tmp_path: Path) -> None:
    columns = overt.Tracer(small_bert(tmp_path))({"text": TEXTS[:2]})
    assert columns["prediction"].tolist() == [None, None]
    assert np.isnan(columns["probability"]).all()
    from transformers import BertConfig, BertForMaskedLM

    BertForMaskedLM(BertConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    assert overt.Tracer(tmp_path)({"text": TEXTS[:2]})["prediction"].tolist() == [None, None]


def test_a_regression_predicts_a_number_without_a_probability(tmp_path: Path) -> None:
    path = small_classifier(tmp_path, id2label={0: "score"}, label2id={"score": 0})
    columns = overt.Tracer(path)({"text": TEXTS[:1]})
    outputs = overt.trace(overt.Tracer(path).open().model, TEXTS[0]).outputs
    assert outputs is not None
    assert float(columns["prediction"][0]) == pytest.approx(float(outputs[0, 0]), rel=1e-5)
    assert np.isnan(columns["probability"][0])


@pytest.mark.parametrize("queries", [None, "cls", "last", 1, -2])
def test_queries_are_counted_in_each_text(classifier: str, language_model: str, queries: Any) -> None:
    for path, main in ((classifier, 0), (language_model, -1)):
        tracer = overt.Tracer(path, methods=("raw", "rollout"), queries=queries)
        texts = [text for text in TEXTS if len(text.split()) > 1]
        columns = tracer({"text": texts})
        for place, text in enumerate(texts):
            trace = overt.trace(tracer.open().model, text)
            asked = {None: main, "cls": 0, "last": -1}.get(queries, queries)
            assert columns["query"][place] == asked % trace.queries
            for name in ("raw", "rollout"):
                row = trace.read(name, asked, layers=-1)[0, 0, 0]
                np.testing.assert_allclose(columns[name][place], row, atol=1e-6)


def test_several_layers_are_lists_of_rows(classifier: str) -> None:
    one = overt.Tracer(classifier, layers=0)({"text": TEXTS})
    both = overt.Tracer(classifier, layers=(0, 1))({"text": TEXTS})
    every = overt.Tracer(classifier, layers=None)({"text": TEXTS})
    for place in range(len(TEXTS)):
        assert len(both["rollout"][place]) == 2
        np.testing.assert_array_equal(both["rollout"][place][0], one["rollout"][place])
        np.testing.assert_array_equal(np.stack(both["raw"][place]), np.stack(every["raw"][place]))


def test_bad_rows_have_errors_and_spoil_no_other(classifier: str) -> None:
    texts = ["good film", None, "", 5, "bad plot", float("nan"), "   "]
    columns = overt.Tracer(classifier)({"text": texts, "label": list(range(7))})
    assert columns["error"].tolist() == [
        "", "text is missing", "text is empty", "text must be a string, got 5", "", "text is missing",
        "text is empty",
    ]  # fmt: skip
    assert [len(row) for row in columns["raw"]] == [4, 0, 0, 0, 4, 0, 0]
    assert columns["label"] == list(range(7))
    alone = overt.Tracer(classifier)({"text": ["good film", "bad plot"]})
    np.testing.assert_array_equal(columns["raw"][4], alone["raw"][1])
    short = overt.Tracer(classifier, queries=3)({"text": ["good", "good film"]})
    assert short["error"].tolist() == ["text has 3 tokens, and none number 3", ""]


def test_a_text_that_cannot_be_traced_is_an_error_of_its_own(
    classifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tracer_module.trace_batch

    def trace_batch(model: Any, batch: Any) -> Any:
        if bool((batch.arguments["input_ids"] == 13).any()):  # "dull"
            raise ValueError("no room\nfor it")
        return real(model, batch)

    monkeypatch.setattr(tracer_module, "trace_batch", trace_batch)
    columns = overt.Tracer(classifier)({"text": TEXTS})
    assert columns["error"].tolist() == ["no room for it" if "dull" in text else "" for text in TEXTS]
    assert all(len(row) for row, text in zip(columns["raw"], TEXTS, strict=True) if "dull" not in text)


def test_long_texts_are_cut_and_marked(classifier: str) -> None:
    texts = ["good " * 30, "good " * 10, "good " * 11]
    columns = overt.Tracer(classifier)({"text": texts})
    assert columns["cut"].tolist() == [True, False, True], "the model has 12 positions"
    assert [len(tokens) for tokens in columns["tokens"]] == [12, 12, 12]
    assert columns["tokens"][0][-1] == "[SEP]"
    assert [len(t) for t in overt.Tracer(classifier, length=5)({"text": texts})["tokens"]] == [5, 5, 5]


def test_the_beginning_of_a_long_text_is_read_whatever_side_its_tokenizer_cuts(classifier: str) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    tokenizer.truncation_side = "left"
    rows = overt.Tracer(model, tokenizer=tokenizer, length=4)({"text": ["good bad film plot"]})
    assert list(rows["tokens"][0]) == ["[CLS]", "good", "bad", "[SEP]"]
    assert rows["cut"][0]
    assert tokenizer.truncation_side == "left", "it is left as it was"


@pytest.mark.parametrize("length", [1, 2])
def test_a_length_without_room_for_a_word_is_refused(classifier: str, length: int) -> None:
    with pytest.raises(ValueError, match=f"length must be at least 3, .* got {length}"):
        overt.Tracer(classifier, length=length).open()


def test_tokens_that_the_model_does_not_have_are_errors_of_their_texts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = small_classifier(tmp_path / "more words")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["zebra"])
    tokenizer.save_pretrained(path)
    rows = overt.Tracer(path)({"text": ["good film", "zebra film", "bad"]})
    assert list(rows["error"]) == ["", "numbers of tokens must lie in 0 to 13, got 14", ""]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (float("nan"), "text is missing"),
        (np.float32("nan"), "text is missing"),
        (["good", "film"], "text must be a string, got ['good', 'film']"),
        (np.array(["good", "film"]), "text must be a string, got array(['good', 'film'], dtype='<U4')"),
        (0, "text must be a string, got 0"),
    ],
)
def test_what_is_no_string_is_an_error(classifier: str, value: Any, error: str) -> None:
    rows = overt.Tracer(classifier)({"text": [value, "good"]})
    assert list(rows["error"]) == [error, ""]


def test_different_parts_of_characters_have_different_names() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pieces = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    pieces.pre_tokenizer, pieces.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),  # type: ignore[assignment]
        decoders.ByteLevel(),  # type: ignore[assignment]
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=12))
    tracer = overt.Tracer(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=pieces), methods=("raw",))
    rows = tracer({"text": ["日a", "é a"]})
    first, second = map(list, rows["tokens"])
    assert first[3] == second[3] == "a"
    assert len({*first, *second}) == 7, "three bytes, two bytes, a space and a letter"
    assert rows["ends"][0].tolist() == [1, 1, 1, 2]


def test_what_pandas_writes_for_a_missing_text_is_an_error(classifier: str) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": pandas.array(["good", None], dtype="string")})
    (rows,) = overt.Tracer(classifier).pandas([frame])
    assert list(rows["error"]) == ["", "text is missing"]


def test_the_hash_of_a_model_does_not_know_what_its_tokenizer_cut(classifier: str) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    tracer = overt.Tracer(model, tokenizer=AutoTokenizer.from_pretrained(classifier))
    before = tracer.model_hash()
    assert tracer({"text": ["good film " * 9]})["cut"][0]
    assert tracer.model_hash() == before
    tracer.tokenizer.add_tokens(["zebra"])
    assert tracer.model_hash() != before


def test_the_hash_of_a_model_knows_its_mechanisms(classifier: str) -> None:
    from transformers import AutoModelForSequenceClassification

    hashes = []
    for alpha in (None, 0.1, 0.9, 0.1):
        model = AutoModelForSequenceClassification.from_pretrained(classifier)
        if alpha is not None:
            torch.manual_seed(0)
            overt.attach(model, overt.Evolving(alpha=alpha))
        hashes.append(overt.Tracer(model).model_hash())
    assert len(set(hashes)) == 3
    assert hashes[1] == hashes[3]


def test_a_tracer_is_pickled_as_settings_and_loads_its_model_once(
    classifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    monkeypatch.setattr(tracer_module, "_opened", {})
    real = tracer_module.open_named
    monkeypatch.setattr(tracer_module, "open_named", lambda *given: loads.append(given) or real(*given))
    tracer = overt.Tracer(classifier)
    before = pickle.dumps(tracer)
    assert not loads, "not before it is needed"
    tracer({"text": TEXTS[:2]})
    assert pickle.dumps(tracer) == before
    assert len(before) < 1000
    copies = [pickle.loads(before) for _ in range(3)]
    rows = [copy({"text": np.array(TEXTS[:2])})["raw"] for copy in copies]
    assert len(loads) == 1
    np.testing.assert_array_equal(rows[0][1], tracer({"text": TEXTS[:2]})["raw"][1])


FRESH = """
import pickle
with open({!r}, "rb") as file:
    tracers, texts = pickle.load(file)
with open({!r}, "wb") as file:
    pickle.dump([tracer({{"text": texts}}) for tracer in tracers], file)
"""


@pytest.mark.slow
def test_tracers_and_attached_models_work_in_a_fresh_process(classifier: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    overt.attach(model, overt.Evolving(alpha=0.5, beta=0.5), overt.Bayesian())
    tracers = [overt.Tracer(classifier), overt.Tracer(model, methods=("raw", "rollout", "flow"))]
    assert len(pickle.dumps(tracers[1])) > sum(p.numel() * 4 for p in model.parameters()), "with its weights"
    (tmp_path / "in").write_bytes(pickle.dumps((tracers, TEXTS)))
    _, failed = fresh(FRESH.format(str(tmp_path / "in"), str(tmp_path / "out")))
    assert not failed, failed
    there = pickle.loads((tmp_path / "out").read_bytes())
    for tracer, columns in zip(tracers, there, strict=True):
        here = tracer({"text": TEXTS})
        assert columns["prediction"].tolist() == here["prediction"].tolist()
        for name in tracer.methods:
            for left, right in zip(columns[name], here[name], strict=True):
                np.testing.assert_allclose(left, right, atol=1e-6)
    plain = overt.Tracer(classifier)({"text": TEXTS})
    assert np.abs(there[1]["raw"][1] - plain["raw"][1]).max() > 1e-3, "the mechanisms came along"


def test_a_model_whose_files_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = overt.Tracer(small_classifier(tmp_path))
    small_classifier(tmp_path, seed=1)
    monkeypatch.setattr(tracer_module, "_opened", {})
    with pytest.raises(ValueError, match=r"is not the one that the tracer was made with: .*hash"):
        tracer({"text": TEXTS})


def test_types_that_spark_is_not_told_are_refused(classifier: str) -> None:
    with pytest.raises(ValueError, match=r"types of columns must be int64, .* got 'date'"):
        _ = overt.Tracer(classifier, columns={"day": "date"}).schema


def test_what_spark_is_told_are_the_columns_that_it_gets(classifier: str) -> None:
    pandas = pytest.importorskip("pandas")
    tracer = overt.Tracer(classifier, columns={"label": "int64"})
    frames = list(tracer.pandas([pandas.DataFrame({"text": TEXTS, "label": range(8), "spare": 0})]))
    names = re.findall(r"`(\w+)`", tracer.schema)
    assert list(frames[0].columns) == names
    assert "`label` BIGINT" in tracer.schema
    assert "`rollout` ARRAY<FLOAT>" in tracer.schema
    assert "`raw` ARRAY<ARRAY<FLOAT>>" in overt.Tracer(classifier, layers=None).schema
    assert frames[0]["raw"][0].dtype == np.float32
    with pytest.raises(
        ValueError, match=r'schema needs the types of columns: give columns={"label": "int64"'
    ):
        _ = overt.Tracer(classifier, columns=["label"]).schema


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": ()}, r"methods must name one method or several different ones, got \(\)"),
        ({"methods": ("raw", "raw")}, "methods must name one method or several different ones"),
        ({"methods": "gradients"}, "methods must be one of 'raw', 'rollout', 'flow'; got 'gradients'"),
        ({"queries": "first"}, 'queries must be "cls", "last" or a whole number, got \'first\''),
        ({"layers": "top"}, "layers must be a whole number, several, or None for all, got 'top'"),
        ({"layers": 2}, r"layers must lie in 0 to 1 \(or −2 to −1\), got 2"),
        ({"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ({"device": "tpu"}, "device must be one of 'cpu', 'cuda'; got 'tpu'"),
        ({"dtype": "int8"}, "dtype must be one of .*; got 'int8'"),
        ({"text": "tokens"}, "column tokens has the name of a column that is written"),
        ({"text": "body"}, "the batch has no column body; it has text"),
        ({"columns": ["label"]}, "the batch has no column label; it has text"),
        ({"tokenizer": 1}, "tokenizer is for a model that is given as an object"),
    ],
)
def test_bad_settings_are_refused(classifier: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        overt.Tracer(classifier, **arguments)({"text": TEXTS[:1]})


def test_encoder_decoders_and_missing_folders_are_refused(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BartConfig, BartModel

    with pytest.raises(FileNotFoundError, match=r"model \S+ must be a folder with config.json"):
        overt.Tracer(tmp_path)
    path = small_bert(tmp_path / "bert")
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "vocab_size": 14}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = BartModel(BartConfig(**sizes, **heads, encoder_ffn_dim=16, decoder_ffn_dim=16))
    with pytest.raises(ValueError, match="BartModel is an encoder–decoder: Tracer takes encoders"):
        overt.Tracer(model, tokenizer=AutoTokenizer.from_pretrained(path))({"text": TEXTS})
