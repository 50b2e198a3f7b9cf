"""Flickr8k (Hodosh et al. 2013) in its original layout: 8,000 photographs with five captions each."""

from __future__ import annotations

import hashlib
from pathlib import Path

from overt.data import named_images
from overt.data.captions import PARTS, CaptionData, Captioned
from overt.data.files import data_folder, find_file, read_text
from overt.data.vocabulary import tokenise, vocabulary_of

NAME = "flickr8k"
CAPTIONS = "Flickr8k.token.txt"
SPLITS = {
    part: f"Flickr_8k.{name}Images.txt" for part, name in zip(PARTS, ("train", "dev", "test"), strict=True)
}
PLACES = ("Flicker8k_Dataset", "Flickr8k_Dataset", "images", "Images")  # the first is spelt as published
SIDE = 128
LEAST = 5  # times that a word of the vocabulary occurs in training


def load(data: Path | None = None, side: int = SIDE, pictures: bool = True) -> CaptionData:
    """Flickr8k from a folder or its flickr8k/, with the published parts.

    A caption whose image is missing is left out, and counted; so is an image that is in no part.

    Args:
        data: the folder (by default OVERT_DATA).
        side: height and width of the images, which are scaled to squares.
        pictures: whether to read the images.

    Raises:
        FileNotFoundError: there is no Flickr8k.
        ValueError: a file is not as published; the error names it and the line.
    """
    folder = _folder(data_folder(data))
    digest = hashlib.sha256()
    captions = _captions(folder, digest)
    images = named_images.find(folder, PLACES) if pictures else None
    counts = {"captions_without_image": 0, "images_in_no_part": 0}
    if images is not None:
        digest.update(images.sha256.encode())
        for name in [name for name in captions if name not in images]:
            counts["captions_without_image"] += len(captions.pop(name))
    parts, seen = {}, dict[str, str]()
    for part, file in SPLITS.items():
        path = _path(folder, file)
        text = read_text(path)
        digest.update(text.encode())
        rows = []
        for number, line in enumerate(text.split("\n"), 1):
            if not (name := line.strip()):
                continue
            where = f"{path}, line {number}"
            if name in seen:
                raise ValueError(f"{where}: {name} must be in one part only, and is in {seen[name]}, too")
            if images is not None and name not in images:
                raise ValueError(f"{where}: {name} has no image in {images.source}")
            if name not in captions:
                raise ValueError(f"{where}: {name} has no captions in {CAPTIONS}")
            seen[name] = file
            rows.append(Captioned(name, captions[name]))
        if not rows:
            raise ValueError(f"{path} must name images, a line each, got none")
        parts[part] = rows
    counts["images_in_no_part"] = len(captions.keys() - seen.keys())
    vocabulary = vocabulary_of((text for row in parts["train"] for text in row.captions), LEAST)
    if not vocabulary.words:
        raise ValueError(
            f"{folder / CAPTIONS} must have words that occur {LEAST} times in training, got none"
        )
    pixels = None if images is None else images.pixels(list(seen), side)
    train, validation, test = parts.values()
    return CaptionData(NAME, train, validation, test, vocabulary, pixels, digest.hexdigest(), counts)


def _folder(data: Path | None) -> Path:
    wanted = f"{CAPTIONS} and {', '.join(SPLITS.values())}"
    if data is None:
        raise FileNotFoundError(f"Flickr8k needs a folder with {wanted}: give --data DIR")
    for folder in (data / NAME, data):
        if find_file(folder, CAPTIONS):
            return folder
    raise FileNotFoundError(f"{data} has no Flickr8k: put {wanted} there or into {NAME}/")


def _path(folder: Path, name: str) -> Path:
    path = find_file(folder, name)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {name}")
    return path


def _captions(folder: Path, digest: hashlib._Hash) -> dict[str, tuple[str, ...]]:
    """Image → captions, from lines of image#number, a tab and a caption."""
    path = _path(folder, CAPTIONS)
    text = read_text(path)
    digest.update(text.encode())
    captions: dict[str, dict[str, str]] = {}
    for line_number, line in enumerate(text.split("\n"), 1):
        if not line:
            continue
        where = f"{path}, line {line_number}"
        key, tab, caption = line.rstrip("\r").partition("\t")
        image, sharp, number = key.rpartition("#")
        if not tab or not sharp or not image or not number.isdecimal():
            raise ValueError(f"{where}: must be IMAGE#NUMBER, a tab and a caption, got {line[:80]!r}")
        if not tokenise(caption):
            raise ValueError(f"{where}: the caption of {key} must have a word, got {caption!r}")
        numbered = captions.setdefault(image, {})
        if number in numbered:
            raise ValueError(f"{where}: {key} has a caption already")
        numbered[number] = caption
    if not captions:
        raise ValueError(f"{path} must have captions, a line each, got none")
    return {image: tuple(numbered.values()) for image, numbered in captions.items()}
