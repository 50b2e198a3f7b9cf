"""MCAN: published sizes, torch's own attention as an oracle, padding, noise, predictive samples, files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overt
from overt.mechanisms.attention import MultiheadAttention
from overt.mechanisms.bayesian.drawing import noise_keys
from overt.models import mcan as mcan_module
from overt.models.marian import size_without_embeddings
from overt.models.mcan import MCAN, SIZES, LayerNorm, feature_deviation, feature_noise
from overt.models.multi_label import multi_label_loss
from small_pictures import ANSWERS, WC, WORDS, answers, mcan, questions


def attentions(model: MCAN) -> list[MultiheadAttention]:
    return [module for module in model.modules() if isinstance(module, MultiheadAttention)]


# --- Sizes ---


def test_the_published_sizes_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        assert size_without_embeddings(MCAN(20_000, 3129, **SIZES["small"])) == 51_640_891  # type: ignore[arg-type]
        assert size_without_embeddings(MCAN(20_000, 3129, **SIZES["large"])) == 195_551_291  # type: ignore[arg-type]
        soft = MCAN(20_000, 3129)
        prior = MCAN(20_000, 3129, [overt.Bayesian.paper("WC", k=1000, d_mid=20)])
    assert len(attentions(soft)) == 18
    assert size_without_embeddings(prior) - size_without_embeddings(soft) == 18 * 1_320
    assert size_without_embeddings(soft) == 51_640_891, "the defaults are MCAN-small"


# --- The definition ---


class Plain(nn.Module):
    """MCAN from torch's own attention, one example at a time and without padding; weights of an `MCAN`."""

    def __init__(self, model: MCAN) -> None:
        super().__init__()
        self.model = model

    def attention(self, theirs: MultiheadAttention, query: Tensor, key: Tensor) -> Tensor:
        own = nn.MultiheadAttention(theirs.embed_dim, theirs.num_heads, dtype=torch.float64)
        weights = {name: x for name, x in theirs.named_parameters() if not name.startswith("map.")}
        return torch.func.functional_call(own, weights, (query, key, key))[0]

    def norm(self, theirs: LayerNorm, x: Tensor) -> Tensor:
        middle = x.sum(-1, keepdim=True) / x.shape[-1]
        variance = (x - middle).pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1)
        return theirs.weight * (x - middle) / (variance**0.5 + 1e-6) + theirs.bias

    def flat(self, theirs: Any, x: Tensor) -> Tensor:
        weights = theirs.score(theirs.inner(x).relu()).softmax(dim=0)
        return theirs.merge((weights * x).sum(dim=0))

    def layer(self, theirs: Any, x: Tensor, guide: Tensor | None = None) -> Tensor:
        x = self.norm(theirs.norm, x + self.attention(theirs.attention, x, x))
        if guide is not None:
            x = self.norm(theirs.guided_norm, x + self.attention(theirs.guided_attention, x, guide))
        return self.norm(theirs.mlp_norm, x + theirs.outer(theirs.inner(x).relu()))

    def forward(self, words: Tensor, regions: Tensor) -> Tensor:
        model = self.model
        x, y = model.lstm(model.words(words))[0], model.regions(regions)
        for layer in model.encoder:
            x = self.layer(layer, x)
        for layer in model.decoder:
            y = self.layer(layer, y, x)
        return model.answers(
            self.norm(model.norm, self.flat(model.flat_words, x) + self.flat(model.flat_regions, y))
        )


def by_hand(model: MCAN, inputs: dict[str, Tensor]) -> Tensor:
    rows = zip(inputs["words"], inputs["word_mask"], inputs["regions"], inputs["region_mask"], strict=True)
    plain = Plain(model)
    return torch.stack([plain(words[shown], regions[seen]) for words, shown, regions, seen in rows])


