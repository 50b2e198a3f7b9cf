"""A readers–writer lock for models: many threads may run a model at once, or one may change its modules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Threads that only run a model run together; a thread that changes it excludes all others."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._inside = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the model; no thread changes it meanwhile."""
        with self._free:
            self._inside += 1
        try:
            yield
        finally:
            with self._free:
                self._inside -= 1
                self._free.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Change the model; no other thread runs it meanwhile."""
        with self._free:
            self._free.wait_for(lambda: self._inside == 0)
            yield
