"""A stand-in for parallel corpora: sentences of the agreement grammar and a made-up language of other order.

"near the lamp , the boy who saw the dogs is happy" has the parts

    near the lamp | the boy | who saw the dogs | is happy

In the made-up language phrases go before what they modify, prepositions and pronouns after their phrase,
verbs to the end of their clause, and a phrase that opens the English sentence comes after the subject:

    the dogs saw who | the boy | the lamp near | happy is

Every word has one translation, so a dictionary gets each word right and the order wrong.
"""

from __future__ import annotations

from random import Random

from overt import _check
from overt.data.agreement import VOCABULARY, WORD_CLASSES, Sentence, generate
from overt.data.pairs import Corpus, Pair

NAME = "stand-in"
_OPENERS = WORD_CLASSES["preposition"] | {"that", "who", "which", "and", "when", "while", "because"}
_OPENERS_AFTER_COMMA = {"along", "together", "like", "unlike"}
_NOMINAL = WORD_CLASSES["noun"] | WORD_CLASSES["adjective"] | {"very"}
_ADJECTIVES = sorted(WORD_CLASSES["adjective"])
_SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


def _dictionary() -> dict[str, str]:
    """A made-up word for every English one."""
    words = [word for word in VOCABULARY if not word.startswith("[")] + ["is", "are"]
    rng, taken = Random(0), {","}
    made = {",": ","}
    for word in words:
        while word not in made:
            candidate = "".join(rng.choices(_SYLLABLES, k=rng.choice((2, 2, 3))))
            if candidate not in taken:
                taken.add(candidate)
                made[word] = candidate
    return made


DICTIONARY = _dictionary()
"""English word → the made-up language's word."""


def corpus(
    train: int = 20_000, valid: int = 500, test: int = 500, seed: int = 0, longest: int = 14
) -> Corpus:
    """A parallel corpus; no test or validation sentence is in training, and none occurs twice in them.

    Args:
        train: number of training pairs.
        valid: number of validation pairs.
        test: number of test pairs.
        seed: random seed.
        longest: most words of an English sentence.
    """
    for name, count in (("train", train), ("valid", valid), ("test", test)):
        _check.whole(name, count, 1)
    rng, held_out, training = Random(seed), dict[str, Pair](), list[Pair]()
    number = 0
    while len(training) < train:
        for sentence in generate(2000, seed + 7919 * number, mix="natural"):
            pair = translate(sentence, rng.choice(_ADJECTIVES))
            if len(pair.source.split()) > longest:
                continue
            if len(held_out) < valid + test:
                held_out.setdefault(pair.source, pair)
            elif pair.source not in held_out:
                training.append(pair)
        number += 1
    held = list(held_out.values())
    return Corpus(
        NAME, "en", "xx", training[:train], held[:valid], held[valid:], tokenised=False, stand_in=True,
        remark="sentences of a small grammar and their translations into a made-up language",
    )  # fmt: skip


def translate(sentence: Sentence, adjective: str) -> Pair:
    """A sentence of the grammar, completed by a verb and an adjective, and its translation."""
    words = list(sentence.tokens)
    front: list[str] = []
    subject = words
    if sentence.construction.startswith("fronted"):
        comma = words.index(",")
        front, subject = words[:comma], words[comma + 1 :]
    verb = "are" if sentence.plural else "is"
    parts = [*reversed(_phrases(subject)), *reversed(_phrases(front)), [adjective, verb]]
    target = [DICTIONARY[word] for part in parts for word in part]
    return Pair(" ".join([*words, verb, adjective]), " ".join(target))


def _phrases(words: list[str]) -> list[list[str]]:
    """The phrases of a clause, each in the made-up language's order: noun phrase, verb, preposition."""
    phrases: list[list[str]] = []
    opener: list[str] = []
    nominal: list[str] = []
    verbal: list[str] = []

    def close() -> None:
        if opener or nominal or verbal:
            phrases.append([*nominal, *verbal, *opener])
        for part in (opener, nominal, verbal):
            part.clear()

    for before, word in zip(["", *words], words, strict=False):
        if word == ",":
            close()
        elif word in _OPENERS or (before == "," and word in _OPENERS_AFTER_COMMA):
            if nominal or verbal:  # otherwise they are one opener, as in "along with"
                close()
            opener.append(word)
        elif word in WORD_CLASSES["determiner"]:
            if nominal:  # a noun phrase right after another: a clause without "that"
                close()
            nominal.append(word)
        elif word in _NOMINAL:
            nominal.append(word)
        else:
            verbal.append(word)
    close()
    return phrases
