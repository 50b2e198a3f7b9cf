"""Layers as columns, tokens as rows, weights as lines; of a query, the paths that lead to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from overt.tracing.methods.method import method_of
from overt.view.plots.matrix import MOST_CELLS, colour_bar, fading
from overt.view.plots.request import PlotRequest
from overt.view.plots.sheet import Panel, Sheet
from overt.view.plots.style import INK, LESS, MORE, SIZE, SOFT

FAINTEST = 0.01  # opacity; what is lighter cannot be seen

# Left column, its token, right column, its token, weight.
Line = tuple[int, int, int, int, float]


def draw(sheet: Sheet, asked: PlotRequest) -> None:
    """All lines, or the paths of a named query."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize, PowerNorm

    if asked.trace.cross:
        raise ValueError(
            'graph draws encoders and decoders: of an encoder–decoder take trace.encoder, or view="cross"'
        )
    if asked.named and asked.place not in asked.shown:
        asked = replace(asked, shown=sorted([*asked.shown, asked.place]))
    method = asked.method or "rollout"
    if isinstance(asked.layer, Sequence):
        raise ValueError(f"layer must be one number for view='graph', the uppermost; got {asked.layer!r}")
    top = asked.one_layer("graph")
    lines = _paths(asked, method, top) if asked.named else _all_lines(asked, method, top)
    largest = max((abs(line[4]) for line in lines), default=0.0) or 1.0
    signed = any(line[4] < 0.0 for line in lines)
    # Paths thin out layer by layer: roots let their lower ends be seen.
    rooted = asked.named and method_of(method).paths and not signed
    grid = sheet.grid([1.0], [sheet.width - 0.6, 0.055])
    axes = sheet.figure.add_subplot(grid[0, 0])
    rows = {token: place + 0.5 for place, token in enumerate(asked.shown)}
    _draw_lines(axes, lines, rows, largest, rooted)
    _draw_nodes(axes, asked, lines, rows, top)
    axes.set(xlim=(-0.15, top + 1.15), ylim=(len(rows), 0))
    every = max(1, math.ceil((top + 2) * 0.28 / (sheet.width - 1.0)))
    marks = list(range(0, top + 2, every))
    axes.set_xticks(marks, ["input", *(str(mark) for mark in marks[1:])])
    axes.tick_params(axis="x", length=0, pad=1, labelsize=SIZE, labelcolor=INK, top=False)
    axes.set_xlabel("layer", fontsize=SIZE, color=INK, labelpad=1)
    for spine in axes.spines.values():
        spine.set_visible(False)
    norm = PowerNorm(0.5, 0.0, largest) if rooted else Normalize(-largest if signed else 0.0, largest)
    words = asked.title(method)
    if asked.named and method_of(method).paths:
        words = f"{method if asked.trace.mixing == 'attention' else words} carried on paths"
    shades = ScalarMappable(norm, fading(MORE, LESS if signed else None))
    colour_bar(sheet, shades, sheet.figure.add_subplot(grid[0, 1]), words)
    sheet.row(axes, max(0.155 * len(rows), 1.3))
    sheet.panels.append(Panel(axes, None, asked.words, (None, asked.strong if asked.named else None)))


def _all_lines(asked: PlotRequest, method: str, top: int) -> list[Line]:
    """Between each two columns the method's values at the upper one."""
    values = asked.values(method, layers=list(range(top + 1)))
    listed = values[:, asked.shown][:, :, asked.shown].tolist()
    return [
        (layer, target, layer + 1, source, weight)
        for layer, cells in enumerate(listed)
        for source, weights in zip(asked.shown, cells, strict=True)
        for target, weight in zip(asked.shown, weights, strict=True)
    ]


def _paths(asked: PlotRequest, method: str, top: int) -> list[Line]:
    """What each edge carries to a node: what comes to its upper end times its weight."""
    if not method_of(method).paths:
        values = asked.values(method, queries=asked.query, layers=top)[0, 0]
        return [(0, token, top + 1, asked.place, float(values[token])) for token in asked.shown]
    if asked.arguments["normalize"] or asked.arguments["receptive_field"]:
        raise ValueError("normalize and receptive_field are of whole rows: paths of a query have none")
    lines: list[Line] = []
    coming = torch.zeros(asked.trace.mask.shape[1], dtype=torch.float64)
    coming[asked.query] = 1.0
    for layer in range(top, -1, -1):
        # The rollout of a layer alone is its edges, with their residual.
        alone = replace(asked, trace=replace(asked.trace, maps=[asked.trace.maps[layer]], visible=[]))
        level = alone.values(method)[0]
        carried = coming.unsqueeze(1) * level
        lines += [
            (layer, target, layer + 1, source, float(carried[source, target]))
            for source in asked.shown
            for target in asked.shown
            if carried[source, target] != 0.0
        ]
        coming = carried.sum(dim=0)
    return lines


def _draw_lines(
    axes: Any, lines: Sequence[Line], rows: dict[int, float], largest: float, rooted: bool
) -> None:
    """Lines as opaque as they weigh, the darkest on top."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    shares = [(line, abs(line[4]) / largest) for line in lines]
    seen = [(line, math.sqrt(share) if rooted else share) for line, share in shares]
    seen = sorted((pair for pair in seen if pair[1] >= FAINTEST), key=lambda pair: pair[1])
    ends = [[(left, rows[target]), (right, rows[source])] for (left, target, right, source, _), _ in seen]
    colours = [(*to_rgb(LESS if line[4] < 0.0 else MORE), opacity) for line, opacity in seen]
    made = LineCollection(ends, colors=colours, linewidths=1.0, capstyle="round", zorder=1)
    made.set_gid("edges")
    made.set_rasterized(len(seen) > MOST_CELLS)
    axes.add_collection(made)


def _draw_nodes(
    axes: Any, asked: PlotRequest, lines: Sequence[Line], rows: dict[int, float], top: int
) -> None:
    """A dot per node; of a named query its own, and inputs as large as what arrives there."""
    dots = [(layer, row) for layer in range(top + 2) for row in rows.values()]
    axes.scatter(*zip(*dots, strict=True), s=5, color=SOFT, linewidths=0.0, zorder=2)
    if not asked.named:
        return
    axes.scatter([top + 1], [rows[asked.place]], s=14, color=INK, linewidths=0.0, zorder=3)
    arrived = dict.fromkeys(asked.shown, 0.0)
    for left, target, _, _, weight in lines:
        if left == 0:
            arrived[target] += weight
    most = max(map(abs, arrived.values()), default=0.0) or 1.0
    reached = {token: size for token, size in arrived.items() if size != 0.0}
    axes.scatter(
        [0] * len(reached),
        [rows[token] for token in reached],
        s=[4.0 + 22.0 * abs(size) / most for size in reached.values()],
        color=[LESS if size < 0.0 else MORE for size in reached.values()],
        linewidths=0.0,
        zorder=3,
    )
