"""Work of a server: a few threads behind a bounded queue, equal requests shared, answers kept for a while."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any

from overt.view.server.limits import GoneError, Limits, RefusedError, whole_seconds
from overt.view.server.metrics import Metrics

log = logging.getLogger("overt.server")

StillWanted = Callable[[], bool]
Make = Callable[[StillWanted], bytes]


class Cache:
    """The answers used last, by number and size."""

    def __init__(self, entries: int, most: int) -> None:
        self.entries, self.most, self.size = entries, most, 0
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()

    def get(self, key: Hashable) -> bytes | None:
        """What is kept, which becomes the newest."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: Hashable, value: bytes) -> None:
        """Keep an answer, and forget the oldest that there is no room for."""
        if self.entries == 0 or len(value) > self.most:
            return
        self.size -= len(self._kept.pop(key, b""))
        self._kept[key] = value
        self.size += len(value)
        while len(self._kept) > self.entries or self.size > self.most:
            _, old = self._kept.popitem(last=False)
            self.size -= len(old)

    def __len__(self) -> int:
        return len(self._kept)


@dataclass(eq=False)
class _Job:
    key: Hashable
    make: Make
    future: asyncio.Future[bytes]
    waiters: int = 0
    started: bool = False
    late: bool = False  # somebody was told that it takes too long, and may ask again

    def wanted(self) -> bool:
        return self.waiters > 0 or self.late


class Work:
    """Jobs in the order they came. All methods belong to the event loop's thread.

    Threads are daemons of our own rather than an executor's, which the interpreter would wait for at its end.

    Args:
        limits: how many at a time and waiting, and for how long.
        metrics: what is counted.
        prepare: is called once in each thread.
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
        self._mean = 0.3  # seconds of a job, by those that were done

    @property
    def waiting(self) -> int:
        """Jobs that wait for their turn."""
        return len(self._pending)

    async def result(self, key: Hashable, make: Make, left: Callable[[], Awaitable[None]]) -> bytes:
        """What `make` gives for this key: kept, under way already, or made now.

        Args:
            key: equal for requests with equal answers.
            make: runs in a thread; it is handed a function that says whether anybody still waits.
            left: returns when the client has gone away.
        """
        kept = self.cache.get(key)
        if kept is not None:
            self.metrics.counts["cache_hits"] += 1
            return kept
        job = self._join(key, make)
        job.waiters += 1
        watch: asyncio.Future[None] = asyncio.ensure_future(left())
        # The job's future is shared: one that stops waiting must not cancel it for the others.
        done = asyncio.shield(job.future)
        try:
            either: set[asyncio.Future[Any]] = {done, watch}
            await asyncio.wait(either, timeout=self.limits.seconds, return_when="FIRST_COMPLETED")
            if done.done():
                return done.result()
            if watch.done():
                raise GoneError
            job.late = job.started
            raise RefusedError(504, self._slow(job))
        finally:
            job.waiters -= 1
            watch.cancel()
            if not done.done():
                done.cancel()
            if not job.started and not job.wanted() and job in self._pending:
                # At once, or clients that come and go would fill the queue with what nobody waits for.
                self._pending.remove(job)
                self._skip(job)

    def _slow(self, job: _Job) -> str:
        where = "shorter text, fewer methods or layers may do" if job.started else "it never was its turn"
        return f"no answer within {self.limits.seconds:g} s: {where}"

    def _join(self, key: Hashable, make: Make) -> _Job:
        if self.stopping:
            raise RefusedError(503, "the server is shutting down", 5)
        job = self._jobs.get(key)
        if job is not None:
            self.metrics.counts["shared"] += 1
            return job
        ahead = self.waiting + self.running
        if ahead >= self.limits.queue + self.limits.workers:
            self.metrics.counts["busy"] += 1
            line = f"busy: {self.waiting} requests wait, try again in a moment"
            raise RefusedError(503, line, whole_seconds(self._mean * ahead / self.limits.workers))
        loop = asyncio.get_running_loop()
        job = _Job(key, make, loop.create_future())
        # An exception that nobody waits for any more is no news.
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
        """A thread: make what is handed over, one after the other."""
        self._prepare()
        while (handed := self._handed.get()) is not None:
            job, loop = handed
            began = time.monotonic()
            made: bytes | Exception
            try:
                made = job.make(job.wanted)
            except (RefusedError, GoneError) as error:
                made = error
            except BaseException:  # whatever it is, somebody waits for an answer
                log.exception("a trace failed")
                made = RefusedError(500, "the trace failed; the server's log says why")
            try:
                loop.call_soon_threadsafe(self._done, job, made, time.monotonic() - began)
            except RuntimeError:
                return  # the loop has ended, and with it the server
            del handed, job, made  # an idle thread holds nobody's picture

    def _done(self, job: _Job, made: bytes | Exception, seconds: float) -> None:
        self.running -= 1
        if isinstance(made, GoneError):
            if job.wanted() and not self.stopping:
                # Somebody joined after the thread had seen that nobody waits.
                job.started = False
                self._pending.appendleft(job)
            else:
                self._skip(job)
            self._pump()
            return
        self.metrics.counts["traces"] += 1
        self._mean += 0.2 * (seconds - self._mean)
        self._jobs.pop(job.key, None)
        if isinstance(made, Exception):
            if not job.future.done():
                job.future.set_exception(made)
        else:
            self.cache.put(job.key, made)
            if not job.future.done():
                job.future.set_result(made)
        self._pump()

    def stop(self) -> None:
        """Take nothing new, tell those that wait, let what runs end, but not for ever."""
        self.stopping = True
        waiting = list(self._pending)
        self._pending.clear()
        self._tell(waiting)
        for _ in self._threads:
            self._handed.put(None)
        asyncio.get_running_loop().call_later(0.8 * self.limits.finish, self._give_up)

    def _give_up(self) -> None:
        self._tell(list(self._jobs.values()))

    def _tell(self, jobs: list[_Job]) -> None:
        for job in jobs:
            self._jobs.pop(job.key, None)
            if not job.future.done():
                job.future.set_exception(RefusedError(503, "the server is shutting down", 5))
