"""The package: light to import, rooms in order, documents that run."""

from __future__ import annotations

import ast
import graphlib
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import overt
from examples import FOLDER
from fresh import fresh
from overt._extras import EXTRAS, need
from overt.mechanisms import mechanism
from overt.tracing.methods import method as method_registry
from overt.tracing.mixing import mixing as mixing_registry

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
    "pyarrow",
    "ray",
    "typer",
    "rich",
]
HELPERS = ["_check", "_extras", "_files", "_modes", "_predictions", "_version", "_workers"]
ROOMS = [*HELPERS, "data", "mechanisms", "models", "attaching", "auto", "tracing", "judge", "view", "graphs"]
ROOMS += ["vision", "corpus", "__init__", "recipes", "cli", "__main__"]


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    path = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    return subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_importing_overt_imports_nothing_heavy() -> None:
    # torch itself may import numpy or more; only what overt adds counts.
    code = "import sys, torch; old = set(sys.modules); import overt; print(*sorted(set(sys.modules) - old))"
    added = python(code).split()
    assert [name for name in added if name.split(".")[0] in HEAVY] == []
    assert len(added) < 130, "a light package: " + " ".join(added)


def test_every_public_name_is_there_and_documented() -> None:
    for name in overt.__all__:
        assert getattr(overt, name).__doc__ or name == "Mechanism", name
    assert overt.__all__ == sorted(overt.__all__, key=lambda name: (name[0].islower(), name))


PUBLIC = ["overt", "overt.tracing", "overt.judge", "overt.graphs", "overt.view", "overt.vision"]


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_stands_in_the_reference(package: str) -> None:
    pages = [(ROOT / "docs" / name).read_text() for name in ("reference.md", "uncertainty.md")]
    paths = re.findall(r"^::: (\S+)", "\n".join(pages), re.M)
    # importing overt.auto would register classes with transformers, for all tests that follow
    documented = [pkgutil.resolve_name(path) for path in paths if path != "overt.auto"]
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            assert any(f"{path}.".startswith(f"{value.__name__}.") for path in paths), name
        elif not name.startswith("__"):
            assert any(value is one for one in documented), name


def imports(path: Path) -> set[str]:
    """First-level rooms of overt that a file imports; the package itself is its entrance, `__init__`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            first, _, rest = name.partition(".")
            room = rest.partition(".")[0]
            if first == "overt":
                found.add(room if room in ROOMS else "__init__")
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_from_rooms_to_its_left(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert room in ROOMS, "a file at the root has its place, too"
    right = set(ROOMS[ROOMS.index(room) + 1 :]) | (set(HELPERS) - {room} if room in HELPERS else set())
    assert imports(path) & right == set()


def test_a_package_gives_nothing_away_under_the_name_of_one_of_its_modules() -> None:
    for entrance in SOURCE.rglob("__init__.py"):
        package = importlib.import_module(".".join(entrance.parent.relative_to(SOURCE.parent).parts))
        modules = {path.stem for path in entrance.parent.glob("*.py")}
        modules |= {path.parent.name for path in entrance.parent.glob("*/__init__.py")}
        for name in modules & set(vars(package)):
            assert isinstance(getattr(package, name), ModuleType), f"{package.__name__}.{name}"


@pytest.mark.slow
def test_packages_can_be_imported_by_their_names() -> None:
    code = "import overt.tracing.methods as m, overt; print(overt.tracing.methods.rollout is m.rollout)"
    code += "; print(overt.judge.uncertainty.__name__)"
    assert fresh(code) == ("True\novert.judge.uncertainty", "")


def test_tests_import_no_tests() -> None:
    """What several files of tests need is in a module of its own, which has no tests."""
    tests = {path.stem for path in Path(__file__).parent.glob("test_*.py")}
    for path in Path(__file__).parent.rglob("*.py"):
        words = set(re.findall(r"(?:\bimport|\bfrom|,) +(test_\w+)", path.read_text()))
        assert words & tests == set(), f"{path.name} imports tests"


def modules_imported(path: Path) -> set[str]:
    """Modules of overt that a file imports anywhere: at the top, in functions, for type checkers."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "overt"}


