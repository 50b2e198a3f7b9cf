"""`overt reproduce`: tables and figures of papers, measured again, with the published numbers beside them.

A recipe is one entry of `RECIPES`. The runner gives it a folder, seeds and a device, and records what it
measured: `results/NAME.json`, and RESULTS.md, which is written anew from all such files after every run.
What a stored result says of its numbers can be written anew, too (`retell`).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import overt
from overt import _check
from overt._files import write_whole
from overt.recipes import bam_graphs, flow_pronouns, flow_sentiment, flow_tables
from overt.recipes._recipe import Option, Outcome, Recipe, Report, Request, finite
from overt.recipes._tables import show
from overt.recipes._training import hardware, torch_device

if TYPE_CHECKING:
    from rich.console import Console

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        flow_tables.TABLE_1,
        flow_tables.TABLE_2,
        flow_sentiment.TABLE_3,
        flow_pronouns.FIGURE_4,
        bam_graphs.TABLE_1,
    )
}
FORMAT = "overt reproduce 1"  # of result files; RESULTS.md is written from those that have it


def run(
    name: str,
    data: Path | None = None,
    seeds: int | None = None,
    device: str = "auto",
    model: str | None = None,
    out: Path | None = None,
    results: Path | None = None,
    fresh: bool = False,
    extra: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a recipe, print its tables, write its result file and RESULTS.md, and return the result.

    Args:
        name: of the recipe.
        data: folder with data sets, else OVERT_DATA.
        seeds: how many; as many as the recipe wants where None.
        device: "cpu", "cuda" or "auto".
        model: a pretrained model, where the recipe needs one.
        out: folder of the run, runs/… where None.
        results: folder of the result files. None is results/ for a run of the recipe as it stands, and a
            folder in `out` for one with other settings, fewer seeds or stand-in data, so that a try does not
            overwrite a result. RESULTS.md is written beside a folder called results, else into it.
        fresh: forget an earlier run in `out`.
        extra: the recipe's own options, as on the command line.
    """
    from rich.console import Console

    recipe = find(name)
    torch_device(device)
    seeds = recipe.seeds if seeds is None else seeds
    _check.whole("--seeds", seeds, 1)
    console = Console()
    request = Request(
        out=Path("runs") / recipe.folder if out is None else out,
        data=data,
        model=model,
        seeds=seeds,
        device=device,
        fresh=fresh,
        options=read_options(recipe, extra),
        console=console,
    )
    console.print(f"[bold]{recipe.name}[/bold]: {recipe.title} ({recipe.paper})")
    outcome = recipe.run(request)
    told = recipe.tell(outcome)
    result = {
        "format": FORMAT,
        "recipe": recipe.name,
        "title": recipe.title,
        "paper": recipe.paper,
        "command": command(recipe, request),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": hardware(device),
        "versions": versions(),
        "config": outcome.config,
        "seeds": list(outcome.per_seed),
        "published": recipe.published,
        "per_seed": {str(seed): numbers for seed, numbers in outcome.per_seed.items()},
        "mean": outcome.mean,
        "spread": outcome.spread,
        **_in_words(told),
    }
    if results is None:
        results = Path("results") if _as_it_stands(recipe, request, outcome) else request.out / "results"
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{result_name(recipe, request.options)}.json"
    page = _write(path, result, told, console)
    console.print(f"[dim]models and numbers of each seed in {request.out}; {path}; {page}[/dim]")
    return result


def retell(name: str, results: Path | None = None, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Write the tables and notes of a stored result anew, from the numbers that it holds.

    For results that were measured before a recipe learnt to say more. Nothing is measured: no number of a
    seed moves, and command, date, hardware and versions stay those of the run.

    Args:
        name: of the recipe.
        results: folder of the result files, results/ where None.
        extra: those of the recipe's own options that name another result, as on the command line.
    """
    from rich.console import Console

    recipe = find(name)
    results = Path("results") if results is None else results
    path = results / f"{result_name(recipe, read_options(recipe, extra))}.json"
    if not path.exists():
        raise FileNotFoundError(f"--retell needs a stored result, and there is no {path}: measure it first")
    stored = json.loads(path.read_text())
    if not isinstance(stored, dict) or (stored.get("format"), stored.get("recipe")) != (FORMAT, recipe.name):
        raise ValueError(f"{path} must be a result of {recipe.name}")
    outcome = Outcome(stored["config"], {int(seed): numbers for seed, numbers in stored["per_seed"].items()})
    told = recipe.tell(outcome)
    result = stored | _in_words(told)
    console = Console()
    page = _write(path, result, told, console)
    console.print(f"[dim]told anew from the numbers in {path}; {page}[/dim]")
    return result


def _in_words(told: Report) -> dict[str, Any]:
    """Tables and notes as a result file has them."""
    return {"tables": [asdict(grid) for grid in told.grids], "notes": told.notes}


def _write(path: Path, result: dict[str, Any], told: Report, console: Console) -> Path:
    """Write a result file and RESULTS.md, whose path comes back, and print the tables."""
    text = json.dumps(finite(result), indent=1, ensure_ascii=False)
    rows = re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\n *", " ", found[0]), text)  # a list is one line
    write_whole(path, rows + "\n")
    page = render(path.parent)
    for grid in told.grids:
        show(console, grid)
    for note in told.notes:
        console.print(note, style="dim", markup=False)
    return page


def _as_it_stands(recipe: Recipe, request: Request, outcome: Outcome) -> bool:
    """Whether a run is the recipe's own, not a try with other settings."""
    changed = [
        name
        for name, option in recipe.options.items()
        if option.moves and not option.names and request.options[name] != option.default
    ]
    return not changed and request.seeds >= recipe.seeds and not outcome.stand_in


def find(name: str) -> Recipe:
    """A recipe by its name."""
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}: it must be one of {', '.join(RECIPES)}")
    return RECIPES[name]


