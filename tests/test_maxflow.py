"""Attention flow by compiled code: the same numbers as the definition, on all sorts of maps.

`python tests/test_maxflow.py 5000` compares on that many more maps and prints the worst difference.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from overt.tracing import maxflow
from overt.tracing.maxflow import naive, solver

Maps = NDArray[np.float64]


def softmax(scores: Maps) -> Maps:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def with_residual(maps: Maps) -> Maps:
    return 0.5 * maps + 0.5 * np.eye(maps.shape[-1])


def random_maps(rng: np.random.Generator, depth: int, n: int, sharp: float = 1.0) -> Maps:
    return softmax(sharp * rng.standard_normal((depth, n, n)))


def causal(rng: np.random.Generator, depth: int, n: int) -> Maps:
    scores = rng.standard_normal((depth, n, n))
    return softmax(np.where(np.tril(np.ones((n, n), dtype=bool)), scores, -np.inf))


def one_hot(rng: np.random.Generator, depth: int, n: int) -> Maps:
    return np.eye(n)[rng.integers(0, n, (depth, n))]


def sparse(rng: np.random.Generator, depth: int, n: int) -> Maps:
    return rng.random((depth, n, n)) * (rng.random((depth, n, n)) < 0.35)


def zero_rows(rng: np.random.Generator, depth: int, n: int) -> Maps:
    return random_maps(rng, depth, n) * (rng.random((depth, n, 1)) < 0.7)


def any_sums(rng: np.random.Generator, depth: int, n: int) -> Maps:
    return rng.exponential(1.0, (depth, n, n)) * 10.0 ** rng.integers(-3, 4, (depth, n, 1))


def whole_numbers(rng: np.random.Generator, depth: int, n: int) -> Maps:
    return rng.integers(0, 4, (depth, n, n)).astype(np.float64)


def endless_arcs(rng: np.random.Generator, depth: int, n: int) -> Maps:
    maps = random_maps(rng, depth, n)
    maps[rng.random(maps.shape) < 0.2] = np.inf
    return maps


def encoder_decoder(rng: np.random.Generator, depth: int, n: int) -> Maps:
    """Source tokens, then target tokens; each kind passes unchanged through the levels of the other."""
    source = n // 2
    maps = np.zeros((depth, n, n))
    for level in range(depth):
        encoder = level < depth // 2
        rows = slice(0, source) if encoder else slice(source, n)
        columns = slice(0, source) if encoder else slice(0, n)
        others = range(source, n) if encoder else range(source)
        size = columns.stop - columns.start
        if rows.stop > rows.start:
            maps[level, rows, columns] = softmax(rng.standard_normal((rows.stop - rows.start, size)))
        for k in others:
            maps[level, k, k] = np.inf
    return maps


SORTS: dict[str, Callable[[np.random.Generator, int, int], Maps]] = {
    "random": random_maps,
    "random with residual": lambda rng, depth, n: with_residual(random_maps(rng, depth, n)),
    "sharp": lambda rng, depth, n: random_maps(rng, depth, n, 6.0),
    "sharp with residual": lambda rng, depth, n: with_residual(random_maps(rng, depth, n, 6.0)),
    "uniform": lambda rng, depth, n: random_maps(rng, depth, n, 0.0),
    "uniform with residual": lambda rng, depth, n: with_residual(random_maps(rng, depth, n, 0.0)),
    "causal": causal,
    "causal with residual": lambda rng, depth, n: with_residual(causal(rng, depth, n)),
    "one-hot": one_hot,
    "one-hot with residual": lambda rng, depth, n: with_residual(one_hot(rng, depth, n)),
    "sparse": sparse,
    "zero rows": zero_rows,
    "any sums": any_sums,
    "whole numbers": whole_numbers,
    "endless arcs": endless_arcs,
    "encoder and decoder": encoder_decoder,
}


def all_nodes(maps: Maps) -> NDArray[np.int64]:
    depth, n, _ = maps.shape
    return np.array([(level, node) for level in range(1, depth + 1) for node in range(n)])


def difference(left: Maps, right: Maps) -> float:
    """The largest, with infinities in the same places, as part of the largest finite flow (or of 1)."""
    assert np.array_equal(np.isinf(left), np.isinf(right))
    finite = np.isfinite(right)
    scale = max(1.0, float(right[finite].max(initial=0.0)))
    return float(np.abs(left[finite] - right[finite]).max(initial=0.0)) / scale


def worst_on(sort: str, depth: int, n: int, seed: int) -> float:
    """Against networkx: all nodes at once, a few of the top, and one alone, which take different ways."""
    rng = np.random.default_rng(seed)
    maps = SORTS[sort](rng, depth, n)
    sources = all_nodes(maps)
    top = sources[-min(n, 2) :]
    expected = naive.solve(maps, top)
    every = maxflow.solve(maps, sources)
    few = maxflow.solve(maps, top)
    one = maxflow.solve(maps, top[:1])
    lower = rng.integers(0, len(sources), 2)
    expected_lower = naive.solve(maps, sources[lower])
    return max(
        difference(every[-len(top) :], expected),
        difference(few, expected),
        difference(one, expected[:1]),
        difference(every[lower], expected_lower),
        difference(maxflow.solve(maps, sources[lower]), expected_lower),
    )


@pytest.mark.slow
@pytest.mark.parametrize("sort", list(SORTS))
@settings(max_examples=12, deadline=None)
@given(depth=st.integers(1, 6), n=st.integers(1, 7), seed=st.integers(0, 2**32 - 1))
def test_flows_are_those_of_the_definition(sort: str, depth: int, n: int, seed: int) -> None:
    assert worst_on(sort, depth, n, seed) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("sort", list(SORTS))
def test_all_nodes_at_once_and_one_by_one_agree_across_words_of_bits(sort: str) -> None:
    rng = np.random.default_rng(0)
    maps = SORTS[sort](rng, 5, 66)
    sources = all_nodes(maps)
    every = maxflow.solve(maps, sources)
    picked = rng.choice(len(sources), 12, replace=False)
    alone = np.concatenate([maxflow.solve(maps, sources[s : s + 1]) for s in picked])
    assert difference(every[picked], alone) < 1e-12


def test_one_level_is_the_map_itself() -> None:
    maps = random_maps(np.random.default_rng(0), 1, 5)
    assert np.array_equal(maxflow.solve(maps, all_nodes(maps)), maps[0])


def test_two_levels_are_a_sum_of_minima() -> None:
    maps = random_maps(np.random.default_rng(0), 2, 9)
    expected = np.minimum(maps[1][:, :, None], maps[0][None]).sum(1)
    assert np.allclose(maxflow.solve(maps, [(2, i) for i in range(9)]), expected, rtol=0, atol=1e-15)


def test_a_single_token_gets_the_narrowest_arc() -> None:
    maps = np.array([0.5, 0.2, 0.9, 0.7]).reshape(4, 1, 1)
    assert maxflow.solve(maps, [(4, 0), (1, 0)]).tolist() == [[0.2], [0.5]]


def test_tiny_and_huge_capacities_keep_their_digits() -> None:
    maps = with_residual(random_maps(np.random.default_rng(0), 5, 9))
    flows = maxflow.solve(maps, all_nodes(maps))
    for scale in (1e-30, 1e30):
        assert np.allclose(maxflow.solve(maps * scale, all_nodes(maps)) / scale, flows, rtol=1e-12, atol=0)


def test_order_and_repetition_of_sources_do_not_matter() -> None:
    maps = with_residual(random_maps(np.random.default_rng(0), 4, 6))
    sources = all_nodes(maps)
    flows = maxflow.solve(maps, sources)
    mixed = np.random.default_rng(1).integers(0, len(sources), 40)
    assert np.array_equal(maxflow.solve(maps, sources[mixed]), flows[mixed])
    assert maxflow.solve(maps, []).shape == (0, 6)


def test_one_thread_and_two_give_the_same_numbers() -> None:
    maps = with_residual(random_maps(np.random.default_rng(0), 6, 40, 3.0))
    for sources in (all_nodes(maps), all_nodes(maps)[-3:]):
        one, two = (maxflow.solve(maps, sources, threads=threads) for threads in (1, 2))
        assert np.array_equal(one, two)


def test_a_few_records_are_enough_to_start_with(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = with_residual(random_maps(np.random.default_rng(0), 6, 40, 3.0))
    flows = maxflow.solve(maps, all_nodes(maps))
    monkeypatch.setattr(solver, "_RECORDS_PER_NODE", 0)
    assert np.array_equal(maxflow.solve(maps, all_nodes(maps)), flows)


@pytest.mark.slow
def test_progress_is_reported_from_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver, "_REPORT_SECONDS", 0.001)  # more than once on the fastest machine
    maps = with_residual(random_maps(np.random.default_rng(0), 8, 96, 3.0))
    seen = []

    def report(done: int, total: int, seconds: float | None) -> None:
        seen.append((done, total, seconds, threading.get_ident()))

    maxflow.solve(maps, all_nodes(maps), report=report)
    total = 8 * 96 * 96
    assert len(seen) >= 2
    assert seen[-1][:3] == (total, total, 0.0)
    assert [done for done, *_ in seen] == sorted(done for done, *_ in seen)
    assert {ident for *_, ident in seen} == {threading.get_ident()}


def test_an_interruption_stops_the_work_and_leaves_the_solver_usable() -> None:
    # All of it would take many minutes.
    maps = with_residual(random_maps(np.random.default_rng(0), 12, 400, 3.0))
    before = threading.active_count()

    def report(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        maxflow.solve(maps, all_nodes(maps), report=report)
    assert threading.active_count() == before
    small = with_residual(random_maps(np.random.default_rng(0), 4, 6))
    assert difference(maxflow.solve(small, [(4, 0)]), naive.solve(small, [(4, 0)])) < 1e-12


def test_an_estimate_grows_with_the_work() -> None:
    maps = with_residual(random_maps(np.random.default_rng(0), 6, 64, 3.0))
    whole = maxflow.estimate(maps, all_nodes(maps), threads=1)
    one = maxflow.estimate(maps, [(6, 0)], threads=1)
    assert 0.0 < one < whole < float("inf")
    assert maxflow.estimate(maps, [], threads=1) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda maps: maps[0], r"levels must have shape \(depth, n, n\), got \(5, 5\)"),
        (lambda maps: maps[:, :4], r"levels must have shape \(depth, n, n\), got \(3, 4, 5\)"),
        (lambda maps: maps[:0], r"levels must have shape \(depth, n, n\), got \(0, 5, 5\)"),
        (lambda maps: maps + 1j, "levels must be real numbers, got complex128"),
        (lambda maps: np.where(maps == maps[1, 2, 3], -0.5, maps), r"got -0.5 at levels\[1, 2, 3\]"),
        (lambda maps: np.where(maps == maps[1, 2, 3], np.nan, maps), r"got nan at levels\[1, 2, 3\]"),
    ],
)
def test_bad_levels_are_refused_by_name(change: Callable[[Maps], Maps], message: str) -> None:
    maps = random_maps(np.random.default_rng(0), 3, 5)
    with pytest.raises(ValueError, match=message):
        maxflow.solve(change(maps), [(3, 0)])


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([(4, 0)], r"source \(level 4, node 0\) is not among levels 1 … 3 and nodes 0 … 4"),
        ([(1, 0), (0, 2)], r"source \(level 0, node 2\)"),
        ([(1, 5)], r"source \(level 1, node 5\)"),
        ([(1, -1)], r"source \(level 1, node -1\)"),
        ([1, 2], r"sources must be integers of shape \(count, 2\), got int64 of shape \(2,\)"),
        ([(1.0, 2.0)], r"sources must be integers of shape \(count, 2\), got float64 of shape \(1, 2\)"),
    ],
)
def test_bad_sources_are_refused_by_name(sources: list[object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        maxflow.solve(random_maps(np.random.default_rng(0), 3, 5), sources)


def test_no_threads_are_refused() -> None:
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        maxflow.solve(np.ones((3, 2, 2)), [(3, 0)], threads=0)


@pytest.mark.slow
def test_importing_loads_no_compiler() -> None:
    code = "import sys; import overt.tracing.maxflow; sys.exit('numba' in sys.modules)"
    folder = str(Path(maxflow.__file__).parents[3])
    # The package alone, without what its parents import.
    stubs = "import sys, types\n" + "".join(
        f"m = types.ModuleType({name!r}); m.__path__ = [{folder + '/' + name.replace('.', '/')!r}]\n"
        f"sys.modules[{name!r}] = m\n"
        for name in ("overt", "overt.trace")
    )
    subprocess.run([sys.executable, "-c", stubs + code], check=True, env={**os.environ})


def padded_batch(
    rng: np.random.Generator, sort: str, depth: int, sizes: list[int]
) -> tuple[Maps, NDArray[np.bool_]]:
    """Graphs of several sizes, among nodes that they do not have, whose cells hold anything."""
    n = max(sizes) + 1
    levels = rng.random((len(sizes), depth, n, n)) * 3.0
    real = np.zeros((len(sizes), n), dtype=bool)
    for example, size in enumerate(sizes):
        kept = np.sort(rng.choice(n, size, replace=False))
        real[example, kept] = True
        levels[example][np.ix_(range(depth), kept, kept)] = SORTS[sort](rng, depth, size)
    return levels, real


def one_by_one(levels: Maps, sources: NDArray[np.int64], real: NDArray[np.bool_], solve: Any) -> Maps:
    """Flows of a batch, each graph without its padding."""
    out = np.zeros((len(levels), len(sources), levels.shape[-1]))
    for example, (stack, mask) in enumerate(zip(levels, real, strict=True)):
        kept = np.flatnonzero(mask)
        rows = [s for s, (_, token) in enumerate(sources) if mask[token]]
        if rows:
            nodes = [(sources[s][0], int(np.flatnonzero(kept == sources[s][1])[0])) for s in rows]
            out[example][np.ix_(rows, kept)] = solve(stack[:, kept][:, :, kept], nodes)
    return out


@pytest.mark.parametrize(
    "sort", ["sharp with residual", "sparse", "zero rows", "endless arcs", "encoder and decoder"]
)
@settings(max_examples=6, deadline=None)
@given(
    depth=st.integers(1, 6),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    share=st.sampled_from([0.1, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_flows_of_a_batch_are_those_of_its_graphs(
    sort: str, depth: int, sizes: list[int], share: float, seed: int
) -> None:
    """With few sources and with all, which take different ways; against networkx and each graph alone."""
    rng = np.random.default_rng(seed)
    levels, real = padded_batch(rng, sort, depth, sizes)
    sources = all_nodes(levels[0])
    sources = rng.permutation(sources)[: max(1, int(share * len(sources)))]
    flows = maxflow.solve_batch(levels, sources, real)
    assert np.array_equal(flows, one_by_one(levels, sources, real, maxflow.solve))
    few = sources[: max(1, 12 // len(sizes))]
    assert difference(flows[:, : len(few)], one_by_one(levels, few, real, naive.solve)) < 1e-12


def test_cells_of_padding_change_nothing_and_others_do() -> None:
    rng = np.random.default_rng(0)
    levels, real = padded_batch(rng, "random with residual", 4, [5, 3, 6])
    sources = all_nodes(levels[0])
    flows = maxflow.solve_batch(levels, sources, real)
    other = np.where(real[:, None, :, None] & real[:, None, None, :], levels, np.nan)
    assert np.array_equal(maxflow.solve_batch(other, sources, real), flows)
    assert not flows[~np.broadcast_to(real[:, None], flows.shape)].any()
    assert not np.array_equal(maxflow.solve_batch(levels, sources), flows)  # without a mask, padding counts


@pytest.mark.parametrize("padded", [False, True])
def test_threads_share_a_batch_of_any_kind(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By graphs, or where these are few and long by inputs, with the same numbers and reports."""
    rng = np.random.default_rng(0)
    levels, real = padded_batch(rng, "sharp with residual", 5, [14] * 12 if not padded else [*range(4, 16)])
    real = real if padded else None
    sources = all_nodes(levels[0])[-6:]
    one = maxflow.solve_batch(levels, sources, real, threads=1)
    by_graph = maxflow.solve_batch(levels, sources, real, threads=3)
    monkeypatch.setattr(solver, "_SHORT_SECONDS", 0.0)
    monkeypatch.setattr(solver, "_REPORT_SECONDS", 0.0)
    seen: list[tuple[int, int]] = []
    by_input = maxflow.solve_batch(
        levels, sources, real, threads=4, report=lambda done, total, _: seen.append((done, total))
    )
    assert np.array_equal(one, by_graph)
    assert np.array_equal(one, by_input)
    pairs = (int(real.sum()) if real is not None else 12 * levels.shape[-1]) * len(sources)
    assert seen[-1] == (pairs, pairs)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {pairs}


