"""Visual question answering: what a training sees, its loss, its measures, the tables, and bad input."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from torch import Tensor
from typer.testing import CliRunner

import overt
from overt._files import write_tensors
from overt.cli import app
from overt.data import scenes
from overt.data.questions import QuestionData
from overt.data.region_features import Regions
from overt.judge.uncertainty import p_values, predictive
from overt.models.image_encoder import ImageEncoder
from overt.models.mcan import MCAN
from overt.recipes import _training, bam_questions, question_training, regions, reproduce
from overt.recipes._recipe import Grid, Outcome, Report, Request
from overt.recipes._result_files import read_result
from overt.recipes._rows import duration
from overt.recipes.asking import open_answerer
from overt.recipes.bam_questions import (
    CLEAN,
    QUESTION_ONLY,
    ROWS,
    SHUFFLED,
    SOFT,
    TABLE_2,
    TABLE_7,
    WC,
    conditions_of,
)
from overt.recipes.question_training import (
    Answered,
    Answering,
    Condition,
    QuestionRow,
    Questions,
    QuestionTraining,
    answered,
    encoded,
    judged,
    key_of,
    measures,
    network,
    optimizer_of,
    shown,
)
from overt.recipes.regions import RegionSource

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
NETWORK: dict[str, Any] = {"width": 8, "heads": 2, "layers": 1, "flat": 4, "embedding": 4, "dropout": 0.1}
TRAINING = QuestionTraining(6, 2, 8, 1e-3, (4, 5), NETWORK)


@pytest.fixture(scope="module")
def data() -> QuestionData:
    return scenes.make((12, 2, 6), side=32).questions


@pytest.fixture(scope="module")
def given(data: QuestionData) -> Regions:
    """Regions of which the last of each second image is padding."""
    features = torch.randn(len(data.image_names), 4, 5, generator=torch.Generator().manual_seed(0))
    real = torch.ones(features.shape[:2], dtype=torch.bool)
    real[::2, -1] = False
    features[~real] = 0.0
    return Regions(features, real)


def model(data: QuestionData, given: Regions, row: QuestionRow = ROWS[SOFT], **settings: Any) -> Answering:
    questions = shown(encoded(data, data.train), row.sees, 0)
    return Answering(network(data, 5, row, TRAINING, 0), given, questions, row, **settings)


# --- What is seen ---


def test_shuffled_images_are_others_of_the_same_part_and_stay_so(data: QuestionData) -> None:
    for rows in (data.train, data.test):
        own = encoded(data, rows)
        other = shown(own, "another", 3)
        assert not bool((own.images == other.images).any())
        assert sorted(own.images.tolist()) == sorted(other.images.tolist())
        pairs = set(zip(own.images.tolist(), other.images.tolist(), strict=True))
        assert len(pairs) == len(own.images.unique()), "all questions about an image get the same other one"
        assert torch.equal(shown(own, "another", 3).images, other.images)
        assert not torch.equal(shown(own, "another", 4).images, other.images)
        assert shown(own, "image", 3) is own


def test_a_question_alone_has_the_same_answer_whatever_the_image(data: QuestionData, given: Regions) -> None:
    questions = encoded(data, data.test)
    same = questions._replace(images=questions.images.flip(0))
    for row, moves in ((ROWS[QUESTION_ONLY], False), (ROWS[SOFT], True)):
        net = model(data, Regions(given.features, torch.ones_like(given.real)), row)
        first, second = (answered(net, each, Condition(), 1.0, 2).one for each in (questions, same))
        assert bool((first != second).any()) == moves


def test_the_rows_are_the_published_ones_with_the_kl_beside_a_sum() -> None:
    assert list(ROWS) == [
        "Soft", "NO KL", "LF", "LC", "WF", "WC", "WC k=100", "WC k=10", "WC weight 0.003",
        "question only", "shuffled images",
    ]  # fmt: skip
    (wc,) = ROWS[WC].mechanisms(100)
    assert (wc.k, wc.prior_beta, wc.d_mid, wc.kl_weight) == (1000, 1e-6, 20, 1 / 64)
    (default,) = ROWS["WC weight 0.003"].mechanisms(100)
    assert default.kl_weight == 0.003 == overt.Bayesian().kl_weight
    # λ = sigmoid(ρ · epoch), with ρ = 0.1: after 7 epochs of 100 updates
    step = torch.tensor(700)
    assert float(wc.annealing(step)) == pytest.approx(1 / (1 + np.exp(-0.7)), rel=1e-6)
    lc, wf = ROWS["LC"].mechanism, ROWS["WF"].mechanism
    assert lc is not None
    assert wf is not None
    assert (lc.prior_sigma, lc.sigma, lc.rho, lc.d_mid) == (1e9, 1e-9, 0.2, 20)
    assert (wf.k, wf.prior_beta, wf.prior_alpha, wf.rho) == (1000, 1e-2, 1e-3, 0.2)


def test_the_loss_is_a_mean_over_the_batch_plus_the_kl(data: QuestionData, given: Regions) -> None:
    net = model(data, given, QuestionRow(replace(ROWS[WC].mechanism, k=5.0))).double().train()  # type: ignore[type-var]
    net.net.step.fill_(3)
    numbers = torch.arange(6)
    torch.manual_seed(1)
    loss = net(numbers)["loss"]
    torch.manual_seed(1)
    chain = overt.Chain(step=3, examples=numbers)
    inputs = net.inputs(net.words[:6], net.images[:6])
    logits = net.net(**inputs, chain=chain)["logits"]
    targets = net.targets[:6]
    entropy = -(targets * logits.sigmoid().log() + (1 - targets) * (-logits).sigmoid().log()).sum() / 6
    torch.testing.assert_close(loss, entropy + chain.penalty())
    weight = 1 / 64 / (1 + np.exp(-0.1 * 3 / (36 // 8)))
    torch.testing.assert_close(chain.penalty(), weight * chain.kl())


def test_all_rows_of_a_seed_start_from_the_same_weights(data: QuestionData) -> None:
    soft = network(data, 5, ROWS[SOFT], TRAINING, 3).state_dict()
    for name, row in ROWS.items():
        own = network(data, 5, row, TRAINING, 3).state_dict()
        assert soft.keys() <= own.keys(), name
        assert all(torch.equal(own[key], value) for key, value in soft.items()), name
    assert len(own) == len(soft)
    contextual = network(data, 5, ROWS[WC], TRAINING, 3).state_dict()
    assert any("prior" in key for key in contextual.keys() - soft.keys())
    other = network(data, 5, ROWS[SOFT], TRAINING, 4).state_dict()
    assert not torch.equal(other["answers.weight"], soft["answers.weight"])


def test_the_seed_of_a_training_is_that_of_its_noise(data: QuestionData, given: Regions) -> None:
    row = QuestionRow(replace(ROWS[WC].mechanism, k=2.0))  # type: ignore[type-var]

    def loss(seed: int) -> float:
        net = model(data, given, row, seed=seed).train()
        torch.manual_seed(7)  # the same dropout
        return float(net(torch.arange(6))["loss"].detach())

    assert loss(0) != loss(1) == loss(1)


def test_the_learning_rate_rises_and_drops_to_a_fifth() -> None:
    plan = QuestionTraining(13, 4, 8, 1e-4, (10, 12), NETWORK)
    optimizer, schedule = optimizer_of(torch.nn.Linear(1, 1), plan)
    rates = []
    for _ in range(13):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    want = [min(2.5e-5 * epoch, 1e-4) for epoch in range(1, 11)] + [2e-5, 2e-5, 4e-6]
    assert rates == pytest.approx(want), "the published rates, if an update is an epoch"


# --- Noise ---


def test_noise_is_of_an_image_not_of_a_batch_and_never_unmasks(data: QuestionData, given: Regions) -> None:
    net = model(data, given)
    images = torch.tensor([0, 1, 0])
    inputs = net.inputs(net.words[:3], images)
    noisy = net.noisy(inputs, images, 2.0, 1.0, "image")
    assert torch.equal(noisy["region_mask"], inputs["region_mask"])
    assert torch.equal(noisy["regions"][0], noisy["regions"][2])
    assert bool((noisy["regions"][~inputs["region_mask"]] == 0).all())
    shared = net.noisy(inputs, images, 2.0, 1.0, "published")
    assert bool(shared["region_mask"].all()), "as published, padding is seen"
    added = shared["regions"] - inputs["regions"]
    torch.testing.assert_close(added[0], added[1])


def test_the_published_noise_is_there_in_training_and_changes_with_the_step(
    data: QuestionData, given: Regions
) -> None:
    clean, noisy = (model(data, given, noise=noise).eval() for noise in (0.0, 5**0.5))
    numbers = torch.arange(4)
    losses = []
    for net in (clean, noisy):
        for step in (0, 1):
            net.at_update(step)
            losses.append(net(numbers)["loss"].item())
    assert losses[0] == losses[1]
    assert len(set(losses)) == 3


def test_the_unit_of_noise_is_that_of_training_images_found_once_before_training(
    tmp_path: Path, data: QuestionData, given: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = given.features.clone()
    outside = torch.ones(len(features), dtype=torch.bool)
    outside[data.image_numbers(data.train)] = False
    assert bool(outside.any())
    features[outside] = 1e6
    spread = features[~outside][given.real[~outside]].double().std(correction=0)
    source = stored(tmp_path / "regions", Regions(features, given.real))
    net, _ = question_training.train(
        tmp_path / "run", data, source, ROWS[SOFT], replace(TRAINING, updates=1), 0, "cpu"
    )
    monkeypatch.setattr(question_training, "feature_deviation", lambda *_: pytest.fail("found once more"))
    assert question_training.deviation_of(data, net) == pytest.approx(float(spread), rel=1e-12)


def test_updates_are_timed_with_the_products_of_training(
    tmp_path: Path, data: QuestionData, given: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, products = stored(tmp_path / "regions", given), torch.backends.cuda.matmul
    before = products.fp32_precision
    monkeypatch.setattr(_training, "precision_of_products", lambda _: "tf32")
    monkeypatch.setattr(question_training, "times", lambda *_, **__: [products.fp32_precision])
    timed = question_training.step_times(data, source, ROWS[SOFT], TRAINING, 0, "cpu", 3)
    assert timed == ["tf32"]
    assert products.fp32_precision == before != "tf32"


# --- Measures ---


def hand_made() -> tuple[Answered, Questions]:
    generator = torch.Generator().manual_seed(0)
    samples = torch.rand(5, 4, 3, generator=generator, dtype=torch.float64)
    one = torch.tensor([[0.9, 0.1, 0.2], [0.3, 0.6, 0.1], [0.2, 0.1, 0.7], [0.5, 0.4, 0.1]]).double()
    credits = torch.tensor([[1.0, 0, 0], [0, 0.5, 0.5], [1.0, 0, 0], [0.0, 0.0, 0.0]])
    targets = (credits > 0).float()
    questions = Questions(torch.ones(4, 2).long(), torch.arange(4), targets, credits, {})
    return Answered(one, samples), questions


def test_measures_are_those_of_their_definitions() -> None:
    found, questions = hand_made()
    got = measures(found, questions)
    accuracy = np.array([1.0, 0.5, 0.0, 0.0])  # of the answers of one pass; the last has no right one
    assert got["accuracy"] == pytest.approx(100 * accuracy.mean())
    samples = found.samples.numpy()
    agree = []
    for number in range(4):
        order = samples[:, number].mean(axis=0).argsort()[::-1]
        p = stats.ttest_ind(samples[:, number, order[0]], samples[:, number, order[1]], equal_var=False)[1]
        agree.append(accuracy[number] if p < 0.05 else 1 - accuracy[number])
    assert got["PAvPU 0.05"] == pytest.approx(100 * np.mean(agree))
    mean = samples.mean(axis=0)
    assert got["Brier"] == pytest.approx(((mean - questions.targets.numpy()) ** 2).mean())
    top = mean.max(axis=1)
    right = questions.credits.numpy()[np.arange(4), mean.argmax(axis=1)]
    bins = np.minimum((top * 15).astype(int), 14)
    gaps = [abs((right - top)[bins == each].sum()) for each in range(15)]
    assert got["ECE"] == pytest.approx(100 * sum(gaps) / 4, rel=1e-5)
    assert got["accuracy of the surest 50 %"] == pytest.approx(100 * right[(-top).argsort()[:2]].mean())

    def entropy(p: Any) -> Any:
        return -(p * np.log(p) + (1 - p) * np.log(1 - p))

    information = (entropy(mean) - entropy(samples).mean(axis=0)).sum(axis=1).mean()
    assert got["mutual information"] == pytest.approx(information)


def test_answers_are_judged_as_all_their_samples_on_the_cpu_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.rand(20, 30, 7, generator=generator, dtype=torch.float64)
    samples[:, 0, 2] = samples[:, 0].mean(dim=0).max() + 0.1  # one of the two does not vary
    samples[:, 1] = torch.linspace(0.1, 0.9, 7).double()  # nothing varies
    samples[:, 2, 3:5] = 1.0  # the likeliest are even
    one = torch.rand(30, 7, generator=generator, dtype=torch.float64)
    credits = torch.rand(30, 7, generator=generator)
    questions = Questions(torch.ones(30, 2).long(), torch.arange(30), credits.round(), credits, {})
    tested: list[tuple[int, ...]] = []

    def noted(drawn: Tensor, **settings: Any) -> Any:
        tested.append(tuple(drawn.shape))
        return p_values(drawn, **settings)

    monkeypatch.setattr(question_training, "p_values", noted)
    got = judged(Answered(one, samples), questions)
    assert tested == [(20, 30, 2)], "the test needs no other answer than the two likeliest"
    mean = samples.mean(dim=0)
    want = {
        "accuracy": credits.numpy()[range(30), one.numpy().argmax(axis=1)],
        "confidence": one.numpy().max(axis=1),
        "sampled_accuracy": credits.numpy()[range(30), mean.numpy().argmax(axis=1)],
        "sampled_confidence": mean.numpy().max(axis=1),
        "p": p_values(samples, link="sigmoid", equal_variance=False),
        "brier": ((mean - questions.targets) ** 2).mean(dim=1).numpy(),
        "information": predictive(samples, "sigmoid").mutual_information,
    }
    assert got._fields == tuple(want)
    for name, values in want.items():
        np.testing.assert_allclose(getattr(got, name), values, rtol=0, atol=1e-12, err_msg=name)


def test_soft_attention_without_dropout_is_certain_of_everything(data: QuestionData, given: Regions) -> None:
    still = model(data, given)
    for module in still.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    for attention in (each for each in still.modules() if hasattr(each, "dropout")):
        if isinstance(attention.dropout, float):
            attention.dropout = 0.0
    questions = encoded(data, data.test)
    found = answered(still, questions, Condition(), 1.0, samples=3)
    assert float(found.samples.std(dim=0).max()) < 1e-6, "but for the rounding of float32"
    got = measures(found, questions)
    assert got["PAvPU 0.05"] == pytest.approx(got["accuracy"])
    assert got["mutual information"] < 1e-9


# --- The recipe ---


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny recipe: scenes, encoder and network."""
    make = scenes.make
    monkeypatch.setattr(scenes, "make", lambda sizes: make(sizes, side=32))
    monkeypatch.setattr(bam_questions, "SIZES", (16, 2, 4))
    monkeypatch.setattr(regions, "SIZES", {"channels": (4, 6, 8, 10), "width": 12, "blocks": 1})
    sizes = {"width": 8, "heads": 2, "layers": 1, "flat": 4, "embedding": 4, "dropout": 0.1}
    monkeypatch.setitem(bam_questions.NETWORKS, scenes.NAME, sizes)
    plan = {"epochs": 1, "batch": 12, "learning_rate": 1e-3, "warmup": 0.05}
    monkeypatch.setitem(bam_questions.PLANS, scenes.NAME, plan)