def read_options(recipe: Recipe, extra: Sequence[str]) -> dict[str, Any]:
    """A recipe's own options from `--name value` or `--name=value`, the rest at their defaults."""
    values: dict[str, Any] = {name: option.default for name, option in recipe.options.items()}
    known = ", ".join(f"--{name}" for name in recipe.options) or "none"
    words = list(extra)
    while words:
        word = words.pop(0)
        name, given, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in recipe.options:
            raise ValueError(f"{recipe.name} has no option {word}; of its own it has {known}")
        if not given:
            if not words:
                raise ValueError(f"--{name} needs a value: {recipe.options[name].help}")
            text = words.pop(0)
        values[name] = recipe.options[name].read(name, text)
    return values


def command(recipe: Recipe, request: Request) -> str:
    """The command of a run. Folders outside are this machine's business: DIR stands for them."""
    words = ["overt", "reproduce", recipe.name]
    if request.data is not None or os.environ.get("OVERT_DATA"):
        words += ["--data", "DIR"]
    if request.model is not None:
        outside = Path(request.model).is_absolute()
        words += ["--model", f"DIR/{Path(request.model).name}" if outside else request.model]
    words += ["--seeds", str(request.seeds), "--device", request.device]
    for name, value in request.options.items():
        if value is not None and value != recipe.options[name].default:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def result_name(recipe: Recipe, options: Mapping[str, Any]) -> str:
    """The recipe's name, and the values of options that make it another measurement."""
    values = [
        str(options[name])
        for name, option in recipe.options.items()
        if option.names and options[name] != option.default
    ]
    return "-".join([recipe.name, *values])


def versions() -> dict[str, str]:
    """Of everything that can move a number, where it is installed."""
    packages = ("torch", "transformers", "accelerate", "torch-geometric", "numba", "numpy", "scipy")
    found = {"python": platform.python_version(), "overt": overt.__version__}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def render(results: Path) -> Path:
    """Write RESULTS.md beside `results` from every result file in it, with the remarks kept there."""
    found = []
    for path in sorted(results.glob("*.json"), key=lambda path: path.stem):
        try:
            result = json.loads(path.read_text())
        except json.JSONDecodeError:
            continue
        if isinstance(result, dict) and result.get("format") == FORMAT:
            found.append((path, result))
    lines = [
        "# Results",
        "",
        "Tables and figures of papers, measured again by `overt reproduce` and written by it from "
        f"`{results.name}/*.json`, which hold every seed and setting. Do not edit: a remark on a recipe goes "
        f"into `{results.name}/NAME.remark.md`, and is taken over here.",
        "",
    ]
    for path, result in found:
        lines += _section(result, path.stem.removeprefix(result["recipe"]).lstrip("-"))
        remark = path.with_suffix(".remark.md")
        if remark.exists():
            lines += [remark.read_text().strip(), ""]
    told = {path.stem for path, _ in found}
    for path in sorted(results.glob("*.remark.md")):
        name = path.name.removesuffix(".remark.md")
        if name not in told and name in RECIPES:  # nothing measured yet, and a reason to say why
            lines += [f"## {RECIPES[name].title}", "", path.read_text().strip(), ""]
    others = [path.name for path in sorted(results.glob("*.md")) if not path.name.endswith(".remark.md")]
    others = [name for name in others if name != "RESULTS.md"]
    if others:
        links = ", ".join(f"[{name.removesuffix('.md')}]({results.name}/{name})" for name in others)
        lines += ["## Other measurements", "", links]
    place = results.resolve()
    page = (place.parent if place.name == "results" else place) / "RESULTS.md"
    write_whole(page, "\n".join(lines).rstrip() + "\n")
    return page


def _section(result: dict[str, Any], variant: str) -> list[str]:
    """One result as Markdown; the variant is what its file's name adds to the recipe's."""
    seeds = result["seeds"]
    used = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    lines = [
        f"## {result['title']}{f' ({variant})' if variant else ''}",
        "",
        f"{result['paper']}. `{result['command']}`, {len(seeds)} seed{'s' if len(seeds) > 1 else ''} "
        f"({', '.join(map(str, seeds))}), {result['hardware']}, {result['date']}; {used}.",
        "",
    ]
    for table in result["tables"]:
        lines += [f"{table['title']}:", "", f"| | {' | '.join(table['columns'])} |"]
        lines += ["|---" * (1 + len(table["columns"])) + "|"]
        lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in table["rows"]]
        lines.append("")
    lines += [f"- {note}" for note in result["notes"]]
    return [*lines, ""] if result["notes"] else lines


def show_list() -> None:
    """Print every recipe, with what it measures and its own options."""
    from rich.console import Console

    console = Console(highlight=False)
    for recipe in RECIPES.values():
        console.print(f"[bold]{recipe.name}[/bold]  {recipe.title} [dim]({recipe.paper})[/dim]")
        for name, option in recipe.options.items():
            console.print(f"    --{name}  {_described(option)}")


def _described(option: Option) -> str:
    return option.help if option.default is None else f"{option.help} ({option.default})"
