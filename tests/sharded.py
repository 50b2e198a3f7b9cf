"""Attached models sharded over processes (FSDP2): what each process runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import overt
from attached import attached, without_dropout
from families import BY_NAME, WORDS

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


def run_sharded(rank: int, folder: Path, cases: Sequence[tuple[str, str]]) -> None:
    """What each of the processes runs, for some of `CASES`."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    share = EXAMPLES // PROCESSES
    for name, form in cases:
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
