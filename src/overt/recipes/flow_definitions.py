"""Which definition of importance gives which number of Abnar & Zuidema 2020?

The paper's Tables 1–3 say "blank-out" and "gradients". The code that produced the published numbers ranks
other tokens, by other values, than these words suggest. Here each choice is made one after the other, on the
same maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

import overt
from overt.judge import spearman
from overt.recipes._recipe import Grid, cell, mean, spread
from overt.recipes.flow_measure import METHODS, Batch, Numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console
    from torch import Tensor, nn

    Floats: TypeAlias = NDArray[np.float64]

Tokens = Literal["words", "cls", "end"]


@dataclass(frozen=True)
class Definition:
    """What is ranked, and by what.

    Attributes:
        heading: of a column.
        value: name of the importance.
        absolute: whether its sign is dropped.
        tokens: "words"; "cls": CLS too; "end": also the token that ends the sentence.
        zero_end: whether the importance of that last token is set to 0.
        ties: of the ranks, as in `overt.judge.spearman`.
    """

    heading: str
    value: str
    absolute: bool = True
    tokens: Tokens = "words"
    zero_end: bool = False
    ties: Literal["average", "dense"] = "average"


BLANKOUT = {
    "signed": Definition("signed, words", "blankout", absolute=False),
    "absolute": Definition("absolute, words", "blankout"),
    "cls": Definition("+ CLS", "blankout", tokens="cls"),
    "end": Definition("+ `<eos>`", "blankout", tokens="end"),
    "zero": Definition("`<eos>` := 0, dense ranks", "blankout", tokens="end", zero_end=True, ties="dense"),
}
GRADIENTS = {
    "norm": Definition("‖g‖, words", "norm"),
    "norm cls": Definition("‖g‖ + CLS", "norm", tokens="cls"),
    "input": Definition("g × input, words", "input", absolute=False),
    "sum": Definition("abs(Σ_d g), words", "sum"),
    "sum cls": Definition("abs(Σ_d g) + CLS", "sum", tokens="cls"),
    "sum end": Definition("abs(Σ_d g) + CLS + `<eos>`", "sum", tokens="end"),
}
DEFINITIONS = {"blankout": BLANKOUT, "gradients": GRADIENTS}


def measure(
    model: nn.Module, ready: Sequence[Batch], console: Console, name: str, unk: int, end: int | None = None
) -> Numbers:
    """The correlation of the first token's row with importance by every definition, method and layer.

    Each definition has, for each method, "mean" and "sd" over the sentences that all methods rank, and "n",
    their number, by layer. Those that rank the last token are missing where there is none. "sum of gradients"
    tells how large |Σ_d g| is beside ‖g‖, the median and the largest over all tokens, and the mean rank
    correlation of the two within a sentence.

    Args:
        model: in evaluation mode.
        ready: batches to measure on.
        console: for progress.
        name: description in the progress bar.
        unk: id of the token that replaces a word in blank-out.
        end: id of the token that ends every sentence; None if there is none.
    """
    from rich.progress import track

    every = {**BLANKOUT, **GRADIENTS}
    chosen = {key: each for key, each in every.items() if each.tokens != "end" or end is not None}
    rows: dict[str, dict[str, list[Floats]]] = {key: {method: [] for method in METHODS} for key in chosen}
    shares: list[Floats] = []
    alike: list[float] = []
    for inputs, labels in track(ready, f"{name}, definitions", console=console, transient=True):
        trace = overt.trace(model, inputs)
        scores = {method: trace.read(method, 0).numpy()[:, :, 0] for method in METHODS}
        values = {"blankout": trace.blankout(target=labels, unk=unk).numpy()[:, 0, 0]}
        for kind in ("norm", "input", "sum"):
            values[kind] = trace.gradients(target=labels, kind=kind).numpy()[:, 0, 0]
        ids = inputs["input_ids"].cpu().numpy()
        for example, real in enumerate(trace.mask.numpy()):
            last = np.zeros_like(real) if end is None else real & (ids[example] == end)
            sums, norms = np.abs(values["sum"][example][real]), values["norm"][example][real]
            shares.append(np.divide(sums, norms, out=np.zeros_like(sums), where=norms > 0))
            alike.append(float(spearman(sums[None], norms)[0]))
            for key, each in chosen.items():
                keep = _ranked(each.tokens, real, last)
                importance = values[each.value][example]
                importance = np.abs(importance) if each.absolute else importance
                importance = np.where(last, 0.0, importance) if each.zero_end else importance
                for method in METHODS:
                    row = spearman(scores[method][example][:, keep], importance[keep], each.ties)
                    rows[key][method].append(row)
    all_shares = np.concatenate(shares)
    return {
        **{key: averages(by_method) for key, by_method in rows.items()},
        "sum of gradients": {
            "median": float(np.median(all_shares)),
            "largest": float(all_shares.max()),
            "spearman": float(np.nanmean(alike)) if np.isfinite(alike).any() else None,
        },
    }


def _ranked(tokens: Tokens, real: NDArray[np.bool_], last: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The tokens that a definition ranks."""
    keep = real.copy() if tokens == "end" else real & ~last
    keep[0] &= tokens != "words"
    return keep


