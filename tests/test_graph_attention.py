"""Graph attention layers: PyG's own numbers, random weights over edges, chains, and life inside PyG."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric import nn as pyg
from torch_geometric.data import HeteroData
from torch_geometric.explain import AttentionExplainer, Explainer, GNNExplainer
from torch_geometric.utils import to_torch_coo_tensor, to_torch_csr_tensor

import overt
from conftest import random_maps
from graphs import blocks, karate
from overt.graphs import GAT, GATConv, GATv2Conv
from overt.mechanisms import chain as chains
from overt.mechanisms.bayesian.naive import cell_kl

OURS: dict[str, Any] = {"gat": GATConv, "gatv2": GATv2Conv}
THEIRS: dict[str, Any] = {"gat": pyg.GATConv, "gatv2": pyg.GATv2Conv}
NODES, WIDTH = 7, 5
RANDOM = overt.Bayesian(k=2.0, prior_beta=0.5)
STILL = overt.Bayesian(family="lognormal", sigma=1e-15)
both = pytest.mark.parametrize("name", OURS)


def ends(nodes: int = NODES, count: int = 20, seed: int = 0, targets: int | None = None) -> Tensor:
    """Edges in no order, with loops and parallel ones; the last node is reached by none."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(0, nodes, (count,), generator=generator)
    return torch.stack([source, torch.randint(0, (targets or nodes) - 1, (count,), generator=generator)])


def features(nodes: int = NODES, width: int = WIDTH, seed: int = 0) -> Tensor:
    return random_maps(nodes, width, seed=seed, dtype=torch.float32)


def pair(name: str, *arguments: Any, mechanisms: Any = (), **named: Any) -> tuple[Any, Any]:
    """Our layer and PyG's with the same weights; what starts as zero is made random."""
    theirs = THEIRS[name](*arguments, **named)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter))
    ours = OURS[name](*arguments, mechanisms=mechanisms, **named)
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert not unexpected
    assert all(key.startswith("map.bayesian.prior.") for key in missing)
    return ours, theirs


