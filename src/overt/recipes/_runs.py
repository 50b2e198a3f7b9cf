"""Folders of runs: a run that is done is kept, one with other settings is cleared away."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any


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


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)
