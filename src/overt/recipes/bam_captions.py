"""Table 3 of Fan et al. 2020: captions of images with soft, hard and Bayesian attention.

The paper trains on COCO with published region features, as does this recipe if it is given both (`--dataset
coco --features DIR`). By default this is Flickr8k, with regions of Overt's own encoder.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from overt import _check
from overt._extras import need
from overt._files import write_whole
from overt._workers import Tell, Throttled
from overt.data import coco, flickr8k, scenes
from overt.data.captions import CaptionData
from overt.data.files import data_folder
from overt.judge import captions as judge
from overt.mechanisms.bayesian.config import Bayesian
from overt.recipes import caption_training, regions
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell, counted
from overt.recipes._row_reports import (
    FEWEST,
    gains_grid,
    mean_cell,
    notes_on_encoders,
    notes_on_runs,
    report_of,
    values,
)
from overt.recipes._rows import Known, Task, folder_name, look_up, losses_of, rows_of, stored_result
from overt.recipes._runs import finish_run, finished, run_record
from overt.recipes._training import (
    be_quiet,
    hardware,
    one_thread,
    precision_of_products,
    torch_device,
    versions,
)
from overt.recipes.caption_training import BEAM, SEARCHES, CaptionRow, CaptionTraining, Shared, shared_of
from overt.recipes.paired import mean_interval
from overt.recipes.regions import RegionSource
from overt.recipes.translation_training import WEIGHTS

# Appendix B: k = 10 and β = 1e-6, σ₁ = 1e3 and σ₂ = 0.1; ρ = 1, which counts epochs, and d_mid = 10.
PAPER = {"rho": 1.0, "d_mid": 10}
WC = Bayesian.paper("WC", k=10.0, prior_beta=1e-6, **PAPER)
LC = Bayesian.paper("LC", sigma=0.1, prior_sigma=1e3, **PAPER)
NO_KL = Bayesian.paper("NO KL", k=10.0)
ROWS = {
    "soft": CaptionRow(),
    # Half of the captions softly, and the entropy's weight, as in Xu et al.'s code.
    "hard": CaptionRow("hard", arguments={"soft_share": 0.5, "entropy": 0.002}),
    "BAM-LC": CaptionRow(mechanisms=(LC,)),
    "BAM-WC": CaptionRow(mechanisms=(WC,)),
    "no KL": CaptionRow(mechanisms=(NO_KL,)),
    "language only": CaptionRow("none"),
    "shuffled images": CaptionRow(shuffled=True),
}
SOFT, LANGUAGE, SHUFFLED = "soft", "language only", "shuffled images"
MEASURES = {
    "bleu_4": "BLEU-4",
    "bleu_3": "BLEU-3",
    "bleu_2": "BLEU-2",
    "bleu_1": "BLEU-1",
    "cider_d": "CIDEr-D",
    "rouge_l": "ROUGE-L",
    "meteor": "METEOR",
}
# COCO, greedy, in the order of `MEASURES`; Xu et al.'s own are without CIDEr and ROUGE.
PUBLISHED: dict[str, tuple[float | None, ...]] = {
    "soft": (32.2, 43.6, 58.3, 74.9, 104.0, 54.7, 26.1),
    "hard": (26.5, 37.2, 51.9, 69.8, 84.4, 50.7, 23.3),
    "BAM-LC": (32.7, 44.0, 58.7, 75.1, 105.0, 54.8, 26.3),
    "BAM-WC": (32.8, 44.1, 58.8, 75.3, 104.5, 54.9, 26.2),  # all ± 0.1
    "soft, Xu et al.": (24.3, 34.4, 49.2, 70.7, None, None, 23.9),
    "hard, Xu et al.": (25.0, 35.7, 50.4, 71.8, None, None, 23.0),
}
# Flickr8k, with features of ImageNet's VGG (Xu et al. 2015).
PUBLISHED_FLICKR8K: dict[str, tuple[float | None, ...]] = {
    "soft, Xu et al.": (19.5, 29.9, 44.8, 67.0, None, None, 18.93),
    "hard, Xu et al.": (21.3, 31.4, 45.7, 67.0, None, None, 20.30),
}
COMPARED = ("cider_d", "bleu_4", "rouge_l", "meteor")  # with soft attention, beside the published gains
CAPTIONS = "captions.json"
EPOCHS = 30
STAND_IN_EPOCHS = 15
DATASETS = (flickr8k.NAME, coco.NAME, scenes.NAME)
PAPER_TRAINING: dict[str, Any] = {"batch": 10, "learning_rate": 5e-4, "length": 16}  # of COCO
STAND_IN = {"embedding": 128, "hidden": 128, "score": 64}
OPTIONS = {
    "dataset": Option(
        "flickr8k; coco with --features; or scenes, which are generated", flickr8k.NAME, names=True
    ),
    "rows": Option("rows to train, separated by commas; by default all", moves=False),
    "epochs": Option(f"most epochs of a training; {EPOCHS} by default, {STAND_IN_EPOCHS} of scenes", least=1),
    "workers": Option(
        "trainings side by side; by default 8 on a GPU and 1 on a CPU or of COCO", least=1, moves=False
    ),
    **regions.OPTIONS,
    "meteor": Option("add METEOR to the stored result, and train nothing", False, moves=False),
}


def data_of(request: Request, dataset: str | None = None) -> CaptionData:
    """Flickr8k or COCO, or the generated scenes: where they are asked for, or there are no data."""
    dataset = dataset or request.options["dataset"]
    _check.one_of("--dataset", dataset, DATASETS)
    if dataset == scenes.NAME:
        return scenes.make().captions
    if dataset == coco.NAME:
        if request.options["features"] is None:
            raise ValueError(
                f"--dataset {coco.NAME} needs --features DIR: features of the regions of its images"
            )
        return coco.load(request.data)
    if data_folder(request.data) is not None:
        return flickr8k.load(request.data, pictures=request.options["features"] is None)
    request.console.print(
        f"[yellow]no data: give --data DIR for {dataset}. Generated scenes stand in, and the numbers say "
        "nothing about the paper's.[/yellow]"
    )
    return scenes.make().captions


def plan(data: CaptionData, epochs: int | None) -> CaptionTraining:
    """The settings of a training."""
    settings = dict(PAPER_TRAINING) if data.name == coco.NAME else {}
    batch = min(settings.pop("batch", CaptionTraining.batch), len(data.train))
    epochs = epochs or (STAND_IN_EPOCHS if data.stand_in else EPOCHS)
    return CaptionTraining(epochs * -(-len(data.train) // batch), batch, **settings)


def fitted(row: CaptionRow, data: CaptionData) -> CaptionRow:
    """A row with a network of a size that fits the data: a small one for scenes."""
    return replace(row, arguments={**row.arguments, **STAND_IN}) if data.stand_in else row


def settings_of_runs(
    data: CaptionData, source: RegionSource, training: CaptionTraining, device: str
) -> dict[str, Any]:
    """What all rows share."""
    return {
        "data": data.sha256,
        "regions": source.settings,
        "finetune": source.finetune,
        "training": training.settings(),
        "precision": precision_of_products(device),
    }


def run_table_3(request: Request) -> Outcome:
    """Train the encoders, and the network with each attention; score the captions of the test images."""
    need("sacrebleu", "translation")
    chosen = rows_of(request.options["rows"], ROWS, list(ROWS))
    data = data_of(request)
    if data.name == coco.NAME:  # its regions take gigabytes
        request = replace(request, options={**request.options, "workers": request.options["workers"] or 1})
    training = plan(data, request.options["epochs"])
    place = request.out / data.name
    if request.options["meteor"]:
        return with_meteor(request, data, place)
    device = torch_device(request.device).type
    request.console.print(
        f"{data.name}: {len(data.train):,} training images, {len(data.validation):,} for validation, "
        f"{len(data.test):,} for testing, {len(data.vocabulary.words):,} words"
    )
    here, pictures = replace(request, out=place), caption_training.pictures_of(data)
    source = regions.source_of(here, pictures, "bam-table-3")
    rows = {name: fitted(row, data) for name, row in ROWS.items()}
    common = settings_of_runs(data, source, training, device)
    known = look_up(request, rows, chosen, place, common, training, device)
    regions.train_encoders(here, pictures, source, {task.seed for task in known.tasks})
    shared = shared_of(data, source)
    known.fill(
        request,
        shared,
        perform,
        milliseconds=lambda task: min(
            caption_training.step_times(shared, task.row, task.training, task.seed, task.device)
        ),
        line=lambda numbers: f"CIDEr-D {numbers['greedy_cider_d']:.1f}",
        prepare=one_thread,
        together=False,
        alike=lambda task: (task.row.attention, bool(task.row.mechanisms)),
        partly=True,
    )
    return scored(known, request, data, place, common)


def scored(
    known: Known, request: Request, data: CaptionData, place: Path, settings: Mapping[str, Any]
) -> Outcome:
    """The outcome of runs, with METEOR where it can be had.

    Args:
        known: the runs.
        request: of the run.
        data: the captions.
        place: folder of the runs.
        settings: what all of them share.
    """
    training, rows = settings["training"], {name: fitted(row, data) for name, row in ROWS.items()}
    config = {
        "data": data.describe(),
        "regions": settings["regions"],
        "finetune": settings["finetune"],
        "training": training,
        "epochs": training["updates"] // -(-len(data.train) // training["batch"]),
        "rows": {name: row.settings() for name, row in rows.items()},
        "floors": floors_of(data),
        "meteor": add_meteor(known, place, [row.captions for row in data.test], request),
    }
    return known.outcome(config, rows, data.stand_in and request.options["dataset"] != scenes.NAME)


def with_meteor(request: Request, data: CaptionData, place: Path) -> Outcome:
    """The stored result with METEOR, from the captions in the folders of its runs, whatever trained them.

    A machine with Java need not have the GPU that the runs were trained on, without which they would be
    trained again.
    """
    numbers = {
        (name, seed): dict(entry) for seed, rows in request.stored.items() for name, entry in rows.items()
    }
    if not numbers:
        raise ValueError(
            "--meteor adds to a stored result, and there is none: measure it first, or give the folder that "
            "has it, such as --results runs/captions/results after a trial"
        )
    settings = next(iter(numbers.values()))["run"]["settings"]
    if settings["data"] != data.sha256:
        raise ValueError("--meteor needs the data of the stored result, and these are others")
    known = Known(numbers, stored=len(numbers), lost=losses_of(request))
    return scored(known, request, data, place, settings)


def perform(task: Task, shared: Shared, tell: Tell) -> dict[str, Any]:
    """Train, write captions, score them, and store network, captions and numbers in the task's folder."""
    be_quiet()
    told = Throttled(tell, every=20)
    began = time.perf_counter()
    data = shared.data
    model, numbers = caption_training.train(
        task.folder, shared, task.row, task.training, task.seed, task.device, told
    )
    told.rest(numbers["updates"])
    trained = time.perf_counter()
    texts, likelihood = caption_training.measure(model, data, task.training)
    references = [row.captions for row in data.test]
    numbers |= likelihood
    for search in SEARCHES:
        found = named(judge.score(texts[search], references))
        numbers |= {f"{search}_{measure}": found[measure] for measure in MEASURES}
    numbers["distinct"] = len(set(texts["greedy"]))
    if task.row.attention != "none":
        numbers["encoder"] = shared.source.encoder_hash(task.seed)
    images = [row.image for row in data.test]
    write_whole(task.folder / CAPTIONS, json.dumps({"images": images, **texts}, indent=1, ensure_ascii=False))
    numbers["seconds"] = {"training": trained - began, "testing": time.perf_counter() - trained}
    caption_training.save(model.cpu(), shared, task.name, task.seed, task.training, task.folder / "model")
    numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
    finish_run(task.folder, numbers)
    shutil.rmtree(task.folder / WEIGHTS)
    return stored_result(task.folder)


