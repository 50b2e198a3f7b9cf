"""Ask a trained model about an image: the model, its encoder and its words from a folder, and the answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

import overt
from overt import _check
from overt.data.vocabulary import Vocabulary, tokenise
from overt.judge.uncertainty import p_values
from overt.models.folders import CONFIG
from overt.models.mcan import MCAN
from overt.recipes._training import torch_device
from overt.recipes.question_training import ENCODER, IMAGE, LENGTH, SAMPLES
from overt.recipes.regions import Encoder, encode, open_encoder
from overt.view.answers import Likely, Reply

if TYPE_CHECKING:
    from PIL.Image import Image

LIKELY = 5  # answers that are shown


@dataclass(frozen=True, eq=False)
class Answerer:
    """A trained model that answers questions about images.

    Attributes:
        name: of the model.
        net: answers.
        encoder: makes regions of an image.
        vocabulary: of the questions that it was trained on.
        answers: that it can give.
        size: height and width of the images that it sees.
    """

    name: str
    net: MCAN
    encoder: Encoder
    vocabulary: Vocabulary
    answers: list[str]
    size: tuple[int, int]


def open_answerer(folder: Path, name: str, device: str = "cpu") -> Answerer:
    """The model in a folder that a run of bam-table-2 wrote.

    Args:
        folder: of the model.
        name: that it is called by.
        device: "cpu", "cuda" or "auto".
    """
    where = torch_device(device)
    if not (folder / CONFIG).is_file() and (folder / "model" / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} is the folder of a run: give the model in it, {folder / 'model'}")
    net = MCAN.load(folder)
    if net.word_names is None or net.answer_names is None:
        raise ValueError(f"{folder} must name its words and answers, as models of bam-table-2 do")
    if not (folder / ENCODER).is_dir() or net.grid is None:
        raise ValueError(
            f"{folder} must hold an {ENCODER}/ of images: a model trained on --features sees no image"
        )
    encoder = open_encoder(folder / ENCODER)
    for module in (net, encoder):
        module.to(where)
    words = Vocabulary(tuple(net.word_names[1:-1]))  # without padding and unknown words
    answerer = Answerer(name, net, encoder, words, net.answer_names, _size(folder / IMAGE))
    blank = torch.zeros(1, 3, *answerer.size, dtype=torch.uint8)
    _, regions, width = encode(encoder, blank).shape
    rows, columns = net.grid
    if width != net.regions.in_features or regions != rows * columns:
        raise ValueError(
            f"{folder / ENCODER} makes {regions} regions of width {width}, but the model takes "
            f"{rows * columns} of width {net.regions.in_features}"
        )
    return answerer


def _size(path: Path) -> tuple[int, int]:
    """Height and width of the images that an encoder sees."""
    try:
        height, width = json.loads(path.read_text())["size"]
        _check.whole("height", height, 1)
        _check.whole("width", width, 1)
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f'{path} must hold {{"size": [height, width]}}: is the model complete?') from None
    return height, width


def checked_question(question: str, answerer: Answerer) -> list[str]:
    """The words of a question that the model reads; refuses one that has none, or none that it knows."""
    words = tokenise(question)
    if not words:
        raise ValueError(f"a question must have a word, got {question!r}")
    if not any(word in answerer.vocabulary.numbers for word in words):
        some = ", ".join(answerer.vocabulary.words[:5])
        count = len(answerer.vocabulary.words)
        raise ValueError(f"{answerer.name} knows no word of {question!r}: it knows {count:,}, such as {some}")
    return words[:LENGTH]


def unknown_words(question: str, answerer: Answerer) -> list[str]:
    """The words of a question that the model reads but does not know, each once."""
    read = checked_question(question, answerer)
    return list(dict.fromkeys(word for word in read if word not in answerer.vocabulary.numbers))


def inputs_of(answerer: Answerer, picture: Image, question: str) -> dict[str, Tensor]:
    """The network's arguments for a question about a picture, where the network is.

    Args:
        answerer: the model.
        picture: RGB; it is scaled to the size that the model sees.
        question: with at least one word that the model knows.
    """
    from PIL.Image import Resampling

    words, (height, width) = checked_question(question, answerer), answerer.size
    pixels = np.array(picture.resize((width, height), Resampling.BILINEAR))
    regions = encode(answerer.encoder, torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)).float()
    numbers = answerer.vocabulary.questions([question], len(words))
    inputs = {
        "words": numbers,
        "word_mask": torch.ones_like(numbers, dtype=torch.bool),
        "regions": regions,
        "region_mask": torch.ones(regions.shape[:2], dtype=torch.bool),
    }
    return {name: x.to(answerer.net.step.device) for name, x in inputs.items()}


def token_names(answerer: Answerer, question: str) -> list[str]:
    """Names of what the model attends to: the question's words, then the regions, row by row."""
    assert answerer.net.grid is not None
    rows, columns = answerer.net.grid
    places = [f"{row + 1},{column + 1}" for row in range(rows) for column in range(columns)]
    return [*checked_question(question, answerer), *places]


@torch.no_grad()
def answer(answerer: Answerer, picture: Image, question: str, samples: int = SAMPLES, seed: int = 0) -> Reply:
    """What a model answers, how sure it is, and what its answer drew on.

    Args:
        answerer: the model.
        picture: as in `inputs_of`, like `question`.
        question: about the picture.
        samples: passes with dropout on, two or more.
        seed: of these passes.
    """
    _check.whole("samples", samples, 2)  # for a test between two answers
    inputs, net = inputs_of(answerer, picture, question), answerer.net
    output = net(**inputs)
    one = output["logits"][0].double().sigmoid()
    first = int(one.argmax())
    drawn = overt.posterior(net, inputs, samples, dropout=True, seed=seed, problem_type="sigmoid")
    assert isinstance(drawn, overt.Posterior)
    mean, spread = drawn.mean[0].cpu(), drawn.spread[0].cpu()
    order = mean.argsort(descending=True)[:LIKELY].tolist()
    assert net.grid is not None
    return Reply(
        answerer.name,
        answerer.answers[first],
        float(one[first]),
        [Likely(answerer.answers[place], float(mean[place]), float(spread[place])) for place in order],
        samples,
        float(p_values(drawn.samples, link="sigmoid", equal_variance=False)[0]),
        checked_question(question, answerer),
        output["word_weights"][0].cpu(),
        output["region_weights"][0].view(net.grid).cpu(),
        lost_by_hiding(net, inputs, first).view(net.grid).cpu(),
        len(tokenise(question)),
        unknown_words(question, answerer),
    )


def lost_by_hiding(net: MCAN, inputs: dict[str, Tensor], answer: int) -> Tensor:
    """By how much the probability of an answer falls if each region is hidden, (regions,); one example."""
    count = inputs["regions"].shape[1]
    whole = net(**inputs)["logits"][0, answer].sigmoid()
    if count == 1:
        return torch.zeros(1)  # an image without regions cannot be asked about
    several = {name: x.expand(count, *x.shape[1:]) for name, x in inputs.items()}
    shown = inputs["region_mask"]
    several["region_mask"] = ~torch.eye(count, dtype=torch.bool, device=shown.device) & shown
    lost: Tensor = whole - net(**several)["logits"][:, answer].sigmoid()
    return lost
