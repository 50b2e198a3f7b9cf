"""Traces of models on a GPU: the same maps, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overt
from families import BY_NAME, inputs_of
from overt.models.seq2seq import Seq2Seq

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    "mixing", ["attention", "norm", "effective", "gradient", "relevance", "value-zeroing", "alti"]
)
@pytest.mark.parametrize("name", ["BERT", "Llama", "T5", "ViT"])
def test_a_trace_on_a_gpu_is_the_trace_on_the_cpu(name: str, mixing: Any) -> None:
    if name == "T5" and mixing in ("relevance", "alti"):
        return  # refused with cross-attention, which other tests claim
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


def test_a_recurrent_decoder_on_a_gpu_is_that_on_the_cpu() -> None:
    torch.manual_seed(0)
    model = Seq2Seq(12, 11, "marginal", embedding=6, encoder=5, decoder=7, score=4, init=0.9)
    ids = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 0]])
    inputs = {
        "input_ids": ids,
        "attention_mask": ids.ne(0).long(),
        "labels": torch.tensor([[4, 2], [2, -100]]),
    }
    here = overt.trace(model, inputs)
    blankout, gradients = here.blankout(unk=3), here.gradients()
    there = overt.trace(model.cuda(), inputs)
    assert there.cross[0].device.type == "cpu"
    torch.testing.assert_close(there.raw(), here.raw(), atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(there.blankout(unk=3), blankout, atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(there.gradients(), gradients, atol=1e-3, rtol=1e-2)
    assert torch.backends.cudnn.enabled
    assert overt.trace(model, ids).queries > 1
