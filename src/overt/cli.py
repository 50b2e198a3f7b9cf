"""The `overt` command."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from overt.tracing.methods.method import edge_methods, methods
from overt.tracing.mixing.mixing import mixings


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


METHODS, READERS, EDGES = _listed(methods()), _listed(methods("maps")), _listed(edge_methods())
MIXINGS = _listed(mixings())

app = typer.Typer(
    help="Overt: attention, out in the open. Better attention maps, put into real models, read honestly.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"overt {_package_version('overt')}")
        raise typer.Exit


def _import(names: list[str]) -> list[str]:
    """Import modules, of this folder too: what they register can be asked for."""
    for name in names or ():
        sys.path.insert(0, os.getcwd())
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"--import {name}: {error}") from None
        finally:
            sys.path.remove(os.getcwd())
    return names


@app.callback()
def root(
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import", callback=_import, help="A module that registers methods, mixings or mechanisms."
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Overt: attention, out in the open. Better attention maps, put into real models, read honestly."""


@app.command(rich_help_panel="Start here")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and results.")] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(help="Training steps per model.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of data, initial weights and noise.", min=0)] = 0,
    fresh: Annotated[bool, typer.Option(help="Forget an earlier run in the folder and start over.")] = False,
    page: Annotated[Path, typer.Option(help="Where the page with traces goes.")] = Path("demo/index.html"),
) -> None:
    """Train plain, evolving, Bayesian and combined attention on subject-verb agreement, side by side."""
    from overt.recipes.demo import STEPS, run

    try:
        run(out=out, steps=STEPS if steps is None else steps, seed=seed, fresh=fresh, page=page)
    except KeyboardInterrupt:
        typer.secho("\ninterrupted; the same command goes on from the last checkpoint", err=True)
        raise typer.Exit(130) from None


@app.command(rich_help_panel="Attach to a pretrained model")
def sentiment(
    model: Annotated[str, typer.Option(help="A pretrained encoder: a folder, or a name on the hub.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder that holds SST-2 in GLUE's layout; else OVERT_DATA.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and results.")] = Path("runs/sentiment"),
    steps: Annotated[int | None, typer.Option(help="Training steps per form.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of data order, new weights and noise.", min=0)] = 0,
    fresh: Annotated[bool, typer.Option(help="Forget an earlier run in the folder and start over.")] = False,
) -> None:
    """Fine-tune a pretrained encoder on sentiment with plain, evolving, Bayesian and combined attention."""
    from overt.recipes.sentiment import run

    try:
        run(model, out, data, steps, seed, fresh)
    except KeyboardInterrupt:
        typer.secho("\ninterrupted; the same command goes on from the last checkpoint", err=True)
        raise typer.Exit(130) from None


@app.command(rich_help_panel="Attach to a pretrained model")
def drift(
    model: Annotated[str, typer.Option(help="A pretrained encoder: a folder, or a name on the hub.")],
) -> None:
    """Show how far attaching Evolving moves a pretrained encoder, over alpha, beta and init."""
    from overt.recipes.drift import run

    run(model)


