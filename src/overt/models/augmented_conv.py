"""A convolution beside an attention over pixels (Bello et al. 2019), whose map passes through mechanisms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overt import _check
from overt.mechanisms.attention_map import AttentionMap
from overt.mechanisms.backend import maps_wanted
from overt.mechanisms.call import AttentionCall
from overt.mechanisms.chain import Chain, around
from overt.mechanisms.fused import of_equal_widths
from overt.mechanisms.mechanism import Mechanism
from overt.mechanisms.scores import RelativePosition2d, places_in
from overt.mechanisms.seen import Seen
from overt.mechanisms.site import Site
from overt.mechanisms.widening import ALIGNED, Pixels, fits, widened

Size = int | tuple[int, int]


def pair(name: str, size: Size, least: int = 1) -> tuple[int, int]:
    """Height and width."""
    both = (size, size) if isinstance(size, int) else size
    if not isinstance(both, Sequence) or isinstance(both, str) or len(both) != 2:
        raise ValueError(f"{name} must be a whole number, or height and width, got {size!r}")
    height, width = both
    _check.whole(name, height, least)
    _check.whole(name, width, least)
    return height, width


class AugmentedConv2d(nn.Module):
    """concat[convolution(x), attention(x)], a drop-in for an `nn.Conv2d` of the same channels and stride.

    Queries, keys and values are 1×1 convolutions of the input, which is average-pooled once for each stride
    of 2, and once more for `pool=2`; the heads' outputs pass through a 1×1 convolution and are upsampled to
    the convolution's size. Relative positions are part of the logits.

    Args:
        in_channels: of the input.
        out_channels: of the output, convolution and attention together.
        kernel_size: of the convolution; odd, padded to keep the size.
        stride: of the convolution, 1 or 2.
        heads: number of heads.
        key_channels: of queries and of keys, of all heads together; None for a fifth of `out_channels`,
            rounded to a multiple of `heads`, but at least 20 per head.
        value_channels: of values, all heads; None for a tenth of `out_channels`, rounded likewise.
        size: height and width of the output for the largest image; smaller ones work too.
        pool: 2 attends at half the output's height and width.
        mechanisms: of the map, such as `Evolving()` and `Bayesian()`.
        layer: place among the network's attentions, from 0.
        start: whether a chain of maps starts here.
        scale_positions: whether the position terms are scaled with the products, as by Bello et al. and in
            the released code, or not, as in equation 2.
        bias: whether the convolution has a bias.
        half_pixel: whether upsampling takes a pixel's place to be its centre, or its corner, as TensorFlow 1
            does, and with it the released code.

    Attributes:
        surrounding: gives the chain of a pass to which none is passed.
    """

    surrounding: Callable[[], Chain | None]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size = 3,
        stride: Size = 1,
        *,
        heads: int = 8,
        key_channels: int | None = None,
        value_channels: int | None = None,
        size: Size,
        pool: int = 1,
        mechanisms: Sequence[Mechanism] = (),
        layer: int = 0,
        start: bool = False,
        scale_positions: bool = True,
        bias: bool = False,
        half_pixel: bool = True,
    ) -> None:
        super().__init__()
        for name, number in (("in_channels", in_channels), ("out_channels", out_channels), ("heads", heads)):
            _check.whole(name, number, 1)
        kernel_size, stride = (
            _one(name, x) for name, x in (("kernel_size", kernel_size), ("stride", stride))
        )
        _check.one_of("stride", stride, (1, 2))
        _check.one_of("pool", pool, (1, 2))
        if not isinstance(kernel_size, int) or kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {kernel_size}")
        key_channels = channels(0.2 * out_channels, heads, 20) if key_channels is None else key_channels
        value_channels = channels(0.1 * out_channels, heads) if value_channels is None else value_channels
        for name, number in (("key_channels", key_channels), ("value_channels", value_channels)):
            _check.whole(name, number, 1)
            if number % heads:
                raise ValueError(f"{name} must be a multiple of heads ({heads}), got {number}")
        if value_channels >= out_channels:
            raise ValueError(
                f"value_channels must be less than out_channels ({out_channels}), got {value_channels}: "
                "nothing would be left for the convolution; try fewer heads"
            )
        self.in_channels, self.out_channels, self.stride, self.pool = in_channels, out_channels, stride, pool
        self.heads, self.key_channels, self.value_channels = heads, key_channels, value_channels
        self.size, self.scale_positions, self.surrounding = pair("size", size), scale_positions, around
        self.half_pixel = half_pixel
        rest = out_channels - value_channels
        self.conv = nn.Conv2d(in_channels, rest, kernel_size, stride, kernel_size // 2, bias=bias)
        self.qkv = nn.Conv2d(in_channels, 2 * key_channels + value_channels, 1)
        self.out = nn.Conv2d(value_channels, value_channels, 1)
        height, width = self.map_size
        self.position = RelativePosition2d(key_channels // heads, height, width)
        self.map = AttentionMap(mechanisms, Site(heads, key_channels // heads, layer=layer, start=start))
        self.reset_parameters()

    @property
    def map_size(self) -> tuple[int, int]:
        """Height and width of what is attended to in the largest image."""
        height, width = self.size
        return -(-height // self.pool), -(-width // self.pool)

    def reset_parameters(self) -> None:
        """Draw all weights anew."""
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")
        for projection in (self.qkv, self.out):  # no ReLU follows
            nn.init.xavier_uniform_(projection.weight)
        for convolution in (self.conv, self.qkv, self.out):
            if convolution.bias is not None:
                nn.init.zeros_(convolution.bias)
        self.position.reset_parameters()
        for layer in self.map.layers:
            layer.reset_parameters()

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        height, width = self.size
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, size={height}×{width}"

    def forward(self, x: Tensor, chain: Chain | None = None) -> Tensor:
        """(batch, in_channels, height, width) → (batch, out_channels, height / stride, width / stride).

        Args:
            x: the image.
            chain: of this forward pass; by default that of the surrounding `with chain:`.
        """
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"images must be (batch, {self.in_channels}, height, width), got {tuple(x.shape)}"
            )
        chain = chain or self.surrounding() or Chain()
        convolved = self.conv(x)
        self._check(convolved.shape[-2:])
        attended = self._attend(self._pooled(x, chain), chain)
        if attended.shape[-2:] != convolved.shape[-2:]:
            attended = self._upsampled(attended, convolved.shape[-2:])
        # Autocast upsamples in float32, in which all that follows would stay.
        return torch.cat([convolved, attended.to(convolved.dtype)], dim=1)

    def _check(self, size: torch.Size) -> None:
        (height, width), (most_height, most_width) = size, self.size
        if height > most_height or width > most_width:
            raise ValueError(
                f"an output of {height} × {width} is larger than this layer was built for: "
                f"make it with size=({height}, {width}) instead of ({most_height}, {most_width})"
            )

    def _pooled(self, x: Tensor, chain: Chain) -> Tensor:
        """The input at the size of the attention."""
        for halves in (self.stride, self.pool):
            if halves == 2:
                x = pooled_by_products(x, chain) if x.is_cuda else pooled(x)
        return x

    def _upsampled(self, image: Tensor, size: torch.Size) -> Tensor:
        if self.half_pixel:
            return F.interpolate(image, size=size, mode="bilinear", align_corners=False)
        return _from_corners(_from_corners(image, 2, size[0]), 3, size[1])

    def _attend(self, x: Tensor, chain: Chain) -> Tensor:
        batch, _, height, width = x.shape
        # A view, whichever of channels and pixels come last in memory: (batch, pixels, channels).
        pixels = self.qkv(x).permute(0, 2, 3, 1).flatten(1, 2)
        call = self._call(pixels, (height, width), chain)
        mixed = self._mix(call, chain)[..., : self.value_channels // self.heads]
        image = mixed.transpose(1, 2).reshape(batch, height, width, self.value_channels)
        out: Tensor = self.out(image.permute(0, 3, 1, 2))
        return out

    def _call(self, pixels: Tensor, size: tuple[int, int], chain: Chain) -> AttentionCall:
        """The call of the map: positions are part of queries and keys, or of ready logits.

        Values may be wider than a head's, and end in zeros.
        """
        heads, widths = self.heads, [self.key_channels, self.key_channels, self.value_channels]
        q, k, v = (
            part.view(*part.shape[:2], heads, part.shape[2] // heads).transpose(1, 2)
            for part in torch.split(pixels, widths, dim=2)  # (batch, heads, pixels, dim)
        )
        site, position, scale = self.map.site, self.position, q.shape[-1] ** -0.5
        seen = Seen()  # explicit: compilers do not follow the default
        if not self.map.reads_logits_only:
            scaled = q * scale
            logits = scaled @ k.mT + position(scaled if self.scale_positions else q, k.shape[-2], size=size)
            return AttentionCall(site, q, k, v, scale, logits=logits, seen=seen)
        before, after = (1.0, scale) if self.scale_positions else (scale, 1.0)
        if fits(pixels, heads, v.shape[-1], size, chain):
            given = Pixels(pixels, position.vertical, position.horizontal)
            equal = not self.map.any_width  # as torch's kernels need, see `_mix`
            query, key, value = widened(given, size, heads, v.shape[-1], before, equal)
        else:
            (query, key), value = self._widen(q, k, before, size, chain), v
        return AttentionCall(site, query, key, value, after, prior_key=k, seen=seen)

    def _widen(
        self, q: Tensor, k: Tensor, scale: float, size: tuple[int, int], chain: Chain
    ) -> tuple[Tensor, Tensor]:
        fill = -(q.shape[-1] + sum(size)) % ALIGNED if q.is_cuda else 0
        key = "places", size, fill, k.dtype, k.device
        places = chain.once(key, lambda: places_in(*size, k.device, k.dtype, fill))
        return self.position.widen(q, k, scale, size, places)

    def _mix(self, call: AttentionCall, chain: Chain) -> Tensor:
        wanted = maps_wanted()
        if not self.map.has_mechanism and not wanted:
            call = of_equal_widths(call) if call.value.is_cuda else call
            return F.scaled_dot_product_attention(call.query, call.key, call.value, scale=call.scale)
        fused = self.map.attend(call, chain, "maps are wanted" if wanted else None)
        if fused is not None:
            return fused
        weights: Tensor = self.map(call, chain)
        return weights.to(call.value.dtype) @ call.value


def pooled(x: Tensor) -> Tensor:
    """The mean over 3×3 pixels, every other row and column; pixels beyond the border are left out."""
    return F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)


def pooled_by_products(x: Tensor, chain: Chain) -> Tensor:
    """As `pooled`, by products with the rows and columns to add up.

    On a GPU, torch's gradient of padded pooling is wrong for channels last (its issue 188344), and slow.

    Args:
        x: (batch, channels, height, width).
        chain: of this forward pass.
    """
    batch, channels, height, width = x.shape

    def windows(length: int) -> Tensor:
        """1/4 for the pixels of each window, (windows, length), so that their sums stay in range."""
        middle = torch.arange(0, length, 2, device=x.device).view(-1, 1)
        return ((torch.arange(length, device=x.device) - middle).abs() <= 1).to(x.dtype) / 4

    def make() -> tuple[Tensor, Tensor, Tensor]:
        down, across = windows(height), windows(width)
        shares = down.sum(dim=1).view(-1, 1, 1) * across.sum(dim=1).view(-1, 1)
        return down, across, shares  # the last (rows, columns, 1), exact in half precision

    down, across, shares = chain.once(("pooled", height, width, x.dtype, x.device), make)
    rows, columns = len(down), len(across)
    lines = x.permute(0, 2, 3, 1).reshape(batch, height, width * channels)
    with torch.autocast(x.device.type, enabled=False):  # it would cut float32
        added = torch.bmm(down.expand(batch, -1, -1), lines).view(batch * rows, width, channels)
        added = torch.bmm(across.expand(batch * rows, -1, -1), added).view(batch, rows, columns, channels)
    return (added / shares).permute(0, 3, 1, 2)


def _from_corners(image: Tensor, axis: int, length: int) -> Tensor:
    """Linear upsampling of one axis: pixel i lies at i·old / length; past the last one it is constant."""
    old = image.shape[axis]
    place = torch.arange(length, device=image.device) * (old / length)
    low = place.long()
    share = (place - low).to(image.dtype).view(-1, *[1] * (image.dim() - 1 - axis))
    below, above = (image.index_select(axis, index.clamp(max=old - 1)) for index in (low, low + 1))
    return below + share * (above - below)


def _one(name: str, size: Size) -> int:
    """A whole number, which may be given twice, as to `nn.Conv2d`."""
    height, width = pair(name, size)
    if height != width:
        raise ValueError(f"{name} must be the same in both directions, got {size}")
    return height


def channels(number: float, heads: int, least: int = 1) -> int:
    """The multiple of `heads` nearest to a number of channels, and at least `least` per head."""
    return heads * max(least, round(number / heads))
