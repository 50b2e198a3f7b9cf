"""Summaries over sentences: against loops over the definition, a bootstrap, and simulated coverage."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from overt.corpus.summary import Estimate, Sentences, Summary, Summing

METHODS = ("raw", "flow")


@dataclass
class Sentence:
    """As a reader would write it down."""

    tokens: list[str]
    special: list[bool]
    values: list[list[float]]  # by method
    query: int = 0
    group: Hashable = None


def batch(sentences: Sequence[Sentence], grouped: bool = False) -> Sentences:
    """The same, flat."""
    names = sorted({token for one in sentences for token in one.tokens})
    return Sentences(
        names=names,
        codes=np.array([names.index(token) for one in sentences for token in one.tokens], dtype=np.int64),
        special=np.array([flag for one in sentences for flag in one.special], dtype=bool),
        lengths=np.array([len(one.tokens) for one in sentences], dtype=np.int64),
        queries=np.array([one.query for one in sentences], dtype=np.int64),
        values=np.array(
            [[value for one in sentences for value in one.values[m]] for m in range(len(METHODS))],
            dtype=np.float64,
        ).reshape(len(METHODS), -1),
        groups=[one.group for one in sentences] if grouped else None,
    )


def summed(sentences: Sequence[Sentence], by: str = "token", cuts: Sequence[int] = ()) -> Summary:
    summing = Summing(METHODS, by)
    for low, high in itertools.pairwise([0, *cuts, len(sentences)]):
        summing.add(batch(sentences[low:high], grouped=by not in ("token", "position")))
    return summing.result()


def made(count: int, seed: int = 0, groups: int = 1, alike: bool = False) -> list[Sentence]:
    """Sentences of random words between two special tokens; shares for one method, amounts for the other.

    Args:
        count: of sentences.
        seed: of the random numbers.
        groups: number of groups.
        alike: whether all occurrences in a sentence have the same value.
    """
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        words = draw.choices("abcdefg", weights=[7, 6, 5, 4, 3, 2, 1], k=draw.randint(2, 9))
        tokens = ["[CLS]", *words, "[SEP]"]
        level = math.exp(draw.gauss(0, 1))
        sizes = [level if alike else draw.expovariate(1.0) * (1 + (token == "a")) for token in tokens]
        raw = [size / (level + 1 if alike else sum(sizes)) for size in sizes]
        flow = [3.0 * draw.random() for _ in tokens]
        special = [True, *(False for _ in words), True]
        found.append(Sentence(tokens, special, [raw, flow], 0, draw.randrange(groups)))
    return found


def by_definition(sentences: Sequence[Sentence], key: Any, method: int) -> dict[Hashable, dict[str, Any]]:
    """Loops over sentences and tokens; `key(sentence, place)` names the row, None for none."""
    rows: dict[Hashable, list[tuple[int, float, float]]] = defaultdict(list)
    for one in sentences:
        values = one.values[method]
        here: dict[Hashable, list[float]] = defaultdict(list)
        for place in range(len(one.tokens)):
            if (name := key(one, place)) is not None:
                here[name].append(values[place])
        for name, found in here.items():
            rows[name].append((len(found), sum(found), len(found) * sum(values) / len(values)))
    result = {}
    for name, cells in rows.items():
        n = len(cells)
        entry: dict[str, Any] = {"sentences": n, "occurrences": sum(c for c, _, _ in cells)}
        for what, at in (("mean", 0), ("ratio", 2)):
            below = sum(cell[at] for cell in cells)
            value = sum(cell[1] for cell in cells) / below
            left = sum((cell[1] - value * cell[at]) ** 2 for cell in cells)
            wide = math.nan
            if n > 1:
                wide = float(stats.t.ppf(0.975, n - 1)) * math.sqrt(n / (n - 1) * left) / below
            entry[what] = Estimate(value, value - wide, value + wide)
        entry["even"] = sum(e for _, _, e in cells) / entry["occurrences"]
        result[name] = entry
    return result


def held(summary: Summary, method: str, oracle: dict[Hashable, dict[str, Any]], name: Any) -> None:
    rows = summary.rows(method, least=1)
    assert {name(row) for row in rows} == set(oracle)
    for row in rows:
        entry = oracle[name(row)]
        assert (row.sentences, row.occurrences) == (entry["sentences"], entry["occurrences"])
        assert row.even == pytest.approx(entry["even"], rel=1e-9)
        for what in ("mean", "ratio"):
            found = getattr(row, what)
            assert found == pytest.approx(entry[what], rel=1e-6, abs=1e-7, nan_ok=True), (row, what)


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_tokens_are_those_of_the_definition(method: str) -> None:
    sentences = made(60)
    oracle = by_definition(
        sentences, lambda one, at: (one.tokens[at], one.special[at]), METHODS.index(method)
    )
    held(summed(sentences), method, oracle, lambda row: (row.name, row.special))


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_positions_are_those_of_the_definition_without_special_tokens(method: str) -> None:
    sentences = made(60)
    oracle = by_definition(sentences, lambda one, at: None if one.special[at] else at, METHODS.index(method))
    summary = summed(sentences, "position")
    held(summary, method, oracle, lambda row: row.name)
    assert [row.name for row in summary.rows(method, least=1)] == sorted(oracle), "in their order"  # type: ignore[type-var]


def test_rows_of_groups_are_those_of_each_groups_sentences_alone() -> None:
    sentences = made(80, groups=3)
    summary = summed(sentences, "kind")
    for group in range(3):
        alone = summed([one for one in sentences if one.group == group])
        here = summary.rows("raw", least=1, group=group)
        assert [(row.name, row.mean, row.ratio) for row in here] == [
            (row.name, pytest.approx(row.mean, nan_ok=True), pytest.approx(row.ratio, nan_ok=True))
            for row in alone.rows("raw", least=1)
        ]


def test_a_contrast_is_the_difference_of_two_summaries_with_welchs_interval() -> None:
    sentences = made(90, groups=2)
    grouped = summed(sentences, "kind")
    contrast = next(row for row in grouped.rows("raw", group=1) if row.name == "a").contrast
    ratios = [
        next(row for row in summed([o for o in sentences if o.group == g]).rows("raw") if row.name == "a")
        for g in (1, 0)
    ]
    assert contrast is not None
    assert contrast.value == pytest.approx(ratios[0].ratio.value - ratios[1].ratio.value)
    # From the intervals of the two back to their variances, then Welch and Satterthwaite.
    variances, counts = [], [row.sentences for row in ratios]
    for row in ratios:
        half = row.ratio.high - row.ratio.value
        variances.append((half / stats.t.ppf(0.975, row.sentences - 1)) ** 2)
    freedom = sum(variances) ** 2 / sum(v**2 / (n - 1) for v, n in zip(variances, counts, strict=True))
    half = stats.t.ppf(0.975, freedom) * math.sqrt(sum(variances))
    assert contrast.high - contrast.value == pytest.approx(half)
    for number, one in enumerate(o for o in sentences if o.group == 1 or o is sentences[0]):
        one.tokens[1], one.group = "rare", int(number > 0)
    rare = [row.contrast for row in summed(sentences, "kind").rows("raw", group=1) if row.name == "rare"]
    assert [one is not None and math.isnan(one.value) for one in rare] == [True], "one other sentence has it"


def test_of_one_value_per_sentence_the_interval_is_students() -> None:
    """Positions occur once in a sentence, so that the mean is a plain one."""
    sentences = made(40)
    row = next(row for row in summed(sentences, "position").rows("flow") if row.name == 2)
    values = [one.values[1][2] for one in sentences if not one.special[2]]
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert row.mean == pytest.approx((np.mean(values), low, high))


@pytest.mark.parametrize("what", ["mean", "ratio"])
def test_intervals_agree_with_a_bootstrap_of_whole_sentences(what: str) -> None:
    sentences = made(150, seed=3)
    row = next(row for row in summed(sentences).rows("raw") if row.name == "b")
    cells = []
    for one in sentences:
        values = one.values[0]
        mine = [value for token, value in zip(one.tokens, values, strict=True) if token == "b"]
        below = len(mine) if what == "mean" else len(mine) * sum(values) / len(values)
        if mine:
            cells.append((sum(mine), below))
    array, draw = np.array(cells), np.random.default_rng(0)
    picks = array[draw.integers(len(array), size=(4000, len(array)))].sum(axis=1)
    low, high = np.quantile(picks[:, 0] / picks[:, 1], [0.025, 0.975])
    found = getattr(row, what)
    width = found.high - found.low
    assert found.low == pytest.approx(low, abs=0.12 * width)
    assert found.high == pytest.approx(high, abs=0.12 * width)


def covered(clustered: bool) -> float:
    """How often the interval of "a" holds the true mean, where a sentence's occurrences are all alike."""
    truth = next(row for row in summed(made(20_000, seed=99, alike=True)).rows("raw") if row.name == "a")
    hits = 0
    for seed in range(200):
        sentences = made(80, seed=seed, alike=True)
        if clustered:
            row = next(row for row in summed(sentences).rows("raw") if row.name == "a")
            _, low, high = row.mean
        else:
            values = [
                value
                for one in sentences
                for token, value in zip(one.tokens, one.values[0], strict=True)
                if token == "a"
            ]
            low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
        hits += low <= truth.mean.value <= high
    return hits / 200


