"""What a model draws on over a corpus: means over sentences, with intervals, in one pass and little memory.

The unit is the sentence: the tokens of one sentence share a query, a length and a sum, so they are not
independent, and a token that occurs twice in it is not seen twice. For a token (or position) and a method,
let sentence s have c(s) occurrences of it, x(s) the sum of their attributions, and e(s) the sum that an even
spread would give them, where each token of the sentence gets the same: its total divided by its tokens. Then

    mean   = Σ x(s) / Σ c(s)    attribution per occurrence
    even   = Σ e(s) / Σ c(s)    what uniform attention would give; short sentences have large shares
    ratio  = Σ x(s) / Σ e(s)    1 where the model draws on it as on any token of its sentences

over the n sentences that have it. Both quotients get the interval of a ratio estimator with sentences as
clusters: quotient ± t(n − 1) · √(n/(n − 1) · Σ (x(s) − quotient · d(s))²) / Σ d(s), where d is c or e
(Cochran, Sampling Techniques, 3rd ed., section 6.4). All of this follows from sums of c, x, e and their
products, which are kept for each token, however many sentences there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Integers: TypeAlias = NDArray[np.int64]

CONFIDENCE = 0.95
LEAST = 10  # sentences that a row of a table has at least, unless asked otherwise
MOST_GROUPS = 50  # values of a column that sentences are grouped by
SORTS = ("mean", "ratio", "sentences", "contrast")
COVERS = (
    "95 % intervals cover the mean over sentences like these, if these were drawn at random and "
    "independently: a sentence is one observation, however often a token occurs in it. They do not cover "
    "other models or seeds, nor sentences that depend on each other, such as phrases of one text. Each is "
    "for its own row: of 100, about 5 miss."
)
EVEN = (
    "× even: divided by what an even spread over the tokens of the same sentences would give, since shares "
    "are larger in shorter sentences."
)


class Estimate(NamedTuple):
    """A value and its 95 % interval over sentences; bounds are NaN for a single sentence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Sentences:
    """Some sentences of a corpus, their tokens one after the other.

    Attributes:
        names: different tokens, by name.
        codes: (token,), each token's place in `names`.
        special: (token,), which tokens are special.
        lengths: (sentence,), tokens of each.
        queries: (sentence,), place of the token whose attributions these are.
        values: (method, token), attributions.
        groups: (sentence,), what the sentences are grouped by; None for no groups.
    """

    names: Sequence[str]
    codes: Integers
    special: NDArray[np.bool_]
    lengths: Integers
    queries: Integers
    values: Floats
    groups: Sequence[Hashable] | None = None


class Key(NamedTuple):
    """What a row is about: a token by name, or a position by number, in one group of sentences."""

    name: Hashable
    special: bool
    group: Hashable


@dataclass(frozen=True)
class Row:
    """A row of a summary, by one method.

    Attributes:
        name: of the token; or the position, counted from 0, special tokens included.
        special: whether it is a special token.
        group: value of the column that sentences are grouped by; None without groups.
        sentences: that have it.
        occurrences: in these sentences.
        mean: attribution of an occurrence.
        even: what an even spread over the tokens of each sentence would give it.
        ratio: mean attribution / even.
        contrast: ratio in this group less the ratio in all other sentences, NaN if too few of these have it;
            None without groups.
    """

    name: Hashable
    special: bool
    group: Hashable
    sentences: int
    occurrences: int
    mean: Estimate
    even: float
    ratio: Estimate
    contrast: Estimate | None


@dataclass(frozen=True)
class Group:
    """Sentences of one group, or all of them.

    Attributes:
        name: value of the column that sentences are grouped by; None for all.
        sentences: their number.
        tokens: the mean length, special tokens included.
        on_special: by method, the mean share of a sentence's attribution that falls on special tokens.
    """

    name: Hashable
    sentences: int
    tokens: float
    on_special: dict[str, Estimate]


