"""`overt judge`: planted words decide, the table says who finds them, and bad input is named in one line."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from overt.cli import app, shared
from overt.cli.judge import (
    Shown,
    classes_of,
    duration,
    expected,
    none_beats_chance,
    read_given,
    run,
    table_of,
)
from overt.judge.intervals import Interval
from overt.judge.rationales import Evaluation, evaluate
from overt.judge.rationales.kept import Kept, digest_of, to_json
from overt.judge.rationales.methods import Scorer
from overt.judge.rationales.randomising import after_shuffling, shuffled
from overt.judge.rationales.ranking import (
    apart,
    beating_chance,
    coverage,
    coverage_after_shuffling,
    leading,
    ordered,
)
from overt.judge.rationales.words import WordClassifier
from small_corpora import small_classifier
from small_judged import DECIDE, judged_classifier, texts_of
from small_text import small_bert

METHODS = ["raw", "gradient-input", "blankout", "random", "oracle"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return judged_classifier(tmp_path_factory.mktemp("judged"))


@pytest.fixture(scope="module")
def opened(model: str) -> tuple[Any, Any]:
    return opened_at(model)


def opened_at(folder: str) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, BertForSequenceClassification

    return BertForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Eight texts with labels by name, and what decides marked."""
    path = tmp_path / "texts.jsonl"
    texts, labels = texts_of(8)
    lines = [
        {
            "text": text,
            "kind": ["negative", "positive"][label],
            "marked": [int(w in DECIDE) for w in text.split()],
        }
        for text, label in zip(texts, labels, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def refusal(*arguments: Any) -> str:
    """What the command says of bad input: one line."""
    result = CliRunner().invoke(app, ["judge", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, ValueError | OSError)
    (line,) = str(result.exception).splitlines()
    return line


@pytest.mark.slow
def test_the_command_ranks_what_finds_the_words_above_what_cannot(
    model: str, rows: Path, tmp_path: Path
) -> None:
    arguments = [
        rows,
        "--model",
        model,
        "--labels",
        "kind",
        "--rationales",
        "marked",
        "--out",
        tmp_path / "p.html",
    ]
    result = CliRunner().invoke(app, ["judge", *map(str, arguments), "--methods", ",".join(METHODS)])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    places = {name: next(i for i, line in enumerate(lines) if line.startswith(name)) for name in (
        "(best order)", "blank-out", "gradient × input", "raw", "(random)")}  # fmt: skip
    assert max(places["(best order)"], places["blank-out"], places["gradient × input"]) < places["raw"]
    assert all(heading in result.output for heading in ("comp. ↑", "AP ↑", "ρ shuffled → 0", "s per text"))
    assert re.search(r"^blank-out +8 +0\.\d{3} ±0\.\d{3}\*", result.output, re.M), "it leads"
    assert not re.search(r"^raw +8 +\S+ ±\S+\*", result.output, re.M), "attention is uniform"
    assert "accuracy 1.000" in result.output
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


def test_controls_lead_nothing_and_equals_lead_together(opened: tuple[Any, Any]) -> None:
    texts, _ = texts_of(6)
    right = [[float(word in DECIDE) for word in text.split()] for text in texts]
    wrong = [[float(word not in DECIDE) for word in text.split()] for text in texts]
    found = evaluate(
        *opened, texts, methods=["random", "oracle"], scores={"right": right, "same": right, "wrong": wrong}
    )
    assert leading(found, "comprehensiveness") == {"right", "same"}
    assert leading(found, "sufficiency") == {"right", "same"}, "less is better"
    assert ordered(found, "sufficiency").index("wrong") > ordered(found, "sufficiency").index("same")
    assert "(random)" in table_of(found, "sufficiency")
    for measure in ("comprehensiveness", "sufficiency"):
        assert beating_chance(found, measure) == {"right": True, "same": True, "wrong": False}, (
            "nor is a control"
        )
    rows = {line.split()[0]: line for line in table_of(found, "sufficiency").splitlines() if line.strip()}
    assert "°" in rows["wrong"]
    assert "°" not in rows["right"] + rows["(random)"]
    assert not none_beats_chance(found)


def test_it_is_said_where_nothing_beats_random_scores(opened: tuple[Any, Any]) -> None:
    texts, _ = texts_of(6)
    blind = {"blind": [[0.0] * len(text.split()) for text in texts]}
    assert none_beats_chance(evaluate(*opened, texts, methods=["random"], scores=blind))
    without = evaluate(*opened, texts, methods=["raw"], scores=blind)
    assert beating_chance(without, "comprehensiveness") == {}
    assert not none_beats_chance(without), "there is nothing to beat"


@pytest.fixture(scope="module")
def uneven(opened: tuple[Any, Any]) -> Evaluation:
    """Two short texts, one of which has marked words, and one that is too long for the best order."""
    texts = ["good film plot", "dull film plot", "nice plot " * 16]
    wrong = [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0] * 16]
    marked = [[1, 0, 0], [0, 0, 0], [0] * 32]
    methods = ["gradient-input", "random", "oracle"]
    return evaluate(*opened, texts, marked, methods, scores={"wrong": wrong}, correlation=True)


def test_the_table_says_how_many_texts_each_column_has(uneven: Evaluation) -> None:
    assert coverage(uneven, "comprehensiveness") is None
    assert coverage(uneven, "normalised_comprehensiveness") == (
        "2 of 3",
        "the others have more than 30 words",
    )
    assert coverage(uneven, "auprc") == ("1 of 3", "in the others, no word is marked")
    left = {"wrong": Interval(0.1, 0.0, 0.2, 2), "oracle": Interval(0.1, 0.0, 0.2, 1)}
    assert coverage_after_shuffling(uneven, left) == ("2 of 3", "in the others, all words score the same")
    (line,) = [line for line in table_of(uneven, "comprehensiveness", left).splitlines() if "texts:" in line]
    assert line.startswith(
        "texts: norm. comp., norm. suff. 2 of 3 (the others have more than 30 words); AUPRC"
    )
    assert line.endswith("ρ shuffled 2 of 3 (in the others, all words score the same)")


def test_columns_of_all_texts_have_no_line(opened: tuple[Any, Any]) -> None:
    wrong = {"wrong": [[0.0, 1.0, 0.0]] * 2}
    found = evaluate(*opened, ["good film plot", "dull film plot"], methods=["oracle"], scores=wrong)
    assert "texts:" not in table_of(found, "comprehensiveness")
    assert ordered(found, "comprehensiveness") == ["oracle", "wrong"], "it has the texts of all"


def test_texts_whose_words_score_the_same_count_in_no_correlation(opened: tuple[Any, Any]) -> None:
    alike = {"alike": [[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]], "all": [[1.0, 2.0, 3.0]] * 2}
    found = evaluate(
        *opened, ["good film plot", "dull film plot"], methods=["random"], scores=alike, correlation=True
    )
    assert coverage(found, "correlation") == ("1 to 2 of 2", "in the others, all words score the same")


def test_the_best_order_of_some_texts_is_not_ranked_among_methods_of_all(uneven: Evaluation) -> None:
    by = "comprehensiveness"
    best = {name: own.measures[by] for name, own in uneven.methods.items()}
    assert best["oracle"] == max(best.values()), "else it would be last anyway"
    assert best["oracle"] > best["wrong"]
    assert ordered(uneven, by)[-1] == "oracle"
    assert apart(uneven, by) == {"oracle"}
    same = "normalised_comprehensiveness"
    assert apart(uneven, same) == set()
    assert ordered(uneven, same).index("oracle") < ordered(uneven, same).index("wrong"), "the same texts"
    lines = table_of(uneven, by).splitlines()
    assert lines[4].startswith("(best order)")
    assert lines[4].endswith("–"), "what the search took is paid elsewhere"
    assert lines[-1].startswith("(best order) has 2 of 3 texts, those of up to 30 words: it stands last")


def test_texts_without_marks_are_told(model: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    for marks, words in {
        ("[0, 0]", "[0, 1]"): "1 of 2 texts have no marked word, and count for faithfulness alone",
        ("[0, 0]", "[]"): "m: no text has a marked word; AUPRC, AP and token F1 are left out",
    }.items():
        texts.write_text("".join(f'{{"text": "good film", "m": {mark}}}\n' for mark in marks))
        arguments = [texts, "--model", model, "--methods", "random", "--rationales", "m"]
        result = CliRunner().invoke(app, ["judge", *map(str, arguments)])
        assert words in result.output


def test_a_measure_that_no_text_has_is_told(model: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("nice plot " * 16)
    by = ["--by", "normalised_sufficiency", "--methods", "random", "--out", str(tmp_path / "p.html")]
    result = CliRunner().invoke(app, ["judge", str(texts), "--model", model, *by])
    assert "no text has norm. suff.: methods are sorted by comprehensiveness" in result.output
    assert '"sort":"comprehensiveness"' in (tmp_path / "p.html").read_text()


def test_blankout_does_not_lead_by_its_correlation_with_itself(opened: tuple[Any, Any]) -> None:
    texts, _ = texts_of(6)
    right = [[float(word in DECIDE) for word in text.split()] for text in texts]
    found = evaluate(*opened, texts, methods=["blankout"], scores={"right": right}, correlation=True)
    assert found.methods["blankout"].measures["correlation"] == pytest.approx(1)
    assert leading(found, "correlation") == {"right"}
    assert "blankout" in leading(found, "comprehensiveness")


def test_scores_that_do_not_depend_on_the_weights_stay_when_these_are_shuffled(tmp_path: Path) -> None:
    model, tokenizer = opened_at(small_classifier(tmp_path))
    texts, _ = texts_of(6, words=9)
    given = {"given": [[float(i) for i in range(9)]] * 6}
    found = evaluate(model, tokenizer, texts, methods=["gradient-input", "raw", "random"], scores=given)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    left = after_shuffling(found, model, tokenizer, texts, most=5)
    assert set(left) == {"gradient-input", "raw", "random"}, "given scores cannot be had again"
    assert left["random"].mean == pytest.approx(1.0), "it looks at no weight"
    assert left["random"].texts == 5
    assert abs(left["gradient-input"].mean) < 0.6
    assert abs(left["raw"].mean) < 0.6
    assert all(bool((value == before[name]).all()) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="texts must be the 6 that were judged, got 2"):
        after_shuffling(found, model, tokenizer, texts[:2])
    copied = shuffled(model, 0)
    for old, new in zip(model.parameters(), copied.parameters(), strict=True):
        assert bool((old.flatten().sort().values == new.flatten().sort().values).all()), "the same entries"
    assert any(
        bool((old != new).any()) for old, new in zip(model.parameters(), copied.parameters(), strict=True)
    )


def test_a_single_text_tells_no_methods_apart(opened: tuple[Any, Any]) -> None:
    found = evaluate(
        *opened, ["good film plot"], methods=["raw"], scores={"right": [[1, 0, 0]], "wrong": [[0, 1, 1]]}
    )
    assert leading(found, "comprehensiveness") == {"raw", "right", "wrong"}
    assert "±" not in table_of(found, "comprehensiveness")


def test_texts_and_labels_are_read_from_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("good film\nbad plot\n")
    (tmp_path / "labels").write_text("positive\nnegative\n")
    given = read_given(tmp_path / "a.txt", labels=str(tmp_path / "labels"))
    assert (given.texts, given.labels) == (["good film", "bad plot"], ["positive", "negative"])
    (tmp_path / "a.csv").write_text('review,label,about\n"good, film",1,x\nbad plot,0,\n')
    given = read_given(tmp_path / "a.csv", "review", "label", queries="about")
    assert (given.texts, given.labels, given.queries) == (["good, film", "bad plot"], [1, 0], ["x", ""])
    (tmp_path / "a.tsv").write_text("text\tspans\n" + "good film\t[[0, 1]]\n" * 9)
    given = read_given(tmp_path / "a.tsv", rationales="spans", most=3)
    assert (len(given.texts), given.rationales, given.all) == (3, [[(0, 1)]] * 3, 9)
    assert given.rows == [1, 5, 9], "as the file counts them"


def test_labels_are_numbers_or_names() -> None:
    names = ["negative", "positive"]
    assert classes_of(["positive", 0, "1"], names, [1, 2, 3]) == [1, 0, 1]
    for labels, words in {
        (1, 2): "'2' of text 2 is no class of the model: give 0 to 1, or negative or positive",
        (1, -1): "'-1' of text 2",
        (0, 0.5): "'0.5' of text 2",
        (True, False): "'True' of text 1",
        (1, "positive"): "all 2 texts have one class, positive",
    }.items():
        with pytest.raises(ValueError, match=re.escape(words)):
            classes_of(labels, names, [1, 2])
    assert classes_of([0, 1], ["0", "1"], [1, 2]) == [0, 1]
    with pytest.raises(ValueError, match="class 0 of the model is named 1, so that a number may be"):
        classes_of([1, 2], ["1", "2"], [1, 2])


def test_bad_files_are_named(model: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("good film\nbad plot\n")
    (tmp_path / "labels").write_text("1\n0\n1\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "gap.txt").write_text("good film\n \nbad plot\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "good"}\nno\n')
    (tmp_path / "marks.jsonl").write_text('{"text": "good film", "m": "x"}\n')
    (tmp_path / "short.jsonl").write_text('{"text": "good film", "m": [1]}\n')
    with_model = ["--model", model]
    other = tmp_path / "other"
    shutil.copytree(model, other)
    config = json.loads((other / "config.json").read_text())
    names = {"id2label": {n: f"class {n}" for n in range(3)}, "label2id": {f"class {n}": n for n in range(3)}}
    (other / "config.json").write_text(json.dumps(config | names))
    line = refusal(texts, "--model", other)
    assert line == f"--model {other}: its weights do not fit its config.json, which gives other sizes"
    assert "labels has 3 labels, and" in refusal(texts, *with_model, "--labels", tmp_path / "labels")
    (tmp_path / "alike").write_text("1\npositive\n")
    line = refusal(texts, *with_model, "--labels", tmp_path / "alike")
    assert line.startswith("--labels: all 2 texts have one class, positive, and accuracy says nothing")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"text": "good film", "q": "plot " * 60}))
    line = refusal(tmp_path / "asked.jsonl", *with_model, "--queries", "q")
    assert line.endswith(
        "the 48 tokens that the model takes have no room for its first word beside its query"
    )
    assert "neither a file nor one of the columns text" in refusal(texts, *with_model, "--labels", "no")
    assert refusal(tmp_path / "gap.txt", *with_model).endswith("text 2 has no words")
    assert refusal(tmp_path / "empty.txt", *with_model).endswith("has no texts")
    assert "row 2: the line is not JSON" in refusal(tmp_path / "broken.jsonl", *with_model)
    assert "must have a JSON list, got 'x'" in refusal(
        tmp_path / "marks.jsonl", *with_model, "--rationales", "m"
    )
    assert refusal(tmp_path / "short.jsonl", *with_model, "--rationales", "m") == (
        "--rationales m: document 1: its rationale must have 2 words, got 1"
    )
    assert "does not exist" in refusal(tmp_path / "nothing.txt", *with_model)


def test_bad_options_are_named_before_the_model_is_opened(tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("good film\n")
    line = refusal(texts, "--model", tmp_path, "--methods", "raw,rollin")
    assert line.startswith("--methods must be one of 'all', ")
    assert line.endswith("got 'rollin'")
    assert "at least one method" in refusal(texts, "--model", tmp_path, "--methods", ", ")
    assert refusal(texts, "--model", tmp_path, "--by", "beauty").startswith("--by must be one of")
    assert "must end in .html" in refusal(texts, "--model", tmp_path, "--out", tmp_path / "p.pdf")
    assert "there is no folder" in refusal(texts, "--model", tmp_path, "--out", tmp_path / "no" / "p.html")
    assert "must be a folder with config.json" in refusal(texts, "--model", tmp_path)


def test_a_measure_that_needs_marks_is_refused_without_them(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "good film", "m": [0, 0]}\n{"text": "bad plot", "m": []}\n')
    line = refusal(texts, "--model", tmp_path, "--by", "auprc")
    assert line == "--by auprc compares with what people marked: name its column with --rationales"
    line = refusal(texts, "--model", tmp_path, "--by", "token_f1", "--rationales", "m")
    assert line.startswith("--by token_f1 compares with what people marked, and no text of --rationales m")
    texts.write_text('{"text": "good film", "m": [0, 0]}\n{"text": "bad plot", "m": [[0, 1]]}\n')
    assert refusal(texts, "--model", tmp_path, "--by", "auprc", "--rationales", "m").startswith("--model")


@pytest.mark.parametrize("device", ["meta", "foo", "mps", "cuda:7"])
def test_devices_are_known_by_name(tmp_path: Path, device: str) -> None:
    line = refusal(tmp_path / "texts.txt", "--model", tmp_path, "--device", device)
    assert line == f"--device must be cpu, cuda or auto, got {device}"


def test_where_no_method_applies_no_page_is_written(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts, page = tmp_path / "texts.txt", tmp_path / "p.html"
    texts.write_text("good film\nbad plot\n" * 7)  # so many that some are timed
    line = refusal(texts, "--model", model, "--methods", "pooling", "--out", page)
    assert line.startswith("--methods: none applies to this model and these texts: pooling attention: Bert")
    assert not page.exists()
    assert not Path("runs").exists()


def test_labels_of_a_single_text_are_refused_as_such(model: str, rows: Path) -> None:
    line = refusal(rows, "--model", model, "--labels", "kind", "--most", 1)
    assert line.startswith("--labels: accuracy needs texts of two classes, got one text: give more of them")


def test_lines_that_are_no_json_objects_are_named(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('["good film"]\n')
    line = refusal(texts, "--model", tmp_path)
    assert "texts.jsonl: line 1: the line must be a JSON object, got list; each line must be" in line


def test_full_memory_of_a_device_is_one_line_of_any_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(error: Exception) -> None:
        def command() -> None:
            raise error

        monkeypatch.setattr(shared, "app", command)
        shared.main()

    words = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB"
    with pytest.raises(SystemExit) as stopped:
        full(torch.OutOfMemoryError(words))
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("overt: CUDA out of memory: free the device from other programs, give fewer")
    assert line.endswith("or use --device cpu")
    with pytest.raises(RuntimeError, match="a fault of our own"):
        full(RuntimeError("a fault of our own"))


def test_models_that_classify_nothing_are_named(model: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertForSequenceClassification

    texts = tmp_path / "texts.txt"
    texts.write_text("good film\n")
    (tmp_path / "base").mkdir()
    line = refusal(texts, "--model", small_bert(tmp_path / "base"))
    assert "is a BertModel, which has no classifier head: give a model that was trained to classify" in line
    sizes = {"vocab_size": 14, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(tmp_path / "language")
    assert "is a BertForMaskedLM, which" in refusal(texts, "--model", tmp_path / "language")
    BertForSequenceClassification(BertConfig(num_labels=1, **sizes)).save_pretrained(tmp_path / "one")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "one")
    assert "has one class only" in refusal(texts, "--model", tmp_path / "one")


def test_a_word_that_is_longer_than_the_model_takes_is_named(opened: tuple[Any, Any]) -> None:
    model, tokenizer = copy.deepcopy(opened)
    tokenizer.model_max_length = 2  # as many as stand around a text
    with pytest.raises(
        ValueError, match="text 7: the 2 tokens that the model takes have no room for its firs"
    ):
        WordClassifier(model, tokenizer).read("good film", name="7")


@pytest.mark.slow
def test_what_is_cut_and_what_is_predicted_is_said(model: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("good film\n" + "nice plot " * 30 + "\n")
    result = CliRunner().invoke(app, ["judge", str(texts), "--model", model, "--methods", "raw"])
    assert result.exit_code == 0, result.output
    assert (
        "1 of 2 texts are longer than the 48 tokens that the model takes; their ends are cut" in result.output
    )
    assert "the model predicts positive for all texts: this judges one class only" in result.output


def test_the_expected_time_is_of_two_texts_of_usual_length() -> None:
    judged: list[list[int]] = []
    jobs = [(judged.append, 16)]
    assert expected([1] * 12, jobs) is None
    assert judged == []
    lengths = [9, 1, 5, 7, 3, 2, 8, 4, 6, 10, 12, 11, 14, 13, 16, 15]
    assert expected(lengths, jobs) is not None
    assert [[lengths[number] for number in some] for some in judged] == [[1], [5, 13]]
    assert [duration(s) for s in (0.1, 61, 200, 9000)] == ["1 s", "61 s", "3 minutes", "2.5 hours"]


def test_progress_names_the_method_and_its_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("overt.cli.judge.EVERY", -1.0)
    shown = Shown(["raw", "LIME"], seconds=7200.0)
    parts = ("raw", "raw, deleting words", "raw, blank-out, absolute", "LIME", "raw, shuffled weights")
    for words in (*parts, "writing the page"):
        shown(words, 1, 3)
    assert capsys.readouterr().err.splitlines() == [
        "method 1 of 2, raw: 1 of 3 texts, 2.0 hours left",
        "method 1 of 2, raw, deleting words: 1 of 3 texts, 2.0 hours left",
        "method 1 of 2, raw, blank-out, absolute: 1 of 3 texts, 2.0 hours left",
        "method 2 of 2, LIME: 1 of 3 texts, 2.0 hours left",
        "raw, shuffled weights: 1 of 3 texts",
        "writing the page: 1 of 3 texts",
    ]


def test_an_interrupted_command_says_that_nothing_was_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("overt.cli.judge.run", interrupted)
    result = CliRunner().invoke(app, ["judge", str(tmp_path), "--model", str(tmp_path)])
    assert result.exit_code == 130
    assert "nothing was written" in result.output


def numbers_of(found: Evaluation) -> str:
    """All that was measured but times, exactly."""
    words = [to_json(own) | {"seconds": None} for own in found.methods.values()]
    return json.dumps([words, found.refused, found.performance, found.share, found.texts])


def test_an_interrupted_judgement_goes_on_from_what_it_has_measured(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts, labels = texts_of(14)
    Path("texts.txt").write_text("\n".join(texts))
    Path("labels.txt").write_text("\n".join(map(str, labels)))
    names = ["raw", "pooling", "gradient-input", "random"]

    def judged(**options: Any) -> Evaluation:
        return run("texts.txt", model, "labels.txt", ",".join(names), **options)

    whole = judged()
    said = capsys.readouterr()
    assert "all will take about" in said.err
    assert not Path("runs").exists()
    assert {"raw", "gradient-input", "random"} == set(whole.methods)
    assert set(whole.refused) == {"pooling"}

    scores, asked = Scorer.scores, list[str]()

    def until_random(self: Scorer, method: str, text: Any) -> Any:
        asked.append(method)
        if method == "random" and asked.count("random") > 9:  # after the few that are timed
            raise KeyboardInterrupt
        return scores(self, method, text)

    monkeypatch.setattr(Scorer, "scores", until_random)
    with pytest.raises(typer.Exit) as stopped:
        judged()
    assert stopped.value.exit_code == 130
    assert "the same command goes on after 3 methods of 4, which it has judged" in capsys.readouterr().err
    assert len(list(Path("runs/judge").glob("*/*.json"))) == 3
    shutil.copytree("runs", "left")

    def after_timing(self: Scorer, method: str, text: Any) -> Any:
        asked.append(method)
        return scores(self, method, text)

    monkeypatch.setattr(Scorer, "scores", after_timing)
    asked.clear()
    again = judged()
    said = capsys.readouterr()
    assert "an interrupted run has judged 3 methods of 4; --fresh judges all again" in said.err
    assert "what is left will take about" in said.err
    assert asked.count("random") > 2 * 14, "the model's, and its shuffled copy's"
    assert asked.count("raw") == 14, "the shuffled copy's alone"
    assert numbers_of(again) == numbers_of(whole)
    assert not Path("runs").exists(), "all is done"
    shutil.move("left", "runs")
    judged(fresh=True)
    assert "an interrupted run" not in capsys.readouterr().err
    assert not Path("runs").exists()


def test_what_is_kept_is_of_one_model_and_its_texts(opened: tuple[Any, Any]) -> None:
    model, tokenizer = opened

    def digest(model: Any = model, tokenizer: Any = tokenizer, text: str = "good film", **given: Any) -> str:
        return digest_of(model, tokenizer, [WordClassifier(model, tokenizer).read(text)], **given)

    other = copy.deepcopy(model)
    with torch.no_grad():
        other.classifier.bias[0] += 1e-6
    unknown, short = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    unknown.unk_token = "[PAD]"
    short.model_max_length = 3  # [CLS], one word and [SEP]
    digests = [
        digest(),
        digest(other),
        digest(text="good plot"),
        digest(seed=1),
        digest(tokenizer=unknown),
        digest(tokenizer=short),
    ]
    assert len(set(digests)) == len(digests)
    assert digest() == digests[0]


def test_what_cannot_be_read_is_judged_again_and_others_stay(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept" / "digest")
    for method in ("raw", "flow", "pooling"):
        kept.add(method, "does not apply")
    for method, words in {"raw": "{", "flow": '{"method": "flow"}'}.items():
        (kept.folder / f"{method}.json").write_text(words)  # type: ignore[operator]
    assert kept.names(["raw", "flow", "random"]) == ["raw", "flow"]
    assert kept.methods(["raw", "flow", "random", "pooling"]) == {"pooling": "does not apply"}
    kept.discard(["raw", "flow"])
    assert kept.names(["pooling"]) == ["pooling"], "of another command on the same texts"
    kept.discard(["pooling"])
    assert not (tmp_path / "kept").exists()


def test_a_judgement_that_cannot_be_kept_is_told_and_not_lost(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("\n".join(texts_of(14)[0]))
    Path("runs").write_text("a file, where the folder would be")
    found = run("texts.txt", model, methods="raw,random")
    assert set(found.methods) == {"raw", "random"}
    assert capsys.readouterr().err.count("what is measured is not kept, should this be interrupted: ") == 1
