"""Attention flow between many sources and all inputs: bounds, threads, progress."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from overt.tracing.maxflow.kernels import Layout, Workspace

Report = Callable[[int, int, float | None], object]

_REPORT_SECONDS = 0.2
# A rough guess, for each pair, level and node; for short work, starting threads would not pay off.
_SECONDS_PER_STEP = 1e-7
_SHORT_SECONDS = 0.008
# An estimate samples at most this many sinks, and stops after this time.
_SAMPLES = 24
_SAMPLE_SECONDS = 1.0
# Initial number of records of arcs with flow in a workspace, which grows as needed.
_RECORDS_PER_NODE = 16


class _Problem(NamedTuple):
    """The data that threads share."""

    depth: int
    n: int
    capacity: Any  # the maps, flat
    sources: Any
    sweep: bool  # whether all nodes are solved, level by level, or the pairs one by one
    row_sums: Any
    bounds: Any
    rollouts: Any
    rows: Any
    infinite: Any
    layout: Layout
    ints: Any  # initial contents of a workspace
    reals: Any
    stop: Any
    tiny: float
    near: float
    out: Any


def _check_arguments(levels: Any, sources: Any) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    levels, sources = np.asarray(levels), np.asarray(sources)
    if levels.ndim != 3 or levels.shape[1] != levels.shape[2] or 0 in levels.shape:
        raise ValueError(f"levels must have shape (depth, n, n), got {levels.shape}")
    if levels.dtype.kind not in "fiub":
        raise ValueError(f"levels must be real numbers, got {levels.dtype}")
    if sources.size == 0:
        sources = np.zeros((0, 2), dtype=np.int64)
    if sources.ndim != 2 or sources.shape[1] != 2 or sources.dtype.kind not in "iu":
        kind = f"{sources.dtype} of shape {sources.shape}"
        raise ValueError(f"sources must be integers of shape (count, 2), got {kind}")
    depth, n, _ = levels.shape
    level, node = sources.T
    wrong = np.flatnonzero((level < 1) | (level > depth) | (node < 0) | (node >= n))
    if wrong.size:
        source = f"(level {level[wrong[0]]}, node {node[wrong[0]]})"
        raise ValueError(f"source {source} is not among levels 1 … {depth} and nodes 0 … {n - 1}")
    return np.ascontiguousarray(levels, dtype=np.float64), sources.astype(np.int64)


def _bounds(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cuts that hold for any capacities, as (kind, level of the source, node).

    By source: its own column down to some level is on its side. By sink: the sink's column up to some level
    is. The two by column are for whole columns: the arc from (1, i) to the sink, or the arc from the source
    into the sink's column, is still to be added.
    """
    rows, rows_rest, columns, columns_rest = sums
    depth, n = rows.shape
    bounds = np.full((4, depth + 1, n), np.inf)
    by_source, by_sink, by_source_column, by_sink_column = bounds
    by_source[1] = rows[0]
    by_source_column[1] = by_sink_column[1] = 0.0
    for level in range(2, depth + 1):
        at, below = level - 1, level - 2
        by_source[level] = np.minimum(rows[at], rows_rest[at] + by_source[level - 1])
        by_source_column[level] = by_source_column[level - 1] + rows_rest[at]
        by_sink[level] = np.minimum(by_sink[level - 1], by_sink_column[level - 1] + columns[below])
        by_sink_column[level] = by_sink_column[level - 1] + columns_rest[below]
    return bounds


def _rollouts(levels: Any, row_sums: Any, sources: Any) -> NDArray[np.float64]:
    """Flows that each source can bring to the low levels: every node splits it in proportion to its arcs."""
    from overt.tracing.maxflow import kernels

    lowest = kernels.ROLLOUT_LEVELS[0]
    tall = np.unique(sources[sources[:, 0] > lowest + 1, 0])
    out = np.zeros((len(sources), len(kernels.ROLLOUT_LEVELS) if tall.size else 0, levels.shape[1]))
    for level in tall:
        group = np.flatnonzero(sources[:, 0] == level)
        carried = levels[level - 1, sources[group, 1]]
        for below in range(level - 1, lowest - 1, -1):
            if below in kernels.ROLLOUT_LEVELS:
                out[group, kernels.ROLLOUT_LEVELS.index(below)] = carried
            if below > lowest:
                row_sum, step = row_sums[below - 1], levels[below - 1]
                # Nothing through nodes without arcs; nor, for simplicity, through those with unlimited ones.
                useful = (row_sum > 0) & (row_sum < np.inf)
                share = np.minimum(carried / np.where(useful, row_sum, 1.0), 1.0) * useful
                if not useful.all():
                    step = np.where(useful[:, None], step, 0.0)
                carried = share @ step
    return out


