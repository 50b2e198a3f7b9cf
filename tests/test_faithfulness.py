"""Every way to explain can be judged, text by text; controls bound it; intervals cover what they say."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import overt
from overt.judge.intervals import interval_over
from overt.judge.rationales import METHODS, attainable, evaluate, every_method, title_of
from overt.judge.rationales.evaluation import FAITHFUL, HUMAN
from overt.judge.rationales.methods import SAME, Scorer, known_methods
from overt.judge.rationales.words import WordClassifier
from overt.tracing.methods.method import methods as registered
from overt.tracing.mixing.mixing import mixings
from small_rationales import Planted
from small_text import small_bert

TEXTS = [
    "plot good film dull scene nice actor plot",
    "good actor scene dull",
    "film plot nice",
    "scene scene actor nice plot good good dull film",
]


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
def bert(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():  # as initialized, attention and gradients are nearly uniform
        for parameter in model.parameters():
            parameter.mul_(4.0)
    return model


@pytest.fixture(scope="module")
def planted(tokenizer: Any) -> Planted:
    return Planted(tokenizer, {"good": 2.0, "nice": 1.5, "dull": -0.3}).eval()


# --- Methods ---


def test_every_method_over_every_mixing_is_among_the_methods() -> None:
    names = every_method()
    assert len(set(names)) == len(names)
    for method, mixing in itertools.product(registered("maps"), mixings()):
        name = method if mixing == "attention" else f"{method}/{mixing}"
        assert SAME.get(name, name) in names
        assert name in known_methods()
    for name, method in registered("model").items():
        assert {name, *method.variants} <= set(names)
    assert set(METHODS) <= set(names)
    assert {"random", "oracle"} <= set(names)
    titles = [title_of(name) for name in names]
    assert len(set(titles)) == len(titles), "no two rows of a table have the same name"


def test_a_mixing_that_is_registered_is_judged(
    monkeypatch: pytest.MonkeyPatch, bert: Any, tokenizer: Any
) -> None:
    from overt.tracing.mixing import mixing as registry
    from overt.tracing.mixing.attention import Attention

    class Doubled(Attention):
        name = "doubled"
        title = "doubled attention"

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    assert "raw/doubled" not in every_method()
    overt.tracing.register_mixing(Doubled)
    assert {"raw/doubled", "rollout/doubled", "flow/doubled"} <= set(every_method())
    found = evaluate(bert, tokenizer, TEXTS[:1], methods=["raw", "raw/doubled"])
    one, other = (found.methods[name].scores[0] for name in ("raw", "raw/doubled"))
    np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("name", ["raw/norm", "rollout/alti", "rollout/relevance", "flow/gradient"])
def test_scores_over_a_mixing_are_the_row_of_the_token_that_is_classified(
    bert: Any, tokenizer: Any, name: str
) -> None:
    method, _, mixing = name.partition("/")
    classifier = WordClassifier(bert, tokenizer)
    scores = Scorer(classifier, 0.2).scores(name, classifier.read(TEXTS[0]))
    row = overt.trace(bert, TEXTS[0], tokenizer=tokenizer, mixing=mixing).read(method, [0], layers=[-1])
    np.testing.assert_allclose(scores, row[0, 0, 0, 1:-1], rtol=1e-5)  # without CLS and SEP


def order_of(bert: Any, tokenizer: Any, name: str) -> list[list[int]]:
    classifier = WordClassifier(bert, tokenizer)
    scorer = Scorer(classifier, 0.2)
    return [np.argsort(-scorer.scores(name, classifier.read(text))).tolist() for text in TEXTS]


@pytest.mark.parametrize("name", list(SAME))
def test_a_name_that_is_left_out_ranks_as_another(bert: Any, tokenizer: Any, name: str) -> None:
    assert order_of(bert, tokenizer, name) == order_of(bert, tokenizer, SAME[name])


def test_rollout_tells_relevance_from_attention_times_gradient(bert: Any, tokenizer: Any) -> None:
    assert order_of(bert, tokenizer, "rollout/relevance") != order_of(bert, tokenizer, "rollout/gradient")


# --- The best order ---


@pytest.mark.parametrize("seed", range(3))
def test_the_best_order_falls_most_of_all_orders(seed: int) -> None:
    weights = np.random.default_rng(seed).normal(size=(2, 5, 5))

    def predict(kept: Any) -> Any:
        """Words count in pairs, too, so that no order of single words' effects need be the best."""
        x = np.einsum("sw,sv,wv->s", kept * 1.0, kept * 1.0, weights[0]) + kept @ weights[1, 0]
        return 1 / (1 + np.exp(-x))

    def fall(order: tuple[int, ...]) -> float:
        kept = np.ones((6, 5), dtype=bool)
        for step, word in enumerate(order):
            kept[step + 1 :, word] = False
        p = predict(kept)
        return float(p[0] - p[1:].mean())

    found = attainable(5, predict)
    assert found is not None
    best = max(itertools.permutations(range(5)), key=fall)
    assert fall(found.order) == pytest.approx(fall(best))
    assert fall(found.order) == pytest.approx(found.greatest)


