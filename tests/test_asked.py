"""Queries and keys with a mask in parts, against torch's attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overt.tracing.asked import Asked, Sight


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


REAL = torch.tensor([[True] * 7, [False, True, True, True, True, False, True]])
SIGHTS = {
    "everything": (Sight(), {}),
    "causal": (Sight(causal=True), {"is_causal": True}),
    "keys": (Sight(keys=REAL), {"attn_mask": REAL[:, None, None, :]}),
    "a bias": (Sight(bias=normal(5, 1, 4, 7, 7)), {"attn_mask": normal(5, 1, 4, 7, 7)}),
}


@pytest.mark.parametrize("name", SIGHTS)
def test_weights_times_values_are_torchs_attention(name: str) -> None:
    sight, arguments = SIGHTS[name]
    query, key, value = normal(0, 2, 4, 7, 6), normal(1, 2, 2, 7, 6), normal(2, 2, 2, 7, 6)
    weights = Asked(query, key, 0.3, sight).weights()
    want = F.scaled_dot_product_attention(query, key, value, scale=0.3, enable_gqa=True, **arguments)
    torch.testing.assert_close(weights @ value.repeat_interleave(2, dim=1), want)


def test_windows_and_continued_queries_see_what_they_say() -> None:
    query, key = normal(0, 1, 1, 3, 4), normal(1, 1, 1, 8, 4)
    seen = Asked(query, key, 1.0, Sight(causal=True, offset=5, window=2)).weights() > 0
    assert [row.nonzero().flatten().tolist() for row in seen[0, 0]] == [[4, 5], [5, 6], [6, 7]]


def test_queries_that_see_nothing_have_zeros() -> None:
    query, key = normal(0, 1, 1, 2, 4), normal(1, 1, 1, 2, 4)
    hidden = Sight(causal=True, keys=torch.tensor([[False, True]]))
    torch.testing.assert_close(
        Asked(query, key, 1.0, hidden).weights()[0, 0], torch.tensor([[0.0, 0.0], [0.0, 1.0]]).double()
    )
