"""SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018), from files in their original layout or from the hub."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from overt import _check
from overt.data import hub
from overt.data.files import data_folder, find_file, read_text

HUB = {"1.1": "rajpurkar/squad", "2.0": "rajpurkar/squad_v2"}
SUBSET_NAME = "SQuAD subset"
NAMES = {**{f"SQuAD {version}": version for version in HUB}, SUBSET_NAME: None}  # name → version
NEAR = 2  # characters that an answer may be away from where its file says


class Question(NamedTuple):
    """A question about a context.

    Attributes:
        id: unique in its file.
        title: of the article; empty if the file does not say.
        context: the paragraph.
        text: of the question.
        answers: texts of the answers; empty for an impossible question.
        starts: where each answer starts in the context, in characters.
        impossible: whether the context does not answer it.
    """

    id: str
    title: str
    context: str
    text: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]
    impossible: bool = False


@dataclass(frozen=True, eq=False)
class Questions:
    """The questions of a data set.

    Attributes:
        name: what it is.
        train: for training.
        test: for evaluation; SQuAD's development set.
        source: folder, or place on the hub.
        sha256: hash of all that was read.
        remarks: what was changed.
    """

    name: str
    train: list[Question]
    test: list[Question]
    source: str
    sha256: str
    remarks: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        """Sizes and origin, for the result file; as GLUE's tasks have them."""
        parts = {"train": self.train, "dev": self.test}
        return {
            "task": self.name,
            "train": len(self.train),
            "dev": {self.name: len(self.test)},
            "impossible": {part: sum(row.impossible for row in rows) for part, rows in parts.items()},
            "source": self.source,
            "sha256": self.sha256,
            "remarks": list(self.remarks),
        }


def load(version: str, data: Path | None = None) -> Questions:
    """SQuAD from train-v1.1.json and dev-v1.1.json in a folder or its squad/, or else from the hub.

    Args:
        version: "1.1" or "2.0".
        data: the folder (by default OVERT_DATA).

    Raises:
        FileNotFoundError: neither has it.
        ValueError: a file is not as published; the error names it and the question.
    """
    _check.one_of("version", version, HUB)
    data = data_folder(data)
    names = [f"{part}-v{version}.json" for part in ("train", "dev")]
    advice = f"put {' and '.join(names)} into DIR or DIR/squad and give --data DIR"
    paths = _find(data, names)
    if paths is not None:
        texts = [read_text(path) for path in paths]
        sources = [str(path) for path in paths]
        parts = [_articles(text, source) for text, source in zip(texts, sources, strict=True)]
        place, digest = str(paths[0].parent), _digest(texts)
    else:
        where = "no --data was given" if data is None else f"{' and '.join(names)} not found in --data {data}"
        splits = hub.load(HUB[version], None, f"SQuAD {version}: {where}", advice)
        place = f"{HUB[version]} on the hub"
        sources = [f"{split} of {place}" for split in ("train", "validation")]
        parts = [_hub_questions(splits, split, place) for split in ("train", "validation")]
        digest = _digest(repr(question) for part in parts for question in part)
    checked, remarks = [], []
    for part, source in zip(parts, sources, strict=True):
        questions, moved = _checked(part, source, version)
        checked.append(questions)
        if moved:
            remarks.append(f"{source}: {moved} answers were up to {NEAR} characters away from their start")
    train, test = checked
    return Questions(f"SQuAD {version}", train, test, place, digest, tuple(remarks))


def load_available(
    data: Path | None = None, names: Iterable[str] = NAMES
) -> tuple[dict[str, Questions], dict[str, str]]:
    """The data sets that are there, by name, and for each of the others the reason.

    Where the folder has neither file of SQuAD 1.1, but the public subsets, those take its place under their
    own name. A file that is there and is not as published is still an error.

    Args:
        data: the folder (by default OVERT_DATA).
        names: some of `NAMES`.
    """
    data = data_folder(data)
    found, missing = {}, {}
    for name in names:
        _check.one_of("name", name, NAMES)
        version = NAMES[name]
        if version == "1.1" and _has_subset_alone(data):
            version = None
        try:
            questions = load_subset(data) if version is None else load(version, data)
        except FileNotFoundError as error:
            missing[name] = str(error)
        else:
            found[questions.name] = questions
    return found, missing


