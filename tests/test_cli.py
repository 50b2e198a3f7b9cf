"""The command line, as a newcomer meets it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import overt
from overt.cli import app, main
from overt.mechanisms import noise

runner = CliRunner()


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))


@pytest.mark.slow
def test_help_lists_every_command_with_a_line_about_it() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in app.registered_commands:
        assert command.callback is not None
        assert command.callback.__name__ in result.output
        assert command.callback.__doc__
    assert "Start here" in result.output


def test_no_arguments_prints_the_help() -> None:
    assert "Start here" in runner.invoke(app, []).output


def test_info_prints_versions_devices_extras_and_fast_paths() -> None:
    result = runner.invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    text = plain(result.output)
    for word in ("Versions", "torch 2.", "Devices", "cpu", "Extras", "graphs", "Fast paths"):
        assert word in text
    assert "compiled loops, CPU active (numba)" in text


def test_info_says_why_a_fast_path_is_not_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "compiled_kernels", lambda: None)
    assert "not active: numba cannot be imported" in plain(runner.invoke(app, ["info"]).output)


@pytest.mark.slow
def test_the_source_tree_runs_as_a_module() -> None:
    output = subprocess.run(
        [sys.executable, "-m", "overt", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "demo" in output


@pytest.mark.slow
def test_a_users_mistake_is_one_line_and_no_stack_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    blocked = f"{tmp_path}/file"
    with open(blocked, "w") as file:
        file.write("in the way")
    monkeypatch.setattr(sys, "argv", ["overt", "demo", "--steps", "1", "--out", f"{blocked}/demo"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("overt: ")
    assert error.count("\n") == 1


def test_out_of_range_options_are_refused_by_name() -> None:
    result = runner.invoke(app, ["demo", "--steps", "0"])
    assert result.exit_code == 2
    assert "--steps" in plain(result.output)


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert overt.__version__ in result.output
