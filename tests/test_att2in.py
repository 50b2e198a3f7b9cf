"""The captioning network: against a slow reading of the paper, hard attention by enumeration, beams."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import overt
from overt.models import att2in
from overt.models.att2in import ATTENTIONS, Att2in

IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2}
SIZES: dict[str, Any] = {"features": 3, "embedding": 4, "hidden": 5, "score": 4, "dropout": 0.0, **IDS}
PAPER = overt.Bayesian.paper("WC", k=10, prior_beta=1e-6, rho=1, d_mid=10)
PAD, BOS, EOS, WORDS = 0, 1, 2, 8
REGIONS = torch.randn(3, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
SHOWN = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 1, 1]])
LABELS = torch.tensor([[3, 5, 4, EOS], [7, EOS, -100, -100], [4, 3, EOS, -100]])
REAL = LABELS >= 0
IMAGES = {"regions": REGIONS, "region_mask": SHOWN}
every_attention = pytest.mark.parametrize("attention", ATTENTIONS)
mechanisms_too = pytest.mark.parametrize(
    "mechanisms",
    [(), (PAPER,), (overt.Evolving(first=True, beta=0.9), PAPER)],
    ids=["plain", "bayesian", "both"],
)


def made(
    attention: str = "soft", mechanisms: Any = (), seed: int = 0, init: float = 0.9, **more: Any
) -> Att2in:
    torch.manual_seed(seed)
    model = Att2in(WORDS, attention=attention, mechanisms=mechanisms, **{**SIZES, **more}).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():  # weights that matter
            parameter.uniform_(-init, init)
    return model


def slopes(value: Tensor, model: Att2in) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(parameters[name]) if slope is None else slope
        for name, slope in zip(parameters, found, strict=True)
    }


class Read(NamedTuple):
    """One caption, read slowly."""

    log_p: Tensor  # (words,)
    maps: Tensor  # (words, regions), α
    scores: Tensor  # (words, regions)


def slowly(
    model: Att2in,
    regions: Tensor,
    target: Sequence[int],
    kept: float = 1.0,
    places: Sequence[int] | None = None,
) -> Read:
    """One caption as the paper describes it; what dropout acts on is multiplied by `kept`.

    The context is that of soft attention, or the region at `places`.
    """
    width = model.generator.in_features
    hidden = cell = regions.new_zeros(width)
    image = kept * torch.relu(regions @ model.region.weight.T + model.region.bias)
    log_p, maps, all_scores = [], [], []
    for t, (before, word) in enumerate(zip([BOS, *target], target, strict=False)):
        embedded = kept * torch.relu(model.words.weight[before])
        scores = torch.stack([model.score(torch.tanh(model.key(i) + model.query(hidden)))[0] for i in image])
        weights = scores.softmax(dim=0)
        context = weights @ image if places is None else image[places[t]]
        parts = model.from_word(embedded) + model.from_hidden(hidden)
        into, forget, out = (torch.sigmoid(parts[n * width : (n + 1) * width]) for n in range(3))
        seen = model.from_region(context)
        first, second = parts[3 * width : 4 * width] + seen[:width], parts[4 * width :] + seen[width:]
        cell = forget * cell + into * torch.where(first > second, first, second)
        hidden = out * torch.tanh(cell)
        log_p.append(model.generator(kept * hidden).softmax(dim=0)[word].log())
        maps.append(weights)
        all_scores.append(scores)
    return Read(torch.stack(log_p), torch.stack(maps), torch.stack(all_scores))


def of_image(n: int) -> tuple[Tensor, list[int]]:
    """The regions and words of one example, without padding."""
    return REGIONS[n][SHOWN[n] > 0], LABELS[n][REAL[n]].tolist()


# --- The network ---


def test_the_published_sizes_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        soft, hard, none, bayesian, flickr = (
            sum(parameter.numel() for parameter in model.parameters())
            for model in (
                Att2in(9488),
                Att2in(9488, attention="hard"),
                Att2in(9488, attention="none"),
                Att2in(9488, mechanisms=[PAPER]),
                Att2in(2537, features=256),
            )
        )
    assert soft == hard == 14_451_985
    assert bayesian == 14_451_985 + 5_140
    image = (2048 * 512 + 512) + 2 * (512 * 512 + 512) + (512 + 1) + (512 * 1024 + 1024)
    assert none == 14_451_985 - image
    assert 6.3e6 < flickr < 6.5e6


@pytest.mark.parametrize("attention", ["soft", "hard"])
def test_a_padded_batch_gives_what_each_caption_alone_gives_word_by_word(attention: str) -> None:
    model = made(attention).eval()
    got = model(**IMAGES, labels=LABELS, output_attentions=True)
    for n in range(3):
        regions, target = of_image(n)
        want, words, shown = slowly(model, regions, target), len(target), SHOWN[n] > 0
        torch.testing.assert_close(got["log_probs"][n, :words], want.log_p)
        torch.testing.assert_close(got["attentions"][n, :words][:, shown], want.maps)
        torch.testing.assert_close(got["entropy"][n, :words], torch.special.entr(want.maps).sum(dim=1))
        assert not got["attentions"][n][:, ~shown].any()
        for name in ("log_probs", "entropy"):
            assert not got[name][n, words:].any()
    torch.testing.assert_close(got["loss"], -got["log_probs"].sum() / 9)


def test_dropout_is_on_embeddings_regions_and_before_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    monkeypatch.setattr(model, "_dropped", lambda x: 0.6 * x)
    want = slowly(model, *of_image(0), 0.6).log_p
    torch.testing.assert_close(model(**IMAGES, labels=LABELS)["log_probs"][0], want)
    monkeypatch.undo()
    assert (made(dropout=0.5)._dropped(torch.ones(1000)) == 0.0).float().mean() > 0.4
    assert not (made(dropout=0.5).eval()._dropped(torch.ones(1000)) == 0.0).any()


@every_attention
def test_padding_changes_neither_loss_nor_gradients(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(attention)
    # draws depend on shapes: take the first region that is there
    monkeypatch.setattr(model, "_choose", lambda p: (p > 0.0).int().argmax(dim=-1))
    other = REGIONS.masked_fill(SHOWN.unsqueeze(-1) == 0, torch.nan)
    wide = {
        "regions": F.pad(other, (0, 0, 0, 2), value=7.0),
        "region_mask": F.pad(SHOWN, (0, 2)),
        "decoder_input_ids": F.pad(model._words.inputs(LABELS), (0, 2), value=6),
        "labels": F.pad(LABELS, (0, 2), value=-100),
    }
    losses = [model(**IMAGES, labels=LABELS)["loss"], model(**wide)["loss"]]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(slopes(loss, model) for loss in losses))


@every_attention
def test_every_parameter_learns_but_the_bias_that_softmax_does_not_see(attention: str) -> None:
    model = made(attention, dropout=0.2)
    found = slopes(model(**IMAGES, labels=LABELS)["loss"], model)
    still = [name for name, slope in found.items() if slope.abs().max() < 1e-12]
    assert still == ([] if attention == "none" else ["score.bias"])
    if attention == "soft":
        raw = made(mechanisms=[overt.Bayesian.paper("WC", posterior="scores")])
        assert slopes(raw(**IMAGES, labels=LABELS)["loss"], raw)["score.bias"].abs().max() > 1e-6


@mechanisms_too
def test_later_words_move_no_earlier_log_probability(mechanisms: Any) -> None:
    model = made("soft", mechanisms)
    changed = LABELS.clone()
    changed[0, 2], changed[2, 1:3] = 6, torch.tensor([5, 7])
    before, after = (model(**IMAGES, labels=x)["log_probs"] for x in (LABELS, changed))
    same = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]) > 0
    assert torch.equal(before[same], after[same])
    assert bool((before[~same & REAL] != after[~same & REAL]).all())


def test_without_an_image_regions_move_nothing() -> None:
    model = made("none").eval()
    want = model(**IMAGES, labels=LABELS)["log_probs"]
    torch.testing.assert_close(model(torch.empty(3, 0, 0), labels=LABELS)["log_probs"], want, rtol=0, atol=0)
    captions, _ = model.caption(REGIONS, beam=3, max_length=6)
    assert torch.equal(captions, captions[:1].expand(3, -1))
    seeing = made("soft").eval()
    assert bool(
        (seeing(REGIONS, labels=LABELS)["log_probs"] != seeing(-REGIONS, labels=LABELS)["log_probs"])[
            REAL
        ].all()
    )


def test_without_labels_all_words_have_the_log_probabilities_that_labels_get() -> None:
    model = made().eval()
    every = model(**IMAGES, decoder_input_ids=model._words.inputs(LABELS))["logits"]
    torch.testing.assert_close(every.exp().sum(dim=-1), torch.ones(3, 4, dtype=torch.float64))
    want = every.gather(-1, LABELS.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(~REAL, 0.0)
    torch.testing.assert_close(model(**IMAGES, labels=LABELS)["log_probs"], want)


@pytest.mark.parametrize("name", ["soft", "hard", "none", "bayesian"])
def test_float32_and_autocast_are_near_double(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("soft", [PAPER]) if name == "bayesian" else made(name)
    monkeypatch.setattr(model, "_choose", lambda p: (p > 0.0).int().argmax(dim=-1))
    want = model(**IMAGES, labels=LABELS)["loss"].float()
    model.float()
    got = model(REGIONS.float(), SHOWN, LABELS)["loss"]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0.0)
    with torch.autocast("cpu", torch.bfloat16):
        half = model(REGIONS.float(), SHOWN, LABELS)["loss"]
        captions, scores = model.caption(REGIONS.half(), SHOWN, beam=3, max_length=4)
    assert half.dtype == scores.dtype == torch.float32
    torch.testing.assert_close(half, want, rtol=0.05, atol=0.0)
    assert all(bool(slope.isfinite().all()) for slope in slopes(half, model).values())
    assert len(captions) == 3


# --- Hard attention, by enumeration of all regions for the two words of one caption ---

CAPTION = torch.tensor([[5, EOS, -100]])  # the third place is padding
SEEN = torch.tensor([[True, True, False, True]])
PLACES = [0, 1, 3]


def hard(**settings: Any) -> Att2in:
    return made("hard", seed=2, init=1.5, **settings)


def expected(model: Att2in) -> Tensor:
    """E Σ_t (log p(y_t) + entropy·H(α_t)), summed over all pairs of regions; differentiable."""
    total = torch.zeros((), dtype=torch.float64)
    for places in itertools.product(range(3), repeat=2):
        read = slowly(model, REGIONS[0][SEEN[0]], [5, EOS], places=places)
        probability = read.maps[0, places[0]] * read.maps[1, places[1]]
        value = read.log_p + model.entropy * torch.special.entr(read.maps).sum(dim=1)
        total = total + probability * value.sum()
    return total


class Estimates(NamedTuple):
    """What single draws give, weighed by their probabilities."""

    value: Tensor
    slope: Tensor  # all parameters in one vector
    variance: float
    baselines: list[Tensor]


def flat(found: dict[str, Tensor]) -> Tensor:
    return torch.cat([slope.flatten() for slope in found.values()])


def estimated(model: Att2in, monkeypatch: pytest.MonkeyPatch, softly: bool = False) -> Estimates:
    plain, baselines = att2in.reinforce, []

    def noted(value: Tensor, log_probability: Tensor, baseline: Tensor, reward: Tensor) -> Tensor:
        baselines.append(baseline)
        return plain(value, log_probability, baseline, reward)

    values, found, weights = [], [], []
    for places in itertools.product(PLACES, repeat=2):
        left, drawn = [*places, 0], []

        def choose(p: Tensor, left: list[int] = left, drawn: list[Tensor] = drawn) -> Tensor:
            drawn.append(p[0, left[0]])
            return torch.tensor([left.pop(0)])

        with monkeypatch.context() as patch:
            patch.setattr(att2in, "reinforce", noted)
            patch.setattr(model, "_choose", choose)
            patch.setattr(model, "_choose_soft", lambda n, device: torch.full((n,), softly, device=device))
            log_probs = model(REGIONS[:1], SEEN, CAPTION)["log_probs"]
        assert log_probs[0, 2] == 0.0
        values.append(log_probs.sum().detach())
        found.append(flat(slopes(log_probs.sum(), model)))
        weights.append(drawn[0] * drawn[1])
    p = torch.stack(weights)
    slope = p @ torch.stack(found)
    spread = float(p @ (torch.stack(found) - slope).square().sum(dim=1))
    return Estimates(p @ torch.stack(values), slope, spread, baselines)


@pytest.mark.parametrize("entropy", [0.0, 0.7])
def test_reinforce_averaged_over_all_draws_has_the_enumerated_gradient(
    entropy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hard(entropy=entropy)
    want = expected(model)
    got = estimated(model, monkeypatch)
    torch.testing.assert_close(got.value, want.detach())
    torch.testing.assert_close(got.slope, flat(slopes(want, model)))
    assert got.variance > 0.0, "one draw alone is an estimate"
    for baseline in got.baselines:
        assert torch.equal(baseline, got.baselines[0]), "which sees no draw"


def test_the_words_own_reward_is_biased_and_the_total_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hard()
    want = flat(slopes(expected(model), model))
    monkeypatch.setattr(att2in, "to_go", lambda value: value)
    own = estimated(model, monkeypatch)
    credited = flat(
        {
            name: torch.full_like(x, name.startswith(("score", "key", "query")))
            for name, x in model.named_parameters()
        }
    )
    assert (credited * (own.slope - want)).norm() > (credited * want).norm(), (
        "as large as the gradient itself"
    )
    monkeypatch.setattr(att2in, "to_go", lambda value: value.sum(dim=1, keepdim=True).expand_as(value))
    torch.testing.assert_close(estimated(model, monkeypatch).slope, want)


def test_the_baseline_cuts_the_variance_and_leaves_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = hard(), att2in.reinforce
    with_baseline = estimated(model, monkeypatch)
    monkeypatch.setattr(
        att2in, "reinforce", lambda v, p, baseline, reward: plain(v, p, torch.zeros_like(baseline), reward)
    )
    without = estimated(model, monkeypatch)
    torch.testing.assert_close(without.slope, with_baseline.slope)
    assert with_baseline.variance < without.variance / 7


def test_a_caption_trained_softly_has_the_gradient_of_soft_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, soft = hard(), made("soft")
    soft.load_state_dict(model.state_dict())
    want = soft(REGIONS[:1], SEEN, CAPTION)["log_probs"].sum()
    got = estimated(model, monkeypatch, softly=True)
    torch.testing.assert_close(got.slope, flat(slopes(want, soft)))
    assert got.variance < 1e-20
    assert 400 < int(hard(soft_share=0.5)._choose_soft(1000, torch.device("cpu")).sum()) < 600
    assert not hard()._choose_soft(1000, torch.device("cpu")).any()
    assert hard(soft_share=1.0)._choose_soft(1000, torch.device("cpu")).all()


def test_each_caption_draws_on_its_own_and_evaluation_draws_nothing() -> None:
    model = hard()
    many = {"regions": REGIONS[:1].expand(64, -1, -1), "region_mask": SEEN.expand(64, -1)}
    labels = CAPTION.expand(64, -1)
    drawn = model(**many, labels=labels)["log_probs"]
    assert 3 < len(drawn.detach().sum(dim=1).unique()) <= 9, "of two words and three regions"
    model.eval()
    first, second = (model(**many, labels=labels)["log_probs"] for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first[0, :2], slowly(model, REGIONS[0][SEEN[0]], [5, EOS]).log_p)


# --- Bayesian ---


def test_weights_with_little_noise_are_soft_attention() -> None:
    soft, nearly = made(), made("soft", [overt.Bayesian.paper("WC", k=1e6)])
    drawn = made("soft", [overt.Bayesian.paper("WC", k=2)])
    for model in (nearly, drawn):
        model.load_state_dict(soft.state_dict(), strict=False)
    want = soft(**IMAGES, labels=LABELS)["log_probs"]
    torch.testing.assert_close(nearly(**IMAGES, labels=LABELS)["log_probs"], want, atol=1e-4, rtol=0.0)
    assert not torch.allclose(drawn(**IMAGES, labels=LABELS)["log_probs"], want, atol=1e-2)
    torch.testing.assert_close(drawn.eval()(**IMAGES, labels=LABELS)["log_probs"], want)


def test_every_word_has_noise_of_its_own() -> None:
    model = made("soft", [PAPER])
    with torch.no_grad():
        model.query.weight.zero_()  # scores that are the same for all words
    got = model(REGIONS, labels=torch.full((3, 4), 5), output_attentions=True)["attentions"]
    assert len(got.flatten(0, 1).unique(dim=0)) == 12
    mean = model.eval()(REGIONS, labels=torch.full((3, 4), 5), output_attentions=True)["attentions"]
    torch.testing.assert_close(mean, mean[:, :1].expand_as(mean))


def gamma_weibull(k: float, mean: Tensor, alpha: Tensor, beta: float) -> Tensor:
    """KL(Weibull ‖ Gamma) as the paper's section 3.2 has it; `mean` is the Weibull's."""
    euler, gamma = 0.5772156649015329, math.gamma(1.0 + 1.0 / k)
    scale = mean / gamma
    known = euler * alpha / k - alpha * scale.log() + math.log(k) + beta * scale * gamma
    return known - euler - 1.0 - alpha * math.log(beta) + torch.lgamma(alpha)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_one_kl_counts_every_word_and_region_and_no_padding(reduction: Any) -> None:
    settings: dict[str, Any] = {"k": 10.0, "prior_beta": 1e-6, "d_mid": 10, "kl_reduction": reduction}
    model = made("soft", [overt.Bayesian.paper("WC", **settings)]).eval()
    chain = overt.Chain(kl=True)  # in evaluation, where maps are those of soft attention
    model(**IMAGES, labels=LABELS, chain=chain)
    prior = model.map.bayesian.prior  # type: ignore[union-attr]
    want = []
    for n in range(3):
        regions, target = of_image(n)
        maps = slowly(model, regions, target).maps
        image = torch.relu(regions @ model.region.weight.T + model.region.bias)
        inner = torch.relu(image @ prior.inner.weight.T + prior.inner.bias)  # type: ignore[union-attr]
        alpha = (inner @ prior.outer.weight[0]).softmax(dim=0)  # type: ignore[union-attr, index]
        cells = gamma_weibull(10.0, maps, alpha.expand_as(maps), 1e-6)  # (words, regions)
        want.append(cells.mean() if reduction == "mean" else cells.sum())
    torch.testing.assert_close(chain.kl(per_example=True), torch.stack(want))


def test_the_loss_is_the_words_and_the_weighted_kl() -> None:
    model = made("soft", [PAPER])
    model.step.fill_(1)
    chain = overt.Chain(step=1)
    loss = model(**IMAGES, labels=LABELS, chain=chain)["loss"]
    kl = (chain.kl(per_example=True) * REAL.sum(dim=1)).sum() / 9  # captions weigh as much as their words
    seen = overt.losses(model)
    torch.testing.assert_close(seen.kl, kl.detach())
    assert seen.task is not None
    torch.testing.assert_close(seen.task + torch.sigmoid(torch.tensor(1.0)) * kl, loss)
    assert int(seen.items) == 9  # type: ignore[arg-type]
    parts = [
        model(
            REGIONS[part],
            SHOWN[part],
            LABELS[part],
            examples=torch.arange(3)[part],
            num_items_in_batch=9,
        )["loss"]
        for part in (slice(0, 1), slice(1, 3))
    ]
    torch.testing.assert_close(sum(parts), loss)


def test_padding_is_in_neither_the_loss_nor_the_kl_of_random_weights() -> None:
    model = made("soft", [PAPER])
    wide = F.pad(LABELS, (0, 3), value=-100)
    results = []
    for labels, filler in ((LABELS, 6), (wide, 6), (wide, 3)):
        inputs = model._words.inputs(labels)
        inputs = torch.where(F.pad(labels[:, :-1], (1, 0)) == -100, filler, inputs)
        chain = overt.Chain(step=3)
        loss = model(**IMAGES, labels=labels, decoder_input_ids=inputs, chain=chain)["loss"]
        results.append((loss, chain.kl(per_example=True), slopes(loss, model)))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(results[2], results[0])


def test_weights_drawn_ahead_equal_those_drawn_word_by_word() -> None:
    model, results = made("soft", [PAPER]), []
    for naively in (False, True):
        chain = overt.Chain(step=2)
        if naively:
            with overt.naive():
                loss = model(**IMAGES, labels=LABELS, chain=chain)["loss"]
        else:
            loss = model(**IMAGES, labels=LABELS, chain=chain)["loss"]
        results.append((loss, chain.kl(per_example=True), slopes(loss, model)))
    torch.testing.assert_close(*results)


# --- Captions ---


def scored(model: Att2in, n: int, caption: Tensor, **chain: Any) -> Tensor:
    """The log-probability of a caption, up to its end, as the network gives it with labels."""
    target = caption[: int((caption == model.eos_id).nonzero()[0]) + 1].unsqueeze(0)
    given = {"chain": overt.Chain(step=0, examples=torch.tensor([n]), **chain)} if chain else {}
    total: Tensor = model(REGIONS[n : n + 1], SHOWN[n : n + 1], target, **given)["log_probs"].sum()
    return total


@torch.no_grad()
def best_of_all(
    model: Att2in, n: int, words: Sequence[int], longest: int, penalty: float
) -> tuple[float, list[int]]:
    best: tuple[float, list[int]] = (-torch.inf, [])
    for length in range(longest):
        for sentence in itertools.product(words, repeat=length):
            target = [*sentence, EOS]
            score = float(scored(model, n, torch.tensor(target))) / ((5 + len(target)) / 6) ** penalty
            best = max(best, (score, target))
    return best


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_beam_wide_enough_for_all_captions_finds_the_best_of_all(penalty: float) -> None:
    for seed in range(2):
        model = made(seed=seed, init=1.5).eval()
        # Two words that may be generated make 2, then 4, then 8 beginnings: as many as the beam is wide.
        settings: dict[str, Any] = {"never": [5, 6, 7], "beam": 8, "max_length": 4, "length_penalty": penalty}
        found, scores = model.caption(**IMAGES, **settings)
        for n in range(3):
            score, target = best_of_all(model, n, [3, 4], 4, penalty)
            assert found[n].tolist()[: len(target)] == target
            assert not found[n, len(target) :].any()
            assert float(scores[n]) == pytest.approx(score)


@every_attention
@torch.no_grad()
def test_a_beam_of_one_takes_the_likeliest_word_each_time(attention: str) -> None:
    for seed in range(2):
        model = made(attention, seed=seed, init=1.5).eval()
        found, scores = model.caption(**IMAGES, max_length=5)
        for n in range(3):
            words = [BOS]
            while words[-1] != EOS and len(words) < 5:
                every = model(REGIONS[n : n + 1], SHOWN[n : n + 1], decoder_input_ids=torch.tensor([words]))
                following = every["logits"][0, -1]
                following[[PAD, BOS]] = -torch.inf
                words.append(int(following.argmax()))
            words = words if words[-1] == EOS else [*words, EOS]
            assert found[n].tolist()[: len(words) - 1] == words[1:]
            assert not found[n, len(words) - 1 :].any()
            torch.testing.assert_close(scores[n], scored(model, n, found[n]))


@pytest.mark.parametrize(
    ("mechanisms", "sample"),
    [([], None), ([PAPER], 2), ([overt.Evolving(first=True, beta=0.9), PAPER], None)],
    ids=["plain", "a draw of the weights", "evolving"],
)
@torch.no_grad()
def test_a_batch_is_captioned_as_each_image_alone_with_the_scores_of_its_captions(
    mechanisms: Any, sample: int | None
) -> None:
    lengths = set()
    for seed, less in ((0, 1.0), (2, 3.0)):
        model = made("soft", mechanisms, seed, init=2.5)
        model.generator.bias[EOS] -= less  # long captions, of which some change places in the beam
        for name, parameter in model.named_parameters():
            if "evolving" in name:  # a convolution that matters: rows kept for another one would show
                parameter.uniform_(1.0, 2.0)
        found, scores = model.caption(**IMAGES, beam=4, max_length=8, sample=sample)
        assert model.training, "the mode is restored"
        model.eval()
        for n in range(3):
            number = torch.tensor([n])
            alone, score = model.caption(
                REGIONS[n : n + 1], SHOWN[n : n + 1], beam=4, max_length=8, sample=sample, examples=number
            )
            assert torch.equal(found[n, : alone.shape[1]], alone[0])
            assert not found[n, alone.shape[1] :].any()
            torch.testing.assert_close(scores[n], score[0])
            again = (
                scored(model, n, found[n]) if sample is None else scored(model, n, found[n], sample=sample)
            )
            torch.testing.assert_close(again, score[0])
            lengths.add(int((alone[0] == EOS).nonzero()[0]))
    assert len(lengths) > 1, "captions end at different times"


@pytest.mark.parametrize("beam", [2, 3, 5])
def test_a_caption_that_has_ended_stays_while_others_go_on(beam: int) -> None:
    model = made("none").eval()
    with torch.no_grad():  # after any words: the end with probability 0.5, word 3 with 0.3, word 4 with 0.2
        for parameter in model.parameters():
            parameter.zero_()
        model.generator.bias[:] = (
            torch.tensor([0.0, 0.0, 0.5, 0.3, 0.2, 0.0, 0.0, 0.0]).clamp(min=1e-30).log()
        )
    for longest in (2, 6):
        found, scores = model.caption(REGIONS, beam=beam, max_length=longest)
        assert found[:, 0].tolist() == [EOS] * 3, "nothing that comes later is as likely"
        assert not found[:, 1:].any()
        torch.testing.assert_close(scores.exp(), torch.full_like(scores, 0.5))


def test_words_that_are_never_generated_are_not() -> None:
    for seed in range(2):
        model = made(seed=seed, init=1.5).eval()
        found, _ = model.caption(**IMAGES, beam=3, max_length=5, never=[3, 6])
        assert not set(found.flatten().tolist()) & {BOS, 3, 6}


def test_one_id_may_pad_begin_and_end_captions() -> None:
    model = made(pad_id=0, bos_id=0, eos_id=0, init=1.5).eval()
    found, scores = model.caption(**IMAGES, beam=4, max_length=7)
    for n in range(3):
        torch.testing.assert_close(scores[n], scored(model, n, found[n]))
    assert found.any()


# --- Files and refusals ---


@pytest.mark.parametrize(("attention", "mechanisms"), [("soft", [PAPER]), ("hard", []), ("none", [])])
def test_a_saved_network_is_the_same_after_loading(attention: str, mechanisms: Any, tmp_path: Path) -> None:
    more = {"entropy": 0.002, "soft_share": 0.5} if attention == "hard" else {}
    model = made(attention, mechanisms, **more).float()
    model.step.fill_(17)
    model.save(tmp_path / "model")
    again = Att2in.load(tmp_path / "model")
    assert again.settings == model.settings
    assert again.mechanisms == model.mechanisms
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert not again.training
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "overt-att2in"
    images = REGIONS.float(), SHOWN
    assert torch.equal(again.caption(*images, beam=2)[0], model.caption(*images, beam=2)[0])


def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"holds no config\.json: give a folder that Att2in\.save wrote"
    ):
        Att2in.load(tmp_path)
    made().save(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"beam": 3}, "settings that Att2in does not: beam"),
        ({"model_type": "overt-seq2seq"}, "must be 'overt-att2in', got 'overt-seq2seq'"),
        ({"features": 6}, r"does not fit config\.json: region\.weight has shape \(5, 6\), and \(5, 3\)"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(ValueError, match=message):
            Att2in.load(tmp_path)
    del settings["vocabulary"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="lacks vocabulary"):
        Att2in.load(tmp_path)


def test_bad_settings_are_refused_by_name() -> None:
    for settings, message in (
        ({"attention": "loud"}, "attention must be one of 'soft', 'hard', 'none'; got 'loud'"),
        ({"attention": "hard", "mechanisms": [PAPER]}, 'mechanisms need attention="soft"'),
        ({"eos_id": 8}, r"eos_id must be below vocabulary \(8\), got 8"),
        ({"soft_share": 0.5}, "soft_share needs attention=\"hard\", got attention='soft'"),
        ({"attention": "hard", "entropy": -1.0}, r"entropy must be at least 0, got -1\.0"),
        ({"hidden": 0}, "hidden must be a whole number of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            made(**settings)  # type: ignore[arg-type]


def test_bad_input_is_refused_by_name() -> None:
    model = made()
    hidden = SHOWN * torch.tensor([[1], [0], [1]])
    for change, message in (
        ({"regions": REGIONS[..., :2]}, "regions must be 3 wide, as this network's are, got 2"),
        ({"regions": REGIONS[0]}, r"regions must have shape \(batch, regions, features\), got \(4, 3\)"),
        ({"regions": REGIONS[:, :0]}, r"regions must have shape .* got \(3, 0, 3\)"),
        ({"region_mask": SHOWN[:, :3]}, r"region_mask must have shape \(3, 4\), got \(3, 3\)"),
        ({"region_mask": hidden}, "example 1 has no region: region_mask hides all"),
        ({"labels": LABELS + 4}, "labels must hold ids from 0 to 7, got"),
        ({"labels": LABELS.flip(1)}, "labels must have its padding on the right"),
        ({"labels": LABELS[:2]}, r"labels must have shape \(3, 4\), got \(2, 4\)"),
        ({"labels": LABELS[:, :0]}, "labels must hold a word at least"),
        ({"decoder_input_ids": LABELS}, "decoder_input_ids must hold ids from 0 to 7, got -100"),
        ({"decoder_input_ids": LABELS[:, :3]}, r"labels must have shape \(3, 3\), got \(3, 4\)"),
        ({"labels": None}, "give labels, or decoder_input_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**{**IMAGES, "labels": LABELS, **change})
    with pytest.raises(TypeError, match=r"regions must hold floating-point numbers, got torch\.int64"):
        model(REGIONS.long(), labels=LABELS)
    with pytest.raises(ValueError, match='output_attentions needs an attention, got attention="none"'):
        made("none")(REGIONS, labels=LABELS, output_attentions=True)
    for settings, message in (
        ({"beam": 9}, "beam must be at most the number of ids in the vocabulary, 8; got 9"),
        ({"beam": 0}, "beam must be a whole number of at least 1, got 0"),
        ({"never": [8]}, "never must hold ids from 0 to 7, but 8 is not there"),
        ({"never": [EOS]}, "2 is eos_id, without which no caption ends"),
        ({"examples": torch.arange(2)}, r"examples must have shape \(3,\), got \(2,\)"),
        ({"region_mask": hidden}, "example 1 has no region"),
    ):
        with pytest.raises(ValueError, match=message):
            model.caption(REGIONS, **settings)  # type: ignore[arg-type]


# --- What saves time ---


@mechanisms_too
def test_no_mask_is_a_mask_that_hides_nothing_and_unchecked_inputs_give_the_same(mechanisms: Any) -> None:
    model = made(mechanisms=mechanisms)
    model.step.fill_(2)
    want = model(REGIONS, torch.ones_like(SHOWN), LABELS)["loss"]
    for given in ((REGIONS, None), (REGIONS, torch.ones_like(SHOWN))):
        loss = model(*given, LABELS, check=False)["loss"]
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(slopes(loss, model), slopes(want, model))
    with pytest.raises(ValueError, match="labels must have shape"):
        model(REGIONS, None, LABELS[:2], check=False)


def test_a_region_is_drawn_as_torch_draws_it() -> None:
    model, probabilities = made("hard"), torch.rand(50, 6, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    ours = model._choose(probabilities)
    torch.manual_seed(3)
    assert torch.equal(ours, torch.multinomial(probabilities, 1).squeeze(1))
