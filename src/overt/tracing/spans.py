"""Rows of a trace by words, sentences, turns or what a user names, in place of tokens."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from overt.tracing.options import numbers

UNITS = ("tokens", "words", "sentences", "turns", "images")
GENERATED = "generated "
# Letters that are written without spaces between words: each token of them is a word of its own.
SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
ALONE = re.compile(f"[{SPACELESS}]")
JOINERS = "\u00ad\u200c\u200d"  # a soft hyphen, and what keeps letters apart or together inside a word
WORD = re.compile(rf"(?:(?![{SPACELESS}])\w)+(?:['’-](?:(?![{SPACELESS}])\w)+)*|[^\w\s]+")
SENTENCE = re.compile(r"[^\n]*?(?:[.!?…]+[\"'”’)\]]*(?=\s|$)|(?:[。！？]+[”」』]*)|\n|$)", re.S)


class Characters(NamedTuple):
    """A range of an example's text, for `Trace.spans`."""

    start: int
    stop: int


class Span(NamedTuple):
    """Neighbouring tokens that are read as one.

    Attributes:
        name: their text, or the name that was given.
        start: the first token.
        stop: one after the last.
    """

    name: str
    start: int
    stop: int


class SpanValues(NamedTuple):
    """What spans draw on.

    Attributes:
        values: (layer, query span, token span) in float64; with `heads="each"`, a head axis after the layer.
        queries: the spans of the rows. Of "generated …", and with `written`, each row is that of the queries
            before its tokens, which wrote them.
        tokens: the spans of the columns.
    """

    values: Tensor
    queries: list[Span]
    tokens: list[Span]


Ranges: TypeAlias = str | Mapping[str, Any] | None


def spans_of(
    trace: Any, method: str, queries: Ranges, tokens: Ranges, written: bool, options: Any
) -> list[SpanValues]:
    """See `Trace.spans`."""
    queries = (
        (f"{GENERATED}words" if trace.generated is not None else "words") if queries is None else queries
    )
    generated = isinstance(queries, str) and queries.startswith(GENERATED)
    written = written or generated
    if generated and trace.generated is None:
        raise ValueError(
            f"nothing was generated in this trace, got queries={queries!r}: trace with generate=64"
        )
    plans = []
    for example in range(len(trace)):
        every = _Example(trace, example)
        rows = every.spans(
            "queries", queries.removeprefix(GENERATED) if isinstance(queries, str) else queries
        )
        if generated:
            rows = [cut for span in rows if (cut := every.written(span)) is not None]
        rows = [span for span in rows if span.start >= trace.first + written]
        if isinstance(queries, Mapping) and len(rows) < len(queries):
            raise ValueError(
                f"queries must be tokens of the target, from {trace.first + written} on, got {queries!r}"
            )
        plans.append((rows, every.spans("tokens", tokens)))
    places = sorted(
        {place - written - trace.first for rows, _ in plans for s in rows for place in range(s.start, s.stop)}
    )
    if not places:
        raise ValueError(f"there are no spans in queries={queries!r}")
    found = trace.read(method, places, **options)
    single = found.shape[-2] == 1 < len(places)  # one output for all tokens
    at = {place: number for number, place in enumerate(places)}
    results = []
    for example, (rows, columns) in enumerate(plans):
        values = found[example]
        if single:
            rows = [Span("output", trace.first, trace.mask.shape[1])]
        else:
            means = [
                values[..., [at[p - written - trace.first] for p in range(s.start, s.stop)], :].mean(dim=-2)
                for s in rows
            ]
            values = torch.stack(means, dim=-2) if means else values[..., :0, :]
        sums = [values[..., span.start : span.stop].sum(dim=-1) for span in columns]
        results.append(SpanValues(torch.stack(sums, dim=-1), rows, columns))
    return results


def _joined(text: str) -> str:
    """The text with a letter for each sign inside a word that is none: accents, vowel signs, joiners."""
    letters: list[str] = []
    for letter in text:
        follows = bool(letters) and letters[-1].isalnum() and not ALONE.match(letters[-1])
        sign = unicodedata.category(letter).startswith("M") or letter in JOINERS
        letters.append("x" if follows and sign else letter)
    return "".join(letters)


