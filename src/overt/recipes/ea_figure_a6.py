"""Figure 6 of Wang et al. 2021's appendix: the maps of one sentence, and the parts that they evolve from.

The models are those of `ea-table-3` that judge whether a sentence is acceptable (CoLA).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

import overt
from overt._extras import need
from overt.recipes._figures import save_figure
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell
from overt.recipes._row_reports import mean_cell, report_of, values
from overt.recipes._runs import load_tokenizer
from overt.recipes._training import check_alone, torch_device
from overt.recipes.ea_understanding import notes_of, rates_grid
from overt.recipes.text_maps import layers_of, tokens_in
from overt.recipes.understanding_forms import PLAIN, row_name, trained_model
from overt.recipes.understanding_runs import OPTIONS, Plans, pretrained, run_forms
from overt.tracing.result import Trace

TASK, WRONG = "CoLA", "unacceptable"
EVOLVING = "Evolving"
FORMS = (PLAIN, EVOLVING)
SENTENCE, FROM, TO = "Mary tried John to go abroad.", "tried", "John"
# Row of the figure's table → the form, and the part of its maps; None for the map in use of a plain model.
PARTS = {
    PLAIN: (PLAIN, None),
    EVOLVING: (EVOLVING, "fused"),
    f"{EVOLVING}, convolution": (EVOLVING, "convolution"),
    f"{EVOLVING}, own map": (EVOLVING, "attention"),
}
FIGURE_OPTIONS = {
    **{name: OPTIONS[name] for name in ("epochs", "workers")},
    "layers": Option("numbers of layers, separated by commas; by default 2 and the last two"),
    "sentence": Option("what the models read", SENTENCE),
    "from": Option("the word that attends", FROM),
    "to": Option("the word that it attends to", TO),
}


def run(request: Request) -> Outcome:
    """Fine-tune the models that are not there, and trace the sentence with each."""
    need("matplotlib", "view")
    path = pretrained(request)
    check_alone(request.device, FIGURE_A6.name, "ea-table-3")
    options = request.options
    layers = layers_of(path, options["layers"], lambda count: (2, count - 1, count))
    sentence, words = options["sentence"], {name: options[name] for name in ("from", "to")}
    places = {name: places_of(path, sentence, name, word) for name, word in words.items()}
    planned: list[Plans] = []

    def needed(plans: Plans) -> list[str]:
        """The models of both forms."""
        planned.append(plans)
        return list(plans.rows)

    models = replace(
        request, fresh=False, options={**options, "tasks": None, "forms": None, "discard-models": False}
    )
    outcome = run_forms(models, (TASK,), FORMS, needed=needed)
    [plans] = planned
    per_seed = {seed: dict(rows) for seed, rows in outcome.per_seed.items()}
    shown: dict[str, Trace] = {}
    for form in FORMS:
        row = plans.rows[row_name(form, TASK)]
        for seed in range(request.seeds):
            model = trained_model(row, plans.folder(row.name, seed), FIGURE_A6.name)
            model = model.to(torch_device(request.device))
            trace = traced(model, sentence, plans.tokenizer, parts=form == EVOLVING)
            per_seed[seed][row.name] |= numbers_of(trace, form, layers, places)
            if seed == 0:
                shown[form] = trace
    page = plans.place / f"{FIGURE_A6.name}.html"
    overt.page(
        {f"{form}, seed 0": trace for form, trace in shown.items()}, title=f"What “{sentence}” attends to"
    ).save(page)
    request.console.print(f"[dim]maps of all layers and heads in {page}: open it in any browser[/dim]")
    read = {form: of_text(trace) for form, trace in shown.items()}
    maps = {
        label: {str(layer): as_lists(part_of(read[form], part, layer)) for layer in layers}
        for label, (form, part) in PARTS.items()
    }
    config = outcome.config | {
        "sentence": sentence,
        **words,
        "layers": list(layers),
        "tokens": read[PLAIN].tokens[0],
        "places": places,
        "maps": maps,
        "drawn_by": request.command,
    }
    return replace(outcome, config=config, per_seed=per_seed)


def places_of(path: str, sentence: str, option: str, word: str) -> list[int]:
    """The tokens of a word that a sentence has once, for the tokenizer of a model."""
    found = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", sentence) if word]
    if len(found) != 1:
        raise ValueError(
            f"--{option} must be a word that the sentence has once, got {word!r}, which {sentence!r} has "
            f"{len(found)} times"
        )
    tokenizer = load_tokenizer(path)
    if not tokenizer.is_fast:
        raise ValueError(
            f"--model {path} must have a fast tokenizer, which tells where in a sentence its tokens are, "
            f"got {type(tokenizer).__name__}"
        )
    offsets = tokenizer(sentence, return_offsets_mapping=True)["offset_mapping"]
    places = tokens_in(offsets, *found[0])
    if not places:
        raise ValueError(f"--{option} must have tokens, got {word!r}, for which the tokenizer has none")
    return places


def traced(model: Any, sentence: str, tokenizer: Any, parts: bool) -> Trace:
    """The trace of a sentence, with all heads; an encoder–decoder's decoder reads it too, as in training."""
    more = {}
    if getattr(model.config, "is_encoder_decoder", False) and hasattr(model, "_shift_right"):
        ids = tokenizer(sentence, return_tensors="pt")["input_ids"].to(model.device)
        more["decoder"] = model._shift_right(ids)
    return overt.trace(model, sentence, tokenizer=tokenizer, heads=True, parts=parts, **more)


