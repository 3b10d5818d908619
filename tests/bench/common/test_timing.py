"""If this fails, ratios in the tables depend on the drift of a GPU's clock. Paired timing, with a
stopwatch that records its calls; statistics."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from ringfa3.bench.common import timing
from ringfa3.bench.common.communicator import Communicator
from ringfa3.bench.common.timing import Call, OneByOne, Paired, Reading, WallClock, compare, paired


class Recorder:
    """A stopwatch by which A's calls take 2 ms and B's 5 ms; `log`: (call, calls, head start)."""

    asynchronous = True
    sample_seconds = 0.020
    comm = Communicator()

    def __init__(self) -> None:
        self.seconds = {"a": 2e-3, "b": 5e-3}
        self.log: list[tuple[str, int, float]] = []
        self.waits: list[int] = []  # samples started before each wait
        self.calls: list[str] = []

    def call(self, name: str) -> Call:
        return lambda: self.calls.append(name)

    def sample(self, call: Call, calls: int, head_start: float) -> Reading:
        before = len(self.calls)
        for _ in range(calls):
            call()
        (name,) = set(self.calls[before:])
        self.log.append((name, calls, head_start))
        return lambda: self.seconds[name]

    def wait(self) -> None:
        self.waits.append(len(self.log))


def test_samples_are_taken_in_turn_without_a_pause() -> None:
    recorder = Recorder()
    times = paired(recorder.call("a"), recorder.call("b"), 12, recorder)
    timed = recorder.log[2:]  # without the two that estimate the time of a call
    assert [name for name, _, _ in timed] == ["a", "b"] * 13
    assert {calls for _, calls, _ in timed} == {4}  # 20 ms at the slower one's 5 ms
    assert recorder.waits[-2:] == [2, 28]
    assert times.a == [2e-3] * 12
    assert times.b == [5e-3] * 12
    assert times.calls == 4


def test_everything_is_warm_before_the_first_sample() -> None:
    recorder = Recorder()
    paired(recorder.call("a"), recorder.call("b"), 10, recorder)
    assert recorder.calls[:10] == ["a"] * 2 + ["b"] * 2 + ["a"] * 3 + ["b"] * 3


def test_long_calls_are_not_repeated_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls to warm up, of which the second is timed, then the pairs."""
    recorder = Recorder()
    recorder.seconds = {"a": 0.2, "b": 0.3}
    second = timing._second_call
    monkeypatch.setattr(timing, "_second_call", lambda *given: (second(*given)[0] + 0.2, 1e-3))
    times = paired(recorder.call("a"), recorder.call("b"), 10, recorder)
    assert len(times.a) == len(times.b) == 10
    assert recorder.calls.count("a") == recorder.calls.count("b") == 2 + 10
    assert times.host == (1e-3, 1e-3)
    assert {lead for _, _, lead in recorder.log} == {0.0}


def test_a_slow_host_gets_a_head_start(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr("ringfa3.bench.common.timing._host_seconds", lambda call, watch: 3e-3)
    times = paired(recorder.call("a"), recorder.call("b"), 10, recorder)
    assert {lead for name, _, lead in recorder.log[2:] if name == "a"} == {2 * 4 * 1e-3}
    assert {lead for name, _, lead in recorder.log[2:] if name == "b"} == {0.0}
    assert times.host_bound == (True, False)


def test_a_sample_has_at_least_one_call_and_not_too_many() -> None:
    slow, fast = Recorder(), Recorder()
    slow.seconds, fast.seconds = {"a": 1.0, "b": 2.0}, {"a": 1e-7, "b": 1e-7}
    assert paired(slow.call("a"), slow.call("b"), 10, slow).calls == 1
    assert paired(fast.call("a"), fast.call("b"), 10, fast).calls == 200


def test_the_wall_clock_measures_what_passes() -> None:
    times = paired(lambda: time.sleep(0.01), lambda: time.sleep(0.02), 10, WallClock())
    assert min(times.a) >= 0.01
    assert min(times.b) >= 0.02
    assert times.host_bound == (False, False)


def drifting(rng: np.random.Generator, ratio: float, pairs: int) -> Paired:
    """Times of A and B under a drift of 30% that both share, with 2% of noise of their own."""
    drift = np.linspace(1.0, 1.3, pairs)
    a, b = (drift * rng.lognormal(0, 0.02, pairs) for _ in range(2))
    return Paired(a.tolist(), (ratio * b).tolist(), 1, (0, 0))


def test_one_by_one_each_call_starts_on_idle_devices_and_ends_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Ranks(Communicator):
        def barrier(self) -> None:
            log.append("barrier")

    def call() -> None:
        log.append("call")
        time.sleep(0.01)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("idle"))
    reading = OneByOne(Ranks()).sample(call, 2, head_start=0.0)
    assert log == 2 * ["idle", "barrier", "idle", "call", "idle"]
    assert 0.01 <= reading() < 0.1


def test_a_known_ratio_is_recovered_under_drift() -> None:
    times = drifting(np.random.default_rng(7), 1.07, 200)
    found = compare(times.a, times.b)
    assert found.median == pytest.approx(1.07, abs=0.01)
    assert found.low < 1.07 < found.high
    assert found.high - found.low < 0.02


def test_the_interval_covers_the_ratio_about_as_often_as_it_says() -> None:
    """Of 300 runs of 12 pairs at least 90%; a bootstrap of few pairs is a little narrow."""
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        times = drifting(rng, 0.93, 12)
        found = compare(times.a, times.b)
        covered += found.low <= 0.93 <= found.high
        assert found.low <= found.median <= found.high
    assert 270 <= covered < 300


def test_above_one_means_that_a_is_faster() -> None:
    assert compare([1.0] * 10, [2.0] * 10).median == 2.0
