"""A user's inputs, as arguments of the model and as tokens to show with its maps."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from overt._modes import device_of
from overt.attaching.find import name_of
from overt.models.seq2seq import Seq2Seq
from overt.models.word_by_word import IGNORED

if TYPE_CHECKING:
    from overt.tracing.generation import Generation

LABELS = ("labels", "start_positions", "end_positions", "return_loss")
NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
GENERATED = 64  # tokens at most, where an encoder–decoder generates the target


@dataclass(eq=False)
class Inputs:
    """One batch for a model.

    Attributes:
        arguments: those of its forward.
        tokens: names per example, along the token axis; source, then target in an encoder–decoder.
        special: boolean (batch, token), which tokens are special; None if unknown.
        offsets: (batch, token, 2), where in the text each token begins and ends; None if unknown.
        mask: boolean (batch, token), False at padding; None where it follows from the maps.
        grid: rows and columns of an image's patches.
        image: height and width in pixels.
        labels: the labels among the inputs.
        unknown: id of the token that replaces a blanked-out one.
        tokenizer: the tokenizer of the model's text, if known; the target's in an encoder–decoder.
        processor: the image processor that made the pixel values.
        picture: the images as colours, uint8 (batch, height, width, 3), where they are known already.
    """

    arguments: dict[str, Any]
    tokens: list[list[str]] | None = None
    special: Tensor | None = None
    offsets: Tensor | None = None
    mask: Tensor | None = None
    grid: tuple[int, int] | None = None
    image: tuple[int, int] | None = None
    labels: Tensor | None = None
    unknown: int | None = None
    tokenizer: Any = None
    processor: Any = None
    picture: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_device_of(self, model: nn.Module) -> None:
        """Move the arguments to the model's device."""
        device = device_of(model)
        self.arguments = {
            name: value.to(device) if isinstance(value, Tensor) else value
            for name, value in self.arguments.items()
        }

    @property
    def tokens_shape(self) -> tuple[int, int]:
        """Number of examples and of token ids in each."""
        batch, count = self.arguments["input_ids"].shape
        return batch, count


def prepare(
    model: nn.Module,
    inputs: Any,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    decoder: Any = None,
    tokens: Sequence[Sequence[str]] | None = None,
    generation: Generation | None = None,
) -> Inputs:
    """Text, token ids, images or a mapping of arguments, as a batch for the model, on its device.

    With `generation`, an encoder–decoder writes the target, and a chat ends where the model's reply begins;
    what a causal model writes is added by `continuing.continued`.
    """
    batch = _batch_of(model, inputs, tokenizer, processor, generation is not None)
    if not isinstance(inputs, Mapping):
        _name_ids(model, batch)
        _check_names(model, batch)
    if decoder is not None and not is_pair(model):
        name = type(model).__name__
        raise ValueError(f"decoder is for encoder–decoder models, and {name} is not one: leave it out")
    _check_length(model, batch.arguments)
    if is_pair(model):
        _add_target(model, batch, decoder, tokenizer, generation)
    if tokens is not None:
        if any(isinstance(words, str) for words in tokens):
            raise ValueError("tokens must be a list of words for each example, got a flat list")
        batch.tokens = [list(map(str, words)) for words in tokens]
        batch.extra["named"] = True
    batch.to_device_of(model)
    accepted = inspect.signature(model.forward).parameters
    if "use_cache" in accepted and "use_cache" not in batch.arguments and _config(model) is not None:
        batch.arguments["use_cache"] = False
    needed = [p.name for p in accepted.values() if p.default is p.empty and p.kind in NAMED]
    if missing := [
        name for name in needed if name not in batch.arguments and not isinstance(inputs, Mapping)
    ]:
        raise ValueError(
            f"{name_of(model)} needs {', '.join(missing)} as well: give a mapping of its arguments, "
            f"{{{', '.join(f'{name!r}: …' for name in needed)}}}"
        )
    return batch


