"""Train Att2in on captioned images with the Hugging Face Trainer; write, store and open what it learnt.

The learning rate is halved after epochs whose validation loss did not fall, and the best epoch's weights are
kept. A batch has all captions of its images.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor, nn

from overt._files import write_whole
from overt._modes import evaluating
from overt.data.batching import swapped
from overt.data.captions import PARTS, CaptionData, Captioned
from overt.data.region_features import Regions
from overt.data.vocabulary import Vocabulary, tokenise
from overt.mechanisms.chain import Chain
from overt.mechanisms.losses import Losses
from overt.mechanisms.mechanism import Mechanism
from overt.models.att2in import Att2in
from overt.models.folders import CONFIG
from overt.models.word_by_word import IGNORED
from overt.recipes._rows import settings_of
from overt.recipes._training import in_tf32, times, torch_device
from overt.recipes.regions import (
    PAUSE,
    Encoder,
    Pictures,
    RegionSource,
    encode,
    open_encoder,
    regions_from,
    save_encoder,
    words_held,
)
from overt.recipes.translation_training import fit

VOCABULARY = "vocabulary.json"
LENGTH = 20  # most words of a caption
TEST_BATCH = 250
BEAM = 5
SEARCHES = {"greedy": 1, f"beam_{BEAM}": BEAM}


@dataclass(frozen=True)
class CaptionTraining:
    """Settings of a training, with Adam.

    Attributes:
        updates: most steps of the optimizer.
        batch: images of a batch, each with all its captions.
        learning_rate: at the start; halved after epochs without a lower validation loss.
        dropout: see `Att2in`.
        clip: largest norm of the gradient.
        patience: epochs without a lower validation loss after which training stops.
        length: most words of a caption; of longer ones, the first so many are trained on.
    """

    updates: int
    batch: int = 50
    learning_rate: float = 1e-3
    dropout: float = 0.5
    clip: float = 5.0
    patience: int = 4
    length: int = LENGTH

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)


@dataclass(frozen=True)
class CaptionRow:
    """A row of a table: an attention and its mechanisms.

    Attributes:
        attention: "soft", "hard" or "none".
        mechanisms: of the attention; `rho` of random ones counts epochs.
        shuffled: whether each image's captions have another image's regions.
        arguments: further arguments of `Att2in`.
    """

    attention: Literal["soft", "hard", "none"] = "soft"
    mechanisms: tuple[Mechanism, ...] = ()
    shuffled: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """The row as plain JSON."""
        return {
            "attention": self.attention,
            "mechanisms": settings_of(self.mechanisms),
            "shuffled": self.shuffled,
            "arguments": self.arguments,
        }


@dataclass(frozen=True, eq=False)
class Shared:
    """What all trainings need.

    Attributes:
        data: captions, and images only if encoders are trained further.
        source: of the regions.
        side: height and width of the images; None where there are none.
    """

    data: CaptionData
    source: RegionSource
    side: int | None


def shared_of(data: CaptionData, source: RegionSource) -> Shared:
    """What all trainings need, without the images if the regions are all that is read."""
    side = None if data.images is None else data.images.shape[-1]
    return Shared(data if source.finetune else replace(data, images=None), source, side)


def pictures_of(data: CaptionData) -> Pictures:
    """The images of captions, for `regions.source_of`; the encoder learns the words of training captions."""
    rows = [row for part in PARTS for row in getattr(data, part)]
    names, train = [row.image for row in rows], torch.arange(len(data.train))
    if data.images is None:  # there is nothing that an encoder could learn from
        return Pictures(names, None, train, torch.zeros(len(train), 0), (), data.sha256)
    own = [[word for text in row.captions for word in tokenise(text)] for row in data.train]
    words = data.vocabulary.words
    return Pictures(
        names=names,
        images=data.images,
        train=train,
        held=words_held(own, words),
        words=words,
        sha256=data.sha256,
    )


# --- Captions as tensors ---


@dataclass(frozen=True, eq=False)
class Texts:
    """The captions of a part as tensors.

    Attributes:
        labels: (captions, length + 1), −100 at padding.
        images: (captions,), the number of each caption's image among all images.
        rows: numbers of the captions of each image of the part.
    """

    labels: Tensor
    images: Tensor
    rows: list[list[int]]

    def batch(self, images: Sequence[int], device: torch.device | None = None) -> dict[str, Tensor]:
        """All captions of some images of the part, by their numbers in it, without needless padding."""
        numbers = torch.tensor([number for image in images for number in self.rows[image]])
        labels = self.labels[numbers]
        longest = int((labels != IGNORED).sum(dim=1).max())
        made = {"images": self.images[numbers], "labels": labels[:, :longest], "examples": numbers}
        return {name: value.to(device) for name, value in made.items()}


def texts_of(data: CaptionData, part: str, length: int) -> Texts:
    """The captions of a part."""
    captioned: list[Captioned] = getattr(data, part)
    before = sum(len(getattr(data, name)) for name in PARTS[: PARTS.index(part)])
    numbers, counts = data.vocabulary.captions([text for row in captioned for text in row.captions], length)
    rows, images = list[list[int]](), list[int]()
    for place, row in enumerate(captioned):
        rows.append(list(range(len(images), len(images) + len(row.captions))))
        images += [before + place] * len(row.captions)
    return Texts(numbers.masked_fill(~counts, IGNORED), torch.tensor(images), rows)


class Batches:
    """Batches of images with all their captions, for `translation_training.fit`.

    The same in each epoch, they are made once, and kept on `device`.
    """

    processes = 1

    def __init__(self, texts: Texts, size: int, seed: int, device: torch.device | None = None) -> None:
        order = list(range(len(texts.rows)))
        Random(seed).shuffle(order)
        self.texts, self.device = texts, device
        self.parts = [order[start : start + size] for start in range(0, len(order), size)]
        self.made: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, place: tuple[int, int]) -> dict[str, Tensor]:
        """A batch, by the numbers of `translation_training.Schedule`."""
        number = place[0]
        if number not in self.made:
            self.made[number] = self.texts.batch(self.parts[number], self.device)
        return dict(self.made[number])


def shuffled(data: CaptionData, seed: int) -> Tensor:
    """For each image, in all parts, the number of another one of the same part."""
    found, before = [], 0
    for part in PARTS:
        count = len(getattr(data, part))
        found.append(before + swapped(count, seed))
        before += count
    return torch.cat(found)


# --- Training ---


class Captioner(nn.Module):
    """Att2in with the regions of all images, which its inputs are numbers of.

    Args:
        net: the network.
        regions: of all images, (images, regions, features).
        encoder: where it is trained, too; the regions are then those that it makes of `pixels`. Its norms
            keep the statistics that they have.
        pixels: uint8 (images, 3, height, width), with an encoder.
        other: (images,), whose regions each image has; None for its own.
        seed: of the noise in training.
    """

    features: Tensor
    real: Tensor
    pixels: Tensor | None
    other: Tensor | None

    def __init__(
        self,
        net: Att2in,
        regions: Regions,
        encoder: Encoder | None = None,
        pixels: Tensor | None = None,
        other: Tensor | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.net, self.encoder, self.seed = net, encoder, seed
        self.whole = bool(regions.real.all())  # so that masks, which take time, are not needed
        kept = {"features": regions.features if encoder is None else None, "real": regions.real}
        for name, tensor in {**kept, "pixels": pixels, "other": other}.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def overt_losses(self) -> Losses | None:
        """Of the last batch, for the log."""
        return self.net.overt_losses

    def regions(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Regions (batch, regions, features) of images by their numbers, and which are real; None for all."""
        images = images if self.other is None else self.other[images]
        real = None if self.whole else self.real[images]
        if self.encoder is None:
            return self.features[images].float(), real
        assert self.pixels is not None
        each, place = torch.unique(images, return_inverse=True)  # an image has several captions
        with evaluating(self.encoder):
            made = regions_from(self.encoder, self.pixels[each])
        return made[place], real

    def forward(self, images: Tensor, labels: Tensor, examples: Tensor, **ignored: Any) -> dict[str, Tensor]:
        """Loss and log-probabilities of captions, as `Att2in.forward` gives them.

        Args:
            images: (captions,), numbers of their images.
            labels: (captions, words), −100 at padding.
            examples: (captions,), their numbers, which address the noise.
            ignored: what else the Trainer passes.
        """
        del ignored
        regions, real = self.regions(images)
        chain = Chain(step=self.net.step, examples=examples, seed=self.seed)
        # The texts were made for this network, and are not looked at again.
        return self.net(regions, real, labels, chain=chain, check=False)  # type: ignore[no-any-return]


