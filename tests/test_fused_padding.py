"""Padded queries get plain attention's output from fused kernels too, and gradients through it.

Kernels against the definition in float64; on a GPU, or in Triton's interpreter, at small sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overt
from overt.mechanisms import backend as switch
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.call import repeat_heads
from overt.mechanisms.flat import Drawing, flat_of
from overt.mechanisms.fused import form_of, torchs_own
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Kind, Site
from selection import covering

pytest.importorskip("triton", reason="triton is made for Linux alone")
pytestmark = pytest.mark.slow
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
EVOLVING = overt.Evolving(alpha=0.3, beta=0.4)
MECHANISMS: dict[str, list[overt.Mechanism]] = {
    "bayesian": [overt.Bayesian(k=2.0)],
    "lognormal": [overt.Bayesian(family="lognormal", sigma=0.7, prior_sigma=2.0)],
    "no KL": [overt.Bayesian(k=2.0, prior=None)],
    "evolving": [EVOLVING],
    "both": [EVOLVING, overt.Bayesian(k=2.0)],
    "realformer": [overt.Evolving.realformer()],
}
FORMS = ["bayesian", "evolving", "both"]
LONG = 140  # more than two blocks of rows
# The interpreter is slow: there, convolutions under these masks only.
SOME = [
    ("evolving", "left", False),
    ("both", "right", True),
    ("both", "scattered", False),
    ("both", "all", False),
]
# Every mask, causal and not, and every form.
ONCE = [
    ("bayesian", "right", False),
    ("bayesian", "scattered", True),
    ("evolving", "left", False),
    ("both", "right", True),
    ("both", "all", False),
]
CASES = [
    (form, which, causal)
    for form in FORMS
    for which in ("right", "left", "scattered", "all")
    for causal in (False, True)
    if CUDA or form == "bayesian" or (form, which, causal) in SOME
]


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "KERNEL_DEVICES", {"cuda", "cpu"})


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel should have written and did not shows as NaN."""

    def poisoning(empty: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoned(*size: Any, **options: Any) -> Tensor:
            made = empty(*size, **options)
            return made.fill_(float("nan") if made.is_floating_point() else 0xA5)

        return poisoned

    for name in ("empty", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoning(getattr(torch, name)))


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).to(DEVICE)


