"""Tables 1 and 2 of Abnar & Zuidema 2020: does attention rank words as blank-out and gradients do?

The network of the paper's section 2 learns to predict a verb's number from the words before it, with plain,
evolving, Bayesian and combined attention, and once more with the dropout and the `<eos>` of the authors' own
network. Then raw attention, rollout and flow of the CLS row are compared with both importances, by several
definitions (`flow_definitions`). The two tables use the same models, so the second needs no training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import overt
from overt import _check
from overt._extras import need
from overt._workers import Tell, cores, side_by_side
from overt.data import linzen
from overt.data.batching import batches
from overt.judge import holm, randomised
from overt.mechanisms.mechanism import Mechanism
from overt.models.agreement import AgreementClassifier
from overt.models.folders import WEIGHTS, load_weights, save_weights
from overt.recipes import flow_definitions, flow_measure
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell
from overt.recipes._runs import earlier_result, finish_run, measure_once
from overt.recipes._training import (
    hardware,
    hits,
    one_thread,
    predict,
    processes,
    progress_bar,
    share,
    torch_device,
    train_classifier,
)
from overt.recipes.flow_measure import (
    INTERVALS,
    METHODS,
    REFERENCES,
    classifier_batches,
    common_numbers,
    comparison_grid,
    correlate,
    count_rows,
    layer_names,
    sentences_note,
)
from overt.recipes.forms import FORMS

# The network is the paper's. The paper does not say how it was trained; these settings are ours.
LAYERS, HEADS, WIDTH = 6, 8, 128
DROPOUT = 0.1
STEPS = 2_500
BATCH = 128
LEARNING_RATE = 1e-3
WARMUP = 200  # steps, then a cosine to zero
CHECKPOINTS = 8  # per model
EXAMPLES = 2_000  # as in the paper
TRACED = 64  # examples per batch
SHUFFLED = 128  # examples of the weight-randomisation check
LEVEL = 0.05  # of significance


@dataclass(frozen=True)
class Network:
    """A network that is trained for the tables.

    Attributes:
        mechanisms: of its attention.
        dropout: on block outputs.
        attention_dropout: on weights, if it differs.
        embedding_dropout: on embeddings, if it differs.
        ended: whether `<eos>` ends every sentence.
    """

    mechanisms: tuple[Mechanism, ...] = ()
    dropout: float = DROPOUT
    attention_dropout: float | None = None
    embedding_dropout: float | None = None
    ended: bool = False


REGULARISED = "regularised"
# As the authors' network, which was also distilled from an LSTM.
NETWORKS = {form: Network(mechanisms) for form, mechanisms in FORMS.items()} | {
    REGULARISED: Network(dropout=0.4, attention_dropout=0.6, embedding_dropout=0.2, ended=True)
}
DEFINED = {"plain": "ours", REGULARISED: REGULARISED}  # measured by every definition; names in its table

ACCURACY = 0.96  # section 2
DEFINITION_NOTES = {
    "blankout": (
        "Which definition gives which number: from left to right, one choice after another. Blank-out keeps "
        "its sign, and words alone are ranked, as in the first table; its absolute value, so that a word "
        "that speaks for the wrong number counts as important too; CLS is ranked as well; `<eos>` is blanked "
        "out and ranked like a word; the importance of `<eos>` is set to 0 by hand, and equal values share a "
        "rank without a gap after it. The last is how the published numbers came about. “Ours” is the "
        f"network of the first table, with dropout {DROPOUT:g} and no `<eos>`. “Regularised” has their "
        "dropout, 0.6 on weights, 0.4 on block outputs and 0.2 on embeddings, and reads [CLS] … `<eos>`; "
        "theirs was also distilled from an LSTM, which this one is not. A dash stands where a network has no "
        "`<eos>`, or was not measured so."
    ),
    "gradients": (
        "Which definition gives which number: g is the gradient of p(right answer) at a token's embedding. "
        "Its norm is ranked in the other tables; gradient × input keeps its sign. The published numbers "
        "rank the absolute value of the sum of g over the embedding's dimensions, of CLS and `<eos>` too: "
        "the last column but one. Every block begins with a LayerNorm, which ignores a shift of all "
        "dimensions by the same amount, so that this sum is zero in exact arithmetic: what was ranked is "
        "rounding error. One table shows how small it is beside the norm, and how far it follows it, as "
        "rounding error is larger where numbers are. “Ours” and “regularised” are the networks of Table 1; "
        "a dash stands where one has no `<eos>`, or was not measured so."
    ),
}
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
    """Make the trainings and measurements that are missing, for both references."""
    need("accelerate", "train")
    forms = _forms(request.options["forms"])
    steps, examples, part = (request.options[name] for name in ("steps", "examples", "part"))
    _check.one_of("--part", part, ("test", "natural"))
    per_seed: dict[int, dict[str, Any]] = {}
    corpus = linzen.load(request.data)
    description = corpus.describe()
    if part == "natural" and not corpus.natural:
        raise ValueError(
            "--part natural needs test prefixes from numpred.val, which these data lack: use --part test"
        )
    request.console.print(
        f"{corpus.name}: {len(corpus.train):,} prefixes for training, {len(corpus.test):,} for testing, "
        f"{len(corpus.vocabulary):,} words"
    )
    settings = settings_of(steps, description)
    tasks = [(form, seed) for seed in range(request.seeds) for form in forms]
    workers = request.options["workers"] or (
        min(8, cores()) if torch_device(request.device).type == "cuda" else 1
    )
    if min(workers, len(tasks)) > 1:
        request = _run_beside(request, tasks, Shared(request, corpus, settings), workers)
    for seed in range(request.seeds):
        per_seed[seed] = {
            form: _run_form(request, form, seed, corpus, settings | {"seed": seed}, examples)
            for form in forms
        }
    config = settings | {
        "data": description,
        "forms": {form: _describe(NETWORKS[form]) for form in forms},
        "examples": min(examples, len(corpus.test)),
        "part": request.options["part"],
        "shuffled": SHUFFLED,
        "trained_on": sorted({row["hardware"] for rows in per_seed.values() for row in rows.values()}),
    }
    return Outcome(config, per_seed, stand_in=description["name"].startswith("no data"))


class Shared(NamedTuple):
    """What networks that are trained side by side need."""

    request: Any
    corpus: linzen.Corpus
    settings: dict[str, Any]


def _run_beside(request: Request, tasks: list[tuple[str, int]], shared: Shared, workers: int) -> Request:
    """Train and measure networks in several processes; the returned request finds them in their folders."""
    if processes(request.device) > 1:
        raise ValueError(f"--workers {workers} starts its own processes: leave out accelerate launch")
    shared = shared._replace(request=replace(request, console=None, stored={}, elsewhere=()))  # type: ignore[arg-type]
    console = request.console
    with progress_bar(console) as progress:
        bar = progress.add_task("training and measuring", total=len(tasks))
        done = side_by_side(tasks, perform, shared, workers, one_thread)
        for count, ((form, seed), row) in enumerate(done, start=1):
            text = f"{form}, seed {seed}: accuracy {row['validation']:.3f} validation, {row['test']:.3f} test"
            progress.update(bar, description=text, advance=1)
            if not console.is_terminal:  # a log has no bar
                console.print(f"{text}, {count} of {len(tasks)}")
    return replace(request, fresh=False)


def perform(task: tuple[str, int], shared: Shared, tell: Tell) -> dict[str, Any]:
    """Train and measure one network, in a process of its own."""
    from rich.console import Console

    del tell
    form, seed = task
    request = replace(shared.request, console=Console(quiet=True))
    settings = shared.settings | {"seed": seed}
    return _run_form(request, form, seed, shared.corpus, settings, request.options["examples"])


def settings_of(steps: int, description: dict[str, Any]) -> dict[str, Any]:
    """What all trainings have in common.

    Args:
        steps: of training.
        description: of the data, from `Corpus.describe`.
    """
    return {
        "version": overt.__version__,
        "steps": steps,
        "batch": BATCH,
        "learning_rate": LEARNING_RATE,
        "warmup": WARMUP,
        "dropout": DROPOUT,
        "shape": [LAYERS, HEADS, WIDTH],
        "data": description["sha256"],
    }


def _forms(text: str | None) -> list[str]:
    """Names of forms from a comma-separated list; all forms for None."""
    forms = list(NETWORKS) if text is None else text.split(",")
    for form in forms:
        if form not in NETWORKS:
            raise ValueError(f"--forms must be a comma-separated list of {', '.join(NETWORKS)}; got {form!r}")
    return forms


def _describe(network: Network) -> str:
    """A network's mechanisms, or all its settings if it differs in others."""
    return repr(network.mechanisms if network == Network(network.mechanisms) else network)