def request(out: Path, seeds: int = 1, **options: Any) -> Request:
    values: dict[str, Any] = {name: option.default for name, option in TABLE_2.options.items()}
    dashed = {name.replace("_", "-"): value for name, value in options.items()}
    values |= {"encoder-epochs": 1, "epochs": 1, **dashed}
    return Request(out, None, None, seeds, "cpu", False, values, Console(file=io.StringIO()))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_rows_are_trained_measured_and_shared_by_both_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--rows", "Soft,question only", "--epochs", "1", "--encoder-epochs", "1"]
    result = reproduce.run("bam-table-2", None, 1, "cpu", extra=options)
    assert list(result["per_seed"]["0"]) == [SOFT, QUESTION_ONLY]
    numbers = result["per_seed"]["0"][SOFT]
    for condition in conditions_of("image"):
        assert 0 <= numbers[key_of(condition, "accuracy")] <= 100
        kinds = [numbers[key_of(condition, "accuracy", kind)] for kind in scenes.KINDS]
        assert np.mean(kinds) == pytest.approx(numbers[key_of(condition, "accuracy")])
    blind = result["per_seed"]["0"][QUESTION_ONLY]
    for measure in ("Brier", "mutual information"):
        assert blind[key_of("noise 4 sd", measure)] == blind[key_of(CLEAN, measure)], "sees no noise either"
        assert numbers[key_of("noise 4 sd", measure)] != numbers[key_of(CLEAN, measure)]
    titles = [table["title"] for table in result["tables"]]
    assert "scenes, clean" in titles
    assert "scenes, noise 4 sd" in titles
    assert any(note.startswith("FAILS") and "Soft at least 85 %" in note for note in result["notes"])
    folder = tmp_path / "runs/questions/scenes/rows/Soft/seed-0/model"
    assert isinstance(MCAN.load(folder), MCAN)
    assert isinstance(ImageEncoder.load(folder / "encoder"), ImageEncoder)
    # the other table reads the same runs
    trained: list[Any] = []
    monkeypatch.setattr(question_training, "train", lambda *given: trained.append(given))
    other = reproduce.run("bam-table-7", None, 1, "cpu", extra=options)
    assert trained == []
    assert other["per_seed"]["0"][SOFT] == numbers
    assert "accuracy, left-of, %" in other["tables"][0]["columns"]
    notes = " ".join(other["notes"])
    assert "its numbers under noise are those without" in notes
    assert "Other than in the paper: 1 + 1 layers of width 8 rather than 6 + 6 layers of width 512" in notes
    assert "3e-4" not in notes
    assert "learning rate 0.001 rather than 1e-4" in notes


