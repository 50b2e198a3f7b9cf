"""Kernels where keys and values differ in width, and where a prior reads other keys than the scores do."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import overt
from overt.mechanisms import AttentionMap, Site
from overt.mechanisms import backend as switch
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.seen import Seen
from poisoned import poison

pytest.importorskip("triton", reason="triton is made for Linux alone")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, HEADS, LENGTH, PRIOR = 2, 2, 11, 5
MECHANISMS = {
    "bayesian": [overt.Bayesian(d_mid=4)],
    "evolving": [overt.Evolving(alpha=0.5, beta=0.3)],
    "both": [overt.Evolving(alpha=0.5, beta=0.3), overt.Bayesian(d_mid=4)],
}


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "KERNEL_DEVICES", {"cuda", "cpu"})
    poison(monkeypatch)  # among others the columns that maps are padded with


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def maps_of(mechanisms: list[overt.Mechanism], prior: int) -> list[AttentionMap]:
    """Two layers of a chain, the second with a live convolution."""
    torch.manual_seed(3)
    sites = [Site(HEADS, prior, "encoder", layer) for layer in range(2)]
    layers = [AttentionMap(mechanisms, site).train().to(DEVICE) for site in sites]
    for parameter in layers[1].parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layers


@pytest.mark.parametrize(
    ("name", "width", "value_width", "apart"),
    [
        ("bayesian", 24, 3, True),
        ("bayesian", 6, 20, False),
        ("evolving", 24, 3, False),
        ("both", 16, 16, True),
        ("both", 6, 20, True),
    ],
)
def test_kernels_are_the_definition(name: str, width: int, value_width: int, apart: bool) -> None:
    layers = maps_of(MECHANISMS[name], PRIOR if apart else width)
    tensors = [random(n, BATCH, HEADS, LENGTH, w) for n, w in enumerate((width, width, value_width, PRIOR))]
    to_out = random(9, BATCH, HEADS, LENGTH, value_width)
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool, device=DEVICE)
    real[1, 8:] = False

    def run(dtype: torch.dtype, fused: bool) -> list[Tensor]:
        query, key, value, other = (x.to(dtype).requires_grad_() for x in tensors)
        chain = overt.Chain(step=2)
        outs = []
        for each in layers:
            each.to(dtype)
            call = AttentionCall(
                each.site, query, key, value, 0.3, seen=Seen(real), prior_key=other if apart else None
            )
            out = each.attend(call, chain)
            assert (out is not None) is fused
            outs.append(each(call, chain) @ value if out is None else out)
        out = torch.stack(outs)
        loss = (out * to_out.to(dtype)).sum()
        if "Bayesian" in layers[0].names:
            loss = loss + chain.kl(per_example=True).sum()
        inputs = [query, key, value, *([other] if apart else [])]
        inputs += [parameter for each in layers for parameter in each.parameters()]
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
        assert None not in found, "a parameter without a gradient"
        return [out, loss, *found]

    got = run(torch.float32, True)
    with overt.naive():
        want = run(torch.float64, False)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("stored", ["as they are", "on the CPU", "contiguous"])
def test_gradients_of_maps_themselves_are_the_definitions(stored: str) -> None:
    """Such gradients, and maps that were stored elsewhere meanwhile, are not laid out as kernels lay them."""
    layers = maps_of(MECHANISMS["evolving"], 8)
    tensors = [random(n, BATCH, HEADS, LENGTH, 8) for n in range(3)]
    hooks = {
        "as they are": nullcontext(),
        "on the CPU": torch.autograd.graph.save_on_cpu(),
        "contiguous": torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.contiguous),
    }

    def run(dtype: torch.dtype, fused: bool) -> tuple[Tensor, ...]:
        query, key, value = (x.to(dtype).requires_grad_() for x in tensors)
        chain = overt.Chain()
        with hooks[stored]:
            for each in layers:
                each.to(dtype)
                call = AttentionCall(each.site, query, key, value, 0.3)
                out = each.attend(call, chain)
                assert (out is not None) is fused
                out = each(call, chain) @ value if out is None else out
            evolved = chain.previous(Site(HEADS, 8, "encoder", 2), "Evolving")
        assert evolved is not None
        return torch.autograd.grad(evolved.sum() + out.sum(), [query, key])  # of the sum: stride 0

    got = run(torch.float32, True)
    with overt.naive():
        want = run(torch.float64, False)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-4, atol=2e-4)


def test_values_of_an_evolving_map_are_not_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "pad", lambda *_: pytest.fail("values were filled up"))
    layers = maps_of(MECHANISMS["both"], PRIOR)
    query, key, value, other = (random(n, 1, HEADS, LENGTH, w) for n, w in enumerate((24, 24, 3, PRIOR)))
    chain = overt.Chain(step=1)
    for each in layers:
        assert each.any_width
        out = each.attend(AttentionCall(each.site, query, key, value, 0.3, prior_key=other), chain)
        assert out is not None
        assert out.shape == value.shape
    assert not maps_of(MECHANISMS["bayesian"], PRIOR)[0].any_width


def test_samples_of_narrow_values_are_those_of_single_draws() -> None:
    layer = maps_of([overt.Bayesian(prior=None)], 8)[0].eval()
    query, key, value = (random(n, 1, HEADS, LENGTH, w) for n, w in enumerate((8, 8, 3)))
    call = AttentionCall(layer.site, query, key, value, 0.3)
    drawn = layer.draw(call, overt.Chain(step=1), 3)
    assert drawn is not None
    for number, each in enumerate(drawn):
        one = layer.attend(call, overt.Chain(step=1, sample=number))
        torch.testing.assert_close(each, one)


def test_values_of_another_length_are_refused_with_the_reason() -> None:
    from overt.mechanisms.fused import attend_limits

    x, short = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 3, 8)
    reason = attend_limits(AttentionCall(Site(1, 8), x, x, short))
    assert reason == "values (1, 1, 3, 8) and keys (1, 1, 4, 8) differ in shape"
    wide = torch.zeros(1, 1, 4, 200)
    assert (
        attend_limits(AttentionCall(Site(1, 8), x, x, wide)) == "heads are 200 wide, kernels take up to 128"
    )