class Sums:
    """Sums over sentences, from which means and their intervals follow (see the top of this file).

    Attributes:
        ids: key → row of `kept`.
    """

    def __init__(self, methods: int) -> None:
        self.methods = methods
        self.ids: dict[Hashable, int] = {}
        self.kept: Floats = np.zeros((3 + 6 * methods, 64))

    def rows_of(self, keys: Iterable[Hashable]) -> Integers:
        """Rows of these keys, new ones at the end."""
        ids = self.ids
        rows = np.array([ids.setdefault(key, len(ids)) for key in keys], dtype=np.int64)
        if len(ids) > self.kept.shape[1]:
            more = max(len(ids), 2 * self.kept.shape[1])
            self.kept = np.pad(self.kept, ((0, 0), (0, more - self.kept.shape[1])))
        return rows

    def add(self, rows: Integers, sentences: Integers, values: Floats, even: Floats) -> None:
        """Add tokens.

        Args:
            rows: (token,), from `rows_of`.
            sentences: (token,), number of the sentence; a sentence's tokens all come in one call.
            values: (method, token), attributions.
            even: (method, token), what an even spread would give.
        """
        if not len(rows):
            return
        order = np.lexsort((sentences, rows))
        rows, sentences = rows[order], sentences[order]
        fresh = np.diff(rows, prepend=-1) != 0
        cells = np.flatnonzero(fresh | (np.diff(sentences, prepend=-1) != 0))  # a sentence and a key each
        c = np.diff(cells, append=len(rows)).astype(np.float64)
        x, e = (np.add.reduceat(each[:, order], cells, axis=1) for each in (values, even))
        per_method = np.stack([x, x * x, x * c, e, e * e, x * e], axis=1).reshape(-1, len(cells))
        of_cells = np.concatenate([np.stack([np.ones_like(c), c, c * c]), per_method])
        starts = np.flatnonzero(fresh[cells])
        self.kept[:, rows[cells[starts]]] += np.add.reduceat(of_cells, starts, axis=1)

    @property
    def sentences(self) -> Floats:
        """(row,), sentences that have the key."""
        return self.kept[0, : len(self.ids)]

    @property
    def occurrences(self) -> Floats:
        """(row,)."""
        return self.kept[1, : len(self.ids)]

    def of(self, method: int) -> Moments:
        """What a method's quotients are computed from."""
        kept = self.kept[:, : len(self.ids)]
        return Moments(*kept[:3], *kept[3 + 6 * method : 9 + 6 * method])


