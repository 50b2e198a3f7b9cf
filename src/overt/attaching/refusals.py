"""Model types that use the attention interface but cannot be attached to, or not everywhere.

The problem would only appear in the first forward pass: an attention that runs twice, fewer keys than
queries. `make families` finds such types by running small models of every type, and writes the table, so that
`attach` can refuse them before anything runs.
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
        reason: what rules it out.
        where: kinds of attention that can be attached to nevertheless.
        rows: whether only mechanisms whose rows read each other are refused.
        attentions: names of the refused attention classes; empty if all are refused.
    """

    reason: str
    where: tuple[str, ...] = ()
    rows: bool = False
    attentions: tuple[str, ...] = ()


@cache
def refusals() -> dict[str, Refusal]:
    """Type → why it is refused."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))["types"]
    return {
        kind: Refusal(entry["reason"], tuple(entry["where"]), entry["rows"], tuple(entry["attentions"]))
        for kind, entry in table.items()
    }


def check_type(
    model: nn.Module, chosen: Iterable[tuple[str, nn.Module]], reads_rows: Callable[[], bool]
) -> None:
    """Refuse a model by its type.

    Args:
        model: a model with a config.
        chosen: kind and module of each attention to be attached to.
        reads_rows: called to decide whether a row of a map would depend on other rows.
    """
    refusal = refusals().get(str(getattr(getattr(model, "config", None), "model_type", None)))
    if refusal is None:
        return
    refused = {
        kind
        for kind, module in chosen
        if not refusal.attentions or type(module).__name__ in refusal.attentions
    }
    if refused <= set(refusal.where) or (refusal.rows and not reads_rows()):
        return
    alternatives = []
    if refusal.where:
        kinds = list(refusal.where)
        named = f'"{kinds[0]}"' if len(kinds) == 1 else str(kinds).replace("'", '"')
        alternatives.append(f"where={named} would do")
    if refusal.rows:
        alternatives.append("mechanisms that keep to their row, such as Bayesian, would do")
    raise refuse(model, "; ".join([refusal.reason, *alternatives]))
