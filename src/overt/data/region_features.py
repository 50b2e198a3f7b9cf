"""Features of image regions as they are published: an npz file for each image, or an h5 file for all.

The layouts are those of bottom-up attention (Anderson et al. 2018) for captioning (`feat`, regions × 2048; or
h5 with such an array for each image's id) and for visual question answering (`x`, 2048 × regions).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from overt import _check
from overt._extras import need
from overt.data.named_images import stem

WIDTH = 2048
REGIONS = 100
H5 = (".h5", ".hdf5")
_COCO = re.compile(r"COCO_\w+?_0*(\d+)")  # COCO_val2014_000000000042 is image 42


class Regions(NamedTuple):
    """Features of some images.

    Attributes:
        features: (images, regions, width); 0 where there is no region.
        real: boolean (images, regions), True where there is one.
    """

    features: Tensor
    real: Tensor


class RegionFeatures:
    """The features in a folder of npz files, or in an h5 file, which may be in a folder of its own.

    A file or key is found by the image's name, with or without .jpg and the like; COCO's also by the number.
    Where the folder has no npz files itself, they may be in its folders, such as train2014/ and val2014/.

    Args:
        folder: or the h5 file.
        width: that all features must have.
    """

    def __init__(self, folder: Path, width: int = WIDTH) -> None:
        _check.whole("width", width, 1)
        self.folder, self.width = folder, width
        self.h5: Any = None
        if folder.is_file() and folder.suffix in H5:
            self._open(folder)
        elif not folder.is_dir():
            raise FileNotFoundError(f"features must be a folder of npz files, or an h5 file, got {folder}")
        else:
            files = sorted(folder.glob("*.npz")) or sorted(folder.glob("*/*.npz"))
            whole = sorted(path for path in folder.iterdir() if path.suffix in H5)
            if bool(files) == bool(whole) or len(whole) > 1:
                raise ValueError(
                    f"{folder} must have npz files, or else one h5 file, got {len(files)} npz and "
                    f"{len(whole)} h5 files"
                )
            if whole:
                self._open(whole[0])
            else:
                names = [path.relative_to(folder).as_posix().removesuffix(".npz") for path in files]
                self.keys = _keys(names, folder)

    def _open(self, path: Path) -> None:
        h5py: Any = need("h5py", "features")
        try:
            self.h5 = h5py.File(path, "r")
        except OSError as error:
            raise ValueError(f"{path} cannot be read as an h5 file: {error}") from None
        self.folder = path
        self.keys = _keys(list(self.h5), path)

    def close(self) -> None:
        """Close the h5 file, if there is one."""
        if self.h5 is not None:
            self.h5.close()

    def __contains__(self, image: str) -> bool:
        return _key(image) in self.keys

    def check(self, images: Sequence[str]) -> None:
        """Refuse images that have no features, before a long run starts."""
        if missing := [image for image in images if image not in self]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"{self.folder} has no image {missing[0]}{more}, of {len(images)}")

    def one(self, image: str) -> NDArray[np.float32]:
        """The features of an image, (regions, width)."""
        self.check([image])
        key = self.keys[_key(image)]
        features, where = self._from_h5(key) if self.h5 is not None else self._from_npz(key)
        if features.ndim != 2 or features.shape[1] != self.width or not len(features):
            shape = " × ".join(map(str, features.shape))
            raise ValueError(f"{where} must have regions × {self.width} features, got {shape}")
        features = features.astype(np.float32)
        if not np.isfinite(features).all():
            raise ValueError(f"{where} must hold finite numbers, got some that are not")
        return features

    def _from_h5(self, key: str) -> tuple[NDArray[Any], str]:
        found = self.h5[key]
        if not hasattr(found, "dtype") or found.dtype.kind not in "fiu":
            raise ValueError(f"{self.folder}, {key}: must be an array of numbers, got {found!r}")
        return np.asarray(found), f"{self.folder}, {key}:"

    def _from_npz(self, key: str) -> tuple[NDArray[Any], str]:
        path = self.folder / f"{key}.npz"
        try:
            with np.load(path, allow_pickle=False) as file:
                if "feat" in file.files:
                    return _numbers(file["feat"]), f"{path}: feat"
                if "x" in file.files:
                    return _numbers(file["x"]).T, f"{path}: the transpose of x"
                has = ", ".join(file.files)
        except (ValueError, OSError, BadZipFile, EOFError) as error:
            # numpy takes what it does not know for pickled objects, and says how to load them.
            why = "it is something else" if "pickle" in str(error) else error
            raise ValueError(f"{path} must be an npz file of numbers: {why}") from None
        raise ValueError(f"{path} must have feat (regions × width) or x (width × regions), got {has}")

    def read(
        self, images: Sequence[str], regions: int = REGIONS, dtype: torch.dtype = torch.float32
    ) -> Regions:
        """The first `regions` of each image, with zeros where it has fewer."""
        _check.whole("regions", regions, 1)
        self.check(images)
        features = torch.zeros(len(images), regions, self.width, dtype=dtype)
        real = torch.zeros(len(images), regions, dtype=torch.bool)
        for row, image in enumerate(images):
            found = self.one(image)[:regions]
            features[row, : len(found)] = torch.from_numpy(found)
            real[row, : len(found)] = True
        return Regions(features, real)


def _numbers(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind not in "fiu":
        raise ValueError(f"an array of {array.dtype} instead of numbers")
    return array


def _key(name: str) -> str:
    """What an image is found by."""
    name = stem(name)
    found = _COCO.fullmatch(name)
    return found[1] if found else name


def _keys(names: list[str], source: Path) -> dict[str, str]:
    """Key → name of a file or an array."""
    keys: dict[str, str] = {}
    for name in names:
        if (key := _key(name.rpartition("/")[2])) in keys:
            raise ValueError(f"{source} must have features of each image once, got {keys[key]} and {name}")
        keys[key] = name
    return keys
