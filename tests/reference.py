"""Evolving attention once more, as slowly and plainly as can be: numpy, float64, loops over batch and taps.

Registered with transformers under a name of its own. It takes nothing from overt but the kernels: which
module is which kind and layer comes from the battery's table, and padding from the inputs themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "overt_tests_reference"
# Rows and columns that a 3 × 3 window reads, relative to its cell.
WINDOWS = {
    "encoder": ((-1, 0, 1), (-1, 0, 1)),
    "decoder": ((-2, -1, 0), (-2, -1, 0)),
    "cross": ((-2, -1, 0), (-1, 0, 1)),
}


@dataclass
class Place:
    kind: str
    tower: str
    layer: int
    kernel: np.ndarray | None
    bias: np.ndarray | None
    calls: int = 1


@dataclass
class Book:
    """What the reference knows of a model, and the maps of the pass that is running."""

    places: dict[Any, Place]
    real: dict[str, np.ndarray]  # kind → (batch, query), 1 for queries that are no padding
    alpha: float
    beta: float
    maps: dict[tuple[str, str, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    counts: dict[Any, int] = field(default_factory=dict)


book: Book | None = None


def open_book(new: Book | None) -> None:
    global book
    book = new


def array(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    assert book is not None
    assert dropout == 0.0
    place = book.places[module]
    layer = place.layer
    if place.calls > 1:
        layer = book.counts.get(module, 0)
        book.counts[module] = layer + 1
    q, k, v = array(query), array(key), array(value)
    batch, heads, queries, width = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    logits = np.zeros((batch, heads, queries, keys))
    for b in range(batch):
        for h in range(heads):
            logits[b, h] = q[b, h] @ k[b, h // group].T * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    if position_bias is not None:
        logits = logits + array(position_bias)
    seen = np.ones((batch, heads, queries, keys), dtype=bool)
    if attention_mask is not None:
        mask = array(attention_mask)
        seen &= mask > -1000.0
        logits = logits + np.where(mask > -1000.0, mask, 0.0)  # some fold their position bias into the mask
    real = book.real.get(place.kind)
    if real is not None:
        seen &= real.astype(bool)[:, None, :, None]

    current = np.where(seen, logits, 0.0)
    evolved = current
    if (place.tower, place.kind, layer - 1) in book.maps:
        before, known = book.maps[place.tower, place.kind, layer - 1]
        # A cell that the layer below did not see (a sliding window) has nothing to mix with.
        mixed = np.where(seen & known, book.alpha * before + (1.0 - book.alpha) * current, current)
        evolved = book.beta * convolve(mixed, place) + (1.0 - book.beta) * mixed
    evolved = np.where(seen, evolved, 0.0)
    book.maps[place.tower, place.kind, layer] = (evolved, seen)

    raised = np.where(seen, np.exp(evolved - evolved.max(axis=-1, keepdims=True)), 0.0)
    sums = raised.sum(axis=-1, keepdims=True)
    weights = np.divide(raised, sums, out=np.zeros_like(raised), where=sums > 0)
    output = np.zeros((batch, queries, heads, v.shape[-1]))
    for b in range(batch):
        for h in range(heads):
            output[b, :, h] = weights[b, h] @ v[b, h // group]
    return torch.from_numpy(output).to(query.dtype), torch.from_numpy(weights).to(query.dtype)


def convolve(image: np.ndarray, place: Place) -> np.ndarray:
    """ReLU of the convolution, tap by tap; what lies outside the image is zero."""
    assert place.kernel is not None
    assert place.bias is not None
    rows, columns = WINDOWS[place.kind]
    height, width = image.shape[2:]
    total = np.zeros_like(image) + place.bias[None, :, None, None]
    padded = np.pad(image, ((0, 0), (0, 0), (2, 2), (2, 2)))
    for i, dr in enumerate(rows):
        for j, dc in enumerate(columns):
            shifted = padded[:, :, 2 + dr : 2 + dr + height, 2 + dc : 2 + dc + width]
            total += np.einsum("oi,bihw->bohw", place.kernel[:, :, i, j], shifted)
    return np.maximum(total, 0.0)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, eager_mask)
