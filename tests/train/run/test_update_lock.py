"""Changes are made one at a time, and none while the gate is shut."""

from __future__ import annotations

import threading
import time

import pytest

from train.run.update_lock import UpdateLock


def changing(gate: UpdateLock, held: threading.Event) -> threading.Thread:
    """A thread that is inside its first change until ``held`` is set, then makes a second."""
    inside = threading.Event()

    def make() -> None:
        with gate.change():
            inside.set()
            held.wait()
        with gate.change():
            pass

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    assert inside.wait(5)
    return thread


def test_shutting_waits_for_the_change_that_is_being_made():
    gate, held, shut = UpdateLock(), threading.Event(), []
    thread = changing(gate, held)
    closer = threading.Thread(target=lambda: shut.append(gate.shut()), daemon=True)
    closer.start()
    time.sleep(0.1)
    assert shut == []
    held.set()
    closer.join(5)
    assert shut == [1]
    thread.join(0.1)
    assert thread.is_alive()  # the second change does not begin
    assert gate.made == 1


def test_a_shut_gate_lets_so_many_changes_pass():
    gate = UpdateLock()
    assert gate.shut() == 0

    def make_three() -> None:
        for _ in range(3):
            with gate.change():
                pass

    thread = threading.Thread(target=make_three, daemon=True)
    thread.start()
    assert gate.shut_after(2, timeout=5)
    thread.join(0.1)
    assert thread.is_alive()
    assert gate.made == 2
    gate.shut_after(3, timeout=5)
    thread.join(5)
    assert not thread.is_alive()
    assert not gate.shut_after(4, timeout=0.05)  # nobody makes a fourth


def test_a_change_that_fails_does_not_count_and_opens_the_gate_again():
    gate = UpdateLock()
    with pytest.raises(RuntimeError), gate.change():
        raise RuntimeError
    assert gate.made == 0
    assert gate.shut() == 0