def test_a_batch_starts_with_few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = np.stack([with_residual(random_maps(np.random.default_rng(e), 5, 24, 3.0)) for e in range(3)])
    flows = maxflow.solve_batch(levels, all_nodes(levels[0]))
    monkeypatch.setattr(solver, "_RECORDS_PER_NODE", 0)
    assert np.array_equal(maxflow.solve_batch(levels, all_nodes(levels[0])), flows)


def test_an_interruption_stops_a_batch() -> None:
    levels = np.stack([with_residual(random_maps(np.random.default_rng(e), 8, 80, 3.0)) for e in range(40)])
    before = threading.active_count()

    def report(*_: object) -> None:
        raise KeyboardInterrupt

    for threads in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            maxflow.solve_batch(levels, all_nodes(levels[0]), threads=threads, report=report)
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [1, 2])
def test_a_bad_capacity_of_a_batch_is_named(threads: int) -> None:
    levels = np.stack([random_maps(np.random.default_rng(e), 3, 5) for e in range(4)])
    levels[2, 1, 3, 0] = -0.25
    with pytest.raises(ValueError, match=r"got -0.25 at levels\[1, 3, 0\] of example 2"):
        maxflow.solve_batch(levels, [(3, 0)], threads=threads)


@pytest.mark.parametrize(
    ("levels", "real", "message"),
    [
        (np.ones((3, 2, 2)), None, r"levels must have shape \(batch, depth, n, n\), got \(3, 2, 2\)"),
        (
            np.ones((1, 3, 2, 2)),
            np.ones((1, 3), bool),
            r"real must be boolean of shape \(1, 2\), got bool of",
        ),
        (np.ones((1, 3, 2, 2)), np.ones((1, 2)), r"real must be boolean of shape \(1, 2\), got float64"),
    ],
)
def test_a_batch_of_another_shape_is_refused(levels: Any, real: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        maxflow.solve_batch(levels, [(1, 0)], real)


def main() -> None:
    worst: dict[str, float] = dict.fromkeys(SORTS, 0.0)
    rng = np.random.default_rng(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
    for count in range(int(sys.argv[1])):
        sort = list(SORTS)[count % len(SORTS)]
        depth, n = int(rng.integers(1, 8)), int(rng.integers(1, 13))
        seed = int(rng.integers(2**32))
        found = worst_on(sort, depth, n, seed)
        if found > 1e-12:
            print(f"{found:.1e} on {sort}, depth {depth}, n {n}, seed {seed}")
        worst[sort] = max(worst[sort], found)
    for sort, value in worst.items():
        print(f"{sort}: {value:.1e}")
    print(f"worst of {sys.argv[1]} maps: {max(worst.values()):.1e}")


if __name__ == "__main__":
    main()
