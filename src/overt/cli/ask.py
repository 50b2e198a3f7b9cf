"""Ask trained models about an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from overt._files import check_folder, write_whole
from overt.cli.inputs import check_kind
from overt.cli.shared import app
from overt.data.pictures import opened
from overt.models.mcan import MODEL_TYPE
from overt.recipes._training import torch_device
from overt.recipes.asking import answer, checked_question, open_answerer
from overt.recipes.question_training import SAMPLES
from overt.view.answers import Reply, answers_page, explained_p


def run(
    image: Path,
    question: str,
    models: Sequence[Path],
    samples: int = SAMPLES,
    seed: int = 0,
    device: str = "auto",
    out: Path | None = None,
) -> list[Reply]:
    """Ask each model, print a table of their answers, and write a page to `out`."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    if out is not None:
        if out.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--out must end in .html, got {out}")
        check_folder("--out", out)
    torch_device(device)  # refuses one that is not there
    picture = opened(image, str(image))
    for folder in models:
        check_kind(folder, MODEL_TYPE)
    names = names_of(models)
    answerers = [open_answerer(folder, name, device) for folder, name in zip(models, names, strict=True)]
    for answerer in answerers:
        checked_question(question, answerer)
    replies = [answer(answerer, picture, question, samples, seed) for answerer in answerers]
    table = Table(box=box.SIMPLE, padding=(0, 0, 0, 1))
    for heading in ("", "answer", "probability", f"mean of {samples} passes", "next", "p", "passes"):
        left = heading in ("", "answer", "next", "passes")
        table.add_column(
            heading, justify="left" if left else "right", overflow="fold" if left else "ellipsis"
        )
    for reply in replies:
        likely = {each.name: each for each in reply.likely}
        own = likely.get(reply.answer)
        mean = "–" if own is None else f"{100 * own.mean:.1f} ± {100 * own.spread:.1f} %"
        others = [each for each in reply.likely if each.name != reply.answer]
        other = f"{others[0].name} {100 * others[0].mean:.1f} %" if others else "–"
        cells = [reply.model, reply.answer, f"{100 * reply.probability:.1f} %", mean, other]
        table.add_row(*map(escape, cells), reply.p_text, "agree" if reply.agree else "differ")
    console = Console()
    console.print(table)
    console.print(explained_p(), style="dim", markup=False, highlight=False, soft_wrap=True)
    for reply in replies:
        if reply.unknown:
            line = f"{reply.model} does not know {', '.join(reply.unknown)}"
            console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    if replies[0].unread:  # all models read as many
        console.print(replies[0].unread, style="dim")
    if out is not None:
        shown = picture.copy()
        shown.thumbnail((960, 960))
        write_whole(out, answers_page(shown, question, replies, image.name))
        line = f"page in {out}: open it in any browser"
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    return replies


def names_of(folders: Sequence[Path]) -> list[str]:
    """Short names of models: the parts of their paths in which they differ, without "model" at the end."""
    parts = [[part for part in folder.absolute().parts if part != "model"] for folder in folders]
    if len(parts) == 1:
        return [" ".join(parts[0][-2:])]
    longest = max(map(len, parts))
    filled = [["", *[""] * (longest - len(each)), *each] for each in parts]
    differ = [place for place in range(longest + 1) if len({each[place] for each in filled}) > 1]
    names = [" ".join(each[place] for place in differ if each[place]) for each in filled]
    return [name or f"model {number}" for number, name in enumerate(names, 1)]


@app.command(rich_help_panel="Read attention")
def ask(
    image: Annotated[Path, typer.Argument(help="Path of an image.")],
    question: Annotated[str, typer.Argument(help='Question, such as "how many chairs are there ?".')],
    model: Annotated[
        list[Path],
        typer.Option(
            help="Folder of a model that `overt reproduce bam-table-2` trained. Repeatable: several are "
            "compared."
        ),
    ],
    samples: Annotated[int, typer.Option(help="Passes with dropout on.", min=2)] = SAMPLES,
    seed: Annotated[int, typer.Option(help="Random seed of these passes.", min=0)] = 0,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or auto.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Also write a page (.html) with what the answers drew on.")
    ] = None,
) -> None:
    """Ask models about an image: their answers, how sure they are, and what the answers drew on."""
    run(image, question, model, samples, seed, device, out)
