"""Attached models sharded over two processes (FSDP2) against one process on the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overt
from families import BY_NAME, WORDS
from test_attach import attached, without_dropout

MECHANISMS = {
    "evolving": (overt.Evolving(alpha=0.3, beta=0.3),),
    "bayesian": (overt.Bayesian(k=5.0, kl_weight=1.0),),
    "both": (overt.Evolving(alpha=0.3, beta=0.3), overt.Bayesian(k=5.0, kl_weight=1.0)),
}
CASES = [("BERT", "evolving"), ("BERT", "bayesian"), ("BERT", "both"), ("Llama", "both")]
PROCESSES, EXAMPLES, STEPS = 2, 4, 2


def made(name: str, form: str) -> Any:
    return without_dropout(attached(BY_NAME[name], *MECHANISMS[form])).train()


def batch_of(name: str, step: int) -> dict[str, Tensor]:
    """As many labels in each half, so that the mean of the halves' losses is the whole's."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(5, WORDS, (EXAMPLES, 8), generator=generator)
    return {"input_ids": ids, "labels": ids if name == "Llama" else ids[:, 0] % 2}


def trained(model: Any, name: str, part: slice) -> list[dict[str, Tensor]]:
    """Loss and gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = []
    for step in range(STEPS):
        loss = model(**{key: value[part] for key, value in batch_of(name, step).items()}).loss
        loss.backward()
        found = {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
        steps.append({"loss": loss.detach(), **found})
        optimizer.step()
        optimizer.zero_grad()
    assert int(model.overt_state.step) == STEPS
    return steps


def whole(tensor: Any) -> Tensor:
    """A tensor, gathered from all processes where it is sharded."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def run_sharded(rank: int, folder: Path) -> None:
    """What each of the processes runs."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    share = EXAMPLES // PROCESSES
    for name, form in CASES:
        model = made(name, form)
        for layer in model.model.layers if name == "Llama" else model.bert.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        steps = trained(model, name, slice(rank * share, (rank + 1) * share))
        assert all(isinstance(held, DTensor) for held in model.overt_state.watched), "no whole weights"
        for step in steps:
            dist.all_reduce(step["loss"])
            step["loss"] /= PROCESSES
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        if rank == 0:
            torch.save((steps, weights), folder / f"{name} {form}.pt")
            model.save_pretrained(folder / f"{name} {form}", state_dict=weights)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    code = (
        "import pathlib, sys, test_attach_fsdp\n"
        "test_attach_fsdp.run_sharded(int(sys.argv[1]), pathlib.Path(sys.argv[2]))"
    )
    path = os.pathsep.join([str(Path(overt.__file__).parents[1]), str(Path(__file__).parent)])
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code, str(rank), str(folder)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(PROCESSES)
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert not any(process.returncode for process in processes), "\n".join(text[-2000:] for text in said)
    return folder


@pytest.mark.parametrize(("name", "form"), CASES)
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
