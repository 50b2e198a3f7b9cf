"""Attention on graphs, traced: which neighbours a node draws on, by raw weight, rollout and flow over edges.

Nothing here is quadratic in the graph: a node's neighbourhood is walked back from the top layer, edge list by
edge list, and the rest is done on that part alone.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from overt import _check
from overt._extras import need
from overt._shown import ShownNodes
from overt.mechanisms.chain import Chain
from overt.mechanisms.mechanism import MechanismLayer
from overt.tracing.files import read as read_file
from overt.tracing.files import write
from overt.tracing.graph import Heads, check_heads, check_residual, numbers, unit_rows
from overt.tracing.methods import METHODS, Numbers
from overt.tracing.tracer import Spread

FORMAT = "nodes 1"
MOST_FLOW_NODES = (
    2048  # that flow over three or more layers takes: it holds a square matrix of them per layer
)
MOST_ROWS = 20  # of a table in print
NO_SAMPLES = "no posterior samples were traced: trace with samples=20"


class _Part(NamedTuple):
    """What of one layer's edges a neighbourhood has: their rows in the layer's list, and both ends in it."""

    rows: Tensor
    source: Tensor
    target: Tensor


@dataclass(frozen=True, eq=False)
class _Hood:
    """Nodes that may reach a node through the layers up to `top`, and the edges that lead there.

    Nodes go by their places in `ids`.
    """

    place: int  # of the node itself
    ids: Tensor
    hops: Tensor
    parts: list[_Part]  # layers 0 … top

    @property
    def top(self) -> int:
        return len(self.parts) - 1

    @property
    def size(self) -> int:
        return len(self.ids)


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
        rollout: (row,), sums over paths.
        flow: (row,), maximum flow; None where it was not asked for.
        raw_spread: (layer, row), or None.
        rollout_spread: (row,), or None.
        flow_spread: (row,), or None.
        by: the method that ordered the rows.
        left_out: how many rows `top` took away.
    """

    node: int
    ids: Tensor
    hops: Tensor
    raw: Tensor
    rollout: Tensor
    flow: Tensor | None = None
    raw_spread: Tensor | None = None
    rollout_spread: Tensor | None = None
    flow_spread: Tensor | None = None
    by: str = "rollout"
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def value(self, method: str) -> Tensor:
        """(row,), the values of a method; "raw" is the top layer's."""
        found = {"raw": self.raw[-1], "rollout": self.rollout, "flow": self.flow}[self._known(method)]
        assert found is not None
        return found

    def spread(self, method: str) -> Tensor | None:
        """(row,), the spread of a method's values; None without posterior samples."""
        top = None if self.raw_spread is None else self.raw_spread[-1]
        return {"raw": top, "rollout": self.rollout_spread, "flow": self.flow_spread}[self._known(method)]

    @property
    def methods(self) -> tuple[str, ...]:
        """Those that the table has."""
        return METHODS if self.flow is not None else METHODS[:2]

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

        def cut(values: Tensor | None) -> Any:
            return None if values is None else values[..., rows]

        return replace(
            self,
            ids=self.ids[rows],
            hops=self.hops[rows],
            raw=cut(self.raw),
            rollout=cut(self.rollout),
            flow=cut(self.flow),
            raw_spread=cut(self.raw_spread),
            rollout_spread=cut(self.rollout_spread),
            flow_spread=cut(self.flow_spread),
            left_out=self.left_out + len(self) - len(rows),
        )

    def __str__(self) -> str:
        shown = self if len(self) <= MOST_ROWS else self.top(MOST_ROWS)
        layers = self.raw.shape[0]
        columns = {f"raw {layer}": (shown.raw[layer], shown.raw_spread) for layer in range(layers)}
        cells = [["node", *(f"{one}{' ◂' if one == self.node else ''}" for one in shown.ids.tolist())]]
        cells.append(["hop", *map(str, shown.hops.tolist())])
        for number, (name, (values, spreads)) in enumerate(columns.items()):
            cells.append([name, *_written(values, None if spreads is None else spreads[number])])
        cells += [[name, *_written(shown.value(name), shown.spread(name))] for name in self.methods[1:]]
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

    def raw(
        self,
        node: int,
        layers: Numbers = None,
        heads: Heads = "mean",
        residual: float = 0.0,
        normalize: bool = False,
    ) -> Tensor:
        """Weights of the edges into a node. Arguments as for `rollout`; `residual` is ignored."""
        return self._read("raw", node, layers, heads, residual, normalize, False)[0]

    def rollout(
        self,
        node: int,
        layers: Numbers = None,
        heads: Heads = "mean",
        residual: float = 0.0,
        normalize: bool = False,
    ) -> Tensor:
        """Attention rollout: for each path of edges down to the inputs the product of its weights, summed.

        Args:
            node: whose attention; by its number among the inputs.
            layers: which layers to start from; all by default. Negative numbers count from the end.
            heads: "mean" averages all heads of each layer; a list averages those, in every layer; "each"
                gives each head of the layer that is started from, on top of the layers below averaged, and
                one more axis after the layer.
            residual: weight r of a skip connection around each layer, (1 − r)·A + r·I. Attention layers of
                graphs mostly have none: a node attends to itself by a self-loop, which is an edge already.
            normalize: make each row sum to one.

        Returns:
            (layer, node) in float64; (layer, head, node) for `heads="each"`.
        """
        return self._read("rollout", node, layers, heads, residual, normalize, False)[0]

    def flow(
        self,
        node: int,
        layers: Numbers = None,
        heads: Heads = "mean",
        residual: float = 0.0,
        normalize: bool = False,
        threads: int | None = None,
    ) -> Tensor:
        """Attention flow: the maximum flow from a node to each input, edges carrying up to their weight.

        Arguments as for `rollout`, and `threads` of the solver. Parallel edges carry the sum of their
        weights. Over one and two layers it has a closed form; over more it is solved, in neighbourhoods of
        up to `MOST_FLOW_NODES` nodes.
        """
        return self._read("flow", node, layers, heads, residual, normalize, False, threads)[0]

    def spread(
        self,
        method: str,
        node: int,
        layers: Numbers = None,
        heads: Heads = "mean",
        residual: float = 0.0,
        normalize: bool = False,
    ) -> Spread:
        """Mean and spread of a method's result over the posterior samples, each of the method's shape.

        The mean of a method over samples is not the method of the mean weights: rollout and flow bend.
        """
        self._drawn()
        found = self._read(method, node, layers, heads, residual, normalize, True)
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
        _check.one_of("by", by, METHODS if flow else METHODS[:2])
        hood = self._hood(self._node(node), self._layer(layer))
        listed = self._asked(_averaging(heads), residual, [hood.top])
        drawn = self.samples > 0
        raws = torch.stack([self._raw(hood, number, listed, drawn) for number in range(hood.top + 1)], dim=1)
        found = {"raw": raws.squeeze(2), "rollout": self._rollout(hood, listed, residual, drawn).squeeze(1)}
        if flow:
            found["flow"] = self._flow(hood, listed, residual, drawn, None).squeeze(1)
        means = {method: values.mean(dim=0) for method, values in found.items()}
        spreads = {
            method: values.std(dim=0, correction=0) if drawn else None for method, values in found.items()
        }
        key = means["raw"][-1] if by == "raw" else means[by]
        order = sorted(
            range(hood.size), key=lambda row: (-float(key[row]), int(hood.hops[row]), int(hood.ids[row]))
        )
        table = Neighbours(
            node=int(hood.ids[hood.place]),
            ids=hood.ids,
            hops=hood.hops,
            raw=means["raw"],
            rollout=means["rollout"],
            flow=means.get("flow"),
            raw_spread=spreads["raw"],
            rollout_spread=spreads["rollout"],
            flow_spread=spreads.get("flow"),
            by=by,
        )
        return table.some(order)

    def page(
        self,
        node: int,
        by: str = "rollout",
        layer: int = -1,
        heads: Heads = "mean",
        residual: float = 0.0,
        flow: bool = True,
        top: int | None = None,
        labels: Any = None,
        names: Any = None,
    ) -> dict[str, Any]:
        """A node's neighbourhood as plain lists and numbers, ready for `json.dumps` and a page.

        Its "nodes" are the rows of `neighbours` in their order; its "edges" are those of each layer that lead
        from one of them to where the layers above may look, as `shares` has them. A spread is None without
        posterior samples.

        Args:
            node: whose attention.
            by: as for `neighbours`, and so are the next four.
            layer: the layer to start from.
            heads: "mean" or a list.
            residual: as for `rollout`; edges are without it.
            flow: whether to compute it.
            top: keep the first so many nodes, and the node itself; None keeps all.
            labels: the nodes' classes, one for each node of the graph: numbers or words.
            names: the nodes' names, likewise.
        """
        labels, names = self.named("labels", labels), self.named("names", names)
        table = self.neighbours(node, by, layer, heads, residual, flow)
        table = table if top is None else table.top(top)
        nodes = []
        for row, (one, hop) in enumerate(zip(table.ids.tolist(), table.hops.tolist(), strict=True)):
            about: dict[str, Any] = {"id": one, "hop": hop}
            if names is not None:
                about["name"] = names[one]
            if labels is not None:
                about["label"] = labels[one]
            for name in ("raw", "rollout", "flow"):
                for part in (name, f"{name}_spread"):
                    values = getattr(table, part)
                    about[part] = None if values is None else values[..., row].tolist()
            nodes.append(about)
        edges: list[dict[str, Any]] = []
        for found in self.shares(node, layer, heads, residual):
            for row in (torch.isin(found.source, table.ids) & torch.isin(found.target, table.ids)).nonzero():
                edge = {"source": int(found.source[row]), "target": int(found.target[row])}
                spread = None if found.spread is None else float(found.spread[row])
                weights = {"weight": float(found.weight[row]), "spread": spread}
                edges.append({**edge, "layer": found.layer, **weights, "share": float(found.share[row])})
        return {
            "node": table.node,
            "by": by,
            "layers": table.raw.shape[0],
            "paths": self.paths[: table.raw.shape[0]],
            "samples": self.samples,
            "residual": residual,
            "left_out": table.left_out,
            "nodes": nodes,
            "edges": edges,
        }

    def shares(
        self, node: int, layer: int = -1, heads: Heads = "mean", residual: float = 0.0
    ) -> list[LayerEdges]:
        """The edges that a node may draw over, and how much it does: one entry per layer, from the top down.

        Arguments as for `neighbours`. Parallel edges are one, with the sum of their weights.
        """
        hood = self._hood(self._node(node), self._layer(layer))
        listed = self._asked(_averaging(heads), residual, [hood.top])
        drawn, found = self.samples > 0, []
        carried = torch.zeros(1, 1, hood.size, dtype=torch.float64)
        carried[..., hood.place] = 1.0
        for number in range(hood.top, -1, -1):
            source, target, cells = self._capacities(hood, number, listed, 0.0, drawn)
            over = (1.0 - residual) * cells * carried[..., target]
            carried = _summed(over, source, hood.size) + residual * carried
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
        write(path, tensors, about, FORMAT)

    @classmethod
    def load(cls, path: str | Path) -> NodeTrace:
        """Read what `save` wrote."""
        return read_file(path, FORMAT, "trace of nodes", cls._made)

    @classmethod
    def _made(cls, tensors: dict[str, Tensor], about: dict[str, Any]) -> NodeTrace:
        """A trace from what a file holds."""
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

    # From here on, results are (sample, head, place in a neighbourhood), with one sample of the mean weights.

    def _read(
        self,
        method: str,
        node: int,
        layers: Numbers,
        heads: Heads,
        residual: float,
        normalize: bool,
        drawn: bool,
        threads: int | None = None,
    ) -> Tensor:
        """A method's values over the whole graph, (sample, layer, [head,] node)."""
        _check.one_of("method", method, METHODS)
        if threads is not None:
            _check.whole("threads", threads, 1)
        node, tops = self._node(node), numbers("layers", layers, len(self))
        listed = self._asked(heads, residual, tops)
        rows = []
        for top in tops:
            hood = self._hood(node, top)
            if method == "raw":
                found = self._raw(hood, top, listed, drawn)
            elif method == "rollout":
                found = self._rollout(hood, listed, residual, drawn)
            else:
                found = self._flow(hood, listed, residual, drawn, threads)
            whole = found.new_zeros(*found.shape[:2], self.nodes)
            whole[..., hood.ids] = found
            rows.append(whole)
        values = torch.stack(rows, dim=1)
        values = values if listed == "each" else values.squeeze(2)
        return unit_rows(values) if normalize else values

    def _hood(self, node: int, top: int) -> _Hood:
        """Walk back from a node at the top of a layer to the inputs."""
        far = len(self) + 1
        hops = torch.full((self.nodes,), far)
        hops[node] = 0
        into: list[Tensor] = []
        for layer in range(top, -1, -1):
            source, target = self.edges[layer]
            rows = (hops[target] < far).nonzero().flatten()
            into.append(rows)
            # A step costs one hop and staying none, so that with or without self-loops these are distances.
            hops = hops.scatter_reduce(0, source[rows], hops[target[rows]] + 1, "amin")
        ids = (hops < far).nonzero().flatten()
        place = torch.empty(self.nodes, dtype=torch.int64)
        place[ids] = torch.arange(len(ids))
        parts = [
            _Part(rows, place[self.edges[layer][0][rows]], place[self.edges[layer][1][rows]])
            for layer, rows in enumerate(reversed(into))
        ]
        return _Hood(int(place[node]), ids, hops[ids], parts)

    def _cells(self, layer: int, rows: Tensor, heads: Heads, drawn: bool) -> Tensor:
        """Weights of some edges, float64 (sample, head, edge); averaged ones have one head."""
        cells = self.draws[layer][:, rows] if drawn else self.weights[layer][rows].unsqueeze(0)
        cells = cells.double().transpose(1, 2)
        if heads == "each":
            return cells
        if heads != "mean":
            cells = cells[:, list(heads)]
        return cells.mean(dim=1, keepdim=True)

    def _raw(self, hood: _Hood, layer: int, heads: Heads, drawn: bool) -> Tensor:
        part = hood.parts[layer]
        own = (part.target == hood.place).nonzero().flatten()
        cells = self._cells(layer, part.rows[own], heads, drawn)
        return _summed(cells, part.source[own], hood.size)

    def _rollout(self, hood: _Hood, heads: Heads, residual: float, drawn: bool) -> Tensor:
        """A row through the layers: one product and one sum per edge."""
        carried = torch.zeros(1, 1, hood.size, dtype=torch.float64)
        carried[..., hood.place] = 1.0
        for layer in range(hood.top, -1, -1):
            part = hood.parts[layer]
            cells = self._cells(layer, part.rows, _below(heads, layer, hood.top), drawn)
            handed = _summed(cells * carried[..., part.target], part.source, hood.size)
            carried = (1.0 - residual) * handed + residual * carried
        return carried

    def _capacities(
        self, hood: _Hood, layer: int, heads: Heads, residual: float, drawn: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's edges with the residual's, parallel ones made one: sources, targets, capacities."""
        part = hood.parts[layer]
        cells = self._cells(layer, part.rows, heads, drawn)
        source, target = part.source, part.target
        if residual:
            own = torch.arange(hood.size)
            source, target = torch.cat([source, own]), torch.cat([target, own])
            kept = cells.new_full((*cells.shape[:2], hood.size), residual)
            cells = torch.cat([(1.0 - residual) * cells, kept], dim=-1)
        pairs, which = torch.unique(target * hood.size + source, return_inverse=True)
        return pairs % hood.size, pairs // hood.size, _summed(cells, which, len(pairs))

    def _flow(self, hood: _Hood, heads: Heads, residual: float, drawn: bool, threads: int | None) -> Tensor:
        top = hood.top
        if top > 1 and hood.size > MOST_FLOW_NODES:
            raise ValueError(
                f"flow over {top + 1} layers takes neighbourhoods of up to {MOST_FLOW_NODES} nodes, here are "
                f"{hood.size}: leave it out (flow=False), or ask for layers 0 and 1, whose flow has no limit"
            )
        levels = [
            self._capacities(hood, layer, _below(heads, layer, top), residual, drawn)
            for layer in range(top + 1)
        ]
        source, target, cells = levels[-1]
        own = target == hood.place
        first = _summed(cells[..., own], source[own], hood.size)
        if top == 0:
            return first
        if top == 1:
            # Each way has its own middle node, whose edge above and edge below limit it and nothing else.
            source, target, cells = levels[0]
            return _summed(torch.minimum(first[..., target], cells), source, hood.size)
        from overt.tracing.maxflow import solve

        stack = np.zeros((top + 1, hood.size, hood.size))
        found = torch.zeros_like(first)
        ends = [(target.numpy(), source.numpy()) for source, target, _ in levels]
        for sample in range(first.shape[0]):
            for head in range(first.shape[1]):
                for layer, (_, _, cells) in enumerate(levels):
                    stack[layer][ends[layer]] = cells[sample, min(head, cells.shape[1] - 1)].numpy()
                values = solve(stack, [(top + 1, hood.place)], threads=threads)
                found[sample, head] = torch.from_numpy(values[0])
        return found

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

    def _asked(self, heads: Heads, residual: float, tops: list[int]) -> Heads:
        """Heads as "mean", "each" or a list, checked against the layers that will be read."""
        check_residual(residual)
        given: Any = heads
        heads = given.tolist() if hasattr(given, "tolist") else heads
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


def _below(heads: Heads, layer: int, top: int) -> Heads:
    return "mean" if heads == "each" and layer < top else heads


def _summed(cells: Tensor, places: Tensor, size: int) -> Tensor:
    """(…, edge) → (…, place): the sum at each place."""
    return cells.new_zeros(*cells.shape[:-1], size).index_add_(-1, places, cells)


class _Collector:
    """Takes each attention layer's edges and weights as it runs."""

    def __init__(self, heads: bool) -> None:
        self.heads = heads
        self.edges: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.paths: list[str] = []
        self.nodes = 0
        self.pooled = ""

    def called(self, path: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """See what a layer is given: how many nodes, and that sources and targets are the same ones."""
        x = arguments[0] if arguments else named.get("x")
        if isinstance(x, tuple | list):
            if len(x) != 2 or x[0] is not x[1]:
                raise ValueError(
                    f"{path} runs from one set of nodes to another (bipartite), whose numbers mean different "
                    "nodes: not supported"
                )
            x = x[0]
        if isinstance(x, Tensor):
            self.nodes = max(self.nodes, x.shape[0])

    def ran(self, path: str, layer: Any, edge_index: Any, weights: Any) -> None:
        """Keep a copy of a layer's edges and weights."""
        if self.pooled:
            raise ValueError(
                f"{path} runs after {self.pooled}, which numbers nodes anew, so that hops cannot be told: "
                "not supported"
            )
        edges = _edge_list(edge_index, layer.flow)
        weights = weights.unsqueeze(-1) if isinstance(weights, Tensor) and weights.dim() == 1 else weights
        if not isinstance(weights, Tensor) or weights.dim() != 2 or weights.shape[0] != edges.shape[1]:
            shape = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise ValueError(f"{path} must make weights of shape ({edges.shape[1]}, heads), got {shape}")
        if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
            raise ValueError(f"weights of {path} must be finite and not negative: is it attention?")
        if not self.heads:
            weights = weights.mean(dim=1, keepdim=True, dtype=torch.float64)
        if self.edges and torch.equal(self.edges[-1], edges):
            edges = self.edges[-1]
        self.edges.append(edges)
        self.weights.append(weights.detach().to("cpu", torch.float32, copy=True))
        self.paths.append(path)
        if edges.numel():
            self.nodes = max(self.nodes, int(edges.max()) + 1)


def _edge_list(edge_index: Any, flow: str) -> Tensor:
    """(2, edge), source and target, whatever form PyG takes edges in."""
    utils = need("torch_geometric.utils", "graphs")
    if utils.is_sparse(edge_index):
        target, source = utils.to_edge_index(edge_index)[0]  # PyG takes such matrices transposed
    else:
        source, target = edge_index[0], edge_index[1]
        if flow == "target_to_source":
            source, target = target, source
    return (
        torch.stack([torch.Tensor.as_subclass(end, torch.Tensor) for end in (source, target)]).detach().cpu()
    )


@contextmanager
def _watching(model: nn.Module, collector: _Collector) -> Iterator[None]:
    """Evaluation mode and hooks, both undone at the end."""
    passing = need("torch_geometric.nn", "graphs").MessagePassing
    modes = {module: module.training for module in model.modules()}
    with ExitStack() as undo:
        undo.callback(_restore, modes)
        model.eval()
        attends = False
        for path, module in model.named_modules():
            path = path or type(module).__name__
            if isinstance(module, passing) and type(module).edge_update is not passing.edge_update:
                attends = True
                for handle in _hooks(path, module, collector):
                    undo.callback(handle.remove)
            elif type(module).__module__.startswith("torch_geometric.nn.pool."):
                undo.callback(module.register_forward_hook(_pools(path, collector)).remove)
        if not attends:
            raise ValueError(
                f"{type(model).__name__} has no graph attention to trace: no PyG layer that weighs edges by "
                "edge_update, such as GATConv or GATv2Conv"
            )
        yield


def _restore(modes: dict[nn.Module, bool]) -> None:
    for module, mode in modes.items():
        module.training = mode


def _hooks(path: str, module: Any, collector: _Collector) -> list[Any]:
    def called(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        collector.called(path, arguments, named)

    def ran(layer: Any, inputs: tuple[Any, ...], weights: Any) -> None:
        collector.ran(path, layer, inputs[0], weights)

    return [
        module.register_forward_pre_hook(called, with_kwargs=True),
        module.register_edge_update_forward_hook(ran),
    ]


def _pools(path: str, collector: _Collector) -> Callable[..., None]:
    def pooled(*_: Any) -> None:
        collector.pooled = path

    return pooled


def _arguments(model: nn.Module, inputs: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments of the model, from tensors or from one PyG Data."""
    if not inputs:
        raise ValueError("inputs must be a PyG Data, or what the model takes, such as x and edge_index")
    data = need("torch_geometric.data", "graphs")
    for one in inputs:
        if isinstance(one, dict | data.HeteroData):
            raise ValueError(
                "graphs with several kinds of nodes are not supported: inputs hold a "
                f"{type(one).__name__}, a Data or tensors would do"
            )
    given = inputs[0]
    if len(inputs) > 1 or not isinstance(given, data.Data):
        return list(inputs), {}
    wanted = inspect.signature(model.forward).parameters
    if "edge_index" in wanted:
        return [], {name: given[name] for name in wanted if given.get(name) is not None}
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in wanted.values()):
        names = ("x", "edge_index", "edge_attr")
        return [given[name] for name in names if given.get(name) is not None], {}
    return [given], {}  # forward(data)


def trace_nodes(
    model: nn.Module,
    *inputs: Any,
    samples: int | None = None,
    step: int = 0,
    seed: int = 0,
    heads: bool = True,
) -> NodeTrace:
    """Run a graph network once, in evaluation mode, and keep its attention over edges.

    Any PyG model will do whose layers weigh edges by `edge_update`: PyG's `GATConv` and `GATv2Conv`, Overt's,
    and your own. Layers are taken to stand one upon the other, in the order of their calls. Of a mini-batch,
    nodes are numbered as in the inputs. The model is left as it was, also when something fails.

    Args:
        model: the model.
        inputs: a PyG `Data`, or the model's arguments in their order, such as x and edge_index.
        samples: number of posterior samples of a Bayesian model to draw beside the mean of its weights.
        step: of the samples' noise, as in `Chain`.
        seed: of the samples' noise.
        heads: keep each head's weights; False keeps their mean, for large graphs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    if samples is not None:
        _check.whole("samples", samples, 1)
    arguments, named = _arguments(model, inputs)

    def run(chain: Chain) -> _Collector:
        collector = _Collector(heads)
        with _watching(model, collector), torch.no_grad(), chain:
            model(*arguments, **named)
        return collector

    for module in model.modules():
        if isinstance(module, MechanismLayer) and (module.signed or not module.sums_to_one):
            raise ValueError(
                f"{module.name} makes weights that do not sum to one over the edges into a node, or may be "
                "negative: such weights are not traced on graphs"
            )
    first = run(Chain(step=step, seed=seed, kl=False))
    if not first.edges:
        raise ValueError("no attention ran: nothing to trace")
    made = NodeTrace(first.nodes, first.edges, first.weights, paths=first.paths, single=heads)
    if samples is None:
        return made
    drawn: list[list[Tensor]] = []
    for number in range(samples):
        again = run(Chain(step=step, seed=seed, sample=number, kl=False))
        same = len(again.edges) == len(first.edges)
        if not same or not all(map(torch.equal, again.edges, first.edges)):
            raise ValueError("edges differ between posterior samples, so that no spread can be told")
        drawn.append(again.weights)
    made.draws = [torch.stack(layer) for layer in zip(*drawn, strict=True)]
    random = any(isinstance(module, MechanismLayer) and module.random for module in model.modules())
    if not random and all(bool((d == w).all()) for d, w in zip(made.draws, made.weights, strict=True)):
        raise ValueError("samples needs random weights: give the model's graph attention a Bayesian(…)")
    return made
