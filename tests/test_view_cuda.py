"""Pages and figures of models on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf

import overt
from families import TEXT, build
from overt.view.pack import unpack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_page_of_a_model_on_a_gpu_is_that_of_the_model_on_a_cpu(tmp_path: Path) -> None:
    model = build(hf.BertForSequenceClassification, lambda: hf.BertConfig(**TEXT))().eval()
    overt.attach(model, overt.Evolving(), overt.Bayesian())
    ids = torch.arange(1, 11).unsqueeze(0)
    pages = []
    for device in ("cpu", "cuda"):
        trace = overt.trace(model.to(device), ids.to(device), heads=True, parts=True, samples=3)
        pages.append(trace.html(tmp_path / f"{device}.html", importances=True, unk=1))
    one, two = (page.index["traces"][0] for page in pages)
    assert set(one["fields"]) == set(two["fields"])
    for name, layers in one["fields"].items():
        for here, there in zip(layers, two["fields"][name], strict=True):
            if here is None or there is None:
                assert here is there
                continue
            first, _ = unpack(here, pages[0].blocks[here["at"]])
            second, _ = unpack(there, pages[1].blocks[there["at"]])
            # What lies at the edge of the kept mass may be kept in one and not in the other.
            torch.testing.assert_close(first.sum(-1), second.sum(-1), atol=0.021, rtol=0.0)
            assert float((first - second).abs().median()) < 1e-4
    for mine, its in zip(one["importances"], two["importances"], strict=True):
        torch.testing.assert_close(
            torch.tensor(mine["values"]), torch.tensor(its["values"]), atol=1e-4, rtol=0.0
        )
