"""Captions: batches, annealing by epoch, shuffled images, the recipe, METEOR afterwards, trained folders."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from overt._files import write_tensors
from overt.data.batching import swapped
from overt.data.captions import CaptionData
from overt.judge.captions import Meteor
from overt.mechanisms.bayesian.config import Bayesian
from overt.models.att2in import Att2in
from overt.models.image_encoder import ImageEncoder
from overt.models.word_by_word import IGNORED
from overt.recipes import bam_captions, caption_training, regions
from overt.recipes._recipe import Outcome
from overt.recipes._result_files import read_result, write_result
from overt.recipes.caption_training import CaptionRow, CaptionTraining, by_epoch, shuffled, texts_of
from small_captions import NETWORK, SIZES, recipes_in, small_scenes


@pytest.fixture(scope="module")
def data() -> CaptionData:
    return small_scenes().captions


# --- Parts ---


def test_a_batch_has_all_captions_of_its_images_and_no_needless_padding(data: CaptionData) -> None:
    texts = texts_of(data, "validation", 20)
    batch = texts.batch([2, 0])
    first = SIZES[0]
    assert batch["images"].tolist() == [first + 2] * 5 + [first] * 5
    said = [data.vocabulary.decode(row.clamp(min=0).tolist()) for row in batch["labels"]]
    assert said == [*data.validation[2].captions, *data.validation[0].captions]
    longest = max(len(text.split()) for text in said)
    assert batch["labels"].shape[1] == longest + 1  # and the end
    assert int((batch["labels"] == IGNORED).sum()) == sum(longest - len(text.split()) for text in said)


def test_batches_are_made_once_and_cannot_be_spoilt(data: CaptionData) -> None:
    texts = texts_of(data, "train", 20)
    batches = caption_training.Batches(texts, 10, seed=1)
    first = batches[0, 0]
    assert first["labels"] is batches[0, 0]["labels"]
    first.pop("labels")
    assert set(batches[0, 0]) == {"images", "labels", "examples"}
    numbers = [int(number) for place in range(len(batches)) for number in batches[place, 0]["examples"]]
    assert sorted(numbers) == list(range(5 * SIZES[0])), "every caption once in an epoch"


def test_all_rows_of_a_seed_start_from_the_same_weights(tmp_path: Path, data: CaptionData) -> None:
    features = torch.zeros(sum(SIZES), 4, 6)
    write_tensors(
        tmp_path / regions.CACHE,
        {"features": features.half(), "real": torch.ones(features.shape[:2], dtype=torch.bool)},
    )
    shared = caption_training.shared_of(data, regions.RegionSource(tmp_path, False, None, {}, 4))
    states = {}
    for name, row in bam_captions.ROWS.items():
        small = CaptionRow(row.attention, row.mechanisms, row.shuffled, {**row.arguments, **NETWORK})
        states[name] = caption_training.model_of(small, shared, CaptionTraining(1), 2).net.state_dict()
    for name, state in states.items():
        both = state.keys() & states["soft"].keys()
        assert len(both) >= len(states["language only"])
        assert all(torch.equal(state[key], states["soft"][key]) for key in both), name


def test_the_seed_of_a_training_is_that_of_its_noise(data: CaptionData) -> None:
    torch.manual_seed(0)
    features = torch.randn(sum(SIZES), 4, 6)
    regions_of = regions.Regions(features, torch.ones(features.shape[:2], dtype=torch.bool))
    net = Att2in(len(data.vocabulary), 6, mechanisms=[bam_captions.WC], dropout=0.0, **NETWORK)
    batch = texts_of(data, "train", 20).batch([0, 3])
    models = [caption_training.Captioner(net, regions_of, seed=seed) for seed in (0, 1, 1)]
    losses = [model(**batch)["loss"].item() for model in models]
    assert losses[0] != losses[1] == losses[2]


def test_the_kl_is_annealed_by_epochs() -> None:
    (mechanism,) = by_epoch([Bayesian.paper("WC", rho=2.0)], per_epoch=120)
    assert isinstance(mechanism, Bayesian)
    for epoch in (0, 1, 3):
        expected = torch.sigmoid(torch.tensor(2.0 * epoch))
        torch.testing.assert_close(mechanism.annealing(torch.tensor(120 * epoch)), expected)


def test_shuffled_images_are_others_of_the_same_part(data: CaptionData) -> None:
    for count in (2, 3, 50):
        other = swapped(count, 1)
        assert sorted(other.tolist()) == list(range(count))
        assert not bool((other == torch.arange(count)).any())
    other, first, second = shuffled(data, 0), SIZES[0], SIZES[0] + SIZES[1]
    assert bool((other[:first] < first).all())
    assert bool(((other[first:second] >= first) & (other[first:second] < second)).all())
    with pytest.raises(ValueError, match="if there are two at least, got 1"):
        swapped(1, 0)


# --- The recipe ---


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> Any:
    patch.setattr(bam_captions.judge, "meteor", lambda *_: Meteor(None, "METEOR needs Java"))
    return recipes_in(tmp_path_factory.mktemp("captions"), patch)


@pytest.fixture(scope="module")
def result(recipe: Any) -> dict[str, Any]:
    found: dict[str, Any] = recipe("bam-table-3", "--rows", "soft,BAM-WC,language only,shuffled images")
    return found


def test_tables_have_both_searches_floors_a_ceiling_and_published_numbers(result: dict[str, Any]) -> None:
    tables = {table["title"]: dict(table["rows"]) for table in result["tables"]}
    searches = [rows for title, rows in tables.items() if "search" in title]
    assert len(searches) == 2
    for rows in searches:
        assert {"soft", "language only", "human, against the others", "random caption"} <= rows.keys()
        assert any(name.startswith("always “") for name in rows)
        assert rows["soft"][7] == "–"  # METEOR
    assert searches[0]["BAM-WC, published (COCO)"][1:8] == [
        "32.8", "44.1", "58.8", "75.3", "104.5", "54.9", "26.2",
    ]  # fmt: skip
    published = {"CIDEr-D": "0.50", "BLEU-4": "0.60", "ROUGE-L": "0.20"}
    for measure, gain in published.items():
        assert tables[f"Differences with the same seed, {measure}"]["BAM-WC − soft"][-1] == gain
    for name in ("CIDEr-D with 5 beams", "perplexity of people's captions (lower is better)"):
        assert set(tables[f"Differences with the same seed, {name}"]) == {"BAM-WC − soft"}
    assert set(tables["What is lost without the pictures"]) == {
        "language only − soft", "shuffled images − soft",
    }  # fmt: skip
    notes = " ".join(result["notes"])
    assert "METEOR needs Java" in notes
    assert "5 comparisons with soft attention in 5 tables." in notes
    numbers = result["per_seed"]["0"]
    assert numbers["BAM-WC"]["parameters"] > numbers["soft"]["parameters"]
    assert numbers["language only"]["parameters"] < numbers["soft"]["parameters"]


@pytest.fixture
def copied(result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The stored result, in a copy of its folder and of its runs, which is the current one."""
    del result  # which wrote it
    shutil.copytree(".", tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    stored = read_result(Path("results/bam-table-3.json"))
    assert stored is not None
    return stored


def test_meteor_is_added_later_without_training(
    recipe: Any, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caption_training, "train", None)
    monkeypatch.setattr(bam_captions.judge, "meteor", lambda said, _: Meteor(float(len(said))))
    again = recipe("bam-table-3", "--rows", "soft,BAM-WC,language only,shuffled images")
    assert again["per_seed"]["0"]["soft"]["greedy_meteor"] == SIZES[2]
    assert (
        again["per_seed"]["0"]["soft"]["greedy_cider_d"] == result["per_seed"]["0"]["soft"]["greedy_cider_d"]
    )
    stored = json.loads(Path("runs/scenes/soft/seed-0/result.json").read_text())
    assert stored["beam_5_meteor"] == SIZES[2]
    assert again["config"]["floors"]["random caption"]["meteor"] == SIZES[2]


def test_meteor_that_an_interrupted_command_found_is_not_looked_for_again(
    recipe: Any, result: dict[str, Any], copied: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert copied["per_seed"].keys() == result["per_seed"].keys()
    for rows in copied["per_seed"].values():
        for row in rows.values():
            row["greedy_meteor"] = row["beam_5_meteor"] = None
    write_result(Path("results/bam-table-3.json"), copied)
    for folder in Path("runs/scenes").glob("*/seed-0"):
        if folder.parent.name != "encoder":
            found = json.loads((folder / "result.json").read_text())
            found |= {"greedy_meteor": 12.5, "beam_5_meteor": 13.5}
            (folder / "result.json").write_text(json.dumps(found))
    scored = list[int]()
    monkeypatch.setattr(
        bam_captions.judge, "meteor", lambda said, _: scored.append(len(said)) or Meteor(float(len(said)))
    )
    again = recipe("bam-table-3", "--rows", "soft,BAM-WC,language only,shuffled images", "--meteor")
    assert {numbers["greedy_meteor"] for numbers in again["per_seed"]["0"].values()} == {12.5}
    assert {numbers["beam_5_meteor"] for numbers in again["per_seed"]["0"].values()} == {13.5}
    assert len(scored) == 3  # the floors and the ceiling


def test_meteor_is_added_where_the_runs_could_not_have_been_trained(
    recipe: Any, result: dict[str, Any], copied: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows in copied["per_seed"].values():
        for row in rows.values():
            row |= {"greedy_meteor": None, "beam_5_meteor": None}
            row["run"]["settings"]["precision"] = "tf32"  # of a GPU
    for path in Path("runs/scenes").glob("*/seed-0/settings.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "precision": "tf32"}))
        run = json.loads(path.with_name("result.json").read_text())
        run["run"]["settings"]["precision"] = "tf32"
        run |= {"greedy_meteor": None, "beam_5_meteor": None}
        path.with_name("result.json").write_text(json.dumps(run))
    Path("results/bam-table-3.json").write_text(json.dumps(copied))
    monkeypatch.setattr(caption_training, "train", None)
    monkeypatch.setattr(bam_captions.judge, "meteor", lambda said, _: Meteor(7.0 + len(said)))
    again = recipe("bam-table-3", "--meteor")
    assert list(again["per_seed"]["0"]) == list(result["per_seed"]["0"])
    for name, row in again["per_seed"]["0"].items():
        assert row["greedy_meteor"] == row["beam_5_meteor"] == 7.0 + SIZES[2], name
        assert row["run"]["settings"]["precision"] == "tf32"
    assert again["config"] | {"floors": 0, "meteor": 0} == result["config"] | {"floors": 0, "meteor": 0}
    assert again["commands"] == copied["commands"]
    Path("results/bam-table-3.json").unlink()
    with pytest.raises(ValueError, match="--meteor adds to a stored result, and there is none"):
        recipe("bam-table-3", "--meteor")


def test_a_trained_folder_writes_of_an_image_what_the_table_scored(
    result: dict[str, Any], data: CaptionData
) -> None:
    assert result["config"]["data"]["name"] == "scenes"
    folder = Path("runs/scenes/BAM-WC/seed-0")
    model = caption_training.load(folder / "model")
    stored = json.loads((folder / "captions.json").read_text())
    assert stored["images"] == [row.image for row in data.test]
    _, pixels = data.part("test")
    assert pixels is not None
    assert model.side == pixels.shape[-1]
    for name, beam in caption_training.SEARCHES.items():
        words, _ = model.net.caption(
            model.regions(pixels[1]), beam=beam, max_length=21, never=[model.vocabulary.unknown]
        )
        assert model.vocabulary.decode(words[0].tolist()) == stored[name][1]


def test_the_encoder_goes_on_learning_only_where_it_is_asked_to(recipe: Any, result: dict[str, Any]) -> None:
    del result
    first = regions.open_encoder(Path("runs/scenes/encoder/seed-0/model"))
    same = regions.open_encoder(Path("runs/scenes/soft/seed-0/model/encoder"))
    for one, other in zip(first.state_dict().values(), same.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    recipe("bam-table-3", "--rows", "soft", "--finetune", fresh=True)
    changed = regions.open_encoder(Path("runs/scenes/soft/seed-0/model/encoder"))
    assert isinstance(first, ImageEncoder)
    assert isinstance(changed, ImageEncoder)
    assert not torch.equal(first.stem[0].weight, changed.stem[0].weight)
    assert torch.equal(first.stem[1].running_mean, changed.stem[1].running_mean)


def test_an_interrupted_training_ends_as_an_uninterrupted_one(
    tmp_path: Path, data: CaptionData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caption_training, "PAUSE", 0.0)  # else so short a training has no checkpoint
    source = regions.RegionSource(tmp_path / "regions", False, None, {}, 0)
    source.place.mkdir()
    features = torch.randn(sum(SIZES), 4, 6, generator=torch.Generator().manual_seed(0))
    write_tensors(
        source.place / regions.CACHE,
        {"features": features.half(), "real": torch.ones(sum(SIZES), 4, dtype=torch.bool)},
    )
    shared = caption_training.shared_of(data, source)
    row = CaptionRow(mechanisms=(bam_captions.WC,), arguments=NETWORK)
    training = CaptionTraining(updates=4, batch=8)

    def stop(update: int) -> None:
        if update == 3:
            raise KeyboardInterrupt

    whole, _ = caption_training.train(tmp_path / "whole", shared, row, training, 0, "cpu")
    with pytest.raises(KeyboardInterrupt):
        caption_training.train(tmp_path / "parts", shared, row, training, 0, "cpu", stop)
    assert any((tmp_path / "parts" / "checkpoints").iterdir())
    parts, numbers = caption_training.train(tmp_path / "parts", shared, row, training, 0, "cpu")
    assert numbers["updates"] == 4
    for name, value in whole.net.state_dict().items():
        torch.testing.assert_close(parts.net.state_dict()[name], value, rtol=0, atol=0)


def outcome(soft: list[float], wrong: list[float]) -> Outcome:
    rows = zip(soft, wrong, strict=True)
    per_seed = {
        seed: {"soft": {"greedy_cider_d": one}, "shuffled images": {"greedy_cider_d": other}}
        for seed, (one, other) in enumerate(rows)
    }
    return Outcome({}, per_seed)


def test_the_report_says_whether_the_pictures_matter() -> None:
    matter = bam_captions.note_on_pictures(outcome([30.0, 31.0, 32.0], [5.0, 5.5, 6.5]))
    assert matter.endswith("the pictures matter.")
    not_clear = bam_captions.note_on_pictures(outcome([30.0, 31.0, 32.0], [20.0, 40.0, 30.0]))
    assert "this table measures language alone" in not_clear
    worse = bam_captions.note_on_pictures(outcome([1.0, 2.0, 3.0], [5.0, 6.5, 7.0]))
    assert "−4.17 points, 3 seeds" in worse
    assert "this table measures language alone" in worse
    for few in (outcome([30.0], [5.0]), outcome([30.0, 31.0], [5.0, 6.0]), outcome([1.0], [5.0])):
        note = bam_captions.note_on_pictures(few)
        assert note.endswith("Whether the pictures matter takes 3 seeds at least.")
        assert "alone" not in note
    assert "not known" in bam_captions.note_on_pictures(Outcome({}, {0: {"soft": {"greedy_cider_d": 1.0}}}))


# --- Bad input ---


def test_bad_folders_are_refused_by_name(tmp_path: Path, recipe: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"give a folder that Att2in\.save wrote"):
        caption_training.load(tmp_path)
    ImageEncoder(3, channels=(4, 4, 4, 4), width=4, blocks=1).save(tmp_path / "encoder")
    with pytest.raises(
        ValueError, match=r"model_type of .* must be 'overt-att2in', got 'overt-image-encoder'"
    ):
        caption_training.load(tmp_path / "encoder")
    Att2in(5, 4, hidden=4, embedding=4, score=4).save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no vocabulary\.json"):
        caption_training.load(tmp_path)
    path = tmp_path / "vocabulary.json"
    path.write_text('{"words": ["a"], "length": 3, "side": 32, "name": "x"}')
    with pytest.raises(ValueError, match=r"it has 3 ids, the network 5"):
        caption_training.load(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is it complete"):
        caption_training.load(tmp_path)
    path.write_text('{"words": ["a", "b", "c"], "length": 3, "side": null, "name": "x"}')
    with pytest.raises(ValueError, match=r"cannot read image files.* trained on given features, or"):
        caption_training.load(tmp_path)
    with pytest.raises(
        ValueError, match="--dataset must be one of 'flickr8k', 'coco', 'scenes'; got 'imagenet'"
    ):
        recipe("bam-table-3", "--dataset", "imagenet")


def test_the_guide_quotes_the_table_as_it_was_measured() -> None:
    root = Path(__file__).parents[1]
    tables = {
        table["title"]: table
        for table in json.loads((root / "results" / "bam-table-3.json").read_text())["tables"]
    }
    guide = (root / "docs" / "pictures.md").read_text()
    quoted = guide[guide.index("| row | CIDEr-D |") :].split("\n\n")[0].splitlines()
    headings, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in (quoted[0], *quoted[2:])
    )
    table = tables["Greedy search, flickr8k"]
    measured = dict(table["rows"])
    for name, *cells in lines:
        wanted = [measured[name][table["columns"].index(heading)] or "–" for heading in headings[1:]]
        assert cells == wanted, name
    assert {"soft", "hard", "BAM-LC", "BAM-WC", "no KL"} <= {name for name, *_ in lines}
    readme = (root / "README.md").read_text()
    for text, title, row in (
        (guide, "CIDEr-D", "BAM-WC"),
        (guide, "CIDEr-D", "BAM-LC"),
        (guide, "CIDEr-D", "hard"),
        (readme, "CIDEr-D", "BAM-WC"),
        (guide, "perplexity of people's captions (lower is better)", "BAM-WC"),
        (guide, "perplexity of people's captions (lower is better)", "hard"),
        (readme, "perplexity of people's captions (lower is better)", "BAM-WC"),
    ):
        _, mean, interval, *_ = dict(tables[f"Differences with the same seed, {title}"]["rows"])[
            f"{row} − soft"
        ]
        low, high = interval.split(" … ")
        words = " ".join(text.split())
        assert (
            f"{mean} ({low} to {high}" in words
            or f"{mean} points, {low} to {high}" in words
            or (f"{mean}, {low} to {high}" in words)
        ), (title, row)


def test_trainings_that_30_epochs_cut_short_are_counted_as_they_are() -> None:
    root = Path(__file__).parents[1]
    stored = read_result(root / "results" / "bam-table-3.json")
    assert stored is not None
    patience = stored["config"]["training"]["patience"]
    cut = Counter(
        name
        for rows in stored["per_seed"].values()
        for name, row in rows.items()
        if row["epochs"] == 30 and row["best_epoch"] > 30 - patience
    )
    assert cut == {"language only": 5, "shuffled images": 3, "hard": 3, "BAM-WC": 1}
    guide, remark = (
        " ".join((root / place).read_text().split())
        for place in ("docs/pictures.md", "results/bam-table-3.remark.md")
    )
    assert (
        "language only with all five seeds, shuffled images and hard attention with three, BAM-WC with one"
        in guide
    )
    told = (
        "Language only with all five seeds, shuffled images and hard attention with three and BAM-WC with one"
    )
    assert told in remark
