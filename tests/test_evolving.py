"""Evolving Attention: the naive form against loops, and what it must never do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import overt
from acting import EvolvingLayer, call_of
from conftest import live_kernel, random_maps
from overt.mechanisms.evolving.naive import convolve, evolve, mix
from overt.mechanisms.maps import causal, softmax
from overt.mechanisms.site import KINDS, Kind, Site

NEG = float("-inf")
kinds = st.sampled_from(KINDS)
decoder_kinds = st.sampled_from(["decoder", "cross"])
kernel_sizes = st.sampled_from([1, 3, 5])


def everything(queries: int, keys: int, batch: int = 1) -> Tensor:
    return torch.ones(batch, 1, queries, keys, dtype=torch.bool)


def mask_for(kind: Kind, queries: int, keys: int) -> Tensor:
    return causal(queries, keys) if kind == "decoder" else everything(queries, keys)


def loops(
    logits: np.ndarray,
    previous: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray,
    visible: np.ndarray,
    window: tuple[range, range],
    alpha: float,
    beta: float,
) -> np.ndarray:
    """Equation 4 for one example, cell by cell; `window` is the row and column offsets that a cell reads."""
    heads, queries, keys = logits.shape
    mixed = np.zeros_like(logits)
    for h in range(heads):
        for i in range(queries):
            for j in range(keys):
                if visible[i, j]:
                    old = previous[h, i, j]
                    mixed[h, i, j] = (
                        logits[h, i, j] if old == NEG else alpha * old + (1 - alpha) * logits[h, i, j]
                    )
    out = np.full_like(logits, NEG)
    for h in range(heads):
        for i in range(queries):
            for j in range(keys):
                if not visible[i, j]:
                    continue
                total = bias[h]
                for g in range(heads):
                    for a, row in enumerate(window[0]):
                        for b, column in enumerate(window[1]):
                            y, x = i + row, j + column
                            if 0 <= y < queries and 0 <= x < keys:
                                total += weight[h, g, a, b] * mixed[g, y, x]
                out[h, i, j] = beta * max(total, 0.0) + (1 - beta) * mixed[h, i, j]
    return out


def window_of(kind: Kind, k: int) -> tuple[range, range]:
    centred, back = range(-(k // 2), k // 2 + 1), range(-(k - 1), 1)
    return {"encoder": (centred, centred), "decoder": (back, back), "cross": (back, centred)}[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 5])
def test_naive_form_equals_plain_loops(kind: Kind, k: int) -> None:
    heads, queries, keys = 3, 6, 6 if kind != "cross" else 7
    logits, previous = random_maps(1, heads, queries, keys), random_maps(1, heads, queries, keys, seed=1)
    visible = mask_for(kind, queries, keys) & (random_maps(1, 1, queries, keys, seed=2) > -1.2)
    previous = previous.masked_fill(random_maps(1, 1, queries, keys, seed=3) > 1.0, NEG)  # hidden before
    assert ((previous == NEG) & visible).any(), "some cell was hidden before and is visible now"
    weight, bias = live_kernel(heads, k)
    got = evolve(logits, previous, (weight, bias), visible, kind, alpha=0.4, beta=0.7)
    want = loops(
        logits[0].numpy(),
        previous[0].numpy(),
        weight.numpy(),
        bias.numpy(),
        visible[0, 0].numpy(),
        window_of(kind, k),
        0.4,
        0.7,
    )
    np.testing.assert_allclose(got[0].numpy(), want, atol=1e-12)


@pytest.mark.parametrize(("kind", "expected"), [("encoder", 9), ("decoder", 6), ("cross", 9)])
def test_number_of_visible_cells_that_a_window_sees_on_the_diagonal(kind: Kind, expected: int) -> None:
    logits = random_maps(1, 1, 8, 8).requires_grad_()
    visible = causal(8, 8) if kind == "decoder" else everything(8, 8)
    convolution = (torch.ones(1, 1, 3, 3, dtype=torch.float64), torch.full((1,), 100.0, dtype=torch.float64))
    out = evolve(logits, torch.zeros_like(logits), convolution, visible, kind, alpha=0.0, beta=1.0)
    (gradient,) = torch.autograd.grad(out[0, 0, 4, 4], logits)
    assert int((gradient != 0).sum()) == expected


# --- No query reads a later one ---


def earlier_rows_move(kind: Kind, windows: Kind, k: int, row: int, size: int, beta: float) -> bool:
    """Whether changing the map's rows from `row` on changes an evolved row before it."""
    heads = 2
    convolution = live_kernel(heads, k)
    visible = mask_for(kind, size, size)
    logits, previous = random_maps(1, heads, size, size), random_maps(1, heads, size, size, seed=1)
    live = convolve(mix(logits, previous, visible, 0.3), *convolution, windows) > 0
    assert live.double().mean() >= 0.5, "the convolution must be at work"
    changed, changed_previous = logits.clone(), previous.clone()
    changed[:, :, row:] += random_maps(1, heads, size - row, size, seed=2)
    changed_previous[:, :, row:] += 1.0
    before = evolve(logits, previous, convolution, visible, windows, 0.3, beta)
    after = evolve(changed, changed_previous, convolution, visible, windows, 0.3, beta)
    return not torch.equal(before[:, :, :row], after[:, :, :row])


