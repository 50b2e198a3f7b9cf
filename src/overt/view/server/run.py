"""The application behind uvicorn: slow clients are disconnected, and the shutdown is orderly."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from typing import TYPE_CHECKING, Any

from overt._extras import need
from overt.view.server.http import refusal
from overt.view.server.limits import Limits, RefusedError
from overt.view.server.page import HEADERS, NOTHING

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from uvicorn import Server

KEEP_ALIVE = 5  # seconds


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens on a host and port; a one-line error if that is not possible."""
    where = f"--host {host} --port {port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise OSError(f"{where} is not an address of this machine ({error})") from None
    listening = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(512)
    except OSError as error:
        listening.close()
        line = (error.strerror or str(error)).lower()
        raise OSError(f"cannot listen on {where} ({line}): choose another") from None
    listening.setblocking(False)
    return listening


def address_of(listening: socket.socket) -> str:
    """The address to open in a browser on this machine."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def server(application: Starlette, limits: Limits) -> Server:
    """A uvicorn server; `server(…).run([bound(host, port)])` serves until SIGTERM or Ctrl-C, and returns."""
    need("uvicorn", "view")
    import uvicorn

    class Orderly(uvicorn.Server):
        def handle_exit(self, sig: int, frame: Any) -> None:
            # uvicorn's own handler raises the signal again at the end, which would look like a crash.
            del sig, frame
            if self.should_exit:
                self.force_exit = True
            self.should_exit = True

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            application.state.serving.stop()
            await super().shutdown(sockets)

    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors logged here are caused by clients
    config = uvicorn.Config(
        application,
        http=_protocol(limits),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,  # addresses contain what people typed
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=max(1, round(limits.finish)),
    )
    return Orderly(config)


def _protocol(limits: Limits) -> Any:
    """uvicorn's protocol, with timeouts for clients that send or read slowly, and a limit of connections."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class PatienceTimer:
        handle: asyncio.TimerHandle | None = None

        def start(self, protocol: H11Protocol) -> None:
            if self.handle is None:
                self.handle = protocol.loop.call_later(limits.patience, protocol.transport.abort)

        def stop(self) -> None:
            if self.handle is not None:
                self.handle.cancel()
                self.handle = None

    class Impatient(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self.head, self.writing = PatienceTimer(), PatienceTimer()
            if len(self.connections) >= limits.connections:
                self.app = _busy
            super().connection_made(transport)
            self.head.start(self)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # The head of a request must be complete in time; its body has a separate timeout.
            if self.conn.their_state is h11.IDLE:
                self.head.start(self)
            else:
                self.head.stop()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            # A closing transport waits for its last bytes to be read, however long that takes.
            if self.transport.is_closing():
                self.writing.start(self)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self.writing.start(self)

        def pause_writing(self) -> None:
            super().pause_writing()
            self.writing.start(self)

        def resume_writing(self) -> None:
            super().resume_writing()
            self.writing.stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self.head.stop()
            self.writing.stop()
            super().connection_lost(exc)

    return Impatient


async def _busy(scope: Any, receive: Any, send: Any) -> None:
    """The answer to connections beyond the limit."""
    del scope, receive
    answer = refusal(RefusedError(503, "busy: too many connections, try again in a moment", 2))
    headers = {
        **HEADERS,
        **answer.headers,
        "Content-Security-Policy": NOTHING,
        "Content-Type": answer.kind,
        "Content-Length": str(len(answer.body)),
        "Connection": "close",
    }
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": raw})
    await send({"type": "http.response.body", "body": answer.body})
