"""Tracing graph networks: hooks on PyG's layers and one forward pass give a trace of the nodes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overt import _check
from overt._extras import need
from overt._modes import evaluating
from overt.mechanisms.chain import Chain
from overt.mechanisms.mechanism import MechanismLayer
from overt.tracing.nodes import NodeTrace


class _Collector:
    """Receives each attention layer's edges and weights as it runs."""

    def __init__(self, heads: bool) -> None:
        self.heads = heads
        self.edges: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.paths: list[str] = []
        self.nodes = 0
        self.pooled = ""

    def called(self, path: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Check a layer's inputs: count the nodes, and refuse different sets of sources and targets."""
        x = arguments[0] if arguments else named.get("x")
        if isinstance(x, tuple | list):
            if len(x) != 2 or x[0] is not x[1]:
                raise ValueError(
                    f"{path} runs from one set of nodes to another (bipartite), which are numbered "
                    "separately: not supported"
                )
            x = x[0]
        if isinstance(x, Tensor):
            self.nodes = max(self.nodes, x.shape[0])

    def ran(self, path: str, layer: Any, edge_index: Any, weights: Any) -> None:
        """Keep a copy of a layer's edges and weights."""
        if self.pooled:
            raise ValueError(
                f"{path} runs after {self.pooled}, which renumbers the nodes, so hops cannot be counted: "
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
    """(2, edge), source and target, from any of the forms in which PyG takes edges."""
    utils = need("torch_geometric.utils", "graphs")
    if utils.is_sparse(edge_index):
        target, source = utils.to_edge_index(edge_index)[0]  # PyG expects such matrices transposed
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
    with ExitStack() as undo:
        undo.enter_context(evaluating(model))
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
                f"{type(model).__name__} has no graph attention to trace: no PyG layer that weights edges in "
                "edge_update, such as GATConv or GATv2Conv"
            )
        yield


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
    """Positional and keyword arguments of the model, from tensors or from one PyG Data."""
    if not inputs:
        raise ValueError(
            "inputs must be a PyG Data, or the model's arguments, such as x and edge_index; got nothing"
        )
    data = need("torch_geometric.data", "graphs")
    for value in inputs:
        if isinstance(value, dict | data.HeteroData):
            raise ValueError(
                "graphs with several kinds of nodes are not supported: inputs must be a Data or tensors, got "
                f"a {type(value).__name__}"
            )
    graph = inputs[0]
    if len(inputs) > 1 or not isinstance(graph, data.Data):
        return list(inputs), {}
    parameters = inspect.signature(model.forward).parameters
    if "edge_index" in parameters:
        return [], {name: graph[name] for name in parameters if graph.get(name) is not None}
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters.values()):
        names = ("x", "edge_index", "edge_attr")
        return [graph[name] for name in names if graph.get(name) is not None], {}
    return [graph], {}  # forward(data)


def trace_nodes(
    model: nn.Module,
    *inputs: Any,
    samples: int = 0,
    step: int = 0,
    seed: int = 0,
    heads: bool = False,
) -> NodeTrace:
    """Run a graph network once, in evaluation mode, and keep its attention over edges.

    Works with any PyG model whose layers weight edges in `edge_update`: PyG's `GATConv` and `GATv2Conv`,
    Overt's layers, and your own. Layers are assumed to be stacked in the order of their calls. In a
    mini-batch, nodes are numbered as in the inputs. The model is left unchanged, even if an error occurs.

    Args:
        model: the model.
        inputs: a PyG `Data`, or the model's positional arguments, such as x and edge_index.
        samples: number of posterior samples to draw from a Bayesian model, in addition to the pass at the
            mean of its weights, which the trace's own weights come from.
        step: step of the samples' noise, as in `Chain`.
        seed: random seed of the samples.
        heads: keep each head's weights, for `heads="each"` and lists of heads; by default only their mean.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch module, got {type(model).__name__}")
    _check.whole("samples", samples, 0)
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
                "negative: tracing such weights on graphs is not supported"
            )
    mean_pass = run(Chain(step=step, seed=seed, kl=False))
    if not mean_pass.edges:
        raise ValueError("no attention ran: nothing to trace")
    trace = NodeTrace(
        mean_pass.nodes, mean_pass.edges, mean_pass.weights, paths=mean_pass.paths, single=heads
    )
    if not samples:
        return trace
    drawn: list[list[Tensor]] = []
    for number in range(samples):
        sample = run(Chain(step=step, seed=seed, sample=number, kl=False))
        same = len(sample.edges) == len(mean_pass.edges)
        if not same or not all(map(torch.equal, sample.edges, mean_pass.edges)):
            raise ValueError("edges differ between posterior samples, so there is no spread")
        drawn.append(sample.weights)
    trace.draws = [torch.stack(layer) for layer in zip(*drawn, strict=True)]
    random = any(isinstance(module, MechanismLayer) and module.random for module in model.modules())
    if not random and all(bool((d == w).all()) for d, w in zip(trace.draws, trace.weights, strict=True)):
        raise ValueError("samples needs random weights: give the model's graph attention a Bayesian(…)")
    return trace
