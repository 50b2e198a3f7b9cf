"""The demo: four forms of attention compared on one small task.

Trains the network of Abnar & Zuidema 2020 on the embedded agreement sentences with plain, evolving, Bayesian
and combined attention, and prints accuracy by number of attractors, with rules that need no grammar as
baselines. Finished forms are kept in the output folder; an interrupted form resumes from its last checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

import overt
from overt import _check
from overt._extras import need
from overt.cli import demo_flow
from overt.cli.shared import FreshOption, RunFolderOption, SeedOption, app, resumable
from overt.data.agreement import VOCABULARY, Sentence, baselines, split
from overt.judge import uncertainty
from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.mechanism import Mechanism
from overt.models.agreement import AgreementClassifier
from overt.models.folders import WEIGHTS, load_weights
from overt.recipes._runs import finish_run, prepare_run
from overt.recipes._training import (
    hits,
    predict,
    share,
)
from overt.recipes.forms import FORMS
from overt.recipes.grammar_training import BATCH, LEARNING_RATE, WARMUP, collate, train_on_grammar

if TYPE_CHECKING:
    from rich.console import Console

TRAIN, TEST = 16_000, 2_000  # sentences
STEPS = 280
SAMPLES, SAMPLED = 20, 250  # posterior samples per sentence; test sentences that are sampled and traced
PAGE = Path("demo/index.html")


def run(
    out: Path, steps: int = STEPS, seed: int = 0, fresh: bool = False, page: Path = PAGE
) -> dict[str, dict[str, Any]]:
    """Train and test every form, print the table and return its rows; everything is stored under `out`.

    Traces of a few sentences are written to `page`.
    """
    from rich.console import Console

    _check.whole("steps", steps, 1)
    _check.whole("seed", seed, 0)
    need("accelerate", "train")
    console = Console()
    train, test = split(TRAIN, TEST, seed)
    console.print(
        f"{len(train):,} training and {len(test):,} test sentences from the grammar, e.g. "
        f"[italic]{test[0]}[/italic] → {'plural' if test[0].plural else 'singular'}"
    )
    settings = {
        "version": overt.__version__,
        "seed": seed,
        "steps": steps,
        "batch": BATCH,
        "learning_rate": LEARNING_RATE,
        "warmup": WARMUP,
        "samples": [SAMPLES, SAMPLED],
        "data": hashlib.sha256("\n".join(map(str, train + test)).encode()).hexdigest(),
    }
    rows = {}
    for form, mechanisms in FORMS.items():
        row = prepare_run(out / form, settings | {"mechanisms": repr(mechanisms)}, fresh)
        if row is None:
            row = _train_and_test(console, out / form, mechanisms, train, test, settings)
        else:
            console.print(f"[dim]{form} attention: already trained, results in {out / form}[/dim]")
        rows[form] = row
    _show(console, rows, train, test)
    models = {form: (out / form, load(out / form)) for form in FORMS}
    demo_flow.show_traces(console, models, test[:SAMPLED], collate, page)
    console.print(
        f"[dim]seed {seed}, {steps} steps of {BATCH} sentences, {torch.get_num_threads()} CPU threads; "
        f"models and results in {out}; --fresh starts over[/dim]"
    )
    return rows


def load(folder: Path) -> AgreementClassifier:
    """Load a model that the demo wrote to `out`/`form`, in evaluation mode."""
    if folder.name not in FORMS or not (folder / WEIGHTS).exists():
        raise FileNotFoundError(f"no demo model in {folder}: run `overt demo` first")
    return load_weights(AgreementClassifier(len(VOCABULARY), FORMS[folder.name], dropout=0.0), folder)


def _train_and_test(
    console: Console,
    folder: Path,
    mechanisms: tuple[Mechanism, ...],
    train: Sequence[Sentence],
    test: Sequence[Sentence],
    settings: dict[str, Any],
) -> dict[str, Any]:
    from transformers import set_seed

    steps, seed = settings["steps"], settings["seed"]
    set_seed(seed)
    model = AgreementClassifier(len(VOCABULARY), mechanisms, dropout=0.0)
    size = train_on_grammar(model, folder, train, steps, seed, console)
    row = _test(model, mechanisms, test) | size
    finish_run(folder, row)
    return row


def _test(
    model: AgreementClassifier, mechanisms: tuple[Mechanism, ...], test: Sequence[Sentence]
) -> dict[str, Any]:
    right = hits(predict(model, test, collate), test)
    row: dict[str, Any] = {"accuracy": share(right), "by_attractors": _by_attractors(test, right)}
    if any(isinstance(mechanism, Bayesian) for mechanism in mechanisms):
        few = test[:SAMPLED]
        samples = predict(model, few, collate, SAMPLES)
        pavpu = uncertainty.pavpu(samples, [int(sentence.plural) for sentence in few])
        row["pavpu"] = {str(p): value for p, value in pavpu.items()}
    return row


def _by_attractors(test: Sequence[Sentence], right: Sequence[bool]) -> dict[str, float]:
    counts = sorted({sentence.attractors for sentence in test})
    pairs = list(zip(test, right, strict=True))
    return {str(n): share([hit for sentence, hit in pairs if sentence.attractors == n]) for n in counts}


def _show(
    console: Console, rows: dict[str, dict[str, Any]], train: Sequence[Sentence], test: Sequence[Sentence]
) -> None:
    from rich import box
    from rich.table import Table

    counts = sorted({sentence.attractors for sentence in test})
    table = Table(
        title="Test accuracy in %, by number of attractor nouns",
        title_justify="left",
        box=box.SIMPLE,
        padding=(0, 0, 0, 1),
    )
    table.add_column("", no_wrap=True)
    for heading in ("all", *map(str, counts), "PAvPU", "parameters", "ms/step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for form, row in rows.items():
        pavpu = f"{100 * row['pavpu']['0.05']:.1f}" if "pavpu" in row else "–"
        by = [f"{100 * row['by_attractors'][str(n)]:.1f}" for n in counts]
        cells = [
            f"{100 * row['accuracy']:.1f}",
            *by,
            pavpu,
            f"{row['parameters']:,}",
            f"{row['step_ms']:.0f}" if row["step_ms"] else "–",
        ]
        table.add_row(form, *cells)
    table.add_section()
    for name, accuracy in baselines(train, test).items():
        by = [f"{100 * baselines(train, [s for s in test if s.attractors == n])[name]:.1f}" for n in counts]
        table.add_row(name, f"{100 * accuracy:.1f}", *by, "–", "–", "–", style="dim")
    console.print(table)
    console.print(
        "An attractor is a noun between subject and verb whose number is the opposite of the verb's. PAvPU: "
        "how often the model is certain when right and uncertain when wrong, by a two-sample t-test at .05 "
        f"on {SAMPLES} samples of {SAMPLED} sentences."
    )


@app.command(rich_help_panel="Start here")
def demo(
    out: RunFolderOption = Path("runs/demo"),
    steps: Annotated[int, typer.Option(help="Number of training steps per form.", min=1)] = STEPS,
    seed: SeedOption = 0,
    fresh: FreshOption = False,
    page: Annotated[Path, typer.Option(help="HTML file for the page with traces.")] = PAGE,
) -> None:
    """Train and compare plain, evolving, Bayesian and combined attention on subject–verb agreement."""
    with resumable(fresh):
        run(out=out, steps=steps, seed=seed, fresh=fresh, page=page)
