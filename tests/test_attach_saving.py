"""Saving and loading attached models: what other loaders say, damaged files, the model card, the hub."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import overt
from attached import LIVE, attached, enliven
from families import FAMILIES, inputs_of
from overt.attaching.settings import settings_in

pytestmark = pytest.mark.slow
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


def test_the_card_of_a_model_saved_before_is_renewed(saved: Path) -> None:
    card = saved / "README.md"
    card.write_text(card.read_text() + "\n## Data\n\nmine\n")
    model = overt.detach(overt.load(saved))
    overt.attach(model, overt.Bayesian(k=3.25)).save_pretrained(saved)
    text = card.read_text()
    assert text.count("overt.load(") == 1
    assert "k=3.25" in text
    assert "Evolving(" not in text
    assert text.endswith("\n## Data\n\nmine\n")


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
        assert settings_in(json.loads(files["config.json"])) is not None
        assert "pip install -c constraints.txt ." in files["README.md"]
        assert "model.safetensors" in files
    assert 'overt.load("me/mine")' in uploads[0]["README.md"]


# Other classes, heads and settings than those that were saved.


class Mine(transformers.BertForMaskedLM):
    """A class of the user's own, with an argument of its own."""

    def __init__(self, config: Any, extra: int = 1) -> None:
        super().__init__(config)
        self.extra = extra


def pretrained(kind: Any, folder: Path, *mechanisms: Any) -> Any:
    """A language model with mechanisms that trained for five steps, saved."""
    model = enliven(overt.attach(kind(BERT.make().config).eval(), *(mechanisms or (LIVE, overt.Bayesian()))))
    model.overt_state.step.fill_(5)
    model.save_pretrained(folder)
    return model


def fresh_tensors(model: Any, before: Any) -> set[str]:
    """Names of what a model has and the one before had not, or had otherwise."""
    old = before.state_dict()
    named = {key: old.get(key, old.get(key.removeprefix("bert."))) for key in model.state_dict()}
    return {key for key, value in model.state_dict().items() if not _same(value, named[key])}


