"""Data sets of the Hugging Face hub, read by its library `datasets`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overt._extras import need


def load(repository: str, config: str | None, missing: str, advice: str) -> Any:
    """The splits of a data set, by name.

    Args:
        repository: its name on the hub, such as "nyu-mll/glue".
        config: the name of one of its configurations, or None.
        missing: what the user does not have on disk; the error starts with it.
        advice: what to do without the hub; the error ends with it.

    Raises:
        FileNotFoundError: the data set cannot be loaded, or `datasets` is not installed.
    """
    try:
        datasets = need("datasets", "datasets")
        return datasets.load_dataset(repository, config) if config else datasets.load_dataset(repository)
    except Exception as error:  # the network, its libraries or the server can fail in any way
        kind = "" if isinstance(error, ModuleNotFoundError) else f"{type(error).__name__}: "
        why = " ".join(f"{kind}{error}".split())
    raise FileNotFoundError(f"{missing}, and {repository} could not be read from the hub ({why}); {advice}")


def columns(splits: Any, split: str, names: Sequence[str], source: str) -> list[list[Any]]:
    """Columns of a split as lists; errors name the split and what it has."""
    if split not in splits:
        raise ValueError(f"{source} must have the split {split}, got {', '.join(splits)}")
    part = splits[split]
    if absent := [name for name in names if name not in part.column_names]:
        has = ", ".join(part.column_names)
        raise ValueError(f"{split} of {source} must have the columns {', '.join(absent)}, got {has}")
    return [list(part[name]) for name in names]
