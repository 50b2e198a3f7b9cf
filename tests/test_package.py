"""The package: light to import, rooms in order, documents that run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import overt
from overt._extras import EXTRAS, need

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "overt"
HEAVY = [
    "transformers",
    "numba",
    "torch_geometric",
    "matplotlib",
    "datasets",
    "captum",
    "scipy",
    "typer",
    "rich",
]
ROOMS = ["mechanisms", "models", "attach", "trace", "judge", "view", "recipes", "cli"]


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    path = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout


def test_importing_overt_imports_nothing_heavy() -> None:
    # torch itself may import numpy or more; only what overt adds counts.
    code = "import sys, torch; old = set(sys.modules); import overt; print(*sorted(set(sys.modules) - old))"
    added = python(code).split()
    assert [name for name in added if name.split(".")[0] in HEAVY] == []
    assert len(added) < 80, "a light package: " + " ".join(added)


def test_every_public_name_is_there_and_documented() -> None:
    for name in overt.__all__:
        assert getattr(overt, name).__doc__ or name == "Mechanism", name
    assert overt.__all__ == sorted(overt.__all__, key=lambda name: (name[0].islower(), name))


def imports(path: Path) -> set[str]:
    """First-level rooms of overt that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {parts[1] for name in names if (parts := name.split("."))[0] == "overt" and len(parts) > 1}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_from_rooms_to_its_left(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room not in ROOMS:
        return  # the package's own entrance and small helpers
    right = ROOMS[ROOMS.index(room) + 1 :]
    assert imports(path) & set(right) == set()


def test_mechanisms_know_tensors_only() -> None:
    for path in (SOURCE / "mechanisms").rglob("*.py"):
        assert "transformers" not in path.read_text(), path


def test_pyproject_agrees_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == overt.__version__
    assert {*EXTRAS, "dev", "all"} == set(project["optional-dependencies"])
    pins = (ROOT / "constraints.txt").read_text()
    assert "torch==2.13.0" in pins
    for requirement in project["dependencies"]:
        assert f"\n{re.split('[><=]', requirement)[0]}==" in pins, requirement


def test_a_missing_extra_is_named_in_one_line() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"^no_such_module is needed .*: pip install 'overt\[view\]'$"
    ):
        need("no_such_module", "view")


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_of_the_documents_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "block", "exec"), {})  # our own documents
