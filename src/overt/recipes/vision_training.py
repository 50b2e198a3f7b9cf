"""Train an image classifier with the Hugging Face Trainer: SGD with momentum, warm-up, cosine or drops.

Small images stay on the device as bytes, and are cropped and mirrored there. Those in files are decoded and
cropped by other processes as they are needed. Several processes can train one network together (`accelerate
launch`): they share each batch equally, and each has the batch-norm statistics of its own images.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from overt import vision
from overt._workers import cores
from overt.data.batching import Epochs
from overt.data.image_folders import ImageFiles, ImageFolders
from overt.data.images import Images
from overt.data.pictures import UnreadableImageError
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.chain import Chain
from overt.mechanisms.mechanism import Mechanism
from overt.recipes._rows import settings_of
from overt.recipes._training import Run, be_quiet, process_number, processes, times, torch_device
from overt.vision import ResNet, resnet

CHECKPOINTS = 4  # per training
LOGS = 60  # points of a learning curve
TEST_BATCH = 1000
TEST_FILES = 128  # larger images of a batch
MOST_LOADERS = 16
AnyImages = Images | ImageFolders


@dataclass(frozen=True)
class ImageTraining:
    """Settings of a training.

    Attributes:
        updates: steps of the optimizer.
        warmup: updates in which the learning rate rises from 0.
        batch: images of a batch.
        learning_rate: at its peak.
        momentum: of SGD.
        weight_decay: of all weights but those of norms and biases.
        crop: pixels of padding from which crops are taken; 0 for none. Images in files have others.
        drops: updates from which on the learning rate is a tenth; without any, it falls as a cosine.
        nesterov: whether the momentum is Nesterov's.
    """

    updates: int
    warmup: int
    batch: int = 512
    learning_rate: float = 0.8
    momentum: float = 0.9
    weight_decay: float = 5e-4
    crop: int = 4
    drops: tuple[int, ...] = ()
    nesterov: bool = True

    def settings(self) -> dict[str, Any]:
        """As plain JSON; `drops` and `nesterov` only where they are not as in earlier results."""
        settings = {**asdict(self), "drops": list(self.drops)}
        usual = {"drops": [], "nesterov": True}
        return {name: value for name, value in settings.items() if usual.get(name) != value}


@dataclass(frozen=True)
class ImageRow:
    """A row of a table: a network by name, and its mechanisms.

    Attributes:
        network: name for `overt.vision.resnet`.
        mechanisms: of its maps; None for those of the name.
        sizes: width and blocks of another network than the name's.
        zero_init_last: whether blocks start as the identity.
    """

    network: str
    mechanisms: tuple[Mechanism, ...] | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    zero_init_last: bool = True

    def settings(self) -> dict[str, Any]:
        """The row as plain JSON."""
        mechanisms = None
        if self.mechanisms is not None:
            mechanisms = settings_of(self.mechanisms)
        return {
            "network": self.network,
            "mechanisms": mechanisms,
            "sizes": self.sizes,
            "zero_init_last": self.zero_init_last,
        }


class Classifier(nn.Module):
    """A network with the images that it is trained on, which its inputs are numbers of.

    Images in files are inputs too, since they are not kept.

    Attributes:
        net: the network.
        step: number of finished updates, which addresses the noise.
    """

    images: Tensor
    labels: Tensor
    mean: Tensor
    deviation: Tensor
    step: Tensor

    def __init__(self, net: ResNet, data: AnyImages, crop: int) -> None:
        super().__init__()
        self.net, self.crop, self.mirrored = net, crop, data.mirrored
        self.classes = data.classes
        mean, deviation = data.colours()
        tensors = {"mean": mean.view(1, -1, 1, 1), "deviation": deviation.view(1, -1, 1, 1)}
        if isinstance(data, Images):
            tensors |= {"images": data.train, "labels": data.train_labels}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(
        self, numbers: Tensor, crops: Tensor | None = None, answers: Tensor | None = None, **ignored: Any
    ) -> dict[str, Tensor]:
        """The loss of a batch of training images.

        Args:
            numbers: of the images, (batch,).
            crops: of images in files, uint8 (batch, 3, height, width).
            answers: their labels, (batch,).
            ignored: what else the Trainer passes.
        """
        del ignored
        chain = Chain(step=self.step, examples=numbers)
        if crops is None:
            crops, answers = augmented(self.images[numbers], self.crop, self.mirrored), self.labels[numbers]
        assert answers is not None
        logits = self.net(self.normalised(crops), chain)
        loss = F.cross_entropy(logits.float(), answers)
        return {"loss": loss + chain.penalty().to(loss.device), "logits": logits}

    def normalised(self, images: Tensor) -> Tensor:
        """Bytes as numbers with mean 0 and standard deviation 1; on a GPU channels last in memory.

        On a CPU, torch 2.13 writes beyond its memory in 1×1 convolutions of stride 2 with channels last.
        """
        x = (images.to(torch.float32) - self.mean) / self.deviation
        last = torch.channels_last if x.is_cuda else torch.contiguous_format
        return x.contiguous(memory_format=last)


def augmented(images: Tensor, crop: int, mirrored: bool) -> Tensor:
    """Random crops of padded images, (batch, channels, height, width), half of them mirrored."""
    batch, _, height, width = images.shape
    device = images.device
    rows = torch.arange(height, device=device).expand(batch, -1)
    columns = torch.arange(width, device=device).expand(batch, -1)
    if mirrored:
        flip = torch.rand(batch, 1, device=device) < 0.5
        columns = torch.where(flip, width - 1 - columns, columns)
    if crop:
        images = F.pad(images, (crop, crop, crop, crop))
        shift = torch.randint(2 * crop + 1, (2, batch, 1), device=device)
        rows, columns = rows + shift[0], columns + shift[1]
    example = torch.arange(batch, device=device).view(-1, 1, 1)
    picked = images.permute(0, 2, 3, 1)[example, rows.unsqueeze(2), columns.unsqueeze(1)]
    return picked.permute(0, 3, 1, 2)  # channels last in memory


class Batches(Dataset[dict[str, Tensor]]):
    """The inputs of `Classifier` for each part of each batch.

    A crop depends on seed, update and image alone, whichever process makes it.
    """

    def __init__(self, data: AnyImages, epochs: Epochs) -> None:
        self.data, self.epochs = data, epochs

    def __len__(self) -> int:
        return len(self.epochs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        data, numbers = self.data, self.epochs[index]
        if isinstance(data, Images):
            return {"numbers": numbers}
        update, seed = index // self.epochs.processes, self.epochs.seed
        crops = [
            data.train.crop(number, Random(f"{seed} {update} {number}"), data.mirrored)
            for number in numbers.tolist()
        ]
        return {"numbers": numbers, "crops": torch.stack(crops), "answers": data.train_labels[numbers]}


def loaders(data: AnyImages | ImageFiles | Tensor) -> int:
    """Number of processes that decode images; 0 for images that are in memory."""
    if isinstance(data, Images | Tensor):
        return 0
    return max(1, min(MOST_LOADERS, cores()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@contextmanager
def one_line() -> Iterator[None]:
    """A loader's error about a file in one line: torch puts the loader's traceback before it."""
    try:
        yield
    except UnreadableImageError as error:
        text = str(error).strip().rsplit("\n", 1)[-1]
        fault = text.rpartition(f"{UnreadableImageError.__name__}: ")[2]
        raise UnreadableImageError(f"{fault}: --skip-broken leaves such files out") from None


def network(row: ImageRow, data: AnyImages, seed: int) -> ResNet:
    """The untrained network of a row: ImageNet's for images in files, CIFAR's for small ones."""
    torch.manual_seed(seed)
    large = isinstance(data, ImageFolders)
    side = data.train.side if isinstance(data, ImageFolders) else data.train.shape[-1]
    return resnet(
        row.network,
        len(data.classes),
        mechanisms=row.mechanisms,
        stem="imagenet" if large else "cifar",
        size=side,
        zero_init_last=row.zero_init_last,
        **row.sizes,
    )


def decayed_and_not(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups of parameters for an optimizer; norms and biases are not decayed."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def optimizer_of(model: nn.Module, training: ImageTraining) -> torch.optim.Optimizer:
    """SGD with momentum; norms and biases are not decayed."""
    groups = decayed_and_not(model, training.weight_decay)
    return torch.optim.SGD(groups, training.learning_rate, training.momentum, nesterov=training.nesterov)


def schedule_of(
    optimizer: torch.optim.Optimizer, training: ImageTraining
) -> torch.optim.lr_scheduler.LambdaLR | None:
    """The learning rate with drops; None where it is the Trainer's cosine."""
    if not training.drops:
        return None

    def share(update: int) -> float:
        if update < training.warmup:
            return update / training.warmup
        return float(0.1 ** sum(update >= drop for drop in training.drops))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def train(
    folder: Path,
    data: AnyImages,
    row: ImageRow,
    training: ImageTraining,
    seed: int,
    device: str = "auto",
    told: Callable[[int], object] | None = None,
) -> tuple[Classifier, dict[str, Any]]:
    """Train one network; return it in evaluation mode, and the numbers of its training.

    Args:
        folder: of the run, for checkpoints.
        data: the images.
        row: network and mechanisms.
        training: settings.
        seed: of initial weights, batches and crops. The noise of random weights goes by update and image, so
            that it differs through the batches alone.
        device: "cpu", "cuda" or "auto".
        told: called with the number of finished updates after each of them.
    """
    from transformers import set_seed

    epochs = Epochs(len(data.train), training.batch, training.updates, seed, processes(device))
    model = Classifier(network(row, data, seed), data, training.crop).to(torch_device(device))
    optimizer = optimizer_of(model, training)
    set_seed(seed)

    def on_step(step: int) -> None:
        model.step.fill_(step)
        if told is not None:
            told(step)

    numbers = fit(
        model,
        folder,
        Batches(data, epochs),
        training,
        seed,
        device,
        on_step,
        optimizer=optimizer,
        schedule=schedule_of(optimizer, training),
        dataloader_num_workers=loaders(data),
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # the images are among them; norms keep what their process saw
    )
    return model, {**numbers, "parameters": sum(parameter.numel() for parameter in model.net.parameters())}


