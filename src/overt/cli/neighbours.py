"""Trace a node of a citation graph through a network that `overt reproduce bam-table-1` trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from overt import _check
from overt._extras import need
from overt._files import check_folder, write_whole, written_whole
from overt.cli.shared import DataOption, app, join_or
from overt.data import planetoid
from overt.recipes import bam_graphs
from overt.tracing.methods.method import edge_methods
from overt.tracing.node_tracer import trace_nodes
from overt.tracing.nodes import NodeTrace
from overt.view.neighbourhood import page_data

PICTURES = (".png", ".svg", ".pdf")


def show(
    node: int,
    dataset: str = "cora",
    row: str = "WC",
    seed: int = 0,
    data: Path | None = None,
    folder: Path | None = None,
    method: str = "rollout",
    samples: int = 20,
    out: Path | None = None,
    page: Path | None = None,
) -> NodeTrace:
    """Print what a node draws on; optionally write a picture, and a page or data.

    Args:
        node: number of the node.
        dataset: cora, citeseer or pubmed.
        row: row of the paper's table: GAT, NO KL, LF, LC, WF or WC.
        seed: training seed of the network.
        data: folder with the raw files.
        folder: folder of the run; runs/bam-graphs if None.
        method: method that the neighbours are ordered by.
        samples: number of posterior samples; plain GAT has none.
        out: path of a picture: .png, .svg or .pdf.
        page: path of a page (.html) or of the data (.json).
    """
    from rich.console import Console

    need("torch_geometric", "graphs")
    _check.one_of("--dataset", dataset, tuple(bam_graphs.SETTINGS))
    _check.one_of("--row", row, tuple(bam_graphs.SETTINGS[dataset].rows))
    _check.one_of("--method", method, tuple(edge_methods()))
    if out is not None and out.suffix not in PICTURES:
        raise ValueError(f"--out must end in {', '.join(PICTURES)}, got {out}")
    if page is not None and page.suffix.lower() not in (".html", ".htm", ".json"):
        raise ValueError(f"--page must end in .html (a page) or .json (its data), got {page}")
    for name, path in (("--out", out), ("--page", page)):
        if path is not None:
            check_folder(name, path)
    folder = Path("runs") / bam_graphs.TABLE_1.folder if folder is None else folder
    run_folder = folder / dataset / row / f"seed-{seed}"
    bam_graphs.check_trained(run_folder)
    graph = planetoid.load(dataset, data, folder / "data")  # where the run stores its downloads
    if not 0 <= node < len(graph.y):
        raise ValueError(f"node must lie in 0 to {len(graph.y) - 1}, got {node}")
    model = bam_graphs.load_trained(run_folder, graph)
    random = bam_graphs.SETTINGS[dataset].rows[row] is not None
    trace = trace_nodes(model, graph.x, graph.edge_index, samples=samples if random else 0, seed=seed)
    table = trace.neighbours(node, by=method)
    console = Console(highlight=False)
    with torch.no_grad():
        predicted = int(model(graph.x, graph.edge_index)[node].argmax())
    console.print(f"{dataset}, {row}, seed {seed}: class {int(graph.y[node])}, predicted {predicted}")
    console.print(str(table), markup=False)
    if out is not None:
        need("matplotlib", "view")
        from overt.view.nodes import plot_neighbours

        figure = plot_neighbours(trace, node, method=method, labels=graph.y)
        with written_whole(out) as part:
            figure.savefig(part, dpi=200)
        console.print(f"[dim]picture in {out}[/dim]")
    if page is not None and page.suffix.lower() in (".html", ".htm"):
        trace.html(node, page, by=method, labels=graph.y, title=f"{dataset}, {row}: node {node}")
        console.print(f"page in {page}: open it in any browser", style="dim", markup=False)
    elif page is not None:
        write_whole(page, json.dumps(page_data(trace, node, by=method, labels=graph.y), indent=1) + "\n")
        console.print(f"[dim]data in {page}[/dim]")
    return trace


@app.command(rich_help_panel="Read attention")
def neighbours(
    node: Annotated[int, typer.Argument(help="Number of the node.")],
    dataset: Annotated[str, typer.Option(help="Citation graph: cora, citeseer or pubmed.")] = "cora",
    row: Annotated[str, typer.Option(help="Row of the table: GAT, NO KL, LF, LC, WF or WC.")] = "WC",
    seed: Annotated[int, typer.Option(help="Training seed of the network.", min=0)] = 0,
    data: DataOption = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Folder of `overt reproduce bam-table-1`. Default: runs/bam-graphs."),
    ] = None,
    method: Annotated[
        str, typer.Option(help=f"Method that the neighbours are ordered by: {join_or(edge_methods())}.")
    ] = "rollout",
    samples: Annotated[int, typer.Option(help="Number of posterior samples.", min=1)] = 20,
    out: Annotated[Path | None, typer.Option(help="Also draw a picture: .png, .svg or .pdf.")] = None,
    page: Annotated[Path | None, typer.Option(help="Also write a page (.html) or the data (.json).")] = None,
) -> None:
    """Show which neighbours a node of a citation graph draws on in a network of bam-table-1."""
    show(node, dataset, row, seed, data, run, method, samples, out, page)
