"""Section 4.3 of Fan et al. 2020: Gaussian attention weights, and a KL that is sampled throughout.

The paper trained neither: both "easily" or "often" ended in NaN. Here each is trained as in bam-table-3, and
beside it BAM-WC, whose weights are positive and sum to one, and whose KL is analytic.
"""

from __future__ import annotations

import math
import shutil
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overt._workers import Tell, Throttled
from overt.data import flickr8k, scenes
from overt.data.captions import CaptionData
from overt.data.files import data_folder
from overt.mechanisms.chain import Chain
from overt.recipes import bam_captions, caption_training, regions
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell, counted
from overt.recipes._row_reports import notes_on_runs, values
from overt.recipes._rows import Known, Task, look_up, rows_of, stored_result
from overt.recipes._runs import finish_run, run_record
from overt.recipes._training import (
    DivergedError,
    be_quiet,
    hardware,
    one_thread,
    short_products,
    torch_device,
    versions,
)
from overt.recipes.bam_captions import WC, fitted, plan, settings_of_runs
from overt.recipes.caption_training import (
    Batches,
    Captioner,
    CaptionRow,
    CaptionTraining,
    Shared,
    shared_of,
    texts_of,
)
from overt.recipes.translation_training import WEIGHTS
from overt.recipes.unstable_attention import GaussianWeights, SampledKL, register

DRAWS = 64  # behind a gradient's variance
REFERENCE = "BAM-WC"
PRIOR: dict[str, Any] = {"rho": 1.0, "d_mid": 10}
ROWS = {
    REFERENCE: CaptionRow(mechanisms=(WC,)),
    "Gaussian weights around the scores": CaptionRow(mechanisms=(GaussianWeights("scores", **PRIOR),)),
    "Gaussian weights around the softmax": CaptionRow(mechanisms=(GaussianWeights("softmax", **PRIOR),)),
    "sampled KL": CaptionRow(mechanisms=(SampledKL.paper("WC", k=10.0, prior_beta=1e-6, **PRIOR),)),
}
PUBLISHED = {
    "Gaussian weights": "“would easily lead to NAN results”",
    "sampled KL": "“training becomes very unstable and often lead to NAN results”",
}
OPTIONS: dict[str, Option] = {
    name: option
    for name, option in bam_captions.OPTIONS.items()
    if name not in ("dataset", "finetune", "meteor")
}


@dataclass(frozen=True)
class Named:
    """A row on one data set.

    Attributes:
        row: attention and mechanisms.
        label: without the data set.
    """

    row: CaptionRow
    label: str

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**self.row.settings(), "draws": DRAWS}


class Watched(Captioner):
    """Notes the first update whose loss is not finite, and the largest loss before.

    Attributes:
        broken: number of that update, from 1 on; 0 if there is none.
        largest: loss.
    """

    broken: Tensor
    largest: Tensor

    def __init__(self, *arguments: Any, **further: Any) -> None:
        super().__init__(*arguments, **further)
        self.register_buffer("broken", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, images: Tensor, labels: Tensor, examples: Tensor, **ignored: Any) -> dict[str, Tensor]:
        """As `Captioner`."""
        output = super().forward(images, labels, examples, **ignored)
        if self.training:
            loss = output["loss"].detach()
            first = (self.broken == 0) & ~loss.isfinite()
            self.broken.copy_(torch.where(first, self.net.step + 1, self.broken))
            self.largest.copy_(torch.where(loss.isfinite(), torch.maximum(self.largest, loss), self.largest))
        return output


class GradientNoise(NamedTuple):
    """What a gradient is over draws of the weights.

    Attributes:
        variance: summed over all parameters.
        mean: squared norm of the mean gradient, less what the draws' own variance adds to it. It may come out
            below zero, where the draws are too few to tell it from zero.
    """

    variance: float
    mean: float


def gradient_noise(model: Captioner, batch: dict[str, Tensor], draws: int) -> GradientNoise | None:
    """The variance of the gradient over draws of the weights, beside its mean.

    Dropout is off, and the batch is the same. None where a gradient is not finite.

    Args:
        model: on the device of the batch.
        batch: of `Texts.batch`.
        draws: how many.
    """
    net, parameters = model.net, list(model.net.parameters())
    dropout, training, step = net.dropout, net.training, net.step.clone()
    net.dropout = 0.0
    net.train()
    sums = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters]
    squares = torch.zeros((), dtype=torch.float64, device=step.device)
    try:
        for draw in range(draws):
            chain = Chain(step=step, sample=draw, examples=batch["examples"])
            real = model.regions(batch["images"])
            loss = net(*real, batch["labels"], chain=chain)["loss"]
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            for total, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    total += gradient
                    squares += gradient.double().square().sum()
    finally:
        net.dropout = dropout
        net.train(training)
    mean = sum(float((total / draws).square().sum()) for total in sums)
    variance = max((float(squares) - draws * mean) / (draws - 1), 0.0)
    return GradientNoise(variance, mean - variance / draws) if math.isfinite(variance + mean) else None


