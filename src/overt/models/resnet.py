"""ResNets (He et al. 2016), attention-augmented (Bello et al. 2019), and with maps that evolve.

Names of modules and parameters are those of torchvision and timm, so that weights of plain networks load. In
timm's own names "aa" means anti-aliasing; here it means attention augmentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from overt import _check
from overt._modes import evaluating
from overt.mechanisms.chain import Chain, around
from overt.mechanisms.mechanism import Mechanism
from overt.mechanisms.scores import RelativePosition2d
from overt.models.augmented_conv import AugmentedConv2d, Size, channels, pair

Stem = Literal["imagenet", "cifar"]
Preset = Literal["paper", "official"]
HEADS = 8
MODEL_TYPE = "overt-resnet"  # in the config of a saved network
LARGEST = {"imagenet": 224, "cifar": 32}  # side of the largest images, by stem, unless another is given


@dataclass(frozen=True)
class Depth:
    """A size of network, with the numbers that Wang et al. 2021 publish for it (ImageNet, Table 1).

    Attributes:
        blocks: of each stage.
        bottleneck: whether blocks have three convolutions, or two.
        key_share: κ, the share of a convolution's channels that keys have.
        value_share: υ, that of values, which take the place of filters.
        least_key: least width of a head's keys.
        alpha: of Evolving.
        published: kind → million parameters, billion FLOPs (2·MAC), top-1 and top-5 accuracy in %.
    """

    blocks: tuple[int, ...]
    bottleneck: bool
    key_share: float
    value_share: float
    least_key: int
    alpha: float
    published: dict[str, tuple[float, float, float, float]]


# The appendix's "k = 2 and v = 0.2" is a misprint of Bello et al.'s κ = 2υ = 0.2; published sizes settle it.
DEPTHS = {
    34: Depth(
        (3, 4, 6, 3), False, 0.25, 0.125, 1, 0.5,
        {
            "resnet": (21.8, 7.4, 73.79, 91.43),
            "aa-resnet": (20.7, 7.1, 74.33, 91.92),
            "ea-aa-resnet": (20.7, 7.9, 75.23, 92.35),
        },
    ),
    50: Depth(
        (3, 4, 6, 3), True, 0.2, 0.1, 20, 0.5,
        {
            "resnet": (25.6, 8.2, 76.44, 93.19),
            "aa-resnet": (25.8, 8.3, 77.70, 93.80),
            "ea-aa-resnet": (25.8, 8.7, 78.22, 94.21),
        },
    ),
    101: Depth(
        (3, 4, 23, 3), True, 0.2, 0.1, 20, 0.7,
        {
            "resnet": (44.5, 15.6, 77.87, 93.89),
            "aa-resnet": (45.4, 16.1, 78.50, 94.02),
            "ea-aa-resnet": (45.4, 17.2, 79.29, 94.81),
        },
    ),
    152: Depth(
        (3, 8, 36, 3), True, 0.2, 0.1, 20, 0.7,
        {
            "resnet": (60.2, 23.0, 78.40, 94.20),
            "aa-resnet": (61.6, 23.8, 79.10, 94.60),
            "ea-aa-resnet": (61.6, 25.7, 79.63, 94.85),
        },
    ),
}  # fmt: skip
KINDS = ("resnet", "aa-resnet", "ea-aa-resnet")


@dataclass
class _Attentions:
    """Makes the 3×3 convolutions of a network, and numbers those with attention as they come."""

    depth: Depth
    mechanisms: tuple[Mechanism, ...] | None  # None for a network without attention
    preset: Preset
    made: int = 0
    last: tuple[int, int] | None = None  # size of the last map's image

    def conv(self, inside: int, out: int, stride: int, size: tuple[int, int], stage: int) -> nn.Module:
        """A convolution whose output has a size; with attention from the second stage on."""
        if self.mechanisms is None or stage == 0:
            return nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        official = self.preset == "official"
        shares = (0.25, 0.125) if official else (self.depth.key_share, self.depth.value_share)
        pool = 2 if stage == 1 else 1
        shape = -(-size[0] // pool), -(-size[1] // pool)
        layer = AugmentedConv2d(
            inside,
            out,
            3,
            stride,
            heads=HEADS,
            key_channels=channels(shares[0] * out, HEADS, 1 if official else self.depth.least_key),
            value_channels=channels(shares[1] * out, HEADS),
            size=size,
            pool=pool,
            mechanisms=self.mechanisms,
            layer=self.made,
            start=shape != self.last,  # a chain goes on as long as maps have the same shape
            half_pixel=not official,
        )
        self.made, self.last = self.made + 1, shape
        return layer


def _run(layer: nn.Module, x: Tensor, chain: Chain) -> Tensor:
    out: Tensor = layer(x, chain) if isinstance(layer, AugmentedConv2d) else layer(x)
    return out


class Block(nn.Module):
    """Two 3×3 convolutions, or three with `bottleneck`, and a shortcut around them."""

    def __init__(
        self, inside: int, width: int, stride: int, size: tuple[int, int], stage: int, make: _Attentions
    ) -> None:
        super().__init__()
        bottleneck = make.depth.bottleneck
        out = 4 * width if bottleneck else width
        if bottleneck:
            self.conv1: nn.Module = nn.Conv2d(inside, width, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            self.conv2 = make.conv(width, width, stride, size, stage)
            self.bn2 = nn.BatchNorm2d(width)
            self.conv3 = nn.Conv2d(width, out, 1, bias=False)
            self.bn3 = nn.BatchNorm2d(out)
        else:
            self.conv1 = make.conv(inside, width, stride, size, stage)
            self.bn1 = nn.BatchNorm2d(width)
            self.conv2 = make.conv(width, width, 1, size, stage)
            self.bn2 = nn.BatchNorm2d(width)
        self.bottleneck, self.relu = bottleneck, nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inside != out:
            shortcut = nn.Conv2d(inside, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(out))

    def forward(self, x: Tensor, chain: Chain) -> Tensor:
        """(batch, channels, height, width) → the block's output."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(_run(self.conv1, x, chain)))
        x = self.bn2(_run(self.conv2, x, chain))
        if self.bottleneck:
            x = self.bn3(self.conv3(self.relu(x)))
        out: Tensor = self.relu(x + shortcut)
        return out


