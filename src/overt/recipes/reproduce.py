"""`overt reproduce`: measure tables and figures of papers again, next to the published numbers.

A recipe is an entry of `RECIPES`. The runner gives it a folder, seeds and a device, and records its
measurements in `results/NAME.json` and in RESULTS.md, which is regenerated from all such files after every
run. The tables and notes of a stored result can be rewritten without measuring (`retell`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt import _check
from overt._files import write_whole
from overt.recipes import (
    bam_captions,
    bam_graphs,
    bam_nan,
    bam_questions,
    bam_translation,
    ea_figure_a6,
    ea_probe,
    ea_probe_text,
    ea_rationales,
    ea_translation,
    ea_understanding,
    ea_vision,
    ea_vision_figures,
    faithfulness,
    flow_figures,
    flow_pronouns,
    flow_sentiment,
    flow_tables,
    uncertainty,
)
from overt.recipes._recipe import Option, Outcome, Recipe, Report, Request
from overt.recipes._result_files import read_kept, read_result, write_kept, write_result
from overt.recipes._rows import DIVERGED
from overt.recipes._tables import show
from overt.recipes._training import hardware, is_main_process, torch_device, versions

if TYPE_CHECKING:
    from rich.console import Console

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        flow_tables.TABLE_1,
        flow_tables.TABLE_2,
        flow_sentiment.TABLE_3,
        flow_figures.FIGURE_1,
        flow_figures.FIGURE_2,
        flow_figures.FIGURE_3,
        flow_pronouns.FIGURE_4,
        bam_graphs.TABLE_1,
        bam_captions.TABLE_3,
        bam_nan.NAN,
        ea_vision.TABLE_1,
        ea_vision.TABLE_2,
        ea_probe.TABLE_7,
        ea_vision_figures.FIGURE_1,
        ea_vision_figures.FIGURE_4,
        ea_vision_figures.FIGURE_A1,
        ea_understanding.TABLE_3,
        ea_understanding.TABLE_4,
        ea_probe_text.PROBE,
        ea_figure_a6.FIGURE_A6,
        ea_rationales.TABLE_8,
        ea_translation.TABLE_5,
        ea_translation.TABLE_6,
        ea_translation.FIGURE_5,
        bam_questions.TABLE_2,
        bam_translation.TABLE_4,
        ea_understanding.BAM_TABLE_5,
        uncertainty.UNCERTAINTY,
        faithfulness.FAITHFULNESS,
        bam_questions.TABLE_7,
        bam_translation.TABLE_8,
    )
}


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
        name: name of the recipe.
        data: folder with data sets; by default OVERT_DATA.
        seeds: number of seeds; None for the recipe's default.
        device: "cpu", "cuda" or "auto".
        model: a pretrained model, if the recipe needs one.
        out: folder of the run; runs/… if None.
        results: folder for the result files. None stands for results/ if the run has the recipe's default
            settings, and for a folder in `out` if it has other settings, fewer seeds or stand-in data, so
            that a trial does not overwrite a result. RESULTS.md is written next to a folder called results,
            or else into the folder.
        fresh: whether to discard an earlier run in `out`.
        extra: options of the recipe, as on the command line.
    """
    from rich.console import Console

    recipe = find(name)
    torch_device(device)
    seeds_given = seeds is not None
    seeds = recipe.seeds if seeds is None else seeds
    _check.whole("--seeds", seeds, 1)
    console = Console(quiet=not is_main_process())
    request = Request(
        out=Path("runs") / recipe.folder if out is None else out,
        data=data,
        model=model,
        seeds=seeds,
        device=device,
        fresh=fresh,
        options=read_options(recipe, extra),
        console=console,
        seeds_given=seeds_given,
    )
    console.print(f"[bold]{recipe.name}[/bold]: {recipe.title} ({recipe.paper})")
    name = f"{result_name(recipe, request.options)}.json"
    place = (results or Path("results")) / name
    earlier = _earlier(place, recipe)
    elsewhere = _elsewhere(results or Path("results"), recipe, request.options)
    this = command(recipe, request)
    kept = read_kept(place.with_suffix("")) if earlier else {}
    lost = earlier.get("config", {}).get(DIVERGED, [])
    request = replace(
        request, command=this, stored=_by_seed(earlier), elsewhere=elsewhere, kept=kept, lost=lost
    )
    outcome = recipe.run(request)
    report = report_of(recipe, outcome)
    result = {
        "recipe": recipe.name,
        "title": recipe.title,
        "paper": recipe.paper,
        **_origin(outcome, earlier, this, device),
        "config": outcome.config,
        "seeds": list(outcome.per_seed),
        "published": recipe.published,
        "per_seed": {str(seed): numbers for seed, numbers in outcome.per_seed.items()},
        "mean": outcome.mean,
        "spread": outcome.spread,
        **_tables_and_notes(report),
    }
    if unmet := recipe.unmet(outcome):
        result["unmet"] = unmet
    if results is None:
        results = (
            Path("results") if _has_default_settings(recipe, request, outcome) else request.out / "results"
        )
    if not is_main_process():
        return result
    results.mkdir(parents=True, exist_ok=True)
    path = results / name
    write_kept(path.with_suffix(""), outcome.kept)
    if recipe.draw is not None:
        recipe.draw(outcome, path.with_suffix(".svg"))
    page = _write(path, result, report, console)
    if outcome.diverged:
        result[DIVERGED] = list(outcome.diverged)  # of this command alone
    console.print(f"[dim]models and numbers of each seed in {request.out}; result in {path} and {page}[/dim]")
    return result


