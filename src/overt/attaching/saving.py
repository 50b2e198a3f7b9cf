"""`save_pretrained` of attached models."""

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
    """Replaces `model.save_pretrained`: calls the original, then writes what `overt.load` needs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model

    def __call__(
        self, save_directory: str | os.PathLike[str], *args: Any, push_to_hub: bool = False, **kwargs: Any
    ) -> Any:
        """Write weights, config and model card; arguments are those of `PreTrainedModel.save_pretrained`."""
        folder = Path(save_directory)
        if push_to_hub:  # calls this again for a temporary folder, and uploads that once it is complete
            repo = kwargs.pop("repo_id", folder.name)
            self(folder, *args, **kwargs)
            return self.model.push_to_hub(repo, **kwargs)
        plain = type(self.model).save_pretrained
        if "save_original_format" in inspect.signature(plain).parameters:
            # Older weight names serve older loaders, which cannot read attached models; and the Trainer
            # resumes by the model's current names, and would not find its weights.
            kwargs.setdefault("save_original_format", False)
        plain(self.model, folder, *args, **kwargs)
        if not kwargs.get("is_main_process", True):
            return None
        if getattr(self.model, "_hf_peft_config_loaded", False):  # then an adapter was written, and no config
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
        """Write the model card, or add to the existing one."""
        write_card(path, self.model, f'"{name}"', "transformers")
