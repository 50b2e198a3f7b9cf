"""The KL's weight, and the parts of the loss: who sees them, when, and what they are."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

import overt
from attached import attached, loss_inputs, shallow, tokens_of, without_dropout
from families import BY_NAME, inputs_of
from overt.mechanisms.mechanism import as_dict, from_dict
from training import InOrder, Rows, arguments

pytestmark = pytest.mark.slow
BERT = BY_NAME["BERT"]


@dataclasses.dataclass(frozen=True)
class Weighing(overt.Mechanism):
    """Adds 1 to the loss, five times, in every attention or in those of one kind."""

    only: str | None = None

    def loss_weight(self, step: Tensor | None) -> float:
        del step
        return 5.0


class WeighingLayer(overt.MechanismLayer):
    adds = "cost"

    def logits(self, logits: Tensor, call: Any, chain: overt.Chain) -> Tensor:
        if self.config.only in (None, call.site.kind):
            chain.add_loss(call.site, logits.new_ones(logits.shape[0]), self.config)
        return logits


overt.register_mechanism(Weighing, WeighingLayer)

# --- The weight ---


def test_the_weight_multiplies_the_annealing() -> None:
    step = torch.tensor(3)
    assert overt.Bayesian(kl_weight=0.5).loss_weight(step) == 0.5
    annealed = overt.Bayesian(kl_weight=0.5, rho=0.2).loss_weight(step)
    torch.testing.assert_close(annealed, 0.5 * torch.sigmoid(torch.tensor(0.6)))


@pytest.mark.parametrize("wrong", [-0.1, float("nan"), float("inf"), True, "1", None])
def test_a_weight_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="kl_weight must be"):
        overt.Bayesian(kl_weight=wrong)


def test_settings_without_a_weight_are_of_before_there_was_one() -> None:
    saved = as_dict(overt.Bayesian(k=3.0))
    assert from_dict(saved) == overt.Bayesian(k=3.0)
    del saved["kl_weight"]
    assert from_dict(saved) == overt.Bayesian(k=3.0, kl_weight=1.0)


def test_pickled_settings_of_before_keep_their_weight() -> None:
    old = overt.Bayesian(k=3.0)
    state = {key: value for key, value in vars(old).items() if key != "kl_weight"}
    again = overt.Bayesian.__new__(overt.Bayesian)
    again.__setstate__(state)
    assert again == overt.Bayesian(k=3.0, kl_weight=1.0)
    assert pickle.loads(pickle.dumps(old)) == copy.deepcopy(old) == old


def test_a_saved_model_keeps_its_weight(tmp_path: Path) -> None:
    attached(BERT, overt.Bayesian(kl_weight=0.25)).save_pretrained(tmp_path)
    assert overt.load(tmp_path).overt_state.mechanisms == (overt.Bayesian(kl_weight=0.25),)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["overt"]["mechanisms"][0]["kl_weight"]  # as versions without one wrote it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert overt.load(tmp_path).overt_state.mechanisms == (overt.Bayesian(kl_weight=1.0),)


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("WC", {}),
        ("WF", {"prior": "fixed"}),
        ("LC", {"family": "lognormal"}),
        ("LF", {"family": "lognormal", "prior": "fixed"}),
        ("NO KL", {"prior": None}),
    ],
)
def test_the_papers_variants_have_the_kl_at_full_weight(variant: Any, settings: dict[str, Any]) -> None:
    expected = overt.Bayesian(kl_weight=1.0, k=100.0, rho=0.2, **settings)
    assert overt.Bayesian.paper(variant, k=100.0, rho=0.2) == expected


def test_what_a_variant_fixes_cannot_be_given() -> None:
    with pytest.raises(ValueError, match="variant must be one of 'WC', 'WF', 'LC', 'LF', 'NO KL'"):
        overt.Bayesian.paper("wc")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Bayesian\.paper\('LF'\) sets prior='fixed' and takes no other"):
        overt.Bayesian.paper("LF", prior="contextual")
    with pytest.raises(TypeError, match=r"sets kl_weight=1\.0"):
        overt.Bayesian.paper(kl_weight=0.1)


def test_the_official_preset_has_the_same_default() -> None:
    assert overt.Bayesian(preset="official").kl_weight == overt.Bayesian().kl_weight > 0.0


def test_recipes_that_stand_for_the_paper_have_full_weight() -> None:
    from overt.cli import sentiment
    from overt.recipes import bam_graphs, forms

    found = [one for rows in bam_graphs.SETTINGS.values() for one in rows.rows.values() if one is not None]
    found += [one for form in forms.FORMS.values() for one in form if isinstance(one, overt.Bayesian)]
    for name in ("Bayesian-paper", "Bayesian-official", "both-official"):
        found += [one for one in sentiment.FORMS[name] if isinstance(one, overt.Bayesian)]
    assert len(found) == 15 + 2 + 3
    assert {one.kl_weight for one in found} == {1.0}


def test_describe_shows_the_weight(capsys: pytest.CaptureFixture[str]) -> None:
    overt.describe(attached(BERT, overt.Bayesian(kl_weight=0.02)))
    assert "contextual prior, KL × 0.02" in capsys.readouterr().out


def test_at_weight_0_the_kl_is_there_and_has_no_gradient() -> None:
    model = without_dropout(attached(BERT, overt.Bayesian(kl_weight=0.0))).train()
    loss = model(**loss_inputs(BERT, model)).loss
    found = overt.losses(model)
    assert found.kl is not None
    assert found.kl > 1.0
    assert found.weight == 0.0
    assert torch.equal(loss.detach(), found.task)
    loss.backward()
    priors = [p for name, p in model.named_parameters() if "prior" in name]
    assert priors
    assert all(p.grad is None or not p.grad.any() for p in priors)


# --- The parts of the loss ---


@pytest.mark.parametrize("name", ["BERT", "Llama", "T5", "BART", "ViT", "ModernBERT"])
@pytest.mark.parametrize("padded", [False, True])
def test_an_evaluation_without_gradients_is_the_plain_model(
    name: str, padded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    family = BY_NAME[name]
    model = attached(family, overt.Bayesian())
    inputs = inputs_of(family, padded)
    with torch.no_grad(), caplog.at_level("DEBUG", logger="overt"):
        found = tokens_of(family, model, inputs)
        said = caplog.text
        with overt.naive():
            expected = tokens_of(family, model, inputs)
    # T5's scores have a position bias, and ModernBERT's layers windows.
    assert ("torch's own attention" in said) == (name != "T5")
    for (one, real), (other, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(one[real.bool()], other[real.bool()], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["BERT", "Llama"])
@pytest.mark.parametrize("rho", [None, 0.3])
def test_task_and_weighted_kl_make_up_the_loss(name: str, rho: float | None) -> None:
    family = BY_NAME[name]
    plain = family.make().eval()
    inputs = loss_inputs(family, plain)
    task = plain(**inputs).loss
    # With next to no noise the task's loss is the plain model's.
    mechanism = overt.Bayesian(k=1e6, kl_weight=0.1, rho=rho)
    model = without_dropout(overt.attach(copy.deepcopy(plain), mechanism)).train()
    model.overt_state.step.fill_(2)
    loss = model(**inputs).loss
    found = overt.losses(model)
    assert found.task is not None
    assert found.kl is not None
    assert found.weight is not None
    torch.testing.assert_close(found.task, task.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.task + found.weight * found.kl, loss.detach(), atol=1e-5, rtol=1e-5)
    assert float(found.weight) == pytest.approx(0.1 if rho is None else 0.1 / (1 + 2.718281828**-0.6))
    assert not found.task.requires_grad
    assert not found.kl.requires_grad


def test_evaluation_leaves_the_kl_out_and_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    kl = overt.mechanisms.bayesian.BayesianLayer._kl
    monkeypatch.setattr(
        "overt.mechanisms.bayesian.layer.BayesianLayer._kl",
        lambda self, *given: made.append("KL") or kl(self, *given),
    )
    model = attached(BERT, overt.Bayesian()).eval()
    inputs = loss_inputs(BERT, model)
    with torch.no_grad():
        plain = model(**inputs)
    assert made == []
    with pytest.raises(ValueError, match=r"was an evaluation, .*with overt\.with_kl\(model\)"):
        overt.kl(model)
    found = overt.losses(model)
    assert found.kl is None
    assert found.weight is None
    assert torch.equal(plain.loss, found.task)
    with torch.no_grad(), overt.with_kl(model), overt.with_kl(model):
        again = model(**inputs)
    assert made != []
    assert torch.equal(again.loss, plain.loss), "the evaluation's loss is the task's"
    assert overt.kl(model) > 1.0
    assert overt.losses(model).kl is not None
    with torch.no_grad():
        model(**inputs)
    with pytest.raises(ValueError, match=r"overt\.with_kl"):
        overt.kl(model)


def test_the_kl_of_an_evaluation_is_that_of_training_without_noise() -> None:
    model = without_dropout(attached(BERT, overt.Bayesian(k=1e6)))
    inputs = loss_inputs(BERT, model)
    model.train()(**inputs)
    expected = overt.kl(model)
    with torch.no_grad(), overt.with_kl(model.eval()):
        model(**inputs)
    torch.testing.assert_close(overt.kl(model), expected.detach(), atol=1e-4, rtol=1e-4)


def test_other_things_without_a_kl_are_told_apart() -> None:
    with pytest.raises(ValueError, match="nothing is attached that adds to the loss"):
        overt.kl(attached(BERT, overt.Bayesian(prior=None)))
    fresh = attached(BERT, overt.Bayesian())
    for ask in (overt.kl, overt.losses):
        with pytest.raises(ValueError, match="this thread has run no forward pass"):
            ask(fresh)
    with pytest.raises(ValueError, match="nothing is attached to this BertFor"):
        overt.losses(BERT.make())


def test_threads_have_their_own_losses_and_wishes() -> None:
    model = attached(BERT, overt.Bayesian()).eval()
    inputs = loss_inputs(BERT, model)
    asked, looked = threading.Event(), threading.Event()
    told: list[bool] = []

    def other() -> None:
        asked.wait()
        with torch.no_grad():
            model(**inputs)
        told.append(overt.losses(model).kl is None)
        looked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with torch.no_grad(), overt.with_kl(model):
        model(**inputs)
        asked.set()
        looked.wait()
        assert overt.losses(model).kl is not None, "another thread's forward is not this one's"
    thread.join()
    assert told == [True]


# Compilers look whether the loss, which a hook reads, has a gradient.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_models_tell_their_losses_too() -> None:
    model = without_dropout(overt.attach(shallow(BERT.make(), 1), overt.Bayesian(k=1e6)))
    inputs = loss_inputs(BERT, model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(**inputs)
    assert overt.losses(model).kl is None
    with torch.no_grad(), overt.with_kl(model):
        compiled(**inputs)
    kl = overt.losses(model).kl
    assert kl is not None
    model.train()
    loss = compiled(**inputs).loss
    found = overt.losses(model)
    torch.testing.assert_close(found.kl, kl, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.task + found.weight * found.kl, loss.detach(), atol=1e-5, rtol=1e-5)
    other: list[Any] = []
    thread = threading.Thread(target=lambda: other.append((compiled(**inputs), overt.losses(model))))
    thread.start()
    thread.join()
    assert overt.losses(model) is not None
    assert other[0][1].task is not None


def test_a_copy_has_no_losses_yet() -> None:
    model = attached(BERT, overt.Bayesian()).train()
    model(**loss_inputs(BERT, model))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match="no forward pass"):
            overt.losses(again)
        again(**loss_inputs(BERT, again))
        assert overt.losses(again).kl is not None


def test_terms_of_different_weights_have_their_common_one() -> None:
    model = without_dropout(attached(BERT, Weighing(), overt.Bayesian(kl_weight=0.1))).train()
    loss = model(**loss_inputs(BERT, model)).loss
    found = overt.losses(model)
    assert found.task is not None
    assert found.kl is not None
    assert isinstance(found.weight, Tensor)
    assert 0.1 < float(found.weight) < 5.0
    torch.testing.assert_close(found.task + found.weight * found.kl, loss.detach(), atol=1e-4, rtol=1e-4)


def test_a_model_of_overts_own_tells_its_losses() -> None:
    from overt.models.agreement import AgreementClassifier

    model = AgreementClassifier(11, [overt.Bayesian(kl_weight=0.2)], layers=2, heads=2, width=8).train()
    ids = torch.randint(0, 11, (3, 5))
    loss = model(ids, torch.ones_like(ids), torch.tensor([0, 1, 1]))["loss"]
    found = overt.losses(model)
    torch.testing.assert_close(found.task + found.weight * found.kl, loss.detach())
    model.eval()(ids, torch.ones_like(ids), torch.tensor([0, 1, 1]))
    assert overt.losses(model).kl is None


# --- The Trainer's logs ---


class Noted(TrainerCallback):
    """What other callbacks are shown."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        del args, state, control, kwargs
        self.logs.append(dict(logs))


