"""Generated scenes: coloured shapes on a grid, with captions and questions that the picture alone decides.

An answer is drawn first, evenly, and the scene is built around it. A question's words therefore tell nothing
of its answer: one in four counts, one in six colours, one in four shapes is right by chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from overt import _check
from overt.data.captions import PARTS, CaptionData, Captioned
from overt.data.images import Pixels
from overt.data.questions import Asked, QuestionData
from overt.data.vocabulary import vocabulary_of

NAME = "scenes"
SHAPES = ("circle", "square", "triangle", "cross")
COLOURS = {
    "red": (220, 50, 40),
    "green": (60, 190, 70),
    "blue": (60, 90, 230),
    "yellow": (240, 220, 60),
    "purple": (170, 60, 200),
    "white": (240, 240, 240),
}
NUMBERS = ("one", "two", "three", "four")  # of the shape that is counted
ANSWERS = (*(str(number) for number in range(1, len(NUMBERS) + 1)), *COLOURS, *SHAPES)
KINDS = ("count", "colour-of", "left-of")
GRID = 4  # cells on each side
SIZES = (4000, 500, 1000)  # images in training, validation and test
SIDE = 64


class Thing(NamedTuple):
    """An object of a scene.

    Attributes:
        shape: one of `SHAPES`.
        colour: one of `COLOURS`.
        cell: row and column of the grid, from the upper left.
        box: left, top, right and bottom in pixels; the last two are just outside.
    """

    shape: str
    colour: str
    cell: tuple[int, int]
    box: tuple[int, int, int, int]

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, eq=False)
class Scenes:
    """Scenes, their captions and their questions; both have the same images in the same order.

    Attributes:
        captions: five of each scene.
        questions: three about each scene, one of each of `KINDS`.
        things: name of the image → its objects.
    """

    captions: CaptionData
    questions: QuestionData
    things: dict[str, tuple[Thing, ...]]


def make(sizes: Sequence[int] = SIZES, seed: int = 0, side: int = SIDE) -> Scenes:
    """Scenes in three parts; each depends on the seed, its part, its number and the side alone.

    Args:
        sizes: number of images for training, validation and test.
        seed: of all that is random.
        side: height and width of the images; a multiple of 4, at least 32.
    """
    if len(sizes) != len(PARTS):
        raise ValueError(f"sizes must be {len(PARTS)} numbers of images ({', '.join(PARTS)}), got {sizes!r}")
    for size in sizes:
        _check.whole("sizes", size, 1)
    _check.whole("seed", seed, 0)
    _check.whole("side", side, 32)
    if side % GRID:
        raise ValueError(f"side must be a multiple of {GRID}, got {side}")
    captioned: dict[str, list[Captioned]] = {part: [] for part in PARTS}
    asked: dict[str, list[Asked]] = {part: [] for part in PARTS}
    things: dict[str, tuple[Thing, ...]] = {}
    pixels = np.empty((sum(sizes), side, side, 3), np.uint8)
    for place, (part, size) in enumerate(zip(PARTS, sizes, strict=True)):
        for number in range(size):
            name = f"{part}-{number}"
            scene = _Scene(Random(f"{seed} {place} {number}"), side)
            pixels[len(things)] = _painted(scene.things, side, np.random.default_rng([seed, place, number]))
            things[name] = tuple(scene.things)
            captioned[part].append(Captioned(name, scene.captions()))
            asked[part] += scene.questions(name)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    sha256 = hashlib.sha256(pixels.tobytes()).hexdigest()
    captions = CaptionData(
        NAME,
        captioned["train"],
        captioned["validation"],
        captioned["test"],
        vocabulary=vocabulary_of(text for row in captioned["train"] for text in row.captions),
        images=images,
        sha256=sha256,
        counts={},
        stand_in=True,
    )
    questions = QuestionData(
        NAME,
        asked["train"],
        asked["validation"],
        asked["test"],
        vocabulary=vocabulary_of(row.question for row in asked["train"]),
        answers=ANSWERS,
        images=images,
        image_names=tuple(things),
        sha256=sha256,
        counts={},
        stand_in=True,
    )
    return Scenes(captions, questions, things)


class _Scene:
    """A scene built around the answers of its questions.

    Each shape has a part: one is counted, one occurs once and is asked for its colour, one has a thing to its
    left that is asked for, and one fills the scene.
    """

    def __init__(self, random: Random, side: int) -> None:
        self.random, self.side = random, side
        self.counted, self.single, self.right, self.other = random.sample(SHAPES, len(SHAPES))
        # The answers, before anything else of the scene.
        self.number = random.randint(1, len(NUMBERS))
        self.colour = self._colour()
        left = random.choice(SHAPES)
        self.right_colour = self._colour()

        row, column = random.randrange(GRID), random.randrange(1, GRID)
        free = [
            (y, x)
            for y in range(GRID)
            for x in range(GRID)
            if (y, x) not in ((row, column - 1), (row, column))
        ]
        random.shuffle(free)
        self.free = free
        self.things: list[Thing] = []
        self.anchor = self._add(self.right, self.right_colour, (row, column))
        self.neighbour = self._add(left, self._colour_of(left), (row, column - 1))
        if left != self.single:
            self._add(self.single, self.colour)
        for _ in range(self.number - (left == self.counted)):
            self._add(self.counted, self._colour())
        for _ in range(random.randint(0, 2)):
            self._add(self.other, self._colour())
        if random.random() < 0.5:
            self._add(self.right, self._colour_of(self.right))

    def _colour(self, but: str = "") -> str:
        return self.random.choice([colour for colour in COLOURS if colour != but])

    def _colour_of(self, shape: str) -> str:
        """A colour for another thing of this shape, with which the questions keep their answers."""
        if shape == self.single:
            return self.colour
        return self._colour(but=self.right_colour if shape == self.right else "")

    def _add(self, shape: str, colour: str, cell: tuple[int, int] | None = None) -> Thing:
        cell = self.free.pop() if cell is None else cell
        width = self.side // GRID
        size = self.random.randint(round(0.6 * width), round(0.85 * width))
        top, left = (width * place + self.random.randint(0, width - size) for place in cell)
        thing = Thing(shape, colour, cell, (left, top, left + size, top + size))
        self.things.append(thing)
        return thing

    def questions(self, image: str) -> list[Asked]:
        """One of each kind."""
        texts = (
            f"how many {plural(self.counted)} are there ?",
            f"what colour is the {self.single} ?",
            f"what shape is just left of the {self.anchor} ?",
        )
        answers = (str(self.number), self.colour, self.neighbour.shape)
        rows = zip(texts, answers, KINDS, strict=True)
        return [Asked(image, text, (answer,), kind) for text, answer, kind in rows]

    def captions(self) -> tuple[str, ...]:
        """Five."""
        counted = f"{NUMBERS[self.number - 1]} {self.counted if self.number == 1 else plural(self.counted)}"
        return (
            f"{counted} and a {self.colour} {self.single}",
            f"a {self.colour} {self.single} with {counted}",
            f"a {self.neighbour} just left of a {self.anchor}",
            f"{counted} and a {self.anchor}",
            f"a {self.anchor} just right of a {self.neighbour}",
        )


def plural(shape: str) -> str:
    """The plural of a shape."""
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


# --- Painting ---


def _painted(things: Sequence[Thing], side: int, random: np.random.Generator) -> Pixels:
    """Uint8 (side, side, 3): things in uneven colours on a dark, noisy ground."""
    canvas = np.full((side, side, 3), random.uniform(20.0, 60.0), np.float32)
    for thing in things:
        left, top, right, bottom = thing.box
        colour = np.array(COLOURS[thing.colour]) + random.uniform(-15.0, 15.0, 3)
        canvas[top:bottom, left:right][_mask(thing.shape, right - left)] = colour
    canvas += 6.0 * random.standard_normal(canvas.shape, np.float32)
    return canvas.clip(0.0, 255.0).astype(np.uint8)


@cache
def _mask(shape: str, size: int) -> NDArray[np.bool_]:
    """Which pixels of its box a shape covers, (size, size)."""
    place = (np.arange(size) + 0.5) / size * 2.0 - 1.0
    y, x = place[:, None], place[None, :]
    if shape == "circle":
        return np.asarray(x**2 + y**2 <= 1.0)
    if shape == "square":
        return np.asarray(np.maximum(np.abs(x), np.abs(y)) <= 0.8)
    if shape == "triangle":
        return np.asarray(np.abs(x) <= (y + 1.0) / 2.0)
    return np.asarray(np.minimum(np.abs(x), np.abs(y)) <= 0.3)
