"""Images: their readers and generated stand-in, crops, batches, and the recipes that train on them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from overt.data import cifar100, relations
from overt.data.images import Images
from overt.recipes import ea_vision, reproduce, vision_training
from overt.recipes.vision_training import Epochs, ImageRow, ImageTraining, accuracies, augmented

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


TINY = {"width": 8, "blocks": [1, 1, 1, 1]}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OVERT_DATA", raising=False)
    monkeypatch.setattr(ea_vision, "SMALL", TINY)
    monkeypatch.setattr(ea_vision.relations, "images", lambda: small_images())

    def run(name: str = "ea-table-1", seeds: int = 1, **options: str) -> dict[str, Any]:
        extra = [part for option, value in options.items() for part in (f"--{option}", value)]
        return reproduce.run(
            name, seeds=seeds, device="cpu", out=Path("runs"), results=Path("results"), extra=extra
        )

    return run


def small_images() -> Images:
    return make_images(48, 16, side=12)


make_images = relations.images


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


def test_several_processes_are_refused(recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="start them without accelerate launch"):
        recipe()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": "ResNet-18"}, "--rows must be one of 'ResNet-34'"),
        ({"epochs": "0"}, "--epochs must be a whole number of at least 1, got 0"),
        ({"dataset": "mnist"}, "--dataset must be cifar100, got mnist"),
    ],
)
def test_mistyped_options_are_named(recipe: Any, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(**options)
