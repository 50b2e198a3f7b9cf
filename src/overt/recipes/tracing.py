"""Trace one sentence or picture through a pretrained model and print what its attention draws on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import overt
from overt._extras import need
from overt._files import check_folder
from overt.attaching.settings import settings_in
from overt.recipes._runs import check_model
from overt.tracing.methods.method import method_of
from overt.tracing.methods.method import methods as known_methods
from overt.tracing.mixing.mixing import mixing_of
from overt.tracing.options import numbers
from overt.tracing.tracer import everything
from overt.view.terminal import table

if TYPE_CHECKING:
    from rich.console import Console

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
    if settings_in(settings) is not None:
        return overt.load(name)
    wanted = (settings.get("architectures") or [""])[0]
    return getattr(transformers, wanted, AutoModel).from_pretrained(name).eval()


def is_picture(text: str) -> bool:
    """Whether a text is the path of a picture, by its ending."""
    named = Path(text).suffix.lower() in PICTURES
    return named and (" " not in text or Path(text).is_file())


def read_input(text: str) -> Any:
    """The text itself, or the picture whose path it is."""
    if not is_picture(text):
        return text
    if not Path(text).is_file():
        raise FileNotFoundError(f"there is no picture {text}")
    need("PIL", "view")
    from PIL import Image

    return Image.open(text)


def run(
    texts: Sequence[str],
    models: Sequence[str],
    methods: Sequence[str] | None = None,
    layer: int = -1,
    query: int | None = None,
    decoder: str | None = None,
    residual: float | None = None,
    receptive_field: bool = False,
    mixing: Any = "attention",
    out: Path | None = None,
) -> dict[str, overt.Trace]:
    """Trace each text through each model, print a table of each, and write a page or the trace to `out`."""
    from rich.console import Console

    for method in methods or ():
        method_of(method, argument="--method")
    mixing_of(mixing, "--mixing")
    page = out is not None and out.suffix.lower() in (".html", ".htm")
    if out is not None:
        if not page and out.suffix != ".safetensors":
            raise ValueError(f"--out must end in .html (a page) or .safetensors (the trace), got {out}")
        check_folder("--out", out)
        if not page and len(texts) * len(models) > 1:
            raise ValueError(
                f"{out} holds one trace: give one text and one model, or a page, --out page.html"
            )
    console = Console()
    found: dict[str, overt.Trace] = {}
    for name in models:
        model = open_model(name)
        wanted = everything(model, mixing) if page else {}
        for text in texts:
            traced = overt.trace(model, read_input(text), decoder=decoder, mixing=mixing, **wanted)
            label = " · ".join(
                part for part, many in ((Path(name).name, models), (text, texts)) if len(many) > 1
            )
            found[label if label not in found else f"{label} ({len(found) + 1})"] = traced
            heading = f"{label}: " if label else ""
            arguments = {"residual": residual, "receptive_field": receptive_field}
            able = [name for name, one in known_methods("maps").items() if traced.why_not(one) is None]
            shown = able if methods is None else methods
            _print(console, traced, shown, layer, query, heading, arguments)
    if page and out is not None:
        # The page has all that read maps, and of what runs the model that which was named.
        running = {name for name in methods or () if method_of(name).runs_model}
        one = found if len(found) > 1 else next(iter(found.values()))
        maps = known_methods("maps").items()
        able = [name for name, method in maps if not any(t.why_not(method) for t in found.values())]
        asked = None if not running else [*able, *sorted(running)]
        made = overt.page(one, residual=residual, methods=asked)
        made.save(out)
        console.print(f"page in {out}: open it in any browser", style="dim", markup=False, soft_wrap=True)
    elif out is not None:
        next(iter(found.values())).save(out)
        line = f"saved in {out}; overt.Trace.load reads it"
        console.print(line, style="dim", markup=False, soft_wrap=True)
    return found


def _print(
    console: Console,
    traced: overt.Trace,
    methods: Sequence[str],
    layer: int,
    query: int | None,
    heading: str,
    arguments: dict[str, Any],
) -> None:
    layers, queries = len(traced.maps), traced.maps[0].shape[-2]
    row = traced.main_queries()[0] if query is None else numbers("queries", query, queries)[0]
    word = traced.tokens[0][traced.mask.shape[1] - queries + row]
    title = f"{heading}{traced.kind}, layer {layer % layers + 1} of {layers}, what {word!r} draws on"
    if traced.mixing != "attention" and any(not method_of(name).runs_model for name in methods):
        title += f", by {traced.mixing_kind.title}"
    console.print(table(traced, methods, query, layer, title, **arguments))
