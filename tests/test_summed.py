"""Torch's attention with its log-sum-exp."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from overt.tracing.asked import Asked, Sight
from overt.tracing.kernels.carry import Tiles
from overt.tracing.summed import attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def asked_of(groups: int, causal: bool, device: str = "cpu") -> Asked:
    torch.manual_seed(3)
    query, key = (torch.randn(2, heads, 70, 16).to(device) for heads in (4, 4 // groups))
    query = query * 3
    return Asked(query, key, 0.3, Sight(causal=causal))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_output_and_sums_are_those_of_the_definition(groups: int, causal: bool) -> None:
    asked = asked_of(groups, causal)
    value = torch.randn(2, 4 // groups, 70, 16)
    found = attend(asked.query, asked.key, value, causal, asked.scale)
    assert found is not None
    output, sums = found
    plain = F.scaled_dot_product_attention(
        asked.query, asked.key, value, is_causal=causal, scale=asked.scale, enable_gqa=groups > 1
    )
    torch.testing.assert_close(output, plain, rtol=0.0, atol=0.0)
    exact = asked.scores().logsumexp(dim=-1)
    torch.testing.assert_close(sums.double(), exact, rtol=2e-6, atol=2e-6)
    # Weights that are divided by these sums have a mass of one.
    mass = (asked.scores() - sums.double().unsqueeze(-1)).exp().sum(dim=-1)
    assert float((mass - 1).abs().max()) < 5e-6


def test_other_ways_have_no_sums() -> None:
    query = torch.randn(1, 2, 5, 8)
    half = query.bfloat16()
    assert attend(half, half, half, True, 1.0) is None
    assert attend(query.double(), query.double(), query.double(), True, 1.0) is None
    assert attend(query[..., :5], query[..., :5], query[..., :5], True, 1.0) is None  # torch would pad it
    assert attend(query.clone().requires_grad_(), query, query, True, 1.0) is None
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attend(query, query, query, True, 1.0) is None


@pytest.mark.parametrize("heads", [(0, 1, 2, 3), (2, 0)])
def test_kernels_take_sums_that_are_known(heads: tuple[int, ...]) -> None:
    asked = asked_of(2, True, DEVICE)
    sums = asked.scores().logsumexp(dim=-1).float()
    known = Asked(asked.query, asked.key, asked.scale, asked.sight, sums)
    rows = torch.rand(2, 3, 70, dtype=torch.float64).to(DEVICE)
    expected = rows @ asked.weights()[:, list(heads)].mean(dim=1)
    for each in (asked, known):
        tiles = Tiles(each, heads)
        torch.testing.assert_close(tiles.apply(rows, tiles.sums()), expected, rtol=1e-5, atol=1e-6)
    wrong = Tiles(Asked(asked.query, asked.key, asked.scale, asked.sight, sums + 1.0), heads)
    assert not torch.allclose(wrong.apply(rows, wrong.sums()), expected, rtol=1e-2)  # they are what is used


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks the attention kernels of a GPU")
@pytest.mark.parametrize("width", [64, 128])
def test_a_gpus_own_sums_keep_the_mass_of_a_row_over_32_layers(width: int) -> None:
    torch.manual_seed(4)
    query, key, value = (
        torch.randn(1, heads, 4096, width, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    with torch.no_grad():
        found = attend(query * 3, key, value, True, width**-0.5)
    assert found is not None
    output, sums = found
    plain = F.scaled_dot_product_attention(query * 3, key, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(output, plain, rtol=0.0, atol=0.0)
    tiles = Tiles(Asked(query * 3, key, width**-0.5, Sight(causal=True), sums), tuple(range(8)))
    rows = torch.zeros(1, 1, 4096, dtype=torch.float64, device="cuda")
    rows[..., -1] = 1.0
    for _ in range(32):
        rows = 0.5 * rows + 0.5 * tiles.apply(rows, tiles.sums())
    assert abs(float(rows.sum()) - 1) < 1e-5
