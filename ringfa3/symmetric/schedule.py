"""The schedule of the `symmetric` transport: what the streams of one rank do in a ring call.

Data only: lists of the operations of `stream_ops`.

Forward, hop t = 0..n-1: rank r's K/V are in its KV_SHARED. Rank r copies the rows of rank r-t to
which its queries attend into a KV_RECV buffer, then attends to them. No rank forwards K/V.

Gathered forward, in a single launch: the rank copies all K/V to which its queries attend after its
own, in the order of the hops. One kernel waits for each block as it needs it. A kernel that waits
occupies the SMs. It therefore starts only when all these blocks are published: it then waits for
copies alone, which need no SM and no other rank and are queued before the kernel. So it always
ends, even while a kernel of a collective, here or on another rank, waits for a free SM.

Backward, hop t = 1..n-1: K/V of rank r-t as in the forward. Some heads of a rank's own keys may run
first, concurrently with the first copies. The others run last, concurrently with the last copies of
dK/dV. The kernel of active hop i (counting from 0) stores its float32 dK/dV in DKV_OUT[i % 2].

The owner of the block copies these dK/dV while the next kernels run. Rows that no earlier hop has
brought go into DKV_SUM. Others go into DKV_RECV and are added to DKV_SUM from there. The order of
the additions is thus the same in every run. A running kernel waits for no other rank: it starts
when its DKV_OUT slot is free, so ranks may be about two active hops apart.

Each list is also a valid serial order of its operations: if the device puts all streams into one
queue, copies and kernels no longer overlap, but nothing hangs.
"""

from __future__ import annotations

from ringfa3.planning.kv_exchange import GradReturn, KVExchange
from ringfa3.symmetric.stream_ops import (
    AddToSum,
    AttendGathered,
    AttendHop,
    Block,
    Buffer,
    BufferSlice,
    Copy,
    EndStart,
    Event,
    Operation,
    Part,
    Publish,
    Purpose,
    RecordEvent,
    ResetArrivals,
    RoundGradients,
    SetSignal,
    Signal,
    Stream,
    WaitAndReset,
    WaitEvent,
)

# Recorded on the KV stream in this call: readers of earlier calls have copied.
EARLIER_CALLS_READ = Event("earlier_calls_read", 0)


def forward(exchange: KVExchange, rank: int, parity: int) -> list[Operation]:
    """The forward call of a rank. parity: call number modulo 2, over all calls of the group."""
    call = _Builder(exchange, rank, parity, "forward")
    call.publish()
    call.start_pulls()
    call.add(AttendHop(0))
    for i, hop in enumerate(call.active_hops):
        call.attend(hop)
        call.pull(i + 2)
    call.end_forward()
    return call.operations


def gathered(exchange: KVExchange, rank: int, parity: int) -> list[Operation]:
    """The forward with one kernel for all hops. Its signals are those of `forward`."""
    call = _Builder(exchange, rank, parity, "forward")
    own = BufferSlice(rank, Buffer.KV_GATHERED, 0, 0, int(exchange.tokens[rank]))
    call.publish(own if call.active_hops else None)
    blocks = call.gather()
    if blocks:
        call.add(
            EndStart(),
            WaitEvent(Stream.COMPUTE, Event("all_published", 0)),
            AttendGathered(own, blocks),
            ResetArrivals(tuple(block.arrived for block in blocks)),
        )
    else:
        call.add(EndStart(), AttendHop(0))
    call.end_forward()
    return call.operations


def backward(exchange: KVExchange, rank: int, parity: int) -> list[Operation]:
    """The backward call of a rank; arguments as in `forward`.

    Per hop: signal our dK/dV, consume the peer's, then wait until ours are consumed. This order
    cannot deadlock even if every rank runs its operations one by one.
    """
    call = _Builder(exchange, rank, parity, "backward")
    call.publish()
    call.start_pulls()
    if call.active_hops or call.returns:
        call.add(AttendHop(0, part=Part.FIRST))
    for hop in range(1, call.world):
        if hop in call.active_hops:
            call.attend(hop, call.dkv_out(hop))
            call.signal_dkv(hop)
        if hop in call.returns:
            call.receive_dkv(call.returns[hop])
        if hop in call.active_hops:
            call.wait_until_consumed(hop)
            call.pull(call.active_hops.index(hop) + 2)
    call.finish_backward()
    return call.operations


