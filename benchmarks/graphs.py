"""Time and memory of a training step of a two-layer graph attention network, against PyG's `GATConv`.

`--data DIR` reads Cora from there; without it, a generated graph of Cora's size is used. The large graph is
generated: a million edges between randomly drawn nodes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import overt
from attach import memory_kibibytes
from overt.data import planetoid
from overt.models.gat import GAT
from overt.recipes.bam_graphs import SETTINGS

BASELINE = "PyG GATConv"
OURS = "no mechanism"
FORMS: dict[str, list[overt.Bayesian] | None] = {BASELINE: None, OURS: []} | {
    f"BAM {row}": [bayesian] for row, bayesian in SETTINGS["cora"].rows.items() if bayesian is not None
}
CASES = ("cora", "cora, sparse features", "1M edges")
CLASSES = 7


class PyG(nn.Module):
    """The same network built from PyG's layers."""

    def __init__(self, features: int) -> None:
        super().__init__()
        conv = torch_geometric.nn.GATConv
        self.first = conv(features, 8, 8, dropout=0.6)
        self.second = conv(64, CLASSES, 1, concat=False, dropout=0.6)

    def forward(self, x: Tensor, edge_index: Tensor, chain: Any = None) -> Tensor:
        del chain
        if x.is_sparse:
            values = F.dropout(x.values(), 0.6, self.training)
            x = torch.sparse_coo_tensor(
                x.indices(), values, x.shape, is_coalesced=True, check_invariants=False
            )
        else:
            x = F.dropout(x, 0.6, self.training)
        x = F.dropout(F.elu(self.first(x, edge_index)), 0.6, self.training)
        out: Tensor = self.second(x, edge_index)
        return out


def graph_of(case: str, data: Path | None, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges and classes."""
    generator = torch.Generator().manual_seed(0)
    if case == "1M edges":
        x = torch.randn(100_000, 64, generator=generator)
        edges = torch.randint(100_000, (2, 1_000_000), generator=generator)
    elif data is None:
        x = (torch.rand(2708, 1433, generator=generator) < 18 / 1433).float() / 18
        edges = torch.randint(2708, (2, 10_556), generator=generator)
    else:
        with tempfile.TemporaryDirectory() as folder:
            cora = planetoid.load("cora", data, Path(folder))
        x, edges = cora.x, cora.edge_index
    if case == "cora, sparse features":
        x = x.to_sparse().coalesce()
    y = torch.randint(CLASSES, (x.shape[0],), generator=generator)
    return x.to(device), edges.to(device), y.to(device)


def build(form: str, features: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    mechanisms = FORMS[form]
    return (PyG(features) if mechanisms is None else GAT(features, CLASSES, mechanisms)).to(device)


def step(model: nn.Module, graph: tuple[Tensor, Tensor, Tensor], number: int) -> None:
    x, edges, y = graph
    chain = overt.Chain(step=number)
    loss = F.cross_entropy(model(x, edges, chain=chain), y) + chain.penalty().to(y.device)
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.grad = None
    if y.device.type == "cuda":
        torch.cuda.synchronize()


def peak_mebibytes(form: str, case: str, options: argparse.Namespace) -> float:
    """Peak memory of a step beyond data and model: of the device, or on a CPU of a separate process."""
    if options.device == "cuda":
        graph = graph_of(case, options.data, "cuda")
        model = build(form, graph[0].shape[1], "cuda")
        step(model, graph, 0)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        step(model, graph, 1)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    command = [sys.executable, __file__, "--peak", form, "--case", case, *sys.argv[1:]]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def peak_of_this_process(form: str, case: str, options: argparse.Namespace) -> float:
    graph = graph_of(case, options.data, "cpu")
    model = build(form, graph[0].shape[1], "cpu")
    few = graph[0].to_dense()[:100], graph[1][:, :1000] % 100, graph[2][:100]
    step(model, few, 0)  # so that nothing is compiled or loaded in the measured step
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (Linux)
    held = memory_kibibytes("VmRSS")
    step(model, graph, 1)
    return (memory_kibibytes("VmHWM") - held) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with Planetoid's raw files")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", choices=CASES, help="only this case")
    parser.add_argument("--peak", choices=list(FORMS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak is not None:
        print(peak_of_this_process(options.peak, options.case, options))
        return

    console = Console(width=110)
    where = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    console.print(
        f"torch {torch.__version__}, torch_geometric {torch_geometric.__version__}, {where}, "
        f"{platform.machine()}; medians of {options.repeats}"
    )
    for case in [options.case] if options.case else CASES:
        if options.device == "cuda" and case == "cora, sparse features":
            continue  # a GPU multiplies zeros faster than it skips them
        peaks = {form: peak_mebibytes(form, case, options) for form in FORMS}
        graph = graph_of(case, options.data, options.device)
        models = {form: build(form, graph[0].shape[1], options.device) for form in FORMS}
        seen: dict[str, list[float]] = {form: [] for form in FORMS}
        for turn in range(options.repeats + 1):  # forms take turns; the first turn is a warm-up
            for form, model in models.items():
                start = time.perf_counter()
                step(model, graph, turn)
                if turn > 0:
                    seen[form].append(1000 * (time.perf_counter() - start))
        times = {form: statistics.median(values) for form, values in seen.items()}
        name = case if options.data or "cora" not in case else case.replace("cora", "generated, Cora's size")
        title = f"Training step, {name}: {graph[0].shape[0]:,} nodes, {graph[1].shape[1]:,} edges"
        table = Table(title=title, title_justify="left")
        for column in ("", "ms", f"× {BASELINE}", "spread", "peak MiB", f"× {BASELINE} "):
            table.add_column(column, justify="left" if column == "" else "right")
        for form, value in times.items():
            spread = f"{min(seen[form]):.1f}–{max(seen[form]):.1f}"
            ratios = f"{value / times[BASELINE]:.2f}", f"{peaks[form] / peaks[BASELINE]:.2f}"
            table.add_row(form, f"{value:.1f}", ratios[0], spread, f"{peaks[form]:.0f}", ratios[1])
        console.print(table)


if __name__ == "__main__":
    main()
