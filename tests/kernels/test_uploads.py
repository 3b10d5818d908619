"""Device tables of plans and work counters: whose they are, and how long they live."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from ringfa3.kernels import forward, uploads
from ringfa3.kernels.streams import CurrentStream
from ringfa3.planning.tiling import Tiling, plan_local

CPU = torch.device("cpu")


class Events:
    """Stands in for CUDA events. An event is its number; `log` has what happens, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def record(self, device: torch.device) -> int:
        number = sum(what == "record" for what, _ in self.log)
        self.log.append(("record", number))
        return number

    def finish(self, event: int) -> None:
        self.log.append(("finish", event))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    made = Events()
    monkeypatch.setattr(uploads, "record_event", made.record)
    monkeypatch.setattr(uploads, "finish", made.finish)
    monkeypatch.setattr(forward, "_tables", uploads.Uploads())
    return made


def on(stream: int, captured: bool = False, handle: int = 7) -> CurrentStream:
    return CurrentStream(CPU, handle, captured, 0 if captured else stream)


def read(tiling: Tiling, stream: CurrentStream) -> forward.Tables:
    return forward._tables.get(tiling, stream, (), lambda: forward.Tables.of(tiling, CPU))


def tiling() -> Tiling:
    lengths = np.array([300, 200])
    return plan_local(lengths, lengths, -1, 0).forward(128)[0]


def test_every_stream_has_tables_of_its_own(events: Events) -> None:
    """By its id: streams 1 and 2 have one handle, at different times or in two threads."""
    some = tiling()
    one, other = (read(some, on(stream)) for stream in (1, 2))
    assert one.tiles.data_ptr() != other.tiles.data_ptr()
    assert one.spans.numpy().tobytes() == other.spans.numpy().tobytes() == some.spans.tobytes()
    assert read(some, on(1, handle=8)) is one


def test_a_captured_launch_waits_for_the_upload_that_it_reads(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the first upload, of whatever stream, with an event recorded behind it."""

    def upload(*arguments: Any) -> torch.Tensor:
        events.log.append(("upload", 0))
        return uploads.upload(*arguments)

    monkeypatch.setattr(forward, "upload", upload)
    some = tiling()
    first = read(some, on(1))
    expected = [("upload", 0), ("upload", 0), ("record", 0)]
    assert events.log == expected
    read(some, on(2))
    expected += [("upload", 0), ("upload", 0)]
    for stream in (1, 2):
        assert read(some, on(stream, captured=True)) is first
    assert events.log == [*expected, ("finish", 0)]


@pytest.mark.parametrize("captured", [False, True])
def test_tables_that_a_graph_reads_are_kept(events: Events, captured: bool) -> None:
    """Others go with their plan."""
    some = tiling()
    read(some, on(1))
    gone = weakref.ref(read(some, on(1, captured)).tiles)
    del some
    gc.collect()
    assert (gone() is None) is not captured


def test_a_new_plan_cannot_be_captured(events: Events) -> None:
    """Nor a new key of a known plan."""
    some = tiling()
    first = read(some, on(8))
    with pytest.raises(
        RuntimeError, match="new plan cannot be captured in a CUDA graph: run the same call"
    ):
        read(tiling(), on(8, captured=True))
    with pytest.raises(RuntimeError, match="new plan cannot be captured"):
        forward._tables.get(some, on(8, captured=True), (1,), lambda: first)


def test_streams_without_end_keep_a_bounded_number_of_tables(events: Events) -> None:
    """The oldest go; what a graph may read stays."""
    some = tiling()
    alive = [weakref.ref(read(some, on(n)).tiles) for n in range(2 * uploads.MAX_TABLES)]
    gc.collect()
    kept = [n for n, ref in enumerate(alive) if ref() is not None]
    assert kept == [0, *range(uploads.MAX_TABLES, 2 * uploads.MAX_TABLES)]
    assert read(some, on(0, captured=True)).tiles is alive[0]()


def test_launches_of_a_stream_share_a_counter() -> None:
    """By its id. Captured launches have one each."""
    counters = uploads.Counters()
    mine = counters.get(on(1))
    assert counters.get(on(1, handle=8)) is mine
    assert counters.get(on(2)) is not mine
    captured = [counters.get(on(1, captured=True)) for _ in range(2)]
    assert all(x.item() == 0 for x in (mine, *captured))
    assert len({x.data_ptr() for x in (mine, *captured)}) == 3
    assert counters.get(on(1)) is mine


def test_a_counter_is_never_freed() -> None:
    """The allocator could give its memory to a stream with the handle of a destroyed one."""
    counters = uploads.Counters()
    first = weakref.ref(counters.get(on(0)))
    for n in range(1, 2 * uploads.MAX_TABLES):
        counters.get(on(n))
    gc.collect()
    assert counters.get(on(0)) is first()


def test_a_tile_with_spans_and_no_key_to_visit_is_refused() -> None:
    """A kernel would wait for ever for its first block. No plan makes such a tile."""
    some = tiling()
    spans = some.spans.copy()
    first = some.tiles["first_span"][0]
    spans["lo"][first] = spans["hi"][first] = 300  # row 0 of 300 sees key 300 of 300, and so on
    row0, rows = (int(some.tiles[name][0]) for name in ("row0", "rows"))
    message = rf"tile 0, rows \[{row0}, {row0 + rows}\), has spans and no key to visit"
    with pytest.raises(ValueError, match=message):
        forward.Tables.of(Tiling(some.size, some.tiles, spans, some.earlier), CPU)
