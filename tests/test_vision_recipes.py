"""Images: their readers and generated stand-in, crops, batches, and the recipes that train on them."""

from __future__ import annotations

import gc
import io
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from fresh import start_pair
from overt.cli import app
from overt.data import cifar100, image_folders, relations
from overt.data.batching import Epochs
from overt.data.image_folders import ImageFiles, ImageFolders
from overt.data.images import Images
from overt.data.pictures import opened
from overt.recipes import ea_vision, reproduce, vision_training
from overt.recipes._result_files import read_result
from overt.recipes._runs import earlier_result
from overt.recipes._training import DivergedError
from overt.recipes.vision_training import (
    Batches,
    ImageRow,
    ImageTraining,
    accuracies,
    augmented,
)
from small_vision import TINY, recipes_in, small_images, with_group_norms

# --- Data ---


def jpeg(colour: tuple[int, int, int], side: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(file, "JPEG", quality=95)
    return file.getvalue()


def write(path: Path, pictures: list[bytes], labels: list[int]) -> None:
    offsets = np.cumsum([0, *map(len, pictures)])
    blob = np.frombuffer(b"".join(pictures), np.uint8)
    np.savez(path, jpeg=blob, offsets=offsets, labels=np.array(labels, np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "cifar100"
    place.mkdir()
    red, blue = jpeg((250, 0, 0)), jpeg((0, 0, 250))
    write(place / "train_jpeg95.npz", [red, blue] * 10, [0, 1] * 10)
    write(place / "test_jpeg95.npz", [blue, red], [1, 0])
    (place / "classes.json").write_text('["red", "blue"]')
    return tmp_path


def test_images_of_an_npz_file_are_what_was_written(folder: Path) -> None:
    data = cifar100.load(folder)
    assert data.train.shape == (20, 3, 8, 8)
    assert data.classes == ["red", "blue"]
    assert data.remark == "JPEG q95"
    for picture, label in zip(data.train, data.train_labels, strict=True):
        assert int(picture.float().mean(dim=(1, 2)).argmax()) == (0 if label == 0 else 2)
    assert data.test_labels.tolist() == [1, 0]
    assert cifar100.load(folder / "cifar100").sha256 == data.sha256


def test_validation_takes_the_same_share_of_each_class_from_the_training_set(folder: Path) -> None:
    data = cifar100.load(folder)
    part = data.for_validation(0.2)
    assert part.test_labels.bincount().tolist() == [2, 2]
    assert part.train_labels.bincount().tolist() == [8, 8]
    assert part.sha256 != data.sha256
    assert "20% of the training set for testing" in str(part.remark)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda place: (place / "test_jpeg95.npz").unlink(), r"has no CIFAR-100: put train, test, meta or"),
        (
            lambda place: np.savez(place / "train_jpeg95.npz", jpeg=np.zeros(3)),
            "with jpeg, offsets and labels",
        ),
        (lambda place: write(place / "train_jpeg95.npz", [b"no image"], [0]), "image 0 of .* cannot be read"),
        (
            lambda place: write(place / "train_jpeg95.npz", [jpeg((0, 0, 0)), jpeg((0, 0, 0), 9)], [0, 1]),
            "must have images of one size",
        ),
        (
            lambda place: write(place / "train_jpeg95.npz", [jpeg((0, 0, 0))], [7]),
            "names 2 classes, and labels",
        ),
        (
            lambda place: write(place / "train_jpeg95.npz", [jpeg((0, 0, 0))], [0, 1]),
            "2 labels, but offsets of 1",
        ),
    ],
)
def test_files_that_do_not_fit_are_named(folder: Path, spoil: Any, message: str) -> None:
    spoil(folder / "cifar100")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        cifar100.load(folder)


