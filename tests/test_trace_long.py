"""Traces of states, made small by a small budget, against traces of maps."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
import transformers as hf
from families import BY_NAME, FAMILIES, Family

import overt
from overt.tracing.asked import Sight
from overt.tracing.masks import sight_of

SMALL = 2**13  # bytes: enough for rows, not for maps
PLAIN = [family for family in FAMILIES if family.name not in ("T5", "Gemma 2")]


def both(family: Family, padded: bool = False, **options: Any) -> tuple[overt.Trace, overt.Trace]:
    """Maps and states of the same input."""
    model = family.make()
    inputs = families.inputs_of(family, padded=padded)
    if family.name == "CLIP":
        options["stack"] = "vision_model"
    return overt.trace(model, inputs, **options), overt.trace(model, inputs, memory=1000, **options)


@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
def test_rows_of_states_are_those_of_maps(family: Family) -> None:
    maps, states = both(family, padded=family.pads)
    states.memory = 2**20
    assert states.of_states
    assert not maps.of_states
    assert (states.kind, states.paths, states.tokens) == (maps.kind, maps.paths, maps.tokens)
    assert torch.equal(states.mask, maps.mask)
    every = range(maps.queries)
    for method in ("raw", "rollout"):
        got, want = states.read(method, every), maps.read(method, every)
        torch.testing.assert_close(got, want, rtol=0.0, atol=2e-6)
    if maps.outputs is not None:
        torch.testing.assert_close(states.outputs, maps.outputs, rtol=1e-4, atol=1e-5)
