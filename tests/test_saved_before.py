"""Files that commit 8f5dea0 saved load, and give the numbers that they gave then (`fixtures/make.py`)."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import overt
from fixtures.make import (
    MODELS,
    MODULES,
    NODE_TRACES,
    QUESTIONS,
    STEPS,
    TRACES,
    Numbers,
    Record,
    asked,
    evaluated,
    fused_in,
    held_by,
    held_by_nodes,
    loaded_module,
    mechanisms_of,
    read,
    said_of,
    said_of_nodes,
    shapes,
    trained,
)
from overt.graphs import NodeTrace

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent / "fixtures"
# Another CPU's instructions (AVX2 for AVX-512) move numbers by up to 1e-6; other noise, by 1e-3 at least.
TOLERANCES = {"evaluation": 5e-6, "posterior": 1e-5, "generation": 1e-5, "training": 1e-5}
TOLERANCES |= {"trace": 1e-6, "loaded": 1e-6, "traced": 1e-5}
EACH_MODEL = pytest.mark.parametrize("name", MODELS)
EACH_MODULE = pytest.mark.parametrize("name", MODULES)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Models as small as these are slower by several, which wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def loaded(name: str) -> Any:
    """A saved model, for tests that leave it as it is."""
    return overt.load(FOLDER / "models" / name)


def expected(group: str, name: str) -> Record:
    return read(FOLDER / group / name / "expected.safetensors")


def masks_in(given: Numbers) -> list[Tensor]:
    """Which tokens of what a model was given are no padding, (batch, length) each."""
    return [value.bool() for name, value in given.items() if name.endswith("attention_mask")]


def without_padding(value: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Logits (…, batch, length, words) or maps (batch, …, query, key) with zeros in rows of padding.

    Those held what zero outputs of attention lead to; they are the plain model's now.
    """
    for mask in masks:
        batch, length = mask.shape
        if value.dim() < 3 or not value.is_floating_point() or value.shape[-2] != length:
            continue
        if value.shape[-3] == batch:
            return value.masked_fill(~mask.unsqueeze(-1), 0.0)
        if value.shape[0] == batch:
            return value.masked_fill(~mask.view(batch, *[1] * (value.dim() - 3), length, 1), 0.0)
    return value


def assert_same(
    found: Numbers, wanted: Numbers, tolerance: float | None = None, masks: Sequence[Tensor] = ()
) -> None:
    """The same names, shapes and types, and numbers within their kind's tolerance; whole ones exactly.

    Where masks are given, rows of padding are not looked at.
    """
    assert found.keys() == wanted.keys()
    found = {name: without_padding(value, masks) for name, value in found.items()}
    wanted = {name: without_padding(value, masks) for name, value in wanted.items()}
    for name, value in wanted.items():
        within = TOLERANCES[name.split(".")[0]] if tolerance is None else tolerance
        within = within if value.is_floating_point() else 0.0
        torch.testing.assert_close(
            found[name],
            value,
            atol=within,
            rtol=within,
            msg=lambda text, name=name: f"{name}: {text}",  # type: ignore[misc]
        )


# Attached models.


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in MODELS for kind in MODELS[name].asked])
def test_a_saved_model_gives_the_numbers_it_gave(name: str, kind: str) -> None:
    record = expected("models", name)
    model = overt.load(FOLDER / "models" / name) if kind == "training" else loaded(name)
    found = QUESTIONS[kind](MODELS[name], model, record.given)
    assert_same(found, record.part(kind), masks=masks_in(record.given))


@EACH_MODEL
def test_a_saved_model_has_its_parameters_by_their_names_in_their_order(name: str) -> None:
    model, record = loaded(name), expected("models", name)
    state = model.state_dict()
    assert shapes(mechanisms_of(model)) == record.about["mechanisms"]
    assert int(state["overt_state.step"]) == record.about["step"] == STEPS
    for key, value in load_file(FOLDER / "models" / name / "model.safetensors").items():
        assert torch.equal(state[key], value), key


