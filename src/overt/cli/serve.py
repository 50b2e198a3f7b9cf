"""`overt serve`: a page on this machine that traces the models named at start."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from overt import _check
from overt._extras import need
from overt.cli.inputs import open_model, own_command
from overt.cli.shared import app
from overt.models.seq2seq import Seq2Seq
from overt.recipes._runs import check_model, load_tokenizer
from overt.tracing.pixels import attends_to_pixels
from overt.view.server.limits import Limits, Served, check_name

WORDS = "the key to the cabinets"


def parse_models(models: Sequence[str]) -> dict[str, str]:
    """Name → folder or hub name, from `PATH` and `NAME=PATH`."""
    places: dict[str, str] = {}
    for text in models:
        name, equals, place = text.partition("=")
        if not equals or os.sep in name or Path(text).exists():
            place, name = text, Path(text).absolute().name if Path(text).exists() else Path(text).name
        if not place:
            raise ValueError(f"--model must be PATH or NAME=PATH, got {text!r}")
        check_name(name)
        if name in places:
            raise ValueError(
                f"--model {text}: another model is already named {name!r}; give this one a name: NAME=PATH"
            )
        places[name] = place
    if not places:
        raise ValueError("--model must be given at least once")
    return places


def open_served(name: str, place: str) -> Served:
    """Load a model with its tokenizer or image processor, and trace it once."""
    import transformers

    check_model(place)
    _check_weights(place)
    if (own := own_command(place)) is not None:
        raise ValueError(
            f"--model {place} is {own[0]}, which is not served: {own[1]} --out page.html writes a page"
        )
    model = open_model(place)
    if attends_to_pixels(model):
        raise ValueError(
            f"--model {place} is a vision network, which is not served: "
            f"overt trace photo.jpg --model {place} --out page.html writes a page"
        )
    takes = getattr(model, "main_input_name", "input_ids")
    if takes not in ("input_ids", "pixel_values"):
        raise ValueError(f"--model {place} takes {takes}; only models of text and images can be served")
    image = takes == "pixel_values"
    tokenizer: Any = model.tokenizer if isinstance(model, Seq2Seq) else None
    try:
        if tokenizer is None:
            tokenizer = load_tokenizer(place)
    except ValueError:
        if not image:
            raise
    processor: Any = None
    if image:
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(place)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            raise ValueError(f"--model {place} has no image processor: {_line(error)}") from None
    secrets = {str(Path(place).resolve()): name, place: name} if Path(place).exists() else {}
    served = Served(name, model, tokenizer, processor, "image" if image else "text", secrets=secrets)
    return _trace_once(served, place)


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__


def _check_weights(place: str) -> None:
    """Refuse pickled weights: a pickle can run code when it is opened."""
    names = ("model.safetensors", "model.safetensors.index.json")
    if Path(place).is_dir():
        present = any((Path(place) / name).is_file() for name in names)
    else:
        from transformers.utils.hub import cached_file

        try:
            if not cached_file(place, "config.json", _raise_exceptions_for_missing_entries=False):
                raise OSError("the hub has no model of that name, or cannot be reached")
            present = any(
                cached_file(place, name, _raise_exceptions_for_missing_entries=False) for name in names
            )
        except OSError as error:
            raise OSError(f"--model {place} is not a folder, and: {_line(error)}") from None
    if not present:
        raise ValueError(
            f"--model {place} has no safetensors weights, and pickled weights are not loaded: "
            "convert them with model.save_pretrained"
        )


def _trace_once(served: Served, place: str) -> Served:
    """Trace once, to refuse a model that cannot be traced and to compile before the first request."""
    from overt.view.server.trace_request import TraceRequest, trace_answer

    request = TraceRequest(served, WORDS)
    if served.kind == "image":
        need("PIL", "view")
        from PIL import Image

        picture = io.BytesIO()
        Image.new("RGB", (64, 64), (120, 90, 60)).save(picture, "PNG")
        request = TraceRequest(served, picture=picture.getvalue(), format="PNG")
    try:
        answer = json.loads(trace_answer(request, Limits(), lambda: True))
    except Exception as error:  # a model's own code can fail in any way
        raise ValueError(f"--model {place} cannot be traced: {_line(error)}") from None
    return replace(served, layers=answer["index"]["traces"][0]["layers"])


def run(
    models: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 8321,
    *,
    tokens: int = Limits.tokens,
    workers: int = Limits.workers,
    queue: int = Limits.queue,
    seconds: float = Limits.seconds,
    hosts: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        models: folders, or names on the hub, each as PATH or NAME=PATH; requests can name no others.
        host: address to listen on; by default this machine only.
        port: port to listen on; 0 for any free port.
        tokens: maximum number of tokens of a text.
        workers: number of traces computed in parallel.
        queue: number of requests that may wait; further ones are refused as the server is busy.
        seconds: maximum time from a request to its answer.
        hosts: names that a request's Host header may have, in addition to those of this machine.
    """
    from rich.console import Console

    need("starlette", "view")
    need("uvicorn", "view")
    from overt.view.server import LOCAL, app, is_loopback
    from overt.view.server.run import address_of, bound, server

    _check.whole("--port", port, 0)
    _check.positive("--seconds", seconds)
    limits = Limits(tokens=tokens, workers=workers, queue=queue, seconds=seconds)
    places = parse_models(models)
    console = Console(highlight=False, soft_wrap=True)
    listening = bound(host, port)  # before models are loaded, so that a taken port is reported at once
    try:
        served: dict[str, Served] = {}
        for name, place in places.items():
            began = time.monotonic()
            served[name] = open_served(name, place)
            about = f"{served[name].kind}, {served[name].layers} layers, {time.monotonic() - began:.1f} s"
            console.print(f"{name}: {about}", markup=False)
        local = is_loopback(host)
        names = [*LOCAL, host, socket.gethostname(), socket.getfqdn(), *hosts]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        application = app(served, limits, hosts=names, addresses=not local, threads=max(1, cores // workers))
        if not local:
            console.print(
                f"warning: with --host {host}, anyone who can reach this machine can use these models; there "
                "are no passwords, and nothing is encrypted",
                style="yellow",
                markup=False,
            )
        console.print(
            f"Overt serves {', '.join(served)} at {address_of(listening)} (stop with Ctrl-C)", markup=False
        )
        sys.stdout.flush()
        server(application, limits).run([listening])
    finally:
        listening.close()
    console.print("stopped", style="dim")
    if application.state.serving.work.running:
        # A thread inside a library cannot be stopped, and a normal exit while it runs can crash.
        console.print(
            f"abandoned a trace that ran longer than {limits.finish:g} s", style="dim", markup=False
        )
        sys.stdout.flush()
        os._exit(0)


@app.command(rich_help_panel="View attention")
def serve(
    model: Annotated[
        list[str],
        typer.Option(
            help="Folder with weights and tokenizer, or a name on the hub, as PATH or NAME=PATH. Repeatable."
        ),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. By default this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for any free port.", min=0, max=65535)] = 8321,
    tokens: Annotated[int, typer.Option(help="Maximum number of tokens of a text.", min=1)] = Limits.tokens,
    workers: Annotated[int, typer.Option(help="Number of traces in parallel.", min=1)] = Limits.workers,
    queue: Annotated[
        int, typer.Option(help="Number of requests that may wait; further ones are refused.", min=1)
    ] = Limits.queue,
    seconds: Annotated[
        float, typer.Option(help="Maximum number of seconds from a request to its answer.")
    ] = Limits.seconds,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Further host name that requests may use. Repeatable.")
    ] = None,
) -> None:
    """Serve a page on this machine: type a sentence or drop an image to see its trace."""
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
