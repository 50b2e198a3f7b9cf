"""Do maps agree with what the model's inputs matter to it? Rank correlations over a corpus.

As in Abnar & Zuidema 2020, Tables 1–3: for each sentence and layer, Spearman's correlation between a query's
row of a map and an importance of the tokens; then mean and spread over the sentences.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from overt import _check
from overt.tracing.methods.method import Method, method_of
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.result import Trace
from overt.tracing.tracer import trace

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    Floats: TypeAlias = NDArray[np.float64]

Pair: TypeAlias = tuple[str, str]


def _references() -> dict[str, tuple[Method, dict[str, Any]]]:
    """What maps are judged by: the methods that run the model, and their variants, each with its options."""
    found: dict[str, tuple[Method, dict[str, Any]]] = {}
    for name, method in known_methods("model").items():
        found[name] = method, {}
        found |= {variant: (method, dict(options)) for variant, options in method.variants.items()}
    return found


@dataclass(frozen=True, eq=False)
class Correlations:
    """Spearman correlations of methods with references, layer by layer.

    Keys are (method, reference); arrays have shape (layers,). Sentences whose correlation is not defined (one
    token, or all values equal) count for neither mean nor spread. Which those are differs from method to
    method, so two of these means may be over different sentences: to compare methods, take `common`.

    Attributes:
        values: (sentences, layers), NaN where not defined.
        mean: over the sentences that this method ranks.
        sd: standard deviation over them (divided by their number less one).
        low: lower end of the mean's 95 % bootstrap interval. Sentences are drawn anew, the model is not: it
            says nothing about a model trained with another seed.
        high: upper end.
        count: sentences, defined or not.
        defined: sentences with a defined correlation.
        with_cls: the same with the query's own token among the tokens; None in that one itself.
        common: the same over the sentences, for each reference and layer, that every method ranks; None in
            that one itself.
    """

    values: dict[Pair, Floats]
    mean: dict[Pair, Floats]
    sd: dict[Pair, Floats]
    low: dict[Pair, Floats]
    high: dict[Pair, Floats]
    count: int
    defined: dict[Pair, NDArray[np.int64]]
    with_cls: Correlations | None = field(default=None)
    common: Correlations | None = field(default=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the single values, for JSON."""
        names = ("mean", "sd", "low", "high", "defined")
        out: dict[str, Any] = {
            f"{method} ~ {reference}": {
                name: [_plain(one) for one in getattr(self, name)[method, reference]] for name in names
            }
            for method, reference in self.mean
        }
        out["count"] = self.count
        if self.with_cls is not None:
            out["with_cls"] = self.with_cls.to_dict()
        if self.common is not None:
            out["common"] = self.common.to_dict()
        return out

    def __str__(self) -> str:
        if self.common is not None:  # rows of a table are there to be compared
            return str(self.common)
        layers = len(next(iter(self.mean.values())))
        lines = ["".ljust(28) + "".join(f"L{layer + 1}".rjust(13) for layer in range(layers))]
        for method, reference in self.mean:
            mean, sd = self.mean[method, reference], self.sd[method, reference]
            cells = "".join(_cell(m, s).rjust(13) for m, s in zip(mean, sd, strict=True))
            lines.append(f"{method} ~ {reference}".ljust(28) + cells)
        ranked = {reference: number for (_, reference), number in self.defined.items()}
        for reference, number in ranked.items():
            if (number < self.count).any():
                cells = "".join(str(one).rjust(13) for one in number)
                lines.append(f"n of {self.count} ~ {reference}".ljust(28) + cells)
        return "\n".join(lines)


def _cell(mean: float, sd: float) -> str:
    """Mean and spread in print: no spread of a single sentence, and no mean of none."""
    if math.isnan(mean):
        return "–"
    return f"{mean:.2f}" if math.isnan(sd) else f"{mean:.2f} ± {sd:.2f}"


def _plain(value: Any) -> float | int | None:
    number: float | int = value.item()
    return None if number != number else number


