"""Measures of rationales on plain arrays, against hand loops, scikit-learn and enumeration."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from overt.judge import rationales
from overt.judge.rationales import (
    aopc,
    attainable,
    auprc,
    chosen,
    curves,
    iou_f1,
    log_odds,
    normalised_aopc,
    ranked,
    spans_of,
    token_f1,
    without_and_only,
    words_in,
)

RANDOM = np.random.default_rng(0)


def area_by_hand(truth: list[int], scores: list[float]) -> float:
    """Every threshold, every word; then a trapezoid between each two neighbouring points."""
    points = [(0.0, 1.0)]
    for threshold in sorted(set(scores), reverse=True):
        picked = [right for right, score in zip(truth, scores, strict=True) if score >= threshold]
        points.append((sum(picked) / sum(truth), sum(picked) / len(picked)))
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))


def test_the_area_is_that_of_a_hand_loop_and_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    for number in range(30):
        truth = RANDOM.integers(0, 2, 12)
        truth[number % 12] = 1
        scores = RANDOM.integers(0, 4 + number, 12) / 7.0  # with ties
        precision, recall, _ = metrics.precision_recall_curve(truth, scores)
        area = auprc([truth], [scores])[0]
        assert area == pytest.approx(area_by_hand(truth.tolist(), scores.tolist()))
        assert area == pytest.approx(metrics.auc(recall, precision))
        mean = auprc([truth], [scores], area="average precision")[0]
        assert mean == pytest.approx(metrics.average_precision_score(truth, scores))


def test_a_constant_scorer_is_flattered_by_the_trapezoid_and_not_by_average_precision() -> None:
    truth = np.zeros(1000, dtype=int)
    truth[:300] = 1
    constant = np.zeros(1000)
    assert auprc([truth], [constant])[0] == pytest.approx(0.65)
    assert auprc([truth], [constant], area="average precision")[0] == pytest.approx(0.3)
    random = [auprc([truth], [RANDOM.random(1000)])[0] for _ in range(30)]
    assert np.mean(random) == pytest.approx(0.3, abs=0.02), "random scores get about the prevalence"
    assert auprc([truth], [truth])[0] == 1
    assert math.isnan(auprc([[0, 0]], [[0.1, 0.2]])[0]), "no rationale: not defined"


def test_macro_token_f1_is_the_mean_of_documents_f1() -> None:
    truth = {"a": [1, 1, 0, 0], "b": [0, 0, 0, 1]}
    predicted = {"a": [1, 0, 0, 0], "b": [1, 1, 1, 1]}
    found = token_f1(truth, predicted)
    assert (found.precision, found.recall) == ((1 + 0.25) / 2, (0.5 + 1) / 2)
    assert found.f1 == pytest.approx((2 / 3 + 0.4) / 2)
    assert (found.micro_precision, found.micro_recall) == (2 / 5, 2 / 3)
    assert token_f1(truth, truth) == (1,) * 6


def test_several_passages_may_match_one_so_that_recall_is_2() -> None:
    found = iou_f1([[(0, 4)]], [[(0, 2), (2, 4)]])
    assert (found.precision, found.recall) == (1, 2)
    assert found.f1 == pytest.approx(2 * 1 * 2 / 3), "the F1 of the means"
    assert iou_f1([[(0, 4), (6, 8)]], [[(0, 4), (6, 8)]]) == (1,) * 6
    assert iou_f1([[(0, 4)]], [[(3, 7)]]).f1 == 0
    mixed = iou_f1({"a": [(0, 4)], "b": [(0, 2), (4, 6)]}, {"a": [(0, 4)], "b": [(0, 2)]})
    assert (mixed.precision, mixed.recall, mixed.micro_recall) == (1, 0.75, 2 / 3)


def test_passages_and_words_are_each_other() -> None:
    marked = [0, 1, 1, 0, 0, 1]
    assert spans_of(marked) == [(1, 3), (5, 6)]
    assert words_in([(1, 3), (5, 6), (2, 2)], 6).tolist() == [bool(x) for x in marked]
    assert spans_of([]) == []


def test_as_many_words_as_the_share_rounded_up_and_ties_as_asked() -> None:
    scores = [0.0, 2.0, 0.0, 1.0, 0.0]
    assert ranked(scores, ties="last").tolist() == [1, 3, 4, 2, 0]
    orders = {tuple(ranked(scores, seed=seed).tolist()) for seed in range(40)}
    assert {order[:2] for order in orders} == {(1, 3)}
    assert len(orders) == 6, "every order of the three equal ones comes up"
    sizes = {(800, 0.01): 8, (140, 0.05): 7, (15, 0.2): 3, (3, 0.01): 1}
    assert {(n, share): int(chosen(np.arange(n), share).sum()) for n, share in sizes} == sizes
    without, only = without_and_only(scores, (0.2, 0.4))
    assert only.tolist() == [[False, True, False, False, False], [False, True, False, True, False]]
    assert (without == ~only).all()


def test_aopc_is_the_mean_of_the_code_or_that_of_the_equation() -> None:
    full, changed = [0.9, 0.8], [[0.8, 0.4], [0.8, 0.6]]
    assert aopc(full, changed) == pytest.approx([0.3, 0.1])
    assert aopc(full, changed, plus_one=True) == pytest.approx([0.2, 0.2 / 3])
    assert log_odds([0.5], [[0.25, 0.5]]) == pytest.approx([math.log(0.5) / 2])
    assert log_odds([1.0], [[0.0]]) == pytest.approx([math.log(1e-12)])


WEIGHTS = np.array([2.0, 0.1, 0.0, -0.5, 0.0, 1.5])


def planted(kept: Any) -> Any:
    """Two words decide, and a third speaks against them."""
    return 1 / (1 + np.exp(-(kept @ WEIGHTS[: kept.shape[1]])))


def falls(order: Any) -> float:
    kept = np.ones((len(order) + 1, len(order)), dtype=bool)
    for row, _ in enumerate(order):
        kept[row + 1 :, order[row]] = False
    p = planted(kept)
    return float((p[0] - p[1:]).mean())


def test_no_order_is_more_comprehensive_than_the_true_one_and_the_scale_is_that_of_enumeration() -> None:
    every = [falls(np.array(order)) for order in itertools.permutations(range(6))]
    found = attainable(6, planted)
    assert found is not None
    assert found.exact
    assert (found.least, found.greatest) == pytest.approx((min(every), max(every)))
    true, worst = normalised_aopc(WEIGHTS, planted), normalised_aopc(-WEIGHTS, planted, found)
    assert true is not None
    assert worst is not None
    assert (true.comprehensiveness, true.sufficiency) == pytest.approx((1, 0))
    assert (worst.comprehensiveness, worst.sufficiency) == pytest.approx((0, 1))


def test_the_scale_of_longer_texts_is_searched_and_that_of_long_ones_not_given() -> None:
    weights = np.concatenate([WEIGHTS, np.zeros(8)])

    def predict(kept: Any) -> Any:
        return 1 / (1 + np.exp(-(kept @ weights)))

    found = attainable(14, predict)
    assert found is not None
    assert not found.exact
    best = normalised_aopc(weights, predict, found)
    assert best is not None
    assert best.comprehensiveness == pytest.approx(1), "a beam finds the order of an additive classifier"
    assert attainable(31, predict) is None
    assert normalised_aopc(np.zeros(31), predict) is None
    flat = normalised_aopc([1.0, 2.0], lambda kept: np.full(len(kept), 0.5))
    assert flat is not None
    assert math.isnan(flat.comprehensiveness), "no order makes a difference"
    rounding = normalised_aopc([1.0, 2.0, 3.0], lambda kept: 0.5 + 6e-8 * kept[:, 0])
    assert rounding is not None
    assert math.isnan(rounding.comprehensiveness), "nor does rounding, of float32"


def test_curves_start_together_end_together_and_lie_apart_for_the_true_order() -> None:
    found = curves(WEIGHTS, planted, points=7)
    assert found.morf[0] == found.lerf[0] == planted(np.ones((1, 6)))[0]
    assert found.morf[-1] == found.lerf[-1] == 0.5
    assert (found.lerf >= found.morf).all()
    assert found.between > 0.2
    assert curves(-WEIGHTS, planted, points=7).between == pytest.approx(-found.between)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auprc({"a": [0, 1]}, {"b": [0, 1]}), "scores has no document 'a', which truth has"),
        (lambda: auprc({"a": [0, 1]}, {"a": [0, 1], "b": [1]}), "scores has a document 'b', which truth has"),
        (
            lambda: auprc({"a": [0, 1]}, {"a": [0.1, math.nan]}),
            "document a: scores must be finite, got nan at",
        ),
        (lambda: auprc({"a": [0, 1]}, {"a": [0.1]}), r"document a: scores must .* 2 words, got shape \(1,\)"),
        (lambda: auprc({"a": [0, 2]}, {"a": [0, 1]}), "document a: truth must hold 0 and 1 alone, got 2"),
        (lambda: auprc({"a": [0, 0.5]}, {"a": [0, 1]}), "document a: truth must hold 0 and 1 alone, got 0.5"),
        (lambda: auprc([[0, 1]], [[0, 1]], area="roc"), "area must be one of"),  # type: ignore[arg-type]
        (lambda: auprc([], []), "truth must have at least one document"),
        (lambda: token_f1({"a": [0, 1]}, {"a": [0, 1, 1]}), "document a: predicted must have 2 words, got 3"),
        (lambda: iou_f1({"a": [(2, 1)]}, {"a": []}), "document a: a span must lie within it, got 2 to 1"),
        (lambda: iou_f1({"a": [(2,)]}, {"a": []}), "document a: a span must be two whole numbers"),
        (lambda: iou_f1([[(0.5, 2.7)]], [[]]), r"a span must be two whole numbers, got \(0.5, 2.7\)"),
        (lambda: auprc([[0, 1]], [["a", "b"]]), r"document 0: scores must be numbers, .* got \['a', 'b'\]"),
        (lambda: iou_f1([[]], [[]], threshold=0.0), "threshold must be positive"),
        (lambda: words_in([(3, 9)], 6, "a"), "document a of 6 words: a span must lie within it, got 3 to 9"),
        (lambda: aopc([0.5], [[1.5]]), "changed must hold probabilities, got 1.5 for document 0"),
        (lambda: aopc([0.5], [[0.5], [0.2]]), "changed must have 1 documents, as full has, got 2"),
        (lambda: ranked([1.0, math.inf]), "scores must be finite, got inf at word 1"),
        (lambda: ranked([1.0], ties="first"), "ties must be one of"),  # type: ignore[arg-type]
        (lambda: chosen([1.0], 1.5), r"share must lie in \[0, 1\], got 1.5"),
        (lambda: curves([1.0], lambda kept: kept), "predict must return a finite probability for each of 22"),
    ],
)
def test_bad_input_is_named_with_its_document(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_the_package_is_found_from_the_judge() -> None:
    import overt.judge

    assert overt.judge.rationales is rationales
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        overt.judge.nothing  # noqa: B018
