"""A figure of what a node of a graph draws on: the node, rings of neighbours around it, and bars."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from overt import _check
from overt._extras import need
from overt.tracing.methods.method import edge_methods
from overt.tracing.nodes import LayerEdges, Neighbours, NodeTrace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Pair = tuple[int, int]  # the ends of an edge, the smaller number first

# Okabe and Ito's colours, which nearly everyone can distinguish; the last is for the remaining classes.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
COLOURS, PALEST = (
    "YlGnBu",
    0.25,
)  # of values, if there are no classes; light to dark, so that grey prints work
INK, EDGE, SOFT = "#222222", "#4d4d4d", "#dddddd"
LARGEST, SMALLEST = 620.0, 14.0  # areas of nodes, in points²
WIDEST, NARROWEST = 5.0, 0.4  # lines of edges, in points
FAINTEST = 0.03  # of the heaviest edge; lighter ones are drawn only if a node has no other
LEAST_ROWS = 10  # of bars that a panel has room for, so that few bars stay thin
SWEEPS = 40


def plot_neighbours(
    trace: NodeTrace,
    node: int,
    method: str = "rollout",
    labels: Any = None,
    names: Any = None,
    top: int = 16,
    axes: Axes | None = None,
    **arguments: Any,
) -> Figure:
    """Draw which neighbours a node draws on; returns the figure, which `savefig` writes.

    The node is in the middle, its neighbours on rings by hop. A neighbour's area is its value by `method`;
    the pale disc behind it adds one spread. The width of an edge is its share: its weight times what the node
    draws on the edge's target, in the stronger direction. Self-loops are not drawn; the values include what
    they carry. Bars next to the rings show the values by all methods, with whiskers of one spread.

    Args:
        trace: from `trace_nodes`.
        node: the node whose attention is shown.
        method: determines size and order: "raw" (the top layer's weights), "rollout" or "flow".
        labels: the nodes' classes, one for each node of the graph, shown as colours; without them, colour
            shows the value, as area does.
        names: the nodes' names, one for each node of the graph; numbers by default.
        top: how many neighbours to show; the title gives their total number. Nodes through which these are
            reached are shown too, without a bar.
        axes: draw the rings there, without bars; by default a new figure has both.
        arguments: further arguments of `NodeTrace.neighbours`: layer, heads, residual, flow.
    """
    need("matplotlib", "view")
    from matplotlib.figure import Figure

    _check.one_of("method", method, tuple(edge_methods()))
    _check.whole("top", top, 1)
    classes, words = trace.named("labels", labels), trace.named("names", names)
    whole = trace.neighbours(node, by=method, **arguments)
    shared = {name: value for name, value in arguments.items() if name != "flow"}
    scene = _scene(whole, trace.shares(node, **shared), method, top)
    ids = scene.table.ids.tolist()
    scene.names = {number: str(number if words is None else words[number]) for number in ids}
    kinds = {} if classes is None else _kinds(classes, [classes[number] for number in ids])
    scene.colours = _shades(scene) if classes is None else {number: kinds[classes[number]] for number in ids}
    scene.coloured, scene.samples = classes is None, trace.samples
    if axes is not None:
        _draw_rings(axes, scene, _legend_of(kinds, classes, ids))
        root = axes.get_figure(root=True)
        assert isinstance(root, Figure)
        return root
    panels = len(whole.methods)
    tall = max(4.4, 0.2 * max(len(scene.bars), LEAST_ROWS) + 1.0)
    wide = min(max(4.6, tall - 0.3), 6.2)
    figure = Figure(figsize=(wide + 1.55 * panels + 0.5, tall), layout="constrained")
    panels_drawn = figure.subplots(1, 1 + panels, width_ratios=[wide, *([1.55] * panels)], squeeze=False)[0]
    _draw_rings(panels_drawn[0], scene, _legend_of(kinds, classes, ids))
    _draw_bars(panels_drawn[1:], scene)
    return figure


@dataclass
class _Scene:
    """What to draw, with a colour and a name for each node."""

    table: Neighbours  # of all nodes in the picture
    bars: list[int]  # rows of the table that have a bar, in order
    edges: dict[Pair, float]
    heaviest: float
    method: str
    count: int  # neighbours in all
    names: dict[int, str]
    colours: dict[int, Any]
    coloured: bool = True  # whether colour is the value
    samples: int = 0

    @property
    def values(self) -> dict[int, float]:
        return dict(zip(self.table.ids.tolist(), self.table.value(self.method).tolist(), strict=True))

    @property
    def spreads(self) -> dict[int, float]:
        spread = self.table.spread(self.method)
        listed = [0.0] * len(self.table) if spread is None else spread.tolist()
        return dict(zip(self.table.ids.tolist(), listed, strict=True))

    @property
    def largest(self) -> float:
        spreads = self.spreads
        return max(value + spreads[node] for node, value in self.values.items()) or 1.0


def _scene(whole: Neighbours, layers: list[LayerEdges], method: str, top: int) -> _Scene:
    """The node, the first `top` others that it draws on, the nodes that link them to it, and the edges."""
    node_row = int((whole.ids == whole.node).nonzero())
    used = sum((whole.value(name) for name in whole.methods), whole.raw.sum(dim=0)) > 0.0
    others = [row for row in used.nonzero().flatten().tolist() if row != node_row]
    first = others[:top]
    hop = dict(zip(whole.ids.tolist(), whole.hops.tolist(), strict=True))
    shown = {whole.node, *whole.ids[first].tolist()}
    for far in range(max(hop.values()), 1, -1):  # from the outermost ring inwards
        ties = _ties(layers, shown)
        for node in sorted(node for node in shown if hop[node] == far):
            inside = {other: share for other, share in ties[node].items() if hop[other] == far - 1}
            if inside and not shown & set(inside):
                shown.add(max(inside, key=lambda other: (inside[other], -other)))
    on_way = [row for row in others[top:] if int(whole.ids[row]) in shown]
    table = whole.some([node_row, *first, *on_way])
    ties = _ties(layers, shown)
    edges = {
        (min(node, other), max(node, other)): share
        for node, neighbours in ties.items()
        for other, share in neighbours.items()
        if other in shown
    }
    heaviest = max(edges.values(), default=1.0)
    drawn_edges = {pair: share for pair, share in edges.items() if share >= FAINTEST * heaviest}
    for node in shown - {whole.node}:
        inside = {
            other: share for other, share in ties[node].items() if other in shown and hop[other] < hop[node]
        }
        if inside:
            other = max(inside, key=lambda other: (inside[other], -other))
            drawn_edges[min(node, other), max(node, other)] = inside[other]
    place = {row: number for number, row in enumerate([node_row, *first])}
    bars = [place[row] for row in sorted(place)]
    return _Scene(table, bars, drawn_edges, heaviest, method, len(others), {}, {})


def _ties(layers: list[LayerEdges], shown: set[int]) -> dict[int, dict[int, float]]:
    """Each shown node's neighbours (shown or not), with the largest share over layers and directions."""
    shown_ids = torch.tensor(sorted(shown))
    ties: dict[int, dict[int, float]] = {one: {} for one in shown}
    for _, source, target, _, _, share in layers:
        useful = (share > 0.0) & (source != target)
        useful &= torch.isin(source, shown_ids) | torch.isin(target, shown_ids)
        listed = zip(source[useful].tolist(), target[useful].tolist(), share[useful].tolist(), strict=True)
        for one, other, value in listed:
            for here, there in ((one, other), (other, one)):
                if here in ties:
                    ties[here][there] = max(ties[here].get(there, 0.0), value)
    return ties


def _kinds(classes: list[Any], present: list[Any]) -> dict[Any, str]:
    """A colour for each class; if there are too many, for the most frequent ones in the figure."""
    try:
        every = sorted(set(classes))
    except TypeError:
        every = sorted(set(classes), key=str)
    if len(every) > len(PALETTE):
        often = [kind for kind, _ in Counter(present).most_common(len(PALETTE) - 1)]
        colours = dict(zip(often, PALETTE, strict=False))
        return {kind: colours.get(kind, PALETTE[-1]) for kind in every}
    return dict(zip(every, PALETTE, strict=False))


def _legend_of(kinds: dict[Any, str], classes: list[Any] | None, ids: list[int]) -> dict[str, str]:
    """Names and colours of the classes in the figure."""
    if classes is None:
        return {}
    here = {classes[node] for node in ids}
    crowded = len(kinds) > len(PALETTE)
    legend = {
        str(kind): colour
        for kind, colour in kinds.items()
        if kind in here and not (crowded and colour == PALETTE[-1])
    }
    return {**legend, "others": PALETTE[-1]} if crowded else legend


def _shade(part: float) -> Any:
    from matplotlib import colormaps

    return colormaps[COLOURS](PALEST + (1.0 - PALEST) * part)


def _shades(scene: _Scene) -> dict[int, Any]:
    return {node: _shade(value / scene.largest) for node, value in scene.values.items()}


def _angles(hops: dict[int, int], edges: dict[Pair, float]) -> dict[int, float]:
    """An angle for each neighbour, chosen so that few edges cross.

    A node of an outer ring is placed near its strongest neighbour further inside, and the width of a sector
    depends on how many nodes it holds. Sectors are swapped as long as edges between them get shorter.
    """
    parent: dict[int, int] = {}
    best: dict[int, tuple[float, int]] = {}
    for pair, share in edges.items():
        inner, outer = sorted(pair, key=lambda node: (hops[node], node))
        if 0 < hops[inner] < hops[outer]:
            best[outer] = max(best.get(outer, (-1.0, 0)), (share, -inner))
            parent[outer] = -best[outer][1]

    def root(node: int) -> int:
        while node in parent:
            node = parent[node]
        return node

    roots = [node for node in hops if hops[node] > 0 and node not in parent]
    members: dict[int, list[int]] = {node: [] for node in roots}
    for node in parent:
        members[root(node)].append(node)
    between: Counter[Pair] = Counter()
    for pair in edges:
        if all(hops[node] for node in pair):
            first, second = sorted(map(root, pair))
            between[first, second] += int(first != second)
    size = {node: max(1.0, 0.85 * len(members[node])) for node in roots}
    turn = 2.0 * math.pi / max(sum(size.values()), 1.0)

    def placed(order: Sequence[int]) -> dict[int, float]:
        start, angles_of = 0.0, {}
        for node in order:
            angles_of[node] = math.pi / 2.0 - (start + size[node] / 2.0) * turn
            start += size[node]
        return angles_of

    def length(order: Sequence[int]) -> float:
        at = placed(order)
        return sum(count * (1.0 - math.cos(at[node] - at[other])) for (node, other), count in between.items())

    order = list(roots)
    shortest = length(order)
    for _ in range(SWEEPS):
        before = shortest
        for first in range(len(order)):
            for second in range(first + 1, len(order)):
                order[first], order[second] = order[second], order[first]
                tried = length(order)
                if tried < shortest - 1e-9:
                    shortest = tried
                else:
                    order[first], order[second] = order[second], order[first]
        if shortest == before:
            break
    angles_of = placed(order)
    near: dict[int, list[int]] = {node: [] for node in hops}
    for node, other in edges:
        near[node].append(other)
        near[other].append(node)
    for node in order:

        def lean(member: int, middle: float = angles_of[node]) -> float:
            """How far a member leans towards the sectors of its other neighbours."""
            others = [angles_of[root(other)] for other in near[member] if hops[other]]
            return sum(math.sin(angle - middle) for angle in others) / max(1, len(others))

        held = sorted(members[node], key=lambda member: (-lean(member), member))
        for number, member in enumerate(held):
            angles_of[member] = angles_of[node] + size[node] * turn * (0.5 - (number + 0.5) / len(held))
    return angles_of


def _area(part: float) -> float:
    return SMALLEST + (LARGEST - SMALLEST) * part


def _line(part: float) -> dict[str, Any]:
    """Width and opacity of an edge."""
    width = NARROWEST + (WIDEST - NARROWEST) * part
    return {"linewidth": width, "alpha": 0.2 + 0.6 * math.sqrt(part), "color": EDGE}


def _draw_rings(axis: Axes, scene: _Scene, legend: dict[str, str]) -> None:
    from matplotlib.patches import Circle
    from matplotlib.patheffects import withStroke

    table, largest = scene.table, scene.largest
    values, spreads = scene.values, scene.spreads
    hops = dict(zip(table.ids.tolist(), table.hops.tolist(), strict=True))
    angles = _angles(hops, scene.edges)
    places = {node: (hops[node] * math.cos(a), hops[node] * math.sin(a)) for node, a in angles.items()}
    places[table.node] = (0.0, 0.0)
    rings = max(1, *hops.values())
    for hop in range(1, rings + 1):
        axis.add_patch(Circle((0.0, 0.0), hop, fill=False, edgecolor=SOFT, linewidth=0.8, zorder=0))
    for (node, other), share in sorted(scene.edges.items(), key=lambda item: item[1]):
        ends, bent = (places[node], places[other]), None
        if table.node not in (node, other):
            bent = _bend((hops[node], hops[other]), (angles[node], angles[other]))
        _draw_edge(axis, ends, bent, share / scene.heaviest)
    for node in table.ids.tolist():
        x, y = places[node]
        colour = scene.colours[node]
        around = _area((values[node] + spreads[node]) / largest)
        if spreads[node] > 0.0:
            axis.scatter([x], [y], s=around, color=[colour], alpha=0.4, linewidths=0.0, zorder=2)
        rim = 1.8 if node == table.node else 0.7
        area = _area(values[node] / largest)
        axis.scatter([x], [y], s=area, color=[colour], edgecolors=INK, linewidths=rim, zorder=3)
        angle, reach = angles.get(node, -math.pi / 2.0), math.sqrt(around / math.pi) + 3.0
        axis.annotate(
            scene.names[node],
            (x, y),
            xytext=(reach * math.cos(angle), reach * math.sin(angle)),
            textcoords="offset points",
            ha="left" if math.cos(angle) > 0.3 else "right" if math.cos(angle) < -0.3 else "center",
            va="bottom" if math.sin(angle) > 0.3 else "top" if math.sin(angle) < -0.3 else "center",
            fontsize=8,
            fontweight="bold" if node == table.node else "normal",
            color=INK,
            path_effects=[withStroke(linewidth=2.0, foreground="white")],
            zorder=4,
        )
    edge = rings + 0.35
    axis.set(xlim=(-edge, edge), ylim=(-edge, edge), aspect="equal")
    axis.set_axis_off()
    shown = len(scene.bars) - 1
    title = f"What node {scene.names[table.node]} draws on"
    if shown < scene.count:
        title += f": {shown} of {scene.count} neighbours"
    axis.set_title(title, fontsize=10, color=INK, loc="left")
    _draw_keys(axis, scene, legend)


def _bend(hops: Pair, angles: tuple[float, float]) -> tuple[float, float] | None:
    """The control point of an edge: inwards along a ring, past the middle node; None for a straight edge."""
    apart = math.remainder(angles[1] - angles[0], 2.0 * math.pi)
    if hops[0] != hops[1] and abs(apart) < math.pi / 2.0:
        return None
    middle, far = angles[0] + apart / 2.0, sum(hops) / 2.0 * (0.5 + 0.4 * math.cos(apart / 2.0))
    return far * math.cos(middle), far * math.sin(middle)


def _draw_edge(axis: Axes, ends: Any, bent: tuple[float, float] | None, part: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if bent is None:
        path = Path([*ends], [Path.MOVETO, Path.LINETO])
    else:
        path = Path([ends[0], bent, ends[1]], [Path.MOVETO, Path.CURVE3, Path.CURVE3])
    axis.add_patch(PathPatch(path, fill=False, capstyle="round", zorder=1, **_line(part)))


def _draw_keys(axis: Axes, scene: _Scene, legend: dict[str, str]) -> None:
    """Scales of area and width below, classes above."""
    from matplotlib.lines import Line2D

    handles, words = [], []
    for part in (0.25, 1.0):
        value = _round_down(part * scene.largest)
        part = value / scene.largest
        dot = Line2D([], [], marker="o", linestyle="", markersize=math.sqrt(_area(part)))
        dot.set(color=_shade(part) if scene.coloured else "white", markeredgecolor=INK, markeredgewidth=0.7)
        handles.append(dot)
        words.append(f"{scene.method} {value:g}")
    for part in (0.25, 1.0) if scene.edges else ():
        share = _round_down(part * scene.heaviest)
        handles.append(Line2D([], [], **_line(share / scene.heaviest)))
        words.append(f"edge {share:g}")
    place: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.02), "ncols": 4}
    place |= {"borderpad": 1.3, "handlelength": 2.4, "handletextpad": 1.2, "columnspacing": 1.6}
    keys = axis.legend(handles, words, frameon=False, fontsize=7.5, **place)
    if legend:
        axis.add_artist(keys)
        dots = [
            Line2D([], [], marker="o", linestyle="", markersize=6, color=colour, label=kind)
            for kind, colour in legend.items()
        ]
        place = {"loc": "upper right", "bbox_to_anchor": (1.02, 1.0), "handletextpad": 0.2}
        axis.legend(handles=dots, frameon=False, fontsize=7.5, title="class", title_fontsize=8, **place)