def spearman(scores: Floats, reference: Floats) -> Floats:
    """Tie-corrected rank correlation of each row of `scores` (rows, tokens) with `reference` (tokens,).

    Pearson's correlation of average ranks; NaN where either is constant.
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped, unused-ignore]

    if scores.shape[-1] < 2:
        return np.full(scores.shape[0], np.nan)
    ranks = rankdata(scores, axis=-1) - (scores.shape[-1] + 1) / 2
    other = rankdata(reference) - (len(reference) + 1) / 2
    size = np.sqrt((ranks**2).sum(axis=-1) * (other**2).sum())
    found: Floats = np.divide(ranks @ other, size, out=np.full(len(size), np.nan), where=size > 0)
    return found


def correlate(
    traces: Trace | Iterable[Trace],
    targets: Any = None,
    *,
    methods: Sequence[str] | None = None,
    references: Sequence[str] = ("blankout", "gradients"),
    query: int | None = None,
    unk: int | None = None,
    residual: float | None = None,
    bootstrap: int = 1000,
    seed: int = 0,
) -> Correlations:
    """Spearman correlation of each method with each reference, per layer, over a corpus.

    Special tokens, padding and the query's own token (CLS) are left out; `with_cls` is the same with the
    query's own token.

    Args:
        traces: of batches, which may come from a generator: each is used and let go.
        targets: what blank-out and gradients explain: the classes of all sentences in one tensor, or one
            tensor per trace. None takes each trace's default.
        methods: that read maps; all by default, "raw", "rollout" and "flow" and what else is registered.
        references: that run the model: "blankout", "blankout-absolute", "gradients", "gradient-input",
            "integrated", and what else is registered.
        query: whose row is read; by default CLS, the first token, or the last token of a causal model or
            decoder.
        unk: id of the token that blanks out.
        residual: of rollout and flow; by default what each trace's mixing implies.
        bootstrap: resamplings of the sentences, for the intervals.
        seed: of the resampling.
    """
    known, judges = known_methods("maps"), _references()
    methods = tuple(known) if methods is None else methods
    for name, asked, allowed in (
        ("methods", methods, tuple(known)),
        ("references", references, tuple(judges)),
    ):
        if isinstance(asked, str) or not asked:
            raise ValueError(f"{name} must list some of {', '.join(allowed)}, got {asked!r}")
        for one in asked:
            _check.one_of(name, one, allowed)
    _check.whole("bootstrap", bootstrap, 1)
    if isinstance(traces, Trace):
        traces = [traces]
        targets = targets if targets is None or np.ndim(targets) == 1 else [targets]
    if not isinstance(traces, Iterable):
        raise TypeError(f"traces must be a trace or traces of batches, got {type(traces).__name__}")
    pairs = [(method, reference) for reference in references for method in methods]
    found: dict[bool, dict[Pair, list[Floats]]] = {own: {pair: [] for pair in pairs} for own in (False, True)}
    goals = _Goals(targets)
    for batch in traces:
        queries = batch.main_queries() if query is None else [query] * len(batch)
        goal = goals.take(len(batch))
        scores, importances = _measured(batch, methods, references, queries, goal, unk, residual)
        source, count = batch.mask.shape[1] - batch.maps[0].shape[-2], batch.maps[0].shape[-2]
        for example in range(len(batch)):
            place = source + queries[example] % count
            keep = (batch.mask[example] & ~batch.special[example]).numpy().copy()
            for own in (False, True):
                keep[place] = own
                for method, reference in pairs:
                    row = spearman(scores[method][example][:, keep], importances[reference][example][keep])
                    found[own][method, reference].append(row)
    goals.check_used()
    if not found[False][pairs[0]]:
        raise ValueError("traces must hold at least one sentence, got none")
    rng = np.random.default_rng(seed)
    inner = _summary(found[True], bootstrap, rng, None)
    return _summary(found[False], bootstrap, rng, inner)


class _Goals:
    """The targets of a corpus, batch by batch."""

    def __init__(self, targets: Any) -> None:
        self.flat = targets if hasattr(targets, "shape") else None
        self.listed = None if targets is None or self.flat is not None else iter(targets)
        self.used = 0
        if self.flat is not None and self.flat.ndim != 1:
            raise ValueError(f"targets must be one class per sentence, got shape {tuple(self.flat.shape)}")

    def take(self, count: int) -> Any:
        if self.flat is not None:
            part = self.flat[self.used : self.used + count]
            self.used += count
            if len(part) < count:
                raise ValueError(f"targets must have one entry per sentence, got {len(self.flat)} in all")
            return part
        if self.listed is None:
            return None
        part = next(self.listed, None)
        if part is None or np.shape(part)[:1] != (count,):
            got = "no more" if part is None else f"shape {tuple(np.shape(part))}"
            raise ValueError(f"targets must have {count} classes for this trace, one per sentence, got {got}")
        return part

    def check_used(self) -> None:
        """Refuse targets that no trace came for."""
        left = 0 if self.flat is None else len(self.flat) - self.used
        if left > 0 or (self.listed is not None and next(self.listed, None) is not None):
            raise ValueError("targets must have one entry per trace, got more")


def _measured(
    batch: Trace,
    methods: Sequence[str],
    references: Sequence[str],
    queries: list[int],
    goal: Any,
    unk: int | None,
    residual: float | None,
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Each method's (batch, layer, token) and each reference's (batch, token), at one query per example."""
    asked = sorted(set(queries))
    rows, places = np.arange(len(batch)), np.array([asked.index(query) for query in queries])
    scores = {
        name: batch.read(name, asked, **method_of(name).fitting({"residual": residual})).numpy()[
            rows, :, places
        ]
        for name in methods
    }
    importances: dict[str, Floats] = {}
    for reference in references:
        method, options = _references()[reference]
        if options == {"absolute": True} and method.name in importances:  # no need to run it twice
            importances[reference] = np.abs(importances[method.name])
            continue
        given = {**options, **method.fitting({"target": goal, "unk": unk})}
        values = batch.read(method.name, asked, **given).numpy()[:, 0]
        # A model with one output for all tokens has one row, whatever is asked.
        importances[reference] = values[rows, places if values.shape[1] == len(asked) else 0]
    return scores, importances


