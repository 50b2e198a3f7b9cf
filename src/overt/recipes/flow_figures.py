"""Figures 1–3 of Abnar & Zuidema 2020: raw attention, rollout and flow of a few sentences, all layers.

The networks are those of Table 1, with plain attention. The paper prints two of its three sentences; the
first here is the example of its section 2. Does the answer change with the subject, as the paper says?
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import overt
from overt._extras import need
from overt.data import linzen
from overt.models.agreement import AgreementClassifier
from overt.recipes import flow_measure
from overt.recipes._figures import PNG_DPI
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell, mean, spread
from overt.recipes._training import torch_device
from overt.recipes.flow_measure import METHODS
from overt.recipes.flow_tables import STEPS, load_trained, settings_of, train_once

FORM = "plain"
DIGITS = 6  # of stored weights


@dataclass(frozen=True)
class Sentence:
    """A sentence of the figures; its verb is singular.

    Attributes:
        words: before the verb.
        old: the word that is changed.
        new: what it is changed to.
        published: what the paper says of the network's answer, and of the answer after the change.
    """

    words: tuple[str, ...]
    old: str
    new: str
    published: str

    @property
    def text(self) -> str:
        """The words as text."""
        return " ".join(self.words)

    @property
    def changed(self) -> tuple[str, ...]:
        """The words after the change."""
        return tuple(self.new if word == self.old else word for word in self.words)


SENTENCES = (
    Sentence(("the", "key", "to", "the", "cabinets"), "key", "keys", "–"),
    Sentence(("the", "article", "on", "NNP", "large", "systems"), "article", "articles", "right, flips"),
    Sentence(("here", "the", "NNS", "differ", "in", "that", "the", "female"), "NNS", "NNP", "wrong, flips"),
)
SHOWN = {1: SENTENCES[:1], 2: SENTENCES, 3: SENTENCES}
STRIPS = {2: ("raw",), 3: ("rollout", "flow")}  # methods of the figures that show CLS alone


def run(request: Request, number: int) -> Outcome:
    """Train the networks that are missing, and trace the sentences of a figure."""
    need("accelerate", "train")
    corpus = linzen.load(request.data)
    description = corpus.describe()
    settings = settings_of(request.options["steps"], description)
    per_seed: dict[int, dict[str, Any]] = {}
    maps: dict[str, Any] = {}
    for seed in range(request.seeds):
        folder, row = train_once(request, FORM, corpus, settings | {"seed": seed})
        model = load_trained(folder, corpus).to(torch_device(request.device))
        numbers: dict[str, Any] = {}
        for sentence in SHOWN[number]:
            traces = {words: trace_of(model, corpus, words) for words in (sentence.words, sentence.changed)}
            before, after = (p_plural(trace) for trace in traces.values())
            last = {method: _last_row(traces[sentence.words], method) for method in METHODS}
            numbers[sentence.text] = {"plural": before, "changed": after, "last": last}
            if seed == 0:
                maps |= {" ".join(words): _stored(trace) for words, trace in traces.items()}
        per_seed[seed] = {"test": row["test"], "hardware": row["hardware"], "sentences": numbers}
    words = {word for sentence in SHOWN[number] for word in (*sentence.words, *sentence.changed)}
    config = settings | {
        "data": description,
        "figure": number,
        "unknown": sorted(words - corpus.index.keys()),
        "maps": maps,
        "trained_on": sorted({row["hardware"] for row in per_seed.values()}),
    }
    return Outcome(config, per_seed, stand_in=description["name"].startswith("no data"))


def trace_of(model: AgreementClassifier, corpus: linzen.Corpus, words: tuple[str, ...]) -> overt.Trace:
    """The trace of one sentence, whose tokens have the words as names, and whose first is special."""
    ids = torch.tensor([corpus.encode(linzen.Prefix(words, plural=False))])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    trace = overt.trace(model, inputs)
    return _named(trace, ["[CLS]", *words])


def _named(trace: overt.Trace, tokens: list[str]) -> overt.Trace:
    special = torch.tensor([[token == "[CLS]" for token in tokens]])
    return replace(trace, tokens=[tokens], special=special)


def p_plural(trace: overt.Trace) -> float:
    """The network's probability of a plural verb."""
    assert trace.outputs is not None
    return float(torch.softmax(trace.outputs[0].double(), dim=-1)[1])


def _last_row(trace: overt.Trace, method: str) -> list[float]:
    """What CLS draws on in the last layer, word by word."""
    return [round(float(weight), DIGITS) for weight in trace.read(method, 0, layers=-1)[0, 0, 0, 1:]]


def _stored(trace: overt.Trace) -> dict[str, Any]:
    """Tokens, maps and outputs as plain JSON, from which figure and page can be drawn again."""
    assert trace.outputs is not None
    layers = [[[round(float(cell), DIGITS) for cell in row] for row in layer[0]] for layer in trace.maps]
    return {"tokens": trace.tokens[0], "maps": layers, "outputs": trace.outputs[0].tolist()}