@given(decoder_kinds, kernel_sizes, st.integers(1, 7), st.floats(0.5, 1.0))
def test_later_rows_change_no_earlier_evolved_row(kind: Kind, k: int, row: int, beta: float) -> None:
    assert not earlier_rows_move(kind, kind, k, row, 8, beta)


@given(decoder_kinds, st.sampled_from([3, 5]), st.integers(2, 7), st.floats(0.5, 1.0))
def test_control_a_centred_kernel_leaks_later_rows(kind: Kind, k: int, row: int, beta: float) -> None:
    assert earlier_rows_move(kind, "encoder", k, row, 8, beta)


# --- Padding ---


def padded_differs(kind: Kind, k: int, left: int, right: int, hide_queries: bool) -> bool:
    """Whether an example's evolved map moves when padding full of other numbers is put around it."""
    heads, size = 2, 5
    total = left + size + right
    convolution = live_kernel(heads, k)
    current, previous = random_maps(1, heads, size, size), random_maps(1, heads, size, size, seed=1)
    alone_visible = mask_for(kind, size, size)
    alone = evolve(current, previous, convolution, alone_visible, kind, 0.3, 0.8)
    live = convolve(mix(current, previous, alone_visible, 0.3), *convolution, kind) > 0
    assert live.double().mean() >= 0.5
    inside = slice(left, left + size)
    big, big_previous = (random_maps(1, heads, total, total, seed=s) * 3 for s in (5, 6))
    big[:, :, inside, inside], big_previous[:, :, inside, inside] = current, previous
    real = torch.zeros(total, dtype=torch.bool)
    real[inside] = True
    visible = mask_for(kind, total, total) & real.view(1, 1, 1, -1)
    if hide_queries:
        visible = visible & real.view(1, 1, -1, 1)
    padded = evolve(big, big_previous, convolution, visible, kind, 0.3, 0.8)[:, :, inside, inside]
    return not torch.allclose(padded, alone, rtol=0, atol=1e-12)


@given(kinds, kernel_sizes, st.integers(0, 3), st.integers(0, 3))
def test_padding_changes_no_real_cell(kind: Kind, k: int, left: int, right: int) -> None:
    assert not padded_differs(kind, k, left, right, hide_queries=True)


@given(st.sampled_from([3, 5]), st.integers(1, 3))
def test_control_unmasked_padding_queries_reach_real_cells(k: int, right: int) -> None:
    assert padded_differs("encoder", k, 0, right, hide_queries=False)


# --- Rows in pieces ---