@app.command(
    rich_help_panel="Measure again what a paper reports",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},  # a recipe's own options
)
def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="The recipe; without one, all are listed.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with data sets; else OVERT_DATA.")] = None,
    seeds: Annotated[int | None, typer.Option(help="How many seeds, from 0.", min=1)] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    model: Annotated[str | None, typer.Option(help="A pretrained model: a folder, or a hub name.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run, runs/… by default.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="Folder of result files: results/, or the run's own for settings of your own."),
    ] = None,
    fresh: Annotated[bool, typer.Option(help="Forget an earlier run in the folder and start over.")] = False,
    retell: Annotated[
        bool, typer.Option(help="Measure nothing: write the tables and notes of a stored result anew.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="List recipes and their own options.")] = False,
) -> None:
    """Measure a table or figure of a paper again, and write it down beside the published numbers."""
    from overt.recipes import reproduce as recipes

    if name is None or listed:
        recipes.show_list()
        return
    if retell:
        recipes.retell(name, results, context.args)
        return
    try:
        recipes.run(name, data, seeds, device, model, out, results, fresh, context.args)
    except KeyboardInterrupt:
        again = "the same command, without --fresh," if fresh else "the same command"
        typer.secho(f"\ninterrupted; {again} goes on from the last checkpoint", err=True)
        raise typer.Exit(130) from None


@app.command(rich_help_panel="Read attention")
def trace(
    text: Annotated[
        list[str], typer.Argument(help="A sentence, or the path of an image; several are compared.")
    ],
    model: Annotated[
        list[str],
        typer.Option(help="A folder with weights and tokenizer, or a name on the hub; several are compared."),
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(help=f"{METHODS}; may be given several times. By default all that read maps."),
    ] = None,
    layer: Annotated[int, typer.Option(help="Which layer; −1 is the last.")] = -1,
    query: Annotated[
        int | None, typer.Option(help="Whose row: a position. CLS, or the last token of a causal model.")
    ] = None,
    decoder: Annotated[
        str | None, typer.Option(help="What the decoder is fed; by default the model writes it.")
    ] = None,
    residual: Annotated[
        float | None, typer.Option(help="Weight of the residual connection; by default that of the mixing.")
    ] = None,
    receptive_field: Annotated[
        bool, typer.Option(help="Divide by what uniform attention gives, for causal models.")
    ] = False,
    mixing: Annotated[str, typer.Option(help=f"{MIXINGS}.")] = "attention",
    out: Annotated[
        Path | None,
        typer.Option(help="Also write a page of all methods (.html) or the trace (.safetensors)."),
    ] = None,
) -> None:
    """Show which tokens a model's attention draws on: raw attention, rollout and flow, side by side."""
    from overt.recipes.tracing import run

    run(
        text,
        model,
        methods=method or None,
        layer=layer,
        query=query,
        decoder=decoder,
        residual=residual,
        receptive_field=receptive_field,
        mixing=mixing,
        out=out,
    )


@app.command(rich_help_panel="Look at attention")
def plot(
    source: Annotated[
        list[str], typer.Argument(help="A saved trace; or, with --model, a sentence or the path of an image.")
    ],
    out: Annotated[Path, typer.Option(help="The figure: .pdf, .svg or .png.")],
    view: Annotated[
        str,
        typer.Option(
            help="strip, graph, heads, evolution, uncertainty, image, cross; compare takes several."
        ),
    ] = "strip",
    model: Annotated[str | None, typer.Option(help="A folder with weights, or a name on the hub.")] = None,
    query: Annotated[int | None, typer.Option(help="Whose row: a position.")] = None,
    layer: Annotated[int | None, typer.Option(help="Which layer, from 0; −1 is the last.")] = None,
    head: Annotated[int | None, typer.Option(help="Which head, from 0.")] = None,
    method: Annotated[str | None, typer.Option(help=f"{READERS}.")] = None,
    importances: Annotated[
        bool, typer.Option(help="What runs the model, blank-out and gradients, under a strip.")
    ] = False,
    special: Annotated[bool, typer.Option(help="Show special tokens too.")] = False,
    columns: Annotated[int, typer.Option(help="Width: one column of a paper (3.3 in) or two (6.9 in).")] = 1,
    title: Annotated[str | None, typer.Option(help="Above the figure.")] = None,
    decoder: Annotated[str | None, typer.Option(help="What an encoder–decoder's decoder is fed.")] = None,
    samples: Annotated[int, typer.Option(help="Posterior samples, for uncertainty.", min=1)] = 20,
    mixing: Annotated[str, typer.Option(help=f"{MIXINGS}.")] = "attention",
    dpi: Annotated[float, typer.Option(help="Of .png.")] = 300.0,
) -> None:
    """Draw one view of a trace for a paper."""
    from overt.recipes.plotting import run

    run(
        source,
        out,
        view,
        model=model,
        decoder=decoder,
        samples=samples,
        mixing=mixing,
        columns=columns,
        dpi=dpi,
        query=query,
        layer=layer,
        head=head,
        method=method,
        importances=importances or None,
        special=special or None,
        title=title,
    )


@app.command(rich_help_panel="Look at attention")
def serve(
    model: Annotated[
        list[str],
        typer.Option(
            help="A folder, or a name on the hub, as PATH or NAME=PATH; give it several times for more."
        ),
    ],
    host: Annotated[str, typer.Option(help="Where to listen; this machine alone by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any that is free.", min=0, max=65535)] = 8321,
    tokens: Annotated[int, typer.Option(help="Tokens of a text, at most.", min=1)] = 256,
    workers: Annotated[int, typer.Option(help="Traces at a time.", min=1)] = 1,
    queue: Annotated[int, typer.Option(help="Requests that wait; more are told to come back.", min=1)] = 64,
    seconds: Annotated[float, typer.Option(help="From a request to its answer, at most.")] = 60.0,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Another name by which this server may be called.")
    ] = None,
) -> None:
    """Serve a page on this machine: type a sentence or drop an image, and see the trace."""
    from overt.recipes.serving import run

    run(
        model,
        host,
        port,
        tokens=tokens,
        workers=workers,
        queue=queue,
        seconds=seconds,
        hosts=allow_host or (),
    )


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
    method: Annotated[str, typer.Option(help=f"What to order by: {EDGES}.")] = "rollout",
    samples: Annotated[int, typer.Option(help="Posterior samples.", min=1)] = 20,
    out: Annotated[Path | None, typer.Option(help="Also draw it: .png, .svg or .pdf.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also write a page to look at (.html), or the data (.json).")
    ] = None,
) -> None:
    """Show which neighbours a node of a citation graph draws on, by a network of bam-table-1."""
    from overt.recipes.neighbours import run as show

    show(node, dataset, row, seed, data, run, method, samples, out, page)