def _same(value: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and value.shape == other.shape and torch.equal(value, other)


def test_a_classifier_keeps_what_a_language_model_learned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = pretrained(transformers.BertForMaskedLM, tmp_path)
    with caplog.at_level(logging.WARNING, "transformers.modeling_utils"):
        model = overt.load(tmp_path, cls=transformers.BertForSequenceClassification, num_labels=3)
    head = {f"{name}.{kind}" for name in ("bert.pooler.dense", "classifier") for kind in ("weight", "bias")}
    assert fresh_tensors(model, before) == head
    assert type(model) is transformers.BertForSequenceClassification
    assert model(**inputs_of(BERT)).logits.shape == (3, 3)
    assert int(model.overt_state.step) == 5
    assert all(re.search(rf"{name} *\| MISSING", caplog.text) for name in head), "transformers reports it"


def test_a_head_is_taken_off_and_put_on(tmp_path: Path) -> None:
    before = pretrained(transformers.BertForSequenceClassification, tmp_path / "headed")
    base = overt.load(tmp_path / "headed", cls=transformers.BertModel)
    inputs = inputs_of(BERT)
    assert torch.equal(base(**inputs).pooler_output, before.bert(**inputs).pooler_output)
    base.overt_state.step += 1
    base.save_pretrained(tmp_path / "base")
    headed = overt.load(tmp_path / "base", cls=transformers.BertForTokenClassification)
    assert fresh_tensors(headed, base) == {"classifier.weight", "classifier.bias"}
    assert int(headed.overt_state.step) == 6
    assert torch.equal(overt.load(tmp_path / "base")(**inputs).pooler_output, base(**inputs).pooler_output)


def test_num_labels_makes_the_head_anew(tmp_path: Path) -> None:
    before = pretrained(transformers.BertForSequenceClassification, tmp_path)
    model = overt.load(tmp_path, num_labels=5)
    assert fresh_tensors(model, before) == {"classifier.weight", "classifier.bias"}
    assert model.config.num_labels == model.classifier.out_features == 5


def test_overrides_go_to_the_config_and_leave_the_weights(tmp_path: Path) -> None:
    before = pretrained(transformers.BertForSequenceClassification, tmp_path)
    names = {0: "no", 1: "yes"}
    model = overt.load(tmp_path, hidden_dropout_prob=0.3, id2label=names, dtype=torch.float64)
    assert model.config.id2label == names
    assert model.bert.embeddings.dropout.p == 0.3
    assert model.dtype == torch.float64
    assert fresh_tensors(model.float(), before) == set()


def test_a_class_of_ones_own_is_given(tmp_path: Path) -> None:
    before = pretrained(Mine, tmp_path)
    with pytest.raises(ValueError, match=r"saved from Mine, .*overt.load\(…, cls=Mine\)"):
        overt.load(tmp_path)
    model = overt.load(tmp_path, cls=Mine, extra=3)
    assert type(model) is Mine
    assert model.extra == 3
    assert fresh_tensors(model, before) == set()
    assert fresh_tensors(overt.load(tmp_path, cls=transformers.BertForMaskedLM), before) == set()


def test_t5_keeps_what_it_learned_under_another_prefix(tmp_path: Path) -> None:
    before = attached(BY_NAME["T5"], LIVE)
    before.save_pretrained(tmp_path)
    model = overt.load(tmp_path, cls=transformers.T5ForSequenceClassification)
    old = before.state_dict()
    for key, value in model.state_dict().items():
        if "classification_head" not in key:
            assert torch.equal(value, old[key.removeprefix("transformer.")]), key
    attached(BY_NAME["T5"], LIVE, where="cross").save_pretrained(tmp_path / "cross")
    with pytest.raises(ValueError, match="where names 'cross', but this model has only encoder"):
        overt.load(tmp_path / "cross", cls=transformers.T5EncoderModel)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"cls": transformers.GPT2Model}, ValueError, "GPT2Model is not a model of type bert"),
        ({"cls": transformers.AutoModel}, TypeError, "cls must be a model class"),
        ({"vocab_size": 61}, ValueError, "1 tensors are missing .* such as .*word_embeddings"),
        (
            {"max_position_embeddings": 65},
            ValueError,
            "1 tensors are missing .* such as .*position_embeddings",
        ),
        (
            {"num_hidden_layers": 4},
            ValueError,
            r"\d+ tensors are missing .* or do not fit, such as bert.encoder.layer.3",
        ),
        ({"nonsense": 1}, TypeError, "unexpected keyword argument 'nonsense'"),
    ],
)
@pytest.mark.usefixtures("quiet")
def test_what_a_head_does_not_explain_is_refused(
    saved: Path, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        overt.load(saved, **given)


@pytest.mark.parametrize(
    "lost", ["overt.map.evolving.weight", "overt_state.step", "word_embeddings.weight", "1.output.dense.bias"]
)
@pytest.mark.usefixtures("quiet")
def test_another_head_excuses_no_other_missing_tensor(saved: Path, lost: str) -> None:
    tensors = load_file(saved / "model.safetensors")
    gone = {key for key in tensors if key.endswith(lost)}
    assert gone
    kept = {key: value for key, value in tensors.items() if key not in gone}
    save_file(kept, saved / "model.safetensors", metadata={"format": "pt"})
    for cls in (transformers.BertForTokenClassification, transformers.BertModel):
        with pytest.raises(ValueError, match=rf"{len(gone)} tensors are missing .* such as .*{lost}"):
            overt.load(saved, cls=cls)


def test_loading_tells_what_it_did_as_transformers_does(saved: Path) -> None:
    model, info = overt.load(saved, output_loading_info=True)
    assert int(model.overt_state.step) == 0
    assert not info["missing_keys"]


SOUND = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "conv_dim": (16, 16),
    "conv_kernel": (8, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
SPOKEN = ["Wav2Vec2", "Hubert", "UniSpeech", "UniSpeechSat", "SEW", "Data2VecAudio", "Wav2Vec2Conformer"]


@pytest.mark.parametrize("kind", SPOKEN)
def test_speech_encoders_make_weights_aside_and_come_back(kind: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"{kind}Config")(**SOUND, vocab_size=32)
    model = getattr(transformers, f"{kind}ForCTC")(config).eval()
    enliven(overt.attach(model, LIVE, overt.Bayesian())).save_pretrained(tmp_path)
    loaded, sound = overt.load(tmp_path), torch.randn(2, 400)
    assert torch.equal(loaded(sound).logits, model(sound).logits)


def test_a_speech_encoder_decoder_comes_back(tmp_path: Path) -> None:
    decoder = transformers.BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        is_decoder=True,
        add_cross_attention=True,
    )
    pair = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.Wav2Vec2Config(**SOUND), decoder
    )
    model = transformers.SpeechEncoderDecoderModel(pair).eval()
    enliven(overt.attach(model, LIVE)).save_pretrained(tmp_path)
    inputs = {"input_values": torch.randn(2, 400), "decoder_input_ids": torch.randint(5, 60, (2, 5))}
    assert torch.equal(overt.load(tmp_path)(**inputs).logits, model(**inputs).logits)


