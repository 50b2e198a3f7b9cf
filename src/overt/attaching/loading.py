"""Load a saved attached model."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from overt.attaching.adapters import adopt, mechanism_tensors, read_settings
from overt.attaching.api import attach, state_in, the_state
from overt.attaching.attention import AttachedAttention
from overt.attaching.find import check_eager
from overt.attaching.settings import (
    BLOCK,
    MODEL_TYPES,
    file_in,
    hub_options,
    mechanisms_in,
    settings_in,
    temperature_in,
)
from overt.models.seq2seq import MODEL_TYPE as LSTM

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(
    path: str | os.PathLike[str],
    cls: type[PreTrainedModel] | None = None,
    *,
    base: Any = None,
    **overrides: Any,
) -> Any:
    """Load what `save_pretrained` of an attached model wrote, including mechanisms and step count.

    With `cls` or overrides of the config, such as `num_labels`, a head may be newly initialised;
    transformers' loading report lists its tensors. The mechanisms, the layers that hold them and the input
    embeddings must be in the files.

    Args:
        path: a folder or a repository on the hub, of a model or of an adapter that a PEFT model saved.
        cls: the model's class, if it differs from the saved one (another head, or no head) or is not a class
            of transformers.
        base: for an adapter: its base model, plain or attached, or the base model's path. Defaults to the
            path that PEFT recorded.
        overrides: as for `from_pretrained`. Settings of the config, such as `num_labels` or a dropout rate,
            go to the config; the rest are arguments of `from_pretrained`, such as `device_map` or `dtype`.
            For an adapter they go to its base, if that is a path; `is_trainable=True` makes adapter and
            mechanisms trainable.

    Returns:
        The model in evaluation mode; a `PeftModel` for an adapter.
    """
    name = os.fspath(path)
    if not os.path.isdir(name) and (os.path.exists(name) or name.startswith((".", os.sep))):
        raise FileNotFoundError(f"{name} is not a folder: give the one that save_pretrained wrote")
    options = hub_options(overrides)
    whole = not os.path.isdir(name) or file_in(name, "config.json", options) is not None
    if base is not None or (not whole and read_settings(name, options) is not None):
        return _load_adapter(name, cls, base, overrides)
    return _load_model(name, cls, overrides)


def open_saved(name: str, settings: Mapping[str, Any], **overrides: Any) -> Any:
    """A saved model, plain or attached, of the class that its config names, in evaluation mode.

    Args:
        name: of its folder, or on the hub.
        settings: its config.
        overrides: arguments of `from_pretrained`, such as `dtype`.
    """
    if settings_in(settings) is not None:
        return load(name, **overrides)
    import transformers

    architecture = (settings.get("architectures") or [""])[0]
    cls = getattr(transformers, architecture, transformers.AutoModel)
    return cls.from_pretrained(name, **overrides).eval()


def _load_model(name: str, cls: type[PreTrainedModel] | None, overrides: dict[str, Any]) -> Any:
    from safetensors import SafetensorError

    settings = _config_in(name, overrides)
    block = settings_in(settings)
    if block is None and settings.get("model_type") in MODEL_TYPES:
        raise ValueError(
            f"{name}/config.json does not describe an attached model: it has no block of overt's settings"
        )
    if block is None and settings.get("model_type") == LSTM:
        raise ValueError(f"{name} holds an LSTM translator: overt.recipes.lstm_training.load opens it")
    if block is None:
        raise ValueError(
            f"{name} holds a plain model of type {settings.get('model_type')!r}: load it with transformers, "
            "then overt.attach it"
        )
    mechanisms = mechanisms_in(block, f"{name}/config.json")
    temperature = temperature_in(block.get("temperature"), f"{name}/config.json")
    plain, config, changed, arguments = _class_and_config(name, settings, block, cls, overrides)
    wants_info = arguments.pop("output_loading_info", False)
    arguments |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # checked below

    def put(model: nn.Module) -> None:
        try:
            attach(model, *mechanisms, where=block.get("where"), seed=block.get("seed", 0))
        except (TypeError, ValueError) as error:
            raise ValueError(f"what {name}/config.json describes cannot be attached: {error}") from error

    try:
        model, info = _attaching(plain, put).from_pretrained(name, config=config, **arguments)
    except SafetensorError as error:
        raise ValueError(f"the weights in {name} are damaged or truncated: {error}") from error
    missing, mismatched = sorted(info["missing_keys"]), sorted(info["mismatched_keys"])
    if changed:
        missing, mismatched = _not_of_a_head(model, missing, mismatched)
    if wrong := [*missing, *map(str, mismatched)]:
        raise ValueError(
            f"{len(wrong)} tensors are missing from the weights in {name} or do not fit, such as {wrong[0]}"
        )
    spare = sorted(key for key in info["unexpected_keys"] if ".overt." in key)
    if spare and not changed:
        raise ValueError(
            f"the weights in {name} have {len(spare)} tensors of mechanisms that its config.json does not "
            f"mention, such as {spare[0]}"
        )
    model.__class__ = plain
    for module in list(model.modules()):
        part = module._modules.get("overt")
        if isinstance(part, AttachedAttention):
            check_eager(model, module, part.site.heads)
    model.overt_state.seen = torch.zeros_like(model.overt_state.step)
    model.overt_state.loaded = True
    model.overt_state.temperature = temperature
    return (model, info) if wants_info else model


def _config_in(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    try:
        settings, _ = PreTrainedConfig.get_config_dict(name, **hub_options(overrides))
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{name}/config.json does not describe a model: {error}") from error
    if not settings:
        raise FileNotFoundError(f"{name} holds no config.json; give the folder that save_pretrained wrote")
    if not isinstance(settings, dict):
        raise ValueError(f"{name}/config.json must be a JSON object, got {type(settings).__name__}")
    return settings


def _class_and_config(
    name: str,
    settings: dict[str, Any],
    block: dict[str, Any],
    cls: type[PreTrainedModel] | None,
    overrides: dict[str, Any],
) -> tuple[type[PreTrainedModel], Any, bool, dict[str, Any]]:
    """The class and its config, whether they differ from the saved ones, and arguments for loading."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    listed = settings.get("architectures") or [block.get("architecture")]
    saved = listed[0] if isinstance(listed, list) else listed
    kind = str(block.get("base_model_type"))
    settings = {key: value for key, value in settings.items() if key != BLOCK} | {"model_type": kind}
    plain = _class_named(name, saved) if cls is None else _checked_class(cls)
    # The config has these too, but here they say how to load.
    arguments = {key: value for key, value in overrides.items() if key in ("dtype", "torch_dtype")}
    others = {key: value for key, value in overrides.items() if key not in arguments}
    config, rest = others.pop("config", None), others
    config_class = plain.config_class
    if config is not None and not isinstance(config, PreTrainedConfig):
        raise TypeError(f"config must be a PreTrainedConfig, got {config!r}; give settings by their names")
    if config is not None and "overt.auto" in sys.modules:  # where the config may come from
        config = sys.modules["overt.auto"].plain_config(config)
    if config is None:
        try:
            maker: Any = config_class
            if config_class is None or config_class.model_type != kind:
                maker = CONFIG_MAPPING[kind]
            config, rest = maker.from_dict(settings, return_unused_kwargs=True, **others)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{name}/config.json does not describe an attached model: {error}") from error
    fits = config_class is None or isinstance(config, config_class) or _builds(plain, kind)
    if not fits:
        raise ValueError(f"{plain.__name__} is not a model of type {kind}, which {name} holds")
    changed = plain.__name__ != saved or len(rest) < len(overrides) - len(arguments)
    return plain, config, changed, {**arguments, **rest}


