"""Save an attached model the ordinary way."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overt.mechanisms.mechanism import as_dict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_TYPE = "overt"
FORMAT = 1
INSTALL = "pip install -c constraints.txt ."
CARD = f"""\
---
library_name: transformers
tags:
- overt
---

# A model with attention mechanisms of Overt

The attention of this {{architecture}} holds {{mechanisms}}. Overt, a PyTorch library, loads it. It is on no
package index yet: in a checkout of its source,

```sh
{INSTALL}
```

and then

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
        from overt._version import __version__

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
