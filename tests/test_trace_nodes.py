"""Tracing attention on graphs: capture, raw, rollout and flow over edges, spread, tables, pages, pictures."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.datasets import KarateClub
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, Sequential, TopKPooling
from torch_geometric.utils import add_self_loops, softmax, to_torch_coo_tensor, to_torch_csr_tensor

import overt
from fresh import fresh
from overt.models.graph_attention import GATConv as OurGATConv
from overt.tracing import nodes as module
from overt.tracing.node_tracer import trace_nodes
from overt.tracing.nodes import Neighbours, NodeTrace
from overt.tracing.result import Trace
from overt.view.neighbourhood import page_data
from overt.view.nodes import _angles, plot_neighbours

BY_METHOD = pytest.mark.parametrize("method", ["raw", "rollout", "flow"])


class Net(nn.Module):
    """Graph attention layers one upon the other."""

    def __init__(self, *layers: nn.Module, dropout: float = 0.5) -> None:
        super().__init__()
        self.layers, self.dropout = nn.ModuleList(layers), nn.Dropout(dropout)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(self.dropout(x), edge_index))
        return x


def graph(nodes: int = 12, edges: int = 30, seed: int = 0, width: int = 5) -> Data:
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, nodes, (2, edges), generator=generator)
    ends = torch.unique(ends[:, ends[0] != ends[1]], dim=1)
    return Data(x=torch.randn(nodes, width, generator=generator), edge_index=ends)


def bayesian(width: int = 5, heads: int = 3, depth: int = 2, k: float = 3.0) -> Net:
    config = [overt.Bayesian(k=k)]
    layers = [OurGATConv(width if not n else 4 * heads, 4, heads, mechanisms=config) for n in range(depth)]
    return Net(*layers)


def made(*layers: tuple[list[tuple[int, int]], Any], nodes: int, draws: Any = ()) -> NodeTrace:
    """A trace from (source, target) pairs and weights, one head unless they have more."""
    edges = [torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t().contiguous() for pairs, _ in layers]
    weights = [torch.as_tensor(cells, dtype=torch.float32) for _, cells in layers]
    weights = [cells.unsqueeze(-1) if cells.dim() == 1 else cells for cells in weights]
    return NodeTrace(nodes, edges, weights, list(draws), [str(n) for n in range(len(layers))])


@st.composite
def traces(draw: Any, depth: tuple[int, int] = (1, 3), most: int = 6) -> NodeTrace:
    """Small graphs of any kind: parallel edges, loops or none, isolated nodes, other edges in each layer."""
    nodes = draw(st.integers(2, most))
    ends = st.tuples(st.integers(0, nodes - 1), st.integers(0, nodes - 1))
    shared = draw(st.booleans())
    first = draw(st.lists(ends, max_size=14))
    heads = draw(st.integers(1, 3))
    layers = []
    for _ in range(draw(st.integers(*depth))):
        pairs = first if shared else draw(st.lists(ends, max_size=14))
        seed = draw(st.integers(0, 99))
        layers.append((pairs, torch.rand(len(pairs), heads, generator=torch.Generator().manual_seed(seed))))
    return made(*layers, nodes=nodes)


def dense(trace: NodeTrace, residual: float = 0.0, heads: Any = "mean") -> list[np.ndarray]:
    """Whole matrices (target, source), cell by cell: the oracle's view of a trace."""
    found = []
    for edges, weights in zip(trace.edges, trace.weights, strict=True):
        cells = weights.double().numpy()
        cells = cells.mean(axis=1) if heads == "mean" else cells[:, heads].mean(axis=1)
        matrix = np.zeros((trace.nodes, trace.nodes))
        for (source, target), weight in zip(edges.t().tolist(), cells, strict=True):
            matrix[target, source] += weight
        found.append((1 - residual) * matrix + residual * np.eye(trace.nodes))
    return found


def max_flows(levels: list[np.ndarray], node: int) -> list[float]:
    """networkx's maximum flow from the node at the top to each input."""
    net = nx.DiGraph()
    count = len(levels[0])
    for level, matrix in enumerate(levels, start=1):
        net.add_nodes_from(product((level, level - 1), range(count)))
        for target, source in np.argwhere(matrix > 0).tolist():
            net.add_edge((level, target), (level - 1, source), capacity=float(matrix[target, source]))
    return [nx.maximum_flow_value(net, (len(levels), node), (0, sink)) for sink in range(count)]


