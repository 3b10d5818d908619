"""What threads share: how long to wait for one to end, and errors raised in another thread.

`Interruption` is for a thread whose host has gone on while its device waits for other ranks.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref

import torch

JOIN_S = 1.0  # a thread that does not end in this time hangs in a call


class Interruption:
    """Raises an error of a ring call in the thread that made the call, once.

    The thread that notices the error is another one. The caller gets it as soon as it runs Python,
    or a ring call of any thread raises it, whichever comes first: autograd runs backward calls in
    threads of its own, and passes on what they raise. Results are void only after `interrupt`, so
    a caller that waits for its device gets the error, not the results.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.caller = weakref.ref(threading.current_thread())  # numbers of threads are used again
        self.error: Exception | None = None  # no thread has raised it

    def called(self) -> None:
        """At the start of each ring call. Autograd's own threads are not the caller."""
        if torch._C._current_graph_task_id() < 0:
            self.caller = weakref.ref(threading.current_thread())

    def interrupt(self, error: Exception) -> None:
        """Raises an error of this type and text in the caller's thread."""

        def raised(self: Exception) -> None:
            Exception.__init__(self, str(error))
            if interruption.error is error:
                interruption.error = None

        interruption = self
        error_type = type(type(error).__name__, (type(error),), {"__init__": raised})
        with self._lock:
            self.error = error
            _set_error(self.caller(), error_type)

    def check(self) -> None:
        """Raises the error if the caller has not got it; it will not get it again."""
        if self.error is None:
            return
        with self._lock:
            error, self.error = self.error, None
            if error is not None:
                _set_error(self.caller(), None)
        if error is not None:
            raise error


def _set_error(thread: threading.Thread | None, error_type: type[Exception] | None) -> None:
    """What a thread raises when it runs Python next; None: nothing. It may have ended."""
    if thread is None or not thread.is_alive() or thread.ident is None:
        return
    argument = None if error_type is None else ctypes.py_object(error_type)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), argument)
    if error_type is None:
        take_signal_back()


class _TakenBackError(Exception):
    """Raised and caught in `take_signal_back`."""


def take_signal_back() -> None:
    """Ends the signal that some thread has to raise an error, if that error is gone.

    Before Python 3.13 the signal ends only where an error is raised. Until then all threads are
    slower, and one that `sys.setprofile` or `sys.settrace` observes does not go on.
    """
    if sys.version_info >= (3, 13):
        return
    try:
        ident = ctypes.c_ulong(threading.get_ident())
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_TakenBackError))
        while True:  # until it is raised
            pass
    except _TakenBackError:
        pass