def _batch_of(model: nn.Module, inputs: Any, tokenizer: Any, processor: Any, reply: bool) -> Inputs:
    from overt.tracing.chat import chats_in  # on first use

    if (chats := chats_in(inputs)) is not None:
        return _from_chats(model, chats, tokenizer, reply)
    if isinstance(inputs, str) or (_is_list(inputs) and inputs and isinstance(inputs[0], str)):
        return _from_text(model, [inputs] if isinstance(inputs, str) else list(inputs), tokenizer)
    if isinstance(inputs, Mapping):
        return _from_mapping(model, dict(inputs), tokenizer)
    if is_picture(inputs) or (_is_list(inputs) and inputs and is_picture(inputs[0])):
        return _from_pictures(model, [inputs] if is_picture(inputs) else list(inputs), processor)
    if isinstance(inputs, np.ndarray):
        inputs = torch.from_numpy(inputs)
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        return _from_floats(model, inputs)
    if _is_list(inputs) and inputs and all(_is_list(row) and row for row in inputs):
        return _from_rows(model, inputs, tokenizer)
    ids = inputs if isinstance(inputs, Tensor) else _ids(inputs)
    if ids is None or ids.dim() not in (1, 2) or ids.numel() == 0:
        raise ValueError(
            "inputs must be text, token ids, images or a mapping of the model's arguments, "
            f"got {_describe(inputs)}"
        )
    return _from_mapping(model, {"input_ids": ids if ids.dim() == 2 else ids.unsqueeze(0)}, tokenizer)


def _name_ids(model: nn.Module, batch: Inputs) -> None:
    """Give token ids the name of a forward's first argument, where it has no `input_ids`."""
    arguments = batch.arguments
    parameters = inspect.signature(model.forward).parameters
    first = next(iter(parameters.values()), None)
    named = first is not None and first.kind in NAMED and first.default is first.empty
    if first is None or not named or "input_ids" not in arguments or "input_ids" in parameters:
        return
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and "attention_mask" not in parameters and bool(mask.all()):
        arguments = {name: value for name, value in arguments.items() if name != "attention_mask"}
    batch.extra["ids"] = first.name
    batch.arguments = {first.name if n == "input_ids" else n: value for n, value in arguments.items()}


def _check_names(model: nn.Module, batch: Inputs) -> None:
    """Refuse inputs that a forward has no argument for."""
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    unknown = [name for name in batch.arguments if name not in parameters]
    named = ", ".join("*" * (each.kind is each.VAR_POSITIONAL) + each.name for each in parameters.values())
    takes = f"its forward takes {named or 'nothing'}"
    if unknown == ["attention_mask"]:
        what = "no attention_mask to hide padding"
        raise ValueError(f"{name_of(model)} has {what} ({takes}): give texts of one length")
    if unknown:
        raise ValueError(
            f"{name_of(model)} has no argument {unknown[0]} ({takes}): give a mapping of its arguments, or a "
            "module that names them"
        )


def _from_rows(model: nn.Module, rows: Any, tokenizer: Any) -> Inputs:
    """Lists of token ids, padded on the right where their lengths differ."""
    if not all(isinstance(number, int) for row in rows for number in row):
        raise ValueError(f"inputs must be lists of whole numbers, got {rows!r}"[:120])
    longest = max(map(len, rows))
    pad = getattr(_config(model), "pad_token_id", None)
    arguments = {"input_ids": pad_rows(rows, longest, pad if isinstance(pad, int) else 0)}
    if min(map(len, rows)) < longest:
        arguments["attention_mask"] = pad_rows([[1] * len(row) for row in rows], longest, 0)
    return _from_mapping(model, arguments, tokenizer)


def check_ids(model: nn.Module, ids: Tensor, name: str = "input_ids") -> None:
    """Refuse token ids that the model has no embedding for."""
    table: Any = None
    if _config(model) is not None and hasattr(model, "get_input_embeddings"):
        try:
            table = model.get_input_embeddings()  # type: ignore[operator]
        except NotImplementedError:
            return
    count = getattr(table, "num_embeddings", None)
    if isinstance(table, nn.Embedding) and count is not None and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= count:
            raise ValueError(f"{name} must lie in 0 to {count - 1}, got {low if low < 0 else high}")


