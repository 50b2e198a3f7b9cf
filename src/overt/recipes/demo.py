"""The demo: one small task, four forms of attention, side by side.

Trains the network of Abnar & Zuidema 2020 on the embedded agreement sentences with plain, evolving, Bayesian
and combined attention, and prints accuracy by number of attractors beside rules that need no grammar. A form
that is done is kept in the output folder; one that was interrupted goes on from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import overt
from overt import _check
from overt._extras import need
from overt.judge import uncertainty
from overt.mechanisms.attention_map import Mechanism
from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving import Evolving
from overt.models.agreement import AgreementClassifier
from overt.recipes._runs import finished, write_whole
from overt.recipes.agreement import VOCABULARY, Sentence, baselines, encode, split

if TYPE_CHECKING:
    from rich.console import Console

# The prior as the published results had it. The paper's text makes the prior's α larger by 1/β, and so slows
# the learning of sharp maps from scratch.
_BAYESIAN = Bayesian(k=10.0, preset="official")
_EVOLVING = Evolving(alpha=0.1, beta=0.1)
FORMS: dict[str, tuple[Mechanism, ...]] = {
    "plain": (),
    "evolving": (_EVOLVING,),
    "Bayesian": (_BAYESIAN,),
    "both": (_EVOLVING, _BAYESIAN),
}
TRAIN, TEST = 16_000, 2_000  # sentences
STEPS = 280
BATCH = 32
LEARNING_RATE = 2e-3
WARMUP = 40  # steps
SAMPLES, SAMPLED = 20, 250  # posterior samples per sentence, and test sentences that they are drawn for
CHECKPOINTS = 4  # per form


def run(out: Path, steps: int = STEPS, seed: int = 0, fresh: bool = False) -> dict[str, dict[str, Any]]:
    """Train and test every form, print the table, and return its rows; everything is kept under `out`."""
    from rich.console import Console

    _check.whole("steps", steps, 1)
    _check.whole("seed", seed, 0)
    need("accelerate", "train")
    console = Console()
    train, test = split(TRAIN, TEST, seed)
    console.print(
        f"{len(train):,} training and {len(test):,} test sentences from the grammar, for instance "
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
        row = finished(out / form, settings | {"mechanisms": repr(mechanisms)}, fresh)
        if row is None:
            row = _train_and_test(console, out / form, mechanisms, train, test, settings)
        else:
            console.print(f"[dim]{form} attention: done before, kept in {out / form}[/dim]")
        rows[form] = row
    _show(console, rows, train, test)
    console.print(
        f"[dim]seed {seed}, {steps} steps of {BATCH} sentences, {torch.get_num_threads()} CPU threads; "
        f"models and numbers in {out}; --fresh starts over[/dim]"
    )
    return rows


def load(folder: Path) -> AgreementClassifier:
    """A model that the demo left in `out`/`form`, in evaluation mode."""
    from safetensors.torch import load_file

    weights = folder / "model.safetensors"
    if folder.name not in FORMS or not weights.exists():
        raise FileNotFoundError(f"no demo model in {folder}: run `overt demo` first")
    model = AgreementClassifier(len(VOCABULARY), FORMS[folder.name], dropout=0.0)
    model.load_state_dict(load_file(weights))
    return model.eval()


def batches(sentences: Sequence[Sentence], seed: int) -> list[list[tuple[int, Sentence]]]:
    """Numbered sentences in batches of similar length, so that little of a batch is padding."""
    numbered = list(enumerate(sentences))
    Random(seed).shuffle(numbered)
    pool = 16 * BATCH
    out = []
    for start in range(0, len(numbered), pool):
        near = sorted(numbered[start : start + pool], key=lambda item: len(item[1].tokens))
        out += [near[first : first + BATCH] for first in range(0, len(near), BATCH)]
    return out


def collate(items: Sequence[tuple[int, Sentence]]) -> dict[str, Tensor]:
    """Numbered sentences as a padded batch for `AgreementClassifier`."""
    codes = [encode(sentence) for _, sentence in items]
    longest = max(map(len, codes))
    padded = [code + [0] * (longest - len(code)) for code in codes]
    seen = [[1] * len(code) + [0] * (longest - len(code)) for code in codes]
    return {
        "input_ids": torch.tensor(padded),
        "attention_mask": torch.tensor(seen),
        "labels": torch.tensor([int(sentence.plural) for _, sentence in items]),
        "examples": torch.tensor([number for number, _ in items]),
    }


def _train_and_test(
    console: Console,
    folder: Path,
    mechanisms: tuple[Mechanism, ...],
    train: Sequence[Sentence],
    test: Sequence[Sentence],
    settings: dict[str, Any],
) -> dict[str, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from safetensors.torch import load_file, save_file
    from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
    from transformers.trainer_utils import get_last_checkpoint

    steps, seed = settings["steps"], settings["seed"]
    checkpoints = folder / "checkpoints"
    seconds: list[float] = []
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    task = progress.add_task(folder.name, total=steps)

    class Clock(TrainerCallback):
        """Tells the model which step it is, takes the time of each, and shows progress."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, control, kwargs
            progress.update(task, completed=state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, control, kwargs
            model.step.fill_(state.global_step)
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            del args, control, kwargs
            seconds.append(time.perf_counter() - self.began)
            progress.update(task, completed=state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            del args, state, control, kwargs
            if logs and "loss" in logs:
                progress.update(task, description=f"{folder.name}, loss {float(logs['loss']):.3f}")

    set_seed(seed)
    model = AgreementClassifier(len(VOCABULARY), mechanisms, dropout=0.0)
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=steps,
        per_device_train_batch_size=1,  # one ready-made batch
        learning_rate=LEARNING_RATE,
        warmup_steps=min(WARMUP, steps // 2),
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
        weight_decay=0.01,
        save_steps=max(1, steps // CHECKPOINTS),
        save_total_limit=1,
        logging_steps=max(1, steps // 7),
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        seed=seed,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model,
        arguments,
        data_collator=lambda ready: collate(ready[0]),
        train_dataset=batches(train, seed),
        callbacks=[Clock()],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoints.mkdir(exist_ok=True)
    last: str | None = get_last_checkpoint(str(checkpoints))  # type: ignore[no-untyped-call]
    if last is not None and int(last.rsplit("-", 1)[1]) >= steps:  # trained, but not tested
        model.load_state_dict(load_file(Path(last) / "model.safetensors"))
    else:
        with progress:
            trainer.train(resume_from_checkpoint=last)
    model.cpu()
    row = _test(model, mechanisms, test)
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    row["step_ms"] = 1000 * statistics.median(seconds) if seconds else None
    part = folder / "model.part"
    save_file(model.state_dict(), part)
    os.replace(part, folder / "model.safetensors")
    write_whole(folder / "result.json", json.dumps(row, indent=1))
    shutil.rmtree(checkpoints, ignore_errors=True)
    return row


@torch.no_grad()
def predict(
    model: AgreementClassifier, sentences: Sequence[Sentence], samples: int | None = None, batch: int = 64
) -> Tensor:
    """Probabilities of singular and plural, (sentences, 2); with `samples`, (samples, sentences, 2)."""
    model.eval()
    device = model.step.device
    parts = []
    numbered = sorted(enumerate(sentences), key=lambda item: len(item[1].tokens))  # little padding
    for start in range(0, len(numbered), batch):
        items = {name: value.to(device) for name, value in collate(numbered[start : start + batch]).items()}
        draws = [None] if samples is None else range(samples)
        logits = [
            model(
                items["input_ids"],
                items["attention_mask"],
                chain=Chain(step=model.step, sample=draw, examples=items["examples"]),
            )["logits"]
            for draw in draws
        ]
        parts.append(torch.softmax(torch.stack(logits).double(), dim=-1))
    probabilities = torch.cat(parts, dim=1).cpu()
    # back to the order that they came in
    probabilities = probabilities[:, torch.tensor([number for number, _ in numbered]).argsort()]
    return probabilities[0] if samples is None else probabilities


def _test(
    model: AgreementClassifier, mechanisms: tuple[Mechanism, ...], test: Sequence[Sentence]
) -> dict[str, Any]:
    targets = torch.tensor([int(sentence.plural) for sentence in test])
    mean = predict(model, test)
    hits = (mean.argmax(dim=-1) == targets).tolist()
    row: dict[str, Any] = {"accuracy": _share(hits), "by_attractors": _by_attractors(test, hits)}
    if any(isinstance(mechanism, Bayesian) for mechanism in mechanisms):
        samples = predict(model, test[:SAMPLED], SAMPLES)
        row["pavpu"] = {str(p): value for p, value in uncertainty.pavpu(samples, targets[:SAMPLED]).items()}
    return row


def _by_attractors(test: Sequence[Sentence], hits: Sequence[bool]) -> dict[str, float]:
    counts = sorted({sentence.attractors for sentence in test})
    pairs = list(zip(test, hits, strict=True))
    return {str(n): _share([hit for sentence, hit in pairs if sentence.attractors == n]) for n in counts}


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)


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
            f"{row['step_ms']:.0f}",
        ]
        table.add_row(form, *cells)
    table.add_section()
    for name, accuracy in baselines(train, test).items():
        by = [f"{100 * baselines(train, [s for s in test if s.attractors == n])[name]:.1f}" for n in counts]
        table.add_row(name, f"{100 * accuracy:.1f}", *by, "–", "–", "–", style="dim")
    console.print(table)
    console.print(
        "An attractor is a noun between subject and verb whose number is the verb's opposite. PAvPU: how "
        "often the model is certain when right and uncertain when wrong, by a two-sample t-test at .05 on "
        f"{SAMPLES} samples of {SAMPLED} sentences."
    )