def set_apart(
    questions: Sequence[Question], share: float = 0.1, seed: int = 0
) -> tuple[list[Question], list[Question]]:
    """Questions to train on and questions to choose settings with, both in their order.

    All questions of an article stay together, or of a context where the article is not named, so that no
    context is in both. The second part is therefore not larger than the share, unless the smallest article
    is. The split depends on the questions and on the seed only.
    """
    _check.fraction("share", share)
    owners: dict[str, tuple[str, str]] = {}  # of contexts
    together: dict[tuple[str, str], list[int]] = defaultdict(list)
    for place, question in enumerate(questions):
        key = ("article", question.title) if question.title else ("context", question.context)
        together[owners.setdefault(question.context, key)].append(place)
    if len(together) < 2:
        raise ValueError(
            f"questions must be about at least two articles to set {share:.0%} of them apart, got "
            f"{len(questions)} about {len(together)}"
        )
    groups = list(together.values())
    Random(seed).shuffle(groups)
    held: set[int] = set()
    for group in groups:
        if len(held) + len(group) <= round(share * len(questions)):
            held.update(group)
    if not held:
        smallest: list[int] = min(groups, key=len)
        held.update(smallest)
    kept = [question for place, question in enumerate(questions) if place not in held]
    return kept, [questions[place] for place in sorted(held)]


# --- Files ---


def read(path: Path) -> list[Question]:
    """The questions of a file in SQuAD's layout."""
    return _checked(_articles(read_text(path), str(path)), str(path), "2.0")[0]


def _find(data: Path | None, names: list[str]) -> list[Path] | None:
    """The files in a folder or in its squad/, if all of them are there."""
    for folder in () if data is None else (data, data / "squad"):
        paths = [path for name in names if (path := find_file(folder, name))]
        if len(paths) == len(names):
            return paths
    return None


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} must be JSON: {error}") from None


def _articles(text: str, name: str) -> list[Question]:
    """The questions of a file, not yet checked."""
    questions = []
    last = "none yet"
    try:
        for article in _json(text, name)["data"]:
            for paragraph in article["paragraphs"]:
                for asked in paragraph["qas"]:
                    last = asked["id"]
                    answers = asked["answers"]
                    questions.append(
                        Question(
                            last,
                            article.get("title", ""),
                            paragraph["context"],
                            asked["question"],
                            tuple(answer["text"] for answer in answers),
                            tuple(answer["answer_start"] for answer in answers),
                            asked.get("is_impossible", False),
                        )
                    )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{name} must have SQuAD's layout (data, paragraphs, qas, …), after question {last}: "
            f"{type(error).__name__} {error}"
        ) from None
    return questions


def _hub_questions(splits: Any, split: str, source: str) -> list[Question]:
    names = ["id", "title", "context", "question", "answers"]
    return [
        Question(
            name,
            title,
            context,
            text,
            tuple(answers["text"]),
            tuple(answers["answer_start"]),
            not answers["text"],
        )
        for name, title, context, text, answers in zip(
            *hub.columns(splits, split, names, source), strict=True
        )
    ]


def _checked(questions: list[Question], source: str, version: str) -> tuple[list[Question], int]:
    """The questions with every answer at its start, and how many answers had to be moved there.

    An answer up to `NEAR` characters away is moved. Any other that is not at its start is an error: its place
    would be a guess.
    """
    checked, moved, seen = [], 0, set()
    for question in questions:
        where = f"{source}, question {question.id}"
        if not isinstance(question.id, str) or question.id in seen:
            raise ValueError(f"{where}: ids must be texts, each of one question")
        seen.add(question.id)
        if not isinstance(question.context, str) or not isinstance(question.text, str):
            raise ValueError(f"{where}: context and question must be texts")
        if question.impossible != (not question.answers):
            state = "impossible, but has answers" if question.impossible else "possible, but has no answer"
            raise ValueError(f"{where}: it is marked {state}")
        if question.impossible and version == "1.1":
            raise ValueError(f"{where}: it has no answer, and all questions of SQuAD 1.1 have one")
        starts = tuple(
            _start(question.context, text, start, where)
            for text, start in zip(question.answers, question.starts, strict=True)
        )
        moved += sum(old != new for old, new in zip(question.starts, starts, strict=True))
        checked.append(question._replace(starts=starts))
    return checked, moved


