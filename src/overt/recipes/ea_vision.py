"""Tables 1 and 2 of Wang et al. 2021: attention-augmented ResNets whose maps evolve, on images.

The paper trains on ImageNet, as do these recipes if they are given it (`--dataset FOLDER`). By default the
networks are those of CIFAR-100 (3×3 stem, images of 32 pixels), whose chains of maps are alike: 8×8, 8×8 and
4×4 pixels in the last three stages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from overt._extras import need
from overt._files import write_whole
from overt._workers import Tell, Throttled
from overt.data import cifar100, image_folders, relations
from overt.data.batching import Epochs
from overt.data.files import data_folder
from overt.data.image_folders import TESTS, TRAIN, ImageFiles, ImageFolders
from overt.data.images import Images
from overt.data.pictures import UnreadableImageError
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.evolving.config import Evolving
from overt.models.resnet import DEPTHS
from overt.recipes import vision_training
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell, rate_of
from overt.recipes._row_reports import gains_grid, mean_cell, notes_on_runs, report_of, values
from overt.recipes._rows import Task, folder_name, look_up, rows_of, stored_result
from overt.recipes._runs import finish_run, processes_of, run_record
from overt.recipes._training import (
    hardware,
    is_main_process,
    one_thread,
    process_number,
    processes,
    torch_device,
    versions,
)
from overt.recipes.vision_training import AnyImages, ImageRow, ImageTraining

EVOLVING = partial(Evolving, alpha=0.5, beta=1.0)
KINDS = {"": "resnet", "AA-": "aa-resnet", "EA-AA-": "ea-aa-resnet"}
ROWS = {
    **{
        f"{label}ResNet-{depth}": ImageRow(f"{kind}-{depth}")
        for depth in DEPTHS
        for label, kind in KINDS.items()
    },
    "Bayesian AA-ResNet-34": ImageRow("aa-resnet-34", (Bayesian(),)),
    "w/o convolution": ImageRow("aa-resnet-34", (EVOLVING(beta=0.0),)),
    "w/o skip": ImageRow("aa-resnet-34", (EVOLVING(alpha=0.0),)),
    "1×1": ImageRow("aa-resnet-34", (EVOLVING(kernel_size=1),)),
    "5×5": ImageRow("aa-resnet-34", (EVOLVING(kernel_size=5),)),
}
PLAIN, AA, EA = "ResNet-34", "AA-ResNet-34", "EA-AA-ResNet-34"
BY_DEFAULT = [PLAIN, AA, EA, "Bayesian AA-ResNet-34"]  # of Table 1
IN_TABLE_2 = [AA, EA, "w/o convolution", "w/o skip", "1×1", "5×5"]
BASELINES = {
    "Bayesian AA-ResNet-34": AA,
    **{f"AA-ResNet-{depth}": f"ResNet-{depth}" for depth in DEPTHS},
    **{f"EA-AA-ResNet-{depth}": f"AA-ResNet-{depth}" for depth in DEPTHS},
}
WHOLE_GAINS = {f"EA-AA-ResNet-{depth}": f"ResNet-{depth}" for depth in DEPTHS}
# ImageNet, top-1 and top-5 accuracy in %.
PUBLISHED_1 = {
    f"{label}ResNet-{depth}": sizes.published[kind]
    for depth, sizes in DEPTHS.items()
    for label, kind in KINDS.items()
}
IN_TABLE_1 = [*BY_DEFAULT, *(name for name in PUBLISHED_1 if name not in BY_DEFAULT)]
PUBLISHED_2 = {
    AA: PUBLISHED_1[AA][2:],
    EA: PUBLISHED_1[EA][2:],
    "w/o convolution": (74.34, 91.98),
    "w/o skip": (74.29, 91.85),
    "1×1": (74.99, 92.20),
    "5×5": (75.12, 92.55),
}
WARMUP = 1 / 6  # of the updates: 5 of 30 epochs
SHOWN = 10  # broken files that are named on the screen
SAMPLES = 8  # draws of random weights for a prediction
STAND_IN = ImageTraining(updates=0, warmup=0, batch=64, learning_rate=0.1, crop=0)
# The paper's, for images in files: 5 epochs of warm-up, drops after 30, 60, 80 and 90 of 100.
PAPER = ImageTraining(
    updates=0, warmup=0, batch=256, learning_rate=0.128, weight_decay=1e-4, crop=0, nesterov=False
)
PAPER_WARMUP, PAPER_DROPS = 0.05, (0.3, 0.6, 0.8, 0.9)
EPOCHS = {"cifar100": 30, "stand-in": 15, "files": 100}
SMALL = {"width": 16, "blocks": [1, 1, 1, 1]}  # networks of the stand-in
OPTIONS = {
    "dataset": Option(
        "cifar100, or a folder with train/CLASS and val/CLASS: its path, or its name under --data",
        cifar100.NAME,
        names=True,
    ),
    "rows": Option("rows to train, separated by commas; by default those of 34 layers", moves=False),
    "epochs": Option(
        "epochs of a training; by default 30, 15 of the stand-in, and 100 of images in folders", least=1
    ),
    "learning-rate": Option("at its peak; by default 0.8, 0.1 of the stand-in, and 0.128 of folders"),
    "workers": Option(
        "trainings side by side; by default 8 on a GPU and 1 on a CPU or of images in folders",
        least=1,
        moves=False,
    ),
    "skip-broken": Option("check all images of a folder first, and leave out those that are broken", False),
}
SHARE = 0.1  # of the training set, to choose settings by
OPTIONS_OF_TABLES = {
    **OPTIONS,
    "validation": Option("test on a tenth of the training set, set apart, to choose settings by", False),
}

# Of recipes that read the maps of AA- and EA-AA-ResNet-34.
OPTIONS_OF_MAPS = {
    **{name: option for name, option in OPTIONS.items() if name != "rows"},
    "layers": Option("numbers of attentions, from 1 on, separated by commas; by default 16,17,18"),
}


def images_of(request: Request) -> Images:
    """CIFAR-100, or the stand-in where there are no data."""
    dataset = request.options["dataset"]
    if dataset != cifar100.NAME:
        raise ValueError(f"--dataset must be {cifar100.NAME}, got {dataset}")
    if request.options.get("skip-broken"):
        raise ValueError(f"--skip-broken is for images in folders, got --dataset {dataset}")
    if data_folder(request.data) is not None:
        return cifar100.load(request.data)
    request.console.print(
        f"[yellow]no data: give --data DIR for {dataset}. Generated images stand in, and the numbers say "
        "nothing about the paper's.[/yellow]"
    )
    return relations.images()


def folders_of(request: Request) -> ImageFolders:
    """The images of the folder that a request names."""
    dataset, data = request.options["dataset"], data_folder(request.data)
    places = [Path(dataset)] if data is None else [data / dataset, Path(dataset)]
    folder = next((place for place in places if dataset and place.is_dir()), None)
    if folder is None:
        raise ValueError(
            f"--dataset must be {cifar100.NAME}, or a folder with {TRAIN}/CLASS and {TESTS[0]}/CLASS, by its "
            f"path or its name under --data, got {dataset}"
        )
    found = image_folders.load(folder)
    if request.options.get("skip-broken"):
        return without_broken(request, found)
    # The test images are few, and needed only when the training is done, which would be late to fail.
    if broken := looked_through(found.test, count=processes(request.device)):
        raise UnreadableImageError(f"{next(iter(broken.values()))}: --skip-broken leaves such files out")
    return found


def looked_through(*files: ImageFiles, count: int) -> dict[str, str]:
    """Broken files among this process's part of the images, and what is wrong with each."""
    workers = vision_training.loaders(files[0])
    return image_folders.broken_files(*files, workers=workers, part=process_number(), parts=count)