def retell(name: str, results: Path | None = None, extra: Sequence[str] = ()) -> dict[str, Any]:
    """Rewrite the tables and notes of a stored result from its numbers.

    For results that were measured before a recipe's report was extended. Nothing is measured: the numbers of
    the seeds, the command, date, hardware and versions of the run do not change.

    Args:
        name: name of the recipe.
        results: folder with the result files; results/ if None.
        extra: the recipe's options that select a separate result, as on the command line.
    """
    from rich.console import Console

    recipe = find(name)
    results = Path("results") if results is None else results
    path = results / f"{result_name(recipe, read_options(recipe, extra))}.json"
    if not path.exists():
        raise FileNotFoundError(
            f"--retell needs a stored result, but {path} does not exist: measure it first, or give the "
            f"folder that has it, such as --results runs/{recipe.folder}/results after a trial"
        )
    stored = _read(path, recipe)
    if stored is None:
        raise ValueError(f"{path} must be a result of {recipe.name}")
    outcome = Outcome(stored["config"], _by_seed(stored))
    report = report_of(recipe, outcome)
    if recipe.draw is not None:
        recipe.draw(outcome, path.with_suffix(".svg"))
    result = stored | _tables_and_notes(report)
    console = Console()
    page = _write(path, result, report, console)
    console.print(f"[dim]rewrote the tables and notes in {path} and {page}[/dim]")
    return result


def report_of(recipe: Recipe, outcome: Outcome) -> Report:
    """A recipe's report, with a note on trainings that diverged."""
    report, lost = recipe.report(outcome), outcome.config.get(DIVERGED, [])
    if not lost:
        return report
    note = (
        f"Without numbers, as their loss was not finite: {losses_in_words(lost)}. Means and intervals are "
        "over the other seeds, which may flatter the row."
    )
    return replace(report, notes=[*report.notes, note])


def losses_in_words(lost: Sequence[Mapping[str, Any]]) -> str:
    """Trainings that diverged, one after the other."""
    return "; ".join(
        f"{each['row']}, seed {each['seed']} (after {each['updates']:,} updates)" for each in lost
    )


def _read(path: Path, recipe: Recipe) -> dict[str, Any] | None:
    """A result file; None if it is something else."""
    stored = read_result(path)
    return stored if stored is not None and stored["recipe"] == recipe.name else None


