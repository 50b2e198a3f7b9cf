"""Labelled images in folders, as ImageNet is kept: train/CLASS/*.jpg and val/CLASS/*.jpg.

Images stay on the disk and are decoded when they are needed. Training images are cropped as for Inception
(Szegedy et al. 2015): 8 to 100 % of the area, sides in a ratio of 3/4 to 4/3. Test images are scaled so that
the shorter side has 8/7 of the network's (256 of 224 pixels), and their centre is taken.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from overt.data.images import description, validation_part
from overt.data.pictures import UnreadableImageError, middle, opened, resized_to

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 224
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".tif", ".tiff")
TRAIN, TESTS = "train", ("val", "valid", "validation", "test")
AREAS, RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of training crops
TRIES = 10  # draws of a crop that fits
# Of ImageNet's pixels, as is usual: mean and standard deviation of red, green and blue.
MEAN, DEVIATION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


class ImageFiles(Dataset[Tensor]):
    """Image files; each item is an image's centre, uint8 (3, side, side).

    Args:
        folder: that the names start from.
        names: of the files.
        side: height and width of items.
    """

    def __init__(self, folder: Path, names: Sequence[str], side: int) -> None:
        self.folder, self.names, self.side = folder, list(names), side

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> Tensor:
        return _tensor(centre(self.image(number), self.side))

    def crop(self, number: int, random: Random, mirrored: bool) -> Tensor:
        """A random crop of an image, uint8 (3, side, side); with `mirrored`, half of them are."""
        return _tensor(random_crop(self.image(number), self.side, random, mirrored))

    def part(self, chosen: Tensor) -> ImageFiles:
        """The files that are chosen, boolean (files,)."""
        names = [name for name, kept in zip(self.names, chosen.tolist(), strict=True) if kept]
        return ImageFiles(self.folder, names, self.side)

    def image(self, number: int) -> Image:
        """An image, whole; an error names its file."""
        path = self.folder / self.names[number]
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UnreadableImageError(f"{path} cannot be read: {error.strerror or error}") from None
        return opened(content, str(path))


@dataclass(frozen=True, eq=False)
class ImageFolders:
    """Labelled images in files, in two parts; the attributes are like those of `Images`.

    Attributes:
        name: of the folder.
        train: files of the training images.
        train_labels: int64 (images,).
        test: like `train`.
        test_labels: like `train_labels`.
        classes: names of the labels.
        sha256: of the files' names and sizes; their contents would take too long.
        skipped: number of broken files that were left out.
        remark: what a reader of the results needs to know about the data.
        stand_in: whether they are the package's own.
        mirrored: whether a mirrored image has the same label.
    """

    name: str
    train: ImageFiles
    train_labels: Tensor
    test: ImageFiles
    test_labels: Tensor
    classes: list[str]
    sha256: str
    skipped: int = 0
    remark: str | None = None
    stand_in: bool = False
    mirrored: bool = True

    def describe(self) -> dict[str, Any]:
        """For a result file."""
        side = self.train.side
        return {**description(self, [3, side, side]), "skipped": self.skipped}

    def colours(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel, (3,) each: those of ImageNet."""
        return torch.tensor(MEAN), torch.tensor(DEVIATION)

    def for_validation(self, share: float, seed: int = 0) -> ImageFolders:
        """Without the test set: part of the training set, the same share of each class, takes its place."""
        part: ImageFolders = validation_part(self, self.train.part, share, seed)
        return part

    def without(self, broken: Collection[str]) -> ImageFolders:
        """Without some files, which are counted; a class that loses all its images is an error."""
        if not broken:
            return self
        parts: list[Any] = []
        for files, labels in ((self.train, self.train_labels), (self.test, self.test_labels)):
            kept = torch.tensor([name not in broken for name in files.names])
            left = labels[kept].bincount(minlength=len(self.classes))
            if not left.all():
                empty = self.classes[int(left.argmin())]
                raise ValueError(f"--skip-broken leaves no image of class {empty} in {files.folder}")
            parts += [files.part(kept), labels[kept]]
        train, train_labels, test, test_labels = parts
        return replace(
            self,
            train=train,
            train_labels=train_labels,
            test=test,
            test_labels=test_labels,
            sha256=hashlib.sha256(
                "\n".join([self.sha256, *sorted(broken)]).encode("utf-8", "surrogateescape")
            ).hexdigest(),
            skipped=self.skipped + len(broken),
            remark=f"{len(broken):,} broken file{'s' if len(broken) > 1 else ''} skipped",
        )


