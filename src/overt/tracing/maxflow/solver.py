"""Attention flow between many sources and all inputs of one graph or many: checks, threads, progress."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from overt.tracing.maxflow.kernels import Workspace

Report = Callable[[int, int, float | None], object]

_REPORT_SECONDS = 0.2
# A rough guess, for each pair, level and node; for short work, starting threads would not pay off.
_SECONDS_PER_STEP = 1e-7
_SHORT_SECONDS = 0.008
_CHUNK_SECONDS = 0.05  # of guessed work that a thread takes at once
_HERE_SECONDS = (
    0.1  # of guessed work for one thread that is done without another, so that Ctrl-C waits for it
)
# An estimate samples at most this many sinks, and stops after this time.
_SAMPLES = 24
_SAMPLE_SECONDS = 1.0
# Initial number of records of arcs with flow in a workspace, which grows as needed.
_RECORDS_PER_NODE = 16


class _Batch(NamedTuple):
    """The data that threads share."""

    levels: NDArray[np.float64]  # (example, level, token, token)
    real: NDArray[np.bool_]  # (example, token)
    sources: NDArray[np.int64]  # (count, 2), none twice
    depth: int  # the highest level among them
    padded: bool
    stop: NDArray[np.int64]
    out: NDArray[np.float64]  # (example, count, token)


class _Chunk(NamedTuple):
    """What a thread takes at once: some examples, or some sinks of one."""

    example: int
    end: int
    first: int
    last: int


def _check_arguments(levels: Any, sources: Any) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Levels (…, depth, n, n) and sources as they are used, after checking values other than capacities."""
    sources = np.asarray(sources)
    if levels.dtype.kind not in "fiub":
        raise ValueError(f"levels must be real numbers, got {levels.dtype}")
    if sources.size == 0:
        sources = np.zeros((0, 2), dtype=np.int64)
    if sources.ndim != 2 or sources.shape[1] != 2 or sources.dtype.kind not in "iu":
        kind = f"{sources.dtype} of shape {sources.shape}"
        raise ValueError(f"sources must be integers of shape (count, 2), got {kind}")
    depth, n = levels.shape[-3:-1]
    level, node = sources.T
    wrong = np.flatnonzero((level < 1) | (level > depth) | (node < 0) | (node >= n))
    if wrong.size:
        source = f"(level {level[wrong[0]]}, node {node[wrong[0]]})"
        raise ValueError(f"source {source} is not among levels 1 … {depth} and nodes 0 … {n - 1}")
    return np.ascontiguousarray(levels, dtype=np.float64), sources.astype(np.int64)


def _single(levels: Any) -> Any:
    levels = np.asarray(levels)
    if levels.ndim != 3 or levels.shape[1] != levels.shape[2] or 0 in levels.shape:
        raise ValueError(f"levels must have shape (depth, n, n), got {levels.shape}")
    return levels


