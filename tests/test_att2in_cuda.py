"""The captioning network on a GPU: the CPU's loss, gradients and captions, and bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import overt
from overt.models.att2in import Att2in

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ["soft", "hard", "none", "bayesian", "both"])
def test_it_has_the_cpus_loss_gradients_and_captions_and_trains_under_autocast(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bayesian = overt.Bayesian.paper("WC", k=10, prior_beta=1e-6, rho=1, d_mid=10)
    mechanisms = {"bayesian": [bayesian], "both": [overt.Evolving(first=True), bayesian]}.get(name, [])
    attention = "soft" if mechanisms else name
    sizes = {"features": 12, "embedding": 16, "hidden": 24, "score": 16, "dropout": 0.0}
    sizes |= {"pad_id": 0, "bos_id": 1, "eos_id": 2}
    torch.manual_seed(0)
    model = Att2in(20, attention=attention, mechanisms=mechanisms, **sizes).double()  # type: ignore[arg-type]
    # draws differ between devices: take the first region that is there
    monkeypatch.setattr(model, "_choose", lambda p: (p > 0.0).int().argmax(dim=-1))
    regions, shown = torch.randn(3, 9, 12, dtype=torch.float64), torch.ones(3, 9)
    labels = torch.randint(3, 20, (3, 6))
    shown[1, ::2], labels[1, 4:] = 0, -100

    def run(device: str) -> list[Tensor]:
        model.to(device).zero_grad()
        given = (x.to(device) for x in (regions.to(model.generator.weight.dtype), shown, labels))
        loss = model(*given)["loss"]
        loss.backward()
        return [
            loss.detach().cpu(),
            *[p.grad.cpu().clone() for p in model.parameters() if p.grad is not None],
        ]

    want, captions = run("cpu"), model.caption(regions, shown, beam=3, max_length=9)
    got = run("cuda")
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
    there = model.caption(regions.cuda(), shown.cuda(), beam=3, max_length=9)
    torch.testing.assert_close([x.cpu() for x in there], list(captions))
    model.float()
    with torch.autocast("cuda", torch.bfloat16):
        half = run("cuda")
        written, scores = model.caption(regions.cuda(), shown.cuda(), beam=3, max_length=9)
    torch.testing.assert_close(half[0], want[0].float(), rtol=0.05, atol=0.0)
    assert all(bool(x.isfinite().all()) for x in half)
    assert len(written) == 3
    assert scores.dtype == torch.float32


def test_regions_are_drawn_on_the_gpu_where_there_are_any() -> None:
    torch.manual_seed(0)
    model = Att2in(
        20, features=12, attention="hard", embedding=16, hidden=24, score=16, soft_share=0.5
    ).cuda()
    regions, shown = torch.randn(64, 9, 12, device="cuda"), torch.ones(64, 9, device="cuda")
    shown[:, 3:] = 0
    regions[:, 3:] = torch.nan
    loss = model(regions, shown, torch.randint(3, 20, (64, 6), device="cuda"))["loss"]
    loss.backward()
    assert bool(loss.isfinite())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
