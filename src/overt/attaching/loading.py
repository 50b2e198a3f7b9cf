"""Load an attached model that was saved."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from overt.attaching.adapters import adopt, mechanism_tensors, read_settings
from overt.attaching.api import attach, state_in
from overt.attaching.attention import AttachedAttention
from overt.attaching.find import check_eager
from overt.attaching.settings import BLOCK, MODEL_TYPES, file_in, hub_options, mechanisms_in, settings_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(
    path: str | os.PathLike[str],
    cls: type[PreTrainedModel] | None = None,
    *,
    base: Any = None,
    **overrides: Any,
) -> Any:
    """Load what `save_pretrained` of an attached model wrote, mechanisms, step count and all.

    With `cls` or overrides of the config, such as `num_labels`, a head may be made anew; transformers' report
    lists what is. The mechanisms, the layers that hold them and the input embeddings must be in the files.

    Args:
        path: a folder, or a repository on the hub; or those of an adapter that a PEFT model saved.
        cls: the model's class, if it is to be another than the one that was saved (with another head, or
            without), or is none of transformers' own.
        base: for an adapter: the model that it belongs on, plain or attached to, or that model's path. By
            default what PEFT wrote down.
        overrides: as for `from_pretrained`: what the config has goes there, such as `num_labels` or a dropout
            rate; the rest are arguments of its own, such as `device_map` or `dtype`. Of an adapter they go
            to its base, if that is a path; `is_trainable=True` lets adapter and mechanisms train on.

    Returns:
        The model in evaluation mode; a `PeftModel` for an adapter.
    """
    name = os.fspath(path)
    if not os.path.isdir(name) and (os.path.exists(name) or name.startswith((".", os.sep))):
        raise FileNotFoundError(f"{name} is no folder: give the one that save_pretrained wrote")
    options = hub_options(overrides)
    whole = not os.path.isdir(name) or file_in(name, "config.json", options) is not None
    if base is not None or (not whole and read_settings(name, options) is not None):
        return _load_adapter(name, cls, base, overrides)
    return _load_model(name, cls, overrides)


def _load_model(name: str, cls: type[PreTrainedModel] | None, overrides: dict[str, Any]) -> Any:
    from safetensors import SafetensorError

    settings = _config_in(name, overrides)
    block = settings_in(settings)
    if block is None and settings.get("model_type") in MODEL_TYPES:
        raise ValueError(
            f"{name}/config.json does not describe an attached model: there is no block of overt's"
        )
    if block is None:
        raise ValueError(
            f"{name} holds a plain model of type {settings.get('model_type')!r}: load it with transformers, "
            "then overt.attach it"
        )
    mechanisms = mechanisms_in(block, f"{name}/config.json")
    plain, config, other, arguments = _class_and_config(name, settings, block, cls, overrides)
    wants_info = arguments.pop("output_loading_info", False)
    arguments |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # looked at below

    def put(model: nn.Module) -> None:
        try:
            attach(model, *mechanisms, where=block.get("where"), seed=block.get("seed", 0))
        except (TypeError, ValueError) as error:
            raise ValueError(f"what {name}/config.json describes cannot be attached: {error}") from error

    try:
        model, info = _attaching(plain, put).from_pretrained(name, config=config, **arguments)
    except SafetensorError as error:
        raise ValueError(f"the weights in {name} are damaged or cut short: {error}") from error
    wrong = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    if other:
        wrong = _not_of_a_head(model, *wrong)
    if any(wrong):
        listed = [*wrong[0], *map(str, wrong[1])]
        raise ValueError(
            f"the weights in {name} lack or do not fit {len(listed)} tensors, such as {listed[0]}"
        )
    spare = sorted(key for key in info["unexpected_keys"] if ".overt." in key)
    if spare and not other:
        raise ValueError(
            f"the weights in {name} have {len(spare)} tensors of mechanisms that its config.json does not "
            f"tell of, such as {spare[0]}"
        )
    model.__class__ = plain
    for module in list(model.modules()):
        part = module._modules.get("overt")
        if isinstance(part, AttachedAttention):
            check_eager(model, module, part.site.heads)
    model.overt_state.seen = torch.zeros_like(model.overt_state.step)
    model.overt_state.loaded = True
    return (model, info) if wants_info else model


def _config_in(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    try:
        settings, _ = PreTrainedConfig.get_config_dict(name, **hub_options(given))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{name}/config.json does not describe a model: {error}") from error
    if not settings:
        raise FileNotFoundError(f"{name} holds no config.json; give the folder that save_pretrained wrote")
    if not isinstance(settings, dict):
        raise ValueError(f"{name}/config.json must be settings by name, got {type(settings).__name__}")
    return settings


def _class_and_config(
    name: str,
    settings: dict[str, Any],
    block: dict[str, Any],
    cls: type[PreTrainedModel] | None,
    overrides: dict[str, Any],
) -> tuple[type[PreTrainedModel], Any, bool, dict[str, Any]]:
    """The class and its config, whether they are other than those saved, and arguments that are not its."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    listed = settings.get("architectures") or [block.get("architecture")]
    saved = listed[0] if isinstance(listed, list) else listed
    kind = str(block.get("base_model_type"))
    settings = {key: value for key, value in settings.items() if key != BLOCK} | {"model_type": kind}
    plain = _class_named(name, saved) if cls is None else _checked_class(cls)
    # Which the config has, too, but which says how to load.
    arguments = {key: value for key, value in overrides.items() if key in ("dtype", "torch_dtype")}
    given = {key: value for key, value in overrides.items() if key not in arguments}
    config, rest = given.pop("config", None), given
    own = plain.config_class
    if config is not None and not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config must be a PreTrainedConfig, got {config!r}; give settings by their names")
    if config is not None and "overt.auto" in sys.modules:  # which may have made it
        config = sys.modules["overt.auto"].plain_config(config)
    if config is None:
        try:
            maker = own if own is not None and own.model_type == kind else CONFIG_MAPPING[kind]
            config, rest = maker.from_dict(settings, return_unused_kwargs=True, **given)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{name}/config.json does not describe an attached model: {error}") from error
    if own is not None and not isinstance(config, own) and not _listed(plain, kind):
        raise ValueError(f"{plain.__name__} is no model of type {kind}, which {name} holds")
    changed = plain.__name__ != saved or len(rest) < len(overrides) - len(arguments)
    return plain, config, changed, {**arguments, **rest}


