"""Adapters of PEFT around attached models: what their `save_pretrained` and `load_adapter` do besides.

An adapter's own file holds what PEFT trains. Beside it go the parameters of all mechanisms, in
`overt.safetensors`, and their settings and the step, in `overt.json`.
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

from overt._files import write_whole
from overt.attaching.attention import AttachedAttention
from overt.attaching.settings import (
    Uploading,
    file_in,
    hub_options,
    mechanisms_in,
    settings_of,
    write_card,
)

SETTINGS, WEIGHTS = "overt.json", "overt.safetensors"
MEND = (
    "attach after get_peft_model, or give it modules_to_save=['overt'], or set requires_grad_(True) on the "
    "parameters with '.overt.' in their names"
)


class Place(NamedTuple):
    """A tensor of a mechanism, and its name in the model's state dict, which wrappers of PEFT's change."""

    name: str
    tensor: Tensor


def mechanism_tensors(model: nn.Module, adapter: str) -> dict[str, Place]:
    """Every tensor of the mechanisms, as an adapter has it, by the name it has without PEFT."""
    found = {}
    for path, module in model.named_modules():
        name, part = f"{path}.overt", module._modules.get("overt")
        copies = getattr(part, "modules_to_save", None)
        if isinstance(copies, nn.ModuleDict) and part is not None:  # what modules_to_save makes of a module
            mine = f"modules_to_save.{adapter}" if adapter in copies else "original_module"
            name, part = f"{name}.{mine}", part.get_submodule(mine)
        if not isinstance(part, AttachedAttention):
            continue
        tuned = [inner for inner, one in part.named_modules() if "base_layer" in one._modules]
        for key, tensor in part.state_dict(keep_vars=True).items():
            layer = next((inner for inner in tuned if key.startswith(f"{inner}.")), None)
            if layer is None or key.startswith(f"{layer}.base_layer."):
                plain = f"{part.path}.overt.{key.replace('.base_layer.', '.')}"
                found[plain] = Place(f"{name}.{key}", tensor)
    return found


def write_adapter(
    folder: Path, model: nn.Module, adapter: str, state_dict: dict[str, Tensor] | None = None
) -> None:
    """Write what an adapter's folder needs besides PEFT's files; a state dict has what was sharded."""
    from safetensors.torch import save_file

    base, given = _owner(model), state_dict or {}
    places = mechanism_tensors(model, adapter)
    tensors = {key: given.get(place.name, place.tensor) for key, place in places.items()}
    whole = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    settings = {**settings_of(base), "step": int(base.overt_state.step)}
    write_whole(folder / SETTINGS, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def read_settings(name: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """What an adapter's folder says of the mechanisms that it was trained with; None if nothing."""
    path = file_in(name, SETTINGS, options)
    if path is None:
        return None
    try:
        settings = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}/{SETTINGS} is damaged or cut short: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{name}/{SETTINGS} must be settings by name, got {type(settings).__name__}")
    for key, least in {"step": 0, "seed": -math.inf}.items():
        value = settings.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}/{SETTINGS} has a {key} that is none: {value!r}")
    return settings


