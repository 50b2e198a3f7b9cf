"""Attached models sharded over two processes (FSDP2) against one process on the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import overt
from fresh import start
from selection import covering
from sharded import CASES, PROCESSES, made, trained

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    asked = [item.callspec.params for item in request.session.items if item.module is request.module]
    cases = [(case["name"], case["form"]) for case in asked]
    code = "import pathlib, sharded\nsharded.run_sharded({}, pathlib.Path({!r}), {})"
    processes = [start(code.format(rank, str(folder), cases)) for rank in range(PROCESSES)]
    for process in processes:
        assert not (failed := process.ended()), failed
    return folder


@pytest.mark.parametrize(
    ("name", "form"),
    # "both" has the weights of either mechanism
    covering(CASES, [("BERT", "both"), ("Llama", "both")]),
)
def test_two_sharded_processes_have_losses_gradients_and_weights_of_one(
    name: str, form: str, sharded: Path
) -> None:
    model = made(name, form)
    expected = trained(model, name, slice(None))
    steps, weights = torch.load(sharded / f"{name} {form}.pt", weights_only=True)
    for got, want in zip(steps, expected, strict=True):
        assert got.keys() == want.keys()
        for key, value in want.items():
            torch.testing.assert_close(got[key], value, atol=2e-6, rtol=1e-4, msg=key)
    assert any(".overt." in key for key in weights)
    saved = overt.load(sharded / f"{name} {form}").state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[key], value, atol=2e-6, rtol=1e-4, msg=key)
        assert torch.equal(saved[key], weights[key]), key
