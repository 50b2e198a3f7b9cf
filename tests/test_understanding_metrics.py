"""GLUE's and SQuAD's metrics against torchmetrics and scipy's definitions, and cases worked out by hand."""

from __future__ import annotations

import math
import statistics
import sys
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_f1_score, binary_matthews_corrcoef
from torchmetrics.text import SQuAD

from overt._extras import present
from overt.judge.understanding import (
    Score,
    Threshold,
    best_threshold,
    exact_match,
    normalise,
    score,
    squad,
    token_f1,
)

sklearn = pytest.mark.skipif(not present("sklearn"), reason="scikit-learn is not installed")

# --- GLUE ---

classes = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=30)


@sklearn
@given(classes)
def test_mcc_and_f1_are_those_of_torchmetrics(pairs: list[tuple[int, int]]) -> None:
    labels, predicted = (torch.tensor(column) for column in zip(*pairs, strict=True))
    ours = score("F1", labels.tolist(), predicted.tolist()).value
    assert ours == pytest.approx(float(binary_f1_score(predicted, labels)), abs=1e-6)
    if len(set(labels.tolist())) == len(set(predicted.tolist())) == 2:
        theirs = float(binary_matthews_corrcoef(predicted, labels))
        assert score("MCC", labels.tolist(), predicted.tolist()).value == pytest.approx(theirs, abs=1e-6)


def test_without_scikit_learn_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    for metric in ("MCC", "F1"):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'overt\[understanding\]'"):
            score(metric, [0, 1], [1, 0])


@sklearn
def test_f1_is_of_class_1_and_0_where_it_is_never_predicted() -> None:
    assert score("F1", [1, 1, 1, 0], [1, 1, 0, 0]).value == pytest.approx(0.8)  # precision 1, recall 2/3
    assert score("F1", [1, 1, 0], [0, 0, 0]) == Score(0.0)
    assert score("F1", [0, 0], [0, 0]) == Score(0.0)


def test_accuracy_by_hand() -> None:
    assert score("accuracy", [0, 1, 2, 2], np.array([0, 1, 1, 2])) == Score(0.75)


@pytest.mark.parametrize(("labels", "predicted"), [([0, 1, 1], [1, 1, 1]), ([0, 0], [0, 1]), ([1], [1])])
def test_mcc_of_constant_values_is_0(labels: list[int], predicted: list[int]) -> None:
    assert score("MCC", labels, predicted) == Score(0.0)


def ranks(values: list[float]) -> list[float]:
    """Places in order; equal values have the mean of theirs."""
    return [sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values]


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), min_size=3, max_size=30))
def test_correlations_are_those_of_the_standard_library(pairs: list[tuple[int, int]]) -> None:
    labels, predicted = ([value / 10 for value in column] for column in zip(*pairs, strict=True))
    for metric, columns in (
        ("Pearson", (labels, predicted)),
        ("Spearman", (ranks(labels), ranks(predicted))),
    ):
        found = score(metric, labels, predicted)
        if len(set(labels)) == 1 or len(set(predicted)) == 1:
            assert found.value is None
        else:
            assert found.value == pytest.approx(statistics.correlation(*columns), abs=1e-9)


@pytest.mark.parametrize("metric", ["Pearson", "Spearman"])
def test_an_undefined_correlation_is_none_with_its_reason(metric: str) -> None:
    assert score(metric, [1.0, 2.0, 3.0], [2.5, 2.5, 2.5]) == Score(None, "all predictions are 2.5")
    assert score(metric, [4.0, 4.0], [2.5, 3.5]) == Score(None, "all labels are 4")
    assert score(metric, [1.0, 2.0], [math.nan, 1.0]) == Score(None, "predictions are not all finite")


