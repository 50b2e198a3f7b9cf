"""The mechanisms' forms for the CPU: compiled loops in float32 against the definitions in float64."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import overt
from overt.mechanisms import backend, loops, noise
from overt.mechanisms.bayesian import _draw_cpu
from overt.mechanisms.bayesian.naive import log_noise, map_kl
from overt.mechanisms.evolving import _evolve_cpu, naive
from overt.mechanisms.maps import HIDDEN, causal, log_normalizer, softmax
from overt.mechanisms.site import KINDS

MASKS = ("none", "padding", "causal", "random", "per head")
CONFIGS = {
    "weibull": overt.Bayesian(),
    "weibull, much noise": overt.Bayesian(k=0.7, prior_beta=2.0, kl_reduction="mean"),
    "scores": overt.Bayesian(posterior="scores"),
    "lognormal": overt.Bayesian(family="lognormal", sigma=0.8),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def visibility(mask: str, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """A mask; all but the first two hide some rows from everything."""
    if mask == "none":
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)
    if mask == "padding":
        lengths = torch.arange(batch).view(-1, 1, 1, 1) % keys + 1
        return torch.arange(keys).view(1, 1, 1, -1) < lengths
    if mask == "causal":
        return causal(queries, keys)
    shape = (batch, heads if mask == "per head" else 1, queries, keys)
    shown = normal(*shape, seed=9) > -0.5
    shown[:, :, queries // 2] = False
    return shown


def differentiated(out: Tensor | tuple[Tensor, ...], *leaves: Tensor) -> list[Tensor]:
    """Results, and gradients of their random sums to the leaves."""
    outs = (out,) if isinstance(out, Tensor) else out
    total = sum(
        (one.masked_fill(one == HIDDEN, 0.0) * normal(*one.shape, seed=5 + place).to(one.dtype)).sum()
        for place, one in enumerate(outs)
    )
    assert isinstance(total, Tensor)
    return [*(one.detach() for one in outs), *torch.autograd.grad(total, leaves)]


def assert_close(got: list[Tensor], want: list[Tensor], rtol: float = 1e-5, atol: float = 2e-5) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol)


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(loops, "CELLS_PER_THREAD", 1)
    yield
    torch.set_num_threads(before)


# --- Evolving ---


def evolving_case(
    batch: int, heads: int, queries: int, keys: int, size: int, mask: str
) -> tuple[list[Tensor], Tensor]:
    """Logits, previous (with hidden cells of its own), weight and bias; and what is visible."""
    shape = (batch, heads, queries, keys)
    visible = visibility(mask, *shape)
    previous = normal(*shape, seed=1).masked_fill(normal(*shape, seed=2) > 1.0, HIDDEN)
    logits = normal(*shape).masked_fill(~visible, math.nan)  # whatever is hidden must not be read
    weight = normal(heads, heads, size, size, seed=3) / (size * math.sqrt(heads))
    leaves = [logits, previous, weight, normal(heads, seed=4)]
    return leaves, visible


def as_leaves(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]


def by_loops(leaves: list[Tensor], visible: Tensor, kind: Any, grown: Tensor | None = None) -> Tensor:
    logits, previous, weight, bias = leaves
    out = _evolve_cpu.evolve(logits, previous, (weight, bias), visible, kind, 0.3, 0.2, grown)
    assert out is not None
    return out


def by_definition(leaves: list[Tensor], visible: Tensor, kind: Any, factor: float = 1.0) -> Tensor:
    logits, previous, weight, bias = leaves
    return naive.evolve(logits, previous, (weight, bias), visible, kind, 0.3 * factor, 0.2 * factor)


@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 11),
    st.integers(1, 19),
    st.sampled_from([1, 3, 5]),
    st.sampled_from(MASKS),
    st.sampled_from(KINDS),
)
def test_evolving_equals_the_definition_with_all_gradients(
    batch: int, heads: int, queries: int, keys: int, size: int, mask: str, kind: Any
) -> None:
    if mask == "causal" and keys < queries:
        queries = keys
    tensors, visible = evolving_case(batch, heads, queries, keys, size, mask)
    fast, slow = as_leaves(tensors, torch.float32), as_leaves(tensors, torch.float64)
    got = differentiated(by_loops(fast, visible, kind), *fast)
    assert_close(got, differentiated(by_definition(slow, visible, kind), *slow))


def test_evolving_takes_the_ramp() -> None:
    tensors, visible = evolving_case(2, 4, 6, 6, 3, "padding")
    fast, slow = as_leaves(tensors, torch.float32), as_leaves(tensors, torch.float64)
    got = differentiated(by_loops(fast, visible, "encoder", torch.tensor(0.4)), *fast)
    assert_close(got, differentiated(by_definition(slow, visible, "encoder", 0.4), *slow))
    control = differentiated(by_definition(slow, visible, "encoder"), *slow)
    assert not torch.allclose(got[0].nan_to_num().double(), control[0].nan_to_num(), atol=1e-3)


def test_evolving_takes_maps_that_are_not_contiguous() -> None:
    tensors, visible = evolving_case(2, 4, 6, 6, 3, "none")
    tensors[:2] = [tensor.mT.contiguous().mT for tensor in tensors[:2]]
    fast, slow = as_leaves(tensors, torch.float32), as_leaves(tensors, torch.float64)
    toward = normal(2, 4, 6, 6, seed=7)
    for leaves, run in ((fast, by_loops), (slow, by_definition)):
        run(leaves, visible, "encoder").backward(toward.mT.contiguous().mT.to(leaves[0].dtype))  # type: ignore[operator]
    assert_close([x.grad for x in fast if x.grad is not None], [x.grad for x in slow if x.grad is not None])


def test_a_visible_nan_stays_one() -> None:
    tensors, visible = evolving_case(1, 4, 6, 6, 3, "none")
    tensors[0][0, 1, 2, 2] = math.nan
    found = by_loops(tensors, visible, "encoder").isnan()
    torch.testing.assert_close(found, by_definition(tensors, visible, "encoder").isnan())
    assert found.any()
    assert not found.all()


def test_a_convolution_of_other_heads_is_refused() -> None:
    tensors, visible = evolving_case(1, 4, 6, 6, 3, "none")
    tensors[2] = tensors[2][:, :3]
    with pytest.raises(ValueError, match=r"weight of shape \(4, 4, k, k\), got \(4, 3, 3, 3\)"):
        by_loops(tensors, visible, "encoder")


# --- Bayesian ---


def drawn_by_loops(
    logits: Tensor,
    visible: Tensor,
    keys: Tensor,
    examples: Tensor,
    config: overt.Bayesian,
    row: int = 0,
) -> tuple[Tensor, Tensor]:
    found = _draw_cpu.draw(logits, visible, keys, examples, row, config, True)
    assert found is not None
    assert found[1] is not None
    alone = _draw_cpu.draw(logits, visible, keys, examples, row, config, False)
    assert alone is not None
    assert torch.equal(alone[0].nan_to_num(), found[0].nan_to_num())
    assert alone[1] is None
    return found[0], found[1]


def drawn_by_definition(
    logits: Tensor,
    visible: Tensor,
    keys: Tensor,
    examples: Tensor,
    config: overt.Bayesian,
    row: int = 0,
) -> tuple[Tensor, Tensor]:
    unit = noise.uniform(keys, examples, *logits.shape[1:], row)
    weights = softmax(logits + log_noise(unit.to(logits.dtype), config), visible)
    return weights, log_normalizer(logits, visible)


def some_keys(batch: int) -> tuple[Tensor, Tensor]:
    key = noise.stream(torch.tensor(3), torch.tensor(1), 2, torch.arange(batch), 0)
    return key, torch.arange(batch) + 2**33


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(1, 21),
    st.sampled_from(MASKS),
    st.sampled_from(sorted(CONFIGS)),
)
def test_draws_equal_the_definition_with_all_gradients(
    batch: int, heads: int, queries: int, columns: int, mask: str, name: str
) -> None:
    if mask == "causal" and columns < queries:
        queries = columns
    shape = (batch, heads, queries, columns)
    visible = visibility(mask, *shape)
    logits = (3.0 * normal(*shape)).masked_fill(~visible, HIDDEN)
    place = (visible, *some_keys(batch), CONFIGS[name], 5)
    fast, slow = as_leaves([logits], torch.float32), as_leaves([logits], torch.float64)
    got = differentiated(drawn_by_loops(*fast, *place), *fast)
    want = differentiated(drawn_by_definition(*slow, *place), *slow)
    assert_close(got, want, atol=5e-6)
    assert not got[0][~visible.expand(shape)].any(), "hidden cells are zero"


@pytest.mark.parametrize("config", [overt.Bayesian(k=1.0), overt.Bayesian(family="lognormal", sigma=1.0)])
def test_noise_is_right_to_a_millionth(config: overt.Bayesian) -> None:
    logits, everything = torch.zeros(1, 64, 64, 64), torch.ones(1, 1, 1, 1, dtype=torch.bool)
    keys, examples = some_keys(1)
    got = drawn_by_loops(logits, everything, keys, examples, config)[0].double().log()
    want = drawn_by_definition(logits.double(), everything, keys, examples, config)[0].log()
    assert (got - want).abs().max() < 2e-6
    assert want.max() - want.min() > 5.0, "both tails are there"


def test_logarithms_and_exponentials_are_right_to_their_last_bits() -> None:
    from overt.mechanisms.bayesian import _draw_numba

    units = (torch.arange(0, 2**23, 997, dtype=torch.float64) + 0.5) * 2.0**-23
    ends = torch.tensor([2.0**-24, 1.0 - 2.0**-24])
    x = torch.cat([units.float(), ends, torch.logspace(-7, math.log10(86.9), 10_000)])
    logs, exps = torch.empty_like(x), torch.empty_like(x)
    _draw_numba.log_and_exp(x.numpy(), logs.numpy(), exps.numpy())
    torch.testing.assert_close(logs.double(), x.double().log(), rtol=3e-7, atol=0.0)
    torch.testing.assert_close(exps.double(), (-x.double()).exp(), rtol=3e-7, atol=0.0)


def test_large_and_bad_logits_give_what_the_definition_gives() -> None:
    logits = torch.zeros(1, 1, 6, 8)
    logits[0, 0, 0, 3] = math.nan
    logits[0, 0, 1, 3] = math.inf
    logits[0, 0, 2, 3] = 1e30
    logits[0, 0, 3] = -1e30
    logits[0, 0, 4] = HIDDEN
    visible = torch.ones(1, 1, 6, 8, dtype=torch.bool)
    visible[..., 5] = False
    keys, examples = some_keys(1)
    for shown in (visible, torch.ones_like(visible)):
        got = drawn_by_loops(logits, shown, keys, examples, overt.Bayesian())
        want = drawn_by_definition(logits, shown, keys, examples, overt.Bayesian())
        torch.testing.assert_close(got[0], want[0], equal_nan=True, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got[1], want[1], equal_nan=True)


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 7),
    st.integers(1, 13),
    st.sampled_from(MASKS),
    st.sampled_from(["weibull", "weibull, much noise", "scores"]),
    st.booleans(),
)
def test_kl_of_any_map_equals_the_definition_with_all_gradients(
    batch: int, heads: int, queries: int, keys: int, mask: str, name: str, contextual: bool
) -> None:
    if mask == "causal" and keys < queries:
        queries = keys
    shape = (batch, heads, queries, keys)
    visible, config = visibility(mask, *shape), CONFIGS[name]
    logits = normal(*shape).masked_fill(~visible, HIDDEN)
    prior = torch.log_softmax(normal(batch, heads, keys, seed=1), -1) if contextual else torch.zeros(1, 1, 1)
    fast, slow = as_leaves([logits, prior], torch.float32), as_leaves([logits, prior], torch.float64)
    lse = log_normalizer(fast[0], visible)
    got = differentiated(_draw_cpu.weibull_kl(fast[0], visible, lse, fast[1], config), *fast)
    assert_close(got, differentiated(map_kl(slow[0], visible, slow[1], config), *slow), atol=1e-4)


# --- Threads, transforms, and places where the forms do not apply ---


@pytest.mark.usefixtures("many_threads")
def test_nothing_depends_on_the_number_of_threads() -> None:
    tensors, visible = evolving_case(3, 5, 7, 9, 3, "random")
    keys, examples = some_keys(3)
    prior = torch.log_softmax(normal(3, 5, 9, seed=1), -1)

    def everything() -> list[Tensor]:
        leaves = as_leaves(tensors, torch.float32)
        found = differentiated(by_loops(leaves, visible, "cross"), *leaves)
        logits = tensors[0].nan_to_num().requires_grad_()
        weights, lse = drawn_by_loops(logits, visible, keys, examples, overt.Bayesian())
        kl = _draw_cpu.weibull_kl(logits, visible, lse, prior, overt.Bayesian())
        return found + differentiated((weights, lse, kl), logits)

    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(everything())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


def operators() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    tensors, visible = evolving_case(2, 4, 5, 6, 3, "random")
    logits, previous, weight, bias = (tensor.nan_to_num() for tensor in tensors)
    previous = previous.clamp(min=-5.0)
    for tensor in (logits, previous, weight, bias):
        tensor.requires_grad_()
    alpha = torch.rand(2, 4, 6).requires_grad_()
    keys, examples = some_keys(2)
    return {
        "evolve": (
            torch.ops.overt.evolve.default,
            (logits, previous, visible, weight, bias, "encoder", 0.5, 0.1, torch.tensor(0.5)),
        ),
        "draw": (torch.ops.overt.draw.default, (logits, visible, keys, examples, 0, True, 0.1, True)),
        "weigh": (
            torch.ops.overt.weigh.default,
            (logits, visible, alpha, normal(2, 4, 5).requires_grad_()),
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evolve", "draw", "weigh"])
def test_operators_keep_to_the_rules_of_torch(name: str) -> None:
    operator, given_ = operators()[name]
    torch.library.opcheck(operator, given_)


def second(run: Callable[..., Tensor | tuple[Tensor, ...]], leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of a norm of the gradients."""
    outs = run(*leaves)
    outs = (outs,) if isinstance(outs, Tensor) else outs
    total = sum((one.masked_fill(one == HIDDEN, 0.0).square()).sum() for one in outs)
    first = torch.autograd.grad(total, leaves, create_graph=True)  # type: ignore[arg-type]
    return list(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))  # type: ignore[arg-type]


