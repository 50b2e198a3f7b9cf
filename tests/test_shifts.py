"""Claims about texts with typos and missing words."""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import SequenceMatcher

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overt.data.shifts import drop_words, typos

TEXTS = [
    "A gripping, well-acted film that never loses its way.",
    "  Two   spaces\tand a tab; «Füße» über Straßen, 2021 and snake_case!\n",
    "oh no it is so bad",
    "",
    "unmissable",
    "AAAA aaaa",
]
LONG = ["every single sentence here holds seven words"] * 600
both = pytest.mark.parametrize("shift", [typos, drop_words])
Shift = Callable[..., list[str]]
few = settings(max_examples=60, deadline=None)


@both
def test_a_rate_of_zero_changes_nothing(shift: Shift) -> None:
    assert shift(TEXTS, 0.0) == TEXTS


@both
def test_the_same_seed_gives_the_same_texts_and_another_seed_others(shift: Shift) -> None:
    assert shift(LONG, 0.3, 5) == shift(LONG, 0.3, 5)
    assert shift(LONG, 0.3, 5) != shift(LONG, 0.3, 6)
    assert len(set(shift(LONG, 0.3))) > 100, "equal texts in different rows change differently"


def test_the_changes_are_the_same_in_every_process() -> None:
    # Written down from one run: a change of these would change every published number.
    assert typos(["wonderful acting throughout"], 1.0) == ["wondreful ajting thrsughout"]
    assert drop_words(["a quiet film about very little"], 0.5) == ["quiet very little"]


@both
@few
@given(st.lists(st.text(max_size=30), min_size=2, max_size=5), st.floats(0, 1), st.integers(0, 9))
def test_other_rows_do_not_change_a_row(shift: Shift, texts: list[str], rate: float, seed: int) -> None:
    together = shift(texts, rate, seed)
    for row, text in enumerate(texts):
        assert shift([text], rate, seed, first=row) == together[row : row + 1]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_typos_come_at_their_rate(rate: float) -> None:
    words = [word for text in typos(LONG, rate) for word in text.split()]
    wrong = sum(word not in set(LONG[0].split()) for word in words)
    # 4,200 words: three standard deviations are at most 0.024.
    assert wrong / len(words) == pytest.approx(rate, abs=0.024)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_words_are_dropped_at_their_rate(rate: float) -> None:
    # At 0.5, a text would lose all seven words once in 128 times, and keeps one: 0.001 of all words.
    left = sum(len(text.split()) for text in drop_words(LONG, rate))
    assert 1 - left / (7 * len(LONG)) == pytest.approx(rate, abs=0.025)


@few
@given(st.text(max_size=60), st.integers(0, 99))
def test_at_rate_one_every_long_word_has_one_typo_and_all_else_stays(text: str, seed: int) -> None:
    word = re.compile(r"[^\W\d_]{4,}")
    (shifted,) = typos([text], 1.0, seed)
    # What stands between the words, in order, is found again.
    pattern = "(.+?)".join(re.escape(part) for part in word.split(text))
    found = re.fullmatch(pattern, shifted, re.S)
    assert found is not None
    for before, after in zip(word.findall(text), found.groups(), strict=True):
        assert before != after
        assert abs(len(before) - len(after)) <= 1


def test_each_kind_of_typo_occurs() -> None:
    kinds = set()
    for text in typos(["planet"] * 200, 1.0):
        if len(text) != 6:
            kinds.add("drop" if len(text) == 5 else "double")
            if len(text) == 7:
                assert re.search(r"(.)\1", text)
        else:
            kinds.add("swap" if sorted(text) == sorted("planet") else "replace")
        assert SequenceMatcher(None, text, "planet").ratio() > 0.7
    assert kinds == {"swap", "drop", "double", "replace"}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_keeps_a_word(text: str) -> None:
    (left,) = drop_words([text], 1.0)
    assert len(left.split()) == min(1, len(text.split()))
    assert left in text


@both
def test_a_higher_rate_adds_to_a_lower_one(shift: Shift) -> None:
    some, more = shift(LONG[:50], 0.2), shift(LONG[:50], 0.6)
    for little, much in zip(some, more, strict=True):
        if shift is typos:
            for plain, before, after in zip(LONG[0].split(), little.split(), much.split(), strict=True):
                assert before in (plain, after)
        else:
            words = iter(little.split())
            assert all(word in words for word in much.split())


@both
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("one text", 0.1), TypeError, "texts must be a list of texts, got 'one text'"),
        ((["a", 3], 0.1), TypeError, r"texts must be a list of texts, got \['a', 3\]"),
        ((["a"], 1.5), ValueError, r"rate must lie in \[0, 1\], got 1.5"),
        ((["a"], "0.1"), TypeError, "rate must be a number, got '0.1'"),
        ((["a"], 0.1, -1), ValueError, "seed must be a whole number of at least 0, got -1"),
    ],
)
def test_bad_arguments_are_named(
    shift: Shift, arguments: tuple[object, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}$"):
        shift(*arguments)