def real_of(which: str, length: int) -> Tensor:
    """Boolean (3, query): an example with a little padding, one with much, and one without, or all of it."""
    place, lengths = torch.arange(length), torch.tensor([[length - 3], [length // 3], [length]])
    if which == "left":
        real = place >= length - lengths
    elif which == "scattered":
        real = torch.rand(3, length, generator=torch.Generator().manual_seed(7)) > 0.3
    else:
        real = place < lengths
    if which == "all":
        real[2] = False
    return real.to(DEVICE)


def calls_of(
    layers: int, kind: Kind, seen: Seen, queries: int, keys: int, key_heads: int = 2, **options: Any
) -> list[overt.AttentionCall]:
    """One call for each layer, with tensors of its own."""
    calls = []
    for layer in range(layers):
        shapes = (2, queries), (key_heads, keys), (key_heads, keys)
        q, k, v = (drawn(3, h, n, 16, seed=10 * layer + i) for i, (h, n) in enumerate(shapes))
        site = Site(2, 16, kind, layer, key_heads)
        calls.append(overt.AttentionCall(site, q, k, v, 0.25, seen=seen, **options))
    return calls


def maps_of(form: str, calls: list[overt.AttentionCall]) -> list[AttentionMap]:
    torch.manual_seed(1)
    made = [AttentionMap(MECHANISMS[form], call.site).train().to(DEVICE) for call in calls]
    for one in made:
        for parameter in one.parameters():
            nn.init.normal_(parameter, std=0.3)
    return made


def by_kernels(map: AttentionMap, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
    out = map.attend(call, chain)
    assert out is not None
    return out


def by_definition(map: AttentionMap, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
    with overt.naive():
        return map(call, chain).to(call.value.dtype) @ repeat_heads(call.value, call.query.shape[1])


def found(
    maps: list[AttentionMap],
    calls: list[overt.AttentionCall],
    attend: Callable[[AttentionMap, overt.AttentionCall, overt.Chain], Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Outputs of all layers, KL, and gradients of all that may have one."""
    maps = [deepcopy(map).to(dtype) for map in maps]
    leaves: list[Tensor] = []
    chain, loss, outs = overt.Chain(step=7, seed=5), torch.zeros((), device=DEVICE), []
    for number, (map, call) in enumerate(zip(maps, calls, strict=True)):
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (call.query, call.key, call.value))
        leaves += [q, k, v, *map.parameters()]
        out = attend(map, replace(call, query=q, key=k, value=v), chain)
        loss = loss + (out * drawn(*out.shape, seed=50 + number, dtype=dtype)).sum()
        outs.append(out.detach())
    if any(
        isinstance(config, overt.Bayesian) and config.prior for config in (x.config for x in maps[0].layers)
    ):
        kl = chain.kl(per_example=True)
        loss = loss + (kl * torch.tensor([0.5, 1.0, 1.5], device=DEVICE)).sum()
        outs.append(kl.detach())
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return outs + [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, gradients, strict=True)]


def compare(form: str, calls: list[overt.AttentionCall]) -> None:
    maps = maps_of(form, calls)
    got = found(maps, calls, by_kernels, torch.float32)
    want = found(maps, calls, by_definition, torch.float64)
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.isfinite().all(), number
        # By the norm, and of small ones by rounding.
        assert float((a.double() - b.double()).norm()) < 5e-5 * float(b.norm()) + 1e-5, number


@pytest.mark.parametrize(("form", "which", "causal"), covering(CASES, ONCE))
def test_outputs_and_gradients_are_the_definitions(form: str, which: str, causal: bool) -> None:
    real = real_of(which, 6)
    kind: Kind = "decoder" if causal else "encoder"
    compare(form, calls_of(2, kind, Seen(real, real, causal), 6, 6, left_alone="sdpa"))


@pytest.mark.parametrize("form", ["lognormal", "no KL", "realformer"])
def test_every_law_leaves_padding_alone(form: str) -> None:
    real = real_of("right", 6)
    compare(form, calls_of(2, "encoder", Seen(real, real), 6, 6, left_alone="sdpa"))


@pytest.mark.parametrize(
    ("form", "mask", "which"),
    covering(
        [(form, mask, which) for form in FORMS for mask in ("full", "causal") for which in ("right", "left")],
        # every form, mask and side
        [("bayesian", "full", "left"), ("evolving", "full", "right"), ("both", "causal", "right")],
    ),
)
def test_blocks_of_rows_without_padding_are_passed_over(form: str, mask: str, which: str) -> None:
    real, causal = real_of(which, LONG), mask == "causal"
    kind: Kind = "decoder" if causal else "encoder"
    compare(form, calls_of(1, kind, Seen(real, real, causal), LONG, LONG, 1, left_alone="sdpa"))


@pytest.mark.parametrize(
    ("form", "keys"),
    covering(
        [(form, keys) for form in FORMS for keys in ("all keys", "some keys")],
        # all keys in two layers of Evolving are those of "both", too
        [*[(form, "some keys") for form in FORMS], ("bayesian", "all keys"), ("both", "all keys")],
    ),
)
def test_padded_queries_of_cross_attention_see_its_keys(form: str, keys: str) -> None:
    hidden = keys == "some keys"
    seen = Seen(real_of("scattered", 7) if hidden else None, real_of("all", 5))
    compare(form, calls_of(1 if hidden else 2, "cross", seen, 5, 7, 1, left_alone="sdpa"))


@pytest.mark.parametrize(
    ("left_alone", "form"),
    covering(
        [(left_alone, form) for left_alone in (None, "eager") for form in FORMS],
        [(None, "bayesian"), ("eager", "bayesian"), (None, "evolving"), ("eager", "both")],
    ),
)
def test_other_ways_to_leave_rows_alone(left_alone: Any, form: str) -> None:
    real = real_of("all", 8)
    calls = calls_of(1, "encoder", Seen(real, real), 8, 8, left_alone=left_alone)
    compare(form, calls)
    with torch.no_grad():
        got = by_kernels(maps_of(form, calls)[0], calls[0], overt.Chain(step=7))
    alone = got.transpose(1, 2)[2]  # the example that is all padding
    mean = calls[0].value[2].mean(dim=1).expand(8, 2, 16)
    torch.testing.assert_close(alone, mean if left_alone == "eager" else torch.zeros_like(mean))


@pytest.mark.skipif(not CUDA, reason="needs a GPU: the interpreter's bfloat16 is wrong, and it is slow")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("which", ["right", "left", "all"])
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_agrees_on_large_maps(form: str, which: str, causal: bool, dtype: torch.dtype) -> None:
    length = 515
    real = real_of(which, length)
    kind: Kind = "decoder" if causal else "encoder"
    calls = calls_of(2, kind, Seen(real, real, causal), length, length, 1, left_alone="sdpa")
    calls = [
        replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype))
        for call in calls
    ]
    maps = maps_of(form, calls)
    got, want = found(maps, calls, by_kernels, dtype), found(maps, calls, by_definition, torch.float64)
    # Convolutions sum over so many cells that rounding is all one would see; padding has no part in them.
    without = found(maps, [replace(call, left_alone=None) for call in calls], by_kernels, dtype)
    first = len(got) - sum(3 + len(list(map.parameters())) for map in maps)
    names = [name for map in maps for name in ("query", "key", "value", *dict(map.named_parameters()))]
    for number, (a, b, c) in enumerate(zip(got, want, without, strict=True)):
        assert a.isfinite().all()
        if number >= first and "evolving" in names[number - first]:
            assert torch.equal(a, c)
        else:
            assert float((a.double() - b.double()).norm()) < 3e-2 * float(b.norm()) + 1e-3


# Dropout.


def with_dropout(form: str) -> tuple[AttentionMap, overt.AttentionCall, Tensor]:
    real = real_of("right", 16)
    (call,) = calls_of(1, "encoder", Seen(real, real), 16, 16, left_alone="sdpa", dropout=0.5)
    return maps_of(form, [call])[0], call, real


@pytest.mark.parametrize("form", FORMS)
def test_dropout_drops_plain_weights_and_goes_the_same_way_backwards(form: str) -> None:
    # Values that pick out one key each: the output is the weights that were used, in padded rows the plain
    # ones or none, and the gradient of values shows those of the backward pass.
    map, call, real = with_dropout(form)
    value = torch.eye(16, device=DEVICE).expand(3, 2, 16, 16).contiguous().requires_grad_()
    chain = overt.Chain(step=0, examples=torch.tensor([4, 4, 9]))  # the first two are samples of one example
    used = by_kernels(map, replace(call, value=value), chain)
    to_out = drawn(*used.shape, seed=2)
    (to_value,) = torch.autograd.grad((used * to_out).sum(), value)
    torch.testing.assert_close(to_value, used.detach().mT @ to_out, rtol=1e-4, atol=1e-5)
    plain = torchs_own(replace(call, value=value, dropout=0.0)).detach()
    padded = used.detach().transpose(1, 2)[~real]
    kept = padded != 0
    torch.testing.assert_close(padded, torch.where(kept, 2.0 * plain.transpose(1, 2)[~real], 0.0))
    shown = plain.transpose(1, 2)[~real] != 0
    assert 0.3 < float(kept[shown].double().mean()) < 0.7


@pytest.mark.parametrize("form", covering(FORMS, ["bayesian", "evolving"]))
def test_the_gradient_with_dropout_is_that_of_finite_differences(form: str) -> None:
    map, call, real = with_dropout(form)
    tensors = [x.requires_grad_() for x in (call.query, call.key, call.value)]
    weight = drawn(3, 2, 16, 16, seed=3) * ~real[:, None, :, None]  # of padded rows alone

    def loss() -> Tensor:
        torch.manual_seed(0)
        return (by_kernels(map, call, overt.Chain(step=0)).square() * weight).sum()

    gradients = torch.autograd.grad(loss(), tensors)
    for tensor, gradient in zip(tensors, gradients, strict=True):
        direction = torch.randn_like(tensor)
        with torch.no_grad():
            tensor += 5e-3 * direction
            above = loss()
            tensor -= 1e-2 * direction
            below = loss()
            tensor += 5e-3 * direction
        torch.testing.assert_close((above - below) / 1e-2, (gradient * direction).sum(), rtol=1e-2, atol=1e-2)


# Around the kernels.


def test_several_samples_at_once_leave_padding_alone_as_one_does() -> None:
    real = real_of("right", 9)
    (call,) = calls_of(1, "encoder", Seen(real, real), 9, 9, left_alone="sdpa")
    (map,) = maps_of("no KL", [call])
    together = map.draw(call, overt.Chain(step=1), 3)
    assert together is not None
    for number in range(3):
        torch.testing.assert_close(
            together[number], by_kernels(map, call, overt.Chain(step=1, sample=number))
        )


def test_padding_takes_launches_of_evolving_alone_and_none_where_there_is_no_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from overt.mechanisms.kernels.launch import Ready

    run, launched = Ready.run, []

    def counted(self: Ready, *given: Any) -> None:
        launched.append(self.kernel)
        run(self, *given)

    monkeypatch.setattr(Ready, "run", counted)

    def launches(form: str, real: Tensor | None, left_alone: Any) -> int:
        calls = calls_of(1, "encoder", Seen(real, real), 8, 8, left_alone=left_alone)
        launched.clear()
        found(maps_of(form, calls), calls, by_kernels, torch.float32)
        return len(launched)

    for form, more in {"bayesian": 0, "evolving": 3}.items():
        assert launches(form, None, "sdpa") == launches(form, None, None)
        real = real_of("right", 8)
        assert launches(form, real, "sdpa") == launches(form, real, None) + more


@pytest.mark.parametrize("form", ["Bayesian", "Evolving"])
def test_operators_keep_to_the_rules_of_torch(form: str) -> None:
    from overt.mechanisms.bayesian.fused import bayesian
    from overt.mechanisms.evolving.fused import Evolution, evolving

    real = real_of("right", 8)
    (call,) = calls_of(1, "encoder", Seen(real, real), 8, 8, left_alone="sdpa")
    assert form_of(frozenset({form})) is not None
    leaves = (x.requires_grad_() for x in (call.query, call.key, call.value))
    groups: tuple[Any, ...] = flat_of(call, Drawing(), overt.Chain(step=0))
    groups = (groups[0]._make((*leaves, call.scale, None)), *groups[1:])
    operator = bayesian
    if form == "Evolving":
        operator = evolving
        groups = (*groups, Evolution(None, None, None, torch.tensor([0.3, 0.4], device=DEVICE), False))
    torch.library.opcheck(operator.operator, [field for group in groups for field in group])
