"""A small image encoder of Overt's own: a residual network whose cells are the regions that attention sees.

It is trained without attention, to tell which words the captions or answers of an image hold, and is then
frozen: whatever the attention is, the regions are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt import _check
from overt.models.folders import checked_names, load_network, save_network
from overt.models.multi_label import multi_label_loss

MODEL_TYPE = "overt-image-encoder"
STRIDE = 16  # pixels from region to region
CHANNELS = (32, 64, 128, 192)  # after each of four steps of stride 2
WIDTH = 256
START = -4.6  # bias of the words at the start, a probability of 0.01: an image holds few of them


class Block(nn.Module):
    """Two 3×3 convolutions and a shortcut around them."""

    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != out:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) → the block's output."""
        inner = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class ImageEncoder(nn.Module):
    """Images → regions, one for 16×16 pixels (8×8 of an image of 128², 10×10 of 160²), and words.

    With the default sizes it has 1.9 million parameters, and 257 more for each word.

    Args:
        words: number of words that it is trained to predict.
        channels: after each of four steps of stride 2.
        width: of the regions.
        blocks: residual blocks after each of the last three steps.

    Attributes:
        word_names: of each word, for `save`; None if they are not known.
    """

    word_names: list[str] | None = None

    def __init__(
        self, words: int, channels: Sequence[int] = CHANNELS, width: int = WIDTH, blocks: int = 2
    ) -> None:
        super().__init__()
        for name, value in (("words", words), ("width", width), ("blocks", blocks)):
            _check.whole(name, value, 1)
        if not isinstance(channels, list | tuple) or len(channels) != len(CHANNELS):
            raise ValueError(f"channels must be {len(CHANNELS)} whole numbers, got {channels!r}")
        for value in channels:
            _check.whole("channels", value, 1)
        self.settings = {"words": words, "channels": list(channels), "width": width, "blocks": blocks}
        first, *others = channels
        self.stem = nn.Sequential(nn.Conv2d(3, first, 3, 2, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU())
        made, inside = [], first
        for out in others:
            for number in range(blocks):
                made.append(Block(inside, out, 1 if number else 2))
                inside = out
        self.body = nn.Sequential(*made)
        self.widen = nn.Sequential(nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.words = nn.Linear(width, words)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.constant_(self.words.bias, START)

    def regions(self, images: Tensor) -> Tensor:
        """(batch, 3, height, width) → (batch, height/16 · width/16, width of regions), row by row.

        Args:
            images: bytes, or numbers from 0 to 1, with sides that are multiples of 16; in any memory format.
        """
        if images.dim() != 4 or images.shape[1] != 3:
            raise ValueError(f"images must have shape (batch, 3, height, width), got {tuple(images.shape)}")
        if 0 in images.shape or images.shape[2] % STRIDE or images.shape[3] % STRIDE:
            size = f"{images.shape[2]}×{images.shape[3]}"
            raise ValueError(f"sides of images must be multiples of {STRIDE}, got {len(images)} of {size}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise TypeError(f"images must be bytes (uint8) or numbers from 0 to 1, got {images.dtype}")
        dtype = self.words.weight.dtype
        scaled = images.to(dtype) * (2.0 / 255.0 if images.dtype == torch.uint8 else 2.0) - 1.0
        if not scaled.is_cuda:  # with channels last, torch 2.13 writes beyond its memory in the gradient
            scaled = scaled.contiguous()
        cells: Tensor = self.widen(self.body(self.stem(scaled)))
        return cells.flatten(2).transpose(1, 2)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the words, (batch, words), from the mean and the maximum over the regions of `images`."""
        regions = self.regions(images)
        return self.words(regions.mean(dim=1) + regions.amax(dim=1))  # type: ignore[no-any-return]

    def save(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`, completely or not at all."""
        names = checked_names("word_names", self.word_names, self.words.out_features)
        save_network(self, folder, MODEL_TYPE, {**self.settings, "word_names": names})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The encoder that `save` wrote, in evaluation mode on the CPU."""
        names = {"word_names": lambda model: model.words.out_features}
        return load_network(cls, folder, MODEL_TYPE, ["words"], names)


def words_loss(logits: Tensor, held: Tensor) -> Tensor:
    """Binary cross-entropy, summed over words and averaged over the batch.

    Args:
        logits: (batch, words).
        held: (batch, words), 1 or True for words that the captions or answers of an image hold, else 0.
    """
    return multi_label_loss(logits, held)
