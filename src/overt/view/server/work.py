"""A server's work: a few threads behind a bounded queue, shared equal requests, cached answers."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from overt.view.server.limits import GoneError, Limits, RefusedError, whole_seconds
from overt.view.server.metrics import Metrics

log = logging.getLogger("overt.server")

StillWanted = Callable[[], bool]
Make = Callable[[StillWanted], bytes]
Tell = Callable[[bytes], None]
MakeTelling = Callable[[StillWanted, Tell], bytes]


class Cache:
    """The most recently used answers, limited in number and size."""

    def __init__(self, entries: int, most: int) -> None:
        self.entries, self.most, self.size = entries, most, 0
        self._answers: OrderedDict[Hashable, bytes] = OrderedDict()

    def get(self, key: Hashable) -> bytes | None:
        """The cached answer, which becomes the most recent one."""
        if key in self._answers:
            self._answers.move_to_end(key)
        return self._answers.get(key)

    def put(self, key: Hashable, value: bytes) -> None:
        """Cache an answer, and drop the oldest ones that there is no room for."""
        if self.entries == 0 or len(value) > self.most:
            return
        self.size -= len(self._answers.pop(key, b""))
        self._answers[key] = value
        self.size += len(value)
        while len(self._answers) > self.entries or self.size > self.most:
            _, old = self._answers.popitem(last=False)
            self.size -= len(old)

    def __len__(self) -> int:
        return len(self._answers)


@dataclass(eq=False)
class _Job:
    key: Hashable
    make: MakeTelling
    future: asyncio.Future[bytes]
    loop: asyncio.AbstractEventLoop
    waiters: int = 0
    started: bool = False
    late: bool = False  # a client was refused because it takes too long, and may ask again
    lines: list[bytes] = field(default_factory=list)  # told so far
    fresh: asyncio.Event = field(default_factory=asyncio.Event)  # set, and replaced, with each of them

    def wanted(self) -> bool:
        return self.waiters > 0 or self.late

    def tell(self, line: bytes) -> None:
        """Called by the thread that makes the result."""
        try:
            self.loop.call_soon_threadsafe(self._told, line)
        except RuntimeError:
            raise GoneError from None  # the loop has ended, and with it the server

    def _told(self, line: bytes) -> None:
        self.lines.append(line)
        told, self.fresh = self.fresh, asyncio.Event()
        told.set()


class Work:
    """Runs jobs in the order in which they came. Call its methods only from the event loop's thread.

    It uses daemon threads rather than an executor's, which the interpreter would wait for at exit.

    Args:
        limits: how many jobs run and wait, and for how long.
        metrics: counters.
        prepare: called once in each thread.
    """

    def __init__(self, limits: Limits, metrics: Metrics, prepare: Callable[[], None] = lambda: None) -> None:
        self.limits, self.metrics = limits, metrics
        self.cache = Cache(limits.cache, limits.cache_bytes)
        self.stopping = False
        self.running = 0
        self._prepare = prepare
        self._jobs: dict[Hashable, _Job] = {}
        self._pending: deque[_Job] = deque()
        self._handed: queue.SimpleQueue[tuple[_Job, asyncio.AbstractEventLoop] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._mean = 0.3  # seconds of a job, by past jobs

    @property
    def waiting(self) -> int:
        """Number of waiting jobs."""
        return len(self._pending)

    async def result(self, key: Hashable, make: Make, left: Callable[[], Awaitable[None]]) -> bytes:
        """The result of `make` for this key: cached, already running, or computed now.

        Args:
            key: equal for requests with equal answers.
            make: runs in a thread; it gets a function that tells whether anyone still waits.
            left: returns when the client has disconnected.
        """
        async for line in self.told(key, lambda wanted, _: make(wanted), left):
            found = line
        return found

    async def told(
        self, key: Hashable, make: MakeTelling, left: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[bytes, None]:
        """What `make` tells for this key, line by line, then its result; only the result if it is cached.

        Args:
            key: equal for requests with equal answers, which hear the same lines.
            make: runs in a thread; it gets a function that tells whether anyone still waits, and one that
                takes a line.
            left: returns when the client has disconnected.
        """
        cached = self.cache.get(key)
        if cached is not None:
            self.metrics.counts["cache_hits"] += 1
            yield cached
            return
        job = self._join(key, make)
        job.waiters += 1
        end = job.loop.time() + self.limits.seconds
        watch: asyncio.Future[None] = asyncio.ensure_future(left())
        # The job's future is shared: a waiter that gives up must not cancel it for the others.
        done = asyncio.shield(job.future)
        at = 0
        try:
            while True:
                while at < len(job.lines):
                    at += 1
                    yield job.lines[at - 1]
                if done.done():
                    yield done.result()
                    return
                fresh: asyncio.Future[Any] = asyncio.ensure_future(job.fresh.wait())
                either: set[asyncio.Future[Any]] = {done, watch, fresh}
                time_left = max(end - job.loop.time(), 0.0)
                found, _ = await asyncio.wait(either, timeout=time_left, return_when="FIRST_COMPLETED")
                fresh.cancel()
                if watch.done() and not done.done():
                    raise GoneError
                if not done.done() and (not found or job.loop.time() > end):
                    job.late = job.started
                    raise RefusedError(504, self._slow(job))
        finally:
            job.waiters -= 1
            watch.cancel()
            if not done.done():
                done.cancel()
            if not job.started and not job.wanted() and job in self._pending:
                # At once, or clients that come and go would fill the queue with jobs that no one waits for.
                self._pending.remove(job)
                self._skip(job)

    def _slow(self, job: _Job) -> str:
        where = (
            "try a shorter text, fewer methods or layers"
            if job.started
            else "the server was busy with others"
        )
        return f"no answer within {self.limits.seconds:g} s: {where}"

    def _join(self, key: Hashable, make: MakeTelling) -> _Job:
        if self.stopping:
            raise RefusedError(503, "the server is shutting down", 5)
        job = self._jobs.get(key)
        if job is not None:
            self.metrics.counts["shared"] += 1
            return job
        ahead = self.waiting + self.running
        if ahead >= self.limits.queue + self.limits.workers:
            self.metrics.counts["busy"] += 1
            waiting = min(self.waiting, self.limits.queue)  # others are about to run
            line = f"busy: {waiting} requests are waiting, try again in a moment"
            raise RefusedError(503, line, whole_seconds(self._mean * ahead / self.limits.workers))
        loop = asyncio.get_running_loop()
        job = _Job(key, make, loop.create_future(), loop)
        # An exception that no one waits for needs no report.
        job.future.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._jobs[key] = job
        self._pending.append(job)
        loop.call_soon(self._pump)  # not at once: this job has no waiter yet
        return job

    def _pump(self) -> None:
        while self._pending and self.running < self.limits.workers:
            job = self._pending.popleft()
            job.started = True
            self.running += 1
            if len(self._threads) < self.running:
                thread = threading.Thread(target=self._serve, name="overt-serve", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._handed.put((job, asyncio.get_running_loop()))

    def _skip(self, job: _Job) -> None:
        self.metrics.counts["skipped"] += 1
        self._jobs.pop(job.key, None)
        job.future.cancel()

    def _serve(self) -> None:
        """A thread: run the jobs handed over, one after the other."""
        self._prepare()
        while (handed := self._handed.get()) is not None:
            job, loop = handed
            began = time.monotonic()
            outcome: bytes | Exception
            try:
                outcome = job.make(job.wanted, job.tell)
            except (RefusedError, GoneError) as error:
                outcome = error
            except BaseException:  # whatever it is, a client waits for an answer
                log.exception("a trace failed")
                outcome = RefusedError(500, "the trace failed; the server's log says why")
            try:
                loop.call_soon_threadsafe(self._done, job, outcome, time.monotonic() - began)
            except RuntimeError:
                return  # the loop has ended, and with it the server
            del handed, job, outcome  # an idle thread holds no client's picture

    def _done(self, job: _Job, outcome: bytes | Exception, seconds: float) -> None:
        self.running -= 1
        if isinstance(outcome, GoneError):
            if job.wanted() and not self.stopping:
                # A client joined after the thread had seen that no one waits.
                job.started = False
                self._pending.appendleft(job)
            else:
                self._skip(job)
            self._pump()
            return
        self.metrics.counts["traces"] += 1
        self._mean += 0.2 * (seconds - self._mean)
        self._jobs.pop(job.key, None)
        if isinstance(outcome, Exception):
            if not job.future.done():
                job.future.set_exception(outcome)
        else:
            self.cache.put(job.key, outcome)
            if not job.future.done():
                job.future.set_result(outcome)
        self._pump()

    def stop(self) -> None:
        """Take no new jobs, refuse waiting ones, and let running ones end within a time limit."""
        self.stopping = True
        waiting = list(self._pending)
        self._pending.clear()
        self._refuse(waiting)
        for _ in self._threads:
            self._handed.put(None)
        asyncio.get_running_loop().call_later(0.8 * self.limits.finish, self._give_up)

    def _give_up(self) -> None:
        self._refuse(list(self._jobs.values()))

    def _refuse(self, jobs: list[_Job]) -> None:
        for job in jobs:
            self._jobs.pop(job.key, None)
            if not job.future.done():
                job.future.set_exception(RefusedError(503, "the server is shutting down", 5))
