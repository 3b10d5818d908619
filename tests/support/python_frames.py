"""Functions of Python that a call enters."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ringfa3.threads import take_signal_back


@contextmanager
def frames() -> Iterator[list[str]]:
    """Names of the package's functions that this thread enters inside."""
    entered: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        fake = code.co_filename.endswith("cuda_driver.py")  # of the driver that only logs
        if event == "call" and "/ringfa3/" in code.co_filename and not fake:
            entered.append(code.co_qualname if sys.version_info >= (3, 11) else code.co_name)

    take_signal_back()  # of an earlier test, whose thread has ended before it raised its error
    sys.setprofile(profile)
    try:
        yield entered
    finally:
        sys.setprofile(None)
