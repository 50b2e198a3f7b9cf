"""Save an attached model the ordinary way."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt._files import write_whole
from overt.attaching.adapters import write_adapter
from overt.attaching.settings import BLOCK, MODEL_TYPE, settings_of, write_card

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
        if not kwargs.get("is_main_process", True):
            return None
        if getattr(self.model, "_hf_peft_config_loaded", False):  # then it wrote an adapter and no config
            write_adapter(folder, self.model, self.model.active_adapters()[0], kwargs.get("state_dict"))
            write_card(folder / "README.md", self.model, f'"{folder.name}", base=base', "peft")
        elif (folder / "config.json").exists():
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config[BLOCK] = settings_of(self.model)
            config["model_type"] = MODEL_TYPE
            write_whole(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
            self.write_card(folder / "README.md", folder.name)
        return None

    def write_card(self, path: Path, name: str) -> None:
        """Write the model card, or add to the one that is there."""
        write_card(path, self.model, f'"{name}"', "transformers")