@EACH_MODEL
def test_a_saved_model_says_what_is_attached(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    overt.describe(loaded(name))
    said = capsys.readouterr().out
    assert f"step {STEPS}\n" in said
    for mechanism in MODELS[name].mechanisms:
        assert str(mechanism) in said


@EACH_MODEL
def test_a_saved_model_can_be_saved_and_loaded_again(name: str, tmp_path: Path) -> None:
    loaded(name).save_pretrained(tmp_path)
    spec, record, again = MODELS[name], expected("models", name), overt.load(tmp_path)
    masks = masks_in(record.given)
    assert_same(evaluated(spec, again, record.given), record.part("evaluation"), masks=masks)
    assert_same(trained(spec, again, record.given), record.part("training"), masks=masks)


@EACH_MODEL
def test_the_weights_of_a_saved_model_fit_one_newly_attached_to(name: str) -> None:
    spec, record = MODELS[name], expected("models", name)
    model = overt.attach(spec.make(), *spec.mechanisms, where=spec.where, seed=spec.seed)
    weights = load_file(FOLDER / "models" / name / "model.safetensors")
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert unexpected == []
    assert not [key for key in missing if "overt" in key], "files leave out tied weights only"
    found = evaluated(spec, model, record.given)
    assert_same(found, record.part("evaluation"), masks=masks_in(record.given))


# Overt's own modules.


@EACH_MODULE
def test_a_saved_state_gives_the_numbers_it_gave(name: str) -> None:
    record = expected("modules", name)
    assert_same(asked(MODULES[name], loaded_module(name, FOLDER), record.given), record.numbers)


@EACH_MODULE
def test_a_module_has_its_parameters_by_their_names_in_their_order(name: str) -> None:
    about, module = expected("modules", name).about, loaded_module(name, FOLDER)
    assert shapes(module.state_dict()) == about["state"]
    assert [key for key, _ in module.named_parameters()] == about["parameters"]


# Traces.


@pytest.mark.parametrize("name", TRACES)
def test_a_saved_trace_holds_and_tells_what_it_did(name: str) -> None:
    record = expected("traces", name)
    trace = overt.Trace.load(FOLDER / "traces" / name / "trace.safetensors")
    wanted = record.part("trace")
    about = dict(record.about)
    if trace.draws:
        # The file has the samples' mean and no map of the mean of the weights, which the fused part was.
        assert trace.averaged
        assert "whose mean the maps are" in repr(trace)
        about["parts"] = {part: count for part, count in about["parts"].items() if "fused" not in part}
    else:
        assert not trace.averaged
        wanted |= record.part("loaded")
    assert_same(held_by(trace) | fused_in(trace, "loaded"), wanted)
    assert said_of(trace) == about


def averaged(trace: overt.Trace) -> overt.Trace:
    """The trace with the samples' mean for its maps, as traces with samples were before."""
    if not trace.draws:
        return trace
    means = {
        name: [torch.stack(maps).mean(dim=0) for maps in zip(*groups, strict=True)]
        for name in ("maps", "encoder_maps", "cross")
        if (groups := [getattr(draw, name) for draw in trace.draws])
    }
    return replace(trace, **means)


def traced_masks(name: str, trace: overt.Trace) -> list[Tensor]:
    """Which tokens of a trace are no padding; of a pair of texts, those that its model was given."""
    if name == "t5-parts-samples":
        return masks_in(MODELS["t5-evolving-bayesian"].given())
    return [] if trace.mask is None else [trace.mask.bool()]


@pytest.mark.parametrize("name", [name for name in TRACES if "samples" in name])
def test_maps_are_those_of_the_mean_of_the_weights_with_samples_too(name: str) -> None:
    record, trace = expected("traces", name), TRACES[name](FOLDER)
    assert_same(fused_in(trace, "traced"), record.part("traced"), 1e-5, traced_masks(name, trace))
    for prefix, maps in (("", trace.maps), ("encoder ", trace.encoder_maps), ("cross ", trace.cross)):
        for own, fused in zip(maps, trace.parts.get(f"{prefix}fused", maps), strict=True):
            assert fused is None or torch.equal(own, fused)


@pytest.mark.parametrize("name", NODE_TRACES)
def test_a_saved_trace_of_nodes_holds_and_tells_what_it_did(name: str) -> None:
    record = expected("traces", name)
    trace = NodeTrace.load(FOLDER / "traces" / name / "trace.safetensors")
    assert_same(held_by_nodes(trace), record.numbers)
    assert said_of_nodes(trace) == record.about


@pytest.mark.parametrize("name", [name for name in TRACES if name != "vit-effective"])
def test_a_saved_model_is_traced_as_it_was(name: str) -> None:
    record, trace = expected("traces", name), TRACES[name](FOLDER)
    found = held_by(averaged(trace)) | fused_in(trace, "traced")
    wanted = record.part("trace") | record.part("traced")
    assert_same(found, wanted, 1e-5, traced_masks(name, trace))
    assert said_of(trace) == record.about


@pytest.mark.parametrize("name", NODE_TRACES)
def test_a_saved_graph_network_is_traced_as_it_was(name: str) -> None:
    record, trace = expected("traces", name), NODE_TRACES[name](FOLDER)
    assert_same(held_by_nodes(trace), record.numbers, 1e-5)
    assert said_of_nodes(trace) == record.about


# That a difference would be seen.


def test_every_fixture_is_asked() -> None:
    names = {"models": MODELS, "modules": MODULES, "traces": {**TRACES, **NODE_TRACES}}
    for group, known in names.items():
        assert {path.name for path in (FOLDER / group).iterdir()} == set(known)


ALL = [("models", name) for name in MODELS] + [("modules", name) for name in MODULES]
ALL += [("traces", name) for name in (*TRACES, *NODE_TRACES)]


def disturbed(value: Tensor) -> list[Tensor]:
    """What is not that value: the last number changed by a little, another shape, another type, no number."""
    changed = value.clone()
    last = changed.view(-1)[-1:]
    if value.dtype == torch.bool:
        last.logical_not_()
    else:  # the largest tolerance is 1e-5
        last += 2e-5 * float(1.0 + value.abs().max()) if value.is_floating_point() else 1
    none = [torch.full_like(value, torch.nan)] if value.is_floating_point() else []
    return [changed, value.unsqueeze(0), value.to(torch.complex64), *none]


@pytest.mark.parametrize(("group", "name"), ALL)
def test_a_disturbed_number_is_noticed(group: str, name: str) -> None:
    wanted = expected(group, name).numbers
    assert_same(wanted, wanted)
    for key, value in wanted.items():
        for wrong in disturbed(value):
            with pytest.raises(AssertionError, match=re.escape(key)):
                assert_same({key: wrong}, {key: value})


def test_a_number_too_few_or_too_many_is_noticed() -> None:
    one, other = {"evaluation.logits": torch.ones(2)}, {"evaluation.kl": torch.ones(())}
    for found, wanted in ((one, one | other), (one | other, one), (one, other)):
        with pytest.raises(AssertionError):
            assert_same(found, wanted)


def changed_config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["overt"])
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def changed_setting(number: int, **settings: Any) -> Callable[[Path], None]:
    return changed_config(lambda block: block["mechanisms"][number].update(settings))