def without_broken(request: Request, data: ImageFolders) -> ImageFolders:
    """Without the files that cannot be decoded, which are looked for once and noted in the run's folder."""
    count = processes(request.device)

    def check() -> dict[str, Any]:
        request.console.print(f"{data.name}: checking {len(data.train) + len(data.test):,} images")
        found = looked_through(data.train, data.test, count=count)
        if count == 1:
            return found
        from accelerate.utils import gather_object  # type: ignore[import-untyped, unused-ignore]

        return dict(gather_object(list(found.items())))

    file = request.out / data.name / f"broken-{data.sha256[:16]}.json"
    if file.exists():
        broken = json.loads(file.read_text())
    else:
        broken = check()
        if is_main_process():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(broken, indent=1))
    for fault in list(broken.values())[:SHOWN]:
        request.console.print(f"skipped: {fault}", style="dim", markup=False)
    request.console.print(
        f"{data.name}: {len(broken):,} broken file{'s' if len(broken) != 1 else ''} skipped, listed in {file}"
    )
    return data.without(broken)


def plan(data: AnyImages, options: Mapping[str, Any]) -> ImageTraining:
    """The settings of a training."""
    files = isinstance(data, ImageFolders)
    base = PAPER if files else STAND_IN if data.stand_in else ImageTraining(updates=0, warmup=0)
    epochs = options["epochs"] or EPOCHS["files" if files else "stand-in" if data.stand_in else "cifar100"]
    updates = epochs * Epochs(len(data.train), base.batch, 1, 0).per_epoch
    warmup = round((PAPER_WARMUP if files else WARMUP) * updates)
    drops = tuple(round(share * updates) for share in PAPER_DROPS) if files else ()
    rate = rate_of(options.get("learning-rate")) or base.learning_rate
    return replace(base, updates=updates, warmup=warmup, drops=drops, learning_rate=rate)


