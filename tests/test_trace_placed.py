"""Traces of models whose layers are offloaded, or on several devices: those of the model in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import overt
from families import BY_NAME, inputs_of

accelerate = pytest.importorskip("accelerate", reason="accelerate, of the extra train, is not installed")
BUDGETS = {"maps": 2**30, "states": 2**11}
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def check_same(placed: Any, plain: Any, inputs: Any, memory: int, atol: float = 1e-6) -> None:
    want = overt.trace(plain, inputs, memory=memory)
    got = overt.trace(placed, inputs, memory=memory)
    assert "queries and keys" in str(got) or memory > 2**11
    for method in ("raw", "rollout"):
        ours, theirs = getattr(got, method)(), getattr(want, method)()
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=0.0, atol=atol)
    torch.testing.assert_close(got.gradients().cpu(), want.gradients().cpu(), rtol=1e-4, atol=atol)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", ["BERT", "Llama"])
def test_weights_may_be_offloaded(name: str, budget: str, tmp_path: Path) -> None:
    family = BY_NAME[name]
    inputs = inputs_of(family)
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    atol = 1e-4 if here.type == "cuda" else 1e-6
    plain = family.make()
    offloaded = accelerate.cpu_offload(family.make(), execution_device=here)
    check_same(offloaded, plain, inputs, BUDGETS[budget], atol)
    on_disk = accelerate.disk_offload(family.make(), tmp_path, execution_device=here)
    check_same(on_disk, plain, inputs, BUDGETS[budget], atol)


@CUDA
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(
    ("name", "path"), [("BERT", "bert.encoder.layer"), ("Llama", "model.layers")], ids=["BERT", "Llama"]
)
def test_layers_may_be_on_several_devices(name: str, path: str, budget: str) -> None:
    family = BY_NAME[name]
    inputs = inputs_of(family)
    plain, split = family.make(), family.make()
    layers = split.get_submodule(path)
    places: dict[str, Any] = {f"{path}.{number}": "cpu" if number else 0 for number in range(len(layers))}
    outside = [
        key
        for key, module in split.named_modules()
        if key and not list(module.children()) and path not in key
    ]
    places |= dict.fromkeys(outside, 0)
    split = accelerate.dispatch_model(split, places, main_device=0, force_hooks=True)
    check_same(split, plain, inputs, BUDGETS[budget], atol=1e-4)
