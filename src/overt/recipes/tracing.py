"""Trace one sentence or picture through a pretrained model and print what its attention draws on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import overt
from overt import _check
from overt.recipes._runs import check_model
from overt.trace.graph import numbers
from overt.trace.trace import METHODS
from overt.trace.weighted import GRAPHS
from overt.view.terminal import table

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}


def open_model(name: str) -> Any:
    """A model of the class that its config names, mechanisms and all."""
    import transformers
    from transformers import AutoModel, PreTrainedConfig
    from transformers.utils import logging

    check_model(name)
    # What it says of unused heads does not help here.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings, _ = PreTrainedConfig.get_config_dict(name)
    if settings.get("model_type") == "overt":
        return overt.load(name)
    wanted = (settings.get("architectures") or [""])[0]
    return getattr(transformers, wanted, AutoModel).from_pretrained(name).eval()


def run(
    text: str,
    model: str,
    methods: Sequence[str],
    layer: int = -1,
    query: int | None = None,
    decoder: str | None = None,
    residual: float = 0.5,
    receptive_field: bool = False,
    graph: Any = "attention",
    out: Path | None = None,
) -> overt.Trace:
    """Trace, print the table, and save the trace if `out` is given."""
    from rich.console import Console

    for method in methods:
        _check.one_of("--method", method, METHODS)
    _check.one_of("--graph", graph, GRAPHS)
    inputs: Any = text
    if Path(text).suffix.lower() in PICTURES and " " not in text:
        from PIL import Image

        if not Path(text).is_file():
            raise FileNotFoundError(f"there is no picture {text}")
        inputs = Image.open(text)
    traced = overt.trace(open_model(model), inputs, decoder=decoder, graph=graph)
    layers, queries = len(traced.maps), traced.maps[0].shape[-2]
    row = traced.main_queries()[0] if query is None else numbers("queries", query, queries)[0]
    word = traced.tokens[0][traced.mask.shape[1] - queries + row]
    console = Console()
    title = f"{traced.kind}, layer {layer % layers + 1} of {layers}, what {word!r} draws on"
    shown = table(
        traced,
        methods,
        query,
        layer,
        title,
        residual=residual,
        receptive_field=receptive_field,
    )
    console.print(shown)
    if out is not None:
        traced.save(out)
        console.print(f"[dim]saved in {out}; overt.Trace.load reads it[/dim]")
    return traced
