"""Pictures in a prompt, for a page: their patches among the tokens, and where these lie on the picture.

A processor may stretch a picture, cut out its middle, pad it or cut it into tiles, so that its patches need
not cover the picture that was given. Where they lie is found by comparing this with the pixels that the model
saw; a picture that is not like them is refused.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from overt._extras import need
from overt.data.pictures import opened
from overt.tracing.images import ImageTokens
from overt.tracing.inputs import is_picture
from overt.tracing.result import Trace

if TYPE_CHECKING:
    from PIL.Image import Image

# Left, top, right, bottom, as shares of a picture; beyond it if it was padded.
Box = tuple[float, float, float, float]
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)
LONGEST = 768  # pixels of an embedded picture's longer side
QUALITY = 85  # of its JPEG
SIDE = 24  # a tile is compared in as many rows and columns
LIKE = 0.9  # correlation from which on a picture is taken for the one that the model saw
PATCH = "\u25aa"  # stands for a patch in the text
BEFORE = 12  # tokens before a tile that may name it
# How Idefics3 and SmolVLM name a tile, and the picture as a whole, in the text before it.
TILE = re.compile(r"<row_(\d+)_col_(\d+)>$")
GLOBAL = "<global-img>"


@dataclass(frozen=True)
class PromptPicture:
    """A picture in a prompt.

    Attributes:
        tiles: its tokens, one entry for each tile.
        boxes: where each tile lies on the picture; None if that is not known.
    """

    tiles: tuple[ImageTokens, ...]
    boxes: tuple[Box, ...] | None


@dataclass(frozen=True)
class _Example:
    """The pictures of one example, in two readings, and what the model saw of each tile."""

    trace: Trace
    number: int
    tiles: list[ImageTokens]
    seen: list[Tensor] | None  # (3, height, width)

    @property
    def named(self) -> list[PromptPicture]:
        """Tiles of one picture belong together if the prompt names them; others are pictures of their own."""
        return _named(self.trace.tokens[self.number], self.tiles)

    @property
    def runs(self) -> list[PromptPicture]:
        """Tiles without a token between them belong to one picture."""
        groups: list[list[ImageTokens]] = []
        for tile in self.tiles:
            if groups and groups[-1][-1].stop == tile.start:
                groups[-1].append(tile)
            else:
                groups.append([tile])
        return [PromptPicture(tuple(tiles), (WHOLE,) if len(tiles) == 1 else None) for tiles in groups]


def picture_entries(traces: Sequence[Trace], images: Any = None) -> Iterator[dict[str, Any]]:
    """For each example of some traces, what its entry in a page's index has of the pictures in its prompt.

    Empty where there are none, or `missing` says why they are not shown.

    Args:
        traces: of a page.
        images: the pictures of all prompts, in order; None to show patches without a picture.
    """
    examples = [list(_examples(trace, images is not None)) for trace in traces]
    if images is None:
        for per_trace in examples:
            for example in per_trace:
                yield example if isinstance(example, dict) else _entry(example, example.named, None)
        return
    every = [each for per_trace in examples for each in per_trace if isinstance(each, _Example)]
    photos = _photos(images)
    readings = [each.named for each in every]
    wanted = sum(map(len, readings))
    if len(photos) != wanted:
        readings = [each.runs for each in every]
    if len(photos) != sum(map(len, readings)):
        many = "prompt" if len(every) == 1 else "prompts"
        raise ValueError(f"images must have {wanted} pictures, all those of the {many}, got {len(photos)}")
    at = 0
    for example, pictures in zip(every, readings, strict=True):
        yield _entry(example, pictures, photos[at : at + len(pictures)], at)
        at += len(pictures)


def mark_patches(entry: dict[str, Any], tiles: Sequence[dict[str, Any]]) -> None:
    """Show patches as squares in a text, in place of hundreds of names that say nothing.

    Args:
        entry: of the example, whose tokens change.
        tiles: of a panel.
    """
    for tile in tiles:
        count, start = tile["rows"] * tile["columns"], tile["start"]
        entry["tokens"][start : start + count] = [PATCH] * count
        if "rows" in entry:
            before = entry["rows"]["before"]
            entry["rows"]["before"] = before[: start + 1] + "0" * (count - 1) + before[start + count :]


def _examples(trace: Trace, required: bool) -> Iterator[_Example | dict[str, Any]]:
    try:
        if not required and (trace.subject is None or trace.kind != "causal"):
            raise ValueError  # a file has no pixels and no ids, and other models no text around pictures
        found = trace.images()
    except ValueError as error:
        if required:
            raise
        config = getattr(trace.subject.model, "config", None) if trace.subject is not None else None
        sees = trace.generated is not None and getattr(config, "vision_config", None) is not None
        missing = {"missing": {"pictures": str(error)}} if sees else {}
        for _ in range(len(trace)):
            yield missing
        return
    assert trace.subject is not None
    count = sum(map(len, found))
    seen = seen_pixels(trace.subject.model, trace.subject.inputs.arguments, count) if required else None
    at = 0
    for number, tiles in enumerate(found):
        yield _Example(trace, number, tiles, None if seen is None else seen[at : at + len(tiles)])
        at += len(tiles)


def _named(tokens: Sequence[str], tiles: Sequence[ImageTokens]) -> list[PromptPicture]:
    pictures: list[PromptPicture] = []
    pending: dict[tuple[int, int], ImageTokens] = {}

    def flush(whole: ImageTokens | None = None) -> None:
        parts = [*pending.values(), *([] if whole is None else [whole])]
        rows, columns = (max((place[axis] for place in pending), default=0) for axis in (0, 1))
        if rows * columns == len(pending):
            boxes = [_cell(row - 1, column - 1, rows, columns) for row, column in pending]
            boxes += [] if whole is None else [WHOLE]
            if parts:
                pictures.append(PromptPicture(tuple(parts), tuple(boxes)))
        else:
            pictures.extend(PromptPicture((part,), (WHOLE,)) for part in parts)
        pending.clear()

    for tile in tiles:
        before = "".join(tokens[max(0, tile.start - BEFORE) : tile.start]).strip("\u0120\u2581 ")
        if match := TILE.search(before):
            place = int(match[1]), int(match[2])
            if place in pending:
                flush()
            pending[place] = tile
            continue
        if not before.endswith(GLOBAL):
            flush()
        flush(tile)
    flush()
    return pictures


def _cell(row: int, column: int, rows: int, columns: int) -> Box:
    return column / columns, row / rows, (column + 1) / columns, (row + 1) / rows


def seen_pixels(model: Any, arguments: dict[str, Any], count: int) -> list[Tensor]:
    """What a model saw of each picture or tile, (channel, height, width), in the order of their tokens.

    Args:
        model: a language model that sees pictures.
        arguments: of its forward, as its processor made them.
        count: of the tiles of all examples.
    """
    pixels, grids = arguments.get("pixel_values"), arguments.get("image_grid_thw")
    if isinstance(pixels, Tensor):
        pixels = pixels.detach().to("cpu", torch.float32)
        if isinstance(grids, Tensor) and pixels.dim() == 2:
            found = _from_patches(model.config.vision_config, pixels, grids)
        else:
            found = list(pixels.flatten(0, -4)) if pixels.dim() >= 4 else []
        if len(found) != count:
            found = [each for each in found if bool(each.any())]  # without padding, which is zero
        if len(found) == count:
            return found
    shape = f"of shape {tuple(pixels.shape)}" if isinstance(pixels, Tensor) else "absent"
    raise ValueError(
        f"images cannot be laid over the patches: pixel_values are {shape}, and the prompts have {count} "
        "pictures or tiles; leave images out to see patches alone"
    )


def _from_patches(vision: Any, pixels: Tensor, grids: Tensor) -> list[Tensor]:
    """Pictures from the patches of Qwen2-VL and its successors, which come in blocks that are merged."""
    merge, side, frames = (
        int(getattr(vision, name, 1)) for name in ("spatial_merge_size", "patch_size", "temporal_patch_size")
    )
    channels = pixels.shape[1] // (frames * side * side)
    listed = [(int(times), int(rows), int(columns)) for times, rows, columns in grids.tolist()]
    counts = [times * rows * columns for times, rows, columns in listed]
    if channels * frames * side * side != pixels.shape[1] or sum(counts) != len(pixels):
        return []
    found = []
    for part, (times, rows, columns) in zip(torch.split(pixels, counts), listed, strict=True):
        shape = (times, rows // merge, columns // merge, merge, merge, channels, frames, side, side)
        blocks = part.reshape(shape)[:, :, :, :, :, :, 0]  # (time, row, column, row, column, channel, y, x)
        whole = blocks.permute(0, 5, 1, 3, 6, 2, 4, 7)
        found += list(whole.reshape(times, channels, rows * side, columns * side))
    return found


def _photos(images: Any) -> list[Image]:
    """Pictures as they were given, opened and made smaller."""
    need("PIL", "view")
    listed = list(images) if isinstance(images, list | tuple) else [images]
    return [_photo(image, f"images[{number}]") for number, image in enumerate(listed)]


def _photo(image: Any, name: str) -> Image:
    from PIL import Image

    if isinstance(image, str | Path):
        photo = opened(image, str(image))
    elif is_picture(image):
        photo = opened(image, name)
    else:
        cells = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
        shape, kind = getattr(cells, "shape", None), str(getattr(cells, "dtype", type(image).__name__))
        if kind != "uint8" or shape is None or len(shape) != 3 or shape[2] != 3 or 0 in shape:
            got = kind if shape is None else f"{kind} {tuple(shape)}"
            raise ValueError(
                f"{name} must be a path, an image of PIL's or a uint8 array (height, width, 3), got {got}"
            )
        photo = Image.fromarray(cells)
    if min(photo.size) < 2:
        raise ValueError(f"{name} must have at least 2 × 2 pixels, got {photo.height} × {photo.width}")
    if max(photo.size) > LONGEST:
        photo = photo.copy()
        photo.thumbnail((LONGEST, LONGEST), Image.Resampling.BOX)
    return photo


def _layouts(picture: PromptPicture, photo: Image, seen: Sequence[Tensor]) -> list[tuple[Box, ...]]:
    """Where the tiles of a picture may lie on it, the usual first."""
    count = len(picture.tiles)
    if count > 1 and picture.boxes is not None:
        return [picture.boxes]
    if count > 1:
        layouts = []
        for some, last in ((count - 1, (WHOLE,)), (count, ())):
            grids = [(rows, some // rows) for rows in range(1, some + 1) if some % rows == 0]
            layouts += [
                (*(_cell(n // columns, n % columns, rows, columns) for n in range(some)), *last)
                for rows, columns in grids
            ]
        return layouts
    _, height, width = seen[0].shape
    # How much wider the picture is than what the model saw: stretched, or cut at both sides, or padded.
    wider = (photo.width / photo.height) / (width / height)
    part, more = min(wider, 1 / wider), max(wider, 1 / wider)
    low, high = (1 - part) / 2, (1 + part) / 2
    cut: Box = (low, 0.0, high, 1.0) if wider > 1 else (0.0, low, 1.0, high)
    low, high = (1 - more) / 2, (1 + more) / 2
    padded: Box = (0.0, low, 1.0, high) if wider > 1 else (low, 0.0, high, 1.0)
    after: Box = (0.0, 0.0, 1.0, more) if wider > 1 else (0.0, 0.0, more, 1.0)
    return [(WHOLE,), (cut,), (padded,), (after,)]


def _likeness(photo: Image, seen: Sequence[Tensor], boxes: Sequence[Box]) -> float:
    """Correlation of a picture with what the model saw of it, if its tiles lie in these boxes."""
    from PIL.Image import Resampling

    ours, theirs = [], []
    for tile, (left, top, right, bottom) in zip(seen, boxes, strict=True):
        inside = max(left, 0.0), max(top, 0.0), min(right, 1.0), min(bottom, 1.0)
        wide, high = photo.size
        corners = inside[0] * wide, inside[1] * high, inside[2] * wide, inside[3] * high
        small = photo.resize((SIDE, SIDE), Resampling.BOX, box=corners)
        ours.append(torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(SIDE, SIDE, 3))
        _, height, width = tile.shape
        x = [round((at - left) / (right - left) * width) for at in (inside[0], inside[2])]
        y = [round((at - top) / (bottom - top) * height) for at in (inside[1], inside[3])]
        kept = tile.mean(dim=0)[None, None, y[0] : max(y[1], y[0] + 1), x[0] : max(x[1], x[0] + 1)]
        theirs.append(torch.nn.functional.interpolate(kept, size=(SIDE, SIDE), mode="area"))
    a = torch.stack(ours).float().mean(dim=-1).flatten()
    b = torch.cat(theirs).flatten()
    flat = [bool(each.std() < 1e-3 * (1 + each.abs().mean())) for each in (a, b)]
    if any(flat):
        return float(all(flat))  # a picture of one colour has no other likeness
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def _entry(
    example: _Example, pictures: Sequence[PromptPicture], photos: Sequence[Image] | None, first: int = 0
) -> dict[str, Any]:
    """Panels of one example: a picture, or the tiles of one, or the whole beside its tiles."""
    if not pictures:
        return {}
    mask, at = example.trace.mask[example.number], 0
    panels, links = [], []
    for number, picture in enumerate(pictures):
        boxes, size = picture.boxes, None
        if photos is not None:
            assert example.seen is not None
            photo, seen = photos[number], example.seen[at : at + len(picture.tiles)]
            boxes = _placed(picture, photo, seen, first + number)
            links.append({"link": _link(photo)})
            size = [photo.height, photo.width]
        at += len(picture.tiles)
        name = f"picture {number + 1}"
        placed = list(zip(picture.tiles, boxes or [WHOLE] * len(picture.tiles), strict=True))
        if boxes is None:
            groups = [(f"{name}, tile {n + 1}", [tile]) for n, tile in enumerate(placed)]
        elif len(placed) > 1:
            apart = [tile for tile in placed if tile[1] != WHOLE]
            groups = [(f"{name}, its {len(apart)} tiles", apart)]
            groups += [(f"{name}, the whole", [tile]) for tile in placed if tile[1] == WHOLE]
        else:
            groups = [(name, placed)]
        for title, tiles in groups:
            panel = {
                "name": title,
                "photo": None if photos is None else number,
                "size": size or _size(tiles),
                "tiles": [
                    {
                        "start": int(mask[: tile.start].sum()),
                        "rows": tile.rows,
                        "columns": tile.columns,
                        "box": [round(side, 5) for side in box],
                    }
                    for tile, box in tiles
                ],
            }
            panels.append(panel)
    return {"pictures": {"photos": links, "panels": panels}}


def _placed(
    picture: PromptPicture, photo: Image, seen: Sequence[Tensor], number: int
) -> tuple[Box, ...] | None:
    """Where the tiles of a picture lie on it; refuses one that the model did not see."""
    found = {boxes: _likeness(photo, seen, boxes) for boxes in _layouts(picture, photo, seen)}
    best = max(found, key=lambda boxes: found[boxes])
    if not found[best] >= LIKE:
        raise ValueError(
            f"images[{number}] is not like what the model saw at tokens {picture.tiles[0].start} to "
            f"{picture.tiles[-1].stop - 1} (correlation {found[best]:.2f}): give the pictures of the prompt, "
            "in its order"
        )
    return best


def _size(tiles: Sequence[tuple[ImageTokens, Box]]) -> list[int]:
    """Height and width in patches of a panel without a picture."""
    tile, (left, top, right, bottom) = tiles[0]
    return [round(tile.rows / (bottom - top)), round(tile.columns / (right - left))]


def _link(photo: Image) -> str:
    """A picture as a link that holds it."""
    data = io.BytesIO()
    photo.save(data, "JPEG", quality=QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"
