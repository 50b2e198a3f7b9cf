"""CIFAR-100 (Krizhevsky 2009) in its usual layouts.

- the python version as published: the pickles `train`, `test` and `meta`, or cifar-100-python.tar.gz;
- Hugging Face `datasets`: parquet files as on the hub, or a folder that `save_to_disk` wrote;
- npz files with JPEG images.
"""

from __future__ import annotations

import hashlib
import json
import math
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt._extras import need
from overt.data import pickles
from overt.data.files import data_folder
from overt.data.images import Images, decoded, packed
from overt.data.pickles import ARRAYS, Array, expect, named

NAME = "cifar100"
PLACES = (NAME, "cifar-100-python", ".")
SPLITS = ("train", "test")
RAW = (*SPLITS, "meta")
ARCHIVE = "cifar-100-python.tar.gz"
Part = tuple[Tensor, Tensor]


def load(data: Path | None) -> Images:
    """CIFAR-100 from a folder, or from `cifar100` or `cifar-100-python` in it; the first layout found counts.

    Labels are the 100 fine ones.
    """
    folder = data_folder(data)
    if folder is None:
        raise FileNotFoundError("CIFAR-100 needs a folder: give --data DIR")
    for place in (folder / name for name in PLACES):
        for read in (_npz_files, _python_version, _hub_files):
            found = read(place)
            if found is not None:
                return found
    if (folder / "train").is_dir():
        raise FileNotFoundError(f"{folder} has no CIFAR-100, but images in folders: give --dataset {folder}")
    raise FileNotFoundError(
        f"{folder} has no CIFAR-100: put {', '.join(RAW)} or {ARCHIVE} there or in {NAME}/ or "
        "cifar-100-python/, or train-*.parquet and test-*.parquet, or train*.npz and test*.npz"
    )