@pytest.mark.usefixtures("small")
def test_rows_on_encoders_that_were_trained_separately_are_not_called_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(question_training, "step_times", lambda *_: [1.0])
    monkeypatch.setattr(bam_questions, "conditions_of", lambda _: {CLEAN: Condition()})
    first = bam_questions.run(request(tmp_path / "here", rows=SOFT))
    again = replace(request(tmp_path / "here", rows=f"{SOFT},{WC}"), stored=first.per_seed)
    assert "NOT PAIRED" not in " ".join(TABLE_2.report(bam_questions.run(again)).notes)
    learner = regions.learner  # on another machine, where the encoder turns out a little different
    monkeypatch.setattr(regions, "learner", lambda row, data, plan, seed: learner(row, data, plan, seed + 9))
    elsewhere = replace(request(tmp_path / "there", rows=f"{WC},{QUESTION_ONLY}"), stored=first.per_seed)
    outcome = bam_questions.run(elsewhere)
    assert list(outcome.per_seed[0]) == [SOFT, WC, QUESTION_ONLY]
    (note,) = [note for note in TABLE_2.report(outcome).notes if note.startswith("NOT PAIRED")]
    assert "rows of seed 0 read" in note
    outcome.per_seed[0].pop(WC)  # what sees no picture reads no regions
    assert "NOT PAIRED" not in " ".join(TABLE_2.report(outcome).notes)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_validation_tests_on_the_validation_part_with_the_same_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(question_training, "step_times", lambda *_: [1.0])
    out, trained = tmp_path / "out", []
    encode = regions.train_encoder

    def noted(task: Any, *rest: Any) -> dict[str, Any]:
        trained.append(task.seed)
        return encode(task, *rest)

    monkeypatch.setattr(regions, "train_encoder", noted)
    measured: list[list[str]] = []
    measure = question_training.measure

    def seen(net: Any, data: QuestionData, *rest: Any) -> dict[str, float]:
        measured.append(sorted({row.image for row in data.test}))
        return measure(net, data, *rest)

    monkeypatch.setattr(question_training, "measure", seen)
    plain = bam_questions.run(request(out, rows=SOFT))
    held = bam_questions.run(request(out, rows=SOFT, validation=True))
    assert measured == [[f"test-{n}" for n in range(4)], ["validation-0", "validation-1"]]
    assert trained == [0], "it sees the same training images"
    assert (out / "scenes/rows/Soft/seed-0/result.json").is_file(), "numbers of the test set are kept"
    assert (out / "scenes/rows-validation/Soft/seed-0/result.json").is_file()
    runs = [each.per_seed[0][SOFT]["run"]["settings"]["data"] for each in (plain, held)]
    assert runs[0] != runs[1], "so that neither is taken for the other"
    assert "6 for validation" in " ".join(TABLE_2.report(held).notes)


