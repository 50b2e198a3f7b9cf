"""Attached models under the plain Trainer: the KL's weight, steps, resuming, and several processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, set_seed

import families
import overt
from attached import attached, without_dropout
from families import FAMILIES
from fresh import start_pair
from training import BOTH, Gradients, InOrder, Rows, arguments, train

pytestmark = pytest.mark.slow
BY_NAME = {family.name: family for family in FAMILIES}


def prior_gradients(noted: Gradients, step: int = 0) -> dict[str, Tensor]:
    """The prior's network feels the KL alone."""
    found = {name: grad for name, grad in noted.steps[step].items() if ".prior." in name}
    assert len(found) == 3 * families.LAYERS
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_the_kls_gradient_does_not_depend_on_accumulation(name: str, tmp_path: Path) -> None:
    _, whole = train(tmp_path, name, per_device_train_batch_size=8)
    _, parts = train(tmp_path, name, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    expected = prior_gradients(whole)
    assert max(grad.abs().max().item() for grad in expected.values()) > 1e-4
    for key, grad in prior_gradients(parts).items():
        torch.testing.assert_close(grad, expected[key], atol=1e-6, rtol=1e-4, msg=key)


@pytest.mark.slow
def test_steps_are_the_trainers_steps(tmp_path: Path) -> None:
    model, _ = train(
        tmp_path, "BERT", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3
    )
    assert int(model.overt_state.step) == 3


def test_evaluation_loss_is_the_tasks_own(tmp_path: Path) -> None:
    family = BY_NAME["BERT"]
    rows = Rows(language=False)
    plain = Trainer(family.make(), arguments(tmp_path), eval_dataset=rows).evaluate()
    model = overt.attach(family.make(), overt.Bayesian())
    ours = Trainer(model, arguments(tmp_path), eval_dataset=rows).evaluate()
    assert ours["eval_loss"] == pytest.approx(plain["eval_loss"], abs=1e-5)


@pytest.mark.parametrize("way", ["label smoothing", "compute_loss_func"])
def test_a_loss_that_the_model_does_not_make_is_warned_of(way: str, tmp_path: Path) -> None:
    def own(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits, labels)

    smoothing = 0.1 if way == "label smoothing" else 0.0
    settings = arguments(tmp_path, label_smoothing_factor=smoothing)
    model = attached(BY_NAME["BERT"], overt.Bayesian())
    trainer = Trainer(
        model,
        settings,
        train_dataset=Rows(language=False),
        compute_loss_func=own if way == "compute_loss_func" else None,
    )
    with pytest.warns(
        UserWarning, match=r"was not added to a loss: .*label smoothing.*overt\.penalty\(model, labels\)"
    ):
        trainer.train()


@pytest.mark.slow
def test_a_loss_function_of_ones_own_can_take_the_penalty(tmp_path: Path) -> None:
    found = []
    for size, accumulated in ((8, 1), (2, 4)):
        model = without_dropout(attached(BY_NAME["BERT"], *BOTH))
        noted = Gradients()

        def own(outputs: Any, labels: Tensor, num_items_in_batch: Any = None, model: Any = model) -> Tensor:
            loss = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
            return loss / num_items_in_batch + overt.penalty(model, labels)

        cut = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
        settings, rows = arguments(tmp_path, **cut), Rows(language=False)
        InOrder(model, settings, train_dataset=rows, compute_loss_func=own, callbacks=[noted]).train()
        found.append(noted.steps)
    for step in range(2):
        for key, grad in found[0][step].items():
            torch.testing.assert_close(found[1][step][key], grad, atol=1e-6, rtol=1e-3, msg=f"{step} {key}")


def test_without_labels_a_share_of_the_trainers_count_is_not_guessed() -> None:
    model = attached(BY_NAME["BERT"], overt.Bayesian()).train()
    row = Rows(language=False)[0]
    inputs = {key: row[key].unsqueeze(0) for key in ("input_ids", "attention_mask")}
    model(**inputs, num_items_in_batch=torch.tensor(4))
    with pytest.raises(ValueError, match=r"over several batches: .*overt\.penalty\(model, labels\)"):
        overt.penalty(model)
    assert overt.penalty(model, row["labels"].unsqueeze(0)).item() > 0.0


@pytest.mark.slow
def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    settings = {"per_device_train_batch_size": 4, "max_steps": 6, "save_strategy": "steps", "save_steps": 3}

    def run(folder: Path, resume: str | None) -> Any:
        set_seed(1)
        model = attached(BY_NAME["BERT"], overt.Evolving(ramp_steps=5), overt.Bayesian(k=5.0, rho=0.3))
        trainer = Trainer(model, arguments(folder, **settings), train_dataset=Rows(language=False))
        trainer.train(resume_from_checkpoint=resume)
        return model

    whole = run(tmp_path, None)
    again = run(tmp_path, str(tmp_path / "checkpoint-3"))
    assert int(again.overt_state.step) == 6
    for key, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    loaded = overt.load(tmp_path / "checkpoint-6")
    for key, value in whole.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key


NAMES = ["BERT", "Llama"]
SCRIPT = """
from pathlib import Path
import torch
torch.set_num_threads(1)
from accelerate import PartialState
from training import train
found = {{}}
for name in {names!r}:
    _, noted = train(Path({folder!r}), name, per_device_train_batch_size=2, **{settings!r})
    found[name] = noted.steps, noted.logs
if PartialState().is_main_process:
    torch.save(found, {result!r})
PartialState().wait_for_everyone()
PartialState().destroy_process_group()
"""


@pytest.fixture
def _as_torchrun_starts() -> Iterator[None]:
    """One thread, and oneDNN on: torch turns it off for good where bfloat16 once failed in it.

    With another product the same logits round otherwise, and a cell of these maps that lies 2e-7 from ReLU's
    corner falls on its other side, which gradients show at 7e-6.
    """
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = True
    yield
    torch.set_num_threads(threads)
    torch.backends.mkldnn.enabled = onednn


@pytest.mark.slow
@pytest.mark.usefixtures("_as_torchrun_starts")
def test_two_processes_have_the_gradients_of_one(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    result = tmp_path / "gradients.pt"
    code = SCRIPT.format(
        folder=str(tmp_path / "out"),
        names=NAMES,
        settings={"gradient_accumulation_steps": 2},
        result=str(result),
    )
    pair = start_pair(code)
    for process in pair:
        assert not (failed := process.ended()), failed
    found = torch.load(result, weights_only=True)
    for name in NAMES:
        pair, logs = found[name]
        # Batches of the same size: of a classifier's own loss the Trainer adds up means, so that matters.
        _, one = train(tmp_path, name, per_device_train_batch_size=2, gradient_accumulation_steps=4)
        _, whole = train(tmp_path, name, per_device_train_batch_size=8)
        assert len(pair) == len(one.steps) == 2
        for step in range(2):
            assert pair[step].keys() == one.steps[step].keys()
            # Forward passes are the same bits; gradients are added up in another order, with the rounding of
            # the largest. Adam then divides each by itself, which makes more of the rounding of small ones.
            rounding = (1e-6, 5e-6)[step] * max(float(grad.abs().max()) for grad in pair[step].values())
            for key, grad in pair[step].items():
                want = one.steps[step][key]
                torch.testing.assert_close(grad, want, atol=rounding, rtol=1e-4, msg=f"{step} {key}")
        for key, expected in prior_gradients(whole).items():
            torch.testing.assert_close(pair[0][key], expected, atol=1e-6, rtol=1e-4, msg=key)
        for entry, other in zip(logs, one.logs, strict=True):
            assert entry == pytest.approx(other, rel=1e-4), "LossLog averages over processes"
        record_property(
            "support", (8200, name, "two processes (DDP) equal to one, under the Trainer", "works")
        )


@pytest.mark.slow
def test_checkpoints_are_whole(tmp_path: Path) -> None:
    train(tmp_path, "BERT", save_strategy="steps", save_steps=2)
    config = json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())
    assert config["model_type"] == "overt (import overt.auto)"
    assert [one["name"] for one in config["overt"]["mechanisms"]] == ["Evolving", "Bayesian"]
    assert not list((tmp_path / "checkpoint-2").glob("*.part"))