# What is captured


@pytest.mark.parametrize("kind", [GATConv, GATv2Conv])
@pytest.mark.parametrize("loops", [True, False])
def test_a_plain_layer_gives_what_return_attention_weights_gives(kind: Any, loops: bool) -> None:
    data = graph()
    layer = kind(5, 4, heads=3, add_self_loops=loops, dropout=0.6)
    found = trace_nodes(layer, data.x, data.edge_index, heads=True)
    _, (edges, weights) = layer.eval()(data.x, data.edge_index, return_attention_weights=True)
    assert torch.equal(found.edges[0], edges)
    assert torch.equal(found.weights[0], weights.detach())
    assert found.paths == [kind.__name__]
    assert found.nodes == 12


def test_layers_come_in_the_order_of_their_calls_and_a_shared_one_twice() -> None:
    class Twisted(Net):
        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            for number in (1, 0, 1):
                x = self.layers[number](x, edge_index)
            return x

    data = graph()
    found = trace_nodes(Twisted(GATConv(5, 5), GATConv(5, 5)), data)
    assert found.paths == ["layers.1", "layers.0", "layers.1"]
    assert not torch.equal(found.weights[0], found.weights[2])
    assert found.edges[0] is found.edges[2]


def test_data_tensors_sequential_and_forward_of_data_trace_alike() -> None:
    class OfData(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, data: Data) -> Tensor:
            out: Tensor = self.inner(data.x, data.edge_index)
            return out

    data, layer = graph(), GATConv(5, 4, heads=2)
    wrapped = [layer, OfData(layer), Sequential("x, edge_index", [(layer, "x, edge_index -> x")])]
    expected = trace_nodes(layer, data.x, data.edge_index).weights[0]
    for model in wrapped:
        assert torch.equal(trace_nodes(model, data).weights[0], expected)


def test_edge_features_of_data_reach_the_model() -> None:
    data = graph()
    data.edge_attr = torch.randn(data.edge_index.shape[1], 2)
    layer = GATConv(5, 4, edge_dim=2)
    with_them = trace_nodes(layer, data)
    assert torch.equal(
        with_them.weights[0], trace_nodes(layer, data.x, data.edge_index, data.edge_attr).weights[0]
    )
    assert not torch.equal(with_them.weights[0], trace_nodes(layer, data.x, data.edge_index).weights[0])


@pytest.mark.parametrize("sparse", [to_torch_coo_tensor, to_torch_csr_tensor])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_sparse_matrices_and_the_other_direction_trace_like_edge_lists(sparse: Any) -> None:
    data, layer = graph(), GATConv(5, 4, heads=2)
    expected = trace_nodes(layer, data)
    turned = GATConv(5, 4, heads=2, flow="target_to_source")
    turned.load_state_dict(layer.state_dict())
    found = [
        trace_nodes(layer, data.x, sparse(data.edge_index.flip(0), size=12)),
        trace_nodes(turned, data.x, data.edge_index.flip(0)),
    ]
    for node in range(12):
        for one in found:
            torch.testing.assert_close(one.raw(node), expected.raw(node))


def test_mini_batches_and_nodes_without_edges_keep_their_numbers() -> None:
    one, two = graph(seed=1), graph(seed=2)
    two.x = torch.cat([two.x, torch.zeros(3, 5)])  # three isolated ones at the end
    net = Net(GATConv(5, 5), GATConv(5, 5))
    both = trace_nodes(net, Batch.from_data_list([one, two]))
    alone = trace_nodes(net, two)
    assert (both.nodes, alone.nodes) == (27, 15)
    torch.testing.assert_close(both.rollout(12 + 4)[:, 12:], alone.rollout(4))
    assert both.rollout(14 + 12).nonzero().tolist() == [[0, 26], [1, 26]]  # its self-loops


def test_the_model_is_left_as_it_was_also_when_it_fails() -> None:
    data, net = graph(), Net(GATConv(5, 5), GATConv(5, 5))
    net.layers[0].eval()
    before = [one.training for one in net.modules()]
    trace_nodes(net, data)
    with pytest.raises(RuntimeError, match="shapes"):
        trace_nodes(net, torch.randn(12, 7), data.edge_index)
    assert [one.training for one in net.modules()] == before
    for layer in net.layers:
        assert not layer._edge_update_forward_hooks
        assert not layer._forward_pre_hooks


