"""If this fails, an error in a background thread is lost, or is raised twice. An error that one
thread notices is raised in the thread that made the call, once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch

from ringfa3.threads import Interruption


class LostError(RuntimeError):
    pass


def _from_another_thread(interruption: Interruption, text: str) -> None:
    thread = threading.Thread(target=interruption.interrupt, args=(LostError(text),))
    thread.start()
    thread.join()


def test_the_caller_gets_it_with_its_type_and_text() -> None:
    """And never again: neither where it runs on, nor at its next call."""
    interruption = Interruption()
    with pytest.raises(LostError, match=r"^hop 1: nothing$"):  # noqa: PT012
        _from_another_thread(interruption, "hop 1: nothing")
        time.sleep(0.01)
    interruption.check()
    time.sleep(0.01)


def test_a_caller_that_is_not_the_main_thread_gets_it() -> None:
    """The main thread goes on."""
    interruption, raised = Interruption(), []
    called, goes_on = threading.Event(), threading.Event()

    def train() -> None:
        interruption.called()
        called.set()
        try:
            while not goes_on.wait(0.01):
                pass
        except LostError as error:
            raised.append(str(error))

    thread = threading.Thread(target=train)
    thread.start()
    called.wait()
    interruption.interrupt(LostError("hop 2"))
    thread.join(5)
    goes_on.set()
    assert raised == ["hop 2"]
    assert interruption.error is None


def test_a_ring_call_of_another_thread_raises_it_for_the_caller() -> None:
    """As autograd's do, which pass it on: the caller itself gets nothing more."""
    interruption, raised = Interruption(), []
    calls, checked = threading.Event(), threading.Event()

    def train() -> None:
        interruption.called()
        calls.set()
        try:
            lock.acquire()  # in C, as a caller that waits for its device
            checked.wait()
            raised.append("nothing")
        except LostError:
            raised.append("raised twice")

    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=train)
    thread.start()
    calls.wait()
    time.sleep(0.05)
    interruption.interrupt(LostError("hop 3"))
    with pytest.raises(LostError, match="hop 3"):
        interruption.check()
    interruption.check()
    lock.release()
    checked.set()
    thread.join(5)
    assert raised == ["nothing"]


def test_a_call_in_a_backward_is_of_the_thread_that_began_the_backward() -> None:
    """Autograd's threads run no Python between calls, so an error for them would be lost."""
    interruption = Interruption()
    caller = interruption.caller
    seen: list[int] = []

    def enter(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        interruption.caller = 0  # of another thread, which the backward must not change
        interruption.called()
        seen.append(interruption.caller)
        del grad

    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(enter)
    y.sum().backward()
    assert seen == [0]
    interruption.called()
    assert interruption.caller == caller


def test_an_observed_thread_goes_on_after_an_error_was_withdrawn() -> None:
    """Another thread raises the error in place of its caller, which waits. Before Python 3.13 a
    signal of it is left, and with it a thread under `sys.setprofile` would not go on."""
    code = """
import sys, threading
from ringfa3.threads import Interruption

made, goes_on = [], threading.Event()
def call():
    made.append(Interruption())
    goes_on.wait()
caller = threading.Thread(target=call, daemon=True)
caller.start()
while not made:
    pass
made[0].interrupt(ValueError("lost"))
try:
    made[0].check()
except ValueError as error:
    print(error, flush=True)
def observed():
    sys.setprofile(lambda *_: None)
    call = lambda: None
    call()
    sys.setprofile(None)
    print("goes on", flush=True)
thread = threading.Thread(target=observed, daemon=True)
thread.start()
thread.join(20)
sys.stdout.flush()
import os
os._exit(thread.is_alive())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "lost\ngoes on\n", done.stderr