def _run_form(
    request: Request,
    form: str,
    seed: int,
    corpus: linzen.Corpus,
    settings: dict[str, Any],
    examples: int,
) -> dict[str, Any]:
    """The numbers of one form and seed, from its folder if it has run before."""
    corpus = corpus_for(form, corpus)
    name = f"{form}, seed {seed}"
    folder, row = train_once(request, form, corpus, settings)
    part = request.options["part"]
    prefixes = (corpus.test if part == "test" else corpus.natural)[:examples]
    measure = partial(_measure, request, folder, name, corpus, prefixes)
    row["spearman"] = measure_once(folder / f"correlations-{part}-{examples}.json", measure)
    if form in DEFINED:
        define = partial(_define, request, folder, name, corpus, prefixes)
        row["definitions"] = measure_once(folder / f"definitions-{part}-{examples}.json", define)
    return row


def train_once(
    request: Request, form: str, corpus: linzen.Corpus, settings: dict[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Train one network, unless it has been trained before; its folder and its accuracies.

    Args:
        request: of the run.
        form: one of `NETWORKS`.
        corpus: ended if the network's sentences are.
        settings: from `settings_of`, and the seed.
    """
    seed, network = settings["seed"], NETWORKS[form]
    folder, name = request.out / form / f"seed-{seed}", f"{form}, seed {seed}"
    settings = settings | {"mechanisms": repr(network.mechanisms)}
    if network != Network(network.mechanisms):
        settings["network"] = {key: value for key, value in asdict(network).items() if key != "mechanisms"}
    row = earlier_result(folder, settings, request.fresh)
    if row is None:
        row = _train(request, folder, name, network, corpus, settings)
    else:
        request.console.print(f"[dim]{name}: already trained, results in {folder}[/dim]")
    return folder, row


def corpus_for(form: str, corpus: linzen.Corpus) -> linzen.Corpus:
    """The corpus as a network reads it: with or without a token that ends every sentence."""
    return replace(corpus, ended=NETWORKS[form].ended)


def build(corpus: linzen.Corpus, network: Network) -> AgreementClassifier:
    """An untrained network for a corpus."""
    return AgreementClassifier(
        len(corpus.vocabulary),
        network.mechanisms,
        LAYERS,
        HEADS,
        WIDTH,
        corpus.longest,
        dropout=network.dropout,
        attention_dropout=network.attention_dropout,
        embedding_dropout=network.embedding_dropout,
    )


def load_trained(folder: Path, corpus: linzen.Corpus) -> AgreementClassifier:
    """Load the model that a run wrote to `form`/seed-n, in evaluation mode."""
    if folder.parent.name not in NETWORKS or not (folder / WEIGHTS).exists():
        raise FileNotFoundError(f"no model in {folder}: run `overt reproduce flow-table-1` first")
    form = folder.parent.name
    return load_weights(build(corpus_for(form, corpus), NETWORKS[form]), folder)


def _train(
    request: Request,
    folder: Path,
    name: str,
    network: Network,
    corpus: linzen.Corpus,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Train, test and store one network."""
    from transformers import set_seed

    set_seed(settings["seed"])
    model = build(corpus, network)
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
    finish_run(folder, row)
    request.console.print(f"{name}: accuracy {row['validation']:.3f} validation, {row['test']:.3f} test")
    return row


def _measure(
    request: Request,
    folder: Path,
    name: str,
    corpus: linzen.Corpus,
    prefixes: list[linzen.Prefix],
) -> dict[str, Any]:
    """Correlations with both references, and what remains of the rows when weights are shuffled."""
    model = load_trained(folder, corpus).to(torch_device(request.device))
    ready = classifier_batches(batches(prefixes, TRACED, seed=0), corpus.collate)
    correlations = correlate(model, ready, request.console, name, unk=linzen.UNK, end=corpus.end)
    [(inputs, _)] = classifier_batches([list(enumerate(prefixes[:SHUFFLED]))], corpus.collate)
    sanity = randomised(model, inputs, methods=METHODS)
    remaining: dict[str, Any] = {method: values.tolist() for method, values in sanity.common.items()}
    return {**correlations, "randomised": remaining | {"n": sanity.shared.tolist()}}


def _define(
    request: Request, folder: Path, name: str, corpus: linzen.Corpus, prefixes: list[linzen.Prefix]
) -> dict[str, Any]:
    """Correlations by every definition of importance."""
    model = load_trained(folder, corpus).to(torch_device(request.device))
    ready = classifier_batches(batches(prefixes, TRACED, seed=0), corpus.collate)
    return flow_definitions.measure(model, ready, request.console, name, linzen.UNK, corpus.end)


def report(outcome: Outcome, reference: str) -> Report:
    """Published and measured numbers for one reference, the other forms, and accuracies."""
    every = list(outcome.config["forms"])
    forms = [form for form in every if form != REGULARISED]
    grids = []
    if "plain" in forms:
        ours, between = (numbers["plain"]["spearman"] for numbers in (outcome.mean, outcome.spread))
        with_cls = ours.get("with_cls")
        grids.append(
            comparison_grid(
                f"Plain attention, Spearman correlation with {REFERENCES[reference]}, mean±sd over sentences",
                layer_names(LAYERS),
                PUBLISHED[reference],
                common_numbers(ours)[reference],
                common_numbers(between)[reference],
                common_numbers(with_cls)[reference] if with_cls else None,
                count_rows(_seeds(outcome, "plain"), reference),
            )
        )
    measured = _seeds(outcome, every[0])[0]  # older results lack the absolute reference
    grids += _definition_grids(outcome, every, reference) if "blankout-absolute" in measured else []
    references = [reference, "blankout-absolute"] if reference == "blankout" else [reference]
    if forms:
        grids += [_forms_grid(outcome, forms, name) for name in references if name in measured]
    grids += [_randomisation_grid(outcome, every), _accuracy_grid(outcome, every)]
    return Report(grids, _notes(outcome, every, reference))


def _definition_grids(outcome: Outcome, every: Sequence[str], reference: str) -> list[Grid]:
    """Which definition of importance gives which number, at the first and the last layer, and all layers."""
    networks = {
        name: [_definitions(rows[form]) for rows in outcome.per_seed.values()]
        for form, name in DEFINED.items()
        if form in every
    }
    if not networks:
        return []
    definitions, published = flow_definitions.DEFINITIONS[reference], PUBLISHED[reference]
    title = (
        f"Which definition of importance gives which number: {REFERENCES[reference]}, Spearman correlation, "
        "mean±sd over seeds"
    )
    grids = [flow_definitions.grid(title, definitions, networks, published, (1, LAYERS))]
    sums = flow_definitions.sums_grid(networks)
    if reference == "gradients" and sums.rows:
        grids.append(sums)
    if REGULARISED in networks:
        grids.append(_as_published_grid(outcome, reference))
    return grids


def _as_published_grid(outcome: Outcome, reference: str) -> Grid:
    """All layers of the regularised network by the last definition, beside the published numbers."""
    key, definition = list(flow_definitions.DEFINITIONS[reference].items())[-1]
    means, spreads = (numbers[REGULARISED]["definitions"][key] for numbers in (outcome.mean, outcome.spread))
    rows = []
    for method, pairs in PUBLISHED[reference].items():
        ours = zip(means[method]["mean"], spreads[method]["mean"], strict=True)
        rows.append((f"{method}, published", [cell(*pair) if pair else "–" for pair in pairs]))
        rows.append((f"{method}, measured", [cell(*pair) for pair in ours]))
    title = (
        f"The {REGULARISED} network ({REFERENCES[reference]}: {definition.heading}) beside the published "
        "numbers; published ± over sentences, measured ± over seeds"
    )
    return Grid(title, layer_names(LAYERS), rows)


def _definitions(row: dict[str, Any]) -> dict[str, Any]:
    """A network's numbers by definition; of an older result, those that are in it by other names."""
    if "definitions" in row:
        found: dict[str, Any] = row["definitions"]
        return found
    words, with_cls = row["spearman"], row["spearman"].get("with_cls")
    found = {
        "signed": common_numbers(words)["blankout"],
        "absolute": common_numbers(words)["blankout-absolute"],
        "norm": common_numbers(words)["gradients"],
    }
    if with_cls:
        found["cls"] = common_numbers(with_cls)["blankout-absolute"]
        found["norm cls"] = common_numbers(with_cls)["gradients"]
    return found


def _seeds(outcome: Outcome, form: str) -> list[dict[str, Any]]:
    """The correlations of a form for each seed."""
    return [numbers[form]["spearman"] for numbers in outcome.per_seed.values()]


def _forms_grid(outcome: Outcome, forms: list[str], reference: str) -> Grid:
    rows = []
    for form in forms:
        for method in METHODS:
            means, spreads = (
                common_numbers(numbers[form]["spearman"])[reference][method]["mean"]
                for numbers in (outcome.mean, outcome.spread)
            )
            rows.append((f"{form}, {method}", [cell(*pair) for pair in zip(means, spreads, strict=True)]))
    title = f"All forms, Spearman correlation with {REFERENCES[reference]}, mean±sd over seeds"
    return Grid(title, layer_names(LAYERS), rows)


def _randomisation_grid(outcome: Outcome, forms: list[str]) -> Grid:
    rows = []
    for form in forms:
        for method in METHODS:
            remaining = [
                numbers[form]["spearman"]["randomised"][method] for numbers in (outcome.mean, outcome.spread)
            ]
            rows.append((f"{form}, {method}", [cell(*pair) for pair in zip(*remaining, strict=True)]))
    shuffled = [f"{layer} up" for layer in reversed(layer_names(LAYERS))]
    title = (
        f"Weight randomisation, {_shuffled_count(outcome)} sentences: what remains of the last layer's CLS "
        "row (Spearman correlation), mean±sd over seeds, with weights shuffled from"
    )
    return Grid(title, [*shuffled, "everything"], rows)


def _shuffled_count(outcome: Outcome) -> int:
    """Number of sentences of the weight-randomisation check."""
    count = _seeds(outcome, next(iter(outcome.config["forms"])))[0]["count"]
    return min(int(count), int(outcome.config.get("shuffled", SHUFFLED)))


def _accuracy_grid(outcome: Outcome, forms: list[str]) -> Grid:
    """Accuracy of every form on every part, with the number of sentences of each part."""
    counts, sizes = list(outcome.mean[forms[0]]["by_attractors"]), linzen.part_sizes(outcome.config["data"])
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
    return Grid("Accuracy, mean±sd over seeds", columns, rows)


def _notes(outcome: Outcome, forms: list[str], reference: str) -> list[str]:
    """What a reader needs to know, partly derived from the numbers."""
    data, seeds, shuffled = outcome.config["data"], len(outcome.per_seed), _shuffled_count(outcome)
    correlations = {form: _seeds(outcome, form) for form in forms}
    between = (
        "Its rows “sd over seeds” are the standard deviations of the trained models' means; in all other "
        f"tables ± is the standard deviation over the {seeds} seeds. "
        if seeds > 1
        else ""
    )
    notes = [
        f"Data: {data['name']}; {data['split']}. {data['shortened']} prefixes were shortened "
        f"to {data['longest']} words.",
        "In the first table ± is the standard deviation over sentences, published and measured; the measured "
        f"one is averaged over the seeds. {between}{INTERVALS}",
        sentences_note(correlations, reference),
        f"Weight randomisation uses the first {shuffled} sentences{_ranked_by_all(correlations, shuffled)}. "
        "Each trained model is shuffled once, and all tokens are ranked, including CLS. In the other tables "
        "the CLS token is ranked only where a row or a column says so.",
    ]
    compared = {form: each for form, each in correlations.items() if form != REGULARISED}
    if seeds > 1 and "plain" in compared and len(compared) > 1:
        notes += _forms_note(compared, reference)
    if "blankout-absolute" in correlations[forms[0]][0] and DEFINED.keys() & correlations.keys():
        notes.insert(0, DEFINITION_NOTES[reference])
        missing = [name for form, name in DEFINED.items() if not _is_defined(outcome, form, reference)]
        if missing:
            notes.insert(1, f"Not measured yet by all definitions: {' and '.join(missing)}.")
    if reference == "blankout" and "blankout-absolute" not in correlations[forms[0]][0]:
        notes.append("This run was made before the recipe measured absolute blank-out, too.")
    return notes


def _is_defined(outcome: Outcome, form: str, reference: str) -> bool:
    """Whether a network was measured by all definitions that it allows."""
    definitions, ended = flow_definitions.DEFINITIONS[reference], form == REGULARISED
    needed = {key for key, each in definitions.items() if ended or each.tokens != "end"}
    return all(
        form in rows and needed <= _definitions(rows[form]).keys() for rows in outcome.per_seed.values()
    )


def _ranked_by_all(correlations: dict[str, list[dict[str, Any]]], shuffled: int) -> str:
    """How many sentences of the weight-randomisation check all methods rank, if not all."""
    counts = [
        count
        for seeds in correlations.values()
        for numbers in seeds
        for count in numbers["randomised"].get("n", [])
    ]
    least = int(min(counts, default=shuffled))
    return "" if least == shuffled else f" (at least {least} of them ranked by all methods)"


def _forms_note(correlations: dict[str, list[dict[str, Any]]], reference: str) -> list[str]:
    """A note on the other forms against plain attention at the last layer, with Holm's correction."""
    from scipy.stats import ttest_ind  # type: ignore[import-untyped, unused-ignore]

    last = {
        (form, method): [common_numbers(seed)[reference][method]["mean"][-1] for seed in seeds]
        for form, seeds in correlations.items()
        for method in METHODS
    }
    if any(mean is None or len(set(means)) == 1 for means in last.values() for mean in means):
        return []  # too few sentences: none is ranked, or the seeds do not differ
    p_values = {
        (form, method): float(ttest_ind(means, last["plain", method], equal_var=False).pvalue)
        for (form, method), means in last.items()
        if form != "plain"
    }
    corrected = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    others = len(correlations) - 1
    form, method = smallest = min(p_values, key=lambda place: p_values[place])
    significant = sum(p < LEVEL for p in corrected.values())
    return [
        f"Other forms against plain attention at L{LAYERS}: {len(p_values)} comparisons ({others} "
        f"form{'s' if others > 1 else ''} × {len(METHODS)} methods), Welch's t-test over the seeds. "
        f"The smallest p is {p_values[smallest]:.3f} ({form}, {method}), by Holm {corrected[smallest]:.2f}; "
        f"{significant or 'none'} of them {'are' if significant > 1 else 'is'} below {LEVEL:g} by Holm."
    ]


def _recipe(number: int, reference: str) -> Recipe:
    return Recipe(
        name=f"flow-table-{number}",
        title=f"Attention against {REFERENCES[reference]}, verb number prediction",
        paper=f"{flow_measure.PAPER}, Table {number}",
        published={"spearman": PUBLISHED[reference], "accuracy": ACCURACY},
        run=run,
        report=partial(report, reference=reference),
        seeds=3,
        folder="flow-agreement",
        options={
            "examples": Option("number of test examples to correlate on", EXAMPLES, least=2),
            "steps": Option("number of training steps per model", STEPS, least=1),
            "part": Option("test, or natural: only test sentences of the natural mix", "test", names=True),
            "forms": Option(f"comma-separated list of {','.join(NETWORKS)}; all by default"),
            "workers": Option(
                "networks side by side, each on one thread; by default 8 on a GPU and 1, on all, on a CPU",
                least=1,
                moves=False,
            ),
        },
    )


TABLE_1 = _recipe(1, "blankout")
TABLE_2 = _recipe(2, "gradients")
