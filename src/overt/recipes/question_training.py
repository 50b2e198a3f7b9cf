"""Train MCAN to answer questions about images, and measure its answers and their uncertainty.

Questions, and the regions of all images, stay on the device; the inputs are numbers of questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import overt
from overt import _check
from overt._files import write_whole
from overt._predictions import summarize
from overt.data.batching import Epochs, Numbers, swapped
from overt.data.questions import Asked, QuestionData, kinds
from overt.data.region_features import Regions
from overt.data.vocabulary import PADDING
from overt.judge.uncertainty import ece, p_values, selective_accuracy
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.chain import Chain
from overt.models.mcan import MCAN, NoiseWay, feature_deviation, feature_noise
from overt.recipes._rows import settings_of
from overt.recipes._training import in_tf32, short_products, times, torch_device
from overt.recipes.regions import PAUSE, Encoder, RegionSource, encode, regions_from, save_encoder
from overt.recipes.vision_training import fit

LENGTH = 14  # words of a question that are read
ENCODER = "encoder"  # folder in that of a model
IMAGE = "image.json"  # height and width of the images that the encoder sees
SAMPLES = 20  # passes with dropout on, as published
THRESHOLDS = (0.01, 0.05, 0.1)  # of p-values
COVERAGE = (0.5, 0.8)
TEST_REGIONS = {"cpu": 2**14, "cuda": 2**17}  # of all passes that run at once
TEST_STEPS = 2**30  # steps of the noise in testing, above all of training
PUBLISHED_BATCH = 64  # questions of a batch that the paper's loss is summed over
Sees = Literal["image", "nothing", "another"]


@dataclass(frozen=True)
class QuestionTraining:
    """Settings of a training, and of its network.

    Attributes:
        updates: steps of Adam.
        warmup: updates in which the learning rate rises to its peak.
        batch: questions of a batch.
        learning_rate: at its peak.
        drops: updates from which on the learning rate is a fifth, as published.
        betas: of Adam, as published, like `eps`.
        eps: of Adam.
        network: arguments of `MCAN`.
        noise: standard deviation of noise on the features in training, in their own units, as published.
    """

    updates: int
    warmup: int
    batch: int
    learning_rate: float
    drops: tuple[int, ...]
    network: Mapping[str, Any]
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-9
    noise: float = 0.0

    def settings(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            **asdict(self),
            "drops": list(self.drops),
            "betas": list(self.betas),
            "network": dict(self.network),
        }


@dataclass(frozen=True)
class QuestionRow:
    """A row of a table: attention, and what is seen.

    Attributes:
        mechanism: random weights as published: λ goes by epochs, and the KL stands beside a loss that is
            summed over a batch of 64.
        sees: the image; "nothing", regions of zeros; or "another" image, the same in every epoch.
        beside: the loss that the KL's weight is for: a "sum" over the published batch, or a "mean".
    """

    mechanism: Bayesian | None = None
    sees: Sees = "image"
    beside: Literal["sum", "mean"] = "sum"

    def __post_init__(self) -> None:
        _check.one_of("sees", self.sees, get_args(Sees))

    def settings(self) -> dict[str, Any]:
        """The row as plain JSON."""
        mechanisms = [] if self.mechanism is None else [self.mechanism]
        settings = {"mechanisms": settings_of(mechanisms), "sees": self.sees, "beside": self.beside}
        # Once, samples of a question in a pass dropped the same weights on a GPU: to be measured again.
        return settings if self.mechanism is None else {**settings, "dropout": "each sample's own"}

    def mechanisms(self, per_epoch: int) -> list[Bayesian]:
        """The mechanisms for a loss that is a mean over the batch, and for λ by updates.

        Beside a sum, the KL is divided by the published number of questions, whatever the number here: what
        is minimised does not depend on it. λ = sigmoid(rho · epoch), where the epoch is a fraction between
        two of them.
        """
        if self.mechanism is None:
            return []
        rho, weight = self.mechanism.rho, self.mechanism.kl_weight
        return [
            replace(
                self.mechanism,
                rho=None if rho is None else rho / per_epoch,
                kl_weight=weight / PUBLISHED_BATCH if self.beside == "sum" else weight,
            )
        ]


class Questions(NamedTuple):
    """Questions as a network takes them.

    Attributes:
        words: int64 (questions, length), padded.
        images: int64 (questions,), numbers of their images.
        targets: float32 (questions, answers), how right each answer is.
        credits: float32 (questions, answers), the accuracy of each answer.
        kinds: kind → boolean (questions,).
    """

    words: Tensor
    images: Tensor
    targets: Tensor
    credits: Tensor
    kinds: dict[str, Tensor]

    def some(self, part: slice) -> Questions:
        """A part of them, without their kinds."""
        words, images, targets, credits, _ = self
        return Questions(words[part], images[part], targets[part], credits[part], {})


def encoded(data: QuestionData, rows: Sequence[Asked]) -> Questions:
    """Rows of a data set as tensors."""
    words = data.vocabulary.questions([row.question for row in rows], LENGTH)
    return Questions(words, data.image_numbers(rows), data.targets(rows), data.credits(rows), kinds(rows))


def without_needless_padding(words: Tensor) -> Tensor:
    """Padded questions, (questions, length), as wide as the longest of them."""
    return words[:, : int((words != PADDING).sum(dim=1).max())]


def shown(questions: Questions, sees: Sees, seed: int) -> Questions:
    """Questions about the image that a row sees: another one of the same part, if it is to be another.

    All questions about an image are asked about the same other image.
    """
    if sees != "another":
        return questions
    own = torch.unique(questions.images)
    another = own[swapped(len(own), seed)]
    return questions._replace(images=another[torch.searchsorted(own, questions.images)])


class Answering(nn.Module):
    """MCAN with the questions that it is trained on, and the regions of all images.

    All of these are checked here, so that no update waits for a GPU to check its batch.

    Args:
        net: the network.
        regions: of all images, by their numbers.
        questions: for training.
        row: what is seen.
        noise: as in `QuestionTraining`.
        seed: of that noise, and of the attention's.
        encoder: goes on learning, and makes regions anew; None for the regions that are given.
        pixels: of all images, uint8 (images, 3, height, width), for the encoder.

    Attributes:
        update: number of finished updates (`at_update`).
        deviation: of the features (`deviation_of`), once it is known.
    """

    features: Tensor
    real: Tensor
    words: Tensor
    images: Tensor
    targets: Tensor
    pixels: Tensor | None

    def __init__(
        self,
        net: MCAN,
        regions: Regions,
        questions: Questions,
        row: QuestionRow,
        noise: float = 0.0,
        seed: int = 0,
        encoder: Encoder | None = None,
        pixels: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.net, self.seed, self.encoder = net, seed, encoder
        self.update = 0
        self.deviation: float | None = None
        self.noise = 0.0 if row.sees == "nothing" else noise
        features = torch.zeros_like(regions.features) if row.sees == "nothing" else regions.features
        words = without_needless_padding(questions.words)
        net.check_values(words, words != PADDING, regions.real, questions.targets)
        # Where no image has padding, there is no need for masks, which take time.
        self.whole = bool(regions.real.all()) and not self.noise
        tensors = {"features": features, "real": regions.real, "words": words}
        tensors |= {"images": questions.images, "targets": questions.targets}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("pixels", None if encoder is None else pixels, persistent=False)

    @property
    def repeats(self) -> bool:
        """Whether all updates are the same operations on the GPU: noise as published is made on the CPU."""
        return self.encoder is None and not self.noise

    def at_update(self, update: int) -> None:
        """Set the number of finished updates, which addresses all noise.

        Beside the network's own it is a number here, since to read that from a GPU would wait for the GPU.
        """
        self.update = update
        self.net.step.fill_(update)

    def train(self, mode: bool = True) -> Self:
        """Training mode, but for the encoder, whose norms keep their statistics."""
        super().train(mode)
        if self.encoder is not None:
            self.encoder.eval()
        return self

    def forward(self, numbers: Tensor, **ignored: Any) -> dict[str, Tensor]:
        """The loss of a batch, by the numbers of its questions."""
        del ignored
        images = self.images[numbers]
        inputs: dict[str, Any] = self.inputs(self.words[numbers], images)
        if self.noise:
            inputs = self.noisy(inputs, images, self.noise, 1.0, "published", self.update)
        if self.whole:
            inputs["region_mask"] = None
        chain = Chain(step=self.net.step, examples=numbers, seed=self.seed)
        return self.net(**inputs, labels=self.targets[numbers], chain=chain, check=False)  # type: ignore[no-any-return]

    def inputs(self, words: Tensor, images: Tensor) -> dict[str, Tensor]:
        """The network's arguments, for questions about images of these numbers."""
        if self.encoder is not None and self.pixels is not None:
            regions = regions_from(self.encoder, self.pixels[images])
        else:
            regions = self.features[images]
        return {
            "words": words,
            "word_mask": words != PADDING,
            "regions": regions.float(),
            "region_mask": self.real[images],
        }

    def settle(self) -> None:
        """Make the regions of all images anew, once the encoder has learned."""
        if self.encoder is not None and self.pixels is not None:
            self.features = encode(self.encoder, self.pixels).to(self.features.device)
            self.pixels, self.deviation = None, None

    def noisy(
        self,
        inputs: dict[str, Tensor],
        images: Tensor,
        strength: float,
        deviation: float,
        way: NoiseWay,
        step: int = 0,
    ) -> dict[str, Tensor]:
        """Inputs with noise on the features; the published way also shows the padding."""
        regions, mask = inputs["regions"], inputs["region_mask"]
        regions = feature_noise(
            regions,
            mask,
            strength,
            deviation=deviation,
            images=images,
            seed=self.seed,
            step=step,
            way=way,
        )
        mask = torch.ones_like(mask) if way == "published" else mask
        return {**inputs, "regions": regions, "region_mask": mask}


