"""Pictures inside the prompt of a language model: which tokens are whose patches, in rows and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overt.attaching.find import name_of


class ImageTokens(NamedTuple):
    """The tokens of a picture, or of a tile or frame of one, row by row.

    Attributes:
        start: its first token.
        stop: one after its last.
        rows: of patches, as the language model sees them: several of the encoder's may be merged into one.
        columns: of patches.
    """

    start: int
    stop: int
    rows: int
    columns: int

    def patches(self, values: Tensor) -> Tensor:
        """(…, token) → (…, row, column), the values of the picture's patches."""
        inside = values[..., self.start : self.stop]
        return inside.reshape(*inside.shape[:-1], self.rows, self.columns)


def language_stack(model: Any) -> str | None:
    """Path of the language model inside a model that sees pictures as well; None for other models."""
    config = getattr(model, "config", None)
    find = getattr(model, "get_decoder", None)
    if getattr(config, "vision_config", None) is None or find is None:
        return None
    inner = find()
    return next((name for name, module in model.named_modules() if module is inner and name), None)


def image_tokens(model: nn.Module, arguments: Mapping[str, Any]) -> list[list[ImageTokens]]:
    """The pictures of each example, in order; an error where their grids are not known.

    Args:
        model: a language model that sees pictures.
        arguments: of its forward, as its processor made them.
    """
    config, ids = getattr(model, "config", None), arguments.get("input_ids")
    sign = _sign(config)
    if not isinstance(ids, Tensor) or sign is None:
        raise ValueError(f"{name_of(model)} has no tokens that stand for a picture in a text")
    grids = _given_grids(config, arguments)
    fixed = None if grids is not None else _fixed_grid(model, arguments)
    found = []
    for row in ids.cpu():
        pictures: list[ImageTokens] = []
        for start, stop in _runs(row == sign):
            at = start
            while at < stop:
                rows, columns = next(grids, (0, 0)) if grids is not None else fixed or (0, 0)
                if not rows * columns or at + rows * columns > stop:
                    raise ValueError(
                        f"tokens {start} to {stop - 1} stand for a picture, and the grids that are known do "
                        f"not fill them: {rows} rows of {columns} from token {at} on"
                    )
                pictures.append(ImageTokens(at, at + rows * columns, rows, columns))
                at += rows * columns
        found.append(pictures)
    return found


def of_examples(model: nn.Module, arguments: Mapping[str, Any], examples: list[int]) -> dict[str, Any]:
    """Those of a model's arguments that hold the pictures of all examples one after the other, for some.

    Empty where pictures are sorted by example already, or none are known.

    Args:
        model: any model.
        arguments: of its forward, for all examples.
        examples: numbers of those that are wanted, some perhaps several times.
    """
    pixels, grids = arguments.get("pixel_values"), arguments.get("image_grid_thw")
    if _sign(getattr(model, "config", None)) is None or not isinstance(pixels, Tensor):
        return {}
    try:
        found = image_tokens(model, arguments)
    except ValueError:
        return {}
    ends = torch.tensor([len(each) for each in found]).cumsum(dim=0).tolist()
    ranges = [range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
    wanted = [number for example in examples for number in ranges[example]]
    if isinstance(grids, Tensor) and pixels.dim() == 2 and len(grids) == ends[-1]:
        parts = torch.split(pixels, grids.prod(dim=1).tolist())
        chosen = torch.cat([parts[number] for number in wanted]) if wanted else None
        return {"pixel_values": chosen, "image_grid_thw": grids[wanted]}
    if pixels.dim() == 4 and len(pixels) == ends[-1]:
        return {"pixel_values": pixels[wanted] if wanted else None}
    return {}


def _sign(config: Any) -> int | None:
    """Id of the token that stands for a patch; None if a model has none."""
    known = (getattr(config, key, None) for key in ("image_token_id", "image_token_index"))
    return next((number for number in known if number is not None), None)


def _runs(marked: Tensor) -> list[tuple[int, int]]:
    """Where neighbouring entries are True, as (start, stop)."""
    edges = torch.diff(marked.int(), prepend=torch.zeros(1), append=torch.zeros(1)).nonzero().flatten()
    return [(int(start), int(stop)) for start, stop in edges.view(-1, 2)]


def _given_grids(config: Any, arguments: Mapping[str, Any]) -> Any:
    """Rows and columns of each picture, in order, as the processor gave them; None if it did not."""
    grids = arguments.get("image_grid_thw")
    if not isinstance(grids, Tensor):
        return None
    merged = int(getattr(config.vision_config, "spatial_merge_size", 1))
    listed = [
        (rows // merged, columns // merged) for frames, rows, columns in grids.tolist() for _ in range(frames)
    ]
    return iter(listed)


def _fixed_grid(model: nn.Module, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of pictures that all have the same size."""
    config: Any = model.config
    vision = getattr(config, "vision_config", None)
    size, patch = getattr(vision, "image_size", None), getattr(vision, "patch_size", None)
    # Latents are no patches, and sizes of their own mean rows that end in another token, or padding cut off.
    others = [
        name for name in ("perceiver_config", "qformer_config") if getattr(config, name, None) is not None
    ]
    others += [name for name in ("image_sizes",) if arguments.get(name) is not None]
    if others or not isinstance(size, int) or not isinstance(patch, int):
        why = f"it has {others[0]}" if others else "its config has no size of pictures and patches"
        raise ValueError(
            f"no grid of patches is known for the pictures of {name_of(model)}: {why}, and its processor "
            "gave no image_grid_thw"
        )
    side = size // patch
    pooled = getattr(config, "mm_tokens_per_image", None)
    if pooled is not None:
        side = math.isqrt(int(pooled))
    shuffled = getattr(config, "scale_factor", None) or 1
    shrunk = getattr(config, "downsample_ratio", None) or 1
    side = round(side / float(shuffled) * float(shrunk))
    return side, side