def test_a_generated_images_class_is_the_difference_of_its_two_marks() -> None:
    data = relations.images(40, 10, side=14)
    assert data.train.shape == (40, 3, 14, 14)
    shapes = relations.MARKS - relations.MARKS.mean(dim=(1, 2), keepdim=True)
    for picture, label in zip(data.train, data.train_labels, strict=True):
        grey = picture.float().mean(dim=0)
        found = []
        for corner in (grey[:7, :7], grey[7:, 7:]):
            fit = torch.nn.functional.conv2d(corner[None, None], shapes[:, None])
            found.append(int(fit.flatten(1)[0].argmax()) // fit.shape[-1] ** 2)
        assert (found[0] - found[1]) % relations.CLASSES == label
    with pytest.raises(ValueError, match="side must be at least 12, got 8"):
        relations.images(4, 4, side=8)


# --- Training ---


def test_crops_are_windows_of_padded_images_and_half_of_them_are_mirrored() -> None:
    torch.manual_seed(0)
    source = torch.randint(1, 255, (64, 3, 5, 6), dtype=torch.uint8)
    mirrored = 0
    for before, after in zip(source, augmented(source, 2, True), strict=True):
        padded = torch.nn.functional.pad(before, (2, 2, 2, 2))
        windows = {
            (flip, row, column): (wide.flip(2) if flip else wide)
            for flip in (False, True)
            for row in range(5)
            for column in range(5)
            for wide in [padded[:, row : row + 5, column : column + 6]]
        }
        match = [place for place, window in windows.items() if torch.equal(window, after)]
        assert match
        mirrored += match[0][0]
    assert 16 < mirrored < 48
    assert torch.equal(augmented(source, 0, False), source)


def test_an_epoch_has_every_image_once_but_for_the_rest_and_seeds_differ() -> None:
    batches = Epochs(23, 5, 8, seed=1)
    assert (len(batches), batches.per_epoch) == (8, 4)
    first, second = (torch.cat([batches[4 * epoch + n] for n in range(4)]) for epoch in (0, 1))
    assert len(first.unique()) == len(second.unique()) == 20
    assert not torch.equal(first, second)
    assert not torch.equal(batches[0], Epochs(23, 5, 8, seed=2)[0])


def test_accuracies_count_the_five_best() -> None:
    scores = torch.eye(8) + torch.linspace(0, 0.1, 8)
    assert accuracies(scores, torch.arange(8)) == {"top1": 100.0, "top5": 100.0}
    assert accuracies(scores, torch.full((8,), 0)) == {"top1": 12.5, "top5": 12.5}


def test_norms_and_biases_are_not_decayed() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1))
    groups = vision_training.optimizer_of(model, ImageTraining(1, 0)).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 5e-4), (3, 0.0)]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return recipes_in(tmp_path, monkeypatch)


@pytest.mark.slow
def test_rows_are_trained_and_shared_between_tables(recipe: Any) -> None:
    first = recipe(rows="ResNet-34,AA-ResNet-34,Bayesian AA-ResNet-34", epochs="1")
    rows = first["per_seed"]["0"]
    assert set(rows) == {"ResNet-34", "AA-ResNet-34", "Bayesian AA-ResNet-34"}
    for numbers in rows.values():
        assert 0.0 <= numbers["top1"] <= numbers["top5"] <= 100.0
        assert numbers["nll"] > 0.0
        assert numbers["run"]["settings"]["row"]["sizes"] == TINY
    assert "top1_of_mean_weights" in rows["Bayesian AA-ResNet-34"]
    assert first["tables"][0]["title"] == "Measured, relations"
    second = recipe("ea-table-2", rows="AA-ResNet-34,w/o skip", epochs="1")
    shared = second["per_seed"]["0"]["AA-ResNet-34"]
    assert shared["run"] == rows["AA-ResNet-34"]["run"]
    assert dict(second["tables"][1]["rows"])["w/o skip − AA-ResNet-34"][0] == "1"
    weights = list(Path("runs").rglob("*.safetensors"))
    assert len(weights) == 4
    assert not list(Path("runs").rglob("checkpoint*"))
    json.dumps(second)


def test_a_training_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    data, row = small_images(), ImageRow("resnet-34", sizes=TINY)
    training = ImageTraining(8, 2, batch=8, learning_rate=0.1, crop=2)

    class CutError(Exception):
        pass

    def told(update: int) -> None:
        if update == 5:
            raise CutError

    def weights(place: str) -> Tensor:
        model, numbers = vision_training.train(tmp_path / place, data, row, training, 0, "cpu")
        assert numbers["updates"] == 8
        return torch.cat([parameter.detach().flatten() for parameter in model.net.parameters()])

    want = weights("whole")
    with pytest.raises(CutError):
        vision_training.train(tmp_path / "cut", data, row, training, 0, "cpu", told)
    torch.testing.assert_close(weights("cut"), want, rtol=1e-5, atol=1e-6)


def test_several_processes_share_every_batch_equally() -> None:
    whole, parts = Epochs(23, 6, 5, seed=1), Epochs(23, 6, 5, seed=1, processes=3)
    assert len(parts) == 15
    for update in range(5):
        shares = [parts[3 * update + part].tolist() for part in range(3)]
        assert [len(share) for share in shares] == [2, 2, 2]
        assert sorted(number for share in shares for number in share) == sorted(whole[update].tolist())
    with pytest.raises(ValueError, match="batch of 6 examples cannot be shared equally among 4 processes"):
        Epochs(23, 6, 5, seed=1, processes=4)