class Plan(Protocol):
    """What `fit` needs of a training's settings."""

    @property
    def updates(self) -> int:
        """Steps of the optimizer."""

    @property
    def warmup(self) -> int:
        """Updates in which the learning rate rises from 0."""

    @property
    def learning_rate(self) -> float:
        """At its peak."""


def fit(
    model: nn.Module,
    folder: Path,
    batches: Dataset[dict[str, Tensor]],
    training: Plan,
    seed: int,
    device: str,
    on_step: Callable[[int], object],
    **arguments: Any,
) -> dict[str, Any]:
    """Train a model on ready-made batches, put it into evaluation mode, and return the numbers of it.

    Args:
        model: takes a batch as keyword arguments and returns a dict with the loss.
        folder: of the run, for checkpoints.
        batches: of all updates, in order.
        training: settings.
        seed: of the run.
        device: "cpu", "cuda" or "auto".
        on_step: called with the number of finished updates before each.
        arguments: further arguments of `Run`; by default the learning rate falls as a cosine.
    """
    from rich.console import Console

    be_quiet()
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(
        model,
        folder,
        steps=training.updates,
        checkpoints=CHECKPOINTS,
        seed=seed,
        data=batches,
        collate=lambda ready: ready[0],
        console=Console(quiet=True),  # the recipe shows the progress of all trainings
        name=folder.name,
        device=device,
        on_step=on_step,
        in_order=True,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup,
        logging_steps=max(1, training.updates // LOGS),
        **{
            "lr_scheduler_type": "cosine",
            "max_grad_norm": 0.0,
            "bf16": torch_device(device).type == "cuda",
            **arguments,
        },
    )
    if process_number():
        torch.manual_seed(1_000_003 * process_number() + seed)  # other crops than the first process
    with one_line():
        run.train()
    model.eval()
    history = run.trainer.state.log_history
    return {
        "updates": run.trainer.state.global_step,
        "curve": [[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        "step_ms": run.step_ms,
    }


@torch.no_grad()
def logits_of(model: Classifier, images: Tensor | ImageFiles, sample: int | None = None) -> Tensor:
    """Logits (images, classes), float32 on the CPU; under one draw of random weights, if asked."""
    device, parts, start = model.step.device, [], 0
    for batch in in_batches(images):
        numbers = torch.arange(start, start + len(batch), device=device)
        start += len(batch)
        chain = Chain(step=model.step, sample=sample, examples=numbers)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            parts.append(model.net(model.normalised(batch.to(device)), chain).float().cpu())
    return torch.cat(parts)


def in_batches(images: Tensor | ImageFiles) -> Iterator[Tensor]:
    """Images in batches for testing, uint8 (batch, 3, height, width)."""
    if isinstance(images, Tensor):
        yield from (images[start : start + TEST_BATCH] for start in range(0, len(images), TEST_BATCH))
    else:
        with one_line():
            yield from DataLoader(images, TEST_FILES, num_workers=loaders(images))


def accuracies(scores: Tensor, labels: Tensor) -> dict[str, float]:
    """Top-1 and top-5 accuracy in %."""
    best = scores.topk(min(5, scores.shape[1]), dim=1).indices == labels.unsqueeze(1)
    return {
        "top1": 100 * float(best[:, 0].double().mean()),
        "top5": 100 * float(best.any(dim=1).double().mean()),
    }


def measure(model: Classifier, data: AnyImages, samples: int) -> dict[str, float]:
    """Accuracy on the test set, negative log-likelihood and calibration.

    A network with random weights predicts with the mean over `samples` draws; its accuracy with the mean of
    the weights is there too.
    """
    from overt.judge.uncertainty import ece, selective_accuracy

    scores, labels = logits_of(model, data.test), data.test_labels
    if not bool(scores.isfinite().all()):
        raise ValueError("the training diverged: the trained network gives numbers that are not finite")
    found = accuracies(scores, labels)
    probabilities = scores.double().softmax(dim=1)
    random = any(layer.random for layer in model.net.modules() if isinstance(layer, AttentionMap))
    if random:
        found = {f"{name}_of_mean_weights": value for name, value in found.items()}
        drawn = [logits_of(model, data.test, number).double().softmax(dim=1) for number in range(samples)]
        probabilities = torch.stack(drawn).mean(dim=0)
        found |= accuracies(probabilities, labels)
    likelihood = probabilities.gather(1, labels.unsqueeze(1)).clamp(min=1e-12).log()
    half = selective_accuracy(probabilities.numpy(), labels.numpy(), (0.5,))[0.5]
    return {
        **found,
        "nll": -float(likelihood.mean()),
        "ece": 100 * ece(probabilities.numpy(), labels.numpy()),
        "top1_of_certain_half": 100 * half,
    }


def step_times(
    data: AnyImages, row: ImageRow, training: ImageTraining, device: str, updates: int, processes: int = 1
) -> list[float]:
    """Milliseconds of updates, after one that is not timed; of several processes, those of one alone.

    Images in files are decoded before an update begins, as other processes do in a training.
    """
    where = torch_device(device)
    model = Classifier(network(row, data, 0), data, training.crop).to(where).train()
    batches = Batches(data, Epochs(len(data.train), training.batch, updates + 1, 0, processes))

    def batch_of(update: int) -> dict[str, Tensor]:
        with one_line():
            return batches[update * processes]

    return times(model, optimizer_of(model, training), batch_of, where, updates, half=True)


def save(model: Classifier, folder: Path) -> None:
    """Write the network to a folder that `overt.vision.load` reads."""
    mean, std = ((x.flatten() / 255).tolist() for x in (model.mean, model.deviation))
    vision.save(model.net, folder, labels=model.classes, mean=mean, std=std)
