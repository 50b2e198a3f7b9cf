"""Inputs of several commands: a model by its folder or name, and a text or the path of a picture."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer
from safetensors import SafetensorError

from overt import vision
from overt._extras import need
from overt.attaching.loading import open_saved
from overt.cli.shared import join_or
from overt.data.pictures import opened
from overt.models.att2in import MODEL_TYPE as CAPTIONS
from overt.models.folders import CONFIG
from overt.models.image_encoder import MODEL_TYPE as ENCODER
from overt.models.mcan import MODEL_TYPE as QUESTIONS
from overt.models.resnet import MODEL_TYPE as VISION
from overt.models.seq2seq import MODEL_TYPE
from overt.recipes import lstm_training
from overt.recipes._runs import check_model, read_model_config
from overt.tracing.mixing.mixing import mixings
from overt.tracing.pixels import attends_to_pixels

# Networks with a command of their own: what they are, and the command.
OWN_COMMANDS = {
    CAPTIONS: ("a captioning network", "overt caption photo.jpg"),
    QUESTIONS: ("a network that answers questions", 'overt ask photo.jpg "QUESTION"'),
}
TEXTS = ".txt"  # a long text is easier to give as a file
PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif"}

# Options that the tracing commands share.
DecoderOption = Annotated[
    str | None,
    typer.Option(help="Text for the decoder of an encoder–decoder model. Default: the model generates it."),
]
MixingOption = Annotated[
    str, typer.Option(help=f"Weights of the attention graph's edges: {join_or(mixings())}.")
]
QueryOption = Annotated[
    int | None,
    typer.Option(
        help="Position of the query token. Default: CLS, the last token of a causal model, the middle pixel."
    ),
]
StackOption = Annotated[
    str | None,
    typer.Option(
        help="Stack to trace, of a model that has several. Those of a vision network are the sizes of its "
        "maps, such as 14x14."
    ),
]


def kind_of_folder(name: str) -> str | None:
    """The type of the model in a folder; None for a name on the hub."""
    check_model(name)
    return read_model_config(name).get("model_type") if Path(name).is_dir() else None


def own_command(name: str) -> tuple[str, str] | None:
    """What a network with a command of its own is, and the command that opens it; None for other models.

    Such networks are in folders: the hub is not asked.
    """
    kind = kind_of_folder(name)
    if kind == ENCODER:
        raise ValueError(f"--model {name} is an image encoder, which has no attention")
    if kind not in OWN_COMMANDS:
        return None
    what, command = OWN_COMMANDS[kind]
    return what, f"{command} --model {name}"


def check_kind(name: str | Path, kind: str) -> None:
    """Refuse a folder that does not hold a network of this kind, and say what would open it.

    Args:
        name: of the folder.
        kind: of the networks that the command opens, one of `OWN_COMMANDS`.
    """
    what, _ = OWN_COMMANDS[kind]
    if not (Path(name) / CONFIG).is_file():
        inside = Path(name) / "model"  # of the folder of a run
        own = (inside / CONFIG).is_file() and read_model_config(str(inside)).get("model_type") == kind
        hint = f": {inside} is one" if own else ""
        raise FileNotFoundError(f"--model {name} must be the folder of {what}, with {CONFIG}{hint}")
    if kind_of_folder(str(name)) != kind:
        other = own_command(str(name))
        found = f"it holds {other[0]}: {other[1]}" if other else "it holds another model"
        raise ValueError(f"--model {name} must be the folder of {what}, but {found}")


def open_model(name: str) -> Any:
    """Load a model of the class that its config names, with its mechanisms."""
    from transformers.utils import logging

    # Its messages about unused heads are irrelevant here.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings = read_model_config(name)
    if (own := own_command(name)) is not None:
        raise ValueError(f"--model {name} is {own[0]}, which {own[1]} opens")
    try:
        if settings.get("model_type") == MODEL_TYPE:
            return lstm_training.load(Path(name))
        if settings.get("model_type") == VISION:
            return vision.load(name)
        return open_saved(name, settings)
    except SafetensorError as error:
        raise OSError(f"--model {name}: its weights cannot be read ({error}); are they complete?") from None
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"--model {name}: its weights do not fit its config.json, which gives other sizes"
        ) from None


def prompt_with_picture(name: str, model: Any, text: str, image: Path) -> tuple[dict[str, Any], Any]:
    """A picture and a text after it, as arguments of a language model that sees pictures; and its tokenizer.

    The processor that was saved with the model makes them: by its chat template, if it has one, as a message
    of the user; otherwise the text follows the sign of a picture, unless it has one already.

    Args:
        name: the model's folder, or its name on the hub.
        model: the model.
        text: the prompt.
        image: path of the picture.
    """
    from transformers import AutoProcessor

    photo = opened(image, str(image))
    try:
        processor: Any = AutoProcessor.from_pretrained(name)  # type: ignore[no-untyped-call]
        sign = processor.image_token
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise ValueError(
            f"--image needs the processor of {name}, which does not load ({line}): make the inputs in "
            "Python, overt.trace(model, inputs, generate=…)"
        ) from None
    if getattr(processor, "chat_template", None):
        content = [{"type": "image"}, {"type": "text", "text": text}]
        text = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
    elif sign not in text:
        text = f"{sign}\n{text}"
    if text.count(sign) != 1:
        raise ValueError(f"the prompt must have one {sign}, for --image {image}, got {text.count(sign)}")
    coded = dict(processor(text=[text], images=[photo], return_tensors="pt"))
    known = inspect.signature(model.forward).parameters
    return {key: value for key, value in coded.items() if key in known}, processor.tokenizer


def names_picture(text: str) -> bool:
    """Whether a text is the path of a picture, judged by its suffix."""
    has_suffix = Path(text).suffix.lower() in PICTURES
    return has_suffix and (" " not in text or Path(text).is_file())


def read_input(text: str, model: Any = None) -> Any:
    """The text itself, or the text or picture at that path; a network over pixels reads it itself."""
    if model is not None and attends_to_pixels(model):
        return text
    if text.lower().endswith(TEXTS) and " " not in text:
        if not Path(text).is_file():
            raise FileNotFoundError(f"text {text} does not exist")
        try:
            return Path(text).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"text {text} is not in UTF-8") from None
    if not names_picture(text):
        return text
    if not Path(text).is_file():
        raise FileNotFoundError(f"picture {text} does not exist")
    need("PIL", "view")
    from PIL import Image

    with Image.open(text) as picture:
        picture.load()  # and the file is closed
        return picture
