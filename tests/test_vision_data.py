"""Images as data: CIFAR-100 in each of its layouts, and folders of images."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import tarfile
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from graphs import as_published
from overt.data import cifar100, image_folders
from overt.data.pictures import UnreadableImageError

# --- CIFAR-100 ---

NAMES = ["apple", "bear", "cloud"]
TRAIN = np.random.default_rng(0).integers(0, 256, (6, 3, 4, 4), np.uint8)
TEST = np.random.default_rng(1).integers(0, 256, (3, 3, 4, 4), np.uint8)
LABELS = {"train": [0, 1, 2, 2, 1, 0], "test": [2, 0, 1]}


def raw_files() -> dict[str, bytes]:
    """The python version, as Python 2 wrote it: a row for each image, red before green and blue."""
    files = {
        split: as_published(
            {"data": pixels.reshape(len(pixels), -1), "fine_labels": LABELS[split], "coarse_labels": [0]}
        )
        for split, pixels in (("train", TRAIN), ("test", TEST))
    }
    return files | {"meta": as_published({"fine_label_names": NAMES, "coarse_label_names": ["thing"]})}


def write_raw(place: Path) -> Path:
    place.mkdir(parents=True)
    for name, content in raw_files().items():
        (place / name).write_bytes(content)
    return place


def write_archive(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"cifar-100-python/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def check(data: Any) -> None:
    assert torch.equal(data.train, torch.from_numpy(TRAIN))
    assert torch.equal(data.test, torch.from_numpy(TEST))
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == (LABELS["train"], LABELS["test"])
    assert data.classes == NAMES


@pytest.mark.parametrize("place", ["cifar100", "cifar-100-python", "."])
def test_the_python_version_is_read_in_each_place_and_from_the_archive(tmp_path: Path, place: str) -> None:
    write_raw(tmp_path / "plain" / place)
    plain = cifar100.load(tmp_path / "plain")
    check(plain)
    (tmp_path / "packed" / place).mkdir(parents=True)
    write_archive(tmp_path / "packed" / place / cifar100.ARCHIVE, {"file.txt~": b"", **raw_files()})
    packed = cifar100.load(tmp_path / "packed")
    check(packed)
    assert packed.sha256 == plain.sha256
    left = [path.name for path in (tmp_path / "packed").rglob("*") if path.is_file()]
    assert left == [cifar100.ARCHIVE], "nothing is unpacked"


class Runs:
    """Something that makes a file when its pickle is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"echo > '{self.path}'",)


@pytest.mark.parametrize("part", ["train", "test", "meta"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_pickle_that_would_run_code_is_refused_by_name(tmp_path: Path, part: str, packed: bool) -> None:
    place, made = write_raw(tmp_path / "cifar100"), tmp_path / "made"
    (place / part).write_bytes(pickle.dumps({"data": Runs(made)}, protocol=2))
    pickle.loads((place / part).read_bytes())
    assert made.exists(), "a plain reader runs it"
    made.unlink()
    if packed:
        write_archive(
            tmp_path / cifar100.ARCHIVE, {name: (place / name).read_bytes() for name in cifar100.RAW}
        )
        (place / part).unlink()
    with pytest.raises(ValueError, match=rf"^.*{part} refers to posix\.system, .*refused: a pickle can"):
        cifar100.load(tmp_path)
    assert not made.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train", b"text", "train must be a raw file as published, but cannot be read"),
        ("train", as_published({"data": TRAIN.reshape(6, -1)}), "train .* KeyError: 'fine_labels'"),
        (
            "train",
            as_published({"data": TRAIN.reshape(6, -1), "fine_labels": [0]}),
            r"train .* 1 labels, and images of shape \(6, 48\)",
        ),
        (
            "test",
            as_published({"data": TEST.reshape(3, -1), "fine_labels": [0, 1, -1]}),
            "test .* labels that are no whole numbers",
        ),
        (
            "test",
            as_published({"data": TEST.reshape(3, -1).astype(np.float32), "fine_labels": [0, 1, 2]}),
            "test .* type float32",
        ),
        ("meta", as_published({"fine_label_names": NAMES[:2]}), "names 2 classes, and labels go up to 2"),
        ("meta", as_published(NAMES), "meta .* a list instead of a dict"),
    ],
)
def test_raw_files_that_do_not_fit_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    place = write_raw(tmp_path / "cifar100")
    (place / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        cifar100.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_archive_that_is_broken_or_lacks_a_file_is_named(tmp_path: Path) -> None:
    archive = tmp_path / cifar100.ARCHIVE
    write_archive(archive, {name: content for name, content in raw_files().items() if name != "meta"})
    with pytest.raises(ValueError, match=r"cifar-100-python\.tar\.gz must be .* it has no meta"):
        cifar100.load(tmp_path)
    write_archive(archive, raw_files())
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"cifar-100-python\.tar\.gz must be .* cannot be read"):
        cifar100.load(tmp_path)