# With group norms, which see one image at a time, two processes must do what one does.
TWO = """
import os
from pathlib import Path
import torch
torch.set_num_threads(1)
from safetensors.torch import save_file
from overt.data import relations
from overt.data.pictures import opened
from overt.recipes import ea_vision, reproduce, vision_training
from overt.recipes._result_files import read_result
from overt.recipes._runs import earlier_result
import small_vision as here

os.chdir({place!r})
rank, train = os.environ["RANK"], vision_training.train
save_file(here.with_group_norms(Path("group")), f"group-{{rank}}.safetensors")

def noting(*arguments):
    model, numbers = train(*arguments)
    save_file(here.parameters(model), f"batch-{{rank}}.safetensors")
    return model, numbers

vision_training.train, relations.images, ea_vision.SMALL = noting, here.small_images, here.TINY
options = ["--rows", "EA-AA-ResNet-34", "--epochs", "2"]
reproduce.run("ea-table-1", None, 1, "cpu", None, Path("runs"), Path("results"), False, options)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_train_one_network_and_write_one_result(tmp_path: Path) -> None:
    for process in start_pair(TWO.format(place=str(tmp_path))):
        assert not (failed := process.ended()), failed
    trained = {
        name: [load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in (0, 1)]
        for name in ("group", "batch")
    }
    for first, second in trained.values():
        assert all(torch.equal(first[name], second[name]) for name in first)
    one = with_group_norms(tmp_path / "one")
    for name, value in one.items():
        torch.testing.assert_close(trained["group"][0][name], value, rtol=1e-3, atol=1e-5, msg=name)
    saved = [path.name for path in tmp_path.rglob("*.json") if path.parent.name == "results"]
    assert saved == ["ea-table-1.json"]
    result = read_result(tmp_path / "results" / "ea-table-1.json")
    assert result is not None
    numbers = result["per_seed"]["0"]["EA-AA-ResNet-34"]
    assert numbers["run"]["settings"]["processes"] == 2
    assert numbers["updates"] == 2
    assert "2 processes shared each batch" in str(result["notes"])


# --- Images in folders ---


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes of images in data/pets, whose networks are small."""
    monkeypatch.setattr(image_folders, "SIDE", 32)
    for row in ("ResNet-34", "EA-AA-ResNet-50"):
        monkeypatch.setitem(ea_vision.ROWS, row, replace(ea_vision.ROWS[row], sizes=TINY))
    place = tmp_path / "data" / "pets"
    for split, count in (("train", 4), ("val", 2)):
        for red, name in ((0, "cat"), (250, "dog")):
            (place / split / name).mkdir(parents=True)
            for number in range(count):
                (place / split / name / f"{number}.jpg").write_bytes(jpeg((red, 0, 0), 40))
    return place


def in_folder(out: str, *options: str) -> Any:
    options = "--dataset", "pets", "--rows", "ResNet-34,EA-AA-ResNet-50", "--epochs", "2", *options
    return reproduce.run(
        "ea-table-1", Path("data"), 1, "cpu", None, Path(out), Path("results"), False, options
    )