def in_pieces(kind: Kind, k: int, sizes: list[int], forget: bool = False) -> tuple[Tensor, Tensor]:
    """Evolved maps of two layers fed at once, and fed in pieces with a keeping chain."""
    heads, queries = 2, sum(sizes)
    keys = queries if kind == "decoder" else 6
    first, second = (random_maps(1, heads, queries, keys, seed=s) for s in (1, 2))
    config = overt.Evolving(alpha=0.4, beta=0.8, kernel_size=k, decoder_alpha=0.4, first=True)
    layers = [EvolvingLayer(config, Site(heads, 4, kind, layer)).double() for layer in range(2)]
    weight, bias = live_kernel(heads, k)
    for layer in layers:
        assert layer.weight is not None
        assert layer.bias is not None
        layer.weight.data, layer.bias.data = weight, bias

    def run(chain: overt.Chain, start: int, stop: int) -> Tensor:
        width = stop if kind == "decoder" else keys
        visible = causal(stop - start, width) if kind == "decoder" else everything(stop - start, width)
        layers[0](first[:, :, start:stop, :width], visible, chain)
        return layers[1](second[:, :, start:stop, :width], visible, chain)

    whole = run(overt.Chain(), 0, queries)
    out = torch.full_like(whole, NEG)
    chain, start = overt.Chain(keep=True), 0
    for size in sizes:
        chain.rows.clear() if forget else None
        piece = run(chain, start, start + size)
        out[:, :, start : start + size, : piece.shape[-1]] = piece
        start += size
    return whole, out


@given(decoder_kinds, kernel_sizes, st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_rows_in_any_split_equal_all_at_once(kind: Kind, k: int, sizes: list[int]) -> None:
    whole, pieces = in_pieces(kind, k, sizes)
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["decoder", "cross"])
def test_control_forgetting_the_kept_rows_changes_the_result(kind: Kind) -> None:
    whole, pieces = in_pieces(kind, 3, [2, 1, 3], forget=True)
    assert not torch.allclose(pieces, whole)


def test_pieces_out_of_order_or_of_another_sequence_are_refused() -> None:
    layers = [EvolvingLayer(overt.Evolving(), Site(2, 4, "cross", n)).double() for n in range(2)]
    chain = overt.Chain(keep=True)
    for each in layers:
        each(random_maps(2, 2, 2, 4), everything(2, 4), chain)
    layers[0](random_maps(3, 2, 2, 4), everything(2, 4), chain)
    with pytest.raises(ValueError, match="make a new Chain for each sequence"):
        layers[1](random_maps(3, 2, 2, 4), everything(2, 4), chain)


def test_an_encoder_refuses_rows_in_pieces() -> None:
    layers = [EvolvingLayer(overt.Evolving(), Site(1, 4, "encoder", layer)) for layer in range(2)]
    chain = overt.Chain(keep=True)
    layers[0](torch.zeros(1, 1, 2, 2), everything(2, 2), chain)
    with pytest.raises(ValueError, match='rows cannot be fed in pieces to kind="encoder"'):
        layers[1](torch.zeros(1, 1, 2, 2), everything(2, 2), chain)


# --- Chain rules ---


def layer(config: overt.Evolving, kind: Kind = "encoder", number: int = 1, heads: int = 2) -> EvolvingLayer:
    return EvolvingLayer(config, Site(heads, 4, kind, number)).double()


