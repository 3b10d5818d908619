"""If this fails, device tables are freed too early, or never. Device tables of plans and work
counters: whose they are, and how long they live."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ringfa3 import plan_context
from ringfa3.build.units import UNITS
from ringfa3.kernels import backward, forward, uploads
from ringfa3.kernels.streams import CurrentStream
from ringfa3.planning.tile_schedule import Tiling
from ringfa3.planning.tiling import plan_local
from ringfa3.planning.work_split import split_work

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
    monkeypatch.setattr(forward, "_tables", uploads.Uploads("of a test"))
    return made


def on(stream: int, captured: bool = False, handle: int = 7) -> CurrentStream:
    return CurrentStream(CPU, handle, captured, 0 if captured else stream)


def read(tiling: Tiling, stream: CurrentStream) -> forward.Tables:
    return forward.tables(tiling, stream)


def tiling() -> Tiling:
    lengths = np.array([300, 200])
    return plan_local(lengths, lengths, -1, 0).forward(128)[0]


def at(address: int, table: npt.NDArray[Any]) -> bytes:
    return ctypes.string_at(address, table.nbytes)


def test_every_stream_has_tables_of_its_own(events: Events) -> None:
    """By its id: streams 1 and 2 have one handle, at different times or in two threads."""
    some = tiling()
    one, other = (read(some, on(stream)) for stream in (1, 2))
    assert one.memory.data_ptr() != other.memory.data_ptr()
    for tables in (one, other):
        (hop,) = tables.hops
        assert at(hop.spans, some.spans) == some.spans.tobytes()
        assert at(hop.tiles, some.tiles) == some.tiles.tobytes()
    assert read(some, on(1, handle=8)) is one


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_plan_is_uploaded_once_for_each_direction(
    events: Events, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """All hops, and a backward's heads in two calls: the tables lie at their addresses."""
    plan, made = plan_context([0, 150, 700], (1, 3)).hops, []
    to_device = uploads.to_device

    def counted(data: list[npt.NDArray[np.uint8]], device: torch.device) -> Any:
        made.append(data)
        return to_device(data, device)

    monkeypatch.setattr(uploads, "to_device", counted)
    tilings = plan.forward(128)
    found = {id(forward.tables(x, on(1))): forward.tables(x, on(1)) for x in tilings}
    (tables,) = found.values()
    for tiling, hop in zip(tilings, tables.hops, strict=True):
        assert at(hop.tiles, tiling.tiles) == tiling.tiles.tobytes()
        assert at(hop.spans, tiling.spans) == tiling.spans.tobytes()
    assert len(made) == 1

    (unit,) = (u for u in UNITS if u.name == "backward-d128-bf16")
    split = backward.Split(group=2, kv_heads=3, first_heads=1)
    host = backward.HostTables.of(plan, unit, deterministic, split, 132)
    memory = torch.from_numpy(host.packed.data)
    there = host.at(memory, memory.data_ptr())
    blocks = backward.grid_blocks(plan, unit.tile_m)
    assert at(there.blocks, blocks) == blocks.tobytes()
    assert sorted(there.hops) == [(0, 1), (0, 2), (1, 3), (2, 3)]
    for (number, heads), hop in there.hops.items():
        tiling = plan.backward(unit.tile_n, unit.tile_m, deterministic)[number]
        settings = 132 // unit.cluster, unit.head_dim, deterministic
        units = split_work(tiling, unit.tile_m, 2, heads, *settings)
        assert hop.num_work_units == len(units)
        for address, table in zip(
            hop.addresses, (units, tiling.spans, tiling.earlier), strict=True
        ):
            assert address % uploads.ALIGNMENT == 0
            assert at(address, table) == table.tobytes()


def test_a_captured_launch_waits_for_the_upload_that_it_reads(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: the first upload, of whatever stream, with an event recorded behind it."""

    to_device = uploads.to_device

    def logged(data: list[npt.NDArray[np.uint8]], device: torch.device) -> Any:
        events.log.append(("upload", 0))
        return to_device(data, device)

    monkeypatch.setattr(uploads, "to_device", logged)
    some = tiling()
    first = read(some, on(1))
    expected = [("upload", 0), ("record", 0)]
    assert events.log == expected
    read(some, on(2))
    expected += [("upload", 0)]
    for stream in (1, 2):
        assert read(some, on(stream, captured=True)) is first
    assert events.log == [*expected, ("finish", 0)]


@pytest.mark.parametrize("captured", [False, True])
def test_tables_that_a_graph_reads_are_kept(events: Events, captured: bool) -> None:
    """Others go with their plan."""
    some = tiling()
    read(some, on(1))
    gone = weakref.ref(read(some, on(1, captured)).memory)
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
    alive = [weakref.ref(read(some, on(n)).memory) for n in range(2 * uploads.MAX_TABLES)]
    gc.collect()
    kept = [n for n, ref in enumerate(alive) if ref() is not None]
    assert kept == [0, *range(uploads.MAX_TABLES, 2 * uploads.MAX_TABLES)]
    assert read(some, on(0, captured=True)).memory is alive[0]()


class Dropped(dict[Any, Any]):
    """Another thread, of one stream too many, drops its first entry as soon as it is there."""

    dropped = False

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        if not self.dropped:
            self.dropped = True
            del self[key]


def test_tables_that_another_thread_drops_are_uploaded_again(events: Events) -> None:
    tables = uploads.HostCopy(forward.HostTables.of(tiling()))
    tables.of_streams = Dropped()
    assert tables.on(on(1)) is tables.on(on(1))


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
        forward.HostTables.of(Tiling(some.size, some.tiles, spans, some.earlier))
