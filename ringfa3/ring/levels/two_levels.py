"""Two levels of messages: copy engines inside a host, another transport between hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from ringfa3.errors import StepError
from ringfa3.ring.p2p import Exchange, Message, Transport
from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.backend import Group, SymmetricBackend
from ringfa3.symmetric.stream_ops import (
    Buffer,
    BufferSlice,
    Event,
    Operation,
    Purpose,
    RecordEvent,
    SetSignal,
    Signal,
    Stream,
    WaitAndReset,
    WaitEvent,
)

FREE, PUBLISHED, ARRIVED = Event("free", 0), Event("published", 0), Event("arrived", 0)


class _Bytes(NamedTuple):
    """Slots of bytes that the ranks of a host publish, as `SymmetricBackend.begin` takes them."""

    slot_bytes: Mapping[Buffer, int]
    row_bytes: Mapping[Buffer, int]


class TwoLevelTransport:
    """`Transport` whose messages inside a host are copies from the memory of the sender.

    A sender publishes its rows in one of two slots of `KV_SHARED`, for even and odd launches. Each
    reader finds its part at `Message.at`. Before a sender overwrites a slot, it waits until
    all readers of the slot's last rows have copied them.

    The copies need no SM. They wait for what a peer's stream published, and that stream waits for
    no later exchange. So neither other kernels nor messages between hosts can make them hang.
    """

    def __init__(
        self,
        group: Group,
        backend: SymmetricBackend,
        mates: Sequence[int],
        between: Transport,
        meet: Callable[[], bool],
    ) -> None:
        """
        Args:
            group: the CP group.
            backend: of the ranks of this host.
            mates: these ranks, in the CP group.
            between: sends messages to other hosts.
            meet: as in `SymmetricBackend.close`, of the ranks of this host.
        """
        self.backend, self._group, self._between, self._meet = backend, group, between, meet
        self._number = {rank: number for number, rank in enumerate(mates)}
        self._size = 0  # bytes that all ranks of the group can publish
        self._readers: list[list[tuple[int, str]]] = [[], []]  # by slot: they may still copy
        self._filled: Sequence[Message] = ()  # copies write to their tensors

    def begin(self, size: int) -> None:
        """Begins a pass whose exchanges publish at most so many bytes on any rank of the group.

        Raises StepError: on all ranks, if one has no room. The group stays usable.
        """
        slots = _Bytes({Buffer.KV_SHARED: size}, {Buffer.KV_SHARED: 1})
        if size <= self._size:
            self.backend.begin(slots)
            return
        self._size = 0  # on all hosts: all ask again
        problem = ""
        try:
            self.backend.begin(slots)
        except StepError as error:
            problem = str(error).replace("of the group", "of its host")
        for rank, found in zip(self._group.ranks, self._group.gather(problem), strict=True):
            if found:
                raise StepError(f"rank {rank}: {found}")
        self._size = size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Exchange:
        """As `Transport.exchange`; the caller has waited for the exchange before."""
        (send, send_far), (receive, receive_far) = map(self._parted, (sends, receives))
        if send:
            self._publish(send[0].slot, send)
        if receive:
            self._copy(receive[0].slot, receive)
        far = self._between.exchange(send_far, receive_far) if send_far or receive_far else None
        return _TwoLevelExchange(self if receive else None, far)

    def wait_for_copies(self) -> None:
        """Later work of the compute stream waits for them. It may then take their memory, also if
        no exchange follows."""
        self._issue(WaitEvent(Stream.COMPUTE, ARRIVED))
        self._filled = ()

    def completed_before(self, call: int) -> bool:
        """As `Transport.completed_before`, of the copies."""
        return self.backend.completed_before(call)

    def abort(self) -> None:
        """As `Transport.abort`, of the copies."""
        self.backend.abandon()

    def close(self, lost: bool) -> None:
        """As `Transport.close`, of the copies."""
        self.backend.close(None if lost else self._meet)

    def _parted(self, messages: Iterable[Message]) -> tuple[list[Message], list[Message]]:
        """Those inside the host, and the others."""
        here: list[Message] = []
        far: list[Message] = []
        for message in messages:
            (here if message.peer in self._number else far).append(message)
        return here, far

    def _publish(self, slot: int, sends: Sequence[Message]) -> None:
        me, backend = self.backend.group.rank, self.backend
        if readers := self._readers[slot]:
            waits = [
                WaitAndReset(Stream.KV, Signal(reader, me, Purpose.KV_CONSUMED, slot), what)
                for reader, what in readers
            ]
            self._issue(*waits, RecordEvent(Stream.KV, FREE), WaitEvent(Stream.COMPUTE, FREE))
        published = backend.local(Buffer.KV_SHARED, slot)
        for m in sends:
            published[slice(*_span(m))].copy_(m.tensor.view(-1).view(torch.uint8))
        names = {self._number[m.peer]: f"{m.what} copied by" for m in sends}
        self._readers[slot] = list(names.items())
        ready = (Signal(me, reader, Purpose.KV_READY, slot) for reader in names)
        set_ready = [SetSignal(Stream.KV, signal) for signal in ready]
        self._issue(
            RecordEvent(Stream.COMPUTE, PUBLISHED), WaitEvent(Stream.KV, PUBLISHED), *set_ready
        )

    def _copy(self, slot: int, receives: Sequence[Message]) -> None:
        """After all earlier work of the compute stream, which may use the tensors' memory."""
        me, self._filled = self.backend.group.rank, receives
        self._issue(RecordEvent(Stream.COMPUTE, PUBLISHED), WaitEvent(Stream.KV, PUBLISHED))
        owners: dict[int, list[Message]] = {}
        for m in receives:
            owners.setdefault(self._number[m.peer], []).append(m)
        for owner, messages in owners.items():
            ready = Signal(owner, me, Purpose.KV_READY, slot)
            self._issue(WaitAndReset(Stream.KV, ready, f"{messages[0].what} of"))
            cuda_driver.issue(self._copy_call(owner, slot, m) for m in messages)
            self._issue(SetSignal(Stream.KV, Signal(me, owner, Purpose.KV_CONSUMED, slot)))
        self._issue(RecordEvent(Stream.KV, ARRIVED))

    def _copy_call(self, owner: int, slot: int, m: Message) -> cuda_driver.Call:
        backend = self.backend
        part = BufferSlice(owner, Buffer.KV_SHARED, slot, *_span(m))
        target, source = m.tensor.data_ptr(), backend.address(part)
        return cuda_driver.copy(backend.handle(Stream.KV), target, source, m.tensor.nbytes)

    def _issue(self, *operations: Operation) -> None:
        self.backend.issue(self.backend.prepare(operations, frozenset()))


def _span(m: Message) -> tuple[int, int]:
    """Bytes [begin, end) of a slot. Raises ValueError: rows would come from a wrong place."""
    if m.at is None:
        raise ValueError(f"{m.what}: no byte of a slot is known for rank {m.peer} of this host")
    return m.at, m.at + m.tensor.nbytes


class _TwoLevelExchange(NamedTuple):
    """near: transport that copies; None: there is nothing to copy. far: messages to other hosts."""

    near: TwoLevelTransport | None
    far: Exchange | None

    def wait(self) -> None:
        if self.near is not None:
            self.near.wait_for_copies()
        if self.far is not None:
            self.far.wait()
