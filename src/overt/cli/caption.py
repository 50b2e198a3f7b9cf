"""Caption a picture with a trained network, and show what each word drew on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from overt import _check
from overt._files import check_folder
from overt.cli.inputs import check_kind
from overt.cli.shared import app
from overt.data.named_images import square
from overt.data.pictures import opened
from overt.models.att2in import MODEL_TYPE
from overt.recipes import caption_training
from overt.recipes._training import torch_device
from overt.recipes.caption_reading import SAMPLES, read_caption
from overt.view.captions import CaptionMaps
from overt.view.pages import caption_page


def run(
    image: str,
    models: Sequence[str],
    beam: int = 1,
    samples: int = SAMPLES,
    device: str = "auto",
    out: Path | None = None,
) -> list[CaptionMaps]:
    """Print captions of a picture by one or more networks; optionally write a page.

    Args:
        image: path of the picture.
        models: folders that `overt reproduce bam-table-3` wrote.
        beam: hypotheses of the beam search; 1 is greedy.
        samples: draws of random weights.
        device: "cpu", "cuda" or "auto".
        out: path of a page, .html.
    """
    from rich.console import Console

    _check.whole("--beam", beam, 1)
    _check.whole("--samples", samples, 1)
    where = torch_device(device)
    if out is not None:
        if out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--out must end in .html, got {out}")
        check_folder("--out", out)
    if Path(image).is_dir():
        raise IsADirectoryError(f"picture {image} is a folder: give a file in it")
    photo = opened(image, image)  # before models are read
    if not models:
        raise ValueError("--model must be given at least once")
    console = Console(highlight=False, soft_wrap=True)
    found = []
    for folder in models:
        check_kind(folder, MODEL_TYPE)
        model = caption_training.load(folder)
        model.net.to(where)
        model.encoder.to(where)
        if beam > len(model.vocabulary):
            raise ValueError(
                f"--beam must be at most {len(model.vocabulary)} for {folder}: {len(model.vocabulary.words)} "
                f"words, the end, and one id for all rare words; got {beam}"
            )
        size = photo.height, photo.width
        maps = read_caption(model, square(photo, image, model.side), beam, samples, size)
        found.append(maps)
        _print(console, maps, f"{maps.model} ({folder})" if len(models) > 1 else "")
    if out is not None:
        if len({maps.model for maps in found}) < len(found):  # seeds of one row, say
            found = [
                replace(maps, model=f"{maps.model} ({folder})")
                for maps, folder in zip(found, models, strict=True)
            ]
        # The captions are below, whole; a heading would have room for the beginning of one.
        caption_page(found, title=Path(image).name).save(out)
        console.print(f"page in {out}: open it in any browser", style="dim", markup=False)
    return found


def _print(console: object, maps: CaptionMaps, heading: str) -> None:
    from rich.console import Console

    assert isinstance(console, Console)
    if heading:
        console.print(heading, style="dim", markup=False)
    console.print(maps.text or "(no words)", style="bold", markup=False)
    said = ", ".join(
        f"{word} {100 * float(p):.0f} %" for word, p in zip(maps.words, maps.probabilities, strict=True)
    )
    console.print(said, style="dim", markup=False)
    if not maps.ended:
        words = "1 word" if len(maps.words) == 1 else f"{len(maps.words)} words"
        console.print(f"cut at {words}: the network would have gone on", style="dim", markup=False)
    if maps.draws:
        console.print(drawn_words(maps), style="dim", markup=False)


def drawn_words(maps: CaptionMaps) -> str:
    """How many captions the draws of the weights lead to, in words."""
    same = sum(draw.times for draw in maps.draws if maps.is_of(draw))
    cut = sum(draw.times for draw in maps.draws if not draw.ended)
    draws = "1 draw" if maps.samples == 1 else f"{maps.samples} draws"
    verb = "leads" if maps.samples == 1 else "lead"
    start = f"{draws} of the attention weights {verb} to"
    if len(maps.draws) == 1:
        return f"{start} {'this caption' if same else 'another caption'}{', cut' if cut else ''}"
    told = f"; {cut} of the draws {'is' if cut == 1 else 'are'} cut" if cut else ""
    return f"{start} {len(maps.draws)} different captions; {same or 'none'} of the draws to this one{told}"


@app.command(rich_help_panel="Read attention")
def caption(
    image: Annotated[str, typer.Argument(help="Path of a picture.")],
    model: Annotated[
        list[str],
        typer.Option(help="Folder that `overt reproduce bam-table-3` wrote. Repeatable: they are compared."),
    ],
    beam: Annotated[int, typer.Option(help="Beams of the beam search; 1 is greedy.", min=1)] = 1,
    samples: Annotated[int, typer.Option(help="Draws of random attention weights.", min=1)] = SAMPLES,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or auto.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Also write a page: the picture word by word (.html).")
    ] = None,
) -> None:
    """Write a caption of a picture, and show which regions each word drew on."""
    run(image, model, beam, samples, device, out)
