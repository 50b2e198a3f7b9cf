"""Generated scenes: the picture decides every answer, and the question's words decide none."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from overt.data import scenes
from overt.data.batching import swapped
from overt.data.questions import Asked
from overt.data.scenes import COLOURS, GRID, SHAPES, Scenes, Thing, plural
from overt.data.vocabulary import tokenise
from overt.judge.captions import score


@pytest.fixture(scope="module")
def made() -> Scenes:
    return scenes.make((600, 20, 200), seed=3)


def answer(question: str, things: Sequence[Thing]) -> str:
    """What the objects of a scene answer; an error where they do not decide."""
    words = question.removesuffix(" ?").split()
    if words[:2] == ["how", "many"]:
        return str(sum(plural(thing.shape) == words[2] for thing in things))
    if words[:2] == ["what", "colour"]:
        (one,) = [thing for thing in things if thing.shape == words[-1]]
        return one.colour
    (right,) = [thing for thing in things if (thing.colour, thing.shape) == (words[-2], words[-1])]
    row, column = right.cell
    (left,) = [thing for thing in things if thing.cell == (row, column - 1)]
    return left.shape


def test_every_question_has_one_answer_and_the_objects_give_it(made: Scenes) -> None:
    rows = [*made.questions.train, *made.questions.validation, *made.questions.test]
    assert len(rows) == 3 * 820
    for row in rows:
        assert row.answers == (answer(row.question, made.things[row.image]),)
        assert row.answers[0] in made.questions.answers


def shape_in(filled: np.ndarray) -> str:
    """The shape that fills these pixels of its box."""
    half = len(filled) // 2
    if filled[-half:].mean() - filled[:half].mean() > 0.25:
        return "triangle"
    if not filled[0].any():  # it alone does not reach the border
        return "square"
    return "circle" if filled.mean() > 0.65 else "cross"


def test_the_picture_shows_the_objects(made: Scenes) -> None:
    palette = np.array(list(COLOURS.values()), float)
    rows, images = made.captions.part("test")
    assert images is not None
    for row, image in zip(rows, images.permute(0, 2, 3, 1).numpy().astype(float), strict=True):
        empty = np.ones(image.shape[:2], bool)
        for thing in made.things[row.image]:
            left, top, right, bottom = thing.box
            inside = image[top:bottom, left:right]
            centre = inside[(bottom - top) // 2, (right - left) // 2]
            assert list(COLOURS)[np.abs(palette - centre).sum(axis=1).argmin()] == thing.colour
            assert shape_in(inside.max(axis=-1) > 110.0) == thing.shape
            width = image.shape[0] // GRID
            assert (
                (top // width, left // width) == ((bottom - 1) // width, (right - 1) // width) == thing.cell
            )
            empty[top:bottom, left:right] = False
        assert image[empty].max() < 110.0, "nothing is shown that is not among the objects"


def accuracy(rows: Sequence[Asked], guesses: Sequence[str]) -> float:
    return sum(guess in row.answers for row, guess in zip(rows, guesses, strict=True)) / len(rows)


def test_the_majority_for_each_question_guesses_few(made: Scenes) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in made.questions.train:
        counts[row.question][row.answers[0]] += 1
    test = made.questions.test
    guesses = [(counts[row.question] or Counter("1")).most_common(1)[0][0] for row in test]
    assert accuracy(test, guesses) <= 0.4


def test_naive_bayes_on_the_words_guesses_few(made: Scenes) -> None:
    prior: Counter[str] = Counter()
    words: dict[str, Counter[str]] = defaultdict(Counter)
    for row in made.questions.train:
        prior[row.answers[0]] += 1
        words[row.answers[0]].update(tokenise(row.question))

    def likelihood(row: Asked, guess: str) -> float:
        total = sum(words[guess].values()) + len(made.questions.vocabulary.words)
        each = (math.log((words[guess][word] + 1) / total) for word in tokenise(row.question))
        return math.log(prior[guess]) + sum(each)

    test = made.questions.test
    guesses = [max(prior, key=lambda guess: likelihood(row, guess)) for row in test]
    assert accuracy(test, guesses) <= 0.4


def test_another_picture_tells_no_more_than_the_question(made: Scenes) -> None:
    test = made.questions.test
    images = list(dict.fromkeys(row.image for row in test))
    other = {
        image: images[number] for image, number in zip(images, swapped(len(images), 0).tolist(), strict=True)
    }

    def guess(row: Asked) -> str:
        try:
            return answer(row.question, made.things[other[row.image]])
        except ValueError:  # it does not show what is asked for
            return "1"

    assert accuracy(test, [guess(row) for row in test]) <= 0.4
    assert accuracy(test, [answer(row.question, made.things[row.image]) for row in test]) == 1.0


def test_answers_are_even_within_each_question() -> None:
    rows = scenes.make((1200, 1, 1), seed=1).questions.train
    for kind, answers in zip(scenes.KINDS, (4, 6, 4), strict=True):
        counts = Counter(row.answers[0] for row in rows if row.kind == kind)
        assert len(counts) == answers
        assert max(counts.values()) < 1.25 * 1200 / answers
    # what is left of a circle is a circle as often as any other shape
    for shape in SHAPES:
        found = Counter(
            row.answers[0] for row in rows if row.question.endswith(f"{shape} ?") and row.kind == "left-of"
        )
        assert max(found.values()) < 0.34 * sum(found.values())


def test_captions_tell_one_scene_from_another(made: Scenes) -> None:
    rows, _ = made.captions.part("test")
    references = [row.captions[1:] for row in rows]
    own = score([row.captions[0] for row in rows], references)
    other = score([row.captions[0] for row in [*rows[1:], rows[0]]], references)
    assert own.cider_d > 2 * other.cider_d
    for row in rows:
        assert len(row.captions) == 5
        said = tokenise(row.captions[2])  # "a red circle just left of a blue square"
        row_, column = next(
            thing.cell for thing in made.things[row.image] if [thing.colour, thing.shape] == said[-2:]
        )
        (left,) = [thing for thing in made.things[row.image] if thing.cell == (row_, column - 1)]
        assert [left.colour, left.shape] == said[1:3]


def test_a_scene_depends_on_the_seed_and_its_number_alone(made: Scenes) -> None:
    again, fewer, other = (
        scenes.make((600, 20, 200), seed=3),
        scenes.make((5, 2, 3), seed=3),
        scenes.make((5, 2, 3), seed=4),
    )
    assert again.captions.sha256 == made.captions.sha256
    for part in ("train", "validation", "test"):
        rows, images = fewer.captions.part(part)
        whole, pixels = made.captions.part(part)
        assert whole[: len(rows)] == rows
        assert images is not None
        assert pixels is not None
        assert torch.equal(pixels[: len(rows)], images)
    assert other.questions.train != fewer.questions.train


def test_no_picture_is_in_two_parts_and_both_tasks_show_the_same(made: Scenes) -> None:
    images = made.questions.images
    assert images is not None
    assert images.dtype == torch.uint8
    assert images.shape == (820, 3, 64, 64)
    assert len(torch.unique(images.flatten(1), dim=0)) == 820
    numbers = made.questions.image_numbers(made.questions.test)
    rows, pixels = made.captions.part("test")
    assert pixels is not None
    assert [rows[0].image, rows[-1].image] == [made.questions.test[0].image, made.questions.test[-1].image]
    assert torch.equal(images[numbers[::3]], pixels)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sizes": (1, 2)}, r"^sizes must be 3 numbers of images \(train, validation, test\), got \(1, 2\)$"),
        ({"sizes": (1, 0, 2)}, "^sizes must be a whole number of at least 1, got 0$"),
        ({"side": 66}, "^side must be a multiple of 4, got 66$"),
        ({"side": 16}, "^side must be a whole number of at least 32, got 16$"),
        ({"seed": -1}, "^seed must be a whole number of at least 0, got -1$"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scenes.make(**settings)
