"""Rows of some methods, kept in place of the maps or states that they were computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from overt.tracing.levels import unit_rows
from overt.tracing.options import Numbers, Options, numbers

METHODS = ("raw", "rollout")


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Rows of some queries, heads averaged.

    Attributes:
        queries: their numbers.
        count: length of the query axis that they are numbers of.
        values: by method, (batch, layer, query, token) in float64.
    """

    queries: list[int]
    count: int
    values: Mapping[str, Tensor]

    @property
    def layers(self) -> int:
        """Length of the layer axis."""
        return self.values[METHODS[0]].shape[1]

    def why_not(self, method: str) -> str | None:
        """Why there are no rows of a method; None if there are."""
        if method in self.values:
            return None
        return f"no {method}: this trace was saved as rows of {' and '.join(self.values)}, without maps"

    def read(self, method: str, queries: Numbers, options: Mapping[str, Any]) -> Tensor:
        """Some of the rows; an error that says what there is, for anything else."""
        if (reason := self.why_not(method)) is not None:
            raise ValueError(reason)
        given = {name: value for name, value in options.items() if value is not None}
        normalize, layers = bool(given.pop("normalize", False)), given.pop("layers", None)
        usual = {option.name: option.default for option in fields(Options)}
        changed = [name for name, value in given.items() if type(value) is not type(usual.get(name))]
        changed += [name for name in given if name not in changed and given[name] != usual[name]]
        if changed:
            raise ValueError(
                f"this trace was saved as rows, which are fixed: {', '.join(changed)} cannot be given"
            )
        chosen = self.queries if queries is None else numbers("queries", queries, self.count)
        if missing := [query for query in chosen if query not in self.queries]:
            raise ValueError(f"this trace was saved with rows of queries {self.queries}, got {missing}")
        found = [self.queries.index(query) for query in chosen]
        values = self.values[method][:, numbers("layers", layers, self.layers)][:, :, found]
        return unit_rows(values) if normalize else values

    def examples(self, rows: list[int]) -> KeptRows:
        """Rows of some of the examples."""
        return replace(self, values={name: values[rows] for name, values in self.values.items()})
