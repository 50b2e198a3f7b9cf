"""Compiling loops for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compiled at the first call, and kept on disk where there is a place for it."""
    try:
        return numba.njit(nogil=True, cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder for the cache can be written: compile once per process instead
        return numba.njit(nogil=True, **options)(function)  # type: ignore[no-any-return]


def compiled_loosely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled so that sums may be taken in any order; in order, they are taken one by one."""
    return compiled(function, fastmath={"reassoc", "contract", "nsz"})
