"""Cost of value zeroing, which batches copies of a layer's input, against one token at a time and blank-out.

The baseline is what a user can do with hooks: run each layer again for one token after another, on the states
of one pass, with sdpa. Both are timed in one run, on a BERT-base-sized model with random weights.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import overt


@torch.no_grad()
def by_hooks(model: Any, ids: Tensor) -> list[Tensor]:
    """Maps from hooks on value projections, one token at a time."""
    inputs: list[tuple[Any, ...]] = []
    layers = model.bert.encoder.layer
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append((args, kwargs)), with_kwargs=True
        )
        for layer in layers
    ]
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    for handle in handles:
        handle.remove()
    maps = []
    for number, layer in enumerate(layers):
        args, kwargs = inputs[number]
        whole, cells = states[number + 1], []
        for token in range(ids.shape[1]):

            def zero(_: Any, __: Any, output: Tensor, token: int = token) -> Tensor:
                output[:, token] = 0.0
                return output

            handle = layer.attention.self.value.register_forward_hook(zero)
            zeroed = layer(*args, **kwargs)
            handle.remove()
            zeroed = zeroed[0] if isinstance(zeroed, tuple) else zeroed
            cells.append(1.0 - F.cosine_similarity(zeroed.double(), whole.double(), dim=-1))
        distances = torch.stack(cells, dim=-1)
        maps.append(distances / distances.sum(dim=-1, keepdim=True))
    return maps


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """The median of several runs, after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    make: Any = BertForSequenceClassification
    model = make(BertConfig()).eval().to(options.device)
    place = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    table = Table(title=f"BERT-base, one text, seconds; {place}, torch {torch.__version__}")
    for column in (
        "tokens",
        "value zeroing",
        "by hooks",
        "ratio",
        "blank-out",
        "a plain trace",
        "difference",
    ):
        table.add_column(column, justify="right")
    for tokens in options.tokens:
        ids = torch.randint(5, 30000, (1, tokens)).to(options.device)
        ours = overt.trace(model, ids, mixing="value-zeroing")
        theirs = by_hooks(model, ids)
        difference = max(float((a - b.cpu()).abs().max()) for a, b in zip(ours.maps, theirs, strict=True))
        times = [
            seconds(run, options.device, options.repeats)
            for run in (
                lambda ids=ids: overt.trace(model, ids, mixing="value-zeroing"),
                lambda ids=ids: by_hooks(model, ids),
                lambda ours=ours: ours.blankout(unk=100),
                lambda ids=ids: overt.trace(model, ids),
            )
        ]
        zeroing, hooks, blankout, plain = times
        cells = [zeroing, hooks, hooks / zeroing, blankout, plain]
        table.add_row(str(tokens), *(f"{cell:.2f}" for cell in cells), f"{difference:.0e}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
