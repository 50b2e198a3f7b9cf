"""What the recipes on Abnar & Zuidema 2020 share: rank correlations of attention with importance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import overt
from overt.recipes._recipe import Grid, cell
from overt.recipes._training import Collate, E

if TYPE_CHECKING:
    from rich.console import Console

REFERENCES = {
    "blankout": "blank-out",
    "blankout-absolute": "absolute blank-out",
    "gradients": "gradients",
}
METHODS = ("raw", "rollout", "flow")  # of the paper's tables
PAPER = "Abnar & Zuidema 2020"

Numbers = dict[str, Any]
Batch = tuple[dict[str, Tensor], Tensor]  # a model's inputs, and the right answers


def correlated(
    model: nn.Module,
    ready: Sequence[Batch],
    console: Console,
    name: str,
    references: Sequence[str] = tuple(REFERENCES),
    unk: int | None = None,
    device: torch.device | None = None,
    tokenizer: Any = None,
    bootstrap: int = 1000,
) -> Numbers:
    """Spearman correlations of the first token's row with importance, for each reference, method and layer.

    For each reference and method: "mean" and "sd" over examples, "low" and "high", the bootstrap's 95 %
    interval of the mean, and "defined", how many examples have a correlation, each a list by layer; under
    "with_cls" the same with the CLS token ranked too.

    Args:
        model: in evaluation mode.
        ready: batches to measure on.
        console: to show progress on.
        name: to show it under.
        references: of `REFERENCES`.
        unk: id of the token that blank-out puts in.
        device: to measure on; where the model is if None.
        tokenizer: the model's, which knows special tokens.
        bootstrap: resamples.
    """
    from rich.progress import track

    from overt import judge

    model.eval()
    if device is not None:
        model.to(device)
    traces = (
        overt.trace(model, inputs, tokenizer=tokenizer)
        for inputs, _ in track(ready, f"{name}, tracing", console=console, transient=True)
    )
    found = judge.correlate(
        traces,
        [labels for _, labels in ready],
        methods=METHODS,
        references=tuple(references),
        query=0,
        unk=unk,
        bootstrap=bootstrap,
        seed=0,
    )
    numbers = _numbers(found, references)
    if found.with_cls is not None:
        numbers["with_cls"] = _numbers(found.with_cls, references)
    return numbers


def _numbers(found: Any, references: Sequence[str]) -> Numbers:
    def of(method: str, reference: str) -> dict[str, list[float]]:
        return {
            name: [float(value) for value in getattr(found, name)[method, reference]]
            for name in ("mean", "sd", "low", "high", "defined")
        }

    numbers: Numbers = {
        reference: {method: of(method, reference) for method in METHODS} for reference in references
    }
    return {"count": int(found.count), **numbers}


def classifier_batches(numbered: Iterable[Sequence[tuple[int, E]]], collate: Collate[E]) -> list[Batch]:
    """Batches of numbered examples as `correlated` wants them."""
    made = map(collate, numbered)
    return [({key: batch[key] for key in ("input_ids", "attention_mask")}, batch["labels"]) for batch in made]


def compared(
    title: str,
    columns: Sequence[str],
    published: dict[str, list[tuple[float, float] | None]],
    measured: dict[str, Numbers],
    between: dict[str, Numbers],
    with_cls: dict[str, Numbers] | None = None,
) -> Grid:
    """Published beside measured for one model, as mean±sd over examples, and the spread between seeds.

    Args:
        title: of the table.
        columns: its layers.
        published: method → (mean, sd) of each layer, None where the paper has none.
        measured: method → "mean" and "sd" by layer, the mean of the seeds.
        between: the same, their standard deviation.
        with_cls: as `measured`, with the CLS token ranked too.
    """
    rows: list[tuple[str, list[str]]] = []
    for method in METHODS:
        ours = measured[method]
        rows.append((f"{method}, published", [cell(*pair) if pair else "–" for pair in published[method]]))
        rows.append((f"{method}, measured", _cells(ours["mean"], ours["sd"])))
        if with_cls is not None:
            rows.append(
                (f"{method}, CLS ranked too", _cells(with_cls[method]["mean"], with_cls[method]["sd"]))
            )
        if any(value is not None for value in between[method]["mean"]):
            rows.append((f"{method}, sd of the seeds", _cells(between[method]["mean"])))
    return Grid(title, list(columns), rows)


def _cells(means: Sequence[float | None], deviations: Sequence[float | None] | None = None) -> list[str]:
    return [cell(*pair) for pair in zip(means, deviations or [None] * len(means), strict=True)]


def layers(count: int) -> list[str]:
    """L1, L2, … as the paper heads its columns."""
    return [f"L{layer}" for layer in range(1, count + 1)]
