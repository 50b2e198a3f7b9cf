"""Queries, keys and values of pixels widened in one pass, against the plain operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import overt
from overt.mechanisms import backend as switch
from overt.mechanisms.widening import Pixels, fits, widened

pytest.importorskip("triton", reason="triton is made for Linux alone")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "KERNEL_DEVICES", {"cuda", "cpu"})


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize(
    ("size", "heads", "width", "values", "scale"),
    [
        ((3, 4), 2, 5, 3, 0.3),  # the largest image
        ((2, 4), 3, 20, 2, 1.0),  # a smaller one
        ((1, 1), 1, 3, 9, 1.0),
        ((3, 3), 40, 2, 24, 1.0),  # values wider than widened queries, more heads than a program takes
    ],
)
def test_results_and_gradients_are_those_of_plain_operations(
    size: tuple[int, int], heads: int, width: int, values: int, scale: float, equal: bool
) -> None:
    torch.manual_seed(0)
    position = overt.RelativePosition2d(width, 3, 4).to(DEVICE)
    count = size[0] * size[1]
    pixels = torch.randn(2, count, heads * (2 * width + values), device=DEVICE, requires_grad=True)
    assert fits(pixels, heads, values, size, overt.Chain())
    q, k, v = (
        part.unflatten(2, (heads, -1)).transpose(1, 2)
        for part in torch.split(pixels, [heads * width, heads * width, heads * values], dim=2)
    )
    want = (*position.widen(q, k, scale, size), v)
    got = widened(Pixels(pixels, position.vertical, position.horizontal), size, heads, values, scale, equal)
    wide = got[0].shape[-1]
    assert wide % 8 == 0
    assert all(x.shape == (2, heads, count, wide) for x in got[:2])
    assert got[2].shape == (2, heads, count, wide if equal else -(-values // 8) * 8)
    assert not got[2][..., values:].any()
    inputs = [pixels, *position.parameters()]

    def both(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        products, value = query @ key.mT, value[..., :values]
        return [products, value, *torch.autograd.grad(products.sin().sum() + value.cos().sum(), inputs)]

    close = {"rtol": 1e-3, "atol": 1e-4} if DEVICE.type == "cuda" else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(both(*got), both(*want), **close)  # type: ignore[arg-type]
    parts = [x[..., : x0.shape[-1]] for x, x0 in zip(got, want, strict=True)]
    torch.testing.assert_close(parts, list(want), **close)  # type: ignore[arg-type]


def test_gradients_are_added_up_over_blocks_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from overt.mechanisms.kernels import positions

    monkeypatch.setattr(positions, "_PROGRAMS", 100)  # 2 parts of 81 pixels, each of 128 heads of examples
    positions._backward_ready.cache_clear()
    torch.manual_seed(0)
    position = overt.RelativePosition2d(3, 9, 9).to(DEVICE)
    pixels = torch.randn(85, 81, 24, device=DEVICE, requires_grad=True)
    inputs, given = [pixels, *position.parameters()], Pixels(pixels, *position.parameters())
    q, k, _ = (x.unflatten(2, (3, -1)).transpose(1, 2) for x in torch.split(pixels, [9, 9, 6], dim=2))
    want = position.widen(q, k, 1.0, (9, 9))[0]
    got = widened(given, (9, 9), 3, 2, 1.0)[0][..., :21]
    to_query = torch.randn_like(want)
    wanted = torch.autograd.grad(want, inputs, to_query)
    for ours, theirs in zip(torch.autograd.grad(got, inputs, to_query), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()))
    positions._backward_ready.cache_clear()


def test_pixels_in_half_precision_have_vectors_in_float32() -> None:
    torch.manual_seed(0)
    position = overt.RelativePosition2d(4, 3, 3).to(DEVICE)
    whole = torch.randn(2, 9, 22, device=DEVICE)
    pixels = whole.half().requires_grad_()
    q, k, v = (x.unflatten(2, (2, -1)).transpose(1, 2) for x in torch.split(whole, [8, 8, 6], dim=2))
    want = (*position.widen(q, k, 1.0, (3, 3)), v)
    given = Pixels(pixels, position.vertical, position.horizontal)
    got = widened(given, (3, 3), 2, 3, 1.0)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours[..., : theirs.shape[-1]].float(), theirs, rtol=0.01, atol=0.01)
    to_pixels, to_vertical = torch.autograd.grad(got[0].float().sum(), [pixels, position.vertical])
    assert (to_pixels.dtype, to_vertical.dtype) == (torch.float16, torch.float32)


def test_images_too_large_for_a_gpus_shared_memory_take_plain_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pixels, chain = torch.randn(1, 14 * 14, 2 * 42, device=DEVICE), overt.Chain()
    assert fits(pixels, 2, 2, (14, 14), chain)
    monkeypatch.setattr("overt.mechanisms.widening.room", lambda _: 60_000)
    assert not fits(pixels, 2, 2, (14, 14), chain)


def test_no_gradient_of_a_result_counts_as_zeros() -> None:
    torch.manual_seed(0)
    position = overt.RelativePosition2d(3, 2, 2).to(DEVICE)
    pixels = torch.randn(1, 4, 9, device=DEVICE, requires_grad=True)
    query, _, _ = widened(Pixels(pixels, position.vertical, position.horizontal), (2, 2), 1, 3, 0.5)
    (to_pixels,) = torch.autograd.grad(query[..., :3].sum(), pixels)
    want = torch.tensor([0.5] * 3 + [0.0] * 6, device=DEVICE).expand(1, 4, 9)
    torch.testing.assert_close(to_pixels, want)


def test_a_layer_has_the_same_output_and_gradients_either_way() -> None:
    torch.manual_seed(0)
    layer = overt.vision.AugmentedConv2d(
        8, 16, 3, heads=2, key_channels=8, value_channels=4, size=(6, 4), pool=2, layer=0, start=True,
        mechanisms=[overt.Evolving(alpha=0.5, beta=1.0)],
    ).to(DEVICE)  # fmt: skip
    x = torch.randn(2, 8, 6, 4, device=DEVICE, requires_grad=True)

    def run() -> list[Tensor]:
        out = layer(x, overt.Chain())
        return [out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])]

    got = run()
    with overt.naive():
        want = run()
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
