"""Traces of models on a GPU: the same maps, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overt
from families import BY_NAME, inputs_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("mixing", ["attention", "norm", "effective", "gradient", "value-zeroing"])
@pytest.mark.parametrize("name", ["BERT", "Llama", "T5", "ViT"])
def test_a_trace_on_a_gpu_is_the_trace_on_the_cpu(name: str, mixing: Any) -> None:
    family = BY_NAME[name]
    inputs = inputs_of(family, padded=family.pads)
    model = family.make()
    unk = {} if name == "ViT" else {"unk": 3}
    here = overt.trace(model, inputs, mixing=mixing)
    blankout, gradients = here.blankout(**unk), here.gradients()
    there = overt.trace(model.cuda(), inputs, mixing=mixing)
    assert all(cells.device.type == "cpu" for cells in there.maps)
    for method in ("raw", "rollout", "flow"):
        ours, theirs = getattr(there, method)(), getattr(here, method)()
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(there.blankout(**unk), blankout, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(there.gradients(), gradients, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(here.blankout(**unk), blankout, atol=1e-3, rtol=1e-2)  # its model has moved
