"""Attention on graphs, traced: which neighbours a node draws on, edge by edge."""

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
from overt.tracing.methods.method import edge_methods, listed, method_of, method_over_edges
from overt.tracing.options import Arguments, Heads, check_heads, numbers
from overt.tracing.result import NO_SAMPLES, Spread
from overt.tracing.showing import ShownNodes

FORMAT = "nodes 1"
MOST_ROWS = 20  # of a table in print


class NeighboursArguments(TypedDict, total=False):
    """Those of `NodeTrace.neighbours`, for what hands them on."""

    by: str
    layer: int
    heads: Heads
    residual: float
    flow: bool


class LayerEdges(NamedTuple):
    """Edges of one layer that a node may draw over, each (edge,); with posterior samples, means over them.

    Attributes:
        layer: number of the layer.
        source: node that is attended to.
        target: node that attends.
        weight: of the attention.
        spread: of the weight over posterior samples, or None.
        share: what of the node's rollout comes over the edge: its weight times what the layers above draw on
            its target.
    """

    layer: int
    source: Tensor
    target: Tensor
    weight: Tensor
    spread: Tensor | None
    share: Tensor


@dataclass(eq=False)
class Neighbours:
    """What a node draws on: a row per node, the largest value first. `NodeTrace.neighbours` makes it.

    With posterior samples, values are means over them and come with their spread (standard deviation, divided
    by their number); without, they are those of the one pass, and there is no spread.

    Attributes:
        node: whose table it is.
        ids: (row,), number of the neighbour in the graph; the node itself is among them.
        hops: (row,), attention edges between it and the node; 0 for the node itself.
        raw: (layer, row), weight of its edge to the node in each layer.
        values: method → (row,), of the layer that was started from; those that were asked for.
        raw_spread: (layer, row), or None.
        spreads: method → (row,); empty without posterior samples.
        by: the method that ordered the rows.
        left_out: how many rows `top` took away.
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
        """(row,), maximum flow; None where it was not asked for."""
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
        return self.values[self._known(method)]

    def spread(self, method: str) -> Tensor | None:
        """(row,), the spread of a method's values; None without posterior samples."""
        return self.spreads.get(self._known(method))

    @property
    def methods(self) -> tuple[str, ...]:
        """Those that the table has."""
        return tuple(self.values)

    def _known(self, method: str) -> str:
        _check.one_of("method", method, self.methods)
        return method

    def top(self, count: int) -> Neighbours:
        """The first `count` rows, and the node's own wherever it stands."""
        _check.whole("top", count, 1)
        own = int((self.ids == self.node).nonzero())
        rows = list(range(min(count, len(self))))
        return self.some(rows if own in rows else [*rows, own])

    def some(self, rows: list[int]) -> Neighbours:
        """The rows with these places in the table, in this order."""
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
        cells = [["node", *(f"{one}{' ◂' if one == self.node else ''}" for one in shown.ids.tolist())]]
        cells.append(["hop", *map(str, shown.hops.tolist())])
        for layer, values in enumerate(shown.raw):
            spreads = None if shown.raw_spread is None else shown.raw_spread[layer]
            cells.append([f"raw {layer}", *_written(values, spreads)])
        cells += [
            [name, *_written(shown.value(name), shown.spread(name))] for name in self.methods if name != "raw"
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


def _written(values: Tensor, spreads: Tensor | None) -> list[str]:
    """Numbers for a table; a dot where there is no edge or way at all."""
    given = [None] * len(values) if spreads is None else spreads.tolist()
    return [
        "·" if not value else f"{value:.3f}" if spread is None else f"{value:.3f} ± {spread:.3f}"
        for value, spread in zip(values.tolist(), given, strict=True)
    ]


@dataclass(eq=False)
class NodeTrace(ShownNodes):
    """What a graph network's attention was, edge by edge and layer by layer. `trace_nodes` makes it.

    Results of the methods have shape (layer, node) in float64: what one node, at the top of each layer, draws
    on each node of the graph. An edge runs from `source`, which is attended to, to `target`, which attends.

    Attributes:
        nodes: how many the graph has.
        edges: one list per attention layer in the order of their calls, (2, edge): source and target, with
            the self-loops that the layer added.
        weights: one per layer, (edge, head), or (edge, 1) where heads were averaged. Of a Bayesian model,
            those of the posterior's mean, as in evaluation. Float32, on the CPU.
        draws: one per layer, (sample, edge, head), of a Bayesian model traced with `samples`; else empty.
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
        """How many attention layers ran."""
        return len(self.edges)

    @property
    def heads(self) -> list[int]:
        """How many each layer's weights have."""
        return [cells.shape[1] for cells in self.weights]

    @property
    def samples(self) -> int:
        """How many posterior samples were drawn."""
        return self.draws[0].shape[0] if self.draws else 0

    def draw(self, number: int) -> NodeTrace:
        """The trace of one posterior sample."""
        self._drawn()
        if not -self.samples <= number < self.samples:
            raise IndexError(f"trace holds {self.samples} posterior samples, got {number}")
        return replace(self, weights=[cells[number] for cells in self.draws], draws=[])

    def read(self, method: str, node: int, **options: Any) -> Tensor:
        """A method by its name: `t.read("rollout", node, layers=-1)` is `t.rollout(node, layers=-1)`.

        Arguments mean what they mean to the methods of a token trace (`overt.tracing.Options`): layers,
        heads, residual, normalize, and what a method has of its own. The node takes the place of `queries`.
        Attention layers of graphs mostly have no skip connection, so the residual is 0 by default: a node
        attends to itself by a self-loop, which is an edge already.

        Args:
            method: one that has a form on edges: "raw", "rollout", "flow", or your own.
            node: whose attention; by its number among the inputs.
            options: the others.

        Returns:
            (layer, node) in float64; (layer, head, node) for `heads="each"`.
        """
        return self._read(method, node, options, drawn=False)[0]

    def raw(self, node: int, **options: Unpack[Arguments]) -> Tensor:
        """Weights of the edges into a node. Arguments as for `read`, without `residual`."""
        return self.read("raw", node, **options)

    def rollout(self, node: int, **options: Unpack[Arguments]) -> Tensor:
        """Attention rollout: for each path of edges down to the inputs the product of its weights, summed."""
        return self.read("rollout", node, **options)

    def flow(self, node: int, **options: Unpack[FlowArguments]) -> Tensor:
        """Attention flow: the maximum flow from a node to each input, edges carrying up to their weight.

        Parallel edges carry the sum of their weights. Over one and two layers it has a closed form; over more
        it is solved, in neighbourhoods of up to `overt.tracing.edges.MOST_FLOW_NODES` nodes.
        """
        return self.read("flow", node, **options)

    def spread(self, method: str, node: int, **options: Any) -> Spread:
        """Mean and spread of a method's result over the posterior samples, each of the method's shape.

        The mean of a method over samples is not the method of the mean weights: rollout and flow bend.
        """
        self._drawn()
        found = self._read(method, node, options, drawn=True)
        return Spread(found.mean(dim=0), found.std(dim=0, correction=0))

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
            node: whose attention.
            by: the method to order the rows by, the largest value first; "raw" is the top layer's.
            layer: the layer to start from; a node then draws on as many hops as layers lie below its top.
            heads: "mean" or a list, as for `rollout`.
            residual: as for `rollout`.
            flow: whether to compute it; large neighbourhoods of three and more layers may be refused.
        """
        known = {name: one for name, one in edge_methods().items() if flow or name != "flow"}
        _check.one_of("by", by, tuple(known))
        hood = self._hood(self._node(node), self._layer(layer))
        _check.fraction("residual", residual)
        walk = self._walk(hood, self._heads(_averaging(heads), [hood.top]), self.samples > 0)
        raws = torch.stack([walk.into_node(number) for number in range(hood.top + 1)], dim=1).squeeze(2)
        found = {}
        for name, method in known.items():
            options = method.options_of(method.fitting({"residual": residual}))
            found[name] = method_over_edges(method, walk, options, residual).squeeze(1)
        spreads = {name: values.std(dim=0, correction=0) for name, values in found.items()}
        means = {name: values.mean(dim=0) for name, values in found.items()}
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
        """The edges that a node may draw over, and how much it does: one entry per layer, from the top down.

        Arguments as for `neighbours`. Parallel edges are one, with the sum of their weights.
        """
        hood = self._hood(self._node(node), self._layer(layer))
        _check.fraction("residual", residual)
        drawn, found = self.samples > 0, []
        walk = self._walk(hood, self._heads(_averaging(heads), [hood.top]), drawn)
        carried = walk.start()
        for number in range(hood.top, -1, -1):
            source, target, cells = walk.capacities(number, 0.0)
            over = (1.0 - residual) * cells * carried[..., target]
            carried = walk.summed(over, source) + residual * carried
            found.append(
                LayerEdges(
                    layer=number,
                    source=hood.ids[source],
                    target=hood.ids[target],
                    weight=cells.mean(dim=0)[0],
                    spread=cells.std(dim=0, correction=0)[0] if drawn else None,
                    share=over.mean(dim=0)[0],
                )
            )
        return found

    def save(self, path: str | Path) -> None:
        """Write the trace, without its model, as one safetensors file."""
        tensors: dict[str, Tensor] = {}
        lists: list[int] = []  # layers mostly share their edges, which are written once
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
        """Read what `save` wrote."""
        return files.read(path, (FORMAT,), "trace of nodes", cls._made)

    @classmethod
    def _made(cls, tensors: dict[str, Tensor], about: dict[str, Any], form: str) -> NodeTrace:
        """A trace from what a file holds."""
        del form
        count = len(about["edges"])
        made = cls(
            nodes=int(about["nodes"]),
            edges=[tensors[f"edges.{number}"] for number in about["edges"]],
            weights=[tensors[f"weights.{layer}"] for layer in range(count)],
            draws=[tensors[f"draws.{layer}"] for layer in range(count)] if "draws.0" in tensors else [],
            paths=about["paths"],
            single=bool(about["single"]),
        )
        for layer, (edges, weights) in enumerate(zip(made.edges, made.weights, strict=True)):
            fits = edges.shape == (2, weights.shape[0])
            fits &= not made.draws or made.draws[layer].shape[1:] == weights.shape
            if not fits or (edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < made.nodes):
                raise ValueError(f"nodes, edges and weights of layer {layer} do not fit")
        if not count or len(made.paths) != count:
            raise ValueError("layers and their names do not fit")
        return made

    def _read(self, name: str, node: int, given: dict[str, Any], drawn: bool) -> Tensor:
        """A method's values over the whole graph, (sample, layer, [head,] node)."""
        method = method_of(name, edge_methods())
        options = method.options_of(given)
        if options.queries is not None or options.receptive_field:
            idle = "receptive_field" if options.queries is None else "queries"
            raise ValueError(f"{idle} means nothing to a trace of nodes: leave it out")
        node, tops = self._node(node), numbers("layers", options.layers, len(self))
        residual = 0.0 if options.residual is None else options.residual
        _check.fraction("residual", residual)
        heads = self._heads(options.heads, tops)
        rows = []
        for top in tops:
            hood = self._hood(node, top)
            found = method_over_edges(method, self._walk(hood, heads, drawn), options, residual)
            whole = found.new_zeros(*found.shape[:2], self.nodes)
            whole[..., hood.ids] = found
            rows.append(whole)
        values = torch.stack(rows, dim=1)
        single = isinstance(heads, str) and heads == "each"
        values = values if single else values.squeeze(2)
        return unit_rows(values) if options.normalize else values

    def _hood(self, node: int, top: int) -> Hood:
        return hood_of(node, top, self.edges, self.nodes)

    def _walk(self, hood: Hood, heads: Heads, drawn: bool) -> Walk:
        """The neighbourhood with its weights: of each sample, or those of the one pass."""
        weights = self.draws if drawn else [cells.unsqueeze(0) for cells in self.weights]
        return Walk(hood, weights, heads)

    def _drawn(self) -> None:
        if not self.draws:
            raise ValueError(NO_SAMPLES)

    def _node(self, node: object) -> int:
        try:
            found = operator.index(node)  # type: ignore[arg-type]
        except TypeError:
            found = -1
        if isinstance(node, bool) or not 0 <= found < self.nodes:
            raise ValueError(f"node must be a number from 0 to {self.nodes - 1}, got {node!r}")
        return found

    def _layer(self, layer: int) -> int:
        found = numbers("layer", layer, len(self))
        if layer is None or len(found) != 1:
            raise ValueError(f"layer must be one number, got {layer!r}")
        return found[0]

    def _heads(self, heads: Heads, tops: list[int]) -> Heads:
        """Heads as "mean", "each" or a list, checked against the layers that will be read."""
        heads = listed(heads)
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
                    'heads="each" needs layers with equally many heads, got '
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
        """One plain word or number per node of the graph, checked; `name` is for the error."""
        if given is None:
            return None
        listed = given.tolist() if hasattr(given, "tolist") else list(given)
        if len(listed) != self.nodes:
            raise ValueError(f"{name} must have one entry for each of {self.nodes} nodes, got {len(listed)}")
        return listed


def _averaging(heads: Heads) -> Heads:
    if isinstance(heads, str) and heads == "each":
        raise ValueError('heads must be "mean" or a list of head numbers here, got "each"')
    return heads
