"""Attached models under the Trainer, for tests of it in this process and in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

import families
import overt
from attached import attached, without_dropout
from families import BY_NAME, PAD

BOTH = (overt.Evolving(alpha=0.3, beta=0.3), overt.Bayesian(k=5.0, kl_weight=1.0))


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sixteen sentences of different lengths, padded, with labels for a classifier or a language model."""

    def __init__(self, language: bool, count: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = []
        for number in range(count):
            length = 4 + number % 6
            ids = torch.randint(5, families.WORDS, (10,), generator=generator)
            mask = (torch.arange(10) < length).long()
            ids = ids.masked_fill(mask == 0, PAD)
            labels = ids.masked_fill(mask == 0, -100) if language else ids[0] % 2
            self.rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Gradients(TrainerCallback):
    """Gradients of every parameter just before each optimizer step, and the losses that were logged."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.logs: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control
        named = kwargs["model"].named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        del args, state, control, kwargs
        if "loss" in logs:
            self.logs.append({name: logs[name] for name in ("task_loss", "kl", "kl_weight")})


def arguments(folder: Path, **settings: Any) -> TrainingArguments:
    given = {
        "max_steps": 2,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 0,
        **settings,
    }
    return TrainingArguments(output_dir=str(folder), **given)


class InOrder(Trainer):
    """Examples in order, so that runs of different batch sizes see the same ones."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train(folder: Path, name: str, **settings: Any) -> tuple[Any, Gradients]:
    family = BY_NAME[name]
    model = without_dropout(attached(family, *BOTH))
    noted = Gradients()
    rows = Rows(language=family.generates)
    given = arguments(folder, **{"logging_steps": 1, **settings})
    InOrder(model, given, train_dataset=rows, callbacks=[overt.LossLog(), noted]).train()
    return model, noted
