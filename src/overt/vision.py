"""Attention over pixels: attention-augmented ResNets whose maps may evolve or be random.

`resnet` makes a network by name, `AugmentedConv2d` is its layer; `augment` changes a ResNet that you have.
`save` writes a network to a folder, and `load` reads it.
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from overt import _check
from overt._version import __version__
from overt.mechanisms.builtin import Evolving
from overt.mechanisms.mechanism import Mechanism, as_dict, from_dict
from overt.models import timm_names
from overt.models.augmented_conv import AugmentedConv2d, Size, pair
from overt.models.augmenting import augment, load_originals, save_originals
from overt.models.folders import CONFIG, check_settings, load_weights, read_config, save_network
from overt.models.resnet import DEPTHS, KINDS, LARGEST, MODEL_TYPE, Preset, ResNet, Stem

__all__ = [
    "AugmentedConv2d",
    "ResNet",
    "augment",
    "load",
    "load_originals",
    "register",
    "resnet",
    "save",
    "save_originals",
]


def resnet(
    name: str,
    num_classes: int = 1000,
    *,
    mechanisms: Sequence[Mechanism] | None = None,
    stem: Stem = "imagenet",
    size: Size | None = None,
    in_chans: int = 3,
    preset: Preset = "paper",
    zero_init_last: bool | None = None,
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
        preset: "official" is the released code's ResNet-50: its key and value channels, which make it
            smaller than the paper's, initial values, upsampling and averages of batch statistics.
        zero_init_last: start each block as the identity, as timm does; None for yes, but not with
            preset="official". Otherwise the gradients of AA-ResNet-34 start many times larger than
            ResNet-34's, and its training in bfloat16 diverges.
        width: channels of the first stage; the others have 2, 4 and 8 times as many.
        blocks: of the four stages, in place of the name's.
    """
    found = re.fullmatch(r"(resnet|aa-resnet|ea-aa-resnet)-(\d+)", str(name))
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
        init: Literal["dirac", "lecun"] = "lecun" if preset == "official" else "dirac"
        mechanisms = [Evolving(alpha=depth.alpha, beta=1.0, init=init)] if kind == "ea-aa-resnet" else []
    _check.whole("width", width, 8)
    if blocks is not None:
        if not isinstance(blocks, Sequence) or len(blocks) != len(depth.blocks):
            raise ValueError(f"blocks must be {len(depth.blocks)} whole numbers, one per stage, got {blocks}")
        for count in blocks:
            _check.whole("blocks", count, 1)
        depth = replace(depth, blocks=tuple(blocks))
    zero_init_last = preset != "official" if zero_init_last is None else zero_init_last
    largest = pair("size", LARGEST[stem] if size is None else size)
    model = ResNet(depth, mechanisms, num_classes, stem, largest, in_chans, preset, zero_init_last, width)
    model.settings = {
        "name": name,
        "stem": stem,
        "size": list(largest),
        "in_chans": in_chans,
        "preset": preset,
        "zero_init_last": zero_init_last,
        "width": width,
        "blocks": list(depth.blocks),
    }
    return model


def register() -> None:
    """Make the networks known to timm, as "aa_resnet50", "ea_aa_resnet50" and so on, with 34, 101 and 152.

    `timm.create_model` then takes `num_classes`, `in_chans`, `img_size`, `features_only` with `out_indices`,
    and `mechanisms`, `stem`, `preset` and `zero_init_last` of `resnet`; others are refused by name. There are
    no pretrained weights. In timm's own names "aa" means anti-aliasing.
    """
    timm_names.register(resnet)


def save(
    model: ResNet,
    folder: str | Path,
    *,
    labels: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> None:
    """Write a network to a folder: `config.json` and `model.safetensors`, completely or not at all.

    Args:
        model: made by `resnet`.
        folder: to write to; it is made if it does not exist.
        labels: names of the classes; by default those of the model, if it has any.
        mean: of each channel of the images that it was trained on, on the scale of 0 to 1, as in timm; by
            default that of the model. Pictures can be traced only if it is known.
        std: their standard deviation, likewise.
    """
    if not isinstance(model, ResNet) or model.settings is None:
        raise TypeError(f"model must be made by overt.vision.resnet, got a {type(model).__name__}")
    with torch.device("meta"):
        made = resnet(**model.settings, num_classes=model.num_classes, mechanisms=model.mechanisms)
    if differ := sorted(made.state_dict().keys() ^ model.state_dict().keys()):
        raise ValueError(
            f"model is not as overt.vision.resnet made it, and could not be loaded: {differ[0]} is "
            f"{'new' if differ[0] in model.state_dict() else 'missing'}; save its state_dict instead"
        )
    described = _described(
        model,
        model.labels if labels is None else labels,
        model.mean if mean is None else mean,
        model.std if std is None else std,
    )
    mechanisms = None if model.mechanisms is None else [as_dict(each) for each in model.mechanisms]
    settings = {**model.settings, "num_classes": model.num_classes, "mechanisms": mechanisms}
    save_network(model, folder, MODEL_TYPE, {"overt": __version__, **settings, **described})


def load(folder: str | Path) -> ResNet:
    """The network that `save` wrote, in evaluation mode on the CPU, with its `labels`, `mean` and `std`.

    A mechanism that is not Overt's own must be registered before.
    """
    path = Path(folder) / CONFIG
    settings = read_config(folder, MODEL_TYPE, "overt.vision.save")
    known = {*inspect.signature(resnet).parameters, "labels", "mean", "std", "overt"}
    needed = {"name", "num_classes", "mechanisms", "size", "stem"}
    check_settings(settings, folder, "overt.vision.resnet", known, needed)
    settings.pop("overt", None)  # the version that wrote it, for readers
    about = [settings.pop(name, None) for name in ("labels", "mean", "std")]
    try:
        if settings["mechanisms"] is not None:
            settings["mechanisms"] = [from_dict(each) for each in settings["mechanisms"]]
        model = resnet(**settings)
        described = _described(model, *about)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be understood: {error}") from None
    load_weights(model, folder, CONFIG)
    model.labels, model.mean, model.std = described["labels"], described["mean"], described["std"]
    return model


def _described(model: ResNet, labels: Any, mean: Any, std: Any) -> dict[str, Any]:
    """Labels, mean and standard deviation, checked against the network."""
    if labels is not None:
        listed = isinstance(labels, list | tuple) and all(isinstance(label, str) for label in labels)
        if not listed or len(labels) != model.num_classes:
            got = f"{len(labels)} labels" if listed else f"{labels!r}"[:60]
            raise ValueError(f"labels must be {model.num_classes} strings, one per class, got {got}")
        labels = list(labels)
    if (mean is None) != (std is None):
        raise ValueError(f"mean and std must be given together, got mean={mean} and std={std}")
    return {"labels": labels, "mean": _channels("mean", mean, model), "std": _channels("std", std, model)}


def _channels(name: str, values: Any, model: ResNet) -> tuple[float, ...] | None:
    """One number of 0 to 1 for each channel of the images."""
    if values is None:
        return None
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple) or len(values) != model.in_chans:
        raise ValueError(f"{name} must be {model.in_chans} numbers, one per channel, got {values!r}"[:120])
    for value in values:
        _check.number(name, value)
        if name == "std" and value == 0.0:
            raise ValueError("std must be greater than 0, got 0")
        if not 0.0 <= value <= 1.0:
            raise ValueError(
                f"{name} must be of images with values from 0 to 1, got {value}: divide that of bytes by 255"
            )
    return tuple(float(value) for value in values)
