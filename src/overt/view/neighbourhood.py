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

    Its "nodes" are the rows of `neighbours` in their order; its "edges" are those of each layer that lead
    from one of them to where the layers above may look, as `shares` has them. A spread is None without
    posterior samples.

    Args:
        trace: what `overt.graphs.trace` made.
        node: whose attention.
        top: keep the first so many nodes, and the node itself; None keeps all.
        labels: the nodes' classes, one for each node of the graph: numbers or words.
        names: the nodes' names, likewise.
        arguments: of `NodeTrace.neighbours`: by, layer, heads, residual, flow. Edges have no residual.
    """
    labels, names = trace.named("labels", labels), trace.named("names", names)
    table = trace.neighbours(node, **arguments)
    table = table if top is None else table.top(top)
    known = edge_methods()
    nodes = []
    for row, (one, hop) in enumerate(zip(table.ids.tolist(), table.hops.tolist(), strict=True)):
        about: dict[str, Any] = {"id": one, "hop": hop}
        if names is not None:
            about["name"] = names[one]
        if labels is not None:
            about["label"] = labels[one]
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
    for found in trace.shares(node, **shared):
        for row in (torch.isin(found.source, table.ids) & torch.isin(found.target, table.ids)).nonzero():
            edge = {"source": int(found.source[row]), "target": int(found.target[row])}
            spread = None if found.spread is None else float(found.spread[row])
            weights = {"weight": float(found.weight[row]), "spread": spread}
            edges.append({**edge, "layer": found.layer, **weights, "share": float(found.share[row])})
    return {
        "node": table.node,
        "by": table.by,
        "methods": [method_entry(one) for one in known.values()],
        "layers": table.raw.shape[0],
        "paths": trace.paths[: table.raw.shape[0]],
        "samples": trace.samples,
        "residual": arguments.get("residual", 0.0),
        "left_out": table.left_out,
        "nodes": nodes,
        "edges": edges,
    }