def _summary(
    rows: Mapping[Pair, list[Floats]], bootstrap: int, rng: np.random.Generator, inner: Correlations | None
) -> Correlations:
    values = {pair: np.stack(one) for pair, one in rows.items()}
    count = len(next(iter(values.values())))
    draws = rng.integers(0, count, size=(bootstrap, count))
    weights = np.stack([np.bincount(draw, minlength=count) for draw in draws]).astype(np.float64)
    common = _averaged(_ranked_by_all(values), weights)
    return replace(_averaged(values, weights), with_cls=inner, common=common)


def _ranked_by_all(values: Mapping[Pair, Floats]) -> dict[Pair, Floats]:
    """The values of the sentences at which, for a reference and layer, no method has NaN; NaN elsewhere."""
    missing: dict[str, NDArray[np.bool_]] = {}
    for (_, reference), table in values.items():
        missing[reference] = np.isnan(table) | missing.get(reference, False)
    return {pair: np.where(missing[pair[1]], np.nan, table) for pair, table in values.items()}


def _averaged(values: dict[Pair, Floats], weights: Floats) -> Correlations:
    """Mean and spread over sentences; `weights`, (resamples, sentences), say how often each was drawn."""
    mean, sd, low, high, defined = {}, {}, {}, {}, {}
    for pair, table in values.items():
        known = ~np.isnan(table)
        number = known.sum(axis=0)
        filled = np.where(known, table, 0.0)
        defined[pair] = number
        with np.errstate(invalid="ignore", divide="ignore"):
            mean[pair] = filled.sum(axis=0) / number
            square = np.where(known, (table - mean[pair]) ** 2, 0.0).sum(axis=0)
            sd[pair] = np.sqrt(square / (number - 1))
            resampled = (weights @ filled) / (weights @ known)
        ends = np.full((2, table.shape[1]), np.nan)
        if (some := number > 0).any():
            ends[:, some] = np.nanpercentile(resampled[:, some], [2.5, 97.5], axis=0)
        low[pair], high[pair] = ends
    return Correlations(values, mean, sd, low, high, weights.shape[1], defined)


@dataclass(frozen=True, eq=False)
class Sanity:
    """What is left of maps when weights are randomised, from the top layer down.

    Attributes:
        stages: what has been randomised so far, a layer's path and all above it; at last everything.
        left: method → (stages,), mean Spearman correlation between the rows of the model as it is and as
            randomised, over the sentences in which neither row is constant. A method that shows what the
            model learnt falls towards zero; one that stays near one shows something else.
        defined: method → (stages,), how many sentences those are.
        common: as `left`, over the sentences that count for every method.
        shared: (stages,), how many those are.
    """

    stages: list[str]
    left: dict[str, Floats]
    defined: dict[str, NDArray[np.int64]]
    common: dict[str, Floats]
    shared: NDArray[np.int64]

    def __str__(self) -> str:
        lines = ["randomised from".ljust(40) + "".join(method.rjust(9) for method in self.common)]
        for number, stage in enumerate(self.stages):
            cells = "".join(_cell(values[number], math.nan).rjust(9) for values in self.common.values())
            lines.append(stage.ljust(40) + cells)
        return "\n".join(lines)


