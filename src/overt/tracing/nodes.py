"""Traces of attention on graphs: which neighbours a node draws on, edge by edge."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from overt import _check
from overt.tracing import files
from overt.tracing.edges import Hood, Walk, hood_of
from overt.tracing.levels import unit_rows
from overt.tracing.methods.flow import FlowArguments
from overt.tracing.methods.method import edge_methods, head_list, method_of, method_over_edges
from overt.tracing.options import Arguments, Heads, check_heads, numbers
from overt.tracing.result import NO_SAMPLES, Spread
from overt.tracing.showing import ShownNodes

FORMAT = "nodes 1"
MOST_ROWS = 20  # of a printed table


class NeighboursArguments(TypedDict, total=False):
    """Keyword arguments of `NodeTrace.neighbours`, for functions that pass them on."""

    by: str
    layer: int
    heads: Heads
    residual: float
    flow: bool


class LayerEdges(NamedTuple):
    """Edges of one layer over which a node may draw, each (edge,); means over any posterior samples.

    Attributes:
        layer: number of the layer.
        source: the node attended to.
        target: the attending node.
        weight: the attention weight.
        spread: of the weight over posterior samples, or None.
        share: how much of the node's rollout comes over the edge: its weight times what the layers above
            draw on its target.
    """

    layer: int
    source: Tensor
    target: Tensor
    weight: Tensor
    spread: Tensor | None
    share: Tensor


@dataclass(eq=False)
class Neighbours:
    """What a node draws on: a row per node, the largest value first. Made by `NodeTrace.neighbours`.

    With posterior samples, values are means over them and have a spread (standard deviation with divisor n);
    without, they are the values of the single pass, with no spread.

    Attributes:
        node: the node that the table describes.
        ids: (row,), number of the neighbour in the graph; includes the node itself.
        hops: (row,), attention edges between the neighbour and the node; 0 for the node itself.
        raw: (layer, row), weight of the neighbour's edge to the node in each layer.
        values: method → (row,), values at the starting layer, of the requested methods.
        raw_spread: (layer, row), or None.
        spreads: method → (row,); empty without posterior samples.
        by: the method that the rows are ordered by.
        left_out: how many rows `top` removed.
    """

    node: int
    ids: Tensor
    hops: Tensor
    raw: Tensor
    values: dict[str, Tensor]
    raw_spread: Tensor | None = None
    spreads: dict[str, Tensor] = field(default_factory=dict)
    by: str = "rollout"
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rollout(self) -> Tensor:
        """(row,), sums over paths."""
        return self.values["rollout"]

    @property
    def flow(self) -> Tensor | None:
        """(row,), maximum flow; None if it was not computed."""
        return self.values.get("flow")

    @property
    def rollout_spread(self) -> Tensor | None:
        """(row,), or None."""
        return self.spreads.get("rollout")

    @property
    def flow_spread(self) -> Tensor | None:
        """(row,), or None."""
        return self.spreads.get("flow")

    def value(self, method: str) -> Tensor:
        """(row,), the values of a method; "raw" is the top layer's."""
        return self.values[self._check_method(method)]

    def spread(self, method: str) -> Tensor | None:
        """(row,), the spread of a method's values; None without posterior samples."""
        return self.spreads.get(self._check_method(method))

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods in the table."""
        return tuple(self.values)

    def _check_method(self, method: str) -> str:
        _check.one_of("method", method, self.methods)
        return method

    def top(self, count: int) -> Neighbours:
        """The first `count` rows, and the node's own row wherever it is."""
        _check.whole("top", count, 1)
        node_row = int((self.ids == self.node).nonzero())
        rows = list(range(min(count, len(self))))
        return self.some(rows if node_row in rows else [*rows, node_row])

    def some(self, rows: list[int]) -> Neighbours:
        """The rows at these places of the table, in this order."""
        return replace(
            self,
            ids=self.ids[rows],
            hops=self.hops[rows],
            raw=self.raw[..., rows],
            values={method: values[rows] for method, values in self.values.items()},
            raw_spread=None if self.raw_spread is None else self.raw_spread[..., rows],
            spreads={method: values[rows] for method, values in self.spreads.items()},
            left_out=self.left_out + len(self) - len(rows),
        )

    def __str__(self) -> str:
        shown = self if len(self) <= MOST_ROWS else self.top(MOST_ROWS)
        cells = [["node", *(f"{node}{' ◂' if node == self.node else ''}" for node in shown.ids.tolist())]]
        cells.append(["hop", *map(str, shown.hops.tolist())])
        for layer, values in enumerate(shown.raw):
            spreads = None if shown.raw_spread is None else shown.raw_spread[layer]
            cells.append([f"raw {layer}", *_format_values(values, spreads)])
        cells += [
            [name, *_format_values(shown.value(name), shown.spread(name))]
            for name in self.methods
            if name != "raw"
        ]
        widths = [max(map(len, column)) for column in cells]
        lines = [f"what node {self.node} draws on, by {self.by}"]
        for row in zip(*cells, strict=True):
            first = row[0].ljust(widths[0])
            rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
            lines.append("  ".join([first, *rest]).rstrip())
        if shown.left_out:
            lines.append(f"… and {shown.left_out} more")
        return "\n".join(lines)


