"""A local server: one types a sentence, or drops an image, and sees the trace. `app` makes it.

A request names one of the models that were given at start, and nothing else: no path, no address, no code.
Pages from elsewhere cannot read its answers, and what is sent is held to `Limits`.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from overt._extras import need
from overt.tracing.methods.method import methods
from overt.tracing.mixing.mixing import mixings
from overt.view.index import method_entry
from overt.view.server.asks import FORMATS, Ask, from_image, from_json, made, picture_key
from overt.view.server.http import (
    LINGER_SECONDS,
    Answer,
    Bodies,
    HttpRequest,
    Message,
    Receive,
    Scope,
    Send,
    refusal,
    said,
    send,
)
from overt.view.server.limits import GoneError, Limits, RefusedError, Served
from overt.view.server.metrics import TYPE, Metrics
from overt.view.server.page import HEADERS, NOTHING, shell
from overt.view.server.work import Work

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["LOCAL", "Limits", "Served", "Serving", "app", "is_loopback"]

log = logging.getLogger("overt.server")
LOCAL = ("localhost", "127.0.0.1", "::1")
Handler = Callable[[HttpRequest], Awaitable[Answer]]


class Serving:
    """What the server knows and does; `app` puts it behind addresses.

    Args:
        models: by name.
        limits: of requests.
        threads: of torch in each worker; None leaves them as they are.
    """

    def __init__(self, models: Mapping[str, Served], limits: Limits, threads: int | None = None) -> None:
        for name, served in models.items():
            if name != served.name:
                raise ValueError(f"models must be keyed by their names, got {name!r} for {served.name!r}")
        if not models:
            raise ValueError("models must hold at least one model, got none")
        self.models, self.limits = dict(models), limits
        self.metrics = Metrics()
        self.bodies = Bodies(limits)
        self.work = Work(limits, self.metrics, _with_threads(threads))
        self.shell = shell()
        self.began = time.monotonic()
        self.stopping = False

    def stop(self) -> None:
        """Begin to end: what runs is finished, what waits is told, nothing new is taken."""
        self.stopping = True
        self.bodies.stop()
        self.work.stop()

    async def front(self, asked: HttpRequest) -> Answer:
        """GET /"""
        del asked
        headers = {"Content-Security-Policy": self.shell.policy}
        return Answer(self.shell.body, "text/html; charset=utf-8", headers=headers)

    async def list_models(self, asked: HttpRequest) -> Answer:
        """GET /api/models"""
        del asked
        limits = {
            "tokens": self.limits.tokens,
            "characters": self.limits.characters,
            "image_bytes": self.limits.image_bytes,
            "pixels": self.limits.pixels,
        }
        models = [served.about() for served in self.models.values()]
        about = {
            "models": models,
            "methods": [method_entry(one) for one in methods().values()],
            "mixings": [
                {"name": name, "title": one.title, "passes": one.passes, "cost": one.cost}
                for name, one in mixings().items()
            ],
            "images": list(FORMATS),
            "limits": limits,
        }
        return said(about)

    async def health(self, asked: HttpRequest) -> Answer:
        """GET /health"""
        del asked
        facts = {
            "status": "stopping" if self.stopping else "ok",
            "models": len(self.models),
            "waiting": self.work.waiting,
            "running": self.work.running,
            "uptime": round(time.monotonic() - self.began, 1),
        }
        return said(facts, 503 if self.stopping else 200)

    async def show_metrics(self, asked: HttpRequest) -> Answer:
        """GET /metrics"""
        del asked
        text = self.metrics.text(
            {
                "in_progress": (self.metrics.in_progress, "Requests being answered."),
                "queue": (self.work.waiting, "Traces that wait for their turn."),
                "running": (self.work.running, "Traces being made."),
                "cache_entries": (len(self.work.cache), "Answers kept."),
                "cache_bytes": (self.work.cache.size, "Bytes of the answers kept."),
                "held_bytes": (self.bodies.held, "Bytes of requests being read or waiting."),
            }
        )
        return Answer(text.encode(), TYPE)

    async def picture(self, asked: HttpRequest) -> Answer:
        """GET /api/picture?name=…, the answer to an image that somebody sent before."""
        kept = self.work.cache.get(picture_key(asked.query().get("name", "")))
        if kept is None:
            line = "this picture is no longer kept: the server keeps what was asked last, until it is stopped"
            raise RefusedError(404, f"{line}; drop the image again")
        return Answer(kept)

    async def trace(self, asked: HttpRequest) -> Answer:
        """POST /api/trace"""
        _check_origin(asked)
        if self.stopping:
            raise RefusedError(503, "the server is shutting down", 5, close=True)
        image = asked.kind in FORMATS
        if not image and asked.kind != "application/json":
            allowed = ", ".join(("application/json", *FORMATS))
            raise RefusedError(415, f"Content-Type must be one of {allowed}", close=True)
        most = self.limits.image_bytes if image else self.limits.text_bytes
        with self.bodies.reading(asked, most) as read:
            body = await read()
            if image:
                ask = from_image(body, asked.kind, asked.query(), self.models, self.limits)
            else:
                ask = from_json(body, self.models, self.limits)
            del body
            return Answer(await self._answer(ask, asked))

    async def _answer(self, ask: Ask, asked: HttpRequest) -> bytes:
        limits = self.limits
        return await self.work.result(ask.key(), lambda wanted: made(ask, limits, wanted), asked.left)


def app(
    models: Mapping[str, Served],
    limits: Limits | None = None,
    *,
    hosts: Collection[str] | None = LOCAL,
    addresses: bool = False,
    threads: int | None = None,
) -> Starlette:
    """The application, for any ASGI server. `app(…).state.serving.stop()` begins its end.

    Args:
        models: name → model, the only ones that requests can reach.
        limits: of requests; the usual ones where None.
        hosts: names that a request's Host header may have, so that no page from elsewhere can reach a server
            on this machine under a name of its own; None for any.
        addresses: whether a Host in numbers will do as well: no page from elsewhere has that for its name.
        threads: of torch in each worker.
    """
    need("starlette", "view")
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import Route

    serving = Serving(models, Limits() if limits is None else limits, threads)
    routes: list[tuple[str, str, Handler]] = [
        ("/", "GET", serving.front),
        ("/api/models", "GET", serving.list_models),
        ("/api/picture", "GET", serving.picture),
        ("/api/trace", "POST", serving.trace),
        ("/health", "GET", serving.health),
        ("/metrics", "GET", serving.show_metrics),
    ]
    made = Starlette(
        routes=[Route(path, _Endpoint(handler), methods=[method]) for path, method, handler in routes],
        middleware=[
            Middleware(
                _Guard,
                serving=serving,
                hosts=hosts,
                addresses=addresses,
                routes=frozenset(path for path, *_ in routes),
            )
        ],
        # Starlette's own words are plain text; ours are JSON, and the guard says them.
        exception_handlers={HTTPException: _no_route},
    )
    made.router.redirect_slashes = False  # an address that is not there is not there
    made.state.serving = serving
    return made


class _Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, sending: Send) -> None:
        asked = HttpRequest(scope, receive)
        await send(await self.handler(asked), asked, sending)


def _no_route(request: Any, error: Any) -> Any:
    lines = {404: "there is nothing at this address", 405: f"{request.method[:10]!a} is not done here"}
    raise RefusedError(error.status_code, lines.get(error.status_code, "this cannot be done"), close=True)


class _Guard:
    """Around everything: who may ask, headers of every answer, counts, and no traceback for anybody."""

    def __init__(
        self,
        app: Any,
        serving: Serving,
        hosts: Collection[str] | None,
        addresses: bool,
        routes: frozenset[str],
    ) -> None:
        self.app, self.serving, self.addresses, self.routes = app, serving, addresses, routes
        self.hosts = None if hosts is None else frozenset(host.strip("[]").lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, sending: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, sending)
            return
        asked, metrics = HttpRequest(scope, receive), self.serving.metrics
        began, status = time.monotonic(), 0

        async def with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name for name, _ in message["headers"]}
                extra = {"Content-Security-Policy": NOTHING, **HEADERS}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (k.lower().encode(), v.encode())
                        for k, v in extra.items()
                        if k.lower().encode() not in given
                    ),
                ]
            await sending(message)

        metrics.in_progress += 1
        try:
            try:
                self._check_host(asked)
                await self.app(scope, receive, with_headers)
            except RefusedError as error:
                linger = min(LINGER_SECONDS, self.serving.limits.patience)
                await send(refusal(error), asked, with_headers, linger)
            except GoneError:
                status = 499
            except Exception:
                log.exception("a request failed")
                if status:
                    raise
                await send(
                    refusal(RefusedError(500, "the server failed; its log says why")), asked, with_headers
                )
        finally:
            metrics.in_progress -= 1
            route = asked.path if asked.path in self.routes else "other"
            metrics.done(route, status or 499, time.monotonic() - began)

    def _check_host(self, asked: HttpRequest) -> None:
        if self.hosts is None:
            return
        host = host_of(asked.headers.get("host", ""))
        if host not in self.hosts and not (self.addresses and _is_address(host)):
            line = "this server answers to its own names only, not to the Host of this request"
            raise RefusedError(403, line, close=True)


def host_of(header: str) -> str | None:
    """The name in a Host header, without its port; None where it is none."""
    try:
        parts = urlsplit(f"//{header}")
        port = parts.port  # raises where it is no number
    except ValueError:
        return None
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    # What was read must be all there was: no user, no path, nothing after it.
    whole = header.lower() in (shown, f"{shown}:{port}")
    return host if whole else None


def _is_address(host: str | None) -> bool:
    try:
        return bool(ipaddress.ip_address(host or ""))
    except ValueError:
        return False


def _check_origin(asked: HttpRequest) -> None:
    """Refuse what a page from elsewhere makes a browser send."""
    site, origin = asked.headers.get("sec-fetch-site"), asked.headers.get("origin")
    elsewhere = site is not None and site not in ("same-origin", "none")
    if origin is not None:
        scheme, _, place = origin.partition("://")
        elsewhere |= scheme not in ("http", "https") or place != asked.headers.get("host")
    if elsewhere:
        raise RefusedError(403, "requests from pages of other origins are not answered", close=True)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _with_threads(count: int | None) -> Callable[[], None]:
    def prepare() -> None:
        if count is not None:
            import torch

            torch.set_num_threads(count)

    return prepare
