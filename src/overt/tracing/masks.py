"""Masks turned back into parts: padding, causality, windows and chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import zip_longest

import torch
from torch import Tensor

from overt.mechanisms.attention import FINITE_HIDDEN
from overt.tracing.asked import HIDDEN, Sight

ROWS = 512  # rows of a mask that are looked at together
# A score that hides a key, though another score, or a bias, was added to the mask's number.
UNSEEN = FINITE_HIDDEN / 2
AROUND = 500.0  # no score and no bias is so large, but for one that falls with each token
FAR_BELOW = -1e8  # a number that hides whatever the bias


def sight_of(
    mask: Tensor, queries: int, keys: int, *, exact: bool = False, room: Callable[[int], None] | None = None
) -> Sight:
    """What a mask shows, in parts where these make exactly this mask, and as a bias otherwise.

    A query that finite numbers hide all keys from sees them all the same, and then the mask is kept as it is.

    Args:
        mask: boolean (True is visible) or additive, (batch or 1, head or 1, query or 1, key or more).
        queries: number of queries.
        keys: number of keys.
        exact: whether this holds for padding, too, and an additive mask need not be copied; otherwise, a
            query whose own key no query sees is padding, and sees nothing.
        room: called with the bytes of a copy before it is made; raises an error if there is no room for it.
    """
    whole = mask[..., :keys]
    added = whole.dtype != torch.bool
    mask = _of_one_head(whole)
    revealing = added and _reveals(mask, exact)
    if mask.shape[1] == 1 and not revealing and not (added and _biased(mask)):
        shown = _Shown(mask, queries, keys)
        for sight in shown.guesses():
            if shown.is_that_of(sight):
                return sight
    if added and exact:
        return Sight(bias=whole)
    mask = mask.detach()
    if room is not None:
        room(mask.numel() * (mask.element_size() if added else torch.float32.itemsize))
    if not added:
        return Sight(bias=torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, HIDDEN))
    return Sight(bias=mask.clone() if revealing else mask.masked_fill(~shown_cells(mask), HIDDEN))


def shown_cells(mask: Tensor) -> Tensor:
    """Which cells a mask shows, boolean; those with finite numbers may be hidden."""
    return mask if mask.dtype == torch.bool else _above(mask, _least_shown(mask))


def blocks(mask: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """First row, some rows of a mask, and which of their cells it shows."""
    least = _least_shown(mask)
    for start, rows in _blocks(mask):
        yield start, rows, rows if rows.dtype == torch.bool else _above(rows, least)


def _blocks(mask: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, mask.shape[-2], ROWS):
        yield start, mask[..., start : start + ROWS, :]


def _above(mask: Tensor, least: float) -> Tensor:
    return (mask > least) | mask.isnan()


def _least_shown(mask: Tensor) -> float:
    """The number that hides, with all below.

    A bias that falls with each token reaches it, too, over many tokens. It then has numbers around it, and
    only numbers far below hide.
    """
    if mask.dtype != torch.bool:
        for _, rows in _blocks(mask):
            if bool(((rows < UNSEEN + AROUND) & (rows > UNSEEN - AROUND)).any()):
                return max(FAR_BELOW, 0.9 * torch.finfo(mask.dtype).min)
    return UNSEEN


def cells_of(*masks: Tensor) -> int:
    """How many cells the sum of masks has."""
    sizes = zip_longest(*(mask.shape[::-1] for mask in masks), fillvalue=1)
    return math.prod(map(max, sizes))


def _of_one_head(mask: Tensor) -> Tensor:
    """The mask of the first head, if all have the same."""
    same = mask.stride(1) == 0 or all(torch.equal(mask[:, 0], other) for other in mask.unbind(dim=1)[1:])
    return mask[:, :1] if same else mask


def _reveals(mask: Tensor, exact: bool) -> bool:
    """Whether a query that sees no other key sees those that finite numbers hide; padding, only if exact."""
    known = torch.zeros(mask.shape[0], mask.shape[-1], dtype=torch.bool, device=mask.device)
    alone: list[Tensor] = []  # (batch, query)
    for _, rows, shown in blocks(mask):
        known |= shown.any(dim=-2).any(dim=1)
        alone.append((~shown.any(dim=-1) & (rows > HIDDEN).any(dim=-1)).any(dim=1))
    found = torch.cat(alone, dim=-1)
    if not exact and found.shape[-1] == known.shape[-1]:
        found = found & known
    return bool(found.any())


def _biased(mask: Tensor) -> bool:
    """Whether an additive mask has other numbers than 0 where it shows a key."""
    return any(bool((shown & (rows != 0.0)).any()) for _, rows, shown in blocks(mask))


class _Shown:
    """A mask that shows or hides, looked at in blocks of rows."""

    def __init__(self, mask: Tensor, queries: int, keys: int) -> None:
        self.mask, self.queries, self.keys = mask, queries, keys
        real = torch.zeros(mask.shape[0], keys, dtype=torch.bool, device=mask.device)
        # How far keys are seen ahead of their query and behind it, and where a query first sees none behind.
        ahead, behind, alone = -keys - queries, 0, keys
        self.whole = mask.shape[-2] == queries > 1
        for start, rows in self._blocks():
            real |= rows.any(dim=-2)
            if not self.whole:
                continue
            at = torch.arange(start, start + rows.shape[-2], device=mask.device)
            sees = rows.any(dim=-1)
            numbers = rows.to(torch.uint8)
            first, last = numbers.argmax(dim=-1), keys - 1 - numbers.flip(-1).argmax(dim=-1)
            ahead = max(ahead, int((last - at).masked_fill(~sees, ahead).max()))
            behind = max(behind, int((at - first).masked_fill(~sees, behind).max()))
            starts = at.expand_as(first)[sees & (first == at) & (at > 0)]
            alone = min(alone, int(starts.min()) if starts.numel() else keys)
        self.real = None if bool(real.all()) else real
        self.ahead, self.behind, self.alone = ahead, behind, alone

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        """First row, and rows as boolean (batch, row, key)."""
        for start, _, shown in blocks(self.mask[:, 0]):
            yield start, shown

    def guesses(self) -> list[Sight]:
        """Parts that may make this mask, likeliest first."""
        everything = Sight(keys=self.real)
        if not self.whole or self.ahead < -self.queries:
            return [everything]
        causal = Sight(causal=True, offset=self.ahead, keys=self.real)
        window = Sight(causal=True, offset=self.ahead, window=self.behind + self.ahead + 1, keys=self.real)
        chunks = Sight(causal=True, chunk=self.alone, keys=self.real)
        near = [window] if self.behind + self.ahead >= 0 else []
        near += [chunks] if self.ahead == 0 and self.alone < self.keys else []
        return [causal, *near, everything] if self.ahead <= 0 else [everything, causal, *near]

    def is_that_of(self, sight: Sight) -> bool:
        """Whether the parts make exactly this mask."""
        places = torch.arange(self.keys, device=self.mask.device)
        for start, rows in self._blocks():
            at = torch.arange(start, start + rows.shape[-2], device=self.mask.device)
            seen = sight.shown(at, places)
            whole = torch.ones_like(rows) if seen is None else seen[:, 0]
            if not torch.equal(whole.expand_as(rows), rows):
                return False
        return True
