"""Words of captions and questions: a tokeniser, and the numbers that networks read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from overt import _check

PADDING = 0  # fills up; the start and the end of a caption, too

_CLITIC = r"'(?:s|re|ve|ll|d|m)\b"
_TOKEN = re.compile(
    r"(?:[a-z]\.)+(?![a-z0-9])"  # u.s.
    r"|(?:mr|mrs|ms|dr|st|jr|sr|vs|ft|etc)\.(?![a-z0-9])"
    r"|'n'"
    rf"|{_CLITIC}|n't\b|\w+?(?=n't\b)"  # dog 's, does n't
    r"|can(?=not\b)|gon(?=na\b)|wan(?=na\b)|got(?=ta\b)"
    r"|\d+(?:[,:]\d+)+"  # 10,000 and 3:30
    rf"|\w+(?:(?:[-./]|(?!{_CLITIC})')\w+)*"  # t-shirt, o'clock
    r"|<\w+>|[][(){}#&=$%@+*]"
)
_BRACKETS = dict(zip("()[]{}", ("-lrb-", "-rrb-", "-lsb-", "-rsb-", "-lcb-", "-rcb-"), strict=True))


def tokenise(text: str) -> list[str]:
    """Lower-case words without punctuation marks, as the Penn Treebank's tokeniser separates captions.

    As captions are scored (Chen et al. 2015, arXiv:1504.00325): with Stanford's PTBTokenizer, whose
    punctuation marks are then left out.
    """
    return [_BRACKETS.get(token, token) for token in _TOKEN.findall(text.lower())]


@dataclass(frozen=True)
class Vocabulary:
    """Words and their numbers: 0 is padding, the words have 1 to n, and any other word n + 1.

    Attributes:
        words: without repetition.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.numbers) < len(self.words):
            twice = next(word for word, count in Counter(self.words).items() if count > 1)
            raise ValueError(f"words must differ, got {twice!r} more than once")

    def __len__(self) -> int:
        """How many numbers there are, padding and unknown words included."""
        return len(self.words) + 2

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Word → number."""
        return {word: number for number, word in enumerate(self.words, 1)}

    @property
    def unknown(self) -> int:
        """The number of all words that are not in the vocabulary."""
        return len(self.words) + 1

    def encode(self, text: str) -> list[int]:
        """The numbers of a text's words."""
        return [self.numbers.get(word, self.unknown) for word in tokenise(text)]

    def decode(self, numbers: Iterable[int]) -> str:
        """The words up to the first padding; one that is unknown is "<unk>"."""
        words = []
        for number in numbers:
            if number == PADDING:
                break
            if not 0 < number < len(self):
                raise ValueError(f"numbers must lie in 0 to {len(self) - 1}, got {number}")
            words.append("<unk>" if number == self.unknown else self.words[number - 1])
        return " ".join(words)

    def captions(self, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        """What a decoder is to say, (texts, length + 1), and where it counts, boolean, of the same shape.

        A caption is followed by its end, 0, which counts, and by padding, which does not. One of more than
        `length` words is cut, and its last word that counts is no end.
        """
        _check.whole("length", length, 1)
        numbers = torch.zeros(len(texts), length + 1, dtype=torch.int64)
        counts = torch.zeros(len(texts), length + 1, dtype=torch.bool)
        for row, text in enumerate(texts):
            known = self.encode(text)[: length + 1]
            numbers[row, : len(known)] = torch.tensor(known, dtype=torch.int64)
            counts[row, : len(known) + 1] = True
        return numbers, counts

    def questions(self, texts: Sequence[str], length: int) -> Tensor:
        """Numbers of the first `length` words of each text, then padding: (texts, length)."""
        _check.whole("length", length, 1)
        numbers = torch.full((len(texts), length), PADDING)
        for row, text in enumerate(texts):
            known = self.encode(text)[:length]
            if not known:
                raise ValueError(f"a question must have a word, got {text!r}")
            numbers[row, : len(known)] = torch.tensor(known)
        return numbers


def vocabulary_of(texts: Iterable[str], least: int = 1) -> Vocabulary:
    """The words that occur at least so often in the texts: the most frequent first, equals by alphabet."""
    _check.whole("least", least, 1)
    counts = Counter(word for text in texts for word in tokenise(text))
    kept = [word for word, count in counts.items() if count >= least]
    return Vocabulary(tuple(sorted(kept, key=lambda word: (-counts[word], word))))
