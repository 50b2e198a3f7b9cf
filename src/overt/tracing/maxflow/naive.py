"""Attention flow by its definition: one maximum flow for each pair, by networkx.

Slow by design: the compiled solver is tested against it.
"""

from __future__ import annotations

from typing import Any

import networkx as nx  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray


def graph_below(levels: NDArray[np.float64], level: int) -> Any:
    """The nodes of levels 0 … level, with an edge for each positive capacity."""
    graph = nx.DiGraph()
    for below in range(level):
        graph.add_nodes_from((below, k) for k in range(levels.shape[1]))
        for i, j in np.argwhere(levels[below] > 0).tolist():
            graph.add_edge((below + 1, i), (below, j), capacity=float(levels[below, i, j]))
    return graph


def solve(levels: NDArray[np.float64], sources: Any, flow_func: Any = None) -> NDArray[np.float64]:
    """Maximum flow from each source (level, node) to each input, shape (count, n).

    `flow_func` is one of networkx's; the released code uses `edmonds_karp`.
    """
    n = levels.shape[1]
    out = np.zeros((len(sources), n))
    for s, (level, node) in enumerate(np.asarray(sources).tolist()):
        graph = graph_below(levels, level)
        graph.add_node((level, node))
        for j in range(n):
            try:
                out[s, j] = nx.maximum_flow_value(graph, (level, node), (0, j), flow_func=flow_func)
            except nx.NetworkXUnbounded:
                out[s, j] = np.inf
    return out