def data_of(request: Request) -> AnyImages:
    """The data set that a request names, or the stand-in."""
    small = request.options["dataset"] == cifar100.NAME
    data: AnyImages = images_of(request) if small else folders_of(request)
    return data.for_validation(SHARE) if request.options.get("validation") else data


def run_rows(request: Request, names: Sequence[str], default: Sequence[str] | None = None) -> Outcome:
    """Train rows of `ROWS`.

    Args:
        request: of the run.
        names: of all rows of the table.
        default: those that are trained if none are named; all by default.
    """
    rows = {name: ROWS[name] for name in names}
    return train_rows(request, rows, default or names, partly=True)


def fitted(row: ImageRow, data: AnyImages) -> ImageRow:
    """A row with networks of a size that fits the data: small ones for the stand-in.

    These are too shallow to diverge, and learn faster if blocks do not start as the identity.
    """
    return replace(row, sizes=SMALL, zero_init_last=False) if data.stand_in else row


def train_networks(request: Request, names: Sequence[str], data: AnyImages) -> Outcome:
    """Train rows whose networks are needed, for which numbers in result files do not do.

    Networks that several processes trained will do, and `--fresh` does not train them again.
    """
    rows = {name: ROWS[name] for name in names}
    places = [request.out / data.name / folder_name(name) for name in names]
    count = processes_of(place / f"seed-{seed}" for place in places for seed in range(request.seeds))
    alone = replace(request, options={**request.options, "rows": None}, stored={}, elsewhere=(), fresh=False)
    return train_rows(alone, rows, names, lambda _: data, count)


def settings_of_runs(
    request: Request, data: AnyImages, count: int = 1
) -> tuple[ImageTraining, dict[str, Any]]:
    """The settings of a training, and what all runs share beside them.

    Args:
        request: of the run.
        data: the images.
        count: number of processes that train one network.
    """
    training = plan(data, request.options)
    device = torch_device(request.device).type
    common = {
        "data": data.sha256,
        "training": training.settings(),
        "samples": SAMPLES,
        "precision": "bfloat16" if device == "cuda" else "float32",
        # Batch norms see the images of their own process.
        **({"processes": count} if count > 1 else {}),
    }
    return training, common


def epochs_of(data: AnyImages, training: ImageTraining) -> int:
    """Number of epochs of a training."""
    return training.updates // Epochs(len(data.train), training.batch, 1, 0).per_epoch


