"""Graph attention with mechanisms: PyG's `GATConv` and `GATv2Conv` with weights from an `EdgeMap`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt._extras import need
from overt.mechanisms import backend
from overt.mechanisms.call import EdgeCall
from overt.mechanisms.chain import Chain, around, recomputing
from overt.mechanisms.edge_map import EdgeMap
from overt.mechanisms.edges import aggregate, loops_for
from overt.mechanisms.mechanism import Mechanism
from overt.mechanisms.site import Site

need("torch_geometric", "graphs")
from torch_geometric.nn import conv  # noqa: E402
from torch_geometric.utils import add_self_loops, is_torch_sparse_tensor, remove_self_loops  # noqa: E402
from torch_geometric.utils.sparse import set_sparse_value  # noqa: E402

# The steps of PyG's message passing that a subclass may override, and those that hooks may watch.
_STEPS = ("message", "aggregate", "update", "message_and_aggregate")
_WATCHED = ("propagate", "message", "aggregate")
_HOOKS = ("_pre_hooks", "_hooks")


class _WithMap(nn.Module):
    """What both layers add to PyG's: a map, and the computation of weights from scores through it."""

    # PyG's attributes, of either class
    heads: int
    out_channels: int
    concat: bool
    dropout: float
    negative_slope: float
    add_self_loops: bool
    share_weights: bool
    fill_value: Any
    flow: str
    aggr: Any
    explain: bool | None
    bias: Tensor | None
    lin: Any
    lin_src: Any
    lin_dst: Any
    lin_l: Any
    lin_r: Any
    lin_edge: Any
    res: Any
    att: Tensor
    att_src: Tensor
    att_dst: Tensor
    att_edge: Tensor
    edge_updater: Any
    propagate: Any

    map: EdgeMap
    _plain: type
    _orig_propagate: Any

    def _make_map(self, mechanisms: Sequence[Mechanism], layer: int | None) -> None:
        # The prior's initial weights draw nothing from the global generator: with equal seeds, all other
        # weights of a network and all its dropout are those of the plain network.
        with torch.random.fork_rng(devices=[]):
            self.map = EdgeMap(mechanisms, Site(self.heads, self.out_channels, layer=layer or 0))
            self._layer = layer
            self._reset_layers()
        # PyG stores the message passing that explainers inspect per class, and takes it from the parent
        # class, where a faster form that explainers cannot inspect may have replaced it.
        type(self)._orig_propagate = conv.MessagePassing.propagate

    def _reset_layers(self) -> None:
        for layer in self.map.layers:
            layer.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise as PyG does, and the mechanisms' parameters too."""
        super().reset_parameters()  # type: ignore[misc]
        if "map" in self._modules:
            with torch.random.fork_rng(devices=[]):
                self._reset_layers()

    def _weights(
        self,
        scores: Tensor,
        source: Tensor,
        target: Tensor,
        nodes: int | None,
        key: Tensor,
        chain: Chain | None,
    ) -> Tensor:
        """Scores (edges, heads) → weights, through the mechanisms and dropout."""
        if scores.numel() == 0:
            return scores
        chain = self._chain(chain)
        layer = chain.layer_number(self) if self._layer is None else self._layer
        site = replace(self.map.site, layer=layer)
        if nodes is None:
            nodes = int(target.max()) + 1
        call = EdgeCall(site, torch.stack([source, target]), nodes, key)
        weights = self.map(scores, call, chain)
        return F.dropout(weights.to(scores.dtype), p=self.dropout, training=self.training)

    def _chain(self, chain: Chain | None) -> Chain:
        """The chain of this pass: the argument, that of the surrounding `with`, or a new one."""
        chain = chain or around()
        if chain is not None:
            return chain
        if self.map.has_mechanism and recomputing():
            raise ValueError(
                "a checkpointed layer runs again in the backward pass, outside the `with chain:`: "
                "pass it the chain, layer(x, edge_index, chain=chain)"
            )
        if self.map.reads_below:
            names = " and ".join(layer.name for layer in self.map.layers if layer.reads_below)
            raise ValueError(
                f"{names} needs a chain that joins the layers: use `with overt.Chain():` around the model, "
                "or pass chain=… to each layer"
            )
        return Chain()

    def _edge_term(self, edge_attr: Tensor | None) -> Tensor | None:
        """The edges' features, projected, (edges, heads, dim)."""
        if edge_attr is None or self.lin_edge is None:
            return None
        edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
        term: Tensor = self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
        return term

    def _add_loops(self, edge_index: Any, edge_attr: Tensor | None, nodes: int) -> tuple[Any, Tensor | None]:
        """Give each node one self-loop, as PyG does."""
        if not self.add_self_loops:
            return edge_index, edge_attr
        if not isinstance(edge_index, Tensor):
            raise TypeError(
                "edge_index must be a (2, edges) tensor or a torch sparse tensor, got "
                f"{type(edge_index).__name__}: convert it with torch_geometric.utils.to_edge_index"
            )
        edge_index, edge_attr = remove_self_loops(edge_index, edge_attr)
        looped: tuple[Any, Tensor | None] = add_self_loops(
            edge_index, edge_attr, fill_value=self.fill_value, num_nodes=nodes
        )
        return looped

    def _sum_messages(
        self,
        edge_index: Any,
        ends: tuple[Tensor, Tensor | None],
        weights: Tensor,
        size: tuple[int, int] | None,
        chain: Chain | None,
    ) -> Tensor:
        """Weighted sum of the senders' values at each receiver, (receivers, heads, dim)."""
        chain = chain or around()
        off = backend.switched_off() if chain is None else chain.switched_off
        if not self._direct(edge_index, weights) or loops_for(ends[0], off=off) is None:
            out: Tensor = self.propagate(edge_index, x=ends, alpha=weights, size=size)
            return out
        # PyG sends the first of the pair whichever way edges run; `flow` reverses the edges.
        sends, receives = (0, 1) if self.flow == "source_to_target" else (1, 0)
        counts = [None if end is None else end.shape[0] for end in ends] if size is None else size
        nodes = counts[sends] if counts[receives] is None else counts[receives]
        assert nodes is not None
        return aggregate(weights, ends[0], edge_index[sends], edge_index[receives], nodes)

    def _direct(self, edge_index: Any, weights: Tensor) -> bool:
        """Whether nothing inspects or changes PyG's message passing, so that one operation may replace it."""
        if not isinstance(edge_index, Tensor) or is_torch_sparse_tensor(edge_index):
            return False
        if weights.shape != (edge_index.shape[1], self.heads):  # a hook or a subclass changed them
            return False
        # PyG generates a `propagate` for each class, unless the class defines one.
        if not type(self).propagate.__module__.startswith((type(self).__module__ + "_", "torch_geometric.")):
            return False
        unchanged = all(getattr(type(self), name) is getattr(self._plain, name) for name in _STEPS)
        watched = any(getattr(self, f"_{name}_forward{kind}") for name in _WATCHED for kind in _HOOKS)
        return unchanged and not watched and not self.explain and self.aggr in ("add", "sum")

    def __repr__(self) -> str:
        parts = [layer.config for layer in self.map.layers]
        plain = super().__repr__()
        return f"{plain[:-1]}, mechanisms={parts})" if parts else plain

    def _finish(
        self, out: Tensor, skip: Tensor | None, edge_index: Any, weights: Tensor, returned: bool | None
    ) -> Any:
        """Join heads, add skip connection and bias, and return the weights too where requested."""
        out = out.view(-1, self.heads * self.out_channels) if self.concat else out.mean(dim=1)
        if skip is not None:
            out = out + skip
        if self.bias is not None:
            out = out + self.bias
        if not returned:
            return out
        if is_torch_sparse_tensor(edge_index):
            return out, (set_sparse_value(edge_index, weights), weights)
        return out, (edge_index, weights)


