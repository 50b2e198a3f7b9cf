"""How much of its maps the convolution's ReLU leaves at zero."""

from __future__ import annotations

from typing import NamedTuple

from overt.mechanisms.chain import Chain
from overt.mechanisms.evolving.config import Evolving
from overt.mechanisms.maps import HIDDEN


class Zeros(NamedTuple):
    """Shares of one layer's map, over all examples and heads.

    Attributes:
        cells: of visible cells, those that are exactly 0.
        rows: of rows with visible cells, those that are 0 everywhere: their weights are uniform, and no
            gradient reaches the convolution through them.
    """

    cells: float
    rows: float


def zeros(chain: Chain) -> dict[tuple[str, int], Zeros]:
    """Kind and layer → how much of the evolved map is zero, after a forward pass and before its backward.

    With β = 1 a map is the output of a ReLU. Gradients must be enabled in the pass, or maps are dropped on
    the way. The first map of a chain has no convolution, and so no zeros, unless `Evolving.first`.
    """
    found: dict[tuple[str, int], Zeros] = {}
    for (name, kind, layer), evolved in chain.maps.items():
        if name != Evolving.__name__:
            continue
        visible, zero = evolved != HIDDEN, evolved == 0
        seen = visible.any(dim=-1)
        dead = (zero | ~visible).all(dim=-1) & seen
        found[kind, layer] = Zeros(
            float(zero.sum() / visible.sum().clamp(min=1)), float(dead.sum() / seen.sum().clamp(min=1))
        )
    if not found:
        raise ValueError("chain must hold evolved maps: pass it to a network with Evolving first")
    return found
