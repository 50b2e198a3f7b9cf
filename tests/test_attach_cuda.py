"""Attached models on a GPU: the CPU's numbers, cached generation, models split between devices, inductor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import overt
from attached import LIVE, attached, enliven, loss_inputs, without_dropout
from families import FAMILIES as LIST
from families import inputs_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FAMILIES = {family.name: family for family in LIST}


@pytest.mark.parametrize("name", ["BERT", "Llama", "ViT"])
def test_an_attached_model_computes_on_the_gpu_what_it_does_on_the_cpu(name: str) -> None:
    family = FAMILIES[name]
    model = without_dropout(attached(family, LIVE, overt.Bayesian())).train()
    inputs = loss_inputs(family, model)
    grads = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        model.overt_state.seen.zero_()
        model(**{key: value.to(device) for key, value in inputs.items()}).loss.backward()
        grads.append({key: p.grad.cpu().clone() for key, p in model.named_parameters() if p.grad is not None})
    for key, grad in grads[0].items():
        torch.testing.assert_close(grads[1][key], grad, atol=2e-4, rtol=2e-3, msg=key)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "T5", "BART"])
@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_cached_generation_on_the_gpu_is_uncached_generation(name: str, settings: dict[str, Any]) -> None:
    family = FAMILIES[name]
    model = attached(family, LIVE, overt.Bayesian()).to("cuda")
    inputs = {k: v.to("cuda") for k, v in inputs_of(family).items() if not k.startswith("decoder")}
    limits: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    beams = {key: value for key, value in settings.items() if key == "num_beams"}
    slow = model.generate(**inputs, **limits, **beams, use_cache=False)
    assert torch.equal(model.generate(**inputs, **limits, **settings), slow)


def test_a_model_split_between_gpu_and_cpu_gives_the_same_outputs(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    family = FAMILIES["BERT"]
    model = attached(family, overt.Evolving(alpha=0.3, beta=0.3, ramp_steps=4), overt.Bayesian())
    model.overt_state.step += 2
    expected = model(**inputs_of(family)).logits
    model.save_pretrained(tmp_path)
    places = {"bert.embeddings": 0, "bert.encoder.layer.0": 0, "bert.encoder.layer.1": "cpu"}
    places |= {"bert.encoder.layer.2": 0, "bert.pooler": 0, "dropout": 0, "classifier": 0, "overt_state": 0}
    split = overt.load(tmp_path, device_map=places)
    inputs = {key: value.to("cuda") for key, value in inputs_of(family).items()}
    torch.testing.assert_close(split(**inputs).logits.cpu(), expected, atol=1e-4, rtol=1e-4)
    drawn = overt.posterior(split, inputs, samples=3)
    whole = overt.posterior(model, inputs_of(family), samples=3)
    torch.testing.assert_close(drawn.samples.cpu(), whole.samples, atol=1e-4, rtol=1e-4)
    record_property("support", (8300, "BERT", "`device_map` split between GPU and CPU", "works"))


def test_a_split_model_is_attached_to(tmp_path: Path) -> None:
    family = FAMILIES["BERT"]
    expected = attached(family, LIVE)(**inputs_of(family)).logits
    family.make().save_pretrained(tmp_path)
    places = {"bert.embeddings": 0, "bert.encoder.layer.0": "cpu", "bert.encoder.layer.1": 0}
    places |= {"bert.encoder.layer.2": "cpu", "bert.pooler": 0, "dropout": 0, "classifier": 0}
    model = enliven(overt.attach(type(family.make()).from_pretrained(tmp_path, device_map=places), LIVE))
    inputs = {key: value.to("cuda") for key, value in inputs_of(family).items()}
    torch.testing.assert_close(model(**inputs).logits.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_inductor_compiles_an_attached_training_step(name: str) -> None:
    family = FAMILIES[name]
    model = without_dropout(attached(family, LIVE, overt.Bayesian())).to("cuda").train()
    inputs = {key: value.to("cuda") for key, value in loss_inputs(family, model).items()}
    model(**inputs).loss.backward()
    expected = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.overt_state.seen.zero_()
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True)(**inputs).loss.backward()
    for key, grad in expected.items():
        found = dict(model.named_parameters())[key].grad
        torch.testing.assert_close(found, grad, atol=1e-3, rtol=1e-2, msg=key)
