"""Tokens that are mixed or moved other than by attention, in code that calls no module for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overt
from long_traces import BYTES

WIDTH, HEADS = 16, 4
IDS = torch.randint(1, 50, (2, 20), generator=torch.Generator().manual_seed(0))
Step = Callable[[Tensor], Tensor]


def as_it_is(x: Tensor) -> Tensor:
    return x


class Block(nn.Module):
    def __init__(self, values: Step) -> None:
        super().__init__()
        self.qkv, self.proj, self.values = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), values

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, self.values(v), is_causal=True)
        return x + self.proj(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Functions are called on ids, before all layers, between them, and on values."""

    def __init__(
        self,
        between: Step = as_it_is,
        values: Step = as_it_is,
        before: Step = as_it_is,
        ids: Step = as_it_is,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(values) for _ in range(3))
        self.between, self.before, self.ids = between, before, ids

    def forward(self, idx: Tensor) -> Tensor:
        x = self.before(self.words(self.ids(idx)))
        for block in self.blocks:
            x = self.between(block(x))
        return x


def by_kernel(x: Tensor) -> Tensor:
    kernel = torch.ones(x.shape[-1], 1, 2)
    return x + F.conv1d(F.pad(x.mT, (1, 0)), kernel, groups=x.shape[-1]).mT


MOVING: dict[str, Step] = {
    "flip": lambda x: x.flip(-2),
    "roll": lambda x: x.roll(1, -2),
    "permutation": lambda x: x[..., torch.arange(x.shape[-2]).roll(3), :],
    "shuffled anew": lambda x: x[..., torch.randperm(x.shape[-2]), :],
    "sorted": lambda x: x.gather(-2, x[..., :1].argsort(dim=-2).expand_as(x)),
    "mean": lambda x: x + x.mean(dim=-2, keepdim=True),
    "running sum": lambda x: x.cumsum(dim=-2),
    "shift": lambda x: torch.cat([x[..., :1, :], x[..., :-1, :]], dim=-2),
    "convolution": by_kernel,
    "other examples": lambda x: x.flip(0),
}


@pytest.mark.parametrize("memory", [2**30, BYTES])
@pytest.mark.parametrize("name", MOVING)
def test_tokens_that_are_mixed_or_moved_between_layers_are_noticed(name: str, memory: int) -> None:
    with pytest.raises(
        ValueError, match=r"^blocks\.1 sees a change of one token of idx at other places[^\n]*$"
    ):
        overt.trace(Model(between=MOVING[name]), IDS, memory=memory)


@pytest.mark.parametrize("name", ["flip", "roll", "permutation"])
def test_values_in_another_order_are_noticed(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"^blocks\.0 has values of token 1 of idx at place \d+: they are in"
    ):
        overt.trace(Model(values=MOVING[name]), IDS)


def test_ids_in_another_order_are_noticed() -> None:
    with pytest.raises(ValueError, match=r"^blocks\.0 has values of token 1 of idx at place 14: they are in"):
        overt.trace(Model(ids=lambda ids: ids.flip(1)), IDS)


KEEPING: dict[str, dict[str, Step]] = {
    "nothing": {},
    "each token by itself": {"between": lambda x: F.layer_norm(x, x.shape[-1:]).tanh()},
    "noise in evaluation": {"between": lambda x: x + torch.randn_like(x)},
    "a convolution before all layers": {"before": by_kernel},
    "a token of its own": {"before": lambda x: F.pad(x, (0, 0, 1, 0), value=0.5)},
    "experts": {"between": lambda x: torch.where(x[..., :1] > 0, x.sin(), x.cos())},
}


@pytest.mark.parametrize("name", KEEPING)
def test_tokens_that_keep_their_places_are_traced(name: str) -> None:
    model = Model(**KEEPING[name])
    state = torch.get_rng_state()
    t = overt.trace(model, IDS, heads=True)
    assert len(t.maps) == 3
    if name == "noise in evaluation":
        torch.set_rng_state(state)
    x = model.before(model.words(IDS))  # the maps by hand
    for block, cells in zip(model.blocks, t.maps, strict=True):
        q, k, _ = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in block.qkv(x).chunk(3, dim=-1))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        torch.testing.assert_close(scores.masked_fill(hidden, -torch.inf).softmax(dim=-1).detach(), cells)
        x = model.between(block(x))


def test_values_of_other_layers_are_noticed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layers = nn.Embedding(50, WIDTH), nn.ModuleList(nn.Linear(16, 16) for _ in "ab")

        def forward(self, idx: Tensor) -> Tensor:
            x = first = self.words(idx)
            for layer in self.layers:
                y = layer(x)[:, None]
                x = x + F.scaled_dot_product_attention(y, y, layer(first)[:, None])[:, 0]
            return x

    with pytest.raises(ValueError, match=r"^Model has queries made of what Model wrote, and values that are"):
        overt.trace(Model(), IDS)


def test_these_runs_leave_the_model_and_random_numbers_alone() -> None:
    class Counting(Model):
        calls = 0

        def forward(self, idx: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(idx)

    model = Counting(between=lambda x: x + torch.randn_like(x))
    torch.manual_seed(3)
    overt.trace(model, IDS)
    assert model.calls == 1
    after = torch.rand(1)
    torch.manual_seed(3)
    with torch.no_grad():
        model(IDS)
    assert torch.equal(torch.rand(1), after)


class Cached(nn.Module):
    """As in Llama's first code: keys and values go through a cache, which here holds nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cache = [torch.zeros(4, HEADS, 64, WIDTH // HEADS) for _ in range(2)]
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, *new = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        for cache, states in zip(self.cache, new, strict=True):
            cache[:batch, :, :tokens] = states
        k, v = (cache[:batch, :, :tokens] for cache in self.cache)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        self.weights = scores.softmax(dim=-1).detach()
        y = F.scaled_dot_product_attention(q, k, v, mask)
        return x + self.proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("memory", [2**30, 2000])
def test_keys_and_values_may_be_written_into_a_cache(memory: int) -> None:
    model = Model()
    model.blocks = nn.ModuleList(Cached() for _ in range(3))
    with torch.no_grad():
        model(IDS)
    maps = [block.weights.mean(dim=1) for block in model.blocks]
    t = overt.trace(model, IDS, memory=memory)
    assert (t.kind, t.paths) == ("causal", [f"blocks.{n}" for n in range(3)])
    for layer, cells in enumerate(maps):
        torch.testing.assert_close(
            t.raw([19], layers=layer)[:, 0, 0].float(), cells[:, 19], atol=1e-6, rtol=0
        )


def test_weights_that_are_written_into_are_those_that_are_used() -> None:
    class Written(Block):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            weights = (q @ k.mT).softmax(dim=-1)
            weights[..., 0] = 0.0
            return x + self.proj(weights @ v)

    model = Model()
    model.blocks = nn.ModuleList([Written(as_it_is)])
    t = overt.trace(model, IDS)
    q, k, _ = model.blocks[0].qkv(model.words(IDS)).chunk(3, dim=-1)  # type: ignore[operator]
    want = (q @ k.mT).softmax(dim=-1).detach()
    want[..., 0] = 0.0
    torch.testing.assert_close(t.maps[0], want)
    assert not t.sums_to_one