@pytest.mark.slow
def test_intervals_hold_the_mean_as_often_as_they_say() -> None:
    assert 0.91 <= covered(clustered=True) <= 0.985


@pytest.mark.slow
def test_intervals_over_occurrences_would_not() -> None:
    """The negative control: counting each occurrence as an observation of its own promises too much."""
    assert covered(clustered=False) < 0.88


def test_uniform_attention_has_ratio_one_though_its_shares_differ() -> None:
    sentences = []
    for length in range(3, 30):
        tokens = ["[CLS]", *"ab"[: length % 2 + 1], *("c" for _ in range(length))]
        special = [True, *(False for _ in tokens[1:])]
        even = [1.0 / len(tokens)] * len(tokens)
        sentences.append(Sentence(tokens, special, [even, [5.0] * len(tokens)]))
    for by, method in itertools.product(("token", "position"), METHODS):
        for row in summed(sentences, by).rows(method, least=2):
            assert row.ratio.value == pytest.approx(1.0)
            assert row.ratio.high - row.ratio.low == pytest.approx(0.0, abs=1e-6)
            assert row.mean.value == pytest.approx(row.even)
    means = [row.mean.value for row in summed(sentences, "position").rows("raw", least=2)]
    assert means == sorted(means, reverse=True), "later positions are in longer sentences only"
    assert means[0] > 1.5 * means[-1]


