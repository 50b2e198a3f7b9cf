"""One attention for many copies of a batch, which have the same queries and keys, but values of their own.

The copies' values are laid side by side, as one wide value of each key, so that weights are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Edit = Callable[[str, Tensor], Tensor]


def as_it_is(path: str, value: Tensor) -> Tensor:
    """No edit: the values of the attention at a path stay."""
    del path
    return value


@dataclass(eq=False)
class Copies:
    """Copies of a batch that a layer runs on.

    Attributes:
        path: of the attention whose values differ; nothing before it does.
        count: how many copies there are.
        ran: whether the attention has run.
        made_of: by its id, an argument of the layer that was repeated, and what it is copies of.
    """

    path: str
    count: int
    ran: bool = False
    made_of: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def note(self, repeated: Tensor, original: Tensor) -> None:
        """Note what an argument is copies of: where a mask is from is known by the mask itself."""
        self.made_of[id(repeated)] = repeated, original

    def begin(self) -> None:
        """Note that the attention runs; if it ran again, its queries might differ."""
        if self.ran:
            raise ValueError(f"{self.path} attends twice in one run of its layer")
        self.ran = True

    def first(self, argument: Any, rows: int) -> Any:
        """An argument of the call without all copies but the first.

        Args:
            argument: any; tensors with a row for each copy's examples are cut.
            rows: copies · batch.
        """
        repeated, original = self.made_of.get(id(argument), (None, None))
        if repeated is argument and original is not None:
            return original
        if isinstance(argument, Tensor) and argument.dim() > 1 and argument.shape[0] == rows:
            return argument[: rows // self.count]
        return argument

    def first_of(self, arguments: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Keyword arguments, each as `first` gives it."""
        return {name: self.first(argument, rows) for name, argument in arguments.items()}

    def side_by_side(self, value: Tensor) -> Tensor:
        """Values (copies · batch, head, key, dim) as (batch, head, key, copies · dim)."""
        rows, heads, keys, width = value.shape
        return value.reshape(self.count, rows // self.count, heads, keys, width).movedim(0, 3).flatten(3)

    def apart(self, output: Tensor) -> Tensor:
        """Outputs (batch, query, head, copies · dim) as (copies · batch, query, head, dim), contiguous."""
        if output.dim() != 4 or output.shape[-1] % self.count:
            raise ValueError(
                f"{self.path} must give outputs of shape (batch, query, head, dim), got {tuple(output.shape)}"
            )
        batch, queries, heads, width = output.shape
        own = output.reshape(batch, queries, heads, self.count, width // self.count)
        return own.movedim(3, 0).flatten(0, 1).contiguous()