def test_a_beam_gives_the_order_that_it_found() -> None:
    weights = np.linspace(1.0, 2.0, 14)[np.random.default_rng(0).permutation(14)]

    def predict(kept: Any) -> Any:
        return 1 / (1 + np.exp(-(kept @ weights - 8)))

    found = attainable(14, predict)
    assert found is not None
    assert not found.exact
    assert list(found.order) == np.argsort(-weights).tolist(), "each word adds: the heaviest first"


def test_the_oracle_is_judged_on_the_texts_that_are_short_enough(planted: Any, tokenizer: Any) -> None:
    long = " ".join(["film"] * 31)
    found = evaluate(planted, tokenizer, [long, *TEXTS], methods=["random", "oracle"])
    assert found.methods["oracle"].texts == [1, 2, 3, 4]
    np.testing.assert_allclose(found.methods["oracle"].by_text["normalised_comprehensiveness"], 1.0)
    assert found.paired("oracle", "random", "comprehensiveness").mean > 0
    assert found.paired("oracle", "random", "comprehensiveness").texts == 4
    alone = evaluate(planted, tokenizer, [long], methods=["oracle"])
    assert alone.refused == {"oracle": "the best order is searched for up to 30 words, got 31"}


# --- Text by text ---


def test_given_scores_have_every_measure_of_every_text(planted: Any, tokenizer: Any) -> None:
    rng = np.random.default_rng(0)
    marked = [rng.permutation(np.arange(len(text.split())) < 2).astype(int).tolist() for text in TEXTS]
    ours = [rng.normal(size=len(text.split())) for text in TEXTS]
    found = evaluate(
        planted, tokenizer, TEXTS, marked, ["random"], scores={"captum": ours}, correlation=True
    ).methods["captum"]
    assert set(found.by_text) == {*HUMAN, *FAITHFUL} == set(found.measures)
    for name, values in found.by_text.items():
        assert values.shape == (4,)
        if name != "iou_f1":
            assert found.measures[name] == pytest.approx(np.nanmean(values)), name
    assert found.seconds is None


def test_given_scores_may_be_tensors_as_captum_has_them(planted: Any, tokenizer: Any) -> None:
    ours = [list(range(len(text.split()))) for text in TEXTS]
    tensors = [torch.tensor(each, dtype=torch.bfloat16, requires_grad=True) for each in ours]
    found = evaluate(planted, tokenizer, TEXTS, methods=[], scores={"plain": ours, "captum": tensors})
    for one, other in zip(*(found.methods[name].scores for name in ("plain", "captum")), strict=True):
        np.testing.assert_array_equal(one, other)
    for wrong in (None, dict(enumerate(ours)), iter(ours)):
        with pytest.raises(
            ValueError, match=r"scores\['mine'\] must be a list with a list of numbers for each"
        ):
            evaluate(planted, tokenizer, TEXTS, methods=[], scores={"mine": wrong})
    with pytest.raises(ValueError, match="document 0: scores must be numbers, one for each"):
        evaluate(planted, tokenizer, TEXTS, methods=[], scores={"mine": [text.split() for text in TEXTS]})


def test_correlation_is_spearmans_with_absolute_blankout(planted: Any, tokenizer: Any) -> None:
    from scipy.stats import spearmanr

    ours = [list(range(len(text.split()))) for text in TEXTS]
    methods = ["blankout-absolute", "blankout", "random"]
    against = [[-score for score in scores] for scores in ours]
    given = {"ours": ours, "against": against}
    found = evaluate(planted, tokenizer, TEXTS, methods=methods, scores=given, correlation=True)
    np.testing.assert_allclose(found.methods["blankout-absolute"].by_text["correlation"], 1.0)
    signed = found.methods["blankout"]
    assert any(scores.min() < 0 for scores in signed.scores), "one word speaks against"
    np.testing.assert_allclose(signed.by_text["correlation"], 1.0, err_msg="sizes count, not signs")
    for one, other in zip(*(found.methods[name].by_text["correlation"] for name in given), strict=True):
        assert one == other
    blanked = found.methods["blankout-absolute"].scores
    expected = [spearmanr(a, b).statistic for a, b in zip(ours, blanked, strict=True)]
    np.testing.assert_allclose(found.methods["ours"].by_text["correlation"], expected)
    without = evaluate(planted, tokenizer, TEXTS, methods=["blankout"]).methods["blankout"]
    assert "correlation" not in without.by_text
    assert without.measures["correlation"] is None


