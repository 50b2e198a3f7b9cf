"""Figures 1 and 4 of Wang et al. 2021, and Figure 1 of its appendix: attention over pixels in pictures.

All measure networks of `ea_vision`, and share their runs with its tables.
"""

from __future__ import annotations

import base64
import io
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import overt
from overt._extras import need
from overt.recipes import ea_vision, vision_training
from overt.recipes._figures import save_figure
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell
from overt.recipes._row_reports import mean_cell, report_of, values
from overt.recipes._rows import folder_name
from overt.recipes._training import check_alone, torch_device
from overt.recipes.ea_vision import AA, EA, EVOLVING, IN_TABLE_1, PUBLISHED_1, ROWS
from overt.recipes.vision_maps import layers_of, middle_maps, trained
from overt.recipes.vision_training import AnyImages, ImageRow

COLOURS = {"": "#666666", "AA-": "#c77700", "EA-AA-": "#00796b"}
PAPER = "Wang et al. 2021, Evolving Attention with Residual Convolutions"


def kind_of(row: str) -> str:
    """The part of a row's name before ResNet."""
    return row.partition("ResNet")[0]


# --- Figure 1 ---

IN_FIGURE_1 = [name for name in IN_TABLE_1 if name in PUBLISHED_1]


def run_figure_1(request: Request) -> Outcome:
    """Train ResNet-34 in three kinds, unless it was, and count what each costs."""
    need("matplotlib", "view")
    data = ea_vision.data_of(request)
    rows = {name: ROWS[name] for name in IN_FIGURE_1}
    outcome = ea_vision.train_rows(request, rows, [name for name in rows if "-34" in name], lambda _: data)
    costs = {}
    for name in rows:
        if values(outcome, name, "top1"):
            net = vision_training.network(ea_vision.fitted(rows[name], data), data, 0)
            costs[name] = {"parameters": sum(p.numel() for p in net.parameters()), "flops": net.flops()}
    return replace(outcome, config=outcome.config | {"costs": costs, "drawn_by": request.command})


def report_figure_1(outcome: Outcome) -> Report:
    """Accuracy beside parameters and FLOPs."""
    lines = []
    for name, cost in outcome.config["costs"].items():
        top1 = values(outcome, name, "top1")
        cells = [f"{cost['parameters'] / 1e6:.2f}", f"{cost['flops'] / 1e9:.3f}", mean_cell(top1)]
        lines.append((name, [str(len(top1)), *cells]))
    columns = ["n", "million parameters", "billion FLOPs", "top-1, %"]
    published = [
        (name, ["", cell(size, digits=1), cell(flops, digits=1), cell(top1)])
        for name, (size, flops, top1, _) in PUBLISHED_1.items()
    ]
    data = outcome.config["data"]["name"]
    grids = [Grid(f"Measured, {data}", columns, lines), Grid("Published, ImageNet", columns, published)]
    notes = [
        "FLOPs are two for each multiplication and addition, of one image. In the figure, lines join the "
        "depths of one kind of network; error bars are standard deviations over seeds, from three on.",
        *ea_vision.notes_of(outcome),
    ]
    return report_of(grids, notes)


def draw_figure_1(outcome: Outcome, path: Path) -> None:
    """Accuracy against parameters and against FLOPs: published above, measured below."""
    need("matplotlib", "view")
    from matplotlib.figure import Figure

    costs = outcome.config["costs"]
    published = {name: (size, flops, top1, 0.0) for name, (size, flops, top1, _) in PUBLISHED_1.items()}
    measured = {}
    for name, cost in costs.items():
        top1 = list(values(outcome, name, "top1").values())
        spread = statistics.stdev(top1) if len(top1) >= 3 else 0.0
        measured[name] = cost["parameters"] / 1e6, cost["flops"] / 1e9, statistics.fmean(top1), spread
    parts = {"published, ImageNet": published, f"measured, {outcome.config['data']['name']}": measured}
    figure = Figure(figsize=(7.2, 6.0), layout="constrained")
    axes = figure.subplots(2, 2, sharey="row")
    for row, (title, points) in zip(axes, parts.items(), strict=True):
        for column, unit in enumerate(("million parameters", "billion FLOPs")):
            for kind, colour in COLOURS.items():
                here = [point for name, point in points.items() if kind_of(name) == kind]
                if here:
                    x, y = [point[column] for point in here], [point[2] for point in here]
                    label = f"{kind}ResNet"
                    errors = [point[3] for point in here]
                    row[column].errorbar(x, y, errors, color=colour, marker="o", label=label)
            row[column].set_xlabel(unit)
        row[0].set_ylabel("top-1 accuracy, %")
        row[0].set_title(title, loc="left", fontsize="medium")
    axes[0][0].legend(frameon=False)
    save_figure(figure, path)


# --- Figure 4 ---

PICTURES, TRACED = 6, 2  # in the figure, and on the page


