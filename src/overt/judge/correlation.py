"""Do maps agree with how much each input token matters to the model? Rank correlations over a corpus.

As in Abnar & Zuidema 2020, Tables 1–3: for each sentence and layer, Spearman's correlation between a query's
row of a map and a measure of the tokens' importance; then mean and spread over the sentences.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from overt import _check
from overt.tracing.methods.method import Method, method_of
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.result import Trace
from overt.tracing.tracer import trace

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import nn

    Floats: TypeAlias = NDArray[np.float64]

Pair: TypeAlias = tuple[str, str]


def _references() -> dict[str, tuple[Method, dict[str, Any]]]:
    """The references for maps: methods that run the model, and their variants, each with its options."""
    references: dict[str, tuple[Method, dict[str, Any]]] = {}
    for name, method in known_methods("model").items():
        references[name] = method, {}
        references |= {variant: (method, dict(options)) for variant, options in method.variants.items()}
    return references


@dataclass(frozen=True, eq=False)
class Correlations:
    """Spearman correlations of methods with references, layer by layer.

    Keys are (method, reference); arrays have shape (layers,). Sentences whose correlation is undefined (one
    token, or all values equal) are excluded from mean and spread. They differ from method to method, so two
    means may be over different sentences: to compare methods, use `common`.

    Attributes:
        values: (sentences, layers), NaN where undefined.
        mean: over the sentences that this method ranks.
        sd: standard deviation over them (divided by their number minus one).
        low: lower end of the mean's 95 % bootstrap interval. It resamples sentences, not models: it says
            nothing about a model trained with another seed.
        high: upper end of that interval.
        count: number of sentences, including those with undefined correlations.
        defined: number of sentences with a defined correlation.
        with_cls: the same with the query's own token among the tokens; None within `with_cls` itself.
        common: the same over the sentences that, for a given reference and layer, every method ranks; None
            within `common` itself.
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
        """Everything except the individual values, for JSON."""
        names = ("mean", "sd", "low", "high", "defined")
        out: dict[str, Any] = {
            f"{method} ~ {reference}": {
                name: [_plain(value) for value in getattr(self, name)[method, reference]] for name in names
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
        if self.common is not None:  # so that the table's rows can be compared
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
                cells = "".join(str(layer_count).rjust(13) for layer_count in number)
                lines.append(f"n of {self.count} ~ {reference}".ljust(28) + cells)
        return "\n".join(lines)


def _cell(mean: float, sd: float) -> str:
    """Mean and spread as text; a single sentence has no spread, and no sentences have no mean."""
    if math.isnan(mean):
        return "–"
    return f"{mean:.2f}" if math.isnan(sd) else f"{mean:.2f} ± {sd:.2f}"


def _plain(value: Any) -> float | int | None:
    number: float | int = value.item()
    return None if number != number else number


def spearman(scores: Floats, reference: Floats, ties: Literal["average", "dense"] = "average") -> Floats:
    """Rank correlation of each row of `scores` (rows, tokens) with `reference` (tokens,); NaN if constant.

    Args:
        scores: of tokens.
        reference: what they are compared with.
        ties: "average": Pearson's correlation of average ranks, which is Spearman's. "dense": of ranks in
            which equal values share one rank and the next value has the next, as in Abnar & Zuidema's code.
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped, unused-ignore]

    _check.one_of("ties", ties, ("average", "dense"))
    if scores.shape[-1] < 2:
        return np.full(scores.shape[0], np.nan)
    ranks, other = rankdata(scores, ties, axis=-1), rankdata(reference, ties)
    ranks, other = ranks - ranks.mean(axis=-1, keepdims=True), other - other.mean()
    size = np.sqrt((ranks**2).sum(axis=-1) * (other**2).sum())
    rho: Floats = np.divide(ranks @ other, size, out=np.full(len(size), np.nan), where=size > 0)
    return rho


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

    Special tokens, padding and the query's own token (CLS) are excluded; `with_cls` includes the query's own
    token.

    Args:
        traces: traces of batches; may be a generator, since each is used once and released.
        targets: the classes that blank-out and gradients explain: one tensor for all sentences, or one tensor
            per trace. None uses each trace's default.
        methods: methods that read maps; by default all that can read the first trace of "raw", "rollout",
            "flow" and any others registered.
        references: methods that run the model: "blankout", "blankout-absolute", "gradients",
            "gradient-input", "integrated", and any others registered.
        query: the query whose row is read; by default CLS, the first token, or the last token of a causal
            model or decoder.
        unk: id of the token that replaces blanked-out tokens.
        residual: residual share of rollout and flow; by default the one that each trace's mixing implies.
        bootstrap: number of bootstrap resamples of the sentences, for the intervals.
        seed: random seed of the resampling.
    """
    known, judges = known_methods("maps"), _references()
    if isinstance(traces, Trace):
        traces = [traces]
        targets = targets if targets is None or np.ndim(targets) == 1 else [targets]
    if not isinstance(traces, Iterable):
        raise TypeError(f"traces must be a trace or traces of batches, got {type(traces).__name__}")
    if methods is None:
        traces, methods = _readable(traces)
    for argument, names, allowed in (
        ("methods", methods, tuple(known)),
        ("references", references, tuple(judges)),
    ):
        if isinstance(names, str) or not names:
            raise ValueError(f"{argument} must list some of {', '.join(allowed)}, got {names!r}")
        for name in names:
            _check.one_of(argument, name, allowed)
    _check.whole("bootstrap", bootstrap, 1)
    pairs = [(method, reference) for reference in references for method in methods]
    # By whether the query's own token is among the tokens.
    rows: dict[bool, dict[Pair, list[Floats]]] = {
        includes_query: {pair: [] for pair in pairs} for includes_query in (False, True)
    }
    all_targets = _Targets(targets)
    for batch in traces:
        queries = batch.main_queries() if query is None else [query] * len(batch)
        target = all_targets.take(len(batch))
        scores, importances = _measure(batch, methods, references, queries, target, unk, residual)
        for example in range(len(batch)):
            place = batch.first + queries[example] % batch.queries
            keep = (batch.mask[example] & ~batch.special[example]).numpy().copy()
            for includes_query in (False, True):
                keep[place] = includes_query
                if batch.levels().recurrent:  # whose target is not attended to
                    keep[batch.first :] = False
                for method, reference in pairs:
                    row = spearman(scores[method][example][:, keep], importances[reference][example][keep])
                    rows[includes_query][method, reference].append(row)
    all_targets.check_used()
    if not rows[False][pairs[0]]:
        raise ValueError("traces must hold at least one sentence, got none")
    rng = np.random.default_rng(seed)
    inner = _summary(rows[True], bootstrap, rng, None)
    return _summary(rows[False], bootstrap, rng, inner)


def _readable(traces: Iterable[Trace]) -> tuple[Iterable[Trace], tuple[str, ...]]:
    """The same traces, and the methods that can read the first."""
    traces = iter(traces)
    first = list(itertools.islice(traces, 1))
    known = known_methods("maps")
    readable = tuple(name for name in known if all(trace.why_not(name) is None for trace in first))
    return itertools.chain(first, traces), readable or tuple(known)


class _Targets:
    """The targets of a corpus, batch by batch."""

    def __init__(self, targets: Any) -> None:
        self.flat = targets if hasattr(targets, "shape") else None
        self.listed = None if targets is None or self.flat is not None else iter(targets)
        self.used = 0
        if self.flat is not None and self.flat.ndim != 1:
            raise ValueError(f"targets must be one class per sentence, got shape {tuple(self.flat.shape)}")

    def take(self, count: int) -> Any:
        """The targets of the next batch, of `count` sentences."""
        if self.flat is not None:
            part = self.flat[self.used : self.used + count]
            self.used += count
            if len(part) < count:
                raise ValueError(f"targets must have one entry per sentence, got {len(self.flat)} in total")
            return part
        if self.listed is None:
            return None
        part = next(self.listed, None)
        if part is None or np.shape(part)[:1] != (count,):
            got = "no more" if part is None else f"shape {tuple(np.shape(part))}"
            raise ValueError(f"targets must have {count} classes for this trace, one per sentence, got {got}")
        return part

    def check_used(self) -> None:
        """Refuse targets beyond the last trace."""
        left = 0 if self.flat is None else len(self.flat) - self.used
        if left > 0 or (self.listed is not None and next(self.listed, None) is not None):
            raise ValueError("targets must have one entry per trace, got more")


def _measure(
    batch: Trace,
    methods: Sequence[str],
    references: Sequence[str],
    queries: list[int],
    target: Any,
    unk: int | None,
    residual: float | None,
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Each method's (batch, layer, token) and each reference's (batch, token), at one query per example."""
    distinct = sorted(set(queries))
    rows, places = np.arange(len(batch)), np.array([distinct.index(query) for query in queries])
    scores = {
        name: batch.read(name, distinct, **method_of(name).fitting({"residual": residual})).numpy()[
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
        options = {**options, **method.fitting({"target": target, "unk": unk})}
        values = batch.read(method.name, distinct, **options).numpy()[:, 0]
        # A model with one output for all tokens has one row, whatever the queries.
        importances[reference] = values[rows, places if values.shape[1] == len(distinct) else 0]
    return scores, importances


def _summary(
    rows: Mapping[Pair, list[Floats]], bootstrap: int, rng: np.random.Generator, inner: Correlations | None
) -> Correlations:
    values = {pair: np.stack(sentences) for pair, sentences in rows.items()}
    count = len(next(iter(values.values())))
    draws = rng.integers(0, count, size=(bootstrap, count))
    weights = np.stack([np.bincount(draw, minlength=count) for draw in draws]).astype(np.float64)
    common = _average(_ranked_by_all(values), weights)
    return replace(_average(values, weights), with_cls=inner, common=common)


def _ranked_by_all(values: Mapping[Pair, Floats]) -> dict[Pair, Floats]:
    """The values of sentences that all methods rank, for a reference and layer; NaN elsewhere."""
    missing: dict[str, NDArray[np.bool_]] = {}
    for (_, reference), table in values.items():
        missing[reference] = np.isnan(table) | missing.get(reference, False)
    return {pair: np.where(missing[pair[1]], np.nan, table) for pair, table in values.items()}


def _average(values: dict[Pair, Floats], weights: Floats) -> Correlations:
    """Mean and spread over sentences; `weights`, (resamples, sentences), are the counts of each draw."""
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
        if (ranked := number > 0).any():
            ends[:, ranked] = np.nanpercentile(resampled[:, ranked], [2.5, 97.5], axis=0)
        low[pair], high[pair] = ends
    return Correlations(values, mean, sd, low, high, weights.shape[1], defined)


@dataclass(frozen=True, eq=False)
class Sanity:
    """How much maps change when weights are randomised, from the top layer down.

    Attributes:
        stages: what has been randomised so far: a layer (its path) and all above it; in the end everything.
        left: method → (stages,), mean Spearman correlation between the rows of the original model and of the
            randomised one, over the sentences in which neither row is constant. For a method that shows what
            the model learnt, it falls towards zero; if it stays near one, the method shows something else.
        defined: method → (stages,), number of these sentences.
        common: like `left`, over the sentences that count for every method.
        shared: (stages,), number of those.
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

    The entries of each parameter are shuffled, so that its distribution of values stays the same. The model
    itself is not changed. All tokens except padding are ranked, including special tokens and the query's own.

    Args:
        model: the model.
        inputs: a batch, as for `overt.trace`.
        methods: any methods; by default all that read maps.
        query: the query whose row is compared, as for `correlate`.
        layer: the layer whose row is compared.
        seed: random seed of the shuffling.
        arguments: further arguments of `overt.trace`.
    """
    import torch

    names = tuple(known_methods("maps")) if methods is None else methods
    if isinstance(names, str) or not names:
        raise ValueError(f"methods must list some of {', '.join(known_methods())}, got {names!r}")
    chosen = {name: method_of(name, argument="methods") for name in names}
    changed = copy.deepcopy(model)
    before = trace(model, inputs, **arguments)
    # The top first: the decoder's layers, then the encoder's.
    paths = before.paths
    top, encoder = len(before.maps), len(before.encoder_maps)
    layers = list(dict.fromkeys(_layer(path) for path in reversed(paths[:top])))
    layers += list(dict.fromkeys(_layer(path) for path in reversed(paths[top : top + encoder])))
    generator = torch.Generator().manual_seed(seed)
    done: set[str] = set()

    queries = before.main_queries() if query is None else [query] * len(before)
    distinct = sorted(set(queries))
    places = [distinct.index(number) for number in queries]

    def rows(traced: Trace) -> dict[str, Floats]:
        """Each method's row of every example, at its query."""
        by_method = {}
        for name, method in chosen.items():
            values = traced.read(name, distinct, **method.fitting({"layers": layer})).numpy()[:, 0]
            # A model with one output for all tokens has one row, whatever the queries.
            by_method[name] = values[range(len(places)), places if values.shape[1] == len(distinct) else 0]
        return by_method

    original = rows(before)
    rho: dict[str, list[list[float]]] = {method: [] for method in chosen}  # by stage and sentence
    stages = []
    for stage in [*layers, ""]:
        shuffle(changed, generator, f"{stage}." if stage else "", done)
        stages.append(stage or "everything")
        now = rows(trace(changed, inputs, **arguments))
        for method in chosen:
            sentences = [
                float(spearman(now[method][i : i + 1, keep], original[method][i, keep])[0])
                for i, keep in enumerate(before.mask.numpy())
            ]
            rho[method].append(sentences)
    values = {method: np.array(stage_rows) for method, stage_rows in rho.items()}  # (stages, sentences)
    known = {method: ~np.isnan(table) for method, table in values.items()}
    by_all = np.logical_and.reduce(list(known.values()))
    return Sanity(
        stages,
        {method: _mean_where(table, known[method]) for method, table in values.items()},
        {method: known[method].sum(axis=1) for method in values},
        {method: _mean_where(table, by_all) for method, table in values.items()},
        by_all.sum(axis=1),
    )


def shuffle(model: nn.Module, generator: torch.Generator, prefix: str, done: set[str]) -> None:
    """Shuffle the entries of each parameter under a path that has not been shuffled yet, in place.

    Args:
        model: the model.
        generator: of random numbers, on the CPU.
        prefix: how the parameters' names begin; empty for all.
        done: names of those that have been shuffled, to which these are added.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in done and (name + ".").startswith(prefix):
                order = torch.randperm(parameter.numel(), generator=generator)
                parameter.copy_(parameter.flatten()[order.to(parameter.device)].view_as(parameter))
                done.add(name)


def _mean_where(values: Floats, counted: NDArray[np.bool_]) -> Floats:
    """Mean of each row over the counted values; NaN if there are none."""
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(counted, values, 0.0).sum(axis=1) / counted.sum(axis=1)
    return mean


def _layer(path: str) -> str:
    """The layer that an attention is in: its path up to the first number."""
    match = re.match(r"(.*?\.\d+)(?:\.|$)", path)
    return path if match is None else match.group(1)
