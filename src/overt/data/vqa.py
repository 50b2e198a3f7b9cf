"""VQA-v2 (Goyal et al. 2017) in its published layout: questions about COCO's photographs, ten answers each.

Files: v2_OpenEnded_mscoco_train2014_questions.json and v2_mscoco_train2014_annotations.json, and the same of
val2014, which the papers test on. The photographs are not read: features of their regions must be given.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

from overt.data.files import data_folder, entries_of, find_file, read_text
from overt.data.questions import Asked, QuestionData, outside
from overt.data.vocabulary import tokenise, vocabulary_of

NAME = "vqa-v2"
QUESTIONS = "v2_OpenEnded_mscoco_{}_questions.json"
ANNOTATIONS = "v2_mscoco_{}_annotations.json"
TRAIN, TEST = "train2014", "val2014"
ANSWERS = 3129  # classes of the published networks
KINDS = ("yes/no", "number", "other")
AGREED = 3  # annotators whose answer is wholly right
_NUMBERS = ["none", "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
_DIGITS = {word: str(max(0, place - 1)) for place, word in enumerate(_NUMBERS)}
_PERIOD = re.compile(r"(?<!\d)\.(?!\d)")
_COMMA = re.compile(r"(?<=\d),(?=\d)")
_MARKS = re.compile(r"[;/\[\]\"{}()=+\\_\-><@`?!,]")


def load(data: Path | None = None, answers: int = ANSWERS) -> QuestionData:
    """VQA-v2 from a folder or its vqa-v2/: train2014 for training, val2014 for testing.

    The answers that can be given are the most frequent of the training questions. An answer is as right as
    people agree on it (`vqa_score`). There is no validation part.

    Args:
        data: the folder (by default OVERT_DATA).
        answers: how many can be given.

    Raises:
        FileNotFoundError: there is no VQA-v2.
        ValueError: a file is not as published; the error names it.
    """
    folder = _folder(data_folder(data))
    digest = hashlib.sha256()
    frequent: Counter[str] = Counter()
    parts = [_part(folder, part, digest, frequent if part == TRAIN else None) for part in (TRAIN, TEST)]
    train, test = parts
    # The most frequent first, equals by alphabet.
    kept = tuple(sorted(frequent, key=lambda answer: (-frequent[answer], answer))[:answers])
    names = sorted({row.image for part in parts for row in part})
    return QuestionData(
        NAME,
        train,
        [],
        test,
        vocabulary=vocabulary_of(row.question for row in train),
        answers=kept,
        images=None,
        image_names=tuple(names),
        sha256=digest.hexdigest(),
        counts={
            "answers_outside_in_train": outside(train, kept),
            "answers_outside_in_test": outside(test, kept),
        },
        remarks=(f"{TRAIN} for training, {TEST} for testing",),
    )


def normalised(answer: str) -> str:
    """An answer as VQA's evaluation compares it: lower case, digits, no articles, no punctuation marks.

    Its list of contractions without an apostrophe ("dont") is left out.
    """
    text = _COMMA.sub("", answer.lower().replace("\n", " ").replace("\t", " ").strip())
    text = _PERIOD.sub("", _MARKS.sub(" ", text))
    words = (_DIGITS.get(word, word) for word in text.split() if word not in ("a", "an", "the"))
    return " ".join(words)


def vqa_score(count: int, of: int = 10) -> float:
    """How right an answer is that `count` of the annotators gave: 0, 0.3, 0.6, 0.9 or 1 of ten.

    min(others who gave it / 3, 1), averaged over leaving out each annotator.
    """
    with_it = min((count - 1) / AGREED, 1.0) if count else 0.0
    without = min(count / AGREED, 1.0)
    return round((count * with_it + (of - count) * without) / of, 6)


def _folder(data: Path | None) -> Path:
    files = [name.format(part) for part in (TRAIN, TEST) for name in (QUESTIONS, ANNOTATIONS)]
    if data is None:
        raise FileNotFoundError(f"VQA-v2 needs a folder with {', '.join(files)}: give --data DIR")
    for folder in (data / NAME, data):
        if find_file(folder, files[0]):
            for name in files:
                if find_file(folder, name) is None:
                    raise FileNotFoundError(f"{folder} has no {name}")
            return folder
    raise FileNotFoundError(f"{data} has no VQA-v2: put {', '.join(files)} there or into {NAME}/")


def _part(folder: Path, part: str, digest: hashlib._Hash, frequent: Counter[str] | None) -> list[Asked]:
    """The questions of a part with their answers; those that most people gave are counted."""
    read: list[dict[int, dict[str, Any]]] = []
    for pattern, key in ((QUESTIONS, "questions"), (ANNOTATIONS, "annotations")):
        path = find_file(folder, pattern.format(part))
        assert path is not None
        text = read_text(path)
        digest.update(text.encode())
        read.append({_number(entry, "question_id", path): entry for entry in entries_of(text, key, path)})
    questions, annotations = read
    path = folder / QUESTIONS.format(part)
    if missing := questions.keys() ^ annotations.keys():
        raise ValueError(f"{path} and its annotations must have the same questions: {min(missing)} is in one")
    rows = []
    for number, entry in questions.items():
        where = f"{path}, question {number}"
        question, found = entry.get("question"), annotations[number]
        if not isinstance(question, str) or not tokenise(question):
            raise ValueError(f"{where}: the question must have a word, got {question!r}")
        image = _number(entry, "image_id", path)
        given = found.get("answers")
        if (
            not isinstance(given, list)
            or not given
            or not all(isinstance(each, dict) and isinstance(each.get("answer"), str) for each in given)
        ):
            raise ValueError(f'{where}: answers must be a list of {{"answer": …}}, got {str(given)[:80]}')
        kind = found.get("answer_type")
        if kind not in KINDS:
            raise ValueError(f"{where}: answer_type must be one of {', '.join(KINDS)}, got {kind!r}")
        counts = Counter(normalised(each["answer"]) or each["answer"] for each in given)
        scores = tuple(vqa_score(count, len(given)) for count in counts.values())
        rows.append(Asked(f"COCO_{part}_{image:012d}", question, tuple(counts), kind, scores))
        if frequent is not None:
            most = found.get("multiple_choice_answer")
            frequent[normalised(most) if isinstance(most, str) else counts.most_common(1)[0][0]] += 1
    return rows


def _number(entry: dict[str, Any], name: str, path: Path) -> int:
    number = entry.get(name)
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{path}: {name} must be a whole number, got {number!r}")
    return number
