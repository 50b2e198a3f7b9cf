"""`import overt.auto`: transformers' Auto classes and pipelines load attached models."""

from __future__ import annotations

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import overt
import overt.auto
from attached import LIVE, attached
from families import FAMILIES, inputs_of
from fresh import fresh

BY_NAME = {family.name: family for family in FAMILIES}
BERT = BY_NAME["BERT"]
MECHANISMS = (LIVE, overt.Bayesian(k=3.0))
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]
FIXTURES = Path(__file__).parent / "fixtures" / "models"


@pytest.fixture
def model() -> Any:
    made = attached(BERT, *MECHANISMS, where={"encoder": [1, 2]}, seed=9)
    made.overt_state.step.fill_(7)
    return made


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "out")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "out")
    return tmp_path / "out"


def assert_same(found: Any, model: Any) -> None:
    """What Auto classes gave is what `overt.load` gives."""
    assert type(found) is type(model)
    assert type(found.config) is type(model.config)
    state, other = found.overt_state, model.overt_state
    assert (state.mechanisms, state.where, state.seed) == (other.mechanisms, other.where, other.seed)
    assert int(state.step) == int(other.step)
    assert torch.equal(found(**inputs_of(BERT)).logits, model(**inputs_of(BERT)).logits)


def test_a_temperature_comes_back(model: Any, tmp_path: Path) -> None:
    batch = {**inputs_of(BERT), "labels": torch.tensor([0, 1, 1])}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # three labels may not determine it
        overt.calibrate(model, [batch], samples=2)
    model.save_pretrained(tmp_path)
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert found.overt_state.temperature == model.overt_state.temperature
    drawn = [overt.posterior(one, inputs_of(BERT), samples=2).samples for one in (found, model)]
    assert torch.equal(*drawn)


@pytest.mark.slow
def test_without_the_line_the_error_names_it(folder: Path) -> None:
    code = f"""
import overt
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
assert not [name for name in CONFIG_MAPPING if "overt" in name]
for auto in (AutoConfig, AutoModel):
    try:
        auto.from_pretrained({str(folder)!r})
    except ValueError as error:
        print(error)
"""
    said, failed = fresh(code)
    assert not failed
    assert said.count("has model type `overt (import overt.auto)` but Transformers does not recognize") == 2


def test_auto_classes_give_the_attached_model(
    folder: Path, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = AutoModelForSequenceClassification.from_pretrained(folder)
    assert_same(found, model)
    overt.describe(found)
    assert "BertForSequenceClassification (bert), step 7" in capsys.readouterr().out
    found.save_pretrained(tmp_path / "again")
    assert_same(overt.load(tmp_path / "again"), model)
    assert torch.equal(
        AutoModel.from_pretrained(folder)(**inputs_of(BERT)).pooler_output,
        model.bert(**inputs_of(BERT)).pooler_output,
    )


def test_auto_classes_take_their_arguments(folder: Path, model: Any) -> None:
    found = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=4, dtype=torch.bfloat16)
    assert found.classifier.out_features == 4
    assert found.dtype == torch.bfloat16
    again, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert_same(again, model)
    assert not info["missing_keys"]


def test_a_config_is_one_of_its_base_and_remembers_the_mechanisms(
    folder: Path, model: Any, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(folder, num_labels=3)
    assert isinstance(config, transformers.BertConfig)
    assert (config.model_type, config.num_labels) == ("bert", 3)
    for copied in (pickle.loads(pickle.dumps(config)), config):
        found = AutoModelForSequenceClassification.from_pretrained(folder, config=copied)
        assert found.classifier.out_features == 3
        assert int(found.overt_state.step) == 7
    config.save_pretrained(tmp_path / "config")
    fresh = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tmp_path / "config"))
    assert fresh.overt_state.mechanisms == model.overt_state.mechanisms
    assert fresh.overt_state.where == {"encoder": [1, 2]}
    assert int(fresh.overt_state.step) == 0


def test_plain_models_load_as_ever(folder: Path, tmp_path: Path) -> None:
    AutoConfig.from_pretrained(folder)  # registers classes beside BERT's own
    BERT.make().save_pretrained(tmp_path / "plain")
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "plain")
    assert type(found) is transformers.BertForSequenceClassification
    assert not hasattr(found, "overt_state")


def test_a_pipeline_runs_the_attached_model(folder: Path, model: Any) -> None:
    pipe = transformers.pipeline("text-classification", model=str(folder), device="cpu")
    assert_same(pipe.model, model)
    assert type(pipe.tokenizer) is transformers.BertTokenizer
    (said,) = pipe("good film")
    batch = AutoTokenizer.from_pretrained(folder)("good film", return_tensors="pt")
    assert said["score"] == pytest.approx(float(model(**batch).logits.detach().softmax(-1).max()), abs=1e-6)


def test_a_pipeline_never_falls_back_to_plain_weights(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if ".evolving." not in key}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing from .* or do not fit, such as .*overt\.map\.evolving"):
        transformers.pipeline("text-classification", model=str(folder), device="cpu")


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        ("bert-evolving-bayesian", "AutoModelForSequenceClassification"),
        ("gpt2-realformer-bayesian", "AutoModelForCausalLM"),
        ("llama-evolving-bayesian", "AutoModelForCausalLM"),
        ("t5-evolving-bayesian", "AutoModelForSeq2SeqLM"),
    ],
)
def test_folders_that_were_saved_before_there_was_this_line_load(name: str, auto: str) -> None:
    assert json.loads((FIXTURES / name / "config.json").read_text())["model_type"] == "overt"
    found, expected = (
        getattr(transformers, auto).from_pretrained(FIXTURES / name),
        overt.load(FIXTURES / name),
    )
    assert type(found) is type(expected)
    pairs = zip(found.state_dict().items(), expected.state_dict().items(), strict=True)
    assert all(key == other and torch.equal(value, same) for (key, value), (other, same) in pairs)


def test_image_processors_are_those_of_the_base(tmp_path: Path) -> None:
    attached(BY_NAME["ViT"], LIVE).save_pretrained(tmp_path)
    transformers.ViTImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path, use_fast=False)
    assert type(processor).__name__.startswith("ViTImageProcessor")
    found = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    picture = torch.rand(3, 24, 24).numpy()
    assert found(**processor(picture, return_tensors="pt")).logits.shape == (1, 2)


@pytest.mark.slow
def test_the_trainer_trains_what_auto_classes_gave(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = AutoModelForSequenceClassification.from_pretrained(folder)
    rows = [{"input_ids": [2, 5, 7, 3], "labels": number % 2} for number in range(4)]
    settings = {"max_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_steps": 2}
    given = transformers.TrainingArguments(str(tmp_path / "run"), dataloader_pin_memory=False, **settings)
    transformers.Trainer(found, given, train_dataset=rows).train()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint-2")
    assert int(again.overt_state.step) == 9


def test_a_folder_that_is_not_ours_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["overt"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not describe an attached model"):
        AutoConfig.from_pretrained(folder)
