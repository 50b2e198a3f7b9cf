"""Operations on the edges of a graph, in memory linear in the number of edges (aggregation: of nodes)."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from overt.mechanisms.backend import EDGE_LOOPS, unfit
from overt.mechanisms.loops import eager, loops, run_threaded


def edge_log_softmax(scores: Tensor, target: Tensor, nodes: int, off: str | None = None) -> Tensor:
    """Log-softmax of scores (edges, heads) over the edges that share a target node."""
    return _softmax(scores, target, nodes, True, off)


def edge_softmax(scores: Tensor, target: Tensor, nodes: int, off: str | None = None) -> Tensor:
    """Softmax of scores (edges, heads) over the edges that share a target node.

    Here and below, `off` is the reason to use the plain operations (`Chain.switched_off`).
    """
    return _softmax(scores, target, nodes, False, off)


def _softmax(scores: Tensor, target: Tensor, nodes: int, log: bool, off: str | None) -> Tensor:
    if scores.dim() != 2 or target.is_floating_point():
        shapes = f"{tuple(scores.shape)} and {target.dtype}"
        raise ValueError(f"scores must have shape (edges, heads) and targets an integer dtype, got {shapes}")
    kernels = loops_for(scores, off=off)
    gpu = scores.device.type != "cpu" and eager() and off is None
    if kernels is not None or gpu:
        return _EdgeSoftmax.apply(scores, target, nodes, kernels, log)  # type: ignore[no-any-return, no-untyped-call]
    log_weights = log_softmax_definition(scores, target, nodes)
    return log_weights if log else log_weights.exp()


def log_softmax_definition(scores: Tensor, target: Tensor, nodes: int) -> Tensor:
    """`edge_log_softmax` in plain operations."""
    index = target.view(-1, 1).expand_as(scores)
    top = scores.new_full((nodes, scores.shape[1]), float("-inf"))
    top = top.scatter_reduce(0, index, scores.detach(), "amax")
    shifted = scores - top.gather(0, index)
    total = scores.new_zeros(nodes, scores.shape[1]).scatter_add(0, index, shifted.exp())
    return shifted - total.gather(0, index).log()


def aggregate(
    weights: Tensor, values: Tensor, source: Tensor, target: Tensor, nodes: int, off: str | None = None
) -> Tensor:
    """Σ of weights·values over the edges into each node: (nodes, heads, dim).

    Args:
        weights: (edges, heads).
        values: (source nodes, heads, dim).
        source: (edges,).
        target: (edges,).
        nodes: number of target nodes.
        off: the reason to use the plain operations, if any.
    """
    kernels = loops_for(values, off=off)
    matching = weights.dtype == values.dtype and weights.shape == (source.shape[0], values.shape[1])
    if kernels is not None and matching and values.dim() == 3:  # else torch broadcasts, or raises an error
        return _Aggregate.apply(weights, values, source, target, nodes, kernels)  # type: ignore[no-any-return, no-untyped-call]
    messages = weights.unsqueeze(-1) * values.index_select(0, source)
    return messages.new_zeros(nodes, *values.shape[1:]).index_add(0, target, messages)


def check_ends(ends: Tensor, count: int, edges: int) -> None:
    """Refuse edges to nodes that do not exist; GPUs check their indices themselves."""
    if ends.shape != (edges,):
        raise ValueError(f"{edges} edges need as many ends, got shape {tuple(ends.shape)}")
    if ends.device.type != "cpu" or ends.numel() == 0 or torch.compiler.is_compiling():
        return
    if not 0 <= int(ends.min()) <= int(ends.max()) < count:
        span = f"{int(ends.min())} … {int(ends.max())}"
        raise ValueError(f"edge_index must number nodes from 0 to {count - 1}, got {span}")


def loops_for(values: Tensor, name: str = "_edges_numba", off: str | None = None) -> ModuleType | None:
    """A module of compiled loops where they apply (`backend.unfit`), else None."""
    return loops(name) if unfit(EDGE_LOOPS, values, off=off) is None else None


class _EdgeSoftmax(torch.autograd.Function):
    """Softmax or log-softmax over edges with a short backward pass; on a CPU, by compiled loops.

    Exponentials are torch's, which are faster than a compiled loop's.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, target: Tensor, nodes: int, kernels: ModuleType | None, log: bool
    ) -> Tensor:
        ctx.nodes, ctx.kernels, ctx.log = nodes, kernels, log
        if kernels is None:
            out = log_softmax_definition(scores, target, nodes)
            out = out if log else out.exp_()
            ctx.save_for_backward(out, target)
            return out
        check_ends(target, nodes, scores.shape[0])  # a compiled loop does not check where it writes
        scores, target = scores.detach().contiguous(), target.contiguous()
        out = torch.empty_like(scores)
        share = partial(run_threaded, nodes, out.numel())
        share(kernels.below_top, scores, target, out)
        if log:
            share(kernels.take_log_sum, target, out.exp(), out)
        else:
            share(kernels.divide_by_sum, target, out.exp_())
        ctx.save_for_backward(out, target)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, target = ctx.saved_tensors
        # Second-order gradients need plain operations, which are differentiable.
        if ctx.kernels is None or torch.is_grad_enabled():
            return _softmax_gradient(weights, gradient, target, ctx.nodes, ctx.log), None, None, None, None
        out = torch.empty_like(weights)
        run = ctx.kernels.log_softmax_backward if ctx.log else ctx.kernels.softmax_backward
        weights = weights.exp() if ctx.log else weights
        run_threaded(ctx.nodes, out.numel(), run, weights, gradient.contiguous(), target, out)
        return out, None, None, None, None


