"""Tables 4 and 8 of Fan et al. 2020: an LSTM translator with soft, latent and Bayesian attention.

The network and all rivals are those of Deng et al. 2018 (`models.seq2seq`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch

from overt.data.pairs import Corpus
from overt.mechanisms.bayesian.config import Bayesian
from overt.models.seq2seq import Seq2Seq
from overt.recipes import translation_runs
from overt.recipes._recipe import Grid, Option, Outcome, Recipe, Report, Request, cell
from overt.recipes._row_reports import gains_grid, mean_cell, report_of, values
from overt.recipes._rows import rows_of
from overt.recipes._training import hardware, torch_device
from overt.recipes.lstm_training import LstmRow, LstmTraining, network, step_times, vocabularies
from overt.recipes.translation_reports import text_notes
from overt.recipes.translation_runs import run_rows
from overt.recipes.translation_training import encode, in_turns

# Appendix B: k = 5, β = 1e-6, ρ = 1 and d_mid = 5, the prior on the projected keys.
BAM = Bayesian.paper("WC", k=5.0, prior_beta=1e-6, rho=1.0, d_mid=5)
ROWS = {
    "soft": LstmRow("soft"),
    "marginal": LstmRow("marginal"),
    "hard enumerated": LstmRow("hard-enumerated"),
    "hard sampled": LstmRow("hard-sampled"),
    "variational relaxed": LstmRow("variational-relaxed"),
    "variational enumerated": LstmRow("variational-enumerated"),
    "variational sampled": LstmRow("variational-sampled"),
    "BAM-WC": LstmRow("soft", (BAM,)),
}
# IWSLT'14 De-En, test: perplexity, BLEU, and the entropy of the prior attention (Deng et al. 2018).
PUBLISHED: dict[str, tuple[float | None, float, float | None]] = {
    "soft": (7.17, 32.77, 1.24),
    "marginal": (6.34, 33.29, 0.82),
    "hard enumerated": (7.37, 31.40, 0.05),
    "hard sampled": (7.38, 31.00, 0.07),
    "variational relaxed": (7.58, 30.05, 2.02),
    "variational enumerated": (6.08, 33.68, 0.54),
    "variational sampled": (6.17, 33.30, 0.52),
    "BAM-WC": (None, 33.81, None),  # ± 0.02
}
# Table 8: seconds of a step at batch 6, and millions of parameters.
PUBLISHED_8 = {
    "variational enumerated": (0.12, 64),
    "variational sampled": (0.15, 64),
    "BAM-WC": (0.10, 42),
}
PUBLISHED_VOCABULARIES = 12_000, 9_000  # with which the networks have the sizes of Table 8
BATCHES = 6, 64
ROUNDS, TIMED = 5, 10  # rounds behind a median step time, and updates of each
STAND_IN = {"embedding": 32, "encoder": 32, "decoder": 48, "score": 32}
OPTIONS = {
    **translation_runs.OPTIONS,
    "batch": Option("pairs of a batch; the paper has 6", 64, least=1),
    "beam": Option("beams of the beam search", 10, least=1),
}


def plan(corpus: Corpus, options: Mapping[str, Any]) -> LstmTraining:
    """The settings of a training: the paper's at batch 6; a larger batch has a higher learning rate."""
    batch, per_epoch = options["batch"], -(-len(corpus.train) // options["batch"])
    updates = options["steps"] or (8 if corpus.stand_in else 12 if per_epoch < 2000 else 15) * per_epoch
    # The paper's 3e-4 is for batches of 6; Adam's rate goes with the square root of the batch.
    rate = round(3e-4 * (batch / 6) ** 0.5, 6)
    training = LstmTraining(updates, batch=batch, learning_rate=rate)
    return replace(training, learning_rate=3e-3, dropout=0.0) if corpus.stand_in else training


def small(row: LstmRow) -> LstmRow:
    """A row's network for the stand-in."""
    return replace(row, sizes=STAND_IN)


def run_table_4(request: Request) -> Outcome:
    """Train the network with each attention."""
    baselines = {row: "soft" for row in ROWS if row != "soft"}
    return run_rows(request, ROWS, list(ROWS), baselines, plan, small).outcome


def report_table_4(outcome: Outcome) -> Report:
    """Table 4, with Deng et al.'s perplexities and entropies."""
    columns = ["n", "perplexity", "BLEU", "BLEU 13a", "entropy of the prior", "million parameters"]
    columns += ["published perplexity", "published BLEU", "published entropy"]
    lines = []
    for row, (perplexity, bleu, entropy) in PUBLISHED.items():
        if not (scores := values(outcome, row, "bleu")):
            continue
        size = next(iter(values(outcome, row, "parameters").values())) / 1e6
        keys = ("perplexity", "bleu", "bleu_13a", "entropy")
        measured = [mean_cell(values(outcome, row, key)) for key in keys]
        lines.append(
            (row, [str(len(scores)), *measured, f"{size:.1f}", cell(perplexity), cell(bleu), cell(entropy)])
        )
    data = outcome.config["data"]
    grid = Grid(f"Measured, {data['name']} {data['direction']}; published, IWSLT'14 De-En", columns, lines)
    published = {row: numbers[1] for row, numbers in PUBLISHED.items()}
    baselines = {row: "soft" for row in ROWS if row != "soft"}
    gains = gains_grid(outcome, baselines, {"published": published}, "bleu", "BLEU")
    training = outcome.config["training"]
    notes = [
        f"Training: {training['updates']:,} updates at most of {training['batch']} pairs, Adam, learning "
        f"rate {training['learning_rate']:g}, halved after epochs without a lower validation loss, dropout "
        f"{training['dropout']:g}, gradients clipped at {training['clip']:g}, the best epoch's weights; beam "
        f"{outcome.config['beam']} with length penalty 1. Relaxed attention trains on Jensen's bound for the "
        f"first {100 * training['pretraining']:.0f} % of the updates, which the released code does not do.",
        "Perplexity and translations of latent attention sum over all source positions under the prior; "
        "BAM-WC's use the mean of its weights, and relaxed attention's one draw. The published "
        "perplexities and entropies are Deng et al.'s.",
        *text_notes(outcome),
    ]
    return report_of([grid, gains], notes)


def run_table_8(request: Request) -> Outcome:
    """Count the parameters and time a step of each attention, with nothing else running."""
    seeds = request.seeds
    if seeds != 1:
        raise ValueError(f"--seeds must be 1 for bam-table-8, which trains nothing; got {seeds}")
    corpus = translation_runs.corpus_of(request)
    tokenizer, vocabulary = translation_runs.tokenizer_of(corpus, request.options["codes"])
    device = torch_device(request.device).type
    names = rows_of(request.options["rows"], ROWS, list(ROWS))
    numbers: dict[str, Any] = {}
    for name in names:
        with torch.device("meta"):
            model = Seq2Seq(*PUBLISHED_VOCABULARIES, ROWS[name].attention, ROWS[name].mechanisms)  # type: ignore[arg-type]
        numbers[name] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    for batch in BATCHES:
        training = plan(corpus, {**request.options, "batch": batch})
        data = encode(corpus, tokenizer, training.longest)
        request.console.print(f"[dim]batch {batch}: {ROUNDS} rounds of {TIMED} updates of each row[/dim]")
        forms = {}
        for name in names:
            row = small(ROWS[name]) if corpus.stand_in else ROWS[name]
            model = network(row, vocabularies(data), training.dropout, 0)
            forms[name] = partial(step_times, data, row, training, device, TIMED, model)
        for name, times in in_turns(forms, ROUNDS).items():
            numbers[name][f"ms at batch {batch}"] = statistics.median(chain(*times))
    config = {"data": corpus.describe(), "vocabulary": vocabulary, "timed_on": hardware(request.device)}
    return Outcome(config, {0: numbers}, corpus.stand_in)


def report_table_8(outcome: Outcome) -> Report:
    """Table 8."""
    lines = []
    for row, entry in outcome.per_seed[0].items():
        seconds, millions = PUBLISHED_8.get(row, (None, None))
        times = [f"{entry[f'ms at batch {batch}']:.0f}" for batch in BATCHES]
        lines.append((row, [f"{entry['parameters']:,}", *times, cell(seconds), cell(millions, digits=0)]))
    columns = ["parameters", *(f"ms a step, batch {batch}" for batch in BATCHES)]
    columns += ["published s a step", "published million parameters"]
    data = outcome.config["data"]
    source, target = PUBLISHED_VOCABULARIES
    notes = [
        f"Parameters are those with vocabularies of {source:,} and {target:,} pieces, which give the "
        f"published sizes. Times are medians of {ROUNDS * TIMED} updates, in turns, on {data['name']} "
        f"{data['direction']}, with its own vocabularies and nothing else running "
        f"({outcome.config['timed_on']}). Published times are from another GPU, and only their ratios "
        "compare."
    ]
    return Report([Grid("Sizes and times", columns, lines)], notes)


TABLE_4 = Recipe(
    name="bam-table-4",
    title="Translation with Bayesian attention",
    paper="Fan et al. 2020, Bayesian Attention Modules, Table 4",
    published={"rows": PUBLISHED},
    run=run_table_4,
    report=report_table_4,
    seeds=3,
    folder="translation",
    options=OPTIONS,
)
TABLE_8 = Recipe(
    name="bam-table-8",
    title="Translation with Bayesian attention: cost",
    paper="Fan et al. 2020, Bayesian Attention Modules, Table 8",
    published={"rows": PUBLISHED_8},
    run=run_table_8,
    report=report_table_8,
    seeds=1,
    folder="translation",
    options={name: OPTIONS[name] for name in ("dataset", "direction", "rows", "codes", "steps")},
)
