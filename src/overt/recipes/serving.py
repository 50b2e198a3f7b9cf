"""`overt serve`: models named at start, behind a page on this machine."""

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
from typing import Any

from overt import _check
from overt._extras import need
from overt.recipes._runs import check_model
from overt.recipes.tracing import open_model
from overt.view.server.limits import Limits, Served, check_name

WORDS = "the key to the cabinets"


def named(models: Sequence[str]) -> dict[str, str]:
    """Name → folder or hub name, from `PATH` and `NAME=PATH`."""
    found: dict[str, str] = {}
    for given in models:
        name, equals, place = given.partition("=")
        if not equals or os.sep in name or Path(given).exists():
            place, name = given, Path(given).absolute().name if Path(given).exists() else Path(given).name
        if not place:
            raise ValueError(f"--model must be PATH or NAME=PATH, got {given!r}")
        check_name(name)
        if name in found:
            raise ValueError(
                f"--model {given}: there is already a model named {name!r}; name this one: NAME=PATH"
            )
        found[name] = place
    if not found:
        raise ValueError("--model must be given at least once")
    return found


def opened(name: str, place: str) -> Served:
    """A model with its tokenizer or image processor, traced once."""
    import transformers

    check_model(place)
    _check_weights(place)
    model = open_model(place)
    takes = getattr(model, "main_input_name", "input_ids")
    if takes not in ("input_ids", "pixel_values"):
        raise ValueError(f"--model {place} takes {takes}; text and images are served")
    image = takes == "pixel_values"
    tokenizer: Any = None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, ImportError, KeyError) as error:
        if not image:
            raise ValueError(f"--model {place} has no tokenizer: {_line(error)}") from None
    processor: Any = None
    if image:
        try:
            processor = transformers.AutoImageProcessor.from_pretrained(place)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            raise ValueError(f"--model {place} has no image processor: {_line(error)}") from None
    secrets = {str(Path(place).resolve()): name, place: name} if Path(place).exists() else {}
    served = Served(name, model, tokenizer, processor, "image" if image else "text", secrets=secrets)
    return _tried(served, place)


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__


def _check_weights(place: str) -> None:
    """Refuse weights that are a pickle: a file that can run code when it is opened."""
    names = ("model.safetensors", "model.safetensors.index.json")
    if Path(place).is_dir():
        found = any((Path(place) / name).is_file() for name in names)
    else:
        from transformers.utils.hub import cached_file

        try:
            if not cached_file(place, "config.json", _raise_exceptions_for_missing_entries=False):
                raise OSError("the hub has no model of this name, or cannot be reached")
            found = any(cached_file(place, one, _raise_exceptions_for_missing_entries=False) for one in names)
        except OSError as error:
            raise OSError(f"--model {place} is no folder here, and: {_line(error)}") from None
    if not found:
        raise ValueError(
            f"--model {place} has no weights in safetensors, and a pickle is not opened: "
            "model.save_pretrained writes them anew"
        )


def _tried(served: Served, place: str) -> Served:
    """Trace once: what cannot be traced is refused now, and compilers have run before anybody waits."""
    from overt.view.server.trace_request import TraceRequest as Ask
    from overt.view.server.trace_request import trace_answer as made

    ask = Ask(served, WORDS)
    if served.kind == "image":
        need("PIL", "view")
        from PIL import Image

        picture = io.BytesIO()
        Image.new("RGB", (64, 64), (120, 90, 60)).save(picture, "PNG")
        ask = Ask(served, picture=picture.getvalue(), format="PNG")
    try:
        answer = json.loads(made(ask, Limits(), lambda: True))
    except Exception as error:  # whatever a model's own code says: nobody can ask for what cannot be traced
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
        models: folders, or names on the hub, each as PATH or NAME=PATH; the only ones that can be asked for.
        host: where to listen; this machine alone by default.
        port: 0 for any that is free.
        tokens: of a text, at most.
        workers: traces at a time.
        queue: requests that wait; more are told that the server is busy.
        seconds: from a request to its answer, at most.
        hosts: further names that a request's Host header may have, beside this machine's own.
    """
    from rich.console import Console

    need("starlette", "view")
    need("uvicorn", "view")
    from overt.view.server import LOCAL, app, is_loopback
    from overt.view.server.run import address_of, bound, server

    _check.whole("--port", port, 0)
    _check.positive("--seconds", seconds)
    limits = Limits(tokens=tokens, workers=workers, queue=queue, seconds=seconds)
    places = named(models)
    console = Console(highlight=False, soft_wrap=True)
    listening = bound(host, port)  # before models are loaded: a port that is taken is said at once
    try:
        served: dict[str, Served] = {}
        for name, place in places.items():
            began = time.monotonic()
            served[name] = opened(name, place)
            about = f"{served[name].kind}, {served[name].layers} layers, {time.monotonic() - began:.1f} s"
            console.print(f"{name}: {about}", markup=False)
        local = is_loopback(host)
        names = [*LOCAL, host, socket.gethostname(), socket.getfqdn(), *hosts]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        application = app(served, limits, hosts=names, addresses=not local, threads=max(1, cores // workers))
        if not local:
            console.print(
                f"warning: --host {host} lets everybody who reaches this machine use these models; there are "
                "no passwords, and nothing is encrypted",
                style="yellow",
                markup=False,
            )
        console.print(
            f"Overt serves {', '.join(served)} at {address_of(listening)} (Ctrl-C stops)", markup=False
        )
        sys.stdout.flush()
        server(application, limits).run([listening])
    finally:
        listening.close()
    console.print("stopped", style="dim")
    if application.state.serving.work.running:
        # A thread inside a library cannot be stopped, and ending around it can crash.
        console.print(f"a trace ran longer than {limits.finish:g} s and was left", style="dim", markup=False)
        sys.stdout.flush()
        os._exit(0)
