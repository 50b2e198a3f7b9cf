"""Training of the demo's network on sentences of the grammar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from overt.data.agreement import Sentence, encode
from overt.data.batching import pad_batch
from overt.models.agreement import AgreementClassifier
from overt.models.folders import save_weights
from overt.recipes._training import train_classifier

if TYPE_CHECKING:
    from rich.console import Console

BATCH = 32
LEARNING_RATE = 2e-3
WARMUP = 40  # steps
CHECKPOINTS = 4


def collate(items: Sequence[tuple[int, Sentence]]) -> dict[str, Tensor]:
    """Numbered sentences as a padded batch for `AgreementClassifier`."""
    return pad_batch(items, encode)


def train_on_grammar(
    model: AgreementClassifier,
    folder: Path,
    train: Sequence[Sentence],
    steps: int,
    seed: int,
    console: Console,
    device: str = "auto",
) -> dict[str, Any]:
    """Train the network and store its weights; return its size and step time.

    Args:
        model: untrained; it ends on the CPU.
        folder: of the run.
        train: sentences.
        steps: number of updates.
        seed: of the batches.
        console: shows the progress.
        device: "cpu", "cuda" or "auto".
    """
    size = train_classifier(
        model,
        folder,
        train,
        collate,
        batch=BATCH,
        seed=seed,
        steps=steps,
        checkpoints=CHECKPOINTS,
        console=console,
        name=folder.name,
        learning_rate=LEARNING_RATE,
        warmup_steps=min(WARMUP, steps // 2),
        device=device,
    )
    save_weights(model, folder)
    return size
