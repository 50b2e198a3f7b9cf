"""Compilation of loops for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile a function at its first call, and cache it on disk where a folder is writable."""
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no cache folder is writable: compile once per process instead
        return numba.njit(nogil=True, **options)(function)  # type: ignore[no-any-return]


def compiled_loosely(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, but sums may be reordered; in strict order they are taken one element at a time."""
    return compiled(function, fastmath={"reassoc", "contract", "nsz"})
