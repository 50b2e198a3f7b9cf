"""Gaussian weights and a sampled KL: their definitions, the variance of gradients, runs that end in NaN."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from overt.data.region_features import Regions
from overt.mechanisms.bayesian.naive import weibull_gamma_kl
from overt.mechanisms.chain import Chain
from overt.mechanisms.mechanism import Mechanism
from overt.models.att2in import Att2in
from overt.recipes import bam_captions, bam_nan
from overt.recipes._recipe import Outcome
from overt.recipes.caption_training import Captioner, CaptionRow
from overt.recipes.paired import mean_interval
from overt.recipes.unstable_attention import GaussianWeights, SampledKL, gaussian_kl, register, sampled_kl
from small_captions import recipes_in

register()
SIZES: dict[str, Any] = {"embedding": 8, "hidden": 8, "score": 8, "dropout": 0.5}
SAMPLED = SampledKL.paper("WC", k=3.0, prior_beta=0.5, d_mid=4)


def network(*mechanisms: Mechanism, features: int = 6) -> Att2in:
    torch.manual_seed(0)
    return Att2in(9, features, "soft", list(mechanisms), **SIZES)


def batch(captions: int = 4, words: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "images": torch.arange(captions),
        "labels": torch.randint(1, 9, (captions, words), generator=generator),
        "examples": torch.arange(captions),
    }


def captioner(net: Att2in, images: int = 4, regions: int = 5) -> Captioner:
    features = torch.randn(images, regions, 6, generator=torch.Generator().manual_seed(2))
    return Captioner(net, Regions(features, torch.ones(images, regions, dtype=torch.bool)))


def test_the_sampled_kl_is_the_analytic_one_on_average() -> None:
    torch.manual_seed(0)
    logits, prior = torch.randn(1, 1, 1, 3), torch.log_softmax(torch.randn(1, 1, 1, 3), -1)
    draws = 40_000
    unit = torch.rand(draws, 1, 1, 3)
    noise = torch.log(-torch.log1p(-unit)) / SAMPLED.k
    seen = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    found = sampled_kl(logits.expand(draws, -1, -1, -1), seen, noise, prior.exp(), SAMPLED)
    log_mean = logits[..., :2].log_softmax(-1)
    expected = weibull_gamma_kl(log_mean, SAMPLED.k, prior[..., :2], SAMPLED.prior_beta).mean()
    error = float(found.std()) / draws**0.5
    assert abs(float(found.mean() - expected)) < 4 * error


@torch.no_grad()
def test_gaussian_weights_have_their_mean_and_spread_and_torchs_kl() -> None:
    mean, prior = torch.tensor([0.3, -1.0, 2.0]), torch.tensor([0.5, 0.2, 0.3])
    expected = kl_divergence(Normal(mean, 0.1), Normal(prior, 2.0))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(gaussian_kl(mean, 0.1, prior, 2.0), expected)
    net = network(GaussianWeights("softmax", sigma=0.2)).eval()
    model, given = captioner(net), batch()
    regions, real = model.regions(given["images"])
    plain = net(regions, real, given["labels"], output_attentions=True)["attentions"]
    torch.testing.assert_close(plain.sum(-1), torch.ones(4, 3))
    drawn = torch.stack(
        [
            net(regions, real, given["labels"], chain=Chain(step=0, sample=n), output_attentions=True)[
                "attentions"
            ][:, 0]
            for n in range(100)
        ]
    )
    assert bool((drawn < 0).any())
    torch.testing.assert_close(drawn.mean(0), plain[:, 0], atol=0.1, rtol=0.0)
    assert abs(float((drawn - plain[:, 0]).std()) - 0.2) < 0.02


@pytest.mark.parametrize("mechanism", [GaussianWeights(), SAMPLED])
def test_its_kl_is_in_the_loss_of_training_and_moves_the_prior(mechanism: Mechanism) -> None:
    net = network(mechanism).train()
    output = captioner(net)(**batch())
    assert net.overt_losses is not None
    assert net.overt_losses.kl is not None
    output["loss"].backward()
    gradients = [p.grad for name, p in net.named_parameters() if "prior" in name]
    assert len(gradients) == 3
    assert all(gradient is not None and float(gradient.abs().sum()) > 0 for gradient in gradients)


def test_the_variance_of_gradients_is_that_over_draws() -> None:
    still = bam_nan.gradient_noise(captioner(network()), batch(), 3)
    assert still is not None
    assert still.variance == pytest.approx(0.0, abs=1e-9 * still.mean)
    model, given = captioner(network(SAMPLED)), batch()
    found = bam_nan.gradient_noise(model, given, 5)
    model.net.train()
    model.net.dropout = 0.0
    rows = []
    for draw in range(5):
        model.zero_grad()
        chain = Chain(step=0, sample=draw, examples=given["examples"])
        model.net(*model.regions(given["images"]), given["labels"], chain=chain)["loss"].backward()
        rows.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double())
    all_rows = torch.stack(rows)
    # The squared mean as what two different draws have in common, on average.
    products = all_rows @ all_rows.T
    common = float((products.sum() - products.trace()) / 20)
    assert found == pytest.approx((float(all_rows.var(dim=0).sum()), common), rel=1e-4)


def test_a_mean_gradient_that_draws_do_not_tell_from_zero_is_said_to_be_small() -> None:
    run = {"variance_at_end": 8.0, "mean_at_end": -1.0}
    other = {"variance_at_end": 4.0, "mean_at_end": 2.0}
    outcome = Outcome({"draws": 64}, {seed: {"mine": run, "theirs": other} for seed in range(3)})
    assert bam_nan.noise_cells(outcome, "mine", "theirs", "end") == ["8", "2.0", "> 64"]
    assert bam_nan.noise_cells(outcome, "theirs", "theirs", "end") == ["4", "1.0", "2"]
    assert bam_nan.noise_cells(outcome, "absent", "theirs", "end") == ["–", "–", "–"]


def test_a_run_that_ends_in_nan_is_noted_with_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "BAM-WC": CaptionRow(mechanisms=(bam_captions.WC,)),
        "sampled KL": CaptionRow(mechanisms=(GaussianWeights(sigma=1e38, rho=1.0),)),
    }
    monkeypatch.setattr(bam_nan, "ROWS", rows)
    monkeypatch.setattr(bam_nan, "DRAWS", 2)
    result = recipes_in(tmp_path, monkeypatch)("bam-nan")
    table = dict(result["tables"][0]["rows"])
    assert table["BAM-WC"][:2] == ["0 of 1", "–"]
    assert table["sampled KL"][:2] == ["1 of 1", "1"]
    numbers = result["per_seed"]["0"]
    assert numbers["sampled KL, scenes"]["variance_at_end"] is None
    assert numbers["BAM-WC, scenes"]["variance_at_end"] > 0


def test_a_sampled_kl_needs_weibull_weights_and_a_contextual_prior() -> None:
    with pytest.raises(ValueError, match="is for Weibull weights with a contextual prior"):
        SampledKL(prior="fixed")


def test_the_guide_and_the_remark_say_what_was_measured() -> None:
    root = Path(__file__).parents[1]
    stored = json.loads((root / "results" / "bam-nan.json").read_text())
    (table,) = (table for table in stored["tables"] if table["title"] == "scenes")
    (photographs,) = (table for table in stored["tables"] if table["title"] == "flickr8k")
    rows = dict(table["rows"])
    assert [cells[0] for cells in rows.values()] == ["0 of 3"] * 4
    losses = [float(cells[table["columns"].index("validation loss")]) for cells in rows.values()]
    assert max(losses) - min(losses) < 0.005
    guide = " ".join((root / "docs" / "pictures.md").read_text().split())
    scores, softmax, sampled = (list(rows.values())[place][5] for place in (1, 2, 3))
    assert f"is {scores} times (around the scores) and {softmax} times (around their softmax)" in guide
    assert f"that of a sampled KL {sampled} times" in guide
    remark = " ".join((root / "results" / "bam-nan.remark.md").read_text().split())
    at_start = [float(rows[name][5]) for name in list(rows)[1:3]]
    of_best = [float(rows[name][8]) for name in list(rows)[1:3]]
    assert f"{min(at_start):.0f} and {max(at_start):.0f} times the variance" in remark
    assert f"{min(of_best):.0f} and {max(of_best):.0f} times in the best epoch" in remark
    cells = [each for _, each in photographs["rows"]]
    assert [each[0] for each in cells] == ["0 of 3"] * 4
    runs = list(stored["per_seed"].values())
    assert f"Of {sum(map(len, runs))} runs" in guide
    assert f"None of the {sum(map(len, runs))} trainings" in remark
    for row, mean, low, high in (
        ("Gaussian weights around the scores, flickr8k", "0.018", "0.015", "0.021"),
        ("Gaussian weights around the softmax, flickr8k", "0.004", "0.003", "0.006"),
    ):
        apart = [found[row]["valid_loss"] - found["BAM-WC, flickr8k"]["valid_loss"] for found in runs]
        assert [f"{each:.3f}" for each in mean_interval(apart)] == [mean, low, high]
        assert all(
            re.search(rf"{mean} \((95 % interval )?{low} to {high}\)", text) for text in (guide, remark)
        )
    times = [
        found["Gaussian weights around the scores, flickr8k"]["variance_at_start"]
        / found["BAM-WC, flickr8k"]["variance_at_start"]
        for found in runs
    ]
    assert f"({min(times):.0f} to {max(times):.0f} in the three seeds)" in guide
    assert f"around the scores {min(times):.0f} to {max(times):.0f})" in remark
    assert f"it is {cells[1][5]} ({min(times):.0f}" in guide
    assert "seeds), {} and {} times".format(*(each[5] for each in cells[2:])) in guide
    assert f"{float(cells[2][5]):.0f} and {float(cells[1][5]):.0f} times (medians" in remark
    assert [list(rows.values())[3][8], cells[3][8]] == ["1.0", "1.0"]
    assert "(1.0 times in the best epoch on both)" in remark
