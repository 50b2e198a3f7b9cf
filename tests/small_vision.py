"""Small images and networks for several processes, which import them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import overt
from overt.data import relations
from overt.data.images import Images
from overt.recipes import ea_vision, reproduce, vision_training
from overt.recipes.vision_training import ImageRow, ImageTraining

TINY = {"width": 8, "blocks": [1, 1, 1, 1]}
make_images, make_network = relations.images, vision_training.network


def small_images() -> Images:
    return make_images(48, 16, side=12)


def recipes_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a recipe of vision in a folder, on small images with small networks."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("OVERT_DATA", raising=False)
    monkeypatch.setattr(ea_vision, "SMALL", TINY)
    monkeypatch.setattr(relations, "images", small_images)

    def run(name: str = "ea-table-1", seeds: int = 1, **options: str) -> dict[str, Any]:
        extra = [part for option, value in options.items() for part in (f"--{option}", value)]
        places = {"out": Path("runs"), "results": Path("results")}
        return reproduce.run(name, seeds=seeds, device="cpu", extra=extra, **places)

    return run


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.net.named_parameters()}


def with_group_norms(folder: Path) -> dict[str, Tensor]:
    """The parameters of a network with other norms after a short training."""

    def network(*arguments: Any) -> Any:
        net = make_network(*arguments)
        for module in list(net.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, torch.nn.BatchNorm2d):
                    setattr(module, name, torch.nn.GroupNorm(1, child.num_features))
        return net

    training = ImageTraining(3, 1, batch=8, learning_rate=0.05, crop=0)
    row = ImageRow("aa-resnet-34", (overt.Evolving(), overt.Bayesian(k=1e6, kl_weight=1.0)), TINY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision_training, "network", network)
        model, _ = vision_training.train(folder, small_images(), row, training, 0, "cpu")
    return parameters(model)
