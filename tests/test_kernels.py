"""What a launch reads: device tables of a plan, and tensors that bulk copies can address."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from ringfa3 import kernels
from ringfa3.plan import Tiling, plan_local

CPU = torch.device("cpu")


class Launches:
    """Where they go, and what they read of a tiling there."""

    def __init__(self) -> None:
        self.captured, self.cuda_stream = False, 1

    def read(self, tiling: Tiling, stream: int = 1) -> kernels._Tables:
        self.cuda_stream = stream
        return kernels._tables.get(tiling, CPU, (), lambda: kernels._Tables.of(tiling, CPU))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    to = Launches()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: to.captured)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: to)
    monkeypatch.setattr(kernels, "_tables", kernels.Uploads())
    return to


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


@pytest.mark.parametrize("tokens", [1, 5])
def test_what_does_not_begin_on_16_bytes_is_copied(tokens: int) -> None:
    """Though it is contiguous; so is one token of any stride."""
    room = torch.randn(2, tokens * 2 * 64 + 1).bfloat16()
    for x in (room.view(-1)[1:-1], room[1, :-1]):
        x = x[-tokens * 128 :].view(tokens, 2, 64)
        assert x.is_contiguous()
        assert not kernels.aligned(x)
        copy = kernels.addressable(x)
        assert kernels.aligned(copy)
        assert torch.equal(copy, x)
    assert kernels.addressable(copy) is copy
