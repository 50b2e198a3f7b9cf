"""Saving and loading attached models: what other loaders say, damaged files, the model card, the hub."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import overt
from families import FAMILIES, inputs_of
from test_attach import attached
from test_battery import LIVE

BY_NAME = {family.name: family for family in FAMILIES}
BERT = BY_NAME["BERT"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    attached(BERT, LIVE, overt.Bayesian(k=3.0), where={"encoder": [1, 2]}).save_pretrained(tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without transformers' report of what it could not load."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_auto_classes_fail_naming_overt(saved: Path) -> None:
    with pytest.raises(ValueError, match="model type `overt`"):
        transformers.AutoModelForSequenceClassification.from_pretrained(saved)


@pytest.mark.usefixtures("quiet")
def test_a_concrete_class_loads_the_plain_weights(saved: Path) -> None:
    plain = BERT.make()
    loaded = transformers.BertForSequenceClassification.from_pretrained(saved)
    assert torch.equal(loaded(**inputs_of(BERT)).logits, plain(**inputs_of(BERT)).logits)
    assert not hasattr(loaded, "overt_state")


def test_where_comes_back(saved: Path) -> None:
    loaded = overt.load(saved)
    assert loaded.overt_state.where == {"encoder": [1, 2]}
    assert loaded.bert.encoder.layer[0].attention.self.overt.map is None
    assert loaded.overt_state.mechanisms == (LIVE, overt.Bayesian(k=3.0))
    overt.detach(loaded)
    assert torch.equal(loaded(**inputs_of(BERT)).logits, BERT.make()(**inputs_of(BERT)).logits)


def test_a_loaded_model_trains_and_saves_again(saved: Path, tmp_path: Path) -> None:
    model = overt.load(saved).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**inputs_of(BERT), labels=torch.tensor([0, 1, 1])).loss.backward()
    optimizer.step()
    assert int(model.overt_state.step) == 1
    model.save_pretrained(tmp_path / "again")
    again = overt.load(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert int(again.overt_state.step) == 1


def test_loading_can_change_the_dtype(saved: Path) -> None:
    model = overt.load(saved, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.overt_state.step.dtype == torch.int64


def test_the_model_card_tells_how_to_load(saved: Path) -> None:
    card = (saved / "README.md").read_text()
    assert "pip install -c constraints.txt ." in card
    assert "pip install overt" not in card
    assert 'overt.load("out")' in card
    assert "BertForSequenceClassification" in card
    assert card.startswith("---\n")


def test_a_model_card_that_is_there_is_added_to(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    model = attached(BERT, LIVE)
    for _ in range(2):
        model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n\n# Mine\n")
    assert card.count("pip install -c constraints.txt .") == 1


def test_a_large_model_is_sharded_and_loads(tmp_path: Path) -> None:
    model = attached(BERT, LIVE)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(overt.load(tmp_path)(**inputs_of(BERT)).logits, model(**inputs_of(BERT)).logits)


def test_push_to_hub_uploads_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    uploads: list[dict[str, str]] = []

    def upload(self: Any, working_dir: str, repo_id: str, *args: Any, **kwargs: Any) -> str:
        del self, args, kwargs
        files = {path.name: path.read_text(errors="replace") for path in Path(working_dir).iterdir()}
        uploads.append(files)
        return repo_id

    class Api:
        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return type("Repo", (), {"repo_id": f"me/{repo_id}"})()

    from transformers.utils import hub

    class Card:
        def save(self, path: str) -> None:
            Path(path).write_text("# a card of transformers' own\n")

    monkeypatch.setattr(hub, "hf_api", Api, raising=False)
    monkeypatch.setattr(hub, "create_repo", Api().create_repo, raising=False)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: Card())
    monkeypatch.setattr(transformers.PreTrainedModel, "_upload_modified_files", upload)
    model = attached(BERT, LIVE)
    assert model.push_to_hub("mine") == "me/mine"
    model.save_pretrained(tmp_path / "other", push_to_hub=True)
    assert len(uploads) == 2
    for files in uploads:
        assert json.loads(files["config.json"])["model_type"] == "overt"
        assert "pip install -c constraints.txt ." in files["README.md"]
        assert "model.safetensors" in files
    assert 'overt.load("me/mine")' in uploads[0]["README.md"]


# Files that are not what they should be.


def test_a_plain_model_is_told_apart(tmp_path: Path) -> None:
    BERT.make().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds a plain model of type 'bert': load it with transformers"):
        overt.load(tmp_path)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=str(tmp_path)):
        overt.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        overt.load(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        overt.load(tmp_path / "nowhere")


def test_truncated_weights_are_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="damaged or cut short"):
        overt.load(saved)


def test_garbage_for_weights_is_named(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"\x00" * 500)
    with pytest.raises(ValueError, match="damaged or cut short"):
        overt.load(saved)


@pytest.mark.usefixtures("quiet")
def test_missing_mechanisms_are_named(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if ".evolving." not in key}
    assert len(kept) < len(tensors)
    save_file(kept, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack .* 2 tensors, such as bert.*overt.map.evolving"):
        overt.load(saved)


@pytest.mark.parametrize("missing", ["overt_state.step", "bert.encoder.layer.1.attention.self.query.weight"])
@pytest.mark.usefixtures("quiet")
def test_any_missing_tensor_is_named(saved: Path, missing: str) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors[missing]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lack .* 1 tensors, such as {missing}"):
        overt.load(saved)


@pytest.mark.parametrize("name", ["pipeline", "AutoModel", "GPT2LMHeadModel", "no_such_thing"])
def test_a_wrong_architecture_is_named(saved: Path, name: str) -> None:
    path = saved / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [name]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"config.json does not describe an attached model: .*{name}"):
        overt.load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mechanisms": [{"name": "Evolving", "alpha": 7.0}]}, r"alpha must lie in \[0, 1\], got 7.0"),
        ({"mechanisms": [{"name": "Exploding"}]}, "must name one of Bayesian, Evolving, .*Synthesizer"),
        ({"mechanisms": [{"name": "Evolving", "gamma": 1}]}, "Evolving has no setting gamma"),
        ({"mechanisms": "all"}, "does not describe an attached model"),
        ({"base_model_type": "nothing"}, "does not describe an attached model"),
        ({"format": 99}, "has format 99; this overt reads 1"),
    ],
)
def test_a_wrong_config_is_named(saved: Path, change: dict[str, Any], message: str) -> None:
    path = saved / "config.json"
    config = json.loads(path.read_text())
    config["overt"].update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        overt.load(saved)


def test_nothing_is_unpickled(saved: Path) -> None:
    # A file that pickle would run is not even looked at.
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"safetensors|pytorch_model|weights"):
        overt.load(saved)