def logged(folder: Path, name: str, **settings: Any) -> list[dict[str, float]]:
    family = BY_NAME[name]
    model = without_dropout(attached(family, overt.Bayesian(k=1e6, kl_weight=0.1)))
    rows = Rows(language=name != "BERT")
    settings = {"logging_steps": 1, "learning_rate": 0.0, "max_steps": 2, **settings}
    trainer = InOrder(model, arguments(folder, **settings), train_dataset=rows, callbacks=[overt.LossLog()])
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_logs_have_the_parts_averaged_over_accumulated_batches(name: str, tmp_path: Path) -> None:
    whole = logged(tmp_path, name, per_device_train_batch_size=8)
    parts = logged(tmp_path, name, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    both = logged(tmp_path, name, per_device_train_batch_size=8, logging_steps=2)
    assert len(whole) == len(parts) == 2
    assert len(both) == 1
    for entry, other in zip(whole, parts, strict=True):
        assert entry["loss"] == pytest.approx(entry["task_loss"] + 0.1 * entry["kl"], rel=1e-5)
        assert entry["kl_weight"] == pytest.approx(0.1)
        for key in ("task_loss", "kl", "kl_weight"):
            assert other[key] == pytest.approx(entry[key], rel=1e-4), key
    assert both[0]["kl"] == pytest.approx((whole[0]["kl"] + whole[1]["kl"]) / 2, rel=1e-6)


def test_reporters_see_the_parts_where_they_are_put_before_them(tmp_path: Path) -> None:
    model = attached(BERT, overt.Bayesian())
    noted = Noted()
    settings = arguments(tmp_path, logging_steps=1, max_steps=1, per_device_train_batch_size=2)
    trainer = Trainer(model, settings, train_dataset=Rows(language=False), callbacks=[noted])
    overt.LossLog.before_reporters(trainer)
    trainer.train()
    assert {"loss", "task_loss", "kl", "kl_weight"} <= noted.logs[0].keys()
    assert "kl" not in noted.logs[-1], "the summary of the training is no log of a loss"
    with pytest.raises(TypeError, match="takes a Hugging Face Trainer, got BertFor"):
        overt.LossLog.before_reporters(model)


def test_a_plain_model_logs_nothing_more(tmp_path: Path) -> None:
    settings = arguments(tmp_path, logging_steps=1, max_steps=1, per_device_train_batch_size=2)
    rows = Rows(language=False)
    trainer = Trainer(BERT.make(), settings, train_dataset=rows, callbacks=[overt.LossLog()])
    trainer.train()
    assert all("task_loss" not in entry for entry in trainer.state.log_history)


def test_without_a_kl_the_task_is_logged_alone(tmp_path: Path) -> None:
    model: nn.Module = attached(BERT, overt.Bayesian(prior=None))
    settings = arguments(tmp_path, logging_steps=1, max_steps=1, per_device_train_batch_size=2)
    rows = Rows(language=False)
    trainer = Trainer(model, settings, train_dataset=rows, callbacks=[overt.LossLog()])
    trainer.train()
    [entry] = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["task_loss"] == pytest.approx(entry["loss"], rel=1e-5)
    assert "kl" not in entry


class Peek(TrainerCallback):
    """Evaluates in between, as callbacks that write samples do."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control
        model = kwargs["model"]
        with torch.no_grad():
            model.eval()(**loss_inputs(BERT, model))
        model.train()


class InAThread(InOrder):
    """Runs forwards in a thread of their own, as DataParallel does."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        made: list[Any] = []
        work = super().compute_loss
        thread = threading.Thread(target=lambda: made.append(work(*args, **kwargs)))
        thread.start()
        thread.join()
        return made[0]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [InOrder, InAThread])
