"""A small random model of every type that an Auto class of transformers builds.

Its config comes from the fields of the type's config class, sub-configs likewise; `settings.py` says which
values fields get.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from zoo.settings import (
    CLASSES,
    CONFIGS,
    EVEN_IF_NONE,
    FIRST_WORD,
    HEADS,
    HEADS_IN_ORDER,
    LARGEST,
    LAYERS,
    SMALL,
    SPREAD,
    TOKENS,
)


def model_types() -> list[str]:
    """Every type that an Auto class of transformers builds, sorted."""
    names = (name for name in dir(modeling_auto) if re.fullmatch(r"MODEL_\w*MAPPING_NAMES", name))
    return sorted({kind for name in names for kind in getattr(modeling_auto, name)}, key=str.lower)


def class_names(kind: str) -> Iterator[str]:
    """Names of a type's model classes, the best first."""
    if kind in CLASSES:
        yield CLASSES[kind]
        return
    for head in HEADS_IN_ORDER:
        middle = f"FOR_{head}_" if head else ""
        found = getattr(modeling_auto, f"MODEL_{middle}MAPPING_NAMES", {}).get(kind)
        if found:
            yield found if isinstance(found, str) else found[0]


def model_class(kind: str) -> Any:
    """The class to try for a type."""
    for name in class_names(kind):
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    raise LookupError("transformers has no class for it that is imported by name")


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for name, value in more.items():
        both = isinstance(value, dict) and isinstance(out.get(name), dict)
        out[name] = merged(out[name], value) if both else value
    return out


def small_settings(config_class: Any, kind: str | None = None) -> dict[str, Any]:
    """Settings that make a small config of a class."""
    settings: dict[str, Any] = {}
    spare = iter(range(95, 70, -1))
    subs = {
        **getattr(config_class, "sub_configs", {}),
        **(getattr(config_class, "sub_configs_defaults", {}) or {}),
    }
    for each in dataclasses.fields(config_class):
        name, default = each.name, each.default
        if default is dataclasses.MISSING and each.default_factory is not dataclasses.MISSING:
            default = each.default_factory()
        if name in subs:
            settings[name] = sub_settings(subs[name])
        elif name in SMALL:
            value = SMALL[name]
            if default is None and not (name in TOKENS or name in EVEN_IF_NONE):
                continue
            if isinstance(default, tuple | list) and isinstance(value, int):
                if name not in ("patch_size", "image_size", "merge_kernel_size", "tubelet_size"):
                    continue
                value = type(default)([value] * len(default))
            elif isinstance(value, tuple) != isinstance(default, tuple | list) and default is not None:
                continue
            if isinstance(default, bool) != isinstance(value, bool) or isinstance(default, str):
                continue
            settings[name] = int(value) if isinstance(default, int) and isinstance(value, float) else value
        elif re.search(r"_token_(id|index)$", name) and isinstance(default, int) and default >= FIRST_WORD:
            settings[name] = next(spare)
        elif name in ("depths", "num_block_repeats", "layer_depths") and isinstance(default, tuple | list):
            settings[name] = type(default)([1] * len(default))
    names = {each.name for each in dataclasses.fields(config_class)}
    if "kv_lora_rank" in names and "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = HEADS  # latent attention has keys for every head
    if isinstance(settings.get("embed_dim"), int) and "num_heads" in names and "num_heads" not in settings:
        settings["num_heads"] = (2, 4, 8, 16)[: len(config_class.num_heads)]  # stages of windows
    own = CONFIGS.get(kind or getattr(config_class, "model_type", ""), {})
    return merged(settings, copy.deepcopy(own))  # configs write into what they are given


def sub_settings(spec: Any) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    if isinstance(spec, type):
        inner, kind, given = spec, getattr(spec, "model_type", None), {}
    else:
        inner, kind, given = spec.config_class, spec.model_type, dict(spec.init_kwargs)
    if not issubclass(inner, PreTrainedConfig):
        inner = CONFIG_MAPPING[kind]
    kept = {name: value for name, value in given.items() if name not in SMALL}
    settings = merged(kept, small_settings(inner, kind))
    if kind:
        settings["model_type"] = kind
    return settings


def config_of(kind: str) -> Any:
    """A small config of a type."""
    config_class = transformers.CONFIG_MAPPING[kind]
    settings = small_settings(config_class, kind)
    config = config_class(**settings)
    for _ in range(2):
        if not _add_attention(config, settings):
            break
        config = config_class(**settings)
    return config


def _add_attention(config: Any, settings: dict[str, Any]) -> bool:
    """Ask for two layers of attention where a hybrid this small would have fewer; whether it did."""
    changed = False
    for name, value in settings.items():
        inner = getattr(config, name, None)
        if isinstance(value, dict) and isinstance(inner, transformers.PreTrainedConfig):
            changed |= _add_attention(inner, value)
    kinds = getattr(config, "layer_types", None)
    if "layer_types" not in {each.name for each in dataclasses.fields(config)}:
        return changed
    attends = [k for k in kinds or () if ("attention" in k and "linear" not in k) or "hybrid" in k]
    if isinstance(kinds, list) and len(kinds) == LAYERS and len(attends) < 2:
        settings.update(num_hidden_layers=4, layer_types=[kinds[0], "full_attention"] * 2)
        changed = True
    return changed


def spread_of(parameter: Tensor) -> float:
    """How wide a weight's numbers should be: not so wide that a wide layer's outputs explode."""
    inputs = parameter.numel() / parameter.shape[0] if parameter.dim() > 1 else 1
    return min(SPREAD, float(inputs) ** -0.5)


def sharpen(model: nn.Module) -> None:
    """Weights wide enough that maps are far from uniform, and nothing hides behind a zero."""
    generator = torch.Generator().manual_seed(2)
    seen: set[int] = set()
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) in seen or not parameter.is_floating_point() or parameter.numel() == 0:
                continue
            seen.add(id(parameter))
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            if not bool(parameter.any()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread_of(parameter))
            elif parameter.dim() >= 2 and 0.0 < spread < (wanted := spread_of(parameter)):
                parameter.mul_(wanted / spread)
            elif spread == 0.0 and float(parameter.flatten()[0]) < 0.1:
                parameter.fill_(0.5)  # scales of layers, which begin next to nothing


def build(kind: str) -> Any:
    """A small random model of a type, in evaluation mode."""
    config, made_by = config_of(kind), model_class(kind)
    torch.manual_seed(1)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in made_by(config).parameters())
    if count > LARGEST:
        raise ValueError(f"the small config is not small: {count / 1e6:.0f} million parameters")
    torch.manual_seed(1)
    model = made_by(config_of(kind)).eval()
    sharpen(model)
    return model