def test_a_word_that_is_written_like_a_special_token_is_another_row() -> None:
    sentences = [Sentence(["[SEP]", "[SEP]"], [False, True], [[0.25, 0.75], [1.0, 1.0]]) for _ in range(3)]
    rows = summed(sentences).rows("raw", least=1)
    assert [(row.special, row.mean.value) for row in rows] == [(True, 0.75), (False, 0.25)]


def test_what_a_causal_query_cannot_see_is_not_counted() -> None:
    seen = Sentence(["a", "b", "c", "d"], [False] * 4, [[0.5, 0.5, 0.0, 0.0], [1.0, 3.0, 0.0, 0.0]], query=1)
    summary = summed([seen, seen])
    assert {row.name: row.ratio.value for row in summary.rows("raw", least=1)} == {"a": 1.0, "b": 1.0}
    assert {row.name: row.ratio.value for row in summary.rows("flow", least=1)} == {"a": 0.5, "b": 1.5}
    # An encoder's query sees all tokens, even if it draws on one of them alone.
    encoder = Sentence(["a", "b", "c", "d"], [False] * 4, [[0.5, 0.0, 0.0, 0.5], [1.0] * 4], query=1)
    ratios = {row.name: row.ratio.value for row in summed([encoder, encoder]).rows("raw", least=1)}
    assert ratios == {"a": 2.0, "b": 0.0, "c": 0.0, "d": 2.0}