def test_gradients_of_gradients_are_the_definitions() -> None:
    tensors, visible = evolving_case(2, 4, 5, 6, 3, "padding")
    tensors[0] = tensors[0].nan_to_num()
    fast, slow = as_leaves(tensors, torch.float32), as_leaves(tensors, torch.float64)
    got = second(lambda *x: by_loops(list(x), visible, "encoder"), fast)
    assert_close(got, second(lambda *x: by_definition(list(x), visible, "encoder"), slow), 1e-4, 1e-4)

    place, config = (visible, *some_keys(2)), overt.Bayesian(k=2.0)
    prior = torch.log_softmax(normal(2, 4, 6, seed=1), -1)

    def fast_draw(logits: Tensor, prior: Tensor) -> tuple[Tensor, ...]:
        weights, lse = drawn_by_loops(logits, *place, config)
        return weights, lse, _draw_cpu.weibull_kl(logits, visible, lse, prior, config)

    def slow_draw(logits: Tensor, prior: Tensor) -> tuple[Tensor, ...]:
        found = drawn_by_definition(logits, *place, config)
        return *found, map_kl(logits, visible, prior, config)

    fast, slow = (as_leaves([tensors[0], prior], dtype) for dtype in (torch.float32, torch.float64))
    got, want = second(fast_draw, fast), second(slow_draw, slow)
    scale = max(float(x.abs().max()) for x in want)
    assert_close([x / scale for x in got], [x / scale for x in want])


