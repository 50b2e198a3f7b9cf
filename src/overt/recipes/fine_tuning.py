"""Fine-tune a pretrained encoder on labelled sentences, with any mechanisms.

Two lines differ from an ordinary fine-tuning script: `overt.attach`, and `overt.posterior` for the samples.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import overt
from overt.data.sst2 import Rows
from overt.judge import uncertainty
from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.mechanism import Mechanism
from overt.recipes._runs import finish_run
from overt.recipes._training import Run, hardware

if TYPE_CHECKING:
    from rich.console import Console

FEW_STEPS = 60  # for the few sentences included in the package
BATCH = 32
WARMUP = 30  # steps
LONGEST = 64  # tokens
SAMPLES = 20
CHECKPOINTS = 3  # per run


def settings_of(
    model: str, seed: int, steps: int, learning_rate: float, train: Rows, test: Rows
) -> dict[str, Any]:
    """Everything that a run of `fine_tune` depends on."""
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
    """Fine-tune and test one form; return its numbers, stored in `folder` with the model and tokenizer."""
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
    row |= _accuracy_and_ece(torch.softmax(logits, dim=-1), test)
    if any(isinstance(mechanism, Bayesian) for mechanism in mechanisms):
        samples = _draw_samples(model, tests, collator)
        row["sampled"] = _accuracy_and_ece(samples.mean(dim=0), test)
        row["pavpu"] = uncertainty.pavpu(samples, [label for _, label in test])[0.05]
    row["parameters"] = sum(p.numel() for name, p in model.named_parameters() if ".overt." in name)
    row["step_ms"], row["hardware"] = run.step_ms, hardware(device)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    finish_run(folder, row)
    return row


def _draw_samples(model: Any, tests: Encoded, collator: Any, batch: int = 32) -> Tensor:
    """Predictive samples of every test sentence, (samples, sentences, 2)."""
    parts = []
    for start in range(0, len(tests), batch):
        rows = [tests[index] for index in range(start, min(start + batch, len(tests)))]
        inputs = {key: value.to(model.device) for key, value in collator(rows).items()}
        posterior = overt.posterior(model, inputs, SAMPLES, first=start)
        assert isinstance(posterior, overt.Posterior)
        parts.append(posterior.samples.cpu())
    return torch.cat(parts, dim=1)


def _accuracy_and_ece(mean: Tensor, test: Rows) -> dict[str, float]:
    targets = [label for _, label in test]
    accuracy = (mean.argmax(dim=-1) == torch.tensor(targets)).double().mean().item()
    return {"accuracy": accuracy, "ece": float(uncertainty.ece(mean, targets))}
