"""Save an attached model the ordinary way, and load it again."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from overt.mechanisms.attention_map import Mechanism
from overt.mechanisms.bayesian.config import Bayesian
from overt.mechanisms.evolving.config import Evolving
from overt.mechanisms.scores import Synthesizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_TYPE = "overt"
FORMAT = 1
MECHANISMS: dict[str, type[Mechanism]] = {
    "Evolving": Evolving,
    "Bayesian": Bayesian,
    "Synthesizer": Synthesizer,
}
INSTALL = "pip install overt"
CARD = f"""\
---
library_name: transformers
tags:
- overt
---

# A model with attention mechanisms of Overt

The attention of this {{architecture}} holds {{mechanisms}}. Load it with

```sh
{INSTALL}
```

```python
import overt

model = overt.load("{{name}}")
```

Auto classes do not know its type, `overt`; a concrete class such as `{{architecture}}` loads the plain
weights only, without the mechanisms.
"""


class Saving:
    """`model.save_pretrained` of an attached model: the model's own, and then what `overt.load` needs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model

    def __call__(
        self, save_directory: str | os.PathLike[str], *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> Any:
        """Write weights, config and model card; arguments are those of `PreTrainedModel.save_pretrained`."""
        folder = Path(save_directory)
        if push_to_hub:  # it comes back here for a folder of its own, and uploads that when all is in it
            repo = kwargs.pop("repo_id", folder.name)
            self(folder, *args, **kwargs)
            return self.model.push_to_hub(repo, **kwargs)
        plain = type(self.model).save_pretrained
        if "save_original_format" in inspect.signature(plain).parameters:
            # Older names of weights are for older loaders, which do not read this; and the Trainer, which
            # resumes by the names that the model has, would not find its own.
            kwargs.setdefault("save_original_format", False)
        plain(self.model, folder, *args, **kwargs)
        if kwargs.get("is_main_process", True) and (folder / "config.json").exists():
            self._write_config(folder / "config.json")
            self.write_card(folder / "README.md", folder.name)
        return None

    def _write_config(self, path: Path) -> None:
        from overt import __version__

        state = self.model.overt_state
        config = json.loads(path.read_text(encoding="utf-8"))
        config[MODEL_TYPE] = {
            "format": FORMAT,
            "version": __version__,
            # Not under "model_type": transformers would take this block for the model's own config.
            "base_model_type": config["model_type"],
            "mechanisms": [as_dict(mechanism) for mechanism in state.mechanisms],
            "where": state.where,
            "seed": state.seed,
        }
        config["model_type"] = MODEL_TYPE
        _write(path, json.dumps(config, indent=2, sort_keys=True) + "\n")

    def write_card(self, path: Path, name: str) -> None:
        """Write the model card, or add to the one that is there."""
        mechanisms = " and ".join(f"`{mechanism}`" for mechanism in self.model.overt_state.mechanisms)
        card = CARD.format(architecture=type(self.model).__name__, mechanisms=mechanisms, name=name)
        if path.exists():
            text = path.read_text(encoding="utf-8")
            if INSTALL in text:
                return
            card = text.rstrip() + "\n" + card.split("---\n", 2)[2]
        _write(path, card)


class Uploading:
    """`_upload_modified_files` of an attached model: `push_to_hub` replaces the card just before it."""

    def __init__(self, saving: Saving) -> None:
        self.saving = saving

    def __call__(self, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """As the model's own, with the model card written."""
        self.saving.write_card(Path(working_dir) / "README.md", repo_id)
        model = self.saving.model
        return type(model)._upload_modified_files(model, working_dir, repo_id, *args, **kwargs)


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def as_dict(mechanism: Mechanism) -> dict[str, Any]:
    """A mechanism's settings as JSON has them."""
    return {"name": type(mechanism).__name__, **dataclasses.asdict(mechanism)}


def from_dict(settings: object) -> Mechanism:
    """A mechanism from its settings; an error says what is wrong with them."""
    if not isinstance(settings, Mapping) or settings.get("name") not in MECHANISMS:
        raise ValueError(f"a mechanism must name one of {', '.join(MECHANISMS)}, got {settings!r}")
    kind = MECHANISMS[settings["name"]]
    values = {key: value for key, value in settings.items() if key != "name"}
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{settings['name']} has no setting {', '.join(unknown)} in this version of overt")
    return kind(**values)


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
    try:
        mechanisms = tuple(from_dict(one) for one in block["mechanisms"])
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
    from overt.attach.attention import AttachedAttention
    from overt.attach.find import check_eager

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
    from overt.attach.api import attach

    def make(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        plain.__init__(self, *args, **kwargs)  # type: ignore[misc]
        attach(self, *mechanisms, where=where, seed=seed)

    return type(plain.__name__, (plain,), {"__init__": make, "__module__": plain.__module__})
