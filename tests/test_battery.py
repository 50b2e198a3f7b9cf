"""The battery: every feature of attach on every family. `docs/support.md` is written from its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import overt
import reference
from battery import CASES, FEATURES, OURS, Mechanisms
from families import FAMILIES, REFUSED, Family


@pytest.mark.parametrize(("family", "feature", "of"), CASES)
def test_feature(
    family: Family, feature: str, of: Mechanisms, record_property: Callable[[str, object], None]
) -> None:
    reason = FEATURES[feature](family, of)
    if of is not OURS:
        return
    order = 100 * FAMILIES.index(family) + list(FEATURES).index(feature)
    record_property("support", (order, family.name, feature, f"refused: {reason}" if reason else "works"))


@pytest.mark.parametrize(("name", "make", "reason"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_a_family_that_cannot_be_attached_to_is_refused_by_name(
    name: str, make: Callable[[], Any], reason: str, record_property: Callable[[str, object], None]
) -> None:
    model = make()
    before = list(model.state_dict())
    family = model.config.model_type
    with pytest.raises(
        ValueError, match=rf"^{type(model).__name__} \({family}\) cannot .*{reason}"
    ) as caught:
        overt.attach(model, overt.Evolving())
    assert list(model.state_dict()) == before
    record_property("support", (9000, name, "attach", "refused: " + str(caught.value).split(": ", 1)[1]))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_attach_finds_what_the_family_has(family: Family) -> None:
    model = overt.attach(family.make(), overt.Evolving())
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if "overt" in module._modules:
            found.setdefault(module.overt.kind, []).append(path)
    assert found == {kind: family.paths(kind) for kind in family.attends}


@pytest.fixture(autouse=True)
def _no_book() -> Iterator[None]:
    yield
    reference.open_book(None)


def test_the_reference_is_plain_attention_without_kernels() -> None:
    generator = np.random.default_rng(0)
    image = generator.normal(size=(1, 2, 4, 4))
    kernel = np.zeros((2, 2, 3, 3))
    kernel[0, 0, 1, 1] = kernel[1, 1, 1, 1] = 1.0
    place = reference.Place("encoder", "", 1, kernel, np.zeros(2))
    np.testing.assert_allclose(reference.convolve(image, place), np.maximum(image, 0.0))