def datasets_of(request: Request) -> list[CaptionData]:
    """The scenes, and Flickr8k where it is."""
    found = [scenes.make().captions]
    if data_folder(request.data) is not None:
        found.append(bam_captions.data_of(request, flickr8k.NAME))
    else:
        request.console.print(
            f"[yellow]no data: give --data DIR for {flickr8k.NAME}; without it, the scenes alone[/yellow]"
        )
    if request.options["features"] is not None:
        if len(found) == 1:
            raise ValueError("--features are for flickr8k: give --data DIR with its captions")
        return found[1:]
    return found


def run_nan(request: Request) -> Outcome:
    """Train each on both data sets, and measure the variance of gradients."""
    register()
    request = replace(request, options={**request.options, "finetune": False})
    chosen = rows_of(request.options["rows"], ROWS, list(ROWS))
    device = torch_device(request.device).type
    every, described, all_rows = Known(), {}, dict[str, Named]()
    datasets = datasets_of(request)
    for data in datasets:
        # Instability may come late: no training ends early.
        training = plan(data, request.options["epochs"])
        training = replace(training, patience=training.updates)
        place = request.out / data.name
        pictures = caption_training.pictures_of(data)
        here = replace(request, out=place)
        source = regions.source_of(here, pictures, "bam-nan")
        rows = {f"{name}, {data.name}": Named(fitted(row, data), name) for name, row in ROWS.items()}
        names = [name for name, row in rows.items() if row.label in chosen]
        common = settings_of_runs(data, source, training, device)
        known = look_up(request, rows, names, place / "nan", common, training, device)
        regions.train_encoders(here, pictures, source, {task.seed for task in known.tasks})
        shared = shared_of(data, source)
        known.fill(
            request,
            shared,
            perform,
            milliseconds=partial(fastest_update, shared),
            line=lambda numbers: (
                f"NaN at update {numbers['nan_at']:,}" if numbers["nan_at"] else "finite to the end"
            ),
            prepare=register_alone,
            together=False,
        )
        every.numbers |= known.numbers
        every.tasks += known.tasks
        every.stored += known.stored
        every.shared += known.shared
        every.dropped += known.dropped
        all_rows |= rows
        described[data.name] = {"data": data.describe(), "training": training.settings()}
    config = {"datasets": described, "draws": DRAWS, "rows": {n: r.settings() for n, r in all_rows.items()}}
    missing = all(data.stand_in for data in datasets)
    return every.outcome(config, all_rows, missing)


def register_alone() -> None:
    """Prepare a process that works beside others."""
    one_thread()
    register()


def fastest_update(shared: Shared, task: Task) -> float:
    """Milliseconds of an update, the fastest of three."""
    return min(caption_training.step_times(shared, task.row.row, task.training, task.seed, task.device))


def perform(task: Task, shared: Shared, tell: Tell) -> dict[str, Any]:
    """Train until the end or to the first loss that is not finite, and store the numbers."""
    be_quiet()
    told, device = Throttled(tell, every=20), torch_device(task.device)
    texts = texts_of(shared.data, "train", task.training.length)
    batch = Batches(texts, task.training.batch, 0)[0, 0]
    batch = {name: value.to(device) for name, value in batch.items()}
    made: list[Watched] = []
    at_start: list[GradientNoise | None] = []

    def noise() -> GradientNoise | None:
        with short_products(task.device):  # as in training, whatever an earlier one has left behind
            return gradient_noise(made[0], batch, DRAWS)

    def make(row: CaptionRow, shared: Shared, training: CaptionTraining, seed: int) -> Captioner:
        model = caption_training.model_of(row, shared, training, seed, Watched)
        assert isinstance(model, Watched)
        made.append(model.to(device))
        at_start.append(noise())
        return model

    numbers: dict[str, Any]
    try:
        _, trained = caption_training.train(
            task.folder, shared, task.row.row, task.training, task.seed, task.device, told, make
        )
        numbers = {"updates": trained["updates"], "valid_loss": trained["valid_loss"]}
    except DivergedError as error:
        numbers = {"updates": error.updates, "valid_loss": None}
    told.rest(numbers["updates"])
    (model,) = made
    numbers["nan_at"] = int(model.broken) or None
    numbers["largest_loss"] = float(model.largest)
    at_end = None if numbers["nan_at"] else noise()
    for when, found in {"start": at_start[0], "end": at_end}.items():
        numbers[f"variance_at_{when}"] = None if found is None else found.variance
        numbers[f"mean_at_{when}"] = None if found is None else found.mean
    numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
    finish_run(task.folder, numbers)
    shutil.rmtree(task.folder / WEIGHTS, ignore_errors=True)
    return stored_result(task.folder)


