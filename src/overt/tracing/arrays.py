"""Methods on plain arrays: from Hugging Face's `output.attentions`, from a file, from anywhere.

They return (batch, layer, query, token) in float64, with an extra axis after the layer for `heads="each"`: an
array for arrays and a tensor for tensors, with zeros at padding. A `Trace` has the same methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, Union, Unpack

import numpy as np
import torch
from torch import Tensor

from overt.tracing.levels import Levels
from overt.tracing.methods.flow import FlowArguments
from overt.tracing.methods.method import method_of, methods, read_levels
from overt.tracing.options import Arguments, Numbers

Arrays: TypeAlias = Union[Tensor, "np.ndarray[Any, Any]", Sequence[Any]]


class ArrayArguments(Arguments, total=False):
    """Keyword arguments of `read`, for methods without additional ones."""

    mask: Any
    encoder: Arrays | None
    cross: Arrays | None
    visible: Any
    queries: Numbers


class FlowArrayArguments(FlowArguments, ArrayArguments, total=False):
    """Keyword arguments of `flow`."""


def read(
    method: str,
    attentions: Arrays,
    *,
    mask: Any = None,
    encoder: Arrays | None = None,
    cross: Arrays | None = None,
    visible: Any = None,
    queries: Numbers = None,
    **options: Any,
) -> Any:
    """Apply a method that reads maps, chosen by its name.

    Args:
        method: "raw", "rollout", "flow" or your own.
        attentions: (batch, layer, head, query, key), or one (batch, head, query, key) per layer as Hugging
            Face returns them: numpy arrays, tensors or nested lists. For an encoder–decoder, the decoder's
            self-attention.
        mask: (batch, token), 0 or False at padding; in an encoder–decoder, source, then target.
        encoder: an encoder–decoder's encoder maps.
        cross: its cross-attention maps, (batch, head, target, source) per decoder layer.
        visible: boolean (batch or 1, query, key), which cells attention may fill, for `receptive_field`: one
            mask for all layers or one per layer, such as a sliding window's. None means the lower triangle
            for causal maps and all cells for others.
        queries: which rows; all by default.
        options: the method's other arguments, as in `Options`.

    Returns:
        (batch, layer, query, token) in float64, an array for arrays and a tensor for tensors; (batch, layer,
        head, query, token) for `heads="each"`. Zeros at padding.
    """
    reader = method_of(method, methods("maps"))
    levels, back = levels_of(attentions, mask, encoder, cross, visible)
    if visible is None and options.get("receptive_field"):
        levels = replace(levels, visible=_visible_by_maps(levels))
    return back(read_levels(reader, levels, queries, options))


def raw(attentions: Arrays, **options: Unpack[ArrayArguments]) -> Any:
    """The maps of each layer as they are, in the shape of the other methods' results.

    Args:
        attentions: (batch, layer, head, query, key), or one map per layer; negative values are refused.
        options: mask, encoder, cross, visible, queries as for `overt.tracing.read`; layers, heads, normalize,
            receptive_field as in `overt.tracing.Options`.
    """
    return read("raw", attentions, **options)


def rollout(attentions: Arrays, **options: Unpack[ArrayArguments]) -> Any:
    """Attention rollout (equation 1): the product of the layers' maps, each mixed with its residual.

    Args:
        attentions: (batch, layer, head, query, key), or one (batch, head, query, key) per layer as Hugging
            Face returns them: numpy arrays, tensors or nested lists. For an encoder–decoder, the decoder's
            self-attention.
        options: mask, encoder, cross, visible, queries as for `overt.tracing.read`; layers, heads, residual
            (0.5 by default), normalize, receptive_field as in `overt.tracing.Options`.
    """
    return read("rollout", attentions, **options)


def flow(attentions: Arrays, **options: Unpack[FlowArrayArguments]) -> Any:
    """Attention flow: the maximum flow from each query to each input, edges carrying up to their weight.

    Values are flows, in [0, 1] for maps whose rows sum to one; the authors' code reports them normalised so
    that rows sum to one (`normalize=True`).

    Args:
        attentions: as for `rollout`.
        options: those of `rollout`, and threads and progress as in `overt.tracing.FlowOptions`.
    """
    return read("flow", attentions, **options)


def levels_of(
    attentions: Arrays,
    mask: Any = None,
    encoder: Arrays | None = None,
    cross: Arrays | None = None,
    visible: Any = None,
) -> tuple[Levels, Callable[[Tensor], Any]]:
    """Arrays as levels, and a function that converts results to the kind of array that was passed."""
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
    levels = Levels(maps, real, below, across)
    if visible is not None:
        levels = replace(levels, visible=_visible(levels, visible))

    def back(values: Tensor) -> Any:
        return values if tensors else values.numpy()

    return levels, back


def _visible_by_maps(levels: Levels) -> list[Tensor | None]:
    """Which cells each map may fill, by whether all maps are causal."""
    n = levels.queries
    # Rows of padding may hold anything, so they are ignored.
    real = levels.without_padding().maps
    causal = n > 1 and all(isinstance(cells, Tensor) and not bool(cells.triu(1).any()) for cells in real)
    seen = torch.ones(1, n, n, dtype=torch.bool).tril() if causal else None
    return [seen] * levels.layers + [None] * (len(levels.encoder) + len(levels.cross))


def _visible(levels: Levels, visible: Any) -> list[Tensor | None]:
    """Which cells each map may fill, as given."""
    rest: list[Tensor | None] = [None] * (len(levels.encoder) + len(levels.cross))
    n = levels.queries
    listed = visible if isinstance(visible, list | tuple) else [visible] * levels.layers
    masks: list[Tensor | None] = [_tensor(mask) != 0 for mask in listed]
    sizes = {tuple(mask.shape) for mask in masks if mask is not None}
    if len(masks) != levels.layers or not sizes <= {(1, n, n), (levels.mask.shape[0], n, n)}:
        raise ValueError(
            f"visible must have shape (1, {n}, {n}) or ({levels.mask.shape[0]}, {n}, {n}), one for all "
            f"layers or one per layer, got {len(masks)} of {sorted(sizes)}"
        )
    return masks + rest


def _layers(name: str, value: Arrays) -> tuple[list[Tensor], bool]:
    """Maps, one tensor per layer, and whether tensors were passed."""
    if value is None or isinstance(value, Mapping) or (isinstance(value, tuple) and None in value):
        what = type(value).__name__ if not isinstance(value, tuple) else "a tuple with None in it"
        raise ValueError(f"{name} must be attention maps, such as a model's output.attentions, got {what}")
    listed = isinstance(value, list | tuple)
    tensors = isinstance(value, Tensor) or (listed and len(value) > 0 and isinstance(value[0], Tensor))
    if listed and len(value) == 0:
        raise ValueError(f"{name} must hold at least one layer, got none (sdpa returns no attentions)")
    if listed and (tensors or hasattr(value[0], "shape")):
        layers = [_map(f"{name}[{number}]", cells) for number, cells in enumerate(value)]
    else:
        whole = _tensor(value)
        if whole.dim() != 5:
            raise ValueError(
                f"{name} must have shape (batch, layer, head, query, key), got {tuple(whole.shape)}"
            )
        if 0 in whole.shape:
            raise ValueError(f"{name} must not be empty, got shape {tuple(whole.shape)}")
        layers = list(_checked(name, whole).unbind(1))
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
    return _checked(name, cells)


def _checked(name: str, cells: Tensor) -> Tensor:
    """Maps of floats, after checking their values."""
    if not cells.is_floating_point():
        cells = cells.double()
    bits = {torch.float32: np.uint32, torch.float64: np.uint64}.get(cells.dtype)
    if bits is not None:
        # One pass: read as whole numbers, floats that are finite and have no sign lie below infinity.
        infinity = np.array(np.inf, dtype=np.float32 if bits is np.uint32 else np.float64).view(bits)
        if cells.numpy().view(bits).max() < infinity:
            return cells
    low, high = (float(end) for end in cells.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"{name} must be finite, got NaN or infinity")
    if low < 0:
        raise ValueError(f"{name} must not be negative, got {low:g} (logits need a softmax first)")
    return cells
