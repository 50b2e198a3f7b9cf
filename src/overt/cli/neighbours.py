"""Trace a node of a citation graph through a network that `overt reproduce bam-table-1` trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from overt import _check
from overt._extras import need
from overt._files import write_whole, written_whole
from overt.cli.app import app, listed
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
    """Print what a node draws on; draw it, and write it down as data, where asked for.

    Args:
        node: its number in the graph.
        dataset: cora, citeseer or pubmed.
        row: of the paper's table: GAT, NO KL, LF, LC, WF or WC.
        seed: of the training.
        data: folder with the raw files.
        folder: of the run; runs/bam-graphs where None.
        method: that orders the neighbours.
        samples: of the posterior; none are drawn of plain GAT.
        out: a picture: .png, .svg or .pdf.
        page: the same to look at (.html), or as data (.json).
    """
    from rich.console import Console

    need("torch_geometric", "graphs")
    _check.one_of("--dataset", dataset, tuple(bam_graphs.SETTINGS))
    _check.one_of("--row", row, tuple(bam_graphs.SETTINGS[dataset].rows))
    _check.one_of("--method", method, tuple(edge_methods()))
    if out is not None and out.suffix not in PICTURES:
        raise ValueError(f"--out must end in {', '.join(PICTURES)}, got {out}")
    for name, path in (("--out", out), ("--page", page)):
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{name} {path}: there is no folder {path.parent}")
    folder = Path("runs") / bam_graphs.TABLE_1.folder if folder is None else folder
    trained = folder / dataset / row / f"seed-{seed}"
    bam_graphs.check_trained(trained)
    graph = planetoid.load(dataset, data, folder / "data")  # where the run keeps what it downloaded
    if not 0 <= node < len(graph.y):
        raise ValueError(f"the node must lie in 0 to {len(graph.y) - 1}, got {node}")
    model = bam_graphs.trained(trained, graph)
    random = bam_graphs.SETTINGS[dataset].rows[row] is not None
    trace = trace_nodes(model, graph.x, graph.edge_index, samples=samples if random else 0, seed=seed)
    found = trace.neighbours(node, by=method)
    console = Console(highlight=False)
    with torch.no_grad():
        predicted = int(model(graph.x, graph.edge_index)[node].argmax())
    console.print(f"{dataset}, {row}, seed {seed}: class {int(graph.y[node])}, predicted {predicted}")
    console.print(str(found), markup=False)
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
    node: Annotated[int, typer.Argument(help="The node's number.")],
    dataset: Annotated[str, typer.Option(help="cora, citeseer or pubmed.")] = "cora",
    row: Annotated[str, typer.Option(help="Row of the table: GAT, NO KL, LF, LC, WF or WC.")] = "WC",
    seed: Annotated[int, typer.Option(help="Seed of the training.", min=0)] = 0,
    data: Annotated[Path | None, typer.Option(help="Folder with the raw files; else OVERT_DATA.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Folder of `overt reproduce bam-table-1`; runs/bam-graphs by default.")
    ] = None,
    method: Annotated[str, typer.Option(help=f"What to order by: {listed(edge_methods())}.")] = "rollout",
    samples: Annotated[int, typer.Option(help="Posterior samples.", min=1)] = 20,
    out: Annotated[Path | None, typer.Option(help="Also draw it: .png, .svg or .pdf.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also write a page to look at (.html), or the data (.json).")
    ] = None,
) -> None:
    """Show which neighbours a node of a citation graph draws on, by a network of bam-table-1."""
    show(node, dataset, row, seed, data, run, method, samples, out, page)
