"""Holm's correction: by hand, against the closure of Bonferroni's test, and what it refuses."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overt.judge import holm


def test_values_worked_out_by_hand() -> None:
    # In order: 0.01·4 = 0.04; 0.02·3 = 0.06; 0.03·2 = 0.06; 0.04·1, raised to the one before, 0.06.
    np.testing.assert_allclose(holm([0.04, 0.01, 0.03, 0.02]), [0.06, 0.04, 0.06, 0.06])
    # 0.005·3, 0.02·2, 0.5·1
    np.testing.assert_allclose(holm([0.5, 0.005, 0.02]), [0.5, 0.015, 0.04])
    np.testing.assert_allclose(holm([0.4, 0.6]), [0.8, 0.8])
    np.testing.assert_allclose(holm([0.7, 0.9, 0.8]), [1, 1, 1])
    np.testing.assert_allclose(holm([0.03]), [0.03])


@given(st.lists(st.sampled_from([0.0, 1e-4, 0.004, 0.01, 0.02, 0.049, 0.3, 1.0]), min_size=1, max_size=7))
def test_it_is_the_closure_of_bonferronis_test(p: list[float]) -> None:
    # A hypothesis falls where every family that it is in falls by Bonferroni (Marcus et al. 1976).
    places = range(len(p))
    expected = [
        max(
            min(1.0, size * min(p[one] for one in family))
            for size in range(1, len(p) + 1)
            for family in combinations(places, size)
            if place in family
        )
        for place in places
    ]
    np.testing.assert_allclose(holm(p), expected, rtol=1e-12)


@pytest.mark.parametrize("wrong", [[], [[0.1]], [0.1, float("nan")], [1.2], [-0.1]])
def test_what_is_no_family_of_p_values_is_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match=r"^p_values must "):
        holm(wrong)
