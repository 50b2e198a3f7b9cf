"""Draw the maps of docs/gallery.md from the models of `overt demo`: python docs/picture.py [runs/demo]."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import overt
from overt.cli.demo import load
from overt.data.agreement import encode

SENTENCE = "the key to the cabinets near the bridges"
LAYERS = (0, 2, 4, 5)


def maps(folder: Path, samples: int | None = None) -> Tensor:
    """Head-averaged maps of one sentence, (samples, layer, query, key)."""
    model, ids = load(folder), torch.tensor([encode(SENTENCE)])
    kept: list[Tensor] = []
    for block in model.encoder.blocks:
        block.attention.map.register_forward_hook(lambda _, __, weights: kept.append(weights.mean(dim=1)[0]))
    with torch.no_grad():
        for draw in [None] if samples is None else range(samples):
            model(ids, torch.ones_like(ids), chain=overt.Chain(step=0, sample=draw))
    return torch.stack(kept).unflatten(0, (-1, len(model.encoder.blocks)))


def main() -> None:
    """Write docs/assets/maps.png."""
    runs = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    tokens = ["[CLS]", *SENTENCE.split()]
    rows = {
        "plain": maps(runs / "plain")[0],
        "evolving": maps(runs / "evolving")[0],
        "Bayesian,\nspread over\n50 samples": maps(runs / "Bayesian", 50).std(dim=0),
    }
    figure, axes = plt.subplots(len(rows), len(LAYERS), figsize=(9, 7.5), layout="constrained")
    for row, (name, stack) in zip(axes, rows.items(), strict=True):
        top = float(stack[list(LAYERS)].max())
        for axis, layer in zip(row, LAYERS, strict=True):
            image = axis.imshow(stack[layer], cmap="viridis", vmin=0, vmax=top)
            axis.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=7)
            axis.set_yticks(range(len(tokens)), tokens if layer == LAYERS[0] else [], fontsize=7)
            if name == "plain":
                axis.set_title(f"layer {layer + 1}", fontsize=9)
            if row[0] is not axes[-1][0]:
                axis.set_xticklabels([])
        row[0].set_ylabel(name, fontsize=9)
        figure.colorbar(image, ax=row, shrink=0.8).ax.tick_params(labelsize=7)
    figure.savefig(Path(__file__).parent / "assets" / "maps.png", dpi=130)


if __name__ == "__main__":
    main()
