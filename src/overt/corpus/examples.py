"""Some rows of a corpus to look at: drawn at random, and for each token and group of interest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from overt._extras import need
from overt.corpus.opened import Corpus, Grouping
from overt.corpus.store import ROW

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_TOKENS = 60_000  # of all examples together


class _Lowest:
    """Rows with the lowest priorities, a few."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.kept: list[tuple[float, int, dict[str, Any]]] = []  # the worst first: priorities are negative

    def takes(self, priority: float) -> bool:
        return len(self.kept) < self.most or priority < -self.kept[0][0]

    def add(self, priority: float, row: dict[str, Any]) -> None:
        entry = (-priority, row[ROW], row)
        if len(self.kept) < self.most:
            heapq.heappush(self.kept, entry)
        else:
            heapq.heapreplace(self.kept, entry)

    def rows(self) -> list[dict[str, Any]]:
        return [row for _, _, row in sorted(self.kept, reverse=True)]


def chosen_rows(
    corpus: Corpus,
    *,
    some: int,
    tokens: Collection[str] = (),
    per_token: int = 2,
    groupings: Mapping[str, Grouping] | None = None,
    per_group: int = 20,
    most_tokens: int = MOST_TOKENS,
    report: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Rows of a corpus, chosen at random: the same for the same corpus, and as if drawn without an order.

    Each row has a priority, a hash of its number. The rows with the lowest are chosen: of all, and of those
    that have a token, or are in a group, of interest. Memory depends on how many are chosen alone.

    Args:
        corpus: where from.
        some: of all rows.
        tokens: of interest, by name.
        per_token: rows for each of them.
        groupings: of interest, by name.
        per_group: rows for each of their groups.
        most_tokens: of the rows together; when they are full, further ones are left out.
        report: called with the number of shards done and of all.
    """
    pa, pc = need("pyarrow", "scale"), need("pyarrow.compute", "scale")
    wanted = list(tokens)
    lowest: dict[Hashable, _Lowest] = {"all": _Lowest(some)}
    for done, (_, table) in enumerate(corpus.tables(), start=1):
        if table.num_rows:
            priorities = priority_of(np.asarray(table[ROW], dtype=np.uint64))
            found: list[tuple[Hashable, int, Iterable[int]]] = [("all", some, np.argsort(priorities)[:some])]
            if wanted:
                lists = table["tokens"].combine_chunks()
                codes = np.asarray(pc.fill_null(pc.index_in(lists.flatten(), pa.array(wanted)), -1))
                sentence = np.repeat(np.arange(len(lists)), np.asarray(pc.list_value_length(lists)))
                for code, places in _first_of(codes, sentence, priorities, per_token):
                    found.append((("token", wanted[code]), per_token, places))
            for name, grouping in (groupings or {}).items():
                groups: dict[Hashable, list[int]] = {}
                for place, group in enumerate(grouping.values(table)):
                    groups.setdefault(group, []).append(place)
                for group, inside in groups.items():
                    best = sorted(inside, key=lambda place: float(priorities[place]))[:per_group]
                    found.append((("group", name, group), per_group, best))
            for key, most, candidates in found:
                kept = lowest.setdefault(key, _Lowest(most))
                for place in candidates:
                    if kept.takes(float(priorities[place])):
                        kept.add(float(priorities[place]), table.slice(int(place), 1).to_pylist()[0])
        if report is not None:
            report(done, len(corpus.shards))
    chosen: dict[int, dict[str, Any]] = {}
    used = 0
    for kept in lowest.values():
        for row in kept.rows():
            if row[ROW] not in chosen and (used := used + len(row["tokens"])) <= most_tokens:
                chosen[row[ROW]] = row
    return list(chosen.values())


def _first_of(
    codes: NDArray[np.int64], sentence: NDArray[np.int64], priorities: NDArray[np.float64], most: int
) -> Iterable[tuple[int, list[int]]]:
    """For each code from 0 on, the sentences that have it with the lowest priorities."""
    inside = codes >= 0
    pairs = np.unique(np.stack([codes[inside], sentence[inside]]), axis=1)
    order = np.lexsort((priorities[pairs[1]], pairs[0]))
    by_code, sentences = pairs[:, order]
    starts = np.flatnonzero(np.diff(by_code, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(by_code)], strict=True):
        yield int(by_code[start]), sentences[start : min(start + most, stop)].tolist()


def priority_of(rows: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A number from 0 to 1 for each row number, without a pattern (SplitMix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        mixed = (rows + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        mixed ^= mixed >> np.uint64(31)
    return mixed.astype(np.float64) / 2.0**64
