"""What limits attention flow from CLS: for each layer, the share of words whose flow is a first-layer number.

It compares the flow with two cuts, of levels with their residual: the word's own column of the first level
(at most 1), and CLS's own column, Σ_q (1 − A_q[CLS, CLS]) + A₁[CLS, word]. If a word's flow equals the first,
nothing else affects it; if it equals the second, such words are ranked by the first layer's row.

A Hugging Face encoder, on SST-2's dev sentences or those in the package:

    python benchmarks/flow_limits.py --model PATH [--data DIR]

A model that `overt reproduce flow-table-1` trained:

    python benchmarks/flow_limits.py --run runs/flow-agreement/plain/seed-0 --data DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import overt
from overt.cli.inputs import open_model
from overt.data import linzen, sst2
from overt.data.batching import batches
from overt.recipes import flow_tables
from overt.recipes.flow_measure import classifier_batches

NEAR = 1e-9


def traces_of_model(path: str, data: Path | None, count: int) -> Iterator[overt.Trace]:
    """Traces of SST-2's dev sentences, or of the package's own sentences."""
    _, rows, what = sst2.load_rows(data, seed=0)
    print(f"{path}, {min(count, len(rows))} sentences of {what}")
    yield overt.trace(open_model(path), [sentence for sentence, _ in rows[:count]])


def traces_of_run(folder: Path, data: Path | None, count: int) -> Iterator[overt.Trace]:
    """Traces of test sentences through a model that `overt reproduce flow-table-1` trained."""
    corpus = linzen.load(data)
    model = flow_tables.load_trained(folder, corpus)
    corpus = flow_tables.corpus_for(folder.parent.name, corpus)
    print(f"{folder.parent.name}, {folder.name}, {min(count, len(corpus.test))} test sentences")
    numbered = batches(corpus.test[:count], flow_tables.TRACED, seed=0)
    for inputs, _ in classifier_batches(numbered, corpus.collate):
        yield overt.trace(model, inputs)


def shares(trace: overt.Trace) -> Iterator[tuple[int, int, int, int]]:
    """Layer, words limited by their own column, words limited by CLS's, and all words except CLS."""
    flows = trace.flow(queries=0)[:, :, 0]
    for example in range(len(trace)):
        real = trace.mask[example]
        levels = [_level(cells[example][real][:, real]) for cells in trace.maps]
        own_column = levels[0].sum(dim=0).clamp(max=1.0)
        total = torch.zeros((), dtype=torch.float64)
        for layer, level in enumerate(levels):
            total = total + (1.0 - level[0, 0] if layer else 0.0)
            flow = flows[example, layer][real][1:]
            by_word = (flow - own_column[1:]).abs() < NEAR
            by_cls = (flow - (total + levels[0][0])[1:]).abs() < NEAR
            yield layer, int(by_word.sum()), int(by_cls.sum()), len(flow)


def _level(cells: Tensor) -> Tensor:
    mixed = 0.5 * cells.double() + 0.5 * torch.eye(len(cells), dtype=torch.float64)
    return mixed / mixed.sum(dim=-1, keepdim=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", help="a Hugging Face encoder: a folder, or a name on the hub")
    what.add_argument("--run", type=Path, help="folder of a model that flow-table-1 trained")
    parser.add_argument("--data", type=Path, help="folder with data sets; default: OVERT_DATA")
    parser.add_argument("--sentences", type=int, default=256)
    options = parser.parse_args()
    source = (
        traces_of_model(options.model, options.data, options.sentences)
        if options.model
        else traces_of_run(options.run, options.data, options.sentences)
    )
    totals: dict[int, list[int]] = {}
    for trace in source:
        for layer, *counts in shares(trace):
            totals[layer] = [old + new for old, new in zip(totals.get(layer, [0] * 3), counts, strict=True)]
    print("layer  by the word's column  by CLS's own column")
    for layer, (by_word, by_cls, words) in totals.items():
        print(f"L{layer + 1:<5} {by_word / words:20.3f} {by_cls / words:20.3f}")


if __name__ == "__main__":
    main()
