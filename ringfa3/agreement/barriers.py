"""Barriers over a store, one for each content: ranks pass if all of them bring the same content.

A rank asks the store three times, whatever the number of ranks:

    each rank      adds 1 to the counter of the content
    the last one   writes a key for each other rank, in one request, and deletes the counter
    the others     wait in the store for their own key, and delete it

A rank that does not want to wait any longer marks the counter, but only as long as a rank is
missing. So either all ranks pass, or none does: those that arrive later see the mark.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store

from ringfa3.errors import first_line
from ringfa3.threads import JOIN_S

MAX_EARLY = 4096  # arrivals that no rank has waited for
# Of a counter: how many ranks have arrived, whether one has given up, how many have left since.
ARRIVED, GAVE_UP, LEFT = 1, 1 << 20, 1 << 21
FIELD = GAVE_UP - 1
FIRST_LOOK_S = 0.001
FOREVER = timedelta(days=1000)  # a wait ends by its key; a timeout would be logged as a warning


class Arrival:
    """This rank's arrival at a barrier. `decided` is set once the others are final.

    passed    whether all ranks have arrived with this content
    gave_up   this rank has given up, or has seen that another one had
    problem   error of the store
    """

    def __init__(self, counter: str, keys: list[str], rank: int) -> None:
        self.counter, self.key = counter, keys[rank]
        self.others = [key for key in keys if key != self.key]
        self.decided = threading.Event()
        self.passed = self.gave_up = False
        self.problem: str | None = None

    def decide(self, passed: bool, problem: str | None = None) -> None:
        if not self.decided.is_set():
            self.passed, self.problem = passed, problem
            self.decided.set()


class Barriers:
    """One rank's view of the barriers of a group.

    Ranks may arrive in any order, and long before they need to know whether all have. No method
    asks the store itself: two threads do, which start at the first arrival. One never waits for
    other ranks; the other one does, on a connection of its own.
    """

    def __init__(self, store: Callable[[], Store], rank: int, world: int) -> None:
        """store(): the group's own, the same for all ranks; world < 2**20."""
        self._store, self._rank, self._world = store, rank, world
        self._round = 0
        self._open: dict[str, Arrival] = {}
        self._lock = threading.Lock()  # of these two; never held while the store is asked
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._watch = _Watch(store)

    def arrive_early(self, content: str) -> None:
        """Arrives at the barrier of a content, before this rank needs to know whether all have.

        Nothing happens if `MAX_EARLY` arrivals are open: the rank arrives when it needs to know.
        """
        with self._lock:
            if content not in self._open and len(self._open) < MAX_EARLY:
                self._arrive_at(content)

    def wait(self, content: str, seconds: float, limit: float) -> Arrival:
        """Arrives, waits, and gives up after so many seconds; not decided after `limit`: the store
        does not answer. The rank leaves the barrier by `leave`."""
        with self._lock:
            arrival = self._open.get(content) or self._arrive_at(content)
        start, pause = time.monotonic(), FIRST_LOOK_S
        while not arrival.decided.wait(pause) and time.monotonic() - start < seconds:
            self._ask(self._watch.look, arrival)
            pause = min(2 * pause, seconds)
        if not arrival.decided.is_set():
            self._ask(self._give_up, arrival)
            arrival.decided.wait(max(start + limit - time.monotonic(), 0))
        return arrival

    def leave(self, content: str) -> None:
        """Ends this rank's arrival. If ranks have not passed, they have agreed in another way, or
        will not."""
        with self._lock:
            arrival = self._open.pop(content, None)
        if arrival is not None and not arrival.passed:
            self._ask(self._leave, arrival)

    def restart(self) -> None:
        """Leaves all barriers. Ranks pass those that follow after equal numbers of restarts."""
        with self._lock:
            self._round += 1
            contents = list(self._open)
        for content in contents:
            self.leave(content)

    def end(self) -> None:
        """Leaves all barriers and ends the threads."""
        self.restart()
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(JOIN_S)

    def _arrive_at(self, content: str) -> Arrival:
        name = f"{self._round}/{hashlib.blake2b(content.encode(), digest_size=16).hexdigest()}"
        keys = [f"ringfa3/passed/{name}/{rank}" for rank in range(self._world)]
        arrival = Arrival(f"ringfa3/arrived/{name}", keys, self._rank)
        self._open[content] = arrival
        self._ask(self._arrive, arrival)
        return arrival

    def _ask(self, ask: Callable[[Arrival], None], arrival: Arrival) -> None:
        """On the thread that asks the store. An error ends the wait for the arrival."""

        def task() -> None:
            try:
                ask(arrival)
            except Exception as error:
                arrival.decide(False, f"{type(error).__name__}: {first_line(error)}")

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="ringfa3-barriers")
            self._thread.start()
        self._tasks.put(task)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
        self._watch.end()

    def _arrive(self, arrival: Arrival) -> None:
        store = self._store()
        count = store.add(arrival.counter, ARRIVED)
        if count == self._world:
            if arrival.others:
                values = [""] * len(arrival.others)
                store.multi_set(arrival.others, values)  # type: ignore[attr-defined]
            arrival.decide(True)
            store.delete_key(arrival.counter)
        elif count > FIELD:
            arrival.gave_up = True
            arrival.decide(False)
        else:
            self._watch.add(arrival)

    def _give_up(self, arrival: Arrival) -> None:
        if arrival.decided.is_set():
            return
        store, counter = self._store(), arrival.counter
        count = store.add(counter, 0)
        # a sum alone would not show whether a rank gave up before the last one arrived
        while count < GAVE_UP and 0 < count < self._world:
            store.compare_set(counter, str(count), str(count + GAVE_UP))
            count = store.add(counter, 0)
        if not count:  # all have arrived, and the last one has deleted the counter
            store.delete_key(counter)
        passed = count < GAVE_UP
        if not passed:  # nobody will write this rank's key
            arrival.gave_up = True
            self._watch.cancel(arrival)
        arrival.decide(passed)

    def _leave(self, arrival: Arrival) -> None:
        self._give_up(arrival)
        if arrival.gave_up:
            store = self._store()
            count = store.add(arrival.counter, LEFT)
            if count // LEFT == count & FIELD:  # all that have arrived
                store.delete_key(arrival.counter)


