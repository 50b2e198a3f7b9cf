"""Terms of the logits: relative positions against loops, and the Synthesizer baseline."""

from __future__ import annotations

import pytest
import torch

import overt
from acting import SynthesizerLayer
from conftest import random_maps


def test_relative_logits_are_the_query_times_the_vector_of_the_distance() -> None:
    term = overt.RelativePosition(4, max_distance=3).double()
    query = random_maps(1, 2, 6, 4)
    got = term(query, 6)
    for h in range(2):
        for i in range(6):
            for j in range(6):
                distance = max(-3, min(3, i - j))
                want = query[0, h, i] @ term.vectors[distance + 3]
                torch.testing.assert_close(got[0, h, i, j], want)


def test_relative_logits_of_later_rows_are_those_of_the_whole_map() -> None:
    term, query = overt.RelativePosition(4, max_distance=9).double(), random_maps(1, 2, 6, 4)
    torch.testing.assert_close(term(query[:, :, 4:], 6, first_row=4), term(query, 6)[:, :, 4:])


def test_two_dimensional_relative_logits_follow_equation_3() -> None:
    height, width = 2, 3
    term, query = overt.RelativePosition2d(4, height, width).double(), random_maps(1, 1, 6, 4)
    got = term(query, 6)
    for i in range(6):
        for j in range(6):
            (hi, wi), (hj, wj) = divmod(i, width), divmod(j, width)
            want = query[0, 0, i] @ (
                term.vertical[hj - hi + height - 1] + term.horizontal[wj - wi + width - 1]
            )
            torch.testing.assert_close(got[0, 0, i, j], want)
    with pytest.raises(ValueError, match="a 2 × 3 image has 6 tokens, got 5 queries and 6 keys"):
        term(query[:, :, :5], 6)


def test_position_terms_are_part_of_the_current_logits_before_mixing() -> None:
    config = overt.Evolving(alpha=0.5, beta=0.0)
    layers = [
        overt.MultiheadAttention(
            8, 2, batch_first=True, mechanisms=[config], layer=n, position=overt.RelativePosition(4, 4)
        ).double()
        for n in range(2)
    ]
    x, chain = random_maps(1, 5, 8), overt.Chain()
    currents = []
    for layer in layers:
        assert layer.position is not None
        q, k, _ = layer._project(x, x, x)
        currents.append(q @ k.mT / 2.0 + layer.position(q, 5))
        layer(x, x, x, chain=chain)
    torch.testing.assert_close(chain.maps["Evolving", "encoder", 1], 0.5 * currents[0] + 0.5 * currents[1])


@pytest.mark.parametrize("form", ["random", "dense"])
def test_synthesizer_starts_as_the_average_of_its_map_and_the_dot_product(form: str) -> None:
    config = overt.Synthesizer(form, max_length=8)  # type: ignore[arg-type]
    site = overt.mechanisms.Site(2, 4)
    layer = SynthesizerLayer(config, site).double()
    logits, query = random_maps(1, 2, 5, 6), random_maps(1, 2, 5, 4, seed=1)
    got = layer(logits, query)
    for h in range(2):
        for i in range(5):
            if form == "random":
                made = layer.map[h, i, :6]
            else:
                hidden = torch.relu(query[0, h, i] @ layer.inner[h] + layer.inner_bias[h, 0])
                made = (hidden @ layer.outer[h])[:6]
            torch.testing.assert_close(got[0, h, i], 0.5 * logits[0, h, i] + 0.5 * made)
    got.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in layer.parameters())
    with pytest.raises(ValueError, match="max_length of the Synthesizer is 8, got 5 queries and 9 keys"):
        layer(random_maps(1, 2, 5, 9), query)


def test_a_random_synthesizer_gives_a_later_row_its_own_row_of_the_map() -> None:
    layer = SynthesizerLayer(overt.Synthesizer("random", 8), overt.mechanisms.Site(2, 4)).double()
    logits, query = random_maps(1, 2, 5, 5), random_maps(1, 2, 5, 4)
    piece = layer(logits[:, :, 3:], query[:, :, 3:], first_row=3)
    torch.testing.assert_close(piece, layer(logits, query)[:, :, 3:])


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match="form must be one of 'random', 'dense'; got 'sparse'"):
        overt.Synthesizer("sparse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_distance must be a whole number of at least 1, got 0"):
        overt.RelativePosition(4, 0)
