"""Attention on graphs: PyG layers with mechanisms, the paper's network, and tracing (needs `overt[graphs]`).

`GATConv` and `GATv2Conv` are PyG's layers with `Bayesian` and `Evolving` weights; `GAT` is the two-layer
network of Fan et al. 2020; `trace` records which neighbours a node draws on; `plot_neighbours` plots them.
"""

from overt.models.gat import GAT
from overt.models.graph_attention import GATConv, GATv2Conv
from overt.tracing.node_tracer import trace_nodes as trace
from overt.tracing.nodes import Neighbours, NodeTrace
from overt.view.neighbourhood import page_data
from overt.view.nodes import plot_neighbours

__all__ = ["GAT", "GATConv", "GATv2Conv", "Neighbours", "NodeTrace", "page_data", "plot_neighbours", "trace"]
