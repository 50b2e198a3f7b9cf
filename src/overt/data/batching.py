"""Batches of examples: by number, epoch after epoch; and of words, sorted by length and padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset


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


class Epochs(Dataset[Tensor]):
    """Batches of numbers of examples, in another order for each epoch; the last, smaller one is left out.

    With several processes, which take turns, each batch comes in as many parts as there are processes. The
    numbers are on `device`: those of an epoch go there together.
    """

    def __init__(
        self,
        count: int,
        batch: int,
        updates: int,
        seed: int,
        processes: int = 1,
        device: torch.device | None = None,
    ) -> None:
        self.count, self.batch, self.updates, self.seed = count, min(batch, count), updates, seed
        self.processes, self.device = processes, device
        self.latest: tuple[int, Tensor] | None = None  # an epoch and its order
        if self.batch % processes:
            raise ValueError(
                f"a batch of {self.batch} examples cannot be shared equally among {processes} processes: "
                "start as many as divide it"
            )

    @property
    def per_epoch(self) -> int:
        """Updates of an epoch."""
        return self.count // self.batch

    def __len__(self) -> int:
        return self.updates * self.processes

    def __getitem__(self, index: int) -> Tensor:
        update, part = divmod(index, self.processes)
        epoch, place = divmod(update, self.per_epoch)
        return self._order(epoch)[place * self.batch : (place + 1) * self.batch][part :: self.processes]

    def _order(self, epoch: int) -> Tensor:
        """The order of an epoch; it takes a millisecond to make for 60,000 examples."""
        if self.latest is None or self.latest[0] != epoch:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed + epoch)
            self.latest = epoch, torch.randperm(self.count, generator=generator).to(self.device)
        return self.latest[1]


class Numbers(Dataset[dict[str, Tensor]]):
    """The numbers of the examples of each batch, for models that have the examples themselves."""

    def __init__(self, epochs: Epochs) -> None:
        self.epochs = epochs

    def __len__(self) -> int:
        return len(self.epochs)

    def __getitem__(self, update: int) -> dict[str, Tensor]:
        return {"numbers": self.epochs[update]}


def swapped(count: int, seed: int) -> Tensor:
    """For each of `count` images the number of another, each once, (count,)."""
    if count < 2:
        raise ValueError(f"images can be shuffled if there are two at least, got {count}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    other = torch.empty_like(order)
    other[order] = order.roll(1)  # one cycle through all: none stays
    return other