@pytest.mark.slow
def test_networks_are_trained_on_images_in_folders(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pictures.parent.parent)
    monkeypatch.setattr(vision_training, "loaders", lambda _: 0)
    (pictures / "train" / "cat" / "0.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"^data/pets/train/cat/0.jpg cannot be read .*: --skip-broken"):
        in_folder("first")
    whole = (pictures / "val" / "dog" / "0.jpg").read_bytes()
    (pictures / "val" / "dog" / "0.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"^data/pets/val/dog/0.jpg cannot be read .*: --skip-broken"):
        in_folder("second")
    assert not Path("second").exists(), "before anything is trained"
    (pictures / "val" / "dog" / "0.jpg").write_bytes(whole)
    result = in_folder("runs", "--skip-broken")
    assert result["config"]["data"] | {"sha256": ""} == {
        "name": "pets", "train": 7, "test": 4, "classes": 2, "size": [3, 32, 32], "mirrored": True,
        "remark": "1 broken file skipped", "sha256": "", "skipped": 1,
    }  # fmt: skip
    assert set(result["per_seed"]["0"]) == {"ResNet-34", "EA-AA-ResNet-50"}
    assert "--dataset pets" in result["commands"][0]
    assert "--skip-broken" in result["commands"][0]
    assert "momentum 0.9, learning rate 0.128" in str(result["notes"])
    [weights] = (Path("runs") / "pets" / "EA-AA-ResNet-50").rglob("*.safetensors")
    assert load_file(weights)["conv1.weight"].shape[-1] == 7, "ImageNet's stem"
    assert Path("results/ea-table-1-pets.json").exists()
    noted = json.loads(next((Path("runs") / "pets").glob("broken-*.json")).read_text())
    assert list(noted) == ["train/cat/0.jpg"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_files_that_break_later_are_named_in_one_line_by_the_loaders(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Loaders of a training that failed end when they next look up, by default after 5 seconds.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(vision_training, "loaders", lambda _: 1)
    data, row = image_folders.load(pictures), ea_vision.ROWS["ResNet-34"]
    training = ImageTraining(3, 1, batch=4, learning_rate=0.01, drops=(2,))
    model, numbers = vision_training.train(tmp_path / "whole", data, row, training, 0, "cpu")
    assert numbers["updates"] == 3
    assert vision_training.logits_of(model, data.test).shape == (4, 2)
    (pictures / "val" / "dog" / "1.jpg").unlink()
    with pytest.raises(ValueError, match=rf"^{pictures}/val/dog/1.jpg cannot be read: No such file"):
        vision_training.logits_of(model, data.test)
    (pictures / "train" / "dog" / "2.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"^{pictures}/train/dog/2.jpg cannot be read as an image: --skip"):
        vision_training.train(tmp_path / "broken", data, row, training, 0, "cpu")
    gc.collect()


def test_crops_depend_on_seed_update_and_image_and_on_nothing_else(pictures: Path) -> None:
    rng = np.random.default_rng(0)
    for path in pictures.rglob("*.jpg"):
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8)).save(path)
    data = image_folders.load(pictures, 16)

    def crops(seed: int, processes: int) -> dict[tuple[int, int], Tensor]:
        batches = Batches(data, Epochs(8, 4, 4, seed, processes))
        return {
            (index // processes, number): crop
            for index in range(len(batches))
            for number, crop in zip(batches[index]["numbers"].tolist(), batches[index]["crops"], strict=True)
        }

    one, two, other = crops(0, 1), crops(0, 2), crops(1, 1)
    assert len(one) == 16
    assert all(torch.equal(one[place], two[place]) for place in one)
    assert not any(torch.equal(one[place], other[place]) for place in set(one) & set(other))
    assert not torch.equal(one[0, int(Epochs(8, 4, 4, 0)[0][0])], data.train[int(Epochs(8, 4, 4, 0)[0][0])])


def test_images_in_folders_are_trained_on_as_in_the_paper() -> None:
    files = ImageFiles(Path(), ["x"] * 1_281_167, 224)
    data = ImageFolders("imagenet", files, torch.zeros(0), files, torch.zeros(0), ["a", "b"], "")
    training = ea_vision.plan(data, {"epochs": None})
    epoch = 1_281_167 // 256
    assert (training.updates, training.batch, training.weight_decay) == (100 * epoch, 256, 1e-4)
    weights = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.SGD([weights], training.learning_rate)
    schedule = vision_training.schedule_of(optimizer, training)
    assert schedule is not None
    [rate] = schedule.lr_lambdas
    rates = [
        0.128 * rate(round(at * epoch)) for at in (0, 2.5, 5, 29.9, 30, 59.9, 60, 79.9, 80, 89.9, 90, 99)
    ]
    want = [0, 0.064, 0.128, 0.128, *(0.0128,) * 2, *(0.00128,) * 2, *(0.000128,) * 2, *(0.0000128,) * 2]
    assert rates == pytest.approx(want)
    assert vision_training.schedule_of(optimizer, ImageTraining(1, 0)) is None
    assert set(ImageTraining(1, 0).settings()) == {
        "updates", "warmup", "batch", "learning_rate", "momentum", "weight_decay", "crop"
    }, "as in earlier results"  # fmt: skip


def test_all_depths_are_rows_and_those_of_34_layers_the_default() -> None:
    depths = [name for name in ea_vision.PUBLISHED_1 if name in ea_vision.IN_TABLE_1]
    assert len(depths) == 12
    assert all(ea_vision.ROWS[name].network == name.lower() for name in depths)
    assert all(name.endswith("-34") for name in ea_vision.BY_DEFAULT)


def test_a_flag_takes_no_value() -> None:
    table = ea_vision.TABLE_1
    assert reproduce.read_options(table, ["--skip-broken", "--epochs", "3"])["skip-broken"] is True
    assert reproduce.read_options(table, [])["skip-broken"] is False
    with pytest.raises(ValueError, match="--skip-broken takes no value, got 'yes'"):
        reproduce.read_options(table, ["--skip-broken=yes"])


# --- The stand-in ---


@pytest.mark.slow
def test_attention_learns_the_stand_in_and_nothing_else_does(tmp_path: Path) -> None:
    """The class is a relation of two distant marks: neither pixels one by one nor small windows tell it."""
    data = relations.images(2048, 512, side=12)
    training = ImageTraining(60, 10, batch=64, learning_rate=0.15, crop=0)
    order = torch.randperm(2048, generator=torch.Generator().manual_seed(0))
    permuted = replace(data, train_labels=data.train_labels[order])

    def top1(kind: str, images: Images, name: str) -> float:
        row = ImageRow(f"{kind}-34", sizes=TINY, zero_init_last=False)
        model, _ = vision_training.train(tmp_path / name, images, row, training, 0, "cpu")
        return accuracies(vision_training.logits_of(model, data.test), data.test_labels)["top1"]

    found = {
        "EA-AA-ResNet": top1("ea-aa-resnet", data, "ea"),
        "ResNet": top1("resnet", data, "plain"),
        "linear": linear_top1(data),
        "EA-AA-ResNet, permuted labels": top1("ea-aa-resnet", permuted, "permuted"),
    }
    print({name: round(value, 1) for name, value in found.items()}, "chance 25")
    best = found.pop("EA-AA-ResNet")
    assert best > 80.0
    assert max(found.values()) < 40.0


def linear_top1(data: Images) -> float:
    """Logistic regression on pixels."""
    mean, deviation = (part.view(-1, 1, 1) for part in data.colours())
    train, test = (((part - mean) / deviation).flatten(1) for part in (data.train, data.test))
    model = torch.nn.Linear(train.shape[1], relations.CLASSES)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(train), data.train_labels)
        (loss + 1e-3 * model.weight.square().sum()).backward()
        return loss

    optimizer.step(closure)
    return accuracies(model(test).detach(), data.test_labels)["top1"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": "ResNet-18"}, "--rows must be one of 'ResNet-34'"),
        ({"epochs": "0"}, "--epochs must be a whole number of at least 1, got 0"),
        ({"dataset": "mnist"}, "--dataset must be cifar100, or a folder with train/CLASS.*, got mnist"),
    ],
)
def test_mistyped_options_are_named(recipe: Any, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**options)


def test_networks_that_several_processes_trained_are_neither_deleted_nor_trained_again(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = recipe("ea-figure-4", epochs="1")
    shutil.rmtree("results")
    for path in Path("runs").rglob("settings.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "processes": 2}))
    with pytest.raises(ValueError, match=r"has a run with processes 2, but None was requested"):
        recipe("ea-table-1", epochs="1", rows="AA-ResNet-34", dataset="cifar100", workers="1")
    assert len(list(Path("runs").rglob("result.json"))) == 2, "nothing is deleted without --fresh"

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the networks are there")

    monkeypatch.setattr(vision_training, "fit", refuse)
    again = recipe("ea-figure-4", epochs="1")
    assert again["tables"] == first["tables"]


def test_a_run_without_result_and_checkpoint_is_no_reason_to_refuse_another(tmp_path: Path) -> None:
    assert earlier_result(tmp_path / "run", {"data": "a"}, fresh=False) is None
    assert earlier_result(tmp_path / "run", {"data": "b"}, fresh=False) is None
    (tmp_path / "run" / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    with pytest.raises(ValueError, match="has a run with data b, but c was requested"):
        earlier_result(tmp_path / "run", {"data": "c"}, fresh=False)


def test_a_class_too_small_to_set_a_part_apart_is_named() -> None:
    with pytest.raises(ValueError, match=r"class \d has \d training images, of which 10% cannot"):
        relations.images(12, 4, side=12).for_validation(0.1)


def test_pictures_of_more_than_eight_bits_are_refused_and_others_turned_upright() -> None:
    deep, turned = io.BytesIO(), io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000).save(deep, "PNG")
    with pytest.raises(ValueError, match=r"deep\.png has more than 8 bits per channel \(mode I;16\)"):
        opened(deep.getvalue(), "deep.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (60, 30)).save(turned, "JPEG", exif=exif)
    assert opened(turned.getvalue(), "turned.jpg").size == (30, 60)


def test_several_files_for_one_part_are_refused(folder: Path) -> None:
    write(folder / "cifar100" / "train_jpeg75.npz", [jpeg((0, 0, 0))], [0])
    with pytest.raises(ValueError, match=r"several files for train.*: train_jpeg75\.npz, train_jpeg95\.npz"):
        cifar100.load(folder)


@pytest.mark.parametrize("names", ['{"a": 1}', "[0, 1]", '"red"', "no JSON"])
def test_names_of_classes_are_a_list_of_texts(folder: Path, names: str) -> None:
    (folder / "cifar100" / "classes.json").write_text(names)
    with pytest.raises(ValueError, match=r"classes\.json must be a list of names in JSON"):
        cifar100.load(folder)


@pytest.mark.parametrize("rate", ["0", "much", "nan"])
def test_a_learning_rate_must_be_a_positive_number(
    rate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recipes_in(tmp_path, monkeypatch)
    with pytest.raises(
        ValueError, match=f"--learning-rate must be a positive number, such as 0.8, got {rate}"
    ):
        run(rows="ResNet-34", epochs="1", **{"learning-rate": rate})


def test_a_diverged_training_ends_with_its_loss_and_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recipes_in(tmp_path, monkeypatch)
    with pytest.raises(
        ValueError, match=r"ResNet-34/seed-0: the training diverged: its loss is \w+ after \d"
    ):
        run(rows="AA-ResNet-34", epochs="15", **{"learning-rate": "1e30"})


def test_a_table_goes_on_without_a_training_that_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes_in(tmp_path, monkeypatch)
    options = ["--epochs", "1", "--workers", "1", "--results", "results", "--seeds", "2", "--device", "cpu"]
    lost = "AA-ResNet-34, seed 1 (after 7 updates)"

    def told(rows: str) -> str:
        """How the command ends."""
        return str(CliRunner().invoke(app, ["reproduce", "ea-table-1", "--rows", rows, *options]).exception)

    def stored() -> tuple[dict[str, set[str]], list[str]]:
        """The rows of each seed, and the notes on what has no numbers."""
        result = read_result(Path("results/ea-table-1.json"))
        assert result is not None
        rows = {seed: set(rows) for seed, rows in result["per_seed"].items()}
        return rows, [note for note in result["notes"] if lost in note]

    train = vision_training.train

    def diverging(folder: Path, data: Images, row: ImageRow, training: Any, seed: int, *rest: Any) -> Any:
        if row.network == "aa-resnet-34" and seed == 1:
            raise DivergedError("no number", 7)
        return train(folder, data, row, training, seed, *rest)

    monkeypatch.setattr(vision_training, "train", diverging)
    assert f"ea-table-1 lacks {lost}: their loss was not finite" in told("ResNet-34,AA-ResNet-34")
    both, one = {"ResNet-34", "AA-ResNet-34"}, {"ResNet-34"}
    rows, notes = stored()
    assert rows == {"0": both, "1": one}
    assert len(notes) == 1
    assert told("ResNet-34") == "None", "it was not asked for"
    assert stored() == (rows, notes), "and is still said to be missing"
    reproduce.retell("ea-table-1", Path("results"))
    assert stored() == (rows, notes)
    monkeypatch.setattr(vision_training, "train", train)
    assert told("AA-ResNet-34") == "None"
    assert stored() == ({"0": both, "1": both}, [])


def test_an_error_of_a_diverged_training_reaches_another_process() -> None:
    error = pickle.loads(pickle.dumps(DivergedError("no number", 7)))
    assert (str(error), error.updates) == ("no number", 7)


def test_settings_are_chosen_on_a_part_of_the_training_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recipes_in(tmp_path, monkeypatch)
    options = ["--rows", "ResNet-34", "--epochs", "1", "--validation", "--learning-rate", "0.03"]
    places = {"out": Path("runs"), "results": Path("results")}
    result = reproduce.run("ea-table-1", seeds=1, device="cpu", extra=options, **places)
    data, training = result["config"]["data"], result["config"]["training"]
    assert (data["train"], data["test"]) == (43, 5)
    assert "10% of the training set for testing" in data["remark"]
    assert training["learning_rate"] == 0.03
    with pytest.raises(ValueError, match="has a run with other data than requested"):
        run(rows="ResNet-34", epochs="1")
