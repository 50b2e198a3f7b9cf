"""Attention flow (Abnar & Zuidema 2020): maximum flows over the maps, by an exact solver."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overt import _check
from overt.tracing.edges import Walk
from overt.tracing.levels import Levels
from overt.tracing.methods.method import Cost, Method, MethodRequest, register_method
from overt.tracing.options import Arguments, Heads, Options
from overt.tracing.progress import watching

MOST_CELLS = 2**26  # of the levels held at once, in float64


class FlowArguments(Arguments, total=False):
    """Keyword arguments for `FlowOptions`."""

    threads: int | None
    progress: bool | None


@dataclass(frozen=True, kw_only=True)
class FlowOptions(Options):
    """The arguments of flow.

    Attributes:
        threads: of the solver; by default one per core, or a single one if the work is short.
        progress: show a progress bar; by default on a terminal if it takes more than a few seconds.
    """

    threads: int | None = None
    progress: bool | None = None


def flow_of(levels: Levels, request: MethodRequest) -> Tensor:
    """Maximum flows from each query's node to each input; negative weights are clipped, rows sum to one."""
    options = request.options
    assert isinstance(options, FlowOptions)
    threads, progress = options.threads, options.progress
    if threads is not None:
        _check.whole("threads", threads, 1)
    batch, copies = levels.mask.shape[0], levels.heads if request.each else 1
    shape = (batch, len(request.layers), copies, len(request.queries), levels.tokens)
    flows = torch.zeros(shape, dtype=torch.float64)
    solved: dict[bytes, Tensor] = {}  # equal graphs, such as uniform ones, are solved once
    highest = max(levels.level_of(layer) for layer in request.layers)
    at_once = _at_once(levels, highest)
    with watching(progress, batch * (copies * len(request.layers) if request.each else 1)) as watch:
        for start in range(0, batch, at_once):
            chunk = levels.examples(start, start + at_once)
            stacks = _stacks(chunk, request, highest)
            for number in range(stacks.shape[1]):
                example = start + number
                real = chunk.mask[number].nonzero().flatten().numpy()
                stack = stacks[:, number]
                if len(real) < levels.tokens:
                    stack = stack[:, real][:, :, real]
                stack = np.ascontiguousarray(stack)
                example_levels = chunk.examples(number, number + 1) if request.each else None
                key = _key(stack, real) if batch > 1 and not request.each else b""
                if key not in solved:
                    _solve(flows[example], stack, real, levels, request, example_levels, watch, threads)
                    solved.update({key: flows[example]} if key else {})
                else:
                    flows[example] = solved[key]
    return flows if request.each else flows.squeeze(2)


def _at_once(levels: Levels, highest: int) -> int:
    """How many examples' levels are held at once."""
    return max(1, MOST_CELLS // (highest * levels.tokens**2))


def held_by_flow(levels: Levels, layer: int) -> int:
    """Bytes of the levels that flow holds at once, up to the top of a layer."""
    highest = levels.level_of(layer)
    return min(_at_once(levels, highest), len(levels.mask)) * highest * levels.tokens**2 * 8


def _stacks(levels: Levels, request: MethodRequest, highest: int) -> np.ndarray[Any, Any]:
    """The levels of some examples, (level, example, token, token), in place: two copies may not fit."""
    stacks = np.empty((highest, levels.mask.shape[0], levels.tokens, levels.tokens))
    for number in range(highest):
        stacks[number] = _capacities(levels, number + 1, request.below, request.residual)
    return stacks


def _capacities(levels: Levels, number: int, heads: Heads, residual: float) -> np.ndarray[Any, Any]:
    passing = float("inf") if levels.cross else 1.0
    level = levels.level(number, heads, residual, clip=levels.signed, passing=passing)
    capacities: np.ndarray[Any, Any] = level.row(range(levels.tokens)).cpu().numpy()
    return capacities


def _solve(
    out: Tensor,
    stack: np.ndarray[Any, Any],
    real: np.ndarray[Any, Any],
    levels: Levels,
    request: MethodRequest,
    example_levels: Levels | None,
    watch: Callable[..., Any],
    threads: int | None,
) -> None:
    """Flows of one example into (layer, head, query, token); `example_levels` is for single heads."""
    from overt.tracing.maxflow import solve

    place = {int(token): number for number, token in enumerate(real)}
    queries = {
        number: place[levels.first + query]
        for number, query in enumerate(request.queries)
        if levels.first + query in place
    }
    if not queries:
        return
    rows, columns = torch.tensor(list(queries)), torch.from_numpy(real)

    def flows(stack: np.ndarray[Any, Any], tops: list[int]) -> Tensor:
        sources = np.array([(top, node) for top in tops for node in queries.values()], dtype=np.int64)
        values = torch.from_numpy(watch(solve, stack, sources, threads))
        return values.view(len(tops), len(queries), len(real))

    tops = [levels.level_of(layer) for layer in request.layers]
    if example_levels is None:
        out[:, 0, rows.unsqueeze(1), columns] = flows(stack, tops)
        return
    for number, top in enumerate(tops):
        top_maps = _capacities(example_levels, top, "each", request.residual)[0]
        for head in range(top_maps.shape[0]):
            part = stack[:top].copy()
            part[-1] = top_maps[head][np.ix_(real, real)]
            out[number, head, rows.unsqueeze(1), columns] = flows(part, [top])[0]


def _key(stack: np.ndarray[Any, Any], real: np.ndarray[Any, Any]) -> bytes:
    return hashlib.sha256(stack.tobytes() + real.tobytes()).digest()


def flow_over_edges(walk: Walk, request: MethodRequest) -> Tensor:
    """Over one or two layers in closed form, over more by the solver, (sample, head, place)."""
    options = request.options
    assert isinstance(options, FlowOptions)
    if options.threads is not None:
        _check.whole("threads", options.threads, 1)
    if options.progress:
        raise ValueError("flow over edges has no progress bar, got progress=True: leave it out")
    top = walk.top
    walk.check_flow()
    levels = [walk.capacities(layer, request.residual) for layer in range(top + 1)]
    source, target, cells = levels[-1]
    into_node = target == walk.place
    first = walk.summed(cells[..., into_node], source[into_node])
    if top == 0:
        return first
    if top == 1:
        # Each path has its own middle node, and is limited only by the edges above and below it.
        source, target, cells = levels[0]
        return walk.summed(torch.minimum(first[..., target], cells), source)
    from overt.tracing.maxflow import solve

    stack = np.zeros((top + 1, walk.size, walk.size))
    flows = torch.zeros_like(first)
    ends = [(target.numpy(), source.numpy()) for source, target, _ in levels]
    for sample in range(first.shape[0]):
        for head in range(first.shape[1]):
            for layer, (_, _, cells) in enumerate(levels):
                stack[layer][ends[layer]] = cells[sample, min(head, cells.shape[1] - 1)].numpy()
            values = solve(stack, [(top + 1, walk.place)], threads=options.threads)
            flows[sample, head] = torch.from_numpy(values[0])
    return flows


register_method(
    Method(
        name="flow",
        title="flow",
        reads="maps",
        run=flow_of,
        cost=Cost("a maximum flow per query and input, over all layers", every=48, most=768),
        options=FlowOptions,
        value="amount",
        signed=False,
        edges=flow_over_edges,
        holds=held_by_flow,
    )
)