class Adapter:
    """Stands in for methods of a `PeftModel` around an attached model."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        base = _owner(model)
        # As attach made them; an adapter that trains while they stay so was not meant.
        self.fresh: dict[str, Tensor] = {}
        if not base.overt_state.loaded:
            places = mechanism_tensors(model, self._active())
            self.fresh = {key: place.tensor.detach().clone() for key, place in places.items()}

    def _active(self) -> str:
        return str(self.model.active_adapter)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As `PeftModel.save_pretrained`; the mechanisms go into the folder of each adapter."""
        plain = type(self.model).save_pretrained
        plain(self.model, save_directory, *args, **kwargs)
        given = inspect.signature(plain).bind(self.model, save_directory, *args, **kwargs).arguments
        if _owner(self.model) is None or not given.get("is_main_process", True):
            return
        for adapter in given.get("selected_adapters") or list(self.model.peft_config):
            folder = Path(save_directory) / ("" if adapter == "default" else adapter)
            write_adapter(folder, self.model, adapter, kwargs.get("state_dict"))
        self.write_card(Path(save_directory) / "README.md", Path(save_directory).name)
        if self._untrained():
            raise ValueError(
                "the mechanisms are as attach made them, since PEFT froze them, though the adapter trained "
                f"(all files are written nevertheless): {MEND}"
            )

    def load_adapter(
        self, model_id: str | os.PathLike[str], adapter_name: str, *args: Any, **kwargs: Any
    ) -> Any:
        """As `PeftModel.load_adapter`, with mechanisms and step, where the folder has them."""
        result = type(self.model).load_adapter(self.model, model_id, adapter_name, *args, **kwargs)
        self.restore(os.fspath(model_id), adapter_name, hub_options(kwargs))
        return result

    def restore(self, name: str, adapter: str, options: dict[str, Any]) -> None:
        """Take mechanisms and step from an adapter's folder."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        base = _owner(self.model)
        settings = None if base is None else read_settings(name, options)
        if settings is None:
            return
        state = base.overt_state
        trained = mechanisms_in(settings, f"{name}/{SETTINGS}"), settings.get("where")
        if trained != (state.mechanisms, state.where):
            raise ValueError(
                f"the adapter in {name} was trained with {trained[0]} where={trained[1]!r}, and the base has "
                f"{state.mechanisms} where={state.where!r}: attach those"
            )
        path = file_in(name, WEIGHTS, options)
        if path is None:
            raise FileNotFoundError(
                f"{name} holds {SETTINGS} and no {WEIGHTS}: mechanisms cannot be restored"
            )
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{name}/{WEIGHTS} is damaged or cut short: {error}") from error
        places = mechanism_tensors(self.model, adapter)
        wrong = sorted(places.keys() ^ tensors.keys())
        wrong += [key for key in places.keys() & tensors if places[key].tensor.shape != tensors[key].shape]
        if wrong:
            raise ValueError(
                f"{name}/{WEIGHTS} lacks or does not fit {len(wrong)} tensors, such as {wrong[0]}"
            )
        with torch.no_grad():
            for key, place in places.items():
                place.tensor.copy_(tensors[key])
            state.step.fill_(settings["step"])
        state.seed = settings["seed"]
        state.loaded, self.fresh = True, {}

    def write_card(self, path: Path, name: str) -> None:
        """Add to the model card."""
        base = _owner(self.model)
        if base is not None:
            write_card(path, base, f'"{name}", base=base', "peft")

    def frozen(self) -> bool:
        """Whether there are mechanisms that attach made and that do not train."""
        places = mechanism_tensors(self.model, self._active()).values() if self.fresh else ()
        return bool(places) and not any(place.tensor.requires_grad for place in places)

    def _untrained(self) -> bool:
        """Whether they are frozen and as they were made, though the adapter trained."""
        if not self.frozen() or int(_owner(self.model).overt_state.step) == 0:
            return False
        now = mechanism_tensors(self.model, self._active())
        return all(key in now and torch.equal(now[key].tensor, was) for key, was in self.fresh.items())


NAMES = ("save_pretrained", "load_adapter", "_upload_modified_files")


def adopt(model: nn.Module) -> Adapter:
    """Make a `PeftModel` save and load what is attached inside of it."""
    adapter = Adapter(model)
    methods = adapter.save_pretrained, adapter.load_adapter, Uploading(adapter)
    model.__dict__.update(zip(NAMES, methods, strict=True))
    return adapter


def peft_models(model: nn.Module) -> list[nn.Module]:
    """The `PeftModel`s among a model and its parts."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def release(model: nn.Module) -> None:
    """Give `PeftModel`s their own methods back."""
    for one in peft_models(model):
        for name in NAMES:
            one.__dict__.pop(name, None)


def _owner(model: nn.Module) -> Any:
    """The attached model inside."""
    return next((module for module in model.modules() if "overt_state" in module._modules), None)


def _on_registration(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """When `get_peft_model` puts an attached model into a wrapper of its own."""
    if name != "base_model" or submodule is None or "peft" not in sys.modules:
        return
    if not isinstance(module, sys.modules["peft"].PeftModel) or _owner(submodule) is None:
        return
    module._modules.setdefault(name, submodule)  # which comes to be there only after this
    configs = getattr(submodule, "peft_config", {})  # not there yet where the base stays as it is
    trains = any(not config.inference_mode for config in configs.values())
    if adopt(module).frozen() and trains:
        warnings.warn(
            f"PEFT has frozen the mechanisms, which will not train: {MEND}", UserWarning, stacklevel=6
        )


def watch() -> None:
    """Notice when PEFT wraps an attached model: there is no other moment at which it can be told."""
    register_module_module_registration_hook(_on_registration)
