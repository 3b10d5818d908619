"""What the streams of one rank do in a ring call over peers' memory, as data.

A stream runs its operations in the order in which the host issues them. Streams of one rank
synchronise by events, ranks by signals. A signal is a flag, 0 or 1, in a 32-bit word: one sender
sets it, one receiver waits for it and resets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

import torch

from ringfa3.kernels.reference import accum_dtype
from ringfa3.planning.context_plan import ContextPlan


class Stream(IntEnum):
    """COMPUTE: the caller's stream, where all kernels run. KV, GRADIENTS: copies that run
    concurrently."""

    COMPUTE = 0
    KV = 1
    GRADIENTS = 2


class Buffer(IntEnum):
    """One rank's memory for ring calls. Peers read KV_SHARED and DKV_OUT.

    KV_SHARED    the rank's own K/V
    KV_RECV      K/V of one peer
    DKV_OUT      the rank's contribution to a peer's dK/dV
    DKV_SUM      sum of the peers' contributions to the rank's own dK/dV
    DKV_RECV     contributions that are yet to be added to DKV_SUM
    KV_GATHERED  own K/V, then the rows of all peers' K/V to which the rank's queries attend. It
                 shares its memory with KV_RECV, DKV_SUM and DKV_RECV
    """

    KV_SHARED = 0
    KV_RECV = 1
    DKV_OUT = 2
    DKV_SUM = 3
    DKV_RECV = 4
    KV_GATHERED = 5


class Purpose(IntEnum):
    """What a signal means to its receiver.

    KV_READY      the sender's K/V are in its KV_SHARED
    KV_CONSUMED   the sender has copied from the receiver's KV_SHARED
    DKV_READY     the receiver's dK/dV are in the sender's DKV_OUT
    DKV_CONSUMED  the sender has copied from the receiver's DKV_OUT
    """

    KV_READY = 0
    KV_CONSUMED = 1
    DKV_READY = 2
    DKV_CONSUMED = 3


class Signal(NamedTuple):
    sender: int
    receiver: int
    purpose: Purpose
    parity: int  # of the call


class Event(NamedTuple):
    """A point of a stream that another stream of the same rank waits for."""

    name: str
    number: int


class BufferSlice(NamedTuple):
    """Rows [begin, end) of a buffer."""

    rank: int
    buffer: Buffer
    slot: int  # 0 or 1; 0 for DKV_SUM, DKV_RECV and KV_GATHERED
    begin: int
    end: int


class Slots(Protocol):
    """Bytes that a slot of each buffer must hold, and bytes of its rows."""

    @property
    def slot_bytes(self) -> Mapping[Buffer, int]: ...

    @property
    def row_bytes(self) -> Mapping[Buffer, int]: ...


class BufferSpec:
    """`Slots` of the calls of one plan, pass type and shape of keys.

    row        shape of a buffer's row: (2, hk, d), K and V or dK and dV
    rows       that a slot of each buffer must hold
    dtypes     of the same buffers
    row_bytes  of the same buffers
    """

    def __init__(self, plan: ContextPlan, pass_type: str, k: torch.Tensor) -> None:
        """pass_type: "forward", "gathered" or "backward"; k: (tokens, hk, d), or a "meta"
        tensor."""
        self.row = (2, *k.shape[1:])
        most = plan.kv_exchange.max_rows
        if pass_type == "gathered":
            self.rows = {Buffer.KV_SHARED: most.published, Buffer.KV_GATHERED: most.gathered}
        else:
            self.rows = {Buffer.KV_SHARED: most.published, Buffer.KV_RECV: most.published}
        self.dtypes = dict.fromkeys(self.rows, k.dtype)
        if pass_type == "backward":
            self.rows |= {
                Buffer.DKV_OUT: most.published,
                Buffer.DKV_SUM: most.published,
                Buffer.DKV_RECV: most.returned,
            }
            floats = (Buffer.DKV_OUT, Buffer.DKV_SUM, Buffer.DKV_RECV)
            self.dtypes |= dict.fromkeys(floats, accum_dtype(k.dtype))
        numbers = 2 * k.shape[1] * k.shape[2]
        self.row_bytes = {b: numbers * dtype.itemsize for b, dtype in self.dtypes.items()}

    @cached_property
    def slot_bytes(self) -> dict[Buffer, int]:
        """Bytes that a slot of each buffer must hold."""
        return {buffer: rows * self.row_bytes[buffer] for buffer, rows in self.rows.items()}


@dataclass(frozen=True)
class RecordEvent:
    stream: Stream
    event: Event


@dataclass(frozen=True)
class WaitEvent:
    """Waits for the latest record of the event that was issued; not at all if there is none."""

    stream: Stream
    event: Event


@dataclass(frozen=True)
class SetSignal:
    stream: Stream
    signal: Signal


@dataclass(frozen=True)
class WaitAndReset:
    """Waits until the signal is 1 and sets it to 0.

    what  for error messages: "backward hop 2: K/V of" its sender
    """

    stream: Stream
    signal: Signal
    what: str


@dataclass(frozen=True)
class Copy:
    stream: Stream
    source: BufferSlice
    target: BufferSlice


@dataclass(frozen=True)
class Publish:
    """Copies the rank's own K/V rows to which peers attend into its KV_SHARED.

    gathered  in its KV_GATHERED: where all of its own K/V are copied, too
    """

    target: BufferSlice
    gathered: BufferSlice | None = None
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class EndStart:
    """Separates what `RingPass.start` issues from what `RingPass.run` issues."""

    stream: Stream = Stream.COMPUTE


class Part(IntEnum):
    """KV heads of a rank's own keys. FIRST: those that run before the hops; LAST: the others, which
    run after them; ALL: all at once."""

    ALL = 0
    FIRST = 1
    LAST = 2


@dataclass(frozen=True)
class AttendHop:
    """The kernel of one hop.

    kv    K/V of a peer; None for the rank's own
    dkv   backward, with `kv`: where the kernel stores dK/dV
    part  without `kv`: the KV heads that it computes
    """

    hop: int
    kv: BufferSlice | None = None
    dkv: BufferSlice | None = None
    part: Part = Part.ALL
    stream: Stream = Stream.COMPUTE


class Block(NamedTuple):
    """K/V rows of a peer, and the event of their arrival."""

    rows: BufferSlice
    arrived: Event


@dataclass(frozen=True)
class AttendGathered:
    """One kernel over the rank's own K/V and all blocks.

    The kernel itself waits for each block before it first reads it: the event sets the block's
    arrival flag. The kernel occupies the SMs meanwhile.
    """

    own: BufferSlice
    blocks: tuple[Block, ...]
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class ResetArrivals:
    """Sets the arrival flags for which a kernel has waited to 0."""

    events: tuple[Event, ...]
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class AddToSum:
    """Adds received dK/dV rows to the same rows of DKV_SUM."""

    slices: tuple[BufferSlice, ...]
    stream: Stream = Stream.COMPUTE


@dataclass(frozen=True)
class RoundGradients:
    """Rounds the rank's dK/dV to the dtype of K: its own, plus the slices in order.

    slices  all of DKV_SUM, then slices of DKV_RECV; empty if no peer returns any
    """

    slices: tuple[BufferSlice, ...]
    stream: Stream = Stream.COMPUTE


# Operations on the caller's tensors
Work: TypeAlias = Publish | AttendHop | AttendGathered | AddToSum | RoundGradients
Operation: TypeAlias = (
    RecordEvent | WaitEvent | SetSignal | WaitAndReset | Copy | EndStart | ResetArrivals | Work
)
