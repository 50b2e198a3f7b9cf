"""Recipes of captions on a few small scenes, with small networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overt.data import scenes
from overt.recipes import bam_captions, caption_training, regions, reproduce

ENCODER: dict[str, Any] = {"channels": (4, 6, 8, 10), "width": 12, "blocks": 1}
NETWORK = {"embedding": 16, "hidden": 16, "score": 8}
SIZES = 24, 4, 6
make = scenes.make


def small_scenes() -> scenes.Scenes:
    return make(SIZES, side=32)


def recipes_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a recipe of captions in a folder."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OVERT_DATA", raising=False)
    monkeypatch.setattr(scenes, "make", small_scenes)
    monkeypatch.setattr(regions, "SIZES", ENCODER)
    monkeypatch.setattr(bam_captions, "STAND_IN", NETWORK)
    monkeypatch.setattr(regions, "fastest_update", lambda *_: 1.0)  # estimates take longer than the trainings
    monkeypatch.setattr(caption_training, "step_times", lambda *_: [1.0])

    def run(name: str, *extra: str, seeds: int = 1, fresh: bool = False) -> dict[str, Any]:
        extra = ("--encoder-epochs", "1", "--epochs", "1", *extra)
        places = {"out": Path("runs"), "results": Path("results")}
        return reproduce.run(name, seeds=seeds, device="cpu", fresh=fresh, extra=extra, **places)

    return run
