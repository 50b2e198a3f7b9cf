"""The demo's ending: where its models' answers come from, on a few sentences, in numbers and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import overt
from overt.data.agreement import VOCABULARY, Sentence
from overt.data.batching import Collate, batches
from overt.models.agreement import AgreementClassifier
from overt.recipes._recipe import Grid, cell, once
from overt.recipes._tables import show
from overt.recipes.flow_measure import (
    METHODS,
    REFERENCES,
    classifier_batches,
    comparable,
    correlated,
    layers,
)
from overt.tracing.tracer import everything

if TYPE_CHECKING:
    from rich.console import Console

SHOWN = 3  # sentences, of at most as many words:
WORDS = 8
EXAMPLES = 100  # sentences to correlate on
BATCH = 20  # of similar length, so that little is padding

_PAIRS = [(reference, method) for reference in REFERENCES for method in METHODS]


def end(
    console: Console,
    models: dict[str, tuple[Path, AgreementClassifier]],
    test: Sequence[Sentence],
    collate: Collate[Sentence],
    page: Path,
) -> None:
    """Print traces of a few sentences with attractors, then how attention ranks words over many.

    The same sentences, read by every form, go onto a page.

    Args:
        console: to print on.
        models: form → its folder, where the numbers are kept, and its model; traces are of the first.
        test: sentences that the models were not trained on.
        collate: makes a batch of them.
        page: where to write the page.
    """
    first = next(iter(models))
    short = [sentence for sentence in test if sentence.attractors and len(sentence.tokens) <= WORDS]
    console.print(
        f"Where the {first} model's answers come from: attention of the CLS token at the last layer (flow in "
        "shares of its sum), and how much the right answer's probability falls when a word is blanked out."
    )
    for sentence in short[:SHOWN]:
        show(console, _traced(models[first][1], sentence, collate))
    found = {
        form: _correlated(console, folder, form, model, test[:EXAMPLES], collate)
        for form, (folder, model) in models.items()
    }
    show(console, _by_layer(first, found[first]))
    show(console, _last(found))
    _write_page({form: model for form, (_, model) in models.items()}, short[:SHOWN], collate, page)
    line = f"{page} has the traces of these sentences by all forms: open it in any browser"
    console.print(line, style="bold", markup=False, soft_wrap=True)


def _traced(model: AgreementClassifier, sentence: Sentence, collate: Collate[Sentence]) -> Grid:
    """One sentence: a column for each word, a row for each method."""
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
    """Traces of the sentences by all forms, with parts and posterior samples where a form has them."""
    traces = {}
    for sentence in sentences:
        [(inputs, labels)] = classifier_batches([[(0, sentence)]], collate)
        for form, model in models.items():
            given = {**inputs, "labels": labels}
            trace = overt.trace(model, given, tokens=[["[CLS]", *sentence.tokens]], **everything(model))
            trace.special[:, 0] = True
            trace.labels = ["singular", "plural"]
            traces[f"{form}: {sentence}"] = trace
    path.parent.mkdir(parents=True, exist_ok=True)
    title = "Overt: subject–verb agreement"
    unk = VOCABULARY.index("[UNK]")
    overt.page(traces, title=title, methods=METHODS, importances="auto", unk=unk).save(path)


def _correlated(
    console: Console,
    folder: Path,
    form: str,
    model: AgreementClassifier,
    test: Sequence[Sentence],
    collate: Collate[Sentence],
) -> dict[str, Any]:
    """Correlations of one form, kept beside its model."""

    def measure() -> dict[str, Any]:
        ready = classifier_batches(batches(test, BATCH, seed=0), collate)
        return correlated(model, ready, console, form, unk=VOCABULARY.index("[UNK]"), bootstrap=1)

    return once(folder / f"correlations-{len(test)}.json", measure)


def _by_layer(form: str, found: dict[str, Any]) -> Grid:
    """Every layer of one form."""
    common = comparable(found)
    rows = [
        (f"{method}, {REFERENCES[reference]}", [cell(value) for value in common[reference][method]["mean"]])
        for reference, method in _PAIRS
    ]
    title = f"Spearman correlation of the {form} model's CLS row with importance"
    return Grid(
        f"{title}, {found['count']} sentences, of which those that all methods rank",
        layers(len(rows[0][1])),
        rows,
    )


def _last(found: dict[str, Any]) -> Grid:
    """The last layer of every form."""
    rows = [
        (
            f"{method}, {REFERENCES[reference]}",
            [cell(comparable(numbers)[reference][method]["mean"][-1]) for numbers in found.values()],
        )
        for reference, method in _PAIRS
    ]
    return Grid("The same at the last layer, all forms", list(found), rows)