@pytest.mark.parametrize(
    ("metric", "labels", "predicted", "message"),
    [
        ("BLEU", [1], [1], r"metric must be one of 'accuracy', 'MCC', 'F1', .*; got 'BLEU'"),
        ("accuracy", [1, 0], [1], "predicted must be as many as labels, got 1 and 2"),
        ("accuracy", [], [], "needs at least one label"),
        ("accuracy", [1, 0], [0.9, 0.2], r"needs classes: predicted must be whole numbers, got 0\.9"),
        ("accuracy", [1, 0], [[1, 0], [0, 1]], r"predicted must be a list .* of shape \(2, 2\)"),
        ("F1", [0, 2], [0, 1], "labels must be 0 or 1, got {0, 2}"),
    ],
)
def test_what_cannot_be_scored_is_refused(metric: str, labels: Any, predicted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score(metric, labels, predicted)


# --- SQuAD ---

words = st.lists(
    st.sampled_from(
        ["a", "An", "the", "The", "theme", "Eiffel", "tower", "1889", "U.S.", "—", "it's", "$5", "é"]
    ),
    max_size=6,
).map(" ".join)
answers = st.one_of(words, st.text(max_size=12))


@given(st.lists(st.tuples(answers, st.lists(answers, min_size=1, max_size=3)), min_size=1, max_size=5))
def test_exact_match_and_f1_are_those_of_torchmetrics(rows: list[tuple[str, list[str]]]) -> None:
    metric = SQuAD()
    for name, (answer, references) in enumerate(rows):
        target = {"answers": {"answer_start": [0] * len(references), "text": references}, "id": str(name)}
        metric.update([{"prediction_text": answer, "id": str(name)}], [target])
    theirs = metric.compute()
    best = [[max(f(answer, one) for one in all_) for answer, all_ in rows] for f in (exact_match, token_f1)]
    assert 100 * statistics.fmean(best[0]) == pytest.approx(float(theirs["exact_match"]), abs=1e-3)
    assert 100 * statistics.fmean(best[1]) == pytest.approx(float(theirs["f1"]), abs=1e-3)
    if all(normalise(reference) for _, references in rows for reference in references):
        ours = squad(
            {str(name): answer for name, (answer, _) in enumerate(rows)},
            {str(name): references for name, (_, references) in enumerate(rows)},
        )
        assert ours["all"][:2] == pytest.approx([statistics.fmean(column) for column in best])


def test_normalising_by_hand() -> None:
    assert normalise(" The  U.S.' \t\n theme, an A-team ") == "us theme ateam"
    assert token_f1("the Eiffel tower in Paris", "Eiffel Tower") == pytest.approx(2 * 2 / (4 + 2))
    assert token_f1("b b c", "b b b") == pytest.approx(2 / 3), "words count as often as both have them"


def test_questions_without_an_answer_by_hand() -> None:
    references = {"a": ["1889", "in 1889"], "b": [], "c": [], "d": ["Eiffel"], "e": ["the"]}
    found = squad({"a": "In 1889.", "b": "", "c": "Paris", "d": "", "e": ""}, references)
    assert found["all"] == (3 / 5, 3 / 5, 5)
    assert found["answerable"] == (1 / 2, 1 / 2, 2)
    assert found["impossible"] == (2 / 3, 2 / 3, 3), "a reference that is but an article is none"
    assert squad({"a": "1889"}, {"a": ["1889"]})["impossible"] == (None, None, 0)
    with pytest.raises(ValueError, match="answers must have every question, and b is missing"):
        squad({"a": ""}, references | {"a": []})
    with pytest.raises(ValueError, match="at least one question"):
        squad({}, {})


def test_the_best_threshold_by_hand() -> None:
    references: dict[str, list[str]] = {"a": ["x"], "b": ["y"], "c": [], "d": ["z"]}
    given = {"a": "x", "b": "y", "c": "w", "d": "wrong"}
    margins = {"a": -3.0, "b": 1.0, "c": 2.0, "d": 5.0}
    assert best_threshold(given, margins, references) == Threshold(1.0, 3 / 4)
    tied = {"a": -3.0, "b": 1.0, "c": 1.0, "d": 1.0}
    assert best_threshold(given, tied, references) == Threshold(-3.0, 2 / 4), "equal margins answer together"
    nothing, value = best_threshold({"a": "w"}, {"a": 4.0}, {"a": []})
    assert (nothing < 4.0, value) == (True, 1.0)
    with pytest.raises(ValueError, match="margins must have every question, and d is missing"):
        best_threshold(given, {"a": 0.0, "b": 0.0, "c": 0.0}, references)


rows = st.tuples(st.sampled_from([["x"], ["x y"], []]), st.sampled_from(["x", "y"]), st.integers(-3, 3))


@given(st.lists(rows, min_size=1, max_size=12), st.sampled_from(["exact", "f1"]))
def test_no_threshold_is_better_than_the_best(
    cases: list[tuple[list[str], str, int]], by: Literal["exact", "f1"]
) -> None:
    references = {str(place): case[0] for place, case in enumerate(cases)}
    given = {str(place): case[1] for place, case in enumerate(cases)}
    margins = {str(place): float(case[2]) for place, case in enumerate(cases)}

    def with_threshold(threshold: float) -> float:
        chosen = {name: "" if margins[name] > threshold else text for name, text in given.items()}
        return float(getattr(squad(chosen, references)["all"], by))

    best = best_threshold(given, margins, references, by)
    assert with_threshold(best.threshold) == pytest.approx(best.score)
    assert best.score == pytest.approx(max(map(with_threshold, (-4.0, *margins.values()))))
