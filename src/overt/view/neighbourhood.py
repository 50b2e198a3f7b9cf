"""A node's neighbourhood as plain data, for a page."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from overt.tracing.methods.method import edge_methods
from overt.tracing.nodes import NeighboursArguments, NodeTrace
from overt.view.index import method_entry


def page_data(
    trace: NodeTrace,
    node: int,
    *,
    top: int | None = None,
    labels: Any = None,
    names: Any = None,
    **arguments: Unpack[NeighboursArguments],
) -> dict[str, Any]:
    """A node's neighbourhood as plain lists and numbers, ready for `json.dumps` and a page.

    Its "nodes" are the rows of `neighbours` in their order; its "edges" are the edges of `shares` in each
    layer whose two ends are among these nodes. A spread is None without posterior samples.

    Args:
        trace: from `overt.graphs.trace`.
        node: the node whose attention is shown.
        top: how many nodes to keep, in addition to the node itself; None keeps all.
        labels: the nodes' classes, one for each node of the graph: numbers or words.
        names: the nodes' names, one for each node of the graph.
        arguments: those of `NodeTrace.neighbours`: by, layer, heads, residual, flow. Edges have no residual.
    """
    labels, names = trace.named("labels", labels), trace.named("names", names)
    table = trace.neighbours(node, **arguments)
    table = table if top is None else table.top(top)
    known = edge_methods()
    nodes = []
    for row, (number, hop) in enumerate(zip(table.ids.tolist(), table.hops.tolist(), strict=True)):
        about: dict[str, Any] = {"id": number, "hop": hop}
        if names is not None:
            about["name"] = names[number]
        if labels is not None:
            about["label"] = labels[number]
        about["raw"] = table.raw[:, row].tolist()
        about["raw_spread"] = None if table.raw_spread is None else table.raw_spread[:, row].tolist()
        for name in known:
            if name == "raw":
                continue
            about[name] = float(table.values[name][row]) if name in table.values else None
            about[f"{name}_spread"] = float(table.spreads[name][row]) if name in table.spreads else None
        nodes.append(about)
    edges: list[dict[str, Any]] = []
    shared: Any = {name: value for name, value in arguments.items() if name not in ("by", "flow")}
    for layer in trace.shares(node, **shared):
        for row in (torch.isin(layer.source, table.ids) & torch.isin(layer.target, table.ids)).nonzero():
            edge = {"source": int(layer.source[row]), "target": int(layer.target[row])}
            spread = None if layer.spread is None else float(layer.spread[row])
            weights = {"weight": float(layer.weight[row]), "spread": spread}
            edges.append({**edge, "layer": layer.layer, **weights, "share": float(layer.share[row])})
    return {
        "node": table.node,
        "by": table.by,
        "methods": [method_entry(method) for method in known.values()],
        "layers": table.raw.shape[0],
        "paths": trace.paths[: table.raw.shape[0]],
        "samples": trace.samples,
        "residual": arguments.get("residual", 0.0),
        "left_out": table.left_out,
        "nodes": nodes,
        "edges": edges,
    }