def gradients(model: MCAN, logits: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    wanted = torch.autograd.grad(logits.sin().sum(), parameters, allow_unused=True)
    return {name: x for name, x in zip(names, wanted, strict=True) if x is not None}


def test_it_is_what_torchs_own_attention_computes_example_by_example() -> None:
    model, inputs = mcan(), questions()
    logits, want = model(**inputs)["logits"], by_hand(model, inputs)
    torch.testing.assert_close(logits, want)
    ours, theirs = gradients(model, logits), gradients(model, want)
    assert ours.keys() == theirs.keys() == dict(model.named_parameters()).keys()
    torch.testing.assert_close(ours, theirs)


def test_a_mechanism_in_evaluation_has_the_mean_and_much_k_is_soft_attention() -> None:
    inputs, want = questions(), by_hand(mcan(), questions())
    sure = overt.Bayesian.paper("WC", k=1e9, d_mid=4)
    for model, chain in ((mcan(WC), None), (mcan(sure), overt.Chain(step=0, sample=3))):
        model.load_state_dict(mcan().state_dict(), strict=False)
        torch.testing.assert_close(model(**inputs, chain=chain)["logits"], want)
    noisy = mcan(WC)
    noisy.load_state_dict(mcan().state_dict(), strict=False)
    drawn = noisy(**inputs, chain=overt.Chain(step=0, sample=3))["logits"]
    assert (drawn - want).abs().max() > 1e-3


def test_the_norm_divides_by_the_unbiased_deviation_and_survives_equal_values() -> None:
    norm = LayerNorm(4).double()
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0], [2.0, 2.0, 2.0, 2.0]], dtype=torch.float64, requires_grad=True)
    want = torch.tensor([-2.0, -1.0, 0.0, 3.0], dtype=torch.float64) / ((14 / 3) ** 0.5 + 1e-6)
    torch.testing.assert_close(norm(x), torch.stack([want, torch.zeros_like(want)]))
    assert not torch.allclose(norm(x)[0], F.layer_norm(x[0], (4,)))
    (norm(x) * torch.arange(4)).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_the_norm_is_at_least_float32_inside_and_has_the_precision_of_its_weights() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    norm = LayerNorm(8)
    assert norm(x.bfloat16()).dtype == torch.float32
    assert norm.half()(x.half()).dtype == torch.float16


# --- Padding ---


@pytest.mark.parametrize("mechanisms", [[], [WC], [overt.Evolving()]], ids=["soft", "bayesian", "evolving"])
def test_padding_moves_nothing_whatever_it_holds(mechanisms: list[overt.Mechanism]) -> None:
    model, inputs = mcan(*mechanisms).train(), questions()
    changed = {name: x.clone() for name, x in inputs.items()}
    changed["words"][1, 2:] = torch.tensor([-1, 99, 3])
    changed["regions"][1, -1] = torch.inf
    longer = {
        "words": F.pad(inputs["words"], (0, 3), value=7),
        "word_mask": F.pad(inputs["word_mask"], (0, 3)),
        "regions": F.pad(inputs["regions"], (0, 0, 0, 2), value=50.0),
        "region_mask": F.pad(inputs["region_mask"], (0, 2)),
    }

    def run(given: dict[str, Tensor]) -> list[Tensor]:
        model.zero_grad()
        output = model(**given, labels=answers(), chain=overt.Chain(step=1))
        output["loss"].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        return [output["logits"], output["loss"], *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]

    want = run(inputs)
    assert all(x.isfinite().all() for x in want)
    for given in (changed, longer):
        torch.testing.assert_close(run(given), want)
    shown = {**changed, "region_mask": torch.ones_like(inputs["region_mask"]), "words": inputs["words"]}
    shown["regions"][1, -1] = 50.0
    moved = (model(**shown, chain=overt.Chain(step=1))["logits"] - want[0]).abs().amax(dim=1)
    assert moved[1] > 1e-3, "without the mask it is seen"
    assert moved[[0, 2]].max() < 1e-9


def test_weights_of_the_last_attentions_sum_to_one_and_are_zero_at_padding() -> None:
    inputs = questions()
    output = mcan()(**inputs)
    for side in ("word", "region"):
        weights, mask = output[f"{side}_weights"], inputs[f"{side}_mask"]
        torch.testing.assert_close(weights.sum(dim=1), torch.ones(3, dtype=torch.float64))
        assert bool((weights[~mask] == 0).all())
        assert bool((weights[mask] > 0).all())


