"""Updates of the networks that describe pictures and answer questions, with CUDA graphs and without.

Each row of bam-table-2 and bam-nan is timed on generated scenes, with regions drawn at random: the forward
and the backward pass and the optimizer, as in a training, one training alone. Losses of both ways are
compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from overt.data import scenes
from overt.data.region_features import Regions
from overt.recipes import bam_captions, bam_nan, bam_questions, caption_training, question_training
from overt.recipes._cuda_graphs import GraphedLoss
from overt.recipes._training import short_products
from overt.recipes.caption_training import Batches, CaptionTraining, Shared, texts_of
from overt.recipes.question_training import QuestionTraining
from overt.recipes.regions import RegionSource
from overt.recipes.unstable_attention import register

SIZES = 400, 20, 20  # images in three parts
Step = Callable[[int], Tensor]


class Drawn(RegionSource):
    """Regions that are drawn, the same for all seeds."""

    def regions(self, seed: int) -> Regions:
        """Of all images."""
        del seed
        drawn = torch.randn(sum(SIZES), 16, 256, generator=torch.Generator().manual_seed(1))
        return Regions(drawn.half(), torch.ones(sum(SIZES), 16, dtype=torch.bool))


SOURCE = Drawn(Path(), False, None, {}, 16)


def stepping(
    model: nn.Module, batch_of: Callable[[int], dict[str, Tensor]], optimizer: Any, clip: float, graphs: bool
) -> Step:
    """A function that makes the update of a number, and returns the loss before it."""
    replayed = GraphedLoss(model) if graphs else None

    def step(update: int) -> Tensor:
        inputs = batch_of(update)
        if replayed is not None:
            loss = replayed(inputs)
        else:
            loss = model(**inputs)["loss"]
            loss.backward()
        kept = loss.detach().clone()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return kept

    return step


def questions(name: str, made: scenes.Scenes, batch: int, device: torch.device, graphs: bool) -> Step:
    """Updates of a row of bam-table-2."""
    data = replace(made.questions, images=None)
    network = {**bam_questions.NETWORKS[scenes.NAME], "grid": [4, 4]}
    training = QuestionTraining(1000, 50, batch, 3e-4, (800, 900), network)
    model = question_training.model_of(data, SOURCE, bam_questions.ROWS[name], training, 0)
    model = model.to(device).train()
    optimizer, _ = question_training.optimizer_of(model, training)
    places = torch.arange(batch, device=device)

    def batch_of(update: int) -> dict[str, Tensor]:
        model.at_update(update)
        return {"numbers": (7 * places + 13 * update) % len(data.train)}

    return stepping(model, batch_of, optimizer, 0.0, graphs)


def captions(name: str, made: scenes.Scenes, batch: int, device: torch.device, graphs: bool) -> Step:
    """Updates of a row of bam-nan; batches of images."""
    data = replace(made.captions, images=None)
    training = CaptionTraining(1000, batch)
    row = bam_captions.fitted(bam_nan.ROWS[name], data)
    model = caption_training.model_of(row, Shared(data, SOURCE, None), training, 0).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=device.type == "cuda")
    batches = Batches(texts_of(data, "train", training.length), training.batch, 0, device)

    def batch_of(update: int) -> dict[str, Tensor]:
        model.net.step.fill_(update)
        return batches[update % len(batches), 0]

    return stepping(model, batch_of, optimizer, training.clip, graphs)


def timed(make: Callable[[bool], Step], graphs: bool, updates: int, device: str) -> tuple[float, Tensor]:
    """Median milliseconds of updates after some that are not timed, and the losses of all."""
    torch.manual_seed(0)
    step, times, losses = make(graphs), [], []
    torch.manual_seed(0)
    for update in range(2 * updates):
        began = time.perf_counter()
        losses.append(step(update))
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[updates:]), torch.stack(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=20, help="that are timed, after as many that are not")
    parser.add_argument("--questions", type=int, default=256, help="of a batch")
    parser.add_argument("--images", type=int, default=50, help="of a batch of captions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device, cuda = torch.device(options.device), options.device == "cuda"
    torch.set_num_threads(1)
    register()
    made = scenes.make(SIZES)
    table = Table("", "ms an update", "with graphs", "ratio", "largest difference of losses")
    with short_products(options.device):
        for what, names, batch in (
            (questions, list(bam_questions.ROWS), options.questions),
            (captions, list(bam_nan.ROWS), options.images),
        ):
            for name in names:

                def make(graphs: bool, what: Any = what, name: str = name, batch: int = batch) -> Step:
                    return what(name, made, batch, device, graphs)  # type: ignore[no-any-return]

                plain, wanted = timed(make, False, options.updates, options.device)
                cells = [f"{plain:.1f}"]
                if cuda:
                    graphed, found = timed(make, True, options.updates, options.device)
                    difference = float((found - wanted).abs().max())
                    cells += [f"{graphed:.1f}", f"{graphed / plain:.2f}", f"{difference:.1g}"]
                table.add_row(f"{what.__name__}, {name}", *cells)
    Console().print(table)
    print(torch.cuda.get_device_name() if cuda else "no GPU: without graphs alone")


if __name__ == "__main__":
    main()
