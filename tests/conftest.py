"""Settings and helpers that several test files share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

# One profile for all: no timing enters a verdict, and a failure can be repeated.
settings.register_profile(
    "overt", deadline=None, max_examples=30, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("overt")

# torch gives most warnings once per process; then which test fails for one would depend on their order.
torch.set_warn_always(True)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def live_kernel(
    heads: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """A random convolution with bias whose ReLU lets much through."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(heads, heads, size, size, generator=generator, dtype=dtype) * 0.5
    bias = torch.rand(heads, generator=generator, dtype=dtype) + 0.5
    return weight, bias


def random_maps(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal maps that do not depend on the global generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
