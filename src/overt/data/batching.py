"""Batches of labelled word sequences: sorted by length, padded and numbered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol, TypeVar

import torch
from torch import Tensor


class Example(Protocol):
    """A training example of the agreement recipes: words, and whether the verb that follows is plural."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The words."""

    @property
    def plural(self) -> bool:
        """Whether the verb is plural."""


E = TypeVar("E", bound=Example)
Collate = Callable[[Sequence[tuple[int, E]]], dict[str, Tensor]]


def batches(examples: Sequence[E], size: int, seed: int) -> list[list[tuple[int, E]]]:
    """Numbered examples in batches of similar length, which keeps padding low."""
    numbered = list(enumerate(examples))
    Random(seed).shuffle(numbered)
    pool = 16 * size
    batched = []
    for start in range(0, len(numbered), pool):
        near = sorted(numbered[start : start + pool], key=lambda item: len(item[1].tokens))
        batched += [near[first : first + size] for first in range(0, len(near), size)]
    return batched


def pad_batch(items: Sequence[tuple[int, E]], encode: Callable[[E], list[int]]) -> dict[str, Tensor]:
    """Numbered examples as a batch for `AgreementClassifier`, padded with 0."""
    codes = [encode(example) for _, example in items]
    longest = max(map(len, codes))
    return {
        "input_ids": torch.tensor([code + [0] * (longest - len(code)) for code in codes]),
        "attention_mask": torch.tensor([[1] * len(code) + [0] * (longest - len(code)) for code in codes]),
        "labels": torch.tensor([int(example.plural) for _, example in items]),
        "examples": torch.tensor([number for number, _ in items]),
    }
