"""Rank correlations of attention with importance, for the recipes on Abnar & Zuidema 2020."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
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
Batch = tuple[dict[str, Tensor], Tensor]  # a model's inputs, and the labels


def correlate(
    model: nn.Module,
    ready: Sequence[Batch],
    console: Console,
    name: str,
    references: Sequence[str] = tuple(REFERENCES),
    unk: int | None = None,
    device: torch.device | None = None,
    tokenizer: Any = None,
    bootstrap: int = 1000,
    end: int | None = None,
) -> Numbers:
    """Spearman correlations of the first token's row with importance, for each reference, method and layer.

    For each reference and method there are lists by layer: "mean" and "sd" over examples; "low" and "high",
    the bootstrap's 95 % interval of the mean over the examples of this one model; and "defined", the number
    of examples that have a correlation. "common" has the same over the examples that all methods rank, and
    "with_cls" all of this with the CLS token ranked too.

    Args:
        model: in evaluation mode.
        ready: batches to measure on.
        console: console for progress.
        name: description in the progress bar.
        references: some of `REFERENCES`.
        unk: id of the token that replaces a word in blank-out.
        device: device to measure on; None for that of the model.
        tokenizer: the model's tokenizer, which knows the special tokens.
        bootstrap: number of bootstrap samples.
        end: id of a token that ends every sentence, and is no word.
    """
    from rich.progress import track

    from overt import judge

    model.eval()
    if device is not None:
        model.to(device)

    def traced(inputs: dict[str, Tensor]) -> overt.Trace:
        trace = overt.trace(model, inputs, tokenizer=tokenizer)
        if end is None:
            return trace
        return replace(trace, special=trace.special | (inputs["input_ids"] == end).cpu())

    traces = (
        traced(inputs) for inputs, _ in track(ready, f"{name}, tracing", console=console, transient=True)
    )
    correlation = judge.correlate(
        traces,
        [labels for _, labels in ready],
        methods=METHODS,
        references=tuple(references),
        query=0,
        unk=unk,
        bootstrap=bootstrap,
        seed=0,
    )
    numbers = _numbers(correlation, references)
    if correlation.with_cls is not None:
        numbers["with_cls"] = _numbers(correlation.with_cls, references)
    return numbers


def _numbers(correlation: Any, references: Sequence[str]) -> Numbers:
    def of(method: str, reference: str) -> dict[str, list[float]]:
        return {
            name: [float(value) for value in getattr(correlation, name)[method, reference]]
            for name in ("mean", "sd", "low", "high", "defined")
        }

    numbers: Numbers = {
        reference: {method: of(method, reference) for method in METHODS} for reference in references
    }
    numbers = {"count": int(correlation.count), **numbers}
    if correlation.common is not None:
        numbers["common"] = _numbers(correlation.common, references)
    return numbers


def common_numbers(numbers: Numbers) -> Numbers:
    """The numbers of `correlate` over the examples that all methods rank.

    Older results do not contain them: there each method has its own examples, as `count_rows` reports.
    """
    common: Numbers = numbers.get("common") or numbers
    return common


def count_rows(seeds: Sequence[Numbers], reference: str) -> list[tuple[str, list[str]]]:
    """Rows of a table with the number of examples behind its means, by layer; none if it is always all.

    Args:
        seeds: the numbers of `correlate` for each seed.
        reference: one of `REFERENCES`.
    """
    rows = _count_rows(seeds, reference)
    if all("with_cls" in numbers for numbers in seeds):
        with_cls = _count_rows([numbers["with_cls"] for numbers in seeds], reference)
        rows += [(f"{name}, CLS ranked too", cells) for name, cells in with_cls]
    return rows


def _count_rows(seeds: Sequence[Numbers], reference: str) -> list[tuple[str, list[str]]]:
    count, rows = int(seeds[0]["count"]), []
    for method in METHODS:
        counts = [common_numbers(numbers)[reference][method]["defined"] for numbers in seeds]
        rows.append((f"{method}, n of {count:,}", [_range(layer) for layer in zip(*counts, strict=True)]))
    if len({tuple(cells) for _, cells in rows}) > 1:  # an older result: examples differ between methods
        return rows
    cells = rows[0][1]
    return [] if set(cells) == {f"{count:,}"} else [(f"n of {count:,}", cells)]


def _range(numbers: Iterable[float]) -> str:
    """The least and the greatest of whole numbers as a range, or a single number if they are equal."""
    least, most = int(min(values := list(numbers))), int(max(values))
    return f"{least:,}" if least == most else f"{least:,}–{most:,}"


def sentences_note(by_form: dict[str, list[Numbers]], reference: str) -> str:
    """A note on the sentences that the means are over.

    Args:
        by_form: name of a model → the numbers of `correlate` for each of its seeds.
        reference: one of `REFERENCES`.
    """
    every = [numbers for seeds in by_form.values() for numbers in seeds]
    count = int(every[0]["count"])
    note = (
        "A sentence of one word has no rank correlation, nor does a row of equal values, which flow "
        "sometimes produces. "
    )
    if all(numbers.get("common") for numbers in every):
        ranges = {
            form: _range(n for numbers in seeds for n in numbers["common"][reference]["raw"]["defined"])
            for form, seeds in by_form.items()
        }
        if set(ranges.values()) == {f"{count:,}"}:
            return f"{note}Raw attention, rollout and flow all rank each of the {count:,} sentences."
        note += "Means are over the sentences that raw attention, rollout and flow all rank in one model"
        phrases = [f"{form} {text}" if form else text for form, text in ranges.items()]
        return f"{note}, out of {count:,}: {', '.join(phrases)}, depending on seed and layer."
    by_method = {
        method: _range(n for numbers in every for n in numbers[reference][method]["defined"])
        for method in METHODS
    }
    if len(set(by_method.values())) == 1:
        return (
            f"{note}Raw attention, rollout and flow all rank {by_method['raw']} of the {count:,} sentences."
        )
    phrases = [f"{method} {text}" for method, text in by_method.items()]
    return (
        f"{note}This run was measured before methods were compared on the same sentences: each row is a mean "
        f"over those that its own method ranks, out of {count:,}: {', '.join(phrases)}, depending on form, "
        "seed and layer."
    )


INTERVALS = (
    "The 95 % intervals in the result file (low and high, under per_seed) are bootstrapped over the "
    "sentences of one trained model: they do not cover other seeds."
)


def classifier_batches(numbered: Iterable[Sequence[tuple[int, E]]], collate: Collate[E]) -> list[Batch]:
    """Batches of numbered examples in the format of `correlate`."""
    names = ("input_ids", "attention_mask")
    return [({name: batch[name] for name in names}, batch["labels"]) for batch in map(collate, numbered)]


def comparison_grid(
    title: str,
    columns: Sequence[str],
    published: dict[str, list[tuple[float, float] | None]],
    measured: dict[str, Numbers],
    between: dict[str, Numbers],
    with_cls: dict[str, Numbers] | None = None,
    sizes: Sequence[tuple[str, list[str]]] = (),
) -> Grid:
    """Published and measured numbers of one model, as mean±sd over examples, and the spread over seeds.

    Args:
        title: title of the table.
        columns: names of the layers.
        published: method → (mean, sd) of each layer, None where the paper has no number.
        measured: method → "mean" and "sd" by layer, averaged over the seeds.
        between: method → the standard deviations of the same over the seeds.
        with_cls: as `measured`, with the CLS token ranked too.
        sizes: rows with the number of examples, from `count_rows`.
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
            rows.append((f"{method}, sd over seeds", _cells(between[method]["mean"])))
    return Grid(title, list(columns), [*rows, *sizes])


def _cells(means: Sequence[float | None], deviations: Sequence[float | None] | None = None) -> list[str]:
    return [cell(*pair) for pair in zip(means, deviations or [None] * len(means), strict=True)]


def layer_names(count: int) -> list[str]:
    """L1, L2, …, the headings of the paper's columns."""
    return [f"L{layer}" for layer in range(1, count + 1)]
