"""Optional dependencies: which extra brings what, and a one-line error when it is missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

# Extra → the modules it brings, as `pyproject.toml` lists them.
EXTRAS = {
    "graphs": ("torch_geometric",),
    "train": ("accelerate",),
    "view": ("matplotlib", "PIL", "starlette", "uvicorn"),
    "notebook": ("anywidget",),
    "interpret": ("captum",),
    "bench": ("ortools", "igraph"),
}


def present(module: str) -> bool:
    """Whether a module could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None


def need(module: str, extra: str) -> ModuleType:
    """Import a module of an extra, or say in one line how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{module} is needed here and is not installed: pip install 'overt[{extra}]'"
        ) from None
