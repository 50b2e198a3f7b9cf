"""Inputs that fit a model: found from the signature of its forward, and from its errors."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from zoo.settings import (
    BATCH,
    BOS,
    EOS,
    FIRST_WORD,
    LAST_WORD,
    LENGTH,
    PAD,
    PATCH,
    SHORT,
    SHORT_TARGET,
    SIDE,
    TARGET,
    WIDTH,
)


@dataclass
class Recipe:
    """Inputs that a model takes: tensors beside the text, and how the text is laid out.

    Attributes:
        name: "text", "text and image" and so on.
        extras: tensors beside the text, by argument.
        spans: placeholders at the head of every text: token id → how many.
        text: whether there are `input_ids`.
        target: whether there are `decoder_input_ids`.
        masked: argument that says what is padding, "" where the model takes none.
        sound: argument that is a sound, "" where none is, or where there is text beside it.
        length: words of a full text.
    """

    name: str
    extras: dict[str, Any] = field(default_factory=dict)
    spans: dict[int, int] = field(default_factory=dict)
    text: bool = True
    target: bool = False
    masked: str = "attention_mask"
    sound: str = ""
    length: int = LENGTH

    def total(self) -> int:
        """Tokens of a full text."""
        return sum(self.spans.values()) + self.length

    def lengths(self, padded: bool) -> list[int]:
        short = self.total() - self.length + SHORT
        return [self.total(), short if padded else self.total()]


def words(rows: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, LAST_WORD, (rows, length), generator=generator)


def real_of(lengths: list[int], total: int, left: bool) -> Tensor:
    """True where a token is real, (batch, token)."""
    position = torch.arange(total).expand(len(lengths), -1)
    length = torch.tensor(lengths).view(-1, 1)
    return (position >= total - length) if left else (position < length)


def laid_out(ids: Tensor, lengths: list[int], left: bool) -> Tensor:
    """Texts of these lengths out of full ones, the rest padding."""
    out = torch.full_like(ids, PAD)
    for row, length in enumerate(lengths):
        start = ids.shape[1] - length if left else 0
        out[row, start : start + length] = ids[row, :length]
    return out


def batch_of(model: Any, recipe: Recipe, padding: str = "", seed: int = 0) -> dict[str, Any]:
    """Inputs of two examples; `padding` "left" or "right" cuts the second short."""
    names = arguments(model)
    left, padded = padding == "left", bool(padding)
    out: dict[str, Any] = {}
    for name, value in recipe.extras.items():
        out[name] = value.clone() if isinstance(value, Tensor) else value
    if recipe.text:
        head = [token for token, count in recipe.spans.items() for _ in range(count)]
        ids = words(BATCH, recipe.total(), seed)
        if head:
            ids[:, 1 : 1 + len(head)] = torch.tensor(head)
        ids[:, 0] = BOS
        lengths = recipe.lengths(padded)
        real = real_of(lengths, recipe.total(), left)
        ids = laid_out(ids, lengths, left)
        if model.config.model_type in ENDS:
            for row in range(BATCH):
                ids[row, int(real[row].nonzero().max())] = EOS
        out["input_ids"] = ids
        if recipe.masked == "attention_mask":
            out["attention_mask"] = real.long()
        placeholders = torch.zeros_like(ids)
        for token, number in ((98, 1), (97, 2), (96, 3)):
            placeholders[ids == token] = number
        for name in ("mm_token_type_ids",):
            if name in names and recipe.spans:
                out[name] = placeholders
        if "token_type_ids" in names and model.config.model_type in NEEDS_TOKEN_TYPES:
            out["token_type_ids"] = (placeholders > 0).long()
        if "bbox" in names:
            box = torch.arange(recipe.total()).view(1, -1, 1) * torch.tensor([3, 2, 3, 2]) + torch.tensor(
                [1, 2, 9, 8]
            )
            out["bbox"] = box.expand(BATCH, -1, -1).clone()
            if model.config.model_type == "bros":
                out["bbox"] = out["bbox"] / 100.0
    elif recipe.sound and recipe.masked:
        sound = out[recipe.sound]
        axis = sound_axis(sound)
        total = sound.shape[axis]
        real = real_of([total, total // 2 if padded else total], total, left)
        shape = [BATCH] + [1] * (sound.dim() - 1)
        shape[axis] = total
        out[recipe.sound] = sound * real.view(shape)
        out[recipe.masked] = real.long()
    if recipe.target:
        lengths = [TARGET, SHORT_TARGET if padded else TARGET]
        real = real_of(lengths, TARGET, left)
        target = words(BATCH, TARGET, seed + 3)
        target[:, 0] = BOS
        out["decoder_input_ids"] = laid_out(target, lengths, left)
        if "decoder_attention_mask" in names:
            out["decoder_attention_mask"] = real.long()
    return out


def sound_axis(sound: Tensor) -> int:
    """The axis of time."""
    return max(range(1, sound.dim()), key=lambda axis: sound.shape[axis])


def arguments(model: Any) -> set[str]:
    """Names of the arguments that the model's forward takes."""
    return set(inspect.signature(type(model).forward).parameters)