def stored(folder: Path, given: Regions) -> RegionSource:
    """Regions that are there already."""
    folder.mkdir()
    write_tensors(folder / regions.CACHE, given._asdict())
    return RegionSource(folder, False, None, {}, given.real.shape[1])


@pytest.mark.slow
def test_a_training_that_was_interrupted_goes_on_as_if_it_had_not_been(
    tmp_path: Path, data: QuestionData, given: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(question_training, "PAUSE", 0.0)  # else so short a training has no checkpoint
    source = stored(tmp_path / "regions", given)
    training, row = replace(TRAINING, updates=8), ROWS["WC k=10"]

    def weights(place: str, stop: int | None = None) -> Tensor:
        def told(step: int) -> None:
            if step == stop:
                raise KeyboardInterrupt

        net, _ = question_training.train(tmp_path / place, data, source, row, training, 0, "cpu", told)
        return torch.cat([x.flatten() for x in net.net.parameters()])

    with pytest.raises(KeyboardInterrupt):
        weights("stopped", 5)
    assert any((tmp_path / "stopped" / "checkpoints").iterdir())
    torch.testing.assert_close(weights("stopped"), weights("whole"), rtol=0, atol=0)


def test_an_encoder_that_goes_on_learning_makes_the_regions_that_are_stored(
    tmp_path: Path, data: QuestionData
) -> None:
    torch.manual_seed(0)
    encoder = ImageEncoder(3, (2, 3, 4, 5), 5, 1).eval()
    first = regions.encode(encoder, data.images)  # type: ignore[arg-type]
    whole = Regions(first, torch.ones(first.shape[:2], dtype=torch.bool))
    net = model(data, whole, encoder=encoder, pixels=data.images).train()
    assert not any(module.training for module in encoder.modules()), "norms keep their statistics"
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(torch.arange(6))["loss"].backward()
    optimizer.step()
    net.settle()
    question_training.save(net, tmp_path / "model", None, (32, 32))
    then = ImageEncoder.load(tmp_path / "model" / "encoder")
    assert torch.equal(regions.encode(then, data.images), net.features)  # type: ignore[arg-type]
    assert not torch.equal(net.features, first)


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_published_features_take_the_place_of_an_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bam_questions, "STRENGTHS", ())  # noise on 100 × 2048 features takes long
    folder, random = tmp_path / "features", np.random.default_rng(0)
    folder.mkdir()
    data, _ = bam_questions.data_of(request(tmp_path))
    for number, name in enumerate(data.image_names):
        np.savez(folder / f"{name}.npz", feat=random.normal(size=(3 + number % 2, 2048)))
    options = {"features": str(folder), "rows": "Soft", "encoder_epochs": None}
    outcome = bam_questions.run(request(tmp_path / "out", **options))
    assert outcome.config["training"]["network"].get("grid") is None, "boxes of a detector have no grid"
    model = tmp_path / "out/scenes/rows/Soft/seed-0/model"
    assert MCAN.load(model).regions.in_features == 2048
    with pytest.raises(ValueError, match="trained on --features sees no image"):
        open_answerer(model, "a")
    np.savez(folder / "train-0.npz", feat=random.normal(size=(3, 7)))
    with pytest.raises(ValueError, match="must have regions × 2048 features, got 3 × 7"):
        bam_questions.run(request(tmp_path / "other", **options))