def randomised(
    model: nn.Module,
    inputs: Any,
    *,
    methods: Sequence[str] | None = None,
    query: int | None = None,
    layer: int = -1,
    seed: int = 0,
    **arguments: Any,
) -> Sanity:
    """The weight-randomisation check (Adebayo et al. 2018), cascading from the top layer down.

    Parameters are shuffled, each within itself, so that their sizes stay what they were. The model given is
    not touched. All tokens but padding are ranked, special ones and the query's own too.

    Args:
        model: the model.
        inputs: a batch, as for `overt.trace`.
        methods: any, by default all that read maps.
        query: whose row is compared, as for `correlate`.
        layer: of which layer.
        seed: of the shuffling.
        arguments: further ones of `overt.trace`.
    """
    import torch

    names = tuple(known_methods("maps")) if methods is None else methods
    if isinstance(names, str) or not names:
        raise ValueError(f"methods must list some of {', '.join(known_methods())}, got {names!r}")
    asked_for = {name: method_of(name, argument="methods") for name in names}
    changed = copy.deepcopy(model)
    before = trace(model, inputs, **arguments)
    # The top first: the decoder's layers, then the encoder's.
    paths = before.paths
    own, encoder = len(before.maps), len(before.encoder_maps)
    layers = list(dict.fromkeys(_layer(path) for path in reversed(paths[:own])))
    layers += list(dict.fromkeys(_layer(path) for path in reversed(paths[own : own + encoder])))
    generator = torch.Generator().manual_seed(seed)
    done: set[str] = set()

    queries = before.main_queries() if query is None else [query] * len(before)
    asked = sorted(set(queries))
    places = [asked.index(one) for one in queries]

    def rows(traced: Trace) -> dict[str, Floats]:
        found = {}
        for name, method in asked_for.items():
            values = traced.read(name, asked, **method.fitting({"layers": layer})).numpy()[:, 0]
            # A model with one output for all tokens has one row, whatever is asked.
            found[name] = values[range(len(places)), places if values.shape[1] == len(asked) else 0]
        return found

    def shuffle(prefix: str) -> None:
        with torch.no_grad():
            for name, parameter in changed.named_parameters():
                if name not in done and (name + ".").startswith(prefix):
                    order = torch.randperm(parameter.numel(), generator=generator)
                    parameter.copy_(parameter.flatten()[order.to(parameter.device)].view_as(parameter))
                    done.add(name)

    original = rows(before)
    found: dict[str, list[list[float]]] = {method: [] for method in asked_for}  # by stage and sentence
    stages = []
    for stage in [*layers, ""]:
        shuffle(f"{stage}." if stage else "")
        stages.append(stage or "everything")
        now = rows(trace(changed, inputs, **arguments))
        for method in asked_for:
            kept = [
                float(spearman(now[method][i : i + 1, keep], original[method][i, keep])[0])
                for i, keep in enumerate(before.mask.numpy())
            ]
            found[method].append(kept)
    values = {method: np.array(kept) for method, kept in found.items()}  # (stages, sentences)
    known = {method: ~np.isnan(kept) for method, kept in values.items()}
    by_all = np.logical_and.reduce(list(known.values()))
    return Sanity(
        stages,
        {method: _mean_where(kept, known[method]) for method, kept in values.items()},
        {method: known[method].sum(axis=1) for method in values},
        {method: _mean_where(kept, by_all) for method, kept in values.items()},
        by_all.sum(axis=1),
    )


def _mean_where(values: Floats, counted: NDArray[np.bool_]) -> Floats:
    """Mean of each row over what counts; NaN where nothing does."""
    with np.errstate(invalid="ignore"):
        found: Floats = np.where(counted, values, 0.0).sum(axis=1) / counted.sum(axis=1)
    return found


def _layer(path: str) -> str:
    """The layer that an attention is in: its path up to the first number."""
    found = re.match(r"(.*?\.\d+)(?:\.|$)", path)
    return path if found is None else found.group(1)