def _origin(outcome: Outcome, earlier: Mapping[str, Any], this: str, device: str) -> dict[str, Any]:
    """Commands, date, hardware and versions of a result.

    Where nothing was measured they are the earlier file's, or of runs that another table's file has and it
    has not: those of the latest of these.
    """
    runs = _runs(outcome)
    made_by = list(dict.fromkeys(run["command"] for run in runs if "command" in run))
    last = [outcome.config[name] for name in ("timed_by", "drawn_by") if outcome.config.get(name)]
    now: dict[str, Any] = {
        "commands": list(dict.fromkeys([*made_by, *last])) or [this],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "hardware": hardware(device),
        "versions": versions(),
    }
    if outcome.measured:
        return now
    known = {name: earlier[name] for name in now} if earlier else {}
    commands = known.get("commands", [])
    added = [run for run in runs if "command" in run and run["command"] not in commands]
    if not added:
        return known or now
    latest = max(added, key=lambda run: str(run.get("date")))
    found = {name: latest.get(name, value) for name, value in now.items()}
    return found | {"commands": list(dict.fromkeys([*commands, *made_by]))}


def _runs(outcome: Outcome) -> list[dict[str, Any]]:
    """The records of the runs, in the order of rows; empty if there are none."""
    entries = [rows for rows in outcome.per_seed.values() if isinstance(rows, dict)]
    records = [row.get("run") for rows in entries for row in rows.values() if isinstance(row, dict)]
    return [record for record in records if isinstance(record, dict)]


def _earlier(path: Path, recipe: Recipe) -> dict[str, Any]:
    """An earlier result file; empty if there is none."""
    return (_read(path, recipe) if path.exists() else None) or {}