def by_epoch(mechanisms: Sequence[Mechanism], per_epoch: int) -> list[Mechanism]:
    """Mechanisms whose λ = sigmoid(ρ·t) counts t in epochs, as in the authors' code, rather than in steps."""
    found = []
    for each in mechanisms:
        rho = getattr(each, "rho", None)
        found.append(each if rho is None else replace(each, rho=rho / per_epoch))  # type: ignore[type-var]
    return found


def model_of(
    row: CaptionRow,
    shared: Shared,
    training: CaptionTraining,
    seed: int,
    kind: type[Captioner] = Captioner,
) -> Captioner:
    """The untrained network of a row, with its regions."""
    data, source = shared.data, shared.source
    regions = source.regions(seed)
    torch.manual_seed(seed)
    net = Att2in(
        len(data.vocabulary),
        regions.features.shape[-1],
        row.attention,
        by_epoch(row.mechanisms, -(-len(data.train) // training.batch)),
        dropout=training.dropout,
        **row.arguments,
    )
    other = shuffled(data, seed) if row.shuffled else None
    if not source.finetune or row.attention == "none":
        return kind(net, regions, other=other, seed=seed)
    return kind(net, regions, source.network(seed), data.images, other, seed)


def train(
    folder: Path,
    shared: Shared,
    row: CaptionRow,
    training: CaptionTraining,
    seed: int,
    device: str = "auto",
    told: Callable[[int], object] | None = None,
    make: Callable[..., Captioner] = model_of,
) -> tuple[Captioner, dict[str, Any]]:
    """Train one network; return it with the best epoch's weights, in evaluation mode, and its numbers.

    Args:
        folder: of the run: checkpoints, the best epoch's weights, validation losses.
        shared: captions and regions.
        row: attention and mechanisms.
        training: settings.
        seed: of initial weights, batches, dropout and noise.
        device: "cpu", "cuda" or "auto".
        told: called with the number of finished updates after each of them.
        make: makes the network, as `model_of`.
    """
    from transformers import set_seed

    where = torch_device(device)
    model = make(row, shared, training, seed).to(where)
    texts = texts_of(shared.data, "train", training.length)
    held_out = texts_of(shared.data, "validation", training.length)
    set_seed(seed)
    numbers = fit(
        model,
        folder,
        Batches(texts, training.batch, seed, where),
        lambda _: loss_of(model, held_out),
        training,
        None,
        seed,
        device,
        told,
        on_step=lambda step: model.net.step.fill_(step),
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=training.clip,
        pause=PAUSE,
        graphs=model.encoder is None,  # which would wait for the GPU to tell images apart
        **in_tf32(device),
    )
    numbers["parameters"] = sum(parameter.numel() for parameter in model.net.parameters())
    return model, numbers


@torch.no_grad()
def loss_of(model: Captioner, texts: Texts) -> float:
    """Mean negative log-likelihood of a word, with the mean of random weights."""
    device, count = model.net.step.device, 0
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(model):
        for start in range(0, len(texts.rows), TEST_BATCH):
            batch = texts.batch(range(len(texts.rows))[start : start + TEST_BATCH])
            count += int((batch["labels"] != IGNORED).sum())
            output = model(**{name: value.to(device) for name, value in batch.items()})
            total = total - output["log_probs"].double().sum()
    return float(total) / count


def step_times(
    shared: Shared, row: CaptionRow, training: CaptionTraining, seed: int, device: str, updates: int = 3
) -> list[float]:
    """Milliseconds of updates, after one that is not timed."""
    where = torch_device(device)
    model = model_of(row, shared, training, seed).to(where).train()
    batches = Batches(texts_of(shared.data, "train", training.length), training.batch, seed)
    optimizer = torch.optim.Adam(model.parameters(), training.learning_rate)
    # One batch, since each shape of a batch has a graph of its own, which takes a while to record.
    graphs = model.encoder is None
    return times(model, optimizer, lambda _: batches[0, 0], where, updates, graphs=graphs)


@torch.no_grad()
def written(
    model: Captioner, data: CaptionData, part: str, beam: int, length: int, sample: int | None = None
) -> list[str]:
    """A caption of each image of a part.

    Args:
        model: trained.
        data: the captions.
        part: "train", "validation" or "test".
        beam: hypotheses of the beam search; 1 is greedy.
        length: most words.
        sample: which draw of random weights; None for their mean.
    """
    before = sum(len(getattr(data, name)) for name in PARTS[: PARTS.index(part)])
    device = model.net.step.device
    numbers = torch.arange(before, before + len(getattr(data, part)), device=device)
    texts = []
    with evaluating(model):
        for images in torch.split(numbers, TEST_BATCH):
            regions, real = model.regions(images)
            found, _ = model.net.caption(
                regions,
                real,
                beam,
                max_length=length + 1,
                never=[data.vocabulary.unknown],
                sample=sample,
                examples=images.cpu(),
            )
            texts += [data.vocabulary.decode(row) for row in found.tolist()]
    return texts


def measure(
    model: Captioner, data: CaptionData, training: CaptionTraining
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Captions of the test images by both searches, and the likelihood of those that people wrote."""
    texts = {name: written(model, data, "test", beam, training.length) for name, beam in SEARCHES.items()}
    loss = loss_of(model, texts_of(data, "test", training.length))
    return texts, {"test_loss": loss, "perplexity": math.exp(loss)}


# --- Folders ---


@dataclass(frozen=True, eq=False)
class CaptionModel:
    """What writes captions of image files.

    Attributes:
        net: the network.
        encoder: image → regions.
        vocabulary: its words.
        side: height and width that images are brought to.
        length: most words of a caption.
        name: of the row and the data that it was trained on.
    """

    net: Att2in
    encoder: Encoder
    vocabulary: Vocabulary
    side: int
    length: int
    name: str

    def regions(self, pixels: Tensor) -> Tensor:
        """Regions (1, regions, width) of an image, uint8 (3, side, side)."""
        return encode(self.encoder, pixels.unsqueeze(0)).float()


def save(
    model: Captioner, shared: Shared, row: str, seed: int, training: CaptionTraining, folder: Path
) -> None:
    """Write the network, its vocabulary and its encoder to a folder that `load` opens."""
    data = shared.data
    encoder = model.encoder or shared.source.network(seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.net.save(folder)
    if encoder is not None:
        save_encoder(encoder.cpu(), folder / "encoder")
    card = {
        "words": list(data.vocabulary.words),
        "length": training.length,
        "side": shared.side,
        "name": f"{row}, {data.name}",
    }
    write_whole(folder / VOCABULARY, json.dumps(card, ensure_ascii=False))


def load(folder: str | Path) -> CaptionModel:
    """What `save` wrote, in evaluation mode on the CPU."""
    folder = Path(folder)
    net = Att2in.load(folder)
    path = folder / VOCABULARY
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {VOCABULARY}: give a folder that bam-table-3 wrote")
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
        vocabulary, length = Vocabulary(tuple(card["words"])), int(card["length"])
        side, name = card["side"], str(card["name"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f'{path} must hold {{"words": […], "length": …}}: is it complete?') from None
    if net.settings["vocabulary"] != len(vocabulary):
        raise ValueError(
            f"{path} does not fit {CONFIG}: it has {len(vocabulary)} ids, the network "
            f"{net.settings['vocabulary']}"
        )
    if not (folder / "encoder").is_dir() or side is None:
        raise ValueError(
            f"{folder} cannot read image files, since it holds no encoder: either it was trained on given "
            f"features, or its folder {folder / 'encoder'} has been removed"
        )
    return CaptionModel(net, open_encoder(folder / "encoder"), vocabulary, int(side), length, name)
