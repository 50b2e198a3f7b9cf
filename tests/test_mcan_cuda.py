"""MCAN and the image encoder on a GPU: the CPU's numbers, and autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import overt
from overt.models.image_encoder import ImageEncoder, words_loss
from overt.models.mcan import MCAN, feature_noise
from overt.recipes.bam_questions import ROWS
from small_pictures import WC, answers, mcan, questions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def loss_and_gradients(model: MCAN, device: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    model.to(device).zero_grad()
    inputs = {name: x.to(device) for name, x in questions().items()}
    inputs["regions"] = inputs["regions"].to(dtype)
    loss = model(**inputs, labels=answers().to(device, dtype), chain=overt.Chain(step=2))["loss"]
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu().clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("mechanisms", [[], [WC]], ids=["soft", "bayesian"])
def test_loss_and_gradients_are_the_cpus_and_autocast_trains(mechanisms: list[overt.Mechanism]) -> None:
    model = mcan(*mechanisms).train()
    want, got = loss_and_gradients(model, "cpu"), loss_and_gradients(model, "cuda")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    model.float()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype):
            half = loss_and_gradients(model, "cuda", torch.float32)
        torch.testing.assert_close(half[0], want[0].float(), rtol=0.05, atol=0.0)
        assert all(bool(x.isfinite().all()) for x in half)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.mechanism is not None])
def test_kernels_train_the_rows_of_table_2_as_plain_operations_do(name: str) -> None:
    """At the published settings, whose spreads are as far apart as 1e-9 and 1e9."""
    model = mcan(*ROWS[name].mechanisms(46), width=64, heads=2, reduction="mean").float().train().cuda()

    def run() -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        inputs = {key: x.cuda() for key, x in questions().items()}
        inputs["regions"] = inputs["regions"].float()
        chain = overt.Chain(step=torch.tensor(3).cuda(), examples=torch.tensor([4, 9, 2]), seed=1)
        loss = model(**inputs, labels=answers().cuda().float(), chain=chain)["loss"]
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    loss, gradients = run()
    with overt.naive():
        wanted, plain = run()
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=0.0)
    largest = max(float(x.abs().max()) for x in plain)
    for got, want in zip(gradients, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4 * largest)


def test_the_posterior_is_the_cpus() -> None:
    model, inputs = mcan(WC), questions()
    want = overt.posterior(model, inputs, samples=4, problem_type="sigmoid")
    there = {name: x.cuda() for name, x in inputs.items()}
    got = overt.posterior(model.cuda(), there, samples=4, problem_type="sigmoid")
    torch.testing.assert_close(got.samples.cpu(), want.samples)  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["image", "published"])
def test_noise_on_features_is_the_cpus(way: str) -> None:
    inputs = questions()
    regions, mask, images = inputs["regions"].float(), inputs["region_mask"], torch.arange(3)
    want = feature_noise(regions, mask, 2.0, deviation=0.5, images=images, seed=3, way=way)  # type: ignore[arg-type]
    there = feature_noise(regions.cuda(), mask.cuda(), 2.0, deviation=0.5, images=images, seed=3, way=way)  # type: ignore[arg-type]
    torch.testing.assert_close(there.cpu(), want, rtol=1e-4, atol=1e-4)


def test_the_encoder_trains_in_channels_last_under_autocast() -> None:
    torch.manual_seed(0)
    model = ImageEncoder(5).cuda().to(memory_format=torch.channels_last)
    images = torch.randint(256, (4, 3, 128, 128), dtype=torch.uint8).cuda()
    images = images.to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        loss = words_loss(model(images), torch.ones(4, 5, device="cuda"))
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    model.eval()
    with torch.no_grad():
        want = model.float().cpu().regions(images.cpu())
        got = model.cuda().regions(images).cpu()
    assert got.shape == (4, 64, 256)
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
