"""Which cases of a test `make test` runs, where the whole product would take long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def covering(cases: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    """All cases, those that are not kept marked `exhaustive`: `make test-all` and `make test-gpu` run them.

    Those kept must cover what each case claims: every value of every parameter, and every pair of values
    that one line of the code under test sees together.
    """
    assert all(case in cases for case in kept), "a case to keep that there is not"
    return [
        case
        if case in kept
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.exhaustive)
        for case in cases
    ]
