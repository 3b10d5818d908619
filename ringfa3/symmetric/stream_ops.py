"""What the streams of one rank do in a ring call over peers' memory, as data.

Operations of one stream run in the order in which the host issues them, and streams meet only
where a list of operations says so: at events inside a rank, at words between ranks. A word is 0 or
1; one sender sets it, one receiver awaits it and resets it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias


class Stream(IntEnum):
    """compute: kernels, and all that the caller does; kv, gradients: copies on the side."""

    COMPUTE = 0
    KV = 1
    GRADIENTS = 2


class Buffer(IntEnum):
    """src: a rank's own K/V for its peers; in: K/V of a peer; all: its own K/V and those of all
    peers that it sees; d: what a rank finds of a peer's dK/dV, for that peer; sum: what peers have
    found of a rank's own, added up; come: what has come home and is to be added to that. `all` lies
    in the memory of in, sum and come."""

    SRC = 0
    IN = 1
    D = 2
    SUM = 3
    COME = 4
    ALL = 5


class Purpose(IntEnum):
    """ready: the sender's K/V lie in its SRC; read: the sender has copied the receiver's SRC.
    found: the receiver's dK/dV lie in the sender's D; taken: the sender has copied them."""

    READY = 0
    READ = 1
    FOUND = 2
    TAKEN = 3


class Word(NamedTuple):
    sender: int
    receiver: int
    purpose: Purpose
    parity: int  # of the call


class Event(NamedTuple):
    """A point of a stream that another stream of the same rank waits for."""

    name: str
    number: int


class Place(NamedTuple):
    """Rows [begin, end) of a buffer."""

    rank: int
    buffer: Buffer
    slot: int  # one of two, 0 for SUM, COME and ALL
    begin: int
    end: int


@dataclass(frozen=True)
class Record:
    stream: Stream
    event: Event


@dataclass(frozen=True)
class Await:
    """The latest record of the event that was issued before; an event never recorded is past."""

    stream: Stream
    event: Event


@dataclass(frozen=True)
class Set:
    stream: Stream
    word: Word


@dataclass(frozen=True)
class Take:
    """Awaits the word and resets it.

    what  for error messages: "backward hop 2: K/V of" its sender
    """

    stream: Stream
    word: Word
    what: str


@dataclass(frozen=True)
class Copy:
    stream: Stream
    source: Place
    target: Place


@dataclass(frozen=True)
class Publish:
    """The rank's travelling K/V rows go into its SRC."""

    place: Place
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class Keep:
    """All of the rank's own K/V go where those of its peers will lie, for a kernel over both."""

    place: Place
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class Prepare:
    """What the caller computes before its first hop, beside the first transfers."""

    stream: Stream = Stream.COMPUTE


class Part(IntEnum):
    """Of the KV heads of a rank's own keys. FIRST: those of `first_heads`, before the hops; LAST:
    the others, behind them; ALL: all at once."""

    ALL = 0
    FIRST = 1
    LAST = 2


@dataclass(frozen=True)
class Attend:
    """The kernel of a hop, on the local K/V or those in `kv`.

    found  backward, but for the own keys: where it stores their dK/dV
    part   of the KV heads, if these are the own keys
    """

    hop: int
    kv: Place | None = None
    found: Place | None = None
    part: Part = Part.ALL
    stream: Stream = Stream.COMPUTE


class Block(NamedTuple):
    """Rows of a peer, which are there from an event on."""

    place: Place
    landed: Event


@dataclass(frozen=True)
class AttendAll:
    """One kernel over the own K/V and all blocks. It waits for each block itself, by a word that
    the event sets, before it first reads of it; until then it holds the SMs."""

    own: Place
    blocks: tuple[Block, ...]
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class Clear:
    """The words of events that a kernel has awaited become 0 again."""

    events: tuple[Event, ...]
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class Add:
    """Rows that have come home are added to those of the same number in `SUM`."""

    places: tuple[Place, ...]
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class Collect:
    """The owner adds rows of places, in order, to its own dK/dV."""

    places: tuple[Place, ...]
    stream: Stream = Stream.COMPUTE


Work: TypeAlias = Publish | Keep | Attend | AttendAll | Add | Collect  # of the caller
Operation: TypeAlias = Record | Await | Set | Take | Copy | Prepare | Clear | Work
