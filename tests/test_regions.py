"""Regions of images: the encoder's training and its store, other networks, published features, bad input."""

from __future__ import annotations

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from overt import vision
from overt.data import scenes
from overt.data.vocabulary import tokenise
from overt.models.image_encoder import ImageEncoder
from overt.recipes import regions
from overt.recipes._recipe import Request
from overt.recipes.regions import Pictures, RegionSource, source_of, words_held

SMALL: dict[str, Any] = {"channels": (4, 6, 8, 10), "width": 12, "blocks": 1}


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    data = scenes.make((12, 2, 2), side=32).captions
    names = [row.image for part in (data.train, data.validation, data.test) for row in part]
    words = data.vocabulary.words
    own = [[word for text in row.captions for word in tokenise(text)] for row in data.train]
    return Pictures(names, data.images, torch.arange(12), words_held(own, words), words, data.sha256)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "SIZES", SMALL)
    monkeypatch.setattr(regions, "fastest_update", lambda *_: 1.0)


def request(out: Path, fresh: bool = False, seeds: int = 1, **options: Any) -> Request:
    values = {name.replace("-", "_"): option.default for name, option in regions.OPTIONS.items()}
    values |= {"encoder_epochs": 2, "workers": None, **options}
    dashed = {name.replace("_", "-"): value for name, value in values.items()}
    console = Console(file=io.StringIO())
    return Request(out, None, None, seeds, "cpu", fresh, dashed, console)


def made(out: Path, pictures: Pictures, **options: Any) -> RegionSource:
    asked = request(out, **options)
    source = source_of(asked, pictures, "bam-table-3")
    regions.train_encoders(asked, pictures, source, range(asked.seeds))
    return source


def test_an_image_holds_the_words_of_its_captions() -> None:
    held = words_held([["a", "dog", "a"], [], ["cat", "unheard"]], ("a", "cat", "dog"))
    assert held.tolist() == [[True, False, True], [False] * 3, [False, True, False]]


def test_the_encoder_is_trained_once_for_the_same_settings_and_its_regions_are_stored(
    tmp_path: Path, pictures: Pictures
) -> None:
    source = made(tmp_path, pictures, seeds=2)
    first, second = source.regions(0), source.regions(1)
    assert first.features.dtype == torch.float16
    assert first.features.shape == (16, 4, 12)
    assert bool(first.real.all())
    assert not torch.equal(first.features, second.features)
    weights = (source.folder(0) / "model" / "model.safetensors").read_bytes()
    assert source.encoder_hash(0) == hashlib.sha256(weights).hexdigest() != source.encoder_hash(1)
    net = source.network(0)
    assert isinstance(net, ImageEncoder)
    assert net.word_names == list(pictures.words)
    assert pictures.images is not None
    with torch.no_grad():
        expected = net.regions(pictures.images)
    torch.testing.assert_close(first.features.float(), expected, atol=2e-3, rtol=2e-3)

    written = (tmp_path / "encoder" / "seed-0" / "result.json").stat().st_mtime_ns
    (tmp_path / "encoder" / "seed-1" / regions.CACHE).unlink()
    again = made(tmp_path, pictures, seeds=2, fresh=True)  # the rows are trained again, the encoder is not
    assert (tmp_path / "encoder" / "seed-0" / "result.json").stat().st_mtime_ns == written
    torch.testing.assert_close(again.regions(1).features, second.features)

    with pytest.raises(ValueError, match="updates 2, but 3 was requested: delete it with --fresh"):
        made(tmp_path, pictures, encoder_epochs=3)
    assert made(tmp_path, pictures, encoder_epochs=3, fresh=True).settings != source.settings


def test_encoders_are_trained_of_the_seeds_that_need_them(tmp_path: Path, pictures: Pictures) -> None:
    asked = request(tmp_path, seeds=3)
    source = source_of(asked, pictures, "bam-table-3")
    assert (source.per_image, source.trained) == (4, True)
    regions.train_encoders(asked, pictures, source, ())
    regions.train_encoders(asked, pictures, source, {1})
    assert [path.parent.name for path in (tmp_path / "encoder").glob("*/result.json")] == ["seed-1"]
    assert source.regions(1).real.shape[1] == source.per_image


@pytest.mark.parametrize("name", ["resnet-34", "aa-resnet-34"])
def test_a_network_of_the_vision_recipes_gives_regions(tmp_path: Path, pictures: Pictures, name: str) -> None:
    torch.manual_seed(0)
    net = vision.resnet(name, 3, stem="cifar", size=16, width=8, blocks=[1, 1, 1, 1]).eval()
    vision.save(net, tmp_path / "net", mean=[0.5] * 3, std=[0.2] * 3)
    source = made(tmp_path / "out", pictures, encoder=str(tmp_path / "net"), encoder_epochs=regions.EPOCHS)
    assert source.regions(0).features.shape == (16, 4, 64)
    assert source.folder(0) == source.folder(1)
    found = source.network(3)
    assert found is not None
    regions.save_encoder(found, tmp_path / "copy")
    again = regions.open_encoder(tmp_path / "copy")
    assert pictures.images is not None
    torch.testing.assert_close(regions.encode(again, pictures.images), source.regions(0).features)


def test_published_features_are_taken_as_they_are(tmp_path: Path, pictures: Pictures) -> None:
    folder = tmp_path / "features"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number, name in enumerate(pictures.names):
        np.savez(folder / f"{name}.npz", feat=random.normal(size=(1 + number % 3, 2048)).astype(np.float32))
    options = {"features": str(folder), "encoder_epochs": regions.EPOCHS}
    source = made(tmp_path / "out", pictures, **options)
    found = source.regions(0)
    assert source.network(0) is None
    assert found.real.sum(dim=1).tolist() == [1 + number % 3 for number in range(16)]
    first = np.load(folder / f"{pictures.names[1]}.npz")["feat"]
    np.testing.assert_allclose(found.features[1, :2].float().numpy(), first, atol=2e-3)
    path = folder / f"{pictures.names[1]}.npz"
    np.savez(path, feat=-first)  # as many bytes
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))
    with pytest.raises(ValueError, match="other features than requested"):
        made(tmp_path / "out", pictures, **options)
    read = made(tmp_path / "out", pictures, fresh=True, **options).regions(0)
    np.testing.assert_allclose(read.features[1, :2].float().numpy(), -first, atol=2e-3)
    np.savez(folder / f"{pictures.names[0]}.npz", feat=np.zeros((2, 7), np.float32))
    with pytest.raises(ValueError, match="other features than requested"):
        made(tmp_path / "out", pictures, **options)
    with pytest.raises(ValueError, match="must have regions × 2048 features, got 2 × 7"):
        made(tmp_path / "other", pictures, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder": "e", "features": "f"}, "exclude each other"),
        ({"features": "f", "finetune": True}, "--finetune needs an encoder"),
        ({"encoder": "e"}, "--encoder-epochs is for an encoder that is trained here"),
        ({"encoder": "nowhere", "encoder_epochs": regions.EPOCHS}, "nowhere must be a folder of a network"),
        ({"features": "nowhere", "encoder_epochs": regions.EPOCHS}, "must be a folder of npz files"),
    ],
)
def test_bad_options_are_refused_by_name(
    tmp_path: Path, pictures: Pictures, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        made(tmp_path, pictures, **options)