def network(data: QuestionData, width: int, row: QuestionRow, training: QuestionTraining, seed: int) -> MCAN:
    """The untrained network of a row, for regions of this width.

    All rows of a seed start from the same weights. Those of a prior are drawn between the others', so that
    these are taken from a network without one.
    """
    per_epoch = Epochs(len(data.train), training.batch, 1, 0).per_epoch

    def made(mechanisms: Sequence[Bayesian]) -> MCAN:
        torch.manual_seed(seed)
        sizes = {"features": width, **training.network}
        return MCAN(len(data.vocabulary), len(data.answers), mechanisms, reduction="mean", **sizes)

    net = made(row.mechanisms(per_epoch))
    if net.mechanisms:
        net.load_state_dict(made(()).state_dict(), strict=False)
    net.word_names = ["<pad>", *data.vocabulary.words, "<unk>"]
    net.answer_names = list(data.answers)
    return net


def model_of(
    data: QuestionData, source: RegionSource, row: QuestionRow, training: QuestionTraining, seed: int
) -> Answering:
    """The untrained network with what it is trained on."""
    questions, found = shown(encoded(data, data.train), row.sees, seed), source.regions(seed)
    net = network(data, found.features.shape[-1], row, training, seed)
    encoder = source.network(seed) if source.finetune and row.sees != "nothing" else None
    return Answering(net, found, questions, row, training.noise, seed, encoder, data.images)