def _round_down(value: float) -> float:
    """One significant digit, downwards."""
    if value <= 0.0:
        return 0.0
    unit = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.floor(value / unit + 1e-9) * unit:.1g}")


def _draw_bars(panels: Sequence[Axes], scene: _Scene) -> None:
    """A panel per method, a row per neighbour, the largest on top."""
    table = scene.table.some(scene.bars)
    ids, rows = table.ids.tolist(), list(range(len(table)))
    for panel, method in zip(panels, table.methods, strict=True):
        values, spreads = table.value(method).tolist(), table.spread(method)
        panel.barh(rows, values, height=0.72, color=[scene.colours[node] for node in ids])
        if spreads is not None:
            seen = [row for row in rows if values[row] > 0.0]
            whiskers: dict[str, Any] = {"ecolor": INK, "elinewidth": 0.9, "capsize": 1.8}
            sizes = [float(spreads[row]) for row in seen]
            panel.errorbar([values[row] for row in seen], seen, xerr=sizes, fmt="none", **whiskers)
        panel.set_ylim(max(len(rows), LEAST_ROWS) - 0.4, -0.6)
        panel.set_xlim(left=0.0)
        heading = "raw, top layer" if method == "raw" else method
        bold = "bold" if method == scene.method else "normal"
        panel.set_title(heading, fontsize=9, color=INK, fontweight=bold)
        words = [f"{scene.names[node]}{' (itself)' if node == table.node else ''}" for node in ids]
        panel.set_yticks(rows, words if panel is panels[0] else [""] * len(rows), fontsize=7.5)
        panel.tick_params(axis="y", length=0)
        panel.tick_params(axis="x", labelsize=7.5)
        panel.locator_params(axis="x", nbins=3)
        for side in ("top", "right", "left"):
            panel.spines[side].set_visible(False)
    if table.rollout_spread is not None:
        label = f"mean ± one standard deviation over {scene.samples} posterior samples"
        panels[len(panels) // 2].set_xlabel(label, fontsize=7.5, color=INK)
