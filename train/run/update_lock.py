"""A lock that blocks updates of the training state while another thread saves it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class UpdateLock:
    """Parameters are updated only inside ``with updates.update()``. ``count`` counts the updates.

    The trainer makes one update per step, so all ranks make the same updates. When all locks are
    frozen, no two ranks are more than one update apart: a rank cannot finish a step to which
    another has not contributed. An update may communicate, so a rank inside it may wait for a rank
    that is frozen before it. ``freeze`` therefore does not wait for an update in progress.
    ``freeze_after`` lets all ranks make the last update that any of them has begun.
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
        done = False
        try:
            yield
            done = True
        finally:
            with self._changed:
                self.count += done
                self._inside = False
                self._changed.notify_all()

    def freeze(self) -> int:
        """Block further updates; returns what ``count`` will be after the one in progress."""
        with self._changed:
            self._limit = self.count + self._inside
            return self._limit

    def freeze_after(self, last: int, timeout: float) -> bool:
        """Allow updates up to number ``last`` and wait for it; False after ``timeout`` seconds."""
        with self._changed:
            self._limit = last
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self.count >= last, timeout)