def named(scores: judge.Scores, meteor: float | None = None) -> dict[str, float | None]:
    """Scores by the names of `MEASURES`."""
    by_order = {f"bleu_{order}": value for order, value in enumerate(scores.bleu, 1)}
    return {**by_order, "cider_d": scores.cider_d, "rouge_l": scores.rouge_l, "meteor": meteor}


def floors_of(data: CaptionData) -> dict[str, dict[str, float | None]]:
    """Scores of what people wrote, and of captions that look at no image; METEOR where it can be had."""
    references = [row.captions for row in data.test]
    pool = [text for row in data.train for text in row.captions]
    found = {name: named(scores) for name, scores in judge.floors(pool, references).items()}
    constant = judge.constant_caption(pool)
    texts: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = [
        judge.human(references),
        (judge.random_captions(pool, len(references)), references),
        ([constant] * len(references), references),
    ]
    for scores, (said, wanted) in zip(found.values(), texts, strict=True):
        scores["meteor"] = judge.meteor(said, wanted).score
    return found


def add_meteor(known: Known, place: Path, references: Sequence[Sequence[str]], request: Request) -> str:
    """Score stored captions by METEOR where it is missing and can be had; the reason if it cannot.

    Args:
        known: numbers of all runs, to which it is added, also in their folders.
        place: folder of the runs.
        references: of the test images.
        request: of the run.
    """
    missing = [key for key, numbers in known.numbers.items() if numbers["greedy_meteor"] is None]
    absent = 0
    for name, seed in missing:
        numbers, folder = known.numbers[name, seed], place / folder_name(name) / f"seed-{seed}"
        here = finished(folder, numbers["run"]["settings"])
        # The folder may hold another run than the one in the result file, or none.
        if here is None or here["run"] != numbers["run"] or not (folder / CAPTIONS).is_file():
            absent += 1
            continue
        if here["greedy_meteor"] is not None:  # of an interrupted command
            numbers |= {f"{search}_meteor": here[f"{search}_meteor"] for search in SEARCHES}
            continue
        texts = json.loads((folder / CAPTIONS).read_text(encoding="utf-8"))
        for search in SEARCHES:
            found = judge.meteor(texts[search], references)
            if found.score is None:
                return found.reason
            numbers[f"{search}_meteor"] = found.score
        request.console.print(f"[dim]{name}, seed {seed}: METEOR {numbers['greedy_meteor']:.1f}[/dim]")
        finish_run(folder, numbers)
    return f"the captions of {counted(absent, 'run')} are not in {place.name}" if absent else ""


