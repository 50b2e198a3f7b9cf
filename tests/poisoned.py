"""Memory that is not zero when it is new."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show memory that a kernel should have written and did not, or should not have read and did, as NaN."""
    empty = torch.empty

    def poisoned(*size: int, **options: object) -> Tensor:
        made: Tensor = empty(*size, **options)  # type: ignore[call-overload]
        return made.fill_(float("nan") if made.is_floating_point() else 0xA5)

    monkeypatch.setattr(torch, "empty", poisoned)