def run_figure_4(request: Request) -> Outcome:
    """Train AA- and EA-AA-ResNet-34, unless they were, and keep what the middle pixel attends to."""
    need("matplotlib", "view")
    data = ea_vision.data_of(request)
    check_alone(request.device, "ea-figure-4", "ea-table-1")
    sized = ea_vision.fitted(ROWS[EA], data)
    layers, size = layers_of(request.options["layers"], vision_training.network(sized, data, 0))
    outcome = ea_vision.train_networks(request, (AA, EA), data)
    place, device = request.out / data.name, torch_device(request.device)
    shown, maps = pictures_of(data), {}
    per_seed: dict[int, dict[str, Any]] = {seed: {} for seed in outcome.per_seed}
    traces = {}
    for name in (AA, EA):
        for seed, entries in outcome.per_seed.items():
            net = trained(place / folder_name(name) / f"seed-{seed}").to(device)
            found = middle_maps(net, data.test, layers)
            entropies = {f"entropy_{layer}": entropy_of(rows) for layer, rows in found.items()}
            per_seed[seed][name] = {**entries[name], **entropies}
            if seed == 0:
                maps[name] = {str(layer): as_lists(rows[shown]) for layer, rows in found.items()}
                for picture in shown[:TRACED]:
                    label = data.classes[int(data.test_labels[picture])]
                    image = net.normalised(data.test[picture].unsqueeze(0))
                    traces[f"{label}, {name}"] = overt.trace(net, image)
    page = request.out / data.name / "ea-figure-4.html"
    overt.page(traces, title="What pixels attend to").save(page)
    request.console.print(f"[dim]maps of all layers in {page}: open it in any browser[/dim]")
    config = outcome.config | {
        "layers": list(layers),
        "size": list(size),
        "maps": maps,
        "pictures": [as_png(data.test[picture]) for picture in shown],
        "labels": [data.classes[int(data.test_labels[picture])] for picture in shown],
        "drawn_by": request.command,
    }
    return replace(outcome, config=config, per_seed=per_seed)


def as_lists(rows: Tensor) -> list[list[float]]:
    """The mean over heads of each image's row, (images, heads, height, width)."""
    means = rows.float().mean(dim=1).flatten(1)
    return [[round(float(weight), 4) for weight in line] for line in means]


def pictures_of(data: AnyImages) -> list[int]:
    """The first test image of each of the first classes: chosen before any map was seen."""
    labels = range(min(PICTURES, len(data.classes)))
    return [int((data.test_labels == label).nonzero()[0, 0]) for label in labels]


def as_png(image: Tensor) -> str:
    """An image (3, height, width) as base64."""
    need("PIL", "vision")
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def entropy_of(rows: Tensor) -> float:
    """Mean entropy of the heads' rows, (images, heads, height, width), in nats."""
    weights = rows.flatten(2).double()
    weights = weights / weights.sum(dim=-1, keepdim=True)  # float16 rounds
    return float(-torch.xlogy(weights, weights).sum(dim=-1).mean())


def report_figure_4(outcome: Outcome) -> Report:
    """How sharp the maps are, in numbers."""
    layers, lines = outcome.config["layers"], []
    for name in (AA, EA):
        cells = [mean_cell(values(outcome, name, f"entropy_{layer}"), 3) for layer in layers]
        lines.append((name, [str(len(values(outcome, name, "top1"))), *cells]))
    uniform = math.log(math.prod(outcome.config["size"]))
    lines.append(("uniform weights", ["", *[f"{uniform:.3f}"] * len(layers)]))
    columns = ["n", *(f"layer {layer}" for layer in layers)]
    notes = [
        "The paper shows maps of representative heads, and finds those of EA-AA-ResNet much sharper. The "
        "table has the mean entropy (nats) of what the middle pixel attends to, over all heads and test "
        "images. The figure shows the mean over heads for the first test image of each of the first "
        "classes, chosen before any map was seen; each map has its own scale.",
        *ea_vision.notes_of(outcome),
    ]
    return report_of([Grid("Entropy of the middle pixel's row", columns, lines)], notes)


def draw_figure_4(outcome: Outcome, path: Path) -> None:
    """Pictures, and the maps of both networks beside them; as SVG, and as PNG beside it."""
    need("matplotlib", "view")
    need("PIL", "vision")
    from matplotlib.figure import Figure
    from PIL import Image

    config = outcome.config
    columns = [(name, str(layer)) for name in (AA, EA) for layer in config["layers"]]
    figure = Figure(figsize=(1.2 * (1 + len(columns)), 1.2 * len(config["pictures"])), layout="constrained")
    grid = figure.subplots(len(config["pictures"]), 1 + len(columns), squeeze=False)
    for number, (line, picture) in enumerate(zip(grid, config["pictures"], strict=True)):
        line[0].imshow(Image.open(io.BytesIO(base64.b64decode(picture))))
        line[0].set_ylabel(config["labels"][number], fontsize="small")
        for axes, (name, layer) in zip(line[1:], columns, strict=True):
            rows = torch.tensor(config["maps"][name][layer][number]).view(*config["size"])
            axes.imshow(rows.numpy(), cmap="viridis", vmin=0.0)
            if number == 0:
                axes.set_title(f"{kind_of(name).rstrip('-')} {layer}", fontsize="small")
        for axes in line:
            axes.set_xticks([])
            axes.set_yticks([])
    save_figure(figure, path)
    save_figure(figure, path.with_suffix(".png"))