# --- Report ---


def scores_grid(outcome: Outcome, search: str, title: str, published: Mapping[str, Sequence[Any]]) -> Grid:
    """All scores by one search, with the floors, the ceiling, and published numbers below each row."""
    columns = ["n", *MEASURES.values(), "perplexity", "different captions"]
    lines: list[tuple[str, list[str]]] = []
    for row in ROWS:
        if found := values(outcome, row, f"{search}_cider_d"):
            cells = [mean_cell(values(outcome, row, f"{search}_{measure}"), 1) for measure in MEASURES]
            others = [mean_cell(values(outcome, row, "perplexity"), 2)]
            others += [mean_cell(values(outcome, row, "distinct"), 0) if search == "greedy" else ""]
            lines.append((row, [str(len(found)), *cells, *others]))
        if row in published:
            cells = [cell(number, digits=1) for number in published[row]]
            lines.append((f"{row}, published (COCO)", ["", *cells, "", ""]))
    for name, scores in outcome.config["floors"].items():
        lines.append((name, ["", *(cell(scores[measure], digits=1) for measure in MEASURES), "", ""]))
    return Grid(title, columns, lines)


def gains(outcome: Outcome) -> list[Grid]:
    """Differences to soft attention: in four scores as published, by beam search, and in likelihood."""
    baselines = {row: SOFT for row in ROWS if row not in (SOFT, LANGUAGE, SHUFFLED)}
    grids = []
    for measure in COMPARED:
        place = list(MEASURES).index(measure)
        published = {row: float(numbers[place] or 0.0) for row, numbers in PUBLISHED.items()}
        name = MEASURES[measure]
        grids.append(
            gains_grid(
                outcome,
                baselines,
                {"published, COCO": published},
                f"greedy_{measure}",
                f"{name}, points",
                f"Differences with the same seed, {name}",
            )
        )
    others = {
        f"beam_{BEAM}_cider_d": f"CIDEr-D with {BEAM} beams, points",
        "perplexity": "perplexity of people's captions (lower is better)",
    }
    for key, heading in others.items():
        name = heading.partition(",")[0]
        grids.append(
            gains_grid(outcome, baselines, {}, key, heading, f"Differences with the same seed, {name}")
        )
    return grids


