"""Regions of images for attention to read: from an encoder trained here, from another network, or from files.

Overt's own encoder is trained once per seed, without attention, to tell which words the captions or answers
of a training image hold. It is then frozen, and the regions of all images are stored: whatever the attention
of a row is, it reads the same regions. `--encoder` takes a network that is trained already, and `--features`
takes published features.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt import vision
from overt._extras import need
from overt._files import write_tensors
from overt._workers import Tell, Throttled
from overt.data.batching import Epochs, Numbers
from overt.data.region_features import RegionFeatures, Regions
from overt.models import image_encoder, resnet
from overt.models.folders import CONFIG, WEIGHTS
from overt.models.image_encoder import STRIDE, ImageEncoder, words_loss
from overt.models.resnet import ResNet
from overt.recipes import vision_training
from overt.recipes._recipe import Option, Request
from overt.recipes._rows import Task, look_up, stored_result
from overt.recipes._runs import earlier_result, finish_run, read_settings, run_record
from overt.recipes._training import (
    hardware,
    is_main_process,
    one_thread,
    processes,
    times,
    torch_device,
    versions,
)
from overt.recipes.vision_training import augmented

CACHE = "regions.safetensors"
BATCH_OF_IMAGES = 256  # when regions are made
EPOCHS = 40
PAUSE = 60.0  # seconds that lie between two checkpoints of a training at least
SIZES: dict[str, Any] = {}  # arguments of `ImageEncoder` other than its defaults
Encoder = ImageEncoder | ResNet
OPTIONS = {
    "encoder": Option("folder of a trained network that makes the regions, rather than training one"),
    "encoder-epochs": Option("epochs of the encoder's training", EPOCHS, least=1),
    "features": Option("folder with published region features (npz files, or one h5 file)"),
    "finetune": Option("go on training the encoder in each row", False),
}


@dataclass(frozen=True, eq=False)
class Pictures:
    """The images of a data set, and the words that its encoder learns from.

    Attributes:
        names: of all images.
        images: uint8 (images, 3, height, width); None where features of them are given instead.
        train: int64, numbers of the training images.
        held: boolean (training images, words), which words the captions or answers of an image hold.
        words: names of the words.
        sha256: of the data.
    """

    names: Sequence[str]
    images: Tensor | None
    train: Tensor
    held: Tensor
    words: tuple[str, ...]
    sha256: str


def words_held(texts: Sequence[Iterable[str]], words: Sequence[str]) -> Tensor:
    """Which of the words each image's own words hold, boolean (images, words); others do not count."""
    numbers = {word: number for number, word in enumerate(words)}
    held = torch.zeros(len(texts), len(words), dtype=torch.bool)
    for row, own in enumerate(texts):
        for word in own:
            if word in numbers:
                held[row, numbers[word]] = True
    return held


# --- Training the encoder ---


@dataclass(frozen=True)
class EncoderTraining:
    """Settings of the encoder's training, with AdamW.

    Attributes:
        updates: steps of the optimizer.
        warmup: updates in which the learning rate rises from 0; it then falls as a cosine.
        batch: images of a batch.
        learning_rate: at its peak.
        weight_decay: of all weights but those of norms and biases.
        crop: pixels of padding from which crops are taken; half of all images are mirrored.
    """

    updates: int
    warmup: int
    batch: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    crop: int = 8

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class EncoderRow:
    """The encoder of a data set.

    Attributes:
        words: how many it learns.
        sizes: arguments of `ImageEncoder` other than its defaults.
        held: SHA-256 of the words and of which image holds which.
    """

    words: int
    sizes: dict[str, Any]
    held: str

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return {"words": self.words, "sizes": json.loads(json.dumps(self.sizes)), "held": self.held}


class Learner(nn.Module):
    """The encoder with the images that it is trained on, which its inputs are numbers of."""

    images: Tensor
    held: Tensor

    def __init__(self, net: ImageEncoder, images: Tensor, held: Tensor, crop: int) -> None:
        super().__init__()
        self.net, self.crop = net, crop
        for name, tensor in (("images", images), ("held", held)):
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, numbers: Tensor, **ignored: Any) -> dict[str, Tensor]:
        """The loss of a batch of training images, by their numbers."""
        del ignored
        images = augmented(self.images[numbers], self.crop, mirrored=True)
        return {"loss": words_loss(self.net(images), self.held[numbers])}


