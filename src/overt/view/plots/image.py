"""The patches that the query draws on, layer by layer, over the picture if the trace has it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from overt.view.plots.matrix import MOST_CELLS, SEAMLESS, colour_bar, fading, scaled
from overt.view.plots.request import PlotRequest
from overt.view.plots.sheet import Sheet
from overt.view.plots.style import HIGHLIGHT, MORE, bare, title


def draw(sheet: Sheet, request: PlotRequest) -> None:
    """The picture, then a panel per layer."""
    trace, method = request.trace, request.method_or_rollout
    if trace.grid is None or trace.image is None:
        raise ValueError(
            "image needs a trace of an image, got one without patches: overt.trace(model, picture)"
        )
    patches = trace.patches(request.values(method, queries=request.query, layers=request.layers)[:, 0])
    picture = trace.picture
    shades, norm = scaled([patches])
    edges: dict[str, Any] = {"snap": True, "label": SEAMLESS}
    if picture is not None:
        shades = fading(HIGHLIGHT, MORE if norm.vmin else None, opacity=0.85)
        edges = {"edgecolors": "none", "linewidth": 0.0, "antialiased": False}
    panels: list[int | None] = [*([] if picture is None else [None]), *range(len(request.layers))]
    most = 4 if request.columns == 1 else 7
    across = math.ceil(len(panels) / math.ceil(len(panels) / most))
    grid = sheet.equal_grid(math.ceil(len(panels) / across), across)
    (height, width), (rows, columns) = trace.image, trace.grid
    cells_drawn: Any = None
    for place, layer in enumerate(panels):
        axes = sheet.figure.add_subplot(grid[divmod(place, across)])
        if place % across == 0:
            sheet.row(axes, height / width, relative=True)
        if picture is not None:
            pixels = np.asarray(picture[0])
            pixels = pixels if layer is None else _greyed(pixels)
            axes.imshow(pixels, extent=(0, columns, rows, 0), interpolation="antialiased")
        title(axes, "input" if layer is None else f"layer {request.layers[layer] + 1}")
        if layer is not None:
            cells_drawn = axes.pcolormesh(patches[layer].numpy(), cmap=shades, norm=norm, **edges)
            cells_drawn.set_rasterized(rows * columns > MOST_CELLS)
        bare(axes, columns, rows)
        # A new figure gets the height that gives this aspect ratio.
        axes.set_aspect("auto" if sheet.own else height / width * columns / rows)
    colour_bar(sheet, cells_drawn, sheet.figure.add_subplot(grid[:, -1]), request.title(method))


def _greyed(pixels: Any) -> Any:
    """A pale grey picture, against which highlights stand out."""
    grey = pixels[..., :3].astype(np.float64) @ np.array([0.299, 0.587, 0.114])
    pale = np.clip(90.0 + grey * (165.0 / 255.0), 0.0, 255.0).astype(np.uint8)
    return np.repeat(pale[..., None], 3, axis=-1)
