"""What the local server serves, its limits, and how it refuses requests."""

from __future__ import annotations

import math
import threading
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from overt import _check
from overt.tracing.inputs import is_pair

MIB = 2**20
CHARACTERS = 100  # per allowed token; longer texts are refused before they are tokenized
NAME = 100  # characters of a model's name


class RefusedError(Exception):
    """A request is refused: a status and one line that says why.

    Args:
        status: of the answer.
        line: what was sent and what would be accepted.
        retry: seconds after which to try again, if that may help.
        close: whether to leave the rest of the request unread.
    """

    def __init__(self, status: int, line: str, retry: int | None = None, close: bool = False) -> None:
        super().__init__(line)
        self.status, self.line, self.retry, self.close = status, line, retry, close


class GoneError(Exception):
    """The client has disconnected; no one waits for an answer."""


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may cost.

    Attributes:
        text_bytes: size of the body of a request with text.
        image_bytes: size of the body of a request with an image.
        pixels: width × height of an image.
        tokens: of a text, and of the decoder's input.
        workers: traces computed at the same time.
        queue: traces waiting; further requests are refused because the server is busy.
        seconds: from a request to its answer.
        patience: seconds for a body or a request's head to arrive, and for a client to continue reading.
        finish: seconds for running work when the server stops.
        cache: number of cached answers, for repeated requests and for links to images.
        cache_bytes: total size of the cached answers.
        held_bytes: total size of the bodies of requests being read or waiting.
        connections: open at the same time.
    """

    text_bytes: int = 2 * MIB
    image_bytes: int = 8 * MIB
    pixels: int = 25_000_000
    tokens: int = 256
    workers: int = 1
    queue: int = 64
    seconds: float = 60.0
    patience: float = 15.0
    finish: float = 10.0
    cache: int = 64
    cache_bytes: int = 256 * MIB
    held_bytes: int = 128 * MIB
    connections: int = 512

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if limit.type == "float":
                _check.positive(limit.name, value)
            else:
                _check.whole(limit.name, value, 0 if limit.name in ("cache", "cache_bytes", "queue") else 1)
        for name in ("text_bytes", "image_bytes"):
            if self.held_bytes < getattr(self, name):
                raise ValueError(
                    f"held_bytes must be at least {name}, {getattr(self, name)}, got {self.held_bytes}"
                )

    @property
    def characters(self) -> int:
        """Limit of characters in a text."""
        return CHARACTERS * self.tokens


@dataclass(frozen=True, eq=False)
class Served:
    """A model that requests may name.

    Attributes:
        name: its name in requests.
        model: in evaluation mode.
        tokenizer: for a text model; for an image model, if its decoder takes a text.
        processor: for an image model.
        kind: "text" or "image".
        layers: number of layers, if known.
        turn: held while the model is in use; its hooks, modes and tokenizer do not support two users at once.
        secrets: strings that no answer may contain, such as the folder of the model → their replacements.
    """

    name: str
    model: Any = field(repr=False)
    tokenizer: Any = field(default=None, repr=False)
    processor: Any = field(default=None, repr=False)
    kind: Literal["text", "image"] = "text"
    layers: int | None = None
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        check_name(self.name)
        _check.one_of("kind", self.kind, ("text", "image"))
        missing = "tokenizer" if self.kind == "text" else "processor"
        if getattr(self, missing) is None:
            raise ValueError(f"model {self.name!r} of kind {self.kind!r} needs its {missing}")

    @property
    def decodes(self) -> bool:
        """Whether it has a decoder that takes a text."""
        return is_pair(self.model) and self.tokenizer is not None

    @cached_property
    def writes(self) -> bool:
        """Whether it is a language model that can write after a text."""
        from overt.tracing.generation import check_generates

        if self.kind != "text" or is_pair(self.model):
            return False
        try:
            check_generates(self.model)
        except ValueError:
            return False
        return True

    @cached_property
    def judges(self) -> bool:
        """Whether it is a classifier of texts, whose explanations can be judged."""
        from overt.judge.rationales.words import WordClassifier
        from overt.view.judging import has_head

        if self.kind != "text" or not has_head(self.model):
            return False
        try:
            WordClassifier(self.model, self.tokenizer)
        except ValueError:
            return False
        return True

    def about(self) -> dict[str, Any]:
        """What the page needs to know about it."""
        facts = {"kind": self.kind, "decoder": self.decodes, "judges": self.judges, "layers": self.layers}
        return {"name": self.name, **facts, "writes": self.writes}


def check_name(name: str) -> None:
    """Refuse names that a link or a list cannot show."""
    shown = all(unicodedata.category(letter)[0] != "C" for letter in name)
    if not name.strip() or len(name) > NAME or not shown or "/" in name or "\\" in name:
        raise ValueError(
            f"a model's name must be 1 to {NAME} characters without slashes, got {name[:NAME]!r}"
        )


def whole_seconds(seconds: float) -> int:
    """Seconds for a Retry-After: whole, at least one, at most half a minute."""
    return max(1, min(30, math.ceil(seconds)))
