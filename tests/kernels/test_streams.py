"""If this fails, attention runs on another stream than the user's, and reads unfinished tensors.
Which stream a launch uses, on a stand-in for the CUDA driver."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from ringfa3.build.units import UNITS
from ringfa3.kernels import launch, streams


def test_only_another_device_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the launch, and for the question which stream is current there."""
    now, switches = [0], []

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        before, now[0] = now[0], device.index
        switches.append(device.index)
        yield
        now[0] = before

    def entry(_args: bytes, stream: int) -> int:
        return 0 if stream == now[0] + 40 else 1

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0] == 1)
    monkeypatch.setattr(streams, "_handle", lambda device: device + 40)
    monkeypatch.setattr(streams, "_stream_id", lambda handle: handle + 1000)
    monkeypatch.setattr(launch, "_entry", lambda *_: entry)
    unit = UNITS[0]
    for index, expected in ((0, []), (1, [1, 1])):
        device = torch.device("cuda", index)
        stream = streams.CurrentStream.of(device)
        assert stream == (device, index + 40, index == 1, 1040 if index == 0 else 0)
        launch.launch(unit, "forward", b"", stream)
        assert switches == expected
    assert now == [0]
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        launch.launch(unit, "forward", b"", stream._replace(handle=0))


class Driver:
    """The driver's functions that streams use: ids by handle and thread, a mode per thread."""

    def __init__(self) -> None:
        self.generation: dict[int, int] = {}
        self.mode = threading.local()
        self.seen: list[int] = []

    def entry(self, name: str) -> Callable[..., int]:
        function: Callable[..., int] = getattr(self, name)
        return function

    def cuStreamGetId(self, handle: ctypes.c_void_p, found: object) -> int:  # noqa: N802
        number = handle.value or 0
        if number == 77:
            return 400
        thread = threading.get_ident() if number == 2 else 0
        found._obj.value = hash((number, thread, self.generation.get(number, 0))) % 2**64  # type: ignore[attr-defined]
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: object) -> int:  # noqa: N802
        before = getattr(self.mode, "value", 0)
        self.mode.value = mode._obj.value  # type: ignore[attr-defined]
        mode._obj.value = before  # type: ignore[attr-defined]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(streams, "_entry", made.entry)
    return made


def test_streams_are_told_apart_by_the_id_of_the_driver(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recycled handle is another stream, and handle 2 is another stream in each thread."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    handle = 40
    monkeypatch.setattr(streams, "_handle", lambda _: handle)
    first = streams.CurrentStream.of(device)
    assert streams.CurrentStream.of(device) == first
    driver.generation[40] = 1
    assert streams.CurrentStream.of(device).id != first.id
    handle = 2
    ids = [streams.CurrentStream.of(device).id]
    thread = threading.Thread(target=lambda: ids.append(streams.CurrentStream.of(device).id))
    thread.start()
    thread.join()
    assert ids[0] != ids[1]
    handle = 77
    with pytest.raises(RuntimeError, match="cuStreamGetId failed: CUDA driver error 400"):
        streams.CurrentStream.of(device)


def test_the_host_waits_for_an_event_in_relaxed_mode(driver: Driver) -> None:
    """The default mode forbids it in a capture; the mode of before returns, errors included."""
    modes: list[int] = []

    def synchronize() -> None:
        modes.append(driver.mode.value)
        raise RuntimeError("lost")

    driver.mode.value = 1
    with pytest.raises(RuntimeError, match="lost"):
        streams.finish(SimpleNamespace(synchronize=synchronize))  # type: ignore[arg-type]
    assert modes == [2]
    assert driver.mode.value == 1