def _listed(plain: type[PreTrainedModel], kind: str) -> bool:
    """Whether an Auto class builds models of a type by this class, though its config is another type's."""
    from transformers.models.auto import modeling_auto

    tables = (table for name, table in vars(modeling_auto).items() if name.endswith("MAPPING_NAMES"))
    built = [table.get(kind) for table in tables]
    return any(plain.__name__ in (one if isinstance(one, tuple) else (one,)) for one in built)


def _class_named(name: str, architecture: object) -> type[PreTrainedModel]:
    import transformers

    found = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(
            f"{name} was saved from {architecture}, which is no model class of transformers: give the class, "
            f"overt.load(…, cls={architecture})"
        )
    return found


def _checked_class(cls: object) -> type[PreTrainedModel]:
    from transformers import PreTrainedModel

    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise TypeError(f"cls must be a model class, such as transformers.BertModel, got {cls!r}")
    return cls


def _attaching(plain: type, put: Callable[[nn.Module], object]) -> Any:
    """A class that attaches as it is made, so that transformers loads mechanisms' weights with the rest."""

    def make(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)  # type: ignore[misc]
        put(self)

    return type(plain.__name__, (plain,), {"__init__": make, "__module__": plain.__module__})


def _not_of_a_head(
    model: PreTrainedModel, missing: Iterable[str], mismatched: Iterable[Any]
) -> tuple[list[str], list[Any]]:
    """Of tensors that are not in the files or do not fit, those that another head does not explain.

    All may be missing but layers that hold attentions, mechanisms and input embeddings: a base has parts that
    only some heads want, such as BERT's pooler. What does not fit must be outside of the base.
    """
    holders = [path for path, module in model.named_modules() if "overt" in module._modules]
    needed = {re.split(r"\.\d+(?:\.|$)", path)[0] for path in holders} | {"overt_state"}
    embeddings = model.get_input_embeddings()
    needed |= {path for path, module in model.named_modules() if module is embeddings}
    inner = model.base_model is not model
    return (
        [key for key in missing if any(key.startswith(f"{path}.") for path in needed)],
        [one for one in mismatched if not inner or one[0].startswith(f"{model.base_model_prefix}.")],
    )


def _load_adapter(name: str, cls: type[PreTrainedModel] | None, base: Any, overrides: dict[str, Any]) -> Any:
    from peft import PeftConfig, PeftModel
    from safetensors import safe_open
    from transformers import PreTrainedModel

    options, trainable = hub_options(overrides), bool(overrides.pop("is_trainable", False))
    settings = read_settings(name, options)
    weights = file_in(name, "adapter_model.safetensors", options)
    if settings is None or weights is None:
        lacking = "overt.json" if settings is None else "adapter_model.safetensors"
        raise FileNotFoundError(f"{name} holds no {lacking}; give what a PEFT model with mechanisms saved")
    mechanisms = mechanisms_in(settings, f"{name}/overt.json")
    if base is None:
        base = PeftConfig.from_pretrained(name, **options).base_model_name_or_path
        if base is None:
            raise ValueError(f"the adapter in {name} does not say what it belongs on: give base=")
    if isinstance(base, str | os.PathLike):
        for only in ("revision", "subfolder"):  # the adapter's
            overrides.pop(only, None)
        base = _load_base(os.fspath(base), cls, settings, overrides)
    elif not isinstance(base, PreTrainedModel):
        raise TypeError(f"base must be a Hugging Face model or its path, got {type(base).__name__}")
    elif overrides.keys() - options.keys():
        raise TypeError(f"{', '.join(sorted(overrides.keys() - options.keys()))}: the base is made already")

    def put(model: nn.Module) -> None:
        attach(model, *mechanisms, where=settings.get("where"), seed=settings.get("seed", 0))

    with safe_open(weights, framework="pt") as file:
        within = any(".overt." in key for key in file.keys())  # noqa: SIM118
    if state_in(base) is None and within:  # PEFT trained them, or put something into them
        put(base)
    state = state_in(base)
    if state is not None:
        state.loaded = True
    model = PeftModel.from_pretrained(base, name, is_trainable=trainable, **options)
    if state is None:
        put(model)
        adopt(model).restore(name, "default", options)
    for place in mechanism_tensors(model, "default").values():
        place.tensor.requires_grad_(trainable)
    return model.eval()


def _load_base(
    path: str, cls: type[PreTrainedModel] | None, settings: dict[str, Any], overrides: dict[str, Any]
) -> Any:
    if settings_in(_config_in(path, overrides)) is not None:
        return _load_model(path, cls, overrides)
    plain = _class_named(path, settings.get("architecture")) if cls is None else _checked_class(cls)
    return plain.from_pretrained(path, **overrides)
