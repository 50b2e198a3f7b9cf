"""What a table says of trainings that diverged, from command to command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from overt.recipes import bam_captions
from overt.recipes._recipe import Request
from overt.recipes._rows import Lost, look_up, losses_of
from overt.recipes._training import DivergedError
from overt.recipes.understanding_forms import row_name
from overt.recipes.understanding_runs import in_stored


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


def test_losses_without_settings_are_left_out(tmp_path: Path) -> None:
    """Results of a while ago have no settings of losses."""
    old = {"row": "A", "seed": 0, "updates": 3}
    options = {"workers": 1}
    request = Request(tmp_path, None, None, 1, "cpu", False, options, Console(quiet=True), lost=[old])
    assert losses_of(request) == []
    assert losses_of(replace(request, lost=[{**old, "settings": "0"}])) == [Lost("A", 0, 3, "0")]


def test_a_task_of_which_nothing_is_known_but_that_it_diverged_stays_in_its_table(tmp_path: Path) -> None:
    lost = [{"row": row_name("Evolving", "RTE"), "seed": 0, "updates": 3, "settings": "0"}]
    request = Request(tmp_path, None, None, 1, "cpu", False, {}, Console(quiet=True), lost=lost)
    assert in_stored(request, "task") == ["RTE"]
    assert in_stored(request, "form") == ["Evolving"]


def test_captions_that_are_scored_later_still_lack_what_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = [{"row": "WC", "seed": 3, "updates": 3, "settings": "0"}]
    stored = {0: {"soft": {"run": {"settings": {"data": "0"}}}}}
    monkeypatch.setattr(bam_captions, "scored", lambda known, *_: known.lost)
    request: Any = SimpleNamespace(stored=stored, lost=lost)
    data: Any = SimpleNamespace(sha256="0")
    assert bam_captions.with_meteor(request, data, tmp_path) == [Lost("WC", 3, 3, "0")]
