"""Folders of runs: finished runs are kept, runs with other settings are deleted."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from overt._files import write_whole

CONFIG, SETTINGS, RESULT = "config.json", "settings.json", "result.json"
PARTS = "parts"  # folder of what an unfinished run has measured


def read_settings(folder: Path) -> Any:
    """The settings of the run in a folder; None if there are none, or only part of them was written."""
    try:
        return json.loads((folder / SETTINGS).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def prepare_run(folder: Path, settings: dict[str, Any], fresh: bool) -> dict[str, Any] | None:
    """Prepare the folder of a run; delete a run with other settings, return the result of a finished one."""
    path = folder / SETTINGS
    if folder.exists() and any(folder.iterdir()) and not path.exists():
        raise ValueError(f"{folder} has files that are not from a run of this recipe: choose another --out")
    if fresh or read_settings(folder) != settings:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_whole(path, json.dumps(settings, indent=1))
        return None
    result = folder / RESULT
    return json.loads(result.read_text()) if result.exists() else None


def finish_run(folder: Path, numbers: dict[str, Any]) -> None:
    """Write the result of a run, which marks it as finished, and delete its checkpoints and parts."""
    write_whole(folder / RESULT, json.dumps(numbers, indent=1))
    for name in ("checkpoints", PARTS):
        shutil.rmtree(folder / name, ignore_errors=True)


def finished(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The numbers of a finished run with these settings, if a folder has one."""
    result = folder / RESULT
    if read_settings(folder) != settings or not result.is_file():
        return None
    numbers: dict[str, Any] = json.loads(result.read_text())
    return numbers


def processes_of(folders: Iterable[Path]) -> int:
    """Number of processes that trained the models of runs together; 1 if they differ, or there are none."""
    found = [read_settings(folder) for folder in folders]
    counts = {settings.get("processes", 1) for settings in found if isinstance(settings, dict)}
    return int(counts.pop()) if len(counts) == 1 else 1


def check_model(model: str) -> None:
    """Refuse a path that is not the folder of a model, before the hub is asked for it."""
    local = not model or model.startswith((".", "~", os.sep)) or Path(model).exists()
    if local and not (Path(model) / CONFIG).is_file():
        inside = (Path(model) / "model" / CONFIG).is_file()  # the folder of a run
        hint = f": {Path(model) / 'model'} is one" if inside else ""
        raise FileNotFoundError(
            f"--model {model or repr(model)} must be a folder with config.json, or a name on the hub{hint}"
        )


def read_model_config(model: str) -> dict[str, Any]:
    """The config of a model, from its folder or the hub."""
    from transformers import PreTrainedConfig

    check_model(model)
    try:
        settings, _ = PreTrainedConfig.get_config_dict(model)
    except OSError as error:
        reason = str(error).partition("\n")[0]
        raise OSError(f"--model {model} is not a folder, and cannot be had from the hub: {reason}") from None
    return dict(settings)


def check_plain(model: str) -> None:
    """Refuse a model that has mechanisms, where a recipe attaches its own."""
    from overt.attaching.settings import settings_in

    if settings_in(read_model_config(model)) is not None:
        raise ValueError(
            f"--model {model} has mechanisms of Overt already: give the pretrained model without them"
        )