class _Builder:
    """The operations of a call, in the order in which the host issues them.

    active_hops  hops at which this rank computes on another rank's block; the i-th uses
                 KV_RECV[i % 2]
    returns      backward: what peers return of this rank's dK/dV, by hop
    """

    def __init__(self, exchange: KVExchange, rank: int, parity: int, direction: str) -> None:
        self.exchange, self.rank, self.parity = exchange, rank, parity
        self.world, self.direction = len(exchange.tokens), direction
        self.active_hops = [
            t for t in range(1, self.world) if exchange.visible[self.owner(t), t].any()
        ]
        self.returns = {x.hop: x for x in exchange.grad_returns(rank)}
        self._to_add: GradReturn | None = None  # the return whose rows are in DKV_RECV
        self.operations: list[Operation] = []

    def owner(self, hop: int) -> int:
        return (self.rank - hop) % self.world

    def add(self, *operations: Operation) -> None:
        self.operations += operations

    def wait(self, stream: Stream, peer: int, purpose: Purpose, parity: int, what: str) -> None:
        signal = Signal(peer, self.rank, purpose, parity)
        self.add(WaitAndReset(stream, signal, f"{self.direction} {what}"))

    def set(self, stream: Stream, peer: int, purpose: Purpose, parity: int) -> None:
        self.add(SetSignal(stream, Signal(self.rank, peer, purpose, parity)))

    # K/V

    def readers(self) -> list[tuple[int, int]]:
        """(hop, rank) of the peers that copy from this rank's KV_SHARED."""
        hops = [t for t in range(1, self.world) if self.exchange.visible[self.rank, t].any()]
        return [(t, (self.rank + t) % self.world) for t in hops]

    def publish(self, gathered: BufferSlice | None = None) -> None:
        """Publishes the rank's own K/V. `gathered` as in `Publish`.

        Call n may overwrite KV_SHARED[n % 2]: in call n-2 every reader reported its copy
        (KV_CONSUMED; DKV_READY in a backward), and COMPUTE has since waited for that. The KV stream
        may overwrite KV_RECV and KV_GATHERED: it waits for `published`, recorded on COMPUTE after
        all earlier kernels and resets of arrival flags.
        """
        published = Event("published", 0)
        rows = int(self.exchange.block_rows[self.rank])
        target = BufferSlice(self.rank, Buffer.KV_SHARED, self.parity, 0, rows)
        self.add(
            Publish(target, gathered),
            RecordEvent(Stream.COMPUTE, published),
            WaitEvent(Stream.KV, published),
        )
        if not self.active_hops:
            self.add(RecordEvent(Stream.KV, EARLIER_CALLS_READ))
        for _, reader in self.readers():
            self.set(Stream.KV, reader, Purpose.KV_READY, self.parity)

    def start_pulls(self) -> None:
        self.pull(0)
        self.pull(1)
        self.add(EndStart())

    def gather(self) -> tuple[Block, ...]:
        """Waits until all blocks are published, then copies them one by one."""
        first_row, _ = self.exchange.gathered_layout(self.rank)
        blocks = []
        for hop in self.active_hops:
            self.wait_published(hop)
        if self.active_hops:
            self.add(RecordEvent(Stream.KV, Event("all_published", 0)))
        for hop in self.active_hops:
            begin, end = (int(first_row[hop]) + row for row in self.visible(hop))
            rows = BufferSlice(self.rank, Buffer.KV_GATHERED, 0, begin, end)
            blocks.append(Block(rows, Event("arrived", hop)))
            self.add(
                Copy(Stream.KV, self._source(hop), rows),
                RecordEvent(Stream.KV, blocks[-1].arrived),
            )
        return tuple(blocks)

    def visible(self, hop: int) -> tuple[int, int]:
        begin, end = self.exchange.visible[self.owner(hop), hop].tolist()
        return begin, end

    def pull(self, index: int) -> None:
        """Copies the block of the index-th active hop when it is published and its KV_RECV is free.

        Called right after the kernel of the active hop two before was issued.
        """
        if index >= len(self.active_hops):
            return
        if index >= 2:
            self.add(WaitEvent(Stream.KV, Event("attended", self.active_hops[index - 2])))
        hop = self.active_hops[index]
        self.wait_published(hop)
        self.add(
            Copy(Stream.KV, self._source(hop), self._kv_recv(hop)),
            RecordEvent(Stream.KV, Event("kv_received", hop)),
        )

    def wait_published(self, hop: int) -> None:
        self.wait(Stream.KV, self.owner(hop), Purpose.KV_READY, self.parity, f"hop {hop}: K/V of")

    def _source(self, hop: int) -> BufferSlice:
        return BufferSlice(self.owner(hop), Buffer.KV_SHARED, self.parity, *self.visible(hop))

    def _kv_recv(self, hop: int) -> BufferSlice:
        slot = self.active_hops.index(hop) % 2
        return BufferSlice(self.rank, Buffer.KV_RECV, slot, *self.visible(hop))

    def attend(self, hop: int, dkv: BufferSlice | None = None) -> None:
        self.add(
            WaitEvent(Stream.COMPUTE, Event("kv_received", hop)),
            AttendHop(hop, self._kv_recv(hop), dkv),
        )
        if dkv is not None or hop in self.active_hops[:-2]:  # another stream waits for it
            self.add(RecordEvent(Stream.COMPUTE, Event("attended", hop)))

    def wait_for_earlier_readers(self) -> None:
        """The compute stream waits for the KV stream, if it has not waited for blocks."""
        if not self.active_hops:
            self.add(WaitEvent(Stream.COMPUTE, EARLIER_CALLS_READ))

    def end_forward(self) -> None:
        """Frees KV_SHARED for the call after the next one: waits until every reader has copied it.

        First this rank signals the same to the owners that it has read. Nobody needs that earlier.
        In a backward call DKV_READY implies that the reader has copied.
        """
        self.wait_for_earlier_readers()
        for hop in self.active_hops:
            self.set(Stream.KV, self.owner(hop), Purpose.KV_CONSUMED, self.parity)
        for hop, reader in self.readers():
            what = f"hop {hop}: K/V consumed by"
            self.wait(Stream.KV, reader, Purpose.KV_CONSUMED, self.parity, what)

    # dK/dV

    def dkv_out(self, hop: int) -> BufferSlice:
        """Where the kernel of a hop stores dK/dV, once the slot's earlier rows are consumed."""
        index = self.active_hops.index(hop)
        if index >= 2:
            self.add(WaitEvent(Stream.COMPUTE, Event("dkv_consumed", self.active_hops[index - 2])))
        return BufferSlice(self.rank, Buffer.DKV_OUT, index % 2, *self.visible(hop))

    def signal_dkv(self, hop: int) -> None:
        self.add(WaitEvent(Stream.GRADIENTS, Event("attended", hop)))
        self.set(Stream.GRADIENTS, self.owner(hop), Purpose.DKV_READY, self.parity)

    def wait_until_consumed(self, hop: int) -> None:
        what = f"hop {hop}: dK/dV consumed by"
        self.wait(Stream.GRADIENTS, self.owner(hop), Purpose.DKV_CONSUMED, self.parity, what)
        if hop in self.active_hops[:-2]:
            self.add(RecordEvent(Stream.GRADIENTS, Event("dkv_consumed", hop)))

    def receive_dkv(self, here: GradReturn) -> None:
        """Copies a peer's contribution to this rank's dK/dV."""
        peer = (self.rank + here.hop) % self.world
        if here.repeated and self._to_add is not None:
            self._empty_dkv_recv(self._to_add)
        what = f"hop {here.hop}: dK/dV of"
        self.wait(Stream.GRADIENTS, peer, Purpose.DKV_READY, self.parity, what)
        for buffer, parts in ((Buffer.DKV_SUM, here.new), (Buffer.DKV_RECV, here.repeated)):
            for begin, end in parts:
                source = BufferSlice(peer, Buffer.DKV_OUT, here.active_index % 2, begin, end)
                target = BufferSlice(self.rank, buffer, 0, begin, end)
                self.add(Copy(Stream.GRADIENTS, source, target))
        self.set(Stream.GRADIENTS, peer, Purpose.DKV_CONSUMED, self.parity)
        if here.repeated:
            self._to_add = here

    def _empty_dkv_recv(self, received: GradReturn) -> None:
        """Adds what is in DKV_RECV to DKV_SUM."""
        arrived, added = Event("dkv_received", received.hop), Event("added", received.hop)
        self.add(
            RecordEvent(Stream.GRADIENTS, arrived),
            WaitEvent(Stream.COMPUTE, arrived),
            AddToSum(self._dkv_recv(received)),
            RecordEvent(Stream.COMPUTE, added),
            WaitEvent(Stream.GRADIENTS, added),
        )

    def _dkv_recv(self, received: GradReturn | None) -> tuple[BufferSlice, ...]:
        parts = () if received is None else received.repeated
        return tuple(BufferSlice(self.rank, Buffer.DKV_RECV, 0, begin, end) for begin, end in parts)

    def finish_backward(self) -> None:
        """Computes the rank's own keys, or their other heads, while the last copies run.

        DKV_OUT is free afterwards.
        """
        exchanged = Event("dkv_exchanged", 0)
        if self.active_hops or self.returns:
            self.add(
                RecordEvent(Stream.GRADIENTS, exchanged),
                AttendHop(0, part=Part.LAST),
                WaitEvent(Stream.COMPUTE, exchanged),
            )
        else:
            self.add(AttendHop(0))
        self.wait_for_earlier_readers()
        slices: tuple[BufferSlice, ...] = ()
        if self.returns:
            rows = int(self.exchange.block_rows[self.rank])
            total = BufferSlice(self.rank, Buffer.DKV_SUM, 0, 0, rows)
            slices = total, *self._dkv_recv(self._to_add)
        self.add(RoundGradients(slices))