def plan(count: int, epochs: int) -> EncoderTraining:
    """Settings of a training on so many images."""
    batch = min(EncoderTraining.batch, count)
    updates = epochs * Epochs(count, batch, 1, 0).per_epoch
    return EncoderTraining(updates, updates // 10, batch)


def learner(row: EncoderRow, pictures: Pictures, training: EncoderTraining, seed: int) -> Learner:
    """The untrained encoder with its images."""
    assert pictures.images is not None
    torch.manual_seed(seed)
    net = ImageEncoder(row.words, **row.sizes)
    net.word_names = list(pictures.words)
    return Learner(net, pictures.images[pictures.train], pictures.held, training.crop)


def optimizer_of(model: nn.Module, training: EncoderTraining) -> torch.optim.Optimizer:
    """AdamW; norms and biases are not decayed."""
    groups = vision_training.decayed_and_not(model, training.weight_decay)
    return torch.optim.AdamW(groups, training.learning_rate)


def train_encoder(task: Task, shared: Pictures, tell: Tell) -> dict[str, Any]:
    """Train the encoder, and store it and the regions of all images in the task's folder."""
    told, training = Throttled(tell), task.training
    device = torch_device(task.device)
    model = learner(task.row, shared, training, task.seed).to(device)
    batches = Numbers(Epochs(len(shared.train), training.batch, training.updates, task.seed))
    optimizer = optimizer_of(model, training)
    numbers = vision_training.fit(
        model, task.folder, batches, training, task.seed, task.device, told, optimizer=optimizer, pause=PAUSE
    )
    told.rest(training.updates)
    numbers["parameters"] = sum(parameter.numel() for parameter in model.net.parameters())
    numbers["loss"] = numbers["curve"][-1][1] if numbers["curve"] else None
    model.net.cpu().save(task.folder / "model")
    _store(model.net.to(device), shared, task.folder)
    numbers["run"] = run_record(task.settings, task.command, hardware(task.device), versions())
    finish_run(task.folder, numbers)
    return stored_result(task.folder)


def fastest_update(task: Task, pictures: Pictures) -> float:
    """Milliseconds of an update of the encoder, the fastest of three."""
    where = torch_device(task.device)
    some = replace(
        pictures, train=pictures.train[: task.training.batch], held=pictures.held[: task.training.batch]
    )
    model = learner(task.row, some, task.training, 0).to(where)
    numbers = torch.arange(len(some.train), device=where)
    optimizer = optimizer_of(model, task.training)
    return min(times(model, optimizer, lambda _: {"numbers": numbers}, where, 3, half=True))


# --- Regions ---


def open_encoder(folder: Path) -> Encoder:
    """A trained network that makes regions: one of `ImageEncoder.save`, or of a vision recipe."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind = settings.get("model_type") if isinstance(settings, dict) else None
    except (OSError, ValueError):
        kind = None
    if kind == image_encoder.MODEL_TYPE:
        return ImageEncoder.load(folder)
    if kind == resnet.MODEL_TYPE:
        net = vision.load(folder)
        if net.mean is None or net.in_chans != 3:
            raise ValueError(f"{folder} must hold a network of colour images, with their mean and std")
        return net
    inside = f": {folder / 'model'} is one" if (folder / "model" / CONFIG).is_file() else ""
    raise ValueError(
        f"{folder} must be a folder of a network of a vision recipe ({resnet.MODEL_TYPE}), or of an image "
        f"encoder ({image_encoder.MODEL_TYPE}), got {kind or 'none'}{inside}"
    )


def save_encoder(net: Encoder, folder: Path) -> None:
    """Write a network to a folder that `open_encoder` reads."""
    if isinstance(net, ImageEncoder):
        net.save(folder)
    else:
        vision.save(net, folder)


def regions_from(net: Encoder, images: Tensor) -> Tensor:
    """Regions of images, (batch, regions, width), row by row.

    A ResNet's are those of its last stage with a stride of at most 16, averaged to one for 16×16 pixels. One
    with attention sees larger images than it was made for at its own size.

    Args:
        net: of `open_encoder`.
        images: uint8 (batch, 3, height, width), with sides that are multiples of 16.
    """
    if isinstance(net, ImageEncoder):
        return net.regions(images)
    height, width = images.shape[-2:]
    if height % STRIDE or width % STRIDE:
        raise ValueError(f"sides of images must be multiples of {STRIDE}, got {height}×{width}")
    x = net.normalised(images)
    if net.attentions and (height > net.size[0] or width > net.size[1]):
        x = F.interpolate(x, net.size, mode="bilinear", antialias=True)
    stage = max(number for number, info in enumerate(net.feature_info) if info["reduction"] <= STRIDE)
    (cells,) = net.forward_intermediates(x, [stage], stop_early=True, intermediates_only=True)
    grid = min(cells.shape[-2], height // STRIDE), min(cells.shape[-1], width // STRIDE)
    pooled: Tensor = F.adaptive_avg_pool2d(cells, grid)
    return pooled.flatten(2).transpose(1, 2)


@torch.no_grad()
def encode(net: Encoder, images: Tensor) -> Tensor:
    """Regions of all images, float16 (images, regions, width) on the CPU; the network must be in evaluation.

    Args:
        net: of `open_encoder`.
        images: uint8 (images, 3, height, width).
    """
    device = next(net.parameters()).device
    found = [regions_from(net, part.to(device)).half().cpu() for part in torch.split(images, BATCH_OF_IMAGES)]
    regions = torch.cat(found)
    if not bool(regions.isfinite().all()):
        raise ValueError("the encoder's regions must be finite in float16, and some are not")
    return regions


def _store(net: Encoder, pictures: Pictures, folder: Path) -> None:
    """Write the regions of all images to a folder."""
    assert pictures.images is not None
    regions = encode(net.eval(), pictures.images)
    _write(folder, Regions(regions, torch.ones(regions.shape[:2], dtype=torch.bool)))


def _write(folder: Path, regions: Regions) -> None:
    write_tensors(folder / CACHE, {"features": regions.features.half(), "real": regions.real})


class RegionSource(NamedTuple):
    """Where the regions of a data set's images are stored.

    Attributes:
        place: folder of the runs of an encoder, or of the regions where no encoder is trained here.
        trained: whether each seed has an encoder of its own.
        encoder: folder of a given encoder.
        settings: what the regions depend on besides data and seed, as plain JSON; part of the settings of
            all that is trained on them.
        per_image: regions of an image, real or not.
        finetune: whether rows go on training the encoder.
    """

    place: Path
    trained: bool
    encoder: Path | None
    settings: dict[str, Any]
    per_image: int
    finetune: bool = False

    def folder(self, seed: int) -> Path:
        """With the regions of a seed."""
        return self.place / f"seed-{seed}" if self.trained else self.place

    def regions(self, seed: int) -> Regions:
        """Of all images: float16 (images, regions, width), and which are real, (images, regions)."""
        from safetensors.torch import load_file

        tensors = load_file(self.folder(seed) / CACHE)
        return Regions(tensors["features"], tensors["real"])

    def encoder_hash(self, seed: int) -> str | None:
        """SHA-256 of the weights of an encoder that was trained for a seed; None where regions are given.

        Trained again, with the same settings on another machine, it is not quite the same.
        """
        if not self.trained:
            return None
        return hashlib.sha256((self.folder(seed) / "model" / WEIGHTS).read_bytes()).hexdigest()

    def network(self, seed: int) -> Encoder | None:
        """The encoder of a seed, in evaluation mode on the CPU; None where the regions were given."""
        folder = self.folder(seed) / "model" if self.trained else self.encoder
        return None if folder is None else open_encoder(folder)


def source_of(request: Request, pictures: Pictures, recipe: str) -> RegionSource:
    """Where the regions that a request asks for are; given features, and those of a given encoder, are made.

    Encoders of our own are trained by `train_encoders`, once it is known which seeds need them.

    Args:
        request: with the options `OPTIONS`, and `workers`.
        pictures: the data.
        recipe: for errors.
    """
    need("accelerate", "vision")
    if processes(request.device) > 1:
        raise ValueError(
            f"{recipe} trains each network in one process, and several side by side (--workers): start it "
            "without accelerate launch"
        )
    options, place = request.options, request.out
    given = [name for name in ("encoder", "features") if options[name] is not None]
    if len(given) == 2:
        raise ValueError("--encoder and --features exclude each other: regions come from one of them")
    if options["features"] is not None and options["finetune"]:
        raise ValueError("--finetune needs an encoder, and --features are there in its place")
    if given and options["encoder-epochs"] != EPOCHS:
        raise ValueError(f"--encoder-epochs is for an encoder that is trained here, not with --{given[0]}")
    if not given:
        return _to_be_trained(request, pictures)
    path = Path(options[given[0]])
    if given == ["features"]:
        made = partial(_read_features, path, pictures)
        settings: dict[str, Any] = {"features": _digest_of_features(path)}
    else:
        net = open_encoder(path)
        made = partial(_encode_with, net, pictures, request.device)
        digest = hashlib.sha256((path / CONFIG).read_bytes() + (path / WEIGHTS).read_bytes())
        settings = {"encoder": digest.hexdigest()}
    folder = place / f"given-{given[0]}"  # "encoder" holds those that are trained here
    own = {"data": pictures.sha256, **settings}
    if earlier_result(folder, own, request.fresh) is None or not _cached(folder):
        request.console.print(f"[dim]regions of {len(pictures.names):,} images from {path}[/dim]")
        _write(folder, made())
        finish_run(folder, {"images": len(pictures.names)})
    encoder = None if given == ["features"] else path
    source = RegionSource(folder, False, encoder, settings, 0, bool(options["finetune"]))
    return source._replace(per_image=source.regions(0).real.shape[1])


class _Plan(NamedTuple):
    """How encoders are trained: which, what the settings of all share, and for how long."""

    row: EncoderRow
    common: dict[str, Any]
    training: EncoderTraining


def _plan_of(request: Request, pictures: Pictures) -> _Plan:
    training = plan(len(pictures.train), request.options["encoder-epochs"])
    digest = hashlib.sha256("\n".join(pictures.words).encode() + pictures.held.numpy().tobytes())
    digest.update(pictures.train.numpy().tobytes())
    row = EncoderRow(len(pictures.words), SIZES, digest.hexdigest())
    precision = "bfloat16" if torch_device(request.device).type == "cuda" else "float32"
    return _Plan(
        row, {"data": pictures.sha256, "training": training.settings(), "precision": precision}, training
    )


def _to_be_trained(request: Request, pictures: Pictures) -> RegionSource:
    if pictures.images is None:
        raise ValueError("the data have no images: give --features, the features of their regions")
    row, common, _ = _plan_of(request, pictures)
    height, width = pictures.images.shape[-2:]
    return RegionSource(
        request.out / "encoder",
        True,
        None,
        {"trained": {**common, "row": row.settings()}},
        (height // STRIDE) * (width // STRIDE),
        bool(request.options["finetune"]),
    )


def train_encoders(
    request: Request, pictures: Pictures, source: RegionSource, seeds: Collection[int]
) -> None:
    """Train the encoders of seeds that are not there, and store their regions; nothing if they were given.

    Args:
        request: as for `source_of`.
        pictures: the data.
        source: from `source_of`.
        seeds: those whose regions are needed.
    """
    if not source.trained:
        return
    row, common, training = _plan_of(request, pictures)
    # Numbers of a result file would not do, and encoders with the same settings are not trained again.
    differs = any(
        _differs(source.folder(seed), {**common, "row": row.settings(), "seed": seed}) for seed in seeds
    )
    alone = replace(request, stored={}, elsewhere=(), fresh=request.fresh and differs)
    device = torch_device(request.device).type
    # The folder of a row that is called "encoder".
    known = look_up(alone, {"encoder": row}, ["encoder"], request.out, common, training, device)
    known.tasks = [task for task in known.tasks if task.seed in seeds]
    known.fill(
        alone,
        pictures,
        train_encoder,
        milliseconds=lambda task: fastest_update(task, pictures),
        line=lambda numbers: f"loss {numbers['loss']:.2f}",
        prepare=one_thread,
        together=False,
    )
    for seed in seeds:
        if not _cached(source.folder(seed)) and is_main_process():
            net = open_encoder(source.folder(seed) / "model").to(torch_device(request.device))
            _store(net, pictures, source.folder(seed))


def _differs(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a folder has a run with other settings."""
    return read_settings(folder) not in (None, settings)


def _cached(folder: Path) -> bool:
    return (folder / CACHE).is_file()


def _encode_with(net: Encoder, pictures: Pictures, device: str) -> Regions:
    if pictures.images is None:
        raise ValueError("the data have no images for --encoder")
    regions = encode(net.to(torch_device(device)), pictures.images)
    return Regions(regions, torch.ones(regions.shape[:2], dtype=torch.bool))


def _read_features(path: Path, pictures: Pictures) -> Regions:
    features = RegionFeatures(path)
    try:
        found = features.read(pictures.names, dtype=torch.float16)
    finally:
        features.close()
    if not all(bool(part.isfinite().all()) for part in torch.split(found.features, BATCH_OF_IMAGES)):
        raise ValueError(f"features of {path} must be finite in float16, and some are not")
    most = int(found.real.sum(dim=1).max())  # no more padding than is needed
    return Regions(found.features[:, :most].contiguous(), found.real[:, :most].contiguous())


def _digest_of_features(path: Path) -> str:
    """Of the files' names, sizes and times of change: their contents may be a hundred gigabytes."""
    if not path.exists():
        raise FileNotFoundError(f"--features must be a folder of npz files, or an h5 file, got {path}")
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files]
    listed = "\n".join(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in stats)
    return hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()
