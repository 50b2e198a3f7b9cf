"""Terms of the logits: relative positions against loops, and the Synthesizer baseline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize("size", [None, (3, 2), (1, 4), (2, 4)])
def test_widened_queries_and_keys_have_the_products_of_the_definition(size: tuple[int, int] | None) -> None:
    height, width = (3, 4) if size is None else size
    term, pixels = overt.RelativePosition2d(5, 3, 4).double(), height * width
    query, key = random_maps(2, 4, pixels, 5).requires_grad_(), random_maps(2, 2, pixels, 5).requires_grad_()
    inputs = [query, key, term.vertical, term.horizontal]

    def gradients(logits: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(logits.sin().sum(), inputs))

    want = 0.3 * query @ key.repeat_interleave(2, dim=1).mT + term(query, pixels, size=size)
    wide_query, wide_key = term.widen(query, key, 0.3, size)
    assert wide_query.shape[-1] == wide_key.shape[-1] == 5 + height + width
    got = wide_query @ wide_key.repeat_interleave(2, dim=1).mT
    torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradients(got), gradients(want), rtol=0, atol=1e-13)


def test_a_smaller_image_is_a_part_of_a_larger_one() -> None:
    term, query = overt.RelativePosition2d(4, 3, 4).double(), random_maps(1, 2, 12, 4)
    inside = [row * 4 + column for row in (1, 2) for column in (1, 2, 3)]  # a window of 2 × 3 pixels
    whole = term(query, 12)[:, :, inside][:, :, :, inside]
    torch.testing.assert_close(term(query[:, :, inside], 6, size=(2, 3)), whole)
    with pytest.raises(ValueError, match="images of up to 3 × 4, got 4 × 4"):
        term(random_maps(1, 1, 16, 4), 16, size=(4, 4))


@pytest.mark.parametrize("name", ["evolving", "bayesian", "synthesizer"])
def test_positions_in_an_image_are_part_of_the_logits_and_not_of_the_priors_keys(name: str) -> None:
    mechanisms: dict[str, list[overt.Mechanism]] = {
        "evolving": [overt.Evolving()],
        "bayesian": [overt.Bayesian(d_mid=3)],
        "synthesizer": [overt.Synthesizer(max_length=6)],
    }
    position = overt.RelativePosition2d(4, 2, 3)
    layer = overt.MultiheadAttention(8, 2, batch_first=True, mechanisms=mechanisms[name], position=position)
    layer = layer.double().train()
    x, chain = random_maps(2, 6, 8), overt.Chain(step=1)
    q, k, v = layer._project(x, x, x)
    call = layer._call(q, k, v, None, None, None, False, 0, chain)
    torch.testing.assert_close(call.scores(), q @ k.mT / 2.0 + position(q, 6), rtol=0, atol=1e-14)
    assert torch.equal(call.keys_of_prior, k)
    assert call.is_dot() is (name != "synthesizer")
    layer(x, x, x, chain=chain)


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