def _softmax_gradient(weights: Tensor, gradient: Tensor, target: Tensor, nodes: int, log: bool) -> Tensor:
    """The gradient of a softmax over edges, or of its logarithm, in differentiable operations."""
    part = gradient if log else weights * gradient
    total = part.new_zeros(nodes, part.shape[1]).index_add(0, target, part).index_select(0, target)
    return gradient - weights.exp() * total if log else weights * (gradient - total)


class _Aggregate(torch.autograd.Function):
    """`aggregate` by compiled loops, which store no messages."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        values: Tensor,
        source: Tensor,
        target: Tensor,
        nodes: int,
        kernels: ModuleType,
    ) -> Tensor:
        check_ends(source, values.shape[0], weights.shape[0])
        check_ends(target, nodes, weights.shape[0])
        ctx.kernels = kernels
        ctx.save_for_backward(weights, values, source, target)
        return _sums(kernels, weights, values, source, target, nodes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights, values, source, target = ctx.saved_tensors
        if torch.is_grad_enabled():
            to_weights = (gradient.index_select(0, target) * values.index_select(0, source)).sum(dim=-1)
            to_values = aggregate(weights, gradient, target, source, values.shape[0])
            return to_weights, to_values, None, None, None, None
        # The gradient of the sources is the same sum along reversed edges.
        to_values = _sums(ctx.kernels, weights, gradient, target, source, values.shape[0])
        to_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
        run = ctx.kernels.aggregate_to_weights
        parts = _contiguous(values, source, target, gradient)
        run_threaded(gradient.shape[0], weights.numel(), run, *parts, to_weights)
        return to_weights, to_values, None, None, None, None


def _sums(
    kernels: ModuleType, weights: Tensor, values: Tensor, source: Tensor, target: Tensor, nodes: int
) -> Tensor:
    out = values.new_zeros(nodes, *values.shape[1:])
    parts = _contiguous(weights, values, source, target)
    run_threaded(nodes, weights.numel(), kernels.aggregate_forward, *parts, out)
    return out


def _contiguous(*parts: Tensor) -> list[Tensor]:
    return [part.detach().contiguous() for part in parts]
