"""Data sets of Hugging Face, for tests of what takes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def data_set(folder: Path, rows: Sequence[dict[str, Any]]) -> Any:
    """A data set on the disk; datasets cannot hash one in memory with every version of pyarrow."""
    import datasets

    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"data_files": str(folder / "rows.jsonl"), "cache_dir": str(folder / "cache")}
    return datasets.load_dataset("json", split="train", **settings)