# --- Report ---


def report_nan(outcome: Outcome) -> Report:
    """A table for each data set."""
    grids = []
    for dataset in outcome.config["datasets"]:
        lines = []
        for row in ROWS:
            name = f"{row}, {dataset}"
            runs = [rows[name] for rows in outcome.per_seed.values() if name in rows]
            if not runs:
                continue
            steps = [run["nan_at"] for run in runs if run["nan_at"]]
            reference = f"{REFERENCE}, {dataset}"
            lines.append(
                (
                    row,
                    [
                        f"{len(steps)} of {len(runs)}",
                        ", ".join(f"{step:,}" for step in sorted(steps)) or "–",
                        middle(values(outcome, name, "largest_loss")),
                        middle(values(outcome, name, "valid_loss"), 3),
                        *(
                            text
                            for when in ("start", "end")
                            for text in noise_cells(outcome, name, reference, when)
                        ),
                    ],
                )
            )
        columns = ["end in NaN", "at update", "largest loss", "validation loss"]
        for when in ("at the start", "of the best epoch"):
            columns += [f"variance of the gradient {when}", "÷ that of BAM-WC", "÷ squared mean"]
        grids.append(Grid(f"{dataset}", columns, lines))
    trainings = {name: each["training"] for name, each in outcome.config["datasets"].items()}
    lengths = [f"{counted(each['updates'], 'update')} ({name})" for name, each in trainings.items()]
    clip = next(iter(trainings.values()))["clip"]
    notes = [
        "Published: Gaussian weights "
        + PUBLISHED["Gaussian weights"]
        + "; with a sampled KL, "
        + PUBLISHED["sampled KL"]
        + ". The paper gives no numbers.",
        "Gaussian weights: W ~ N(μ, 0.1²) with μ the raw scores, or their softmax; prior N(ψ, 1) with ψ the "
        "contextual prior's softmax; the KL is analytic. The paper does not say how it did this. Sampled KL: "
        "log q(S) − log p(S) of the draw, with torch's densities in float32; else as BAM-WC.",
        "At update: the first whose loss is not finite. The variance of the gradient is summed over all "
        f"parameters, over {outcome.config['draws']} draws of the weights for one batch without dropout. At "
        "the start all rows have the same network; later it is that of the epoch with the lowest validation "
        "loss, which is shown too. The squared mean is the squared norm of the mean gradient, less what the "
        f"draws add to it; “> {outcome.config['draws']}”: they do not tell it from zero. Medians over seeds.",
        "The KL of a word is its mean over the regions, as in the authors' code and in all rows of "
        "bam-table-3. Summed over the regions, as in the bound on the likelihood, it would weigh as many "
        "times more as there are regions, which might be less stable.",
        f"Training as in bam-table-3, without an early end: {' and '.join(lengths)}, gradients clipped at a "
        f"norm of {clip:g}, in float32 (on a GPU with products in TF32, which has the same range). The "
        "authors' code clips each number of the gradient at 0.1.",
        notes_on_runs(outcome)[-1],
    ]
    return Report([grid for grid in grids if grid.rows], notes)


def middle(numbers: dict[int, float], digits: int = 2) -> str:
    """The median over seeds."""
    return cell(statistics.median(numbers.values()), digits=digits) if numbers else "–"


def noise_cells(outcome: Outcome, name: str, reference: str, when: str) -> list[str]:
    """Medians of the variance, of its ratio to the reference's of the same seed, and to the squared mean."""
    variances, theirs = (values(outcome, row, f"variance_at_{when}") for row in (name, reference))
    means = values(outcome, name, f"mean_at_{when}")
    ratios = {seed: number / theirs[seed] for seed, number in variances.items() if theirs.get(seed)}
    to_mean = [
        number / means[seed] if means[seed] > 0.0 else math.inf
        for seed, number in variances.items()
        if seed in means
    ]
    shown = [f"{statistics.median(each):.2g}" if each else "–" for each in (variances.values(), to_mean)]
    if shown[1] == "inf":
        shown[1] = f"> {outcome.config['draws']}"
    return [shown[0], middle(ratios, 1), shown[1]]


NAN = Recipe(
    name="bam-nan",
    title="Random attention weights that are hard to train",
    paper="Fan et al. 2020, Bayesian Attention Modules, section 4.3",
    published={"rows": PUBLISHED},
    run=run_nan,
    report=report_nan,
    seeds=3,
    folder="captions",
    options=OPTIONS,
)
