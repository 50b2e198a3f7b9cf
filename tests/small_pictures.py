"""A tiny MCAN and its inputs: questions and images of different lengths, padded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import overt
from overt.models.mcan import MCAN

WORDS, ANSWERS, FEATURES = 11, 7, 6
WC = overt.Bayesian.paper("WC", k=5, prior_beta=1e-2, d_mid=4)


def mcan(*mechanisms: overt.Mechanism, **settings: Any) -> MCAN:
    """A network of two layers, in float64, without dropout, in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"features": FEATURES, "width": 16, "heads": 4, "layers": 2, "flat": 8, "embedding": 5}
    model = MCAN(WORDS, ANSWERS, mechanisms, **{**sizes, "dropout": 0.0, **settings})
    return model.double().eval()


def questions(batch: int = 3, length: int = 5, regions: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """Inputs; the second question and image are shorter than the others."""
    generator = torch.Generator().manual_seed(seed)
    inputs = {
        "words": torch.randint(WORDS, (batch, length), generator=generator),
        "word_mask": torch.ones(batch, length, dtype=torch.bool),
        "regions": torch.randn(batch, regions, FEATURES, generator=generator, dtype=torch.float64),
        "region_mask": torch.ones(batch, regions, dtype=torch.bool),
    }
    inputs["word_mask"][1, 2:] = False
    inputs["region_mask"][1, -1] = False
    return inputs


def answers(batch: int = 3, seed: int = 1) -> Tensor:
    """How right each answer is."""
    generator = torch.Generator().manual_seed(seed)
    soft = torch.tensor([0.0, 0.3, 0.6, 0.9, 1.0])
    return soft[torch.randint(5, (batch, ANSWERS), generator=generator)].double()
