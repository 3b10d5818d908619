"""Device memory that outlives a launch: tables of plans, and work counters.

Each stream has its own copy, by stream id, so stream order protects it: a launch runs after the
upload that it reads. PyTorch's allocator knows streams by handles, which CUDA reuses, so memory of
a destroyed stream may serve another stream at once. Counters are therefore never freed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

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
T_co = TypeVar("T_co", covariant=True)
_lock = threading.Lock()


class HostTables(Protocol, Generic[T_co]):
    """Tables on the host, as they will lie in device memory."""

    @property
    def packed(self) -> Packed:
        """Their bytes."""

    def at(self, memory: torch.Tensor | None, begin: int) -> T_co:
        """The tables in a copy of the bytes that begins at an address; None: a symbolic one."""


class DeviceCopy(Generic[T]):
    """Tables in device memory.

    event: after the upload, for a copy that captures may read.
    """

    def __init__(
        self, host: HostTables[T], memory: torch.Tensor, event: torch.cuda.Event | None
    ) -> None:
        self.memory, self._host, self._event = memory, host, event

    @cached_property
    def tables(self) -> T:
        return self._host.at(self.memory, self.memory.data_ptr())

    def finished(self) -> T:
        """The tables, the upload done: replays are not ordered after the stream of the upload."""
        event = self._event  # another thread may clear it meanwhile
        if event is not None:
            finish(event)
            self._event = None
        return self.tables


class HostCopy(Generic[T]):
    """Tables of an owner and key, and their copies in device memory by stream.

    The host holds as many bytes as a stream, as long as the owner lives: further streams upload
    them, and a plan that is pickled takes them along.

    first       copies that captured launches read, by device
    of_streams  copies by device and stream id
    """

    def __init__(self, host: HostTables[T]) -> None:
        self.host = host
        self.first: dict[torch.device, DeviceCopy[T]] = {}
        self.of_streams: dict[tuple[torch.device, int], DeviceCopy[T]] = {}

    def on(self, stream: CurrentStream) -> DeviceCopy[T]:
        """The copy of a stream, which the first call uploads."""
        key = stream.device, stream.id
        while (found := self.of_streams.get(key)) is None:  # other threads may drop it again
            upload((self,), stream)
        return found


def upload(tables: Iterable[HostCopy[Any]], stream: CurrentStream) -> None:
    """Uploads those tables that a stream does not have, by one copy from pinned memory."""
    device, id = stream.device, stream.id
    missing = [x for x in dict.fromkeys(tables) if (device, id) not in x.of_streams]
    if not missing:
        return
    event = None
    parts = to_device([x.host.packed.data for x in missing], device)
    for table, part in zip(missing, parts, strict=True):
        if event is None and device not in table.first:
            event = record_event(device)
        made = DeviceCopy(table.host, part, event)
        table.first.setdefault(device, made)
        with _lock:  # threads may upload at the same time
            table.of_streams[device, id] = made
            if len(table.of_streams) > MAX_TABLES:
                del table.of_streams[next(iter(table.of_streams))]


class TableRef:
    """Tables that a schedule reads: of an owner and key of the `Uploads` with a name.

    A process that unpickles them has them, too, for calls that it runs without the schedule.
    """

    def __init__(
        self, name: str, owner: object, key: tuple[object, ...], copy: HostCopy[Any]
    ) -> None:
        self.name, self.owner, self.key, self.copy = name, owner, key, copy

    def __getstate__(self) -> tuple[object, ...]:
        return self.name, self.owner, self.key, self.copy.host

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.name, self.owner, self.key, host = state
        tables = _registry[self.name]
        self.copy = tables.host_tables(self.owner, self.key, lambda: host)


class Uploads(Generic[T]):
    """Tables in device memory that belong to an owner, a plan or a tiling, and die with it.

    Captured launches cannot upload. They read the first upload of any stream, which then lives as
    long as the process: the graph holds its addresses.
    """

    def __init__(self, name: str) -> None:
        """name: by which schedules find these tables in any process."""
        self._name = name
        self._of_owners: weakref.WeakKeyDictionary[object, dict[tuple[object, ...], HostCopy[T]]]
        self._of_owners = weakref.WeakKeyDictionary()
        self._captured: set[object] = set()
        _registry[name] = self

    def get(
        self,
        owner: object,
        stream: CurrentStream,
        key: tuple[object, ...],
        make: Callable[[], HostTables[T]],
    ) -> T:
        """The tables of an owner and key on a stream, which are made and uploaded the first time.

        While a schedule is built, nothing is uploaded, and their addresses are symbolic.

        Raises RuntimeError: the stream is captured, and no stream has an upload.
        """
        if stream.captured:
            return self._of_capture(owner, stream.device, key)
        copy = self.host_tables(owner, key, make)
        builder = current_builder()
        if builder is None:
            return copy.on(stream).tables
        return copy.host.at(None, builder.table(TableRef(self._name, owner, key, copy)))

    def host_tables(
        self, owner: object, key: tuple[object, ...], make: Callable[[], HostTables[T]]
    ) -> HostCopy[T]:
        of_owner = self._of_owners.get(owner)
        if of_owner is None:
            of_owner = self._of_owners.setdefault(owner, {})
        found = of_owner.get(key)
        if found is None:
            found = of_owner.setdefault(key, HostCopy(make()))
        return found

    def _of_capture(self, owner: object, device: torch.device, key: tuple[object, ...]) -> T:
        copy = self._of_owners.get(owner, {}).get(key)
        first = None if copy is None else copy.first.get(device)
        if first is None:
            raise RuntimeError(
                "attention with a new plan cannot be captured in a CUDA graph: run the same "
                "call once before the capture"
            )
        self._captured.add(owner)
        return first.finished()

    def clear(self) -> None:
        self._of_owners.clear()
        self._captured.clear()


_registry: dict[str, Uploads[Any]] = {}


def to_device(
    arrays: Sequence[npt.NDArray[np.uint8]], device: torch.device
) -> Sequence[torch.Tensor]:
    """Copies in one piece of device memory, of arrays whose sizes are multiples of `ALIGNMENT`. It
    reads pinned memory, so it does not block the host."""
    launcher = launchers.get(device.type)
    if launcher is not None:
        return launcher(arrays, -1 if device.index is None else device.index)
    source = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda" and len(source):
        source = source.pin_memory()  # PyTorch reuses it only after the copy that reads it
    memory = source.to(device, non_blocking=True, copy=True)
    return torch.split(memory, [len(x) for x in arrays])


# The same in C++, while its library is loaded, by type of device.
launchers: dict[str, Callable[[Sequence[npt.NDArray[np.uint8]], int], Sequence[torch.Tensor]]] = {}


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
        return counter

    def clear(self) -> None:
        self.of_streams.clear()


class Uploaded(NamedTuple):
    """Tables in one piece of device memory.

    addresses  of the first byte of each table; 0 for an empty one
    """

    memory: torch.Tensor | None
    addresses: tuple[int, ...]


class Packed:
    """`HostTables`: bytes of tables, one after the other.

    Each table begins at a multiple of `ALIGNMENT` bytes, which vectorised loads need.
    """

    def __init__(self, *tables: Table | npt.NDArray[np.integer[Any]]) -> None:
        ends = list(accumulate((-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tables), initial=0))
        self.data = np.zeros(ends[-1], np.uint8)
        for table, begin in zip(tables, ends, strict=False):
            self.data[begin : begin + table.nbytes] = np.frombuffer(table.tobytes(), np.uint8)
        found = zip(tables, ends, strict=False)
        self._begins = tuple(begin if x.nbytes else None for x, begin in found)

    @property
    def packed(self) -> Packed:
        return self

    def addresses(self, begin: int) -> tuple[int, ...]:
        """Of each table in a copy that begins there; 0 for an empty one."""
        return tuple(0 if x is None else begin + x for x in self._begins)

    def at(self, memory: torch.Tensor | None, begin: int) -> Uploaded:
        return Uploaded(memory, self.addresses(begin))
