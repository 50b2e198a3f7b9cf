"""Table 7 of Wang et al. 2021: how much of an image do attention maps hold?

A second network sees nothing but what the middle pixel attends to, in one attention of a trained network,
and must tell the image's class. Controls beside it: maps of an untrained network, the image itself at the
maps' size, and permuted labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overt._workers import Tell
from overt.data.image_folders import ImageFiles
from overt.models.map_probe import LAYERS as PROBE_LAYERS
from overt.models.map_probe import WIDTH, MapProbe
from overt.models.resnet import HEADS
from overt.recipes import ea_vision, map_probing, vision_training
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell, counted
from overt.recipes._row_reports import gains_grid, mean_cell, notes_on_runs, report_of, values
from overt.recipes._rows import Task, folder_name, look_up, stored_result
from overt.recipes._runs import finish_run, run_record
from overt.recipes._training import check_alone, hardware, one_thread, torch_device, versions
from overt.recipes.ea_vision import AA, EA
from overt.recipes.map_probing import END, Probed, permuted, scores_of
from overt.recipes.vision_maps import layers_of, middle_maps, settle, trained
from overt.recipes.vision_training import AnyImages, ImageRow, ImageTraining, accuracies

Control = Literal["untrained", "image", "permuted"]
NETWORKS = AA, EA
# Top-1 accuracy in % from the maps of layers 16, 17 and 18, on ImageNet.
PUBLISHED = {AA: {16: 24.50, 17: 31.18, 18: 17.55}, EA: {16: 31.02, 17: 31.71, 18: 31.93}}
EPOCHS, BATCH = 30, 512  # the epochs are the paper's
STAND_IN_EPOCHS, STAND_IN_WIDTH, STAND_IN_BATCH = 10, 16, 64
OPTIONS = {
    **ea_vision.OPTIONS_OF_MAPS,
    "probe-epochs": Option(f"epochs of the second network; {EPOCHS} by default, 10 of the stand-in", least=1),
}


@dataclass(frozen=True)
class ProbeRow:
    """What the second network sees.

    Attributes:
        network: row of Table 1 whose maps it sees; None for the image.
        layer: number of the attention, from 1 on; None for the image.
        control: what is not as it should be.
        width: of the second network.
        trained_by: settings of the first network's training, on which the numbers depend.
        size: height and width of the image, where it is shown.
    """

    network: str | None
    layer: int | None
    control: Control | None
    width: int
    trained_by: dict[str, Any] | None
    size: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        """In tables and of the folder."""
        return self.label if self.layer is None else f"{self.label}, layer {self.layer}"

    @property
    def label(self) -> str:
        """Without the layer."""
        if self.size is not None:
            return f"the image at {self.size[0]} × {self.size[1]}"
        words = {"untrained": f"untrained {self.network}", "permuted": f"{self.network}, permuted labels"}
        return str(self.network) if self.control is None else words[self.control]

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "network": self.network,
            "layer": self.layer,
            "control": self.control,
            "width": self.width,
            "trained_by": self.trained_by,
            "size": None if self.size is None else list(self.size),
        }


class Shared(NamedTuple):
    """What all tasks need: the images, the rows of networks and the folder of their runs."""

    data: AnyImages
    networks: dict[str, ImageRow]
    place: Path
    size: tuple[int, int]


def run_table_7(request: Request) -> Outcome:
    """Train the networks that are not there, and a second network on the maps of each layer."""
    data = ea_vision.data_of(request)
    check_alone(request.device, "ea-table-7", "ea-table-1")
    networks = {name: ea_vision.fitted(ea_vision.ROWS[name], data) for name in NETWORKS}
    layers, size = layers_of(request.options["layers"], vision_training.network(networks[EA], data, 0))
    first, common = ea_vision.settings_of_runs(request, data)
    rows = rows_of(layers, size, {**common, "training": first.settings()}, width_of(data))
    training = plan(data, request.options["probe-epochs"])
    device = torch_device(request.device).type
    settings = {
        "data": data.sha256,
        "training": {**training.settings(), "end": END},
        "precision": common["precision"],
    }
    place = request.out / data.name
    known = look_up(request, rows, list(rows), place / "probes", settings, training, device)
    if known.tasks:
        ea_vision.train_networks(request, NETWORKS, data)
    shared = Shared(data, networks, place, size)
    known.fill(
        request,
        shared,
        perform,
        milliseconds=lambda task: fastest_update(task.row, shared, training, device),
        line=lambda numbers: f"top-1 {numbers['top1']:.2f} %",
        prepare=one_thread,
        together=False,
    )
    config = {
        "data": data.describe(),
        "network_epochs": ea_vision.epochs_of(data, first),
        "layers": list(layers),
        "size": list(size),
        "training": settings["training"],
        "epochs": ea_vision.epochs_of(data, training),
        "width": width_of(data),
    }
    return known.outcome(config, rows, data.stand_in)


def width_of(data: AnyImages) -> int:
    """Width of the second network."""
    return STAND_IN_WIDTH if data.stand_in else WIDTH


def rows_of(
    layers: Sequence[int], size: tuple[int, int], trained_by: dict[str, Any], width: int
) -> dict[str, ProbeRow]:
    """All rows by name: both networks, then the controls."""
    made = [ProbeRow(network, layer, None, width, trained_by) for network in NETWORKS for layer in layers]
    made += [ProbeRow(EA, layer, "untrained", width, None) for layer in layers]
    made += [ProbeRow(EA, layers[len(layers) // 2], "permuted", width, trained_by)]
    made += [ProbeRow(None, None, "image", width, None, size)]
    return {row.name: row for row in made}


def plan(data: AnyImages, epochs: int | None) -> ImageTraining:
    """Settings of the second network's training."""
    batch = STAND_IN_BATCH if data.stand_in else BATCH
    epochs = epochs or (STAND_IN_EPOCHS if data.stand_in else EPOCHS)
    return map_probing.plan(len(data.train), batch, epochs)


