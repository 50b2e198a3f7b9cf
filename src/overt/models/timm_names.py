"""The networks under timm's names.

timm looks for `default_cfgs` in the module of a network's function, and writes its name into `__all__`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from overt.models.augmented_conv import pair
from overt.models.resnet import DEPTHS, LARGEST, ResNet

NAMES = {
    f"{kind}resnet{depth}": f"{kind.replace('_', '-')}resnet-{depth}"
    for kind in ("aa_", "ea_aa_")
    for depth in DEPTHS
}
ABSENT = ("drop_rate", "drop_path_rate")  # timm's training script passes the first, as 0
OURS = ("mechanisms", "stem", "preset", "zero_init_last")
TAKEN = ("num_classes", "in_chans", "img_size", "global_pool", "features_only", "out_indices", *OURS)
default_cfgs = {
    name: {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, LARGEST["imagenet"], LARGEST["imagenet"]),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bilinear",
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
        "first_conv": "conv1",
        "classifier": "fc",
    }
    for name in NAMES
}


def register(make: Callable[..., ResNet]) -> None:
    """Register the networks with timm; may be called again.

    Args:
        make: makes a network by Overt's name.
    """
    try:
        import timm
        from timm.models import register_model
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision built for another torch
        raise ImportError(
            f"timm is required but cannot be imported: pip install timm torchvision ({error})"
        ) from None
    for name in NAMES:
        if not (timm.is_model(name) and timm.model_entrypoint(name).__module__ == __name__):
            register_model(_entrypoint(name, make))


def _entrypoint(name: str, make: Callable[..., ResNet]) -> Callable[..., nn.Module]:
    """The function that `timm.create_model` calls for a name."""

    def create(
        pretrained: bool = False,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: dict[str, Any] | None = None,
        cache_dir: Any = None,
        **arguments: Any,
    ) -> nn.Module:
        from timm.models import build_model_with_cfg, resolve_pretrained_cfg

        _check_arguments(name, arguments)
        config = resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay)
        if pretrained and not config.has_weights and config.state_dict is None:
            raise ValueError(
                f"pretrained must be False, as no weights of {name} are published, or come with "
                "pretrained_cfg_overlay={'file': …}, weights of your own"
            )
        size = arguments.pop("img_size", None)
        if size is None and tuple(config.input_size) != default_cfgs[name]["input_size"]:
            size = tuple(config.input_size[1:])
        if size is None:
            size = LARGEST.get(arguments.get("stem", "imagenet"), LARGEST["imagenet"])
        both = pair("img_size", size)

        def network(**taken: Any) -> ResNet:
            taken.pop("global_pool", None)
            return make(NAMES[name], size=both, **taken)

        built: nn.Module = build_model_with_cfg(
            network,
            name,
            pretrained,
            pretrained_cfg=replace(config, input_size=(config.input_size[0], *both)),
            # Stages need the chain of their pass, which timm's other ways to take features do not hand on.
            feature_cfg={"feature_cls": "getter"},
            cache_dir=cache_dir,
            **arguments,
        )
        return built

    create.__name__ = create.__qualname__ = name
    return create


def _check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Refuse what the networks do not have; drops what asks for nothing."""
    for absent in ABSENT:
        if rate := arguments.pop(absent, 0.0):
            raise ValueError(f"{absent} must be 0: {name} has no dropout, got {rate}")
    if (pool := arguments.get("global_pool", "avg")) != "avg":
        raise ValueError(f"global_pool must be 'avg', got {pool!r}")
    for unknown in arguments.keys() - set(TAKEN):
        raise TypeError(f"{name} does not take {unknown}; it takes {', '.join(TAKEN)}")
