"""What several commands take: a model by its folder or name, a text or the path of a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import overt
from overt._extras import need
from overt.attaching.settings import settings_in
from overt.recipes._runs import check_model

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}


def open_model(name: str) -> Any:
    """A model of the class that its config names, mechanisms and all."""
    import transformers
    from transformers import AutoModel, PreTrainedConfig
    from transformers.utils import logging

    check_model(name)
    # What it says of unused heads does not help here.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings, _ = PreTrainedConfig.get_config_dict(name)
    if settings_in(settings) is not None:
        return overt.load(name)
    wanted = (settings.get("architectures") or [""])[0]
    return getattr(transformers, wanted, AutoModel).from_pretrained(name).eval()


def is_picture(text: str) -> bool:
    """Whether a text is the path of a picture, by its ending."""
    named = Path(text).suffix.lower() in PICTURES
    return named and (" " not in text or Path(text).is_file())


def read_input(text: str) -> Any:
    """The text itself, or the picture whose path it is."""
    if not is_picture(text):
        return text
    if not Path(text).is_file():
        raise FileNotFoundError(f"there is no picture {text}")
    need("PIL", "view")
    from PIL import Image

    return Image.open(text)
