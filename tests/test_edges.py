"""Operations on edges: compiled loops in float32 against definitions in float64; mechanisms on edge lists."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import LogNormal, kl_divergence

import overt
from acting import EdgeMap, EvolvingEdgeLayer
from conftest import random_maps
from overt.mechanisms import loops, noise
from overt.mechanisms.bayesian.edges import edge_noise, total_kl
from overt.mechanisms.bayesian.naive import cell_kl, fixed_parameter, log_noise, prior_parameter
from overt.mechanisms.edges import (
    aggregate,
    edge_log_softmax,
    edge_softmax,
    log_softmax_definition,
    loops_for,
)
from overt.mechanisms.site import Site
from overt.recipes.bam_graphs import SETTINGS

PUBLISHED = {
    f"{data} {row}": config
    for data, setting in SETTINGS.items()
    for row, config in setting.rows.items()
    if config is not None and config.prior is not None
}
every_published = pytest.mark.parametrize("config", PUBLISHED.values(), ids=PUBLISHED)
every_preset = pytest.mark.parametrize("preset", [None, "official"])
LOOPS = ("_edges_numba", "bayesian._kl_numba", "noise._philox_numba")

# Few nodes and up to 24 edges: most graphs have parallel edges, and nodes that no edge reaches.
graphs = st.builds(
    lambda nodes, count, seed: (
        nodes,
        torch.randint(0, nodes, (2, count), generator=torch.Generator().manual_seed(seed)),
    ),
    st.integers(1, 9),
    st.integers(0, 24),
    st.integers(0, 2**20),
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return random_maps(*shape, seed=seed, dtype=torch.float32)


def with_gradients(toward: Tensor, out: Tensor, *leaves: Tensor) -> list[Tensor]:
    gradients = torch.autograd.grad((out * toward.to(out.dtype)).sum(), leaves, retain_graph=True)
    return [out.detach(), *gradients]


def assert_close(got: list[Tensor], want: list[Tensor], rtol: float = 1e-5, atol: float = 1e-5) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=atol)


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in LOOPS:
        monkeypatch.setitem(sys.modules, f"overt.mechanisms.{name}", None)


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(loops, "CELLS_PER_THREAD", 1)
    yield
    torch.set_num_threads(before)


# --- Softmax ---


@given(graphs, st.integers(1, 9), st.sampled_from([1.0, 30.0, 1e4]))
def test_compiled_softmaxes_equal_the_definition_with_gradients(
    graph: tuple[int, Tensor], heads: int, scale: float
) -> None:
    nodes, (_, target) = graph
    toward = normal(target.numel(), heads, seed=1)
    scores = (normal(target.numel(), heads) * scale).requires_grad_()
    exact = scores.detach().double().requires_grad_()
    assert loops_for(scores) is not None
    want = log_softmax_definition(exact, target, nodes)
    assert_close(
        with_gradients(toward, edge_log_softmax(scores, target, nodes), scores),
        with_gradients(toward, want, exact),
    )
    assert_close(
        with_gradients(toward, edge_softmax(scores, target, nodes), scores),
        with_gradients(toward, want.exp(), exact),
    )


@given(graphs, st.integers(1, 4), st.booleans())
def test_a_softmax_over_edges_is_torchs_over_each_nodes_edges(
    graph: tuple[int, Tensor], heads: int, double: bool
) -> None:
    nodes, (_, target) = graph
    scores = normal(target.numel(), heads) * 3
    scores = scores.double() if double else scores
    weights, logs = edge_softmax(scores, target, nodes), edge_log_softmax(scores, target, nodes)
    for node in range(nodes):
        into = target == node
        torch.testing.assert_close(weights[into], torch.softmax(scores[into], dim=0))
        torch.testing.assert_close(logs[into], torch.log_softmax(scores[into], dim=0))


@pytest.mark.parametrize("top", [1e4, 1e30, 3e38])
def test_huge_scores_leave_weights_and_gradients_finite(top: float) -> None:
    target = torch.tensor([1, 0, 1, 1, 0])
    scores = torch.tensor([[top], [top], [-top], [top], [-1.0]]).requires_grad_()
    out, gradient = with_gradients(normal(5, 1), edge_softmax(scores, target, 3), scores)
    assert out.flatten().tolist() == [0.5, 1.0, 0.0, 0.5, 0.0]
    assert gradient.isfinite().all()


@pytest.mark.parametrize("form", [edge_softmax, edge_log_softmax, log_softmax_definition])
@pytest.mark.parametrize("place", [0, 2])
def test_a_score_that_is_no_number_spoils_its_own_neighbourhood_alone(
    form: Callable[[Tensor, Tensor, int], Tensor], place: int
) -> None:
    scores = torch.zeros(4, 1)
    scores[place] = math.nan
    found = form(scores, torch.tensor([0, 1, 0, 1]), 2)
    assert found.isnan().flatten().tolist() == [True, False, True, False]


def test_an_edge_scored_minus_infinity_weighs_nothing() -> None:
    scores = torch.tensor([[-math.inf], [0.0], [0.0]])
    weights = edge_softmax(scores, torch.zeros(3, dtype=torch.long), 1)
    assert weights.flatten().tolist() == [0.0, 0.5, 0.5]


def test_inputs_that_are_views_are_taken_by_their_values() -> None:
    scores, ends = normal(3, 8).T, torch.arange(16).view(8, 2).T % 3
    assert not scores.is_contiguous()
    assert not ends[1].is_contiguous()
    want = edge_softmax(scores.contiguous(), ends[1].contiguous(), 3)
    assert torch.equal(edge_softmax(scores, ends[1], 3), want)
    values = normal(4, 3, 3).transpose(0, 2)
    got = aggregate(scores, values, ends[0], ends[1], 3)
    assert torch.equal(
        got, aggregate(want.new_tensor(scores.tolist()), values.contiguous(), *ends.clone(), 3)
    )


# --- Sums ---


@given(graphs, st.integers(1, 9), st.integers(1, 5), st.integers(0, 3))
def test_compiled_sums_equal_a_dense_einsum_with_gradients(
    graph: tuple[int, Tensor], heads: int, width: int, more_sources: int
) -> None:
    nodes, (source, target) = graph
    source = source + more_sources
    senders = nodes + more_sources
    weights = normal(source.numel(), heads).requires_grad_()
    values = normal(senders, heads, width, seed=1).requires_grad_()
    toward = normal(nodes, heads, width, seed=2)
    got = with_gradients(toward, aggregate(weights, values, source, target, nodes), weights, values)

    exact_weights, exact_values = (leaf.detach().double().requires_grad_() for leaf in (weights, values))
    dense = torch.zeros(nodes, senders, heads, dtype=torch.float64)
    dense = dense.index_put((target, source), exact_weights, accumulate=True)
    out = torch.einsum("tsh,shd->thd", dense, exact_values)
    assert_close(got, with_gradients(toward, out, exact_weights, exact_values))
    plain = aggregate(exact_weights, exact_values, source, target, nodes)
    torch.testing.assert_close(plain, out)


# --- KL ---


def cells_and_prior(config: overt.Bayesian, count: int = 40, heads: int = 3) -> tuple[Tensor, Tensor]:
    """A posterior's log-means and a prior's parameter as the layer makes them, float32."""
    target = torch.arange(count) % 7
    log_mean = edge_log_softmax(normal(count, heads) * 2, target, 7)
    if config.prior == "fixed":
        return log_mean, torch.tensor(fixed_parameter(config), dtype=torch.float32)
    return log_mean, prior_parameter(edge_log_softmax(normal(count, heads, seed=1), target, 7), config)


def kl_with_gradients(form: str, log_mean: Tensor, prior: Tensor, config: overt.Bayesian) -> list[Tensor]:
    log_mean, prior = log_mean.detach().requires_grad_(), prior.detach().requires_grad_()
    if form == "definition":
        log_mean, prior = (leaf.detach().double().requires_grad_() for leaf in (log_mean, prior))
        out = cell_kl(log_mean, prior, config).sum()
    else:
        out = total_kl(log_mean, prior, config)
    return with_gradients(torch.tensor(-2.0), out, log_mean, prior)


@every_preset
@every_published
def test_compiled_kl_is_the_sum_of_the_definitions_cells_with_gradients(
    config: overt.Bayesian, preset: str | None
) -> None:
    config = replace(config, preset=preset)  # type: ignore[arg-type]
    log_mean, prior = cells_and_prior(config)
    want = kl_with_gradients("definition", log_mean, prior, config)
    got = kl_with_gradients("compiled", log_mean, prior, config)
    assert float(want[1].abs().max()) > 0.0, "the posterior's gradient is there to be compared"
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=3e-5, atol=1e-6 * float(b.abs().max()))


@given(
    st.sampled_from(["weibull", "lognormal"]),
    st.sampled_from(["contextual", "fixed"]),
    st.sampled_from([0.3, 1.0, 10.0, 2000.0]),
    st.sampled_from([1e-15, 0.1, 2.0]),
    st.sampled_from([1e-8, 1e-2, 1.0, 3.0]),
    st.sampled_from([0.5, 10.0]),
    st.sampled_from([None, "official"]),
)
def test_compiled_kl_is_the_definitions_over_all_settings(
    family: str, prior: str, k: float, sigma: float, rate: float, prior_sigma: float, preset: str | None
) -> None:
    # prior_alpha above 1, and official priors above 1, are outside of what the compiled sum knows.
    config = overt.Bayesian(
        family=family,  # type: ignore[arg-type]
        prior=prior,  # type: ignore[arg-type]
        k=k,
        sigma=sigma,
        prior_alpha=rate,
        prior_beta=rate,
        prior_sigma=prior_sigma,
        prior_mu=-0.3,
        preset=preset,  # type: ignore[arg-type]
    )
    log_mean, parameter = cells_and_prior(config)
    want = kl_with_gradients("definition", log_mean, parameter, config)
    got = kl_with_gradients("compiled", log_mean, parameter, config)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-5, atol=1e-5 * max(1.0, float(b.abs().max())))


def integrated(log_mean: float, log_alpha: float, config: overt.Bayesian) -> float:
    """KL(Weibull ‖ Gamma) by quadrature of scipy's densities, S = scale·t^(1/k) with t exponential."""
    k, scale = config.k, math.exp(log_mean) / math.gamma(1 + 1 / config.k)

    def integrand(t: float) -> float:
        s = scale * t ** (1 / k)
        posterior = scipy.stats.weibull_min.logpdf(s, k, scale=scale)
        prior = scipy.stats.gamma.logpdf(s, math.exp(log_alpha), scale=1 / config.prior_beta)
        return float(math.exp(-t) * (posterior - prior))

    pieces = ((0, 1e-3), (1e-3, 1), (1, 60))
    return sum(float(scipy.integrate.quad(integrand, *piece, epsrel=1e-6)[0]) for piece in pieces)


