"""Keeps the training state constant while another thread saves it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class UpdateLock:
    """Parameters are updated only inside ``with updates.update()``. ``count`` counts the updates.

    The trainer makes one update per step, without communication inside. All ranks therefore make
    the same updates. When all locks are frozen, no two ranks are more than one update apart: a rank
    cannot finish a step to which another has not contributed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._inside = False
        self._limit: int | None = None
        self._changed = threading.Condition()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Make the next update. Blocks, possibly for ever, if the lock is frozen before it."""
        with self._changed:
            self._changed.wait_for(lambda: self._limit is None or self.count < self._limit)
            self._inside = True
        try:
            yield
            self.count += 1
        finally:
            with self._changed:
                self._inside = False
                self._changed.notify_all()

    def freeze(self) -> int:
        """Block further updates, wait for the one in progress, and return the final ``count``."""
        with self._changed:
            self._limit = self.count + self._inside
            self._changed.wait_for(lambda: not self._inside)
            self._limit = self.count
            return self.count

    def freeze_after(self, last: int, timeout: float) -> bool:
        """Allow updates up to number ``last`` and wait for it; False after ``timeout`` seconds."""
        with self._changed:
            self._limit = last
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self.count >= last, timeout)
