"""Checks of arguments. Each error names the argument, what came, and what would do, in one line."""

from __future__ import annotations

import math
from collections.abc import Iterable


def fraction(name: str, value: float) -> None:
    """Refuse a value outside [0, 1]."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


def positive(name: str, value: float) -> None:
    """Refuse a value that is not a finite number above zero."""
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value}")


def whole(name: str, value: int, least: int) -> None:
    """Refuse anything but an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse a value that is not one of `allowed`."""
    allowed = list(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def finite(name: str, value: float) -> None:
    """Refuse NaN and the infinities."""
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
