"""Whole trainings, or shards of a corpus, side by side in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnContext
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
S = TypeVar("S")
T_contra = TypeVar("T_contra", contravariant=True)
S_contra = TypeVar("S_contra", contravariant=True)
Tell = Callable[[int], object]
_starting = threading.Lock()
# What libraries read when they are loaded.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class Throttled:
    """Tells a task's steps as they are counted, a few at a time, since each time another process is woken."""

    def __init__(self, tell: Tell, every: int = 10) -> None:
        self.tell, self.every, self.told = tell, every, 0

    def __call__(self, step: int) -> None:
        """Take note that so many steps are done."""
        if step >= self.told + self.every:
            self.rest(step)

    def rest(self, step: int) -> None:
        """Tell all that is not yet told."""
        self.tell(step - self.told)
        self.told = step


class Perform(Protocol[T_contra, S_contra]):
    """Performs a task; a function of a module, since other processes import it."""

    def __call__(self, task: T_contra, shared: S_contra, tell: Tell) -> dict[str, Any]:
        """Perform a task with what all tasks share; `tell` takes the number of steps done since last told."""


class _Worker(Generic[T, S]):
    """What a process performs tasks with."""

    current: _Worker[Any, Any]

    def __init__(self, perform: Perform[T, S], shared: S, queue: Any) -> None:
        self.perform, self.shared, self.queue = perform, shared, queue


def _start(perform: Perform[T, S], shared: S, queue: Any, prepare: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _Worker.current = _Worker(perform, shared, queue)
    prepare()


def _end_with_parent() -> None:
    """Leave no process behind where the parent was killed, and could not end its workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(task: T) -> tuple[T, dict[str, Any]]:
    worker = _Worker.current
    return task, worker.perform(task, worker.shared, worker.queue.put)


class _Context(SpawnContext):
    """Keeps track of the processes it started, because the caller may have others."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # noqa: N802
        """Create a process and remember it."""
        process = SpawnContext.Process(*args, **kwargs)
        self.started.append(process)
        return process


def side_by_side(
    tasks: Sequence[T],
    perform: Perform[T, S],
    shared: S,
    workers: int,
    prepare: Callable[[], None],
    tell: Tell = lambda _: None,
) -> Iterator[tuple[T, dict[str, Any]]]:
    """Perform tasks in several processes; yield each with its numbers as it finishes.

    Args:
        tasks: what to do.
        perform: does it.
        shared: what all tasks need, copied to each process once.
        workers: number of processes.
        prepare: called once in each process, a function of a module.
        tell: called in this process with the numbers of steps that tasks tell.
    """
    context = _Context()
    queue = context.SimpleQueue()

    def listen() -> None:
        with suppress(OSError, EOFError):  # closed when all is done
            while True:
                tell(queue.get())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    pool = ProcessPoolExecutor(min(workers, len(tasks)), context, _start, (perform, shared, queue, prepare))
    try:
        with _one_thread_each():
            futures = [pool.submit(_work, task) for task in tasks]  # which starts the processes
        for done in as_completed(futures):
            yield done.result()
    except BrokenProcessPool:
        raise OSError(
            "a worker process was killed, perhaps for lack of memory: try fewer --workers; the same command "
            "resumes with what is unfinished"
        ) from None
    finally:
        for process in context.started:  # some are alive if this was interrupted
            if process.is_alive():
                process.terminate()
        pool.shutdown(cancel_futures=True)
        queue.close()


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes that are started here load NumPy and SciPy with one thread, whatever the environment says."""
    with _starting:  # one caller at a time, since all have one environment
        before = {name: os.environ.get(name) for name in THREADS}
        os.environ.update(dict.fromkeys(THREADS, "1"))
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def cores() -> int:
    """Number of processes that can run in parallel."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
