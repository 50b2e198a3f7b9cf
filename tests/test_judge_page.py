"""The page of `overt judge`: what it holds, that text stays text, and what it does in a browser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from overt.judge.intervals import Interval
from overt.judge.rationales import Evaluation, evaluate
from overt.judge.rationales.steps import STEPS
from overt.judge.rationales.words import WordClassifier
from overt.view.judging import judge_page
from small_judged import DECIDE, judged_classifier, texts_of

pytest_plugins = ["browser"]
EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)> & \u202e \u2028 nice'
METHODS = ["raw", "gradient-input", "random"]
LEFT = {"raw": Interval(0.25, 0.125, 0.375, 5), "random": Interval(1.0, math.nan, math.nan, 1)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from transformers import AutoTokenizer, BertForSequenceClassification

    folder = judged_classifier(tmp_path_factory.mktemp("judged"))
    return BertForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [*texts_of(4)[0], EVIL]


@pytest.fixture(scope="module")
def found(model: tuple[Any, Any], texts: list[str]) -> Evaluation:
    right = [[float(word in DECIDE) for word in text.split()] for text in texts]
    return evaluate(*model, texts, methods=METHODS, scores={"<b>theirs": right}, at_most={"raw": 2})


def index_of(html: str) -> Any:
    match = re.search(r'<script type="application/json" id="overt-index">(.*?)</script>', html, re.S)
    assert match is not None
    return json.loads(match[1])


def test_the_page_holds_what_was_measured(
    found: Evaluation, model: tuple[Any, Any], texts: list[str]
) -> None:
    labels = [0, 1, 0, 1, 0]
    index = index_of(judge_page(found, *model, texts, labels=labels, notes=["a note"], shuffled=LEFT).html())
    rows = {row["name"]: row for row in index["methods"]}
    assert set(rows) == {*METHODS, "<b>theirs"}
    assert rows["raw"]["measures"].pop("shuffled") == [0.25, 0.125, 0.375, False, 5, False]
    assert rows["random"]["measures"].pop("shuffled") == [1.0, None, None, False, 1, False]
    assert [each["better"] for each in index["measures"] if each["key"] == "shuffled"] == ["zero"]
    texts_of_columns = {each["key"]: each.get("texts") for each in index["measures"]}
    assert texts_of_columns["comprehensiveness"] is None
    assert texts_of_columns["normalised_sufficiency"] is None
    assert texts_of_columns["shuffled"] == "1 of 5"
    assert "comprehensiveness" in rows["raw"]["apart"], "it was judged on two texts"
    assert rows["random"]["apart"] == []
    for name, row in rows.items():
        for measure, (mean, low, high, _, count, _) in row["measures"].items():
            values = found.methods[name].by_text[measure]
            assert count == np.isfinite(values).sum()
            assert mean == pytest.approx(np.nanmean(values), abs=1e-3)
            assert low is None or low <= mean <= high
    assert [row["texts"] for row in index["methods"]] == [2, 5, 5, 5]
    assert rows["random"]["control"]
    assert not rows["raw"]["control"]
    assert rows["<b>theirs"]["seconds"] is None
    assert rows["<b>theirs"]["measures"]["comprehensiveness"][3], "the right words lead"
    assert not rows["random"]["measures"]["comprehensiveness"][3]
    assert not rows["<b>theirs"]["measures"]["comprehensiveness"][5], "and are told to beat random ones"
    assert index["about"]["classes"] == ["negative", "positive"]
    assert index["about"]["notes"] == ["a note"]
    assert [entry["label"] for entry in index["texts"]] == labels
    assert list(index["texts"][1]["methods"]) == [*METHODS[1:], "<b>theirs"], "raw was judged on two texts"


def test_probabilities_are_those_of_texts_written_without_the_words(
    found: Evaluation, model: tuple[Any, Any], texts: list[str]
) -> None:
    classifier = WordClassifier(*model)
    index = judge_page(found, *model, texts).index
    for entry, text in zip(index["texts"], texts, strict=True):
        assert entry["words"] == text.split()
        assert entry["counts"][0] == 0
        assert entry["counts"][-1] == -(-len(entry["words"]) // 2)
        for own in entry["methods"].values():
            assert len(set(own["order"])) == entry["counts"][-1]
            taken = [own["scores"][word] for word in own["order"]]
            assert taken == sorted(own["scores"], reverse=True)[: len(taken)], "the highest first"
            for count, probability, now, top in zip(
                entry["counts"], own["probabilities"], own["now"], own["top"], strict=True
            ):
                left = [word for i, word in enumerate(entry["words"]) if i not in own["order"][:count]]
                again = classifier.read(left)
                whole = classifier.probabilities(again, np.ones((1, len(left)), dtype=bool))[0]
                assert probability == pytest.approx(whole[entry["predicted"]], abs=1e-3)
                assert (now, top) == (whole.argmax(), pytest.approx(whole.max(), abs=1e-3))
    assert index["about"]["shares"] == pytest.approx(STEPS)


def test_text_stays_text_on_the_page(found: Evaluation, model: tuple[Any, Any], texts: list[str]) -> None:
    html = judge_page(found, *model, texts, title=EVIL, notes=[EVIL], facts=[EVIL], names=[EVIL] * 5).html()
    assert html.count("<script") == 2
    assert "<img" not in html
    assert index_of(html)["texts"][4]["words"] == EVIL.split()
    assert index_of(html)["title"] == EVIL


def test_a_page_of_many_texts_has_some_and_says_so(
    found: Evaluation, model: tuple[Any, Any], texts: list[str]
) -> None:
    told: list[tuple[int, int]] = []
    page = judge_page(found, *model, texts, most=2, report=lambda *counts: told.append(counts))
    assert [entry["name"] for entry in page.index["texts"]] == ["1", "5"], "spread evenly"
    assert page.index["about"]["facts"] == ["5 texts, 2 on this page"]
    assert told == [(1, 2), (2, 2)]
    assert "2 texts" in repr(page)


def test_a_column_of_fewer_texts_says_so_and_the_best_order_has_no_time(model: tuple[Any, Any]) -> None:
    texts = ["good film plot", "nice plot " * 16]
    index = judge_page(evaluate(*model, texts, methods=["random", "oracle"]), *model, texts).index
    measures = {each["key"]: each for each in index["measures"]}
    assert measures["normalised_comprehensiveness"]["texts"] == "1 of 2"
    about = measures["normalised_comprehensiveness"]["about"]
    assert about.endswith("Of 1 of 2 texts: the others have more than 30 words.")
    rows = {row["name"]: row for row in index["methods"]}
    assert rows["oracle"]["seconds"] is None
    assert rows["random"]["seconds"] is not None
    assert rows["oracle"]["apart"] == ["comprehensiveness", "sufficiency", "between"]


def test_a_text_that_no_method_was_judged_on_has_its_steps(model: tuple[Any, Any]) -> None:
    texts = ["good film plot", "nice plot " * 16]
    index = judge_page(evaluate(*model, texts, methods=["oracle"]), *model, texts).index
    assert index["texts"][1]["methods"] == {}
    assert index["texts"][1]["counts"] == [0, 2, 4, 5, 7, 8, 10, 12, 13, 15, 16]


def test_other_texts_than_those_judged_are_refused(
    found: Evaluation, model: tuple[Any, Any], texts: list[str]
) -> None:
    with pytest.raises(ValueError, match="texts must be the 5 that were judged, got 4"):
        judge_page(found, *model, texts[:4])
    with pytest.raises(ValueError, match="text 2 is not the one that was judged: it has other words"):
        judge_page(found, *model, [texts[0], "good film", *texts[2:]])
    with pytest.raises(ValueError, match="labels must be 5, one for each text, got 1"):
        judge_page(found, *model, texts, labels=[1])
    with pytest.raises(ValueError, match="sort must be one of"):
        judge_page(found, *model, texts, sort="beauty")


@pytest.mark.slow
def test_the_page_in_a_browser(
    found: Evaluation, model: tuple[Any, Any], texts: list[str], opened: Callable[..., Any]
) -> None:
    html = judge_page(found, *model, texts, title=EVIL, labels=[0, 1, 0, 1, 0]).html()
    shown = opened(html)
    assert shown.locator(".ranking tbody tr").count() == 4
    assert shown.locator(".ranking tbody th").first.inner_text() == "<b>theirs", "the best comes first"
    article = shown.locator("article", has_text="<b>theirs")
    assert article.locator("del").count() == 2, "20 % of six words, rounded up"
    full = article.locator(".said").inner_text()
    slider = shown.get_by_role("slider", name="Delete")
    slider.fill("0")
    assert article.locator("del").count() == 0
    assert article.locator(".said").inner_text() != full, "deleting the deciding word moves the prediction"
    slider.focus()
    shown.keyboard.press("End")
    assert shown.evaluate("document.activeElement.type") == "range", "it stays in use"
    assert article.locator("del").count() == 3
    shown.get_by_role("button", name="Sort by suff.").click()
    assert shown.locator("th[aria-sort]").inner_text() == "suff. ↓"
    assert shown.evaluate("document.activeElement.getAttribute('aria-label')") == "Sort by suff."
    shown.keyboard.press("p")
    assert "Text 5" in shown.locator("h2").inner_text(), "before the first comes the last"
    assert "onerror=alert(1)" in shown.locator("article").last.inner_text()
    assert shown.evaluate("location.hash") == "#text=4&step=10&sort=sufficiency"
    shown.keyboard.press("n")
    shown.keyboard.press("ArrowLeft")
    assert shown.evaluate("overt.state()") == {"text": 0, "step": 9, "sort": "sufficiency"}
    small = opened(html, "text=4&step=2", width=390, height=800, color_scheme="dark")
    assert small.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0
    assert small.locator(".overt.judge").get_attribute("data-theme") == "dark"
    assert (
        "was not judged on this text"
        in opened(html, "text=1").locator("article", has_text="raw").inner_text()
    )


LOOKS = """() => {
  const light = (css) => {
    const [r, g, b] = css.match(/[\\d.]+/g).slice(0, 3).map((part) => {
      const one = Number(part) / 255;
      return one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  return [...document.querySelectorAll("del")].map((word) => {
    const { color, backgroundColor, textDecorationColor, opacity } = getComputedStyle(word);
    const against = [color, textDecorationColor].map((ink) => contrast(ink, backgroundColor));
    return Number(opacity) < 1 ? 0 : Math.min(...against);
  });
}"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_struck_words_can_be_read_on_any_shade(
    found: Evaluation, model: tuple[Any, Any], texts: list[str], opened: Callable[..., Any], scheme: str
) -> None:
    shown = opened(judge_page(found, *model, texts).html(), "step=10", color_scheme=scheme)
    contrasts = shown.evaluate(LOOKS)
    assert len(contrasts) >= 9, "half of six words by three methods and more"
    assert min(contrasts) > 4.5


@pytest.mark.slow
def test_a_table_that_goes_on_says_so_and_methods_are_rows_of_one_line(
    model: tuple[Any, Any], opened: Callable[..., Any]
) -> None:
    texts = ["good film plot", "nice plot " * 16]
    methods = ["pooling", "raw", "gradient-input", "random", "oracle"]
    page = judge_page(evaluate(*model, texts, methods=methods), *model, texts)
    html = page.html()
    wide = opened(html)
    assert not wide.get_by_text("more columns").is_visible(), "all of it is seen"
    heights = wide.locator("article").evaluate_all("all => all.map((one) => one.offsetHeight)")
    assert len(heights) == 4
    assert max(heights) < 50, "also where the prediction turns"
    refused = wide.locator(".ranking tr", has_text="pooling attention").inner_text()
    assert "– BertForSequenceClassification has no attention that pools" in refused
    last = wide.locator(".ranking tr.apart")
    assert "1 of 2 texts" in last.inner_text(), "the best order stands below the others"
    assert "of fewer texts, and not to be compared" in wide.locator(".ranking").inner_text()
    assert "1 of 2 texts" in wide.locator("thead th", has_text="norm. comp.").inner_text()
    wide.get_by_role("button", name="Sort by norm. comp.").click()
    assert last.count() == 0, "of the same texts"
    own = page.index["texts"][1]["methods"]["raw"]
    own["now"] = [1 - page.index["texts"][1]["predicted"]] * len(own["now"])
    long = opened(page.html(), "text=1", width=800).locator("article[data-method=raw]")
    tall, bar, turned = (
        each.bounding_box() for each in (long, long.locator(".bar"), long.locator(".turned"))
    )
    assert tall["height"] > 75, "its words are on several lines"
    assert turned["y"] - bar["y"] < 30, "what is predicted now stands under its bar"
    small = opened(html, width=400, height=800)
    more, rows = small.get_by_text("more columns"), small.locator(".rows")
    assert more.is_visible()
    assert "gradient" in rows.evaluate("(rows) => getComputedStyle(rows).maskImage"), "its edge fades"
    rows.focus()
    rows.evaluate("(rows) => { rows.scrollLeft = rows.scrollWidth; }")
    more.wait_for(state="hidden")
    assert rows.evaluate("(rows) => getComputedStyle(rows).maskImage") == "none"
    step = small.evaluate("overt.state().step")
    small.keyboard.press("ArrowLeft")
    assert small.evaluate("overt.state().step") == step, "arrows scroll a table that is in use"
    assert small.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0


@pytest.mark.slow
def test_a_page_without_any_method_says_nothing_undefined(
    model: tuple[Any, Any], opened: Callable[..., Any]
) -> None:
    texts = ["good film plot"]
    page = judge_page(evaluate(*model, texts, methods=["pooling"]), *model, texts)
    page.index["texts"][0]["counts"] = []  # as earlier versions wrote them
    shown = opened(page.html())
    body = shown.locator("body").inner_text()
    assert "undefined" not in body
    assert "NaN" not in body
    assert "no attention that pools" in body