def train_rows(
    request: Request,
    rows: Mapping[str, ImageRow],
    default: Sequence[str],
    read: Callable[[Request], AnyImages] = data_of,
    trained_by: int | None = None,
    partly: bool = False,
) -> Outcome:
    """Train the rows and seeds that neither a folder of a run nor a result file holds.

    Args:
        request: of the run.
        rows: all rows of the table; those of the stand-in are made smaller.
        default: those that are trained if `--rows` names none.
        read: the request → its images.
        trained_by: number of processes that trained a network; by default as many as there are.
        partly: as for `Known.fill`.
    """
    need("accelerate", "vision")
    count = processes(request.device)  # several, if started by `accelerate launch`
    chosen = rows_of(request.options["rows"], rows, default)
    data = read(request)
    if isinstance(data, ImageFolders):  # one such training keeps a GPU busy
        request = replace(request, options={**request.options, "workers": request.options["workers"] or 1})
    training, common = settings_of_runs(request, data, trained_by or count)
    device = torch_device(request.device).type
    rows = {name: fitted(row, data) for name, row in rows.items()}
    known = look_up(request, rows, chosen, request.out / data.name, common, training, device)
    request.console.print(
        f"{data.name}: {len(data.train):,} training images, {len(data.test):,} for testing, "
        f"{len(data.classes)} classes"
    )
    known.fill(
        request,
        data,
        perform,
        milliseconds=lambda task: min(
            vision_training.step_times(data, task.row, task.training, task.device, 3, count)
        ),
        line=lambda numbers: f"top-1 {numbers['top1']:.2f} %",
        prepare=one_thread,
        together=count > 1,
        partly=partly,
    )
    config = {
        "data": data.describe(),
        "training": training.settings(),
        "epochs": epochs_of(data, training),
        "samples": SAMPLES,
        "rows": {name: row.settings() for name, row in rows.items()},
    }
    return known.outcome(config, rows, data.stand_in)


def perform(task: Task, shared: AnyImages, tell: Tell) -> dict[str, Any]:
    """Train, test, and store network and numbers in the task's folder."""
    told = Throttled(tell)
    model, numbers = vision_training.train(
        task.folder, shared, task.row, task.training, task.seed, task.device, told
    )
    told.rest(task.training.updates)
    if is_main_process():
        numbers |= vision_training.measure(model, shared, SAMPLES)
        vision_training.save(model.cpu(), task.folder / "model")
        numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
        finish_run(task.folder, numbers)
    return stored_result(task.folder)


def run_table_1(request: Request) -> Outcome:
    """Train ResNets, plain, with attention, and with evolving and random maps."""
    return run_rows(request, IN_TABLE_1, BY_DEFAULT)


def run_table_2(request: Request) -> Outcome:
    """Train the ablations."""
    return run_rows(request, IN_TABLE_2)


# --- Reports ---


def measured_grid(outcome: Outcome, rows: Sequence[str]) -> Grid:
    """Sizes, accuracies and calibration."""
    columns = ["n", "parameters", "top-1, %", "top-5, %", "NLL", "ECE, %", "top-1 of the certain half, %"]
    lines = []
    for row in rows:
        if not (found := values(outcome, row, "top1")):
            continue
        size = next(iter(values(outcome, row, "parameters").values()))
        keys = (("top1", 2), ("top5", 2), ("nll", 3), ("ece", 2), ("top1_of_certain_half", 2))
        cells = [mean_cell(values(outcome, row, key), digits) for key, digits in keys]
        lines.append((row, [str(len(found)), f"{size:,.0f}", *cells]))
    return Grid(f"Measured, {outcome.config['data']['name']}", columns, lines)


