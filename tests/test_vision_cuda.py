"""Attention over pixels on a GPU: the CPU's numbers, and half precision that stays half precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import overt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
MECHANISMS: dict[str, list[overt.Mechanism]] = {
    "plain": [],
    "evolving": [overt.Evolving(alpha=0.5, beta=1.0)],
    "bayesian": [overt.Bayesian(d_mid=3)],
    "both": [overt.Evolving(alpha=0.5, beta=1.0), overt.Bayesian(d_mid=3)],
}
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


@pytest.fixture(autouse=True)
def _whole_precision() -> Iterator[None]:
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def layer_of(name: str, scale_positions: bool = True) -> overt.vision.AugmentedConv2d:
    """A layer whose widths are no multiples of what torch's kernels take."""
    torch.manual_seed(0)
    return overt.vision.AugmentedConv2d(
        24, 40, 3, heads=4, key_channels=12, value_channels=8, size=(14, 10), pool=2, layer=0, start=True,
        mechanisms=MECHANISMS[name], scale_positions=scale_positions,
    )  # fmt: skip


@every_mechanism
@pytest.mark.parametrize("scale_positions", [True, False])
@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last])
def test_outputs_and_gradients_are_the_cpus(
    name: str, scale_positions: bool, last: torch.memory_format
) -> None:
    layer = layer_of(name, scale_positions)
    image = torch.randn(3, 24, 14, 10)

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        layer.to(device, dtype).zero_grad()
        x = image.to(device, dtype).contiguous(memory_format=last).requires_grad_()
        chain = overt.Chain(step=1)
        out = layer(x, chain)
        loss = out.sin().sum() + chain.penalty().to(out.device)
        grads = torch.autograd.grad(loss, [x, *layer.parameters()])
        return [out.detach().cpu().double(), *[grad.cpu().double() for grad in grads]]

    want, got = run("cpu", torch.float64), run("cuda", torch.float32)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))


@every_mechanism
def test_under_autocast_the_output_stays_half_precision(name: str) -> None:
    layer = layer_of(name).cuda()
    x = torch.randn(2, 24, 14, 10, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        half = layer(x, overt.Chain(step=1))
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), layer(x, overt.Chain(step=1)), rtol=0.1, atol=0.1)


@every_mechanism
@pytest.mark.parametrize(
    ("channels", "keys", "values", "side", "stride", "pool"),
    [(128, 32, 16, 16, 1, 2), (256, 64, 32, 8, 2, 1), (256, 64, 32, 8, 1, 1), (512, 128, 64, 4, 1, 1)],
)
def test_half_precision_has_nearly_the_gradients_of_float32_in_layers_of_resnet_34(
    name: str, channels: int, keys: int, values: int, side: int, stride: int, pool: int
) -> None:
    torch.manual_seed(0)
    layer = overt.vision.AugmentedConv2d(
        channels, channels, 3, stride, heads=8, key_channels=keys, value_channels=values,
        size=(side, side), pool=pool, layer=0, start=True, mechanisms=MECHANISMS[name],
    ).cuda()  # fmt: skip
    image = torch.randn(64, channels, side * stride, side * stride, device="cuda").relu()
    image = image.contiguous(memory_format=torch.channels_last)
    to_out = torch.randn(64, channels, side, side, device="cuda")

    def run(half: bool) -> list[Tensor]:
        x, chain = image.clone().requires_grad_(), overt.Chain(step=1)
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            out = layer(x, chain)
        loss = (out.float() * to_out).sum() + chain.penalty().cuda()
        return [out.detach().float(), *torch.autograd.grad(loss, [x, *layer.parameters()])]

    names = ["out", "x", *dict(layer.named_parameters())]
    for which, whole, half in zip(names, run(False), run(True), strict=True):
        assert bool(half.isfinite().all()), which
        if which != "qkv.bias":  # the keys' has no gradient but by rounding
            assert float((half - whole).norm()) < 0.1 * float(whole.norm()) + 1e-3, which
