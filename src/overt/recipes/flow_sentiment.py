"""Table 3 of Abnar & Zuidema 2020: attention against input gradients in a BERT fine-tuned on SST-2.

The paper's model is DistilBERT; any encoder can be used instead, and the result says which.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from overt._extras import need
from overt.data import sst2
from overt.recipes import fine_tuning, flow_definitions, flow_measure
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell
from overt.recipes._runs import check_model, earlier_result, measure_once
from overt.recipes._training import torch_device
from overt.recipes.flow_measure import (
    INTERVALS,
    METHODS,
    Batch,
    common_numbers,
    comparison_grid,
    correlate,
    count_rows,
    layer_names,
    sentences_note,
)

STEPS = 2_100  # with fine_tuning.BATCH sentences each: about one epoch of SST-2
LEARNING_RATE = 5e-5
FEW = 100  # dev sentences; the paper used as many of the test set, whose labels are not public
RELEASED = 101  # sentences of the released measure, as in the authors' logs
TRACED = 32  # sentences per batch

MEASURES = (
    "Which definition gives which number: ours ranks words by the norm of the gradient of p(right class), "
    "against the CLS row. The script whose logs match the published numbers ranks all tokens, special ones "
    "too, by abs(Σ_d g), where g is the gradient of the sum of both logits at the embeddings after their "
    "LayerNorm, against the maximum over all queries, with dense ranks."
)
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {  # mean and standard deviation over 100 sentences
    "raw": {"L1": (0.12, 0.21), "L3": (0.09, 0.21), "L5": (0.08, 0.20), "L6": (0.09, 0.21)},
    "rollout": {"L1": (0.11, 0.19), "L3": (0.12, 0.21), "L5": (0.13, 0.21), "L6": (0.13, 0.20)},
    "flow": {"L1": (0.11, 0.19), "L3": (0.11, 0.21), "L5": (0.12, 0.22), "L6": (0.14, 0.21)},
}


def run(request: Request) -> Outcome:
    """Fine-tune once per seed, and measure on a hundred and on all dev sentences."""
    need("accelerate", "train")
    if request.model is None:
        raise ValueError(
            "flow-table-3 fine-tunes a pretrained BERT: give --model, a folder or a name on the hub"
        )
    check_model(request.model)
    train, test, what = sst2.load_rows(request.data, seed=0)
    steps = request.options["steps"]
    if steps is None:
        steps = STEPS if what == sst2.SST2 else fine_tuning.FEW_STEPS
    order = list(range(len(test)))
    Random(0).shuffle(order)
    parts = {"few": order[: request.options["examples"]], "all": order}
    per_seed = {}
    for seed in range(request.seeds):
        folder, name = request.out / f"seed-{seed}", f"seed {seed}"
        settings = fine_tuning.settings_of(request.model, seed, steps, LEARNING_RATE, train, test)
        row = earlier_result(folder, settings, request.fresh)
        if row is None:
            row = fine_tuning.fine_tune(
                request.console, folder, request.model, (), train, test, settings, request.device
            )
        else:
            request.console.print(f"[dim]{name}: already fine-tuned, results in {folder}[/dim]")
        rows = {part: [test[place] for place in places] for part, places in parts.items()}
        file = folder / f"correlations-{len(rows['few'])}.json"
        measure = partial(_measure, request, folder, name, rows)
        per_seed[seed] = {**row, "spearman": measure_once(file, measure)}
        released = [test[place] for place in order[:RELEASED]]
        again = partial(_measure_as_released, request, folder, name, released)
        per_seed[seed]["as_released"] = measure_once(folder / f"as-released-{len(released)}.json", again)
    kind, count = _kind(request.out / "seed-0" / "model")
    config = {
        "model": Path(request.model).name,
        "kind": kind,
        "layers": count,
        "steps": steps,
        "batch": fine_tuning.BATCH,
        "learning_rate": LEARNING_RATE,
        "warmup": fine_tuning.WARMUP,
        "data": what,
        "trained_on": sorted({row["hardware"] for row in per_seed.values()}),
        "sentences": {
            "train": len(train),
            "dev": len(test),
            "few": len(parts["few"]),
            "as_released": min(RELEASED, len(test)),
        },
    }
    return Outcome(config, per_seed, stand_in=what != sst2.SST2)


def _kind(folder: Path) -> tuple[str, int]:
    """A model's class and number of layers, from its config."""
    config = json.loads((folder / "config.json").read_text())
    count = config.get("num_hidden_layers", config.get("n_layers"))
    return f"{config['architectures'][0]}, {count} layers", count


def _measure(request: Request, folder: Path, name: str, parts: dict[str, sst2.Rows]) -> dict[str, Any]:
    """Correlations with input gradients on each part."""
    model, tokenizer = _load(folder)
    return {
        part: correlate(
            model,
            _batches(rows, tokenizer),
            request.console,
            f"{name}, {len(rows)} sentences",
            ["gradients"],
            tokenizer=tokenizer,
            device=torch_device(request.device),
        )
        for part, rows in parts.items()
    }