def restored(stored: dict[str, Any]) -> overt.Trace:
    """A trace from the tokens, maps and outputs in a result file."""
    tokens = stored["tokens"]
    maps = [torch.tensor([layer], dtype=torch.float64) for layer in stored["maps"]]
    mask = torch.ones(1, len(tokens), dtype=torch.bool)
    trace = overt.Trace(
        kind="encoder",
        maps=[cells / cells.sum(dim=-1, keepdim=True) for cells in maps],  # as they were before rounding
        mask=mask,
        tokens=[tokens],
        special=torch.zeros_like(mask),
        outputs=torch.tensor([stored["outputs"]]),
        labels=["singular", "plural"],
    )
    return _named(trace, tokens)


def report(outcome: Outcome) -> Report:
    """What the networks answer, before and after the change, and what CLS draws on in the last layer."""
    config, rows = outcome.config, []
    shown = SHOWN[config["figure"]]
    seeds = list(outcome.per_seed.values())
    for sentence in shown:
        found = [row["sentences"][sentence.text] for row in seeds]
        before, after = ([numbers[key] for numbers in found] for key in ("plural", "changed"))
        flips = sum((a < 0.5) != (b < 0.5) for a, b in zip(before, after, strict=True))
        rows.append(
            (
                sentence.text,
                [
                    cell(mean(before), spread(before)),
                    f"{sum(p < 0.5 for p in before)} of {len(seeds)}",
                    f"{sentence.old} → {sentence.new}",
                    cell(mean(after), spread(after)),
                    f"{flips} of {len(seeds)}",
                    sentence.published,
                ],
            )
        )
    columns = ["p(plural)", "right", "changed", "p(plural) then", "flips", "published"]
    grids = [Grid("The networks' answers; a singular verb is right", columns, rows)]
    for sentence in shown:
        lines = []
        for method in METHODS:
            by_seed = [row["sentences"][sentence.text]["last"][method] for row in seeds]
            lines.append(
                (method, [cell(mean(list(word)), spread(list(word))) for word in zip(*by_seed, strict=True)])
            )
        title = f"“{sentence.text}”: what CLS draws on in the last layer, mean±sd over seeds"
        grids.append(Grid(title, list(sentence.words), lines))
    test = [row["test"] for row in seeds]
    notes = [
        f"Networks of Table 1 with plain attention; accuracy on the test part {cell(mean(test), digits=3)}. "
        "The figure shows the network of seed 0, and the page beside it the sentences before and after the "
        "change, with all methods.",
        "The paper prints two of its three sentences. The third, of Figure 1 and the first panels of Figures "
        "2 and 3, it does not print; “the key to the cabinets” is the example of its section 2.",
        f"Data: {config['data']['name']}.",
    ]
    if config["unknown"]:
        notes.append(
            f"Words that the networks do not know, and read as [UNK]: {', '.join(config['unknown'])}."
        )
    return Report(grids, notes)


def draw(outcome: Outcome, path: Path) -> None:
    """The figure as SVG and PNG, and an interactive page."""
    need("matplotlib", "view")
    from matplotlib.figure import Figure

    from overt.view.plots import plot, plot_compare, save

    number = outcome.config["figure"]
    traces = {text: restored(stored) for text, stored in outcome.config["maps"].items()}
    shown = {sentence.text: traces[sentence.text] for sentence in SHOWN[number]}
    if number == 1:
        figure: Any = Figure(figsize=(10, 3.2), layout="constrained")
        [trace] = shown.values()
        parts = figure.subfigures(1, len(METHODS))
        for part, method in zip(parts, METHODS, strict=True):
            plot(trace, "graph", method=method, special=True, figure=part)
    else:
        methods = STRIPS[number]
        letters = dict(zip("abc", shown.values(), strict=True))  # the words are below each panel
        figure = plot_compare(letters, methods=methods, columns=len(methods))
    save(figure, path)
    save(figure, path.with_suffix(".png"), dpi=PNG_DPI)
    answered = {f"{text} … {answer_of(trace)}": trace for text, trace in traces.items()}
    page = overt.page(
        answered, title=f"Abnar & Zuidema 2020, Figure {number}", methods=STRIPS.get(number, METHODS)
    )
    page.save(path.with_suffix(".html"))


def answer_of(trace: overt.Trace) -> str:
    """What the network says of the verb: "is" or "are", and how likely it is."""
    plural = p_plural(trace)
    return f"are ({plural:.2f})" if plural > 0.5 else f"is ({1 - plural:.2f})"


def _recipe(number: int, title: str, published: str) -> Recipe:
    return Recipe(
        name=f"flow-figure-{number}",
        title=title,
        paper=f"{flow_measure.PAPER}, Figure {number}",
        published={"figure": published},
        run=partial(run, number=number),
        report=report,
        seeds=3,
        folder="flow-agreement",
        options={"steps": Option("number of training steps per model", STEPS, least=1)},
        draw=draw,
    )


FIGURE_1 = _recipe(
    1, "Attention of all words, layer by layer", "raw attention, rollout and flow as graphs, without numbers"
)
FIGURE_2 = _recipe(
    2, "Raw attention of CLS, layer by layer", "raw attention of three sentences, without numbers"
)
FIGURE_3 = _recipe(
    3,
    "Rollout and flow of CLS, layer by layer",
    "rollout and flow of three sentences as maps, without numbers",
)