@pytest.mark.slow
@every_preset
@every_published
def test_compiled_kl_is_that_of_the_named_distributions(config: overt.Bayesian, preset: str | None) -> None:
    config = replace(config, preset=preset)  # type: ignore[arg-type]
    log_mean, prior = cells_and_prior(config, count=2, heads=1)
    got = float(total_kl(log_mean, prior, config))
    means, parameters = log_mean.double().flatten(), prior.double().expand(2, 1).flatten()
    if config.family == "weibull":
        want = sum(integrated(float(m), float(a), config) for m, a in zip(means, parameters, strict=True))
    else:
        sigma = torch.tensor(config.sigma, dtype=torch.float64)
        posterior = LogNormal(means - sigma**2 / 2, sigma)
        want = float(kl_divergence(posterior, LogNormal(parameters, config.prior_sigma)).sum())
    assert got == pytest.approx(want, rel=1e-5)


def test_a_kl_over_many_blocks_loses_no_cell() -> None:
    config = overt.Bayesian()
    log_mean = torch.log_softmax(normal(50_001), dim=0)
    prior = torch.log_softmax(normal(50_001, seed=1), dim=0)
    want = kl_with_gradients("definition", log_mean, prior, config)
    for a, b in zip(kl_with_gradients("compiled", log_mean, prior, config), want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


# --- Noise ---


def some_units() -> Tensor:
    """Draws as the generator makes them, both ends of the interval among them."""
    ends = torch.tensor([0, 1, 2, 3, 100, 5000, 2**22])
    inside = torch.randint(0, 2**23, (5000,), generator=torch.Generator().manual_seed(0))
    return noise.open_unit(torch.cat([ends, 2**23 - 1 - ends, inside]) << 9)


@pytest.mark.parametrize("sigma", [1e-15, 1e-2, 1.0, 3.0])
def test_lognormal_noise_is_the_normals_quantile(sigma: float) -> None:
    unit = some_units()
    want = torch.from_numpy(scipy.stats.norm.ppf(unit.double().numpy(), scale=sigma))
    got = edge_noise(unit, overt.Bayesian(family="lognormal", sigma=sigma))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=5e-6, atol=1e-7 * sigma)