def fastest_update(row: ProbeRow, shared: Shared, training: ImageTraining, device: str) -> float:
    """Milliseconds of an update of the second network."""
    classes = len(shared.data.classes)
    maps, labels = torch.rand(training.batch, HEADS, *shared.size), torch.randint(classes, (training.batch,))
    model = Probed(MapProbe(HEADS, classes, row.width), maps, labels)
    return map_probing.fastest_update(model, training, device)


def perform(task: Task, shared: Shared, tell: Tell) -> dict[str, Any]:
    """Make the maps, train the second network on them, test it, and store the numbers."""
    row: ProbeRow = task.row
    data, device = shared.data, torch_device(task.device)
    train, test = inputs_of(row, task.seed, shared, device)
    torch.manual_seed(task.seed)
    labels = permuted(data.train_labels, task.seed) if row.control == "permuted" else data.train_labels
    model = Probed(MapProbe(train.shape[1], len(data.classes), row.width), train, labels).to(device)
    numbers = map_probing.train(model, task, tell)
    numbers |= accuracies(scores_of(model, test), data.test_labels)
    numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
    finish_run(task.folder, numbers)
    return stored_result(task.folder)


def inputs_of(row: ProbeRow, seed: int, shared: Shared, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the second network sees of training and test images, (images, channels, height, width)."""
    both = shared.data.train, shared.data.test
    if row.network is None or row.layer is None:
        small = [shrunk(images, shared.size) for images in both]
        return small[0], small[1]
    if row.control == "untrained":
        net = vision_training.network(shared.networks[row.network], shared.data, seed)
        net.mean, net.std = (tuple((x / 255).tolist()) for x in shared.data.colours())
        net = settle(net.to(device), shared.data.train)
    else:
        net = trained(shared.place / folder_name(row.network) / f"seed-{seed}")
    net = net.to(device)
    maps = [middle_maps(net, images, [row.layer])[row.layer] for images in both]
    return maps[0], maps[1]


def shrunk(images: Tensor | ImageFiles, size: tuple[int, int]) -> Tensor:
    """Images at another size, float16 (images, 3, height, width), from 0 to 1."""
    batches = vision_training.in_batches(images)
    return torch.cat([(F.adaptive_avg_pool2d(batch.float(), size) / 255).half() for batch in batches])


# --- Report ---


def report_table_7(outcome: Outcome) -> Report:
    """Table 7, with the controls."""
    config = outcome.config
    layers, data, (height, width) = config["layers"], config["data"], config["size"]
    rows = rows_of(layers, (height, width), {}, config["width"]).values()
    lines = []
    for label in dict.fromkeys(row.label for row in rows):
        named = {row.layer: row.name for row in rows if row.label == label}
        found = {layer: values(outcome, name, "top1") for layer, name in named.items()}
        if not any(found.values()):
            continue
        cells = [mean_cell(found.get(layer, {})) for layer in layers]
        if None in found:  # the image has no layer
            cells = [mean_cell(found[None]), *["–"] * (len(layers) - 1)]
        lines.append((label, [str(max(len(numbers) for numbers in found.values())), *cells]))
        if label in PUBLISHED:
            published = [cell(PUBLISHED[label].get(layer)) for layer in layers]
            lines.append((f"{label}, published (ImageNet)", ["", *published]))
    gains = {f"{EA}, layer {layer}": f"{AA}, layer {layer}" for layer in layers}
    published_by_row = {
        f"{name}, layer {layer}": number
        for name, by_layer in PUBLISHED.items()
        for layer, number in by_layer.items()
        if layer in layers
    }
    training = config["training"]
    notes = [
        f"What the middle pixel attends to, {height} × {width} pixels and 8 heads, after the softmax. Layers "
        "are counted among the attentions, as in the paper's appendix; its main text can also be read as "
        "counting all convolutions, for which --layers 9,10,11 stands.",
        f"The second network: {sum(PROBE_LAYERS)} layers of 3×3 convolutions in densely connected segments "
        f"of {', '.join(str(count) for count in PROBE_LAYERS)}, with "
        f"{', '.join(str(config['width'] * 2**number) for number in range(len(PROBE_LAYERS)))} channels and "
        "pooling between them; the paper's description allows other readings. "
        f"{counted(config['epochs'], 'epoch')} of batches of {training['batch']}, SGD, learning rate "
        f"{training['learning_rate']:g} to {training['end']:g} as a cosine, weight decay "
        f"{training['weight_decay']:g}.",
        f"Chance is {100 / data['classes']:.2f} %. The untrained network's maps show what positions and "
        "random products hold (its batch norms have the statistics of training images); the image at the "
        "maps' size, what there is to hold.",
        f"Networks: {counted(config['network_epochs'], 'epoch')} of {data['name']}, as in ea-table-1.",
        *notes_on_runs(outcome),
    ]
    columns = ["n", *(f"layer {layer}, top-1 in %" for layer in layers)]
    grids = [
        Grid(f"From the maps alone, {data['name']}", columns, lines),
        gains_grid(outcome, gains, {"published, ImageNet": published_by_row}, "top1", "top-1, points"),
    ]
    return report_of(grids, notes)


TABLE_7 = Recipe(
    name="ea-table-7",
    title="What attention maps hold of an image",
    paper="Wang et al. 2021, Evolving Attention with Residual Convolutions, Table 7",
    published={"rows": PUBLISHED},
    run=run_table_7,
    report=report_table_7,
    seeds=3,
    folder="vision",
    options=OPTIONS,
)