def test_first_layer_uses_current_logits_as_they_are_and_has_no_parameters() -> None:
    first, logits = layer(overt.Evolving(alpha=0.5, beta=0.5), number=0), random_maps(1, 2, 4, 4)
    assert torch.equal(first(logits, everything(4, 4), overt.Chain()), logits)
    assert list(first.parameters()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_with_first_a_chains_first_layer_convolves_its_own_map(kind: Kind) -> None:
    heads, size = 2, 5
    first, logits = layer(overt.Evolving(0.4, 0.7, first=True), kind, 0), random_maps(1, heads, size, size)
    weight, bias = live_kernel(heads, 3)
    first.weight.data, first.bias.data = weight, bias  # type: ignore[union-attr]
    visible = mask_for(kind, size, size)
    nothing_before = np.full((heads, size, size), NEG)
    maps = logits[0].numpy(), nothing_before, weight.numpy(), bias.numpy(), visible[0, 0].numpy()
    want = loops(*maps, window_of(kind, 3), 0.4, 0.7)
    np.testing.assert_allclose(first(logits, visible, overt.Chain())[0].detach().numpy(), want, atol=1e-12)


def test_a_site_may_start_a_chain_above_others() -> None:
    config, everything_seen = overt.Evolving(alpha=0.5, beta=0.5), everything(4, 4)
    below = layer(config, number=0)
    start = EvolvingLayer(config, Site(2, 4, layer=1, start=True)).double()
    above = layer(config, number=2)
    maps, chain = [random_maps(1, 2, 4, 4) for _ in range(3)], overt.Chain()
    below(maps[0], everything_seen, chain)
    assert list(start.parameters()) == []
    assert start.describe() == {"alpha": "start", "beta": "start"}
    assert torch.equal(start(maps[1], everything_seen, chain), maps[1])
    weight, bias = above.weight, above.bias
    want = evolve(maps[2], maps[1], (weight, bias), everything_seen, "encoder", 0.5, 0.5)
    torch.testing.assert_close(above(maps[2], everything_seen, chain), want)


def test_stacks_that_share_a_numbering_have_noise_of_their_own() -> None:
    mechanisms = [overt.Evolving(), overt.Bayesian(prior=None)]
    sites = [Site(2, 4, layer=0), Site(2, 4, layer=1, start=True)]
    maps = [overt.mechanisms.AttentionMap(mechanisms, site).train() for site in sites]
    logits, chain = random_maps(1, 2, 4, 4), overt.Chain(step=1)
    first, second = (each(call_of(each.site, logits), chain) for each in maps)
    assert not torch.equal(first, second)


def test_a_restarted_chain_convolves_only_with_first() -> None:
    logits = random_maps(1, 2, 6, 6)
    for first in (False, True):
        chain, config = overt.Chain(), overt.Evolving(0.5, 0.5, first=first, init="kaiming")
        layer(config, number=0)(random_maps(1, 2, 4, 4), everything(4, 4), chain)
        above = layer(config)
        want = evolve(
            logits, None, (above.weight, above.bias), everything(6, 6), "encoder", 0.5, 0.5, first=first
        )
        got = above(logits, everything(6, 6), chain)
        torch.testing.assert_close(got, want)
        assert torch.equal(got, logits) is not first


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_without_convolution_keeps_its_skip_and_has_no_parameters(kind: Kind) -> None:
    others = tuple(other for other in KINDS if other != kind)
    config = overt.Evolving(0.4, 0.7, decoder_alpha=0.4, convolve=others, first=True)
    layers, chain, visible = [layer(config, kind, n) for n in range(2)], overt.Chain(), mask_for(kind, 4, 4)
    maps = [random_maps(1, 2, 4, 4, seed=seed) for seed in range(2)]
    evolved = [each(m, visible, chain) for each, m in zip(layers, maps, strict=True)]
    want = (0.4 * maps[0] + 0.6 * maps[1]).masked_fill(~visible, NEG)
    torch.testing.assert_close(evolved[1], want)
    assert [list(each.parameters()) for each in layers] == [[], []]
    assert list(layer(config, others[0], 0).parameters()), "the other kinds have theirs"


def test_what_is_carried_is_the_evolved_map_not_the_current_one() -> None:
    maps = [random_maps(1, 2, 4, 4, seed=s) for s in range(3)]
    layers, chain = [layer(overt.Evolving(alpha=0.5, beta=0.5), number=n) for n in range(3)], overt.Chain()
    evolved = [each(m, everything(4, 4), chain) for each, m in zip(layers, maps, strict=True)]
    convolution = (layers[2].weight, layers[2].bias)
    want = evolve(maps[2], evolved[1], convolution, everything(4, 4), "encoder", 0.5, 0.5)
    torch.testing.assert_close(evolved[2], want)


def test_a_change_of_map_shape_restarts_the_chain() -> None:
    logits = random_maps(1, 2, 6, 6)
    chain = overt.Chain()
    layer(overt.Evolving(0.5, 0.5), number=0)(random_maps(1, 2, 4, 4), everything(4, 4), chain)
    assert torch.equal(layer(overt.Evolving(0.5, 0.5))(logits, everything(6, 6), chain), logits)


def test_encoder_decoder_and_cross_chains_do_not_mix() -> None:
    chain, config = overt.Chain(), overt.Evolving(0.5, 0.5, decoder_alpha=0.5)
    maps = {kind: random_maps(1, 2, 4, 4, seed=i) for i, kind in enumerate(KINDS)}
    for kind in KINDS:
        layer(config, kind, 0)(maps[kind], mask_for(kind, 4, 4), chain)
    for kind in KINDS:
        torch.testing.assert_close(
            chain.previous(Site(2, 4, kind, 1), "Evolving"),
            maps[kind].masked_fill(~mask_for(kind, 4, 4), NEG),
        )


def test_misnumbered_layers_and_missing_chains_are_named() -> None:
    visible, logits = everything(4, 4), random_maps(1, 2, 4, 4)
    with pytest.raises(ValueError, match="layer 1 of the encoder chain found no map of layer 0"):
        layer(overt.Evolving())(logits, visible, overt.Chain())
    chain = overt.Chain()
    layer(overt.Evolving(), number=0)(logits, visible, chain)
    with pytest.raises(ValueError, match="1 examples, these logits 3: make a new Chain"):
        layer(overt.Evolving())(random_maps(3, 2, 4, 4), visible, chain)


def test_alpha_and_beta_zero_give_the_current_logits_through_the_whole_path() -> None:
    evolving = layer(overt.Evolving(alpha=0.0, beta=0.0))
    assert evolving.weight is not None, "the convolution is there and is computed"
    logits, chain = random_maps(1, 2, 4, 4), overt.Chain()
    layer(overt.Evolving(0.0, 0.0), number=0)(random_maps(1, 2, 4, 4, seed=1), everything(4, 4), chain)
    out = evolving(logits, everything(4, 4), chain)
    assert torch.equal(out, logits)
    out.sum().backward()
    assert torch.equal(evolving.weight.grad, torch.zeros_like(evolving.weight))


# --- Settings ---


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 5])
def test_dirac_init_convolves_to_the_identity_in_every_kind(kind: Kind, k: int) -> None:
    fresh = layer(overt.Evolving(kernel_size=k), kind)
    mixed = random_maps(1, 2, 5, 5)
    torch.testing.assert_close(convolve(mixed, fresh.weight, fresh.bias, kind), mixed.relu())