def test_blankout_and_its_absolute_values_are_of_the_same_passes(bert: Any, tokenizer: Any) -> None:
    classifier = WordClassifier(bert, tokenizer)
    text = classifier.read(TEXTS[0])
    rows: list[int] = []
    hook = bert.register_forward_hook(lambda _model, _given, output: rows.append(len(output.logits)))
    scorer = Scorer(classifier, 0.2)
    found = {name: scorer.scores(name, text) for name in ("blankout-absolute", "blankout")}
    hook.remove()
    assert sum(rows) == 1 + len(classifier.code(text).places), "the whole text, and each token once"
    coded = classifier.batch([classifier.code(text).arguments])
    with torch.no_grad():
        before = bert(**coded).logits.softmax(dim=-1)[0]
        label = int(before.argmax())
        for word in range(len(text.words)):  # one token each, after CLS
            changed = {**coded, "input_ids": coded["input_ids"].clone()}
            changed["input_ids"][0, word + 1] = tokenizer.unk_token_id
            fall = float(before[label] - bert(**changed).logits.softmax(dim=-1)[0, label])
            assert found["blankout"][word] == pytest.approx(fall, abs=1e-6)
            assert found["blankout-absolute"][word] == pytest.approx(abs(fall), abs=1e-6)


def test_each_method_is_handed_over_once_it_is_done(bert: Any, tokenizer: Any) -> None:
    kept: list[tuple[str, Any]] = []
    told: list[str] = []
    found = evaluate(
        bert,
        tokenizer,
        TEXTS[:2],
        methods=["raw", "pooling", "random"],
        progress=lambda words, _done, _of: told.append(words),
        done=lambda method, own: kept.append((method, own if isinstance(own, str) else len(set(told)))),
    )
    assert [method for method, _ in kept] == ["raw", "pooling", "random"]
    assert kept[1][1] == found.refused["pooling"]
    assert kept[0][1] < kept[2][1], "before the next one begins"


def test_methods_are_compared_on_the_texts_that_both_have(planted: Any, tokenizer: Any) -> None:
    from scipy.stats import ttest_rel

    found = evaluate(
        planted, tokenizer, TEXTS, methods=["blankout", "random"], at_most={"random": 3}, correlation=True
    )
    texts = found.methods["random"].texts
    difference = found.paired("blankout", "random", "comprehensiveness")
    one = found.methods["blankout"].by_text["comprehensiveness"][texts]
    other = found.methods["random"].by_text["comprehensiveness"]
    expected = ttest_rel(one, other).confidence_interval(0.95)
    assert difference.texts == 3
    assert difference[:3] == pytest.approx(((one - other).mean(), expected.low, expected.high))
    with pytest.raises(ValueError, match="measure must be one of"):
        found.paired("blankout", "random", "speed")
    with pytest.raises(ValueError, match="methods must be one of"):
        found.paired("blankout", "raw", "comprehensiveness")


# --- Intervals ---


def test_an_interval_over_texts_is_students() -> None:
    from scipy.stats import ttest_1samp

    values = np.random.default_rng(0).normal(size=20)
    expected = ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = interval_over([*values, math.nan])
    assert found == pytest.approx((values.mean(), expected.low, expected.high, 20, 1))
    assert math.isnan(interval_over([1.0]).low)
    assert interval_over([math.nan]).texts == 0


def test_an_interval_over_seeds_and_texts_covers_the_mean_of_all_models_and_texts() -> None:
    rng = np.random.default_rng(0)
    hits, of_texts_alone = 0, 0
    for _ in range(1000):
        table = rng.normal(size=(3, 1)) + rng.normal(size=(1, 60)) + rng.normal(size=(3, 60))
        _, low, high, _, _ = interval_over(table)
        hits += low <= 0.0 <= high
        _, low, high, _, _ = interval_over(table.flatten())
        of_texts_alone += low <= 0.0 <= high
    assert hits >= 0.93 * 1000
    assert of_texts_alone < 0.6 * 1000, "as if all values were independent"
