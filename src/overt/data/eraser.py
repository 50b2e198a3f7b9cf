"""Movie reviews with a sentiment and the words that show it: ERASER's movies (DeYoung et al. 2020)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overt.data.files import data_folder, find_file, read_text

CLASSES = ("negative", "positive")  # in SST-2's order
LABELS = {"NEG": 0, "POS": 1}
SPLITS = ("train", "val", "test")
ADVICE = "put docs/ (or docs.json), train.jsonl, val.jsonl and test.jsonl into DIR/eraser/movies"


@dataclass(frozen=True)
class Review:
    """A review, its sentiment, and where annotators found it.

    Attributes:
        name: of the document.
        words: of the review, with punctuation marks as words.
        label: index of its class in `CLASSES`.
        evidence: first word of each passage that shows the sentiment, and the word after its last. A few
            passages of the published files have no words, and are left out.
    """

    name: str
    words: tuple[str, ...]
    label: int
    evidence: tuple[tuple[int, int], ...]

    @property
    def text(self) -> str:
        """The words, with spaces between them."""
        return " ".join(self.words)


def load_movies(data: Path | None = None) -> dict[str, list[Review]]:
    """The reviews of "train", "val" and "test".

    Args:
        data: folder with the files, or with movies/ or eraser/movies/ inside (by default OVERT_DATA). Its
            documents are files in docs/, or all in docs.json.

    Raises:
        FileNotFoundError: they are not there.
        ValueError: a file is not as published; the error names it and the line.
    """
    data = data_folder(data)
    if data is None:
        raise FileNotFoundError(f"no --data was given; {ADVICE} and give --data DIR")
    places = [data / "eraser" / "movies", data / "movies", data]
    folder = next((place for place in places if find_file(place, "train.jsonl")), None)
    if folder is None:
        raise FileNotFoundError(f"{data} has no movies of ERASER: {ADVICE}")
    files = {split: find_file(folder, f"{split}.jsonl") for split in SPLITS}
    documents = _Documents(folder)
    found = {}
    for split, path in files.items():
        if path is None:
            raise FileNotFoundError(f"{folder} has no {split}.jsonl: {ADVICE}")
        lines = enumerate(read_text(path).split("\n"), start=1)
        found[split] = [
            _review(line, documents, f"{path}, line {number}") for number, line in lines if line.strip()
        ]
    return found


class _Documents:
    """The texts of a folder by name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.together = folder / "docs", find_file(folder, "docs.json")
        self.texts: dict[str, str] = {}
        if self.together is not None:
            try:
                self.texts = json.loads(read_text(self.together))
            except json.JSONDecodeError as error:
                raise ValueError(f"{self.together}, line {error.lineno}: no JSON: {error.msg}") from None
            if not isinstance(self.texts, dict) or not all(isinstance(x, str) for x in self.texts.values()):
                raise ValueError(f"{self.together} must be a JSON object of texts by name")
        elif not self.folder.is_dir():
            raise FileNotFoundError(f"{folder} has no docs/ and no docs.json: {ADVICE}")

    def words(self, name: str, where: str) -> tuple[str, ...]:
        """The words of a document."""
        if self.together is None:
            path = find_file(self.folder, Path(name).name)
            if path is not None:
                self.texts[name] = read_text(path)
        if name not in self.texts:
            raise ValueError(f"{where}: document {name!r} is not in {self.together or self.folder}")
        return tuple(self.texts[name].split())


def _review(line: str, documents: _Documents, where: str) -> Review:
    try:
        row: dict[str, Any] = json.loads(line)
        name, label = row["annotation_id"], row["classification"]
        passages = [
            (each["docid"], each["start_token"], each["end_token"], each["text"])
            for group in row["evidences"]
            for each in group
        ]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: must be JSON with annotation_id, classification and evidences, lists of docid, "
            f"start_token, end_token and text: {type(error).__name__} {error}"
        ) from None
    if label not in LABELS:
        raise ValueError(f"{where}: classification must be {' or '.join(LABELS)}, got {str(label)[:40]!r}")
    words = documents.words(str(name), where)
    for document, start, end, text in passages:
        if document != name:
            raise ValueError(f"{where}: evidence must be in {name!r}, got {str(document)[:40]!r}")
        inside = isinstance(start, int) and isinstance(end, int) and 0 <= start <= end <= len(words)
        if not inside or " ".join(words[start:end]) != text:
            raise ValueError(
                f"{where}: words {start} to {end} of {name} are not its evidence, {str(text)[:60]!r}"
            )
    evidence = tuple((start, end) for _, start, end, _ in passages if start < end)
    return Review(str(name), words, LABELS[label], evidence)