def load(folder: Path, side: int | None = None) -> ImageFolders:
    """The images in train/CLASS and val/CLASS (or valid, validation, test) of a folder; none is opened.

    Args:
        folder: with both.
        side: height and width of crops, 224 by default.
    """
    side = SIDE if side is None else side
    test = next((name for name in TESTS if (folder / name).is_dir()), None)
    if not (folder / TRAIN).is_dir() or test is None:
        tests = f"{', '.join(TESTS[:-1])} or {TESTS[-1]}"
        raise FileNotFoundError(f"{folder} must have folders {TRAIN}/CLASS and {tests}/CLASS with images")
    found = {split: _listed(folder / split) for split in (TRAIN, test)}
    classes = list(found[TRAIN])
    for one, other in ((TRAIN, test), (test, TRAIN)):
        if missing := [name for name in found[one] if name not in found[other]]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"{folder / other} has no class {missing[0]}{more}, which {one} has")
    digest, parts = hashlib.sha256(), list[Any]()
    for split, listed in found.items():
        names, labels = [], []
        for label, name in enumerate(classes):
            for file, size in listed[name]:
                names.append(f"{split}/{name}/{file}")
                labels.append(label)
                digest.update(f"{names[-1]} {size}\n".encode("utf-8", "surrogateescape"))
        parts += [ImageFiles(folder, names, side), torch.tensor(labels)]
    train, train_labels, test_files, test_labels = parts
    return ImageFolders(
        folder.resolve().name, train, train_labels, test_files, test_labels, classes, digest.hexdigest()
    )


def _listed(split: Path) -> dict[str, list[tuple[str, int]]]:
    """Class → names and sizes of its images; both in order."""
    with os.scandir(split) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir() and entry.name[0] != ".")
    if len(classes) < 2:
        raise ValueError(f"{split} must have a folder for each of at least 2 classes, got {len(classes)}")
    found = {name: sorted(_files(split / name)) for name in classes}
    for name, files in found.items():
        if not files:
            raise ValueError(f"{split / name} has no images ({', '.join(SUFFIXES)})")
    return found


def _files(folder: Path) -> Iterator[tuple[str, int]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name[0] != "." and entry.name.lower().endswith(SUFFIXES) and not entry.is_dir():
                # A link to a file that is gone is listed, so that it is named, not passed over.
                yield entry.name, entry.stat().st_size if entry.is_file() else 0


class _Faults(Dataset[str]):
    """What is wrong with each file; "" where nothing is."""

    def __init__(self, files: ImageFiles) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> str:
        try:
            self.files.image(number)
        except UnreadableImageError as error:
            return str(error)
        return ""


def broken_files(*groups: ImageFiles, workers: int, part: int = 0, parts: int = 1) -> dict[str, str]:
    """Broken files, and what is wrong with each, found by decoding all images.

    Args:
        groups: the images.
        workers: processes that decode; 0 for this one.
        part: of the images, where several processes share them.
        parts: number of such processes.
    """
    broken: dict[str, str] = {}
    for files in groups:
        numbers = range(part, len(files), parts)
        faults = DataLoader(Subset(_Faults(files), numbers), 64, num_workers=workers, collate_fn=list)
        found = (fault for batch in faults for fault in batch)
        broken |= {files.names[n]: fault for n, fault in zip(numbers, found, strict=True) if fault}
    return broken


def _tensor(image: Image) -> Tensor:
    """Uint8 (3, height, width)."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def centre(image: Image, side: int) -> Image:
    """The centre of an image whose shorter side is first scaled to 8/7 of `side`."""
    kept = side, side
    return middle(image, resized_to(image.height, image.width, kept), kept)


def random_crop(image: Image, side: int, random: Random, mirrored: bool) -> Image:
    """A random part of an image, scaled to a square; with `mirrored`, half of them are."""
    from PIL.Image import Resampling, Transpose

    crop = image.resize((side, side), Resampling.BILINEAR, box=crop_box(*image.size, random))
    return crop.transpose(Transpose.FLIP_LEFT_RIGHT) if mirrored and random.random() < 0.5 else crop


def crop_box(width: int, height: int, random: Random) -> tuple[int, int, int, int]:
    """Left, top, right and bottom of a random crop; where none fits, the largest centred one that does."""
    for _ in range(TRIES):
        area = random.uniform(*AREAS) * width * height
        ratio = math.exp(random.uniform(*map(math.log, RATIOS)))
        across, down = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < across <= width and 0 < down <= height:
            left, top = random.randint(0, width - across), random.randint(0, height - down)
            return left, top, left + across, top + down
    across, down = (min(width, round(height * RATIOS[1])), min(height, round(width / RATIOS[0])))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down
