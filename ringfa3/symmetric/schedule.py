"""The schedule of the `symmetric` transport: what the streams of one rank do in a ring call.

Data only: lists of `operations.py`.

Forward, at hop t = 0..n-1: a rank's keys lie in its SRC; rank r copies those of rank r-t that its
queries see, whole pieces, into an IN buffer and attends to them. Nothing is forwarded.

Gathered, the forward in one launch: the rank copies all that its queries see behind its own keys,
in the order of the hops, and one kernel waits inside for each block. It holds the SMs meanwhile, so
it begins only when all these blocks are published: what it then waits for are copies, which need no
SM and nothing of another rank, and which are in their queue before it. So no kernel of a collective
that finds no SM beside it, here or on another rank, can keep it from its end.

Backward, at hop t = 1..n-1: the same for the keys of rank r-t. Of its own, some heads may come
first, beside the first copies, the others come last, beside what goes home. A kernel stores
what it finds of the block's float32 dK/dV in D[i % 2], i counting the visits, and their owner
copies them home beside the next kernels: rows that are the first to come into SUM, others into
COME, from where they are added. So the sums have the same order in all runs. A kernel that
runs waits for no rank; it begins when D is free, so ranks may be about two visits apart.

The list is also an order in which all of it can run one operation after the other: if the device
puts all streams into one queue the ring loses its overlap, and nothing hangs.
"""

from __future__ import annotations

from ringfa3.planning.kv_exchange import GradReturn, KVExchange
from ringfa3.symmetric.stream_ops import (
    Add,
    Attend,
    AttendAll,
    Await,
    Block,
    Buffer,
    Clear,
    Collect,
    Copy,
    Event,
    Keep,
    Operation,
    Part,
    Place,
    Prepare,
    Publish,
    Purpose,
    Record,
    Set,
    Stream,
    Take,
    Word,
)


def forward(move: KVExchange, rank: int, parity: int) -> list[Operation]:
    """The forward call of a rank. parity: 0 and 1 in turn, over all calls of the group."""
    call = _Call(move, rank, parity, "forward")
    call.begin()
    call.pull_two()
    call.add(Attend(0))
    for i, hop in enumerate(call.visits):
        call.attend(hop)
        call.pull(i + 2)
    call.await_readers()
    return call.operations


def gathered(move: KVExchange, rank: int, parity: int) -> list[Operation]:
    """The same with one kernel for all hops; peers cannot tell which of the two a rank runs."""
    call = _Call(move, rank, parity, "forward")
    call.begin()
    blocks = call.gather()
    own = Place(rank, Buffer.ALL, 0, 0, int(move.rows[rank, 0]))
    if blocks:
        call.add(
            Keep(own),
            Prepare(),
            Await(Stream.COMPUTE, Event("opened", 0)),
            AttendAll(own, blocks),
            Clear(tuple(block.landed for block in blocks)),
        )
    else:
        call.add(Prepare(), Attend(0))
    call.await_readers()
    return call.operations


def backward(move: KVExchange, rank: int, parity: int) -> list[Operation]:
    """The backward call of a rank; arguments as in `forward`."""
    call = _Call(move, rank, parity, "backward")
    call.begin()
    call.pull_two()
    if call.visits or call.returns:
        call.add(Attend(0, part=Part.FIRST))
    for hop in range(1, call.world):
        if hop in call.visits:
            call.attend(hop, call.found(hop))
            call.tell(hop)
        if hop in call.returns:
            call.bring_home(call.returns[hop])
        if hop in call.visits:
            call.take_back(hop)
            call.pull(call.visits.index(hop) + 2)
    call.collect()
    return call.operations