def test_sentences_with_nan_are_left_out_and_counted() -> None:
    sentences = made(30)
    broken = Sentence(["[CLS]", "a"], [True, False], [[math.nan, 1.0], [1.0, 1.0]])
    summary = summed([*sentences[:10], broken, *sentences[10:]])
    assert (summary.left_out, summary.sentences) == (1, 30)
    assert summary.records() == summed(sentences).records()


def test_groups_say_how_much_falls_on_special_tokens() -> None:
    sentences = made(50, groups=2)
    (alone,) = summed(sentences).groups()
    shares = [(one.values[0][0] + one.values[0][-1]) / sum(one.values[0]) for one in sentences]
    low, high = stats.t.interval(0.95, 49, np.mean(shares), stats.sem(shares))
    assert alone.on_special["raw"] == pytest.approx((np.mean(shares), low, high))
    assert alone.tokens == pytest.approx(np.mean([len(one.tokens) for one in sentences]))
    groups = {group.name: group.sentences for group in summed(sentences, "kind").groups()}
    assert groups == {g: sum(one.group == g for one in sentences) for g in (0, 1)}


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 1000),
    st.lists(st.integers(0, 40), max_size=4).map(sorted),
    st.sampled_from(["token", "position", "kind"]),
)
def test_parts_of_any_size_give_the_same_summary(seed: int, cuts: list[int], by: str) -> None:
    sentences = made(40, seed, groups=2)

    def ordered(summary: Summary) -> list[dict[str, Any]]:
        return sorted(
            summary.records(),
            key=lambda row: [str(row.get(k)) for k in ("method", by, "token", "position", "special")],
        )

    for mine, theirs in zip(
        ordered(summed(sentences, by)), ordered(summed(sentences, by, cuts)), strict=True
    ):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert value == theirs[name] or value == pytest.approx(
                theirs[name], rel=1e-6, abs=1e-7, nan_ok=True
            )


def test_memory_depends_on_the_tokens_not_on_the_sentences() -> None:
    few, many = summed(made(20, seed=1)), summed(made(2000, seed=1), cuts=range(100, 2000, 100))
    assert few._sums.kept.shape == many._sums.kept.shape


def test_tables_are_sorted_and_cut_as_asked() -> None:
    summary = summed(made(60, groups=2), "kind")
    for sort in ("mean", "ratio", "contrast"):
        values = [getattr(row, sort).value for row in summary.rows("raw", sort=sort, least=1)]  # type: ignore[arg-type]
        known = [value for value in values if value == value]
        assert known == sorted(known, reverse=True)
    assert all(row.sentences >= 20 for row in summary.rows(least=20))
    assert all(row.special for row in summary.rows(special=True, least=1))
    assert summary.methods == METHODS
    assert str(summary.rows()) == str(summary.rows("raw")), "the first by default, without rollout"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "gradient"}, "method must be one of 'raw', 'flow'; got 'gradient'"),
        ({"sort": "size"}, "sort must be one of"),
        ({"sort": "contrast"}, "compares groups"),
        ({"least": 0}, "least must be a whole number of at least 1"),
        ({"group": 7}, "group must be one of None; got 7"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as error:
        summed(made(5)).rows(**arguments)
    assert "\n" not in str(error.value)


def test_a_column_with_many_values_is_refused() -> None:
    sentences = made(60)
    for number, one in enumerate(sentences):
        one.group = f"text {number}"
    with pytest.raises(ValueError, match="at most 50 different values, 'text' has more"):
        summed(sentences, "text", cuts=[30])


def test_arrays_that_do_not_fit_are_refused() -> None:
    one = batch(made(3))
    with pytest.raises(ValueError, match=r"values must have shape \(method, token\)"):
        Summing(("raw",)).add(one)