BAD = [
    ({"dataset": "vqa"}, "--dataset must be one of 'scenes', 'daquar'"),
    ({"dataset": "daquar", "split": "random"}, "--split must be one of 'image', 'published'"),
    ({"split": "published"}, "--split is for --dataset daquar"),
    ({"noise": "loud"}, "--noise must be one of"),
    ({"rows": "WX"}, "--rows must be one of"),
    ({"dataset": "daquar"}, "DAQUAR"),
]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("options", "message"), BAD, ids=[message[:20] for _, message in BAD])
def test_bad_options_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], message: str
) -> None:
    monkeypatch.delenv("OVERT_DATA", raising=False)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        bam_questions.run(request(tmp_path, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "hugh"}, "--size must be one of"),
        ({"learning_rate": "x"}, "--learning-rate must be a positive"),
        ({"rows": "hugh"}, "--rows must be one of"),
    ],
)
def test_settings_of_the_network_are_refused_before_scenes_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(scenes, "make", lambda *_: pytest.fail("scenes were made"))
    with pytest.raises(ValueError, match=message):
        bam_questions.run(request(tmp_path, **options))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("seeds", "said"), [(None, False), (10, True), (5, False)])
def test_fewer_seeds_than_were_asked_for_are_mentioned_only_if_someone_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seeds: int | None,
    said: bool,
) -> None:
    def source_of(*_: Any) -> RegionSource:
        raise KeyboardInterrupt

    monkeypatch.setitem(bam_questions.SEEDS, scenes.NAME, 5)  # fewer than the recipe's, as DAQUAR has
    monkeypatch.setattr(regions, "source_of", source_of)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        reproduce.run("bam-table-2", None, seeds, "cpu", out=tmp_path)
    printed = capsys.readouterr().out
    assert "training questions" in printed
    assert ("scenes has 5 seeds, of the 10 that were asked for" in printed) == said