def notes_of(outcome: Outcome) -> list[str]:
    """What a reader needs to know about data and training."""
    data, training = outcome.config["data"], outcome.config["training"]
    remark = f" ({data['remark']})" if data["remark"] else ""
    precision = {
        numbers["run"]["settings"]["precision"]
        for rows in outcome.per_seed.values()
        for numbers in rows.values()
    }
    drops = training.get("drops")
    in_files = "skipped" in data
    crops = "crops of 8 to 100 % of the area" if in_files else "crops"
    ways = [crops] * (in_files or training["crop"] > 0) + ["mirrored images"] * data["mirrored"]
    then = f"÷ 10 at updates {', '.join(f'{drop:,}' for drop in drops)}" if drops else "then a cosine"
    momentum = f"{'Nesterov ' * training.get('nesterov', True)}momentum {training['momentum']:g}"
    shared = {
        numbers["run"]["settings"].get("processes", 1)
        for rows in outcome.per_seed.values()
        for numbers in rows.values()
    }
    changed, epochs = " and ".join(ways) or "images as they are", outcome.config["epochs"]
    random = any("top1_of_mean_weights" in row for rows in outcome.per_seed.values() for row in rows.values())
    samples = outcome.config["samples"]
    drawn = f"Networks with random weights predict with the mean of {samples} draws. " if random else ""
    return [
        f"Data: {data['name']}{remark}: {data['train']:,} training images, {data['test']:,} for testing, "
        f"{data['classes']} classes. The paper's is ImageNet.",
        f"Training: {epochs} epoch{'s' if epochs > 1 else ''}, {training['updates']:,} updates of "
        f"{training['batch']} images, SGD with {momentum}, learning rate "
        f"{training['learning_rate']:g} after {training['warmup']:,} updates of warm-up, {then}; "
        f"weight decay {training['weight_decay']:g}, {changed}, {' or '.join(sorted(precision))}.",
        f"{drawn}ECE: 15 bins. The certain half is the half of the test images with the highest probability.",
        *[
            f"{count} processes shared each batch; batch norms saw the images of one."
            for count in sorted(shared - {1})
        ],
        *notes_on_runs(outcome),
    ]


def report_table_1(outcome: Outcome) -> Report:
    """Table 1, with the published numbers of all depths."""
    published = {name: numbers[2] for name, numbers in PUBLISHED_1.items()}
    columns = ["million parameters", "billion FLOPs", "top-1, %", "top-5, %"]
    lines = [
        (name, [cell(size, digits=1), cell(flops, digits=1), cell(top1), cell(top5)])
        for name, (size, flops, top1, top5) in PUBLISHED_1.items()
    ]
    grids = [
        measured_grid(outcome, IN_TABLE_1),
        gains_grid(outcome, BASELINES, {"published, ImageNet": published}, "top1", "top-1, points"),
        gains_grid(
            outcome,
            WHOLE_GAINS,
            {"published, ImageNet": published},
            "top1",
            "top-1, points",
            "Evolving attention against no attention, with the same seed",
        ),
        Grid("Published, ImageNet", columns, lines),
    ]
    return report_of(grids, notes_of(outcome))


def report_table_2(outcome: Outcome) -> Report:
    """Table 2: what each part contributes."""
    published = {"published, ImageNet": {name: numbers[0] for name, numbers in PUBLISHED_2.items()}}
    ablations = IN_TABLE_2[2:]
    lines = [(name, [cell(top1), cell(top5)]) for name, (top1, top5) in PUBLISHED_2.items()]
    grids = [
        measured_grid(outcome, IN_TABLE_2),
        gains_grid(outcome, dict.fromkeys(IN_TABLE_2[1:], AA), published, "top1", "top-1, points"),
        gains_grid(
            outcome,
            dict.fromkeys(ablations, EA),
            published,
            "top1",
            "top-1, points",
            "What each part contributes",
        ),
        Grid("Published, ImageNet", ["top-1, %", "top-5, %"], lines),
    ]
    return report_of(grids, notes_of(outcome))


TABLE_1 = Recipe(
    name="ea-table-1",
    title="Images with evolving attention",
    paper="Wang et al. 2021, Evolving Attention with Residual Convolutions, Table 1",
    published={"rows": PUBLISHED_1},
    run=run_table_1,
    report=report_table_1,
    seeds=5,
    folder="vision",
    options=OPTIONS_OF_TABLES,
)
TABLE_2 = Recipe(
    name="ea-table-2",
    title="Images with evolving attention: ablations",
    paper="Wang et al. 2021, Evolving Attention with Residual Convolutions, Table 2",
    published={"rows": PUBLISHED_2},
    run=run_table_2,
    report=report_table_2,
    seeds=2,
    folder="vision",
    options=OPTIONS_OF_TABLES,
)