class _Example:
    """One example's tokens and text."""

    def __init__(self, trace: Any, number: int) -> None:
        self.trace, self.number = trace, number
        self.real: list[int] = trace.mask[number].nonzero().flatten().tolist()
        self.text: str | None = trace.texts[number] if trace.texts else None
        self.places: list[list[int]] = [] if trace.offsets is None else trace.offsets[number].tolist()
        self.special: list[bool] = trace.special[number].tolist()

    def spans(self, argument: str, ranges: Ranges) -> list[Span]:
        """The spans that an argument of `Trace.spans` asks for."""
        if isinstance(ranges, Mapping):
            if not ranges:
                raise ValueError(f"{argument} must name at least one range, got {ranges!r}")
            return [self._named(argument, str(name), value) for name, value in ranges.items()]
        made: dict[str, Callable[[], list[Span]]] = {
            "tokens": lambda: [Span(self.trace.tokens[self.number][at], at, at + 1) for at in self.real],
            "words": lambda: self._pieces("words", WORD),
            "sentences": lambda: self._pieces("sentences", SENTENCE),
            "turns": self._turns,
            "images": self._images,
        }
        if not isinstance(ranges, str) or ranges not in made:
            prefixed = [f"{GENERATED}{unit}" for unit in UNITS] if argument == "queries" else []
            known = ", ".join(map(repr, [*UNITS, *prefixed]))
            raise ValueError(f"{argument} must be one of {known}, or name → range; got {ranges!r}")
        return made[ranges]()

    def written(self, span: Span) -> Span | None:
        """The part of a span that was generated; None if there is none."""
        assert self.trace.generated is not None
        places = range(span.start, span.stop)
        inside = [place for place in places if bool(self.trace.generated[self.number, place])]
        if not inside:
            return None
        whole = len(inside) == span.stop - span.start
        return Span(span.name if whole else self._words(inside[0], inside[-1] + 1), inside[0], inside[-1] + 1)

    def _known(self, what: str) -> str:
        if self.text is None or not self.places:
            raise ValueError(
                f"{what} are found by offsets in a text, which this trace has not: trace text, with a fast "
                "tokenizer, or give token ranges"
            )
        return self.text

    def _words(self, start: int, stop: int) -> str:
        """Tokens as text."""
        shown = [self.places[at] for at in range(start, stop) if self.places and self.places[at][1]]
        if self.text is None or not shown:
            return " ".join(map(str, self.trace.tokens[self.number][start:stop]))
        return self.text[shown[0][0] : shown[-1][1]].strip()

    def _turns(self) -> list[Span]:
        turns = self.trace.turns[self.number] if self.trace.turns else []
        if not turns:
            raise ValueError("this trace has no turns: trace messages of a chat, or with generate=64")
        return [Span(*turn) for turn in turns if turn.stop > turn.start]  # one may have written nothing

    def _images(self) -> list[Span]:
        pictures = self.trace.images()[self.number]
        if not pictures:
            raise ValueError(f"there is no picture in the prompt of example {self.number}")
        return [Span(f"image {n}", each.start, each.stop) for n, each in enumerate(pictures, start=1)]

    def _pieces(self, what: str, pattern: re.Pattern[str]) -> list[Span]:
        """Tokens joined where one match of a pattern holds their first letters; others stay alone.

        Tokens that are bytes of one character are joined wherever it is.
        """
        text = self._known(what)
        owner: dict[int, int] = {}  # character → number of its piece
        for number, match in enumerate(pattern.finditer(_joined(text))):
            owner |= dict.fromkeys(range(*match.span()), number)
        spans: list[Span] = []
        before: int | None = None
        for at in self.real:
            start, stop = self.places[at]
            inside = text[start:stop]
            letter = start + len(inside) - len(inside.lstrip())
            mine = None if self.special[at] else owner.get(letter)
            if not inside.strip() and not self.special[at]:
                if pattern is SENTENCE:
                    mine = before  # white space ends the sentence before it
                elif "\n" in inside:
                    mine = None  # a space belongs to the word after it, and the end of a line to none
            follows = spans and spans[-1].stop == at and at != self.trace.first
            shared = bool(inside) and start < self.places[at - 1][1]  # bytes of one character
            if follows and (shared or (mine is not None and mine == before)):
                spans[-1] = Span("", spans[-1].start, at + 1)
            else:
                spans.append(Span("", at, at + 1))
            before = mine
        names = [self._words(span.start, span.stop) for span in spans]
        shown = [
            name or self.trace.tokens[self.number][s.start] for name, s in zip(names, spans, strict=True)
        ]
        return [Span(name, span.start, span.stop) for name, span in zip(shown, spans, strict=True)]

    def _named(self, argument: str, name: str, value: Any) -> Span:
        """A range that a user names: of tokens, of characters, or a passage of the text."""
        if isinstance(value, str):
            text = self._known("passages")
            count = text.count(value) if value else 0
            if count != 1:
                raise ValueError(
                    f"{argument}[{name!r}] must be in the text once, and is {count} times: {value!r}"
                )
            start = text.index(value)
            value = Characters(start, start + len(value))
        if isinstance(value, Characters):
            self._known("characters")
            inside = [
                at for at in self.real if self.places[at][0] < value.stop and self.places[at][1] > value.start
            ]
            if not inside:
                raise ValueError(f"{argument}[{name!r}] holds no token: {value}")
            return Span(name, inside[0], inside[-1] + 1)
        try:
            start, stop = (value.start, value.stop) if isinstance(value, range) else value
        except (TypeError, ValueError):
            raise ValueError(
                f"{argument}[{name!r}] must be a pair of tokens, Characters or a passage, got {value!r}"
            ) from None
        count = self.trace.mask.shape[1]
        first, last = numbers(f"{argument}[{name!r}]", [start, stop - 1], count)
        if last < first:
            raise ValueError(f"{argument}[{name!r}] must hold at least one token, got {value!r}")
        return Span(name, first, last + 1)