def test_what_a_layer_does_to_its_weights_later_does_not_reach_the_trace() -> None:
    class Spoiling(GATConv):
        def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
            return alpha.zero_().unsqueeze(-1) * x_j

    found = trace_nodes(Spoiling(5, 4, heads=2), graph())
    assert float(found.weights[0].min()) > 0.0


def test_heads_may_be_averaged_at_once() -> None:
    data, net = graph(), Net(GATConv(5, 4, heads=3), GATConv(12, 4, heads=2))
    whole, short = trace_nodes(net, data, heads=True), trace_nodes(net, data)
    assert (whole.heads, short.heads) == ([3, 2], [1, 1])
    torch.testing.assert_close(short.flow(3), whole.flow(3), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="needs weights of single heads"):
        short.raw(3, heads="each")


# The methods, against oracles


@pytest.mark.slow
@given(traces(), st.sampled_from([0.0, 0.3]))
def test_raw_and_rollout_are_products_of_whole_matrices(trace: NodeTrace, residual: float) -> None:
    plain, levels = dense(trace), dense(trace, residual)
    for node in range(trace.nodes):
        np.testing.assert_allclose(trace.raw(node), [matrix[node] for matrix in plain], atol=1e-12)
        expected, whole = [], np.eye(trace.nodes)
        for matrix in levels:
            whole = matrix @ whole
            expected.append(whole[node])
        np.testing.assert_allclose(trace.rollout(node, residual=residual), expected, atol=1e-12)


@given(traces(depth=(2, 3), most=4))
def test_rollout_sums_over_paths_of_edges(trace: NodeTrace) -> None:
    expected = np.zeros(trace.nodes)
    steps = [list(zip(e.t().tolist(), w.double().mean(1).tolist(), strict=True))
             for e, w in zip(trace.edges, trace.weights, strict=True)]  # fmt: skip
    for path in product(*reversed(steps)):  # one edge per layer, from the top down
        at, weight = 0, 1.0
        for (source, target), much in path:
            weight *= much if target == at else 0.0
            at = source
        expected[at] += weight
    np.testing.assert_allclose(trace.rollout(0, layers=-1)[0], expected, atol=1e-12)


@given(traces(depth=(1, 4), most=5), st.sampled_from([0.0, 0.4]))
def test_flow_is_the_maximum_flow_that_networkx_finds(trace: NodeTrace, residual: float) -> None:
    levels = dense(trace, residual)
    for top in range(len(trace)):
        found = trace.flow(1, layers=top, residual=residual)[0]
        np.testing.assert_allclose(found, max_flows(levels[: top + 1], 1), atol=1e-9)


@settings(max_examples=10)
@given(traces(depth=(2, 3), most=5))
def test_a_list_of_heads_averages_those_and_each_stands_on_the_averaged_layers_below(
    trace: NodeTrace,
) -> None:
    count = trace.heads[0]
    picked = list(range(count))[::2]
    levels = dense(trace, heads=picked)
    np.testing.assert_allclose(trace.raw(0, layers=-1, heads=picked)[0], levels[-1][0], atol=1e-12)
    np.testing.assert_allclose(trace.flow(0, layers=-1, heads=picked)[0], max_flows(levels, 0), atol=1e-9)
    rolled, flowed = trace.rollout(0, heads="each"), trace.flow(0, heads="each")
    assert rolled.shape == flowed.shape == (len(trace), count, trace.nodes)
    below = dense(trace)
    for head in range(count):
        levels = [*below[:-1], dense(trace, heads=[head])[-1]]
        row = np.eye(trace.nodes)[0]
        for matrix in reversed(levels):
            row = row @ matrix
        np.testing.assert_allclose(rolled[-1, head], row, atol=1e-12)
        np.testing.assert_allclose(flowed[-1, head], max_flows(levels, 0), atol=1e-9)


