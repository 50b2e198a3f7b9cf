"""Masks turned back into parts: padding, causality and a causal window."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from overt.attaching.plain import split_mask
from overt.tracing.asked import HIDDEN, Sight

ROWS = 512  # rows of a mask that are looked at together


def sight_of(mask: Tensor, queries: int, keys: int) -> Sight:
    """What a mask shows, in parts where these make exactly this mask, and as a bias otherwise.

    Args:
        mask: boolean (True is visible) or additive, (batch or 1, head or 1, query or 1, key or more).
        queries: number of queries.
        keys: number of keys.
    """
    mask = mask[..., :keys]
    if mask.shape[1] == 1 and (mask.dtype == torch.bool or not _biased(mask)):
        shown = _Shown(mask, queries, keys)
        for sight in shown.guesses():
            if shown.is_that_of(sight):
                return sight
    if mask.dtype == torch.bool:
        return Sight(bias=torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, HIDDEN))
    visible, bias = split_mask(mask)
    assert bias is not None
    return Sight(bias=bias.masked_fill(~visible, HIDDEN))


def _biased(mask: Tensor) -> bool:
    """Whether an additive mask has anything but 0 where it shows a key."""
    for start in range(0, mask.shape[-2], ROWS):
        shown, bias = split_mask(mask[..., start : start + ROWS, :])
        if bias is not None and bool((shown & (bias != 0.0)).any()):
            return True
    return False


class _Shown:
    """A mask that shows or hides, looked at in blocks of rows."""

    def __init__(self, mask: Tensor, queries: int, keys: int) -> None:
        self.mask, self.queries, self.keys = mask, queries, keys
        real = torch.zeros(mask.shape[0], keys, dtype=torch.bool, device=mask.device)
        ahead, back = False, 0  # whether a key after its query is seen, and how far back keys are seen
        self.square = mask.shape[-2] == queries == keys > 1
        places = torch.arange(keys, device=mask.device)
        for start, rows in self._blocks():
            real |= rows.any(dim=-2)
            if not self.square:
                continue
            at = torch.arange(start, start + rows.shape[-2], device=mask.device)
            ahead = ahead or bool((rows & (places > at.unsqueeze(1))).any())
            first = torch.where(rows.any(dim=-1), rows.int().argmax(dim=-1), at)
            back = max(back, int((at - first).max()) + 1)
        self.real = None if bool(real.all()) else real
        self.ahead, self.back = ahead, back

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        """First row, and rows as boolean (batch, row, key)."""
        for start in range(0, self.mask.shape[-2], ROWS):
            yield start, split_mask(self.mask[:, 0, start : start + ROWS])[0]

    def guesses(self) -> list[Sight]:
        """Parts that may make this mask, likeliest first."""
        if not self.square or self.ahead:
            return [Sight(keys=self.real)]
        return [Sight(causal=True, keys=self.real), Sight(causal=True, window=self.back, keys=self.real)]

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