def test_long_estimates_are_in_hours_and_days() -> None:
    minutes = [0.4, 1.4, 2, 90, 119.4, 119.6, 1_980, 4_250, 4_320, 40_000]
    assert [duration(each) for each in minutes] == [
        "a minute or less", "a minute or less", "about 2 minutes", "about 90 minutes", "about 119 minutes",
        "about 2 hours", "about 33 hours", "about 71 hours", "about 3 days", "about 28 days",
    ]  # fmt: skip


def outcome(name: str, accuracies: dict[str, list[float]]) -> Outcome:
    run = {"date": "2026-01-01", "settings": {}, "hardware": "", "command": ""}
    per_seed: dict[int, dict[str, Any]] = {}
    for row, found in accuracies.items():
        for seed, value in enumerate(found):
            per_seed.setdefault(seed, {})[row] = {key_of(CLEAN, "accuracy"): value, "run": run}
    return Outcome({"data": {"name": name}}, per_seed)


def test_the_table_says_whether_pictures_decide() -> None:
    good = {SOFT: [90.0, 86.0], QUESTION_ONLY: [25.0, 24.0], SHUFFLED: [24.0, 26.0]}
    assert [each.holds for each in bam_questions.verdicts(outcome("scenes", good))] == [True] * 3
    assert bam_questions.unmet(outcome("scenes", good)) == []
    for row, value, place in ((SOFT, 70.0, 0), (QUESTION_ONLY, 41.0, 1), (SHUFFLED, 30.0, 2)):
        bad = bam_questions.verdicts(outcome("scenes", {**good, row: [value, value]}))
        assert not bad[place].holds
        assert bad[place].claim in bam_questions.unmet(outcome("scenes", {**good, row: [value, value]}))
    apart = {SOFT: [30.0, 31.0, 32.0], QUESTION_ONLY: [22.0, 23.5, 24.0], SHUFFLED: [21.0, 23.0, 22.0]}
    (note,) = bam_questions.verdict_notes(outcome("daquar", apart))
    assert note.startswith("Pictures add to what questions tell")
    same = {**apart, SHUFFLED: [30.5, 30.0, 33.0]}
    (note,) = bam_questions.verdict_notes(outcome("daquar", same))
    assert "the columns of noise mean nothing" in note
    assert bam_questions.unmet(outcome("daquar", same)) == [], "a finding, and no fault of the table"


def test_a_table_that_is_not_to_be_relied_on_fails_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = replace(
        reproduce.find("bam-table-8"),
        run=lambda _: Outcome({}, {0: {}}),
        report=lambda _: Report([Grid("a table", ["a"], [("row", ["1"])])], []),
        unmet=lambda _: ["Soft at least 85 %: 12"],
    )
    monkeypatch.setitem(reproduce.RECIPES, failing.name, failing)
    told = CliRunner().invoke(app, ["reproduce", failing.name, "--results", str(tmp_path)])
    assert str(told.exception) == "bam-table-8 is not to be relied on, as this fails: Soft at least 85 %: 12"
    assert json.loads((tmp_path / "bam-table-8.json").read_text())["unmet"] == ["Soft at least 85 %: 12"]


@pytest.mark.parametrize("row", ["LF", "LC"])
def test_lognormal_rows_at_the_published_settings_are_soft_attention(row: str) -> None:
    sizes: dict[str, Any] = {"features": 6, "width": 16, "heads": 2, "layers": 1, "flat": 8, "embedding": 8}
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {
        "words": torch.randint(9, (3, 5), generator=generator),
        "word_mask": torch.ones(3, 5, dtype=torch.bool),
        "regions": torch.randn(3, 4, 6, generator=generator),
        "labels": torch.rand(3, 4, generator=generator),
    }
    gradients = []
    for mechanisms in ([], ROWS[row].mechanisms(per_epoch=10)):
        torch.manual_seed(0)
        soft = MCAN(9, 4, (), reduction="mean", dropout=0.0, **sizes)
        net = MCAN(9, 4, mechanisms, reduction="mean", dropout=0.0, **sizes).train()
        net.load_state_dict(soft.state_dict(), strict=False)
        net.step.fill_(200)
        net(**given)["loss"].backward()
        named = dict(net.named_parameters())
        gradients.append([named[name].grad for name, _ in soft.named_parameters()])
        prior = [p.grad.abs().max() for name, p in named.items() if "prior" in name and p.grad is not None]
        assert all(float(each) < 1e-15 for each in prior)
    torch.testing.assert_close(gradients[0], gradients[1], atol=2e-6, rtol=1e-5)


