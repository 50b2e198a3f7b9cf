"""What Table 7 of Wang et al. 2021 asks of images, asked of text: how much of a sentence do maps hold?

A second network sees nothing but one layer's maps of a fine-tuned model, and must tell the sentence's class.
Controls show what it reaches without what was learnt: maps of an untrained model, uniform maps, and permuted
labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from overt._workers import Tell
from overt.data import glue
from overt.data.glue import Row, Splits
from overt.models.map_probe import TEXT_LAYERS, TEXT_WIDTH, TextMapProbe
from overt.recipes import map_probing
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell, counted
from overt.recipes._row_reports import gains_grid, mean_cell, report_of, values
from overt.recipes._rows import Known, Task, look_up, settings_of, stored_result
from overt.recipes._runs import finish_run, run_record
from overt.recipes._training import (
    be_quiet,
    check_alone,
    hardware,
    one_thread,
    torch_device,
    versions,
)
from overt.recipes.ea_understanding import notes_of, rates_grid
from overt.recipes.map_probing import END, Probed, permuted
from overt.recipes.text_maps import (
    LONGEST,
    SentenceMaps,
    layers_of,
    sentence_maps,
    uniform_maps,
    untrained,
)
from overt.recipes.text_training import Encoded, encode
from overt.recipes.understanding_forms import PLAIN, row_name, trained_model
from overt.recipes.understanding_runs import OPTIONS, Plans, pretrained, run_forms, scores_of
from overt.recipes.vision_training import ImageTraining

Control = Literal["untrained", "uniform", "permuted"]
TASKS = ("CoLA", "SST-2")
EVOLVING = "Evolving"
FORMS = (PLAIN, EVOLVING)
ROWS, EPOCHS, BATCH = 20_000, 10, 128
PROBE_OPTIONS = {
    "tasks": Option("tasks, separated by commas; by default CoLA and SST-2"),
    **{name: OPTIONS[name] for name in ("epochs", "workers")},
    "layers": Option("numbers of layers, separated by commas; by default 2, the middle, and the last two"),
    "probe-epochs": Option("epochs of the second network", EPOCHS, least=1),
    "probe-rows": Option("training rows that the second network sees at most", ROWS, least=2),
}


@dataclass(frozen=True)
class TextProbeRow:
    """What the second network sees.

    Attributes:
        task: of GLUE.
        form: of the model whose maps it sees; None for uniform maps.
        layer: number of the layer, from 1 on; None for uniform maps.
        control: what is not as it should be.
        training: settings of the second network's training.
        made_by: what made the maps, as plain JSON: settings of the model's training, or of an untrained one.
    """

    task: str
    form: str | None
    layer: int | None
    control: Control | None
    training: ImageTraining
    made_by: dict[str, Any]

    @property
    def name(self) -> str:
        """In tables and of the folder."""
        return probe_name(self.label, self.task, self.layer)

    @property
    def label(self) -> str:
        """Without task and layer."""
        return label_of(self.form, self.control)

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "task": self.task,
            "form": self.form,
            "layer": self.layer,
            "control": self.control,
            "training": {**self.training.settings(), "end": END},
            "made_by": self.made_by,
        }


def label_of(form: str | None, control: Control | None) -> str:
    """What a row shows, in words."""
    words = {"untrained": f"untrained {form}", "permuted": f"{form}, permuted labels"}
    return "uniform maps" if form is None else form if control is None else words[control]


def probe_name(label: str, task: str, layer: int | None) -> str:
    """Name of a row."""
    return f"{label}, {task}" if layer is None else f"{label}, {task}, layer {layer}"


class Sentences(NamedTuple):
    """A task's rows for the second network: tokenized, and their labels."""

    train: list[Encoded]
    train_labels: Tensor
    test: list[Encoded]
    test_labels: Tensor


class Shared(NamedTuple):
    """What all tasks need: the sentences, the runs of models, and the pretrained model."""

    texts: Mapping[str, Sentences]
    plans: Plans
    path: str