def _format_values(values: Tensor, spreads: Tensor | None) -> list[str]:
    """Numbers for a table; a dot where there is no edge or path."""
    deviations = [None] * len(values) if spreads is None else spreads.tolist()
    return [
        "·" if not value else f"{value:.3f}" if spread is None else f"{value:.3f} ± {spread:.3f}"
        for value, spread in zip(values.tolist(), deviations, strict=True)
    ]


@dataclass(eq=False)
class NodeTrace(ShownNodes):
    """A graph network's attention, edge by edge and layer by layer. Made by `trace_nodes`.

    Results of the methods have shape (layer, node) in float64: how much one node, at the top of each layer,
    draws on each node of the graph. An edge runs from `source`, which is attended to, to `target`, which
    attends.

    Attributes:
        nodes: number of nodes in the graph.
        edges: one list per attention layer in the order of their calls, (2, edge): source and target, with
            the self-loops that the layer added.
        weights: one tensor per layer, (edge, head), or (edge, 1) where heads were averaged. For a Bayesian
            model, those of the posterior's mean, as in evaluation. Float32, on the CPU.
        draws: one tensor per layer, (sample, edge, head), for a Bayesian model traced with `samples`; else
            empty.
        paths: names of the attention layers.
        single: whether the weights of single heads were kept.
    """

    nodes: int
    edges: list[Tensor]
    weights: list[Tensor]
    draws: list[Tensor] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    single: bool = True

    def __repr__(self) -> str:
        counts = " + ".join(str(edges.shape[1]) for edges in self.edges)
        heads = f", {' + '.join(map(str, self.heads))} heads" if self.single else ""
        samples = f", {self.samples} posterior samples" if self.samples else ""
        return f"NodeTrace({self.nodes} nodes, {counts} edges{heads}{samples})"

    def __len__(self) -> int:
        """Number of attention layers that ran."""
        return len(self.edges)

    @property
    def heads(self) -> list[int]:
        """Number of heads in each layer's weights."""
        return [cells.shape[1] for cells in self.weights]

    @property
    def samples(self) -> int:
        """Number of posterior samples."""
        return self.draws[0].shape[0] if self.draws else 0

    def draw(self, number: int) -> NodeTrace:
        """The trace of one posterior sample."""
        self._check_samples()
        if not -self.samples <= number < self.samples:
            raise IndexError(f"trace holds {self.samples} posterior samples, got {number}")
        return replace(self, weights=[cells[number] for cells in self.draws], draws=[])

    def read(self, method: str, node: int, **options: Any) -> Tensor:
        """A method by its name: `t.read("rollout", node, layers=-1)` is `t.rollout(node, layers=-1)`.

        Arguments mean what they mean to the methods of a token trace (`overt.tracing.Options`): layers,
        heads, residual, normalize, and the method's own arguments. The node takes the place of `queries`.
        Most attention layers on graphs have no skip connection, so the residual is 0 by default: a node
        attends to itself through a self-loop, which is already an edge.

        Args:
            method: one that has a form on edges: "raw", "rollout", "flow", or your own.
            node: the node whose attention is read, by its number in the inputs.
            options: the other arguments.

        Returns:
            (layer, node) in float64; (layer, head, node) for `heads="each"`.
        """
        return self._read(method, node, options, drawn=False)[0]

    def raw(self, node: int, **options: Unpack[Arguments]) -> Tensor:
        """Weights of the edges into a node. Arguments as for `read`, without `residual`."""
        return self.read("raw", node, **options)

    def rollout(self, node: int, **options: Unpack[Arguments]) -> Tensor:
        """Attention rollout: the sum over all paths to the inputs of the product of each path's weights."""
        return self.read("rollout", node, **options)

    def flow(self, node: int, **options: Unpack[FlowArguments]) -> Tensor:
        """Attention flow: the maximum flow from a node to each input, edges carrying up to their weight.

        Parallel edges carry the sum of their weights. Over one and two layers it has a closed form; over more
        it is solved, in neighbourhoods of up to `overt.tracing.edges.MOST_FLOW_NODES` nodes.
        """
        return self.read("flow", node, **options)

    def spread(self, method: str, node: int, **options: Any) -> Spread:
        """Mean and spread of a method's result over the posterior samples, each of the method's shape.

        Rollout and flow are nonlinear: their mean over samples is not their value at the mean weights.
        """
        self._check_samples()
        values = self._read(method, node, options, drawn=True)
        return Spread(values.mean(dim=0), values.std(dim=0, correction=0))

    def neighbours(
        self,
        node: int,
        by: str = "rollout",
        layer: int = -1,
        heads: Heads = "mean",
        residual: float = 0.0,
        flow: bool = True,
    ) -> Neighbours:
        """The nodes that a node may draw on, as a table: hop, raw weights, rollout and flow, with spread.

        Args:
            node: the node whose attention is read.
            by: the method to order the rows by, the largest value first; "raw" is the top layer's.
            layer: the layer to start from; a node draws on one hop for each layer up to this one.
            heads: "mean" or a list, as for `rollout`.
            residual: as for `rollout`.
            flow: whether to compute flow; large neighbourhoods over three or more layers may be refused.
        """
        known = {name: method for name, method in edge_methods().items() if flow or name != "flow"}
        _check.one_of("by", by, tuple(known))
        hood = self._hood(self._node(node), self._layer(layer))
        _check.fraction("residual", residual)
        walk = self._walk(hood, self._heads(_check_averaging(heads), [hood.top]), self.samples > 0)
        raws = torch.stack([walk.into_node(number) for number in range(hood.top + 1)], dim=1).squeeze(2)
        values_of = {}
        for name, method in known.items():
            options = method.options_of(method.fitting({"residual": residual}))
            values_of[name] = method_over_edges(method, walk, options, residual).squeeze(1)
        spreads = {name: values.std(dim=0, correction=0) for name, values in values_of.items()}
        means = {name: values.mean(dim=0) for name, values in values_of.items()}
        order = sorted(
            range(hood.size),
            key=lambda row: (-float(means[by][row]), int(hood.hops[row]), int(hood.ids[row])),
        )
        table = Neighbours(
            node=int(hood.ids[hood.place]),
            ids=hood.ids,
            hops=hood.hops,
            raw=raws.mean(dim=0),
            values=means,
            raw_spread=raws.std(dim=0, correction=0) if self.draws else None,
            spreads=spreads if self.draws else {},
            by=by,
        )
        return table.some(order)

    def shares(
        self, node: int, layer: int = -1, heads: Heads = "mean", residual: float = 0.0
    ) -> list[LayerEdges]:
        """The edges over which a node may draw, and how much it does: one entry per layer, from the top down.

        Arguments as for `neighbours`. Parallel edges are merged, with the sum of their weights.
        """
        hood = self._hood(self._node(node), self._layer(layer))
        _check.fraction("residual", residual)
        drawn, layers = self.samples > 0, []
        walk = self._walk(hood, self._heads(_check_averaging(heads), [hood.top]), drawn)
        carried = walk.start()
        for number in range(hood.top, -1, -1):
            source, target, cells = walk.capacities(number, 0.0)
            share = (1.0 - residual) * cells * carried[..., target]
            carried = walk.summed(share, source) + residual * carried
            layers.append(
                LayerEdges(
                    layer=number,
                    source=hood.ids[source],
                    target=hood.ids[target],
                    weight=cells.mean(dim=0)[0],
                    spread=cells.std(dim=0, correction=0)[0] if drawn else None,
                    share=share.mean(dim=0)[0],
                )
            )
        return layers

    def save(self, path: str | Path) -> None:
        """Write the trace, without its model, as one safetensors file."""
        tensors: dict[str, Tensor] = {}
        lists: list[int] = []  # layers usually share their edges, which are written once
        for layer, edges in enumerate(self.edges):
            same = next((at for at in range(layer) if self.edges[at] is edges), layer)
            lists.append(same)
            if same == layer:
                tensors[f"edges.{layer}"] = edges
        tensors |= {f"weights.{layer}": cells for layer, cells in enumerate(self.weights)}
        tensors |= {f"draws.{layer}": cells for layer, cells in enumerate(self.draws)}
        about = {"nodes": self.nodes, "edges": lists, "paths": self.paths, "single": self.single}
        files.write(path, tensors, about, FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> NodeTrace:
        """Read a file written by `save`."""
        return files.read(path, (FORMAT,), "trace of nodes", cls._from_file)

    @classmethod
    def _from_file(cls, tensors: dict[str, Tensor], about: dict[str, Any], form: str) -> NodeTrace:
        """A trace from the contents of a file."""
        del form
        count = len(about["edges"])
        trace = cls(
            nodes=int(about["nodes"]),
            edges=[tensors[f"edges.{number}"] for number in about["edges"]],
            weights=[tensors[f"weights.{layer}"] for layer in range(count)],
            draws=[tensors[f"draws.{layer}"] for layer in range(count)] if "draws.0" in tensors else [],
            paths=about["paths"],
            single=bool(about["single"]),
        )
        for layer, (edges, weights) in enumerate(zip(trace.edges, trace.weights, strict=True)):
            fits = edges.shape == (2, weights.shape[0])
            fits &= not trace.draws or trace.draws[layer].shape[1:] == weights.shape
            if not fits or (edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < trace.nodes):
                raise ValueError(f"nodes, edges and weights of layer {layer} do not match")
        if not count or len(trace.paths) != count:
            raise ValueError("layers and their names do not match")
        return trace

    def _read(self, name: str, node: int, arguments: dict[str, Any], drawn: bool) -> Tensor:
        """A method's values over the whole graph, (sample, layer, [head,] node)."""
        method = method_of(name, edge_methods())
        options = method.options_of(arguments)
        if options.queries is not None or options.receptive_field:
            idle = "receptive_field" if options.queries is None else "queries"
            raise ValueError(f"{idle} has no meaning for a trace of nodes: leave it out")
        node, tops = self._node(node), numbers("layers", options.layers, len(self))
        residual = 0.0 if options.residual is None else options.residual
        _check.fraction("residual", residual)
        heads = self._heads(options.heads, tops)
        rows = []
        for top in tops:
            hood = self._hood(node, top)
            part = method_over_edges(method, self._walk(hood, heads, drawn), options, residual)
            whole = part.new_zeros(*part.shape[:2], self.nodes)
            whole[..., hood.ids] = part
            rows.append(whole)
        values = torch.stack(rows, dim=1)
        single = isinstance(heads, str) and heads == "each"
        values = values if single else values.squeeze(2)
        return unit_rows(values) if options.normalize else values

    def _hood(self, node: int, top: int) -> Hood:
        return hood_of(node, top, self.edges, self.nodes)

    def _walk(self, hood: Hood, heads: Heads, drawn: bool) -> Walk:
        """The neighbourhood with its weights: those of each sample, or of the single pass."""
        weights = self.draws if drawn else [cells.unsqueeze(0) for cells in self.weights]
        return Walk(hood, weights, heads)

    def _check_samples(self) -> None:
        if not self.draws:
            raise ValueError(NO_SAMPLES)

    def _node(self, node: object) -> int:
        try:
            number = operator.index(node)  # type: ignore[arg-type]
        except TypeError:
            number = -1
        if isinstance(node, bool) or not 0 <= number < self.nodes:
            raise ValueError(f"node must be a number from 0 to {self.nodes - 1}, got {node!r}")
        return number

    def _layer(self, layer: int) -> int:
        layers = numbers("layer", layer, len(self))
        if layer is None or len(layers) != 1:
            raise ValueError(f"layer must be one number, got {layer!r}")
        return layers[0]

    def _heads(self, heads: Heads, tops: list[int]) -> Heads:
        """Heads as "mean", "each" or a list, checked against the layers to be read."""
        heads = head_list(heads)
        check_heads(heads, 0)
        if heads == "mean":
            return heads
        if not self.single:
            raise ValueError(
                f"heads={heads!r} needs weights of single heads, which were not kept: trace with heads=True"
            )
        counts = self.heads
        if heads == "each":
            if len({counts[top] for top in tops}) > 1:
                raise ValueError(
                    'heads="each" needs layers with the same number of heads, got '
                    f"{[counts[top] for top in tops]}: ask for one of the layers"
                )
            return heads
        for layer in range(max(tops) + 1):
            for head in heads:
                if not -counts[layer] <= int(head) < counts[layer]:
                    last = counts[layer] - 1
                    raise ValueError(f"heads of layer {layer} are numbers from 0 to {last}, got {head!r}")
        return list(heads)

    def named(self, name: str, given: Any) -> list[Any] | None:
        """A list of one plain word or number per node, checked; `name` is used in the error."""
        if given is None:
            return None
        entries = given.tolist() if hasattr(given, "tolist") else list(given)
        if len(entries) != self.nodes:
            raise ValueError(f"{name} must have one entry for each of {self.nodes} nodes, got {len(entries)}")
        return entries


def _check_averaging(heads: Heads) -> Heads:
    if isinstance(heads, str) and heads == "each":
        raise ValueError('heads must be "mean" or a list of head numbers here, got "each"')
    return heads