def _images(parts: Mapping[str, Part], classes: list[str], digest: Any, remark: str | None = None) -> Images:
    last = max(int(labels.max()) for _, labels in parts.values())
    if last >= len(classes):
        raise ValueError(f"{NAME} names {len(classes)} classes, and labels go up to {last}")
    shapes = {split: tuple(pixels.shape[1:]) for split, (pixels, _) in parts.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{NAME} must have images of one size, got {shapes}")
    return Images(NAME, *parts["train"], *parts["test"], classes, digest.hexdigest(), remark)


def _first(folder: Path, pattern: str) -> Path | None:
    return next(iter(sorted(folder.glob(pattern))), None)


# --- npz ---


def _npz_files(place: Path) -> Images | None:
    """Each file holds JPEG images one after the other (`jpeg`), where each begins (`offsets`) and `labels`.

    classes.json beside them names the labels.
    """
    found = {split: sorted(place.glob(f"{split}*.npz")) for split in SPLITS}
    if not all(found.values()):
        return None
    for split, paths in found.items():
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise ValueError(f"{place} has several files for {split}, of which one must be left: {names}")
    files = {split: paths[0] for split, paths in found.items()}
    digest = hashlib.sha256()
    parts = {split: _read_npz(path, digest) for split, path in files.items()}
    beside = place / "classes.json"
    count = 1 + max(int(labels.max()) for _, labels in parts.values())
    classes = _classes(beside) if beside.is_file() else [str(number) for number in range(count)]
    quality = [path.stem.partition("jpeg")[2] for path in files.values()]
    remark = f"JPEG q{quality[0]}" if all(part.isdecimal() for part in quality) else "JPEG"
    return _images(parts, classes, digest, remark)


def _classes(path: Path) -> list[str]:
    try:
        classes = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be a list of names in JSON: {error}") from None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"{path} must be a list of names in JSON, got {str(classes)[:60]}")
    return classes


def _read_npz(path: Path, digest: Any) -> Part:
    """Images (count, 3, height, width) and labels of a file; updates the digest."""
    pictures, labels = packed(path, "labels", digest)
    if labels.min() < 0:
        raise ValueError(f"{path} must have labels from 0 on, got {labels.min()}")
    digest.update(labels.astype(np.int64).tobytes())
    return decoded(pictures, len(labels), path), torch.from_numpy(labels.astype(np.int64))


# --- The python version ---


def _python_version(place: Path) -> Images | None:
    if all((place / name).is_file() for name in RAW):
        raw = {name: (place / name).read_bytes() for name in RAW}
        source = place
    elif (place / ARCHIVE).is_file():
        source = place / ARCHIVE
        with named(source):
            raw = _unpacked(source)
    else:
        return None
    digest = hashlib.sha256()
    parts = {}
    for split in SPLITS:
        with named(source / split):
            parts[split] = _raw_part(raw[split], digest)
    with named(source / "meta"):
        names = expect(expect(pickles.read(raw["meta"], ARRAYS), dict)["fine_label_names"], list)
        classes = [expect(name, str) for name in names]
    return _images(parts, classes, digest)


def _unpacked(archive: Path) -> dict[str, bytes]:
    """The raw files in the archive as downloaded; nothing is written to the disk."""
    raw = {}
    with tarfile.open(archive, "r:gz") as file:
        for member in file:
            name = PurePosixPath(member.name).name
            content = file.extractfile(member) if name in RAW and member.isfile() else None
            if content is not None:
                raw[name] = content.read()
    if missing := [name for name in RAW if name not in raw]:
        raise ValueError(f"it has no {missing[0]}")
    return raw


def _raw_part(content: bytes, digest: Any) -> Part:
    """A raw file's images (count, 3, height, width) and fine labels."""
    loaded = expect(pickles.read(content, ARRAYS), dict)
    table, labels = expect(loaded["data"], Array).read(), expect(loaded["fine_labels"], list)
    side = math.isqrt(table.shape[-1] // 3)
    if table.dtype != np.uint8 or table.shape != (len(labels), 3 * side**2) or not len(labels):
        raise TypeError(f"{len(labels)} labels, and images of shape {table.shape} and type {table.dtype}")
    if any(type(label) is not int or label < 0 for label in labels):
        raise TypeError("labels that are no whole numbers from 0 on")
    numbers = np.array(labels, np.int64)
    digest.update(table.tobytes())
    digest.update(numbers.tobytes())
    return torch.from_numpy(table.reshape(-1, 3, side, side).copy()), torch.from_numpy(numbers)


# --- Hugging Face datasets ---


def _hub_files(place: Path) -> Images | None:
    """Parquet files, also where a repository of the hub has them, or what `save_to_disk` wrote."""
    saved, files = (place / "dataset_dict.json").is_file(), {}
    for folder in (place, place / "data", place / NAME):
        found = {split: [str(path) for path in sorted(folder.glob(f"{split}-*.parquet"))] for split in SPLITS}
        if all(found.values()):
            files = found
    if not saved and not files:
        return None
    datasets = need("datasets", "datasets")
    need("PIL", "vision")
    loaded = (
        datasets.load_from_disk(str(place))
        if saved
        else datasets.load_dataset("parquet", data_files=files)  # its own reader: no code is downloaded
    )
    digest, parts = hashlib.sha256(), {}
    for split in SPLITS:
        if split not in loaded:
            raise ValueError(f"{place} must have the splits {' and '.join(SPLITS)}, got {', '.join(loaded)}")
        parts[split] = _hub_part(loaded[split], datasets, f"{split} of {place}", digest)
    label = loaded["train"].features["fine_label"]
    count = 1 + max(int(labels.max()) for _, labels in parts.values())
    classes = list(getattr(label, "names", None) or map(str, range(count)))
    return _images(parts, classes, digest)


def _hub_part(part: Any, datasets: Any, name: str, digest: Any) -> Part:
    column = next((column for column in ("img", "image") if column in part.column_names), None)
    if column is None or "fine_label" not in part.column_names:
        columns = ", ".join(part.column_names)
        raise ValueError(f"{name} must have the columns img (or image) and fine_label, got {columns}")
    labels = torch.tensor(list(part["fine_label"]), dtype=torch.int64)
    if not len(labels) or int(labels.min()) < 0:
        raise ValueError(f"{name} must have labels from 0 on, got {labels.tolist()[:1] or 'none'}")
    files = part.cast_column(column, datasets.Image(decode=False))

    def contents() -> Iterable[bytes]:
        for row in files:
            content = row[column]["bytes"]
            if content is None:
                content = Path(row[column]["path"]).read_bytes()
            digest.update(content)
            yield content

    pixels = decoded(contents(), len(labels), name)
    digest.update(labels.numpy().tobytes())
    return pixels, labels