def _check_length(model: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse ids outside the vocabulary, and more tokens than the model has learnt positions for."""
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or _config(model) is None:
        return
    check_ids(model, ids)
    limit = positions_of(model)
    if limit is not None and ids.shape[1] > limit:
        raise ValueError(
            f"the input has {ids.shape[1]} tokens, but the model has positions for {limit}: shorten it"
        )


def positions_of(model: nn.Module) -> int | None:
    """How many positions a model has learnt embeddings for; None where positions are not learnt."""
    limit = getattr(_config(model), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or not ("position" in name or name.endswith("wpe")):
            continue
        offset = int(getattr(module, "offset", 0))  # BART's and OPT's have two rows more
        if isinstance(limit, int) and module.num_embeddings - offset == limit:
            # RoBERTa's positions begin after the one of padding.
            return limit if offset or module.padding_idx is None else limit - module.padding_idx - 1
    return None


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:80]


def _ids(value: Any) -> Tensor | None:
    """Nested lists of whole numbers as a tensor; None for anything else, such as lists of unequal lengths."""
    if not _is_list(value):
        return None
    try:
        ids = torch.tensor(value)
    except (ValueError, TypeError, RuntimeError):
        return None
    return ids if ids.numel() and not ids.is_floating_point() else None


def is_picture(value: Any) -> bool:
    """Whether it is a PIL image."""
    return type(value).__module__.startswith("PIL.")


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)


def is_pair(model: nn.Module) -> bool:
    """Whether a model is an encoder–decoder."""
    return isinstance(model, Seq2Seq) or bool(getattr(_config(model), "is_encoder_decoder", False))


def tokenizer_of(model: nn.Module, tokenizer: Any, required: bool = True) -> Any:
    """The given tokenizer, or the one saved with the model's weights."""
    if isinstance(model, Seq2Seq):
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
        size = model.source_words.num_embeddings
        if tokenizer is not None and len(tokenizer) != size:
            raise ValueError(
                f"the tokenizer has {len(tokenizer):,} ids, and {name_of(model)} {size:,} for the source: "
                "give none with a network of lstm_training.load, which brings its own"
            )
    if tokenizer is not None:
        return tokenizer
    source = getattr(_config(model), "_name_or_path", "")
    if source:
        try:
            return _load_tokenizer(source, required)
        except (OSError, ValueError, ImportError, KeyError) as error:
            if required:
                raise ValueError(
                    f"no tokenizer in {source} ({str(error).splitlines()[0][:80]}): give tokenizer=…"
                ) from None
            return None
    if required:
        raise ValueError(f"text for {name_of(model)} needs its tokenizer: give tokenizer=…, or token ids")
    return None


def _target_tokenizer(model: nn.Module, tokenizer: Any, required: bool = True) -> Any:
    """The tokenizer of the target, if it has ids of its own; otherwise that of the source."""
    tokenizer = tokenizer_of(model, tokenizer, required)
    return getattr(tokenizer, "target", tokenizer)


OF_TOKENIZERS = re.compile(r"tokenizer|vocab|merges|special_tokens|.*\.(model|spm|bpe|tiktoken|vocab)$")


@lru_cache(maxsize=4)
def _load_tokenizer(source: str, ask_the_hub: bool) -> Any:
    from transformers import AutoTokenizer

    # Without tokenizer files, transformers returns a tokenizer that knows next to no words.
    if os.path.isdir(source) and not any(OF_TOKENIZERS.match(name) for name in os.listdir(source)):
        raise OSError("the folder has no tokenizer files")
    return AutoTokenizer.from_pretrained(source, local_files_only=not ask_the_hub)


def _from_chats(model: nn.Module, chats: list[list[Any]], tokenizer: Any, reply: bool) -> Inputs:
    """Chats as the text that the tokenizer's template makes of them, with the tokens of each message."""
    from overt.tracing.chat import in_tokens, rendered

    tokenizer = tokenizer_of(model, tokenizer)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError("messages need a fast tokenizer, whose offsets tell them apart: give text")
    made = [rendered(tokenizer, messages, reply) for messages in chats]
    batch = _from_text(model, [text for text, _ in made], tokenizer, frame=False)
    assert batch.offsets is not None
    assert batch.mask is not None
    # The template has written the special tokens as text.
    batch.special = special_ids(tokenizer, batch.arguments["input_ids"])
    spans = [each[keep].tolist() for each, keep in zip(batch.offsets, batch.mask, strict=True)]
    batch.extra["turns"] = [in_tokens(turns, own) for (_, turns), own in zip(made, spans, strict=True)]
    return batch


def _from_text(model: nn.Module, texts: list[str], tokenizer: Any, frame: bool = True) -> Inputs:
    """Texts, with the special tokens around them unless `frame` is False."""
    tokenizer = tokenizer_of(model, tokenizer)
    offsets = bool(getattr(tokenizer, "is_fast", False))
    settings = {"return_special_tokens_mask": True, "return_offsets_mapping": offsets}
    coded = [tokenizer(text, add_special_tokens=frame, **settings) for text in texts]
    empty = [text for text, code in zip(texts, coded, strict=True) if all(code["special_tokens_mask"])]
    if not texts or empty:
        raise ValueError(f"inputs must hold text with at least one token, got {empty[:1]!r}")
    ids = [code["input_ids"] for code in coded]
    longest = max(map(len, ids))
    arguments = {"input_ids": pad_rows(ids, longest, padding_id(tokenizer, model))}
    arguments["attention_mask"] = pad_rows([[1] * len(row) for row in ids], longest, 0)
    kinds = [code.get("token_type_ids") for code in coded]
    if all(kind is not None for kind in kinds):
        arguments["token_type_ids"] = pad_rows(kinds, longest, 0)
    batch = Inputs(arguments, unknown=_unknown(tokenizer), tokenizer=tokenizer)
    batch.tokens = words_of(tokenizer, arguments["input_ids"])
    batch.mask = arguments["attention_mask"].bool()
    batch.special = pad_rows([code["special_tokens_mask"] for code in coded], longest, 1).bool()
    if offsets:
        spans = torch.zeros(len(ids), longest, 2, dtype=torch.int64)
        for number, code in enumerate(coded):
            spans[number, : len(code["offset_mapping"])] = torch.tensor(code["offset_mapping"])
        batch.offsets = spans
    batch.extra["texts"] = texts
    return batch


def pad_rows(rows: Sequence[Sequence[int]], length: int, filler: int) -> Tensor:
    """Rows of ids, filled up on the right, (row, length)."""
    return torch.tensor([[*row, *[filler] * (length - len(row))] for row in rows])


def padding_id(tokenizer: Any, model: nn.Module | None = None) -> int:
    """Id that fills up shorter texts.

    The model's own comes before its tokenizer's: causal classifiers, which read a text's last token, find it
    by comparing ids with the one in their config.
    """
    config = None if model is None else _config(model)
    own, count = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if isinstance(own, int) and isinstance(count, int) and 0 <= own < count:
        return own
    for name in ("pad_token_id", "eos_token_id", "unk_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            return value
    return 0


def _unknown(tokenizer: Any) -> int | None:
    """Id that replaces a blanked-out word: the first that exists of unknown, mask, padding and end."""
    for name in ("unk_token_id", "mask_token_id", "pad_token_id", "eos_token_id"):
        value = getattr(tokenizer, name, None)
        if isinstance(value, int):
            return value
    return None


def special_ids(tokenizer: Any, ids: Tensor) -> Tensor:
    """Which ids only delimit a text. An unknown or masked word counts as a word."""
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
    frame = {getattr(tokenizer, name, None) for name in names}
    words = {getattr(tokenizer, name, None) for name in ("unk_token_id", "mask_token_id")}
    special = ({*tokenizer.all_special_ids} - words) | frame
    return torch.tensor([[number in special for number in row] for row in ids.tolist()])


def words_of(tokenizer: Any, ids: Tensor) -> list[list[str]]:
    """Readable tokens: byte-level and sentence pieces are decoded, word pieces stay as they are."""
    out = []
    for row in ids.tolist():
        pieces = tokenizer.convert_ids_to_tokens(row)
        shown = []
        for number, piece in zip(row, pieces, strict=True):
            piece = str(piece).removesuffix("</w>") or str(piece)  # which ends a word in BPE
            if piece.startswith(("Ġ", "▁", "Ċ")) or not piece.isascii():
                piece = tokenizer.decode([number], clean_up_tokenization_spaces=False).strip() or piece
            shown.append(piece)
        out.append(shown)
    return out


def names_of(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """Id → token, without ids that the tokenizer lacks: a model's vocabulary may be padded."""
    inside = [number for number in ids if number < len(tokenizer)]
    pieces = tokenizer.convert_ids_to_tokens(inside)
    known = [number for number, piece in zip(inside, pieces, strict=True) if piece is not None]
    return dict(zip(known, words_of(tokenizer, torch.tensor([known]))[0], strict=True))


def _from_mapping(model: nn.Module, arguments: dict[str, Any], tokenizer: Any) -> Inputs:
    if not arguments:
        raise ValueError("inputs must hold the model's arguments, got an empty mapping")
    labels = arguments.get("labels")
    batch = Inputs({name: value for name, value in arguments.items() if name not in LABELS})
    batch.labels = labels if isinstance(labels, Tensor) else None
    own = _own_name(model, arguments)
    for name, value in batch.arguments.items():
        if isinstance(value, np.ndarray) or (_is_list(value) and name in (own, "attention_mask")):
            batch.arguments[name] = torch.as_tensor(value)
    ids, mask = batch.arguments.get(own), batch.arguments.get("attention_mask")
    if own != "input_ids":
        whole = isinstance(ids, Tensor) and ids.dim() == 2 and ids.dtype in (torch.int32, torch.int64)
        ids = ids if whole else None
        batch.extra |= {"ids": own} if whole else {}
    if isinstance(mask, Tensor) and mask.dim() == 2:
        batch.mask = mask.bool().cpu()
    pixels = batch.arguments.get("pixel_values")
    if isinstance(ids, Tensor):
        if ids.dim() != 2:
            raise ValueError(f"input_ids must have shape (batch, token), got {tuple(ids.shape)}")
        text_tokenizer = tokenizer_of(model, tokenizer, required=False)
        if text_tokenizer is not None:
            batch.tokens, batch.unknown = words_of(text_tokenizer, ids), _unknown(text_tokenizer)
            batch.tokenizer = text_tokenizer
            batch.special = special_ids(text_tokenizer, ids)
        else:
            batch.tokens = [[str(number) for number in row] for row in ids.tolist()]
    if isinstance(pixels, Tensor) and pixels.dim() == 4:
        _add_grid(model, batch, pixels)
    return batch


def _own_name(model: nn.Module, arguments: Mapping[str, Any]) -> str:
    """The model's own name of `input_ids`: that of its forward's first argument, where it has none."""
    parameters = inspect.signature(model.forward).parameters
    first = next(iter(parameters), None)
    if first is None or "input_ids" in parameters or "input_ids" in arguments or first not in arguments:
        return "input_ids"
    return first


def _from_floats(model: nn.Module, values: Tensor) -> Inputs:
    if "pixel_values" in inspect.signature(model.forward).parameters:
        if values.dim() not in (3, 4):
            raise ValueError(
                f"images must have shape (batch, channel, height, width), got {tuple(values.shape)}"
            )
        pixels = values if values.dim() == 4 else values.unsqueeze(0)
        batch = Inputs({"pixel_values": pixels})
        _add_grid(model, batch, pixels)
        return batch
    first = next(iter(inspect.signature(model.forward).parameters))
    return Inputs({first: values})


def _from_pictures(model: nn.Module, pictures: list[Any], processor: Any) -> Inputs:
    if processor is None:
        source = getattr(_config(model), "_name_or_path", "")
        try:
            from transformers import AutoImageProcessor

            processor = AutoImageProcessor.from_pretrained(source)  # type: ignore[no-untyped-call]
        except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
            raise ValueError(
                f"images for {name_of(model)} need its image processor ({str(error).splitlines()[0][:80]}): "
                "give processor=…, or pixel_values as a tensor"
            ) from None
    coded = processor(images=[picture.convert("RGB") for picture in pictures], return_tensors="pt")
    batch = _from_mapping(model, {"pixel_values": coded["pixel_values"]}, None)
    batch.processor = processor
    return batch


def picture_of(inputs: Inputs) -> Tensor | None:
    """Pixel values as colours, uint8 (batch, height, width, 3); None unless there are 1 or 3 channels.

    The processor's normalisation is undone if it is known; otherwise each image's values are stretched from
    its minimum to its maximum.
    """
    if inputs.picture is not None or "pixel_values" not in inputs.arguments:
        return inputs.picture
    pixels = inputs.arguments["pixel_values"].detach().to("cpu", torch.float32)
    if pixels.shape[1] not in (1, 3):
        return None
    shades = _undo_normalisation(inputs.processor, pixels)
    return colours(stretched(pixels) if shades is None else shades)


def stretched(pixels: Tensor) -> Tensor:
    """Images (batch, channel, height, width) whose values run from 0 to 255, each from its own minimum."""
    low, high = pixels.amin(dim=(1, 2, 3), keepdim=True), pixels.amax(dim=(1, 2, 3), keepdim=True)
    return (pixels - low) * (255 / torch.where(high == low, 1.0, high - low))


def colours(shades: Tensor) -> Tensor:
    """(batch, 1 or 3, height, width) from 0 to 255 as uint8 (batch, height, width, 3)."""
    rounded = shades.nan_to_num().round().clamp(0, 255).to(torch.uint8)
    return rounded.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous()


def _undo_normalisation(processor: Any, pixels: Tensor) -> Tensor | None:
    """Pixel values scaled back to 0 … 255 by the image processor's settings; None where those are missing."""
    processor = getattr(processor, "image_processor", processor)
    normalizes, rescales = (getattr(processor, f"do_{what}", None) for what in ("normalize", "rescale"))
    if normalizes is None or rescales is None:
        return None
    if normalizes:
        mean, std = (
            torch.as_tensor(getattr(processor, name, None) or (), dtype=torch.float32).view(-1, 1, 1)
            for name in ("image_mean", "image_std")
        )
        if not {len(mean), len(std)} <= {1, pixels.shape[1]}:
            return None
        pixels = pixels * std + mean
    return pixels / float(processor.rescale_factor) if rescales else pixels


def patch_of(model: nn.Module) -> tuple[int, int] | None:
    """Height and width of a vision model's patches, from its config."""
    config = _config(model)
    for source in (config, getattr(config, "vision_config", None), getattr(config, "encoder", None)):
        size = getattr(source, "patch_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2:
            return int(size[0]), int(size[1])
    return None


def _add_grid(model: nn.Module, batch: Inputs, pixels: Tensor) -> None:
    patch, config = patch_of(model), _config(model)
    batch.image = int(pixels.shape[-2]), int(pixels.shape[-1])
    # With tokens after the patches (YOLOS), or patches left out and shuffled (MAE), the grid is unknown.
    other = any(getattr(config, name, None) is not None for name in ("num_detection_tokens", "mask_ratio"))
    if patch is not None and not other:
        batch.grid = batch.image[0] // patch[0], batch.image[1] // patch[1]


def _add_target(
    model: Any, batch: Inputs, decoder: Any, tokenizer: Any, generation: Generation | None
) -> None:
    """Add the decoder's inputs: as given, or generated by the model."""
    arguments = batch.arguments
    known = "decoder_input_ids" in arguments or "decoder_inputs_embeds" in arguments
    if generation is not None and (known or decoder is not None):
        raise ValueError("generate writes the decoder's inputs, which were given as well: leave either out")
    if not known:
        arguments["decoder_input_ids"] = _target(model, batch, decoder, tokenizer, generation)
    elif decoder is not None:
        raise ValueError("decoder was given twice: as the argument decoder and as decoder_input_ids")
    ids = arguments.get("decoder_input_ids")
    mask = arguments.get("decoder_attention_mask")
    if not isinstance(ids, Tensor):
        return
    if isinstance(model, Seq2Seq):
        mask = _recurrent_mask(batch, ids, batch.labels if decoder is None else None)
    real = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask.bool().cpu()
    pad = _special_id(model, "pad_id", "pad_token_id")
    if generation is not None:
        # An end that was generated is no input, nor is what follows it in a batch.
        ended = torch.isin(ids[:, 1:].cpu(), torch.tensor(_ends(model, generation), dtype=ids.dtype))
        real[:, 1:] = ended.cumsum(dim=1) == 0
        count = int(real.any(dim=0).sum())
        if count < 2:
            raise ValueError(f"{name_of(model)} wrote nothing: the first token that it generated was an end")
        ids, real = ids[:, :count], real[:, :count]
        arguments["decoder_input_ids"] = ids
        batch.extra["generated"] = real & (torch.arange(count) > 0)
    elif mask is None and pad is not None and decoder is None and batch.extra.get("wrote"):
        # The first token may be the start token, which some models also use as padding.
        real[:, 1:] = ids[:, 1:].cpu() != pad
        # An end that was generated is no input: it is in the batch only because others are longer.
        real[:, 1:] &= ~torch.isin(ids[:, 1:].cpu(), torch.tensor(_ends(model), dtype=ids.dtype))
    batch.extra["target mask"] = real
    text_tokenizer = _target_tokenizer(model, tokenizer, required=False)
    if text_tokenizer is None:
        batch.extra["target tokens"] = [[str(number) for number in row] for row in ids.tolist()]
    else:
        batch.extra["target tokens"] = words_of(text_tokenizer, ids.cpu())
        batch.tokenizer = text_tokenizer
        batch.extra["target special"] = special_ids(text_tokenizer, ids.cpu())
        if generation is not None and batch.offsets is not None:
            _add_written(batch, text_tokenizer, ids, real)


def _add_written(batch: Inputs, tokenizer: Any, ids: Tensor, real: Tensor) -> None:
    """Add what was generated to the texts, each in a line of its own, and where its tokens are there."""
    from overt.tracing.generation import output_text

    offsets = torch.zeros(*ids.shape, 2, dtype=torch.int64)
    texts = []
    for number, source in enumerate(batch.extra["texts"]):
        start, *written = ids[number, real[number]].tolist()
        text, spans = output_text(tokenizer, start, written)
        offsets[number, 1 : len(spans) + 1] = torch.tensor(spans).view(-1, 2) + len(source) + 1
        texts.append(f"{source}\n{text}")
    batch.extra["texts"], batch.extra["target offsets"] = texts, offsets


def _special_id(model: Any, name: str, in_config: str) -> int | None:
    """A special token of the decoder's: an attribute of Overt's network, or in the config of others."""
    return getattr(model, name) if isinstance(model, Seq2Seq) else getattr(model.config, in_config, None)


def _ends(model: Any, generation: Generation | None = None) -> list[int]:
    """Ids that end what a model generates."""
    from overt.tracing.generation import ends_of

    return [model.eos_id] if isinstance(model, Seq2Seq) else ends_of(model, generation)


def _recurrent_mask(batch: Inputs, ids: Tensor, labels: Tensor | None) -> Tensor | None:
    """Which of a recurrent decoder's inputs are real, (batch, target); its forward takes no mask of them."""
    mask, name = batch.arguments.pop("decoder_attention_mask", None), "decoder_attention_mask"
    if mask is None and labels is not None:
        mask, name = labels != IGNORED, "labels"
    if mask is None:
        return None
    real = torch.as_tensor(mask) != 0
    if real.shape != ids.shape:
        raise ValueError(f"{name} must have shape {tuple(ids.shape)}, got {tuple(real.shape)}")
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ValueError(f"{name} must have its padding on the right")
    return real


def _target(model: Any, batch: Inputs, decoder: Any, tokenizer: Any, generation: Generation | None) -> Tensor:
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    limit = positions_of(model)
    if generation is not None:
        if limit is not None and generation.length >= limit:
            raise ValueError(
                f"generate must be at most {limit - 1}, as the model has positions for {limit} tokens of the "
                f"target and its start, got {generation.length}"
            )
        return _generated(model, batch, generation)
    if decoder is None and batch.labels is not None and batch.labels.dim() == 2 and shift is not None:
        batch.arguments["decoder_attention_mask"] = (batch.labels != -100).long()
        shifted: Tensor = shift(labels=batch.labels)
        return shifted
    if isinstance(decoder, str) or (_is_list(decoder) and decoder and isinstance(decoder[0], str)):
        texts = [decoder] if isinstance(decoder, str) else list(decoder)
        text_tokenizer = _target_tokenizer(model, tokenizer)
        start = _special_id(model, "bos_id", "decoder_start_token_id")
        start = text_tokenizer.bos_token_id if start is None else start
        rows = [[start, *text_tokenizer(text_target=text)["input_ids"]] for text in texts]
        rows = [row[:-1] if row[-1] == text_tokenizer.eos_token_id else row for row in rows]
        longest = max(map(len, rows))
        batch.arguments["decoder_attention_mask"] = pad_rows([[1] * len(row) for row in rows], longest, 0)
        return pad_rows(rows, longest, padding_id(text_tokenizer))
    if decoder is not None:
        ids = decoder if isinstance(decoder, Tensor) else _ids(decoder)
        if ids is None or ids.dim() not in (1, 2):
            raise ValueError(f"decoder must be text or token ids, got {_describe(decoder)}")
        return ids if ids.dim() == 2 else ids.unsqueeze(0)
    if not isinstance(model, Seq2Seq) and not hasattr(model, "generate"):
        raise ValueError(f"{name_of(model)} needs the decoder's inputs: give decoder=…, or decoder_input_ids")
    from overt.tracing.generation import LENGTH, Generation

    batch.extra["wrote"] = True
    most = GENERATED if limit is None else min(GENERATED, limit)  # the last of them is no input
    written = _generated(model, batch, Generation({LENGTH: most}))
    return written[:, :-1] if written.shape[1] > 1 else written


def _check_start(model: Any, ids: Tensor) -> None:
    """Refuse what was generated without the token that the decoder starts with, as Whisper returns it."""
    own: Any = getattr(model, "generation_config", None)
    names = "decoder_start_token_id", "bos_token_id"
    start = next((number for name in names if (number := getattr(own, name, None)) is not None), None)
    if start is not None and not torch.equal(
        ids[:, 0], torch.as_tensor(start, dtype=ids.dtype).expand(len(ids))
    ):
        raise ValueError(
            f"{name_of(model)} returns what it writes without the tokens that the target starts with: give "
            "them and what it wrote as decoder=…"
        )


def _generated(model: Any, batch: Inputs, generation: Generation) -> Tensor:
    """What an encoder–decoder writes, after the token that it starts with, (batch, target)."""
    from overt.tracing.generation import generated_ids

    if not isinstance(model, Seq2Seq):
        written = generated_ids(model, batch.arguments, generation, batch.tokenizer)
        _check_start(model, written)
        return written
    if generation.chooses:
        raise ValueError(f"{name_of(model)} generates greedily: give generate={generation.length}")
    device = next(model.parameters()).device
    named = ("input_ids", "attention_mask")
    ids, mask = (None if (x := batch.arguments.get(name)) is None else x.to(device) for name in named)
    if ids is None:
        raise ValueError(f"{name_of(model)} needs input_ids, got {', '.join(batch.arguments)}")
    words, _ = model.translate(ids, mask, beam=1, max_length=generation.length)
    return torch.nn.functional.pad(words, (1, 0), value=model.bos_id).cpu()