def check_weights(out: Path, model: str, fresh: bool) -> None:
    """Refuse other weights than those that the runs in a folder began with, if name and config are the same.

    Settings of a run name a model's folder and the hash of its config, which training goes on to leave alone.

    Args:
        out: folder of the runs; it keeps the hash of the weights.
        model: a folder, or a name on the hub, which is not checked.
        fresh: whether the runs start over.
    """
    now, kept = _weights_of(model), _weights_file(out, model)
    if now is None:
        return
    before = _kept_weights(kept) if not fresh else None
    if before is not None and before.config == now.config and before.weights != now.weights:
        raise ValueError(
            f"--model {model} has other weights than the model of that name that the runs in {out} began "
            "with: give another --out, or --fresh"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_whole(kept, f"{now.config} {now.weights}\n")


def check_began_with(option: str, runs: Path, model: str) -> None:
    """Refuse a folder of runs that did not begin with a model's weights, or does not say so.

    Args:
        option: that gave the folder, for errors.
        runs: the folder, in which nothing is changed.
        model: a folder, or a name on the hub, which is not checked.
    """
    now, kept = _weights_of(model), _weights_file(runs, model)
    if now is None:
        return
    before = _kept_weights(kept)
    if before is None:
        raise ValueError(
            f"{option} {runs} does not say with which weights its runs began: {kept.name} is missing there"
        )
    if before != now:
        raise ValueError(f"{option} {runs} has runs that began with other weights than --model {model}")


class _Weights(NamedTuple):
    """Hashes of a model's config and of its weights."""

    config: str
    weights: str


def _weights_of(model: str) -> _Weights | None:
    """Those of a folder; None for a name on the hub."""
    folder = Path(model)
    if not (folder / CONFIG).is_file():
        return None
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return _Weights(hashlib.sha256((folder / CONFIG).read_bytes()).hexdigest(), digest.hexdigest())


def _weights_file(out: Path, model: str) -> Path:
    return out / f"{Path(model).resolve().name}.sha256"


def _kept_weights(path: Path) -> _Weights | None:
    words = path.read_text().split() if path.is_file() else []
    return _Weights(*words) if len(words) == len(_Weights._fields) else None


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a model, from its folder or the hub; one that knows no words is refused.

    Where a model has no files of a tokenizer, transformers may return one that has special tokens alone.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(f"--model {model} has no tokenizer: {str(error).splitlines()[0][:120]}") from None
    if len(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)) < 2:
        raise ValueError(f"--model {model} has no tokenizer: its files are missing")
    return tokenizer


def earlier_result(folder: Path, settings: dict[str, Any], fresh: bool) -> dict[str, Any] | None:
    """As `prepare_run`, but refuse to delete a run with other settings unless `fresh`.

    A run may have taken hours, and a mistyped option is no reason to lose it. One that has neither a result
    nor a checkpoint nor parts of a result is no loss.
    """
    earlier = read_settings(folder)
    begun = (folder / RESULT).exists() or any(
        any((folder / name).glob("*")) for name in ("checkpoints", PARTS)
    )
    if isinstance(earlier, dict) and begun and not fresh:
        for name in {**earlier, **settings}:
            before, value = earlier.get(name), settings.get(name)
            if before != value:
                while isinstance(value, dict) and isinstance(before, dict):  # the first that differs
                    name = next(key for key in {**before, **value} if before.get(key) != value.get(key))
                    before, value = before.get(name), value.get(name)
                differ = f"{name} {str(before)[:60]}, but {str(value)[:60]} was requested"
                if _is_hash(before) and _is_hash(value):
                    differ = f"other {name} than requested"
                raise ValueError(
                    f"{folder} has a run with {differ}: delete it with --fresh, or choose another --out"
                )
    return prepare_run(folder, settings, fresh)


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def stored_numbers(
    stored: Mapping[int, dict[str, Any]], row: str, seed: int, settings: dict[str, Any]
) -> dict[str, Any] | None:
    """The numbers of a row and seed in an earlier result file, if they were measured with these settings."""
    numbers = stored.get(seed, {}).get(row)
    if not isinstance(numbers, dict) or numbers.get("run", {}).get("settings") != settings:
        return None
    return numbers


def run_record(
    settings: dict[str, Any], command: str, hardware: str, versions: dict[str, str]
) -> dict[str, Any]:
    """How, where, when and with what a run was made, which stays with its numbers in a result file."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {
        "settings": settings,
        "command": command,
        "hardware": hardware,
        "versions": versions,
        "date": date,
    }


def measure_once(file: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Read numbers from a file; if it does not exist, measure them and write it first."""
    if not file.exists():
        write_whole(file, json.dumps(finite(measure()), indent=1))
    numbers: dict[str, Any] = json.loads(file.read_text())
    return numbers


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent (NaN, infinity) by None."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
