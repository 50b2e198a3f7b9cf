"""Argument checks. Each error is one line: the argument, what it must be, and what was passed."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import SupportsFloat


def fraction(name: str, value: float) -> None:
    """Refuse a value outside [0, 1]."""
    number(name, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")


def positive(name: str, value: float) -> None:
    """Refuse a value that is not a finite number above zero."""
    number(name, value)
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value}")


def number(name: str, value: object) -> None:
    """Refuse anything but a real number."""
    if isinstance(value, float):
        return  # at once, because looking for the methods of a protocol takes long
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a number, got {value!r}")


def whole(name: str, value: object, least: int) -> None:
    """Refuse anything but a whole number of at least `least`."""
    try:
        integer = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        integer = None
    if integer is None or isinstance(value, bool) or integer < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse a value that is not one of `allowed`."""
    allowed = list(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def finite(name: str, value: float) -> None:
    """Refuse NaN and the infinities."""
    number(name, value)
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
