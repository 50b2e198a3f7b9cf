"""The `overt` command: its global options, its errors, and the options that its commands share."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Overt: attention, out in the open. Better attention maps, put into real models, read honestly.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)

# Options that several commands share.
DataOption = Annotated[
    Path | None,
    typer.Option(help="Folder with data sets in their original layout. Default: OVERT_DATA."),
]
EncoderOption = Annotated[str, typer.Option(help="Pretrained encoder: a folder, or a name on the hub.")]
FreshOption = Annotated[bool, typer.Option(help="Discard an earlier run in the folder and start over.")]
RunFolderOption = Annotated[Path, typer.Option(help="Folder for checkpoints and results.")]
SeedOption = Annotated[
    int, typer.Option(help="Random seed of the data, the initial weights and the noise.", min=0)
]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"overt {package_version('overt')}")
        raise typer.Exit


imported: list[str] = []  # the modules that --import named


def _import(names: list[str]) -> list[str]:
    """Import modules, also from the current folder, so that commands know what they register."""
    for name in names or ():
        sys.path.insert(0, os.getcwd())
        try:
            importlib.import_module(name)
            imported.append(name)
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
            "--import",
            callback=_import,
            help="Module to import first, which registers methods, mixings or mechanisms.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Overt: attention, out in the open. Better attention maps, put into real models, read honestly."""


def join_or(names: Iterable[str]) -> str:
    """Join names to a phrase: "raw, rollout or flow"."""
    *others, last = names
    return f"{', '.join(others)} or {last}"


def join_and(names: Iterable[str]) -> str:
    """Join names to a phrase: "raw, rollout and flow"."""
    *others, last = names
    return f"{', '.join(others)} and {last}"


@contextmanager
def resumable(fresh: bool = False) -> Iterator[None]:
    """On Ctrl-C, print how to resume the command and exit with code 130."""
    try:
        yield
    except KeyboardInterrupt:
        again = "the same command, without --fresh," if fresh else "the same command"
        typer.secho(f"\ninterrupted; {again} resumes from the last checkpoint", err=True)
        raise typer.Exit(130) from None


def package_version(package: str) -> str:
    """The version of an installed package, or a phrase if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        import overt

        return f"{overt.__version__} (from the source tree)" if package == "overt" else "not installed"


def main() -> None:
    """Run the command. Errors are printed in one line, or with a traceback if OVERT_TRACEBACK is set."""
    if os.environ.get("OVERT_TRACEBACK"):
        app()
    try:
        app()
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.secho(f"overt: {error}", fg="red", err=True)
        sys.exit(1)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        said = str(error).split(". ")[0].splitlines()[0].rstrip(".")
        typer.secho(
            f"overt: {said}: free the device from other programs, give fewer or shorter inputs, or use "
            "--device cpu",
            fg="red",
            err=True,
        )
        sys.exit(1)


def out_of_memory(error: RuntimeError) -> bool:
    """Whether a device's memory is full."""
    import torch  # only now: most errors come without it

    return isinstance(error, torch.OutOfMemoryError)