class _Call:
    """Operations of a call so far.

    visits   hops at which this rank has work on another rank's block; the i-th goes to IN[i % 2]
    returns  of the dK/dV that come home in a backward
    """

    def __init__(self, move: KVExchange, rank: int, parity: int, direction: str) -> None:
        self.move, self.rank, self.parity = move, rank, parity
        self.world, self.direction = len(move.rows), direction
        self.visits = [t for t in range(1, self.world) if move.visible[self.owner(t), t].any()]
        self.returns = {x.hop: x for x in move.grad_returns(rank)}
        self._to_add: GradReturn | None = None  # what lies in COME
        self.operations: list[Operation] = []

    def owner(self, hop: int) -> int:
        return (self.rank - hop) % self.world

    def add(self, *operations: Operation) -> None:
        self.operations += operations

    def take(self, stream: Stream, peer: int, purpose: Purpose, parity: int, what: str) -> None:
        word = Word(peer, self.rank, purpose, parity)
        self.add(Take(stream, word, f"{self.direction} {what}"))

    def set(self, stream: Stream, peer: int, purpose: Purpose, parity: int) -> None:
        self.add(Set(stream, Word(self.rank, peer, purpose, parity)))

    # K/V

    def readers(self) -> list[tuple[int, int]]:
        """(hop, rank) of those that copy from this rank's SRC."""
        hops = [t for t in range(1, self.world) if self.move.visible[self.rank, t].any()]
        return [(t, (self.rank + t) % self.world) for t in hops]

    def begin(self) -> None:
        """Publishes the own K/V.

        The side stream joins behind all that the calls before left on the compute stream: IN and
        ALL are free then, and the words of their kernels are 0.
        """
        published = Event("published", 0)
        src = Place(self.rank, Buffer.SRC, self.parity, 0, int(self.move.rows[self.rank, 1]))
        self.add(
            Await(Stream.COMPUTE, Event("freed", self.parity)),
            Publish(src),
            Record(Stream.COMPUTE, published),
            Await(Stream.KV, published),
        )
        for _, reader in self.readers():
            self.set(Stream.KV, reader, Purpose.READY, self.parity)

    def pull_two(self) -> None:
        self.pull(0)
        self.pull(1)
        self.add(Prepare())

    def gather(self) -> tuple[Block, ...]:
        """Awaits the owners of all blocks, then copies one block after the other."""
        first_row, _ = self.move.gathered_layout(self.rank)
        blocks = []
        for hop in self.visits:
            self.take_ready(hop)
        if self.visits:
            self.add(Record(Stream.KV, Event("opened", 0)))
        for hop in self.visits:
            begin, end = (int(first_row[hop]) + row for row in self.seen(hop))
            blocks.append(Block(Place(self.rank, Buffer.ALL, 0, begin, end), Event("landed", hop)))
            self.add(
                Copy(Stream.KV, self._source(hop), blocks[-1].place),
                Record(Stream.KV, blocks[-1].landed),
            )
        return tuple(blocks)

    def seen(self, hop: int) -> tuple[int, int]:
        begin, end = self.move.visible[self.owner(hop), hop].tolist()
        return begin, end

    def pull(self, index: int) -> None:
        """Copies the block of the index-th visit from its owner, when IN is free and it is there.

        Called when the kernel of the visit two before has just been issued.
        """
        if index >= len(self.visits):
            return
        if index >= 2:
            self.add(Await(Stream.KV, Event("attended", self.visits[index - 2])))
        hop = self.visits[index]
        self.take_ready(hop)
        self.add(
            Copy(Stream.KV, self._source(hop), self._landing(hop)),
            Record(Stream.KV, Event("pulled", hop)),
        )

    def take_ready(self, hop: int) -> None:
        self.take(Stream.KV, self.owner(hop), Purpose.READY, self.parity, f"hop {hop}: K/V of")

    def _source(self, hop: int) -> Place:
        return Place(self.owner(hop), Buffer.SRC, self.parity, *self.seen(hop))

    def _landing(self, hop: int) -> Place:
        return Place(self.rank, Buffer.IN, self.visits.index(hop) % 2, *self.seen(hop))

    def attend(self, hop: int, found: Place | None = None) -> None:
        self.add(
            Await(Stream.COMPUTE, Event("pulled", hop)), Attend(hop, self._landing(hop), found)
        )
        if found is not None or hop in self.visits[:-2]:  # another stream waits for it
            self.add(Record(Stream.COMPUTE, Event("attended", hop)))

    def await_readers(self) -> None:
        """SRC is free, for the call after the next one, when all readers have said so.

        This rank says so at the end as well: nobody waits for it before. In a backward call the
        dK/dV that they have found say the same.
        """
        for hop in self.visits:
            self.set(Stream.KV, self.owner(hop), Purpose.READ, self.parity)
        for hop, reader in self.readers():
            what = f"hop {hop}: K/V taken by"
            self.take(Stream.KV, reader, Purpose.READ, self.parity, what)
        self.add(Record(Stream.KV, Event("freed", self.parity)))

    # dK/dV. Of each hop a rank says what it has found before it awaits what a peer has, and takes
    # that before it awaits that its own was taken: so ranks meet that do one thing after the other.

    def found(self, hop: int) -> Place:
        """D, once its owner has what it held."""
        index = self.visits.index(hop)
        if index >= 2:
            self.add(Await(Stream.COMPUTE, Event("taken", self.visits[index - 2])))
        return Place(self.rank, Buffer.D, index % 2, *self.seen(hop))

    def tell(self, hop: int) -> None:
        self.add(Await(Stream.GRADIENTS, Event("attended", hop)))
        self.set(Stream.GRADIENTS, self.owner(hop), Purpose.FOUND, self.parity)

    def take_back(self, hop: int) -> None:
        what = f"hop {hop}: dK/dV taken by"
        self.take(Stream.GRADIENTS, self.owner(hop), Purpose.TAKEN, self.parity, what)
        if hop in self.visits[:-2]:
            self.add(Record(Stream.GRADIENTS, Event("taken", hop)))

    def bring_home(self, here: GradReturn) -> None:
        """Copies what a peer has found."""
        peer = (self.rank + here.hop) % self.world
        if here.repeated and self._to_add is not None:
            self._add_up(self._to_add)
        self.take(Stream.GRADIENTS, peer, Purpose.FOUND, self.parity, f"hop {here.hop}: dK/dV of")
        for buffer, parts in ((Buffer.SUM, here.new), (Buffer.COME, here.repeated)):
            for begin, end in parts:
                source = Place(peer, Buffer.D, here.visit_index % 2, begin, end)
                target = Place(self.rank, buffer, 0, begin, end)
                self.add(Copy(Stream.GRADIENTS, source, target))
        self.set(Stream.GRADIENTS, peer, Purpose.TAKEN, self.parity)
        if here.repeated:
            self._to_add = here

    def _add_up(self, came: GradReturn) -> None:
        """Makes room in COME."""
        home, added = Event("home", came.hop), Event("added", came.hop)
        self.add(
            Record(Stream.GRADIENTS, home),
            Await(Stream.COMPUTE, home),
            Add(self._come(came)),
            Record(Stream.COMPUTE, added),
            Await(Stream.GRADIENTS, added),
        )

    def _come(self, came: GradReturn | None) -> tuple[Place, ...]:
        parts = () if came is None else came.repeated
        return tuple(Place(self.rank, Buffer.COME, 0, begin, end) for begin, end in parts)

    def collect(self) -> None:
        """The own keys, or other heads of them, beside the last copies; then D is free."""
        settled = Event("settled", 0)
        if self.visits or self.returns:
            self.add(
                Record(Stream.GRADIENTS, settled),
                Attend(0, part=Part.LAST),
                Await(Stream.COMPUTE, settled),
            )
        else:
            self.add(Attend(0))
        if self.returns:
            everything = Place(self.rank, Buffer.SUM, 0, 0, int(self.move.rows[self.rank, 1]))
            self.add(Collect((everything, *self._come(self._to_add))))
