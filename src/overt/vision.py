"""Attention over pixels: attention-augmented ResNets whose maps may evolve or be random.

`resnet` makes a network by name, `AugmentedConv2d` is its layer; `augment` changes a ResNet that you have.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from overt import _check
from overt.mechanisms.builtin import Evolving
from overt.mechanisms.mechanism import Mechanism
from overt.models.augmented_conv import AugmentedConv2d, Size, pair
from overt.models.augmenting import augment
from overt.models.resnet import DEPTHS, KINDS, Preset, ResNet, Stem

__all__ = ["AugmentedConv2d", "ResNet", "augment", "resnet"]


def resnet(
    name: str,
    num_classes: int = 1000,
    *,
    mechanisms: Sequence[Mechanism] | None = None,
    stem: Stem = "imagenet",
    size: Size | None = None,
    in_chans: int = 3,
    preset: Preset = "paper",
    zero_init_last: bool = False,
    width: int = 64,
    blocks: Sequence[int] | None = None,
) -> ResNet:
    """A ResNet by name: "resnet-34", "aa-resnet-50", "ea-aa-resnet-101", …; random weights.

    Args:
        name: kind and depth: 34, 50, 101 or 152. "aa" has attention beside the 3×3 convolutions of the last
            three stages; in "ea-aa" their maps evolve.
        num_classes: width of the output.
        mechanisms: of the maps, in place of the name's; None for none ("aa") or the paper's Evolving
            ("ea-aa").
        stem: "imagenet" (7×7 convolution of stride 2, and pooling) or "cifar" (3×3 convolution).
        size: of the largest images; 224, or 32 with stem="cifar". Smaller ones work too.
        in_chans: channels of the images.
        preset: "official" has the key and value channels of the released code, whose ResNet-50 is smaller
            than the paper's.
        zero_init_last: start each block as the identity, as timm does.
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
        blocks: of the four stages, in place of the name's.
    """
    found = re.fullmatch(r"(resnet|aa-resnet|ea-aa-resnet)-(\d+)", name)
    if found is None or int(found[2]) not in DEPTHS:
        known = ", ".join(f"{kind}-{depth}" for kind in KINDS for depth in DEPTHS)
        raise ValueError(f"name must be one of {known}, got {name!r}")
    kind, depth = found[1], DEPTHS[int(found[2])]
    _check.whole("num_classes", num_classes, 0)
    _check.whole("in_chans", in_chans, 1)
    _check.one_of("stem", stem, ("imagenet", "cifar"))
    _check.one_of("preset", preset, ("paper", "official"))
    if preset == "official" and (int(found[2]) != 50 or kind == "resnet"):
        raise ValueError(f"preset='official' is for aa-resnet-50 and ea-aa-resnet-50, got {name}")
    if kind == "resnet" and mechanisms is not None:
        raise ValueError(f"mechanisms are for networks with attention, such as aa-{name}")
    if isinstance(mechanisms, Mechanism):
        raise TypeError(f"mechanisms must be a list, got a {type(mechanisms).__name__}: pass it in [ ]")
    if mechanisms is None and kind != "resnet":
        mechanisms = [Evolving(alpha=depth.alpha, beta=1.0)] if kind == "ea-aa-resnet" else []
    _check.whole("width", width, 8)
    if blocks is not None:
        if not isinstance(blocks, Sequence) or len(blocks) != len(depth.blocks):
            raise ValueError(f"blocks must be {len(depth.blocks)} whole numbers, one per stage, got {blocks}")
        for count in blocks:
            _check.whole("blocks", count, 1)
        depth = replace(depth, blocks=tuple(blocks))
    largest = pair("size", (224 if stem == "imagenet" else 32) if size is None else size)
    return ResNet(depth, mechanisms, num_classes, stem, largest, in_chans, preset, zero_init_last, width)