def first_gradient(init_zero: bool, kind: Kind = "encoder") -> Tensor:
    fresh, chain = layer(overt.Evolving(), kind, heads=4), overt.Chain()
    assert fresh.weight is not None
    if init_zero:
        fresh.weight.data.zero_()
    layer(overt.Evolving(), kind, 0, heads=4)(random_maps(1, 4, 6, 6), mask_for(kind, 6, 6), chain)
    out = fresh(random_maps(1, 4, 6, 6, seed=1), mask_for(kind, 6, 6), chain)
    (torch.softmax(out, -1) * random_maps(1, 4, 6, 6, seed=2)).sum().backward()
    assert fresh.weight.grad is not None
    return fresh.weight.grad


@pytest.mark.parametrize("kind", KINDS)
def test_every_heads_kernel_gets_a_gradient_at_the_first_step(kind: Kind) -> None:
    assert (first_gradient(init_zero=False, kind=kind).flatten(1).abs().amax(dim=1) > 1e-6).all()


def test_control_a_zero_init_under_relu_never_trains() -> None:
    assert not first_gradient(init_zero=True).any()


def test_kaiming_init_is_random_with_the_scale_of_its_fan_in() -> None:
    weight = layer(overt.Evolving(init="kaiming"), heads=16).weight
    assert weight is not None
    assert float(weight.detach().std()) == pytest.approx((2 / (16 * 9)) ** 0.5, rel=0.1)


