"""A vision network in a folder: what is written is what comes back, and other folders are refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import overt
from overt import vision
from overt.data.images import Images
from overt.recipes import vision_training

LABELS = ["cat", "dog", "<b>"]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def made(name: str = "ea-aa-resnet-34", **arguments: Any) -> vision.ResNet:
    torch.manual_seed(0)
    sizes = {"num_classes": 3, "stem": "cifar", "size": (16, 24), "width": 8, "blocks": [1, 1, 2, 1]}
    sizes["zero_init_last"] = False  # so that blocks matter
    model = vision.resnet(name, **{**sizes, **arguments}).train()
    with torch.no_grad():
        model(images(), overt.Chain(step=0))  # so that batch norms have statistics
    return model.eval()


def images() -> Tensor:
    return torch.randn(4, 3, 16, 24, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Tempering(overt.Mechanism):
    by: float = 2.0
    steps: tuple[int, ...] = (1, 2)


class TemperingLayer(overt.MechanismLayer):
    def __init__(self, config: Any, site: Any) -> None:
        super().__init__(config, site)
        self.shift = nn.Parameter(torch.randn(site.heads))

    def refine(self, logits: Tensor, call: overt.AttentionCall, chain: overt.Chain) -> Tensor:
        del call, chain
        return logits / self.config.by + self.shift.view(-1, 1, 1)


overt.register_mechanism(Tempering, TemperingLayer)
MECHANISMS: dict[str, list[overt.Mechanism]] = {
    "plain": [],
    "evolving": [overt.Evolving(alpha=0.3, beta=0.5, init="kaiming")],
    "bayesian": [overt.Bayesian(), overt.Evolving()],
    "a stranger's": [Tempering(3.0, (4,))],
}


@pytest.mark.parametrize("mechanisms", MECHANISMS.values(), ids=MECHANISMS)
def test_a_network_comes_back_bit_for_bit(mechanisms: list[overt.Mechanism], tmp_path: Path) -> None:
    model = made("aa-resnet-34", mechanisms=mechanisms)
    vision.save(model, tmp_path / "new" / "folder", labels=LABELS, mean=MEAN, std=STD)
    again = vision.load(tmp_path / "new" / "folder")
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) and x.dtype == after[name].dtype for name, x in before.items())
    assert torch.equal(model(images()), again(images()))
    assert again.mechanisms == tuple(mechanisms)
    assert not again.training
    assert (again.labels, again.mean, again.std) == (LABELS, MEAN, STD)
    assert (again.size, again.stem, again.num_classes) == ((16, 24), "cifar", 3)


def test_a_name_s_own_mechanisms_are_written_out(tmp_path: Path) -> None:
    vision.save(made("ea-aa-resnet-34"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert [each["name"] for each in config["mechanisms"]] == ["Evolving"]
    assert config["overt"] == overt.__version__
    vision.save(made("resnet-34"), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["mechanisms"] is None
    assert vision.load(tmp_path).attentions == 0


def test_what_a_loaded_network_is_described_by_stays_with_it(tmp_path: Path) -> None:
    vision.save(made(), tmp_path / "a", labels=LABELS, mean=MEAN, std=torch.tensor(STD))
    model = vision.load(tmp_path / "a")
    vision.save(model, tmp_path / "b")
    again = vision.load(tmp_path / "b")
    assert (again.labels, again.mean, again.std) == (LABELS, MEAN, pytest.approx(STD))
    model.reset_classifier(5)
    assert model.labels is None, "the new classes have no names yet"
    with pytest.raises(ValueError, match=r"labels must be 5 strings, one per class, got 3 labels"):
        vision.save(model, tmp_path / "b", labels=LABELS)
    vision.save(model, tmp_path / "b", labels=list("abcde"))
    assert vision.load(tmp_path / "b").num_classes == 5


def test_half_precision_stays_half(tmp_path: Path) -> None:
    model = made().half()
    vision.save(model, tmp_path)
    again = vision.load(tmp_path)
    assert again.fc.weight.dtype == torch.float16
    assert torch.equal(again.conv1.weight, model.conv1.weight)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"labels": ["a", "b"]}, r"labels must be 3 strings, one per class, got 2 labels"),
        ({"labels": "abc"}, r"labels must be 3 strings, one per class, got 'abc'"),
        ({"labels": [1, 2, 3]}, r"labels must be 3 strings, one per class, got \[1, 2, 3\]"),
        ({"mean": MEAN}, r"mean and std must be given together"),
        ({"mean": (0.5,), "std": STD}, r"mean must be 3 numbers, one per channel, got \(0\.5,\)"),
        ({"mean": (123.7, 116.3, 103.5), "std": STD}, r"mean must be of images with values from 0 to 1"),
        ({"mean": MEAN, "std": (0.2, 0.0, 0.2)}, r"std must be greater than 0, got 0"),
        ({"mean": MEAN, "std": (0.2, float("nan"), 0.2)}, r"std must be of images with values from 0 to 1"),
    ],
)
def test_what_does_not_describe_the_network_is_refused(
    arguments: dict[str, Any], error: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=error):
        vision.save(made(), tmp_path / "model", **arguments)
    assert not (tmp_path / "model").exists()


def test_only_networks_of_resnet_are_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"model must be made by overt\.vision\.resnet, got a Linear"):
        vision.save(nn.Linear(2, 2), tmp_path)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file is not a folder"):
        vision.save(made(), tmp_path / "file")


def test_a_save_that_fails_leaves_the_earlier_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision.save(made(), tmp_path, labels=LABELS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*given: object, **more: object) -> None:
        del given, more
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)  # of the config, after the weights
    with pytest.raises(OSError, match="No space left on device"):
        vision.save(made("aa-resnet-50"), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_type": "bert"}, r"model_type of .*config\.json must be 'overt-resnet', got 'bert'"),
        ({"depth": 3}, r"config\.json has settings that overt\.vision\.resnet does not: depth"),
        ({"stem": "absent", "labels": "absent"}, r"config\.json lacks stem$"),
        ({"stem": "mnist"}, r"config\.json cannot be understood: stem must be one of"),
        ({"name": 34}, r"config\.json cannot be understood: name must be one of .* got 34"),
        ({"size": "large"}, r"config\.json cannot be understood: size must be"),
        ({"labels": ["a"]}, r"config\.json cannot be understood: labels must be 3 strings"),
        ({"mean": [1, 2]}, r"config\.json cannot be understood: mean and std must be given together"),
        ({"mechanisms": [{"name": "Melting"}]}, r"a mechanism must name one of .*Melting"),
        ({"mechanisms": [{"name": "Evolving", "heat": 1}]}, r"Evolving has no setting heat"),
        ({"mechanisms": 5}, r"config\.json cannot be understood"),
        ({"num_classes": 4}, r"does not fit config\.json: fc\.bias has shape \(4,\), and \(3,\) in the file"),
        ({"mechanisms": []}, r"does not fit config\.json: .*evolving.* has shape None"),
    ],
)
def test_a_garbled_config_is_refused_by_name(changes: dict[str, Any], error: str, tmp_path: Path) -> None:
    vision.save(made(), tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(ValueError, match=error) as refusal:
        vision.load(tmp_path)
    assert "\n" not in str(refusal.value)


def test_files_that_are_missing_or_torn_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"holds no config\.json: give a folder that overt\.vision\.save"
    ):
        vision.load(tmp_path)
    vision.save(made(), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    text, data = config.read_text(), weights.read_bytes()
    config.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match=r"config\.json is not JSON: is it complete\?"):
        vision.load(tmp_path)
    config.write_text(text)
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors: its weights cannot be read"):
        vision.load(tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors"):
        vision.load(tmp_path)
    weights.write_bytes(data)
    save_file({**load_file(weights), "fc.bias": torch.zeros(3, dtype=torch.int64)}, weights)
    with pytest.raises(ValueError, match=r"fc\.bias is torch\.float32, not torch\.int64"):
        vision.load(tmp_path)


def test_a_trained_classifier_is_saved_with_what_it_normalises_by(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randint(0, 256, (6, 3, 16, 16), generator=generator, dtype=torch.uint8)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    data = Images("made up", pixels, labels, pixels, labels, LABELS, "")
    row = vision_training.ImageRow("aa-resnet-34", sizes={"width": 8, "blocks": [1, 1, 1, 1]})
    model = vision_training.Classifier(vision_training.network(row, data, 0), data, 0).eval()
    vision_training.save(model, tmp_path / "model")
    again = vision.load(tmp_path / "model")
    assert again.labels == LABELS
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in (again.mean, again.std))
    by_hand = again((pixels / 255 - mean) / std)
    assert torch.allclose(by_hand, vision_training.logits_of(model, pixels), atol=1e-4)


def test_a_network_that_was_changed_since_it_was_made_is_not_saved(tmp_path: Path) -> None:
    plain = vision.resnet("resnet-34", 3, stem="cifar", size=16, width=8, blocks=[1, 1, 1, 1])
    vision.augment(plain, overt.Evolving(), size=16)
    with pytest.raises(ValueError, match=r"model is not as overt\.vision\.resnet made it.* is (new|missing)"):
        vision.save(plain, tmp_path / "a")
    pruned = made()
    pruned.prune_intermediate_layers([0, 1])
    with pytest.raises(ValueError, match=r"could not be loaded: layer\d.* is missing"):
        vision.save(pruned, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_settings_that_an_older_file_lacks_have_their_defaults(tmp_path: Path) -> None:
    vision.save(made(), tmp_path)
    rewrite(tmp_path, zero_init_last="absent", labels="absent", overt="absent")
    assert vision.load(tmp_path).labels is None