def _distinct(sources: NDArray[np.int64], n: int) -> tuple[NDArray[np.int64], Any]:
    """Each source once, and where to find each of those given; None for in the same place."""
    codes = sources[:, 0] * n + sources[:, 1]
    if (codes[1:] > codes[:-1]).all():
        return sources, None
    codes, inverse = np.unique(codes, return_inverse=True)
    return np.stack([codes // n, codes % n], axis=1), inverse.reshape(-1)


def batch_of(levels: NDArray[np.float64], real: NDArray[np.bool_], sources: NDArray[np.int64]) -> _Batch:
    """What `run_here` runs, as checked by `solve_batch`: sources come once each."""
    return _Batch(
        levels=levels,
        real=real,
        sources=sources,
        depth=int(sources[:, 0].max()),
        padded=not real.all(),
        stop=np.zeros(1, dtype=np.int64),
        out=np.zeros((len(levels), len(sources), levels.shape[-1])),
    )


def _workspace(batch: _Batch) -> Workspace:
    from overt.tracing.maxflow import kernels

    depth, n = batch.depth, batch.levels.shape[-1]
    at = kernels.layout(depth, n, len(batch.sources))
    records = _RECORDS_PER_NODE * depth * n + 64
    return kernels.Workspace(
        ints=np.zeros(at.ints, dtype=np.int64),
        reals=np.zeros(at.reals),
        compact=np.empty(depth * n * n if batch.padded else 0),
        record_of=np.zeros(max(depth - 1, 1) * n * n, dtype=np.int32),
        edge_of=np.empty(records, dtype=np.int64),
        left=np.empty(records),
        flow=np.empty(records),
    )


def _run(batch: _Batch, space: Workspace, chunk: _Chunk) -> Workspace:
    """Do a chunk on this thread; returns the workspace, which may have grown."""
    from overt.tracing.maxflow import kernels

    example, first = chunk.example, chunk.first
    while example < chunk.end:
        example = kernels.run(
            space,
            batch.levels,
            batch.real,
            batch.sources,
            batch.depth,
            batch.stop,
            example,
            chunk.end,
            first,
            chunk.last,
            batch.out,
        )
        first = int(space.ints[kernels.SINK])
        status = space.ints[kernels.STATUS]
        if status == kernels.STOPPED:
            break
        if status == kernels.BAD:
            raise ValueError(_bad_cell(batch, example))
        if status == kernels.FULL:
            size = 4 * len(space.left)
            edge_of, left, flow = np.empty(size, dtype=np.int64), np.empty(size), np.empty(size)
            space = space._replace(edge_of=edge_of, left=left, flow=flow)
    return space


def run_here(batch: _Batch) -> None:
    """Solve a batch on this thread, in one call of compiled code that Ctrl-C does not interrupt."""
    _run(batch, _workspace(batch), _Chunk(0, len(batch.levels), 0, batch.levels.shape[-1]))


def _bad_cell(batch: _Batch, example: int) -> str:
    levels, real = batch.levels[example], batch.real[example]
    where = np.argwhere(~(levels >= 0) & real & real[:, None])[0].tolist()
    whose = f" of example {example}" if len(batch.levels) > 1 else ""
    return f"capacities must be ≥ 0, got {levels[tuple(where)]} at levels{where}{whose}"


def _cores() -> int:
    count = getattr(os, "process_cpu_count", None)  # Python 3.13
    if count is not None:
        return int(count() or 1)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _guess(batch: _Batch) -> float:
    """A guess of the seconds that an example takes."""
    n = batch.levels.shape[-1]
    return float(_SECONDS_PER_STEP * len(batch.sources) * n * batch.depth * n)


def _thread_count(threads: int | None, batch: _Batch) -> int:
    examples, _, _, n = batch.levels.shape
    if threads is None:
        threads = 1 if examples * _guess(batch) < _SHORT_SECONDS else _cores()
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    return min(threads, int(examples * n))


def _splits(batch: _Batch, threads: int) -> bool:
    """Whether threads share the sinks of an example: there are few examples, and they are long."""
    return threads > 1 and len(batch.levels) < 4 * threads and _guess(batch) >= _SHORT_SECONDS


def _chunks(batch: _Batch, threads: int) -> list[_Chunk]:
    examples, _, _, n = batch.levels.shape
    if _splits(batch, threads) or examples == 1:
        step = max(1, min(8, n // (8 * threads)))
        starts = range(0, n, step)
        return [_Chunk(e, e + 1, first, min(first + step, n)) for e in range(examples) for first in starts]
    step = max(1, min(examples // (8 * threads), int(_CHUNK_SECONDS / _guess(batch))))
    return [_Chunk(e, min(e + step, examples), 0, n) for e in range(0, examples, step)]


def _work(batch: _Batch, space: Workspace, chunks: Iterator[_Chunk], lock: threading.Lock) -> None:
    while not batch.stop[0]:
        with lock:
            chunk = next(chunks, None)
        if chunk is None:
            return
        space = _run(batch, space, chunk)


def _run_threads(batch: _Batch, threads: int, report: Report | None) -> None:
    """Distribute the work over threads; this thread only waits, reports, and passes on an interruption."""
    from overt.tracing.maxflow import kernels

    sinks, per_sink = int(batch.real.sum()), len(batch.sources)
    chunks = iter(_chunks(batch, threads))
    lock = threading.Lock()
    spaces = [_workspace(batch) for _ in range(threads)]
    start = time.monotonic()
    with ThreadPoolExecutor(threads, thread_name_prefix="attention-flow") as pool:
        try:
            futures = [pool.submit(_work, batch, space, chunks, lock) for space in spaces]
            while (state := wait(futures, timeout=_REPORT_SECONDS, return_when=FIRST_EXCEPTION)).not_done:
                for future in state.done:
                    future.result()  # bad capacities, which stop the others too
                if report is not None:
                    done = sum(int(space.ints[kernels.DONE]) for space in spaces)
                    seconds = (time.monotonic() - start) * (sinks - done) / done if done else None
                    report(done * per_sink, sinks * per_sink, seconds)
        finally:
            batch.stop[0] = 1  # nothing to stop unless an exception is on its way: Ctrl-C, or from `report`
        for future in futures:
            future.result()


def solve(
    levels: Any, sources: Any, *, threads: int | None = None, report: Report | None = None
) -> NDArray[np.float64]:
    """Maximum flow from each source to each input of one graph, each pair separately.

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
    flows = solve_batch(_single(levels)[None], sources, threads=threads, report=report)
    single: NDArray[np.float64] = flows[0]
    return single


def solve_batch(
    levels: Any,
    sources: Any,
    real: Any = None,
    *,
    threads: int | None = None,
    report: Report | None = None,
) -> NDArray[np.float64]:
    """`solve` for many graphs at once, from the same sources; small ones take no Python each.

    Args:
        levels: capacities of shape (batch, depth, n, n), as for `solve`.
        sources: as for `solve`.
        real: boolean (batch, n), False at padding, nodes that a graph does not have: edges to and from them
            are ignored, and so are sources that are padding. None for graphs that have all nodes.
        threads: as for `solve`; they share the graphs, or the inputs of a graph where graphs are few.
        report: as for `solve`, counting the pairs of all graphs.

    Returns:
        Flows of shape (batch, count, n), zero at padding.
    """
    levels = np.asarray(levels)
    if levels.ndim != 4 or levels.shape[2] != levels.shape[3] or 0 in levels.shape:
        raise ValueError(f"levels must have shape (batch, depth, n, n), got {levels.shape}")
    levels, sources = _check_arguments(levels, sources)
    examples, _, n, _ = levels.shape
    kept = np.ones((examples, n), dtype=np.bool_) if real is None else np.ascontiguousarray(real)
    if kept.shape != (examples, n) or kept.dtype != np.bool_:
        kind = f"{kept.dtype} of shape {kept.shape}"
        raise ValueError(f"real must be boolean of shape {(examples, n)}, got {kind}")
    if len(sources) == 0:
        return np.zeros((examples, 0, n))
    distinct, places = _distinct(sources, n)
    batch = batch_of(levels, kept, distinct)
    count = _thread_count(threads, batch)
    if count == 1 and examples * _guess(batch) < _HERE_SECONDS:
        run_here(batch)
    elif batch.padded and _splits(batch, count):
        _solve_long(batch, count, report)
    else:
        _run_threads(batch, count, report)
    if report is not None:
        pairs = int(kept.sum()) * len(distinct)
        report(pairs, pairs, 0.0)
    return batch.out if places is None else batch.out[:, places]


def _solve_long(batch: _Batch, threads: int, report: Report | None) -> None:
    """Solve long examples with padding one after the other, so that threads share a copy without it."""
    whole, before = int(batch.real.sum()), 0
    for levels, real, out in zip(batch.levels, batch.real, batch.out, strict=True):
        kept = np.flatnonzero(real)
        rows = np.flatnonzero(real[batch.sources[:, 1]])
        if rows.size:
            nodes = np.searchsorted(kept, batch.sources[rows, 1])
            sources = np.stack([batch.sources[rows, 0], nodes], axis=1)
            levels = levels[: batch.depth, kept][:, :, kept]
            partial = _partial(report, before, len(kept), whole, len(batch.sources))
            out[np.ix_(rows, kept)] = solve(levels, sources, threads=threads, report=partial)
        before += len(kept)


def _partial(report: Report | None, before: int, sinks: int, whole: int, per_sink: int) -> Report | None:
    """A report on one example as one on the batch; so many sinks are before it, in it, and in all."""
    if report is None:
        return None
    on_batch = report

    def on_example(done: int, total: int, seconds: float | None) -> None:
        del seconds
        so_far = before + int(sinks * done / total)
        if so_far < whole:  # the last report is that of the batch
            on_batch(so_far * per_sink, whole * per_sink, None)

    return on_example


def compiled() -> bool:
    """Whether the solver is compiled, in this process or in the cache of an earlier one."""
    from overt.tracing.maxflow import kernels

    if kernels.run.signatures:
        return True
    folder = Path(kernels.__file__).parent / "__pycache__"
    return any(folder.glob("kernels.run-*.nbc"))  # numba may keep its cache elsewhere, which is not looked up


def _spread(count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1) that cover it evenly, however many of them are used."""
    return np.arange(1.0, count + 1.0) * 0.6180339887498949 % 1.0


def _mean_seconds(batches: Sequence[tuple[_Batch, Workspace]]) -> float | None:
    """Mean time of a sink in each of these; None if time ran out before the first was done."""
    stop, n = batches[0][0].stop, batches[0][0].levels.shape[-1]
    timer = threading.Timer(_SAMPLE_SECONDS, stop.fill, (1,))
    timer.start()
    seconds = []
    try:
        for (batch, space), at in zip(batches, _spread(len(batches)), strict=True):
            sink = int(at * n)
            _run(batch, space, _Chunk(0, 1, 0, 0))  # prepares it, if it is not yet
            start = time.perf_counter()
            _run(batch, space, _Chunk(0, 1, sink, sink + 1))
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
    from overt.tracing.maxflow import kernels

    levels, sources = _check_arguments(_single(levels), sources)
    if len(sources) == 0:
        return 0.0
    solve(np.ones((3, 1, 1)), [[3, 0]], threads=1)  # compiled, or loaded, before the clock starts
    n = levels.shape[-1]
    distinct, _ = _distinct(sources, n)
    whole = batch_of(levels[None], np.ones((1, n), dtype=np.bool_), distinct)
    count = _thread_count(threads, whole)
    start = time.perf_counter()
    space = _run(whole, _workspace(whole), _Chunk(0, 1, 0, 0))
    prepared = time.perf_counter() - start
    seconds = None
    if kernels.sweeps(whole.depth, n, len(distinct)):
        seconds = _mean_seconds([(whole, space)] * _SAMPLES)
    if seconds is None:
        # Each sampled source is a separate problem on the same maps.
        picks = np.unique((_spread(_SAMPLES) * len(distinct)).astype(np.int64))
        picks = picks[: max(4, int(_SAMPLE_SECONDS / max(prepared, 1e-6)))]
        single = [whole._replace(sources=distinct[pick : pick + 1]) for pick in picks]
        pairs = [(batch, _workspace(batch)) for batch in single]
        repeats = -(-_SAMPLES // len(pairs))
        seconds = (_mean_seconds(pairs * repeats) or _SAMPLE_SECONDS) * len(distinct)
    return float(prepared + seconds * n / count)
