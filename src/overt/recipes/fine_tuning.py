"""Fine-tune a pretrained encoder on sentences with a sentiment, with any mechanisms."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import overt
from overt.data.glue import TASKS, Row
from overt.data.sst2 import SST2, Rows
from overt.judge import uncertainty
from overt.mechanisms.bayesian import Bayesian
from overt.mechanisms.mechanism import Mechanism
from overt.recipes import text_training
from overt.recipes._runs import finish_run
from overt.recipes._training import hardware, torch_device
from overt.recipes.text_training import Texts, TextTraining, attached, encode, predict, sample

if TYPE_CHECKING:
    from rich.console import Console

FEW_STEPS = 60  # for the few sentences included in the package
BATCH = 32
WARMUP = 30  # steps
LONGEST = 64  # tokens
SAMPLES = 20
CLASSES = TASKS[SST2].classes


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
    from transformers import AutoTokenizer

    steps, seed = settings["steps"], settings["seed"]
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    coded = [
        encode([Row((text,), label) for text, label in rows], tokenizer, LONGEST) for rows in (train, test)
    ]
    texts = Texts(coded[0], {}, CLASSES)
    training = TextTraining(
        steps, settings["batch"], settings["learning_rate"], min(WARMUP, steps // 2), LONGEST
    )
    untrained = attached(path, texts, mechanisms, training, seed).to(torch_device(device)).eval()
    before = predict(untrained, coded[1], tokenizer)
    model, numbers = text_training.train(
        folder, texts, tokenizer, path, mechanisms, training, seed, device, console=console
    )
    logits = predict(model, coded[1], tokenizer)
    targets = torch.tensor([label for _, label in test])
    row: dict[str, Any] = {
        "loss_before": float(F.cross_entropy(before, targets)),
        "loss_after": float(F.cross_entropy(logits, targets)),
        "train_first": numbers["curve"][0][1],
        "train_last": numbers["curve"][-1][1],
        "kl_first": numbers["kl"][0][1] if numbers["kl"] else None,
        "kl_last": numbers["kl"][-1][1] if numbers["kl"] else None,
        "parameters": numbers["added"],
        "step_ms": numbers["step_ms"],
        "hardware": hardware(device),
    }
    row |= _accuracy_and_ece(torch.softmax(logits, dim=-1), test)
    if any(isinstance(mechanism, Bayesian) for mechanism in mechanisms):
        samples = sample(model, coded[1], tokenizer, SAMPLES)
        row["sampled"] = _accuracy_and_ece(samples.mean(dim=0), test)
        row["pavpu"] = uncertainty.pavpu(samples, [label for _, label in test])[0.05]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    finish_run(folder, row)
    return row


def _accuracy_and_ece(mean: Tensor, test: Rows) -> dict[str, float]:
    targets = [label for _, label in test]
    accuracy = (mean.argmax(dim=-1) == torch.tensor(targets)).double().mean().item()
    return {"accuracy": accuracy, "ece": float(uncertainty.ece(mean, targets))}
