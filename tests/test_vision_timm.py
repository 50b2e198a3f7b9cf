"""The networks among timm's, and beside its own. timm needs a torchvision that fits the installed torch."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

import overt
from overt.models.timm_names import NAMES
from overt.vision import ResNet, augment, register, resnet


def imported() -> Any:
    try:
        import timm
    except (ImportError, RuntimeError) as error:
        return pytest.skip(f"timm cannot be imported: {error}")
    return timm


@pytest.fixture
def timm() -> Any:
    found = imported()
    register()
    return found


def test_without_timm_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="timm is required but cannot be imported: pip install timm"):
        register()


def test_networks_stand_among_timms_by_name(timm: Any) -> None:
    register()  # again, without a warning
    assert set(NAMES) <= set(timm.list_models("*aa_resnet*"))
    with torch.device("meta"):
        for name in ("aa_resnet34", "ea_aa_resnet50"):
            theirs, ours = timm.create_model(name).state_dict(), resnet(NAMES[name]).state_dict()
            assert {n: t.shape for n, t in theirs.items()} == {n: t.shape for n, t in ours.items()}


def test_it_keeps_timms_contract(timm: Any) -> None:
    settings = {"num_classes": 10, "in_chans": 1, "img_size": 64, "drop_rate": 0.0, "global_pool": "avg"}
    model = timm.create_model("ea_aa_resnet34", **settings).eval()
    assert isinstance(model, ResNet)
    x = torch.randn(2, 1, 64, 64)
    out = model(x)
    assert out.shape == (2, 10)
    torch.testing.assert_close(model.forward_head(model.forward_features(x)), out)
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(x), out)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3)
    assert model.default_cfg is model.pretrained_cfg
    assert model.pretrained_cfg["input_size"] == (3, 64, 64)
    assert model.get_submodule(model.pretrained_cfg["classifier"]) is model.get_classifier()
    assert model.get_submodule(model.pretrained_cfg["first_conv"]) is model.conv1
    overlay = {"mean": (0.5, 0.5, 0.5), "input_size": (3, 96, 96)}
    model = timm.create_model("ea_aa_resnet34", pretrained_cfg_overlay=overlay)
    assert model.size == (96, 96)
    assert timm.data.resolve_model_data_config(model)["mean"] == (0.5, 0.5, 0.5)
    assert timm.create_model("aa_resnet34", stem="cifar").pretrained_cfg["input_size"] == (3, 32, 32)


def test_features_are_those_of_the_whole_network(timm: Any) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"img_size": 64, "zero_init_last": False}
    whole = timm.create_model("ea_aa_resnet34", **settings).eval()
    torch.manual_seed(0)
    features = timm.create_model("ea_aa_resnet34", features_only=True, out_indices=(1, 3), **settings).eval()
    x, seen = torch.randn(1, 3, 64, 64), []
    for stage in (whole.layer1, whole.layer3):
        stage.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    whole(x)
    assert all(torch.equal(a, b) for a, b in zip(features(x), seen, strict=True))
    assert features.feature_info.channels() == [64, 256]
    assert features.feature_info.reduction() == [4, 16]
    assert not any(name.startswith(("model.layer4", "model.fc")) for name, _ in features.named_parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pretrained": True}, "pretrained must be False, as no weights of aa_resnet34 are published"),
        ({"aa_layer": nn.AvgPool2d}, "aa_resnet34 does not take aa_layer; it takes num_classes, in_chans"),
        ({"drop_path_rate": 0.1}, "drop_path_rate must be 0: aa_resnet34 has no dropout, got 0.1"),
        ({"global_pool": "max"}, "global_pool must be 'avg', got 'max'"),
        ({"img_size": "large"}, "img_size must be a whole number, or height and width, got 'large'"),
    ],
)
def test_what_timm_passes_in_vain_is_named(timm: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        timm.create_model("aa_resnet34", **arguments)


def test_weights_of_ones_own_load_as_pretrained(timm: Any) -> None:
    ours = resnet("aa-resnet-34", stem="cifar")
    overlay = {"state_dict": ours.state_dict()}
    model = timm.create_model("aa_resnet34", stem="cifar", pretrained=True, pretrained_cfg_overlay=overlay)
    assert torch.equal(model.fc.weight, ours.fc.weight)


@pytest.mark.parametrize("name", ["resnet34", "resnet50"])
def test_without_attention_it_is_timms_resnet_bit_for_bit(timm: Any, name: str) -> None:
    torch.manual_seed(0)
    theirs, ours = (
        timm.create_model(name, zero_init_last=False).eval(),
        resnet(name.replace("t", "t-")).eval(),
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


def test_timms_resnet_can_be_augmented(timm: Any) -> None:
    torch.manual_seed(0)
    model, x = (
        timm.create_model("resnet26", num_classes=3, zero_init_last=False).eval(),
        torch.randn(1, 3, 64, 64),
    )
    with torch.no_grad():
        before = model(x)
        augment(model, overt.Evolving(), size=64)
        assert not torch.equal(model(x), before)
        assert torch.equal(overt.detach(model)(x), before)


@pytest.mark.usefixtures("timm")
def test_positions_are_timms() -> None:
    from timm.layers.bottleneck_attn import PosEmbedRel

    torch.manual_seed(0)
    ours, theirs = overt.RelativePosition2d(6, 3, 4).double(), PosEmbedRel((3, 4), 6, 1.0).double()
    theirs.load_state_dict({"height_rel": ours.vertical, "width_rel": ours.horizontal})
    query = torch.randn(2, 12, 6, dtype=torch.float64)
    torch.testing.assert_close(ours(query.unsqueeze(1), 12).squeeze(1), theirs(query))
