"""Pictures: opened upright and in colour, and cut to a size as networks of ImageNet are tested."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from overt._extras import need

if TYPE_CHECKING:
    from PIL.Image import Image

MARGIN = 256 / 224  # of what is resized to what is kept of it


class UnreadableImageError(ValueError):
    """A file cannot be read as an image, or is missing; the message names it."""


def opened(source: Image | str | Path | bytes, name: str) -> Image:
    """The first frame of a picture, RGB, turned upright as its EXIF data say.

    Args:
        source: an image of PIL's, a path, or the content of a file.
        name: of the picture, for errors.
    """
    need("PIL", "vision")
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with Image.open(file) if not isinstance(file, Image.Image) else nullcontext(file) as image:
            image.load()
            if image.mode[0] in "IF":
                raise UnreadableImageError(
                    f"{name} has more than 8 bits per channel (mode {image.mode}): convert it to RGB"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        raise FileNotFoundError(f"picture {name} does not exist") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"picture {name} is a folder: give a file in it") from None
    except UnreadableImageError:
        raise
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        why = "" if isinstance(error, UnidentifiedImageError) else f": {' '.join(str(error).split())[:100]}"
        raise UnreadableImageError(f"{name} cannot be read as an image{why}") from None


def resized_to(height: int, width: int, kept: tuple[int, int]) -> tuple[int, int]:
    """Height and width to which a picture is resized before its middle is kept; it keeps its proportions."""
    scale = max(round(MARGIN * kept[0]) / height, round(MARGIN * kept[1]) / width)
    return max(kept[0], round(scale * height)), max(kept[1], round(scale * width))


def middle(image: Image, resized: tuple[int, int], kept: tuple[int, int]) -> Image:
    """The middle of an image that is resized first; sizes are heights and widths."""
    from PIL.Image import Resampling

    if image.size != resized[::-1]:
        image = image.resize(resized[::-1], Resampling.BILINEAR)
    top, left = ((whole - part) // 2 for whole, part in zip(resized, kept, strict=True))
    return image.crop((left, top, left + kept[1], top + kept[0]))