def _builds(plain: type[PreTrainedModel], kind: str) -> bool:
    """Whether an Auto class builds models of a type with this class, though its config is of another type."""
    from transformers.models.auto import modeling_auto

    tables = (table for name, table in vars(modeling_auto).items() if name.endswith("MAPPING_NAMES"))
    entries = [table.get(kind) for table in tables]
    return any(plain.__name__ in (names if isinstance(names, tuple) else (names,)) for names in entries)


def _class_named(name: str, architecture: object) -> type[PreTrainedModel]:
    import transformers

    cls = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ValueError(
            f"{name} was saved from {architecture}, which is not a model class of transformers: give the "
            f"class, overt.load(…, cls={architecture})"
        )
    return cls


def _checked_class(cls: object) -> type[PreTrainedModel]:
    from transformers import PreTrainedModel

    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise TypeError(f"cls must be a model class, such as transformers.BertModel, got {cls!r}")
    return cls


def _attaching(plain: type, put: Callable[[nn.Module], object]) -> Any:
    """A subclass that attaches in its constructor, so that transformers loads mechanisms with the rest."""

    def make(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)  # type: ignore[misc]
        put(self)

    return type(plain.__name__, (plain,), {"__init__": make, "__module__": plain.__module__})


def _not_of_a_head(
    model: PreTrainedModel, missing: Iterable[str], mismatched: Iterable[Any]
) -> tuple[list[str], list[Any]]:
    """The missing and mismatched tensors that a different head does not explain.

    Any tensor may be missing except those of attention layers, mechanisms and input embeddings: a base has
    parts that only some heads need, such as BERT's pooler. Mismatched tensors must be outside the base.
    """
    holders = [path for path, module in model.named_modules() if "overt" in module._modules]
    needed = {re.split(r"\.\d+(?:\.|$)", path)[0] for path in holders} | {"overt_state"}
    embeddings = model.get_input_embeddings()
    needed |= {path for path, module in model.named_modules() if module is embeddings}
    inner = model.base_model is not model
    return (
        [key for key in missing if any(key.startswith(f"{path}.") for path in needed)],
        [entry for entry in mismatched if not inner or entry[0].startswith(f"{model.base_model_prefix}.")],
    )