def test_flow_and_rollout_differ_where_a_narrow_edge_is_shared() -> None:
    # 0 attends to 1 and 2 alike, both to 3 only: all of the flow arrives, as all of the rollout does; then
    # a narrow edge above takes from rollout in proportion and from flow nothing that still fits.
    wide = made(([(3, 1), (3, 2)], [1.0, 1.0]), ([(1, 0), (2, 0)], [0.5, 0.5]), nodes=4)
    assert wide.rollout(0, layers=1)[0, 3] == wide.flow(0, layers=1)[0, 3] == 1.0
    low = made(([(3, 1), (3, 2)], [0.5, 0.5]), ([(1, 0), (2, 0)], [0.5, 0.5]), nodes=4)
    assert (low.rollout(0, layers=1)[0, 3], low.flow(0, layers=1)[0, 3]) == (0.5, 1.0)


def test_a_graph_of_a_million_nodes_costs_its_edges_and_not_their_square() -> None:
    size = 1_000_000
    ring = torch.arange(size)
    edges = torch.cat([torch.stack([ring, ring.roll(-1)]), torch.stack([ring, ring])], dim=1)
    weights = torch.full((2 * size, 1), 0.5)
    trace = NodeTrace(size, [edges] * 3, [weights] * 3, paths=["a", "b", "c"])
    table = trace.neighbours(500)
    assert sorted(zip(table.ids.tolist(), table.hops.tolist(), table.rollout.tolist(), strict=True)) == [
        (497, 3, 0.125), (498, 2, 0.375), (499, 1, 0.375), (500, 0, 0.125)
    ]  # fmt: skip


def test_normalised_rows_sum_to_one_and_empty_ones_stay_empty() -> None:
    trace = made(([(1, 0), (2, 0)], [0.2, 0.2]), ([(0, 0)], [0.5]), nodes=3)
    for values in (trace.raw(0, normalize=True), trace.rollout(0, normalize=True)):
        torch.testing.assert_close(values.sum(dim=-1), torch.ones(2, dtype=torch.float64))
    assert not trace.flow(2, normalize=True).any()


# Posterior samples


