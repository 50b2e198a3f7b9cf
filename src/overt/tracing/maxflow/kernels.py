"""The compiled part of attention flow: Dinic's algorithm on a layered graph, with sets of nodes as bits.

Nodes are numbered `level·n + k`. A solve runs from a supply vector on the nodes of level `top` to a drain
vector on the nodes of level 1: the row of the source and the column of the sink are folded into the two
vectors, so neither is a node. The arcs between are the entries of the capacity maps, which are never copied;
the arc from `node` down to node m of the level below is edge `(node − n)·n + m`, its place in the flat maps.

Two bit maps drive the search. `open_arcs`: row u has bit m where the arc from node u down to node m of the
level below has something left. `back_arcs`: row u has bit m where node m of the level above sends flow to
u, which may be sent back. The labels of a phase are sets too, one for each (distance, level), so that "the
next useful arc of u" is the lowest bit of (row of u) & (set one step nearer to the sink): saturated arcs
and exhausted nodes are cleared bits, and are never looked at again.

Where the time goes, from all sources of the top of MiniLM's maps (6 levels × 32 tokens, 1,024 pairs of
about 18 µs): 85 % of the pairs end at a closed-form cut, so that a search must only bring that much; three
quarters of the time are the first phase, some 450 visits of nodes per pair, and a seventh of that is
`_down_columns`. Tried without gain: the widest arcs of a node first (4 % fewer visits, the same time); all
paths that leave the source's column once and enter the sink's once, by passes over vectors before the
search (42 % fewer visits, the same time, and twice that for one source, whose bound then needs later
phases); least cuts remembered for other sources of the same sink (0.2 % fewer visits); a node of level 2
emptied by the one above without a visit (a third fewer visits, 3 to 8 % less time).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import intrinsic

BITS = 64
FINISHED, STOPPED, FULL, BAD = 0, 1, 2, 3
# Slots of the state, the first integers of a workspace.
RECORDS, STATUS, DONE, REACHED, PHASES, STEPS = 0, 1, 2, 3, 4, 5
PREPARED, SINK, DEPTH, COUNT, UNLIMITED = 6, 7, 8, 9, 10
STATE = 16
# And the first reals: below the first, an amount is rounding; a flow this near to its bound has reached it.
TINY, NEAR = 0, 1
SCALES = 2
# Kinds of sums of a map's capacities, and of closed-form cuts: the first axes of `sums` and `bounds`.
ROWS, ROWS_REST, COLUMNS, COLUMNS_REST = 0, 1, 2, 3
BY_SOURCE, BY_SINK, BY_SOURCE_COLUMN, BY_SINK_COLUMN = 0, 1, 2, 3
# Rollout supplies are tried on these levels; no more once, after a few tries, most have failed.
ROLLOUT_LEVELS = (3, 4)
_PATIENCE = 2


class Layout(NamedTuple):
    """Where things lie in the two arrays of a workspace; sizes in comments.

    Few arrays and many offsets, because every array handed from function to function costs compile time
    and a reference count.
    """

    n: int
    words: int  # 64-bit words in a row of bits
    # In `ints`, after the state:
    open_arcs: int  # node × words
    back_arcs: int  # node × words
    reach: int  # level × words: nodes from which the sink can be reached at all
    alive: int  # level × words: in the first phase, nodes that are still of use
    unseen: int  # level × words: nodes without a label
    supplied: int  # words: nodes of the top level with supply left
    cursor: int  # node: where its search for arcs stands
    stack_node: int  # length of a path
    stack_arc: int  # length of a path
    tried: int  # level: rollout supplies tried
    failed: int  # level: and of these, in vain
    kept: int  # k: the token that is node k of every level
    wanted: int  # source × 3: level, node, row of the result
    row_of: int  # (level, k): the row of the result that is this node's, or −1
    endless: int  # node × words: inputs to which a path of unlimited arcs leads
    labels: int  # (distance, level) × words: nodes that are still of use, by label
    ints: int  # how many there are
    # In `reals`, after the scales:
    sums: int  # (kind, level, k): what the arcs of a row or a column add up to
    bounds: int  # (kind, level, k): cuts that hold for any capacities
    own_arcs: int  # node: capacity of the arc down its own column
    into_sink: int  # node: capacity of the arc to the sink's column; for level 1, to the sink
    drain: int  # k: what node (1, k) can still give to the sink
    supply: int  # k: what node (top, k) can still take from the source
    carried: int  # 3 × node: in the first phase, flow to the sink's column, down its own, on the current arc
    carry: int  # k
    leaving: int  # node
    crossing: int  # level
    below: int  # k: in a sweep, values of the level below
    here: int  # k: and of this level
    stack_limit: int  # length of a path
    stack_sent: int  # length of a path
    rollouts: int  # (source, one of ROLLOUT_LEVELS, k): what a source can surely bring there
    reals: int  # how many there are


class Workspace(NamedTuple):
    """What one thread scribbles on."""

    ints: Any
    reals: Any
    compact: Any  # (level, k, k): capacities between the kept tokens, where there is padding
    record_of: Any  # edge: its record, 0 for none
    edge_of: Any  # record: its edge
    left: Any  # record: capacity left
    flow: Any  # record: flow


def _compiled(function: Callable[..., Any]) -> Any:
    # Functions that only other compiled ones call need no entry from Python.
    inner = function.__name__.startswith("_")
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "no_cpython_wrapper": inner,
        "no_cfunc_wrapper": True,
    }
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache can be written: compile once per process instead
        return numba.njit(**options)(function)


def _lowest_bit_of(typing_context: Any, word: Any) -> Any:
    """Number of the lowest set bit of an int64 that is not zero: one instruction, which numba lacks."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return numba.types.int64(word), generate


_lowest_bit: Any = intrinsic(_lowest_bit_of)