def graph_of_modules() -> dict[str, set[str]]:
    """Module → modules that it imports, packages' `__init__` among them where they are imported from."""
    paths = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }
    # `from package import module` is an import of the module.
    return {
        name: {other for other in modules_imported(path) if other in paths} - {name}
        for name, path in paths.items()
    }


@pytest.mark.slow
def test_modules_import_in_no_circle() -> None:
    graph = {name: others for name, others in graph_of_modules().items() if name != "overt"}
    for name, others in graph.items():
        # a module of a package whose `__init__` gathers its modules does not import that back
        gathering = {other for other in others if name.startswith(other + ".")}
        graph[name] = others - gathering - {"overt"}
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.slow
def test_evolving_imports_nothing_from_bayesian() -> None:
    for name, others in graph_of_modules().items():
        if name.startswith("overt.mechanisms.evolving"):
            assert not [other for other in others if "bayesian" in other], name


@pytest.mark.slow
def test_no_source_but_a_mechanisms_own_folder_names_it() -> None:
    shared = [
        path
        for room in ("mechanisms", "attaching", "models", "tracing")
        for path in sorted((SOURCE / room).rglob("*.py"))
        if path.relative_to(SOURCE).parts[:2]
        not in (("mechanisms", "bayesian"), ("mechanisms", "evolving"), ("mechanisms", "synthesizer"))
    ]
    named = re.compile(r"\b(Bayesian|Evolving|Synthesizer)\w*\b")
    for path in shared:
        tree = ast.parse(path.read_text())
        code = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        code |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        found = sorted(name for name in code if named.fullmatch(name))
        assert found == [] or path.name == "builtin.py", f"{path}: {found}"


def test_mechanisms_know_tensors_only() -> None:
    for path in (SOURCE / "mechanisms").rglob("*.py"):
        assert "transformers" not in path.read_text(), path


def test_pyproject_agrees_with_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"], "read from overt/_version.py, where alone it stands"
    assert f"\nversion: {overt.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    extras = project["optional-dependencies"]
    assert {*EXTRAS, "test", "dev", "all"} == set(extras)
    own = {re.split("[><=;[]", requirement)[0] for name in EXTRAS for requirement in extras[name]}
    ours = [*extras["test"], *extras["dev"]]
    assert not own & {re.split("[><=;[]", requirement)[0] for requirement in ours}, "named once"
    pins = (ROOT / "constraints.txt").read_text()
    assert "torch==2.13.0" in pins
    for requirement in project["dependencies"]:
        assert f"\n{re.split('[><=]', requirement)[0]}==" in pins, requirement


def test_a_missing_extra_is_named_in_one_line() -> None:
    with pytest.raises(
        ModuleNotFoundError, match=r"^no_such_module is required but .*: pip install 'overt\[view\]'$"
    ):
        need("no_such_module", "view")


EXAMPLES = {path.read_text(): path.stem for path in sorted(FOLDER.glob("*.py"))}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_every_python_block_of_the_documents_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # A block may define a mechanism that is a file of docs/examples, too.
    # Nor do other tests want its methods and graphs.
    for registry in (mechanism, method_registry, mixing_registry):
        monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    module = ModuleType(EXAMPLES.get(block, "block"))  # where a dataclass looks for its annotations
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block, "block", "exec", dont_inherit=True), module.__dict__)  # our own documents


@pytest.mark.parametrize("name", EXAMPLES.values())
def test_the_page_on_mechanisms_holds_the_files_that_are_tested(name: str) -> None:
    code = next(text for text, of in EXAMPLES.items() if of == name)
    assert f"```python\n{code}```" in (ROOT / "docs" / "extend.md").read_text()
