"""Attention-augmented ResNets against published FLOPs, timm's network and Bello et al.'s positions."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import overt
from overt.mechanisms.evolving import zeros
from overt.models.augmented_conv import pooled_by_products
from overt.models.resnet import DEPTHS
from overt.vision import AugmentedConv2d, ResNet, resnet

FLOPS = {"aa-resnet": (7.08, 8.38, 16.32, 24.16), "ea-aa-resnet": (7.93, 8.78, 17.48, 26.07)}


def on_meta(name: str, **arguments: object) -> ResNet:
    with torch.device("meta"):
        return resnet(name, **arguments)  # type: ignore[arg-type]


# --- FLOPs ---


@pytest.mark.parametrize("depth", [34, 50, *(pytest.param(n, marks=pytest.mark.slow) for n in (101, 152))])
@pytest.mark.parametrize("kind", FLOPS)
def test_flops_are_those_of_the_architecture_and_within_two_percent_of_print(kind: str, depth: int) -> None:
    billions = on_meta(f"{kind}-{depth}").flops() / 1e9
    assert round(billions, 2) == FLOPS[kind][list(DEPTHS).index(depth)]
    assert abs(billions / DEPTHS[depth].published[kind][1] - 1) < 0.02


def test_flops_of_a_small_network_are_those_counted_by_hand() -> None:
    model = resnet("ea-aa-resnet-34", 7, stem="cifar", size=16, width=16, blocks=[1, 1, 1, 1])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def products(*numbers: int) -> int:
        return 2 * math.prod(numbers)

    total = products(256, 16, 3, 9) + products(2, 256, 16, 16, 9) + products(128, 7)
    inside = 16
    for width, side, map_side in ((32, 8, 4), (64, 4, 4), (128, 2, 2)):
        keys, values = 8 * max(1, round(width / 32)), 8 * max(1, round(width / 64))
        pixels, cells = side * side, map_side**4
        total += products(pixels, width, inside)  # the shortcut
        for channels in (inside, width):
            total += products(pixels, width - values, channels, 9)
            total += products(map_side**2, 2 * keys + values, channels) + products(
                map_side**2, values, values
            )
            total += products(cells, keys + values) + products(2 * map_side**2, 2 * map_side - 1, keys)
        # Both maps of a stage are convolved, but for the first of the second and of the last stage.
        total += (1 if side in (8, 2) else 2) * products(cells, 8, 8, 9)
        inside = width
    assert model.flops() == total
    assert model.flops(8) < total / 3
    assert copy.deepcopy(model).half().flops() == total
    assert model.training, "its mode is as before"
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="images of 20 × 20 are larger"):
        model.flops(20)


# --- Others' networks ---

# Logits of timm 1.0.31's ResNet(BasicBlock, (1, 1, 1, 1)), and with Bottleneck, for `filled` weights.
GOLDEN = {
    34: [[1.723330, 3.601985, 3.760135, 2.020781], [1.583579, 3.626425, 4.086992, 2.202968]],
    50: [[-0.143013, 0.470625, -0.573140, 1.835901], [-0.454328, 0.341560, -0.510421, 1.799188]],
}


def scattered(shape: tuple[int, ...], number: int) -> Tensor:
    """Numbers between −1 and 1 that look random and are the same on any machine."""
    steps = torch.arange(math.prod(shape))
    mixed = (steps * 25173 + number * 13849) % 65536
    mixed = mixed * (mixed + steps // 7 + 12345) % 65521
    return (mixed.double() / 32760 - 1).float().reshape(shape)


def filled(model: nn.Module) -> nn.Module:
    """A network whose weights follow a formula, of about the size that keeps activations in bounds."""
    with torch.no_grad():
        for number, tensor in enumerate(model.state_dict().values()):
            if not tensor.is_floating_point():
                continue
            values = scattered(tuple(tensor.shape), number)
            if tensor.dim() > 1:
                tensor.copy_(values * (6.0 / tensor[0].numel()) ** 0.5)
            else:  # weights and biases of norms, their means and variances
                tensor.copy_(0.5 + 0.25 * values)
    return model


@pytest.mark.parametrize("depth", GOLDEN)
def test_without_attention_it_computes_what_timms_resnet_does(depth: int) -> None:
    model = filled(resnet(f"resnet-{depth}", 4, blocks=[1, 1, 1, 1])).eval()
    with torch.no_grad():
        logits = model(scattered((2, 3, 64, 64), 1))
    torch.testing.assert_close(logits, torch.tensor(GOLDEN[depth]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("height", "width"), [(3, 3), (2, 5)])
def test_positions_are_bello_et_als_skewed_products(height: int, width: int) -> None:
    torch.manual_seed(0)
    position = overt.RelativePosition2d(6, height, width).double()
    query = torch.randn(2, 3, height * width, 6, dtype=torch.float64)

    def skewed(relative: Tensor) -> Tensor:
        """(…, n, 2n − 1), by distance → (…, n, n), by place: each row is shifted one further to the left."""
        n = relative.shape[-2]
        flat = F.pad(F.pad(relative, (0, 1)).flatten(-2), (0, n - 1))
        return flat.unflatten(-1, (n + 1, 2 * n - 1))[..., :n, n - 1 :]

    image = query.unflatten(2, (height, width))
    across = skewed(image @ position.horizontal.mT)  # (…, height, width, key column)
    down = skewed(image.transpose(2, 3) @ position.vertical.mT)  # (…, width, height, key row)
    want = across.unsqueeze(-2) + down.transpose(2, 3).unsqueeze(-1)
    torch.testing.assert_close(position(query, height * width), want.flatten(-2).flatten(2, 3))
    key = torch.randn(2, 3, height * width, 6, dtype=torch.float64)
    long_query, long_key = position.widen(query, key, 0.5)
    want = want.flatten(-2).flatten(2, 3) + 0.5 * query @ key.mT
    torch.testing.assert_close(long_query @ long_key.mT, want)


@pytest.mark.parametrize("last", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(14, 10), (7, 9), (1, 2)])
def test_pooling_by_products_is_torchs_average_over_windows(
    size: tuple[int, int], last: torch.memory_format
) -> None:
    x = torch.randn(3, 5, *size, dtype=torch.float64).contiguous(memory_format=last).requires_grad_()
    want, got = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), pooled_by_products(x, overt.Chain())
    torch.testing.assert_close(got, want)
    to_out = torch.randn_like(want)
    torch.testing.assert_close(torch.autograd.grad(got, x, to_out), torch.autograd.grad(want, x, to_out))


def test_pooling_by_products_stays_in_the_range_of_half_precision() -> None:
    x = torch.full((1, 2, 6, 6), 3e4, dtype=torch.float16)
    torch.testing.assert_close(pooled_by_products(x, overt.Chain()), torch.full_like(x[..., ::2, ::2], 3e4))
    with torch.autocast("cpu", torch.bfloat16):
        whole = pooled_by_products(torch.full((1, 2, 6, 6), 1.001), overt.Chain())
    torch.testing.assert_close(whole, torch.full((1, 2, 3, 3), 1.001))


def test_a_checkpointed_layer_compiles_into_one_graph() -> None:
    layer = AugmentedConv2d(4, 8, 3, heads=2, key_channels=4, value_channels=2, size=(4, 4), pool=2)
    x = torch.randn(2, 4, 4, 4, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(layer, x, overt.Chain(), use_reentrant=False)
        return out

    torch.compiler.reset()
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, layer(x, overt.Chain()))


# --- What maps take from those below ---


def test_at_224_the_third_stages_maps_depend_on_the_seconds_and_the_fourths_not_on_the_thirds() -> None:
    torch.manual_seed(0)
    model = resnet("ea-aa-resnet-34", 2, width=16, blocks=[1, 1, 1, 1], zero_init_last=False)
    layers = [module for module in model.modules() if isinstance(module, AugmentedConv2d)]
    for layer in (layers[2], layers[4]):  # a stage's first map sees those below through the chain alone
        layer.register_forward_pre_hook(lambda _module, inputs: (inputs[0].detach(), *inputs[1:]))
    chain = overt.Chain()
    model(torch.randn(1, 3, 224, 224), chain=chain)
    maps = [chain.maps["Evolving", "encoder", number] for number in range(6)]
    assert [tuple(evolved.shape[-2:]) for evolved in maps] == [(196, 196)] * 4 + [(49, 49)] * 2
    (joined,) = torch.autograd.grad(maps[2].sum(), maps[1], retain_graph=True)
    (apart,) = torch.autograd.grad(maps[4].sum(), maps[3], allow_unused=True)
    assert bool(joined.any())
    assert apart is None


def test_zeros_are_counted_as_the_relu_leaves_them() -> None:
    chain, hidden = overt.Chain(), -math.inf
    first = torch.tensor([[1.0, 0.0, hidden], [0.0, 0.0, hidden], [0.0, 0.0, 2.0], [hidden, hidden, hidden]])
    chain.maps["Evolving", "encoder", 1] = first.view(1, 1, 4, 3)
    found = zeros(chain)["encoder", 1]
    assert found == (pytest.approx(5 / 7), pytest.approx(1 / 3))
    with pytest.raises(ValueError, match="chain must hold evolved maps"):
        zeros(overt.Chain())


def test_at_beta_one_about_half_of_all_cells_start_at_zero_and_few_rows() -> None:
    torch.manual_seed(0)
    mechanisms = [overt.Evolving(alpha=0.5, beta=1.0, init="lecun")]
    sizes: dict[str, Any] = {"width": 16, "blocks": [1, 2, 1, 1], "size": 112}
    model = resnet("ea-aa-resnet-34", 2, mechanisms=mechanisms, zero_init_last=False, **sizes)
    chain = overt.Chain()
    model(torch.randn(2, 3, 112, 112), chain=chain)
    evolved = [share for (_, layer), share in zeros(chain).items() if 0 < layer < 6]
    assert 0.3 < sum(share.cells for share in evolved) / len(evolved) < 0.7
    assert sum(share.rows for share in evolved) / len(evolved) < 0.1
    assert zeros(chain)["encoder", 0] == (0.0, 0.0)


# --- The released code ---


def test_the_released_codes_preset_starts_and_averages_as_it_does() -> None:
    torch.manual_seed(0)
    model = resnet("ea-aa-resnet-50", 2, preset="official")
    layers = [module for module in model.modules() if isinstance(module, AugmentedConv2d)]
    state = model.state_dict()
    width = layers[0].key_channels // 8
    vectors = torch.cat([state[f"layer2.{n}.conv2.position.vertical"].flatten() for n in range(4)])
    assert float(vectors.mean()) == pytest.approx(width**-0.5, abs=4 * vectors.numel() ** -0.5)
    assert float(vectors.std()) == pytest.approx(1.0, abs=4 * (2 * vectors.numel()) ** -0.5)
    kernels = torch.cat([tensor.flatten() for name, tensor in state.items() if "evolving.weight" in name])
    assert float(kernels.std()) == pytest.approx(72**-0.5, rel=0.03)
    assert float(kernels.abs().max()) <= 2 * 72**-0.5 / 0.8796 + 1e-6, "cut off at two standard deviations"
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all(norm.momentum == pytest.approx(0.003) for norm in norms)
    assert all(bool((norm.weight == 1).all()) for norm in norms)
    plain = [module for module in on_meta("ea-aa-resnet-50").modules() if isinstance(module, nn.BatchNorm2d)]
    assert {norm.momentum for norm in plain} == {0.1}


@pytest.mark.parametrize("side", [6, 5])
def test_without_half_pixels_upsampling_reads_corners(side: int) -> None:
    torch.manual_seed(0)
    layer = AugmentedConv2d(
        3, 12, 3, heads=2, key_channels=4, value_channels=4, size=side, pool=2, half_pixel=False
    )
    small: list[Tensor] = []
    layer.out.register_forward_hook(lambda _module, _inputs, output: small.append(output))
    got = layer(torch.randn(1, 3, side, side))[0, 8:]
    image, old = small[0][0], small[0].shape[-1]
    assert old == 3

    def at(row: float, column: float) -> Tensor:
        """The value between four neighbours, by their distance; none lies beyond the last row or column."""
        value = torch.zeros(4)
        for y in (math.floor(row), math.floor(row) + 1):
            for x in (math.floor(column), math.floor(column) + 1):
                share = (1 - abs(row - y)) * (1 - abs(column - x))
                value = value + share * image[:, min(y, old - 1), min(x, old - 1)]
        return value

    for i in range(side):
        for j in range(side):
            torch.testing.assert_close(got[:, i, j], at(i * old / side, j * old / side))