def _infinite(levels: Any) -> NDArray[np.bool_]:
    """Whether a path of unlimited arcs leads from (level, i) to input j, as (depth, n, n)."""
    paths: NDArray[np.bool_] = np.isinf(levels)
    for level in range(1, len(paths)):
        paths[level] = paths[level].astype(np.float32) @ paths[level - 1].astype(np.float32) > 0
    return paths


def _layout(depth: int, n: int) -> tuple[Layout, int, int]:
    """Offsets of the parts of a workspace, and its numbers of integers and reals."""
    from overt.tracing.maxflow import kernels

    words = -(-n // kernels.BITS)
    top = max(depth - 1, 1)
    nodes, farthest = (top + 1) * n, top * n + 3
    bits, stacks = (top + 1) * words, {"stack_node": farthest, "stack_arc": farthest}
    # Labels last: they are sized for the worst case, and pages that are never touched cost nothing.
    ints = {
        "open_arcs": nodes * words,
        "back_arcs": nodes * words,
        "reach": bits,
        "alive": bits,
        "unseen": bits,
    }
    ints |= {"supplied": words, "cursor": nodes, **stacks, "tried": depth + 1, "failed": depth + 1}
    ints |= {"labels": farthest * bits}
    reals = {"own_arcs": nodes, "into_sink": nodes, "drain": n, "supply": n, "carried": 3 * nodes, "carry": n}
    reals |= {"leaving": nodes, "crossing": top + 1, "below": n, "here": n}
    reals |= {"stack_limit": farthest, "stack_sent": farthest}
    offsets, totals = {}, []
    for sizes, start in ((ints, kernels.STATE), (reals, 0)):
        for name, size in sizes.items():
            offsets[name] = start
            start += size
        totals.append(start)
    return kernels.Layout(n=n, words=words, **offsets), totals[0], totals[1]


def _prepare(levels: NDArray[np.float64], sources: NDArray[np.int64]) -> _Problem:
    from overt.tracing.maxflow import kernels

    depth, n = int(sources[:, 0].max()), levels.shape[1]
    levels = levels[:depth]
    capacity = levels.reshape(-1)
    level, node = sources.T
    sums = np.zeros((4, depth, n))
    bad, unlimited = kernels.survey(capacity, depth, n, sums)
    if bad:
        where = np.argwhere(~(levels >= 0))[0].tolist()
        raise ValueError(f"capacities must be ≥ 0, got {levels[tuple(where)]} at levels{where}")
    bounds = _bounds(sums)
    # No finite flow exceeds the largest of these by much; what is tiny next to it is rounding.
    columns = np.minimum(sums[2, 0], bounds[kernels.BY_SOURCE, level, node].max())
    scale = float(np.max(columns, initial=0.0, where=np.isfinite(columns)))
    if not np.isfinite(columns).all():
        scale = max(scale, float(np.max(levels, initial=0.0, where=np.isfinite(levels))))
    tiny, near = 1e-15 * scale, 1e-13 * scale

    layout, ints_size, reals_size = _layout(depth, n)
    top = max(depth - 1, 1)
    ints = np.zeros(layout.back_arcs, dtype=np.int64)
    kernels.pack(capacity, top, n, layout.words, tiny, ints[layout.open_arcs :])
    reals = np.zeros((top + 1) * n)
    reals[n:] = np.diagonal(levels[:top], axis1=1, axis2=2).reshape(-1)
    # Values of lower levels help those above; this pays off when about half of them are requested.
    sweep = depth > 2 and 2 * len(sources) > n * (depth - 1)
    rows = np.full((depth, n), -1)
    rows[level - 1, node] = np.arange(len(sources))
    infinite = _infinite(levels) if unlimited else np.zeros((0, n, n), dtype=np.bool_)
    out = np.zeros((len(sources), n))
    if unlimited:
        out[infinite[level - 1, node]] = np.inf
    return _Problem(
        depth=depth,
        n=n,
        capacity=capacity,
        sources=sources,
        sweep=sweep,
        row_sums=sums[0],
        bounds=bounds,
        rollouts=_rollouts(levels, sums[0], sources[:0] if sweep else sources),
        rows=rows,
        infinite=infinite,
        layout=layout,
        ints=(ints, ints_size),
        reals=(reals, reals_size),
        stop=np.zeros(1, dtype=np.int64),
        tiny=tiny,
        near=near,
        out=out,
    )


def _workspace(problem: _Problem) -> Workspace:
    from overt.tracing.maxflow import kernels

    depth, n = problem.depth, problem.n
    start, size = problem.ints
    ints = np.zeros(size, dtype=np.int64)
    ints[: len(start)] = start
    start, size = problem.reals
    reals = np.zeros(size)
    reals[: len(start)] = start
    record_of = np.zeros(max(depth - 1, 1) * n * n, dtype=np.int32)
    records = _RECORDS_PER_NODE * depth * n + 64
    edge_of, left, flow = np.empty(records, dtype=np.int64), np.empty(records), np.empty(records)
    return kernels.Workspace(ints, reals, record_of, edge_of, left, flow)


def _run(problem: _Problem, space: Workspace, first: int, last: int) -> Workspace:
    """Solve for the sinks first … last − 1 on this thread; returns the workspace, which may have grown."""
    from overt.tracing.maxflow import kernels

    p = problem
    while first < last:
        start = (space, p.layout, p.capacity, p.stop, p.bounds)
        rest = (p.tiny, p.near, first, last, p.out)
        if p.sweep:
            first = kernels.by_sink(*start, p.infinite, p.rows, *rest)
        else:
            first = kernels.by_source(*start, p.rollouts, p.sources, *rest)
        if space.ints[kernels.STATUS] == kernels.STOPPED:
            break
        if space.ints[kernels.STATUS] == kernels.FULL:
            size = 4 * len(space.left)
            edge_of, left, flow = np.empty(size, dtype=np.int64), np.empty(size), np.empty(size)
            space = space._replace(edge_of=edge_of, left=left, flow=flow)
    return space


def _cores() -> int:
    count = getattr(os, "process_cpu_count", None)  # Python 3.13
    if count is not None:
        return int(count() or 1)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _guess(problem: _Problem) -> float:
    return _SECONDS_PER_STEP * len(problem.sources) * problem.n * problem.depth * problem.n


def _thread_count(threads: int | None, problem: _Problem) -> int:
    if threads is None:
        threads = 1 if _guess(problem) < _SHORT_SECONDS else _cores()
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    return min(threads, problem.n)


def _work(problem: _Problem, space: Workspace, chunks: Iterator[range], lock: threading.Lock) -> None:
    while not problem.stop[0]:
        with lock:
            chunk = next(chunks, None)
        if chunk is None:
            return
        space = _run(problem, space, chunk.start, chunk.stop)


def _run_threads(problem: _Problem, threads: int, report: Report | None) -> None:
    """Distribute the sinks over threads; this thread only waits, reports, and passes on an interruption."""
    from overt.tracing.maxflow import kernels

    n, per_sink = problem.n, len(problem.sources)
    step = max(1, min(8, n // (8 * threads)))
    chunks = iter([range(first, min(first + step, n)) for first in range(0, n, step)])
    lock = threading.Lock()
    spaces = [_workspace(problem) for _ in range(threads)]
    start = time.monotonic()
    with ThreadPoolExecutor(threads, thread_name_prefix="attention-flow") as pool:
        try:
            futures = [pool.submit(_work, problem, space, chunks, lock) for space in spaces]
            while wait(futures, timeout=_REPORT_SECONDS).not_done:
                if report is not None:
                    done = sum(int(space.ints[kernels.DONE]) for space in spaces)
                    seconds = (time.monotonic() - start) * (n - done) / done if done else None
                    report(done * per_sink, n * per_sink, seconds)
        finally:
            problem.stop[0] = 1  # nothing to stop unless an exception is on its way: Ctrl-C, or from `report`
        for future in futures:
            future.result()


def solve(
    levels: Any, sources: Any, *, threads: int | None = None, report: Report | None = None
) -> NDArray[np.float64]:
    """Maximum flow from each source to each input, each pair separately.

    Args:
        levels: capacities ≥ 0 of shape (depth, n, n); `levels[l − 1][i, j]` is that of the edge from node
            (l, i) to node (l − 1, j). Inputs are the nodes (0, j). Rows may have any sum; `np.inf` is an edge
            without a limit.
        sources: integers of shape (count, 2), each a (level 1 … depth, node).
        threads: how many to use; None for one per core, or a single one if the work is short.
        report: called from this thread as report(pairs done, pairs in all, seconds left or None), a few
            times a second and once at the end. An exception that it raises stops the work and propagates.

    Returns:
        Flows of shape (count, n), `np.inf` where an unlimited path leads to the input. Sums are in
        float64: the error of a result is at most about 1e-13 of the largest flow.
    """
    levels, sources = _check_arguments(levels, sources)
    if len(sources) == 0:
        return np.zeros((0, levels.shape[1]))
    distinct, inverse = np.unique(sources, axis=0, return_inverse=True)
    problem = _prepare(levels, distinct)
    count = _thread_count(threads, problem)
    if problem.tiny == 0.0:
        pass  # nothing flows: a source or all inputs without arcs
    elif count == 1 and _guess(problem) < _SHORT_SECONDS:
        _run(problem, _workspace(problem), 0, problem.n)
    else:
        _run_threads(problem, count, report)
    if report is not None:
        report(problem.out.size, problem.out.size, 0.0)
    flows: NDArray[np.float64] = problem.out[inverse.reshape(-1)]
    return flows


def compiled() -> bool:
    """Whether the solver is compiled, in this process or in the cache of an earlier one."""
    from overt.tracing.maxflow import kernels

    if kernels.by_source.signatures:
        return True
    folder = Path(kernels.__file__).parent / "__pycache__"
    return any(
        folder.glob("kernels.by_source*.nbc")
    )  # numba may keep its cache elsewhere, which is not looked up


def _spread(count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) that cover it evenly, however many of them are used."""
    return np.arange(1.0, count + 1.0) * 0.6180339887498949 % 1.0


def _mean_seconds(problems: list[_Problem]) -> float | None:
    """Mean time of a sink in each of these problems; None if time ran out before the first was done."""
    stop, n = problems[0].stop, problems[0].n
    space = _workspace(problems[0])
    timer = threading.Timer(_SAMPLE_SECONDS, stop.fill, (1,))
    timer.start()
    seconds = []
    try:
        for problem, at in zip(problems, _spread(len(problems)), strict=True):
            start = time.perf_counter()
            sink = int(at * n)
            space = _run(problem, space, sink, sink + 1)
            if stop[0]:
                break
            seconds.append(time.perf_counter() - start)
    finally:
        timer.cancel()
        timer.join()
        stop[0] = 0
    return sum(seconds) / len(seconds) if seconds else None


def estimate(levels: Any, sources: Any, threads: int | None = None) -> float:
    """Seconds that `solve` will take, from a sample of its work spread over sinks, levels and nodes.

    Takes a second or two itself at most, and less if the work is short; compilation is not counted.
    """
    levels, sources = _check_arguments(levels, sources)
    if len(sources) == 0:
        return 0.0
    solve(np.ones((3, 1, 1)), [[3, 0]], threads=1)  # compiled, or loaded, before the clock starts
    distinct = np.unique(sources, axis=0)
    start = time.perf_counter()
    problem = _prepare(levels, distinct)
    prepared = time.perf_counter() - start
    count = _thread_count(threads, problem)
    if problem.tiny == 0.0:
        return prepared
    seconds = None
    if problem.sweep:
        solve(np.ones((3, 1, 1)), [[1, 0], [2, 0], [3, 0]], threads=1)
        seconds = _mean_seconds([problem] * _SAMPLES)
    if seconds is None:
        # Each sampled source is a separate problem on the same maps.
        picks = np.unique((_spread(_SAMPLES) * len(distinct)).astype(np.int64))
        rolled = _rollouts(levels, problem.row_sums, distinct[picks])
        single = [
            problem._replace(
                sweep=False,
                sources=distinct[pick : pick + 1],
                rollouts=rolled[at : at + 1],
                out=problem.out[pick : pick + 1],
            )
            for at, pick in enumerate(picks)
        ]
        repeats = -(-_SAMPLES // len(single))
        seconds = (_mean_seconds(single * repeats) or _SAMPLE_SECONDS) * len(distinct)
    return prepared + seconds * problem.n / count
