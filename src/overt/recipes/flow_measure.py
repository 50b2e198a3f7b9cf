"""What the recipes on Abnar & Zuidema 2020 share: rank correlations of attention with importance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import overt
from overt.data.batching import Collate, E
from overt.recipes._recipe import Grid, cell

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
    interval of the mean over the examples of this one model, and "defined", how many examples have a
    correlation, each a list by layer. Under "common" the same over the examples that all methods rank; under
    "with_cls" all of this with the CLS token ranked too.

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
    numbers = {"count": int(found.count), **numbers}
    if found.common is not None:
        numbers["common"] = _numbers(found.common, references)
    return numbers


def comparable(numbers: Numbers) -> Numbers:
    """What `correlated` gave, over the examples that all methods rank.

    Results that were measured before those were told apart have each method's own, as `ranked` says.
    """
    found: Numbers = numbers.get("common") or numbers
    return found


def ranked(seeds: Sequence[Numbers], reference: str) -> list[tuple[str, list[str]]]:
    """Rows of a table that say, layer by layer, how many examples its means are over, where not over all.

    Args:
        seeds: what `correlated` gave for each seed.
        reference: whose.
    """
    rows = _ranked(seeds, reference)
    if all("with_cls" in numbers for numbers in seeds):
        more = _ranked([numbers["with_cls"] for numbers in seeds], reference)
        rows += [(f"{name}, CLS ranked too", cells) for name, cells in more]
    return rows


def _ranked(seeds: Sequence[Numbers], reference: str) -> list[tuple[str, list[str]]]:
    count, rows = int(seeds[0]["count"]), []
    for method in METHODS:
        found = [comparable(numbers)[reference][method]["defined"] for numbers in seeds]
        rows.append((f"{method}, n of {count:,}", [_range(layer) for layer in zip(*found, strict=True)]))
    if len({tuple(cells) for _, cells in rows}) > 1:  # measured before methods had equal examples
        return rows
    cells = rows[0][1]
    return [] if set(cells) == {f"{count:,}"} else [(f"n of {count:,}", cells)]


def _range(numbers: Iterable[float]) -> str:
    """The least and the greatest of whole numbers, or the one that all are."""
    least, most = int(min(found := list(numbers))), int(max(found))
    return f"{least:,}" if least == most else f"{least:,}–{most:,}"


def sentences_note(by_form: dict[str, list[Numbers]], reference: str) -> str:
    """Which sentences the means are over, in words.

    Args:
        by_form: name of a model → what `correlated` gave for each of its seeds.
        reference: whose.
    """
    every = [numbers for seeds in by_form.values() for numbers in seeds]
    count = int(every[0]["count"])
    note = (
        "A sentence of one word has no rank correlation, and neither has a row of equal values, which flow "
        "sometimes gives. "
    )
    if all(numbers.get("common") for numbers in every):
        ranges = {
            form: _range(n for numbers in seeds for n in numbers["common"][reference]["raw"]["defined"])
            for form, seeds in by_form.items()
        }
        if set(ranges.values()) == {f"{count:,}"}:
            return f"{note}Raw attention, rollout and flow all rank each of the {count:,} sentences."
        note += "Means are over the sentences that raw attention, rollout and flow all rank in one model"
        told = [f"{form} {text}" if form else text for form, text in ranges.items()]
        return f"{note}, of {count:,} in all: {', '.join(told)}, by seed and layer."
    own = {
        method: _range(n for numbers in every for n in numbers[reference][method]["defined"])
        for method in METHODS
    }
    if len(set(own.values())) == 1:
        return f"{note}Raw attention, rollout and flow all rank {own['raw']} of the {count:,} sentences."
    told = [f"{method} {text}" for method, text in own.items()]
    return (
        f"{note}This run was measured before methods were compared on the same sentences: each row averages "
        f"those that its own method ranks, of {count:,} in all: {', '.join(told)}, by form, seed and layer."
    )


INTERVALS = (
    "The 95 % intervals in the result file (low and high, under per_seed) are bootstrapped over the "
    "sentences of one trained model: they do not cover other seeds."
)


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
    sizes: Sequence[tuple[str, list[str]]] = (),
) -> Grid:
    """Published beside measured for one model, as mean±sd over examples, and the spread between seeds.

    Args:
        title: of the table.
        columns: its layers.
        published: method → (mean, sd) of each layer, None where the paper has none.
        measured: method → "mean" and "sd" by layer, the mean of the seeds.
        between: the same, their standard deviation.
        with_cls: as `measured`, with the CLS token ranked too.
        sizes: rows that say how many examples there are, as from `ranked`.
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
    return Grid(title, list(columns), [*rows, *sizes])


def _cells(means: Sequence[float | None], deviations: Sequence[float | None] | None = None) -> list[str]:
    return [cell(*pair) for pair in zip(means, deviations or [None] * len(means), strict=True)]


def layers(count: int) -> list[str]:
    """L1, L2, … as the paper heads its columns."""
    return [f"L{layer}" for layer in range(1, count + 1)]
