"""A corpus as one self-contained page: tables of what the model draws on, and examples to open.

The page's size does not depend on the corpus: it has the rows of tables that come first by some measure, and
a sample of the examples, and says of how many.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from overt._version import __version__
from overt.corpus.examples import chosen_rows
from overt.corpus.opened import LABEL, Corpus
from overt.corpus.store import ROW
from overt.corpus.summary import COVERS, EVEN, LEAST, Row, Summary, ordered
from overt.tracing.methods.method import methods as known_methods
from overt.view.index import printable, short
from overt.view.pages import Page

EXAMPLES = 150  # at random, of all
PER_TOKEN, PER_GROUP = 2, 20  # examples for each token that comes first, and for each group
MOST_ROWS = 1_200  # of a table
FIRST = 200  # tokens of the table that have examples of their own
LONGEST = 300  # characters of a carried column on the page
SHARED = "·"  # in place of characters that the token before shows
TITLES = {"token": "Tokens", "position": "Positions", "label": "Labels", "error": "Errors"}
Report = Callable[[str, int, int], None]


class CorpusPage(Page):
    """What a model draws on over a corpus. Made by `corpus_page`; a notebook displays it.

    Attributes:
        index: tables and examples, as JSON values.
    """

    entry: ClassVar[str] = "corpus.js"
    looks: ClassVar[tuple[str, ...]] = ("page.css", "corpus.css")

    def __repr__(self) -> str:
        return f"CorpusPage({self.title!r}, {len(self.index['examples'])} examples)"

    def widget(self, height: int = 0) -> Any:
        """There is none: a notebook displays the page itself."""
        del height
        raise TypeError("the page of a corpus has no widget: display it, or save it")


def corpus_page(
    corpus: Corpus,
    *,
    by: Sequence[str] = (),
    label: str = LABEL,
    layer: int = -1,
    least: int = LEAST,
    examples: int = EXAMPLES,
    title: str | None = None,
    report: Report | None = None,
) -> CorpusPage:
    """What a model draws on, by token, position, label, error and other columns, and examples.

    Labels and errors are left out where there are none.

    Args:
        corpus: from `overt.corpus.open`.
        by: further columns to group sentences by.
        label: name of the column with labels.
        layer: which of the layers that the run kept.
        least: sentences that a row of a table must have.
        examples: how many to draw at random; there are a few more for tokens and groups.
        title: of the page.
        report: called with what is being done, the number of shards done and of all.
    """
    tables, missing = _tables(corpus, by, label)
    optional = {"label", "error"} - set(by)
    summaries, refused = corpus.summaries_but(
        tables, optional, layer=layer, label=label, report=_reporting(report, "summing")
    )
    tables, missing = [name for name in tables if name in summaries], {**missing, **refused}
    ranked = {name: _ranked(summary, least) for name, summary in summaries.items()}
    words = [str(row.name) for row in ranked["token"] if not row.special][:FIRST]
    groupings = {name: one for name in tables if (one := corpus.grouping(name, label)) is not None}
    rows = chosen_rows(
        corpus,
        some=examples,
        tokens=words,
        per_token=PER_TOKEN,
        groupings=groupings,
        per_group=PER_GROUP,
        report=_reporting(report, "choosing examples"),
    )
    truth = label if label in corpus.columns else None
    manifest = corpus.manifest
    title = title or f"What {manifest['model']['name']} draws on"
    index = {
        "format": 1,
        "version": __version__,
        "title": printable(title),
        "about": {
            "model": manifest["model"]["name"],
            "input": _names(manifest["input"]["name"]),
            "layer": _layer(manifest["settings"]["layers"], layer),
            "queries": manifest["settings"]["queries"],
            "sentences": summaries["token"].sentences,
            "tokens": summaries["token"].tokens,
            "left_out": summaries["token"].left_out,
            "bad": corpus.bad_rows(),
            "incomplete": corpus.missing,
            "filtered": corpus.filtered,
            "missing": missing,
            "least": least,
            "covers": COVERS,
            "even": EVEN,
            "sample": _sample_words(
                len(rows), len(corpus), min(examples, len(corpus)), len(words), groupings
            ),
            "text": corpus.text,
        },
        "methods": [_method(name) for name in corpus.methods],
        "tables": [_table(name, summaries[name], ranked[name], least) for name in tables],
        "examples": [_example(corpus, row, truth, layer, groupings) for row in rows],
    }
    return CorpusPage(_plain(index), [], printable(title))


def _plain(value: Any) -> Any:
    """JSON values alone: dates and the like become text, and text can be encoded."""
    if isinstance(value, Mapping):
        return {printable(str(key)): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int):
        return value
    return short(value) if isinstance(value, float | str) else printable(str(value))


def _reporting(report: Report | None, what: str) -> Callable[[int, int], None] | None:
    if report is None:
        return None
    return lambda done, total: report(what, done, total)


def _tables(corpus: Corpus, by: Sequence[str], label: str) -> tuple[list[str], dict[str, str]]:
    """Which tables the page may have; and why it has no labels or errors."""
    tables, missing = ["token", "position"], {}
    for name in ("label", "error"):
        try:
            corpus.grouping(name, label)
            tables.append(name)
        except ValueError as error:
            if name in by:
                raise
            missing[name] = str(error)
    for name in by:
        corpus.grouping(name, label)  # refuses what there is none of
    return list(dict.fromkeys([*tables, *by])), missing


def _layer(kept: int | Sequence[int] | None, layer: int) -> int:
    """Number, in the model, of one of the layers that were kept; negative from the top."""
    return layer if kept is None else kept if isinstance(kept, int) else kept[layer]


def _names(name: Any) -> str:
    listed = [name] if isinstance(name, str) else list(name)
    return str(listed[0]) if len(listed) == 1 else f"{listed[0]} and {len(listed) - 1:,} more"


def _method(name: str) -> dict[str, str]:
    known = known_methods().get(name)
    return {"name": name, "title": name if known is None else known.title}


def _sample_words(count: int, rows: int, some: int, tokens: int, groupings: Mapping[str, Any]) -> str:
    if count == rows:
        return f"all {rows:,} sentences"
    words = f"{count:,} of {rows:,} sentences: {some:,} at random"
    words += f", up to {PER_TOKEN} for each of {tokens:,} tokens" if tokens else ""
    named = [{"label": "label", "error": "kind of error"}.get(name, name) for name in groupings]
    return words + (f", up to {PER_GROUP} for each {', '.join(named)}" if named else "")


def _ranked(summary: Summary, least: int) -> list[Row]:
    """Rows that come first by some measure and method, special tokens before all; each key once."""
    ranks: dict[tuple[Any, ...], tuple[int, Row]] = {}
    sorts = ["mean", "ratio", "sentences"] + (["contrast"] if summary.grouped else [])
    for method in summary.methods:
        found = summary.rows(method, least=least)
        for sort in sorts:
            rows = ordered(found, sort)
            places = list(enumerate(rows))
            if sort == "contrast":  # what is drawn on less is of interest, too
                places += [(len(rows) - 1 - place, row) for place, row in places]
            for place, row in places:
                key = row.name, row.special, row.group
                if key not in ranks or place < ranks[key][0]:
                    ranks[key] = place, row
    best = sorted(ranks.values(), key=lambda entry: (not entry[1].special, entry[0], str(entry[1].name)))
    return [row for _, row in best]


def _table(name: str, summary: Summary, ranked: list[Row], least: int) -> dict[str, Any]:
    """A table for the page."""
    groups = summary.groups() if summary.grouped else []
    places = {group.name: number for number, group in enumerate(groups)}
    kept = {(row.name, row.special, row.group) for row in ranked[:MOST_ROWS]}
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for method in summary.methods:
        for row in summary.rows(method, least=least):
            key = row.name, row.special, row.group
            if key not in kept:
                continue
            entry = rows.setdefault(
                key,
                {
                    "name": row.name,
                    "special": row.special,
                    "group": places.get(row.group, 0),
                    "sentences": row.sentences,
                    "occurrences": row.occurrences,
                    "of": {},
                },
            )
            entry["of"][method] = {"mean": row.mean, "even": row.even, "ratio": row.ratio}
            if row.contrast is not None:
                entry["of"][method]["contrast"] = row.contrast
    return {
        "by": name,
        "title": TITLES.get(name, name),
        "all": len(ranked),
        "groups": [
            {
                "name": _shown_group(group.name),
                "sentences": group.sentences,
                "tokens": group.tokens,
                "on_special": group.on_special,
            }
            for group in (groups or summary.groups())
        ],
        "grouped": summary.grouped,
        "rows": list(rows.values()),
    }


def _shown_group(name: Any) -> str:
    return "(none)" if name is None else str(name)[:LONGEST]


def _example(
    corpus: Corpus, row: dict[str, Any], label: str | None, layer: int, groupings: Mapping[str, Any]
) -> dict[str, Any]:
    """A row for the page."""
    text = row[corpus.text] or ""
    values = {}
    for method in corpus.methods:
        found = row[method]
        values[method] = found[layer] if found and isinstance(found[0], list) else found
    others = [name for name in corpus.carried if name not in (corpus.text, label)]
    entry = {
        "row": row[ROW],
        "tokens": row["tokens"],
        "shown": displayed(text, row["tokens"], row["starts"], row["ends"]),
        "special": [int(flag) for flag in row["special"]],
        "query": row["query"],
        "cut": row["cut"],
        "values": values,
        "columns": {name: _cut(row[name]) for name in others if row[name] is not None},
        "groups": {},
    }
    if row["prediction"] is not None:
        entry["prediction"] = row["prediction"]
        entry["probability"] = row["probability"]
    if label is not None:
        entry["label"] = _cut(row[label])
    alone = _OneRow({name: [value] for name, value in row.items()})
    for name, grouping in groupings.items():
        entry["groups"][name] = _shown_group(grouping.values(alone)[0])
    return entry


class _OneRow:
    """A row that a grouping reads as it reads a table."""

    def __init__(self, columns: Mapping[str, list[Any]]) -> None:
        self._columns = columns

    def __getitem__(self, name: str) -> _OneColumn:
        return _OneColumn(self._columns[name])


class _OneColumn(list[Any]):
    def to_pylist(self) -> list[Any]:
        return list(self)


def _cut(value: Any) -> Any:
    """A carried value, short enough for a page; numbers with all their digits, as the page's may not have."""
    if value is None or isinstance(value, bool):
        return value
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def displayed(text: str, tokens: Sequence[str], starts: Sequence[int], ends: Sequence[int]) -> list[str]:
    """Tokens as the text has them, each after the white space before it; special ones by name.

    Args:
        text: that the tokens are of.
        tokens: names.
        starts: where each begins in the text; empty if unknown.
        ends: where each ends; equal to its start for a special token.
    """
    if len(starts) != len(tokens):
        return [f" {token}" for token in tokens]
    found, end, apart = [], 0, False
    for token, start, stop in zip(tokens, starts, ends, strict=True):
        if stop <= start:
            found.append(f" {token}")
            apart = True
            continue
        if start < end:  # of characters that several tokens share, the first shows them
            found.append(SHARED)
            end = max(end, stop)
            continue
        inside = text[start:stop]
        between = text[end:start]
        before = between + inside[: len(inside) - len(inside.lstrip())]
        space = " " if apart or re.search(r"\s", before) else ""
        found.append(space + (inside.strip() or token))
        apart = False
        end = stop
    return found