class Moments(NamedTuple):
    """Sums over sentences of products, (row,) each; names as at the top of this file."""

    n: Floats
    c: Floats
    cc: Floats
    x: Floats
    xx: Floats
    xc: Floats
    e: Floats
    ee: Floats
    xe: Floats

    def mean(self) -> tuple[Floats, Floats]:
        """Attribution per occurrence and its variance."""
        return _quotient(self.n, self.x, self.xx, self.c, self.cc, self.xc)

    def ratio(self) -> tuple[Floats, Floats]:
        """Attribution divided by that of an even spread, and its variance."""
        return _quotient(self.n, self.x, self.xx, self.e, self.ee, self.xe)

    def some(self, rows: Integers) -> Moments:
        """Sums of some rows."""
        return Moments(*(one[rows] for one in self))

    def minus(self, other: Moments) -> Moments:
        """Sums over the sentences that are not in `other`."""
        return Moments(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


def _quotient(n: Floats, x: Floats, xx: Floats, d: Floats, dd: Floats, xd: Floats) -> tuple[Floats, Floats]:
    """Σx / Σd and its variance over sentences; NaN where there is no denominator, or one sentence."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(d > 0.0, x / d, np.nan)
        left = np.maximum(xx - 2.0 * found * xd + found**2 * dd, 0.0)
        variance = np.where(n > 1.0, n / (n - 1.0) * left / d**2, np.nan)
    return found, variance


def _half(variance: Floats, freedom: Floats) -> Floats:
    """Half the width of an interval."""
    from scipy.special import stdtrit

    with np.errstate(invalid="ignore"):
        wide = stdtrit(np.maximum(freedom, 1.0), 0.5 + CONFIDENCE / 2.0) * np.sqrt(variance)
    return np.asarray(wide, dtype=np.float64)


class Summing:
    """A summary in the making: sentences are added, and memory grows with the different tokens alone.

    Args:
        methods: names, in the order of `Sentences.values`.
        by: "token", "position", or the name of the column whose values are `Sentences.groups`.
    """

    def __init__(self, methods: Sequence[str], by: str = "token") -> None:
        self.methods, self.by = tuple(methods), by
        self._rows = Sums(len(self.methods))
        self._shares = Sums(len(self.methods))  # on special tokens, one "occurrence" for each sentence
        self._tokens: dict[Hashable, int] = {}
        self.left_out = 0

    def add(self, batch: Sentences) -> None:
        """Add whole sentences."""
        lengths = np.asarray(batch.lengths, dtype=np.int64)
        count = len(lengths)
        if batch.groups is not None and len(batch.groups) != count:
            raise ValueError(
                f"groups must have {count} entries, one for each sentence, got {len(batch.groups)}"
            )
        values = np.asarray(batch.values, dtype=np.float64)
        tokens = int(lengths.sum())
        if values.shape != (len(self.methods), tokens):
            raise ValueError(
                f"values must have shape (method, token), ({len(self.methods)}, {tokens}), got {values.shape}"
            )
        sentence = np.repeat(np.arange(count), lengths)
        starts = np.cumsum(lengths) - lengths
        place = np.arange(tokens) - starts[sentence]
        # A NaN of one token says nothing of its sentence but that something is wrong with it.
        broken = np.bincount(sentence, ~np.isfinite(values).all(axis=0), minlength=count) > 0
        kept = ~broken & (lengths > 0)
        self.left_out += int(count - kept.sum())
        # A causal model's query sees nothing after it, whatever it attends to.
        after = place > np.asarray(batch.queries, dtype=np.int64)[sentence]
        drawn = np.bincount(sentence, after & (values != 0.0).any(axis=0), minlength=count) > 0
        use = kept[sentence] & (drawn[sentence] | ~after)
        sentence, place, values = sentence[use], place[use], values[:, use]
        special, codes = batch.special[use], batch.codes[use]
        seen = np.bincount(sentence, minlength=count).astype(np.float64)
        # (method, sentence)
        totals = np.stack([np.bincount(sentence, row, minlength=count) for row in values])
        even = (totals / np.maximum(seen, 1.0))[:, sentence]
        groups, group_of = self._grouped(batch.groups, kept)
        self._add_rows(batch.names, codes, special, place, sentence, group_of, groups, values, even)
        on = np.stack([np.bincount(sentence, row * special, minlength=count) for row in values])
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(totals > 0.0, on / totals, 0.0)[:, kept]
        each = self._shares.rows_of(groups)[group_of[kept]]
        self._shares.add(each, np.arange(len(each)), shares, np.ones_like(shares))
        for number, group in enumerate(groups):
            inside = int(lengths[kept & (group_of == number)].sum())
            self._tokens[group] = self._tokens.get(group, 0) + inside

    def _grouped(
        self, groups: Sequence[Hashable] | None, kept: NDArray[np.bool_]
    ) -> tuple[list[Hashable], Integers]:
        """Different groups, and each sentence's place among them."""
        if groups is None:
            return [None], np.zeros(len(kept), dtype=np.int64)
        found: dict[Hashable, int] = {}
        places = np.array([found.setdefault(group, len(found)) for group in groups], dtype=np.int64)
        if len(found.keys() | self._tokens.keys()) > MOST_GROUPS:
            raise ValueError(
                f"by must be a column with at most {MOST_GROUPS} different values, {self.by!r} has more, "
                f"such as {next(reversed(found))!r}"
            )
        return list(found), places

    def _add_rows(
        self,
        names: Sequence[str],
        codes: Integers,
        special: NDArray[np.bool_],
        place: Integers,
        sentence: Integers,
        group_of: Integers,
        groups: list[Hashable],
        values: Floats,
        even: Floats,
    ) -> None:
        if self.by == "position":
            words = ~special  # the last special token's position is but the sentence's length
            place, sentence, values, even = place[words], sentence[words], values[:, words], even[:, words]
            different, inverse = np.unique(place, return_inverse=True)
            keys = [Key(int(number), False, None) for number in different]
        else:
            packed = (group_of[sentence] * len(names) + codes) * 2 + special
            different, inverse = np.unique(packed, return_inverse=True)
            keys = [
                Key(names[int(one) // 2 % len(names)], bool(one % 2), groups[int(one) // 2 // len(names)])
                for one in different
            ]
        rows = self._rows.rows_of(keys)
        self._rows.add(rows[inverse] if len(rows) else inverse, sentence, values, even)

    def result(self) -> Summary:
        """The summary of what was added so far."""
        return Summary(self.by, self.methods, self._rows, self._shares, dict(self._tokens), self.left_out)


class Summary:
    """What a model draws on over a corpus. Made by `overt.corpus.Corpus.summary`.

    Attributes:
        by: "token", "position" or the name of a column.
        methods: names.
        left_out: sentences with attributions that are not numbers, which are in no row.
        covers: what the intervals cover, and what they do not.
    """

    covers = COVERS

    def __init__(
        self,
        by: str,
        methods: tuple[str, ...],
        rows: Sums,
        shares: Sums,
        tokens: dict[Hashable, int],
        left_out: int,
    ) -> None:
        self.by, self.methods, self.left_out = by, methods, left_out
        self._sums, self._shares, self._tokens = rows, shares, tokens
        self._keys = [key for key in rows.ids if isinstance(key, Key)]

    @property
    def sentences(self) -> int:
        """Number of sentences."""
        return int(self._shares.sentences.sum())

    @property
    def tokens(self) -> int:
        """Number of tokens, special ones included."""
        return sum(self._tokens.values())

    def __repr__(self) -> str:
        return f"Summary(by={self.by!r}, {self.sentences:,} sentences, methods {', '.join(self.methods)})"

    def _method(self, method: str | None) -> int:
        from overt import _check

        method = main_method(self.methods) if method is None else method
        _check.one_of("method", method, self.methods)
        return self.methods.index(method)

    def groups(self) -> list[Group]:
        """The groups of sentences, the largest first; without groups, one of all."""
        found = []
        estimates = [
            _estimates(self._shares.of(number).mean(), self._shares.sentences)
            for number in range(len(self.methods))
        ]
        for name, row in self._shares.ids.items():
            count = int(self._shares.sentences[row])
            if count:
                shares = {method: one[row] for method, one in zip(self.methods, estimates, strict=True)}
                found.append(Group(name, count, self._tokens[name] / count, shares))
        return sorted(found, key=lambda group: (-group.sentences, str(group.name)))

    def rows(
        self,
        method: str | None = None,
        *,
        sort: Literal["mean", "ratio", "sentences", "contrast"] | None = None,
        least: int = LEAST,
        special: bool | None = None,
        group: Any = ...,
    ) -> list[Row]:
        """Rows of a method's table.

        Args:
            method: by name; by default rollout, or the first that there is.
            sort: "mean", "ratio", "sentences" or, with groups, "contrast", largest first; by default the
                mean, and positions in their order.
            least: sentences that a row must have; for a contrast, both in its group and in the others.
            special: True or False for special tokens or others alone.
            group: one group's rows alone; by default those of all.
        """
        from overt import _check

        number = self._method(method)
        if sort is not None:
            _check.one_of("sort", sort, SORTS)
        _check.whole("least", least, 1)
        if sort == "contrast" and not self.grouped:
            raise ValueError('sort="contrast" compares groups: summary(by=…) with the name of a column')
        if group is not ... and group not in self._shares.ids:
            raise ValueError(f"group must be one of {', '.join(map(repr, self._shares.ids))}; got {group!r}")
        sums = self._sums.of(number)
        keys = [
            (key, at)
            for at, key in enumerate(self._keys)
            if sums.n[at] >= least
            and (special is None or key.special == special)
            and (group is ... or key.group == group)
        ]
        places = np.array([at for _, at in keys], dtype=np.int64)
        some = sums.some(places)
        means, ratios = _estimates(some.mean(), some.n), _estimates(some.ratio(), some.n)
        contrasts = self._contrasts(sums, least, places) if self.grouped else None
        found = [
            Row(
                key.name,
                key.special,
                key.group,
                int(some.n[place]),
                int(some.c[place]),
                means[place],
                float(some.e[place] / some.c[place]),
                ratios[place],
                None if contrasts is None else contrasts[place],
            )
            for place, (key, _) in enumerate(keys)
        ]
        if sort is None and self.by == "position":
            return sorted(found, key=lambda row: int(row.name))  # type: ignore[call-overload]
        return ordered(found, sort or "mean")

    @property
    def grouped(self) -> bool:
        """Whether sentences are grouped by a column."""
        return self.by not in ("token", "position")

    def _contrasts(self, sums: Moments, least: int, places: Integers) -> list[Estimate]:
        """The ratio of rows at some places less that in the sentences of all other groups.

        The interval is Welch's. NaN where fewer than `least` other sentences have the token.
        """
        whole: dict[Hashable, int] = {}
        of_rows = np.array([whole.setdefault(key[:2], len(whole)) for key in self._keys], dtype=np.int64)
        wholes = (np.bincount(of_rows, one, minlength=len(whole))[of_rows[places]] for one in sums)
        everywhere = Moments(*(np.asarray(one, dtype=np.float64) for one in wholes))
        sums = sums.some(places)
        others = everywhere.minus(sums)
        (mine, mine_variance), (theirs, theirs_variance) = sums.ratio(), others.ratio()
        both = mine_variance + theirs_variance
        with np.errstate(divide="ignore", invalid="ignore"):
            freedom = both**2 / (mine_variance**2 / (sums.n - 1.0) + theirs_variance**2 / (others.n - 1.0))
        # Equal values everywhere have no variance and any number of degrees of freedom.
        freedom = np.where(np.isfinite(freedom), freedom, 1.0)
        enough = others.n >= least - 0.5
        return _bounds(np.where(enough, mine - theirs, np.nan), _half(both, freedom))

    def records(self, least: int = 1) -> list[dict[str, Any]]:
        """All rows of all methods as flat dictionaries, as `pandas.DataFrame` takes them.

        Args:
            least: sentences that a row must have.
        """
        found = []
        for method in self.methods:
            for row in self.rows(method, least=least):
                flat: dict[str, Any] = {"method": method}
                if self.grouped:
                    flat[self.by] = row.group
                flat |= {"position" if self.by == "position" else "token": row.name, "special": row.special}
                flat |= {"sentences": row.sentences, "occurrences": row.occurrences, "even": row.even}
                named = {"mean": row.mean, "ratio": row.ratio}
                named |= {} if row.contrast is None else {"contrast": row.contrast}
                for name, (value, low, high) in named.items():
                    flat |= {name: value, f"{name}_low": low, f"{name}_high": high}
                found.append(flat)
        return found


def main_method(methods: Sequence[str]) -> str:
    """The method that is shown first: rollout, as on other pages, or the first that there is."""
    return "rollout" if "rollout" in methods else methods[0]


def ordered(rows: Iterable[Row], sort: str) -> list[Row]:
    """Rows sorted by one of `SORTS`, the largest first; those without a value last."""

    def order(row: Row) -> tuple[float, str, str]:
        value = row.sentences if sort == "sentences" else getattr(row, sort).value
        return (-value if value == value else float("inf"), str(row.name), str(row.group))

    return sorted(rows, key=order)


def _estimates(found: tuple[Floats, Floats], n: Floats) -> list[Estimate]:
    values, variance = found
    return _bounds(values, _half(variance, n - 1.0))


def _bounds(values: Floats, half: Floats) -> list[Estimate]:
    both = zip(values.tolist(), half.tolist(), strict=True)
    return [Estimate(value, value - wide, value + wide) for value, wide in both]