def test_ramp_raises_alpha_and_beta_linearly_from_zero() -> None:
    maps = [random_maps(1, 2, 4, 4, seed=s) for s in range(2)]
    visible = everything(4, 4)

    def at(config: overt.Evolving, step: int) -> Tensor:
        torch.manual_seed(0)
        chain = overt.Chain(step=step)
        layer(config, number=0)(maps[0], visible, chain)
        return layer(config)(maps[1], visible, chain)

    ramped = overt.Evolving(0.4, 0.6, ramp_steps=10)
    for step, share in ((0, 0.0), (5, 0.5), (10, 1.0), (99, 1.0)):
        torch.testing.assert_close(at(ramped, step), at(overt.Evolving(0.4 * share, 0.6 * share), 0))
    with pytest.raises(ValueError, match=r"ramp_steps needs the training step: pass chain=Chain\(step=t\)"):
        layer(ramped, number=0)(maps[0], visible, overt.Chain())
    chain = overt.Chain()
    layer(ramped, number=0).eval()(maps[0], visible, chain)
    in_use = layer(ramped).eval()(maps[1], visible, chain)
    torch.testing.assert_close(in_use, at(ramped, 10), msg="a model in use is past its ramp")


def test_realformer_adds_previous_logits_and_is_not_beta_zero() -> None:
    current, previous = random_maps(1, 2, 4, 4), random_maps(1, 2, 4, 4, seed=1)
    config, visible, chain = overt.Evolving.realformer(), everything(4, 4), overt.Chain()
    layer(config, number=0)(previous, visible, chain)
    adding = layer(config)
    assert list(adding.parameters()) == []
    torch.testing.assert_close(adding(current, visible, chain), current + previous)
    assert not torch.allclose(
        evolve(current, previous, None, visible, "encoder", 1.0, 0.0), current + previous
    )