def test_logs_are_of_training_whatever_else_runs(trainer: type[Trainer], tmp_path: Path) -> None:
    expected = logged(tmp_path, "BERT", per_device_train_batch_size=8)
    model = without_dropout(attached(BERT, overt.Bayesian(k=1e6, kl_weight=0.1)))
    model(**loss_inputs(BERT, model))  # of this thread, and none of the training's
    settings = arguments(
        tmp_path, logging_steps=1, learning_rate=0.0, max_steps=2, per_device_train_batch_size=8
    )
    made = trainer(model, settings, train_dataset=Rows(language=False), callbacks=[Peek(), overt.LossLog()])
    made.train()
    found = [entry for entry in made.state.log_history if "loss" in entry]
    for entry, other in zip(found, expected, strict=True):
        for key in ("task_loss", "kl", "kl_weight"):
            assert entry[key] == pytest.approx(other[key], rel=1e-4), key


def test_a_batch_without_labels_leaves_the_mean_of_the_others(tmp_path: Path) -> None:
    family = BY_NAME["Llama"]
    rows = Rows(language=True, count=8)
    for row in rows.rows[:2]:
        row["labels"] = torch.full_like(row["labels"], -100)
    found = []
    for size, accumulated in ((8, 1), (2, 4)):
        model = without_dropout(attached(family, overt.Bayesian(k=1e6, kl_weight=0.1)))
        settings = arguments(
            tmp_path,
            logging_steps=1,
            learning_rate=0.0,
            max_steps=1,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulated,
        )
        trainer = InOrder(model, settings, train_dataset=rows, callbacks=[overt.LossLog()])
        trainer.train()
        found.append(next(entry for entry in trainer.state.log_history if "loss" in entry))
    assert found[1]["task_loss"] == pytest.approx(found[0]["task_loss"], rel=1e-4)
    assert found[1]["loss"] == pytest.approx(found[1]["task_loss"] + 0.1 * found[1]["kl"], rel=1e-4)


