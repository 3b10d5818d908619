"""Ring calls over `symmetric` in CUDA graphs. This is all of the support; it is not extended.

Outside graphs, a call's side streams may still run during the next call, whose operations follow on
the same streams. A graph has no order with streams outside, and a replay asks no host. So a call in
a graph forks its side streams from the compute stream and joins them to it at its end. From the
first capture on, calls outside graphs do so too.

The calls of a rank then run one after the other, in whatever graphs they are and however often
those are replayed. Parities may follow each other in any order that is the same on all ranks.

A graph has no order of issue: the device may run its operations one by one, in any order that
events allow. Peers must set what a rank waits for in every such order:

* A rank sets all its KV_READY before it waits for any signal: the gradients' stream forks after
  them.
* A kernel starts when all its blocks have arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringfa3.symmetric import cuda_driver
from ringfa3.symmetric.ipc_memory import IpcMemory
from ringfa3.symmetric.signals import AWAITED, PASSED, Signals
from ringfa3.symmetric.stream_ops import (
    AttendGathered,
    BufferSpec,
    Event,
    Operation,
    RecordEvent,
    Stream,
    WaitAndReset,
    WaitEvent,
)

FORKED = Event("forked", 0)
JOINED = Event("joined", 0)
REMEDY = (
    "before the capture, run a call with the same plan, shapes, strides and settings in the same "
    "direction"
)


def fork_join(operations: Sequence[Operation], captured: bool) -> list[Operation]:
    """A call's operations, with forks and a join. captured: the device may reorder them."""
    result: list[Operation] = []
    forked = not any(x.stream is Stream.GRADIENTS for x in operations)
    for operation in operations:
        waits = isinstance(operation, WaitAndReset) or operation.stream is Stream.GRADIENTS
        if not forked and waits:
            result += _after(Stream.GRADIENTS, Stream.KV, FORKED)
            forked = True
        if captured and isinstance(operation, AttendGathered):
            result += _after(Stream.COMPUTE, Stream.KV, Event("gathered", 0))
        result.append(operation)
    # the gradients' stream has joined the compute stream already
    return [*result, *_after(Stream.COMPUTE, Stream.KV, JOINED)]


def _after(stream: Stream, other: Stream, event: Event) -> Iterable[Operation]:
    """`stream` waits for all that `other` has so far."""
    return RecordEvent(other, event), WaitEvent(stream, event)


class ReplayWaits:
    """The waits of captured calls, as their streams report them.

    The graph's owner launches a replay, and the host posts nothing to the watchdog. So in a graph a
    stream writes the number of a wait to its counter AWAITED before the wait, and 1 to PASSED after
    a few waits. A number means the same wait in all graphs of a group.
    """

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._names: list[str] = []  # of the waits, from number 1 on
        self._number: dict[str, int] = {}
        self._last = [0] * len(Stream)

    def awaiting(self, stream: Stream, what: str) -> cuda_driver.MemoryOp:
        """To be issued before a wait."""
        if what not in self._number:
            self._names.append(what)
            self._number[what] = len(self._names)
        return cuda_driver.write(self._signals.counter(stream, AWAITED), self._number[what])

    def passed_ops(self, stream: Stream) -> list[cuda_driver.MemoryOp]:
        """To be issued after waits that all have different numbers."""
        return [
            cuda_driver.write(self._signals.counter(stream, which), value)
            for which, value in {PASSED: 1, AWAITED: 0}.items()
        ]

    def poll(self) -> tuple[bool, Sequence[str]]:
        """Whether a stream has passed a wait since the last poll, and what streams wait for."""
        passed = [self._signals.take_passed(stream) for stream in Stream]
        last, self._last = self._last, [self._signals.awaited(stream) for stream in Stream]
        waits = [self._names[number - 1] for number in self._last if number]
        return any(passed) or self._last != last, waits


def capture_error(memory: IpcMemory | None, spec: BufferSpec, known: bool) -> ValueError | None:
    """Why a call cannot be captured now, the same on all ranks; None if it can.

    A capture runs nothing on the device and can allocate nothing: an earlier call
    with the same signature must have done that.

    memory: of the group; None if it has not tried the transport. spec: of the call. known: a call
    with the same signature has been accepted.
    """
    if memory is None:
        return _not_yet("no call of this group has used 'symmetric' yet")
    if not known:
        return _not_yet("no call of this plan with these settings has run yet")
    if not memory.holds(spec.slot_bytes):
        return _not_yet("the group's shared memory is too small for it")
    return None


def _not_yet(reason: str) -> ValueError:
    return ValueError(
        f"a ring call over 'symmetric' cannot be captured in a CUDA graph: {reason}: {REMEDY}"
    )
