"""A ResNet as others write it, in the layout of torchvision's."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overt

EVOLVING = overt.Evolving(alpha=0.5, beta=0.5, init="kaiming")


class BasicBlock(nn.Module):
    """As torchvision's: its convolutions are called with one argument."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Conv2d(inside, width, 1, stride, bias=False) if inside != width else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + shortcut)


class TheirResNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.checkpointing = nn.Conv2d(3, width, 3, 1, 1, bias=False), False
        for stage in range(4):
            wide, stride = width * 2**stage, 1 if stage == 0 else 2
            blocks = BasicBlock(wide if stage == 0 else wide // 2, wide, stride), BasicBlock(wide, wide, 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(8 * width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.fc(x.mean(dim=(2, 3)))
