"""A classifier of texts as a function of their words, of which any may be deleted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from overt._modes import any_shape, device_of, evaluating
from overt._predictions import link_of, linked
from overt.tracing.inputs import check_ids, padding_id, positions_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[np.int64]

LETTER = "a"  # a word that every tokenizer knows, to see what it makes of the space after it
# Tokens of one pass: on a GPU, and elsewhere, where caches hold little.
TOKENS, FEW = 2**16, 2**12
CACHED = 4  # times as many may be cached for those that follow them
# Of a classifier with windows: the LSTM is as fast for many texts as for few, and the encoder is not.
READ, READ_FEW = 2**18, 2**16
ENCODED = 2**15
# Difference that padding may make to a probability: rounding error, of products of float32 or of fewer bits.
READS_PADDING, ROUNDED = 0.01, 0.1


@dataclass(frozen=True, eq=False)
class Text:
    """A text as a classifier sees it.

    Attributes:
        name: for errors.
        words: those that it sees.
        pieces: ids of the pieces of each word, where another word is before it.
        starts: the same where none is, if they are others, as of tokenizers that keep the space before a
            word.
        query: pieces of each word of what is asked of the text, which is never deleted.
        cut: how many words at the end the classifier does not see, being too long for it.
    """

    name: str
    words: tuple[str, ...]
    pieces: list[list[int]]
    starts: list[list[int]]
    query: list[list[int]]
    cut: int = 0

    @cached_property
    def flat(self) -> tuple[Ints, Ints, Ints]:
        """Ids of all pieces, the word that each belongs to, and 1 for the first of each word."""
        return _flat(self.pieces)

    def kept(self, kept: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
        """As `flat`, of the text as it is written with the words that are kept alone."""
        ids, owners, first = self.flat
        stay = kept[owners]
        ids, owners, first = ids[stay], owners[stay], first[stay]
        if not len(owners) or self.starts[owners[0]] == self.pieces[owners[0]]:
            return ids, owners, first
        start, rest = _flat([self.starts[owners[0]]]), owners != owners[0]
        return (
            np.concatenate([start[0], ids[rest]]),
            np.concatenate([start[1] + owners[0], owners[rest]]),
            np.concatenate([start[2], first[rest]]),
        )

    @cached_property
    def asked(self) -> Ints:
        """Ids of all pieces of the query."""
        return _flat(self.query)[0]

    @cached_property
    def ways(self) -> tuple[Ints, Ints]:
        """Ids of the pieces of all words in all ways in which they are written, and when each is there.

        When: a word's number, where it is kept; that plus the number of words, where it is kept and no word
        is before it; and that plus twice their number, where it is kept and another is before it.
        """
        ids, when, words = list[int](), list[int](), len(self.words)
        for word, (start, pieces) in enumerate(zip(self.starts, self.pieces, strict=True)):
            ways = [(pieces, word)]
            if start != pieces:
                ways = [(start, word + words), (pieces, word + 2 * words)]
            for written, number in ways:
                ids += written
                when += [number] * len(written)
        return np.array(ids, dtype=np.int64), np.array(when, dtype=np.int64)

    def stays(self, kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which pieces of `ways` are there for each set of kept words, (sets, words) → (sets, pieces)."""
        _, when = self.ways
        if (when < len(self.words)).all():
            return kept[:, when]
        written = kept & np.array([len(pieces) > 0 for pieces in self.pieces])
        first = written & (written.cumsum(axis=1) == 1)
        return np.concatenate([kept, first, written & ~first], axis=1)[:, when]


def _flat(words: Sequence[Sequence[int]]) -> tuple[Ints, Ints, Ints]:
    ids = np.array([number for pieces in words for number in pieces], dtype=np.int64)
    owners = np.repeat(np.arange(len(words)), [len(pieces) for pieces in words])
    return ids, owners, np.diff(owners, prepend=-1).astype(bool).astype(np.int64)


