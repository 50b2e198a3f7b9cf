"""Pickles of published data sets, read as data.

A pickle can run arbitrary code when it is opened. This reader accepts only the names that the published files
use, refuses all others before anything is imported, and builds only arrays, lists and dictionaries.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

Names = Mapping[tuple[str, str], Any]


class Pickled:
    """A pickled object as data: its constructor's arguments and its state, unchanged."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class Array(Pickled):
    """A numpy array: state (version, shape, dtype, whether in Fortran order, content)."""

    def read(self) -> Any:
        """The array, of plain numbers."""
        import numpy

        _, shape, dtype, fortran, content = self.state
        code, order = dtype.args[0], dtype.state[1]
        if not re.fullmatch("[biuf][1248]", code) or order not in ("<", ">", "=", "|"):
            raise TypeError(f"an array of {order}{code} instead of numbers")
        content = content.encode("latin1") if isinstance(content, str) else content
        return numpy.frombuffer(content, order + code).reshape(shape, order="F" if fortran else "C")


class Dtype(Pickled):
    """A numpy dtype: arguments (code, …) and state (version, byte order, …)."""


# The names of numpy's arrays in old files, and their harmless replacements.
ARRAYS: Names = {
    ("numpy.core.multiarray", "_reconstruct"): Array,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): Dtype,
}


class ForeignNameError(Exception):
    """A name that no published file uses."""


class _Unpickler(pickle.Unpickler):
    """Accepts some names and refuses all others before anything is imported."""

    def __init__(self, content: bytes, known: Names) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self.known = known

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.known:
            raise ForeignNameError(f"{module}.{name}")
        return self.known[module, name]


def read(content: bytes, known: Names) -> Any:
    """What a pickle contains.

    Args:
        content: the pickle, of Python 2 or 3; byte strings of Python 2 are read as Latin-1.
        known: (module, name) → what to build in its place.
    """
    return _Unpickler(content, known).load()


def expect(thing: Any, kind: type[Any]) -> Any:
    """`thing`, if it is of that kind."""
    if not isinstance(thing, kind):
        raise TypeError(f"a {type(thing).__name__} instead of a {kind.__name__.lstrip('_').lower()}")
    return thing


@contextmanager
def named(file: object) -> Iterator[None]:
    """Turn whatever goes wrong inside into an error of one line that names the file."""
    try:
        yield
    except ForeignNameError as error:
        raise ValueError(
            f"{file} refers to {error}, which no published file does; refused: a pickle can run code"
        ) from None
    except Exception as error:  # a broken pickle can fail in any way
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{file} must be a raw file as published, but cannot be read: {why}") from None