# Parts of models.


def test_a_part_of_an_attached_model_is_refused() -> None:
    model = attached(BERT, LIVE)
    expected = model(**inputs_of(BERT)).logits
    with pytest.raises(ValueError, match="this BertModel is a part of a model that has mechanisms attached"):
        overt.attach(model.bert, overt.Bayesian())
    assert torch.equal(model(**inputs_of(BERT)).logits, expected)
    overt.detach(model)
    assert torch.equal(model(**inputs_of(BERT)).logits, BERT.make()(**inputs_of(BERT)).logits)


def test_a_model_with_an_attached_part_is_refused() -> None:
    model = BERT.make()
    overt.attach(model.bert, LIVE)
    with pytest.raises(ValueError, match=r"a part of the model, bert \(BertModel\), already has mechanisms"):
        overt.attach(model, overt.Bayesian())
    overt.attach(overt.detach(model), overt.Bayesian())
    assert model.overt_state.mechanisms == (overt.Bayesian(),)


# Files that are not what they should be.


def test_a_plain_model_is_told_apart(tmp_path: Path) -> None:
    BERT.make().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds a plain model of type 'bert': load it with transformers"):
        overt.load(tmp_path)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=str(tmp_path)):
        overt.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        overt.load(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        overt.load(tmp_path / "nowhere")


def test_truncated_weights_are_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="damaged or truncated"):
        overt.load(saved)


def test_garbage_for_weights_is_named(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"\x00" * 500)
    with pytest.raises(ValueError, match="damaged or truncated"):
        overt.load(saved)


@pytest.mark.usefixtures("quiet")
def test_missing_mechanisms_are_named(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    kept = {key: value for key, value in tensors.items() if ".evolving." not in key}
    assert len(kept) < len(tensors)
    save_file(kept, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"2 tensors are missing .* such as bert.*overt.map.evolving"):
        overt.load(saved)


@pytest.mark.parametrize("missing", ["overt_state.step", "bert.encoder.layer.1.attention.self.query.weight"])
@pytest.mark.usefixtures("quiet")
def test_any_missing_tensor_is_named(saved: Path, missing: str) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors[missing]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"1 tensors are missing .* such as {missing}"):
        overt.load(saved)


@pytest.mark.parametrize("name", ["pipeline", "AutoModel", "GPT2LMHeadModel", "no_such_thing"])
def test_a_wrong_architecture_is_named(saved: Path, name: str) -> None:
    path = saved / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [name]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"{name}.* is not a model"):
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
        ({"where": {"encoder": 4}}, "config.json .* cannot be attached: where must be None, a kind"),
        ({"seed": "x"}, "config.json .* cannot be attached: seed must be a whole number"),
        ({"mechanisms": []}, "config.json .* cannot be attached: nothing to attach"),
        (
            {"mechanisms": [{"name": "Bayesian"}]},
            "tensors of mechanisms that its config.json does not mention",
        ),
    ],
)
@pytest.mark.usefixtures("quiet")
def test_a_wrong_config_is_named(saved: Path, change: dict[str, Any], message: str) -> None:
    path = saved / "config.json"
    config = json.loads(path.read_text())
    config["overt"].update(change)
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        overt.load(saved)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "config.json must be a JSON object, got list"),
        ('{"model_type": "overt", "overt": []}', "does not describe an attached model"),
    ],
)
def test_a_config_that_is_none_is_named(saved: Path, text: str, message: str) -> None:
    (saved / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        overt.load(saved)


@pytest.mark.parametrize("given", [{"hidden_size": 8}, "elsewhere"])
def test_a_config_that_is_given_must_be_one(saved: Path, given: Any) -> None:
    with pytest.raises(TypeError, match="config must be a PreTrainedConfig"):
        overt.load(saved, config=given)


def test_nothing_is_unpickled(saved: Path) -> None:
    # A file that pickle would run is not even looked at.
    (saved / "model.safetensors").rename(saved / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"safetensors|pytorch_model|weights"):
        overt.load(saved)
