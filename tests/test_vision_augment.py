"""Attention in ResNets that were made elsewhere."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import overt
from fresh import fresh
from overt.vision import AugmentedConv2d, augment
from their_resnet import EVOLVING, TheirResNet


def network(*mechanisms: overt.Mechanism, plain: bool = False) -> TheirResNet:
    torch.manual_seed(0)
    model = TheirResNet()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0  # else what runs again counts twice
            nn.init.normal_(module.running_mean, std=0.1)
    if not plain:
        augment(model, *mechanisms, size=16)
    return model


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    for x in inputs:
        model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def layers(model: nn.Module) -> list[AugmentedConv2d]:
    return [module for module in model.modules() if isinstance(module, AugmentedConv2d)]


def test_every_3x3_convolution_of_the_last_stages_gets_attention_and_chains_go_on() -> None:
    found = layers(network(EVOLVING))
    assert len(found) == 12
    assert [layer.map.site.layer for layer in found] == list(range(12))
    assert [layer.map.site.starts for layer in found] == [n in (0, 8) for n in range(12)]
    assert [layer.position.height for layer in found] == [4] * 8 + [2] * 4


def test_filters_and_statistics_that_stay_are_the_networks_own() -> None:
    plain, model = network(plain=True), network(EVOLVING)
    assert isinstance(model.layer3[0].conv1, AugmentedConv2d)
    layer, kept = model.layer3[0].conv1, 64 - 8
    assert torch.equal(layer.conv.weight, plain.layer3[0].conv1.weight[:kept])
    assert torch.equal(model.layer3[0].bn1.running_mean[:kept], plain.layer3[0].bn1.running_mean[:kept])
    assert not model.layer3[0].bn1.running_mean[kept:].any()
    names = set(model.state_dict())
    assert not any("replaced" in name or name == "layer3.0.conv1.weight" for name in names), "no second copy"


def test_detach_gives_back_the_network_bit_for_bit() -> None:
    plain, model = network(plain=True), network(EVOLVING)
    with torch.no_grad():
        assert not torch.equal(plain.eval()(images()), model.eval()(images()))
    assert overt.detach(model) is model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    with torch.no_grad():
        assert torch.equal(plain(images()), model(images()))
    assert not model._forward_hooks
    augment(model, EVOLVING, size=16)
    with torch.no_grad():
        model.layer2[0].conv1.conv.weight += 1.0
    with pytest.warns(UserWarning, match="1 convolutions have been trained"):
        overt.detach(model)


SAVED = """
import os, torch, overt
os.chdir({!r})
from overt.vision import augment
from their_resnet import EVOLVING, TheirResNet
torch.manual_seed(9)
model = augment(TheirResNet(), EVOLVING, size=16)
model.load_state_dict(torch.load("augmented.pt"))
overt.vision.load_originals(model, "originals.safetensors")
torch.save(overt.detach(model).state_dict(), "plain.pt")
"""


def test_originals_come_back_bit_for_bit_in_another_process(tmp_path: Path) -> None:
    plain, model = network(plain=True).state_dict(), network(EVOLVING)
    optimizer = torch.optim.SGD(model.layer3.parameters(), lr=0.1)
    model(images()).square().mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "augmented.pt")
    overt.vision.save_originals(model, tmp_path / "originals.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["augmented.pt", "originals.safetensors"]
    _, failed = fresh(SAVED.format(str(tmp_path)))
    assert not failed, failed
    got = torch.load(tmp_path / "plain.pt")
    assert list(got) == list(plain)
    restored = [name for name in plain if name.startswith(("layer2", "layer3", "layer4"))]
    restored = [name for name in restored if "downsample" not in name]
    assert len(restored) == 12 * 6
    assert all(torch.equal(got[name], plain[name]) for name in restored)
    assert not torch.equal(got["layer3.0.downsample.weight"], plain["layer3.0.downsample.weight"]), "trained"


def test_originals_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model, path = network(EVOLVING), tmp_path / "originals.safetensors"
    with pytest.raises(FileNotFoundError, match=r"there is no file .*originals.safetensors"):
        overt.vision.load_originals(model, path)
    overt.vision.save_originals(model, path)
    tensors = load_file(path)
    tensors["layer2.0.conv1.weight"] = tensors["layer2.0.conv1.weight"][:3].clone()
    del tensors["layer3.1.bn2.bias"]
    save_file(tensors, path)
    with pytest.raises(ValueError, match=r"2 tensors are missing from .* or do not fit, such as layer3"):
        overt.vision.load_originals(model, path)
    path.write_bytes(path.read_bytes()[:99])
    with pytest.raises(ValueError, match=r"originals.safetensors is damaged or truncated"):
        overt.vision.load_originals(model, path)
    with pytest.raises(ValueError, match="this TheirResNet is not augmented"):
        overt.vision.save_originals(network(plain=True), path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        overt.vision.save_originals(model, tmp_path / "no" / "file.safetensors")


def test_a_network_that_attention_would_fill_is_named_and_left_as_it_is() -> None:
    model = network(plain=True)
    before = str(model)
    with pytest.raises(ValueError, match=r"layer2.0.conv1 has 32 channels, of which the values of 32 heads"):
        augment(model, EVOLVING, size=16, heads=32)
    with pytest.raises(ValueError, match="least_key must be a whole number of at least 1, got 0"):
        augment(model, EVOLVING, size=16, least_key=0)
    assert str(model) == before


def test_checkpointed_blocks_find_the_chain_of_their_pass() -> None:
    model = network(EVOLVING)
    want = gradients(model, images())
    model.checkpointing = True
    torch.testing.assert_close(gradients(model, images()), want, rtol=1e-4, atol=1e-6)
    model.zero_grad()
    first, second = model(images()), model(images(1))  # two passes before the first backward
    second.square().mean().backward()
    first.square().mean().backward()
    got = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.checkpointing = False
    torch.testing.assert_close(got, gradients(model, images(), images(1)), rtol=1e-4, atol=1e-6)
    model.checkpointing = True
    with pytest.raises(RuntimeError, match="several forward passes again"):
        (model(images()).square().mean() + model(images(1)).square().mean()).backward()
    state = vars(model)["_overt_augmented"].passes
    assert len(state._again) <= 1  # of the pass that failed
    with overt.Chain():
        first = model(images())
    with overt.Chain():  # of another pass
        model(images(1))
        model.zero_grad()
        first.square().mean().backward()
    torch.testing.assert_close(grads(model), want, rtol=1e-4, atol=1e-6)


def grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_maps_are_freed_after_the_backward_pass() -> None:
    model = network(EVOLVING)
    out = model(images())
    out.sum().backward()
    assert not vars(model)["_overt_augmented"].passes._again
    chain = overt.Chain()
    with chain:
        out = model(images())
    known = weakref.ref(chain)
    out.sum().backward()
    del out, chain
    gc.collect()
    assert known() is None


def test_a_chain_is_refused_for_a_second_pass_and_layers_need_their_network() -> None:
    model = network(EVOLVING)
    with overt.Chain():
        model(images())
        with pytest.raises(RuntimeError, match="a chain is for one forward pass"):
            model(images())
    model(images())
    with pytest.raises(RuntimeError, match="call the network itself, or run its parts in"):
        model.forward(images())


def test_detaching_what_is_not_attached_is_named() -> None:
    with pytest.raises(ValueError, match="nothing is attached to this TheirResNet"):
        overt.detach(network(plain=True))


def test_posterior_draws_from_an_augmented_network() -> None:
    model = network(overt.Bayesian(k=0.5, prior=None)).eval()
    drawn = overt.posterior(model, images(), samples=3)
    assert float(drawn.spread.max()) > 0.0
    with overt.Chain(step=0, sample=1, examples=torch.arange(4)), torch.no_grad():
        torch.testing.assert_close(drawn.samples[1], model(images()).softmax(dim=-1))


def test_a_network_that_has_attention_is_refused_and_frozen_filters_stay_frozen() -> None:
    with pytest.raises(ValueError, match="has attention already: make it with mechanisms"):
        augment(overt.vision.resnet("aa-resnet-34", stem="cifar", width=8), EVOLVING, size=32)
    with pytest.raises(ValueError, match="key_share must lie between 0 and 1, got -1"):
        augment(network(plain=True), EVOLVING, size=16, key_share=-1.0)
    model = network(plain=True).requires_grad_(False)
    augment(model, EVOLVING, size=16)
    assert not model.layer2[0].conv1.conv.weight.requires_grad
    assert model.layer2[0].conv1.qkv.weight.requires_grad


def test_random_weights_use_the_callers_chain() -> None:
    model = network(overt.Bayesian(d_mid=2)).train()
    with overt.Chain(step=3) as chain:
        out = model(images())
    assert chain.has_loss
    with overt.Chain(step=3) as chain:
        assert torch.equal(model(images()), out)
    with overt.Chain(step=4):
        assert not torch.equal(model(images()), out)


def test_copies_and_pickles_run_with_chains_of_their_own() -> None:
    model = network(EVOLVING).eval()
    with torch.no_grad():
        want = model(images())
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(images()), want)
            state = vars(other)["_overt_augmented"]
            assert state.passes is not vars(model)["_overt_augmented"].passes
            assert all(layer.surrounding.__self__ is state.passes for layer in layers(other))


def grouped(model: TheirResNet) -> None:
    model.layer2[0].conv1 = nn.Conv2d(16, 32, 3, 2, 1, groups=2)


def dilated(model: TheirResNet) -> None:
    model.layer3[1].conv2 = nn.Conv2d(64, 64, 3, 1, 2, dilation=2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (grouped, r"layer2.0.conv1 is grouped \(groups=2\)"),
        (dilated, r"layer3.1.conv2 is dilated \(dilation=2\)"),
        (lambda model: augment(model, size=16), "augmented already: call overt.detach first"),
    ],
)
def test_networks_that_do_not_fit_are_named(spoil: object, message: str) -> None:
    model = network(plain=True)
    spoil(model)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        augment(model, EVOLVING, size=16)
    with pytest.raises(ValueError, match="a Linear has no 3×3 convolutions in layer2, layer3, layer4"):
        augment(nn.Linear(2, 2))
