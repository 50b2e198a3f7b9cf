"""A classifier of texts as a function of their words, of which any may be deleted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from overt._modes import evaluating
from overt._predictions import link_of, linked

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOKENS = 2**16  # of one pass


class Text(NamedTuple):
    """A text as a classifier sees it.

    Attributes:
        name: for errors.
        words: those that it sees.
        pieces: ids of the pieces of each word.
        query: the same for each word of what is asked of the text, which is never deleted.
        cut: how many words at the end the classifier does not see, being too long for it.
    """

    name: str
    words: tuple[str, ...]
    pieces: list[list[int]]
    query: list[list[int]]
    cut: int = 0


class Coded(NamedTuple):
    """Arguments of a classifier for one text, and the word that each token belongs to (−1: none)."""

    arguments: dict[str, list[int]]
    places: list[int]


class _Around(NamedTuple):
    """Special tokens around text and query, with the types of all parts."""

    before: list[int]
    between: list[int]
    after: list[int]
    types: tuple[list[int], int, list[int], int, list[int]]


class WordClassifier:
    """A classifier with its tokenizer.

    Words are tokenized one by one, so that a text with some words deleted is tokenized as if it had been
    written without them.

    Args:
        model: a Hugging Face classifier of sequences, or a `RationaleClassifier`.
        tokenizer: its tokenizer, a fast one.
    """

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        from overt.models.rationale import RationaleClassifier

        self.model, self.tokenizer = model, tokenizer
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
        if tokenizer.pad_token_id is None:
            raise ValueError(f"tokenizer must have a token for padding; {type(tokenizer).__name__} has none")
        self.classes = classes
        self.windowed: bool = isinstance(model, RationaleClassifier)
        if self.windowed and None in (tokenizer.cls_token_id, tokenizer.sep_token_id):
            raise ValueError("tokenizer must have tokens for the start and the end of a window")
        self._around: dict[bool, _Around] = {}

    @property
    def longest(self) -> int | None:
        """Tokens that the model takes; None if there is no limit."""
        if self.windowed:
            return None
        config: Any = self.model.config
        limits = [getattr(config, "max_position_embeddings", None), self.tokenizer.model_max_length]
        known = [int(limit) for limit in limits if limit is not None and 0 < limit < 10**6]
        return min(known) if known else None

    def read(self, words: str | Sequence[str], query: str = "", name: str = "0") -> Text:
        """A text, with the words at its end that do not fit cut off."""
        listed = tuple(words.split() if isinstance(words, str) else words)
        if not listed or not all(isinstance(word, str) and word.strip() for word in listed):
            raise ValueError(f"text {name}: must have words, got {str(words)[:60]!r}")
        pieces, asked = self._pieces(listed), self._pieces(tuple(query.split()))
        limit = self.longest
        if limit is not None:
            around = self._specials(bool(asked))
            rest = limit - len(around.before) - len(around.between) - len(around.after)
            rest -= sum(map(len, asked))
            fits = int((np.cumsum([len(each) for each in pieces]) <= rest).sum())
            if fits == 0:
                raise ValueError(f"text {name}: its query leaves no room for words in {limit} tokens")
            return Text(name, listed[:fits], pieces[:fits], asked, len(listed) - fits)
        return Text(name, listed, pieces, asked)

    def _pieces(self, words: tuple[str, ...]) -> list[list[int]]:
        """Ids of the pieces of each word."""
        if not words:
            return []
        found: list[list[int]] = [[] for _ in words]
        try:
            coded = self.tokenizer(
                list(words), is_split_into_words=True, add_special_tokens=False, verbose=False
            )  # no warning of long texts, which are cut or read in windows
        except (AssertionError, ValueError):  # a byte-level tokenizer without add_prefix_space
            rows = self.tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"]
            return [list(row) for row in rows]
        for number, place in zip(coded["input_ids"], coded.word_ids(), strict=True):
            found[place].append(number)
        return found

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
        places = np.arange(len(text.words)) if kept is None else np.flatnonzero(kept)
        document = [text.pieces[place] for place in places]
        owners = [place for place, pieces in zip(places.tolist(), document, strict=True) for _ in pieces]
        if self.windowed:
            from overt.models.rationale import windows_of

            config: Any = self.model.config
            ids = self.tokenizer
            found = windows_of(
                document,
                text.query,
                start=ids.cls_token_id,
                end=ids.sep_token_id,
                pad=ids.pad_token_id,
                window=config.window,
            )
            named = found._asdict()
            where = [-1 if place < 0 else int(places[place]) for place in named.pop("places")]
            return Coded(named, where)
        around = self._specials(bool(text.query))
        middle = [number for pieces in document for number in pieces]
        asked = [number for pieces in text.query for number in pieces]
        tokens = [*around.before, *middle, *around.between, *asked, *around.after]
        first, own, second, other, last = around.types
        types = [*first, *[own] * len(middle), *second, *[other] * len(asked), *last]
        gap = [-1] * (len(around.between) + len(asked) + len(around.after))
        arguments = {"input_ids": tokens, "attention_mask": [1] * len(tokens), "token_type_ids": types}
        if "token_type_ids" not in self.tokenizer.model_input_names:
            del arguments["token_type_ids"]
        return Coded(arguments, [*[-1] * len(around.before), *owners, *gap])

    def batch(self, rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        """Arguments of several texts, padded on the right, on the model's device."""
        fills = {"input_ids": self.tokenizer.pad_token_id}
        longest = max(len(row["input_ids"]) for row in rows)
        device = next(self.model.parameters()).device
        found = {}
        for name in rows[0]:
            table = np.full((len(rows), longest), fills.get(name, 0), np.int64)
            for place, row in enumerate(rows):
                table[place, : len(row[name])] = row[name]
            found[name] = torch.from_numpy(table).to(device)
        return found

    @torch.no_grad()
    def probabilities(self, text: Text, kept: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Probabilities of the classes for each set of kept words, (sets, classes)."""
        rows = [self.code(text, each).arguments for each in kept]
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]["input_ids"]))
        found = np.empty((len(rows), self.classes))
        start = 0
        with evaluating(self.model):
            while start < len(order):
                # The longest of a batch decides its size, and comes last.
                end = start + 1
                while end < len(order) and (end + 1 - start) * len(rows[order[end]]["input_ids"]) <= TOKENS:
                    end += 1
                places = order[start:end]
                logits = self.model(**self.batch([rows[place] for place in places])).logits
                if logits.dim() != 2 or logits.shape[1] != self.classes:
                    raise ValueError(
                        f"model must return logits of shape (batch, {self.classes}), "
                        f"got {tuple(logits.shape)}"
                    )
                link = link_of(self.model.config, self.classes)
                found[places] = linked(logits.double(), link).cpu().numpy()
                start = end
        if not np.isfinite(found).all():
            raise ValueError(f"text {text.name}: the model's probabilities are not finite")
        return found
