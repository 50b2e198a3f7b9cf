"""Maps of trained vision networks: what the middle pixel attends to, image by image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from overt import vision
from overt.data.image_folders import ImageFiles
from overt.mechanisms.backend import wanting_maps
from overt.mechanisms.chain import Chain
from overt.models.augmented_conv import AugmentedConv2d
from overt.recipes.vision_training import in_batches
from overt.vision import ResNet

LAYERS = 16, 17, 18  # of ResNet-34's 26 attentions, as in the paper's appendix


def layers_of(text: str | None, attentions: int) -> tuple[int, ...]:
    """The attentions that `--layers` names, from 1 on; the paper's, or those before the last chain's.

    Args:
        text: the option's value.
        attentions: number of attentions of the network.
    """
    if text is None:
        return LAYERS if attentions >= LAYERS[-1] else tuple(range(1, attentions + 1))[1:-2]
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) if part.isdecimal() else 0 for part in parts]
    if not all(1 <= number <= attentions for number in numbers):
        raise ValueError(
            f"--layers must be numbers of attentions, from 1 to {attentions}, separated by commas, got {text}"
        )
    return tuple(dict.fromkeys(numbers))


def attentions_of(net: nn.Module) -> list[AugmentedConv2d]:
    """The attentions of a network, in order."""
    return [layer for layer in net.modules() if isinstance(layer, AugmentedConv2d)]


def sizes_of(net: nn.Module, layers: Sequence[int]) -> list[tuple[int, int]]:
    """Height and width of what attentions, by number from 1 on, attend to in the largest images."""
    every = attentions_of(net)
    return [every[number - 1].map_size for number in layers]


def normalised(net: ResNet, images: Tensor) -> Tensor:
    """Bytes (batch, 3, height, width) as a network takes them, on its device."""
    device = next(net.parameters()).device
    if net.mean is None or net.std is None:
        raise ValueError("the network was saved without mean and std, so images cannot be normalised for it")
    mean, std = (torch.tensor(x, device=device).view(1, -1, 1, 1) for x in (net.mean, net.std))
    return (images.to(device) / 255 - mean) / std


@torch.no_grad()
def middle_maps(net: ResNet, images: Tensor | ImageFiles, layers: Sequence[int]) -> dict[int, Tensor]:
    """What the middle pixel attends to in each of some attentions.

    Random weights are at their mean. On a GPU the network runs in bfloat16, as it is tested.

    Args:
        net: the network, in evaluation mode.
        images: uint8 (images, 3, height, width), or files.
        layers: numbers of attentions, from 1 on.

    Returns:
        Number of an attention → (images, heads, height, width), float16 on the CPU. Heights and widths are
        those of the map; the middle pixel is at half of both, rounded down.
    """
    found: dict[int, list[Tensor]] = {number: [] for number in layers}
    sizes: dict[int, tuple[int, int]] = {}
    kind = next(net.parameters()).device.type

    def keep(number: int, layer: AugmentedConv2d) -> list[torch.utils.hooks.RemovableHandle]:
        def size(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            sizes[number] = output.shape[-2], output.shape[-1]

        def rows(_module: nn.Module, _inputs: object, weights: Tensor) -> None:
            height, width = sizes[number]
            row = weights[:, :, (height // 2) * width + width // 2]  # (batch, heads, pixels)
            found[number].append(row.reshape(*row.shape[:2], height, width).to("cpu", torch.float16))

        return [layer.qkv.register_forward_hook(size), layer.map.register_forward_hook(rows)]

    every = attentions_of(net)
    hooks = [hook for number in layers for hook in keep(number, every[number - 1])]
    try:
        with wanting_maps(), torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            for batch in in_batches(images):
                net(normalised(net, batch), Chain())
    finally:
        for hook in hooks:
            hook.remove()
    return {number: torch.cat(parts) for number, parts in found.items()}


def trained(place: Path) -> ResNet:
    """The network of a finished run."""
    return vision.load(place / "model")