class _Watch:
    """Waits in the store for keys of this rank, one after the other, on a thread and a connection
    of its own. The thread of `Barriers` calls all methods."""

    def __init__(self, store: Callable[[], Store]) -> None:
        self._store = store
        self._waiting: deque[Arrival] = deque()
        self._current: Arrival | None = None  # the first one, once the thread waits in the store
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended = False

    def add(self, arrival: Arrival) -> None:
        with self._changed:
            self._waiting.append(arrival)
            self._changed.notify()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, daemon=True, name="ringfa3-barriers-wait"
            )
            self._thread.start()

    def look(self, arrival: Arrival) -> None:
        """Looks for an arrival that is not the current one: that may wait for long."""
        with self._changed:
            if arrival in self._waiting and arrival is not self._current:
                store = self._store()
                if store.check([arrival.key]):
                    self._waiting.remove(arrival)
                    arrival.decide(True)
                    store.delete_key(arrival.key)

    def cancel(self, arrival: Arrival) -> None:
        """No longer waits for an arrival, whose key no other rank writes."""
        with self._changed:
            if arrival is self._current:
                arrival.decide(False)
                self._store().set(arrival.key, "")  # the thread deletes it
            elif arrival in self._waiting:
                self._waiting.remove(arrival)

    def end(self) -> None:
        """After the last arrival has passed or was cancelled."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(JOIN_S)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone: no arrival passes
            store = self._store().clone()  # type: ignore[attr-defined]
            while (arrival := self._next()) is not None:
                store.wait([arrival.key], FOREVER)
                with self._changed:
                    self._waiting.remove(arrival)
                    self._current = None
                    arrival.decide(True)
                    store.delete_key(arrival.key)  # under the lock: `cancel` does not set it again

    def _next(self) -> Arrival | None:
        with self._changed:
            while not self._waiting and not self._ended:
                self._changed.wait()
            self._current = self._waiting[0] if self._waiting else None
            return self._current