def layout(depth: int, n: int, count: int) -> Layout:
    """Offsets for graphs of up to `depth` levels of `n` nodes, and up to `count` sources."""
    words = (n + BITS - 1) // BITS
    top = max(depth - 1, 1)
    nodes, farthest, bits = (top + 1) * n, top * n + 3, (top + 1) * words
    rolled = min(count, n * (depth - 1) // 2) if depth > ROLLOUT_LEVELS[0] + 1 else 0
    open_arcs = STATE
    back_arcs = open_arcs + nodes * words
    reach = back_arcs + nodes * words
    alive = reach + bits
    unseen = alive + bits
    supplied = unseen + bits
    cursor = supplied + words
    stack_node = cursor + nodes
    stack_arc = stack_node + farthest
    tried = stack_arc + farthest
    failed = tried + depth + 1
    kept = failed + depth + 1
    wanted = kept + n
    row_of = wanted + 3 * count
    endless = row_of + (depth + 1) * n
    # Labels last: they are sized for the worst case, and pages that are never touched cost nothing.
    labels = endless + (depth + 1) * n * words
    ints = labels + farthest * bits
    sums = SCALES
    bounds = sums + 4 * (depth + 1) * n
    own_arcs = bounds + 4 * (depth + 1) * n
    into_sink = own_arcs + nodes
    drain = into_sink + nodes
    supply = drain + n
    carried = supply + n
    carry = carried + 3 * nodes
    leaving = carry + n
    crossing = leaving + nodes
    below = crossing + top + 1
    here = below + n
    stack_limit = here + n
    stack_sent = stack_limit + farthest
    rollouts = stack_sent + farthest
    reals = rollouts + rolled * len(ROLLOUT_LEVELS) * n
    return Layout(
        n=n,
        words=words,
        open_arcs=open_arcs,
        back_arcs=back_arcs,
        reach=reach,
        alive=alive,
        unseen=unseen,
        supplied=supplied,
        cursor=cursor,
        stack_node=stack_node,
        stack_arc=stack_arc,
        tried=tried,
        failed=failed,
        kept=kept,
        wanted=wanted,
        row_of=row_of,
        endless=endless,
        labels=labels,
        ints=ints,
        sums=sums,
        bounds=bounds,
        own_arcs=own_arcs,
        into_sink=into_sink,
        drain=drain,
        supply=supply,
        carried=carried,
        carry=carry,
        leaving=leaving,
        crossing=crossing,
        below=below,
        here=here,
        stack_limit=stack_limit,
        stack_sent=stack_sent,
        rollouts=rollouts,
        reals=reals,
    )


def sweeps(depth: int, n: int, count: int) -> bool:
    """Whether all nodes are solved, level by level: it pays off when about half of them are wanted."""
    return depth > 2 and 2 * count > n * (depth - 1)


_layout, _sweeps = _compiled(layout), _compiled(sweeps)


@_compiled
def _number(space: Any, at: Any, real: Any, sources: Any, depth: int) -> None:
    """Number the real tokens of an example from 0, and list the sources among them."""
    ints = space.ints
    n, tokens = at.n, len(real)
    k = 0
    for token in range(tokens):
        if real[token]:
            ints[at.kept + k] = token
            k += 1
    for node in range(n, (depth + 1) * n):
        ints[at.row_of + node] = -1
    count = 0
    for s in range(sources.shape[0]):
        level, token = sources[s, 0], sources[s, 1]
        if not real[token]:
            continue
        node = token
        if n < tokens:
            node = 0
            while ints[at.kept + node] != token:
                node += 1
        ints[at.wanted + 3 * count] = level
        ints[at.wanted + 3 * count + 1] = node
        ints[at.wanted + 3 * count + 2] = s
        ints[at.row_of + level * n + node] = s
        count += 1
    ints[COUNT] = count


@_compiled
def _gather(space: Any, at: Any, maps: Any, depth: int) -> None:
    """Copy the capacities between real tokens."""
    ints, compact = space.ints, space.compact
    n = at.n
    edge = 0
    for q in range(depth):
        for i in range(n):
            row = maps[q, ints[at.kept + i]]
            for j in range(n):
                compact[edge] = row[ints[at.kept + j]]
                edge += 1


@_compiled
def _survey(space: Any, at: Any, capacity: Any, depth: int) -> Any:
    """Add up rows and columns, with and without the diagonal; count bad cells and infinite ones.

    A bad cell is negative or not a number.
    """
    reals = space.reals
    n = at.n
    kind = (depth + 1) * n
    bad = 0
    infinite = 0
    for q in range(depth):
        rows = at.sums + (q + 1) * n
        columns = reals[rows + COLUMNS * kind : rows + COLUMNS * kind + n]
        columns[:] = 0.0
        for k in range(n):
            row = capacity[(q * n + k) * n : (q * n + k + 1) * n]
            total = 0.0
            least = 0.0
            for m in range(n):
                columns[m] += row[m]
            for m in range(n):
                total += row[m]
                least = min(least, row[m])
            if not total < np.inf or least < 0.0:
                for m in range(n):
                    bad += not row[m] >= 0.0
                    infinite += row[m] == np.inf
            reals[rows + k] = total
        for k in range(n):
            own = capacity[(q * n + k) * n + k]
            row_rest = reals[rows + k] - own
            column_rest = columns[k] - own
            if own == np.inf:  # not ∞ − ∞, but what the others add up to
                row_rest = 0.0
                column_rest = 0.0
                for m in range(n):
                    if m != k:
                        row_rest += capacity[(q * n + k) * n + m]
                        column_rest += capacity[(q * n + m) * n + k]
            reals[rows + ROWS_REST * kind + k] = row_rest
            reals[rows + COLUMNS_REST * kind + k] = column_rest
    return bad, infinite


@_compiled
def _set_bounds(space: Any, at: Any, depth: int) -> None:
    """Cuts that hold for any capacities, by kind, level of the source, and node.

    By source: its own column down to some level is on its side. By sink: the sink's column up to some level
    is. The two by column are for whole columns: the arc from (1, i) to the sink, or the arc from the source
    into the sink's column, is still to be added.
    """
    reals = space.reals
    n = at.n
    kind = (depth + 1) * n
    for k in range(n):
        rows = at.sums + n + k
        cut = at.bounds + n + k
        reals[cut + BY_SOURCE * kind] = reals[rows + ROWS * kind]
        reals[cut + BY_SINK * kind] = np.inf
        reals[cut + BY_SOURCE_COLUMN * kind] = 0.0
        reals[cut + BY_SINK_COLUMN * kind] = 0.0
        for _ in range(2, depth + 1):
            last = cut
            cut += n
            rest = reals[rows + n + ROWS_REST * kind]
            by_sink_column = reals[last + BY_SINK_COLUMN * kind]
            reals[cut + BY_SOURCE * kind] = min(
                reals[rows + n + ROWS * kind], rest + reals[last + BY_SOURCE * kind]
            )
            reals[cut + BY_SOURCE_COLUMN * kind] = reals[last + BY_SOURCE_COLUMN * kind] + rest
            reals[cut + BY_SINK * kind] = min(
                reals[last + BY_SINK * kind], by_sink_column + reals[rows + COLUMNS * kind]
            )
            reals[cut + BY_SINK_COLUMN * kind] = by_sink_column + reals[rows + COLUMNS_REST * kind]
            rows += n


@_compiled
def _scale(space: Any, at: Any, capacity: Any, depth: int) -> Any:
    """A size that no finite flow exceeds by much: what is tiny next to it is rounding."""
    ints, reals = space.ints, space.reals
    n = at.n
    most = 0.0
    for s in range(ints[COUNT]):
        level, node = ints[at.wanted + 3 * s], ints[at.wanted + 3 * s + 1]
        most = max(most, reals[at.bounds + level * n + node])
    scale = 0.0
    unlimited = False
    for k in range(n):
        column = min(reals[at.sums + (COLUMNS * (depth + 1) + 1) * n + k], most)
        if column == np.inf:
            unlimited = True
        else:
            scale = max(scale, column)
    if unlimited:
        for edge in range(depth * n * n):
            if capacity[edge] < np.inf:
                scale = max(scale, capacity[edge])
        scale = scale if scale > 0.0 else 1.0
    return scale


@_compiled
def _pack(space: Any, at: Any, capacity: Any, depth: int, tiny: float) -> None:
    """Set the bit of every arc of levels 2 and up with a capacity above `tiny`; the arcs down columns."""
    ints, reals = space.ints, space.reals
    n, words = at.n, at.words
    for node in range(n, (depth + 1) * n):
        edges = (node - n) * n
        reals[at.own_arcs + node] = capacity[edges + node % n]
        if node < 2 * n:
            continue
        for w in range(words):
            word = np.int64(0)
            for m in range(w * BITS, min(n, (w + 1) * BITS)):
                word |= np.int64(capacity[edges + m] > tiny) << (m & 63)
            ints[at.open_arcs + node * words + w] = word


@_compiled
def _find_endless(space: Any, at: Any, capacity: Any, depth: int) -> None:
    """Set the bit of every input to which a path of unlimited arcs leads from a node."""
    ints = space.ints
    n, words = at.n, at.words
    for node in range(n, (depth + 1) * n):
        row = at.endless + node * words
        for w in range(words):
            ints[row + w] = 0
        lower = node // n * n - n
        for m in range(n):
            if capacity[(node - n) * n + m] < np.inf:
                continue
            if lower == 0:
                ints[row + (m >> 6)] |= 1 << (m & 63)
            else:
                for w in range(words):
                    ints[row + w] |= ints[at.endless + (lower + m) * words + w]


@_compiled
def _roll_out(space: Any, at: Any, capacity: Any, s: int) -> None:
    """Flows that a source can bring to the low levels: every node splits in proportion to its arcs."""
    ints, reals = space.ints, space.reals
    n = at.n
    level, node = ints[at.wanted + 3 * s], ints[at.wanted + 3 * s + 1]
    out = at.rollouts + s * len(ROLLOUT_LEVELS) * n
    carried, share = at.below, at.here
    for k in range(n):
        reals[carried + k] = capacity[((level - 1) * n + node) * n + k]
    for below in range(level - 1, ROLLOUT_LEVELS[0] - 1, -1):
        if below <= ROLLOUT_LEVELS[-1]:
            for k in range(n):
                reals[out + (below - ROLLOUT_LEVELS[0]) * n + k] = reals[carried + k]
        if below == ROLLOUT_LEVELS[0]:
            break
        for k in range(n):
            # Nothing through nodes without arcs; nor, for simplicity, through those with unlimited ones.
            total = reals[at.sums + below * n + k]
            useful = 0.0 < total < np.inf
            reals[share + k] = min(reals[carried + k] / total, 1.0) if useful else 0.0
            reals[carried + k] = 0.0
        into = reals[carried : carried + n]
        for k in range(n):
            part = reals[share + k]
            if part > 0.0:
                row = capacity[((below - 1) * n + k) * n : ((below - 1) * n + k + 1) * n]
                for m in range(n):
                    into[m] += part * row[m]


@_compiled
def _prepare(space: Any, at: Any, capacity: Any, depth: int, sweep: bool) -> Any:
    """Everything about a graph and its sources that does not depend on the sink; False for bad cells."""
    ints, reals = space.ints, space.reals
    n, words = at.n, at.words
    bad, unlimited = _survey(space, at, capacity, depth)
    if bad > 0:
        return False
    _set_bounds(space, at, depth)
    scale = _scale(space, at, capacity, depth)
    reals[TINY] = 1e-15 * scale
    reals[NEAR] = 1e-13 * scale
    top = max(depth - 1, 1)
    _pack(space, at, capacity, top, reals[TINY])
    for node in range((top + 1) * n * words):
        ints[at.back_arcs + node] = 0
    for level in range(depth + 1):
        ints[at.tried + level] = 0
        ints[at.failed + level] = 0
    ints[DEPTH] = depth
    ints[UNLIMITED] = unlimited
    if unlimited > 0:
        _find_endless(space, at, capacity, depth)
    if not sweep:
        for s in range(ints[COUNT]):
            if ints[at.wanted + 3 * s] > ROLLOUT_LEVELS[0] + 1:
                _roll_out(space, at, capacity, s)
    return True


@_compiled
def _reach(space: Any, at: Any, capacity: Any, top: int, sink: int, tiny: float) -> None:
    """Extend to level `top` the arcs into the sink's column and the nodes from which there is a way to it."""
    ints, reals = space.ints, space.reals
    n, words = at.n, at.words
    for level in range(ints[REACHED] + 1, top + 1):
        row = at.reach + level * words
        for w in range(words):
            ints[row + w] = 0
        for k in range(n):
            node = level * n + k
            into = capacity[(node - n) * n + sink]
            reals[at.into_sink + node] = into
            found = level == 1 and into > tiny
            if level > 1:
                arcs = at.open_arcs + node * words
                for w in range(words):
                    if ints[arcs + w] & ints[row - words + w]:
                        found = True
                        break
            ints[row + (k >> 6)] |= np.int64(found) << (k & 63)
    ints[REACHED] = max(ints[REACHED], top)


@_compiled
def _down_columns(space: Any, at: Any, top: int, sink: int, most: float, tiny: float) -> Any:
    """Send what goes straight: down its own column, and at some level over to the column of the sink.

    With residual connections this is much of the flow, and it takes a few passes over vectors. All columns
    but the sink's take part; where the sink's has no room for all of them, each gives the same share.
    """
    ints, reals = space.ints, space.reals
    n = at.n
    drain, supply, carry = at.drain, at.supply, at.carry
    to_sink = at.carried
    down = at.carried + (top + 1) * n
    for k in range(n):
        reals[carry + k] = reals[supply + k]
    for level in range(2, top + 1):
        for k in range(n):
            node = level * n + k
            room = reals[at.own_arcs + node] - reals[down + node]
            reals[carry + k] = min(reals[carry + k], room)
    reals[carry + sink] = 0.0
    crossed = 0.0
    for level in range(top, 1, -1):
        leaving, arcs, used = at.leaving + level * n, at.into_sink + level * n, to_sink + level * n
        room = reals[drain + sink]
        for lower in range(2, level):
            room = min(room, reals[at.into_sink + lower * n + sink] - reals[to_sink + lower * n + sink])
        room -= crossed
        crossing = 0.0
        if room > tiny:
            for k in range(n):
                amount = min(min(reals[carry + k], reals[arcs + k] - reals[used + k]), room)
                reals[leaving + k] = amount
                crossing += amount
        share = 0.0
        if crossing > tiny:
            share = room / crossing * (1.0 - 1e-15) if crossing > room else 1.0
            for k in range(n):
                reals[leaving + k] *= share
                reals[carry + k] -= reals[leaving + k]
        else:
            for k in range(n):
                reals[leaving + k] = 0.0
        reals[at.crossing + level] = crossing * share
        crossed += crossing * share
    total = crossed
    for k in range(n):
        reals[carry + k] = min(reals[carry + k], reals[drain + k])  # from here on, what column k sends
        total += reals[carry + k]
    if total <= tiny:
        return 0.0
    share = most / total if total > most else 1.0
    for k in range(n):
        reals[carry + k] *= share
        rest = reals[drain + k] - reals[carry + k]
        reals[drain + k] = rest if rest > tiny else 0.0
    rest = reals[drain + sink] - crossed * share
    reals[drain + sink] = rest if rest > tiny else 0.0
    for level in range(2, top + 1):
        leaving = at.leaving + level * n
        crossed -= reals[at.crossing + level]
        reals[to_sink + level * n + sink] += max(crossed, 0.0) * share
        for k in range(n):
            node = level * n + k
            across = reals[leaving + k] * share
            reals[down + node] += reals[carry + k]
            reals[to_sink + node] += across
            reals[carry + k] += across
    value = 0.0
    for k in range(n):
        value += reals[carry + k]
        rest = reals[supply + k] - reals[carry + k]
        reals[supply + k] = rest if rest > tiny else 0.0
    for k in range(n):
        gone = np.int64(reals[drain + k] <= tiny)
        ints[at.alive + at.words + (k >> 6)] &= ~(gone << (k & 63))
    return value


@_compiled
def _first_phase(
    space: Any, at: Any, capacity: Any, stop: Any, top: int, own: int, sink: int, bound: float, tiny: float
) -> Any:
    """The first phase of a solve, where the label of a node is its level and no flow can be sent back.

    Most solves end here. Each node works through its arcs once, in order: the one into the column of the
    sink (place −2), the one down its own column (place −1), then the others by number, of which only the
    current one can be partly used. So the flows fit into three numbers for each node (`carried`), nothing
    has to be looked up or undone, and flows of finished arcs go to the records as a log, in case there is a
    second phase.
    """
    ints, reals, edge_of, flow = space.ints, space.reals, space.edge_of, space.flow
    n, words = at.n, at.words
    alive, cursor = at.alive, at.cursor
    to_sink = at.carried
    down = to_sink + (top + 1) * n
    current = down + (top + 1) * n
    drain = at.drain
    sink_word, sink_bit = sink >> 6, 1 << (sink & 63)
    for w in range(words, (top + 1) * words):
        ints[alive + w] = ints[at.reach + w]
    for node in range(2 * n, (top + 1) * n):
        ints[cursor + node] = -2
        reals[to_sink + node] = 0.0
        reals[down + node] = 0.0
        reals[current + node] = 0.0
    record = ints[RECORDS]
    steps = 0
    value = 0.0
    # The wide ones first: the source's own column, the sink's, all straight ways, and then whatever is left.
    for turn in range(-2, n):
        start = turn
        if turn == -2:
            start = own
        elif turn == -1:
            start = sink
        elif turn == 0 and value < bound - tiny:
            value += _down_columns(space, at, top, sink, bound - value, tiny)
        if value >= bound - tiny or stop[0] != 0:
            break
        if (
            start < 0
            or reals[at.supply + start] <= tiny
            or not (ints[alive + top * words + (start >> 6)] >> (start & 63)) & 1
        ):
            continue
        level = top
        k = start
        limit = min(reals[at.supply + start], bound - value)
        sent = 0.0
        while True:
            steps += 1
            node = level * n + k
            arcs = at.open_arcs + node * words
            edges = (node - n) * n
            lower = alive + (level - 1) * words
            place = ints[cursor + node]
            own_word, own_bit = k >> 6, 1 << (k & 63)
            if record + n + 1 > len(flow):
                ints[STATUS] = FULL
                return 0.0
            if level == 2:
                want = limit
                if place == -2:
                    amount = min(
                        min(want, reals[at.into_sink + node] - reals[to_sink + node]), reals[drain + sink]
                    )
                    reals[to_sink + node] += amount
                    reals[drain + sink] -= amount
                    want -= amount
                    sent += amount
                    if reals[drain + sink] <= tiny:
                        ints[lower + sink_word] &= ~sink_bit
                    if want > tiny:
                        place = -1
                if place == -1:
                    if k != sink:
                        amount = min(
                            min(want, reals[at.own_arcs + node] - reals[down + node]), reals[drain + k]
                        )
                        reals[down + node] += amount
                        reals[drain + k] -= amount
                        want -= amount
                        sent += amount
                        if reals[drain + k] <= tiny:
                            ints[lower + own_word] &= ~own_bit
                    if want > tiny:
                        place = 0
                if place >= 0:
                    used = reals[current + node]
                    if used > 0.0:
                        amount = min(min(want, capacity[edges + place] - used), reals[drain + place])
                        used += amount
                        reals[drain + place] -= amount
                        want -= amount
                        sent += amount
                        if reals[drain + place] <= tiny:
                            ints[lower + (place >> 6)] &= ~(1 << (place & 63))
                        if want > tiny:
                            edge_of[record] = edges + place
                            flow[record] = used
                            record += 1
                            used = 0.0
                            place += 1
                    if want > tiny:
                        word = place >> 6
                        mask = -1 << (place & 63)
                        place = n
                        while word < words:
                            both = ints[arcs + word] & ints[lower + word] & mask
                            mask = -1
                            if word == sink_word:
                                both &= ~sink_bit
                            if word == own_word:
                                both &= ~own_bit
                            gone = 0
                            while both != 0:
                                bit = _lowest_bit(both)
                                both &= both - 1
                                child = word * BITS + bit
                                has = reals[drain + child]
                                used = min(min(want, capacity[edges + child]), has)
                                reals[drain + child] = has - used
                                want -= used
                                sent += used
                                gone |= np.int64(has - used <= tiny) << bit
                                if want <= tiny:
                                    place = child
                                    break
                                edge_of[record] = edges + child
                                flow[record] = used
                                record += 1
                                used = 0.0
                            ints[lower + word] &= ~gone
                            if place < n:
                                break
                            word += 1
                    reals[current + node] = used
            else:
                left = 0.0
                child = 0
                slot = 0
                while True:
                    if place == -2:
                        child = sink
                        slot = to_sink + node
                        left = reals[at.into_sink + node] - reals[slot]
                    elif place == -1:
                        child = k
                        slot = down + node
                        left = reals[at.own_arcs + node] - reals[slot]
                    else:
                        child = place
                        slot = current + node
                        left = capacity[edges + place] - reals[slot]
                    if left > tiny and (ints[lower + (child >> 6)] >> (child & 63)) & 1:
                        break
                    # This arc is done with: on to the next that leads anywhere.
                    if place == -2 and k != sink:
                        place = -1
                        continue
                    if place >= 0 and reals[slot] > 0.0:
                        edge_of[record] = edges + child
                        flow[record] = reals[slot]
                        record += 1
                        reals[slot] = 0.0
                    place = max(place + 1, 0)
                    word = place >> 6
                    mask = -1 << (place & 63)
                    place = n
                    while word < words:
                        both = ints[arcs + word] & ints[lower + word] & mask
                        mask = -1
                        if word == sink_word:
                            both &= ~sink_bit
                        if word == own_word:
                            both &= ~own_bit
                        if both != 0:
                            place = word * BITS + _lowest_bit(both)
                            break
                        word += 1
                    if place == n:
                        break
                if place < n:
                    ints[cursor + node] = place
                    ints[at.stack_node + level] = k
                    ints[at.stack_arc + level] = slot
                    reals[at.stack_limit + level] = limit
                    reals[at.stack_sent + level] = sent
                    limit = min(limit - sent, left)
                    sent = 0.0
                    level -= 1
                    k = child
                    continue
            ints[cursor + node] = place
            if place == n:
                ints[alive + level * words + own_word] &= ~own_bit
            # Hand back what was sent, up to a node that has something left to send.
            while level < top:
                level += 1
                k = ints[at.stack_node + level]
                limit = reals[at.stack_limit + level]
                reals[ints[at.stack_arc + level]] += sent
                sent += reals[at.stack_sent + level]
                if sent < limit - tiny:
                    break
            if level == top and (
                sent >= limit - tiny or not (ints[alive + top * words + (k >> 6)] >> (k & 63)) & 1
            ):
                break
        value += sent
        rest = reals[at.supply + start] - sent
        reals[at.supply + start] = rest if rest > tiny else 0.0
    ints[RECORDS] = record
    ints[STEPS] += steps
    return value


@_compiled
def _open_records(space: Any, at: Any, capacity: Any, top: int, sink: int, tiny: float) -> None:
    """Turn the log of the first phase into records that can be looked up, changed and undone."""
    ints, reals, edge_of, flow, left = space.ints, space.reals, space.edge_of, space.flow, space.left
    n, words = at.n, at.words
    nodes = (top + 1) * n
    record = ints[RECORDS]
    if record + 3 * nodes > len(flow):
        ints[STATUS] = FULL
        ints[RECORDS] = 1
        return
    for node in range(2 * n, nodes):
        for kind in range(3):
            carried = reals[at.carried + kind * nodes + node]
            if carried > tiny:  # so never an arc that is not open, which undoing would open
                child = sink if kind == 0 else (node % n if kind == 1 else ints[at.cursor + node])
                edge_of[record] = (node - n) * n + child
                flow[record] = carried
                record += 1
    ints[RECORDS] = record
    for r in range(1, record):
        edge = edge_of[r]
        space.record_of[edge] = r
        left[r] = capacity[edge] - flow[r]
        tail = edge // n
        child = edge - tail * n
        k = tail % n
        if left[r] <= tiny:
            left[r] = 0.0
            ints[at.open_arcs + (tail + n) * words + (child >> 6)] &= ~(1 << (child & 63))
        if flow[r] > tiny:
            ints[at.back_arcs + (tail - k + child) * words + (k >> 6)] |= 1 << (k & 63)


@_compiled
def _label(space: Any, at: Any, top: int, tiny: float) -> Any:
    """Set the labels of a phase by a search backwards from the sink.

    Returns the distance of the nearest top nodes with supply, 0 where there are none.
    """
    ints, reals = space.ints, space.reals
    n, words = at.n, at.words
    unseen = at.unseen
    row = (top + 1) * words  # of one distance
    here = at.labels + row
    for w in range(row):
        ints[here + w] = 0
        ints[unseen + w] = ints[at.reach + w]
    for k in range(n):
        if reals[at.drain + k] > tiny:
            ints[here + words + (k >> 6)] |= 1 << (k & 63)
    new = 0
    for w in range(words):
        ints[unseen + words + w] &= ~ints[here + words + w]
        new |= ints[here + words + w]
    distance = 1
    while new != 0:
        for w in range(words):
            if ints[here + top * words + w] & ints[at.supplied + w]:
                return distance
        new = 0
        ahead = here + row
        for w in range(row):
            ints[ahead + w] = 0
        for level in range(1, top + 1):
            lower = here + (level - 1) * words
            upper = here + (level + 1) * words
            from_lower = 0
            from_upper = 0
            for w in range(words):
                if level > 1:
                    from_lower |= ints[lower + w]
                if level < top:
                    from_upper |= ints[upper + w]
            if from_lower == 0 and from_upper == 0:
                continue
            for w in range(words):
                rest = ints[unseen + level * words + w]
                found = 0
                while rest != 0:
                    bit = _lowest_bit(rest)
                    rest &= rest - 1
                    arcs = (level * n + w * BITS + bit) * words
                    hit = 0
                    if from_lower != 0:
                        for v in range(words):
                            hit = ints[at.open_arcs + arcs + v] & ints[lower + v]
                            if hit != 0:
                                break
                    if hit == 0 and from_upper != 0:
                        for v in range(words):
                            hit = ints[at.back_arcs + arcs + v] & ints[upper + v]
                            if hit != 0:
                                break
                    found |= np.int64(hit != 0) << bit
                ints[ahead + level * words + w] = found
                ints[unseen + level * words + w] &= ~found
                new |= found
        here = ahead
        distance += 1
    return 0


@_compiled
def _send(
    space: Any, at: Any, capacity: Any, top: int, far: int, start: int, sink: int, want: float, tiny: float
) -> Any:
    """Send up to `want` from a node of the top level to the sink along labels that fall by one each step.

    Amounts travel, not paths: a node hands on what it got to one arc after the other. `far` is the label of
    the top node. A path may go down an arc with something left, or up an arc, sending its flow back; the
    latter is on the stack as −1 − edge.
    """
    ints, reals, left, flow, record_of = space.ints, space.reals, space.left, space.flow, space.record_of
    n, words = at.n, at.words
    labels, open_arcs, back_arcs = at.labels, at.open_arcs, at.back_arcs
    row = (top + 1) * words
    sink_word, sink_bit = sink >> 6, 1 << (sink & 63)
    depth = 0
    level = top
    k = start
    limit = want
    sent = 0.0
    while True:
        ints[STEPS] += 1
        distance = far - depth
        if distance == 1:
            sent = min(limit, reals[at.drain + k])
            rest = reals[at.drain + k] - sent
            reals[at.drain + k] = rest if rest > tiny else 0.0
            if rest <= tiny:
                ints[labels + row + words + (k >> 6)] &= ~(1 << (k & 63))
        else:
            node = level * n + k
            arcs = open_arcs + node * words
            place = ints[at.cursor + node]
            child = -1
            edge = 0
            able = 0.0
            if level > 1 and place < words:
                nearer = labels + (distance - 1) * row + (level - 1) * words
                own_word = k >> 6
                if ints[arcs + sink_word] & ints[nearer + sink_word] & sink_bit:
                    child = sink
                elif ints[arcs + own_word] & ints[nearer + own_word] & (1 << (k & 63)):
                    child = k
                else:
                    while place < words:
                        both = ints[arcs + place] & ints[nearer + place]
                        if both != 0:
                            child = place * BITS + _lowest_bit(both)
                            break
                        place += 1
                if child >= 0:
                    edge = (node - n) * n + child
                    record = record_of[edge]
                    able = capacity[edge] if record == 0 else left[record]
                    level -= 1
            if child < 0 and level < top:
                arcs = back_arcs + node * words
                nearer = labels + (distance - 1) * row + (level + 1) * words
                place = max(place, words)
                while place < 2 * words:
                    both = ints[arcs + place - words] & ints[nearer + place - words]
                    if both != 0:
                        child = (place - words) * BITS + _lowest_bit(both)
                        break
                    place += 1
                if child >= 0:
                    edge = (node - k + child) * n + k
                    able = flow[record_of[edge]]
                    edge = -1 - edge
                    level += 1
            ints[at.cursor + node] = place
            if child >= 0:
                ints[at.stack_node + depth] = node
                ints[at.stack_arc + depth] = edge
                reals[at.stack_limit + depth] = limit
                reals[at.stack_sent + depth] = sent
                limit = min(limit - sent, able)
                sent = 0.0
                k = child
                depth += 1
                continue
            ints[labels + distance * row + level * words + (k >> 6)] &= ~(1 << (k & 63))
        # Hand back what was sent, up to a node that has something left to send.
        while True:
            if depth == 0:
                return sent
            depth -= 1
            node = ints[at.stack_node + depth]
            edge = ints[at.stack_arc + depth]
            limit = reals[at.stack_limit + depth]
            arrived = sent
            sent = reals[at.stack_sent + depth] + arrived
            child = k
            level = node // n
            k = node - level * n
            own_bit = 1 << (k & 63)
            child_bit = 1 << (child & 63)
            if arrived > 0.0 and edge >= 0:
                record = record_of[edge]
                if record == 0:
                    record = ints[RECORDS]
                    if record == len(left):
                        ints[STATUS] = FULL
                        return 0.0
                    ints[RECORDS] = record + 1
                    record_of[edge] = record
                    space.edge_of[record] = edge
                    left[record] = capacity[edge]
                    flow[record] = 0.0
                flow[record] += arrived
                left[record] -= arrived
                if flow[record] > tiny:
                    ints[back_arcs + (node - n - k + child) * words + (k >> 6)] |= own_bit
                if left[record] <= tiny:
                    left[record] = 0.0
                    ints[open_arcs + node * words + (child >> 6)] &= ~child_bit
            elif arrived > 0.0:
                record = record_of[-1 - edge]
                flow[record] -= arrived
                left[record] += arrived
                if left[record] > tiny:
                    ints[open_arcs + (node + n - k + child) * words + (k >> 6)] |= own_bit
                if flow[record] <= tiny:
                    flow[record] = 0.0
                    ints[back_arcs + node * words + (child >> 6)] &= ~child_bit
            if sent < limit - tiny:
                break


@_compiled
def _flow(
    space: Any, at: Any, capacity: Any, stop: Any, top: int, own: int, sink: int, bound: float, tiny: float
) -> Any:
    """Maximum flow from the supply at level `top` ≥ 2 to the sink, or `bound` as soon as it is reached.

    `own` is the source's own column, or −1 for a rollout supply. That is an attempt to reach the bound
    cheaply, and the answer is only what the first phase brings.
    """
    ints, reals = space.ints, space.reals
    n, words = at.n, at.words
    _reach(space, at, capacity, top, sink, tiny)
    for k in range(n):
        reals[at.drain + k] = reals[at.into_sink + n + k]
    ints[RECORDS] = 1
    ints[PHASES] += 1
    value = _first_phase(space, at, capacity, stop, top, own, sink, bound, tiny)
    if stop[0] != 0:
        ints[STATUS] = STOPPED
    if value >= bound - tiny or value == 0.0 or ints[STATUS] != FINISHED or own < 0:
        return value
    _open_records(space, at, capacity, top, sink, tiny)
    if ints[STATUS] != FINISHED:
        return value
    for w in range(words):
        ints[at.supplied + w] = 0
    for k in range(n):
        if reals[at.supply + k] > tiny:
            ints[at.supplied + (k >> 6)] |= 1 << (k & 63)
    while value < bound - tiny and ints[STATUS] == FINISHED:
        far = _label(space, at, top, tiny)
        if far == 0:
            break
        ints[PHASES] += 1
        for node in range(n, (top + 1) * n):
            ints[at.cursor + node] = 0
        ready = at.labels + (far * (top + 1) + top) * words
        moved = 0.0
        for w in range(words):
            while value < bound - tiny and ints[STATUS] == FINISHED:
                both = ints[ready + w] & ints[at.supplied + w]
                if both == 0:
                    break
                k = w * BITS + _lowest_bit(both)
                want = min(reals[at.supply + k], bound - value)
                sent = _send(space, at, capacity, top, far, k, sink, want, tiny)
                value += sent
                moved += sent
                rest = reals[at.supply + k] - sent
                reals[at.supply + k] = rest
                if rest <= tiny:
                    reals[at.supply + k] = 0.0
                    ints[at.supplied + w] &= ~(1 << (k & 63))
                if stop[0] != 0:
                    ints[STATUS] = STOPPED
        if moved == 0.0:
            break
    for record in range(1, ints[RECORDS]):
        edge = space.edge_of[record]
        tail = edge // n
        child = edge - tail * n
        k = tail % n
        space.record_of[edge] = 0
        ints[at.open_arcs + (tail + n) * words + (child >> 6)] |= 1 << (child & 63)
        ints[at.back_arcs + (tail - k + child) * words + (k >> 6)] &= ~(1 << (k & 63))
    return value


@_compiled
def _through_one(capacity: Any, row: int, other: Any, start: int, n: int) -> Any:
    """Σ min over two vectors: what comes through one level when each node has a limit of its own."""
    total = 0.0
    for k in range(n):
        total += min(capacity[row + k], other[start + k])
    return total


@_compiled
def _bound(space: Any, at: Any, capacity: Any, level: int, i: int, sink: int) -> Any:
    """The least of the closed-form cuts between (level, i) and the sink, level ≥ 2."""
    reals = space.reals
    n = at.n
    kind = (space.ints[DEPTH] + 1) * n
    by = at.bounds + level * n
    by_one = min(reals[by + BY_SOURCE * kind + i], reals[by + BY_SINK * kind + sink])
    by_source_column = reals[by + BY_SOURCE_COLUMN * kind + i] + capacity[i * n + sink]
    by_sink_column = reals[by + BY_SINK_COLUMN * kind + sink] + capacity[((level - 1) * n + i) * n + sink]
    return min(by_one, min(by_source_column, by_sink_column))


@_compiled
def _is_endless(space: Any, at: Any, level: int, i: int, sink: int) -> Any:
    """Whether a path of unlimited arcs leads from (level, i) to the sink."""
    ints = space.ints
    if ints[UNLIMITED] == 0:
        return False
    return (ints[at.endless + (level * at.n + i) * at.words + (sink >> 6)] >> (sink & 63)) & 1 == 1


@_compiled
def _pair(
    space: Any, at: Any, capacity: Any, stop: Any, rolled: int, level: int, i: int, sink: int, bound: float
) -> Any:
    """Maximum flow from (level, i), level ≥ 3, to the sink, or its bound where that is nearly reached.

    At `rolled` are flows that the source can surely bring to ROLLOUT_LEVELS, to each of them all at once:
    when that much reaches the bound from there, the levels above need no search. −1 is for none.
    """
    ints, reals = space.ints, space.reals
    n = at.n
    tiny, near = reals[TINY], reals[NEAR]
    row = ((level - 1) * n + i) * n
    value = 0.0
    tries = len(ROLLOUT_LEVELS) if rolled >= 0 else 0
    for r in range(tries + 1):  # one loop and no literals, so that numba compiles what it calls once
        top, own = level - 1, i
        if r < tries:
            top, own = ROLLOUT_LEVELS[0] + r, -1
            tried, failed = ints[at.tried + level], ints[at.failed + level]
            if top >= level - 1 or (tried >= _PATIENCE and 2 * failed > tried):
                continue
        for k in range(n):
            reals[at.supply + k] = reals[rolled + r * n + k] if r < tries else capacity[row + k]
        value = _flow(space, at, capacity, stop, top, own, sink, bound, tiny)
        if ints[STATUS] != FINISHED:
            break
        if value >= bound - near:
            value = bound
        if r < tries:
            ints[at.tried + level] += 1
            if value == bound:
                break
            ints[at.failed + level] += 1
    return value


@_compiled
def _by_source(space: Any, at: Any, capacity: Any, stop: Any, first: int, last: int, out: Any) -> Any:
    """Fill the results for sinks first … last − 1, each pair on its own; returns the next sink to do."""
    ints, reals = space.ints, space.reals
    n = at.n
    for sink in range(first, last):
        ints[REACHED] = 0
        lowest = ints[REACHED] + 1  # not a literal, for which numba would compile the function once more
        _reach(space, at, capacity, lowest, sink, reals[TINY])
        for s in range(ints[COUNT]):
            level, i = ints[at.wanted + 3 * s], ints[at.wanted + 3 * s + 1]
            row = ((level - 1) * n + i) * n
            if _is_endless(space, at, level, i, sink):
                value = np.inf
            elif level == 1:
                value = capacity[row + sink]
            elif level == 2:
                value = _through_one(capacity, row, reals, at.into_sink + n, n)
            else:
                bound = _bound(space, at, capacity, level, i, sink)
                rolled = -lowest
                if level > ROLLOUT_LEVELS[0] + 1:
                    rolled = at.rollouts + s * len(ROLLOUT_LEVELS) * n
                value = _pair(space, at, capacity, stop, rolled, level, i, sink, bound)
            if ints[STATUS] != FINISHED:
                return sink
            out[ints[at.wanted + 3 * s + 2], ints[at.kept + sink]] = value
        ints[DONE] += 1
    return last


@_compiled
def _by_sink(
    space: Any, at: Any, capacity: Any, stop: Any, depth: int, first: int, last: int, out: Any
) -> Any:
    """Fill the results for sinks first … last − 1, all nodes, level by level upwards.

    The values of the level below settle many nodes: node k of it can bring `below[k]` to the sink, so at most
    min(arc, below[k]) comes through k; and mixtures of flows are flows, so a node with enough capacity to
    nodes that can bring its bound brings it too. Returns the next sink to do.
    """
    ints, reals = space.ints, space.reals
    n = at.n
    below, here = at.below, at.here
    near = reals[NEAR]
    for sink in range(first, last):
        ints[REACHED] = 0
        lowest = ints[REACHED] + 1  # not a literal, for which numba would compile the function once more
        _reach(space, at, capacity, lowest, sink, reals[TINY])
        for level in range(1, depth + 1):
            for i in range(n):
                row = ((level - 1) * n + i) * n
                if _is_endless(space, at, level, i, sink):
                    value = np.inf
                elif level == 1:
                    value = capacity[row + sink]
                elif level == 2:
                    value = _through_one(capacity, row, reals, at.into_sink + n, n)
                else:
                    value = _through_one(capacity, row, reals, below, n)
                    value = min(value, _bound(space, at, capacity, level, i, sink))
                    sure = 0.0
                    for k in range(n):
                        sure += capacity[row + k] if reals[below + k] >= value - near else 0.0
                    if sure < value - near:
                        value = _pair(space, at, capacity, stop, -lowest, level, i, sink, value)
                        if ints[STATUS] != FINISHED:
                            return sink
                reals[here + i] = value
                result = ints[at.row_of + level * n + i]
                if result >= 0:
                    out[result, ints[at.kept + sink]] = value
            below, here = here, below
        ints[DONE] += 1
    return last


@_compiled
def run(
    space: Any,
    maps: Any,
    real: Any,
    sources: Any,
    depth: int,
    stop: Any,
    example: int,
    end: int,
    first: int,
    last: int,
    out: Any,
) -> Any:
    """Fill out[example, source, token] for examples `example` … end − 1; returns the next example to do.

    Args:
        space: a workspace with room for a layout of all tokens and sources; for the same maps, the same one
            can be used again, and remembers what it has prepared.
        maps: capacities (example, level, token, token), of `depth` levels or more.
        real: boolean (example, token), False at padding.
        sources: (count, 2), each a (level, token), none twice; at padding, they have no results.
        depth: the highest level among the sources.
        stop: one integer; another thread stops the work by setting it.
        example: the first to do.
        end: the one after the last to do.
        first: of the first example, the sink to start from, counting real tokens.
        last: of every example, the sink to stop before.
        out: the results, which come in as zeros.
    """
    ints, reals = space.ints, space.reals
    tokens = real.shape[1]
    ints[STATUS] = FINISHED
    for e in range(example, end):
        n = 0
        for token in range(tokens):
            n += real[e, token]
        count = 0
        for s in range(sources.shape[0]):
            count += real[e, sources[s, 1]]
        if count == 0:
            ints[DONE] += n
            continue
        at = _layout(depth, n, count)
        sweep = _sweeps(depth, n, count)
        capacity = space.compact[: depth * n * n] if n < tokens else maps[e].reshape(-1)
        if ints[PREPARED] != e + 1:
            ints[PREPARED] = e + 1
            _number(space, at, real[e], sources, depth)
            if n < tokens:
                _gather(space, at, maps[e], depth)
            if not _prepare(space, at, capacity, depth, sweep):
                ints[STATUS] = BAD
                return e
        from_sink = first if e == example else 0
        to_sink = min(last, n)
        if reals[TINY] == 0.0:  # nothing flows: sources or all inputs without arcs
            ints[DONE] += to_sink - from_sink
            continue
        if sweep:
            ints[SINK] = _by_sink(space, at, capacity, stop, depth, from_sink, to_sink, out[e])
        else:
            ints[SINK] = _by_source(space, at, capacity, stop, from_sink, to_sink, out[e])
        if ints[STATUS] != FINISHED:
            return e
    return end


@_compiled
def mix_heads(maps: Any, residual: float, first: int, out: Any) -> None:
    """Fill out[:, first + layer] with (1 − r)·mean over heads + r·I, rows summing to one, in one pass.

    Args:
        maps: float32 (batch, layer, head, token, token).
        residual: r.
        first: where to put the first layer.
        out: (batch, layer, token, token).
    """
    batch, layers, heads, n, _ = maps.shape
    for b in range(batch):
        for layer in range(layers):
            level = out[b, first + layer]
            cells = level.reshape(n * n)
            cells[:] = 0.0
            for head in range(heads):
                source = maps[b, layer, head].reshape(n * n)
                for c in range(n * n):
                    cells[c] += source[c]
            for i in range(n):
                row = level[i]
                total = 0.0
                for j in range(n):
                    row[j] *= (1.0 - residual) / heads
                row[i] += residual
                for j in range(n):
                    total += row[j]
                if total > 0.0:
                    share = 1.0 / total
                    for j in range(n):
                        row[j] *= share
