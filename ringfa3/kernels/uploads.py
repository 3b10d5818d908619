"""Device memory that outlives a launch: tables of plans, and work counters.

Each stream has its own copy, by stream id, so stream order protects it: a launch runs after the
upload that it reads. PyTorch's allocator knows streams by handles, which CUDA reuses, so memory of
a destroyed stream may serve another stream at once. Counters are therefore never freed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ringfa3.kernels.streams import CurrentStream, finish, record_event
from ringfa3.kernels.symbolic import current_builder
from ringfa3.planning.tile_schedule import Table

# Most tables of an owner: more than PyTorch's pools have streams. Beyond that the oldest is freed,
# which must not happen before its stream has finished.
MAX_TABLES = 256
ALIGNMENT = 16  # bytes

T = TypeVar("T")
_lock = threading.Lock()


class _First(Generic[T]):
    """The first upload of a table, which captured launches read, and the event after it."""

    def __init__(self, value: T, event: torch.cuda.Event) -> None:
        self.value = value
        self._event: torch.cuda.Event | None = event

    def finished(self) -> T:
        """The table, its upload done: replays are not ordered after the stream of the upload."""
        event = self._event  # another thread may clear it meanwhile
        if event is not None:
            finish(event)
            self._event = None
        return self.value


class Uploads(Generic[T]):
    """Tables in device memory that belong to an owner, a plan or a tiling, and die with it.

    Captured launches cannot upload. They read the first upload of any stream, which then lives as
    long as the process: the graph holds its addresses.
    """

    def __init__(self) -> None:
        self._first: weakref.WeakKeyDictionary[object, dict[tuple[object, ...], _First[T]]]
        self._first = weakref.WeakKeyDictionary()
        self._of_streams: weakref.WeakKeyDictionary[object, dict[tuple[object, ...], T]]
        self._of_streams = weakref.WeakKeyDictionary()
        self._captured: set[object] = set()

    def get(
        self, owner: object, stream: CurrentStream, key: tuple[object, ...], make: Callable[[], T]
    ) -> T:
        """The table of an owner and key on a stream; `make` uploads it the first time.

        Raises RuntimeError: the stream is captured, and no stream has an upload.
        """
        key = (stream.device, *key)
        if stream.captured:
            first = self._first.get(owner, {}).get(key)
            if first is None:
                raise RuntimeError(
                    "attention with a new plan cannot be captured in a CUDA graph: run the same "
                    "call once before the capture"
                )
            self._captured.add(owner)
            return first.finished()
        tables = self._of_streams.get(owner)
        if tables is None:
            tables = self._of_streams.setdefault(owner, {})
        stream_key = (*key, stream.id)
        table = tables.get(stream_key)
        if table is None:
            table = make()
            firsts = self._first.setdefault(owner, {})
            if key not in firsts:
                firsts.setdefault(key, _First(table, record_event(stream.device)))
            with _lock:  # threads may upload at the same time
                tables[stream_key] = table
                if len(tables) > MAX_TABLES:
                    del tables[next(iter(tables))]
        builder = current_builder()
        if builder is not None:
            builder.holds(table)
        return table

    def clear(self) -> None:
        for tables in (self._first, self._of_streams, self._captured):
            tables.clear()


class Counters:
    """Work counters of the forward: (1,) int32, 0 whenever a launch begins.

    A kernel leaves its counter at 0, so launches that run one after the other share one: those of
    one stream. A captured launch has its own, zeroed in the graph: graphs may replay on any stream.
    Each takes 512 bytes of the allocator.
    """

    def __init__(self) -> None:
        self.of_streams: dict[tuple[torch.device, int], torch.Tensor] = {}

    def get(self, stream: CurrentStream) -> torch.Tensor:
        """The counter of a launch; hold the tensor until the launch is enqueued."""
        if stream.captured:
            return torch.zeros(1, dtype=torch.int32, device=stream.device)
        key = stream.device, stream.id
        counter = self.of_streams.get(key)
        if counter is None:
            counter = torch.zeros(1, dtype=torch.int32, device=stream.device)
            counter = self.of_streams.setdefault(key, counter)
        builder = current_builder()
        if builder is not None:
            builder.holds(counter)
        return counter

    def clear(self) -> None:
        self.of_streams.clear()


class Uploaded(NamedTuple):
    """Tables in one piece of device memory.

    addresses  of the first byte of each table; 0 for an empty one
    """

    memory: torch.Tensor
    addresses: tuple[int, ...]


def upload(device: torch.device, *tables: Table | npt.NDArray[np.int32]) -> Uploaded:
    """Copies tables to device memory, all at once.

    The copy reads pinned memory, so it does not block the host. Each table begins at a multiple of
    `ALIGNMENT` bytes, which vectorised loads need.
    """
    ends = list(accumulate((-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tables), initial=0))
    packed = np.zeros(ends[-1], np.uint8)
    for table, begin in zip(tables, ends, strict=False):
        packed[begin : begin + table.nbytes] = np.frombuffer(table.tobytes(), np.uint8)
    source = torch.from_numpy(packed)
    if device.type == "cuda":  # PyTorch reuses pinned memory only after the copy that reads it
        source = source.pin_memory()
    memory = source.to(device, non_blocking=True)
    at = memory.data_ptr()
    found = (at + begin if x.nbytes else 0 for x, begin in zip(tables, ends, strict=False))
    return Uploaded(memory, tuple(found))
