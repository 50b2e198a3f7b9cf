"""Texts with a class and the words that show it: the data sets of ERASER (DeYoung et al. 2020).

Movie reviews, MultiRC, FEVER, CoS-E and e-SNLI, in the benchmark's own files: a line for each annotation in
train.jsonl, val.jsonl and test.jsonl, and documents in docs/, docs.jsonl or docs.json. Predictions are
written as the benchmark's own script reads them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from overt import _check
from overt._files import write_whole
from overt.data.files import data_folder, find_file, read_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLASSES = ("negative", "positive")  # of movies, in SST-2's order
SPLITS = ("train", "val", "test")


class DataSet(NamedTuple):
    """One of the benchmark's data sets.

    Attributes:
        title: in tables.
        labels: as in its files; a class is an index into them.
        documents: how the names of an annotation's documents end, after its own name, in their order; the
            annotation tells them if there are none here.
    """

    title: str
    labels: tuple[str, ...]
    documents: tuple[str, ...] = ()


DATA_SETS = {
    "movies": DataSet("movie reviews", ("NEG", "POS"), ("",)),
    "multirc": DataSet("MultiRC", ("False", "True")),
    "fever": DataSet("FEVER", ("REFUTES", "SUPPORTS")),
    "cose": DataSet("CoS-E", ("A", "B", "C", "D", "E")),
    "esnli": DataSet("e-SNLI", ("contradiction", "entailment", "neutral"), ("_premise", "_hypothesis")),
}


class Document(NamedTuple):
    """One of an annotation's documents.

    Attributes:
        name: as in the files.
        words: how many it has.
        empty: places, counted from its beginning, of words of nothing but white space, such as those between
            two spaces in docs.jsonl. The benchmark counts them, and we leave them out.
    """

    name: str
    words: int
    empty: tuple[int, ...] = ()

    def ours(self, place: int) -> int:
        """The place of a word without the empty ones before it."""
        return place - sum(gap < place for gap in self.empty)

    def theirs(self, place: int) -> int:
        """The place of a word as the benchmark counts."""
        for gap in self.empty:
            place += gap <= place
        return place


@dataclass(frozen=True)
class Example:
    """A text, its class, and where annotators found it.

    Attributes:
        name: of the annotation.
        words: of its document, with punctuation marks as words; of several documents, one after the other.
        label: index of its class in the labels of its data set.
        evidence: first word of each passage that shows the class, and the word after its last. A few passages
            of the published movies have no words, and are left out.
        query: what is asked of the text, such as a claim; empty for none.
        documents: in the order in which their words stand.
    """

    name: str
    words: tuple[str, ...]
    label: int
    evidence: tuple[tuple[int, int], ...]
    query: str = ""
    documents: tuple[Document, ...] = field(default=(), compare=False)

    @property
    def text(self) -> str:
        """The words, with spaces between them."""
        return " ".join(self.words)

    @property
    def rationale(self) -> NDArray[np.bool_]:
        """Which words are in a passage."""
        marked = np.zeros(len(self.words), dtype=bool)
        for start, end in self.evidence:
            marked[start:end] = True
        return marked


def load_movies(data: str | Path | None = None) -> dict[str, list[Example]]:
    """The reviews of "train", "val" and "test"; as `load`."""
    return load("movies", data)


def load(
    name: str, data: str | Path | None = None, splits: Sequence[str] = SPLITS
) -> dict[str, list[Example]]:
    """A data set's examples by split.

    Args:
        name: "movies", "multirc", "fever", "cose" or "esnli".
        data: folder with the files, or with NAME/ or eraser/NAME/ inside (by default OVERT_DATA).
        splits: those to read.

    Raises:
        FileNotFoundError: they are not there.
        ValueError: a file is not as published; the error names it and the line.
    """
    _check.one_of("name", name, tuple(DATA_SETS))
    for split in splits:
        _check.one_of("splits", split, SPLITS)
    files = ", ".join(f"{split}.jsonl" for split in splits)
    advice = f"put docs/ (or docs.jsonl, or docs.json) and {files} into DIR/eraser/{name}"
    data = data_folder(data)
    if data is None:
        raise FileNotFoundError(f"no --data was given; {advice} and give --data DIR")
    places = [data / "eraser" / name, data / name, data]
    folder = next((place for place in places if _has_annotations(place)), None)
    if folder is None:
        raise FileNotFoundError(f"{data} has no {name} of ERASER: {advice}")
    documents = _Documents(folder, advice)
    paths = {split: find_file(folder, f"{split}.jsonl") for split in splits}
    missing = [split for split, path in paths.items() if path is None]
    if missing:
        raise FileNotFoundError(f"{folder} has no {missing[0]}.jsonl: {advice}")
    found = {}
    for split, path in paths.items():
        assert path is not None
        lines = enumerate(read_text(path).split("\n"), start=1)
        found[split] = [
            _example(line, DATA_SETS[name], documents, f"{path}, line {number}")
            for number, line in lines
            if line.strip()
        ]
        if not found[split]:
            raise ValueError(f"{path} has no annotations")
    return found


def _has_annotations(folder: Path) -> bool:
    return any(find_file(folder, f"{split}.jsonl") for split in SPLITS)


class _Documents:
    """The texts of a folder by name."""

    def __init__(self, folder: Path, advice: str) -> None:
        self.folder = folder / "docs"
        names = ("docs.jsonl", "docs.json")
        self.together = next(filter(None, (find_file(folder, name) for name in names)), None)
        self.texts: dict[str, str] = {}
        self.counts_empty = self.together is not None and ".jsonl" in self.together.suffixes
        if self.together is not None and self.counts_empty:
            self.texts = self._lines(self.together)
        elif self.together is not None:
            try:
                self.texts = json.loads(read_text(self.together))
            except json.JSONDecodeError as error:
                raise ValueError(f"{self.together}, line {error.lineno}: no JSON: {error.msg}") from None
            if not isinstance(self.texts, dict) or not all(isinstance(x, str) for x in self.texts.values()):
                raise ValueError(f"{self.together} must be a JSON object of texts by name")
        elif not self.folder.is_dir():
            raise FileNotFoundError(f"{folder} has no docs/, docs.jsonl or docs.json: {advice}")

    def _lines(self, path: Path) -> dict[str, str]:
        """The texts of docs.jsonl, a document in each line."""
        texts = {}
        for number, line in enumerate(read_text(path).split("\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                texts[row["docid"]] = row["document"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: must be JSON with docid and document: "
                    f"{type(error).__name__} {error}"
                ) from None
            if not isinstance(row["docid"], str) or not isinstance(row["document"], str):
                raise ValueError(f"{path}, line {number}: docid and document must be text")
        return texts

    def words(self, name: str, where: str) -> tuple[str, ...]:
        """The words of a document, as the benchmark's code splits it: at line ends, and at spaces alone.

        A word may hold another white space, such as a space that does not break. In docs.jsonl a word may be
        empty, and counts.
        """
        if self.together is None and name not in self.texts:
            inside = (self.folder / name).resolve().is_relative_to(self.folder.resolve())
            path = find_file(self.folder, name) if inside else None
            if path is not None:
                self.texts[name] = read_text(path)
        if name not in self.texts:
            raise ValueError(f"{where}: document {name!r} is not in {self.together or self.folder}")
        if self.counts_empty:
            return tuple(word for line in self.texts[name].split("\n") for word in line.strip().split(" "))
        lines = re.split("\r\n|\r|\n", self.texts[name])
        return tuple(word for line in lines for word in line.strip().split(" ") if word)


def _example(line: str, kind: DataSet, documents: _Documents, where: str) -> Example:
    try:
        row: dict[str, Any] = json.loads(line)
        name, label = row["annotation_id"], row["classification"]
        passages = [
            (each["docid"], each["start_token"], each["end_token"], each["text"])
            for group in row["evidences"]
            for each in group
        ]
        docids, query = row.get("docids") or [], row.get("query") or ""
        if not isinstance(docids, list) or not isinstance(query, str):
            raise TypeError("docids must be a list and query text, or null")
        # A document that is named twice is read once.
        told = list(dict.fromkeys(str(document) for document in docids or [each[0] for each in passages]))
        own = [f"{name}{end}" for end in kind.documents]
        # Passages may all be in one of two documents, and docids may be null or in any order.
        other = len(docids) == len(own) and set(told) != set(own)
        listed = own if own and not other else told or [str(name)]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: must be JSON with annotation_id, classification and evidences, lists of docid, "
            f"start_token, end_token and text: {type(error).__name__} {error}"
        ) from None
    if label not in kind.labels:
        known = " or ".join(kind.labels)
        raise ValueError(f"{where}: classification must be {known}, got {str(label)[:40]!r}")
    words: tuple[str, ...] = ()
    starts, parts = dict[str, int](), dict[str, Document]()
    for document in listed:
        all_words = documents.words(document, where)
        these = tuple(word for word in all_words if word.strip())
        starts[document] = len(words)
        empty = tuple(place for place, word in enumerate(all_words) if not word.strip())
        parts[document] = Document(document, len(these), empty)
        words += these
    evidence = []
    for document, start, end, text in passages:
        if document not in starts:
            those = " or ".join(repr(each) for each in starts)
            raise ValueError(f"{where}: evidence must be in {those}, got {str(document)[:40]!r}")
        part = parts[document]
        inside = isinstance(start, int) and isinstance(end, int)
        inside = inside and 0 <= start <= end <= part.words + len(part.empty)
        first, last = (starts[document] + part.ours(place) for place in (start, end)) if inside else (0, 0)
        found = "".join("".join(words[first:last]).split())
        if not inside or found != "".join(str(text).split()):
            raise ValueError(
                f"{where}: words {start} to {end} of {document} are not its evidence, {str(text)[:60]!r}"
            )
        if first < last:
            evidence.append((first, last))
    return Example(str(name), words, kind.labels.index(label), tuple(evidence), query, tuple(parts.values()))


# --- Predictions ---


class Prediction(NamedTuple):
    """What a method says of an example, and what the classifier makes of parts of it.

    Attributes:
        scores: of the words, (words,).
        spans: the passages that are chosen.
        probabilities: of the classes from the whole text, (classes,).
        shares: of the words that are deleted or kept, (shares,).
        without: probabilities without the highest scores, (shares, classes).
        only: probabilities from these alone, (shares, classes).
        without_spans: probabilities without the passages that are chosen, (classes,). The benchmark's script
            refuses shares without these two.
        only_spans: probabilities from these passages alone, (classes,).
    """

    scores: Any
    spans: Sequence[tuple[int, int]]
    probabilities: Any
    shares: Sequence[float] = ()
    without: Any = ()
    only: Any = ()
    without_spans: Any = None
    only_spans: Any = None


def write_predictions(
    path: str | Path, name: str, examples: Sequence[Example], predictions: Sequence[Prediction]
) -> None:
    """Write predictions as ERASER's own script reads them, a line of JSON for each example.

    Args:
        path: of the file.
        name: of the data set.
        examples: of a split, all of them.
        predictions: one for each.
    """
    _check.one_of("name", name, tuple(DATA_SETS))
    if len(examples) != len(predictions):
        raise ValueError(f"predictions must be {len(examples)}, one for each example, got {len(predictions)}")
    labels = DATA_SETS[name].labels
    lines = [
        json.dumps(_line(example, prediction, labels), allow_nan=False)
        for example, prediction in zip(examples, predictions, strict=True)
    ]
    write_whole(path, "\n".join(lines) + "\n")


def _line(example: Example, prediction: Prediction, labels: tuple[str, ...]) -> dict[str, Any]:
    scores = np.asarray(prediction.scores, dtype=np.float64)
    if scores.shape != (len(example.words),) or not np.isfinite(scores).all():
        raise ValueError(
            f"{example.name}: scores must be {len(example.words)} finite numbers, got shape {scores.shape}"
        )
    rationales, first = [], 0
    least = float(np.nextafter(scores.min(), -np.inf))  # of what is no word for us: below all words
    for document in example.documents or (Document(example.name, len(example.words)),):
        last = first + document.words
        inside = [(max(start, first), min(end, last)) for start, end in prediction.spans]
        soft = scores[first:last].tolist()
        for gap in document.empty:
            soft.insert(gap, least)
        rationales.append(
            {
                "docid": document.name,
                "hard_rationale_predictions": [
                    {
                        "start_token": document.theirs(start - first),
                        "end_token": document.theirs(end - first - 1) + 1,
                    }
                    for start, end in inside
                    if start < end
                ],
                "soft_rationale_predictions": soft,
            }
        )
        first = last

    def named(values: Any) -> dict[str, float]:
        numbers = np.asarray(values, dtype=np.float64)
        if numbers.shape != (len(labels),):
            raise ValueError(
                f"{example.name}: probabilities must be {len(labels)}, one for each of {', '.join(labels)}, "
                f"got shape {numbers.shape}"
            )
        return dict(zip(labels, numbers.tolist(), strict=True))

    parts = zip(prediction.shares, prediction.without, prediction.only, strict=True)
    spans = {
        "comprehensiveness_classification_scores": prediction.without_spans,
        "sufficiency_classification_scores": prediction.only_spans,
    }
    if len(prediction.shares) and any(each is None for each in spans.values()):
        raise ValueError(
            f"{example.name}: shares need the probabilities without and from the chosen passages, too"
        )
    thresholded = [
        {
            "threshold": share,
            "comprehensiveness_classification_scores": named(without),
            "sufficiency_classification_scores": named(only),
        }
        for share, without, only in parts
    ]
    return {
        "annotation_id": example.name,
        "rationales": rationales,
        "classification": labels[int(np.argmax(prediction.probabilities))],
        "classification_scores": named(prediction.probabilities),
        **{field: named(each) for field, each in spans.items() if each is not None},
        **({"thresholded_scores": thresholded} if thresholded else {}),  # the script refuses an empty list
    }