def note_on_pictures(outcome: Outcome) -> str:
    """Whether captions are better with the right pictures than with other ones."""
    right, wrong = (values(outcome, row, "greedy_cider_d") for row in (SOFT, SHUFFLED))
    seeds = sorted(set(right) & set(wrong))
    if not seeds:
        return "Whether the pictures matter is not known: it takes the rows soft and shuffled images."
    mean, low, high = mean_interval([right[seed] - wrong[seed] for seed in seeds])
    said = (
        "CIDEr-D of soft attention with its own pictures, minus that with shuffled ones: "
        f"{cell(mean)} points, {counted(len(seeds), 'seed')}"
    )
    if len(seeds) < FEWEST:
        return f"{said}. Whether the pictures matter takes {FEWEST} seeds at least."
    said = f"{said} (95 % interval {cell(low)} … {cell(high)})"
    if low > 0.0:
        return f"{said}: the pictures matter."
    return f"{said}: shuffled pictures are not worse beyond the interval: this table measures language alone."


def regions_note(config: Mapping[str, Any]) -> str:
    """Where the regions come from."""
    settings = config["regions"]
    frozen = "trained further in each row" if config["finetune"] else "the same for all rows of a seed"
    if "features" in settings:
        return "Regions: published features, as they are."
    if "encoder" in settings:
        return f"Regions: those of a given network, {frozen}."
    training, row = settings["trained"]["training"], settings["trained"]["row"]
    return (
        f"Regions: one for 16 × 16 pixels, of an encoder that was trained without attention to tell which of "
        f"{row['words']:,} words the training captions of an image hold ({training['updates']:,} updates of "
        f"{training['batch']} images), {frozen}. The paper's are of a detector trained on other images, "
        "whose numbers are out of reach here."
    )


