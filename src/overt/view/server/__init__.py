"""A local server: type a sentence, or drop an image, and see the trace. `app` makes it.

A request names one of the models given at start, and nothing else: no path, no address, no code. Pages from
other origins cannot read its answers, and requests are limited by `Limits`.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from overt._extras import need
from overt.tracing.methods.method import methods
from overt.tracing.mixing.mixing import mixings
from overt.view.index import method_entry
from overt.view.server.http import (
    LINGER_SECONDS,
    Answer,
    Bodies,
    HttpRequest,
    LineByLine,
    Message,
    Receive,
    Scope,
    Send,
    json_answer,
    refusal,
    send,
    send_lines,
)
from overt.view.server.judge_request import judge_answer, judge_from_json
from overt.view.server.limits import GoneError, Limits, RefusedError, Served
from overt.view.server.metrics import TYPE, Metrics
from overt.view.server.page import HEADERS, NOTHING, shell
from overt.view.server.trace_request import (
    FORMATS,
    TraceRequest,
    from_image,
    from_json,
    picture_key,
    trace_answer,
)
from overt.view.server.work import Work

if TYPE_CHECKING:
    from starlette.applications import Starlette

__all__ = ["LOCAL", "Limits", "Served", "Serving", "app", "is_loopback"]

log = logging.getLogger("overt.server")
LOCAL = ("localhost", "127.0.0.1", "::1")
Handler = Callable[[HttpRequest], Awaitable[Answer | LineByLine]]


class Serving:
    """The server's state and handlers; `app` adds the routes.

    Args:
        models: by name.
        limits: limits of requests.
        threads: of torch in each worker; None leaves the number as it is.
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
        """Begin to shut down: finish running work, refuse waiting and new requests."""
        self.stopping = True
        self.bodies.stop()
        self.work.stop()

    async def front(self, request: HttpRequest) -> Answer:
        """GET /"""
        del request
        headers = {"Content-Security-Policy": self.shell.policy}
        return Answer(self.shell.body, "text/html; charset=utf-8", headers=headers)

    async def list_models(self, request: HttpRequest) -> Answer:
        """GET /api/models"""
        del request
        limits = {
            "tokens": self.limits.tokens,
            "characters": self.limits.characters,
            "image_bytes": self.limits.image_bytes,
            "pixels": self.limits.pixels,
        }
        models = [served.about() for served in self.models.values()]
        about = {
            "models": models,
            "methods": [method_entry(method) for method in methods().values()],
            "mixings": [
                {"name": name, "title": mixing.title, "passes": mixing.passes, "cost": mixing.cost}
                for name, mixing in mixings().items()
            ],
            "images": list(FORMATS),
            "limits": limits,
        }
        return json_answer(about)

    async def health(self, request: HttpRequest) -> Answer:
        """GET /health"""
        del request
        facts = {
            "status": "stopping" if self.stopping else "ok",
            "models": len(self.models),
            "waiting": self.work.waiting,
            "running": self.work.running,
            "uptime": round(time.monotonic() - self.began, 1),
        }
        return json_answer(facts, 503 if self.stopping else 200)

    async def show_metrics(self, request: HttpRequest) -> Answer:
        """GET /metrics"""
        del request
        text = self.metrics.text(
            {
                "in_progress": (self.metrics.in_progress, "Requests being answered."),
                "queue": (self.work.waiting, "Traces waiting in the queue."),
                "running": (self.work.running, "Traces being computed."),
                "cache_entries": (len(self.work.cache), "Cached answers."),
                "cache_bytes": (self.work.cache.size, "Bytes of cached answers."),
                "held_bytes": (self.bodies.held, "Bytes of requests being read or waiting."),
            }
        )
        return Answer(text.encode(), TYPE)

    async def picture(self, request: HttpRequest) -> Answer:
        """GET /api/picture?name=…: the answer for an image that was sent earlier."""
        answer = self.work.cache.get(picture_key(request.query().get("name", "")))
        if answer is None:
            line = "this picture is no longer cached: the server keeps recent answers until it is stopped"
            raise RefusedError(404, f"{line}; drop the image again")
        return Answer(answer)

    async def trace(self, request: HttpRequest) -> Answer | LineByLine:
        """POST /api/trace

        With `generate`, the answer comes line by line: the prompt, each word as it is written, the trace.
        """
        _check_origin(request)
        if self.stopping:
            raise RefusedError(503, "the server is shutting down", 5, close=True)
        image = request.kind in FORMATS
        if not image and request.kind != "application/json":
            allowed = ", ".join(("application/json", *FORMATS))
            raise RefusedError(415, f"Content-Type must be one of {allowed}", close=True)
        most = self.limits.image_bytes if image else self.limits.text_bytes
        with self.bodies.reading(request, most) as read:
            body = await read()
            if image:
                trace_request = from_image(body, request.kind, request.query(), self.models, self.limits)
            else:
                trace_request = from_json(body, self.models, self.limits)
            del body
            if trace_request.generate is None:
                return Answer(await self._answer(trace_request, request))
            return await self._lines(trace_request, request)

    async def judge(self, request: HttpRequest) -> Answer:
        """POST /api/judge"""
        _check_origin(request)
        if self.stopping:
            raise RefusedError(503, "the server is shutting down", 5, close=True)
        if request.kind != "application/json":
            raise RefusedError(415, "Content-Type must be application/json", close=True)
        limits = self.limits
        with self.bodies.reading(request, limits.text_bytes) as read:
            asked = judge_from_json(await read(), self.models, limits)
            answer = await self.work.result(
                asked.key(), lambda wanted: judge_answer(asked, limits, wanted), request.left
            )
            return Answer(answer)

    async def _lines(self, trace_request: TraceRequest, request: HttpRequest) -> LineByLine:
        limits = self.limits
        lines = self.work.told(
            trace_request.key(),
            lambda wanted, tell: trace_answer(trace_request, limits, wanted, tell),
            request.left,
        )
        return LineByLine(await anext(lines), lines)

    async def _answer(self, trace_request: TraceRequest, request: HttpRequest) -> bytes:
        limits = self.limits
        return await self.work.result(
            trace_request.key(), lambda wanted: trace_answer(trace_request, limits, wanted), request.left
        )


