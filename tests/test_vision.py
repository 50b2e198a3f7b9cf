"""Attention-augmented ResNets: sizes to the unit, what attends to what, and agreement with other forms."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overt
from overt.models.resnet import DEPTHS, KINDS
from overt.vision import AugmentedConv2d, ResNet, resnet

COUNTS = {
    "aa-resnet-34": 20_692_200,
    "aa-resnet-50": 25_782_256,
    "aa-resnet-101": 45_365_848,
    "aa-resnet-152": 61_566_848,
    "ea-aa-resnet-34": 20_706_216,
    "ea-aa-resnet-50": 25_788_680,
    "ea-aa-resnet-101": 45_382_200,
    "ea-aa-resnet-152": 61_593_128,
}
EVOLVING = overt.Evolving(alpha=0.5, beta=1.0)


def on_meta(name: str, **arguments: object) -> ResNet:
    with torch.device("meta"):
        return resnet(name, **arguments)  # type: ignore[arg-type]


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def images(batch: int = 2, side: int = 32, seed: int = 0, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, side, side, generator=torch.Generator().manual_seed(seed))


def augmented(model: nn.Module) -> list[AugmentedConv2d]:
    return [module for module in model.modules() if isinstance(module, AugmentedConv2d)]


@functools.cache
def small() -> ResNet:
    """An EA-AA-ResNet-34 for CIFAR, whose batch norms have seen images: else it amplifies rounding."""
    torch.manual_seed(0)
    model = resnet("ea-aa-resnet-34", 10, stem="cifar", zero_init_last=False).train()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(images(16, seed=7))
    return model.eval()


# --- Sizes ---


@pytest.mark.parametrize("name", COUNTS)
def test_networks_have_as_many_parameters_as_the_paper_says(name: str) -> None:
    model = on_meta(name)
    assert size(model) == COUNTS[name]
    kind, depth = name.rsplit("-", 1)
    assert round(size(model) / 1e6, 1) == DEPTHS[int(depth)].published[kind][0]


def test_the_released_codes_resnet_50_is_smaller_than_the_papers() -> None:
    sizes = [size(on_meta(f"{kind}-resnet-50", preset="official")) for kind in ("aa", "ea-aa")]
    assert sizes == [24_961_288, 24_967_712]


@pytest.mark.parametrize("depth", DEPTHS)
def test_chains_start_where_the_shape_of_maps_changes_and_nowhere_else(depth: int) -> None:
    layers = augmented(on_meta(f"ea-aa-resnet-{depth}"))
    starts = [number for number, layer in enumerate(layers) if layer.map.site.starts]
    sides = [layer.position.height for layer in layers]
    assert sides == sorted(sides, reverse=True)
    assert set(sides) == {14, 7}  # the second stage is pooled to the size of the third
    assert starts == [0, sides.index(7)]
    assert [layer.map.site.layer for layer in layers] == list(range(len(layers)))
    assert all(not list(layers[number].map.parameters()) for number in starts)


def test_every_parameter_has_a_gradient() -> None:
    model = resnet("ea-aa-resnet-34", 10, stem="cifar", zero_init_last=False)
    model(images(4)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def lasts(model: ResNet) -> list[Tensor]:
    """The weights of the norm that ends each block."""
    blocks = [block for stage in range(1, 5) for block in model.get_submodule(f"layer{stage}")]
    return [(block.bn3 if hasattr(block, "bn3") else block.bn2).weight.detach() for block in blocks]


@pytest.mark.parametrize("depth", [34, 50])
def test_blocks_start_as_the_identity_unless_asked_otherwise_or_as_released(depth: int) -> None:
    name, sizes = f"aa-resnet-{depth}", {"num_classes": 2, "width": 16, "blocks": [1, 1, 1, 1]}
    for arguments, start in (({}, 0.0), ({"zero_init_last": True}, 0.0), ({"zero_init_last": False}, 1.0)):
        model = resnet(name, **sizes, **arguments)  # type: ignore[arg-type]
        assert {float(weight) for last in lasts(model) for weight in last} == {start}
        assert model.settings is not None
        assert model.settings["zero_init_last"] is (start == 0.0)
    if depth == 50:
        model = resnet(name, **sizes, preset="official")  # type: ignore[arg-type]
        assert {float(weight) for last in lasts(model) for weight in last} == {1.0}


def test_gradients_start_no_larger_than_those_of_the_plain_network() -> None:
    def norm(name: str, **arguments: bool) -> float:
        torch.manual_seed(0)
        model = resnet(name, 10, stem="cifar", width=32, **arguments).train()
        loss = F.cross_entropy(model(images(8)), torch.arange(8))
        (gradient,) = torch.autograd.grad(loss, [model.conv1.weight])
        return float(gradient.norm())

    plain = norm("resnet-34", zero_init_last=False)
    assert norm("aa-resnet-34") < plain
    assert norm("aa-resnet-34", zero_init_last=False) > 2 * plain, "what the default avoids"


@pytest.mark.parametrize("depth", [34, 50])
def test_without_attention_it_is_hugging_faces_resnet(depth: int) -> None:
    from transformers import ResNetConfig, ResNetForImageClassification

    deep = depth == 50
    torch.manual_seed(0)
    ours = resnet(f"resnet-{depth}", 7, zero_init_last=False).eval()
    for module in ours.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    widths = [64, 128, 256, 512]
    config = ResNetConfig(
        depths=list(DEPTHS[depth].blocks), hidden_sizes=[4 * w for w in widths] if deep else widths,
        layer_type="bottleneck" if deep else "basic", num_labels=7,
    )  # fmt: skip
    theirs = ResNetForImageClassification(config).eval()

    # Both list the same modules in the same order, but for where a block's shortcut is.
    def order(names: list[str], shortcut: str) -> list[str]:
        return [n for n in names if shortcut not in n] + [n for n in names if shortcut in n]

    mine, other = ours.state_dict(), theirs.state_dict()
    pairs = zip(order(list(mine), "downsample"), order(list(other), "shortcut"), strict=True)
    theirs.load_state_dict({there: mine[here] for here, there in pairs})
    x = images(1, 64)
    torch.testing.assert_close(ours(x), theirs(x).logits, rtol=1e-4, atol=1e-4)


# --- What attends to what ---


def test_at_alpha_and_beta_zero_it_is_the_network_without_evolving() -> None:
    torch.manual_seed(0)
    arguments: dict[str, Any] = {"num_classes": 5, "stem": "cifar", "zero_init_last": False}
    plain = resnet("aa-resnet-34", **arguments).double()
    still = resnet("aa-resnet-34", mechanisms=[overt.Evolving(alpha=0.0, beta=0.0)], **arguments).double()
    missing, unexpected = still.load_state_dict(plain.state_dict(), strict=False)
    assert unexpected == []
    assert all(".map.evolving." in name for name in missing)
    x, names = images().double(), [name for name, _ in plain.named_parameters()]

    def gradients(model: ResNet) -> list[Tensor]:
        out = model(x)
        parameters = dict(model.named_parameters())
        return [out, *torch.autograd.grad(out.square().sum(), [parameters[name] for name in names])]

    torch.testing.assert_close(gradients(still), gradients(plain), rtol=1e-8, atol=1e-10)


def test_chains_go_on_across_stages_and_end_where_maps_change_their_shape() -> None:
    model, maps, carry = small(), [], overt.Chain.carry

    def noting(self: overt.Chain, site: overt.mechanisms.Site, owner: str, left: Tensor) -> None:
        carry(self, site, owner, left)
        maps.append(left)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overt.Chain, "carry", noting)
        model(images())
    second, third = (2 * sum(DEPTHS[34].blocks[1:end]) for end in (2, 3))  # attentions below a stage
    assert maps[second].shape == maps[second - 1].shape
    assert maps[third].shape != maps[third - 1].shape
    # A map depends on the one below it through activations too, so the mechanism is asked for its part.
    for number, joined in ((second, True), (third, False)):
        layer = augmented(model)[number].map.layer_of(overt.Evolving)
        assert layer is not None
        assert bool(list(layer.parameters())) is joined
        changed = overt.Chain()
        changed.maps["Evolving", "encoder", number - 1] = torch.randn_like(maps[number - 1])
        shape = maps[number].shape
        logits = torch.zeros(shape)
        query, value = logits.new_zeros(*shape[:3], 4), logits.new_zeros(*shape[:2], shape[3], 4)
        call = overt.AttentionCall(layer.site, query, value, value, logits=logits)
        evolved = layer("refine", logits, call, changed)
        assert bool(evolved.any()) is joined


def test_images_of_a_batch_do_not_reach_each_other() -> None:
    model, x = small(), images(3)
    other = torch.cat([images(1, seed=5), x[1:]])
    with torch.no_grad():
        torch.testing.assert_close(model(other)[1:], model(x)[1:], rtol=1e-5, atol=1e-6)


def layer_of(**arguments: object) -> AugmentedConv2d:
    torch.manual_seed(1)
    settings = {"heads": 2, "key_channels": 8, "value_channels": 4, "size": (6, 6)} | arguments
    return AugmentedConv2d(6, 12, 3, **settings).double()  # type: ignore[arg-type]


def attended(layer: AugmentedConv2d, x: Tensor) -> Tensor:
    """The channels of the attention, (batch, channels, height, width)."""
    return layer(x)[:, layer.out_channels - layer.value_channels :]


def test_attention_without_positions_does_not_know_where_pixels_are_and_with_them_does() -> None:
    layer, x = layer_of(), images(2, 6, channels=6).double()
    order = torch.randperm(36, generator=torch.Generator().manual_seed(0))

    def moved(image: Tensor) -> Tensor:
        return image.flatten(2)[:, :, order].unflatten(2, (6, 6))

    assert not torch.allclose(attended(layer, moved(x)), moved(attended(layer, x)))
    for vectors in (layer.position.vertical, layer.position.horizontal):
        nn.init.zeros_(vectors)
    torch.testing.assert_close(attended(layer, moved(x)), moved(attended(layer, x)))


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("mechanism", [None, EVOLVING, overt.Synthesizer(max_length=36)])
def test_the_layer_is_the_paper_written_out(scaled: bool, mechanism: overt.Mechanism | None) -> None:
    mechanisms = [] if mechanism is None else [mechanism]
    layer, x = layer_of(mechanisms=mechanisms, scale_positions=scaled), images(2, 6, channels=6).double()
    if isinstance(mechanism, overt.Synthesizer):
        layer(x)  # its logits come from queries, without positions; only that it runs is asked here
        return
    q, k, v = layer.qkv(x).split([8, 8, 4], dim=1)
    heads = []
    for head in range(2):
        queries, keys = (part[:, 4 * head : 4 * head + 4].flatten(2).mT for part in (q, k))
        values = v[:, 2 * head : 2 * head + 2].flatten(2).mT
        logits = queries @ keys.mT / 2.0
        for i in range(36):
            for j in range(36):
                down, across = j // 6 - i // 6, j % 6 - i % 6
                vector = layer.position.vertical[down + 5] + layer.position.horizontal[across + 5]
                logits[:, i, j] += queries[:, i] @ vector / (2.0 if scaled else 1.0)
        heads.append((logits.softmax(dim=-1) @ values).mT)
    image = torch.cat(heads, dim=1).unflatten(2, (6, 6))
    want = torch.cat([F.conv2d(x, layer.conv.weight, padding=1), layer.out(image)], dim=1)
    torch.testing.assert_close(layer(x), want)  # a chain's first map is the softmax of its logits


@pytest.mark.parametrize(("stride", "pool", "side"), [(1, 1, 6), (2, 1, 3), (1, 2, 3), (2, 2, 2)])
def test_attention_is_pooled_for_strides_and_once_more_if_asked(stride: int, pool: int, side: int) -> None:
    layer = layer_of(stride=stride, pool=pool, size=6 // stride)
    seen = []
    layer.qkv.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape[-2:]))
    out = layer(images(1, 6, channels=6).double())
    assert seen == [(side, side)]
    assert out.shape == (1, 12, 6 // stride, 6 // stride)


def test_smaller_images_use_the_inner_position_vectors() -> None:
    large, small_layer = layer_of(size=(6, 6)), layer_of(size=(4, 5))
    state = large.state_dict()
    state["position.vertical"], state["position.horizontal"] = (
        state["position.vertical"][2:-2],
        state["position.horizontal"][1:-1],
    )
    small_layer.load_state_dict(state)
    x = torch.randn(1, 6, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(large(x), small_layer(x))


# --- Other ways to run it ---


def loss_and_gradients(model: ResNet, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    chain = overt.Chain(step=1)
    loss = model(x, chain=chain).float().square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_checkpointed_networks_have_the_same_gradients() -> None:
    mechanisms = [EVOLVING, overt.Bayesian(prior=None)]
    torch.manual_seed(0)
    model = resnet("ea-aa-resnet-34", 4, stem="cifar", mechanisms=mechanisms, zero_init_last=False)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0  # else what runs again counts twice
    want = loss_and_gradients(model, images())
    model.set_grad_checkpointing()
    torch.testing.assert_close(loss_and_gradients(model, images()), want, rtol=1e-4, atol=1e-5)
    chain = overt.Chain(step=1)
    model(images(), chain=chain)
    with pytest.raises(RuntimeError, match="a chain is for one forward pass"):
        model(images(), chain=chain)


def test_channels_last_agrees_with_plain() -> None:
    model, x = small(), images()
    with torch.no_grad():
        torch.testing.assert_close(
            model(x.to(memory_format=torch.channels_last)), model(x), rtol=1e-4, atol=1e-5
        )


def two_layers(mechanisms: list[overt.Mechanism]) -> tuple[AugmentedConv2d, AugmentedConv2d]:
    below, above = layer_of(mechanisms=mechanisms), layer_of(mechanisms=mechanisms, layer=1)
    above.conv, above.qkv = (nn.Conv2d(12, conv.out_channels, 1) for conv in (above.conv, above.qkv))
    above.in_channels = 12
    return below.float(), above.float()


@pytest.mark.parametrize("way", ["compiled", "autocast"])
def test_other_ways_to_run_it_agree_with_plain(way: str) -> None:
    below, above = two_layers([EVOLVING, overt.Bayesian(d_mid=3)])
    x = images(2, 6, channels=6)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        chain = overt.Chain(step=torch.tensor(3))
        return above(below(x, chain), chain), chain.kl()

    want = run(x)
    if way == "compiled":
        got = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        return
    with torch.autocast("cpu", torch.bfloat16):
        got = run(x)
    for a, b in zip(got, want, strict=True):
        assert float((a.float() - b).norm().detach() / b.norm().detach()) < 0.02


def test_it_answers_to_timms_calls() -> None:
    model, x = resnet("ea-aa-resnet-34", 10, stem="cifar", zero_init_last=False).eval(), images()
    features = model.forward_features(x)
    assert features.shape == (2, model.num_features, 4, 4)
    torch.testing.assert_close(model.forward_head(features), model(x))
    assert model.forward_head(features, pre_logits=True).shape == (2, 512)
    assert model.get_classifier() is model.fc
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    model.reset_classifier(0)
    assert model(x).shape == (2, 512)
    seen: dict[nn.Module, torch.Size] = {}
    modules = [model.get_submodule(info["module"]) for info in model.feature_info]
    for module in modules:
        module.register_forward_hook(lambda module, _, out: seen.update({module: out.shape}))
    model.forward_features(x)
    for module, info in zip(modules, model.feature_info, strict=True):
        side = 32 // info["reduction"]
        assert seen[module] == (2, info["num_chs"], side, side)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resnet("resnet-18"), "name must be one of resnet-34, resnet-50.*got 'resnet-18'"),
        (lambda: resnet("aa-resnet-34", preset="official"), "preset='official' is for aa-resnet-50"),
        (lambda: resnet("resnet-34", mechanisms=[EVOLVING]), "mechanisms are for networks with attention"),
        (lambda: resnet("aa-resnet-34", stem="mnist"), "stem must be .*got 'mnist'"),  # type: ignore[arg-type]
        (
            lambda: layer_of(value_channels=12),
            r"value_channels must be less than out_channels \(12\), got 12",
        ),
        (lambda: layer_of(key_channels=9), r"key_channels must be a multiple of heads \(2\), got 9"),
        (lambda: layer_of(stride=3), "stride must be .*got 3"),
        (lambda: small()(images(1, 40)), r"images of 40 × 40 are larger .*make it with size=\(40, 40\)"),
        (lambda: small()(images(1, channels=4)), r"images must be \(batch, 3, height, width\), got \(1, 4"),
        (
            lambda: layer_of(size=(3, 4, 4)),
            r"size must be a whole number, or height and width, got \(3, 4, 4\)",
        ),
        (lambda: layer_of(size=4.0), "size must be a whole number, or height and width, got 4.0"),
        (lambda: layer_of(stride=(1, 2)), r"stride must be the same in both directions, got \(1, 2\)"),
        (
            lambda: layer_of()(torch.zeros(6, 6, 6).double()),
            r"images must be \(batch, 6, height, width\), got",
        ),
        (lambda: resnet("aa-resnet-34", blocks=[1, 0, 1, 1]), "blocks must be .*got 0"),
        (lambda: resnet("aa-resnet-34", blocks=3), "blocks must be 4 whole numbers, .*got 3"),  # type: ignore[arg-type]
        (lambda: layer_of(size=4)(images(1, 6, channels=6).double()), r"6 × 6 is larger .*size=\(6, 6\)"),
    ],
)
def test_what_does_not_fit_is_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_a_lone_mechanism_is_named() -> None:
    with pytest.raises(TypeError, match="mechanisms must be a list, got a Evolving"):
        resnet("aa-resnet-34", mechanisms=EVOLVING)  # type: ignore[arg-type]


def test_kinds_are_those_of_the_table() -> None:
    assert all(tuple(depth.published) == KINDS for depth in DEPTHS.values())