def changed_weights(key: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        [found] = [name for name in tensors if name.endswith(key)]
        tensors[found] = change(tensors[found])
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


BERT, SYNTHESIZER, T5 = "bert-evolving-bayesian", "bert-synthesizer-evolving", "t5-evolving-bayesian"
LLAMA, ALBERT = "llama-evolving-bayesian", "albert-evolving-bayesian"
STEP, OUTER = "overt_state.step", "layer.1.attention.self.overt.map.synthesizer.outer"
CHANGES: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "seed": (BERT, "training", changed_config(lambda block: block.update(seed=12))),
    "step": (BERT, "training", changed_weights(STEP, lambda step: step + 1)),
    "step of a sample": (LLAMA, "posterior", changed_weights(STEP, lambda step: step + 1)),
    "step of a ramp": (BERT, "evaluation", changed_weights(STEP, lambda step: step + 1)),
    "alpha": (BERT, "evaluation", changed_setting(0, alpha=0.301)),
    "beta while decoding": (LLAMA, "generation", changed_setting(0, beta=0.301)),
    "k": (BERT, "posterior", changed_setting(1, k=3.01)),
    "rho": (BERT, "training", changed_setting(1, rho=0.21)),
    "kl_weight, which counted as 1": (BERT, "training", changed_setting(1, kl_weight=0.99)),
    "sigma": (T5, "training", changed_setting(1, sigma=0.501)),
    "prior": (T5, "evaluation", changed_setting(1, prior_mu=-1.01)),
    "preset": (ALBERT, "evaluation", changed_setting(1, preset=None)),
    "convolution": (BERT, "evaluation", changed_weights("evolving.weight", lambda kernel: 1.01 * kernel)),
    "prior's network": (
        ALBERT,
        "training",
        changed_weights("prior.outer.weight", lambda outer: 1.01 * outer),
    ),
    "synthesizer": (SYNTHESIZER, "training", changed_weights(OUTER, lambda outer: 1.01 * outer)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_what_was_saved_is_noticed(change: str, tmp_path: Path) -> None:
    name, kind, apply = CHANGES[change]
    folder = tmp_path / name
    shutil.copytree(FOLDER / "models" / name, folder)
    apply(folder)
    record = expected("models", name)
    found = QUESTIONS[kind](MODELS[name], overt.load(folder), record.given)
    with pytest.raises(AssertionError, match=kind):
        assert_same(found, record.part(kind), masks=masks_in(record.given))


def test_fewer_places_than_were_saved_are_an_error(tmp_path: Path) -> None:
    folder = tmp_path / T5
    shutil.copytree(FOLDER / "models" / T5, folder)
    changed_config(lambda block: block.update(where={"encoder": [1, 2]}))(folder)
    with pytest.raises(ValueError, match=r"tensors of mechanisms that its config.json does not mention"):
        overt.load(folder)