@app.command(rich_help_panel="Start here")
def info() -> None:
    """Print versions, devices, extras, and which fast paths are active."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from overt._extras import EXTRAS, present
    from overt.mechanisms.backend import switched_off
    from overt.mechanisms.noise import compiled_kernels

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")

    def section(title: str) -> None:
        table.add_row("", "")
        table.add_row(f"[cyan]{title}[/cyan]", "")

    section("Versions")
    table.add_row("python", platform.python_version())
    packages = (
        "overt",
        "torch",
        "transformers",
        "torch-geometric",
        "numpy",
        "scipy",
        "numba",
        "triton",
        "safetensors",
    )
    for package in packages:
        table.add_row(package, _package_version(package))

    section("Devices")
    table.add_row("cpu", f"{torch.get_num_threads()} threads, {platform.machine()}")
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            table.add_row(f"cuda:{number}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    else:
        table.add_row("cuda", "none")
    if torch.backends.mps.is_available():
        table.add_row("mps", "available")

    section("Extras")
    for extra, modules in EXTRAS.items():
        missing = [module for module in modules if not present(module)]
        absent = f"missing {', '.join(missing)}: pip install 'overt\\[{extra}]'"
        table.add_row(extra, absent if missing else "installed")

    section("Fast paths")
    noise = "active (numba)"
    if (off := switched_off()) is not None:
        noise = f"not active: {off}"
    elif compiled_kernels() is None:
        noise = f"not active: numba cannot be imported ({_import_error('numba')}); torch operations are used"
    table.add_row("compiled loops, CPU", noise)
    table.add_row(
        "closed-form KL",
        f"not active: {off}"
        if off is not None
        else "active for dot-product maps under padding and causal masks; other maps use the dense KL "
        "(logger 'overt', level DEBUG, says where)",
    )
    for name, why in _kernels().items():
        table.add_row(name, why)
    Console().print(table)


def _kernels() -> dict[str, str]:
    """Whether fused kernels run, for each GPU."""
    import torch

    from overt.mechanisms.backend import KERNELS, active

    if not torch.cuda.is_available():
        return {
            "fused kernels": "not active: torch sees no GPU; plain operations and compiled loops are used"
        }
    found = {}
    for number in range(torch.cuda.device_count()):
        reason = active(KERNELS, torch.device("cuda", number))
        where = (
            "active for plain products under padding and causal masks, heads up to 128 wide "
            "(logger 'overt', level DEBUG, says for each attention which path ran, and why)"
        )
        found[f"fused kernels, cuda:{number}"] = where if reason is None else f"not active: {reason}"
    return found


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return f"{module} itself imports"


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        import overt

        return f"{overt.__version__} (from the source tree)" if package == "overt" else "not installed"


def main() -> None:
    """Run the command; a mistake of the user's is one line, unless OVERT_TRACEBACK is set."""
    if os.environ.get("OVERT_TRACEBACK"):
        app()
    try:
        app()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.secho(f"overt: {error}", fg="red", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