def averages(by_method: Mapping[str, Sequence[Floats]]) -> Numbers:
    """Mean and standard deviation over the sentences that all methods rank, and their number, by layer."""
    tables = {method: np.stack(list(rows)) for method, rows in by_method.items()}  # (sentence, layer)
    known: NDArray[np.bool_] = np.isfinite(sum(tables.values()))
    numbers: Numbers = {}
    for method, table in tables.items():
        layers = [column[ranked] for column, ranked in zip(table.T, known.T, strict=True)]
        numbers[method] = {
            "mean": [float(layer.mean()) if len(layer) else None for layer in layers],
            "sd": [float(layer.std(ddof=1)) if len(layer) > 1 else None for layer in layers],
            "n": [len(layer) for layer in layers],
        }
    return numbers


def measure_as_released(model: Any, ready: Sequence[Batch], console: Console, name: str) -> Numbers | None:
    """Correlations by the script whose logs match the paper's Table 3, by method and layer.

    It ranks all tokens, special ones too, densely; a token's attention is the maximum over all queries, and
    its importance |Σ_d g|, where g is the gradient of the sum of all logits at the output of the embeddings,
    after their LayerNorm. None if the model has no module of that name.

    Args:
        model: a Hugging Face classifier, in evaluation mode.
        ready: batches to measure on.
        console: for progress.
        name: description in the progress bar.
    """
    from rich.progress import track

    embeddings = getattr(model.base_model, "embeddings", None)
    if embeddings is None:
        return None
    rows: dict[str, list[Floats]] = {method: [] for method in METHODS}
    for inputs, _ in track(ready, f"{name}, as released", console=console, transient=True):
        trace = overt.trace(model, inputs)
        scores = {method: trace.read(method).amax(dim=2).numpy() for method in METHODS}  # zeros at padding
        importances = _summed_gradients(model, embeddings, inputs)
        for example, real in enumerate(trace.mask.numpy()):
            for method in METHODS:
                of_tokens = scores[method][example][:, real]
                rows[method].append(spearman(of_tokens, importances[example, real], "dense"))
    return averages(rows)


def _summed_gradients(model: Any, embeddings: nn.Module, inputs: Mapping[str, Tensor]) -> Floats:
    """|Σ_d g| of every token, (batch, token), g being the gradient of all logits at the embeddings."""
    leaves: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = embeddings.register_forward_hook(keep)
    try:
        logits = model(**{name: value.to(model.device) for name, value in inputs.items()}).logits
    finally:
        handle.remove()
    [gradient] = torch.autograd.grad(logits.sum(), leaves)
    found: Floats = gradient.sum(dim=-1).abs().double().cpu().numpy()
    return found


def grid(
    title: str,
    definitions: Mapping[str, Definition],
    networks: Mapping[str, Sequence[Numbers]],
    published: Mapping[str, Sequence[tuple[float, float] | None]],
    layers: Sequence[int],
) -> Grid:
    """One column per definition and one for the paper; a row per network, method and layer.

    Args:
        title: of the table.
        definitions: key → definition, in the order of the columns.
        networks: name → the numbers of `measure` for each seed; a definition may be missing in them.
        published: method → the paper's mean and standard deviation by layer.
        layers: numbers of the layers to show, from 1 on.
    """
    lines = []
    for network, seeds in networks.items():
        for method in METHODS:
            for layer in layers:
                means = [[numbers.get(key, {}).get(method) for numbers in seeds] for key in definitions]
                cells = [_over_seeds(each, layer) for each in means]
                pair = published[method][layer - 1]
                cells.append("–" if pair is None else cell(pair[0]))
                lines.append((f"{network}, {method}, L{layer}", cells))
    return Grid(title, [*(each.heading for each in definitions.values()), "published"], lines)


def _over_seeds(found: Sequence[Numbers | None], layer: int) -> str:
    """Mean and standard deviation over the seeds at a layer."""
    means = [numbers["mean"][layer - 1] for numbers in found if numbers is not None]
    values = [value for value in means if value is not None]
    return cell(mean(values), spread(values)) if values else "–"


def sums_grid(networks: Mapping[str, Sequence[Numbers]]) -> Grid:
    """How large the sum of a gradient is beside its norm."""
    lines = []
    for network, seeds in networks.items():
        found = [numbers["sum of gradients"] for numbers in seeds if "sum of gradients" in numbers]
        if found:
            median = f"{mean([each['median'] for each in found]):.0e}"
            largest = f"{max(each['largest'] for each in found):.0e}"
            ranks = [each["spearman"] for each in found if each["spearman"] is not None]
            lines.append((network, [median, largest, cell(mean(ranks), spread(ranks)) if ranks else "–"]))
    return Grid(
        "abs(Σ_d g) / ‖g‖ at a token: what is left of a gradient when its dimensions are summed",
        ["median", "largest", "Spearman correlation of the two"],
        lines,
    )
