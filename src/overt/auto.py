"""`import overt.auto`: transformers' Auto classes and pipelines load attached models.

One line in a script that knows nothing else of Overt:

```python
import overt.auto

model = AutoModelForSequenceClassification.from_pretrained("folder")  # with its mechanisms
```

What comes back is what `overt.load` gives. Tokenizers, image processors and the like are those of the base's
type. Nothing is executed that a folder brings along.
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
    """Stands for all attached models' configs: makes one of the base's own type."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config that a `config.json` describes, as its base's class has it."""
        del cls
        block = settings_in(config_dict)
        if block is None:
            raise ValueError("config.json does not describe an attached model: there is no block of overt's")
        kind = block.get("base_model_type")
        if kind not in CONFIG_MAPPING:
            raise ValueError(f"config.json does not describe an attached model: its base is of type {kind!r}")
        block.setdefault("architecture", (config_dict.get("architectures") or [None])[0])
        plain = {key: value for key, value in config_dict.items() if key not in (BLOCK, "architectures")}
        made = _config_class(kind).from_dict({**plain, "model_type": kind}, **kwargs)
        config = made[0] if isinstance(made, tuple) else made
        # No architectures: a pipeline whose loading fails would try that class, which leaves mechanisms out.
        setattr(config, BLOCK, block)
        return made


class _Attached:
    """Mixed into a type's config: it remembers the mechanisms, and is written with them."""

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "model_type": MODEL_TYPE}  # type: ignore[misc]

    def __reduce__(self) -> Any:
        return _unpickled, (type(self).model_type, self.__dict__)  # type: ignore[attr-defined]


def _unpickled(kind: str, state: dict[str, Any]) -> Any:
    config: Any = object.__new__(_config_class(kind))
    config.__dict__.update(state)
    return config


@cache
def _config_class(kind: str) -> Any:
    """The config class of attached models of a type, which each Auto class knows beside the type's own.

    It has the name of the type's own, by which transformers finds tokenizers and processors.
    """
    plain = CONFIG_MAPPING[kind]
    made = type(plain.__name__, (_Attached, plain), {"__module__": __name__, "model_type": kind})
    for auto in vars(modeling_auto).values():
        models: Any = getattr(auto, "_model_mapping", None) if isinstance(auto, type) else None
        found = None if models is None else models.get(plain, None)
        if found is not None:
            several = isinstance(found, list | tuple)
            ours = tuple(_model_class(one) for one in (found if several else [found]))
            models.register(made, ours if several else ours[0], exist_ok=True)
    return made


@cache
def _model_class(plain: Any) -> Any:
    """What Auto classes make a model with: the class itself, attached to."""

    def from_pretrained(cls: Any, /, path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        del cls
        if args:
            raise TypeError(f"arguments of {plain.__name__} must be named, got {args!r}")
        return load(path, cls=plain, config=plain_config(config), **kwargs)

    def from_config(cls: Any, /, config: Any, **kwargs: Any) -> Any:
        del cls
        block = getattr(config, BLOCK)
        model = plain._from_config(plain_config(config), **kwargs)
        return attach(model, *mechanisms_in(block, "config"), where=block["where"], seed=block["seed"])

    methods = {"from_pretrained": classmethod(from_pretrained), "_from_config": classmethod(from_config)}
    return type(plain.__name__, (plain,), {**methods, "__module__": __name__})


def plain_config(config: Any) -> Any:
    """A copy of an attached model's config as its base's type has it, which is what models hold."""
    config = copy.deepcopy(config)
    if isinstance(config, _Attached):
        config.__class__ = type(config).__mro__[2]
        config.__dict__.pop(BLOCK, None)
    return config


for _name in MODEL_TYPES:
    CONFIG_MAPPING.register(_name, AttachedConfig, exist_ok=True)