def app(
    models: Mapping[str, Served],
    limits: Limits | None = None,
    *,
    hosts: Collection[str] | None = LOCAL,
    addresses: bool = False,
    threads: int | None = None,
) -> Starlette:
    """The application, for any ASGI server. `app(…).state.serving.stop()` begins its shutdown.

    Args:
        models: name → model, the only ones that requests can reach.
        limits: limits of requests; the defaults if None.
        hosts: names that a request's Host header may have, so that no page from another origin can reach a
            server on this machine under its own name; None for any.
        addresses: whether to accept a numeric Host too, which no page from another origin can have.
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
        ("/api/judge", "POST", serving.judge),
        ("/health", "GET", serving.health),
        ("/metrics", "GET", serving.show_metrics),
    ]
    application = Starlette(
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
        # Starlette's own errors are plain text; ours are JSON, and the guard sends them.
        exception_handlers={HTTPException: _no_route},
    )
    application.router.redirect_slashes = False  # an unknown address is a 404, not a redirect
    application.state.serving = serving
    return application


class _Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, sending: Send) -> None:
        request = HttpRequest(scope, receive)
        answer = await self.handler(request)
        if isinstance(answer, Answer):
            await send(answer, request, sending)
            return
        async with aclosing(answer.rest):  # a client that leaves is no longer waited for
            await send_lines(answer, sending)


def _no_route(request: Any, error: Any) -> Any:
    lines = {404: "there is nothing at this address", 405: f"{request.method[:10]!a} is not allowed here"}
    raise RefusedError(error.status_code, lines.get(error.status_code, "this is not supported"), close=True)


class _Guard:
    """Wraps every request: checks the host, adds headers, counts requests, hides tracebacks."""

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
        request, metrics = HttpRequest(scope, receive), self.serving.metrics
        began, status = time.monotonic(), 0

        async def with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name for name, _ in message["headers"]}
                extra = {"Content-Security-Policy": NOTHING, **HEADERS}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (k.lower().encode(), v.encode())
                        for k, v in extra.items()
                        if k.lower().encode() not in present
                    ),
                ]
            await sending(message)

        metrics.in_progress += 1
        try:
            try:
                self._check_host(request)
                await self.app(scope, receive, with_headers)
            except RefusedError as error:
                linger = min(LINGER_SECONDS, self.serving.limits.patience)
                await send(refusal(error), request, with_headers, linger)
            except GoneError:
                status = 499
            except Exception:
                log.exception("a request failed")
                if status:
                    raise
                await send(
                    refusal(RefusedError(500, "the server failed; its log says why")), request, with_headers
                )
        finally:
            metrics.in_progress -= 1
            route = request.path if request.path in self.routes else "other"
            metrics.done(route, status or 499, time.monotonic() - began)

    def _check_host(self, request: HttpRequest) -> None:
        if self.hosts is None:
            return
        host = host_of(request.headers.get("host", ""))
        if host not in self.hosts and not (self.addresses and _is_address(host)):
            line = "this server answers only under its own names, not under the Host of this request"
            raise RefusedError(403, line, close=True)


def host_of(header: str) -> str | None:
    """The name in a Host header, without its port; None if there is none."""
    try:
        parts = urlsplit(f"//{header}")
        port = parts.port  # raises if it is not a number
    except ValueError:
        return None
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    # Nothing else may be in the header: no user, no path, nothing after it.
    whole = header.lower() in (shown, f"{shown}:{port}")
    return host if whole else None


def _is_address(host: str | None) -> bool:
    try:
        return bool(ipaddress.ip_address(host or ""))
    except ValueError:
        return False


def _check_origin(request: HttpRequest) -> None:
    """Refuse requests that a page from another origin makes a browser send."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    elsewhere = site is not None and site not in ("same-origin", "none")
    if origin is not None:
        scheme, _, place = origin.partition("://")
        elsewhere |= scheme not in ("http", "https") or place != request.headers.get("host")
    if elsewhere:
        raise RefusedError(403, "requests from pages of other origins are refused", close=True)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on this host."""
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
