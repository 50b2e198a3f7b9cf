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
from overt.recipes.map_probing import layers_named
from overt.recipes.vision_training import in_batches
from overt.vision import ResNet

SETTLING = 2000  # images that statistics are taken of
LAYERS = 16, 17, 18  # of ResNet-34's 26 attentions, as in the paper's appendix


def layers_of(text: str | None, net: nn.Module) -> tuple[tuple[int, ...], tuple[int, int]]:
    """The attentions that `--layers` names, from 1 on, and the size that their maps must share.

    Args:
        text: the option's value; None for the paper's, or for small networks those of the first chain.
        net: the network.
    """
    every = attentions_of(net)
    if text is None:
        layers = LAYERS if len(every) >= LAYERS[-1] else tuple(range(1, len(every) + 1))[1:-2]
    else:
        layers = layers_named(text, len(every))
    sizes = [every[number - 1].map_size for number in layers]
    if len(set(sizes)) > 1:
        shown = ", ".join(f"{height} × {width}" for height, width in sizes)
        raise ValueError(f"--layers must have maps of one size, got {text}: {shown}")
    return layers, sizes[0]


def attentions_of(net: nn.Module) -> list[AugmentedConv2d]:
    """The attentions of a network, in order."""
    return [layer for layer in net.modules() if isinstance(layer, AugmentedConv2d)]


@torch.no_grad()
def settle(net: ResNet, images: Tensor | ImageFiles) -> ResNet:
    """Give the batch norms of an untrained network the statistics of images, as a training would.

    With those that they start from, values grow from block to block, and maps are all but one-hot.
    """
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # the mean of all batches
        norm.reset_running_stats()
    net.train()
    seen = 0
    for batch in in_batches(images):
        net(net.normalised(batch), Chain())
        seen += len(batch)
        if seen >= SETTLING:
            break
    for norm, momentum in zip(norms, before, strict=True):
        norm.momentum = momentum
    return net.eval()


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
                net(net.normalised(batch), Chain())
    finally:
        for hook in hooks:
            hook.remove()
    return {number: torch.cat(parts) for number, parts in found.items()}


def trained(place: Path) -> ResNet:
    """The network of a finished run."""
    return vision.load(place / "model")
