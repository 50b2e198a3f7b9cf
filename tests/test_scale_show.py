"""A run over a corpus, read back: rows, filters, traces made again, summaries, figures and the page."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="install the extra scale")

from typer.testing import CliRunner  # noqa: E402

import overt  # noqa: E402
from overt.cli import app  # noqa: E402
from overt.corpus.examples import chosen_rows, priority_of  # noqa: E402
from overt.corpus.opened import Corpus, sentences_of  # noqa: E402
from overt.corpus.page import corpus_page, displayed  # noqa: E402
from overt.corpus.store import Store, arrow_schema, data_types  # noqa: E402
from small_corpora import TEXTS, small_classifier  # noqa: E402

pytest_plugins = ["browser"]
METHODS = ("raw", "rollout", "flow")
ROWS, BAD = 40, 5
EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)> & ‮ \u2028'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return small_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run: some texts too long for the model, every eighth empty, and a column that looks like markup."""
    place = tmp_path_factory.mktemp("run")
    with open(place / "in.jsonl", "w") as file:
        for row in range(ROWS):
            text = " ".join(TEXTS[(row + shift) % len(TEXTS)] for shift in range(row % 3 + 1))
            entry = {
                "text": "" if row % 8 == 7 else text,
                "label": row % 2,
                "kind": "ab"[row % 5 == 0],
                "note": EVIL,
            }
            file.write(json.dumps(entry) + "\n")
    overt.corpus.run(place / "in.jsonl", model, place / "out", methods=METHODS, shard=12, batch=4, workers=1)
    return place / "out"


@pytest.fixture(scope="module")
def whole(folder: Path) -> Corpus:
    return overt.corpus.open(folder)


def show(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["corpus", "show", *map(str, words)])


