"""If this fails, a hung ring is not reported, or the wrong peer is named. The watchdog over
streams: its messages, their time and their receiver."""

from __future__ import annotations

import time

from ringfa3.errors import timed_out
from ringfa3.symmetric.watchdog import Watchdog


class Counts(dict[str, int]):
    """Numbers of waits that are over, by stream."""

    def reached(self, stream: str, count: int) -> bool:
        return self.get(stream, 0) >= count


def until(happens: object) -> None:
    while not happens():  # type: ignore[operator]
        time.sleep(0.01)


def test_progress_on_any_stream_restarts_the_timeout() -> None:
    """Then it calls lost once, and release until all waits are over."""
    messages: list[str] = []
    released: list[float] = []
    over = Counts()
    watchdog = Watchdog(
        lambda: 0.6,
        over.reached,
        lambda: None,
        messages.append,
        lambda: released.append(time.monotonic()),
    )
    watchdog.post("kv", ["hop 0", "hop 1", "hop 2"])
    watchdog.post("kv", ["hop 3"])
    watchdog.post("partial", ["dK/dV"])
    for count in (1, 2, 3):
        time.sleep(0.4)
        over["kv"] = count
        assert messages == []
    until(lambda: len(released) >= 3)
    assert messages == [timed_out("hop 3; dK/dV", 0.6)]
    over.update(kv=4, partial=1)
    until(lambda: not any(waits.ahead for waits in watchdog._streams.values()))
    count = len(released)
    time.sleep(0.3)
    assert len(released) == count


def test_it_reports_another_ranks_failure_at_once() -> None:
    messages: list[str] = []
    watchdog = Watchdog(
        lambda: 60.0,
        Counts().reached,
        lambda: "rank 2: disk on fire",
        messages.append,
        lambda: None,
    )
    watchdog.post("kv", ["backward hop 2: K/V of rank 3"])
    until(lambda: messages)
    assert messages == ["backward hop 2: K/V of rank 3: aborted: rank 2: disk on fire"]


def test_a_timeout_that_changes_holds_for_waits_under_way() -> None:
    """As `dist.distributed_c10d._set_pg_timeout` changes a group's."""
    messages: list[str] = []
    limits = [60.0]
    watchdog = Watchdog(
        lambda: limits[-1], Counts().reached, lambda: None, messages.append, lambda: None
    )
    watchdog.post("kv", ["hop 1"])
    time.sleep(0.4)
    assert messages == []
    limits.append(0.2)
    until(lambda: messages)
    assert messages == [timed_out("hop 1", 0.2)]


def test_after_give_up_it_only_releases() -> None:
    messages: list[str] = []
    released: list[bool] = []
    over = Counts()
    watchdog = Watchdog(
        lambda: 0.1,
        over.reached,
        lambda: "rank 2: disk on fire",
        messages.append,
        lambda: released.append(True),
    )
    watchdog.give_up()
    watchdog.post("kv", ["hop 1"])
    until(lambda: len(released) >= 2)
    assert messages == []
    over["kv"] = 1


class GraphWaits:
    """The waits of a stream in graphs, for a test to change."""

    def __init__(self) -> None:
        self.passed, self.awaited = False, [""]

    def poll(self) -> tuple[bool, list[str]]:
        passed, self.passed = self.passed, False
        return passed, [x for x in self.awaited if x]


def test_it_polls_the_waits_of_graphs() -> None:
    """Without waits no time runs. A stream that passes the same wait again and again is not stuck,
    and graphs that make progress keep posted waits from timing out."""
    messages: list[str] = []
    released: list[bool] = []
    over, graphs = Counts(), GraphWaits()
    watchdog = Watchdog(
        lambda: 0.6, over.reached, lambda: None, messages.append, lambda: released.append(True)
    )
    watchdog.poll_graphs(graphs.poll)
    time.sleep(0.9)
    graphs.awaited = ["hop 1"]
    watchdog.post("kv", ["hop 2"])
    for _ in range(5):
        time.sleep(0.3)
        graphs.passed = True
    assert messages == []
    until(lambda: released)
    assert messages == [timed_out("hop 2; hop 1", 0.6)]
    graphs.awaited, over["kv"] = [""], 1
    time.sleep(0.3)
    count = len(released)
    time.sleep(0.3)
    assert len(released) == count
    graphs.awaited = ["hop 3"]  # of a replay after the loss: it is released
    until(lambda: len(released) > count)
    assert len(messages) == 1
    watchdog.end()
    assert not watchdog.is_alive()