def run(request: Request) -> Outcome:
    """Fine-tune the models that are not there, and train a second network on the maps of each layer."""
    path = pretrained(request)
    check_alone(request.device, PROBE.name, "ea-table-3")
    layers = layers_of(path, request.options["layers"], lambda count: (2, count // 2, count - 1, count))
    device = torch_device(request.device).type
    most, epochs = request.options["probe-rows"], request.options["probe-epochs"]
    planned: list[tuple[Known, Shared, dict[str, TextProbeRow]]] = []

    def needed(plans: Plans) -> list[str]:
        """The models whose maps are missing."""
        texts = {task: sentences_of(plans, task, most) for task in plans.splits}
        rows = rows_of(plans, texts, layers, epochs)
        common = {"longest": LONGEST, "rows": most, "width": TEXT_WIDTH}
        common["precision"] = "bfloat16" if device == "cuda" else "float32"
        place = plans.place / "probes"
        chosen = [name for name, row in rows.items() if row.task in plans.asked]
        known = look_up(request, rows, chosen, place, common, lambda row: row.training, device)
        planned.append((known, Shared(texts, plans._replace(splits={}), path), rows))
        asked = [task.row for task in known.tasks if task.row.control in (None, "permuted")]
        return list(dict.fromkeys(row_name(row.form, row.task) for row in asked))

    models = replace(
        request, fresh=False, options={**request.options, "forms": None, "discard-models": False}
    )
    trained = run_forms(models, TASKS, FORMS, needed=needed)
    [(known, shared, rows)] = planned
    known.fill(
        request,
        shared,
        perform,
        milliseconds=lambda task: fastest_update(task, shared),
        line=lambda numbers: cell(numbers["score"]),
        prepare=one_thread,
        together=False,
        alike=lambda task: task.row.control == "uniform",
    )
    config = {
        **trained.config,
        "layers": list(layers),
        "probe": {"rows": most, "epochs": epochs, "batch": BATCH, "width": TEXT_WIDTH},
        "probed": {task: len(each.train) for task, each in shared.texts.items()},
        "chance": {task: chance(task, each.test_labels) for task, each in shared.texts.items()},
    }
    return with_trials(known.outcome(config, rows, stand_in=False), trained)


def with_trials(outcome: Outcome, trained: Outcome) -> Outcome:
    """An outcome with the trainings that chose the learning rates, so that these are known another time."""
    models = trained.config["rows"]
    per_seed = {
        seed: {
            **outcome.per_seed.get(seed, {}),
            **{name: entry for name, entry in trained.per_seed.get(seed, {}).items() if name not in models},
        }
        for seed in sorted({*outcome.per_seed, *trained.per_seed})
    }
    return replace(
        outcome,
        per_seed=per_seed,
        continued=outcome.continued or trained.continued,
        measured=outcome.measured or trained.measured,
    )


def sentences_of(plans: Plans, task: str, most: int) -> Sentences:
    """Some of the rows that models are trained on, and the development rows, cut to LONGEST tokens."""
    splits = plans.splits[task]
    share = plans.rows[row_name(PLAIN, task)].share
    train = glue.set_apart(splits.train, share)[0] if share else splits.train
    train, test = some_of(train, most), development(splits)
    train_labels, test_labels = (torch.tensor([row.label for row in rows]) for rows in (train, test))
    coded = [encode(rows, plans.tokenizer, LONGEST) for rows in (train, test)]
    return Sentences(coded[0], train_labels, coded[1], test_labels)


def some_of(rows: Sequence[Row], most: int) -> list[Row]:
    """Rows drawn at random, always the same, in their order; all if there are no more."""
    places = sorted(Random(0).sample(range(len(rows)), min(most, len(rows))))
    return [rows[place] for place in places]


def development(splits: Splits) -> list[Row]:
    """The development rows."""
    return splits.dev[next(iter(splits.task.server_rows))]


def chance(task: str, labels: Tensor) -> float:
    """The task's metric in % of the most frequent class, predicted for every row."""
    metric = glue.TASKS[task].metrics[0]
    best = Counter(labels.tolist()).most_common(1)[0][0]
    logits = torch.nn.functional.one_hot(torch.full_like(labels, best), int(labels.max()) + 1).double()
    return float(scores_of(glue.TASKS[task], logits, labels)[metric] or 0.0)


def rows_of(
    plans: Plans, texts: Mapping[str, Sentences], layers: Sequence[int], epochs: int
) -> dict[str, TextProbeRow]:
    """All rows by name: both forms, then the controls."""
    made = []
    for task, each in texts.items():
        training = map_probing.plan(len(each.train), BATCH, epochs)
        model = plans.rows[row_name(EVOLVING, task)]
        by = {form: plans.rows[row_name(form, task)].settings() for form in FORMS}
        drawn = {"model": model.model, "mechanisms": settings_of(model.mechanisms)}
        data = {"data": model.data, "held_out": model.share}
        middle = layers[len(layers) // 2]
        made += [
            *(
                TextProbeRow(task, form, layer, None, training, by[form])
                for form in FORMS
                for layer in layers
            ),
            *(TextProbeRow(task, EVOLVING, layer, "untrained", training, drawn | data) for layer in layers),
            TextProbeRow(task, EVOLVING, middle, "permuted", training, by[EVOLVING]),
            TextProbeRow(task, None, None, "uniform", training, {"model": model.model, **data}),
        ]
    return {row.name: row for row in made}


def fastest_update(task: Task, shared: Shared) -> float:
    """Milliseconds of an update of the second network."""
    row: TextProbeRow = task.row
    texts = shared.texts[row.task]
    rows = texts.train[: task.training.batch]
    [(maps, lengths)] = maps_of(row, task.seed, shared, torch_device(task.device), rows)
    classes = len(glue.TASKS[row.task].classes)
    model = Probed(TextMapProbe(maps.shape[1], classes), maps, texts.train_labels[: len(maps)], lengths)
    return map_probing.fastest_update(model, task.training, task.device)


def maps_of(
    row: TextProbeRow, seed: int, shared: Shared, device: torch.device, *parts: Sequence[Encoded]
) -> list[SentenceMaps]:
    """What the second network sees of sentences, part by part."""
    if row.form is None or row.layer is None:
        return [uniform_maps(rows) for rows in parts]
    plans = shared.plans
    planned = plans.rows[row_name(row.form, row.task)]
    if row.control == "untrained":
        model = untrained(shared.path, glue.TASKS[row.task].classes, planned.mechanisms, seed)
    else:
        model = trained_model(planned, plans.folder(planned.name, seed), PROBE.name)
    model = model.to(device)
    return [sentence_maps(model, rows, plans.tokenizer, row.layer) for rows in parts]


def perform(task: Task, shared: Shared, tell: Tell) -> dict[str, Any]:
    """Make the maps, train the second network on them, test it, and store the numbers."""
    row: TextProbeRow = task.row
    texts, device = shared.texts[row.task], torch_device(task.device)
    be_quiet()
    train, test = maps_of(row, task.seed, shared, device, texts.train, texts.test)
    torch.manual_seed(task.seed)
    labels = permuted(texts.train_labels, task.seed) if row.control == "permuted" else texts.train_labels
    known = glue.TASKS[row.task]
    probe = TextMapProbe(train.maps.shape[1], len(known.classes))
    model = Probed(probe, train.maps, labels, train.lengths).to(device)
    numbers = map_probing.train(model, task, tell)
    numbers |= scores_of(known, map_probing.scores_of(model, *test), texts.test_labels)
    numbers["score"] = numbers[known.metrics[0]]
    if row.form is not None and row.control is None:
        numbers["model_score"] = stored_result(shared.plans.folder(row_name(row.form, row.task), task.seed))[
            "score"
        ]
    numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
    finish_run(task.folder, numbers)
    return stored_result(task.folder)


# --- Report ---


def report(outcome: Outcome) -> Report:
    """From the maps of each layer, with the controls."""
    config = outcome.config
    layers, probe = config["layers"], config["probe"]
    grids = []
    for task in config["data"]:
        lines = []
        controls: list[tuple[str | None, Control | None]] = [
            *((form, None) for form in FORMS), (EVOLVING, "untrained"), (EVOLVING, "permuted"),
        ]  # fmt: skip
        for form, control in controls:
            label = label_of(form, control)
            by_layer = [values(outcome, probe_name(label, task, layer), "score") for layer in layers]
            if not any(by_layer):
                continue
            model = values(outcome, probe_name(label, task, layers[-1]), "model_score")
            count = str(max(map(len, by_layer)))
            lines.append((label, [count, *map(mean_cell, by_layer), mean_cell(model)]))
        uniform = label_of(None, "uniform")
        if found := values(outcome, probe_name(uniform, task, None), "score"):
            lines.append((uniform, [str(len(found)), *[mean_cell(found)] * len(layers), "–"]))
        chance = [cell(config["chance"][task])] * len(layers)
        lines.append(("the most frequent class", ["", *chance, "–"]))
        columns = ["n", *(f"layer {layer}" for layer in layers), "the model itself"]
        title = f"From the maps alone, {task}: {glue.TASKS[task].metrics[0]} in %"
        grids.append(Grid(title, columns, lines))

    def pairs(label: str, other: str) -> dict[str, str]:
        return {
            probe_name(label, task, layer): probe_name(other, task, layer)
            for task in config["data"]
            for layer in layers
        }

    drawn = label_of(EVOLVING, "untrained")
    beyond = "What maps hold beyond those of an untrained model"
    grids += [
        gains_grid(outcome, pairs(EVOLVING, PLAIN), {}, "score", "points"),
        gains_grid(outcome, pairs(EVOLVING, drawn), {}, "score", "points", beyond),
        rates_grid(outcome),
    ]
    sizes = ", ".join(f"{count:,} of {task}" for task, count in config["probed"].items())
    settings = {
        name: numbers["run"]["settings"]
        for rows in outcome.per_seed.values()
        for name, numbers in rows.items()
    }
    probes = {name: each for name, each in settings.items() if "made_by" in each["row"]}
    precision = " or ".join(sorted({each["precision"] for each in probes.values()}))
    notes = [
        f"All heads of one layer, {LONGEST} × {LONGEST} tokens, after the softmax; longer sentences are cut, "
        "and padding counts nowhere. The paper's Table 7 is of images alone.",
        f"The second network: {TEXT_LAYERS} convolutions, 3×3, with {probe['width']} channels and batch "
        "norms, the mean over all pairs of tokens, and a linear layer; "
        f"{counted(probe['epochs'], 'epoch')} of batches of {probe['batch']}, SGD with Nesterov momentum, "
        f"learning rate {map_probing.START:g} to {END:g} as a cosine, {precision}. It is trained on rows "
        f"that the model was trained on too, at most {probe['rows']:,} ({sizes}), and tested on the "
        "development rows.",
        "An untrained model has the same configuration, and weights drawn at random: its maps show what "
        "words and positions leave in random products. Uniform maps hold the number of tokens alone. "
        "Permuted labels are those of training.",
        *notes_of(outcome, probes),
    ]
    return report_of(grids, notes)


PROBE = Recipe(
    name="ea-probe-text",
    title="What attention maps hold of a sentence",
    paper="no paper's table: what Wang et al. 2021, Table 7, ask of images, asked of text",
    published={},
    run=run,
    report=report,
    seeds=5,
    folder="understanding",
    options=PROBE_OPTIONS,
)
