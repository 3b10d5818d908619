"""If this fails, a checkpoint holds half an update. Updates wait while the lock is frozen, and a
freeze promises the update in progress."""

from __future__ import annotations

import threading

import pytest

from train.run.update_lock import UpdateLock


def updating(updates: UpdateLock, held: threading.Event) -> threading.Thread:
    """A thread that is inside its first update until ``held`` is set, then makes a second."""
    inside = threading.Event()

    def make() -> None:
        with updates.update():
            inside.set()
            held.wait()
        with updates.update():
            pass

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    assert inside.wait(5)
    return thread


def test_a_freeze_promises_the_update_in_progress():
    """``freeze`` returns at once: the update may wait for a rank that is frozen before it."""
    updates, held, frozen = UpdateLock(), threading.Event(), []
    thread = updating(updates, held)
    freezer = threading.Thread(target=lambda: frozen.append(updates.freeze()), daemon=True)
    freezer.start()
    freezer.join(5)
    assert frozen == [1]
    assert updates.count == 0
    assert not updates.freeze_after(1, timeout=0.05)
    held.set()
    assert updates.freeze_after(1, timeout=5)
    thread.join(0.1)
    assert thread.is_alive()  # the second update does not begin
    assert updates.count == updates.freeze() == 1


def test_a_frozen_lock_allows_a_given_number_of_updates():
    updates = UpdateLock()
    assert updates.freeze() == 0

    def make_three() -> None:
        for _ in range(3):
            with updates.update():
                pass

    thread = threading.Thread(target=make_three, daemon=True)
    thread.start()
    assert updates.freeze_after(2, timeout=5)
    thread.join(0.1)
    assert thread.is_alive()
    assert updates.count == 2
    updates.freeze_after(3, timeout=5)
    thread.join(5)
    assert not thread.is_alive()
    assert not updates.freeze_after(4, timeout=0.05)  # there is no fourth


def test_an_update_that_fails_does_not_count_and_releases_the_lock():
    updates = UpdateLock()
    with pytest.raises(RuntimeError), updates.update():
        raise RuntimeError
    assert updates.count == 0
    assert updates.freeze() == 0