@pytest.mark.parametrize("k", [1.0, 10.0, 100.0])
def test_weibull_noise_is_the_logarithm_of_the_weibulls_quantile(k: float) -> None:
    unit = some_units()
    want = np.log(scipy.stats.weibull_min.ppf(unit.double().numpy(), k))
    got = edge_noise(unit, overt.Bayesian(k=k))
    torch.testing.assert_close(got.double(), torch.from_numpy(want), rtol=5e-6, atol=1e-6 / k)


@given(
    st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 2**31)), max_size=20),
    st.integers(1, 9),
    st.integers(0, 2**40),
    st.integers(-(2**63), 2**63 - 1),
)
def test_compiled_draws_are_the_definitions_bit_for_bit(
    cells: list[tuple[int, int]], heads: int, example: int, seed: int
) -> None:
    rows, columns = torch.tensor(cells, dtype=torch.long).view(-1, 2).unbind(dim=1)
    key = noise.stream(torch.tensor(seed), torch.tensor(5), 1, torch.tensor(3), 0)
    want = noise._edges_definition(key, heads, rows, columns, example)
    assert torch.equal(noise.uniform_edges(key, heads, rows, columns, example), want)


# --- Where the loops apply, and how they are shared out ---


def everything(nodes: int = 300, count: int = 3001, heads: int = 3) -> list[Tensor]:
    """Results and gradients of every compiled loop on one graph."""
    ends = torch.randint(0, nodes, (2, count), generator=torch.Generator().manual_seed(0))
    scores, values = normal(count, heads).requires_grad_(), normal(nodes, heads, 5, seed=1).requires_grad_()
    found = []
    for form in (edge_softmax, edge_log_softmax):
        found += with_gradients(normal(count, heads, seed=2), form(scores, ends[1], nodes), scores)
    summed = aggregate(scores, values, *ends, nodes)
    found += with_gradients(normal(nodes, heads, 5, seed=3), summed, scores, values)
    prior = normal(count, heads, seed=4)
    prior = torch.log_softmax(prior.view(-1), dim=0).view(prior.shape).requires_grad_()
    for family in ("weibull", "lognormal"):
        total = total_kl(scores, prior, overt.Bayesian(family=family))  # type: ignore[arg-type]
        found += with_gradients(torch.ones(()), total, scores, prior)
    key = noise.stream(torch.tensor(1), torch.tensor(5), 1, torch.tensor(3), 0)
    unit = noise.uniform_edges(key, heads, ends[1], ends[0])
    return [*found, unit, edge_noise(unit, overt.Bayesian(family="lognormal"))]


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize(("nodes", "count", "heads"), [(300, 3001, 3), (1, 7, 1), (2, 20011, 1)])
def test_results_do_not_depend_on_the_number_of_threads(nodes: int, count: int, heads: int) -> None:
    torch.set_num_threads(1)
    alone = everything(nodes, count, heads)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for got, want in zip(everything(nodes, count, heads), alone, strict=True):
            assert torch.equal(got, want)


