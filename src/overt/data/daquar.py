"""DAQUAR (Malinowski and Fritz 2014): questions about photographs of rooms.

Files: data_train.csv and data_eval.csv (question, answer, image_id), or all_qa_pairs.txt, where a line with a
question that names its image is followed by a line with the answers.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args

from overt import _check
from overt.data import named_images
from overt.data.captions import PARTS
from overt.data.files import data_folder, find_file, read_text
from overt.data.questions import Asked, QuestionData, outside
from overt.data.vocabulary import tokenise, vocabulary_of

NAME = "daquar"
TABLES = ("data_train.csv", "data_eval.csv")
PAIRS = "all_qa_pairs.txt"
ANSWERS = "answer_space.txt"
COLUMNS = ["question", "answer", "image_id"]
PLACES = ("images", "nyu_depth_images")
SIDE = 160
IMAGES = (1000, 100, 347)  # in training, validation and test, of the 1,447 that have questions
KINDS = ("number", "colour", "other")
_PAIR = re.compile(r"(.*?)\s*(image\d+)\s*\??")
_PLACE = re.compile(r"\s*\b(in|on|of|at)?\s*(the|this)?$")  # in front of the image's name

Split = Literal["image", "published"]


def load(
    data: Path | None = None, split: Split = "image", side: int = SIDE, pictures: bool = True
) -> QuestionData:
    """DAQUAR from a folder or its daquar/.

    Args:
        data: the folder (by default OVERT_DATA).
        split: "image" divides the images, ordered by the SHA-256 of their names, into 1,000, 100 and 347 (or
            in these proportions), so that no image is in two parts. "published" is that of the csv files:
            nearly all of its test images are in training, too, and it has no validation part.
        side: height and width of the images, which are scaled to squares.
        pictures: whether to read the images.

    Raises:
        FileNotFoundError: there is no DAQUAR.
        ValueError: a file is not as published; the error names it and the line.
    """
    _check.one_of("split", split, get_args(Split))
    folder = _folder(data_folder(data))
    digest = hashlib.sha256()
    paths = [find_file(folder, name) for name in TABLES]
    read: list[list[Asked]]
    if all(paths):
        read = [list(_table(path, digest)) for path in paths if path]
    elif split == "published":
        raise FileNotFoundError(f"{folder} must have {' and '.join(TABLES)} for the published split")
    else:
        path = find_file(folder, PAIRS)
        assert path is not None
        read = [list(_pairs(path, digest))]
    rows = [row for part in read for row in part]
    names = sorted({row.image for row in rows}, key=_order)
    remarks: tuple[str, ...]
    if split == "image":
        of = dict(zip(names, _parts(len(names)), strict=True))
        parts = {part: [row for row in rows if of[row.image] == part] for part in PARTS}
        remarks = ("split by image",)
    else:
        parts = dict(zip(PARTS, (read[0], [], read[1]), strict=True))
        trained, tested = ({row.image for row in part} for part in read)
        both = f"{len(trained & tested):,} of {len(tested):,}"
        remarks = (f"the published split: {both} test images are also in training",)
    for part, kept in parts.items():
        if not kept and (split == "image" or part != "validation"):
            raise ValueError(f"{folder} must have questions about more images: none is left for {part}")
    images = named_images.find(folder, PLACES) if pictures else None
    if images is not None:
        digest.update(images.sha256.encode())
        if missing := [name for name in names if name not in images]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"{images.source} has no image {missing[0]}{more}, which questions are about")
    answers = _answers(folder, parts["train"], digest)
    counts = {f"answers_outside_in_{part}": outside(kept, answers) for part, kept in parts.items()}
    return QuestionData(
        NAME,
        parts["train"],
        parts["validation"],
        parts["test"],
        vocabulary=vocabulary_of(row.question for row in parts["train"]),
        answers=answers,
        images=None if images is None else images.pixels(names, side),
        image_names=tuple(names),
        sha256=digest.hexdigest(),
        counts=counts,
        remarks=remarks,
    )


def kind_of(question: str) -> str:
    """The kind of a question: "number", "colour" or "other"; DAQUAR has none that yes or no would answer."""
    if "how many" in question:
        return "number"
    return "colour" if "colour" in question or "color" in question else "other"


def _order(image: str) -> str:
    return hashlib.sha256(image.encode()).hexdigest()


def _parts(count: int) -> list[str]:
    """The part of each of so many ordered images."""
    train, validation = (round(count * size / sum(IMAGES)) for size in IMAGES[:2])
    sizes = (train, validation, count - train - validation)
    return [part for part, size in zip(PARTS, sizes, strict=True) for _ in range(size)]


def _folder(data: Path | None) -> Path:
    wanted = f"{' and '.join(TABLES)}, or {PAIRS},"
    if data is None:
        raise FileNotFoundError(f"DAQUAR needs a folder with {wanted} and images: give --data DIR")
    for folder in (data / NAME, data):
        if all(find_file(folder, name) for name in TABLES) or find_file(folder, PAIRS):
            return folder
    raise FileNotFoundError(f"{data} has no DAQUAR: put {wanted} there or into {NAME}/")


def _table(path: Path, digest: hashlib._Hash) -> Iterator[Asked]:
    """The rows of a csv file."""
    text = read_text(path)
    digest.update(text.encode())
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        if (header := next(reader, None)) != COLUMNS:
            raise ValueError(f"{path}, line 1: columns must be {', '.join(COLUMNS)}, got {header}")
        for cells in reader:
            where = f"{path}, line {reader.line_num}"
            if len(cells) != len(COLUMNS):
                raise ValueError(f"{where}: must have {len(COLUMNS)} columns, got {len(cells)}")
            question, answers, image = cells
            yield _asked(question, answers, image, where)
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None


def _pairs(path: Path, digest: hashlib._Hash) -> Iterator[Asked]:
    """The questions of a text file, each followed by its answers."""
    text = read_text(path)
    digest.update(text.encode())
    lines = text.rstrip().split("\n")
    if len(lines) % 2:
        raise ValueError(f"{path}, line {len(lines)}: the question has no line with answers after it")
    for number in range(0, len(lines), 2):
        where = f"{path}, line {number + 1}"
        found = _PAIR.fullmatch(lines[number].strip())
        if found is None:
            raise ValueError(
                f"{where}: must be a question … in the imageNUMBER ?, got {lines[number][:80]!r}"
            )
        yield _asked(_PLACE.sub("", found[1]), lines[number + 1], found[2], where)


def _asked(question: str, answers: str, image: str, where: str) -> Asked:
    question, image = question.strip(), image.strip()
    if not tokenise(question):
        raise ValueError(f"{where}: the question must have a word, got {question!r}")
    if not image:
        raise ValueError(f"{where}: the question names no image")
    named = list(dict.fromkeys(answer.strip() for answer in answers.split(",")))
    if not all(named):
        raise ValueError(f"{where}: answers must be words with commas between them, got {answers!r}")
    return Asked(image, question, tuple(named), kind_of(question.lower()))


def _answers(folder: Path, train: Iterable[Asked], digest: hashlib._Hash) -> tuple[str, ...]:
    """The answers that can be given: those listed, or else those of the training questions."""
    path = find_file(folder, ANSWERS)
    if path is None:
        return tuple(sorted({answer for row in train for answer in row.answers}))
    text = read_text(path)
    digest.update(text.encode())
    answers = [line.strip() for line in text.split("\n") if line.strip()]
    if len(set(answers)) < len(answers) or not answers:
        raise ValueError(
            f"{path} must list answers, each once, got {len(answers)}, {len(set(answers))} different"
        )
    return tuple(answers)
