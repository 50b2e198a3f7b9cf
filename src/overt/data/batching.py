"""Batches of examples that are words with a label: sorted by length, padded, numbered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol, TypeVar

import torch
from torch import Tensor


class Example(Protocol):
    """What the recipes on agreement learn from: words, and whether the verb to come is plural."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The words."""

    @property
    def plural(self) -> bool:
        """The answer."""


E = TypeVar("E", bound=Example)
Collate = Callable[[Sequence[tuple[int, E]]], dict[str, Tensor]]


def batches(examples: Sequence[E], size: int, seed: int) -> list[list[tuple[int, E]]]:
    """Numbered examples in batches of similar length, so that little of a batch is padding."""
    numbered = list(enumerate(examples))
    Random(seed).shuffle(numbered)
    pool = 16 * size
    out = []
    for start in range(0, len(numbered), pool):
        near = sorted(numbered[start : start + pool], key=lambda item: len(item[1].tokens))
        out += [near[first : first + size] for first in range(0, len(near), size)]
    return out


def padded(items: Sequence[tuple[int, E]], encode: Callable[[E], list[int]]) -> dict[str, Tensor]:
    """Numbered examples as a batch for `AgreementClassifier`, padded with 0."""
    codes = [encode(example) for _, example in items]
    longest = max(map(len, codes))
    return {
        "input_ids": torch.tensor([code + [0] * (longest - len(code)) for code in codes]),
        "attention_mask": torch.tensor([[1] * len(code) + [0] * (longest - len(code)) for code in codes]),
        "labels": torch.tensor([int(example.plural) for _, example in items]),
        "examples": torch.tensor([number for number, _ in items]),
    }
