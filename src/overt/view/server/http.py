"""The server's side of ASGI: reading requests within limits, sending answers to slow clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from overt.view.server.limits import GoneError, Limits, RefusedError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PIECE = 2**16  # bytes sent before checking whether the client still reads
LINGER_BYTES, LINGER_SECONDS = 2**25, 2.0  # of a refused body to read and discard
FIELDS = 32  # of a query string


@dataclass(frozen=True)
class Answer:
    """An HTTP answer."""

    body: bytes
    kind: str = "application/json"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    close: bool = False


@dataclass(frozen=True)
class LineByLine:
    """An HTTP answer of lines of JSON, sent as they come.

    Attributes:
        first: the first line. A refusal before it has a status of its own.
        rest: the others. A refusal among them is the last line, with its status.
    """

    first: bytes
    rest: AsyncGenerator[bytes, None]
    kind: str = "application/x-ndjson"


def json_answer(value: Any, status: int = 200, **headers: str) -> Answer:
    """A JSON answer."""
    body = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Answer(body.encode(), status=status, headers=headers)


def refusal(error: RefusedError) -> Answer:
    """A JSON answer with one line, `error`."""
    headers = {} if error.retry is None else {"Retry-After": str(error.retry)}
    body = json.dumps({"error": " ".join(error.line.split())}).encode()
    return Answer(body, status=error.status, headers=headers, close=error.close)


class HttpRequest:
    """One request."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.scope, self.receive = scope, receive
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        # A header that came twice is ambiguous; joined, it fails every check.
        self.headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    @property
    def kind(self) -> str:
        """The media type of its body, without parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def query(self) -> dict[str, str]:
        """The query string; a field that comes twice is refused."""
        raw = self.scope.get("query_string", b"").decode("latin-1")
        try:
            pairs = parse_qsl(
                raw, keep_blank_values=True, encoding="utf-8", errors="strict", max_num_fields=FIELDS
            )
        except ValueError:
            raise RefusedError(400, f"the query string must be UTF-8 with at most {FIELDS} fields") from None
        if len({name for name, _ in pairs}) < len(pairs):
            raise RefusedError(400, "a field of the query string came twice")
        return dict(pairs)

    async def left(self) -> None:
        """Return when the client has disconnected."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


class Bodies:
    """Reads bodies of requests, each within its own limit and all within a common one."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held = 0
        self.stopping = False
        self._clocks: set[asyncio.Timeout] = set()

    @contextmanager
    def _hold(self) -> Iterator[Callable[[int], None]]:
        mine = 0

        def more(count: int) -> None:
            nonlocal mine
            if self.held + count > self.limits.held_bytes:
                raise RefusedError(503, "busy: other requests are being read, try again in a moment", 2, True)
            self.held += count
            mine += count

        try:
            yield more
        finally:
            self.held -= mine

    @contextmanager
    def reading(self, request: HttpRequest, most: int) -> Iterator[Callable[[], Awaitable[bytes]]]:
        """A function that reads the body, which counts as held until the end of the context.

        Args:
            request: the request.
            most: limit in bytes.
        """
        too_much = f"the body must have at most {most:,} bytes"
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and (len(declared) > 18 or int(declared) > most):
            raise RefusedError(413, f"{too_much}, got {declared[:24]}", close=True)

        async def read() -> bytes:
            parts: list[bytes] = []
            size = 0
            # The declared length may be wrong or missing; the bytes received count.
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise GoneError
                piece = message.get("body", b"")
                size += len(piece)
                if size > most:
                    raise RefusedError(413, f"{too_much}, got more", close=True)
                more(len(piece))
                parts.append(piece)
                if not message.get("more_body", False):
                    return b"".join(parts)

        async def in_time() -> bytes:
            try:
                async with asyncio.timeout(self.limits.patience) as clock:
                    self._clocks.add(clock)
                    try:
                        return await read()
                    finally:
                        self._clocks.discard(clock)
            except TimeoutError:
                if self.stopping:
                    raise RefusedError(503, "the server is shutting down", 5, True) from None
                line = f"the body did not arrive within {self.limits.patience:g} s"
                raise RefusedError(408, line, close=True) from None

        with self._hold() as more:
            yield in_time

    def stop(self) -> None:
        """Stop waiting for bodies."""
        self.stopping = True
        now = asyncio.get_running_loop().time()
        for clock in list(self._clocks):
            clock.reschedule(now)


async def send(answer: Answer, request: HttpRequest, send: Send, linger: float = LINGER_SECONDS) -> None:
    """Send an answer in pieces; if it refuses a body, discard the rest of that body.

    A connection that is closed with unread bytes is reset, and the client would never see the answer.

    Args:
        answer: what to send.
        request: the request that it answers.
        send: ASGI's send.
        linger: seconds to keep reading.
    """
    headers = {"Content-Type": answer.kind, "Content-Length": str(len(answer.body)), **answer.headers}
    if answer.close:
        headers["Connection"] = "close"
    raw = [(name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    for start in range(0, len(answer.body), PIECE):
        piece = answer.body[start : start + PIECE]
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if answer.close:
        await _drain(request.receive, linger)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_lines(answer: LineByLine, send: Send) -> None:
    """Send lines as they come.

    Args:
        answer: what to send.
        send: ASGI's send.
    """
    headers = [(b"content-type", answer.kind.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer.first + b"\n", "more_body": True})
    try:
        async for line in answer.rest:
            for start in range(0, len(line), PIECE):
                piece = line[start : start + PIECE]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"\n", "more_body": True})
    except RefusedError as error:
        line = json.dumps({"error": " ".join(error.line.split()), "status": error.status}).encode()
        await send({"type": "http.response.body", "body": line + b"\n", "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _drain(receive: Receive, seconds: float) -> None:
    read = 0
    try:
        async with asyncio.timeout(seconds):
            while read < LINGER_BYTES:
                message = await receive()
                read += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