# --- Figure 1 of the appendix ---


def sweep_row(alpha: float, beta: float) -> str:
    """Name of a row."""
    return f"α {alpha:g} β {beta:g}"


ALPHAS, BETAS = (0.0, 0.5, 0.9), (0.0, 0.5, 1.0)
SWEEP = {
    sweep_row(alpha, beta): ImageRow("aa-resnet-34", (EVOLVING(alpha=alpha, beta=beta),))
    for alpha in ALPHAS
    for beta in BETAS
}
SWEEP_EPOCHS = 8


def run_figure_a1(request: Request) -> Outcome:
    """Train AA-ResNet-34 with each pair of α and β, and test it on a part of the training set."""
    need("matplotlib", "view")
    epochs = request.options["epochs"] or SWEEP_EPOCHS
    request = replace(request, options={**request.options, "epochs": epochs})
    return ea_vision.train_rows(request, SWEEP, list(SWEEP), validation_of, partly=True)


def validation_of(request: Request) -> AnyImages:
    """The data with a part of the training set in place of the test set."""
    return ea_vision.data_of(request).for_validation(ea_vision.SHARE)


def report_figure_a1(outcome: Outcome) -> Report:
    """Accuracy and NLL on validation by α and β."""
    columns, grids = [f"β = {beta:g}" for beta in BETAS], []
    for title, key, digits in (("Validation accuracy, %", "top1", 2), ("Validation NLL", "nll", 3)):
        lines = []
        for alpha in ALPHAS:
            found = [values(outcome, sweep_row(alpha, beta), key) for beta in BETAS]
            lines.append((f"α = {alpha:g}", [mean_cell(numbers, digits) for numbers in found]))
        grids.append(Grid(title, columns, lines))
    notes = [
        "The paper's figure has no readable numbers; its best pair on ImageNet is α = 0.5 and β = 1. With "
        "α = β = 0 maps do not evolve. Accuracy is top-1. Both are on a part of the training set that was "
        "set apart.",
        *ea_vision.notes_of(outcome),
    ]
    return report_of(grids, notes)


def draw_figure_a1(outcome: Outcome, path: Path) -> None:
    """A heat map of the accuracies."""
    need("matplotlib", "view")
    from matplotlib.figure import Figure

    def mean(alpha: float, beta: float) -> float:
        numbers = values(outcome, sweep_row(alpha, beta), "top1")
        return statistics.fmean(numbers.values()) if numbers else math.nan

    figure = Figure(figsize=(4.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    cells = [[mean(alpha, beta) for beta in BETAS] for alpha in ALPHAS]
    drawn = axes.imshow(cells, cmap="viridis", origin="lower")
    known = [value for line in cells for value in line if not math.isnan(value)]
    lowest, highest = min(known), max(known)
    for row, line in enumerate(cells):
        for column, value in enumerate(line):
            text = "–" if math.isnan(value) else f"{value:.1f}"
            pale = value > lowest + 0.6 * (highest - lowest)
            axes.text(column, row, text, ha="center", va="center", color="black" if pale else "white")
    axes.set_xticks(range(len(BETAS)), [f"{beta:g}" for beta in BETAS])
    axes.set_yticks(range(len(ALPHAS)), [f"{alpha:g}" for alpha in ALPHAS])
    axes.set_xlabel("β")
    axes.set_ylabel("α")
    figure.colorbar(drawn, label="top-1 accuracy on validation, %")
    save_figure(figure, path)


FIGURE_1 = Recipe(
    name="ea-figure-1",
    title="Accuracy against parameters and FLOPs",
    paper=f"{PAPER}, Figure 1",
    published={"rows": PUBLISHED_1},
    run=run_figure_1,
    report=report_figure_1,
    seeds=5,
    folder="vision",
    options=ea_vision.OPTIONS,
    draw=draw_figure_1,
)
FIGURE_4 = Recipe(
    name="ea-figure-4",
    title="What pixels attend to",
    paper=f"{PAPER}, Figures 2 and 4, and Figures 2–5 of its appendix",
    published={},
    run=run_figure_4,
    report=report_figure_4,
    seeds=3,
    folder="vision",
    options=ea_vision.OPTIONS_OF_MAPS,
    draw=draw_figure_4,
)
FIGURE_A1 = Recipe(
    name="ea-figure-a1",
    title="Images with evolving attention: α and β",
    paper=f"{PAPER}, Figure 1 of its appendix",
    published={"best": {"alpha": 0.5, "beta": 1.0}},
    run=run_figure_a1,
    report=report_figure_a1,
    seeds=1,
    folder="vision",
    options={
        **ea_vision.OPTIONS,
        "rows": Option("rows to train, such as α 0.5 β 1, separated by commas; all by default", moves=False),
        "epochs": Option(f"epochs of a training; {SWEEP_EPOCHS} by default", least=1),
    },
    draw=draw_figure_a1,
)