def deviations(config: Mapping[str, Any]) -> list[str]:
    """The settings that are not the paper's, each with its reason."""
    training, paper, found = config["training"], PAPER_TRAINING, []
    if training["batch"] != paper["batch"]:
        found.append(
            f"batches of {training['batch']} images rather than {paper['batch']}, and a learning rate of "
            f"{training['learning_rate']:g} rather than {paper['learning_rate']:g}, for fewer updates"
        )
    if training["length"] != paper["length"]:
        found.append(
            f"captions of up to {training['length']} words rather than {paper['length']}, so that few are cut"
        )
    found.append(
        "the learning rate and the end of a training follow the validation loss, for which the paper gives "
        "no rule (the authors' later code takes 0.8 of the rate every 3 epochs, clips each number of the "
        "gradient at 0.1, and gives the network some of its own words as the last one, where here it has "
        "always the true one)"
    )
    found.append("the same images are in a batch in each epoch, and the order of the batches changes")
    if "features" not in config["regions"]:
        found.append("regions are of an encoder trained here, not of a detector; --features would take those")
    return found


def report_table_3(outcome: Outcome) -> Report:
    """Table 3 by greedy search, as published, and by beam search."""
    config = outcome.config
    data, training = config["data"], config["training"]
    flickr = [
        (f"{name}, published", [cell(number, digits=1) for number in numbers])
        for name, numbers in PUBLISHED_FLICKR8K.items()
        if data["name"] == flickr8k.NAME
    ]
    compared = gains(outcome)
    grids = [
        scores_grid(outcome, "greedy", f"Greedy search, {data['name']}", PUBLISHED),
        *compared,
        gains_grid(
            outcome,
            dict.fromkeys((LANGUAGE, SHUFFLED), SOFT),
            {},
            "greedy_cider_d",
            "CIDEr-D, points",
            "What is lost without the pictures",
        ),
        scores_grid(outcome, f"beam_{BEAM}", f"Beam search with {BEAM} beams, {data['name']}", {}),
        Grid("Published, Flickr8k, with ImageNet's VGG", list(MEASURES.values()), flickr),
    ]
    sizes = values(outcome, SOFT, "parameters") or values(outcome, next(iter(config["rows"])), "parameters")
    size = f" {next(iter(sizes.values())):,.0f} parameters." if sizes else ""
    missing = f" “–”: {config['meteor']}; the same command adds it later." if config["meteor"] else ""
    notes = [
        note_on_pictures(outcome),
        "Floors and ceiling: one human caption against the image's others, a random training caption, and "
        "how most training captions begin.",
        f"Data: {data['name']}: {data['train']:,} training images, {data['validation']:,} for validation, "
        f"{data['test']:,} for testing; {data['words']:,} words."
        + (
            ""
            if data["name"] == coco.NAME
            else " The paper's is COCO, whose scores do not compare with these."
        ),
        regions_note(config),
        *notes_on_encoders(outcome),
        f"Training: at most {counted(config['epochs'], 'epoch')} of {training['batch']} images with all "
        f"their captions, Adam, learning rate {training['learning_rate']:g}, halved after epochs without a "
        f"lower validation loss, the best epoch's weights; dropout {training['dropout']:g}, gradients "
        f"clipped at {training['clip']:g}, captions of {training['length']} words at most.{size}",
        "BAM at kl_weight = 1, λ = sigmoid(ρ·t) with t in epochs, as in the authors' later code. Random "
        "weights have their mean in testing; hard attention is tested by its expectation. Half of its "
        "captions are trained softly, with the entropy's weight of Xu et al.'s code, 0.002.",
        "Shuffled images: each image's captions have another image's regions, in training and in testing.",
        f"BLEU, ROUGE-L and CIDEr-D as in COCO's evaluation; METEOR 1.5 by its own program.{missing}",
        f"Other than in the paper: {'; '.join(deviations(config))}.",
        f"{counted(sum(len(grid.rows) for grid in compared), 'comparison')} with soft attention in "
        f"{counted(sum(bool(grid.rows) for grid in compared), 'table')}.",
        *notes_on_runs(outcome),
    ]
    return report_of(grids, notes)


TABLE_3 = Recipe(
    name="bam-table-3",
    title="Captions with Bayesian attention",
    paper="Fan et al. 2020, Bayesian Attention Modules, Table 3",
    published={"rows": PUBLISHED, "Flickr8k": PUBLISHED_FLICKR8K},
    run=run_table_3,
    report=report_table_3,
    seeds=5,
    folder="captions",
    options=OPTIONS,
)