class Stage(nn.Sequential):
    """Blocks that pass a chain on.

    Attributes:
        grad_checkpointing: run each block again in the backward pass instead of keeping what it computes.
    """

    grad_checkpointing = False

    def forward(self, x: Tensor, chain: Chain) -> Tensor:  # type: ignore[override]
        """Run the blocks."""
        again = self.grad_checkpointing and torch.is_grad_enabled()
        for block in self:
            x = checkpoint(block, x, chain, use_reentrant=False) if again else block(x, chain)
        return x


class ResNet(nn.Module):
    """A ResNet whose 3×3 convolutions may have attention beside them; made by `overt.vision.resnet`.

    It answers to timm's calls: `forward_features`, `forward_intermediates`, `forward_head`,
    `get_classifier`, `reset_classifier`, `feature_info`, `prune_intermediate_layers`,
    `set_grad_checkpointing`.

    Attributes:
        settings: arguments of `overt.vision.resnet`, as plain JSON, without `mechanisms` and `num_classes`;
            None for a network made otherwise.
        mechanisms: of its maps; None without attention.
        labels: names of the classes, or None.
        mean: of each channel of the images that it was trained on, whose values are 0 to 1; or None.
        std: their standard deviation.
    """

    settings: dict[str, Any] | None = None
    labels: list[str] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __init__(
        self,
        depth: Depth,
        mechanisms: Sequence[Mechanism] | None,
        num_classes: int,
        stem: Stem,
        size: tuple[int, int],
        in_chans: int,
        preset: Preset,
        zero_init_last: bool,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.num_classes, self.stem, self.size, self.in_chans = num_classes, stem, size, in_chans
        expansion = 4 if depth.bottleneck else 1
        widths = [width * 2**stage for stage in range(len(depth.blocks))]
        self.num_features = widths[-1] * expansion
        large = stem == "imagenet"
        self.conv1 = nn.Conv2d(
            in_chans, width, 7 if large else 3, 2 if large else 1, 3 if large else 1, bias=False
        )
        self.bn1, self.act1 = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1) if large else nn.Identity()
        self.mechanisms = None if mechanisms is None else tuple(mechanisms)
        make = _Attentions(depth, self.mechanisms, preset)
        now = tuple(-(-length // 4) for length in size) if large else size
        inside, reduction = width, 4 if large else 1
        self.feature_info: list[dict[str, Any]] = [
            {"num_chs": width, "reduction": 2 if large else 1, "module": "act1"}
        ]
        for stage, (channels_out, count) in enumerate(zip(widths, depth.blocks, strict=True)):
            stride = 1 if stage == 0 else 2
            now, reduction = (-(-now[0] // stride), -(-now[1] // stride)), reduction * stride
            blocks = []
            for number in range(count):
                blocks.append(Block(inside, channels_out, stride if number == 0 else 1, now, stage, make))
                inside = channels_out * expansion
            self.add_module(f"layer{stage + 1}", Stage(*blocks))
            info = {"num_chs": inside, "reduction": reduction, "module": f"layer{stage + 1}"}
            self.feature_info.append(info)
        self.attentions = make.made
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.fc: nn.Module = nn.Linear(inside, num_classes) if num_classes else nn.Identity()
        self._initialise(zero_init_last)
        if preset == "official":
            self._as_released()

    def _initialise(self, zero_init_last: bool) -> None:
        attention = {
            id(m) for layer in self.modules() if isinstance(layer, AugmentedConv2d) for m in layer.modules()
        }
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and id(module) not in attention:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if zero_init_last and isinstance(module, Block):
                last = module.bn3 if module.bottleneck else module.bn2
                nn.init.zeros_(last.weight)

    def _as_released(self) -> None:
        """Start as the released code does, and average batch statistics as it does."""
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 1 - 0.997
            if isinstance(module, RelativePosition2d):  # it passes the standard deviation for the mean
                for vectors in (module.vertical, module.horizontal):
                    nn.init.normal_(vectors, mean=vectors.shape[1] ** -0.5, std=1.0)

    def flops(self, size: Size | None = None) -> int:
        """FLOPs for one image, two for each multiplication and addition, as published tables count.

        Convolutions and matrix products count, those of mechanisms too; norms, pooling and the like do not.
        Position terms count as if they were added to the products: that fused forms read them as longer
        queries and keys is not the network's cost. Nothing is computed.

        Args:
            size: height and width of the image; None for the largest.
        """
        largest = self.size if size is None else pair("size", size)
        image = torch.empty(1, self.in_chans, *largest, device="meta")
        added = 0

        def note(layer: AugmentedConv2d, output: Tensor) -> None:
            nonlocal added
            height, width = output.shape[-2:]
            if layer.map.reads_logits_only:  # see AugmentedConv2d._call
                added += 2 * layer.heads * (height * width) ** 2 * (height + width)

        layers = [layer for layer in self.modules() if isinstance(layer, AugmentedConv2d)]
        hooks = [
            layer.qkv.register_forward_hook(lambda _module, _inputs, output, layer=layer: note(layer, output))
            for layer in layers
        ]
        state = {
            name: tensor.to("meta", torch.float32 if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in [*self.named_parameters(), *self.named_buffers()]
        }
        try:
            with torch.no_grad(), evaluating(self), FlopCounterMode(display=False) as counter:
                functional_call(self, state, (image, Chain()))
        finally:
            for hook in hooks:
                hook.remove()
        return int(counter.get_total_flops()) - added

    def forward(self, x: Tensor, chain: Chain | None = None) -> Tensor:
        """Logits (batch, num_classes).

        Args:
            x: images (batch, in_chans, height, width), normalised.
            chain: of this forward pass, for random weights; by default that of the surrounding `with chain:`.
        """
        return self.forward_head(self.forward_features(x, chain))

    def forward_features(self, x: Tensor, chain: Chain | None = None) -> Tensor:
        """The last stage's output (batch, num_features, height, width)."""
        last: Tensor = self.forward_intermediates(x, [], chain=chain)[0]
        return last

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        chain: Chain | None = None,
    ) -> Any:
        """The last output and a list of intermediate ones: those of the stem and of each stage.

        Args:
            x: as in `forward`.
            indices: which, from 0, the stem; a number for that many of the last, None for all.
            norm: without effect; no norm follows the last stage.
            stop_early: stop at the last of them.
            output_fmt: "NCHW".
            intermediates_only: return the list alone.
            chain: as in `forward`.
        """
        del norm
        _check.one_of("output_fmt", output_fmt, ("NCHW",))
        wanted = self._indices(indices)
        chain = chain or around() or Chain()
        self._check(x)
        if chain.used and torch.is_grad_enabled() and any(stage.grad_checkpointing for stage in self.stages):
            raise RuntimeError(
                "a chain is for one forward pass, and checkpointed blocks would read the maps of the last: "
                "use a new overt.Chain for the next"
            )
        x = self.act1(self.bn1(self.conv1(x)))
        found = [x] if 0 in wanted else []
        x = self.maxpool(x)
        last = max(wanted, default=0) if stop_early else len(self.stages)
        for number, stage in enumerate(self.stages[:last], start=1):
            x = stage(x, chain)
            if number in wanted:
                found.append(x)
        return found if intermediates_only else (x, found)

    def _indices(self, indices: int | Sequence[int] | None) -> list[int]:
        """Numbers of intermediate outputs, from 0."""
        count = len(self.feature_info)
        if isinstance(indices, int):
            if not 1 <= indices <= count:
                raise ValueError(f"indices must be a number from 1 to {count}, or a list, got {indices}")
            return list(range(count - indices, count))
        numbers = list(range(count) if indices is None else indices)
        if any(not -count <= number < count for number in numbers):
            raise ValueError(f"indices must lie between {-count} and {count - 1}, got {numbers}")
        return [number % count for number in numbers]

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] | None = None, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages above the last of these outputs, and the last layer; returns their numbers.

        Args:
            indices: as in `forward_intermediates`.
            prune_norm: without effect.
            prune_head: also drop the last layer if all stages stay.
        """
        del prune_norm
        kept = self._indices(indices)
        last = max(kept)
        for number in range(last + 1, len(self.feature_info)):
            self.add_module(f"layer{number}", Stage())
        if prune_head or last + 1 < len(self.feature_info):
            self.num_features = self.feature_info[last]["num_chs"]
            self.reset_classifier(0)
        return kept

    @property
    def stages(self) -> list[Stage]:
        """layer1 to layer4."""
        return [stage for stage in self.children() if isinstance(stage, Stage)]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits, or the pooled features, from what `forward_features` returns."""
        x = self.global_pool(x).flatten(1)
        return x if pre_logits else self.fc(x)

    def _check(self, x: Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.in_chans:
            raise ValueError(f"images must be (batch, {self.in_chans}, height, width), got {tuple(x.shape)}")
        (height, width), (most_height, most_width) = x.shape[-2:], self.size
        if self.attentions and (height > most_height or width > most_width):
            raise ValueError(
                f"images of {height} × {width} are larger than this network was built for: make it with "
                f"size=({height}, {width}) instead of ({most_height}, {most_width})"
            )

    def normalised(self, images: Tensor) -> Tensor:
        """Bytes (batch, channels, height, width) as the network takes them, on its device."""
        if self.mean is None or self.std is None:
            raise ValueError("the network has no mean and std, so images cannot be normalised for it")
        device = self.conv1.weight.device
        mean, std = (torch.tensor(x, device=device).view(1, -1, 1, 1) for x in (self.mean, self.std))
        return (images.to(device) / 255 - mean) / std

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new last layer; 0 classes remove it."""
        if global_pool not in (None, "avg"):
            raise ValueError(f"global_pool must be 'avg', got {global_pool!r}")
        self.num_classes, self.labels = num_classes, None
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Run each block again in the backward pass instead of keeping what it computes."""
        for stage in self.stages:
            stage.grad_checkpointing = enable
