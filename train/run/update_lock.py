"""What keeps the training state still while another thread writes it down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class UpdateLock:
    """Parameters change only inside ``with gate.change()``. Changes are counted: 1, 2, ...

    The trainer makes one change per step, with no communication inside. So the ranks of a run make
    the same changes, and when all gates are shut no two of them are more than one change apart: a
    rank cannot end a step that another has not taken its part in.
    """

    def __init__(self) -> None:
        self.made = 0
        self._inside = False
        self._limit: int | None = None
        self._moved = threading.Condition()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Make the next change; waits, perhaps for ever, where the gate is shut before it."""
        with self._moved:
            self._moved.wait_for(lambda: self._limit is None or self.made < self._limit)
            self._inside = True
        try:
            yield
            self.made += 1
        finally:
            with self._moved:
                self._inside = False
                self._moved.notify_all()

    def shut(self) -> int:
        """Let no further change begin; returns the number of those made."""
        with self._moved:
            self._limit = self.made + self._inside
            self._moved.wait_for(lambda: not self._inside)
            self._limit = self.made
            return self.made

    def shut_after(self, change: int, timeout: float) -> bool:
        """Let changes up to ``change`` be made and wait for that one; False after ``timeout`` s."""
        with self._moved:
            self._limit = change
            self._moved.notify_all()
            return self._moved.wait_for(lambda: self.made >= change, timeout)
