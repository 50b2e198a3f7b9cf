"""Optional dependencies: the modules each extra installs, and a one-line error when one is missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

# Extra → the modules it installs, as listed in `pyproject.toml`.
EXTRAS = {
    "graphs": ("torch_geometric",),
    "train": ("accelerate",),
    "translation": ("accelerate", "sacrebleu", "sacremoses"),
    "understanding": ("accelerate", "sklearn"),
    "vision": ("accelerate", "PIL"),
    "features": ("h5py",),
    "datasets": ("datasets",),
    "view": ("matplotlib", "PIL", "starlette", "uvicorn"),
    "notebook": ("anywidget",),
    "interpret": ("captum",),
    "rationales": ("accelerate", "captum", "lime", "sklearn"),
    "scale": ("pyarrow", "datasets", "ray"),
    "bench": ("ortools", "igraph"),
}


def present(module: str) -> bool:
    """Whether a module is installed; does not import it."""
    return importlib.util.find_spec(module) is not None


def need(module: str, extra: str) -> ModuleType:
    """Import a module of an extra, or raise a one-line error that says how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"{module} is required but not installed: pip install 'overt[{extra}]'"
        ) from None
