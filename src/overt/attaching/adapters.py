"""PEFT adapters around attached models: `save_pretrained` and `load_adapter` include the mechanisms.

PEFT's own file holds what PEFT trains. Two more files in the same folder hold the parameters of all
mechanisms (`overt.safetensors`) and their settings and the step (`overt.json`).
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from overt._files import read_tensors, write_tensors, write_whole
from overt.attaching.attention import AttachedAttention
from overt.attaching.settings import (
    Uploading,
    file_in,
    hub_options,
    mechanisms_in,
    settings_of,
    temperature_in,
    write_card,
)

SETTINGS, WEIGHTS = "overt.json", "overt.safetensors"
REMEDY = (
    "attach after get_peft_model, or give it modules_to_save=['overt'], or set requires_grad_(True) on the "
    "parameters with '.overt.' in their names"
)


class Place(NamedTuple):
    """A tensor of a mechanism, and its name in the model's state dict, which PEFT's wrappers change."""

    name: str
    tensor: Tensor


def mechanism_tensors(model: nn.Module, adapter: str) -> dict[str, Place]:
    """Every tensor of an adapter's mechanisms, by the name that it has without PEFT."""
    tensors = {}
    for path, module in model.named_modules():
        name, part = f"{path}.overt", module._modules.get("overt")
        copies = getattr(part, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict) and part is not None:  # wrapped because of modules_to_save
            copy_name = f"modules_to_save.{adapter}" if adapter in copies else "original_module"
            name, part = f"{name}.{copy_name}", part.get_submodule(copy_name)
        if not isinstance(part, AttachedAttention):
            continue
        tuned = [inner for inner, layer in part.named_modules() if "base_layer" in layer._modules]
        for key, tensor in part.state_dict(keep_vars=True).items():
            prefix = next((inner for inner in tuned if key.startswith(f"{inner}.")), None)
            if prefix is None or key.startswith(f"{prefix}.base_layer."):
                plain = f"{part.path}.overt.{key.replace('.base_layer.', '.')}"
                tensors[plain] = Place(f"{name}.{key}", tensor)
    return tensors