class Rows(list[dict[str, Any]]):
    """As far as the reader uses it, a split of Hugging Face `datasets`."""

    names: list[str] | None = NAMES

    @property
    def column_names(self) -> list[str]:
        return list(self[0])

    @property
    def features(self) -> dict[str, Any]:
        return {"fine_label": SimpleNamespace(names=self.names)}

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    def cast_column(self, column: str, feature: Any) -> Rows:
        assert column in self.column_names
        assert feature == {"decode": False}
        return self


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stub of `datasets` that has our images; notes how it was called."""
    splits = {
        split: Rows(
            {"img": {"bytes": png(image), "path": None}, "fine_label": label, "coarse_label": 0}
            for image, label in zip(pixels, LABELS[split], strict=True)
        )
        for split, pixels in (("train", TRAIN), ("test", TEST))
    }
    calls: list[Any] = []

    def load(*arguments: Any, **named: Any) -> Any:
        calls.append((arguments, named))
        return splits

    stub = SimpleNamespace(load_dataset=load, load_from_disk=load, Image=lambda **named: named)
    monkeypatch.setitem(sys.modules, "datasets", stub)
    return SimpleNamespace(splits=splits, calls=calls)


@pytest.mark.parametrize("inside", [".", "data", "cifar100"])
def test_parquet_files_of_the_hub_are_read_through_datasets(tmp_path: Path, hub: Any, inside: str) -> None:
    place = tmp_path / "cifar100" / inside
    place.mkdir(parents=True)
    for split in ("train", "test"):
        (place / f"{split}-00000-of-00001.parquet").touch()
    check(cifar100.load(tmp_path))
    [(arguments, named)] = hub.calls
    assert arguments == ("parquet",)
    assert {split: [Path(file).name for file in files] for split, files in named["data_files"].items()} == {
        split: [f"{split}-00000-of-00001.parquet"] for split in ("train", "test")
    }


def test_saved_datasets_are_read_and_files_beside_them(tmp_path: Path, hub: Any) -> None:
    (tmp_path / "dataset_dict.json").touch()
    first = hub.splits["train"][0]["img"]
    (tmp_path / "first.png").write_bytes(first["bytes"])
    first |= {"bytes": None, "path": str(tmp_path / "first.png")}
    check(cifar100.load(tmp_path))
    assert hub.calls == [((str(tmp_path / "."),), {})]
    hub.splits["train"].names = None
    assert cifar100.load(tmp_path).classes == ["0", "1", "2"]
    for row in hub.splits["test"]:
        row["label"] = row.pop("fine_label")
    with pytest.raises(
        ValueError, match=r"test of .* must have the columns img .* got img, coarse_label, label"
    ):
        cifar100.load(tmp_path)


def test_without_datasets_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_dict.json").touch()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'overt\[datasets\]'"):
        cifar100.load(tmp_path)


def test_a_folder_without_any_layout_says_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no CIFAR-100: put train, test, .*\.parquet.*npz$"):
        cifar100.load(tmp_path)


# --- Folders ---


def picture(path: Path, width: int = 20, height: int = 16, red: int = 200) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (red, 10, 10)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 3), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            for number in range(count):
                picture(tmp_path / split / name / f"{number}.{'JPEG' if number else 'png'}", red=200 * label)
    (tmp_path / "train" / "cat" / "notes.txt").touch()
    (tmp_path / "train" / "cat" / "._0.png").touch()
    return tmp_path


@pytest.mark.parametrize("test", image_folders.TESTS)
def test_folders_are_classes_and_files_their_images(folder: Path, test: str) -> None:
    (folder / "val").rename(folder / test)
    data = image_folders.load(folder, 8)
    assert data.classes == ["cat", "dog"]
    assert data.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test_labels.tolist() == [0, 0, 1, 1]
    for files, labels in ((data.train, data.train_labels), (data.test, data.test_labels)):
        for number, label in enumerate(labels.tolist()):
            for image in (files[number], files.crop(number, Random(0), True)):
                assert image.shape == (3, 8, 8)
                assert image.dtype == torch.uint8
                assert (image[0] > 150).all() == bool(label)
    described = data.describe()
    assert (described["train"], described["test"], described["classes"], described["skipped"]) == (6, 4, 2, 0)
    before = data.sha256
    picture(folder / "train" / "cat" / "1.JPEG", 40)
    assert image_folders.load(folder, 8).sha256 != before


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda place: (place / "val").rename(place / "other"),
            "must have folders train/CLASS and val, ",
        ),
        (
            lambda place: (place / "val/dog").rename(place / "val/.dog"),
            "val must have a folder for each",
        ),
        (lambda place: picture(place / "val/fox/0.png"), "train has no class fox, which val has"),
        (lambda place: picture(place / "train/fox/0.png"), "val has no class fox, which train has"),
        (lambda place: (place / "train/fox").mkdir(), "train/fox has no images"),
    ],
)
def test_folders_that_do_not_fit_are_named(folder: Path, spoil: Any, message: str) -> None:
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        image_folders.load(folder)


def test_the_centre_is_scaled_and_cut_as_is_usual() -> None:
    ramp = np.tile(np.arange(320, dtype=np.float32) * 0.75, (256, 1)).round().astype(np.uint8)
    image = Image.fromarray(np.stack([ramp] * 3, axis=-1))
    assert np.array_equal(np.asarray(image_folders.centre(image, 224)), np.asarray(image)[16:240, 48:272])
    for width, height in ((512, 600), (1, 1000), (1000, 3)):
        assert image_folders.centre(Image.new("RGB", (width, height)), 224).size == (224, 224)


def test_crops_have_the_areas_and_ratios_of_inception() -> None:
    random, shares, ratios = Random(0), [], []
    for _ in range(2000):
        left, top, right, bottom = image_folders.crop_box(400, 300, random)
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 300
        shares.append((right - left) * (bottom - top) / (400 * 300))
        ratios.append((right - left) / (bottom - top))
    assert 0.075 < min(shares) < 0.09
    assert max(shares) > 0.9
    assert 0.73 < min(ratios) < 0.77
    assert 1.30 < max(ratios) < 1.36
    assert 0.9 < float(np.exp(np.mean(np.log(ratios)))) < 1.1
    # Nothing fits: the largest centred part of an allowed ratio.
    assert image_folders.crop_box(3000, 30, Random(0)) == (1480, 0, 1520, 30)
    assert image_folders.crop_box(30, 3000, Random(0)) == (0, 1480, 30, 1520)


def test_half_of_the_crops_are_mirrored_if_that_is_allowed() -> None:
    ramp = np.tile(np.linspace(0, 255, 64).astype(np.uint8), (64, 1))
    image = Image.fromarray(np.stack([ramp] * 3, axis=-1))

    def falling(mirrored: bool) -> int:
        crops = [
            np.asarray(image_folders.random_crop(image, 16, Random(seed), mirrored)) for seed in range(200)
        ]
        return sum(int(crop[0, 0, 0]) > int(crop[0, -1, 0]) for crop in crops)

    assert falling(False) == 0
    assert 70 < falling(True) < 130


def break_some(folder: Path) -> list[str]:
    whole = (folder / "train/dog/1.JPEG").read_bytes()
    (folder / "train/dog/1.JPEG").write_bytes(whole[: len(whole) // 2])
    (folder / "train/cat/1.JPEG").write_bytes(b"no image")
    (folder / "val/cat/9.jpg").symlink_to(folder / "gone.jpg")
    return ["train/cat/1.JPEG", "train/dog/1.JPEG", "val/cat/9.jpg"]


def test_broken_files_are_named_or_left_out(folder: Path) -> None:
    broken = break_some(folder)
    data = image_folders.load(folder, 8)
    for name in broken:
        files = data.train if name.startswith("train") else data.test
        with pytest.raises(UnreadableImageError, match=rf"^{folder / name} cannot be read") as caught:
            files.image(files.names.index(name))
        assert "\n" not in str(caught.value)
    found = image_folders.broken_files(data.train, data.test, workers=0)
    assert sorted(found) == broken
    groups = data.train, data.test
    halves = [image_folders.broken_files(*groups, workers=0, part=part, parts=2) for part in (0, 1)]
    assert halves[0] | halves[1] == found
    assert not set(halves[0]) & set(halves[1])
    rest = data.without(found)
    assert rest.train_labels.tolist() == [0, 0, 1, 1]
    assert not set(broken) & {*rest.train.names, *rest.test.names}
    assert rest.describe()["skipped"] == 3
    assert rest.sha256 != data.sha256
    with pytest.raises(ValueError, match="--skip-broken leaves no image of class dog"):
        data.without([name for name in data.train.names if "dog" in name])
    json.dumps(rest.describe())
