"""Memory that is not zero when it is new."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show memory that a kernel should have written and did not, or should not have read and did, as NaN."""
    for owner, name in ((torch, "empty"), (torch, "empty_strided"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*arguments: object, **options: object) -> Tensor:
        empty = make(*arguments, **options)
        return empty.fill_(float("nan") if empty.is_floating_point() else 0xA5)

    return made
