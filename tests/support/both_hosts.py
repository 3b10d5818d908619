"""What tests do with both hosts of calls, on a CPU and on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ringfa3 import host


def errors_of_both(call: Callable[[], object]) -> list[tuple[type[BaseException], str]]:
    """The type and text of the TypeError or ValueError that a call raises under each host."""
    raised = []
    for which in host.HOSTS:
        host.select(which)
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        raised.append((caught.type, str(caught.value)))
    return raised


def in_threads(work: Callable[[int], object], count: int = 4) -> None:
    """Runs work(0), work(1), ... at once, and waits for all."""
    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
