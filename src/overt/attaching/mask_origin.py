"""What is known of how a mask was made."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Pattern = Literal["causal", "bidirectional", "packed"]


class MaskOrigin(NamedTuple):
    """How a mask was made.

    Attributes:
        pattern: "causal", "bidirectional", "packed" (several sequences in a row), or None: not known.
        simple: whether it is no more than `pattern` and padding.
        keys: (batch, key), False at padding; None where there is none.
    """

    pattern: Pattern | None
    simple: bool
    keys: Tensor | None