def test_published_gains_stand_beside_measured_ones() -> None:
    both = outcome("scenes", {SOFT: [90.0, 91.0, 92.0], WC: [91.0, 91.5, 93.0]})
    grid = bam_questions.gains(both, "accuracy", CLEAN)
    ((name, cells),) = grid.rows
    assert name == "WC − Soft"
    assert cells[1] == "0.83"
    assert cells[-1] == "0.07"
    assert bam_questions.published_gains("PAvPU", "noise 1 sd")["published, VQA-v2"][WC] == 66.75
    assert TABLE_7.published["rows"][WC]["accuracy, noisy"][3] == 53.96


class Difference(NamedTuple):
    """A difference of random attention to soft attention, as a table shows it.

    Attributes:
        row: of the random attention.
        about: measure, images and kind of question.
        mean: of the difference.
        low: end of its interval.
        high: the other.
        holm: its p, corrected for its table.
        words: mean and interval, as texts quote them.
    """

    row: str
    about: str
    mean: float
    low: float
    high: float
    holm: float
    words: str

    @property
    def side(self) -> int:
        """Of zero, where its interval lies."""
        return (self.low > 0) - (self.high < 0)


def differences(name: str) -> list[Difference]:
    """All of a stored table."""
    stored = json.loads((RESULTS / f"{name}.json").read_text())
    tables = [table for table in stored["tables"] if table["title"].startswith("Differences")]
    found = []
    for table in tables:
        for row, (_, mean, interval, chance, *_) in table["rows"]:
            if not row.startswith((QUESTION_ONLY, SHUFFLED)):
                words = f"{mean} ({interval.replace(' … ', ' to ')}"
                numbers = [mean, *interval.split(" … "), chance.partition("(")[2].strip(")< ")]
                about = table["title"].partition(": ")[2]
                row = row.removesuffix(f" − {SOFT}")
                found.append(Difference(row, about, *(float(n.replace("−", "-")) for n in numbers), words))
    return found


def told(*parts: str) -> str:
    """What a text says, on one line, without the unit of the first difference that it quotes."""
    text = " ".join(ROOT.joinpath(*parts).read_text().split())
    return re.sub(r"(−?\d\.\d\d) (?:points )?(?:clean )?\(", r"\1 (", text)


def test_no_random_attention_is_said_to_differ_where_no_interval_does() -> None:
    guide, readme = told("docs", "pictures.md"), told("README.md")
    remark = told("results", "bam-table-2.remark.md")
    found = {(each.row, each.about): each for each in differences("bam-table-2")}
    assert (len(found), {each.side for each in found.values()}) == (80, {0})
    assert "No random attention differs detectably from soft attention in accuracy or PAvPU" in guide
    assert "no random attention differed detectably from it in accuracy or PAvPU" in readme
    assert all("all 80 intervals include zero" in text for text in (guide, readme, remark))
    alike = [found["LF", about][2:] == found["LC", about][2:] for _, about in found]
    assert all(alike)
    clean, noises = "accuracy, clean", [f"accuracy, noise {each} sd" for each in ("0.5", "1", "2", "4")]
    for row, about, texts in (
        ("LF", clean, (guide, remark)),
        (WC, noises[1], (guide, remark)),
        *((WC, noise, (remark,)) for noise in noises),
    ):
        assert all(found[row, about].words in text for text in texts)
    assert f"WC has {found[WC, clean].words}" in guide
    assert f"WC has {found[WC, clean].words}; published on VQA-v2 0.07)" in remark
    assert f"(Weibull weights with a contextual prior: {found[WC, clean].words[:5]} points" in readme
    assert found[WC, clean].words.partition("(")[2] in readme

    published = {row: numbers["accuracy, noisy"][0] for row, numbers in bam_questions.PUBLISHED.items()}
    gain = published[WC] - published[SOFT]
    share = gain / (100 - published[SOFT])
    assert f"under noise, {gain:.2f} points, lies above each of these intervals" in remark
    assert f"{100 * share:.1f} % of the errors" in guide
    assert f"{100 * share:.1f} %, which here would be" in remark
    assert all(gain > found[WC, noise].high for noise in noises)
    stored = json.loads((RESULTS / "bam-table-2.json").read_text())
    shown = {table["title"]: dict(table["rows"]) for table in stored["tables"]}
    soft = {about: shown[f"scenes, {about}"][SOFT][1] for about in ("clean", *(n[10:] for n in noises))}
    errors = {about: 100 - float(text.partition("±")[0]) for about, text in soft.items()}
    assert f"there are but {errors['clean']:.2f} to be had" in remark
    same = [share * errors[noise[10:]] for noise in noises]
    assert f"{', '.join(f'{each:.2f}' for each in same[:3])} and {same[3]:.2f} points" in remark
    assert [each > found[WC, noise].high for each, noise in zip(same, noises, strict=True)] == [False] * 3 + [
        True
    ]


