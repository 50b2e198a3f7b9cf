"""Fine-tune a pretrained encoder on sentiment, with plain, evolving, Bayesian and combined attention.

Two lines differ from an ordinary fine-tuning script: `overt.attach`, and `overt.posterior` for the samples.
SST-2 is read from a folder in GLUE's own layout; without one, 400 sentences that come with the package do.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import overt
from overt import _check
from overt._extras import need
from overt._files import write_whole
from overt.judge import uncertainty
from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.evolving import Evolving
from overt.mechanisms.mechanism import Mechanism
from overt.recipes._data import data_folder, find_file, read_text
from overt.recipes._runs import check_model, finished
from overt.recipes._training import Run, hardware

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
FEW_STEPS = 60  # for the few sentences of the package
BATCH = 32
LEARNING_RATE = 1e-4
WARMUP = 30  # steps
LONGEST = 64  # tokens
HELD_OUT = 100  # of the sentences that come with the package
SAMPLES = 20
CHECKPOINTS = 3  # per form

SST2 = "SST-2"

Rows = list[tuple[str, int]]


def read_rows(text: str, name: str) -> Rows:
    """Sentences and labels of a GLUE table."""
    rows = list(csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE))
    try:
        return [(row["sentence"].strip(), int(row["label"])) for row in rows]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name} must be tab-separated with columns sentence and label (0 or 1)") from None


def find_sst2(folder: Path) -> dict[str, Path]:
    """train and dev of SST-2 under a folder, plain or gzipped."""
    for place in (folder, folder / "SST-2", folder / "glue" / "SST-2"):
        found = {part: find_file(place, f"{part}.tsv") for part in ("train", "dev")}
        paths = {part: path for part, path in found.items() if path is not None}
        if len(paths) == 2:
            return paths
    raise FileNotFoundError(
        f"{folder} holds no SST-2: train.tsv and dev.tsv, here or in SST-2/ or glue/SST-2/"
    )


def load_rows(data: Path | None, seed: int) -> tuple[Rows, Rows, str]:
    """Training and test rows, and what they are."""
    data = data_folder(data)
    if data is not None:
        parts = {part: read_rows(read_text(path), str(path)) for part, path in find_sst2(data).items()}
        return parts["train"], parts["dev"], SST2
    rows = read_rows((files("overt.recipes") / "sentiment.tsv").read_text("utf-8"), "sentiment.tsv")
    Random(seed).shuffle(rows)
    test: Rows = []
    for label in (0, 1):
        test += [row for row in rows if row[1] == label][: HELD_OUT // 2]
    return [row for row in rows if row not in test], test, "the 400 sentences of the package"


def run(
    model: str,
    out: Path,
    data: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    fresh: bool = False,
) -> dict[str, dict[str, Any]]:
    """Fine-tune and test every form, print the table and return its rows; all is kept under `out`."""
    from rich.console import Console

    _check.whole("seed", seed, 0)
    need("accelerate", "train")
    check_model(model)
    console = Console()
    train, test, what = load_rows(data, seed)
    steps = steps if steps is not None else STEPS if what == SST2 else FEW_STEPS
    _check.whole("steps", steps, 1)
    console.print(f"{what}: {len(train):,} sentences to learn from, {len(test):,} to test on; model {model}")
    settings = settings_of(model, seed, steps, LEARNING_RATE, train, test)
    rows = {}
    for form, mechanisms in FORMS.items():
        row = finished(out / form, settings | {"mechanisms": repr(mechanisms)}, fresh)
        if row is None:
            row = fine_tune(console, out / form, model, mechanisms, train, test, settings)
        else:
            console.print(f"[dim]{form} attention: done before, kept in {out / form}[/dim]")
        rows[form] = row
    _show(console, rows, len(test))
    console.print(f"[dim]seed {seed}, {steps} steps of {BATCH}; models in {out}; --fresh starts over[/dim]")
    return rows


def settings_of(
    model: str, seed: int, steps: int, learning_rate: float, train: Rows, test: Rows
) -> dict[str, Any]:
    """What a run of `fine_tune` depends on."""
    text = "\n".join(f"{sentence}\t{label}" for sentence, label in train + test)
    return {
        "version": overt.__version__,
        "model": model,
        "seed": seed,
        "steps": steps,
        "batch": BATCH,
        "learning_rate": learning_rate,
        "data": hashlib.sha256(text.encode()).hexdigest(),
    }


class Encoded(torch.utils.data.Dataset[dict[str, Any]]):
    """Tokenized sentences with their labels."""

    def __init__(self, rows: Rows, tokenizer: Any) -> None:
        self.codes = tokenizer([sentence for sentence, _ in rows], truncation=True, max_length=LONGEST)
        self.labels = [label for _, label in rows]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        codes = {key: values[index] for key, values in self.codes.items()}
        return {**codes, "labels": self.labels[index]}


def fine_tune(
    console: Console,
    folder: Path,
    path: str,
    mechanisms: tuple[Mechanism, ...],
    train: Rows,
    test: Rows,
    settings: dict[str, Any],
    device: str = "auto",
) -> dict[str, Any]:
    """Fine-tune and test one form; its numbers, which are kept in `folder` with the model and tokenizer."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        set_seed,
    )

    steps, seed = settings["steps"], settings["seed"]
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    set_seed(seed)
    model: Any = AutoModelForSequenceClassification.from_pretrained(path, num_labels=2, dtype=torch.float32)
    if mechanisms:
        overt.attach(model, *mechanisms, seed=seed)
    collator = DataCollatorWithPadding(tokenizer)
    tests = Encoded(test, tokenizer)
    run = Run(
        model,
        folder,
        steps=steps,
        checkpoints=CHECKPOINTS,
        seed=seed,
        data=Encoded(train, tokenizer),
        collate=collator,
        console=console,
        name=folder.name,
        device=device,
        evaluation=tests,
        per_device_train_batch_size=settings["batch"],
        per_device_eval_batch_size=64,
        learning_rate=settings["learning_rate"],
        warmup_steps=min(WARMUP, steps // 2),
    )
    trainer = run.trainer
    before = trainer.evaluate()["eval_loss"]
    run.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    losses = [entry.get("task_loss", entry["loss"]) for entry in logs]
    row: dict[str, Any] = {"loss_before": before, "loss_after": trainer.evaluate()["eval_loss"]}
    row["train_first"], row["train_last"] = losses[0], losses[-1]
    row["kl_first"], row["kl_last"] = logs[0].get("kl"), logs[-1].get("kl")
    logits = torch.from_numpy(trainer.predict(tests).predictions)
    row |= _judged(torch.softmax(logits, dim=-1), test)
    if any(isinstance(mechanism, Bayesian) for mechanism in mechanisms):
        samples = _sampled(model, tests, collator)
        row["sampled"] = _judged(samples.mean(dim=0), test)
        row["pavpu"] = uncertainty.pavpu(samples, [label for _, label in test])[0.05]
    row["parameters"] = sum(p.numel() for name, p in model.named_parameters() if ".overt." in name)
    row["step_ms"], row["hardware"] = run.step_ms, hardware(device)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_whole(folder / "result.json", json.dumps(row, indent=1))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return row


def _sampled(model: Any, tests: Encoded, collator: Any, batch: int = 32) -> Tensor:
    """Predictive samples of every test sentence, (samples, sentences, 2)."""
    parts = []
    for start in range(0, len(tests), batch):
        rows = [tests[index] for index in range(start, min(start + batch, len(tests)))]
        inputs = {key: value.to(model.device) for key, value in collator(rows).items()}
        drawn = overt.posterior(model, inputs, SAMPLES, first=start)
        assert isinstance(drawn, overt.Posterior)
        parts.append(drawn.samples.cpu())
    return torch.cat(parts, dim=1)


def _judged(mean: Tensor, test: Rows) -> dict[str, float]:
    targets = [label for _, label in test]
    accuracy = (mean.argmax(dim=-1) == torch.tensor(targets)).double().mean().item()
    return {"accuracy": accuracy, "ece": float(uncertainty.ece(mean, targets))}


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
        drawn = row.get("sampled")
        table.add_row(
            form,
            f"{row['train_first']:.3f} → {row['train_last']:.3f}",
            "–" if row["kl_first"] is None else f"{row['kl_first']:.1f} → {row['kl_last']:.1f}",
            f"{row['loss_before']:.3f} → {row['loss_after']:.3f}",
            f"{100 * row['accuracy']:.1f}",
            f"{100 * row['ece']:.1f}",
            f"{100 * drawn['accuracy']:.1f}" if drawn else "–",
            f"{100 * drawn['ece']:.1f}" if drawn else "–",
            f"{100 * row['pavpu']:.1f}" if drawn else "–",
            f"{row['parameters']:,}",
            f"{row['step_ms']:.0f}" if row["step_ms"] else "–",
        )
    console.print(table)
    console.print(
        "Training loss and KL (unweighted) are of the first and the last tenth of the steps, apart. "
        f"Sampled: the mean of {SAMPLES} posterior samples; PAvPU at .05; added: the mechanisms' parameters."
    )