@BY_METHOD
def test_spread_is_numpys_over_the_draws(method: str) -> None:
    data, net = graph(), bayesian()
    trace = trace_nodes(net, data, samples=5, seed=3)
    mean, spread = trace.spread(method, 4)
    single = np.stack([getattr(trace.draw(number), method)(4).numpy() for number in range(5)])
    np.testing.assert_allclose(mean, single.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(
        spread, np.sqrt(((single - single.mean(axis=0)) ** 2).mean(axis=0)), atol=1e-12
    )
    assert float(spread.max()) > 0.01
    table = trace.neighbours(4)
    top = table.value(method)
    np.testing.assert_allclose(top, mean[-1][table.ids], atol=1e-12)
    np.testing.assert_allclose(table.spread(method), spread[-1][table.ids], atol=1e-12)


def test_draws_are_the_chains_own_and_weights_those_of_evaluation() -> None:
    data, net = graph(), bayesian()
    trace = trace_nodes(net, data, samples=3, step=7, seed=11, heads=True)
    again = trace_nodes(net, data, samples=2, step=7, seed=11, heads=True)
    other = trace_nodes(net, data, samples=2, step=7, seed=12, heads=True)
    assert trace.draws[0].shape == (3, trace.edges[0].shape[1], 3)
    assert torch.equal(trace.draws[1][:2], again.draws[1])
    assert not torch.equal(again.draws[1], other.draws[1])
    assert torch.equal(trace.weights[0], trace_nodes(net, data, heads=True).weights[0])
    layer = net.layers[0].eval()
    with overt.Chain(step=7, seed=11, sample=2, kl=False):
        _, (_, expected) = layer(data.x, data.edge_index, return_attention_weights=True)
    assert torch.equal(trace.draws[0][2], expected.detach())


def test_a_chain_around_the_trace_changes_nothing() -> None:
    data, net = graph(), bayesian()
    with overt.Chain(step=0, sample=5):
        found = trace_nodes(net, data)
    assert torch.equal(found.weights[0], trace_nodes(net, data).weights[0])


# Tables and pages


@given(traces(depth=(1, 3)))
def test_hops_are_distances_over_attention_edges(trace: NodeTrace) -> None:
    trace = NodeTrace(trace.nodes, [trace.edges[0]] * len(trace), [trace.weights[0]] * len(trace))
    net = nx.DiGraph()
    net.add_nodes_from(range(trace.nodes))
    net.add_edges_from((target, source) for source, target in trace.edges[0].t().tolist())
    expected = nx.single_source_shortest_path_length(net, 0, cutoff=len(trace))
    table = trace.neighbours(0)
    assert dict(zip(table.ids.tolist(), table.hops.tolist(), strict=True)) == expected


def test_a_table_has_a_row_per_neighbour_the_largest_first() -> None:
    data, net = graph(), Net(GATConv(5, 4, heads=2), GATConv(8, 4))
    trace = trace_nodes(net, data)
    for by in ("raw", "rollout", "flow"):
        table = trace.neighbours(2, by=by)
        values = table.value(by)
        assert bool((values.diff() <= 0).all())
        for method, of_all in (("raw", trace.raw(2)), ("rollout", trace.rollout(2)), ("flow", trace.flow(2))):
            torch.testing.assert_close(table.value(method), of_all[-1][table.ids])
            hidden = torch.ones(12, dtype=torch.bool)
            hidden[table.ids] = False
            assert not of_all[:, hidden].any()
    assert table.rollout_spread is None
    assert trace.neighbours(2, flow=False).flow is None
    assert trace.neighbours(2, layer=0).raw.shape[0] == 1
    assert int(trace.neighbours(2, layer=0).hops.max()) == 1


def test_a_table_prints_its_rows_and_says_how_many_it_leaves_out() -> None:
    pairs = [(source, 0) for source in range(30)]
    trace = made((pairs, torch.linspace(1, 2, 30) / 45), nodes=30)
    lines = str(trace.neighbours(0)).splitlines()
    assert lines[0] == "what node 0 draws on, by rollout"
    assert lines[1].split() == ["node", "hop", "raw", "0", "rollout", "flow"]
    assert lines[2].split() == ["29", "1", "0.044", "0.044", "0.044"]
    assert lines[-2].startswith("0 ◂")
    assert lines[-1] == "… and 9 more"
    short = trace.neighbours(0).top(3)
    assert (short.ids.tolist(), short.left_out) == ([29, 28, 27, 0], 26)
    drawn = trace_nodes(bayesian(), graph(), samples=2)
    assert " ± " in str(drawn.neighbours(0))


def test_an_isolated_node_draws_on_nothing() -> None:
    trace = made(([(1, 2)], [1.0]), ([(1, 2)], [1.0]), ([(1, 2)], [1.0]), nodes=4)
    table = trace.neighbours(3)
    assert (table.ids.tolist(), table.hops.tolist()) == ([3], [0])
    assert not torch.cat([table.raw.flatten(), table.rollout, table.value("flow")]).any()
    assert "·" in str(table)
    assert page_data(trace, 3)["edges"] == []


@given(traces(depth=(1, 3)), st.sampled_from([0.0, 0.3]))
def test_shares_over_edges_add_up_to_rollout(trace: NodeTrace, residual: float) -> None:
    found = trace.shares(0, residual=residual)
    assert [one.layer for one in found] == list(range(len(trace)))[::-1]
    carried = torch.zeros(trace.nodes, dtype=torch.float64)
    carried[0] = 1.0
    for one in found:
        expected = (1 - residual) * one.weight * carried[one.target]
        torch.testing.assert_close(one.share, expected)
        carried = residual * carried
        for source, share in zip(one.source.tolist(), one.share.tolist(), strict=True):
            carried[source] += share
    torch.testing.assert_close(carried, trace.rollout(0, layers=-1, residual=residual)[0])


def test_a_page_is_json_and_holds_what_the_methods_say() -> None:
    data = graph()
    trace = trace_nodes(bayesian(), data, samples=3)
    labels = torch.arange(12) % 3
    page = page_data(trace, 4, labels=labels, names=[f"n{one}" for one in range(12)])
    assert json.loads(json.dumps(page, allow_nan=False)) == page
    assert (page["node"], page["layers"], page["samples"], page["left_out"]) == (4, 2, 3, 0)
    table = trace.neighbours(4)
    assert [one["id"] for one in page["nodes"]] == table.ids.tolist()
    first = page["nodes"][0]
    assert first["label"] == int(labels[first["id"]])
    assert first["name"] == f"n{first['id']}"
    assert first["flow_spread"] == float(table.spread("flow")[0])
    assert first["raw"] == table.raw[:, 0].tolist()
    into = {edge["source"]: edge for edge in page["edges"] if edge["layer"] == 1 and edge["target"] == 4}
    mean, spread = trace.spread("raw", 4)
    for source, edge in into.items():
        assert edge["weight"] == edge["share"] == pytest.approx(float(mean[1, source]))
        assert edge["spread"] == pytest.approx(float(spread[1, source]))
    few = page_data(trace, 4, top=2)
    kept = {one["id"] for one in few["nodes"]}
    assert {edge[end] for edge in few["edges"] for end in ("source", "target")} <= kept
    assert len(kept) + few["left_out"] == len(table)
    assert page_data(trace_nodes(bayesian(), data), 4)["nodes"][0]["rollout_spread"] is None


# Files


def test_a_saved_trace_comes_back_whole(tmp_path: Path) -> None:
    trace = trace_nodes(bayesian(), graph(), samples=2, heads=True)
    trace.save(tmp_path / "t.safetensors")
    back = NodeTrace.load(tmp_path / "t.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["t.safetensors"]
    assert (back.nodes, back.paths, back.single, repr(back)) == (12, trace.paths, True, repr(trace))
    assert back.edges[0] is back.edges[1]
    for name in ("edges", "weights", "draws"):
        assert all(map(torch.equal, getattr(back, name), getattr(trace, name)))
    assert page_data(back, 3) == page_data(trace, 3)


def test_files_of_others_are_refused_in_one_line(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match=r"^no trace at "):
        NodeTrace.load(file)
    file.write_text("hello")
    with pytest.raises(ValueError, match=r"^.* is not a safetensors file: "):
        NodeTrace.load(file)
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="holds no trace of nodes"):
        NodeTrace.load(file)
    mark = {"nodes": 2, "edges": [0], "paths": ["a"], "single": True}
    tensors = {"edges.0": torch.tensor([[0], [5]]), "weights.0": torch.ones(1, 1)}
    save_file(tensors, file, {"format": module.FORMAT, "overt": json.dumps(mark)})
    with pytest.raises(ValueError, match=r"holds a broken trace \(ValueError: nodes, edges and weights of"):
        NodeTrace.load(file)
    del tensors["weights.0"]
    save_file(tensors, file, {"format": module.FORMAT, "overt": json.dumps(mark)})
    with pytest.raises(ValueError, match=r"holds a broken trace \(KeyError"):
        NodeTrace.load(file)
    trace_nodes(GATConv(5, 4), graph()).save(file)
    with pytest.raises(ValueError, match="holds no trace that this version"):
        Trace.load(file)


# Errors


class Pooled(Net):
    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = self.layers[0](x, edge_index)
        x, edge_index, *_ = self.layers[1](x, edge_index)
        out: Tensor = self.layers[2](x, edge_index)
        return out


class Odd(GATConv):
    def edge_update(self, alpha_j: Tensor, edge_index_i: Tensor) -> Tensor:
        del edge_index_i
        return alpha_j.new_full(alpha_j.shape, -1.0)


class Wrong(GATConv):
    def forward(self, x: Any, edge_index: Any) -> Any:  # type: ignore[override]
        del edge_index
        return x


def refused() -> list[Any]:
    data = graph()
    x, edges = data.x, data.edge_index
    hetero = HeteroData()
    return [
        (GCNConv(5, 4), (data,), {}, "GCNConv has no graph attention to trace: .* such as GATConv"),
        (GATConv(5, 4), (), {}, "inputs must be a PyG Data"),
        (GATConv(5, 4), (hetero,), {}, "several kinds of nodes are not supported: .* HeteroData"),
        (GATConv(5, 4), ({"a": x}, {}), {}, "several kinds of nodes are not supported: .* dict"),
        (GATConv((5, 5), 4), ((x, x[:6]), edges[:, :0]), {}, "GATConv runs from one set of nodes to another"),
        (Pooled(GATConv(5, 4), TopKPooling(4), GATConv(4, 4)), (data,), {}, "layers.2 runs after layers.1"),
        (Odd(5, 4), (data,), {}, "weights of Odd must be finite and not negative"),
        (Wrong(5, 4), (data,), {}, "no attention ran"),
        (GATConv(5, 4), (data,), {"samples": 2}, "samples needs random weights: .*Bayesian"),
        (GATConv(5, 4), (data,), {"samples": -1}, "samples must be a whole number of at least 0, got -1"),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(10))
def test_what_cannot_be_traced_is_refused_in_one_line(number: int) -> None:
    model, inputs, named, said = refused()[number]
    with pytest.raises(ValueError, match=said) as caught:
        trace_nodes(model, *inputs, **named)
    assert "\n" not in str(caught.value)


def test_the_same_nodes_as_sources_and_targets_are_no_bipartite_graph() -> None:
    data, layer = graph(), GATConv((5, 5), 4)
    pair = trace_nodes(layer, (data.x, data.x), data.edge_index)
    assert torch.equal(pair.weights[0], trace_nodes(layer, data).weights[0])


def test_a_model_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="model must be a torch module, got str"):
        trace_nodes("GAT", graph())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: t.raw(12), "node must be a number from 0 to 11, got 12"),
        (lambda t: t.raw(-1), "node must be a number from 0 to 11, got -1"),
        (lambda t: t.raw("a"), "node must be a number from 0 to 11, got 'a'"),
        (lambda t: t.rollout(0, layers=2), "layers must lie in 0 to 1"),
        (lambda t: t.rollout(0, residual=2), r"residual must lie in \[0, 1\]"),
        (lambda t: t.rollout(0, heads="all"), 'heads must be "mean", "each" or a list'),
        (lambda t: t.rollout(0, heads=[2]), "heads of layer 1 are numbers from 0 to 1, got 2"),
        (lambda t: t.rollout(0, heads="each"), r"the same number of heads, got \[3, 2\]: ask for one"),
        (lambda t: t.flow(0, threads=0), "threads must be a whole number of at least 1"),
        (lambda t: t.spread("rollout", 0), "no posterior samples were traced"),
        (lambda t: t.draw(0), "no posterior samples were traced"),
        (lambda t: t.neighbours(0, by="size"), "by must be one of 'raw', 'rollout', 'flow'"),
        (lambda t: t.neighbours(0, by="flow", flow=False), "by must be one of 'raw', 'rollout'; got 'flow'"),
        (lambda t: t.neighbours(0, heads="each"), 'heads must be "mean" or a list'),
        (lambda t: t.neighbours(0, layer=None), "layer must be one number"),
        (lambda t: t.neighbours(0).value("size"), "method must be one of"),
        (lambda t: page_data(t, 0, labels=[1]), "labels must have one entry for each of 12 nodes, got 1"),
        (lambda t: page_data(t, 0, top=0), "top must be a whole number of at least 1"),
        (lambda t: plot_neighbours(t, 0, method="size"), "method must be one of"),
        (lambda t: plot_neighbours(t, 0, names="ab"), "names must have one entry for each of 12"),
    ],
)
def test_wrong_arguments_are_named(call: Any, said: str) -> None:
    trace = trace_nodes(Net(GATConv(5, 4, heads=3), GATConv(12, 4, heads=2)), graph(), heads=True)
    with pytest.raises(ValueError, match=said) as caught:
        call(trace)
    assert "\n" not in str(caught.value)