def test_chains_of_different_mechanisms_have_their_common_weight() -> None:
    family = BY_NAME["BART"]
    model = without_dropout(attached(family, Weighing(only="decoder"), overt.Bayesian(kl_weight=0.1))).train()
    loss = model(**loss_inputs(family, model)).loss
    found = overt.losses(model)
    torch.testing.assert_close(found.task + found.weight * found.kl, loss.detach(), atol=1e-4, rtol=1e-4)


def test_means_of_losses_that_ignore_the_count_are_taken_as_they_are() -> None:
    family = BY_NAME["ViT"]
    model = without_dropout(attached(family, overt.Bayesian())).train()
    model.config.problem_type = "multi_label_classification"
    inputs = inputs_of(family)
    labels = torch.rand(3, model.config.num_labels)
    loss = model(**inputs, labels=labels).loss
    expected = overt.losses(model)
    assert loss > expected.task
    model.overt_state.seen.zero_()
    model(**inputs, labels=labels, num_items_in_batch=torch.tensor(12))
    torch.testing.assert_close(overt.losses(model).task, expected.task)


def test_models_pickled_before_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from overt.attaching import state

    model = attached(BERT, overt.Bayesian())
    old = {**model.overt_state.__getstate__(), "last": state._Last()}
    del old["here"], old["trainings"]
    monkeypatch.setattr(state.AttachedState, "__getstate__", lambda self: {**old, "_modules": self._modules})
    written = pickle.dumps(model)
    monkeypatch.undo()
    again = pickle.loads(written)
    again.train()(**loss_inputs(BERT, again)).loss.backward()
    assert overt.losses(again).kl is not None
    assert "last" not in vars(again.overt_state)
