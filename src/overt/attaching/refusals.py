"""Model types that fit the attention interface and cannot be attached to all the same, or not everywhere.

What is wrong with them shows at their first forward pass: an attention that runs twice, keys that are fewer
than queries. `make families` finds such types by running small models of every type, and writes the table,
so that `attach` can say so before anything runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import nn

from overt.attaching.find import refuse

TABLE = Path(__file__).with_name("refusals.json")


class Refusal(NamedTuple):
    """Why a type is refused.

    Attributes:
        reason: what is odd about it.
        where: kinds of attention that can be attached to.
        rows: whether only mechanisms whose rows read each other are refused.
        attentions: classes of the attentions that are odd; none where all are.
    """

    reason: str
    where: tuple[str, ...] = ()
    rows: bool = False
    attentions: tuple[str, ...] = ()


@cache
def refusals() -> dict[str, Refusal]:
    """Type → why it is refused."""
    listed = json.loads(TABLE.read_text(encoding="utf-8"))["types"]
    return {
        kind: Refusal(one["reason"], tuple(one["where"]), one["rows"], tuple(one["attentions"]))
        for kind, one in listed.items()
    }


def check_type(
    model: nn.Module, chosen: Iterable[tuple[str, nn.Module]], reads_rows: Callable[[], bool]
) -> None:
    """Refuse a model by its type.

    Args:
        model: with a config.
        chosen: kind and module of each attention that something is to be attached to.
        reads_rows: says whether a row of a map would depend on others.
    """
    found = refusals().get(str(getattr(getattr(model, "config", None), "model_type", None)))
    if found is None:
        return
    odd = {kind for kind, one in chosen if not found.attentions or type(one).__name__ in found.attentions}
    if odd <= set(found.where) or (found.rows and not reads_rows()):
        return
    ways = []
    if found.where:
        named = f'"{found.where[0]}"' if len(found.where) == 1 else str(list(found.where)).replace("'", '"')
        ways.append(f"where={named} would do")
    if found.rows:
        ways.append("mechanisms that keep to their row, such as Bayesian, would do")
    raise refuse(model, "; ".join([found.reason, *ways]))