def _pair(x: Any) -> tuple[Tensor, Tensor | None]:
    """Features of sources and targets."""
    source, target = x if isinstance(x, tuple | list) else (x, x)
    for end in (source, target):
        if end is not None and end.dim() != 2:
            raise ValueError(f"x must have shape (nodes, in_channels), got {tuple(end.shape)}")
    return source, target


class GATConv(_WithMap, conv.GATConv):  # type: ignore[misc]
    """PyG's `GATConv` (Veličković et al. 2018) whose weights pass through `mechanisms`.

    Arguments, call, outputs and parameter names are PyG's; without mechanisms it computes the same. Memory is
    linear in the number of edges. The forward pass uses the `Chain` passed as an argument or else that of the
    surrounding `with chain:`; it addresses the noise and collects the KL:

    ```python
    with overt.Chain(step=epoch) as chain:
        out = model(x, edge_index)
    loss = F.cross_entropy(out[train], y[train]) + chain.penalty()
    ```

    In evaluation mode Bayesian weights are the posterior's mean, and no chain is needed. An edge's noise is
    addressed by the numbers of its two nodes, so parallel edges share theirs. Under checkpointing, pass the
    chain to the layer: what is recomputed in the backward pass runs outside the `with`.

    Args:
        in_channels: width of the inputs; a pair for sources and targets of a bipartite graph.
        out_channels: width of one head.
        heads: number of heads.
        concat: concatenate heads rather than average them.
        negative_slope: of the LeakyReLU.
        dropout: on the weights, in training.
        add_self_loops: add one self-loop per node.
        edge_dim: width of the edges' features, if they have any.
        fill_value: the self-loops' features.
        bias: whether to add a bias to the output.
        residual: add a learnt skip connection.
        mechanisms: `Bayesian(…)`, and `Evolving(beta=0)`, which mixes in the scores of the layer below.
        layer: place in the chain, from 0. None counts the calls of such layers in a forward pass.
        kwargs: further arguments of PyG's `MessagePassing`.
    """

    _plain = conv.GATConv

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        residual: bool = False,
        *,
        mechanisms: Sequence[Mechanism] = (),
        layer: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            heads,
            concat,
            negative_slope,
            dropout,
            add_self_loops,
            edge_dim,
            fill_value,
            bias,
            residual,
            **kwargs,
        )
        self._make_map(mechanisms, layer)

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None,
        return_attention_weights: bool | None = None,
        chain: Chain | None = None,
    ) -> Any:
        """As in PyG, with a chain; see the class.

        Args:
            x: (nodes, in_channels), or a pair of such tensors for sources and targets.
            edge_index: (2, edges) or a torch sparse tensor.
            edge_attr: (edges, edge_dim).
            size: numbers of source and target nodes.
            return_attention_weights: also return (edge_index, weights).
            chain: of this forward pass.
        """
        source, target = _pair(x)
        skip = None if self.res is None or target is None else self.res(target)
        if self.lin is None:
            source, target = self.lin_src(source), None if target is None else self.lin_dst(target)
        else:
            same = target is source
            source = self.lin(source)
            target = source if same else None if target is None else self.lin(target)
        source = source.view(-1, self.heads, self.out_channels)
        target = None if target is None else target.view(-1, self.heads, self.out_channels)
        alpha = (
            (source * self.att_src).sum(dim=-1),
            None if target is None else (target * self.att_dst).sum(dim=-1),
        )
        both = source.shape[0] if target is None else min(source.shape[0], target.shape[0])
        edge_index, edge_attr = self._add_loops(edge_index, edge_attr, both if size is None else min(size))
        weights = self.edge_updater(
            edge_index, alpha=alpha, edge_attr=edge_attr, size=size, key=source, chain=chain
        )
        out = self._sum_messages(edge_index, (source, target), weights, size, chain)
        return self._finish(out, skip, edge_index, weights, return_attention_weights)

    def edge_update(
        self,
        alpha_j: Tensor,
        alpha_i: Tensor | None,
        edge_attr: Tensor | None,
        edge_index_j: Tensor,
        edge_index_i: Tensor,
        size_i: int | None,
        key: Tensor,
        chain: Any,
    ) -> Tensor:
        """Weights (edges, heads); PyG calls it with node values gathered per edge."""
        scores = alpha_j if alpha_i is None else alpha_j + alpha_i
        term = self._edge_term(edge_attr)
        if term is not None:
            scores = scores + (term * self.att_edge).sum(dim=-1)
        scores = F.leaky_relu(scores, self.negative_slope)
        return self._weights(scores, edge_index_j, edge_index_i, size_i, key, chain)