def test_no_edges_are_no_weights_and_no_sums() -> None:
    scores, ends = torch.zeros(0, 2, requires_grad=True), torch.zeros(2, 0, dtype=torch.long)
    assert edge_softmax(scores, ends[1], 3).shape == (0, 2)
    out = aggregate(scores, torch.ones(4, 2, 3), *ends, 3)
    assert torch.equal(out, torch.zeros(3, 2, 3))
    (gradient,) = torch.autograd.grad(out.sum(), scores)
    assert gradient.shape == (0, 2)


@pytest.mark.parametrize("wrong", [-1, 3, 2**40])
def test_edges_to_nodes_that_are_not_there_are_refused(wrong: int) -> None:
    scores, good, bad = torch.zeros(2, 1), torch.tensor([0, 2]), torch.tensor([0, wrong])
    span = f"{min(0, wrong)} … {max(0, wrong)}"
    message = f"edge_index must number nodes from 0 to 2, got {span}"
    for form in (edge_softmax, edge_log_softmax):
        with pytest.raises(ValueError, match=message):
            form(scores, bad, 3)
    for source, target in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match=message):
            aggregate(scores, torch.zeros(3, 1, 2), source, target, 3)


def test_lists_of_unequal_length_are_refused_rather_than_read_beyond() -> None:
    few, many = torch.tensor([0, 2]), torch.tensor([0, 2, 1, 0])
    for form in (edge_softmax, edge_log_softmax):
        with pytest.raises((ValueError, RuntimeError)):
            form(torch.zeros(4, 1), few, 3)
    for source, target in ((few, many), (many, few)):
        with pytest.raises((ValueError, RuntimeError, IndexError)):
            aggregate(torch.zeros(4, 1), torch.zeros(3, 1, 2), source, target, 3)


