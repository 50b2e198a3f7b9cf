"""Attached mechanisms in files: settings in `config.json` or `overt.json`, and the model card."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from overt import _check
from overt._files import write_whole
from overt.mechanisms.mechanism import Mechanism, as_dict, from_dict

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = "overt"
TEMPERATURE = "overt_temperature"  # in a plain model's config; an attached model's is in its block
# Users who load the folder without overt see this in transformers' error: "has model type `…` but
# Transformers does not recognize this architecture". Older files have just "overt".
MODEL_TYPE = "overt (import overt.auto)"
MODEL_TYPES = ("overt", MODEL_TYPE)
FORMAT = 1
INSTALL = "pip install -c constraints.txt ."
HEADER = """\
---
library_name: {library}
tags:
- overt
---
"""
TITLE = "# A model with attention mechanisms of Overt"
CARD = f"""
{TITLE}

The attention of this {{architecture}} has {{mechanisms}} attached. Overt, a PyTorch library, loads it. Overt
is not on a package index yet; install it from a checkout of its source:

```sh
{INSTALL}
```

Then load the model:

```python
import overt

model = overt.load({{arguments}})
```

{{warning}}
"""
WARNINGS = {
    "transformers": """\
After `import overt.auto`, Auto classes and `pipeline` load it too; without that line they do not recognise
its type. A concrete class such as `{architecture}` loads only the plain weights, without the mechanisms.""",
    "peft": """\
PEFT alone does not know that the base needs these mechanisms: loaded onto a base without them, the adapter
gives a model that was never trained.""",
}


def settings_in(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The settings of attached mechanisms in a `config.json`; None for a plain model's."""
    block = config.get(BLOCK)
    attached = config.get("model_type") in MODEL_TYPES and isinstance(block, Mapping)
    return dict(block) if attached and isinstance(block, Mapping) else None


def settings_of(model: PreTrainedModel) -> dict[str, Any]:
    """The settings of a model's mechanisms, as they are written to files."""
    from overt._version import __version__

    state: Any = model.overt_state
    return {
        "format": FORMAT,
        "version": __version__,
        "architecture": type(model).__name__,
        # Not under "model_type": transformers would take this block for the model's config.
        "base_model_type": model.config.model_type,
        "mechanisms": [as_dict(mechanism) for mechanism in state.mechanisms],
        "where": state.where,
        "seed": state.seed,
        **({} if state.temperature is None else {"temperature": state.temperature._asdict()}),
    }


class Temperature(NamedTuple):
    """What `overt.calibrate` fitted, as it is saved with a model.

    Attributes:
        value: what logits are divided by.
        dropout: whether dropout was on in the passes that it was fitted to.
        architecture: class of the model.
        labels: its number of classes. A model with another head does not use the temperature.
    """

    value: float
    dropout: bool
    architecture: str
    labels: int | None


def temperature_in(entry: object, source: str) -> Temperature | None:
    """The temperature that an entry of a file describes; errors name the file."""
    if entry is None:
        return None
    if not isinstance(entry, Mapping) or set(entry) != set(Temperature._fields):
        fields = ", ".join(Temperature._fields)
        raise ValueError(f"the temperature in {source} must have {fields}, got {entry!r}"[:200])
    found = Temperature(**entry)
    _check.positive(f"the temperature's value in {source}", found.value)
    if not isinstance(found.dropout, bool):
        raise TypeError(f"the temperature's dropout in {source} must be a boolean, got {found.dropout!r}")
    return found


def temperature_of(base: Any, state: Any) -> Temperature | None:
    """A model's temperature; None if it has none, or one that belongs to another head.

    Args:
        base: the model.
        state: of what is attached to it, with a temperature of its own: the plain model's belongs to other
            predictions. None if nothing is attached.
    """
    config = getattr(base, "config", None)
    if state is not None:
        found = state.temperature
    else:
        found = temperature_in(getattr(config, TEMPERATURE, None), "the model's config")
    if found is None or head_of(base) != (found.architecture, found.labels):
        return None
    return found  # type: ignore[no-any-return]


def head_of(base: Any) -> tuple[str, int | None]:
    """A model's class and its number of classes, by which a temperature knows its model."""
    return type(base).__name__, getattr(getattr(base, "config", None), "num_labels", None)


class Uploading:
    """Replaces a model's `_upload_modified_files`, since `push_to_hub` overwrites the card just before it."""

    def __init__(self, saving: Any) -> None:
        self.saving = saving

    def __call__(self, working_dir: str | os.PathLike[str], repo_id: str, *args: Any, **kwargs: Any) -> Any:
        """Write the model card, then call the original method."""
        self.saving.write_card(Path(working_dir) / "README.md", repo_id)
        model = self.saving.model
        return type(model)._upload_modified_files(model, working_dir, repo_id, *args, **kwargs)


def write_card(path: Path, model: PreTrainedModel, arguments: str, library: str) -> None:
    """Write the model card of an attached model, or insert it into the existing one."""
    state: Any = model.overt_state
    architecture = type(model).__name__
    card = CARD.format(
        architecture=architecture,
        mechanisms=" and ".join(f"`{mechanism}`" for mechanism in state.mechanisms),
        arguments=arguments,
        warning=WARNINGS[library].format(architecture=architecture),
    )
    text = path.read_text(encoding="utf-8") if path.exists() else HEADER.format(library=library)
    before, ours, rest = text.partition(f"\n{TITLE}\n")
    after = re.search(r"^#{1,2} .*\Z", rest, re.MULTILINE | re.DOTALL) if ours else None
    write_whole(path, before.rstrip() + "\n" + card + ("" if after is None else f"\n{after[0]}"))


def mechanisms_in(settings: Mapping[str, Any], source: str) -> tuple[Mechanism, ...]:
    """The mechanisms that settings describe; errors name the file."""
    if settings.get("format") != FORMAT:
        raise ValueError(f"{source} has format {settings.get('format')!r}; this overt reads {FORMAT}")
    entries = settings.get("mechanisms")
    if not isinstance(entries, list):
        raise ValueError(f"{source} does not describe an attached model: mechanisms must be a list")
    try:
        return tuple(from_dict(entry) for entry in entries)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the mechanisms in {source} cannot be built: {error}") from error


def hub_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `from_pretrained` that say where files are."""
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def file_in(name: str, file: str, options: Mapping[str, Any]) -> str | None:
    """The path of a file in a folder or a repository on the hub; None if there is no such file."""
    from transformers.utils.hub import cached_file

    if os.path.isdir(name):
        path = os.path.join(name, options.get("subfolder", ""), file)
        return path if os.path.isfile(path) else None
    cached: str | None = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **options)
    return cached
