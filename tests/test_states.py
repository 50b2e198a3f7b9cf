"""Levels of states against the maps that they are made from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from overt.tracing.asked import Asked, Sight
from overt.tracing.levels import Levels
from overt.tracing.methods.method import method_of, read_levels
from overt.tracing.states import StateLevel

TOKENS = 13
RIGHT = torch.arange(TOKENS) < torch.tensor([[TOKENS], [9]])
LEFT = RIGHT.flip(1)
EVERY = torch.ones(2, TOKENS, dtype=torch.bool)
SIGHTS = {
    "everything": (Sight(), EVERY),
    "causal": (Sight(causal=True), EVERY),
    "padded": (Sight(keys=RIGHT), RIGHT),
    "causal, padded left": (Sight(causal=True, keys=LEFT), LEFT),
    "window": (Sight(causal=True, window=4), EVERY),
    "window, padded": (Sight(causal=True, window=3, keys=RIGHT), RIGHT),
    "window to both sides": (Sight(causal=True, offset=2, window=5), EVERY),
    "window to both sides, padded": (Sight(causal=True, offset=3, window=7, keys=LEFT), LEFT),
    "chunks": (Sight(causal=True, chunk=4), EVERY),
    "chunks, padded": (Sight(causal=True, chunk=5, keys=RIGHT), RIGHT),
    "a bias": (Sight(bias=torch.linspace(-2, 2, TOKENS**2).view(1, 1, TOKENS, TOKENS)), EVERY),
    "padding that is seen": (Sight(), RIGHT),
}
IN_PARTS = [name for name in SIGHTS if name not in ("a bias", "padding that is seen")]


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def asked(seed: int, sight: Sight, queries: int = TOKENS, keys: int = TOKENS, **options: Any) -> Asked:
    return Asked(
        normal(seed, 2, 4, queries, 5, **options), normal(seed + 99, 2, 2, keys, 5, **options), 0.7, sight
    )


def dense(levels: Levels) -> Levels:
    """The same levels with maps, which are made by definition."""

    def made(group: Any) -> list[Tensor]:
        return [held.weights() for held in group]

    def shown(held: Asked) -> Tensor:
        places = [torch.arange(count) for count in held.shape[2:]]
        seen = held.sight.shown(*places)
        return torch.ones(1, *held.shape[2:], dtype=torch.bool) if seen is None else seen[:, 0]

    held = [*levels.maps, *levels.encoder, *levels.cross]
    return replace(
        levels,
        maps=made(levels.maps),
        encoder=made(levels.encoder),
        cross=made(levels.cross),
        visible=[shown(each) for each in held],  # type: ignore[arg-type]
    )


def check(levels: Levels, method: str, atol: float = 1e-12, queries: Any = None, **options: Any) -> None:
    got = read_levels(method_of(method), levels, queries, options)
    want = read_levels(method_of(method), dense(levels), queries, options)
    torch.testing.assert_close(got, want, rtol=0.0, atol=atol)


@pytest.mark.parametrize("sight", [Sight(True, 1, 3), Sight(True, chunk=3), Sight(True, 4)])
def test_queries_past_the_last_key_may_see_none(sight: Sight) -> None:
    held = asked(0, sight, queries=TOKENS, keys=7)
    want = held.weights()
    for block in (None, 2 * 2 * 7 * 4):
        torch.testing.assert_close(StateLevel(held, "each", block=block).cells(), want)
        torch.testing.assert_close(StateLevel(held, "each", block=block).row(range(TOKENS)), want)
        rows = normal(1, 2, 3, TOKENS)
        torch.testing.assert_close(StateLevel(held, block=block).apply(rows), rows @ want.mean(dim=1))


@pytest.mark.parametrize("name", SIGHTS)
@pytest.mark.parametrize("method", ["raw", "rollout"])
def test_rows_of_states_are_those_of_maps(name: str, method: str) -> None:
    sight, mask = SIGHTS[name]
    levels = Levels([asked(layer, sight) for layer in range(3)], mask)
    check(levels, method)
    check(levels, method, queries=[12, 3, 8], layers=[2, 0])
    check(levels, method, heads=[3, -3])
    check(levels, method, heads="each", queries=4)


def test_residuals_and_masks_that_differ_between_layers() -> None:
    sights = [Sight(causal=True), Sight(causal=True, window=5), Sight(causal=True)]
    levels = Levels([asked(layer, sight) for layer, sight in enumerate(sights)], EVERY)
    for residual in (0.0, 0.3, 1.0):
        check(levels, "rollout", residual=residual)
    half = replace(levels, maps=[levels.maps[0], dense(levels).maps[1], levels.maps[2]])
    check_same(half, levels)


def check_same(one: Levels, other: Levels) -> None:
    got, want = (read_levels(method_of("rollout"), levels, [5], {}) for levels in (one, other))
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("name", IN_PARTS)
def test_receptive_fields_by_sums_are_those_of_uniform_maps(name: str) -> None:
    sight, mask = SIGHTS[name]
    levels = Levels([asked(layer, sight) for layer in range(3)], mask)
    for method in ("raw", "rollout"):
        check(levels, method, queries=[12, 6], receptive_field=True, atol=1e-11)


def test_a_receptive_field_under_another_mask_is_refused() -> None:
    levels = Levels([asked(0, SIGHTS["a bias"][0])], EVERY)
    with pytest.raises(ValueError, match="receptive_field needs masks of padding, causality, windows and ch"):
        read_levels(method_of("raw"), levels, [0], {"receptive_field": True})


@pytest.mark.parametrize("source_mask", [None, "padded"])
def test_encoder_decoders(source_mask: str | None) -> None:
    source, target = 9, 6
    real = torch.ones(2, source + target, dtype=torch.bool)
    if source_mask:
        real[1, 6:source] = False
        real[1, -2:] = False
    keys = real[:, :source]
    levels = Levels(
        [asked(n, Sight(causal=True), target, target) for n in range(2)],
        real,
        [asked(10 + n, Sight(keys=keys), source, source) for n in range(3)],
        [asked(20 + n, Sight(keys=keys), target, source) for n in range(2)],
    )
    for method in ("raw", "rollout", "flow"):
        check(levels, method)
        check(levels, method, heads="each", queries=[1, 4])
    check(levels, "rollout", receptive_field=True, atol=1e-11)


@pytest.mark.parametrize("name", SIGHTS)
@pytest.mark.parametrize("block", [None, 1, 40])
def test_whole_maps_are_those_by_definition(name: str, block: int | None) -> None:
    held = asked(3, SIGHTS[name][0])
    want = held.weights()
    each, mean = (StateLevel(held, heads, block=block).cells() for heads in ("each", "mean"))
    torch.testing.assert_close(each, want, rtol=0.0, atol=1e-14)
    torch.testing.assert_close(mean, want.mean(dim=1), rtol=0.0, atol=1e-14)


@pytest.mark.parametrize("block", [1, 40])
def test_blocks_of_any_size_agree(block: int) -> None:
    for name, (sight, _) in SIGHTS.items():
        whole = asked(3, sight)
        rows = normal(8, 2, 3, TOKENS)
        got = StateLevel(whole, block=block).apply(rows)
        torch.testing.assert_close(got, rows @ whole.weights().mean(dim=1), rtol=0, atol=1e-12, msg=name)
        places = [7, 12, 0]
        got = StateLevel(whole, "each", block=block).row(places)
        torch.testing.assert_close(got, whole.weights()[:, :, places], rtol=0, atol=1e-12, msg=name)


def test_mass_stays_one_over_32_layers_in_float32() -> None:
    maps = [asked(layer, Sight(causal=True), 96, 96, dtype=torch.float32) for layer in range(32)]
    levels = Levels(maps, torch.ones(2, 96, dtype=torch.bool))
    rows = read_levels(method_of("rollout"), levels, [95], {})
    torch.testing.assert_close(rows.sum(dim=-1), torch.ones(2, 32, 1).double(), rtol=0.0, atol=1e-5)
    check(levels, "rollout", queries=[95], atol=1e-6)


def test_bfloat16_is_no_worse_than_eager() -> None:
    held = asked(1, Sight(causal=True), 200, 200, dtype=torch.float32)
    held = replace(held, query=held.query.bfloat16(), key=held.key.bfloat16())
    exact = held.weights()
    key = held.key.repeat_interleave(2, dim=1)
    scores = (held.query @ key.mT * held.scale).masked_fill(
        ~torch.ones(200, 200, dtype=torch.bool).tril(), float("-inf")
    )
    eager = scores.softmax(dim=-1, dtype=torch.float32).bfloat16().double()
    ours = StateLevel(held, "each").row(range(200))
    assert float((ours - exact).abs().max()) < 0.01 * float((eager - exact).abs().max())
