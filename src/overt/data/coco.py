"""Captions in the layout of Karpathy and Fei-Fei 2015: COCO's (dataset_coco.json), split as papers do.

The photographs are not read: features of their regions must be given.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from overt.data.captions import PARTS, CaptionData, Captioned
from overt.data.files import data_folder, entries_of, find_file, read_text
from overt.data.vocabulary import tokenise, vocabulary_of

NAME = "coco"
FILE = "dataset_coco.json"
# "restval", the rest of COCO's own validation images, are trained on.
SPLITS = dict(zip(("train", "restval", "val", "test"), ("train", "train", "validation", "test"), strict=True))
LEAST = 6  # times that a word of the vocabulary occurs in training; published: more than five times


def load(data: Path | None = None, least: int = LEAST) -> CaptionData:
    """COCO from dataset_coco.json in a folder or its coco/.

    Args:
        data: the folder (by default OVERT_DATA).
        least: times that a word of the vocabulary occurs in training.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not as published; the error names it and the image.
    """
    path = _path(data_folder(data))
    text = read_text(path)
    parts: dict[str, list[Captioned]] = {part: [] for part in PARTS}
    seen: set[str] = set()
    empty = 0
    for number, entry in enumerate(entries_of(text, "images", path)):
        name, split = entry.get("filename"), entry.get("split")
        where = f"{path}, image {name if isinstance(name, str) else number}"
        if not isinstance(name, str) or not name:
            raise ValueError(f"{where}: filename must be a name, got {name!r}")
        if name in seen:
            raise ValueError(f"{where}: it must be there once, and is there again")
        seen.add(name)
        if split not in SPLITS:
            raise ValueError(f"{where}: split must be one of {', '.join(SPLITS)}, got {split!r}")
        captions = _captions(entry.get("sentences"), where)
        said = [caption for caption in captions if tokenise(caption)]
        empty += len(captions) - len(said)
        if not said:
            raise ValueError(f"{where}: it must have a caption with a word, got none")
        parts[SPLITS[split]].append(Captioned(name, tuple(said)))
    for part, rows in parts.items():
        if not rows:
            raise ValueError(f"{path} must have images for {part}, got none")
    vocabulary = vocabulary_of((caption for row in parts["train"] for caption in row.captions), least)
    if not vocabulary.words:
        raise ValueError(f"{path} must have words that occur {least} times in training, got none")
    digest = hashlib.sha256(text.encode()).hexdigest()
    train, validation, test = parts.values()
    return CaptionData(NAME, train, validation, test, vocabulary, None, digest, {"empty_captions": empty})


def _path(data: Path | None) -> Path:
    if data is None:
        raise FileNotFoundError(f"COCO needs a folder with {FILE}: give --data DIR")
    for folder in (data / NAME, data):
        if path := find_file(folder, FILE):
            return path
    raise FileNotFoundError(f"{data} has no COCO: put {FILE} there or into {NAME}/")


def _captions(sentences: Any, where: str) -> list[str]:
    if not isinstance(sentences, list) or not all(
        isinstance(each, dict) and isinstance(each.get("raw"), str) for each in sentences
    ):
        raise ValueError(f'{where}: sentences must be a list of {{"raw": …}}, got {str(sentences)[:80]}')
    return [" ".join(each["raw"].split()) for each in sentences]