def _load_adapter(name: str, cls: type[PreTrainedModel] | None, base: Any, overrides: dict[str, Any]) -> Any:
    from peft import PeftConfig, PeftModel
    from safetensors import safe_open
    from transformers import PreTrainedModel

    options, trainable = hub_options(overrides), bool(overrides.pop("is_trainable", False))
    settings = read_settings(name, options)
    weights = file_in(name, "adapter_model.safetensors", options)
    if settings is None or weights is None:
        missing = "overt.json" if settings is None else "adapter_model.safetensors"
        raise FileNotFoundError(
            f"{name} holds no {missing}; give a folder that a PEFT model with mechanisms saved"
        )
    mechanisms = mechanisms_in(settings, f"{name}/overt.json")
    temperature = temperature_in(settings.get("temperature"), f"{name}/overt.json")
    if base is None:
        base = PeftConfig.from_pretrained(name, **options).base_model_name_or_path
        if base is None:
            raise ValueError(f"the adapter in {name} does not name its base model: give base=")
    if isinstance(base, str | os.PathLike):
        for option in ("revision", "subfolder"):  # these are the adapter's
            overrides.pop(option, None)
        base = _load_base(os.fspath(base), cls, settings, overrides)
    elif not isinstance(base, PreTrainedModel):
        raise TypeError(f"base must be a Hugging Face model or its path, got {type(base).__name__}")
    elif overrides.keys() - options.keys():
        unused = ", ".join(sorted(overrides.keys() - options.keys()))
        raise TypeError(f"{unused} cannot be applied to a base that is already a model; give its path")

    def put(model: nn.Module) -> None:
        attach(model, *mechanisms, where=settings.get("where"), seed=settings.get("seed", 0))

    with safe_open(weights, framework="pt") as file:
        within = any(".overt." in key for key in file.keys())  # noqa: SIM118
    if state_in(base) is None and within:  # PEFT trained the mechanisms, or put adapters into them
        put(base)
    state = state_in(base)
    if state is not None:
        state.loaded = True
    model = PeftModel.from_pretrained(base, name, is_trainable=trainable, **options)
    if state is None:
        put(model)
        adopt(model).restore(name, "default", options)
    the_state(model).temperature = temperature
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
