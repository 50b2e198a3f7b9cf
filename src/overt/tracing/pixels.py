"""Inputs of networks that attend to pixels: pictures, fitted to the network and normalised, or tensors."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from overt.data.pictures import middle, opened, resized_to
from overt.models.augmented_conv import AugmentedConv2d
from overt.models.augmenting import augmentation_of
from overt.models.resnet import ResNet
from overt.tracing.inputs import Inputs, colours, is_picture, stretched

MODES = {1: "L", 3: "RGB"}  # Pillow's, by number of channels
NARROWEST = 100  # sides of a picture that is resized at its shorter one: memory grows with the longer


def attends_to_pixels(model: nn.Module) -> bool:
    """Whether a model is a ResNet of `overt.vision`, or one that `overt.vision.augment` changed."""
    return isinstance(model, ResNet) or augmentation_of(model) is not None


def sizes_of_maps(model: nn.Module) -> list[str]:
    """Names of the stacks of a network over pixels, for its largest images, such as "14x14" and "7x7"."""
    layers = [layer for layer in model.modules() if isinstance(layer, AugmentedConv2d)]
    return list(dict.fromkeys("x".join(str(n) for n in layer.map_size) for layer in layers))


@dataclass(frozen=True)
class Fitting:
    """How a picture becomes an image of a network's size.

    Attributes:
        given: its height and width.
        resized: height and width after resizing.
        kept: those of the middle, which the network sees.
    """

    given: tuple[int, int]
    resized: tuple[int, int]
    kept: tuple[int, int]

    def __str__(self) -> str:
        words = f"{_size(self.given)} pixels"
        if self.resized != self.given:
            words += f", resized to {_size(self.resized)}"
        return words if self.kept == self.resized else f"{words}, of which the middle {_size(self.kept)}"


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"


def fitting(model: ResNet, height: int, width: int) -> Fitting:
    """How a picture of a size is fitted to a network.

    With the ImageNet stem it keeps its proportions: it is resized to 256/224 of the network's size, at its
    shorter side, and the middle is kept. With the CIFAR stem all of it is resized to the network's size.
    """
    if max(height, width) > NARROWEST * min(height, width):
        raise ValueError(f"a picture of {height} × {width} pixels is too long and narrow to be shown")
    kept = model.size
    if model.stem == "cifar":
        return Fitting((height, width), kept, kept)
    return Fitting((height, width), resized_to(height, width, kept), kept)


def pixel_inputs(model: nn.Module, inputs: Any, **needless: Any) -> Inputs:
    """Pictures or a normalised tensor as a batch for a network that attends to pixels, on its device.

    Args:
        model: the network.
        inputs: a picture or several, as paths or PIL images; or a float tensor (batch, channels, height,
            width), normalised.
        needless: arguments of `overt.trace` that have no meaning here; None if they were not given.
    """
    for name, value in needless.items():
        if value is not None:
            raise ValueError(f"{name} has no meaning for a network that attends to pixels: leave it out")
    if isinstance(model, ResNet) and not sizes_of_maps(model):
        name = "this ResNet" if model.settings is None else model.settings["name"]
        raise ValueError(f"{name} has no attention, and so no maps to trace: aa- and ea-aa-resnets have")
    listed = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
    if listed and all(isinstance(each, str | Path) or is_picture(each) for each in listed):
        batch = _from_pictures(model, listed)
    else:
        batch = _from_tensor(model, inputs)
    like = next(model.parameters())
    batch.arguments = {name: x.to(like.device, like.dtype) for name, x in batch.arguments.items()}
    return batch


def _from_pictures(model: nn.Module, pictures: list[Any]) -> Inputs:
    if not isinstance(model, ResNet) or model.mean is None or model.std is None:
        raise ValueError(
            f"how to normalise pictures for this {type(model).__name__} is not known: give a normalised "
            "tensor, or a network of overt.vision.load that was saved with mean and std"
        )
    if model.in_chans not in MODES:
        raise ValueError(f"pictures have 1 or 3 channels, and the network takes {model.in_chans}")
    fitted, fittings = zip(*(_fitted(model, picture) for picture in pictures), strict=True)
    picture = torch.stack(fitted)  # (batch, height, width, channels), uint8
    batch = _batch(model, model.normalised(picture.permute(0, 3, 1, 2)))
    batch.picture = picture.expand(-1, -1, -1, 3).contiguous()
    batch.extra["fittings"] = [str(each) for each in fittings]
    return batch


def _fitted(model: ResNet, picture: Any) -> tuple[Tensor, Fitting]:
    """A picture as uint8 (height, width, channels) of the network's size, and how it was fitted."""
    name = "the picture" if is_picture(picture) else f"picture {picture}"
    try:
        upright = opened(picture, name)
    except FileNotFoundError:
        raise FileNotFoundError(f"{name} does not exist") from None
    except IsADirectoryError:
        raise IsADirectoryError(f"{name} is a folder: give a file in it") from None
    how = fitting(model, upright.height, upright.width)
    kept = middle(upright, how.resized, how.kept).convert(MODES[model.in_chans])
    values = torch.from_numpy(np.array(kept, dtype=np.uint8))
    return values.reshape(*how.kept, model.in_chans), how


def _from_tensor(model: nn.Module, values: Any) -> Inputs:
    values = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = f"a tensor of {values.dtype}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ValueError(
            f"inputs must be pictures (paths or PIL images) or a normalised float tensor, got {kind}"
        )
    if values.dim() not in (3, 4) or 0 in values.shape:
        raise ValueError(f"images must be (batch, channels, height, width), got {tuple(values.shape)}")
    pixels = values if values.dim() == 4 else values.unsqueeze(0)
    batch = _batch(model, pixels)
    shown = pixels.detach().to("cpu", torch.float32)
    if shown.shape[1] in MODES:
        known = isinstance(model, ResNet) and model.mean is not None and len(model.mean) == shown.shape[1]
        if known:
            mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (model.mean, model.std))
            shown = 255 * (shown * std + mean)
        batch.picture = colours(shown if known else stretched(shown))
    return batch


def _batch(model: nn.Module, pixels: Tensor) -> Inputs:
    name = next(iter(inspect.signature(model.forward).parameters))
    return Inputs({name: pixels}, image=(int(pixels.shape[-2]), int(pixels.shape[-1])))
