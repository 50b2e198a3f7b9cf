"""What the local server serves, what it allows, and how it says no."""

from __future__ import annotations

import math
import threading
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from overt import _check

MIB = 2**20
CHARACTERS = 100  # per token allowed; longer texts are refused before anybody cuts them into tokens
NAME = 100  # characters of a model's name


class RefusedError(Exception):
    """An answer that is no trace: a status and one line that says why.

    Args:
        status: of the answer.
        line: what came and what would do.
        retry: seconds after which to ask again, where that may help.
        close: whether the rest of the request is not worth reading.
    """

    def __init__(self, status: int, line: str, retry: int | None = None, close: bool = False) -> None:
        super().__init__(line)
        self.status, self.line, self.retry, self.close = status, line, retry, close


class GoneError(Exception):
    """The client has left; nobody waits for an answer."""


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may cost.

    Attributes:
        text_bytes: the body of a request with text.
        image_bytes: the body of a request with an image.
        pixels: width × height of an image.
        tokens: of a text, and of what a decoder is fed.
        workers: traces at a time.
        queue: traces that wait for their turn; more are told that the server is busy.
        seconds: from a request to its answer.
        patience: seconds for a body, or a request's head, to arrive, and for a client to read on.
        finish: seconds for running work when the server stops.
        cache: answers that are kept, for the same request again and for links to images.
        cache_bytes: all of them together.
        held_bytes: bodies of all requests that are being read or wait.
        connections: open at a time.
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
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "float":
                _check.positive(one.name, value)
            else:
                _check.whole(one.name, value, 0 if one.name in ("cache", "cache_bytes", "queue") else 1)
        for name in ("text_bytes", "image_bytes"):
            if self.held_bytes < getattr(self, name):
                raise ValueError(
                    f"held_bytes must be at least {name}, {getattr(self, name)}, got {self.held_bytes}"
                )

    @property
    def characters(self) -> int:
        """Of a text."""
        return CHARACTERS * self.tokens


@dataclass(frozen=True, eq=False)
class Served:
    """A model that requests may name.

    Attributes:
        name: by which they do.
        model: in evaluation mode.
        tokenizer: of a model of texts; of an image model, where its decoder is to be fed.
        processor: of a model of images.
        kind: "text" or "image".
        layers: how many it has, where known.
        turn: held while the model is in use; its hooks, modes and tokenizer are no good for two at a time.
        secrets: strings that no answer may hold, such as the folder it came from → what stands for them.
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
        """Whether it has a decoder that can be fed a text."""
        pair = getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)
        return bool(pair) and self.tokenizer is not None

    def about(self) -> dict[str, Any]:
        """What the page has to know of it."""
        return {"name": self.name, "kind": self.kind, "decoder": self.decodes, "layers": self.layers}


def check_name(name: str) -> None:
    """Refuse names that a link or a list cannot show."""
    shown = all(unicodedata.category(letter)[0] != "C" for letter in name)
    if not name.strip() or len(name) > NAME or not shown or "/" in name or "\\" in name:
        raise ValueError(f"a model's name must be 1 to {NAME} letters without slashes, got {name[:NAME]!r}")


def whole_seconds(seconds: float) -> int:
    """Seconds for a Retry-After: whole, at least one, at most half a minute."""
    return max(1, min(30, math.ceil(seconds)))
