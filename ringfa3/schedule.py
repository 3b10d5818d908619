"""The schedule of the `symmetric` transport: what the streams of one rank do in a ring call.

Data only: lists of `operations.py`.

Forward, at hop t = 0..n-1: a rank's keys lie in its SRC; rank r copies those of rank r-t that its
queries see, whole pieces, into an IN buffer and attends to them. Nothing is forwarded.

Gathered, the forward in one launch: the rank copies all that its queries see behind its own keys,
in the order of the hops, and one kernel waits inside for each block. It holds the SMs meanwhile, so
it begins only when all these blocks are published: what it then waits for are copies, which need no
SM and nothing of another rank, and which are in their queue before it. So no kernel of a collective
that finds no SM beside it, here or on another rank, can keep it from its end.

Backward, at step t = 1..n: the same for the keys of rank r-t, its own last. The float32 dK/dV
partial of a block goes with it from rank to rank: at step t it lies in D[t % 2], where the kernel
adds to it once it is here (the first visitor stores). Rows that no later rank adds to are copied
home by their owner, which adds them to its own in the end.

The list is also an order in which all of it can run one operation after the other: if the device
puts all streams into one queue the ring loses its overlap, and nothing hangs.
"""

from __future__ import annotations

from ringfa3.movement import Movement
from ringfa3.operations import (
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


def forward(move: Movement, rank: int, parity: int) -> list[Operation]:
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


def gathered(move: Movement, rank: int, parity: int) -> list[Operation]:
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


def backward(move: Movement, rank: int, parity: int) -> list[Operation]:
    """The backward call of a rank; arguments as in `forward`."""
    call = _Call(move, rank, parity, "backward")
    call.begin()
    call.pull_two()
    world, visited = call.world, 0
    for step in range(1, world + 1):
        call.fetch_partial(step)
        if step in call.visits:
            call.attend(step, call.partial(step))
            call.pull(visited + 2)
            visited += 1
        elif step == world:
            call.add(Attend(0))
            call.collect()
        call.pass_on(step)
    call.free_partial(world - 1)
    return call.operations


class _Call:
    """Operations of a call so far.

    visits  hops at which this rank has work on another rank's block; the i-th goes to IN[i % 2]
    """

    def __init__(self, move: Movement, rank: int, parity: int, direction: str) -> None:
        self.move, self.rank, self.parity = move, rank, parity
        self.world, self.direction = len(move.rows), direction
        self.visits = [t for t in range(1, self.world) if move.seen[self.owner(t), t].any()]
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
        hops = [t for t in range(1, self.world) if self.move.seen[self.rank, t].any()]
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
        first_row, _ = self.move.gathered(self.rank)
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
        begin, end = self.move.seen[self.owner(hop), hop].tolist()
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

    def attend(self, hop: int, partial: Place | None = None) -> None:
        arrived = None if partial is None else Event("arrived", hop)
        self.add(
            Await(Stream.COMPUTE, Event("pulled", hop)),
            Attend(hop, self._landing(hop), partial, arrived),
        )
        if partial is not None or hop in self.visits[:-2]:  # a pull or the partial waits for it
            self.add(Record(Stream.COMPUTE, Event("attended", hop)))

    def await_readers(self) -> None:
        """SRC is free, for the call after the next one, when all readers have said so.

        This rank says so at the end as well: nobody waits for it before. In a backward call the
        dK/dV that come home say the same.
        """
        for hop in self.visits:
            self.set(Stream.KV, self.owner(hop), Purpose.READ, self.parity)
        for hop, reader in self.readers():
            what = f"hop {hop}: K/V taken by"
            self.take(Stream.KV, reader, Purpose.READ, self.parity, what)
        self.add(Record(Stream.KV, Event("freed", self.parity)))

    # Partials

    def on(self, owner: int, step: int) -> int:
        """Rows of the owner's partial that the next rank takes after a step, a prefix."""
        return int(self.move.rows[owner, step + 1]) if step >= self.move.first_visit[owner] else 0

    def partial(self, step: int) -> Place:
        rows = int(self.move.rows[self.owner(step), step])
        return Place(self.rank, Buffer.D, step % 2, 0, rows)

    def takers(self, step: int) -> list[int]:
        """Who copies from this rank's partial of a step: the next rank, the owner, both or none."""
        owner = self.owner(step)
        home = int(self.move.rows[owner, step]) > int(self.move.rows[owner, step + 1])
        on = [(self.rank + 1) % self.world] if self.on(owner, step) else []
        return [*on, owner] if home else on

    def free_partial(self, step: int) -> None:
        """D of a step may be written again."""
        if step >= 1:
            for taker in self.takers(step):
                what = f"hop {step}: dK/dV taken by"
                self.take(Stream.PARTIAL, taker, Purpose.TAKEN, step % 2, what)

    def fetch_partial(self, step: int) -> None:
        """Copies what the step before has left for this rank, and says when D is ready."""
        self.free_partial(step - 2)
        arrived = Record(Stream.PARTIAL, Event("arrived", step))
        before = (self.rank - 1) % self.world
        on = self.on(self.owner(step), step - 1) if 2 <= step < self.world else 0
        if on:
            self._copy_partial(before, step, (0, on), Buffer.D)
        if step < self.world:
            self.add(arrived)
        rows = self.move.rows[self.rank]
        home = (int(rows[step]), int(rows[step - 1])) if step >= 2 else (0, 0)
        if home[1] > home[0]:
            target = Buffer.D if step == self.world else Buffer.EARLY
            self._copy_partial((self.rank + step - 1) % self.world, step, home, target)
        if step == self.world:
            self.add(arrived)

    def _copy_partial(self, peer: int, step: int, rows: tuple[int, int], into: Buffer) -> None:
        """From the peer's D of the step before."""
        what = f"hop {step - 1}: dK/dV of"
        target = Place(self.rank, into, step % 2, *rows)
        if into is Buffer.EARLY:
            last = int(self.move.rows[self.rank, self.world - 1])
            target = Place(self.rank, into, 0, rows[0] - last, rows[1] - last)
        self.take(Stream.PARTIAL, peer, Purpose.SUMMED, (step - 1) % 2, what)
        source = Place(peer, Buffer.D, (step - 1) % 2, *rows)
        self.add(Copy(Stream.PARTIAL, source, target))
        self.set(Stream.PARTIAL, peer, Purpose.TAKEN, (step - 1) % 2)

    def pass_on(self, step: int) -> None:
        """After the kernel of a step its partial may be taken. After the last one D and EARLY may
        be written, by the next call."""
        if step in self.visits or step == self.world:
            self.add(Await(Stream.PARTIAL, Event("attended", step % self.world)))
        if step < self.world:
            for taker in self.takers(step):
                self.set(Stream.PARTIAL, taker, Purpose.SUMMED, step % 2)

    def collect(self) -> None:
        rows = self.move.rows[self.rank]
        last, leaving = int(rows[self.world - 1]), int(rows[1])
        places = (
            Place(self.rank, Buffer.D, self.world % 2, 0, last),
            Place(self.rank, Buffer.EARLY, 0, 0, leaving - last),
        )
        self.add(
            Await(Stream.COMPUTE, Event("arrived", self.world)),
            Collect(tuple(p for p in places if p.end)),
            Record(Stream.COMPUTE, Event("attended", 0)),
        )