def step(model: overt.Encoder, x: Tensor, padding: Tensor | None) -> list[Tensor]:
    chain = overt.Chain(step=3)
    loss = model(x, padding, chain=chain).square().mean() + chain.penalty()
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]


def models() -> dict[str, list[overt.Mechanism]]:
    return {
        "evolving": [overt.Evolving(init="kaiming", ramp_steps=10)],
        "bayesian": [overt.Bayesian()],
        "both": [overt.Evolving(init="kaiming"), overt.Bayesian()],
        "lognormal": [overt.Evolving(init="kaiming"), overt.Bayesian(family="lognormal")],
    }


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", list(models()))
def test_a_models_step_is_the_same_in_either_form(
    name: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = overt.Encoder(16, 4, 3, models()[name], dropout=0.0)
    x = normal(3, 7, 16)
    padding = torch.arange(7) >= torch.tensor([[7], [5], [2]]) if padded else None
    called: list[str] = []
    unfit = backend.unfit

    def counted(of: backend.Backend, *tensors: Tensor, off: str | None = None) -> str | None:
        if (reason := unfit(of, *tensors, off=off)) is None:
            called.append(of.name)
        return reason

    monkeypatch.setattr(backend, "unfit", counted)
    got = step(model, x, padding)
    assert called, "the forms ran"
    called.clear()
    with overt.naive():
        want = step(model, x, padding)
    assert not called, "overt.naive() gives the naive form on a CPU, too"
    scale = [max(1.0, float(b.abs().max())) for b in want]
    assert_close(
        [a / s for a, s in zip(got, scale, strict=True)], [b / s for b, s in zip(want, scale, strict=True)]
    )


def test_other_types_devices_and_transforms_take_the_definition() -> None:
    x = torch.zeros(1, 1, 2, 2)
    unfit, loops = backend.unfit, backend.LOOPS
    assert unfit(loops, x) is None
    assert "float32, the same for all tensors, not float32, float64" in str(unfit(loops, x, x.double()))
    assert "not bfloat16" in str(unfit(loops, x.bfloat16()))
    assert "cpu devices, not on meta" in str(unfit(loops, x.to("meta")))
    seen: list[str | None] = []

    def inside(x: Tensor) -> Tensor:
        seen.append(unfit(loops, x))
        return x.sum()

    torch.func.grad(inside)(x)
    torch.func.vmap(inside)(x)
    with torch.autograd.forward_ad.dual_level():
        inside(torch.autograd.forward_ad.make_dual(x, x))
    assert all("torch.func transforms and forward-mode" in str(reason) for reason in seen)
    assert len(seen) == 3


@pytest.mark.parametrize("name", ["evolving", "bayesian"])
def test_forward_mode_in_float32_agrees_with_reverse_mode(name: str) -> None:
    torch.manual_seed(0)
    model = overt.Encoder(8, 2, 2, models()[name], dropout=0.0)
    x, direction = normal(1, 4, 8), normal(1, 4, 8, seed=1)

    def run(x: Tensor) -> Tensor:
        chain = overt.Chain(step=1)
        total: Tensor = model(x, chain=chain).square().sum() + chain.penalty()
        return total

    with torch.autograd.forward_ad.dual_level():
        out = run(torch.autograd.forward_ad.make_dual(x, direction))
        forward = torch.autograd.forward_ad.unpack_dual(out).tangent
    reverse = torch.autograd.grad(run(leaf := x.clone().requires_grad_()), leaf)[0]
    torch.testing.assert_close(forward, (reverse * direction).sum(), rtol=1e-4, atol=1e-4)


def test_without_numba_the_definition_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = overt.Encoder(16, 4, 2, models()["both"], dropout=0.0)
    want = step(model, normal(2, 5, 16), None)
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in ("noise._philox_numba", _evolve_cpu.LOOPS, _draw_cpu.LOOPS):
        monkeypatch.setitem(sys.modules, f"overt.mechanisms.{name}", None)
    assert backend.unfit(backend.LOOPS, torch.zeros(1)) == "numba cannot be imported"
    got = step(model, normal(2, 5, 16), None)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