def test_what_kinds_of_questions_show_is_told_as_it_was_measured() -> None:
    guide, remark = told("docs", "pictures.md"), told("results", "bam-table-7.remark.md")
    found = differences("bam-table-7")
    kinds = {
        side: [each.about.rpartition(", ")[2] for each in found if each.side == side] for side in (1, -1)
    }
    assert (len(found), kinds) == (240, {1: ["count"] * 11, -1: ["colour-of"] * 6})
    for text in (guide, remark):
        assert re.search(
            "17 (of 240 intervals )?exclude zero, where about twelve would by chance: eleven", text
        )
        assert re.search(
            "eleven (intervals are )?above( zero)?, all for counting, and six below, all for colours", text
        )
    above = Counter(each.row for each in found if each.side == 1)
    assert above == {"WC k=10": 5, WC: 4, "LF": 1, "LC": 1}
    named = "five are WC k=10's, four those of WC, .* two those of LF and LC, .* none is WC k=100's"
    assert re.search(named, remark)
    left = {(each.row, each.about): each for each in found if each.holm < 0.05}
    assert set(left) == {
        ("WC k=10", "accuracy, noise 0.5 sd, count"),
        ("WC k=10", "PAvPU 0.05, noise 2 sd, colour-of"),
        ("WC k=10", "PAvPU 0.05, noise 4 sd, colour-of"),
        ("WC k=100", "PAvPU 0.05, noise 2 sd, colour-of"),
    }
    assert "Four differences have p < 0.05 after Holm's correction within their tables" in remark
    assert all(each.words.replace(" (", " points, ") in remark for each in left.values())
    seeds = read_result(RESULTS / "bam-table-7.json")["per_seed"].values()
    rows = [row for row in ROWS if row not in (SOFT, QUESTION_ONLY, SHUFFLED)]
    keys = [
        key
        for key in next(iter(seeds))[SOFT]
        if key.count(" | ") == 2 and ("accuracy" in key or "0.05" in key)
    ]
    apart = np.array([[[each[row][key] - each[SOFT][key] for key in keys] for row in rows] for each in seeds])
    assert apart[0].size == 240
    varied = np.ptp(apart, axis=0) > 1e-9  # nothing is tested where all seeds agree
    least = stats.ttest_1samp(apart[:, varied], 0.0).pvalue.min() * apart[0].size  # the first step of Holm's
    assert f"none has (the smallest p is {least:.2f})" in remark
    assert least > 0.05


def test_the_guide_says_what_was_measured() -> None:
    guide = " ".join((ROOT / "docs" / "pictures.md").read_text().split())

    def tables(name: str) -> dict[str, dict[str, list[str]]]:
        stored = json.loads((RESULTS / f"{name}.json").read_text())
        return {table["title"]: dict(table["rows"]) for table in stored["tables"]}

    shown = tables("bam-table-2")["scenes, clean"]
    soft, blind, other = (shown[row][1].partition("±")[0] for row in (SOFT, QUESTION_ONLY, SHUFFLED))
    assert f"soft attention has {soft} % right" in guide
    assert f"question only {blind} % and shuffled images {other} %" in guide
    found = tables("bam-table-2-daquar")
    assert f"soft attention has {found['daquar, clean'][SOFT][1].partition('±')[0]} % right" in guide
    gains = found["Differences with the same seed: accuracy, clean"]
    remark = " ".join((RESULTS / "bam-table-2-daquar.remark.md").read_text().split())
    for row in (QUESTION_ONLY, SHUFFLED):
        _, mean, interval, *_ = gains[f"{row} − {SOFT}"]
        low, high = (float(end.replace("−", "-")) for end in interval.split(" … "))
        swapped = f"({-high:.2f} to {-low:.2f}".replace("-", "−")
        assert swapped in guide
        assert swapped in remark
        assert mean.removeprefix("−") in guide
    assert {cells[0] for cells in shown.values()} == {"10"}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"soft attention answered {soft} % correctly (ten seeds)" in readme
    _, mean, interval, *_ = gains[f"{WC} − {SOFT}"]
    assert f"{mean} points more than soft attention ({interval.replace(' … ', ' to ')};" in guide
    assert f"{mean} points more than soft attention ({interval.replace(' … ', ' to ')};" in remark
    leaking = tables("bam-table-2-daquar-published")["Differences with the same seed: accuracy, clean"]
    _, mean, interval, *_ = leaking[f"{QUESTION_ONLY} − {SOFT}"]
    low, high = (float(end.replace("−", "-")) for end in interval.split(" … "))
    assert f"{mean.removeprefix('−')} points more than question only ({-high:.2f} to {-low:.2f})" in guide
