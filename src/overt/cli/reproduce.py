"""`overt reproduce`: measure a table or figure of a paper again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from overt.cli.shared import DataOption, FreshOption, app, resumable

NAMED = "overt.reproduce.name"  # where a context keeps the name of the recipe, for the help


class HelpOfRecipe(TyperCommand):
    """A command whose help ends with the options of the recipe that is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line; click shows the help before it has read the name."""
        taking = {
            name
            for option in self.params
            if isinstance(option, TyperOption) and not (option.is_flag or option.count)
            for name in option.opts
        }
        free = [word for before, word in zip(["", *args], args, strict=False) if before not in taking]
        ctx.meta[NAMED] = next((word for word in free if not word.startswith("-")), None)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        super().format_help(ctx, formatter)
        if (name := ctx.meta.get(NAMED)) is not None:
            from overt.recipes import reproduce as recipes

            recipes.show_list(name)


@app.command(
    cls=HelpOfRecipe,
    rich_help_panel="Reproduce a paper's results",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},  # options of single recipes
)
def reproduce(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of the recipe, whose own options NAME --help shows. Default: list all recipes."
        ),
    ] = None,
    data: DataOption = None,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds, counted from 0. Default: the recipe's.", min=1)
    ] = None,
    device: Annotated[str, typer.Option(help="Device: cpu, cuda or auto.")] = "auto",
    model: Annotated[
        str | None, typer.Option(help="Pretrained model: a folder, or a name on the hub.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/….")] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder for result files. Default: results/, or the run's folder if settings were changed."
        ),
    ] = None,
    fresh: FreshOption = False,
    retell: Annotated[
        bool, typer.Option(help="Measure nothing: rewrite the tables and notes of a stored result.")
    ] = False,
    list_recipes: Annotated[
        bool, typer.Option("--list", help="List all recipes and their options, or those of NAME.")
    ] = False,
) -> None:
    """Measure a table or figure of a paper again, and record it next to the published numbers."""
    from overt.recipes import reproduce as recipes
    from overt.recipes._rows import DIVERGED

    if name is None or list_recipes:
        recipes.show_list(name)
        return
    if retell:
        recipes.retell(name, results, context.args)
        return
    with resumable(fresh):
        result = recipes.run(name, data, seeds, device, model, out, results, fresh, context.args)
    if DIVERGED in result:
        raise ValueError(
            f"{name} lacks {recipes.losses_in_words(result[DIVERGED])}: their loss was not finite. "
            "The others are in its tables"
        )
    if "unmet" in result:  # all is written
        raise ValueError(f"{name} is not to be relied on, as this fails: {'; '.join(result['unmet'])}")