def test_rows_of_zeros_are_regions_like_others_where_the_mask_says_so() -> None:
    model, inputs = mcan(), questions()
    inputs["regions"][2, 0] = 0.0
    torch.testing.assert_close(model(**inputs)["logits"], by_hand(model, inputs))


# --- Places ---


def test_a_grid_tells_places_apart_and_without_one_there_are_none() -> None:
    inputs = questions()
    inputs["region_mask"][:] = True
    moved = {**inputs, "regions": inputs["regions"][:, [2, 0, 3, 1]]}
    plain, placed = mcan(), mcan(grid=(2, 2))
    torch.testing.assert_close(plain(**moved)["logits"], plain(**inputs)["logits"])
    assert (placed(**moved)["logits"] - placed(**inputs)["logits"]).abs().max() > 1e-3
    assert size_without_embeddings(placed) == size_without_embeddings(plain)
    rows, columns = placed.rows, placed.columns
    assert rows is not None
    assert columns is not None
    bare = mcan()
    bare.load_state_dict({name: x for name, x in placed.state_dict().items() if name in bare.state_dict()})
    # region 2 of a 2×2 grid is the first of the second row: the same as a plain network with that bias
    for number, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
        one = {**inputs, "region_mask": torch.arange(4).expand(3, 4) == number}
        with torch.no_grad():
            bare.regions.bias.copy_(placed.regions.bias + rows.weight[row] + columns.weight[column])
        torch.testing.assert_close(placed(**one)["logits"], bare(**one)["logits"])


# --- Noise of the weights ---


def test_all_maps_have_their_own_noise_at_the_same_step_and_sample() -> None:
    model = mcan(WC)
    sites = [attention.map.site for attention in attentions(model)]
    assert len({site.place for site in sites}) == 6
    keys = {tuple(noise_keys(site, overt.Chain(step=4, sample=2)).tolist()) for site in sites}
    assert len(keys) == 6


def test_words_and_regions_are_given_different_weights_by_the_same_attention() -> None:
    model = mcan(WC).train()
    words, regions = model.encoder[0].attention, model.decoder[0].attention
    regions.load_state_dict(words.state_dict())
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def weights(attention: MultiheadAttention) -> Tensor:
        chain = overt.Chain(step=4, sample=2)
        return attention(x, x, x, average_attn_weights=False, chain=chain)[1]  # type: ignore[return-value]

    torch.testing.assert_close(weights(words), weights(words), rtol=0, atol=0)
    assert (weights(words) - weights(regions)).abs().max() > 0.02
    model.eval()
    chain = overt.Chain(step=4)
    torch.testing.assert_close(words(x, x, x, chain=chain)[1], regions(x, x, x, chain=overt.Chain(step=4))[1])


def test_maps_of_words_and_of_regions_evolve_apart() -> None:
    model = mcan(overt.Evolving(alpha=0.5, beta=0.5))
    assert [attention.map.site.starts for attention in attentions(model)] == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert model(**questions(length=5, regions=4))["logits"].isfinite().all()


# --- The loss ---


