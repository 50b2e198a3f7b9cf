"""`import overt.auto`: transformers' Auto classes and pipelines load attached models.

One line in a script that does not use Overt otherwise:

```python
import overt.auto

model = AutoModelForSequenceClassification.from_pretrained("folder")  # with its mechanisms
```

The result is the same as that of `overt.load`. Tokenizers, image processors and the like are those of the
base's type. No code from the folder is executed.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from overt.attaching import attach, load
from overt.attaching.settings import BLOCK, MODEL_TYPE, MODEL_TYPES, mechanisms_in, settings_in

__all__ = ["AttachedConfig"]


class AttachedConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """The config type of all attached models; creates a config of the base's own type."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config that a `config.json` describes, of a subclass of its base's config class."""
        del cls
        block = settings_in(config_dict)
        if block is None:
            raise ValueError(
                "config.json does not describe an attached model: it has no block of overt's settings"
            )
        kind = block.get("base_model_type")
        if kind not in CONFIG_MAPPING:
            raise ValueError(f"config.json does not describe an attached model: its base is of type {kind!r}")
        block.setdefault("architecture", (config_dict.get("architectures") or [None])[0])
        plain = {key: value for key, value in config_dict.items() if key not in (BLOCK, "architectures")}
        result = _config_class(kind).from_dict({**plain, "model_type": kind}, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        # No architectures: a pipeline that fails to load would try that class, which drops the mechanisms.
        setattr(config, BLOCK, block)
        return result


class _ConfigMixin:
    """Mixed into a type's config class; its configs hold the mechanisms' settings and save them."""

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "model_type": MODEL_TYPE}  # type: ignore[misc]

    def __reduce__(self) -> Any:
        return _unpickle_config, (type(self).model_type, self.__dict__)  # type: ignore[attr-defined]


def _unpickle_config(kind: str, state: dict[str, Any]) -> Any:
    config: Any = object.__new__(_config_class(kind))
    config.__dict__.update(state)
    return config


@cache
def _config_class(kind: str) -> Any:
    """The config class of attached models of a type, registered with each Auto class that knows the type.

    It has the same name as the type's own class, by which transformers finds tokenizers and processors.
    """
    plain = CONFIG_MAPPING[kind]
    config_class = type(plain.__name__, (_ConfigMixin, plain), {"__module__": __name__, "model_type": kind})
    for auto in vars(modeling_auto).values():
        models: Any = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        registered = None if models is None else models.get(plain, None)
        if registered is not None:
            several = isinstance(registered, list | tuple)
            classes = tuple(_model_class(cls) for cls in (registered if several else [registered]))
            models.register(config_class, classes if several else classes[0], exist_ok=True)
    return config_class


@cache
def _model_class(plain: Any) -> Any:
    """The class that Auto classes build attached models with: loads `plain`, with its mechanisms."""

    def from_pretrained(cls: Any, /, path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        del cls
        if args:
            raise TypeError(f"arguments of {plain.__name__} must be passed by keyword, got {args!r}")
        return load(path, cls=plain, config=plain_config(config), **kwargs)

    def from_config(cls: Any, /, config: Any, **kwargs: Any) -> Any:
        del cls
        block = getattr(config, BLOCK)
        model = plain._from_config(plain_config(config), **kwargs)
        return attach(model, *mechanisms_in(block, "config"), where=block["where"], seed=block["seed"])

    methods = {"from_pretrained": classmethod(from_pretrained), "_from_config": classmethod(from_config)}
    return type(plain.__name__, (plain,), {**methods, "__module__": __name__})


def plain_config(config: Any) -> Any:
    """A copy of an attached model's config, of the base's own class, which is what models hold."""
    config = copy.deepcopy(config)
    if isinstance(config, _ConfigMixin):
        config.__class__ = type(config).__mro__[2]
        config.__dict__.pop(BLOCK, None)
    return config


for _name in MODEL_TYPES:
    CONFIG_MAPPING.register(_name, AttachedConfig, exist_ok=True)
