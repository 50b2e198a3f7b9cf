"""Folders of runs: a run that is done is kept, one with other settings is cleared away."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from overt._files import write_whole


def finished(folder: Path, settings: dict[str, Any], fresh: bool) -> dict[str, Any] | None:
    """The result of an earlier run with the same settings; a run with other settings is cleared away."""
    ours = folder / "settings.json"
    if folder.exists() and any(folder.iterdir()) and not ours.exists():
        raise ValueError(f"{folder} holds something else than a run of this recipe: choose another --out")
    try:
        kept = json.loads(ours.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        kept = None
    if fresh or kept != settings:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_whole(ours, json.dumps(settings, indent=1))
        return None
    result = folder / "result.json"
    return json.loads(result.read_text()) if result.exists() else None


def check_model(model: str) -> None:
    """Refuse what looks like a folder and is none, before anybody asks the hub for it."""
    if model.startswith((".", "~", os.sep)) and not (Path(model) / "config.json").is_file():
        raise FileNotFoundError(f"--model {model} must be a folder with config.json, or a name on the hub")
