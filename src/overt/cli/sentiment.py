"""Fine-tune a pretrained encoder on sentiment, with plain, evolving, Bayesian and combined attention.

Two lines differ from an ordinary fine-tuning script: `overt.attach`, and `overt.posterior` for the samples.
SST-2 is read from a folder in GLUE's layout; without one, 400 sentences included in the package are used.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overt import _check
from overt._extras import need
from overt.cli.shared import (
    DataOption,
    EncoderOption,
    FreshOption,
    RunFolderOption,
    SeedOption,
    app,
    resumable,
)
from overt.data.sst2 import SST2, load_rows
from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.evolving import Evolving
from overt.mechanisms.mechanism import Mechanism
from overt.recipes._runs import check_plain, load_tokenizer, prepare_run
from overt.recipes.fine_tuning import BATCH, FEW_STEPS, SAMPLES, fine_tune, settings_of

if TYPE_CHECKING:
    from rich.console import Console

_EVOLVING = Evolving(alpha=0.1, beta=0.1)
_OFFICIAL = Bayesian.paper(k=10.0, preset="official")
FORMS: dict[str, tuple[Mechanism, ...]] = {
    "plain": (),
    "evolving": (_EVOLVING,),
    "Bayesian": (Bayesian(k=10.0),),
    "Bayesian-paper": (Bayesian.paper(k=10.0),),
    "Bayesian-official": (_OFFICIAL,),
    "both-official": (_EVOLVING, _OFFICIAL),
}
STEPS = 300
LEARNING_RATE = 1e-4


def run(
    model: str,
    out: Path,
    data: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    fresh: bool = False,
) -> dict[str, dict[str, Any]]:
    """Fine-tune and test every form, print the table and return its rows; all is stored under `out`."""
    from rich.console import Console

    _check.whole("seed", seed, 0)
    need("accelerate", "train")
    check_plain(model)
    load_tokenizer(model)  # refuses a folder without one
    console = Console()
    train, test, what = load_rows(data, seed)
    steps = steps if steps is not None else STEPS if what == SST2 else FEW_STEPS
    _check.whole("steps", steps, 1)
    console.print(f"{what}: {len(train):,} sentences for training, {len(test):,} for testing; model {model}")
    settings = settings_of(model, seed, steps, LEARNING_RATE, train, test)
    rows = {}
    for form, mechanisms in FORMS.items():
        row = prepare_run(out / form, settings | {"mechanisms": repr(mechanisms)}, fresh)
        if row is None:
            row = fine_tune(console, out / form, model, mechanisms, train, test, settings)
        else:
            console.print(f"[dim]{form} attention: already trained, results in {out / form}[/dim]")
        rows[form] = row
    _show(console, rows, len(test))
    console.print(f"[dim]seed {seed}, {steps} steps of {BATCH}; models in {out}; --fresh starts over[/dim]")
    return rows


def _show(console: Console, rows: dict[str, dict[str, Any]], count: int) -> None:
    from rich import box
    from rich.table import Table

    title = f"{count} test sentences; accuracy, calibration error and PAvPU in %"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    headings = (
        "training loss",
        "KL",
        "test loss",
        "accuracy",
        "ECE",
        "sampled",
        "ECE ",
        "PAvPU",
        "added",
        "ms/step",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for form, row in rows.items():
        sampled = row.get("sampled")
        table.add_row(
            form,
            f"{row['train_first']:.3f} → {row['train_last']:.3f}",
            "–" if row["kl_first"] is None else f"{row['kl_first']:.1f} → {row['kl_last']:.1f}",
            f"{row['loss_before']:.3f} → {row['loss_after']:.3f}",
            f"{100 * row['accuracy']:.1f}",
            f"{100 * row['ece']:.1f}",
            f"{100 * sampled['accuracy']:.1f}" if sampled else "–",
            f"{100 * sampled['ece']:.1f}" if sampled else "–",
            f"{100 * row['pavpu']:.1f}" if sampled else "–",
            f"{row['parameters']:,}",
            f"{row['step_ms']:.0f}" if row["step_ms"] else "–",
        )
    console.print(table)
    console.print(
        "Training loss and, separately, KL (unweighted): first and last tenth of the steps. "
        f"Sampled: mean of {SAMPLES} posterior samples. PAvPU: at .05. Added: parameters of the mechanisms."
    )


@app.command(rich_help_panel="Attach to a pretrained model")
def sentiment(
    model: EncoderOption,
    data: DataOption = None,
    out: RunFolderOption = Path("runs/sentiment"),
    steps: Annotated[
        int | None,
        typer.Option(
            help=f"Number of training steps per form. Default: {STEPS} on SST-2, else {FEW_STEPS}.", min=1
        ),
    ] = None,
    seed: SeedOption = 0,
    fresh: FreshOption = False,
) -> None:
    """Fine-tune a pretrained encoder on sentiment with plain, evolving, Bayesian and combined attention."""
    with resumable(fresh):
        run(model, out, data, steps, seed, fresh)