def refused(*words: str | Path) -> str:
    """The error of a command, which is one line."""
    result = show(*words)
    assert isinstance(result.exception, ValueError | OSError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


# --- rows


def test_rows_are_those_of_the_files_in_the_order_of_the_input(whole: Corpus, folder: Path) -> None:
    tables = [Store(folder).read(shard) for shard in range(4)]
    expected = pa.concat_tables(tables).to_pylist()
    assert list(whole) == expected
    assert len(whole) == len(expected) == ROWS - BAD
    assert [whole[place] for place in range(len(whole))] == expected
    assert whole[-1] == expected[-1]
    assert [row["row"] for row in whole] == sorted(row["row"] for row in whole)
    assert whole.methods == METHODS
    assert whole.carried == ["text", "label", "kind", "note"]
    assert whole.complete
    assert whole.missing is None


def test_bad_rows_are_told_apart(whole: Corpus) -> None:
    bad = list(whole.errors())
    assert [row["row"] for row in bad] == [row for row in range(ROWS) if row % 8 == 7]
    assert {row["error"] for row in bad} == {"text is empty"}
    assert whole.bad_rows() == BAD


def test_a_filter_keeps_the_rows_that_pass_by_value_and_by_function(whole: Corpus) -> None:
    some = whole.filter(label=1, kind="a")
    expected = [row for row in whole if row["label"] == 1 and row["kind"] == "a"]
    assert list(some) == expected
    assert len(some) == len(expected) < len(whole)
    assert [some[place] for place in range(len(some))] == expected
    sure = some.filter(lambda row: row["probability"] > 0.5, lambda row: not row["cut"])
    assert list(sure) == [row for row in expected if row["probability"] > 0.5 and not row["cut"]]
    assert len(whole.filter(kind=None)) == 0
    assert len(some.filter(label=0)) == 0
    assert len(whole) == ROWS - BAD, "the corpus itself stays whole"


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda one: one[99], IndexError, "holds 35 rows, got 99"),
        (lambda one: one["a"], TypeError, "selected by number"),
        (lambda one: one.filter(colour=1), ValueError, "no column 'colour'.* it has row, text, label, kind"),
        (
            lambda one: len(one.filter(label="good")),
            ValueError,
            "'label' holds int64, which 'good' cannot equal",
        ),
        (lambda one: one.filter(3), TypeError, "must be a function of a row, got 3"),
        (lambda one: one.summary("colour"), ValueError, "no column 'colour'"),
        (lambda one: one.summary("tokens"), ValueError, "single values, 'tokens' holds list<string>"),
        (lambda one: one.summary("label", label="y"), ValueError, "no 'y': name it with --label"),
        (lambda one: one.summary(methods=["blankout"]), ValueError, "methods must be one of 'raw'"),
        (lambda one: one.summary(layer=3), ValueError, "the run kept one layer, got 3"),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    whole: Corpus, wrong: Callable[[Corpus], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as found:
        wrong(whole)
    assert "\n" not in str(found.value)


# --- traced again


@pytest.mark.parametrize("cut", [False, True])
def test_a_row_traced_again_has_the_values_of_the_file(whole: Corpus, cut: bool) -> None:
    place = next(place for place, row in enumerate(whole) if row["cut"] is cut)
    row, trace = whole[place], whole.to_trace(place)
    assert trace.tokens[0] == row["tokens"]
    for method in METHODS:
        found = trace.read(method, row["query"], layers=-1)[0, 0, 0]
        np.testing.assert_allclose(found, row[method], atol=1e-6)
    assert trace.predictions(1)[0].labels == [row["prediction"]]


def test_traces_made_again_take_the_arguments_of_trace(whole: Corpus) -> None:
    assert whole.to_trace(0, heads=True).maps[0].dim() == 4


def test_another_model_than_the_runs_is_refused(whole: Corpus, tmp_path: Path) -> None:
    other = small_classifier(tmp_path, seed=1)
    with pytest.raises(
        ValueError, match=r"is not the one that .* was made with, .*its hash is \w+…, not \w+…$"
    ):
        whole.to_trace(0, model=other)
    with pytest.raises(OSError, match="model=… says where the run's model"):
        whole.to_trace(0, model=str(tmp_path / "gone"))
    whole.to_trace(0)


def test_a_model_that_changed_in_its_place_is_refused(model: str, tmp_path: Path) -> None:
    place = tmp_path / "model"
    shutil.copytree(model, place)
    (tmp_path / "in.txt").write_text("good film\nbad plot\n")
    overt.corpus.run(tmp_path / "in.txt", place, tmp_path / "out", workers=1)
    small_classifier(place, seed=5)
    with pytest.raises(ValueError, match="is not the one that"):
        overt.corpus.open(tmp_path / "out").to_trace(0)


# --- summaries


def exploded(corpus: Any, method: str) -> dict[tuple[str, bool], list[float]]:
    """What a reader gets by hand: (token, special) → values."""
    found = defaultdict(list)
    for row in corpus:
        for token, special, value in zip(row["tokens"], row["special"], row[method], strict=True):
            found[token, special].append(value)
    return found


@pytest.mark.parametrize("method", METHODS)
def test_means_are_those_of_the_files_values(whole: Corpus, method: str) -> None:
    by_hand = exploded(whole, method)
    rows = whole.summary().rows(method, least=1)
    assert {(row.name, row.special) for row in rows} == set(by_hand)
    for row in rows:
        values = by_hand[str(row.name), row.special]
        assert row.occurrences == len(values)
        assert row.mean.value == pytest.approx(np.mean(values))
        assert row.special == (row.name in ("[CLS]", "[SEP]"))


def test_a_group_is_what_a_filter_keeps(whole: Corpus) -> None:
    by_kind = whole.summary("kind")
    alone = whole.filter(kind="a").summary()
    assert {row.name: row.mean for row in by_kind.rows("raw", least=1, group="a")} == {
        row.name: pytest.approx(row.mean, nan_ok=True) for row in alone.rows("raw", least=1)
    }
    assert alone.sentences == len(whole.filter(kind="a"))


def test_labels_have_the_models_names_and_errors_are_predictions_that_differ(whole: Corpus) -> None:
    groups = {group.name: group.sentences for group in whole.summary("label").groups()}
    assert groups == {name: len(whole.filter(label=at)) for at, name in enumerate(("bad", "good"))}
    wrong = sum(row["prediction"] != ("bad", "good")[row["label"]] for row in whole)
    errors = {group.name: group.sentences for group in whole.summary("error").groups()}
    assert errors.get("wrong", 0) == wrong
    assert sum(errors.values()) == len(whole)
    assert 0 < wrong < len(whole), "else this test says little"


def test_labels_that_the_model_does_not_have_are_no_errors_but_a_refusal(whole: Corpus) -> None:
    with pytest.raises(ValueError, match="label 'b' of column 'kind' is none of the model's: bad, good"):
        whole.summary("error", label="kind")


def predicting(
    folder: Path, labels: list[str] | None, predictions: list[str | None], truths: list[Any]
) -> Corpus:
    """A corpus of one word, with these predictions and labels."""
    kind = "double" if any(isinstance(truth, float) for truth in truths) else "int64"
    kind = "string" if any(isinstance(truth, str) for truth in truths) else kind
    types = data_types({"text": "string", "label": kind}, ["raw"], -1)
    count = len(truths)
    same = {"text": "a", "tokens": ["a"], "starts": [0], "ends": [1], "special": [False], "cut": False}
    same |= {"query": 0, "probability": 0.5, "raw": [1.0]}
    columns: dict[str, list[Any]] = {name: [value] * count for name, value in same.items()}
    columns |= {"row": list(range(count)), "prediction": predictions, "label": truths}
    settings = {"methods": ["raw"], "text": "text", "layers": -1, "queries": None}
    about = {"model": {"name": "m", "hash": "h"}, "input": {"name": "in"}, "schema": types, "labels": labels}
    store = Store(folder)
    store.begin({"format": 1, "settings": settings, "shards": 1, **about})
    store.write(0, columns, {}, arrow_schema(types))
    return overt.corpus.open(folder)


@pytest.mark.parametrize(
    ("labels", "predictions", "truths", "expected"),
    [
        (["no", "yes"], ["no", "yes", "yes"], [0, 1, 0], {"right": 2, "wrong": 1}),
        (["no", "yes"], ["no", "yes", "yes"], ["0", "yes", "no"], {"right": 2, "wrong": 1}),
        (["1", "0"], ["1", "0"], [1, 0], {"right": 2}),  # names come before numbers
        (None, ["0", "1", "10"], [0, 0, 10], {"right": 2, "wrong": 1}),
        (["no", "yes"], ["no", "yes"], [None, 1], {None: 1, "right": 1}),
        (["no", "yes"], ["no", "yes"], [float("nan"), 1.0], {None: 1, "right": 1}),
        (["1", "2", "3"], ["1", "2", "3"], [1.0, 2.0, 1.0], {"right": 2, "wrong": 1}),
    ],
)
def test_predictions_are_compared_by_the_names_of_classes_or_their_numbers(
    tmp_path: Path, labels: Any, predictions: Any, truths: Any, expected: Any
) -> None:
    groups = predicting(tmp_path, labels, predictions, truths).summary("error").groups()
    assert {group.name: group.sentences for group in groups} == expected


@pytest.mark.parametrize(
    ("labels", "predictions", "truths", "words"),
    [
        (["no", "yes"], ["no"], [2], "label '2' of column 'label' is none of the model's: no, yes"),
        (["no", "yes"], ["no"], ["NO"], "label 'NO' of column 'label' is none"),
        # 1 would be the first class, and 0 too.
        (["1", "2"], ["1", "1"], [1, 0], "label '0' of column 'label' is none of the model's: 1, 2$"),
        (None, ["Ġgood"], ["good"], "predicts tokens or numbers, such as 'Ġgood'"),
        (None, ["0.25"], [0], "predicts tokens or numbers, such as '0.25'"),
        (None, ["1"], ["one"], "none of the model's: numbers from 0"),
        (None, [None], [1], "this model predicts nothing"),
    ],
)
def test_predictions_that_no_label_can_equal_are_refused(
    tmp_path: Path, labels: Any, predictions: Any, truths: Any, words: str
) -> None:
    corpus = predicting(tmp_path, labels, predictions, truths)
    with pytest.raises(ValueError, match=words):
        corpus.summary("error")
    assert set(corpus_page(corpus, least=1).index["about"]["missing"]) == {"error"}


def test_summaries_together_are_those_made_alone(whole: Corpus) -> None:
    together = whole.summaries(["token", "position", "label"])
    for by, summary in together.items():
        assert str(summary.records()) == str(whole.summary(by).records()), "as text, in which NaN equals NaN"


def test_any_of_several_layers_can_be_summed(model: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
    overt.corpus.run(tmp_path / "in.txt", model, tmp_path / "all", layers=None, workers=1)
    for layer in (0, 1):
        overt.corpus.run(tmp_path / "in.txt", model, tmp_path / str(layer), layers=layer, workers=1)
        mine = overt.corpus.open(tmp_path / "all").summary(layer=layer).records()
        theirs = overt.corpus.open(tmp_path / str(layer)).summary().records()
        assert [row["mean"] for row in mine] == pytest.approx([row["mean"] for row in theirs], abs=1e-6)
    with pytest.raises(ValueError, match="one of the 2 that raw was kept for, got 2"):
        overt.corpus.open(tmp_path / "all").summary(layer=2)


def test_parts_with_another_number_of_values_than_tokens_are_refused() -> None:
    types = {"tokens": "list<string>", "special": "list<bool>", "query": "int32", "raw": "list<float>"}
    rows = [{"tokens": ["a", "b"], "special": [False, False], "query": 0, "raw": [1.0]}]
    with pytest.raises(ValueError, match="part-7 is damaged: raw has another number of values than tokens"):
        sentences_of(pa.Table.from_pylist(rows, schema=arrow_schema(types)), ["raw"], -1, "part-7")


def test_a_sliced_table_has_the_values_of_its_rows(whole: Corpus) -> None:
    (_, table), *_ = whole.tables(["tokens", "special", "query", "raw"])
    part = sentences_of(table.slice(3, 2), ["raw"], -1, "slice")
    assert part.values[0].tolist() == pytest.approx(
        [value for place in (3, 4) for value in whole[place]["raw"]]
    )


# --- examples


def test_examples_are_the_same_each_time_and_cover_tokens_and_groups(whole: Corpus) -> None:
    grouping = whole.grouping("kind")
    assert grouping is not None
    rows = chosen_rows(whole, some=3, tokens=["nice"], per_token=2, groupings={"kind": grouping}, per_group=4)
    assert rows == chosen_rows(
        whole, some=3, tokens=["nice"], per_token=2, groupings={"kind": grouping}, per_group=4
    )
    numbers = np.array([row["row"] for row in whole], dtype=np.uint64)
    order = [int(numbers[place]) for place in np.argsort(priority_of(numbers))]
    assert [row["row"] for row in rows[:3]] == order[:3], "those with the lowest priorities"
    nice = [row["row"] for row in whole if "nice" in row["tokens"]]
    assert {row["row"] for row in rows} >= set(sorted(nice, key=order.index)[:2])
    assert min(sum(row["kind"] == kind for row in rows) for kind in "ab") >= 4
    assert len(rows) == len({row["row"] for row in rows}) <= 3 + 2 + 2 * 4


def test_examples_fit_the_room_that_they_are_given(whole: Corpus) -> None:
    rows = chosen_rows(whole, some=35, most_tokens=50)
    assert 0 < sum(len(row["tokens"]) for row in rows) <= 50


def test_priorities_have_no_pattern() -> None:
    values = priority_of(np.arange(10_000, dtype=np.uint64))
    assert np.histogram(values, 10, (0, 1))[0] == pytest.approx(1000, abs=130)
    assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 0.04


def test_tokens_are_shown_as_the_text_has_them() -> None:
    tokens, text = ["[CLS]", "un", "##able", "ok", "[SEP]"], "Unable  OK"
    assert displayed(text, tokens, [0, 0, 2, 8, 0], [0, 2, 6, 10, 0]) == [
        " [CLS]",
        " Un",
        "able",
        " OK",
        " [SEP]",
    ]
    assert displayed(text, tokens, [], []) == [f" {token}" for token in tokens]
    # An emoji of four tokens, the first of which has the space before it.
    assert displayed("a 😀 b", list("abcdef"), [0, 1, 2, 2, 2, 3], [1, 3, 3, 3, 3, 5]) == [
        "a", " 😀", "·", "·", "·", " b",
    ]  # fmt: skip


# --- the page


def index_of(html: str) -> Any:
    return json.loads(html.split('id="overt-index">')[1].split("</script>")[0])


def test_the_page_holds_what_the_corpus_says(whole: Corpus) -> None:
    index = index_of(corpus_page(whole, by=["kind"], least=3, examples=10).html())
    assert [table["by"] for table in index["tables"]] == ["token", "position", "label", "error", "kind"]
    about, (tokens, *_) = index["about"], index["tables"]
    assert (about["sentences"], about["bad"], about["incomplete"]) == (35, BAD, None)
    summary = whole.summary()
    for entry in tokens["rows"]:
        row = next(
            r
            for r in summary.rows("raw", least=3)
            if (r.name, r.special) == (entry["name"], entry["special"])
        )
        assert entry["sentences"] == row.sentences
        assert entry["of"]["raw"]["mean"] == pytest.approx(row.mean, rel=1e-4)
        assert entry["of"]["raw"]["even"] == pytest.approx(row.even, rel=1e-4)
    assert len(tokens["rows"]) == len(summary.rows("raw", least=3))
    rows = {row["row"]: row for row in whole}
    for example in index["examples"]:
        row = rows[example["row"]]
        assert example["tokens"] == row["tokens"]
        assert example["values"]["flow"] == pytest.approx(row["flow"], rel=1e-4)
        truth = ("bad", "good")[row["label"]]
        assert example["groups"] == {
            "label": truth,
            "error": "right" if row["prediction"] == truth else "wrong",
            "kind": row["kind"],
        }


def test_text_stays_text_on_the_page(whole: Corpus) -> None:
    html = corpus_page(whole, title=EVIL).html()
    assert html.count("<script") == 2
    assert "<img" not in html
    assert index_of(html)["examples"][0]["columns"]["note"] == EVIL


def test_a_page_says_what_it_lacks(whole: Corpus, folder: Path, tmp_path: Path) -> None:
    about = corpus_page(whole, label="nothing").index["about"]
    assert set(about["missing"]) == {"label", "error"}
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    (half / "data" / "part-00002.parquet").unlink()
    some = overt.corpus.open(half)
    assert not some.complete
    assert "3 of 4 shards" in corpus_page(some).index["about"]["incomplete"]


@pytest.mark.parametrize(
    ("later", "missing", "reason"),
    [
        (lambda _: -1, {"error"}, "label '-1' of column 'label' is none of the model's"),
        (lambda row: row + 100, {"label", "error"}, "label '110' of column 'label' is none of the model's"),
    ],
)
def test_labels_that_fail_after_the_first_part_do_not_spoil_the_page(
    model: str, tmp_path: Path, later: Callable[[int], int], missing: set[str], reason: str
) -> None:
    rows = [{"text": TEXTS[n % 8], "label": n % 2 if n < 10 else later(n)} for n in range(80)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overt.corpus.run(tmp_path / "in.jsonl", model, tmp_path / "out", methods=["raw"], shard=10, workers=1)
    page = corpus_page(overt.corpus.open(tmp_path / "out"))
    assert set(page.index["about"]["missing"]) == missing
    assert reason in page.index["about"]["missing"]["error"]
    expected = ["token", "position", *({"label", "error"} - missing)]
    assert [table["by"] for table in page.index["tables"]] == expected
    with pytest.raises(ValueError, match=reason):
        corpus_page(overt.corpus.open(tmp_path / "out"), by=["error"])


def test_values_that_are_not_numbers_are_one_group(model: str, tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": TEXTS[n], "x": [float("nan"), 1.5][n % 2]}) + "\n" for n in range(8))
    (tmp_path / "in.jsonl").write_text(rows)
    overt.corpus.run(tmp_path / "in.jsonl", model, tmp_path / "out", methods=["raw"], workers=1)
    groups = overt.corpus.open(tmp_path / "out").summary("x").groups()
    assert {group.name: group.sentences for group in groups} == {None: 4, 1.5: 4}


def test_numbers_of_the_input_keep_their_digits_on_the_page(model: str, tmp_path: Path) -> None:
    row = {"text": "good film", "id": 2**60 + 1, "score": 0.123456789, "label": 1700000000.25}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    overt.corpus.run(tmp_path / "in.jsonl", model, tmp_path / "out", methods=["raw"], workers=1)
    (example,) = corpus_page(overt.corpus.open(tmp_path / "out")).index["examples"]
    assert example["columns"] == {"id": "1152921504606846977", "score": "0.123456789"}
    assert example["label"] == "1700000000.25"


@pytest.mark.parametrize(
    ("layers", "layer", "expected"), [(0, -1, 0), (-2, -1, -2), ((0, 1), 0, 0), ((0,), -1, 0), (None, -1, -1)]
)
def test_the_page_names_the_layer_that_it_shows(
    model: str, tmp_path: Path, layers: Any, layer: int, expected: int
) -> None:
    (tmp_path / "in.txt").write_text("good film\n")
    overt.corpus.run(tmp_path / "in.txt", model, tmp_path / "out", methods=["raw"], layers=layers, workers=1)
    page = corpus_page(overt.corpus.open(tmp_path / "out"), layer=layer)
    assert page.index["about"]["layer"] == expected


def test_a_page_of_many_rows_has_a_sample_of_them(whole: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PER_TOKEN", "PER_GROUP"):
        monkeypatch.setattr(f"overt.corpus.page.{name}", 1)
    page = corpus_page(whole, examples=2)
    assert len(page.index["examples"]) < len(whole)
    words = page.index["about"]["sample"]
    assert words.startswith(f"{len(page.index['examples'])} of 35 sentences: 2 at random")


@pytest.mark.slow
def test_the_page_in_a_browser(whole: Corpus, opened: Callable[..., Any]) -> None:
    html = corpus_page(whole, by=["kind"], least=2, title=EVIL).html()
    shown = opened(html)
    assert shown.locator("tbody tr").count() >= 10
    shown.get_by_role("button", name="Sort by × even").click()
    shown.get_by_role("button", name="nice", exact=True).first.click()
    found = shown.locator("article").count()
    assert 0 < found < len(whole)
    shown.get_by_role("button", name="open", exact=True).first.click()
    assert shown.locator("article.open .words").count() == len(METHODS)
    assert "token=nice" in shown.evaluate("location.hash")
    for by in ("Positions", "Labels", "Errors", "kind"):
        shown.get_by_role("button", name=f"By: {by}").click()
        assert shown.locator("tbody tr").count()
    small = opened(html, "by=kind", width=390, height=800)
    assert small.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0
    shown.get_by_role("searchbox").fill("dull")
    assert shown.evaluate("overt.state().find") == "dull"


# --- the command


def test_the_command_prints_and_writes_what_the_corpus_says(
    folder: Path, whole: Corpus, tmp_path: Path
) -> None:
    result = show(folder, "--least", "3", "--plot", tmp_path / "a.png", "--out", tmp_path / "a.html")
    assert result.exit_code == 0, result.output
    best = whole.summary().rows("rollout", least=3, special=False)[0]
    line = next(line for line in result.output.splitlines() if line.split()[:1] == [best.name])
    assert line.split()[1:3] == [str(best.sentences), f"{best.mean.value:.4f}"] or math.isnan(best.mean.value)
    assert "95 % intervals cover" in result.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert index_of((tmp_path / "a.html").read_text())["about"]["sentences"] == 35


@pytest.mark.parametrize("by", ["position", "label", "error", "kind"])
def test_every_way_to_group_is_printed_and_drawn(folder: Path, tmp_path: Path, by: str) -> None:
    result = show(folder, "--by", by, "--least", "2", "--plot", tmp_path / "a.svg")
    assert result.exit_code == 0, result.output
    words = re.sub(r"<[^>]*>", " ", (tmp_path / "a.svg").read_text())
    assert ("position" in words) if by == "position" else ("contrast" in words)


def test_an_incomplete_run_is_shown_with_a_note(folder: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    (half / "data" / "part-00001.parquet").unlink()
    result = show(half, "--least", "1")
    assert result.exit_code == 0
    assert "incomplete: 3 of 4 shards" in " ".join(result.output.split())
    assert len(overt.corpus.open(half)) < 35


def test_bad_options_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    assert "there is none" in refused(tmp_path / "nothing")
    assert "it has no manifest.json" in refused(tmp_path)
    assert "there is no column 'colour'" in refused(folder, "--by", "colour")
    assert "--label y: there is no such column; columns: text, label" in refused(folder, "--label", "y")
    assert "--out must end in .html" in refused(folder, "--out", tmp_path / "a.txt")
    assert "--plot must end in" in refused(folder, "--plot", tmp_path / "a.gif")
    assert "--method must be one of 'raw'" in refused(folder, "--method", "gradients")
    assert "--sort contrast compares groups" in refused(folder, "--sort", "contrast")
    assert "there is no folder" in refused(folder, "--out", tmp_path / "no" / "a.html")


def test_a_regression_has_no_errors(tmp_path: Path) -> None:
    one = {"num_labels": 1, "id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    model = small_classifier(tmp_path / "regression", **one)
    (tmp_path / "in.jsonl").write_text('{"text": "good film", "label": 0}\n')
    overt.corpus.run(tmp_path / "in.jsonl", model, tmp_path / "out", methods=["raw"], workers=1)
    corpus = overt.corpus.open(tmp_path / "out")
    assert corpus.manifest["labels"] is None
    with pytest.raises(ValueError, match="this model predicts tokens or numbers"):
        corpus.summary("error")


def test_errors_need_labels_and_a_classifier(model: str, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("good film\nbad plot\n")
    overt.corpus.run(tmp_path / "in.txt", model, tmp_path / "out", workers=1)
    words = refused(tmp_path / "out", "--by", "error")
    assert "needs a column of labels" in words
    assert "--label" in words
    types = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert types["labels"] == ["bad", "good"]


def test_a_damaged_part_is_named(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "data" / "part-00001.parquet").write_bytes(b"PAR1 not a part")
    assert "part-00001.parquet is damaged" in refused(broken)


def test_a_manifest_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format": 1}')
    assert "its manifest lacks 'schema'" in refused(tmp_path)
