"""The agreement sentences: labels, attractors, what may and what may not give the label away."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest

from overt.data.agreement import (
    CONSTRUCTIONS,
    VOCABULARY,
    Sentence,
    baselines,
    encode,
    generate,
    split,
)

pytestmark = pytest.mark.slow
# Written out here, apart from the module, so that its own lexicon is not what it is checked against.
IRREGULAR_PLURALS = {"men", "women", "children", "mice", "geese", "oxen"}
DETERMINERS = {"the", "my", "your", "our", "his", "her", "their"}
NUMBER_MARKED = {
    *("a", "an", "this", "these", "those", "each", "every", "many", "few", "several", "all", "both"),
    *("is", "are", "was", "were", "has", "have", "does", "do"),
    *("it", "its", "itself", "they", "them", "themselves"),
}


def looks_plural(noun: str) -> bool:
    return noun in IRREGULAR_PLURALS or noun.endswith("s")


def head_start(sentence: Sentence, nouns: set[str]) -> int:
    """Where the subject starts: at the first determiner that neither a preposition nor the like governs."""
    tokens = sentence.tokens
    if tokens[0] in DETERMINERS:
        return 0
    for place in range(2, len(tokens)):
        before = tokens[place - 1]
        # A noun, a comma or an intransitive verb closes what is fronted; "arrived" and its like end in "ed"
        # or "pt", and no preposition or adjective that stands before a determiner does.
        closed = before in nouns or before == "," or before.endswith(("ed", "pt"))
        if tokens[place] in DETERMINERS and closed:
            return place
    raise AssertionError(f"no subject in {sentence}")


@pytest.fixture(scope="module")
def balanced() -> list[Sentence]:
    return generate(20_000, 7)


@pytest.fixture(scope="module")
def natural() -> list[Sentence]:
    return generate(20_000, 8, mix="natural")


@pytest.fixture(scope="module")
def sets() -> tuple[list[Sentence], list[Sentence]]:
    return split(10_000, 2_000, 0)


@pytest.fixture(scope="module")
def noun_numbers(balanced: list[Sentence], natural: list[Sentence]) -> dict[str, set[bool]]:
    """Every noun form, and the numbers it was given."""
    numbers: dict[str, set[bool]] = {}
    for sentence in balanced + natural:
        for position, plural in sentence.nouns:
            numbers.setdefault(sentence.tokens[position], set()).add(plural)
    return numbers


def accuracy(sentences: list[Sentence], guess: Callable[[Sentence], bool]) -> float:
    return sum(guess(sentence) == sentence.plural for sentence in sentences) / len(sentences)


def test_a_seed_gives_the_same_sentences_and_another_seed_others():
    assert generate(200, 3) == generate(200, 3)
    assert split(100, 50, 3) == split(100, 50, 3)
    assert generate(200, 3) != generate(200, 4)
    assert generate(200, 3) != generate(200, 3, mix="natural")


def test_half_of_the_sentences_are_plural(sets: tuple[list[Sentence], list[Sentence]]):
    for sentences in sets:
        assert 2 * sum(sentence.plural for sentence in sentences) == len(sentences)
    assert sum(sentence.plural for sentence in generate(7, 0)) == 3


@pytest.mark.slow
def test_every_noun_form_is_singular_or_plural_but_not_both(noun_numbers: dict[str, set[bool]]):
    assert len(noun_numbers) >= 100
    for noun, numbers in noun_numbers.items():
        assert numbers == {looks_plural(noun)}, noun


@pytest.mark.slow
def test_every_noun_is_listed(balanced: list[Sentence], noun_numbers: dict[str, set[bool]]):
    for sentence in balanced:
        places = [place for place, token in enumerate(sentence.tokens) if token in noun_numbers]
        assert places == [position for position, _ in sentence.nouns]


def test_labels_agree_with_a_subject_found_by_reading(
    balanced: list[Sentence], natural: list[Sentence], noun_numbers: dict[str, set[bool]]
):
    nouns = set(noun_numbers)
    for sentence in balanced + natural:
        tokens = sentence.tokens
        start = head_start(sentence, nouns)
        head = next(place for place in range(start, len(tokens)) if tokens[place] in nouns)
        heads = [head]
        if tokens[head + 1 : head + 2] == ("and",):
            heads.append(next(place for place in range(head + 1, len(tokens)) if tokens[place] in nouns))
        assert sentence.subject == tuple(heads), str(sentence)
        assert sentence.plural == (len(heads) == 2 or looks_plural(tokens[head])), str(sentence)
        assert sentence.construction.startswith("fronted") == (start > 0), str(sentence)
        assert sentence.construction.endswith("coordinated") == (len(heads) == 2), str(sentence)


def test_attractors_are_the_nouns_after_the_head_with_the_other_number(balanced: list[Sentence]):
    for sentence in balanced:
        after = [
            looks_plural(sentence.tokens[position])
            for position, _ in sentence.nouns
            if position > sentence.subject[0] and position not in sentence.subject
        ]
        assert sentence.attractors == sum(plural != sentence.plural for plural in after), str(sentence)


def test_one_text_has_one_reading(balanced: list[Sentence], natural: list[Sentence]):
    readings: dict[tuple[str, ...], Sentence] = {}
    for sentence in balanced + natural:
        assert readings.setdefault(sentence.tokens, sentence) == sentence


def test_no_word_that_shows_number_is_in_the_vocabulary():
    assert not NUMBER_MARKED & set(VOCABULARY)


@pytest.mark.parametrize("mix", ["balanced", "natural"])
def test_no_word_but_a_noun_tells_the_label(
    mix: str, noun_numbers: dict[str, set[bool]], request: pytest.FixtureRequest
):
    sentences: list[Sentence] = request.getfixturevalue(mix)
    present: Counter[str] = Counter()
    plural: Counter[str] = Counter()
    for sentence in sentences:
        words = set(sentence.tokens) - set(noun_numbers)
        present.update(words)
        plural.update(words if sentence.plural else ())
    for word, count in present.items():
        # 0.05 is what we allow; four standard errors what chance may add for the rare ones.
        assert abs(plural[word] / count - 0.5) < max(0.05, 4 * 0.5 / math.sqrt(count)), word
    for word in (",", "and", "that", "the", "near", "with"):  # common enough for the plain bound
        assert abs(plural[word] / present[word] - 0.5) < 0.05, word


def test_no_simple_rule_goes_far(sets: tuple[list[Sentence], list[Sentence]], balanced: list[Sentence]):
    def most_nouns(sentence: Sentence) -> bool:
        surplus = sum(1 if plural else -1 for _, plural in sentence.nouns)
        return surplus > 0 if surplus else sentence.nouns[0][1]

    def last_before_comma(sentence: Sentence) -> bool:
        comma = sentence.tokens.index(",") if "," in sentence.tokens else len(sentence.tokens)
        return [plural for place, plural in sentence.nouns if place < comma][-1]

    def second_noun(sentence: Sentence) -> bool:
        return sentence.nouns[min(1, len(sentence.nouns) - 1)][1]

    train, test = sets
    for sentences in (test, balanced):
        for name, value in baselines(train, sentences).items():
            assert value <= 0.65, name
        for rule in (most_nouns, last_before_comma, second_noun):
            # Nor may the rule's opposite: a model learns to turn a rule round as easily as to follow it.
            assert 0.25 <= accuracy(sentences, rule) <= 0.75, rule.__name__


@pytest.mark.parametrize(
    ("of", "bound"),
    [
        (lambda sentence: len(sentence.tokens), 0.55),
        (lambda sentence: len(sentence.nouns), 0.55),
        (lambda sentence: (len(sentence.nouns), sum(plural for _, plural in sentence.nouns)), 0.75),
    ],
    ids=["words", "nouns", "plural nouns"],
)
def test_counts_tell_little_even_to_the_best_rule(
    of: Callable[[Sentence], object], bound: float, balanced: list[Sentence]
):
    half = len(balanced) // 2
    plurals: Counter[object] = Counter()
    for sentence in balanced[:half]:
        plurals[of(sentence)] += 1 if sentence.plural else -1
    assert accuracy(balanced[half:], lambda sentence: plurals[of(sentence)] > 0) <= bound


def test_baselines_are_the_rules_they_say():
    def sentence(numbers: str, plural: bool) -> Sentence:
        nouns = tuple((place, number == "p") for place, number in enumerate(numbers))
        return Sentence(("x",) * len(numbers), plural, 0, "simple", nouns, (0,))

    test = [sentence("sp", False), sentence("sp", True), sentence("pp", True), sentence("ps", True)]
    train = [sentence("s", True), sentence("s", True), sentence("s", False)]
    assert baselines(train, test) == {"majority": 0.75, "first noun": 0.75, "nearest noun": 0.5}


def test_train_and_test_share_no_sentence_and_no_test_sentence_comes_twice(
    sets: tuple[list[Sentence], list[Sentence]],
):
    train, test = sets
    assert (len(train), len(test)) == (10_000, 2_000)
    held_out = {sentence.tokens for sentence in test}
    assert len(held_out) == len(test)
    assert held_out.isdisjoint(sentence.tokens for sentence in train)


def test_the_test_set_has_every_attractor_count_and_construction(
    sets: tuple[list[Sentence], list[Sentence]],
):
    train, test = sets
    attractors = Counter(sentence.attractors for sentence in test)
    assert set(attractors) == {0, 1, 2, 3, 4}
    assert min(attractors.values()) >= 100
    constructions = Counter(sentence.construction for sentence in test)
    assert set(constructions) == set(CONSTRUCTIONS)
    assert min(constructions.values()) >= 20
    assert set(CONSTRUCTIONS) == {sentence.construction for sentence in train}
    assert sum(sentence.attractors == 0 for sentence in train) > len(train) / 2


def test_sentences_stay_short(sets: tuple[list[Sentence], list[Sentence]]):
    train, test = sets
    assert max(len(sentence.tokens) for sentence in train + test) <= 22
    assert sum(len(sentence.tokens) for sentence in train) / len(train) < 12


def test_an_encoded_sentence_reads_back(balanced: list[Sentence]):
    for sentence in balanced[:2_000]:
        places = encode(sentence)
        assert VOCABULARY[places[0]] == "[CLS]"
        assert tuple(VOCABULARY[place] for place in places[1:]) == sentence.tokens
        assert encode(str(sentence)) == places


def test_plain_text_is_encoded_whatever_its_case_and_unknown_words_are_marked():
    assert encode("Near the doors, the KEY") == encode("near the doors , the key")
    assert [VOCABULARY[place] for place in encode("the zebra")] == ["[CLS]", "the", "[UNK]"]
    assert encode("") == [1]


def test_the_vocabulary_has_its_specials_first_and_no_word_twice_or_unused(
    balanced: list[Sentence], natural: list[Sentence]
):
    assert VOCABULARY[:3] == ("[PAD]", "[CLS]", "[UNK]")
    assert len(set(VOCABULARY)) == len(VOCABULARY) <= 500
    used = {token for sentence in balanced + natural for token in sentence.tokens}
    assert used == set(VOCABULARY[3:])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: generate(-1, 0), "count must be a whole number of at least 0, got -1"),
        (lambda: generate(2.5, 0), "count must be a whole number of at least 0, got 2.5"),
        (lambda: generate(1, "0"), "seed must be a whole number of at least 0, got '0'"),
        (lambda: generate(1, 0, mix="hard"), "mix must be one of 'natural', 'balanced'; got 'hard'"),
        (lambda: split(-1, 1, 0), "train must be a whole number of at least 0, got -1"),
        (lambda: split(1, True, 0), "test must be a whole number of at least 0, got True"),
        (lambda: split(1, 1, -3), "seed must be a whole number of at least 0, got -3"),
        (lambda: baselines([], generate(1, 0)), "train must contain at least one sentence, got none"),
        (lambda: baselines(generate(1, 0), []), "test must contain at least one sentence, got none"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(call: Callable[[], object], message: str):
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the whole message is compared
        call()
    assert str(caught.value) == message