class Coded(NamedTuple):
    """Arguments of a classifier for one text, and the word that each token belongs to (−1: none)."""

    arguments: dict[str, list[int]]
    places: list[int]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Arguments of a classifier for many texts, one after the other and without padding.

    Attributes:
        lengths: tokens of each, (rows,).
        values: name of an argument → those of all tokens, (tokens of all rows,).
    """

    lengths: Ints
    values: dict[str, Ints]

    @cached_property
    def starts(self) -> Ints:
        """Where each begins, (rows,)."""
        return self.lengths.cumsum() - self.lengths

    def table(self, name: str, chosen: Ints, empty: int) -> Ints:
        """An argument of the rows with these numbers, and a number for places where there is none."""
        lengths, starts = self.lengths[chosen, None], self.starts[chosen, None]
        columns = np.arange(lengths.max())
        there = columns < lengths
        found = np.full(there.shape, empty, np.int64)
        found[there] = self.values[name][(starts + columns)[there]]
        return found


def _rows_of(rows: Sequence[Mapping[str, Any]]) -> _Rows:
    lengths = np.array([len(row["input_ids"]) for row in rows])
    return _Rows(lengths, {name: np.concatenate([row[name] for row in rows]) for name in rows[0]})


def _joined(parts: Sequence[_Rows]) -> _Rows:
    names = parts[0].values
    return _Rows(
        np.concatenate([part.lengths for part in parts]),
        {name: np.concatenate([part.values[name] for part in parts]) for name in names},
    )


class _Around(NamedTuple):
    """Special tokens around text and query, with the types of all parts."""

    before: list[int]
    between: list[int]
    after: list[int]
    types: tuple[list[int], int, list[int], int, list[int]]


class WordClassifier:
    """A classifier with its tokenizer.

    Words are tokenized one by one, so that a text with some words deleted is tokenized as if it had been
    written without them: with a space before each word but the first.

    Args:
        model: a Hugging Face classifier of sequences, or a `RationaleClassifier`.
        tokenizer: its tokenizer, a fast one.
        dtype: of the products (autocast) where parts of texts are asked for; None for the model's own.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, dtype: torch.dtype | None = None) -> None:
        from overt.models.rationale import RationaleClassifier

        self.model, self.tokenizer, self.dtype = model, tokenizer, dtype
        config: Any = getattr(model, "config", None)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "tokenizer must be a fast one, which knows the pieces of words, "
                f"got {type(tokenizer).__name__}"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"model must read its text in one stack; {type(model).__name__} is an encoder–decoder"
            )
        classes = getattr(config, "num_labels", None)
        if not isinstance(classes, int) or classes < 2:
            raise ValueError(
                "model must be a classifier with at least two classes, "
                f"got {type(model).__name__} with {classes}"
            )
        if link_of(config, classes) == "identity":
            raise ValueError(
                f"model must be a classifier, got {type(model).__name__} for regression (config.problem_type)"
            )
        if link_of(config, classes) == "sigmoid":
            raise ValueError(
                f"model must give each text one class, got {type(model).__name__} for several labels at once "
                "(config.problem_type)"
            )
        if tokenizer.pad_token_id is None and getattr(config, "pad_token_id", None) is None:
            raise ValueError(f"tokenizer must have a token for padding; {type(tokenizer).__name__} has none")
        self.pad = padding_id(tokenizer, model)
        self.classes = classes
        self.windowed: bool = isinstance(model, RationaleClassifier)
        if self.windowed and None in (tokenizer.cls_token_id, tokenizer.sep_token_id):
            raise ValueError("tokenizer must have tokens for the start and the end of a window")
        self._around: dict[bool, _Around] = {}
        self.prefixes = bool(getattr(model, "prefixes", False))  # whether shared beginnings are read once
        self._checked = False  # whether it has been seen that texts read together are read as alone

    @property
    def longest(self) -> int | None:
        """Tokens that the model takes; None if there is no limit."""
        if self.windowed:
            return None
        config: Any = self.model.config
        limits = [getattr(config, "max_position_embeddings", None), self.tokenizer.model_max_length]
        limits.append(positions_of(self.model))
        known = [int(limit) for limit in limits if limit is not None and 0 < limit < 10**6]
        return min(known) if known else None

    def read(self, words: str | Sequence[str], query: str = "", name: str = "0") -> Text:
        """A text, with the words at its end that do not fit cut off."""
        if not isinstance(query, str):
            raise ValueError(f"text {name}: its query must be text, empty for none, got {query!r}")
        if not hasattr(words, "__iter__"):
            raise ValueError(f"text {name}: must be text or a list of words, got {words!r}"[:120])
        listed = tuple(words.split() if isinstance(words, str) else words)
        if not listed or not all(isinstance(word, str) and word.strip() for word in listed):
            raise ValueError(f"text {name}: must have words, got {str(words)[:60]!r}")
        pieces, starts = self._pieces(listed)
        following, opening = self._pieces(tuple(query.split()))
        asked = [*opening[:1], *following[1:]]
        every = [number for piece in (*pieces, *starts, *asked) for number in piece]
        check_ids(self.model, torch.tensor(every), f"text {name}: ids of the tokenizer")
        limit = self.longest
        if limit is not None:
            around = self._specials(bool(asked))
            rest = limit - len(around.before) - len(around.between) - len(around.after)
            rest -= sum(map(len, asked))
            # Any word may be the first that is left.
            longer = [len(start) - len(each) for start, each in zip(starts, pieces, strict=True)]
            rest -= max(0, *longer)
            fits = int((np.cumsum([len(each) for each in pieces]) <= rest).sum())
            if fits == 0:
                beside = " beside its query" if asked else ""
                raise ValueError(
                    f"text {name}: the {limit} tokens that the model takes have no room for its first word"
                    f"{beside}"
                )
            return Text(name, listed[:fits], pieces[:fits], starts[:fits], asked, len(listed) - fits)
        return Text(name, listed, pieces, starts, asked)

    def _pieces(self, words: tuple[str, ...]) -> tuple[list[list[int]], list[list[int]]]:
        """Ids of the pieces of each word: after another word, and at the start of a text."""
        if not words:
            return [], []
        if self._spaced:
            # As the tokenizer writes a word after a letter: with the space between them, in its own way.
            before = self._ids([LETTER])[0]
            after = self._ids([f"{LETTER} {word}" for word in words])
            starts = self._ids(words)
            for word, each in zip(words, after, strict=True):
                if each[: len(before)] != before:
                    raise ValueError(
                        f"tokenizer must not join words; {type(self.tokenizer).__name__} has one piece for "
                        f"{LETTER!r} and a part of {word[:40]!r} after it"
                    )
            return [each[len(before) :] for each in after], starts
        found: list[list[int]] = [[] for _ in words]
        coded = self.tokenizer(
            list(words), is_split_into_words=True, add_special_tokens=False, verbose=False
        )  # no warning of long texts, which are cut or read in windows
        for number, place in zip(coded["input_ids"], coded.word_ids(), strict=True):
            found[place].append(number)
        return found, found

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        rows = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [list(row) for row in rows]

    @cached_property
    def _spaced(self) -> bool:
        """Whether a word's pieces depend on the space before it, as those of byte-level tokenizers do.

        Such a tokenizer joins words that it is given one by one, and reads them as one long word.
        """
        written = self._ids([f"{LETTER} {LETTER}"])[0]
        try:
            coded = self.tokenizer([LETTER, LETTER], is_split_into_words=True, add_special_tokens=False)
        except (AssertionError, ValueError):  # some refuse to
            return True
        return list(coded["input_ids"]) != written

    def _specials(self, asked: bool) -> _Around:
        """What the tokenizer puts around a text, and around a text and a query."""
        if asked not in self._around:
            coded = self.tokenizer("a", "a") if asked else self.tokenizer("a")
            ids, owner = coded["input_ids"], coded.sequence_ids()
            types = coded.get("token_type_ids") or [0] * len(ids)
            text = [place for place, number in enumerate(owner) if number == 0]
            query = [place for place, number in enumerate(owner) if number == 1] or [len(ids), len(ids) - 1]
            before, between = slice(0, text[0]), slice(text[-1] + 1, query[0])
            after = slice(query[-1] + 1, None)
            own = types[query[0]] if asked else 0
            kinds = types[before], types[text[0]], types[between], own, types[after]
            self._around[asked] = _Around(ids[before], ids[between], ids[after], kinds)
        return self._around[asked]

    def code(self, text: Text, kept: NDArray[np.bool_] | None = None) -> Coded:
        """The model's arguments for a text without the words that are not kept."""
        arguments, places = self._coded(text, np.ones(len(text.words), bool) if kept is None else kept)
        return Coded({name: values.tolist() for name, values in arguments.items()}, places.tolist())

    def _coded(self, text: Text, kept: NDArray[np.bool_]) -> tuple[dict[str, Ints], Ints]:
        """As `code`, in arrays."""
        if self.windowed:
            return next(self._windows(text, kept[None]))
        ids, owners, _ = text.kept(kept)
        around = self._specials(bool(text.query))
        if not (len(ids) or around.before or around.between or around.after or text.query):
            around = around._replace(before=[self._nothing], types=([0], *around.types[1:]))
        asked = text.asked
        before, own, between, other, after = around.types
        tokens = np.concatenate([around.before, ids, around.between, asked, around.after]).astype(np.int64)
        types = [*before, *[own] * len(ids), *between, *[other] * len(asked), *after]
        if not len(tokens):  # nothing is around the words, and none is left: a model must read something
            tokens, types = np.array([self._nothing], dtype=np.int64), [own]
        arguments = {
            "input_ids": tokens,
            "attention_mask": np.ones_like(tokens),
            "token_type_ids": np.array(types, dtype=np.int64),
        }
        if "token_type_ids" not in self.tokenizer.model_input_names:
            del arguments["token_type_ids"]
        places = np.full(len(tokens), -1)
        places[len(around.before) : len(around.before) + len(ids)] = owners
        return arguments, places

    def _windows(self, text: Text, kept: NDArray[np.bool_]) -> Iterator[tuple[dict[str, Ints], Ints]]:
        """What `_coded` gives for each set of kept words, (sets, words), of a classifier with windows."""
        from overt.models.rationale import windowed

        config: Any = self.model.config
        special = self.tokenizer
        special_ids = special.cls_token_id, special.sep_token_id, special.pad_token_id
        end = [special.sep_token_id]
        asked, _, starts = _flat([end, *text.query, end] if text.query else [end])
        none = np.full(len(asked), -1)
        for row in kept:
            ids, owners, first = text.kept(row)
            *found, places = windowed(
                np.concatenate([ids, asked]),
                np.concatenate([first, starts]),
                np.concatenate([owners, none]),
                *special_ids,
                config.window,
            )
            yield dict(zip(("input_ids", "attention_mask", "words"), found, strict=True)), places

    def _rows(self, text: Text, kept: NDArray[np.bool_]) -> _Rows:
        """The arguments that `_coded` gives for each set of kept words, (sets, words), all at once."""
        if self.windowed:
            return _rows_of([arguments for arguments, _ in self._windows(text, kept)])
        around, (ids, _) = self._specials(bool(text.query)), text.ways
        before, own, between, other, after = around.types
        tokens = [*around.before, *ids, *around.between, *text.asked, *around.after]
        types = [*before, *[own] * len(ids), *between, *[other] * len(text.asked), *after]
        stays = np.ones((len(kept), len(tokens)), dtype=bool)
        stays[:, len(around.before) : len(around.before) + len(ids)] = text.stays(kept)
        if len(tokens) == len(ids):  # nothing is around the words: what stands where none is left
            tokens, types = [*tokens, self._nothing], [*types, own if text.query else 0]
            stays = np.column_stack([stays, ~stays.any(axis=1)])

        def laid(values: Sequence[int]) -> Ints:
            return np.broadcast_to(np.array(values, dtype=np.int64), stays.shape)[stays]

        arguments = {"input_ids": laid(tokens), "attention_mask": laid([1] * len(tokens))}
        if "token_type_ids" in self.tokenizer.model_input_names:
            arguments["token_type_ids"] = laid(types)
        return _Rows(stays.sum(axis=1), arguments)

    @property
    def _nothing(self) -> int:
        """The token that stands for a text without words, where a tokenizer puts nothing around texts."""
        special = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.pad)
        return next(number for number in special if number is not None)

    def batch(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Arguments of several texts, padded on the right, on the model's device."""
        return self._batch(_rows_of(rows), np.arange(len(rows)))

    def _batch(self, rows: _Rows, chosen: Ints) -> dict[str, Tensor]:
        """As `batch`, of the rows with these numbers."""
        device = device_of(self.model)
        empty = {"input_ids": self.pad}
        return {
            name: torch.from_numpy(rows.table(name, chosen, empty.get(name, 0))).to(device)
            for name in rows.values
        }

    @property
    def at_once(self) -> int:
        """Tokens of one pass."""
        on_gpu = device_of(self.model).type == "cuda"
        if self.windowed:
            return READ if on_gpu else READ_FEW
        return TOKENS if on_gpu else FEW

    @contextmanager
    def quickly(self) -> Iterator[nn.Module]:
        """The model, to read many texts at once without gradients, with products of the chosen type."""
        from overt.models.rationale import InParts, RationaleClassifier

        model, device = self.model, device_of(self.model).type
        cast = self.dtype is not None
        if isinstance(model, RationaleClassifier):
            model, cast = InParts(model, ENCODED if device == "cuda" else FEW, self.dtype), False
        with (
            torch.no_grad(),
            evaluating(model),
            any_shape(),
            torch.autocast(device, self.dtype, enabled=cast),
        ):
            yield model

    def probabilities(self, text: Text, kept: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Probabilities of the classes for each set of kept words, (sets, classes)."""
        return self.ask([(text, kept)])[0]

    def ask(
        self,
        asked: Sequence[tuple[Text, NDArray[np.bool_]]],
        told: Callable[[int, int], object] = lambda _done, _of: None,
    ) -> list[NDArray[np.float64]]:
        """Probabilities for texts with their sets of kept words, (sets, classes) for each.

        Sets of all texts are sorted by length and run together; equal sets of a text run once. A model that
        has `by_prefix` reads what several of them begin with once.

        Args:
            asked: texts, and boolean (sets, words).
            told: called after each pass with how many sets were run, and how many there are.
        """
        parts, places, count = list[_Rows](), list[Any](), 0
        for text, kept in asked:
            _, some, where = np.unique(
                np.packbits(kept, axis=1), axis=0, return_index=True, return_inverse=True
            )
            places.append(count + where.reshape(-1))
            parts.append(self._rows(text, kept[some]))
            count += len(some)
        rows = _joined(parts)
        link, answers, start = link_of(self.model.config, self.classes), list[Tensor](), 0
        with self.quickly() as model:
            order, ends = self._passes(rows)
            for end in ends:
                these = order[start:end]
                answers.append(linked(self._read(model, rows, these).double(), link))
                lengths = rows.lengths[these]
                if not self._checked and lengths.min() < lengths.max():
                    place = int(lengths.argmax() if self.prefixes else lengths.argmin())
                    alone = self._logits(model, self._batch(rows, these[place : place + 1])).double()
                    self._check(answers[-1][place], linked(alone, link)[0])
                told(end, count)
                start = end
        found = np.empty((count, self.classes))
        found[order] = torch.cat(answers).cpu().numpy()
        by_text = [found[where] for where in places]
        for (text, _), own in zip(asked, by_text, strict=True):
            if not np.isfinite(own).all():
                raise ValueError(f"text {text.name}: the model's probabilities are not finite")
        return by_text

    def _passes(self, rows: _Rows) -> tuple[Ints, list[int]]:
        """An order of the rows, and where each pass over rows in this order ends."""
        most, count = self.at_once, len(rows.lengths)
        if self.prefixes:
            table = rows.table("input_ids", np.arange(count), -1)
            order = np.lexsort(table.T[::-1])
            lengths = rows.lengths[order]
            same = (table[order][1:] == table[order][:-1]).cumprod(axis=1).sum(axis=1)
            new = lengths - np.concatenate([[0], np.minimum(same, lengths[1:])])
            passes = (np.maximum(new, lengths / CACHED).cumsum() - 1) // most
            return order, [*(np.flatnonzero(np.diff(passes)) + 1).tolist(), count]
        order = rows.lengths.argsort(kind="stable")
        lengths, ends = rows.lengths[order].tolist(), list[int]()
        while not ends or ends[-1] < count:
            # The longest of a batch decides its size, and comes last.
            start = ends[-1] if ends else 0
            end = start + 1
            while end < count and (end + 1 - start) * lengths[end] <= most:
                end += 1
            ends.append(end)
        return order, ends

    def _read(self, model: Any, rows: _Rows, these: Ints) -> Tensor:
        """The model's logits of some rows, (rows, classes)."""
        if not self.prefixes:
            return self._logits(model, self._batch(rows, these))
        arguments = self._batch(rows, these)
        found: Tensor = model.by_prefix(arguments["input_ids"], arguments["attention_mask"])
        return found

    def _logits(self, model: nn.Module, arguments: Mapping[str, Tensor]) -> Tensor:
        """The model's logits, (rows, classes)."""
        output = model(**arguments)
        logits = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
        if logits is None:
            raise ValueError(
                f"model must return logits, as a classifier does; {type(self.model).__name__} "
                f"returns {type(output).__name__}"
            )
        if logits.dim() != 2 or logits.shape[1] != self.classes:
            raise ValueError(
                f"model must return logits of shape (batch, {self.classes}), got {tuple(logits.shape)}"
            )
        found: Tensor = logits
        return found

    def _check(self, together: Tensor, alone: Tensor) -> None:
        """Refuse a model that reads a text otherwise beside others, which change as words are deleted.

        Args:
            together: probabilities of a text, padded, or with a beginning that was read for others too.
            alone: the same of the text alone.
        """
        difference = float((together - alone).abs().max())
        types = {parameter.dtype for parameter in self.model.parameters()} | {self.dtype}
        if difference > (ROUNDED if types & {torch.float16, torch.bfloat16} else READS_PADDING):
            if self.prefixes:
                raise ValueError(
                    "model must read the beginning of a text alike whatever follows, but probabilities "
                    f"differ by {difference:.2g} when it is read once for several texts"
                )
            pad = getattr(self.model.config, "pad_token_id", None)
            raise ValueError(
                f"model must not read padding, but probabilities of a text differ by {difference:.2g} when "
                f"it is padded: its config has pad_token_id {pad}, the tokenizer "
                f"{self.tokenizer.pad_token_id}"
            )
        self._checked = True