def setting(config: Any, *names: str, default: Any = None) -> Any:
    """A field of a config or of its sub-configs, the first that is there."""
    subs = [getattr(config, name, None) for name in getattr(config, "sub_configs", {}) or {}]
    for one in [config, *[sub for sub in subs if sub is not None]]:
        for name in names:
            value = getattr(one, name, None)
            if value is not None:
                return value
    return default


def number(value: Any) -> int:
    return int(value[0] if isinstance(value, tuple | list) else value)


def noise(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pictures(model: Any) -> Iterator[dict[str, Any]]:
    """Shapes in which families take images, those of the signature first."""
    names, config = arguments(model), model.config
    vision = next(
        (
            sub
            for name in (
                "vision_config",
                "image_config",
                "vision_encoder_config",
                "encoder",
                "backbone_config",
            )
            if (sub := getattr(config, name, None)) is not None
        ),
        config,
    )
    usual = SIDE if getattr(config, "backbone_config", None) is None else 4 * SIDE  # strides of backbones
    side = number(setting(vision, "image_size", "img_size", "crop_size", default=usual))
    patch = number(setting(vision, "patch_size", default=PATCH))
    channels = number(setting(vision, "num_channels", "in_channels", "in_chans", default=3))
    channels = channels if channels < 16 else 3
    frames = number(setting(vision, "num_frames", "frames_per_clip", "temporal_patch_size", default=2))
    merge = number(setting(vision, "spatial_merge_size", "merge_size", default=1))
    grid = (side // patch) // merge * merge or merge
    spatial = torch.tensor([[grid, grid]] * BATCH)
    flat = noise(BATCH, grid * grid, channels * patch * patch)
    if "image_grid_thw" in names or "grid_thw" in names:
        thick = number(setting(vision, "temporal_patch_size", "patch_temporal", default=1))
        name = "image_grid_thw" if "image_grid_thw" in names else "grid_thw"
        pixels = noise(BATCH * grid * grid, channels * thick * patch * patch)
        where = "pixel_values" if "pixel_values" in names else "hidden_states"
        yield {where: pixels, name: torch.tensor([[1, grid, grid]] * BATCH)}
        sizes = {name: torch.tensor([[1, grid, grid]] * BATCH)}
        for more in ("merge_sizes", "image_merge_sizes"):
            if more in names:
                yield {where: pixels, **sizes, more: torch.tensor([merge] * BATCH)}
        yield {where: pixels.view(-1, channels, patch, patch), **sizes}
        yield {where: pixels.view(1, -1, channels, patch, patch), **sizes}
    if "image_grid_hws" in names:
        yield {"pixel_values": flat.view(-1, channels, patch, patch), "image_grid_hws": spatial}
    if "flattened_patches" in names:
        rows = torch.arange(grid * grid)
        places = torch.stack([rows // grid + 1, rows % grid + 1], -1).float().expand(BATCH, -1, -1)
        yield {"flattened_patches": torch.cat([places, flat], -1)}
    if "pixel_values_videos" in names and "pixel_values" not in names:
        yield {"pixel_values_videos": noise(BATCH, frames, channels, side, side)}
    if "spatial_shapes" in names:
        seen = torch.ones(BATCH, grid * grid, dtype=torch.long)
        yield {"pixel_values": flat, "pixel_attention_mask": seen, "spatial_shapes": spatial}
        yield {"pixel_values": flat, "spatial_shapes": spatial}
    if "pixel_position_ids" in names or "image_position_ids" in names:
        rows = torch.arange(grid * grid)
        places = torch.stack([rows % grid, rows // grid], -1).expand(BATCH, -1, -1)
        name = "pixel_position_ids" if "pixel_position_ids" in names else "image_position_ids"
        yield {"pixel_values": flat, name: places}
    if "aspect_ratio_ids" in names:
        tiles = number(setting(vision, "max_num_tiles", default=4))
        yield {
            "pixel_values": noise(BATCH, 1, tiles, channels, side, side),
            "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(BATCH, 1, tiles, dtype=torch.long),
        }
    if "pixel_values" in names:
        plain = {"pixel_values": noise(BATCH, channels, side, side)}
        sizes = {"image_sizes": torch.tensor([[side, side]] * BATCH)}
        if "image_sizes" in names:
            yield {"pixel_values": noise(BATCH, 3, channels, side, side), **sizes}
            yield {**plain, **sizes}
        yield plain
        yield {"pixel_values": noise(BATCH, frames, channels, side, side)}
        yield {"pixel_values": noise(BATCH, 1, channels, side, side)}
        yield {"pixel_values": flat}
        yield {"pixel_values": noise(BATCH, channels, 2 * side, 2 * side)}
        yield {"pixel_values": noise(BATCH, channels, 64, 64)}
        yield {"pixel_values": noise(BATCH, channels, 224, 224)}


def sounds(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Shapes in which families take sound: argument and tensor."""
    names, config = arguments(model), model.config
    audio = next(
        (
            sub
            for name in ("audio_config", "encoder_config", "audio_encoder_config", "encoder", "audio_encoder")
            if (sub := getattr(config, name, None)) is not None
        ),
        config,
    )
    bins = number(
        setting(
            audio,
            "num_mel_bins",
            "feature_projection_input_dim",
            "input_feat_per_channel",
            "input_feat_size",
            "feature_size",
            "input_dim",
            "n_mels",
            default=8,
        )
    )
    places = setting(audio, "max_source_positions", default=20)
    frames = 2 * number(places if isinstance(places, int) else 20)
    for name in ("input_features", "audio_features", "input_values", "audio_values", "audio_mel"):
        if name not in names:
            continue
        waves = [noise(BATCH, 400), noise(BATCH, 1, 11520), noise(BATCH, 3000)]
        spectra = [noise(BATCH, bins, frames), noise(BATCH, frames, bins), noise(BATCH, 1, frames, bins)]
        order = waves + spectra if name in ("input_values", "audio_values") else spectra + waves
        for tensor in order:
            yield name, tensor


def recipes(model: Any) -> Iterator[Recipe]:
    """Inputs to try, those with most in them first."""
    names, config = arguments(model), model.config
    special = SPECIAL.get(config.model_type)
    if special is not None:
        yield special(model)
    target = "decoder_input_ids" in names
    mask = "attention_mask" if "attention_mask" in names else ""
    heard = next((name for name in SOUND_MASKS if name in names), "")
    tokens = {
        "image": setting(config, "image_token_id", "image_token_index"),
        "audio": setting(config, "audio_token_id", "audio_token_index"),
    }
    text = "input_ids" in names
    main = getattr(type(model), "main_input_name", "input_ids")
    if text:
        for extras in pictures(model):
            token = tokens["image"]
            for spans in ({token: 4}, {}) if isinstance(token, int) else ({},):
                yield Recipe("text and image", extras, spans, masked=mask, target=target)
        for name, tensor in sounds(model):
            token = tokens["audio"]
            for spans in ({token: 4}, {}) if isinstance(token, int) else ({},):
                yield Recipe("text and sound", {name: tensor}, spans, masked=mask, target=target)
        alone = "text alone, of more that it takes" if names & BESIDE_TEXT else "text"
        yield Recipe(alone, masked=mask, target=target)
        yield Recipe(alone, masked=mask, target=target, length=16)
    for extras in pictures(model):
        yield Recipe("image", extras, text=False, target=target, masked="")
    for name, tensor in sounds(model):
        for masked in dict.fromkeys((heard, "")):
            yield Recipe("sound", {name: tensor}, text=False, target=target, masked=masked, sound=name)
    if main == "past_values" or "past_values" in names:
        long = number(setting(config, "context_length", default=16))
        channels = number(setting(config, "num_input_channels", default=1))
        for shape in ((BATCH, long, channels), (BATCH, long)):
            yield Recipe("series", {"past_values": noise(*shape)}, text=False, masked="")


BESIDE_TEXT = {"pixel_values", "input_features", "input_values", "flattened_patches", "pixel_values_videos"}
SOUND_MASKS = ("attention_mask", "input_features_mask", "padding_mask", "audio_mel_mask", "audio_mask")


def fitting(model: Any) -> Recipe:
    """The first recipe with which the model runs; counts of placeholders are taken from its errors."""
    first: Exception | None = None
    for recipe in recipes(model):
        tried: set[int] = set()
        for _ in range(4):
            try:
                run(model, batch_of(model, recipe))
            except Exception as error:
                first = first or error
                more = _count_wanted(error, recipe)
                if more is None or more in tried:
                    break
                tried.add(more)
                token = next(iter(recipe.spans))
                recipe = dataclasses.replace(recipe, spans={token: more})
            else:
                return recipe
    raise first or ValueError("there is no recipe for its inputs")


def _count_wanted(error: Exception, recipe: Recipe) -> int | None:
    """How many placeholders per text a family asked for, by its error."""
    match = re.search(r"tokens\D*?(\d+).*?features\D*?(\d+)", str(error), re.S)
    if not recipe.spans or match is None:
        return None
    have, want = int(match[1]), int(match[2])
    for divisor in (BATCH, 1, BATCH * WIDTH):
        if want % divisor == 0 and 0 < want // divisor < 200 and want // divisor * BATCH != have:
            return want // divisor
    return None


def run(model: Any, inputs: dict[str, Any]) -> Any:
    """A forward pass with the same random numbers every time."""
    torch.manual_seed(5)
    with torch.no_grad():
        return model(**inputs)


def outputs_of(output: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of an output, by name, caches and losses left out."""
    found: dict[str, Tensor] = {}
    if isinstance(output, Tensor):
        output = {"output": output}
    items = output.items() if hasattr(output, "items") else enumerate(output)
    for name, value in items:
        if any(part in str(name) for part in ("past_key", "cache", "loss", "attentions", "states_list")):
            continue
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found[f"{prefix}{name}"] = value.detach()
        elif isinstance(value, transformers.utils.ModelOutput):
            found.update(outputs_of(value, f"{prefix}{name}."))
        elif isinstance(value, tuple | list) and value and all(isinstance(v, Tensor) for v in value):
            found.update(outputs_of(dict(enumerate(value)), f"{prefix}{name}."))
    return found


def _series(model: Any) -> Recipe:
    """Past and future of a probabilistic forecaster."""
    config = model.config
    past, future = config.context_length + max(config.lags_sequence), config.prediction_length
    extras = {
        "past_values": noise(BATCH, past).abs(),
        "past_time_features": noise(BATCH, past, config.num_time_features),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": noise(BATCH, future).abs(),
        "future_time_features": noise(BATCH, future, config.num_time_features),
    }
    return Recipe("series", extras, text=False, masked="")


def _queries(_: Any) -> Recipe:
    extras = {"query_embeds": noise(BATCH, 4, WIDTH), "encoder_hidden_states": noise(BATCH, 5, WIDTH, seed=8)}
    return Recipe("queries", extras, text=False, masked="")


def _instructed(model: Any) -> Recipe:
    frames = () if model.config.model_type == "instructblip" else (2,)
    extras = {
        "pixel_values": noise(BATCH, *frames, 3, SIDE, SIDE),
        "qformer_input_ids": words(BATCH, 5, 9),
        "qformer_attention_mask": torch.ones(BATCH, 5, dtype=torch.long),
    }
    token = setting(model.config, "image_token_index", "video_token_index", default=98)
    return Recipe("text and image", extras, {token: 4 * (frames or (1,))[0]})


def _codebooks(model: Any) -> Recipe:
    """Text, and codes of a sound: (batch · codebooks, frames)."""
    books = model.decoder.num_codebooks
    return Recipe("text", {"decoder_input_ids": words(BATCH * books, TARGET, 3) % 30})


def _trajectory(model: Any) -> Recipe:
    config = model.config
    extras = {
        "states": noise(BATCH, 5, config.state_dim),
        "actions": noise(BATCH, 5, config.act_dim, seed=8),
        "rewards": noise(BATCH, 5, 1, seed=9),
        "returns_to_go": noise(BATCH, 5, 1, seed=10),
        "timesteps": torch.arange(5).expand(BATCH, -1),
        "attention_mask": torch.ones(BATCH, 5),
    }
    return Recipe("trajectory", extras, text=False, masked="")


def _grounded(model: Any) -> Recipe:
    """Images whose places in the text are told by a mask."""
    count = model.config.latent_query_num
    where = torch.zeros(BATCH, count + LENGTH, dtype=torch.long)
    where[:, 1 : 1 + count] = 1
    vision = model.config.vision_config
    extras = {"pixel_values": noise(BATCH, 3, vision.image_size, vision.image_size)}
    return Recipe("text and image", {**extras, "image_embeds_position_mask": where}, length=count + LENGTH)


def _prompted(model: Any) -> Recipe:
    high, wide = model.config.image_size
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    extras = {name: noise(BATCH, 3, high // 2, wide, seed=seed) for seed, name in enumerate(names)}
    return Recipe("image", extras, text=False, masked="")


def _regions(model: Any) -> Recipe:
    """Text, and features of regions of an image with their boxes."""
    extras = {
        "visual_feats": noise(BATCH, 5, model.config.visual_feat_dim),
        "visual_pos": noise(BATCH, 5, model.config.visual_pos_dim, seed=8).sigmoid(),
    }
    return Recipe("text and image", extras)


def _crossed(model: Any) -> Recipe:
    """Images that every token of the text may see."""
    side = model.config.vision_config.image_size
    extras = {
        "pixel_values": noise(BATCH, 1, 3, side, side),
        "image_attention_mask": torch.ones(BATCH, LENGTH, 1, dtype=torch.long),
    }
    return Recipe("text and image", extras)


def _channels(model: Any) -> Recipe:
    """Text, and codes of a sound: (batch, frames, channels)."""
    count = model.config.decoder_config.num_channels
    codes = words(BATCH * count, TARGET, 3).view(BATCH, count, TARGET).transpose(1, 2).contiguous()
    return Recipe("text", {"decoder_input_ids": codes})


# Families whose inputs none of the recipes above describes.
SPECIAL: dict[str, Any] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), _series),
    **dict.fromkeys(("instructblip", "instructblipvideo"), _instructed),
    **dict.fromkeys(("musicgen", "musicgen_melody"), _codebooks),
    "blip_2_qformer": _queries,
    "decision_transformer": _trajectory,
    "dia": _channels,
    "idefics": _crossed,
    "kosmos-2": _grounded,
    "lxmert": _regions,
    "seggpt": _prompted,
}
# Pooled where the text ends.
ENDS = {
    "altclip",
    "chinese_clip",
    "clip",
    "clip_text_model",
    "clip_text_with_projection",
    "metaclip_2",
    "xclip",
}
NEEDS_TOKEN_TYPES = {"gemma3", "paligemma", "git", "gemma3_text"}
