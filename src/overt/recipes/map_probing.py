"""Train a second network on attention maps alone, which stay on the device; batches are numbers of maps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt._workers import Tell, Throttled
from overt.data.batching import Epochs, Numbers
from overt.recipes import vision_training
from overt.recipes._rows import Task
from overt.recipes._training import times, torch_device
from overt.recipes.vision_training import TEST_BATCH, ImageTraining

START, END = 0.05, 1e-4  # learning rates of Wang et al. 2021, B.1


class Probed(nn.Module):
    """The second network with the maps that it is trained on, which its inputs are numbers of.

    Args:
        probe: takes maps, and their lengths if there are any.
        maps: (maps, channels, height, width), usually float16.
        labels: (maps,).
        lengths: (maps,), the height and width of each map without its padding; None if there is no padding.
    """

    maps: Tensor
    labels: Tensor
    lengths: Tensor | None

    def __init__(self, probe: nn.Module, maps: Tensor, labels: Tensor, lengths: Tensor | None = None) -> None:
        super().__init__()
        self.probe = probe
        for name, tensor in (("maps", maps), ("labels", labels), ("lengths", lengths)):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, numbers: Tensor, **ignored: Any) -> dict[str, Tensor]:
        """The loss of a batch, by the numbers of its maps."""
        del ignored
        lengths = () if self.lengths is None else (self.lengths[numbers],)
        logits = self.probe(self.maps[numbers].float(), *lengths)
        return {"loss": F.cross_entropy(logits.float(), self.labels[numbers])}


def layers_named(text: str, count: int) -> tuple[int, ...]:
    """The numbers of attentions that `--layers` names, from 1 to `count`."""
    parts = [part.strip() for part in text.split(",")]
    layers = tuple(dict.fromkeys(int(part) if part.isdecimal() else 0 for part in parts))
    if not all(1 <= number <= count for number in layers):
        raise ValueError(
            f"--layers must be numbers of attentions, from 1 to {count}, separated by commas, got {text}"
        )
    return layers


def plan(count: int, batch: int, epochs: int) -> ImageTraining:
    """Settings of the second network's training on so many maps."""
    updates = epochs * Epochs(count, batch, 1, 0).per_epoch
    return ImageTraining(updates, 0, batch, START, weight_decay=1e-4, crop=0)


def fastest_update(model: Probed, training: ImageTraining, device: str) -> float:
    """Milliseconds of an update of the second network, which has a batch of maps; the fastest of three."""
    where = torch_device(device)
    optimizer = vision_training.optimizer_of(model.to(where), training)
    numbers = torch.arange(len(model.maps), device=where)[: training.batch]
    return min(times(model, optimizer, lambda _: {"numbers": numbers}, where, 3, half=True))


def train(model: Probed, task: Task, tell: Tell) -> dict[str, Any]:
    """Train the second network of a task, whose `training` is that of `plan`; return the numbers of it."""
    told = Throttled(tell)
    training: ImageTraining = task.training
    numbers = vision_training.fit(
        model,
        task.folder,
        Numbers(Epochs(len(model.maps), training.batch, training.updates, task.seed)),
        training,
        task.seed,
        task.device,
        told,
        optimizer=vision_training.optimizer_of(model, training),
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": END},
    )
    told.rest(training.updates)
    return numbers


def permuted(labels: Tensor, seed: int) -> Tensor:
    """The same labels, each at another map's place."""
    return labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]


@torch.no_grad()
def scores_of(model: Probed, maps: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Logits (maps, classes), float32 on the CPU."""
    device = model.maps.device
    parts = []
    for start in range(0, len(maps), TEST_BATCH):
        some = slice(start, start + TEST_BATCH)
        inputs = [maps[some].to(device).float(), *([] if lengths is None else [lengths[some].to(device)])]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            parts.append(model.probe(*inputs).float().cpu())
    return torch.cat(parts)
