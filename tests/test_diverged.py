"""What a table says of trainings that diverged, from command to command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from overt.recipes._recipe import Request
from overt.recipes._rows import look_up
from overt.recipes._training import DivergedError


def test_losses_of_earlier_commands_are_told_while_they_are_true(tmp_path: Path) -> None:
    """Also of a row that has no numbers; but not of other settings, or of a row that there is no longer."""

    def request(lost: Sequence[Mapping[str, Any]] = ()) -> Any:
        options = {"workers": 1}
        console = Console(quiet=True)
        return Request(tmp_path, None, None, 2, "cpu", False, options, console, lost=lost)

    def command(rows: list[str], epochs: int, lost: Sequence[Mapping[str, Any]] = ()) -> Any:
        """The trainings of one command; those of the row "B" diverge."""
        every = {name: SimpleNamespace(settings=lambda name=name: {"name": name}) for name in "AB"}
        training, given = SimpleNamespace(updates=5), request(lost)
        known = look_up(given, every, rows, tmp_path / "runs", {"epochs": epochs}, training, "cpu")
        known.fill(
            given,
            None,
            perform,
            partly=True,
            milliseconds=lambda _: 1.0,
            line=str,
            prepare=lambda: None,
            together=True,
        )
        return known.outcome({}, every, False)

    def perform(task: Any, *_: Any) -> dict[str, Any]:
        if task.name == "B":
            raise DivergedError("no number", 3)
        return {"updates": 5, "run": {"hardware": ""}}

    first = command(["A", "B"], 1)
    losses = first.config["diverged"]
    assert [(each["row"], each["seed"], each["updates"]) for each in losses] == [("B", 0, 3), ("B", 1, 3)]
    assert list(first.diverged) == losses
    other = command(["A"], 1, losses)
    assert (other.config["diverged"], list(other.diverged)) == (losses, []), "not of this command"
    assert "diverged" not in command(["A"], 2, losses).config
    again = command(["A", "B"], 1, losses)
    assert again.config["diverged"] == list(again.diverged) == losses, "each once"
    gone = [{**losses[0], "row": "C"}]
    assert "diverged" not in command(["A"], 1, gone).config