def _start(context: str, answer: object, start: object, where: str) -> int:
    """The start of an answer, at most `NEAR` characters from where its file says."""
    if not isinstance(answer, str) or not answer or not isinstance(start, int) or start < 0:
        raise ValueError(f"{where}: an answer must be a text and its start, got {answer!r} and {start!r}")
    for place in sorted(range(max(0, start - NEAR), start + NEAR + 1), key=lambda place: abs(place - start)):
        if context.startswith(answer, place):
            return place
    raise ValueError(
        f"{where}: the answer {answer[:80]!r} is not at character {start} of the context, "
        f"which has {context[start : start + len(answer)][:80]!r} there"
    )


# --- A split of public subsets ---

SUBSET = ("jucho_squad_subset.json", "routerlens_squad_dev.json", "xquad.en.json")
SUBSET_COUNTS = {"questions of other articles": 3_939, "rows with one place": 3_678, "test questions": 1_190}


def load_subset(data: Path | None = None) -> Questions:
    """A training and a test set out of three public files, where SQuAD itself is not to be had.

    Trained on: the questions of `SUBSET[0]` (SQuAD's layout) about articles that XQuAD does not have, and the
    rows of `SUBSET[1]` (context, question, answer) whose answer occurs once, so that its place is certain,
    and whose context neither of the other files has. Tested on: XQuAD's English questions (Artetxe et al.
    2020), with one answer each. These are no published splits: scores are not comparable with SQuAD's.

    Raises:
        FileNotFoundError: a file is missing from the folder and its squad/.
        ValueError: the counts are not `SUBSET_COUNTS`: the files are others.
    """
    data = data_folder(data)
    paths = _find(data, list(SUBSET))
    if paths is None:
        where = "no --data was given" if data is None else f"not found in --data {data}"
        raise FileNotFoundError(f"{', '.join(SUBSET)}: {where}; put them into DIR or DIR/squad")
    texts = [read_text(path) for path in paths]
    articles, test = (
        _checked(_articles(texts[place], str(paths[place])), str(paths[place]), "1.1")[0] for place in (0, 2)
    )
    titles = {question.title for question in test}
    other = [question for question in articles if question.title not in titles]
    known = {question.context for question in (*articles, *test)}
    once = _placed(_json(texts[1], str(paths[1])), str(paths[1]), known)
    counts = dict(zip(SUBSET_COUNTS, map(len, (other, once, test)), strict=True))
    if counts != SUBSET_COUNTS:
        shown = "; ".join(
            f"{name} {counts[name]:,} of {count:,}"
            for name, count in SUBSET_COUNTS.items()
            if counts[name] != count
        )
        raise ValueError(f"{paths[0].parent} must have the files of the known split, but has: {shown}")
    remarks = ("no published split: XQuAD-en for testing, and what it does not contain for training",)
    return Questions(SUBSET_NAME, other + once, test, str(paths[0].parent), _digest(texts), remarks)


def _has_subset_alone(data: Path | None) -> bool:
    """Whether a folder has the public subsets and no file of SQuAD 1.1."""
    published = any(_find(data, [f"{part}-v1.1.json"]) for part in ("train", "dev"))
    return not published and _find(data, list(SUBSET)) is not None


def _placed(rows: list[Mapping[str, str]], name: str, known: set[str]) -> list[Question]:
    """Rows without places whose answer occurs once in a context that is not known."""
    questions = []
    for number, row in enumerate(rows):
        try:
            context, text, answer = row["context"], row["question"], row["answer"]
        except (KeyError, TypeError):
            raise ValueError(f"{name}, row {number}: must have context, question and answer") from None
        if context not in known and context.count(answer) == 1:
            questions.append(
                Question(f"row-{number}", "", context, text, (answer,), (context.index(answer),))
            )
    return questions