@pytest.mark.parametrize(
    ("kind", "both_stacks", "decoder_alpha", "expected"),
    [
        ("encoder", True, None, 0.2),
        ("decoder", True, None, 0.0),
        ("cross", True, None, 0.0),
        ("decoder", False, None, 0.2),
        ("decoder", True, 0.4, 0.4),
        ("cross", True, 0.4, 0.4),
        ("encoder", True, 0.4, 0.2),
    ],
)
def test_decoder_alpha(kind: Kind, both_stacks: bool, decoder_alpha: float | None, expected: float) -> None:
    config = overt.Evolving(alpha=0.2, decoder_alpha=decoder_alpha)
    assert config.alpha_at(Site(2, 4, kind, encoder_decoder=both_stacks)) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.3}, r"alpha must lie in \[0, 1\], got 1.3"),
        ({"beta": -0.1}, r"beta must lie in \[0, 1\], got -0.1"),
        ({"alpha": float("nan")}, r"alpha must lie in \[0, 1\], got nan"),
        ({"decoder_alpha": 2}, r"decoder_alpha must lie in \[0, 1\], got 2"),
        ({"kernel_size": 4}, "kernel_size must be odd, got 4"),
        ({"kernel_size": 0}, "kernel_size must be a whole number of at least 1, got 0"),
        ({"init": "zeros"}, "init must be one of 'dirac', 'kaiming', 'lecun'; got 'zeros'"),
        ({"ramp_steps": -1}, "ramp_steps must be a whole number of at least 0, got -1"),
        ({"skip": "add"}, 'beta must be 0 with skip="add"'),
        ({"skip": "add", "beta": 0, "first": True}, 'first must be False with skip="add"'),
        (
            {"convolve": ("encoder", "self")},
            "convolve must be one of 'encoder', 'decoder', 'cross'; got 'self'",
        ),
    ],
)
def test_settings_outside_their_range_are_refused_in_one_line(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        overt.Evolving(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_settings_are_frozen() -> None:
    with pytest.raises(AttributeError):
        overt.Evolving().alpha = 0.5  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_agree_with_finite_differences(kind: Kind) -> None:
    visible = mask_for(kind, 4, 4) & (torch.arange(4) < 3).view(1, 1, 4, 1)
    weight, bias = live_kernel(2, 3)
    inputs = (random_maps(1, 2, 4, 4), random_maps(1, 2, 4, 4, seed=1), weight, bias)
    for tensor in inputs:
        tensor.requires_grad_()

    def weights(current: Tensor, previous: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        evolved = evolve(current, previous, (weight, bias), visible, kind, 0.3, 0.6)
        return overt.mechanisms.maps.softmax(evolved, visible)

    assert torch.autograd.gradcheck(weights, inputs)


# --- Bad input ---


def test_wrong_rank_heads_and_masks_are_named() -> None:
    logits, visible = random_maps(1, 2, 4, 4), everything(4, 4)
    with pytest.raises(
        ValueError, match=r"logits must have shape \(batch, heads, query, key\), got \(2, 4, 4\)"
    ):
        evolve(logits[0], None, None, visible, "encoder", 0.1, 0.1)
    with pytest.raises(
        ValueError, match=r"2 heads' maps needs a weight of shape \(2, 2, k, k\), got \(3, 3, 3, 3\)"
    ):
        evolve(logits, logits, live_kernel(3, 3), visible, "encoder", 0.1, 0.1)
    with pytest.raises(ValueError, match=r"visible must broadcast to the map's shape \(1, 2, 4, 4\)"):
        evolve(logits, None, None, everything(4, 5), "encoder", 0.1, 0.1)
    with pytest.raises(TypeError, match=r"visible must be a boolean tensor.*got torch.float32"):
        evolve(logits, None, None, visible.float(), "encoder", 0.1, 0.1)
    with pytest.raises(TypeError, match=r"logits must be a floating-point tensor, got torch.int64"):
        evolve(logits.long(), None, None, visible, "encoder", 0.1, 0.1)


def test_unknown_kinds_and_even_kernels_are_named() -> None:
    logits, visible = random_maps(1, 2, 4, 4), everything(4, 4)
    with pytest.raises(ValueError, match="kind must be one of 'encoder', 'decoder', 'cross'; got 'causal'"):
        evolve(logits, logits, live_kernel(2, 3), visible, "causal", 0.1, 0.1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel_size must be odd, got 2"):
        evolve(logits, logits, live_kernel(2, 2), visible, "encoder", 0.1, 0.1)


def test_a_previous_map_of_another_dtype_is_mixed_in_the_current_ones() -> None:
    current, previous = random_maps(1, 2, 4, 4).float(), random_maps(1, 2, 4, 4, seed=1).bfloat16()
    out = evolve(current, previous, None, everything(4, 4), "encoder", 0.5, 0.0)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, 0.5 * previous.float() + 0.5 * current)


def test_nan_in_a_visible_cell_is_not_swallowed() -> None:
    previous = random_maps(1, 2, 4, 4)
    previous[0, 0, 1, 1] = float("nan")
    out = evolve(random_maps(1, 2, 4, 4), previous, None, everything(4, 4), "encoder", 0.5, 0.0)
    assert out[0, 0, 1, 1].isnan()
    assert int(out.isnan().sum()) == 1


@pytest.mark.parametrize("heads", [1, 3])
def test_a_softmax_of_a_map_with_its_hidden_cells_filled_is_the_definition(heads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 3, 5, 6, generator=generator)
    visible = torch.rand(4, heads, 5, 6, generator=generator) < 0.6
    visible[1] = False
    visible[2, :, 3] = False
    hidden = logits.masked_fill(~visible, float("-inf"))
    expected = softmax(logits, visible)
    torch.testing.assert_close(softmax(hidden, visible, filled=True), expected, atol=1e-7, rtol=1e-6)
    broken = hidden.masked_fill(visible & (torch.arange(6) == 4), float("nan"))
    found, wanted = softmax(broken, visible, filled=True), softmax(broken, visible)
    assert wanted.isnan().any()
    assert torch.equal(found.isnan() & visible, wanted.isnan() & visible)
    assert softmax(hidden[..., :0], visible[..., :0], filled=True).shape == (4, 3, 5, 0)
    # With a gradient wanted it is the definition itself.
    assert torch.equal(softmax(hidden.requires_grad_(), visible, filled=True), softmax(hidden, visible))
