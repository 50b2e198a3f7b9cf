"""How a mask was built."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Pattern = Literal["causal", "bidirectional", "packed"]


class MaskOrigin(NamedTuple):
    """How a mask was built.

    Attributes:
        pattern: "causal", "bidirectional", "packed" (several sequences in a row), or None if unknown.
        simple: whether it consists of `pattern` and padding only; if causal, the last query sees all keys.
        keys: padding mask, (batch, key), False at padding; None without padding.
    """

    pattern: Pattern | None
    simple: bool
    keys: Tensor | None