class GATv2Conv(_WithMap, conv.GATv2Conv):  # type: ignore[misc]
    """PyG's `GATv2Conv` (Brody et al. 2022) whose weights pass through `mechanisms`; otherwise as `GATConv`.

    Args:
        in_channels: width of the inputs; a pair for sources and targets of a bipartite graph.
        out_channels: width of one head.
        heads: number of heads.
        concat: concatenate heads rather than average them.
        negative_slope: of the LeakyReLU.
        dropout: on the weights, in training.
        add_self_loops: add one self-loop per node.
        edge_dim: width of the edges' features, if they have any.
        fill_value: the self-loops' features.
        bias: whether projections and the output have a bias.
        share_weights: use one projection for sources and targets.
        residual: add a learnt skip connection.
        mechanisms: `Bayesian(…)`, and `Evolving(beta=0)`.
        layer: place in the chain, from 0. None counts the calls of such layers in a forward pass.
        kwargs: further arguments of PyG's `MessagePassing`.
    """

    _plain = conv.GATv2Conv

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,
        negative_slope: float = 0.2,
        dropout: float = 0.0,
        add_self_loops: bool = True,
        edge_dim: int | None = None,
        fill_value: float | Tensor | str = "mean",
        bias: bool = True,
        share_weights: bool = False,
        residual: bool = False,
        *,
        mechanisms: Sequence[Mechanism] = (),
        layer: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            heads,
            concat,
            negative_slope,
            dropout,
            add_self_loops,
            edge_dim,
            fill_value,
            bias,
            share_weights,
            residual,
            **kwargs,
        )
        self._make_map(mechanisms, layer)

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,
        chain: Chain | None = None,
    ) -> Any:
        """As in PyG, with a chain; see the class.

        Args:
            x: (nodes, in_channels), or a pair of such tensors for sources and targets.
            edge_index: (2, edges) or a torch sparse tensor.
            edge_attr: (edges, edge_dim).
            return_attention_weights: also return (edge_index, weights).
            chain: of this forward pass.
        """
        source, target = _pair(x)
        if target is None:
            raise ValueError("x must be a pair with features of the targets for GATv2 scores, got (x, None)")
        if edge_attr is not None and self.lin_edge is None:
            raise ValueError("edge_attr needs a projection: create the layer with edge_dim=…")
        skip = None if self.res is None else self.res(target)
        shared = self.share_weights and target is source
        source = self.lin_l(source).view(-1, self.heads, self.out_channels)
        target = source if shared else self.lin_r(target).view(-1, self.heads, self.out_channels)
        edge_index, edge_attr = self._add_loops(edge_index, edge_attr, min(source.shape[0], target.shape[0]))
        weights = self.edge_updater(
            edge_index, x=(source, target), edge_attr=edge_attr, size=None, key=source, chain=chain
        )
        out = self._sum_messages(edge_index, (source, target), weights, None, chain)
        return self._finish(out, skip, edge_index, weights, return_attention_weights)

    def edge_update(
        self,
        x_j: Tensor,
        x_i: Tensor,
        edge_attr: Tensor | None,
        edge_index_j: Tensor,
        edge_index_i: Tensor,
        size_i: int | None,
        key: Tensor,
        chain: Any,
    ) -> Tensor:
        """Weights (edges, heads); PyG calls it with node values gathered per edge."""
        both = x_i + x_j
        term = self._edge_term(edge_attr)
        both = both if term is None else both + term
        scores = (F.leaky_relu(both, self.negative_slope) * self.att).sum(dim=-1)
        return self._weights(scores, edge_index_j, edge_index_i, size_i, key, chain)