def optimizer_of(
    model: nn.Module, training: QuestionTraining
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """Adam and its learning rate: a rise, then drops."""

    def share(update: int) -> float:
        rise = min(1.0, (update + 1) / max(1, training.warmup))
        return float(rise * 0.2 ** sum(update >= drop for drop in training.drops))

    parameters = list(model.parameters())
    fused = all(parameter.is_cuda for parameter in parameters)
    optimizer = torch.optim.Adam(
        parameters, training.learning_rate, betas=training.betas, eps=training.eps, fused=fused
    )
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def train(
    folder: Path,
    data: QuestionData,
    source: RegionSource,
    row: QuestionRow,
    training: QuestionTraining,
    seed: int,
    device: str = "auto",
    told: Callable[[int], object] | None = None,
) -> tuple[Answering, dict[str, Any]]:
    """Train one network; return it in evaluation mode, and the numbers of its training.

    Args:
        folder: of the run, for checkpoints.
        data: questions.
        source: of the regions of all images in `data`.
        row: attention, and what is seen.
        training: settings.
        seed: of initial weights, batches, dropout and noise.
        device: "cpu", "cuda" or "auto".
        told: called with the number of finished updates before each of them.
    """
    from transformers import set_seed

    where = torch_device(device)
    model = model_of(data, source, row, training, seed).to(where)
    if model.encoder is None:  # whose features will not change
        model.deviation = deviation_of(data, model)
    optimizer, schedule = optimizer_of(model, training)
    set_seed(seed)

    def on_step(step: int) -> None:
        model.at_update(step)
        if told is not None:
            told(step)

    numbers = fit(
        model,
        folder,
        Numbers(Epochs(len(data.train), training.batch, training.updates, seed, device=where)),
        training,
        seed,
        device,
        on_step,
        optimizer=optimizer,
        schedule=schedule,
        pause=PAUSE,
        graphs=model.repeats,
        # Half precision would add to each product of such small matrices the conversion of both.
        bf16=False,
        **in_tf32(device),
    )
    model.settle()
    return model, {**numbers, "parameters": sum(parameter.numel() for parameter in model.net.parameters())}


def step_times(
    data: QuestionData,
    source: RegionSource,
    row: QuestionRow,
    training: QuestionTraining,
    seed: int,
    device: str,
    updates: int,
) -> list[float]:
    """Milliseconds of updates as `train` makes them, after one that is not timed."""
    where = torch_device(device)
    model = model_of(data, source, row, training, seed).to(where).train()
    numbers = torch.arange(training.batch, device=where) % len(data.train)
    optimizer, _ = optimizer_of(model, training)
    with short_products(device):
        return times(model, optimizer, lambda _: {"numbers": numbers}, where, updates, graphs=model.repeats)


# --- Measures ---


class Condition(NamedTuple):
    """How the features of test images are changed.

    Attributes:
        strength: of noise, in units of the features' standard deviation, or in their own (published).
        way: of the noise.
    """

    strength: float = 0.0
    way: NoiseWay = "image"


class Answered(NamedTuple):
    """Probabilities of answers, by one pass without dropout, and by several with it.

    Attributes:
        one: (questions, answers), with the mean of random weights.
        samples: (samples, questions, answers).
    """

    one: Tensor
    samples: Tensor


def answered(
    model: Answering, questions: Questions, condition: Condition, deviation: float, samples: int = SAMPLES
) -> Answered:
    """The answers to questions, as float64 on the CPU."""
    found = [part for part, _ in in_batches(model, questions, condition, deviation, samples)]
    one, drawn = zip(*((each.one.cpu(), each.samples.cpu()) for each in found), strict=True)
    return Answered(torch.cat(one), torch.cat(drawn, dim=1))


def in_batches(
    model: Answering, questions: Questions, condition: Condition, deviation: float, samples: int = SAMPLES
) -> Iterator[tuple[Answered, Questions]]:
    """The answers to questions, some at a time, as float64 on the model's device, with these questions."""
    net, device = model.net.eval(), model.words.device
    words = without_needless_padding(questions.words)
    rows = max(1, TEST_REGIONS.get(device.type, TEST_REGIONS["cpu"]) // model.real.shape[1])
    batch = max(1, rows // samples)
    for start in range(0, len(words), batch):
        part = slice(start, start + batch)
        images = questions.images[part].to(device)
        inputs = model.inputs(words[part].to(device), images)
        if condition.strength:
            unit = deviation if condition.way == "image" else 1.0
            # Each batch has another number, as its noise is shared in the published way.
            step = TEST_STEPS + start if condition.way == "published" else 0
            inputs = model.noisy(inputs, images, condition.strength, unit, condition.way, step)
        with torch.no_grad():
            one = net(**inputs)["logits"].double().sigmoid()
            posterior = overt.posterior(
                net,
                inputs,
                samples,
                dropout=True,
                seed=model.seed,
                first=start,
                rows=rows,
                problem_type="sigmoid",
            )
        assert isinstance(posterior, overt.Posterior)
        yield Answered(one, posterior.samples.double()), questions.some(part)


Floats = NDArray[np.float64]


class Judged(NamedTuple):
    """What is to be known of each answer; all (questions,), from which all measures follow.

    Attributes:
        accuracy: of the answer of one pass.
        confidence: its probability.
        sampled_accuracy: of the answer of the passes' mean.
        sampled_confidence: its probability.
        p: between the two likeliest answers, by Welch's test.
        brier: mean over the answers.
        information: mutual information, summed over the answers.
    """

    accuracy: Floats
    confidence: Floats
    sampled_accuracy: Floats
    sampled_confidence: Floats
    p: Floats
    brier: Floats
    information: Floats


def judged(found: Answered, questions: Questions) -> Judged:
    """Each answer's accuracy and certainty, computed where the answers are."""
    one, samples = found
    credits, targets = (each.to(one.device) for each in (questions.credits, questions.targets))
    of_samples = summarize(samples, "sigmoid")
    mean = of_samples.mean
    measured = {
        "accuracy": credit(one, credits),
        "confidence": one.amax(dim=1),
        "sampled_accuracy": credit(mean, credits),
        "sampled_confidence": mean.amax(dim=1),
        "brier": (mean - targets).square().mean(dim=1),
        "information": of_samples.mutual_information,
    }
    values = torch.stack(list(measured.values())).cpu().numpy()  # at once, as each would wait for a GPU
    p = p_values(likeliest_two(samples, mean).cpu(), link="sigmoid", equal_variance=False)
    return Judged(p=p, **dict(zip(measured, values, strict=True)))


def likeliest_two(samples: Tensor, mean: Tensor) -> Tensor:
    """Samples of the two answers that are the likeliest in the mean, (samples, questions, 2).

    Args:
        samples: (samples, questions, answers).
        mean: (questions, answers).
    """
    first = mean.argmax(dim=1, keepdim=True)
    second = mean.scatter(1, first, -1.0).argmax(dim=1, keepdim=True)  # below any probability
    two = torch.cat([first, second], dim=1)
    return samples.gather(2, two.expand(len(samples), -1, -1))


def measures_of(found: Judged) -> dict[str, float]:
    """All measures of judged answers, in % where they are shares.

    The accuracy is that of the answer of one pass, also in PAvPU, as published; calibration is that of the
    passes' mean.
    """
    one, mean = (x.reshape(-1, 1) for x in (found.confidence, found.sampled_confidence))
    certain = {at: np.where(found.p < at, found.accuracy, 1.0 - found.accuracy) for at in THRESHOLDS}
    sampled = found.sampled_accuracy
    selective = selective_accuracy(mean, None, COVERAGE, accuracies=sampled, link="sigmoid")
    return {
        "accuracy": 100 * float(found.accuracy.mean()),
        f"accuracy of {SAMPLES} passes": 100 * float(sampled.mean()),
        **{f"PAvPU {at:g}": 100 * float(agreeing.mean()) for at, agreeing in certain.items()},
        "ECE": 100 * ece(mean, None, accuracies=sampled, link="sigmoid"),
        "ECE of one pass": 100 * ece(one, None, accuracies=found.accuracy, link="sigmoid"),
        "Brier": float(found.brier.mean()),
        **{f"accuracy of the surest {100 * at:.0f} %": 100 * value for at, value in selective.items()},
        "mutual information": float(found.information.mean()),
    }


def measures(found: Answered, questions: Questions) -> dict[str, float]:
    """All measures of answers, as `measures_of` has them."""
    return measures_of(judged(found, questions))


def credit(probabilities: Tensor, credits: Tensor) -> Tensor:
    """The accuracy of each most probable answer, float64 (questions,)."""
    return credits.gather(1, probabilities.argmax(dim=1, keepdim=True)).squeeze(1).double()


def measure(
    model: Answering,
    data: QuestionData,
    row: QuestionRow,
    conditions: Mapping[str, Condition],
    deviation: float,
) -> dict[str, float]:
    """Key → number: measures of all test questions, and accuracy and PAvPU of each kind of question.

    A row that sees no picture has the same numbers under all conditions: there is none to disturb.

    Args:
        model: the trained network.
        data: questions.
        row: what was seen in training, which is seen here.
        conditions: name → what is done to the features.
        deviation: of the features, the unit of noise.
    """
    questions = shown(encoded(data, data.test), row.sees, model.seed)
    numbers: dict[str, float] = {}
    done: dict[Condition, Judged] = {}
    for name, condition in conditions.items():
        if row.sees == "nothing":
            condition = Condition()
        if condition not in done:
            parts = []
            for found, some in in_batches(model, questions, condition, deviation):
                if not bool(found.one.isfinite().all() & found.samples.isfinite().all()):
                    raise ValueError(
                        "the training diverged: the trained network gives numbers that are not finite"
                    )
                parts.append(judged(found, some))
            done[condition] = Judged(*(np.concatenate(each) for each in zip(*parts, strict=True)))
        whole = done[condition]
        numbers |= {key_of(name, measure): value for measure, value in measures_of(whole).items()}
        for kind, theirs in questions.kinds.items():
            of_kind = measures_of(Judged(*(each[theirs.numpy()] for each in whole)))
            wanted = ("accuracy", *(f"PAvPU {at:g}" for at in THRESHOLDS))
            numbers |= {key_of(name, measure, kind): of_kind[measure] for measure in wanted}
    return numbers


def key_of(condition: str, measure: str, kind: str | None = None) -> str:
    """The key of a number in a result file."""
    return " | ".join([condition, measure, *([] if kind is None else [kind])])


def deviation_of(data: QuestionData, model: Answering) -> float:
    """Standard deviation of the features of training images, the unit of noise; 1 where all are zero."""
    if model.deviation is not None:
        return model.deviation
    images = torch.unique(data.image_numbers(data.train)).to(model.features.device)
    return feature_deviation(model.features, model.real, images) or 1.0


def save(model: Answering, folder: Path, encoder: Encoder | None, size: Sequence[int] | None) -> None:
    """Write the network to a folder, and what makes its regions of an image, if anything does.

    Args:
        model: the trained network.
        folder: for it; the encoder is in encoder/ there, and the size of its images in image.json.
        encoder: of the regions, unless the model's own went on learning; None for given features.
        size: height and width of the images that the encoder saw; None where there were none.
    """
    encoder = model.encoder if model.encoder is not None else encoder
    if encoder is not None and size is not None:
        save_encoder(encoder.cpu(), folder / ENCODER)
        write_whole(folder / IMAGE, json.dumps({"size": list(size)}))
    model.net.cpu().save(folder)