def _measure_as_released(request: Request, folder: Path, name: str, rows: sst2.Rows) -> dict[str, Any]:
    """Correlations by the measure of the released script; empty if the model does not allow it."""
    model, tokenizer = _load(folder)
    model.eval().to(torch_device(request.device))
    ready = _batches(rows, tokenizer)
    return flow_definitions.measure_as_released(model, ready, request.console, name) or {}


def _load(folder: Path) -> tuple[Any, Any]:
    """A fine-tuned model and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder / "model")
    return model, AutoTokenizer.from_pretrained(folder / "model")


def _batches(rows: sst2.Rows, tokenizer: Any) -> list[Batch]:
    """Padded batches of sentences of similar length."""
    import torch

    near = sorted(rows, key=lambda row: len(row[0]))
    ready = []
    for start in range(0, len(near), TRACED):
        batch = near[start : start + TRACED]
        texts = [sentence for sentence, _ in batch]
        codes = tokenizer(
            texts, padding=True, truncation=True, max_length=fine_tuning.LONGEST, return_tensors="pt"
        )
        ready.append((dict(codes), torch.tensor([label for _, label in batch])))
    return ready


def report(outcome: Outcome) -> Report:
    """Published and measured numbers, on few and on all sentences, and the accuracy."""
    grids, config = [], outcome.config
    for part in ("few", "all"):
        ours, between = (numbers["spearman"][part] for numbers in (outcome.mean, outcome.spread))
        columns, with_cls = layer_names(len(ours["gradients"]["raw"]["mean"])), ours.get("with_cls")
        grids.append(
            comparison_grid(
                f"Spearman correlation with input gradients, mean±sd over {int(ours['count'])} sentences",
                columns,
                {method: [PUBLISHED[method].get(layer) for layer in columns] for method in METHODS},
                common_numbers(ours)["gradients"],
                common_numbers(between)["gradients"],
                common_numbers(with_cls)["gradients"] if with_cls else None,
                count_rows([numbers["spearman"][part] for numbers in outcome.per_seed.values()], "gradients"),
            )
        )
    measures = _measures_grid(outcome)
    grids += [] if measures is None else [measures]
    accuracy = [cell(outcome.mean["accuracy"], outcome.spread["accuracy"], digits=3)]
    sentences = config["sentences"]
    title = f"Accuracy on dev, {sentences['dev']} sentences, mean±sd over seeds"
    grids.append(Grid(title, ["dev"], [("measured", accuracy)]))
    notes = [
        f"The model is {config['model']} ({config['kind']}) instead of the paper's DistilBERT; data: "
        f"{config['data']}.",
        f"Measured on {sentences['few']} dev sentences (in the paper, {FEW} of the test set) and on all "
        f"{sentences['dev']}. The reference is the norm of the gradient of p(right class) at each embedding.",
        "± is the standard deviation over sentences, published and measured; the measured one is averaged "
        "over the seeds. The rows “sd over seeds” are the standard deviations of the means of the "
        f"{len(outcome.per_seed)} fine-tuned models, which start from the same pretrained weights. "
        f"{INTERVALS}",
        sentences_note({"": [seed["spearman"]["all"] for seed in outcome.per_seed.values()]}, "gradients"),
    ]
    if measures is None:
        notes.insert(0, "This run was made before the recipe measured as the released script does, too.")
    else:
        notes.insert(0, MEASURES)
    return Report(grids, notes)


def _measures_grid(outcome: Outcome) -> Grid | None:
    """The released measure beside ours, at all layers; None if it was not measured."""
    ours, between = outcome.mean, outcome.spread
    if not ours.get("as_released"):
        return None
    columns = layer_names(len(ours["as_released"]["raw"]["mean"]))
    rows = []
    for method in METHODS:
        pairs = [PUBLISHED[method].get(layer) for layer in columns]
        rows.append((f"{method}, published", [cell(pair[0]) if pair else "–" for pair in pairs]))
        for name, mean, spread in (
            ("released measure", ours["as_released"], between["as_released"]),
            (
                "ours",
                common_numbers(ours["spearman"]["few"])["gradients"],
                common_numbers(between["spearman"]["few"])["gradients"],
            ),
        ):
            cells = zip(mean[method]["mean"], spread[method]["mean"], strict=True)
            rows.append((f"{method}, {name}", [cell(*pair) for pair in cells]))
    sentences = outcome.config["sentences"]
    title = (
        f"The released measure on {sentences['as_released']} sentences beside ours on {sentences['few']}, "
        "Spearman correlation, mean±sd over seeds"
    )
    return Grid(title, columns, rows)


TABLE_3 = Recipe(
    name="flow-table-3",
    title="Attention against input gradients, sentiment",
    paper=f"{flow_measure.PAPER}, Table 3",
    published={"spearman": PUBLISHED},
    run=run,
    report=report,
    seeds=3,
    folder="flow-sentiment",
    options={
        "examples": Option("number of dev sentences of the smaller measurement", FEW, least=2),
        "steps": Option(f"number of training steps; {STEPS} on SST-2 by default", least=1),
    },
)