def call(layer: nn.Module, x: Any, edge_index: Any, **named: Any) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """Output, (edges, weights), and gradients of parameters and inputs."""
    leaves = [part for part in (x if isinstance(x, tuple) else (x,)) if part is not None]
    leaves += [part for part in named.values() if isinstance(part, Tensor)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out, attention = layer(x, edge_index, return_attention_weights=True, **named)
    parameters = {key: value for key, value in layer.named_parameters() if not key.startswith("map.")}
    toward = random_maps(*out.shape, seed=9, dtype=out.dtype)
    found = torch.autograd.grad(
        (out * toward).sum() + attention[1].square().sum(),
        [*parameters.values(), *leaves],
        allow_unused=True,
        materialize_grads=True,
    )
    names = [*parameters, *(f"input {place}" for place in range(len(leaves)))]
    return out, attention, dict(zip(names, found, strict=True))


def assert_same(ours: tuple[Any, ...], theirs: tuple[Any, ...], tolerance: float = 1e-6) -> None:
    out, (edges, weights), gradients = ours
    want, (want_edges, want_weights), want_gradients = theirs
    assert type(edges) is type(want_edges)
    assert edges.layout == want_edges.layout
    if edges.layout == torch.strided:
        assert torch.equal(edges.as_subclass(Tensor), want_edges.as_subclass(Tensor))
    else:
        a, b = (adjacency.detach().to_sparse_coo().coalesce() for adjacency in (edges, want_edges))
        assert torch.equal(a.indices(), b.indices())
        torch.testing.assert_close(a.values(), b.values(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(weights, want_weights, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)
    assert gradients.keys() == want_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, want_gradients[key], rtol=10 * tolerance, atol=10 * tolerance, msg=key
        )


# --- PyG's numbers ---

WAYS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "one head": ({}, dict),
    "heads joined": ({"heads": 3}, dict),
    "heads averaged": ({"heads": 3, "concat": False}, dict),
    "no bias": ({"heads": 2, "bias": False}, dict),
    "skip": ({"heads": 2, "residual": True}, dict),
    "skip, averaged": ({"heads": 2, "residual": True, "concat": False}, dict),
    "no loops": ({"heads": 2, "add_self_loops": False}, dict),
    "steep": ({"heads": 2, "negative_slope": 0.9}, dict),
    "edge features": ({"heads": 2, "edge_dim": 3}, lambda: {"edge_attr": features(20, 3, seed=3)}),
    "one edge feature": ({"heads": 2, "edge_dim": 1}, lambda: {"edge_attr": features(20, 1, seed=3)[:, 0]}),
    "filled by a number": (
        {"heads": 2, "edge_dim": 3, "fill_value": 0.5},
        lambda: {"edge_attr": features(20, 3, seed=3)},
    ),
    "filled by a sum": (
        {"heads": 2, "edge_dim": 3, "fill_value": "add"},
        lambda: {"edge_attr": features(20, 3, seed=3)},
    ),
    "edge features, no loops": (
        {"heads": 2, "edge_dim": 3, "add_self_loops": False},
        lambda: {"edge_attr": features(20, 3, seed=3)},
    ),
    "edge features left out": ({"heads": 2, "edge_dim": 3}, dict),
    "turned round": ({"heads": 2, "flow": "target_to_source"}, dict),
    "largest message": ({"heads": 2, "aggr": "max"}, dict),
    "mean message": ({"heads": 2, "aggr": "mean"}, dict),
}
MECHANISMS: dict[str, tuple[Any, bool]] = {  # and whether to train
    "plain": ((), True),
    "evaluation": ([RANDOM], False),
    "no spread": ([STILL], True),
}
every_mechanism = pytest.mark.parametrize(("mechanisms", "training"), MECHANISMS.values(), ids=MECHANISMS)


@pytest.mark.slow
@every_mechanism
@both
@pytest.mark.parametrize(("settings", "more"), WAYS.values(), ids=WAYS)
def test_a_layer_is_pygs_with_the_same_weights(
    settings: dict[str, Any], more: Callable[[], dict[str, Any]], name: str, mechanisms: Any, training: bool
) -> None:
    ours, theirs = pair(name, WIDTH, 4, mechanisms=mechanisms, **settings)
    ours.train(training), theirs.train(training)
    with overt.Chain(step=0):
        got = call(ours, features(), ends(), **more())
    assert_same(got, call(theirs, features(), ends(), **more()), tolerance=3e-6)


@both
@pytest.mark.parametrize("settings", [{"heads": 3}, {"heads": 2, "edge_dim": 3, "residual": True}])
def test_in_float64_a_layer_is_pygs_to_the_last_digits(name: str, settings: dict[str, Any]) -> None:
    for mechanisms in ((), [RANDOM]):
        ours, theirs = pair(name, WIDTH, 4, mechanisms=mechanisms, **settings)
        ours.double().eval(), theirs.double().eval()
        more = {"edge_attr": features(20, 3, seed=3).double()} if "edge_dim" in settings else {}
        got = call(ours, features().double(), ends(), **more)
        assert_same(got, call(theirs, features().double(), ends(), **more), tolerance=1e-12)


def test_weights_shared_between_both_ends_are_shared() -> None:
    for x in (features(), (features(), features(seed=1))):
        ours, theirs = pair("gatv2", WIDTH, 4, heads=2, share_weights=True)
        assert_same(call(ours, x, ends()), call(theirs, x, ends()), tolerance=3e-6)


BIPARTITE: dict[str, tuple[Any, Callable[[], Any], dict[str, Any]]] = {
    "two widths": ((5, 3), lambda: (features(7), features(4, 3, seed=1)), {}),
    "one width": (5, lambda: (features(7), features(4, seed=1)), {}),
    "sources alone": ((5, 3), lambda: (features(7), None), {"size": (7, 4)}),
    "sources alone, one width": (5, lambda: (features(7), None), {"size": (7, 4)}),
    "sources alone, no size": (5, lambda: (features(7), None), {}),
    "given size": ((5, 3), lambda: (features(7), features(4, 3, seed=1)), {"size": (7, 4)}),
    "one for both": ((5, 5), features, {}),
}


# PyG's GATv2Conv takes no size and needs both ends.
BOTH_ENDS = ("two widths", "one width", "one for both")
DIFFERING = [("gat", case) for case in BIPARTITE] + [("gatv2", case) for case in BOTH_ENDS]


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize(("name", "case"), DIFFERING)
def test_sources_and_targets_may_differ_as_in_pyg(name: str, case: str, loops: bool) -> None:
    widths, x, more = BIPARTITE[case]
    edges = ends(7, targets=4)
    for mechanisms in ((), [RANDOM]):
        ours, theirs = pair(
            name, widths, 4, mechanisms=mechanisms, heads=2, add_self_loops=loops, residual=True
        )
        ours.eval()
        assert_same(call(ours, x(), edges, **more), call(theirs, x(), edges, **more), tolerance=3e-6)


@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize(
    ("widths", "x"),
    [
        ((5, 3), lambda: (features(), features(NODES, 3, seed=1))),
        (5, lambda: (features(), features(seed=1))),
        ((5, 5), features),
        (5, features),
    ],
    ids=["two widths", "one width", "one for both", "one"],
)
@both
def test_edges_turned_round_carry_what_they_carry_in_pyg(
    widths: Any, x: Callable[[], Any], name: str, loops: bool
) -> None:
    named = {"heads": 2, "flow": "target_to_source", "add_self_loops": loops, "residual": True}
    for mechanisms in ((), [RANDOM]):
        ours, theirs = pair(name, widths, 4, mechanisms=mechanisms, **named)
        ours.eval()
        assert_same(call(ours, x(), ends()), call(theirs, x(), ends()), tolerance=3e-6)


@both
def test_the_prior_looks_at_what_is_sent_whichever_way_edges_run(name: str) -> None:
    x = features(), features(seed=1)
    found = []
    for flow, edges in (("source_to_target", ends()), ("target_to_source", ends().flip(0))):
        torch.manual_seed(0)
        layer = OURS[name]((WIDTH, WIDTH), 4, heads=2, flow=flow, add_self_loops=False, mechanisms=[RANDOM])
        chain = overt.Chain(step=0)
        out, (_, weights) = layer(x, edges, return_attention_weights=True, chain=chain)
        found.append((out.detach(), weights.detach(), chain.kl().detach()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_gatv2_without_targets_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"x must be a pair .*, got \(x, None\)"):
        GATv2Conv(WIDTH, 4)((features(), None), ends())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("layout", ["coo", "csr"])
@both
def test_adjacency_may_be_a_torch_sparse_tensor(name: str, layout: str, loops: bool) -> None:
    edges = torch.unique(ends(), dim=1)
    if layout == "coo":
        adjacency = to_torch_coo_tensor(edges, size=(NODES, NODES)).t().coalesce()
    else:
        adjacency = to_torch_csr_tensor(edges.flip(0), size=(NODES, NODES))
    for mechanisms in ((), [RANDOM]):
        ours, theirs = pair(name, WIDTH, 4, mechanisms=mechanisms, heads=2, add_self_loops=loops)
        ours.eval()
        got = call(ours, features(), adjacency)
        assert_same(got, call(theirs, features(), adjacency), tolerance=3e-6)
        torch.testing.assert_close(got[0], ours(features(), edges))


@pytest.mark.parametrize("order", [None, "row", "col"])
@both
def test_edges_may_be_an_edge_index(name: str, order: str | None) -> None:
    edges = EdgeIndex(ends(), sparse_size=(NODES, NODES))
    if order is not None:
        edges = edges.sort_by(order)[0]
    for loops in (True, False):
        ours, theirs = pair(name, WIDTH, 4, mechanisms=[RANDOM], heads=2, add_self_loops=loops)
        ours.eval()
        assert_same(call(ours, features(), edges), call(theirs, features(), edges), tolerance=3e-6)


@both
def test_what_pyg_refuses_is_not_computed_all_the_same(name: str) -> None:
    stacked = torch.stack([features(), features(seed=1)])  # PyG: static graphs are not supported
    for layer in (THEIRS[name](WIDTH, 4), OURS[name](WIDTH, 4)):
        with pytest.raises((AssertionError, ValueError)):
            layer(stacked, ends())


def test_edge_features_that_no_weights_are_there_for_are_refused_as_in_pyg() -> None:
    for layer in (pyg.GATv2Conv(WIDTH, 4), GATv2Conv(WIDTH, 4)):
        with pytest.raises((AssertionError, ValueError)):
            layer(features(), ends(), edge_attr=features(20, 3, seed=3))


def test_what_is_no_edge_list_is_named() -> None:
    with pytest.raises(
        TypeError, match=r"edge_index must be a \(2, edges\) tensor or a torch sparse tensor, got"
    ):
        GATConv(WIDTH, 4)(features(), [[0], [1]])


@pytest.mark.parametrize("mechanisms", [(), [RANDOM], [overt.Evolving(beta=0.0), RANDOM]])
@both
def test_a_graph_without_edges_gives_pygs_output(name: str, mechanisms: Any) -> None:
    none = torch.zeros(2, 0, dtype=torch.long)
    for loops in (True, False):
        ours, theirs = pair(name, WIDTH, 4, mechanisms=mechanisms, heads=2, add_self_loops=loops)
        ours.eval()
        with overt.Chain():
            assert_same(call(ours, features(), none), call(theirs, features(), none), tolerance=3e-6)
        with overt.Chain(step=0) as chain:
            ours.train()(features(), none).sum().backward()
        assert math.isfinite(float(chain.penalty().detach()))


def test_a_graph_of_one_node_attends_to_itself() -> None:
    none = torch.zeros(2, 0, dtype=torch.long)
    layer = GATConv(WIDTH, 4, heads=2, mechanisms=[RANDOM])
    with overt.Chain(step=0):
        _, (edges, weights) = layer(features(1), none, return_attention_weights=True)
    assert edges.tolist() == [[0], [0]]
    assert weights.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("mechanisms", [(), [STILL]])
@both
def test_dropout_of_a_seed_is_pygs(name: str, mechanisms: Any) -> None:
    ours, theirs = pair(name, WIDTH, 4, mechanisms=mechanisms, heads=3, dropout=0.5)
    found = []
    for layer in (ours, theirs):
        torch.manual_seed(3)
        with overt.Chain(step=0):
            found.append(call(layer, features(), ends()))
    assert (found[0][1][1] == 0).any(), "something was dropped"
    assert_same(*found, tolerance=3e-6)


@both
def test_a_layer_is_made_from_the_random_numbers_that_pygs_is_made_from(name: str) -> None:
    found = []
    for make in (THEIRS[name], OURS[name], lambda *a, **n: OURS[name](*a, mechanisms=[RANDOM], **n)):
        torch.manual_seed(5)
        layer = make(WIDTH, 4, heads=2, edge_dim=3, residual=True)
        after = torch.rand(3)
        layer.reset_parameters()
        found.append((dict(layer.named_parameters()), after, torch.rand(3)))
    for parameters, *after in found[1:]:
        for key, value in found[0][0].items():
            assert torch.equal(parameters[key], value), key
        assert all(map(torch.equal, after, found[0][1:]))


def test_reset_makes_the_prior_anew() -> None:
    layer = GATConv(WIDTH, 4, mechanisms=[RANDOM])
    prior = layer.map.bayesian.prior
    before = prior.inner.weight.detach().clone()
    assert float(prior.inner.bias.detach().abs().max()) == 0.0
    layer.reset_parameters()
    assert not torch.equal(prior.inner.weight, before)


def test_lazy_widths_are_found_at_the_first_call() -> None:
    for layer in (GATConv(-1, 4, mechanisms=[RANDOM]), GATv2Conv((-1, -1), 4, mechanisms=[RANDOM])):
        assert layer.eval()(features(), ends()).shape == (NODES, 4)


def test_two_layers_differ_from_pygs_by_rounding_on_a_real_graph() -> None:
    data = karate()
    first, their_first = pair("gat", 34, 8, heads=8, mechanisms=[RANDOM])
    second, their_second = pair("gat", 64, 4, concat=False, mechanisms=[RANDOM])
    first.eval(), second.eval()
    got = second(F.elu(first(data.x, data.edge_index)), data.edge_index)
    want = their_second(F.elu(their_first(data.x, data.edge_index)), data.edge_index)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


# --- Random weights ---


def weights_of(layer: Any, edges: Tensor, chain: overt.Chain, x: Tensor | None = None) -> Tensor:
    x = features() if x is None else x
    found: Tensor = layer(x, edges, return_attention_weights=True, chain=chain)[1][1].detach()
    return found


@both
@pytest.mark.parametrize(
    "config", [overt.Bayesian(k=1.0), overt.Bayesian(k=10.0), overt.Bayesian(family="lognormal", sigma=0.7)]
)
def test_drawn_weights_have_the_mean_and_variance_of_normalised_draws(
    name: str, config: overt.Bayesian
) -> None:
    # Every target has the same scores for the same three sources: one call is one draw per target.
    count = 20_000
    ours, theirs = pair(name, WIDTH, 4, mechanisms=[config], add_self_loops=False)
    x = features(3) * 0.3, features(1, seed=1).expand(count, -1)
    edges = torch.stack([torch.arange(3).repeat(count), torch.arange(count).repeat_interleave(3)])
    _, (_, drawn) = ours(x, edges, return_attention_weights=True, chain=overt.Chain(step=0))
    got = drawn.detach().view(count, 3).double()
    torch.testing.assert_close(got.sum(dim=1), torch.ones(count, dtype=torch.float64))

    phi = theirs(x, edges, return_attention_weights=True)[1][1][:3, 0].log().detach().double().numpy()
    if config.family == "weibull":
        mean = math.gamma(1 + 1 / config.k)
        law = scipy.stats.weibull_min(config.k, scale=[math.exp(p) / mean for p in phi])
    else:
        law = scipy.stats.lognorm(config.sigma, scale=[math.exp(p - config.sigma**2 / 2) for p in phi])
    sampled = torch.from_numpy(law.rvs((count, 3), random_state=0))
    want = sampled / sampled.sum(dim=1, keepdim=True)
    # five standard errors of a difference of two means, of values and of squares
    for power in (1, 2):
        a, b = got**power, want**power
        error = (a.var(dim=0) + b.var(dim=0)).div(count).sqrt()
        assert ((a.mean(dim=0) - b.mean(dim=0)).abs() < 5 * error).all()
    assert got.std(dim=0).min() > 0.005, "there is something to draw"


@both
def test_drawn_weights_sum_to_one_over_the_edges_into_each_node(name: str) -> None:
    data = karate()
    layer = OURS[name](34, 4, heads=3, mechanisms=[RANDOM])
    with overt.Chain(step=0):
        _, (edges, weights) = layer(data.x, data.edge_index, return_attention_weights=True)
    sums = torch.zeros(34, 3).index_add(0, edges[1], weights)
    torch.testing.assert_close(sums, torch.ones(34, 3))


def test_noise_is_a_matter_of_seed_step_and_sample_alone() -> None:
    layer = GATConv(WIDTH, 4, heads=2, mechanisms=[RANDOM])

    def draw(**address: Any) -> Tensor:
        return weights_of(layer, ends(), overt.Chain(**{"step": 1, "seed": 2, "sample": 3, **address}))

    first = draw()
    torch.rand(5)
    assert torch.equal(draw(), first)
    for other in ({"step": 2}, {"seed": 3}, {"sample": 4}, {"examples": 1}):
        assert not torch.allclose(draw(**other), first), other
    layer.eval()
    assert torch.equal(draw(), first), "a sample asked for is drawn in evaluation mode too"
    mean = weights_of(layer, ends(), overt.Chain(step=1))
    assert torch.equal(weights_of(layer, ends(), overt.Chain()), mean)
    assert not torch.allclose(mean, first)


def test_noise_leaves_the_global_generator_alone() -> None:
    layer = GATConv(WIDTH, 4, heads=2, mechanisms=[RANDOM])
    torch.manual_seed(1)
    want = torch.rand(3)
    torch.manual_seed(1)
    layer(features(), ends(), chain=overt.Chain(step=0))
    assert torch.equal(torch.rand(3), want)


@both
def test_noise_follows_an_edge_through_any_order(name: str) -> None:
    layer = OURS[name](WIDTH, 4, heads=2, mechanisms=[RANDOM], add_self_loops=False)
    edges = torch.unique(ends(), dim=1)
    order = torch.randperm(edges.shape[1])
    chain, other = overt.Chain(step=0), overt.Chain(step=0)
    want = weights_of(layer, edges, chain)
    torch.testing.assert_close(weights_of(layer, edges[:, order], other), want[order])
    torch.testing.assert_close(other.kl(), chain.kl())


def test_parallel_edges_share_their_noise() -> None:
    layer = GATConv(WIDTH, 4, mechanisms=[RANDOM], add_self_loops=False)
    weights = weights_of(layer, torch.tensor([[0, 0, 1], [1, 1, 1]]), overt.Chain(step=0))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_kl_of_a_layer_is_the_mean_of_its_cells() -> None:
    data = karate()
    layer = GATConv(34, 4, heads=2, mechanisms=[RANDOM]).double()
    chain, x = overt.Chain(step=0, kl=True), data.x.double()
    _, (edges, mean) = layer.eval()(x, data.edge_index, return_attention_weights=True, chain=chain)
    importance = layer.map.bayesian.prior(layer.lin(x).view(34, 2, 4))  # (nodes, heads)
    psi = torch.zeros(34, 34, 2, dtype=torch.float64).fill_(-math.inf)
    psi[edges[1], edges[0]] = importance[edges[0]]
    prior = torch.log_softmax(psi, dim=1)[edges[1], edges[0]]
    torch.testing.assert_close(chain.kl(), cell_kl(mean.log(), prior, RANDOM).mean())


# --- Chains ---


class Net(nn.Module):
    """Layers one upon the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Any, **named: Any) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, edge_index, **named))
        return x


def net(mechanisms: Any = (RANDOM,), depth: int = 2, make: Any = GATConv, **named: Any) -> Net:
    mechanisms = list(mechanisms)
    return Net(*(make(WIDTH, WIDTH, 2, False, mechanisms=mechanisms, **named) for _ in range(depth)))


def test_layers_without_a_number_are_numbered_by_call_and_draw_different_noise() -> None:
    layer = GATConv(WIDTH, 4, heads=2, mechanisms=[RANDOM])
    twin = copy.deepcopy(layer)
    chain = overt.Chain(step=0)
    first, second = weights_of(layer, ends(), chain), weights_of(twin, ends(), chain)
    assert not torch.allclose(first, second)
    assert torch.equal(weights_of(twin, ends(), overt.Chain(step=0)), first)
    twice = overt.Chain(step=0)
    assert torch.equal(weights_of(layer, ends(), twice), first)
    assert torch.equal(weights_of(layer, ends(), twice), second), "one layer that is called twice is two"


def test_a_number_that_is_given_is_the_one_that_addresses_the_noise() -> None:
    layer = GATConv(WIDTH, 4, heads=2, mechanisms=[RANDOM])
    numbered = GATConv(WIDTH, 4, heads=2, mechanisms=[RANDOM], layer=1)
    numbered.load_state_dict(layer.state_dict())
    chain = overt.Chain(step=0)
    weights_of(layer, ends(), chain)
    want = weights_of(layer, ends(), chain)
    assert torch.equal(weights_of(numbered, ends(), overt.Chain(step=0)), want)


def test_two_layers_of_one_number_are_refused() -> None:
    with (
        pytest.raises(ValueError, match="two attentions are both layer 0 of the encoder chain"),
        overt.Chain(step=0),
    ):
        net(layer=0)(features(), ends())


def test_the_chain_around_a_call_is_found_and_a_given_one_goes_before_it() -> None:
    layer = GATConv(WIDTH, 4, heads=2, mechanisms=[RANDOM])
    want = weights_of(layer, ends(), overt.Chain(step=1))
    with overt.Chain(step=1) as around:
        found = layer(features(), ends(), return_attention_weights=True)[1][1]
        own = overt.Chain(step=2)
        other = weights_of(layer, ends(), own)
    assert torch.equal(found, want)
    assert not torch.allclose(other, want)
    assert around.has_loss
    assert own.has_loss


def test_nested_chains_are_left_one_by_one() -> None:
    outer, inner = overt.Chain(step=0), overt.Chain(step=1)
    with outer:
        with inner:
            assert chains.around() is inner
            with outer:
                assert chains.around() is outer
            assert chains.around() is inner
        assert chains.around() is outer
    assert chains.around() is None


def test_an_error_leaves_no_chain_behind() -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), overt.Chain(step=0), overt.Chain(step=1):
        fail()
    assert chains.around() is None


def test_training_without_a_chain_says_what_to_do() -> None:
    with pytest.raises(
        ValueError, match=r"random weights need an address for their noise: pass chain=Chain\(step=t\)"
    ):
        GATConv(WIDTH, 4, mechanisms=[RANDOM])(features(), ends())
    GATConv(WIDTH, 4)(features(), ends())  # a plain layer needs none


def test_a_networks_kl_is_the_sum_of_its_layers_kl() -> None:
    model = net()
    with overt.Chain(step=0) as chain:
        model(features(), ends())
    alone, x = [], features()
    replayed = overt.Chain(step=0)
    for number, layer in enumerate(model.layers):
        single = overt.Chain(step=0)
        x, before = torch.tanh(layer(x, ends(), chain=replayed)), x
        layer._layer = number
        layer(before, ends(), chain=single)
        alone.append(single.kl())
    torch.testing.assert_close(chain.kl(), torch.stack(alone).sum())
    torch.testing.assert_close(replayed.kl(), chain.kl())


def test_the_penalty_trains_every_parameter_of_the_prior() -> None:
    model = net()
    with overt.Chain(step=0) as chain:
        model(features(), ends())
    chain.penalty().backward()
    for key, parameter in model.named_parameters():
        if "prior" in key or ".lin." in key:
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all()
    assert any(float(p.grad.abs().max()) > 0 for k, p in model.named_parameters() if "prior" in k)  # type: ignore[union-attr]


# --- Evolving ---


@both
def test_the_second_layers_scores_start_from_the_firsts(name: str) -> None:
    model = net([overt.Evolving(alpha=0.25, beta=0.0)], make=OURS[name])
    chain = overt.Chain()
    x = torch.tanh(model.layers[0](features(), ends(), chain=chain))
    carried = chain.maps["Evolving", "encoder", 0]
    _, (edges, weights) = model.layers[1](x, ends(), return_attention_weights=True, chain=chain)
    _, plain = pair(name, WIDTH, WIDTH, 2, False)
    plain.load_state_dict(model.layers[1].state_dict())
    own = plain(x, ends(), return_attention_weights=True)[1][1].log()
    # log-weights are scores less one number per node, which a softmax over the node's edges does not feel
    for node in range(NODES):
        into = edges[1] == node
        want = torch.softmax(0.25 * carried[into] + 0.75 * own[into], dim=0)
        torch.testing.assert_close(weights[into], want)


def test_evolving_moves_the_layer_below_through_its_scores() -> None:
    model = net([overt.Evolving(alpha=0.5, beta=0.0)])
    with overt.Chain():
        # cut the way through the features, so that the scores are the only way back
        x = torch.tanh(model.layers[0](features(), ends())).detach()
        model.layers[1](x, ends()).square().sum().backward()
    assert float(model.layers[0].att_src.grad.abs().max()) > 0  # type: ignore[union-attr, operator]


def test_evolving_refuses_other_heads_and_the_convolution() -> None:
    layers = [GATConv(WIDTH, WIDTH, heads, False, mechanisms=[overt.Evolving(beta=0.0)]) for heads in (2, 1)]
    with pytest.raises(ValueError, match="as many heads as the layer below has, 2, got 1"), overt.Chain():
        Net(*layers)(features(), ends())
    with pytest.raises(ValueError, match="beta must be 0 on graphs, where nodes have no order"):
        GATConv(WIDTH, 4, mechanisms=[overt.Evolving()])
    with pytest.raises(ValueError, match="graph attention cannot have Synthesizer"):
        GATConv(WIDTH, 4, mechanisms=[overt.Synthesizer()])


@pytest.mark.parametrize("training", [True, False])
def test_evolving_layers_that_no_chain_joins_are_refused_rather_than_left_apart(training: bool) -> None:
    # each would take itself for the first, and a trained network compute something else in evaluation
    model = net([overt.Evolving(alpha=0.5, beta=0.0)]).train(training)
    with pytest.raises(ValueError, match="Chain"):
        model(features(), ends())


# --- Life inside PyG ---


def shop() -> HeteroData:
    """Two kinds of nodes, three kinds of edges."""
    data = HeteroData()
    data["user"].x, data["item"].x = features(6, 4), features(8, 3, seed=1)
    data["user", "buys", "item"].edge_index = ends(6, 14, targets=8)
    data["item", "sold_to", "user"].edge_index = ends(6, 14, targets=8).flip(0)
    data["user", "knows", "user"].edge_index = ends(6, 9, seed=2)
    return data


class Two(nn.Module):
    def __init__(self, make: Any, **named: Any) -> None:
        super().__init__()
        self.first = make((-1, -1), 4, heads=2, add_self_loops=False, **named)
        self.second = make((-1, -1), 3, add_self_loops=False, **named)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        out: Tensor = self.second(x, edge_index)
        return out


@pytest.mark.slow
@both
def test_to_hetero_keeps_working_and_trains(name: str) -> None:
    data = shop()
    model = pyg.to_hetero(Two(OURS[name], mechanisms=[RANDOM]), data.metadata())
    with torch.no_grad(), overt.Chain(step=0):
        model(data.x_dict, data.edge_index_dict)  # finds the widths
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for step in range(15):
        with overt.Chain(step=step) as chain:
            out = model(data.x_dict, data.edge_index_dict)
        assert {key: value.shape for key, value in out.items()} == {"user": (6, 3), "item": (8, 3)}
        assert len(chain._losses) == 6, "two layers for each of three kinds of edges"
        assert float(chain.kl().detach()) > 0
        loss = sum(value.square().mean() for value in out.values()) + 0.01 * chain.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


@both
def test_to_hetero_gives_pygs_numbers(name: str) -> None:
    data = shop()
    found = []
    for make, named in ((THEIRS[name], {}), (OURS[name], {"mechanisms": [RANDOM]})):
        torch.manual_seed(0)
        model = pyg.to_hetero(Two(make, **named), data.metadata()).eval()
        with torch.no_grad():
            found.append(model(data.x_dict, data.edge_index_dict))
    for key, want in found[0].items():
        torch.testing.assert_close(found[1][key], want, rtol=1e-5, atol=1e-5)


def test_hetero_conv_joins_layers_of_ours() -> None:
    data = shop()
    layers = {
        kind: GATConv((-1, -1), 4, heads=2, add_self_loops=False, mechanisms=[RANDOM])
        for kind in data.edge_types
    }
    model = pyg.HeteroConv(layers, aggr="sum")
    with overt.Chain(step=0) as chain:
        out = model(data.x_dict, data.edge_index_dict)
    assert out["item"].shape == (8, 8)
    assert len(chain._losses) == 3
    (sum(value.sum() for value in out.values()) + chain.penalty()).backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for n, p in model.named_parameters() if "prior" in n
    )


def test_a_sequential_of_pygs_takes_them() -> None:
    random.seed()  # it names its code by a random number, and takes that of another with the same name
    model = pyg.Sequential(
        "x, edge_index",
        [
            (GATConv(WIDTH, 4, heads=2, mechanisms=[RANDOM]), "x, edge_index -> x"),
            nn.ReLU(),
            (GATv2Conv(8, 3, mechanisms=[RANDOM]), "x, edge_index -> x"),
        ],
    )
    with overt.Chain(step=0) as chain:
        assert model(features(), ends()).shape == (NODES, 3)
    assert len(chain._losses) == 2


@both
def test_copies_and_saved_weights_compute_the_same(name: str, tmp_path: Any) -> None:
    layer = OURS[name](WIDTH, 4, heads=2, edge_dim=None, mechanisms=[RANDOM])
    want = weights_of(layer, ends(), overt.Chain(step=0))
    torch.save(layer.state_dict(), tmp_path / "weights")
    fresh = OURS[name](WIDTH, 4, heads=2, mechanisms=[RANDOM])
    assert not torch.allclose(weights_of(fresh, ends(), overt.Chain(step=0)), want)
    fresh.load_state_dict(torch.load(tmp_path / "weights"))
    torch.save(layer, tmp_path / "whole")
    whole = torch.load(tmp_path / "whole", weights_only=False)
    for other in (copy.deepcopy(layer), fresh, whole):
        assert torch.equal(weights_of(other, ends(), overt.Chain(step=0)), want)


@both
def test_pygs_weights_load_but_for_the_prior(name: str) -> None:
    theirs = THEIRS[name](WIDTH, 4, heads=2, edge_dim=3, residual=True)
    plain = OURS[name](WIDTH, 4, heads=2, edge_dim=3, residual=True)
    plain.load_state_dict(theirs.state_dict())
    ours = OURS[name](WIDTH, 4, heads=2, edge_dim=3, residual=True, mechanisms=[RANDOM])
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    prior = "map.bayesian.prior."
    assert set(missing) == {f"{prior}inner.weight", f"{prior}inner.bias", f"{prior}outer.weight"}
    assert not unexpected


class Classifier(nn.Module):
    def __init__(self, make: Any, **named: Any) -> None:
        super().__init__()
        self.first = make(34, 4, heads=2, **named)
        self.second = make(8, 4, **named)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.second(F.elu(self.first(x, edge_index)), edge_index)
        return out


@pytest.mark.parametrize("algorithm", ["gnn", "attention"])
@both
def test_pygs_explainers_find_what_they_find_in_pygs_layers(name: str, algorithm: str) -> None:
    data = karate()
    theirs = Classifier(THEIRS[name]).eval()
    ours = Classifier(OURS[name], mechanisms=[RANDOM]).eval()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    found = []
    for model in (theirs, ours):
        torch.manual_seed(0)
        explainer = Explainer(
            model,
            algorithm=GNNExplainer(epochs=5) if algorithm == "gnn" else AttentionExplainer(),
            explanation_type="model",
            node_mask_type="attributes" if algorithm == "gnn" else None,
            edge_mask_type="object",
            model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
        )
        found.append(explainer(data.x, data.edge_index, index=3))
    torch.testing.assert_close(found[1].edge_mask, found[0].edge_mask, rtol=1e-3, atol=1e-4)
    assert found[1].edge_mask.std() > 0
    if algorithm == "gnn":
        torch.testing.assert_close(found[1].node_mask, found[0].node_mask, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours(data.x, data.edge_index), theirs(data.x, data.edge_index))


@pytest.mark.slow
@both
def test_explainers_see_into_a_subclass_whose_parents_were_made_before_it(name: str) -> None:
    # PyG keeps, per class, the form of message passing that its explainers use, and takes it from the parent
    data = karate()
    THEIRS[name](34, 4), OURS[name](34, 4)

    own = type(f"Own{OURS[name].__name__}", (OURS[name],), {})  # PyG also knows classes by their names
    explainer = Explainer(
        Classifier(own).eval(),
        algorithm=GNNExplainer(epochs=2),
        explanation_type="model",
        edge_mask_type="object",
        model_config={"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
    )
    assert float(explainer(data.x, data.edge_index, index=3).edge_mask.std()) > 0


@both
@pytest.mark.parametrize("step", ["propagate", "message", "aggregate", "edge_update"])
def test_hooks_on_message_passing_are_called(name: str, step: str) -> None:
    ours, theirs = pair(name, WIDTH, 4, heads=2)
    seen: list[str] = []
    handles = [
        getattr(ours, f"register_{step}_forward_pre_hook")(lambda *_: seen.append("before")),
        getattr(ours, f"register_{step}_forward_hook")(lambda *_: seen.append("after")),
    ]
    torch.testing.assert_close(ours(features(), ends()), theirs(features(), ends()))
    assert seen == ["before", "after"]
    for handle in handles:
        handle.remove()
    ours(features(), ends())
    assert len(seen) == 2


def test_a_message_that_a_subclass_changes_is_the_one_that_is_sent() -> None:
    class Doubled(GATConv):
        def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
            return 2 * alpha.unsqueeze(-1) * x_j

    layer = Doubled(WIDTH, 4, bias=False)
    plain = GATConv(WIDTH, 4, bias=False)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(features(), ends()), 2 * plain(features(), ends()))


def test_unwatched_messages_are_never_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    def formed(*_: Any, **__: Any) -> None:
        raise AssertionError("a message was formed")

    layer = GATConv(WIDTH, 4)
    monkeypatch.setattr(layer, "propagate", formed)
    layer(features(), ends()).sum().backward()
    with pytest.raises(AssertionError, match="a message was formed"):
        layer.double()(features().double(), ends())  # the control: no compiled loop for float64


# --- Life inside torch ---


def loss_and_gradients(model: nn.Module, run: Callable[..., Tensor]) -> list[Tensor]:
    model.zero_grad()
    chain = overt.Chain(step=2)
    loss = run(chain).square().sum() + chain.penalty()
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("mechanisms", [[RANDOM], [overt.Evolving(beta=0.0), RANDOM]])
def test_checkpointing_gives_the_same_gradients(mechanisms: Any) -> None:
    model = net(mechanisms, depth=3)

    def plain(chain: overt.Chain) -> Tensor:
        return model(features(), ends(), chain=chain)  # type: ignore[no-any-return]

    def saved(chain: overt.Chain) -> Tensor:
        x = features()
        for layer in model.layers:
            x = torch.tanh(checkpoint(layer, x, ends(), chain=chain, use_reentrant=False))  # type: ignore[arg-type]
        return x

    want = loss_and_gradients(model, plain)
    for a, b in zip(loss_and_gradients(model, saved), want, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_inside_a_chain_gives_the_same_gradients() -> None:
    model, found = net(depth=2), []
    for saved in (False, True):
        model.zero_grad()
        with overt.Chain(step=2) as chain:
            x = features()
            for layer in model.layers:
                x = torch.tanh(
                    checkpoint(layer, x, ends(), use_reentrant=False) if saved else layer(x, ends())  # type: ignore[arg-type]
                )
            (x.square().sum() + chain.penalty()).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointing_with_the_backward_pass_after_the_chain_asks_for_the_chain() -> None:
    layer, x = net(depth=1).layers[0], features().requires_grad_()
    with overt.Chain(step=2):
        out = checkpoint(layer, x, ends(), use_reentrant=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a checkpointed layer runs again .* pass it the chain"):
        out.square().sum().backward()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler looks at what torch warns of looking at
@pytest.mark.parametrize("loops", [False, True])
def test_a_compiled_network_gives_the_same_numbers(loops: bool) -> None:
    torch.compiler.reset()
    model = net(depth=1, add_self_loops=loops)
    # loops cannot be added without a look at the edges, which ends a graph; without them it is one
    compiled = torch.compile(model, backend="eager", fullgraph=not loops)
    want = loss_and_gradients(model, lambda chain: model(features(), ends(), chain=chain))
    got = loss_and_gradients(model, lambda chain: compiled(features(), ends(), chain=chain))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@both
@pytest.mark.parametrize("mechanisms", [(), [RANDOM]])
def test_autocast_gives_finite_numbers_of_pygs_dtype(name: str, mechanisms: Any) -> None:
    ours, theirs = pair(name, WIDTH, 4, mechanisms=mechanisms, heads=2)
    chain = overt.Chain(step=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ours(features(), ends(), chain=chain)
        want = theirs(features(), ends())
    assert out.dtype == want.dtype
    assert out.isfinite().all()
    (out.float().square().sum() + chain.penalty()).backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)
    if mechanisms:
        assert chain.kl().dtype == torch.float32
    else:
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@both
def test_a_layer_in_bfloat16_stays_in_it(name: str) -> None:
    layer = OURS[name](WIDTH, 4, heads=2, mechanisms=[RANDOM]).bfloat16()
    out = layer(features().bfloat16(), ends(), chain=overt.Chain(step=0))
    assert out.dtype == torch.bfloat16
    assert out.isfinite().all()


def test_memory_grows_with_edges_and_not_with_pairs_of_nodes() -> None:
    resource = pytest.importorskip("resource")
    nodes = 200_000  # a map of all pairs would take 160 GB in float32
    ring = torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)])
    layer = GATConv(4, 2, heads=2, mechanisms=[overt.Bayesian()])
    x = features(nodes, 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chain = overt.Chain(step=0)
    (layer(x, ring, chain=chain).square().mean() + chain.penalty()).backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 1000 * (ring.shape[1] + nodes)  # bytes for each edge and loop
    assert layer.att_src.grad.isfinite().all()


# --- The paper's network ---


@pytest.mark.parametrize("scores", ["gat", "gatv2"])
def test_the_network_is_two_layers_of_pygs(scores: Any) -> None:
    data = blocks(40)
    model = GAT(24, 3, [RANDOM], width=4, heads=3, out_heads=2, scores=scores).eval()
    first, second = THEIRS[scores](24, 4, 3), THEIRS[scores](12, 3, 2, concat=False)
    for mine, plain in ((model.first, first), (model.second, second)):
        plain.load_state_dict({k: v for k, v in mine.state_dict().items() if not k.startswith("map.")})
    want = second(F.elu(first(data.x, data.edge_index)), data.edge_index)
    torch.testing.assert_close(model(data.x, data.edge_index), want)
    assert want.shape == (40, 3)


def test_the_network_takes_gat_or_gatv2_scores() -> None:
    with pytest.raises(ValueError, match="scores must be one of 'gat', 'gatv2'; got 'dot'"):
        GAT(24, 3, scores="dot")  # type: ignore[arg-type]


@pytest.mark.parametrize("scores", ["gat", "gatv2"])
@pytest.mark.parametrize("training", [True, False])
def test_sparse_features_are_dense_ones(scores: Any, training: bool) -> None:
    data = blocks(40)
    dropout = 0.0 if training else 0.6
    model = GAT(24, 3, [RANDOM], width=4, heads=3, dropout=dropout, scores=scores).train(training)
    found = [
        loss_and_gradients(model, lambda chain, x=x: model(x, data.edge_index, chain=chain))  # type: ignore[misc]
        for x in (data.x, data.x.to_sparse().coalesce())
    ]
    assert len(found[0]) > 6
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_dropout_of_sparse_features_keeps_their_mean() -> None:
    data = blocks(40)
    model = GAT(24, 3, dropout=0.6)
    x = data.x.to_sparse().coalesce()
    kept = torch.stack([model._dropped(x).to_dense() for _ in range(400)])
    assert kept.unique().tolist() == pytest.approx([0.0, 2.5])
    torch.testing.assert_close(kept.mean(dim=0)[data.x > 0].mean(), torch.tensor(1.0), rtol=0.02, atol=0)
    assert float(kept[:, data.x == 0].abs().max()) == 0.0


def test_evolving_joins_the_networks_layers_where_heads_agree() -> None:
    data = blocks(40)
    config = [overt.Evolving(alpha=0.5, beta=0.0), RANDOM]
    model = GAT(24, 3, config, width=4, heads=2, out_heads=2, dropout=0.0)
    plain = GAT(24, 3, [RANDOM], width=4, heads=2, out_heads=2, dropout=0.0)
    plain.load_state_dict(model.state_dict())
    with overt.Chain(step=0) as chain:
        out = model(data.x, data.edge_index)
    assert sorted(chain.maps) == [("Evolving", "encoder", 0), ("Evolving", "encoder", 1)]
    assert not torch.allclose(out, plain(data.x, data.edge_index, chain=overt.Chain(step=0)))
    with (
        pytest.raises(ValueError, match="as many heads as the layer below has, 8, got 1"),
        overt.Chain(step=0),
    ):
        GAT(24, 3, config)(data.x, data.edge_index)


@pytest.mark.slow
@pytest.mark.parametrize("config", [[], [RANDOM], [overt.Bayesian(family="lognormal", sigma=0.3)]])
def test_the_network_learns_the_classes_of_a_made_graph(config: Any) -> None:
    data = blocks(120)
    model = GAT(24, 3, config, width=4, heads=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(60):
        with overt.Chain(step=step) as chain:
            logits = model.train()(data.x, data.edge_index)
        loss = F.cross_entropy(logits[data.train_mask], data.y[data.train_mask]) + 0.01 * chain.penalty()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        correct = model.eval()(data.x, data.edge_index).argmax(dim=1) == data.y
    assert float(correct[data.test_mask].float().mean()) > 0.8


def test_a_training_repeats_bitwise() -> None:
    data, found = blocks(60), []
    for _ in range(2):
        torch.manual_seed(0)
        model = GAT(24, 3, [RANDOM], width=4, heads=2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for step in range(3):
            chain = overt.Chain(step=step)
            loss = model(data.x, data.edge_index, chain=chain).square().mean() + chain.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *found))


# --- What changes a layer from outside ---


@both
def test_one_weight_for_all_heads_broadcasts_as_in_pyg(name: str) -> None:
    ours, theirs = pair(name, WIDTH, 4, heads=3)
    for layer in (ours, theirs):
        layer.register_edge_update_forward_hook(lambda _, __, weights: weights.mean(1, keepdim=True))
    torch.testing.assert_close(ours(features(), ends()), theirs(features(), ends()))


@both
def test_a_subclass_with_its_own_propagate_is_heard(name: str) -> None:
    def propagate(self: Any, *given: Any, **named: Any) -> Any:
        return 2 * OURS[name]._orig_propagate(self, *given, **named)

    own = type(f"Twice{OURS[name].__name__}", (OURS[name],), {"propagate": propagate})
    torch.manual_seed(0)
    once = OURS[name](WIDTH, 4, bias=False)
    torch.manual_seed(0)
    twice = own(WIDTH, 4, bias=False)
    torch.testing.assert_close(twice(features(), ends()), 2 * once(features(), ends()))


@both
def test_transforms_of_torch_func_go_through(name: str) -> None:
    ours, theirs = pair(name, WIDTH, 4, heads=2)
    found = []
    for layer in (ours, theirs):
        named = dict(layer.named_parameters())

        def loss(parameters: Any, layer: Any = layer) -> Tensor:
            out: Tensor = torch.func.functional_call(layer, parameters, (features(), ends()))
            return out.square().sum()

        found.append(torch.func.grad(loss)(named))
    for key, gradient in found[1].items():
        torch.testing.assert_close(found[0][key], gradient, rtol=1e-4, atol=1e-4)


def test_a_layer_shows_its_mechanisms() -> None:
    assert "Bayesian(family='weibull', k=7.0" in repr(GATConv(4, 4, mechanisms=[overt.Bayesian(k=7.0)]))
    assert repr(GATConv(4, 4, heads=2)) == "GATConv(4, 4, heads=2)"
