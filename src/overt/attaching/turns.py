"""Whose turn it is to run a model: any number of threads as it is, or one that changes its modules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Threads that leave a model as it is run together; one that changes it waits for them, they for it."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._inside = 0

    @contextmanager
    def together(self) -> Iterator[None]:
        """Nobody changes the model."""
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
        """Nobody else runs it."""
        with self._free:
            self._free.wait_for(lambda: self._inside == 0)
            yield