def write_adapter(
    folder: Path, model: nn.Module, adapter: str, state_dict: dict[str, Tensor] | None = None
) -> None:
    """Write the files that an adapter needs besides PEFT's; sharded tensors are taken from `state_dict`."""
    base, gathered = _owner(model), state_dict or {}
    places = mechanism_tensors(model, adapter)
    tensors = {key: gathered.get(place.name, place.tensor) for key, place in places.items()}
    write_tensors(folder / WEIGHTS, tensors)
    settings = {**settings_of(base), "step": int(base.overt_state.step)}
    write_whole(folder / SETTINGS, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def read_settings(name: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """The settings of the mechanisms that an adapter was trained with; None if its folder has none."""
    path = file_in(name, SETTINGS, options)
    if path is None:
        return None
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}/{SETTINGS} is damaged or truncated: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{name}/{SETTINGS} must be a JSON object, got {type(settings).__name__}")
    for key, lowest in {"step": 0, "seed": -math.inf}.items():
        value = settings.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            bound = " of at least 0" if lowest == 0 else ""
            raise ValueError(f"{key} in {name}/{SETTINGS} must be a whole number{bound}, got {value!r}")
    return settings


class Adapter:
    """Replaces methods of a `PeftModel` around an attached model."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        base = _owner(model)
        # The values that attach initialised. If the adapter trains and these do not change, the user has
        # frozen the mechanisms by mistake.
        self.fresh: dict[str, Tensor] = {}
        if not base.overt_state.loaded:
            places = mechanism_tensors(model, self._active())
            self.fresh = {key: place.tensor.detach().clone() for key, place in places.items()}

    def _active(self) -> str:
        return str(self.model.active_adapter)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Like `PeftModel.save_pretrained`; the mechanisms are written to each adapter's folder."""
        plain = type(self.model).save_pretrained
        plain(self.model, save_directory, *args, **kwargs)
        arguments = inspect.signature(plain).bind(self.model, save_directory, *args, **kwargs).arguments
        if _owner(self.model) is None or not arguments.get("is_main_process", True):
            return
        for adapter in arguments.get("selected_adapters") or list(self.model.peft_config):
            folder = Path(save_directory) / ("" if adapter == "default" else adapter)
            write_adapter(folder, self.model, adapter, kwargs.get("state_dict"))
        self.write_card(Path(save_directory) / "README.md", Path(save_directory).name)
        if self._untrained():
            raise ValueError(
                "PEFT froze the mechanisms: they are still as attach initialised them, though the adapter "
                f"was trained (all files were written nevertheless): {REMEDY}"
            )

    def load_adapter(
        self, model_id: str | os.PathLike[str], adapter_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """Like `PeftModel.load_adapter`; also loads mechanisms and step if the folder has them."""
        result = type(self.model).load_adapter(self.model, model_id, adapter_name, *args, **kwargs)
        self.restore(os.fspath(model_id), adapter_name, hub_options(kwargs))
        return result

    def restore(self, name: str, adapter: str, options: dict[str, Any]) -> None:
        """Load mechanisms and step from an adapter's folder."""
        base = _owner(self.model)
        settings = None if base is None else read_settings(name, options)
        if settings is None:
            return
        state = base.overt_state
        trained = mechanisms_in(settings, f"{name}/{SETTINGS}"), settings.get("where")
        if trained != (state.mechanisms, state.where):
            raise ValueError(
                f"the adapter in {name} was trained with {trained[0]} where={trained[1]!r}, but the base has "
                f"{state.mechanisms} where={state.where!r}: attach the adapter's mechanisms to the base"
            )
        path = file_in(name, WEIGHTS, options)
        if path is None:
            raise FileNotFoundError(
                f"{name} holds {SETTINGS} but no {WEIGHTS}: the mechanisms cannot be restored"
            )
        places = mechanism_tensors(self.model, adapter)
        shapes = {key: place.tensor.shape for key, place in places.items()}
        tensors = read_tensors(path, shapes, f"{name}/{WEIGHTS}")
        with torch.no_grad():
            for key, place in places.items():
                place.tensor.copy_(tensors[key])
            state.step.fill_(settings["step"])
        state.seed = settings["seed"]
        state.temperature = temperature_in(settings.get("temperature"), f"{name}/{SETTINGS}")
        state.loaded, self.fresh = True, {}

    def write_card(self, path: Path, name: str) -> None:
        """Add the mechanisms to the model card."""
        base = _owner(self.model)
        if base is not None:
            write_card(path, base, f'"{name}", base=base', "peft")

    def frozen(self) -> bool:
        """Whether there are mechanisms initialised by attach, none of which is trainable."""
        places = mechanism_tensors(self.model, self._active()).values() if self.fresh else ()
        return bool(places) and not any(place.tensor.requires_grad for place in places)

    def _untrained(self) -> bool:
        """Whether the mechanisms are frozen at their initial values, though the adapter was trained."""
        if not self.frozen() or int(_owner(self.model).overt_state.step) == 0:
            return False
        places = mechanism_tensors(self.model, self._active())
        return all(
            key in places and torch.equal(places[key].tensor, initial) for key, initial in self.fresh.items()
        )


NAMES = ("save_pretrained", "load_adapter", "_upload_modified_files")


def adopt(model: nn.Module) -> Adapter:
    """Make a `PeftModel` save and load what is attached inside it."""
    refuse_without_config(_owner(model))
    adapter = Adapter(model)
    methods = adapter.save_pretrained, adapter.load_adapter, Uploading(adapter)
    model.__dict__.update(zip(NAMES, methods, strict=True))
    return adapter


def refuse_without_config(base: nn.Module) -> None:
    """Refuse PEFT around a model that is not Hugging Face's, whose adapters could not be loaded again."""
    if not hasattr(base, "config"):
        raise ValueError(
            f"a {type(base).__name__} with mechanisms cannot be inside a PEFT model, which would save them "
            "in files that overt.load does not read: use it without PEFT"
        )


def peft_models(model: nn.Module) -> list[nn.Module]:
    """The `PeftModel`s among a model and its parts."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def release(model: nn.Module) -> None:
    """Restore the methods of `PeftModel`s."""
    for wrapper in peft_models(model):
        for name in NAMES:
            wrapper.__dict__.pop(name, None)


def _owner(model: nn.Module) -> Any:
    """The attached model inside a model; None if there is none."""
    return next((module for module in model.modules() if "overt_state" in module._modules), None)


def _on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Adopt the `PeftModel` that `get_peft_model` wraps around an attached model."""
    if name != "base_model" or submodule is None or "peft" not in sys.modules:
        return
    if not isinstance(module, sys.modules["peft"].PeftModel) or _owner(submodule) is None:
        return
    module._modules.setdefault(name, submodule)  # torch would register it only after this hook
    configs = getattr(submodule, "peft_config", {})  # not set yet if PEFT leaves the base unchanged
    trains = any(not config.inference_mode for config in configs.values())
    if adopt(module).frozen() and trains:
        warnings.warn(
            f"PEFT has frozen the mechanisms, which will not train: {REMEDY}", UserWarning, stacklevel=6
        )


def watch() -> None:
    """Hook module registration: the only moment at which PEFT's wrapping of an attached model shows."""
    register_module_module_registration_hook(_on_registration)
