"""Tables 1 and 2 of Abnar & Zuidema 2020: does attention rank words as blank-out and gradients do?

The network of the paper's section 2 learns a verb's number from the words before it, with plain, evolving,
Bayesian and combined attention; then raw attention, rollout and flow of the CLS row are held against the two
importances. Both tables are measured on the same models, so that the second costs no training.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import overt
from overt import _check
from overt._extras import need
from overt._files import write_whole
from overt.data import linzen
from overt.data.batching import batches
from overt.judge import holm, randomised
from overt.mechanisms.mechanism import Mechanism
from overt.models.agreement import AgreementClassifier
from overt.recipes import flow_measure
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell, kept, once
from overt.recipes._training import (
    hardware,
    hits,
    predict,
    save_weights,
    share,
    torch_device,
    train_classifier,
)
from overt.recipes.flow_measure import (
    INTERVALS,
    METHODS,
    REFERENCES,
    classifier_batches,
    comparable,
    compared,
    correlated,
    layers,
    ranked,
    sentences_note,
)
from overt.recipes.forms import FORMS

# The network is the paper's; how it was trained the paper does not say.
LAYERS, HEADS, WIDTH = 6, 8, 128
DROPOUT = 0.1
STEPS = 2_500
BATCH = 128
LEARNING_RATE = 1e-3
WARMUP = 200  # steps, then a cosine to zero
CHECKPOINTS = 8  # per model
EXAMPLES = 2_000  # as in the paper
TRACED = 64  # examples at once
SHUFFLED = 128  # examples that the weight-randomisation check is made on
LEVEL = 0.05  # p below it counts

ACCURACY = 0.96  # section 2
Published = dict[str, list[tuple[float, float] | None]]
PUBLISHED: dict[str, Published] = {  # mean and standard deviation over 2000 examples, L1 … L6
    "blankout": {
        "raw": [(0.69, 0.27), (0.10, 0.43), (-0.11, 0.49), (-0.09, 0.52), (0.20, 0.45), (0.29, 0.39)],
        "rollout": [(0.32, 0.26), (0.38, 0.27), (0.51, 0.26), (0.62, 0.26), (0.70, 0.25), (0.71, 0.24)],
        "flow": [(0.32, 0.26), (0.44, 0.29), (0.70, 0.25), (0.70, 0.22), (0.71, 0.22), (0.70, 0.22)],
    },
    "gradients": {
        "raw": [(0.53, 0.33), (0.16, 0.38), (-0.06, 0.42), (0.00, 0.47), (0.24, 0.40), (0.46, 0.35)],
        "rollout": [(0.22, 0.31), (0.27, 0.32), (0.39, 0.32), (0.47, 0.32), (0.53, 0.32), (0.54, 0.31)],
        "flow": [(0.22, 0.31), (0.31, 0.34), (0.54, 0.32), (0.61, 0.28), (0.60, 0.28), (0.61, 0.28)],
    },
}


def run(request: Request) -> Outcome:
    """Train what is not trained, and measure what is not measured, for both references."""
    need("accelerate", "train")
    forms = _forms(request.options["forms"])
    steps, examples, part = (request.options[name] for name in ("steps", "examples", "part"))
    _check.one_of("--part", part, ("test", "natural"))
    per_seed: dict[int, dict[str, Any]] = {}
    first = linzen.load(request.data)
    described = first.describe()
    if part == "natural" and not first.natural:
        raise ValueError("--part natural needs numpred.val split anew: these data have no such part")
    request.console.print(
        f"{first.name}: {len(first.train):,} prefixes to learn from, {len(first.test):,} to test on, "
        f"{len(first.vocabulary):,} words"
    )
    settings = {
        "version": overt.__version__,
        "steps": steps,
        "batch": BATCH,
        "learning_rate": LEARNING_RATE,
        "warmup": WARMUP,
        "dropout": DROPOUT,
        "shape": [LAYERS, HEADS, WIDTH],
        "data": described["sha256"],
    }
    for seed in range(request.seeds):
        per_seed[seed] = {
            form: _form(request, form, seed, first, settings | {"seed": seed}, examples) for form in forms
        }
    config = settings | {
        "data": described,
        "forms": {form: repr(FORMS[form]) for form in forms},
        "examples": min(examples, len(first.test)),
        "part": request.options["part"],
        "shuffled": SHUFFLED,
        "trained_on": sorted({row["hardware"] for rows in per_seed.values() for row in rows.values()}),
    }
    return Outcome(config, per_seed, stand_in=described["name"].startswith("no data"))


def _forms(text: str | None) -> list[str]:
    """Forms by name, separated by commas; all of them for None."""
    forms = list(FORMS) if text is None else text.split(",")
    for form in forms:
        if form not in FORMS:
            raise ValueError(f"--forms must be names out of {', '.join(FORMS)}, with commas, got {form!r}")
    return forms


def _form(
    request: Request,
    form: str,
    seed: int,
    corpus: linzen.Corpus,
    settings: dict[str, Any],
    examples: int,
) -> dict[str, Any]:
    """The numbers of one form and seed, from its folder where it has been there before."""
    folder, name = request.out / form / f"seed-{seed}", f"{form}, seed {seed}"
    row = kept(folder, settings | {"mechanisms": repr(FORMS[form])}, request.fresh)
    if row is None:
        row = _train(request, folder, name, FORMS[form], corpus, settings)
    else:
        request.console.print(f"[dim]{name}: trained before, kept in {folder}[/dim]")
    part = request.options["part"]
    tested = (corpus.test if part == "test" else corpus.natural)[:examples]
    measure = partial(_measured, request, folder, name, corpus, tested)
    return {**row, "spearman": once(folder / f"correlations-{part}-{examples}.json", measure)}


def _network(corpus: linzen.Corpus, mechanisms: tuple[Mechanism, ...]) -> AgreementClassifier:
    return AgreementClassifier(
        len(corpus.vocabulary), mechanisms, LAYERS, HEADS, WIDTH, linzen.LONGEST + 1, dropout=DROPOUT
    )


def trained(folder: Path, corpus: linzen.Corpus) -> AgreementClassifier:
    """The model that a run left in `form`/seed-n, in evaluation mode."""
    from safetensors.torch import load_file

    weights = folder / "model.safetensors"
    if folder.parent.name not in FORMS or not weights.exists():
        raise FileNotFoundError(f"no model in {folder}: run `overt reproduce flow-table-1` first")
    model = _network(corpus, FORMS[folder.parent.name])
    model.load_state_dict(load_file(weights))
    return model.eval()


def _train(
    request: Request,
    folder: Path,
    name: str,
    mechanisms: tuple[Mechanism, ...],
    corpus: linzen.Corpus,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Train and test one network, and keep it."""
    from transformers import set_seed

    set_seed(settings["seed"])
    model = _network(corpus, mechanisms)
    row = train_classifier(
        model,
        folder,
        corpus.train,
        corpus.collate,
        batch=BATCH,
        seed=settings["seed"],
        steps=settings["steps"],
        checkpoints=CHECKPOINTS,
        console=request.console,
        name=name,
        device=request.device,
        learning_rate=LEARNING_RATE,
        warmup_steps=min(WARMUP, settings["steps"] // 2),
    )
    model.to(torch_device(request.device))

    def accuracy(part: list[linzen.Prefix]) -> float:
        return share(hits(predict(model, part, corpus.collate, batch=256), part))

    row["hardware"] = hardware(request.device)
    row["validation"], row["test"] = accuracy(corpus.validation), accuracy(corpus.test)
    row["natural"] = accuracy(corpus.natural) if corpus.natural else None
    row["by_attractors"] = {str(n): accuracy(part) for n, part in corpus.by_attractors.items()}
    save_weights(model.cpu(), folder)
    write_whole(folder / "result.json", json.dumps(row, indent=1))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    request.console.print(f"{name}: accuracy {row['validation']:.3f} validation, {row['test']:.3f} test")
    return row


def _measured(
    request: Request,
    folder: Path,
    name: str,
    corpus: linzen.Corpus,
    tested: list[linzen.Prefix],
) -> dict[str, Any]:
    """Correlations with both references, and what is left of the rows when weights are shuffled."""
    model = trained(folder, corpus).to(torch_device(request.device))
    found = batches(tested, TRACED, seed=0)
    ready = classifier_batches(found, corpus.collate)
    measured = correlated(model, ready, request.console, name, unk=linzen.UNK)
    [(inputs, _)] = classifier_batches([list(enumerate(tested[:SHUFFLED]))], corpus.collate)
    sanity = randomised(model, inputs, methods=METHODS)
    left: dict[str, Any] = {method: values.tolist() for method, values in sanity.common.items()}
    return {**measured, "randomised": left | {"n": sanity.shared.tolist()}}


def tell(outcome: Outcome, reference: str) -> Report:
    """Published beside measured for one reference; the other forms; accuracies."""
    forms = list(outcome.config["forms"])
    grids = []
    if "plain" in forms:
        ours, between = (numbers["plain"]["spearman"] for numbers in (outcome.mean, outcome.spread))
        with_cls = ours.get("with_cls")
        grids.append(
            compared(
                f"Plain attention, Spearman correlation with {REFERENCES[reference]}, mean±sd over sentences",
                layers(LAYERS),
                PUBLISHED[reference],
                comparable(ours)[reference],
                comparable(between)[reference],
                comparable(with_cls)[reference] if with_cls else None,
                ranked(_seeds(outcome, "plain"), reference),
            )
        )
    measured = _seeds(outcome, forms[0])[0]  # not always the absolute one
    against = [reference, "blankout-absolute"] if reference == "blankout" else [reference]
    grids += [_every_form(outcome, forms, one) for one in against if one in measured]
    grids += [_randomised(outcome, forms), _accuracies(outcome, forms)]
    return Report(grids, _notes(outcome, forms, reference))


def _seeds(outcome: Outcome, form: str) -> list[dict[str, Any]]:
    """The correlations of a form, seed by seed."""
    return [numbers[form]["spearman"] for numbers in outcome.per_seed.values()]


def _every_form(outcome: Outcome, forms: list[str], reference: str) -> Grid:
    rows = []
    for form in forms:
        for method in METHODS:
            means, spreads = (
                comparable(numbers[form]["spearman"])[reference][method]["mean"]
                for numbers in (outcome.mean, outcome.spread)
            )
            rows.append((f"{form}, {method}", [cell(*pair) for pair in zip(means, spreads, strict=True)]))
    title = f"Every form, Spearman correlation with {REFERENCES[reference]}, mean±sd of the seeds"
    return Grid(title, layers(LAYERS), rows)


def _randomised(outcome: Outcome, forms: list[str]) -> Grid:
    rows = []
    for form in forms:
        for method in METHODS:
            left = [
                numbers[form]["spearman"]["randomised"][method] for numbers in (outcome.mean, outcome.spread)
            ]
            rows.append((f"{form}, {method}", [cell(*pair) for pair in zip(*left, strict=True)]))
    shuffled = [f"{layer} up" for layer in reversed(layers(LAYERS))]
    title = (
        f"Weight randomisation, {_shuffled(outcome)} sentences: what is left of the last layer's CLS row "
        "(Spearman), mean±sd of the seeds, weights shuffled from"
    )
    return Grid(title, [*shuffled, "everything"], rows)


def _shuffled(outcome: Outcome) -> int:
    """How many sentences the weight-randomisation check is made on."""
    count = _seeds(outcome, next(iter(outcome.config["forms"])))[0]["count"]
    return min(int(count), int(outcome.config.get("shuffled", SHUFFLED)))


def _accuracies(outcome: Outcome, forms: list[str]) -> Grid:
    """Accuracy of every form on every part, with how many sentences each part has."""
    counts, sizes = list(outcome.mean[forms[0]]["by_attractors"]), linzen.sizes(outcome.config["data"])
    rows: list[tuple[str, list[str]]] = [
        ("published (plain)", ["–", cell(ACCURACY), cell(ACCURACY), *["–"] * len(counts)])
    ]
    for form in forms:
        ours, between = outcome.mean[form], outcome.spread[form]
        pairs = [(ours[part], between[part]) for part in ("validation", "test", "natural")]
        pairs += [(ours["by_attractors"][n], between["by_attractors"][n]) for n in counts]
        rows.append((f"{form}, measured", [cell(*pair, digits=3) for pair in pairs]))
    heads = {"validation": "validation", "test": "test", "natural": "natural mix"}
    heads |= {n: f"{n} attractor{'s' if n != '1' else ''}" for n in counts}
    columns = [f"{head} (n = {sizes[part]:,})" if part in sizes else head for part, head in heads.items()]
    return Grid("Accuracy, mean±sd of the seeds", columns, rows)


def _notes(outcome: Outcome, forms: list[str], reference: str) -> list[str]:
    """What a reader must know, some of it found in the numbers."""
    data, seeds, shuffled = outcome.config["data"], len(outcome.per_seed), _shuffled(outcome)
    correlations = {form: _seeds(outcome, form) for form in forms}
    between = (
        "Its rows “sd of the seeds” are of the means of the trained models; in all other tables ± is the "
        f"standard deviation of the {seeds} seeds. "
        if seeds > 1
        else ""
    )
    notes = [
        f"Data: {data['name']}; {data['split']}. {data['shortened']} prefixes were shortened "
        f"to {data['longest']} words.",
        "± in the first table, published and measured, is the standard deviation over sentences, the "
        f"measured one averaged over the seeds. {between}{INTERVALS}",
        sentences_note(correlations, reference),
        f"Weight randomisation: the first {shuffled} sentences{_left(correlations, shuffled)}, each trained "
        "model shuffled once; all tokens are ranked, CLS too. Elsewhere the CLS token is not ranked unless a "
        "row says so.",
    ]
    if seeds > 1 and "plain" in forms and len(forms) > 1:
        notes += _forms_note(correlations, reference)
    if reference == "blankout" and "blankout-absolute" not in correlations[forms[0]][0]:
        notes.append("This run was made before the recipe measured absolute blank-out as well.")
    return notes


def _left(correlations: dict[str, list[dict[str, Any]]], shuffled: int) -> str:
    """How many sentences of the weight-randomisation check count for every method, where not all do."""
    counted = [
        count
        for seeds in correlations.values()
        for numbers in seeds
        for count in numbers["randomised"].get("n", [])
    ]
    least = int(min(counted, default=shuffled))
    return "" if least == shuffled else f" (at least {least} of them ranked by all methods)"


def _forms_note(correlations: dict[str, list[dict[str, Any]]], reference: str) -> list[str]:
    """The other forms against plain attention at the last layer, all comparisons together, in a note."""
    from scipy.stats import ttest_ind  # type: ignore[import-untyped, unused-ignore]

    last = {
        (form, method): [comparable(seed)[reference][method]["mean"][-1] for seed in seeds]
        for form, seeds in correlations.items()
        for method in METHODS
    }
    if any(mean is None or len(set(means)) == 1 for means in last.values() for mean in means):
        return []  # so few sentences that none is ranked, or that seeds do not differ
    p_values = {
        (form, method): float(ttest_ind(means, last["plain", method], equal_var=False).pvalue)
        for (form, method), means in last.items()
        if form != "plain"
    }
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    others = len(correlations) - 1
    form, method = least = min(p_values, key=lambda place: p_values[place])
    return [
        f"Other forms against plain attention at L{LAYERS}: {len(p_values)} comparisons ({others} "
        f"form{'s' if others > 1 else ''} × {len(METHODS)} methods), Welch's t-test over the seeds. "
        f"The least p is {p_values[least]:.3f} ({form}, {method}), by Holm {corrected[least]:.2f}; "
        f"{sum(p < LEVEL for p in corrected.values()) or 'none'} of them below {LEVEL:g} by Holm."
    ]


def _recipe(number: int, reference: str) -> Recipe:
    return Recipe(
        name=f"flow-table-{number}",
        title=f"Attention against {REFERENCES[reference]}, verb number prediction",
        paper=f"{flow_measure.PAPER}, Table {number}",
        published={"spearman": PUBLISHED[reference], "accuracy": ACCURACY},
        run=run,
        tell=partial(tell, reference=reference),
        seeds=3,
        folder="flow-agreement",
        options={
            "examples": Option("test examples to correlate on", EXAMPLES, least=2),
            "steps": Option("training steps per model", STEPS, least=1),
            "part": Option("test, or natural: its sentences of the natural mix alone", "test", names=True),
            "forms": Option(f"some of {','.join(FORMS)}; all by default"),
        },
    )


TABLE_1 = _recipe(1, "blankout")
TABLE_2 = _recipe(2, "gradients")
