"""Classifiers that see attention maps alone: how much of an image or a sentence do they hold?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Wang et al. 2021, B.1, have "a 12-layer DenseNet", pooled after the 4th and 7th layer, with a "hidden
# dimension" of 256 that pooling doubles. Read here as: the layers between two poolings add up to that many
# channels.
LAYERS = 4, 3, 5
WIDTH = 256


class DenseSegment(nn.Module):
    """3×3 convolutions that each read what came in and what all before them made; returns what they made."""

    def __init__(self, inside: int, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for number in range(layers):
            new = width // layers + (number < width % layers)
            convolution = nn.Conv2d(inside, new, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            self.layers.append(nn.Sequential(convolution, nn.BatchNorm2d(new), nn.ReLU()))
            inside += new

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inside, height, width) → (batch, width of the segment, height, width)."""
        seen = [x]
        for layer in self.layers:
            seen.append(layer(torch.cat(seen, dim=1)))
        return torch.cat(seen[1:], dim=1)


class MapProbe(nn.Module):
    """Classifies what one pixel attends to: its row of a map, as an image with the heads as channels.

    Args:
        channels: of the input, usually the number of heads.
        classes: number of classes.
        width: channels before the first pooling; each doubles them.
    """

    def __init__(self, channels: int, classes: int, width: int = WIDTH) -> None:
        super().__init__()
        self.segments = nn.ModuleList()
        for number, layers in enumerate(LAYERS):
            self.segments.append(DenseSegment(channels, width * 2**number, layers))
            channels = width * 2**number
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) → logits (batch, classes)."""
        for number, segment in enumerate(self.segments):
            x = segment(F.max_pool2d(x, 2, ceil_mode=True) if number else x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits


TEXT_LAYERS, TEXT_WIDTH = 3, 64


class TextMapProbe(nn.Module):
    """Classifies a sentence by one layer's maps, with the heads as channels; padding does not change it.

    3×3 convolutions with batch norms, the mean over all pairs of tokens, and a linear layer. Cells of padding
    are zeros for every convolution, as what is beyond the map's edge, and no norm counts them.

    Args:
        channels: number of heads.
        classes: number of classes.
        width: channels of the convolutions.
    """

    def __init__(self, channels: int, classes: int, width: int = TEXT_WIDTH) -> None:
        super().__init__()
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        for _ in range(TEXT_LAYERS):
            convolution = nn.Conv2d(channels, width, 3, padding=1, bias=False)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            self.convolutions.append(convolution)
            self.norms.append(nn.BatchNorm1d(width))
            channels = width
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Maps (batch, heads, query, key) and numbers of tokens (batch,) → logits (batch, classes).

        Tokens stand before padding.
        """
        longest = int(lengths.max())
        x = x[:, :, :longest, :longest]  # less to compute
        real = torch.arange(longest, device=x.device) < lengths.unsqueeze(1)
        both = real.unsqueeze(2) & real.unsqueeze(1)
        x = x.masked_fill(~both.unsqueeze(1), 0.0)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            cells = norm(convolution(x).permute(0, 2, 3, 1)[both].float())  # (cells, channels)
            x = cells.new_zeros(*both.shape, cells.shape[1])
            x[both] = cells.relu()
            x = x.permute(0, 3, 1, 2)
        logits: Tensor = self.head(x.sum(dim=(2, 3)) / lengths.unsqueeze(1) ** 2)
        return logits
