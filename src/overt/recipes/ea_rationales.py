"""Table 8 of Wang et al. 2021, and Table 3 of its appendix: rationales of plain and evolving attention.

Classifiers of movie reviews are trained with plain, evolving and random attention. Methods say which words
they go by; people have marked words, too (ERASER). Do they agree, and does deleting the words matter?
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from overt._extras import need
from overt._files import write_whole
from overt._workers import Tell, Throttled
from overt.data import eraser, planted
from overt.data.files import data_folder
from overt.judge.rationales.evaluation import DELETING, FAITHFUL, HUMAN, Rationales, evaluate
from overt.judge.rationales.methods import EXTRA, LIME, METHODS, POOLING, SAMPLES, ZEROING, title_of
from overt.judge.rationales.methods import RANDOM as CONTROL
from overt.judge.rationales.words import WordClassifier
from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.evolving import Evolving
from overt.mechanisms.mechanism import Mechanism
from overt.recipes import rationale_training
from overt.recipes._recipe import (
    DISCARD_MODELS,
    WORKERS,
    Grid,
    Option,
    Outcome,
    Recipe,
    Report,
    Request,
    cell,
)
from overt.recipes._row_reports import gains_grid, mean_cell, notes_on_runs, report_of, values
from overt.recipes._rows import Task, look_up, stored_result
from overt.recipes._runs import check_weights, finish_run, finite, load_tokenizer, run_record
from overt.recipes._training import (
    be_quiet,
    hardware,
    leave_memory,
    one_thread,
    precision_of_products,
    processes,
    short_products,
    torch_device,
    versions,
)
from overt.recipes.rationale_training import RationaleRow, RationaleTraining, Reviews
from overt.recipes.translation_training import WEIGHTS
from overt.recipes.understanding_runs import listed, model_name, pretrained

PLAIN, EVOLVING, RANDOM = "plain", "Evolving", "Bayesian"
FORMS: dict[str, tuple[Mechanism, ...]] = {
    PLAIN: (),
    EVOLVING: (Evolving(alpha=0.1, beta=0.1),),
    RANDOM: (Bayesian(k=10.0),),
}
WITHOUT_LIME = (RANDOM,)
FEWER_SEEDS = {RANDOM: 3}
SOME = 60  # test texts for methods that run the model once for every token
SLOW = ("blankout", ZEROING)
EXPORTED = (POOLING, LIME)
EPOCHS, STAND_IN_EPOCHS = 20, 12
POINTS = 6
SETS = (
    12 + 2 * POINTS
)  # of kept words that are asked for, of each text and method, about a quarter of them twice
INTEGRAL = 50  # steps of integrated gradients
AT_ONCE = 64  # texts that a GPU reads in a third of the time of an update
FAR = 0.01  # difference of a probability that float16 may make
STAND_IN_SAMPLES = 200
TEST = "test"
PERFORMANCE = "performance.json"  # of a run, once all methods are judged
STAND_IN = RationaleTraining(
    0, batch=16, learning_rate=2e-3, layers=0, hidden=32, window=32, dropout=0.1, patience=12
)
# Performance, AUPRC, comprehensiveness and sufficiency (appendix, Table 3). Table 8 repeats the last two
# columns, but for e-SNLI's plain row, where it prints that of EA-attention, a misprint.
ATTENTION, EA_ATTENTION = "attention", "EA-attention"
KEYS = ("macro F1", "auprc", "comprehensiveness", "sufficiency")
PUBLISHED: dict[str, dict[str, tuple[float, ...]]] = {
    "movie reviews": {
        f"{PLAIN}, {ATTENTION}": (0.970, 0.417, 0.129, 0.097),
        f"{PLAIN}, {EA_ATTENTION}": (0.970, 0.435, 0.142, 0.084),
        f"{PLAIN}, LIME": (0.970, 0.280, 0.187, 0.093),
        f"{EVOLVING}, LIME": (0.975, 0.313, 0.194, 0.089),
    },
    "FEVER": {
        f"{PLAIN}, {ATTENTION}": (0.870, 0.235, 0.037, 0.122),
        f"{PLAIN}, {EA_ATTENTION}": (0.870, 0.238, 0.078, 0.097),
        f"{PLAIN}, LIME": (0.870, 0.291, 0.212, 0.014),
        f"{EVOLVING}, LIME": (0.886, 0.307, 0.236, 0.014),
    },
    "MultiRC": {
        f"{PLAIN}, {ATTENTION}": (0.655, 0.244, 0.036, 0.052),
        f"{PLAIN}, {EA_ATTENTION}": (0.655, 0.251, 0.054, 0.041),
        f"{PLAIN}, LIME": (0.655, 0.208, 0.213, -0.079),
        f"{EVOLVING}, LIME": (0.674, 0.221, 0.241, -0.089),
    },
    "CoS-E": {
        f"{PLAIN}, {ATTENTION}": (0.487, 0.606, 0.080, 0.217),
        f"{PLAIN}, {EA_ATTENTION}": (0.487, 0.610, 0.113, 0.189),
        f"{PLAIN}, LIME": (0.487, 0.544, 0.223, 0.143),
        f"{EVOLVING}, LIME": (0.491, 0.552, 0.231, 0.140),
    },
    "e-SNLI": {
        f"{PLAIN}, {ATTENTION}": (0.960, 0.395, 0.105, 0.583),
        f"{PLAIN}, {EA_ATTENTION}": (0.960, 0.399, 0.177, 0.396),
        f"{PLAIN}, LIME": (0.960, 0.513, 0.437, 0.389),
        f"{EVOLVING}, LIME": (0.969, 0.534, 0.445, 0.368),
    },
}
MOVIES_NAME = "movie reviews"
MOVIES = PUBLISHED[MOVIES_NAME]
PAIRED = {
    "auprc": "AUPRC",
    "average_precision": "Average precision",
    "token_f1": "Token F1",
    "comprehensiveness": "Comprehensiveness",
    "sufficiency": "Sufficiency",
    "log_odds": "Log-odds",
}
OPTIONS = {
    "forms": Option("forms of attention, separated by commas; by default all of the table", moves=False),
    "epochs": Option(f"epochs of each training at most; {EPOCHS} by default, 12 of the stand-in", least=1),
    "lime-samples": Option(
        f"texts that LIME asks the classifier about, for each review; {SAMPLES} by default, 200 of the "
        "stand-in",
        least=10,
    ),
    "workers": WORKERS,
    "discard-models": DISCARD_MODELS,
}


class Shared(NamedTuple):
    """What all trainings need."""

    reviews: Reviews
    tokenizer: Any
    path: str
    samples: int
    keep_models: bool


def reviews_of(request: Request) -> Reviews:
    """Movie reviews, or generated ones where no data are given."""
    if data_folder(request.data) is None:
        request.console.print(
            "[yellow]no --data: generated reviews, in which a planted passage decides, stand in[/yellow]"
        )
        return Reviews("planted reviews", planted.planted_reviews(), eraser.CLASSES, True)
    return Reviews(MOVIES_NAME, eraser.load_movies(request.data), eraser.CLASSES, False)


def encoder_of(request: Request, reviews: Reviews) -> str:
    """The pretrained encoder; for generated reviews a small one without training will do."""
    if request.model is None and reviews.stand_in:
        return rationale_training.small_encoder(request.out / "encoder", planted.vocabulary())
    return pretrained(request)


def plan(reviews: Reviews, own: bool, epochs: int | None) -> RationaleTraining:
    """Settings of the trainings; `own` is whether the encoder is the stand-in's."""
    base = STAND_IN if own else RationaleTraining(0)
    epochs = epochs or (STAND_IN_EPOCHS if reviews.stand_in else EPOCHS)
    per_epoch = max(1, len(reviews.splits["train"]) // base.batch)
    return RationaleTraining(**{**base.settings(), "updates": epochs * per_epoch})


def rows_of() -> dict[str, RationaleRow]:
    """All rows by name."""
    return {
        form: RationaleRow(
            form,
            mechanisms,
            tuple(method for method in METHODS if method != LIME or form not in WITHOUT_LIME),
        )
        for form, mechanisms in FORMS.items()
    }


def run_table_8(request: Request) -> Outcome:
    """Train the classifiers that are not there, and judge their rationales."""
    need("accelerate", EXTRA)
    need("lime.lime_text", EXTRA)
    need("captum.attr", EXTRA)
    be_quiet()
    if processes(request.device) > 1:
        raise ValueError("ea-table-8 starts its own processes (--workers): leave out accelerate launch")
    reviews = reviews_of(request)
    path = encoder_of(request, reviews)
    own = request.model is None
    training = plan(reviews, own, request.options["epochs"])
    samples = request.options["lime-samples"] or (STAND_IN_SAMPLES if reviews.stand_in else SAMPLES)
    rows = rows_of()
    chosen = listed("--forms", request.options["forms"], list(rows), list(rows))
    common = {
        "data": reviews.sha256,
        "model": model_name(path) if not own else "small encoder",
        "training": training.settings(),
        "lime_samples": samples,
        "some": SOME,
        "points": POINTS,
        "precision": precision_of_products(request.device),
    }
    device = torch_device(request.device).type
    place = request.out / reviews.name.replace(" ", "-")
    seeds = {form: min(most, request.seeds) for form, most in FEWER_SEEDS.items()}
    tokenizer = load_tokenizer(path)
    if not own:
        check_weights(request.out, path, request.fresh)
    known = look_up(request, rows, chosen, place, common, training, device, seeds)
    shared = Shared(reviews, tokenizer, path, samples, not request.options["discard-models"])
    with threads(1 if own else None):
        known.fill(
            request,
            shared,
            perform,
            milliseconds=lambda task: step_ms(task, shared),
            line=lambda numbers: f"macro F1 {numbers['macro F1']:.3f}",
            prepare=prepare_process,
            together=False,
            rest=lambda task: sum(steps_of(task, shared).values()),
            tells_rest=True,
            partly=True,
        )
    config = {
        "data": reviews.describe(),
        "model": common["model"],
        "forms": list(rows),
        "training": training.settings(),
        "epochs": training.updates // max(1, len(reviews.splits["train"]) // training.batch),
        "lime_samples": samples,
        "some": SOME,
        "rows": {name: row.settings() for name, row in rows.items()},
    }
    return known.outcome(config, rows, reviews.stand_in)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Use so many threads: a very small network is slower on several. None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepare_process() -> None:
    """Prepare a process that trains and measures beside others."""
    one_thread()
    be_quiet()


def passes(method: str, shared: Shared) -> tuple[float, float]:
    """About how many whole texts a method takes through the model for its scores, and for its measures."""
    texts = shared.reviews.splits[TEST]
    judged = min(SOME, len(texts)) if method in SLOW else len(texts)
    words = sum(len(example.words) for example in texts) / len(texts)
    scores = {
        LIME: shared.samples / 2,  # of half the length
        "integrated": 3 * INTEGRAL,
        "blankout": words,
        ZEROING: words / 2,
        "raw": 23.0,  # with rollout and flow, which are read from the same trace, on the CPU
        "rollout": 0.5,
        "flow": 0.5,
    }
    return judged * scores.get(method, 3.0), judged * SETS * 0.75 / 2


def steps_of(task: Task, shared: Shared) -> dict[str, int]:
    """How many updates take about as long as measuring each method."""
    a_third = AT_ONCE if task.device == "cuda" else task.training.batch
    return {method: round(sum(passes(method, shared)) / (3 * a_third)) + 1 for method in task.row.methods}


def step_ms(task: Task, shared: Shared) -> float:
    """Milliseconds of an update, the fastest of four."""
    return min(
        rationale_training.step_times(
            shared.reviews,
            shared.tokenizer,
            shared.path,
            task.row.mechanisms,
            task.training,
            task.device,
            4,
        )
    )


def perform(task: Task, shared: Shared, tell: Tell) -> dict[str, Any]:
    """Train, judge method by method, and store model and numbers in the task's folder.

    Each method's numbers are stored as soon as they are there, so that an interrupted run goes on.
    """
    row: RationaleRow = task.row
    told = Throttled(tell)
    if not (task.folder / rationale_training.TRAINED).is_file():
        for name in (PERFORMANCE, *(f"{method}.json" for method in row.methods)):  # of an earlier training
            (task.folder / name).unlink(missing_ok=True)
    model, numbers = rationale_training.train(
        task.folder,
        shared.reviews,
        shared.tokenizer,
        shared.path,
        row.mechanisms,
        task.training,
        task.seed,
        task.device,
        told,
    )
    told.rest(task.training.updates)  # also those that early stopping saved
    dtype, difference = products_of(model, shared)
    numbers |= {"methods": {}, "refused": {}, "half_difference": difference, "half": dtype is not None}
    steps = steps_of(task, shared)
    missing = [method for method in row.methods if not (task.folder / f"{method}.json").is_file()]
    if not missing and not (task.folder / PERFORMANCE).is_file():  # interrupted in between
        missing = [row.methods[-1]]
    told.rest(task.training.updates + sum(steps[method] for method in row.methods if method not in missing))
    if missing:
        with short_products(task.device):
            judge(model, shared, task, missing, dtype, told)
    for method in row.methods:
        found = json.loads((task.folder / f"{method}.json").read_text())
        numbers["methods"] |= found["methods"]
        numbers["refused"] |= found["refused"]
    numbers |= json.loads((task.folder / PERFORMANCE).read_text())
    numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
    finish_run(task.folder, numbers)
    for name in (WEIGHTS, *([] if shared.keep_models else [rationale_training.MODEL])):
        shutil.rmtree(task.folder / name, ignore_errors=True)
    return stored_result(task.folder)


def products_of(model: Any, shared: Shared) -> tuple[torch.dtype | None, float | None]:
    """The type of products in passes of deleted words, and how far it moves the test texts' probabilities.

    It is float16 on a GPU, unless a probability would differ by more than 0.01; None for the model's own.
    """
    if next(model.parameters()).device.type != "cuda":
        return None, None
    found = []
    for dtype in (None, torch.float16):
        classifier = WordClassifier(model, shared.tokenizer, dtype)
        texts = [classifier.read(each.words, each.query, each.name) for each in shared.reviews.splits[TEST]]
        whole = [(text, np.ones((1, len(text.words)), dtype=bool)) for text in texts]
        found.append(np.concatenate(classifier.ask(whole)))
    difference = float(np.abs(found[0] - found[1]).max())
    return torch.float16 if difference <= FAR else None, difference


def judge(
    model: Any,
    shared: Shared,
    task: Task,
    methods: Sequence[str],
    dtype: torch.dtype | None,
    told: Throttled,
) -> None:
    """Judge methods by the test texts, store the numbers of each once they are there, and then performance.

    Args:
        model: the trained classifier.
        shared: with the texts.
        task: with the folder for the numbers.
        methods: in the order in which they are judged.
        dtype: of the products where words are deleted.
        told: how far it is, in the steps of `steps_of`.
    """
    examples, steps = shared.reviews.splits[TEST], steps_of(task, shared)
    begun, kept = told.told, list[str]()

    def tell(words: str, done: int, total: int) -> None:
        method = methods[len(kept)]
        scores, deletions = passes(method, shared)
        scoring, part = scores / (scores + deletions), done / total
        share = scoring + (1 - scoring) * part if DELETING in words else scoring * part
        told(begun + int(steps[method] * share))

    def keep(method: str, found: Rationales | str) -> None:
        nonlocal begun
        numbers: dict[str, Any] = {"methods": {}, "refused": {}}
        if isinstance(found, str):
            numbers["refused"][method] = found
        else:
            numbers["methods"][method] = found.to_dict()
            if method in EXPORTED and not shared.reviews.stand_in:
                judged = [examples[number] for number in found.texts]
                eraser.write_predictions(task.folder / f"{method}.jsonl", "movies", judged, found.predictions)
        write_whole(task.folder / f"{method}.json", json.dumps(finite(numbers), indent=1))
        kept.append(method)
        begun += steps[method]
        told.rest(begun)
        leave_memory(task.device)

    found = evaluate(
        model,
        shared.tokenizer,
        [example.words for example in examples],
        [example.evidence for example in examples],
        methods,
        queries=[example.query for example in examples],
        labels=[example.label for example in examples],
        names=[example.name for example in examples],
        share=shared.reviews.share("train"),
        at_most=dict.fromkeys(SLOW, SOME),
        points=POINTS,
        samples=shared.samples,
        seed=task.seed,
        dtype=dtype,
        progress=tell,
        done=keep,
    )
    write_whole(task.folder / PERFORMANCE, json.dumps(found.performance))


# --- Report ---


def row_of(form: str, method: str) -> str:
    """Name of a form's row by a method."""
    return f"{form}, {title_of(method)}"


def by_method(outcome: Outcome, factor: float = 1.0) -> Outcome:
    """The numbers with a row for each form and method."""
    per_seed: dict[int, dict[str, Any]] = {}
    for seed, rows in outcome.per_seed.items():
        for form, numbers in rows.items():
            for method, measures in numbers["methods"].items():
                scaled = {
                    key: value * factor
                    for key, value in measures.items()
                    if isinstance(value, int | float) and key != "texts"
                }
                per_seed.setdefault(seed, {})[row_of(form, method)] = {
                    **scaled,
                    "texts": measures["texts"],
                }
    return Outcome(outcome.config, per_seed)


def published_row(form: str, method: str) -> str | None:
    """The published row that a row stands beside."""
    if method == POOLING and form == PLAIN:
        return f"{PLAIN}, {ATTENTION}"
    name = f"{form}, LIME"
    return name if method == LIME and name in MOVIES else None


def measured_forms(outcome: Outcome) -> list[str]:
    """The forms that were measured, in the order of the table."""
    return [form for form in FORMS if any(form in rows for rows in outcome.per_seed.values())]


def performance_grid(outcome: Outcome) -> Grid:
    """How well the classifiers do."""
    lines = []
    for form in measured_forms(outcome):
        found = {key: values(outcome, form, key) for key in ("accuracy", "macro F1", "valid_accuracy")}
        sizes = [values(outcome, form, key) for key in ("parameters", "added")]
        cells = [str(len(found["accuracy"]))]
        cells += [f"{int(next(iter(size.values()))):,}" for size in sizes]
        cells += [mean_cell(numbers, 3) for numbers in found.values()]
        name = f"{form}, LIME"
        lines.append((form, [*cells, cell(MOVIES[name][0], digits=3) if name in MOVIES else "–"]))
    columns = ["n", "parameters", "added", "test accuracy", "test macro F1", "validation accuracy"]
    return Grid(f"Classifiers, {outcome.config['data']['name']}", [*columns, "published F1, movies"], lines)


def measures_grid(outcome: Outcome) -> Grid:
    """All measures of all methods, with the published rows below theirs."""
    long = by_method(outcome)
    keys = {**HUMAN, **FAITHFUL}
    keys = {
        key: heading
        for key, heading in keys.items()
        if any(key in row for rows in long.per_seed.values() for row in rows.values())
    }
    lines = []
    for form in measured_forms(outcome):
        for method in outcome.config["rows"][form]["methods"]:
            name = row_of(form, method)
            texts = values(long, name, "texts")
            cells = [str(len(texts) or "–"), f"{next(iter(texts.values())):.0f}" if texts else "–"]
            lines.append((name, cells + [mean_cell(values(long, name, key), 3) for key in keys]))
            theirs = published_row(form, method)
            if theirs is not None:
                lines.append((f"{theirs}, published", ["", "", *_published_cells(theirs, list(keys))]))
        if form == PLAIN:
            theirs = f"{PLAIN}, {EA_ATTENTION}"
            lines.append((f"{theirs}, published", ["", "", *_published_cells(theirs, list(keys))]))
    return Grid("Rationales of the test texts", ["n", "texts", *keys.values()], lines)


def _published_cells(row: str, keys: Sequence[str]) -> list[str]:
    known = dict(zip(KEYS, MOVIES[row], strict=True))
    return [cell(known.get(key), digits=3) for key in keys]


def paired_grids(outcome: Outcome) -> list[Grid]:
    """Each form against plain attention with the same seed and method, × 100."""
    long = by_method(outcome, 100.0)
    forms = measured_forms(outcome)
    grids = []
    for key, title in PAIRED.items():
        pairs = {
            row_of(form, method): row_of(PLAIN, method)
            for form in forms
            if form != PLAIN
            for method in outcome.config["rows"][form]["methods"]
            # All models have the same random scores, so that their agreement with people cannot differ.
            if not (method == CONTROL and key in HUMAN)
        }
        theirs: dict[str, dict[str, float]] = {"published, LIME": {}, "published, EA-attention": {}}
        if key in KEYS:
            place = KEYS.index(key)
            for form in (PLAIN, EVOLVING):
                theirs["published, LIME"][row_of(form, LIME)] = 100 * MOVIES[f"{form}, LIME"][place]
            both = {PLAIN: ATTENTION, EVOLVING: EA_ATTENTION}
            for form, name in both.items():
                number = 100 * MOVIES[f"{PLAIN}, {name}"][place]
                theirs["published, EA-attention"][row_of(form, POOLING)] = number
        theirs = {heading: numbers for heading, numbers in theirs.items() if numbers}
        grids.append(
            gains_grid(long, pairs, theirs, key, "× 100", f"{title}, × 100: differences with the same seed")
        )
    return grids


def notes_of(outcome: Outcome) -> list[str]:
    """What a reader needs to know."""
    config = outcome.config
    data, training = config["data"], config["training"]
    shares = ", ".join(f"{split} {100 * share:.1f} %" for split, share in data["shares"].items())
    sizes = ", ".join(f"{count:,} {split}" for split, count in data["sizes"].items())
    trained = (
        f"the encoder's last {training['layers']} layers, mechanisms' parameters and the head are trained"
        if training["layers"]
        else "all weights are trained"
    )
    refused: dict[str, str] = {}
    for rows in outcome.per_seed.values():
        for form, numbers in rows.items():
            refused |= {
                f"{form}, {title_of(method)}": reason for method, reason in numbers["refused"].items()
            }
    comprehensive = (
        " (all there are in test texts, some in the others)" if data["name"] == MOVIES_NAME else ""
    )
    notes = [
        f"Data: {data['name']}, {sizes} texts. Words that people marked: {shares}{comprehensive}.",
        f"Model: {config['model']} over windows of at most {training['window']} tokens, a biLSTM of "
        f"{training['hidden']} units in each direction over words' first pieces, additive attention that "
        f"pools, a layer of {training['hidden']}; {trained}. Adam with {training['learning_rate']:g}, "
        f"batches of {training['batch']}, at most {config['epochs']} epochs, patience "
        f"{training['patience']} on validation accuracy. The paper's encoder is BERT-base.",
        "Words are deleted and the text is tokenized again; the query stays. Comprehensiveness and "
        "sufficiency are means over 1, 5, 10, 20 and 50 % of the words, of the class predicted from the "
        "whole text, as in ERASER's code; its paper's equation would divide by 6. Ties are broken at random.",
        "AUPRC is the trapezoidal area, as published, which flatters equal scores: a constant scorer gets "
        f"{(1 + data['shares']['test']) / 2:.2f} here. Average precision does not. LIME gives most words 0. "
        f"F1s are of the {100 * data['shares']['train']:.1f} % of the words with the highest scores, the "
        "training rationales' share. Each model has its own range of comprehensiveness; the normalised form "
        "is not given, these texts being too long for it.",
        "Raw, rollout and flow are what the first token of each window draws on in the last layer; a "
        "window's weights are scaled by the number of its words. The LSTM reads the states of words, not "
        "that of the first token, so that the class does not depend on what this token draws on there. A "
        "word's score is the sum over its pieces. "
        f"Blank-out and value zeroing: {min(config['some'], data['sizes']['test'])} of the texts, spread "
        f"evenly. LIME: {config['lime_samples']:,} samples, negative weights cut to 0.",
        "Published: BERT-base on movie reviews. EA-attention is not defined in the paper (ERASER's attention "
        "pools, and is no map): it stands beside evolving minus plain pooling attention for want of anything "
        "closer. Table 8 is the columns of LIME, except for e-SNLI's plain row, which repeats that of "
        "EA-attention, a misprint.",
    ]
    moved = [
        numbers["half_difference"]
        for rows in outcome.per_seed.values()
        for numbers in rows.values()
        if numbers.get("half")
    ]
    if moved:
        notes.append(
            "On a GPU, the encoder reads texts with deleted or blanked-out words with float16 products: "
            f"probabilities from whole test texts differ by at most {max(moved):.1g} from those in float32. "
            "Gradients and maps are read with TF32 products."
        )
    if refused:
        told = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        notes.append(f"–: the method does not apply, and is in no comparison ({told}).")
    return [*notes, *notes_on_runs(outcome)]


def report_table_8(outcome: Outcome) -> Report:
    """Table 8, with all methods."""
    grids = [performance_grid(outcome), measures_grid(outcome), *paired_grids(outcome)]
    return report_of(grids, notes_of(outcome))


TABLE_8 = Recipe(
    name="ea-table-8",
    title="Rationales of plain and evolving attention",
    paper="Wang et al. 2021, Evolving Attention with Residual Convolutions, Table 8, and appendix, Table 3",
    published={"columns": list(KEYS), "rows": PUBLISHED},
    run=run_table_8,
    report=report_table_8,
    seeds=5,
    folder="rationales",
    options=OPTIONS,
)
