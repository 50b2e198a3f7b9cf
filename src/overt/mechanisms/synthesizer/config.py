"""Settings of the Synthesizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from overt import _check
from overt.mechanisms.mechanism import Mechanism


@dataclass(frozen=True)
class Synthesizer(Mechanism):
    """Synthesised logits mixed with the dot product (Tay et al. 2020), a baseline of EA's Table 3.

    The two maps are mixed with learned weights that sum to one and start out equal.

    Args:
        form: "random" learns one map per head that ignores the input; "dense" predicts a query's row of the
            map from the query alone.
        max_length: longest sequence; the number of parameters grows with it.
    """

    form: Literal["random", "dense"] = "dense"
    max_length: int = 512

    def __post_init__(self) -> None:
        _check.one_of("form", self.form, ("random", "dense"))
        _check.whole("max_length", self.max_length, 1)
