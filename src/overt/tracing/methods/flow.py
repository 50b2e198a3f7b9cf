"""Attention flow (Abnar & Zuidema 2020): maximum flows over the maps, by an exact solver."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from overt import _check
from overt.tracing.edges import Walk
from overt.tracing.levels import Levels
from overt.tracing.methods.method import Cost, Method, MethodRequest, register_method
from overt.tracing.options import Arguments, Options
from overt.tracing.progress import watching

Array: TypeAlias = "np.ndarray[Any, Any]"

MOST_CELLS = 2**23  # of the levels held at once, in float64, unless those of one example are more


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
    tops = [levels.level_of(layer) for layer in request.layers]
    places = [levels.first + query for query in request.queries]
    passing = float("inf") if levels.cross else 1.0
    flows = np.zeros((batch, len(tops), copies, len(places), levels.tokens))
    at_once = _at_once(levels, max(tops))
    with watching(progress, batch * (copies * len(tops) if request.each else 1)) as watch:
        solved = _Solved(watch, threads, later=batch > at_once)
        for start in range(0, batch, at_once):
            chunk = levels if batch <= at_once else levels.examples(start, start + at_once)
            stacks = chunk.stack(
                max(tops), request.below, request.residual, clip=levels.signed, passing=passing
            )
            real, out = chunk.mask.cpu().numpy(), flows[start : start + at_once]
            if not request.each:
                sources = np.array([(top, place) for top in tops for place in places])
                out[:] = solved(stacks, sources, real).reshape(out.shape)
                continue
            for number, top in enumerate(tops):
                level = chunk.level(top, "each", request.residual, clip=levels.signed, passing=passing)
                maps = level.row(range(levels.tokens)).cpu().numpy()
                sources = np.array([(top, place) for place in places])
                pairs = [(example, head) for example in range(len(stacks)) for head in range(copies)]
                for first in range(0, len(pairs), at_once):
                    example, head = np.array(pairs[first : first + at_once]).T
                    graphs = stacks[example, :top]
                    graphs[:, -1] = maps[example, head]
                    out[example, number, head] = watch(graphs, sources, real[example], threads)
    return torch.from_numpy(flows if request.each else flows[:, :, 0])


def _at_once(levels: Levels, highest: int) -> int:
    """How many examples' levels are held at once."""
    return int(max(1, MOST_CELLS // (highest * levels.tokens**2)))


def held_by_flow(levels: Levels, layer: int) -> int:
    """Bytes of the levels that flow holds at once, up to the top of a layer."""
    highest = levels.level_of(layer)
    return min(_at_once(levels, highest), len(levels.mask)) * highest * levels.tokens**2 * 8


class _Solved:
    """The solver, for one part of a batch after the other; equal graphs, such as uniform ones, only once."""

    def __init__(self, watch: Callable[..., Any], threads: int | None, later: bool) -> None:
        """Keep digests if there are parts later, whose graphs may be equal to those of earlier ones."""
        self.watch, self.threads, self.later = watch, threads, later
        self.by_digest: dict[bytes, Array] = {}

    def __call__(self, stacks: Array, sources: Array, real: Array) -> Array:
        """Flows (example, source, token) of levels (example, level, token, token)."""
        firsts, places = _distinct(stacks, real)
        digests = [_digest(stacks[first], real[first]) for first in firsts] if self.later else []
        new = [at for at, digest in enumerate(digests) if digest not in self.by_digest]
        if self.later and len(new) < len(firsts):
            if new:
                kept = [firsts[at] for at in new]
                self._add([digests[at] for at in new], self._solve(stacks[kept], sources, real[kept]))
            flows = np.stack([self.by_digest[digest] for digest in digests])
        elif len(firsts) < len(stacks):
            flows = self._solve(stacks[firsts], sources, real[firsts])
            self._add(digests, flows)
        else:
            flows = self._solve(stacks, sources, real)
            self._add(digests, flows)
        return flows if len(firsts) == len(stacks) else flows[places]

    def _solve(self, stacks: Array, sources: Array, real: Array) -> Array:
        flows: Array = self.watch(stacks, sources, real, self.threads)
        return flows

    def _add(self, digests: list[bytes], flows: Array) -> None:
        self.by_digest.update(zip(digests, flows, strict=bool(digests)))


def _distinct(stacks: Array, real: Array) -> tuple[list[int], list[int]]:
    """The first of each set of equal graphs, and for each graph, the number of its set."""
    if len(stacks) == 1:
        return [0], [0]
    # Nearly all graphs differ in what the columns of the first level add up to, which is quick to compute.
    keys = [sums.tobytes() for sums in stacks[:, 0].sum(axis=1)]
    firsts: list[int] = []
    places: list[int] = []
    sets: dict[bytes, list[int]] = {}  # numbers of the sets of these sums
    for example, key in enumerate(keys):
        for number in sets.setdefault(key, []):
            first = firsts[number]
            if np.array_equal(real[first], real[example]) and np.array_equal(stacks[first], stacks[example]):
                places.append(number)
                break
        else:
            sets[key].append(len(firsts))
            places.append(len(firsts))
            firsts.append(example)
    return firsts, places


def _digest(stack: Array, real: Array) -> bytes:
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
