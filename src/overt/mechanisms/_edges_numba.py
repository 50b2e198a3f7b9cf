"""Softmax and sums over the edges of a graph as compiled loops on the CPU; `edges.py` has the definitions.

Edges may come in any order: a softmax keeps one row of heads per target node, so nothing is sorted. Every
loop handles only the nodes from `first` to `last`: threads that divide the nodes among them never write to
the same place, and each node's sums follow the order of the edges, however many threads there are.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from overt.mechanisms._compiled import compiled, compiled_loosely


@compiled
def below_top(first: int, last: int, scores: Any, target: Any, out: Any) -> None:
    """Fill out (edges, heads) with scores minus the largest score among edges that share a target."""
    edges, heads = scores.shape
    top = np.full((last - first, heads), np.float32(-np.inf))
    for e in range(edges):
        i = target[e] - first
        if 0 <= i < last - first:
            for h in range(heads):
                top[i, h] = max(top[i, h], scores[e, h])
    for e in range(edges):
        i = target[e] - first
        if 0 <= i < last - first:
            for h in range(heads):
                out[e, h] = scores[e, h] - top[i, h]


@compiled
def divide_by_sum(first: int, last: int, target: Any, out: Any) -> None:
    """Divide out (edges, heads) by its sum over the edges that share a target."""
    edges, heads = out.shape
    total = np.zeros((last - first, heads), dtype=np.float32)
    for e in range(edges):
        i = target[e] - first
        if 0 <= i < last - first:
            for h in range(heads):
                total[i, h] += out[e, h]
    for e in range(edges):
        i = target[e] - first
        if 0 <= i < last - first:
            for h in range(heads):
                out[e, h] /= total[i, h]


@compiled
def take_log_sum(first: int, last: int, target: Any, exponents: Any, out: Any) -> None:
    """Subtract from out (edges, heads) the log of the exponents' sum over the edges that share a target."""
    edges, heads = out.shape
    total = np.zeros((last - first, heads), dtype=np.float32)
    for e in range(edges):
        i = target[e] - first
        if 0 <= i < last - first:
            for h in range(heads):
                total[i, h] += exponents[e, h]
    for i in range(last - first):
        for h in range(heads):
            total[i, h] = math.log(total[i, h]) if total[i, h] != 0.0 else np.float32(0.0)
    for e in range(edges):
        i = target[e] - first
        if 0 <= i < last - first:
            for h in range(heads):
                out[e, h] -= total[i, h]


@compiled
def softmax_backward(first: int, last: int, weights: Any, gradient: Any, target: Any, out: Any) -> None:
    """Fill out (edges, heads) with w·(g − Σ w·g), the sum over the edges that share a target."""
    edges, heads = weights.shape
    total = np.zeros((last - first, heads), dtype=np.float32)
    for e in range(edges):
        i = target[e] - first
        if 0 <= i < last - first:
            for h in range(heads):
                total[i, h] += weights[e, h] * gradient[e, h]
    for e in range(edges):
        i = target[e] - first
        if 0 <= i < last - first:
            for h in range(heads):
                out[e, h] = weights[e, h] * (gradient[e, h] - total[i, h])


@compiled
def log_softmax_backward(first: int, last: int, weights: Any, gradient: Any, target: Any, out: Any) -> None:
    """Fill out (edges, heads) with g − w·Σ g, the sum over the edges that share a target."""
    edges, heads = weights.shape
    total = np.zeros((last - first, heads), dtype=np.float32)
    for e in range(edges):
        i = target[e] - first
        if 0 <= i < last - first:
            for h in range(heads):
                total[i, h] += gradient[e, h]
    for e in range(edges):
        i = target[e] - first
        if 0 <= i < last - first:
            for h in range(heads):
                out[e, h] = gradient[e, h] - weights[e, h] * total[i, h]


@compiled_loosely
def aggregate_forward(
    first: int, last: int, weights: Any, values: Any, source: Any, target: Any, out: Any
) -> None:
    """Add Σ w·v over the edges into each target to out (targets, heads, dim)."""
    edges, heads = weights.shape
    width = values.shape[2]
    for e in range(edges):
        i, j = target[e], source[e]
        if first <= i < last:
            for h in range(heads):
                weight = weights[e, h]
                for c in range(width):
                    out[i, h, c] += weight * values[j, h, c]


@compiled_loosely
def aggregate_to_weights(
    first: int, last: int, values: Any, source: Any, target: Any, gradient: Any, out: Any
) -> None:
    """Fill out (edges, heads) with the weights' gradient, from that of the output (targets, heads, dim)."""
    edges, heads = out.shape
    width = values.shape[2]
    for e in range(edges):
        i, j = target[e], source[e]
        if first <= i < last:
            for h in range(heads):
                product = np.float32(0.0)
                for c in range(width):
                    product += gradient[i, h, c] * values[j, h, c]
                out[e, h] = product
