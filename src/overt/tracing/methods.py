"""Raw attention, attention rollout and attention flow (Abnar & Zuidema 2020, section 3).

All three answer to the same call and give (batch, layer, query, token) in float64, with one more axis after
the layer for `heads="each"`. They read plain arrays: from Hugging Face's `output.attentions`, from a file, or
from a `Trace`, which has them as methods.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, Union

import numpy as np
import torch
from torch import Tensor

from overt import _check
from overt.tracing.graph import Graph, Heads, averaged, check_heads, check_residual, numbers, unit_rows
from overt.tracing.progress import watching

METHODS = ("raw", "rollout", "flow")
MOST_CELLS = 2**26  # of the levels that flow holds at once, in float64

Numbers: TypeAlias = Union[int, Sequence[int], Tensor, "np.ndarray[Any, Any]", None]


@dataclass(frozen=True)
class Asked:
    """What a call asks for, checked."""

    queries: list[int]
    layers: list[int]
    heads: Heads
    residual: float


def ask(graph: Graph, queries: Numbers, layers: Numbers, heads: Heads, residual: float) -> Asked:
    """Check the arguments that all methods share."""
    listed: Any = heads
    heads = listed.tolist() if hasattr(listed, "tolist") else heads
    check_heads(heads, graph.heads)
    check_residual(residual)
    heads = heads if isinstance(heads, str) else list(heads)
    if graph.heads == 0:
        averaged(graph.maps[0], heads)  # says that single heads were not kept
    return Asked(
        numbers("queries", queries, graph.queries), numbers("layers", layers, graph.layers), heads, residual
    )


def raw_of(graph: Graph, asked: Asked) -> Tensor:
    """The maps themselves; of an encoder–decoder, cross-attention beside decoder self-attention."""
    graph = graph.without_padding()
    rows = []
    for layer in asked.layers:
        cells = averaged(graph.maps[layer], asked.heads).double()
        if graph.cross:
            cells = torch.cat([averaged(graph.cross[layer], asked.heads).double(), cells], dim=-1)
        rows.append(cells[..., asked.queries, :])
    return torch.stack(rows, dim=1)


def rollout_of(graph: Graph, asked: Asked) -> Tensor:
    """Products of levels. One row costs one vector–matrix product per level, never a product of matrices.

    Rows of all requested layers go down together, or whole matrices up, whichever is fewer multiplications;
    each level is made once.
    """
    graph = graph.without_padding()
    each = asked.heads == "each"
    below: Heads = "mean" if each else asked.heads
    places = [graph.first + query for query in asked.queries]
    layer_at = {graph.level_of(layer): layer for layer in asked.layers}
    highest = max(layer_at)
    copies = graph.heads if each else 1

    def start(number: int, level: Tensor) -> Tensor:
        """The rows that begin at a level, (batch, rows, token)."""
        top = graph.level(number, "each", asked.residual) if each else level
        return top[..., places, :].flatten(1, -2)

    down = sum(number * copies * len(places) for number in layer_at)
    up = highest * graph.tokens + len(layer_at) * copies * len(places)
    parts: dict[int, Tensor] = {}
    if down <= up:
        for number in range(highest, 0, -1):
            level = graph.level(number, below, asked.residual)
            parts = {layer: rows @ level for layer, rows in parts.items()}
            if number in layer_at:
                parts[layer_at[number]] = start(number, level)
    else:
        product: Tensor | None = None
        for number in range(1, highest + 1):
            level = graph.level(number, below, asked.residual)
            if number in layer_at:
                rows = start(number, level)
                parts[layer_at[number]] = rows if product is None else rows @ product
            product = level if product is None else level @ product
    found = torch.stack([parts[layer] for layer in asked.layers], dim=1)
    if each:
        found = found.view(*found.shape[:2], copies, len(places), graph.tokens)
    return _only_real(found, graph, asked.queries)


def flow_of(graph: Graph, asked: Asked, threads: int | None = None, progress: bool | None = None) -> Tensor:
    """Maximum flows from each query's node to each input, by an exact solver."""
    if threads is not None:
        _check.whole("threads", threads, 1)
    graph = graph.without_padding()
    each = asked.heads == "each"
    batch, copies = graph.mask.shape[0], graph.heads if each else 1
    shape = (batch, len(asked.layers), copies, len(asked.queries), graph.tokens)
    found = torch.zeros(shape, dtype=torch.float64)
    known: dict[bytes, Tensor] = {}  # equal graphs, such as uniform ones, are solved once
    highest = max(graph.level_of(layer) for layer in asked.layers)
    at_once = max(1, MOST_CELLS // (highest * graph.tokens**2))
    with watching(progress, batch * (copies * len(asked.layers) if each else 1)) as watch:
        for start in range(0, batch, at_once):
            some = graph.examples(start, start + at_once)
            levels = _levels(some, asked, highest)
            for number in range(levels.shape[1]):
                example = start + number
                real = some.mask[number].nonzero().flatten().numpy()
                stack = levels[:, number]
                if len(real) < graph.tokens:
                    stack = stack[:, real][:, :, real]
                stack = np.ascontiguousarray(stack)
                one = some.examples(number, number + 1) if each else None
                key = _key(stack, real) if batch > 1 and not each else b""
                if key not in known:
                    _solve(found[example], stack, real, graph, asked, one, watch, threads)
                    known.update({key: found[example]} if key else {})
                else:
                    found[example] = known[key]
    return found if each else found.squeeze(2)


def _levels(graph: Graph, asked: Asked, highest: int) -> np.ndarray[Any, Any]:
    """The levels of some examples, (level, example, token, token), made in place: two copies may not fit."""
    below: Heads = "mean" if asked.heads == "each" else asked.heads
    levels = np.empty((highest, graph.mask.shape[0], graph.tokens, graph.tokens))
    for number in range(highest):
        levels[number] = _capacities(graph, number + 1, below, asked.residual)
    return levels


def _capacities(graph: Graph, number: int, heads: Heads, residual: float) -> np.ndarray[Any, Any]:
    passing = float("inf") if graph.cross else 1.0
    found: np.ndarray[Any, Any] = graph.level(
        number, heads, residual, clip=graph.signed, passing=passing
    ).numpy()
    return found


def _solve(
    out: Tensor,
    stack: np.ndarray[Any, Any],
    real: np.ndarray[Any, Any],
    graph: Graph,
    asked: Asked,
    one: Graph | None,
    watch: Callable[..., Any],
    threads: int | None,
) -> None:
    """Flows of one example into (layer, head, query, token); `one` is its graph, for single heads."""
    from overt.tracing.maxflow import solve

    place = {int(token): number for number, token in enumerate(real)}
    queries = {
        number: place[graph.first + query]
        for number, query in enumerate(asked.queries)
        if graph.first + query in place
    }
    if not queries:
        return
    rows, columns = torch.tensor(list(queries)), torch.from_numpy(real)

    def flows(levels: np.ndarray[Any, Any], tops: list[int]) -> Tensor:
        sources = np.array([(top, node) for top in tops for node in queries.values()], dtype=np.int64)
        values = torch.from_numpy(watch(solve, levels, sources, threads))
        return values.view(len(tops), len(queries), len(real))

    tops = [graph.level_of(layer) for layer in asked.layers]
    if one is None:
        out[:, 0, rows.unsqueeze(1), columns] = flows(stack, tops)
        return
    for number, top in enumerate(tops):
        own = _capacities(one, top, "each", asked.residual)[0]
        for head in range(own.shape[0]):
            part = stack[:top].copy()
            part[-1] = own[head][np.ix_(real, real)]
            out[number, head, rows.unsqueeze(1), columns] = flows(part, [top])[0]


def _key(stack: np.ndarray[Any, Any], real: np.ndarray[Any, Any]) -> bytes:
    return hashlib.sha256(stack.tobytes() + real.tobytes()).digest()


def _only_real(found: Tensor, graph: Graph, queries: list[int]) -> Tensor:
    real = graph.mask
    both = real[:, [graph.first + query for query in queries]].unsqueeze(-1) & real.unsqueeze(1)
    while both.dim() < found.dim():
        both = both.unsqueeze(1)
    return found.masked_fill(~both, 0.0)


def read(
    graph: Graph,
    method: Callable[[Graph, Asked], Tensor],
    queries: Numbers,
    layers: Numbers,
    heads: Heads,
    residual: float,
    normalize: bool,
    receptive_field: bool,
) -> Tensor:
    """A method's values, (batch, layer, [head,] query, token), with the normalisations that are asked for."""
    asked = ask(graph, queries, layers, heads, residual)
    values = method(graph, asked)
    if receptive_field:
        flat = method(graph.uniform(), replace(asked, heads="mean"))
        flat = flat if flat.dim() == values.dim() else flat.unsqueeze(2)
        values = values / torch.where(flat == 0.0, 1.0, flat)
        values = values.masked_fill((flat == 0.0).expand_as(values), 0.0)
    return unit_rows(values) if normalize or receptive_field else values


Arrays: TypeAlias = Union[Tensor, "np.ndarray[Any, Any]", Sequence[Any]]


def raw(
    attentions: Arrays,
    *,
    mask: Any = None,
    encoder: Arrays | None = None,
    cross: Arrays | None = None,
    visible: Any = None,
    queries: Numbers = None,
    layers: Numbers = None,
    heads: Heads = "mean",
    residual: float = 0.5,
    normalize: bool = False,
    receptive_field: bool = False,
) -> Any:
    """The maps of each layer as they are, in the shape that the other methods have; `residual` is ignored.

    The arguments are those of `rollout`.
    """
    graph, back = graph_of(attentions, mask, encoder, cross, visible)
    return back(read(graph, raw_of, queries, layers, heads, residual, normalize, receptive_field))


def rollout(
    attentions: Arrays,
    *,
    mask: Any = None,
    encoder: Arrays | None = None,
    cross: Arrays | None = None,
    visible: Any = None,
    queries: Numbers = None,
    layers: Numbers = None,
    heads: Heads = "mean",
    residual: float = 0.5,
    normalize: bool = False,
    receptive_field: bool = False,
) -> Any:
    """Attention rollout (equation 1): the product of the layers' maps, each mixed with its residual.

    Args:
        attentions: (batch, layer, head, query, key), or one (batch, head, query, key) per layer as Hugging
            Face returns them: numpy arrays, tensors or nested lists. Of an encoder–decoder, the decoder's
            self-attention.
        mask: (batch, token), 0 or False at padding; tokens are source, then target in an encoder–decoder.
        encoder: an encoder–decoder's encoder maps.
        cross: its cross-attention maps, (batch, head, target, source) per decoder layer.
        visible: boolean (batch or 1, query, key), which cells attention may fill, for `receptive_field`: one
            for all layers or one per layer, such as a sliding window's. None takes the lower triangle for
            causal maps and everything for others.
        queries: which rows; all by default.
        layers: which layers; all by default. Negative numbers count from the end.
        heads: "mean" averages all heads; a list averages those, in every layer; "each" gives each head's
            own map on top of the layers below averaged (appendix A.1), and one more axis after the layer.
        residual: weight of the residual connection, I against the map.
        normalize: make each row sum to one.
        receptive_field: divide by what the method gives for uniform attention under the same mask and
            residual, then make rows sum to one; for causal models, whose first tokens are seen by all.

    Returns:
        (batch, layer, query, token) in float64, an array for arrays and a tensor for tensors; (batch, layer,
        head, query, token) for `heads="each"`. Zeros at padding.
    """
    graph, back = graph_of(attentions, mask, encoder, cross, visible)
    return back(read(graph, rollout_of, queries, layers, heads, residual, normalize, receptive_field))


def flow(
    attentions: Arrays,
    *,
    mask: Any = None,
    encoder: Arrays | None = None,
    cross: Arrays | None = None,
    visible: Any = None,
    queries: Numbers = None,
    layers: Numbers = None,
    heads: Heads = "mean",
    residual: float = 0.5,
    normalize: bool = False,
    receptive_field: bool = False,
    threads: int | None = None,
    progress: bool | None = None,
) -> Any:
    """Attention flow: the maximum flow from each query to each input, edges carrying up to their weight.

    The arguments are those of `rollout`, and two more. Values are flows, in [0, 1] for maps whose rows sum to
    one; the authors' code reports them with rows that sum to one (`normalize=True`).

    Args:
        attentions: as for `rollout`, not negative.
        mask: as for `rollout`.
        encoder: as for `rollout`.
        cross: as for `rollout`.
        visible: as for `rollout`.
        queries: which rows; one costs what one costs.
        layers: which layers.
        heads: "mean", a list, or "each".
        residual: weight of the residual connection.
        normalize: make each row sum to one.
        receptive_field: as for `rollout`.
        threads: how many; all cores by default, where the work is worth it.
        progress: show a bar; by default where it would take more than a few seconds on a terminal.
    """
    graph, back = graph_of(attentions, mask, encoder, cross, visible)
    method = partial(flow_of, threads=threads, progress=progress)
    return back(read(graph, method, queries, layers, heads, residual, normalize, receptive_field))


def graph_of(
    attentions: Arrays,
    mask: Any = None,
    encoder: Arrays | None = None,
    cross: Arrays | None = None,
    visible: Any = None,
) -> tuple[Graph, Callable[[Tensor], Any]]:
    """Arrays as a graph, and the way back from tensors to the kind of array that came."""
    maps, tensors = _layers("attentions", attentions)
    below = [] if encoder is None else _layers("encoder", encoder)[0]
    across = [] if cross is None else _layers("cross", cross)[0]
    batch, queries, keys = maps[0].shape[0], maps[0].shape[-2], maps[0].shape[-1]
    if queries != keys:
        raise ValueError(f"attentions must be square, got {queries} queries and {keys} keys")
    if below and not across:
        raise ValueError("an encoder–decoder's maps need its cross-attention: give cross=…")
    source = 0
    if across:
        source = across[0].shape[-1]
        if len(across) != len(maps) or across[0].shape[-2] != queries:
            raise ValueError(
                f"cross must have one map per decoder layer, {len(maps)} of {queries} queries, "
                f"got {len(across)} of {across[0].shape[-2]}"
            )
        if below and below[0].shape[-2:] != (source, source):
            raise ValueError(
                f"encoder must have maps of {source} queries and keys, as cross has, "
                f"got {tuple(below[0].shape[-2:])}"
            )
    for name, group in (("encoder", below), ("cross", across)):
        if group and group[0].shape[0] != batch:
            raise ValueError(f"{name} must have the batch of attentions, {batch}, got {group[0].shape[0]}")
    tokens = source + queries
    if mask is None:
        real = torch.ones(batch, tokens, dtype=torch.bool)
    else:
        real = torch.as_tensor(mask).cpu() != 0
        if real.shape != (batch, tokens):
            raise ValueError(f"mask must have shape {(batch, tokens)}, got {tuple(real.shape)}")
    graph = Graph(maps, real, below, across)
    graph = replace(graph, visible=_visible(graph, visible))

    def back(values: Tensor) -> Any:
        return values if tensors else values.numpy()

    return graph, back


def _visible(graph: Graph, given: Any) -> list[Tensor | None]:
    """Which cells each map may fill: as told, or by whether all maps are causal."""
    rest: list[Tensor | None] = [None] * (len(graph.encoder) + len(graph.cross))
    n = graph.queries
    if given is None:
        # Padding's rows may hold anything, so they have no say.
        real = graph.without_padding().maps
        causal = n > 1 and all(not bool(cells.triu(1).any()) for cells in real)
        seen = torch.ones(1, n, n, dtype=torch.bool).tril() if causal else None
        return [seen] * graph.layers + rest
    listed = given if isinstance(given, list | tuple) else [given] * graph.layers
    masks: list[Tensor | None] = [_tensor(one) != 0 for one in listed]
    sizes = {tuple(one.shape) for one in masks if one is not None}
    if len(masks) != graph.layers or not sizes <= {(1, n, n), (graph.mask.shape[0], n, n)}:
        raise ValueError(
            f"visible must have shape (1, {n}, {n}) or ({graph.mask.shape[0]}, {n}, {n}), one for all layers "
            f"or one per layer, got {len(masks)} of {sorted(sizes)}"
        )
    return masks + rest


def _layers(name: str, value: Arrays) -> tuple[list[Tensor], bool]:
    """Maps, one tensor per layer, and whether tensors came."""
    if value is None or isinstance(value, Mapping) or (isinstance(value, tuple) and None in value):
        what = type(value).__name__ if not isinstance(value, tuple) else "a tuple with None in it"
        raise ValueError(f"{name} must be attention maps, such as a model's output.attentions, got {what}")
    listed = isinstance(value, list | tuple)
    tensors = isinstance(value, Tensor) or (listed and len(value) > 0 and isinstance(value[0], Tensor))
    if listed and len(value) == 0:
        raise ValueError(f"{name} must hold at least one layer, got none (was sdpa asked for attentions?)")
    if listed and (tensors or hasattr(value[0], "shape")):
        layers = [_map(f"{name}[{number}]", cells) for number, cells in enumerate(value)]
    else:
        whole = _tensor(value)
        if whole.dim() != 5:
            raise ValueError(
                f"{name} must have shape (batch, layer, head, query, key), got {tuple(whole.shape)}"
            )
        layers = [_map(name, cells) for cells in whole.unbind(1)]
    shapes = {(cells.shape[0], *cells.shape[-2:]) for cells in layers}
    if len(shapes) > 1:
        raise ValueError(f"{name} must have the same size in every layer, got {sorted(shapes)}")
    return layers, tensors


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    array = np.asarray(value)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _map(name: str, value: Any) -> Tensor:
    cells = _tensor(value)
    if cells.dim() != 4:
        raise ValueError(f"{name} must have shape (batch, head, query, key), got {tuple(cells.shape)}")
    if 0 in cells.shape:
        raise ValueError(f"{name} must not be empty, got shape {tuple(cells.shape)}")
    if not cells.is_floating_point():
        cells = cells.double()
    if not bool(torch.isfinite(cells).all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity")
    if bool((cells < 0).any()):
        raise ValueError(
            f"{name} must not be negative, got {float(cells.min()):g} (logits need a softmax first)"
        )
    return cells
