"""The last part of the demo: which words its models draw on, in numbers and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import overt
from overt.data.agreement import VOCABULARY, Sentence
from overt.data.batching import Collate, batches
from overt.models.agreement import AgreementClassifier
from overt.recipes._recipe import Grid, cell
from overt.recipes._runs import measure_once
from overt.recipes._tables import show
from overt.recipes.flow_measure import (
    METHODS,
    REFERENCES,
    classifier_batches,
    common_numbers,
    correlate,
    layer_names,
)
from overt.tracing.tracer import everything

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 3  # sentences to print
WORDS = 8  # their greatest length
EXAMPLES = 100  # sentences to correlate on
BATCH = 20  # sentences of similar length, which keeps padding low

_PAIRS = [(reference, method) for reference in REFERENCES for method in METHODS]


def show_traces(
    console: Console,
    models: dict[str, tuple[Path, AgreementClassifier]],
    test: Sequence[Sentence],
    collate: Collate[Sentence],
    page: Path,
) -> None:
    """Print traces of a few sentences with attractors, then rank correlations over many sentences.

    Traces of the few sentences by every form are written to a page.

    Args:
        console: console to print on.
        models: form → its folder, which stores the numbers, and its model; the first is traced in print.
        test: sentences that the models were not trained on.
        collate: makes a batch of sentences.
        page: path of the page.
    """
    first = next(iter(models))
    short = [sentence for sentence in test if sentence.attractors and len(sentence.tokens) <= WORDS]
    console.print(
        f"What the {first} model's answers draw on: attention of the CLS token at the last layer (flow as a "
        "share of its sum), and how much the right answer's probability falls when a word is blanked out."
    )
    for sentence in short[:SHOWN]:
        show(console, _trace_grid(models[first][1], sentence, collate))
    correlations = {
        form: _correlations(console, folder, form, model, test[:EXAMPLES], collate)
        for form, (folder, model) in models.items()
    }
    show(console, _layers_grid(first, correlations[first]))
    show(console, _forms_grid(correlations))
    _write_page({form: model for form, (_, model) in models.items()}, short[:SHOWN], collate, page)
    line = f"{page} shows the traces of these sentences by all forms: open it in any browser"
    console.print(line, style="bold", markup=False, soft_wrap=True)


def _trace_grid(model: AgreementClassifier, sentence: Sentence, collate: Collate[Sentence]) -> Grid:
    """The trace of one sentence: a column for each word, a row for each method."""
    [(inputs, labels)] = classifier_batches([[(0, sentence)]], collate)
    trace = overt.trace(model, inputs)
    rows = [
        (method, getattr(trace, method)(queries=0, layers=-1, normalize=method == "flow")[0, 0, 0])
        for method in METHODS
    ]
    rows.append(("blank-out", trace.blankout(target=labels, unk=VOCABULARY.index("[UNK]"))[0, 0, 0]))
    words = [f"{word}*" if place in sentence.subject else word for place, word in enumerate(sentence.tokens)]
    number = "plural" if sentence.plural else "singular"
    return Grid(
        f"{sentence} → {number} (* subject)",
        ["[CLS]", *words],
        [(name, [cell(float(value)) for value in values]) for name, values in rows],
    )


def _write_page(
    models: dict[str, AgreementClassifier],
    sentences: Sequence[Sentence],
    collate: Collate[Sentence],
    path: Path,
) -> None:
    """Write traces of the sentences by all forms, with parts and posterior samples where a form has them."""
    traces = {}
    for sentence in sentences:
        [(inputs, labels)] = classifier_batches([[(0, sentence)]], collate)
        for form, model in models.items():
            labelled = {**inputs, "labels": labels}
            trace = overt.trace(model, labelled, tokens=[["[CLS]", *sentence.tokens]], **everything(model))
            trace.special[:, 0] = True
            trace.labels = ["singular", "plural"]
            traces[f"{form}: {sentence}"] = trace
    path.parent.mkdir(parents=True, exist_ok=True)
    title = "Overt: subject–verb agreement"
    unk = VOCABULARY.index("[UNK]")
    overt.page(traces, title=title, methods=METHODS, importances="auto", unk=unk).save(path)


def _correlations(
    console: Console,
    folder: Path,
    form: str,
    model: AgreementClassifier,
    test: Sequence[Sentence],
    collate: Collate[Sentence],
) -> dict[str, Any]:
    """Correlations of one form, stored in its folder."""

    def measure() -> dict[str, Any]:
        ready = classifier_batches(batches(test, BATCH, seed=0), collate)
        return correlate(model, ready, console, form, unk=VOCABULARY.index("[UNK]"), bootstrap=1)

    return measure_once(folder / f"correlations-{len(test)}.json", measure)


def _layers_grid(form: str, correlations: dict[str, Any]) -> Grid:
    """Correlations of one form at every layer."""
    common = common_numbers(correlations)
    rows = [
        (f"{method}, {REFERENCES[reference]}", [cell(value) for value in common[reference][method]["mean"]])
        for reference, method in _PAIRS
    ]
    title = f"Spearman correlation of the {form} model's CLS row with importance"
    return Grid(
        f"{title}, {correlations['count']} sentences, of which those that all methods rank",
        layer_names(len(rows[0][1])),
        rows,
    )


def _forms_grid(correlations: dict[str, Any]) -> Grid:
    """Correlations of every form at the last layer."""
    rows = [
        (
            f"{method}, {REFERENCES[reference]}",
            [
                cell(common_numbers(numbers)[reference][method]["mean"][-1])
                for numbers in correlations.values()
            ],
        )
        for reference, method in _PAIRS
    ]
    return Grid("The same at the last layer, all forms", list(correlations), rows)