def test_float64_takes_the_definitions() -> None:
    ends = torch.tensor([[0, 1, 2, 1], [1, 1, 0, 0]])
    scores, values = random_maps(4, 2), random_maps(3, 2, 5, seed=1)
    assert loops_for(scores) is None
    assert torch.equal(edge_log_softmax(scores, ends[1], 3), log_softmax_definition(scores, ends[1], 3))
    assert aggregate(scores, values, *ends, 3).dtype == torch.float64
    config = overt.Bayesian()
    prior = torch.log_softmax(scores, dim=0)
    assert torch.equal(total_kl(scores, prior, config), cell_kl(scores, prior, config).sum())
    unit = torch.full((2, 2), 0.3, dtype=torch.float64)
    config = overt.Bayesian(family="lognormal")
    assert torch.equal(edge_noise(unit, config), log_noise(unit, config))


def test_without_numba_the_definitions_give_the_same_numbers(request: pytest.FixtureRequest) -> None:
    compiled = everything()
    request.getfixturevalue("without_numba")
    assert loops_for(torch.zeros(1)) is None
    assert loops_for(torch.zeros(1), "bayesian._kl_numba") is None
    plain = everything()
    for got, want in zip(plain, compiled, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.equal(plain[-2], compiled[-2]), "draws are the same bits"


# --- Evolving on edges ---

EDGES = torch.tensor([[0, 1, 1], [1, 0, 1]])
BELOW, ABOVE = torch.tensor([[10.0], [20.0], [-4.0]]), torch.tensor([[1.0], [2.0], [3.0]])


def evolved(
    config: overt.Evolving, chain: overt.Chain | None = None, training: bool = True
) -> tuple[Tensor, Tensor]:
    chain = overt.Chain() if chain is None else chain
    first, second = (EvolvingEdgeLayer(config, Site(1, 2, layer=layer)).train(training) for layer in (0, 1))
    return first(BELOW, EDGES, chain), second(ABOVE, EDGES, chain)


def test_an_edges_score_mixes_with_that_of_the_layer_below() -> None:
    first, second = evolved(overt.Evolving(alpha=0.25, beta=0.0))
    assert torch.equal(first, BELOW)
    assert second.flatten().tolist() == [3.25, 6.5, 1.25]


def test_what_is_carried_on_is_the_mix_and_not_the_layers_own_score() -> None:
    config, chain = overt.Evolving(alpha=0.5, beta=0.0), overt.Chain()
    _, second = evolved(config, chain)
    third = EvolvingEdgeLayer(config, Site(1, 2, layer=2))(torch.zeros(3, 1), EDGES, chain)
    assert torch.equal(third, 0.5 * second)


def test_realformer_adds_the_scores_below() -> None:
    assert evolved(overt.Evolving.realformer())[1].flatten().tolist() == [11.0, 22.0, -1.0]


def test_alpha_ramps_up_with_the_step() -> None:
    config = overt.Evolving(alpha=0.5, beta=0.0, ramp_steps=4)
    assert torch.equal(evolved(config, overt.Chain(step=0))[1], ABOVE)
    assert evolved(config, overt.Chain(step=2))[1].flatten().tolist() == [3.25, 6.5, 1.25]
    full = evolved(config, overt.Chain(step=9))[1]
    assert torch.equal(full, 0.5 * (BELOW + ABOVE))
    assert torch.equal(evolved(config, training=False)[1], full)
    with pytest.raises(ValueError, match="ramp_steps needs the training step"):
        evolved(config)


def test_the_convolution_is_refused_with_the_reason() -> None:
    for config in (overt.Evolving(), overt.Evolving(beta=1e-3)):
        with pytest.raises(
            ValueError, match="beta must be 0 on graphs, where nodes have no order and a map"
        ) as e:
            EdgeMap([config], Site(1, 2))
        assert "\n" not in str(e.value)
        assert f"got beta={config.beta}" in str(e.value)


def test_another_number_of_heads_is_refused() -> None:
    chain, config = overt.Chain(), overt.Evolving(beta=0.0)
    EvolvingEdgeLayer(config, Site(2, 2))(torch.zeros(3, 2), EDGES, chain)
    above = EvolvingEdgeLayer(config, Site(1, 2, layer=1))
    with pytest.raises(ValueError, match="Evolving needs as many heads as the layer below has, 2, got 1"):
        above(ABOVE, EDGES, chain)


@pytest.mark.parametrize("other", [EDGES[:, [1, 0, 2]], EDGES[:, :2], EDGES.flip(0)])
def test_other_edges_than_the_layer_belows_are_refused(other: Tensor) -> None:
    chain, config = overt.Chain(), overt.Evolving(beta=0.0)
    EvolvingEdgeLayer(config, Site(1, 2))(BELOW, EDGES, chain)
    above = EvolvingEdgeLayer(config, Site(1, 2, layer=1))
    with pytest.raises(
        ValueError, match="Evolving needs the 3 edges of the layer below in the same order, got"
    ):
        above(ABOVE[: other.shape[1]], other, chain)


def test_a_layer_without_one_below_says_so() -> None:
    above = EvolvingEdgeLayer(overt.Evolving(beta=0.0), Site(1, 2, layer=1))
    with pytest.raises(ValueError, match="layer 1 of the encoder chain found no map of layer 0"):
        above(ABOVE, EDGES, overt.Chain())


# --- Both ---


def test_both_mechanisms_compose_and_gradients_reach_the_scores_below() -> None:
    config = [overt.Evolving(alpha=0.25, beta=0.0), overt.Bayesian(k=2.0)]
    maps = [EdgeMap(config, Site(1, 2, layer=layer)) for layer in (0, 1)]
    below, above, key = BELOW.clone().requires_grad_(), ABOVE.clone().requires_grad_(), normal(2, 1, 2)
    chain = overt.Chain(step=3)
    maps[0](below, EDGES, 2, chain, key)
    weights = maps[1](above, EDGES, 2, chain, key)
    assert torch.equal(chain.maps["Evolving", "encoder", 0], BELOW), "what is carried on has no noise"

    # by hand: the mix, the second layer's noise, a softmax over the two edges into node 1
    keys = noise.stream(torch.tensor(0), torch.tensor(3), 1, torch.tensor(0), 0)
    unit = noise.uniform_edges(keys, 1, EDGES[1], EDGES[0])
    noisy = 0.25 * BELOW + 0.75 * ABOVE + log_noise(unit, overt.Bayesian(k=2.0))
    first, _, last = noisy.flatten()
    want = torch.stack([torch.sigmoid(first - last), torch.tensor(1.0), torch.sigmoid(last - first)])
    torch.testing.assert_close(weights.flatten(), want)

    to_below, to_above = torch.autograd.grad(weights[0].sum(), (below, above))
    torch.testing.assert_close(to_below, to_above / 3)
    assert to_below.abs().max() > 0


def test_a_map_without_mechanisms_is_a_softmax_and_leaves_the_chain_alone() -> None:
    chain = overt.Chain()
    weights = EdgeMap([], Site(1, 2))(ABOVE, EDGES, 2, chain, normal(2, 1, 2))
    assert torch.equal(weights, edge_softmax(ABOVE, EDGES[1], 2))
    assert not chain.has_loss
    assert not chain.maps


def test_a_synthesizer_is_refused_with_the_reason() -> None:
    with pytest.raises(
        ValueError, match="graph attention cannot have Synthesizer, whose map has a place for"
    ):
        EdgeMap([overt.Synthesizer(max_length=4)], Site(1, 2))


def test_what_is_no_mechanism_is_named() -> None:
    with pytest.raises(TypeError, match=r"mechanisms must be a list, such as \[Evolving\(\)\]"):
        EdgeMap(overt.Bayesian(), Site(1, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mechanisms may hold one Bayesian, got 2"):
        EdgeMap([overt.Bayesian(), overt.Bayesian(k=1.0)], Site(1, 2))


@pytest.mark.parametrize("family", ["weibull", "lognormal"])
def test_gradients_of_gradients_are_those_of_the_definitions(family: str) -> None:
    ends = torch.tensor([[0, 1, 2, 1, 0], [1, 1, 0, 0, 2]])
    config = overt.Bayesian(family=family)  # type: ignore[arg-type]
    found = []
    for dtype in (torch.float32, torch.float64):
        scores, prior = (random_maps(5, 2, seed=n).to(dtype).requires_grad_() for n in (0, 1))
        values = random_maps(3, 2, 4, seed=2).to(dtype).requires_grad_()
        log_mean, log_prior = (edge_log_softmax(part, ends[1], 3) for part in (scores, prior))
        out = aggregate(edge_softmax(scores, ends[1], 3), values, *ends, 3)
        loss = out.pow(3).sum() + total_kl(log_mean, log_prior, config)
        first = torch.autograd.grad(loss, (scores, prior, values), create_graph=True)
        second = torch.autograd.grad(sum(part.square().sum() for part in first), (scores, prior, values))
        found.append([part.double() for part in (*first, *second)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
