"""Load an attached model that was saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from overt.attaching.api import attach
from overt.attaching.attention import AttachedAttention
from overt.attaching.find import check_eager
from overt.attaching.saving import FORMAT, MODEL_TYPE
from overt.mechanisms.mechanism import Mechanism, from_dict

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(path: str | os.PathLike[str], **kwargs: Any) -> PreTrainedModel:
    """Load what `save_pretrained` of an attached model wrote, mechanisms, step count and all.

    Args:
        path: a folder, or a repository on the hub.
        kwargs: for `from_pretrained`, such as `device_map` or `dtype`.
    """
    import transformers
    from safetensors import SafetensorError
    from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

    name = os.fspath(path)
    if not os.path.isdir(name) and (os.path.exists(name) or name.startswith((".", os.sep))):
        raise FileNotFoundError(f"{name} is no folder: give the one that save_pretrained wrote")
    settings, _ = PreTrainedConfig.get_config_dict(name, **_hub(kwargs))
    if not settings:
        raise FileNotFoundError(f"{name} holds no config.json; give the folder that save_pretrained wrote")
    block = settings.pop(MODEL_TYPE, None)
    if settings.get("model_type") != MODEL_TYPE or not isinstance(block, Mapping):
        kind = settings.get("model_type")
        raise ValueError(
            f"{name} holds a plain model of type {kind!r}: load it with transformers, then overt.attach it"
        )
    if block.get("format") != FORMAT:
        raise ValueError(f"{name} has format {block.get('format')!r}; this overt reads {FORMAT}")
    listed = block.get("mechanisms")
    if not isinstance(listed, list):
        raise ValueError(f"{name}/config.json does not describe an attached model: mechanisms must be a list")
    try:
        mechanisms = tuple(from_dict(one) for one in listed)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the mechanisms of {name}/config.json cannot be made: {error}") from error
    try:
        settings["model_type"] = block["base_model_type"]
        config = CONFIG_MAPPING[block["base_model_type"]].from_dict(settings)
        plain = getattr(transformers, settings["architectures"][0])
        if not (isinstance(plain, type) and issubclass(plain, PreTrainedModel)):
            raise ValueError(f"{settings['architectures'][0]} is no model class")
        if plain.config_class is not None and not isinstance(config, plain.config_class):
            raise ValueError(f"{plain.__name__} is no model of type {block['base_model_type']}")
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"{name}/config.json does not describe an attached model: {error}") from error

    where, seed = block.get("where"), block.get("seed", 0)
    kwargs["output_loading_info"] = True
    try:
        model, info = _attaching(plain, mechanisms, where, seed).from_pretrained(
            name, config=config, **kwargs
        )
    except SafetensorError as error:
        raise ValueError(f"the weights in {name} are damaged or cut short: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing or info["mismatched_keys"]:
        wrong = [*missing, *map(str, info["mismatched_keys"])]
        raise ValueError(f"the weights in {name} lack or do not fit {len(wrong)} tensors, such as {wrong[0]}")
    model.__class__ = plain
    for module in list(model.modules()):
        part = module._modules.get("overt")
        if isinstance(part, AttachedAttention):
            check_eager(model, module, part.site.heads)
    model.overt_state.seen = torch.zeros_like(model.overt_state.step)
    loaded: PreTrainedModel = model
    return loaded


def _hub(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    return {name: kwargs[name] for name in names if name in kwargs}


def _attaching(plain: type, mechanisms: tuple[Mechanism, ...], where: Any, seed: int) -> Any:
    """A class that attaches as it is made, so that transformers loads mechanisms' weights with the rest."""

    def make(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)  # type: ignore[misc]
        attach(self, *mechanisms, where=where, seed=seed)

    return type(plain.__name__, (plain,), {"__init__": make, "__module__": plain.__module__})