def _by_seed(result: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {int(seed): numbers for seed, numbers in result.get("per_seed", {}).items()}


def _elsewhere(results: Path, recipe: Recipe, options: Mapping[str, Any]) -> list[dict[int, dict[str, Any]]]:
    """The numbers in result files of recipes that measure the same models with the same naming options."""
    found = []
    for other in RECIPES.values():
        if other.folder == recipe.folder and other.name != recipe.name:
            values = {name: options.get(name, option.default) for name, option in other.options.items()}
            found.append(_by_seed(_earlier(results / f"{result_name(other, values)}.json", other)))
    return found


def _tables_and_notes(report: Report) -> dict[str, Any]:
    """Tables and notes in the format of a result file."""
    return {"tables": [asdict(grid) for grid in report.grids], "notes": report.notes}


def _write(path: Path, result: dict[str, Any], report: Report, console: Console) -> Path:
    """Write a result file and RESULTS.md, print the tables, and return the path of RESULTS.md."""
    write_result(path, result)
    page = render(path.parent)
    for grid in report.grids:
        show(console, grid)
    for note in report.notes:
        console.print(note, style="dim", markup=False)
    return page


def _has_default_settings(recipe: Recipe, request: Request, outcome: Outcome) -> bool:
    """Whether a run has the recipe's default settings, rather than being a trial."""
    changed = [
        name
        for name, option in recipe.options.items()
        if option.moves and not option.names and request.options[name] != option.default
    ]
    enough = request.seeds >= recipe.seeds or outcome.continued
    return not changed and enough and not outcome.stand_in and not outcome.drops


def find(name: str) -> Recipe:
    """A recipe by its name."""
    if name not in RECIPES:
        raise ValueError(f"the recipe must be one of {', '.join(RECIPES)}; got {name!r}")
    return RECIPES[name]


def read_options(recipe: Recipe, extra: Sequence[str]) -> dict[str, Any]:
    """Parse a recipe's options: `--name value`, `--name=value` or a flag; the others have their defaults."""
    values: dict[str, Any] = {name: option.default for name, option in recipe.options.items()}
    known = ", ".join(f"--{name}" for name in recipe.options) or "none"
    words = list(extra)
    while words:
        word = words.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in recipe.options:
            raise ValueError(f"{recipe.name} has no option {word}; its own options are {known}")
        if recipe.options[name].is_flag:
            if equals:
                raise ValueError(f"--{name} takes no value, got {text!r}")
            values[name] = True
            continue
        if not equals:
            if not words:
                raise ValueError(f"--{name} needs a value: {recipe.options[name].help}")
            text = words.pop(0)
        values[name] = recipe.options[name].read(name, text)
    return values


def command(recipe: Recipe, request: Request) -> str:
    """The command of a run, with DIR for folders of this machine."""
    words = ["overt", "reproduce", recipe.name]
    if request.data is not None or os.environ.get("OVERT_DATA"):
        words += ["--data", "DIR"]
    if request.model is not None:
        absolute = Path(request.model).is_absolute()
        words += ["--model", f"DIR/{Path(request.model).name}" if absolute else request.model]
    words += ["--seeds", str(request.seeds), "--device", request.device]
    for name, value in request.options.items():
        if value is not None and value != recipe.options[name].default:
            folder = Path(str(value))
            if value is True:
                words.append(f"--{name}")
                continue
            words += [f"--{name}", f"DIR/{folder.name}" if folder.is_absolute() else str(value)]
    return shlex.join(words)


def result_name(recipe: Recipe, options: Mapping[str, Any]) -> str:
    """The recipe's name, followed by the values of options that make it a separate measurement."""
    values = [
        Path(str(options[name])).resolve().name  # of a folder, its last part
        for name, option in recipe.options.items()
        if option.names and options[name] != option.default
    ]
    return "-".join([recipe.name, *values])


def render(results: Path) -> Path:
    """Write RESULTS.md from the result files and remarks in the folder `results`."""
    sections = []
    for path in sorted(results.glob("*.json"), key=lambda path: path.stem):
        result = read_result(path)
        if result is not None:
            sections.append((path, result))
    lines = [
        "# Results",
        "",
        "Tables and figures of papers, measured again by `overt reproduce`, which generates this file from "
        f"`{results.name}/*.json`; those contain every seed and setting. Do not edit this file: put remarks "
        f"on a recipe into `{results.name}/NAME.remark.md`, and they are copied here.",
        "",
    ]
    for path, result in sections:
        lines += _section(result, path.stem.removeprefix(result["recipe"]).lstrip("-"))
        figure = path.with_suffix(".svg")
        if figure.exists():
            lines += [f"![{result['title']}]({results.name}/{figure.name})", ""]
        remark = path.with_suffix(".remark.md")
        if remark.exists():
            lines += [remark.read_text().strip(), ""]
    measured = {path.stem for path, _ in sections}
    for path in sorted(results.glob("*.remark.md")):
        name = path.name.removesuffix(".remark.md")
        if name not in measured and name in RECIPES:  # not measured yet; the remark says why
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
    """A result as Markdown; the variant is what the name of its file adds to the recipe's name."""
    seeds = result["seeds"]
    commands = "; ".join(f"`{each}`" for each in result["commands"])
    used = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    lines = [
        f"## {result['title']}{f' ({variant})' if variant else ''}",
        "",
        f"{result['paper']}. {commands}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''} "
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


def show_list(name: str | None = None) -> None:
    """Print every recipe, or one, with its title, paper and options."""
    from rich.console import Console
    from rich.padding import Padding

    console = Console(highlight=False)
    for recipe in RECIPES.values() if name is None else [find(name)]:
        console.print(f"[bold]{recipe.name}[/bold]  {recipe.title} [dim]({recipe.paper})[/dim]")
        for option, what in recipe.options.items():
            console.print(Padding(f"--{option}  {_describe(what)}", (0, 0, 0, 4)))


def _describe(option: Option) -> str:
    return option.help if option.default is None or option.is_flag else f"{option.help} ({option.default})"
