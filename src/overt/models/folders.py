"""Networks in folders: `config.json` says how to make one, `model.safetensors` has its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from overt._files import written_whole
from overt.mechanisms.mechanism import from_dict

CONFIG, WEIGHTS = "config.json", "model.safetensors"
M = TypeVar("M", bound=nn.Module)


def save_network(model: nn.Module, folder: str | Path, model_type: str, settings: Mapping[str, Any]) -> None:
    """Write both files, each completely or not at all; they replace earlier ones when both are written."""
    folder = Path(folder)
    config = json.dumps({"model_type": model_type, **settings}, indent=2, sort_keys=True, allow_nan=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(f"{folder} is not a folder, and cannot be made one") from None
    with written_whole(folder / WEIGHTS) as weights, written_whole(folder / CONFIG) as text:
        _write_weights(model, weights)
        text.write_text(config + "\n", encoding="utf-8")


def read_config(folder: str | Path, model_type: str, by: str) -> dict[str, Any]:
    """The settings that `save_network` wrote.

    Args:
        folder: of the network.
        model_type: which it must be of.
        by: what writes such folders, for errors.
    """
    folder = Path(folder)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}: give a folder that {by} wrote")
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{folder / CONFIG} is not JSON: is it complete?") from None
    kind = settings.pop("model_type", None) if isinstance(settings, dict) else None
    if kind != model_type:
        raise ValueError(f"model_type of {folder / CONFIG} must be {model_type!r}, got {kind!r}")
    return dict(settings)


def load_network(
    cls: type[M],
    folder: str | Path,
    model_type: str,
    needed: Sequence[str],
    names: Mapping[str, Callable[[M], int]] | None = None,
) -> M:
    """A network whose config holds the arguments of its class, in evaluation mode on the CPU.

    Args:
        cls: of the network; its argument `mechanisms`, if it has one, is a list of mechanisms.
        folder: of the network.
        model_type: which it must be of.
        needed: settings that have no default.
        names: attributes that hold lists of names, which may be in the config → how many there must be.
    """
    whose, names = cls.__name__, names or {}
    settings = read_config(folder, model_type, f"{whose}.save")
    arguments = set(cls.__init__.__annotations__) - {"return"}
    check_settings(settings, folder, whose, arguments | set(names), needed)
    listed = {name: settings.pop(name, None) for name in names}
    try:
        if "mechanisms" in arguments:
            settings["mechanisms"] = [from_dict(each) for each in settings.get("mechanisms", [])]
        model = cls(**settings)
        for name, count in names.items():
            setattr(model, name, checked_names(name, listed[name], count(model)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{Path(folder) / CONFIG} cannot be understood: {error}") from None
    return load_weights(model, folder, CONFIG)


def check_settings(
    settings: Mapping[str, Any], folder: str | Path, whose: str, known: Iterable[str], needed: Iterable[str]
) -> None:
    """Refuse settings from a folder's config that are not known, or that lack one that is needed.

    Args:
        settings: from `read_config`.
        folder: that they are from.
        whose: what they are settings of, for errors.
        known: names that may be there.
        needed: names that must be there.
    """
    path = Path(folder) / CONFIG
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"{path} has settings that {whose} does not: {', '.join(unknown)}")
    if missing := sorted(set(needed) - set(settings)):
        raise ValueError(f"{path} lacks {', '.join(missing)}")


def checked_names(name: str, values: Any, count: int) -> list[str] | None:
    """A list of so many strings, such as the names of classes; None where none are given."""
    if values is None:
        return None
    listed = isinstance(values, list | tuple) and all(isinstance(value, str) for value in values)
    if not listed or len(values) != count:
        got = f"{len(values)}" if listed else f"{values!r}"[:60]
        raise ValueError(f"{name} must be {count} strings, got {got}")
    return list(values)


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write `folder`/model.safetensors, completely or not at all."""
    with written_whole(folder / WEIGHTS) as part:
        _write_weights(model, part)


def _write_weights(model: nn.Module, path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: x.contiguous() for name, x in model.state_dict().items()}, path)


def load_weights(model: M, folder: str | Path, whose: str = "the network") -> M:
    """Read `folder`/model.safetensors into a model, and return it in evaluation mode.

    Weights keep the precision of the file.

    Args:
        model: the model.
        folder: with the file.
        whose: what the weights must fit, for errors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(folder) / WEIGHTS
    try:
        weights = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: its weights cannot be read ({error}); are they complete?") from None
    own = model.state_dict(keep_vars=True)
    differ = [name for name in own.keys() | weights.keys() if _shape(own, name) != _shape(weights, name)]
    if differ:
        name = min(differ)
        shapes = f"{_shape(own, name)}, and {_shape(weights, name)} in the file"
        raise ValueError(f"{path} does not fit {whose}: {name} has shape {shapes}")
    for name, x in own.items():
        if x.is_floating_point() != weights[name].is_floating_point():
            raise ValueError(f"{path} does not fit {whose}: {name} is {x.dtype}, not {weights[name].dtype}")
        x.data = x.data.to(weights[name].dtype)
    model.load_state_dict(weights)
    return model.eval()


def _shape(weights: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None
