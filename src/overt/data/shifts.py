"""Texts as careless writers would send them: with typos, or with words missing.

Row i of the result depends only on that text, the rate, the seed and the row's number, `first` + i. A higher
rate keeps every change of a lower one and adds more, so that curves over rates compare the same changes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from string import ascii_lowercase

from overt import _check

_WORD = re.compile(r"[^\W\d_]{4,}")  # runs of four letters or more, of any alphabet
_PIECE = re.compile(r"\s*\S+")


def typos(texts: Sequence[str], rate: float, seed: int = 0, *, first: int = 0) -> list[str]:
    """The texts with a typo in each word of four letters or more with probability `rate`.

    A typo swaps two neighbouring letters, drops one, doubles one or replaces one; it always changes the word,
    which keeps at least three letters. Shorter words, digits, punctuation and spaces stay.

    Args:
        texts: the texts, one per row.
        rate: probability of a typo in a word, from 0 (nothing changes) to 1.
        seed: random seed.
        first: number of the first text's row, for texts that come in pieces.
    """

    def misspell(text: str, rng: Random) -> str:
        def change(match: re.Match[str]) -> str:
            # Drawn in any case, so that the following words do not depend on the rate.
            chance, changed = rng.random(), _misspelt(match[0], rng)
            return changed if chance < rate else match[0]

        return _WORD.sub(change, text)

    return _rows("typos", misspell, texts, rate, seed, first)


def drop_words(texts: Sequence[str], rate: float, seed: int = 0, *, first: int = 0) -> list[str]:
    """The texts without each of their words, whatever lies between spaces, with probability `rate`.

    A text never loses all of its words.

    Args:
        texts: the texts, one per row.
        rate: probability that a word is left out, from 0 (nothing changes) to 1.
        seed: random seed.
        first: number of the first text's row, for texts that come in pieces.
    """

    def thin(text: str, rng: Random) -> str:
        pieces = _PIECE.findall(text)
        chances = [rng.random() for _ in pieces]
        kept = [number for number, chance in enumerate(chances) if chance >= rate]
        if len(kept) == len(pieces):
            return text
        kept = kept or [chances.index(max(chances))]
        return "".join(pieces[number] for number in kept).lstrip()

    return _rows("drop_words", thin, texts, rate, seed, first)


def _rows(
    name: str, change: Callable[[str, Random], str], texts: Sequence[str], rate: float, seed: int, first: int
) -> list[str]:
    """Every text, changed with a generator of its own."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"texts must be a list of texts, got {texts!r}"[:120])
    _check.fraction("rate", rate)
    _check.whole("seed", seed, 0)
    _check.whole("first", first, 0)
    # Seeded by a text, whose hash is the same in every process, and of which no two are alike.
    return [change(text, Random(f"{name} {seed} {first + row}")) for row, text in enumerate(texts)]


def _misspelt(word: str, rng: Random) -> str:
    """The word with one typo, always another word."""
    kind, place = rng.choice(("swap", "drop", "double", "replace")), rng.randrange(len(word))
    other = rng.choice([letter for letter in ascii_lowercase if letter != word[place].lower()])
    if kind == "swap":
        pairs = [number for number in range(len(word) - 1) if word[number] != word[number + 1]]
        if pairs:
            place = pairs[place % len(pairs)]
            return word[:place] + word[place + 1] + word[place] + word[place + 2 :]
        kind = "drop"  # all of its letters are the same
    if kind == "drop":
        return word[:place] + word[place + 1 :]
    if kind == "double":
        return word[:place] + word[place] + word[place:]
    return word[:place] + (other.upper() if word[place].isupper() else other) + word[place + 1 :]
