"""What a launch reads: device tables of a plan, and tensors that bulk copies can address."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from ringfa3.build.units import UNITS
from ringfa3.kernels import launch
from ringfa3.planning.tiling import Tiling, plan_local

CPU = torch.device("cpu")


class Launches:
    """Where they go, and what they read of a tiling there."""

    def __init__(self) -> None:
        self.captured = False

    def read(self, tiling: Tiling, stream: int = 1) -> launch._Tables:
        to = launch.Stream(CPU, stream, self.captured)
        return launch._tables.get(tiling, to, (), lambda: launch._Tables.of(tiling, CPU))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    monkeypatch.setattr(launch, "_tables", launch.Uploads())
    monkeypatch.setattr(launch, "_counters", {})
    return Launches()


def tiling() -> Tiling:
    lengths = np.array([300, 200])
    return plan_local(lengths, lengths, -1, 0).forward(128)[0]


def test_every_stream_has_tables_of_its_own(launches: Launches) -> None:
    """Another stream's upload may not be over; a captured launch, which cannot upload, reads it."""
    some = tiling()
    one, other = (launches.read(some, stream) for stream in (1, 2))
    assert one.tiles.data_ptr() != other.tiles.data_ptr()
    assert one.spans.numpy().tobytes() == other.spans.numpy().tobytes() == some.spans.tobytes()
    assert launches.read(some, 1) is one
    launches.captured = True
    assert launches.read(some, 3) is one


@pytest.mark.parametrize("captured", [False, True])
def test_tables_that_a_graph_reads_are_kept(launches: Launches, captured: bool) -> None:
    """Others go with their plan."""
    some = tiling()
    launches.read(some)
    launches.captured = captured
    gone = weakref.ref(launches.read(some).tiles)
    del some
    gc.collect()
    assert (gone() is None) is not captured


def test_a_new_plan_cannot_be_captured(launches: Launches) -> None:
    launches.captured = True
    with pytest.raises(RuntimeError, match="new plan is captured: run it once before"):
        launches.read(tiling())


def test_the_first_upload_is_what_graphs_read(launches: Launches) -> None:
    """Whatever has been uploaded since, and with another key nothing."""
    some = tiling()
    first = launches.read(some, 7)
    launches.read(some, 8)
    launches.captured = True
    assert launches.read(some, 8) is first
    with pytest.raises(RuntimeError, match="new plan is captured"):
        launch._tables.get(some, launch.Stream(CPU, 8, True), (1,), lambda: first)


def test_launches_of_a_stream_share_a_counter(launches: Launches) -> None:
    """But for captured ones, which have one each."""
    here, other = (launch.Stream(CPU, stream, False) for stream in (1, 2))
    mine = launch._counter(here)
    assert launch._counter(here) is mine
    assert launch._counter(other) is not mine
    captured = here._replace(captured=True)
    others = [launch._counter(captured) for _ in range(2)]
    assert all(x.item() == 0 for x in (mine, *others))
    assert len({x.data_ptr() for x in (mine, *others)}) == 3
    assert launch._counter(here) is mine


def test_only_another_device_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the launch, and for the question which stream is current there."""
    now, said = [0], []

    @contextmanager
    def made_current(device: torch.device) -> Iterator[None]:
        before, now[0] = now[0], device.index
        said.append(device.index)
        yield
        now[0] = before

    def entry(_args: bytes, stream: int) -> int:
        return 0 if stream == now[0] + 40 else 1

    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", made_current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[0] == 1)
    monkeypatch.setattr(launch, "_handle", lambda device: device + 40)
    monkeypatch.setattr(launch, "_entry", lambda *_: entry)
    unit = UNITS[0]
    for index, expected in ((0, []), (1, [1, 1])):
        device = torch.device("cuda", index)
        stream = launch.Stream.current(device)
        assert stream == (device, index + 40, index == 1)
        launch.launch(unit, "forward", b"", stream)
        assert said == expected
    assert now == [0]
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        launch.launch(unit, "forward", b"", stream._replace(handle=0))


@pytest.mark.parametrize("tokens", [1, 5])
def test_what_does_not_begin_on_16_bytes_is_copied(tokens: int) -> None:
    """Though it is contiguous; so is one token of any stride."""
    room = torch.randn(2, tokens * 2 * 64 + 1).bfloat16()
    for x in (room.view(-1)[1:-1], room[1, :-1]):
        x = x[-tokens * 128 :].view(tokens, 2, 64)
        assert x.is_contiguous()
        assert not launch.aligned(x)
        copy, fields = launch.addressable(x)
        assert launch.aligned(copy)
        assert fields == launch.tensor3(copy)
        assert torch.equal(copy, x)
    assert launch.addressable(copy)[0] is copy
