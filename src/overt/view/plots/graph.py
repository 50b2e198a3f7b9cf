"""The attention graph: layers as columns, tokens as rows, weights as lines; or the paths of one query."""

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

FAINTEST = 0.01  # opacity; lighter lines cannot be seen

# Left column, its token, right column, its token, weight.
Line = tuple[int, int, int, int, float]


def draw(sheet: Sheet, request: PlotRequest) -> None:
    """All lines, or the paths of a named query."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize, PowerNorm

    if request.trace.cross:
        raise ValueError(
            'graph draws encoders and decoders: for an encoder–decoder use trace.encoder, or view="cross"'
        )
    if request.named and request.place not in request.shown:
        request = replace(request, shown=sorted([*request.shown, request.place]))
    method = request.method or "rollout"
    if request.trace.kind == "pixels":
        raise ValueError(request.trace.why_not("rollout"))  # there are no paths, whatever the method
    if isinstance(request.layer, Sequence):
        raise ValueError(f"layer must be one number for view='graph', the uppermost; got {request.layer!r}")
    top = request.one_layer("graph")
    lines = _paths(request, method, top) if request.named else _all_lines(request, method, top)
    largest = max((abs(line[4]) for line in lines), default=0.0) or 1.0
    signed = any(line[4] < 0.0 for line in lines)
    # Paths thin out layer by layer: a square-root scale keeps their lower ends visible.
    rooted = request.named and method_of(method).paths and not signed
    grid = sheet.grid([1.0], [sheet.width - 0.6, 0.055])
    axes = sheet.figure.add_subplot(grid[0, 0])
    rows = {token: place + 0.5 for place, token in enumerate(request.shown)}
    _draw_lines(axes, lines, rows, largest, rooted)
    _draw_nodes(axes, request, lines, rows, top)
    axes.set(xlim=(-0.15, top + 1.15), ylim=(len(rows), 0))
    every = max(1, math.ceil((top + 2) * 0.28 / (sheet.width - 1.0)))
    marks = list(range(0, top + 2, every))
    axes.set_xticks(marks, ["input", *(str(mark) for mark in marks[1:])])
    axes.tick_params(axis="x", length=0, pad=1, labelsize=SIZE, labelcolor=INK, top=False)
    axes.set_xlabel("layer", fontsize=SIZE, color=INK, labelpad=1)
    for spine in axes.spines.values():
        spine.set_visible(False)
    norm = PowerNorm(0.5, 0.0, largest) if rooted else Normalize(-largest if signed else 0.0, largest)
    words = request.title(method)
    if request.named and method_of(method).paths:
        words = f"{method if request.trace.mixing == 'attention' else words} carried on paths"
    shades = ScalarMappable(norm, fading(MORE, LESS if signed else None))
    colour_bar(sheet, shades, sheet.figure.add_subplot(grid[0, 1]), words)
    sheet.row(axes, max(0.155 * len(rows), 1.3))
    sheet.panels.append(Panel(axes, None, request.words, (None, request.strong if request.named else None)))


def _all_lines(request: PlotRequest, method: str, top: int) -> list[Line]:
    """Lines between adjacent columns: the method's values at the upper one."""
    values = request.values(method, layers=list(range(top + 1)))
    listed = values[:, request.shown][:, :, request.shown].tolist()
    return [
        (layer, target, layer + 1, source, weight)
        for layer, cells in enumerate(listed)
        for source, weights in zip(request.shown, cells, strict=True)
        for target, weight in zip(request.shown, weights, strict=True)
    ]


def _paths(request: PlotRequest, method: str, top: int) -> list[Line]:
    """What each edge carries to a node: what reaches its upper end times its weight."""
    if not method_of(method).paths:
        values = request.values(method, queries=request.query, layers=top)[0, 0]
        return [(0, token, top + 1, request.place, float(values[token])) for token in request.shown]
    if request.arguments["normalize"] or request.arguments["receptive_field"]:
        raise ValueError(
            "normalize and receptive_field apply to whole rows, not to the paths of a query: leave them out"
        )
    lines: list[Line] = []
    coming = torch.zeros(request.trace.mask.shape[1], dtype=torch.float64)
    coming[request.query] = 1.0
    for layer in range(top, -1, -1):
        # The rollout of a single layer is its edges, with their residual.
        alone = replace(request, trace=replace(request.trace, maps=[request.trace.maps[layer]], visible=[]))
        level = alone.values(method)[0]
        carried = coming.unsqueeze(1) * level
        lines += [
            (layer, target, layer + 1, source, float(carried[source, target]))
            for source in request.shown
            for target in request.shown
            if carried[source, target] != 0.0
        ]
        coming = carried.sum(dim=0)
    return lines


def _draw_lines(
    axes: Any, lines: Sequence[Line], rows: dict[int, float], largest: float, rooted: bool
) -> None:
    """Lines whose opacity is their weight, the darkest on top."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgb

    shares = [(line, abs(line[4]) / largest) for line in lines]
    seen = [(line, math.sqrt(share) if rooted else share) for line, share in shares]
    seen = sorted((pair for pair in seen if pair[1] >= FAINTEST), key=lambda pair: pair[1])
    ends = [[(left, rows[target]), (right, rows[source])] for (left, target, right, source, _), _ in seen]
    colours = [(*to_rgb(LESS if line[4] < 0.0 else MORE), opacity) for line, opacity in seen]
    collection = LineCollection(ends, colors=colours, linewidths=1.0, capstyle="round", zorder=1)
    collection.set_gid("edges")
    collection.set_rasterized(len(seen) > MOST_CELLS)
    axes.add_collection(collection)


def _draw_nodes(
    axes: Any, request: PlotRequest, lines: Sequence[Line], rows: dict[int, float], top: int
) -> None:
    """A dot per node; for a named query, a marked node and inputs sized by what reaches them."""
    dots = [(layer, row) for layer in range(top + 2) for row in rows.values()]
    axes.scatter(*zip(*dots, strict=True), s=5, color=SOFT, linewidths=0.0, zorder=2)
    if not request.named:
        return
    axes.scatter([top + 1], [rows[request.place]], s=14, color=INK, linewidths=0.0, zorder=3)
    arrived = dict.fromkeys(request.shown, 0.0)
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
