"""Traces made by hand, without a model: quick, and as hostile as one likes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overt.tracing.kept_rows import KeptRows
from overt.tracing.nodes import NodeTrace
from overt.tracing.result import PosteriorDraw, Trace
from overt.view.captions import CaptionMaps, Draw
from overt.view.pack import unpack
from overt.view.pages import Page

WORDS = ["[CLS]", "the", "key", "to", "the", "cabinets", "is", "lost", "[SEP]"]


def maps(*shape: int, seed: int = 0, causal: bool = False, sharp: float = 2.0) -> Tensor:
    """Random maps (…, query, key) whose rows sum to one."""
    scores = sharp * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    if causal:
        scores = scores.masked_fill(torch.ones(shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(dim=-1)


def made(
    tokens: Sequence[str] | Sequence[Sequence[str]] = WORDS,
    *,
    layers: int = 3,
    heads: int = 4,
    causal: bool = False,
    seed: int = 0,
    **fields: Any,
) -> Trace:
    """A trace of random maps over these tokens; examples of a batch are given by a list of lists."""
    listed: list[list[str]] = [list(tokens)] if isinstance(tokens[0], str) else [list(one) for one in tokens]  # type: ignore[arg-type]
    batch, count = len(listed), len(listed[0])
    shape = (batch, heads, count, count) if heads else (batch, count, count)
    special = torch.tensor([[word.startswith("[") and word.endswith("]") for word in one] for one in listed])
    given: dict[str, Any] = {
        "kind": "causal" if causal else "encoder",
        "maps": [maps(*shape, seed=1000 * seed + layer, causal=causal) for layer in range(layers)],
        "mask": torch.ones(batch, count, dtype=torch.bool),
        "tokens": listed,
        "special": special,
    }
    return Trace(**{**given, **fields})


def rows_of(
    tokens: Sequence[str] = WORDS,
    *,
    layers: int = 3,
    queries: Sequence[int] | None = None,
    seed: int = 0,
    sharp: float = 2.0,
    **fields: Any,
) -> Trace:
    """A trace of random rows without maps, as one of a long text that was saved; the first token has most."""
    count = len(tokens)
    chosen = [count - 1] if queries is None else list(queries)
    values = {}
    for number, method in enumerate(("raw", "rollout")):
        cells = maps(1, layers, len(chosen), count, seed=2 * seed + number, sharp=sharp).double()
        cells[..., 0] += 1.0
        values[method] = cells / cells.sum(dim=-1, keepdim=True)
    special = torch.tensor([[word.startswith("[") and word.endswith("]") for word in tokens]])
    given: dict[str, Any] = {
        "kind": "causal",
        "maps": [],
        "mask": torch.ones(1, count, dtype=torch.bool),
        "tokens": [list(tokens)],
        "special": special,
        "rows": KeptRows(chosen, count, values),
    }
    return Trace(**{**given, **fields})


def pair(
    source: Sequence[str] = ("ein", "Schlüssel", "fehlt", "</s>"),
    target: Sequence[str] = ("<s>", "a", "key", "is", "missing"),
    *,
    layers: int = 2,
    heads: int = 3,
) -> Trace:
    """An encoder–decoder's trace."""
    first, last = len(source), len(target)
    return Trace(
        kind="encoder–decoder",
        maps=[maps(1, heads, last, last, seed=layer, causal=True) for layer in range(layers)],
        encoder_maps=[maps(1, heads, first, first, seed=10 + layer) for layer in range(layers + 1)],
        cross=[maps(1, heads, last, first, seed=20 + layer) for layer in range(layers)],
        mask=torch.ones(1, first + last, dtype=torch.bool),
        tokens=[[*source, *target]],
        special=torch.zeros(1, first + last, dtype=torch.bool),
    )


def recurrent(samples: int = 0) -> Trace:
    """A recurrent decoder's trace, which has only cross-attention, of one head."""
    both = pair(layers=1, heads=1)
    both.maps, both.encoder_maps = [], []
    both.draws = [PosteriorDraw([], [], [maps(1, 1, 5, 4, seed=30 + number)]) for number in range(samples)]
    return both


def sampled(samples: int = 5, **arguments: Any) -> Trace:
    """A trace with posterior samples, and outputs with three classes."""
    first = made(**arguments)
    shapes = [tuple(cells.shape) for cells in first.maps]
    draws = [
        PosteriorDraw(
            [maps(*shape, seed=100 * number + layer) for layer, shape in enumerate(shapes)],
            outputs=torch.randn(len(first), 3, generator=torch.Generator().manual_seed(number)),
        )
        for number in range(1, samples + 1)
    ]
    means = [torch.stack([draw.maps[layer] for draw in draws]).mean(dim=0) for layer in range(len(shapes))]
    drawn = torch.stack([draw.outputs for draw in draws if draw.outputs is not None])
    first.maps, first.draws = means, draws
    first.outputs, first.labels = drawn.mean(dim=0), ["singular", "plural", "neither"]
    return first


def evolving(**arguments: Any) -> Trace:
    """A trace with the parts of evolving attention."""
    first = made(**arguments)
    shapes = [tuple(cells.shape) for cells in first.maps]
    first.parts = {
        "attention": [maps(*shape, seed=50 + layer) for layer, shape in enumerate(shapes)],
        "convolution": [None, *(maps(*shape, seed=70 + layer) for layer, shape in enumerate(shapes[1:]))],
        "fused": list(first.maps),
    }
    return first


def image(rows: int = 4, columns: int = 5, *, layers: int = 2, heads: int = 3) -> Trace:
    """A trace of an image cut into patches, after a token of its own."""
    names = ["[CLS]", *(f"patch {i},{j}" for i in range(rows) for j in range(columns))]
    picture = torch.randint(
        0, 256, (1, 8 * rows, 8 * columns, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    size = (8 * rows, 8 * columns)
    return made(names, layers=layers, heads=heads, grid=(rows, columns), image=size, picture=picture)


def neighbourhood(nodes: int = 7, layers: int = 2, heads: int = 2) -> NodeTrace:
    """A graph network's trace: a ring with self-loops, each node attending to both neighbours and itself."""
    around = torch.arange(nodes)
    source = torch.cat([around, (around + 1) % nodes, (around - 1) % nodes])
    edges = torch.stack([source, around.repeat(3)])
    weights = [
        maps(nodes, heads, 1, 3, seed=layer).squeeze(2).permute(2, 0, 1).reshape(3 * nodes, heads)
        for layer in range(layers)
    ]
    return NodeTrace(nodes, [edges] * layers, weights)


def caption(words: tuple[str, ...] = ("a", "dog", "(end)"), regions: int = 4) -> CaptionMaps:
    """A caption over a picture of 2 × 2 regions."""
    count = len(words)
    weights = torch.softmax(torch.arange(count * regions).view(count, regions).float(), dim=1)
    return CaptionMaps(
        picture=torch.arange(3 * 32 * 32, dtype=torch.uint8).view(3, 32, 32),
        grid=(2, 2),
        words=words,
        ended=True,
        probabilities=torch.full((count,), 0.5),
        others=[[(word, 0.5, 0.1)] for word in words],
        weights=weights,
        prior=torch.full((regions,), 1 / regions),
        spread=weights / 10,
        samples=20,
        draws=[Draw(" ".join(words[:-1]), True, 20)],
        model="BAM-WC, scenes",
    )


def field(shown: Page, name: str, layer: int, entry: int = 0) -> Tensor:
    about = shown.index["traces"][entry]["fields"][name][layer]
    return unpack(about, shown.blocks[about["at"]])[0]