def of_text(trace: Trace) -> Trace:
    """The trace of the layers that read the sentence: of an encoder–decoder, the encoder."""
    return trace.encoder if trace.kind == "encoder–decoder" else trace


def part_of(trace: Trace, part: str | None, layer: int) -> Tensor | None:
    """A part of a layer's map, averaged over heads, (query, key); None where a chain of maps starts."""
    cells = trace.maps[layer - 1] if part is None else trace.parts[part][layer - 1]
    return None if cells is None else cells[0].double().mean(dim=0)


def weight_between(cells: Tensor, queries: Sequence[int], keys: Sequence[int]) -> float:
    """A word's weight on another: the sum over the tokens of the other, the mean over its own."""
    return float(cells[list(queries)][:, list(keys)].sum(dim=1).mean())


def numbers_of(
    trace: Trace, form: str, layers: Sequence[int], places: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """The weight between the words in each part and layer, and what the model says."""
    read = of_text(trace)
    numbers: dict[str, Any] = {}
    for label, (whose, part) in PARTS.items():
        for layer in layers if whose == form else ():
            cells = part_of(read, part, layer)
            numbers[key_of(label, layer)] = (
                None if cells is None else weight_between(cells, places["from"], places["to"])
            )
    [said] = trace.predictions()
    numbers["says"] = said.labels[0]
    numbers[f"p {WRONG}"] = float(said.mean[said.labels.index(WRONG)])
    return numbers


def key_of(label: str, layer: int) -> str:
    """Key of a weight among the numbers of a model."""
    return f"weight, {label}, layer {layer}"


def as_lists(cells: Tensor | None) -> list[list[float]] | None:
    """A map as plain JSON."""
    return None if cells is None else [[round(float(weight), 4) for weight in line] for line in cells]


def report(outcome: Outcome) -> Report:
    """The weight between the two words, and what the models say."""
    config = outcome.config
    layers, sentence = config["layers"], config["sentence"]
    words = f"{config['from']} → {config['to']}"
    lines = []
    for label, (form, _) in PARTS.items():
        found = [values(outcome, row_name(form, TASK), key_of(label, layer)) for layer in layers]
        lines.append((label, [str(max(map(len, found))), *(mean_cell(each, 3) for each in found)]))
    uniform = len(config["places"]["to"]) / len(config["tokens"])
    lines.append(("uniform weights", ["", *[cell(uniform, digits=3)] * len(layers)]))
    verdicts = []
    for form in FORMS:
        name = row_name(form, TASK)
        says = [rows[name]["says"] for rows in outcome.per_seed.values() if "says" in rows.get(name, {})]
        probability = mean_cell(values(outcome, name, f"p {WRONG}"), 3)
        verdicts.append((form, [str(len(says)), f"{says.count(WRONG)} of {len(says)}", probability]))
    notes = [
        "The weight of a word on another is the mean over heads and over its own tokens, and the sum over "
        "the tokens of the other. A map that evolves is the softmax of a mixture of the layer's own scores, "
        "those of the layer before and their convolution; convolution and own map are shown after a softmax "
        "of their own.",
        f"The figure shows “{sentence}” as the models of seed 0 read it: means over heads, each map with its "
        "own scale. "
        "In the paper's, which shows one model of each kind and has no numbers, plain attention misjudges "
        "the sentence, and in the last layer “tried” attends to “John” visibly only where maps evolve.",
        *notes_of(outcome),
    ]
    columns = [f"layer {layer}" for layer in layers]
    grids = [
        Grid(f"Weight {words}", ["n", *columns], lines),
        Grid(f"“{sentence}”", ["n", f"says {WRONG}", f"probability of {WRONG}"], verdicts),
        rates_grid(outcome),
    ]
    return report_of(grids, notes)


def draw(outcome: Outcome, path: Path) -> None:
    """The maps of each layer side by side, with the two words' cells framed; as SVG, and as PNG beside it."""
    need("matplotlib", "view")
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    config = outcome.config
    layers, tokens, maps = config["layers"], config["tokens"], config["maps"]
    side = 0.6 + 0.2 * len(tokens)
    figure = Figure(figsize=(side * len(maps), side * len(layers)), layout="constrained")
    grid = figure.subplots(len(layers), len(maps), squeeze=False)
    for line, layer in zip(grid, layers, strict=True):
        for axes, (label, by_layer) in zip(line, maps.items(), strict=True):
            axes.set_title(f"{label}, layer {layer}", fontsize="small")
            cells = by_layer[str(layer)]
            if cells is None:  # the first of a chain has no convolution
                axes.axis("off")
                continue
            axes.imshow(cells, cmap="viridis", vmin=0.0)
            axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize="x-small")
            axes.set_yticks(range(len(tokens)), tokens, fontsize="x-small")
            for query in config["places"]["from"]:
                for key in config["places"]["to"]:
                    axes.add_patch(Rectangle((key - 0.5, query - 0.5), 1, 1, fill=False, edgecolor="red"))
    save_figure(figure, path)
    save_figure(figure, path.with_suffix(".png"))


FIGURE_A6 = Recipe(
    name="ea-figure-a6",
    title="What the words of a sentence attend to",
    paper="Wang et al. 2021, Evolving Attention with Residual Convolutions, Figure 6 of its appendix",
    published={"figure": "maps of layers 2, 11 and 12 of BERT-Base and EA-BERT-Base, without numbers"},
    run=run,
    report=report,
    seeds=5,
    folder="understanding",
    options=FIGURE_OPTIONS,
    draw=draw,
)
