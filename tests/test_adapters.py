"""Adapters of PEFT around attached models: saved whole, loaded whole, and never without a word."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import overt
from attached import enliven, loss_inputs, without_dropout
from families import FAMILIES, inputs_of
from overt.attaching.api import the_state

pytestmark = pytest.mark.slow
peft = pytest.importorskip("peft")
BY_NAME = {family.name: family for family in FAMILIES}
BERT = BY_NAME["BERT"]
# Both read the step: at step 0 the ramp has α = β = 0, and λ is 0.
MECHANISMS = (overt.Evolving(alpha=0.4, beta=0.4, ramp_steps=6), overt.Bayesian(k=2.0, rho=0.3))
FROZEN = "ignore:PEFT has frozen the mechanisms:UserWarning"
ORDERS = ["attach after", "attach first", "modules_to_save", "all-linear", "prompt"]


def make() -> Any:
    return without_dropout(BERT.make())


def attach(model: Any) -> Any:
    return enliven(overt.attach(model, *MECHANISMS, where={"encoder": [0, 1, 2]}, seed=4))


def wrap(model: Any, order: str) -> Any:
    if order == "prompt":
        config = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS")
    else:
        targets = "all-linear" if order == "all-linear" else ["query", "value"]
        saved = ["overt", "classifier"] if order == "modules_to_save" else None
        config = peft.LoraConfig(target_modules=targets, modules_to_save=saved, r=2, task_type="SEQ_CLS")
    return peft.get_peft_model(model, config)


def wrapped(order: str) -> Any:
    """An attached model with an adapter, whose mechanisms train."""
    if order in ("attach after", "prompt"):
        return attach(wrap(make(), order))
    model = wrap(attach(make()), order)
    for name, parameter in model.named_parameters():
        if ".overt." in name and "original_module" not in name:
            parameter.requires_grad_(True)
    return model


def train(model: Any, steps: int = 3) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    batch = loss_inputs(BERT, make())
    for _ in range(steps):
        model.train()(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def logits(model: Any) -> Any:
    return model(**inputs_of(BERT)).logits


def loss(model: Any) -> Any:
    """In training mode, where λ(t) and the noise read the step."""
    value = model.train()(**loss_inputs(BERT, make())).loss
    model.eval()
    return value


@pytest.mark.slow
@pytest.mark.filterwarnings(FROZEN)
@pytest.mark.parametrize("order", ORDERS)
def test_an_adapter_comes_back_whole(order: str, tmp_path: Path) -> None:
    model = train(wrapped(order))
    model.save_pretrained(tmp_path)
    make().save_pretrained(tmp_path / "base")
    written = json.loads((tmp_path / "overt.json").read_text())
    assert (written["step"], written["seed"], written["where"]) == (3, 4, {"encoder": [0, 1, 2]})
    mechanisms = [name for name in overt.attach(make(), *MECHANISMS).state_dict() if ".overt." in name]
    assert sorted(load_file(tmp_path / "overt.safetensors")) == sorted(mechanisms)
    expected, expected_loss = logits(model), loss(model)
    assert not torch.allclose(expected, logits(make()), atol=1e-3)
    for base in (
        make(),
        tmp_path / "base",
        overt.attach(make(), *MECHANISMS, where={"encoder": [0, 1, 2]}, seed=4),
    ):
        loaded = overt.load(tmp_path, base=base)
        assert isinstance(loaded, peft.PeftModel)
        assert not loaded.training
        assert int(the_state(loaded).step) == 3
        assert the_state(loaded).seed == 4
        assert torch.equal(logits(loaded), expected)
        assert torch.equal(loss(without_dropout(loaded)), expected_loss)


@pytest.mark.filterwarnings(FROZEN)
@pytest.mark.parametrize("order", ["attach after", "attach first", "modules_to_save"])
def test_pefts_own_loader_restores_mechanisms_of_an_attached_base(order: str, tmp_path: Path) -> None:
    model = train(wrapped(order))
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(attach(make()), tmp_path).eval()
    assert int(the_state(loaded).step) == 3
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.filterwarnings(FROZEN)
@pytest.mark.parametrize("order", ["attach after", "attach first", "modules_to_save"])
def test_a_loaded_adapter_trains_on_as_if_it_had_never_been_saved(order: str, tmp_path: Path) -> None:
    model = train(wrapped(order))
    model.save_pretrained(tmp_path)
    loaded = overt.load(tmp_path, base=make(), is_trainable=True)
    for one in (loaded, model):
        train(one, 2)
    assert int(the_state(loaded).step) == 5
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(overt.load(tmp_path / "again", base=make())), logits(model))


def test_without_is_trainable_nothing_trains(tmp_path: Path) -> None:
    wrapped("attach after").save_pretrained(tmp_path)
    assert not [name for name, p in overt.load(tmp_path, base=make()).named_parameters() if p.requires_grad]


def test_the_path_of_the_base_is_found_where_peft_wrote_it(tmp_path: Path) -> None:
    attach(make()).save_pretrained(tmp_path / "base")
    model = train(attach(wrap(overt.detach(overt.load(tmp_path / "base")), "attach after")), 1)
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(overt.load(tmp_path / "adapter")), logits(model))
    wrapped("attach after").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="does not name its base model: give base="):
        overt.load(tmp_path / "other")


def test_each_adapter_has_its_own_folder(tmp_path: Path) -> None:
    model = wrapped("modules_to_save")
    config = peft.LoraConfig(target_modules=["query"], modules_to_save=["overt"], r=2, task_type="SEQ_CLS")
    model.add_adapter("second", config)
    model.set_adapter("second")
    train(model)
    model.save_pretrained(tmp_path)
    first, second = (load_file(tmp_path / name / "overt.safetensors") for name in ("", "second"))
    assert first.keys() == second.keys()
    assert all(not torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(logits(overt.load(tmp_path / "second", base=make())), logits(model))


@pytest.mark.slow
def test_the_trainer_resumes_mechanisms_and_step(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    import transformers

    def run(resume: str | None) -> Any:
        model = wrapped("attach after")
        rows = [{**row, "labels": number % 2} for number, row in enumerate([{"input_ids": [5, 6, 7]}] * 8)]
        settings: dict[str, Any] = {
            "max_steps": 4,
            "save_steps": 2,
            "learning_rate": 1e-2,
            "report_to": "none",
        }
        settings |= {"use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
        given = transformers.TrainingArguments(str(tmp_path / str(bool(resume))), **settings)
        transformers.Trainer(model, given, train_dataset=rows).train(resume_from_checkpoint=resume)
        return model.eval()

    whole = run(None)
    resumed = run(str(tmp_path / "False" / "checkpoint-2"))
    assert int(the_state(resumed).step) == int(the_state(whole).step) == 4
    torch.testing.assert_close(logits(resumed), logits(whole))


@pytest.mark.parametrize("first", [True, False])
def test_transformers_own_adapters_are_saved_with_the_mechanisms(first: bool, tmp_path: Path) -> None:
    model = attach(make()) if first else make()
    model.add_adapter(peft.LoraConfig(target_modules=["query"], r=2))
    if not first:
        attach(model)
    train(model).save_pretrained(tmp_path)
    assert "never trained" in (tmp_path / "README.md").read_text()
    loaded = overt.load(tmp_path, base=make())
    assert int(the_state(loaded).step) == 3
    assert torch.equal(logits(loaded), logits(model))


def test_merged_adapters_save_as_a_whole_model(tmp_path: Path) -> None:
    model = train(wrapped("modules_to_save"))
    (tmp_path / "overt.json").write_text("{}")  # left by an adapter that was there
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = overt.load(tmp_path)
    assert int(loaded.overt_state.step) == 3
    torch.testing.assert_close(logits(loaded), logits(merged))


# What is told.


def test_wrapping_warns_of_mechanisms_that_it_freezes(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match="PEFT has frozen the mechanisms, which will not train: attach after"
    ):
        model = wrap(attach(make()), "attach first")
    model.save_pretrained(tmp_path)  # nothing trained yet
    train(model)
    with pytest.raises(
        ValueError, match=r"PEFT froze the mechanisms.*modules_to_save=\['overt'\].*requires_grad_\(True\)"
    ):
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(overt.load(tmp_path, base=make())), logits(model)), "all was written"


def test_mechanisms_that_trained_before_may_be_frozen(tmp_path: Path) -> None:
    train(attach(make())).save_pretrained(tmp_path / "base")
    model = train(wrap(overt.load(tmp_path / "base"), "attach first"))
    model.save_pretrained(tmp_path / "adapter")
    loaded = overt.load(tmp_path / "adapter", base=tmp_path / "base")
    assert int(the_state(loaded).step) == 6
    assert torch.equal(logits(loaded), logits(model))


def test_mechanisms_that_trained_and_were_frozen_then_are_saved(tmp_path: Path) -> None:
    model = train(wrapped("modules_to_save"))
    model.requires_grad_(False)
    model.save_pretrained(tmp_path)


def test_the_card_tells_how_to_load_and_what_peft_cannot(tmp_path: Path) -> None:
    for _ in range(2):
        wrapped("attach after").save_pretrained(tmp_path / "mine")
    card = (tmp_path / "mine" / "README.md").read_text()
    assert card.count('overt.load("mine", base=base)') == 1
    assert "loaded onto a base without them" in card


def test_the_inside_of_a_peft_model_is_refused() -> None:
    model = wrap(make(), "attach after")
    with pytest.raises(ValueError, match=r"is inside a PEFT model.*overt.attach\(peft_model, …\)"):
        overt.attach(model.get_base_model(), *MECHANISMS)
    attach(model)


def test_other_mechanisms_than_those_of_the_base_are_named(tmp_path: Path) -> None:
    wrapped("attach after").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"was trained with .*Bayesian.* but the base has .*alpha=0.2"):
        overt.load(tmp_path, base=overt.attach(make(), overt.Evolving(alpha=0.2)))


@pytest.mark.parametrize("lost", ["overt.safetensors", "adapter_model.safetensors"])
def test_a_missing_file_is_named(lost: str, tmp_path: Path) -> None:
    wrapped("attach after").save_pretrained(tmp_path)
    (tmp_path / lost).unlink()
    with pytest.raises(FileNotFoundError, match=lost):
        overt.load(tmp_path, base=make())


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("overt.json", '{"format": 1', "overt.json is damaged or truncated"),
        ("overt.json", "[]", "overt.json must be a JSON object, got list"),
        ("overt.json", '{"format": 1, "seed": 0, "step": -5}', "step in .*json must be .* 0, got -5"),
        ("overt.json", '{"format": 1, "seed": "x", "step": 0}', "seed in .*json must be .*, got 'x'"),
        ("overt.safetensors", "cut", "overt.safetensors is damaged or truncated"),
    ],
)
def test_a_damaged_file_is_named(file: str, text: str, message: str, tmp_path: Path) -> None:
    wrapped("attach after").save_pretrained(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        overt.load(tmp_path, base=make())


def test_the_seed_comes_back_onto_an_attached_base(tmp_path: Path) -> None:
    wrapped("attach after").save_pretrained(tmp_path)
    base = overt.attach(make(), *MECHANISMS, where={"encoder": [0, 1, 2]}, seed=9)
    assert the_state(overt.load(tmp_path, base=base)).seed == 4


def test_an_adapter_without_mechanisms_is_named(tmp_path: Path) -> None:
    wrap(make(), "attach after").save_pretrained(tmp_path)
    assert not (tmp_path / "overt.json").exists()
    with pytest.raises(FileNotFoundError, match=r"holds no overt.json"):
        overt.load(tmp_path, base=make())


def test_copies_save_themselves_and_detached_ones_as_ever(tmp_path: Path) -> None:
    model = train(wrapped("attach after"))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        train(copied, 1).save_pretrained(tmp_path / "copy")
        assert json.loads((tmp_path / "copy" / "overt.json").read_text())["step"] == 4
    overt.detach(model)
    model.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain" / "overt.json").exists()