def test_the_loss_is_summed_over_answers_and_over_the_batch_or_averaged() -> None:
    logits = torch.randn(3, ANSWERS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels, p = answers(), logits.sigmoid()
    want = -(labels * p.log() + (1 - labels) * (1 - p).log())
    torch.testing.assert_close(multi_label_loss(logits, labels, "sum"), want.sum())
    torch.testing.assert_close(multi_label_loss(logits, labels, "mean"), want.sum(dim=1).mean())
    assert multi_label_loss(logits.bfloat16(), labels).dtype == torch.float32


def test_the_published_weight_of_the_kl_is_one_batchth_of_a_mean_losss() -> None:
    def gradient(reduction: str, kl_weight: float) -> list[Tensor]:
        mechanism = overt.Bayesian(k=5, prior_beta=1e-2, d_mid=4, kl_weight=kl_weight)
        model = mcan(mechanism, reduction=reduction).train()
        model(**questions(), labels=answers(), chain=overt.Chain(step=1))["loss"].backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    published, mean = gradient("sum", 1.0), gradient("mean", 1 / 3)
    torch.testing.assert_close(published, [3 * x for x in mean])
    heavier = gradient("mean", 1.0)
    assert any((a - 3 * b).abs().max() > 1e-3 for a, b in zip(published, heavier, strict=True))


def test_the_kl_is_part_of_the_loss_in_training_alone() -> None:
    model, inputs, labels = mcan(WC), questions(), answers()
    output = model(**inputs, labels=labels)
    torch.testing.assert_close(output["loss"], multi_label_loss(output["logits"], labels, "sum"))
    chain = overt.Chain(step=0)
    output = model.train()(**inputs, labels=labels, chain=chain)
    task = multi_label_loss(output["logits"], labels, "sum")
    torch.testing.assert_close(output["loss"], task + chain.penalty())
    assert chain.penalty() > 0
    losses = overt.losses(model)
    torch.testing.assert_close(losses.task, task.detach())
    torch.testing.assert_close(losses.kl, chain.kl().detach())
    assert losses.items == 3


def test_gradients_reach_every_parameter() -> None:
    model = mcan(WC, dropout=0.1, grid=(2, 2)).train()
    for name, parameter in model.named_parameters():
        if name.endswith("prior.inner.bias"):  # the prior's ReLUs are then on for some keys, off for others
            nn.init.zeros_(parameter)
    model(**questions(), labels=answers(), chain=overt.Chain(step=1))["loss"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # a number added to all scores changes no softmax
        assert name.endswith("score.bias") or parameter.grad.abs().max() > 1e-9, name


@pytest.mark.slow
def test_a_training_step_learns_and_the_step_addresses_the_noise() -> None:
    model = mcan(WC, dropout=0.1).float().train()
    inputs = {name: x.float() if name == "regions" else x for name, x in questions().items()}
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    losses = []
    for step in range(12):
        model.step.fill_(step)
        loss = model(**inputs, labels=answers().float())["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(overt.losses(model).task))  # type: ignore[arg-type]
    assert losses[-1] < 0.8 * losses[0]
    model.eval()
    first, again, other = (
        model(**inputs, chain=overt.Chain(step=step, sample=0))["logits"] for step in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


# --- Predictive samples ---


@pytest.mark.parametrize("dropout", [False, True])
def test_the_posterior_has_a_sigmoid_for_each_answer(dropout: bool) -> None:
    model, inputs = mcan(WC, dropout=0.1), questions()
    drawn = overt.posterior(model, inputs, samples=6, dropout=dropout, problem_type="sigmoid")
    assert isinstance(drawn, overt.Posterior)
    assert drawn.samples.shape == (6, 3, ANSWERS)
    assert bool(((drawn.samples > 0) & (drawn.samples < 1)).all())
    assert float((drawn.samples.sum(dim=-1) - 1).abs().min()) > 0.1
    assert float(drawn.spread.min()) > 0
    assert not model.training
    if not dropout:
        chain = overt.Chain(step=0, sample=4)
        want = model(**inputs, chain=chain)["logits"].sigmoid()
        torch.testing.assert_close(drawn.samples[4], want.float())


def test_soft_attention_without_dropout_has_no_spread() -> None:
    inputs = questions()
    settings: dict[str, Any] = {"samples": 4, "dropout": True, "problem_type": "sigmoid"}
    still = overt.posterior(mcan(), inputs, **settings)
    assert float(still.spread.max()) == 0.0  # type: ignore[union-attr]
    moving = overt.posterior(mcan(dropout=0.1), inputs, **settings)
    assert float(moving.spread.min()) > 0.0  # type: ignore[union-attr]


# --- Noise on the features ---


def noisy(regions: Tensor, mask: Tensor, strength: float = 2.0, **settings: Any) -> Tensor:
    settings = {"deviation": 1.5, "images": torch.arange(len(regions)), **settings}
    return feature_noise(regions, mask, strength, **settings)


def test_noise_on_features_is_of_the_strength_that_is_asked_for() -> None:
    regions = torch.zeros(8, 50, 64)
    mask = torch.ones(8, 50, dtype=torch.bool)
    added = noisy(regions, mask).double()
    assert abs(float(added.std()) - 3.0) < 0.05
    assert abs(float(added.mean())) < 0.075, "four standard errors"
    assert abs(float((added / 3).pow(4).mean()) - 3.0) < 0.15, "Gaussian"
    flat = added.flatten(1)
    correlations = torch.corrcoef(flat) - torch.eye(8)
    assert float(correlations.abs().max()) < 0.08, "every image has its own"
    assert torch.equal(noisy(regions, mask, 0.0), regions)


def test_noise_follows_its_image_its_seed_and_its_step() -> None:
    inputs = questions(4)
    regions, mask = inputs["regions"], inputs["region_mask"]
    want = noisy(regions, mask)
    order = torch.tensor([2, 0])
    assert torch.equal(noisy(regions[order], mask[order], images=order), want[order])
    longer = noisy(F.pad(regions, (0, 0, 0, 3)), F.pad(mask, (0, 3)))
    assert torch.equal(longer[:, :4], want)
    for change in ({"seed": 1}, {"step": 1}, {"images": torch.arange(4) + 4}):
        assert float((noisy(regions, mask, **change) - want)[0].abs().min()) > 0.0


def test_noise_never_unmasks() -> None:
    model, inputs = mcan(), questions()
    inputs["regions"][1, -1] = 0.0  # as padding is in files
    regions, mask = inputs["regions"], inputs["region_mask"]
    ours = noisy(regions, mask)
    assert bool((ours[1, -1] == 0).all())
    assert bool((ours[mask] != regions[mask]).all())
    theirs = noisy(regions, mask, way="published")
    added = theirs - regions
    torch.testing.assert_close(added, added[:1].expand_as(added))
    assert bool((theirs[1, -1] != 0).all()), "a mask made from rows of zeros would be lost here"
    for given in (ours, theirs):
        got = model(**{**inputs, "regions": given})["logits"]
        torch.testing.assert_close(got, by_hand(model, {**inputs, "regions": given}))
    seen = {**inputs, "regions": theirs, "region_mask": torch.ones_like(mask)}
    assert (model(**seen)["logits"] - got)[1].abs().max() > 1e-3, "as published, padding is seen"
    assert not torch.equal(theirs, noisy(regions, mask, way="published", step=1))


def test_the_unit_of_noise_leaves_padding_out() -> None:
    regions = torch.tensor([[[1.0, 3.0], [5.0, 7.0]], [[1.0, 1.0], [900.0, 900.0]]])
    mask = torch.tensor([[True, True], [True, False]])
    values = torch.tensor([1.0, 3.0, 5.0, 7.0, 1.0, 1.0]).double()
    assert feature_deviation(regions, mask) == pytest.approx(float(values.var(correction=0) ** 0.5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_unit_of_noise_does_not_depend_on_how_many_images_are_summed_at_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    regions = (torch.randn(11, 3, 5, generator=generator) + 100.0).to(dtype)  # far from zero
    mask = torch.rand(11, 3, generator=generator) < 0.7
    mask[2] = False
    some = torch.tensor([8, 2, 0, 5, 10])
    for images in (None, some):
        chosen = slice(None) if images is None else images
        want = regions[chosen][mask[chosen]].double().std(correction=0)
        for at_once in (1, 2, 512):
            monkeypatch.setattr(mcan_module, "AT_ONCE", at_once)
            assert feature_deviation(regions, mask, images) == pytest.approx(float(want), rel=1e-12)
    with pytest.raises(ValueError, match="needs two values or more, got 0"):
        feature_deviation(regions, mask, torch.tensor([2]))


# --- Bad input ---


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "features of another width": (
        {"regions": torch.zeros(3, 4, 9)},
        ValueError,
        r"regions must be 6 wide \(features\), got 9",
    ),
    "another batch": (
        {"regions": torch.zeros(2, 4, 6)},
        ValueError,
        r"regions must have shape \(3, regions, 6\)",
    ),
    "no batch": ({"regions": torch.zeros(4, 6)}, ValueError, r"regions must have shape .* got \(4, 6\)"),
    "an empty question": (
        {"word_mask": torch.tensor([[True] * 5, [False] * 5, [True] * 5])},
        ValueError,
        "the question of example 1 is empty: word_mask hides all",
    ),
    "no words": (
        {"words": torch.zeros(3, 0, dtype=torch.int64), "word_mask": torch.zeros(3, 0, dtype=torch.bool)},
        ValueError,
        r"words and regions must hold at least one of each, got \(3, 0\)",
    ),
    "an empty image": (
        {"region_mask": torch.tensor([[True] * 4, [True] * 4, [False] * 4])},
        ValueError,
        "the image of example 2 is empty: region_mask hides all",
    ),
    "padding on the left": (
        {"word_mask": torch.tensor([[True] * 5, [False] + [True] * 4, [True] * 5])},
        ValueError,
        "word_mask must have its padding on the right",
    ),
    "an unknown word": (
        {"words": torch.full((3, 5), WORDS)},
        ValueError,
        "words must hold ids from 0 to 10, got 11",
    ),
    "words as numbers": ({"words": torch.zeros(3, 5)}, ValueError, "words must be ids of shape"),
    "a mask of numbers": ({"region_mask": torch.ones(3, 4)}, TypeError, "region_mask must be boolean"),
    "a mask of another length": (
        {"word_mask": torch.ones(3, 4, dtype=torch.bool)},
        ValueError,
        r"word_mask must have shape \(3, 5\), got \(3, 4\)",
    ),
    "other answers": (
        {"labels": torch.zeros(3, 8)},
        ValueError,
        r"labels must have shape \(3, 7\), got \(3, 8\)",
    ),
    "counts as labels": (
        {"labels": torch.full((3, 7), 2.0)},
        ValueError,
        r"labels must lie in \[0, 1\], got 2 to 2",
    ),
    "no numbers": (
        {"labels": torch.full((3, 7), torch.nan)},
        ValueError,
        r"labels must lie in \[0, 1\], got nan",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as refusal:
        mcan()(**{**questions(), **change})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 3}, r"heads must divide width \(16\), got 3"),
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"grid": 4}, r"grid must be numbers of rows and columns, such as \(8, 8\), got 4"),
        ({"reduction": "none"}, "reduction must be one of 'sum', 'mean'; got 'none'"),
        ({"dropout": 2}, r"dropout must lie in \[0, 1\], got 2"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mcan(**settings)


def test_images_that_are_not_of_the_grid_are_named() -> None:
    with pytest.raises(ValueError, match=r"an image must have 2·3 regions \(grid\), got 4"):
        mcan(grid=(2, 3))(**questions())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strength": -1.0}, "strength must be at least 0, got -1"),
        ({"deviation": 0.0}, "deviation must be positive and finite, got 0"),
        ({"way": "theirs"}, "way must be one of 'image', 'published'; got 'theirs'"),
        ({"images": torch.arange(2)}, r"images must number the 3 images of the batch, got \(2,\)"),
        ({"mask": torch.ones(3, 4)}, r"region_mask must be boolean of shape \(3, 4\), got .*float32"),
    ],
)
def test_bad_noise_is_named(change: dict[str, Any], message: str) -> None:
    inputs = questions()
    with pytest.raises(ValueError, match=message):
        noisy(**{"regions": inputs["regions"], "mask": inputs["region_mask"], **change})


# --- Files ---


def test_a_network_comes_back_from_its_folder(tmp_path: Path) -> None:
    model, inputs = mcan(WC, grid=(2, 2), reduction="mean", dropout=0.2), questions()
    model.word_names, model.answer_names = list("abcdefghijk"), list("ABCDEFG")
    model.step.fill_(7)
    model.save(tmp_path / "model")
    again = MCAN.load(tmp_path / "model")
    assert not again.training
    assert (again.settings, again.mechanisms) == (model.settings, model.mechanisms)
    assert (again.word_names, again.answer_names) == (model.word_names, model.answer_names)
    chain, same = (overt.Chain(step=7, sample=1) for _ in range(2))
    assert torch.equal(again(**inputs, chain=chain)["logits"], model(**inputs, chain=same)["logits"])
    assert int(again.step) == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "overt-resnet"}, r"model_type of .* must be 'overt-mcan', got 'overt-resnet'"),
        ({"glimpses": 2}, "config.json has settings that MCAN does not: glimpses"),
        ({"features": None}, "config.json lacks features"),
        ({"heads": 3}, "config.json cannot be understood: heads must divide width"),
        ({"answer_names": ["a"]}, "cannot be understood: answer_names must be 7 strings, got 1"),
        ({"features": 9}, r"does not fit config.json: regions.weight has shape \(16, 9\), and \(16, 6\)"),
        ({"mechanisms": [{"name": "Melting"}]}, "cannot be understood: a mechanism must name one of"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    mcan().save(tmp_path)
    config = {**json.loads((tmp_path / "config.json").read_text()), **changes}
    config = {name: value for name, value in config.items() if name != "features" or value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        MCAN.load(tmp_path)


def test_names_that_do_not_fit_are_not_saved(tmp_path: Path) -> None:
    model = mcan()
    model.answer_names = ["yes", "no"]
    with pytest.raises(ValueError, match="answer_names must be 7 strings, got 2"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


# --- What saves time ---


@pytest.mark.parametrize("mechanisms", [[], [WC]], ids=["soft", "bayesian"])
def test_norms_rescaled_together_have_the_outputs_and_gradients_of_each_alone(
    mechanisms: list[overt.Mechanism], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = mcan(*mechanisms).train(), questions()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter)

    def found() -> list[Tensor]:
        torch.manual_seed(1)  # of dropout
        output = model(**inputs, labels=torch.full((3, model.answers.out_features), 0.3))
        gradients = torch.autograd.grad(output["loss"], list(model.parameters()))
        return [output["logits"], output["loss"], *gradients]

    def alone(norms: Sequence[LayerNorm]) -> dict[LayerNorm, None]:
        return dict.fromkeys(norms)

    together = found()
    monkeypatch.setattr(mcan_module, "rescaled_weights", alone)
    assert all(torch.equal(one, other) for one, other in zip(together, found(), strict=True))


def test_the_norm_of_float32_is_that_of_the_definition_to_rounding() -> None:
    torch.manual_seed(0)
    norm, x = LayerNorm(64), 3.0 + 2.0 * torch.randn(5, 64)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x[4] = 7.0  # a row of equal values, whose gradient is finite, too
    found: list[list[Tensor]] = []
    for dtype in (torch.float32, torch.float64):
        of_type, wide = norm.to(dtype), x.clone().to(dtype).requires_grad_()
        of_type.zero_grad()
        out = of_type(wide)
        out.sin().sum().backward()
        assert wide.grad is not None
        assert bool(wide.grad.isfinite().all())
        found.append([out.double(), wide.grad[:4].double()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mechanisms", [[], [WC], [overt.Evolving()]], ids=["soft", "bayesian", "evolving"])
def test_no_mask_is_a_mask_that_hides_nothing_and_unchecked_inputs_give_the_same(
    mechanisms: list[overt.Mechanism],
) -> None:
    model, inputs = mcan(*mechanisms).train(), questions()
    inputs["region_mask"][:] = True

    def run(**changed: Any) -> list[Tensor]:
        model.zero_grad()
        output = model(**{**inputs, **changed}, labels=answers(), chain=overt.Chain(step=1))
        output["loss"].backward()
        return [output["region_weights"], output["loss"], *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]

    want = run()
    torch.testing.assert_close(run(region_mask=None), want)
    torch.testing.assert_close(run(check=False), want, rtol=0, atol=0)
    with pytest.raises(ValueError, match="must have shape"):
        run(check=False, word_mask=inputs["word_mask"][:, 1:])