def test_flow_over_many_layers_refuses_large_neighbourhoods_and_two_layers_take_them() -> None:
    hub = [(source, 0) for source in range(2100)]
    cells = torch.full((2100,), 1 / 2100)
    loops = ([(one, one) for one in range(2100)], torch.ones(2100))
    trace = made(loops, loops, (hub, cells), nodes=2100)
    with pytest.raises(ValueError, match=r"flow over 3 layers takes .* 2048 nodes, got 2100: leave it out"):
        trace.neighbours(0)
    assert len(trace.neighbours(0, flow=False)) == 2100
    two = made(loops, (hub, cells), nodes=2100)
    torch.testing.assert_close(two.flow(0, layers=1), two.rollout(0, layers=1))


# Pictures


def karate() -> tuple[NodeTrace, Data]:
    data = KarateClub()[0]
    return trace_nodes(bayesian(width=34), data, samples=4), data


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


@pytest.mark.slow
def test_a_picture_shows_the_neighbours_and_their_values(tmp_path: Path) -> None:
    trace, data = karate()
    figure = plot_neighbours(trace, 16, labels=data.y)
    rings, *bars = figure.axes
    table = trace.neighbours(16)
    assert sorted(texts(rings)) == sorted(str(one) for one in table.ids.tolist())
    assert [panel.get_title() for panel in bars] == ["raw, top layer", "rollout", "flow"]
    for panel, method in zip(bars, ("raw", "rollout", "flow"), strict=True):
        widths = [patch.get_width() for patch in panel.patches]
        np.testing.assert_allclose(widths, table.value(method), atol=1e-12)
    figure.savefig(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_a_hub_is_cut_to_its_largest_neighbours_and_says_so() -> None:
    trace, _ = karate()
    figure = plot_neighbours(trace, 0, top=5, method="flow")
    rings, *bars = figure.axes
    count = len(trace.neighbours(0)) - 1
    assert rings.get_title(loc="left") == f"What node 0 draws on: 5 of {count} neighbours"
    assert all(len(panel.patches) == 6 for panel in bars)


def test_axes_of_ones_own_get_the_rings_alone_and_nothing_global_changes() -> None:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    trace, _ = karate()
    before, own = dict(rcParams), Figure()
    axes = own.subplots()
    names = [f"member {one}" for one in range(34)]
    assert plot_neighbours(trace, 16, axes=axes, names=names, flow=False) is own
    assert own.axes == [axes]
    assert "member 16" in texts(axes)
    assert dict(rcParams) == before


@pytest.mark.slow
def test_more_classes_than_colours_share_the_last_one() -> None:
    trace, _ = karate()
    figure = plot_neighbours(trace, 33, labels=list(range(34)), top=20)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    words = [text.get_text() for text in legend.get_texts()]
    assert len(words) == 8
    assert words[-1] == "others"


def test_every_node_of_a_picture_hangs_on_another() -> None:
    # The middle node of each way has less than the far one and is not among the first; it is shown too.
    ways = [(one, one - 1) for one in range(2, 20, 2)]
    top = ([(one, 0) for one in range(1, 20, 2)], torch.full((10,), 0.1))
    trace = made((ways, torch.ones(len(ways))), top, nodes=20)
    rings = plot_neighbours(trace, 0, top=3).axes[0]
    shown = {int(one) for one in texts(rings)}
    assert shown == {0, 2, 4, 6, 1, 3, 5}


def test_a_lonely_node_has_a_picture_too() -> None:
    trace = made(([(1, 2)], [1.0]), nodes=4)
    assert texts(plot_neighbours(trace, 3).axes[0]) == ["3"]


def test_neighbours_that_are_tied_stand_next_to_each_other() -> None:
    hops = {0: 0, **dict.fromkeys(range(1, 9), 1)}
    tied = {(1, 5): 0.1, (2, 6): 0.1, (3, 7): 0.1, (4, 8): 0.1}
    angles = _angles(hops, {**{(0, one): 0.1 for one in range(1, 9)}, **tied})
    apart = [abs(np.angle(np.exp(1j * (angles[one] - angles[other])))) for one, other in tied]
    np.testing.assert_allclose(apart, 2 * np.pi / 8, atol=1e-9)
    assert len({round(angle, 6) for angle in angles.values()}) == 8


@pytest.mark.slow
def test_importing_brings_neither_torch_geometric_nor_matplotlib() -> None:
    code = "import sys, overt.tracing.nodes, overt.view.nodes; print('torch_geometric' in sys.modules, "
    code += "'matplotlib' in sys.modules, 'numba' in sys.modules)"
    printed, failed = fresh(code)
    assert not failed, failed
    assert printed.split() == ["False"] * 3


def test_a_table_is_a_plain_dataclass() -> None:
    table = made(([(1, 0)], [1.0]), nodes=2).neighbours(0)
    assert isinstance(table, Neighbours)
    assert table.methods == ("raw", "rollout", "flow")
    assert len(table) == 2


def test_attention_of_softmax_weights_keeps_rollout_a_distribution() -> None:
    data = graph()
    edges = add_self_loops(data.edge_index, num_nodes=12)[0]
    weights = softmax(torch.randn(edges.shape[1], 2), edges[1], num_nodes=12)
    trace = NodeTrace(12, [edges] * 3, [weights] * 3, paths=["a", "b", "c"])
    for node in range(12):
        rolled, flowed = trace.rollout(node), trace.flow(node)
        torch.testing.assert_close(rolled.sum(dim=-1), torch.ones(3, dtype=torch.float64), rtol=0, atol=1e-5)
        assert bool((flowed >= rolled - 1e-6).all())
