"""A caption and what each of its words drew on, for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

from torch import Tensor

from overt.view.index import picture_link, printable, short

END = "(end)"
RARE = "(rare word)"  # any that is not in the vocabulary; it has a probability, and is never written


class Draw(NamedTuple):
    """A caption that draws of random weights lead to.

    Attributes:
        text: the caption.
        ended: whether it has its end; otherwise it was cut at the longest length.
        times: how many draws lead to it.
    """

    text: str
    ended: bool
    times: int


@dataclass(frozen=True, eq=False)
class CaptionMaps:
    """A caption of a picture, with its weights over regions.

    Attributes:
        picture: uint8 (3, height, width), as the network sees it.
        grid: rows and columns of regions; they come row by row.
        words: of the caption.
        ended: whether the last of them is its end, `END`; otherwise it was cut after the last one.
        probabilities: (words,), with the mean of random weights.
        others: for each word, the likeliest ones: the word, its probability, and its standard deviation over
            draws, None without any.
        weights: (words, regions), their mean if they are random; None for a network that sees no picture.
        prior: (regions,), the contextual prior's mean, normalised; None without one.
        spread: (words, regions), the standard deviation over draws; None without any.
        samples: number of draws.
        draws: captions that draws lead to, the most frequent first.
        model: what wrote it.
        size: height and width of the picture in its file, whose proportions it is drawn in; those of
            `picture` by default.
    """

    picture: Tensor
    grid: tuple[int, int]
    words: Sequence[str]
    ended: bool
    probabilities: Tensor
    others: Sequence[Sequence[tuple[str, float, float | None]]]
    weights: Tensor | None
    prior: Tensor | None
    spread: Tensor | None
    samples: int
    draws: Sequence[Draw]
    model: str
    size: tuple[int, int] | None = None

    @property
    def text(self) -> str:
        """The caption."""
        return " ".join(self.words[: len(self.words) - self.ended])

    def is_of(self, draw: Draw) -> bool:
        """Whether a draw leads to this caption, which has its end or was cut like it."""
        return (draw.text, draw.ended) == (self.text, self.ended)


def peaks_of(captions: Sequence[CaptionMaps]) -> dict[str, float]:
    """Where the scales of a page end: at the largest weight or prior, and the largest spread, on it.

    Captions on one page are compared: a colour must be the same weight in each of them.
    """
    sizes = [tensor for maps in captions for tensor in (maps.weights, maps.prior) if tensor is not None]
    spreads = [maps.spread for maps in captions if maps.spread is not None]
    return {"sizes": _largest(sizes), "spreads": _largest(spreads)}


def _largest(tensors: Sequence[Tensor]) -> float:
    """The largest value of all, whatever their shapes; 1 where there is none, or none above 0."""
    found = max((float(tensor.max()) for tensor in tensors if tensor.numel()), default=0.0)
    return found if found > 0 and isfinite(found) else 1.0


def caption_entry(maps: CaptionMaps, peaks: Mapping[str, float] | None = None) -> dict[str, Any]:
    """A caption as an entry of a page's index, plain JSON values.

    Args:
        maps: the caption.
        peaks: of all captions on the page (`peaks_of`); by default its own.
    """
    rows, columns = maps.grid
    regions = rows * columns
    for name, tensor in (("weights", maps.weights), ("prior", maps.prior), ("spread", maps.spread)):
        if tensor is not None and tensor.shape[-1] != regions:
            raise ValueError(
                f"{name} must have {regions} regions, {rows} × {columns}, got {tensor.shape[-1]}"
            )
    _, height, width = maps.picture.shape
    caption = {
        "model": maps.model,
        "ended": maps.ended,
        "probabilities": maps.probabilities.tolist(),
        "others": [[list(other) for other in each] for each in maps.others],
        **{
            name: None if tensor is None else tensor.tolist()
            for name, tensor in (("weights", maps.weights), ("prior", maps.prior), ("spread", maps.spread))
        },
        "samples": maps.samples,
        "draws": [[draw.text, draw.times, maps.is_of(draw), draw.ended] for draw in maps.draws],
        "peaks": dict(peaks or peaks_of([maps])),
    }
    return {
        "name": printable(maps.text) or "(no words)",
        "kind": "caption",
        "main": 0 if maps.weights is None else int(maps.weights.amax(dim=1).argmax()),  # the sharpest
        "tokens": [printable(word) for word in maps.words],
        "grid": [rows, columns],
        "image": list(maps.size or (height, width)),
        "seen": [height, width],
        "picture": picture_link(maps.picture.permute(1, 2, 0).cpu()),
        "caption": short(caption),
    }
