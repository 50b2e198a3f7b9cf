"""Kernels that carry rows down through states; on a GPU, or in Triton's interpreter, at small sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from overt.mechanisms import backend as switch
from overt.tracing.asked import Asked, Sight
from overt.tracing.kernels import carry
from overt.tracing.states import Place, StateLevel, moved

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALVES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # the interpreter's bfloat16 is wrong
SHARED = [232_448, 166_912, 101_376, 65_536]  # bytes of an H100, an A100, an RTX 30 or 40, a T4
TOKENS = 70
REAL = torch.arange(TOKENS) < torch.tensor([[TOKENS], [41]])
EVERY = torch.ones(2, TOKENS, dtype=torch.bool)
SIGHTS = {
    "everything": (Sight(), EVERY),
    "causal": (Sight(causal=True), EVERY),
    "padded left": (Sight(causal=True, keys=REAL.flip(1)), REAL.flip(1)),
    "window": (Sight(causal=True, window=21, keys=REAL), REAL),
    "window to both sides": (Sight(causal=True, offset=9, window=19), EVERY),
    "chunks": (Sight(causal=True, chunk=23), EVERY),
}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "KERNEL_DEVICES", {"cuda", "cpu"})


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def asked(sight: Sight, queries: int = TOKENS, keys: int = TOKENS, **options: Any) -> Asked:
    query = normal(0, 2, queries, 4, 20, **options).transpose(1, 2)  # as models have them
    return moved(Asked(query, normal(1, 2, 2, keys, 20, **options), 0.4, sight), DEVICE)


def check(
    held: Asked, real: tuple[Tensor, Tensor] | None, heads: Any, atol: float = 1e-6, count_rows: int = 3
) -> None:
    """Against the same level in blocks, in float64."""
    _, _, count, keys = held.shape
    places = [Place(count + keys, keys, count, 0, 0.3)]
    if count == keys:  # all tokens are queries and keys, as in one stack
        places.append(Place(count, 0, count, 0, 0.3))
    wide = replace(held, query=held.query.double(), key=held.key.double())
    for place in places:
        level = StateLevel(held, heads, place, real)
        assert level._unfit() is None
        rows = normal(5, 2, count_rows, place.nodes).abs().softmax(dim=-1).double().to(DEVICE)
        want = StateLevel(wide, heads, place, real).apply(rows)
        got = level.apply(rows)
        torch.testing.assert_close(got, want, rtol=0.0, atol=atol)
        torch.testing.assert_close(got.sum(dim=-1), rows.sum(dim=-1), rtol=0.0, atol=atol)


@pytest.mark.parametrize("name", SIGHTS)
def test_rows_are_those_of_blocks(name: str) -> None:
    sight, mask = SIGHTS[name]
    check(asked(sight), (mask, mask), "mean")


def test_lists_of_heads_and_cross_attention() -> None:
    check(asked(Sight(causal=True)), None, [3, 0])
    check(asked(Sight(keys=REAL[:, :50]), 33, 50), None, "mean")


# Heads, key heads, queries, keys, the mask, and the heads that are averaged.
SHAPES: dict[str, tuple[int, int, int, int, Sight, Any]] = {
    "fewer queries": (6, 2, 33, 50, Sight(causal=True, offset=17), "mean"),
    "more queries": (6, 2, 50, 33, Sight(causal=True, offset=-17), [5, 0, 3]),
    "more queries, unaligned": (4, 4, 50, 33, Sight(causal=True), "mean"),
    "one key head": (3, 1, 17, 17, Sight(causal=True, window=5, offset=-3), "mean"),
    "chunks beyond the keys": (2, 1, 40, 31, Sight(causal=True, chunk=7, offset=4), [1]),
    "a window without causality": (6, 6, 20, 45, Sight(window=9, offset=11), [4, 5, 2, 3]),
    "one query": (5, 5, 1, 40, Sight(causal=True, offset=39), "mean"),
}


@pytest.mark.parametrize("pieces", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_is_that_of_the_definition(
    name: str, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, key_heads, queries, keys, sight, chosen = SHAPES[name]
    monkeypatch.setattr(carry, "PROGRAMS", 1024 if pieces else 1)
    carry._ready_rows.cache_clear()
    key = normal(1, 2, key_heads, keys, 12)
    held = moved(Asked(normal(0, 2, queries, heads, 12).transpose(1, 2), key, 0.4, sight), DEVICE)
    rows = normal(5, 2, 3, queries).abs().to(DEVICE)
    level = StateLevel(held, chosen)
    assert level._unfit() is None
    weights = held.weights()
    want = rows.double() @ (weights.mean(1) if chosen == "mean" else weights[:, chosen].mean(1))
    torch.testing.assert_close(level.apply(rows), want, rtol=0.0, atol=1e-5)
    carry._ready_rows.cache_clear()


@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_exact_but_for_the_rounding_of_sums(dtype: torch.dtype) -> None:
    check(asked(Sight(causal=True), dtype=dtype), None, "mean", atol=2e-6)


def test_masks_that_kernels_do_not_know_run_in_blocks() -> None:
    bias = torch.zeros(1, 1, TOKENS, TOKENS)
    assert StateLevel(asked(Sight(bias=bias)))._unfit() == "a bias"
    assert StateLevel(asked(Sight()), real=(REAL, REAL))._unfit() == "padding that is seen"


def test_padding_may_be_shared_by_all_examples() -> None:
    check(asked(Sight(keys=REAL[1:])), (REAL[1:].expand(2, -1), REAL[1:].expand(2, -1)), "mean")


def test_any_number_of_rows_goes_down_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr(carry, "ROWS_AT_ONCE", 16)
    check(asked(Sight(causal=True), 33, 33), None, "mean", count_rows=2 * carry.ROWS_AT_ONCE + 1)


def test_tiles_fit_the_shared_memory_of_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "INTERPRETED", False)
    monkeypatch.setattr(carry, "TILES", ((32, 128, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1)))
    carry.tile_of.cache_clear()
    kinds = list(itertools.product((1, 2, 4), (1, 3, 4), (64, 128, 256), (2, 4)))
    found = {shared: [carry.tile_of(*kind, shared) for kind in kinds] for shared in SHARED}
    carry.tile_of.cache_clear()
    for shared, choices in found.items():
        for (heads, group, width, size), choice in zip(kinds, choices, strict=True):
            assert choice is not None
            tile, unit = choice
            assert unit <= (heads if size == 2 else 1)
            assert carry.bytes_of(tile, unit, group % unit == 0, width, size) <= shared
    assert found[SHARED[0]][kinds.index((4, 4, 128, 2))] == ((32, 128, 4, 2), 4)  # the one that was timed
    assert len({choice for choices in found.values() for choice in choices}) > 4
